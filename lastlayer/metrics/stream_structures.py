"""Streaming forms of the metrics on trees, graphs, rotations and label sets: torchmetrics classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torchmetrics.utilities import dim_zero_cat

from lastlayer import _check
from lastlayer.metrics import _ranking, _sums, angle, errors, graph, tree
from lastlayer.metrics._sums import Empty, RowSums
from lastlayer.metrics.stream import _Stream

if TYPE_CHECKING:
    from lastlayer.hierarchy import LabelTree


class _Rows(_Stream):
    """A mean over rows (or images) at one or several cuts."""

    gain: Tensor
    best: Tensor
    full: Tensor
    without: Tensor

    def __init__(self, n_cuts: int, empty: Empty, options: dict[str, Any]) -> None:
        super().__init__(**options)
        self.empty: Empty = _check.choice(type(self).__name__, "empty", empty, ("skip", "zero", "one"))
        self._sum("gain", n_cuts)
        self._sum("best", n_cuts)
        self._sum("full")
        self._sum("without")

    def _add_rows(self, sums: RowSums) -> None:
        self._add(gain=sums.gain, best=sums.best, full=sums.full, without=sums.empty)

    def _settled(self) -> Tensor:
        return _sums.settle_rows(RowSums(self.gain, self.best, self.full, self.without), self.empty)


class TreeAccuracy(_Rows):
    """Streaming form of :func:`~lastlayer.tree_accuracy`, which documents the options.

    Example:
        >>> import lastlayer as ll
        >>> metric = TreeAccuracy(ll.LabelTree.from_parents([4, 4, 5, 5, 6, 6, -1]))
        >>> metric.update(torch.tensor([[4], [2]]), torch.tensor([1, 3]))
        >>> metric.compute()
        tensor(0.5000)
    """

    def __init__(self, label_tree: LabelTree, *, empty: Empty = "skip", **options: Any) -> None:
        super().__init__(1, empty, options)
        self.label_tree = label_tree

    def update(self, index: Tensor, target: Tensor) -> None:
        """Add rows: chosen nodes and true classes."""
        self._add_rows(tree.accuracy_sums(type(self).__name__, index, target, self.label_tree))

    def compute(self) -> Tensor:
        """The metric of all rows so far."""
        return self._settled().squeeze(0).to(torch.get_default_dtype())


class TreeSpecificity(TreeAccuracy):
    """Streaming form of :func:`~lastlayer.tree_specificity`, which documents the options."""

    def __init__(self, label_tree: LabelTree, *, hits_only: bool = True, empty: Empty = "skip", **options: Any) -> None:
        super().__init__(label_tree, empty=empty, **options)
        self.hits_only = hits_only

    def update(self, index: Tensor, target: Tensor) -> None:
        """Add rows: chosen nodes and true classes."""
        sums = tree.specificity_sums(type(self).__name__, index, target, self.label_tree, self.hits_only)
        self._add_rows(sums)


class GraphRecallAtK(_Rows):
    """Streaming form of :func:`~lastlayer.graph_recall_at_k`, which documents the options.

    Example:
        >>> metric = GraphRecallAtK([1, 2])
        >>> metric.update(torch.tensor([[0, 1, 0]]), torch.tensor([[0, 1, 0], [1, 0, 0]]))
        >>> metric.compute()
        tensor([0.5000, 0.5000])
    """

    def __init__(self, k: int | Sequence[int], *, iou: float = 0.5, empty: Empty = "skip", **options: Any) -> None:
        cuts = _ranking.cuts(type(self).__name__, k, torch.Size(), torch.device("cpu"))
        super().__init__(cuts.at.shape[-1], empty, options)
        self.k, self.iou, self.several = k, iou, cuts.several

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
        found = graph.find(type(self).__name__, index, target, self.k, *places, self.iou)
        self._add_rows(graph.over_images(found, found.real))

    def compute(self) -> Tensor:
        """The recall over all images so far."""
        value = self._settled().to(torch.get_default_dtype())
        return value if self.several else value.squeeze(0)


class GraphZeroShotRecallAtK(GraphRecallAtK):
    """Streaming form of :func:`~lastlayer.graph_zero_shot_recall_at_k`, which documents the options.

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
        super().__init__(k, iou=iou, empty=empty, **options)
        self.register_buffer("seen", graph.triplets(type(self).__name__, "seen", seen), persistent=False)

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
        found, new = graph.find_new(type(self).__name__, index, target, self.k, self.seen, *places, self.iou)
        self._add_rows(graph.over_images(found, new))


class GraphMeanRecallAtK(_Stream):
    """Streaming form of :func:`~lastlayer.graph_mean_recall_at_k`, which documents the options."""

    recall: Tensor
    images: Tensor

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
        super().__init__(**options)
        op = type(self).__name__
        _check.choice(op, "average", average, ("macro", "none"))
        _check.choice(op, "empty", empty, ("skip", "zero", "one"))
        cuts = _ranking.cuts(op, k, torch.Size(), torch.device("cpu"))
        self.k, self.n_predicates, self.iou, self.average, self.empty = k, n_predicates, iou, average, empty
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
        found = graph.find(type(self).__name__, index, target, self.k, *places, self.iou)
        recall, images = graph.over_predicates(found, self.n_predicates)
        self._add(recall=recall, images=images)

    def compute(self) -> Tensor:
        """The mean recall over all images so far."""
        value = _sums.settle_groups(self.recall / self.images.clamp(min=1), self.images, self.average, self.empty)
        value = value.to(torch.get_default_dtype())
        return value if self.several else value.squeeze(0)


