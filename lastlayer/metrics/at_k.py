"""Metrics of the k best classes of each row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lastlayer import _check
from lastlayer._check import Target
from lastlayer.metrics import _ranking, _sums
from lastlayer.metrics._ranking import Gain
from lastlayer.metrics._sums import Average, Empty, Kind
from lastlayer.shard import ClassShard, local_part, unwrap

K = int | Sequence[int] | Tensor
RowReduction = Literal["mean", "none"]

GAINS = ("binary", "linear", "exponential")
_AVERAGES = ("samples", "macro", "micro", "weighted", "none")
_EMPTY = ("skip", "zero", "one")


def precision_at_k(
    scores: Tensor,
    target: Target,
    k: K,
    *,
    average: Average = "samples",
    empty: Empty = "skip",
    indices: Tensor | None = None,
    shard: ClassShard | None = None,
    reduction: RowReduction = "mean",
) -> Tensor:
    r"""Compute the share of right labels among the `k` best of each row.

    .. math:: P@k = \frac{1}{k} \, |T \cap \text{top}_k(s)|

    averaged over the rows. The divisor is always `k`: with fewer than `k` labels a row cannot reach 1. Equal scores
    are ordered by the lowest class. A class whose score is ``-inf`` or nan is never predicted.

    Args:
        scores: Scores or logits, ``(*batch, n_classes)``; only their order matters.
        target: Multi-hot of the shape of `scores` (-1 is unknown: not ranked, not counted), one class per row, or index
            lists padded with -1, which are never made dense.
        k: A whole number of at least 1; a list of numbers for a vector of results in one pass; or an integer tensor
            of the batch shape, one `k` per row. It may exceed the number of classes.
        average: ``"samples"`` is the mean over rows. The others take the `k` best of each row as its prediction:
            ``"macro"`` is the mean over classes, ``"weighted"`` weights it by the number of labels, ``"none"`` is a
            vector with one value per class, and ``"micro"`` counts all pairs of a row and a class alike.
        empty: What a row without labels counts as: ``"skip"`` (not at all), ``"zero"`` or ``"one"``. For averages
            over classes the same for a class without labels, which is nan under ``"skip"`` and ``"none"``. With
            nothing left the result is 0.
        indices: The classes of decoded lists, -1 padded, distinct; `scores` then holds their scores, ``(*batch, m)``,
            and `target` class indices.
        shard: This rank's slice, when the classes are split over processes: `scores` and a multi-hot target hold its
            classes, index targets those of all ranks. Each rank's best `k` are gathered.
        reduction: ``"mean"``, or ``"none"`` for the value of each row, which is nan where `empty` skips the row.

    Returns:
        A fraction in float32 (float64 for float64 scores): a number, or one for each `k` of a list. With
        ``reduction="none"`` it has the batch shape, followed by one entry for each `k` of a list.

    Example:
        >>> scores = torch.tensor([[0.9, 0.8, 0.1, 0.3], [0.2, 0.7, 0.6, 0.1]])
        >>> precision_at_k(scores, torch.tensor([[0, 3], [2, -1]]), [1, 2])
        tensor([0.5000, 0.5000])
    """
    return _at_k("precision_at_k", "precision", scores, target, k, average, empty, indices, shard, reduction)


def recall_at_k(
    scores: Tensor,
    target: Target,
    k: K,
    *,
    average: Average = "samples",
    empty: Empty = "skip",
    indices: Tensor | None = None,
    shard: ClassShard | None = None,
    reduction: RowReduction = "mean",
) -> Tensor:
    r"""Compute the share of each row's labels that are among its `k` best.

    .. math:: R@k = \frac{|T \cap \text{top}_k(s)|}{|T|}

    It never falls as `k` grows. ``average="macro"`` is the mean recall over classes (mR@k).

    Args:
        scores: Scores or logits, ``(*batch, n_classes)``; only their order matters.
        target: Multi-hot, one class per row, or index lists, as in :func:`precision_at_k`.
        k: A number, a list of numbers, or one per row, as in :func:`precision_at_k`.
        average: Over ``"samples"``, or over classes, as in :func:`precision_at_k`.
        empty: What a row (a class) without labels counts as: ``"skip"``, ``"zero"`` or ``"one"``.
        indices: The classes of decoded lists, as in :func:`precision_at_k`.
        shard: This rank's slice, when the classes are split over processes.
        reduction: ``"mean"``, or ``"none"`` for the value of each row, as in :func:`precision_at_k`.

    Returns:
        A fraction, or one for each `k` of a list.

    Example:
        >>> scores = torch.tensor([[0.9, 0.8, 0.1, 0.3], [0.2, 0.7, 0.6, 0.1]])
        >>> recall_at_k(scores, torch.tensor([[0, 3], [2, -1]]), [1, 2, 3])
        tensor([0.2500, 0.7500, 1.0000])
    """
    return _at_k("recall_at_k", "recall", scores, target, k, average, empty, indices, shard, reduction)


def f1_at_k(
    scores: Tensor,
    target: Target,
    k: K,
    *,
    average: Average = "samples",
    empty: Empty = "skip",
    indices: Tensor | None = None,
    shard: ClassShard | None = None,
    reduction: RowReduction = "mean",
) -> Tensor:
    r"""Compute the harmonic mean of precision and recall at `k`.

    .. math:: F_1@k = \frac{2 \, |T \cap \text{top}_k(s)|}{k + |T|}

    averaged over the rows. ``average="macro"`` is the mean over classes of :math:`2\,tp / (2\,tp + fp + fn)` with the
    `k` best of each row as its prediction, as in multi-label papers that output a fixed number of labels.

    Args:
        scores: Scores or logits, ``(*batch, n_classes)``; only their order matters.
        target: Multi-hot, one class per row, or index lists, as in :func:`precision_at_k`.
        k: A number, a list of numbers, or one per row, as in :func:`precision_at_k`.
        average: Over ``"samples"``, or over classes, as in :func:`precision_at_k`.
        empty: What a row (a class) without labels counts as: ``"skip"``, ``"zero"`` or ``"one"``.
        indices: The classes of decoded lists, as in :func:`precision_at_k`.
        shard: This rank's slice, when the classes are split over processes.
        reduction: ``"mean"``, or ``"none"`` for the value of each row, as in :func:`precision_at_k`.

    Returns:
        A fraction, or one for each `k` of a list.

    Example:
        >>> f1_at_k(torch.tensor([[0.9, 0.8, 0.1]]), torch.tensor([[1.0, 0.0, 0.0]]), 2)
        tensor(0.6667)
    """
    return _at_k("f1_at_k", "f1", scores, target, k, average, empty, indices, shard, reduction)


def r_precision_at_k(
    scores: Tensor,
    target: Target,
    k: K,
    *,
    empty: Empty = "skip",
    indices: Tensor | None = None,
    shard: ClassShard | None = None,
    reduction: RowReduction = "mean",
) -> Tensor:
    r"""Compute precision at `k` relative to the best that the row's number of labels allows.

    .. math:: RP@k = \frac{|T \cap \text{top}_k(s)|}{\min(k, |T|)}

    Args:
        scores: Scores or logits, ``(*batch, n_classes)``; only their order matters.
        target: Multi-hot, one class per row, or index lists, as in :func:`precision_at_k`.
        k: A number, a list of numbers, or one per row, as in :func:`precision_at_k`.
        empty: What a row without labels counts as: ``"skip"``, ``"zero"`` or ``"one"``.
        indices: The classes of decoded lists, as in :func:`precision_at_k`.
        shard: This rank's slice, when the classes are split over processes.
        reduction: ``"mean"``, or ``"none"`` for the value of each row, as in :func:`precision_at_k`.

    Returns:
        A fraction, or one for each `k` of a list.

    Example:
        >>> r_precision_at_k(torch.tensor([[0.9, 0.8, 0.1]]), torch.tensor([[1.0, 0.0, 0.0]]), 2)
        tensor(1.)
    """
    return _at_k("r_precision_at_k", "r_precision", scores, target, k, "samples", empty, indices, shard, reduction)


def ndcg_at_k(
    scores: Tensor,
    target: Target,
    k: K,
    *,
    empty: Empty = "skip",
    gain: Gain = "binary",
    indices: Tensor | None = None,
    shard: ClassShard | None = None,
    reduction: RowReduction = "mean",
) -> Tensor:
    r"""Compute the normalised discounted cumulative gain of the `k` best.

    .. math:: nDCG@k = \sum_{j=1}^{k} \frac{g(\text{rank}_j)}{\log_2 (j + 1)}
              \Big/ \max_\pi \sum_{j=1}^{k} \frac{g(\pi_j)}{\log_2 (j + 1)}

    The gain :math:`g` of a class is 1 for a label and 0 for the others. A multi-hot target may hold graded relevance
    instead, positive numbers of any size, which `gain` reads.

    Args:
        scores: Scores or logits, ``(*batch, n_classes)``; only their order matters.
        target: Multi-hot (for graded gains of a floating-point dtype), one class per row, or index lists, as in
            :func:`precision_at_k`.
        k: A number, a list of numbers, or one per row, as in :func:`precision_at_k`.
        gain: ``"binary"`` is 1 for every positive entry of the target, ``"linear"`` is the entry itself,
            ``"exponential"`` is :math:`2^t - 1` (Burges et al., 2005). An index target has a gain of 1 under all three.
        empty: What a row without labels counts as: ``"skip"``, ``"zero"`` or ``"one"``.
        indices: The classes of decoded lists, as in :func:`precision_at_k`.
        shard: This rank's slice, when the classes are split over processes.
        reduction: ``"mean"``, or ``"none"`` for the value of each row, as in :func:`precision_at_k`.

    Returns:
        A fraction, or one for each `k` of a list.

    Example:
        >>> ndcg_at_k(torch.tensor([[0.9, 0.8, 0.1]]), torch.tensor([[0.0, 1.0, 0.0]]), [1, 2])
        tensor([0.0000, 0.6309])
        >>> ndcg_at_k(torch.tensor([[0.9, 0.8, 0.1]]), torch.tensor([[1.0, 3.0, 0.0]]), 2, gain="linear")
        tensor(0.7967)
    """
    _check.choice("ndcg_at_k", "gain", gain, GAINS)
    return _at_k("ndcg_at_k", "ndcg", scores, target, k, "samples", empty, indices, shard, reduction, gain=gain)


def psp_at_k(
    scores: Tensor,
    target: Target,
    k: K,
    propensities: Tensor | None = None,
    *,
    empty: Empty = "skip",
    indices: Tensor | None = None,
    shard: ClassShard | None = None,
    reduction: RowReduction = "mean",
) -> Tensor:
    r"""Compute propensity-scored precision at `k`, divided by the best attainable value (Jain et al., 2016).

    .. math:: PSP@k = \sum_i \sum_{l \in T_i \cap \text{top}_k(s_i)} \frac{1}{p_l}
              \Big/ \sum_i \max_{|S| \le k,\, S \subseteq T_i} \sum_{l \in S} \frac{1}{p_l}

    A rare label found counts for more, to make up for the rare labels that annotators miss. It is one quotient of
    sums over all rows, as in the published tables, not a mean of quotients; ``reduction="none"`` returns the quotient
    of each row, whose mean is another number.

    Args:
        scores: Scores or logits, ``(*batch, n_classes)``; only their order matters.
        target: Multi-hot, one class per row, or index lists, as in :func:`precision_at_k`.
        k: A number, a list of numbers, or one per row, as in :func:`precision_at_k`.
        propensities: The probability :math:`p_l` that a label that applies is observed, ``(n_classes,)``, over the
            classes of all ranks; see :func:`propensity`. ``None`` is 1 for each class.
        empty: A row without labels adds nothing to either sum (``"skip"``); ``"zero"`` and ``"one"`` average that
            value in, with the weight of one row.
        indices: The classes of decoded lists, as in :func:`precision_at_k`.
        shard: This rank's slice, when the classes are split over processes.
        reduction: ``"mean"``, or ``"none"`` for the value of each row, as in :func:`precision_at_k`.

    Returns:
        A fraction, or one for each `k` of a list.

    Example:
        >>> scores = torch.tensor([[0.9, 0.8, 0.1], [0.1, 0.2, 0.7]])
        >>> target = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
        >>> psp_at_k(scores, target, 1, torch.tensor([1.0, 1.0, 0.25]))
        tensor(0.6250)
    """
    return _at_k(
        "psp_at_k", "psp", scores, target, k, "samples", empty, indices, shard, reduction, propensities=propensities
    )


def top_k_accuracy(
    scores: Tensor,
    target: Target,
    k: K = 1,
    *,
    empty: Empty = "skip",
    indices: Tensor | None = None,
    shard: ClassShard | None = None,
    reduction: RowReduction = "mean",
) -> Tensor:
    r"""Compute the share of rows with at least one label among their `k` best.

    .. math:: \text{Acc}@k = [\, T \cap \text{top}_k(s) \neq \emptyset \,]

    With one label per row it is the usual top-k accuracy, and equal to recall at `k`.

    Args:
        scores: Scores or logits, ``(*batch, n_classes)``; only their order matters.
        target: Multi-hot, one class per row, or index lists, as in :func:`precision_at_k`.
        k: A number, a list of numbers, or one per row, as in :func:`precision_at_k`.
        empty: What a row without labels counts as: ``"skip"``, ``"zero"`` or ``"one"``.
        indices: The classes of decoded lists, as in :func:`precision_at_k`.
        shard: This rank's slice, when the classes are split over processes.
        reduction: ``"mean"``, or ``"none"`` for the value of each row, as in :func:`precision_at_k`.

    Returns:
        A fraction, or one for each `k` of a list.

    Example:
        >>> top_k_accuracy(torch.tensor([[0.9, 0.8, 0.1], [0.1, 0.2, 0.7]]), torch.tensor([1, 2]), [1, 2])
        tensor([0.5000, 1.0000])
    """
    return _at_k("top_k_accuracy", "accuracy", scores, target, k, "samples", empty, indices, shard, reduction)


def fall_out_at_k(
    scores: Tensor,
    target: Target,
    k: K,
    *,
    empty: Empty = "skip",
    indices: Tensor | None = None,
    n_classes: int | None = None,
    shard: ClassShard | None = None,
    reduction: RowReduction = "mean",
) -> Tensor:
    r"""Compute the share of each row's wrong classes that are among its `k` best; the lower, the better.

    .. math:: \text{Fall-out}@k = \frac{|\text{top}_k(s) \setminus T|}{n - |T|}

    where :math:`n` counts the classes whose label is known. A row without labels takes part; `empty` is for rows that
    have nothing but labels.

    Args:
        scores: Scores or logits, ``(*batch, n_classes)``; only their order matters.
        target: Multi-hot, one class per row, or index lists, as in :func:`precision_at_k`.
        k: A number, a list of numbers, or one per row, as in :func:`precision_at_k`.
        empty: What a row without wrong classes counts as: ``"skip"``, ``"zero"`` or ``"one"``.
        indices: The classes of decoded lists, as in :func:`precision_at_k`; they need `n_classes`.
        n_classes: The number of all classes, where `indices` is given.
        shard: This rank's slice, when the classes are split over processes.
        reduction: ``"mean"``, or ``"none"`` for the value of each row, as in :func:`precision_at_k`.

    Returns:
        A fraction, or one for each `k` of a list.

    Example:
        >>> fall_out_at_k(torch.tensor([[0.9, 0.8, 0.1, 0.2]]), torch.tensor([[1.0, 0.0, 0.0, 0.0]]), [1, 2])
        tensor([0.0000, 0.3333])
    """
    check_n_classes("fall_out_at_k", indices, n_classes)
    return _at_k(
        "fall_out_at_k",
        "fall_out",
        scores,
        target,
        k,
        "samples",
        empty,
        indices,
        shard,
        reduction,
        n_classes=n_classes,
    )


def check_n_classes(op: str, indices: Tensor | None, n_classes: int | None) -> None:
    """Check that the number of classes is given with decoded lists, and only with them."""
    if (indices is None) != (n_classes is None):
        rule = "must be given with" if n_classes is None else "must be left out without"
        raise ValueError(f"{op}: `n_classes` {rule} `indices`, got {n_classes}.")


def propensity(label_counts: Tensor, n_rows: int, A: float = 0.55, B: float = 1.5) -> Tensor:
    r"""Estimate the propensities of labels from how often they occur in the training data (Jain et al., 2016).

    .. math:: p_l = \frac{1}{1 + C (N_l + B)^{-A}}, \qquad C = (\log N - 1)(B + 1)^A

    Args:
        label_counts: How many training rows have the label, ``(n_classes,)``.
        n_rows: The number of training rows :math:`N`.
        A: 0.5 for Wikipedia, 0.6 for Amazon, else 0.55.
        B: 0.4 for Wikipedia, 2.6 for Amazon, else 1.5.

    Returns:
        Propensities in (0, 1], of the shape of `label_counts`, in its dtype if that is float64 and else float32.

    Example:
        >>> propensity(torch.tensor([0, 10, 1000]), n_rows=10000)
        tensor([0.0842, 0.2199, 0.7669])
    """
    if not isinstance(label_counts, Tensor):
        raise TypeError(
            f"propensity: `label_counts` must be a tensor, got {type(label_counts).__name__}. Use torch.as_tensor."
        )
    _check.number("propensity", "n_rows", n_rows, low=1)
    _check.number("propensity", "A", A, low=0)
    _check.number("propensity", "B", B, low=0)
    c = max(math.log(n_rows) - 1, 0) * (B + 1) ** A
    counts = label_counts if label_counts.dtype == torch.float64 else label_counts.float()
    probability: Tensor = 1 / (1 + c * (counts + B) ** -A)
    return probability


def _at_k(
    op: str,
    kind: Kind,
    scores: Tensor,
    target: Target,
    k: Any,
    average: Average,
    empty: Empty,
    indices: Tensor | None,
    shard: ClassShard | None,
    reduction: RowReduction,
    **more: Any,
) -> Tensor:
    check_options(op, average, empty)
    _check.choice(op, "reduction", reduction, ("mean", "none"))
    if reduction == "none" and average != "samples":
        raise ValueError(f"{op}: `average` must be 'samples' with reduction='none', got {average!r}.")
    scores, shard, _ = unwrap(op, scores, shard)
    target = local_part(target)
    if average != "samples" and (indices is not None or shard is not None):
        raise ValueError(
            f"{op}: `average` must be 'samples' with `indices` or `shard`, got {average!r}. "
            "Averages over classes need the scores of all of them; the streaming class takes `indices` and `n_classes`."
        )
    if reduction == "none":
        rows, cuts = row_gains(op, kind, scores, target, k, indices, shard, **more)
        result = _sums.settle_each(rows, empty)
        result = result.view(*scores.shape[:-1], result.shape[-1])
        return (result if cuts.several else result.squeeze(-1)).to(_check.work_dtype(scores))
    sums, cuts = gather_sums(op, kind, scores, target, k, average, indices, shard, **more)
    result = settle(kind, sums, average, empty)
    return (result if cuts.several else result.squeeze(0)).to(_check.work_dtype(scores))


def check_options(op: str, average: Any, empty: Any) -> None:
    """Check the two policies of a metric at `k`."""
    _check.choice(op, "average", average, _AVERAGES)
    _check.choice(op, "empty", empty, _EMPTY)


def gather_sums(
    op: str,
    kind: Kind,
    scores: Tensor,
    target: Target,
    k: Any,
    average: Average = "samples",
    indices: Tensor | None = None,
    shard: ClassShard | None = None,
    *,
    n_classes: int | None = None,
    **more: Any,
) -> tuple[_sums.RowSums | _sums.LabelCounts, _ranking.Cuts]:
    """Check the inputs and return what adds up over batches, with the checked `k`."""
    if average == "samples":
        rows, cuts = row_gains(op, kind, scores, target, k, indices, shard, n_classes=n_classes, **more)
        return _sums.row_sums(rows), cuts
    scores = _check.logits(op, scores, "scores").detach()
    cuts = _ranking.cuts(op, k, scores.shape[:-1], scores.device)
    ranking = _ranking.rank(op, scores, target, cuts, indices, shard)
    return _sums.label_counts(ranking, cuts, scores.shape[-1] if n_classes is None else n_classes), cuts


def row_gains(
    op: str,
    kind: Kind,
    scores: Tensor,
    target: Target,
    k: Any,
    indices: Tensor | None = None,
    shard: ClassShard | None = None,
    *,
    propensities: Tensor | None = None,
    gain: Gain = "binary",
    n_classes: int | None = None,
) -> tuple[_sums.RowGains, _ranking.Cuts]:
    """Check the inputs and return the gains of each row, with the checked `k`."""
    scores = _check.logits(op, scores, "scores").detach()
    cuts = _ranking.cuts(op, k, scores.shape[:-1], scores.device)
    local = scores.shape[-1] if indices is None else None
    inverse = _inverse(op, propensities, local, shard, scores) if kind == "psp" else None
    ranking = _ranking.rank(op, scores, target, cuts, indices, shard, gain)
    return _sums.row_gains(kind, ranking, cuts, inverse, shard, gain, None if indices is None else n_classes), cuts


def _inverse(op: str, value: Any, n: int | None, shard: ClassShard | None, scores: Tensor) -> Tensor | None:
    """Check propensities and return their inverses; None stands for 1 everywhere."""
    if value is None:
        return None
    if not isinstance(value, Tensor) or not value.is_floating_point():
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(
            f"{op}: `propensities` must be a floating-point tensor, got {got}. Use lastlayer.metrics.propensity."
        )
    wrong = value.ndim != 1 or (n is not None and (len(value) < n if shard is not None else len(value) != n))
    if wrong:
        raise ValueError(
            f"{op}: `propensities` must hold one number per class, got shape {tuple(value.shape)} for {n} classes."
        )
    return 1 / value.to(device=scores.device, dtype=_sums.exact_dtype(scores.device))


def settle(kind: Kind, sums: _sums.RowSums | _sums.LabelCounts, average: Average, empty: Empty) -> Tensor:
    """Turn sums into the metric, ``(q,)`` or ``(q, n_classes)``."""
    if isinstance(sums, _sums.RowSums):
        return _sums.settle_rows(sums, empty)
    return _sums.settle_labels(kind, sums, average, empty)
