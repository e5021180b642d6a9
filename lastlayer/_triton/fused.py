"""Losses and projections on the GPU, in few launches: the door of `lastlayer._native.fused` for CUDA tensors.

`run` gives one loss per row with its gradient, or a projection; the functions below it give a loss of the whole batch,
with what its backward pass needs. A kernel cannot report an unusual row without a wait for the GPU. It therefore
computes every row as plain torch does, and `takes` refuses only by what the host knows: the operation and the shape.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from lastlayer._check import Labels
from lastlayer._triton import fused_batch as batch_of
from lastlayer._triton import fused_flat as flat_rows
from lastlayer._triton import fused_lml as budget
from lastlayer._triton import fused_order as order
from lastlayer._triton import fused_rows as rows_of
from lastlayer._triton import fused_subset as subset
from lastlayer._triton import loaded
from lastlayer._triton import plan as shapes
from lastlayer._triton.ahead import Launch, absent, compile_ahead, is_new, launch

MOST_LISTED = 16  # labels of an index list that a kernel compares with every class
MOST_ROWS = 8192  # of a batch whose columns are taken by one program each
MOST_SUMMED = 1 << 16  # rows, or columns, whose losses one program sums
LONGEST = 16384  # classes of a row in registers
MOST_CHOSEN = 16  # classes of a subset
SUMMED = (1024, 4), (4096, 16)  # of them at a time, and warps
SCALED = {"STEPS": 16, "BLOCK": 2048, "num_warps": 8}  # scores at a time whose gradient is scaled, if it must be
OF_ROWS = (256, 2), (1024, 8)  # the same of one row, and warps
STRIP = 256, 8  # rows and columns at a time of a loss of columns
JOINED = 32, 16  # parts of that loss, and columns
MANY = 2048  # rows that fill the chip if two warps take each

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
    "fenchel_young": budget.fenchel_young,
    "at_most": budget.at_most,
    "at_most_backward": budget.at_most_backward,
}
_EXTRA = {"logsumexp": 2, "quasibinary": 1, "at_most": 3}  # further numbers per row
_SUBSETS = ("marginals", "marginals_backward", "smooth_svm")
_NO_LOSS = ("capped_softmax", "capped_sparsemax", "at_most")  # and their backward passes
_SEARCHED = ("capped_softmax", "capped_sparsemax", "at_most", "truncated")  # rows that are reduced most often
_REGISTERS = {
    "capped_softmax": 80,
    "capped_sparsemax": 80,
    "at_most": 96,
    "fenchel_young": 64,
    "truncated": 96,
    "asymmetric": 64,
    "warp": 56,
    "marginals": 128,
    "flat": 64,
}


_own: set[tuple[Any, ...]] = set()  # kinds of calls that have kernels of their own


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
    scale: float = 1.0,
) -> Result | None:
    """Do the same as `lastlayer._native.fused.run`; None where there is no kernel for the operation or the shape.

    The gradient of a loss is multiplied by `scale`.
    """
    if not takes(name, x.shape[:-1].numel(), x.shape[-1], numbers):
        return None
    if name in _SUBSETS:
        return _subsets(name, x, labels, numbers, each, first, gradient, scale)
    return _run(name, x, labels, numbers, mask, each, positive, first, second, gradient, scale)


def _run(
    name: str,
    x: Tensor,
    labels: Labels | None,
    numbers: Sequence[float],
    mask: Tensor | None = None,
    each: Tensor | None = None,
    positive: Tensor | None = None,
    first: Tensor | None = None,
    second: Tensor | None = None,
    gradient: bool = True,
    scale: float = 1.0,
) -> Result:
    n, batch = x.shape[-1], x.shape[:-1]
    rows = x.numel() // n
    columns, projects = name == "two_way_columns", name.startswith(_NO_LOSS)
    if name == "logistic":
        numbers = (2 * numbers[1],)  # of the coefficients 1 - s / 2 and s / 2
        name = name if first is None else "shifted"
    each = mask if each is None else each
    x, kernel = x.contiguous(), STREAMED.get(name) or HELD[name]
    held, target, width = _target(labels)
    p, p_row, p_col = _strides(positive, x)
    if name == "warp":
        second = _harmonic(n, x.device)
    e, e_row, e_col = _strides(each, x)
    step = 0
    if first is not None and first.numel() > 1 and not name.endswith("_backward"):
        step, first = 1, first.expand(batch).contiguous()
        second = None if second is None else second.expand(batch).contiguous()

    lines = (n,) if columns else batch
    loss = None if projects else torch.empty(lines, dtype=torch.float32, device=x.device)
    counts = None if projects else torch.empty(lines, dtype=torch.bool, device=x.device)
    out = torch.empty_like(x) if gradient else None
    extra = None
    if name in _EXTRA:
        extra = torch.empty((*batch, _EXTRA[name]), dtype=torch.float32, device=x.device)
    block, warps = _sizes(name, n, rows)
    given = [float(value) for value in numbers] + [0.0] * (4 - len(numbers))
    marks = None if counts is None else counts.view(torch.int8)
    args = (
        x, target, e, p, first, second, loss, out, marks, extra,
        rows, n, width, e_row, e_col, p_row, p_col, step, *given, scale,
    )  # fmt: skip
    constants = {
        "TARGET": held,
        "HARD": labels is None or not _soft(labels),
        "GRADIENT": gradient,
        "BLOCK": block,
        "num_warps": warps,
        **_limited(name, rows, warps),
    }
    unusual = rows >= MANY or not gradient or _is_rare(target, held)
    if unusual and _absent(name, held, Launch(kernel, (1,), args, constants)):
        block, warps = _sizes(name, n)
        constants |= {"GRADIENT": True, "BLOCK": block, "num_warps": warps}
        constants.pop("maxnreg", None)
        args = (*args[:7], torch.empty_like(x) if out is None else out, *args[8:])
        if _is_rare(target, held):
            args, constants["HARD"] = (x, _in_float32(target), *args[2:]), False
    if not name.endswith("_backward") and is_new((name, x.get_device(), x.dtype, held, block, warps)):
        _compile_ahead(name, args, constants)
    launch(kernel, (shapes.cdiv(n, block) if columns else rows,), *args, **constants)
    return Result(loss, out, counts, extra)


def _absent(name: str, held: str, own: Launch) -> bool:
    """Whether a call is to use the kernel for few rows, a target of float32 and a gradient, as its own is not there."""
    x, target, *others = own.args[:6]
    kind = (name, x.get_device(), x.dtype, held, None if target is None else target.dtype, *own.options.values())
    kind += tuple(other is None for other in others)
    if kind in _own:
        return False
    if absent([own]):
        return True
    _own.add(kind)
    return False


def _is_rare(target: Tensor | None, held: str) -> TypeGuard[Tensor]:
    """Whether a multi-hot target has a type for which no kernels come with the package."""
    return target is not None and held == "dense" and target.dtype not in (torch.float32, torch.uint8)


def _in_float32(target: Tensor) -> Tensor:
    """Return a multi-hot target as a soft one, in which a whole label is 1."""
    return target.float() if target.is_floating_point() else target.clamp(max=1).float()


def _compile_ahead(name: str, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """Compile the launcher of a kernel, if it is one of Triton's, and what follows a projection or a loss."""
    follows = [] if loaded.takes(constants) else [Launch(rows_of.blank, (1,), args, constants)]
    x, _, e, _, first, second, loss, out, counts, extra, _, n = args[:12]
    if f"{name}_backward" in HELD:  # of a contiguous upstream gradient
        mask = e if name == "at_most" else None
        given = (
            x, None, out, mask, first if extra is None else extra, second, None, out, None, None,
            1, n, 0, n, 1, *args[13:15], 0, *[1.0] * 5,
        )  # fmt: skip
        block, warps = _sizes(f"{name}_backward", n)
        options = {"TARGET": "none", "HARD": True, "GRADIENT": True, "BLOCK": block, "num_warps": warps}
        follows.append(Launch(HELD[f"{name}_backward"], (1,), given, options))
    elif loss is not None:
        follows += _ends(loss, counts, out)
    compile_ahead(*follows)


