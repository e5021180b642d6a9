"""Rows that share their weights and bounds, held in registers: the search, and the values.

The weights are divided by a power of two and turned positive, so that ``sum a sigmoid(z + w nu) = c`` with
``0 <= w <= 1`` is left, with ``a`` the weight times the width of the bounds. A class takes one exponential at a first
guess of nu, one for the step from there, and none for the last, short one, which its value follows.

The first guess is made of every so many classes. What is rare (classes that are turned around, a guess for rows with
infinite scores) reads the row again, so that it costs no registers. Infinite scores need nothing else: their values are
0 and 1 at every nu.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import triton
import triton.language as tl

from lastlayer._triton.device import (
    COMPILED,
    LN2,
    LOG2E,
    by_row,
    columns,
    exp,
    exp2,
    is_finite,
    log2,
    rcp,
    scaled,
    store_tile,
    sum2,
    sum3,
    sum_w,
)
from lastlayer._triton.weighted_parts import (
    DIGITS,
    PASSES,
    budget_of,
    curve_start,
    normal_start,
    scores,
    start_curve,
    term,
    term_tile,
    two_floats,
)
from lastlayer._triton.weighted_resident import SPREAD, _load_pairs, _narrowest, _shape, _unit_of

FAR = tl.constexpr(1.2)  # of a goal's logarithm: how far away the step from a guess may be the only one
NEAR = tl.constexpr(0.3)  # the longest step that values can follow
SHORT = tl.constexpr(4e-4)  # the longest that they follow to first order
FEWER_DIGITS = tl.constexpr(0.3)  # as `DIGITS`, for rows whose goal is not the smaller side of what is left to share
LEAST = tl.constexpr(1e-20)  # of a goal: what float32 has dropped from the sums is far smaller


@triton.jit
def _raw_tile(x_ptr, row, n, first, W, C, FULL: tl.constexpr):
    """A tile as it is stored; 0 beyond the row."""
    cols = columns(first, W, C)
    here = x_ptr + (by_row(row) * n + cols)
    # Past the first cache, which has other things to keep.
    if FULL:
        return tl.load(here, cache_modifier=".cg")
    else:
        return tl.load(here, mask=cols < n, other=0.0, cache_modifier=".cg")


@triton.jit
def _fetch(x_ptr, rows, n, block, R: tl.constexpr, LINES: tl.constexpr):
    """Have the lines of a later block brought into the cache."""
    if COMPILED:
        wide: tl.constexpr = 128 // (x_ptr.dtype.element_ty.primitive_bitwidth // 8)
        at = block.to(tl.int64) * R * n + tl.arange(0, LINES) * wide
        here = (x_ptr + tl.minimum(at, rows.to(tl.int64) * n - 1)).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [here], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _turn(x, w_ptr, row, n, first, W, C, FULL: tl.constexpr, WEIGHT: tl.constexpr):
    """A class with a negative weight is turned around."""
    return tl.where(term_tile(w_ptr, row, n, first, W, C, FULL, WEIGHT, 1.0) < 0, -x, x)


@triton.jit
def _finite_moments(
    x_ptr, w_ptr, l_ptr, u_ptr, row, n, inv_t, inv_unit, C: tl.constexpr, WEIGHT: tl.constexpr, LOWER: tl.constexpr,
    UPPER: tl.constexpr,
):  # fmt: skip
    """The moments of the finite scores of some rows, read again: sums of a, a w, a w^2, a z, a z^2 and a w z.

    The last is the sum of a where the score is +inf.
    """
    row = row[:, None]
    unit = inv_unit[:, None]
    s0 = tl.zeros(row.shape, tl.float32)
    s1 = s0
    s2 = s0
    z1 = s0
    z2 = s0
    zw = s0
    up = s0
    for start in range(0, n, C):
        cols = start + tl.arange(0, C)[None, :]
        x = scores(x_ptr, x_ptr, row, 0, 0, n, cols, inv_t, False)
        weight = term(w_ptr, row, n if WEIGHT == 2 else 0, cols, n, WEIGHT > 0, 1.0)
        width = term(u_ptr, row, n if UPPER == 2 else 0, cols, n, UPPER > 0, 1.0)
        width = width - term(l_ptr, row, n if LOWER == 2 else 0, cols, n, LOWER > 0, 0.0)
        live = (cols < n) & is_finite(x)
        z = tl.where(weight < 0, -x, x)
        w = tl.where(cols < n, tl.abs(weight) * unit, 0.0)
        a = w * width
        up += tl.sum(tl.where(z == float("inf"), a, 0.0), 1)[:, None]
        z = tl.where(live, z, 0.0)
        a = tl.where(live, a, 0.0)
        s0 += tl.sum(a, 1)[:, None]
        s1 += tl.sum(a * w, 1)[:, None]
        s2 += tl.sum(a * w * w, 1)[:, None]
        z1 += tl.sum(a * z, 1)[:, None]
        z2 += tl.sum(a * z * z, 1)[:, None]
        zw += tl.sum(a * w * z, 1)[:, None]
    return tl.sum(s0, 1), tl.sum(s1, 1), tl.sum(s2, 1), tl.sum(z1, 1), tl.sum(z2, 1), tl.sum(zw, 1), tl.sum(up, 1)


@triton.jit
def _finite_guess(
    x_ptr, w_ptr, l_ptr, u_ptr, row, n, inv_t, inv_unit, side, c, C: tl.constexpr, WEIGHT: tl.constexpr,
    LOWER: tl.constexpr, UPPER: tl.constexpr,
):  # fmt: skip
    """A guess from the finite scores of some rows."""
    s0, s1, s2, z1, z2, zw, up = _finite_moments(
        x_ptr, w_ptr, l_ptr, u_ptr, row, n, inv_t, inv_unit, C, WEIGHT, LOWER, UPPER
    )
    over = rcp(s0)
    logit = (log2(c - up) - log2(s0 - (c - up))) * (side * LN2)
    flip = side * over
    return normal_start(logit, z1 * flip, z2 * over, zw * flip, s1 * over, s2 * over)


@triton.jit
def _limits(
    w_ptr, l_ptr, u_ptr, row, n, C: tl.constexpr, WEIGHT: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr
):  # fmt: skip
    """What the classes are certain to give, and what they can give beyond it, in float64, for finite scores."""
    row = row[:, None]
    sure = tl.zeros(row.shape, tl.float64)
    total = tl.zeros(row.shape, tl.float64)
    for start in range(0, n, C):
        cols = start + tl.arange(0, C)[None, :]
        weight = term(w_ptr, row, 0, cols, n, WEIGHT > 0, 1.0).to(tl.float64)
        lower = term(l_ptr, row, 0, cols, n, LOWER > 0, 0.0).to(tl.float64)
        upper = term(u_ptr, row, 0, cols, n, UPPER > 0, 1.0).to(tl.float64)
        weight = tl.where(cols < n, weight, 0.0)
        sure += tl.sum(weight * tl.where(weight < 0, upper, lower), 1)[:, None]
        total += tl.sum(tl.abs(weight) * (upper - lower), 1)[:, None]
    return tl.sum(sure, 1), tl.sum(total, 1)


@triton.jit
def _some(tile, SKIP: tl.constexpr):
    """Every SKIPth class of a tile; a thread has neighbours."""
    if SKIP > 1:
        A: tl.constexpr = tile.shape[0]
        B: tl.constexpr = tile.shape[1]
        C: tl.constexpr = tile.shape[2]
        tile, _ = tl.split(tl.reshape(tile, (A, B, C // 2, 2)))
        if SKIP > 2:
            tile, _ = tl.split(tl.reshape(tile, (A, B, C // 4, 2)))
    return tile


@triton.jit
def _moment_tile(z, w, a):
    """Sums of a z, a z^2 and a w z, over a tile's w."""
    az = a * z
    return sum_w(az), sum_w(az * z), sum_w(az * w)


