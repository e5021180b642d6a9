"""Linear models from the exact solver, as the networks that runs, prediction and export know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from lastlayer.data import LabelData
from lastlayer.train.config import Config
from lastlayer.train.linear import LinearWeights, SolverSettings, Weighting, fit_path
from lastlayer.train.network import LabelSetNetwork

SOLVED = {"squared_hinge": "squared_hinge", "binary": "logistic"}  # our name of a loss and the solver's


def usual_cost(x: Any) -> float:
    """Return the C at which a row of mean length weighs as one of length 1 does at C = 1."""
    values = x.data if hasattr(x, "tocsr") else x
    mean = float(np.square(values, dtype=np.float64).sum()) / max(x.shape[0], 1)
    return 1.0 / mean if mean > 0 else 1.0


def solve(
    x: Any,
    labels: LabelData,
    loss: str,
    costs: Sequence[float],
    config: Config,
    progress: Callable[[int, int], Any] | None = None,
) -> list[LinearWeights]:
    """Fit one classifier per label for each C, in increasing order.

    Args:
        x: Features, a float32 array or CSR matrix.
        labels: The labels of the rows, and their weights.
        loss: ``"squared_hinge"`` or ``"binary"``.
        costs: The values of C.
        config: The settings of the run: seed and class weights.
        progress: Called with the fits done and to be done.
    """
    counts, n = labels.label_counts().astype(np.float64), max(len(labels), 1)
    positive: Any = 1.0
    negative: Any = 1.0
    if config.label_weight == "balanced":
        positive, negative = (n / (2 * np.clip(part, 0.5, None)) for part in (counts, n - counts))
    settings = SolverSettings(loss=SOLVED[loss], seed=config.seed, threads=torch.get_num_threads())  # type: ignore[arg-type]
    weighting = Weighting(row=labels.weights, positive=positive, negative=negative)
    return fit_path(x, labels, sorted(costs), settings, weighting, progress=progress, op="train")


def as_network(weights: LinearWeights, sparse: bool) -> LabelSetNetwork:
    """Return the network that computes the scores of linear classifiers."""
    network = LabelSetNetwork(weights.n_features, weights.n_labels, sparse=sparse)
    weight = weights.matrix().T if sparse else weights.matrix()
    with torch.no_grad():
        network.first.weight.copy_(torch.from_numpy(weight.toarray()))  # type: ignore[operator, union-attr]
        network.bias.copy_(torch.from_numpy(weights.intercept))
    return network.eval()
