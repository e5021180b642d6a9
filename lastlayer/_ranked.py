"""The k best entries of each row: exact, with ties by the lowest index. Decoders and metrics share it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LAST = torch.iinfo(torch.int64).max


def exporting() -> bool:
    """Whether ``torch.export`` is at work.

    ``torch.compiler.is_exporting`` reads the same flag, but up to torch 2.12 the compiler takes its answer for True.
    """
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))  # since torch 2.7


def top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the `k` largest entries of each row and their indices, largest first, ties by the lowest index.

    ``-inf`` and nan are never chosen: where a row has nothing more to choose, the value is ``-inf`` and the index -1.
    The results have width `k`, also beyond the width of `x`.
    """
    size = min(k, x.shape[-1])
    x, index = _chosen(x, size) if readable(x) else _chosen_blindly(x, size)
    index = index.sort(-1).values
    value, order = _descending(x.gather(-1, index))
    index = torch.where(value > -torch.inf, index.gather(-1, order), -1)
    return F.pad(value, (0, k - size), value=-torch.inf), F.pad(index, (0, k - size), value=-1)


def ordered(value: Tensor, index: Tensor, k: int, *others: Tensor) -> tuple[Tensor, ...]:
    """Order candidates by value, ties by index, and keep `k` per row; returns the values, indices and `others`.

    A value of ``-inf`` marks a place without a candidate; its index becomes -1. Nan is not allowed. The results have
    width `k`; what is missing is ``-inf``, -1, and 0 in `others`.
    """
    index, order = torch.where(value > -torch.inf, index, _LAST).sort(-1)
    value, place = _descending(value.gather(-1, order))
    index = index.gather(-1, place)
    index = torch.where(index == _LAST, -1, index)
    order = order.gather(-1, place)
    missing = max(k - index.shape[-1], 0)
    rest = (F.pad(x.gather(-1, order)[..., :k], (0, missing)) for x in others)
    value = F.pad(value[..., :k], (0, missing), value=-torch.inf)
    return value, F.pad(index[..., :k], (0, missing), value=-1), *rest


def _descending(x: Tensor) -> tuple[Tensor, Tensor]:
    """Sort each row, the largest first; equal entries keep their order."""
    if to_onnx():  # which has no stable sort, but whose TopK takes the lowest index of equal entries
        return x.topk(x.shape[-1], -1)
    return x.sort(dim=-1, descending=True, stable=True)


def to_onnx() -> bool:
    """Whether ``torch.onnx`` is exporting; asked only within an export, since the question loads the exporter."""
    return exporting() and torch.onnx.is_in_onnx_export()


def readable(x: Tensor) -> bool:
    """Whether Python may branch on values of `x`: it is a plain tensor with storage, and nothing traces or maps."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or x.is_meta or type(x) not in (Tensor, nn.Parameter):
        return False
    return torch._C._functorch.peek_interpreter_stack() is None and not torch._C._len_torch_dispatch_stack()


def _chosen(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """As ``topk``, which looks at each entry once; nan and ties are repaired only where there are any."""
    more = min(size + 1, x.shape[-1])
    value, index = x.topk(more, -1)
    if bool(value[..., :1].isnan().any()):  # nan counts as the largest
        x = torch.where(x.isnan(), -torch.inf, x)
        value, index = x.topk(more, -1)
    index = index[..., :size].contiguous()
    if 0 < size < more:
        # Where the last place cuts a tie, topk takes any of the equal entries.
        torn = (value[..., size - 1] == value[..., size]) & (value[..., size] > -torch.inf)
        if bool(torn.any()):
            index[torn] = _with_lowest(x[torn], value[torn][..., size - 1 : size], size)
    return x, index


def _chosen_blindly(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The same without a look at any value: every row is treated as if it had a tie to repair."""
    x = torch.where(x.isnan(), -torch.inf, x)
    value, index = x.topk(size, -1)
    return x, _with_lowest(x, value[..., -1:], size) if size else index


def _with_lowest(x: Tensor, last: Tensor, size: int) -> Tensor:
    """The places of the `size` largest entries, of which the last is given, in no order; ties by the lowest place."""
    n = x.shape[-1]
    lowest_first = torch.arange(n - 1, -1, -1, dtype=torch.int32, device=x.device)
    key = torch.where(x > last, n, torch.where(x == last, lowest_first, -1))
    return key.topk(size, -1).indices
