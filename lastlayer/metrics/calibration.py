"""Calibration: whether labels given with confidence 0.8 are right eight times in ten, and how to make it so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lastlayer import _check
from lastlayer._check import Target
from lastlayer.metrics import _ranking, _sums

PerPair = Literal["all", "class"]
OLD = {"pair": "all"}  # the word for all pairs in 0.1
Norm = Literal["l1", "l2", "max"]


class ReliabilityBins(NamedTuple):
    """A reliability diagram: the pairs in each bin of confidence, their mean confidence, the share that is right.

    ``edges`` is ``(n_bins + 1,)``; the others are ``(n_bins,)``, or ``(n_classes, n_bins)`` for one diagram per class.
    A bin that no pair falls into has 0 pairs, and 0 for confidence and accuracy.
    """

    edges: Tensor
    pairs: Tensor
    confidence: Tensor
    accuracy: Tensor


class BinSums(NamedTuple):
    """What a reliability diagram is made of, ``(diagrams, n_bins)``: these add up over batches."""

    pairs: Tensor
    confidence: Tensor
    right: Tensor


def reliability_bins(
    scores: Tensor, target: Target, k: int | None = None, *, n_bins: int = 10, per: PerPair = "all"
) -> ReliabilityBins:
    r"""Sort pairs of a row and a class into bins by confidence, and compare confidence with accuracy.

    .. math:: B_b = \{(i, c) : e_b \le s_{ic} < e_{b+1}\}, \qquad
              \text{conf}_b = \frac{1}{|B_b|} \sum_{B_b} s_{ic}, \qquad
              \text{acc}_b = \frac{1}{|B_b|} \sum_{B_b} [c \in T_i]

    Bins have equal width on [0, 1] and the last holds 1. Scores are taken as they are: pass probabilities, not
    logits; what lies outside [0, 1] falls into the first or last bin.

    Args:
        scores: Probabilities, ``(*batch, n_classes)``. A score of ``-inf`` or nan makes no pair.
        target: Multi-hot of the shape of `scores` (-1 is unknown and makes no pair), one class per row, or index lists
            padded with -1. A row without labels takes part: all its pairs are wrong.
        k: Only the `k` best classes of each row make pairs; ``None`` is all of them.
        n_bins: The number of bins.
        per: ``"all"`` for one diagram of all pairs, ``"class"`` for one per class.

    Returns:
        The bins: ``edges, pairs, confidence, accuracy``.

    Example:
        >>> scores = torch.tensor([[0.9, 0.7, 0.1], [0.8, 0.6, 0.2]])
        >>> bins = reliability_bins(scores, torch.tensor([[0, -1], [0, 1]]), k=2, n_bins=2)
        >>> bins.pairs, bins.confidence, bins.accuracy
        (tensor([0., 4.]), tensor([0.0000, 0.7500]), tensor([0.0000, 0.7500]))
    """
    op = "reliability_bins"
    sums = bin_sums(op, scores, target, k, n_bins, per)
    return diagram(sums if per == "class" else BinSums(*(s[0] for s in sums)), _check.work_dtype(scores))


def label_calibration_error(
    scores: Tensor,
    target: Target,
    k: int | None = None,
    *,
    n_bins: int = 10,
    per: PerPair = "all",
    norm: Norm = "l1",
) -> Tensor:
    r"""Compute the expected calibration error of label probabilities (ECE), of all classes or of each row's `k` best.

    .. math:: \text{ECE} = \sum_b \frac{|B_b|}{\sum_{b'} |B_{b'}|} \, |\text{acc}_b - \text{conf}_b|

    over the bins of :func:`reliability_bins`. With many classes almost all pairs are sure negatives and the error over
    all of them is small for any model: use `k`, the number of labels that are shown.

    Args:
        scores: Probabilities, ``(*batch, n_classes)``; not logits.
        target: Multi-hot, one class per row, or index lists, as in :func:`reliability_bins`.
        k: Only the `k` best classes of each row count; ``None`` is all of them.
        n_bins: The number of bins of equal width.
        per: ``"all"`` is the error of all pairs in one diagram. ``"class"`` is the classwise error: the mean over
            the classes that have a pair, labels or not.
        norm: ``"l1"`` is the formula; ``"l2"`` the root of the mean square; ``"max"`` the largest gap of a bin (MCE).

    Returns:
        A fraction in float32 (float64 for float64 scores); 0 where there is no pair.

    Example:
        >>> scores = torch.tensor([[0.9, 0.7, 0.1], [0.8, 0.6, 0.2]])
        >>> label_calibration_error(scores, torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]), k=1)
        tensor(0.1500)
    """
    op = "label_calibration_error"
    _check.choice(op, "norm", norm, ("l1", "l2", "max"))
    return calibration_error(bin_sums(op, scores, target, k, n_bins, per), norm).to(_check.work_dtype(scores))


def fit_temperature(logits: Tensor, target: Target, *, link: Literal["sigmoid", "softmax"] = "sigmoid") -> Tensor:
    r"""Fit the temperature that makes held-out labels most likely (Guo et al., 2017).

    .. math:: \max_{0.01 \le T \le 100} \; \sum_{i} \log p(T_i \mid x_i / T)

    with independent labels, :math:`p_c = \sigma(x_c / T)`, or each label drawn from the softmax. The likelihood is
    concave in :math:`1 / T`, so the maximum is the only one. The order of the classes, and with it every metric at k,
    stays the same. Use data that the model was not trained on; data that the scores separate without an error give the
    lower bound.

    Args:
        logits: Scores before the link, ``(*batch, n_classes)``; ``-inf`` rules a class out.
        target: Multi-hot of the shape of `logits` (-1 is unknown and left out), one class per row, or index lists.
        link: ``"sigmoid"`` or ``"softmax"``; a row without labels does not count for the softmax.

    Returns:
        The temperature, a number in float32 (float64 for float64 logits): use ``logits / temperature``. It is 1 if the
        data do not determine it.

    Example:
        >>> logits = torch.tensor([[4.0], [4.0], [4.0], [4.0]])  # confidence 0.98, right three times in four
        >>> temperature = fit_temperature(logits, torch.tensor([[1.0], [1.0], [1.0], [0.0]]))
        >>> torch.sigmoid(logits / temperature)[0]
        tensor([0.7500])
    """
    op = "fit_temperature"
    _check.choice(op, "link", link, ("sigmoid", "softmax"))
    x = _check.logits(op, logits).detach()
    labels = _ranking.flat(_check.target(op, target, x))
    x = _ranking.matrix(x).to(_check.work_dtype(x))
    slope = _sigmoid_slope if link == "sigmoid" else _softmax_slope

    def slopes(inverse: float) -> tuple[float, float]:
        first = second = 0.0
        for c in _ranking.chunks(len(x), x.shape[-1]):
            a, b = slope(x[c], _ranking.rows_of(labels, c), inverse)
            first, second = first + float(a), second + float(b)
        return first, second

    return x.new_tensor(1 / _root(slopes, 0.01, 100.0))


def _root(slopes: Callable[[float], tuple[float, float]], low: float, high: float) -> float:
    """The zero of an increasing function from its value and derivative: Newton's steps, kept in the bracket."""
    at = 1.0
    for _ in range(100):
        value, derivative = slopes(at)
        if value == 0:  # without curvature, where the start is not the answer, every error has underflowed
            return at if derivative > 0 or at == 1.0 else high
        low, high = (low, at) if value > 0 else (at, high)
        step = at - value / derivative if derivative > 0 else low
        following = step if low < step < high else (low * high) ** 0.5
        if abs(following - at) <= 1e-9 * at:
            return following
        at = following
    return at


