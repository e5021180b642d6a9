"""Rows with weights and bounds of a length that is rarely met: one kernel for many lengths, which is quick to compile.

It has no branches: what few rows need is done for all of them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import triton
import triton.language as tl

from lastlayer._triton.device import (
    LN2,
    LOG2E,
    ROWS_FIRST,
    by_row,
    exp,
    exp2,
    is_finite,
    log2,
    rcp,
    store_tile,
    sum3,
    sum5,
    sum_w,
)
from lastlayer._triton.weighted_parts import (
    DIGITS,
    PASSES,
    budget_of,
    log_step,
    normal_start,
    score_tile,
    term_tile,
    two_floats,
    unit_above,
)

SPREAD = tl.constexpr(16.0)  # how far the search may move from its start: the points lose digits beyond


@triton.jit
def _limits(x, weight, lower, width):
    """What the classes of a row are certain to give and what they can give, in float64; and how many are wrong."""
    live = is_finite(x)
    sound = (width >= 0) & (width < float("inf")) & (tl.abs(weight) < float("inf")) & (x == x)
    raised = tl.where(live, weight < 0, x > 0)
    w = weight.to(tl.float64)
    wide = width.to(tl.float64)
    sure = w * (lower.to(tl.float64) + tl.where(raised, wide, 0.0))
    total = tl.where(live, tl.abs(w) * wide, 0.0)
    return sum3(sum_w(sure), sum_w(total), sum_w((sound == 0).to(tl.float64)), 1)


@triton.jit
def _moments(z, w, a):
    az = a * z
    aw = a * w
    return sum5(sum_w(az), sum_w(az * z), sum_w(az * w), sum_w(aw), sum_w(aw * w), 1)


@triton.jit
def _terms(p, w, a, move):
    """The sum and its first two derivatives; p is log2 of (1 - y) / y."""
    y = rcp(1 + exp2(tl.fma(w, by_row(move), p)))
    other = tl.fma(w * -1.0, y, w)
    ay = a * y
    s = ay * other
    return sum3(sum_w(ay), sum_w(s), sum_w(s * tl.fma(other, 2.0, w * -1.0)), 1)


@triton.jit
def _largest(weight):
    if ROWS_FIRST:
        return tl.max(tl.max(tl.abs(weight), 1), 1)
    else:
        return tl.max(tl.max(tl.abs(weight), 0), 1)


@triton.jit(do_not_specialize=["rows", "n"])
def rare(
    x_ptr, m_ptr, k_ptr, w_ptr, l_ptr, u_ptr, out_ptr, nu_ptr, rows, n, m_row, m_col, k_row, k_low, inv_t,
    R: tl.constexpr, C: tl.constexpr, W: tl.constexpr, MASKED: tl.constexpr, WEIGHT: tl.constexpr,
    LOWER: tl.constexpr, UPPER: tl.constexpr, AT_MOST: tl.constexpr, TOL: tl.constexpr,
):  # fmt: skip
    """R rows per program. One that is not solved has a nu of nan, and nothing else is written that stays."""
    row = tl.minimum(tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), rows - 1)
    k = budget_of(k_ptr, k_low, row, k_row)
    x = score_tile(x_ptr, m_ptr, row, m_row, m_col, n, 0, inv_t, W, C, False, MASKED)
    weight = term_tile(w_ptr, row, n, 0, W, C, False, WEIGHT, 1.0)
    lower = term_tile(l_ptr, row, n, 0, W, C, False, LOWER, 0.0)
    upper = term_tile(u_ptr, row, n, 0, W, C, False, UPPER, 1.0)
    width = upper - lower
    sure, total, wrong = _limits(x, weight, lower, width)
    unit = unit_above(_largest(weight))
    inv_unit = 1 / unit
    w = tl.where(is_finite(x), tl.abs(weight) * by_row(inv_unit), 0.0)
    z = tl.where(is_finite(x), tl.where(weight < 0, -x, x), 0.0)
    a = w * width
    z1, z2, zw, w1, w2 = _moments(z, w, a)
    scale = inv_unit.to(tl.float64)
    c = ((k - sure) * scale).to(tl.float32)
    rest = ((total - (k - sure)) * scale).to(tl.float32)
    # The smaller side is searched: a row that takes the most is turned around as a whole.
    side = tl.where(c <= rest, 1.0, -1.0)
    goal = tl.minimum(c, rest)
    searched = (goal > 0) & (wrong == 0)
    goal = tl.where(searched, goal, 1.0)
    over = rcp(tl.where(searched, c + rest, 1.0))
    logit = (log2(goal) - log2(tl.where(searched, tl.maximum(c, rest), 1.0))) * LN2
    center = normal_start(logit, side * z1 * over, z2 * over, side * zw * over, w1 * over, w2 * over)
    open_ = searched & (tl.abs(center) < 1e30)
    center = tl.where(open_, center, 0.0)
    p = tl.fma(w, by_row(side * center), z) * by_row(side * -LOG2E)
    delta = center * 0.0
    lost = ~open_
    worst = tl.max(open_.to(tl.float32), 0)
    left = PASSES
    while (worst > TOL) & (left > 0):
        f, s1, s2 = _terms(p, w, a, delta * -LOG2E)
        inverse = rcp(s1)
        r = (f - goal) * inverse
        size = tl.where(open_, tl.abs(r), 0.0)
        worst = tl.max(tl.where(size == size, size, 0.0), 0)
        step = -r * rcp(1 - 0.5 * r * s2 * inverse)  # Halley's; the error is at most 0.42 r^3
        step = tl.where(size > 0.3, log_step(f, goal, s1, s2), step)
        delta = tl.where(open_, delta + step, delta)
        lost = lost | (open_ & ~((tl.abs(delta) < SPREAD) & ((size > TOL) | (s1 > goal * DIGITS))))  # also nan
        open_ = (size > TOL) & ~lost
        left -= 1
    lost = lost | open_
    nu = side.to(tl.float64) * scale * (center.to(tl.float64) + delta.to(tl.float64))
    if AT_MOST:
        free = ((nu > 0) & searched & ~lost) | ((rest <= 0) & (wrong == 0))
        nu = tl.where(free, 0.0, nu)
        lost = lost & ~free
    high, low = two_floats(nu)
    t = tl.where(is_finite(x), tl.fma(weight, by_row(high), x) + weight * by_row(low), x)
    out = tl.minimum(tl.fma(width, rcp(1 + exp(-t)), lower), upper)
    store_tile(out_ptr, row, n, out, 0, W, C, False)
    tl.store(nu_ptr + row, tl.where(lost, float("nan"), nu))
