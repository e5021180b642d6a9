"""Train on label sets: Lightning module and data, run folders, checkpoints, the scikit-learn estimator.

Importing this package imports nothing heavy; the names are found when they are asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

_PLACES = {
    "Config": "config",
    "ConfigError": "config",
    "FeatureMap": "features",
    "LabelSetClassifier": "estimator",
    "LabelSetData": "module",
    "LabelSetModule": "module",
    "LabelSetNetwork": "network",
    "RunError": "run_folder",
    "RunFolder": "run_folder",
    "SafeCheckpointIO": "checkpoint",
    "evaluate": "measure",
    "train": "engine",
}
__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
