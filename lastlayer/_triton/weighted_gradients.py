"""The gradients of rows with weights and bounds that are held in registers."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import triton
import triton.language as tl

from lastlayer._triton.device import LOG2E, by_row, columns, exp, exp2, is_finite, rcp, scaled, store_tile, sum3, sum_w
from lastlayer._triton.weighted_parts import careful_share, row_tile, score_tile, term_tile, two_floats


@triton.jit
def _slope_tile(
    x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, high, low, m_row, m_col, n, first, inv_t, W, C, FULL: tl.constexpr,
    MASKED: tl.constexpr, WEIGHT: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr,
):  # fmt: skip
    """Weights and slopes h of a tile."""
    x = score_tile(x_ptr, m_ptr, row, m_row, m_col, n, first, inv_t, W, C, FULL, MASKED)
    weight = term_tile(w_ptr, row, n, first, W, C, FULL, WEIGHT, 1.0)
    t = tl.fma(weight, by_row(high), x) + weight * by_row(low)
    tail = exp2(tl.abs(t) * -LOG2E)  # 0 for an infinite score
    over = rcp(1 + tail)
    h = tail * over * over
    if LOWER + UPPER > 0:
        width = term_tile(u_ptr, row, n, first, W, C, FULL, UPPER, 1.0)
        if LOWER > 0:
            width = width - term_tile(l_ptr, row, n, first, W, C, FULL, LOWER, 0.0)
        h = h * width
    elif not FULL:
        h = tl.where(columns(first, W, C) < n, h, 0.0)
    return weight, h


@triton.jit
def _sums_of(weight, h, g):
    """Sums of w^2 h and w h g over a tile's w, and of |g|."""
    wh = weight * h
    return sum_w(wh * weight), sum_w(wh * g), sum_w(tl.abs(g))


