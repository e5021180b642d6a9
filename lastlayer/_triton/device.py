"""What the LML kernels share: arithmetic, tiles of rows, and the fast and the certain search for nu.

A row is searched at most twice. `search` is the fast way: y = 1 / (1 + E s) from one exponential per class, sums of
powers of y, and a step of fourth order; the row stays in registers. It gives up on rows that are saturated, have
infinite or nan logits or a `k` without a finite nu. `settle` takes those. It is `lastlayer._threshold.search.solve`,
with the same `bracket`, `small_parts` and `advance`, and streams over the row. `sweep` and `sweep_step` are one pass of
the fast way over a row that is too long for registers.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import triton
import triton.language as tl

from lastlayer._triton import INTERPRETED
from lastlayer._triton import launch as _launch  # noqa: F401, since its import lets Triton start in threads

# Constants are to the right of tensors, never to the left: the interpreter of Triton 3.7 takes `constant * tensor`
# for a constant, which cannot be compared with a tensor.
COMPILED = tl.constexpr(not INTERPRETED)
ROWS_FIRST = tl.constexpr(tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 7))
LOG2E = tl.constexpr(1.4426950408889634)
LOG2E_LOW = tl.constexpr(1.925963033500e-08)  # the part that float32 drops
LN2 = tl.constexpr(0.6931471805599453)
LN2_HIGH = tl.constexpr(0.693145751953125)  # few bits: its product with a small whole number is exact
LN2_LOW = tl.constexpr(1.42860682030941723212e-6)
EPS = tl.constexpr(1.1920928955078125e-07)

PASSES = tl.constexpr(12)  # passes of the fast search before `settle` takes over
SPREAD = tl.constexpr(16.0)  # how far the fast search may move from its start: E loses digits beyond
SPLIT_RATIO = tl.constexpr(4.0)  # where k / sum h is larger, sum y - k has lost digits
RUN = tl.constexpr(128)  # neighbours read together where a row is sampled
APART = tl.constexpr(3.4e7)  # 4 / EPS: scores so far from 0 that rounding decides which of two sides is nearer
LEAST_MASS = tl.constexpr(1e-5)  # where sum h / k is smaller, the fast sums have no digits left


@triton.jit
def rcp(t):
    """1 / t, and 0 where that is subnormal."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [t], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.where(tl.abs(t) > 8e37, 0.0, 1.0 / t)


@triton.jit
def exp2(t):
    if COMPILED:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=r,r", [t], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(t)


@triton.jit
def log2(t):
    if COMPILED:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=r,r", [t], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(t)


@triton.jit
def sqrt(t):
    if COMPILED:
        return tl.inline_asm_elementwise(
            "sqrt.approx.ftz.f32 $0, $1;", "=r,r", [t], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.sqrt(t)


@triton.jit
def exp(t):
    """e^t to float32 rounding, also where |t| is large: the product with log2(e) is not rounded to one float."""
    high = t * LOG2E
    low = tl.where(tl.abs(high) < 1e30, tl.fma(t, LOG2E, -high) + t * LOG2E_LOW, 0.0)
    whole = exp2(high)
    return tl.where(whole < float("inf"), whole + whole * (low * LN2), whole)


@triton.jit
def exact_exp(t):
    """e^t for t <= 0 to one unit in the last place, at any t; `exp2` alone is off by two."""
    t = tl.maximum(t, -120.0)
    whole = tl.floor(t * LOG2E + 0.5)
    r = tl.fma(whole, -LN2_LOW, tl.fma(whole, -LN2_HIGH, t))
    p = 1 / 5040 * r + 1 / 720
    p = p * r + 1 / 120
    p = p * r + 1 / 24
    p = p * r + 1 / 6
    p = p * r + 0.5
    return tl.fma(p * r, r, r + 1.0) * exp2(whole)  # a power of two is exact


@triton.jit
def wide(x):
    """A tile in float32; a pair of bfloat16 takes two instructions, where Triton takes three."""
    if COMPILED:  # noqa: SIM102, which is known when the kernel is compiled
        if x.dtype == tl.bfloat16:
            return tl.inline_asm_elementwise(
                "{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000; }",
                "=r,=r,r",
                [x],
                dtype=tl.float32,
                is_pure=True,
                pack=2,
            )
    return x.to(tl.float32)


@triton.jit
def scaled(x, inv_t):
    """Divide by the temperature; None is 1. Rounded separately, so that every pass over a row has the same scores."""
    if inv_t is None:
        return x
    elif COMPILED:
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, inv_t], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return x * inv_t


