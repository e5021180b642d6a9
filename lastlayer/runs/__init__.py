"""Run folders: what a training run leaves behind, in files that are safe to open.

Training writes them, the report and :func:`lastlayer.load` read them. Importing this package imports nothing heavy; a
name is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lastlayer.runs.contents import Held as Held
    from lastlayer.runs.contents import Run as Run
    from lastlayer.runs.contents import read as read
    from lastlayer.runs.files import RunError as RunError
    from lastlayer.runs.files import write_atomically as write_atomically
    from lastlayer.runs.folder import RunFolder as RunFolder

_PLACES = {
    "Held": "contents",
    "Run": "contents",
    "RunError": "files",
    "RunFolder": "folder",
    "read": "contents",
    "write_atomically": "files",
}
__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
