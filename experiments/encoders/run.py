"""Encoders trained from random weights with the labels: LML, binary and two-way losses, on texts and on images.

python -m experiments.encoders.run --data FOLDER [--tasks texts images] [--minutes 9] [--workers 4]

Texts: GoEmotions, a transformer. Images: CIFAR-100, a small ResNet; the label set of an image is its class and its
superclass. For each loss the learning rate is chosen on validation rows with the first seed, then all seeds are
trained and measured on the test rows: with all training labels, and with half of them hidden.
"""

from __future__ import annotations

import contextlib
import functools
import json
import lzma
import multiprocessing
import shutil
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments import cifar, common
from lastlayer.data import LabelData, split_rows

HERE = Path(__file__).parent
LOSSES = ("lml", "binary", "two_way")
TASKS = ("texts", "images")
RATES = {"texts": (3e-4, 1e-3), "images": (2e-3, 6e-3)}
METRICS = ("precision@1", "recall@3", "ndcg@3", "map", "micro_f1", "macro_f1")
SIZES = {"texts": {"words": 8000, "width": 256, "layers": 4}, "images": {"width": 48}}
TINY = {"texts": {"words": 200, "width": 16, "layers": 1}, "images": {"width": 4}}


@functools.lru_cache(maxsize=1)
def texts(folder: Path | None, rows: int) -> dict[str, LabelData]:
    """GoEmotions in its official parts; without a folder, tiny rows of the same form."""
    if folder is None:
        return _tiny_texts()
    home = folder / "goemotions" if (folder / "goemotions").is_dir() else folder
    names = (home / "emotions.txt").read_text("utf-8").split()
    out = {}
    for part, file in (("train", "train"), ("valid", "dev"), ("test", "test")):
        packed, plain = home / f"{file}.tsv.xz", home / f"{file}.tsv"
        raw = lzma.decompress(packed.read_bytes()) if packed.exists() else plain.read_bytes()
        lines = [line.split("\t") for line in raw.decode("utf-8").split("\n") if line][: rows or None]
        lists = [[names[int(label)] for label in line[1].split(",")] for line in lines]
        out[part] = LabelData.from_lists(lists, label_names=names, texts=[line[0] for line in lines])
    return out


def _tiny_texts() -> dict[str, LabelData]:
    rng, names = np.random.default_rng(0), [f"label{i}" for i in range(5)]
    out = {}
    for part, n in (("train", 96), ("valid", 32), ("test", 32)):
        lists = [[names[i] for i in rng.choice(5, rng.integers(1, 3), replace=False)] for _ in range(n)]
        words = [
            [*(f"sign of {name}" for name in row), *(f"word{rng.integers(40)}" for _ in range(4))] for row in lists
        ]
        out[part] = LabelData.from_lists(lists, label_names=names, texts=[" ".join(row) for row in words])
    return out


@functools.lru_cache(maxsize=1)
def images(folder: Path | None, rows: int) -> dict[str, LabelData]:
    """CIFAR-100 with class and superclass as labels; a tenth of the training rows is for validation."""
    if folder is None:
        raw, names = cifar.tiny(), {}
    else:
        home = folder / "cifar100" if (folder / "cifar100").is_dir() else folder
        raw, names = cifar.load(home), names_of(home)
    fine = names.get("fine") or [f"class {i}" for i in range(100)]
    coarse = names.get("coarse") or [f"group {i}" for i in range(20)]
    out = {}
    for part in ("train", "test"):
        take = np.random.default_rng(0).permutation(len(raw[f"{part}_x"]))[: rows or None]
        lists = [[fine[int(raw[f"{part}_fine"][i])], coarse[int(raw[f"{part}_coarse"][i])]] for i in take]
        pixels = raw[f"{part}_x"][take].reshape(len(take), -1)
        out[part] = LabelData.from_lists(lists, label_names=[*fine, *coarse], features=pixels)
    train, valid = split_rows(out["train"], [0.9, 0.1], seed=1234, stratify=False)
    return {"train": train, "valid": valid, "test": out["test"]}


def names_of(folder: Path) -> dict[str, list[str]]:
    """The names of classes and superclasses, told apart; empty where there is no such file."""
    path = folder / "names.json"
    found = json.loads(path.read_text()) if path.exists() else {"fine": [], "coarse": []}
    return {"fine": found["fine"], "coarse": [f"group: {name}" for name in found["coarse"]]}


