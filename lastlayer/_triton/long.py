"""Rows that are too long for registers: the search for nu, and the output.

One program streams a row. Where there are too few rows to fill the chip, each row is split over programs, with one
launch per pass. The host reads nothing in between.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from lastlayer._triton import plan as shapes
from lastlayer._triton.ahead import Launch, launch_all
from lastlayer._triton.device import (
    LOG2E,
    PASSES,
    cardinality,
    end_columns,
    exp,
    exp2,
    is_finite,
    load_flat,
    load_whole,
    log_sigmoid,
    peak_and_mass,
    points,
    rcp,
    sample,
    settle,
    sweep,
    sweep_step,
    whole_tiles,
)
from lastlayer._triton.rows import PER_ROW, Rows

SPLIT_PASSES = 5  # launches of a split search; a row that needs more is settled by one program


@triton.jit
def _value(x, center, delta, KIND: tl.constexpr):
    """The output, y or log y, at scores of any row."""
    if KIND == "y":
        out = rcp(1 + exp2((center - x) * LOG2E) * exp(-delta))
        if not tl.abs(delta) <= 1:  # a row that was settled: infinite scores, or scores further apart than exp reaches
            end = tl.where(delta > 0, (x > float("-inf")).to(tl.float32), (x == float("inf")).to(tl.float32))
            out = tl.where(is_finite(delta), rcp(1 + exp((center - x) - delta)), end)
            out = tl.where(delta != delta, delta, out)
        return out
    else:
        return log_sigmoid(points(x, center, delta))


@triton.jit
def emit(x_ptr, m_ptr, out_ptr, row, m_row, m_col, n, lo, hi, center, delta, inv_t, KIND, BLOCK, MASKED):
    """Write y or log y of the classes lo <= j < hi of one row."""
    first, skip, whole = whole_tiles(x_ptr.dtype, row, n, lo, hi, BLOCK)
    for j in range(0, whole, BLOCK):
        i = j + tl.arange(0, BLOCK)
        x = load_whole(x_ptr, m_ptr, row, m_row, m_col, n, first, i, inv_t, MASKED)
        tl.store(out_ptr + first + i, _value(x, center, delta, KIND).to(out_ptr.dtype.element_ty))
    for j in range(0, hi - lo - whole, BLOCK // 4):
        cols = end_columns(j + tl.arange(0, BLOCK // 4), n, lo, hi, skip, whole)
        x = load_flat(x_ptr, m_ptr, row, m_row, m_col, n, cols, inv_t, MASKED)
        out = _value(x, center, delta, KIND)
        tl.store(out_ptr + (row * n + cols), out.to(out_ptr.dtype.element_ty), mask=cols < n)


@triton.jit(do_not_specialize=["units"], do_not_specialize_on_alignment=PER_ROW)
def _streamed(
    x_ptr, m_ptr, k_ptr, out_ptr, center_ptr, delta_ptr, mass_ptr, units, m_row, m_col, k_row, inv_t,
    ALIGN: tl.constexpr, W: tl.constexpr, C: tl.constexpr, KIND: tl.constexpr, MASKED: tl.constexpr,
    MASS: tl.constexpr, TOL: tl.constexpr, SAMPLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row per program, read once from memory and again from the cache."""
    n = units * ALIGN
    row = tl.program_id(0).to(tl.int64)
    k = cardinality(k_ptr, row, k_row)
    center = sample(x_ptr, m_ptr, row, m_row, m_col, n, k, inv_t, SAMPLE, MASKED)
    delta = tl.full((), 0.0, tl.float32)
    mass = delta
    left = PASSES
    while left > 0:
        f, above, s1, s2, h2 = sweep(x_ptr, m_ptr, row, m_row, m_col, n, 0, n, center, inv_t, W, C, MASKED)
        step, mass, close, lost = sweep_step(f, above, s1, s2, h2, k, TOL)
        delta = tl.where(close, step, float("nan"))
        center = tl.where(close, center, center - step)
        left = tl.where(close | lost, 0, left - 1)
    if is_finite(delta):
        tl.store(center_ptr + row, center)
        tl.store(delta_ptr + row, delta)
        if MASS:
            tl.store(mass_ptr + row, tl.log(mass))
        if KIND != "nu":
            emit(x_ptr, m_ptr, out_ptr, row, m_row, m_col, n, 0, n, center, delta, inv_t, KIND, W * C, MASKED)
    else:
        center, delta = settle(x_ptr, m_ptr, row, m_row, m_col, n, k, inv_t, BLOCK, MASKED)
        tl.store(center_ptr + row, center)
        tl.store(delta_ptr + row, delta)
        if MASS:
            peak, total = peak_and_mass(x_ptr, m_ptr, row, m_row, m_col, n, center, delta, inv_t, BLOCK, MASKED)
            tl.store(mass_ptr + row, peak + tl.log(total))
        if KIND != "nu":
            emit(x_ptr, m_ptr, out_ptr, row, m_row, m_col, n, 0, n, center, delta, inv_t, KIND, BLOCK, MASKED)


