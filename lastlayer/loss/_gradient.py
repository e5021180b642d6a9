"""Losses whose gradient has a closed form: computed together with the loss, in few passes over the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lastlayer._threshold.dispatch import differentiated, direct, recorded, transformed


def at_once(x: Tensor, *others: Tensor | None) -> bool:
    """Whether an ordinary backward pass may follow, for `x` alone, so that the gradient is worth computing now.

    Only on the CPU: closed forms look at values, for which a GPU would have to be waited for.
    """
    if not (x.is_cpu and x.numel() > 0 and recorded(x)) or recorded(*others):
        return False
    return direct(x, *others) and not transformed() and not torch.jit.is_tracing()


def with_gradient(x: Tensor, loss: Tensor, grad: Tensor, plain: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the loss of each row of `x`, whose gradient is `grad`; both must come without a graph.

    `plain` computes the same loss by differentiable operations: for second derivatives, and for batches of gradients.
    """
    result: Tensor = _WithGradient.apply(x, loss, grad, plain)
    return result


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, grad: Tensor, plain: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.plain = plain
        ctx.save_for_backward(x, grad)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, grad = ctx.saved_tensors
        (upstream,) = grads
        if differentiated(upstream):
            further = torch.is_grad_enabled()
            with torch.enable_grad():
                loss = ctx.plain(x)
            (grad,) = torch.autograd.grad(loss, x, upstream, create_graph=further)
            return grad, None, None, None
        return grad * upstream.unsqueeze(-1), None, None, None
