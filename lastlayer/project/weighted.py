"""The LML projection with a weighted sum and bounds: labels that cost differently, and limits per label."""

from __future__ import annotations

import functools
import importlib
import math
import numbers
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lastlayer import _check
from lastlayer._threshold.autograd import apart, nestable, stacked
from lastlayer._threshold.budget import Budget
from lastlayer._threshold.dispatch import compiled_without_tangents, differentiated, recorded
from lastlayer._threshold.operators import WAITS, fake, operator
from lastlayer._threshold.search import scores
from lastlayer.shard import ClassShard, reduce

_STEPS = 120  # bounds the search; Newton's steps with halvings in between
_BIG = 1e300
_SMALL = 1e-290
_FARTHEST = 1e250  # of scores: beyond that, as -1.8e308 is, a quotient by a weight would overflow
_HUGE = 600.0  # as a logarithm
_FLAT = 1e-3  # tails below this part of the sum: its rounding costs three digits, and the tails are balanced instead
_SLACK = 1e-6  # of the sum: a `k` out of reach by less is taken for the end, as sums of float32 differ by that


class Terms(NamedTuple):
    """What a weighted row is made of, in float64 and of one shape ``(..., n_classes)``; `k` is ``(..., 1)``."""

    x: Tensor
    weight: Tensor
    lower: Tensor
    upper: Tensor
    k: Tensor


def check(op: str, x: Tensor, weight: Any, lower: Any, upper: Any) -> tuple[Tensor | None, ...]:
    """Check weights and bounds against scores `x` (classes last); return those that are given as tensors."""
    if all(not isinstance(v, Tensor) for v in (lower, upper)):
        low, high = 0.0 if lower is None else lower, 1.0 if upper is None else upper
        if isinstance(low, numbers.Real) and isinstance(high, numbers.Real) and float(low) > float(high):
            remedy = "Raise `upper`: `lower` is 0 if left out." if lower is None else "Exchange them."
            remedy = "Give `upper`, which is 1 if left out." if upper is None else remedy
            raise ValueError(f"{op}: `lower` must be at most `upper`, got {low} and {high}. {remedy}")
    names = (("weight", weight), ("lower", lower), ("upper", upper))
    return tuple(None if value is None else _tensor(op, name, value, x) for name, value in names)


def _tensor(op: str, name: str, value: Any, x: Tensor) -> Tensor:
    if not isinstance(value, Tensor):
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(
                f"{op}: `{name}` must be a number or a tensor, got {type(value).__name__}. Use `torch.tensor`."
            )
        if not -math.inf < float(value) < math.inf:
            raise ValueError(f"{op}: `{name}` must be finite, got {value}. Use `mask` to rule classes out.")
        return _check.constant(float(value), _check.work_dtype(x), x.device)
    if value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"{op}: `{name}` must be real, got a tensor of {value.dtype}. Use a float.")
    try:
        value.expand(x.shape)
    except RuntimeError:
        raise ValueError(
            f"{op}: `{name}` must broadcast to the shape {tuple(x.shape)}, got shape {tuple(value.shape)}. "
            "Give one number per class."
        ) from None
    return value.to(x.device)


def in_one_shape(x: Tensor, k: Tensor, given: tuple[Tensor | None, ...]) -> Terms:
    """Return scores, weights and bounds in float64 and in the shape of the scores."""

    def wide(value: Tensor | None, default: float) -> Tensor:
        if value is None:
            value = torch.full((), default, dtype=torch.float64, device=x.device)
        return value.double().expand(x.shape)

    weight, lower, upper = given
    return Terms(x.double(), wide(weight, 1.0), wide(lower, 0.0), wide(upper, 1.0), k.double())


def threshold(terms: Terms, shard: ClassShard | None, impl: str = "torch") -> Tensor:
    """Return nu ``(..., 1)``, differentiable in every term; ``-inf`` and ``+inf`` at the ends, NaN beyond."""
    function = _Threshold if compiled_without_tangents("lml") else _ThresholdForwardMode
    nu: Tensor = function.apply(*terms, shard, impl)
    return nu


def at_most_threshold(terms: Terms, shard: ClassShard | None, impl: str = "torch") -> Tensor:
    """Return nu where the sum is at most k: a budget that is not reached has no price."""
    nu = threshold(terms, shard, impl)
    most = largest_sum(terms, shard)
    wrong = reduce(_unsound(terms.x, terms.weight, terms.upper - terms.lower).to(most.dtype), "sum", shard)
    nu = torch.where(terms.k >= most, 0, torch.where(nu > 0, 0, nu))
    return torch.where(wrong > 0, torch.nan, nu)


