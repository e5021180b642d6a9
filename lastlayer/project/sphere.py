"""The spherical exponential: logits to the positive part of the unit sphere."""

from __future__ import annotations

import torch
from torch import Tensor

from lastlayer import _check
from lastlayer._module import FunctionModule


def spherical_exp(logits: Tensor) -> Tensor:
    r"""Map logits to a unit vector with positive coordinates (Liao, Gavves and Snoek, 2019).

    .. math:: p_i = \frac{e^{x_i}}{\sqrt{\sum_j e^{2 x_j}}} = \sqrt{\mathrm{softmax}(2x)_i}

    The gradient depends only on the result, not on the size of the logits, and adding a constant to a row changes
    nothing. A coordinate of 0 lies at infinity: see :class:`~lastlayer.head.SphericalHead` for targets on the axes.

    Args:
        logits: The scores :math:`x`, shape ``(..., n)``; ``-inf`` gives a coordinate 0 without gradient.

    Returns:
        Unit vectors, of the shape and dtype of `logits`. A row of only ``-inf`` becomes NaN, as with the softmax.

    Example:
        >>> spherical_exp(torch.tensor([3.0, 4.0]).log())
        tensor([0.6000, 0.8000])
    """
    logits = _check.logits("spherical_exp", logits)
    x = logits.to(_check.work_dtype(logits))
    return torch.exp(torch.log_softmax(2 * x, -1) / 2).to(logits.dtype)


class SphericalExp(FunctionModule):
    """Module form of :func:`spherical_exp`."""

    function = staticmethod(spherical_exp)

    def __init__(self) -> None:
        super().__init__()

    def forward(self, logits: Tensor) -> Tensor:
        """Return the point on the sphere."""
        out: Tensor = self._call(logits)
        return out
