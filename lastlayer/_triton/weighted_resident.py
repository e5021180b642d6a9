"""Rows with weights and bounds that are held in registers: the search, and the values.

The weights of a row are divided by a power of two and turned positive, so that ``sum a sigmoid(z + w nu) = c`` with
``0 <= w <= 1`` is left, and Halley's step has the certificates of `lml`: its error is at most 0.42 r^3, where r is
Newton's step. The points are computed once, at a first guess of nu, and moved from there.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import triton
import triton.language as tl

from lastlayer._triton.device import (
    COMPILED,
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
    sum_w,
)
from lastlayer._triton.weighted_parts import (
    DIGITS,
    PASSES,
    budget_of,
    exact_sums,
    log_step,
    normal_start,
    score_tile,
    term_tile,
    two_floats,
    unit_above,
)

SPREAD = tl.constexpr(16.0)  # how far the search may move from its start: the points lose digits beyond


@triton.jit
def _max2(a0, a1, b0, b1):
    return tl.maximum(a0, b0), tl.maximum(a1, b1)


@triton.jit
def largest2(a, b, axis: tl.constexpr):
    if COMPILED:
        return tl.reduce((a, b), axis, _max2)
    else:
        return tl.max(a, axis), tl.max(b, axis)


@triton.jit
def max_w(tile):
    """The largest over w: shape (R, C)."""
    if ROWS_FIRST:
        return tl.max(tile, 1)
    else:
        return tl.max(tile, 0)


@triton.jit
def _load_pair(
    w_ptr, l_ptr, u_ptr, row, n, first, inv_unit, W, C, FULL: tl.constexpr, WEIGHT: tl.constexpr, LOWER: tl.constexpr,
    UPPER: tl.constexpr,
):  # fmt: skip
    """The weights of a tile, without their signs and divided by the unit, and the distance of the bounds."""
    w = tl.abs(term_tile(w_ptr, row, n, first, W, C, FULL, WEIGHT, 1.0)) * by_row(inv_unit)
    width = w
    if UPPER > 0:
        width = term_tile(u_ptr, row, n, first, W, C, FULL, UPPER, 1.0)
    elif LOWER > 0:
        width = w * 0.0 + 1.0
    if LOWER > 0:
        width = width - term_tile(l_ptr, row, n, first, W, C, FULL, LOWER, 0.0)
    return w, width


@triton.jit
def _load_pairs(
    w_ptr, l_ptr, u_ptr, row, n, inv_unit, WA: tl.constexpr, WB: tl.constexpr, WC: tl.constexpr, C: tl.constexpr,
    FULL: tl.constexpr, WEIGHT: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr,
):  # fmt: skip
    """The same for all tiles; one that does not exist is a copy of the first."""
    wa, da = _load_pair(w_ptr, l_ptr, u_ptr, row, n, 0, inv_unit, WA, C, FULL or WB > 0, WEIGHT, LOWER, UPPER)
    wb = wa
    db = da
    wc = wa
    dc = da
    if WB > 0:
        wb, db = _load_pair(w_ptr, l_ptr, u_ptr, row, n, WA * C, inv_unit, WB, C, FULL or WC > 0, WEIGHT, LOWER, UPPER)
    if WC > 0:
        wc, dc = _load_pair(w_ptr, l_ptr, u_ptr, row, n, (WA + WB) * C, inv_unit, WC, C, FULL, WEIGHT, LOWER, UPPER)
    return wa, da, wb, db, wc, dc


@triton.jit
def _sides(w_ptr, row, n, first, W, C, FULL: tl.constexpr, WEIGHT: tl.constexpr):
    """The largest weight of either sign of a tile, over its w."""
    weight = term_tile(w_ptr, row, n, first, W, C, FULL, WEIGHT, 1.0)
    return max_w(weight), max_w(-weight)


@triton.jit
def _unit_of(
    w_ptr, row, n, WA: tl.constexpr, WB: tl.constexpr, WC: tl.constexpr, C: tl.constexpr, FULL: tl.constexpr,
    WEIGHT: tl.constexpr,
):  # fmt: skip
    """A power of two above the weights of each row, and whether a row has negative ones."""
    up, down = _sides(w_ptr, row, n, 0, WA, C, FULL or WB > 0, WEIGHT)
    if WB > 0:
        q0, q1 = _sides(w_ptr, row, n, WA * C, WB, C, FULL or WC > 0, WEIGHT)
        up = tl.maximum(up, q0)
        down = tl.maximum(down, q1)
    if WC > 0:
        q0, q1 = _sides(w_ptr, row, n, (WA + WB) * C, WC, C, FULL, WEIGHT)
        up = tl.maximum(up, q0)
        down = tl.maximum(down, q1)
    up, down = largest2(up, down, 1)
    return unit_above(tl.maximum(up, down)), down > 0


@triton.jit
def _shape_tile(z, w, width, BOUNDED: tl.constexpr, SELECT: tl.constexpr):
    """Sums of a, a w and a w^2, over a tile's w; SELECT leaves out classes with an infinite score."""
    if SELECT:
        w = tl.where(is_finite(z), w, 0.0)
    a = w
    if BOUNDED:
        a = w * width
    return sum_w(a), sum_w(a * w), sum_w(a * w * w)


