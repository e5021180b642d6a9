"""Continue training: a run that starts at the weights of a finished one, on new rows and with labels added."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lastlayer.data import LabelData
from lastlayer.runs import RunError
from lastlayer.runs.folder import finished
from lastlayer.train.config import Config, ConfigError
from lastlayer.train.losses import LOSSES
from lastlayer.train.network import LabelSetNetwork
from lastlayer.train.serve import TrainedModel, load

# What belongs to the exact solver and to label trees, which start anew each time.
_FRESH = {"solver": "sgd", "tree": "off", "hierarchy": "", "C": "auto", "refit": "auto", "label_weight": "none"}


def settings(run: str | Path) -> dict[str, Any]:
    """Return the settings of a run as those of a continuation: its loss as it was chosen, by minibatches."""
    folder = finished(run)
    values, resolved = dict(folder.config()), folder.read_json("data.json").get("resolved") or {}
    loss = str(resolved.get("loss") or values.get("loss") or "lml")
    if loss in LOSSES and LOSSES[loss].exact == "only":
        loss = "binary"  # minibatches do not have it
    return {**values, **_FRESH, "loss": loss}


def opened(run: str | Path, config: Config) -> TrainedModel:
    """Load the run to start from, and check that the settings can go on with it."""
    model = load(run)
    network = getattr(model.scorer, "network", None)
    if not isinstance(network, LabelSetNetwork) or network.encoder is not None or model.config.encoder:
        trained = network is not None and getattr(network, "encoder", None) is not None
        advice = f"Train with --encoder {run}/encoder instead: it is the trained one." if trained else "Train it anew."
        raise RunError(f"{run}: must be a linear model or a network without an encoder to continue. {advice}")
    if config.hidden != model.config.hidden or config.encoder:
        raise ConfigError(
            f"`hidden` must be that of the run to continue, {list(model.config.hidden)}, got {list(config.hidden)}."
        )
    if config.minibatches() is None:
        raise ConfigError("`solver` must be sgd to continue a run, since the exact solver starts anew.")
    return model


def with_labels(parts: dict[str, LabelData], before: TrainedModel) -> dict[str, LabelData]:
    """Return the rows with the labels of the run first, then those that are new."""
    known = set(before.labels)
    names = [*before.labels, *(name for name in parts["train"].label_names if name not in known)]
    return {name: data.with_labels(names)[0] for name, data in parts.items()}


def take_over(network: LabelSetNetwork, before: LabelSetNetwork) -> None:
    """Copy the weights of a network; labels that it does not have keep their own."""
    dims, old = network.class_dims(), dict(before.named_parameters())
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            dim = dims.get(name)
            place = parameter if dim is None else parameter.narrow(dim, 0, old[name].shape[dim])
            place.copy_(old[name])
