"""Losses on the GPU, each with its gradient, in one pass or a few over rows of any length.

All kernels of `fused` have one signature, and compute a row as plain torch does, with infinite scores and nan too.
Those of losses multiply the gradient by `scale`, a number.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import triton
import triton.language as tl

from lastlayer._triton.device import exp, is_finite, log1p_part, log1p_series, rcp, sum2


@triton.jit
def load_scores(x_ptr, row, n, cols):
    """Scores in float32, -inf where there is no class."""
    return tl.load(x_ptr + (row * n + cols), mask=cols < n, other=float("-inf")).to(tl.float32)


@triton.jit
def load_shares(d_ptr, row, n, width, cols, TARGET: tl.constexpr):
    """The label's share of each class, 0 to 1, and -1 where that is unknown."""
    share = (cols * 0).to(tl.float32)
    if TARGET == "dense":
        given = tl.load(d_ptr + (row * n + cols), mask=cols < n, other=0).to(tl.float32)
        share = tl.where(given >= 0, tl.minimum(given, 1.0), -1.0)
    if TARGET == "lists":
        for i in range(width):
            share = tl.where(cols == tl.load(d_ptr + row * width + i), 1.0, share)
    return share


@triton.jit
def load_classes(x_ptr, d_ptr, row, n, width, cols, TARGET: tl.constexpr):
    """Scores, 0 where a class takes no part; the label's share, 0 there too; and which classes take part."""
    x = load_scores(x_ptr, row, n, cols)
    share = load_shares(d_ptr, row, n, width, cols, TARGET)
    live = (x != float("-inf")) & (share >= 0)  # nan takes part, and shows
    return tl.where(live, x, 0.0), tl.where(live, share, 0.0), live


@triton.jit
def load_weight(w_ptr, row, w_row, w_col, n, cols):
    """The weights of classes; None is 1."""
    if w_ptr is None:
        return (cols * 0).to(tl.float32) + 1.0
    else:
        return tl.load(w_ptr + (row * w_row + cols * w_col), mask=cols < n, other=0).to(tl.float32)


@triton.jit
def logistics(z):
    """log(1 + e^z) and log(1 + e^-z), then the sigmoid of z and that of -z, from one exponential; nan as z is."""
    e = exp(-tl.abs(z))
    rest = log1p_part(e)
    over = rcp(1.0 + e)
    low = z < 0
    return (
        tl.maximum(z, 0.0) + rest,
        tl.maximum(-z, 0.0) + rest,
        tl.where(low, e * over, over),
        tl.where(low, over, e * over),
    )


@triton.jit
def softplus(z):
    """log(1 + e^z); infinite and nan as z is."""
    return tl.maximum(z, 0.0) + log1p_part(exp(-tl.abs(z)))


@triton.jit
def sigmoids(z):
    """The sigmoid of z, and that of -z."""
    e = exp(-tl.abs(z))
    over = rcp(1.0 + e)
    return tl.where(z < 0, e * over, over), tl.where(z < 0, over, e * over)


@triton.jit
def mixed(share, yes, no, HARD: tl.constexpr):
    """Choose a term for each class; a soft label takes its share of both."""
    if HARD:
        return tl.where(share > 0, yes, no)
    else:
        return share * yes + (1 - share) * no


@triton.jit
def budget_terms(x, share, center, delta):
    """The terms of the Fenchel-Young loss of lml for scores about nu = delta - center, and their slopes.

    At both ends of nu, y is 0 or 1 everywhere and the loss <y - share, x>: infinite if a label is ruled out, or if a
    class at +inf is no label.
    """
    finite = is_finite(x)
    z = (x - center) + delta
    wrong = tl.where(x == float("inf"), (share < 1).to(tl.int32), (share > 0).to(tl.int32)) > 0
    odd = tl.where(x == x, tl.where(wrong, float("inf"), 0.0), x)
    if tl.abs(delta) == float("inf"):
        slope = tl.where(delta > 0, 1.0, 0.0) - share
        term = slope * x
    else:
        e = exp(-tl.abs(z))
        over = rcp(1 + e)
        term = log1p_part(e) + (tl.maximum(z, 0.0) - share * z)
        slope = (1 - share) * tl.where(z < 0, e * over, over) - share * tl.where(z < 0, over, e * over)
    slope = tl.where(finite, slope, 0.0)
    return tl.where(finite, term, odd), tl.where(delta == delta, slope, float("nan"))


