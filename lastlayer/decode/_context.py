"""How probable is it that a label is written down, given its score and the other labels of the row?

Scores that say how probable a label is are brought to the scale of the labels that are written down: one slope for all
labels and one shift per label, drawn to the common one where a label is rare. What the other labels of the row say
comes from the residuals, label less probability: with S the covariance of the residuals r and P the inverse of S, the
best linear prediction of one residual from the others is

    r_c ~ - sum_{j != c} r_j P_jc / P_cc

A logistic regression of six numbers, the same for all labels, puts the two together with the number of the row's
labels. Written labels level off at the rate at which they are written down, which a logistic curve does not. A curve
that never falls, through the shares of written labels in 64 bins of the regression, corrects this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from lastlayer._check import Labels

BUDGET = 1 << 20  # entries of a chunk of rows and labels
SAMPLE = 1 << 27  # entries that are looked at to fit
LEAST_ROWS = 5000  # that are looked at however many labels there are
NEGATIVES = 400_000  # entries without a label in a regression
MOST = 1024  # labels whose residuals are taken into account, the most frequent
RIDGE = 0.1  # added to the covariance, as a share of the mean variance
SHRINK = 5.0  # how strongly the shift of a label is drawn to the common one, in labels
BINS, REACH = 64, 8.0  # of the logits in the histogram for the rates
SURE = 0.1  # the share of a label's rows that tell its rate: those that the model is surest of
FLOOR = 1e-6
LEAST_SLOPE = 1e-3  # of the curve, so that it keeps the order


Features = tuple[Tensor, ...]  # of one shape


class Chunk(NamedTuple):
    """Rows of log-odds, labels and what is known (None is all), each ``(rows, n_classes)``; and where they start."""

    start: int
    logit: Tensor
    label: Tensor
    known: Tensor | None


@dataclass(frozen=True)
class Data:
    """Checked probabilities, dense or as lists with their classes, and labels, all of one batch dimension."""

    scores: Tensor
    indices: Tensor | None
    labels: Labels

    @property
    def n_classes(self) -> int:
        return self.labels.n_classes

    def __len__(self) -> int:
        return len(self.scores)

    def chunks(self, rows: Tensor | None = None) -> Iterator[Chunk]:
        """All rows, or the given ones, a bounded number of entries at a time."""
        size, total = max(BUDGET // max(self.n_classes, 1), 1), len(self) if rows is None else len(rows)
        for start in range(0, total, size):
            part = slice(start, min(start + size, total)) if rows is None else rows[start : start + size]
            index = None if self.labels.index is None else self.labels.index[part]
            dense = None if self.labels.dense is None else self.labels.dense[part]
            labels = Labels(index, dense, self.n_classes)
            p = self.scores[part].float()
            if self.indices is not None:
                listed = torch.where(self.indices[part] < 0, self.n_classes, self.indices[part].long())
                p = p.new_zeros(len(p), self.n_classes + 1).scatter(1, listed, p)[:, : self.n_classes]
            p = torch.where(p.isnan(), 0, p)
            label = labels.positive()
            yield Chunk(start, p.clamp(FLOOR, 1 - FLOOR).logit(), label, labels.known())


@dataclass(frozen=True)
class Context:
    """What :func:`fit` finds."""

    slope: float
    shift: Tensor  # (n_classes,)
    frequent: Tensor  # (m,)
    pull: Tensor  # (m, n_classes)
    weight: Tensor  # (6,)
    curve: Tensor  # (BINS,), the log-odds at the middle of each bin of the regression's

    def calibrated(self, chunk: Chunk) -> Tensor:
        """The log-odds of the scores alone, on the scale of the written labels."""
        return self.slope * chunk.logit + self.shift

    def features(self, chunk: Chunk) -> Features:
        """What the regression looks at, tensors ``(rows, n_classes)``."""
        logit = self.calibrated(chunk)
        p, label = logit.sigmoid(), chunk.label.to(logit.dtype)
        residual = label - p
        if chunk.known is not None:
            p, residual = torch.where(chunk.known, p, 0), torch.where(chunk.known, residual, 0)
        said = residual[:, self.frequent] @ self.pull
        return features_of(logit, p, said, label.sum(-1, keepdim=True) - label, p.sum(-1, keepdim=True) - p)

    def combined(self, features: Features) -> Tensor:
        """The log-odds of the regression from what it looks at."""
        constant, *slopes = self.weight.tolist()
        found: Tensor = features[0] * slopes[0] + constant
        for slope, feature in zip(slopes[1:], features[1:], strict=True):
            found.add_(feature, alpha=slope)
        return found

    def regression(self, chunk: Chunk) -> Tensor:
        """The log-odds of the regression, whose order counts."""
        return self.combined(self.features(chunk))

    def logits(self, chunk: Chunk) -> Tensor:
        """The log-odds that each label is written down, given its score and the row's other labels."""
        return self.curved(self.regression(chunk))

    def curved(self, context: Tensor) -> Tensor:
        """The log-odds of the regression, corrected by the curve."""
        place = ((context + REACH) * (BINS / (2 * REACH)) - 0.5).clamp(0, BINS - 1)
        low = place.long().clamp(max=BINS - 2)
        there = torch.lerp(self.curve[low], self.curve[low + 1], place - low)
        middle = REACH * (1 - 1 / BINS)
        return there + LEAST_SLOPE * (context - context.clamp(-middle, middle))  # beyond the bins it still rises


