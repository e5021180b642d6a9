"""Metrics of rows that may have no label at all: how confident the scores are, and how well they tell in from out."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lastlayer import _check
from lastlayer._check import Target
from lastlayer.metrics import _problems, _ranking, _sums
from lastlayer.metrics._problems import Per, Problems
from lastlayer.metrics._sums import Empty
from lastlayer.shard import ClassShard, reduce


def mean_max_confidence(scores: Tensor, *, shard: ClassShard | None = None) -> Tensor:
    r"""Compute the mean over rows of the largest score (MMC).

    .. math:: \text{MMC} = \frac{1}{N} \sum_i \max_c s_{ic}

    On rows that have no label it should be near 0; a softmax cannot bring it below ``1 / n_classes``.

    Args:
        scores: Probabilities, ``(*batch, n_classes)``; ``-inf`` rules a class out, nan stays nan.
        shard: This rank's slice, when the classes are split over processes.

    Returns:
        The mean in float32 (float64 for float64 scores); 0 for no rows or no classes.

    Example:
        >>> mean_max_confidence(torch.tensor([[0.1, 0.7], [0.2, 0.1]]))
        tensor(0.4500)
    """
    scores = _check.logits("mean_max_confidence", scores, "scores").detach()
    if scores.numel() == 0 and shard is None:
        return scores.new_zeros((), dtype=_check.work_dtype(scores))
    peak = reduce(scores.to(_check.work_dtype(scores)), "max", shard)
    return peak.mean() if peak.numel() else peak.sum()


def auroc(
    scores: Tensor,
    target: Target,
    *,
    per: Per = "class",
    average: Literal["macro", "micro", "weighted", "none"] = "macro",
    empty: Empty = "skip",
) -> Tensor:
    r"""Compute the area under the ROC curve: how often a positive item scores above a negative one.

    .. math:: \text{AUROC} = \frac{1}{|P||N|} \sum_{p \in P} \sum_{n \in N} [s_p > s_n] + \tfrac12 [s_p = s_n]

    For open sets the scores are the rows' largest confidences and the target says which rows are in (1) and out (0):
    ``auroc(probabilities.amax(-1), inside)``.

    Args:
        scores: One-dimensional, the items of one problem; or ``(*batch, n_classes)``. nan counts as ``-inf``.
        target: 1 positive, 0 negative, -1 unknown, of the shape of `scores`; or, for scores of several classes, one
            class per row or index lists padded with -1.
        per: For scores of several classes: ``"class"`` compares the rows of each class, ``"sample"`` the classes of
            each row.
        average: ``"macro"`` is the mean, ``"weighted"`` weighs by the number of positives, ``"none"`` returns each,
            ``"micro"`` compares all entries with all.
        empty: What a problem without positives or without negatives counts as: ``"skip"`` (not at all; nan with
            ``"none"``), ``"zero"`` or ``"one"``. With nothing left the result is 0.

    Returns:
        A fraction in float32 (float64 for float64 scores); a vector for ``average="none"``.

    Example:
        >>> auroc(torch.tensor([0.9, 0.6, 0.4, 0.7]), torch.tensor([1, 1, 0, 0]))
        tensor(0.7500)
    """
    op = "auroc"
    _check.choice(op, "per", per, ("class", "sample"))
    _check.choice(op, "average", average, ("macro", "micro", "weighted", "none"))
    _check.choice(op, "empty", empty, ("skip", "zero", "one"))
    scores = _check.logits(op, scores, "scores").detach()
    if scores.ndim == 1:
        target = items(op, scores, target)
    labels = _ranking.flat(_check.target(op, target, scores))
    rows = _ranking.matrix(scores)
    single = scores.ndim == 1 or average == "micro"
    parts = [_area(p) for p in _problems.problems(rows, labels, "all" if single else per)]
    none = torch.zeros(0, dtype=_sums.exact_dtype(scores.device), device=scores.device)
    value, weight = (torch.cat([none, *(p[i] for p in parts)]) for i in range(2))
    return _sums.settle_groups(value, weight, "macro" if single else average, empty).to(_check.work_dtype(scores))


def items(op: str, scores: Tensor, target: Target) -> Tensor:
    """Check the target of one-dimensional scores: there are no classes, so its numbers are 1, 0 and -1."""
    if not isinstance(target, Tensor):
        raise TypeError(f"{op}: `target` must be a tensor, got {type(target).__name__}. Use torch.as_tensor.")
    if target.shape != scores.shape:
        raise ValueError(
            f"{op}: `target` must have shape {tuple(scores.shape)}, got {tuple(target.shape)}. "
            "One-dimensional scores are the items of one problem."
        )
    return target if target.dtype == torch.bool else target.sign().to(torch.int8)


def _area(problems: Problems) -> tuple[Tensor, Tensor]:
    """The area of each problem, and its number of positives: 0 where there is nothing to compare."""
    dtype = _sums.exact_dtype(problems.scores.device)
    positives, negatives = problems.positive.sum(-1), problems.negative.sum(-1)
    both = torch.where(negatives > 0, positives, 0).to(dtype)
    if problems.scores.shape[-1] == 0:
        return both, both
    ordered, order = problems.scores.sort(dim=-1, descending=True)
    hit, miss = problems.positive.gather(-1, order), problems.negative.gather(-1, order)
    end = _problems.tie_ends(ordered)
    # In whole numbers: twice the negatives below each positive, and once those equal to it.
    upto = miss.cumsum(-1).gather(-1, end)
    own = torch.zeros_like(upto).scatter_add(-1, end, miss.to(upto.dtype)).gather(-1, end)
    beaten = 2 * negatives[:, None] - 2 * upto + own
    area = torch.where(hit, beaten, 0).sum(-1).to(dtype) / (2 * positives * negatives).clamp(min=1)
    return area, both


def binned_area(positive: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """The area and its weight from counts of positives and of all items, ``(..., bins)``, lowest scores first."""
    negative = total - positive
    below = negative.cumsum(-1) - negative / 2
    positives, negatives = positive.sum(-1), negative.sum(-1)
    area = (positive * below).sum(-1) / (positives * negatives).clamp(min=1)
    return area, torch.where(negatives > 0, positives, 0)
