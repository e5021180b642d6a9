"""Classes sharded over processes: which slice a rank holds, and how rows are reduced over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

Op = Literal["sum", "max", "min"]


@dataclass(frozen=True)
class ClassShard:
    """This rank's slice of the classes: ``start <= class < stop``.

    Args:
        start: The first class of this rank.
        stop: One past the last class of this rank; an empty slice is allowed.
        group: The process group over which the classes are split; ``None`` is the default group.

    Example:
        >>> ClassShard(0, 500).size
        500
    """

    start: int
    stop: int
    group: Any = None

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(
                f"ClassShard: `start` and `stop` must satisfy 0 <= start <= stop, got {self.start} and {self.stop}."
            )

    @property
    def size(self) -> int:
        """The number of classes on this rank."""
        return self.stop - self.start


def reduce(values: Tensor | Sequence[Tensor], op: Op, shard: ClassShard | None) -> Any:
    """Reduce ``(..., local classes)`` to ``(..., 1)`` over the classes of all ranks.

    A sequence of tensors is reduced with one collective and returned as a tuple. The sum is differentiable: its
    result feeds each rank's own classes, so the ranks' gradients add up.
    """
    several = not isinstance(values, Tensor)
    parts = [_local(v, op) for v in (values if several else [values])]
    if shard is None:
        return tuple(parts) if several else parts[0]
    packed = torch.cat(parts, -1) if several else parts[0]
    packed = _SumOverRanks.apply(packed, shard.group) if op == "sum" else _all_reduce(packed, op, shard.group)
    return packed.split(1, -1) if several else packed


def total(value: Tensor, shard: ClassShard | None) -> Tensor:
    """Add the ranks' contributions to a result that every rank returns; its gradient reaches each rank once."""
    return value if shard is None else _Total.apply(value, shard.group)


def _local(values: Tensor, op: Op) -> Tensor:
    if op == "sum":
        return values.sum(-1, keepdim=True)
    if values.shape[-1] == 0:  # an empty shard holds the neutral element
        return values.new_full((*values.shape[:-1], 1), -torch.inf if op == "max" else torch.inf)
    return values.amax(-1, keepdim=True) if op == "max" else values.amin(-1, keepdim=True)


def _all_reduce(value: Tensor, op: Op, group: Any) -> Tensor:
    value = value.contiguous().clone()
    dist.all_reduce(value, getattr(dist.ReduceOp, op.upper()), group=group)
    return value


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _all_reduce(value, "sum", group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _SumOverRanks.apply(grad, ctx.group), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        return _all_reduce(value, "sum", group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def kth_largest(x: Tensor, rank: Tensor, shard: ClassShard | None) -> Tensor:
    """Return the `rank`-th largest entries (1 is the largest) over the classes of all ranks; `rank` is ``(..., m)``."""
    if shard is None:
        place = (rank - 1).clamp(0, max(x.shape[-1] - 1, 0)).long()
        if x.shape[-1] == 0:
            return torch.full_like(rank, -torch.inf)
        return x.sort(dim=-1, descending=True).values.gather(-1, place)
    raise NotImplementedError
