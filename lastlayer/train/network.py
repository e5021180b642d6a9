"""The networks of the trainer: linear or multi-layer, on dense rows or on sparse ones through an embedding bag."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lastlayer.head.linear import ShardedLinear
from lastlayer.shard import ClassShard

Input = Tensor | tuple[Tensor, Tensor, Tensor]


class LabelSetNetwork(nn.Module):
    """Map rows to logits, and to an expected number of labels if there is a count head.

    Args:
        n_features: The width of the input.
        n_labels: The number of labels.
        hidden: The widths of hidden layers; none is a linear model.
        dropout: The dropout after each hidden layer.
        sparse: Whether the input is sparse: ``(index, offsets, value)`` as in :class:`torch.nn.EmbeddingBag`.
        count_head: Whether to predict the number of labels a row.
        shard: This process's slice of the labels, where they are split over several: the outputs are those of the
            slice, the hidden layers are alike on all. See :mod:`lastlayer.train.sharded`.

    Example:
        >>> from lastlayer.train import LabelSetNetwork
        >>> logits, count = LabelSetNetwork(8, 3, hidden=(4,))(torch.zeros(2, 8))
        >>> logits.shape, count
        (torch.Size([2, 3]), None)
    """

    def __init__(
        self,
        n_features: int,
        n_labels: int,
        *,
        hidden: Sequence[int] = (),
        dropout: float = 0.0,
        sparse: bool = False,
        count_head: bool = False,
        shard: ClassShard | None = None,
    ) -> None:
        super().__init__()
        self.n_features, self.n_labels = n_features, n_labels
        self.sparse, self.count_head, self.shard = sparse, count_head, shard
        widths = [*hidden, n_labels + count_head]
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
        """The number of weights that such a network has, before it is made."""
        widths = [n_features, *hidden, n_labels]
        return sum(a * b + b for a, b in pairwise(widths))

    def _start(self, linear: bool) -> None:
        """A linear model starts at 0; a deeper one breaks symmetry at the scale of rows of unit length."""
        weight = self.first.weight
        assert isinstance(weight, Tensor)
        if linear:
            nn.init.zeros_(weight)
        else:
            nn.init.normal_(weight, std=0.3 if self.sparse else 1 / math.sqrt(self.n_features))

    def output_bias(self) -> nn.Parameter:
        """The biases of the outputs: one a label, then that of the count."""
        last = self.rest[-1].bias if len(self.rest) else self.bias
        assert isinstance(last, nn.Parameter)
        return last

    def class_dims(self) -> dict[str, int]:
        """The parameters with an entry for each label, and the dimension in which they have it."""
        last = len(self.rest) - 1
        if last < 0:
            return {"first.weight": 1 if self.sparse else 0, "bias": 0}
        return {f"rest.{last}.weight": 0, f"rest.{last}.bias": 0}

    def forward(self, rows: Input) -> tuple[Tensor, Tensor | None]:
        """Return logits ``(rows, n_labels)`` and expected counts ``(rows,)`` or None."""
        x = self.before_output(rows)
        if len(self.rest):
            x = self.rest[-1](x)
        if not self.count_head:
            return x, None
        # Strictly between 0 and n_labels, so that the projection always has a solution.
        return x[:, :-1], self.n_labels * x[:, -1].float().sigmoid()

    def before_output(self, rows: Input) -> Tensor:
        """Return the input of the output layer; of a linear model, its output."""
        if isinstance(rows, tuple):
            index, offsets, value = rows
            assert isinstance(self.first, nn.EmbeddingBag)
            weight, value = self.first.weight, value.to(self.first.weight.dtype)
            if weight.requires_grad and torch.is_grad_enabled() and weight.device.type == "cpu":
                x = _Bag.apply(weight, index, offsets, value)
            else:
                x = self.first(index, offsets, per_sample_weights=value)
        elif isinstance(self.first, nn.EmbeddingBag):
            x = rows @ self.first.weight
        else:
            x = self.first(rows)
        x = x + self.bias
        for i in range(len(self.rest)):
            x = self.dropout(x.relu())
            if i + 1 < len(self.rest):
                x = self.rest[i](x)
        return x


class _Bag(torch.autograd.Function):
    """The sum of weighted embeddings on the CPU.

    Its gradient is such a sum as well, over the rows of each feature in place of the features of each row. Autograd's
    own takes seven times as long: it neither orders the pairs by feature nor works on them in blocks.
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
