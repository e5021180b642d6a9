"""Kernels of `fused` for which a row is read many times: it stays in registers, one row per program.

Order statistics are found by bisection of keys, integers in the order of the scores.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import triton
import triton.language as tl

from lastlayer._triton.device import COMPILED, exp, is_finite, key_of, of_key, sum2, sum4
from lastlayer._triton.fused_lml import LEAST, MOST, at_rank, kth, masked_scores, number_of, size_of, two_ranks
from lastlayer._triton.fused_rows import (
    load_classes,
    load_scores,
    load_shares,
    load_weight,
    logistics,
    store_row,
)

PASSES = tl.constexpr(24)  # as in `lastlayer.project.capped`


@triton.jit
def _join_range(a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, tl.minimum(a4, b4), tl.maximum(a5, b5)


@triton.jit
def _sums_and_range(a, b, c, key):
    """Three sums, the number of keys above LEAST, the least of them, and the greatest.

    One reduction of all costs the barriers of one.
    """
    live = (key > LEAST).to(tl.int32)
    least = tl.where(key > LEAST, key, MOST)
    if COMPILED:
        return tl.reduce((a, b, c, live, least, key), 0, _join_range)
    else:
        return tl.sum(a, 0), tl.sum(b, 0), tl.sum(c, 0), tl.sum(live, 0), tl.min(least, 0), tl.max(key, 0)


@triton.jit
def _join_most(a0, a1, b0, b1):
    return a0 + b0, tl.maximum(a1, b1)


@triton.jit
def _sum_and_most(a, value):
    if COMPILED:
        return tl.reduce((a, value), 0, _join_most)
    else:
        return tl.sum(a, 0), tl.max(value, 0)


@triton.jit
def _fall(u):
    """log(1 + e^-u), and the sigmoid of -u."""
    _, fall, _, miss = logistics(u)
    return fall, miss


# number0: the number of places, of which labels take theirs and the best rivals the others.
@triton.jit(do_not_specialize=["rows", "n", "width", "f_row", "e_row", "p_row"])
def truncated(
    x_ptr, d_ptr, e_ptr, p_ptr, f_ptr, s_ptr, loss_ptr, out_ptr, counts_ptr, extra_ptr, rows, n, width,
    e_row, e_col, p_row, p_col, f_row, number0, number1, number2, number3, scale,
    TARGET: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum over labels of log(1 + sum over rivals of exp(x_j - x_y)), without the rivals that are spared."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = load_scores(x_ptr, row, n, cols)
    share = load_shares(d_ptr, row, n, width, cols, TARGET)
    label = share > 0
    rival = (x != float("-inf")) & (share == 0)
    weight = tl.where(label, share, 0.0) * load_weight(e_ptr, row, e_row, e_col, n, cols)
    key = tl.where(rival, tl.where(x == x, key_of(tl.where(x == x, x, 0.0)), MOST), LEAST)
    labels, own, pull, live, least, most = _sums_and_range(label.to(tl.float32), tl.where(label, x, 0.0), weight, key)
    spared = (number_of(number0) - labels).to(tl.int32)
    limit = tl.full((), MOST, tl.int32)
    if (spared > 0) & (labels > 0):
        limit = tl.where(live >= spared, at_rank(key, spared, live, least, most), LEAST)
    reached, peak = _sum_and_most((key >= limit).to(tl.int32), tl.where(rival & (key < limit), x, float("-inf")))
    if (spared > 0) & (labels > 0):
        kept = key < limit
        if reached > spared:  # of rivals with the same score the first are spared
            limit = tl.min(tl.where(kept, MOST, key), 0)
            tie = (key == limit).to(tl.int32)
            kept = kept | ((tie > 0) & (tl.cumsum(tie, 0) > spared - (reached - tl.sum(tie, 0))))
            score = of_key(limit)
            peak = tl.where(score > peak, score, peak)
        rival = rival & kept
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    mass = tl.where(rival, exp(tl.where(rival, x - peak, 0.0)), 0.0)
    total, rivals = sum2(mass, rival.to(tl.float32), 0)
    total = tl.where(rivals > 0, total, 1.0)
    if labels == 1:  # the rule; then one class has the loss
        soft, rest = _fall((own - peak) - tl.log(total))
        loss = tl.where(rivals > 0, pull * soft, 0.0)
        pull = tl.where(rivals > 0, pull * rest, 0.0)
        slope = tl.where(label, pull, 0.0)
    else:
        falls, misses = _fall((x - peak) - tl.log(total))
        slope = tl.where(rivals > 0, tl.where(label, weight * misses, 0.0), 0.0)
        loss, pull = sum2(tl.where(rivals > 0, tl.where(label, weight * falls, 0.0), 0.0), slope, 0)
    tl.store(loss_ptr + row, loss)
    tl.store(counts_ptr + row, (labels > 0).to(tl.int8))
    if GRADIENT:
        value = tl.where(rival, mass * (pull / total), tl.where(x != float("-inf"), -slope, 0.0))
        store_row(out_ptr, row, n, cols, tl.where(labels > 0, scale * value, 0.0))


@triton.jit
def _add_add_least(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, tl.minimum(a2, b2)


@triton.jit
def _sums_and_least(a, b, at):
    """Two sums and a minimum; one reduction of all costs the barriers of one."""
    if COMPILED:
        return tl.reduce((a, b, at), 0, _add_add_least)
    else:
        return tl.sum(a, 0), tl.sum(b, 0), tl.min(at, 0)


# second: 0, 1, 1 + 1/2, ... up to n.
@triton.jit(do_not_specialize=["rows", "n", "width", "f_row", "e_row", "p_row"])
def warp(
    x_ptr, d_ptr, e_ptr, p_ptr, f_ptr, s_ptr, loss_ptr, out_ptr, counts_ptr, extra_ptr, rows, n, width,
    e_row, e_col, p_row, p_col, f_row, number0, number1, number2, number3, scale,
    TARGET: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The hinges of each positive to the negatives within its margin, weighted by their number."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x, share, live = load_classes(x_ptr, d_ptr, row, n, width, cols, TARGET)
    positive = share > 0
    negative = live & (share == 0)
    negatives, odd, last = _sums_and_least(
        negative.to(tl.float32), (negative & (x != x)).to(tl.float32), tl.where(positive, cols, BLOCK)
    )
    counts = (last < BLOCK) & (negatives > 0)
    slope = tl.zeros((BLOCK,), tl.float32)
    loss = tl.full((), 0.0, tl.float64)  # a sum of one positive after another, of which there may be many
    while last < BLOCK:
        score = tl.load(x_ptr + (row * n + last)).to(tl.float32)
        factor = tl.full((), 1.0, tl.float32)
        if TARGET == "dense":
            factor = tl.minimum(tl.load(d_ptr + (row * n + last)).to(tl.float32), 1.0)
        if e_ptr is not None:
            factor *= tl.load(e_ptr + (row * e_row + last * e_col)).to(tl.float32)
        within = negative & (x > -(1.0 - score))  # rounded as in plain torch
        rank, hinges, after = _sums_and_least(
            within.to(tl.float32),
            tl.where(within, (x - score) + 1.0, 0.0),
            tl.where(positive & (cols > last), cols, BLOCK),
        )
        hinges = tl.where(odd > 0, float("nan"), tl.where(score < float("inf"), hinges, float("nan")))
        factor = factor * tl.load(s_ptr + rank.to(tl.int32))
        loss += (factor * hinges).to(tl.float64)
        slope += tl.where(within, factor, 0.0) - tl.where(cols == last, factor * rank, 0.0)
        last = after
    tl.store(loss_ptr + row, loss.to(tl.float32))
    tl.store(counts_ptr + row, counts.to(tl.int8))
    if GRADIENT:
        store_row(out_ptr, row, n, cols, scale * slope)


@triton.jit
def _join_ends(a0, a1, a2, a3, a4, b0, b1, b2, b3, b4):
    return a0 + b0, a1 + b1, a2 + b2, tl.minimum(a3, b3), tl.maximum(a4, b4)


@triton.jit
def _capped_scores(x_ptr, e_ptr, f_ptr, row, n, e_row, e_col, f_row, temperature, size, cols):
    """Scores, the finite ones as keys, what is left of k, the number and ends of the keys, and if a score is nan."""
    x = masked_scores(x_ptr, e_ptr, row, e_row, e_col, n, cols, temperature)
    finite = is_finite(x)
    k = size_of(size, f_ptr, row, f_row)
    key = tl.where(finite, key_of(tl.where(finite, x, 0.0)), LEAST)
    live = finite.to(tl.float32)
    full = (x == float("inf")).to(tl.float32)
    bad = (x != x).to(tl.float32)
    least = tl.where(finite, key, MOST)
    if COMPILED:
        live, full, bad, least, most = tl.reduce((live, full, bad, least, key), 0, _join_ends)
    else:
        live, full, bad, least, most = (
            tl.sum(live, 0),
            tl.sum(full, 0),
            tl.sum(bad, 0),
            tl.min(least, 0),
            tl.max(key, 0),
        )
    return x, finite, key, k - full, live, least, most, bad > 0


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
    e_row, e_col, p_row, p_col, f_row, number0, number1, number2, number3, scale,
    TARGET: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """min(1, exp(x - tau)): Newton's method from the most classes at 1, as in `lastlayer.project.capped`."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x, finite, key, k, live, least, greatest, bad = _capped_scores(
        x_ptr, e_ptr, f_ptr, row, n, e_row, e_col, f_row, number0, number1, cols
    )
    y = tl.zeros((BLOCK,), tl.float32)
    if (k > 0) & (k < live):
        most = tl.ceil(k) - 1
        center = of_key(kth(key, most.to(tl.int32) + 1, live, least, greatest))
        d = tl.where(finite, x - center, float("-inf"))
        small = tl.where(d > 0, 0.0, exp(tl.minimum(d, 0.0)))
        delta = tl.log(tl.sum(small, 0)) - tl.log(k - most)
        before = tl.full((), -1.0, tl.float32)
        left = PASSES
        while left > 0:
            capped = d > delta
            count, mass = sum2(capped.to(tl.float32), tl.where(capped, 0.0, exp(tl.where(capped, 0.0, d))), 0)
            count = tl.minimum(count, most)
            more = count > before
            delta = tl.where(more, tl.log(mass) - tl.log(k - count), delta)
            before = tl.maximum(count, before)
            left = tl.where(more, left - 1, 0)
        y = exp(tl.minimum(d - delta, 0.0))
    store_row(out_ptr, row, n, cols, _ended(x, y, k, live, bad))


