"""`lastlayer.loss.linear` on the GPU: what a scan keeps of a block of logits, the search in it, loss and gradient."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer._triton.device import (
    COMPILED,
    LN2,
    LOG2E,
    advance,
    bracket,
    exp,
    exp2,
    is_finite,
    key_of,
    kth_largest,
    log_sigmoid,
    of_key,
    points,
    rcp,
    wide,
)
from lastlayer._triton.launch import launch
from lastlayer._triton.lml_loss import _unseen as unseen
from lastlayer._triton.lml_loss import scale_rows_ as scale_rows_
from lastlayer._triton.plan import cdiv, power_of_2

_PROGRAMS = 16384  # warps that fill the chip twice, so that it stays full to the end
_TILE = 1024  # logits that a warp scans at a time
_GRAD_BYTES = 4096  # of logits that a program of the gradient takes
_LIST = 256  # logits of a list at a time
_LABELS = 32  # labels at a time, at most
_COUNTS = tl.constexpr(3)  # of finite, +inf and nan logits, after the sums of powers
_FAR = tl.constexpr(1e30)  # a bound without effect


@triton.jit
def _count(flags):
    return tl.sum(tl.ravel(flags.to(tl.int32)), 0)


@triton.jit
def _key_of_rank(keys, rank, least, most):
    """The largest key from `least` to `most` that at least `rank` of the keys reach, by bisection."""
    lo = least.to(tl.int64)
    hi = most.to(tl.int64) + 1
    while hi - lo > 1:
        mid = (lo + hi) >> 1
        enough = _count(keys >= mid.to(tl.int32)) >= rank
        lo = tl.where(enough, mid, lo)
        hi = tl.where(enough, hi, mid)
    return lo.to(tl.int32)


@triton.jit
def _floor_kernel(x_ptr, out_ptr, n, stride, rank, SPARE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """The logit of a rank (1 is the largest) of one row; infinite logits come last.

    The last `SPARE` bits of a key are known from its sign, if the logits have 16 bits. The largest of each group are
    searched first: their rank is that of all logits, unless two of the largest are in one group.
    """
    row = tl.program_id(0).to(tl.int64)
    WIDTH: tl.constexpr = BLOCK // GROUP
    cols = tl.arange(0, GROUP)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = tl.load(x_ptr + row * stride + cols, mask=cols < n, other=float("-inf")).to(tl.float32)
    keys = key_of(tl.where(is_finite(x), x, float("-inf"))) >> SPARE
    largest = tl.max(keys, 0)
    most = tl.max(largest, 0)
    lo = _key_of_rank(largest, rank, tl.min(largest, 0), most)
    if _count(keys >= lo) < rank:  # there are fewer groups
        lo = _key_of_rank(keys, rank, tl.min(tl.min(keys, 0), 0), most)
    elif _count(keys > lo) >= rank:
        lo = _key_of_rank(keys, rank, lo, most)
    found = lo << SPARE
    tl.store(out_ptr + row, of_key(tl.where(lo < 0, found | ((1 << SPARE) - 1), found)))


@triton.jit
def _from_the_end():
    """The part of a row that a program takes: the last classes first, which the product has just left in the cache."""
    return tl.num_programs(1) - 1 - tl.program_id(1)


@triton.jit
def _lane_sums(tile):
    """The sum over the part of a tile (32, V) that each thread of a warp holds."""
    return tl.sum(tile, 1)


@triton.jit
def _add(ptr, values):
    """Add to a number that no other program touches, as blocks follow one another."""
    tl.store(ptr, tl.load(ptr) + tl.sum(values, 0))


@triton.jit
def _load_scan(x_ptr, cols, n, LOW: tl.constexpr):
    """A tile of logits; beyond the row a finite number that is above no floor and has no weight."""
    return tl.load(x_ptr + cols, mask=cols < n, other=LOW)


@triton.jit
def _any(flags):
    return tl.max(flags.to(tl.int32), 0) > 0  # one instruction for a warp


@triton.jit
def _take_above(
    x, cols, n, floor, top_ptr, fill_ptr, room, class_ptr, start, NAMED: tl.constexpr, LOW: tl.constexpr
):  # fmt: skip
    """Move the finite logits above the floor to the list of their row, and their classes to another; return the rest.

    In place of a logit that is taken out there is one without weight.
    """
    if _any(tl.max(x, 1) > floor):
        above = (x > floor) & (cols < n)
        listed = above & (x < float("inf"))
        one = tl.full(above.shape, 1, tl.int32)
        slot = tl.atomic_add(fill_ptr + tl.zeros_like(cols), one, mask=listed, sem="relaxed")
        tl.store(top_ptr + slot, x, mask=listed & (slot < room))
        if NAMED:
            tl.store(class_ptr + slot, start + cols, mask=listed & (slot < room))
        x = tl.where(above, LOW, x)
    return x


@triton.jit
def _find_odd(odd, x):
    """Add 0 times the logits: nan where one was not finite. Those of 16 bits go in pairs, as 0 has no rounding."""
    if COMPILED:
        if x.dtype == tl.bfloat16:
            odd = tl.inline_asm_elementwise(
                "{ .reg .b32 z; mov.b32 z, 0; fma.rn.bf16x2 $0, $1, z, $2; }",
                "=r,r,r",
                [x, odd],
                dtype=tl.bfloat16,
                is_pure=True,
                pack=2,
            )
        elif x.dtype == tl.float16:
            odd = tl.inline_asm_elementwise(
                "{ .reg .b32 z; mov.b32 z, 0; fma.rn.f16x2 $0, $1, z, $2; }",
                "=r,r,r",
                [x, odd],
                dtype=tl.float16,
                is_pure=True,
                pack=2,
            )
        else:
            odd = tl.fma(x, 0.0, odd)
    else:
        odd += x.to(tl.float32) * 0
    return odd


@triton.jit
def _add_powers(x, shift, p1, p2, p3, p4, p5, p6, p7, p8, TERMS: tl.constexpr):
    """Add the powers of 2^(x log2(e) - shift)."""
    w = exp2(tl.fma(x, LOG2E, -shift))
    w2 = w * w
    w4 = w2 * w2
    p1 += _lane_sums(w)
    p2 += _lane_sums(w2)
    p3 += _lane_sums(w2 * w)
    p4 += _lane_sums(w4)
    p5 += _lane_sums(w4 * w)
    if TERMS > 5:
        p6 += _lane_sums(w4 * w2)
        p7 += _lane_sums(w4 * (w2 * w))
        p8 += _lane_sums(w4 * w4)
    return p1, p2, p3, p4, p5, p6, p7, p8


@triton.jit
def _scan_kernel(
    x_ptr, floor_ptr, sums_ptr, top_ptr, fill_ptr, class_ptr, index_ptr, label_ptr,
    n, stride, span, splits, room, start, labels,
    V: tl.constexpr, NAMED: tl.constexpr, TERMS: tl.constexpr, LOW: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """A stretch of a row for one warp: no warp waits for another, a thread loads 16 bytes at once, few registers.

    With M, the first of a row takes the logits of its labels too.
    """
    W: tl.constexpr = 32 * V
    row, part = tl.program_id(0).to(tl.int64), _from_the_end()
    lo = part * span
    hi = tl.minimum(lo + span, n)
    if M > 0:  # noqa: SIM102, which is known when the kernel is compiled
        if part == 0:
            _take_labels(x_ptr, index_ptr, label_ptr, row, n, stride, labels, start, M)
    x_ptr += row * stride
    top_ptr += row * room
    fill_ptr += row
    class_ptr += row * room
    floor = tl.load(floor_ptr + row)
    base = tl.where(is_finite(floor), floor, 0.0)  # without a floor only -inf is below it
    lane = tl.arange(0, 32)[:, None] * V + tl.arange(0, V)[None, :]
    shift = base * LOG2E
    zero = tl.zeros([32], tl.float32)
    p1, p2, p3, p4, p5, p6, p7, p8 = zero, zero, zero, zero, zero, zero, zero, zero
    odd = tl.zeros([32, V], x_ptr.dtype.element_ty if COMPILED else tl.float32)
    for first in range(lo, hi, 4 * W):
        cols = first + lane
        xa = _load_scan(x_ptr, cols, n, LOW)
        xb = _load_scan(x_ptr, cols + W, n, LOW)
        xc = _load_scan(x_ptr, cols + 2 * W, n, LOW)
        xd = _load_scan(x_ptr, cols + 3 * W, n, LOW)
        odd = _find_odd(odd, xa)
        x = _take_above(wide(xa), cols, n, floor, top_ptr, fill_ptr, room, class_ptr, start, NAMED, LOW)
        p1, p2, p3, p4, p5, p6, p7, p8 = _add_powers(x, shift, p1, p2, p3, p4, p5, p6, p7, p8, TERMS)
        odd = _find_odd(odd, xb)
        x = _take_above(wide(xb), cols + W, n, floor, top_ptr, fill_ptr, room, class_ptr, start, NAMED, LOW)
        p1, p2, p3, p4, p5, p6, p7, p8 = _add_powers(x, shift, p1, p2, p3, p4, p5, p6, p7, p8, TERMS)
        odd = _find_odd(odd, xc)
        x = _take_above(wide(xc), cols + 2 * W, n, floor, top_ptr, fill_ptr, room, class_ptr, start, NAMED, LOW)
        p1, p2, p3, p4, p5, p6, p7, p8 = _add_powers(x, shift, p1, p2, p3, p4, p5, p6, p7, p8, TERMS)
        odd = _find_odd(odd, xd)
        x = _take_above(wide(xd), cols + 3 * W, n, floor, top_ptr, fill_ptr, room, class_ptr, start, NAMED, LOW)
        p1, p2, p3, p4, p5, p6, p7, p8 = _add_powers(x, shift, p1, p2, p3, p4, p5, p6, p7, p8, TERMS)
    missing = exp(tl.fma(base, LOG2E, -shift) * -LN2)  # what rounding the shift has added, as a factor
    missing2 = missing * missing
    missing4 = missing2 * missing2
    sums_ptr += (row * splits + part) * (TERMS + _COUNTS)
    _add(sums_ptr, p1 * missing)
    _add(sums_ptr + 1, p2 * missing2)
    _add(sums_ptr + 2, p3 * (missing2 * missing))
    _add(sums_ptr + 3, p4 * missing4)
    _add(sums_ptr + 4, p5 * (missing4 * missing))
    if TERMS > 5:
        _add(sums_ptr + 5, p6 * (missing4 * missing2))
        _add(sums_ptr + 6, p7 * (missing4 * missing2 * missing))
        _add(sums_ptr + 7, p8 * (missing4 * missing4))
    finite = tl.maximum(hi - lo, 0).to(tl.float32)
    if tl.sum(_lane_sums(wide(odd)), 0) != 0:
        low, high, bad = tl.zeros([32], tl.float32), tl.zeros([32], tl.float32), tl.zeros([32], tl.float32)
        for first in range(lo, hi, W):
            x = _load_scan(x_ptr, first + lane, n, LOW).to(tl.float32)
            low += _lane_sums((x == float("-inf")).to(tl.float32))
            high += _lane_sums((x == float("inf")).to(tl.float32))
            bad += _lane_sums((x != x).to(tl.float32))
        finite -= tl.sum(low + high + bad, 0)
        _add(sums_ptr + TERMS + 1, high)
        _add(sums_ptr + TERMS + 2, bad)
    tl.store(sums_ptr + TERMS, tl.load(sums_ptr + TERMS) + finite)


@triton.jit
def _take_labels(x_ptr, index_ptr, label_ptr, row, n, stride, labels, start, M: tl.constexpr):
    """Take the logits of a row's labels from a block."""
    for j in range(0, labels, M):
        place = j + tl.arange(0, M)
        col = tl.load(index_ptr + row * labels + place, mask=place < labels, other=-1) - start
        inside = (place < labels) & (col >= 0) & (col < n)
        x = tl.load(x_ptr + row * stride + col, mask=inside, other=0.0).to(tl.float32)
        tl.store(label_ptr + row * labels + place, x, mask=inside)


