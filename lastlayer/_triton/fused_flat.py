"""Flat rows of the kernels of `fused_subset`: those that power sums in float64 have enough digits for.

Let w = exp(x - pivot) for each class, and p_m the sum of w^m. The weights of the subsets by their size are the
elementary symmetric polynomials S of w, whatever the pivot, and Newton's identities give them from the p_m. Their terms
are as large as p_1^k / k! and more, so that as many digits are lost as S_k is smaller than that: at `LEAST` those of
float32 are left even in gradients, and few are lost in most rows. A class has the marginal

    v = w (S_(k-1) - w (S_(k-2) - w (S_(k-3) - ...))) / S_k

where the terms are at most k times as large. Every sum must see the same w, to the last digit: then its own rounding
is that of the difference of two scores. After the largest score, one pass over the row gives all that the marginals
need, and there is no search for a threshold. That is for k up to `FEW`; other rows are left to `fused_subset`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import triton
import triton.language as tl

from lastlayer._triton.device import LN2, LOG2E, exp2, is_finite, rcp, sum5
from lastlayer._triton.fused_rows import load_scores, store_row

FEW = tl.constexpr(5)  # classes of a subset, and power sums
FLAT_ROW = tl.constexpr(-1)  # in the table of a row, in place of the number of classes above the threshold
MOST_SUM = tl.constexpr(1e7)  # of w, whose fifth power is in the range of float32
LEAST = tl.constexpr(1e-6)  # k! S_k / p_1^k: errors of gradients are about 1e-13 over that


@triton.jit
def tile(first, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK classes in rows of WIDE, one of each row per thread: sums over the first dimension stay in it."""
    return first + tl.arange(0, BLOCK // WIDE)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]


@triton.jit
def end_of(n, BLOCK: tl.constexpr, ONE: tl.constexpr):
    """Where tiles end: with ONE tile per row there is no loop, and the compiler reads the row once."""
    if ONE:
        return BLOCK
    else:
        return n


@triton.jit
def inverse_of(value):
    """1 / value in float64 but for the last digits, of numbers that float32 has too."""
    r = rcp(value.to(tl.float32)).to(tl.float64)
    r = r * (2.0 - value * r)
    return r * (2.0 - value * r)


@triton.jit
def load_upstream(u_ptr, row, u_row, u_col, n, cols):
    """The upstream gradient of classes: one per class, or one for all of them where their distance is 0.

    A distance that is known to be 1 leaves the tile as it is; another kernel for 0 would have to be compiled.
    """
    same = tl.load(u_ptr + row * u_row).to(tl.float32)
    many = tl.where(u_col != 0, n, 0)
    return tl.load(u_ptr + (row * u_row + cols), mask=cols < many, other=same).to(tl.float32)


@triton.jit
def _pivot(x, x_ptr, row, n, WIDE: tl.constexpr, BLOCK: tl.constexpr, ONE: tl.constexpr):
    """The largest score, 0 if it is infinite: less that, the scores that count lose no digits."""
    top = tl.full((WIDE,), float("-inf"), tl.float32)
    for j in range(0, end_of(n, BLOCK, ONE), BLOCK):
        top = tl.maximum(top, tl.max(x if ONE else load_scores(x_ptr, row, n, tile(j, WIDE, BLOCK)), 0))
    pivot = tl.max(top, 0)
    return tl.where(is_finite(pivot), pivot, 0.0)


@triton.jit
def _weights(held, x_ptr, row, n, pivot, cols, ONE: tl.constexpr):
    """exp(x - pivot) as rounded to float32, nan where a score is nan or +inf; with ONE tile the scores are held."""
    x = held if ONE else load_scores(x_ptr, row, n, cols)
    t = tl.maximum(x - pivot, -200.0, propagate_nan=tl.PropagateNan.ALL)
    whole = t * LOG2E
    w = exp2(whole)
    return tl.fma(w, tl.fma(whole, -LN2, t), w).to(tl.float64)  # with what rounding has taken from `whole`


@triton.jit
def _rises(held, u_ptr, row, u_row, u_col, n, w, cols, ONE: tl.constexpr):
    """The upstream gradient, 0 for classes that are ruled out."""
    u = held if ONE else load_upstream(u_ptr, row, u_row, u_col, n, cols)
    return tl.where(w > 0, u, 0.0).to(tl.float64)


@triton.jit
def _sums(
    x, u, x_ptr, u_ptr, row, n, u_row, u_col, pivot,
    UPSTREAM: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """The sums of w to w^5, with the upstream gradient as weights if there is one."""
    a0 = tl.zeros((WIDE,), tl.float64)
    a1 = a0
    a2 = a0
    a3 = a0
    a4 = a0
    for j in range(0, end_of(n, BLOCK, ONE), BLOCK):
        cols = tile(j, WIDE, BLOCK)
        w = _weights(x, x_ptr, row, n, pivot, cols, ONE)
        square = w * w
        t0 = w
        t1 = square
        if UPSTREAM:
            t0 = w * _rises(u, u_ptr, row, u_row, u_col, n, w, cols, ONE)
            t1 = t0 * w
        t2 = t0 * square
        c0, c1, c2, c3, c4 = sum5(t0, t1, t2, t1 * square, t2 * square, 0)
        a0 += c0
        a1 += c1
        a2 += c2
        a3 += c3
        a4 += c4
    return sum5(a0, a1, a2, a3, a4, 0)


@triton.jit
def _of_degree(k, a, b, c, d, e):
    """The number of degree k, of those of degrees 1 to 5."""
    return tl.where(k == 1, a, tl.where(k == 2, b, tl.where(k == 3, c, tl.where(k == 4, d, e))))


@triton.jit
def _below(k, a, b, c, d, e):
    """The numbers of degrees below k, of those of degrees 0 to 4, behind zeros that make them five."""
    one = k % 2 == 0
    e = tl.where(one, d, e)
    d = tl.where(one, c, d)
    c = tl.where(one, b, c)
    b = tl.where(one, a, b)
    a = tl.where(one, 0.0, a)
    two = k // 2 == 1
    e = tl.where(two, c, e)
    d = tl.where(two, b, d)
    c = tl.where(two, a, c)
    b = tl.where(two, 0.0, b)
    a = tl.where(two, 0.0, a)
    four = k == 1
    e = tl.where(four, a, e)
    d = tl.where(four, 0.0, d)
    c = tl.where(four, 0.0, c)
    b = tl.where(four, 0.0, b)
    return tl.where(four, 0.0, a), b, c, d, e


@triton.jit
def flat_marginals(
    x, x_ptr, out_ptr, head, table, row, n, k,
    WIDE: tl.constexpr, BLOCK: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """Take a row if it is flat. Its table is S / S_k of the degrees 0 to 4.

    Return whether it is; if not, whether the rest can be trusted: the pivot and the sums of w and w^2.
    """
    pivot = _pivot(x, x_ptr, row, n, WIDE, BLOCK, ONE)
    p1, p2, p3, p4, p5 = _sums(x, x, x_ptr, x_ptr, row, n, 0, 0, pivot, False, WIDE, BLOCK, ONE)
    # j! S_j, of which each waits for one product with the one before it.
    f2 = p1 * p1 - p2
    f3 = f2 * p1 + (p3 - p1 * p2) * 2
    f4 = f3 * p1 + ((p1 * p3 - p4) * 6 - f2 * p2 * 3)
    f5 = f4 * p1 + ((f2 * p3 * 12 - f3 * p2 * 4) + (p5 - p1 * p4) * 24)
    square = p1 * p1
    most = _of_degree(k, p1, square, square * p1, square * square, square * square * p1)
    sound = (p1 > 0) & (p1 < MOST_SUM)  # false for nan
    flat = sound & (k > 0) & (_of_degree(k, p1, f2, f3, f4, f5) > most * LEAST)
    if flat:
        s2 = f2 * (1 / 2)
        s3 = f3 * (1 / 6)
        s4 = f4 * (1 / 24)
        g0 = inverse_of(_of_degree(k, p1, s2, s3, s4, f5 * (1 / 120)))
        g1 = p1 * g0
        g2 = s2 * g0
        g3 = s3 * g0
        g4 = s4 * g0
        tl.store(head, pivot.to(tl.float64))
        tl.store(head + 2, tl.full((), FLAT_ROW, tl.float64))
        tl.store(table, g0)
        tl.store(table + 1, g1)
        tl.store(table + 2, g2)
        tl.store(table + 3, g3)
        tl.store(table + 4, g4)
        a, b, c, d, e = _below(k, g0, g1, g2, g3, g4)
        for j in range(0, end_of(n, BLOCK, ONE), BLOCK):
            cols = tile(j, WIDE, BLOCK)
            w = _weights(x, x_ptr, row, n, pivot, cols, ONE)
            y = (e - (d - (c - (b - a * w) * w) * w) * w) * w
            store_row(out_ptr, row, n, cols, y.to(tl.float32))
    return flat, sound, pivot, p1.to(tl.float32), p2.to(tl.float32)


@triton.jit
def flat_change(
    x, u, x_ptr, u_ptr, out_ptr, row, n, u_row, u_col, k, pivot, g0, g1, g2, g3, g4,
    WIDE: tl.constexpr, BLOCK: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """Write the change of the marginals of a flat row along the upstream gradient."""
    q1, q2, q3, q4, q5 = _sums(x, u, x_ptr, u_ptr, row, n, u_row, u_col, pivot, True, WIDE, BLOCK, ONE)
    d1 = q1 * g0
    d2 = q1 * g1 - q2 * g0
    d3 = q1 * g2 - q2 * g1 + q3 * g0
    d4 = (q1 * g3 - q2 * g2) + (q3 * g1 - q4 * g0)
    d5 = (q1 * g4 - q2 * g3) + (q3 * g2 - q4 * g1) + q5 * g0
    # The factors are divided by the one of degree k, which changes too.
    dk = _of_degree(k, d1, d2, d3, d4, d5)
    b0, b1, b2, b3, b4 = _below(k, -g0 * dk, d1 - g1 * dk, d2 - g2 * dk, d3 - g3 * dk, d4 - g4 * dk)
    a0, a1, a2, a3, a4 = _below(k, g0, g1, g2, g3, g4)
    # The derivative of w times a polynomial of w, by the logarithm of w.
    a0 = a0 * 5
    a1 = a1 * 4
    a2 = a2 * 3
    a3 = a3 * 2
    for j in range(0, end_of(n, BLOCK, ONE), BLOCK):
        cols = tile(j, WIDE, BLOCK)
        w = _weights(x, x_ptr, row, n, pivot, cols, ONE)
        rise = _rises(u, u_ptr, row, u_row, u_col, n, w, cols, ONE)
        own = a4 - (a3 - (a2 - (a1 - a0 * w) * w) * w) * w
        other = b4 - (b3 - (b2 - (b1 - b0 * w) * w) * w) * w
        store_row(out_ptr, row, n, cols, ((rise * own + other) * w).to(tl.float32))
