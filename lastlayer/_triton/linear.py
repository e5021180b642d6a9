"""A block of logits for `lastlayer.head.linear`, each in one read: what a scan keeps of it, and its gradient."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_WARPS = 8
_PROGRAMS = 1024  # enough to fill the chip
_TERMS = 8  # powers that a scan sums


@triton.jit
def _add(ptr, values):
    """Add to a number that no other program touches: blocks follow one another."""
    tl.store(ptr, tl.load(ptr) + tl.sum(values))


@triton.jit
def _scan_kernel(
    x_ptr, floor_ptr, sums_ptr, top_ptr, fill_ptr, index_ptr, label_ptr,
    n, stride, span, splits, room, labels, start, BLOCK: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    stop = min((part + 1) * span, n)
    floor = tl.load(floor_ptr + row)
    zero = tl.zeros([BLOCK], tl.float32)
    p1, p2, p3, p4, p5, p6, p7, p8 = zero, zero, zero, zero, zero, zero, zero, zero
    n_finite, n_top, n_nan = zero, zero, zero
    for first in range(part * span, stop, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + cols, mask=cols < n, other=-float("inf")).to(tl.float32)
        finite = tl.abs(x) < float("inf")
        above = finite & (x > floor)
        n_finite += tl.where(finite, 1.0, 0.0)
        n_top += tl.where(x == float("inf"), 1.0, 0.0)
        n_nan += tl.where(x != x, 1.0, 0.0)
        w = tl.where(finite & (x <= floor), tl.exp(x - floor), 0.0)
        w2, w3 = w * w, w * w * w
        w4 = w2 * w2
        p1 += w
        p2 += w2
        p3 += w3
        p4 += w4
        p5 += w4 * w
        p6 += w4 * w2
        p7 += w4 * w3
        p8 += w4 * w4
        found = tl.sum(above.to(tl.int32))
        if found > 0:
            slot = tl.atomic_add(fill_ptr + row, found) + tl.cumsum(above.to(tl.int32), 0) - 1
            tl.store(top_ptr + row * room + slot, x, mask=above & (slot < room))
    for j in range(labels):
        place = tl.load(index_ptr + row * labels + j) - start
        if (place >= part * span) & (place < stop):
            tl.store(label_ptr + row * labels + j, tl.load(x_ptr + row * stride + place).to(tl.float32))
    here = sums_ptr + (row * splits + part) * 11
    _add(here, p1)
    _add(here + 1, p2)
    _add(here + 2, p3)
    _add(here + 3, p4)
    _add(here + 4, p5)
    _add(here + 5, p6)
    _add(here + 6, p7)
    _add(here + 7, p8)
    _add(here + 8, n_finite)
    _add(here + 9, n_top)
    _add(here + 10, n_nan)


@triton.jit
def _grad_kernel(
    x_ptr, center_ptr, delta_ptr, mass_ptr, pulled_ptr, scale_ptr, index_ptr, toward_ptr, out_ptr,
    n, stride, first, labels, rho, THINNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * BLOCK
    cols = begin + tl.arange(0, BLOCK)
    delta = tl.load(delta_ptr + row)
    x = tl.load(x_ptr + row * stride + cols, mask=cols < n, other=-float("inf")).to(tl.float32)
    z = (x - tl.load(center_ptr + row)) + delta
    tail = tl.exp(-tl.abs(z))
    out = tl.exp(-tl.abs(z) - 2 * tl.log(1 + tail) - tl.load(mass_ptr + row)) * tl.load(pulled_ptr + row)
    if THINNED:
        small = tail / (1 + tail)
        y = tl.where(z > 0, 1 - small, small)
        rest = tl.where(z > 0, small, 1 - small)
        leak = rho * y * rest / tl.maximum(rest + (1 - rho) * y, 1e-38)
        out += tl.load(scale_ptr + row) * tl.where(rho == 1.0, y, leak)
    out = tl.where(tl.abs(x) < float("inf"), out, 0.0)  # no gradient where x or nu is infinite
    out = tl.where(tl.abs(delta) == float("inf"), 0.0, out)
    out = tl.where(delta != delta, delta, out)
    for j in range(labels):
        place = tl.load(index_ptr + row * labels + j) - first - begin
        if (place >= 0) & (place < BLOCK):
            out += tl.where(cols - begin == place, tl.load(toward_ptr + row * labels + j), 0.0)
    tl.store(out_ptr + row * n + cols, out.to(out_ptr.dtype.element_ty), mask=cols < n)


def partial_sums(rows: int, n: int, numbers: int, device: torch.device) -> Tensor:
    """Return zeros for the sums of blocks of `n` classes: ``(rows, programs a row, numbers)``."""
    splits = max(1, min(_PROGRAMS // max(rows, 1), triton.cdiv(n, 4 * _BLOCK)))
    return torch.zeros(rows, splits, numbers, device=device)


def scan_block(
    x: Tensor, floor: Tensor, sums: Tensor, top: Tensor, fill: Tensor, index: Tensor, labels: Tensor, start: int
) -> None:
    """Add a block that starts at class `start` to what a scan keeps.

    Sums of powers below the floor and counts; the logits above it, appended to the lists in any order; the labels'.
    """
    rows, n = x.shape
    splits = sums.shape[1]
    assert sums.shape[2] == _TERMS + 3
    span = triton.cdiv(triton.cdiv(n, splits), _BLOCK) * _BLOCK
    tensors = (x, floor, sums, top, fill, index, labels)
    numbers = (n, x.stride(0), span, splits, top.shape[1], index.shape[1], start)
    _scan_kernel[(rows, splits)](*tensors, *numbers, BLOCK=_BLOCK, num_warps=_WARPS)


def grad_block(
    x: Tensor,
    center: Tensor,
    delta: Tensor,
    log_mass: Tensor,
    pulled: Tensor,
    scale: Tensor,
    index: Tensor,
    toward: Tensor,
    first: int,
    rho: float,
) -> Tensor:
    """Return the gradient of a block that starts at class `first`; the rows' numbers are contiguous."""
    out = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    tensors = (x, center, delta, log_mass, pulled, scale, index, toward, out)
    numbers = (x.shape[1], x.stride(0), first, index.shape[1], rho)
    grid = (x.shape[0], triton.cdiv(x.shape[1], _BLOCK))
    _grad_kernel[grid](*tensors, *numbers, THINNED=rho > 0, BLOCK=_BLOCK, num_warps=4)
    return out
