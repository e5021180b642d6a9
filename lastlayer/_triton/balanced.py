"""The balanced assignment on the GPU, in one launch: rows and columns are solved in turn until the columns agree.

One program per multiprocessor takes blocks of rows. It solves each row exactly for the present mu, and adds what the
row gives to each column. All programs then meet, read the sums of all, and take the same step of mu. The matrix is read
from the cache in each round. A matrix whose columns do not agree after ROUNDS rounds is left to plain torch.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import functools
import struct
import threading
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer._triton import INTERPRETED, loaded
from lastlayer._triton import plan as shapes
from lastlayer._triton.ahead import Absent, Launch, launch_all
from lastlayer._triton.device import (
    COMPILED,
    LOG2E,
    ROWS_FIRST,
    by_row,
    exp,
    exp2,
    log1p,
    log2,
    rcp,
    start,
    sum2,
    sum4,
    sum_w,
)
from lastlayer._triton.launch import prepare, relaunch, start_driver, stream_of

WIDEST = 1024  # columns
ROUNDS = 64
LOOKS = 10_000  # at the answer, before the host waits for the device: about a millisecond
WARPS = 8  # of a program that takes several blocks of rows
PER_THREAD = 16  # entries of the matrix
MOST = 16384  # entries that one program holds for the whole search
NEAR = tl.constexpr(0.5)  # r from which the columns can follow a step of nu without another pass
TOLERANCE = tl.constexpr(4e-7)  # of a column's sum, relative to its capacity
ROUNDING = tl.constexpr(2e-7)  # of a row's sum, relative to the smaller one of what it takes and leaves
CLOSE = tl.constexpr(0.0052)  # r of a row whose next step is exact enough to end with
SHIFT = tl.constexpr(28)  # bits of the sum of h of a column; that of y has 34
MASK = tl.constexpr((1 << 28) - 1)
HIGH = tl.constexpr(float(1 << 34))
LOW = tl.constexpr(float(1 << 27))
SPAN = tl.constexpr(256.0)  # capacities that the sum of a column can reach; more than the programs
FAR = tl.constexpr(1 << 10)  # more than the rows of a block
BROKEN = tl.constexpr(1 << 20)  # counted for a row whose sum is not a number
MOVED = tl.constexpr(0.5)  # how far odds may be moved by factors before they are computed anew
LONGEST = tl.constexpr(16.0)  # step of a row
PASSES = tl.constexpr(10)
LN2 = tl.constexpr(0.6931471805599453)
_TOGETHER: dict[str, bool] = {} if INTERPRETED else {"launch_cooperative_grid": True}


@triton.jit
def _meet(counter_ptr, target):
    """Wait until all programs are here; what they have added to the sums can then be read."""
    tl.debug_barrier()
    tl.atomic_add(counter_ptr, 1, sem="release")
    while tl.atomic_add(counter_ptr, 0, sem="acquire") < target:
        pass
    tl.debug_barrier()


# A block has three dimensions, as the tiles of `device`: rows, and columns w * C + c. A row is within one warp as long
# as C is at most 32 vectors, so that its sums need no barrier.


@triton.jit
def _by_column(value):
    """One value per column, shape (W, C), in the shape that broadcasts to a block."""
    if ROWS_FIRST:
        return value[None, :, :]
    else:
        return value[:, None, :]


@triton.jit
def _sums_of_columns(a, b):
    if ROWS_FIRST:
        return sum2(a, b, 0)
    else:
        return sum2(a, b, 1)


@triton.jit
def _max2(a0, a1, b0, b1):
    return tl.maximum(a0, b0), tl.maximum(a1, b1)


@triton.jit
def _largest2(a, b):
    """The largest of either over all columns."""
    if COMPILED:
        a, b = tl.reduce((a, b), 1, _max2)
        return tl.reduce((a, b), 0, _max2)
    else:
        return tl.max(tl.max(a, 1), 0), tl.max(tl.max(b, 1), 0)


@triton.jit
def _odds(x, mu, mu_low, nu, nu_low):
    """(1 - y) / y of some rows: not 0 times infinity, and so that 1 / (1 + it) of a score of -inf is 0."""
    t = ((x + _by_column(mu)) + by_row(nu)) + (_by_column(mu_low) + by_row(nu_low))
    power = t * -LOG2E
    return exp2(tl.where(power > 127.5, 127.5, power))


@triton.jit
def _pass(odds, by_mu, moved, k, n, is_row):
    """Values of some rows at the present duals; the next step of each nu, its size r, and the largest of these.

    The sum of a row is counted from the smaller ones of y and 1 - y, which keeps the digits of what it is off.
    """
    odds = odds * (by_mu * by_row(exp(-moved)))
    y = rcp(1 + odds)
    above = odds < 1
    small = tl.where(above, odds * y, y)
    h = small - small * small
    bend = h - 2 * (h * small)
    f, count = sum_w(tl.where(above, small * -1.0, small)), sum_w(above.to(tl.float32))
    f, count, s1, s2 = sum4(f, count, sum_w(h), sum_w(tl.where(above, bend * -1.0, bend)), 1)
    some = f
    f = (count - k) + some
    inverse = rcp(tl.maximum(s1, 1e-37))
    r = f * inverse
    step = -r * rcp(1 - 0.5 * r * s2 * inverse)  # Halley's
    # A row that is saturated may have no such step; it stays where it is if it is off by a rounding.
    goal = tl.minimum(k, n - k)
    size = tl.abs(r)
    size = tl.where(is_row & ~((tl.abs(f) <= goal * ROUNDING) & (size > CLOSE)), size, 0.0)
    worst = tl.max(tl.where(size == size, size, 1e30), 0)
    if worst > 0.01:  # on the logarithm of the smaller side where it is long
        few = k <= n - k
        part = tl.where(few, count + some, (n - count) - some)
        over = rcp(part)
        level = (log2(part) - log2(goal)) * LN2
        slope = tl.where(few, s1, -s1) * over
        curve = tl.where(few, s2, -s2) * over - slope * slope
        below = 2 * slope * slope - level * curve
        halley = below > slope * slope
        by_log = tl.where(halley, -2 * level * slope, -level) * rcp(tl.where(halley, below, slope))
        by_log = tl.where(by_log == by_log, by_log, tl.where(few, LONGEST, -LONGEST))  # nothing is left of the sum
        step = tl.where(size > 0.01, tl.minimum(tl.maximum(by_log, -LONGEST), LONGEST), step)
    return y, tl.where(is_row & (size > 0), step, 0.0), size, worst


@triton.jit
def _moved(value, low, step):
    """Add a step to a number of two floats."""
    step = low + step
    moved = value + step
    return moved, step - (moved - value)


@triton.jit
def _rows(odds, by_mu, moved, k, n, is_row):
    """Bring some rows to their sums; returns how far they have moved, what they give to the columns, and their state.

    That is the number of rows that are not there yet, and whether some have moved far. The last step of nu is taken
    without another pass: y and h follow it to second and first order.
    """
    y, step, r, worst = _pass(odds, by_mu, moved, k, n, is_row)
    left = PASSES
    while (worst > NEAR) & (left > 0):
        moved += step
        y, step, r, worst = _pass(odds, by_mu, moved, k, n, is_row)
        left -= 1
    moved += tl.where(worst > NEAR, 0.0, step)
    d = by_row(step)
    h = y - y * y  # exact enough for a short step
    bend = h * (1 - 2 * y)
    given, slope = _sums_of_columns(y + d * (h + 0.5 * d * bend), h + d * bend)
    state = (is_row & ~(r < CLOSE)).to(tl.int32) + tl.where(tl.abs(moved) > MOVED, FAR, 0)
    state = tl.sum(state + tl.where(r == r, 0, BROKEN), 0)
    return moved, given, slope, state - (state // FAR % FAR) * FAR, state // FAR % FAR > 0


@triton.jit
def _last_nu(odds, moved, k, n, is_row):
    """Bring some rows to their sums for the last time; returns how far they have moved."""
    _, step, _, worst = _pass(odds, 1.0, moved, k, n, is_row)
    left = PASSES
    while (worst > CLOSE) & (left > 0):
        moved += step
        _, step, _, worst = _pass(odds, 1.0, moved, k, n, is_row)
        left -= 1
    return moved + tl.where(worst > NEAR, 0.0, step)


@triton.jit
def _entries(x_ptr, row, cols, rows, n, inv_t):
    """The scores of some rows; -inf beyond the matrix."""
    inside = by_row(row < rows) & _by_column(cols < n)
    here = x_ptr + (by_row(row) * n + _by_column(cols))
    return tl.load(here, mask=inside, other=float("-inf")).to(tl.float32) * inv_t


@triton.jit
def _first_nu(x, k, is_row, is_column, n):
    """Where a row would be if its scores were normal."""
    x = tl.where(by_row(is_row) & _by_column(is_column), x, 0.0)
    s, q = sum2(sum_w(x), sum_w(x * x), 1)
    return -start(s, q, s * 0.0, n, k, None)


@triton.jit
def _cardinalities(k_ptr, row, rows, k_row):
    if k_row is None:
        return (row * 0).to(tl.float32) + k_ptr
    else:
        return tl.load(k_ptr + tl.minimum(row, rows - 1) * k_row).to(tl.float32)


@triton.jit
def _write(odds, y_ptr, row, cols, rows, n):
    here = y_ptr + (by_row(row) * n + _by_column(cols))
    tl.store(here, rcp(1 + odds).to(y_ptr.dtype.element_ty), mask=by_row(row < rows) & _by_column(cols < n))


@triton.jit(do_not_specialize=["rows"])
def _solve(
    x_ptr, k_ptr, c_ptr, y_ptr, nu_ptr, mu_ptr, sums_ptr, next_ptr, answer_ptr, rows, n, k_row, c_low, inv_t,
    R: tl.constexpr, W: tl.constexpr, C: tl.constexpr, ROUNDS: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Programs that all run at once; each holds R rows, or takes blocks of R rows in turn.

    The odds of the rows that are held are computed at some duals, and moved from there by a factor per row and column.
    Sums and counter begin as zeros; those of the next launch are written here.
    """
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    blocks = (rows + R - 1) // R
    cols = tl.arange(0, W)[:, None] * C + tl.arange(0, C)[None, :]
    SUMS: tl.constexpr = ROUNDS * (W * C + 1)
    for first in range(pid * W * C, SUMS + 1, programs * W * C):
        tl.store(next_ptr + first + cols, tl.zeros([W, C], tl.int64), mask=first + cols <= SUMS)
    counter_ptr = (sums_ptr + SUMS).to(tl.pointer_type(tl.int32))
    some = tl.arange(0, R).to(tl.int64)
    is_column = cols < n
    width = n.to(tl.float32)
    c = tl.zeros([W, C], tl.float64)
    if c_low is None:
        c += tl.load(c_ptr + cols, mask=is_column, other=1.0)
    else:  # equal capacities, as a sum of two floats
        c += c_ptr
        c += c_low
    all_rows = rows.to(tl.float64)
    mu = tl.zeros([W, C], tl.float32)
    mu_low = tl.zeros([W, C], tl.float32)
    mu_moved = tl.zeros([W, C], tl.float32)
    if HELD:
        row = some + pid * R
        is_row = row < rows
        x = _entries(x_ptr, row, cols, rows, n, inv_t)
        k = _cardinalities(k_ptr, row, rows, k_row)
        nu = _first_nu(x, k, is_row, is_column, width)
        nu_low = nu * 0.0
        moved = nu * 0.0
        odds = _odds(x, mu, mu_low, nu, nu_low)
    turn = 0
    agreed = 0
    far = turn > 0
    before = 0.0
    rate_before = 0.0
    # What a program adds has a bound: as many capacities as there may be programs, or all rows that a program can have.
    unit = 1 / tl.minimum(c * SPAN, (R * programs * ((blocks + programs - 1) // programs)).to(tl.float64))
    most = 1 / (unit * programs)
    # A step of mu needs few digits: what a column is off is a float64, and all that it is divided by is not.
    of_high = 1 / (unit * HIGH)
    of_low = (1 / (unit * LOW)).to(tl.float32)
    by_c = (1 / c).to(tl.float32)
    while turn < ROUNDS:
        if HELD:
            if far:
                nu, nu_low = _moved(nu, nu_low, moved)
                moved = nu * 0.0
                mu_moved = mu * 0.0
                odds = _odds(_entries(x_ptr, row, cols, rows, n, inv_t), mu, mu_low, nu, nu_low)
            moved, given, slope, rough, far = _rows(odds, _by_column(exp(-mu_moved)), moved, k, width, is_row)
            taken = given.to(tl.float64)
            curvature = slope.to(tl.float64)
        else:
            taken = tl.zeros([W, C], tl.float64)
            curvature = tl.zeros([W, C], tl.float64)
            rough = 0
            for block in range(pid, blocks, programs):
                row = some + block * R
                is_row = row < rows
                x = _entries(x_ptr, row, cols, rows, n, inv_t)
                k = _cardinalities(k_ptr, row, rows, k_row)
                if turn == 0:
                    nu = _first_nu(x, k, is_row, is_column, width)
                    nu_low = nu * 0.0
                else:
                    known = tl.load(nu_ptr + row, mask=is_row, other=0.0)
                    nu = known.to(tl.float32)
                    nu_low = (known - nu.to(tl.float64)).to(tl.float32)
                odds = _odds(x, mu, mu_low, nu, nu_low)
                moved, given, slope, some_rough, _ = _rows(odds, 1.0, nu * 0.0, k, width, is_row)
                rough += some_rough
                taken += given.to(tl.float64)
                curvature += slope.to(tl.float64)
                nu, nu_low = _moved(nu, nu_low, moved)
                tl.store(nu_ptr + row, nu.to(tl.float64) + nu_low.to(tl.float64), mask=is_row)
        # Both sums of a column are whole numbers in one word: half as much to add, and the order does not matter.
        share = (tl.minimum(taken, most) * (unit * HIGH) + 0.5).to(tl.int64)
        share = (share << SHIFT) + (tl.minimum(curvature, most) * (unit * LOW) + 0.5).to(tl.int64)
        here = sums_ptr + turn * (W * C + 1)
        tl.atomic_add(here + cols, share, sem="relaxed")
        tl.atomic_add(here + W * C, rough.to(tl.int64), sem="relaxed")
        turn += 1
        _meet(counter_ptr, programs * turn)
        share = tl.load(here + cols, cache_modifier=".cg")
        unsolved = tl.load(here + W * C, cache_modifier=".cg")
        taken = tl.maximum((share >> SHIFT).to(tl.float64), 0.5) * of_high
        excess = (taken - c).to(tl.float32)
        rest = tl.maximum(all_rows - taken, 0.5 * of_high).to(tl.float32)
        given = taken.to(tl.float32)
        # Of a column that is nearly empty or full only the difference to that is left.
        slope = tl.maximum((share & MASK).to(tl.int32).to(tl.float32), 8.0) * of_low
        slope = tl.minimum(slope, tl.minimum(given, rest))
        off = tl.where(is_column, tl.abs(excess) * by_c, 0.0)
        # Newton's step for the logit of the column's mean, from sums that keep the digits of the difference.
        up = log1p(tl.maximum(-excess / given, -0.999))
        down = log1p(tl.maximum(excess / rest, -0.999))
        step = (up - down) * (given * ((all_rows - taken).to(tl.float32) / (all_rows.to(tl.float32) * slope)))
        step = tl.where(is_column, tl.minimum(tl.maximum(step, -8.0), 8.0), 0.0)
        worst, longest = _largest2(tl.where(off == off, off, 1e30), tl.abs(mu_moved + step))
        rate = worst * rcp(before)
        slower = tl.maximum(rate, rate_before)
        if (worst <= TOLERANCE) & (unsolved == 0):
            agreed = 1
            turn = ROUNDS
        elif (worst > 1e29) | (unsolved >= BROKEN):  # not a number
            turn = ROUNDS
        else:
            mu, mu_low = _moved(mu, mu_low, step)
            mu_moved += step
            far = far | (longest > MOVED)
            # Errors shrink at a steady rate; where the next ones are known to be small nobody has to look at them.
            # In a large matrix they can be twice as large, and rounding comes on top.
            if (unsolved == 0) & (slower < 0.1) & (worst * slower <= (TOLERANCE if HELD else TOLERANCE / 4)):
                agreed = 1
                turn = ROUNDS
        before = worst
        rate_before = rate
    if pid == 0:
        tl.store(answer_ptr, 1 - agreed)
    if agreed > 0:
        if HELD:
            odds = odds * _by_column(exp(-mu_moved))
            moved = _last_nu(odds, moved, k, width, is_row)
            _write(odds * by_row(exp(-moved)), y_ptr, row, cols, rows, n)
            nu, nu_low = _moved(nu, nu_low, moved)
            tl.store(nu_ptr + row, nu.to(tl.float64) + nu_low.to(tl.float64), mask=is_row)
        else:
            for block in range(pid, blocks, programs):
                row = some + block * R
                is_row = row < rows
                known = tl.load(nu_ptr + row, mask=is_row, other=0.0)
                nu = known.to(tl.float32)
                nu_low = (known - nu.to(tl.float64)).to(tl.float32)
                x = _entries(x_ptr, row, cols, rows, n, inv_t)
                k = _cardinalities(k_ptr, row, rows, k_row)
                odds = _odds(x, mu, mu_low, nu, nu_low)
                moved = _last_nu(odds, nu * 0.0, k, width, is_row)
                _write(odds * by_row(exp(-moved)), y_ptr, row, cols, rows, n)
                nu, nu_low = _moved(nu, nu_low, moved)
                tl.store(nu_ptr + row, nu.to(tl.float64) + nu_low.to(tl.float64), mask=is_row)
    if pid == 0:
        tl.store(mu_ptr + cols, mu.to(tl.float64) + mu_low.to(tl.float64), mask=is_column)


@functools.cache
def _programs(device: int) -> int:
    return 1 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _meets() -> bool:
    """Whether this Triton can launch programs that all run at once: those that wait for others would never end."""
    if INTERPRETED:
        return True
    from triton.backends.nvidia.compiler import CUDAOptions

    return "launch_cooperative_grid" in CUDAOptions.__dataclass_fields__


def unfit(logits: Tensor) -> bool:
    """Whether this is not a matrix for the kernel."""
    narrow = (torch.float32, torch.bfloat16, torch.float16)
    if not _meets():
        return True
    return logits.ndim != 2 or logits.dtype not in narrow or not 2 <= logits.shape[1] <= WIDEST or logits.shape[0] < 2


def solve(
    logits: Tensor, k: Tensor | float, capacity: Tensor | float, temperature: float
) -> tuple[Tensor, Tensor, int]:
    """Return y, the duals (nu and then mu) in float64, and a number: 0 if they are right. Waits for the device.

    `k` and `capacity` are numbers, or float64 tensors, ``(rows, 1)`` and ``(1, columns)``.
    """
    try:
        return _own_solve(logits, k, capacity, temperature)
    except Absent:
        with shapes.general_form():
            y, duals, wrong = _own_solve(logits.float(), *_tensors(logits, k, capacity), temperature)
        return y.to(logits.dtype), duals, wrong


def _own_solve(
    logits: Tensor, k: Tensor | float, capacity: Tensor | float, temperature: float
) -> tuple[Tensor, Tensor, int]:
    x = logits.contiguous()
    rows, n = x.shape
    device = x.get_device()
    # The general form has few entries per thread, since the code for many takes the driver long to load.
    plan = _plan(
        rows, n, _programs(device), *((0, PER_THREAD // 4) if shapes.in_general_form() else (MOST, PER_THREAD))
    )
    w, c, r, warps, held = plan
    work = _zeros.take(x.device, device, ROUNDS * (w * c + 1) + 1)  # the sums of each round, and a counter
    y = torch.empty_like(x)
    duals = torch.empty(rows + n, dtype=torch.float64, device=x.device)
    low = None
    if not isinstance(capacity, Tensor):
        high = _float32(capacity)
        capacity, low = high, capacity - high
    answer = _answers.take()
    key = None
    if low is not None and not isinstance(k, Tensor):  # the common call
        first, to, found = x.data_ptr(), y.data_ptr(), duals.data_ptr()
        key = ("balanced", device, x.dtype, plan, n, first & 15, rows & 1)
        given = (first, k, capacity, to, found, found + 8 * rows, *work.addresses, answer.address, rows, n, None)
        if held and relaunch(key, device, rows, *given, low, 1.0 / temperature):
            return y, duals, _end(answer, work, device)
    k_row = None
    if isinstance(k, Tensor):
        k_row = 0 if k.stride(0) == 0 or rows == 1 else 1
    if isinstance(capacity, Tensor):
        capacity = capacity.contiguous()
    args = (
        x, k, capacity, y, duals, duals[rows:], *work.parts, answer.tensor, rows, n, k_row, low, 1.0 / temperature,
    )  # fmt: skip
    options = {"R": r, "W": w, "C": c, "ROUNDS": ROUNDS, "HELD": held, "num_warps": warps}
    own = Launch(_solve, (min(_programs(device), shapes.cdiv(rows, r)),), args, {**options, **_TOGETHER})
    compiled = launch_all([own], shared=True, lasting=False)
    if key is not None and held:
        prepare(key, compiled, r)
    return y, duals, _end(answer, work, device)


def _end(answer: "_Answer", work: "_Work", device: int) -> int:
    wrong = answer.wait(device)
    _zeros.give_back(work)
    return wrong


def _tensors(x: Tensor, k: Tensor | float, capacity: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return the sums of rows and of columns as tensors, the form to which every call can be brought."""
    rows, n = x.shape
    if not isinstance(k, Tensor):
        k = torch.full((), k, dtype=torch.float64, device=x.device).expand(rows, 1)
    if not isinstance(capacity, Tensor):
        capacity = torch.full((1, n), capacity, dtype=torch.float64, device=x.device)
    return k, capacity


class _Answer(threading.local):
    """One number that a kernel writes into the host's memory, per thread: a copy would take longer to ask for."""

    def __init__(self) -> None:
        self.tensor: Tensor | None = None

    def take(self) -> "_Answer":
        """Return this with a number that no kernel writes."""
        if self.tensor is None:
            self.tensor = torch.zeros(1, dtype=torch.int32, pin_memory=not INTERPRETED)
            self.address, self.number = self.tensor.data_ptr(), self.tensor.numpy()
        self.number[0] = -1
        return self

    def wait(self, device: int) -> int:
        """Return what the kernel has written; the device may still be busy with the rest of its work."""
        number, tensor, self.tensor = self.number, self.tensor, None  # a call that is interrupted leaves it behind
        for _ in range(LOOKS):
            if number[0] >= 0:
                break
        else:
            torch.cuda.current_stream(device).synchronize()
        self.tensor = tensor
        return int(number[0])


class _Work(NamedTuple):
    """Zeros for one launch, and the numbers that it makes zeros for the next; with their addresses."""

    case: tuple[int, int, int]
    parts: tuple[Tensor, Tensor]
    addresses: tuple[int, int]


class _Zeros(threading.local):
    """Zeros that a launch leaves for the next one of its stream, per thread: to ask for new ones would take longer."""

    MOST = 8  # streams and sizes for which they are kept

    def __init__(self) -> None:
        self.kept: dict[tuple[int, int, int], _Work] = {}

    def take(self, place: torch.device, device: int, size: int) -> _Work:
        """Return zeros that nobody else has; without `give_back`, as after an error, they are not used again."""
        case = (device, stream_of(device), size)
        work = self.kept.pop(case, None)
        if work is None:
            both = torch.zeros(2, -(-size // 16) * 16, dtype=torch.int64, device=place)
            work = _Work(case, (both[0], both[1]), (both[0].data_ptr(), both[1].data_ptr()))
        return work

    def give_back(self, work: _Work) -> None:
        """Keep them for the next launch, which begins with the other half. The launch has gone through its rounds."""
        if len(self.kept) >= self.MOST:
            self.kept.clear()
        self.kept[work.case] = _Work(work.case, work.parts[::-1], work.addresses[::-1])


_zeros = _Zeros()
_answers = _Answer()
if not loaded.takes(_TOGETHER):
    start_driver()  # while the rest is imported: the kernel is launched by Triton


@functools.lru_cache(maxsize=256)
def _plan(rows: int, n: int, programs: int, most: int, each: int) -> tuple[int, int, int, int, bool]:
    """W, C and the rows of a block, its warps, and whether one block per program is the whole matrix.

    Blocks of up to `most` entries are held, and a thread takes `each` of them.
    """
    c = max(32, shapes.power_of_2(n))
    r = max(1, shapes.power_of_2(shapes.cdiv(rows, programs)))
    w, within = max(1, c // 128), min(c, 128)
    if r * c <= most:
        return w, within, r, min(16, max(4, r * c // (32 * each))), True
    return w, within, max(1, 32 * WARPS * each // c), WARPS, False


def _float32(value: float) -> float:
    """The nearest float32."""
    return struct.unpack("f", struct.pack("f", value))[0]  # type: ignore[no-any-return]
