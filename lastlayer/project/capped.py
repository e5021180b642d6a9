"""Relatives of the LML projection on the same polytope: capped softmax (entropy) and capped sparsemax (distance)."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from lastlayer import _check
from lastlayer._module import FunctionModule
from lastlayer._threshold.autograd import broken_rows, mapped, nestable
from lastlayer._threshold.compiled import by_kernels, compiled, fused, on_gpu, projected
from lastlayer._threshold.dispatch import Problem, enter, recorded, transformed
from lastlayer._threshold.search import feasible, finite_part, kinds, scores, sizes
from lastlayer._threshold.whole import whole_projection
from lastlayer.shard import ClassShard, kth_largest, reduce

Kind = Literal["softmax", "sparsemax"]

_PASSES = 24  # bounds the search; the rows of tests/project/test_capped.py take up to 9


@whole_projection()
def capped_softmax(
    logits: Tensor,
    k: float | Tensor = 1.0,
    *,
    dim: int = -1,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    shard: ClassShard | None = None,
    impl: Literal["auto", "torch"] = "auto",
) -> Tensor:
    r"""Project logits onto the polytope of `k` labels by entropy: a softmax of mass `k`, capped at 1.

    .. math:: \max_{0 \le y \le 1} \; x^\top y - \sum_i y_i \log y_i \quad \text{subject to} \quad \sum_i y_i = k

    The solution is :math:`y_i = \min(1, e^{x_i - \tau})`, with one :math:`\tau` per row (Martins and Kreutzer,
    2017). At ``k = 1`` it is the softmax. Classes at 1 have no gradient.

    Args:
        logits: The scores :math:`x`, any shape. ``-inf`` rules a class out, ``+inf`` takes one unit of `k`.
        k: The expected number of labels, as in :func:`~lastlayer.lml`: a real number, or a differentiable tensor with
            one number per row. A row with an infeasible `k` becomes NaN; other rows are unaffected.
        dim: The dimension of the classes.
        temperature: Divides the logits.
        mask: Boolean, True where a class takes part; broadcasts to the shape of `logits`.
        shard: This rank's slice, when the classes are split over processes.
        impl: ``"auto"`` takes a compiled kernel where there is one; ``"torch"`` is plain torch.

    Returns:
        Probabilities, of the shape and dtype of `logits`. Half precision is computed in float32.

    Example:
        >>> capped_softmax(torch.tensor([2.0, 1.0, 0.0, -1.0]), k=2)
        tensor([1.0000, 0.6652, 0.2447, 0.0900])
    """
    return _project("capped_softmax", logits, k, "softmax", dim, temperature, mask, shard, impl)


@whole_projection()
def capped_sparsemax(
    logits: Tensor,
    k: float | Tensor = 1.0,
    *,
    dim: int = -1,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    shard: ClassShard | None = None,
    impl: Literal["auto", "torch"] = "auto",
) -> Tensor:
    r"""Project logits onto the polytope of `k` labels by distance: most classes get exactly 0 or 1.

    .. math:: \min_{0 \le y \le 1} \; \|y - x\|^2 \quad \text{subject to} \quad \sum_i y_i = k

    The solution is :math:`y_i = \mathrm{clip}(x_i - \tau, 0, 1)`, with one :math:`\tau` per row (Malaviya et al.,
    2018). At ``k = 1`` it is sparsemax. Classes at 0 or 1 have no gradient.

    Args:
        logits: The scores :math:`x`, any shape. ``-inf`` rules a class out, ``+inf`` takes one unit of `k`.
        k: The expected number of labels, as in :func:`~lastlayer.lml`: a real number, or a differentiable tensor with
            one number per row. A row with an infeasible `k` becomes NaN; other rows are unaffected.
        dim: The dimension of the classes.
        temperature: Divides the logits.
        mask: Boolean, True where a class takes part; broadcasts to the shape of `logits`.
        shard: This rank's slice, when the classes are split over processes.
        impl: ``"auto"`` takes a compiled kernel where there is one; ``"torch"`` is plain torch.

    Returns:
        Probabilities, of the shape and dtype of `logits`. Half precision is computed in float32.

    Example:
        >>> capped_sparsemax(torch.tensor([1.0, 0.75, 0.5, -1.0]), k=2)
        tensor([0.9167, 0.6667, 0.4167, 0.0000])
    """
    return _project("capped_sparsemax", logits, k, "sparsemax", dim, temperature, mask, shard, impl)


def _project(
    op: str,
    logits: Tensor,
    k: float | Tensor,
    kind: Kind,
    dim: int,
    temperature: float | Tensor,
    mask: Tensor | None,
    shard: ClassShard | None,
    impl: str,
) -> Tensor:
    _check.choice(op, "impl", impl, ("auto", "torch"))
    problem, back = enter(op, logits, k, dim, temperature, mask, shard, "torch")
    y = _by_kernel(problem, kind) if impl == "auto" else None
    return back(_apply(*problem[:5], kind)[0] if y is None else y)


def _by_kernel(problem: Problem, kind: Kind) -> Tensor | None:
    """Return the projection by the compiled operation, None where plain torch must."""
    logits, k, mask, temperature, shard, _ = problem
    if shard is not None or not compiled(logits, k, mask):
        return None
    x = logits.to(torch.float32)
    per_row, kernels = isinstance(k, Tensor), fused(x)
    # The GPU takes one number for all rows as it is; to make a tensor of it would be a launch.
    as_number = not per_row and on_gpu(x)
    numbers = (temperature, k) if as_number else (temperature,)
    sizes = None if as_number else k.squeeze(-1) if per_row else x.new_full((), k)
    name = f"capped_{kind}"

    def plain(x: Tensor) -> Tensor:
        return _apply(x, k, mask, temperature, None, kind)[0]

    if on_gpu(x):
        if not kernels.takes(name, x.shape[:-1].numel(), x.shape[-1]):
            return None

        def forward(x: Tensor, gradient: bool) -> tuple[Tensor, Tensor]:
            y = kernels.run(name, x, None, numbers, mask=mask, first=sizes).out
            return y, y

        def backward(upstream: Tensor, x: Tensor, y: Tensor) -> Tensor:
            grad: Tensor = kernels.run(f"{name}_backward", y, None, (temperature,), each=upstream).out
            return grad

        return by_kernels(x, forward, backward, lambda x, _: plain(x)).to(logits.dtype)
    found = kernels.run(name, x.detach(), None, numbers, mask=mask, first=sizes)
    if found is None:
        return None

    def pull(x: Tensor, y: Tensor, upstream: Tensor) -> Tensor | None:
        back = kernels.run(f"{name}_backward", y, None, (temperature,), each=upstream)
        return None if back is None else back.out

    return projected(x, found.out, pull, plain).to(logits.dtype)


def _apply(
    x: Tensor, k: Any, mask: Tensor | None, temperature: float, shard: ClassShard | None, kind: Kind
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(y, center, delta)`` with ``tau = center + delta``; gradients flow into `y` and `delta`."""
    if torch.jit.is_tracing() and not (recorded(x, k) or transformed()):
        return _forward(x, k, mask, temperature, shard, kind)  # a trace with a Function cannot be saved
    # The compiler takes no Function that defines forward mode.
    function = _Capped if torch.compiler.is_compiling() else _CappedForwardMode
    result: tuple[Tensor, Tensor, Tensor] = function.apply(x, k, mask, temperature, shard, kind)
    return result