@triton.jit
def _shape(
    za, wa, da, zb, wb, db, zc, wc, dc, WB: tl.constexpr, WC: tl.constexpr, BOUNDED: tl.constexpr, SELECT: tl.constexpr
):  # fmt: skip
    total, w1, w2 = _shape_tile(za, wa, da, BOUNDED, SELECT)
    if WB > 0:
        q0, q1, q2 = _shape_tile(zb, wb, db, BOUNDED, SELECT)
        total += q0
        w1 += q1
        w2 += q2
    if WC > 0:
        q0, q1, q2 = _shape_tile(zc, wc, dc, BOUNDED, SELECT)
        total += q0
        w1 += q1
        w2 += q2
    return sum3(total, w1, w2, 1)


@triton.jit
def _narrowest(da, db, dc, WB: tl.constexpr, WC: tl.constexpr):
    """The largest of the negative widths of each row: positive if a bound is on the wrong side."""
    wrong = max_w(-da)
    if WB > 0:
        wrong = tl.maximum(wrong, max_w(-db))
    if WC > 0:
        wrong = tl.maximum(wrong, max_w(-dc))
    return tl.max(wrong, 1)


@triton.jit
def _moment_tile(z, w, width, BOUNDED: tl.constexpr, SELECT: tl.constexpr):
    """Sums of a z, a z^2 and a w z, over a tile's w."""
    if SELECT:
        z = tl.where(is_finite(z), z, 0.0)
    az = w * z
    if BOUNDED:
        az = az * width
    return sum_w(az), sum_w(az * z), sum_w(az * w)


@triton.jit
def _moments(
    za, wa, da, zb, wb, db, zc, wc, dc, WB: tl.constexpr, WC: tl.constexpr, BOUNDED: tl.constexpr, SELECT: tl.constexpr
):  # fmt: skip
    z1, z2, zw = _moment_tile(za, wa, da, BOUNDED, SELECT)
    if WB > 0:
        q0, q1, q2 = _moment_tile(zb, wb, db, BOUNDED, SELECT)
        z1 += q0
        z2 += q1
        zw += q2
    if WC > 0:
        q0, q1, q2 = _moment_tile(zc, wc, dc, BOUNDED, SELECT)
        z1 += q0
        z2 += q1
        zw += q2
    return sum3(z1, z2, zw, 1)


@triton.jit
def _turn(x, w_ptr, row, n, first, W, C, FULL: tl.constexpr, WEIGHT: tl.constexpr):
    """A class with a negative weight is turned around."""
    return tl.where(term_tile(w_ptr, row, n, first, W, C, FULL, WEIGHT, 1.0) < 0, -x, x)


@triton.jit
def _logarithms(z, w, side, center):
    """Log2 of (1 - y) / y of a tile at the center. The points are rounded once: those near 0 keep their digits."""
    return tl.fma(w, by_row(side * center), z) * by_row(side * -LOG2E)


@triton.jit
def _certain(z):
    """Whether a score of a tile is +inf or nan, over its w: one that is masked out is neither."""
    return max_w(((is_finite(z) == 0) & (z != float("-inf"))).to(tl.float32))


@triton.jit
def _no_score(z):
    """Infinite scores take no part: with -inf they add nothing to any sum."""
    return tl.where(is_finite(z), z, float("-inf"))