def project(
    logits: Tensor,
    k: Tensor | float,
    given: tuple[Tensor | None, ...],
    mask: Tensor | None,
    temperature: float,
    kind: str,
    impl: str,
) -> Tensor:
    """Return the projection from a kernel, which reads plain tensors as they are; nu is in float64, ``(..., 1)``."""
    if recorded(logits, k, *given):
        out: Tensor = _Kernel.apply(logits, k, *given, mask, temperature, kind, impl)
        return out
    budget = Budget(logits, given, mask, temperature, kind)
    return kernels(impl).forward(budget, k)[0]  # type: ignore[no-any-return]


@functools.cache
def kernels(impl: str) -> Any:
    """Import the kernels of an implementation."""
    return importlib.import_module(f"lastlayer._{impl}.weighted")


def largest_sum(terms: Terms, shard: ClassShard | None) -> Tensor:
    """Return the largest weighted sum that the bounds allow, ``(..., 1)``."""
    at_lower = terms.weight * torch.where(terms.x == torch.inf, terms.upper, terms.lower)
    at_upper = terms.weight * torch.where(terms.x == -torch.inf, terms.lower, terms.upper)
    return reduce(torch.maximum(at_lower, at_upper), "sum", shard)


def points(terms: Terms, nu: Tensor) -> Tensor:
    """Return ``x + w nu``: infinite where nu is, unless the weight is 0 or the score is infinite itself; 0 for NaN."""
    finite = nu.isfinite()
    z = terms.x + terms.weight * torch.where(finite, nu, 0)
    end = torch.where(terms.weight * nu.detach() > 0, torch.inf, -torch.inf).to(z.dtype)
    ends = ~finite & (terms.weight != 0) & terms.x.isfinite()
    return torch.where(nu.isnan(), 0, torch.where(ends, end, z))


def values(terms: Terms, nu: Tensor) -> Tensor:
    """Return ``lower + (upper - lower) sigmoid(x + w nu)``, from the nearer bound: it is never passed by rounding."""
    z, width = points(terms, nu), terms.upper - terms.lower
    y = torch.where(z > 0, terms.upper - width * (-z).sigmoid(), terms.lower + width * z.sigmoid())
    return torch.where(nu.isnan(), nu, y)


def log_values(terms: Terms, nu: Tensor) -> Tensor:
    """Return the logarithm of the values, for bounds from 0; one that is infinite whatever nu is has no slope."""
    some = terms.upper > 0
    most = torch.where(some, torch.where(some, terms.upper, 1).log(), -torch.inf)
    z = points(terms, nu)
    z = torch.where(some & terms.x.isfinite(), z, z.detach())
    return torch.where(nu.isnan(), nu, most + F.logsigmoid(z))


def result(terms: Terms, nu: Tensor, kind: str) -> Tensor:
    """Return values or their logarithms."""
    return log_values(terms, nu) if kind == "log" else values(terms, nu)


def _solve(
    x: Tensor,
    weight: Tensor,
    lower: Tensor,
    upper: Tensor,
    k: Tensor,
    shard: ClassShard | None,
    near: Tensor | None = None,
) -> Tensor:
    """Return nu: the root of an increasing function, by Newton's method on the logarithm of its smaller side.

    A class with a negative weight is turned around, since ``w s(x + w nu) = w + |w| s(-x + |w| nu)``. All weights are
    then positive, and divided by a power of two, which rounds nothing. The search starts at `near`, if that is known.
    """
    width = upper - lower
    largest = reduce(weight.abs(), "max", shard)
    unit = torch.where((largest > 0) & largest.isfinite(), largest, 1).log2().floor().exp2()
    w = weight.abs() / unit
    a = w * width
    taken = torch.where(weight < 0, weight * upper, weight * lower)
    z = torch.where(weight < 0, -x, x)
    a = torch.where(x.isinf(), 0, a)  # their share is known
    sure, total, wrong = reduce(
        [
            taken + torch.where(z == torch.inf, w * width * unit, 0),
            a,
            _unsound(x, weight, width).to(x.dtype),
        ],
        "sum",
        shard,
    )
    c = (k - sure) / unit
    rest = total - c
    inside = (c > 0) & (rest > 0)
    near = None if near is None else near * unit
    nu = _root(z, w, a, torch.where(inside, c, total / 2), torch.where(inside, rest, total / 2), inside, shard, near)
    slack = _SLACK * (total + (k / unit).abs())
    end = torch.where(c.abs() <= slack, -torch.inf, torch.where(rest.abs() <= slack, torch.inf, torch.nan))
    nu = torch.where(inside, nu / unit, end)
    return torch.where((wrong > 0) | k.isnan(), torch.nan, nu)


