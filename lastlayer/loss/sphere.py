"""The loss on the unit sphere: magnitudes by the spherical exponential, signs by classification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lastlayer import _check
from lastlayer._check import Reduction
from lastlayer._module import FunctionModule
from lastlayer.loss import _rows

Kind = Literal["cosine", "squares"]


def spherical_loss(
    magnitude_logits: Tensor,
    sign_logits: Tensor,
    target: Tensor,
    *,
    signed: Sequence[int] | None = None,
    kind: Kind = "cosine",
    sign_weight: float = 1.0,
    sample_weight: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Compute the spherical regression loss (Liao, Gavves and Snoek, 2019): magnitudes and a class of signs.

    .. math:: -\langle p, |y| \rangle + w \, \mathrm{CE}(\text{signs}), \qquad p = \mathrm{spherical\_exp}(o)

    The signs of the coordinates are one class together, so that their correlation can be learned: the class is the
    number whose bits are 1 where a coordinate is negative, the first coordinate lowest. With ``kind="squares"`` the
    first term is the cross-entropy :math:`-\sum_i y_i^2 \log p_i^2` of the squares.

    Args:
        magnitude_logits: The scores :math:`o`, shape ``(*batch, n)``.
        sign_logits: The scores of the sign classes, shape ``(*batch, 2 ** number of signed coordinates)``.
        target: Points :math:`y`, shape ``(*batch, n)``, of any length but 0: only the direction counts. A row of zeros
            is unknown and has no loss.
        signed: The coordinates whose sign is predicted, by default all; the signs of the others are known.
        kind: ``"cosine"`` or ``"squares"``.
        sign_weight: The weight :math:`w` of the signs.
        sample_weight: One weight per row, shape ``batch``; the mean is weighted by it.
        reduction: ``"none"`` is one loss per row; ``"mean"`` is over the rows with a target, 0 if there is none.

    Returns:
        The loss, of the dtype of `magnitude_logits`.

    Example:
        >>> o, s = torch.tensor([[3.0, 4.0]]).log(), torch.zeros(1, 4)
        >>> spherical_loss(o, s, torch.tensor([[0.6, -0.8]]))  # -1 + log(4)
        tensor(0.3863)
    """
    op = "spherical_loss"
    o, s = _check.logits(op, magnitude_logits, "magnitude_logits"), _check.logits(op, sign_logits, "sign_logits")
    target = _check.logits(op, target, "target")
    _check.choice(op, "kind", kind, ("cosine", "squares"))
    n = o.shape[-1]
    signed = range(n) if signed is None else signed
    if any(not -n <= place < n for place in signed):
        raise ValueError(f"{op}: `signed` must hold coordinates from {-n} to {n - 1}, got {tuple(signed)}.")
    if target.shape != o.shape:
        raise ValueError(
            f"{op}: `target` must have the shape of `magnitude_logits` {tuple(o.shape)}, got {tuple(target.shape)}."
        )
    if s.shape != (*o.shape[:-1], 2 ** len(signed)):
        raise ValueError(
            f"{op}: `sign_logits` must have shape {(*o.shape[:-1], 2 ** len(signed))}, one class per choice of "
            f"{len(signed)} signs, got {tuple(s.shape)}."
        )
    dtype = _check.work_dtype(o)
    o, s = (_rows.without_left_out(op, value, sample_weight) for value in (o, s))
    known = (target != 0).any(-1)
    y = F.normalize(target.to(dtype), dim=-1)
    log_p = torch.log_softmax(2 * o.to(dtype), -1) / 2
    if kind == "cosine":
        loss = -(log_p.exp() * y.abs()).sum(-1)
    else:
        loss = -2 * torch.where(y == 0, 0, y.square() * log_p).sum(-1)
    log_signs = torch.log_softmax(s.to(dtype), -1)
    loss = loss - sign_weight * log_signs.gather(-1, sign_class(y, signed).unsqueeze(-1)).squeeze(-1)
    return _rows.leave(op, torch.where(known, loss, 0), reduction, known, magnitude_logits.dtype, sample_weight)


def sign_class(y: Tensor, signed: Sequence[int]) -> Tensor:
    """Return the class of the signs of the coordinates `signed`; a zero counts as positive."""
    bits = [(y[..., place] < 0).long() << bit for bit, place in enumerate(signed)]
    return sum(bits, start=torch.zeros_like(y[..., 0], dtype=torch.int64))


def signs_of(classes: Tensor, signed: Sequence[int], like: Tensor) -> Tensor:
    """Return the signs (1 or -1) of sign classes, shape of `like`; 1 for coordinates not in `signed`."""
    columns = [torch.ones_like(like[..., 0]) for _ in range(like.shape[-1])]
    for bit, place in enumerate(signed):
        columns[place] = 1 - 2 * ((classes >> bit) & 1).to(like.dtype)
    return torch.stack(columns, -1)


class SphericalLoss(FunctionModule):
    """Module form of :func:`spherical_loss`, which documents the arguments."""

    function = staticmethod(spherical_loss)

    def __init__(
        self,
        *,
        signed: Sequence[int] | None = None,
        kind: Kind = "cosine",
        sign_weight: float = 1.0,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(signed=signed, kind=kind, sign_weight=sign_weight, reduction=reduction)

    def forward(
        self, magnitude_logits: Tensor, sign_logits: Tensor, target: Tensor, *, sample_weight: Tensor | None = None
    ) -> Tensor:
        """Return the loss of a batch."""
        loss: Tensor = self._call(magnitude_logits, sign_logits, target, sample_weight=sample_weight)
        return loss
