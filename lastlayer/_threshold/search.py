"""The search for the threshold of each row, in plain torch: the fallback, and the specification of the kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lastlayer import _check
from lastlayer.shard import ClassShard, kth_largest, reduce

FAR = 1e30  # a bound that binds nothing
_SHARDED_PASSES = 7  # each costs a collective; a row that needs more would have its last step taken all the same
_WARM_PASSES = 3  # from a known threshold; after that the search begins again without it
_PASSES = 10  # a bound on the search; the worst row of tests/accuracy.py takes 7


class Feasible(NamedTuple):
    """What remains to be solved in each row once its infinite scores are counted; shape ``(..., 1)`` each."""

    k: Tensor  # left for the finite scores; half their number in a row without a solution
    n: Tensor  # the number of finite scores
    solvable: Tensor  # whether there is a finite nu
    end: Tensor  # nu where there is none: -inf if k is used up, inf if k takes every class, nan if k is infeasible


class Start(NamedTuple):
    """Where a search begins: in the middle of the bounds ``lo <= nu + center <= hi``, 0 up to rounding."""

    center: Tensor
    lo: Tensor
    hi: Tensor


class Sums(NamedTuple):
    """What a step of the search knows of all classes."""

    parts: Sequence[Tensor]  # the five sums of `small_parts`; more may follow
    peak: Tensor  # the parts are divided by exp(peak)
    exact: Tensor | None = None  # False where the sums are approximate, so that the search must go on


class Root(NamedTuple):
    """Where a search ended: ``nu = delta - center``."""

    center: Tensor
    delta: Tensor
    done: Tensor
    sums: Sums  # those of the last pass
    step: Tensor  # the last step, which these sums do not include


def solve(x: Tensor, k: Tensor, shard: ClassShard | None) -> tuple[Tensor, Tensor]:
    """Return ``(center, delta)`` with ``nu = delta - center``, each of shape ``(..., 1)``.

    A row without a finite nu has the delta of :attr:`Feasible.end`.
    """
    known = None if shard is None else shard.known(x.shape[:-1], x.dtype)
    warm = None if known is None else _solve_from(known, x, k, shard)
    center, delta = _solve(x, k, shard) if warm is None else warm
    if shard is not None:
        shard.note(delta - center)
    return center, delta


def _solve(x: Tensor, k: Tensor, shard: ClassShard | None) -> tuple[Tensor, Tensor]:
    """Search from order statistics."""
    left = feasible(k, *reduce(kinds(x), "sum", shard))
    x = finite_part(x)
    start, near = bracket(x, left, shard)

    def sums(center: Tensor, delta: Tensor) -> Sums:
        d = x - center
        # The neighbours of the solution are close to the nearest point of all, and every rank knows them.
        nearest, _ = shifted(d if shard is None else near - center, delta)
        peak = torch.where(left.solvable, reduce(-nearest.abs(), "max", None), 0)
        return Sums(reduce(small_parts(d, peak, delta), "sum", shard), peak)

    passes = _PASSES if shard is None else _SHARDED_PASSES
    root = iterate(sums, left.k, start, ~left.solvable, passes, stops=_check.readable(x))
    return ended(root, left)


def _solve_from(known: Tensor, x: Tensor, k: Tensor, shard: ClassShard | None) -> tuple[Tensor, Tensor] | None:
    """Search from a known nu; None where that does not end soon. The first sums come with the counts."""
    here, zero = finite_part(x), torch.zeros_like(known)
    counted = reduce([*kinds(x), *small_parts(here + known, zero, zero)], "sum", shard)
    left, first = feasible(k, *counted[:3]), [counted[3:]]

    def sums(center: Tensor, delta: Tensor) -> Sums:
        parts = first.pop() if first else reduce(small_parts(here - center, zero, delta), "sum", shard)
        return Sums(parts, zero)

    root = iterate(sums, left.k, anywhere(-known), ~left.solvable, _WARM_PASSES, stops=True)
    return ended(root, left) if bool(root.done.all()) else None


def kinds(x: Tensor) -> list[Tensor]:
    """Mark the finite scores, those at ``inf`` and the nan: what :func:`feasible` wants the sums of."""
    return [flag.to(x.dtype) for flag in (x.isfinite(), x == torch.inf, x.isnan())]


def finite_part(x: Tensor) -> Tensor:
    """Return the scores with ``-inf``, which weighs nothing, for those that are not finite."""
    return torch.where(x.isfinite(), x, -torch.inf)


def feasible(k: Tensor, n: Tensor, n_top: Tensor, n_nan: Tensor) -> Feasible:
    """Tell the rows with a finite nu from the others, given the sums of :func:`kinds`."""
    k = k - n_top
    solvable = (k > 0) & (k < n) & (n_nan == 0)
    end = torch.where(n_nan > 0, torch.nan, torch.where(k == 0, -torch.inf, torch.where(k == n, torch.inf, torch.nan)))
    return Feasible(torch.where(solvable, k, n / 2), n, solvable, end)


def ended(root: Root, left: Feasible) -> tuple[Tensor, Tensor]:
    """Return ``(center, delta)`` of all rows, with or without a finite nu."""
    return torch.where(left.solvable, root.center, 0), torch.where(left.solvable, root.delta, left.end)


def anywhere(center: Tensor) -> Start:
    """Return a start without bounds."""
    return Start(center, torch.full_like(center, -FAR), torch.full_like(center, FAR))


def iterate(
    sums_at: Callable[[Tensor, Tensor], Sums], k: Tensor, start: Start, done: Tensor, passes: int, *, stops: bool
) -> Root:
    """Step nu until every row is done, or for `passes` steps.

    ``sums_at(center, delta)`` sums over the points ``(x - center) + delta``. With `stops` the flags are read after each
    step; without, all passes are made.
    """
    center, lo, hi = start
    delta = (lo + hi) / 2  # what rounding took from the center
    lo, hi = lo - delta, hi - delta  # from here on about the point that is being looked at
    for _ in range(passes):
        sums = sums_at(center, delta)
        step, lo, hi, close = advance(sums.parts[:5], sums.peak, k, lo, hi)
        close = close if sums.exact is None else close & sums.exact
        step = torch.where(done, 0, step)
        # A row's last step stays in delta, so that the points at which the sums were taken are those returned; before
        # that delta holds what rounding the center lost.
        moved = torch.where(done | close, center, center - (delta + step))
        delta = (delta + step) + (moved - center)
        center, lo, hi, done = moved, lo - step, hi - step, done | close
        if stops and bool(done.all()):
            break
    return Root(center, delta, done, sums, step)


def bracket(x: Tensor, left: Feasible, shard: ClassShard | None) -> tuple[Start, Tensor]:
    """Return a start with exact bounds from two order statistics, and those statistics.

    With m < k < m' integers and x_(1) >= x_(2) >= ..., at most m classes are above x_(m+1), and their y at most 1:
    logit((k - m) / (n - m)) - x_(m+1) <= nu <= logit(k / m') - x_(m').
    """
    k, n, solvable, _ = left
    upper_rank, lower_rank = k.ceil(), k.floor() + 1  # m + 1 and m'
    upper, lower = kth_largest(x, torch.cat([upper_rank, lower_rank], -1), shard).split(1, -1)
    upper, lower = torch.where(solvable, upper, 0), torch.where(solvable, lower, 0)
    middle = lower / 2 + upper / 2  # which cannot overflow
    lo = torch.where(solvable, (k - (upper_rank - 1)).log() - (n - k).log(), 0) - (upper - middle)
    hi = torch.where(solvable, k.log() - (lower_rank - k).log(), 0) + (middle - lower)
    center = middle - (lo + hi) / 2
    moved = center - middle
    slack = 8 * torch.finfo(x.dtype).eps * (1 + moved.abs() + lo.abs() + hi.abs())
    return Start(center, lo + moved - slack, hi + moved + slack), torch.cat([upper, lower], -1)


def shifted(d: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``d + delta`` as points and a rest that is to enter as a factor, since rounding would show in the sum.

    A delta beyond 1 moves the points: it is what rounding took from a center whose neighbours are that far apart, and
    so are the scores near it.
    """
    far = torch.where(delta.abs() > 1, delta, 0)
    return d + far, delta - far


