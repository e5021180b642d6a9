"""What the experiments on label sets share: data, losses by name, and one trainer for stacks of small models.

A stack holds all models that differ in seed, learning rate, weight decay, an option of the loss, or the share of labels
that is hidden; they take each step together. On a GPU the step is recorded once as a CUDA graph and replayed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import multiprocessing
import queue
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import lastlayer as ll
from experiments import common

HEADS = ("linear", "mlp")
RATES = {"linear": (1.0, 4.0, 16.0, 64.0), "mlp": (0.001, 0.004, 0.016, 0.064)}
DECAYS = {"linear": (1e-5, 2e-4), "mlp": (0.03, 1.0)}
FACTOR = 4.0  # between neighbouring rates
DROPOUT, MOMENTUM = 0.5, 0.9
MOST_FLOATS = 150_000_000  # parameters of one stack


def parser(description: str | None, out: Path, sets: Sequence[str]) -> argparse.ArgumentParser:
    """The arguments that the experiments on label sets take."""
    made = common.parser(description, out)
    made.add_argument("--sets", nargs="+", default=list(sets))
    made.add_argument("--heads", nargs="+", default=list(HEADS), choices=HEADS)
    made.add_argument("--workers", type=int, default=1, help="processes that share the device")
    made.add_argument("--minutes", type=float, default=1e9, help="start nothing after this time")
    made.add_argument("--figure", type=Path, help="only draw the figure from the results, to this file")
    made.set_defaults(seeds=5)
    return made


class Data(NamedTuple):
    name: str
    train_x: Tensor
    train_y: Tensor  # boolean
    test_x: Tensor
    test_y: Tensor


def load(folder: Path, name: str, device: str) -> Data:
    """Read a set from ``name.npz`` with its own split, or 70 % by seed 0 where there is none.

    Sparse and binary rows are scaled to length 1, other columns to mean 0 and spread 1, then divided by the root of
    their number: one range of learning rates serves all sets.
    """
    with np.load(folder / f"{name}.npz", allow_pickle=False) as z:
        sparse = not any(f"{part}_X" in z for part in ("train", "all"))
        parts = [part for part in ("train", "test", "all") if f"{part}_Y_indptr" in z]
        found = {part: (dense(z, f"{part}_X"), dense(z, f"{part}_Y") > 0) for part in parts}
    if "all" in found:
        x, y = found["all"]
        order = np.random.default_rng(0).permutation(len(x))
        cut = round(0.7 * len(x))
        found = {"train": (x[order[:cut]], y[order[:cut]]), "test": (x[order[cut:]], y[order[cut:]])}
    (train_x, train_y), (test_x, test_y) = found["train"], found["test"]
    if sparse or ((train_x == 0) | (train_x == 1)).all():
        train_x, test_x = (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-6) for x in (train_x, test_x))
    else:
        mean, spread = train_x.mean(0), (train_x.std(0) + 1e-6) * math.sqrt(train_x.shape[1])
        train_x, test_x = (train_x - mean) / spread, ((test_x - mean) / spread).clip(-1, 1)
    tensors = [torch.as_tensor(v, device=device) for v in (train_x, train_y, test_x, test_y)]
    return Data(name, tensors[0].float(), tensors[1], tensors[2].float(), tensors[3])


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


def tiny(name: str, device: str) -> Data:
    """Made-up rows for a smoke run."""
    generator = torch.Generator().manual_seed(len(name))
    x = torch.randn(300, 12, generator=generator) / math.sqrt(12)
    y = x @ torch.randn(12, 9, generator=generator) > 0.6
    return Data(name, *(t.to(device) for t in (x[:200], y[:200], x[200:], y[200:])))


class Cell(NamedTuple):
    """What a loss may know of the labels it gets."""

    keep: str  # the share that is observed, or "one" a row
    option: float  # the option that is tuned
    mean: float  # observed labels per row
    guess: float  # k as `lastlayer train --labels incomplete` guesses it


class Batch(NamedTuple):
    logits: Tensor  # (..., rows, classes)
    target: Tensor  # boolean, of the same shape
    cell: Cell
    progress: float  # of the training, from 0 to 1; constant within an epoch
    count: Tensor | None = None  # the number of labels per row, as the model predicts it
    estimates: Tensor | None = None  # a row of logits of label estimates

    @property
    def args(self) -> tuple[Tensor, Tensor]:
        return self.logits, self.target

    @property
    def k(self) -> float:
        """The option as a number of labels per row."""
        return min(self.cell.option, 0.5 * self.logits.shape[-1])

    @property
    def rho(self) -> float:
        """The share of labels that is observed if a row has `k`."""
        return min(self.cell.mean / self.k, 0.95)

    @property
    def guessed_rho(self) -> float:
        return min(self.cell.mean / self.cell.guess, 0.95)


class Method(NamedTuple):
    loss: Callable[[Batch], Tensor]  # a loss per row
    options: tuple[float, ...] = (0.0,)  # tuned like the learning rate
    reads_cell: bool = False  # numbers of the cell enter the loss: one call for each cell
    couples_rows: bool = False  # a row's loss depends on the batch: each model is mapped on its own
    phases: int = 1  # how often the loss changes during the training; 0 is every epoch
    state: str = ""  # "count": a further output predicts the number of labels; "estimates": a table of labels is learnt
    frequencies: bool = True  # whether biases start at the log-odds of the observed labels, or at 0
    probability: str = "lml"  # how scores become probabilities: "sigmoid", "lml" or "quasibinary"


class Plan(NamedTuple):
    """How long to train, how wide, and how often a best rate at an end of the grid may widen it."""

    batch: int
    epochs: int
    hidden: int = 128
    rounds: int = 4

    @classmethod
    def of(cls, rows: int, steps: int = 700) -> Plan:
        batch = next(b for most, b in ((1000, 64), (8000, 128), (60_000, 256), (math.inf, 1024)) if rows < most)
        return cls(min(batch, rows), min(max(round(steps * batch / rows), 10), 40))


class Observed(NamedTuple):
    """The labels that the training sees, for each share kept and each seed, and which rows it has."""

    keeps: tuple[str, ...]
    seeds: tuple[int, ...]
    seen: Tensor  # keeps x seeds x rows x classes
    train: Tensor  # seeds x training rows
    held_out: Tensor  # seeds x held-out rows


@functools.lru_cache(maxsize=8)
def observe(data: Data, keeps: tuple[str, ...], seeds: tuple[int, ...]) -> Observed:
    """Hide labels and hold out a fifth of the rows; by the seed alone, so that less kept is a subset of more."""
    y, device = data.train_y, data.train_y.device
    seen, orders = [], []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        orders.append(torch.randperm(len(y), generator=generator))
        draw = torch.rand(y.shape, generator=generator).to(device)
        best = torch.where(y, draw, 2).argmin(-1, keepdim=True)
        one = y & torch.zeros_like(y).scatter(-1, best, True)
        seen.append(torch.stack([one if keep == "one" else y & (draw < float(keep)) for keep in keeps]))
    order, cut = torch.stack(orders).to(device), len(y) // 5
    return Observed(keeps, seeds, torch.stack(seen, 1), order[:, cut:], order[:, :cut])


def cells_of(observed: Observed, options: Sequence[float]) -> list[Cell]:
    """One cell for each share kept and each option, with the counts that a user would see."""
    n = observed.seen.shape[-1]
    made = []
    for keep, seen in zip(observed.keeps, observed.seen, strict=True):
        counts = torch.stack([s[rows].sum(-1) for s, rows in zip(seen, observed.train, strict=True)]).double()
        mean = counts.mean().item()
        high = float(np.quantile(counts.flatten().cpu().numpy(), 0.9))
        guess = min(max(high, mean, 0.5), 0.5 * n)
        made += [Cell(keep, option, mean, guess) for option in options]
    return made


class Stack:
    """Models of seeds x (cells x settings), their optimiser, and the step that trains them all.

    Linear models have SGD with momentum and an L2 penalty, those with a hidden layer AdamW; both a short rise of the
    rate and a cosine. Biases start at the log-odds of the observed labels and are not decayed.
    """

    def __init__(
        self,
        data: Data,
        observed: Observed,
        head: str,
        method: Method,
        settings: Sequence[tuple[float, float]],
        plan: Plan,
    ) -> None:
        self.data, self.observed, self.head, self.method, self.plan = data, observed, head, method, plan
        self.cells = cells_of(observed, method.options)
        self.grid = len(settings)
        self.models = len(self.cells) * self.grid
        self.device = data.train_x.device
        self.n_seeds, self.classes = len(observed.seeds), data.train_y.shape[1]
        rate, decay = torch.tensor(settings, device=self.device).repeat(len(self.cells), 1).T
        self.rate, self.decay = rate[:, None], decay[:, None]  # models x 1
        self.values = self._first_values()
        self.state = [[torch.zeros_like(v) for _ in range(1 if head == "linear" else 2)] for v in self.values]
        self.table = self._first_estimates() if method.state == "estimates" else None
        self.seed_index = torch.arange(self.n_seeds, device=self.device)[:, None]
        self.rows = observed.train[:, : plan.batch].clone()  # of this step; written before each
        self.control = torch.zeros(3, device=self.device)  # factor of the rate, Adam's two corrections

    def _first_values(self) -> list[Tensor]:
        s, m, device = self.n_seeds, self.models, self.device
        features, out = self.data.train_x.shape[1], self.classes + (self.method.state == "count")
        per_cell = len(self.method.options) * self.grid
        counts = torch.stack(
            [
                torch.stack([seen[i][rows].sum(0) for i, rows in enumerate(self.observed.train)])
                for seen in self.observed.seen
            ],
            1,
        ).float()  # seeds x keeps x classes
        n = self.observed.train.shape[1]
        bias = each(((counts + 0.5) / (n - counts + 0.5)).log(), per_cell, 1).unsqueeze(2)
        if not self.method.frequencies:
            bias = torch.zeros_like(bias)
        if self.method.state == "count":
            mean = torch.tensor([expected_count(cell) / self.classes for cell in self.cells], device=device)
            mean = each(mean.clamp(1e-3, 0.99).logit(), self.grid, 0)
            bias = torch.cat([bias, mean[None, :, None, None].expand(s, m, 1, 1)], -1)
        if self.head == "linear":
            made = [torch.zeros(s, features, m, out, device=device), bias]
        else:
            wide, generator = self.plan.hidden, [torch.Generator().manual_seed(seed) for seed in self.observed.seeds]
            first = torch.stack([0.3 * torch.randn(features, 1, wide, generator=g) for g in generator]).to(device)
            second = torch.stack([torch.randn(1, wide, out, generator=g) for g in generator]).to(device)
            hidden_bias = torch.zeros(s, m, 1, wide, device=device)
            second = second / math.sqrt(wide)  # as the first layer: seeds differ, settings start alike
            made = [first.expand(-1, -1, m, -1), hidden_bias, second.expand(-1, m, -1, -1), bias]
        return [v.clone(memory_format=torch.contiguous_format).requires_grad_() for v in made]

    def _first_estimates(self) -> Tensor:
        """Observed labels at probability 0.995, the rest between 0.4 and 0.6: seeds x rows x models x classes."""
        generator = torch.Generator().manual_seed(0)
        start = math.log(0.6 / 0.4) * (2 * torch.rand(self.data.train_y.shape, generator=generator) - 1)
        per_cell = len(self.method.options) * self.grid
        seen = each(self.observed.seen.permute(1, 2, 0, 3), per_cell, 2)
        return torch.where(seen, math.log(0.995 / 0.005), start.to(self.device)[None, :, None])

    def forward(self, x: Tensor, drop: bool) -> Tensor:
        """Return the outputs, seeds x models x rows x outputs, for rows of shape seeds x rows x features."""
        weight, bias, *rest = self.values
        out = (x @ weight.flatten(2)).unflatten(2, weight.shape[2:]).transpose(1, 2) + bias
        if not rest:
            return out
        return F.dropout(out.relu(), DROPOUT, drop) @ rest[0] + rest[1]

    def split(self, out: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return logits and the predicted count."""
        if self.method.state != "count":
            return out, None
        return out[..., :-1], self.classes * out[..., -1].sigmoid()

    def objective(self, progress: float, estimates: Tensor | None) -> Tensor:
        """Return the sum over the models of their mean loss on `self.rows`."""
        logits, count = self.split(self.forward(self.data.train_x[self.rows], True))
        seen = self.observed.seen[:, self.seed_index, self.rows].transpose(0, 1)
        target = each(seen, len(self.method.options) * self.grid, 1)
        whole = Batch(logits, target, self.cells[0], progress, count, estimates)
        if not self.method.reads_cell:
            return self._loss(whole)
        total = logits.new_zeros(())
        for i, cell in enumerate(self.cells):
            part = slice(i * self.grid, (i + 1) * self.grid)
            tensors = [None if t is None else t[:, part] for t in (logits, target, count, estimates)]
            total = total + self._loss(Batch(tensors[0], tensors[1], cell, progress, *tensors[2:]))  # type: ignore[arg-type]
        return total

    def _loss(self, batch: Batch) -> Tensor:
        if not self.method.couples_rows:
            return self.method.loss(batch).mean(-1).sum()
        flat = [batch.logits.flatten(0, 1), batch.target.flatten(0, 1)]
        if batch.estimates is None:
            loss = torch.vmap(lambda x, t: self.method.loss(batch._replace(logits=x, target=t)))(*flat)
        else:
            loss = torch.vmap(lambda x, t, e: self.method.loss(batch._replace(logits=x, target=t, estimates=e)))(
                *flat, batch.estimates.flatten(0, 1)
            )
        return loss.mean(-1).sum()

    def update(self, progress: float) -> None:
        """Take one step on `self.rows`."""
        if self.table is None:
            grads = torch.autograd.grad(self.objective(progress, None), self.values)
        else:
            estimates = self.table[self.seed_index, self.rows].requires_grad_()
            loss = self.objective(progress, estimates.transpose(1, 2))
            *found, slope = torch.autograd.grad(loss, [*self.values, estimates])
            grads = tuple(found)
            self.table[self.seed_index, self.rows] = estimates.detach() - 4 * self.plan.batch * slope
        with torch.no_grad():
            for value, grad, state in zip(self.values, grads, self.state, strict=True):
                self._move(value, grad, state)

    def _move(self, value: Tensor, grad: Tensor, state: list[Tensor]) -> None:
        first_layer = value is self.values[0]  # its models are the third dimension
        rate, decay = (v if first_layer else v.unsqueeze(-1) for v in (self.rate, self.decay))
        if value is self.values[1] or value is self.values[-1]:
            decay = torch.zeros_like(decay)
        rate = rate * self.control[0]
        if self.head == "linear":
            state[0].mul_(MOMENTUM).add_(torch.addcmul(grad, value, decay))
            value.addcmul_(state[0], rate, value=-1)
            return
        state[0].lerp_(grad, 0.1)
        state[1].lerp_(grad * grad, 0.001)
        scale = (state[1] / self.control[2]).sqrt_().add_(1e-8)
        value.mul_(1 - rate * decay).sub_(state[0] / scale * (rate / self.control[1]))

    def train(self) -> None:
        """Run all epochs."""
        n, batch, epochs = self.observed.train.shape[1], self.plan.batch, self.plan.epochs
        steps = n // batch
        schedule = torch.tensor([_control(i, steps * epochs) for i in range(steps * epochs)], device=self.device)
        recorded = Recorded(self.update, self.device)
        generator = torch.Generator().manual_seed(self.observed.seeds[0])
        torch.manual_seed(self.observed.seeds[0])  # dropout
        for epoch in range(epochs):
            order = torch.rand(self.n_seeds, n, generator=generator).argsort(1).to(self.device)
            rows = self.observed.train.gather(1, order)
            phases = self.method.phases or epochs
            phase = min(epoch, phases - 1)
            for step in range(steps):
                self.rows.copy_(rows[:, step * batch : (step + 1) * batch])
                self.control.copy_(schedule[epoch * steps + step])
                recorded(phase / max(phases - 1, 1))

    @torch.no_grad()
    def scores(self, seed: int, x: Tensor) -> Tensor:
        """Return the logits of all models of a seed, models x rows x classes."""
        weight, bias, *rest = (v[seed] for v in self.values)
        out = (x @ weight.flatten(1)).unflatten(1, weight.shape[1:]).transpose(0, 1) + bias
        return self.split(out.relu() @ rest[0] + rest[1] if rest else out)[0]

    @torch.no_grad()
    def scores_of(self, seed: int, model: int, x: Tensor) -> Tensor:
        """Return the logits of one model, rows x classes."""
        weight, bias, *rest = self.values
        out = x @ weight[seed][:, model] + bias[seed, model]
        return self.split(out.relu() @ rest[0][seed, model] + rest[1][seed, model] if rest else out)[0]


