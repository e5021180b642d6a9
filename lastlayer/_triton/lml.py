"""The LML projection on the GPU: what `lastlayer.project.lml` needs of an implementation.

Rows of up to `plan.LONGEST` classes are held in registers, several per program where they are short: one read and one
write per class. Longer rows are in `long`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer._triton import plan as shapes
from lastlayer._triton.ahead import Absent, Launch, launch_all
from lastlayer._triton.device import (
    by_row,
    cardinality,
    exp,
    load_row,
    load_tile,
    log_sigmoid,
    rcp,
    scaled,
    search,
    settle,
    store_tile,
)
from lastlayer._triton.launch import launch, prepare, relaunch
from lastlayer._triton.lml_backward import backward as backward
from lastlayer._triton.lml_backward import later
from lastlayer._triton.lml_backward import probabilities_backward as probabilities_backward
from lastlayer._triton.lml_loss import loss_backward as loss_backward
from lastlayer._triton.lml_loss import loss_forward as loss_forward
from lastlayer._triton.lml_loss import loss_forward_with_grad as loss_forward_with_grad
from lastlayer._triton.lml_loss import row_weights as row_weights
from lastlayer._triton.lml_loss import scale_rows_ as scale_rows_
from lastlayer._triton.lml_loss import step_of as step_of
from lastlayer._triton.lml_loss import take_step as take_step
from lastlayer._triton.long import emit, solve_long
from lastlayer._triton.rows import PER_ROW, Rows, end_of_no_classes_, general_form


@triton.jit
def _emit_tile(e, xs_ptr, m_ptr, out_ptr, row, m_row, m_col, n, center, delta, inv_t, first, W, C, KIND, FULL, MASKED):
    """Write a tile of y from E, or of log y from the logits."""
    if KIND == "y":
        out = rcp(1 + e * by_row(exp(-delta)))
    else:
        x = scaled(load_tile(xs_ptr, m_ptr, row, m_row, m_col, n, first, W, C, FULL, MASKED), inv_t)
        out = log_sigmoid((x - by_row(center)) + by_row(delta))
    store_tile(out_ptr, row, n, out, first, W, C, FULL)


@triton.jit(do_not_specialize=["rows", "units"], do_not_specialize_on_alignment=PER_ROW)
def _resident(
    x_ptr, m_ptr, k_ptr, out_ptr, center_ptr, delta_ptr, rows, units, m_row, m_col, k_row, inv_t,
    ALIGN: tl.constexpr, R: tl.constexpr, C: tl.constexpr, WA: tl.constexpr, WB: tl.constexpr, WC: tl.constexpr,
    KIND: tl.constexpr, MASKED: tl.constexpr, FULL: tl.constexpr, TOL: tl.constexpr, BLOCK: tl.constexpr,
    SETTLE: tl.constexpr,
):  # fmt: skip
    """R rows per program, held in registers; center and delta are stored unless their address is 0.

    Without SETTLE the rows that the search gives up are `_settled`'s, marked by a center of nan.
    """
    n = units * ALIGN
    first = tl.program_id(0).to(tl.int64) * R
    row = tl.minimum(first + tl.arange(0, R), rows - 1)  # the last row may occur several times
    k = cardinality(k_ptr, row, k_row)
    xa, xb, xc = load_row(x_ptr, m_ptr, row, m_row, m_col, n, WA, WB, WC, C, FULL, MASKED)
    shift = tl.load(x_ptr + row * n).to(tl.float32)
    ea, eb, ec, center, delta, _, lost = search(xa, xb, xc, shift, k, n, inv_t, WB, WC, not FULL, MASKED, TOL)
    if not SETTLE:
        tl.store(center_ptr + row, tl.where(lost, float("nan"), center))
        tl.store(delta_ptr + row, delta)
    elif center_ptr.to(tl.int64) != 0:
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
    if SETTLE:
        _settle_lost(
            lost, x_ptr, m_ptr, k_ptr, out_ptr, center_ptr, delta_ptr, first, rows, n, m_row, m_col, k_row, inv_t, R,
            KIND, BLOCK, MASKED,
        )  # fmt: skip


# The second half of `_resident` without SETTLE, which is compiled beside it.
@triton.jit(do_not_specialize=["rows", "units"], do_not_specialize_on_alignment=PER_ROW)
def _settled(
    x_ptr, m_ptr, k_ptr, out_ptr, center_ptr, delta_ptr, rows, units, m_row, m_col, k_row, inv_t,
    ALIGN: tl.constexpr, R: tl.constexpr, C: tl.constexpr, WA: tl.constexpr, WB: tl.constexpr, WC: tl.constexpr,
    KIND: tl.constexpr, MASKED: tl.constexpr, FULL: tl.constexpr, TOL: tl.constexpr, BLOCK: tl.constexpr,
    SETTLE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * R
    center = tl.load(center_ptr + tl.minimum(first + tl.arange(0, R), rows - 1))
    _settle_lost(
        center != center, x_ptr, m_ptr, k_ptr, out_ptr, center_ptr, delta_ptr, first, rows, units * ALIGN, m_row,
        m_col, k_row, inv_t, R, KIND, BLOCK, MASKED,
    )  # fmt: skip


@triton.jit
def _settle_lost(
    lost, x_ptr, m_ptr, k_ptr, out_ptr, center_ptr, delta_ptr, first, rows, n, m_row, m_col, k_row, inv_t,
    R: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Solve rows that the fast search has given up, one after another."""
    lost = lost & (first + tl.arange(0, R) < rows)  # a row that occurs several times is settled once
    if tl.max(lost.to(tl.int32), 0) > 0:
        tl.debug_barrier()  # these rows are written again
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
    if center_ptr.to(tl.int64) != 0:
        tl.store(center_ptr + row, center)
        tl.store(delta_ptr + row, delta)
    if KIND != "nu":
        emit(x_ptr, m_ptr, out_ptr, row, m_row, m_col, n, 0, n, center, delta, inv_t, KIND, BLOCK, MASKED)


