"""Losses of a whole batch on the GPU, reduced to one number: few launches, and nothing in between.

A kernel of one program takes the sums over the rows, or the columns, that the others have left.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import triton
import triton.language as tl

from lastlayer._triton.device import COMPILED, LOG2E, exp, exp2, log1p_part, sum2, sum4
from lastlayer._triton.fused_rows import load_classes, store_row

LOWEST = tl.constexpr(-3.4028234663852886e38)  # no score but -inf is below it


@triton.jit
def _parts(first_ptr, second_ptr, count, BLOCK: tl.constexpr):
    """The sums of so many numbers in two places, each in BLOCK parts."""
    first = tl.zeros((BLOCK,), tl.float32)
    second = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, count, BLOCK):
        at = i + tl.arange(0, BLOCK)
        first += tl.load(first_ptr + at, mask=at < count, other=0).to(tl.float32)
        second += tl.load(second_ptr + at, mask=at < count, other=0).to(tl.float32)
    return first, second


@triton.jit(do_not_specialize=["rows"])
def reduced(loss_ptr, counts_ptr, total_ptr, factor_ptr, rows, over, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of the losses, or their mean over the rows that count; and the factor of gradients divided by `over`."""
    loss, count = sum2(*_parts(loss_ptr, counts_ptr, rows, BLOCK), 0)
    count = tl.maximum(count, 1.0) if MEAN else 1.0
    tl.store(total_ptr, loss / count)
    tl.store(factor_ptr, tl.where(count == over, 1.0, over / count))