@triton.jit
def _aim(certain, most, scale, bad, first, second):
    """What rows with the same budget share: the budget, the goal and its side, and what the guess takes.

    The smaller side is searched: a row that takes the most is turned around as a whole.
    """
    c = (certain * scale).to(tl.float32)
    rest = (most * scale).to(tl.float32)
    goal = tl.minimum(c, rest)
    searched = (goal > LEAST) & (bad <= 0)
    goal = tl.where(searched, goal, 1.0)
    side = tl.where(c <= rest, 1.0, -1.0)
    over = rcp(tl.where(searched, c + rest, 1.0))
    logit = (log2(goal) - log2(tl.where(searched, tl.maximum(c, rest), 1.0))) * LN2
    c0, c1, c2, c3 = start_curve(logit)
    return c, goal, side, searched, (rest <= 0) & (bad <= 0), logit, first * over, second * over, c0, c1, c2, c3


@triton.jit
def _odds(z, w, side, center):
    """(1 - y) / y of a tile at the center. The points are rounded once: those near 0 keep their digits."""
    return exp2(tl.fma(w, by_row(side * center), z) * by_row(side * -LOG2E))


@triton.jit
def _sums3(e, w, a):
    """The terms of the sum and of its first two derivatives, over a tile's w."""
    y = rcp(1 + e)
    ay = a * y
    other = tl.fma(w * -1.0, y, w)
    s = ay * other
    return sum_w(ay), sum_w(s), sum_w(s * tl.fma(other, 2.0, w * -1.0))


