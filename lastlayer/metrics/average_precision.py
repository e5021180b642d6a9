"""Average precision, of each class over the rows or of each row over the classes."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lastlayer import _check
from lastlayer._check import Target
from lastlayer.metrics import _problems, _ranking, _sums
from lastlayer.metrics._problems import Per, Problems
from lastlayer.metrics._sums import Empty

AveragePrecisionAverage = Literal["macro", "micro", "weighted", "none"]


def mean_average_precision(
    scores: Tensor,
    target: Target,
    *,
    per: Per = "class",
    average: AveragePrecisionAverage = "macro",
    empty: Empty = "skip",
) -> Tensor:
    r"""Compute the mean of the average precision over classes (mAP@class) or over rows (mAP@sample).

    .. math:: AP = \frac{1}{|T|} \sum_{i \in T} \frac{|\{j \in T : s_j \ge s_i\}|}{|\{j : s_j \ge s_i\}|}

    Items are the rows for ``per="class"`` and the classes for ``per="sample"``. Equal scores share one threshold, so
    that the order of items does not matter; there is no interpolation. Unknown entries (-1) are no items. An item
    whose score is ``-inf`` or nan is never retrieved: a positive among them adds nothing.

    Args:
        scores: Scores or logits, ``(*batch, n_classes)``; only their order matters.
        target: Multi-hot of the shape of `scores` (-1 is unknown), one class per row, or index lists padded with -1;
            index targets are made dense a few classes or rows at a time.
        per: ``"class"`` ranks the rows for each class, ``"sample"`` the classes for each row.
        average: ``"macro"`` is the mean, ``"weighted"`` weighs by the number of positives, ``"none"`` returns each
            class's (row's) value, ``"micro"`` ranks all entries as one list (in memory of the size of the scores).
        empty: What a class (a row) without positives counts as: ``"skip"`` (not at all; nan with ``"none"``),
            ``"zero"`` or ``"one"``. With nothing left the result is 0.

    Returns:
        A fraction in float32 (float64 for float64 scores); a vector for ``average="none"``.

    Example:
        >>> scores = torch.tensor([[0.9, 0.2], [0.8, 0.7], [0.1, 0.3]])
        >>> target = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> mean_average_precision(scores, target)
        tensor(0.9167)
        >>> mean_average_precision(scores, target, per="sample", average="none")
        tensor([1.0000, 0.5000, 1.0000])
    """
    op = "mean_average_precision"
    _check.choice(op, "per", per, ("class", "sample"))
    _check.choice(op, "average", average, ("macro", "micro", "weighted", "none"))
    _check.choice(op, "empty", empty, ("skip", "zero", "one"))
    value, count = average_precisions(op, scores, target, "all" if average == "micro" else per)
    if average == "micro":
        average = "macro"
    return _sums.settle_groups(value, count, average, empty).to(_check.work_dtype(scores))


def average_precisions(op: str, scores: Tensor, target: Target, per: Per | Literal["all"]) -> tuple[Tensor, Tensor]:
    """Check the inputs and return the average precision and the number of positives of each class or row."""
    scores = _check.logits(op, scores, "scores").detach()
    labels = _ranking.flat(_check.target(op, target, scores))
    rows = _ranking.matrix(scores)
    parts = [_average_precision(p) for p in _problems.problems(rows, labels, per)]
    none = torch.zeros(0, dtype=_sums.exact_dtype(scores.device), device=scores.device)
    return torch.cat([none, *(p[0] for p in parts)]), torch.cat([none, *(p[1] for p in parts)])


def _average_precision(problems: Problems) -> tuple[Tensor, Tensor]:
    dtype = _sums.exact_dtype(problems.scores.device)
    count = problems.positive.sum(-1)
    if problems.scores.shape[-1] == 0:
        return count.to(dtype), count.to(dtype)
    ordered, order = problems.scores.sort(dim=-1, descending=True)
    hit = problems.positive.gather(-1, order)
    end = _problems.tie_ends(ordered)
    precision = hit.cumsum(-1).gather(-1, end) / (end + 1).to(dtype)
    counted = hit & (ordered > -torch.inf)
    return torch.where(counted, precision, 0).sum(-1) / count.clamp(min=1), count.to(dtype)


def binned_average_precision(positive: Tensor, total: Tensor) -> Tensor:
    """Average precision from counts of positives and of all items, ``(..., bins)``, lowest scores first."""
    dtype = _sums.exact_dtype(total.device)
    hits, seen = (v.flip(-1).cumsum(-1).flip(-1).to(dtype) for v in (positive, total))
    return (positive * hits / seen.clamp(min=1)).sum(-1) / positive.sum(-1).clamp(min=1)
