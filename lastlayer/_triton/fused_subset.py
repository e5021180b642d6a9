"""Kernels of `fused` for polynomials over subsets of `k` classes: their marginals, and the smooth top-k SVM loss.

About a threshold nu at which the probabilities of the classes sum to about k, let e = exp(-|x + nu|) for each class.
The weights of the subsets by their size are the coefficients of a product: of 1 + e z for a class below the threshold,
which is small, and of z + e for one above it, of which there are at most 2 k + 1. Newton's identities give the product
S of the first, and the product E of 1 + e z for the others, from their power sums. In float64

    G_j = sum over a <= k of S_a E_(L - j + a)        for L classes above the threshold

is the weight of j classes for j <= k. The rest of the G_j are what the division by z + e needs. A class below the
threshold has the marginal v = e (G_(k-1) - e G_(k-2) + e^2 G_(k-3) - ...) / G_k, and one above it 1 - v with
v = e (G_(k+1) - e G_(k+2) + ...) / G_k. By Horner's rule all steps of that are weights of other classes over G_k, at
most about 1, so that float32 is enough. No step takes more than 2 k numbers per class.

That is for any row. Most rows of few classes per subset are flat, and `fused_flat` takes them in less time.

A row is taken by one program, both ways. Polynomials are vectors that every warp holds, so that a step from one degree
to the next waits for no other warp. What one thread leaves to others, or a forward to a backward pass, is in a table:
for each row the numbers of `HEAD`, then the vectors `SMALL` to `CHANGES`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import triton
import triton.language as tl

from lastlayer._triton.device import COMPILED, LN2, LOG2E, LOG2E_LOW, exp2, is_finite, log2, rcp, scaled, sum2, sum5
from lastlayer._triton.fused_flat import (
    FLAT_ROW,
    end_of,
    flat_change,
    flat_marginals,
    inverse_of,
    load_upstream,
    tile,
)
from lastlayer._triton.fused_lml import number_of
from lastlayer._triton.fused_rows import load_scores, load_shares, logistics, store_row

HEAD = tl.constexpr(4)  # center and delta, whose difference is nu; the number of classes above it; and one to spare
SMALL = tl.constexpr(0)  # S / G_k; a flat row has no other vector
ABOVE = tl.constexpr(1)  # E
WHOLE = tl.constexpr(2)  # G / G_k
FACTORS = tl.constexpr(3)  # in float32: G / G_k from k - 1 down, as long again from k + 1 up
CHANGES = tl.constexpr(4)  # their changes along the upstream gradient
VECTORS = tl.constexpr(5)


@triton.jit
def _join_counts(a0, a1, a2, a3, a4, b0, b1, b2, b3, b4):
    return a0 + b0, a1 + b1, a2 + b2, tl.maximum(a3, b3), tl.minimum(a4, b4)


@triton.jit
def _join(live, full, bad, high, low):
    """Three sums, a maximum and a minimum over the first dimension."""
    if COMPILED:
        return tl.reduce((live, full, bad, high, low), 0, _join_counts)
    else:
        return tl.sum(live, 0), tl.sum(full, 0), tl.sum(bad, 0), tl.max(high, 0), tl.min(low, 0)


@triton.jit
def _counts(
    held, x_ptr, d_ptr, row, n, width, label, sound,
    TARGET: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """How many scores are finite, +inf and nan, and the largest and the smallest of the finite ones.

    Where the row is known to be `sound`, it has no nan and no +inf.
    """
    live = tl.zeros((WIDE,), tl.float32)
    full = tl.zeros((WIDE,), tl.float32)
    bad = tl.zeros((WIDE,), tl.float32)
    high = tl.full((WIDE,), float("-inf"), tl.float32)
    low = tl.full((WIDE,), float("inf"), tl.float32)
    end = end_of(n, BLOCK, ONE)
    for j in range(0, tl.where(sound, end, 0), BLOCK):
        x = _scores(held, x_ptr, d_ptr, row, n, width, label, tile(j, WIDE, BLOCK), TARGET, ONE)
        finite = x > float("-inf")
        live += tl.sum(finite.to(tl.float32), 0)
        high = tl.maximum(high, tl.max(x, 0))
        low = tl.minimum(low, tl.min(tl.where(finite, x, float("inf")), 0))
    for j in range(0, tl.where(sound, 0, end), BLOCK):
        x = _scores(held, x_ptr, d_ptr, row, n, width, label, tile(j, WIDE, BLOCK), TARGET, ONE)
        finite = is_finite(x)
        a, b, c, d, e = _join(
            finite.to(tl.float32),
            (x == float("inf")).to(tl.float32),
            (x != x).to(tl.float32),
            tl.where(finite, x, float("-inf")),
            tl.where(finite, x, float("inf")),
        )
        live += a
        full += b
        bad += c
        high = tl.maximum(high, d)
        low = tl.minimum(low, e)
    return _join(live, full, bad, high, low)


@triton.jit
def _scores(held, x_ptr, d_ptr, row, n, width, label, cols, TARGET: tl.constexpr, ONE: tl.constexpr):
    """The scores of classes; -inf for the label, and where labels are unknown. With ONE tile per row it is held."""
    if ONE:
        return held
    else:
        return _load_scores(x_ptr, d_ptr, row, n, width, label, cols, TARGET)


@triton.jit
def _load_scores(x_ptr, d_ptr, row, n, width, label, cols, TARGET: tl.constexpr):
    x = load_scores(x_ptr, row, n, cols)
    if TARGET != "none":
        x = tl.where(cols == label, float("-inf"), x)
        if TARGET == "dense":
            x = tl.where(load_shares(d_ptr, row, n, width, cols, TARGET) >= 0, x, float("-inf"))
    return x


@triton.jit
def _point(x, pivot, over, TARGET: tl.constexpr):
    """Scores of the polynomials: less a pivot and over k tau where there are labels; -inf where they are infinite."""
    if TARGET != "none":
        x = tl.where(is_finite(x), scaled(x - pivot, over), x)
    return tl.where(is_finite(x), x, float("-inf"))


@triton.jit
def _tilt(
    held, x_ptr, d_ptr, row, n, width, label, pivot, over, k, live, n_top, n_bad, top, bottom, sound, near, p1, p2,
    TARGET: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """Return (center, delta) of a row at which the probabilities of finite scores sum to about k.

    What is computed from them does not depend on them, but its digits do. Delta is infinite where k is used up or
    takes every class that is left, and nan where k is infeasible. In a `sound` row p1 and p2 are known to be the sums
    of exp(x - near) and its square.
    """
    k = k - n_top
    ended = tl.where(k == 0, float("-inf"), tl.where(k == live, float("inf"), float("nan")))
    ended = tl.where(n_bad > 0, float("nan"), ended)
    # No branch around the loops: Triton visits what is in one twice.
    solvable = (k > 0) & (k < live) & (n_bad == 0)
    delta = tl.full((), 0.0, tl.float32)
    even = (log2(k) - log2(live - k)) * LN2
    lo = even - top
    hi = even - bottom
    # The probabilities are e / (1 + e) of exponentials; for 1 + e the mean is taken that these have as weights.
    total = tl.zeros((WIDE,), tl.float32)
    square = tl.zeros((WIDE,), tl.float32)
    for j in range(0, tl.where(sound, 0, end_of(n, BLOCK, ONE)), BLOCK):
        x = _scores(held, x_ptr, d_ptr, row, n, width, label, tile(j, WIDE, BLOCK), TARGET, ONE)
        w = exp2((_point(x, pivot, over, TARGET) - top) * LOG2E)
        a, b = sum2(w, w * w, 0)
        total += a
        square += b
    mass, squares = sum2(total, square, 0)
    ratio = exp2((near - top) * LOG2E)
    mass = tl.where(sound, p1 * ratio, mass)
    squares = tl.where(sound, p2 * ratio * ratio, squares)
    lost = tl.minimum(k * squares / mass, 0.75 * mass)
    sparse = (log2(k) - log2(mass - lost)) * LN2 - top
    good = (sparse >= lo) & (hi - lo < float("inf"))
    nu = tl.where(good, sparse, lo / 2 + hi / 2)
    lo = lo - nu
    hi = hi - nu
    # Subsets of k classes have digits while the sum is between k - 1 and k + 1. With labels k is half way between two
    # sizes: where the sum is beyond one of them, all subsets of the other may have underflowed.
    slack = tl.minimum(k, 2.0) * 0.5 if TARGET == "none" else tl.full((), 0.4, tl.float32)
    # The sum is at least k, and less than that of the exponentials. Else as many halvings as the largest interval
    # needs; one or two steps are the rule, of which the first are Newton's.
    left = tl.where(solvable & ~(good & (k * lost < slack * (mass - lost))), 152, 0)
    while left > 0:
        total = tl.zeros((WIDE,), tl.float32)
        square = tl.zeros((WIDE,), tl.float32)
        for j in range(0, end_of(n, BLOCK, ONE), BLOCK):
            x = _scores(held, x_ptr, d_ptr, row, n, width, label, tile(j, WIDE, BLOCK), TARGET, ONE)
            y = rcp(1 + exp2(((_point(x, pivot, over, TARGET) + nu) + delta) * -LOG2E))
            a, b = sum2(y, y * y, 0)
            total += a
            square += b
        mass, squares = sum2(total, square, 0)
        lo = tl.where(mass < k, 0.0, lo)
        hi = tl.where(mass > k, 0.0, hi)
        step = mass / (mass - squares) * ((log2(k) - log2(mass)) * LN2)  # exact in the tail of the sigmoid
        step = tl.where((step > lo) & (step < hi) & (left % 3 != 0), step, lo / 2 + hi / 2)
        close = (tl.abs(mass - k) < slack) | (lo >= hi)
        step = tl.where(close, 0.0, step)
        moved = nu + (delta + step)
        delta = (delta + step) - (moved - nu)
        nu = moved
        lo = lo - step
        hi = hi - step
        left = tl.where(close, 0, left - 1)
    return tl.where(solvable, -nu, 0.0), tl.where(solvable, delta, ended)


@triton.jit
def _over_k(x, pivot, over, rest):
    """Scores less the pivot, times over + rest, which is 1 / (k tau): as `_point` rounds them, and what that has lost.

    Where rounding has moved them far, it has lost nothing.
    """
    d = x - pivot
    back = d - x
    lost = (x - (d - back)) - (pivot + back)  # d + lost is x - pivot
    value = scaled(d, over)
    low = tl.fma(d, over, -value) + (d * rest + lost * over)
    return value, tl.where(tl.abs(low) < 0.01, low, 0.0)


@triton.jit
def _first_label(
    d_ptr, row, n, width, TARGET: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, ONE: tl.constexpr
):  # fmt: skip
    """The first label of a row; n where there is none."""
    if TARGET == "dense":
        first = tl.zeros((WIDE,), tl.int32) + n
        for j in range(0, end_of(n, BLOCK, ONE), BLOCK):
            cols = tile(j, WIDE, BLOCK)
            share = load_shares(d_ptr, row, n, width, cols, TARGET)
            first = tl.minimum(first, tl.min(tl.where(share > 0, cols, n), 0))
        return tl.min(first, 0)
    else:
        first = tl.full((), 0, tl.int32) + n
        for i in range(width):
            label = tl.load(d_ptr + row * width + i).to(tl.int32)
            first = tl.where((label >= 0) & (label < first), label, first)
        return first


@triton.jit
def _distances(
    held, x_ptr, d_ptr, row, n, width, center, delta, label, pivot, over, rest, cols, TARGET: tl.constexpr,
    ONE: tl.constexpr,
):  # fmt: skip
    """exp(-|x + nu|) of classes, which of them are above the threshold, and which scores are finite.

    Every pass has the same numbers, and rounding does what a change of the scores in their last digit would do.
    """
    x = _scores(held, x_ptr, d_ptr, row, n, width, label, cols, TARGET, ONE)
    delta = tl.maximum(tl.minimum(delta, 3e38), -3e38)  # an infinite score keeps its sign against it
    if TARGET == "none":
        z = (x - center) + delta
    else:
        value, low = _over_k(x, pivot, over, rest)
        z = ((value - center) + delta) + low
        z = tl.where(tl.abs(x) == float("inf"), x, z)
    t = tl.maximum(-tl.abs(z), -200.0)
    whole = t * LOG2E
    low = tl.fma(t, LOG2E, -whole) + t * LOG2E_LOW
    e = exp2(whole)
    return e + e * (low * LN2), z > 0, is_finite(x)


@triton.jit
def _powers(m, e, factor):
    """Five powers of e times a factor, from e^m on."""
    square = e * e
    t0 = e * factor
    if m > 1:
        for _ in range(1, m, 5):
            t0 = t0 * (square * square * e)
    t1 = t0 * e
    t2 = t0 * square
    return t0, t1, t2, t1 * square, t2 * square


@triton.jit
def _five(place, m, a, b, c, d, e):
    """A vector with five numbers from place m on, elsewhere 0."""
    at = place - m
    later = tl.where(at == 2, c, tl.where(at == 3, d, tl.where(at == 4, e, 0.0)))
    return tl.where(at == 0, a, tl.where(at == 1, b, later))


@triton.jit
def _power_sums(
    held, x_ptr, d_ptr, u_ptr, row, n, width, u_row, u_col, center, delta, label, pivot, over, rest, place, m,
    some,
    TARGET: tl.constexpr, UPSTREAM: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """Five power sums of a row from e^m on as vectors, below and above the threshold; and how many are above it.

    Where `some` is false, there are none of these: the rule, which takes half of the time.
    """
    a0 = tl.zeros((WIDE,), tl.float64)
    a1 = a0
    a2 = a0
    a3 = a0
    a4 = a0
    b0 = a0
    b1 = a0
    b2 = a0
    b3 = a0
    b4 = a0
    many = tl.zeros((WIDE,), tl.int32)
    for j in range(0, end_of(n, BLOCK, ONE), BLOCK):
        cols = tile(j, WIDE, BLOCK)
        e, above, finite = _distances(
            held, x_ptr, d_ptr, row, n, width, center, delta, label, pivot, over, rest, cols, TARGET, ONE
        )
        factor = tl.full((), 1.0, tl.float64)
        if UPSTREAM:
            factor = tl.where(finite, load_upstream(u_ptr, row, u_row, u_col, n, cols), 0.0).to(tl.float64)
        t0, t1, t2, t3, t4 = _powers(m, e.to(tl.float64), factor)
        c0, c1, c2, c3, c4 = sum5(t0, t1, t2, t3, t4, 0)
        a0 += c0
        a1 += c1
        a2 += c2
        a3 += c3
        a4 += c4
        if some:
            zero = tl.zeros_like(t0)
            c0, c1, c2, c3, c4 = sum5(
                tl.where(above, t0, zero), tl.where(above, t1, zero), tl.where(above, t2, zero),
                tl.where(above, t3, zero), tl.where(above, t4, zero), 0,
            )  # fmt: skip
            b0 += c0
            b1 += c1
            b2 += c2
            b3 += c3
            b4 += c4
            many += tl.sum(above.to(tl.int32), 0)
    low = _five(place, m, *sum5(a0, a1, a2, a3, a4, 0))
    high = tl.zeros_like(low)
    count = tl.full((), 0, tl.int32)
    if some:
        high = _five(place, m, *sum5(b0, b1, b2, b3, b4, 0))
        count = tl.sum(many, 0)
        low -= high
    return low, high, count


@triton.jit
def _pick(value, at, DEGREES: tl.constexpr):
    """The numbers of a vector at some places, 0 where there are none."""
    inside = (at >= 0) & (at < DEGREES)
    return tl.where(inside, tl.gather(value, tl.where(inside, at, 0), 0), 0.0)


@triton.jit
def _signed(place, value):
    """Value where the place is odd, less it where that is even."""
    return tl.where(place % 2 == 1, value, -value)


@triton.jit
def _same(value, at):
    """The number of a vector at one place, in all places."""
    return tl.gather(value, tl.zeros_like(value).to(tl.int32) + at, 0)


@triton.jit
def _expand(low, high, place, k, many, DEGREES: tl.constexpr):
    """Polynomials of degrees k and `many` by Newton's identities from their power sums."""
    over = inverse_of(tl.maximum(place, 1).to(tl.float64))
    low_sums = _signed(place, low)
    high_sums = _signed(place, high)
    low = low_sums
    high = high_sums
    for j in range(1, tl.maximum(k, many) + 1):
        a = _same(low * over, j)
        b = _same(high * over, j)
        low = tl.where(place == j, a, low + a * _pick(low_sums, place - j, DEGREES))
        high = tl.where(place == j, b, high + b * _pick(high_sums, place - j, DEGREES))
    low = tl.where(place == 0, 1.0, tl.where(place <= k, low, 0.0))
    return low, tl.where(place == 0, 1.0, tl.where(place <= many, high, 0.0))


