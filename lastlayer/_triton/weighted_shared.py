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
    wide,
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
    unit_above,
)
from lastlayer._triton.weighted_resident import SPREAD, largest2, max_w
from lastlayer._triton.weighted_settle import settle_row

FAR = tl.constexpr(1.2)  # of a goal's logarithm: how far away the step from a guess may be the only one
NEAR = tl.constexpr(0.3)  # the longest step that values can follow
SHORT = tl.constexpr(4e-4)  # the longest that they follow to first order
FEWER_DIGITS = tl.constexpr(0.3)  # as `DIGITS`, for rows whose goal is not the smaller side of what is left to share
GROUP = tl.constexpr(256)  # rows of a program that are looked at together
LEAST = tl.constexpr(1e-20)  # of a goal: what float32 has dropped from the sums is far smaller


@triton.jit
def _raw_tile(x_ptr, rows, n, block, first, R: tl.constexpr, W, C, FULL: tl.constexpr):
    """A tile of the rows of a block as it is stored; 0 beyond the row.

    The place is that of the first row and a short distance: it is not that of the values, which a compiler would keep.
    """
    cols = columns(first, W, C)
    top = (tl.full((), 0, tl.int64) + block) * R
    row = top + tl.arange(0, R)
    if R > 1:
        row = top + tl.minimum(tl.arange(0, R), rows - 1 - top)
    here = x_ptr + (by_row(row) * n + cols)
    # Past the first cache, which has other things to keep.
    if FULL:
        return tl.load(here, cache_modifier=".cg")
    else:
        return tl.load(here, mask=cols < n, other=0.0, cache_modifier=".cg")