def _unsound(x: Tensor, weight: Tensor, width: Tensor) -> Tensor:
    """Whether a class spoils its row: NaN, a weight or a bound that is infinite, or bounds the wrong way round."""
    return ~(width >= 0) | width.isinf() | ~weight.isfinite() | x.isnan()


def _root(
    z: Tensor,
    w: Tensor,
    a: Tensor,
    c: Tensor,
    rest: Tensor,
    wanted: Tensor,
    shard: ClassShard | None,
    near: Tensor | None = None,
) -> Tensor:
    """Solve ``sum a s(z + w nu) = c``, ``rest`` being ``sum a - c``; both are positive."""
    live = a > 0
    z = torch.where(live, z, 0).clamp(-_FARTHEST, _FARTHEST)
    w = torch.where(live, w, 1)
    shift = (c.log() - rest.log() - z) / w  # where a class alone would have the mean share
    lo = reduce(torch.where(live, shift, _BIG), "min", shard)
    hi = reduce(torch.where(live, shift, -_BIG), "max", shard)
    small = c <= rest
    goal = torch.where(small, c, rest)
    nu = _start(z, w, a, c, lo, hi, shard) if near is None else _inside(near, lo, hi)
    eps = torch.finfo(z.dtype).eps
    done = ~wanted | (lo >= hi)
    before = hi - lo
    for step in range(_STEPS):
        d = z + w * nu
        y, other = d.sigmoid(), (-d).sigmoid()
        part = a * torch.where(small, y, other)
        got, slope, noise = reduce([part, a * w * y * other, a * y * other * (d.abs() + z.abs())], "sum", shard)
        f = torch.where(small, got - goal, goal - got)
        lo, hi = torch.where(f <= 0, nu, lo), torch.where(f >= 0, nu, hi)
        done = done | (f.abs() <= 2 * eps * (goal + noise)) | (hi - lo <= 2 * eps * nu.abs())
        if bool(done.all()):
            break
        log_step = torch.where(small, 1, -1) * (got.log() - goal.log()) * got / slope
        newton = nu - log_step
        bad = ~((newton > lo) & (newton < hi))
        if step % 3 == 2:
            bad = bad | (hi - lo > before / 2)
            before = hi - lo
        nu = torch.where(done, nu, torch.where(bad, _middle(lo, hi), newton))
    d = z + w * nu
    tails = reduce(a * (-d.abs()).sigmoid(), "sum", shard)
    flat = wanted & (tails < _FLAT * goal)
    return torch.where(flat, _balance(z, w, a, c, nu, flat, shard), nu) if bool(flat.any()) else nu


def _balance(
    z: Tensor, w: Tensor, a: Tensor, c: Tensor, nu: Tensor, wanted: Tensor, shard: ClassShard | None
) -> Tensor:
    """Solve a row whose classes are all but decided at `nu`: those above 1/2 add up to `c` almost exactly.

    The sum is flat there and its rounding hides the solution, where the tails on both sides and what is missing of `c`
    are in balance. That is exact: large and small digits are added up apart. The tails may underflow, so that
    their logarithms are compared.
    """
    live = a > 0
    above = (z + w * nu > 0) & live
    grid = 2 * torch.finfo(z.dtype).eps * reduce(a, "sum", shard).log2().floor().exp2()
    large, goal = (a / grid).round() * grid, (c / grid).round() * grid
    sums = reduce([torch.where(above, large, 0), torch.where(above, a - large, 0)], "sum", shard)
    surplus = (sums[0] - goal) + (sums[1] - (c - goal))
    cross = -z / w  # where a class is at 1/2
    lo = reduce(torch.where(above, cross, -_BIG), "max", shard)
    hi = -reduce(torch.where(above | ~live, -_BIG, -cross), "max", shard)
    sides = (~above & live, above)
    extra = surplus.clamp(min=0).log(), (-surplus).clamp(min=0).log()
    eps, done = torch.finfo(z.dtype).eps, ~wanted
    for _ in range(_STEPS):
        far = (z + w * nu).abs()
        peaks = [-reduce(torch.where(side, -far, -_BIG), "max", shard) for side in sides]
        tail = a * far.sigmoid()  # over exp(-far)
        tails = [torch.where(side, tail * (peak - far).exp(), 0) for side, peak in zip(sides, peaks, strict=True)]
        sums = reduce([*tails, *(w * t * far.sigmoid() for t in tails)], "sum", shard)
        logs = [added.log() - peak for peak, added in zip(peaks, sums[:2], strict=True)]
        whole = [torch.logaddexp(log, more) for log, more in zip(logs, extra, strict=True)]
        f = whole[0] - whole[1]
        lo, hi = torch.where(f <= 0, nu, lo), torch.where(f >= 0, nu, hi)
        done = done | (f.abs() <= 4 * eps * (1 + whole[0].abs())) | (hi - lo <= 2 * eps * nu.abs())
        if bool(done.all()):
            break
        slope = sum(sums[i + 2] / sums[i] * (logs[i] - whole[i]).exp() for i in (0, 1))
        newton = nu - f / slope
        bad = ~((newton > lo) & (newton < hi))
        nu = torch.where(done, nu, torch.where(bad, _middle(lo, hi), newton))
    return nu