def _forward(
    logits: Tensor, k: Any, mask: Tensor | None, temperature: float, shard: ClassShard | None, kind: Kind
) -> tuple[Tensor, Tensor, Tensor]:
    x = scores(logits, mask, temperature)
    center, delta = _solve(x, sizes(k, x), kind, shard)
    u = _points(x, center, delta)
    y = u.clamp(max=0).exp() if kind == "softmax" else u.clamp(0, 1)
    return torch.where(delta.isnan(), delta, y).to(logits.dtype), center, delta


def _points(x: Tensor, center: Tensor, delta: Tensor) -> Tensor:
    """Return ``x - tau``; an infinite logit keeps its sign even if tau is infinite."""
    return torch.where(x.isinf(), x, (x - center) - delta)


def _solve(x: Tensor, k: Tensor, kind: Kind, shard: ClassShard | None) -> tuple[Tensor, Tensor]:
    """Return ``(center, delta)``, ``tau = center + delta``, each of shape ``(..., 1)``.

    The center is the ``ceil(k)``-th largest logit, so that adding a constant to a row changes nothing else. In a row
    without a finite tau, delta is ``+inf`` if k is used up, ``-inf`` if k takes every class that is left, and nan if k
    is infeasible.
    """
    left = feasible(k, *reduce(kinds(x), "sum", shard))
    k, solvable, x = left.k, left.solvable, finite_part(x)
    rank = torch.cat([k.ceil(), k.floor() + 1], -1)
    first = _first(x, torch.where(solvable, rank, 1)) if shard is None and _check.readable(x) else x
    center, lower = kth_largest(first, rank, shard).split(1, -1)
    center, lower = torch.where(solvable, center, 0), torch.where(solvable, lower, 0)
    d, lower = x - center, lower - center
    if shard is None and _check.readable(d):
        d, rest = _candidates(d, torch.where(solvable, k, 1), lower, solvable, kind)
    else:
        rest = torch.zeros_like(center)
    delta = _search_softmax(d, rest, k, shard) if kind == "softmax" else _search_sparsemax(d, k, lower, shard)
    return center, torch.where(solvable, delta, -left.end)


