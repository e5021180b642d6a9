"""Losses whose gradient has a closed form: computed together with the loss, in few passes over the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lastlayer import _check
from lastlayer._check import Labels, Reduction
from lastlayer._threshold.compiled import by_kernels, compiled, fused, on_gpu
from lastlayer._threshold.dispatch import differentiated, direct, recorded, scaled
from lastlayer.loss import _rows
from lastlayer.shard import ClassShard

Times = Callable[[Tensor, Tensor], Tensor]


class Rows(NamedTuple):
    """One loss per row, which of them count in the mean, and further numbers of the rows."""

    loss: Tensor
    counts: Tensor
    extra: Tensor


def at_once(
    name: str, x: Tensor, labels: Labels, numbers: tuple[float, ...], plain: Callable[[Tensor], Tensor], **more: Any
) -> Rows | None:
    """Compute a loss and its gradient by the compiled operation `name`; None where plain torch must.

    `x` are the scores as the user gave them, in float32; `more` goes to the operation. `plain` computes the same losses
    by differentiable operations: for second derivatives, and for batches of gradients.
    """
    if not compiled(x, labels.dense, labels.index, *(t for t in more.values() if isinstance(t, Tensor))):
        return None
    wanted = recorded(x)
    found = fused(x).run(name, x.detach(), labels, numbers, gradient=wanted, **more)
    if found is None:
        return None
    if not wanted:
        return Rows(found.loss, found.counts, found.extra)
    times: dict[str, Times] = {"two_way_columns": torch.mul}
    if on_gpu(x):
        times["fenchel_young"] = _by_solved_row
    loss = with_gradient(x, found.loss, found.out, plain, times.get(name, _by_row))
    return Rows(loss, found.counts, found.extra)


class End(NamedTuple):
    """What becomes of the losses of the rows: the arguments of `_rows.leave`."""

    op: str
    reduction: Reduction
    dtype: torch.dtype
    sample_weight: Tensor | None

    def of(self, loss: Tensor, counts: Tensor | None) -> Tensor:
        """Return the result for one loss per row."""
        return _rows.leave(self.op, loss, self.reduction, counts, self.dtype, self.sample_weight)

    def of_number(self, loss: Tensor) -> Tensor:
        """Return the result for a loss that is reduced."""
        return loss if self.dtype == loss.dtype else _rows.leave(self.op, loss, "none", None, self.dtype)

    @property
    def number(self) -> bool:
        """Whether kernels can compute the reduced loss: a mean or a sum of rows without weights."""
        return self.sample_weight is None and self.reduction in ("mean", "sum")


def reduced_at_once(
    end: End,
    name: str,
    x: Tensor,
    labels: Labels,
    numbers: tuple[float, ...],
    plain: Callable[[Tensor], Tensor],
    **more: Any,
) -> Tensor | None:
    """As `at_once`, and reduce the losses of the rows: on a GPU by a kernel, so that there is one node of the graph."""
    direct = end.number and on_gpu(x) and compiled(x, labels.dense, labels.index, *more.values())
    kernels = fused(x) if direct else None
    rows, n = x.shape[:-1].numel() if direct else 0, x.shape[-1]  # the number of rows would be fixed in an export
    if kernels is None or not (kernels.takes(name, rows, n, numbers) and kernels.sums(rows, n)):
        found = at_once(name, x, labels, numbers, plain, **more)
        return None if found is None else end.of(found.loss, found.counts)
    mean = end.reduction == "mean"

    # Most often every row counts: the gradient is written for that, and then nothing is left to do. That of float16 is
    # not, since the upstream gradient may be there to keep it from underflow.
    held: list[Tensor] = []
    over = rows if mean and x.dtype != torch.float16 else 1

    def forward(x: Tensor, gradient: bool) -> tuple[Tensor, ...]:
        found = kernels.run(name, x, labels, numbers, gradient=gradient, scale=1 / over, **more)
        held[:] = [found.out]
        total, factor = kernels.reduced(found, mean, over)
        return total, factor, found.counts

    def backward(upstream: Tensor, x: Tensor, factor: Tensor, counts: Tensor) -> Tensor:
        if not held:  # handed over to an earlier backward pass
            forward(x, True)
        grad: Tensor = kernels.scaled_(held.pop(), upstream, factor)
        return grad

    def again(x: Tensor, factor: Tensor, counts: Tensor) -> Tensor:
        return _check.reduced(end.op, plain(x), end.reduction, counts)

    return end.of_number(by_kernels(x, forward, backward, again))


def per_class(
    end: End,
    name: str,
    x: Tensor,
    labels: Labels,
    numbers: tuple[float, ...],
    plain: Callable[[Tensor], Tensor],
    shard: ClassShard | None,
    each: Tensor | None,
    positive: Tensor | None,
) -> Tensor:
    """Return the loss of a batch whose rows have a sum over their classes; an empty name is `plain`.

    A row counts in the mean if a class takes part.
    """
    if name and shard is None:
        loss = reduced_at_once(end, name, x, labels, numbers, plain, each=each, positive=positive)
        if loss is not None:
            return loss
    return end.of(plain(x), _rows.any_class(_rows.taking_part(x, labels)[1], shard))


def _by_row(grad: Tensor, upstream: Tensor) -> Tensor:
    return grad * upstream.unsqueeze(-1)


def _by_solved_row(grad: Tensor, upstream: Tensor) -> Tensor:
    """As `_by_row`, on a GPU; but 0 times nan, the gradient of a row without a solution, is 0."""
    if direct(grad, upstream):
        found: Tensor = fused(grad).of_rows(grad, upstream)
        return found
    return scaled(grad, upstream.unsqueeze(-1))


def with_gradient(
    x: Tensor, loss: Tensor, grad: Tensor, plain: Callable[[Tensor], Tensor], times: Times = _by_row
) -> Tensor:
    """Return the loss of each row of `x`, or of each column, whose gradient is `grad`; both must come without a graph.

    `times` multiplies that by the upstream gradient. `plain` computes the same loss by differentiable operations: for
    second derivatives, and for batches of gradients.
    """
    result: Tensor = _WithGradient.apply(x, loss, grad, plain, times)
    return result


def with_shared_term(
    x: Tensor, loss: Tensor, grad: Tensor, part: Tensor, term: Tensor, plain: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the losses of rows in which a number of the whole batch has a part: one number per row.

    The gradient of a row's loss is its own row of `grad`, and its part times `term`, the gradient of the shared number.
    """
    result: Tensor = _WithSharedTerm.apply(x, loss, grad, part, term, plain)
    return result


