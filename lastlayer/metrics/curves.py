"""Precision against recall as the threshold moves, for each label."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lastlayer import _check
from lastlayer._check import Target
from lastlayer.metrics import _problems, _ranking, _sums, openset
from lastlayer.metrics._problems import Problems


class Curve(NamedTuple):
    """A precision-recall curve, or one per class: precision and recall of the items that score at least `threshold`."""

    precision: Tensor
    recall: Tensor
    threshold: Tensor


def precision_recall_curve(
    scores: Tensor,
    target: Target,
    *,
    thresholds: int | Tensor | None = None,
    average: Literal["none", "micro"] = "none",
) -> Curve:
    r"""Compute precision and recall of each class for all thresholds, or for given ones.

    .. math:: P(t) = \frac{|\{i \in T : s_i \ge t\}|}{|\{i : s_i \ge t\}|}, \qquad
              R(t) = \frac{|\{i \in T : s_i \ge t\}|}{|T|}

    where the items :math:`i` are the rows. An item scores at least the threshold here, as in scikit-learn;
    `decode_threshold` takes what is above it. Where no item reaches the threshold, precision is 1. The recall of a
    class without labels is nan. Items whose label is unknown (-1), or whose score is ``-inf`` or nan, are never
    retrieved; a label among the latter still counts in :math:`|T|`.

    Args:
        scores: Scores, ``(*batch, n_classes)``, or one-dimensional: the items of one problem.
        target: Multi-hot of the shape of `scores` (-1 is unknown), one class per row, or index lists padded with -1.
        thresholds: None for every score that occurs; a number for that many of equal distance from 0 to 1; or a
            tensor of them, in increasing order.
        average: ``"none"`` for one curve per class, ``"micro"`` for one of all rows and classes together.

    Returns:
        ``(precision, recall, threshold)``. For given thresholds precision and recall have shape ``(n_classes, m)``
        and thresholds ``(m,)``. For ``thresholds=None`` all three have shape ``(n_classes, rows)``, the highest
        threshold first, with nan where a class has fewer different scores than rows. One problem has no first
        dimension.

    Example:
        >>> curve = precision_recall_curve(torch.tensor([0.9, 0.6, 0.4, 0.7]), torch.tensor([1.0, 1.0, 0.0, 0.0]))
        >>> curve.precision, curve.recall
        (tensor([1.0000, 0.5000, 0.6667, 0.5000]), tensor([0.5000, 0.5000, 1.0000, 1.0000]))
    """
    op = "precision_recall_curve"
    _check.choice(op, "average", average, ("none", "micro"))
    scores = _check.logits(op, scores, "scores").detach()
    single = scores.ndim == 1 or average == "micro"
    dtype = _check.work_dtype(scores)
    if thresholds is not None:
        grid = check_thresholds(op, thresholds, scores.device, dtype)
        counts = grid_counts(op, scores, target, grid)
        if average == "micro":
            counts = GridCounts(*(c.sum(0, keepdim=True) for c in counts))
        curve = curve_of(counts, grid, dtype)
        return Curve(curve.precision[0], curve.recall[0], grid) if single else curve
    labels = _ranking.flat(_check.target(op, openset.items(op, scores, target) if scores.ndim == 1 else target, scores))
    rows = _ranking.matrix(scores)
    parts = [_exact(p, dtype) for p in _problems.problems(rows, labels, "all" if single else "class")]
    items = rows.numel() if single else len(rows)
    none = torch.zeros(0, items, dtype=dtype, device=scores.device)
    joined = Curve(*(torch.cat([none, *(p[i] for p in parts)]) for i in range(3)))
    return Curve(*(value[0] for value in joined)) if single else joined


def check_thresholds(op: str, thresholds: Any, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Check a number of thresholds, or a tensor of them; return them in the dtype of the scores."""
    if isinstance(thresholds, Tensor):
        if thresholds.ndim != 1 or len(thresholds) == 0 or not thresholds.is_floating_point():
            raise ValueError(
                f"{op}: `thresholds` must be a vector of floating-point numbers, got shape {tuple(thresholds.shape)}."
            )
        return thresholds.to(device, dtype)
    thresholds = _check.plain(thresholds)
    if isinstance(thresholds, bool) or not isinstance(thresholds, int) or thresholds < 2:
        raise ValueError(f"{op}: `thresholds` must be a whole number of at least 2 or a tensor, got {thresholds!r}.")
    return _sums.even_steps(thresholds - 1, device, dtype)


