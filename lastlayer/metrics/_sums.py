"""Sums that add up over batches and processes, and the metrics made of them: shared by functions and classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lastlayer import shard
from lastlayer.metrics import _ranking
from lastlayer.metrics._ranking import Cuts, Gain, Ranking
from lastlayer.shard import ClassShard

Empty = Literal["skip", "zero", "one"]
Average = Literal["samples", "macro", "micro", "weighted", "none"]
SetKind = Literal["precision", "recall", "f1", "jaccard", "hamming", "exact"]
Kind = Literal["precision", "recall", "r_precision", "ndcg", "psp", "accuracy", "f1", "fall_out"]


REST = {"skip": float("nan"), "zero": 0.0, "one": 1.0}  # what each policy puts in place of a value that is not there


class RowSums(NamedTuple):
    """Gain and attainable gain over rows with labels, each ``(q,)``, and the number of rows with and without."""

    gain: Tensor
    best: Tensor
    full: Tensor
    empty: Tensor


class LabelCounts(NamedTuple):
    """For each cut and class: right predictions and predictions, ``(q, n_classes)``; and labels, ``(n_classes,)``."""

    hits: Tensor
    predicted: Tensor
    labels: Tensor


def exact_dtype(device: torch.device) -> torch.dtype:
    """The dtype of sums: float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def even_steps(n: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return ``i / n`` for i from 0 to n, rounded once: a score of 0.3 is not below 3 / 10, as it is with linspace."""
    return (torch.arange(n + 1, dtype=exact_dtype(device), device=device) / n).to(dtype)


class RowGains(NamedTuple):
    """Gain and attainable gain of each row at each cut, ``(rows, q)``, and which rows count, ``(rows,)``."""

    gain: Tensor
    best: Tensor
    full: Tensor


def row_sums(rows: RowGains) -> RowSums:
    """Add up a metric over the rows."""
    gain, best = (torch.where(rows.full[:, None], v, 0).sum(0) for v in (rows.gain, rows.best))
    return RowSums(gain, best, rows.full.sum(), (~rows.full).sum())


def row_gains(
    kind: Kind,
    ranking: Ranking,
    k: Cuts,
    inverse: Tensor | None = None,
    part: ClassShard | None = None,
    gain: Gain = "binary",
    n_classes: int | None = None,
) -> RowGains:
    """Return the value of each row; `inverse` holds the inverse propensities of all classes for ``"psp"``."""
    dtype = exact_dtype(ranking.hit.device)
    hit, count, at, full = ranking.hit.to(dtype), ranking.count[:, None], k.at, ranking.count > 0
    if kind == "psp":
        weight = hit if inverse is None else hit * inverse[ranking.index.clamp(min=0)]
        gained = k.take(weight.cumsum(-1))
        best = k.take(_best_weights(ranking, inverse, k.most, part).cumsum(-1))
        return RowGains(gained / at.clamp(min=1), best / at.clamp(min=1), full)
    if kind == "ndcg":
        discount = 1 / torch.arange(2, k.most + 2, dtype=dtype, device=hit.device).log2()
        ideal = k.take((_best_gains(ranking, gain, k.most, part) * discount).cumsum(-1))
        value = k.take((hit * discount).cumsum(-1)) / torch.where(ideal > 0, ideal, 1)
    elif kind == "fall_out":
        wrong = _negatives(ranking, part, n_classes)[:, None]
        value = k.take(((ranking.index >= 0) & (hit == 0)).to(dtype).cumsum(-1)) / wrong.clamp(min=1)
        full = wrong.squeeze(-1) > 0
    else:
        gained = k.take(hit.cumsum(-1))
        if kind == "accuracy":
            value = (gained > 0).to(dtype)
        elif kind == "f1":
            value = 2 * gained / (at + count).clamp(min=1)
        else:
            whole = {"precision": at, "recall": count, "r_precision": torch.minimum(at, count)}[kind]
            value = gained / whole.clamp(min=1)
    return RowGains(value, torch.ones_like(value), full)


def _negatives(ranking: Ranking, part: ClassShard | None, n_classes: int | None) -> Tensor:
    """The number of classes of each row that are known to be no label, over all ranks."""
    labels = ranking.labels
    if n_classes is not None:
        return n_classes - ranking.count
    if labels.dense is not None:
        wrong = (labels.dense == 0).sum(-1, keepdim=True)
        return shard.reduce(wrong, "sum", part).squeeze(-1)
    own = torch.full((1,), ranking.width, dtype=torch.int64, device=ranking.count.device)
    return shard.reduce(own, "sum", part) - ranking.count


def _best_gains(ranking: Ranking, gain: Gain, k: int, part: ClassShard | None) -> Tensor:
    """The `k` largest gains of each row, 0 beyond the number of its labels: ``(rows, k)``."""
    labels = ranking.labels
    if gain == "binary" or labels.dense is None:
        position = torch.arange(k, device=ranking.count.device)
        return (position < ranking.count[:, None]).to(exact_dtype(position.device))
    return _largest(labels.dense, lambda dense: _ranking.graded(dense, gain), k, part)


def _best_weights(ranking: Ranking, inverse: Tensor | None, k: int, part: ClassShard | None) -> Tensor:
    """The `k` largest weights among each row's labels, 0 beyond their number: ``(rows, k)``."""
    labels = ranking.labels
    if inverse is None:
        return _best_gains(ranking, "binary", k, part)
    if labels.dense is not None:
        own = inverse if part is None else inverse[part.start : part.stop]
        return _largest(labels.dense, lambda dense: torch.where(dense > 0, own, 0), k, part)
    assert labels.index is not None
    held = torch.where(labels.index >= 0, inverse[labels.index.clamp(min=0)], 0)
    best = held.sort(-1, descending=True).values[:, :k]
    return torch.nn.functional.pad(best, (0, k - best.shape[-1]))


def _largest(dense: Tensor, weigh: Callable[[Tensor], Tensor], k: int, part: ClassShard | None) -> Tensor:
    """The `k` largest weights of each row over the classes of all ranks, a few rows at a time: ``(rows, k)``."""
    rows, n = dense.shape
    best = torch.zeros(rows, k, dtype=exact_dtype(dense.device), device=dense.device)
    for c in _ranking.chunks(rows, n):
        best[c, : min(k, n)] = weigh(dense[c]).topk(min(k, n), -1).values.to(best.dtype)
    return best if part is None else shard.gather(best, part).sort(-1, descending=True).values[:, :k]


def settle_each(rows: RowGains, empty: Empty) -> Tensor:
    """The metric of each row, ``(rows, q)``; nan where a row is skipped."""
    rest = REST[empty]
    return torch.where(rows.full[:, None], rows.gain / torch.where(rows.best > 0, rows.best, 1), rest)


def settle_rows(sums: RowSums, empty: Empty) -> Tensor:
    """The metric of the sums, ``(q,)``; 0 where no row is left to speak of."""
    mean = torch.where(sums.best > 0, sums.gain / sums.best.clamp(min=torch.finfo(sums.best.dtype).tiny), 0)
    if empty == "skip":
        return mean
    value = 1.0 if empty == "one" else 0.0
    return (mean * sums.full + value * sums.empty) / (sums.full + sums.empty).clamp(min=1)


def label_counts(ranking: Ranking, k: Cuts, n_classes: int) -> LabelCounts:
    """Count for each class: one scatter for all cuts, since what is in a short list is in each longer one."""
    device = ranking.index.device
    q = k.at.shape[-1]
    position = torch.arange(k.most, device=device)
    order = k.at.argsort(-1)
    if len(k.at) == 1:
        first = torch.searchsorted(k.at.gather(-1, order)[0], position, right=True).expand_as(ranking.index)
    else:
        first = (position >= k.at).long()  # one cut per row: in it, or beyond
    table = torch.zeros(2, q * n_classes + 1, dtype=torch.int64, device=device)  # the last entry takes the padding
    seen = (ranking.index >= 0) & (first < q)
    place = torch.where(seen, first * n_classes + ranking.index, q * n_classes).flatten()
    table[0].index_add_(0, place, ranking.hit.flatten().long())
    table[1].index_add_(0, place, torch.ones_like(place))
    counts = torch.empty(2, q, n_classes, dtype=torch.int64, device=device)
    counts[:, order[0]] = table[:, :-1].view(2, q, n_classes).cumsum(1)
    labels = ranking.labels
    if labels.dense is not None:
        return LabelCounts(counts[0], counts[1], (labels.dense > 0).sum(0))
    assert labels.index is not None
    true = torch.zeros(n_classes + 1, dtype=torch.int64, device=device)
    place = torch.where(labels.index < 0, n_classes, labels.index).flatten()
    true.index_add_(0, place, torch.ones_like(place))
    return LabelCounts(counts[0], counts[1], true[:-1])


class SetCounts(NamedTuple):
    """Right labels, predicted labels, true labels and decisions: per row, per class, or of all."""

    hits: Tensor
    predicted: Tensor
    labels: Tensor
    known: Tensor


def quotient(kind: SetKind, counts: SetCounts) -> tuple[Tensor, Tensor]:
    """The metric of counts, and where it is defined (its quotient is not 0/0)."""
    dtype = exact_dtype(counts.hits.device)
    hits, predicted, labels, known = (c.to(dtype) for c in counts)
    if kind == "exact":
        return ((hits == predicted) & (hits == labels)).to(dtype), (known > 0) | (predicted + labels > 0)
    over, under = {
        "precision": (hits, predicted),
        "recall": (hits, labels),
        "f1": (2 * hits, predicted + labels),
        "jaccard": (hits, predicted + labels - hits),
        "hamming": (predicted + labels - 2 * hits, known),
    }[kind]
    return over / under.clamp(min=1), under > 0


def settle_labels(kind: Kind, counts: LabelCounts, average: Average, empty: Empty) -> Tensor:
    """The average over classes, ``(q,)``, or the value of each, ``(q, n_classes)``."""
    assert kind in ("precision", "recall", "f1")
    hits, predicted, labels = counts
    if average == "micro":
        hits, predicted, labels = hits.sum(-1), predicted.sum(-1), labels.sum()
    value, _ = quotient(kind, SetCounts(hits, predicted, labels, labels))
    return value if average == "micro" else settle_groups(value, labels, average, empty)


def settle_groups(value: Tensor, labels: Tensor, average: str, empty: Empty) -> Tensor:
    """Average values of classes (or rows) with their numbers of labels; those without follow the policy."""
    full = labels > 0
    if average == "weighted":
        return (value * labels).sum(-1) / labels.sum(-1).clamp(min=1)
    rest = REST[empty]
    if average == "none":
        return torch.where(full, value, rest)
    if empty == "skip":
        return torch.where(full, value, 0).sum(-1) / full.sum(-1).clamp(min=1)
    return torch.where(full, value, rest).sum(-1) / max(full.shape[-1], 1)