@triton.jit
def _change(low_sums, high_sums, low, high, place, k, many, DEGREES: tl.constexpr):
    """The changes of the polynomials of `_expand`, from power sums with the changes of the logarithms as weights."""
    low_change = tl.zeros_like(low)
    high_change = tl.zeros_like(low)
    low_sums = _signed(place, low_sums)
    high_sums = _signed(place, high_sums)
    for j in range(1, tl.maximum(k, many) + 1):
        low_change += _same(low_sums, j) * _pick(low, place - j, DEGREES)
        high_change += _same(high_sums, j) * _pick(high, place - j, DEGREES)
    return low_change, tl.where(place <= many, high_change, 0.0)


@triton.jit
def _joined(low, high, place, many, last, DEGREES: tl.constexpr):
    """The sum over a <= last of S_a E_(many - place + a)."""
    value = tl.zeros_like(low)
    for j in range(0, many + 1):  # a is place - many + j
        value += _same(high, j) * _pick(low, tl.where(place - many + j <= last, place - many + j, -1), DEGREES)
    return value


@triton.jit
def _at(value, place, k):
    """The number of degree k."""
    return tl.sum(tl.where(place == k, value, 0.0), 0)


# number0: k; with labels number1: tau, number2: alpha. Then all classes of a row but its first label are taken, for
# k - 1/2 of them: half way between the two sizes of subsets that the loss needs. extra: the table. FLAT: whether
# k is small enough for flat rows.
@triton.jit(do_not_specialize=["rows", "n", "width", "f_row", "e_row", "p_row"])
def marginals(
    x_ptr, d_ptr, e_ptr, p_ptr, f_ptr, s_ptr, loss_ptr, out_ptr, counts_ptr, extra_ptr, rows, n, width,
    e_row, e_col, p_row, p_col, f_row, number0, number1, number2, number3, scale,
    TARGET: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
    WIDE: tl.constexpr, ONE: tl.constexpr, FLAT: tl.constexpr, DEGREES: tl.constexpr,
):  # fmt: skip
    """The probability of each class in subsets of k; with labels the smooth top-k SVM loss and its gradient."""
    row = tl.program_id(0).to(tl.int64)
    k = number_of(number0).to(tl.int32)
    label = tl.full((), -1, tl.int32)
    if TARGET != "none":
        label = _first_label(d_ptr, row, n, width, TARGET, WIDE, BLOCK, ONE)
    near = tl.full((), 0.0, tl.float32)
    held = near
    if ONE:
        held = _load_scores(x_ptr, d_ptr, row, n, width, label, tile(0, WIDE, BLOCK), TARGET)
    flat = False
    sound = False
    p1 = near
    p2 = near
    if FLAT:
        here = extra_ptr + row * (HEAD + VECTORS * DEGREES)
        flat, sound, near, p1, p2 = flat_marginals(
            held, x_ptr, out_ptr, here, here + (HEAD + SMALL * DEGREES), row, n, k, WIDE, BLOCK, ONE
        )
    if not flat:
        _marginals(
            held, x_ptr, d_ptr, e_ptr, loss_ptr, out_ptr, counts_ptr, extra_ptr, row, n, width, label, e_row, e_col,
            number0, number1, number2, scale, sound, near, p1, p2, TARGET, GRADIENT, WIDE, BLOCK, ONE, DEGREES,
        )  # fmt: skip