class GridCounts(NamedTuple):
    """Labels and items at or above each threshold, ``(n_classes, m)``, and labels, ``(n_classes,)``: these add up."""

    positive: Tensor
    total: Tensor
    labels: Tensor


def grid_counts(op: str, scores: Tensor, target: Target, grid: Tensor) -> GridCounts:
    """Check the target and count for each class and threshold; one-dimensional scores are one class."""
    if scores.ndim == 1:
        scores, target = scores[:, None], openset.items(op, scores, target)[:, None]
    labels = _ranking.flat(_check.target(op, target, scores))
    rows, n, m = _ranking.matrix(scores), scores.shape[-1], len(grid)
    table = torch.zeros(2, n * (m + 1) + 1, dtype=torch.int64, device=scores.device)  # the last entry takes the rest
    classes = torch.arange(n, device=scores.device)
    total = torch.zeros(n, dtype=torch.int64, device=scores.device)
    for c in _ranking.chunks(len(rows), n):
        part = _ranking.rows_of(labels, c)
        x = _ranking.candidates(rows[c], part).to(grid.dtype)
        _add(table[1], x, classes.expand_as(x), x > -torch.inf, grid)
        if part.dense is not None:
            _add(table[0], x, classes.expand_as(x), (part.dense > 0) & (x > -torch.inf), grid)
            total += (part.dense > 0).sum(0)
        elif part.index is not None and n:
            held, there = x.gather(-1, part.index.clamp(min=0)), part.index >= 0
            _add(table[0], held, part.index, there & (held > -torch.inf), grid)
            total += torch.bincount(torch.where(there, part.index, n).flatten(), minlength=n + 1)[:n]
    counts = table[:, :-1].view(2, n, m + 1)[..., 1:].flip(-1).cumsum(-1).flip(-1)
    return GridCounts(counts[0], counts[1], total)


def _add(row: Tensor, x: Tensor, classes: Tensor, marked: Tensor, grid: Tensor) -> None:
    """Add marked scores to the cell of their class and of the number of thresholds that they reach."""
    reached = torch.bucketize(x.contiguous(), grid, right=True)
    place = torch.where(marked, classes * (len(grid) + 1) + reached, len(row) - 1).flatten()
    row.index_add_(0, place, torch.ones_like(place))


def curve_of(counts: GridCounts, grid: Tensor, dtype: torch.dtype) -> Curve:
    """Turn the counts of :func:`grid_counts` into curves."""
    positive, total, labels = (c.to(_sums.exact_dtype(grid.device)) for c in counts)
    precision = torch.where(total > 0, positive / total.clamp(min=1), 1.0)
    recall = positive / torch.where(labels > 0, labels, torch.nan)[:, None]
    return Curve(precision.to(dtype), recall.to(dtype), grid)


def _exact(problems: Problems, dtype: torch.dtype) -> Curve:
    """The curve of each problem at each score that occurs, ``(problems, items)``."""
    exact = _sums.exact_dtype(problems.scores.device)
    if problems.scores.shape[-1] == 0:
        return Curve(*(problems.scores.to(dtype) for _ in range(3)))
    ordered, order = problems.scores.sort(dim=-1, descending=True)
    hit = problems.positive.gather(-1, order).cumsum(-1).to(exact)
    position = torch.arange(ordered.shape[-1], device=ordered.device)
    kept = (_problems.tie_ends(ordered) == position) & (ordered > -torch.inf)
    count = problems.positive.sum(-1, keepdim=True)
    values = (hit / (position + 1), hit / torch.where(count > 0, count, torch.nan), ordered)
    first = (~kept).to(torch.uint8).argsort(dim=-1, stable=True)  # what is kept comes first, in order
    return Curve(*(torch.where(kept, v, torch.nan).gather(-1, first).to(dtype) for v in values))