@triton.jit
def log1p_series(t):
    """log(1 + t) to float32 rounding for |t| < 0.03."""
    return t * (1 - t * (0.5 - t * (0.33333333 - t * (0.25 - t * 0.2))))


@triton.jit
def log1p(t):
    """log(1 + t) for t > -1, to float32 rounding also where t is small."""
    return tl.where(tl.abs(t) < 0.03, log1p_series(t), tl.log(1 + t))


@triton.jit
def log1p_part(t):
    """log(1 + t) for 0 <= t <= 1, to float32 rounding: 2 artanh(t / (2 + t)) by its series."""
    s = t * rcp(2 + t)
    q = s * s
    p = 1 / 15 * q + 1 / 13
    p = p * q + 1 / 11
    p = p * q + 1 / 9
    p = p * q + 1 / 7
    p = p * q + 1 / 5
    p = p * q + 1 / 3
    return 2 * tl.fma(p * q, s, s)


@triton.jit
def log_sigmoid(z):
    return tl.minimum(z, 0.0) - log1p(exp(-tl.abs(z)))


@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")  # false for nan


@triton.jit
def cardinality(k_ptr, row, k_row):
    """The k of each row; without a stride, one number for all rows."""
    if k_row is None:
        return (row * 0).to(tl.float32) + k_ptr
    else:
        return tl.load(k_ptr + row * k_row)


@triton.jit
def points(x, center, delta):
    """X + nu; an infinite score keeps its sign against an infinite nu."""
    z = (x - center) + delta
    # No `&` of a scalar and a tensor: Triton's interpreter has none.
    return tl.where(tl.abs(delta) == float("inf"), tl.where(tl.abs(x) == float("inf"), x, z), z)


@triton.jit
def _add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def _add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _add5(a0, a1, a2, a3, a4, b0, b1, b2, b3, b4):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4


# One reduction of several sums costs the barriers of one. The interpreter would take it element by element.


@triton.jit
def sum2(a, b, axis: tl.constexpr):
    if COMPILED:
        return tl.reduce((a, b), axis, _add2)
    else:
        return tl.sum(a, axis), tl.sum(b, axis)


@triton.jit
def sum3(a, b, c, axis: tl.constexpr):
    if COMPILED:
        return tl.reduce((a, b, c), axis, _add3)
    else:
        return tl.sum(a, axis), tl.sum(b, axis), tl.sum(c, axis)


@triton.jit
def sum4(a, b, c, d, axis: tl.constexpr):
    if COMPILED:
        return tl.reduce((a, b, c, d), axis, _add4)
    else:
        return tl.sum(a, axis), tl.sum(b, axis), tl.sum(c, axis), tl.sum(d, axis)


@triton.jit
def sum5(a, b, c, d, e, axis: tl.constexpr):
    if COMPILED:
        return tl.reduce((a, b, c, d, e), axis, _add5)
    else:
        return tl.sum(a, axis), tl.sum(b, axis), tl.sum(c, axis), tl.sum(d, axis), tl.sum(e, axis)


# Tiles: classes first + w * C + c of R rows. Each thread holds all w of its rows and classes, so that a sum over w
# costs no communication. A row is up to three tiles (W a power of two each), which wastes less than one tile of a
# power of two. A tile has three dimensions, the classes c last. Of the other two Triton gives the threads to the first
# or to the second, depending on its version: that one must be the rows.


@triton.jit
def by_row(value):
    """One value per row, shape (R,), in the shape that broadcasts to a tile."""
    if ROWS_FIRST:
        return value[:, None, None]
    else:
        return value[None, :, None]


@triton.jit
def sum_w(tile):
    """The sum over w: shape (R, C)."""
    if ROWS_FIRST:
        return tl.sum(tile, 1)
    else:
        return tl.sum(tile, 0)


@triton.jit
def columns(first, W: tl.constexpr, C: tl.constexpr):
    """The classes of a tile."""
    if ROWS_FIRST:
        return first + tl.arange(0, W)[None, :, None] * C + tl.arange(0, C)[None, None, :]
    else:
        return first + tl.arange(0, W)[:, None, None] * C + tl.arange(0, C)[None, None, :]


