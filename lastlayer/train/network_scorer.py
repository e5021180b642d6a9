"""The kind of model ``network``: a :class:`~lastlayer.train.LabelSetNetwork` and its weights."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from lastlayer.runs import RunFolder
from lastlayer.runs.files import RunError, damaged
from lastlayer.train.batches import rows_to_input
from lastlayer.train.config import Config, ConfigError
from lastlayer.train.features import FeatureMap
from lastlayer.train.network import LabelSetNetwork
from lastlayer.train.placement import Placement
from lastlayer.train.serve import Scores


class NetworkScorer:
    """Scores all labels with a network.

    Args:
        network: The network.
        placement: Where its labels are.
    """

    def __init__(self, network: LabelSetNetwork, placement: Placement) -> None:
        self.network, self.placement = network, placement

    def scores(self, x: Any) -> Scores:
        """Return the logits of all labels."""
        rows: Any = rows_to_input(x, np.arange(x.shape[0]))
        device = self.network.bias.device
        rows = tuple(part.to(device) for part in rows) if isinstance(rows, tuple) else rows.to(device)
        self.network.eval()
        return Scores(self.network(rows))

    def to(self, device: str | torch.device) -> None:
        """Move the network to a device."""
        self.network.to(device)

    def save(self, run: RunFolder) -> None:
        """Write weights.safetensors."""
        run.write_tensors("weights.safetensors", self.placement.whole_weights(self.network))


def check_size(config: Config, features: FeatureMap, n_labels: int) -> None:
    """Refuse a network that is too large."""
    size = LabelSetNetwork.count_parameters(features.n_features, n_labels, config.hidden)
    if size > config.max_parameters:
        raise ConfigError(
            f"the network would have {size} parameters, `max_parameters` is {config.max_parameters}. Use fewer "
            "`n_features`, a hidden layer (`hidden: [256]`), or raise the bound."
        )


def build(config: Config, features: FeatureMap, n_labels: int, placement: Placement) -> LabelSetNetwork:
    """Make the network of a run, unless it is too large."""
    check_size(config, features, n_labels if placement.shard is None else placement.shard.size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        if features.encoder is not None:
            from lastlayer.train.encode.network import EncodedNetwork

            return EncodedNetwork(features.encoder, n_labels, hidden=config.hidden, dropout=config.dropout)
        return LabelSetNetwork(
            features.n_features,
            n_labels,
            hidden=config.hidden,
            dropout=config.dropout,
            sparse=features.is_sparse,
            shard=placement.shard,
        )


def scorer_of(network: LabelSetNetwork, config: Config, placement: Placement) -> NetworkScorer:
    """Return the scorer of a network that was trained."""
    if network.encoder is None:
        return NetworkScorer(network, placement)
    from lastlayer.train.encode.network import EncodedNetwork
    from lastlayer.train.encode.scorer import EncodedScorer

    assert isinstance(network, EncodedNetwork)
    return EncodedScorer(network, placement, config.precision)


def load(run: RunFolder, config: Config, features: FeatureMap, n_labels: int, placement: Placement) -> NetworkScorer:
    """Load the network of a finished run."""
    network = build(config, features, n_labels, placement)
    weights = placement.read_weights(run, network)
    path = run / "weights.safetensors"
    try:
        network.load_state_dict(weights)
    except RuntimeError:
        raise damaged(path, "its shapes do not fit the config") from None
    if not all(math.isfinite(float(w.sum())) for w in weights.values()):
        raise RunError(f"{path}: holds numbers that are not finite.")
    network.eval()
    return NetworkScorer(network, placement)
