"""Rows with weights whose classes are all but decided, in float64: `_balance` of `lastlayer.project.weighted`.

Where the classes above 1/2 add up to the budget, the weighted sum is flat, and its rounding hides the solution. The
tails on both sides, and what is missing of the budget, are in balance there; their logarithms are compared.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import triton
import triton.language as tl

FLAT = tl.constexpr(1e-3)  # tails below this part of the sum
FAR = tl.constexpr(1e300)


@triton.jit
def turned(x, weight, lower, upper):
    """Score, weight and share of some classes, those with negative weights turned around; a share of 0 if decided."""
    live = tl.abs(x) < float("inf")
    w = tl.where(live, tl.abs(weight), 0.0)
    return tl.where(live, tl.where(weight < 0, -x, x), 0.0), w, w * (upper - lower)


@triton.jit
def power_of_two(x):
    """The largest power of two that is at most x."""
    bits = x.to(tl.int64, bitcast=True)
    return (bits & 0x7FF0000000000000).to(tl.float64, bitcast=True)


@triton.jit
def rounded(x, grid):
    return tl.floor(x / grid + 0.5) * grid


@triton.jit
def digits(z, w, a, nu, grid):
    """Sums over classes above 1/2: large and small digits of their shares; and the tails of all classes."""
    d = z + w * nu
    large = rounded(a, grid)
    up = (d > 0) & (a > 0)
    return tl.where(up, large, 0.0), tl.where(up, a - large, 0.0), a / (1 + tl.exp(tl.minimum(tl.abs(d), 700.0)))


@triton.jit
def crossings(z, w, a, nu):
    """The nu at which classes above 1/2 are at it, and those below; far away for the others."""
    cross = -z / tl.where(w > 0, w, 1.0)
    up = z + w * nu > 0
    return tl.where(up & (a > 0), cross, -FAR), tl.where((up == 0) & (a > 0), cross, FAR)


@triton.jit
def depths(z, w, a, start, nu):
    """-|d| of the classes below 1/2 and of those above, by where they are at the start."""
    depth = -tl.abs(z + w * nu)
    up = z + w * start > 0
    return tl.where((up == 0) & (a > 0), depth, -FAR), tl.where(up & (a > 0), depth, -FAR)


@triton.jit
def tails(z, w, a, start, nu, below, above):
    """The terms of the tails on both sides, over the exponentials of their peaks, and those of their slopes."""
    far = tl.abs(z + w * nu)
    up = z + w * start > 0
    over = 1 / (1 + tl.exp(-tl.minimum(far, 700.0)))
    e = a * over * tl.exp(tl.maximum(-far - tl.where(up, above, below), -700.0))
    e = tl.where(a > 0, e, 0.0)
    slope = w * e * over
    return tl.where(up, 0.0, e), tl.where(up, e, 0.0), tl.where(up, 0.0, slope), tl.where(up, slope, 0.0)


@triton.jit
def log_of_side(peak, added, pull, extra):
    """The logarithm of what one side amounts to, and its slope."""
    tail = tl.where(added > 0, peak + tl.log(added), -FAR)
    more = tl.where(extra > 0, tl.log(extra), -FAR)
    top = tl.maximum(tail, more)
    whole = top + tl.log(tl.exp(tl.maximum(tail - top, -700.0)) + tl.exp(tl.maximum(more - top, -700.0)))
    return whole, tl.where(added > 0, pull / added, 0.0) * tl.exp(tl.maximum(tail - whole, -700.0))