@triton.jit
def load_tile(x_ptr, m_ptr, row, m_row, m_col, n, first, W, C, FULL: tl.constexpr, MASKED: tl.constexpr):
    """The logits of a tile in float32; -inf where there is no class."""
    cols = columns(first, W, C)
    here = x_ptr + (by_row(row) * n + cols)
    if FULL:  # noqa: SIM108
        x = tl.load(here).to(tl.float32)
    else:
        x = tl.load(here, mask=cols < n, other=float("-inf")).to(tl.float32)
    if MASKED:
        keep = tl.load(m_ptr + (by_row(row) * m_row + cols * m_col), mask=cols < n, other=0)
        x = tl.where(keep != 0, x, float("-inf"))
    return x


@triton.jit
def load_row(x_ptr, m_ptr, row, m_row, m_col, n, WA, WB, WC, C, FULL: tl.constexpr, MASKED: tl.constexpr):
    """The logits of all tiles of some rows; a tile that does not exist is a copy of the first."""
    xa = load_tile(x_ptr, m_ptr, row, m_row, m_col, n, 0, WA, C, FULL or WB > 0, MASKED)
    xb = xa
    xc = xa
    if WB > 0:
        xb = load_tile(x_ptr, m_ptr, row, m_row, m_col, n, WA * C, WB, C, FULL or WC > 0, MASKED)
    if WC > 0:
        xc = load_tile(x_ptr, m_ptr, row, m_row, m_col, n, (WA + WB) * C, WC, C, FULL, MASKED)
    return xa, xb, xc


@triton.jit
def store_tile(out_ptr, row, n, value, first, W: tl.constexpr, C: tl.constexpr, FULL: tl.constexpr):
    cols = columns(first, W, C)
    here = out_ptr + (by_row(row) * n + cols)
    if FULL:
        tl.store(here, value.to(out_ptr.dtype.element_ty))
    else:
        tl.store(here, value.to(out_ptr.dtype.element_ty), mask=(cols < n) & (by_row(row) >= 0))


@triton.jit
def load_flat(x_ptr, m_ptr, row, m_row, m_col, n, cols, inv_t, MASKED: tl.constexpr):
    """The scores at some classes of a row, in float32; -inf where `cols` is no class."""
    inside = (cols >= 0) & (cols < n)
    x = scaled(tl.load(x_ptr + (row * n + cols), mask=inside, other=float("-inf")).to(tl.float32), inv_t)
    if MASKED:
        keep = tl.load(m_ptr + (row * m_row + cols * m_col), mask=inside, other=0)
        x = tl.where(keep != 0, x, float("-inf"))
    return x


# A stretch lo <= j < hi of a long row is taken as whole tiles that are aligned in memory, whatever the alignment of the
# row, and then the classes before and after them.


@triton.jit
def whole_tiles(TYPE: tl.constexpr, row, n, lo, hi, TILE: tl.constexpr):
    """The place in memory where the whole tiles of a stretch begin, the classes before it, and those in the tiles."""
    vector: tl.constexpr = 128 // TYPE.element_ty.primitive_bitwidth
    begin = row * n + lo
    first = (begin + (vector - 1)) // vector * vector
    skip = tl.minimum(first - begin, hi - lo).to(tl.int32)
    return first, skip, ((hi - lo) - skip) // TILE * TILE


@triton.jit
def load_whole(x_ptr, m_ptr, row, m_row, m_col, n, first, i, inv_t, MASKED: tl.constexpr):
    """The scores at the places first + i in memory, all of them classes of a row, in float32."""
    x = scaled(tl.load(x_ptr + first + i).to(tl.float32), inv_t)
    if MASKED:
        keep = tl.load(m_ptr + row * m_row + (first - row * n + i) * m_col)
        x = tl.where(keep != 0, x, float("-inf"))
    return x


@triton.jit
def end_columns(i, n, lo, hi, skip, whole):
    """The classes of a stretch that are in no whole tile, counted by i; n where there are no more."""
    cols = lo + i + tl.where(i < skip, 0, whole)
    return tl.where(cols < hi, cols, n)


@triton.jit
def _moments(x, shift, SELECT: tl.constexpr):
    d = x - shift
    if SELECT:
        d = tl.where(x > float("-inf"), d, 0.0)
    return sum_w(d), sum_w(d * d)