@triton.jit
def _split_state(parts_ptr, state_ptr, row, rows, k, splits, G: tl.constexpr, TOL: tl.constexpr):
    """The result of the last launch for a row: (center, delta, mass); delta is nan before the end, infinite if lost."""
    center = tl.load(state_ptr + row)
    delta = tl.load(state_ptr + rows + row)
    mass = tl.load(state_ptr + 2 * rows + row)
    if delta != delta:
        part = tl.arange(0, G)
        here = parts_ptr + (row * splits + part) * 5
        inside = part < splits
        f = tl.sum(tl.load(here, mask=inside, other=0.0), 0)
        above = tl.sum(tl.load(here + 1, mask=inside, other=0.0), 0)
        s1 = tl.sum(tl.load(here + 2, mask=inside, other=0.0), 0)
        s2 = tl.sum(tl.load(here + 3, mask=inside, other=0.0), 0)
        h2 = tl.sum(tl.load(here + 4, mask=inside, other=0.0), 0)
        step, mass, close, lost = sweep_step(f, above, s1, s2, h2, k, TOL)
        delta = tl.where(lost, float("inf"), tl.where(close, step, float("nan")))
        center = tl.where(close | lost, center, center - step)
    return center, delta, mass


@triton.jit(do_not_specialize=["rows", "units", "splits"], do_not_specialize_on_alignment=PER_ROW)
def _split_pass(
    x_ptr, m_ptr, k_ptr, old_parts_ptr, parts_ptr, old_state_ptr, state_ptr, rows, units, m_row, m_col, k_row, inv_t,
    chunk, splits, ALIGN: tl.constexpr, G: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
    FIRST: tl.constexpr, MASKED: tl.constexpr, TOL: tl.constexpr, SAMPLE: tl.constexpr,
):  # fmt: skip
    """One pass over a chunk of a row."""
    n = units * ALIGN
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    k = cardinality(k_ptr, row, k_row)
    if FIRST:
        center = sample(x_ptr, m_ptr, row, m_row, m_col, n, k, inv_t, SAMPLE, MASKED)
        delta = tl.full((), float("nan"), tl.float32)
        mass = delta
    else:
        center, delta, mass = _split_state(old_parts_ptr, old_state_ptr, row, rows, k, splits, G, TOL)
    if part == 0:
        tl.store(state_ptr + row, center)
        tl.store(state_ptr + rows + row, delta)
        tl.store(state_ptr + 2 * rows + row, mass)
    if delta != delta:
        lo = part * chunk
        hi = tl.minimum(lo + chunk, n)
        f, above, s1, s2, h2 = sweep(x_ptr, m_ptr, row, m_row, m_col, n, lo, hi, center, inv_t, W, C, MASKED)
        here = parts_ptr + (row * splits + part) * 5
        tl.store(here, f)
        tl.store(here + 1, above)
        tl.store(here + 2, s1)
        tl.store(here + 3, s2)
        tl.store(here + 4, h2)


