"""The kind of model ``encoder``: an encoder that was trained together with the labels."""

from __future__ import annotations

import math
import shutil
from typing import Any

from lastlayer.runs import RunFolder
from lastlayer.runs.files import RunError, damaged
from lastlayer.train.config import Config
from lastlayer.train.encode.encoder import device_of, encode
from lastlayer.train.encode.maps import EncoderRows
from lastlayer.train.encode.network import EncodedNetwork
from lastlayer.train.features import FeatureMap
from lastlayer.train.network_scorer import NetworkScorer, build
from lastlayer.train.placement import Placement
from lastlayer.train.serve import Scores

FOLDER = "encoder"


class EncodedScorer(NetworkScorer):
    """Scores all labels with an encoder and the network on top of it.

    Args:
        network: The network.
        placement: Where its labels are.
        precision: That of the run, which a GPU takes.
    """

    network: EncodedNetwork

    def __init__(self, network: EncodedNetwork, placement: Placement, precision: str = "32") -> None:
        super().__init__(network, placement)
        self.precision = precision

    def scores(self, x: Any) -> Scores:
        """Return the logits of all labels."""
        self.network.eval()
        found = encode(self.network.encoder, x, precision=self.precision)
        return Scores(self.network.from_features(found.to(device_of(self.network))))

    def save(self, run: RunFolder) -> None:
        """Write the folder ``encoder``, and weights.safetensors with what is on top of it."""
        new = run / f".{FOLDER}.tmp"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        self.network.encoder.save(new)
        shutil.rmtree(run / FOLDER, ignore_errors=True)
        new.rename(run / FOLDER)
        run.write_tensors("weights.safetensors", self.network.head_weights())


def load(run: RunFolder, config: Config, features: FeatureMap, n_labels: int, placement: Placement) -> EncodedScorer:
    """Load the network of a finished run."""
    assert isinstance(features, EncoderRows)
    network = build(config, features, n_labels, placement)
    assert isinstance(network, EncodedNetwork)
    weights, path = run.read_tensors("weights.safetensors"), run / "weights.safetensors"
    try:
        found = network.load_state_dict(weights, strict=False)
    except RuntimeError:
        raise damaged(path, "its shapes do not fit the config") from None
    if found.unexpected_keys or any(not name.startswith("encoder.") for name in found.missing_keys):
        raise damaged(path, "its names do not fit the config")
    if not all(math.isfinite(float(w.sum())) for w in network.state_dict().values()):
        raise RunError(f"{run.path}: holds weights that are not finite.")
    network.eval()
    return EncodedScorer(network, placement, config.precision)
