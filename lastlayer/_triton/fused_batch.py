"""Losses of a whole batch on the GPU, reduced to one number: few launches, and nothing in between.

A kernel of one program takes the sums over the rows, or the columns, that the others have left.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import triton
import triton.language as tl

from lastlayer._triton.device import exp, log1p
from lastlayer._triton.fused_rows import load_classes, store_row

LOWEST = tl.constexpr(-3.4028234663852886e38)  # no score but -inf is below it


@triton.jit
def _total(values_ptr, count, BLOCK: tl.constexpr):
    """The sum of so many numbers."""
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, count, BLOCK):
        at = i + tl.arange(0, BLOCK)
        total += tl.load(values_ptr + at, mask=at < count, other=0).to(tl.float32)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["rows"])
def reduced(loss_ptr, counts_ptr, total_ptr, factor_ptr, rows, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of the losses, or their mean over the rows that count; and the factor of the gradients."""
    loss = _total(loss_ptr, rows, BLOCK)
    factor = tl.full((), 1.0, tl.float32)
    if MEAN:
        factor = 1.0 / tl.maximum(_total(counts_ptr, rows, BLOCK), 1.0)
    tl.store(total_ptr, loss * factor)
    tl.store(factor_ptr, factor)


@triton.jit
def scaled(grad_ptr, up_ptr, factor_ptr, out_ptr, count, BLOCK: tl.constexpr):
    """The gradient of a reduced loss: that of the rows times the factor of `reduced` and the upstream gradient."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(up_ptr).to(tl.float32) * tl.load(factor_ptr)
    value = tl.load(grad_ptr + at, mask=at < count, other=0.0).to(tl.float32) * factor
    tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=at < count)


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
    mass = tl.sum(tl.where(mass == 0, 0.0, mass * exp(high - peak)), 0)
    tl.store(numbers_ptr + row, peak)
    tl.store(numbers_ptr + rows + row, tl.where(peak == float("inf"), mass * 0.0 + 1.0, mass))
    tl.store(numbers_ptr + 2 * rows + row, tl.sum(labels, 0))


# result: the peak of the batch, log C about it, 1 where that exists, and what the exponentials are multiplied by in
# its gradient.
@triton.jit(do_not_specialize=["rows"])
def quasibinary_normaliser(numbers_ptr, result_ptr, rows, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    high = tl.full((BLOCK,), LOWEST, tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, rows, BLOCK):
        inside = i + at < rows
        here = tl.load(numbers_ptr + i + at, mask=inside, other=LOWEST)
        more = tl.load(numbers_ptr + rows + i + at, mask=inside, other=0.0)
        top = tl.maximum(high, here)
        up = tl.where(top == float("inf"), tl.where(here == top, 1.0, 0.0), exp(here - top))
        down = tl.where(top == float("inf"), tl.where(high == top, 1.0, 0.0), exp(high - top))
        mass = mass * down + more * up
        high = top
    peak = tl.max(high, 0)
    scale = tl.where(peak == float("inf"), tl.where(high == peak, 1.0, 0.0), exp(high - peak))
    whole = tl.sum(tl.where(mass == 0, 0.0, mass * scale), 0)
    some = (peak > LOWEST) & (peak < float("inf"))
    whole = tl.where(peak == float("inf"), whole * float("inf"), whole)
    peak = tl.where(some, peak, 0.0)
    count = _total(numbers_ptr + 2 * rows, rows, BLOCK)
    known = (count > 0) & ((whole > 0) | (whole != whole))
    tl.store(result_ptr, peak)
    tl.store(result_ptr + 1, tl.log(tl.where(known, whole / count, 1.0)))
    tl.store(result_ptr + 2, known.to(tl.float32))
    tl.store(result_ptr + 3, tl.where(known, 1.0 / tl.where(known, whole, 1.0), 0.0))


@triton.jit
def _quotient(x, share, live, peak, log_c):
    """The loss of classes and its slope by log q, where they take part."""
    q = (x - peak) - log_c
    term = tl.where(q < 0, 0.0, q) - tl.where(share > 0, share * q, 0.0)
    return tl.where(live, term, 0.0), tl.where(live, (q >= 0).to(tl.float32) - share, 0.0)


# numbers: for each row its loss, and the sum of the slopes.
@triton.jit(do_not_specialize=["rows", "n", "width"])
def quasibinary_loss(x_ptr, d_ptr, numbers_ptr, result_ptr, rows, n, width, TARGET: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    peak = tl.load(result_ptr)
    log_c = tl.load(result_ptr + 1)
    known = tl.load(result_ptr + 2) > 0
    loss = tl.zeros((BLOCK,), tl.float32)
    slopes = tl.zeros((BLOCK,), tl.float32)
    for j in range(0, n, BLOCK):
        x, share, live = load_classes(x_ptr, d_ptr, row, n, width, j + tl.arange(0, BLOCK), TARGET)
        term, slope = _quotient(x, share, live, peak, log_c)
        loss += term
        slopes += slope
    tl.store(numbers_ptr + row, tl.where(known, tl.sum(loss, 0), 0.0))
    tl.store(numbers_ptr + rows + row, tl.where(known, tl.sum(slopes, 0), 0.0))


# In the end the last number of the result is the factor of the exponentials in the gradient of the reduced loss.
@triton.jit(do_not_specialize=["rows"])
def quasibinary_total(numbers_ptr, total_ptr, result_ptr, rows, factor, BLOCK: tl.constexpr):
    tl.store(total_ptr, _total(numbers_ptr, rows, BLOCK) * factor)
    slopes = _total(numbers_ptr + rows, rows, BLOCK) * factor
    tl.store(result_ptr + 3, -slopes * tl.load(result_ptr + 3))


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
def _added(total, ahead, weight):
    """Add weight exp(ahead) to a sum of exponentials about a point, or about the new one where that is ahead of it."""
    e = exp(-tl.abs(ahead))
    return tl.where(ahead > 0, total * e + weight, total + weight * e)


@triton.jit
def _log_sums(x, share, live, weight, high, low, above, below, odd, warm, cool):
    """Add scores to the sums of exponentials about the largest negative and the smallest positive so far.

    Here `warm` and `cool` are one over the temperatures.
    """
    positive = share > 0
    negative = live & (share < 1)
    nan = x != x
    odd = odd | ((positive & nan) | (negative & (nan | (x == float("inf"))))).to(tl.int32)
    known = tl.where(tl.abs(x) < float("inf"), x, 0.0)
    positive = positive & (x != float("inf"))  # such a positive is above all negatives
    point = tl.where(negative, known, LOWEST)
    above = _added(above, (point - high) * cool, tl.where(negative, weight * (1 - share), 0.0))
    high = tl.maximum(high, point)
    point = tl.where(positive, known, -LOWEST)
    below = _added(below, (low - point) * warm, tl.where(positive, weight * share, 0.0))
    low = tl.minimum(low, point)
    return high, low, above, below, odd


@triton.jit
def _two_way(high, low, above, below, odd, warm, cool, margin):
    """The loss of rows or columns, what its gradient needs (peaks, and slopes over the sums), and if one is positive.

    The sums are taken over the first dimension.
    """
    top = tl.max(high, 0)
    bottom = tl.min(low, 0)
    above = tl.sum(above * exp((high - top) / cool), 0)
    below = tl.sum(below * exp((bottom - low) / warm), 0)
    has_positive = bottom < -LOWEST
    active = has_positive & (top > LOWEST)
    z = (top - bottom) + cool * tl.log(above) + warm * tl.log(below) + margin
    z = tl.where(tl.max(odd, 0) > 0, float("nan"), z)
    e = exp(-tl.abs(z))
    slope = tl.where(z < 0, e, 1.0) / (1 + e)
    slope = tl.where(z == z, slope, z)
    loss = tl.where(active, tl.maximum(z, 0.0) + log1p(e), 0.0)
    loss = tl.where(active & (z != z), z, loss)
    return (
        loss,
        tl.where(active, top, 0.0),
        tl.where(active, bottom, 0.0),
        tl.where(active, slope / above, 0.0),
        tl.where(active, slope / below, 0.0),
        has_positive.to(tl.float32),
    )


# numbers, for each row or column: its loss, whether it has a positive, the peaks of negatives and positives, and the
# slopes over the sums about them.
@triton.jit
def _store_line(numbers_ptr, line, lines, loss, top, bottom, by, less, has_positive):
    inside = line < lines
    tl.store(numbers_ptr + line, loss, mask=inside)
    tl.store(numbers_ptr + lines + line, has_positive, mask=inside)
    tl.store(numbers_ptr + 2 * lines + line, top, mask=inside)
    tl.store(numbers_ptr + 3 * lines + line, bottom, mask=inside)
    tl.store(numbers_ptr + 4 * lines + line, by, mask=inside)
    tl.store(numbers_ptr + 5 * lines + line, less, mask=inside)


@triton.jit(do_not_specialize=["rows", "n", "width"])
def two_way_lines(
    x_ptr, d_ptr, numbers_ptr, rows, n, width, warm, cool, margin,
    TARGET: tl.constexpr, COLUMNS: tl.constexpr, LONG: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The two-way loss of WIDE rows, or of WIDE columns, in steps of LONG scores of each."""
    line = tl.program_id(0).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    high = tl.full((LONG, WIDE), LOWEST, tl.float32)
    low = tl.full((LONG, WIDE), -LOWEST, tl.float32)
    above = tl.zeros((LONG, WIDE), tl.float32)
    below = tl.zeros((LONG, WIDE), tl.float32)
    odd = tl.zeros((LONG, WIDE), tl.int32)
    lines = rows
    length = n
    if COLUMNS:
        lines = n
        length = rows
    for i in range(0, length, LONG):
        place = (i + tl.arange(0, LONG)).to(tl.int64)
        inside = (place < length)[:, None] & (line < lines)[None, :]
        if COLUMNS:
            row = place[:, None]
            col = line[None, :]
        else:
            row = line[None, :]
            col = place[:, None]
        at = row * n + col
        x = tl.load(x_ptr + at, mask=inside, other=float("-inf")).to(tl.float32)
        share = tl.zeros((LONG, WIDE), tl.float32)
        if TARGET == "dense":
            given = tl.load(d_ptr + at, mask=inside, other=0).to(tl.float32)
            share = tl.where(given >= 0, tl.minimum(given, 1.0), -1.0)
        if TARGET == "lists":
            for j in range(width):
                label = tl.load(d_ptr + row * width + j, mask=row < rows, other=-1)
                share = tl.where(col == label, 1.0, share)
        live = (x != float("-inf")) & (share >= 0)
        x = tl.where(live, x, 0.0)
        share = tl.where(live, share, 0.0)
        high, low, above, below, odd = _log_sums(x, share, live, 1.0, high, low, above, below, odd, 1 / warm, 1 / cool)
    loss, top, bottom, by, less, has_positive = _two_way(high, low, above, below, odd, warm, cool, margin)
    _store_line(numbers_ptr, line, lines, loss, top, bottom, by, less, has_positive)


