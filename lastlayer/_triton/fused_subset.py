"""Kernels of `fused` for polynomials over subsets of `k` classes: their marginals, and the smooth top-k SVM loss.

About a threshold nu at which the probabilities of the classes sum to about k, let e = exp(-|x + nu|) for each class.
The weights of the subsets by their size are the coefficients of a product: of 1 + e z for a class below the threshold,
which is small, and of z + e for one above it, of which there are at most 2 k. Newton's identities give the
polynomial of either side from its power sums. With S of the small classes up to degree k and E of the others, all of
it in float64,

    G_j = sum over a <= k of S_a E_(L - j + a)        for L classes above the threshold,

is the weight of j classes for j <= k. The rest of the G_j are what the division by z + e needs. A class below the
threshold has the marginal v = e (G_(k-1) - e G_(k-2) + e^2 G_(k-3) - ...) / G_k, and one above it 1 - v with
v = e (G_(k+1) - e G_(k+2) + ...) / G_k. No step takes more than k numbers per class.

All numbers of a row are in one column of a table: those of `tilt` first, then four groups of `_room` rows, of which the
first two hold power sums, and later the factors of the powers of e; and the last two S and E.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import triton
import triton.language as tl

from lastlayer._triton.device import exp, is_finite, scaled, sum2, sum3
from lastlayer._triton.fused_lml import number_of
from lastlayer._triton.fused_rows import load_scores, load_shares, load_weight, logistics, store_row

CENTER = tl.constexpr(0)  # nu is delta less the center
DELTA = tl.constexpr(1)
LABEL = tl.constexpr(2)  # -1: none
SCORE = tl.constexpr(3)  # of the label
WEIGHT = tl.constexpr(4)
OTHERS = tl.constexpr(5)  # how many classes take part beside the label
ABOVE = tl.constexpr(6)  # how many classes are above the threshold
SLOPE = tl.constexpr(7)
PIVOT = tl.constexpr(8)  # the largest score beside the label's, which is subtracted from all
HEAD = tl.constexpr(9)


@triton.jit
def _room(k):
    """How many numbers a group has: more than there are classes above the threshold."""
    return k * 2 + 2


@triton.jit
def _tilt(x, k):
    """Return (center, delta) of a row in registers at which the probabilities of finite scores sum to about k.

    What is computed from them does not depend on them, but its digits do. Delta is infinite where k is used up or
    takes every class that is left, and nan where k is infeasible.
    """
    finite = is_finite(x)
    n, n_top, n_bad = sum3(finite.to(tl.float32), (x == float("inf")).to(tl.float32), (x != x).to(tl.float32), 0)
    k = k - n_top
    nu = tl.full((), 0.0, tl.float32)
    delta = tl.where(k == 0, float("-inf"), tl.where(k == n, float("inf"), float("nan")))
    delta = tl.where(n_bad > 0, float("nan"), delta)
    if (k > 0) & (k < n) & (n_bad == 0):
        delta = tl.full((), 0.0, tl.float32)
        even = tl.log(k) - tl.log(n - k)
        top = tl.max(tl.where(finite, x, float("-inf")), 0)
        lo = even - top
        hi = even - tl.min(tl.where(finite, x, float("inf")), 0)
        # Where every probability is small, it is an exponential.
        sparse = (tl.log(k) - tl.log(tl.sum(tl.where(finite, exp(x - top), 0.0), 0))) - top
        nu = tl.where((sparse >= lo) & (hi - lo < float("inf")), sparse, lo / 2 + hi / 2)
        lo = lo - nu
        hi = hi - nu
        left = 152  # halvings of the largest interval; one or two steps are the rule, of which the first are Newton's
        while left > 0:
            z = tl.where(finite, (x + nu) + delta, float("-inf"))
            e = exp(-tl.abs(z))
            y = tl.where(z < 0, e, 1.0) / (1 + e)
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


# number0: k; with labels number1: tau. Then all classes of a row but its first label are taken, for k - 1/2 of them:
# half way between the two sizes of subsets that the loss needs.
@triton.jit(do_not_specialize=["rows", "n", "width", "f_row", "e_row", "p_row"])
def tilt(
    x_ptr, d_ptr, e_ptr, p_ptr, f_ptr, s_ptr, loss_ptr, out_ptr, counts_ptr, extra_ptr, rows, n, width,
    e_row, e_col, p_row, p_col, f_row, number0, number1, number2, number3,
    TARGET: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The threshold about which polynomials over subsets keep their digits; and what is to be known of the label."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = load_scores(x_ptr, row, n, cols)
    here = f_ptr + row
    k = number_of(number0)
    if TARGET != "none":
        share = load_shares(d_ptr, row, n, width, cols, TARGET)
        label = tl.min(tl.where(share > 0, cols, BLOCK), 0)
        own = cols == label
        weight = tl.where(own, load_weight(e_ptr, row, e_row, e_col, n, cols), 0.0)
        score, weight = sum2(tl.where(own, x, 0.0), weight, 0)
        x = tl.where(own | (share < 0), float("-inf"), x)
        tl.store(here + LABEL * rows, tl.where(label < BLOCK, label, -1).to(tl.float64))
        tl.store(here + SCORE * rows, score.to(tl.float64))
        tl.store(here + WEIGHT * rows, weight.to(tl.float64))
        tl.store(here + OTHERS * rows, tl.sum((x != float("-inf")).to(tl.float32), 0).to(tl.float64))
        pivot = tl.max(tl.where(is_finite(x), x, float("-inf")), 0)
        pivot = tl.where(is_finite(pivot), pivot, 0.0)
        tl.store(here + PIVOT * rows, pivot.to(tl.float64))
        x = scaled(x - pivot, 1.0 / (k * number1))
        k = k - 0.5
    center, delta = _tilt(x, k)
    tl.store(here + CENTER * rows, center.to(tl.float64))
    tl.store(here + DELTA * rows, delta.to(tl.float64))


@triton.jit
def _over_k(x, pivot, number0, number1):
    """Scores less the pivot over k tau in float64; as `tilt` has rounded them where that has moved them far."""
    k = number_of(number0)
    value = (x.to(tl.float64) - pivot) * (1.0 / (k.to(tl.float64) * number1))
    rounded = scaled(x - pivot.to(tl.float32), 1.0 / (k * number1)).to(tl.float64)
    return tl.where(tl.abs(value - rounded) < 0.01, value, rounded)


@triton.jit
def _distances(x_ptr, d_ptr, f_ptr, row, rows, n, width, number0, number1, cols, TARGET: tl.constexpr):
    """exp(-|x + nu|) of classes, which of them are above the threshold, and which scores are finite.

    Every pass has the same numbers, and rounding does what a change of the scores in their last digit would do.
    """
    center = tl.load(f_ptr + CENTER * rows + row)
    delta = tl.load(f_ptr + DELTA * rows + row)
    x = load_scores(x_ptr, row, n, cols)
    if TARGET == "none":
        z = (x - center.to(tl.float32)) + delta.to(tl.float32)
    else:
        x = tl.where(cols == tl.load(f_ptr + LABEL * rows + row).to(tl.int32), float("-inf"), x)
        if TARGET == "dense":
            x = tl.where(load_shares(d_ptr, row, n, width, cols, TARGET) >= 0, x, float("-inf"))
        pivot = tl.load(f_ptr + PIVOT * rows + row)
        z = ((_over_k(x, pivot, number0, number1) - center) + delta).to(tl.float32)
    z = tl.where(tl.abs(x) == float("inf"), x, z)
    return exp(-tl.abs(z)), z > 0, is_finite(x)


# first: the table. second: None, or the table of changes along the upstream gradient, which is then in the place of the
# weights.
@triton.jit(do_not_specialize=["rows", "n", "width", "f_row", "e_row", "e_col", "p_row", "p_col"])
def powers(
    x_ptr, d_ptr, e_ptr, p_ptr, f_ptr, s_ptr, loss_ptr, out_ptr, counts_ptr, extra_ptr, rows, n, width,
    e_row, e_col, p_row, p_col, f_row, number0, number1, number2, number3,
    TARGET: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
    DEGREES: tl.constexpr,
):  # fmt: skip
    """The power sums of e below the threshold and above it."""
    row = tl.program_id(0).to(tl.int64)
    k = number_of(number0).to(tl.int32)
    room = _room(k)
    place = tl.arange(0, DEGREES)
    low = tl.zeros((DEGREES,), tl.float64)
    high = tl.zeros((DEGREES,), tl.float64)
    many = tl.full((), 0, tl.int32)
    for j in range(0, n, BLOCK):
        cols = j + tl.arange(0, BLOCK)
        e, above, finite = _distances(x_ptr, d_ptr, f_ptr, row, rows, n, width, number0, number1, cols, TARGET)
        e = e.to(tl.float64)
        term = e
        if s_ptr is not None:
            u = tl.where(finite, load_weight(e_ptr, row, e_row, e_col, n, cols), 0.0)
            term = e * tl.where(above, -u, u)  # a score that grows makes e smaller above the threshold
        here = tl.sum(above.to(tl.int32), 0)
        many += here
        power = tl.where(above, 0.0, term)
        for m in range(1, k + 1):
            low += tl.where(place == m, tl.sum(power, 0), 0.0)
            power = power * e
        power = tl.where(above, term, 0.0)
        for m in range(1, tl.where(here > 0, room, 1)):
            high += tl.where(place == m, tl.sum(power, 0), 0.0)
            power = power * e
    into = f_ptr + row
    if s_ptr is None:
        tl.store(into + ABOVE * rows, tl.minimum(many, room - 1).to(tl.float64))
    else:
        into = s_ptr + row
    tl.store(into + (place + HEAD) * rows, low, mask=place <= k)
    tl.store(into + (place + HEAD + room) * rows, high, mask=place < room)


@triton.jit
def _expand(sums_ptr, rows, place, degree, most, live):
    """Elementary symmetric polynomials from power sums, up to a degree of each row, by Newton's identities."""
    value = tl.where(live & (place == 0), 1.0, 0.0).to(tl.float64)
    for j in range(1, most + 1):
        back = place - j
        power = tl.load(sums_ptr - back * rows, mask=live & (back < 0) & (degree >= j), other=0.0)
        term = tl.sum(tl.where(back % 2 != 0, power, -power) * value, 1) / j
        value = tl.where(place == j, term[:, None], value)
    return value


