"""The rows with weights and bounds that the fast kernels leave: in float64, on any row.

Each function is visited once by the compiler, the body of a loop or a branch twice, and twice again inside of another.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import triton
import triton.language as tl

from lastlayer._triton.device import sum3, sum4
from lastlayer._triton.weighted_flat import (
    FAR,
    FLAT,
    crossings,
    depths,
    digits,
    log_of_side,
    power_of_two,
    rounded,
    tails,
    turned,
)
from lastlayer._triton.weighted_parts import budget_of, scores, term

EPS64 = tl.constexpr(2.220446049250313e-16)
SLACK = tl.constexpr(1e-6)  # of the sum: a budget out of reach by less is taken for the end


@triton.jit
def _block(
    x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, m_row, m_col, n, cols, inv_t, MASKED: tl.constexpr, WEIGHT: tl.constexpr,
    LOWER: tl.constexpr, UPPER: tl.constexpr,
):  # fmt: skip
    """Score, weight and bounds of some classes of one row, in float64; a weight of 0 beyond the row."""
    x = scores(x_ptr, m_ptr, row, m_row, m_col, n, cols, inv_t, MASKED).to(tl.float64)
    weight = term(w_ptr, row, n if WEIGHT == 2 else 0, cols, n, WEIGHT > 0, 1.0).to(tl.float64)
    lower = term(l_ptr, row, n if LOWER == 2 else 0, cols, n, LOWER > 0, 0.0).to(tl.float64)
    upper = term(u_ptr, row, n if UPPER == 2 else 0, cols, n, UPPER > 0, 1.0).to(tl.float64)
    return x, tl.where(cols < n, weight, 0.0), lower, upper


@triton.jit
def _middle(lo, hi):
    """A point between: halves the orders of magnitude of a wide bracket, else the bracket."""
    far_lo = tl.where(lo < 0, -1.0, 1.0) * tl.log(tl.abs(lo) * 1e3 + 1)
    far_hi = tl.where(hi < 0, -1.0, 1.0) * tl.log(tl.abs(hi) * 1e3 + 1)
    mean = (far_lo + far_hi) / 2
    by_order = tl.where(mean < 0, -1.0, 1.0) * (tl.exp(tl.minimum(tl.abs(mean), 700.0)) - 1) / 1e3
    return tl.where((by_order > lo) & (by_order < hi), by_order, lo / 2 + hi / 2)


@triton.jit
def _limits(x, weight, lower, upper, cols, n):
    """What some classes are certain to give, what they can give beyond it, and whether they spoil their row."""
    live = tl.abs(x) < float("inf")
    width = upper - lower
    sound = (width >= 0) & (width < float("inf")) & (tl.abs(weight) < float("inf")) & (x == x)
    nearest = tl.where(live, tl.where(weight < 0, upper, lower), tl.where(x > 0, upper, lower))
    sure = tl.where(weight == 0, 0.0, weight * nearest)
    total = tl.where(live, tl.abs(weight) * width, 0.0)
    return sure, total, ((cols < n) & (sound == 0)).to(tl.float64)


@triton.jit
def _share(x, weight, lower, upper, level):
    """Where a class alone would have the mean share, and whether it can move."""
    live = (tl.abs(x) < float("inf")) & (weight != 0) & (upper > lower)
    size = tl.where(live, tl.abs(weight), 1.0)
    return (level - tl.where(live, tl.where(weight < 0, -x, x), 0.0)) / size, live


@triton.jit
def _terms(x, weight, lower, upper, nu, few):
    """The terms of the sum, of its slope and of its rounding."""
    live = tl.abs(x) < float("inf")
    w = tl.where(live, tl.abs(weight), 0.0)
    z = tl.where(live, tl.where(weight < 0, -x, x), 0.0)
    d = z + w * nu
    tail = tl.exp(-tl.minimum(tl.abs(d), 700.0))
    outer = 1 / (1 + tail)
    inner = tail * outer
    a = w * (upper - lower)
    h = a * (outer * inner)
    return a * tl.where((d > 0) == few, outer, inner), w * h, h * (tl.abs(d) + tl.abs(z))


@triton.jit
def _value(x, weight, lower, upper, nu):
    move = tl.where((weight == 0) | (tl.abs(x) == float("inf")), 0.0, weight * nu)
    t = x + move
    tail = tl.exp(-tl.minimum(tl.abs(t), 700.0))
    tail = tl.where(tl.abs(t) < 700, tail, 0.0)
    small = (upper - lower) * (tail / (1 + tail))
    out = tl.where(t > 0, upper - small, lower + small)
    return tl.where(nu == nu, out, float("nan")).to(tl.float32)


@triton.jit
def _root(
    x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, m_row, m_col, n, inv_t, c, rest, C: tl.constexpr, MASKED: tl.constexpr,
    WEIGHT: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr,
):  # fmt: skip
    level = tl.log(c) - tl.log(rest)
    lo = tl.full([C], float("inf"), tl.float64)
    hi = tl.full([C], float("-inf"), tl.float64)
    for start in range(0, n, C):
        x, weight, lower, upper = _block(
            x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, m_row, m_col, n, start + tl.arange(0, C), inv_t,
            MASKED, WEIGHT, LOWER, UPPER,
        )  # fmt: skip
        shift, live = _share(x, weight, lower, upper, level)
        lo = tl.minimum(lo, tl.where(live, shift, float("inf")))
        hi = tl.maximum(hi, tl.where(live, shift, float("-inf")))
    lo = tl.min(lo, 0)
    hi = tl.max(hi, 0)
    few = c <= rest
    goal = tl.minimum(c, rest)
    nu = _middle(lo, hi)
    before = hi - lo
    step = 0
    while step < 200:
        got, slope, noise = _sums(
            x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, m_row, m_col, n, inv_t, nu, few, C, MASKED, WEIGHT, LOWER, UPPER
        )
        f = tl.where(few, got - goal, goal - got)
        lo = tl.where(f <= 0, nu, lo)
        hi = tl.where(f >= 0, nu, hi)
        done = (tl.abs(f) <= (goal + noise) * EPS64 * 2) | (hi - lo <= tl.abs(nu) * EPS64 * 2)
        newton = nu - tl.where(few, 1.0, -1.0) * (tl.log(got) - tl.log(goal)) * got / slope
        check = step % 3 == 2
        kept = (newton > lo) & (newton < hi) & ((hi - lo <= before / 2) | (check == 0))
        before = tl.where(check, hi - lo, before)
        nu = tl.where(done, nu, tl.where(kept, newton, _middle(lo, hi)))
        step = tl.where(done, 200, step + 1)
    return nu


@triton.jit
def _sums(
    x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, m_row, m_col, n, inv_t, nu, few, C: tl.constexpr, MASKED: tl.constexpr,
    WEIGHT: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr,
):  # fmt: skip
    got = tl.zeros([C], tl.float64)
    slope = tl.zeros([C], tl.float64)
    noise = tl.zeros([C], tl.float64)
    for start in range(0, n, C):
        x, weight, lower, upper = _block(
            x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, m_row, m_col, n, start + tl.arange(0, C), inv_t,
            MASKED, WEIGHT, LOWER, UPPER,
        )  # fmt: skip
        q0, q1, q2 = _terms(x, weight, lower, upper, nu, few)
        got += q0
        slope += q1
        noise += q2
    return sum3(got, slope, noise, 0)


@triton.jit
def _peaks(
    x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, m_row, m_col, n, inv_t, start, nu, C: tl.constexpr, MASKED: tl.constexpr,
    WEIGHT: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr,
):  # fmt: skip
    below = tl.full([C], -FAR, tl.float64)
    above = tl.full([C], -FAR, tl.float64)
    for first in range(0, n, C):
        x, weight, lower, upper = _block(
            x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, m_row, m_col, n, first + tl.arange(0, C), inv_t,
            MASKED, WEIGHT, LOWER, UPPER,
        )  # fmt: skip
        z, w, a = turned(x, weight, lower, upper)
        q0, q1 = depths(z, w, a, start, nu)
        below = tl.maximum(below, q0)
        above = tl.maximum(above, q1)
    return tl.max(below, 0), tl.max(above, 0)


@triton.jit
def _tails(
    x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, m_row, m_col, n, inv_t, start, nu, below, above, C: tl.constexpr,
    MASKED: tl.constexpr, WEIGHT: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr,
):  # fmt: skip
    e0 = tl.zeros([C], tl.float64)
    e1 = tl.zeros([C], tl.float64)
    s0 = tl.zeros([C], tl.float64)
    s1 = tl.zeros([C], tl.float64)
    for first in range(0, n, C):
        x, weight, lower, upper = _block(
            x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, m_row, m_col, n, first + tl.arange(0, C), inv_t,
            MASKED, WEIGHT, LOWER, UPPER,
        )  # fmt: skip
        z, w, a = turned(x, weight, lower, upper)
        q0, q1, q2, q3 = tails(z, w, a, start, nu, below, above)
        e0 += q0
        e1 += q1
        s0 += q2
        s1 += q3
    return sum4(e0, e1, s0, s1, 0)


@triton.jit
def _balanced(
    x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, m_row, m_col, n, inv_t, c, total, start, C: tl.constexpr,
    MASKED: tl.constexpr, WEIGHT: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr,
):  # fmt: skip
    """Nu from a first guess: by the tails of both sides if the row is decided, or else the guess."""
    grid = power_of_two(total) * (EPS64 * 2)
    large = tl.zeros([C], tl.float64)
    small = tl.zeros([C], tl.float64)
    tail = tl.zeros([C], tl.float64)
    lo = tl.full([C], -FAR, tl.float64)
    hi = tl.full([C], FAR, tl.float64)
    for first in range(0, n, C):
        x, weight, lower, upper = _block(
            x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, m_row, m_col, n, first + tl.arange(0, C), inv_t,
            MASKED, WEIGHT, LOWER, UPPER,
        )  # fmt: skip
        z, w, a = turned(x, weight, lower, upper)
        q0, q1, q2 = digits(z, w, a, start, grid)
        large += q0
        small += q1
        tail += q2
        p0, p1 = crossings(z, w, a, start)
        lo = tl.maximum(lo, p0)
        hi = tl.minimum(hi, p1)
    large, small, tail = sum3(large, small, tail, 0)
    lo = tl.max(lo, 0)
    hi = tl.min(hi, 0)
    level = rounded(c, grid)
    surplus = (large - level) + (small - (c - level))
    nu = start
    step = tl.where(tail < tl.minimum(c, total - c) * FLAT, 0, 120)
    while step < 120:
        below, above = _peaks(
            x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, m_row, m_col, n, inv_t, start, nu, C, MASKED, WEIGHT, LOWER, UPPER
        )
        e0, e1, s0, s1 = _tails(
            x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, m_row, m_col, n, inv_t, start, nu, below, above, C, MASKED,
            WEIGHT, LOWER, UPPER,
        )  # fmt: skip
        whole0, slope0 = log_of_side(below, e0, s0, surplus)
        whole1, slope1 = log_of_side(above, e1, s1, -surplus)
        f = whole0 - whole1
        lo = tl.where(f <= 0, nu, lo)
        hi = tl.where(f >= 0, nu, hi)
        done = (tl.abs(f) <= (1 + tl.abs(whole0)) * EPS64 * 4) | (hi - lo <= tl.abs(nu) * EPS64 * 2)
        newton = nu - f / (slope0 + slope1)
        kept = (newton > lo) & (newton < hi)
        nu = tl.where(done, nu, tl.where(kept, newton, _middle(lo, hi)))
        step = tl.where(done, 120, step + 1)
    return nu


@triton.jit
def _row(
    x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, out_ptr, nu_ptr, row, k, m_row, m_col, n, inv_t, C: tl.constexpr,
    MASKED: tl.constexpr, WEIGHT: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr, AT_MOST: tl.constexpr,
):  # fmt: skip
    """`_solve` and `_root` of `lastlayer.project.weighted`."""
    sure = tl.zeros([C], tl.float64)
    total = tl.zeros([C], tl.float64)
    wrong = tl.zeros([C], tl.float64)
    for start in range(0, n, C):
        cols = start + tl.arange(0, C)
        x, weight, lower, upper = _block(
            x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, m_row, m_col, n, cols, inv_t, MASKED, WEIGHT, LOWER, UPPER
        )
        q0, q1, q2 = _limits(x, weight, lower, upper, cols, n)
        sure += q0
        total += q1
        wrong += q2
    sure, total, wrong = sum3(sure, total, wrong, 0)
    sound = (wrong == 0) & (k == k)
    c = k - sure
    rest = total - c
    slack = (total + tl.abs(k)) * SLACK
    nu = tl.where(tl.abs(c) <= slack, float("-inf"), tl.where(tl.abs(rest) <= slack, float("inf"), float("nan")))
    nu = tl.where(sound, nu, float("nan")).to(tl.float64)
    if (c > 0) & (rest > 0) & sound:
        nu = _root(
            x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, m_row, m_col, n, inv_t, c, rest, C, MASKED, WEIGHT, LOWER, UPPER
        )
        nu = _balanced(
            x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, m_row, m_col, n, inv_t, c, total, nu, C, MASKED, WEIGHT, LOWER,
            UPPER,
        )  # fmt: skip
    if AT_MOST:
        nu = tl.where(sound & ((nu > 0) | (rest <= 0)), 0.0, nu).to(tl.float64)
    tl.store(nu_ptr + row, nu)
    for start in range(0, n, C):
        cols = start + tl.arange(0, C)
        x, weight, lower, upper = _block(
            x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, m_row, m_col, n, cols, inv_t, MASKED, WEIGHT, LOWER, UPPER
        )
        out = _value(x, weight, lower, upper, nu)
        tl.store(out_ptr + row * n + cols, out.to(out_ptr.dtype.element_ty), mask=cols < n)


# At the end of a kernel that does other things first: as a function of its own it leaves them most of their registers,
# if it takes one class per thread at a time.
settle_row = triton.jit(_row.fn, noinline=True)


@triton.jit(do_not_specialize=["rows", "n", "each"])
def settle(
    x_ptr, m_ptr, k_ptr, w_ptr, l_ptr, u_ptr, out_ptr, nu_ptr, rows, n, each, m_row, m_col, k_row, k_low, inv_t,
    GROUP: tl.constexpr, C: tl.constexpr, MASKED: tl.constexpr, WEIGHT: tl.constexpr, LOWER: tl.constexpr,
    UPPER: tl.constexpr, AT_MOST: tl.constexpr,
):  # fmt: skip
    """The rows that the kernels before have left, as a rule none; a program looks at `each`, GROUP at a time."""
    first = tl.program_id(0).to(tl.int64) * each
    for start in range(0, each, GROUP):
        i = start + tl.arange(0, GROUP)
        seen = tl.load(nu_ptr + first + i, mask=(i < each) & (first + i < rows), other=0.0)
        last = tl.max(tl.where(seen != seen, i, -1), 0)
        while last >= 0:
            row = first + last
            _row(
                x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, out_ptr, nu_ptr, row, budget_of(k_ptr, k_low, row, k_row),
                m_row, m_col, n, inv_t, C, MASKED, WEIGHT, LOWER, UPPER, AT_MOST,
            )  # fmt: skip
            last = tl.max(tl.where((seen != seen) & (i < last), i, -1), 0)
