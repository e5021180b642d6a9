"""Ranked lists: the best classes of each row, which of them are labels, and where a list is cut.

Everything works on rows of classes, a bounded number of entries at a time; index targets are never made dense.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lastlayer import _check, _ranked, shard
from lastlayer._check import Target
from lastlayer.shard import ClassShard

Gain = Literal["binary", "linear", "exponential"]

BUDGET = 1 << 22  # entries of a temporary; a chunk is as many rows as fit, at least one


@dataclass(frozen=True)
class Cuts:
    """Where lists are cut: ``at`` is ``(1, q)``, one `k` for all rows and each of q results, or ``(rows, 1)``."""

    at: Tensor
    most: int
    several: bool

    def take(self, cumulative: Tensor) -> Tensor:
        """Pick from running sums over the ranks, ``(rows, most)``, the sum at each cut: ``(rows, q)``."""
        at = self.at.expand(len(cumulative), -1)
        return torch.where(at > 0, cumulative.gather(-1, (at - 1).clamp(min=0)), 0)


@dataclass(frozen=True)
class Ranking:
    """The best classes of each row, best first: ``index`` (-1 where no class is left), ``hit``, both ``(rows, most)``.

    ``hit`` is Boolean, or the gains of the classes for graded gains. ``labels`` is the checked target of the same rows
    and ``count`` the number of labels of each; ``width`` is the number of scores per row.
    """

    index: Tensor
    hit: Tensor
    count: Tensor
    labels: _check.Labels
    width: int


def cuts(op: str, k: Any, batch: torch.Size, device: torch.device) -> Cuts:
    """Check `k`: a whole number, a sequence of them (several results), or a tensor with one per row."""
    if isinstance(k, Tensor):
        if k.is_floating_point() or k.is_complex() or k.dtype == torch.bool:
            raise TypeError(f"{op}: `k` must be of an integer dtype, got a tensor of {k.dtype}. Use `k.long()`.")
        if not _check._broadcasts(k.shape, batch):
            raise ValueError(
                f"{op}: `k` as a tensor must hold one number per row, shape {tuple(batch)}, got shape {tuple(k.shape)}."
                " For several k at once give a list."
            )
        if not _ranked.readable(k):
            raise TypeError(f"{op}: `k` must be a number where its values cannot be read (meta tensors, traces, vmap).")
        at = k.to(device=device, dtype=torch.int64)
        at = (at.expand(batch) if at.ndim else at).reshape(-1, 1)
        return Cuts(at, max(int(at.max()), 1) if at.numel() else 1, False)
    several = not isinstance(k, numbers.Real | str) and (isinstance(k, Sequence) or getattr(k, "ndim", 0) == 1)
    values = list(k) if several else [k]  # of a sequence or a numpy array
    for value in values:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"{op}: `k` must be a number or a list of numbers, got {type(value).__name__}.")
        if not (isinstance(value, numbers.Integral) or float(value).is_integer()) or value < 1:
            raise ValueError(f"{op}: `k` must be a whole number of at least 1, got {value}.")
    if not values:
        raise ValueError(f"{op}: `k` must hold at least one number, got an empty list.")
    at = torch.tensor([int(value) for value in values], device=device)
    return Cuts(at[None], int(max(values)), several)


def chunks(rows: int, width: int) -> Iterator[slice]:
    """Slices of the rows, each of at most `BUDGET` entries, `width` per row; all at once for the compiler."""
    if torch.compiler.is_compiling():  # a loop would fix the number of rows
        yield slice(None)
        return
    size = max(BUDGET // max(width, 1), 1)
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def matrix(x: Tensor) -> Tensor:
    """The same tensor with one batch dimension, also where there are no rows or no columns."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def flat(labels: _check.Labels) -> _check.Labels:
    """The same labels with one batch dimension."""
    index = None if labels.index is None else matrix(labels.index)
    dense = None if labels.dense is None else matrix(labels.dense)
    return _check.Labels(index, dense, labels.n_classes)


def rows_of(labels: _check.Labels, part: slice) -> _check.Labels:
    """The labels of some rows."""
    index = None if labels.index is None else labels.index[part]
    dense = None if labels.dense is None else labels.dense[part]
    return _check.Labels(index, dense, labels.n_classes)