@triton.jit
def _moments3(xa, xb, xc, shift, WB: tl.constexpr, WC: tl.constexpr, LAST: tl.constexpr, ALL: tl.constexpr):
    """Sums of x - shift and its square over a row; LAST: the last tile holds -inf where the row has ended."""
    s, q = _moments(xa, shift, ALL or (LAST and WB == 0))
    if WB > 0:
        s1, q1 = _moments(xb, shift, ALL or (LAST and WC == 0))
        s += s1
        q += q1
    if WC > 0:
        s1, q1 = _moments(xc, shift, ALL or LAST)
        s += s1
        q += q1
    return sum2(s, q, 1)


@triton.jit
def _live3(xa, xb, xc, WB: tl.constexpr, WC: tl.constexpr):
    """The number of classes per row that are not ruled out."""
    live = sum_w((xa > float("-inf")).to(tl.float32))
    if WB > 0:
        live += sum_w((xb > float("-inf")).to(tl.float32))
    if WC > 0:
        live += sum_w((xc > float("-inf")).to(tl.float32))
    return tl.sum(live, 1)


@triton.jit
def start(s, q, shift, count, k, inv_t):
    """The center of a row with sums s and q of x - shift and its square, as if its scores were normal.

    For scores of mean m and standard deviation d, E[sigmoid(score + nu)] = p has nu = L sqrt(1 + w d^2) - m with
    L = logit(p); w depends little on L and d. (MacKay, 1992, has w = pi / 8, which holds in the middle; in the tails,
    where k is, that is off by 1 and more.) The polynomial in 4 / (4 + |L|) and 4 / (4 + d) is a fit to quadrature for
    |L| <= 14 and d <= 10, with an error in nu of at most 0.031.
    """
    mean = s / count
    variance = scaled(scaled(tl.maximum(q / count - mean * mean, 0.0), inv_t), inv_t)
    logit = (log2(k) - log2(count - k)) * LN2
    u = rcp(1 + 0.25 * tl.abs(logit))
    v = rcp(1 + 0.25 * sqrt(variance))
    w0 = 0.09811 + v * (-0.43269 + v * (0.24553 + v * 0.40644))
    w1 = -0.74087 + v * (7.02805 + v * (-12.45673 + v * 4.56547))
    w2 = 3.63376 + v * (-20.06052 + v * (40.47055 - v * 20.53883))
    w3 = -2.86131 + v * (15.17705 + v * (-32.22729 + v * 18.464))
    w = w0 + u * (w1 + u * (w2 + u * w3))
    return scaled(shift + mean, inv_t) - logit * sqrt(tl.maximum(1 + w * variance, 0.0))


@triton.jit
def _powers(e, s):
    y = rcp(1 + e * s)
    y2 = y * y
    return sum_w(y), sum_w(y2), sum_w(y2 * y), sum_w(y2 * y2)


@triton.jit
def _powers3(ea, eb, ec, s, WB: tl.constexpr, WC: tl.constexpr):
    p1, p2, p3, p4 = _powers(ea, s)
    if WB > 0:
        q1, q2, q3, q4 = _powers(eb, s)
        p1 += q1
        p2 += q2
        p3 += q3
        p4 += q4
    if WC > 0:
        q1, q2, q3, q4 = _powers(ec, s)
        p1 += q1
        p2 += q2
        p3 += q3
        p4 += q4
    return sum4(p1, p2, p3, p4, 1)


@triton.jit
def _parts(e, s):
    """Sums of +-min(y, 1 - y), of h and h (1 - 2 y), and the number of classes above 1/2; over a tile's w."""
    a = e * s
    y = rcp(1 + a)
    above = a < 1
    v = tl.where(above, a * y, y)
    h = v - v * v
    bend = h - 2 * h * v
    return (
        sum_w(tl.where(above, -v, v)),
        sum_w(h),
        sum_w(tl.where(above, -bend, bend)),
        sum_w(above.to(tl.float32)),
    )


@triton.jit
def _parts3(ea, eb, ec, s, WB: tl.constexpr, WC: tl.constexpr):
    f, h, b, c = _parts(ea, s)
    if WB > 0:
        f1, h1, b1, c1 = _parts(eb, s)
        f += f1
        h += h1
        b += b1
        c += c1
    if WC > 0:
        f1, h1, b1, c1 = _parts(ec, s)
        f += f1
        h += h1
        b += b1
        c += c1
    return sum4(f, h, b, c, 1)


@triton.jit
def step4(f, s1, s2, s3):
    """Householder's step of fourth order and the relative residual r; the error is at most r^4 / 3."""
    inverse = rcp(s1)
    r = f * inverse
    bend = r * s2 * inverse
    return -r * (1 - 0.5 * bend) * rcp(1 - bend + r * r * (s3 * inverse) * 0.16666667), r