class _WithSharedTerm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, loss: Tensor, grad: Tensor, part: Tensor, term: Tensor, plain: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.plain = plain
        ctx.save_for_backward(x, grad, part, term)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, grad, part, term = ctx.saved_tensors
        (upstream,) = grads
        if differentiated(upstream):
            further = torch.is_grad_enabled()
            with torch.enable_grad():
                loss = ctx.plain(x)
            (grad,) = torch.autograd.grad(loss, x, upstream, create_graph=further)
        else:
            grad = torch.addcmul(grad * upstream.unsqueeze(-1), term, (upstream * part).sum())
        return grad, None, None, None, None, None


class _WithGradient(torch.autograd.Function):
    """One loss per row, or per column of a batch, whose gradient is known."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, loss: Tensor, grad: Tensor, plain: Callable[[Tensor], Tensor], times: Times
    ) -> Tensor:
        ctx.plain, ctx.times = plain, times
        ctx.save_for_backward(x, grad)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, grad = ctx.saved_tensors
        (upstream,) = grads
        if differentiated(upstream):
            further = torch.is_grad_enabled()
            with torch.enable_grad():
                loss = ctx.plain(x)
            (grad,) = torch.autograd.grad(loss, x, upstream, create_graph=further)
            return grad, None, None, None, None
        return ctx.times(grad, upstream), None, None, None, None
