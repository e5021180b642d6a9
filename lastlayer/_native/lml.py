"""The compiled `lml` and `lml_loss`: the return values of the plain versions, on as many threads as torch uses."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from lastlayer._native import Call, library

_LIBRARY = library()  # this module is imported where there is one
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
    logits = logits.contiguous()
    center = logits.new_empty((*logits.shape[:-1], 1))
    delta = torch.empty_like(center)
    out = logits.new_empty(0) if kind == "nu" else torch.empty_like(logits)
    _run(_FORWARD, logits, mask, temperature, k=k, kind=_KINDS[kind], out=out, center=center, delta=delta)
    return out, center, delta


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
    logits = logits.contiguous()
    grad_logits, grad_k = torch.empty_like(logits), torch.empty_like(center)
    _run(
        _BACKWARD,
        logits,
        mask,
        temperature,
        kind=_KINDS["nu" if grad_out is None else kind],
        out=grad_logits,
        center=center,
        delta=delta,
        grad=grad_out,
        grad_delta=grad_delta,
        grad_k=grad_k,
    )
    return grad_logits, grad_k


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
    logits = logits.contiguous()
    center = logits.new_empty((*logits.shape[:-1], 1))
    delta, log_mass, pull = torch.empty_like(center), torch.empty_like(center), torch.empty_like(center)
    loss = logits.new_empty(logits.shape[:-1])
    _run(
        _LOSS_FORWARD,
        logits,
        mask,
        temperature,
        k=k,
        out=loss,
        center=center,
        delta=delta,
        observed=observed,
        index=index,
        dense=dense,
        log_mass=log_mass,
        pull=pull,
    )
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
    logits = logits.contiguous()
    grad_logits, grad_k = torch.empty_like(logits), torch.empty_like(center)
    _run(
        _LOSS_BACKWARD,
        logits,
        mask,
        temperature,
        out=grad_logits,
        center=center,
        delta=delta,
        grad=grad,
        grad_k=grad_k,
        observed=observed,
        index=index,
        dense=dense,
        log_mass=log_mass,
        pull=pull,
    )
    return grad_logits, grad_k


def _run(
    operation: int, logits: Tensor, mask: Tensor | None, temperature: float, *, k: Any = None, **arguments: Any
) -> None:
    """Fill in the call and run it; tensors among the arguments are handed over by their address."""
    rows, n = logits.shape[:-1].numel(), logits.shape[-1]
    if rows == 0:
        return
    call = Call(rows=rows, n=n, logits=logits.data_ptr(), temperature=temperature, threads=torch.get_num_threads())
    kept: list[Any] = [logits]  # alive until the call returns
    if mask is not None:
        shared = mask.stride(-1) == 1 and all(
            s == 0 or d == 1 for s, d in zip(mask.stride(), mask.shape[:-1], strict=False)
        )
        mask = mask if shared else mask.contiguous()
        call.mask, call.mask_stride = mask.data_ptr(), 0 if shared else n
        kept.append(mask)
    if isinstance(k, Tensor):
        k = k.to(logits.dtype).contiguous()
        call.k, call.k_stride = k.data_ptr(), 1
        kept.append(k)
    elif k is not None:  # one number serves all rows
        number = ctypes.c_double(k) if logits.dtype == torch.float64 else ctypes.c_float(k)
        call.k, call.k_stride = ctypes.addressof(number), 0
        kept.append(number)
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            if name == "dense":
                value, call.dense_type = _readable(value)
            elif name == "index":
                call.m = value.shape[-1]
            elif value.dtype != logits.dtype:
                value = value.to(logits.dtype)
            value = value.contiguous()
            kept.append(value)
            value = value.data_ptr()
        if value is not None:
            setattr(call, name, value)
    if _LIBRARY.lastlayer_run(ctypes.byref(call), int(logits.dtype == torch.float64), operation):
        raise MemoryError("lastlayer: no memory for the rows that are being worked on.")


def _readable(dense: Tensor) -> tuple[Tensor, int]:
    """Return a dense target of a type that the library reads, and the number of the type."""
    if dense.dtype not in _DENSE:
        dense = dense.float() if dense.itemsize < 4 else dense.double()
    return dense, _DENSE[dense.dtype]
