"""The balanced assignment on the GPU, in one launch: rows and columns are solved in turn until the columns agree.

One program per multiprocessor takes blocks of rows. It solves each row exactly for the present mu, and adds what the
row gives to each column. All programs then meet, read the sums of all, and take the same step of mu. The matrix is read
from the cache in each round. A matrix whose columns do not agree after ROUNDS rounds is left to plain torch.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import functools
import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer._triton import INTERPRETED
from lastlayer._triton import plan as shapes
from lastlayer._triton.device import LOG2E, exp, exp2, log1p, log2, rcp, start, sum2, sum3
from lastlayer._triton.launch import launch

WIDEST = 1024  # columns
ROUNDS = 64
WARPS = 8  # of a program that takes several blocks of rows
PER_THREAD = 16  # entries of the matrix
MOST = 16384  # entries that one program holds for the whole search
NEAR = tl.constexpr(0.5)  # r from which the columns can follow a step of nu without another pass
TOLERANCE = tl.constexpr(4e-7)  # of a column's sum, relative to its capacity
CLOSE = tl.constexpr(0.0052)  # as in `weighted`
PASSES = tl.constexpr(10)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _meet(counter_ptr, target):
    """Wait until all programs are here; what they have added to the sums can then be read."""
    tl.debug_barrier()
    tl.atomic_add(counter_ptr, 1)
    while tl.atomic_add(counter_ptr, 0) < target:
        pass
    tl.debug_barrier()


@triton.jit
def _pass(x, mu, mu_low, nu, nu_low, few, goal, is_row, is_column, FULL: tl.constexpr):
    """Values of some rows at the present duals; the next step of each nu, its size r, and the largest of these."""
    t = ((x + mu[None, :]) + nu[:, None]) + (mu_low[None, :] + nu_low[:, None])
    tail = exp2(tl.abs(t) * -LOG2E)
    over = rcp(1 + tail)
    small = tail * over
    above = t > 0
    y = tl.where(above, over, small)
    other = tl.where(above, small, over)
    h = small * over
    bend = h * (other - y)
    got = tl.where(few[:, None], y, other)
    if not FULL:  # a column that does not exist has a score of -inf: only 1 - y has to be left out
        got = tl.where(is_column[None, :], got, 0.0)
    f, s1, s2 = sum3(got, h, bend, 1)
    inverse = rcp(tl.maximum(s1, 1e-37))
    r = tl.where(few, f - goal, goal - f) * inverse
    step = -r * rcp(1 - 0.5 * r * s2 * inverse)  # Halley's
    size = tl.where(is_row, tl.abs(r), 0.0)
    worst = tl.max(size, 0)
    if worst > 0.01:  # on the logarithm of the smaller side where it is long
        over_f = rcp(f)
        level = (log2(f) - log2(goal)) * LN2
        slope = tl.where(few, s1, -s1) * over_f
        curve = tl.where(few, s2, -s2) * over_f - slope * slope
        below = 2 * slope * slope - level * curve
        halley = below > slope * slope
        by_log = tl.where(halley, -2 * level * slope, -level) * rcp(tl.where(halley, below, slope))
        step = tl.where(size > 0.01, by_log, step)
    return y, tl.where(is_row, step, 0.0), size, worst


@triton.jit
def _moved(value, low, step):
    """Add a step to a number of two floats."""
    step = low + step
    moved = value + step
    return moved, step - (moved - value)


@triton.jit
def _rows(x, mu, mu_low, nu, nu_low, few, goal, is_row, is_column, FULL: tl.constexpr):
    """Bring some rows to their sums; returns nu as two floats, what they give to the columns, and rows that are not.

    The last step of nu is taken without another pass: y and h follow it to second and first order.
    """
    y, step, r, worst = _pass(x, mu, mu_low, nu, nu_low, few, goal, is_row, is_column, FULL)
    if worst > NEAR:
        left = PASSES
        while (worst > NEAR) & (left > 0):
            nu, nu_low = _moved(nu, nu_low, step)
            _, step, r, worst = _pass(x, mu, mu_low, nu, nu_low, few, goal, is_row, is_column, FULL)
            left -= 1
        y, step, r, worst = _pass(x, mu, mu_low, nu, nu_low, few, goal, is_row, is_column, FULL)
    nu, nu_low = _moved(nu, nu_low, step)
    d = step[:, None]
    h = y - y * y  # exact enough for a short step
    bend = h * (1 - 2 * y)
    taken = tl.sum(y + d * (h + 0.5 * d * bend), 0)
    curvature = tl.sum(h + d * bend, 0)
    rough = tl.sum((is_row & ~(r < CLOSE)).to(tl.int32), 0)
    return nu, nu_low, taken, curvature, rough


@triton.jit
def _entries(x_ptr, row, cols, rows, n, inv_t, R: tl.constexpr):
    """The scores of some rows; -inf beyond the matrix."""
    inside = (row < rows)[:, None] & (cols < n)[None, :]
    return tl.load(x_ptr + row[:, None] * n + cols[None, :], mask=inside, other=float("-inf")).to(tl.float32) * inv_t


@triton.jit
def _first_nu(x, k, is_row, is_column, n):
    """Where a row would be if its scores were normal."""
    inside = is_row[:, None] & is_column[None, :]
    x = tl.where(inside, x, 0.0)
    s, q = sum2(x, x * x, 1)
    return -start(s, q, s * 0.0, n.to(tl.float32), k, None)


@triton.jit
def _goals(k_ptr, row, rows, n, k_row):
    """The sum of each row, the smaller one of what it takes and leaves, and whether it is the former."""
    if k_row is None:
        k = (row * 0).to(tl.float32) + k_ptr
    else:
        k = tl.load(k_ptr + tl.minimum(row, rows - 1) * k_row).to(tl.float32)
    rest = n.to(tl.float32) - k
    return k, tl.minimum(k, rest), k <= rest


@triton.jit
def _write(x, mu, mu_low, nu, nu_low, y_ptr, row, cols, rows, n):
    t = ((x + mu[None, :]) + nu[:, None]) + (mu_low[None, :] + nu_low[:, None])
    tail = exp(-tl.abs(t))
    over = rcp(1 + tail)
    y = tl.where(t > 0, over, tail * over).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row[:, None] * n + cols[None, :], y, mask=(row < rows)[:, None] & (cols < n)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _solve(
    x_ptr, k_ptr, c_ptr, y_ptr, nu_ptr, mu_ptr, sums_ptr, counter_ptr, rows, n, k_row, c_low, inv_t,
    R: tl.constexpr, C: tl.constexpr, ROUNDS: tl.constexpr, HELD: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Programs that all run at once; each holds R rows, or takes blocks of R rows in turn."""
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    blocks = (rows + R - 1) // R
    cols = tl.arange(0, C)
    some = tl.arange(0, R).to(tl.int64)
    is_column = cols < n
    c = tl.zeros([C], tl.float64)
    if c_low is None:
        c += tl.load(c_ptr + cols, mask=is_column, other=1.0)
    else:  # equal capacities, as a sum of two floats
        c += c_ptr
        c += c_low
    all_rows = rows.to(tl.float64)
    mu = tl.zeros([C], tl.float32)
    mu_low = tl.zeros([C], tl.float32)
    if HELD:
        row = some + pid * R
        is_row = row < rows
        x = _entries(x_ptr, row, cols, rows, n, inv_t, R)
        k, goal, few = _goals(k_ptr, row, rows, n, k_row)
        nu = _first_nu(x, k, is_row, is_column, n)
        nu_low = nu * 0.0
    turn = 0
    agreed = 0
    while turn < ROUNDS:
        if HELD:
            nu, nu_low, given, slope, rough = _rows(x, mu, mu_low, nu, nu_low, few, goal, is_row, is_column, FULL)
            taken = given.to(tl.float64)
            curvature = slope.to(tl.float64)
        else:
            taken = tl.zeros([C], tl.float64)
            curvature = tl.zeros([C], tl.float64)
            rough = 0
            for block in range(pid, blocks, programs):
                row = some + block * R
                is_row = row < rows
                x = _entries(x_ptr, row, cols, rows, n, inv_t, R)
                k, goal, few = _goals(k_ptr, row, rows, n, k_row)
                if turn == 0:
                    nu = _first_nu(x, k, is_row, is_column, n)
                    nu_low = nu * 0.0
                else:
                    known = tl.load(nu_ptr + row, mask=is_row, other=0.0)
                    nu = known.to(tl.float32)
                    nu_low = (known - nu.to(tl.float64)).to(tl.float32)
                nu, nu_low, given, slope, some_rough = _rows(
                    x, mu, mu_low, nu, nu_low, few, goal, is_row, is_column, FULL
                )
                rough += some_rough
                taken += given.to(tl.float64)
                curvature += slope.to(tl.float64)
                tl.store(nu_ptr + row, nu.to(tl.float64) + nu_low.to(tl.float64), mask=is_row)
        here = sums_ptr + turn * (2 * C + 1)
        tl.atomic_add(here + cols, taken, sem="relaxed")
        tl.atomic_add(here + C + cols, curvature, sem="relaxed")
        tl.atomic_add(here + 2 * C, rough.to(tl.float64), sem="relaxed")
        turn += 1
        _meet(counter_ptr, programs * turn)
        taken = tl.load(here + cols, cache_modifier=".cg")
        curvature = tl.maximum(tl.load(here + C + cols, cache_modifier=".cg"), 1e-30)
        unsolved = tl.load(here + 2 * C, cache_modifier=".cg")
        excess = taken - c
        off = tl.where(is_column, tl.abs(excess) / c, 0.0).to(tl.float32)
        worst = tl.max(tl.where(off == off, off, 1e30), 0)
        if (worst <= TOLERANCE) & (unsolved == 0):
            agreed = 1
            turn = ROUNDS
        elif worst > 1e29:  # not a number
            turn = ROUNDS
        else:
            # Newton's step for the logit of the column's mean, from sums that keep the digits of the difference.
            up = log1p(tl.maximum(-excess / taken, -0.999).to(tl.float32))
            down = log1p(tl.maximum(excess / (all_rows - taken), -0.999).to(tl.float32))
            step = (up - down) * (taken * (all_rows - taken) / (all_rows * curvature)).to(tl.float32)
            step = tl.where(is_column, tl.minimum(tl.maximum(step, -8.0), 8.0), 0.0)
            mu, mu_low = _moved(mu, mu_low, step)
    if agreed > 0:
        if HELD:
            _write(x, mu, mu_low, nu, nu_low, y_ptr, row, cols, rows, n)
            tl.store(nu_ptr + row, nu.to(tl.float64) + nu_low.to(tl.float64), mask=is_row)
        else:
            for block in range(pid, blocks, programs):
                row = some + block * R
                known = tl.load(nu_ptr + row, mask=row < rows, other=0.0)
                nu = known.to(tl.float32)
                nu_low = (known - nu.to(tl.float64)).to(tl.float32)
                x = _entries(x_ptr, row, cols, rows, n, inv_t, R)
                _write(x, mu, mu_low, nu, nu_low, y_ptr, row, cols, rows, n)
    elif pid == 0:
        tl.store(counter_ptr + 1, 1)
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return y, nu ``(rows, 1)`` and mu ``(1, columns)`` in float64, and a number: 0 if they are right.

    `k` and `capacity` are numbers, or float64 tensors, ``(rows, 1)`` and ``(1, columns)``.
    """
    x = logits.contiguous()
    rows, n = x.shape
    c, r, warps, held = _plan(rows, n, _programs(x.get_device()))
    work = torch.zeros(ROUNDS * (2 * c + 1) + 1, dtype=torch.float64, device=x.device)
    counters = work.view(torch.int32)[-2:]
    y = torch.empty_like(x)
    duals = torch.empty(rows + n, dtype=torch.float64, device=x.device)
    nu, mu = duals[:rows].unsqueeze(1), duals[rows:].unsqueeze(0)
    k_row = None
    if isinstance(k, Tensor):
        k_row = 0 if k.stride(0) == 0 or rows == 1 else 1
    low = None
    if isinstance(capacity, Tensor):
        capacity = capacity.contiguous()
    else:
        high = _float32(capacity)
        capacity, low = high, capacity - high
    options = {} if INTERPRETED else {"launch_cooperative_grid": True}
    launch(
        _solve, (min(_programs(x.get_device()), shapes.cdiv(rows, r)),), x, k, capacity, y, nu, mu, work, counters,
        rows, n, k_row, low, 1.0 / temperature, R=r, C=c, ROUNDS=ROUNDS, HELD=held, FULL=c == n, num_warps=warps,
        **options,
    )  # fmt: skip
    return y, nu, mu, counters[1]


@functools.lru_cache(maxsize=256)
def _plan(rows: int, n: int, programs: int) -> tuple[int, int, int, bool]:
    """Columns and rows of a block, its warps, and whether one block per program is the whole matrix."""
    c = max(32, shapes.power_of_2(n))
    r = max(1, shapes.power_of_2(shapes.cdiv(rows, programs)))
    if r * c <= MOST:
        return c, r, min(16, max(4, r * c // (32 * PER_THREAD))), True
    return c, max(1, 32 * WARPS * PER_THREAD // c), WARPS, False


def _float32(value: float) -> float:
    """The nearest float32."""
    return struct.unpack("f", struct.pack("f", value))[0]  # type: ignore[no-any-return]
