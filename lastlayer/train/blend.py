"""Candidates of a linear model, and blends of them: linear models whose outputs are added are one linear model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from lastlayer.train.batches import rows_to_input
from lastlayer.train.exact import SOLVED
from lastlayer.train.network import LabelSetNetwork


class Candidate(NamedTuple):
    """A loss, and the C of the exact solution: its own, or the one that minibatches start from, 0 for none."""

    loss: str
    C: float
    thinned: bool = False

    @property
    def exact(self) -> bool:
        """Whether the exact solver fits it."""
        return self.loss in SOLVED

    @property
    def name(self) -> str:
        """The loss, without C."""
        return f"{self.loss}, thinned" if self.thinned else self.loss

    def words(self) -> str:
        """Return it in a few words."""
        return f"{self.name} (C {self.C:.3g})" if self.exact else self.name


class Blend(NamedTuple):
    """Candidates whose outputs are added.

    Args:
        parts: The candidates; the first is the one that the others were added to.
        scales: What the outputs of each are multiplied by, so that they are comparable.
    """

    parts: tuple[Candidate, ...]
    scales: tuple[float, ...] = (1.0,)

    def words(self) -> str:
        """Return it in a few words."""
        return " + ".join(part.words() for part in self.parts)

    def names(self) -> str:
        """Return the losses."""
        return " + ".join(part.name for part in self.parts)

    def add(self, part: Candidate, scale: float) -> Blend:
        """Return the blend with one more candidate."""
        return Blend((*self.parts, part), (*self.scales, scale))

    def times(self, factor: float) -> Blend:
        """Return the blend with its outputs multiplied by a factor."""
        return Blend(self.parts, tuple(factor * scale for scale in self.scales))


def added(networks: Sequence[LabelSetNetwork], scales: Sequence[float]) -> LabelSetNetwork:
    """Return the linear network whose outputs are those of some networks, multiplied by the scales and added."""
    first = networks[0]
    if tuple(scales) == (1.0,):
        return first
    network = LabelSetNetwork(first.n_features, first.n_labels, sparse=first.sparse)
    states = [one.state_dict() for one in networks]
    total = {name: sum(scale * state[name] for scale, state in zip(scales, states, strict=True)) for name in states[0]}
    network.load_state_dict(total)
    return network.eval()


def outputs(network: LabelSetNetwork, x: Any, size: int = 512) -> np.ndarray:
    """Return the outputs of a network for rows, ``(rows, n_labels)`` float32."""
    out = np.empty((x.shape[0], network.n_labels), np.float32)
    with torch.inference_mode():
        for at in range(0, x.shape[0], size):
            rows = rows_to_input(x, np.arange(at, min(at + size, x.shape[0])))
            out[at : at + size] = network(rows).float().numpy()
    return out
