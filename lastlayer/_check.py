"""Input checks at the public door, and the three forms of a target.

Checks read shapes, dtypes and Python numbers, never the values of a tensor: that would synchronise a GPU and break
tracing.
"""

from __future__ import annotations

import contextlib
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx._pytree import register_pytree_flatten_spec
from torch.utils import _pytree
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from lastlayer._ranked import exporting
from lastlayer.shard import ClassShard, local_part

Reduction = Literal["none", "mean", "sum"]

_INDEX = (torch.int64, torch.int32)  # dtypes of class indices
_HOT = (torch.bool, torch.int8, torch.uint8)  # dtypes of multi-hot targets, beside the floating-point ones
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def logits(op: str, value: Any, name: str = "logits") -> Tensor:
    """Check a floating-point tensor with at least one dimension."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: `{name}` must be a tensor, got {type(value).__name__}. Use torch.as_tensor.")
    if not value.is_floating_point():
        raise TypeError(f"{op}: `{name}` must be of a floating-point dtype, got {value.dtype}. Use `{name}.float()`.")
    if value.dtype not in FLOATS:  # float8 and the like, which torch does not promote
        raise TypeError(f"{op}: `{name}` must be of 16, 32 or 64 bits, got {value.dtype}. Use `{name}.float()`.")
    if value.layout != torch.strided or value.is_nested:
        dense(op, name, value)
    if value.ndim == 0:
        raise ValueError(
            f"{op}: `{name}` must have a class dimension, got a tensor of shape (). Add one, e.g. x[None]."
        )
    return value


def dense(op: str, name: str, value: Tensor) -> None:
    """Refuse sparse, nested and other layouts."""
    if value.layout != torch.strided or value.is_nested:
        got = "a nested tensor" if value.is_nested else value.layout
        remedy = "torch.nested.to_padded_tensor and a mask" if value.is_nested else f"`{name}.to_dense()`"
        raise TypeError(f"{op}: `{name}` must be a dense tensor, got {got}. Use {remedy}.")


def dim(op: str, value: int, ndim: int) -> int:
    """Check a dimension and return it as a non-negative number."""
    value = plain(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{op}: `dim` must be an integer, got {value!r}. Use -1 for the last dimension.")
    if not -ndim <= value < ndim:
        raise ValueError(
            f"{op}: `dim` must be between {-ndim} and {ndim - 1}, got {value}. The input has {ndim} dimension(s)."
        )
    return value % ndim


def cardinality(op: str, k: Any, scores: Tensor, shard: ClassShard | None = None, *, at_most_n: bool = True) -> Tensor:
    """Return `k` as a tensor of the work dtype and of shape ``(*batch, 1)``; classes are the last dimension."""
    batch, n = scores.shape[:-1], scores.shape[-1]
    dtype = work_dtype(scores)
    if isinstance(k, Tensor):
        if k.is_complex() or k.dtype == torch.bool:
            raise TypeError(
                f"{op}: `k` must be a real number or a real tensor, got a tensor of {k.dtype}. Use a float."
            )
        if not _broadcasts(k.shape, batch):
            raise ValueError(
                f"{op}: `k` must broadcast to the batch shape {tuple(batch)}, got shape {tuple(k.shape)}. "
                "Give one number, or one per row."
            )
        return k.to(device=scores.device, dtype=dtype).expand(batch).unsqueeze(-1)
    one = cardinality_of_all(op, k, n, n if at_most_n and shard is None else math.inf)
    return constant(one, dtype, scores.device).expand(*batch, 1)


def constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a number as a tensor: for the compiler by a product, as it would compile `torch.full` anew for each."""
    if torch.compiler.is_compiling() and not exporting():
        return torch.ones((), dtype=dtype, device=device) * value
    return torch.full((), value, dtype=dtype, device=device)


def variable(value: float, x: Tensor) -> float | Tensor:
    """Return a number, or for the compiler a tensor in the dtype of `x`: few operators of numbers take any there."""
    return constant(value, x.dtype, x.device) if torch.compiler.is_compiling() and not exporting() else value