def _subsets(
    name: str,
    x: Tensor,
    labels: Labels | None,
    numbers: Sequence[float],
    each: Tensor | None,
    first: Tensor | None,
    gradient: bool,
    scale: float,
) -> Result:
    """Do an operation over subsets of classes: see `fused_subset`."""
    n, batch, x = x.shape[-1], x.shape[:-1], x.contiguous()
    rows = x.numel() // n
    held, target, width = _target(labels)
    e, e_row, e_col = _strides(each, x)
    if first is not None and each is not None and e_col not in (0, 1):
        e, e_row, e_col = _strides(each.contiguous(), x)
    degrees = _degrees(numbers)
    table = loss = counts = marks = None
    if first is None:
        table = torch.empty((rows, _numbers_of_subsets(degrees)), dtype=torch.float64, device=x.device)
    if labels is not None:
        loss = torch.empty(batch, dtype=torch.float32, device=x.device)
        counts = torch.empty(batch, dtype=torch.bool, device=x.device)
        marks = counts.view(torch.int8)
    out = torch.empty_like(x) if gradient else None
    given = [float(value) for value in numbers] + [0.0] * (4 - len(numbers)) + [scale]
    args = (x, target, e, None, first, None, loss, out, marks, table, rows, n, width, e_row, e_col, 0, 0, 0, *given)
    block, warps = _sizes("marginals", n, rows)
    flat = labels is None and gradient and numbers[0] <= int(flat_rows.FEW.value)
    options = {
        "TARGET": held,
        "HARD": True,
        "GRADIENT": gradient,
        "BLOCK": block,
        "WIDE": 32 * warps,
        "ONE": n <= block,
        "FLAT": flat,
        "DEGREES": degrees,
        "num_warps": warps,
        **_limited("flat" if flat else "marginals", rows, warps),
    }
    kernel = subset.marginals if first is None else subset.marginals_backward
    unusual = rows >= MANY or not gradient or _is_rare(target, held)
    if unusual and _absent(name, held, Launch(kernel, (1,), args, options)):
        block, warps = _sizes("marginals", n)
        options |= {"GRADIENT": True, "BLOCK": block, "WIDE": 32 * warps, "ONE": n <= block, "num_warps": warps}
        options.pop("maxnreg", None)
        args = (*args[:7], torch.empty_like(x) if out is None else out, *args[8:])
        args = (x, _in_float32(target), *args[2:]) if _is_rare(target, held) else args
    if first is None and is_new((name, x.get_device(), x.dtype, *options.values())):
        follows: tuple[Launch, ...]
        if loss is not None and marks is not None:
            follows = _ends(loss, marks, out)
        else:  # of a contiguous upstream gradient
            back = (x, None, out, None, table, None, None, out, None, None, 1, n, 0, n, 1, 0, 0, 0, *given)
            follows = (Launch(subset.marginals_backward, (1,), back, options),)
        compile_ahead(*follows)
    launch(kernel, (rows,), *args, **options)
    return Result(loss, out, counts, table)


