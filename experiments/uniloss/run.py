"""Losses made from a metric (UniLoss, Liu et al. 2020) beside the usual ones: average precision, accuracy, recall.

    python -m experiments.uniloss.run --data FOLDER [--tasks zero eight yeast mouse accuracy] [--workers 2]

For each task and loss the learning rate is chosen on held-out training rows (one run per rate), then the network is
trained with each seed and measured once on the test rows. On images, batch size and number of anchors vary as well.
"""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lastlayer as ll
from experiments import cifar, common

HERE = Path(__file__).parent
CLASSES = tuple(range(0, 100, 10))  # of CIFAR-100: a CIFAR-10-like subset, among them mouse (50)
BATCH, ANCHORS = 128, 16
Loss = Callable[[Tensor, Tensor, int], Tensor]  # logits, target, anchors
Job = tuple[common.Row, float, Path | None, str]  # setting, learning rate, folder, device


class Rows(NamedTuple):
    """Inputs and targets of a part of the data."""

    x: Tensor
    target: Tensor


class Task(NamedTuple):
    """What is learnt, and how it is measured."""

    metric: Callable[[Tensor, Tensor], Tensor]
    losses: dict[str, Loss]
    network: Callable[[dict[str, Rows]], nn.Module]
    epochs: int
    rates: tuple[float, ...]


def average_precision(scores: Tensor, target: Tensor) -> Tensor:
    return ll.mean_average_precision(scores, target, per="class")


def accuracy(scores: Tensor, target: Tensor) -> Tensor:
    return ll.top_k_accuracy(scores, target, 1)


def recall(scores: Tensor, target: Tensor) -> Tensor:
    return ll.recall_at_k(scores, target, 5)


def balanced(x: Tensor, target: Tensor, anchors: int) -> Tensor:
    """Binary cross-entropy with positives nine times as heavy, as there are nine times as many negatives."""
    return F.binary_cross_entropy_with_logits(x, target, pos_weight=x.new_tensor(9.0))


RANKING: dict[str, Loss] = {  # of one score per row; those over the batch take it as one row
    "binary": lambda x, target, anchors: ll.binary_loss(x, target),
    "binary, balanced": balanced,
    "two-way over the batch": lambda x, target, anchors: ll.two_way_loss(x, target, per="class"),
    "WARP over the batch": lambda x, target, anchors: ll.warp_loss(x.T, target.T),
    "LML over the batch": lambda x, target, anchors: ll.lml_loss(x.T, target.T, target.sum(0)),
    "UniLoss": lambda x, target, anchors: ll.metric_surrogate_loss(x.T, target.T, "average_precision", anchors=anchors),
}
CLASSIFYING: dict[str, Loss] = {
    "cross-entropy": lambda x, target, anchors: F.cross_entropy(x, target),
    "smooth SVM, k = 1": lambda x, target, anchors: ll.smooth_topk_svm_loss(x, target, 1),
    "UniLoss": lambda x, target, anchors: ll.metric_surrogate_loss(x, target, "accuracy", anchors=anchors),
}
FINDING: dict[str, Loss] = {
    "binary": lambda x, target, anchors: ll.binary_loss(x, target),
    "multi-hot softmax": lambda x, target, anchors: ll.multihot_softmax_loss(x, target),
    "two-way": lambda x, target, anchors: ll.two_way_loss(x, target),
    "truncated entropy, k = 5": lambda x, target, anchors: ll.truncated_entropy_loss(x, target, 5),
    "LML, k = 5": lambda x, target, anchors: ll.lml_loss(x, target, 5),
    "UniLoss": lambda x, target, anchors: ll.metric_surrogate_loss(x, target, "recall_at_5", anchors=anchors),
}


def perceptron(parts: dict[str, Rows]) -> nn.Module:
    """The published network of the digits: two hidden layers of 500 and 300."""
    x, target = parts["train"]
    outputs = target.shape[-1]
    return nn.Sequential(
        nn.Linear(x.shape[-1], 500), nn.ReLU(), nn.Linear(500, 300), nn.ReLU(), nn.Linear(300, outputs)
    )


def residual(parts: dict[str, Rows]) -> nn.Module:
    """The small residual network of the noisy CIFAR-100 experiment, half as wide."""
    target = parts["train"].target
    width = 32 if len(target) > 1000 else 4
    return nn.Sequential(cifar.resnet(width), nn.Linear(6 * width, 1 if target.ndim == 2 else len(CLASSES)))