@triton.jit
def _moved(e, w, move):
    """The values of a tile after a step."""
    return rcp(tl.fma(e, exp2(w * by_row(move)), 1.0))


@triton.jit
def _moved_again(y, w, move):
    """The same from the values; a value near 1 bears short steps only."""
    return y * rcp(tl.fma(1 - y, exp2(w * by_row(move)), y))


@triton.jit
def _sums2(y, w, a):
    """The terms of the sum and of its derivative, over a tile's w."""
    ay = a * y
    return sum_w(ay), sum_w(ay * tl.fma(w * -1.0, y, w))


@triton.jit
def _followed(y, w, step):
    """The values of a tile after a short step, to second order."""
    t = w * by_row(step)
    return tl.fma(t * tl.fma(y * -1.0, y, y), tl.fma(t, 0.5 - y, 1.0), y)


@triton.jit
def _log_step(f, goal, s1, s2):
    """Halley's step for the logarithm of the sum, which is nearly straight where goals are small; and how far it goes.

    Where the curve bends too much for it, Newton's.
    """
    over = rcp(f)
    level = (log2(f) - log2(goal)) * LN2
    first = s1 * over
    bend = s2 * over - first * first
    below = 2 * first * first - level * bend
    halley = below > first * first
    step = tl.where(halley, -2 * level * first, -level) * rcp(tl.where(halley, below, first))
    step = tl.minimum(tl.maximum(step, -1e3), 1e3)
    return step, tl.maximum(tl.abs(level), 0.5 * tl.abs(step))


@triton.jit
def _second(f, f0, mass, s1, s2, step):
    """The second derivative after a step, from the sum and its derivative there, and the same before with the second.

    As if the fifth were 0; and how much the fourth has changed it. A short step does without.
    """
    over = rcp(step)
    first = (mass - s1) * over - s2
    zeroth = ((f - f0) * over - s1) * over - 0.5 * s2
    more = tl.where(tl.abs(step) > 0.1, 4 * first - 12 * zeroth, 0.0)
    return tl.where(tl.abs(step) > 0.01, s2 + 2 * first + more, s2), tl.abs(more)


@triton.jit
def _write_tile(
    y, w, out_ptr, l_ptr, u_ptr, row, n, step, first, W, C, FULL: tl.constexpr, LOWER: tl.constexpr,
    UPPER: tl.constexpr,
):  # fmt: skip
    """Write the values of a tile after the last step: what first order leaves out is below the rounding of float32."""
    out = tl.fma(w * by_row(step), tl.fma(y * -1.0, y, y), y)
    if LOWER + UPPER > 0:
        upper = term_tile(u_ptr, row * 0, n, first, W, C, FULL, UPPER, 1.0)
        if LOWER > 0:
            lower = term_tile(l_ptr, row * 0, n, first, W, C, FULL, LOWER, 0.0)
            out = tl.minimum(tl.fma(upper - lower, out, lower), upper)
        else:
            out = upper * out
    store_tile(out_ptr, row, n, out, first, W, C, FULL)


@triton.jit
def _write_again(
    x_ptr, w_ptr, l_ptr, u_ptr, out_ptr, row, nu, n, inv_t, C: tl.constexpr, WEIGHT: tl.constexpr, LOWER: tl.constexpr,
    UPPER: tl.constexpr,
):  # fmt: skip
    """Write the values of some rows from their scores, read again."""
    row = row[:, None]
    high, low = two_floats(nu)
    high = high[:, None]
    low = low[:, None]
    for start in range(0, n, C):
        cols = start + tl.arange(0, C)[None, :]
        x = scores(x_ptr, x_ptr, row, 0, 0, n, cols, inv_t, False)
        weight = term(w_ptr, row, 0, cols, n, WEIGHT > 0, 1.0)
        t = tl.where(is_finite(x), tl.fma(weight, high, x) + weight * low, x)
        out = rcp(1 + exp(-t))
        if LOWER + UPPER > 0:
            lower = term(l_ptr, row, 0, cols, n, LOWER > 0, 0.0)
            upper = term(u_ptr, row, 0, cols, n, UPPER > 0, 1.0)
            out = tl.minimum(tl.fma(upper - lower, out, lower), upper)
        tl.store(out_ptr + row * n + cols, out.to(out_ptr.dtype.element_ty), mask=(cols < n) & (row >= 0))