@triton.jit(do_not_specialize=["labels"])
def _distinct_kernel(index_ptr, out_ptr, labels, M: tl.constexpr):
    """Replace the labels of a row that an earlier one repeats by -1, M at a time."""
    here = tl.program_id(0).to(tl.int64) * labels
    for j in range(0, labels, M):
        place = j + tl.arange(0, M)
        label = tl.load(index_ptr + here + place, mask=place < labels, other=-1)
        repeats = tl.zeros((M,), tl.int32)
        for i in range(0, j + M, M):
            before = i + tl.arange(0, M)
            other = tl.load(index_ptr + here + before, mask=before < labels, other=-1)
            same = (other[:, None] == label[None, :]) & (before[:, None] < place[None, :])
            repeats = tl.maximum(repeats, tl.max(same.to(tl.int32), 0))
        tl.store(out_ptr + here + place, tl.where(repeats > 0, -1, label), mask=place < labels)


@triton.jit
def _totals(sums_ptr, splits, NUMBERS: tl.constexpr):
    """The numbers of a scan, added over the stretches of a row: shape (16,), 0 beyond."""
    i = tl.arange(0, 16)[None, :]
    total = tl.zeros((16,), tl.float64)
    for first in range(0, splits, 32):
        part = first + tl.arange(0, 32)[:, None]
        here = tl.load(sums_ptr + part * NUMBERS + i, mask=(part < splits) & (i < NUMBERS), other=0.0)
        total += tl.sum(here.to(tl.float64), 0)
    return total.to(tl.float32)


