"""The search for the threshold of each row, in plain torch: the fallback, and the specification of the kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lastlayer import _check
from lastlayer.shard import ClassShard, kth_largest, reduce

FAR = 1e30  # a bound that binds nothing
_SHARDED_PASSES = 7  # each costs a collective; a row that needs more would have its last step taken all the same
_WARM_PASSES = 3  # from a known threshold; after that the search begins again without it
_PASSES = 10  # a bound on the search; the worst row of tests/accuracy.py takes 7


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
        if (near is None or may_stop(x)) and bool(done.all()):
            break
    else:
        if near is None:
            return None
    return torch.where(solvable, center, 0), torch.where(solvable, delta, end)


def may_stop(x: Tensor) -> bool:
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


def tails(d: Tensor, peak: Tensor, delta: Tensor) -> Tensor:
    """Return ``exp(-|d|) / exp(peak)`` moved by delta: as a factor, for rounding ``d + delta`` shows in the sum."""
    factor = delta.clamp(-60, 60).exp()
    return (-d.abs() - peak).exp() * torch.where(d > 0, 1 / factor, factor)


def small_parts(d: Tensor, peak: Tensor, delta: Tensor) -> list[Tensor]:
    """Return what a step sums over the points ``d + delta``: y or 1 - y, whichever is small, over ``exp(peak)``."""
    tail = tails(d, peak, delta)
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
