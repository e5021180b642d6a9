"""The LML projection on the GPU: what `lastlayer.project.lml` asks of an implementation.

Rows of up to `plan.LONGEST` classes are held in registers, several to a program where they are short: one read and
one write a class. Longer rows are streamed by a program a row, or, where there are too few rows to fill the chip,
split over programs, a launch a pass. All of it without a word from the host in between.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer._triton import plan as shapes
from lastlayer._triton.device import (
    LOG2E,
    PASSES,
    advance,
    by_row,
    cardinality,
    end_columns,
    exp,
    exp2,
    is_finite,
    load_flat,
    load_row,
    load_tile,
    load_whole,
    log_sigmoid,
    peak_and_mass,
    points,
    rcp,
    sample,
    scaled,
    search,
    settle,
    store_tile,
    sweep,
    whole_tiles,
)
from lastlayer._triton.launch import launch
from lastlayer._triton.lml_backward import backward as backward
from lastlayer._triton.lml_loss import loss_backward as loss_backward
from lastlayer._triton.lml_loss import loss_forward as loss_forward
from lastlayer._triton.lml_loss import loss_forward_with_grad as loss_forward_with_grad
from lastlayer._triton.lml_loss import scale_rows_ as scale_rows_
from lastlayer._triton.lml_loss import weight_of_mean as weight_of_mean
from lastlayer._triton.rows import Rows, end_of_no_classes_

SPLIT_PASSES = 5  # launches of a split search; a row that needs more is settled by one program


@triton.jit
def _emit_tile(e, xs_ptr, m_ptr, out_ptr, row, m_row, m_col, n, center, delta, inv_t, first, W, C, KIND, FULL, MASKED):
    """Write a tile of y from E, or of log y from the logits."""
    if KIND == "y":
        out = rcp(1 + e * by_row(exp(-delta)))
    else:
        x = scaled(load_tile(xs_ptr, m_ptr, row, m_row, m_col, n, first, W, C, FULL, MASKED), inv_t)
        out = log_sigmoid((x - by_row(center)) + by_row(delta))
    store_tile(out_ptr, row, n, out, first, W, C, FULL)


@triton.jit
def _value(x, center, delta, KIND: tl.constexpr):
    """The output, y or log y, at scores of one row, whatever it holds."""
    if KIND == "y":
        out = rcp(1 + exp2((center - x) * LOG2E) * exp(-delta))
        if not tl.abs(delta) <= 1:  # a row that was settled: scores without an end, or further apart than exp reaches
            end = tl.where(delta > 0, (x > float("-inf")).to(tl.float32), (x == float("inf")).to(tl.float32))
            out = tl.where(is_finite(delta), rcp(1 + exp((center - x) - delta)), end)
            out = tl.where(delta != delta, delta, out)
        return out
    else:
        return log_sigmoid(points(x, center, delta))


@triton.jit
def _emit(x_ptr, m_ptr, out_ptr, row, m_row, m_col, n, lo, hi, center, delta, inv_t, KIND, BLOCK, MASKED):
    """Write y or log y of the classes lo <= j < hi of one row."""
    first, skip, whole = whole_tiles(x_ptr, row, n, lo, hi, BLOCK)
    for j in range(0, whole, BLOCK):
        i = j + tl.arange(0, BLOCK)
        x = load_whole(x_ptr, m_ptr, row, m_row, m_col, n, first, i, inv_t, MASKED)
        tl.store(out_ptr + first + i, _value(x, center, delta, KIND).to(out_ptr.dtype.element_ty))
    for j in range(0, hi - lo - whole, BLOCK // 4):
        cols = end_columns(j + tl.arange(0, BLOCK // 4), n, lo, hi, skip, whole)
        x = load_flat(x_ptr, m_ptr, row, m_row, m_col, n, cols, inv_t, MASKED)
        out = _value(x, center, delta, KIND)
        tl.store(out_ptr + (row * n + cols), out.to(out_ptr.dtype.element_ty), mask=cols < n)


@triton.jit(do_not_specialize=["rows", "units"])
def _resident(
    x_ptr, m_ptr, k_ptr, out_ptr, center_ptr, delta_ptr, rows, units, m_row, m_col, k_row, inv_t,
    ALIGN: tl.constexpr, R: tl.constexpr, C: tl.constexpr, WA: tl.constexpr, WB: tl.constexpr, WC: tl.constexpr,
    KIND: tl.constexpr, MASKED: tl.constexpr, FULL: tl.constexpr, TOL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """R rows a program, held in registers."""
    n = units * ALIGN
    first = tl.program_id(0).to(tl.int64) * R
    row = tl.minimum(first + tl.arange(0, R), rows - 1)  # the last row may stand several times
    k = cardinality(k_ptr, row, k_row)
    xa, xb, xc = load_row(x_ptr, m_ptr, row, m_row, m_col, n, WA, WB, WC, C, FULL, MASKED)
    shift = tl.load(x_ptr + row * n).to(tl.float32)
    ea, eb, ec, center, delta, _, lost = search(xa, xb, xc, shift, k, n, inv_t, WB, WC, not FULL, MASKED, TOL)
    tl.store(center_ptr + row, center)
    tl.store(delta_ptr + row, delta)
    if KIND != "nu":
        _emit_tile(
            ea, x_ptr, m_ptr, out_ptr, row, m_row, m_col, n, center, delta, inv_t, 0, WA, C, KIND,
            FULL or WB > 0, MASKED,
        )  # fmt: skip
        if WB > 0:
            _emit_tile(
                eb, x_ptr, m_ptr, out_ptr, row, m_row, m_col, n, center, delta, inv_t, WA * C, WB, C, KIND,
                FULL or WC > 0, MASKED,
            )  # fmt: skip
        if WC > 0:
            _emit_tile(
                ec, x_ptr, m_ptr, out_ptr, row, m_row, m_col, n, center, delta, inv_t, (WA + WB) * C, WC, C,
                KIND, FULL, MASKED,
            )  # fmt: skip
    lost = lost & (first + tl.arange(0, R) < rows)  # a row that stands several times is settled once
    if tl.max(lost.to(tl.int32), 0) > 0:
        tl.debug_barrier()  # what was written for these rows is written again
        for i in range(R):
            if tl.max((lost & (tl.arange(0, R) == i)).to(tl.int32), 0) > 0:
                one = first + i
                _settle_and_emit(
                    x_ptr, m_ptr, out_ptr, center_ptr, delta_ptr, one, m_row, m_col, n,
                    cardinality(k_ptr, one, k_row), inv_t, KIND, BLOCK, MASKED,
                )  # fmt: skip


@triton.jit
def _settle_and_emit(x_ptr, m_ptr, out_ptr, center_ptr, delta_ptr, row, m_row, m_col, n, k, inv_t, KIND, BLOCK, MASKED):
    center, delta = settle(x_ptr, m_ptr, row, m_row, m_col, n, k, inv_t, BLOCK, MASKED)
    tl.store(center_ptr + row, center)
    tl.store(delta_ptr + row, delta)
    if KIND != "nu":
        _emit(x_ptr, m_ptr, out_ptr, row, m_row, m_col, n, 0, n, center, delta, inv_t, KIND, BLOCK, MASKED)


@triton.jit(do_not_specialize=["units"])
def _streamed(
    x_ptr, m_ptr, k_ptr, out_ptr, center_ptr, delta_ptr, mass_ptr, units, m_row, m_col, k_row, inv_t,
    ALIGN: tl.constexpr, W: tl.constexpr, C: tl.constexpr, KIND: tl.constexpr, MASKED: tl.constexpr,
    MASS: tl.constexpr, TOL: tl.constexpr, SAMPLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row a program, read once from memory and again from the cache."""
    n = units * ALIGN
    row = tl.program_id(0).to(tl.int64)
    k = cardinality(k_ptr, row, k_row)
    center = sample(x_ptr, m_ptr, row, m_row, m_col, n, k, inv_t, SAMPLE, MASKED)
    delta = tl.full((), 0.0, tl.float32)
    mass = delta
    left = PASSES
    while left > 0:
        f, above, s1, s2, h2 = sweep(x_ptr, m_ptr, row, m_row, m_col, n, 0, n, center, inv_t, W, C, MASKED)
        step, mass, close, lost = advance(f, above, s1, s2, h2, k, TOL)
        delta = tl.where(close, step, float("nan"))
        center = tl.where(close, center, center - step)
        left = tl.where(close | lost, 0, left - 1)
    if is_finite(delta):
        tl.store(center_ptr + row, center)
        tl.store(delta_ptr + row, delta)
        if MASS:
            tl.store(mass_ptr + row, tl.log(mass))
        if KIND != "nu":
            _emit(x_ptr, m_ptr, out_ptr, row, m_row, m_col, n, 0, n, center, delta, inv_t, KIND, W * C, MASKED)
    else:
        center, delta = settle(x_ptr, m_ptr, row, m_row, m_col, n, k, inv_t, BLOCK, MASKED)
        tl.store(center_ptr + row, center)
        tl.store(delta_ptr + row, delta)
        if MASS:
            peak, total = peak_and_mass(x_ptr, m_ptr, row, m_row, m_col, n, center, delta, inv_t, BLOCK, MASKED)
            tl.store(mass_ptr + row, peak + tl.log(total))
        if KIND != "nu":
            _emit(x_ptr, m_ptr, out_ptr, row, m_row, m_col, n, 0, n, center, delta, inv_t, KIND, BLOCK, MASKED)