@triton.jit
def safe_step(f, s1, s2, long, r):
    """A step that never passes the solution, or the longer one given where the tangents certify it."""
    a = 0.5 * (s1 - s2)
    b = 0.5 * (s1 + s2)
    c = f - s2
    root = sqrt(c * c + 4 * a * b)
    safe = tl.where(c > 0, log2(2 * a) - log2(c + root), log2(root - c) - log2(2 * b)) * LN2
    low = log2(tl.maximum(1 - r, 1e-30)) * LN2
    high = -log2(tl.maximum(1 + r, 1e-30)) * LN2
    certified = (tl.abs(r) < 1) & (long > low) & (long < high) & (tl.abs(long) > tl.abs(safe))
    return tl.where(certified, long, safe)


@triton.jit
def search(xa, xb, xc, shift, k, n, inv_t, WB, WC, LAST: tl.constexpr, MASKED: tl.constexpr, TOL: tl.constexpr):
    """Search for nu of R rows held in registers.

    Returns E of each tile, then center, delta, sum h and whether the search failed, one each per row.
    """
    shift = tl.where(is_finite(shift), shift, 0.0)
    wide = by_row(shift)
    total, squares = _moments3(xa, xb, xc, wide, WB, WC, LAST, MASKED)
    count = tl.zeros_like(shift) + n
    if MASKED:
        count = _live3(xa, xb, xc, WB, WC)
    elif tl.max(tl.where(is_finite(total), 0, 1), 0) > 0:  # -inf in a row: its moments are those of the others
        total, squares = _moments3(xa, xb, xc, wide, WB, WC, LAST, True)
        count = _live3(xa, xb, xc, WB, WC)
    center = start(total, squares, shift, count, k, inv_t)

    fixed = by_row(center)
    ea = exp2((fixed - scaled(xa, inv_t)) * LOG2E)
    eb = ea
    ec = ea
    if WB > 0:
        eb = exp2((fixed - scaled(xb, inv_t)) * LOG2E)
    if WC > 0:
        ec = exp2((fixed - scaled(xc, inv_t)) * LOG2E)

    delta = tl.zeros_like(center)
    mass = delta + 1
    open_ = is_finite(center)
    lost = ~open_
    worst = tl.max(open_.to(tl.float32), 0)
    left = PASSES
    while (worst > TOL) & (left > 0):
        p1, p2, p3, p4 = _powers3(ea, eb, ec, by_row(exp(-delta)), WB, WC)
        f = p1 - k
        s1 = p1 - p2
        s2 = s1 - 2 * (p2 - p3)
        s3 = s1 - 6 * (p2 - 2 * p3 + p4)
        step, r = step4(f, s1, s2, s3)
        size = tl.where(open_ & (s1 > k * LEAST_MASS), tl.abs(r), 0.0)
        lost = lost | (open_ & ~(s1 > k * LEAST_MASS))
        worst = tl.max(size, 0)
        if worst > 0.5:
            step = tl.where(size > 0.5, safe_step(f, s1, s2, step, r), step)
        delta = tl.where(open_, delta + step, delta)
        mass = tl.where(open_, s1 + step * (s2 + 0.5 * step * s3), mass)
        lost = lost | ~(tl.abs(delta) < SPREAD)  # also nan
        open_ = (size > TOL) & ~lost
        left -= 1
    lost = lost | open_

    if tl.max(tl.where(lost, 0, (k > mass * SPLIT_RATIO).to(tl.int32)), 0) > 0:
        f, s1, s2, above = _parts3(ea, eb, ec, by_row(exp(-delta)), WB, WC)
        r = ((above - k) + f) * rcp(s1)
        step = -r * (1 + 0.5 * r * s2 * rcp(s1))  # Chebyshev's; the error is of order r^3, and of sum h r^2
        good = tl.abs(r) < 3e-4
        lost = lost | ~good
        delta = tl.where(good, delta + step, delta)
        mass = s1 + step * s2
    return ea, eb, ec, center, delta, mass, lost