@triton.jit
def _marginals(
    held, x_ptr, d_ptr, e_ptr, loss_ptr, out_ptr, counts_ptr, extra_ptr, row, n, width, label, e_row, e_col,
    number0, number1, number2, scale, sound, near, p1, p2,
    TARGET: tl.constexpr, GRADIENT: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, ONE: tl.constexpr,
    DEGREES: tl.constexpr,
):  # fmt: skip
    """Take any row."""
    size = number_of(number0)
    k = size.to(tl.int32)
    pivot = tl.full((), 0.0, tl.float32)
    live, n_top, n_bad, top, bottom = _counts(held, x_ptr, d_ptr, row, n, width, label, sound, TARGET, WIDE, BLOCK, ONE)
    over = 1.0 / (size * number1)
    rest = (1.0 / (size.to(tl.float64) * number1) - over).to(tl.float32)
    if TARGET != "none":
        size = size - 0.5
        pivot = tl.where(is_finite(top), top, 0.0)
        top = scaled(top - pivot, over)
        bottom = scaled(bottom - pivot, over)
    center, delta = _tilt(
        held, x_ptr, d_ptr, row, n, width, label, pivot, over, size, live, n_top, n_bad, top, bottom, sound, near, p1,
        p2, TARGET, WIDE, BLOCK, ONE,
    )  # fmt: skip

    place = tl.arange(0, DEGREES)
    here = extra_ptr + row * (HEAD + VECTORS * DEGREES)
    vectors = here + HEAD
    low = tl.zeros((DEGREES,), tl.float64)
    high = tl.zeros((DEGREES,), tl.float64)
    some = (n_top > 0) | ((top - center) + delta > 0)
    m = 1
    many = tl.full((), 0, tl.int32)
    most = k
    while m <= most:
        a, b, many = _power_sums(
            held, x_ptr, d_ptr, e_ptr, row, n, width, 0, 0, center, delta, label, pivot, over, rest, place, m,
            some, TARGET, False, WIDE, BLOCK, ONE,
        )  # fmt: skip
        low += a
        high += b
        many = tl.minimum(many, k * 2 + 2)
        most = tl.maximum(many, k)
        m += 5
    low, high = _expand(low, high, place, k, many, DEGREES)
    value = _joined(low, high, place, many, k, DEGREES)
    whole = _same(value, k)
    inverse = inverse_of(whole)
    value = value * inverse
    slope = tl.full((), 0.0, tl.float64)
    score = pivot
    if TARGET == "none":
        tl.store(here, center.to(tl.float64))
        tl.store(here + 1, delta.to(tl.float64))
        tl.store(here + 2, many.to(tl.float64))
        tl.store(vectors + SMALL * DEGREES + place, low * inverse)
        tl.store(vectors + ABOVE * DEGREES + place, high)
        tl.store(vectors + WHOLE * DEGREES + place, value)
    else:
        # The marginals in subsets of k classes less those in subsets of k - 1.
        fewer = _joined(low, high, place - 1, many, k - 1, DEGREES)
        inverse = inverse_of(_same(fewer, k))
        value -= fewer * inverse
        labelled = label < n
        score = tl.load(x_ptr + (row * n + label), mask=labelled, other=0.0).to(tl.float32)
        weight = tl.full((), 1.0, tl.float32)
        if e_ptr is not None:
            weight = tl.load(e_ptr + (row * e_row + label * e_col), mask=labelled, other=0).to(tl.float32)
        # Next to a label at +inf there are no others.
        active = labelled & (live + n_top + n_bad >= k) & (score != float("inf"))
        ratio = _at(whole * inverse, place, k)
        loss, slope = _svm_loss(
            ratio, center, delta, score, tl.where(active, weight, 0.0), pivot, over, rest, number0, number1, number2
        )
        loss = tl.where(active, loss, 0.0)
        slope = tl.where(active, slope, 0.0)
        tl.store(loss_ptr + row, loss.to(tl.float32))
        tl.store(counts_ptr + row, labelled.to(tl.int8))
    if GRADIENT:
        table = _floats(vectors + FACTORS * DEGREES)
        below, beyond = _factors(table, value, place, k, DEGREES, ONE)
        for j in range(0, end_of(n, BLOCK, ONE), BLOCK):
            at = tile(j, WIDE, BLOCK)
            e, above, finite = _distances(
                held, x_ptr, d_ptr, row, n, width, center, delta, label, pivot, over, rest, at, TARGET, ONE
            )
            y = _horner(table, below, place, e, k, ONE)
            if many > 0:
                other = _horner(table + DEGREES, beyond, place, e, many, ONE)
                y = tl.where(above, 1 - other if TARGET == "none" else -other, y)
            if TARGET == "none":
                y = tl.where(y < 0, 0.0, tl.where(y > 1, 1.0, y))
                y = tl.where(delta == delta, y, float("nan"))
            else:
                fall = scale * slope.to(tl.float32)
                y = tl.where(finite, fall * y, 0.0)
                y = tl.where(at == label, tl.where(tl.abs(score) < float("inf"), -fall, 0.0), y)
                y = tl.where(fall == 0, 0.0, y)
            store_row(out_ptr, row, n, at, y)