@triton.jit
def _write_gradients(
    weight, h, g, x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, gx_ptr, gw_ptr, gl_ptr, gu_ptr, row, exact, share, gone, m_row,
    m_col, n, first, none, inv_t, W, C, FULL: tl.constexpr, MASKED: tl.constexpr, WEIGHT: tl.constexpr,
    LOWER: tl.constexpr, UPPER: tl.constexpr, BY_W: tl.constexpr, BY_L: tl.constexpr, BY_U: tl.constexpr,
    HELD: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a tile. Weights that are not HELD are read again; `none` is 0, unknown to the compiler."""
    if not HELD:
        weight = term_tile(w_ptr, row, n, first + none, W, C, FULL, WEIGHT, 1.0)
    fixed = by_row((tl.abs(exact) == float("inf")) | (exact != exact))  # at its ends a row does not move
    lost = by_row(exact != exact)  # what is bad in such a row stays out of the gradients, if the row is not used
    v = tl.where(fixed, g, g - weight * by_row(share))
    by_x = tl.where((fixed & (weight != 0)) | lost, 0.0, h * v)  # a class of weight 0 is free at the ends, too
    store_tile(gx_ptr, row, n, scaled(by_x, inv_t) + by_row(gone), first, W, C, FULL)
    if BY_W or BY_L or BY_U:
        x = score_tile(x_ptr, m_ptr, row, m_row, m_col, n, first, inv_t, W, C, FULL, MASKED)
        high, low = two_floats(exact)
        ends = tl.abs(exact) == float("inf")
        t = tl.where(is_finite(x), tl.fma(weight, by_row(high), x) + weight * by_row(low), x)
        at_end = tl.where(weight * by_row(tl.where(exact > 0, 1.0, -1.0)) > 0, float("inf"), float("-inf"))
        t = tl.where(by_row(ends) & is_finite(x) & (weight != 0), at_end, t)
        tail = exp(-tl.abs(t))
        over = rcp(1 + tail)
        small = tail * over
        if BY_W:
            lower = term_tile(l_ptr, row, n, first, W, C, FULL, LOWER, 0.0)
            upper = term_tile(u_ptr, row, n, first, W, C, FULL, UPPER, 1.0)
            width = upper - lower
            y = tl.where(t > 0, upper - width * small, lower + width * small)
            by_weight = by_row(high) * by_x - by_row(share) * y
            store_tile(gw_ptr, row, n, tl.where(lost, by_row(gone), by_weight), first, W, C, FULL)
        if BY_L:
            by_lower = tl.where(t > 0, small, over) * v
            store_tile(gl_ptr, row, n, tl.where(lost, by_row(gone), by_lower), first, W, C, FULL)
        if BY_U:
            by_upper = tl.where(t > 0, over, small) * v
            store_tile(gu_ptr, row, n, tl.where(lost, by_row(gone), by_upper), first, W, C, FULL)


@triton.jit(do_not_specialize=["rows", "units"])
def gradients(
    x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, nu_ptr, g_ptr, gx_ptr, gk_ptr, gw_ptr, gl_ptr, gu_ptr, rows, units, m_row, m_col,
    inv_t, ALIGN: tl.constexpr, R: tl.constexpr, C: tl.constexpr, WA: tl.constexpr, WB: tl.constexpr, WC: tl.constexpr,
    FULL: tl.constexpr, MASKED: tl.constexpr, WEIGHT: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr,
    AT_MOST: tl.constexpr, BY_W: tl.constexpr, BY_L: tl.constexpr, BY_U: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """With v = g - w given, given = sum w h g / sum w^2 h: h v for the scores, (1 - s) v and s v for the bounds."""
    n = units * ALIGN
    FULL_A: tl.constexpr = FULL or WB > 0
    FULL_B: tl.constexpr = FULL or WC > 0
    AT_B: tl.constexpr = WA * C
    AT_C: tl.constexpr = (WA + WB) * C
    row = tl.minimum(tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), rows - 1)
    exact = tl.load(nu_ptr + row)
    fixed = (tl.abs(exact) == float("inf")) | (exact != exact)
    high, low = two_floats(exact)
    wa, ha = _slope_tile(
        x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, high, low, m_row, m_col, n, 0, inv_t, WA, C, FULL_A, MASKED, WEIGHT,
        LOWER, UPPER,
    )  # fmt: skip
    ga = row_tile(g_ptr, row, n, 0, WA, C, FULL_A)
    mass, pull, asked = _sums_of(wa, ha, ga)
    wb, hb, gb, wc, hc, gc = wa, ha, ga, wa, ha, ga
    if WB > 0:
        wb, hb = _slope_tile(
            x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, high, low, m_row, m_col, n, AT_B, inv_t, WB, C, FULL_B, MASKED,
            WEIGHT, LOWER, UPPER,
        )  # fmt: skip
        gb = row_tile(g_ptr, row, n, AT_B, WB, C, FULL_B)
        q0, q1, q2 = _sums_of(wb, hb, gb)
        mass += q0
        pull += q1
        asked += q2
    if WC > 0:
        wc, hc = _slope_tile(
            x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, high, low, m_row, m_col, n, AT_C, inv_t, WC, C, FULL, MASKED,
            WEIGHT, LOWER, UPPER,
        )  # fmt: skip
        gc = row_tile(g_ptr, row, n, AT_C, WC, C, FULL)
        q0, q1, q2 = _sums_of(wc, hc, gc)
        mass += q0
        pull += q1
        asked += q2
    mass, pull, asked = sum3(mass, pull, asked, 1)
    share = pull * rcp(mass)
    free = fixed
    if AT_MOST:
        free = free | (exact == 0)
    odd = (free == 0) & (((mass > 1e-25) & (mass < 1e30) & is_finite(pull)) == 0)
    some = tl.max(odd.to(tl.int32), 0)
    if some > 0:
        careful = careful_share(
            x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, g_ptr, row, exact, m_row, m_col, n, inv_t, C,
            MASKED, WEIGHT, LOWER, UPPER,
        )  # fmt: skip
        share = tl.where(odd, careful, share)
    share = tl.where(free, 0.0, share)
    gone = tl.where((exact != exact) & ~(asked == 0), float("nan"), 0.0)
    tl.store(gk_ptr + row, share.to(tl.float64) + gone.to(tl.float64))
    _write_gradients(
        wa, ha, ga, x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, gx_ptr, gw_ptr, gl_ptr, gu_ptr, row, exact, share, gone,
        m_row, m_col, n, 0, some >> 30, inv_t, WA, C, FULL_A, MASKED, WEIGHT, LOWER, UPPER, BY_W, BY_L, BY_U, HELD,
    )  # fmt: skip
    if WB > 0:
        _write_gradients(
            wb, hb, gb, x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, gx_ptr, gw_ptr, gl_ptr, gu_ptr, row, exact, share,
            gone, m_row, m_col, n, AT_B, some >> 30, inv_t, WB, C, FULL_B, MASKED, WEIGHT, LOWER, UPPER, BY_W, BY_L,
            BY_U, HELD,
        )  # fmt: skip
    if WC > 0:
        _write_gradients(
            wc, hc, gc, x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, gx_ptr, gw_ptr, gl_ptr, gu_ptr, row, exact, share,
            gone, m_row, m_col, n, AT_C, some >> 30, inv_t, WC, C, FULL, MASKED, WEIGHT, LOWER, UPPER, BY_W, BY_L,
            BY_U, HELD,
        )  # fmt: skip
