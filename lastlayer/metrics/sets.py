"""Metrics of predicted label sets: precision, recall, F1, Jaccard index, Hamming loss and exact match."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lastlayer import _check
from lastlayer._check import Target
from lastlayer.metrics import _ranking, _sums
from lastlayer.metrics._sums import Average, Empty, SetCounts, SetKind, quotient

_AVERAGES = ("samples", "macro", "micro", "weighted", "none")


def label_set_precision(
    predicted: Target,
    target: Target,
    *,
    threshold: float | Tensor | None = None,
    n_classes: int | None = None,
    average: Average = "samples",
    empty: Empty = "skip",
    reduction: Literal["mean", "none"] = "mean",
) -> Tensor:
    r"""Compute the share of predicted labels that are right.

    .. math:: P = \frac{|T \cap S|}{|S|}

    for the true labels :math:`T` and the predicted ones :math:`S` of a row, or of a class over all rows, or of all
    rows and classes together.

    Args:
        predicted: The label sets, told by their dtype as targets are: int64 or int32 index lists padded with -1, such
            as the ``index`` of a decoder, ``(*batch, m)``, with or without the mark of :func:`~lastlayer.label_lists`;
            bool, int8 or uint8 of shape ``(*batch, n_classes)``, 1 where a label is predicted; or scores of a
            floating-point dtype together with `threshold`.
        target: Multi-hot of shape ``(*batch, n_classes)`` (-1 is unknown: neither the label nor a prediction of it
            counts), one class per row, or index lists padded with -1. Two index lists are never made dense.
        threshold: For scores: a label is predicted where its score is above it; one number, or one per class.
        n_classes: The number of classes, for averages over classes where both are index lists.
        average: ``"samples"`` is the mean over rows, ``"macro"`` the mean over classes, ``"weighted"`` that mean
            weighted by labels, ``"none"`` a vector of one value per class; ``"micro"`` counts all labels of all rows
            alike.
        empty: What a row (a class) counts as whose quotient is 0/0, here one without predictions: ``"skip"`` (not at
            all; nan in a vector), ``"zero"`` or ``"one"``. With nothing left the result is 0. This is the
            ``zero_division`` of scikit-learn, where 0 is the default.
        reduction: ``"mean"``, or ``"none"`` for the value of each row, of the batch shape.

    Returns:
        A fraction in torch's default dtype.

    Example:
        >>> predicted, target = torch.tensor([[0, 2], [1, -1]]), torch.tensor([[0, 1, -1], [1, 2, -1]])
        >>> label_set_precision(predicted, target)
        tensor(0.7500)
        >>> label_set_precision(predicted, target, average="micro")
        tensor(0.6667)
    """
    return _settled(
        "label_set_precision", "precision", predicted, target, threshold, n_classes, average, empty, reduction
    )


def label_set_recall(
    predicted: Target,
    target: Target,
    *,
    threshold: float | Tensor | None = None,
    n_classes: int | None = None,
    average: Average = "samples",
    empty: Empty = "skip",
    reduction: Literal["mean", "none"] = "mean",
) -> Tensor:
    r"""Compute the share of true labels that are predicted.

    .. math:: R = \frac{|T \cap S|}{|T|}

    Args:
        predicted: The label sets, as in :func:`label_set_precision`.
        target: The labels, as in :func:`label_set_precision`.
        threshold: For scores, as in :func:`label_set_precision`.
        n_classes: The number of classes, as in :func:`label_set_precision`.
        average: Over rows or classes, as in :func:`label_set_precision`.
        empty: What a row (a class) without labels counts as.
        reduction: ``"mean"``, or ``"none"`` for the value of each row.

    Returns:
        A fraction in torch's default dtype.

    Example:
        >>> label_set_recall(torch.tensor([[0, 2], [1, -1]]), torch.tensor([[0, -1, -1], [1, 2, -1]]))
        tensor(0.7500)
    """
    return _settled("label_set_recall", "recall", predicted, target, threshold, n_classes, average, empty, reduction)


def label_set_f1(
    predicted: Target,
    target: Target,
    *,
    threshold: float | Tensor | None = None,
    n_classes: int | None = None,
    average: Average = "samples",
    empty: Empty = "skip",
    reduction: Literal["mean", "none"] = "mean",
) -> Tensor:
    r"""Compute the harmonic mean of precision and recall of label sets.

    .. math:: F_1 = \frac{2 \, |T \cap S|}{|T| + |S|}

    Sample-F1, macro-F1 and micro-F1 are ``average="samples"``, ``"macro"`` and ``"micro"``.

    Args:
        predicted: The label sets, as in :func:`label_set_precision`.
        target: The labels, as in :func:`label_set_precision`.
        threshold: For scores, as in :func:`label_set_precision`.
        n_classes: The number of classes, as in :func:`label_set_precision`.
        average: Over rows or classes, as in :func:`label_set_precision`.
        empty: What a row (a class) counts as that has no label and no prediction.
        reduction: ``"mean"``, or ``"none"`` for the value of each row.

    Returns:
        A fraction in torch's default dtype.

    Example:
        >>> scores = torch.tensor([[0.9, 0.2, 0.7], [0.1, 0.8, 0.4]])
        >>> target = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]])
        >>> [round(label_set_f1(scores, target, threshold=0.5, average=a).item(), 4) for a in ("micro", "macro")]
        [0.6667, 0.6667]
    """
    return _settled("label_set_f1", "f1", predicted, target, threshold, n_classes, average, empty, reduction)


def label_set_jaccard(
    predicted: Target,
    target: Target,
    *,
    threshold: float | Tensor | None = None,
    n_classes: int | None = None,
    average: Average = "samples",
    empty: Empty = "skip",
    reduction: Literal["mean", "none"] = "mean",
) -> Tensor:
    r"""Compute the Jaccard index of label sets: labels in both over labels in either.

    .. math:: J = \frac{|T \cap S|}{|T \cup S|}

    Args:
        predicted: The label sets, as in :func:`label_set_precision`.
        target: The labels, as in :func:`label_set_precision`.
        threshold: For scores, as in :func:`label_set_precision`.
        n_classes: The number of classes, as in :func:`label_set_precision`.
        average: Over rows or classes, as in :func:`label_set_precision`.
        empty: What a row (a class) counts as that has no label and no prediction.
        reduction: ``"mean"``, or ``"none"`` for the value of each row.

    Returns:
        A fraction in torch's default dtype.

    Example:
        >>> label_set_jaccard(torch.tensor([[0, 2]]), torch.tensor([[0, 1, -1]]))
        tensor(0.3333)
    """
    return _settled("label_set_jaccard", "jaccard", predicted, target, threshold, n_classes, average, empty, reduction)


def hamming_loss(
    predicted: Target,
    target: Target,
    *,
    threshold: float | Tensor | None = None,
    n_classes: int | None = None,
    reduction: Literal["mean", "none"] = "mean",
) -> Tensor:
    r"""Compute the share of wrong decisions among all decisions, one per row and class.

    .. math:: H = \frac{|T \mathbin{\triangle} S|}{n}

    It is a metric, not a loss to train with. With many classes almost all decisions are easy, and it is close to 0 for
    any model: the number of wrong labels per row is ``n_classes`` times this.

    Args:
        predicted: The label sets, as in :func:`label_set_precision`.
        target: The labels, as in :func:`label_set_precision`; unknown ones are no decisions.
        threshold: For scores, as in :func:`label_set_precision`.
        n_classes: The number of classes, needed where both are index lists.
        reduction: ``"mean"`` over all decisions, or ``"none"`` for the share of each row (nan where nothing is known).

    Returns:
        A fraction in torch's default dtype; 0 without any decision.

    Example:
        >>> hamming_loss(torch.tensor([[0, 2], [1, -1]]), torch.tensor([[0, -1, -1], [1, 2, -1]]), n_classes=10)
        tensor(0.1000)
    """
    return _settled(
        "hamming_loss", "hamming", predicted, target, threshold, n_classes, "samples", "skip", reduction, True
    )


def exact_match(
    predicted: Target,
    target: Target,
    *,
    threshold: float | Tensor | None = None,
    reduction: Literal["mean", "none"] = "mean",
) -> Tensor:
    r"""Compute the share of rows whose label set is exactly right (subset accuracy).

    .. math:: E = [\, T = S \,]

    A row without labels and without predictions is right. A row of which nothing is known is left out.

    Args:
        predicted: The label sets, as in :func:`label_set_precision`.
        target: The labels, as in :func:`label_set_precision`; what is unknown is not compared.
        threshold: For scores, as in :func:`label_set_precision`.
        reduction: ``"mean"``, or ``"none"`` for each row: 1 or 0, nan where nothing is known.

    Returns:
        A fraction in torch's default dtype; 0 without any row.

    Example:
        >>> exact_match(torch.tensor([[0, 2], [1, -1]]), torch.tensor([[2, 0, -1], [1, 2, -1]]))
        tensor(0.5000)
    """
    return _settled("exact_match", "exact", predicted, target, threshold, None, "samples", "skip", reduction)


def _settled(
    op: str,
    kind: SetKind,
    predicted: Any,
    target: Any,
    threshold: Any,
    n_classes: int | None,
    average: Average,
    empty: Empty,
    reduction: str,
    needs_n: bool = False,
) -> Tensor:
    check_options(op, average, empty)
    _check.choice(op, "reduction", reduction, ("mean", "none"))
    if reduction == "none" and average != "samples":
        raise ValueError(f"{op}: `average` must be 'samples' with reduction='none', got {average!r}.")
    sets = read(op, predicted, target, threshold, n_classes, needs_n or average not in ("samples", "micro"))
    dtype = torch.get_default_dtype()
    if reduction == "none":
        value, full = quotient(kind, rows_of(sets))
        return torch.where(full, value, _sums.REST[empty]).view(sets.batch).to(dtype)
    return settle(kind, sums(kind, sets, average), average, empty).to(dtype)


def check_options(op: str, average: Any, empty: Any) -> None:
    """Check the two policies of a metric of label sets."""
    _check.choice(op, "average", average, _AVERAGES)
    _check.choice(op, "empty", empty, ("skip", "zero", "one"))


class Sets(NamedTuple):
    """Checked predictions and labels of the same rows, ``(rows, ...)``, in either form; `n_classes` may be unknown."""

    predicted: _check.Labels
    labels: _check.Labels
    n_classes: int | None
    batch: torch.Size


def read(op: str, predicted: Any, target: Any, threshold: Any, n_classes: int | None, needs_n: bool) -> Sets:
    """Check label sets and target, each in its own form."""
    predicted = predicted[0] if isinstance(predicted, tuple) else predicted  # a pair of lists and scores
    predicted = predicted.index if isinstance(predicted, _check.LabelLists) else predicted
    if not isinstance(predicted, Tensor):
        raise TypeError(f"{op}: `predicted` must be a tensor, got {type(predicted).__name__}. Use a decoder's lists.")
    _check.dense(op, "predicted", predicted)
    if predicted.is_floating_point():
        predicted = _above(op, _check.logits(op, predicted, "predicted"), threshold)
    elif threshold is not None:
        raise ValueError(f"{op}: `threshold` must be left out for label sets of {predicted.dtype}, got {threshold}.")
    if predicted.ndim == 0 or predicted.is_complex():
        raise ValueError(
            f"{op}: `predicted` must have shape (*batch, m) or (*batch, n_classes), got {predicted.shape}."
        )
    batch = predicted.shape[:-1]
    lists = predicted.dtype in (torch.int64, torch.int32)
    n = _n_classes(op, predicted, target, n_classes, lists)
    if needs_n and n is None:
        raise ValueError(f"{op}: `n_classes` must be given where both label sets and target are lists, got None.")
    probe = predicted.new_empty(()).float().expand(*batch, _beyond(target) if n is None else n)
    labels = _ranking.flat(_check.target(op, target, probe, in_range=n is not None))
    rows = _ranking.matrix(predicted)
    if lists and n is not None:
        _check.below(op, "predicted", predicted, n, "classes below n_classes", "Classes count from 0, and -1 pads.")
    said = _check.Labels(_check._distinct(rows.long()), None, n or 0) if lists else _check.Labels(None, rows, n or 0)
    return Sets(said, labels, n, batch)


def _above(op: str, scores: Tensor, threshold: Any) -> Tensor:
    """The labels whose scores are above the threshold, Boolean."""
    if threshold is None:
        raise TypeError(
            f"{op}: `threshold` must be given where `predicted` holds scores ({scores.dtype}), got None. "
            "Pass one, or the lists of a decoder."
        )
    scores = scores.detach().to(_check.work_dtype(scores))
    if not isinstance(threshold, Tensor):
        return scores > _check.number(op, "threshold", threshold)
    if threshold.shape not in (torch.Size([]), scores.shape[-1:]):
        n = scores.shape[-1]
        raise ValueError(
            f"{op}: `threshold` must be one number or one per class ({n}), got shape {tuple(threshold.shape)}."
        )
    return scores > threshold.to(scores.device)


def _n_classes(op: str, predicted: Tensor, target: Any, n_classes: int | None, lists: bool) -> int | None:
    """The number of classes, from whichever tensor has a column for each; None if neither does."""
    n = None if lists else predicted.shape[-1]
    if isinstance(target, Tensor) and target.dtype not in (torch.int64, torch.int32) and target.ndim:
        n = target.shape[-1] if n is None else n
    if n_classes is not None and n is not None and n != n_classes:
        raise ValueError(f"{op}: `n_classes` must be the number of columns, {n}, got {n_classes}.")
    return n_classes if n is None else n


def _beyond(target: Any) -> int:
    """A width that no list of the target has, so that its shape is not taken for that of a multi-hot one."""
    return target.shape[-1] + 1 if isinstance(target, Tensor) and target.ndim else 1


class _Marks(NamedTuple):
    """Marked entries of rows, ``(rows, entries)``; they are columns, one per class, where `classes` is None."""

    mask: Tensor
    classes: Tensor | None

    def per_class(self, n: int) -> Tensor:
        if self.classes is None:
            return self.mask.sum(0)
        return torch.bincount(torch.where(self.mask, self.classes, n).flatten(), minlength=n + 1)[:n]


def rows_of(sets: Sets) -> SetCounts:
    """Count the labels of each row."""
    held = _held(sets.predicted)
    counts = held.new_zeros(4, len(held), dtype=torch.int64)
    for c, marks, known in _parts(sets):
        counts[:3, c] = torch.stack([m.mask.sum(-1) for m in marks])
        counts[3, c] = (1 if sets.n_classes is None else sets.n_classes) if known is None else known.sum(-1)
    return SetCounts(*counts)


def classes_of(sets: Sets) -> SetCounts:
    """Count the labels of each class over all rows."""
    n = sets.n_classes
    assert n is not None
    counts = _held(sets.predicted).new_zeros(4, n, dtype=torch.int64)
    for c, marks, known in _parts(sets):
        counts[:3] += torch.stack([m.per_class(n) for m in marks])
        counts[3] += c.stop - c.start if known is None else known.sum(0)
    return SetCounts(*counts)


def _parts(sets: Sets) -> Iterator[tuple[slice, tuple[_Marks, _Marks, _Marks], Tensor | None]]:
    """The right, predicted and true labels, and what is known, of a bounded number of rows at a time."""
    held = _held(sets.predicted), _held(sets.labels)
    both_lists = sets.predicted.index is not None and sets.labels.index is not None
    widths = [x.shape[-1] for x in held]
    for c in _ranking.chunks(len(held[0]), widths[0] * widths[1] if both_lists else max(widths)):
        said, true = _ranking.rows_of(sets.predicted, c), _ranking.rows_of(sets.labels, c)
        yield c, _compared(said, true), true.known()


def _held(labels: _check.Labels) -> Tensor:
    held = labels.dense if labels.index is None else labels.index
    assert held is not None
    return held


def _compared(said: _check.Labels, true: _check.Labels) -> tuple[_Marks, _Marks, _Marks]:
    """The right, the predicted and the true labels; a prediction whose label is unknown is none of them."""
    held = _held(true)
    labels = _Marks(held > 0 if true.index is None else held >= 0, true.index)
    if said.index is None:
        known = true.known()
        chosen = _held(said) > 0 if known is None else (_held(said) > 0) & known
        hit = chosen if true.index is None else _at(chosen, held)
        return _Marks(hit & labels.mask, true.index), _Marks(chosen, None), labels
    chosen = said.index >= 0
    if true.index is not None:
        hit = (said.index[:, :, None] == held[:, None, :]).any(-1)
    else:
        entry = _at(held, said.index)
        hit, chosen = entry > 0, chosen & (entry >= 0)
    return _Marks(hit & chosen, said.index), _Marks(chosen, said.index), labels


def _at(columns: Tensor, index: Tensor) -> Tensor:
    """The entries of the columns that lists name; what padding finds means nothing."""
    return columns.gather(-1, index.clamp(min=0)) if columns.shape[-1] else columns.new_zeros(index.shape)


def sums(kind: SetKind, sets: Sets, average: Average) -> dict[str, Tensor]:
    """What adds up over batches: sums over rows, counts of classes, or counts of everything."""
    dtype = _sums.exact_dtype(_held(sets.predicted).device)
    if average not in ("samples", "micro"):
        return {name: count.to(dtype) for name, count in classes_of(sets)._asdict().items()}
    rows = rows_of(sets)
    if average == "micro" or kind == "hamming":
        return {name: count.sum().to(dtype) for name, count in rows._asdict().items()}
    value, full = quotient(kind, rows)
    return {"gain": torch.where(full, value, 0).sum(), "full": full.sum(), "rest": (~full).sum()}


def settle(kind: SetKind, sums: dict[str, Tensor], average: Average, empty: Empty) -> Tensor:
    """Turn sums into the metric: a number, or one per class."""
    if "gain" in sums:
        gain, full, rest = sums["gain"], sums["full"], sums["rest"]
        if empty == "skip":
            return gain / full.clamp(min=1)
        return (gain + _sums.REST[empty] * rest) / (full + rest).clamp(min=1)
    counts = SetCounts(**sums)
    value, full = quotient(kind, counts)
    if average in ("samples", "micro"):
        return torch.where(full, value, 1.0 if empty == "one" else 0.0)
    value = torch.where(full, value, _sums.REST[empty])
    if average == "none":
        return value
    weight = counts.labels if average == "weighted" else torch.ones_like(value)
    weight = torch.where(value.isnan(), 0, weight)
    return (value.nan_to_num() * weight).sum() / weight.sum().clamp(min=1)