def cardinality_of_all(op: str, k: Any, n: int, limit: float) -> float:
    """Check a `k` that is one number for all rows."""
    if isinstance(k, bool) or not isinstance(k, numbers.Real):
        raise TypeError(
            f"{op}: `k` must be a number or a tensor, got {type(k).__name__}. Pass the size of the label set."
        )
    if not 0 <= float(k) <= limit:  # also catches nan
        raise ValueError(
            f"{op}: `k` must be between 0 and n_classes={n}, got {k}. Choose a `k` in that range, or pass a tensor "
            "with one `k` per row, where a row with an infeasible `k` becomes NaN."
        )
    return float(k)


def _broadcasts(shape: torch.Size, batch: torch.Size) -> bool:
    missing = len(batch) - len(shape)
    return missing >= 0 and all(s in (1, b) for s, b in zip(shape, batch[missing:], strict=True))


def on_device(op: str, name: str, value: Tensor, scores: Tensor) -> None:
    """Check that a tensor is where the scores are: kernels read its memory as it is."""
    if value.device != scores.device:
        raise ValueError(
            f"{op}: `{name}` must be on the device of the scores, {scores.device}, got {value.device}. "
            f"Use `{name}.to({str(scores.device)!r})`."
        )


def mask(op: str, value: Any, scores: Tensor) -> Tensor | None:
    """Check a boolean mask, True where a class takes part, and expand it to the shape of the scores."""
    if value is None:
        return None
    if not isinstance(value, Tensor) or value.dtype != torch.bool:
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{op}: `mask` must be a boolean tensor, True where a class takes part, got {got}.")
    if not _broadcasts(value.shape, scores.shape):
        raise ValueError(
            f"{op}: `mask` must broadcast to the shape {tuple(scores.shape)}, got shape {tuple(value.shape)}."
        )
    on_device(op, "mask", value, scores)
    return value.expand(scores.shape)


def temperature(op: str, value: Any) -> Any:
    """Check a positive, finite temperature; a tensor is taken as it is."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{op}: `temperature` must be a number or a tensor, got {type(value).__name__}.")
    if not 0 < float(value) < math.inf:
        raise ValueError(
            f"{op}: `temperature` must be positive and finite, got {value}. Near 0 choices are almost hard."
        )
    return float(value)


def temperatures(op: str, value: Tensor, batch: torch.Size, dtype: torch.dtype) -> Tensor:
    """Check a tensor of temperatures, and expand it to one per row; NaN where one is not positive and finite."""
    if value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"{op}: `temperature` must be real, got a tensor of {value.dtype}. Use a float.")
    if not _broadcasts(value.shape, batch):
        raise ValueError(
            f"{op}: `temperature` must broadcast to the batch shape {tuple(batch)}, got shape {tuple(value.shape)}. "
            "Give one number, or one per row."
        )
    value = value.to(dtype)
    return torch.where((value > 0) & (value < math.inf), value, math.nan).expand(batch)


def choice(op: str, name: str, value: Any, allowed: tuple[Any, ...], old: Mapping[str, str] | None = None) -> Any:
    """Check one of a few words, and return it; `old` maps words that still work to those of now."""
    if old is not None and isinstance(value, str):
        value = old.get(value, value)
    if value not in allowed:
        words = ", ".join(repr(a) for a in allowed)
        raise ValueError(f"{op}: `{name}` must be one of {words}, got {value!r}.")
    return value


def number(op: str, name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> float:
    """Check a Python number within ``[low, high]``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{op}: `{name}` must be a number, got {type(value).__name__}.")
    if not low <= float(value) <= high:
        raise ValueError(f"{op}: `{name}` must be between {low} and {high}, got {value}.")
    return float(value)


def plain(value: Any) -> Any:
    """Return a whole number of NumPy as one of Python, and anything else as it is."""
    return int(value) if isinstance(value, np.integer) else value


def work_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the arithmetic: float32 for half precision, else the input's own."""
    return torch.promote_types(x.dtype, torch.float32)


