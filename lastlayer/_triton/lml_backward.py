"""The gradients of the LML projection on the GPU: one read of the logits and of the upstream gradient, one write."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer._triton import plan as shapes
from lastlayer._triton.ahead import Absent, Launch, absent, launch, launch_all
from lastlayer._triton.device import (
    by_row,
    columns,
    end_columns,
    exact_exp,
    exp,
    is_finite,
    load_flat,
    load_tile,
    load_whole,
    peak_and_mass,
    rcp,
    scaled,
    store_tile,
    sum2,
    sum_w,
    whole_tiles,
)
from lastlayer._triton.launch import prepare, relaunch
from lastlayer._triton.rows import PER_ROW, Rows, general_form

TINY = tl.constexpr(1e-20)  # a sum of h below which its parts may have underflowed
LONGEST = 16384  # classes of a row whose logits and upstream gradient are held in registers


@triton.jit
def _weight(x, u, center, delta, KIND: tl.constexpr):
    """H, and what it is combined with: for y the upstream gradient, for log y that gradient times 1 - y."""
    z = (x - center) + delta
    live = is_finite(x)
    # To rounding, since all errors of a row may have one sign; in the mean under h that of q cancels.
    q = exp(-tl.abs(z)) if KIND == "y" else exact_exp(-tl.abs(z))
    y = rcp(1 + q)
    y = y * (2 - (1 + q) * y)
    h = tl.where(live, q * y * y, 0.0)
    if KIND == "y":
        v = tl.where(live, u, 0.0)
    elif KIND == "log":
        v = tl.where(live, u * (tl.where(z > 0, q, 1.0) * y), 0.0)
    else:
        v = tl.zeros_like(h)
    return h, v


@triton.jit
def _upstream(h, v, KIND: tl.constexpr):
    """The upstream gradient times the slope of the output."""
    return h * v if KIND == "y" else v


@triton.jit
def _combined(h, v, dk, n, inv_t, KIND: tl.constexpr):
    """The gradient of the logits, which is 0 where a single class is left."""
    d = h * (v - dk) if KIND == "y" else v - h * dk
    return scaled(tl.where(n > 1, d, 0.0), inv_t)


@triton.jit
def _load_grad(g_ptr, row, n, first, W: tl.constexpr, C: tl.constexpr, FULL: tl.constexpr):
    cols = columns(first, W, C)
    here = g_ptr + (by_row(row) * n + cols)
    if FULL:
        return tl.load(here).to(tl.float32)
    else:
        return tl.load(here, mask=cols < n, other=0.0).to(tl.float32)


@triton.jit
def _tile(x_ptr, m_ptr, g_ptr, row, m_row, m_col, n, center, delta, inv_t, first, W, C, KIND, FULL, MASKED):
    x = scaled(load_tile(x_ptr, m_ptr, row, m_row, m_col, n, first, W, C, FULL, MASKED), inv_t)
    u = x
    if KIND != "nu":
        u = _load_grad(g_ptr, row, n, first, W, C, FULL)
    return _weight(x, u, by_row(center), by_row(delta), KIND)


@triton.jit(do_not_specialize=["rows", "units"], do_not_specialize_on_alignment=PER_ROW)
def _resident(
    x_ptr, m_ptr, g_ptr, gd_ptr, center_ptr, delta_ptr, dx_ptr, dk_ptr, rows, units, m_row, m_col, inv_t,
    ALIGN: tl.constexpr, R: tl.constexpr, C: tl.constexpr, WA: tl.constexpr, WB: tl.constexpr, WC: tl.constexpr,
    KIND: tl.constexpr, GIVEN: tl.constexpr, MASKED: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """R rows per program, held in registers."""
    n = units * ALIGN
    first = tl.program_id(0).to(tl.int64) * R
    row = tl.minimum(first + tl.arange(0, R), rows - 1)  # the last row may occur several times
    center = tl.load(center_ptr + row)
    delta = tl.load(delta_ptr + row)
    ha, va = _tile(
        x_ptr, m_ptr, g_ptr, row, m_row, m_col, n, center, delta, inv_t, 0, WA, C, KIND, FULL or WB > 0, MASKED
    )
    mass = sum_w(ha)
    dot = sum_w(_upstream(ha, va, KIND))
    if WB > 0:
        hb, vb = _tile(
            x_ptr, m_ptr, g_ptr, row, m_row, m_col, n, center, delta, inv_t, WA * C, WB, C, KIND, FULL or WC > 0,
            MASKED,
        )  # fmt: skip
        mass += sum_w(hb)
        dot += sum_w(_upstream(hb, vb, KIND))
    if WC > 0:
        hc, vc = _tile(
            x_ptr, m_ptr, g_ptr, row, m_row, m_col, n, center, delta, inv_t, (WA + WB) * C, WC, C, KIND, FULL, MASKED
        )
        mass += sum_w(hc)
        dot += sum_w(_upstream(hc, vc, KIND))
    mass, dot = sum2(mass, dot, 1)
    if GIVEN:
        dot += tl.load(gd_ptr + row)
    dk = tl.div_rn(dot, mass)
    tl.store(dk_ptr + row, dk)
    both = by_row(dk)
    store_tile(dx_ptr, row, n, _combined(ha, va, both, n, inv_t, KIND), 0, WA, C, FULL or WB > 0)
    if WB > 0:
        store_tile(dx_ptr, row, n, _combined(hb, vb, both, n, inv_t, KIND), WA * C, WB, C, FULL or WC > 0)
    if WC > 0:
        store_tile(dx_ptr, row, n, _combined(hc, vc, both, n, inv_t, KIND), (WA + WB) * C, WC, C, FULL)
    odd = (~(mass > TINY) | ~is_finite(delta)) & (first + tl.arange(0, R) < rows)
    if tl.max(odd.to(tl.int32), 0) > 0:
        tl.debug_barrier()  # these rows are written again
        for i in range(R):
            if tl.max((odd & (tl.arange(0, R) == i)).to(tl.int32), 0) > 0:
                one = first + i
                _row(
                    x_ptr, m_ptr, g_ptr, gd_ptr, center_ptr, delta_ptr, dx_ptr, dk_ptr, one, m_row, m_col, n, inv_t,
                    KIND, GIVEN, BLOCK, MASKED,
                )  # fmt: skip


@triton.jit
def _row(
    x_ptr, m_ptr, g_ptr, gd_ptr, center_ptr, delta_ptr, dx_ptr, dk_ptr, row, m_row, m_col, n, inv_t,
    KIND: tl.constexpr, GIVEN: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Any one row: the sums are of h over its sum, in log space."""
    center = tl.load(center_ptr + row)
    delta = tl.load(delta_ptr + row)
    peak, mass = peak_and_mass(x_ptr, m_ptr, row, m_row, m_col, n, center, delta, inv_t, BLOCK, MASKED)
    over = 1 / mass
    live_row = is_finite(delta)
    dot = tl.zeros((BLOCK,), tl.float32)
    asks = tl.zeros((BLOCK,), tl.int32)
    if KIND != "nu":
        for j in range(0, n, BLOCK):
            cols = j + tl.arange(0, BLOCK)
            x = load_flat(x_ptr, m_ptr, row, m_row, m_col, n, cols, inv_t, MASKED)
            u = tl.load(g_ptr + (row * n + cols), mask=cols < n, other=0.0).to(tl.float32)
            p, slope = _share(x, center, delta, peak, over, KIND)
            dot += tl.where(is_finite(x), u * (p if KIND == "y" else slope), 0.0)
            asks = tl.where(u != 0, 1, asks)
    mean = tl.where(live_row, tl.sum(dot, 0), 0.0)
    given = tl.full((), 0.0, tl.float32)
    if GIVEN:
        given = tl.load(gd_ptr + row)
    # A row without a solution has a gradient of nan, unless its upstream gradient is 0.
    nan_row = (delta != delta) & ((tl.max(asks, 0) > 0) | (given != 0))
    inverse = exp(-peak) * over
    if KIND == "y":
        dk = mean + given * inverse
    else:
        given = given + mean
        dk = given * inverse
    tl.store(dk_ptr + row, tl.where(nan_row, delta, dk))
    for j in range(0, n, BLOCK):
        cols = j + tl.arange(0, BLOCK)
        x = load_flat(x_ptr, m_ptr, row, m_row, m_col, n, cols, inv_t, MASKED)
        p, slope = _share(x, center, delta, peak, over, KIND)
        d = -p * given
        if KIND != "nu":
            u = tl.load(g_ptr + (row * n + cols), mask=cols < n, other=0.0).to(tl.float32)
            d += slope * (u - mean) if KIND == "y" else slope * u
        d = scaled(tl.where(is_finite(x), d, 0.0), inv_t)
        d = tl.where(nan_row, delta, tl.where(live_row, d, 0.0))
        tl.store(dx_ptr + (row * n + cols), d.to(dx_ptr.dtype.element_ty), mask=cols < n)


