"""Bags of instances of which only the bag is labelled: max, mean and attentive pooling (after Tian, Li and Xu, 2020).

    python -m experiments.bags.run --data FOLDER [--workers 6]

The label set of a bag is the union of those of its instances. FOLDER holds `features.npz` and `labels.npz` of CIFAR-100
as in `experiments/noisy_cifar100`, and `goemotions.npz` as made by `experiments.text_features`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lastlayer as ll
from experiments import cifar, common, tabular
from lastlayer.head import AttentivePoolHead, attentive_pool

HERE = Path(__file__).parent
SETS = {"cifar100": "CIFAR-100", "goemotions": "GoEmotions"}
SIZES = (4, 10)  # the largest number of instances in a bag; the smallest is half of it
GRIDS = {  # rates and decays of each optimiser
    "AdamW": ((0.004, 0.016, 0.064, 0.256, 1.024, 4.096), (0.01, 0.1)),
    "SGD": ((1.0, 4.0, 16.0, 64.0, 256.0), (0.0, 1e-5)),
}
SMOOTHED = "smoothed labels"
VALUES = {
    "bag_map": "bags, mAP",
    "bag_recall5": "bags, R@5",
    "instance_map": "instances, mAP",
    "instance_top1": "instances, P@1",
}


class Bags(NamedTuple):
    rows: Tensor  # bags x size, places of the instances
    there: Tensor  # bags x size, False is padding
    target: Tensor  # bags x classes


def highest(logits: Tensor, attention: Tensor, there: Tensor) -> Tensor:
    """The probability of the bag is that of its likeliest instance."""
    return torch.where(there[..., None], logits, -torch.inf).amax(-2)


def mean(logits: Tensor, attention: Tensor, there: Tensor) -> Tensor:
    """The probability of the bag is the mean of those of its instances."""
    return attentive_pool(logits, torch.zeros_like(logits), there)


def any_of(logits: Tensor, attention: Tensor, there: Tensor) -> Tensor:
    """The probability of the bag is that of one instance at least, if they were independent (noisy or)."""
    none = (F.logsigmoid(-logits) * there[..., None]).sum(-2)
    return torch.log(-torch.expm1(none.clamp(max=-1e-6))) - none


def attentive(logits: Tensor, attention: Tensor, there: Tensor) -> Tensor:
    return attentive_pool(logits, attention, there)


Pooling = Callable[[Tensor, Tensor, Tensor], Tensor]
POOLINGS: dict[str, Pooling | None] = {
    "max": highest,
    "mean": mean,
    "noisy or": any_of,
    "attentive": attentive,
    "instances labelled": None,
}
METHODS: dict[str, tuple[Pooling | None, float]] = {  # pooling, label smoothing
    name + words: (pooling, smoothing)
    for words, smoothing in (("", 0.0), (f", {SMOOTHED}", 0.1))
    for name, pooling in POOLINGS.items()
}


def bags_of(y: Tensor, size: int, seed: int) -> Bags:
    """Put each row into one bag; the bags have from half of `size` to `size` instances."""
    rng = np.random.default_rng(seed)
    order, sizes = rng.permutation(len(y)), rng.integers(size // 2, size + 1, len(y))
    ends = np.cumsum(sizes)
    count = int(np.searchsorted(ends, len(y), side="right"))
    rows = np.zeros((count, size), np.int64)
    there = np.arange(size) < sizes[:count, None]
    rows[there] = order[: ends[count - 1]]
    rows_of, mask = torch.from_numpy(rows), torch.from_numpy(there)
    return Bags(rows_of, mask, (y[rows_of] & mask[..., None]).any(-2))


def load(arguments: Any, name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return features and labels of the training and test instances.

    Of CIFAR-100 the first fine class of each coarse class is a label; the instances of the other 80 have none.
    """
    if arguments.smoke:
        x = torch.randn(600, 12, generator=torch.Generator().manual_seed(0))
        return x[:400], x[:400, :5] > 1, x[400:], x[400:, :5] > 1
    if name == "goemotions":
        data = tabular.load(arguments.data, name, "cpu")
        return data.train_x, data.train_y, data.test_x, data.test_y
    raw = cifar.load_features(arguments.data / "features.npz")
    kept = np.array([raw["train_fine"][raw["train_coarse"] == c].min() for c in range(20)])
    parts = []
    for split in ("train", "test"):
        x = torch.from_numpy(raw[f"{split}_x"]) / 16  # rows of length about 1, as those of the texts
        parts += [x, torch.from_numpy(raw[f"{split}_fine"][:, None] == kept)]
    return parts[0], parts[1], parts[2], parts[3]