SMALL: tuple[float, ...] = (1e-4, 3e-4, 1e-3, 3e-3)  # learning rates to choose from
LARGE: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
TASKS = {
    "zero": Task(average_precision, RANKING, perceptron, 30, SMALL),
    "eight": Task(average_precision, RANKING, perceptron, 30, SMALL),
    "mouse": Task(average_precision, RANKING, residual, 15, LARGE),
    "accuracy": Task(accuracy, CLASSIFYING, residual, 15, LARGE),
    "yeast": Task(recall, FINDING, perceptron, 30, SMALL),
}


def parted(x: Tensor, target: Tensor, test: float) -> dict[str, Rows]:
    """Split off test rows, then a fifth of the others as held-out rows; the same for all seeds."""
    order = torch.from_numpy(np.random.default_rng(1234).permutation(len(x)))
    cuts = int(test * len(x)), int((test + (1 - test) / 5) * len(x))
    places = {"test": order[: cuts[0]], "valid": order[cuts[0] : cuts[1]], "train": order[cuts[1] :]}
    return {part: Rows(x[rows], target[rows]) for part, rows in places.items()}


def digits(folder: Path, positive: int) -> dict[str, Rows]:
    """scikit-learn's 1,797 digits of 8 x 8, from the package or from digits.npz: one digit against the others."""
    saved = folder / "digits.npz"
    if saved.exists():
        with np.load(saved) as arrays:
            pixels, digit = arrays["x"], arrays["y"]
    else:
        from sklearn.datasets import load_digits

        pixels, digit = load_digits(return_X_y=True)
    x = torch.from_numpy(pixels.astype(np.float32) / 16)
    return parted(x, torch.from_numpy(digit == positive).float().unsqueeze(1), 1 / 3)


def yeast(folder: Path) -> dict[str, Rows]:
    """Mulan's yeast with its split; a fifth of the training rows is held out."""
    with np.load(folder / "yeast.npz") as loaded:
        arrays = dict(loaded)

    def rows(part: str) -> Rows:
        target = np.zeros(arrays[f"{part}_Y_shape"], np.float32)
        lengths = np.diff(arrays[f"{part}_Y_indptr"])
        target[np.repeat(np.arange(len(target)), lengths), arrays[f"{part}_Y_indices"]] = 1
        return Rows(torch.from_numpy(arrays[f"{part}_X"]), torch.from_numpy(target))

    return {**parted(*rows("train"), 0.0), "test": rows("test")}


def images(folder: Path) -> dict[str, Rows]:
    """Ten classes of CIFAR-100 with its test images; a tenth of the training images is held out."""
    small = folder / "ten_classes.npz"
    raw = dict(np.load(small)) if small.exists() else ten_classes(cifar.load(folder))
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (cifar.MEAN, cifar.STD))

    def rows(part: str) -> Rows:
        x = (torch.from_numpy(raw[f"{part}_x"]).permute(0, 3, 1, 2).float() - mean) / std
        return Rows(x, torch.from_numpy(raw[f"{part}_y"]).long())

    order = torch.from_numpy(np.random.default_rng(1234).permutation(len(raw["train_y"])))
    x, y = rows("train")
    held_out = len(y) // 10
    places = {"valid": order[:held_out], "train": order[held_out:]}
    return {part: Rows(x[at], y[at]) for part, at in places.items()} | {"test": rows("test")}


