"""Losses for rows that have no label at all: the softmax is pushed towards the uniform distribution."""

from __future__ import annotations

import torch
from torch import Tensor

from lastlayer import _check
from lastlayer._check import Reduction
from lastlayer._module import FunctionModule
from lastlayer.loss import _rows
from lastlayer.shard import ClassShard, total, unwrap


def outlier_uniform_loss(
    logits: Tensor,
    *,
    sample_weight: Tensor | None = None,
    shard: ClassShard | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Compute how far the softmax is from uniform (Lee et al., 2018), to be lowered on rows without a label.

    .. math:: \mathrm{KL}(u \,\|\, p) = -\log n - \frac{1}{n} \sum_j \log p_j, \qquad p = \mathrm{softmax}(x)

    Add it, on the rows known to have no label, to a softmax loss on the others.

    Args:
        logits: The scores, shape ``(*batch, n_classes)``; ``-inf`` rules a class out: n counts the others.
        sample_weight: One weight per row, shape ``batch``; the mean is weighted by it.
        shard: This rank's slice, when the classes are split over processes.
        reduction: ``"none"`` is one loss per row; ``"mean"`` is over the rows with a class left, 0 without one.

    Returns:
        The loss, of the dtype of `logits`: at least 0, and 0 where all logits are equal.

    Example:
        >>> outlier_uniform_loss(torch.tensor([[0.0, 0.0, 0.0], [3.0, 0.0, 0.0]]), reduction="none")
        tensor([0.0000, 0.9963])
    """
    op = "outlier_uniform_loss"
    logits, shard, _ = unwrap(op, logits, shard)
    x, live, peak, rest, counts = _softmax(op, logits, shard, sample_weight)
    n = total(live.sum(-1).to(x.dtype), shard).clamp(min=1)
    loss = torch.where(counts, rest - _rows.over_classes(x - peak, live, shard) / n - n.log(), 0)
    return _rows.leave(op, loss, reduction, counts, logits.dtype, sample_weight)


def outlier_max_confidence_loss(
    logits: Tensor,
    *,
    sample_weight: Tensor | None = None,
    shard: ClassShard | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Compute the largest log-probability of the softmax (Hein et al., 2019), to be lowered on rows without a label.

    .. math:: \max_j \log p_j, \qquad p = \mathrm{softmax}(x)

    Args:
        logits: The scores, shape ``(*batch, n_classes)``; ``-inf`` rules a class out.
        sample_weight: One weight per row, shape ``batch``; the mean is weighted by it.
        shard: This rank's slice, when the classes are split over processes.
        reduction: ``"none"`` is one loss per row; ``"mean"`` is over the rows with a class left, 0 without one.

    Returns:
        The loss, of the dtype of `logits`: from ``-log(n_classes)``, where all logits are equal, to 0. Classes that tie
        for the largest share its gradient.

    Example:
        >>> outlier_max_confidence_loss(torch.tensor([[0.0, 0.0, 0.0], [3.0, 0.0, 0.0]]), reduction="none")
        tensor([-1.0986, -0.0949])
    """
    op = "outlier_max_confidence_loss"
    logits, shard, _ = unwrap(op, logits, shard)
    x, live, peak, rest, counts = _softmax(op, logits, shard, sample_weight)
    ties = live & (x == peak)
    largest = _rows.over_classes(x - peak, ties, shard)  # 0, with the gradient of the largest
    largest = largest / total(ties.sum(-1).to(x.dtype), shard).clamp(min=1)
    return _rows.leave(op, torch.where(counts, largest - rest, 0), reduction, counts, logits.dtype, sample_weight)


def _softmax(
    op: str, logits: Tensor, shard: ClassShard | None, sample_weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return scores (0 where ruled out), where they are not, both parts of their logsumexp, and the rows with one."""
    logits = _check.logits(op, logits)
    live = logits != -torch.inf
    x = _rows.without_left_out(op, logits.to(_check.work_dtype(logits)), sample_weight)
    x = torch.where(live, x, 0)
    return x, live, *_rows.logsumexp(x, live, shard)


class _OutlierLoss(FunctionModule):
    """A loss of logits alone."""

    def __init__(self, *, shard: ClassShard | None = None, reduction: Reduction = "mean") -> None:
        super().__init__(shard=shard, reduction=reduction)

    def forward(self, logits: Tensor, *, sample_weight: Tensor | None = None) -> Tensor:
        """Return the loss of a batch."""
        loss: Tensor = self._call(logits, sample_weight=sample_weight)
        return loss


class OutlierUniformLoss(_OutlierLoss):
    """Module form of :func:`outlier_uniform_loss`, which documents the arguments."""

    function = staticmethod(outlier_uniform_loss)


class OutlierMaxConfidenceLoss(_OutlierLoss):
    """Module form of :func:`outlier_max_confidence_loss`, which documents the arguments."""

    function = staticmethod(outlier_max_confidence_loss)
