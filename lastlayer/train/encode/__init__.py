"""Encoders: networks that turn texts or images into features, trained together with the labels or frozen.

An :class:`Encoder` is all that training knows of such a network. ``source`` finds and checks the files of a pretrained
model, ``text`` and ``image`` make encoders of them, ``network`` puts a model of the labels on top, ``frozen`` computes
features once, and ``scorer`` writes and reads finished runs.

Importing this package imports nothing heavy; a name is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

_PLACES = {"Encoder": "encoder", "open_encoder": "source"}
__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
