"""The balanced assignment on the GPU, in one launch: rows and columns are solved in turn until the columns agree.

One program per multiprocessor takes blocks of rows. It solves each row exactly for the present mu, and adds what the
row gives to each column. All programs then meet, read the sums of all, and take the same step of mu. The matrix is read
from the cache in each round. A matrix whose columns do not agree after ROUNDS rounds is left to plain torch.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer._triton import INTERPRETED
from lastlayer._triton import plan as shapes
from lastlayer._triton.device import exp, log1p, log2, rcp, start, sum2, sum3

WIDEST = 1024  # columns
ROUNDS = 64
WARPS = 8  # of a program
PER_THREAD = 16  # entries of the matrix
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
def _row(x, mu, mu_low, nu, nu_low, k, few, goal, inside, n, fresh):
    """Solve some rows for the present mu; returns nu as two floats, y, and whether a row is not solved."""
    z = x + mu
    s, q = sum2(tl.where(inside, z, 0.0), tl.where(inside, z * z, 0.0), 1)
    first = -start(s, q, s * 0.0, n.to(tl.float32), k, None)
    nu = tl.where(fresh, first, nu)
    nu_low = tl.where(fresh, 0.0, nu_low)
    solved = k < 0
    passes = 0
    while passes < PASSES:
        t = (z + nu[:, None]) + (mu_low + nu_low[:, None])
        t = tl.minimum(tl.maximum(t, -80.0), 80.0)
        e = exp(-t)
        y = rcp(1 + e)
        v = e * y
        h = tl.where(inside, y * v, 0.0)
        got = tl.where(inside, tl.where(few[:, None], y, v), 0.0)
        f, s1, s2 = sum3(got, h, h * (v - y), 1)
        s1 = tl.maximum(s1, 1e-37)
        r = tl.where(few, f - goal, goal - f) / s1
        near = tl.abs(r) < CLOSE
        level = (log2(f) - log2(goal)) * LN2
        slope = tl.where(few, s1, -s1) / f
        bend = tl.where(few, s2, -s2) / f - slope * slope
        below = 2 * slope * slope - level * bend
        by_log = tl.where(below > slope * slope, -2 * level * slope / below, -level / slope)
        step = tl.where(tl.abs(r) < 0.01, -r / (1 - r * (s2 / s1) * 0.5), by_log)
        step = nu_low + tl.where(solved, 0.0, step)
        moved = nu + step
        nu_low = step - (moved - nu)
        nu = moved
        solved = solved | near
        passes += 1
        if tl.min(solved.to(tl.int32), 0) > 0:
            passes = PASSES
    t = (z + nu[:, None]) + (mu_low + nu_low[:, None])
    tail = exp(-tl.abs(t))
    over = rcp(1 + tail)
    y = tl.where(t > 0, over, tail * over)
    h = tl.where(inside, tail * over * over, 0.0)
    return nu, nu_low, tl.where(inside, y, 0.0), h, tl.sum((solved == 0).to(tl.int32), 0)


@triton.jit(do_not_specialize=["rows"])
def _solve(
    x_ptr, k_ptr, c_ptr, y_ptr, nu_ptr, mu_ptr, sums_ptr, counter_ptr, state_ptr, rows, n, k_row, inv_t,
    R: tl.constexpr, C: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    blocks = (rows + R - 1) // R
    cols = tl.arange(0, C)
    is_column = cols < n
    c = tl.load(c_ptr + cols, mask=is_column, other=1.0)  # float64
    all_rows = rows.to(tl.float64)
    mu = tl.zeros([C], tl.float32)
    mu_low = tl.zeros([C], tl.float32)
    unsolved = 0
    turn = 0
    agreed = 0
    while turn < ROUNDS:
        taken = tl.zeros([C], tl.float64)
        curvature = tl.zeros([C], tl.float64)
        unsolved = 0
        for block in range(pid, blocks, programs):
            row = (block * R + tl.arange(0, R)).to(tl.int64)
            inside = (row < rows)[:, None] & is_column[None, :]
            row = tl.minimum(row, rows - 1)
            x = tl.load(x_ptr + row[:, None] * n + cols[None, :], mask=is_column[None, :], other=0.0).to(tl.float32)
            x = x * inv_t
            k = tl.load(k_ptr + row * k_row).to(tl.float32)
            rest = n.to(tl.float32) - k
            few = k <= rest
            goal = tl.minimum(k, rest)
            known = tl.load(nu_ptr + row)
            high = known.to(tl.float32)
            low = (known - high.to(tl.float64)).to(tl.float32)
            within = is_column[None, :] & (row >= 0)[:, None]
            nu, nu_low, y, h, missing = _row(
                x, mu[None, :], mu_low[None, :], high, low, k, few, goal, within, n, turn == 0
            )
            unsolved += missing
            taken += tl.sum(tl.where(inside, y, 0.0), 0).to(tl.float64)
            curvature += tl.sum(tl.where(inside, h, 0.0), 0).to(tl.float64)
            tl.store(nu_ptr + row, nu.to(tl.float64) + nu_low.to(tl.float64))
        here = sums_ptr + turn * 2 * C + cols
        tl.atomic_add(here, taken, sem="relaxed")
        tl.atomic_add(here + C, curvature, sem="relaxed")
        turn += 1
        _meet(counter_ptr, programs * turn)
        taken = tl.load(here, cache_modifier=".cg")
        curvature = tl.maximum(tl.load(here + C, cache_modifier=".cg"), 1e-30)
        excess = taken - c
        off = tl.where(is_column, tl.abs(excess) / c, 0.0).to(tl.float32)
        worst = tl.max(tl.where(off == off, off, 1e30), 0)
        if worst <= TOLERANCE:
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
            step = mu_low + step
            moved = mu + step
            mu_low = step - (moved - mu)
            mu = moved
    good = (agreed > 0) & (unsolved == 0)
    if good:
        for block in range(pid, blocks, programs):
            row = (block * R + tl.arange(0, R)).to(tl.int64)
            inside = (row < rows)[:, None] & is_column[None, :]
            row = tl.minimum(row, rows - 1)
            at = row[:, None] * n + cols[None, :]
            x = tl.load(x_ptr + at, mask=is_column[None, :], other=0.0).to(tl.float32) * inv_t
            known = tl.load(nu_ptr + row)
            high = known.to(tl.float32)
            low = (known - high.to(tl.float64)).to(tl.float32)
            t = ((x + mu[None, :]) + high[:, None]) + (mu_low[None, :] + low[:, None])
            tail = exp(-tl.abs(t))
            over = rcp(1 + tail)
            tl.store(y_ptr + at, tl.where(t > 0, over, tail * over).to(y_ptr.dtype.element_ty), mask=inside)
    else:
        tl.atomic_add(state_ptr, 1)
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


def solve(logits: Tensor, k: Tensor, capacity: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return y, nu ``(rows, 1)`` and mu ``(1, columns)`` in float64, and a number: 0 if they are right.

    `k` and `capacity` are float64, ``(rows, 1)`` and ``(1, columns)``.
    """
    x = logits.contiguous()
    rows, n = x.shape
    c = max(32, shapes.power_of_2(n))
    r = max(1, 32 * WARPS * PER_THREAD // c)
    work = torch.zeros(ROUNDS * 2 * c + 2, dtype=torch.float64, device=x.device)
    counters = work[-2:].view(torch.int32)
    y = torch.empty_like(x)
    nu = torch.zeros(rows, 1, dtype=torch.float64, device=x.device)
    mu = torch.empty(1, n, dtype=torch.float64, device=x.device)
    one = k.stride(0) == 0 or rows == 1
    options = {} if INTERPRETED else {"launch_cooperative_grid": True}
    grid = (min(_programs(x.get_device()), shapes.cdiv(rows, r)),)
    with torch.cuda.device_of(x):
        _solve[grid](
            x, k, capacity.contiguous(), y, nu, mu, work, counters, counters[2:], rows, n, 0 if one else 1,
            1.0 / temperature, R=r, C=c, ROUNDS=ROUNDS, num_warps=WARPS, **options,
        )  # fmt: skip
    return y, nu, mu, counters[2]
