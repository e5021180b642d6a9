"""The Limited Multi-Label projection (Amos, Koltun and Kolter, 2019): logits to the point of a k-label polytope."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from lastlayer import _check, _native, _triton
from lastlayer._module import FunctionModule
from lastlayer.shard import ClassShard, kth_largest, local_part, reduce, replicate, spread, unwrap

Impl = Literal["auto", "torch", "native", "triton"]
Kind = Literal["y", "log", "nu"]

FAR = 1e30  # a bound that binds nothing
_SHARDED_PASSES = 7  # each costs a collective; a row that needs more would have its last step taken all the same
_WARM_PASSES = 3  # from a known threshold; after that the search begins again without it
_PASSES = 10  # a bound on the search; the worst row of tests/project/accuracy.py takes 7


def lml(
    logits: Tensor,
    k: float | Tensor,
    *,
    dim: int = -1,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    shard: ClassShard | None = None,
    impl: Impl = "auto",
) -> Tensor:
    r"""Project logits onto the polytope of `k` labels: probabilities whose sum is `k`.

    .. math:: \min_{0 < y < 1} \; -x^\top y - H_b(y) \quad \text{subject to} \quad \sum_i y_i = k

    with :math:`H_b` the binary entropy. The solution is :math:`y_i = \sigma(x_i + \nu)`, with one :math:`\nu` a row.
    The order of the logits is kept, and a constant added to a row changes nothing. `k = 1` is not the softmax: each
    class has a probability of its own, and several may be near 1.

    Args:
        logits: The scores :math:`x`, any shape. ``-inf`` rules a class out, ``+inf`` takes one unit of `k`.
        k: The expected number of labels, ``0 <= k <= n_classes``, any real number; or a tensor that broadcasts to
            the shape of the rows, differentiable. A row whose `k` cannot be met is nan, and no other row with it.
        dim: The dimension of the classes.
        temperature: Divides the logits; towards 0 the result is the indicator of the `k` largest.
        mask: Boolean, True where a class takes part; broadcasts to the shape of `logits`.
        shard: This rank's slice, when the classes are split over processes.
        impl: ``"torch"``, ``"native"`` (compiled, CPU), ``"triton"`` (GPU), or ``"auto"``: the fastest that applies.

    Returns:
        Probabilities, of the shape and dtype of `logits`. Half precision is computed in float32.

    Example:
        >>> lml(torch.tensor([2.0, 1.0, 0.0, -1.0]), k=2)
        tensor([0.8176, 0.6225, 0.3775, 0.1824])
    """
    return _project("lml", logits, k, "y", dim, temperature, mask, shard, impl)


def log_lml(
    logits: Tensor,
    k: float | Tensor,
    *,
    dim: int = -1,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    shard: ClassShard | None = None,
    impl: Impl = "auto",
) -> Tensor:
    r"""Compute the logarithm of :func:`lml`, accurate where the probability underflows or rounds to 1.

    .. math:: \log y_i = \log \sigma(x_i + \nu)

    Args:
        logits: The scores, any shape.
        k: The expected number of labels.
        dim: The dimension of the classes.
        temperature: Divides the logits.
        mask: Boolean, True where a class takes part.
        shard: This rank's slice, when the classes are split over processes.
        impl: As in :func:`lml`.

    Returns:
        Log-probabilities, of the shape and dtype of `logits`; ``-inf`` for classes ruled out.

    Example:
        >>> log_lml(torch.tensor([200.0, 200.0, -200.0]), k=2)
        tensor([   0.0000,    0.0000, -199.6534])
    """
    return _project("log_lml", logits, k, "log", dim, temperature, mask, shard, impl)


def lml_threshold(
    logits: Tensor,
    k: float | Tensor,
    *,
    dim: int = -1,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    shard: ClassShard | None = None,
    impl: Impl = "auto",
) -> Tensor:
    r"""Compute the dual variable :math:`\nu` of :func:`lml`, differentiable in `logits` and `k`.

    .. math:: \sum_i \sigma(x_i / T + \nu) = k

    ``-nu`` is the logit at which a label is as likely as not. It is ``-inf`` at ``k = 0`` and ``+inf`` where `k`
    asks for every class.

    Args:
        logits: The scores, any shape.
        k: The expected number of labels.
        dim: The dimension of the classes; the result does not have it.
        temperature: Divides the logits.
        mask: Boolean, True where a class takes part.
        shard: This rank's slice, when the classes are split over processes.
        impl: As in :func:`lml`.

    Returns:
        One number a row, of the dtype of `logits`.

    Example:
        >>> lml_threshold(torch.tensor([[1.0, 1.0, 1.0, 1.0]]), k=2)
        tensor([-1.])
    """
    logits, shard, _ = unwrap("lml_threshold", logits, shard, dim, k)
    x, k, mask, divisor, _, impl = enter("lml_threshold", logits, k, dim, temperature, mask, shard, impl)
    _, center, delta = apply(x, k, mask, divisor, "nu", shard, impl)
    return (replicate(delta, shard) - center).squeeze(-1).to(logits.dtype)


def lml_at_most(
    logits: Tensor,
    k: float | Tensor,
    *,
    dim: int = -1,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    shard: ClassShard | None = None,
    impl: Impl = "auto",
) -> Tensor:
    r"""Project logits onto the budget polytope: probabilities whose sum is at most `k`.

    .. math:: \min_{0 < y < 1} \; -x^\top y - H_b(y) \quad \text{subject to} \quad \sum_i y_i \le k

    The sigmoid where it already fits, else :func:`lml`.

    Args:
        logits: The scores, any shape.
        k: The largest expected number of labels; at ``n_classes`` or above it binds nowhere.
        dim: The dimension of the classes.
        temperature: Divides the logits.
        mask: Boolean, True where a class takes part.
        shard: This rank's slice, when the classes are split over processes.
        impl: As in :func:`lml`.

    Returns:
        Probabilities, of the shape and dtype of `logits`.

    Example:
        >>> lml_at_most(torch.tensor([[0.0, 0.0], [9.0, 9.0]]), k=1)
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]])
    """
    logits, shard, wrap = unwrap("lml_at_most", logits, shard, dim, k)
    x, size, mask, divisor, last, impl = enter(
        "lml_at_most", logits, k, dim, temperature, mask, shard, impl, at_most_n=False
    )
    score = scores(x, mask, divisor)
    free = reduce((score > -torch.inf).to(score.dtype), "sum", shard)
    tight, center, delta = apply(x, torch.minimum(size, free), mask, divisor, "y", shard, impl)
    fits = delta - center >= 0
    y = torch.where(fits, score.sigmoid().to(tight.dtype), tight)
    return wrap(y.movedim(-1, last))


def _project(
    op: str,
    logits: Tensor,
    k: float | Tensor,
    kind: Kind,
    dim: int,
    temperature: float | Tensor,
    mask: Tensor | None,
    shard: ClassShard | None,
    impl: Impl,
) -> Tensor:
    logits, shard, wrap = unwrap(op, logits, shard, dim, k)
    x, k, mask, divisor, last, impl = enter(op, logits, k, dim, temperature, mask, shard, impl, number=True)
    out, _, _ = apply(x, k, mask, divisor, kind, shard, impl)
    return wrap(out if last == out.ndim - 1 else out.movedim(-1, last))


def enter(
    op: str,
    logits: Tensor,
    k: float | Tensor,
    dim: int,
    temperature: float | Tensor,
    mask: Tensor | None,
    shard: ClassShard | None,
    impl: Impl,
    at_most_n: bool = True,
    number: bool = False,
) -> tuple[Tensor, Any, Tensor | None, float, int, Impl]:
    """Check the arguments and bring the classes to the last dimension.

    `k` becomes a tensor ``(*batch, 1)``; with `number`, one number stays one where a kernel takes that.
    """
    logits = _check.logits(op, logits)
    dim = _check.dim(op, dim, logits.ndim)
    mask = _check.mask(op, local_part(mask), logits)
    divisor = _check.temperature(op, temperature)
    x = logits if dim == logits.ndim - 1 else logits.movedim(dim, -1)
    mask = None if mask is None else mask.movedim(dim, -1)
    if isinstance(divisor, Tensor):  # one a row; autograd sees the division
        x, divisor = _divided(x, spread(divisor, shard).expand(x.shape[:-1]).unsqueeze(-1).to(x.dtype)), 1.0
    impl = choose(op, impl, x, shard)
    if number and impl == "triton" and not (isinstance(k, Tensor) or torch.compiler.is_compiling() or transformed()):
        k = _check.cardinality_of_all(op, k, x.shape[-1], x.shape[-1])
    else:
        k = _check.cardinality(op, k, x, shard, at_most_n=at_most_n)
    return x, k, mask, divisor, dim, impl


def _divided(x: Tensor, temperature: Tensor) -> Tensor:
    """Divide by a temperature, which an infinite score has no part in."""
    finite = x.isfinite()
    return torch.where(finite, torch.where(finite, x, 0) / temperature, x)


def choose(op: str, impl: Impl, x: Tensor, shard: ClassShard | None) -> Impl:
    """Turn ``"auto"`` into the fastest implementation that applies; check an explicit one."""
    _check.choice(op, "impl", impl, ("auto", "torch", "native", "triton"))
    if impl == "torch":
        return impl
    if impl == "auto":
        if _exporting():  # a graph for other runtimes holds plain operators
            return "torch"
        fastest: tuple[Impl, ...] = ("triton", "native")
        return next((name for name in fastest if not _unfit(name, x, shard)), "torch")
    reason = _unfit(impl, x, shard)
    if reason:
        raise RuntimeError(f'{op}: `impl="{impl}"` cannot run here: {reason}. Use `impl="auto"`.')
    return impl


def _unfit(impl: Impl, x: Tensor, shard: ClassShard | None) -> str:
    """Why an implementation cannot take this input; empty if it can."""
    if shard is not None:
        return "the classes are sharded"
    if torch.jit.is_tracing():
        return "a trace holds plain operators"
    if impl == "triton":
        if x.dtype == torch.float64:
            return "the kernels are for float32, bfloat16 and float16"
        return _triton.unavailable(x.device)
    if x.dtype not in (torch.float32, torch.float64):
        return "the compiled kernel is for float32 and float64"
    return _native.unavailable(x.device)


def _exporting() -> bool:
    is_exporting = getattr(torch.compiler, "is_exporting", None)
    return bool(is_exporting and is_exporting())


def apply(
    x: Tensor,
    k: Tensor | float,
    mask: Tensor | None,
    temperature: float,
    kind: Kind,
    shard: ClassShard | None,
    impl: Impl,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(out, center, delta)`` with ``nu = delta - center``; gradients flow into `out` and `delta`."""
    if torch.compiler.is_compiling():  # which takes no Function that defines forward mode
        return _LML.apply(x, k, mask, temperature, kind, shard, impl)
    if transformed():
        return _LMLForwardMode.apply(x, k, mask, temperature, kind, shard, impl)
    if recorded(x, k):
        return _LMLBackward.apply(x, k, mask, temperature, kind, shard, impl)
    return _forward(x, k, mask, temperature, kind, shard, impl)  # autograd's door costs more than a small batch