def _degrees(numbers: Sequence[float]) -> int:
    """Return how many degrees polynomials over subsets may have: more than 3 k + 2."""
    return 32 if numbers[0] < 10 else 64


def _numbers_of_subsets(degrees: int) -> int:
    """Return how many numbers per row `fused_subset` keeps: as there."""
    return int(subset.HEAD.value) + int(subset.VECTORS.value) * degrees


def takes(name: str, rows: int, n: int, numbers: Sequence[float] = ()) -> bool:
    """Whether there is a kernel for the operation and the shape."""
    held = name in HELD or name in _SUBSETS
    if max(rows, n) >> 31 or (name == "two_way_columns" and rows > MOST_ROWS) or (held and n > LONGEST):
        return False
    return name not in _SUBSETS or (
        numbers[0] <= MOST_CHOSEN and not rows * _numbers_of_subsets(_degrees(numbers)) >> 31
    )


def sums(rows: int, n: int, *, columns: bool = False) -> bool:
    """Whether the losses of a batch are summed by a kernel."""
    return rows <= (MOST_ROWS if columns else MOST_SUMMED) and not n >> (16 if columns else 31)


def reduced(found: Result, mean: bool, over: int) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses, or their mean over the rows that count; and the factor of their gradients.

    The gradients were multiplied by 1 over `over`.
    """
    total, factor = _number(found.loss), _number(found.loss)
    counts = found.counts.view(torch.int8)
    options = {"MEAN": mean, **_summing(counts.numel())}
    launch(batch_of.reduced, (1,), found.loss, counts, total, factor, counts.numel(), float(over), **options)
    return total, factor


def scaled_(grad: Tensor, upstream: Tensor, factor: Tensor) -> Tensor:
    """Multiply gradients by the factor of `reduced` and the upstream gradient, in place; 1 leaves them alone."""
    grid = (shapes.cdiv(grad.numel(), SCALED["STEPS"] * SCALED["BLOCK"]),)
    launch(batch_of.scaled, grid, grad, upstream, factor, grad.numel(), **SCALED)
    return grad


def of_rows(grad: Tensor, upstream: Tensor) -> Tensor:
    """Multiply the gradients of rows by one number each; 0 gives 0, also where they are nan."""
    out, n = torch.empty_like(grad), grad.shape[-1]
    block, warps = OF_ROWS[n > OF_ROWS[0][0]]
    given = (grad, upstream.float().contiguous(), out, n)
    launch(batch_of.of_rows, (grad.numel() // n,), *given, BLOCK=block, num_warps=warps)
    return out


def _summing(count: int) -> dict[str, Any]:
    """Return the constants of a kernel whose one program sums so many numbers."""
    block, warps = SUMMED[count > SUMMED[0][0]]
    return {"BLOCK": block, "num_warps": warps}


def _ends(loss: Tensor, counts: Tensor, grad: Tensor | None) -> tuple[Launch, ...]:
    """Return the kernels that will reduce a loss, and scale its gradient."""
    options = {"MEAN": True, **_summing(loss.numel())}
    mean = Launch(batch_of.reduced, (1,), (loss, counts, loss, loss, 1, 1.0), options)
    if grad is None:
        return (mean,)
    return mean, Launch(batch_of.scaled, (1,), (grad, loss, loss, grad.numel()), dict(SCALED))


def quasibinary(x: Tensor, labels: Labels, mean: bool) -> tuple[Tensor, Tensor]:
    """Return the quasibinary loss of a batch, and the numbers that its gradient needs."""
    n, (held, target, width) = x.shape[-1], _target(labels)
    rows, (block, warps) = x.numel() // n, _sizes("quasibinary", n)
    numbers, total = torch.empty((5, rows), dtype=torch.float32, device=x.device), _number(x)
    result = torch.empty(4, dtype=torch.float32, device=x.device)
    of_row: dict[str, Any] = {"TARGET": held, "BLOCK": block, "num_warps": warps}
    of_all = _summing(rows)
    factor = 1.0 / rows if mean else 1.0
    few = 256 if rows <= 256 else 1024 if rows <= 1024 else 0
    steps = [
        Launch(batch_of.quasibinary_sums, (rows,), (x, target, numbers, rows, n, width), of_row),
        Launch(batch_of.quasibinary_normaliser, (1,), (numbers, result, rows), of_all),
        Launch(
            batch_of.quasibinary_loss,
            (rows,),
            (x, target, numbers, result, rows, n, width),
            {"TARGET": held, "SUMMED": few, "BLOCK": block, "num_warps": warps},
        ),
        Launch(batch_of.quasibinary_total, (1,), (numbers, total, result, rows, factor), of_all),
    ]
    if few:
        del steps[1]
    args = (x, target, total, result, x, n, width, factor)
    last = Launch(batch_of.quasibinary_backward, (rows,), args, of_row)
    if _is_rare(target, held) and absent([*steps, last]):
        return quasibinary(x, Labels(None, _in_float32(target), n), mean)
    _take(("quasibinary", x.get_device(), held, block), steps, last)
    return total, result


def quasibinary_backward(x: Tensor, labels: Labels, mean: bool, result: Tensor, upstream: Tensor) -> Tensor:
    """Return the gradient of the loss of `quasibinary`."""
    n, (held, target, width) = x.shape[-1], _target(labels)
    rows, (block, warps) = x.numel() // n, _sizes("quasibinary", n)
    out, factor = torch.empty_like(x), 1.0 / rows if mean else 1.0
    options = {"TARGET": held, "BLOCK": block, "num_warps": warps}
    args = (x, target, upstream, result, out, n, width, factor)
    if _is_rare(target, held) and absent([Launch(batch_of.quasibinary_backward, (1,), args, options)]):
        args = (x, _in_float32(target), *args[2:])
    launch(batch_of.quasibinary_backward, (rows,), *args, **options)
    return out


def two_way(x: Tensor, labels: Labels, form: Sequence[float], mean: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the two-way loss of the rows and the columns of a batch, and what its gradient needs."""
    n, (held, target, width) = x.shape[-1], _target(labels)
    rows, (block, warps) = x.numel() // n, _sizes("two_way_rows", n)
    by_row = torch.empty((7, rows), dtype=torch.float32, device=x.device)
    by_column = torch.empty((6, n), dtype=torch.float32, device=x.device)
    result, total = torch.empty(2, dtype=torch.float32, device=x.device), _number(x)
    long, wide = STRIP
    parts, strips = shapes.cdiv(rows, long), shapes.cdiv(n, wide)
    found = by_column if parts == 1 else torch.empty((parts, 5, n), dtype=torch.float32, device=x.device)
    lines = {"TARGET": held, "BLOCK": min(block, 1024), "LONG": long, "WIDE": wide, "ONE": n <= min(block, 1024)}
    lines |= {"PARTS": parts > 1, "num_warps": 4, "maxnreg": 64}
    both = {"MEAN": mean, **_summing(max(rows, n))}
    args: tuple[Any, ...] = (x, target, by_row, by_column, found, rows, n, width, *form)
    steps = [Launch(batch_of.two_way_lines, (parts * (strips + long),), args, lines)]
    if parts > 1:
        joined = {"LONG": JOINED[0], "WIDE": JOINED[1], "num_warps": 4}
        args = (found, by_column, n, parts, *form)
        steps.append(Launch(batch_of.two_way_joined, (shapes.cdiv(n, JOINED[1]),), args, joined))
    steps.append(Launch(batch_of.two_way_total, (1,), (by_row, by_column, total, result, rows, n), both))
    args = (x, target, total, by_row, by_column, result, x, rows, n, width, 1, *form[:2])
    options = {"TARGET": held, "BLOCK": block, "num_warps": warps, "maxnreg": 64}
    last = Launch(batch_of.two_way_backward, (1,), args, options)
    if _is_rare(target, held) and absent([*steps, last]):
        return two_way(x, Labels(None, _in_float32(target), n), form, mean)
    _take(("two way", x.get_device(), held, block), steps, last)
    return total, by_row, by_column, result


