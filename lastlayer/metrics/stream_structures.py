"""Streaming forms of the metrics on trees, graphs, rotations and label sets: torchmetrics classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lastlayer import _check
from lastlayer._check import Target
from lastlayer.metrics import _ranking, _sums, angle, errors, graph, tree
from lastlayer.metrics._stream import Stream
from lastlayer.metrics._sums import Empty, RowSums

if TYPE_CHECKING:
    from lastlayer.hierarchy import LabelTree


class _Rows(Stream):
    """A mean over rows (or images) at one or several cuts."""

    empty: Empty

    def __init__(self, options: dict[str, Any], n_cuts: int, **settings: Any) -> None:
        super().__init__(options, **settings)
        _check.choice(type(self).__name__, "empty", self.empty, ("skip", "zero", "one"))
        for name, shape in {"gain": (n_cuts,), "best": (n_cuts,), "full": (), "empty": ()}.items():
            self._sum(name, *shape)

    def _settled(self) -> Tensor:
        return _sums.settle_rows(RowSums(*(self._state(name) for name in RowSums._fields)), self.empty)


class TreeAccuracy(_Rows):
    """Streaming form of :func:`~lastlayer.metrics.tree_accuracy`, which documents the options.

    Example:
        >>> import lastlayer as ll
        >>> metric = TreeAccuracy(ll.LabelTree.from_parents([4, 4, 5, 5, 6, 6, -1]))
        >>> metric.update(torch.tensor([[4], [2]]), torch.tensor([1, 3]))
        >>> metric.compute()
        tensor(0.5000)
    """

    label_tree: LabelTree

    def __init__(self, label_tree: LabelTree, *, empty: Empty = "skip", **options: Any) -> None:
        super().__init__(options, 1, label_tree=label_tree, empty=empty)

    def update(self, index: Tensor, target: Target) -> None:
        """Add rows: chosen nodes and true classes."""
        self._add(**tree.accuracy_sums(type(self).__name__, index, target, self.label_tree)._asdict())

    def compute(self) -> Tensor:
        """Return the metric of all rows so far."""
        return self._settled().squeeze(0).to(torch.get_default_dtype())


class TreeSpecificity(_Rows):
    """Streaming form of :func:`~lastlayer.metrics.tree_specificity`, which documents the options."""

    label_tree: LabelTree
    hits_only: bool

    def __init__(self, label_tree: LabelTree, *, hits_only: bool = True, empty: Empty = "skip", **options: Any) -> None:
        super().__init__(options, 1, label_tree=label_tree, hits_only=hits_only, empty=empty)

    def update(self, index: Tensor, target: Target) -> None:
        """Add rows: chosen nodes and true classes."""
        sums = tree.specificity_sums(type(self).__name__, index, target, self.label_tree, self.hits_only)
        self._add(**sums._asdict())

    def compute(self) -> Tensor:
        """Return the metric of all rows so far."""
        return self._settled().squeeze(0).to(torch.get_default_dtype())


class GraphRecallAtK(_Rows):
    """Streaming form of :func:`~lastlayer.metrics.graph_recall_at_k`, which documents the options.

    Example:
        >>> metric = GraphRecallAtK([1, 2])
        >>> metric.update(torch.tensor([[0, 1, 0]]), torch.tensor([[0, 1, 0], [1, 0, 0]]))
        >>> metric.compute()
        tensor([0.5000, 0.5000])
    """

    k: int | Sequence[int]
    iou: float

    def __init__(self, k: int | Sequence[int], *, iou: float = 0.5, empty: Empty = "skip", **options: Any) -> None:
        self._begin(options, k, iou=iou, empty=empty)

    def _begin(self, options: dict[str, Any], k: int | Sequence[int], **settings: Any) -> None:
        cuts = _ranking.cuts(type(self).__name__, k, torch.Size(), torch.device("cpu"))
        _Rows.__init__(self, options, cuts.at.shape[-1], k=k, **settings)
        self.several = cuts.several

    def update(
        self,
        index: Tensor,
        target: Tensor,
        boxes: Tensor | None = None,
        labels: Tensor | None = None,
        target_boxes: Tensor | None = None,
        target_labels: Tensor | None = None,
    ) -> None:
        """Add images: predicted and true relations, and where and what their objects are."""
        places = (boxes, labels, target_boxes, target_labels)
        matches = graph.find(type(self).__name__, index, target, self.k, *places, self.iou)
        self._add(**graph.over_images(matches, matches.real)._asdict())

    def compute(self) -> Tensor:
        """Return the recall over all images so far."""
        value = self._settled().to(torch.get_default_dtype())
        return value if self.several else value.squeeze(0)


class GraphZeroShotRecallAtK(GraphRecallAtK):
    """Streaming form of :func:`~lastlayer.metrics.graph_zero_shot_recall_at_k`, which documents the options.

    Example:
        >>> metric = GraphZeroShotRecallAtK(1, torch.tensor([[3, 5, 0]]))
        >>> metric.update(torch.tensor([[1, 0, 0]]), torch.tensor([[0, 1, 0], [1, 0, 0]]), torch.tensor([3, 5]))
        >>> metric.compute()
        tensor(1.)
    """

    seen: Tensor

    def __init__(
        self, k: int | Sequence[int], seen: Tensor, *, iou: float = 0.5, empty: Empty = "skip", **options: Any
    ) -> None:
        self._begin(options, k, seen=graph.triplets(type(self).__name__, "seen", seen), iou=iou, empty=empty)

    def update(  # type: ignore[override]  # classes are needed here, and boxes are not
        self,
        index: Tensor,
        target: Tensor,
        labels: Tensor,
        boxes: Tensor | None = None,
        target_boxes: Tensor | None = None,
        target_labels: Tensor | None = None,
    ) -> None:
        """Add images: predicted and true relations, and what and where their objects are."""
        places = (boxes, labels, target_boxes, target_labels)
        matches, new = graph.find_new(type(self).__name__, index, target, self.k, self.seen, *places, self.iou)
        self._add(**graph.over_images(matches, new)._asdict())


class GraphMeanRecallAtK(Stream):
    """Streaming form of :func:`~lastlayer.metrics.graph_mean_recall_at_k`, which documents the options."""

    k: int | Sequence[int]
    n_predicates: int
    iou: float
    average: Literal["macro", "none"]
    empty: Empty

    def __init__(
        self,
        k: int | Sequence[int],
        n_predicates: int,
        *,
        iou: float = 0.5,
        average: Literal["macro", "none"] = "macro",
        empty: Empty = "skip",
        **options: Any,
    ) -> None:
        super().__init__(options, k=k, n_predicates=n_predicates, iou=iou, average=average, empty=empty)
        op = type(self).__name__
        _check.choice(op, "average", average, ("macro", "none"))
        _check.choice(op, "empty", empty, ("skip", "zero", "one"))
        cuts = _ranking.cuts(op, k, torch.Size(), torch.device("cpu"))
        self.several = cuts.several
        self._sum("recall", cuts.at.shape[-1], n_predicates)
        self._sum("images", n_predicates)

    def update(
        self,
        index: Tensor,
        target: Tensor,
        boxes: Tensor | None = None,
        labels: Tensor | None = None,
        target_boxes: Tensor | None = None,
        target_labels: Tensor | None = None,
    ) -> None:
        """Add images: predicted and true relations, and where and what their objects are."""
        places = (boxes, labels, target_boxes, target_labels)
        matches = graph.find(type(self).__name__, index, target, self.k, *places, self.iou)
        recall, images = graph.over_predicates(matches, self.n_predicates)
        self._add(recall=recall, images=images)

    def compute(self) -> Tensor:
        """Return the mean recall over all images so far."""
        recall, images = self._state("recall"), self._state("images")
        value = _sums.settle_groups(recall / images.clamp(min=1), images, self.average, self.empty)
        value = value.to(torch.get_default_dtype())
        return value if self.several else value.squeeze(0)


class RotationError(Stream):
    """Streaming form of :func:`~lastlayer.metrics.rotation_error`: the mean or the median angle.

    The mean keeps two numbers. The median keeps one number per rotation and is exact; with `bins` it counts angles
    in that many bins of equal width on [0, pi] and is right to half a bin, however many rotations there are; an angle
    of nan counts as pi there. For the share of rotations within an angle, average ``rotation_error(a, b) < limit``.

    Args:
        reduction: ``"mean"`` or ``"median"``.
        degrees: Whether the angle is in degrees.
        bins: None, or the number of bins for the median.
        **options: Of ``torchmetrics.Metric``.

    Example:
        >>> metric = RotationError(degrees=True)
        >>> metric.update(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), torch.tensor([[1.0, 1.0, 0.0, 0.0]]))
        >>> metric.update(torch.eye(3)[None], torch.eye(3)[None])
        >>> metric.compute()
        tensor(45.)
    """

    higher_is_better = False
    plot_upper_bound = None
    function: Callable[..., Tensor] = staticmethod(angle.rotation_error)
    reduction: Literal["mean", "median"]
    degrees: bool
    bins: int | None

    def __init__(
        self,
        reduction: Literal["mean", "median"] = "median",
        *,
        degrees: bool = False,
        bins: int | None = None,
        **options: Any,
    ) -> None:
        bins = _check.plain(bins)
        super().__init__(options, reduction=reduction, degrees=degrees, bins=bins)
        op = type(self).__name__
        _check.choice(op, "reduction", reduction, ("mean", "median"))
        if bins is not None and (reduction == "mean" or isinstance(bins, bool) or not isinstance(bins, int)):
            raise TypeError(f"{op}: `bins` must be None, or a whole number for the median, got {bins!r}.")
        if bins is not None and bins < 1:
            raise ValueError(f"{op}: `bins` must be at least 1, got {bins}. 1800 bins are 0.1 degrees wide.")
        if reduction == "mean":
            self._sum("total")
            self._sum("count")
        elif bins is None:
            self._list("angles")
        else:
            self._sum("counts", bins)

    def update(self, prediction: Tensor, target: Tensor) -> None:
        """Add rotations, as the function takes them."""
        matches = type(self).function(prediction, target).flatten()
        if self.reduction == "mean":
            self._add(total=matches.double().sum(), count=torch.tensor(len(matches), device=matches.device))
        elif self.bins is None:
            self._state("angles").append(matches)
        else:
            place = (matches.nan_to_num(math.pi) * (self.bins / math.pi)).long().clamp(max=self.bins - 1)
            self._add(counts=torch.bincount(place, minlength=self.bins))

    def compute(self) -> Tensor:
        """Return the mean or median of all rotations so far; 0 for none."""
        if self.reduction == "mean":
            value = self._state("total") / self._state("count").clamp(min=1)
        elif self.bins is not None:
            value = self._binned(self._state("counts"), self.bins)
        else:
            some = len(self._state("angles")) > 0
            value = angle.median(self._joined("angles")) if some else torch.zeros((), device=self.device)
        return (torch.rad2deg(value) if self.degrees else value).to(torch.get_default_dtype())

    @staticmethod
    def _binned(counts: Tensor, bins: int) -> Tensor:
        """The mean of the middles of the bins that hold the two middle angles."""
        total = counts.sum()
        ranks = torch.stack([((total - 1) / 2).floor(), (total / 2).floor()]) + 1
        place = torch.searchsorted(counts.cumsum(0), ranks)
        return torch.where(total > 0, (place + 0.5).mean() * (math.pi / bins), 0)


class AngularError(RotationError):
    """Streaming form of :func:`~lastlayer.metrics.angular_error`, with the options of :class:`RotationError`."""

    function: Callable[..., Tensor] = staticmethod(angle.angular_error)


class LabelSetErrorsMetric(Stream):
    """Streaming form of :func:`~lastlayer.metrics.label_set_errors`, which documents the options.

    The best threshold of a class compares all rows, so all scores are kept, with one byte each for the label and the
    prediction: with very many classes, give it a sample of the rows. The result is a dictionary of numbers: the value
    of the metric and the gain of each kind of error. :meth:`analysis` is the whole analysis, over all processes.

    Example:
        >>> metric = LabelSetErrorsMetric()
        >>> metric.update(torch.tensor([[0.9, 0.8, 0.1]]), torch.tensor([[1.0, 0.0, 0.0]]))
        >>> metric.update(torch.tensor([[0.2, 0.7, 0.1]]), torch.tensor([[1.0, 0.0, 0.0]]))
        >>> {name: round(value.item(), 4) for name, value in metric.compute().items() if value}
        {'value': 0.3333, 'confusion': 0.5, 'count': 0.1667}
        >>> metric.analysis().n_misses
        1
    """

    plot_lower_bound = None
    plot_upper_bound = None
    k: int | None
    threshold: float | Tensor
    tree: LabelTree | None
    metric: errors.Metric | Callable[[Tensor, Tensor, Tensor], float]
    names: Sequence[str] | None
    top: int

    def __init__(
        self,
        k: int | None = None,
        *,
        threshold: float | Tensor = 0.5,
        tree: LabelTree | None = None,
        metric: errors.Metric | Callable[[Tensor, Tensor, Tensor], float] = "f1",
        names: Sequence[str] | None = None,
        top: int = 20,
        **options: Any,
    ) -> None:
        settings = {"k": k, "threshold": threshold, "tree": tree, "metric": metric, "names": names, "top": top}
        super().__init__(options, **settings)
        errors.check_metric(type(self).__name__, metric)
        for name in ("scores", "target", "said"):
            self._list(name)

    def update(self, scores: Tensor, target: Target, predicted: Tensor | None = None) -> None:
        """Add rows: scores and target, and the predictions as index lists where they are not made from the scores."""
        k = self.k if predicted is None else None
        sets = errors.label_sets(type(self).__name__, scores, target, k, self.threshold, predicted)
        self._state("scores").append(sets.scores)
        self._state("target").append(torch.where(sets.known, sets.true.to(torch.int8), -1))
        self._state("said").append(sets.said.to(torch.uint8))

    def compute(self) -> dict[str, Tensor]:
        """Return the value of the metric and the gain of each kind, of all rows so far; empty before any row."""
        if not len(self._state("scores")):
            return {}
        counts = self._found()
        numbers = {"value": counts.value, **{kind.name: kind.gain for kind in counts.kinds}}
        return {name: torch.tensor(number, device=self.device) for name, number in numbers.items()}

    def analysis(self) -> errors.LabelSetErrors:
        """Return the analysis of the rows of all processes so far; every process must call it."""
        with self.sync_context(dist_sync_fn=self.dist_sync_fn):
            found = self._found() if len(self._state("scores")) else None
        if found is None:
            raise ValueError(f"{type(self).__name__}: `analysis` must be called after `update`, got no rows.")
        return found

    def _found(self) -> errors.LabelSetErrors:
        scores, target, said = (self._joined(name) for name in ("scores", "target", "said"))
        sets = errors.LabelSets(scores, target > 0, target >= 0, said > 0)
        return errors.analysed(type(self).__name__, sets, self.tree, self.metric, self.names, self.top)