@triton.jit
def _no_class(p):
    """The same for p, where a row may be turned around."""
    return tl.where(is_finite(p), p, float("inf"))


@triton.jit
def _part(p, w, width, move, BOUNDED: tl.constexpr):
    """The terms of the sum and of its first two derivatives, over a tile's w; p is log2 of (1 - y) / y."""
    y = w * rcp(1 + exp2(tl.fma(w, by_row(move), p)))
    other = w - y
    s = y * other
    bend = other - y
    if BOUNDED:
        s = s * width
        y = y * width
    return sum_w(y), sum_w(s), sum_w(s * bend)


@triton.jit
def _far_side(
    x_ptr, m_ptr, w_ptr, row, m_row, m_col, n, nu, first, inv_t, W, C, FULL: tl.constexpr, MASKED: tl.constexpr,
    WEIGHT: tl.constexpr,
):  # fmt: skip
    """(1 - y) / y of a tile from its scores, read again."""
    x = score_tile(x_ptr, m_ptr, row, m_row, m_col, n, first, inv_t, W, C, FULL, MASKED)
    weight = term_tile(w_ptr, row, n, first, W, C, FULL, WEIGHT, 1.0)
    high, low = two_floats(nu)
    t = tl.where(is_finite(x), tl.fma(weight, by_row(high), x) + weight * by_row(low), x)
    return exp(-t)


@triton.jit
def _write_tile(
    p, w, out_ptr, x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, m_row, m_col, n, nu, move, side, again, first, inv_t, W, C,
    FULL: tl.constexpr, MASKED: tl.constexpr, WEIGHT: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr,
):  # fmt: skip
    """Write the values of a tile; from its scores again where some are infinite or a class is turned around."""
    e = p
    if again:
        e = _far_side(x_ptr, m_ptr, w_ptr, row, m_row, m_col, n, nu, first, inv_t, W, C, FULL, MASKED, WEIGHT)
    else:
        e = exp2(tl.fma(w, by_row(move), p) * by_row(side))
    out = rcp(1 + e)
    if LOWER + UPPER > 0:
        upper = term_tile(u_ptr, row, n, first, W, C, FULL, UPPER, 1.0)
        if LOWER > 0:
            lower = term_tile(l_ptr, row, n, first, W, C, FULL, LOWER, 0.0)
            out = tl.minimum(tl.fma(upper - lower, out, lower), upper)
        else:
            out = upper * out
    store_tile(out_ptr, row, n, out, first, W, C, FULL)