def two_way_backward(
    x: Tensor, labels: Labels, form: Sequence[float], by_row: Tensor, by_column: Tensor, result: Tensor, up: Tensor
) -> Tensor:
    """Return the gradient of the loss of `two_way`."""
    n, (held, target, width) = x.shape[-1], _target(labels)
    rows, (block, warps) = x.numel() // n, _sizes("two_way_rows", n)
    out, per = torch.empty_like(x), 4 if rows >= MANY else 1
    options = {"TARGET": held, "BLOCK": block, "num_warps": warps, "maxnreg": 64}
    args = (x, target, up, by_row, by_column, result, out, rows, n, width, per, form[0], form[1])
    if _is_rare(target, held) and absent([Launch(batch_of.two_way_backward, (1,), args, options)]):
        args = (x, _in_float32(target), *args[2:])
    launch(batch_of.two_way_backward, (shapes.cdiv(rows, per),), *args, **options)
    return out


def _take(kind: tuple[Any, ...], steps: Sequence[Launch], last: Launch) -> None:
    """Launch the kernels of a forward pass; at first compile them and that of the backward pass side by side."""
    if is_new(kind):
        compile_ahead(*steps[1:], last)
    for kernel, grid, args, options in steps:
        launch(kernel, grid, *args, **options)


def _number(like: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.float32, device=like.device)


