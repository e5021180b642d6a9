"""The projection with weights and bounds on the GPU: values, and their gradients.

Rows are held in registers and searched in float32, as `lastlayer/_native/weighted_rows.h` does: weights are divided by
a power of two and turned positive, so that ``sum a sigmoid(z + w nu) = c`` with ``0 <= w <= 1`` is left, and Halley's
step has the certificates of `lml`. nu is kept as two floats, and ``z + w nu`` is rounded once. A row that float32 has
too few digits for, or that has nothing to search, is left to a second kernel, which works in float64 and holds on any
row.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer._threshold.budget import Budget
from lastlayer._triton import plan as shapes
from lastlayer._triton.device import exp, is_finite, log2, rcp, scaled, sqrt, sum2, sum3
from lastlayer._triton.launch import launch

LONGEST = 16384  # classes of a row held in registers, with their weights
PER_THREAD = {"forward": 16, "backward": 8}  # classes that a thread holds
SHORT = 256  # rows up to here hold as few in the forward pass
LN2 = tl.constexpr(0.6931471805599453)
CLOSE = tl.constexpr(0.0052)  # Newton's step from which Halley's error, at most 0.42 r^3, is below rounding
DIGITS = tl.constexpr(0.03)  # where sum w h is a smaller part of the goal, float32 has too few digits
EPS64 = tl.constexpr(2.220446049250313e-16)


@triton.jit
def _term(ptr, row, stride, cols, n, GIVEN: tl.constexpr, DEFAULT: tl.constexpr):
    """A weight or a bound of some classes, shape (R, C) or (1, C), in float32."""
    if GIVEN:
        return tl.load(ptr + row * stride + cols, mask=cols < n, other=DEFAULT).to(tl.float32)
    else:
        return (cols * 0).to(tl.float32) + DEFAULT


@triton.jit
def _scores(x_ptr, m_ptr, row, m_row, m_col, n, cols, inv_t, MASKED: tl.constexpr):
    x = tl.load(x_ptr + row * n + cols, mask=cols < n, other=float("-inf")).to(tl.float32)
    x = scaled(x, inv_t)
    if MASKED:
        keep = tl.load(m_ptr + row * m_row + cols * m_col, mask=cols < n, other=0)
        x = tl.where(keep != 0, x, float("-inf"))
    return x


@triton.jit
def _unit(largest):
    """A power of two that is at least `largest`; 1 where that is 0 or not finite."""
    bits = largest.to(tl.int32, bitcast=True)
    unit = ((bits >> 23) << 23).to(tl.float32, bitcast=True) * 2
    return tl.where((largest > 1e-30) & (largest < 1e30), unit, 1.0)


@triton.jit
def _start(logit, z1, z2, zw, w1, w2):
    """A guess of nu, as if scores and weights were normal; `device.start` has the mean for a variance."""
    spread = z2 - z1 * z1
    both = zw - z1 * w1
    wide = w2 - w1 * w1
    u = rcp(1 + 0.25 * tl.abs(logit))
    nu = z1 * 0.0
    for _ in tl.static_range(3):
        variance = tl.maximum(spread + nu * (2 * both + nu * wide), 0.0)
        v = rcp(1 + 0.25 * sqrt(variance))
        c0 = 0.09811 + v * (-0.43269 + v * (0.24553 + v * 0.40644))
        c1 = -0.74087 + v * (7.02805 + v * (-12.45673 + v * 4.56547))
        c2 = 3.63376 + v * (-20.06052 + v * (40.47055 - v * 20.53883))
        c3 = -2.86131 + v * (15.17705 + v * (-32.22729 + v * 18.464))
        c = c0 + u * (c1 + u * (c2 + u * c3))
        nu = (logit * sqrt(tl.maximum(1 + c * variance, 0.0)) - z1) / w1
    return nu


@triton.jit(do_not_specialize=["rows"])
def _forward(
    x_ptr, m_ptr, k_ptr, w_ptr, l_ptr, u_ptr, out_ptr, nu_ptr, rows, n, m_row, m_col, k_row, w_row, l_row, u_row, inv_t,
    R: tl.constexpr, C: tl.constexpr, MASKED: tl.constexpr, WEIGHT: tl.constexpr, LOWER: tl.constexpr,
    UPPER: tl.constexpr, AT_MOST: tl.constexpr, PASSES: tl.constexpr,
):  # fmt: skip
    """R rows per program. A row that is not solved has a nu of nan, and nothing else is written that stays."""
    row = tl.minimum(tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), rows - 1)[:, None]
    cols = tl.arange(0, C)[None, :]
    x = _scores(x_ptr, m_ptr, row, m_row, m_col, n, cols, inv_t, MASKED)
    weight = _term(w_ptr, row, w_row, cols, n, WEIGHT, 1.0)
    lower = _term(l_ptr, row, l_row, cols, n, LOWER, 0.0)
    upper = _term(u_ptr, row, u_row, cols, n, UPPER, 1.0)
    k = tl.load(k_ptr + row * k_row)

    inside = (cols < n) & (row >= 0)
    unit = _unit(tl.max(tl.where(inside, tl.abs(weight), 0.0), 1))[:, None]
    live = is_finite(x)
    turned = weight < 0
    w = tl.where(live, tl.abs(weight) / unit, 0.0)
    z = tl.where(live, tl.where(turned, -x, x), 0.0)
    width = upper - lower
    a = w * width
    sound = (width >= 0) & is_finite(width) & is_finite(weight) & (x == x)
    wrong = tl.sum((inside & (sound == 0)).to(tl.int32), 1)[:, None]
    # What is certain, and what can be had: in float64, since they are subtracted.
    nearest = tl.where(live, tl.where(turned, upper, lower), tl.where(x > 0, upper, lower))
    nearest = tl.where(inside, nearest, 0.0)
    exact = tl.where(live, tl.abs(weight).to(tl.float64) * (upper.to(tl.float64) - lower.to(tl.float64)), 0.0)
    sure = tl.sum(weight.to(tl.float64) * nearest.to(tl.float64), 1)[:, None]
    total = tl.sum(exact, 1)[:, None]
    wide_unit = unit.to(tl.float64)
    c = ((k - sure) / wide_unit).to(tl.float32)
    rest = ((total - (k - sure)) / wide_unit).to(tl.float32)
    met = rest <= 0  # a budget that cannot be used up
    few = c <= rest
    goal = tl.minimum(c, rest)
    searched = (goal > 0) & (wrong == 0)
    goal = tl.where(searched, goal, 1.0)
    c = tl.where(searched, c, 1.0)
    rest = tl.where(searched, rest, 1.0)

    z1, z2, zw = sum3(a * z, a * z * z, a * z * w, 1)
    w1, w2 = sum2(a * w, a * w * w, 1)
    over = rcp(c + rest)
    logit = (log2(c) - log2(rest)) * LN2
    nu = _start(
        logit, z1[:, None] * over, z2[:, None] * over, zw[:, None] * over, w1[:, None] * over, w2[:, None] * over
    )
    nu = tl.where(tl.abs(nu) < 1e30, nu, 0.0)
    low = nu * 0.0
    solved = searched == 0
    lost = solved
    passes = 0
    while passes < PASSES:
        t = tl.fma(w, nu, z) + w * low
        t = tl.minimum(tl.maximum(t, -80.0), 80.0)
        e = exp(-t)
        y = rcp(1 + e)
        v = e * y
        h = w * (a * (y * v))
        f, s1, s2 = sum3(a * tl.where(few, y, v), h, w * h * (v - y), 1)
        f = f[:, None]
        s1 = tl.maximum(s1[:, None], 1e-37)
        s2 = s2[:, None]
        r = tl.where(few, f - goal, goal - f) / s1
        near = tl.abs(r) < CLOSE
        lost = lost | ((solved == 0) & near & (s1 < goal * DIGITS))
        # Halley's step, on the logarithm of the smaller side where it is long.
        level = (log2(f) - log2(goal)) * LN2
        first = tl.where(few, s1, -s1) / f
        bend = tl.where(few, s2, -s2) / f - first * first
        below = 2 * first * first - level * bend
        by_log = tl.where(below > first * first, -2 * level * first / below, -level / first)
        step = tl.where(tl.abs(r) < 0.01, -r / (1 - r * (s2 / s1) * 0.5), by_log)
        step = tl.minimum(tl.maximum(tl.where(solved, 0.0, step), -1e3), 1e3)
        step = low + step
        moved = nu + step
        low = step - (moved - nu)
        nu = moved
        solved = solved | near
        passes += 1
        if tl.min(solved.to(tl.int32)) > 0:
            passes = PASSES
    lost = lost | (solved == 0)
    if AT_MOST:
        free = (tl.where(searched, nu, 0.0) > 0) | (met & (wrong == 0))
        nu = tl.where(free, 0.0, nu)
        low = tl.where(free, 0.0, low)
        lost = lost & (free == 0)
    # From here on for the classes as they were given.
    t = tl.fma(w, nu, z) + w * low
    t = tl.where(live, tl.where(turned, -t, t), x)
    tail = exp(-tl.abs(t))
    small = width * (tail * rcp(1 + tail))
    out = tl.where(t > 0, upper - small, lower + small)
    at = row * n + cols
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)
    exact_nu = (nu.to(tl.float64) + low.to(tl.float64)) / wide_unit
    tl.store(nu_ptr + row, tl.where(lost, float("nan"), exact_nu))


@triton.jit
def _block(
    x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, m_row, m_col, w_row, l_row, u_row, n, cols, inv_t,
    MASKED: tl.constexpr, WEIGHT: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr,
):  # fmt: skip
    """Score, weight and bounds of some classes of one row, in float64; a weight of 0 beyond the row."""
    x = _scores(x_ptr, m_ptr, row, m_row, m_col, n, cols, inv_t, MASKED).to(tl.float64)
    weight = _term(w_ptr, row, w_row, cols, n, WEIGHT, 1.0).to(tl.float64)
    lower = _term(l_ptr, row, l_row, cols, n, LOWER, 0.0).to(tl.float64)
    upper = _term(u_ptr, row, u_row, cols, n, UPPER, 1.0).to(tl.float64)
    return x, tl.where(cols < n, weight, 0.0), lower, upper


@triton.jit
def _middle(lo, hi):
    """A point between: halves the orders of magnitude of a wide bracket, else the bracket."""
    far_lo = tl.where(lo < 0, -1.0, 1.0) * tl.log(tl.abs(lo) * 1e3 + 1)
    far_hi = tl.where(hi < 0, -1.0, 1.0) * tl.log(tl.abs(hi) * 1e3 + 1)
    mean = (far_lo + far_hi) / 2
    by_order = tl.where(mean < 0, -1.0, 1.0) * (tl.exp(tl.minimum(tl.abs(mean), 700.0)) - 1) / 1e3
    return tl.where((by_order > lo) & (by_order < hi), by_order, lo / 2 + hi / 2)


@triton.jit(do_not_specialize=["rows"])
def _settle(
    x_ptr, m_ptr, k_ptr, w_ptr, l_ptr, u_ptr, out_ptr, nu_ptr, rows, n, m_row, m_col, k_row, w_row, l_row, u_row, inv_t,
    GROUP: tl.constexpr, C: tl.constexpr, MASKED: tl.constexpr, WEIGHT: tl.constexpr, LOWER: tl.constexpr,
    UPPER: tl.constexpr, AT_MOST: tl.constexpr,
):  # fmt: skip
    """The rows that `_forward` has left, in float64: `_solve` and `_root` of `lastlayer.project.weighted`."""
    first = tl.program_id(0).to(tl.int64) * GROUP
    for i in range(GROUP):
        row = tl.minimum(first + i, rows - 1)
        found = tl.load(nu_ptr + row)
        if found != found:
            k = tl.load(k_ptr + row * k_row)
            sure = k * 0.0
            total = k * 0.0
            largest = k * 0.0
            wrong = tl.where(k == k, 0, 1)
            for start in range(0, n, C):
                cols = start + tl.arange(0, C)
                x, weight, lower, upper = _block(
                    x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, m_row, m_col, w_row, l_row, u_row, n, cols, inv_t,
                    MASKED, WEIGHT, LOWER, UPPER,
                )  # fmt: skip
                live = tl.abs(x) < float("inf")
                width = upper - lower
                sound = (width >= 0) & (width < float("inf")) & (tl.abs(weight) < float("inf")) & (x == x)
                bad = (cols < n) & (sound == 0)
                wrong += tl.sum(bad.to(tl.int32), 0)
                nearest = tl.where(live, tl.where(weight < 0, upper, lower), tl.where(x > 0, upper, lower))
                sure += tl.sum(tl.where(weight == 0, 0.0, weight * nearest), 0)
                total += tl.sum(tl.where(live, tl.abs(weight) * width, 0.0), 0)
                largest = tl.maximum(largest, tl.max(tl.abs(weight), 0))
            c = k - sure
            rest = total - c
            slack = (total + tl.abs(c)) * EPS64 * 4
            end = tl.where(
                tl.abs(c) <= slack, float("-inf"), tl.where(tl.abs(rest) <= slack, float("inf"), float("nan"))
            )
            nu = tl.where(wrong > 0, float("nan"), end).to(tl.float64)
            if (c > 0) & (rest > 0) & (wrong == 0):
                level = tl.log(c) - tl.log(rest)
                lo = k * 0.0 + float("inf")
                hi = k * 0.0 - float("inf")
                for start in range(0, n, C):
                    cols = start + tl.arange(0, C)
                    x, weight, lower, upper = _block(
                        x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, m_row, m_col, w_row, l_row, u_row, n, cols, inv_t,
                        MASKED, WEIGHT, LOWER, UPPER,
                    )  # fmt: skip
                    live = (tl.abs(x) < float("inf")) & (weight != 0) & (upper > lower)
                    size = tl.where(live, tl.abs(weight), 1.0)
                    shift = (level - tl.where(live, tl.where(weight < 0, -x, x), 0.0)) / size
                    lo = tl.minimum(lo, tl.min(tl.where(live, shift, float("inf")), 0))
                    hi = tl.maximum(hi, tl.max(tl.where(live, shift, float("-inf")), 0))
                few = c <= rest
                goal = tl.minimum(c, rest)
                nu = _middle(lo, hi)
                before = hi - lo
                step = 0
                while step < 200:
                    got = k * 0.0
                    slope = k * 0.0
                    noise = k * 0.0
                    for start in range(0, n, C):
                        cols = start + tl.arange(0, C)
                        x, weight, lower, upper = _block(
                            x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, m_row, m_col, w_row, l_row, u_row, n, cols, inv_t,
                            MASKED, WEIGHT, LOWER, UPPER,
                        )  # fmt: skip
                        live = tl.abs(x) < float("inf")
                        w = tl.where(live, tl.abs(weight), 0.0)
                        z = tl.where(live, tl.where(weight < 0, -x, x), 0.0)
                        d = z + w * nu
                        tail = tl.exp(-tl.minimum(tl.abs(d), 700.0))
                        outer = 1 / (1 + tail)
                        inner = tail * outer
                        y = tl.where(d > 0, outer, inner)
                        v = tl.where(d > 0, inner, outer)
                        a = w * (upper - lower)
                        got += tl.sum(a * tl.where(few, y, v), 0)
                        slope += tl.sum(w * a * (y * v), 0)
                        noise += tl.sum(a * (y * v) * (tl.abs(d) + tl.abs(z)), 0)
                    f = tl.where(few, got - goal, goal - got)
                    lo = tl.where(f <= 0, nu, lo)
                    hi = tl.where(f >= 0, nu, hi)
                    done = (tl.abs(f) <= (goal + noise) * EPS64 * 2) | (hi - lo <= tl.abs(nu) * EPS64 * 2)
                    newton = nu - tl.where(few, 1.0, -1.0) * (tl.log(got) - tl.log(goal)) * got / slope
                    kept = (newton > lo) & (newton < hi)
                    if step % 3 == 2:
                        kept = kept & (hi - lo <= before / 2)
                        before = hi - lo
                    nu = tl.where(done, nu, tl.where(kept, newton, _middle(lo, hi)))
                    step = tl.where(done, 200, step + 1)
            if AT_MOST:
                nu = tl.where((wrong == 0) & ((nu > 0) | (rest <= 0)), 0.0, nu).to(tl.float64)
            tl.store(nu_ptr + row, nu)
            for start in range(0, n, C):
                cols = start + tl.arange(0, C)
                x, weight, lower, upper = _block(
                    x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, row, m_row, m_col, w_row, l_row, u_row, n, cols, inv_t,
                    MASKED, WEIGHT, LOWER, UPPER,
                )  # fmt: skip
                move = tl.where((weight == 0) | (tl.abs(x) == float("inf")), 0.0, weight * nu)
                t = x + move
                tail = tl.exp(-tl.minimum(tl.abs(t), 700.0))
                tail = tl.where(tl.abs(t) < 700, tail, 0.0)
                small = (upper - lower) * (tail / (1 + tail))
                out = tl.where(t > 0, upper - small, lower + small)
                out = tl.where(nu == nu, out, float("nan")).to(tl.float32)
                tl.store(out_ptr + row * n + cols, out.to(out_ptr.dtype.element_ty), mask=cols < n)


@triton.jit(do_not_specialize=["rows"])
def _backward(
    x_ptr, m_ptr, w_ptr, l_ptr, u_ptr, nu_ptr, g_ptr, gx_ptr, gk_ptr, gw_ptr, gl_ptr, gu_ptr, rows, n, m_row, m_col,
    w_row, l_row, u_row, inv_t, R: tl.constexpr, C: tl.constexpr, MASKED: tl.constexpr, WEIGHT: tl.constexpr,
    LOWER: tl.constexpr, UPPER: tl.constexpr, AT_MOST: tl.constexpr, BY_W: tl.constexpr, BY_L: tl.constexpr,
    BY_U: tl.constexpr,
):  # fmt: skip
    """With v = g - w given, given = sum w h g / sum w^2 h: h v for the scores, (1 - s) v and s v for the bounds."""
    row = tl.minimum(tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), rows - 1)[:, None]
    cols = tl.arange(0, C)[None, :]
    inside = (cols < n) & (row >= 0)
    x = _scores(x_ptr, m_ptr, row, m_row, m_col, n, cols, inv_t, MASKED)
    weight = _term(w_ptr, row, w_row, cols, n, WEIGHT, 1.0)
    lower = _term(l_ptr, row, l_row, cols, n, LOWER, 0.0)
    upper = _term(u_ptr, row, u_row, cols, n, UPPER, 1.0)
    g = tl.load(g_ptr + row * n + cols, mask=inside, other=0.0).to(tl.float32)
    exact = tl.load(nu_ptr + row)
    high = exact.to(tl.float32)
    ends = tl.abs(exact) == float("inf")
    high = tl.where(ends | (exact != exact), 0.0, high)
    low = tl.where(ends | (exact != exact), 0.0, (exact - high.to(tl.float64)).to(tl.float32))

    unit = _unit(tl.max(tl.where(inside, tl.abs(weight), 0.0), 1))[:, None]
    live = is_finite(x) & inside
    t = tl.where(is_finite(x), tl.fma(weight, high, x) + weight * low, x)
    at_end = tl.where(weight * tl.where(exact > 0, 1.0, -1.0) > 0, float("inf"), float("-inf"))
    t = tl.where(ends & live & (weight != 0), at_end, t)
    width = upper - lower
    w = tl.where(live, weight / unit, 0.0)
    far = tl.abs(t)
    # h without its largest exponential: the sums do not underflow across a wide gap.
    peak = tl.min(tl.where(live & (w != 0) & (width > 0), far, 1e30), 1)[:, None]
    tail = exp(-far)
    over = rcp(1 + tail)
    shape = over * over * width
    part = tl.where(live & (w != 0), w * (exp(peak - far) * shape), 0.0)
    mass, pull = sum2(w * part, part * g, 1)
    mass = mass[:, None]
    held = (mass > 0) & (peak < 1e29) & (ends == 0)
    if AT_MOST:
        held = held & (exact != 0)
    share = tl.where(held, pull[:, None] / tl.where(held, mass, 1.0), 0.0)
    asked = tl.max((tl.abs(g) > 0).to(tl.int32) | (g != g).to(tl.int32), 1)[:, None]
    gone = tl.where((exact != exact) & (asked > 0), float("nan"), 0.0)

    v = g - w * share
    h = tl.where(live & (far < float("inf")), tail * shape, 0.0)
    by_x = h * v
    at = row * n + cols
    tl.store(gx_ptr + at, (scaled(by_x, inv_t) + gone).to(gx_ptr.dtype.element_ty), mask=inside)
    tl.store(gk_ptr + row, share.to(tl.float64) / unit.to(tl.float64) + gone.to(tl.float64))
    outer = tl.where(t > 0, over, tail * over)
    v = tl.where(live, v, g - weight * (share / unit))
    if BY_W:
        y = tl.where(t > 0, upper - width * (tail * over), lower + width * (tail * over))
        tl.store(gw_ptr + at, (high * by_x - (share / unit) * y + gone), mask=inside)
    if BY_L:
        tl.store(gl_ptr + at, tl.where(t > 0, tail * over, over) * v + gone, mask=inside)
    if BY_U:
        tl.store(gu_ptr + at, outer * v + gone, mask=inside)


def unfit(x: Tensor, *terms: Tensor | None) -> str:
    """Why these tensors are not for the kernels; empty if they are."""
    if x.shape[-1] > LONGEST:
        return f"rows of weights have at most {LONGEST} classes"
    narrow = (torch.float32, torch.bfloat16, torch.float16)
    if any(t is not None and t.dtype not in narrow for t in terms):
        return "weights and bounds must be float32, bfloat16 or float16"
    return ""


class _Given:
    """Scores, weights and bounds as the kernels take them."""

    def __init__(self, budget: Budget, per_thread: int) -> None:
        x, terms, mask, temperature, _ = budget
        self.n = x.shape[-1]
        self.rows = x.numel() // self.n
        self.x = x.contiguous().view(self.rows, self.n)
        flat, m_row, m_col = shapes.flat_mask(mask, self.x)
        held = [_term_of(t, x) for t in terms]
        self.pointers = [self.x if t is None else t for t, _ in held]
        self.m, self.m_strides, self.strides = flat, (m_row, m_col), [stride for _, stride in held]
        self.inv_t = None if temperature == 1 else 1.0 / temperature
        given = [t is not None for t in terms]
        self.options = {"MASKED": mask is not None, "WEIGHT": given[0], "LOWER": given[1], "UPPER": given[2]}
        c = max(32, shapes.power_of_2(self.n))
        self.shape = {"R": max(1, 32 * per_thread // c), "C": c}
        self.warps = min(32, max(1, c // (32 * per_thread)))


def _term_of(value: Tensor | None, x: Tensor) -> tuple[Tensor | None, int]:
    """A term as one row for all, with a stride of 0, or as rows."""
    if value is None:
        return None, 0
    if value.ndim < 2 or value.numel() == value.shape[-1]:
        return value.reshape(-1).expand(x.shape[-1]).contiguous(), 0
    return value.expand(x.shape).contiguous(), x.shape[-1]


def forward(budget: Budget, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return y and nu, in float64 ``(..., 1)``; `k` is float64, ``(..., 1)``."""
    logits, at_most = budget.logits, budget.at_most
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    nu = logits.new_empty((*logits.shape[:-1], 1), dtype=torch.float64)
    if logits.numel() == 0:
        return out, nu.fill_(torch.nan)
    g = _Given(budget, PER_THREAD["forward" if logits.shape[-1] > SHORT else "backward"])
    one = all(s == 0 or d == 1 for s, d in zip(k.stride(), k.shape, strict=True))
    k = k if one else k.contiguous()
    arguments = (
        g.x, g.m, k, *g.pointers, out, nu, g.rows, g.n, *g.m_strides, 0 if one else 1, *g.strides, g.inv_t,
    )  # fmt: skip
    grid = (shapes.cdiv(g.rows, g.shape["R"]),)
    launch(_forward, grid, *arguments, **g.shape, **g.options, AT_MOST=at_most, PASSES=12, num_warps=g.warps)
    group = 16
    launch(
        _settle, (shapes.cdiv(g.rows, group),), *arguments, GROUP=group, C=min(g.shape["C"], 1024), **g.options,
        AT_MOST=at_most, num_warps=4,
    )  # fmt: skip
    return out, nu


def backward(
    budget: Budget, nu: Tensor, grad: Tensor, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Return the gradients of logits, k, and of those of weight, lower and upper that are wanted."""
    logits = budget.logits
    grad_x, grad_k = torch.empty_like(logits, memory_format=torch.contiguous_format), torch.empty_like(nu)
    others = [torch.empty_like(grad_x, dtype=torch.float32) if asked else None for asked in wanted]
    if logits.numel() == 0:
        return grad_x, grad_k.zero_(), others
    g = _Given(budget, PER_THREAD["backward"])
    launch(
        _backward, (shapes.cdiv(g.rows, g.shape["R"]),), g.x, g.m, *g.pointers, nu, grad.contiguous(), grad_x, grad_k,
        *(grad_x if o is None else o for o in others), g.rows, g.n, *g.m_strides, *g.strides, g.inv_t, **g.shape,
        **g.options, AT_MOST=budget.at_most, BY_W=wanted[0], BY_L=wanted[1], BY_U=wanted[2], num_warps=g.warps,
    )  # fmt: skip
    return grad_x, grad_k, others