def each(t: Tensor, times: int, dim: int) -> Tensor:
    """Repeat each slice of a dimension; unlike `repeat_interleave`, surely without a word to the host."""
    shape = [-1] * (t.ndim + 1)
    shape[dim + 1] = times
    return t.unsqueeze(dim + 1).expand(shape).flatten(dim, dim + 1)


def expected_count(cell: Cell) -> float:
    """The true number of labels per row, if `guess` is what rows with all labels have."""
    return max(cell.mean / min(cell.mean / cell.guess, 0.95), 0.01)


def _control(step: int, steps: int) -> list[float]:
    rise = min((step + 1) / max(0.05 * steps, 1), 1.0)
    factor = rise * 0.5 * (1 + math.cos(math.pi * step / steps))
    return [factor, 1 - 0.9 ** (step + 1), 1 - 0.999 ** (step + 1)]


class Recorded:
    """Call a function of tensors that stay in place; on a GPU, record it after two calls and replay the record."""

    def __init__(self, function: Callable[[float], None], device: torch.device) -> None:
        self.function, self.records = function, device.type == "cuda"
        self.calls: dict[float, int] = {}
        self.graph: tuple[float, Any] | None = None

    def __call__(self, argument: float) -> None:
        calls = self.calls[argument] = self.calls.get(argument, 0) + 1
        if not self.records or calls <= 2:
            self.function(argument)
            return
        if self.graph is None or self.graph[0] != argument:
            self.graph = None
            self._record(argument)
        if self.graph is None:
            self.function(argument)
        else:
            self.graph[1].replay()

    def _record(self, argument: float) -> None:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        torch.cuda.synchronize()
        try:
            with torch.cuda.stream(stream):
                graph.capture_begin()
                try:
                    self.function(argument)
                finally:
                    graph.capture_end()
            self.graph = (argument, graph)
        except Exception as error:  # slower, not wrong
            self.records = False
            print(f"not recorded: {error}", flush=True)
        torch.cuda.synchronize()


