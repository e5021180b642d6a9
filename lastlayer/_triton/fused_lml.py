"""Kernels of `fused` that search for the threshold nu of a row: for the Fenchel-Young loss, and for budgets.

They read a row once and hold it in registers, and have one copy of each step, so that they are quick to compile.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import triton
import triton.language as tl

from lastlayer._triton.device import (
    COMPILED,
    advance,
    bracket,
    exp,
    far_part,
    is_finite,
    key_of,
    of_key,
    start,
    sum2,
    sum3,
    sum5,
)
from lastlayer._triton.fused_rows import load_scores, load_shares, load_weight, store_row

LEAST = tl.constexpr(-2147483648)  # the key of what takes no part
MOST = tl.constexpr(2147483647)  # the key of nan, which torch too sorts above +inf
PASSES = tl.constexpr(12)  # of a search that starts from order statistics, as in `device.settle`
TRIES = tl.constexpr(6)  # passes before it, from a guess
FAR = tl.constexpr(1e30)  # a bound that binds nothing


@triton.jit
def number_of(value):
    """A number as a tensor, which in the interpreter it is not."""
    return tl.full((), 0.0, tl.float32) + value


@triton.jit
def size_of(size, f_ptr, row, f_row):
    """K of a row: one number for all of them if there is no pointer."""
    k = number_of(size)
    if f_ptr is not None:
        k = tl.load(f_ptr + row * f_row)
    return k


@triton.jit
def _add_and_least(a0, a1, b0, b1):
    return a0 + b0, tl.minimum(a1, b1)


@triton.jit
def _count_and_least(reached, key):
    """The number of the keys reached, and the least of them; one reduction of both costs the barriers of one."""
    count = reached.to(tl.int32)
    least = tl.where(reached, key, MOST)
    if COMPILED:
        return tl.reduce((count, least), 0, _add_and_least)
    else:
        return tl.sum(count, 0), tl.min(least, 0)


@triton.jit
def kth(key, rank):
    """The key of a rank, 1 for the largest; LEAST where there are fewer keys above it.

    An interval is halved by its scores, which takes few steps where these are spread evenly, then by its keys.
    """
    # At least `rank` keys are no less than lo, and fewer are above hi.
    live, lowest = _count_and_least(key > LEAST, key)
    lo = tl.where(live >= rank, lowest, LEAST).to(tl.int64)
    hi = tl.where(live >= rank, tl.max(key, 0), LEAST).to(tl.int64)
    tries = 0
    while lo < hi:
        mid = lo + (hi - lo + 1) // 2
        value = of_key(lo.to(tl.int32)) / 2 + of_key(hi.to(tl.int32)) / 2
        by_value = key_of(tl.where(is_finite(value), value, 0.0)).to(tl.int64)
        fit = is_finite(value) & (by_value > lo) & (by_value <= hi) & (tries < 16)
        mid = tl.where(fit, by_value, mid)
        count, least = _count_and_least(key >= mid.to(tl.int32), key)
        lo = tl.where(count >= rank, least.to(tl.int64), lo)
        hi = tl.where(count == rank, least.to(tl.int64), tl.where(count > rank, hi, mid - 1))
        tries += 1
    return lo.to(tl.int32)


@triton.jit
def two_ranks(key, k):
    """The keys of the ranks ceil(k) and floor(k) + 1."""
    upper = kth(key, tl.ceil(k).to(tl.int32))
    reached = tl.sum((key >= upper).to(tl.float32), 0) >= tl.floor(k) + 1
    return upper, tl.where(reached, upper, tl.max(tl.where(key < upper, key, LEAST), 0))


@triton.jit
def threshold(x, k):
    """Return (center, delta) with nu = delta - center of a row in registers: `lastlayer._threshold.search.solve`.

    The search starts from the center of a row of normal scores. Where that does not end soon, it starts again from
    order statistics, with bounds.
    """
    finite = is_finite(x)
    top = (x == float("inf")).to(tl.float32)
    bad = (x != x).to(tl.float32)
    fixed = tl.max(tl.where(finite, x, float("-inf")), 0)
    d = tl.where(finite, x - fixed, 0.0)
    n, n_top, n_bad, s, q = sum5(finite.to(tl.float32), top, bad, d, d * d, 0)
    k = k - n_top
    center = tl.full((), 0.0, tl.float32)
    delta = tl.where(k == 0, float("-inf"), tl.where(k == n, float("inf"), float("nan")))
    delta = tl.where(n_bad > 0, float("nan"), delta)
    if (k > 0) & (k < n) & (n_bad == 0):
        center = start(s, q, fixed, n, k, None)
        delta = tl.full((), 0.0, tl.float32)
        lo = delta - FAR
        hi = delta + FAR
        left = tl.where(is_finite(center), TRIES + PASSES, PASSES)
        while left > 0:
            if left == PASSES:
                upper, lower = two_ranks(tl.where(finite, key_of(tl.where(finite, x, 0.0)), LEAST), k)
                center, lo, hi = bracket(of_key(upper), of_key(lower), k, n)
                delta = (lo + hi) / 2  # what rounding took from the center
                lo = lo - delta
                hi = hi - delta
            far = far_part(delta)
            d = (tl.where(finite, x, float("-inf")) - center) + far
            peak = tl.max(-tl.abs(d), 0)
            factor = exp(delta - far)
            above = d > 0
            tail = tl.exp(-tl.abs(d) - peak) * tl.where(above, 1 / factor, factor)
            w = tail * tl.exp(peak)
            scaled = tail / (1 + w)
            w = w / (1 + w)
            outer = scaled * (1 - w) * (1 - w)
            inner = scaled * (1 - w) * w
            bend = scaled * w * (3 - 2 * w)
            a, b, count, residual, cubic = sum5(
                tl.where(above, outer, inner),
                tl.where(above, inner, outer),
                above.to(tl.float32),
                tl.where(above, -scaled, scaled),
                tl.where(above, -bend, bend),
                0,
            )
            step, lo, hi, done = advance(a, b, count, residual, cubic, peak, k, lo, hi)
            moved = tl.where(done, center, center - (delta + step))
            delta = (delta + step) + (moved - center)
            center = moved
            lo = lo - step
            hi = hi - step
            left = tl.where(done, 0, left - 1)
    return center, delta


@triton.jit
def masked_scores(x_ptr, m_ptr, row, m_row, m_col, n, cols, temperature):
    """Scores over the temperature; -inf where a class is ruled out."""
    x = load_scores(x_ptr, row, n, cols)
    if m_ptr is not None:
        x = tl.where(load_weight(m_ptr, row, m_row, m_col, n, cols) > 0, x, float("-inf"))
    return tl.where(is_finite(x), tl.div_rn(x, x * 0.0 + temperature), x)


# each: the mask. first: k of each row, or None: number0, which below 0 stands for the number of labels. number1: 1
# where k is at most the number of known classes. extra: center, delta, the number of labels and k.
@triton.jit(do_not_specialize=["rows", "n", "width", "f_row", "e_row", "p_row"])
def labelled(
    x_ptr, d_ptr, e_ptr, p_ptr, f_ptr, s_ptr, loss_ptr, out_ptr, counts_ptr, extra_ptr, rows, n, width,
    e_row, e_col, p_row, p_col, f_row, number0, number1, number2, number3,
    TARGET: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The threshold of the known classes, for the Fenchel-Young loss."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = masked_scores(x_ptr, e_ptr, row, e_row, e_col, n, cols, 1.0)
    if TARGET == "dense":
        given = tl.load(d_ptr + (row * n + cols), mask=cols < n, other=0).to(tl.float32)
        known = (given >= 0) | (given != given)
        share = tl.where(known, tl.where(given > 1, 1.0, given), 0.0)
    else:
        share = load_shares(d_ptr, row, n, width, cols, TARGET)
        known = share >= 0
    x = tl.where(known, x, float("-inf"))
    count, classes = sum2(share, (known & (cols < n)).to(tl.float32), 0)  # a target of nan shows
    k = size_of(tl.where(number0 < 0, count, number0), f_ptr, row, f_row)
    k = tl.where(number1 > 0, tl.minimum(k, classes), k)
    center, delta = threshold(x, k)
    tl.store(extra_ptr + 4 * row, center)
    tl.store(extra_ptr + 4 * row + 1, delta)
    tl.store(extra_ptr + 4 * row + 2, count)
    tl.store(extra_ptr + 4 * row + 3, k)


@triton.jit
def _tails(x, center, delta):
    """The scores' distances d from the threshold, and exp(-|d|), without the last part of delta; and that as a factor.

    The factor is for d < 0, and one over it for d > 0.
    """
    far = far_part(delta)
    d = (x - center) + far
    factor = exp(delta - far)
    return d, tl.where(d > 0, 1 / factor, factor)


# each: the mask. first: k of each row, or None: number0. number1: the temperature. extra: center, delta, and 1 where
# the budget binds.
@triton.jit(do_not_specialize=["rows", "n", "width", "f_row", "e_row", "p_row"])
def at_most(
    x_ptr, d_ptr, e_ptr, p_ptr, f_ptr, s_ptr, loss_ptr, out_ptr, counts_ptr, extra_ptr, rows, n, width,
    e_row, e_col, p_row, p_col, f_row, number0, number1, number2, number3,
    TARGET: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sigmoid where that meets the budget k, and lml elsewhere."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = masked_scores(x_ptr, e_ptr, row, e_row, e_col, n, cols, number1)
    k = size_of(number0, f_ptr, row, f_row)
    live = tl.sum((x > float("-inf")).to(tl.float32), 0)
    center, delta = threshold(x, tl.where(k > live, live, k))
    binds = delta < center
    nan = delta != delta
    center = tl.where(binds, center, 0.0)
    delta = tl.where(binds, delta, 0.0)
    endless = delta == float("-inf")
    d, factor = _tails(x, center, tl.where(endless, 0.0, delta))
    tail = exp(-tl.abs(d)) * factor
    y = tl.where(d > 0, 1.0, tail) / (1 + tail)
    y = tl.where(endless, tl.where(x == float("inf"), 1.0, 0.0), y)
    store_row(out_ptr, row, n, cols, tl.where(nan, float("nan"), y))
    tl.store(extra_ptr + 3 * row, center)
    tl.store(extra_ptr + 3 * row + 1, tl.where(nan, float("nan"), delta))
    tl.store(extra_ptr + 3 * row + 2, binds.to(tl.float32))


# each: the upstream gradient; positive: the mask; first: center, delta and binds of each row. number0: the temperature.
@triton.jit(do_not_specialize=["rows", "n", "width", "f_row", "e_row", "e_col", "p_row", "p_col"])
def at_most_backward(
    x_ptr, d_ptr, e_ptr, p_ptr, f_ptr, s_ptr, loss_ptr, out_ptr, counts_ptr, extra_ptr, rows, n, width,
    e_row, e_col, p_row, p_col, f_row, number0, number1, number2, number3,
    TARGET: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient h (u - sum h u / sum h) over temperature where the budget binds, h u elsewhere; h = y (1 - y)."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = masked_scores(x_ptr, p_ptr, row, p_row, p_col, n, cols, number0)
    u = load_weight(e_ptr, row, e_row, e_col, n, cols)
    center = tl.load(f_ptr + 3 * row)
    delta = tl.load(f_ptr + 3 * row + 1)
    binds = tl.load(f_ptr + 3 * row + 2) > 0
    live = is_finite(x)
    asked = (u != 0).to(tl.float32)
    u = tl.where(live, u, 0.0)
    d, factor = _tails(x, center, tl.where(is_finite(delta), delta, 0.0))
    depth = tl.where(live, -tl.abs(d), float("-inf"))
    peak = tl.max(depth, 0)
    peak = tl.where(is_finite(peak), peak, 0.0)
    tail = exp(depth) * factor
    over = 1 / (1 + tail)
    part = exp(depth - peak) * factor * over * over  # h over exp(peak), which may be 0
    mass, moment, asked = sum3(part, part * u, asked, 0)
    mean = moment / tl.where(mass > 0, mass, 1.0)
    value = tail * over * over * (u - tl.where(binds, mean, 0.0))
    value = tl.where(delta == float("-inf"), 0.0, value) / number0
    broken = (asked > 0) & (delta != delta)
    store_row(out_ptr, row, n, cols, tl.where(broken, float("nan"), tl.where(live, value, 0.0)))
