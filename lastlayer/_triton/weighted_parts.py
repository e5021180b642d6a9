"""What the kernels for weights and bounds share."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import triton
import triton.language as tl

from lastlayer._triton.device import LN2, by_row, columns, exp, is_finite, log2, rcp, scaled, sqrt, wide

PASSES = tl.constexpr(12)
DIGITS = tl.constexpr(0.03)  # where sum w h is a smaller part of the goal, float32 has too few digits


@triton.jit
def budget_of(k_ptr, k_low, row, k_row):
    """The budget of each row in float64; one number for all of them is a sum of two floats."""
    if k_low is None:
        return tl.load(k_ptr + row * k_row)
    else:
        return (row * 0).to(tl.float64) + k_ptr + k_low


@triton.jit
def term(ptr, row, stride, cols, n, GIVEN: tl.constexpr, DEFAULT: tl.constexpr):
    """A weight or a bound of some classes, shape (R, C) or (1, C), in float32."""
    if GIVEN:
        return tl.load(ptr + row * stride + cols, mask=cols < n, other=DEFAULT).to(tl.float32)
    else:
        return (cols * 0).to(tl.float32) + DEFAULT


@triton.jit
def scores(x_ptr, m_ptr, row, m_row, m_col, n, cols, inv_t, MASKED: tl.constexpr):
    x = tl.load(x_ptr + row * n + cols, mask=cols < n, other=float("-inf")).to(tl.float32)
    x = scaled(x, inv_t)
    if MASKED:
        keep = tl.load(m_ptr + row * m_row + cols * m_col, mask=cols < n, other=0)
        x = tl.where(keep != 0, x, float("-inf"))
    return x


@triton.jit
def unit_above(largest):
    """A power of two that is at least `largest`; 1 where that is 0 or not finite."""
    bits = largest.to(tl.int32, bitcast=True)
    unit = ((bits >> 23) << 23).to(tl.float32, bitcast=True) * 2
    return tl.where((largest > 1e-30) & (largest < 1e30), unit, 1.0)


# The products here are added with one rounding each, as written: a budget that rows share gives them the same values as
# one of their own.


@triton.jit
def _cubic(t, c0, c1, c2, c3):
    return tl.fma(t, tl.fma(t, tl.fma(t, c3, c2), c1), c0)


@triton.jit
def start_curve(logit):
    """The polynomial of `device.start` at a logit: its coefficients for the powers of 4 / (4 + d)."""
    u = rcp(tl.fma(tl.abs(logit), 0.25, 1.0))
    c0 = _cubic(u, 0.09811, -0.74087, 3.63376, -2.86131)
    c1 = _cubic(u, -0.43269, 7.02805, -20.06052, 15.17705)
    c2 = _cubic(u, 0.24553, -12.45673, 40.47055, -32.22729)
    c3 = _cubic(u, 0.40644, 4.56547, -20.53883, 18.464)
    return c0, c1, c2, c3


@triton.jit
def curve_start(logit, z1, z2, zw, w1, w2, c0, c1, c2, c3):
    """A guess of nu, as if scores and weights were normal; `device.start` has the mean for a variance."""
    spread = tl.fma(z1 * -1.0, z1, z2)
    both = tl.fma(z1 * -1.0, w1, zw) * 2
    wide = tl.fma(w1 * -1.0, w1, w2)
    per = rcp(w1)
    nu = tl.fma(logit, 1.5, z1 * -1.0) * per
    for _ in tl.static_range(2):
        variance = tl.maximum(tl.fma(nu, tl.fma(nu, wide, both), spread), 0.0)
        v = rcp(tl.fma(sqrt(variance), 0.25, 1.0))
        c = _cubic(v, c0, c1, c2, c3)
        nu = tl.fma(logit, sqrt(tl.maximum(tl.fma(c, variance, 1.0), 0.0)), z1 * -1.0) * per
    return nu


@triton.jit
def normal_start(logit, z1, z2, zw, w1, w2):
    c0, c1, c2, c3 = start_curve(logit)
    return curve_start(logit, z1, z2, zw, w1, w2, c0, c1, c2, c3)


@triton.jit
def two_floats(exact):
    """A number as the sum of two floats, and 0 for one that is not finite."""
    exact = tl.where(tl.abs(exact) < float("inf"), exact, 0.0)
    high = exact.to(tl.float32)
    return high, (exact - high.to(tl.float64)).to(tl.float32)


@triton.jit
def term_tile(ptr, row, n, first, W, C, FULL: tl.constexpr, GIVEN: tl.constexpr, DEFAULT: tl.constexpr):
    """A weight or a bound of a tile in float32: GIVEN is 0 if it is the default, 1 if rows share it, 2 if not.

    Beyond the row it is 0.
    """
    cols = columns(first, W, C)
    if GIVEN == 0:
        value = (by_row(row) * 0 + cols * 0).to(tl.float32) + DEFAULT
        if not FULL:
            value = tl.where(cols < n, value, 0.0)
    else:
        here = ptr + (by_row(row) * (n if GIVEN == 2 else 0) + cols)
        if FULL:
            value = tl.load(here).to(tl.float32)
        else:
            value = tl.load(here, mask=(cols < n) & (by_row(row) >= 0), other=0.0).to(tl.float32)
    return value


@triton.jit
def row_tile(ptr, row, n, first, W, C, FULL: tl.constexpr):
    """A tile of what rows do not share, in float32, 0 beyond them; past the first cache, which keeps what they do."""
    cols = columns(first, W, C)
    here = ptr + (by_row(row) * n + cols)
    if FULL:
        return wide(tl.load(here, cache_modifier=".cg"))
    else:
        return wide(tl.load(here, mask=(cols < n) & (by_row(row) >= 0), other=0.0, cache_modifier=".cg"))


@triton.jit
def score_tile(x_ptr, m_ptr, row, m_row, m_col, n, first, inv_t, W, C, FULL: tl.constexpr, MASKED: tl.constexpr):
    """The scores of a tile in float32: -inf where a class is ruled out, 0 beyond the row."""
    x = row_tile(x_ptr, row, n, first, W, C, FULL)
    x = scaled(x, inv_t)
    if MASKED:
        cols = columns(first, W, C)
        keep = tl.load(m_ptr + (by_row(row) * m_row + cols * m_col), mask=(cols < n) & (by_row(row) >= 0), other=1)
        x = tl.where(keep != 0, x, float("-inf"))
    return x


@triton.jit
def exact_sums(
    x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, m_row, m_col, n, inv_t, C: tl.constexpr, MASKED: tl.constexpr,
    WEIGHT: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr,
):  # fmt: skip
    """What the classes of some rows are certain to give and what they can give, in float64; and how many are wrong."""
    row = row[:, None]
    sure = tl.zeros(row.shape, tl.float64)
    total = tl.zeros(row.shape, tl.float64)
    wrong = tl.zeros(row.shape, tl.float32)
    for start in range(0, n, C):
        cols = start + tl.arange(0, C)[None, :]
        x = scores(x_ptr, m_ptr, row, m_row, m_col, n, cols, inv_t, MASKED)
        weight = term(w_ptr, row, n if WEIGHT == 2 else 0, cols, n, WEIGHT > 0, 1.0).to(tl.float64)
        lower = term(l_ptr, row, n if LOWER == 2 else 0, cols, n, LOWER > 0, 0.0).to(tl.float64)
        upper = term(u_ptr, row, n if UPPER == 2 else 0, cols, n, UPPER > 0, 1.0).to(tl.float64)
        weight = tl.where(cols < n, weight, 0.0)
        live = is_finite(x)
        width = upper - lower
        nearest = tl.where(live, tl.where(weight < 0, upper, lower), tl.where(x > 0, upper, lower))
        sound = (width >= 0) & (width < float("inf")) & (tl.abs(weight) < float("inf")) & (x == x)
        sure += tl.sum(weight * nearest, 1)[:, None]
        total += tl.sum(tl.where(live, tl.abs(weight) * width, 0.0), 1)[:, None]
        wrong += tl.sum(((cols < n) & (sound == 0)).to(tl.float32), 1)[:, None]
    return tl.sum(sure, 1), tl.sum(total, 1), tl.sum(wrong, 1)


@triton.jit
def log_step(f, goal, s1, s2):
    """Halley's step for the logarithm of the sum, or Newton's where that is the longer one."""
    over = rcp(f)
    level = (log2(f) - log2(goal)) * LN2
    first = s1 * over
    bend = s2 * over - first * first
    below = 2 * first * first - level * bend
    halley = below > first * first
    step = tl.where(halley, -2 * level * first, -level) * rcp(tl.where(halley, below, first))
    return tl.minimum(tl.maximum(step, -1e3), 1e3)


@triton.jit
def careful_share(
    x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, g_ptr, row, exact, m_row, m_col, n, inv_t, C: tl.constexpr,
    MASKED: tl.constexpr, WEIGHT: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr,
):  # fmt: skip
    """The sum of w h g over that of w^2 h, whatever the range of weights and points: 0 where nothing has a slope."""
    row = row[:, None]
    high, low = two_floats(exact)
    high = high[:, None]
    low = low[:, None]
    unit = tl.zeros(row.shape, tl.float32)
    peak = tl.zeros(row.shape, tl.float32) + 1e30
    mass = tl.zeros(row.shape, tl.float32)
    pull = tl.zeros(row.shape, tl.float32)
    for turn in tl.static_range(2):
        for start in range(0, n, C):
            cols = start + tl.arange(0, C)[None, :]
            x = scores(x_ptr, m_ptr, row, m_row, m_col, n, cols, inv_t, MASKED)
            weight = term(w_ptr, row, n if WEIGHT == 2 else 0, cols, n, WEIGHT > 0, 1.0)
            lower = term(l_ptr, row, n if LOWER == 2 else 0, cols, n, LOWER > 0, 0.0)
            width = term(u_ptr, row, n if UPPER == 2 else 0, cols, n, UPPER > 0, 1.0) - lower
            far = tl.abs(tl.fma(weight, high, x) + weight * low)
            live = (cols < n) & is_finite(x) & (weight != 0)
            if turn == 0:
                unit = tl.maximum(unit, tl.max(tl.where(cols < n, tl.abs(weight), 0.0), 1)[:, None])
                peak = tl.minimum(peak, tl.min(tl.where(live & (width > 0), far, 1e30), 1)[:, None])
            else:
                # h without its largest exponential: the sums do not underflow across a wide gap.
                g = tl.load(g_ptr + row * n + cols, mask=cols < n, other=0.0).to(tl.float32)
                w = weight / unit
                over = rcp(1 + exp(-far))
                part = tl.where(live, w * (exp(peak - far) * (over * over * width)), 0.0)
                mass += tl.sum(w * part, 1)[:, None]
                pull += tl.sum(part * g, 1)[:, None]
        if turn == 0:
            unit = unit_above(unit)
    held = (mass > 0) & (peak < 1e29)
    share = tl.where(held, pull / tl.where(held, mass, 1.0), 0.0) / unit
    return tl.sum(share, 1)
