"""Learning from incomplete labels: which loss keeps its recall when training labels are hidden?

    python -m experiments.incomplete_labels.run --data MULAN [--sets bibtex ...] [--keep 1 0.5 0.2 0.1 one]

Labels of the training rows are hidden at random (each kept with probability q, or a single one a row); the test labels
are complete. A fifth of the training rows, with their labels hidden alike, chooses everything: learning rate, weight
decay, k, and when to stop. All seeds and settings of a loss train side by side as one stack of models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import lastlayer as ll
from experiments import common

HERE = Path(__file__).parent
SETS = ("bibtex", "delicious", "corel5k", "medical", "yeast", "birds", "stackex_chess", "langlog", "slashdot")
KEEP = ("1", "0.5", "0.2", "0.1", "one")
RATES, DECAYS, CARDINALITIES = (0.01, 0.05, 0.2), (0.0, 0.1), (2.0, 3.0, 5.0)

Loss = Callable[[Tensor, Tensor, float, int], Tensor]  # logits, target, k, epoch -> a loss a row


class Method(NamedTuple):
    loss: Loss
    uses_k: bool = False
    couples_rows: bool = False  # a row's loss depends on the batch, so each model is mapped on its own


def thinned(x: Tensor, t: Tensor, k: float, epoch: int) -> Tensor:
    rho = (t.sum(-1).float().mean() / k).clamp(max=0.95).item()
    return ll.lml_loss(x, t, k, observed=rho, reduction="none")


METHODS = {
    "binary": Method(lambda x, t, k, e: ll.binary_loss(x, t, reduction="none")),
    "label smoothing": Method(lambda x, t, k, e: ll.assume_negative_loss(x, t, label_smoothing=0.1, reduction="none")),
    "weighted negatives": Method(
        lambda x, t, k, e: ll.assume_negative_loss(x, t, negative_weight=1 / (x.shape[-1] - 1), reduction="none")
    ),
    "multi-hot softmax": Method(lambda x, t, k, e: ll.multihot_softmax_loss(x, t, reduction="none")),
    "two-way": Method(lambda x, t, k, e: ll.two_way_loss(x, t, reduction="none"), couples_rows=True),
    "asymmetric": Method(lambda x, t, k, e: ll.asymmetric_loss(x, t, reduction="none")),
    "expected positive": Method(
        lambda x, t, k, e: ll.expected_positive_loss(x, t, k, reduction="none"), uses_k=True, couples_rows=True
    ),
    "entropy maximisation": Method(lambda x, t, k, e: ll.entropy_max_loss(x, t, reduction="none")),
    "Hill": Method(lambda x, t, k, e: ll.hill_loss(x, t, reduction="none")),
    "SPLC": Method(lambda x, t, k, e: ll.splc_loss(x, t, epoch=e, reduction="none")),
    "large loss": Method(lambda x, t, k, e: ll.large_loss(x, t, epoch=e, reduction="none"), couples_rows=True),
    "LML (Algorithm 2)": Method(lambda x, t, k, e: ll.lml_loss(x, t, k, reduction="none"), uses_k=True),
    "LML thinned": Method(thinned, uses_k=True),
}


class Data(NamedTuple):
    train_x: Tensor
    train_y: Tensor  # boolean
    test_x: Tensor
    test_y: Tensor


def load(folder: Path, name: str, device: str) -> Data:
    """Read a set from ``name.npz`` with its official split, or one by seed 0 where there is none."""
    with np.load(folder / f"{name}.npz", allow_pickle=False) as z:
        parts = [part for part in ("train", "test", "all") if f"{part}_Y_indptr" in z]
        found = {part: (dense(z, f"{part}_X"), dense(z, f"{part}_Y") > 0) for part in parts}
    if "all" in found:
        x, y = found["all"]
        order = np.random.default_rng(0).permutation(len(x))
        cut = round(0.7 * len(x))
        found = {"train": (x[order[:cut]], y[order[:cut]]), "test": (x[order[cut:]], y[order[cut:]])}
    (train_x, train_y), (test_x, test_y) = found["train"], found["test"]
    if ((train_x == 0) | (train_x == 1)).all():  # bags of words: rows of length 1
        train_x, test_x = (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1) for x in (train_x, test_x))
    else:
        mean, spread = train_x.mean(0), train_x.std(0) + 1e-6
        train_x, test_x = (train_x - mean) / spread, ((test_x - mean) / spread).clip(-10, 10)
    tensors = [torch.as_tensor(v, device=device) for v in (train_x, train_y, test_x, test_y)]
    return Data(tensors[0].float(), tensors[1], tensors[2].float(), tensors[3])


def dense(z: Any, name: str) -> np.ndarray:
    """Rebuild a matrix stored whole, or as the rows of a compressed sparse one."""
    if name in z:
        return np.asarray(z[name], dtype=np.float32)
    rows, columns = (int(n) for n in z[f"{name}_shape"])
    indices, indptr = z[f"{name}_indices"].astype(np.int64), z[f"{name}_indptr"]
    values = z[f"{name}_data"] if f"{name}_data" in z else np.ones(len(indices), np.float32)
    made = np.zeros((rows, columns), np.float32)
    made[np.repeat(np.arange(rows), np.diff(indptr)), indices] = values
    return made


def tiny(device: str) -> Data:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 12, generator=generator)
    y = x @ torch.randn(12, 9, generator=generator) > 2
    return Data(*(t.to(device) for t in (x[:200], y[:200], x[200:], y[200:])))


def hidden(y: Tensor, keep: str, seed: int) -> Tensor:
    """Hide labels: keep each with a probability, or one a row."""
    draw = torch.rand(y.shape, generator=torch.Generator().manual_seed(seed)).to(y.device)
    if keep == "one":
        best = torch.where(y, draw, -1).argmax(-1, keepdim=True)
        return y & torch.zeros_like(y).scatter(-1, best, True)
    return y & (draw < float(keep))


def recall(scores: Tensor, y: Tensor, k: int = 5) -> float:
    return ll.recall_at_k(scores, y, min(k, y.shape[-1])).item()


def stack(data: Data, keep: str, seeds: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return each seed's observed labels, training rows and held-out rows."""
    seen = torch.stack([hidden(data.train_y, keep, seed) for seed in range(seeds)])
    orders = torch.stack(
        [torch.randperm(len(data.train_x), generator=torch.Generator().manual_seed(seed)) for seed in range(seeds)]
    ).to(data.train_x.device)
    cut = len(data.train_x) // 5
    return seen, orders[:, cut:], orders[:, :cut]


