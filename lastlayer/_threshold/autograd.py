"""The glue between autograd Functions, the functional transforms and the kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lastlayer.shard import ClassShard


def without_transforms(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """Return the same Function with `setup_context` inside `forward`, which saves autograd the binding of arguments."""

    def forward(ctx: Any, *inputs: Any) -> Any:
        output = function.forward(*inputs)
        function.setup_context(ctx, inputs, output)
        return output

    members = {"forward": staticmethod(forward), "backward": staticmethod(function.backward)}
    return type(f"{function.__name__}Backward", (torch.autograd.Function,), members)


def directly(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return ``function.apply`` for tensors that are known to be plain: torch looks at each for a transform."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def apart(*values: Any) -> list[Any]:
    """Return the tensors among the values as views, by which gradients can be taken of each alone.

    The user may have computed one from another: a gradient by the tensors themselves would go on through that.
    """
    return [value.view_as(value) if isinstance(value, Tensor) else value for value in values]


def nestable(jvp: Callable[..., Any]) -> Callable[..., Any]:
    """Let an outer forward mode differentiate a `jvp`, as ``jacfwd(jacfwd(f))`` does.

    torch calls it with forward mode off at all levels, so that the outer derivative would silently be 0. Here it is
    on, and the saved tensors come without the tangents of this level, which are in the other arguments.
    """

    @functools.wraps(jvp)
    def wrapper(ctx: Any, *tangents: Any) -> Any:
        with forward_ad._set_fwd_grad_enabled(True):
            saved = [None if t is None else forward_ad.unpack_dual(t).primal for t in ctx.saved_tensors]
            return jvp(SimpleNamespace(**vars(ctx), saved_tensors=saved), *tangents)

    return wrapper


def mapped(batch_size: int, in_dims: tuple[Any, ...], x: Tensor, *others: Any) -> list[Any]:
    """Return the inputs of a ``vmap`` rule with the mapped dimension first, for rows ``(..., n)``.

    Every leading dimension of the rows is a batch dimension, so the mapped one joins them. Tensors among `others`
    have the rows of `x` and any last dimension; they are expanded.
    """
    values = [
        value.movedim(where, 0) if isinstance(value, Tensor) and where is not None else value
        for value, where in zip((x, *others), in_dims, strict=False)
    ]
    rows = (batch_size, *values[0].shape[in_dims[0] is not None : -1])
    return [value.expand(*rows, value.shape[-1]) if isinstance(value, Tensor) else value for value in values]


def stacked(in_dims: tuple[Any, ...], tensors: tuple[Tensor, ...], *, own: int = 1) -> list[Tensor]:
    """Bring the tensors of a batch of calls to one batch shape, in front of the last `own` dimensions of each."""
    first = [t.unsqueeze(0) if d is None else t.movedim(d, 0) for t, d in zip(tensors, in_dims, strict=True)]
    batch = torch.broadcast_shapes(*(t.shape[:-own] for t in first))
    return [t.expand(*batch, *t.shape[-own:]) for t in first]


def broken_rows(delta: Tensor, grad_out: Tensor | None, grad_delta: Tensor | None, shard: ClassShard | None) -> Tensor:
    """Return which rows have a nan gradient: those without a solution whose upstream gradient is not 0.

    Sharded, all rows without a solution: whether any rank has a gradient would cost a collective.
    """
    broken = delta.isnan()
    if shard is not None:
        return broken
    asked = [(g != 0).any(-1, keepdim=True) for g in (grad_out, grad_delta) if g is not None]
    return broken & (asked[0] | asked[-1])


class FirstOnly(torch.autograd.Function):
    """Hand gradients on, and raise an error with this message where they are to be differentiated.

    The inputs are those that the gradients depend on, `n` of them, and then the gradients.
    """

    @staticmethod
    def forward(ctx: Any, message: str, n: int, *values: Any) -> tuple[Tensor | None, ...]:
        ctx.message = message
        return tuple(None if value is None else value.view_as(value) for value in values[n:])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(ctx.message)