# result: the factor of the gradients of the rows, and that of the columns.
@triton.jit(do_not_specialize=["rows", "n"])
def two_way_total(r_ptr, c_ptr, total_ptr, result_ptr, rows, n, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """The loss of the rows, and for each row with a positive the mean of the columns'; or the mean over such rows."""
    count = _total(r_ptr + rows, rows, BLOCK)
    over = 1.0 / tl.maximum(_total(c_ptr + n, n, BLOCK), 1.0)
    factor = tl.full((), 1.0, tl.float32)
    if MEAN:
        factor = 1.0 / tl.maximum(count, 1.0)
    by_class = tl.where(count > 0, _total(c_ptr, n, BLOCK) * over, 0.0)
    tl.store(total_ptr, _total(r_ptr, rows, BLOCK) * factor + by_class * (count * factor))
    tl.store(result_ptr, factor)
    tl.store(result_ptr + 1, count * factor * over)


@triton.jit
def _pushes(x, share, live, top, bottom, by, less, warm, cool):
    """The gradient of a loss of rows or columns; `warm` and `cool` as in `_log_sums`."""
    push = tl.where(live & (share < 1), (1 - share) * exp((x - top) * cool) * by, 0.0)
    pull = tl.where(share > 0, share * exp((bottom - x) * warm) * less, 0.0)
    return tl.where(by == 0, 0.0, push) - tl.where(less == 0, 0.0, pull)  # exp may have overflowed


@triton.jit(do_not_specialize=["rows", "n", "width"])
def two_way_backward(
    x_ptr, d_ptr, up_ptr, r_ptr, c_ptr, result_ptr, out_ptr, rows, n, width, warm, cool,
    TARGET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    up = tl.load(up_ptr).to(tl.float32)
    own = tl.load(result_ptr) * up
    shared = tl.load(result_ptr + 1) * up
    top = tl.load(r_ptr + 2 * rows + row)
    bottom = tl.load(r_ptr + 3 * rows + row)
    by = tl.load(r_ptr + 4 * rows + row)
    less = tl.load(r_ptr + 5 * rows + row)
    warm = 1 / warm
    cool = 1 / cool
    for j in range(0, n, BLOCK):
        cols = j + tl.arange(0, BLOCK)
        inside = cols < n
        x, share, live = load_classes(x_ptr, d_ptr, row, n, width, cols, TARGET)
        value = own * _pushes(x, share, live, top, bottom, by, less, warm, cool)
        value += shared * _pushes(
            x,
            share,
            live,
            tl.load(c_ptr + 2 * n + cols, mask=inside, other=0.0),
            tl.load(c_ptr + 3 * n + cols, mask=inside, other=0.0),
            tl.load(c_ptr + 4 * n + cols, mask=inside, other=0.0),
            tl.load(c_ptr + 5 * n + cols, mask=inside, other=0.0),
            warm,
            cool,
        )
        store_row(out_ptr, row, n, cols, value)
