"""The compiled `lml` and `lml_loss`: the return values of the plain versions, on as many threads as torch uses.

Half precision goes through float32. The common calls, `probabilities` and `reduced_loss`, convert row by row within the
kernel. The arguments of a call are packed as the C structure in one step: filling in a `ctypes.Structure` field by
field takes longer than a small batch does.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from lastlayer._native import CALL, library

_RUN = library().lastlayer_run  # this module is imported where there is a library
_SCALE = library().lastlayer_scale_to_half
_PACK, _ADDRESS, _THREADS = CALL.pack, ctypes.addressof, torch.get_num_threads
_NO_MEMORY = "lastlayer: no memory for the rows that are being worked on."
_KINDS = {"y": 0, "log": 1, "nu": 2, "at most": 3, "fenchel young": 4}
_HALF = {torch.bfloat16: 1, torch.float16: 2}
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


def probabilities(
    logits: Tensor, k: float | Tensor, mask: Tensor | None, temperature: float, record: bool, kind: str = "y"
) -> tuple[Tensor, Tensor | None]:
    """Return y, and with `record` what the backward pass needs: center and delta, ``(2, rows)``.

    `k` is one number, or a tensor of the work dtype. The kind is "y", or "at most": then delta is below center where
    the budget is reached, and both are 0 where it is not.
    """
    x = logits if logits.is_contiguous() else logits.contiguous()
    out = torch.empty_like(x)
    if not record:
        _run_short(_FORWARD, x, mask, temperature, k, out, None, None, kind)
        return out, None
    work = torch.float64 if x.dtype is torch.float64 else torch.float32
    rows = x.new_empty((2, *x.shape[:-1]), dtype=work)
    _run_short(_FORWARD, x, mask, temperature, k, out, rows, None, kind)
    return out, rows


def probabilities_backward(
    logits: Tensor, mask: Tensor | None, temperature: float, rows: Tensor, grad: Tensor, kind: str = "y"
) -> Tensor:
    """Return the gradient of the logits."""
    x = logits if logits.is_contiguous() else logits.contiguous()
    grad = grad if grad.dtype == x.dtype and grad.is_contiguous() else grad.to(x.dtype).contiguous()
    out = torch.empty_like(x)
    _run_short(_BACKWARD, x, mask, temperature, 0.0, out, rows, grad, kind)
    return out


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


def reduced_loss(
    logits: Tensor,
    k: Tensor | float,
    mask: Tensor | None,
    temperature: float,
    observed: float,
    index: Tensor | None,
    dense: Tensor | None,
    mean: bool,
) -> tuple[Tensor, Tensor, float]:
    """Return the loss of all rows, their mean or sum, and its gradient in two factors; float32 for half precision.

    The second factor is 0 where a row is nan: what becomes of its gradient depends on the upstream one. `index` holds
    lists, or one class per row.
    """
    x = logits if logits.is_contiguous() else logits.contiguous()
    if x.itemsize > 3:
        slope, total = torch.empty_like(x), x.new_empty(())
    else:
        slope, total = torch.empty_like(x, dtype=torch.float32), x.new_empty((), dtype=torch.float32)
    over = ctypes.c_double(1.0)
    _run_reduced(
        _LOSS_FORWARD, x, k, mask, temperature, observed, index, dense, None, None, None, None, total, mean, slope, over
    )
    return total, slope, over.value


def fenchel_young_loss(
    x: Tensor, k: Tensor | float | None, mask: Tensor | None, index: Tensor | None, dense: Tensor | None, gradient: bool
) -> tuple[Tensor, Tensor] | None:
    """Return one loss per row and its gradient; None where a row is out of the ordinary, which plain torch must take.

    The scores are float32 or float64. Without `k` each row has its number of labels.
    """
    x = x.contiguous()
    loss, slope = x.new_empty(x.shape[:-1]), torch.empty_like(x) if gradient else None
    n, double = x.shape[-1], x.dtype is torch.float64
    mask_stride = k_address = k_stride = labels = dense_type = 0
    if mask is not None:
        mask, mask_stride = _read_mask(mask, n)
    if isinstance(k, Tensor):
        k = k.contiguous()
        k_address, k_stride = k.data_ptr(), 1
    elif k is not None:
        number = ctypes.c_double(k) if double else ctypes.c_float(k)
        k_address = _ADDRESS(number)
    if index is not None:
        labels, index = index.shape[-1], index.contiguous()
    if dense is not None:
        dense, dense_type = _read_dense(dense)
    call = _PACK(
        loss.numel(), n, x.data_ptr(), k_address, k_stride, 0 if mask is None else mask.data_ptr(), mask_stride, 1.0,
        _KINDS["fenchel young"], _THREADS(), loss.data_ptr(), 0, 0, 0, 0, 0, 1.0,
        0 if index is None else index.data_ptr(), labels, 0 if dense is None else dense.data_ptr(), dense_type, 0, 0,
        0, 0, 0, 0 if slope is None else slope.data_ptr(), 0, 1.0, 0,
    )  # fmt: skip
    problem = _RUN(call, double, _LOSS_FORWARD)
    if problem == 1:
        raise MemoryError(_NO_MEMORY)
    return None if problem else (loss, loss if slope is None else slope)


def scaled_to_half(slope: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    """Return float32 numbers times a factor in half precision."""
    out = torch.empty_like(slope, dtype=dtype)
    _SCALE(slope.data_ptr(), factor, out.data_ptr(), slope.numel(), _HALF[dtype], _THREADS())
    return out


def reduced_loss_rows(
    logits: Tensor,
    k: Tensor | float,
    mask: Tensor | None,
    temperature: float,
    observed: float,
    index: Tensor | None,
    dense: Tensor | None,
    mean: bool,
) -> Tensor:
    """Return what describes the rows of the reduced loss, as one tensor ``(6, rows)``.

    It holds the loss, ``center``, ``delta``, ``log_mass``, ``pull`` and the weight of each row.
    """
    x = logits if logits.itemsize > 3 and logits.is_contiguous() else _read(logits)
    rows, total = x.new_empty((6, *x.shape[:-1])), x.new_zeros(())
    _run_reduced(_LOSS_FORWARD, x, k, mask, temperature, observed, index, dense, rows, rows, None, None, total, mean)
    return rows


def reduced_loss_backward(
    logits: Tensor,
    mask: Tensor | None,
    temperature: float,
    observed: float,
    index: Tensor | None,
    dense: Tensor | None,
    rows: Tensor,
    grad: Tensor,
    with_k: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of logits and, if wanted, of k, for the one gradient of the reduced loss."""
    x = logits if logits.itemsize > 3 and logits.is_contiguous() else _read(logits)
    grad_logits = torch.empty_like(x)
    grad_k = x.new_empty((*x.shape[:-1], 1)) if with_k else None
    grad = grad if grad.dtype == x.dtype else grad.to(x.dtype)
    _run_reduced(
        _LOSS_BACKWARD, x, 0.0, mask, temperature, observed, index, dense, rows, grad_logits, grad, grad_k, None, False
    )
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
        mask, mask_stride = _read_mask(mask, n)
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
        dense, dense_type = _read_dense(dense)
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
        0 if pull is None else pull.data_ptr(), 0, 0, 0, 0, 0, 1.0, 0,
    )  # fmt: skip
    if _RUN(call, double, operation):
        raise MemoryError(_NO_MEMORY)