@triton.jit
def _number(totals, i):
    return tl.sum(tl.where(tl.arange(0, 16) == i, totals, 0.0), 0)


@triton.jit
def _below(totals, series_ptr, column, COLUMNS: tl.constexpr, TERMS: tl.constexpr, log_w, unit):
    """The sum of a function over the classes below the floor, by its series; `unit` is the value of one w."""
    j = tl.arange(0, 16)
    c = tl.load(series_ptr + j * COLUMNS + column, mask=j < TERMS, other=0.0)
    mass = tl.sum(tl.where(j < TERMS, totals, 0.0) * c * exp(j.to(tl.float32) * log_w), 0)
    return tl.where(mass == 0, 0.0, mass * unit)


@triton.jit
def _list_sums(top_ptr, held, center, delta, peak, BLOCK: tl.constexpr):
    """The sums of `lastlayer._threshold.search.small_parts` and of h^2 over a list.

    In float64, so that the order of the list, which is that of the programs, does not show.
    """
    zero = tl.zeros((BLOCK,), tl.float64)
    a, b, count, residual, cubic, squares = zero, zero, zero, zero, zero, zero
    factor = exp(tl.minimum(tl.maximum(delta, -60.0), 60.0))
    for j in range(0, held, BLOCK):
        i = j + tl.arange(0, BLOCK)
        d = tl.load(top_ptr + i, mask=i < held, other=float("-inf")) - center
        above = d > 0
        tail = exp(-tl.abs(d) - peak) * tl.where(above, 1 / factor, factor)
        w = tail * exp(peak)
        small = tail / (1 + w)
        w = w / (1 + w)
        outer = small * (1 - w) * (1 - w)
        inner = small * (1 - w) * w
        bend = small * w * (3 - 2 * w)
        a += tl.where(above, outer, inner).to(tl.float64)
        b += tl.where(above, inner, outer).to(tl.float64)
        count += above.to(tl.float64)
        residual += tl.where(above, -small, small).to(tl.float64)
        cubic += tl.where(above, -bend, bend).to(tl.float64)
        squares += ((outer + inner) * (outer + inner) * exp(peak)).to(tl.float64)
    return (
        tl.sum(a, 0).to(tl.float32),
        tl.sum(b, 0).to(tl.float32),
        tl.sum(count, 0).to(tl.float32),
        tl.sum(residual, 0).to(tl.float32),
        tl.sum(cubic, 0).to(tl.float32),
        tl.sum(squares, 0).to(tl.float32),
    )


