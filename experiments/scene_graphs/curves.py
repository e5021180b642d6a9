"""Training and validation recall after each epoch (figures 5 and 6 of the LML paper).

    python -m experiments.scene_graphs.curves --data VRD --seeds 5 --workers 5

Each loss is taken per pair (its predicates and "no relation") and per image (all pairs and predicates). The
first 500 training images are held out, as in the choice of settings; 500 of the others stand for the training images.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import lastlayer as ll
from experiments import common
from experiments.scene_graphs import data, run
from experiments.scene_graphs.data import Batch, Graphs
from experiments.scene_graphs.network import RelationNetwork

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "curves.json"
K = 20  # relations of an image, as in the figures
LOSSES: dict[str, Callable[[Tensor, Batch], Tensor]] = {
    "softmax, pair": run.pair_softmax,
    "truncated entropy, pair": lambda x, b: ll.truncated_entropy_loss(x, b.one_each, 2, reduction="sum"),
    "LML, pair": lambda x, b: ll.lml_loss(x, b.one_each, 1, reduction="sum"),
    "softmax, image": run.image_softmax,
    "truncated entropy, image": lambda x, b: run.truncated(x, b, K),
    "LML, image": lambda x, b: run.lml(x, b, K),
}
PARTS = ("train", "valid")
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)


def ranking(loss: str) -> Callable[[Tensor], Tensor]:
    """Return how the scores of a network are ranked: as its loss has trained them."""
    if loss == "LML, pair":
        return lambda scores: ll.lml(scores, 1)[:, :-1]
    return run.pair_probabilities if loss.endswith("pair") else run.relation_scores


@torch.no_grad()
def recall(graphs: Graphs, images: np.ndarray, network: RelationNetwork, loss: str, device: str) -> list[float]:
    """Return the recall with one relation per pair at 20, 50 and 100, then that with any number."""
    network.eval()
    found: dict[str, list[Tensor]] = {mode: [] for mode in run.MODES}
    for part in data.chunks(graphs, images, 100_000):
        batch = run.on(device, data.batch_of(graphs, part, np.random.default_rng(0)))
        scores = ranking(loss)(network(batch))
        for mode, parts in found.items():
            best = ll.decode_graph(scores, batch.pairs, max(run.CUTS), constrained=mode == "", ptr=batch.ptr)
            parts.append(best.index)
    network.train()
    boxes, labels = torch.from_numpy(graphs.boxes).to(device), torch.from_numpy(graphs.labels).to(device)
    target = torch.from_numpy(graphs.padded_relations(images)).to(device)
    values = [
        ll.graph_recall_at_k(torch.cat(parts), target, run.CUTS, boxes=boxes, labels=labels) for parts in found.values()
    ]
    return [round(v, 5) for value in values for v in value.tolist()]


def work(job: tuple[dict[str, Any], Any]) -> list[common.Row]:
    """Train one network and measure it after each epoch; one row per epoch and part."""
    setting, arguments = job
    torch.set_num_threads(1)
    torch.manual_seed(setting["seed"])
    rng = np.random.default_rng(setting["seed"])
    start = time.time()
    graphs = run.loaded(None if arguments.smoke else arguments.data)
    images, held = run.parts(graphs, "valid", arguments.held_out)
    seen = {"train": images[: len(held)], "valid": held}
    network = run.network_for(graphs, images, arguments)
    parameters = list(network.parameters())
    optimiser = torch.optim.AdamW(parameters, setting["lr"], weight_decay=arguments.weight_decay)
    per_epoch = -(-len(images) // arguments.batch)
    steps = setting["epochs"] * per_epoch
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, setting["lr"], total_steps=steps + 1, pct_start=0.1)
    network.train()
    curves: dict[str, list[list[float]]] = {part: [] for part in PARTS}
    for _ in range(setting["epochs"]):
        for part in np.array_split(rng.permutation(images), per_epoch):
            batch = run.on(arguments.device, data.batch_of(graphs, part, rng, arguments.most_pairs))
            loss = LOSSES[setting["loss"]](network(batch), batch) / max(1, batch.labels.shape[0])
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 5.0)
            optimiser.step()
            schedule.step()
        for name, some in seen.items():
            curves[name].append(recall(graphs, some, network, setting["loss"], arguments.device))
    seconds = round(time.time() - start, 1)
    return [setting | {"part": name, "recall": curve, "seconds": seconds} for name, curve in curves.items()]


def chosen(rows: Sequence[common.Row]) -> list[common.Row]:
    """Return the rows with the rate that is chosen for their loss."""
    rates = {loss: best_rate(rows, loss) for loss in {row["loss"] for row in rows}}
    return [row for row in rows if row["lr"] == rates[row["loss"]]]


def tables(rows: Sequence[common.Row]) -> dict[str, str]:
    """Recall after the last epoch, and after the epoch that is best on the held-out images."""
    rows = sorted(chosen(rows), key=lambda row: list(LOSSES).index(row["loss"]))
    heads = [f"{mode} {cut}" for mode in run.MODES.values() for cut in run.CUTS]
    made = {}
    for part, title in (("train", "training"), ("valid", "held-out")):
        long = [
            {"loss": f"{row['loss']} (lr {row['lr']:g})", "column": head, "value": value}
            for row in rows
            if row["part"] == part
            for head, value in zip(heads, row["recall"][-1], strict=True)
        ]
        long.sort(key=lambda row: heads.index(row["column"]))
        order = list(dict.fromkeys(f"{row['loss']} (lr {row['lr']:g})" for row in rows))
        long.sort(key=lambda row: order.index(row["loss"]))
        made[f"curves {title}"] = common.table(long, "loss", "column", "value", digits=1)
    return made


def draw(rows: Sequence[common.Row], path: Path) -> None:
    """Recall at 20 against the epoch: training and held-out images, one relation per pair and any number."""
    import matplotlib.pyplot as plt

    rows = chosen(rows)
    drawn, axes = plt.subplots(2, 2, figsize=(9.5, 6.5), sharex=True, layout="constrained")
    colours = {"softmax": "#444444", "truncated entropy": "#e08e0b", "LML": "#1b6ca8"}
    for line, (mode, title) in enumerate(run.MODES.items()):
        for axis, (part, words) in zip(axes[line], (("train", "training"), ("valid", "held-out")), strict=True):
            for loss in LOSSES:
                name, unit = loss.split(", ")
                seeds = [
                    np.array(r["recall"])[:, 3 * (mode == "u")] for r in rows if (r["loss"], r["part"]) == (loss, part)
                ]
                if not seeds:
                    continue
                all_seeds = 100 * np.stack(seeds)
                at = np.arange(1, all_seeds.shape[1] + 1)
                style = "--" if unit == "pair" else "-"
                words_of = f"{name} per {unit}"
                axis.plot(at, all_seeds.mean(0), style, color=colours[name], label=words_of)
                axis.fill_between(at, all_seeds.min(0), all_seeds.max(0), color=colours[name], alpha=0.15, linewidth=0)
            axis.set(title=f"{title}, {words} images", ylabel="recall at 20 (%)")
            axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("epoch")
    drawn.legend(*axes[0][0].get_legend_handles_labels(), fontsize=9, ncols=3, loc="outside lower center")
    common.save(drawn, path)


def main(argv: list[str] | None = None) -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--data", type=Path, help="folder of vrd.npz")
    made.add_argument("--out", type=Path, default=RESULTS)
    made.add_argument("--seeds", type=int, default=5)
    made.add_argument("--epochs", type=int, default=12)
    made.add_argument("--lr", type=float, nargs="+", default=list(RATES))
    made.add_argument("--device", default="cpu")
    made.add_argument("--workers", type=int, default=1)
    made.add_argument("--minutes", type=float, default=1e9, help="start no network after this time")
    made.add_argument("--figure", type=Path, help="only draw the curves from the results, to this file")
    made.add_argument("--smoke", action="store_true", help="seconds, on tiny data made on the fly")
    arguments = made.parse_args(argv)
    if arguments.figure:
        draw(common.Results(arguments.out).rows, arguments.figure)
        return
    arguments.batch, arguments.hidden, arguments.dropout, arguments.weight_decay = 64, 256, 0.1, 0.01
    arguments.held_out, arguments.most_pairs = 500, 1024
    if arguments.smoke:
        arguments.held_out, arguments.hidden, arguments.most_pairs, arguments.epochs = 10, 16, 12, 1
    elif arguments.data is None:
        made.error("--data is needed: the folder of vrd.npz (or --smoke)")
    results = common.Results(arguments.out)
    end = time.time() + 60 * arguments.minutes
    setting = {"epochs": arguments.epochs, "seed": 0}
    grid = [setting | {"loss": loss, "lr": lr} for lr in arguments.lr for loss in LOSSES]
    train(grid, arguments, results, end)
    chosen = [{"epochs": arguments.epochs, "loss": loss, "lr": best_rate(results.rows, loss)} for loss in LOSSES]
    train([s | {"seed": seed} for seed in range(1, arguments.seeds) for s in chosen], arguments, results, end)


def train(settings: list[dict[str, Any]], arguments: Any, results: common.Results, end: float) -> None:
    """Add the rows of the settings that are missing; start nothing after `end`."""

    def jobs() -> Iterator[tuple[dict[str, Any], Any]]:
        return ((s, arguments) for s in settings if results.missing(**s))

    def add(rows: list[common.Row]) -> None:
        results.extend(rows)
        print(*(rows[0][name] for name in ("loss", "lr", "seed", "seconds")), rows[1]["recall"][-1], flush=True)

    if arguments.workers == 1:
        for rows in map(work, jobs()):
            add(rows)
        return
    with multiprocessing.get_context("spawn").Pool(arguments.workers) as pool:
        for rows in pool.imap_unordered(work, list(jobs())):
            add(rows)
            if time.time() > end:
                return


def best_rate(rows: Sequence[common.Row], loss: str) -> float:
    """Return the rate with the best recall on the held-out images after the last epoch, mean of the six, first seed."""
    some = [row for row in rows if (row["loss"], row["part"], row["seed"]) == (loss, "valid", 0)]
    return float(max(some, key=lambda row: float(np.mean(row["recall"][-1])))["lr"])


if __name__ == "__main__":
    main()
