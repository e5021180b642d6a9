"""Kernels of `fused` for which a row is read many times: it stays in registers, one row per program.

Order statistics are found by bisection of keys, integers in the order of the scores. Polynomials over subsets of `k`
classes are coefficients of a product over the classes, taken at the roots of unity (Fernandez and Williams, 2010). With
probabilities that sum to `k` the count has a small variance: a few roots are enough, whatever the number of classes.
With 2 HALF - 1 roots a count is taken for one that differs by a multiple of that. By chance it is as large as k + 31 at
k = 8, and as k + 63 at k = 16, with a probability below 1e-14 (that of a Poisson variable, which is larger).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import triton
import triton.language as tl

from lastlayer._triton.device import COMPILED, exp, is_finite, key_of, of_key, sum3
from lastlayer._triton.fused_lml import LEAST, MOST, kth, number_of, two_ranks
from lastlayer._triton.fused_rows import (
    load_classes,
    load_scores,
    load_shares,
    load_weight,
    logistics,
    store_row,
)

PASSES = tl.constexpr(24)  # as in `lastlayer.project.capped`
TILE = tl.constexpr(32)  # classes at a time


# number0: the number of places, of which labels take theirs and the best rivals the others.
@triton.jit(do_not_specialize=["rows", "n", "width", "f_row", "e_row", "p_row"])
def truncated(
    x_ptr, d_ptr, e_ptr, p_ptr, f_ptr, s_ptr, loss_ptr, out_ptr, counts_ptr, extra_ptr, rows, n, width,
    e_row, e_col, p_row, p_col, f_row, number0, number1, number2, number3,
    TARGET: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum over labels of log(1 + sum over rivals of exp(x_j - x_y)), without the rivals that are spared."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = load_scores(x_ptr, row, n, cols)
    share = load_shares(d_ptr, row, n, width, cols, TARGET)
    label = share > 0
    rival = (x != float("-inf")) & (share == 0)
    labels = tl.sum(label.to(tl.int32), 0)
    spared = number_of(number0).to(tl.int32) - labels
    key = tl.where(rival, tl.where(x == x, key_of(tl.where(x == x, x, 0.0)), MOST), LEAST)
    limit = tl.full((), MOST, tl.int32)
    if (spared > 0) & (labels > 0):
        limit = kth(key, spared)
        spared = spared - tl.sum((key > limit).to(tl.int32), 0)
        tie = (key == limit).to(tl.int32)
        rival = rival & (key <= limit) & ((tie == 0) | (tl.cumsum(tie, 0) > spared))
    rivals = tl.sum(rival.to(tl.int32), 0)
    peak = tl.max(tl.where(rival & (x == x), x, float("-inf")), 0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    mass = tl.where(rival, exp(tl.where(rival, x - peak, 0.0)), 0.0)
    total = tl.where(rivals > 0, tl.sum(mass, 0), 1.0)
    u = (x - peak) - tl.log(total)
    weight = tl.where(label, share, 0.0) * load_weight(e_ptr, row, e_row, e_col, n, cols)
    _, fall, _, miss = logistics(u)
    slope = tl.where(rivals > 0, tl.where(label, weight * miss, 0.0), 0.0)
    loss = tl.where(rivals > 0, tl.where(label, weight * fall, 0.0), 0.0)
    tl.store(loss_ptr + row, tl.sum(loss, 0))
    tl.store(counts_ptr + row, (labels > 0).to(tl.int8))
    if GRADIENT:
        pull = tl.sum(slope, 0) / total
        value = tl.where(rival, mass * pull, tl.where(x != float("-inf"), -slope, 0.0))
        store_row(out_ptr, row, n, cols, tl.where(labels > 0, value, 0.0))


# second: 0, 1, 1 + 1/2, ... up to n.
@triton.jit(do_not_specialize=["rows", "n", "width", "f_row", "e_row", "p_row"])
def warp(
    x_ptr, d_ptr, e_ptr, p_ptr, f_ptr, s_ptr, loss_ptr, out_ptr, counts_ptr, extra_ptr, rows, n, width,
    e_row, e_col, p_row, p_col, f_row, number0, number1, number2, number3,
    TARGET: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The hinges of each positive to the negatives within its margin, weighted by their number."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x, share, live = load_classes(x_ptr, d_ptr, row, n, width, cols, TARGET)
    positive = share > 0
    negative = live & (share == 0)
    weight = share * load_weight(e_ptr, row, e_row, e_col, n, cols)
    odd = tl.max((negative & (x != x)).to(tl.int32), 0) > 0
    left = tl.sum(positive.to(tl.int32), 0)
    counts = (left > 0) & (tl.max(negative.to(tl.int32), 0) > 0)
    slope = tl.zeros((BLOCK,), tl.float32)
    loss = tl.full((), 0.0, tl.float32)
    last = tl.full((), -1, tl.int32)
    while left > 0:
        last = tl.min(tl.where(positive & (cols > last), cols, BLOCK), 0)
        own = cols == last
        score = tl.sum(tl.where(own, x, 0.0), 0)
        within = negative & (x > -(1.0 - score))  # rounded as in plain torch
        rank = tl.sum(within.to(tl.int32), 0)
        hinges = tl.sum(tl.where(within, (x - score) + 1.0, 0.0), 0)
        hinges = tl.where(odd, float("nan"), tl.where(score < float("inf"), hinges, float("nan")))
        factor = tl.sum(tl.where(own, weight, 0.0), 0) * tl.load(s_ptr + rank)
        loss += factor * hinges
        slope += tl.where(within, factor, 0.0) - tl.where(own, factor * rank.to(tl.float32), 0.0)
        left -= 1
    tl.store(loss_ptr + row, loss)
    tl.store(counts_ptr + row, counts.to(tl.int8))
    if GRADIENT:
        store_row(out_ptr, row, n, cols, slope)


@triton.jit
def _capped_scores(x_ptr, e_ptr, f_ptr, row, n, e_row, e_col, f_row, temperature, size, cols):
    """Scores, the finite ones as keys, what is left of k, the number of finite scores, and whether one is nan."""
    x = load_scores(x_ptr, row, n, cols)
    if e_ptr is not None:
        x = tl.where(load_weight(e_ptr, row, e_row, e_col, n, cols) > 0, x, float("-inf"))
    x = tl.where(is_finite(x), tl.div_rn(x, x * 0.0 + temperature), x)
    finite = is_finite(x)
    k = number_of(size)
    if f_ptr is not None:
        k = tl.load(f_ptr + row * f_row)
    k = k - tl.sum((x == float("inf")).to(tl.float32), 0)
    live = tl.sum(finite.to(tl.float32), 0)
    key = tl.where(finite, key_of(tl.where(finite, x, 0.0)), LEAST)
    return x, finite, key, k, live, tl.max((x != x).to(tl.int32), 0) > 0


@triton.jit
def _ended(x, y, k, live, bad):
    """The projection where every class is at an end: k is used up, or takes all that is left, or is infeasible."""
    solvable = (k > 0) & (k < live)
    end = tl.where(k == 0, 0.0, tl.where(k == live, 1.0, float("nan")))
    y = tl.where(is_finite(x), tl.where(solvable, y, end), tl.where(x > 0, 1.0, 0.0))
    return tl.where(bad | (end != end) & (solvable == 0), float("nan"), y)


# first: k of each row, or None: number1. number0: the temperature. The mask takes the place of the weights.
@triton.jit(do_not_specialize=["rows", "n", "width", "f_row", "e_row", "p_row"])
def capped_softmax(
    x_ptr, d_ptr, e_ptr, p_ptr, f_ptr, s_ptr, loss_ptr, out_ptr, counts_ptr, extra_ptr, rows, n, width,
    e_row, e_col, p_row, p_col, f_row, number0, number1, number2, number3,
    TARGET: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """min(1, exp(x - tau)): Newton's method from the most classes at 1, as in `lastlayer.project.capped`."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x, finite, key, k, live, bad = _capped_scores(
        x_ptr, e_ptr, f_ptr, row, n, e_row, e_col, f_row, number0, number1, cols
    )
    y = tl.zeros((BLOCK,), tl.float32)
    if (k > 0) & (k < live):
        most = tl.ceil(k) - 1
        center = of_key(kth(key, most.to(tl.int32) + 1))
        d = tl.where(finite, x - center, float("-inf"))
        small = tl.where(d > 0, 0.0, exp(tl.minimum(d, 0.0)))
        delta = tl.log(tl.sum(small, 0)) - tl.log(k - most)
        before = tl.full((), -1.0, tl.float32)
        left = PASSES
        while left > 0:
            capped = d > delta
            count = tl.minimum(tl.sum(capped.to(tl.float32), 0), most)
            mass = tl.sum(tl.where(capped, 0.0, exp(tl.where(capped, 0.0, d))), 0)
            more = count > before
            delta = tl.where(more, tl.log(mass) - tl.log(k - count), delta)
            before = tl.maximum(count, before)
            left = tl.where(more, left - 1, 0)
        y = exp(tl.minimum(d - delta, 0.0))
    store_row(out_ptr, row, n, cols, _ended(x, y, k, live, bad))


