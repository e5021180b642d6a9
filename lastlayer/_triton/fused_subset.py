"""Kernels of `fused` for polynomials over subsets of `k` classes: their marginals, and the smooth top-k SVM loss.

About a threshold nu at which the probabilities of the classes sum to about k, let e = exp(-|x + nu|) for each class.
The weights of the subsets by their size are the coefficients of a product: of 1 + e z for a class below the threshold,
which is small, and of z + e for one above it, of which there are at most 2 k. Newton's identities give the polynomial
of the first from their power sums; the others are listed, and multiplied one by one. With S of the small classes up to
degree k and E of the others, all of it in float64,

    G_j = sum over a <= k of S_a E_(L - j + a)        for L classes above the threshold,

is the weight of j classes for j <= k. The rest of the G_j are what the division by z + e needs. A class below the
threshold has the marginal v = e (G_(k-1) - e G_(k-2) + e^2 G_(k-3) - ...) / G_k, and one above it 1 - v with
v = e (G_(k+1) - e G_(k+2) + ...) / G_k. No step takes more than k numbers per class.

A row is taken by one program, both ways. Polynomials are vectors that every warp holds, so that a step from one degree
to the next waits for no other warp. What one thread leaves to others, or a forward to a backward pass, is in a table:
for each row the numbers of `HEAD`, then the vectors `SMALL` to `CHANGE`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import triton
import triton.language as tl

from lastlayer._triton.device import COMPILED, LOG2E, exp, exp2, is_finite, rcp, scaled, sum2, sum5
from lastlayer._triton.fused_lml import number_of
from lastlayer._triton.fused_rows import load_scores, load_shares, load_weight, logistics, store_row

HEAD = tl.constexpr(4)  # center and delta, whose difference is nu; the number of classes above it; and one to spare
SMALL = tl.constexpr(0)  # S / G_k
ABOVE = tl.constexpr(1)  # e of the classes above the threshold
WHOLE = tl.constexpr(2)  # G / G_k
RISE = tl.constexpr(3)  # the changes of ABOVE along the upstream gradient
CHANGE = tl.constexpr(4)  # those of WHOLE
VECTORS = tl.constexpr(5)


@triton.jit
def _join_counts(a0, a1, a2, a3, a4, b0, b1, b2, b3, b4):
    return a0 + b0, a1 + b1, a2 + b2, tl.maximum(a3, b3), tl.minimum(a4, b4)


@triton.jit
def _counts(x, finite):
    """How many scores are finite, +inf and nan, and the largest and the smallest of the finite ones."""
    live = finite.to(tl.float32)
    full = (x == float("inf")).to(tl.float32)
    bad = (x != x).to(tl.float32)
    high = tl.where(finite, x, float("-inf"))
    low = tl.where(finite, x, float("inf"))
    if COMPILED:
        return tl.reduce((live, full, bad, high, low), 0, _join_counts)
    else:
        return tl.sum(live, 0), tl.sum(full, 0), tl.sum(bad, 0), tl.max(high, 0), tl.min(low, 0)


@triton.jit
def _tilt(x, k):
    """Return (center, delta) of a row in registers at which the probabilities of finite scores sum to about k.

    What is computed from them does not depend on them, but its digits do. Delta is infinite where k is used up or
    takes every class that is left, and nan where k is infeasible.
    """
    finite = is_finite(x)
    n, n_top, n_bad, top, bottom = _counts(x, finite)
    k = k - n_top
    nu = tl.full((), 0.0, tl.float32)
    delta = tl.where(k == 0, float("-inf"), tl.where(k == n, float("inf"), float("nan")))
    delta = tl.where(n_bad > 0, float("nan"), delta)
    if (k > 0) & (k < n) & (n_bad == 0):
        delta = tl.full((), 0.0, tl.float32)
        x = tl.where(finite, x, float("-inf"))
        even = tl.log(k) - tl.log(n - k)
        lo = even - top
        hi = even - bottom
        # Where every probability is small, it is an exponential.
        sparse = (tl.log(k) - tl.log(tl.sum(exp2((x - top) * LOG2E), 0))) - top
        nu = tl.where((sparse >= lo) & (hi - lo < float("inf")), sparse, lo / 2 + hi / 2)
        lo = lo - nu
        hi = hi - nu
        left = 152  # halvings of the largest interval; one or two steps are the rule, of which the first are Newton's
        while left > 0:
            y = rcp(1 + exp2(((x + nu) + delta) * -LOG2E))
            total, mass = sum2(y, y * (1 - y), 0)
            lo = tl.where(total < k, 0.0, lo)
            hi = tl.where(total > k, 0.0, hi)
            step = total / mass * (tl.log(k) - tl.log(total))  # exact in the tail of the sigmoid
            step = tl.where((step > lo) & (step < hi) & (left % 3 != 0), step, lo / 2 + hi / 2)
            close = (tl.abs(total - k) < tl.minimum(k, 2.0) / 8) | (lo >= hi)
            step = tl.where(close, 0.0, step)
            moved = nu + (delta + step)
            delta = (delta + step) - (moved - nu)
            nu = moved
            lo = lo - step
            hi = hi - step
            left = tl.where(close, 0, left - 1)
    return -nu, delta


@triton.jit
def _over_k(x, pivot, number0, number1):
    """Scores less the pivot over k tau in float64; as `_own` has rounded them where that has moved them far."""
    k = number_of(number0)
    value = (x.to(tl.float64) - pivot) * (1.0 / (k.to(tl.float64) * number1))
    rounded = scaled(x - pivot.to(tl.float32), 1.0 / (k * number1)).to(tl.float64)
    return tl.where(tl.abs(value - rounded) < 0.01, value, rounded)


@triton.jit
def _add_add_add_most(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, tl.maximum(a3, b3)


@triton.jit
def _own(x, share, weight, cols, BLOCK: tl.constexpr):
    """The first label of a row (BLOCK: none), its score and weight, the others, their number, and the largest score."""
    label = tl.min(tl.where(share > 0, cols, BLOCK), 0)
    own = cols == label
    rest = tl.where(own | (share < 0), float("-inf"), x)
    score = tl.where(own, x, 0.0)
    weight = tl.where(own, weight, 0.0)
    others = (rest != float("-inf")).to(tl.float32)
    pivot = tl.where(is_finite(rest), rest, float("-inf"))
    if COMPILED:
        score, weight, others, pivot = tl.reduce((score, weight, others, pivot), 0, _add_add_add_most)
    else:
        score, weight, others, pivot = tl.sum(score, 0), tl.sum(weight, 0), tl.sum(others, 0), tl.max(pivot, 0)
    return label, score, weight, rest, others, tl.where(is_finite(pivot), pivot, 0.0)


@triton.jit
def _distances(
    x_ptr, d_ptr, row, n, width, center, delta, label, pivot, number0, number1, cols, TARGET: tl.constexpr
):  # fmt: skip
    """exp(-|x + nu|) of classes in float64, which of them are above the threshold, and which scores are finite.

    Every pass has the same numbers, and rounding does what a change of the scores in their last digit would do.
    """
    x = load_scores(x_ptr, row, n, cols)
    if TARGET == "none":
        z = (x - center) + delta
    else:
        x = tl.where(cols == label, float("-inf"), x)
        if TARGET == "dense":
            x = tl.where(load_shares(d_ptr, row, n, width, cols, TARGET) >= 0, x, float("-inf"))
        z = ((_over_k(x, pivot.to(tl.float64), number0, number1) - center) + delta).to(tl.float32)
    z = tl.where(tl.abs(x) == float("inf"), x, z)
    return exp(-tl.abs(z)).to(tl.float64), z > 0, is_finite(x)


@triton.jit
def _add_powers(sums, place, e, term, k):
    """Add to a vector the sums of terms times powers of e, five at a time."""
    for m in range(1, k + 1, 5):
        second = term * e
        third = second * e
        fourth = third * e
        fifth = fourth * e
        a, b, c, d, f = sum5(term, second, third, fourth, fifth, 0)
        at = place - m
        later = tl.where(at == 2, c, tl.where(at == 3, d, tl.where(at == 4, f, 0.0)))
        sums += tl.where(at == 0, a, tl.where(at == 1, b, later))
        term = fifth * e
    return sums


@triton.jit
def _list(into_ptr, above, value, many, room):
    """Write the values of classes above the threshold one after another, after `many`; return how many there are."""
    count = above.to(tl.int32)
    at = many + tl.cumsum(count, 0) - 1
    tl.store(into_ptr + at, value, mask=above & (at < room))
    return many + tl.sum(count, 0)


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
def _expand(sums, listed, place, most, DEGREES: tl.constexpr):
    """The polynomials of the small classes, by Newton's identities from their power sums, and of the listed others."""
    over = 1.0 / tl.maximum(place, 1).to(tl.float64)
    sums = _signed(place, sums)
    low = sums
    high = tl.where(place == 0, 1.0, 0.0).to(tl.float64)
    for j in range(1, most + 1):
        a = tl.gather(low * over, place * 0 + j, 0)
        low = tl.where(place == j, a, low + a * _pick(sums, place - j, DEGREES))
        high += tl.gather(listed, place * 0 + (j - 1), 0) * _pick(high, place - 1, DEGREES)
    return tl.where(place == 0, 1.0, low), high