@triton.jit
def _unseen_sums(top_ptr, held, center, delta, rho, BLOCK: tl.constexpr):
    """The sums of -log(1 - rho y) and of its slope over a list."""
    loss = tl.zeros((BLOCK,), tl.float64)
    slope = tl.zeros((BLOCK,), tl.float64)
    for j in range(0, held, BLOCK):
        i = j + tl.arange(0, BLOCK)
        z = points(tl.load(top_ptr + i, mask=i < held, other=float("-inf")), center, delta)
        one, leak = unseen(z, rho)
        loss += tl.where(i < held, one, 0.0).to(tl.float64)
        slope += tl.where(i < held, leak, 0.0).to(tl.float64)
    return tl.sum(loss, 0).to(tl.float32), tl.sum(slope, 0).to(tl.float32)


@triton.jit(do_not_specialize=["rows", "room", "splits", "limit", "k_row"])
def _search_kernel(
    top_ptr, fill_ptr, floor_ptr, sums_ptr, k_ptr, series_ptr, out_ptr,
    rows, room, splits, limit, k_row, log_reach, deepest, rho, every,
    COLUMNS: tl.constexpr, TERMS: tl.constexpr, RHO: tl.constexpr, PASSES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Do `lastlayer.loss._scan.find` for one row, and `add_unseen`."""
    row = tl.program_id(0).to(tl.int64)
    totals = _totals(sums_ptr + row * splits * (TERMS + _COUNTS), splits, TERMS + _COUNTS)
    n, n_top, n_nan = _number(totals, TERMS), _number(totals, TERMS + 1), _number(totals, TERMS + 2)
    first_power = _number(totals, 0)
    floor = tl.load(floor_ptr + row)
    filled = tl.load(fill_ptr + row)
    held = tl.minimum(filled, room)
    top_ptr += row * room
    k = tl.load(k_ptr + row * k_row) - n_top
    solvable = (k > 0) & (k < n) & (n_nan == 0)
    center = tl.full((), 0.0, tl.float32)
    delta = tl.where(k == 0, float("-inf"), tl.where(k == n, float("inf"), float("nan")))
    delta = tl.where(n_nan > 0, float("nan"), delta)
    log_mass = tl.full((), 0.0, tl.float32)
    lost = solvable
    if solvable & (filled <= room) & (room > 0):
        delta = tl.full((), 0.0, tl.float32)
        few = filled < tl.minimum(n, limit.to(tl.float32))
        upper = tl.full((), 0.0, tl.float32)
        lower = tl.full((), 0.0, tl.float32)
        lo = tl.full((), -_FAR, tl.float32)
        hi = tl.full((), _FAR, tl.float32)
        if few:  # without the order statistics, start as if every y were small
            center = floor + tl.log(first_power) - tl.log(k)
        else:
            upper, lower = kth_largest(top_ptr, top_ptr, 0, 0, 0, held, None, tl.ceil(k), tl.floor(k) + 1, BLOCK, False)
            center, lo, hi = bracket(upper, lower, k, n)
        left = PASSES
        while left > 0:
            peak = tl.where(few, 0.0, -tl.minimum(tl.abs(upper - center), tl.abs(lower - center)))
            a, b, count, residual, cubic, squares = _list_sums(top_ptr, held, center, delta, peak, BLOCK)
            depth = (floor - center) + delta
            log_w = tl.maximum(tl.minimum(depth, log_reach), -200.0)
            unit = exp(depth - peak)
            a += _below(totals, series_ptr, 0, COLUMNS, TERMS, log_w, unit)
            b += _below(totals, series_ptr, 1, COLUMNS, TERMS, log_w, unit)
            residual += _below(totals, series_ptr, 2, COLUMNS, TERMS, log_w, unit)
            cubic += _below(totals, series_ptr, 3, COLUMNS, TERMS, log_w, unit)
            squares += _below(totals, series_ptr, 4, COLUMNS, TERMS, log_w, unit)
            step, lo, hi, close = advance(a, b, count, residual, cubic, peak, k, lo, hi)
            close = close & ((first_power == 0) | (depth < deepest)) & (a + b > 0)
            t = tl.where(close, step, 0.0)
            mass = (a + b) + (b - a) * t + ((a + b) - 6 * squares) * t * t / 2  # sum h after the step
            log_mass = peak + tl.log(mass)
            moved = tl.where(close, center, center - (delta + step))
            delta = (delta + step) + (moved - center)
            center = moved
            lo -= step
            hi -= step
            lost = ~close
            left = tl.where(close, 0, left - 1)
    tl.store(out_ptr + row, center)
    tl.store(out_ptr + rows + row, delta)
    tl.store(out_ptr + 2 * rows + row, log_mass)
    tl.store(out_ptr + 3 * rows + row, lost.to(tl.float32))
    tl.store(out_ptr + 7 * rows, 1.0, mask=lost)  # any row may say so
    tl.store(out_ptr + 4 * rows + row, n_top)
    if RHO:
        silent, leak = _unseen_sums(top_ptr, held, center, delta, rho, BLOCK)
        depth = tl.where(is_finite(delta), (floor - center) + delta, float("-inf"))
        log_w = tl.maximum(tl.minimum(depth, log_reach), -200.0)
        silent += _below(totals, series_ptr, 5, COLUMNS, TERMS, log_w, exp(depth))
        leak += _below(totals, series_ptr, 6, COLUMNS, TERMS, log_w, exp(depth))
        silent = tl.where(delta == float("inf"), tl.where(n == 0, 0.0, n * every), silent)  # k takes every class
        tl.store(out_ptr + 5 * rows + row, silent)
        tl.store(out_ptr + 6 * rows + row, leak)


@triton.jit(do_not_specialize=["rows", "labels", "positives"])
def _loss_kernel(
    found_ptr, index_ptr, label_ptr, out_ptr, toward_ptr, rows, labels, positives, rho, every,
    RHO: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """The loss of one row, its pull on the other classes and its number of labels; and the slope at each label."""
    row = tl.program_id(0).to(tl.int64)
    center = tl.load(found_ptr + row)
    delta = tl.load(found_ptr + rows + row)
    loss = tl.zeros((M,), tl.float32)
    pull = tl.zeros((M,), tl.float32)
    count = tl.zeros((M,), tl.float32)
    tops = tl.zeros((M,), tl.float32)
    for j in range(0, labels, M):
        place = j + tl.arange(0, M)
        here = row * labels + place
        held = tl.load(index_ptr + here, mask=place < labels, other=-1) >= 0
        x = tl.load(label_ptr + here, mask=held, other=float("-inf"))
        z = points(x, center, delta)
        q = exp(-tl.abs(z))
        live = held & is_finite(x)
        positive = held & (place < positives)
        slope = tl.where(positive & live, -tl.where(z > 0, q, 1.0) / (1 + q), 0.0)
        loss += tl.where(positive, -log_sigmoid(z), 0.0)
        count += positive.to(tl.float32)
        if RHO:
            less, leak = unseen(z, rho)
            loss -= tl.where(live, less, 0.0)
            slope -= tl.where(live, leak, 0.0)
            tops += (held & (x == float("inf"))).to(tl.float32)
        slope = tl.where(is_finite(delta), slope, 0.0)
        pull -= slope
        tl.store(toward_ptr + here, slope, mask=place < labels)
    total = tl.sum(loss, 0)
    pulls = tl.sum(pull, 0)
    if RHO:
        infinite = tl.load(found_ptr + 4 * rows + row) - tl.sum(tops, 0)
        total += tl.load(found_ptr + 5 * rows + row) + tl.where(infinite == 0, 0.0, infinite * every)
        pulls -= tl.where(tl.abs(delta) == float("inf"), 0.0, tl.load(found_ptr + 6 * rows + row))
    tl.store(out_ptr + row, total)
    tl.store(out_ptr + rows + row, pulls)
    tl.store(out_ptr + 2 * rows + row, tl.sum(count, 0))


@triton.jit(do_not_specialize=["rows"])
def _reduce_kernel(loss_ptr, count_ptr, out_ptr, has_ptr, share_ptr, rows, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """The sum or the mean of the losses of rows with a label, which rows these are, and the share of each."""
    n = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        n += (tl.load(count_ptr + row, mask=row < rows, other=0.0) > 0).to(tl.float32)
    one = tl.full((), 1.0, tl.float32)
    if MEAN:
        one = 1 / tl.maximum(tl.sum(n, 0), 1.0)
    total = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        has = tl.load(count_ptr + row, mask=row < rows, other=0.0) > 0
        share = tl.where(has, one, 0.0)
        total += (tl.load(loss_ptr + row, mask=row < rows, other=0.0) * share).to(tl.float64)
        tl.store(has_ptr + row, has, mask=row < rows)
        tl.store(share_ptr + row, share, mask=row < rows)
    tl.store(out_ptr, tl.sum(total, 0).to(tl.float32).to(out_ptr.dtype.element_ty))


@triton.jit
def _not_below(x, center, delta, log_mass, pull, rho, least, THINNED: tl.constexpr):
    """Whether the derivative of the loss by a logit may have that size; above the threshold it may."""
    z = points(x, center, delta)
    q = exp(-tl.abs(z))
    bound = exp(-tl.abs(z) - log_mass) / ((1 + q) * (1 + q)) * tl.abs(pull)
    if THINNED:
        _, leak = unseen(z, rho)
        bound += leak
    return (z >= 0) | ((bound < least) == 0)  # and where it is nan


@triton.jit(do_not_specialize=["room", "labels", "n"])
def _mark_kernel(
    top_ptr, fill_ptr, floor_ptr, class_ptr, center_ptr, delta_ptr, mass_ptr, pull_ptr, index_ptr,
    marked_ptr, undecided_ptr, room, labels, n, rho, least,
    THINNED: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Do `lastlayer.loss.linear._few_classes` for one row."""
    row = tl.program_id(0).to(tl.int64)
    center, delta, log_mass = tl.load(center_ptr + row), tl.load(delta_ptr + row), tl.load(mass_ptr + row)
    pull, filled = tl.load(pull_ptr + row), tl.load(fill_ptr + row)
    at_floor = _not_below(tl.load(floor_ptr + row), center, delta, log_mass, pull, rho, least, THINNED)
    tl.store(undecided_ptr + row, at_floor | (filled > room))
    for j in range(0, tl.minimum(filled, room), BLOCK):
        i = j + tl.arange(0, BLOCK)
        held = i < tl.minimum(filled, room)
        x = tl.load(top_ptr + row * room + i, mask=held, other=0.0)
        place = tl.load(class_ptr + row * room + i, mask=held, other=0)
        active = held & _not_below(x, center, delta, log_mass, pull, rho, least, THINNED)
        tl.store(marked_ptr + place, 1, mask=active)
    for j in range(0, labels, M):
        i = j + tl.arange(0, M)
        place = tl.load(index_ptr + row * labels + i, mask=i < labels, other=-1)
        tl.store(marked_ptr + place, 1, mask=(place >= 0) & (place < n))


@triton.jit
def _exp2_down(z):
    """2^-|z|; the sign costs an instruction per logit unless the assembler sees it beside the power."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 t; abs.f32 t, $1; neg.f32 t, t; ex2.approx.ftz.f32 $0, t; }",
            "=r,r",
            [z],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.exp2(-tl.abs(z))


@triton.jit
def _slopes(x, center, delta, log_mass, pulled, scale, rho, THINNED: tl.constexpr):
    """The gradient of the logits x of one row where nu is not infinite, without the terms of its labels."""
    shift = center * LOG2E
    rest = delta * LOG2E - tl.fma(center, LOG2E, -shift)
    z = tl.fma(x, LOG2E, -shift) + rest  # x + nu, in powers of two
    tail = _exp2_down(z)
    both = 1 + tail
    h = rcp(both * both)  # without the factor tail
    out = tail * h * (pulled * exp(-tl.maximum(log_mass, -30.0)))
    if log_mass < -30:  # where tail would underflow
        out = exp(-tl.abs(z) * LN2 - log_mass) * h * pulled
    if THINNED:
        y = rcp(both)  # of |z|
        small = tail * y
        miss = tl.where(z > 0, small, y)
        y = tl.where(z > 0, y, small)
        leak = rho * y * miss / tl.maximum(miss + (1 - rho) * y, 2e-38)  # a subnormal constant would make it float64
        out += scale * tl.where(rho == 1.0, y, leak)
        out = tl.where(is_finite(x), out, 0.0)  # no gradient where x is infinite
        out = tl.where(delta != delta, delta, out)
    return out


@triton.jit
def _grad_kernel(
    x_ptr, center_ptr, delta_ptr, mass_ptr, pull_ptr, scale_ptr, index_ptr, label_ptr, toward_ptr, out_ptr,
    n, stride, out_stride, start, labels, rho,
    THINNED: tl.constexpr, PAIR: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of a part of a row; with PAIR of two such parts, for which the row's numbers are loaded once."""
    PARTS: tl.constexpr = 2 if PAIR else 1
    row = tl.program_id(0).to(tl.int64)
    first = _from_the_end() * (PARTS * BLOCK)
    stop = tl.minimum(first + PARTS * BLOCK, n)
    cols = first + tl.arange(0, BLOCK)
    x_ptr += row * stride
    out_ptr += row * out_stride
    x = tl.load(x_ptr + cols, mask=cols < n, other=float("-inf"))
    if PAIR:
        other = tl.load(x_ptr + BLOCK + cols, mask=cols + BLOCK < n, other=float("-inf"))
    center, delta, log_mass = tl.load(center_ptr + row), tl.load(delta_ptr + row), tl.load(mass_ptr + row)
    scale = tl.load(scale_ptr + row)
    pulled = tl.load(pull_ptr + row) * scale
    # There is no gradient where nu is infinite, or nan in a row without an upstream gradient.
    none = (tl.abs(delta) == float("inf")) | ((scale == 0) & (delta != delta))
    col, inside = _places_of(index_ptr, row, 0, labels, start, first, stop, M)
    out = tl.zeros((BLOCK,), tl.float32)
    if none == 0:
        out = _slopes(wide(x), center, delta, log_mass, pulled, scale, rho, THINNED)
    tl.store(out_ptr + cols, out.to(out_ptr.dtype.element_ty), mask=cols < n)
    if PAIR:
        out = tl.zeros((BLOCK,), tl.float32)
        if none == 0:
            out = _slopes(wide(other), center, delta, log_mass, pulled, scale, rho, THINNED)
        tl.store(out_ptr + BLOCK + cols, out.to(out_ptr.dtype.element_ty), mask=cols + BLOCK < n)
    for j in range(0, labels, M):
        if _any(inside):  # which is rare
            here = row * labels + j + tl.arange(0, M)
            label = tl.load(label_ptr + here, mask=inside, other=0.0)
            toward = tl.load(toward_ptr + here, mask=inside, other=0.0)
            at_label = _slopes(label, center, delta, log_mass, pulled, scale, rho, THINNED)
            at_label = tl.where(none, 0.0, at_label) + toward * scale
            tl.debug_barrier()  # the labels are written over what is there
            tl.store(out_ptr + col, at_label.to(out_ptr.dtype.element_ty), mask=inside)
        if j + M < labels:
            col, inside = _places_of(index_ptr, row, j + M, labels, start, first, stop, M)


@triton.jit
def _places_of(index_ptr, row, j, labels, start, first, stop, M: tl.constexpr):
    """The places in the block of up to M labels of a row from the j-th on, and whether they are in this part of it."""
    place = j + tl.arange(0, M)
    col = tl.load(index_ptr + row * labels + place, mask=place < labels, other=-1) - start
    return col, (place < labels) & (col >= first) & (col < stop)


def floors(x: Tensor, rank: int) -> Tensor:
    """Return the finite logit of a rank (1 is the largest) of each row, shape ``(rows, 1)``."""
    rows, n = x.shape
    out = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = power_of_2(n)
    options = {"SPARE": {torch.bfloat16: 16, torch.float16: 13}.get(x.dtype, 0), "GROUP": max(1, block // 512)}
    options["BLOCK"] = block
    launch(_floor_kernel, (rows,), x, out, n, x.stride(0), rank, **options, num_warps=max(1, min(4, block // 1024)))
    return out


def partial_sums(rows: int, n: int, terms: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return zeros for the sums of blocks of `n` classes, and for the length of each list.

    The sums have the shape ``(rows, programs per row, powers and counts)``.
    """
    splits = max(1, min(_PROGRAMS // max(rows, 1), cdiv(n, _TILE)))
    numbers = splits * (terms + _COUNTS.value)
    zeros = torch.zeros(rows * (numbers + 1), dtype=torch.float32, device=device)
    return zeros[: rows * numbers].view(rows, splits, -1), zeros[rows * numbers :].view(torch.int32)


def scan_block(
    x: Tensor,
    floor: Tensor,
    sums: Tensor,
    top: Tensor,
    fill: Tensor,
    classes: Tensor | None,
    start: int,
    index: Tensor | None = None,
    labels: Tensor | None = None,
) -> None:
    """Add a block that starts at class `start` to the results of a scan.

    These are sums of powers below the floor and counts, the logits above it, appended to the lists in any order, and on
    request the classes of the lists. With `index` the logits of the labels are written too.
    """
    rows, n = x.shape
    splits = sums.shape[1]
    span = cdiv(cdiv(n, splits), _TILE) * _TILE
    lists = (fill, fill) if index is None or labels is None else (index, labels)
    tensors = (x, floor, sums, top, fill, fill if classes is None else classes, *lists)
    numbers = (n, x.stride(0), span, splits, top.shape[1], start, 0 if index is None else index.shape[1])
    options = {"V": 16 // x.element_size(), "NAMED": classes is not None, "TERMS": sums.shape[2] - _COUNTS.value}
    options["M"] = 0 if index is None else _labels_at_a_time(index)
    options["LOW"] = -6e4 if x.dtype == torch.float16 else -3e38
    options["maxnreg"] = 64  # which are enough; with a few more, fewer warps run at a time
    launch(_scan_kernel, (rows, splits), *tensors, *numbers, **options, num_warps=1)


def distinct(index: Tensor) -> Tensor:
    """Drop repeats from index lists, the last dimension, as `lastlayer._check.target` does."""
    labels = index.shape[-1]
    if labels < 2 or index.numel() == 0:
        return index
    index = index.contiguous()
    out = torch.empty_like(index)
    launch(_distinct_kernel, (index.numel() // labels,), index, out, labels, M=_labels_at_a_time(index), num_warps=1)
    return out


def search(
    top: Tensor,
    fill: Tensor,
    floor: Tensor,
    sums: Tensor,
    k: Tensor,
    series: Tensor,
    limit: int,
    reach: tuple[float, float],
    passes: int,
    rho: float,
    every: float,
) -> tuple[Tensor, Tensor]:
    """Search in the results of a scan; return numbers of shape ``(7, rows)``, and whether any row is lost (1, else 0).

    The numbers are center, delta and log sum h, whether the row is lost, its number of infinite logits; and with `rho`
    the sums of ``-log(1 - rho y)`` and of its slope over the finite ones.

    Args:
        top: The lists of the logits above the floor, in any order.
        fill: The number of logits that each list holds or would hold.
        floor: The floor of each row.
        sums: Powers and counts, from `scan_block`.
        k: The cardinalities, one per row.
        series: The coefficients of the functions of a step, one per column, and of the two sums with `rho`.
        limit: The largest rank that the start needs.
        reach: The logarithms of the largest exp(x + nu) that a series takes, and of the largest for which it is exact.
        passes: The number of passes after which a row is lost.
        rho: The probability that a label is observed.
        every: ``-log(1 - rho)``.
    """
    rows, room = top.shape
    out = top.new_zeros(7 * rows + 1)
    numbers = (rows, room, sums.shape[1], limit, k.stride(0), *reach, rho, every)
    options = {"COLUMNS": series.shape[1], "TERMS": len(series), "RHO": rho > 0, "PASSES": passes, "BLOCK": _LIST}
    warps = (
        2 if rows <= 2048 else 1
    )  # few rows finish sooner if each has more warps, many if more are at work at a time
    launch(_search_kernel, (rows,), top, fill, floor, sums, k, series, out, *numbers, **options, num_warps=warps)
    return out[:-1].view(7, rows), out[-1]


def losses(
    solution: Tensor, index: Tensor, labels: Tensor, positives: int, rho: float, every: float
) -> tuple[Tensor, Tensor]:
    """Return loss, pull and number of labels, shape ``(3, rows)``, and the slope at each label.

    `solution` comes from `search`.
    """
    rows, width = index.shape
    out, toward = solution.new_empty(3, rows), torch.empty_like(labels)
    numbers = (rows, width, positives, rho, every)
    options = {"RHO": rho > 0, "M": _labels_at_a_time(index)}
    launch(_loss_kernel, (rows,), solution, index, labels, out, toward, *numbers, **options, num_warps=1)
    return out, toward


def reduce_rows(loss: Tensor, count: Tensor, dtype: torch.dtype, mean: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum or the mean over the rows with a label, which rows these are, and the share of each in it.

    Losses and numbers of labels have the shape ``(rows, 1)`` and are contiguous.
    """
    out, share = torch.empty((), dtype=dtype, device=loss.device), torch.empty_like(loss)
    has = torch.empty(len(loss), dtype=torch.bool, device=loss.device)
    tensors = (loss, count, out, has.view(torch.uint8), share)
    launch(_reduce_kernel, (1,), *tensors, len(loss), MEAN=mean, BLOCK=1024, num_warps=8)
    return out, has, share


def grad_block(
    x: Tensor,
    center: Tensor,
    delta: Tensor,
    log_mass: Tensor,
    pull: Tensor,
    scale: Tensor,
    index: Tensor,
    labels: Tensor,
    toward: Tensor,
    start: int,
    rho: float,
    out: Tensor,
) -> Tensor:
    """Write the gradient of a block that starts at class `start`, maybe in its place; row numbers are contiguous."""
    tensors = (x, center, delta, log_mass, pull, scale, index, labels, toward, out)
    numbers = (x.shape[1], x.stride(0), out.stride(0), start, index.shape[1], rho)
    block = _GRAD_BYTES // x.element_size()
    pair = rho == 0 and x.element_size() == 2  # others would take too many registers
    options = {"THINNED": rho > 0, "PAIR": pair, "M": _labels_at_a_time(index), "BLOCK": block}
    grid = (x.shape[0], cdiv(x.shape[1], 2 * block if pair else block))
    launch(_grad_kernel, grid, *tensors, *numbers, **options, num_warps=block // 512)
    return out


def marks(
    top: Tensor,
    fill: Tensor,
    floor: Tensor,
    classes: Tensor,
    center: Tensor,
    delta: Tensor,
    log_mass: Tensor,
    pull: Tensor,
    index: Tensor,
    n: int,
    rho: float,
    least: float,
) -> tuple[Tensor, Tensor]:
    """Return which rows are undecided, and which classes have a derivative of that size elsewhere, or a label."""
    rows, room = top.shape
    undecided, marked = (torch.zeros(size, dtype=torch.bool, device=top.device) for size in (rows, n))
    tensors = (top, fill, floor, classes, center, delta, log_mass, pull, index)
    outs, numbers = (marked.view(torch.uint8), undecided.view(torch.uint8)), (room, index.shape[1], n, rho, least)
    options = {"THINNED": rho > 0, "M": _labels_at_a_time(index), "BLOCK": _LIST}
    launch(_mark_kernel, (rows,), *tensors, *outs, *numbers, **options, num_warps=4)
    return undecided, marked


def _labels_at_a_time(index: Tensor) -> int:
    most = index.shape[-1]
    return 1 if most <= 1 else 8 if most <= 8 else _LABELS  # few sizes: each is compiled