@triton.jit
def _split_state(parts_ptr, state_ptr, row, rows, k, SPLITS: tl.constexpr, G: tl.constexpr, TOL: tl.constexpr):
    """What the last launch found for a row: (center, delta, mass); delta is nan before the end, infinite if lost."""
    center = tl.load(state_ptr + row)
    delta = tl.load(state_ptr + rows + row)
    mass = tl.load(state_ptr + 2 * rows + row)
    if delta != delta:
        part = tl.arange(0, G)
        here = parts_ptr + (row * SPLITS + part) * 5
        inside = part < SPLITS
        f = tl.sum(tl.load(here, mask=inside, other=0.0), 0)
        above = tl.sum(tl.load(here + 1, mask=inside, other=0.0), 0)
        s1 = tl.sum(tl.load(here + 2, mask=inside, other=0.0), 0)
        s2 = tl.sum(tl.load(here + 3, mask=inside, other=0.0), 0)
        h2 = tl.sum(tl.load(here + 4, mask=inside, other=0.0), 0)
        step, mass, close, lost = advance(f, above, s1, s2, h2, k, TOL)
        delta = tl.where(lost, float("inf"), tl.where(close, step, float("nan")))
        center = tl.where(close | lost, center, center - step)
    return center, delta, mass


@triton.jit(do_not_specialize=["rows", "units"])
def _split_pass(
    x_ptr, m_ptr, k_ptr, old_parts_ptr, parts_ptr, old_state_ptr, state_ptr, rows, units, m_row, m_col, k_row, inv_t,
    chunk, ALIGN: tl.constexpr, SPLITS: tl.constexpr, G: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
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
        center, delta, mass = _split_state(old_parts_ptr, old_state_ptr, row, rows, k, SPLITS, G, TOL)
    if part == 0:
        tl.store(state_ptr + row, center)
        tl.store(state_ptr + rows + row, delta)
        tl.store(state_ptr + 2 * rows + row, mass)
    if delta != delta:
        lo = part * chunk
        hi = tl.minimum(lo + chunk, n)
        f, above, s1, s2, h2 = sweep(x_ptr, m_ptr, row, m_row, m_col, n, lo, hi, center, inv_t, W, C, MASKED)
        here = parts_ptr + (row * SPLITS + part) * 5
        tl.store(here, f)
        tl.store(here + 1, above)
        tl.store(here + 2, s1)
        tl.store(here + 3, s2)
        tl.store(here + 4, h2)


@triton.jit(do_not_specialize=["rows", "units"])
def _split_finish(
    x_ptr, m_ptr, k_ptr, parts_ptr, state_ptr, out_ptr, center_ptr, delta_ptr, mass_ptr, rows, units, m_row, m_col,
    k_row, inv_t, chunk, ALIGN: tl.constexpr, SPLITS: tl.constexpr, G: tl.constexpr, W: tl.constexpr,
    C: tl.constexpr, KIND: tl.constexpr, MASKED: tl.constexpr, MASS: tl.constexpr, TOL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a chunk of a row; the first program of a row that was not solved solves and writes all of it."""
    n = units * ALIGN
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    k = cardinality(k_ptr, row, k_row)
    center, delta, mass = _split_state(parts_ptr, state_ptr, row, rows, k, SPLITS, G, TOL)
    if is_finite(delta):
        if part == 0:
            tl.store(center_ptr + row, center)
            tl.store(delta_ptr + row, delta)
            if MASS:
                tl.store(mass_ptr + row, tl.log(mass))
        if KIND != "nu":
            lo = part * chunk
            hi = tl.minimum(lo + chunk, n)
            _emit(x_ptr, m_ptr, out_ptr, row, m_row, m_col, n, lo, hi, center, delta, inv_t, KIND, W * C, MASKED)
    elif part == 0:
        center, delta = settle(x_ptr, m_ptr, row, m_row, m_col, n, k, inv_t, BLOCK, MASKED)
        tl.store(center_ptr + row, center)
        tl.store(delta_ptr + row, delta)
        if MASS:
            peak, total = peak_and_mass(x_ptr, m_ptr, row, m_row, m_col, n, center, delta, inv_t, BLOCK, MASKED)
            tl.store(mass_ptr + row, peak + tl.log(total))
        if KIND != "nu":
            _emit(x_ptr, m_ptr, out_ptr, row, m_row, m_col, n, 0, n, center, delta, inv_t, KIND, BLOCK, MASKED)


def forward(
    logits: Tensor, k: Tensor | float, mask: Tensor | None, temperature: float, kind: str
) -> tuple[Tensor, Tensor, Tensor]:
    """As `lastlayer.project.lml._plain`; `k` may be one number."""
    n = logits.shape[-1]
    x = logits.contiguous()
    out = x.new_empty(0) if kind == "nu" else torch.empty_like(x)
    center = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    delta = torch.empty_like(center)
    rows = center.numel()
    if rows == 0 or n == 0:
        return out, center.zero_(), end_of_no_classes_(delta, k)
    given = Rows(x.view(rows, n), k, mask, temperature)
    if n > shapes.LONGEST:
        solve_long(given, out, center, delta, None, kind)
    else:
        p = shapes.plan(n, shapes.FORWARD[x.element_size()], x.element_size())
        launch(
            _resident, (shapes.cdiv(rows, p.rows),), *given.head, out, center, delta, rows, *given.tail,
            **p.tiles, KIND=kind, MASKED=given.masked, TOL=given.tolerance, ALIGN=given.align, num_warps=p.warps,
        )  # fmt: skip
    return out, center, delta


def solve_long(given: Rows, out: Tensor, center: Tensor, delta: Tensor, mass: Tensor | None, kind: str) -> None:
    """Search rows too long for registers; write `out`, `center`, `delta` and, where given, log sum h."""
    x, rows, n = given.x, given.count, given.n
    tile, options = shapes.stream(x.element_size(), shapes.is_split(rows, n))
    common: dict[str, Any] = {
        "ALIGN": given.align,
        "MASKED": given.masked,
        **tile,
        **options,
        "TOL": given.tolerance if mass is None else given.tolerance_of_mass,
    }
    has_mass = mass is not None
    mass = center if mass is None else mass
    if not shapes.is_split(rows, n):
        launch(
            _streamed, (rows,), *given.head, out, center, delta, mass, *given.tail,
            KIND=kind, MASS=has_mass, SAMPLE=shapes.SAMPLE, BLOCK=shapes.BLOCK, **common,
        )  # fmt: skip
        return
    splits = shapes.cdiv(n, shapes.CHUNK)
    common |= {"SPLITS": splits, "G": shapes.power_of_2(splits)}
    parts = center.new_empty((SPLIT_PASSES, rows, splits, 5))
    state = center.new_empty((SPLIT_PASSES, 3, rows))
    for i in range(SPLIT_PASSES):
        before = max(i - 1, 0)
        launch(
            _split_pass, (splits, rows), *given.head, parts[before], parts[i], state[before], state[i], rows,
            *given.tail, shapes.CHUNK, FIRST=i == 0, SAMPLE=shapes.SAMPLE, **common,
        )  # fmt: skip
    launch(
        _split_finish, (splits, rows), *given.head, parts[-1], state[-1], out, center, delta, mass, rows, *given.tail,
        shapes.CHUNK, KIND=kind, MASS=has_mass, BLOCK=shapes.BLOCK, **common,
    )  # fmt: skip
