"""Losses and projections on the GPU, in one launch each way: the door of `lastlayer._native.fused` for CUDA tensors.

A kernel cannot report an unusual row without a wait for the GPU. It therefore computes every row as plain torch does,
and `run` refuses only by what the host knows: the operation and the shape.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lastlayer._check import Labels
from lastlayer._triton import fused_order as order
from lastlayer._triton import fused_rows as rows_of
from lastlayer._triton import plan as shapes
from lastlayer._triton.launch import launch
from lastlayer._triton.lml import forward as lml_forward

MOST_LISTED = 16  # labels of an index list that a kernel compares with every class
MOST_ROWS = 8192  # of a batch whose columns are taken by one program each
LONGEST = 16384  # classes of a row in registers
MOST_CHOSEN = 16  # classes of a subset
POINTS = order.POINTS.value

STREAMED: dict[str, Any] = {
    "logistic": rows_of.logistic,
    "shifted": rows_of.shifted,
    "asymmetric": rows_of.asymmetric,
    "two_way_rows": rows_of.two_way_rows,
    "two_way_columns": rows_of.two_way_columns,
    "logsumexp": rows_of.logsumexp,
    "quasibinary": rows_of.quasibinary,
}
HELD: dict[str, Any] = {
    "truncated": order.truncated,
    "warp": order.warp,
    "capped_softmax": order.capped_softmax,
    "capped_sparsemax": order.capped_sparsemax,
    "capped_softmax_backward": order.capped_softmax_backward,
    "capped_sparsemax_backward": order.capped_sparsemax_backward,
    "marginals": order.marginals,
    "marginals_backward": order.marginals_backward,
    "smooth_svm": order.smooth_svm,
}
_EXTRA = {"logsumexp": 2, "quasibinary": 1}  # further numbers per row
_PROJECTIONS = ("capped_softmax", "capped_sparsemax", "marginals")  # and their backward passes: no loss


class Result(NamedTuple):
    """As that of `lastlayer._native.fused`; what an operation does not have is None."""

    loss: Any
    out: Any
    counts: Any
    extra: Any


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
    """Do the same as `lastlayer._native.fused.run`; None where there is no kernel for the operation or the shape."""
    n, batch = x.shape[-1], x.shape[:-1]
    rows = x.numel() // n
    columns, projects = name == "two_way_columns", name.startswith(_PROJECTIONS)
    if max(rows, n) >> 31 or (columns and rows > MOST_ROWS) or (name in HELD and n > LONGEST):
        return None
    if name == "logistic":
        numbers = (2 * numbers[1],)  # of the coefficients 1 - s / 2 and s / 2
        name = name if first is None else "shifted"
    each = mask if each is None else each
    x, extra = x.contiguous(), None
    held, target, width = _target(labels)
    p, p_row, p_col = _strides(positive, x)
    if name in ("marginals", "marginals_backward", "smooth_svm"):
        if numbers[0] > MOST_CHOSEN:
            return None
        p, second = _tilt(name, x, labels, numbers)
        extra = _roots(x.device)
    elif name == "warp":
        second = _harmonic(n, x.device)
    e, e_row, e_col = _strides(each, x)
    step = int(first is not None and first.numel() > 1)
    if step:
        assert first is not None
        first = first.expand(batch).contiguous()
        second = None if second is None else second.expand(batch).contiguous()

    lines = (n,) if columns else batch
    loss = None if projects else torch.empty(lines, dtype=torch.float32, device=x.device)
    counts = None if projects else torch.empty(lines, dtype=torch.bool, device=x.device)
    out = torch.empty_like(x) if gradient else None
    if name in _EXTRA:
        extra = torch.empty((*batch, _EXTRA[name]), dtype=torch.float32, device=x.device)
    block, warps = _sizes(name, n)
    given = [float(value) for value in numbers] + [0.0] * (4 - len(numbers))
    launch(
        STREAMED.get(name) or HELD[name], (shapes.cdiv(n, block) if columns else rows,),
        x, target, e, p, first, second, loss, out, None if counts is None else counts.view(torch.int8), extra,
        rows, n, width, e_row, e_col, p_row, p_col, step, *given,
        TARGET=held, HARD=labels is None or not _soft(labels), GRADIENT=gradient, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return Result(loss, out, counts, extra)


def _sizes(name: str, n: int) -> tuple[int, int]:
    """Return the classes that a program takes at once, and its warps; few sizes, since each is compiled."""
    if name == "two_way_columns":
        return 32, 4
    if name in HELD:
        block = max(shapes.power_of_2(n), 32)
        return block, min(max(block // 256, 4 if name in ("marginals", "marginals_backward", "smooth_svm") else 1), 16)
    return (128, 1) if n <= 128 else (1024, 4) if n <= 1024 else (2048, 8)


def _soft(labels: Labels) -> bool:
    return labels.dense is not None and labels.dense.is_floating_point()


def _target(labels: Labels | None) -> tuple[str, Tensor | None, int]:
    """Return the kind of labels, these as a kernel reads them, and the width of lists; long lists become multi-hot."""
    if labels is None:
        return "none", None, 0
    dense = labels.dense
    if labels.index is not None:
        if labels.index.shape[-1] <= MOST_LISTED:
            index = labels.index.contiguous()
            return "lists", index, index.shape[-1]
        dense = labels.positive()
    assert dense is not None
    dense = dense.contiguous()
    return "dense", dense.view(torch.uint8) if dense.dtype == torch.bool else dense, 0


def _strides(weight: Tensor | None, x: Tensor) -> tuple[Tensor | None, int, int]:
    """Return weights of classes, or a mask, and their distances from row to row and from class to class."""
    if weight is None:
        return None, 0, 0
    if weight.dtype == torch.bool:
        weight = weight.contiguous().view(torch.uint8)
    if weight.numel() == 1:
        return weight, 0, 0
    if weight.numel() == weight.shape[-1]:  # one number per class
        return weight.contiguous(), 0, 1
    return weight.expand(x.shape).contiguous(), x.shape[-1], 1


def _tilt(name: str, x: Tensor, labels: Labels | None, numbers: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return the center and delta at which the mean count of classes is `k`; of all but the label k - 1/2 for the SVM.

    The result does not depend on them, but its digits do.
    """
    k = numbers[0]
    if name != "smooth_svm":
        _, center, delta = lml_forward(x, float(k), None, 1.0, "nu")
        return center.squeeze(-1), delta.squeeze(-1)
    assert labels is not None
    n = x.shape[-1]
    if labels.index is not None:
        label = labels.index
        if label.shape[-1] > 1:
            label = torch.where(label < 0, n, label).amin(-1, keepdim=True)
    else:
        assert labels.dense is not None
        label = (labels.dense > 0).to(torch.uint8).argmax(-1, keepdim=True)  # the first
    others = _places(n, x.device) != label
    if labels.dense is not None:
        others = others & (labels.dense >= 0)
    _, center, delta = lml_forward(x, k - 0.5, others, k * numbers[1], "nu")
    return center.squeeze(-1), delta.squeeze(-1)


@functools.lru_cache(maxsize=16)
def _places(n: int, device: torch.device) -> Tensor:
    return torch.arange(n, device=device)


@functools.lru_cache(maxsize=16)
def _harmonic(n: int, device: torch.device) -> Tensor:
    """Return 0, 1, 1 + 1/2, ... up to `n` terms."""
    steps = torch.arange(n + 1, dtype=torch.float64)
    steps[1:] = steps[1:].reciprocal().cumsum(0)
    return steps.to(device, torch.float32)


@functools.lru_cache(maxsize=16)
def _roots(device: torch.device) -> Tensor:
    """Return the cosines and the sines of the roots of unity."""
    angle = torch.arange(POINTS, dtype=torch.float64) * (2 * math.pi / POINTS)
    return torch.stack([angle.cos(), angle.sin()]).to(device)