def _start(z: Tensor, w: Tensor, a: Tensor, c: Tensor, lo: Tensor, hi: Tensor, shard: ClassShard | None) -> Tensor:
    """Start where the classes, taken one after another as nu rises, reach the sum."""
    if shard is not None or z.shape[-1] == 0:
        return _middle(lo, hi)
    order = (-z / w).sort(dim=-1)
    place = (a.gather(-1, order.indices).cumsum(-1) < c).sum(-1, keepdim=True).clamp(max=z.shape[-1] - 1)
    return torch.minimum(torch.maximum(order.values.gather(-1, place), lo), hi)


def _inside(near: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
    """Return a start within a bracket, which is its middle where `near` is infinite or nan."""
    return torch.where(near.isfinite(), torch.minimum(torch.maximum(near, lo), hi), _middle(lo, hi))


def _middle(lo: Tensor, hi: Tensor) -> Tensor:
    """Return a point between: halves the orders of magnitude of a wide bracket, else the bracket."""
    half = lo / 2 + hi / 2
    by_order = ((lo * 1e3).asinh() / 2 + (hi * 1e3).asinh() / 2).sinh() / 1e3
    return torch.where((by_order > lo) & (by_order < hi), by_order, half)


@operator("weighted_threshold", *WAITS)
def _op(x: Tensor, weight: Tensor, lower: Tensor, upper: Tensor, k: Tensor, impl: str) -> Tensor:
    if impl == "native":
        nu: Tensor = kernels(impl).threshold(x, weight, lower, upper, k)
        return nu
    near = kernels(impl).near(x, weight, lower, upper, k) if impl == "triton" else None
    return _solve(x, weight, lower, upper, k, None, near)


@fake("weighted_threshold")
def _(x: Tensor, weight: Tensor, lower: Tensor, upper: Tensor, k: Tensor, impl: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], 1))


