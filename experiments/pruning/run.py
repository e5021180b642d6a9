"""Pruning to a budget of multiply-adds (Ning et al., 2020): which layers should keep how many channels? CIFAR-100.

    python -m experiments.pruning.run --data CIFAR [--workers 3]

The differentiable allocation learns the keep ratio of each group of channels by gradient. The mask of a group is an
`lml` of its importances with a real k, and the ratios are an `lml` with weights, whose budget is the multiply-adds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lastlayer as ll
from experiments import cifar, common
from experiments.pruning.network import STAGES, Network, counted, full, multiply_adds, quadratic, smaller

HERE = Path(__file__).parent
WHOLE, UNIFORM, GLOBAL, LEARNED = "not pruned", "uniform", "global magnitude", "learned (DSA)"
AGAIN = "learned, then tuned anew"  # the same shares, pruned before the first step
KINDS = (WHOLE, UNIFORM, GLOBAL, LEARNED, AGAIN)
BUDGETS = (0.5, 0.3)
LEAST = 1 / 16  # share of the channels that every group keeps
PEAK, TUNE_PEAK = 0.4, 0.1  # largest learning rate of the first training and after it
HOT, COLD = 1.0, 0.02  # temperature of the masks at both ends of the allocation
RATES = (0.003, 0.01, 0.03)  # of the allocation
EVERY = 2  # steps of the weights for one of the allocation
ROUNDS = 6  # of the linear budget, for the quadratic one


def uniform_ratio(counts: Sequence[int], limit: float) -> float:
    """The one keep ratio of all groups that costs `limit`."""
    square, line = (part.sum().item() for part in quadratic(counts))
    return (math.sqrt(line * line + 4 * square * limit) - line) / (2 * square)


def ratios(shift: Tensor, counts: Sequence[int], limit: float) -> Tensor:
    """Keep ratios that cost exactly `limit`; with `shift` 0 all are the same, and more of it keeps more.

    The cost is quadratic in the ratios: each round takes its derivative at the last solution as the weights.
    """
    square, line = quadratic(counts)
    even = uniform_ratio(counts, limit)
    found = torch.full_like(line, even)
    logits = shift.double() + math.log((even - LEAST) / (1 - even))
    for _ in range(ROUNDS):
        here = found.detach()
        weight = (square + square.T) @ here + line
        k = limit + here @ square @ here  # the tangent of the cost at `here`, where it meets the limit
        scale = weight.mean()
        found = ll.lml(logits, k / scale, weight=weight / scale, lower=LEAST)
    return found


def whole_counts(ratio: Sequence[float], counts: Sequence[int], limit: float) -> list[int]:
    """Round to whole channels, downwards first; then add one where most was lost, as long as the budget allows."""
    wish = [r * c for r, c in zip(ratio, counts, strict=True)]
    found = [max(1, math.floor(w + 1e-6)) for w in wish]
    while True:
        order = sorted(range(len(counts)), key=lambda g: found[g] - wish[g])
        for group in order:
            more = [c + (g == group) for g, c in enumerate(found)]
            if more[group] <= counts[group] and multiply_adds(more) <= limit:
                found = more
                break
        else:
            return found


def largest(importance: Tensor, counts: Sequence[int]) -> Tensor:
    """A mask of the most important channels of each group."""
    found = torch.zeros_like(importance)
    for group, count in enumerate(counts):
        found[group, importance[group].topk(count).indices] = 1
    return found


def by_global_order(importance: Tensor, counts: Sequence[int], limit: float) -> list[int]:
    """Take the least important channel of all groups away until the budget is met; each group keeps a few."""
    found = list(counts)
    least = [math.ceil(LEAST * c) for c in counts]
    order = sorted((v, g) for g, c in enumerate(counts) for v in importance[g, :c].tolist())
    for _, group in order:
        if multiply_adds(found) <= limit:
            break
        if found[group] > least[group]:
            found[group] -= 1
    return found


class Allocation:
    """Learn the keep ratios while the weights train: masks are drawn anew in each step, budget and temperature fall."""

    def __init__(self, net: Network, setting: cifar.Setting, steps: int, data: cifar.Tensors, batch: int) -> None:
        self.net, self.budget, self.steps, self.data, self.batch = net, setting["budget"], steps, data, batch
        self.most = multiply_adds(net.counts)
        self.shift = torch.zeros(len(net.counts), requires_grad=True)
        self.optimizer = torch.optim.Adam([self.shift], setting["rate"])
        self.device = data["train_x"].device
        self.valid = torch.arange(max(net.counts)) < torch.tensor(net.counts)[:, None]
        self.valid = self.valid.to(self.device)
        self.generator = torch.Generator(self.device).manual_seed(setting["seed"] + 1000)

    def ratios(self, step: int) -> Tensor:
        """Keep ratios within the budget of this step, which reaches its end after three quarters of the way."""
        part = min(1.0, (step + 1) / (0.75 * self.steps))
        return ratios(self.shift, self.net.counts, min(self.budget**part, 0.995) * self.most)

    def probabilities(self, step: int) -> Tensor:
        """How likely each channel is kept: the importances against a threshold, k in a group on average."""
        k = self.ratios(step).float() * torch.tensor(self.net.counts)
        temperature = HOT * (COLD / HOT) ** (step / self.steps)
        logits = self.net.importance().clamp_min(1e-6).log()
        return ll.lml(logits, k.to(self.device), mask=self.valid, temperature=temperature)

    def draw(self, p: Tensor) -> Tensor:
        return torch.bernoulli(p.detach(), generator=self.generator)

    def learn(self, step: int) -> Tensor:
        """Lower the loss of a validation batch by the ratios; a drawn mask has the gradient of its probability.

        Returns the probabilities.
        """
        rows = torch.randint(len(self.data["valid_x"]), (self.batch,), device=self.device, generator=self.generator)
        x = self.data["valid_x"][rows].to(memory_format=torch.channels_last)
        p = self.probabilities(step)
        mask = self.draw(p) + p - p.detach()
        with cifar.half(x):
            logits = self.net(x, mask)
        loss = F.cross_entropy(logits.float(), self.data["valid_fine"][rows])
        (self.shift.grad,) = torch.autograd.grad(loss, [self.shift])
        self.optimizer.step()
        return p.detach()

    def counts(self) -> list[int]:
        found = self.ratios(self.steps).tolist()
        return whole_counts(found, self.net.counts, self.budget * self.most)


def tuned(net: Network, setting: cifar.Setting, data: cifar.Tensors, arguments: Any) -> Tensor:
    """Train the network further under the masks of one way of pruning, and return the last mask.

    All ways take the same steps; the allocation is learnt in the first of them.
    """
    mask = largest(net.importance(), net.counts)
    kind, limit = setting["kind"], setting["budget"] * multiply_adds(net.counts)
    per_epoch = len(data["train_x"]) // min(arguments.batch, len(data["train_x"]))
    after: Callable[[int], None] | None = None
    if kind == UNIFORM:
        ratio = uniform_ratio(net.counts, limit)
        mask.copy_(largest(net.importance(), whole_counts([ratio] * len(net.counts), net.counts, limit)))
    elif kind == GLOBAL:
        mask.copy_(largest(net.importance(), by_global_order(net.importance(), net.counts, limit)))
    elif kind == AGAIN:
        mask.copy_(largest(net.importance(), setting["counts"]))
    elif kind == LEARNED:
        steps = arguments.allocate * per_epoch
        allocation = Allocation(net, setting, steps, data, arguments.batch)
        p = torch.ones_like(mask)

        def after(step: int) -> None:
            if step + 1 == steps:
                mask.copy_(largest(net.importance(), allocation.counts()))
            elif step < steps:
                if step % EVERY == 0:
                    p.copy_(allocation.learn(step))
                mask.copy_(allocation.draw(p))

    descend(net, mask, data, arguments, TUNE_PEAK, arguments.tune, setting["seed"] + 100, after)
    return mask


def descend(
    net: Network, mask: Tensor, data: cifar.Tensors, arguments: Any, peak: float, epochs: int, seed: int,
    after: Callable[[int], None] | None = None,
) -> None:  # fmt: skip
    def objective(x: Tensor, y: Tensor) -> Tensor:
        with cifar.half(x):
            logits = net(x, mask)
        return F.cross_entropy(logits.float(), y)

    net.train()
    x, y = data["train_x"], data["train_fine"]
    cifar.fit(
        objective, net.parameters(), x, y, peak=peak, epochs=epochs, batch=arguments.batch, seed=seed, after=after
    )


def base_of(seed: int, data: cifar.Tensors, arguments: Any) -> Network:
    """Train the whole network, or read it if it was."""
    net = Network(full(arguments.width)).to(arguments.device, memory_format=torch.channels_last)
    file = arguments.bases / f"{arguments.width}-{arguments.epochs}-{seed}.pt"
    if not file.exists():
        every = largest(net.importance(), net.counts)
        descend(net, every, data, arguments, PEAK, arguments.epochs, seed)
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(net.state_dict(), partial := file.with_suffix(f".{os.getpid()}"))
        os.replace(partial, file)
    net.load_state_dict(torch.load(file, map_location=arguments.device, weights_only=True))
    return net


def accuracy(net: Network, data: cifar.Tensors, split: str) -> float:
    hits = cifar.outputs(net, data[f"{split}_x"]).argmax(-1) == data[f"{split}_fine"]
    return round(hits.float().mean().item(), 6)


def train(setting: dict[str, Any], data: cifar.Tensors, arguments: Any) -> common.Row:
    """Prune the network of a seed, tune what is left, and measure the smaller network that comes of it."""
    net = base_of(setting["seed"], data, arguments)
    before = accuracy(net, data, "test")
    mask = tuned(net, setting, data, arguments)
    small = smaller(net, mask)
    cost = multiply_adds(small.counts)
    seen = counted(small, data["test_x"])
    if cost != seen:
        raise RuntimeError(f"{cost} multiply-adds by formula, {seen} counted")
    parameters = sum(p.numel() for p in small.parameters())
    return {
        "before": before,
        "valid_top1": accuracy(small, data, "valid"),
        "test_top1": accuracy(small, data, "test"),
        "multiply_adds": cost,
        "share": round(cost / multiply_adds(net.counts), 5),
        "parameters": parameters,
        "kept": small.counts,
    }


def wanted(rows: Sequence[common.Row], arguments: Any) -> list[cifar.Setting]:
    """Return the whole networks, then each way of pruning; the allocation at every rate first, with the first seed."""
    shared = {"width": arguments.width, "tune": arguments.tune, "allocate": arguments.allocate, "counts": None}
    seeds = range(arguments.seeds)
    found = [shared | {"kind": WHOLE, "budget": 1.0, "rate": 0.0, "seed": seed} for seed in seeds]
    for budget in arguments.budgets:
        learned = shared | {"kind": LEARNED, "budget": budget}
        grid = [learned | {"rate": rate, "seed": 0} for rate in arguments.rates]
        found += grid
        for kind in (UNIFORM, GLOBAL):
            found += [shared | {"kind": kind, "budget": budget, "rate": 0.0, "seed": seed} for seed in seeds]
        tried = [row for row in rows if row["seed"] == 0 and row.items() >= learned.items()]
        if len(tried) >= len(grid):
            learned["rate"] = best_rate(tried)
            found += [learned | {"seed": seed} for seed in seeds]
            found += [
                learned | {"kind": AGAIN, "seed": row["seed"], "counts": row["kept"]}
                for row in rows
                if row.items() >= learned.items()
            ]
    return found


def best_rate(rows: Sequence[common.Row]) -> float:
    """Return the rate of the allocation with the best accuracy on the validation rows, first seed."""
    return float(max((row for row in rows if row["seed"] == 0), key=lambda row: row["valid_top1"])["rate"])


def tables(rows: Sequence[common.Row]) -> dict[str, str]:
    if not rows:
        return dict.fromkeys(("accuracy", "parameters", "rates", "kept"), "(not run)")
    chosen, grid = [], []
    for budget in {row["budget"]: 0 for row in rows}:
        for kind in KINDS:
            some = [row for row in rows if row["kind"] == kind and row["budget"] == budget]
            rate = best_rate(some) if any(row["seed"] == 0 for row in some) else 0.0
            chosen += [row for row in some if row["rate"] == rate]
            grid += [row | {"budget": f"{100 * budget:.0f} %"} for row in some if kind == LEARNED and row["seed"] == 0]
    order = sorted(chosen, key=lambda row: (KINDS.index(row["kind"]), -row["budget"], row["seed"]))
    named = [row | {"of the multiply-adds": f"{100 * row['budget']:.0f} %"} for row in order]
    heads = [f"stream {s + 1}" for s in range(STAGES)] + [
        f"block {b + 1}" for b in range(len(rows[0]["kept"]) - STAGES)
    ]
    kept = [
        {"kind": f"{row['kind']}, {row['of the multiply-adds']}", "group": head, "share": count / whole}
        for row in named
        if row["kind"] in (GLOBAL, LEARNED)
        for head, count, whole in zip(heads, row["kept"], full(row["width"]), strict=True)
    ]
    return {
        "accuracy": common.table(named, "kind", "of the multiply-adds", "test_top1"),
        "parameters": common.table(named, "kind", "of the multiply-adds", "parameters", scale=1e-6),
        "rates": common.table(sorted(grid, key=lambda row: row["rate"]), "rate", "budget", "valid_top1"),
        "kept": common.table(kept, "group", "kind", "share", digits=0),
    }


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__, HERE / "results" / "results.json")
    cifar.add_arguments(parser, networks=("resnet",))
    parser.add_argument("--bases", type=Path, default=Path("bases"), help="folder that the whole networks are kept in")
    parser.add_argument("--tune", type=int, default=10, help="epochs after the first training")
    parser.add_argument("--allocate", type=int, default=4, help="how many of them learn the allocation")
    parser.add_argument("--budgets", nargs="+", type=float, default=list(BUDGETS))
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES), help="of the allocation")
    parser.set_defaults(width=32, epochs=16)
    arguments = parser.parse_args(argv)
    if common.finish(arguments, tables):
        return
    if arguments.smoke:
        cifar.shrink(arguments)
        arguments.tune, arguments.allocate, arguments.held_out = 1, 1, 300
        arguments.budgets, arguments.rates = [0.5], [0.03]
        arguments.bases = arguments.out.parent / "bases"
    results = common.Results(arguments.out)
    cifar.run(lambda rows: wanted(rows, arguments), train, arguments, results)


if __name__ == "__main__":
    main()