def _run_short(
    operation: int,
    x: Tensor,
    mask: Tensor | None,
    temperature: float,
    k: float | Tensor,
    out: Tensor,
    rows: Tensor | None,
    grad: Tensor | None,
    kind: str,
) -> None:
    """Run the common call: y, or its gradient."""
    n, dtype, size, mask_stride = x.shape[-1], x.dtype, x.numel(), 0
    double = dtype is torch.float64
    if size == 0:
        return
    if mask is not None:
        mask, mask_stride = _read_mask(mask, n)
    if isinstance(k, Tensor):
        k = k.contiguous()
        k_address, k_stride = k.data_ptr(), 1
    else:
        number = ctypes.c_double(k) if double else ctypes.c_float(k)
        k_address, k_stride = _ADDRESS(number), 0
    count = size // n
    center = 0 if rows is None else rows.data_ptr()
    call = _PACK(
        count, n, x.data_ptr(), k_address, k_stride, 0 if mask is None else mask.data_ptr(), mask_stride,
        temperature, _KINDS[kind], _THREADS(), out.data_ptr(), center, center and center + (count << 2 + double),
        0 if grad is None else grad.data_ptr(), 0, 0, 0.0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1.0,
        _HALF.get(dtype, 0),
    )  # fmt: skip
    if _RUN(call, double, operation):
        raise MemoryError(_NO_MEMORY)