@triton.jit
def _moved(sums_ptr, of_ptr, rows, place, degree, most, live):
    """The changes of elementary symmetric polynomials, from power sums with weights."""
    value = tl.zeros_like(place).to(tl.float64)
    for m in range(1, most + 1):
        power = tl.load(sums_ptr + m * rows, mask=live & (degree >= m), other=0.0)
        inside = live & (place >= m) & (place <= degree)
        power *= tl.load(of_ptr + (place - m) * rows, mask=inside, other=0.0)
        value += tl.where(m % 2 == 1, power, -power)
    return value


@triton.jit
def _joined(low_ptr, high_ptr, rows, place, many, last, live):
    """The sum over a <= last of S_a E_(many - place + a)."""
    value = tl.zeros_like(place).to(tl.float64)
    for a in range(0, last + 1):
        at = many - place + a
        term = tl.load(low_ptr + a * rows, mask=live, other=0.0)
        value += term * tl.load(high_ptr + at * rows, mask=live & (at >= 0) & (at <= many), other=0.0)
    return value


@triton.jit
def _store_factors(below_ptr, rows, room, place, many, k, value, live):
    """Store the factors of the powers of e: below the threshold those of degrees k - 1 and less, above it k + 1 on."""
    tl.store(below_ptr + (k - 1 - place) * rows, value, mask=live & (place < k))
    tl.store(below_ptr + (room + place - k - 1) * rows, value, mask=live & (place > k) & (place <= k + many))


