"""The compiled losses and projections of `fused.c`: one door for all of them, for float32 on the CPU."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lastlayer._check import Labels
from lastlayer._native import library
from lastlayer._native.lml import _NO_MEMORY, _read_dense, _read_mask, fenchel_young_loss

# ``struct fused`` of `fused.c`: rows, n, logits, mask, mask_stride, dense, index, m, dense_type, operation, threads,
# unused, each, positive, their strides, first, step, six numbers, loss, out, extra, counts.
_CALL = struct.Struct("@qqPPqPPqiiiiPPqqPqddddddPPPP")
_RUN = library().lastlayer_run_fused  # this module is imported where there is a library
assert library().lastlayer_fused_size() == _CALL.size

OPERATIONS = (
    "logistic", "asymmetric", "two_way_rows", "two_way_columns", "logsumexp", "quasibinary", "truncated", "smooth_svm",
    "warp", "capped_softmax", "capped_sparsemax", "capped_softmax_backward", "capped_sparsemax_backward", "marginals",
    "marginals_backward",
)  # fmt: skip
_NUMBER = {name: number for number, name in enumerate(OPERATIONS)}
_EXTRA = {"logsumexp": 2, "quasibinary": 1}  # further numbers per row


class Result(NamedTuple):
    """One loss per row, or per column; the gradient, or the projection; which rows count; further numbers per row."""

    loss: Tensor
    out: Tensor
    counts: Tensor
    extra: Tensor


def run(
    name: str,
    x: Tensor,
    labels: Labels | None = None,
    numbers: Sequence[float] = (),
    *,
    mask: Tensor | None = None,
    each: Tensor | None = None,
    positive: Tensor | None = None,
    first: Tensor | None = None,
    second: Tensor | None = None,
    gradient: bool = True,
) -> Result | None:
    """Run an operation on float32 scores; None where a row is out of the ordinary, which plain torch must take.

    `each` and `positive` broadcast to the scores; `first` holds one number per row, or one for all rows.
    """
    if name == "fenchel_young":  # which needs the search of lml; numbers: k, below 0 for the number of labels
        assert labels is not None
        k = first if first is not None else numbers[0] if numbers[0] >= 0 else None
        found = fenchel_young_loss(x, k, mask, labels.index, labels.dense, gradient)
        return None if found is None else Result(*found, torch.ones_like(found[0], dtype=torch.bool), x.new_empty(0))
    if name == "quasibinary":  # two numbers for all rows
        assert first is not None
        assert second is not None
        numbers, first, second = (float(first), float(second)), None, None
    x = x.contiguous()
    n, batch = x.shape[-1], x.shape[:-1]
    rows = x.numel() // n
    lines = (n,) if name == "two_way_columns" else batch
    loss, counts = x.new_empty(lines), x.new_empty(lines, dtype=torch.bool)
    out = torch.empty_like(x) if gradient else x.new_empty(0)
    extra = x.new_empty((*batch, _EXTRA.get(name, 0)))
    dense = index = None
    dense_type = width = mask_stride = step = 0
    if labels is not None and labels.dense is not None:
        dense, dense_type = _read_dense(labels.dense)
    elif labels is not None and labels.index is not None:
        index = labels.index.contiguous()
        width = index.shape[-1]
    if mask is not None:
        mask, mask_stride = _read_mask(mask, n)
    each, each_stride = _read_weights(each, x)
    positive, positive_stride = _read_weights(positive, x)
    if first is not None:
        step = int(first.numel() > 1)
        first = first.to(x.dtype).expand(batch).contiguous() if step else first.to(x.dtype)
    call = _CALL.pack(
        rows, n, x.data_ptr(), _at(mask), mask_stride, _at(dense), _at(index), width, dense_type, _NUMBER[name],
        torch.get_num_threads(), 0, _at(each), _at(positive), each_stride, positive_stride, _at(first), step,
        *numbers, *(0.0,) * (6 - len(numbers)), loss.data_ptr(), _at(out) if gradient else 0, extra.data_ptr(),
        counts.data_ptr(),
    )  # fmt: skip
    problem = _RUN(call)
    if problem == 1:
        raise MemoryError(_NO_MEMORY)
    return None if problem else Result(loss, out, counts, extra)


def _at(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _read_weights(weight: Tensor | None, x: Tensor) -> tuple[Tensor | None, int]:
    """Return weights in an order that the library reads, and the distance from one row to the next."""
    if weight is None:
        return None, 0
    n = x.shape[-1]
    if weight.numel() == weight.shape[-1:].numel():  # one number, or one per class
        return weight.reshape(-1).to(x.dtype).expand(n).contiguous(), 0
    return weight.to(x.dtype).expand(x.shape).contiguous(), n
