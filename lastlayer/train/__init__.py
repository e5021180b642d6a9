"""Training on label sets: the Lightning module and data, checkpoints, the scikit-learn estimator.

Importing this package imports nothing heavy; a name is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

_PLACES = {
    "Config": "lastlayer.train.config",
    "ConfigError": "lastlayer.train.config",
    "FeatureMap": "lastlayer.train.features",
    "LabelSetClassifier": "lastlayer.train.estimator",
    "LabelSetData": "lastlayer.train.module",
    "LabelSetModule": "lastlayer.train.module",
    "LabelSetNetwork": "lastlayer.train.network",
    "RunError": "lastlayer.runs.files",
    "RunFolder": "lastlayer.runs.folder",
    "SafeCheckpointIO": "lastlayer.train.checkpoint_io",
    "TrainedModel": "lastlayer.train.serve",
    "TrainingError": "lastlayer.train.module",
    "evaluate": "lastlayer.train.measure",
    "load": "lastlayer.train.serve",
    "train": "lastlayer.train.engine",
}
__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
