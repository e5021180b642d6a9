"""Streaming forms of the metrics of label sets, ranks and curves: torchmetrics classes, all in constant memory."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lastlayer import _check, _recall
from lastlayer._check import Target
from lastlayer.metrics import _sums, curves, ranks, sets
from lastlayer.metrics._stream import Stream
from lastlayer.metrics._sums import Average, Empty, SetCounts, SetKind
from lastlayer.metrics.ranks import RankKind


class _Set(Stream):
    """A metric of label sets: sums over rows, or counts per class or of everything."""

    kind: ClassVar[SetKind]
    threshold: float | Tensor | None
    n_classes: int | None = None
    average: Average = "samples"
    empty: Empty = "skip"

    def __init__(self, options: dict[str, Any], **settings: Any) -> None:
        super().__init__(options, **settings)
        op = type(self).__name__
        sets.check_options(op, self.average, self.empty)
        self._per_class = self.average not in ("samples", "micro")
        if self._per_class and self.n_classes is None:
            raise ValueError(f"{op}: `n_classes` must be given with average={self.average!r}, got None.")
        over_rows = self.average == "samples" and self.kind != "hamming"
        self._names = ("gain", "full", "rest") if over_rows else SetCounts._fields
        for name in self._names:
            self._sum(name, *([self.n_classes] if self._per_class and self.n_classes is not None else []))

    def update(self, predicted: Target, target: Target) -> None:
        """Add rows: label sets (or scores, with `threshold`) and target, as the function takes them."""
        needs_n = self._per_class or self.kind == "hamming"
        compared = sets.read(type(self).__name__, predicted, target, self.threshold, self.n_classes, needs_n)
        self._add(**sets.sums(self.kind, compared, self.average))

    def compute(self) -> Tensor:
        """Return the metric of all rows so far, as the function returns it."""
        states = {name: self._state(name) for name in self._names}
        return sets.settle(self.kind, states, self.average, self.empty).to(torch.get_default_dtype())


class LabelSetPrecision(_Set):
    """Streaming form of :func:`~lastlayer.metrics.label_set_precision`, which documents the options.

    Averages over classes need `n_classes`. In a collection with metrics of scores, give `threshold`.

    Example:
        >>> metric = LabelSetPrecision(average="micro", threshold=0.5)
        >>> metric.update(torch.tensor([[0.9, 0.8, 0.1]]), torch.tensor([[1.0, 0.0, 0.0]]))
        >>> metric.update(torch.tensor([[0.2, 0.8, 0.1]]), torch.tensor([[0, 1]]))
        >>> metric.compute()
        tensor(0.6667)
    """

    kind: ClassVar[SetKind] = "precision"

    def __init__(
        self,
        *,
        threshold: float | Tensor | None = None,
        n_classes: int | None = None,
        average: Average = "samples",
        empty: Empty = "skip",
        **options: Any,
    ) -> None:
        super().__init__(options, threshold=threshold, n_classes=n_classes, average=average, empty=empty)


class LabelSetRecall(LabelSetPrecision):
    """Streaming form of :func:`~lastlayer.metrics.label_set_recall`, with the options of `LabelSetPrecision`."""

    kind: ClassVar[SetKind] = "recall"


class LabelSetF1(LabelSetPrecision):
    """Streaming form of :func:`~lastlayer.metrics.label_set_f1`, with the options of `LabelSetPrecision`."""

    kind: ClassVar[SetKind] = "f1"


class LabelSetJaccard(LabelSetPrecision):
    """Streaming form of :func:`~lastlayer.metrics.label_set_jaccard`, with the options of `LabelSetPrecision`."""

    kind: ClassVar[SetKind] = "jaccard"


class HammingLoss(_Set):
    """Streaming form of :func:`~lastlayer.metrics.hamming_loss`; it needs `n_classes` where both are index lists."""

    kind: ClassVar[SetKind] = "hamming"
    higher_is_better = False

    def __init__(
        self, *, threshold: float | Tensor | None = None, n_classes: int | None = None, **options: Any
    ) -> None:
        super().__init__(options, threshold=threshold, n_classes=n_classes)


class ExactMatch(_Set):
    """Streaming form of :func:`~lastlayer.metrics.exact_match`."""

    kind: ClassVar[SetKind] = "exact"

    def __init__(self, *, threshold: float | Tensor | None = None, **options: Any) -> None:
        super().__init__(options, threshold=threshold)


class _Ranks(Stream):
    """A mean over rows of where the labels stand."""

    kind: ClassVar[RankKind]
    k: int | None = None
    empty: Empty

    def __init__(self, options: dict[str, Any], **settings: Any) -> None:
        super().__init__(options, **settings)
        _check.choice(type(self).__name__, "empty", self.empty, ("skip", "zero", "one"))
        ranks.check_k(type(self).__name__, self.k)
        for name, shape in {"gain": (1,), "best": (1,), "full": (), "empty": ()}.items():
            self._sum(name, *shape)

    def update(self, scores: Tensor, target: Target) -> None:
        """Add rows."""
        rows = ranks.row_gains(type(self).__name__, self.kind, scores, target, self.k)
        self._add(**_sums.row_sums(rows)._asdict())

    def compute(self) -> Tensor:
        """Return the metric of all rows so far, as the function returns it."""
        sums = _sums.RowSums(*(self._state(name) for name in _sums.RowSums._fields))
        return _sums.settle_rows(sums, self.empty).squeeze(0).to(torch.get_default_dtype())


class MeanReciprocalRank(_Ranks):
    """Streaming form of :func:`~lastlayer.metrics.mean_reciprocal_rank`.

    Example:
        >>> metric = MeanReciprocalRank()
        >>> metric.update(torch.tensor([[0.9, 0.8, 0.1]]), torch.tensor([1]))
        >>> metric.compute()
        tensor(0.5000)
    """

    kind: ClassVar[RankKind] = "reciprocal"

    def __init__(self, k: int | None = None, *, empty: Empty = "skip", **options: Any) -> None:
        super().__init__(options, k=k, empty=empty)


class CoverageError(_Ranks):
    """Streaming form of :func:`~lastlayer.metrics.coverage_error`."""

    kind: ClassVar[RankKind] = "coverage"
    higher_is_better = False
    plot_upper_bound = None

    def __init__(self, *, empty: Empty = "skip", **options: Any) -> None:
        super().__init__(options, empty=empty)


class LabelRankingLoss(_Ranks):
    """Streaming form of :func:`~lastlayer.metrics.label_ranking_loss`."""

    kind: ClassVar[RankKind] = "pairs"
    higher_is_better = False

    def __init__(self, *, empty: Empty = "skip", **options: Any) -> None:
        super().__init__(options, empty=empty)


class PrecisionRecallCurve(Stream):
    """Streaming form of :func:`~lastlayer.metrics.precision_recall_curve` for given thresholds.

    It counts per class and threshold, in ``16 * n_classes * thresholds`` bytes.

    Args:
        thresholds: The number of thresholds from 0 to 1, or a tensor of them in increasing order.
        n_classes: The number of classes, or None for one-dimensional scores.
        average: ``"none"`` for one curve per class, ``"micro"`` for one of all rows and classes together.
        **options: Of ``torchmetrics.Metric``.

    Example:
        >>> metric = PrecisionRecallCurve(thresholds=torch.tensor([0.5, 0.65, 0.8]))
        >>> metric.update(torch.tensor([0.9, 0.6]), torch.tensor([1.0, 1.0]))
        >>> metric.update(torch.tensor([0.4, 0.7]), torch.tensor([0.0, 0.0]))
        >>> metric.compute().precision
        tensor([0.6667, 0.5000, 1.0000])
    """

    higher_is_better = None
    thresholds: int | Tensor
    n_classes: int | None
    average: Literal["none", "micro"]
    grid: Tensor

    def __init__(
        self,
        *,
        thresholds: int | Tensor = 100,
        n_classes: int | None = None,
        average: Literal["none", "micro"] = "none",
        **options: Any,
    ) -> None:
        super().__init__(options, thresholds=thresholds, n_classes=n_classes, average=average)
        op = type(self).__name__
        _check.choice(op, "average", average, ("none", "micro"))
        grid = curves.check_thresholds(op, thresholds, torch.device("cpu"), torch.get_default_dtype())
        self.register_buffer("grid", grid, persistent=False)
        self._sum("positive", n_classes or 1, len(grid))
        self._sum("total", n_classes or 1, len(grid))
        self._sum("labels", n_classes or 1)

    def update(self, scores: Tensor, target: Target) -> None:
        """Add rows: scores of `n_classes` classes, or one-dimensional ones, and their target."""
        op = type(self).__name__
        scores = _check.logits(op, scores, "scores").detach()
        if self.n_classes is not None or scores.ndim != 1:
            self._same_classes(scores, self.n_classes or 1)
        grid = curves.check_thresholds(op, self.thresholds, scores.device, _check.work_dtype(scores))
        self._add(**curves.grid_counts(op, scores, target, grid)._asdict())

    def compute(self) -> curves.Curve:
        """Return the curves of all rows so far, as the function returns them."""
        counts = curves.GridCounts(*(self._state(name) for name in curves.GridCounts._fields))
        if self.average == "micro":
            counts = curves.GridCounts(*(c.sum(0, keepdim=True) for c in counts))
        curve = curves.curve_of(counts, self.grid, torch.get_default_dtype())
        if self.average == "micro" or self.n_classes is None:
            return curves.Curve(curve.precision[0], curve.recall[0], curve.threshold)
        return curve

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """Plot precision against recall.

        Args:
            val: A result of ``compute``; by default ``compute()``.
            ax: The matplotlib axes to draw on; by default new ones.

        Returns:
            The figure and its axes.
        """
        from torchmetrics.utilities.plot import plot_curve

        curve = self.compute() if val is None else val
        return plot_curve(
            (curve.recall, curve.precision, curve.threshold.expand_as(curve.recall)),
            ax=ax,
            label_names=("Recall", "Precision"),
            legend_name=self.plot_legend_name,
            name=type(self).__name__,
        )


class TuneRecall(Stream):
    """Streaming form of :func:`~lastlayer.tune_recall`: the threshold that promises a recall, from batches of rows.

    It keeps a histogram of the scores of true labels over all float32 numbers, in 8 MB for any number of rows and
    classes. The threshold lies between two bins, whose width is 1/2048 of the score or less, and keeps the promise
    exactly: the sets may be larger than those of the function by what falls into one bin.

    Args:
        recall: The recall to promise, above 0 and below 1.
        **options: Of ``torchmetrics.Metric``.

    Example:
        >>> metric = TuneRecall(0.6)
        >>> metric.update(torch.tensor([[0.9, 0.6, 0.1]]), torch.tensor([[0, 1]]))
        >>> metric.update(torch.tensor([[0.2, 0.8, 0.3], [0.3, 0.1, 0.7]]), torch.tensor([[1, -1], [0, 2]]))
        >>> print(f"{metric.compute():.3f}")
        0.600
    """

    higher_is_better = None
    plot_lower_bound = None
    plot_upper_bound = None
    recall: float

    def __init__(self, recall: float = 0.9, **options: Any) -> None:
        super().__init__(options, recall=_recall.check(type(self).__name__, recall))
        self._sum("weight", 1 << _recall.BITS)
        self._sum("rows")

    def update(self, scores: Tensor, target: Target) -> None:
        """Add held-out rows, as the function takes them."""
        labels = _recall.label_scores(type(self).__name__, scores, target)
        self._add(weight=_recall.histogram(labels), rows=labels.rows)

    def compute(self) -> Tensor:
        """Return the threshold of all rows so far."""
        return _recall.highest_binned(type(self).__name__, self._state("weight"), int(self._state("rows")), self.recall)
