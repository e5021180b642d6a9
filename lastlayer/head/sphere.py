"""Regression onto the circle, the sphere of directions and the rotations, as magnitudes and a class of signs."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lastlayer import _check
from lastlayer._check import Reduction
from lastlayer.loss.sphere import Kind, signs_of, spherical_loss
from lastlayer.project.sphere import spherical_exp

AUTHORS_MIX: dict[int, tuple[Kind, float]] = {1: ("squares", 0.25), 2: ("cosine", 0.1), 3: ("cosine", 0.1)}


class SphericalHead(nn.Module):
    r"""Predict a point of a sphere (Liao, Gavves and Snoek, 2019): magnitudes, and one class for all signs.

    .. math:: \hat y = \mathrm{sign}(\arg\max s) \odot \mathrm{spherical\_exp}(o)

    - ``sphere=1``: an angle as (cos, sin); 2 magnitudes, 4 sign classes.
    - ``sphere=2``: a direction (x, y, z); 3 magnitudes, 4 sign classes for ``z <= 0`` as for visible surfaces, or 8
      with ``hemisphere=False``.
    - ``sphere=3``: a rotation as a unit quaternion, real part first; 4 magnitudes, 8 sign classes: ``q`` and ``-q``
      are one rotation, and the one with a positive real part is learned.

    Logits cannot reach a zero coordinate, and near one the gradient vanishes. Where targets cluster on the axes, as
    angles and normals do, `rotate` turns the first two coordinates by 45 degrees for training and back for prediction.

    Args:
        in_features: The size of a feature vector.
        sphere: The dimension of the sphere: 1, 2 or 3.
        rotate: Whether to turn targets by 45 degrees; for a sphere of 1 or 2.
        hemisphere: Whether the last coordinate of a direction is never positive; for a sphere of 2.
        bias: Whether the layer has a bias.

    Example:
        >>> head = SphericalHead(8, 1)
        >>> angle = torch.tensor([0.1, 2.0, -1.0])
        >>> head.loss(torch.randn(3, 8), torch.stack([angle.cos(), angle.sin()], -1)).backward()
        >>> head.predict(torch.randn(3, 8)).shape
        torch.Size([3, 2])
    """

    def __init__(
        self, in_features: int, sphere: int, *, rotate: bool = True, hemisphere: bool = True, bias: bool = True
    ) -> None:
        super().__init__()
        _check.choice("SphericalHead", "sphere", sphere, (1, 2, 3))
        self.sphere, self.rotate, self.hemisphere = sphere, rotate and sphere < 3, hemisphere and sphere == 2
        self.size = sphere + 1
        self.signed = {1: (0, 1), 2: (0, 1) if hemisphere else (0, 1, 2), 3: (1, 2, 3)}[sphere]
        self.linear = nn.Linear(in_features, self.size + 2 ** len(self.signed), bias=bias)

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits, shape ``(*batch, n + signs)``: those of the magnitudes, then of the sign classes."""
        logits: Tensor = self.linear(features)
        return logits

    def loss(
        self,
        features: Tensor,
        target: Tensor,
        *,
        kind: Kind | None = None,
        sign_weight: float | None = None,
        sample_weight: Tensor | None = None,
        reduction: Reduction = "mean",
    ) -> Tensor:
        """Return :func:`~lastlayer.loss.spherical_loss` of points, shape ``(*batch, sphere + 1)``; zeros are unknown.

        By default the terms are mixed as in the authors' code, up to a common factor: for ``sphere=1`` the
        cross-entropy of the squares and a quarter of that of the signs, otherwise the cosine and a tenth of the signs.
        """
        given_kind, given_weight = AUTHORS_MIX[self.sphere]
        logits = self(features)
        return spherical_loss(
            logits[..., : self.size],
            logits[..., self.size :],
            self.canonical(target),
            signed=self.signed,
            kind=given_kind if kind is None else kind,
            sign_weight=given_weight if sign_weight is None else sign_weight,
            sample_weight=sample_weight,
            reduction=reduction,
        )

    def predict(self, features: Tensor) -> Tensor:
        """Return unit vectors, shape ``(*batch, sphere + 1)``."""
        logits = self(features)
        size = spherical_exp(logits[..., : self.size])
        point = size * signs_of(logits[..., self.size :].argmax(-1), self.signed, size)
        if self.hemisphere:
            point = torch.cat([point[..., :2], -point[..., 2:]], -1)
        return _turn(point, -math.pi / 4) if self.rotate else point

    def canonical(self, target: Tensor) -> Tensor:
        """Return the target as it is learned: turned by 45 degrees, or the one of two quaternions with a >= 0."""
        if self.sphere == 3:
            return canonical_quaternion(target)
        return _turn(target, math.pi / 4) if self.rotate else target

    def extra_repr(self) -> str:
        """Return what is not in the linear layer."""
        return f"sphere={self.sphere}, rotate={self.rotate}"


def canonical_quaternion(q: Tensor) -> Tensor:
    """Return `q` or ``-q``, whichever has its first nonzero coordinate positive."""
    sign = torch.ones_like(q[..., 0])
    for place in reversed(range(q.shape[-1])):
        sign = torch.where(q[..., place] == 0, sign, q[..., place].sign())
    return q * sign.unsqueeze(-1)


def _turn(point: Tensor, angle: float) -> Tensor:
    """Turn the first two coordinates."""
    c, s = math.cos(angle), math.sin(angle)
    x, y = point[..., 0], point[..., 1]
    return torch.cat([torch.stack([c * x - s * y, s * x + c * y], -1), point[..., 2:]], -1)