def _run_reduced(
    operation: int,
    x: Tensor,
    k: Tensor | float,
    mask: Tensor | None,
    temperature: float,
    observed: float,
    index: Tensor | None,
    dense: Tensor | None,
    rows: Tensor | None,
    out: Tensor | None,
    grad: Tensor | None,
    grad_k: Tensor | None,
    total: Tensor | None,
    mean: bool,
    slope: Tensor | None = None,
    over: ctypes.c_double | None = None,
) -> None:
    """Run a pass of the reduced loss; the numbers of the rows stand one behind the other in `rows`."""
    n, double = x.shape[-1], x.dtype == torch.float64
    count = x.numel() // n if n else x.shape[:-1].numel()
    mask_stride = k_stride = labels = dense_type = 0
    if count == 0:
        if total is not None:
            total.zero_()
        return
    if mask is not None:
        mask, mask_stride = _read_mask(mask, n)
    if isinstance(k, Tensor):
        k = k.to(torch.float64 if double else torch.float32).contiguous()
        k_address, k_stride = k.data_ptr(), 1
    else:
        number = ctypes.c_double(k) if double else ctypes.c_float(k)
        k_address = ctypes.addressof(number)
    if index is not None:
        labels, index = index.numel() // count, index.contiguous()
    if dense is not None:
        dense, dense_type = _read_dense(dense)
    first, place = (0, 0) if rows is None else (rows.data_ptr(), count * x.itemsize)
    call = CALL.pack(
        count, n, x.data_ptr(), k_address, k_stride, 0 if mask is None else mask.data_ptr(), mask_stride,
        temperature, 0, torch.get_num_threads(), 0 if out is None else out.data_ptr(), first + place, first + 2 * place,
        0 if grad is None else grad.data_ptr(), 0, 0 if grad_k is None else grad_k.data_ptr(), observed,
        0 if index is None else index.data_ptr(), labels, 0 if dense is None else dense.data_ptr(), dense_type,
        first + 3 * place, first + 4 * place, first + 5 * place, 0 if total is None else total.data_ptr(), mean,
        0 if slope is None else slope.data_ptr(), 0 if over is None else ctypes.addressof(over), 1.0,
        _HALF.get(x.dtype, 0),
    )  # fmt: skip
    problem = _RUN(call, double, operation)
    if problem:
        raise IndexError if problem == 2 else MemoryError(_NO_MEMORY)


def _read_mask(mask: Tensor, n: int) -> tuple[Tensor, int]:
    """Return the mask in an order that the library reads, and the distance from one row to the next."""
    if mask.stride(-1) == 1 and all(s == 0 or d == 1 for s, d in zip(mask.stride(), mask.shape[:-1], strict=False)):
        return mask, 0
    return mask.contiguous(), n


def _read_dense(dense: Tensor) -> tuple[Tensor, int]:
    """Return a dense target in a type that the library reads, and the number of that type."""
    if dense.dtype not in _DENSE:
        dense = dense.float() if dense.itemsize < 4 else dense.double()
    return dense.contiguous(), _DENSE[dense.dtype]
