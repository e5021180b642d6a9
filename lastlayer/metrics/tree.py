"""How often a chosen node is right, and how much it says (after the thesis' equations 5.8 to 5.10)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lastlayer import _check
from lastlayer._check import Target
from lastlayer.metrics import _sums
from lastlayer.metrics._sums import Empty, RowSums

if TYPE_CHECKING:
    from lastlayer.hierarchy import LabelTree


def tree_accuracy(index: Tensor, target: Target, tree: LabelTree, *, empty: Empty = "skip") -> Tensor:
    r"""Compute the share of chosen nodes that hold a true label.

    .. math:: \frac{1}{n} \sum_{i=1}^n \frac{1}{|\hat Y_i|} \sum_{V \in \hat Y_i} 1[V \cap Y_i \ne \emptyset]

    For one label and one node per row this is the plain accuracy of the node. A row without a chosen node scores 0. A
    node without a true label but with an unknown one is left out; a row with nothing but such nodes counts as a row
    without labels.

    Args:
        index: Nodes, shape ``(..., k)``, padded with -1, such as those of `decode_tree`; or ``(n,)``, one for each of
            n rows of `target`.
        target: The classes, in any of the three forms; classes are the leaves of the tree.
        tree: The tree.
        empty: What a row without labels counts as: ``"skip"`` (not at all), ``"zero"`` or ``"one"``.

    Returns:
        A number between 0 and 1, float64; 0 if no row counts.

    Example:
        >>> import lastlayer as ll
        >>> tree = ll.LabelTree.from_parents([4, 4, 5, 5, 6, 6, -1])
        >>> tree_accuracy(torch.tensor([[4], [2]]), torch.tensor([1, 3]), tree)
        tensor(0.5000, dtype=torch.float64)
    """
    _check.choice("tree_accuracy", "empty", empty, ("skip", "zero", "one"))
    return _sums.settle_rows(accuracy_sums("tree_accuracy", index, target, tree), empty).squeeze(0)


def tree_specificity(
    index: Tensor, target: Target, tree: LabelTree, *, hits_only: bool = True, empty: Empty = "skip"
) -> Tensor:
    r"""Compute how specific the chosen nodes are: 1 for a class, 0 for the root.

    .. math:: \frac{1}{n} \sum_{i=1}^n \frac{1}{|\hat Y_i|} \sum_{V \in \hat Y_i} 1[V \cap Y_i \ne \emptyset]
        \left(1 - \frac{\log |V|}{\log N}\right)

    With ``hits_only=False`` the indicator is left out, and the result does not depend on the labels of a row that
    has some. With it, a perfect choice of classes scores 1; a high threshold raises the indicator and lowers the
    specificity, so the result may have its maximum in between.

    Args:
        index: Nodes, as in :func:`tree_accuracy`.
        target: The classes, as in :func:`tree_accuracy`.
        tree: The tree.
        hits_only: Whether a node that is wrong scores 0.
        empty: What a row without labels counts as: ``"skip"`` (not at all), ``"zero"`` or ``"one"``.

    Returns:
        A number between 0 and 1, float64; 0 if no row counts.

    Example:
        >>> import lastlayer as ll
        >>> tree = ll.LabelTree.from_parents([4, 4, 5, 5, 6, 6, -1])
        >>> tree_specificity(torch.tensor([[4], [2]]), torch.tensor([1, 3]), tree)
        tensor(0.2500, dtype=torch.float64)
    """
    _check.choice("tree_specificity", "empty", empty, ("skip", "zero", "one"))
    sums = specificity_sums("tree_specificity", index, target, tree, hits_only)
    return _sums.settle_rows(sums, empty).squeeze(0)


def accuracy_sums(op: str, index: Any, target: Target, tree: LabelTree) -> RowSums:
    """Add up :func:`tree_accuracy` over rows."""
    hit, counted, full = _hits(op, index, target, tree)
    return _row_sums(hit.double(), counted, full)


def specificity_sums(op: str, index: Any, target: Target, tree: LabelTree, hits_only: bool) -> RowSums:
    """Add up :func:`tree_specificity` over rows."""
    hit, counted, full = _hits(op, index, target, tree)
    gain = tree.specificity.to(hit.device)[_nodes(op, index, target).clamp(min=0)]
    return _row_sums(torch.where(hit, gain, 0) if hits_only else gain, counted, full)


def _nodes(op: str, index: Any, target: Any) -> Tensor:
    index = index[0] if isinstance(index, tuple) else index  # a pair of lists and scores
    if not isinstance(index, Tensor) or index.is_floating_point() or index.dtype == torch.bool:
        got = index.dtype if isinstance(index, Tensor) else type(index).__name__
        raise TypeError(f"{op}: `index` must be a tensor of an integer dtype, got {got}.")
    if index.ndim == 0:
        raise ValueError(f"{op}: `index` must have shape (..., k), lists padded with -1, got shape ().")
    several = isinstance(target, Tensor | _check.LabelLists) and target.shape[:1] == index.shape
    one_per_row = index.ndim == 1 and several
    return index.long().unsqueeze(-1) if one_per_row else index.long()


def _hits(op: str, index: Any, target: Any, tree: LabelTree) -> tuple[Tensor, Tensor, Tensor]:
    """Which nodes are right, which count, and which rows have labels (or something known to be wrong)."""
    lists = _nodes(op, index, target)
    _check.below(
        op, "index", lists, tree.n_nodes, "nodes below n_nodes", "Use the tree that the nodes were chosen from."
    )
    batch = lists.shape[:-1]
    probe = torch.empty((), device=lists.device).expand(*batch, tree.n_leaves)
    labels = _check.target(op, target, probe)
    chosen = lists >= 0
    under = _Under(tree, lists.clamp(min=0))
    hit = under.any(labels.positive()) & chosen
    counted = chosen
    full = labels.count() > 0
    known = labels.known()
    if known is not None:
        open_question = under.any(~known) & ~hit
        counted = chosen & ~open_question
        full = full & (counted.any(-1) | ~chosen.any(-1))
    return hit, counted, full


class _Under:
    """Nodes of a tree, and the classes under them: in the order of a walk these are neighbours, so sums tell."""

    def __init__(self, tree: LabelTree, nodes: Tensor) -> None:
        begin, end = (torch.tensor(bound, device=nodes.device) for bound in tree.spans)
        self.order = begin[tree.leaves.to(nodes.device)].argsort()
        self.begin, self.end = begin[nodes], end[nodes]

    def any(self, marked: Tensor) -> Tensor:
        """Whether a marked class, boolean of shape ``(*batch, n_classes)``, is under each node."""
        upto = F.pad(marked.index_select(-1, self.order).cumsum(-1), (1, 0))
        return upto.gather(-1, self.end) > upto.gather(-1, self.begin)


def _row_sums(value: Tensor, counted: Tensor, full: Tensor) -> RowSums:
    row = torch.where(counted, value, 0).sum(-1) / counted.sum(-1).clamp(min=1)
    gain = torch.where(full, row, 0).sum().unsqueeze(0)
    return RowSums(gain, full.sum().to(gain.dtype).unsqueeze(0), full.sum(), (~full).sum())
