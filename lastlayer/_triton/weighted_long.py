"""Rows with weights and bounds that are too long for registers: one program streams a row, from the cache if it can.

The search is that of `weighted`, with points that are computed anew in each pass. Rows with finite scores and positive
weights, whose budget is not most of what they can take and is not mostly that of lower bounds, have the shortest way: a
guess from some of their classes, as a rule two passes, and one that writes the values. Others are searched with sums in
float64. A row that neither solves is settled, as shorter ones are.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import triton
import triton.language as tl

from lastlayer._triton.device import LN2, LOG2E, RUN, exp, exp2, is_finite, log2, rcp, scaled, sum2, sum3, sum5
from lastlayer._triton.weighted_parts import (
    DIGITS,
    PASSES,
    budget_of,
    careful_share,
    exact_sums,
    log_step,
    normal_start,
    scores,
    term,
    two_floats,
    unit_above,
)
from lastlayer._triton.weighted_settle import settle_row


@triton.jit
def _classes(
    x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, m_row, m_col, n, cols, inv_t, inv_unit, MASKED: tl.constexpr,
    WEIGHT: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr,
):  # fmt: skip
    """Scores, weights and shares of some classes, all turned positive; the last two are 0 where there is no class."""
    x = scores(x_ptr, m_ptr, row, m_row, m_col, n, cols, inv_t, MASKED)
    weight = term(w_ptr, row, n if WEIGHT == 2 else 0, cols, n, WEIGHT > 0, 1.0)
    lower = term(l_ptr, row, n if LOWER == 2 else 0, cols, n, LOWER > 0, 0.0)
    upper = term(u_ptr, row, n if UPPER == 2 else 0, cols, n, UPPER > 0, 1.0)
    live = is_finite(x) & (cols < n)
    w = tl.where(live, tl.abs(weight) * inv_unit, 0.0)
    return tl.where(live, tl.where(weight < 0, -x, x), 0.0), w, w * (upper - lower)


@triton.jit
def _some_term(ptr, row, n, cols, WHOLE: tl.constexpr, GIVEN: tl.constexpr, DEFAULT: tl.constexpr):
    """A weight or a bound of some classes, 0 beyond the row."""
    here = ptr + (row * (n if GIVEN == 2 else 0) + cols)
    if GIVEN == 0:
        return (cols < n).to(tl.float32) * DEFAULT
    elif WHOLE:
        return tl.load(here).to(tl.float32)
    else:
        return tl.load(here, mask=cols < n, other=0.0).to(tl.float32)


@triton.jit
def _some_classes(
    x_ptr, w_ptr, l_ptr, u_ptr, row, n, cols, inv_t, WHOLE: tl.constexpr, WEIGHT: tl.constexpr, LOWER: tl.constexpr,
    UPPER: tl.constexpr,
):  # fmt: skip
    """Scores, weights, lower and upper bounds of some classes, 0 beyond the row.

    Scores are read past the first cache, which then keeps what rows share.
    """
    here = x_ptr + (row * n + cols)
    if WHOLE:
        x = tl.load(here, cache_modifier=".cg").to(tl.float32)
    else:
        x = tl.load(here, mask=cols < n, other=0.0, cache_modifier=".cg").to(tl.float32)
    weight = _some_term(w_ptr, row, n, cols, WHOLE, WEIGHT, 1.0)
    lower = _some_term(l_ptr, row, n, cols, WHOLE, LOWER, 0.0)
    return scaled(x, inv_t), weight, lower, _some_term(u_ptr, row, n, cols, WHOLE, UPPER, 1.0)


@triton.jit
def _share(w, lower, upper, LOWER: tl.constexpr, UPPER: tl.constexpr):
    """What a class can add to the sum."""
    if LOWER > 0:
        return w * (upper - lower)
    elif UPPER > 0:
        return w * upper
    else:
        return w


@triton.jit
def _own(tile, V: tl.constexpr):
    """The sum of a tile over its first dimension and over the V neighbours that a thread has."""
    W: tl.constexpr = tile.shape[0]
    C: tl.constexpr = tile.shape[1]
    return tl.sum(tl.sum(tl.reshape(tile, (W, C // V, V)), 2), 0)


@triton.jit
def _own_least(tile, V: tl.constexpr):
    W: tl.constexpr = tile.shape[0]
    C: tl.constexpr = tile.shape[1]
    return tl.min(tl.min(tl.reshape(tile, (W, C // V, V)), 2), 0)


@triton.jit
def _terms(z, w, a, center):
    """The terms of the sum of the values and of its first two derivatives."""
    y = rcp(1 + exp2(tl.fma(w, center, z) * -LOG2E))
    ay = a * y
    other = tl.fma(w * -1.0, y, w)
    s = ay * other
    return ay, s, s * tl.fma(other, 2.0, w * -1.0)


@triton.jit
def _sample(
    x_ptr, w_ptr, l_ptr, u_ptr, row, n, k, inv_t, SAMPLE: tl.constexpr, WEIGHT: tl.constexpr, LOWER: tl.constexpr,
    UPPER: tl.constexpr,
):  # fmt: skip
    """A guess of nu from SAMPLE classes: runs of RUN neighbours, spread evenly. Wherever it is, the search corrects it.

    As if scores and weights were normal; then a step for the sums of the sample.
    """
    run: tl.constexpr = min(RUN.value, SAMPLE)
    i = tl.arange(0, SAMPLE)
    cols = (i // run) * (n // (SAMPLE // run) // 16 * 16) + i % run
    z, w, lower, upper = _some_classes(
        x_ptr, w_ptr, l_ptr, u_ptr, row, n, cols, inv_t, True, WEIGHT, LOWER, UPPER
    )  # fmt: skip
    z = tl.where(is_finite(z), z, 0.0)
    a = _share(w, lower, upper, LOWER, UPPER)
    az = a * z
    aw = a * w
    z1, z2, zw, w1, w2 = sum5(az, az * z, az * w, aw, aw * w, 0)
    s0 = tl.sum(a, 0)
    goal = k * (SAMPLE / n)
    if LOWER > 0:
        goal = goal - tl.sum(w * lower, 0)
    over = rcp(s0)
    logit = (log2(goal) - log2(s0 - goal)) * LN2
    center = normal_start(logit, z1 * over, z2 * over, zw * over, w1 * over, w2 * over)
    f, s1, s2 = _terms(z, w, a, center)
    f, s1, s2 = sum3(f, s1, s2, 0)
    moved = center + log_step(f, goal, s1, s2)
    center = tl.where(tl.abs(moved) < 1e30, moved, center)
    return tl.where(tl.abs(center) < 1e30, center, 0.0)


@triton.jit
def _part(
    x_ptr, w_ptr, l_ptr, u_ptr, row, n, cols, center, inv_t, f, s1, s2, s0, sure, top, least, V: tl.constexpr,
    WHOLE: tl.constexpr, WEIGHT: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """The sums of `_pass` with those of some classes added."""
    z, w, lower, upper = _some_classes(
        x_ptr, w_ptr, l_ptr, u_ptr, row, n, cols, inv_t, WHOLE, WEIGHT, LOWER, UPPER
    )  # fmt: skip
    a = _share(w, lower, upper, LOWER, UPPER)
    q0, q1, q2 = _terms(z, w, a, center)
    f += _own(q0, V)
    s1 += _own(q1, V)
    s2 += _own(q2, V)
    if FIRST:
        s0 += _own(tl.fma(z, 0.0, a), V)  # nan where a score is not finite
        top = tl.minimum(top, _own_least(w * -1.0, V))
        low = w
        if LOWER > 0:
            sure += _own(w * lower, V)
            low = tl.minimum(w, tl.minimum(lower, upper - lower))
        elif UPPER > 0:
            low = tl.minimum(w, upper)
        least = tl.minimum(least, _own_least(low, V))
    return f, s1, s2, s0, sure, top, least


@triton.jit
def _pass(
    x_ptr, w_ptr, l_ptr, u_ptr, row, n, center, inv_t, W: tl.constexpr, C: tl.constexpr, V: tl.constexpr,
    WEIGHT: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """The sums of one row at a center: of its values above their lower bounds, and two derivatives.

    FIRST: also those of its shares and of what is certain, the largest weight, and the least term.
    """
    tile = tl.arange(0, W)[:, None] * C + tl.arange(0, C)[None, :]
    whole = n // (W * C) * (W * C)
    f = tl.zeros([C // V], tl.float32)
    s1, s2, s0, sure, top, least = f, f, f, f, f, f
    for start in range(0, whole, W * C):
        f, s1, s2, s0, sure, top, least = _part(
            x_ptr, w_ptr, l_ptr, u_ptr, row, n, start + tile, center, inv_t, f, s1, s2, s0, sure, top, least, V,
            True, WEIGHT, LOWER, UPPER, FIRST,
        )  # fmt: skip
    for start in range(whole, n, W * C):
        f, s1, s2, s0, sure, top, least = _part(
            x_ptr, w_ptr, l_ptr, u_ptr, row, n, start + tile, center, inv_t, f, s1, s2, s0, sure, top, least, V,
            False, WEIGHT, LOWER, UPPER, FIRST,
        )  # fmt: skip
    f, s1, s2 = sum3(f, s1, s2, 0)
    if FIRST:
        s0, sure = sum2(s0, sure, 0)
        return f, s1, s2, s0, sure, -tl.min(top, 0), tl.min(least, 0)
    else:
        return f, s1, s2, f, f, f, f


@triton.jit
def _write(
    x_ptr, w_ptr, l_ptr, u_ptr, out_ptr, row, n, cols, center, delta, inv_t, WHOLE: tl.constexpr,
    WEIGHT: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr,
):  # fmt: skip
    z, w, lower, upper = _some_classes(
        x_ptr, w_ptr, l_ptr, u_ptr, row, n, cols, inv_t, WHOLE, WEIGHT, LOWER, UPPER
    )  # fmt: skip
    y = rcp(1 + exp2(tl.fma(w, delta, tl.fma(w, center, z)) * -LOG2E))
    if LOWER > 0:
        y = tl.minimum(tl.fma(upper - lower, y, lower), upper)
    elif UPPER > 0:
        y = y * upper
    here = out_ptr + (row * n + cols)
    if WHOLE:
        tl.store(here, y.to(out_ptr.dtype.element_ty))
    else:
        tl.store(here, y.to(out_ptr.dtype.element_ty), mask=cols < n)


@triton.jit
def _short_way(
    x_ptr, w_ptr, l_ptr, u_ptr, out_ptr, row, n, k, inv_t, W: tl.constexpr, C: tl.constexpr, V: tl.constexpr,
    SAMPLE: tl.constexpr, WEIGHT: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr, AT_MOST: tl.constexpr,
    TOL: tl.constexpr,
):  # fmt: skip
    """Search one row and write its values. Return nu, or nan for a row that is not for it."""
    goal = k.to(tl.float32)
    center = _sample(x_ptr, w_ptr, l_ptr, u_ptr, row, n, goal, inv_t, SAMPLE, WEIGHT, LOWER, UPPER)
    f, s1, s2, s0, sure, top, least = _pass(
        x_ptr, w_ptr, l_ptr, u_ptr, row, n, center, inv_t, W, C, V, WEIGHT, LOWER, UPPER, True
    )
    if LOWER > 0:
        goal = (k - sure.to(tl.float64)).to(tl.float32)
    inv_unit = 1 / unit_above(top)
    # What is certain is rounded as the sum of the values is: it must not be more than that.
    fit = is_finite(s0) & (least >= 0) & (goal > 1e-20) & (goal <= 0.45 * s0) & (sure <= goal)
    delta = center * 0.0
    found = fit & (goal < 0)  # not yet
    left = tl.where(fit, PASSES, 0)
    while left > 0:
        s1 = s1 * inv_unit
        s2 = s2 * inv_unit * inv_unit
        inverse = rcp(s1)
        r = (f - goal) * inverse
        close = tl.abs(r) <= TOL
        found = close & (s1 > goal * DIGITS)
        delta = tl.where(close, -r * rcp(1 - 0.5 * r * s2 * inverse) * inv_unit, 0.0)  # Halley's
        moved = center + log_step(f, goal, s1, s2) * inv_unit
        center = tl.where(close, center, moved)
        left = tl.where(close | ((tl.abs(r) >= 0) == 0), 0, left - 1)
        if left > 0:
            f, s1, s2, _, _, _, _ = _pass(
                x_ptr, w_ptr, l_ptr, u_ptr, row, n, center, inv_t, W, C, V, WEIGHT, LOWER, UPPER, False
            )
    nu = center.to(tl.float64) + delta.to(tl.float64)
    if AT_MOST:
        free = nu > 0
        nu = tl.where(free, 0.0, nu)
        center = tl.where(free, 0.0, center)
        delta = tl.where(free, 0.0, delta)
    if found:
        tile = tl.arange(0, W)[:, None] * C + tl.arange(0, C)[None, :]
        whole = n // (W * C) * (W * C)
        for start in range(0, whole, W * C):
            _write(
                x_ptr, w_ptr, l_ptr, u_ptr, out_ptr, row, n, start + tile, center, delta, inv_t, True, WEIGHT, LOWER,
                UPPER,
            )  # fmt: skip
        for start in range(whole, n, W * C):
            _write(
                x_ptr, w_ptr, l_ptr, u_ptr, out_ptr, row, n, start + tile, center, delta, inv_t, False, WEIGHT, LOWER,
                UPPER,
            )  # fmt: skip
    return tl.where(found, nu, float("nan"))


@triton.jit
def _long_way(
    x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, out_ptr, nu_ptr, row, n, m_row, m_col, k, inv_t, C: tl.constexpr,
    MASKED: tl.constexpr, WEIGHT: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr, AT_MOST: tl.constexpr,
    TOL: tl.constexpr,
):  # fmt: skip
    """Any row, with sums in float64 of what is certain and what can be taken."""
    largest = tl.zeros([C], tl.float32)
    for start in range(0, n, C):
        cols = start + tl.arange(0, C)
        weight = term(w_ptr, row, n if WEIGHT == 2 else 0, cols, n, WEIGHT > 0, 1.0)
        largest = tl.maximum(largest, tl.where(cols < n, tl.abs(weight), 0.0))
    inv_unit = 1 / unit_above(tl.max(largest, 0))
    sure, exact, bad = exact_sums(
        x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row + tl.zeros([1], tl.int64), m_row, m_col, n, inv_t, C, MASKED, WEIGHT,
        LOWER, UPPER,
    )  # fmt: skip
    sure = tl.sum(sure, 0)
    exact = tl.sum(exact, 0)
    bad = tl.sum(bad, 0)
    c = ((k - sure) * inv_unit.to(tl.float64)).to(tl.float32)
    rest = ((exact - (k - sure)) * inv_unit.to(tl.float64)).to(tl.float32)
    few = c <= rest
    goal = tl.minimum(c, rest)
    nu = goal * 0.0
    low = nu
    lost = (goal > 0) == 0
    lost = lost | (bad > 0)
    if lost == 0:
        z1 = tl.zeros([C], tl.float32)
        z2 = tl.zeros([C], tl.float32)
        zw = tl.zeros([C], tl.float32)
        w1 = tl.zeros([C], tl.float32)
        w2 = tl.zeros([C], tl.float32)
        for start in range(0, n, C):
            z, w, a = _classes(
                x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, m_row, m_col, n, start + tl.arange(0, C), inv_t, inv_unit,
                MASKED, WEIGHT, LOWER, UPPER,
            )  # fmt: skip
            z1 += a * z
            z2 += a * z * z
            zw += a * z * w
            w1 += a * w
            w2 += a * w * w
        z1, z2, zw, w1, w2 = sum5(z1, z2, zw, w1, w2, 0)
        over = rcp(c + rest)
        side = tl.where(few, 1.0, -1.0)
        logit = (log2(goal) - log2(tl.maximum(c, rest))) * LN2
        nu = side * normal_start(logit, side * z1 * over, z2 * over, side * zw * over, w1 * over, w2 * over)
        lost = (tl.abs(nu) < 1e30) == 0
        nu = tl.where(lost, 0.0, nu)
        left = tl.where(lost, 0, PASSES)
        lost = lost | True
        while left > 0:
            f = tl.zeros([C], tl.float32)
            s1 = tl.zeros([C], tl.float32)
            s2 = tl.zeros([C], tl.float32)
            for start in range(0, n, C):
                z, w, a = _classes(
                    x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, m_row, m_col, n, start + tl.arange(0, C), inv_t, inv_unit,
                    MASKED, WEIGHT, LOWER, UPPER,
                )  # fmt: skip
                t = tl.fma(w, nu, z) + w * low
                y = rcp(1 + exp2(t * (side * -LOG2E)))
                h = w * a * (y - y * y)
                f += a * y
                s1 += h
                s2 += w * h * (1 - 2 * y)
            f, s1, s2 = sum3(f, s1, s2, 0)
            inverse = rcp(s1)
            r = (f - goal) * inverse
            step = -r * rcp(1 - 0.5 * r * s2 * inverse)  # Halley's
            size = tl.abs(r)
            if size > 0.3:
                step = log_step(f, goal, s1, s2)
            step = low + side * step
            moved = nu + step
            low = step - (moved - nu)
            nu = moved
            done = size <= TOL
            lost = (done & (s1 > goal * DIGITS)) == 0
            left = tl.where(done | ((size >= 0) == 0), 0, left - 1)
    exact_nu = (nu.to(tl.float64) + low.to(tl.float64)) * inv_unit.to(tl.float64)
    if AT_MOST:
        free = ((exact_nu > 0) & (lost == 0)) | ((rest <= 0) & (bad <= 0))
        exact_nu = tl.where(free, 0.0, exact_nu)
        lost = lost & (free == 0)
    exact_nu = tl.where(lost, float("nan"), exact_nu)
    tl.store(nu_ptr + row, exact_nu)
    if lost == 0:
        high, low = two_floats(exact_nu)
        for start in range(0, n, C):
            cols = start + tl.arange(0, C)
            x = scores(x_ptr, m_ptr, row, m_row, m_col, n, cols, inv_t, MASKED)
            weight = term(w_ptr, row, n if WEIGHT == 2 else 0, cols, n, WEIGHT > 0, 1.0)
            lower = term(l_ptr, row, n if LOWER == 2 else 0, cols, n, LOWER > 0, 0.0)
            upper = term(u_ptr, row, n if UPPER == 2 else 0, cols, n, UPPER > 0, 1.0)
            t = tl.where(is_finite(x), tl.fma(weight, high, x) + weight * low, x)
            y = tl.minimum(tl.fma(upper - lower, rcp(1 + exp(-t)), lower), upper)
            tl.store(out_ptr + row * n + cols, y.to(out_ptr.dtype.element_ty), mask=cols < n)


@triton.jit(do_not_specialize=["units"])
def forward_row(
    x_ptr, m_ptr, k_ptr, w_ptr, l_ptr, u_ptr, out_ptr, nu_ptr, units, m_row, m_col, k_row, k_low, inv_t,
    ALIGN: tl.constexpr, W: tl.constexpr, C: tl.constexpr, V: tl.constexpr, SAMPLE: tl.constexpr,
    MASKED: tl.constexpr, WEIGHT: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr, AT_MOST: tl.constexpr,
    TOL: tl.constexpr,
):  # fmt: skip
    """One row per program; one that neither way solves is settled."""
    n = units * ALIGN
    row = tl.program_id(0).to(tl.int64)
    k = budget_of(k_ptr, k_low, row, k_row)
    nu = k * float("nan")
    if MASKED == 0:
        nu = _short_way(
            x_ptr, w_ptr, l_ptr, u_ptr, out_ptr, row, n, k, inv_t, W, C, V, SAMPLE, WEIGHT, LOWER, UPPER, AT_MOST, TOL
        )
        tl.store(nu_ptr + row, nu)
    if nu != nu:
        _long_way(
            x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, out_ptr, nu_ptr, row, n, m_row, m_col, k, inv_t,
            C, MASKED, WEIGHT, LOWER, UPPER, AT_MOST, TOL,
        )  # fmt: skip
        tl.debug_barrier()  # a row that is not solved is written again
        left = tl.load(nu_ptr + row)
        if left != left:
            settle_row(
                x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, out_ptr, nu_ptr, row, k, m_row, m_col, n, inv_t, C // V, MASKED,
                WEIGHT, LOWER, UPPER, AT_MOST,
            )  # fmt: skip


@triton.jit(do_not_specialize=["units"])
def backward_row(
    x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, nu_ptr, g_ptr, gx_ptr, gk_ptr, gw_ptr, gl_ptr, gu_ptr, units, m_row, m_col,
    inv_t, ALIGN: tl.constexpr, C: tl.constexpr, MASKED: tl.constexpr, WEIGHT: tl.constexpr, LOWER: tl.constexpr,
    UPPER: tl.constexpr, AT_MOST: tl.constexpr, BY_W: tl.constexpr, BY_L: tl.constexpr, BY_U: tl.constexpr,
):  # fmt: skip
    """The gradients of one row: once over it for the sums, and once more."""
    n = units * ALIGN
    row = tl.program_id(0).to(tl.int64)
    exact = tl.load(nu_ptr + row)
    high, low = two_floats(exact)
    ends = tl.abs(exact) == float("inf")
    lost = exact != exact
    fixed = ends | lost
    mass = tl.zeros([C], tl.float32)
    pull = tl.zeros([C], tl.float32)
    asked = tl.zeros([C], tl.float32)
    for start in range(0, n, C):
        cols = start + tl.arange(0, C)
        x = scores(x_ptr, m_ptr, row, m_row, m_col, n, cols, inv_t, MASKED)
        weight = term(w_ptr, row, n if WEIGHT == 2 else 0, cols, n, WEIGHT > 0, 1.0)
        width = term(u_ptr, row, n if UPPER == 2 else 0, cols, n, UPPER > 0, 1.0)
        width = width - term(l_ptr, row, n if LOWER == 2 else 0, cols, n, LOWER > 0, 0.0)
        g = tl.load(g_ptr + row * n + cols, mask=cols < n, other=0.0).to(tl.float32)
        tail = exp2(tl.abs(tl.fma(weight, high, x) + weight * low) * -LOG2E)
        over = rcp(1 + tail)
        wh = tl.where(is_finite(x), weight * (tail * over * over * width), 0.0)  # also beyond the row
        mass += wh * weight
        pull += wh * g
        asked += tl.abs(g)
    mass, pull, asked = sum3(mass, pull, asked, 0)
    share = pull * rcp(mass)
    free = fixed
    if AT_MOST:
        free = free | (exact == 0)
    sound = (mass > 1e-25) & (mass < 1e30) & is_finite(pull)
    if (free == 0) & (sound == 0):
        share = tl.sum(
            careful_share(
                x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, g_ptr, row + tl.zeros([1], tl.int64),
                exact + tl.zeros([1], tl.float64), m_row, m_col, n, inv_t, C, MASKED, WEIGHT, LOWER, UPPER,
            ),
            0,
        )  # fmt: skip
    share = tl.where(free, 0.0, share)
    # What is bad in a row without a solution stays out of its gradients, if the row is not used.
    gone = tl.where(lost & ((asked == 0) == 0), float("nan"), 0.0)
    tl.store(gk_ptr + row, share.to(tl.float64) + gone.to(tl.float64))
    for start in range(0, n, C):
        cols = start + tl.arange(0, C)
        inside = cols < n
        x = scores(x_ptr, m_ptr, row, m_row, m_col, n, cols, inv_t, MASKED)
        weight = term(w_ptr, row, n if WEIGHT == 2 else 0, cols, n, WEIGHT > 0, 1.0)
        lower = term(l_ptr, row, n if LOWER == 2 else 0, cols, n, LOWER > 0, 0.0)
        upper = term(u_ptr, row, n if UPPER == 2 else 0, cols, n, UPPER > 0, 1.0)
        g = tl.load(g_ptr + row * n + cols, mask=inside, other=0.0).to(tl.float32)
        t = tl.fma(weight, high, x) + weight * low
        if BY_W or BY_L or BY_U:
            t = tl.where(is_finite(x), t, x)
            at_end = tl.where(weight * tl.where(exact > 0, 1.0, -1.0) > 0, float("inf"), float("-inf"))
            t = tl.where(ends, tl.where(is_finite(x) & (weight != 0), at_end, t), t)  # no `&` of a number and a tensor
            tail = exp(-tl.abs(t))
        else:  # as in the sums
            tail = exp2(tl.abs(t) * -LOG2E)
        over = rcp(1 + tail)
        small = tail * over
        width = upper - lower
        v = tl.where(fixed, g, g - weight * share)
        moves = tl.where(ends, tl.where(weight == 0, 1.0, 0.0), tl.where(lost, 0.0, 1.0))  # at its ends, what is free
        by_x = tl.where((moves > 0) & is_finite(x), small * over * width * v, 0.0)
        at = row * n + cols
        tl.store(gx_ptr + at, (scaled(by_x, inv_t) + gone).to(gx_ptr.dtype.element_ty), mask=inside)
        if BY_W:
            y = tl.where(t > 0, upper - width * small, lower + width * small)
            tl.store(gw_ptr + at, tl.where(lost, gone, high * by_x - share * y), mask=inside)
        if BY_L:
            tl.store(gl_ptr + at, tl.where(lost, gone, tl.where(t > 0, small, over) * v), mask=inside)
        if BY_U:
            tl.store(gu_ptr + at, tl.where(lost, gone, tl.where(t > 0, over, small) * v), mask=inside)
