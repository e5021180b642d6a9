"""Sums that add up over batches and processes, and the metrics made of them: shared by functions and classes."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lastlayer import shard
from lastlayer.metrics import _ranking
from lastlayer.metrics._ranking import Cuts, Ranking
from lastlayer.shard import ClassShard

Empty = Literal["skip", "zero", "one"]
Average = Literal["samples", "macro", "micro", "weighted", "none"]
Kind = Literal["precision", "recall", "r_precision", "ndcg", "psp", "accuracy", "f1"]


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


def row_sums(
    kind: Kind, ranking: Ranking, k: Cuts, inverse: Tensor | None = None, part: ClassShard | None = None
) -> RowSums:
    """Add up a metric over the rows; `inverse` holds the inverse propensities of all classes for ``"psp"``."""
    gain, best = _row_gains(kind, ranking, k, inverse, part)
    full = ranking.count > 0
    total = [torch.where(full[:, None], v, 0).sum(0) for v in (gain, best)]
    return RowSums(total[0], total[1], full.sum(), (~full).sum())


def _row_gains(
    kind: Kind, ranking: Ranking, k: Cuts, inverse: Tensor | None, part: ClassShard | None
) -> tuple[Tensor, Tensor]:
    """The gain of each row at each cut and the best it could be, each ``(rows, q)``."""
    dtype = exact_dtype(ranking.hit.device)
    hit, count, at = ranking.hit.to(dtype), ranking.count[:, None], k.at
    if kind == "psp":
        weight = hit if inverse is None else hit * inverse[ranking.index.clamp(min=0)]
        found = k.take(weight.cumsum(-1))
        best = k.take(_best_weights(ranking, inverse, k.most, part).cumsum(-1))
        return found / at.clamp(min=1), best / at.clamp(min=1)
    if kind == "ndcg":
        discount = 1 / torch.arange(2, k.most + 2, dtype=dtype, device=hit.device).log2()
        ideal = discount.cumsum(0)[(torch.minimum(count, at) - 1).clamp(min=0)]
        gain = k.take((hit * discount).cumsum(-1)) / ideal
    else:
        found = k.take(hit.cumsum(-1))
        if kind == "accuracy":
            gain = (found > 0).to(dtype)
        elif kind == "f1":
            gain = 2 * found / (at + count).clamp(min=1)
        else:
            whole = {"precision": at, "recall": count, "r_precision": torch.minimum(at, count)}[kind]
            gain = found / whole.clamp(min=1)
    return gain, torch.ones_like(gain)


def _best_weights(ranking: Ranking, inverse: Tensor | None, k: int, part: ClassShard | None) -> Tensor:
    """The `k` largest weights among each row's labels, 0 beyond their number: ``(rows, k)``."""
    labels = ranking.labels
    if inverse is None:
        position = torch.arange(k, device=ranking.count.device)
        return (position < ranking.count[:, None]).to(exact_dtype(position.device))
    if labels.index is not None:
        held = torch.where(labels.index >= 0, inverse[labels.index.clamp(min=0)], 0)
        best = held.sort(-1, descending=True).values[:, :k]
    else:
        assert labels.dense is not None
        own = inverse if part is None else inverse[part.start : part.stop]
        size, rows = min(k, labels.n_classes), len(labels.dense)
        best = inverse.new_zeros(rows, size)
        for c in _ranking.chunks(rows, labels.n_classes):
            best[c] = torch.where(labels.dense[c] > 0, own, 0).topk(size, -1).values
    best = torch.nn.functional.pad(best, (0, k - best.shape[-1]))
    if part is not None and labels.dense is not None:
        best = shard.gather(best, part).sort(-1, descending=True).values[:, :k]
    return best


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
        first = (position >= k.at).long()  # one cut a row: in it, or beyond
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


def settle_labels(kind: Kind, counts: LabelCounts, average: Average, empty: Empty) -> Tensor:
    """The average over classes, ``(q,)``, or the value of each, ``(q, n_classes)``."""
    dtype = exact_dtype(counts.hits.device)
    hits, predicted, labels = (c.to(dtype) for c in counts)
    if average == "micro":
        hits, predicted, labels = hits.sum(-1), predicted.sum(-1), labels.sum()
    if kind == "precision":
        value = hits / predicted.clamp(min=1)
    elif kind == "recall":
        value = hits / labels.clamp(min=1)
    else:
        value = 2 * hits / (predicted + labels).clamp(min=1)
    if average == "micro":
        return value
    return settle_groups(value, labels, average, empty)


def settle_groups(value: Tensor, labels: Tensor, average: str, empty: Empty) -> Tensor:
    """Average values of classes (or rows) with their numbers of labels; those without follow the policy."""
    full = labels > 0
    if average == "weighted":
        return (value * labels).sum(-1) / labels.sum(-1).clamp(min=1)
    rest = {"skip": torch.nan, "zero": 0.0, "one": 1.0}[empty]
    if average == "none":
        return torch.where(full, value, rest)
    if empty == "skip":
        return torch.where(full, value, 0).sum(-1) / full.sum(-1).clamp(min=1)
    return torch.where(full, value, rest).sum(-1) / max(full.shape[-1], 1)
