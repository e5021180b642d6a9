"""The reciprocal-point loss: a class is far from the points that stand for everything else."""

from __future__ import annotations

import torch
from torch import Tensor

from lastlayer import _check
from lastlayer._check import Reduction, Target
from lastlayer._renamed import renamed
from lastlayer.loss import _rows
from lastlayer.loss.topk import first_label


@renamed("reciprocal_point_loss", gamma="scale", weight="open_weight")
def reciprocal_point_loss(
    features: Tensor,
    points: Tensor,
    radius: Tensor,
    target: Target,
    *,
    scale: float = 1.0,
    open_weight: float = 0.1,
    sample_weight: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Compute the reciprocal-point loss (Chen et al., 2020): cross-entropy of distances, and a bound on open space.

    .. math:: -\log \mathrm{softmax}(\gamma d)_y + \lambda \frac1M \sum_i \bigl(\|f - p_i^y\|^2 - R_y\bigr)^2, \qquad
              d_k = \frac1M \sum_i \|f - p_i^k\|^2

    The points of a class stand for everything else: the farther from them, the likelier the class. The second term
    keeps the true class at a learned distance; without it the features diverge and the points collapse.

    Args:
        features: Feature vectors :math:`f`, shape ``(*batch, d)``.
        points: The reciprocal points, shape ``(n_classes, M, d)``.
        radius: The distances :math:`R`, shape ``(n_classes,)``.
        target: One class per row, -1 for none; or multi-hot (-1: left out) or index lists, where of several labels the
            lowest class counts.
        scale: The factor :math:`\gamma` of the distances.
        open_weight: The weight :math:`\lambda` of the second term.
        sample_weight: One weight per row, shape ``batch``; the mean is weighted by it.
        reduction: ``"none"`` is one loss per row; ``"mean"`` is over the rows with a label, 0 if there is none.

    Returns:
        The loss, of the dtype of `features`; 0 for a row without a label.

    Example:
        >>> points, radius = torch.tensor([[[0.0]], [[2.0]]]), torch.zeros(2)
        >>> reciprocal_point_loss(torch.tensor([[1.0]]), points, radius, torch.tensor([0]))  # log(2) + 0.1
        tensor(0.7931)
    """
    op = "reciprocal_point_loss"
    features, points = _check.logits(op, features, "features"), _check.logits(op, points, "points")
    if points.ndim != 3 or points.shape[-1] != features.shape[-1]:
        raise ValueError(
            f"{op}: `points` must have shape (n_classes, M, {features.shape[-1]}), got {tuple(points.shape)}."
        )
    if points.shape[1] == 0:
        raise ValueError(f"{op}: `points` must hold at least one point per class, got shape {tuple(points.shape)}.")
    if not isinstance(radius, Tensor):
        raise TypeError(f"{op}: `radius` must be a tensor, got {type(radius).__name__}. Give one number per class.")
    if radius.shape != points.shape[:1]:
        raise ValueError(f"{op}: `radius` must have shape ({points.shape[0]},), got {tuple(radius.shape)}.")
    features = _rows.features_of_weight(op, features, sample_weight)
    distance = squared_distances(features, points)
    x, labels, live = _rows.enter(op, scale * distance.mean(-1), target)
    here = first_label(labels)
    place = here.clamp(min=0)
    log_p = torch.where(live, x, -torch.inf).log_softmax(-1)
    mine = distance.gather(-2, place.unsqueeze(-1).expand(*place.shape, distance.shape[-1])).squeeze(-2)
    open_space = (mine - radius.to(mine)[place]).square().mean(-1)
    loss = open_weight * open_space - log_p.gather(-1, place).squeeze(-1)
    has_label = here.squeeze(-1) >= 0
    return _rows.leave(op, torch.where(has_label, loss, 0), reduction, has_label, features.dtype, sample_weight)


def squared_distances(features: Tensor, points: Tensor) -> Tensor:
    """Return ``|f - p|^2`` for features ``(*batch, d)`` and points ``(*many, d)``, shape ``(*batch, *many)``."""
    dtype = torch.promote_types(_check.work_dtype(features), _check.work_dtype(points))
    f, p = features.to(dtype), points.to(dtype)
    with _check.without_autocast(f.device):  # what is left of large squares needs all their digits
        product = f @ p.flatten(0, -2).T
    square = f.square().sum(-1, keepdim=True) - 2 * product + p.flatten(0, -2).square().sum(-1)
    distances: Tensor = _rows.above_0(square).unflatten(-1, points.shape[:-1])  # rounding may leave less than 0
    return distances