def tails(z: Tensor, peak: Tensor, rest: Tensor) -> Tensor:
    """Return ``exp(-|z|) / exp(peak)`` at points that are still to be moved by `rest`."""
    factor = rest.exp()
    return (-z.abs() - peak).exp() * torch.where(z > 0, 1 / factor, factor)


def small_parts(d: Tensor, peak: Tensor, delta: Tensor) -> list[Tensor]:
    """Return what a step sums over the points ``d + delta``: y or 1 - y, whichever is small, over ``exp(peak)``."""
    z, rest = shifted(d, delta)
    tail = tails(z, peak, rest)
    w = tail * peak.exp()
    w, scaled = w / (1 + w), tail / (1 + w)  # min(y, 1 - y), and the same over exp(peak)
    above = z > 0
    outer, inner = scaled * (1 - w) * (1 - w), scaled * (1 - w) * w
    bend = scaled * w * (3 - 2 * w)
    return [
        torch.where(above, outer, inner),  # sum y^2 (1 - y)
        torch.where(above, inner, outer),  # sum y (1 - y)^2
        above.to(z.dtype),
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
    size = torch.maximum(c.abs(), unit)  # the squares of a tiny k would underflow
    root = size * ((c / size).square() + 4 * (a * unit / size) * (b * unit / size)).sqrt()
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
    # Inside a gap that wide rounding decides which side is nearer: y is 0 or 1, and log y right as it is.
    apart = (surplus == 0) & (peak < -4 / eps)
    return torch.where(apart, 0, torch.where(close, halley, step)), lo, hi, close | apart


def scores(logits: Tensor, mask: Tensor | None, temperature: float) -> Tensor:
    """Return the scores in the dtype of the arithmetic: divided by the temperature, ``-inf`` where masked out."""
    x = logits.to(_check.work_dtype(logits))
    if temperature != 1.0:
        x = x / temperature
    return x if mask is None else x.masked_fill(~mask, -torch.inf)


def sizes(k: float | Tensor, x: Tensor) -> Tensor:
    """Return `k` as a tensor of the work dtype and of shape ``(*batch, 1)``, whether or not it is one number."""
    if isinstance(k, Tensor):
        return k
    return torch.full((), k, dtype=_check.work_dtype(x), device=x.device).expand(*x.shape[:-1], 1)


def points(x: Tensor, center: Tensor, delta: Tensor) -> Tensor:
    """Return ``x + nu``; an infinite logit keeps its sign against an infinite nu."""
    z = (x - center) + delta
    return torch.where(x.isinf() & delta.isinf(), x, z)