@triton.jit
def _change(sums, low, listed, rises, place, k, most, DEGREES: tl.constexpr):
    """The changes of the polynomials of `_expand`, from power sums with weights; between them the second of these."""
    value = tl.zeros_like(low)
    high = tl.where(place == 0, 1.0, 0.0).to(tl.float64)
    rise = tl.zeros_like(low)
    sums = _signed(place, sums)
    for j in range(1, most + 1):
        value += tl.gather(sums, place * 0 + j, 0) * _pick(low, place - j, DEGREES)
        e = tl.gather(listed, place * 0 + (j - 1), 0)
        before = _pick(high, place - 1, DEGREES)
        rise += e * _pick(rise, place - 1, DEGREES) + tl.gather(rises, place * 0 + (j - 1), 0) * before
        high += e * before
    return tl.where(place <= k, value, 0.0), high, rise


@triton.jit
def _joined(low, high, place, many, last, DEGREES: tl.constexpr):
    """The sum over a <= last of S_a E_(many - place + a)."""
    value = tl.zeros_like(low)
    for a in range(0, last + 1):
        value += tl.gather(low, place * 0 + a, 0) * _pick(high, many - place + a, DEGREES)
    return value


@triton.jit
def _at(value, place, k):
    """The number of degree k."""
    return tl.sum(tl.where(place == k, value, 0.0), 0)