@triton.jit
def _raw_row(
    x_ptr, rows, n, block, R: tl.constexpr, WA: tl.constexpr, WB: tl.constexpr, WC: tl.constexpr, C: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """The tiles of the rows of a block; the first stands for those that there are not."""
    xa = _raw_tile(x_ptr, rows, n, block, 0, R, WA, C, FULL or WB > 0)
    xb, xc = xa, xa
    if WB > 0:
        xb = _raw_tile(x_ptr, rows, n, block, WA * C, R, WB, C, FULL or WC > 0)
    if WC > 0:
        xc = _raw_tile(x_ptr, rows, n, block, (WA + WB) * C, R, WC, C, FULL)
    return xa, xb, xc


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
def _terms(
    w_ptr, l_ptr, u_ptr, row, n, first, W, C, FULL: tl.constexpr, WEIGHT: tl.constexpr, LOWER: tl.constexpr,
    UPPER: tl.constexpr,
):  # fmt: skip
    """Weights and bounds of a tile, 0 beyond the row."""
    weight = term_tile(w_ptr, row, n, first, W, C, FULL, WEIGHT, 1.0)
    lower = term_tile(l_ptr, row, n, first, W, C, FULL, LOWER, 0.0)
    return weight, lower, term_tile(u_ptr, row, n, first, W, C, FULL, UPPER, 1.0)


@triton.jit
def _largest(weight):
    """The largest weight of either sign of a tile, over its w."""
    return max_w(weight), max_w(-weight)


@triton.jit
def _limits(weight, lower, upper):
    """What a tile is certain to give, and what it can give beyond it, in float64, for finite scores; over its w."""
    weight = weight.to(tl.float64)
    lower = lower.to(tl.float64)
    upper = upper.to(tl.float64)
    return sum_w(weight * tl.where(weight < 0, upper, lower)), sum_w(tl.abs(weight) * (upper - lower))


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
def _worst(value, R: tl.constexpr, C: tl.constexpr):
    """The largest of the values of some rows, which are not negative; nan is the largest.

    Whole numbers of a whole warp have an instruction for it, so that values are compared by their bits.
    """
    if COMPILED and R > 1:
        bits = tl.broadcast_to(value.to(tl.int32, bitcast=True)[:, None], (R, C))
        return tl.max(bits).to(tl.float32, bitcast=True)
    else:
        return tl.max(value, 0)


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
def _sums2(y, w, a, LIGHT: tl.constexpr):
    """The terms of the sum and of its derivative, over a tile's w; LIGHT: of the sum alone."""
    ay = a * y
    if LIGHT:
        return sum_w(ay), sum_w(ay)
    else:
        return sum_w(ay), sum_w(ay * tl.fma(w * -1.0, y, w))


@triton.jit
def _normed(weight, lower, upper, inv_unit, BOUNDED: tl.constexpr):
    """The weights w of a tile without their signs and divided by the unit, and a, the same times widths."""
    w = tl.abs(weight) * by_row(inv_unit)
    a = w
    if BOUNDED:
        a = w * (upper - lower)
    return w, a


@triton.jit
def _shape(lower, upper, w, a, SKIP: tl.constexpr):
    """Sums of a w, of a w^2 and of every SKIPth a, over a tile's w; and the least width."""
    return sum_w(a * w), sum_w(a * w * w), sum_w(_some(a, SKIP)), tl.min(-max_w(lower - upper), 1)


@triton.jit
def _moments(z, w, a, SKIP: tl.constexpr):
    """Sums of a z, a z^2 and a w z of every SKIPth class, over a tile's w."""
    z = _some(z, SKIP)
    az = _some(a, SKIP) * z
    return sum_w(az), sum_w(az * z), sum_w(az * _some(w, SKIP))


@triton.jit
def _first_pass(z, w, a, side, center):
    """(1 - y) / y of a tile at the center, and its sums."""
    e = _odds(z, w, side, center)
    f, s1, s2 = _sums3(e, w, a)
    return e, f, s1, s2


@triton.jit
def _next_pass(e, w, a, move):
    """The same after a long step."""
    e = e * exp2(w * by_row(move))
    f, s1, s2 = _sums3(e, w, a)
    return e, f, s1, s2


@triton.jit
def _moved(e, w, a, move, LIGHT: tl.constexpr):
    """The values of a tile after a step, and their sums."""
    y = rcp(tl.fma(e, exp2(w * by_row(move)), 1.0))
    f, mass = _sums2(y, w, a, LIGHT)
    return y, f, mass


@triton.jit
def _moved_again(y, w, a, move):
    """The same from the values; a value near 1 bears short steps only."""
    y = y * rcp(tl.fma(1 - y, exp2(w * by_row(move)), y))
    f, mass = _sums2(y, w, a, False)
    return y, f, mass


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
    UPPER: tl.constexpr, LIGHT: tl.constexpr,
):  # fmt: skip
    """Write the values of a tile after the last step: what first order leaves out is below the rounding of float32.

    LIGHT: as they are, since the step is too short to be seen.
    """
    out = y
    if not LIGHT:
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