@triton.jit(do_not_specialize=["rows", "units"])
def resident(
    x_ptr, m_ptr, k_ptr, w_ptr, l_ptr, u_ptr, out_ptr, nu_ptr, rows, units, m_row, m_col, k_row, k_low, inv_t,
    ALIGN: tl.constexpr, R: tl.constexpr, C: tl.constexpr, WA: tl.constexpr, WB: tl.constexpr, WC: tl.constexpr,
    FULL: tl.constexpr, MASKED: tl.constexpr, WEIGHT: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr,
    AT_MOST: tl.constexpr, TOL: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """R rows per program; the weights and bounds are HELD in registers, or read again.

    A row that is not solved has a nu of nan, and nothing else is written that stays.
    """
    n = units * ALIGN
    BOUNDED: tl.constexpr = LOWER + UPPER > 0
    FULL_A: tl.constexpr = FULL or WB > 0
    FULL_B: tl.constexpr = FULL or WC > 0
    AT_B: tl.constexpr = WA * C
    AT_C: tl.constexpr = (WA + WB) * C
    row = tl.minimum(tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), rows - 1)
    k = budget_of(k_ptr, k_low, row, k_row)
    za = score_tile(x_ptr, m_ptr, row, m_row, m_col, n, 0, inv_t, WA, C, FULL_A, MASKED)
    zb = za
    zc = za
    if WB > 0:
        zb = score_tile(x_ptr, m_ptr, row, m_row, m_col, n, AT_B, inv_t, WB, C, FULL_B, MASKED)
    if WC > 0:
        zc = score_tile(x_ptr, m_ptr, row, m_row, m_col, n, AT_C, inv_t, WC, C, FULL, MASKED)
    unit, down = _unit_of(w_ptr, row, n, WA, WB, WC, C, FULL, WEIGHT)
    inv_unit = 1 / unit
    wa, da, wb, db, wc, dc = _load_pairs(
        w_ptr, l_ptr, u_ptr, row, n, inv_unit, WA, WB, WC, C, FULL, WEIGHT, LOWER, UPPER
    )
    total, w1, w2 = _shape(za, wa, da, zb, wb, db, zc, wc, dc, WB, WC, BOUNDED, MASKED)
    wrong = unit * 0.0
    if BOUNDED:
        wrong = _narrowest(da, db, dc, WB, WC)
    certain = unit * 0.0  # with a mask the moments are those of the finite scores
    if MASKED:
        most = _certain(za)
        if WB > 0:
            most = tl.maximum(most, _certain(zb))
        if WC > 0:
            most = tl.maximum(most, _certain(zc))
        certain = tl.max(most, 1)
    turned = tl.max(down.to(tl.int32), 0) > 0
    if turned:
        za = _turn(za, w_ptr, row, n, 0, WA, C, FULL_A, WEIGHT)
        if WB > 0:
            zb = _turn(zb, w_ptr, row, n, AT_B, WB, C, FULL_B, WEIGHT)
        if WC > 0:
            zc = _turn(zc, w_ptr, row, n, AT_C, WC, C, FULL, WEIGHT)
    z1, z2, zw = _moments(za, wa, da, zb, wb, db, zc, wc, dc, WB, WC, BOUNDED, MASKED)
    all_of_it = total
    first = w1
    second = w2
    bad = wrong
    # Not finite where a score, a weight or a bound is not.
    odd = (is_finite(z1 + z2 + zw + w1 + w2) == 0) | (certain > 0)
    infinite = tl.max(odd.to(tl.int32), 0) > 0
    if infinite:
        za = _no_score(za)
        if WB > 0:
            zb = _no_score(zb)
        if WC > 0:
            zc = _no_score(zc)
        z1, z2, zw = _moments(za, wa, da, zb, wb, db, zc, wc, dc, WB, WC, BOUNDED, True)
        all_of_it, first, second = _shape(za, wa, da, zb, wb, db, zc, wc, dc, WB, WC, BOUNDED, True)
    c = (k * inv_unit.to(tl.float64)).to(tl.float32)
    rest = all_of_it - c
    # Digits are lost where much is certain, or little is left: these sums are taken in float64.
    wide = infinite | turned | (tl.max((c > 0.45 * all_of_it).to(tl.int32), 0) > 0)
    if wide | (LOWER > 0):
        sure, exact, bad = exact_sums(
            x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, m_row, m_col, n, inv_t, C, MASKED, WEIGHT, LOWER, UPPER,
        )  # fmt: skip
        c = ((k - sure) * inv_unit.to(tl.float64)).to(tl.float32)
        rest = ((exact - (k - sure)) * inv_unit.to(tl.float64)).to(tl.float32)
    met = rest <= 0  # a budget that cannot be used up
    # The smaller side is searched: a row that takes the most is turned around as a whole.
    side = tl.where(c <= rest, 1.0, -1.0)
    goal = tl.minimum(c, rest)
    searched = (goal > 0) & (bad <= 0)
    goal = tl.where(searched, goal, 1.0)
    over = rcp(tl.where(searched, c + rest, 1.0))
    logit = (log2(goal) - log2(tl.where(searched, tl.maximum(c, rest), 1.0))) * LN2
    center = normal_start(logit, side * z1 * over, z2 * over, side * zw * over, first * over, second * over)
    open_ = searched & (tl.abs(center) < 1e30)
    if not MASKED:
        open_ = open_ & ((side > 0) | (odd == 0))  # an infinite score of a row that is turned would take part
    center = tl.where(open_, center, 0.0)
    pa = _logarithms(za, wa, side, center)
    pb = pa
    pc = pa
    if WB > 0:
        pb = _logarithms(zb, wb, side, center)
    if WC > 0:
        pc = _logarithms(zc, wc, side, center)
    if MASKED:
        pa = _no_class(pa)
        if WB > 0:
            pb = _no_class(pb)
        if WC > 0:
            pc = _no_class(pc)

    delta = center * 0.0
    lost = ~open_
    worst = tl.max(open_.to(tl.float32), 0)
    left = PASSES
    while (worst > TOL) & (left > 0):
        move = delta * -LOG2E
        if HELD:
            f, s1, s2 = _part(pa, wa, da, move, BOUNDED)
            if WB > 0:
                q0, q1, q2 = _part(pb, wb, db, move, BOUNDED)
                f += q0
                s1 += q1
                s2 += q2
            if WC > 0:
                q0, q1, q2 = _part(pc, wc, dc, move, BOUNDED)
                f += q0
                s1 += q1
                s2 += q2
        else:
            here = row + (left >> 30)  # the row: `left` is small, which the compiler does not know
            wt, dt = _load_pair(w_ptr, l_ptr, u_ptr, here, n, left >> 30, inv_unit, WA, C, FULL_A, WEIGHT, LOWER, UPPER)
            f, s1, s2 = _part(pa, wt, dt, move, BOUNDED)
            if WB > 0:
                wt, dt = _load_pair(
                    w_ptr, l_ptr, u_ptr, here, n, AT_B + (left >> 30), inv_unit, WB, C, FULL_B, WEIGHT, LOWER, UPPER
                )
                q0, q1, q2 = _part(pb, wt, dt, move, BOUNDED)
                f += q0
                s1 += q1
                s2 += q2
            if WC > 0:
                wt, dt = _load_pair(
                    w_ptr, l_ptr, u_ptr, here, n, AT_C + (left >> 30), inv_unit, WC, C, FULL, WEIGHT, LOWER, UPPER
                )
                q0, q1, q2 = _part(pc, wt, dt, move, BOUNDED)
                f += q0
                s1 += q1
                s2 += q2
        f, s1, s2 = sum3(f, s1, s2, 1)
        over = rcp(s1)
        r = (f - goal) * over
        step = -r * rcp(1 - 0.5 * r * s2 * over)  # Halley's; the error is at most 0.42 r^3
        size = tl.where(open_, tl.abs(r), 0.0)
        worst = tl.max(tl.where(size == size, size, 0.0), 0)
        if worst > 0.3:
            step = tl.where(size > 0.3, log_step(f, goal, s1, s2), step)
        delta = tl.where(open_, delta + step, delta)
        lost = lost | (open_ & ~((tl.abs(delta) < SPREAD) & ((size > TOL) | (s1 > goal * DIGITS))))  # also nan
        open_ = (size > TOL) & ~lost
        left -= 1
    lost = lost | open_
    nu = (side.to(tl.float64) * inv_unit.to(tl.float64)) * (center.to(tl.float64) + delta.to(tl.float64))
    if AT_MOST:
        free = ((nu > 0) & searched & ~lost) | (met & (bad <= 0))
        nu = tl.where(free, 0.0, nu)
        lost = lost & ~free
    again = turned | infinite | (AT_MOST or MASKED)
    move = delta * -LOG2E
    if not HELD:
        wa, da = _load_pair(w_ptr, l_ptr, u_ptr, row, n, left >> 30, inv_unit, WA, C, FULL_A, WEIGHT, 0, 0)
    _write_tile(
        pa, wa, out_ptr, x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, m_row, m_col, n, nu, move, side, again, 0, inv_t,
        WA, C, FULL_A, MASKED, WEIGHT, LOWER, UPPER,
    )  # fmt: skip
    if WB > 0:
        if not HELD:
            wb, db = _load_pair(w_ptr, l_ptr, u_ptr, row, n, AT_B + (left >> 30), inv_unit, WB, C, FULL_B, WEIGHT, 0, 0)
        _write_tile(
            pb, wb, out_ptr, x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, m_row, m_col, n, nu, move, side, again, AT_B,
            inv_t, WB, C, FULL_B, MASKED, WEIGHT, LOWER, UPPER,
        )  # fmt: skip
    if WC > 0:
        if not HELD:
            wc, dc = _load_pair(w_ptr, l_ptr, u_ptr, row, n, AT_C + (left >> 30), inv_unit, WC, C, FULL, WEIGHT, 0, 0)
        _write_tile(
            pc, wc, out_ptr, x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, m_row, m_col, n, nu, move, side, again, AT_C,
            inv_t, WC, C, FULL, MASKED, WEIGHT, LOWER, UPPER,
        )  # fmt: skip
    tl.store(nu_ptr + row, tl.where(lost, float("nan"), nu))
