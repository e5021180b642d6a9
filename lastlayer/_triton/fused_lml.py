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
    rcp,
    start,
    sum2,
    sum3,
    sum5,
    sweep_step,
    sweep_terms,
)
from lastlayer._triton.fused_rows import budget_terms, load_scores, load_shares, load_weight, store_row

LEAST = tl.constexpr(-2147483648)  # the key of what takes no part
MOST = tl.constexpr(2147483647)  # the key of nan, which torch too sorts above +inf
PASSES = tl.constexpr(12)  # of either search, as in `device.search` and `device.settle`
NEAR = tl.constexpr(0.02)  # the relative residual at which the fast one ends: the error is at most a third of its r^4


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
def _pivot(lo, hi, quarters, by_value):
    """A key above `lo` and no greater than `hi`: so many quarters of the way, by scores if these can tell."""
    apart = (hi - lo).to(tl.uint32, bitcast=True)
    key = lo + ((apart >> 2) * quarters + (((apart & 3) * quarters + 3) >> 2)).to(tl.int32, bitcast=True)
    low = of_key(lo)
    value = low + (of_key(hi) / 4 - low / 4) * quarters
    at = key_of(tl.where(is_finite(value), value, 0.0))
    return tl.where(by_value & is_finite(value) & (at > lo) & (at <= hi), at, key)


@triton.jit
def at_rank(key, rank, live, lowest, highest):
    """A number that as many keys reach as a rank says, 1 for the largest, or more if some are equal.

    Given are the number of keys above LEAST, at least the rank, the least of them, and the greatest. An interval is cut
    in four by its scores, which takes few steps where these are spread evenly, then by its keys. There are less than
    2^15 keys.
    """
    # At least `rank` keys are no less than lo, and fewer are above hi.
    lo = lowest
    hi = tl.where(live >= rank, highest, lowest)
    tries = 0
    while lo < hi:
        first = _pivot(lo, hi, 1, tries < 16)
        second = _pivot(lo, hi, 2, tries < 16)
        third = _pivot(lo, hi, 3, tries < 16)
        two = (key >= first).to(tl.int32) + tl.where(key >= second, 1 << 16, 0)
        two, count3 = sum2(two, (key >= third).to(tl.int32), 0)
        count1 = two & 0xFFFF
        count2 = two >> 16
        above = tl.where(count1 < rank, first, tl.where(count2 < rank, second, tl.where(count3 < rank, third, hi + 1)))
        lo = tl.where(count3 >= rank, third, tl.where(count2 >= rank, second, tl.where(count1 >= rank, first, lo)))
        found = (count1 == rank) | (count2 == rank) | (count3 == rank)
        hi = tl.where(found, lo, above - 1)
        tries += 1
    return lo


@triton.jit
def kth(key, rank, live, lowest, highest):
    """The key of a rank, as `at_rank` finds it; LEAST where there are fewer keys above that."""
    lo = at_rank(key, rank, live, lowest, highest)
    return tl.where(live >= rank, tl.min(tl.where(key >= lo, key, MOST), 0), LEAST)


@triton.jit
def _add_and_most(a0, a1, b0, b1):
    return a0 + b0, tl.maximum(a1, b1)


@triton.jit
def two_ranks(key, k, live, lowest, highest):
    """The keys of the ranks ceil(k) and floor(k) + 1."""
    upper = kth(key, tl.ceil(k).to(tl.int32), live, lowest, highest)
    count = (key >= upper).to(tl.float32)
    lower = tl.where(key < upper, key, LEAST)
    if COMPILED:
        count, lower = tl.reduce((count, lower), 0, _add_and_most)
    else:
        count, lower = tl.sum(count, 0), tl.max(lower, 0)
    return upper, tl.where(count >= tl.floor(k) + 1, upper, lower)


