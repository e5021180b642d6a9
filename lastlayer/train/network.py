"""The networks of the trainer: linear or with hidden layers, on dense rows or on sparse ones (an embedding bag)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lastlayer.head.sharded import ShardedLinear
from lastlayer.shard import ClassShard

Input = Tensor | tuple[Tensor, Tensor, Tensor]


class LabelSetNetwork(nn.Module):
    """Map rows to logits.

    Args:
        n_features: The width of the input.
        n_labels: The number of labels.
        hidden: The widths of the hidden layers; without any it is a linear model.
        dropout: The dropout after each hidden layer.
        sparse: Whether the input is sparse: ``(index, offsets, value)`` as in :class:`torch.nn.EmbeddingBag`.
        shard: This process's slice of the labels, if they are split over processes. The outputs are those of the
            slice; the hidden layers are the same in all processes. See :mod:`lastlayer.train.sharded`.

    Example:
        >>> from lastlayer.train import LabelSetNetwork
        >>> LabelSetNetwork(8, 3, hidden=(4,))(torch.zeros(2, 8)).shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        n_features: int,
        n_labels: int,
        *,
        hidden: Sequence[int] = (),
        dropout: float = 0.0,
        sparse: bool = False,
        shard: ClassShard | None = None,
    ) -> None:
        super().__init__()
        self.encoder: nn.Module | None = None  # what turns rows into features, if that is trained too
        self.n_features, self.n_labels = n_features, n_labels
        self.sparse, self.shard = sparse, shard
        widths = [*hidden, n_labels]
        if shard is not None and not hidden:
            widths = [shard.size]
        self.first: nn.Module
        if sparse:
            self.first = nn.EmbeddingBag(n_features, widths[0], mode="sum")
        else:
            self.first = nn.Linear(n_features, widths[0], bias=False)
        self.bias = nn.Parameter(torch.zeros(widths[0]))
        self.dropout = nn.Dropout(dropout)
        self.rest = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths[:-1]))
        if hidden:
            self.rest.append(ShardedLinear(widths[-2], widths[-1], shard=shard))
        self._start(linear=not hidden)

    @staticmethod
    def count_parameters(n_features: int, n_labels: int, hidden: Sequence[int]) -> int:
        """Return the number of weights of such a network before it is made."""
        widths = [n_features, *hidden, n_labels]
        return sum(a * b + b for a, b in pairwise(widths))

    def _start(self, linear: bool) -> None:
        """Start a linear model at 0; break the symmetry of a deeper one at the scale of rows of unit length."""
        weight = self.first.weight
        assert isinstance(weight, Tensor)
        if linear:
            nn.init.zeros_(weight)
        else:
            nn.init.normal_(weight, std=0.3 if self.sparse else 1 / math.sqrt(self.n_features))

    def output_bias(self) -> nn.Parameter:
        """Return the biases of the outputs, one per label."""
        last = self.rest[-1].bias if len(self.rest) else self.bias
        assert isinstance(last, nn.Parameter)
        return last

    def class_dims(self) -> dict[str, int]:
        """Return the parameters that have one entry per label, and the dimension of these entries."""
        last = len(self.rest) - 1
        if last < 0:
            return {"first.weight": 1 if self.sparse else 0, "bias": 0}
        return {f"rest.{last}.weight": 0, f"rest.{last}.bias": 0}

    def forward(self, rows: Input) -> Tensor:
        """Return logits ``(rows, n_labels)``."""
        x = self.before_output(rows)
        return self.rest[-1](x) if len(self.rest) else x

    def before_output(self, rows: Input) -> Tensor:
        """Return the input of the output layer; for a linear model, its output."""
        if isinstance(rows, tuple):
            index, offsets, value = rows
            assert isinstance(self.first, nn.EmbeddingBag)
            weight, value = self.first.weight, value.to(self.first.weight.dtype)
            if weight.requires_grad and torch.is_grad_enabled() and weight.device.type == "cpu":
                x = bag(weight, index, offsets, value)
            else:
                x = self.first(index, offsets, per_sample_weights=value)
        elif isinstance(self.first, nn.EmbeddingBag):
            x = rows @ self.first.weight
        else:
            x = self.first(rows)
        hidden: Tensor = x + self.bias
        for i in range(len(self.rest)):
            hidden = self.dropout(hidden.relu())
            if i + 1 < len(self.rest):
                hidden = self.rest[i](hidden)
        return hidden


def bag(weight: Tensor, index: Tensor, offsets: Tensor, value: Tensor) -> Tensor:
    """Return the sum of weighted embeddings of each row on the CPU, with a quicker gradient than autograd's."""
    total: Tensor = _Bag.apply(weight, index, offsets, value)
    return total


class _Bag(torch.autograd.Function):
    """The sum of weighted embeddings on the CPU.

    The gradient is a sum of the same form, over the rows of each feature instead of the features of each row. The
    gradient of autograd takes seven times as long, since it neither sorts the pairs by feature nor works in blocks.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, index: Tensor, offsets: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(index, offsets, value)
        ctx.n_features = len(weight)
        return nn.functional.embedding_bag(index, weight, offsets, mode="sum", per_sample_weights=value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        import scipy.sparse as sp

        index, offsets, value = (t.numpy() for t in ctx.saved_tensors)
        rows = sp.csr_matrix((value, index, np.append(offsets, len(index))), shape=(len(offsets), ctx.n_features))
        turned = rows.tocsc()
        place, start, weight = (torch.from_numpy(a) for a in (turned.indices, turned.indptr[:-1], turned.data))
        out = nn.functional.embedding_bag(
            place, grad.contiguous(), start, mode="sum", per_sample_weights=weight.to(grad.dtype)
        )
        return out, None, None, None