def features_of(logit: Tensor, p: Tensor, said: Tensor, others: Tensor, expected: Tensor) -> Features:
    """Return what the regression looks at beside a constant: the score, what other labels say, and their number."""
    both = (p + said).clamp_(1e-4, 1 - 1e-4).logit_()
    alone, more = (others == 0).to(logit.dtype), others.log1p() - expected.log1p()
    return logit, both, said, alone, more


def fit(data: Data) -> tuple[Context, Tensor, Tensor]:
    """Fit the context; also return the rate at which each label is written down, and the same for all labels."""
    generator = torch.Generator().manual_seed(0)
    n = data.n_classes
    most = max(SAMPLE // max(n, 1), LEAST_ROWS)
    rows = None
    if len(data) > most:
        rows = torch.randperm(len(data), generator=generator)[:most].sort().values.to(data.scores.device)
    device = data.scores.device
    base = _regression(data, rows, generator, lambda c: (c.logit,))
    slope, common = float(base[1]), float(base[0])
    if not slope > 0:  # scores that say nothing, or the opposite
        slope = 1.0
    shift, counts = _shifts(data, rows, slope, common)
    m = min(n, MOST, max((1 << 25) // max(n, 1), 1))
    frequent = counts.topk(m).indices
    zeros = [torch.zeros(shape, device=device) for shape in ((m, n), (6,), (BINS,))]
    context = Context(slope, shift, frequent, *zeros)
    context = replace(context, pull=_pull(data, rows, context))
    context = replace(context, weight=_regression(data, rows, generator, context.features).float())
    seen, written = _binned(data, rows, context)
    context = replace(context, curve=_curve(seen.sum(0).cpu(), written.sum(0).cpu()).to(device))
    return context, *_rates(seen, written, counts)


def _regression(
    data: Data, rows: Tensor | None, generator: torch.Generator, features: Callable[[Chunk], Features]
) -> Tensor:
    """A logistic regression of the labels on features, from all labels and a sample of the other entries."""
    taken = _Columns()
    entries = (len(data) if rows is None else len(rows)) * data.n_classes
    share = min(NEGATIVES / max(entries, 1), 1.0)
    for chunk in data.chunks(rows):
        drawn = torch.rand(chunk.label.shape, generator=generator).to(chunk.label.device) < share
        chosen = drawn | chunk.label if chunk.known is None else (drawn | chunk.label) & chunk.known
        place, answer = chosen.flatten().nonzero().squeeze(-1), chunk.label[chosen].double()
        looked_at = [feature.flatten()[place].double() for feature in features(chunk)]
        taken.add(torch.stack([torch.ones_like(answer), *looked_at, answer, answer + (1 - answer) / share]))
    found = taken.found()
    if found is None:
        return torch.zeros(2, dtype=torch.float64)
    return _logistic(found[:-2], found[-2], found[-1])


class _Columns:
    """Columns in one tensor that grows. Many small tensors between large temporary ones would break up the memory."""

    def __init__(self) -> None:
        self.held: Tensor | None = None
        self.n = 0

    def add(self, more: Tensor) -> None:
        wanted = self.n + more.shape[1]
        if self.held is None or wanted > self.held.shape[1]:
            wider = more.new_empty(len(more), max(2 * wanted, 1 << 16))
            if self.held is not None:
                wider[:, : self.n] = self.held[:, : self.n]
            self.held = wider
        self.held[:, self.n : wanted] = more
        self.n = wanted

    def found(self) -> Tensor | None:
        return None if self.held is None else self.held[:, : self.n]


def _logistic(features: Tensor, answer: Tensor, weight: Tensor) -> Tensor:
    """Newton's method for a logistic regression, with a touch of ridge; features are ``(f, entries)``."""
    weights = features.new_zeros(len(features))
    ridge = 1e-3 * torch.eye(len(features), dtype=features.dtype, device=features.device)
    for _ in range(50):
        p = (weights @ features).sigmoid()
        slope = features @ (weight * (p - answer)) + ridge @ weights
        curve = (features * (weight * p * (1 - p))) @ features.T + ridge
        step = torch.linalg.solve(curve, slope)
        weights = weights - step * min(1.0, 5.0 / max(float(step.norm()), 1e-12))
        if float(step.norm()) < 1e-6:
            break
    return weights


def _shifts(data: Data, rows: Tensor | None, slope: float, common: float) -> tuple[Tensor, Tensor]:
    """A shift per label, such that as many labels are expected as there are; and how many there are."""
    n, device = data.n_classes, data.scores.device
    shift = torch.full((n,), common, device=device)
    counts = torch.zeros(n, device=device)
    for step in range(4):
        expected, curve = torch.zeros(n, device=device), torch.zeros(n, device=device)
        for chunk in data.chunks(rows):
            p = (slope * chunk.logit + shift).sigmoid()
            p = p if chunk.known is None else torch.where(chunk.known, p, 0)
            expected, curve = expected + p.sum(0), curve + (p * (1 - p)).sum(0)
            if step == 0:
                counts = counts + chunk.label.sum(0)
        change = (expected - counts + SHRINK * (shift - common)) / (curve + SHRINK)
        shift = shift - change.clamp(-2, 2)
    return shift, counts


def _pull(data: Data, rows: Tensor | None, context: Context) -> Tensor:
    """What a residual of a frequent label says of each label's, ``(m, n_classes)``; nothing of its own."""
    frequent, n = context.frequent, data.n_classes
    m, device = len(frequent), data.scores.device
    among, across = torch.zeros(m, m, device=device), torch.zeros(m, n, device=device)
    for chunk in data.chunks(rows):
        residual = chunk.label.float() - context.calibrated(chunk).sigmoid()
        residual = residual if chunk.known is None else torch.where(chunk.known, residual, 0)
        own = residual[:, frequent]
        among, across = among + own.T @ own, across + own.T @ residual
    among = among + RIDGE * among.diagonal().mean().clamp(min=1e-12) * torch.eye(m, device=device)
    inverse = torch.linalg.inv(among.double())
    pull: Tensor = (inverse @ across.double()).float()
    within = -inverse / inverse.diagonal()
    within.fill_diagonal_(0)
    pull[:, frequent] = within.float()
    return pull


def _cell(x: Tensor) -> Tensor:
    return ((x + REACH) * (BINS / (2 * REACH))).long().clamp(0, BINS - 1)


def _binned(data: Data, rows: Tensor | None, context: Context) -> tuple[Tensor, Tensor]:
    """How many entries, and how many written labels, of each label are in each bin, ``(n_classes, BINS)``."""
    n, device = data.n_classes, data.scores.device
    seen, written = torch.zeros(2, n * BINS, dtype=torch.int64, device=device)
    first = torch.arange(n, device=device) * BINS
    for chunk in data.chunks(rows):
        place = _cell(context.regression(chunk)).add_(first)
        seen += torch.bincount((place if chunk.known is None else place[chunk.known]).flatten(), minlength=n * BINS)
        marked = chunk.label if chunk.known is None else chunk.label & chunk.known
        written += torch.bincount(place[marked], minlength=n * BINS)
    return seen.view(n, BINS), written.view(n, BINS)


def _curve(seen: Tensor, written: Tensor) -> Tensor:
    """The log-odds of a written label in each bin of the regression's, never falling; empty bins keep that one."""
    middle = (torch.arange(BINS, dtype=torch.float64) + 0.5) * (2 * REACH / BINS) - REACH
    shares = rising((written + middle.sigmoid()).tolist(), (seen + 1).tolist())
    share = torch.tensor(shares, dtype=torch.float64)
    return (share.clamp(FLOOR, 1 - FLOOR).logit() + LEAST_SLOPE * middle).float()  # level stretches keep their order


def rising(written: list[float], seen: list[float]) -> list[float]:
    """The shares ``written / seen`` nearest to the given ones that never fall: neighbours that do are pooled."""
    pools: list[tuple[float, float, int]] = []
    for a, b in zip(written, seen, strict=True):
        pool = (a, b, 1)
        while pools and pools[-1][0] * pool[1] >= pool[0] * pools[-1][1]:
            before = pools.pop()
            pool = (before[0] + pool[0], before[1] + pool[1], before[2] + pool[2])
        pools.append(pool)
    return [a / b for a, b, count in pools for _ in range(count)]


def _rates(seen: Tensor, written: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The share of each label's surest rows in which it is written down, drawn to the common rate; and that rate.

    Of the rows that the model is surest of, nearly all have the label; where fewer have it written down, it is missing.
    The common rate is the upper quartile over labels: the model is not sure of every label.
    """
    total, written = (t.float().flip(-1).cumsum(-1) for t in (seen, written))
    wanted = (SURE * counts).ceil().clamp(min=5)
    first = (total >= wanted[:, None]).to(torch.uint8).argmax(-1, keepdim=True)
    sure, right = total.gather(-1, first).squeeze(-1), written.gather(-1, first).squeeze(-1)
    share = (right + 0.5) / (sure + 1)
    enough = counts >= 20
    common = share[enough].quantile(0.75) if bool(enough.any()) else counts.new_tensor(0.9)
    common = common.clamp(0.05, 0.99)
    return ((right + 10 * common) / (sure + 10)).clamp(0.05, 0.99), common


def counts_of(data: Data) -> Tensor:
    """In how many rows each label is written down."""
    n = data.n_classes
    if data.labels.dense is not None:
        return (data.labels.dense > 0).sum(0)
    assert data.labels.index is not None
    index = data.labels.index
    return torch.bincount(torch.where(index < 0, n, index).flatten(), minlength=n + 1)[:n]