@triton.jit
def _floats(ptr):
    return ptr.to(tl.pointer_type(tl.float32), bitcast=True)


@triton.jit
def _factors(table, value, place, k, DEGREES: tl.constexpr, ONE: tl.constexpr):
    """The numbers of a vector below degree k, from the largest down, and those above it, in float32.

    Where a row has several tiles, they are written for all threads: to pass them on takes longer than to read them.
    """
    below = _pick(value, (k - 1) - place, DEGREES).to(tl.float32)
    beyond = _pick(value, (k + 1) + place, DEGREES).to(tl.float32)
    if not ONE:
        tl.store(table + place, below)
        tl.store(table + (DEGREES + place), beyond)
        tl.debug_barrier()
    return below, beyond


@triton.jit
def _next_five(table, vector, place, m, ONE: tl.constexpr):
    """Five factors from place m on, as numbers."""
    if ONE:
        at = place - m
        return sum5(
            tl.where(at == 0, vector, 0.0), tl.where(at == 1, vector, 0.0), tl.where(at == 2, vector, 0.0),
            tl.where(at == 3, vector, 0.0), tl.where(at == 4, vector, 0.0), 0,
        )  # fmt: skip
    else:
        here = table + m
        return tl.load(here), tl.load(here + 1), tl.load(here + 2), tl.load(here + 3), tl.load(here + 4)