@triton.jit(do_not_specialize=["rows", "n", "width", "f_row", "e_row", "p_row"])
def capped_sparsemax(
    x_ptr, d_ptr, e_ptr, p_ptr, f_ptr, s_ptr, loss_ptr, out_ptr, counts_ptr, extra_ptr, rows, n, width,
    e_row, e_col, p_row, p_col, f_row, number0, number1, number2, number3,
    TARGET: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """clip(x - tau, 0, 1): Newton's method within bounds, as in `lastlayer.project.capped`."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x, finite, key, k, live, bad = _capped_scores(
        x_ptr, e_ptr, f_ptr, row, n, e_row, e_col, f_row, number0, number1, cols
    )
    y = tl.zeros((BLOCK,), tl.float32)
    if (k > 0) & (k < live):
        upper, lower = two_ranks(key, k)
        center = of_key(upper)
        d = tl.where(finite, x - center, float("-inf"))
        lo = (of_key(lower) - center) - 1
        hi = tl.full((), 0.0, tl.float32)
        delta = (lo + hi) / 2
        active_before = tl.full((), -1.0, tl.float32)
        count_before = tl.full((), -1.0, tl.float32)
        number = 0
        while number < 2 * PASSES:
            u = d - delta
            inside = (u > 0) & (u < 1)
            part = tl.sum(tl.where(inside, u, 0.0), 0)
            total = tl.sum(tl.where(inside, d, 0.0), 0)
            active = tl.sum(inside.to(tl.float32), 0)
            count = tl.sum((u >= 1).to(tl.float32), 0)
            excess = part + (count - k)
            free = tl.maximum(active, 1.0)
            # From the scores themselves where they are near 0: a tiny k would be lost in a sum of u.
            newton = tl.where(delta >= -1, (total + (count - k)) / free, delta + excess / free)
            # The classes inside follow those at 1 in order, so two counts identify both.
            same = ((active == active_before) & (count == count_before) & (active > 0)) | (excess == 0)
            lo = tl.where(excess > 0, delta, lo)
            hi = tl.where(excess < 0, delta, hi)
            good = (active > 0) & (newton >= lo) & (newton <= hi)
            good = same | (good & ((number < 12) | (number % 3 != 2)))
            step = tl.where(good, newton, (lo + hi) / 2)
            delta = tl.where((active == 0) & (excess == 0), delta, step)
            active_before = tl.where(good, active, -1.0)
            count_before = count
            number = tl.where(same, 2 * PASSES, number + 1)
        u = d - delta
        y = tl.where(u >= 1, 1.0, tl.where(u > 0, u, 0.0))
    store_row(out_ptr, row, n, cols, _ended(x, y, k, live, bad))


@triton.jit
def _pull_back(x_ptr, e_ptr, out_ptr, row, n, e_row, e_col, temperature, SOFT: tl.constexpr, BLOCK: tl.constexpr):
    """Write h (u - sum h u / sum h) / temperature: h is y, or 1, where 0 < y < 1; y is in the place of the scores."""
    cols = tl.arange(0, BLOCK)
    y = tl.load(x_ptr + (row * n + cols), mask=cols < n, other=0.0).to(tl.float32)
    u = load_weight(e_ptr, row, e_row, e_col, n, cols)
    free = (y > 0) & (y < 1)
    h = tl.where(free, y if SOFT else 1.0, 0.0)
    mass = tl.sum(h, 0)
    mean = tl.sum(tl.where(free, h * u, 0.0), 0) / tl.where(mass > 0, mass, 1.0)
    value = tl.where(free, h * (u - mean) / temperature, 0.0)
    asked = tl.max((u != 0).to(tl.int32), 0) > 0
    broken = asked & (tl.max((y != y).to(tl.int32), 0) > 0)
    store_row(out_ptr, row, n, cols, tl.where(broken, float("nan"), value))


@triton.jit(do_not_specialize=["rows", "n", "width", "f_row", "e_row", "e_col", "p_row", "p_col"])
def capped_softmax_backward(
    x_ptr, d_ptr, e_ptr, p_ptr, f_ptr, s_ptr, loss_ptr, out_ptr, counts_ptr, extra_ptr, rows, n, width,
    e_row, e_col, p_row, p_col, f_row, number0, number1, number2, number3,
    TARGET: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    _pull_back(x_ptr, e_ptr, out_ptr, tl.program_id(0).to(tl.int64), n, e_row, e_col, number0, True, BLOCK)


@triton.jit(do_not_specialize=["rows", "n", "width", "f_row", "e_row", "e_col", "p_row", "p_col"])
def capped_sparsemax_backward(
    x_ptr, d_ptr, e_ptr, p_ptr, f_ptr, s_ptr, loss_ptr, out_ptr, counts_ptr, extra_ptr, rows, n, width,
    e_row, e_col, p_row, p_col, f_row, number0, number1, number2, number3,
    TARGET: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    _pull_back(x_ptr, e_ptr, out_ptr, tl.program_id(0).to(tl.int64), n, e_row, e_col, number0, False, BLOCK)


@triton.jit
def _times(a, b, c, d):
    """(a + bi) (c + di)."""
    return a * c - b * d, a * d + b * c


@triton.jit
def _halved(a, b, HALF: tl.constexpr, WIDTH: tl.constexpr):
    """The products of pairs of classes, of which there are WIDTH."""
    a0, a1 = tl.split(tl.reshape(a, (HALF, WIDTH // 2, 2)))
    b0, b1 = tl.split(tl.reshape(b, (HALF, WIDTH // 2, 2)))
    return _times(a0, b0, a1, b1)


@triton.jit
def _product(a, b, HALF: tl.constexpr):
    """The product over the classes of a tile; the interpreter would reduce it element by element."""
    if COMPILED:
        return tl.reduce((a, b), 1, _times)
    else:
        a, b = _halved(a, b, HALF, 32)
        a, b = _halved(a, b, HALF, 16)
        a, b = _halved(a, b, HALF, 8)
        a, b = _halved(a, b, HALF, 4)
        a, b = _halved(a, b, HALF, 2)
        return tl.reshape(a, (HALF,)), tl.reshape(b, (HALF,))


@triton.jit
def _tilt(x, k):
    """Return (center, delta) of a row in registers at which the probabilities of finite scores sum to about k.

    What is computed from them does not depend on them, but its digits do. Delta is 0, infinite where k is used up or
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
        lo = even - tl.max(tl.where(finite, x, float("-inf")), 0)
        hi = even - tl.min(tl.where(finite, x, float("inf")), 0)
        nu = lo / 2 + hi / 2
        left = 150  # halvings of the largest interval; a few steps are the rule
        while left > 0:
            z = tl.where(finite, x + nu, float("-inf"))
            e = exp(-tl.abs(z))
            y = tl.where(z < 0, e, 1.0) / (1 + e)
            total, mass, _ = sum3(y, y * (1 - y), y, 0)
            lo = tl.where(total < k, nu, lo)
            hi = tl.where(total > k, nu, hi)
            step = nu - total / mass * (tl.log(total) - tl.log(k))  # exact in the tail of the sigmoid
            good = (step > lo) & (step < hi) & (left % 3 != 0)
            close = (tl.abs(total - k) < k / 64) | (lo >= hi)
            left = tl.where(close, 0, left - 1)
            nu = tl.where(close, nu, tl.where(good, step, lo / 2 + hi / 2))
    return -nu, delta


@triton.jit
def _roots(t_ptr, times, HALF: tl.constexpr):
    """w^times for the roots w of unity, from a table of their cosines and sines, in float64."""
    # The roots in the upper half plane, and 1; the others are their conjugates. Their number is odd, so that no factor
    # 1 - p + p w of a class is near 0.
    at = (tl.arange(0, HALF) * times) % (2 * HALF - 1)
    return tl.load(t_ptr + at), tl.load(t_ptr + (2 * HALF - 1) + at)


@triton.jit
def _chances(x_ptr, row, n, cols, without, center, delta, scale):
    """The probability of each class and of its absence, in float64; and which scores are finite."""
    x = load_scores(x_ptr, row, n, cols)
    x = tl.where(cols == without, float("-inf"), x)
    z = (x.to(tl.float64) * scale - center) + delta
    z = tl.where(tl.abs(x) == float("inf"), x.to(tl.float64), z)
    e = tl.exp(-tl.abs(z))
    over = 1.0 / (1 + e)
    return tl.where(z < 0, e * over, over), tl.where(z < 0, over, e * over), is_finite(x)


@triton.jit
def _parts(present, absent, c, s):
    """The factors 1 - p + p w of classes at the roots, and g = p w / (1 - p + p w), the slopes of their logarithms."""
    real = absent[None, :] + present[None, :] * c[:, None]
    imaginary = present[None, :] * s[:, None]
    over = 1.0 / (real * real + imaginary * imaginary)
    a = present[None, :] * c[:, None]
    b = imaginary
    return real, imaginary, (a * real + b * imaginary) * over, (b * real - a * imaginary) * over


@triton.jit
def _counts(t_ptr, a, b, times, HALF: tl.constexpr):
    """The terms of the probability of a count, at each root: phi w^-count, twice for the roots with a conjugate."""
    c, s = _roots(t_ptr, times, HALF)
    both = tl.where(tl.arange(0, HALF) == 0, 1.0, 2.0).to(tl.float64) / (2 * HALF - 1)
    return (a * c + b * s) * both, (b * c - a * s) * both


# number0: how many classes are wanted; number1: what scores are multiplied by. With labels, of all but the first of a
# row. extra: the center and delta of `_tilt`; with labels then the label (-1: none), its score and weight, and how many
# others there are.
@triton.jit(do_not_specialize=["rows", "n", "width", "f_row", "e_row", "p_row"])
def tilt(
    x_ptr, d_ptr, e_ptr, p_ptr, f_ptr, s_ptr, loss_ptr, out_ptr, counts_ptr, extra_ptr, rows, n, width,
    e_row, e_col, p_row, p_col, f_row, number0, number1, number2, number3,
    TARGET: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Where polynomials over subsets are taken, so that they keep their digits."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = load_scores(x_ptr, row, n, cols)
    if TARGET == "none":
        here = extra_ptr + 2 * row
    else:
        here = extra_ptr + 6 * row
        share = load_shares(d_ptr, row, n, width, cols, TARGET)
        label = tl.min(tl.where(share > 0, cols, BLOCK), 0)
        own = cols == label
        tl.store(here + 2, tl.where(label < BLOCK, label, -1).to(tl.float32))
        tl.store(here + 3, tl.sum(tl.where(own, x, 0.0), 0))
        tl.store(here + 4, tl.sum(tl.where(own, load_weight(e_ptr, row, e_row, e_col, n, cols), 0.0), 0))
        x = tl.where(own | (share < 0), float("-inf"), x)
        tl.store(here + 5, tl.sum((x != float("-inf")).to(tl.float32), 0))
    center, delta = _tilt(x * number1, number_of(number0))
    tl.store(here, center)
    tl.store(here + 1, delta)


# number0: k. first: the center and delta of each row. second: the roots of unity.
@triton.jit(do_not_specialize=["rows", "n", "width", "f_row", "e_row", "p_row"])
def marginals(
    x_ptr, d_ptr, e_ptr, p_ptr, f_ptr, s_ptr, loss_ptr, out_ptr, counts_ptr, extra_ptr, rows, n, width,
    e_row, e_col, p_row, p_col, f_row, number0, number1, number2, number3,
    TARGET: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """The probability of each class in subsets of k."""
    row = tl.program_id(0).to(tl.int64)
    center = tl.load(f_ptr + 2 * row).to(tl.float64)
    delta = tl.load(f_ptr + 2 * row + 1).to(tl.float64)
    c, s = _roots(s_ptr, 1, HALF)
    a = tl.full((HALF, TILE), 1.0, tl.float64)
    b = tl.full((HALF, TILE), 0.0, tl.float64)
    for j in range(0, n, TILE):
        present, absent, _ = _chances(x_ptr, row, n, j + tl.arange(0, TILE), -1, center, delta, 1.0)
        real, imaginary, _, _ = _parts(present, absent, c, s)
        a, b = _times(a, b, real, imaginary)
    a, b = _product(a, b, HALF)
    a, b = _counts(s_ptr, a, b, number_of(number0).to(tl.int32), HALF)
    over = 1.0 / tl.sum(a, 0)
    for j in range(0, n, TILE):
        cols = j + tl.arange(0, TILE)
        present, absent, _ = _chances(x_ptr, row, n, cols, -1, center, delta, 1.0)
        _, _, real, imaginary = _parts(present, absent, c, s)
        y = tl.sum(a[:, None] * real - b[:, None] * imaginary, 0) * over
        y = tl.where(y < 0, 0.0, tl.where(y > 1, 1.0, y))
        store_row(out_ptr, row, n, cols, tl.where(delta == delta, y, float("nan")))


# each: the upstream gradient. A constant in it changes nothing; in float64 it does not have to be taken out.
# first: the center and delta of each row.
@triton.jit(do_not_specialize=["rows", "n", "width", "f_row", "e_row", "e_col", "p_row", "p_col"])
def marginals_backward(
    x_ptr, d_ptr, e_ptr, p_ptr, f_ptr, s_ptr, loss_ptr, out_ptr, counts_ptr, extra_ptr, rows, n, width,
    e_row, e_col, p_row, p_col, f_row, number0, number1, number2, number3,
    TARGET: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """The derivative of the probabilities along the upstream gradient: their matrix of derivatives is symmetric."""
    row = tl.program_id(0).to(tl.int64)
    center = tl.load(f_ptr + 2 * row).to(tl.float64)
    delta = tl.load(f_ptr + 2 * row + 1).to(tl.float64)
    c, s = _roots(s_ptr, 1, HALF)
    a = tl.full((HALF, TILE), 1.0, tl.float64)
    b = tl.full((HALF, TILE), 0.0, tl.float64)
    along = tl.full((HALF, TILE), 0.0, tl.float64)
    across = tl.full((HALF, TILE), 0.0, tl.float64)
    for j in range(0, n, TILE):
        cols = j + tl.arange(0, TILE)
        present, absent, finite = _chances(x_ptr, row, n, cols, -1, center, delta, 1.0)
        u = tl.where(finite, load_weight(e_ptr, row, e_row, e_col, n, cols).to(tl.float64), 0.0)
        real, imaginary, g, h = _parts(present, absent, c, s)
        a, b = _times(a, b, real, imaginary)
        along += u[None, :] * g
        across += u[None, :] * h
    a, b = _product(a, b, HALF)
    a, b = _counts(s_ptr, a, b, number_of(number0).to(tl.int32), HALF)
    over = 1.0 / tl.sum(a, 0)
    along = tl.sum(along, 1)
    across = tl.sum(across, 1)
    turned, turned_i = _times(a, b, along, across)
    change = tl.sum(turned, 0) * over
    for j in range(0, n, TILE):
        cols = j + tl.arange(0, TILE)
        present, absent, finite = _chances(x_ptr, row, n, cols, -1, center, delta, 1.0)
        u = tl.where(finite, load_weight(e_ptr, row, e_row, e_col, n, cols).to(tl.float64), 0.0)
        _, _, g, h = _parts(present, absent, c, s)
        bend, bend_i = _times(g, h, 1 - g, -h)
        y = tl.sum(a[:, None] * g - b[:, None] * h, 0) * over
        value = tl.sum(turned[:, None] * g - turned_i[:, None] * h, 0) * over - y * change
        value += u * (tl.sum(a[:, None] * bend - b[:, None] * bend_i, 0) * over)
        value = tl.where(delta == delta, value, float("nan"))
        store_row(out_ptr, row, n, cols, tl.where(finite, value, 0.0))


# number: k, tau, alpha. first: what `tilt` has found for each row. second: the roots of unity.
@triton.jit(do_not_specialize=["rows", "n", "width", "f_row", "e_row", "p_row"])
def smooth_svm(
    x_ptr, d_ptr, e_ptr, p_ptr, f_ptr, s_ptr, loss_ptr, out_ptr, counts_ptr, extra_ptr, rows, n, width,
    e_row, e_col, p_row, p_col, f_row, number0, number1, number2, number3,
    TARGET: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """The loss tau softplus(alpha / tau + log e_k - log e_(k-1) - x_y / (k tau)), with polynomials of the others."""
    row = tl.program_id(0).to(tl.int64)
    center = tl.load(f_ptr + 6 * row).to(tl.float64)
    delta = tl.load(f_ptr + 6 * row + 1).to(tl.float64)
    label = tl.load(f_ptr + 6 * row + 2).to(tl.int32)
    score = tl.load(f_ptr + 6 * row + 3).to(tl.float64)
    weight = tl.load(f_ptr + 6 * row + 4).to(tl.float64)
    others = tl.load(f_ptr + 6 * row + 5)
    has_label = label >= 0
    active = has_label & (others >= number0)
    active = active & (score != float("inf"))  # next to which there are no others
    k = number_of(number0).to(tl.int32)
    tau = number_of(number1).to(tl.float64)
    scale = 1.0 / (k.to(tl.float64) * tau)
    c, s = _roots(s_ptr, 1, HALF)
    a = tl.full((HALF, TILE), 1.0, tl.float64)
    b = tl.full((HALF, TILE), 0.0, tl.float64)
    for j in range(0, n, TILE):
        place = j + tl.arange(0, TILE)
        present, absent, _ = _chances(x_ptr, row, n, place, label, center, delta, scale)
        if TARGET == "dense":
            known = load_shares(d_ptr, row, n, width, place, TARGET) >= 0
            present = tl.where(known, present, 0.0)
            absent = tl.where(known, absent, 1.0)
        real, imaginary, _, _ = _parts(present, absent, c, s)
        a, b = _times(a, b, real, imaginary)
    a, b = _product(a, b, HALF)
    a1, b1 = _counts(s_ptr, a, b, k, HALF)
    a2, b2 = _counts(s_ptr, a, b, k - 1, HALF)
    over1 = 1.0 / tl.sum(a1, 0)
    over2 = 1.0 / tl.sum(a2, 0)
    # The logarithm of a ratio of two probabilities of like size, about the center of the scores.
    ratio = tl.log(over2) - tl.log(over1) - delta
    z = number_of(number2).to(tl.float64) / tau + ratio + (center - score * scale)
    e = tl.exp(-tl.abs(z))
    soft = tl.where(z > 0, z, 0.0) + tl.log(1 + e)
    soft = tl.where(e < 1e-5, tl.where(z > 0, z, 0.0) + e * (1 - 0.5 * e), soft)  # log(1 + e) has lost its digits
    slope = weight * tl.where(z < 0, e, 1.0) / (1 + e) / k.to(tl.float64)
    tl.store(loss_ptr + row, tl.where(active, weight * tau * soft, 0.0).to(tl.float32))
    tl.store(counts_ptr + row, has_label.to(tl.int8))
    if GRADIENT:
        for j in range(0, n, TILE):
            place = j + tl.arange(0, TILE)
            present, absent, finite = _chances(x_ptr, row, n, place, label, center, delta, scale)
            _, _, g, h = _parts(present, absent, c, s)
            first = tl.sum(a1[:, None] * g - b1[:, None] * h, 0) * over1
            second = tl.sum(a2[:, None] * g - b2[:, None] * h, 0) * over2
            if TARGET == "dense":
                finite = finite & (load_shares(d_ptr, row, n, width, place, TARGET) >= 0)
            value = tl.where(finite, slope * (first - second), 0.0)
            value = tl.where(place == label, tl.where(tl.abs(score) < float("inf"), -slope, 0.0), value)
            store_row(out_ptr, row, n, place, tl.where(active, value, 0.0))