def autocast(device: torch.device) -> bool:
    """Whether autocast is on for a device."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Switch autocast off, if it is on: that takes as long as a launch."""
    return torch.autocast(device.type, enabled=False) if autocast(device) else contextlib.nullcontext()


def weights(op: str, name: str, value: Any, x: Tensor, shape: torch.Size, advice: str) -> Tensor | None:
    """Check weights that broadcast to a shape, and return them in the dtype and on the device of `x`."""
    if value is None:
        return None
    value = local_part(value)
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return constant(float(value), x.dtype, x.device)
    if not isinstance(value, Tensor) or value.is_complex() or value.dtype == torch.bool:
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{op}: `{name}` must be a tensor of real numbers, got {got}.")
    if not _broadcasts(value.shape, shape):
        raise ValueError(
            f"{op}: `{name}` must broadcast to the shape {tuple(shape)}, got shape {tuple(value.shape)}. {advice}"
        )
    return value.to(x)


def reduced(
    op: str, loss: Tensor, reduction: Reduction, counts: Tensor | None = None, sample_weight: Tensor | None = None
) -> Tensor:
    """Reduce one loss per row; the mean is over the rows where `counts` is true, and 0 without such a row.

    Row weights multiply the losses. The mean is then the weighted one: a weight of 2 counts as two equal rows.
    """
    choice(op, "reduction", reduction, ("none", "mean", "sum"))
    weight = None
    if sample_weight is not None:
        weight = weights(op, "sample_weight", sample_weight, loss, loss.shape, "Give one weight per row.")
    if weight is not None:
        loss = torch.where(weight == 0, 0, weight * loss)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    if weight is None:
        rows = max(loss.numel(), 1) if counts is None else counts.sum().clamp(min=1).to(loss.dtype)
        return loss.sum() / rows
    counted = weight.expand(loss.shape) if counts is None else torch.where(counts, weight, 0)
    mass = counted.sum()
    return loss.sum() / torch.where(mass == 0, 1, mass)


@dataclass(frozen=True)
class Labels:
    """A checked target: index lists, or a tensor of the shape of the logits; exactly one of the two is there.

    ``index`` holds distinct classes, -1 where there is none. ``dense`` is as the user gave it: positive numbers are
    labels (soft labels keep their value), 0 is negative or unobserved, negative numbers are unknown.
    """

    index: Tensor | None
    dense: Tensor | None
    n_classes: int

    def positive(self) -> Tensor:
        """Where the labels are: a boolean tensor of the shape of the logits."""
        if self.dense is not None:
            return self.dense > 0
        assert self.index is not None
        place = torch.where(self.index < 0, self.n_classes, self.index)  # padding goes to a column of its own
        hot = torch.zeros((*place.shape[:-1], self.n_classes + 1), dtype=torch.bool, device=place.device)
        return hot.scatter(-1, place, 1)[..., : self.n_classes]

    def known(self) -> Tensor | None:
        """Where the target is known; None if it is known everywhere."""
        return None if self.dense is None else self.dense >= 0

    def count(self) -> Tensor:
        """The number of labels per row, shape ``batch``."""
        if self.dense is not None:
            return (self.dense > 0).sum(-1)
        assert self.index is not None
        return (self.index >= 0).sum(-1)

    def sum_over_positives(self, function: Callable[..., Tensor], *values: Tensor) -> Tensor:
        """Return the sum over each row's labels of ``function(*values)``, shape ``batch``.

        The values have the shape of the logits or ``(*batch, 1)``. Index lists gather first, so that nothing of the
        size of the logits is made; elsewhere the function gets 0, so that classes that are no labels have no gradient.
        """
        if self.dense is not None:
            positive = self.dense > 0
            picked = [v if v.shape[-1] == 1 else torch.where(positive, v, 0) for v in values]
        else:
            assert self.index is not None
            positive, place = self.index >= 0, self.index.clamp(min=0)
            if self.n_classes == 0:  # an empty shard: it gathers no label, and keeps the graph that all ranks have
                values = tuple(F.pad(v, (0, 1)) if v.shape[-1] == 0 else v for v in values)
            whole = [v.shape[-1] != 1 or self.n_classes == 1 for v in values]
            picked = [
                torch.where(positive, v.gather(-1, place), 0) if w else v for v, w in zip(values, whole, strict=True)
            ]
        return torch.where(positive, function(*picked), 0).sum(-1)