@triton.jit
def store_row(out_ptr, row, n, cols, value):
    tl.store(out_ptr + (row * n + cols), value.to(out_ptr.dtype.element_ty), mask=cols < n)


@triton.jit(do_not_specialize=["rows", "n", "width", "f_row", "e_row", "p_row"])
def blank(
    x_ptr, d_ptr, e_ptr, p_ptr, f_ptr, s_ptr, loss_ptr, out_ptr, counts_ptr, extra_ptr, rows, n, width,
    e_row, e_col, p_row, p_col, f_row, number0, number1, number2, number3, scale,
    TARGET: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Do nothing: the launcher of this kernel, quickly compiled, is that of the others."""


# number0 is what smoothing moves to an even chance.
@triton.jit(do_not_specialize=["rows", "width", "f_row"])
def logistic(
    x_ptr, d_ptr, e_ptr, p_ptr, f_ptr, s_ptr, loss_ptr, out_ptr, counts_ptr, extra_ptr, rows, n, width,
    e_row, e_col, p_row, p_col, f_row, number0, number1, number2, number3, scale,
    TARGET: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of log(1 + exp(-x)) for labels and log(1 + exp(x)) for the rest, one sigmoid per class."""
    row = tl.program_id(0).to(tl.int64)
    loss = tl.zeros((BLOCK,), tl.float32)
    some = tl.zeros((BLOCK,), tl.int32)
    for j in range(0, n, BLOCK):
        cols = j + tl.arange(0, BLOCK)
        x, share, live = load_classes(x_ptr, d_ptr, row, n, width, cols, TARGET)
        each = load_weight(e_ptr, row, e_row, e_col, n, cols)
        plus = load_weight(p_ptr, row, p_row, p_col, n, cols)
        no, yes, p, miss = logistics(x)
        yes = yes * plus
        down = -miss * plus
        term = mixed(share, yes, no, HARD)
        slope = mixed(share, down, p, HARD)
        if number0 > 0:
            term = (1 - number0) * term + 0.5 * number0 * (yes + no)
            slope = (1 - number0) * slope + 0.5 * number0 * (down + p)
        loss += tl.where(live, each * term, 0.0)
        some |= live.to(tl.int32)
        if GRADIENT:
            store_row(out_ptr, row, n, cols, tl.where(live, scale * (each * slope), 0.0))
    loss, some = sum2(loss, some.to(tl.float32), 0)
    tl.store(loss_ptr + row, loss)
    tl.store(counts_ptr + row, (some > 0).to(tl.int8))


# first and second: the center and delta of each row. The mask takes the place of the weights.
@triton.jit(do_not_specialize=["rows", "width", "f_row"])
def shifted(
    x_ptr, d_ptr, e_ptr, p_ptr, f_ptr, s_ptr, loss_ptr, out_ptr, counts_ptr, extra_ptr, rows, n, width,
    e_row, e_col, p_row, p_col, f_row, number0, number1, number2, number3, scale,
    TARGET: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As `logistic` for scores x + nu, where a class ruled out has the loss of an infinite score."""
    row = tl.program_id(0).to(tl.int64)
    center = tl.load(f_ptr + row * f_row)
    delta = tl.load(s_ptr + row * f_row)
    loss = tl.zeros((BLOCK,), tl.float32)
    some = tl.zeros((BLOCK,), tl.int32)
    for j in range(0, n, BLOCK):
        cols = j + tl.arange(0, BLOCK)
        x = load_scores(x_ptr, row, n, cols)
        share = tl.maximum(load_shares(d_ptr, row, n, width, cols, TARGET), 0.0)
        if e_ptr is not None:
            x = tl.where(load_weight(e_ptr, row, e_row, e_col, n, cols) > 0, x, float("-inf"))
        term, slope = budget_terms(x, share, center, delta)
        loss += tl.where(cols < n, term, 0.0)
        some |= (x != float("-inf")).to(tl.int32)
        if GRADIENT:
            store_row(out_ptr, row, n, cols, scale * slope)
    loss, some = sum2(loss, some.to(tl.float32), 0)
    tl.store(loss_ptr + row, loss)
    tl.store(counts_ptr + row, (some > 0).to(tl.int8))


@triton.jit
def _powers(base, exponent):
    """base^exponent for base >= 0, and one power less: by products where the exponent is a small whole number."""
    whole = tl.floor(exponent)
    out = base * 0.0 + 1.0
    less = base * 0.0
    if (whole == exponent) & (exponent <= 16):
        for _ in range(whole.to(tl.int32)):
            less = out
            out = out * base
    else:
        some = tl.where(base > 0, base, 1.0)
        out = tl.where(base > 0, exp(exponent * tl.log(some)), base)
        less = out / some
    return out, less


# number: the powers of labels and of the rest, clip, and 1 where the powers have a gradient, else 0.
@triton.jit(do_not_specialize=["rows", "width", "f_row"])
def asymmetric(
    x_ptr, d_ptr, e_ptr, p_ptr, f_ptr, s_ptr, loss_ptr, out_ptr, counts_ptr, extra_ptr, rows, n, width,
    e_row, e_col, p_row, p_col, f_row, number0, number1, number2, number3, scale,
    TARGET: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(1 - p)^plus log(1 / p) for labels, m^minus log(1 / (1 - m)) with m = max(p - clip, 0) for the rest."""
    row = tl.program_id(0).to(tl.int64)
    clip = number2
    loss = tl.zeros((BLOCK,), tl.float32)
    some = tl.zeros((BLOCK,), tl.int32)
    for j in range(0, n, BLOCK):
        cols = j + tl.arange(0, BLOCK)
        x, share, live = load_classes(x_ptr, d_ptr, row, n, width, cols, TARGET)
        each = load_weight(e_ptr, row, e_row, e_col, n, cols)
        plus = load_weight(p_ptr, row, p_row, p_col, n, cols)
        flat, up, p, miss = logistics(x)
        full, _ = _powers(miss, number0)
        yes = full * up * plus
        # A cost above 1000 comes with a probability of 0 or 1: no infinity may meet the factor that is 0 there.
        down = -full * (miss + number3 * number0 * p * tl.minimum(up, 1000.0)) * plus
        easy = p <= clip
        m = tl.where(easy, 0.0, p - clip)
        # 1 - m from the side that does not cancel.
        left = tl.where(x > 0, miss + clip, 1 - m)
        cost = tl.where((m < 0.03) & (x <= 0), -log1p_series(-m), -tl.log(left))
        turn = p * (miss * rcp(left))
        if clip == 0:
            cost = flat
            turn = p
        full, less = _powers(m, number1)
        no = tl.where(easy, 0.0, full * cost)
        rise = tl.where(easy, 0.0, full * turn + number3 * number1 * (less * tl.minimum(cost, 1000.0)) * (p * miss))
        loss += tl.where(live, each * mixed(share, yes, no, HARD), 0.0)
        some |= live.to(tl.int32)
        if GRADIENT:
            value = each * mixed(share, down, rise, HARD)
            store_row(out_ptr, row, n, cols, tl.where(live, scale * value, 0.0))
    loss, some = sum2(loss, some.to(tl.float32), 0)
    tl.store(loss_ptr + row, loss)
    tl.store(counts_ptr + row, (some > 0).to(tl.int8))


@triton.jit
def _strange(x, positive, negative):
    """Where a score has no place in the sums: nan, and +inf among the negatives."""
    nan = x != x
    return (positive & nan) | (negative & (nan | (x == float("inf"))))


@triton.jit
def _lead(high, low, above, below, bad, warm, cool, margin):
    """The loss of rows or columns, its slopes by either sum, and whether there is a positive."""
    has_positive = low != float("inf")
    active = has_positive & (high != float("-inf"))
    z = (high - low) + cool * tl.log(above) + warm * tl.log(below) + margin
    z = tl.where(bad > 0, float("nan"), z)
    slope, _ = sigmoids(z)
    by = tl.where(active, slope / above, 0.0)
    less = tl.where(active, slope / below, 0.0)
    return tl.where(active, softplus(z), 0.0), by, less, has_positive


# number: the temperatures of positives and of negatives, and the margin.
@triton.jit(do_not_specialize=["rows", "width", "f_row"])
def two_way_rows(
    x_ptr, d_ptr, e_ptr, p_ptr, f_ptr, s_ptr, loss_ptr, out_ptr, counts_ptr, extra_ptr, rows, n, width,
    e_row, e_col, p_row, p_col, f_row, number0, number1, number2, number3, scale,
    TARGET: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every positive of a row above every negative."""
    row = tl.program_id(0).to(tl.int64)
    warm = number0
    cool = number1
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    lowest = tl.full((BLOCK,), float("inf"), tl.float32)
    odd = tl.zeros((BLOCK,), tl.int32)
    for j in range(0, n, BLOCK):
        cols = j + tl.arange(0, BLOCK)
        x, share, live = load_classes(x_ptr, d_ptr, row, n, width, cols, TARGET)
        positive = share > 0
        negative = live & (share < 1)
        odd |= _strange(x, positive, negative).to(tl.int32)
        known = tl.where(x == x, x, 0.0)
        highest = tl.maximum(highest, tl.where(negative, known, float("-inf")))
        lowest = tl.minimum(lowest, tl.where(positive, known, float("inf")))
    high = tl.max(highest, 0)
    low = tl.min(lowest, 0)
    above = tl.zeros((BLOCK,), tl.float32)
    below = tl.zeros((BLOCK,), tl.float32)
    for j in range(0, n, BLOCK):
        cols = j + tl.arange(0, BLOCK)
        x, share, live = load_classes(x_ptr, d_ptr, row, n, width, cols, TARGET)
        above += tl.where(live & (share < 1), (1 - share) * exp((x - high) / cool), 0.0)
        below += tl.where(share > 0, share * exp((low - x) / warm), 0.0)
    loss, by, less, has_positive = _lead(
        high, low, tl.sum(above, 0), tl.sum(below, 0), tl.max(odd, 0), warm, cool, number2
    )
    tl.store(loss_ptr + row, loss)
    tl.store(counts_ptr + row, has_positive.to(tl.int8))
    if GRADIENT:
        active = has_positive & (high != float("-inf"))
        for j in range(0, n, BLOCK):
            cols = j + tl.arange(0, BLOCK)
            x, share, live = load_classes(x_ptr, d_ptr, row, n, width, cols, TARGET)
            push = tl.where(live & (share < 1), (1 - share) * exp((x - high) / cool) * by, 0.0)
            pull = tl.where(share > 0, share * exp((low - x) / warm) * less, 0.0)
            store_row(out_ptr, row, n, cols, tl.where(active, push - pull, 0.0))


@triton.jit
def _load_strip(x_ptr, d_ptr, f_ptr, row, rows, n, width, f_row, cols, TARGET: tl.constexpr):
    """Scores, shares and participation of a tile of rows and columns, and the weights of the rows."""
    inside = (row < rows)[:, None] & (cols < n)[None, :]
    at = row[:, None] * n + cols[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=float("-inf")).to(tl.float32)
    share = (at * 0).to(tl.float32)
    if TARGET == "dense":
        given = tl.load(d_ptr + at, mask=inside, other=0).to(tl.float32)
        share = tl.where(given >= 0, tl.minimum(given, 1.0), -1.0)
    if TARGET == "lists":
        for i in range(width):
            label = tl.load(d_ptr + row * width + i, mask=row < rows, other=-1)
            share = tl.where(cols[None, :] == label[:, None], 1.0, share)
    live = (x != float("-inf")) & (share >= 0)
    weight = (row * 0).to(tl.float32) + 1.0
    if f_ptr is not None:
        weight = tl.load(f_ptr + row * f_row, mask=row < rows, other=0).to(tl.float32)
        live = live & (weight > 0)[:, None]
    return tl.where(live, x, 0.0), tl.where(live, share, 0.0), live, weight[:, None], at, inside


# first: the weights of the rows. BLOCK columns per program.
@triton.jit(do_not_specialize=["rows", "width", "f_row"])
def two_way_columns(
    x_ptr, d_ptr, e_ptr, p_ptr, f_ptr, s_ptr, loss_ptr, out_ptr, counts_ptr, extra_ptr, rows, n, width,
    e_row, e_col, p_row, p_col, f_row, number0, number1, number2, number3, scale,
    TARGET: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every positive of a column above every negative."""
    ROWS: tl.constexpr = 1024 // BLOCK
    cols = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    warm = number0
    cool = number1
    highest = tl.full((ROWS, BLOCK), float("-inf"), tl.float32)
    lowest = tl.full((ROWS, BLOCK), float("inf"), tl.float32)
    odd = tl.zeros((ROWS, BLOCK), tl.int32)
    for i in range(0, rows, ROWS):
        row = (i + tl.arange(0, ROWS)).to(tl.int64)
        x, share, live, _, _, _ = _load_strip(x_ptr, d_ptr, f_ptr, row, rows, n, width, f_row, cols, TARGET)
        positive = share > 0
        negative = live & (share < 1)
        odd |= _strange(x, positive, negative).to(tl.int32)
        known = tl.where(x == x, x, 0.0)
        highest = tl.maximum(highest, tl.where(negative, known, float("-inf")))
        lowest = tl.minimum(lowest, tl.where(positive, known, float("inf")))
    high = tl.max(highest, 0)
    low = tl.min(lowest, 0)
    above = tl.zeros((ROWS, BLOCK), tl.float32)
    below = tl.zeros((ROWS, BLOCK), tl.float32)
    for i in range(0, rows, ROWS):
        row = (i + tl.arange(0, ROWS)).to(tl.int64)
        x, share, live, weight, _, _ = _load_strip(x_ptr, d_ptr, f_ptr, row, rows, n, width, f_row, cols, TARGET)
        push = weight * (1 - share) * exp((x - high[None, :]) / cool)
        pull = weight * share * exp((low[None, :] - x) / warm)
        above += tl.where(live & (share < 1), push, 0.0)
        below += tl.where(share > 0, pull, 0.0)
    loss, by, less, has_positive = _lead(
        high, low, tl.sum(above, 0), tl.sum(below, 0), tl.max(odd, 0), warm, cool, number2
    )
    tl.store(loss_ptr + cols, loss, mask=cols < n)
    tl.store(counts_ptr + cols, has_positive.to(tl.int8), mask=cols < n)
    if GRADIENT:
        active = has_positive & (high != float("-inf"))
        for i in range(0, rows, ROWS):
            row = (i + tl.arange(0, ROWS)).to(tl.int64)
            x, share, live, weight, at, inside = _load_strip(
                x_ptr, d_ptr, f_ptr, row, rows, n, width, f_row, cols, TARGET
            )
            push = weight * (1 - share) * exp((x - high[None, :]) / cool) * by[None, :]
            pull = weight * share * exp((low[None, :] - x) / warm) * less[None, :]
            value = tl.where(live & (share < 1), push, 0.0) - tl.where(share > 0, pull, 0.0)
            value = tl.where(active[None, :], value, 0.0)
            tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "width", "f_row"])
def logsumexp(
    x_ptr, d_ptr, e_ptr, p_ptr, f_ptr, s_ptr, loss_ptr, out_ptr, counts_ptr, extra_ptr, rows, n, width,
    e_row, e_col, p_row, p_col, f_row, number0, number1, number2, number3, scale,
    TARGET: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The logarithm of the sum of exponentials, less the largest score; extra: that score, and the shares."""
    row = tl.program_id(0).to(tl.int64)
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    labels = tl.zeros((BLOCK,), tl.float32)
    odd = tl.zeros((BLOCK,), tl.int32)
    for j in range(0, n, BLOCK):
        cols = j + tl.arange(0, BLOCK)
        x, share, live = load_classes(x_ptr, d_ptr, row, n, width, cols, TARGET)
        odd |= (x != x).to(tl.int32)
        highest = tl.maximum(highest, tl.where(live & (x == x), x, float("-inf")))
        labels += share
    peak = tl.where(tl.max(odd, 0) > 0, float("nan"), tl.max(highest, 0))
    some = peak != float("-inf")
    peak = tl.where(some, peak, 0.0)
    mass = tl.zeros((BLOCK,), tl.float32)
    for j in range(0, n, BLOCK):
        cols = j + tl.arange(0, BLOCK)
        x, share, live = load_classes(x_ptr, d_ptr, row, n, width, cols, TARGET)
        mass += tl.where(live, exp(x - peak), 0.0)
    total = tl.where(some, tl.sum(mass, 0), 1.0)
    tl.store(loss_ptr + row, tl.where(peak == float("inf"), 0.0, tl.log(total)))
    tl.store(counts_ptr + row, some.to(tl.int8))
    tl.store(extra_ptr + 2 * row, peak)
    tl.store(extra_ptr + 2 * row + 1, tl.sum(labels, 0))
    if GRADIENT:
        for j in range(0, n, BLOCK):
            cols = j + tl.arange(0, BLOCK)
            x, share, live = load_classes(x_ptr, d_ptr, row, n, width, cols, TARGET)
            store_row(out_ptr, row, n, cols, tl.where(live, exp(x - peak) / total, 0.0))


# first and second: two numbers that are subtracted from all scores, one after the other.
@triton.jit(do_not_specialize=["rows", "width", "f_row"])
def quasibinary(
    x_ptr, d_ptr, e_ptr, p_ptr, f_ptr, s_ptr, loss_ptr, out_ptr, counts_ptr, extra_ptr, rows, n, width,
    e_row, e_col, p_row, p_col, f_row, number0, number1, number2, number3, scale,
    TARGET: tl.constexpr, HARD: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of max(q, 0) - share q; extra: the sum of the shares less the number of q >= 0."""
    row = tl.program_id(0).to(tl.int64)
    peak = tl.load(f_ptr)
    rest = tl.load(s_ptr)
    loss = tl.zeros((BLOCK,), tl.float32)
    slopes = tl.zeros((BLOCK,), tl.float32)
    for j in range(0, n, BLOCK):
        cols = j + tl.arange(0, BLOCK)
        x, share, live = load_classes(x_ptr, d_ptr, row, n, width, cols, TARGET)
        q = (x - peak) - rest
        term = tl.where(q < 0, 0.0, q) - tl.where(share > 0, share * q, 0.0)
        slope = tl.where(live, (q >= 0).to(tl.float32) - share, 0.0)
        loss += tl.where(live, term, 0.0)
        slopes -= slope
        if GRADIENT:
            store_row(out_ptr, row, n, cols, slope)
    tl.store(loss_ptr + row, tl.sum(loss, 0))
    tl.store(counts_ptr + row, 1)
    tl.store(extra_ptr + row, tl.sum(slopes, 0))
