"""The kernels as operators that `torch.compile` looks into: it launches them like its own.

An ordinary custom operator is a wall to the compiler, and its Python runs at every call. These are for rows that one
program holds, with a number of classes that is known when the graph is compiled; the number of rows may vary. All other
calls go on to the operators of `lastlayer._threshold.operators`.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.library import triton_op, wrap_triton

from lastlayer._triton import lml_backward, lml_loss
from lastlayer._triton import plan as shapes
from lastlayer._triton.lml import _resident as project
from lastlayer._triton.lml_backward import _resident as differentiate
from lastlayer._triton.rows import Rows


def fits(x: Tensor, longest: int = shapes.LONGEST) -> bool:
    """Whether there are rows, each of which one program holds: of classes the number is plain, of rows it may vary.

    It may not be known from the data alone, as that of ``x[x[:, 0] > 0]``, since then the rows may be none or one.
    """
    n = x.shape[-1]
    return isinstance(n, int) and 0 < n <= longest and not free_unbacked_symbols(tuple(x.shape)) and x.numel() > 0


def as_bytes(value: Tensor | None) -> Tensor | None:
    """Return a tensor of booleans as bytes, by a conversion: the compiler cannot look at the same memory as both."""
    return value.to(torch.uint8) if value is not None and value.dtype == torch.bool else value


def one_or_each(k: Tensor, rows: int) -> tuple[Tensor, int]:
    """Return `k` as a vector with the stride from row to row: 0 if it is one number for all rows."""
    if all(step == 0 or size == 1 for step, size in zip(k.stride(), k.shape, strict=True)):
        return k[(slice(0, 1),) * k.ndim].reshape(1), 0
    return k.reshape(rows).contiguous(), 1


@triton_op("lastlayer::lml_forward_inline", mutates_args={})
def forward(
    logits: Tensor, k: Tensor, mask: Tensor | None, temperature: float, kind: str
) -> tuple[Tensor, Tensor, Tensor]:
    if not fits(logits):
        result: tuple[Tensor, Tensor, Tensor] = torch.ops.lastlayer.lml_forward(
            logits, k, mask, temperature, kind, "triton"
        )
        return result
    n, x = logits.shape[-1], logits.contiguous()
    out = x.new_empty(0) if kind == "nu" else torch.empty_like(x)
    center = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    delta = torch.empty_like(center)
    rows = center.numel()
    p = shapes.exact(n, shapes.FORWARD[x.element_size()], x.element_size())
    given = Rows(x.view(rows, n), None, as_bytes(mask), temperature, p.align)
    size, step = one_or_each(k, rows)
    *tail, inverse = given.tail
    wrap_triton(project)[(shapes.cdiv(rows, p.rows),)](
        *given.head, size, x if kind == "nu" else out, center, delta, rows, *tail, step, inverse,
        **p.tiles, KIND=kind, MASKED=given.masked, TOL=given.tolerance, SETTLE=True, num_warps=p.warps,
    )  # fmt: skip
    return out, center, delta


@triton_op("lastlayer::lml_backward_inline", mutates_args={})
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
    if not fits(logits, lml_backward.LONGEST):
        result: tuple[Tensor, Tensor] = torch.ops.lastlayer.lml_backward(
            logits, mask, temperature, center, delta, grad_out, grad_delta, kind, "triton"
        )
        return result
    n, x = logits.shape[-1], logits.contiguous()
    dx, dk = torch.empty_like(x), torch.empty_like(delta, memory_format=torch.contiguous_format)
    rows = dk.numel()
    p = shapes.exact(n, shapes.BACKWARD[x.element_size()], x.element_size())
    given = Rows(x.view(rows, n), None, as_bytes(mask), temperature, p.align)
    g = x if grad_out is None else grad_out.contiguous()
    gd = center if grad_delta is None else grad_delta.contiguous()
    wrap_triton(differentiate)[(shapes.cdiv(rows, p.rows),)](
        *given.head, g, gd, center.contiguous(), delta.contiguous(), dx, dk, rows, *given.tail,
        **p.tiles, KIND="nu" if grad_out is None else kind, GIVEN=grad_delta is not None, MASKED=given.masked,
        num_warps=p.warps,
    )  # fmt: skip
    return dx, dk


@triton_op("lastlayer::lml_reduced_loss_inline", mutates_args={})
def reduced_loss(
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
    """As the operator `lml_reduced_loss`; the weights of rows, and the sum, are left to the compiler's own kernels."""
    if not fits(logits):
        result: tuple[Tensor, Tensor, Tensor, Tensor] = torch.ops.lastlayer.lml_reduced_loss(
            logits, k, mask, temperature, rho, index, dense, weight, mean
        )
        return result
    n, x = logits.shape[-1], logits.contiguous()
    batch = x.shape[:-1]
    loss = x.new_empty(batch, dtype=torch.float32)
    numbers = [x.new_empty((*batch, 1), dtype=torch.float32) for _ in range(4)]
    grad = torch.empty_like(x)
    rows = loss.numel()
    # A new tensor in any case: an operator does not return what it was given.
    weight = lml_loss.plain_weights(index, dense, n, rho is not None, mean) if weight is None else weight.clone()
    count = weight is None
    if weight is None:
        weight = x.new_empty((), dtype=torch.float32)
    target = lml_loss.Target(x, index, as_bytes(dense))
    p = shapes.exact(n, (shapes.LOSS if dense is None else shapes.DENSE)[x.element_size()], x.element_size())
    given = Rows(x.view(rows, n), None, as_bytes(mask), temperature, p.align)
    size, step = one_or_each(k, rows)
    factor, factor_step = lml_loss.per_row(weight, batch)
    *tail, inverse = given.tail
    wrap_triton(lml_loss._resident)[(shapes.cdiv(rows, p.rows),)](
        *given.head, size, target.index, target.dense, factor, grad, loss, *numbers, rows, *tail, step, inverse,
        factor_step, target.n_labels, 0.0 if rho is None else rho,
        **p.tiles, **target.options, RHO=0 if rho is None else 2, GRAD=True, COUNT=count, MASKED=given.masked,
        TOL=given.tolerance_of_mass, SETTLE=True, num_warps=p.warps,
    )  # fmt: skip
    return loss.sum(), torch.stack(numbers), grad, weight