def forward(
    logits: Tensor, k: Tensor | float, mask: Tensor | None, temperature: float, kind: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Do the same as `lastlayer.project.lml._plain`; `k` may be one number."""
    try:
        return _forward(logits, k, mask, temperature, kind)
    except Absent:
        return _general_forward(logits, k, mask, temperature, kind)


def _general_forward(
    logits: Tensor, k: Tensor | float, mask: Tensor | None, temperature: float, kind: str
) -> tuple[Tensor, Tensor, Tensor]:
    with shapes.general_form():
        out, center, delta = _forward(*general_form(logits, k, mask), temperature, kind)
    return out.to(logits.dtype), center, delta


def _forward(
    logits: Tensor, k: Tensor | float, mask: Tensor | None, temperature: float, kind: str
) -> tuple[Tensor, Tensor, Tensor]:
    n = logits.shape[-1]
    x = logits.contiguous()
    out = x.new_empty(0) if kind == "nu" else torch.empty_like(x)
    center = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    delta = torch.empty_like(center)
    rows = center.numel()
    if rows == 0 or n == 0:
        return out, center.zero_(), end_of_no_classes_(delta, k)
    if n > shapes.longest():
        solve_long(Rows(x.view(rows, n), k, mask, temperature), out, center, delta, None, kind)
    else:
        p = shapes.plan(n, shapes.FORWARD, x.element_size())
        given = Rows(x.view(rows, n), k, mask, temperature, p.align)
        if p is shapes.shared(n):
            launch_all(_halves(given, out, center, delta, kind, p), shared=True)
        else:
            kernel, grid, args, options = _whole(given, out, center, delta, kind, p)
            launch(kernel, grid, *args, **options)
    return out, center, delta


def _whole(
    given: Rows, out: Tensor, center: Tensor, delta: Tensor, kind: str, p: shapes.Plan, settle: bool = True
) -> Launch:
    args = (*given.head, out, center, delta, given.count, *given.tail)
    options: dict[str, Any] = {"KIND": kind, "MASKED": given.masked, "TOL": given.tolerance, "SETTLE": settle}
    return Launch(_resident, (shapes.cdiv(given.count, p.rows),), args, {**p.tiles, **options, "num_warps": p.warps})


def _halves(given: Rows, out: Tensor, center: Tensor, delta: Tensor, kind: str, p: shapes.Plan) -> list[Launch]:
    """The kernel for a rare length in two, which are compiled side by side."""
    fast = _whole(given, out, center, delta, kind, p, settle=False)
    return [fast, fast._replace(kernel=_settled)]


def probabilities(
    logits: Tensor, k: float, mask: Tensor | None, temperature: float, record: bool
) -> tuple[Tensor, Tensor | None]:
    """Return y for one `k`, and with `record` what the backward pass needs: center, delta and one more row to spare.

    These are of shape ``(3, *batch)``. The common call, in as few steps as there can be; it takes no mask.
    """
    n, x = logits.shape[-1], logits.contiguous()
    rows = x.numel() // n if n else 0
    if not 0 < rows < 1 << 31:
        out, center, delta = forward(logits, k, mask, temperature, "y")
        return out, torch.cat([center, delta, delta], -1).movedim(-1, 0).contiguous() if record else None
    out = torch.empty_like(x)
    numbers = shapes.floats(x, (3, *x.shape[:-1])) if record else None
    device, first = x.get_device(), x.data_ptr()
    key = ("y", device, x.dtype, n, first & 15, rows & 3, temperature == 1)
    center_at = 0 if numbers is None else numbers.data_ptr()  # 0: not to be stored
    inverse = None if temperature == 1 else 1.0 / temperature
    if relaunch(
        key, device, rows, first, first, k, out.data_ptr(), center_at, center_at + 4 * rows, rows,
        n // shapes.alignment(n), 0, 0, None, inverse,
    ):  # fmt: skip
        return out, numbers
    if numbers is None:
        numbers = shapes.floats(x, (3, *x.shape[:-1]))
    center, delta, _ = numbers
    flat = x.view(rows, n)
    p = shapes.plan(n, shapes.FORWARD, x.element_size()) if n <= shapes.LONGEST else None
    rare = p is None or p is shapes.shared(n)
    after = functools.partial(later, flat, temperature, numbers.view(3, rows), out, rare) if record else None
    if rare:
        try:
            if p is None:
                solve_long(Rows(flat, k, None, temperature), out, center, delta, None, "y", after)
            else:
                given = Rows(flat, k, None, temperature, p.align)
                launch_all(_halves(given, out, center, delta, "y", p), after, shared=True)
        except Absent:
            out, center, delta = _general_forward(logits, k, None, temperature, "y")
            return out, torch.stack([center, delta, delta]).squeeze(-1)
        return out, numbers
    assert p is not None
    given = Rows(flat, k, None, temperature, p.align)
    held = launch_all([_whole(given, out, center, delta, "y", p)], after)
    if p is shapes.exact(n, shapes.FORWARD[x.element_size()], x.element_size()):
        prepare(key, held, p.rows)
    return out, numbers