# number0: k; with labels number1: tau, number2: alpha. Then all classes of a row but its first label are taken, for
# k - 1/2 of them: half way between the two sizes of subsets that the loss needs. extra: the table.
@triton.jit(do_not_specialize=["rows", "n", "width", "f_row", "e_row", "p_row"])
def marginals(
    x_ptr, d_ptr, e_ptr, p_ptr, f_ptr, s_ptr, loss_ptr, out_ptr, counts_ptr, extra_ptr, rows, n, width,
    e_row, e_col, p_row, p_col, f_row, number0, number1, number2, number3,
    TARGET: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, DEGREES: tl.constexpr,
):  # fmt: skip
    """The probability of each class in subsets of k; with labels the smooth top-k SVM loss and its gradient."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = load_scores(x_ptr, row, n, cols)
    size = number_of(number0)
    k = size.to(tl.int32)
    label = tl.full((), -1, tl.int32)
    pivot = tl.full((), 0.0, tl.float32)
    if TARGET != "none":
        share = load_shares(d_ptr, row, n, width, cols, TARGET)
        weight = load_weight(e_ptr, row, e_row, e_col, n, cols)
        label, score, weight, x, others, pivot = _own(x, share, weight, cols, BLOCK)
        x = scaled(x - pivot, 1.0 / (size * number1))
        size = size - 0.5
    center, delta = _tilt(x, size)

    place = tl.arange(0, DEGREES)
    here = extra_ptr + row * (HEAD + VECTORS * DEGREES)
    vectors = here + HEAD
    room = k * 2 + 1  # for classes above the threshold
    sums = tl.zeros((DEGREES,), tl.float64)
    many = tl.full((), 0, tl.int32)
    if BLOCK > CHUNK:
        for j in range(0, n, CHUNK):
            at = j + tl.arange(0, CHUNK)
            e, above, _ = _distances(
                x_ptr, d_ptr, row, n, width, center, delta, label, pivot, number0, number1, at, TARGET
            )
            sums = _add_powers(sums, place, e, tl.where(above, 0.0, e), k)
            many = _list(vectors + ABOVE * DEGREES, above, e, many, room)
    else:
        e, above, finite = _distances(
            x_ptr, d_ptr, row, n, width, center, delta, label, pivot, number0, number1, cols, TARGET
        )
        sums = _add_powers(sums, place, e, tl.where(above, 0.0, e), k)
        many = _list(vectors + ABOVE * DEGREES, above, e, many, room)
    many = tl.minimum(many, room)
    most = tl.maximum(many, k)
    tl.debug_barrier()  # other threads have written
    listed = tl.load(vectors + ABOVE * DEGREES + place, mask=place < many, other=0.0)
    low, high = _expand(sums, listed, place, most, DEGREES)
    value = _joined(low, high, place, many, k, DEGREES)
    whole = _at(value, place, k)
    over = 1.0 / whole
    value = value * over
    slope = tl.full((), 0.0, tl.float64)
    if TARGET == "none":
        tl.store(here, center.to(tl.float64))
        tl.store(here + 1, delta.to(tl.float64))
        tl.store(here + 2, many.to(tl.float64))
        tl.store(vectors + SMALL * DEGREES + place, low * over, mask=place <= k)
        score = pivot
    else:
        # The marginals in subsets of k classes less those in subsets of k - 1.
        fewer = _joined(low, high, place - 1, many, k - 1, DEGREES)
        over = 1.0 / _at(fewer, place, k)
        value -= fewer * over
        labelled = label < BLOCK
        active = labelled & (others >= k) & (score != float("inf"))  # next to which there are no others
        loss, slope = _svm_loss(
            whole * over, center, delta, score, tl.where(active, weight, 0.0), pivot, number0, number1, number2
        )
        loss = tl.where(active, loss, 0.0)
        slope = tl.where(active, slope, 0.0)
        tl.store(loss_ptr + row, loss.to(tl.float32))
        tl.store(counts_ptr + row, labelled.to(tl.int8))
    if GRADIENT:
        factors = vectors + WHOLE * DEGREES
        tl.store(factors + place, value, mask=place <= k + many)
        tl.debug_barrier()  # other threads read it
        if BLOCK > CHUNK:
            for j in range(0, n, CHUNK):
                at = j + tl.arange(0, CHUNK)
                e, above, finite = _distances(
                    x_ptr, d_ptr, row, n, width, center, delta, label, pivot, number0, number1, at, TARGET
                )
                _store_marginals(
                    out_ptr, factors, row, n, at, e, above, finite, k, many, delta, slope, score, label, TARGET
                )
        else:
            _store_marginals(
                out_ptr, factors, row, n, cols, e, above, finite, k, many, delta, slope, score, label, TARGET
            )


@triton.jit
def _store_marginals(
    out_ptr, factors, row, n, at, e, above, finite, k, many, delta, slope, score, label, TARGET: tl.constexpr
):  # fmt: skip
    """Write the probabilities of classes, or the gradient of the SVM loss, from the factors of the powers of e."""
    y = tl.zeros_like(e)
    most = tl.maximum(k, many)
    for i in range(1, most + 1):
        m = most - i
        below = tl.load(factors + (k - 1 - m), mask=m < k, other=0.0)
        over = tl.load(factors + (k + 1 + m), mask=m < many, other=0.0)
        y = tl.where(above, over, below) - y * e
    y = y * e
    if TARGET == "none":
        y = tl.where(above, 1 - y, y)
        y = tl.where(y < 0, 0.0, tl.where(y > 1, 1.0, y))
        store_row(out_ptr, row, n, at, tl.where(delta == delta, y, float("nan")))
    else:
        y = tl.where(finite, slope * tl.where(above, -y, y), 0.0)
        y = tl.where(at == label, tl.where(tl.abs(score) < float("inf"), -slope, 0.0), y)
        store_row(out_ptr, row, n, at, tl.where(slope == 0, 0.0, y))


@triton.jit
def _svm_loss(ratio, center, delta, score, weight, pivot, number0, number1, number2):
    """The loss tau softplus(alpha / tau + log e_k - log e_(k-1) - x_y / (k tau)), and its slope by x_y / k."""
    k = number_of(number0).to(tl.float64)
    tau = number_of(number1).to(tl.float64)
    z = (tl.log(ratio) - delta) + (center - _over_k(score, pivot.to(tl.float64), number0, number1))
    z += number_of(number2).to(tl.float64) / tau
    soft, _, p, _ = logistics(z.to(tl.float32))
    return weight * tau * soft, weight * p / k


# each: the upstream gradient. first: the table.
@triton.jit(do_not_specialize=["rows", "n", "width", "f_row", "e_row", "e_col", "p_row", "p_col"])
def marginals_backward(
    x_ptr, d_ptr, e_ptr, p_ptr, f_ptr, s_ptr, loss_ptr, out_ptr, counts_ptr, extra_ptr, rows, n, width,
    e_row, e_col, p_row, p_col, f_row, number0, number1, number2, number3,
    TARGET: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, DEGREES: tl.constexpr,
):  # fmt: skip
    """The derivative of the probabilities along the upstream gradient: their matrix of derivatives is symmetric."""
    row = tl.program_id(0).to(tl.int64)
    k = number_of(number0).to(tl.int32)
    here = f_ptr + row * (HEAD + VECTORS * DEGREES)
    vectors = here + HEAD
    place = tl.arange(0, DEGREES)
    center = tl.load(here).to(tl.float32)
    delta = tl.load(here + 1).to(tl.float32)
    many = tl.load(here + 2).to(tl.int32)
    # What was not written is read too, since to wait for `many` would take longer.
    low = tl.where(place <= k, tl.load(vectors + SMALL * DEGREES + place), 0.0)
    listed = tl.where(place < many, tl.load(vectors + ABOVE * DEGREES + place), 0.0)
    old = tl.where(place <= k + many, tl.load(vectors + WHOLE * DEGREES + place), 0.0)
    sums = tl.zeros((DEGREES,), tl.float64)
    # A score that grows makes e larger below the threshold, and smaller above it.
    if BLOCK > CHUNK:
        count = tl.full((), 0, tl.int32)
        for j in range(0, n, CHUNK):
            at = j + tl.arange(0, CHUNK)
            e, above, finite, u = _with_upstream(
                x_ptr, d_ptr, e_ptr, row, n, width, e_row, e_col, center, delta, at, TARGET
            )
            sums = _add_powers(sums, place, e, tl.where(above, 0.0, e * u), k)
            count = _list(vectors + RISE * DEGREES, above, -(e * u), count, many)
    else:
        cols = tl.arange(0, BLOCK)
        e, above, finite, u = _with_upstream(
            x_ptr, d_ptr, e_ptr, row, n, width, e_row, e_col, center, delta, cols, TARGET
        )
        sums = _add_powers(sums, place, e, tl.where(above, 0.0, e * u), k)
        _list(vectors + RISE * DEGREES, above, -(e * u), 0, many)
    tl.debug_barrier()  # other threads have written
    rises = tl.load(vectors + RISE * DEGREES + place, mask=place < many, other=0.0)
    change, high, rise = _change(sums, low, listed, rises, place, k, tl.maximum(many, k), DEGREES)
    value = _joined(change, high, place, many, k, DEGREES) + _joined(low, rise, place, many, k, DEGREES)
    # The factors are divided by the one of degree k, which changes too.
    value -= old * _at(value, place, k)
    tl.store(vectors + CHANGE * DEGREES + place, value, mask=place <= k + many)
    tl.debug_barrier()  # other threads read it
    factors = vectors + WHOLE * DEGREES
    if BLOCK > CHUNK:
        for j in range(0, n, CHUNK):
            at = j + tl.arange(0, CHUNK)
            e, above, finite, u = _with_upstream(
                x_ptr, d_ptr, e_ptr, row, n, width, e_row, e_col, center, delta, at, TARGET
            )
            _store_change(out_ptr, factors, row, n, at, e, above, finite, u, k, many, delta, DEGREES)
    else:
        _store_change(out_ptr, factors, row, n, cols, e, above, finite, u, k, many, delta, DEGREES)


@triton.jit
def _with_upstream(
    x_ptr, d_ptr, u_ptr, row, n, width, u_row, u_col, center, delta, at, TARGET: tl.constexpr
):  # fmt: skip
    """What `_distances` finds, and the upstream gradient of finite scores."""
    e, above, finite = _distances(x_ptr, d_ptr, row, n, width, center, delta, 0, 0.0, 1.0, 1.0, at, TARGET)
    return e, above, finite, tl.where(finite, load_weight(u_ptr, row, u_row, u_col, n, at), 0.0).to(tl.float64)


@triton.jit
def _store_change(out_ptr, factors, row, n, at, e, above, finite, u, k, many, delta, DEGREES: tl.constexpr):
    """Write the changes of probabilities, from the factors of the powers of e and their changes, DEGREES * 2 on."""
    y = tl.zeros_like(e)
    most = tl.maximum(k, many)
    for i in range(1, most + 1):
        m = most - i
        below = factors + (k - 1 - m)
        over = factors + (k + 1 + m)
        a = tl.load(below, mask=m < k, other=0.0) * (m + 1)
        b = tl.load(over, mask=m < many, other=0.0) * (m + 1)
        c = tl.load(below + 2 * DEGREES, mask=m < k, other=0.0)
        d = tl.load(over + 2 * DEGREES, mask=m < many, other=0.0)
        y = (u * tl.where(above, b, a) + tl.where(above, -d, c)) - y * e
    y = tl.where(delta == delta, y * e, float("nan"))
    store_row(out_ptr, row, n, at, tl.where(finite, y, 0.0))
