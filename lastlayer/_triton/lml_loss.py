"""`lml_loss` on the GPU: loss and gradient directly from the logits; no probability is ever written.

Labels are index lists or a tensor of the shape of the logits. With index lists and ``observed = 0`` the loss reads
only the labels, and the gradient of every other class is -pull h / sum h: it is written from the registers of the
search, and the labels' own terms over it. The other cases read the row again, from the cache.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer._triton import plan as shapes
from lastlayer._triton.ahead import Absent, Launch, compile_ahead, is_new, launch_all
from lastlayer._triton.ahead import launch as launch_when_compiled
from lastlayer._triton.device import (
    by_row,
    cardinality,
    columns,
    end_columns,
    exp,
    is_finite,
    load_flat,
    load_row,
    load_tile,
    load_whole,
    log1p,
    log_sigmoid,
    peak_and_mass,
    points,
    rcp,
    scaled,
    search,
    settle,
    store_tile,
    sum2,
    sum_w,
    whole_tiles,
)
from lastlayer._triton.launch import launch, on_current, prepare, ready, relaunch, run_again
from lastlayer._triton.long import solve_long
from lastlayer._triton.rows import PER_ROW, Rows, end_of_no_classes_, general_form

_SMALL = 1 << 18  # numbers of a multi-hot target up to which launches take longer than the work
_LABELS = 32  # labels at a time, at most


@triton.jit
def _unseen(z, rho):
    """-log(1 - rho y) and its slope in z, rho h / (1 - rho y)."""
    q = exp(-tl.abs(z))
    small = q * rcp(1 + q)  # the smaller of y and 1 - y
    y = tl.where(z > 0, 1 - small, small)
    miss = tl.where(z > 0, small, 1 - small)
    rest = miss + (1 - rho) * y  # 1 - rho y, from parts of one sign
    loss = tl.where(z > 0, -tl.log(rest), -log1p(-rho * y))
    slope = rho * y * (miss / rest)
    lost = rest < 1e-30  # rho = 1 and y rounds to 1: the loss is z itself
    return tl.where(lost, z, loss), tl.where(lost, y, slope)


@triton.jit
def _terms(z, x, label, rho, DENSE: tl.constexpr, RHO: tl.constexpr):
    """The loss of each class and its slope in z. `label` is its share as a label; -1 where it is unknown."""
    live = is_finite(x)
    loss = tl.zeros_like(z)
    slope = tl.zeros_like(z)
    if RHO:
        loss, slope = _unseen(z, rho)
        if DENSE:
            rest = tl.where(label < 0, 0.0, 1 - label)
            loss = tl.where(rest != 0, loss * rest, 0.0)  # 0 times an infinite loss is 0
            slope = slope * rest
    if DENSE:
        hit = tl.where(label < 0, 0.0, label)
        q = exp(-tl.abs(z))
        loss = tl.where(hit != 0, loss - log_sigmoid(z) * hit, loss)
        slope = slope - tl.where(z > 0, q, 1.0) * rcp(1 + q) * hit
    return loss, tl.where(live, slope, 0.0)


@triton.jit
def _label_sums(
    x_ptr, m_ptr, i_ptr, row, m_row, m_col, n, n_labels, center, delta, inv_t, rho,
    M: tl.constexpr, RHO: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Sums over the index lists of some rows: the loss, and the slopes in z. `row`, `center`, `delta`: shape (R,)."""
    loss = tl.zeros_like(center)
    pull = tl.zeros_like(center)
    for j in range(0, n_labels, M):
        place = j + tl.arange(0, M)[None, :]
        index = tl.load(i_ptr + (row[:, None] * n_labels + place), mask=place < n_labels, other=-1)
        x = load_flat(x_ptr, m_ptr, row[:, None], m_row, m_col, n, index, inv_t, MASKED)
        z = points(x, center[:, None], delta[:, None])
        q = exp(-tl.abs(z))
        present = index >= 0
        one_loss = -log_sigmoid(z)
        slope = -tl.where(z > 0, q, 1.0) * rcp(1 + q)
        if RHO:  # the sum over all classes has counted these as not observed
            less, less_slope = _unseen(z, rho)
            one_loss -= less
            slope -= less_slope
        loss += tl.sum(tl.where(present, one_loss, 0.0), 1)
        pull += tl.sum(tl.where(present & is_finite(x), slope, 0.0), 1)
    return loss, tl.where(is_finite(delta), pull, 0.0)