Score = Callable[[Tensor, Tensor], Tensor]  # models x rows x classes, and labels of the same shape -> a number a model
Measure = Callable[[Tensor, Data, str, float], dict[str, float]]  # test scores, data, probability, k -> metrics


class Trial(NamedTuple):
    """The best setting of one share kept: its place, held-out score, and the test metrics of each seed."""

    valid: float
    option: float
    rate: float
    decay: float
    metrics: list[dict[str, float]]
    valids: list[float]


def trials(stack: Stack, settings: Sequence[tuple[float, float]], score: Score, measure: Measure) -> dict[str, Trial]:
    """Train a stack; for each share kept choose by the mean held-out score over the seeds, and measure that one."""
    stack.train()
    observed, data = stack.observed, stack.data
    per_keep = len(stack.method.options) * stack.grid
    valid = torch.stack([_held_out(stack, seed, score) for seed in range(stack.n_seeds)]).double()
    valid = torch.where(valid.isfinite(), valid, -1).cpu()  # seeds x models
    found = {}
    for i, keep in enumerate(observed.keeps):
        mean = valid[:, i * per_keep : (i + 1) * per_keep].mean(0)
        best = i * per_keep + int(mean.argmax())
        cell, (rate, decay) = stack.cells[best // stack.grid], settings[best % stack.grid]
        metrics = [
            measure(stack.scores_of(s, best, data.test_x), data, stack.method.probability, cell.mean)
            for s in range(stack.n_seeds)
        ]
        found[keep] = Trial(mean.max().item(), cell.option, rate, decay, metrics, valid[:, best].tolist())
    return found


def _held_out(stack: Stack, seed: int, score: Score) -> Tensor:
    """Return the held-out score of all models of a seed."""
    observed = stack.observed
    rows = observed.held_out[seed]
    per_keep = len(stack.method.options) * stack.grid
    scores = stack.scores(seed, stack.data.train_x[rows])
    found = []
    for i in range(len(observed.keeps)):
        part = scores[i * per_keep : (i + 1) * per_keep]
        value = score(part, observed.seen[i, seed][rows].expand(part.shape))
        found.append(torch.where(part.isfinite().flatten(1).all(1), value, torch.nan))
    return torch.cat(found)


def stacks(
    data: Data,
    head: str,
    method: Method,
    keeps: Sequence[str],
    seeds: Sequence[int],
    settings: Sequence[tuple[float, float]],
    score: Score,
    measure: Measure,
    plan: Plan,
) -> dict[str, Trial]:
    """Train the settings for all shares kept, in stacks of bounded size."""
    features, classes = data.train_x.shape[1], data.train_y.shape[1]
    size = features * classes if head == "linear" else plan.hidden * (features + classes)
    if method.state == "estimates":
        size += data.train_y.numel()
    at_once = max(1, MOST_FLOATS // (size * len(seeds) * len(settings) * len(method.options)))
    found: dict[str, Trial] = {}
    for at in range(0, len(keeps), at_once):
        observed = observe(data, tuple(keeps[at : at + at_once]), tuple(seeds))
        found |= trials(Stack(data, observed, head, method, settings, plan), settings, score, measure)
        if data.train_x.is_cuda:
            torch.cuda.empty_cache()  # what a recorded step held, for the processes beside this one
    return found


def fit(
    data: Data,
    head: str,
    method: Method,
    keeps: Sequence[str],
    *,
    seeds: int,
    tuned_on: int,
    score: Score,
    measure: Measure,
    plan: Plan | None = None,
) -> Iterator[common.Row]:
    """Tune on the held-out rows of the first seeds, widening the grid until the best rate is inside; yield all seeds.

    Each row has the keep and seed, the setting chosen, its held-out score, whether the rate was at an end of the grid
    after all, and the test metrics.
    """
    plan = plan or Plan.of(len(data.train_x) * 4 // 5)
    rates: dict[str, list[float]] = {keep: sorted(RATES[head]) for keep in keeps}
    best: dict[str, Trial] = {}
    wanted = {tuple(RATES[head]): list(keeps)}
    for turn in range(plan.rounds):
        following: dict[tuple[float, ...], list[str]] = {}
        for new, some in wanted.items():
            settings = list(itertools.product(new, DECAYS[head]))
            found = stacks(data, head, method, some, range(tuned_on), settings, score, measure, plan)
            for keep, trial in found.items():
                rates[keep] = sorted({*rates[keep], *new})
                if keep not in best or trial.valid > best[keep].valid:
                    best[keep] = trial
                beyond = _beyond(best[keep].rate, rates[keep])
                if beyond:
                    following.setdefault(beyond, []).append(keep)
        wanted = following
        if not wanted or turn == plan.rounds - 1:
            break
    for keep, trial in best.items():
        metrics, valids = list(trial.metrics), list(trial.valids)
        if tuned_on < seeds:
            alone = method._replace(options=(trial.option,))
            setting = [(trial.rate, trial.decay)]
            more = stacks(data, head, alone, [keep], range(tuned_on, seeds), setting, score, measure, plan)
            metrics, valids = metrics + more[keep].metrics, valids + more[keep].valids
        chosen = {"option": trial.option, "lr": trial.rate, "decay": trial.decay}
        chosen["at_end"] = bool(_beyond(trial.rate, rates[keep]))
        for seed, (valid, found_metrics) in enumerate(zip(valids, metrics, strict=True)):
            yield {"keep": keep, "seed": seed, **chosen, "valid": round(valid, 5), **found_metrics}


def _beyond(rate: float, tried: list[float]) -> tuple[float, ...]:
    """Two further rates if the best is the first or last of those tried."""
    if rate == tried[0]:
        return (rate / FACTOR**2, rate / FACTOR)
    if rate == tried[-1]:
        return (rate * FACTOR, rate * FACTOR**2)
    return ()


def recall_at(k: int) -> Score:
    """Mean recall at k over the rows with a label, for each model."""

    def score(scores: Tensor, target: Tensor) -> Tensor:
        top = scores.topk(min(k, scores.shape[-1]), -1).indices
        hits, count = target.gather(-1, top).sum(-1), target.sum(-1)
        return (hits / count.clamp(min=1)).sum(-1) / (count > 0).sum(-1).clamp(min=1)

    return score


def run(
    work: Callable[[dict[str, str], Any], list[common.Row]],
    settings: list[dict[str, str]],
    arguments: Any,
    results: common.Results,
) -> None:
    """Work through settings in order, in this process or in several that share the device; start none after the time.

    Each answer is written as it comes, so that an interrupted run goes on where it stopped.
    """
    start = time.time()
    end = start + 60 * arguments.minutes
    device = torch.cuda.get_device_name() if torch.device(arguments.device).type == "cuda" else "CPU"

    def report(setting: dict[str, str], rows: list[common.Row] | str) -> None:
        if isinstance(rows, str):
            print(f"failed: {setting}\n{rows}", flush=True)
            return
        results.extend([setting | row | {"device": device} for row in rows])
        print(f"{time.time() - start:6.1f}s", *setting.values(), rows[0].get("seconds"), flush=True)

    if arguments.workers == 1:
        for setting in settings:
            if time.time() < end:
                report(setting, work(setting, arguments))
        return
    context = multiprocessing.get_context("spawn")
    questions, answers = context.Queue(), context.Queue()
    workers = [
        context.Process(target=_answer, args=(work, questions, answers, arguments), daemon=True)
        for _ in range(arguments.workers)
    ]
    for worker in workers:
        worker.start()
    waiting, open_questions = list(reversed(settings)), 0
    while waiting and open_questions < arguments.workers:
        questions.put(waiting.pop())
        open_questions += 1
    while open_questions:
        try:
            answer = answers.get(timeout=5)
        except queue.Empty:
            if not any(worker.is_alive() for worker in workers):
                break
            continue
        report(*answer)
        open_questions -= 1
        if waiting and time.time() < end:
            questions.put(waiting.pop())
            open_questions += 1
    for _ in workers:
        questions.put(None)
    for worker in workers:
        worker.join(timeout=20)


def _answer(work: Any, questions: Any, answers: Any, arguments: Any) -> None:
    torch.set_num_threads(1)
    while (setting := questions.get()) is not None:
        try:
            answers.put((setting, work(setting, arguments)))
        except Exception as error:
            answers.put((setting, traceback.format_exc()))
            if "CUDA error" in str(error):  # nothing works after it in this process
                return


_loaded: dict[str, Data] = {}


def loaded(arguments: Any, name: str) -> Data:
    """The set, read once by each process; the one before is let go."""
    if name not in _loaded:
        _loaded.clear()
        observe.cache_clear()
        _loaded[name] = (
            tiny(name, arguments.device) if arguments.smoke else load(arguments.data, name, arguments.device)
        )
    return _loaded[name]


def prepare(device: str) -> None:
    """Let a GPU multiply in TF32."""
    if torch.device(device).type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True


def probabilities(scores: Tensor, link: str, k: float) -> Tensor:
    """Scores to label probabilities."""
    if link == "sigmoid":
        return scores.sigmoid()
    if link == "quasibinary":
        rows = scores.shape[0]
        log_c = scores.flatten().logsumexp(0) - math.log(max(rows * k, 1e-6))
        return (scores - log_c).exp().clamp(max=1)
    return ll.lml(scores, min(k, scores.shape[-1]))


def ranks(values: np.ndarray) -> np.ndarray:
    """Rank each row, 1 for the largest; ties share the mean of their ranks."""
    above = (values[:, None, :] > values[:, :, None]).sum(-1)
    equal = (values[:, None, :] == values[:, :, None]).sum(-1)
    return above + (equal + 1) / 2
