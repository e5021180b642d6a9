"""The compiled projection with weights and bounds: values or thresholds, and their gradients.

Scores, weights and bounds are read in one type: double where any of them is, else float. The sums and nu are double.
Scores of half precision are converted row by row within the kernel, unless double is needed.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lastlayer._native import library
from lastlayer._native.lml import _HALF, _NO_MEMORY, _read_mask
from lastlayer._threshold.budget import Budget

# ``struct weighted`` of `weighted.h`: rows, n, logits, k, k_stride, mask, mask_stride, temperature, at_most, threads,
# weight, lower, upper, their strides, out, nu, grad, grad_k, grad_weight, grad_lower, grad_upper, half.
_CALL = struct.Struct("@qqPPqPqdiiPPPqqqPPPPPPPq")
_RUN = library().lastlayer_run_weighted
_FUSED = bool(library().lastlayer_fused())
_NARROW = (torch.float32, torch.bfloat16, torch.float16)
assert library().lastlayer_weighted_size() == _CALL.size


class Given(NamedTuple):
    """Scores, weights and bounds as the library reads them; the numbers are distances from one row to the next."""

    x: Tensor
    terms: list[Tensor | None]
    strides: list[int]
    mask: Tensor | None
    mask_stride: int


def forward(budget: Budget, k: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return y, of the dtype of the logits, and nu in float64, ``(..., 1)``; `k` is one number, or the same."""
    logits, terms, mask, temperature, at_most = budget
    given = _read(logits, terms, mask)
    out = torch.empty_like(given.x)
    nu = given.x.new_empty((*logits.shape[:-1], 1), dtype=torch.float64)
    _run(given, k, temperature, at_most, out, nu, None, [None] * 4, backward=False)
    return out if out.dtype == logits.dtype else out.to(logits.dtype), nu


def threshold(x: Tensor, weight: Tensor, lower: Tensor, upper: Tensor, k: Tensor) -> Tensor:
    """Return nu as `project.weighted._solve` does."""
    given = _read(x, [weight, lower, upper], None)
    nu = given.x.new_empty((*x.shape[:-1], 1), dtype=torch.float64)
    _run(given, k, 1.0, False, None, nu, None, [None] * 4, backward=False)
    return nu


def backward(
    budget: Budget, nu: Tensor, grad: Tensor, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Return the gradients of logits, k, and of those of weight, lower and upper that are wanted, in float64 for k."""
    logits, terms, mask, temperature, at_most = budget
    given = _read(logits, terms, mask)
    grad = grad if grad.dtype == given.x.dtype and grad.is_contiguous() else grad.to(given.x.dtype).contiguous()
    out, grad_k = torch.empty_like(given.x), torch.empty_like(nu)
    work = torch.float64 if given.x.dtype == torch.float64 else torch.float32
    others = [torch.empty_like(given.x, dtype=work) if asked else None for asked in wanted]
    _run(given, None, temperature, at_most, out, nu, grad, [grad_k, *others], backward=True)
    return out.to(logits.dtype), grad_k, others


def _read(logits: Tensor, given: Sequence[Tensor | None], mask: Tensor | None) -> Given:
    n = logits.shape[-1]
    dtype = torch.float32 if _FUSED and logits.dtype in _NARROW else torch.float64
    for value in given:
        if value is not None and value.dtype not in _NARROW:
            dtype = torch.float64
    terms: list[Tensor | None] = []
    strides = []
    for value in given:
        if value is None:
            terms.append(None)
            strides.append(0)
            continue
        value = value if value.dtype == dtype else value.to(dtype)
        if value.ndim == 1 and value.shape[0] == n and value.is_contiguous():
            terms.append(value)
            strides.append(0)
        else:
            term, stride = _read_term(value, logits.shape)
            terms.append(term)
            strides.append(stride)
    mask, mask_stride = (None, 0) if mask is None else _read_mask(mask, n)
    if dtype == torch.float32:
        dtype = logits.dtype
    x = logits if logits.dtype == dtype and logits.is_contiguous() else logits.to(dtype).contiguous()
    return Given(x, terms, strides, mask, mask_stride)


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
    k: Tensor | float | None,
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
    k_stride = k_address = 0
    if isinstance(k, float):
        number = ctypes.c_double(k)
        k_address = ctypes.addressof(number)
    elif k is not None:
        if any(k.stride()[:-1]):  # else it is one number, expanded
            k, k_stride = k.contiguous(), 1
        k_address = k.data_ptr()
    weight, lower, upper = given.terms
    call = _CALL.pack(
        rows, x.shape[-1], x.data_ptr(), k_address, k_stride, _address(given.mask),
        given.mask_stride, temperature, at_most, torch.get_num_threads(), _address(weight), _address(lower),
        _address(upper), *given.strides, _address(out), nu.data_ptr(), _address(grad), _address(grads[0]),
        _address(grads[1]), _address(grads[2]), _address(grads[3]),
        _HALF.get(x.dtype, 0),
    )  # fmt: skip
    if _RUN(call, x.dtype == torch.float64, backward):
        raise MemoryError(_NO_MEMORY)


def _address(value: Tensor | None) -> int:
    return 0 if value is None else value.data_ptr()