def _sigmoid_slope(x: Tensor, labels: _check.Labels, inverse: float) -> tuple[Tensor, Tensor]:
    """The derivatives of the negative log-likelihood in ``1 / T``."""
    known = labels.known()
    live = x.isfinite() if known is None else x.isfinite() & known
    x = torch.where(live, x, 0)
    p = torch.sigmoid(inverse * x)
    q = torch.sigmoid(-inverse * x)
    # x p - x over the labels is -x q, which does not cancel where p rounds to 1.
    excess = torch.where(labels.positive(), -x * q, x * p)
    dtype = _sums.exact_dtype(x.device)
    return excess.sum(dtype=dtype), (x * x * p * q).sum(dtype=dtype)


def _softmax_slope(x: Tensor, labels: _check.Labels, inverse: float) -> tuple[Tensor, Tensor]:
    known = labels.known()
    live = x.isfinite() if known is None else x.isfinite() & known
    p = torch.where(live, inverse * x, -torch.inf).softmax(-1)
    p, x = torch.where(live, p, 0), torch.where(live, x, 0)
    mean = (p * x).sum(-1)
    spread = (p * (x - mean[:, None]) ** 2).sum(-1)
    held, count = labels.sum_over_positives(lambda v: v, x), labels.count()
    dtype = _sums.exact_dtype(x.device)
    return (count * mean - held).sum(dtype=dtype), (count * spread).sum(dtype=dtype)