@triton.jit(do_not_specialize=["rows", "n", "width", "f_row", "e_row", "p_row"])
def capped_sparsemax(
    x_ptr, d_ptr, e_ptr, p_ptr, f_ptr, s_ptr, loss_ptr, out_ptr, counts_ptr, extra_ptr, rows, n, width,
    e_row, e_col, p_row, p_col, f_row, number0, number1, number2, number3, scale,
    TARGET: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """clip(x - tau, 0, 1): Newton's method within bounds, as in `lastlayer.project.capped`."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x, finite, key, k, live, least, greatest, bad = _capped_scores(
        x_ptr, e_ptr, f_ptr, row, n, e_row, e_col, f_row, number0, number1, cols
    )
    y = tl.zeros((BLOCK,), tl.float32)
    if (k > 0) & (k < live):
        upper, lower = two_ranks(key, k, live, least, greatest)
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
            part, total, active, count = sum4(
                tl.where(inside, u, 0.0), tl.where(inside, d, 0.0), inside.to(tl.float32), (u >= 1).to(tl.float32), 0
            )
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
    mass, moment, asked, bad = sum4(h, tl.where(free, h * u, 0.0), (u != 0).to(tl.float32), (y != y).to(tl.float32), 0)
    mean = moment / tl.where(mass > 0, mass, 1.0)
    value = tl.where(free, h * (u - mean), 0.0)
    if temperature != 1.0:
        value = value / temperature
    store_row(out_ptr, row, n, cols, tl.where((asked > 0) & (bad > 0), float("nan"), value))


@triton.jit(do_not_specialize=["rows", "n", "width", "f_row", "e_row", "e_col", "p_row", "p_col"])
def capped_softmax_backward(
    x_ptr, d_ptr, e_ptr, p_ptr, f_ptr, s_ptr, loss_ptr, out_ptr, counts_ptr, extra_ptr, rows, n, width,
    e_row, e_col, p_row, p_col, f_row, number0, number1, number2, number3, scale,
    TARGET: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    _pull_back(x_ptr, e_ptr, out_ptr, tl.program_id(0).to(tl.int64), n, e_row, e_col, number0, True, BLOCK)


@triton.jit(do_not_specialize=["rows", "n", "width", "f_row", "e_row", "e_col", "p_row", "p_col"])
def capped_sparsemax_backward(
    x_ptr, d_ptr, e_ptr, p_ptr, f_ptr, s_ptr, loss_ptr, out_ptr, counts_ptr, extra_ptr, rows, n, width,
    e_row, e_col, p_row, p_col, f_row, number0, number1, number2, number3, scale,
    TARGET: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    _pull_back(x_ptr, e_ptr, out_ptr, tl.program_id(0).to(tl.int64), n, e_row, e_col, number0, False, BLOCK)
