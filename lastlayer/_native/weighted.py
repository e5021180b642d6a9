"""The compiled projection with weights and bounds: values or thresholds, and their gradients.

Scores, weights and bounds are read in one type: double where any of them is, else float. The sums and nu are double.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from lastlayer._native import library
from lastlayer._native.lml import _NO_MEMORY, _read_mask

# ``struct weighted`` of `weighted.h`: rows, n, logits, k, k_stride, mask, mask_stride, temperature, at_most, threads,
# weight, lower, upper, their strides, out, nu, grad, grad_k, grad_weight, grad_lower, grad_upper.
_CALL = struct.Struct("@qqPPqPqdiiPPPqqqPPPPPPP")
_RUN = library().lastlayer_run_weighted
_FUSED = bool(library().lastlayer_fused())
assert library().lastlayer_weighted_size() == _CALL.size


class Given(NamedTuple):
    """Scores, weights and bounds as the library reads them; the numbers are distances from one row to the next."""

    x: Tensor
    terms: list[Tensor | None]
    strides: list[int]
    mask: Tensor | None
    mask_stride: int


def forward(
    logits: Tensor,
    k: Tensor,
    weight: Tensor | None,
    lower: Tensor | None,
    upper: Tensor | None,
    mask: Tensor | None,
    temperature: float,
    at_most: bool,
) -> tuple[Tensor, Tensor]:
    """Return y, of the dtype of the logits, and nu in float64, ``(..., 1)``; `k` is float64, ``(..., 1)``."""
    given = _read(logits, weight, lower, upper, mask)
    out = torch.empty_like(given.x)
    nu = given.x.new_empty((*logits.shape[:-1], 1), dtype=torch.float64)
    _run(given, k, temperature, at_most, out, nu, None, [None] * 4, backward=False)
    return out.to(logits.dtype), nu


def threshold(x: Tensor, weight: Tensor, lower: Tensor, upper: Tensor, k: Tensor) -> Tensor:
    """Return nu as `project.weighted._solve` does."""
    given = _read(x, weight, lower, upper, None)
    nu = given.x.new_empty((*x.shape[:-1], 1), dtype=torch.float64)
    _run(given, k, 1.0, False, None, nu, None, [None] * 4, backward=False)
    return nu


def backward(
    logits: Tensor,
    weight: Tensor | None,
    lower: Tensor | None,
    upper: Tensor | None,
    mask: Tensor | None,
    temperature: float,
    at_most: bool,
    nu: Tensor,
    grad: Tensor,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Return the gradients of logits, k, and of those of weight, lower and upper that are wanted, in float64 for k."""
    given = _read(logits, weight, lower, upper, mask)
    grad = grad.to(given.x.dtype).contiguous()
    out, grad_k = torch.empty_like(given.x), torch.empty_like(nu)
    others = [torch.empty_like(given.x) if asked else None for asked in wanted]
    _run(given, None, temperature, at_most, out, nu, grad, [grad_k, *others], backward=True)
    return out.to(logits.dtype), grad_k, others


def _read(
    logits: Tensor, weight: Tensor | None, lower: Tensor | None, upper: Tensor | None, mask: Tensor | None
) -> Given:
    tensors = [t for t in (logits, weight, lower, upper) if t is not None]
    wide = not _FUSED or any(t.dtype in (torch.float64, torch.int64, torch.int32) for t in tensors)
    dtype = torch.float64 if wide else torch.float32
    n, terms, strides = logits.shape[-1], [], []
    for value in (weight, lower, upper):
        term, stride = (None, 0) if value is None else _read_term(value.to(dtype), logits.shape)
        terms.append(term)
        strides.append(stride)
    mask, mask_stride = (None, 0) if mask is None else _read_mask(mask, n)
    return Given(logits.to(dtype).contiguous(), terms, strides, mask, mask_stride)


def _read_term(value: Tensor, shape: torch.Size) -> tuple[Tensor, int]:
    """Return a term in an order that the library reads; 0 as the stride where all rows have the same."""
    n = shape[-1]
    while value.ndim > 1 and value.stride(0) == 0 and value.shape[0] > 0:
        value = value[0]  # one that was expanded
    if value.ndim < 2 or value.numel() == value.shape[-1]:
        return value.reshape(-1).expand(n).contiguous(), 0
    return value.expand(shape).contiguous(), n


def _run(
    given: Given,
    k: Tensor | None,
    temperature: float,
    at_most: bool,
    out: Tensor | None,
    nu: Tensor,
    grad: Tensor | None,
    grads: list[Tensor | None],
    *,
    backward: bool,
) -> None:
    x, rows = given.x, nu.numel()
    if rows == 0:
        return
    one = k is not None and all(s == 0 or d == 1 for s, d in zip(k.stride(), k.shape, strict=True))
    k = None if k is None else k.reshape(-1)[:1] if one else k.contiguous()
    call = _CALL.pack(
        rows, x.shape[-1], x.data_ptr(), _address(k), 0 if one else 1, _address(given.mask), given.mask_stride,
        temperature, at_most, torch.get_num_threads(), *map(_address, given.terms), *given.strides, _address(out),
        nu.data_ptr(), _address(grad), *map(_address, grads),
    )  # fmt: skip
    if _RUN(call, x.dtype == torch.float64, backward):
        raise MemoryError(_NO_MEMORY)


def _address(value: Tensor | None) -> int:
    return 0 if value is None else value.data_ptr()