@dataclass(frozen=True, eq=False)
class LabelLists:
    """Index lists, marked as such by :func:`label_lists`; ``index`` is the tensor.

    The mark stays when the lists move to another device, when rows are selected and when a DataLoader stacks them; it
    passes through pickling, ``torch.compile``, ``torch.export`` and ``torch.func``.

    Example:
        >>> label_lists(torch.tensor([[0, 2, -1], [1, -1, -1]]))[:1].shape
        torch.Size([1, 3])
    """

    index: Tensor

    @property
    def shape(self) -> torch.Size:
        """The shape ``(*batch, m)``."""
        return self.index.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the indices."""
        return self.index.dtype

    @property
    def device(self) -> torch.device:
        """The device of the indices."""
        return self.index.device

    def size(self, dim: int) -> int:
        """Return the size of one dimension, which TensorDataset compares."""
        return self.index.size(dim)

    def to(self, *args: Any, **options: Any) -> LabelLists:
        """Move or convert the indices, as ``Tensor.to`` does."""
        return label_lists(self.index.to(*args, **options))

    def cpu(self) -> LabelLists:
        """Move the indices to the CPU."""
        return label_lists(self.index.cpu())

    def cuda(self, *args: Any, **options: Any) -> LabelLists:
        """Move the indices to a GPU."""
        return label_lists(self.index.cuda(*args, **options))

    def pin_memory(self, *args: Any) -> LabelLists:
        """Pin the indices for a DataLoader."""
        return label_lists(self.index.pin_memory(*args))

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, rows: Any) -> LabelLists:
        return label_lists(self.index[rows])


Target: TypeAlias = Tensor | LabelLists


def label_lists(target: Target) -> LabelLists:
    """Mark a target as index lists, for lists that are as wide as there are classes.

    An int64 or int32 target of the logits' own shape might be multi-hot or hold index lists, so that losses and metrics
    refuse it. Marked, it holds index lists. Lists of any other width need no mark, and may have one.

    Args:
        target: Index lists padded with -1, shape ``(*batch, m)``, int64 or int32.

    Returns:
        The marked lists, which every `target` argument takes.

    Example:
        >>> import lastlayer as ll
        >>> logits, lists = torch.tensor([[1.0, 0.0, -1.0]]), torch.tensor([[0, 2, -1]])
        >>> ll.binary_loss(logits, ll.label_lists(lists))  # three classes, of which 0 and 2 are labels
        tensor(2.3197)
    """
    if isinstance(target, LabelLists):
        return target
    if not isinstance(target, Tensor) or target.dtype not in _INDEX:
        got = target.dtype if isinstance(target, Tensor) else type(target).__name__
        raise TypeError(
            f"label_lists: `target` must be a tensor of int64 or int32, got {got}. Multi-hot targets need no mark."
        )
    if target.ndim == 0:
        raise ValueError("label_lists: `target` must have shape (*batch, m), got (). One class needs no mark.")
    return LabelLists(target)


# The DataLoader stacks marked lists, and torch.func, torch.export and DDP find the tensor in them.
default_collate_fn_map[LabelLists] = lambda batch, **_: label_lists(default_collate([lists.index for lists in batch]))
_pytree.register_pytree_node(
    LabelLists,
    lambda lists: ([lists.index], None),
    lambda parts, _: LabelLists(*parts),
    serialized_type_name="lastlayer.LabelLists",
    flatten_with_keys_fn=lambda lists: ([(_pytree.GetAttrKey("index"), lists.index)], None),
)
register_pytree_flatten_spec(LabelLists, lambda lists, _: [lists.index])  # graphs of torch 2.6 need one of their own


def target(
    op: str,
    value: Any,
    scores: Tensor,
    shard: ClassShard | None = None,
    *,
    in_range: bool = True,
    distinct: bool = True,
) -> Labels:
    """Check a target in any of its three forms against scores of shape ``(*batch, n_classes)``.

    The dtype tells the form, as in ``F.cross_entropy``: int64 and int32 are class indices, one per row or a list per
    row; floating-point numbers, bool, int8 and uint8 are multi-hot. An int64 or int32 target of the shape of the scores
    fits both and is refused, unless :func:`label_lists` marks it.

    With `shard`, index targets hold classes of all ranks; the result holds those of this rank, counted from 0. A class
    that does not exist is an error where that can be seen for free (on the CPU, outside of traces), unless `in_range`
    is False. Repeats in index lists are dropped, unless `distinct` is False.
    """
    marked = isinstance(value, LabelLists)
    value = value.index if marked else value
    if type(value) is not Tensor:
        value = local_part(value)
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: `target` must be a tensor, got {type(value).__name__}. Use torch.as_tensor.")
    if value.layout != torch.strided or value.is_nested:
        got = "a nested tensor" if value.is_nested else value.layout
        raise TypeError(f"{op}: `target` must be a dense tensor, got {got}. Use index lists padded with -1.")
    on_device(op, "target", value, scores)
    batch, n = scores.shape[:-1], scores.shape[-1]
    one_per_row, same = value.shape == batch and not marked, value.shape == scores.shape
    if not one_per_row and value.shape[:-1] != batch:
        raise ValueError(
            f"{op}: `target` must have shape {tuple(scores.shape)} (multi-hot), {tuple(batch)} (one class per row) or "
            f"({', '.join(map(str, (*batch, 'm')))}) (index lists padded with -1), got {tuple(value.shape)}."
        )
    if value.is_floating_point() or value.dtype in _HOT:
        if same:
            return Labels(None, value, n)
        raise TypeError(
            f"{op}: `target` of shape {tuple(value.shape)} holds class indices and must be of int64 or int32, "
            f"got {value.dtype}. Use `target.long()`."
        )
    if value.dtype not in _INDEX:
        raise TypeError(
            f"{op}: `target` must be of int64 or int32 (class indices) or of float, bool, int8 or uint8 (multi-hot), "
            f"got {value.dtype}."
        )
    if same and not marked and n > 0:
        raise TypeError(
            f"{op}: `target` of {value.dtype} and of the shape of the scores, {tuple(value.shape)}, may be multi-hot "
            "or index lists. For multi-hot use `target.float()` or `target.bool()`; for index lists use a width other "
            "than n_classes, or `ll.label_lists(target)`."
        )
    index = value.long().unsqueeze(-1) if one_per_row else value.long()
    if shard is None and in_range:
        classes_below(op, index, n)
    if shard is not None:
        index = index - shard.start
        index = torch.where((index >= 0) & (index < n), index, -1)
    return Labels(_distinct(index) if distinct else index, None, n)


def readable(x: Tensor) -> bool:
    """Whether reading a value costs nothing and fixes nothing: a plain CPU tensor, and no trace, mode or transform."""
    return (
        type(x) is Tensor
        and x.is_cpu
        and not (torch.compiler.is_compiling() or torch.jit.is_tracing())
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def classes_below(op: str, index: Tensor, n: int) -> None:
    """Check that the classes of an index target exist, where reading them costs nothing."""
    below(op, "target", index, n, "classes below n_classes", "Classes count from 0, and -1 pads.")


def below(op: str, name: str, index: Tensor, n: int, rule: str, advice: str) -> None:
    """Check that indices are below `n` where reading them costs nothing: on the CPU, outside of traces."""
    if index.numel() == 0 or not readable(index):
        return
    largest = int(index.max())
    if largest >= n:
        raise ValueError(f"{op}: `{name}` must hold {rule}={n}, got {largest}. {advice}")


def _distinct(index: Tensor) -> Tensor:
    """Drop repeats from index lists: a label named twice is one label."""
    if index.shape[-1] < 2:
        return index
    index = index.sort(-1, descending=True).values
    repeat = torch.cat([torch.zeros_like(index[..., :1], dtype=torch.bool), index[..., 1:] == index[..., :-1]], -1)
    return torch.where(repeat, -1, index)