def candidates(scores: Tensor, labels: _check.Labels) -> Tensor:
    """The scores, -inf where a class takes no part: its label is unknown, or the score is nan."""
    out = scores.isnan() if labels.dense is None else scores.isnan() | (labels.dense < 0)
    return torch.where(out, -torch.inf, scores)


def graded(target: Tensor, gain: Gain) -> Tensor:
    """The gains of the entries of a multi-hot target."""
    if gain == "binary":
        return target > 0
    value = target.clamp(min=0).to(torch.float32 if target.device.type == "mps" else torch.float64)
    return value if gain == "linear" else torch.exp2(value) - 1


def rank(
    op: str,
    scores: Tensor,
    target: Target,
    k: Cuts,
    indices: Tensor | None = None,
    part: ClassShard | None = None,
    gain: Gain = "binary",
) -> Ranking:
    """Rank the classes of each row up to the largest cut, over the classes of all ranks."""
    if indices is not None:
        labels, values, index = _given(op, scores, target, indices)
    else:
        # Index lists keep the classes of all ranks.
        labels = flat(_check.target(op, target, scores, in_range=part is None))
        values, index = _best(matrix(scores), labels, k.most)
    hit = torch.zeros_like(index, dtype=torch.bool)
    if labels.dense is not None:
        held = labels.dense if labels.n_classes else labels.dense.new_zeros(len(index), 1)  # an empty shard
        hit = graded(held.gather(-1, index.clamp(min=0)), gain)
        hit = torch.where(index >= 0, hit, 0)
    count = labels.count()
    if part is not None and indices is None:
        index = torch.where(index < 0, -1, index + part.start)
        values, index = shard.gather(values, part), shard.gather(index, part)
        hit = shard.gather(hit.to(torch.uint8), part) > 0 if hit.dtype == torch.bool else shard.gather(hit, part)
        if labels.dense is not None:
            count = shard.reduce(count.unsqueeze(-1), "sum", part).squeeze(-1)
    if part is not None or indices is not None:
        _, index, hit = _ranked.ordered(values, index, k.most, hit)
    if labels.index is not None:
        hit = _member(index, labels.index)
    return Ranking(index, hit, count, labels, scores.shape[-1])


def _best(scores: Tensor, labels: _check.Labels, k: int) -> tuple[Tensor, Tensor]:
    if len(scores) == 0:
        return scores.new_empty(0, k), torch.empty(0, k, dtype=torch.int64, device=scores.device)
    parts = [_ranked.top_k(candidates(scores[c], rows_of(labels, c)), k) for c in chunks(len(scores), scores.shape[-1])]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def _given(op: str, scores: Tensor, target: Any, indices: Any) -> tuple[_check.Labels, Tensor, Tensor]:
    """Check decoded lists with their scores, and the target, which then holds class indices."""
    if not isinstance(indices, Tensor) or indices.is_floating_point() or indices.dtype == torch.bool:
        got = indices.dtype if isinstance(indices, Tensor) else type(indices).__name__
        raise TypeError(f"{op}: `indices` must be a tensor of an integer dtype, got {got}.")
    if indices.shape != scores.shape:
        raise ValueError(
            f"{op}: `indices` must have the shape of `scores`, {tuple(scores.shape)}, got {tuple(indices.shape)}. "
            "Pass the lists of a decoder with their scores."
        )
    if isinstance(target, Tensor) and target.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            f"{op}: `target` must hold class indices when `indices` is given, got {target.dtype}. "
            "Use index lists padded with -1."
        )
    lists = isinstance(target, Tensor) and target.shape == scores.shape  # the scores are no row of all classes
    labels = flat(_check.target(op, _check.label_lists(target) if lists else target, scores, in_range=False))
    values, index = matrix(scores), matrix(indices).long()
    return labels, torch.where(values.isnan() | (index < 0), -torch.inf, values), index


def _member(index: Tensor, lists: Tensor) -> Tensor:
    """Whether each class of ``(rows, k)`` is in the row's list of ``(rows, m)``."""
    hit = torch.zeros_like(index, dtype=torch.bool)
    for c in chunks(len(index), index.shape[-1] * lists.shape[-1]):
        hit[c] = (index[c, :, None] == lists[c, None, :]).any(-1) & (index[c] >= 0)
    return hit