@triton.jit
def _horner(table, vector, place, e, count, ONE: tl.constexpr):
    """The product of e and the alternating polynomial of e that has so many factors; after them there are zeros."""
    y = tl.zeros_like(e)
    m = (count - 1) // 5 * 5
    while m >= 0:
        a, b, c, d, f = _next_five(table, vector, place, m, ONE)
        y = d - (f - y * e) * e
        y = a - (b - (c - y * e) * e) * e
        m -= 5
    return y * e


@triton.jit
def _svm_loss(ratio, center, delta, score, weight, pivot, over, rest, number0, number1, number2):
    """The loss tau softplus(alpha / tau + log e_k - log e_(k-1) - x_y / (k tau)), and its slope by x_y / k."""
    k = number_of(number0).to(tl.float64)
    tau = number_of(number1).to(tl.float64)
    near = ratio.to(tl.float32)
    log = tl.log(near).to(tl.float64) + (ratio - near) / near  # what rounding has lost is small
    value, low = _over_k(score, pivot, over, rest)
    z = (log - delta) + ((center.to(tl.float64) - value) - low)
    z += number_of(number2).to(tl.float64) / tau
    soft, _, p, _ = logistics(z.to(tl.float32))
    return weight * tau * soft, weight * p / k


# each: the upstream gradient. first: the table. FLAT: as above.
@triton.jit(do_not_specialize=["rows", "n", "width", "f_row", "e_row", "e_col", "p_row", "p_col"])
def marginals_backward(
    x_ptr, d_ptr, e_ptr, p_ptr, f_ptr, s_ptr, loss_ptr, out_ptr, counts_ptr, extra_ptr, rows, n, width,
    e_row, e_col, p_row, p_col, f_row, number0, number1, number2, number3, scale,
    TARGET: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
    WIDE: tl.constexpr, ONE: tl.constexpr, FLAT: tl.constexpr, DEGREES: tl.constexpr,
):  # fmt: skip
    """The derivative of the probabilities along the upstream gradient: their matrix of derivatives is symmetric."""
    row = tl.program_id(0).to(tl.int64)
    k = number_of(number0).to(tl.int32)
    here = f_ptr + row * (HEAD + VECTORS * DEGREES)
    small = here + (HEAD + SMALL * DEGREES)
    center = tl.load(here).to(tl.float32)
    delta = tl.load(here + 1).to(tl.float32)
    many = tl.load(here + 2).to(tl.int32)
    # What a flat row needs is read before it is known to be one, unless that is more than others need.
    g0 = tl.load(small)
    g1 = tl.load(small + 1)
    g2 = tl.load(small + 2)
    g3 = tl.load(small + 3)
    g4 = tl.load(small + 4)
    held = center
    if ONE:
        held = _load_scores(x_ptr, d_ptr, row, n, width, 0, tile(0, WIDE, BLOCK), TARGET)
    rises = held
    if ONE and FLAT:
        rises = load_upstream(e_ptr, row, e_row, e_col, n, tile(0, WIDE, BLOCK))
    flat = False
    if FLAT:
        flat = many == FLAT_ROW
        if flat:
            flat_change(
                held, rises, x_ptr, e_ptr, out_ptr, row, n, e_row, e_col, k, center, g0, g1, g2, g3, g4,
                WIDE, BLOCK, ONE,
            )  # fmt: skip
    if not flat:
        _marginals_backward(
            held, x_ptr, d_ptr, e_ptr, out_ptr, row, n, width, e_row, e_col, k, here, center, delta, many,
            TARGET, WIDE, BLOCK, ONE, DEGREES,
        )  # fmt: skip