def fit(
    x: Tensor, y: Tensor, bags: Bags, method: str, setting: tuple[str, float, float], seed: int, epochs: int
) -> nn.Module:
    """Train linear layers for labels and attention on bags, or on their instances."""
    torch.manual_seed(seed)
    head = AttentivePoolHead(x.shape[1], y.shape[1]).to(x.device)
    odds = (bags.target.float().mean(0) / bags.there.float().sum(-1).mean()).clamp(1e-4, 0.5)
    with torch.no_grad():
        head.linear.bias.copy_(odds.logit())
    pooling, smoothing = METHODS[method]
    name, rate, decay = setting
    if name == "AdamW":
        optimiser: torch.optim.Optimizer = torch.optim.AdamW(head.parameters(), rate, weight_decay=decay)
    else:
        optimiser = torch.optim.SGD(head.parameters(), rate, momentum=0.9, weight_decay=decay)
    batch = 256
    steps = epochs * -(-len(bags.rows) // batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(epochs):
        for some in torch.randperm(len(bags.rows)).to(x.device).split(batch):
            rows, there = bags.rows[some], bags.there[some]
            features = x[rows]
            logits = head.linear(features)
            if pooling is None:
                loss = ll.binary_loss(logits[there], y[rows[there]], label_smoothing=smoothing)
            else:
                pooled = pooling(logits, head.attention(features), there)
                loss = ll.binary_loss(pooled, bags.target[some], label_smoothing=smoothing)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    return head.requires_grad_(False)


@torch.no_grad()
def measure(x: Tensor, y: Tensor, bags: Bags, head: Any, method: str) -> dict[str, float]:
    """Metrics of the bags, and of the instances that are in a bag and have a label."""
    pooling = METHODS[method][0] or highest
    pooled = []
    for rows, there in zip(bags.rows.split(500), bags.there.split(500), strict=True):
        pooled.append(pooling(head.linear(x[rows]), head.attention(x[rows]), there))
    scores = torch.cat(pooled)
    rows = bags.rows[bags.there]
    each, truth = head.linear(x[rows]), y[rows]
    labelled = truth.any(-1)
    return {
        "bag_map": ll.mean_average_precision(scores, bags.target).item(),
        "bag_recall5": ll.recall_at_k(scores, bags.target, 5).item(),
        "instance_map": ll.mean_average_precision(each, truth).item(),
        "instance_top1": ll.precision_at_k(each[labelled], truth[labelled], 1).item(),
    }


_loaded: dict[str, Any] = {}


def work(setting: dict[str, Any], arguments: Any) -> list[common.Row]:
    """Choose optimiser, rate and decay by the mAP of a fifth of the training bags; measure on the test bags."""
    start = time.time()
    if setting["set"] not in _loaded:
        _loaded.clear()
        _loaded[setting["set"]] = load(arguments, setting["set"])
    (train_x, train_y, test_x, test_y), device = _loaded[setting["set"]], arguments.device
    seed, method = setting["seed"], setting["method"]
    bags, test = bags_of(train_y, setting["size"], seed), bags_of(test_y, setting["size"], 100 + seed)
    bags, test = (Bags(*(t.to(device) for t in some)) for some in (bags, test))
    train_x, train_y, test_x, test_y = (t.to(device) for t in (train_x, train_y, test_x, test_y))
    cut = len(bags.rows) // 5
    held, kept = (Bags(*(t[part] for t in bags)) for part in (slice(cut), slice(cut, None)))
    best: tuple[float, Any, tuple[str, float, float]] = (-1.0, None, ("", 0.0, 0.0))
    for name in arguments.optimisers:
        rates, decays = GRIDS[name]
        for rate, decay in itertools.product(arguments.rates or rates, decays):
            head = fit(train_x, train_y, kept, method, (name, rate, decay), seed, arguments.epochs)
            valid = measure(train_x, train_y, held, head, method)["bag_map"]
            if valid > best[0]:
                best = (valid, head, (name, rate, decay))
    found = measure(test_x, test_y, test, best[1], method)
    chosen = dict(zip(("optimiser", "rate", "decay"), best[2], strict=True)) | {"valid": round(best[0], 5)}
    return [chosen | {name: round(v, 5) for name, v in found.items()} | {"seconds": round(time.time() - start, 1)}]


def chosen(rows: Sequence[common.Row]) -> list[common.Row]:
    """Return one row per setting: where several grids were run, that of the best held-out mAP."""
    best: dict[tuple[Any, ...], common.Row] = {}
    for row in rows:
        setting = tuple(row[name] for name in ("set", "size", "method", "seed"))
        if setting not in best or row["valid"] > best[setting]["valid"]:
            best[setting] = row
    return list(best.values())


def tables(rows: Sequence[common.Row]) -> dict[str, str]:
    rows, made = chosen(rows), {}
    for name, size in itertools.product(SETS, SIZES):
        some = [{VALUES.get(k, k): v for k, v in r.items()} for r in rows if (r["set"], r["size"]) == (name, size)]
        if some:
            made[f"{name} {size}"] = common.columns(some, "method", list(VALUES.values()), order=METHODS, digits=1)
    return made


def main(argv: list[str] | None = None) -> None:
    parser = tabular.parser(__doc__, HERE / "results" / "results.json", list(SETS))
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--optimisers", nargs="+", default=list(GRIDS), choices=list(GRIDS))
    parser.add_argument("--rates", nargs="+", type=float, help="instead of those of the optimiser")
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), help="the largest number in a bag")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.set_defaults(seeds=3, device="cpu")
    arguments = parser.parse_args(argv)
    if common.finish(arguments, tables):
        return
    if arguments.smoke:
        arguments.sets, arguments.seeds, arguments.epochs, arguments.rates = ["tiny"], 1, 1, [0.01]
    elif arguments.data is None:
        parser.error("--data is needed: a folder with the two sets (or --smoke)")
    results = common.Results(arguments.out)
    settings = [
        {"set": name, "size": size, "method": method, "seed": seed}
        for name, size, seed, method in itertools.product(
            arguments.sets, arguments.sizes, range(arguments.seeds), arguments.methods
        )
    ]
    tabular.run(work, [s for s in settings if results.missing(**s)], arguments, results)


if __name__ == "__main__":
    main()
