"""Losses for rows that have no label at all: the softmax is pushed towards an even spread."""

from __future__ import annotations

import torch
from torch import Tensor

from lastlayer import _check
from lastlayer._check import Reduction
from lastlayer._module import FunctionModule
from lastlayer.loss import _rows


def outlier_uniform_loss(logits: Tensor, *, reduction: Reduction = "mean") -> Tensor:
    r"""Compute how far the softmax is from uniform (Lee et al., 2018), to be lowered on rows without a label.

    .. math:: \mathrm{KL}(u \,\|\, p) = -\log n - \frac{1}{n} \sum_j \log p_j, \qquad p = \mathrm{softmax}(x)

    Add it, on the rows known to have no label, to a softmax loss on the others.

    Args:
        logits: The scores, shape ``(*batch, n_classes)``; ``-inf`` rules a class out: n counts the others.
        reduction: ``"none"`` is a loss a row; ``"mean"`` is over the rows with a class left, 0 without one.

    Returns:
        The loss, of the dtype of `logits`: at least 0, and 0 where all logits are equal.

    Example:
        >>> outlier_uniform_loss(torch.tensor([[0.0, 0.0, 0.0], [3.0, 0.0, 0.0]]), reduction="none")
        tensor([0.0000, 0.9963])
    """
    op = "outlier_uniform_loss"
    x, live, peak, rest, counts = _softmax(op, logits)
    n = live.sum(-1).clamp(min=1).to(x.dtype)
    loss = torch.where(counts, rest - _rows.over_classes(x - peak, live) / n - n.log(), 0)
    return _rows.leave(op, loss, reduction, counts, logits.dtype)


def outlier_max_confidence_loss(logits: Tensor, *, reduction: Reduction = "mean") -> Tensor:
    r"""Compute the largest log-probability of the softmax (Hein et al., 2019), to be lowered on rows without a label.

    .. math:: \max_j \log p_j, \qquad p = \mathrm{softmax}(x)

    Args:
        logits: The scores, shape ``(*batch, n_classes)``; ``-inf`` rules a class out.
        reduction: ``"none"`` is a loss a row; ``"mean"`` is over the rows with a class left, 0 without one.

    Returns:
        The loss, of the dtype of `logits`: from ``-log(n_classes)``, where all logits are equal, to 0. Classes that tie
        for the largest share its gradient.

    Example:
        >>> outlier_max_confidence_loss(torch.tensor([[0.0, 0.0, 0.0], [3.0, 0.0, 0.0]]), reduction="none")
        tensor([-1.0986, -0.0949])
    """
    op = "outlier_max_confidence_loss"
    x, live, peak, rest, counts = _softmax(op, logits)
    # A row ruled out is all 0 here: finite, and dropped below. The largest is 0, and has a gradient.
    largest = torch.where(live | ~counts.unsqueeze(-1), x - peak, -torch.inf).amax(-1)
    return _rows.leave(op, torch.where(counts, largest - rest, 0), reduction, counts, logits.dtype)


def _softmax(op: str, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return scores (0 where ruled out), where they are not, both parts of their logsumexp, and the rows with one."""
    logits = _check.logits(op, logits)
    live = logits != -torch.inf
    x = torch.where(live, logits.to(_check.work_dtype(logits)), 0)
    return x, live, *_rows.logsumexp(x, live)


class OutlierUniformLoss(FunctionModule):
    """Module form of :func:`outlier_uniform_loss`, which documents the arguments."""

    function = staticmethod(outlier_uniform_loss)

    def __init__(self, *, reduction: Reduction = "mean") -> None:
        super().__init__(reduction=reduction)


class OutlierMaxConfidenceLoss(FunctionModule):
    """Module form of :func:`outlier_max_confidence_loss`, which documents the arguments."""

    function = staticmethod(outlier_max_confidence_loss)

    def __init__(self, *, reduction: Reduction = "mean") -> None:
        super().__init__(reduction=reduction)
