"""The arguments that every kernel takes."""

from typing import Any

import torch
from torch import Tensor

from lastlayer._triton import plan as shapes

# Pointers to one number per row, whose alignment depends on the number of rows; a kernel is not compiled anew for that.
PER_ROW = [f"{name}_ptr" for name in ("k", "w", "loss", "center", "delta", "mass", "pull", "gd", "dk")]


class Rows:
    """Logits as rows of classes, with `k`, the mask and the temperature: pointers first, then sizes and strides."""

    def __init__(
        self, x: Tensor, k: Tensor | float | None, mask: Tensor | None, temperature: float, align: int | None = None
    ) -> None:
        self.x = x
        self.count, self.n = x.shape
        flat, m_row, m_col = shapes.flat_mask(mask, x)
        self.masked = mask is not None
        self.align = shapes.start_of_rows(self.n) if align is None else align
        self.head: tuple[Any, ...] = (x, flat)
        strides: tuple[int | None, ...] = (m_row, m_col)
        if isinstance(k, Tensor):
            per_row = k.reshape(self.count)
            self.head += (per_row,)
            strides += (per_row.stride(0),)
        elif k is not None:
            self.head += (k,)
            strides += (None,)
        inverse = shapes.inverse(temperature)
        self.tail = (self.n // self.align, *strides, inverse)
        # |r| at which Householder's step ends the search. The error is at most r^4 / 3 in nu (measured: r^4 / 29),
        # and r^3 / 6 in sum h, which the loss uses.
        half = x.dtype != torch.float32
        self.tolerance = 0.2 if half else 0.05
        self.tolerance_of_mass = 0.1 if half else 0.008


def general_form(x: Tensor, k: Tensor | float | None, mask: Tensor | None) -> tuple[Tensor, Any, Tensor]:
    """Return logits, `k` and mask in the form to which every call can be brought, with the same result.

    That is float32, a tensor of cardinalities, and a mask. The kernels for it come with the package: see `ahead`.
    """
    batch = x.shape[:-1]
    if k is not None and not isinstance(k, Tensor):
        k = torch.full((), k, dtype=torch.float32, device=x.device).expand(*batch, 1)
    if mask is None:
        mask = torch.ones((), dtype=torch.bool, device=x.device).expand(x.shape)
    return x.float(), k, mask


def end_of_no_classes_(delta: Tensor, k: Tensor | float) -> Tensor:
    """Fill in the result where there is nothing to launch: no rows, or no classes, which is feasible only for k = 0."""
    met = k == 0 if isinstance(k, Tensor) else torch.full((), k == 0, device=delta.device)
    return delta.copy_(torch.where(met, -torch.inf, torch.nan).expand_as(delta))