@triton.jit
def _share(x, center, delta, peak, over, KIND: tl.constexpr):
    """H over its sum, and the slope of the output: h, or 1 - y for log y."""
    z = (x - center) + delta
    depth = -tl.abs(z)
    q = exp(depth)
    y = rcp(1 + q)
    p = tl.where(is_finite(x), exp(depth - peak) * y * y * over, 0.0)
    if KIND == "log":
        return p, tl.where(z > 0, q, 1.0) * y
    else:
        return p, q * y * y


@triton.jit
def _whole(x_ptr, m_ptr, g_ptr, row, m_row, m_col, n, first, i, center, delta, inv_t, KIND, MASKED):
    """As `_weight`, at the places first + i in memory, all of them classes of a row."""
    x = load_whole(x_ptr, m_ptr, row, m_row, m_col, n, first, i, inv_t, MASKED)
    u = x
    if KIND != "nu":
        u = tl.load(g_ptr + first + i).to(tl.float32)
    return _weight(x, u, center, delta, KIND)


@triton.jit
def _ends(x_ptr, m_ptr, g_ptr, row, m_row, m_col, n, cols, center, delta, inv_t, KIND, MASKED):
    """As `_weight`, at classes of a row."""
    x = load_flat(x_ptr, m_ptr, row, m_row, m_col, n, cols, inv_t, MASKED)
    u = x
    if KIND != "nu":
        u = tl.load(g_ptr + (row * n + cols), mask=cols < n, other=0.0).to(tl.float32)
    return _weight(x, u, center, delta, KIND)


