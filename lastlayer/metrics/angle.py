"""Angles between rotations and between directions."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from lastlayer import _check

AngleReduction = Literal["none", "mean", "median"]


def rotation_error(
    prediction: Tensor, target: Tensor, *, degrees: bool = False, reduction: AngleReduction = "none"
) -> Tensor:
    r"""Compute the geodesic distance between rotations: the angle of the rotation from one to the other.

    .. math:: \Delta(R_1, R_2) = \|\log(R_1^\top R_2)\|_F / \sqrt 2

    For quaternions it is :math:`2 \arccos |\langle q_1, q_2 \rangle|`: `q` and `-q` are the same rotation. Both are
    computed with ``atan2``, which is accurate at 0 and at :math:`\pi`.

    Args:
        prediction: Rotation matrices ``(*batch, 3, 3)`` or quaternions ``(*batch, 4)``, real part first, of any
            length but 0 (a zero quaternion is no rotation, and its error is :math:`\pi`).
        target: The same form and shape.
        degrees: Whether the angle is in degrees.
        reduction: ``"none"`` returns the angle of each rotation, ``"mean"`` and ``"median"`` (the mean of the two
            middle ones of an even number) one number, 0 for no rotations.

    Returns:
        Angles in :math:`[0, \pi]`, ``batch`` or a number, in float32 (float64 for float64 inputs). The share within
        :math:`\pi / 6` is ``(rotation_error(a, b) < math.pi / 6).float().mean()``.

    Example:
        >>> quarter_turn = torch.tensor([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
        >>> rotation_error(quarter_turn, torch.eye(3), degrees=True)
        tensor(90.)
    """
    op = "rotation_error"
    prediction, target = _pair(op, prediction, target)
    if prediction.shape[-2:] == (3, 3):
        angle = _matrix_angle(prediction, target)
    elif prediction.shape[-1] == 4:
        angle = _quaternion_angle(prediction, target)
    else:
        raise ValueError(
            f"{op}: `prediction` must hold matrices (*batch, 3, 3) or quaternions (*batch, 4), "
            f"got shape {tuple(prediction.shape)}."
        )
    return _reduced(op, angle, degrees, reduction)


def angular_error(
    prediction: Tensor, target: Tensor, *, degrees: bool = False, reduction: AngleReduction = "none"
) -> Tensor:
    r"""Compute the angle between directions, such as surface normals.

    .. math:: \angle(u, v) = 2 \, \text{atan2}(\|\hat u - \hat v\|, \|\hat u + \hat v\|)

    Args:
        prediction: Vectors ``(*batch, d)`` of any length; one of length 0 is at a right angle to every other.
        target: Vectors of the same shape.
        degrees: Whether the angle is in degrees.
        reduction: ``"none"``, ``"mean"`` or ``"median"``, as in :func:`rotation_error`.

    Returns:
        Angles in :math:`[0, \pi]`, ``batch`` or a number.

    Example:
        >>> angular_error(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 1.0]), degrees=True)
        tensor(45.)
    """
    op = "angular_error"
    prediction, target = _pair(op, prediction, target)
    return _reduced(op, _vector_angle(prediction, target), degrees, reduction)


def _pair(op: str, prediction: Any, target: Any) -> tuple[Tensor, Tensor]:
    prediction = _check.logits(op, prediction, "prediction").detach()
    target = _check.logits(op, target, "target").detach()
    if prediction.shape != target.shape:
        raise ValueError(
            f"{op}: `target` must have the shape of `prediction`, {tuple(prediction.shape)}, got {tuple(target.shape)}."
        )
    dtype = torch.promote_types(_check.work_dtype(prediction), target.dtype)
    return prediction.to(dtype), target.to(dtype)


def _matrix_angle(a: Tensor, b: Tensor) -> Tensor:
    with _check.without_autocast(a.device):
        turn = a.mT @ b
    axis = torch.stack(
        [turn[..., 2, 1] - turn[..., 1, 2], turn[..., 0, 2] - turn[..., 2, 0], turn[..., 1, 0] - turn[..., 0, 1]], -1
    )  # 2 sin(angle) times the axis
    cosine = turn.diagonal(dim1=-2, dim2=-1).sum(-1) - 1  # 2 cos(angle)
    return torch.atan2(torch.linalg.vector_norm(axis, dim=-1), cosine)


def _quaternion_angle(a: Tensor, b: Tensor) -> Tensor:
    sign = torch.where((a * b).sum(-1, keepdim=True) < 0, -1.0, 1.0).to(a.dtype)
    return 2 * _vector_angle(a, sign * b)


def _vector_angle(a: Tensor, b: Tensor) -> Tensor:
    a, b = _unit(a), _unit(b)
    return 2 * torch.atan2(torch.linalg.vector_norm(a - b, dim=-1), torch.linalg.vector_norm(a + b, dim=-1))


def _unit(x: Tensor) -> Tensor:
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.where(length == 0, 0, x / length)  # nan shows


def _reduced(op: str, angle: Tensor, degrees: bool, reduction: Any) -> Tensor:
    _check.choice(op, "reduction", reduction, ("none", "mean", "median"))
    angle = torch.rad2deg(angle) if degrees else angle
    if reduction == "none":
        return angle
    if reduction == "median":
        return median(angle)
    return angle.mean() if angle.numel() else angle.new_zeros(())


def median(angle: Tensor) -> Tensor:
    """The middle one of some angles, or the mean of the two middle ones; 0 for none."""
    if angle.numel() == 0:
        return angle.new_zeros(())
    ordered = angle.flatten().sort().values
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