@triton.jit
def _at(value, place, k):
    """The number of degree k of each row."""
    return tl.sum(tl.where(place == k, value, 0.0), 1)[:, None]


# BLOCK rows at a time. DEGREES: more than k and the number of classes above the threshold.
@triton.jit(do_not_specialize=["rows", "n", "width", "f_row", "e_row", "p_row"])
def polynomials(
    x_ptr, d_ptr, e_ptr, p_ptr, f_ptr, s_ptr, loss_ptr, out_ptr, counts_ptr, extra_ptr, rows, n, width,
    e_row, e_col, p_row, p_col, f_row, number0, number1, number2, number3,
    TARGET: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
    DEGREES: tl.constexpr,
):  # fmt: skip
    """The factors of the powers of e; with labels those of the gradient of the SVM loss, and that loss."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    live = inside[:, None]
    k = number_of(number0).to(tl.int32)
    room = _room(k)
    here = (f_ptr + row)[:, None]
    below = here + HEAD * rows
    low_ptr = below + room * (rows * 2)
    high_ptr = low_ptr + room * rows
    many = tl.load(here + ABOVE * rows, mask=live, other=0.0).to(tl.int32)
    place = tl.arange(0, DEGREES)[None, :] + tl.zeros((BLOCK, 1), tl.int32)
    low = _expand(below, rows, place, many * 0 + k, k, live)
    high = _expand(below + room * rows, rows, place, many, tl.max(many), live)
    tl.store(low_ptr + place * rows, low, mask=live & (place <= k))
    tl.store(high_ptr + place * rows, high, mask=live & (place <= many))
    tl.debug_barrier()  # other threads read it
    value = _joined(low_ptr, high_ptr, rows, place, many, k, live)
    whole = tl.where(live, _at(value, place, k), 1.0)
    over = 1.0 / whole
    value = value * over
    if TARGET == "none":
        tl.debug_barrier()
        tl.store(low_ptr + place * rows, low * over, mask=live & (place <= k))
    else:
        # The marginals in subsets of k classes less those in subsets of k - 1.
        fewer = _joined(low_ptr, high_ptr, rows, place - 1, many, k - 1, live)
        over = 1.0 / tl.where(live, _at(fewer, place, k), 1.0)
        ratio = tl.sum(whole * over, 1)
        _svm_loss(loss_ptr, counts_ptr, f_ptr + row, row, rows, number0, number1, number2, ratio, inside)
        value -= fewer * over
    if GRADIENT:
        _store_factors(below, rows, room, place, many, k, value, live)


@triton.jit
def _svm_loss(loss_ptr, counts_ptr, here, row, rows, number0, number1, number2, ratio, live):
    """The loss tau softplus(alpha / tau + log e_k - log e_(k-1) - x_y / (k tau)), with polynomials of the others."""
    center = tl.load(here + CENTER * rows, mask=live, other=0.0)
    delta = tl.load(here + DELTA * rows, mask=live, other=0.0)
    label = tl.load(here + LABEL * rows, mask=live, other=-1.0)
    score = tl.load(here + SCORE * rows, mask=live, other=0.0)
    weight = tl.load(here + WEIGHT * rows, mask=live, other=0.0)
    others = tl.load(here + OTHERS * rows, mask=live, other=0.0)
    k = number_of(number0).to(tl.float64)
    tau = number_of(number1).to(tl.float64)
    active = (label >= 0) & (others >= k) & (score != float("inf"))  # next to which there are no others
    pivot = tl.load(here + PIVOT * rows, mask=live, other=0.0)
    z = (tl.log(ratio) - delta) + (center - _over_k(score.to(tl.float32), pivot, number0, number1))
    z += number_of(number2).to(tl.float64) / tau
    soft, _, p, _ = logistics(z.to(tl.float32))
    tl.store(loss_ptr + row, tl.where(active, weight * tau * soft, 0.0).to(tl.float32), mask=live)
    tl.store(counts_ptr + row, (label >= 0).to(tl.int8), mask=live)
    tl.store(here + SLOPE * rows, tl.where(active, weight * p / k, 0.0), mask=live)


@triton.jit(do_not_specialize=["rows", "n", "width", "f_row", "e_row", "p_row"])
def marginals(
    x_ptr, d_ptr, e_ptr, p_ptr, f_ptr, s_ptr, loss_ptr, out_ptr, counts_ptr, extra_ptr, rows, n, width,
    e_row, e_col, p_row, p_col, f_row, number0, number1, number2, number3,
    TARGET: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The probability of each class in subsets of k; with labels the gradient of the SVM loss."""
    row = tl.program_id(0).to(tl.int64)
    k = number_of(number0).to(tl.int32)
    here = f_ptr + row
    many = tl.load(here + ABOVE * rows).to(tl.int32)
    below = here + HEAD * rows
    up_there = below + _room(k) * rows
    for j in range(0, n, BLOCK):
        cols = j + tl.arange(0, BLOCK)
        e, above, finite = _distances(x_ptr, d_ptr, f_ptr, row, rows, n, width, number0, number1, cols, TARGET)
        e = e.to(tl.float64)
        value = tl.zeros((BLOCK,), tl.float64)
        for i in range(1, k + 1):
            value = tl.load(below + (k - i) * rows) - value * e
        other = tl.zeros((BLOCK,), tl.float64)
        for i in range(1, many + 1):
            other = tl.load(up_there + (many - i) * rows) - other * e
        value = tl.where(above, other, value) * e
        if TARGET == "none":
            delta = tl.load(here + DELTA * rows)
            y = tl.where(above, 1 - value, value)
            y = tl.where(y < 0, 0.0, tl.where(y > 1, 1.0, y))
            store_row(out_ptr, row, n, cols, tl.where(delta == delta, y, float("nan")))
        else:
            slope = tl.load(here + SLOPE * rows)
            score = tl.load(here + SCORE * rows)
            value = tl.where(finite, slope * tl.where(above, -value, value), 0.0)
            label = tl.load(here + LABEL * rows).to(tl.int32)
            value = tl.where(cols == label, tl.where(tl.abs(score) < float("inf"), -slope, 0.0), value)
            store_row(out_ptr, row, n, cols, tl.where(slope == 0, 0.0, value))


