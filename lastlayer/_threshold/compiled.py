"""Projections by the compiled operations of `_native/fused.py`, both ways; plain torch takes what they do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lastlayer import _native
from lastlayer._threshold.dispatch import differentiated, direct, recorded, transformed

Pull = Callable[[Tensor, Tensor, Tensor], Tensor | None]


def compiled(x: Tensor, *others: Any) -> bool:
    """Whether the compiled operations apply: plain float32 or half precision on the CPU, a gradient for `x` at most."""
    if not x.is_cpu or _native.missing or x.itemsize > 4 or x.numel() == 0 or recorded(*others):
        return False
    return direct(x, *others) and not transformed() and not torch.jit.is_tracing()


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
