"""The compiled `lml` and `lml_loss`: the return values of the plain versions, on as many threads as torch uses.

Half precision goes through float32. The arguments of a call are packed as the C structure in one step: filling in a
`ctypes.Structure` field by field takes longer than a small batch does.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from lastlayer._native import CALL, library

_RUN = library().lastlayer_run  # this module is imported where there is a library
_KINDS = {"y": 0, "log": 1, "nu": 2}
_FORWARD, _BACKWARD, _LOSS_FORWARD, _LOSS_BACKWARD = range(4)
_DENSE = {
    torch.float32: 0,
    torch.float64: 1,
    torch.int8: 2,
    torch.uint8: 3,
    torch.bool: 3,
    torch.int16: 4,
    torch.int32: 5,
    torch.int64: 6,
}


def forward(
    logits: Tensor, k: Tensor | float, mask: Tensor | None, temperature: float, kind: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(out, center, delta)`` as `project.lml._plain` does; `k` may be one number."""
    x = logits if logits.itemsize > 3 and logits.is_contiguous() else _read(logits)
    center = x.new_empty((*x.shape[:-1], 1))
    delta = torch.empty_like(center)
    out = x.new_empty(0) if kind == "nu" else torch.empty_like(x)
    _run(_FORWARD, x, mask, temperature, k, _KINDS[kind], out, center, delta)
    return out if x is logits else out.to(logits.dtype), center, delta


def backward(
    logits: Tensor,
    mask: Tensor | None,
    temperature: float,
    center: Tensor,
    delta: Tensor,
    grad_out: Tensor | None,
    grad_delta: Tensor | None,
    kind: str,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of logits and k as `project.lml._plain_backward` does."""
    x = logits if logits.itemsize > 3 and logits.is_contiguous() else _read(logits)
    grad_logits, grad_k = torch.empty_like(x), torch.empty_like(center)
    number = _KINDS["nu" if grad_out is None else kind]
    _run(_BACKWARD, x, mask, temperature, None, number, grad_logits, center, delta, grad_out, grad_delta, grad_k)
    return grad_logits if x is logits else grad_logits.to(logits.dtype), grad_k


def loss_forward(
    logits: Tensor,
    k: Tensor | float,
    mask: Tensor | None,
    temperature: float,
    observed: float,
    index: Tensor | None,
    dense: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return ``(loss, center, delta, log_mass, pull)``: one loss per row, and what the backward pass needs.

    `log_mass` is the logarithm of ``sum h``, ``h = y (1 - y)``, and `pull` the sum of the derivatives of the loss in
    ``x + nu``.
    """
    x = logits if logits.itemsize > 3 and logits.is_contiguous() else _read(logits)
    center = x.new_empty((*x.shape[:-1], 1))
    delta, log_mass, pull = torch.empty_like(center), torch.empty_like(center), torch.empty_like(center)
    loss = x.new_empty(x.shape[:-1])
    _run(
        _LOSS_FORWARD, x, mask, temperature, k, 0, loss, center, delta, None, None, None, observed, index, dense,
        log_mass, pull,
    )  # fmt: skip
    return loss, center, delta, log_mass, pull


def loss_backward(
    logits: Tensor,
    mask: Tensor | None,
    temperature: float,
    observed: float,
    index: Tensor | None,
    dense: Tensor | None,
    center: Tensor,
    delta: Tensor,
    log_mass: Tensor,
    pull: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of logits and k, for one upstream gradient per row."""
    x = logits if logits.itemsize > 3 and logits.is_contiguous() else _read(logits)
    grad_logits, grad_k = torch.empty_like(x), torch.empty_like(center)
    _run(
        _LOSS_BACKWARD, x, mask, temperature, None, 0, grad_logits, center, delta, grad, None, grad_k, observed, index,
        dense, log_mass, pull,
    )  # fmt: skip
    return grad_logits if x is logits else grad_logits.to(logits.dtype), grad_k


def _read(logits: Tensor) -> Tensor:
    """Return the scores in a type and an order that the library reads."""
    return (logits.float() if logits.itemsize < 4 else logits).contiguous()


def _run(
    operation: int,
    x: Tensor,
    mask: Tensor | None,
    temperature: float,
    k: Any,
    kind: int,
    out: Tensor,
    center: Tensor,
    delta: Tensor,
    grad: Tensor | None = None,
    grad_delta: Tensor | None = None,
    grad_k: Tensor | None = None,
    observed: float = 0.0,
    index: Tensor | None = None,
    dense: Tensor | None = None,
    log_mass: Tensor | None = None,
    pull: Tensor | None = None,
) -> None:
    """Pack the arguments in the order of ``struct call`` and run; tensors are handed over by their address."""
    n, dtype = x.shape[-1], x.dtype
    rows = center.numel()
    if rows == 0:
        return
    double = dtype == torch.float64
    mask_stride = k_stride = labels = dense_type = 0
    if mask is not None:
        shared = mask.stride(-1) == 1 and all(
            s == 0 or d == 1 for s, d in zip(mask.stride(), mask.shape[:-1], strict=False)
        )
        mask = mask if shared else mask.contiguous()
        mask_stride = 0 if shared else n
    if isinstance(k, Tensor):
        k = k.to(dtype).contiguous()
        k_address, k_stride = k.data_ptr(), 1
    elif k is not None:  # one number serves all rows
        k = ctypes.c_double(k) if double else ctypes.c_float(k)
        k_address = ctypes.addressof(k)
    else:
        k_address = 0
    if index is not None:
        labels, index = index.shape[-1], index.contiguous()
    if dense is not None:
        if dense.dtype not in _DENSE:
            dense = dense.float() if dense.itemsize < 4 else dense.double()
        dense, dense_type = dense.contiguous(), _DENSE[dense.dtype]
    if operation in (_BACKWARD, _LOSS_BACKWARD):  # on tensors from outside; else they were made here
        center, delta = (t.to(dtype).contiguous() for t in (center, delta))
        grad, grad_delta, log_mass, pull = (
            t if t is None or (t.dtype == dtype and t.is_contiguous()) else t.to(dtype).contiguous()
            for t in (grad, grad_delta, log_mass, pull)
        )
    call = CALL.pack(
        rows, n, x.data_ptr(), k_address, k_stride, 0 if mask is None else mask.data_ptr(), mask_stride, temperature,
        kind, torch.get_num_threads(), out.data_ptr(), center.data_ptr(), delta.data_ptr(),
        0 if grad is None else grad.data_ptr(), 0 if grad_delta is None else grad_delta.data_ptr(),
        0 if grad_k is None else grad_k.data_ptr(), observed, 0 if index is None else index.data_ptr(), labels,
        0 if dense is None else dense.data_ptr(), dense_type, 0 if log_mass is None else log_mass.data_ptr(),
        0 if pull is None else pull.data_ptr(),
    )  # fmt: skip
    if _RUN(call, double, operation):
        raise MemoryError("lastlayer: no memory for the rows that are being worked on.")
