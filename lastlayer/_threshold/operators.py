"""The kernels as registered operators: what the compiler, fake tensors, dispatch modes and subclasses see of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from lastlayer import _check
from lastlayer._threshold.dispatch import kernels

_library = torch.library.Library("lastlayer", "FRAGMENT")
Function = TypeVar("Function", bound=Callable[..., Any])
# For operators that read values back, which the compiler must not capture in a CUDA graph; older torch lacks the tag.
WAITS: tuple[torch.Tag, ...] = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()


def operator(name: str, *tags: torch.Tag) -> Callable[[Function], Function]:
    """Register a function as an operator.

    `torch.library.custom_op` does the same with more Python at every call, and imports the compiler at the first, which
    takes more than a second. Its checks are not needed: no operator changes or returns an argument, and autograd does
    not see them, since they are called within a Function.
    """

    def register(function: Function) -> Function:
        schema = torch.library.infer_schema(function, mutates_args=())
        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
        _library.impl(name, function, "CompositeExplicitAutograd")
        return function

    return register


def fake(name: str) -> Callable[[Function], Function]:
    """Register what an operator does to fake tensors."""

    def register(function: Function) -> Function:
        torch.library.register_fake(f"lastlayer::{name}", function, lib=_library)
        return function

    return register


def _like(logits: Tensor) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _one_per_row(logits: Tensor) -> Tensor:
    return logits.new_empty((*logits.shape[:-1], 1), dtype=_check.work_dtype(logits))


@operator("lml_forward")
def _forward(
    logits: Tensor, k: Tensor, mask: Tensor | None, temperature: float, kind: str, impl: str
) -> tuple[Tensor, Tensor, Tensor]:
    return kernels(impl).forward(logits, k, mask, temperature, kind)


@fake("lml_forward")
def _(logits: Tensor, k: Tensor, mask: Tensor | None, temperature: float, kind: str, impl: str) -> tuple[Tensor, ...]:
    out = logits.new_empty(0) if kind == "nu" else _like(logits)
    return out, _one_per_row(logits), _one_per_row(logits)


@operator("lml_backward")
def _backward(
    logits: Tensor,
    mask: Tensor | None,
    temperature: float,
    center: Tensor,
    delta: Tensor,
    grad_out: Tensor | None,
    grad_delta: Tensor | None,
    kind: str,
    impl: str,
) -> tuple[Tensor, Tensor]:
    return kernels(impl).backward(logits, mask, temperature, center, delta, grad_out, grad_delta, kind)


@fake("lml_backward")
def _(logits: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return _like(logits), _one_per_row(logits)


@operator("lml_loss_forward")
def _loss_forward(
    logits: Tensor,
    k: Tensor,
    mask: Tensor | None,
    temperature: float,
    rho: float,
    index: Tensor | None,
    dense: Tensor | None,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    loss, *numbers = kernels(impl).loss_forward(logits, k, mask, temperature, rho, index, dense)
    center, delta, log_mass, pull = (value.clone() for value in numbers)  # an operator's results share no memory
    return loss, center, delta, log_mass, pull


@fake("lml_loss_forward")
def _(logits: Tensor, *_: Any) -> tuple[Tensor, ...]:
    rows = [_one_per_row(logits) for _ in range(5)]
    return rows[0].squeeze(-1), *rows[1:]


@operator("lml_loss_backward")
def _loss_backward(
    logits: Tensor,
    mask: Tensor | None,
    temperature: float,
    rho: float,
    index: Tensor | None,
    dense: Tensor | None,
    center: Tensor,
    delta: Tensor,
    log_mass: Tensor,
    pull: Tensor,
    grad: Tensor,
    impl: str,
) -> tuple[Tensor, Tensor]:
    arguments = (logits, mask, temperature, rho, index, dense, center, delta, log_mass, pull, grad)
    return kernels(impl).loss_backward(*arguments)


@fake("lml_loss_backward")
def _(logits: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return _like(logits), _one_per_row(logits)


@operator("lml_reduced_loss")
def _reduced_loss(
    logits: Tensor,
    k: Tensor,
    mask: Tensor | None,
    temperature: float,
    rho: Tensor | None,
    index: Tensor | None,
    dense: Tensor | None,
    weight: Tensor | None,
    mean: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the reduced loss, four numbers per row, the gradient, and the weights of the rows; on a GPU.

    `rho` is a tensor, since the graph would be compiled again for each number.
    """
    triton = kernels("triton")
    if weight is None:
        weight = triton.row_weights(index, dense, logits.shape[-1], rho is not None, mean)
    else:
        weight = weight.clone()  # an operator does not return what it was given
    observed = 0.0 if rho is None else rho
    loss, *others = triton.loss_forward_with_grad(logits, k, mask, temperature, observed, index, dense, weight)
    rows, grad, weight = others
    return loss.sum(), rows, grad, weight


@fake("lml_reduced_loss")
def _(logits: Tensor, *others: Any) -> tuple[Tensor, ...]:
    *_, dense, weight, _ = others
    total = logits.new_empty((), dtype=torch.float32)
    rows = total.new_empty((4, *logits.shape[:-1], 1))
    weights = (
        total.new_empty(() if dense is None else logits.shape[:-1]) if weight is None else torch.empty_like(weight)
    )
    return total, rows, _like(logits), weights
