"""The whole content of finished runs in memory, checked: what a report is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lastlayer.runs.files import RunError
from lastlayer.runs.folder import RunFolder
from lastlayer.runs.rows import hits


@dataclass(frozen=True)
class Held:
    """The held-out rows: true labels as a ragged list, the best labels of each row, and all probabilities if stored."""

    indptr: np.ndarray  # (n + 1,)
    index: np.ndarray
    top_index: np.ndarray  # (n, m)
    top_probability: np.ndarray  # (n, m)
    size: np.ndarray  # (n,), the size of the predicted label set
    probability: np.ndarray | None  # (n, n_labels)

    @classmethod
    def of(cls, arrays: dict[str, np.ndarray]) -> Held:
        """Make it from the arrays of :meth:`RunFolder.predictions`."""
        top, k = arrays["top_index"], arrays["k"]
        size = np.clip(np.rint(np.nan_to_num(k, nan=1.0)), 1, max(top.shape[1], 1)).astype(np.int64)
        return cls(
            arrays["target_indptr"],
            arrays["target_index"],
            top,
            np.nan_to_num(arrays["top_probability"]),
            np.minimum(size, top.shape[1]),
            arrays.get("probability"),
        )

    def __len__(self) -> int:
        return len(self.size)

    @cached_property
    def hits(self) -> np.ndarray:
        """Whether each of the best labels is a true one, ``(n, m)``."""
        return hits(self.top_index, self.indptr, self.index)

    def taken(self) -> np.ndarray:
        """The predicted label sets as index lists padded with -1."""
        most = int(self.size.max(initial=0))
        return np.where(np.arange(most) < self.size[:, None], self.top_index[:, :most], -1)


@dataclass(frozen=True)
class Run:
    """The content of a run folder; a part that is not there is empty or None."""

    name: str
    labels: list[str]
    train_counts: list[int]
    metrics: dict[str, Any]
    held: Held | None
    history: list[dict[str, float | None]]
    examples: list[dict[str, Any]]
    errors: dict[str, Any] | None
    data: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


def read(paths: Sequence[str | Path]) -> list[Run]:
    """Read run folders; each gets a distinct name."""
    if isinstance(paths, str | Path):
        paths = [paths]
    if not paths:
        raise RunError("report: `run_dirs` must name at least one run folder, got none.")
    folders = [Path(p) for p in paths]
    return [_read(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]


def _names(folders: list[Path]) -> list[str]:
    """The last component of each path, with as many components before it as make the names distinct."""
    parts = [folder.resolve().parts for folder in folders]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    seen: dict[str, int] = {}
    out = []
    for folder in folders:  # the same run is given twice
        seen[folder.name] = seen.get(folder.name, 0) + 1
        out.append(folder.name if seen[folder.name] == 1 else f"{folder.name} ({seen[folder.name]})")
    return out


def _read(folder: Path, name: str) -> Run:
    if not folder.is_dir():
        raise RunError(f"{folder}: must be the folder of a finished run, and is not there. Run `lastlayer train`.")
    run = RunFolder(folder)
    return Run(
        name=name,
        labels=run.labels(),
        train_counts=run.train_counts(),
        metrics=run.metrics(),
        held=Held.of(run.predictions()) if (run / "predictions.safetensors").exists() else None,
        history=run.history(),
        examples=run.examples(),
        errors=run.errors(),
        data=run.read_optional("data.json"),
        environment=run.read_optional("environment.json"),
        config=run.config(),
    )
