"""The logits of a linear layer in float32, by the tensor cores of a GPU: faster than its float32 units, and more exact.

A float32 is the sum of three bfloat16 numbers, whose products a tensor core has exactly. Six of the nine products
matter: the others are below the last digit. Tensor cores cut off what they add instead of rounding it, so that every
few features begin a sum of their own, and float32 units add these sums.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer._triton import INTERPRETED
from lastlayer._triton.ahead import Launch, absent
from lastlayer._triton.device import COMPILED
from lastlayer._triton.launch import launch
from lastlayer._triton.plan import cdiv

TILES = {"BM": 128, "BN": 128, "BK": 32}  # classes, rows and features at a time
OPTIONS = {"num_warps": 8, "num_stages": 3}
FEWEST = 128  # rows: with fewer, reading the weights takes longer than the products
PARTS = 1 << 24  # bytes of the parts of the features that exist at a time
SPLIT = 1024  # features that a program splits


@triton.jit
def _parts(x):
    """The number x as the sum of three bfloat16 numbers; and the first of them once more, 0 where it is not finite.

    The parts are cut off and not rounded, so that none overflows. The first is all that there is of inf and nan: the
    products of the others with them would be nan.
    """
    bits = x.to(tl.int32, bitcast=True)
    odd = (bits & 0x7F800000) == 0x7F800000
    first = tl.where(x != x, float("nan"), (bits & -65536).to(tl.float32, bitcast=True))
    rest = tl.where(odd, 0.0, x - first)
    second = (rest.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    finite = tl.where(odd, 0.0, first)
    return first.to(tl.bfloat16), finite.to(tl.bfloat16), second.to(tl.bfloat16), (rest - second).to(tl.bfloat16)


@triton.jit
def _dot(a, b, total):
    """Total plus a product; Triton's interpreter has none of bfloat16."""
    if COMPILED:
        return tl.dot(a, b, total)
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total)


@triton.jit
def _split_kernel(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first, finite, second, third = _parts(tl.load(x_ptr + i, mask=i < size, other=0.0))
    tl.store(out_ptr + i, first, mask=i < size)
    tl.store(out_ptr + size + i, finite, mask=i < size)
    tl.store(out_ptr + 2 * size + i, second, mask=i < size)
    tl.store(out_ptr + 3 * size + i, third, mask=i < size)


@triton.jit(do_not_specialize=["n", "rows"])
def _logits_kernel(
    w_ptr, f_ptr, bias_ptr, out_ptr, n, rows, size, w_stride, out_stride,
    BIASED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A tile of logits; `size` is the number of features, a multiple of BK."""
    tiles = (rows + BN - 1) // BN  # the rows of a tile of classes follow one another: its weights are read once
    row = tl.program_id(0) % tiles * BN + tl.arange(0, BN)
    place = (tl.program_id(0) // tiles).to(tl.int64) * BM + tl.arange(0, BM)
    feature = tl.arange(0, BK)
    whole = rows.to(tl.int64) * size
    w_ptr += tl.minimum(place, n - 1)[:, None] * w_stride + feature[None, :]
    f_ptr += tl.minimum(row, rows - 1).to(tl.int64)[None, :] * size + feature[:, None]
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, size, BK):
        w1, w, w2, w3 = _parts(tl.load(w_ptr + start))
        f1 = tl.load(f_ptr + start)
        f = tl.load(f_ptr + whole + start)
        f2 = tl.load(f_ptr + 2 * whole + start)
        f3 = tl.load(f_ptr + 3 * whole + start)
        part = _dot(w3, f, tl.zeros((BM, BN), tl.float32))  # the smallest first
        part = _dot(w, f3, part)
        part = _dot(w2, f2, part)
        part = _dot(w2, f, part)
        part = _dot(w, f2, part)
        total += _dot(w1, f1, part)
    if BIASED:
        total += tl.load(bias_ptr + place, mask=place < n, other=0.0)[:, None]
    here = out_ptr + row.to(tl.int64)[None, :] * out_stride + place[:, None]
    tl.store(here, total, mask=(place < n)[:, None] & (row < rows)[None, :])


def fits(features: Tensor, weight: Tensor) -> bool:
    """Whether logits are computed here: in float32, for so many rows that it pays, where that was measured."""
    rows, size = features.shape
    shaped = rows >= FEWEST and size > 0 and size % TILES["BK"] == 0 and weight.stride(1) == 1
    if not shaped or features.dtype != torch.float32 or weight.dtype != torch.float32:
        return False
    if weight.stride(0) % 4 or weight.data_ptr() % 16:  # rows must begin where 16 bytes can be read at once
        return False
    return INTERPRETED or (_is_hopper(features.device) and _in_float32())


def _is_hopper(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


def _in_float32() -> bool:
    """Whether torch computes float32 products in float32, and not in the faster TF32."""
    for settings in (torch.backends.cuda.matmul, torch.backends):  # "none" leaves it to the next
        precision = getattr(settings, "fp32_precision", "none")
        if precision != "none":
            return bool(precision == "ieee")
    return not torch.backends.cuda.matmul.allow_tf32


def pieces(features: Tensor) -> list[slice]:
    """Split rows such that their parts are small."""
    rows, size = features.shape
    step = max(1, PARTS // (8 * size * FEWEST)) * FEWEST
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def parts_of(features: Tensor) -> Tensor:
    """Return the parts of features, shape ``(4, rows, size)``, for `logits`."""
    features = features.contiguous()
    out = torch.empty((4, *features.shape), dtype=torch.bfloat16, device=features.device)
    launch(_split_kernel, (cdiv(features.numel(), SPLIT),), features, out, features.numel(), BLOCK=SPLIT, num_warps=4)
    return out


def logits(parts: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> bool:
    """Write the products of features and weights, plus a bias; return False if the kernel is still being compiled.

    The weights may have a stride from class to class, the logits one from row to row.
    """
    rows, size = parts.shape[1:]
    n = len(weight)
    grid = (cdiv(rows, TILES["BN"]) * cdiv(n, TILES["BM"]),)
    numbers = (n, rows, size, weight.stride(0), out.stride(0))
    tensors = (weight, parts, out if bias is None else bias.contiguous(), out)
    constants = {"BIASED": bias is not None, **TILES, **OPTIONS}
    if absent([Launch(_logits_kernel, grid, (*tensors, *numbers), constants)], lasting=False):
        return False
    launch(_logits_kernel, grid, *tensors, *numbers, **constants)
    return True