def bin_sums(
    op: str, scores: Tensor, target: Target, k: Any, n_bins: Any, per: Any, weight: Tensor | None = None
) -> BinSums:
    """Check the inputs and return the sums of each bin; without `k`, rows may count by a `weight` each."""
    per = _check.choice(op, "per", per, ("all", "class"), OLD)
    n_bins = _check.plain(n_bins)
    if isinstance(n_bins, bool) or not isinstance(n_bins, int):
        raise TypeError(f"{op}: `n_bins` must be an integer, got {type(n_bins).__name__}.")
    if n_bins < 1:
        raise ValueError(f"{op}: `n_bins` must be at least 1, got {n_bins}. 10 or 15 are usual.")
    scores = _check.logits(op, scores, "scores").detach()
    groups = scores.shape[-1] if per == "class" else 1
    rows = _ranking.matrix(scores)
    sums = rows.new_zeros(3, groups * n_bins + 1, dtype=_sums.exact_dtype(scores.device))
    if k is None:
        _add_all(sums, rows, _ranking.flat(_check.target(op, target, scores)), n_bins, groups, weight)
    else:
        cuts = _ranking.cuts(op, k, scores.shape[:-1], scores.device)
        if cuts.several:
            raise TypeError(f"{op}: `k` must be one number, got {type(k).__name__}. Call it once for each.")
        ranking = _ranking.rank(op, scores, target, cuts)
        kept = torch.arange(cuts.most, device=scores.device) < cuts.at
        index = torch.where(kept, ranking.index, -1)
        confidence = rows.gather(-1, index.clamp(min=0)) if rows.shape[-1] else index.to(rows.dtype)
        _add(sums, confidence, index, ranking.hit, n_bins, groups)
    return BinSums(*sums[:, :-1].view(3, groups, n_bins))


def _add_all(
    sums: Tensor, rows: Tensor, labels: _check.Labels, n_bins: int, groups: int, weight: Tensor | None
) -> None:
    """Add all pairs; of an index target only the labels are looked up."""
    classes = torch.arange(rows.shape[-1], device=rows.device)
    for c in _ranking.chunks(len(rows), rows.shape[-1]):
        part = _ranking.rows_of(labels, c)
        index = torch.where(_ranking.candidates(rows[c], part) > -torch.inf, classes, -1)
        if part.dense is not None:
            _add(sums, rows[c], index, part.dense > 0, n_bins, groups, None if weight is None else weight[c])
            continue
        assert part.index is not None
        assert weight is None
        _add(sums, rows[c], index, torch.zeros_like(index, dtype=torch.bool), n_bins, groups)
        held = rows[c].gather(-1, part.index.clamp(min=0))
        is_label = (part.index >= 0) & (held > -torch.inf)
        place = torch.where(is_label, _place(held, part.index, n_bins, groups), sums.shape[-1] - 1).flatten()
        sums[2].index_add_(0, place, torch.ones_like(place, dtype=sums.dtype))


def _place(confidence: Tensor, index: Tensor, n_bins: int, groups: int) -> Tensor:
    """The cell of the table for each pair: class by bin, or bin alone."""
    inner = _sums.even_steps(n_bins, confidence.device, confidence.dtype)[1:-1]
    cell = torch.bucketize(confidence.contiguous(), inner, right=True)
    return cell if groups == 1 else index * n_bins + cell


def _add(
    sums: Tensor,
    confidence: Tensor,
    index: Tensor,
    right: Tensor,
    n_bins: int,
    groups: int,
    weight: Tensor | None = None,
) -> None:
    seen = index >= 0
    place = torch.where(seen, _place(confidence, index, n_bins, groups), sums.shape[-1] - 1).flatten()
    confidence = torch.where(seen, confidence, 0)
    for row, value in zip(sums, (torch.ones_like(confidence), confidence, right), strict=True):
        value = value.to(sums.dtype) if weight is None else value * weight.to(sums.dtype)[:, None]
        row.index_add_(0, place, value.flatten())


def _divisor(count: Tensor) -> Tensor:
    """The counts, with 1 for those that are 0; weighted ones may be below 1."""
    return torch.where(count > 0, count, 1)


def diagram(sums: BinSums, dtype: torch.dtype) -> ReliabilityBins:
    """Turn the sums of bins into their means."""
    whole = _divisor(sums.pairs)
    edges = _sums.even_steps(sums.pairs.shape[-1], sums.pairs.device, dtype)
    parts = (sums.pairs, sums.confidence / whole, sums.right / whole)
    return ReliabilityBins(edges, *(p.to(dtype) for p in parts))


def calibration_error(sums: BinSums, norm: Norm) -> Tensor:
    """The calibration error of the sums of bins, a mean over diagrams that have a pair."""
    gap = (sums.right - sums.confidence).abs() / _divisor(sums.pairs)
    total = sums.pairs.sum(-1)
    share = sums.pairs / _divisor(total)[:, None]
    if norm == "max":
        error = gap.amax(-1)
    else:
        error = (share * gap).sum(-1) if norm == "l1" else (share * gap * gap).sum(-1).sqrt()
    return error.sum() / (total > 0).sum().clamp(min=1)
