"""A block of logits for `lastlayer.head.linear`, each in one read: counts, the sums of a pass, the gradient."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_PROGRAMS = 1024  # enough to fill the chip


@triton.jit
def _load(x_ptr, row, stride, cols, n):
    return tl.load(x_ptr + row * stride + cols, mask=cols < n, other=-float("inf")).to(tl.float32)


@triton.jit
def _add(ptr, values):
    """Add to a number that no other program touches: blocks follow one another."""
    tl.store(ptr, tl.load(ptr) + tl.sum(values))


@triton.jit
def _counts_kernel(x_ptr, out_ptr, n, stride, span, splits, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    finite, top, broken = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in range(part * span, min((part + 1) * span, n), BLOCK):
        x = _load(x_ptr, row, stride, first + tl.arange(0, BLOCK), n)
        finite += tl.where(tl.abs(x) < float("inf"), 1.0, 0.0)
        top += tl.where(x == float("inf"), 1.0, 0.0)
        broken += tl.where(x != x, 1.0, 0.0)
    here = out_ptr + (row * splits + part) * 3
    _add(here, finite)
    _add(here + 1, top)
    _add(here + 2, broken)


@triton.jit
def _sums_kernel(x_ptr, center_ptr, delta_ptr, peak_ptr, out_ptr, n, stride, span, splits, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    center, peak = tl.load(center_ptr + row), tl.load(peak_ptr + row)
    factor = tl.exp(tl.minimum(tl.maximum(tl.load(delta_ptr + row), -60.0), 60.0))
    unit = tl.exp(peak)
    a, b, above_sum = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    residual, cubic = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for first in range(part * span, min((part + 1) * span, n), BLOCK):
        x = _load(x_ptr, row, stride, first + tl.arange(0, BLOCK), n)
        d = tl.where(tl.abs(x) < float("inf"), x, -float("inf")) - center
        above = d > 0
        tail = tl.exp(-tl.abs(d) - peak) * tl.where(above, 1 / factor, factor)
        w = tail * unit
        q = 1 / (1 + w)
        w, scaled = w * q, tail * q  # as in lastlayer.project.lml.small_parts
        h = scaled * (1 - w)
        outer, inner, bend = h * (1 - w), h * w, scaled * w * (3 - 2 * w)
        a += tl.where(above, outer, inner)
        b += tl.where(above, inner, outer)
        above_sum += tl.where(above, 1.0, 0.0)
        residual += tl.where(above, -scaled, scaled)
        cubic += tl.where(above, -bend, bend)
        squares += h * h
    here = out_ptr + (row * splits + part) * 6
    _add(here, a)
    _add(here + 1, b)
    _add(here + 2, above_sum)
    _add(here + 3, residual)
    _add(here + 4, cubic)
    _add(here + 5, squares * unit)


@triton.jit
def _grad_kernel(x_ptr, center_ptr, delta_ptr, mass_ptr, pulled_ptr, out_ptr, n, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    delta = tl.load(delta_ptr + row)
    x = _load(x_ptr, row, stride, cols, n)
    depth = -tl.abs((x - tl.load(center_ptr + row)) + delta)
    share = tl.exp(depth - 2 * tl.log(1 + tl.exp(depth)) - tl.load(mass_ptr + row))
    share = tl.where(tl.abs(x) < float("inf"), share, 0.0)  # no gradient where x or nu is infinite
    out = tl.where(tl.abs(delta) == float("inf"), 0.0, share) * tl.load(pulled_ptr + row)
    out = tl.where(delta != delta, delta, out)
    tl.store(out_ptr + row * n + cols, out, mask=cols < n)


def partial_sums(x: Tensor, numbers: int) -> Tensor:
    """Return zeros for the sums of blocks like `x`: ``(rows, programs a row, numbers)``."""
    rows, n = x.shape
    splits = max(1, min(_PROGRAMS // max(rows, 1), triton.cdiv(n, 4 * _BLOCK)))
    return torch.zeros(rows, splits, numbers, device=x.device)


def _span(x: Tensor, splits: int) -> int:
    return triton.cdiv(triton.cdiv(x.shape[1], splits), _BLOCK) * _BLOCK


def add_counts(sums: Tensor, x: Tensor) -> None:
    """Add how many logits of a block are finite, ``+inf`` and nan."""
    splits = sums.shape[1]
    grid = (x.shape[0], splits)
    _counts_kernel[grid](x, sums, x.shape[1], x.stride(0), _span(x, splits), splits, BLOCK=_BLOCK)


def add_sums(sums: Tensor, x: Tensor, center: Tensor, delta: Tensor, peak: Tensor) -> None:
    """Add the sums of a pass over a block; the rows' numbers are contiguous."""
    splits = sums.shape[1]
    grid = (x.shape[0], splits)
    span = _span(x, splits)
    _sums_kernel[grid](x, center, delta, peak, sums, x.shape[1], x.stride(0), span, splits, BLOCK=_BLOCK)


def grad_block(x: Tensor, center: Tensor, delta: Tensor, log_mass: Tensor, pulled: Tensor) -> Tensor:
    """Return ``pulled * h / sum h`` of a block in float32."""
    out = torch.empty(x.shape, device=x.device)
    grid = (x.shape[0], triton.cdiv(x.shape[1], _BLOCK))
    _grad_kernel[grid](x, center, delta, log_mass, pulled, out, x.shape[1], x.stride(0), BLOCK=_BLOCK)
    return out
