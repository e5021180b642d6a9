"""Losses and projections by compiled operations, both ways; plain torch takes what they do not.

There are two doors of the same form: `_native/fused.py` for the CPU, and `_triton/fused.py` for the GPU.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lastlayer import _native, _triton
from lastlayer._threshold.autograd import directly
from lastlayer._threshold.dispatch import differentiated, direct, recorded, transformed

Pull = Callable[[Tensor, Tensor, Tensor], Tensor | None]


def compiled(x: Tensor, *others: Any) -> bool:
    """Whether the compiled operations apply: plain tensors of float32 or half precision, a gradient for `x` at most."""
    if x.itemsize > 4 or x.numel() == 0 or recorded(*others):
        return False
    if not (on_gpu(x) if x.is_cuda or _triton.INTERPRETED else x.is_cpu and not _native.missing):
        return False
    return direct(x, *others) and not transformed() and not torch.jit.is_tracing()


def on_gpu(x: Tensor) -> bool:
    """Whether the compiled operations on `x` are those of the GPU."""
    return not _triton.unavailable(x.device)


def fused(x: Tensor) -> Any:
    """Return the module whose ``run`` does the compiled operations on the device of `x`."""
    return _door("lastlayer._triton.fused" if on_gpu(x) else "lastlayer._native.fused")


@functools.cache
def _door(name: str) -> Any:
    return importlib.import_module(name)


def by_kernels(
    x: Tensor,
    forward: Callable[..., tuple[Tensor, ...]],
    backward: Callable[..., Tensor],
    plain: Callable[..., Tensor],
) -> Tensor:
    """Return the first of ``forward(x, recorded)``; its gradient is ``backward(upstream, x, *the others)``.

    ``plain(x, *the others)`` computes the same by differentiable operations: for second derivatives, and for batches of
    gradients. The tensors must be plain.
    """
    result: Tensor
    result = _through_kernels(x, forward, backward, plain) if recorded(x) else forward(x, False)[0]
    return result


class _ByKernels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Any, backward: Any, plain: Any) -> Tensor:
        result: Tensor
        result, *others = forward(x, True)
        ctx.back, ctx.plain = backward, plain
        ctx.save_for_backward(x, *others)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, *others = ctx.saved_tensors
        (upstream,) = grads
        if not differentiated(upstream) and direct(x, upstream):
            return ctx.back(upstream, x, *others), None, None, None
        further = torch.is_grad_enabled()
        with torch.enable_grad():
            (grad,) = torch.autograd.grad(ctx.plain(x, *others), x, upstream, create_graph=further)
        return grad, None, None, None


_through_kernels = directly(_ByKernels)


def projected(x: Tensor, y: Tensor, pull: Pull, plain: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the projection `y` of `x`; its gradient is ``pull(x, y, upstream)``, or that of `plain` if that is None.

    `plain` computes the same by differentiable operations: for second derivatives, and for batches of gradients.
    """
    if not recorded(x):
        return y
    result: Tensor = _Projected.apply(x, y, pull, plain)
    return result


class _Projected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, pull: Pull, plain: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.pull, ctx.plain = pull, plain
        ctx.save_for_backward(x, y)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, y = ctx.saved_tensors
        (upstream,) = grads
        grad = None
        if not differentiated(upstream) and direct(x, y, upstream):
            grad = ctx.pull(x.detach(), y, upstream)
        if grad is None:
            further = torch.is_grad_enabled()
            with torch.enable_grad():
                (grad,) = torch.autograd.grad(ctx.plain(x), x, upstream, create_graph=further)
        return grad, None, None, None