@triton.jit(do_not_specialize=["rows", "units", "splits"], do_not_specialize_on_alignment=PER_ROW)
def _split_finish(
    x_ptr, m_ptr, k_ptr, parts_ptr, state_ptr, out_ptr, center_ptr, delta_ptr, mass_ptr, rows, units, m_row, m_col,
    k_row, inv_t, chunk, splits, ALIGN: tl.constexpr, G: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
    KIND: tl.constexpr, MASKED: tl.constexpr, MASS: tl.constexpr, TOL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a chunk of a row; the first program of a row that was not solved solves and writes all of it."""
    n = units * ALIGN
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    k = cardinality(k_ptr, row, k_row)
    center, delta, mass = _split_state(parts_ptr, state_ptr, row, rows, k, splits, G, TOL)
    if is_finite(delta):
        if part == 0:
            tl.store(center_ptr + row, center)
            tl.store(delta_ptr + row, delta)
            if MASS:
                tl.store(mass_ptr + row, tl.log(mass))
        if KIND != "nu":
            lo = part * chunk
            hi = tl.minimum(lo + chunk, n)
            emit(x_ptr, m_ptr, out_ptr, row, m_row, m_col, n, lo, hi, center, delta, inv_t, KIND, W * C, MASKED)
    elif part == 0:
        center, delta = settle(x_ptr, m_ptr, row, m_row, m_col, n, k, inv_t, BLOCK, MASKED)
        tl.store(center_ptr + row, center)
        tl.store(delta_ptr + row, delta)
        if MASS:
            peak, total = peak_and_mass(x_ptr, m_ptr, row, m_row, m_col, n, center, delta, inv_t, BLOCK, MASKED)
            tl.store(mass_ptr + row, peak + tl.log(total))
        if KIND != "nu":
            emit(x_ptr, m_ptr, out_ptr, row, m_row, m_col, n, 0, n, center, delta, inv_t, KIND, BLOCK, MASKED)


def solve_long(
    given: Rows,
    out: Tensor,
    center: Tensor,
    delta: Tensor,
    mass: Tensor | None,
    kind: str,
    later: Callable[[], list[Launch]] | None = None,
) -> None:
    """Search rows too long for registers; write `out`, `center`, `delta` and, where given, log sum h.

    What is launched later is compiled beside the kernels of the search.
    """
    x, rows, n = given.x, given.count, given.n
    tile, options = shapes.stream(x.element_size(), shapes.is_split(rows, n))
    common: dict[str, Any] = {
        "ALIGN": given.align,
        "MASKED": given.masked,
        **tile,
        **options,
        "TOL": given.tolerance if mass is None else given.tolerance_of_mass,
    }
    end: dict[str, Any] = {"KIND": kind, "MASS": mass is not None, "BLOCK": shapes.BLOCK}
    results = (out, center, delta, center if mass is None else mass)
    if not shapes.is_split(rows, n):
        args = (*given.head, *results, *given.tail)
        launch_all([Launch(_streamed, (rows,), args, {**end, "SAMPLE": shapes.SAMPLE, **common})], later, shared=True)
        return
    splits = shapes.cdiv(n, shapes.CHUNK)
    common["G"] = shapes.group(splits)
    grid, tail = (splits, rows), (*given.tail, shapes.CHUNK, splits)
    parts = center.new_empty((SPLIT_PASSES, rows, splits, 5))
    state = center.new_empty((SPLIT_PASSES, 3, rows))
    launches = []
    for i in range(SPLIT_PASSES):
        before = max(i - 1, 0)
        args = (*given.head, parts[before], parts[i], state[before], state[i], rows, *tail)
        launches.append(Launch(_split_pass, grid, args, {"FIRST": i == 0, "SAMPLE": shapes.SAMPLE, **common}))
    args = (*given.head, parts[-1], state[-1], *results, rows, *tail)
    launch_all([*launches, Launch(_split_finish, grid, args, {**end, **common})], later, shared=True)