@triton.jit
def _row_sums(
    x_ptr, m_ptr, g_ptr, row, m_row, m_col, n, lo, hi, center, delta, inv_t,
    W: tl.constexpr, C: tl.constexpr, KIND: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Sum h and the weighted upstream gradient over the classes lo <= j < hi of one row."""
    mass = tl.zeros((C,), tl.float32)
    dot = tl.zeros((C,), tl.float32)
    tile = tl.arange(0, W)[:, None] * C + tl.arange(0, C)[None, :]
    first, skip, whole = whole_tiles(x_ptr.dtype, row, n, lo, hi, W * C)
    for j in range(0, whole, W * C):
        i = j + tile
        h, v = _whole(x_ptr, m_ptr, g_ptr, row, m_row, m_col, n, first, i, center, delta, inv_t, KIND, MASKED)
        mass += tl.sum(h, 0)
        dot += tl.sum(_upstream(h, v, KIND), 0)
    mass, dot = sum2(mass, dot, 0)
    for j in range(0, hi - lo - whole, C):
        cols = end_columns(j + tl.arange(0, C), n, lo, hi, skip, whole)
        h, v = _ends(x_ptr, m_ptr, g_ptr, row, m_row, m_col, n, cols, center, delta, inv_t, KIND, MASKED)
        h, v = sum2(h, _upstream(h, v, KIND), 0)
        mass += h
        dot += v
    return mass, dot


@triton.jit
def _row_write(
    x_ptr, m_ptr, g_ptr, dx_ptr, row, m_row, m_col, n, lo, hi, center, delta, dk, inv_t,
    W: tl.constexpr, C: tl.constexpr, KIND: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the classes lo <= j < hi of one row."""
    tile = tl.arange(0, W)[:, None] * C + tl.arange(0, C)[None, :]
    first, skip, whole = whole_tiles(x_ptr.dtype, row, n, lo, hi, W * C)
    for j in range(0, whole, W * C):
        i = j + tile
        h, v = _whole(x_ptr, m_ptr, g_ptr, row, m_row, m_col, n, first, i, center, delta, inv_t, KIND, MASKED)
        tl.store(dx_ptr + first + i, _combined(h, v, dk, n, inv_t, KIND).to(dx_ptr.dtype.element_ty))
    for j in range(0, hi - lo - whole, C):
        cols = end_columns(j + tl.arange(0, C), n, lo, hi, skip, whole)
        h, v = _ends(x_ptr, m_ptr, g_ptr, row, m_row, m_col, n, cols, center, delta, inv_t, KIND, MASKED)
        d = _combined(h, v, dk, n, inv_t, KIND)
        tl.store(dx_ptr + (row * n + cols), d.to(dx_ptr.dtype.element_ty), mask=cols < n)


@triton.jit(do_not_specialize=["units"], do_not_specialize_on_alignment=PER_ROW)
def _streamed(
    x_ptr, m_ptr, g_ptr, gd_ptr, center_ptr, delta_ptr, dx_ptr, dk_ptr, units, m_row, m_col, inv_t,
    ALIGN: tl.constexpr, W: tl.constexpr, C: tl.constexpr, KIND: tl.constexpr, GIVEN: tl.constexpr,
    MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row per program, read once from memory and once from the cache."""
    n = units * ALIGN
    row = tl.program_id(0).to(tl.int64)
    center = tl.load(center_ptr + row)
    delta = tl.load(delta_ptr + row)
    mass, dot = _row_sums(x_ptr, m_ptr, g_ptr, row, m_row, m_col, n, 0, n, center, delta, inv_t, W, C, KIND, MASKED)
    if GIVEN:
        dot += tl.load(gd_ptr + row)
    if (mass > TINY) & is_finite(delta):
        tl.store(dk_ptr + row, tl.div_rn(dot, mass))
        _row_write(
            x_ptr, m_ptr, g_ptr, dx_ptr, row, m_row, m_col, n, 0, n, center, delta, tl.div_rn(dot, mass), inv_t, W, C,
            KIND, MASKED,
        )  # fmt: skip
    else:
        _row(
            x_ptr, m_ptr, g_ptr, gd_ptr, center_ptr, delta_ptr, dx_ptr, dk_ptr, row, m_row, m_col, n, inv_t,
            KIND, GIVEN, BLOCK, MASKED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["units", "splits"], do_not_specialize_on_alignment=PER_ROW)
def _split_sums(
    x_ptr, m_ptr, g_ptr, center_ptr, delta_ptr, parts_ptr, units, m_row, m_col, inv_t, chunk, splits,
    ALIGN: tl.constexpr, W: tl.constexpr, C: tl.constexpr, KIND: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The two sums of a row over a chunk of it."""
    n = units * ALIGN
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    lo = part * chunk
    mass, dot = _row_sums(
        x_ptr, m_ptr, g_ptr, row, m_row, m_col, n, lo, tl.minimum(lo + chunk, n),
        tl.load(center_ptr + row), tl.load(delta_ptr + row), inv_t, W, C, KIND, MASKED,
    )  # fmt: skip
    tl.store(parts_ptr + (row * splits + part) * 2, mass)
    tl.store(parts_ptr + (row * splits + part) * 2 + 1, dot)


@triton.jit(do_not_specialize=["units", "splits"], do_not_specialize_on_alignment=PER_ROW)
def _split_write(
    x_ptr, m_ptr, g_ptr, gd_ptr, center_ptr, delta_ptr, dx_ptr, dk_ptr, parts_ptr, units, m_row, m_col, inv_t, chunk,
    splits, ALIGN: tl.constexpr, G: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
    KIND: tl.constexpr, GIVEN: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of a chunk of a row, from the sums of all its chunks."""
    n = units * ALIGN
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    center = tl.load(center_ptr + row)
    delta = tl.load(delta_ptr + row)
    every = tl.arange(0, G)
    here = parts_ptr + (row * splits + every) * 2
    mass = tl.sum(tl.load(here, mask=every < splits, other=0.0), 0)
    dot = tl.sum(tl.load(here + 1, mask=every < splits, other=0.0), 0)
    if GIVEN:
        dot += tl.load(gd_ptr + row)
    if (mass > TINY) & is_finite(delta):
        if part == 0:
            tl.store(dk_ptr + row, tl.div_rn(dot, mass))
        lo = part * chunk
        _row_write(
            x_ptr, m_ptr, g_ptr, dx_ptr, row, m_row, m_col, n, lo, tl.minimum(lo + chunk, n), center, delta,
            tl.div_rn(dot, mass), inv_t, W, C, KIND, MASKED,
        )  # fmt: skip
    elif part == 0:
        _row(
            x_ptr, m_ptr, g_ptr, gd_ptr, center_ptr, delta_ptr, dx_ptr, dk_ptr, row, m_row, m_col, n, inv_t,
            KIND, GIVEN, BLOCK, MASKED,
        )  # fmt: skip


def backward(
    logits: Tensor,
    mask: Tensor | None,
    temperature: float,
    center: Tensor,
    delta: Tensor,
    grad_out: Tensor | None,
    grad_delta: Tensor | None,
    kind: str,
) -> tuple[Tensor, Tensor]:
    """Do the same as `lastlayer.project.lml._plain_backward`."""
    try:
        return _backward(logits, mask, temperature, center, delta, grad_out, grad_delta, kind)
    except Absent:
        return _general_backward(logits, mask, (temperature, center, delta), grad_out, grad_delta, kind)


def _general_backward(
    logits: Tensor, mask: Tensor | None, rows: tuple[float, Tensor, Tensor], grad_out: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    """Do the same in the form to which every call can be brought; `rows` are temperature, center and delta."""
    x, _, mask = general_form(logits, None, mask)
    with shapes.general_form():
        dx, dk = _backward(x, mask, *rows, None if grad_out is None else grad_out.float(), *rest)
    return dx.to(logits.dtype), dk


def _backward(
    logits: Tensor,
    mask: Tensor | None,
    temperature: float,
    center: Tensor,
    delta: Tensor,
    grad_out: Tensor | None,
    grad_delta: Tensor | None,
    kind: str,
) -> tuple[Tensor, Tensor]:
    n = logits.shape[-1]
    x = logits.contiguous()
    dx, dk = torch.empty_like(x), torch.empty_like(delta, memory_format=torch.contiguous_format)
    rows = dk.numel()
    if rows == 0 or n == 0:
        return dx, dk.zero_()
    p = shapes.plan(n, shapes.BACKWARD, x.element_size()) if n <= shapes.longest(LONGEST) else None
    given = Rows(x.view(rows, n), None, mask, temperature, None if p is None else p.align)
    g = x if grad_out is None else grad_out.contiguous()
    gd = center if grad_delta is None else grad_delta.contiguous()
    kind = "nu" if grad_out is None else kind
    pointers = (g, gd, center.contiguous(), delta.contiguous(), dx, dk)
    rare = p is None or p is shapes.shared(n)
    launch_all(_launches(given, pointers, kind, grad_delta is not None, p), shared=rare)
    return dx, dk


def _launches(
    given: Rows, pointers: tuple[Tensor, ...], kind: str, with_delta: bool, p: shapes.Plan | None
) -> list[Launch]:
    """What the backward pass launches, by a plan or for long rows.

    The pointers: the upstream gradients of the output and of delta, center, delta, and the gradients of logits and k.
    """
    rows, n, itemsize = given.count, given.n, given.x.element_size()
    pointers = (*given.head, *pointers)
    common: dict[str, Any] = {"KIND": kind, "GIVEN": with_delta, "MASKED": given.masked}
    if p is not None:
        options = {**p.tiles, "num_warps": p.warps, **common}
        return [Launch(_resident, (shapes.cdiv(rows, p.rows),), (*pointers, rows, *given.tail), options)]
    split = shapes.is_split(rows, n)
    tile, options = shapes.stream(itemsize, split)
    common |= {"ALIGN": given.align, "BLOCK": shapes.BLOCK, **tile, **options}
    if not split:
        return [Launch(_streamed, (rows,), (*pointers, *given.tail), common)]
    splits = shapes.cdiv(n, shapes.CHUNK)
    parts = pointers[-1].new_empty((rows, splits, 2))
    grid, tail = (rows, splits), (*given.tail, shapes.CHUNK, splits)
    sums = {"ALIGN": given.align, "KIND": kind, "MASKED": given.masked, **tile, **options}
    common["G"] = shapes.group(splits)
    return [
        Launch(_split_sums, grid, (*given.head, pointers[2], *pointers[-4:-2], parts, *tail), sums),
        Launch(_split_write, grid, (*pointers, parts, *tail), common),
    ]


def probabilities_backward(
    logits: Tensor, mask: Tensor | None, temperature: float, numbers: Tensor, grad: Tensor
) -> Tensor:
    """Return the gradient of the logits, from what `lml.probabilities` has kept."""
    n, x, g = logits.shape[-1], logits.contiguous(), grad.contiguous()
    rows = numbers.numel() // 3
    if rows == 0 or n == 0 or n > LONGEST or g.dtype != x.dtype or rows >> 31:
        center, delta, _ = numbers.unsqueeze(-1)
        return backward(logits, mask, temperature, center, delta, grad, None, "y")[0]
    dx = torch.empty_like(x)
    device, first, upstream, address = x.get_device(), x.data_ptr(), g.data_ptr(), numbers.data_ptr()
    key = ("y backward", device, x.dtype, n, first & 15, upstream & 15, rows & 3, temperature == 1)
    inverse = None if temperature == 1 else 1.0 / temperature
    step = 4 * rows
    given = (first, first, upstream, address, address, address + step, dx.data_ptr(), address + 2 * step, rows)
    if relaunch(key, device, rows, *given, n // shapes.alignment(n), 0, 0, inverse):
        return dx
    p = shapes.plan(n, shapes.BACKWARD, x.element_size())
    one = Rows(x.view(rows, n), None, None, temperature, p.align)
    center, delta, spare = numbers
    launches = _launches(one, (g, center, center, delta, dx, spare), "y", False, p)
    if p is shapes.shared(n) and absent(launches):
        center, delta, _ = numbers.unsqueeze(-1)
        return _general_backward(logits, mask, (temperature, center, delta), grad, None, "y")[0]
    ((kernel, grid, args, options),) = launches
    held = launch(kernel, grid, *args, **options)
    if p is shapes.exact(n, shapes.BACKWARD[x.element_size()], x.element_size()):
        prepare(key, held, p.rows)
    return dx


def later(x: Tensor, temperature: float, numbers: Tensor, out: Tensor, rare: bool) -> list[Launch]:
    """What `probabilities_backward` launches for a rare or a common length, to be compiled with the forward pass."""
    n, itemsize = x.shape[1], x.element_size()
    p = None if n > LONGEST else shapes.shared(n) if rare else shapes.exact(n, shapes.BACKWARD[itemsize], itemsize)
    center, delta, spare = numbers
    given = Rows(x, None, None, temperature, None if p is None else p.align)
    end = torch.empty_like(spare) if p is None else spare
    return _launches(given, (out, center, center, delta, out, end), "y", False, p)