# first: the table; second: that of the changes. BLOCK rows at a time.
@triton.jit(do_not_specialize=["rows", "n", "width", "f_row", "e_row", "e_col", "p_row", "p_col"])
def changes(
    x_ptr, d_ptr, e_ptr, p_ptr, f_ptr, s_ptr, loss_ptr, out_ptr, counts_ptr, extra_ptr, rows, n, width,
    e_row, e_col, p_row, p_col, f_row, number0, number1, number2, number3,
    TARGET: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
    DEGREES: tl.constexpr,
):  # fmt: skip
    """The derivatives of the factors of `polynomials` along the upstream gradient."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = (row < rows)[:, None]
    k = number_of(number0).to(tl.int32)
    room = _room(k)
    group = room * rows
    old = (f_ptr + row)[:, None] + HEAD * rows
    new = (s_ptr + row)[:, None] + HEAD * rows
    low_ptr = old + group * 2
    new_ptr = new + group * 2
    many = tl.load((f_ptr + row)[:, None] + ABOVE * rows, mask=live, other=0.0).to(tl.int32)
    place = tl.arange(0, DEGREES)[None, :] + tl.zeros((BLOCK, 1), tl.int32)
    low = _moved(new, low_ptr, rows, place, many * 0 + k, k, live)
    high = _moved(new + group, low_ptr + group, rows, place, many, tl.max(many), live)
    tl.store(new_ptr + place * rows, low, mask=live & (place <= k))
    tl.store(new_ptr + group + place * rows, high, mask=live & (place <= many))
    tl.debug_barrier()  # other threads read it
    value = _joined(new_ptr, low_ptr + group, rows, place, many, k, live)
    value += _joined(low_ptr, new_ptr + group, rows, place, many, k, live)
    # The factors of `polynomials` are divided by the one of degree k, which changes too.
    was = tl.load(old + (k - 1 - place) * rows, mask=live & (place < k), other=0.0)
    was += tl.load(old + (room + place - k - 1) * rows, mask=live & (place > k) & (place <= k + many), other=0.0)
    value -= was * _at(value, place, k)
    _store_factors(new, rows, room, place, many, k, value, live)


# each: the upstream gradient. first and second: the tables.
@triton.jit(do_not_specialize=["rows", "n", "width", "f_row", "e_row", "e_col", "p_row", "p_col"])
def marginals_backward(
    x_ptr, d_ptr, e_ptr, p_ptr, f_ptr, s_ptr, loss_ptr, out_ptr, counts_ptr, extra_ptr, rows, n, width,
    e_row, e_col, p_row, p_col, f_row, number0, number1, number2, number3,
    TARGET: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The derivative of the probabilities along the upstream gradient: their matrix of derivatives is symmetric."""
    row = tl.program_id(0).to(tl.int64)
    k = number_of(number0).to(tl.int32)
    group = _room(k) * rows
    old = f_ptr + HEAD * rows + row
    new = s_ptr + HEAD * rows + row
    many = tl.load(f_ptr + ABOVE * rows + row).to(tl.int32)
    delta = tl.load(f_ptr + DELTA * rows + row)
    for j in range(0, n, BLOCK):
        cols = j + tl.arange(0, BLOCK)
        e, above, finite = _distances(x_ptr, d_ptr, f_ptr, row, rows, n, width, number0, number1, cols, TARGET)
        e = e.to(tl.float64)
        u = tl.where(finite, load_weight(e_ptr, row, e_row, e_col, n, cols), 0.0).to(tl.float64)
        value = tl.zeros((BLOCK,), tl.float64)
        for i in range(0, k):
            m = k - 1 - i
            a = tl.load(old + m * rows) * (m + 1)
            value = (u * a + tl.load(new + m * rows)) - value * e
        other = tl.zeros((BLOCK,), tl.float64)
        for i in range(0, many):
            m = many - 1 - i
            a = tl.load(old + group + m * rows) * (m + 1)
            other = (u * a - tl.load(new + group + m * rows)) - other * e
        value = tl.where(above, other, value) * e
        value = tl.where(delta == delta, value, float("nan"))
        store_row(out_ptr, row, n, cols, tl.where(finite, value, 0.0))