def recorded(*inputs: Tensor | float) -> bool:
    """Whether autograd wants to know what becomes of the inputs."""
    return torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in inputs)


def _forward(
    logits: Tensor,
    k: Any,
    mask: Tensor | None,
    temperature: float,
    kind: Kind,
    shard: ClassShard | None,
    impl: Impl,
) -> tuple[Tensor, Tensor, Tensor]:
    if impl == "torch":
        return _plain(logits, k, mask, temperature, kind, shard)
    if torch.compiler.is_compiling():
        return torch.ops.lastlayer.lml_forward(logits, k, mask, temperature, kind, impl)
    return kernels(impl).forward(logits, k, mask, temperature, kind)


@functools.cache
def kernels(impl: str) -> ModuleType:
    """Import the kernels of an implementation."""
    if impl == "triton":
        return importlib.import_module("lastlayer._triton.lml")
    return importlib.import_module("lastlayer._native.lml")


def _plain(
    logits: Tensor, k: Tensor, mask: Tensor | None, temperature: float, kind: Kind, shard: ClassShard | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(out, center, delta)`` in plain torch: the fallback, and what the kernels are checked against."""
    x = scores(logits, mask, temperature)
    center, delta = solve(x, k, shard)
    if kind == "nu":
        return logits.new_empty(0), center, delta
    if kind == "log":
        return F.logsigmoid(points(x, center, delta)).to(logits.dtype), center, delta
    infinite = ~delta.isfinite()
    z = points(x, center, torch.where(infinite, delta, 0))
    tail = _tails(z, torch.zeros_like(delta), torch.where(infinite, 0, delta))
    y = torch.where(z > 0, 1, tail) / (1 + tail)
    return torch.where(delta.isnan(), delta, y).to(logits.dtype), center, delta


def scores(logits: Tensor, mask: Tensor | None, temperature: float) -> Tensor:
    """Return the scores in the dtype of the arithmetic: divided by the temperature, ``-inf`` where masked out."""
    x = logits.to(_check.work_dtype(logits))
    if temperature != 1.0:
        x = x / temperature
    return x if mask is None else x.masked_fill(~mask, -torch.inf)


def points(x: Tensor, center: Tensor, delta: Tensor) -> Tensor:
    """Return ``x + nu``; an infinite logit keeps its sign against an infinite nu."""
    z = (x - center) + delta
    return torch.where(x.isinf() & delta.isinf(), x, z)


def solve(x: Tensor, k: Tensor, shard: ClassShard | None) -> tuple[Tensor, Tensor]:
    """Return ``(center, delta)``, ``nu = delta - center``, each of shape ``(..., 1)``.

    Rows without a finite nu have an infinite delta: ``-inf`` where k is used up, ``+inf`` where it takes every class
    that is left, and nan where it cannot be met.
    """
    known = None if shard is None else shard.known(x.shape[:-1], x.dtype)
    found = None if known is None else _search(x, k, shard, known)
    found = _search(x, k, shard, None) if found is None else found
    assert found is not None
    if shard is not None:
        shard.note(found[1] - found[0])
    return found


def _search(x: Tensor, k: Tensor, shard: ClassShard | None, known: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Search from order statistics, or from a known nu; None where the latter does not end soon."""
    finite = x.isfinite()
    flags = [flag.to(x.dtype) for flag in (finite, x == torch.inf, x.isnan())]
    x = torch.where(finite, x, -torch.inf)  # weighs nothing
    sums: tuple[Tensor, ...] = ()
    if known is None:
        n, n_top, n_nan = reduce(flags, "sum", shard)
    else:  # the first pass comes with the counts
        n, n_top, n_nan, *sums = reduce([*flags, *small_parts(x + known, *[torch.zeros_like(known)] * 2)], "sum", shard)
    k = k - n_top
    solvable = (k > 0) & (k < n) & (n_nan == 0)
    end = torch.where(n_nan > 0, torch.nan, torch.where(k == 0, -torch.inf, torch.where(k == n, torch.inf, torch.nan)))
    k = torch.where(solvable, k, n / 2)
    if known is None:
        center, lo, hi, near = bracket(x, k, n, solvable, shard)
    else:
        center, lo, hi, near = -known, torch.full_like(known, -FAR), torch.full_like(known, FAR), None
    delta, done = torch.zeros_like(center), ~solvable
    passes = _WARM_PASSES if near is None else _PASSES if shard is None else _SHARDED_PASSES
    for _ in range(passes):
        d = x - center
        peak = torch.zeros_like(center)
        if near is not None:
            # The neighbours of the solution are close to the nearest point of all, and every rank knows them.
            depth = -d.abs() if shard is None else -(near - center).abs()
            peak = torch.where(solvable, reduce(depth, "max", None), 0)
        sums = sums or reduce(small_parts(d, peak, delta), "sum", shard)
        step, lo, hi, close = advance(sums, peak, k, lo, hi)
        sums = ()
        close = close if near is not None else close & step.isfinite()
        step = torch.where(done, 0, step)
        # A row's last step stays in delta, so that the points at which the sums were taken are those returned; before
        # that delta holds what rounding the center lost.
        moved = torch.where(done | close, center, center - (delta + step))
        delta = (delta + step) + (moved - center)
        center, lo, hi, done = moved, lo - step, hi - step, done | close
        if (near is None or _may_stop(x)) and bool(done.all()):
            break
    else:
        if near is None:
            return None
    return torch.where(solvable, center, 0), torch.where(solvable, delta, end)


def _may_stop(x: Tensor) -> bool:
    """Whether reading a value costs nothing: an ordinary CPU tensor, outside of any trace.

    Sharded, all ranks read the same: what they read comes from sums over all of them.
    """
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return type(x) is Tensor and x.device.type == "cpu" and not traced


def bracket(
    x: Tensor, k: Tensor, n: Tensor, solvable: Tensor, shard: ClassShard | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a start and exact bounds from two order statistics: ``lo <= nu + center <= hi``; and those statistics.

    With m < k < m' integers and x_(1) >= x_(2) >= ..., at most m classes are above x_(m+1), and their y at most 1:
    logit((k - m) / (n - m)) - x_(m+1) <= nu <= logit(k / m') - x_(m').
    """
    upper_rank, lower_rank = k.ceil(), k.floor() + 1  # m + 1 and m'
    upper, lower = kth_largest(x, torch.cat([upper_rank, lower_rank], -1), shard).split(1, -1)
    upper, lower = torch.where(solvable, upper, 0), torch.where(solvable, lower, 0)
    middle = lower + (upper - lower) / 2
    lo = torch.where(solvable, (k - upper_rank + 1).log() - (n - k).log(), 0) - (upper - middle)
    hi = torch.where(solvable, k.log() - (lower_rank - k).log(), 0) + (middle - lower)
    center = middle - (lo + hi) / 2
    slack = 8 * torch.finfo(x.dtype).eps * (1 + center.abs() + lo.abs() + hi.abs())
    moved = center - middle
    return center, lo + moved - slack, hi + moved + slack, torch.cat([upper, lower], -1)


def _tails(d: Tensor, peak: Tensor, delta: Tensor) -> Tensor:
    """Return ``exp(-|d|) / exp(peak)`` moved by delta: as a factor, for rounding ``d + delta`` shows in the sum."""
    factor = delta.clamp(-60, 60).exp()
    return (-d.abs() - peak).exp() * torch.where(d > 0, 1 / factor, factor)


def small_parts(d: Tensor, peak: Tensor, delta: Tensor) -> list[Tensor]:
    """Return what a step sums over the points ``d + delta``: y or 1 - y, whichever is small, over ``exp(peak)``."""
    tail = _tails(d, peak, delta)
    w = tail * peak.exp()
    w, scaled = w / (1 + w), tail / (1 + w)  # min(y, 1 - y), and the same over exp(peak)
    above = d > 0
    outer, inner = scaled * (1 - w) * (1 - w), scaled * (1 - w) * w
    bend = scaled * w * (3 - 2 * w)
    return [
        torch.where(above, outer, inner),  # sum y^2 (1 - y)
        torch.where(above, inner, outer),  # sum y (1 - y)^2
        above.to(d.dtype),
        torch.where(above, -scaled, scaled),
        torch.where(above, -bend, bend),
    ]


def advance(
    sums: Sequence[Tensor], peak: Tensor, k: Tensor, lo: Tensor, hi: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a step of nu from the sums of :func:`small_parts`, the tighter bounds, and whether it ends the search.

    Where the count of points above 0 is k, the scale stays in the sums: the residual does not cancel, nor does it
    underflow across a wide gap.
    """
    a, b, count, residual, cubic = sums
    eps = torch.finfo(a.dtype).eps
    surplus = count - k
    exponent = torch.where(surplus == 0, 0, peak)  # what is left to scale back
    unit = exponent.exp()
    f, c = surplus + residual * unit, surplus + cubic * unit
    r = f / ((a + b) * unit)

    # The root of b q^2 + c q - a in q = exp(step) never passes the solution; exact on a plateau and in the tails.
    root = (c * c + 4 * (a * unit) * (b * unit)).sqrt()
    fall = math.log(2) + a.log() + exponent - (c + root).log()
    rise = (root - c).log() - math.log(2) - b.log() - exponent
    safe = torch.where(c > 0, fall, rise)
    safe = torch.where((safe < 0) == (f > 0), safe, 0)
    halley = -r / (1 - r * ((b - a) / (a + b)) / 2)
    step = torch.where((r.abs() < 1) & (halley.abs() > safe.abs()), halley, safe)

    # Bounds: the sign of f with the safe step, and the tangents in exp(nu) and exp(-nu).
    lo = torch.maximum(lo, torch.where(f < 0, safe, torch.log1p(-r.clamp(max=1))) - 4 * eps)
    hi = torch.minimum(hi, torch.where(f > 0, safe, -torch.log1p(r.clamp(min=-1))) + 4 * eps)
    step = torch.where((step >= lo) & (step <= hi), step, (lo + hi) / 2)
    close = (r.abs() < 0.5) & (0.42 * r.abs() ** 3 <= eps / 2)  # Halley's error bound
    return torch.where(close, halley, step), lo, hi, close


class _LML(torch.autograd.Function):
    """``(logits, k) -> (out, center, delta)``: one definition of the derivatives for every implementation."""

    @staticmethod
    def forward(
        logits: Tensor,
        k: Tensor,
        mask: Tensor | None,
        temperature: float,
        kind: Kind,
        shard: ClassShard | None,
        impl: Impl,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _forward(logits, k, mask, temperature, kind, shard, impl)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        logits, _, mask, ctx.temperature, ctx.kind, ctx.shard, ctx.impl = inputs
        _, center, delta = output
        ctx.mark_non_differentiable(center)
        ctx.save_for_backward(logits, mask, center, delta)
        ctx.save_for_forward(logits, mask, center, delta)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        logits, mask, center, delta = ctx.saved_tensors
        grad_out, _, grad_delta = grads
        if ctx.kind == "nu":
            grad_out = None
        if grad_out is None and grad_delta is None:
            return (None,) * 7
        arguments = (logits, mask, ctx.temperature, center, delta, grad_out, grad_delta, ctx.kind)
        if ctx.impl == "torch" or torch.is_grad_enabled() or transformed(grad_out, grad_delta):
            grad_logits, grad_k = _plain_backward(*arguments, ctx.shard)
        elif torch.compiler.is_compiling():
            grad_logits, grad_k = torch.ops.lastlayer.lml_backward(*arguments, ctx.impl)
        else:
            grad_logits, grad_k = kernels(ctx.impl).backward(*arguments)
        return grad_logits, grad_k if ctx.needs_input_grad[1] else None, None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        # Every leading dimension is a batch dimension: the mapped one joins them.
        tensors = [
            value if where is None or not isinstance(value, Tensor) else value.movedim(where, 0)
            for value, where in zip(inputs[:3], in_dims[:3], strict=True)
        ]
        batch = (info.batch_size, *tensors[0].shape[in_dims[0] is not None : -1])
        tensors = [t if t is None else t.expand(*batch, t.shape[-1]) for t in tensors]
        x, k, mask = tensors
        return apply(x, k, mask, *inputs[3:]), (0 if inputs[4] != "nu" else None, 0, 0)


def without_transforms(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """The same with `setup_context` in `forward`: autograd then binds no signature, which takes long."""

    def forward(ctx: Any, *inputs: Any) -> Any:
        output = function.forward(*inputs)
        function.setup_context(ctx, inputs, output)
        return output

    members = {"forward": staticmethod(forward), "backward": staticmethod(function.backward)}
    return type(f"{function.__name__}Backward", (torch.autograd.Function,), members)


_LMLBackward = without_transforms(_LML)


class _LMLForwardMode(_LML):
    """As `_LML`, with forward-mode derivatives."""

    @staticmethod
    def jvp(ctx: Any, logits_t: Tensor | None, k_t: Tensor | None, *_: Any) -> Any:
        logits, mask, center, delta = ctx.saved_tensors
        x = scores(logits, mask, ctx.temperature)
        z = points(x, center, delta)
        live = x.isfinite() & delta.isfinite()
        dx = torch.zeros_like(x) if logits_t is None else torch.where(live, logits_t.to(x.dtype) / ctx.temperature, 0)
        dk = torch.zeros_like(delta) if k_t is None else k_t
        p, log_h, inverse, means, _unused = _weights(live, z, ctx.shard, [dx], [])
        mean = means[0]
        delta_t = _product(dk, inverse) - mean
        if ctx.kind == "nu":
            out_t = logits.new_empty(0)
        elif ctx.kind == "y":
            out_t = (log_h.exp() * (dx - mean) + p * dk).to(logits.dtype)
        else:
            out_t = torch.where(live, (-z).sigmoid() * (dx + delta_t), 0).to(logits.dtype)
        return out_t, None, delta_t


def batched(gradient: Tensor) -> bool:
    """Whether this is a batch of gradients that poses as one: ``torch.autograd.grad(..., is_grads_batched=True)``."""
    return not torch._C._has_storage(gradient)


def transformed(*gradients: Tensor | None) -> bool:
    """Whether a transform, forward mode or a batch of gradients is at work, which kernels cannot see through."""
    if not torch.compiler.is_compiling() and any(batched(g) for g in gradients if g is not None):
        return True
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def _weights(
    live: Tensor, z: Tensor, shard: ClassShard | None, averaged: list[Tensor], added: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Return ``p = h / sum h``, ``log h`` and ``1 / sum h``, for ``h = y (1 - y)`` where there is a gradient.

    The means under p of `averaged` and the sums of `added` come with them, in the same collective.
    """
    log_h = torch.where(live, F.logsigmoid(z) + F.logsigmoid(-z), -torch.inf)
    peak = reduce(log_h.detach(), "max", shard)
    peak = torch.where(peak.isfinite(), peak, 0)
    e = (log_h - peak).exp()
    mass, *sums = reduce([e, *(e * v for v in averaged), *added], "sum", shard)
    mass = torch.where(mass > 0, mass, torch.inf)
    means = [s / mass for s in sums[: len(averaged)]]
    return e / mass, log_h, (-peak).exp() / mass, means, sums[len(averaged) :]


def _plain_backward(
    logits: Tensor,
    mask: Tensor | None,
    temperature: float,
    center: Tensor,
    delta: Tensor,
    grad_out: Tensor | None,
    grad_delta: Tensor | None,
    kind: Kind,
    shard: ClassShard | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of logits and k, in differentiable operations."""
    x = scores(logits, mask, temperature)
    z = points(x, center, delta)
    live = x.isfinite() & delta.isfinite()
    given = torch.zeros_like(delta) if grad_delta is None else grad_delta
    if grad_out is None:
        p, log_h, inverse, _, (given,) = _weights(live, z, shard, [], [given])
        grad_x, grad_k = -p * given, _product(given, inverse)
    elif kind == "y":
        u = torch.where(live, grad_out.to(x.dtype), 0)
        p, log_h, inverse, (mean,), (given,) = _weights(live, z, shard, [u], [given])
        grad_x, grad_k = log_h.exp() * (u - mean) - p * given, mean + _product(given, inverse)
    else:
        v = torch.where(live, grad_out.to(x.dtype) * (-z).sigmoid(), 0)
        p, log_h, inverse, _, sums = _weights(live, z, shard, [], [v, given])
        given = sums[0] + sums[1]
        grad_x, grad_k = v - p * given, _product(given, inverse)
    if temperature != 1.0:
        grad_x = grad_x / temperature
    broken = delta.isnan()
    if shard is None:  # a row nobody asks for has no gradient, nan or not; over ranks that would cost a collective
        broken = broken & _asked(grad_out, grad_delta)
    return torch.where(broken, torch.nan, grad_x).to(logits.dtype), torch.where(broken, torch.nan, grad_k)


def _product(given: Tensor, inverse: Tensor) -> Tensor:
    """Multiply by ``1 / sum h``, which overflows across a wide gap: nothing given stays nothing."""
    return torch.where(given == 0, 0, given * torch.where(given == 0, 0, inverse))


def _asked(grad_out: Tensor | None, grad_delta: Tensor | None) -> Tensor:
    """Which rows have an upstream gradient that is not 0."""
    found = [(g != 0).any(-1, keepdim=True) for g in (grad_out, grad_delta) if g is not None]
    return found[0] | found[-1]


@torch.library.custom_op("lastlayer::lml_forward", mutates_args=())
def _op_forward(
    logits: Tensor, k: Tensor, mask: Tensor | None, temperature: float, kind: str, impl: str
) -> tuple[Tensor, Tensor, Tensor]:
    return kernels(impl).forward(logits, k, mask, temperature, kind)


@_op_forward.register_fake
def _(
    logits: Tensor, k: Tensor, mask: Tensor | None, temperature: float, kind: str, impl: str
) -> tuple[Tensor, Tensor, Tensor]:
    row = logits.new_empty((*logits.shape[:-1], 1), dtype=_check.work_dtype(logits))
    out = logits.new_empty(0) if kind == "nu" else torch.empty_like(logits, memory_format=torch.contiguous_format)
    return out, row, torch.empty_like(row)


@torch.library.custom_op("lastlayer::lml_backward", mutates_args=())
def _op_backward(
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


@_op_backward.register_fake
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


class LML(FunctionModule):
    """Module form of :func:`lml`, which documents the arguments."""

    function = staticmethod(lml)

    def __init__(self, k: float | Tensor, *, dim: int = -1, temperature: float = 1.0, impl: Impl = "auto") -> None:
        super().__init__(k=k, dim=dim, temperature=temperature, impl=impl)


class LogLML(FunctionModule):
    """Module form of :func:`log_lml`, which documents the arguments."""

    function = staticmethod(log_lml)

    def __init__(self, k: float | Tensor, *, dim: int = -1, temperature: float = 1.0, impl: Impl = "auto") -> None:
        super().__init__(k=k, dim=dim, temperature=temperature, impl=impl)


class LMLThreshold(FunctionModule):
    """Module form of :func:`lml_threshold`, which documents the arguments."""

    function = staticmethod(lml_threshold)

    def __init__(self, k: float | Tensor, *, dim: int = -1, temperature: float = 1.0, impl: Impl = "auto") -> None:
        super().__init__(k=k, dim=dim, temperature=temperature, impl=impl)


class LMLAtMost(FunctionModule):
    """Module form of :func:`lml_at_most`, which documents the arguments."""

    function = staticmethod(lml_at_most)

    def __init__(self, k: float | Tensor, *, dim: int = -1, temperature: float = 1.0, impl: Impl = "auto") -> None:
        super().__init__(k=k, dim=dim, temperature=temperature, impl=impl)