def fit(
    data: Data, method: Method, k: float, keep: str, seeds: int, epochs: int, batch: int
) -> Iterator[dict[str, Any]]:
    """Train a stack of linear models, one for each seed and setting; yield the best of each on its held-out rows."""
    device = data.train_x.device
    seen, train_rows, held_out = stack(data, keep, seeds)
    grid = [(seed, rate, decay) for seed in range(seeds) for rate in RATES for decay in DECAYS]
    seed_of = torch.tensor([g[0] for g in grid], device=device)
    rate = torch.tensor([g[1] for g in grid], device=device)[:, None, None]
    decay = torch.tensor([g[2] for g in grid], device=device)[:, None, None]
    features, classes = data.train_x.shape[1], data.train_y.shape[1]
    models = Adam([(len(grid), features, classes), (len(grid), 1, classes)], rate, decay, device)

    per_model = torch.vmap(lambda x, t: method.loss(x, t, k, 1)) if method.couples_rows else None
    best = [{"valid": -1.0} for _ in grid]
    n = train_rows.shape[1]
    steps = max(1, n // batch)
    for epoch in range(epochs):
        order = torch.randperm(n, generator=torch.Generator().manual_seed(epoch)).to(device)
        fade = 1.0 - epoch / epochs
        for step in range(steps):
            rows = train_rows[:, order[step * batch : (step + 1) * batch]][seed_of]  # models x batch
            x, t = data.train_x[rows], seen[seed_of[:, None], rows]
            weight, bias = models.values
            logits = torch.baddbmm(bias, x, weight)
            loss = per_model(logits, t.float()) if per_model else method.loss(logits, t.float(), k, epoch)
            models.step(torch.autograd.grad(loss.mean(-1).sum(), models.values), fade)
        if epoch % 4 == 3 or epoch == epochs - 1:
            judge(data, seen, held_out, grid, models, best)
    for seed in range(seeds):
        rows = [(found, g) for found, g in zip(best, grid, strict=True) if g[0] == seed]
        found, (_, lr, wd) = max(rows, key=lambda pair: pair[0]["valid"])
        yield {"seed": seed, "lr": lr, "decay": wd, **found}


def judge(
    data: Data, seen: Tensor, held_out: Tensor, grid: list[Any], models: Adam, best: list[dict[str, float]]
) -> None:
    """Keep the test numbers of the moment that is best on the held-out rows."""
    weight, bias = (v.detach() for v in models.values)
    for i, (seed, _, _) in enumerate(grid):
        rows = held_out[seed]
        valid = recall(data.train_x[rows] @ weight[i] + bias[i], seen[seed][rows])
        if valid > best[i]["valid"]:
            scores = data.test_x @ weight[i] + bias[i]
            best[i] = {
                "valid": valid,
                "recall5": recall(scores, data.test_y),
                "precision1": ll.precision_at_k(scores, data.test_y, 1).item(),
                "map": ll.mean_average_precision(scores, data.test_y, per="sample").item(),
            }


class Adam:
    """Adam with decoupled weight decay for a stack of models, each with a rate of its own."""

    def __init__(self, shapes: list[tuple[int, ...]], rate: Tensor, decay: Tensor, device: torch.device) -> None:
        self.values = [torch.zeros(shape, device=device, requires_grad=True) for shape in shapes]
        self.first = [torch.zeros_like(v) for v in self.values]
        self.second = [torch.zeros_like(v) for v in self.values]
        self.rate, self.decay, self.count = rate, decay, 0

    @torch.no_grad()
    def step(self, grads: tuple[Tensor, ...], fade: float) -> None:
        self.count += 1
        rate = self.rate * fade
        for value, grad, first, second in zip(self.values, grads, self.first, self.second, strict=True):
            first.lerp_(grad, 0.1)
            second.lerp_(grad * grad, 0.001)
            scale = (second / (1 - 0.999**self.count)).sqrt_().add_(1e-8)
            value.mul_(1 - rate * self.decay).addcdiv_(first * rate, scale, value=-1 / (1 - 0.9**self.count))


def chosen(rows: list[common.Row]) -> list[common.Row]:
    """Of the cardinalities tried, keep for each seed the one that is best on the held-out rows."""
    best: dict[tuple[Any, ...], common.Row] = {}
    for row in rows:
        key = (row["set"], row["keep"], row["method"], row["seed"])
        if key not in best or row["valid"] > best[key]["valid"]:
            best[key] = row
    return list(best.values())


def tables(rows: list[common.Row]) -> dict[str, str]:
    rows = chosen(rows)
    found = {
        name: common.table([r for r in rows if r["set"] == name], "method", "keep", "recall5")
        for name in dict.fromkeys(r["set"] for r in rows)
    }
    return found | {"summary": summary(rows)}


def summary(rows: list[common.Row]) -> str:
    """Mean rank and gaps to the best of all methods, over sets and shares of labels kept."""
    cells: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in rows:
        cells.setdefault((row["set"], row["keep"]), {}).setdefault(row["method"], []).append(100 * row["recall5"])
    scores: dict[str, list[tuple[float, float]]] = {}
    for found in cells.values():
        means = {method: float(np.mean(values)) for method, values in found.items()}
        ranked = sorted(means, key=means.__getitem__, reverse=True)
        for method, mean in means.items():
            scores.setdefault(method, []).append((ranked.index(method) + 1, means[ranked[0]] - mean))
    lines = ["| method | mean rank | mean gap to the best | worst gap |", "| --- | --- | --- | --- |"]
    for method, pairs in sorted(scores.items(), key=lambda item: np.mean([p[0] for p in item[1]])):
        ranks, gaps = zip(*pairs, strict=True)
        lines.append(f"| {method} | {np.mean(ranks):.2f} | {np.mean(gaps):.2f} | {max(gaps):.2f} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__, HERE / "results" / "results.json")
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    parser.add_argument("--keep", nargs="+", default=list(KEEP))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--minutes", type=float, default=1e9, help="start nothing after this time")
    arguments = parser.parse_args(argv)
    if common.finish(arguments, tables):
        return
    if arguments.smoke:
        arguments.sets, arguments.keep, arguments.epochs, arguments.batch, arguments.seeds = (
            ["tiny"],
            ["1", "one"],
            2,
            64,
            2,
        )
    elif arguments.data is None:
        parser.error("--data is needed: a folder of Mulan sets as npz (or --smoke)")
    results, start = common.Results(arguments.out), time.time()
    for name in arguments.sets:
        data = tiny(arguments.device) if arguments.smoke else load(arguments.data, name, arguments.device)
        batch = max(32, min(arguments.batch, len(data.train_x) // 20))
        for keep in arguments.keep:
            for label in arguments.methods:
                method = METHODS[label]
                for k in CARDINALITIES if method.uses_k else (0.0,):
                    setting = {"set": name, "keep": keep, "method": label, "k": k}
                    if not results.missing(**setting) or k >= data.train_y.shape[1]:
                        continue
                    if time.time() - start > 60 * arguments.minutes:
                        return
                    rows = list(fit(data, method, k, keep, arguments.seeds, arguments.epochs, batch))
                    results.extend([setting | row for row in rows])
                    print(
                        *setting.values(),
                        *(f"{r['recall5']:.4f}" for r in rows),
                        f"{time.time() - start:.0f}s",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
