"""Streaming forms of the metrics: torchmetrics classes whose states add up over batches and processes.

Each class takes the options of its function, and the options of ``torchmetrics.Metric`` besides. Sums are kept in
float64. Under DDP each process updates with its own rows. Memory does not grow with the number of rows, except for
`MeanAveragePrecision` and `AUROC` with ``thresholds=None``, which keep all scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lastlayer import _check
from lastlayer._check import Target
from lastlayer.metrics import _ranking, _sums, at_k, openset
from lastlayer.metrics import average_precision as ap
from lastlayer.metrics import calibration as cal
from lastlayer.metrics._problems import Per
from lastlayer.metrics._ranking import Gain
from lastlayer.metrics._stream import Stream
from lastlayer.metrics._sums import Average, Empty, Kind

RankedAverage = Literal["macro", "micro", "weighted", "none"]


class _AtK(Stream):
    """A metric at k: sums over rows, or counts per class."""

    kind: ClassVar[Kind]
    more: ClassVar[tuple[str, ...]] = ()  # settings that only this metric has
    k: int | Sequence[int]
    average: Average
    empty: Empty
    n_classes: int | None

    def __init__(self, options: dict[str, Any], k: Any, average: Average, empty: Empty, **settings: Any) -> None:
        given = {"k": k, "average": average, "empty": empty, "n_classes": None}
        super().__init__(options, **given | settings)
        op = type(self).__name__
        at_k.check_options(op, average, empty)
        if isinstance(k, Tensor):
            raise TypeError(f"{op}: `k` must be a number or a list of numbers, got a tensor. Use the function instead.")
        if average != "samples" and self.n_classes is None:
            raise ValueError(f"{op}: `n_classes` must be given with average={average!r}, got None.")
        self.several = _ranking.cuts(op, k, torch.Size(), torch.device("cpu")).several
        q = len(k) if self.several else 1
        if average == "samples":
            shapes: dict[str, tuple[int, ...]] = {"gain": (q,), "best": (q,), "full": (), "empty": ()}
        else:
            assert self.n_classes is not None
            shapes = {"hits": (q, self.n_classes), "predicted": (q, self.n_classes), "labels": (self.n_classes,)}
        for name, shape in shapes.items():
            self._sum(name, *shape)

    def update(self, scores: Tensor, target: Target, indices: Tensor | None = None) -> None:
        """Add rows: scores and target (and decoded lists) as the function takes them."""
        if self.average != "samples":
            self._check_classes(scores, target, indices)
        sums, _ = at_k.gather_sums(
            type(self).__name__,
            self.kind,
            scores,
            target,
            self.k,
            self.average,
            indices,
            n_classes=self.n_classes,
            **{name: getattr(self, name) for name in self.more},
        )
        self._add(**sums._asdict())

    def _check_classes(self, scores: Tensor, target: Target, indices: Tensor | None) -> None:
        assert self.n_classes is not None
        if indices is None:
            self._same_classes(scores, self.n_classes)
            return
        op, rule = type(self).__name__, "classes below n_classes"
        for name, value in (("indices", indices), ("target", target)):
            value = value.index if isinstance(value, _check.LabelLists) else value
            if isinstance(value, Tensor):
                _check.below(op, name, value, self.n_classes, rule, "Classes count from 0.")

    def compute(self) -> Tensor:
        """Return the metric of all rows so far, as the function returns it."""
        form = _sums.RowSums if self.average == "samples" else _sums.LabelCounts
        sums = form(*(self._state(name) for name in form._fields))
        result = at_k.settle(self.kind, sums, self.average, self.empty)
        return (result if self.several else result.squeeze(0)).to(torch.get_default_dtype())


class PrecisionAtK(_AtK):
    """Streaming form of :func:`~lastlayer.precision_at_k`, which documents the options.

    Averages over classes need `n_classes`.

    Example:
        >>> metric = PrecisionAtK(2)
        >>> metric.update(torch.tensor([[0.9, 0.8, 0.1]]), torch.tensor([[1.0, 0.0, 0.0]]))
        >>> metric.update(torch.tensor([[0.9, 0.8, 0.1]]), torch.tensor([[0, 1]]))
        >>> metric.compute()
        tensor(0.7500)
    """

    kind: ClassVar[Kind] = "precision"

    def __init__(
        self,
        k: int | Sequence[int],
        *,
        average: Average = "samples",
        empty: Empty = "skip",
        n_classes: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(options, k, average, empty, n_classes=n_classes)


class RecallAtK(PrecisionAtK):
    """Streaming form of :func:`~lastlayer.recall_at_k`; averages over classes need `n_classes`."""

    kind: ClassVar[Kind] = "recall"


class F1AtK(PrecisionAtK):
    """Streaming form of :func:`~lastlayer.metrics.f1_at_k`; averages over classes need `n_classes`."""

    kind: ClassVar[Kind] = "f1"


class RPrecisionAtK(_AtK):
    """Streaming form of :func:`~lastlayer.metrics.r_precision_at_k`."""

    kind: ClassVar[Kind] = "r_precision"

    def __init__(self, k: int | Sequence[int], *, empty: Empty = "skip", **options: Any) -> None:
        super().__init__(options, k, "samples", empty)


class NDCGAtK(_AtK):
    """Streaming form of :func:`~lastlayer.ndcg_at_k`."""

    kind: ClassVar[Kind] = "ndcg"
    more = ("gain",)

    def __init__(self, k: int | Sequence[int], *, empty: Empty = "skip", gain: Gain = "binary", **options: Any) -> None:
        super().__init__(options, k, "samples", empty, gain=gain)
        _check.choice(type(self).__name__, "gain", gain, at_k.GAINS)


class FallOutAtK(_AtK):
    """Streaming form of :func:`~lastlayer.metrics.fall_out_at_k`; decoded lists need `n_classes`."""

    higher_is_better = False
    kind: ClassVar[Kind] = "fall_out"

    def __init__(
        self, k: int | Sequence[int], *, empty: Empty = "skip", n_classes: int | None = None, **options: Any
    ) -> None:
        super().__init__(options, k, "samples", empty, n_classes=n_classes)

    def update(self, scores: Tensor, target: Target, indices: Tensor | None = None) -> None:
        """Add rows: scores and target (and decoded lists) as the function takes them."""
        if indices is not None:
            at_k.check_n_classes(type(self).__name__, indices, self.n_classes)
        super().update(scores, target, indices)


class TopKAccuracy(_AtK):
    """Streaming form of :func:`~lastlayer.metrics.top_k_accuracy`."""

    kind: ClassVar[Kind] = "accuracy"

    def __init__(self, k: int | Sequence[int] = 1, *, empty: Empty = "skip", **options: Any) -> None:
        super().__init__(options, k, "samples", empty)


class PSPAtK(_AtK):
    """Streaming form of :func:`~lastlayer.metrics.psp_at_k`."""

    kind: ClassVar[Kind] = "psp"
    more = ("propensities",)
    propensities: Tensor | None

    def __init__(
        self,
        k: int | Sequence[int],
        propensities: Tensor | None = None,
        *,
        empty: Empty = "skip",
        **options: Any,
    ) -> None:
        super().__init__(options, k, "samples", empty, propensities=propensities)


class _Ranked(Stream):
    """A metric of rankings over rows: all scores in lists, or counts in bins of [0, 1]."""

    average: RankedAverage
    empty: Empty
    thresholds: int | None
    n_classes: int | None

    def __init__(self, options: dict[str, Any], binned: bool, **settings: Any) -> None:
        super().__init__(options, **{**settings, "thresholds": _check.plain(settings["thresholds"])})
        op, bins = type(self).__name__, self.thresholds
        _check.choice(op, "average", self.average, ("macro", "micro", "weighted", "none"))
        _check.choice(op, "empty", self.empty, ("skip", "zero", "one"))
        if bins is not None and (isinstance(bins, bool) or not isinstance(bins, int) or bins < 2):
            raise ValueError(f"{op}: `thresholds` must be None or a whole number of at least 2, got {bins!r}.")
        if not binned:
            self._list("scores")
            self._list("target")
            return
        assert bins is not None
        self._sum("positive", self.n_classes or 1, bins)
        self._sum("total", self.n_classes or 1, bins)

    def _keep(self, scores: Tensor, target: Target, items: bool = False) -> None:
        """Store rows of scores, or `items` of one problem, and a dense target: batches may differ in shape and form."""
        op = type(self).__name__
        scores = _check.logits(op, scores, "scores").detach()
        labels = _check.target(op, target, scores)
        if not items:
            scores, labels = _ranking.matrix(scores), _ranking.flat(labels)
        known = labels.known()
        dense = labels.positive().to(torch.int8)
        self._state("scores").append(scores)
        self._state("target").append(dense if known is None else torch.where(known, dense, -1))

    def _count(self, scores: Tensor, target: Target) -> None:
        assert self.thresholds is not None
        self._same_classes(scores, self.n_classes or 1)
        sums = cal.bin_sums(type(self).__name__, scores, target, None, self.thresholds, "class")
        self._add(positive=sums.right, total=sums.pairs)

    def _binned(self) -> tuple[Tensor, Tensor]:
        positive, total = self._state("positive"), self._state("total")
        if self.average == "micro":
            return positive.sum(0, keepdim=True), total.sum(0, keepdim=True)
        return positive, total

    def _settled(self, value: Tensor, count: Tensor) -> Tensor:
        average = "macro" if self.average == "micro" else self.average
        return _sums.settle_groups(value, count, average, self.empty).to(torch.get_default_dtype())


class MeanAveragePrecision(_Ranked):
    """Streaming form of :func:`~lastlayer.metrics.mean_average_precision`.

    ``per="sample"`` keeps three numbers and is exact. ``per="class"`` must compare rows of different batches: with
    ``thresholds=None`` it keeps all scores and is exact; with a number it counts in that many bins of equal width on
    [0, 1], needs `n_classes` and probabilities as scores, and takes ``16 * n_classes * thresholds`` bytes, however
    many rows there are. Scores in the same bin then count as equal.

    Args:
        per: ``"class"`` or ``"sample"``.
        average: As in the function; for ``per="sample"`` only ``"macro"``.
        empty: What a class (a row) without positives counts as.
        thresholds: None, or the number of bins.
        n_classes: The number of classes, needed with `thresholds`.
        **options: Of ``torchmetrics.Metric``.

    Example:
        >>> metric = MeanAveragePrecision(thresholds=100, n_classes=2)
        >>> metric.update(torch.tensor([[0.9, 0.2], [0.8, 0.7]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        >>> metric.update(torch.tensor([[0.1, 0.3]]), torch.tensor([[1.0, 1.0]]))
        >>> metric.compute()
        tensor(0.9167)
    """

    per: Per

    def __init__(
        self,
        *,
        per: Per = "class",
        average: RankedAverage = "macro",
        empty: Empty = "skip",
        thresholds: int | None = None,
        n_classes: int | None = None,
        **options: Any,
    ) -> None:
        op = type(self).__name__
        _check.choice(op, "per", per, ("class", "sample"))
        if per == "class" and thresholds is not None and n_classes is None:
            raise ValueError(f"{op}: `n_classes` must be given with `thresholds`, got None.")
        if per == "sample" and average != "macro":
            raise ValueError(f"{op}: `average` must be 'macro' with per='sample', got {average!r}.")
        settings = {"per": per, "average": average, "empty": empty, "thresholds": thresholds, "n_classes": n_classes}
        super().__init__(options, per == "class" and thresholds is not None, **settings)
        if per == "sample":
            for name in ("gain", "full", "rows"):
                self._sum(name)

    def update(self, scores: Tensor, target: Target) -> None:
        """Add rows."""
        if self.per == "sample":
            value, count = ap.average_precisions(type(self).__name__, scores, target, "sample")
            self._add(gain=value.sum(), full=(count > 0).sum(), rows=torch.tensor(len(value), device=value.device))
        elif self.thresholds is None:
            self._keep(scores, target)
        else:
            self._count(scores, target)

    def compute(self) -> Tensor:
        """Return the metric of all rows so far, as the function returns it."""
        if self.per == "sample":
            gain, full, rows = (self._state(name) for name in ("gain", "full", "rows"))
            sums = _sums.RowSums(gain, full, full, rows - full)
            return _sums.settle_rows(sums, self.empty).to(torch.get_default_dtype())
        if self.thresholds is None:
            if not len(self._state("scores")):
                return torch.zeros((), device=self.device)
            scores, target = self._joined("scores"), self._joined("target")
            return ap.mean_average_precision(scores, target, average=self.average, empty=self.empty)
        positive, total = self._binned()
        return self._settled(ap.binned_average_precision(positive, total), positive.sum(-1))


class AUROC(_Ranked):
    """Streaming form of :func:`~lastlayer.metrics.auroc`, over the rows.

    With ``thresholds=None`` it keeps all scores and is exact; with a number it counts in that many bins of equal width
    on [0, 1], needs probabilities as scores, and takes ``16 * n_classes * thresholds`` bytes. Scores in the same bin
    then count as equal.

    Args:
        average: As in the function.
        empty: What a class without positives or without negatives counts as.
        thresholds: None, or the number of bins.
        n_classes: The number of classes, or None for one-dimensional scores.
        **options: Of ``torchmetrics.Metric``.

    Example:
        >>> metric = AUROC()
        >>> metric.update(torch.tensor([0.9, 0.6]), torch.tensor([1.0, 1.0]))
        >>> metric.update(torch.tensor([0.4, 0.7]), torch.tensor([0.0, 0.0]))
        >>> metric.compute()
        tensor(0.7500)
    """

    def __init__(
        self,
        *,
        average: RankedAverage = "macro",
        empty: Empty = "skip",
        thresholds: int | None = None,
        n_classes: int | None = None,
        **options: Any,
    ) -> None:
        settings = {"average": average, "empty": empty, "thresholds": thresholds, "n_classes": n_classes}
        super().__init__(options, thresholds is not None, **settings)

    def update(self, scores: Tensor, target: Target) -> None:
        """Add rows."""
        single = isinstance(scores, Tensor) and scores.ndim == 1
        if single or (isinstance(scores, Tensor) and self.thresholds is not None and self.n_classes is None):
            target = openset.items(type(self).__name__, scores, target)
            if self.thresholds is not None:
                scores, target = scores.reshape(-1, 1), target.reshape(-1, 1)
        if self.thresholds is None:
            self._keep(scores, target, items=single)
        else:
            self._count(scores, target)

    def compute(self) -> Tensor:
        """Return the metric of all rows so far, as the function returns it."""
        if self.thresholds is None:
            if not len(self._state("scores")):
                return torch.zeros((), device=self.device)
            scores, target = self._joined("scores"), self._joined("target")
            return openset.auroc(scores, target, average=self.average, empty=self.empty)
        return self._settled(*openset.binned_area(*self._binned()))


class LabelCalibrationError(Stream):
    """Streaming form of :func:`~lastlayer.metrics.label_calibration_error`; :meth:`bins` is the diagram so far.

    ``per="class"`` needs `n_classes`.

    Example:
        >>> metric = LabelCalibrationError(k=1, n_bins=10)
        >>> metric.update(torch.tensor([[0.9, 0.7], [0.8, 0.6]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
        >>> metric.compute()
        tensor(0.1500)
    """

    higher_is_better = False
    k: int | None
    n_bins: int
    per: cal.PerPair
    norm: cal.Norm
    n_classes: int | None

    def __init__(
        self,
        k: int | None = None,
        *,
        n_bins: int = 10,
        per: cal.PerPair = "all",
        norm: cal.Norm = "l1",
        n_classes: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(options, k=k, n_bins=n_bins, per=per, norm=norm, n_classes=n_classes)
        op = type(self).__name__
        _check.choice(op, "norm", norm, ("l1", "l2", "max"))
        _check.choice(op, "per", per, ("all", "class"), cal.OLD)
        if per == "class" and n_classes is None:
            raise ValueError(f"{op}: `n_classes` must be given with per='class', got None.")
        for name in cal.BinSums._fields:
            self._sum(name, (n_classes or 1) if per == "class" else 1, n_bins)

    def update(self, scores: Tensor, target: Target) -> None:
        """Add rows."""
        if self.per == "class":
            self._same_classes(scores, self.n_classes or 1)
        sums = cal.bin_sums(type(self).__name__, scores, target, self.k, self.n_bins, self.per)
        self._add(**sums._asdict())

    def compute(self) -> Tensor:
        """Return the error of all rows so far."""
        return cal.calibration_error(self._sums(), self.norm).to(torch.get_default_dtype())

    def bins(self) -> cal.ReliabilityBins:
        """Return the reliability diagram of the rows that this process has seen."""
        sums = self._sums()
        return cal.diagram(
            sums if self.per == "class" else cal.BinSums(*(s[0] for s in sums)), torch.get_default_dtype()
        )

    def _sums(self) -> cal.BinSums:
        return cal.BinSums(*(self._state(name) for name in cal.BinSums._fields))


class MeanMaxConfidence(Stream):
    """Streaming form of :func:`~lastlayer.metrics.mean_max_confidence`."""

    higher_is_better = None

    def __init__(self, **options: Any) -> None:
        super().__init__(options)
        self._sum("peak")
        self._sum("rows")

    def update(self, scores: Tensor, target: Target | None = None) -> None:
        """Add rows; `target` is not used, and is there for collections, which pass the same arguments to all."""
        del target
        scores = _check.logits(type(self).__name__, scores, "scores")
        rows = torch.tensor(scores[..., :1].numel(), device=scores.device)
        self._add(peak=openset.mean_max_confidence(scores).double() * rows, rows=rows)

    def compute(self) -> Tensor:
        """Return the mean over all rows so far."""
        mean: Tensor = (self._state("peak") / self._state("rows").clamp(min=1)).to(torch.get_default_dtype())
        return mean
