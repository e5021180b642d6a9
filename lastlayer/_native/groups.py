"""The compiled projection with limits on groups of classes, in float64: values and thresholds."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from lastlayer._native import library
from lastlayer._native.lml import _NO_MEMORY

# ``struct grouped`` of `lml.c`: rows, n, groups, x, k, limit, limit_stride, order, first, out, center, delta, bound,
# threads.
_CALL = struct.Struct("@qqqPPPqPPPPPPq")
_RUN = library().lastlayer_run_grouped
assert library().lastlayer_grouped_size() == _CALL.size


def solve(x: Tensor, k: Tensor, limits: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what `project.groups._solve` does."""
    n, n_groups = x.shape[-1], limits.shape[-1]
    x, k = x.contiguous(), k.contiguous()
    shared = not any(limits.stride()[:-1])
    limits = limits.reshape(-1, n_groups)[:1].contiguous() if shared else limits.contiguous()
    order = groups.argsort(stable=True)
    first = torch.zeros(n_groups + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(groups, minlength=n_groups), 0, out=first[1:])
    out, rows = torch.empty_like(x), k.numel()
    center = x.new_empty((*x.shape[:-1], n_groups + 1))
    delta = torch.empty_like(center)
    bound = torch.empty((*x.shape[:-1], n_groups), dtype=torch.bool)
    call = _CALL.pack(
        rows, n, n_groups, x.data_ptr(), k.data_ptr(), limits.data_ptr(), 0 if shared else n_groups, order.data_ptr(),
        first.data_ptr(), out.data_ptr(), center.data_ptr(), delta.data_ptr(), bound.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    if _RUN(call):
        raise MemoryError(_NO_MEMORY)
    return out, center, delta, bound