@triton.jit
def shift_of(x_ptr, row, n, temperature):
    """The first score of a row, about which moments are taken; 0 where it is infinite."""
    x = tl.load(x_ptr + row * n).to(tl.float32) / temperature
    return tl.where(is_finite(x), x, 0.0)


@triton.jit
def masked_scores(x_ptr, m_ptr, row, m_row, m_col, n, cols, temperature):
    """Scores over the temperature; -inf where a class is ruled out."""
    x = load_scores(x_ptr, row, n, cols)
    if m_ptr is not None:
        x = tl.where(load_weight(m_ptr, row, m_row, m_col, n, cols) > 0, x, float("-inf"))
    if temperature != 1.0:
        x = tl.where(is_finite(x), tl.div_rn(x, x * 0.0 + temperature), x)
    return x


@triton.jit
def _known_scores(x_ptr, d_ptr, m_ptr, row, m_row, m_col, n, cols, temperature, TARGET: tl.constexpr):
    """As `masked_scores`; -inf where a label is unknown too."""
    x = masked_scores(x_ptr, m_ptr, row, m_row, m_col, n, cols, temperature)
    if TARGET == "dense":
        given = tl.load(d_ptr + (row * n + cols), mask=cols < n, other=0).to(tl.float32)
        x = tl.where(given < 0, float("-inf"), x)
    return x


