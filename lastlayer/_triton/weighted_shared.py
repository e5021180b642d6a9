"""Rows that share their weights and bounds, held in registers: the search, and the values.

The weights are divided by a power of two and turned positive, so that ``sum a sigmoid(z + w nu) = c`` with
``0 <= w <= 1`` is left, and the steps have the certificates of `lml`. A class takes one exponential at a first guess of
nu, one for the step from there, and none for the last, short one: its value follows that to second order.

What is rare (infinite scores, classes that are turned around) reads the row again, so that it costs no registers.
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
    step4,
    store_tile,
    sum2,
    sum3,
    sum5,
    sum_w,
)
from lastlayer._triton.weighted_parts import (
    DIGITS,
    PASSES,
    budget_of,
    exact_sums,
    log_step,
    normal_start,
    scores,
    term,
    term_tile,
    two_floats,
)
from lastlayer._triton.weighted_resident import SPREAD, _load_pairs, _narrowest, _shape, _unit_of

FAR = tl.constexpr(1.5)  # r up to which a step of fourth order is taken
NEAR = tl.constexpr(0.3)  # the longest step that values can follow
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
        return tl.load(here, mask=(cols < n) & (by_row(row) >= 0), other=0.0, cache_modifier=".cg")


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
def _finite_scores(
    x_ptr, w_ptr, row, n, first, inv_t, turned, W, C, FULL: tl.constexpr, WEIGHT: tl.constexpr
):  # fmt: skip
    """The scores of a tile, read again: -inf where one is infinite, which takes no part."""
    x = scaled(_raw_tile(x_ptr, row, n, first, W, C, FULL).to(tl.float32), inv_t)
    if turned:
        x = _turn(x, w_ptr, row, n, first, W, C, FULL, WEIGHT)
    return tl.where(is_finite(x), x, float("-inf"))


@triton.jit
def _finite_moments(
    x_ptr, w_ptr, l_ptr, u_ptr, row, n, inv_t, inv_unit, C: tl.constexpr, WEIGHT: tl.constexpr, LOWER: tl.constexpr,
    UPPER: tl.constexpr,
):  # fmt: skip
    """The moments of the finite scores of some rows, read again: sums of a, a w, a w^2, a z, a z^2 and a w z."""
    row = row[:, None]
    unit = inv_unit[:, None]
    s0 = tl.zeros(row.shape, tl.float32)
    s1 = s0
    s2 = s0
    z1 = s0
    z2 = s0
    zw = s0
    for start in range(0, n, C):
        cols = start + tl.arange(0, C)[None, :]
        x = scores(x_ptr, x_ptr, row, 0, 0, n, cols, inv_t, False)
        weight = term(w_ptr, row, n if WEIGHT == 2 else 0, cols, n, WEIGHT > 0, 1.0)
        width = term(u_ptr, row, n if UPPER == 2 else 0, cols, n, UPPER > 0, 1.0)
        width = width - term(l_ptr, row, n if LOWER == 2 else 0, cols, n, LOWER > 0, 0.0)
        live = (cols < n) & is_finite(x)
        z = tl.where(live, tl.where(weight < 0, -x, x), 0.0)
        w = tl.where(live, tl.abs(weight) * unit, 0.0)
        a = tl.where(live, w * width, 0.0)
        s0 += tl.sum(a, 1)[:, None]
        s1 += tl.sum(a * w, 1)[:, None]
        s2 += tl.sum(a * w * w, 1)[:, None]
        z1 += tl.sum(a * z, 1)[:, None]
        z2 += tl.sum(a * z * z, 1)[:, None]
        zw += tl.sum(a * w * z, 1)[:, None]
    return tl.sum(s1, 1), tl.sum(s2, 1), tl.sum(z1, 1), tl.sum(z2, 1), tl.sum(zw, 1)


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
def _moment_tile(z, w, width, BOUNDED: tl.constexpr):
    """Sums of a z, a z^2 and a w z, over a tile's w."""
    az = w * z
    if BOUNDED:
        az = az * width
    return sum_w(az), sum_w(az * z), sum_w(az * w)


