r"""SGD with momentum for wide linear models on sparse rows, which touches the features of each batch alone.

Most features are in no row of a batch. Their gradient is 0, and a step is linear in their momentum :math:`v` and weight
:math:`w`: with the momentum :math:`\mu`, the weight decay :math:`\lambda` and the rate :math:`\eta`,

.. math:: v \leftarrow \mu v + \lambda w, \qquad w \leftarrow w - \eta v .

The product of these 2 x 2 matrices since any earlier step is kept. A feature is brought up to date when a batch has it,
and all of them at the end. The weights are those of :class:`torch.optim.SGD` but for rounding.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from lastlayer.train.network import LabelSetNetwork, bag

STEPS = 2048  # after which all features are brought up to date, so that the products do not become many
SHARE = 0.3  # of the features that the pairs of a batch may be at most for this to be worthwhile


def worthwhile(network: LabelSetNetwork, optimizer: torch.optim.Optimizer, pairs: float) -> bool:
    """Whether batches with so many pairs of row and feature leave most features out.

    Args:
        network: The network; only linear models on sparse rows qualify.
        optimizer: Its optimiser; only SGD qualifies.
        pairs: The number of stored features of a batch.
    """
    linear = network.sparse and not len(network.rest) and network.encoder is None
    return linear and isinstance(optimizer, torch.optim.SGD) and pairs <= SHARE * network.n_features


class LazyRows:
    """The weights of a linear model by feature, each as of the last step that touched it.

    Args:
        network: The network, whose weights are changed.
        optimizer: Its optimiser, which holds the momentum and is used for the biases alone.
    """

    def __init__(self, network: LabelSetNetwork, optimizer: torch.optim.Optimizer) -> None:
        assert isinstance(network.first, nn.EmbeddingBag)
        self.network, self.optimizer, self.parameter = network, optimizer, network.first.weight
        self.weight = self.parameter.detach()
        (self.group,) = (g for g in optimizer.param_groups if any(p is self.parameter for p in g["params"]))
        known = optimizer.state[self.parameter].get("momentum_buffer")
        self.momentum = torch.zeros_like(self.weight) if known is None else known
        self.last = torch.zeros(len(self.weight), dtype=torch.long)
        self.since = np.eye(2)[None]  # for each earlier step, what has happened to an untouched feature since then
        self.touched = torch.empty(0, dtype=torch.long)
        self.local, self.pushed = torch.empty(0), torch.empty(0)
        self.room = [self.weight.new_empty((0, self.weight.shape[1]))] * 2

    def logits(self, rows: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Return the logits of a batch; the gradient of its features' weights is kept for `step`."""
        index, offsets, value = rows
        self.touched, place = index.unique(return_inverse=True)
        if len(self.touched) > len(self.room[0]):  # memory that is used again, since new pages cost more than the sums
            self.room = [self.weight.new_empty((len(self.touched) * 9 // 8, self.weight.shape[1])) for _ in "vw"]
        self.local, self.pushed = self._now(self.touched, *(one[: len(self.touched)] for one in self.room))
        return bag(self.local.requires_grad_(), place, offsets, value.to(self.weight.dtype)) + self.network.bias

    def step(self) -> None:
        """Take a step: the features of the batch, the biases, and what the step does to every other feature."""
        rate, decay, mu = (float(self.group[name]) for name in ("lr", "weight_decay", "momentum"))
        weight, momentum, gradient = self.local.detach(), self.pushed, self.local.grad
        assert gradient is not None
        momentum.mul_(mu).add_(gradient).add_(weight, alpha=decay)
        self.momentum.index_copy_(0, self.touched, momentum)
        self.weight.index_copy_(0, self.touched, weight.add_(momentum, alpha=-rate))
        matrix = np.array([[mu, decay], [-rate * mu, 1 - rate * decay]])
        self.since = np.concatenate([matrix @ self.since, np.eye(2)[None]])
        self.last[self.touched] = len(self.since) - 1
        self.optimizer.step()  # the biases; the matrix has no gradient
        if len(self.since) > STEPS:
            self._bring()

    def finish(self) -> None:
        """Bring every feature up to date, and give the momentum to the optimiser."""
        self._bring()
        self.optimizer.state[self.parameter]["momentum_buffer"] = self.momentum

    def _now(self, rows: Tensor, momentum: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the momentum of features as they are now, which are then in the room given."""
        torch.index_select(self.momentum, 0, rows, out=momentum)
        torch.index_select(self.weight, 0, rows, out=weight)
        product = torch.from_numpy(self.since).to(self.weight.dtype)[self.last[rows]].unsqueeze(-1)
        now = (weight * product[:, 1, 1]).addcmul_(momentum, product[:, 1, 0])
        return now, momentum.mul_(product[:, 0, 0]).addcmul_(weight, product[:, 0, 1])

    def _bring(self) -> None:
        """Bring every feature up to date."""
        for rows in torch.arange(len(self.weight)).split(4096):
            room = self.weight.new_empty((2, len(rows), self.weight.shape[1]))
            self.weight[rows], self.momentum[rows] = self._now(rows, room[0], room[1])
        self.since, self.last = self.since[-1:], torch.zeros_like(self.last)
