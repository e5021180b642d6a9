"""The compiled projection with weights and bounds: values, their logarithms or thresholds, and their gradients.

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
from lastlayer._native.lml import _HALF, _NO_MEMORY, _THREADS, _read_mask
from lastlayer._threshold.budget import Budget

# ``struct weighted`` of `weighted.h`: rows, n, logits, k, k_stride, mask, mask_stride, temperature, at_most, threads,
# kind, weight, lower, upper, their strides, out, nu, grad, grad_nu, grad_k, grad_weight, grad_lower, grad_upper, half.
_CALL = struct.Struct("@qqPPqPqdiiqPPPqqqPPPPPPPPq")
_KINDS = {"y": 0, "at most": 0, "log": 1, "nu": 2}
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
    """Return the projection, of the dtype of the logits, and nu in float64, ``(..., 1)``; one number is a `k` too.

    For the kind "nu" both are nu.
    """
    logits, terms, mask, _, kind = budget
    given = _read(logits, terms, mask)
    nu = given.x.new_empty((*logits.shape[:-1], 1), dtype=torch.float64)
    if kind == "nu":
        _run(budget, given, k, None, nu, None, [None] * 4, backward=False)
        return nu, nu
    out = torch.empty_like(given.x)
    _run(budget, given, k, out, nu, None, [None] * 4, backward=False)
    return out if out.dtype == logits.dtype else out.to(logits.dtype), nu


def quick(logits: Tensor, k: float, given: tuple[Tensor | None, ...], strides: list[int], kind: str) -> Tensor:
    """Return the projection of a common call that is not recorded, in as few steps as there can be.

    Weights and bounds are contiguous, in the type that the library reads, and of the shape of a row with the stride 0,
    or that of the logits. For the kind "nu" the result is in float64, ``(..., 1)``.
    """
    dtype, size = logits.dtype, logits.numel()
    wide = dtype is torch.float64
    if size == 0 or not (wide or _FUSED):
        return forward(Budget(logits, given, None, 1.0, kind), k)[0]
    x = logits if logits.is_contiguous() else logits.contiguous()
    weight, lower, upper = given
    n = x.shape[-1]
    out = x.new_empty((*x.shape[:-1], 1), dtype=torch.float64) if kind == "nu" else torch.empty_like(x)
    number = ctypes.c_double(k)
    values, nu = (0, out.data_ptr()) if kind == "nu" else (out.data_ptr(), 0)
    call = _CALL.pack(
        size // n, n, x.data_ptr(), ctypes.addressof(number), 0, 0, 0, 1.0, kind == "at most", _THREADS(),
        _KINDS[kind], 0 if weight is None else weight.data_ptr(), 0 if lower is None else lower.data_ptr(),
        0 if upper is None else upper.data_ptr(), *strides, values, nu, 0, 0, 0, 0, 0, 0, _HALF.get(dtype, 0),
    )  # fmt: skip
    if _RUN(call, wide, False):
        raise MemoryError(_NO_MEMORY)
    return out


def threshold(x: Tensor, weight: Tensor, lower: Tensor, upper: Tensor, k: Tensor) -> Tensor:
    """Return nu as `project.weighted._solve` does."""
    return forward(Budget(x, [weight, lower, upper], None, 1.0, "nu"), k)[0]


def backward(
    budget: Budget, nu: Tensor, grad: Tensor, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Return the gradients of logits, k, and of those of weight, lower and upper that are wanted, in float64 for k."""
    logits, terms, mask, _, kind = budget
    given = _read(logits, terms, mask)
    dtype = torch.float64 if kind == "nu" else given.x.dtype
    grad = grad if grad.dtype == dtype and grad.is_contiguous() else grad.to(dtype).contiguous()
    out, grad_k = torch.empty_like(given.x), torch.empty_like(nu)
    work = torch.float64 if given.x.dtype == torch.float64 else torch.float32
    others = [torch.empty_like(given.x, dtype=work) if asked else None for asked in wanted]
    _run(budget, given, None, out, nu, grad, [grad_k, *others], backward=True)
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
    budget: Budget,
    given: Given,
    k: Tensor | float | None,
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
    kind = budget.kind
    grad_nu, grad = (grad, None) if kind == "nu" else (None, grad)
    call = _CALL.pack(
        rows, x.shape[-1], x.data_ptr(), k_address, k_stride, _address(given.mask),
        given.mask_stride, budget.temperature, kind == "at most", torch.get_num_threads(), _KINDS[kind],
        _address(weight), _address(lower), _address(upper), *given.strides, _address(out), nu.data_ptr(),
        _address(grad), _address(grad_nu), *map(_address, grads), _HALF.get(x.dtype, 0),
    )  # fmt: skip
    if _RUN(call, x.dtype == torch.float64, backward):
        raise MemoryError(_NO_MEMORY)


def _address(value: Tensor | None) -> int:
    return 0 if value is None else value.data_ptr()