@triton.jit
def _from_order(
    x_ptr, d_ptr, m_ptr, row, m_row, m_col, n, temperature, k, live, TARGET: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The center and delta of any row that has them: `device.settle`. The row is read again; few need it."""
    lo1 = tl.full((), LEAST, tl.int64)
    hi1 = tl.full((), MOST, tl.int64)
    lo2 = lo1
    hi2 = hi1
    for _ in range(33):
        mid1 = (lo1 + hi1) >> 1
        mid2 = (lo2 + hi2) >> 1
        count1 = tl.zeros((BLOCK,), tl.float32)
        count2 = tl.zeros((BLOCK,), tl.float32)
        for j in range(0, n, BLOCK):
            cols = j + tl.arange(0, BLOCK)
            x = _known_scores(x_ptr, d_ptr, m_ptr, row, m_row, m_col, n, cols, temperature, TARGET)
            key = key_of(tl.where(is_finite(x), x, float("-inf")))
            count1 += (key >= mid1.to(tl.int32)).to(tl.float32)
            count2 += (key >= mid2.to(tl.int32)).to(tl.float32)
        count1, count2 = sum2(count1, count2, 0)
        lo1 = tl.where(count1 >= tl.ceil(k), mid1, lo1)
        hi1 = tl.where(count1 >= tl.ceil(k), hi1, mid1)
        lo2 = tl.where(count2 > tl.floor(k), mid2, lo2)
        hi2 = tl.where(count2 > tl.floor(k), hi2, mid2)
    center, lo, hi = bracket(of_key(lo1.to(tl.int32)), of_key(lo2.to(tl.int32)), k, live)
    delta = (lo + hi) / 2  # what rounding took from the center
    lo = lo - delta
    hi = hi - delta
    left = PASSES
    while left > 0:
        far = far_part(delta)
        factor = exp(delta - far)
        peak = tl.full((BLOCK,), float("-inf"), tl.float32)
        for j in range(0, n, BLOCK):
            cols = j + tl.arange(0, BLOCK)
            x = _known_scores(x_ptr, d_ptr, m_ptr, row, m_row, m_col, n, cols, temperature, TARGET)
            peak = tl.maximum(peak, tl.where(is_finite(x), -tl.abs((x - center) + far), float("-inf")))
        peak = tl.max(peak, 0)
        a = tl.zeros((BLOCK,), tl.float32)
        b = tl.zeros((BLOCK,), tl.float32)
        count = tl.zeros((BLOCK,), tl.float32)
        residual = tl.zeros((BLOCK,), tl.float32)
        cubic = tl.zeros((BLOCK,), tl.float32)
        for j in range(0, n, BLOCK):
            cols = j + tl.arange(0, BLOCK)
            x = _known_scores(x_ptr, d_ptr, m_ptr, row, m_row, m_col, n, cols, temperature, TARGET)
            d = (tl.where(is_finite(x), x, float("-inf")) - center) + far
            above = d > 0
            tail = tl.exp(-tl.abs(d) - peak) * tl.where(above, 1 / factor, factor)
            w = tail * tl.exp(peak)
            scaled = tail / (1 + w)
            w = w / (1 + w)
            outer = scaled * (1 - w) * (1 - w)
            inner = scaled * (1 - w) * w
            bend = scaled * w * (3 - 2 * w)
            a += tl.where(above, outer, inner)
            b += tl.where(above, inner, outer)
            count += above.to(tl.float32)
            residual += tl.where(above, -scaled, scaled)
            cubic += tl.where(above, -bend, bend)
        a, b, count, residual, cubic = sum5(a, b, count, residual, cubic, 0)
        step, lo, hi, done = advance(a, b, count, residual, cubic, peak, k, lo, hi)
        moved = tl.where(done, center, center - (delta + step))
        delta = (delta + step) + (moved - center)
        center = moved
        lo = lo - step
        hi = hi - step
        left = tl.where(done, 0, left - 1)
    return center, delta


@triton.jit
def threshold(
    x, k, live, n_top, n_bad, s, q, x_ptr, d_ptr, m_ptr, row, m_row, m_col, n, temperature, TARGET: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return (center, delta) with nu = delta - center of a row in registers: `lastlayer._threshold.search.solve`.

    Given are the numbers of finite scores, of +inf and of nan, and the sums of x - shift and its square. The search is
    that of `device.sweep`, from the center of a row of normal scores.
    """
    k = k - n_top
    ended = tl.where(k == 0, float("-inf"), tl.where(k == live, float("inf"), float("nan")))
    ended = tl.where(n_bad > 0, float("nan"), ended)
    # No branch around the loops: Triton visits what is in one twice.
    solvable = (k > 0) & (k < live) & (n_bad == 0)
    center = tl.where(solvable, start(s, q, shift_of(x_ptr, row, n, temperature), live, k, None), 0.0)
    delta = tl.full((), 0.0, tl.float32)
    x = tl.where(is_finite(x), x, float("-inf"))
    lost = ~is_finite(center)
    left = tl.where(lost | ~solvable, 0, PASSES)
    while left > 0:
        f, above, s1, s2, h2 = sum5(*sweep_terms(x, center), 0)
        step, _, near, lost = sweep_step(f, above, s1, s2, h2, k, NEAR)
        delta = step
        left -= 1
        lost = lost | ((left == 0) & ~near)
        left = tl.where(lost | near, 0, left)
        center = tl.where(near, center, center - step)
    if lost:
        center, delta = _from_order(x_ptr, d_ptr, m_ptr, row, m_row, m_col, n, temperature, k, live, TARGET, BLOCK)
    delta = tl.where(solvable, delta, ended)
    return center, delta


@triton.jit
def _add7(a0, a1, a2, a3, a4, a5, a6, b0, b1, b2, b3, b4, b5, b6):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6


@triton.jit
def _sum7(a, b, c, d, e, f, g):
    if COMPILED:
        return tl.reduce((a, b, c, d, e, f, g), 0, _add7)
    else:
        return tl.sum(a, 0), tl.sum(b, 0), tl.sum(c, 0), tl.sum(d, 0), tl.sum(e, 0), tl.sum(f, 0), tl.sum(g, 0)


# each: the mask. first: k of each row, or None: number0, which below 0 stands for the number of labels. number1: 1
# where k is at most the number of known classes.
@triton.jit(do_not_specialize=["rows", "n", "width", "f_row", "e_row", "p_row"])
def fenchel_young(
    x_ptr, d_ptr, e_ptr, p_ptr, f_ptr, s_ptr, loss_ptr, out_ptr, counts_ptr, extra_ptr, rows, n, width,
    e_row, e_col, p_row, p_col, f_row, number0, number1, number2, number3, scale,
    TARGET: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of log(1 + exp(x + nu)) less k nu and the labels' scores, with the gradient y less the labels."""
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
    finite = is_finite(x)
    d = tl.where(finite, x - shift_of(x_ptr, row, n, 1.0), 0.0)
    live, n_top, n_bad, s, q, count, classes = _sum7(
        finite.to(tl.float32),
        (x == float("inf")).to(tl.float32),
        (x != x).to(tl.float32),
        d,
        d * d,
        share,  # a target of nan shows
        (known & (cols < n)).to(tl.float32),
    )
    k = size_of(tl.where(number0 < 0, count, number0), f_ptr, row, f_row)
    k = tl.where(number1 > 0, tl.minimum(k, classes), k)
    center, delta = threshold(
        x, k, live, n_top, n_bad, s, q, x_ptr, d_ptr, e_ptr, row, e_row, e_col, n, 1.0, TARGET, BLOCK // 8
    )
    term, slope = budget_terms(x, tl.where(share == share, share, 0.0), center, delta)
    rest = tl.where(tl.abs(delta) == float("inf"), count * 0.0, (count - k) * (delta - center))
    tl.store(loss_ptr + row, tl.sum(tl.where(cols < n, term, 0.0), 0) + rest)
    tl.store(counts_ptr + row, 1)
    if GRADIENT:
        store_row(out_ptr, row, n, cols, tl.where(count == count, scale * slope, float("nan")))


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
    e_row, e_col, p_row, p_col, f_row, number0, number1, number2, number3, scale,
    TARGET: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sigmoid where that meets the budget k, and lml elsewhere."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = masked_scores(x_ptr, e_ptr, row, e_row, e_col, n, cols, number1)
    k = size_of(number0, f_ptr, row, f_row)
    finite = is_finite(x)
    d = tl.where(finite, x - shift_of(x_ptr, row, n, number1), 0.0)
    live, n_top, n_bad, s, q = sum5(
        finite.to(tl.float32), (x == float("inf")).to(tl.float32), (x != x).to(tl.float32), d, d * d, 0
    )
    k = tl.where(k > live + n_top, live + n_top, k)
    center, delta = threshold(
        x, k, live, n_top, n_bad, s, q, x_ptr, d_ptr, e_ptr, row, e_row, e_col, n, number1, "none", BLOCK // 8
    )
    binds = delta < center
    nan = delta != delta
    center = tl.where(binds, center, 0.0)
    delta = tl.where(binds, delta, 0.0)
    endless = delta == float("-inf")
    d, factor = _tails(x, center, tl.where(endless, 0.0, delta))
    tail = exp(-tl.abs(d)) * factor
    y = tl.where(d > 0, 1.0, tail) * rcp(1 + tail)
    y = tl.where(endless, tl.where(x == float("inf"), 1.0, 0.0), y)
    store_row(out_ptr, row, n, cols, tl.where(nan, float("nan"), y))
    tl.store(extra_ptr + 3 * row, center)
    tl.store(extra_ptr + 3 * row + 1, tl.where(nan, float("nan"), delta))
    tl.store(extra_ptr + 3 * row + 2, binds.to(tl.float32))


# each: the upstream gradient; positive: the mask; first: center, delta and binds of each row. number0: the temperature.
@triton.jit(do_not_specialize=["rows", "n", "width", "f_row", "e_row", "e_col", "p_row", "p_col"])
def at_most_backward(
    x_ptr, d_ptr, e_ptr, p_ptr, f_ptr, s_ptr, loss_ptr, out_ptr, counts_ptr, extra_ptr, rows, n, width,
    e_row, e_col, p_row, p_col, f_row, number0, number1, number2, number3, scale,
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