def _sizes(name: str, n: int, rows: int = 1) -> tuple[int, int]:
    """Return the classes that a program takes at once, and its warps.

    Few sizes, since each is compiled; and few classes per thread, since the code of each is repeated. Where a row is
    reduced many times, few warps share it: a reduction costs each of them the same. Where rows fill the chip, fewer.
    """
    if name == "two_way_columns":
        return 32, 4
    if name == "marginals":  # a row may have several times as many
        warps = 1 if n <= 256 else 4 if n <= 1024 else 16
        warps = max(warps // 4, 1) if rows >= MANY else warps
        return 256 * warps, warps
    if name in HELD:
        block = next(size for size in (64, 256, 1024, 4096, LONGEST) if n <= size)
        share = 512 if name in _SEARCHED and rows >= MANY else 256
        return block, min(max(block // share, 1), 32)
    if n <= 128:
        return 128, 2
    return (1024, 8) if n <= 1024 else (2048, 16)


def _limited(name: str, rows: int, warps: int) -> dict[str, int]:
    """Return a limit of the registers per thread: while a row waits for its sums, others need a place beside it.

    All threads of a program must fit into the 65,536 registers of a multiprocessor.
    """
    if rows < MANY or name not in _REGISTERS:
        return {}
    return {"maxnreg": min(_REGISTERS[name], 2048 // warps)}


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
    if weight.ndim == 2 and weight.shape == x.shape:
        return weight, weight.stride(0), weight.stride(1)
    return weight.expand(x.shape).contiguous(), x.shape[-1], 1


@functools.lru_cache(maxsize=16)
def _harmonic(n: int, device: torch.device) -> Tensor:
    """Return 0, 1, 1 + 1/2, ... up to `n` terms."""
    steps = torch.arange(n + 1, dtype=torch.float64)
    steps[1:] = steps[1:].reciprocal().cumsum(0)
    return steps.to(device, torch.float32)