@triton.jit
def _own_row(i, R: tl.constexpr):
    """The row that a program takes as its i-th."""
    return (tl.program_id(0) + i // R * tl.num_programs(0)).to(tl.int64) * R + i % R


@triton.jit
def _settle_own(
    x_ptr, k_ptr, w_ptr, l_ptr, u_ptr, out_ptr, nu_ptr, rows, k_row, k_low, inv_t, n, R: tl.constexpr,
    STEP: tl.constexpr, WEIGHT: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr, AT_MOST: tl.constexpr,
):  # fmt: skip
    """Settle the rows of a program that are not solved, as a rule none; GROUP of them are looked at together."""
    i = tl.arange(0, GROUP)
    apart = tl.num_programs(0) * R
    each = (rows + apart - 1) // apart * R
    for start in range(0, each, GROUP):
        row = _own_row(start + i, R)
        seen = tl.load(nu_ptr + row, mask=row < rows, other=0.0)
        last = tl.max(tl.where(seen != seen, i, -1), 0)
        while last >= 0:
            one = _own_row(start + last, R)
            settle_row(
                x_ptr, x_ptr, w_ptr, l_ptr, u_ptr, out_ptr, nu_ptr, one, budget_of(k_ptr, k_low, one, k_row), 0, 0, n,
                inv_t, STEP, False, WEIGHT, LOWER, UPPER, AT_MOST,
            )  # fmt: skip
            last = tl.max(tl.where((seen != seen) & (i < last), i, -1), 0)


@triton.jit(do_not_specialize=["rows"])
def shared(
    x_ptr, k_ptr, w_ptr, l_ptr, u_ptr, out_ptr, nu_ptr, rows, k_row, k_low, inv_t,
    R: tl.constexpr, C: tl.constexpr, WA: tl.constexpr, WB: tl.constexpr, WC: tl.constexpr, FULL: tl.constexpr,
    WEIGHT: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr, AT_MOST: tl.constexpr, TOL: tl.constexpr,
    LIGHT: tl.constexpr, LINES: tl.constexpr, N: tl.constexpr, SKIP: tl.constexpr, STAGES: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """R rows at a time per program, which reads the weights and bounds once.

    A row that is not solved has a nu of nan until the program has taken all of its rows; then it is settled, STEP
    classes at a time. LIGHT: a last step shorter than TOL is not followed by the values. The scores of the next
    STAGES - 1 blocks are on their way to shared memory, which Triton arranges for a loop without another directly in
    it; with 0 those of the next block are loaded ahead.
    """
    n: tl.constexpr = N
    AHEAD: tl.constexpr = STAGES == 0
    DIRECT: tl.constexpr = STAGES < 2  # then loops may be directly in the loop, which takes fewer registers
    BOUNDED: tl.constexpr = LOWER + UPPER > 0
    FULL_A: tl.constexpr = FULL or WB > 0
    FULL_B: tl.constexpr = FULL or WC > 0
    AT_B: tl.constexpr = WA * C
    AT_C: tl.constexpr = (WA + WB) * C
    LEFT: tl.constexpr = 1.0 if LIGHT else 4 * TOL * TOL * TOL  # the error in nu that a last step may leave
    blocks = (rows + R - 1) // R
    some = tl.arange(0, R).to(tl.int64)
    any_row = some * 0
    _fetch(x_ptr, rows, n, tl.program_id(0), R, LINES)
    va, la, ua = _terms(w_ptr, l_ptr, u_ptr, any_row, n, 0, WA, C, FULL_A, WEIGHT, LOWER, UPPER)
    vb, lb, ub, vc, lc, uc = va, la, ua, va, la, ua
    up, down = _largest(va)
    sure, room = _limits(va, la, ua)
    if WB > 0:
        vb, lb, ub = _terms(w_ptr, l_ptr, u_ptr, any_row, n, AT_B, WB, C, FULL_B, WEIGHT, LOWER, UPPER)
        up_too, down_too = _largest(vb)
        up = tl.maximum(up, up_too)
        down = tl.maximum(down, down_too)
        sure_too, room_too = _limits(vb, lb, ub)
        sure += sure_too
        room += room_too
    if WC > 0:
        vc, lc, uc = _terms(w_ptr, l_ptr, u_ptr, any_row, n, AT_C, WC, C, FULL, WEIGHT, LOWER, UPPER)
        up_too, down_too = _largest(vc)
        up = tl.maximum(up, up_too)
        down = tl.maximum(down, down_too)
        sure_too, room_too = _limits(vc, lc, uc)
        sure += sure_too
        room += room_too
    sure, room = sum2(sure, room, 1)
    up, down = largest2(up, down, 1)
    inv_unit = 1 / unit_above(tl.maximum(up, down))
    turned = tl.max((down > 0).to(tl.int32), 0) > 0
    wa, da = _normed(va, la, ua, inv_unit, BOUNDED)
    wb, db, wc, dc = wa, da, wa, da
    w1, w2, part, least = _shape(la, ua, wa, da, SKIP)
    if WB > 0:
        wb, db = _normed(vb, lb, ub, inv_unit, BOUNDED)
        w1_too, w2_too, part_too, least_too = _shape(lb, ub, wb, db, SKIP)
        w1 += w1_too
        w2 += w2_too
        part += part_too
        least = tl.minimum(least, least_too)
    if WC > 0:
        wc, dc = _normed(vc, lc, uc, inv_unit, BOUNDED)
        w1_too, w2_too, part_too, least_too = _shape(lc, uc, wc, dc, SKIP)
        w1 += w1_too
        w2 += w2_too
        part += part_too
        least = tl.minimum(least, least_too)
    w1, w2 = sum2(w1, w2, 1)
    over = rcp(tl.sum(part, 1))
    bad = tl.where(is_finite(room) & is_finite(w1 + w2) & (least >= 0), 0.0, 1.0)
    scale = inv_unit.to(tl.float64)
    if k_low is not None:  # one budget for all rows
        certain = budget_of(k_ptr, k_low, any_row, 0) - sure
        c, goal, side, searched, met, logit, mean, square, c0, c1, c2, c3 = _aim(
            certain, room - certain, scale, bad, w1, w2
        )
    if AHEAD:
        xa, xb, xc = _raw_row(x_ptr, rows, n, tl.program_id(0), R, WA, WB, WC, C, FULL)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=1 if AHEAD else STAGES):
        row = tl.minimum(some + block * R, rows - 1)
        if not AHEAD:
            if STAGES < 3:
                _fetch(x_ptr, rows, n, block + tl.num_programs(0), R, LINES)
            xa, xb, xc = _raw_row(x_ptr, rows, n, block, R, WA, WB, WC, C, FULL)
        za = scaled(wide(xa), inv_t)
        zb = za
        zc = za
        if WB > 0:
            zb = scaled(wide(xb), inv_t)
        if WC > 0:
            zc = scaled(wide(xc), inv_t)
        if AHEAD:
            then = tl.minimum(block + tl.num_programs(0), blocks - 1)
            xa, xb, xc = _raw_row(x_ptr, rows, n, then, R, WA, WB, WC, C, FULL)
        if turned:
            za = _turn(za, w_ptr, any_row, n, 0, WA, C, FULL_A, WEIGHT)
            if WB > 0:
                zb = _turn(zb, w_ptr, any_row, n, AT_B, WB, C, FULL_B, WEIGHT)
            if WC > 0:
                zc = _turn(zc, w_ptr, any_row, n, AT_C, WC, C, FULL, WEIGHT)
        z1, z2, zw = _moments(za, wa, da, SKIP)
        if WB > 0:
            m0, m1, m2 = _moments(zb, wb, db, SKIP)
            z1 += m0
            z2 += m1
            zw += m2
        if WC > 0:
            m0, m1, m2 = _moments(zc, wc, dc, SKIP)
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
        if _worst(tl.where(tl.abs(center) < 1e30, 0.0, 1.0), R, C) > 0:
            digits = tl.where(tl.abs(center) < 1e30, digits, goal * FEWER_DIGITS)
            finite = _finite_guess(
                x_ptr, w_ptr, l_ptr, u_ptr, row, n, inv_t, inv_unit, side, c, C, WEIGHT, LOWER, UPPER
            )
            center = tl.where(tl.abs(center) < 1e30, center, finite)
        open_ = searched & (tl.abs(center) < 1e30)
        center = tl.where(open_, center, 0.0)
        ea, f0, s1, s2 = _first_pass(za, wa, da, side, center)
        eb = ea
        ec = ea
        if WB > 0:
            eb, q0, q1, q2 = _first_pass(zb, wb, db, side, center)
            f0 += q0
            s1 += q1
            s2 += q2
        if WC > 0:
            ec, q0, q1, q2 = _first_pass(zc, wc, dc, side, center)
            f0 += q0
            s1 += q1
            s2 += q2
        f0, s1, s2 = sum3(f0, s1, s2, 1)
        delta, far = _log_step(f0, goal, s1, s2)
        lost = ~(open_ & (tl.abs(delta) < SPREAD))  # also nan
        delta = tl.where(lost, 0.0, delta)
        step = delta
        worst = _worst(tl.where(lost, 0.0, far), R, C)
        left = PASSES
        if (worst > FAR) | DIRECT:  # the step before was a long one
            while (worst > FAR) & (left > 0):
                move = step * -LOG2E
                ea, f0, s1, s2 = _next_pass(ea, wa, da, move)
                if WB > 0:
                    eb, q0, q1, q2 = _next_pass(eb, wb, db, move)
                    f0 += q0
                    s1 += q1
                    s2 += q2
                if WC > 0:
                    ec, q0, q1, q2 = _next_pass(ec, wc, dc, move)
                    f0 += q0
                    s1 += q1
                    s2 += q2
                f0, s1, s2 = sum3(f0, s1, s2, 1)
                step, far = _log_step(f0, goal, s1, s2)
                lost = lost | ~(tl.abs(delta + step) < SPREAD)
                step = tl.where(lost, 0.0, step)
                worst = _worst(tl.where(lost, 0.0, far), R, C)
                delta = delta + step
                left -= 1
        left = tl.where(worst > FAR, 0, left)
        move = step * -LOG2E
        ya, f, mass = _moved(ea, wa, da, move, LIGHT)
        yb = ya
        yc = ya
        if WB > 0:
            yb, q0, q1 = _moved(eb, wb, db, move, LIGHT)
            f += q0
            mass += q1
        if WC > 0:
            yc, q0, q1 = _moved(ec, wc, dc, move, LIGHT)
            f += q0
            mass += q1
        if LIGHT:
            f = tl.sum(f, 1)
            mass = s1 * exp2(step * s2 * rcp(s1) * LOG2E)
            s2 = s2 * 0.0
            unsure = s2
        else:
            f, mass = sum2(f, mass, 1)
            s2, unsure = _second(f, f0, mass, s1, s2, step)
        over_mass = rcp(mass)
        r = (f - goal) * over_mass
        size = tl.where(lost, 0.0, tl.where(r * r * unsure > mass * LEFT, 1.0, tl.abs(r)))
        worst = _worst(tl.where(size == size, size, 1.0), R, C)
        step = tl.where(lost, 0.0, -r * (1 + 0.5 * r * s2 * over_mass))  # Chebyshev's
        if (worst > TOL) | DIRECT:
            while (worst > TOL) & (left > 0):
                lost = lost | ~(tl.abs(step) < NEAR)
                step = tl.where(lost, 0.0, step)
                delta = delta + step
                move = step * -LOG2E
                s1 = mass
                ya, f, mass = _moved_again(ya, wa, da, move)
                if WB > 0:
                    yb, q0, q1 = _moved_again(yb, wb, db, move)
                    f += q0
                    mass += q1
                if WC > 0:
                    yc, q0, q1 = _moved_again(yc, wc, dc, move)
                    f += q0
                    mass += q1
                f, mass = sum2(f, mass, 1)
                # What was an estimate is not built upon.
                s2 = tl.where(tl.abs(step) > 1e-3, (mass - s1) * rcp(step), s2)
                unsure = mass * tl.where(tl.abs(step) > 1e-3, tl.abs(step), 1.0)
                over_mass = rcp(mass)
                r = (f - goal) * over_mass
                size = tl.where(lost, 0.0, tl.where(r * r * unsure > mass * LEFT, 1.0, tl.abs(r)))
                worst = _worst(tl.where(size == size, size, 1.0), R, C)
                step = tl.where(lost, 0.0, -r * (1 + 0.5 * r * s2 * over_mass))
                left -= 1
        delta = delta + step
        lost = lost | ~((size <= TOL) & (mass > digits) & (tl.abs(delta) < SPREAD))
        if not LIGHT:  # noqa: SIM102, since the first is a constant
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
            _write_tile(ya, wa, out_ptr, l_ptr, u_ptr, row, n, step, 0, WA, C, FULL_A, LOWER, UPPER, LIGHT)
            if WB > 0:
                _write_tile(yb, wb, out_ptr, l_ptr, u_ptr, row, n, step, AT_B, WB, C, FULL_B, LOWER, UPPER, LIGHT)
            if WC > 0:
                _write_tile(yc, wc, out_ptr, l_ptr, u_ptr, row, n, step, AT_C, WC, C, FULL, LOWER, UPPER, LIGHT)
        tl.store(nu_ptr + row, tl.where(lost, float("nan"), nu))
    tl.debug_barrier()  # rows that are not solved are written again
    _settle_own(
        x_ptr, k_ptr, w_ptr, l_ptr, u_ptr, out_ptr, nu_ptr, rows, k_row, k_low, inv_t, n, R, STEP, WEIGHT, LOWER, UPPER,
        AT_MOST,
    )  # fmt: skip