def _first(x: Tensor, rank: Tensor) -> Tensor:
    """Return the largest classes, as many as the ranks ask for, where they are few; sorting whole rows takes longer."""
    most = int(rank.max()) if rank.numel() else x.shape[-1]
    return x.topk(most, -1).values if most <= x.shape[-1] // 8 else x


def _candidates(d: Tensor, k: Tensor, lower: Tensor, solvable: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Return the classes that a search has to look at again and again, and the sum of ``exp(d)`` of the others.

    Few classes can be at 1, and with sparsemax few above 0. Where they are most of a row, it is returned as it is.
    """
    n, rest = d.shape[-1], torch.zeros_like(lower)
    if d.numel() == 0:
        return d, rest
    if kind == "softmax":
        most = int(k.max().ceil())
    else:
        most = int(torch.where(solvable, (d > lower - 1).sum(-1, keepdim=True), 1).max())
    if most > n // 4:
        return d, rest
    best, place = d.topk(most, -1, sorted=False)
    if kind == "softmax":
        rest = d.exp().scatter_(-1, place, 0).sum(-1, keepdim=True)
    return best, rest


def _search_softmax(d: Tensor, rest: Tensor, k: Tensor, shard: ClassShard | None) -> Tensor:
    """Return delta with ``sum min(1, exp(d - delta)) = k``; `rest` is the sum of ``exp(d)`` of classes left out.

    As a function of ``exp(-delta)`` the sum is concave and piecewise linear. So Newton's method descends to the
    solution from any delta above it, and each step is exact for the classes that it takes to be at 1. The search starts
    above the solution: with the ``ceil(k) - 1`` largest classes at 1, which is as many as possible.
    """
    capped = d > 0
    mass = reduce(torch.where(capped, 0, d.exp()), "sum", shard) + rest
    delta = mass.log() - (k - (k.ceil() - 1)).log()
    before = torch.full_like(delta, -1)
    for _ in range(_PASSES):
        capped = d > delta
        count, mass = reduce([capped.to(d.dtype), torch.where(capped, 0, d.exp())], "sum", shard)
        count = torch.minimum(count, k.ceil() - 1)  # any more would be rounding
        more = count > before
        delta = torch.where(more, (mass + rest).log() - (k - count).log(), delta)
        if _check.readable(d) and not bool(more.any()):
            break
        before = torch.maximum(count, before)
    return delta


def _search_sparsemax(d: Tensor, k: Tensor, lower: Tensor, shard: ClassShard | None) -> Tensor:
    """Return delta with ``sum clip(d - delta, 0, 1) = k``; it is between `lower` - 1 and 0.

    A Newton step solves for the classes that are now between 0 and 1. Where it leaves the bounds, and every third time
    in a long search, the search takes the middle of the bounds instead. A step that meets the same classes as the step
    before is exact.
    """
    lo, hi = lower - 1, torch.zeros_like(lower)
    delta, done = (lo + hi) / 2, torch.zeros_like(lower, dtype=torch.bool)
    before = torch.full_like(lower, -1), torch.full_like(lower, -1)
    for number in range(_PASSES):
        u = d - delta
        inside, full = (u > 0) & (u < 1), u >= 1
        shares = [torch.where(inside, u, 0), torch.where(inside, d, 0), inside.to(d.dtype), full.to(d.dtype)]
        part, scores, active, count = reduce(shares, "sum", shard)
        excess, free = part + (count - k), active.clamp(min=1)
        # From the scores themselves where they are near 0: a tiny k would be lost in a sum of u.
        newton = torch.where(delta >= -1, (scores + (count - k)) / free, delta + excess / free)
        # The classes inside follow those at 1 in order, so two counts identify both.
        same = ((active == before[0]) & (count == before[1]) & (active > 0)) | (excess == 0)
        lo, hi = torch.where(excess > 0, delta, lo), torch.where(excess < 0, delta, hi)
        good = (active > 0) & (newton >= lo) & (newton <= hi)
        good = same if number >= 12 and number % 3 == 2 else same | good
        delta = torch.where(done | (active == 0) & (excess == 0), delta, torch.where(good, newton, (lo + hi) / 2))
        done, before = done | same, (torch.where(good, active, -1), count)
        if _check.readable(d) and bool(done.all()):
            break
    return delta


def _weights(
    x: Tensor, center: Tensor, delta: Tensor, kind: Kind, shard: ClassShard | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``h = dy / dx`` at fixed tau, ``p = h / sum h`` and ``1 / sum h``, 0 where no class is free."""
    u = _points(x, center, delta)
    free = x.isfinite() & delta.isfinite() & (u < 0 if kind == "softmax" else (u > 0) & (u < 1))
    h = torch.where(free, torch.where(free, u, 0).exp() if kind == "softmax" else 1, 0).to(x.dtype)
    mass = reduce(h, "sum", shard)
    inverse = torch.where(mass > 0, 1 / torch.where(mass > 0, mass, 1), 0)
    return h, h * inverse, inverse


class _Capped(torch.autograd.Function):
    """``(logits, k) -> (y, center, delta)``."""

    @staticmethod
    def forward(
        logits: Tensor, k: Any, mask: Tensor | None, temperature: float, shard: ClassShard | None, kind: Kind
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _forward(logits, k, mask, temperature, shard, kind)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        logits, _, mask, ctx.temperature, ctx.shard, ctx.kind = inputs
        _, center, delta = output
        ctx.mark_non_differentiable(center)
        ctx.save_for_backward(logits, mask, center, delta)
        ctx.save_for_forward(logits, mask, center, delta)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        logits, mask, center, delta = ctx.saved_tensors
        grad_y, _, grad_delta = grads
        if grad_y is None and grad_delta is None:
            return (None,) * 6
        x = scores(logits, mask, ctx.temperature)
        h, p, inverse = _weights(x, center, delta, ctx.kind, ctx.shard)
        u = torch.zeros_like(x) if grad_y is None else torch.where(h > 0, grad_y.to(x.dtype), 0)
        given = torch.zeros_like(delta) if grad_delta is None else grad_delta
        mean, given = reduce([p * u, given], "sum", ctx.shard)
        grad_x, grad_k = h * (u - mean) + p * given, mean - given * inverse
        if ctx.temperature != 1.0:
            grad_x = grad_x / ctx.temperature
        broken = broken_rows(delta, grad_y, grad_delta, ctx.shard)
        grad_x, grad_k = torch.where(broken, torch.nan, grad_x).to(logits.dtype), torch.where(broken, torch.nan, grad_k)
        return grad_x, grad_k if ctx.needs_input_grad[1] else None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        x, k, mask = mapped(info.batch_size, in_dims, *inputs[:3])
        return _apply(x, k, mask, *inputs[3:]), (0, 0, 0)


class _CappedForwardMode(_Capped):
    """As `_Capped`, with forward-mode derivatives."""

    @staticmethod
    @nestable
    def jvp(ctx: Any, logits_t: Tensor | None, k_t: Tensor | None, *_: Any) -> Any:
        logits, mask, center, delta = ctx.saved_tensors
        x = scores(logits, mask, ctx.temperature)
        h, p, inverse = _weights(x, center, delta, ctx.kind, ctx.shard)
        dx = torch.zeros_like(x) if logits_t is None else torch.where(h > 0, logits_t.to(x.dtype) / ctx.temperature, 0)
        dk = torch.zeros_like(delta) if k_t is None else k_t
        mean = reduce(p * dx, "sum", ctx.shard)
        return (h * (dx - mean) + p * dk).to(logits.dtype), None, mean - dk * inverse


class CappedSoftmax(FunctionModule):
    """Module form of :func:`capped_softmax`, which documents the arguments."""

    function = staticmethod(capped_softmax)

    def __init__(
        self,
        k: float | Tensor = 1.0,
        *,
        dim: int = -1,
        temperature: float | Tensor = 1.0,
        impl: Literal["auto", "torch"] = "auto",
    ) -> None:
        super().__init__(k=k, dim=dim, temperature=temperature, impl=impl)

    def forward(self, logits: Tensor, *, mask: Tensor | None = None, shard: ClassShard | None = None) -> Tensor:
        """Return the probabilities."""
        out: Tensor = self._call(logits, mask=mask, shard=shard)
        return out


class CappedSparsemax(FunctionModule):
    """Module form of :func:`capped_sparsemax`, which documents the arguments."""

    function = staticmethod(capped_sparsemax)

    def __init__(
        self,
        k: float | Tensor = 1.0,
        *,
        dim: int = -1,
        temperature: float | Tensor = 1.0,
        impl: Literal["auto", "torch"] = "auto",
    ) -> None:
        super().__init__(k=k, dim=dim, temperature=temperature, impl=impl)

    def forward(self, logits: Tensor, *, mask: Tensor | None = None, shard: ClassShard | None = None) -> Tensor:
        """Return the probabilities."""
        out: Tensor = self._call(logits, mask=mask, shard=shard)
        return out
