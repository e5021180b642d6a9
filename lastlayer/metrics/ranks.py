"""Metrics of where the labels stand in the ranking of all classes: reciprocal rank, coverage, wrongly ordered pairs."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from lastlayer import _check
from lastlayer._check import Target
from lastlayer.metrics import _problems, _ranking, _sums
from lastlayer.metrics._sums import Empty, RowGains

RankKind = Literal["reciprocal", "coverage", "pairs"]


def mean_reciprocal_rank(
    scores: Tensor,
    target: Target,
    k: int | None = None,
    *,
    empty: Empty = "skip",
    reduction: Literal["mean", "none"] = "mean",
) -> Tensor:
    r"""Compute the mean over rows of one over the rank of the best label (MRR).

    .. math:: \text{MRR} = \frac{1}{\min_{c \in T} \text{rank}(c)}

    Of equal scores the lowest class comes first. A label whose score is ``-inf`` or nan has no rank and adds nothing.

    Args:
        scores: Scores or logits, ``(*batch, n_classes)``; only their order matters.
        target: Multi-hot of the shape of `scores` (-1 is unknown: not ranked, not counted), one class per row, or
            index lists padded with -1, which are never made dense.
        k: Ranks beyond it count as 0 (MRR@k); None has no limit.
        empty: What a row without labels counts as: ``"skip"`` (not at all), ``"zero"`` or ``"one"``. With nothing
            left the result is 0.
        reduction: ``"mean"``, or ``"none"`` for the value of each row, which is nan where `empty` skips the row.

    Returns:
        A fraction in float32 (float64 for float64 scores).

    Example:
        >>> scores = torch.tensor([[0.9, 0.8, 0.1], [0.2, 0.7, 0.6]])
        >>> mean_reciprocal_rank(scores, torch.tensor([[1, -1], [1, 0]]))
        tensor(0.7500)
    """
    op = "mean_reciprocal_rank"
    return _settled(op, row_gains(op, "reciprocal", scores, target, k), scores, empty, reduction)


def coverage_error(
    scores: Tensor, target: Target, *, empty: Empty = "skip", reduction: Literal["mean", "none"] = "mean"
) -> Tensor:
    r"""Compute how many of the best classes it takes, on average, to cover all labels of a row.

    .. math:: \text{coverage} = \big|\{j : s_j \ge \min_{c \in T} s_c\}\big|

    The best possible value is the mean number of labels per row. Equal scores are all counted, as in scikit-learn. A
    label whose score is ``-inf`` or nan is covered only by all classes.

    Args:
        scores: Scores or logits, ``(*batch, n_classes)``; only their order matters.
        target: The labels, as in :func:`mean_reciprocal_rank`.
        empty: What a row without labels counts as: ``"skip"``, ``"zero"`` (as in scikit-learn) or ``"one"``.
        reduction: ``"mean"``, or ``"none"`` for the value of each row.

    Returns:
        A number of classes, in float32 (float64 for float64 scores).

    Example:
        >>> scores = torch.tensor([[0.9, 0.8, 0.1], [0.2, 0.7, 0.6]])
        >>> coverage_error(scores, torch.tensor([[1, -1], [1, 0]]))
        tensor(2.5000)
    """
    op = "coverage_error"
    return _settled(op, row_gains(op, "coverage", scores, target), scores, empty, reduction)


def label_ranking_loss(
    scores: Tensor, target: Target, *, empty: Empty = "skip", reduction: Literal["mean", "none"] = "mean"
) -> Tensor:
    r"""Compute the share of pairs of a label and another class that are ordered wrongly.

    .. math:: \frac{1}{|T| \, |\bar T|} \big|\{(c, j) : c \in T,\ j \in \bar T,\ s_j \ge s_c\}\big|

    It is a metric, not a loss to train with. Equal scores are ordered wrongly, as in scikit-learn; if they should count
    half, use one minus ``auroc(..., per="sample")``.

    Args:
        scores: Scores or logits, ``(*batch, n_classes)``; only their order matters.
        target: The labels, as in :func:`mean_reciprocal_rank`; index targets are made dense a few rows at a time.
        empty: What a row without a pair counts as: ``"skip"``, ``"zero"`` (as in scikit-learn) or ``"one"``.
        reduction: ``"mean"``, or ``"none"`` for the value of each row.

    Returns:
        A fraction in float32 (float64 for float64 scores).

    Example:
        >>> scores = torch.tensor([[0.9, 0.8, 0.1], [0.2, 0.7, 0.6]])
        >>> label_ranking_loss(scores, torch.tensor([[1, -1], [1, 0]]))
        tensor(0.5000)
    """
    op = "label_ranking_loss"
    return _settled(op, row_gains(op, "pairs", scores, target), scores, empty, reduction)


def _settled(op: str, rows: RowGains, scores: Tensor, empty: Empty, reduction: str) -> Tensor:
    _check.choice(op, "empty", empty, ("skip", "zero", "one"))
    _check.choice(op, "reduction", reduction, ("mean", "none"))
    if reduction == "none":
        return _sums.settle_each(rows, empty).view(scores.shape[:-1]).to(_check.work_dtype(scores))
    return _sums.settle_rows(_sums.row_sums(rows), empty).squeeze(0).to(_check.work_dtype(scores))


def check_k(op: str, k: Any) -> None:
    """Check the limit of the ranks."""
    k = _check.plain(k)
    if k is not None and (isinstance(k, bool) or not isinstance(k, int) or k < 1):
        raise ValueError(f"{op}: `k` must be None or a whole number of at least 1, got {k!r}.")


def row_gains(op: str, kind: RankKind, scores: Tensor, target: Target, k: int | None = None) -> RowGains:
    """Check the inputs and return the value of each row, ``(rows, 1)``."""
    check_k(op, k)
    scores = _check.logits(op, scores, "scores").detach()
    labels = _ranking.flat(_check.target(op, target, scores))
    rows = _ranking.matrix(scores)
    dtype = _sums.exact_dtype(scores.device)
    value = rows.new_zeros(len(rows), dtype=dtype)  # of the kind of the scores, be it a subclass or batched
    if kind == "pairs":
        parts = [_wrong_pairs(p, dtype) for p in _problems.problems(rows, labels, "sample")]
        value = torch.cat([value[:0], *(p[0] for p in parts)])
        full = torch.cat([value[:0] > 0, *(p[1] for p in parts)])
        return RowGains(value[:, None], torch.ones_like(value)[:, None], full)
    if rows.shape[-1]:
        for c in _ranking.chunks(len(rows), rows.shape[-1]):
            value[c] = _of_ranks(kind, rows[c], _ranking.rows_of(labels, c), k).to(dtype)
    return RowGains(value[:, None], torch.ones_like(value)[:, None], labels.count() > 0)


def _of_ranks(kind: RankKind, scores: Tensor, labels: _check.Labels, k: int | None) -> Tensor:
    """Compare all scores with the one that decides: of the best label, or of the worst."""
    n = scores.shape[-1]
    x = _ranking.candidates(scores, labels)
    if labels.index is None:
        place: Tensor = torch.arange(n, device=x.device)
        held, there = x, labels.positive()
    else:
        place, there = labels.index, labels.index >= 0
        held = x.gather(-1, place.clamp(min=0))
    if kind == "coverage":
        worst = torch.where(there, held, torch.inf).amin(-1, keepdim=True) if held.shape[-1] else x[:, :1] + torch.inf
        at_least = x >= worst
        known = labels.known()
        return (at_least if known is None else at_least & known).sum(-1)
    held = torch.where(there, held, -torch.inf)
    if held.shape[-1] == 0:
        return x.new_zeros(len(x))
    best = held.amax(-1, keepdim=True)
    first = torch.where(there & (held == best), place, n).amin(-1, keepdim=True)
    before = (x > best) | ((x == best) & (torch.arange(n, device=x.device) < first))
    rank = before.sum(-1) + 1
    counts = best.squeeze(-1) > -torch.inf
    return torch.where(counts if k is None else counts & (rank <= k), 1 / rank.double(), 0)


def _wrong_pairs(problems: _problems.Problems, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The share of wrongly ordered pairs of each row, and whether it has a pair."""
    positives, negatives = problems.positive.sum(-1), problems.negative.sum(-1)
    pairs = (positives * negatives).to(dtype)
    if problems.scores.shape[-1] == 0:
        return pairs, pairs > 0
    ordered, order = problems.scores.sort(dim=-1, descending=True)
    hit, miss = problems.positive.gather(-1, order), problems.negative.gather(-1, order)
    above = miss.cumsum(-1).gather(-1, _problems.tie_ends(ordered))
    return torch.where(hit, above, 0).sum(-1).to(dtype) / pairs.clamp(min=1), pairs > 0
