"""A linear layer whose classes are split over processes."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lastlayer._check import Target
from lastlayer.loss.linear import linear_lml_loss
from lastlayer.shard import ClassShard, spread, wrap_rows


class ShardedLinear(nn.Module):
    """A linear layer whose classes are split over processes: each holds its rows of the weight.

    Every rank passes the same features and gets the logits of its own classes; the gradients of the features are added
    up over the ranks. :meth:`loss` never holds the logits. If all ranks have the same seed, the initial values of a
    class depend only on the seed and the class, not on the split.

    Args:
        in_features: The size of a feature vector.
        n_classes: The number of classes of all ranks together.
        bias: Whether there is a bias.
        shard: This rank's slice; ``None`` holds all classes. See :meth:`ClassShard.split`.
        device: The device of the parameters.
        dtype: The dtype of the parameters.

    Example:
        >>> layer = ShardedLinear(8, 100)
        >>> features = torch.randn(4, 8)
        >>> layer(features).shape
        torch.Size([4, 100])
        >>> layer.loss(features, torch.tensor([3, 1, 4, 1]), k=5).backward()
    """

    _init_block = 4096  # classes that share a random state

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        *,
        bias: bool = True,
        shard: ClassShard | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if shard is not None and shard.stop > n_classes:
            raise ValueError(
                f"ShardedLinear: `shard` must end at n_classes={n_classes} or before, got {shard.stop}. "
                "Use ClassShard.split(n_classes)."
            )
        self.in_features, self.n_classes, self.shard = in_features, n_classes, shard
        rows = n_classes if shard is None else shard.size
        self.weight = nn.Parameter(torch.empty(rows, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial values of nn.Linear, which are the same for every split of the classes."""
        seed = int(torch.randint(2**62, ()))  # one draw from the caller's random state, on every rank
        start = 0 if self.shard is None else self.shard.start
        stop = start + self.weight.shape[0]
        bound = 1 / math.sqrt(max(self.in_features, 1))
        with torch.no_grad():
            for first in range(start // self._init_block * self._init_block, stop, self._init_block):
                generator = torch.Generator().manual_seed((seed + first) % 2**62)
                values = torch.rand(self._init_block, self.in_features + 1, generator=generator)
                low, high = max(first, start), min(first + self._init_block, stop)
                values = ((2 * values - 1) * bound)[low - first : high - first]
                self.weight[low - start : high - start] = values[:, :-1].to(self.weight)
                if self.bias is not None:
                    self.bias[low - start : high - start] = values[:, -1].to(self.bias)

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits of this rank's classes, shape ``(*batch, local classes)``."""
        return F.linear(spread(features, self.shard), self.weight, self.bias)

    def loss(self, features: Tensor, target: Target, k: float | Tensor, **options: Any) -> Tensor:
        """Return :func:`linear_lml_loss` of this layer, the same number on every rank; see there for the options."""
        return linear_lml_loss(features, self.weight, target, k, bias=self.bias, shard=self.shard, **options)

    def sharded_state(self) -> dict[str, Tensor]:
        """Return the parameters for torch.distributed.checkpoint, which loads into them in place.

        Any number of ranks can load what four have saved:
        ``dcp.save({"head": layer.sharded_state()}, checkpoint_id=path)``.
        """
        state = {"weight": self.weight.detach()}
        if self.bias is not None:
            state["bias"] = self.bias.detach()
        return {name: wrap_rows(value, self.n_classes, self.shard) for name, value in state.items()}

    def extra_repr(self) -> str:
        """Return what the representation shows in brackets."""
        held = "" if self.shard is None else f", classes {self.shard.start} to {self.shard.stop}"
        return f"in_features={self.in_features}, n_classes={self.n_classes}, bias={self.bias is not None}{held}"