@triton.jit
def _label_store(
    x_ptr, m_ptr, i_ptr, d_ptr, row, m_row, m_col, n, lo, hi, n_labels, center, delta, scale, pull, peak, over, inv_t,
    M: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Write the gradient at the labels lo <= index < hi of some rows."""
    for j in range(0, n_labels, M):
        place = j + tl.arange(0, M)[None, :]
        index = tl.load(i_ptr + (row[:, None] * n_labels + place), mask=place < n_labels, other=-1)
        x = load_flat(x_ptr, m_ptr, row[:, None], m_row, m_col, n, index, inv_t, MASKED)
        z = (x - center[:, None]) + delta[:, None]
        q = exp(-tl.abs(z))
        y = rcp(1 + q)
        slope = -tl.where(z > 0, q, 1.0) * y
        share = exp(-tl.abs(z) - peak) * y * y * over[:, None]
        d = tl.where(is_finite(x), scale[:, None] * (slope - pull[:, None] * share), 0.0)
        d = tl.where(is_finite(delta[:, None]), d, tl.where(pull != pull, pull, 0.0)[:, None])
        inside = (index >= lo) & (index < hi)
        tl.store(d_ptr + (row[:, None] * n + index), d.to(d_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _load_label(t_ptr, row, n, cols, DENSE: tl.constexpr):
    """The share of a class as a label: from 0 to 1, or -1 (unknown); 0 where labels are index lists."""
    if DENSE:
        t = tl.load(t_ptr + (row * n + cols), mask=cols < n, other=0).to(tl.float32)
        return tl.where(t < 0, -1.0, tl.where(t > 1, 1.0, t))
    else:
        return 0


@triton.jit
def _slope(x, t_ptr, row, n, cols, center, delta, peak, over, pull, rho, DENSE: tl.constexpr, RHO: tl.constexpr):
    """The gradient at some classes of one row, without the labels of index lists."""
    z = (x - center) + delta
    y = rcp(1 + exp(-tl.abs(z)))
    d = -pull * (exp(-tl.abs(z) - peak) * y * y * over)
    if DENSE or RHO:
        label = _load_label(t_ptr, row, n, cols, DENSE)
        _, slope = _terms(z, x, label, rho, DENSE, RHO)
        d += slope
    return tl.where(is_finite(delta), tl.where(is_finite(x), d, 0.0), tl.where(pull != pull, pull, 0.0))


@triton.jit
def _row(
    x_ptr, m_ptr, i_ptr, t_ptr, d_ptr, row, m_row, m_col, n, lo, hi, n_labels, center, delta, peak, mass, weight,
    inv_t, rho, M: tl.constexpr, DENSE: tl.constexpr, RHO: tl.constexpr, GRAD: tl.constexpr, BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Loss and pull of one row whose nu is known; with GRAD also write the gradient of the classes lo <= j < hi."""
    only = tl.zeros((1,), tl.int64) + row
    center1 = tl.zeros((1,), tl.float32) + center
    delta1 = tl.zeros((1,), tl.float32) + delta
    loss = tl.zeros_like(center1)
    pull = tl.zeros_like(center1)
    if DENSE or RHO:
        losses = tl.zeros((BLOCK,), tl.float32)
        slopes = tl.zeros((BLOCK,), tl.float32)
        for j in range(0, n, BLOCK):
            cols = j + tl.arange(0, BLOCK)
            x = load_flat(x_ptr, m_ptr, row, m_row, m_col, n, cols, inv_t, MASKED)
            label = _load_label(t_ptr, row, n, cols, DENSE)
            one_loss, slope = _terms(points(x, center, delta), x, label, rho, DENSE, RHO)
            losses += tl.where(cols < n, one_loss, 0.0)
            slopes += slope
        loss_sum, slope_sum = sum2(losses, slopes, 0)
        loss += loss_sum
        pull += tl.where(is_finite(delta), slope_sum, 0.0)
    if not DENSE:
        more, more_pull = _label_sums(
            x_ptr, m_ptr, i_ptr, only, m_row, m_col, n, n_labels, center1, delta1, inv_t, rho, M, RHO, MASKED
        )
        loss += more
        pull += more_pull
    if GRAD:
        # A row without a solution has a gradient of nan, unless it has no part in the loss.
        broken = (delta1 != delta1) & (tl.zeros_like(loss) + weight != 0)
        pull = tl.where(broken & (loss != loss), loss, pull)
        scale = scaled(weight, inv_t)
        over = 1 / mass
        pull_sum = tl.sum(pull, 0)
        first, skip, whole = whole_tiles(x_ptr.dtype, row, n, lo, hi, BLOCK)
        for j in range(0, whole, BLOCK):
            i = j + tl.arange(0, BLOCK)
            x = load_whole(x_ptr, m_ptr, row, m_row, m_col, n, first, i, inv_t, MASKED)
            d = _slope(x, t_ptr, row, n, first - row * n + i, center, delta, peak, over, pull_sum, rho, DENSE, RHO)
            tl.store(d_ptr + first + i, (scale * d).to(d_ptr.dtype.element_ty))
        for j in range(0, hi - lo - whole, BLOCK // 4):
            cols = end_columns(j + tl.arange(0, BLOCK // 4), n, lo, hi, skip, whole)
            x = load_flat(x_ptr, m_ptr, row, m_row, m_col, n, cols, inv_t, MASKED)
            d = _slope(x, t_ptr, row, n, cols, center, delta, peak, over, pull_sum, rho, DENSE, RHO)
            tl.store(d_ptr + (row * n + cols), (scale * d).to(d_ptr.dtype.element_ty), mask=cols < n)
        if not DENSE:
            tl.debug_barrier()  # the labels overwrite what is there
            _label_store(
                x_ptr, m_ptr, i_ptr, d_ptr, only, m_row, m_col, n, lo, hi, n_labels, center1, delta1,
                tl.zeros((1,), tl.float32) + scale, pull, peak, tl.zeros((1,), tl.float32) + over, inv_t, M, MASKED,
            )  # fmt: skip
    return tl.sum(loss, 0), tl.sum(pull, 0)


@triton.jit
def _weighted(loss, w_ptr, GRAD: tl.constexpr):
    """The loss times its weight, where there is one; a weight of 0 gives 0, even for an infinite loss."""
    if GRAD:
        weight = tl.load(w_ptr)
        return tl.where(weight > 0, weight * loss, 0.0)
    else:
        return loss


@triton.jit
def _tile_sums(
    x_ptr, m_ptr, t_ptr, row, m_row, m_col, n, center, delta, inv_t, rho, first,
    W: tl.constexpr, C: tl.constexpr, DENSE: tl.constexpr, RHO: tl.constexpr, FULL: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Sums of loss and slope over a tile, shape (R, C)."""
    cols = columns(first, W, C)
    x = scaled(load_tile(x_ptr, m_ptr, row, m_row, m_col, n, first, W, C, FULL, MASKED), inv_t)
    z = (x - by_row(center)) + by_row(delta)
    label = _load_label(t_ptr, by_row(row), n, cols, DENSE)
    loss, slope = _terms(z, x, label, rho, DENSE, RHO)
    return sum_w(tl.where(cols < n, loss, 0.0)), sum_w(slope)


@triton.jit
def _tile_grad(
    e, x_ptr, m_ptr, t_ptr, d_ptr, row, m_row, m_col, n, center, delta, scale, pull, mass, inv_t, rho, first,
    W: tl.constexpr, C: tl.constexpr, DENSE: tl.constexpr, RHO: tl.constexpr, FULL: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a tile, without the labels of index lists."""
    cols = columns(first, W, C)
    a = tl.minimum(e * by_row(exp(-delta)), 3e38)  # y is 0 there, and so must h be
    y = rcp(1 + a)
    d = a * y * y * by_row(-scale * pull / mass)
    if DENSE or RHO:
        x = scaled(load_tile(x_ptr, m_ptr, row, m_row, m_col, n, first, W, C, FULL, MASKED), inv_t)
        z = (x - by_row(center)) + by_row(delta)
        label = _load_label(t_ptr, by_row(row), n, cols, DENSE)
        _, slope = _terms(z, x, label, rho, DENSE, RHO)
        d += by_row(scale) * slope
    store_tile(d_ptr, row, n, d, first, W, C, FULL)


@triton.jit
def _share(i_ptr, rows, n_labels, BLOCK: tl.constexpr):
    """1 over the number of rows with a label."""
    labelled = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        any_label = tl.zeros((BLOCK,), tl.int32)
        for j in range(n_labels):
            index = tl.load(i_ptr + (row * n_labels + j), mask=row < rows, other=-1)
            any_label = tl.where(index >= 0, 1, any_label)
        labelled += any_label
    return 1.0 / tl.maximum(tl.sum(labelled, 0), 1).to(tl.float32)


@triton.jit
def _share_of(w_ptr, rows, BLOCK: tl.constexpr):
    """1 over the sum of weights of 0 and 1."""
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        total += tl.load(w_ptr + row, mask=row < rows, other=0.0)
    return 1.0 / tl.maximum(tl.sum(total, 0), 1.0)


@triton.jit(do_not_specialize=["rows", "units", "n_labels"], do_not_specialize_on_alignment=PER_ROW)
def _resident(
    x_ptr, m_ptr, k_ptr, i_ptr, t_ptr, w_ptr, d_ptr, loss_ptr, center_ptr, delta_ptr, mass_ptr, pull_ptr,
    rows, units, m_row, m_col, k_row, inv_t, w_row, n_labels, rho,
    ALIGN: tl.constexpr, R: tl.constexpr, C: tl.constexpr, WA: tl.constexpr, WB: tl.constexpr, WC: tl.constexpr,
    M: tl.constexpr, DENSE: tl.constexpr, RHO: tl.constexpr, GRAD: tl.constexpr, COUNT: tl.constexpr,
    MASKED: tl.constexpr, FULL: tl.constexpr, TOL: tl.constexpr, BLOCK: tl.constexpr, SETTLE: tl.constexpr,
):  # fmt: skip
    """Search, loss and gradient of R rows per program, held in registers; without SETTLE the rest is `_settled`'s."""
    if RHO == 2:
        rho = tl.load(rho)
    n = units * ALIGN
    first = tl.program_id(0).to(tl.int64) * R
    row = tl.minimum(first + tl.arange(0, R), rows - 1)  # the last row may occur several times
    if COUNT:
        if DENSE:  # i_ptr tells which rows count
            tl.store(w_ptr + row, tl.load(i_ptr + row) * _share_of(i_ptr, rows, BLOCK))
        else:  # every program writes the same number, and reads its own
            tl.store(w_ptr, _share(i_ptr, rows, 1, BLOCK))
        tl.debug_barrier()
    k = cardinality(k_ptr, row, k_row)
    xa, xb, xc = load_row(x_ptr, m_ptr, row, m_row, m_col, n, WA, WB, WC, C, FULL, MASKED)
    shift = tl.load(x_ptr + row * n).to(tl.float32)
    ea, eb, ec, center, delta, mass, lost = search(xa, xb, xc, shift, k, n, inv_t, WB, WC, not FULL, MASKED, TOL)

    loss = tl.zeros_like(center)
    pull = tl.zeros_like(center)
    if DENSE or RHO:
        losses, slopes = _tile_sums(
            x_ptr, m_ptr, t_ptr, row, m_row, m_col, n, center, delta, inv_t, rho, 0, WA, C, DENSE, RHO,
            FULL or WB > 0, MASKED,
        )  # fmt: skip
        if WB > 0:
            more, more_slopes = _tile_sums(
                x_ptr, m_ptr, t_ptr, row, m_row, m_col, n, center, delta, inv_t, rho, WA * C, WB, C, DENSE, RHO,
                FULL or WC > 0, MASKED,
            )  # fmt: skip
            losses += more
            slopes += more_slopes
        if WC > 0:
            more, more_slopes = _tile_sums(
                x_ptr, m_ptr, t_ptr, row, m_row, m_col, n, center, delta, inv_t, rho, (WA + WB) * C, WC, C, DENSE,
                RHO, FULL, MASKED,
            )  # fmt: skip
            losses += more
            slopes += more_slopes
        loss, pull = sum2(losses, slopes, 1)
    if not DENSE:
        more_loss, more_pull = _label_sums(
            x_ptr, m_ptr, i_ptr, row, m_row, m_col, n, n_labels, center, delta, inv_t, rho, M, RHO, MASKED
        )
        loss += more_loss
        pull += more_pull
    tl.store(loss_ptr + row, _weighted(loss, w_ptr + row * w_row, GRAD))
    tl.store(center_ptr + row, center)
    tl.store(delta_ptr + row, delta)
    tl.store(mass_ptr + row, tl.log(mass) if SETTLE else tl.where(lost, float("nan"), tl.log(mass)))
    tl.store(pull_ptr + row, pull)
    if GRAD:
        scale = scaled(tl.load(w_ptr + row * w_row), inv_t)
        _tile_grad(
            ea, x_ptr, m_ptr, t_ptr, d_ptr, row, m_row, m_col, n, center, delta, scale, pull, mass, inv_t, rho, 0,
            WA, C, DENSE, RHO, FULL or WB > 0, MASKED,
        )  # fmt: skip
        if WB > 0:
            _tile_grad(
                eb, x_ptr, m_ptr, t_ptr, d_ptr, row, m_row, m_col, n, center, delta, scale, pull, mass, inv_t, rho,
                WA * C, WB, C, DENSE, RHO, FULL or WC > 0, MASKED,
            )  # fmt: skip
        if WC > 0:
            _tile_grad(
                ec, x_ptr, m_ptr, t_ptr, d_ptr, row, m_row, m_col, n, center, delta, scale, pull, mass, inv_t, rho,
                (WA + WB) * C, WC, C, DENSE, RHO, FULL, MASKED,
            )  # fmt: skip
        if not DENSE:
            tl.debug_barrier()  # the labels overwrite what is there
            _label_store(
                x_ptr, m_ptr, i_ptr, d_ptr, row, m_row, m_col, n, 0, n, n_labels, center, delta, scale, pull,
                0.0, rcp(mass), inv_t, M, MASKED,
            )  # fmt: skip
    if SETTLE:
        _settle_lost(
            lost, x_ptr, m_ptr, k_ptr, i_ptr, t_ptr, w_ptr, d_ptr, loss_ptr, center_ptr, delta_ptr, mass_ptr, pull_ptr,
            first, rows, n, m_row, m_col, k_row, inv_t, w_row, n_labels, rho, R, M, DENSE, RHO, GRAD, MASKED, BLOCK,
        )  # fmt: skip


# The second half of `_resident` without SETTLE, which is compiled beside it.
@triton.jit(do_not_specialize=["rows", "units", "n_labels"], do_not_specialize_on_alignment=PER_ROW)
def _settled(
    x_ptr, m_ptr, k_ptr, i_ptr, t_ptr, w_ptr, d_ptr, loss_ptr, center_ptr, delta_ptr, mass_ptr, pull_ptr,
    rows, units, m_row, m_col, k_row, inv_t, w_row, n_labels, rho,
    ALIGN: tl.constexpr, R: tl.constexpr, C: tl.constexpr, WA: tl.constexpr, WB: tl.constexpr, WC: tl.constexpr,
    M: tl.constexpr, DENSE: tl.constexpr, RHO: tl.constexpr, GRAD: tl.constexpr, COUNT: tl.constexpr,
    MASKED: tl.constexpr, FULL: tl.constexpr, TOL: tl.constexpr, BLOCK: tl.constexpr, SETTLE: tl.constexpr,
):  # fmt: skip
    """Settle the rows that `_resident` has marked by a mass of nan."""
    if RHO == 2:
        rho = tl.load(rho)
    first = tl.program_id(0).to(tl.int64) * R
    mass = tl.load(mass_ptr + tl.minimum(first + tl.arange(0, R), rows - 1))
    _settle_lost(
        mass != mass, x_ptr, m_ptr, k_ptr, i_ptr, t_ptr, w_ptr, d_ptr, loss_ptr, center_ptr, delta_ptr, mass_ptr,
        pull_ptr, first, rows, units * ALIGN, m_row, m_col, k_row, inv_t, w_row, n_labels, rho, R, M, DENSE, RHO, GRAD,
        MASKED, BLOCK,
    )  # fmt: skip


@triton.jit
def _settle_lost(
    lost, x_ptr, m_ptr, k_ptr, i_ptr, t_ptr, w_ptr, d_ptr, loss_ptr, center_ptr, delta_ptr, mass_ptr, pull_ptr,
    first, rows, n, m_row, m_col, k_row, inv_t, w_row, n_labels, rho,
    R: tl.constexpr, M: tl.constexpr, DENSE: tl.constexpr, RHO: tl.constexpr, GRAD: tl.constexpr,
    MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Solve rows that the fast search has given up, one after another."""
    lost = lost & (first + tl.arange(0, R) < rows)  # a row that occurs several times is settled once
    if tl.max(lost.to(tl.int32), 0) > 0:
        tl.debug_barrier()  # these rows are written again
        for i in range(R):
            if tl.max((lost & (tl.arange(0, R) == i)).to(tl.int32), 0) > 0:
                one = first + i
                c, d = settle(x_ptr, m_ptr, one, m_row, m_col, n, cardinality(k_ptr, one, k_row), inv_t, BLOCK, MASKED)
                peak, total = peak_and_mass(x_ptr, m_ptr, one, m_row, m_col, n, c, d, inv_t, BLOCK, MASKED)
                one_loss, one_pull = _row(
                    x_ptr, m_ptr, i_ptr, t_ptr, d_ptr, one, m_row, m_col, n, 0, n, n_labels, c, d, peak, total,
                    tl.load(w_ptr + one * w_row), inv_t, rho, M, DENSE, RHO, GRAD, BLOCK, MASKED,
                )  # fmt: skip
                tl.store(loss_ptr + one, _weighted(one_loss, w_ptr + one * w_row, GRAD))
                tl.store(center_ptr + one, c)
                tl.store(delta_ptr + one, d)
                tl.store(mass_ptr + one, peak + tl.log(total))
                tl.store(pull_ptr + one, one_pull)


@triton.jit(do_not_specialize=["units", "n_labels"])
def _known(
    x_ptr, m_ptr, i_ptr, t_ptr, w_ptr, d_ptr, dk_ptr, loss_ptr, center_ptr, delta_ptr, mass_ptr, pull_ptr,
    units, m_row, m_col, inv_t, w_row, n_labels, rho, chunk,
    ALIGN: tl.constexpr, M: tl.constexpr, DENSE: tl.constexpr, RHO: tl.constexpr, GRAD: tl.constexpr,
    LOSS: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Loss, or the gradients of logits and k, of a row or of a chunk of it, whose nu is known."""
    if RHO == 2:
        rho = tl.load(rho)
    n = units * ALIGN
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    lo = part * chunk
    center = tl.load(center_ptr + row)
    delta = tl.load(delta_ptr + row)
    peak = tl.full((), 0.0, tl.float32)
    mass = exp(tl.load(mass_ptr + row))
    if GRAD and mass < 3e-4:  # its logarithm, as one float, has lost digits
        peak, mass = peak_and_mass(x_ptr, m_ptr, row, m_row, m_col, n, center, delta, inv_t, BLOCK, MASKED)
    loss, pull = _row(
        x_ptr, m_ptr, i_ptr, t_ptr, d_ptr, row, m_row, m_col, n, lo, tl.minimum(lo + chunk, n), n_labels,
        center, delta, peak, mass, tl.load(w_ptr + row * w_row),
        inv_t, rho, M, DENSE, RHO, GRAD, BLOCK, MASKED,
    )  # fmt: skip
    if part == 0:
        if LOSS:
            tl.store(loss_ptr + row, _weighted(loss, w_ptr + row * w_row, GRAD))
            tl.store(pull_ptr + row, pull)
        else:
            tl.store(dk_ptr + row, tl.load(w_ptr + row * w_row) * pull * (exp(-peak) / mass))


@triton.jit(do_not_specialize=["rows", "n_labels"])
def _one_over_rows(i_ptr, out_ptr, rows, n_labels, BLOCK: tl.constexpr):
    """1 over the number of rows with a label, in one program."""
    tl.store(out_ptr, _share(i_ptr, rows, n_labels, BLOCK))


@triton.jit(do_not_specialize=["rows", "n"])
def _rows_that_count(
    t_ptr, out_ptr, rows, n, RHO: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """1 for each row with a label (with RHO, with a known class), and 0 for the others."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    some = tl.zeros((R,), tl.int32)
    for start in range(0, n, C):
        col = start + tl.arange(0, C)
        inside = (row < rows)[:, None] & (col < n)[None, :]
        label = tl.load(t_ptr + (row * n)[:, None] + col[None, :], mask=inside, other=0)
        out = label < 0 if RHO else label <= 0  # nan is neither, so that it shows
        some = tl.maximum(some, tl.max((inside & (out == 0)).to(tl.int32), 1))
    tl.store(out_ptr + row, some.to(tl.float32), mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _over_sum(w_ptr, rows, BLOCK: tl.constexpr):
    """Divide weights of 0 and 1 by their sum, in one program."""
    share = _share_of(w_ptr, rows, BLOCK)
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        weight = tl.load(w_ptr + row, mask=row < rows, other=0.0)
        tl.store(w_ptr + row, weight * share, mask=row < rows)


@triton.jit(do_not_specialize=["total", "n"])
def _scale(g_ptr, f_ptr, total, n, f_row, STEPS: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr):
    """Multiply a stretch of the rows by their factors, unless all of those are 1; 0 times nan is 0."""
    first = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    span = first // n + tl.arange(0, SPAN)  # the rows that the stretch may touch
    factors = tl.load(f_ptr + span * f_row, mask=span * n < total, other=1.0)
    if tl.max((factors != 1).to(tl.int32), 0) > 0:
        for i in range(STEPS):
            place = first + i * BLOCK + tl.arange(0, BLOCK)
            inside = place < total
            factor = tl.load(f_ptr + (place // n) * f_row, mask=inside, other=1.0)
            g = tl.load(g_ptr + place, mask=inside, other=0.0).to(tl.float32)
            g = tl.where(factor == 0, 0.0, g * factor)
            tl.store(g_ptr + place, g.to(g_ptr.dtype.element_ty), mask=inside)


class Target:
    """Index lists or a dense target, as the kernels take them; the logits take the place of what is missing."""

    def __init__(self, x: Tensor, index: Tensor | None, dense: Tensor | None) -> None:
        self.index = x if index is None else index.contiguous()
        dense = dense.view(torch.uint8) if dense is not None and dense.dtype == torch.bool else dense
        self.dense = x if dense is None else dense.contiguous()
        self.n_labels = 0 if index is None else index.shape[-1]
        at_a_time = min(shapes.power_of_2(max(self.n_labels, 1)), _LABELS)
        if self.n_labels > 1 and shapes.in_general_form():
            at_a_time = _LABELS
        self.options: dict[str, Any] = {"DENSE": dense is not None, "M": at_a_time}


def loss_forward(
    logits: Tensor,
    k: Tensor,
    mask: Tensor | None,
    temperature: float,
    observed: float | Tensor,
    index: Tensor | None,
    dense: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return ``(loss, center, delta, log_mass, pull)``, the loss of shape ``batch``, the others ``(*batch, 1)``."""
    loss, numbers, _ = _forward(logits, k, mask, temperature, observed, index, dense, None)
    center, delta, log_mass, pull = numbers
    return loss, center, delta, log_mass, pull


def loss_forward_with_grad(
    logits: Tensor,
    k: Tensor | float,
    mask: Tensor | None,
    temperature: float,
    observed: float | Tensor,
    index: Tensor | None,
    dense: Tensor | None,
    weight: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss of each row times `weight`, which broadcasts to the rows, and the gradient of its sum.

    Between them are ``center``, ``delta``, ``log_mass`` and ``pull`` as one tensor ``(4, *batch, 1)``; the weight is
    the last. None is one over the number of rows that count, where `row_weights` says so.
    """
    count = weight is None
    if weight is None:
        weight = shapes.floats(logits, () if dense is None else logits.shape[:-1])
    return *_forward(logits, k, mask, temperature, observed, index, dense, weight, count), weight


def _forward(
    logits: Tensor,
    k: Tensor | float,
    mask: Tensor | None,
    temperature: float,
    observed: float | Tensor,
    index: Tensor | None,
    dense: Tensor | None,
    weight: Tensor | None,
    count: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, the numbers of `loss_forward_with_grad`, and with a weight the gradient."""
    try:
        return _own_forward(logits, k, mask, temperature, observed, index, dense, weight, count)
    except Absent:  # the general form has a gradient, and weights that are known
        if weight is None:
            weight = shapes.floats(logits, ()).fill_(1)
        elif count:
            shares = row_weights(index, dense, logits.shape[-1], _form(observed) > 0, mean=True, counted=False)
            assert shares is not None
            weight.copy_(shares)
        x, k, mask = general_form(logits, k, mask)
        dense = None if dense is None else dense.float()
        with shapes.general_form():
            loss, numbers, grad = _own_forward(x, k, mask, temperature, observed, index, dense, weight)
        return loss, numbers, grad.to(logits.dtype)


def _own_forward(
    logits: Tensor,
    k: Tensor | float,
    mask: Tensor | None,
    temperature: float,
    observed: float | Tensor,
    index: Tensor | None,
    dense: Tensor | None,
    weight: Tensor | None,
    count: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    n, x = logits.shape[-1], logits.contiguous()
    batch = x.shape[:-1]
    loss, numbers = shapes.floats(x, batch), shapes.floats(x, (4, *batch, 1))
    grad = x.new_empty(0) if weight is None else torch.empty_like(x)
    rows = loss.numel()
    if rows == 0 or n == 0:
        center, delta, mass, pull = numbers
        center.zero_(), loss.zero_(), pull.zero_(), mass.fill_(torch.inf)
        end_of_no_classes_(delta, k)
        return loss, numbers, grad
    if n > shapes.longest():
        center, delta, mass, pull = numbers
        known = _known_launch(x, mask, temperature, observed, index, dense, weight, grad, center, loss, *numbers)
        given = Rows(x.view(rows, n), k, mask, temperature)
        solve_long(given, x.new_empty(0), center, delta, mass, "nu", lambda: [known])
        launch_all([known], shared=True)
        return loss, numbers, grad
    target, form = Target(x, index, dense), _form(observed)
    if count and dense is not None:
        target.index = weights_of_dense(dense, form > 0, False)
    factor, step = (loss, 0) if weight is None else per_row(weight, batch)
    key: tuple[Any, ...] = ()
    sizes = k.reshape(rows) if isinstance(k, Tensor) else k
    each = sizes.stride(0) if isinstance(sizes, Tensor) else None
    if mask is None and each in (None, 0, 1) and not rows >> 31:  # the common calls
        device, first, address, stride = x.get_device(), x.data_ptr(), numbers.data_ptr(), 4 * rows
        (size, place), (rho, place_of_rho) = _address(sizes), _address(observed)
        others = target.index.data_ptr(), target.dense.data_ptr(), factor.data_ptr()
        key = (
            "loss", device, x.dtype, n, first & 15, rows & 3, temperature == 1, form, weight is None, step, count,
            each, place, place_of_rho, *(other & 15 for other in others), target.dense.dtype, *target.options.values(),
        )  # fmt: skip
        inverse = None if temperature == 1 else 1.0 / temperature
        if relaunch(
            key, device, rows, first, first, size, *others, grad.data_ptr(), loss.data_ptr(), address,
            address + stride, address + 2 * stride, address + 3 * stride, rows, n // shapes.alignment(n), 0, 0, each,
            inverse, step, target.n_labels, rho,
        ):  # fmt: skip
            if count and each is None and form < 2 and temperature == 1:
                _keep_step(x, target.index if dense is None else target.dense, form, key)
            return loss, numbers, grad
    table = shapes.LOSS if dense is None else shapes.DENSE
    p = shapes.plan(n, table, x.element_size())
    given = Rows(x.view(rows, n), k, mask, temperature, p.align)
    args = (
        *given.head, target.index, target.dense, factor, grad, loss, *numbers, rows, *given.tail,
        step, target.n_labels, observed,
    )  # fmt: skip
    rare = p is shapes.shared(n)  # then two kernels are compiled side by side
    options = {
        **p.tiles, "RHO": form, "GRAD": weight is not None, "COUNT": count, "MASKED": given.masked,
        "TOL": given.tolerance_of_mass, "num_warps": p.warps, **target.options, "SETTLE": not rare,
    }  # fmt: skip
    whole = Launch(_resident, (shapes.cdiv(rows, p.rows),), args, options)
    if rare:
        launch_all([whole, whole._replace(kernel=_settled)], shared=True)
        return loss, numbers, grad
    held = launch(*whole[:2], *args, **options)
    if key and p is shapes.exact(n, table[x.element_size()], x.element_size()):
        prepare(key, held, p.rows)
    return loss, numbers, grad


# The kernels of training steps by all that tells two of them apart: few rows, one `k`, one class per row or multi-hot.
_steps: dict[tuple[Any, ...], Any] = {}


def _keep_step(x: Tensor, labels: Tensor, form: int, key: tuple[Any, ...]) -> None:
    """Keep the kernels for the next step of this shape: that of the loss, and that which counts multi-hot rows."""
    dense = labels.is_floating_point()
    kernels = ready(key), ready(_count_key(labels, form > 0)) if dense else None
    if dense and kernels[1] is None:
        return
    if len(_steps) >= 1024:  # shapes that vary
        _steps.clear()
    _steps[_step_key(x, labels, form)] = kernels


def _step_key(x: Tensor, labels: Tensor, form: int) -> tuple[Any, ...]:
    return x.get_device(), x.dtype, x.shape, x.data_ptr() & 15, labels.data_ptr() & 15, labels.dtype, form


def step_of(logits: Tensor, labels: Tensor, observed: float) -> Any:
    """Return the kernels for the mean loss of such logits and labels, if they are kept; or None.

    It is bound by the host: everything is known from the step before but the memory.
    """
    if not (logits.is_contiguous() and labels.is_contiguous() and on_current(logits.get_device())):
        return None
    return _steps.get(_step_key(logits, labels, int(observed > 0)))


def take_step(held: Any, logits: Tensor, k: float, labels: Tensor, observed: float) -> tuple[Tensor, Tensor]:
    """Return the losses of the rows over the number of those that count, and the gradient of their sum."""
    (kernel, counts), device, n = held, logits.get_device(), logits.shape[-1]
    rows = logits.numel() // n
    loss, grad = shapes.floats(logits, (rows,)), torch.empty_like(logits)
    numbers = shapes.floats(logits, (4 * rows + 1 if counts is None else 6 * rows + 4,))
    x, label, first, stride = logits.data_ptr(), labels.data_ptr(), numbers.data_ptr(), 4 * rows
    index, dense, weight, step = label, x, first + 4 * stride, 0
    if counts is not None:  # into aligned memory, as another call would
        index, dense, step = weight + (stride + 15 & ~15), label, 1
        run_again(counts, device, rows, (label, index, rows, n))
    run_again(kernel, device, rows, (
        x, x, k, index, dense, weight, grad.data_ptr(), loss.data_ptr(), first, first + stride, first + 2 * stride,
        first + 3 * stride, rows, n // shapes.alignment(n), 0, 0, None, None, step, 1 - step, observed,
    ))  # fmt: skip
    return loss, grad


def _form(observed: float | Tensor) -> int:
    """Return 0 where only labels count, 1 for a number, and 2 for a tensor, whose value the kernel reads."""
    return 2 if isinstance(observed, Tensor) else int(observed > 0)


def _address(value: Tensor | float) -> tuple[float, int | None]:
    """Return a number as it is, and a tensor as its address, together with the alignment of that."""
    if not isinstance(value, Tensor):
        return value, None
    address = value.data_ptr()
    return address, address & 15


def per_row(value: Tensor, batch: torch.Size) -> tuple[Tensor, int]:
    """Return one number per row, or one for all rows, in float32, and the stride from row to row."""
    value = value if value.dtype == torch.float32 else value.float()
    if value.ndim == 0:
        return value, 0
    if value.shape == batch and value.is_contiguous():
        return value, 1
    flat = value.expand(batch).reshape(batch.numel())
    return flat, flat.stride(0)


def _known_launch(
    x: Tensor,
    mask: Tensor | None,
    temperature: float,
    observed: float | Tensor,
    index: Tensor | None,
    dense: Tensor | None,
    weight: Tensor | None,
    grad: Tensor,
    grad_k: Tensor,
    loss: Tensor | None,
    center: Tensor,
    delta: Tensor,
    mass: Tensor,
    pull: Tensor,
) -> Launch:
    """Loss, pull and, with a weight, the gradient, where nu is known; without `loss` only the gradients."""
    n = x.shape[-1]
    rows = center.numel()
    given = Rows(x.view(rows, n), None, mask, temperature)
    target, form = Target(x, index, dense), _form(observed)
    factor, step = (center, 0) if weight is None else per_row(weight, center.shape[:-1])
    # One program takes the sums over all classes; the sums over labels are short enough for every chunk to repeat.
    whole = dense is not None or form > 0 or weight is None
    chunk = n if whole else min(shapes.CHUNK, n)
    block = max(4, min(4096, shapes.power_of_2(n)))  # a quarter of it takes the ends of a row
    block = 4096 if shapes.in_general_form() else block
    most = 16 if dense is not None or form > 0 else 8  # so much code per class takes long to compile for many of them
    args = (
        *given.head, target.index, target.dense, factor, grad, grad_k, pull if loss is None else loss, center,
        delta, mass, pull, *given.tail, step, target.n_labels, observed, chunk,
    )  # fmt: skip
    options = {
        "ALIGN": given.align, "RHO": form, "GRAD": weight is not None, "LOSS": loss is not None,
        "MASKED": given.masked, "BLOCK": block, "num_warps": max(1, min(most, block // 256)), **target.options,
    }  # fmt: skip
    return Launch(_known, (rows, shapes.cdiv(n, chunk)), args, options)


def loss_backward(
    logits: Tensor,
    mask: Tensor | None,
    temperature: float,
    observed: float | Tensor,
    index: Tensor | None,
    dense: Tensor | None,
    center: Tensor,
    delta: Tensor,
    log_mass: Tensor,
    pull: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of logits and k for the upstream gradient `grad` of the loss of each row."""
    x = logits.contiguous()
    dx = torch.empty_like(x)
    dk = torch.empty_like(delta, memory_format=torch.contiguous_format)
    if dx.numel() == 0:
        return dx, dk.zero_()
    rows = [t.contiguous() for t in (center, delta, log_mass, pull)]
    own = _known_launch(x, mask, temperature, observed, index, dense, grad, dx, dk, None, *rows)
    try:
        launch_all([own], shared=True)
        return dx, dk
    except Absent:
        x, _, mask = general_form(x, None, mask)
        dx, dense = torch.empty_like(x), None if dense is None else dense.float()
    with shapes.general_form():
        launch_all([_known_launch(x, mask, temperature, observed, index, dense, grad, dx, dk, None, *rows)])
    return dx.to(logits.dtype), dk


def row_weights(
    index: Tensor | None, dense: Tensor | None, n: int, observed: bool, mean: bool, counted: bool = True
) -> Tensor | None:
    """The weight of each row in the reduced loss, or that of all rows; in few launches, as they take time.

    None is one over the number of rows that count, which the kernel of the loss finds by itself if it is to.
    """
    if dense is not None:
        few = counted and 0 < dense.numel() <= _SMALL and dense.shape[:-1].numel() <= 1024 and n <= shapes.LONGEST
        return None if few and mean else weights_of_dense(dense, observed, mean)
    assert index is not None
    if mean and not observed:
        return None if counted and _counts_rows(index, n) else weight_of_mean(index)
    rows = index.shape[:-1].numel() if mean else 1  # a row without a label has no loss by itself
    return index.new_full((), 1 / max(rows, 1), dtype=torch.float32)


def _counts_rows(index: Tensor, n: int) -> bool:
    """Whether the kernel of the loss counts the rows that have a label by itself: few short rows of one label each."""
    return index.shape[-1] == 1 and 0 < index.numel() <= 512 and 0 < n <= shapes.LONGEST


def weight_of_mean(index: Tensor) -> Tensor:
    """One over the number of rows that have a label."""
    rows = index.numel() // max(index.shape[-1], 1)
    if not 0 < index.numel() <= 1 << 14:
        return _plain_weight_of_mean(index)
    weight = index.new_empty((), dtype=torch.float32)
    flat, width, device = index.contiguous(), index.shape[-1], index.get_device()
    key = ("weight of mean", device, flat.data_ptr() & 15)
    if not relaunch(key, device, 1, flat.data_ptr(), weight.data_ptr(), rows, width):
        prepare(key, launch(_one_over_rows, (1,), flat, weight, rows, width, BLOCK=1024, num_warps=8), 1)
    return weight


def _plain_weight_of_mean(index: Tensor) -> Tensor:
    return (index >= 0).any(-1).sum().clamp(min=1).float().reciprocal()


def _wide(n: int) -> int:
    """The classes that are looked at together where rows with a label are counted; few sizes, as each is compiled."""
    return 64 if n <= 64 else 256 if n <= 256 else 1024


def _count_key(dense: Tensor, observed: bool) -> tuple[Any, ...]:
    return "rows that count", dense.get_device(), dense.dtype, dense.data_ptr() & 15, _wide(dense.shape[-1]), observed


def weights_of_dense(dense: Tensor, observed: bool, mean: bool) -> Tensor:
    """The weight of each row of a dense target: 1 where it contributes, or 1 over the number of those rows."""
    rows, n = dense.shape[:-1].numel(), dense.shape[-1]
    if not 0 < dense.numel() <= _SMALL:
        return _plain_weights_of_dense(dense, observed, mean)
    weight = shapes.floats(dense, dense.shape[:-1])
    flat = dense.contiguous()
    flat = flat.view(torch.uint8) if flat.dtype == torch.bool else flat
    device, wide = flat.get_device(), _wide(n)
    per, key = max(1, 1024 // wide), _count_key(flat, observed)
    if not relaunch(key, device, rows, flat.data_ptr(), weight.data_ptr(), rows, n):
        if mean and is_new(("over sum", device)):
            compile_ahead(_over(weight, rows))
        options = {"RHO": observed, "R": per, "C": wide, "num_warps": 4}
        prepare(key, launch(_rows_that_count, (shapes.cdiv(rows, per),), flat, weight, rows, n, **options), per)
    if mean and not relaunch(("over sum", device), device, 1, weight.data_ptr(), rows):
        kernel, grid, args, options = _over(weight, rows)
        prepare(("over sum", device), launch_when_compiled(kernel, grid, *args, **options), 1)
    return weight


def _plain_weights_of_dense(dense: Tensor, observed: bool, mean: bool) -> Tensor:
    top = dense.amax(-1).float() if dense.shape[-1] > 0 else shapes.floats(dense, dense.shape[:-1]).fill_(-1)
    some = (~(top < 0) if observed else ~(top <= 0)).float()  # nan is neither, so that it shows
    return some / some.sum().clamp(min=1) if mean else some


def plain_weights(index: Tensor | None, dense: Tensor | None, n: int, observed: bool, mean: bool) -> Tensor | None:
    """As `row_weights`, in operations that the compiler fuses."""
    if dense is not None:
        return _plain_weights_of_dense(dense, observed, mean)
    assert index is not None
    if mean and not observed and not _counts_rows(index, n):
        return _plain_weight_of_mean(index)
    return row_weights(index, None, n, observed, mean)


def _over(weight: Tensor, rows: int) -> Launch:
    return Launch(_over_sum, (1,), (weight, rows), {"BLOCK": 1024, "num_warps": 8})


def scale_rows_(grad: Tensor, factor: Tensor) -> Tensor:
    """Multiply the rows of a contiguous tensor by one factor per row in place.

    A factor of 1 leaves its row alone, and one of 0 gives 0, also of nan.
    """
    n = grad.shape[-1]
    if grad.numel() == 0:
        return grad
    flat, step = per_row(factor, grad.shape[:-1])
    block, steps = 1024, 4 if grad.numel() <= 1 << 20 else 32  # of few numbers, more programs take less each
    stretch = block * steps
    launch(
        _scale, (shapes.cdiv(grad.numel(), stretch),), grad, flat, grad.numel(), n, step,
        STEPS=steps, BLOCK=block, SPAN=shapes.power_of_2(stretch // n + 2) if step else 1, num_warps=4,
    )  # fmt: skip
    return grad