class RotationError(_Stream):
    """Streaming form of :func:`~lastlayer.rotation_error`: the mean or the median angle.

    The mean keeps two numbers. The median keeps one number a rotation and is exact; with `bins` it counts angles in
    that many bins of equal width on [0, pi] and is right to half a bin, whatever the number of rotations. For the share
    within an angle average ``rotation_error(a, b) < limit``.

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
    function: Callable[..., Tensor] = staticmethod(angle.rotation_error)
    angles: list[Tensor]
    total: Tensor
    count: Tensor
    counts: Tensor

    def __init__(
        self,
        reduction: Literal["mean", "median"] = "median",
        *,
        degrees: bool = False,
        bins: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        op = type(self).__name__
        _check.choice(op, "reduction", reduction, ("mean", "median"))
        if bins is not None and (reduction == "mean" or isinstance(bins, bool) or not isinstance(bins, int)):
            raise TypeError(f"{op}: `bins` must be None, or a whole number for the median, got {bins!r}.")
        if bins is not None and bins < 1:
            raise ValueError(f"{op}: `bins` must be at least 1, got {bins}. 1800 are a tenth of a degree each.")
        self.reduction, self.degrees, self.bins = reduction, degrees, bins
        if reduction == "mean":
            self._sum("total")
            self._sum("count")
        elif bins is None:
            self.add_state("angles", [], dist_reduce_fx="cat")
        else:
            self._sum("counts", bins)

    def update(self, prediction: Tensor, target: Tensor) -> None:
        """Add rotations, as the function takes them."""
        found = type(self).function(prediction, target).flatten()
        if self.reduction == "mean":
            self._add(total=found.double().sum(), count=torch.tensor(len(found), device=found.device))
        elif self.bins is None:
            self.angles.append(found)
        else:
            place = (found * (self.bins / math.pi)).long().clamp(max=self.bins - 1)
            self._add(counts=torch.bincount(place, minlength=self.bins))

    def compute(self) -> Tensor:
        """The mean or median of all rotations so far; 0 for none."""
        if self.reduction == "mean":
            value = self.total / self.count.clamp(min=1)
        elif self.bins is not None:
            value = self._binned()
        else:
            value = angle.median(dim_zero_cat(self.angles)) if len(self.angles) else torch.zeros((), device=self.device)
        return (torch.rad2deg(value) if self.degrees else value).to(torch.get_default_dtype())

    def _binned(self) -> Tensor:
        """The mean of the middles of the bins that hold the two middle angles."""
        assert self.bins is not None
        total = self.counts.sum()
        ranks = torch.stack([((total - 1) / 2).floor(), (total / 2).floor()]) + 1
        place = torch.searchsorted(self.counts.cumsum(0), ranks)
        return torch.where(total > 0, (place + 0.5).mean() * (math.pi / self.bins), 0)


class AngularError(RotationError):
    """Streaming form of :func:`~lastlayer.angular_error`, with the options of :class:`RotationError`."""

    function: Callable[..., Tensor] = staticmethod(angle.angular_error)


class LabelSetErrorsMetric(_Stream):
    """Streaming form of :func:`~lastlayer.label_set_errors`, which documents the options.

    The best threshold of a class compares all rows, so all scores are kept, with the labels and the predictions in a
    byte each: for very many classes give a sample of the rows. The result is a dictionary of numbers, the value of the
    metric and the gain of each kind of error; :meth:`analysis` is the whole analysis, over all processes.

    Example:
        >>> metric = LabelSetErrorsMetric()
        >>> metric.update(torch.tensor([[0.9, 0.8, 0.1]]), torch.tensor([[1, 0, 0]]))
        >>> metric.update(torch.tensor([[0.2, 0.7, 0.1]]), torch.tensor([[1, 0, 0]]))
        >>> {name: round(value.item(), 4) for name, value in metric.compute().items() if value}
        {'value': 0.3333, 'confusion': 0.5, 'count': 0.1667}
        >>> metric.analysis().n_misses
        1
    """

    scores: list[Tensor]
    target: list[Tensor]
    said: list[Tensor]

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
        super().__init__(**options)
        errors.check_metric(type(self).__name__, metric)
        self.k, self.tree, self.metric, self.names, self.top = k, tree, metric, names, top
        self.threshold: float | Tensor = threshold
        for name in ("scores", "target", "said"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, scores: Tensor, target: Tensor, predicted: Tensor | None = None) -> None:
        """Add rows: scores and target, and the predictions as index lists where they are not made from the scores."""
        k = self.k if predicted is None else None
        sets = errors.label_sets(type(self).__name__, scores, target, k, self.threshold, predicted)
        self.scores.append(sets.scores)
        self.target.append(torch.where(sets.known, sets.true.to(torch.int8), -1))
        self.said.append(sets.said.to(torch.uint8))

    def compute(self) -> dict[str, Tensor]:
        """The value of the metric and the gain of each kind, of all rows so far; empty before any row."""
        if not len(self.scores):
            return {}
        found = self._found()
        numbers = {"value": found.value, **{kind.name: kind.gain for kind in found.kinds}}
        return {name: torch.tensor(number, device=self.device) for name, number in numbers.items()}

    def analysis(self) -> errors.LabelSetErrors:
        """The analysis of the rows of all processes so far; every process must call it."""
        if not len(self.scores):
            raise ValueError(f"{type(self).__name__}: `analysis` must be called after `update`, got no rows.")
        with self.sync_context(dist_sync_fn=self.dist_sync_fn):
            return self._found()

    def _found(self) -> errors.LabelSetErrors:
        target = dim_zero_cat(self.target)
        sets = errors.LabelSets(dim_zero_cat(self.scores), target > 0, target >= 0, dim_zero_cat(self.said) > 0)
        return errors.analysed(type(self).__name__, sets, self.tree, self.metric, self.names, self.top)
