"""The kernels as registered operators: what the compiler, fake tensors, dispatch modes and subclasses see of them."""

from __future__ import annotations

import torch
from torch import Tensor

from lastlayer import _check
from lastlayer._threshold.dispatch import kernels


@torch.library.custom_op("lastlayer::lml_forward", mutates_args=())
def _forward(
    logits: Tensor, k: Tensor, mask: Tensor | None, temperature: float, kind: str, impl: str
) -> tuple[Tensor, Tensor, Tensor]:
    return kernels(impl).forward(logits, k, mask, temperature, kind)


@_forward.register_fake
def _(
    logits: Tensor, k: Tensor, mask: Tensor | None, temperature: float, kind: str, impl: str
) -> tuple[Tensor, Tensor, Tensor]:
    row = logits.new_empty((*logits.shape[:-1], 1), dtype=_check.work_dtype(logits))
    out = logits.new_empty(0) if kind == "nu" else torch.empty_like(logits, memory_format=torch.contiguous_format)
    return out, row, torch.empty_like(row)


@torch.library.custom_op("lastlayer::lml_backward", mutates_args=())
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


@_backward.register_fake
def _(
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
    return torch.empty_like(logits, memory_format=torch.contiguous_format), torch.empty_like(delta)


@torch.library.custom_op("lastlayer::lml_loss_forward", mutates_args=())
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


@_loss_forward.register_fake
def _(
    logits: Tensor,
    k: Tensor,
    mask: Tensor | None,
    temperature: float,
    rho: float,
    index: Tensor | None,
    dense: Tensor | None,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    row = logits.new_empty((*logits.shape[:-1], 1), dtype=_check.work_dtype(logits))
    return row.new_empty(row.shape[:-1]), row, torch.empty_like(row), torch.empty_like(row), torch.empty_like(row)


@torch.library.custom_op("lastlayer::lml_loss_backward", mutates_args=())
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


@_loss_backward.register_fake
def _(
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
    return torch.empty_like(logits, memory_format=torch.contiguous_format), torch.empty_like(delta)


@torch.library.custom_op("lastlayer::lml_loss_with_grad", mutates_args=())
def _loss_with_grad(
    logits: Tensor,
    k: Tensor,
    mask: Tensor | None,
    temperature: float,
    rho: float,
    index: Tensor | None,
    dense: Tensor | None,
    weight: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weighted loss of each row, four numbers per row, and the gradient of the sum; on a GPU."""
    return kernels("triton").loss_forward_with_grad(logits, k, mask, temperature, rho, index, dense, weight)[:3]


@_loss_with_grad.register_fake
def _(
    logits: Tensor,
    k: Tensor,
    mask: Tensor | None,
    temperature: float,
    rho: float,
    index: Tensor | None,
    dense: Tensor | None,
    weight: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    loss = logits.new_empty(logits.shape[:-1], dtype=torch.float32)
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    return loss, loss.new_empty((4, *loss.shape, 1)), grad