@triton.jit
def sample(x_ptr, m_ptr, row, m_row, m_col, n, k, inv_t, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """A center for one row, from BLOCK of its classes: runs of RUN classes, spread evenly, as ids may be sorted.

    The row is longer than BLOCK by a vector at least.
    """
    i = tl.arange(0, BLOCK)
    apart = n // (BLOCK // RUN) // 16 * 16
    first, _, _ = whole_tiles(x_ptr.dtype, row, n, 0, n, BLOCK)
    x = load_whole(x_ptr, m_ptr, row, m_row, m_col, n, first, (i // RUN) * apart + i % RUN, None, MASKED)
    alive = is_finite(x)
    shift = tl.load(x_ptr + row * n).to(tl.float32)
    shift = tl.where(is_finite(shift), shift, 0.0)
    d = tl.where(alive, x - shift, 0.0)
    count = tl.maximum(tl.sum(alive.to(tl.float32), 0), 1.0)
    # Assume the same share of live classes in the rest of the row.
    return start(tl.sum(d, 0), tl.sum(d * d, 0), shift, count, k * (count / n), inv_t)


@triton.jit
def sweep_terms(x, center):
    """The terms of a class in the sums of a step."""
    a = exp2((center - x) * LOG2E)
    y = rcp(1 + a)
    up = a < 1
    v = tl.where(up, a * y, y)
    h = v - v * v
    bend = h - 2 * h * v
    return tl.where(up, -v, v), up.to(tl.float32), h, tl.where(up, -bend, bend), h * h


@triton.jit
def sweep(x_ptr, m_ptr, row, m_row, m_col, n, lo, hi, center, inv_t, W: tl.constexpr, C: tl.constexpr, MASKED):
    """The five sums of a step over the classes lo <= j < hi of one row, from small parts only."""
    f = tl.zeros((C,), tl.float32)
    above = tl.zeros((C,), tl.float32)
    s1 = tl.zeros((C,), tl.float32)
    s2 = tl.zeros((C,), tl.float32)
    h2 = tl.zeros((C,), tl.float32)
    tile = tl.arange(0, W)[:, None] * C + tl.arange(0, C)[None, :]
    first, skip, whole = whole_tiles(x_ptr.dtype, row, n, lo, hi, W * C)
    for j in range(0, whole, W * C):
        x = load_whole(x_ptr, m_ptr, row, m_row, m_col, n, first, j + tile, inv_t, MASKED)
        df, da, d1, d2, dh = sweep_terms(x, center)
        f += tl.sum(df, 0)
        above += tl.sum(da, 0)
        s1 += tl.sum(d1, 0)
        s2 += tl.sum(d2, 0)
        h2 += tl.sum(dh, 0)
    f, above, s1, s2, h2 = sum5(f, above, s1, s2, h2, 0)
    for j in range(0, hi - lo - whole, C):
        cols = end_columns(j + tl.arange(0, C), n, lo, hi, skip, whole)
        x = load_flat(x_ptr, m_ptr, row, m_row, m_col, n, cols, inv_t, MASKED)
        df, da, d1, d2, dh = sweep_terms(x, center)
        df, da, d1, d2, dh = sum5(df, da, d1, d2, dh, 0)
        f += df
        above += da
        s1 += d1
        s2 += d2
        h2 += dh
    return f, above, s1, s2, h2


@triton.jit
def sweep_step(f, above, s1, s2, h2, k, TOL: tl.constexpr):
    """The step after a `sweep`: the step, sum h after it, whether it ends the search, and whether the row is lost."""
    f = (above - k) + f
    s3 = s1 - 6 * h2
    step, r = step4(f, s1, s2, s3)
    r = tl.where(s1 > 1e-18, r, float("nan"))
    step = tl.where(tl.abs(r) > 0.5, safe_step(f, s1, s2, step, r), step)
    close = tl.abs(r) <= TOL
    return step, s1 + step * (s2 + 0.5 * step * s3), close, ~is_finite(step) | (r != r)


@triton.jit
def key_of(x):
    """An integer that is in the same order as the floats."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def of_key(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def kth_largest(x_ptr, m_ptr, row, m_row, m_col, n, inv_t, rank1, rank2, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """The finite scores of ranks rank1 <= rank2 (1 is the largest) of one row, by bisection of the keys."""
    lo1 = tl.full((), -2147483648, tl.int64)
    hi1 = tl.full((), 2147483647, tl.int64)
    lo2 = lo1
    hi2 = hi1
    for _ in range(33):
        mid1 = (lo1 + hi1) >> 1
        mid2 = (lo2 + hi2) >> 1
        count1 = tl.zeros((BLOCK,), tl.int32)
        count2 = tl.zeros((BLOCK,), tl.int32)
        for j in range(0, n, BLOCK):
            x = load_flat(x_ptr, m_ptr, row, m_row, m_col, n, j + tl.arange(0, BLOCK), inv_t, MASKED)
            key = key_of(tl.where(is_finite(x), x, float("-inf")))
            count1 += (key >= mid1.to(tl.int32)).to(tl.int32)
            count2 += (key >= mid2.to(tl.int32)).to(tl.int32)
        enough1 = tl.sum(count1, 0) >= rank1
        enough2 = tl.sum(count2, 0) >= rank2
        lo1 = tl.where(enough1, mid1, lo1)
        hi1 = tl.where(enough1, hi1, mid1)
        lo2 = tl.where(enough2, mid2, lo2)
        hi2 = tl.where(enough2, hi2, mid2)
    return of_key(lo1.to(tl.int32)), of_key(lo2.to(tl.int32))


@triton.jit
def bracket(upper, lower, k, n):
    """A center and exact bounds on delta from two order statistics: `lastlayer._threshold.search.bracket`."""
    rank1 = tl.ceil(k)
    rank2 = tl.floor(k) + 1
    middle = lower / 2 + upper / 2
    lo = tl.log(k - (rank1 - 1)) - tl.log(n - k) - (upper - middle)
    hi = tl.log(k) - tl.log(rank2 - k) + (middle - lower)
    center = middle - (lo + hi) / 2
    slack = (1 + tl.abs(center - middle) + tl.abs(lo) + tl.abs(hi)) * (8 * EPS)
    return center, lo + (center - middle) - slack, hi + (center - middle) + slack


@triton.jit
def far_part(delta):
    """The part of a delta that moves the points; the rest is a factor: `lastlayer._threshold.search.shifted`."""
    return tl.where(tl.abs(delta) > 1, delta, 0.0)


@triton.jit
def small_parts(
    x_ptr, m_ptr, row, m_row, m_col, n, inv_t, center, delta, peak, BLOCK: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """The sums of `lastlayer._threshold.search.small_parts` over one row."""
    a = tl.zeros((BLOCK,), tl.float32)
    b = tl.zeros((BLOCK,), tl.float32)
    count = tl.zeros((BLOCK,), tl.float32)
    residual = tl.zeros((BLOCK,), tl.float32)
    cubic = tl.zeros((BLOCK,), tl.float32)
    far = far_part(delta)
    factor = exp(delta - far)
    for j in range(0, n, BLOCK):
        x = load_flat(x_ptr, m_ptr, row, m_row, m_col, n, j + tl.arange(0, BLOCK), inv_t, MASKED)
        d = (tl.where(is_finite(x), x, float("-inf")) - center) + far
        above = d > 0
        tail = tl.exp(-tl.abs(d) - peak) * tl.where(above, 1 / factor, factor)
        w = tail * tl.exp(peak)
        scaled = tail / (1 + w)
        w = w / (1 + w)
        outer = scaled * (1 - w) * (1 - w)
        inner = scaled * (1 - w) * w
        bend = scaled * w * (3 - 2 * w)
        a += tl.where(above, outer, inner)
        b += tl.where(above, inner, outer)
        count += above.to(tl.float32)
        residual += tl.where(above, -scaled, scaled)
        cubic += tl.where(above, -bend, bend)
    return sum5(a, b, count, residual, cubic, 0)


@triton.jit
def advance(a, b, count, residual, cubic, peak, k, lo, hi):
    """As `lastlayer._threshold.search.advance`: the step, the bounds, and whether it ends the search."""
    surplus = count - k
    exponent = tl.where(surplus == 0, 0.0, peak)
    unit = tl.exp(exponent)
    f = surplus + residual * unit
    c = surplus + cubic * unit
    r = f / ((a + b) * unit)
    size = tl.maximum(tl.abs(c), unit)  # the squares of a tiny k would underflow
    root = size * tl.sqrt((c / size) * (c / size) + 4 * (a * unit / size) * (b * unit / size))
    fall = tl.log(a) + LN2 + exponent - tl.log(c + root)
    rise = tl.log(root - c) - LN2 - tl.log(b) - exponent
    safe = tl.where(c > 0, fall, rise)
    safe = tl.where((safe < 0) == (f > 0), safe, 0.0)
    halley = -r / (1 - r * ((b - a) / (a + b)) / 2)
    step = tl.where((tl.abs(r) < 1) & (tl.abs(halley) > tl.abs(safe)), halley, safe)
    lo = tl.maximum(lo, tl.where(f < 0, safe, log1p(-tl.minimum(r, 1.0))) - 4 * EPS)
    hi = tl.minimum(hi, tl.where(f > 0, safe, -log1p(tl.maximum(r, -1.0))) + 4 * EPS)
    step = tl.where((step >= lo) & (step <= hi), step, (lo + hi) / 2)
    close = (tl.abs(r) < 0.5) & (0.42 * tl.abs(r) * r * r <= EPS / 2)
    apart = (surplus == 0) & (peak < -APART)
    return tl.where(apart, 0.0, tl.where(close, halley, step)), lo, hi, close | apart


@triton.jit
def settle(x_ptr, m_ptr, row, m_row, m_col, n, k, inv_t, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Return (center, delta) of any row: `lastlayer._threshold.search.solve`."""
    finite = tl.zeros((BLOCK,), tl.float32)
    top = tl.zeros((BLOCK,), tl.float32)
    bad = tl.zeros((BLOCK,), tl.float32)
    for j in range(0, n, BLOCK):
        x = load_flat(x_ptr, m_ptr, row, m_row, m_col, n, j + tl.arange(0, BLOCK), inv_t, MASKED)
        finite += is_finite(x).to(tl.float32)
        top += (x == float("inf")).to(tl.float32)
        bad += (x != x).to(tl.float32)
    n_live, n_top, n_bad = sum3(finite, top, bad, 0)
    k = k - n_top
    center = tl.full((), 0.0, tl.float32)
    delta = tl.where(k == 0, float("-inf"), tl.where(k == n_live, float("inf"), float("nan")))
    delta = tl.where(n_bad > 0, float("nan"), delta)
    if (k > 0) & (k < n_live) & (n_bad == 0):
        upper, lower = kth_largest(
            x_ptr, m_ptr, row, m_row, m_col, n, inv_t, tl.ceil(k), tl.floor(k) + 1, BLOCK, MASKED
        )
        center, lo, hi = bracket(upper, lower, k, n_live)
        delta = (lo + hi) / 2  # what rounding took from the center
        lo = lo - delta
        hi = hi - delta
        left = 12
        while left > 0:
            nearest = tl.full((BLOCK,), float("-inf"), tl.float32)
            for j in range(0, n, BLOCK):
                x = load_flat(x_ptr, m_ptr, row, m_row, m_col, n, j + tl.arange(0, BLOCK), inv_t, MASKED)
                depth = -tl.abs((x - center) + far_part(delta))
                nearest = tl.maximum(nearest, tl.where(is_finite(x), depth, float("-inf")))
            peak = tl.max(nearest, 0)
            a, b, count, residual, cubic = small_parts(
                x_ptr, m_ptr, row, m_row, m_col, n, inv_t, center, delta, peak, BLOCK, MASKED
            )
            step, lo, hi, done = advance(a, b, count, residual, cubic, peak, k, lo, hi)
            moved = tl.where(done, center, center - (delta + step))
            delta = (delta + step) + (moved - center)
            center = moved
            lo = lo - step
            hi = hi - step
            left = tl.where(done, 0, left - 1)
    return center, delta


@triton.jit
def peak_and_mass(x_ptr, m_ptr, row, m_row, m_col, n, center, delta, inv_t, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """The largest -|z| of one row and sum h over its exponential; a mass of +inf where no class has a gradient."""
    nearest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for j in range(0, n, BLOCK):
        x = load_flat(x_ptr, m_ptr, row, m_row, m_col, n, j + tl.arange(0, BLOCK), inv_t, MASKED)
        depth = -tl.abs((x - center) + delta)
        nearest = tl.maximum(nearest, tl.where(is_finite(x) & is_finite(depth), depth, float("-inf")))
    peak = tl.max(nearest, 0)
    peak = tl.where(is_finite(peak), peak, 0.0)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in range(0, n, BLOCK):
        x = load_flat(x_ptr, m_ptr, row, m_row, m_col, n, j + tl.arange(0, BLOCK), inv_t, MASKED)
        depth = -tl.abs((x - center) + delta)
        y = rcp(1 + exp(depth))
        total += tl.where(is_finite(x) & is_finite(depth), exp(depth - peak) * y * y, 0.0)
    mass = tl.sum(total, 0)
    return peak, tl.where(mass > 0, mass, float("inf"))