def ten_classes(raw: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Keep ten classes and number them from 0."""
    found = {}
    for part in ("train", "test"):
        fine = raw[f"{part}_fine"]
        kept = np.isin(fine, CLASSES)
        found[f"{part}_x"], found[f"{part}_y"] = raw[f"{part}_x"][kept], (fine[kept] // 10).astype(np.uint8)
    return found


def mouse(folder: Path) -> dict[str, Rows]:
    """The images with one class as positive."""
    parts = images(folder)
    return {part: Rows(x, (y == CLASSES.index(50)).float().unsqueeze(1)) for part, (x, y) in parts.items()}


def tiny(task: str) -> dict[str, Rows]:
    """Few made-up rows that have the shapes of the task's."""
    generator = torch.Generator().manual_seed(0)
    if TASKS[task].network is residual:
        y = torch.arange(60) % 10
        x = torch.randn(60, 3, 32, 32, generator=generator) + y.view(-1, 1, 1, 1)
        return parted(x, (y == 5).float().unsqueeze(1) if task == "mouse" else y, 1 / 3)
    outputs = 14 if task == "yeast" else 1
    x = torch.randn(60, 20, generator=generator)
    return parted(x, (x[:, :outputs] > 0.5).float(), 1 / 3)


READERS: dict[str, Callable[[Path], dict[str, Rows]]] = {
    "zero": functools.partial(digits, positive=0),
    "eight": functools.partial(digits, positive=8),
    "mouse": mouse,
    "accuracy": images,
    "yeast": yeast,
}


@functools.lru_cache(maxsize=2)
def load(task: str, folder: Path | None, device: str) -> dict[str, Rows]:
    """The parts of a task's data on the device; without a folder made-up ones."""
    parts = tiny(task) if folder is None else READERS[task](folder)
    return {part: Rows(rows.x.to(device), rows.target.to(device)) for part, rows in parts.items()}


def train(setting: common.Row, rate: float, folder: Path | None, device: str) -> common.Row:
    """Train one network and measure it at the last epoch."""
    torch.set_num_threads(1)
    task = TASKS[setting["task"]]
    parts = load(setting["task"], folder, device)
    torch.manual_seed(setting["seed"])
    generator = torch.Generator(device).manual_seed(setting["seed"])
    net = task.network(parts).to(device)
    x, target = parts["train"]
    batches = math.ceil(len(x) / setting["batch"])
    epochs = task.epochs if folder else 1
    optimiser = torch.optim.AdamW(net.parameters(), lr=rate, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=epochs * batches + 1)
    start = time.monotonic()
    for _ in range(epochs):
        for rows in torch.randperm(len(x), device=device, generator=generator).chunk(batches):
            inputs = cifar.randomly_augmented(x[rows], generator) if x.ndim == 4 else x[rows]
            loss = task.losses[setting["loss"]](net(inputs), target[rows], setting["anchors"])
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            schedule.step()
    net.eval()
    found: common.Row = {"rate": rate, "seconds": round(time.monotonic() - start, 2)}
    for part in ("valid",) if setting["stage"] == "choice" else ("valid", "test"):
        with torch.no_grad():
            scores = torch.cat([net(some) for some in parts[part].x.split(1000)])
        found[part] = round(float(task.metric(scores, parts[part].target)), 5)
    return setting | found


def cells(tasks: Sequence[str], batches: Sequence[int], anchors: Sequence[int]) -> Iterator[common.Row]:
    """Every loss of every task; on `accuracy` other batch sizes; on `accuracy` and `eight` other numbers of anchors."""
    for task in tasks:
        for loss in TASKS[task].losses:
            yield {"task": task, "loss": loss, "batch": BATCH, "anchors": ANCHORS}
        for batch in batches if task == "accuracy" else ():
            for loss in ("cross-entropy", "UniLoss"):
                yield {"task": task, "loss": loss, "batch": batch, "anchors": ANCHORS}
        for count in anchors if task in ("accuracy", "eight") else ():
            yield {"task": task, "loss": "UniLoss", "batch": BATCH, "anchors": count}


def chosen(rows: Sequence[common.Row], cell: common.Row) -> float:
    """The rate that was best on held-out rows with the usual batch and anchors, times the root of the batch's ratio.

    Of several that are best, the middle one.
    """
    wanted = cell | {"batch": BATCH, "anchors": ANCHORS, "stage": "choice"}
    tried = [row for row in rows if wanted.items() <= row.items()]
    most = max(row["valid"] for row in tried)
    best = sorted(float(row["rate"]) for row in tried if row["valid"] == most)
    return best[len(best) // 2] * math.sqrt(cell["batch"] / BATCH)


def choices(results: common.Results, arguments: Any) -> Iterator[Job]:
    """The runs, still missing, that choose the learning rate of each task and loss."""
    for cell in cells(arguments.tasks, (), ()):
        setting = cell | {"seed": 1000, "stage": "choice"}
        for rate in TASKS[cell["task"]].rates[: 1 if arguments.smoke else None]:
            if results.missing(**setting, rate=rate):
                yield setting, rate, arguments.data, arguments.device


def finals(results: common.Results, arguments: Any) -> Iterator[Job]:
    """The runs, still missing, that are measured on the test rows, one seed after the other."""
    for seed in range(arguments.seeds):
        for cell in cells(arguments.tasks, arguments.batches, arguments.anchors):
            setting = cell | {"seed": seed, "stage": "final"}
            if results.missing(**setting):
                yield setting, chosen(results.rows, cell), arguments.data, arguments.device


def final(rows: Sequence[common.Row]) -> list[common.Row]:
    return [row for row in rows if row["stage"] == "final"]


def tables(rows: Sequence[common.Row]) -> dict[str, str]:
    rows = final(rows)
    found = {}
    for name in TASKS:
        part = [
            {**row, "percent": row["task"]}
            for row in rows
            if row["task"] == name and row["batch"] == BATCH and row["anchors"] == ANCHORS
        ]
        part.sort(key=lambda row: list(TASKS[row["task"]].losses).index(row["loss"]))
        found[name] = common.table(part, "loss", "percent", "test") if part else "(not run)"
    batches = [
        row for row in rows if row["task"] == "accuracy" and row["anchors"] == ANCHORS and "SVM" not in row["loss"]
    ]
    batches.sort(key=lambda row: row["batch"])
    found["batch"] = common.table(batches, "loss", "batch", "test") if batches else "(not run)"
    anchors = [row for row in rows if row["loss"] == "UniLoss" and row["task"] in ("eight", "accuracy")]
    anchors = sorted((row for row in anchors if row["batch"] == BATCH), key=lambda row: row["anchors"])
    found["anchors"] = common.table(anchors, "task", "anchors", "test") if anchors else "(not run)"
    return found


def mean(rows: Sequence[common.Row], **settings: Any) -> float:
    return statistics.fmean(100 * row["test"] for row in rows if settings.items() <= row.items())


def draw(rows: Sequence[common.Row], path: Path) -> None:
    """What each loss adds to the usual one, accuracy against the batch size, and what other numbers of anchors add."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = final(rows)
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(9.5, 3.4))
    draw_losses(left, [row for row in rows if row["batch"] == BATCH and row["anchors"] == ANCHORS])
    images = [row for row in rows if row["task"] == "accuracy"]
    for loss in ("cross-entropy", "UniLoss"):
        some = [row for row in images if row["loss"] == loss and row["anchors"] == ANCHORS]
        draw_line(middle, some, "batch", 0.0, loss)
    for task in ("eight", "accuracy"):
        some = [row for row in rows if row["task"] == task and row["loss"] == "UniLoss" and row["batch"] == BATCH]
        if some:
            draw_line(right, some, "anchors", mean(some, anchors=ANCHORS), task)
    middle.set(xlabel="batch size", ylabel="accuracy, %")
    right.set(xlabel="anchors of each kind", ylabel=f"points over {ANCHORS} anchors")
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8)
    common.save(figure, path)


def draw_losses(axes: Any, rows: Sequence[common.Row]) -> None:
    """A line of dots for each task and loss, one dot per seed: the metric less the mean of the usual loss."""
    names = [name for name in TASKS if any(row["task"] == name for row in rows)]
    for place, name in enumerate(names):
        usual, *_ = TASKS[name].losses
        zero = mean(rows, task=name, loss=usual)
        for step, loss in enumerate(TASKS[name].losses):
            values = [100 * row["test"] - zero for row in rows if row["task"] == name and row["loss"] == loss]
            label, colour = {usual: ("the usual loss", "#ea580c"), "UniLoss": ("UniLoss", "#2563eb")}.get(
                loss, ("others", "#94a3b8")
            )
            known = axes.get_legend_handles_labels()[1]
            heights = [-place - 0.12 * step] * len(values)
            axes.plot(values, heights, ".", color=colour, label=None if label in known else label)
    axes.set(yticks=[-place - 0.3 for place in range(len(names))], yticklabels=names)
    axes.set_xlabel("points over the usual loss")


def draw_line(axes: Any, rows: Sequence[common.Row], along: str, zero: float, label: str) -> None:
    """Mean and standard deviation of the test metric over seeds, less `zero`."""
    places = sorted({row[along] for row in rows})
    values = [[100 * row["test"] - zero for row in rows if row[along] == place] for place in places]
    middle = [statistics.fmean(some) for some in values]
    spread = [statistics.stdev(some) if len(some) > 1 else 0.0 for some in values]
    axes.errorbar(places, middle, spread, marker="o", capsize=3, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [str(place) for place in places])


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__, HERE / "results" / "results.json")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--batches", nargs="*", type=int, default=[32, 64, 256, 512, 1024])
    parser.add_argument("--anchors", nargs="*", type=int, default=[1, 4, 64])
    parser.add_argument("--workers", type=int, default=1, help="networks trained at the same time")
    parser.add_argument("--minutes", type=float, default=1e6, help="start no network after this time")
    arguments = parser.parse_args(argv)
    if common.finish(arguments, tables):
        if arguments.readme:
            draw(common.Results(arguments.out).rows, arguments.readme.parent / "figures" / "uniloss.svg")
        return
    if arguments.smoke:
        arguments.seeds, arguments.batches, arguments.anchors, arguments.workers = 1, [16], [1], 1
        arguments.data = None
    elif arguments.data is None:
        parser.error("--data is needed: the folder of the data sets (or --smoke); see the README")
    results = common.Results(arguments.out)
    end = time.monotonic() + 60 * arguments.minutes
    pool = ProcessPoolExecutor(arguments.workers, multiprocessing.get_context("spawn"))
    with pool if arguments.workers > 1 else contextlib.nullcontext() as several:
        for stage in (choices, finals):
            if time.monotonic() < end:
                common.run_all(train, list(stage(results, arguments)), results, several, end)


if __name__ == "__main__":
    main()