class _Threshold(torch.autograd.Function):
    """``(x, weight, lower, upper, k) -> nu``, with the derivatives of the sum solved for nu."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, lower: Tensor, upper: Tensor, k: Tensor, shard: ClassShard | None, impl: str
    ) -> Tensor:
        if shard is not None:
            return _solve(x, weight, lower, upper, k, shard)
        nu: Tensor = torch.ops.lastlayer.weighted_threshold(x, weight, lower, upper, k, impl)
        return nu

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *terms, ctx.shard, _ = inputs
        ctx.save_for_backward(*terms, output)
        ctx.save_for_forward(*terms, output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        share, nu, *by, slope, unsolved = _slopes(ctx)
        grad = reduce(grads[0], "sum", ctx.shard)
        given, grad_x = grad / slope, -grad * share
        by_weight, by_lower, by_upper = by
        found = grad_x, grad_x * nu - given * by_weight, -given * by_lower, -given * by_upper, given
        broken = unsolved & (grad != 0)
        return *(torch.where(broken, torch.nan, gradient) for gradient in found), None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        tensors = stacked(in_dims[:5], inputs[:5])
        return _ThresholdForwardMode.apply(*tensors, *inputs[5:]), 0


class _ThresholdForwardMode(_Threshold):
    """As `_Threshold`, with forward-mode derivatives."""

    @staticmethod
    @nestable
    def jvp(ctx: Any, *tangents: Any) -> Any:
        share, nu, *by, slope, unsolved = _slopes(ctx)
        x_t, weight_t, *others_t, k_t = tangents[:5]
        moved = added = torch.zeros_like(share)
        moved = moved if x_t is None else moved + share * x_t
        moved = moved if weight_t is None else moved + share * nu * weight_t
        for change, tangent in zip(by, (weight_t, *others_t), strict=True):
            added = added if tangent is None else added + change * tangent
        straight, missing = (-part for part in reduce([moved, added], "sum", ctx.shard))
        missing = missing if k_t is None else missing + k_t
        return torch.where(unsolved, torch.nan, straight + missing / slope)


class _Kernel(torch.autograd.Function):
    """``(logits, k, weight, lower, upper) -> projection`` by a kernel; further derivatives are those of plain torch."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        logits, k, *given, mask, temperature, kind, impl = inputs
        wanted = {"wanted": tuple(ctx.needs_input_grad[2:5])} if impl == "triton" else {}
        out, nu = kernels(impl).forward(Budget(logits, given, mask, temperature, kind), k, **wanted)
        ctx.number = k if isinstance(k, float) else None
        ctx.save_for_backward(logits, None if isinstance(k, float) else k, *given, mask, nu)
        ctx.temperature, ctx.kind, ctx.impl = temperature, kind, impl
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        logits, k, *given, mask, nu = ctx.saved_tensors
        (grad,) = grads
        if differentiated(grad):
            k = torch.full_like(nu, ctx.number) if k is None else k
            return *_plain_gradients(ctx, logits, k, given, mask, grad), None, None, None, None
        wanted = tuple(ctx.needs_input_grad[2:5])
        budget = Budget(logits, given, mask, ctx.temperature, ctx.kind)
        grad_x, grad_k, others = kernels(ctx.impl).backward(budget, nu, grad, wanted)
        others = [None if o is None else o.sum_to_size(v.shape).to(v.dtype) for o, v in zip(others, given, strict=True)]
        return grad_x, grad_k if ctx.needs_input_grad[1] else None, *others, None, None, None, None


def _plain_gradients(
    ctx: Any, logits: Tensor, k: Tensor, given: list[Tensor | None], mask: Tensor | None, grad: Tensor
) -> list[Tensor | None]:
    """Return the gradients of logits, k, weight, lower and upper in differentiable operations."""
    with torch.enable_grad():
        logits, k, *given = apart(logits, k, *given)
        inputs = zip((logits, k, *given), ctx.needs_input_grad[:5], strict=True)
        wanted = [value for value, asked in inputs if asked and value is not None]
        x = scores(logits.double(), mask, ctx.temperature)
        terms = in_one_shape(x, k, (given[0], given[1], given[2]))
        nu = at_most_threshold(terms, None) if ctx.kind == "at most" else threshold(terms, None)
        out = nu if ctx.kind == "nu" else result(terms, nu, ctx.kind).to(logits.dtype)
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=torch.is_grad_enabled()))
    return [next(found) if asked else None for asked in ctx.needs_input_grad[:5]]


def _slopes(ctx: Any) -> tuple[Tensor, ...]:
    """Return the share of x in the slope of the sum, nu, and the derivatives in weight, lower, upper and nu.

    Then come the rows without a solution, which have no derivatives here, not even of what is bad in them.

    That in the weight is at fixed points: what moves them is the share of x. The share is a quotient of numbers that
    may underflow where a row is decided, and is taken relative to the largest.
    """
    *given, nu = ctx.saved_tensors
    unsolved = nu.isnan()
    terms = Terms(*(torch.where(unsolved, 0, value) for value in given))
    finite = nu.isfinite()
    nu_or_0 = torch.where(finite, nu, 0)
    z = terms.x + terms.weight * nu_or_0
    y, other, width = z.sigmoid(), (-z).sigmoid(), terms.upper - terms.lower
    log_h = torch.where(finite & terms.x.isfinite(), F.logsigmoid(z) + F.logsigmoid(-z), -torch.inf)
    pulls = (terms.weight != 0) & (width > 0)  # others have no share, but a derivative of it
    peak = reduce(torch.where(pulls, log_h.detach(), -torch.inf), "max", ctx.shard)
    peak = torch.where(peak.isfinite(), peak, 0)
    by_x = terms.weight * width * torch.where(log_h - peak < _HUGE, log_h - peak, -torch.inf).exp()
    slope = reduce(terms.weight * by_x, "sum", ctx.shard)
    slope = torch.where(finite & (slope > 0), slope, torch.inf)
    by_weight = terms.lower + width * y
    whole = slope * peak.exp()
    whole = torch.where(whole < _SMALL, torch.inf, whole)  # where derivatives overflow there are none
    return by_x / slope, nu_or_0, by_weight, terms.weight * other, terms.weight * y, whole, unsolved