@triton.jit(do_not_specialize=["rows", "units"])
def shared(
    x_ptr, k_ptr, w_ptr, l_ptr, u_ptr, out_ptr, nu_ptr, rows, units, k_row, k_low, inv_t,
    ALIGN: tl.constexpr, R: tl.constexpr, C: tl.constexpr, WA: tl.constexpr, WB: tl.constexpr, WC: tl.constexpr,
    FULL: tl.constexpr, WEIGHT: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr,
    AT_MOST: tl.constexpr, TOL: tl.constexpr, PREFETCH: tl.constexpr, LINES: tl.constexpr, N: tl.constexpr,
    SKIP: tl.constexpr,
):  # fmt: skip
    """R rows at a time per program, which reads the weights and bounds once.

    A row that is not solved has a nu of nan, and nothing else is written that stays.
    """
    n = N if N > 0 else units * ALIGN
    BOUNDED: tl.constexpr = LOWER + UPPER > 0
    FULL_A: tl.constexpr = FULL or WB > 0
    FULL_B: tl.constexpr = FULL or WC > 0
    AT_B: tl.constexpr = WA * C
    AT_C: tl.constexpr = (WA + WB) * C
    LEFT: tl.constexpr = 4 * TOL * TOL * TOL  # the error in nu that a last step may leave
    blocks = (rows + R - 1) // R
    some = tl.arange(0, R).to(tl.int64)
    any_row = some * 0
    unit, down = _unit_of(w_ptr, any_row, n, WA, WB, WC, C, FULL, WEIGHT)
    inv_unit = 1 / unit
    turned = tl.max(down.to(tl.int32), 0) > 0
    wa, da, wb, db, wc, dc = _load_pairs(
        w_ptr, l_ptr, u_ptr, any_row, n, inv_unit, WA, WB, WC, C, FULL, WEIGHT, LOWER, UPPER
    )
    total, w1, w2 = _shape(wa, wa, da, wb, wb, db, wc, wc, dc, WB, WC, BOUNDED, False)
    sound = is_finite(total + w1 + w2)
    if BOUNDED:
        sound = sound & (_narrowest(da, db, dc, WB, WC) <= 0)
        da = wa * da
        db = wb * db
        dc = wc * dc
    else:
        da = wa
        db = wb
        dc = wc
    bad = tl.where(sound, 0.0, 1.0)
    sure, room = _limits(w_ptr, l_ptr, u_ptr, any_row, n, C, WEIGHT, LOWER, UPPER)
    scale = inv_unit.to(tl.float64)
    if k_low is not None:  # one budget for all rows
        certain = budget_of(k_ptr, k_low, any_row, 0) - sure
        c, goal, side, searched, met, logit, mean, square, c0, c1, c2, c3 = _aim(
            certain, room - certain, scale, bad, w1, w2
        )
    some_total = sum_w(_some(da, SKIP))
    if WB > 0:
        some_total += sum_w(_some(db, SKIP))
    if WC > 0:
        some_total += sum_w(_some(dc, SKIP))
    over = rcp(tl.sum(some_total, 1))
    row = tl.minimum(some + tl.program_id(0) * R, rows - 1)
    xa = _raw_tile(x_ptr, row, n, 0, WA, C, FULL_A)
    xb = xa
    xc = xa
    if WB > 0:
        xb = _raw_tile(x_ptr, row, n, AT_B, WB, C, FULL_B)
    if WC > 0:
        xc = _raw_tile(x_ptr, row, n, AT_C, WC, C, FULL)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        row = tl.minimum(some + block * R, rows - 1)
        if PREFETCH == 2:
            _fetch(x_ptr, rows, n, block + tl.num_programs(0), R, LINES)
        if PREFETCH != 1:
            xa = _raw_tile(x_ptr, row, n, 0, WA, C, FULL_A)
            if WB > 0:
                xb = _raw_tile(x_ptr, row, n, AT_B, WB, C, FULL_B)
            if WC > 0:
                xc = _raw_tile(x_ptr, row, n, AT_C, WC, C, FULL)
        za = scaled(xa.to(tl.float32), inv_t)
        zb = za
        zc = za
        if WB > 0:
            zb = scaled(xb.to(tl.float32), inv_t)
        if WC > 0:
            zc = scaled(xc.to(tl.float32), inv_t)
        if PREFETCH == 1:
            then = tl.minimum(some + (block + tl.num_programs(0)) * R, rows - 1)
            xa = _raw_tile(x_ptr, then, n, 0, WA, C, FULL_A)
            if WB > 0:
                xb = _raw_tile(x_ptr, then, n, AT_B, WB, C, FULL_B)
            if WC > 0:
                xc = _raw_tile(x_ptr, then, n, AT_C, WC, C, FULL)
        if turned:
            za = _turn(za, w_ptr, any_row, n, 0, WA, C, FULL_A, WEIGHT)
            if WB > 0:
                zb = _turn(zb, w_ptr, any_row, n, AT_B, WB, C, FULL_B, WEIGHT)
            if WC > 0:
                zc = _turn(zc, w_ptr, any_row, n, AT_C, WC, C, FULL, WEIGHT)
        z1, z2, zw = _moment_tile(_some(za, SKIP), _some(wa, SKIP), _some(da, SKIP))
        if WB > 0:
            m0, m1, m2 = _moment_tile(_some(zb, SKIP), _some(wb, SKIP), _some(db, SKIP))
            z1 += m0
            z2 += m1
            zw += m2
        if WC > 0:
            m0, m1, m2 = _moment_tile(_some(zc, SKIP), _some(wc, SKIP), _some(dc, SKIP))
            z1 += m0
            z2 += m1
            zw += m2
        z1, z2, zw = sum3(z1, z2, zw, 1)
        if k_low is None:
            certain = budget_of(k_ptr, k_low, row, k_row) - sure
            c, goal, side, searched, met, logit, mean, square, c0, c1, c2, c3 = _aim(
                certain, room - certain, scale, bad, w1, w2
            )
        flip = side * over
        center = curve_start(logit, z1 * flip, z2 * over, zw * flip, mean, square, c0, c1, c2, c3)
        digits = goal * DIGITS
        if tl.max(tl.where(tl.abs(center) < 1e30, 0, 1), 0) > 0:
            digits = tl.where(tl.abs(center) < 1e30, digits, goal * FEWER_DIGITS)
            finite = _finite_guess(
                x_ptr, w_ptr, l_ptr, u_ptr, row, n, inv_t, inv_unit, side, c, C, WEIGHT, LOWER, UPPER
            )
            center = tl.where(tl.abs(center) < 1e30, center, finite)
        open_ = searched & (tl.abs(center) < 1e30)
        center = tl.where(open_, center, 0.0)
        ea = _odds(za, wa, side, center)
        eb = ea
        ec = ea
        if WB > 0:
            eb = _odds(zb, wb, side, center)
        if WC > 0:
            ec = _odds(zc, wc, side, center)

        delta = center * 0.0
        step = delta
        f0 = delta
        s1 = delta
        s2 = delta
        lost = ~open_
        worst = tl.max(open_.to(tl.float32), 0) * 9
        left = PASSES
        while (worst > FAR) & (left > 0):
            if left < PASSES:  # the step before was a long one
                move = step * -LOG2E
                ea = ea * exp2(wa * by_row(move))
                if WB > 0:
                    eb = eb * exp2(wb * by_row(move))
                if WC > 0:
                    ec = ec * exp2(wc * by_row(move))
            f0, s1, s2 = _sums3(ea, wa, da)
            if WB > 0:
                q0, q1, q2 = _sums3(eb, wb, db)
                f0 += q0
                s1 += q1
                s2 += q2
            if WC > 0:
                q0, q1, q2 = _sums3(ec, wc, dc)
                f0 += q0
                s1 += q1
                s2 += q2
            f0, s1, s2 = sum3(f0, s1, s2, 1)
            step, far = _log_step(f0, goal, s1, s2)
            size = tl.where(open_, far, 0.0)
            worst = tl.max(tl.where(size == size, size, 0.0), 0)
            lost = lost | (open_ & ~(tl.abs(delta + step) < SPREAD))  # also nan
            open_ = open_ & ~lost
            step = tl.where(open_, step, 0.0)
            delta = delta + step
            left -= 1
        left = tl.where(worst > FAR, 0, left)
        move = step * -LOG2E
        ya = _moved(ea, wa, move)
        yb = ya
        yc = ya
        if WB > 0:
            yb = _moved(eb, wb, move)
        if WC > 0:
            yc = _moved(ec, wc, move)
        f, mass = _sums2(ya, wa, da)
        if WB > 0:
            q0, q1 = _sums2(yb, wb, db)
            f += q0
            mass += q1
        if WC > 0:
            q0, q1 = _sums2(yc, wc, dc)
            f += q0
            mass += q1
        f, mass = sum2(f, mass, 1)
        s2, unsure = _second(f, f0, mass, s1, s2, step)
        over_mass = rcp(mass)
        r = (f - goal) * over_mass
        size = tl.where(open_, tl.where(r * r * unsure > mass * LEFT, 1.0, tl.abs(r)), 0.0)
        worst = tl.max(tl.where(size == size, size, 1.0), 0)
        step = tl.where(open_, -r * (1 + 0.5 * r * s2 * over_mass), 0.0)  # Chebyshev's
        while (worst > TOL) & (left > 0):
            lost = lost | (open_ & ~(tl.abs(step) < NEAR))
            open_ = open_ & ~lost
            step = tl.where(open_, step, 0.0)
            delta = delta + step
            move = step * -LOG2E
            s1 = mass
            ya = _moved_again(ya, wa, move)
            f, mass = _sums2(ya, wa, da)
            if WB > 0:
                yb = _moved_again(yb, wb, move)
                q0, q1 = _sums2(yb, wb, db)
                f += q0
                mass += q1
            if WC > 0:
                yc = _moved_again(yc, wc, move)
                q0, q1 = _sums2(yc, wc, dc)
                f += q0
                mass += q1
            f, mass = sum2(f, mass, 1)
            # What was an estimate is not built upon.
            s2 = tl.where(tl.abs(step) > 1e-3, (mass - s1) * rcp(step), s2)
            unsure = mass * tl.where(tl.abs(step) > 1e-3, tl.abs(step), 1.0)
            over_mass = rcp(mass)
            r = (f - goal) * over_mass
            size = tl.where(open_, tl.where(r * r * unsure > mass * LEFT, 1.0, tl.abs(r)), 0.0)
            worst = tl.max(tl.where(size == size, size, 1.0), 0)
            step = tl.where(open_, -r * (1 + 0.5 * r * s2 * over_mass), 0.0)
            left -= 1
        lost = lost | ~((size <= TOL) & (mass > digits) & (tl.abs(delta + step) < SPREAD))
        delta = delta + step
        if TOL > SHORT:  # noqa: SIM102, since the first is a constant
            if worst > SHORT:
                ya = _followed(ya, wa, step)
                if WB > 0:
                    yb = _followed(yb, wb, step)
                if WC > 0:
                    yc = _followed(yc, wc, step)
                step = step * 0.0
        nu = scale * (center.to(tl.float64) + delta.to(tl.float64))
        nu = tl.where(side > 0, nu, -nu)
        again = turned | (worst > TOL) | (tl.min(side, 0) < 0)
        if AT_MOST:
            free = ((nu > 0) & searched & ~lost) | (met & (f == f))
            nu = tl.where(free, 0.0, nu)
            lost = lost & ~free
            again = again | (tl.max(free.to(tl.int32), 0) > 0)
        if again:
            _write_again(x_ptr, w_ptr, l_ptr, u_ptr, out_ptr, row, nu, n, inv_t, C, WEIGHT, LOWER, UPPER)
        else:
            _write_tile(ya, wa, out_ptr, l_ptr, u_ptr, row, n, step, 0, WA, C, FULL_A, LOWER, UPPER)
            if WB > 0:
                _write_tile(yb, wb, out_ptr, l_ptr, u_ptr, row, n, step, AT_B, WB, C, FULL_B, LOWER, UPPER)
            if WC > 0:
                _write_tile(yc, wc, out_ptr, l_ptr, u_ptr, row, n, step, AT_C, WC, C, FULL, LOWER, UPPER)
        tl.store(nu_ptr + row, tl.where(lost, float("nan"), nu))