@triton.jit
def _odds(z, w, side, center):
    """(1 - y) / y of a tile at the center. The points are rounded once: those near 0 keep their digits."""
    return exp2(tl.fma(w, by_row(side * center), z) * by_row(side * -LOG2E))


@triton.jit
def _sums4(e, w, width, BOUNDED: tl.constexpr):
    """The terms of the sum and of its first three derivatives, over a tile's w."""
    y = w * rcp(1 + e)
    other = w - y
    h = y * other
    bend = other - y
    s = h
    if BOUNDED:
        s = h * width
        y = y * width
    curve = s * bend
    return sum_w(y), sum_w(s), sum_w(curve), sum_w(curve * bend), sum_w(s * h)


@triton.jit
def _moved(e, w, move):
    """The values of a tile after a step."""
    return rcp(tl.fma(e, exp2(w * by_row(move)), 1.0))


@triton.jit
def _moved_again(y, w, move):
    """The same from the values; a value near 1 bears short steps only."""
    return y * rcp(tl.fma(1 - y, exp2(w * by_row(move)), y))


@triton.jit
def _sums2(y, w, width, BOUNDED: tl.constexpr):
    y = y * w
    other = w - y
    if BOUNDED:
        y = y * width
    return sum_w(y), sum_w(y * other)


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
    AT_MOST: tl.constexpr, TOL: tl.constexpr, PREFETCH: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """R rows at a time per program, which reads the weights and bounds once.

    A row that is not solved has a nu of nan, and nothing else is written that stays.
    """
    n = units * ALIGN
    BOUNDED: tl.constexpr = LOWER + UPPER > 0
    FULL_A: tl.constexpr = FULL or WB > 0
    FULL_B: tl.constexpr = FULL or WC > 0
    AT_B: tl.constexpr = WA * C
    AT_C: tl.constexpr = (WA + WB) * C
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
    sure, room = _limits(w_ptr, l_ptr, u_ptr, any_row, n, C, WEIGHT, LOWER, UPPER)
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
        k = budget_of(k_ptr, k_low, row, k_row)
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
        z1, z2, zw = _moment_tile(za, wa, da, BOUNDED)
        if WB > 0:
            q0, q1, q2 = _moment_tile(zb, wb, db, BOUNDED)
            z1 += q0
            z2 += q1
            zw += q2
        if WC > 0:
            q0, q1, q2 = _moment_tile(zc, wc, dc, BOUNDED)
            z1 += q0
            z2 += q1
            zw += q2
        z1, z2, zw = sum3(z1, z2, zw, 1)
        first = w1
        second = w2
        certain = k - sure
        most = room - certain
        bad = tl.where(sound, 0.0, 1.0)
        odd = is_finite(z1 + z2 + zw) == 0
        infinite = tl.max(odd.to(tl.int32), 0) > 0
        if infinite:
            first, second, z1, z2, zw = _finite_moments(
                x_ptr, w_ptr, l_ptr, u_ptr, row, n, inv_t, inv_unit, C, WEIGHT, LOWER, UPPER
            )
            given, can, wrong = exact_sums(
                x_ptr, x_ptr, w_ptr, l_ptr, u_ptr, row, 0, 0, n, inv_t, C, False, WEIGHT, LOWER, UPPER
            )
            certain = k - given
            most = can - certain
            bad = wrong
            za = _finite_scores(x_ptr, w_ptr, row, n, 0, inv_t, turned, WA, C, FULL_A, WEIGHT)
            if WB > 0:
                zb = _finite_scores(x_ptr, w_ptr, row, n, AT_B, inv_t, turned, WB, C, FULL_B, WEIGHT)
            if WC > 0:
                zc = _finite_scores(x_ptr, w_ptr, row, n, AT_C, inv_t, turned, WC, C, FULL, WEIGHT)
        scale = inv_unit.to(tl.float64)
        c = (certain * scale).to(tl.float32)
        rest = (most * scale).to(tl.float32)
        met = rest <= 0  # a budget that cannot be used up
        # The smaller side is searched: a row that takes the most is turned around as a whole.
        side = tl.where(c <= rest, 1.0, -1.0)
        goal = tl.minimum(c, rest)
        searched = (goal > LEAST) & (bad <= 0)
        goal = tl.where(searched, goal, 1.0)
        over = rcp(tl.where(searched, c + rest, 1.0))
        logit = (log2(goal) - log2(tl.where(searched, tl.maximum(c, rest), 1.0))) * LN2
        center = normal_start(logit, side * z1 * over, z2 * over, side * zw * over, first * over, second * over)
        # An infinite score of a row that is turned would take part.
        open_ = searched & (tl.abs(center) < 1e30) & ((side > 0) | (odd == 0))
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
        s1 = delta
        s2 = delta
        s3 = delta
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
            f, s1, s2, s3, h2 = _sums4(ea, wa, da, BOUNDED)
            if WB > 0:
                q0, q1, q2, q3, q4 = _sums4(eb, wb, db, BOUNDED)
                f += q0
                s1 += q1
                s2 += q2
                s3 += q3
                h2 += q4
            if WC > 0:
                q0, q1, q2, q3, q4 = _sums4(ec, wc, dc, BOUNDED)
                f += q0
                s1 += q1
                s2 += q2
                s3 += q3
                h2 += q4
            f, s1, s2, s3, h2 = sum5(f, s1, s2, s3, h2, 1)
            s3 = s3 - 2 * h2
            step, r = step4(f - goal, s1, s2, s3)
            size = tl.where(open_, tl.abs(r), 0.0)
            worst = tl.max(tl.where(size == size, size, 0.0), 0)
            if worst > FAR:
                step = tl.where(size > FAR, log_step(f, goal, s1, s2), step)
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
        f, mass = _sums2(ya, wa, da, BOUNDED)
        if WB > 0:
            q0, q1 = _sums2(yb, wb, db, BOUNDED)
            f += q0
            mass += q1
        if WC > 0:
            q0, q1 = _sums2(yc, wc, dc, BOUNDED)
            f += q0
            mass += q1
        f, mass = sum2(f, mass, 1)
        bend = (s2 + step * s3) * rcp(mass)
        r = (f - goal) * rcp(mass)
        size = tl.where(open_, tl.abs(r), 0.0)
        worst = tl.max(tl.where(size == size, size, 1.0), 0)
        step = tl.where(open_, -r * (1 + 0.5 * r * bend), 0.0)  # Chebyshev's, of third order but for the bend
        while (worst > TOL) & (left > 0):
            lost = lost | (open_ & ~(tl.abs(step) < NEAR))
            open_ = open_ & ~lost
            step = tl.where(open_, step, 0.0)
            delta = delta + step
            move = step * -LOG2E
            ya = _moved_again(ya, wa, move)
            f, mass = _sums2(ya, wa, da, BOUNDED)
            if WB > 0:
                yb = _moved_again(yb, wb, move)
                q0, q1 = _sums2(yb, wb, db, BOUNDED)
                f += q0
                mass += q1
            if WC > 0:
                yc = _moved_again(yc, wc, move)
                q0, q1 = _sums2(yc, wc, dc, BOUNDED)
                f += q0
                mass += q1
            f, mass = sum2(f, mass, 1)
            r = (f - goal) * rcp(mass)
            size = tl.where(open_, tl.abs(r), 0.0)
            worst = tl.max(tl.where(size == size, size, 1.0), 0)
            step = tl.where(open_, -r * (1 + 0.5 * r * bend), 0.0)
            left -= 1
        lost = lost | ~((size <= TOL) & (mass > goal * DIGITS) & (tl.abs(delta + step) < SPREAD))
        delta = delta + step
        nu = scale * (center.to(tl.float64) + delta.to(tl.float64))
        nu = tl.where(side > 0, nu, -nu)
        again = turned | infinite | (worst > TOL) | (tl.min(side, 0) < 0)
        if AT_MOST:
            free = ((nu > 0) & searched & ~lost) | (met & (bad <= 0))
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
