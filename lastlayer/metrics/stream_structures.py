"""Streaming forms of the metrics on trees and graphs: torchmetrics classes whose states add up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lastlayer import _check
from lastlayer.metrics import _ranking, _sums, graph, tree
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