def train_one(
    task: str, loss: str, keep: float, rate: float, seed: int, data: Path | None, options: dict[str, Any]
) -> common.Row:
    """Train one network in a folder that is removed afterwards, and return its numbers."""
    from experiments.encoders.networks import SmallResNet, TorchTransformer, save_bert
    from lastlayer.train import Config, train

    torch.set_num_threads(options["threads"])
    torch.manual_seed(seed)
    parts = (texts if task == "texts" else images)(data, options["rows"])
    place = Path(tempfile.mkdtemp())
    settings: dict[str, Any] = {
        "loss": loss, "epochs": options["epochs"][task], "batch_size": options["batch"], "lr": rate, "head_rate": 1.0,
        "weight_decay": 0.05, "clip_norm": 1.0, "seed": seed, "bootstrap": 0, "at": (1, 3), "monitor": "ndcg@3",
        "keep": keep, "labels": "complete" if keep == 1 else "incomplete",
        "accelerator": "gpu" if options["device"] == "cuda" else "cpu",
        "precision": "bf16" if options["device"] == "cuda" else "32",
    }  # fmt: skip
    sizes, encoder, library = options["sizes"][task], None, f"torch {torch.__version__}"
    try:
        if task == "images":
            encoder = SmallResNet(**sizes)
        else:
            try:
                library = save_bert(place / "bert", parts["train"].texts or [], **sizes)
                settings |= {"encoder": str(place / "bert"), "scratch": True, "max_length": 64}
            except (ImportError, RuntimeError, AttributeError) as error:
                print(f"without transformers ({error}): torch's own transformer", flush=True)
                encoder = TorchTransformer(parts["train"].texts or [], **sizes)
        started = time.perf_counter()
        run = train(parts, Config(**settings), place / "run", encoder=encoder)
        seconds, found = time.perf_counter() - started, run.metrics()
        best = max(line["ndcg@3"] or 0.0 for line in run.history())
        row = {"task": task, "loss": loss, "keep": keep, "rate": rate, "seed": seed, "library": library}
        row |= {"valid": round(best, 5), "best_epoch": found["best_epoch"], "seconds": round(seconds, 1)}
        return row | {name: round(found["metrics"][name]["value"] or 0.0, 5) for name in METRICS}
    finally:
        shutil.rmtree(place, ignore_errors=True)


def chosen(rows: list[common.Row], task: str) -> dict[str, float]:
    """The rate of each loss: the best on validation rows with complete labels and the first seed."""
    tried = [row for row in rows if row["task"] == task and row["keep"] == 1 and row["seed"] == 0]
    best: dict[str, common.Row] = {}
    for row in tried:
        if row["loss"] not in best or row["valid"] > best[row["loss"]]["valid"]:
            best[row["loss"]] = row
    return {loss: row["rate"] for loss, row in best.items()}


def tables(rows: Any) -> dict[str, str]:
    """The tables of the README: the chosen rate of each loss, mean and deviation over the seeds."""
    out = {}
    for task in TASKS:
        rates = chosen(list(rows), task)
        for keep, name in ((1.0, "complete"), (0.5, "half")):
            kept = [
                row
                for row in rows
                if row["task"] == task and row["keep"] == keep and row["rate"] == rates.get(row["loss"])
            ]
            out[f"{task} {name}"] = common.columns(kept, "loss", METRICS, order=LOSSES)
        shown = ", ".join(f"{loss} {rates[loss]:g}" for loss in LOSSES if loss in rates)
        out[f"{task} rates"] = f"Rates chosen on validation rows: {shown}." if shown else "(not run)"
    return out


def main(argv: list[str] | None = None) -> None:
    """Train what is missing in the results file."""
    made = common.parser(__doc__, HERE / "results/results.json")
    made.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    made.add_argument("--losses", nargs="+", default=list(LOSSES))
    made.add_argument("--minutes", type=float, default=9.0, help="start no network after this time")
    made.add_argument("--workers", type=int, default=0, help="networks at a time (default: 4 on a GPU, else 1)")
    made.add_argument("--rows", type=int, default=0, help="take only so many rows of each part")
    made.add_argument("--text-epochs", type=int, default=8)
    made.add_argument("--image-epochs", type=int, default=20)
    made.add_argument("--batch-size", type=int, default=256)
    made.add_argument("--tiny", action="store_true", help="tiny networks, to try the script on a CPU")
    arguments = made.parse_args(argv)
    if common.finish(arguments, tables):
        return
    if arguments.data is None and not arguments.smoke:
        made.error("--data must name the folder of the data; the README says how to get it.")
    end, small = time.monotonic() + 60 * arguments.minutes, arguments.smoke or arguments.tiny
    workers = arguments.workers or (4 if arguments.device == "cuda" else 1)
    options = {
        "device": arguments.device,
        "rows": arguments.rows,
        "threads": 3 if arguments.device == "cuda" else 1,
        "batch": 32 if arguments.smoke else arguments.batch_size,
        "sizes": TINY if small else SIZES,
        "epochs": {"texts": 1, "images": 1}
        if arguments.smoke
        else {"texts": arguments.text_epochs, "images": arguments.image_epochs},
    }
    seeds = 1 if arguments.smoke else arguments.seeds
    data, results = None if arguments.smoke else arguments.data, common.Results(arguments.out)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn) if workers > 1 else contextlib.nullcontext() as pool:

        def go(settings: list[tuple[str, str, float, float, int]]) -> None:
            names = ("task", "loss", "keep", "rate", "seed")
            jobs = [(*s, data, options) for s in settings if results.missing(**dict(zip(names, s, strict=True)))]
            common.run_all(train_one, jobs, results, pool, end)

        for task in arguments.tasks:
            rates = RATES[task][:1] if arguments.smoke else RATES[task]
            go([(task, loss, 1.0, rate, 0) for loss in arguments.losses for rate in rates])
        found = {task: chosen(results.rows, task) for task in arguments.tasks}
        for keep, first in ((1.0, 1), (0.5, 0)):
            for task in arguments.tasks:
                pairs = [(loss, found[task][loss]) for loss in arguments.losses if loss in found[task]]
                go([(task, loss, keep, rate, seed) for seed in range(first, seeds) for loss, rate in pairs])
    for name, body in tables(results.rows).items():
        print(f"\n{name}\n{body}")


if __name__ == "__main__":
    main()
