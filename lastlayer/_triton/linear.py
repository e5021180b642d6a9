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
def _counts_kernel(x_ptr, out_ptr, n, stride, span, splits, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    finite, top, broken = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in range(part * span, min((part + 1) * span, n), BLOCK):
        x = _load(x_ptr, row, stride, first + tl.arange(0, BLOCK), n)
        finite += tl.where(tl.abs(x) < float("inf"), 1.0, 0.0)
        top += tl.where(x == float("inf"), 1.0, 0.0)
        broken += tl.where(x != x, 1.0, 0.0)
    here = out_ptr + (row * splits + part) * 3
    tl.store(here, tl.sum(finite))
    tl.store(here + 1, tl.sum(top))
    tl.store(here + 2, tl.sum(broken))


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
    tl.store(here, tl.sum(a))
    tl.store(here + 1, tl.sum(b))
    tl.store(here + 2, tl.sum(above_sum))
    tl.store(here + 3, tl.sum(residual))
    tl.store(here + 4, tl.sum(cubic))
    tl.store(here + 5, tl.sum(squares) * unit)


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


def _split(x: Tensor) -> tuple[int, int]:
    """How many programs share a row, and how many classes each takes."""
    rows, n = x.shape
    splits = max(1, min(_PROGRAMS // max(rows, 1), triton.cdiv(n, 4 * _BLOCK)))
    span = triton.cdiv(triton.cdiv(n, splits), _BLOCK) * _BLOCK
    return triton.cdiv(n, span), span


def counts(x: Tensor) -> tuple[Tensor, ...]:
    """Return how many logits of a block are finite, ``+inf`` and nan, each ``(rows, 1)``."""
    splits, span = _split(x)
    out = torch.empty(x.shape[0], splits, 3, device=x.device)
    _counts_kernel[(x.shape[0], splits)](x, out, x.shape[1], x.stride(0), span, splits, BLOCK=_BLOCK)
    return out.sum(1).split(1, -1)


def block_sums(x: Tensor, center: Tensor, delta: Tensor, peak: Tensor) -> list[Tensor]:
    """Return the sums of `lastlayer.head.linear._block_sums`, each ``(rows, 1)``."""
    splits, span = _split(x)
    out = torch.empty(x.shape[0], splits, 6, device=x.device)
    rows = (center.contiguous(), delta.contiguous(), peak.contiguous())
    _sums_kernel[(x.shape[0], splits)](x, *rows, out, x.shape[1], x.stride(0), span, splits, BLOCK=_BLOCK)
    return list(out.sum(1).split(1, -1))


def grad_block(x: Tensor, center: Tensor, delta: Tensor, log_mass: Tensor, pulled: Tensor) -> Tensor:
    """Return ``pulled * h / sum h`` of a block in float32."""
    out = torch.empty(x.shape, device=x.device)
    rows = (center.contiguous(), delta.contiguous(), log_mass.contiguous(), pulled.contiguous())
    grid = (x.shape[0], triton.cdiv(x.shape[1], _BLOCK))
    _grad_kernel[grid](x, *rows, out, x.shape[1], x.stride(0), BLOCK=_BLOCK)
    return out