@triton.jit(do_not_specialize=["count"])
def scaled(grad_ptr, up_ptr, factor_ptr, count, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Multiply a stretch of the gradients by the factor of `reduced` and the upstream gradient, unless that is 1.

    If it is 0 they are 0, also where they were nan.
    """
    factor = tl.load(up_ptr).to(tl.float32) * tl.load(factor_ptr)
    if factor != 1:
        first = tl.program_id(0).to(tl.int64) * (STEPS * BLOCK)
        for i in range(STEPS):
            at = first + i * BLOCK + tl.arange(0, BLOCK)
            value = tl.load(grad_ptr + at, mask=at < count, other=0.0).to(tl.float32)
            value = tl.where(factor == 0, 0.0, value * factor)
            tl.store(grad_ptr + at, value.to(grad_ptr.dtype.element_ty), mask=at < count)


@triton.jit(do_not_specialize=["n"])
def of_rows(grad_ptr, up_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Multiply the gradients of a row by its upstream gradient; if that is 0 they are 0, also where they were nan."""
    row = tl.program_id(0).to(tl.int64)
    up = tl.load(up_ptr + row)
    for j in range(0, n, BLOCK):
        cols = j + tl.arange(0, BLOCK)
        value = tl.load(grad_ptr + (row * n + cols), mask=cols < n, other=0.0).to(tl.float32)
        store_row(out_ptr, row, n, cols, tl.where(up == 0, 0.0, value * up))


# numbers: for each row its largest score, the sum of the exponentials of the others less it, and of the shares.
@triton.jit(do_not_specialize=["rows", "n", "width"])
def quasibinary_sums(x_ptr, d_ptr, numbers_ptr, rows, n, width, TARGET: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    high = tl.full((BLOCK,), LOWEST, tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    labels = tl.zeros((BLOCK,), tl.float32)
    for j in range(0, n, BLOCK):
        x, share, live = load_classes(x_ptr, d_ptr, row, n, width, j + tl.arange(0, BLOCK), TARGET)
        top = tl.maximum(high, tl.where(live, x, LOWEST))
        mass = mass * exp(high - top) + tl.where(live & (x < float("inf")), exp(x - top), 0.0)
        mass = tl.where(live & (x != x), x, mass)  # nan stays
        high = top
        labels += share
    peak = tl.max(high, 0)
    mass, labels = sum2(tl.where(mass == 0, 0.0, mass * exp(high - peak)), labels, 0)
    tl.store(numbers_ptr + row, peak)
    tl.store(numbers_ptr + rows + row, tl.where(peak == float("inf"), mass * 0.0 + 1.0, mass))
    tl.store(numbers_ptr + 2 * rows + row, labels)


# result: the peak of the batch, log C about it, 1 where that exists, and what the exponentials are multiplied by in
# its gradient.
@triton.jit
def _normaliser(numbers_ptr, rows, BLOCK: tl.constexpr):
    """The four numbers of a result, from those of the rows."""
    at = tl.arange(0, BLOCK)
    high = tl.full((BLOCK,), LOWEST, tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    labels = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, rows, BLOCK):
        inside = i + at < rows
        here = tl.load(numbers_ptr + i + at, mask=inside, other=LOWEST)
        more = tl.load(numbers_ptr + rows + i + at, mask=inside, other=0.0)
        labels += tl.load(numbers_ptr + 2 * rows + i + at, mask=inside, other=0.0)
        top = tl.maximum(high, here)
        up = tl.where(top == float("inf"), tl.where(here == top, 1.0, 0.0), exp(here - top))
        down = tl.where(top == float("inf"), tl.where(high == top, 1.0, 0.0), exp(high - top))
        mass = mass * down + more * up
        high = top
    peak = tl.max(high, 0)
    scale = tl.where(peak == float("inf"), tl.where(high == peak, 1.0, 0.0), exp(high - peak))
    whole, count = sum2(tl.where(mass == 0, 0.0, mass * scale), labels, 0)
    some = (peak > LOWEST) & (peak < float("inf"))
    whole = tl.where(peak == float("inf"), whole * float("inf"), whole)
    peak = tl.where(some, peak, 0.0)
    known = (count > 0) & ((whole > 0) | (whole != whole))
    log_c = tl.log(tl.where(known, whole / count, 1.0))
    return peak, log_c, known.to(tl.float32), tl.where(known, 1.0 / tl.where(known, whole, 1.0), 0.0)


@triton.jit
def _store_result(result_ptr, peak, log_c, known, factor):
    tl.store(result_ptr, peak)
    tl.store(result_ptr + 1, log_c)
    tl.store(result_ptr + 2, known)
    tl.store(result_ptr + 3, factor)


@triton.jit(do_not_specialize=["rows"])
def quasibinary_normaliser(numbers_ptr, result_ptr, rows, BLOCK: tl.constexpr):
    peak, log_c, known, factor = _normaliser(numbers_ptr, rows, BLOCK)
    _store_result(result_ptr, peak, log_c, known, factor)


@triton.jit
def _quotient(x, share, live, peak, log_c):
    """The loss of classes and its slope by log q, where they take part."""
    q = (x - peak) - log_c
    term = tl.where(q < 0, 0.0, q) - tl.where(share > 0, share * q, 0.0)
    return tl.where(live, term, 0.0), tl.where(live, (q >= 0).to(tl.float32) - share, 0.0)


# numbers: three for each row from `quasibinary_sums`, then its loss and the sum of the slopes. SUMMED: 0, or the rows
# that every program sums itself, where these are few: that takes less time than a launch. The first block of a row is
# on its way meanwhile.
@triton.jit(do_not_specialize=["rows", "n", "width"])
def quasibinary_loss(
    x_ptr, d_ptr, numbers_ptr, result_ptr, rows, n, width,
    TARGET: tl.constexpr, SUMMED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x, share, live = load_classes(x_ptr, d_ptr, row, n, width, tl.arange(0, BLOCK), TARGET)
    if SUMMED > 0:
        peak, log_c, known, factor = _normaliser(numbers_ptr, rows, SUMMED)
        if row == 0:
            _store_result(result_ptr, peak, log_c, known, factor)
    else:
        peak = tl.load(result_ptr)
        log_c = tl.load(result_ptr + 1)
        known = tl.load(result_ptr + 2)
    loss, slopes = _quotient(x, share, live, peak, log_c)
    for j in range(BLOCK, n, BLOCK):
        x, share, live = load_classes(x_ptr, d_ptr, row, n, width, j + tl.arange(0, BLOCK), TARGET)
        term, slope = _quotient(x, share, live, peak, log_c)
        loss += term
        slopes += slope
    loss, slopes = sum2(loss, slopes, 0)
    tl.store(numbers_ptr + 3 * rows + row, tl.where(known > 0, loss, 0.0))
    tl.store(numbers_ptr + 4 * rows + row, tl.where(known > 0, slopes, 0.0))


# In the end the last number of the result is the factor of the exponentials in the gradient of the reduced loss.
@triton.jit(do_not_specialize=["rows"])
def quasibinary_total(numbers_ptr, total_ptr, result_ptr, rows, factor, BLOCK: tl.constexpr):
    numbers_ptr += 3 * rows
    loss, slopes = sum2(*_parts(numbers_ptr, numbers_ptr + rows, rows, BLOCK), 0)
    tl.store(total_ptr, loss * factor)
    tl.store(result_ptr + 3, -(slopes * factor) * tl.load(result_ptr + 3))


@triton.jit(do_not_specialize=["n", "width"])
def quasibinary_backward(
    x_ptr, d_ptr, up_ptr, result_ptr, out_ptr, n, width, factor, TARGET: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    up = tl.load(up_ptr).to(tl.float32)
    peak = tl.load(result_ptr)
    log_c = tl.load(result_ptr + 1)
    own = tl.load(result_ptr + 2) * factor * up
    shared = tl.load(result_ptr + 3) * up
    for j in range(0, n, BLOCK):
        cols = j + tl.arange(0, BLOCK)
        x, share, live = load_classes(x_ptr, d_ptr, row, n, width, cols, TARGET)
        _, slope = _quotient(x, share, live, peak, log_c)
        value = own * slope + shared * exp(x - peak)
        store_row(out_ptr, row, n, cols, tl.where(own != 0, tl.where(live, value, 0.0), 0.0))


@triton.jit
def _near(t):
    """e^t for t <= 0, with an error that is small next to 1."""
    return exp2(t * LOG2E)


@triton.jit
def _sides(x, share, live):
    """Which scores are among the positives, which among the negatives; and which have no place in either."""
    positive = share > 0
    negative = live & (share < 1)
    nan = x != x
    odd = (positive & nan) | (negative & (nan | (x == float("inf"))))
    return positive & (x != float("inf")), negative, odd.to(tl.float32)  # +inf is a positive above all negatives


@triton.jit
def _most_least_add(a0, a1, a2, a3, b0, b1, b2, b3):
    return tl.maximum(a0, b0), tl.minimum(a1, b1), a2 + b2, a3 + b3


@triton.jit
def _peaks(high, low, odd, soft):
    """The largest of `high`, the smallest of `low`, and the sums of `odd` and `soft`, over the first dimension."""
    if COMPILED:
        return tl.reduce((high, low, odd, soft), 0, _most_least_add)
    else:
        return tl.max(high, 0), tl.min(low, 0), tl.sum(odd, 0), tl.sum(soft, 0)


@triton.jit
def _side(share, side):
    """Whether a class is taken as a positive on a side, 0 or 1, and its share as that; side 1 is for soft labels."""
    positive = (share > 0.5) ^ (side > 0)
    return positive, tl.where(positive, share, 1 - share)


# numbers, for each row or column: its loss, whether it has a positive, the peaks of negatives and positives, and the
# slopes over the sums about them.
@triton.jit
def _store_line(numbers_ptr, line, lines, top, bottom, above, below, odd, warm, cool, margin):
    """Store the numbers of rows or columns, from the peaks and the sums of exponentials about them."""
    has_positive = bottom < -LOWEST
    active = has_positive & (top > LOWEST)
    z = (top - bottom) + cool * tl.log(above) + warm * tl.log(below) + margin
    z = tl.where(odd > 0, float("nan"), z)
    e = exp(-tl.abs(z))
    slope = tl.where(z < 0, e, 1.0) / (1 + e)
    slope = tl.where(z == z, slope, z)
    loss = tl.where(active, tl.maximum(z, 0.0) + log1p_part(e), 0.0)
    loss = tl.where(active & (z != z), z, loss)
    inside = line < lines
    tl.store(numbers_ptr + line, loss, mask=inside)
    tl.store(numbers_ptr + lines + line, has_positive.to(tl.float32), mask=inside)
    tl.store(numbers_ptr + 2 * lines + line, tl.where(active, top, 0.0), mask=inside)
    tl.store(numbers_ptr + 3 * lines + line, tl.where(active, bottom, 0.0), mask=inside)
    tl.store(numbers_ptr + 4 * lines + line, tl.where(active, slope / above, 0.0), mask=inside)
    tl.store(numbers_ptr + 5 * lines + line, tl.where(active, slope / below, 0.0), mask=inside)


@triton.jit
def _peak_terms(x, share, live):
    """What the peaks of negatives and positives are taken of, and the signs of unusual scores and of soft labels."""
    positive, negative, strange = _sides(x, share, live)
    x = tl.where(x == x, x, 0.0)
    return tl.where(negative, x, LOWEST), tl.where(positive, x, -LOWEST), strange, share * (1 - share)


@triton.jit
def _sum_terms(x, share, live, top, bottom, soft, hot, cold):
    """The exponentials of negatives and of positives about their peaks; `soft` is 0 where all labels are hard."""
    above = tl.zeros_like(x)
    below = tl.zeros_like(x)
    for side in range(tl.where(soft > 0, 2, 1)):
        positive, part = _side(share, side)
        e = _near(tl.where(positive, (bottom - x) * hot, (x - top) * cold))
        part = tl.where(live & (part > 0), part * e, 0.0)  # what has no part on a side may be far beyond its peak
        above += tl.where(positive, 0.0, part)
        below += tl.where(positive, part, 0.0)
    return above, below


@triton.jit
def _load_pairs(x_ptr, d_ptr, row, n, width, cols, inside, TARGET: tl.constexpr):
    """Scores, -inf where there is none, and labels as they are given; rows and columns broadcast."""
    at = row * n + cols
    x = tl.load(x_ptr + at, mask=inside, other=float("-inf")).to(tl.float32)
    given = tl.zeros_like(x)
    if TARGET == "dense":
        given = tl.load(d_ptr + at, mask=inside, other=0).to(tl.float32)
    if TARGET == "lists":
        for j in range(width):
            given = tl.where(cols == tl.load(d_ptr + row * width + j), 1.0, given)
    return x, given


@triton.jit
def _most_least_sum(a0, a1, a2, b0, b1, b2):
    return tl.maximum(a0, b0), tl.minimum(a1, b1), a2 + b2


@triton.jit
def _usual_peaks(x, given):
    """The peaks of negatives and positives over the first dimension; the last is 0 where scores and labels are usual.

    That is: finite or -inf, and 0, 1 or -1.
    """
    live = (x > float("-inf")) & (given >= 0)
    positive = given > 0.5
    odd = tl.abs(tl.fma(given, given, -tl.abs(given))) + tl.where(live, x, 0.0) * 0.0
    odd = tl.where(x == x, odd, x)
    high = tl.where(live & (positive == 0), x, LOWEST)
    low = tl.where(live & positive, x, -LOWEST)
    if COMPILED:
        return tl.reduce((high, low, odd), 0, _most_least_sum)
    else:
        return tl.max(high, 0), tl.min(low, 0), tl.sum(odd, 0)


@triton.jit
def _usual_sums(x, given, top, bottom, hot, cold):
    """The sums of exponentials about the peaks, where scores and labels are usual."""
    positive = given > 0.5
    t = (x - tl.where(positive, bottom, top)) * tl.where(positive, hot * -LOG2E, cold * LOG2E)
    e = tl.where((x > float("-inf")) & (given >= 0), exp2(t), 0.0)
    return sum2(tl.where(positive, 0.0, e), tl.where(positive, e, 0.0), 0)


@triton.jit
def _shares(x, given):
    """As `load_classes`: scores, shares and participation."""
    share = tl.where(given >= 0, tl.minimum(given, 1.0), -1.0)
    live = (x != float("-inf")) & (share >= 0)
    return tl.where(live, x, 0.0), tl.where(live, share, 0.0), live


@triton.jit
def _two_way_row(
    x_ptr, d_ptr, numbers_ptr, row, rows, n, width, warm, cool, margin, TARGET: tl.constexpr, BLOCK: tl.constexpr,
    ONE: tl.constexpr,
):  # fmt: skip
    """The two-way loss of one row, which is read twice, unless it is ONE block that stays in registers."""
    hot = 1 / warm
    cold = 1 / cool
    if ONE:
        cols = tl.arange(0, BLOCK)
        x, given = _load_pairs(x_ptr, d_ptr, row, n, width, cols, cols < n, TARGET)
        top, bottom, odd = _usual_peaks(x, given)
        soft = odd * 0.0
        if odd == 0:
            above, below = _usual_sums(x, given, top, bottom, hot, cold)
        else:
            x, share, live = _shares(x, given)
            top, bottom, odd, soft = _peaks(*_peak_terms(x, share, live))
            above, below = sum2(*_sum_terms(x, share, live, top, bottom, soft, hot, cold), 0)
    else:
        high = tl.full((BLOCK,), LOWEST, tl.float32)
        low = tl.full((BLOCK,), -LOWEST, tl.float32)
        odds = tl.zeros((BLOCK,), tl.float32)
        softs = tl.zeros((BLOCK,), tl.float32)
        for j in range(0, n, BLOCK):
            x, share, live = load_classes(x_ptr, d_ptr, row, n, width, j + tl.arange(0, BLOCK), TARGET)
            some_high, some_low, some_odd, some_soft = _peak_terms(x, share, live)
            high = tl.maximum(high, some_high)
            low = tl.minimum(low, some_low)
            odds += some_odd
            softs += some_soft
        top, bottom, odd, soft = _peaks(high, low, odds, softs)
        aboves = tl.zeros((BLOCK,), tl.float32)
        belows = tl.zeros((BLOCK,), tl.float32)
        for j in range(0, n, BLOCK):
            x, share, live = load_classes(x_ptr, d_ptr, row, n, width, j + tl.arange(0, BLOCK), TARGET)
            some_above, some_below = _sum_terms(x, share, live, top, bottom, soft, hot, cold)
            aboves += some_above
            belows += some_below
        above, below = sum2(aboves, belows, 0)
    tl.store(numbers_ptr + 6 * rows + row, soft)
    _store_line(numbers_ptr, row, rows, top, bottom, above, below, odd, warm, cool, margin)


# parts, for each part of LONG rows and each column: its peaks, the sums about them, and how many scores are unusual.
@triton.jit
def _two_way_columns(
    x_ptr, d_ptr, c_ptr, parts_ptr, part, first, rows, n, width, warm, cool, margin, TARGET: tl.constexpr,
    LONG: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The two-way loss of WIDE columns, or what a part of their rows has to it."""
    row = (part * LONG + tl.arange(0, LONG)).to(tl.int64)[:, None]
    line = first + tl.arange(0, WIDE)
    hot = 1 / warm
    cold = 1 / cool
    inside = (row < rows) & (line < n)[None, :]
    x, given = _load_pairs(x_ptr, d_ptr, tl.minimum(row, rows - 1), n, width, line[None, :], inside, TARGET)
    top, bottom, odd = _usual_peaks(x, given)
    if tl.max(tl.where(odd == 0, 0, 1), 0) == 0:
        above, below = _usual_sums(x, given, top[None, :], bottom[None, :], hot, cold)
    else:
        x, share, live = _shares(x, given)
        top, bottom, odd, soft = _peaks(*_peak_terms(x, share, live))
        above, below = sum2(*_sum_terms(x, share, live, top[None, :], bottom[None, :], tl.max(soft, 0), hot, cold), 0)
    if PARTS:
        parts_ptr += part.to(tl.int64) * 5 * n
        inside = line < n
        tl.store(parts_ptr + line, top, mask=inside)
        tl.store(parts_ptr + n + line, bottom, mask=inside)
        tl.store(parts_ptr + 2 * n + line, above, mask=inside)
        tl.store(parts_ptr + 3 * n + line, below, mask=inside)
        tl.store(parts_ptr + 4 * n + line, odd, mask=inside)
    else:
        _store_line(c_ptr, line, n, top, bottom, above, below, odd, warm, cool, margin)


# The programs of one part of the rows follow one another: they read the same scores.
@triton.jit(do_not_specialize=["rows", "n", "width"])
def two_way_lines(
    x_ptr, d_ptr, r_ptr, c_ptr, parts_ptr, rows, n, width, warm, cool, margin,
    TARGET: tl.constexpr, BLOCK: tl.constexpr, LONG: tl.constexpr, WIDE: tl.constexpr, ONE: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """The two-way loss of every row, and of every column or a part of it: LONG rows and WIDE columns at a time."""
    strips = tl.cdiv(n, WIDE)
    part = tl.program_id(0) // (strips + LONG)
    line = tl.program_id(0) % (strips + LONG)
    if line < strips:
        _two_way_columns(
            x_ptr, d_ptr, c_ptr, parts_ptr, part, line * WIDE, rows, n, width, warm, cool, margin,
            TARGET, LONG, WIDE, PARTS,
        )  # fmt: skip
    else:
        row = (part * LONG + (line - strips)).to(tl.int64)
        if row < rows:
            _two_way_row(x_ptr, d_ptr, r_ptr, row, rows, n, width, warm, cool, margin, TARGET, BLOCK, ONE)


@triton.jit(do_not_specialize=["n", "parts"])
def two_way_joined(parts_ptr, c_ptr, n, parts, warm, cool, margin, LONG: tl.constexpr, WIDE: tl.constexpr):
    """The two-way loss of WIDE columns from their parts, LONG at a time."""
    hot = 1 / warm
    cold = 1 / cool
    line = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    some = tl.arange(0, LONG)[:, None]
    high = tl.full((LONG, WIDE), LOWEST, tl.float32)
    low = tl.full((LONG, WIDE), -LOWEST, tl.float32)
    odd = tl.zeros((LONG, WIDE), tl.float32)
    for i in range(0, parts, LONG):
        at = (i + some).to(tl.int64) * 5 * n + line[None, :]
        inside = (i + some < parts) & (line[None, :] < n)
        high = tl.maximum(high, tl.load(parts_ptr + at, mask=inside, other=LOWEST))
        low = tl.minimum(low, tl.load(parts_ptr + n + at, mask=inside, other=-LOWEST))
        odd += tl.load(parts_ptr + 4 * n + at, mask=inside, other=0.0)
    top, bottom, odd, _ = _peaks(high, low, odd, odd)
    above = tl.zeros((LONG, WIDE), tl.float32)
    below = tl.zeros((LONG, WIDE), tl.float32)
    for i in range(0, parts, LONG):
        at = (i + some).to(tl.int64) * 5 * n + line[None, :]
        inside = (i + some < parts) & (line[None, :] < n)
        high = tl.load(parts_ptr + at, mask=inside, other=LOWEST)
        low = tl.load(parts_ptr + n + at, mask=inside, other=-LOWEST)
        above += tl.load(parts_ptr + 2 * n + at, mask=inside, other=0.0) * _near((high - top[None, :]) * cold)
        below += tl.load(parts_ptr + 3 * n + at, mask=inside, other=0.0) * _near((bottom[None, :] - low) * hot)
    above, below = sum2(above, below, 0)
    _store_line(c_ptr, line, n, top, bottom, above, below, odd, warm, cool, margin)


# result: the factor of the gradients of the rows, and that of the columns.
@triton.jit(do_not_specialize=["rows", "n"])
def two_way_total(r_ptr, c_ptr, total_ptr, result_ptr, rows, n, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """The loss of the rows, and for each row with a positive the mean of the columns'; or the mean over such rows."""
    loss = tl.zeros((BLOCK,), tl.float32)
    count = tl.zeros((BLOCK,), tl.float32)
    by_class = tl.zeros((BLOCK,), tl.float32)
    occur = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, tl.maximum(rows, n), BLOCK):  # all at once: one wait for memory
        at = i + tl.arange(0, BLOCK)
        loss += tl.load(r_ptr + at, mask=at < rows, other=0.0)
        count += tl.load(r_ptr + rows + at, mask=at < rows, other=0.0)
        by_class += tl.load(c_ptr + at, mask=at < n, other=0.0)
        occur += tl.load(c_ptr + n + at, mask=at < n, other=0.0)
    loss, count, by_class, occur = sum4(loss, count, by_class, occur, 0)
    over = 1.0 / tl.maximum(occur, 1.0)
    factor = tl.full((), 1.0, tl.float32)
    if MEAN:
        factor = 1.0 / tl.maximum(count, 1.0)
    by_class = tl.where(count > 0, by_class * over, 0.0)
    tl.store(total_ptr, loss * factor + by_class * (count * factor))
    tl.store(result_ptr, factor)
    tl.store(result_ptr + 1, count * factor * over)


@triton.jit
def _pulls(x, positive, top, bottom, c_top, c_bottom, by, less, c_by, c_less, hot, cold):
    """The gradient of scores as positives or negatives of their row and their column."""
    scale = tl.where(positive, -hot, cold)
    # No score is beyond the peaks, but where a row or a column has no part in the loss.
    mine = exp2(tl.minimum((x - tl.where(positive, bottom, top)) * scale, 0.0))
    theirs = exp2(tl.minimum((x - tl.where(positive, c_bottom, c_top)) * scale, 0.0))
    return tl.where(positive, -less, by) * mine + tl.where(positive, -c_less, c_by) * theirs


# A program takes `per` rows, so that it reads the numbers of the columns once for them.
@triton.jit(do_not_specialize=["rows", "n", "width", "per"])
def two_way_backward(
    x_ptr, d_ptr, up_ptr, r_ptr, c_ptr, result_ptr, out_ptr, rows, n, width, per, warm, cool,
    TARGET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0) * per
    up = tl.load(up_ptr).to(tl.float32)
    own = tl.load(result_ptr) * up
    shared = tl.load(result_ptr + 1) * up
    hot = (1 / warm) * LOG2E
    cold = (1 / cool) * LOG2E
    for j in range(0, n, BLOCK):
        cols = j + tl.arange(0, BLOCK)
        inside = cols < n
        c_top = tl.load(c_ptr + 2 * n + cols, mask=inside, other=0.0)
        c_bottom = tl.load(c_ptr + 3 * n + cols, mask=inside, other=0.0)
        c_by = tl.load(c_ptr + 4 * n + cols, mask=inside, other=0.0) * shared
        c_less = tl.load(c_ptr + 5 * n + cols, mask=inside, other=0.0) * shared
        for i in range(begin, tl.minimum(begin + per, rows)):
            row = tl.full((), 0, tl.int64) + i
            x, given = _load_pairs(x_ptr, d_ptr, row, n, width, cols, inside, TARGET)
            top = tl.load(r_ptr + 2 * rows + row)
            bottom = tl.load(r_ptr + 3 * rows + row)
            by = tl.load(r_ptr + 4 * rows + row) * own
            less = tl.load(r_ptr + 5 * rows + row) * own
            positive = given > 0.5
            value = _pulls(x, positive, top, bottom, c_top, c_bottom, by, less, c_by, c_less, hot, cold)
            if tl.load(r_ptr + 6 * rows + row) > 0:  # soft labels have a share on either side
                share = tl.where(given >= 0, tl.minimum(given, 1.0), 0.0)
                other = _pulls(x, positive == 0, top, bottom, c_top, c_bottom, by, less, c_by, c_less, hot, cold)
                most = tl.where(positive, share, 1 - share)
                value = most * value + (1 - most) * other
            live = (x != float("-inf")) & (given >= 0)
            store_row(out_ptr, row, n, cols, tl.where(live, value, 0.0))