@triton.jit
def _marginals_backward(
    held, x_ptr, d_ptr, e_ptr, out_ptr, row, n, width, e_row, e_col, k, here, center, delta, many,
    TARGET: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, ONE: tl.constexpr, DEGREES: tl.constexpr,
):  # fmt: skip
    """Take a row that is not flat."""
    vectors = here + HEAD
    place = tl.arange(0, DEGREES)
    low = tl.load(vectors + SMALL * DEGREES + place)
    high = tl.load(vectors + ABOVE * DEGREES + place)
    old = tl.load(vectors + WHOLE * DEGREES + place)
    low_sums = tl.zeros((DEGREES,), tl.float64)
    high_sums = tl.zeros((DEGREES,), tl.float64)
    for m in range(1, tl.maximum(many, k) + 1, 5):
        a, b, _ = _power_sums(
            held, x_ptr, d_ptr, e_ptr, row, n, width, e_row, e_col, center, delta, 0, 0.0, 1.0, 1.0, place, m,
            many > 0, TARGET, True, WIDE, BLOCK, ONE,
        )  # fmt: skip
        low_sums += a
        high_sums -= b  # a score that grows makes e larger below the threshold, and smaller above it
    low_change, high_change = _change(low_sums, high_sums, low, high, place, k, many, DEGREES)
    value = _joined(low_change, high, place, many, k, DEGREES) + _joined(low, high_change, place, many, k, DEGREES)
    # The factors are divided by the one of degree k, which changes too.
    value -= old * _same(value, k)
    table = _floats(vectors + FACTORS * DEGREES)
    changes = _floats(vectors + CHANGES * DEGREES)
    below, beyond = _factors(table, old, place, k, DEGREES, ONE)
    rise, fall = _factors(changes, value, place, k, DEGREES, ONE)
    for j in range(0, end_of(n, BLOCK, ONE), BLOCK):
        at = tile(j, WIDE, BLOCK)
        e, above, finite = _distances(
            held, x_ptr, d_ptr, row, n, width, center, delta, 0, 0.0, 1.0, 1.0, at, TARGET, ONE
        )
        u = tl.where(finite, load_upstream(e_ptr, row, e_row, e_col, n, at), 0.0)
        y = _horner_change(table, below, changes, rise, place, e, u * e, k, ONE)
        if many > 0:
            other = _horner_change(table + DEGREES, beyond, changes + DEGREES, fall, place, e, -u * e, many, ONE)
            y = tl.where(above, -other, y)
        y = tl.where(finite, tl.where(delta == delta, y, float("nan")), 0.0)
        store_row(out_ptr, row, n, at, y)


@triton.jit
def _horner_change(table, vector, changes, change, place, e, rise, count, ONE: tl.constexpr):
    """The change of `_horner`, from those of e and of the factors."""
    y = tl.zeros_like(e)
    dy = tl.zeros_like(e)
    m = (count - 1) // 5 * 5
    while m >= 0:
        a0, a1, a2, a3, a4 = _next_five(table, vector, place, m, ONE)
        b0, b1, b2, b3, b4 = _next_five(changes, change, place, m, ONE)
        dy = (b4 - rise * y) - dy * e
        y = a4 - y * e
        dy = (b3 - rise * y) - dy * e
        y = a3 - y * e
        dy = (b2 - rise * y) - dy * e
        y = a2 - y * e
        dy = (b1 - rise * y) - dy * e
        y = a1 - y * e
        dy = (b0 - rise * y) - dy * e
        y = a0 - y * e
        m -= 5
    return rise * y + dy * e
