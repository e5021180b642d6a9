"""The whole content of finished runs in memory, checked: what a report is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lastlayer.runs.files import RunError, damaged
from lastlayer.runs.folder import RunFolder, no_folder
from lastlayer.runs.rows import hits


@dataclass(frozen=True)
class Held:
    """The held-out rows: true labels as a ragged list, the best labels of each row, and all probabilities if stored."""

    indptr: np.ndarray  # (n + 1,)
    index: np.ndarray
    top_index: np.ndarray  # (n, m)
    top_probability: np.ndarray  # (n, m)
    size: np.ndarray  # (n,), the size of the predicted label set, as far as it is among the best labels
    probability: np.ndarray | None  # (n, n_labels)
    chosen: np.ndarray | None = None  # (n, m), which of the best labels are the set; None: the first `size`
    weight: np.ndarray | None = None  # (n,), how much each row counts; None: all the same

    @classmethod
    def of(cls, arrays: dict[str, np.ndarray]) -> Held:
        """Make it from the arrays of :meth:`RunFolder.predictions`."""
        top, k, sure = arrays["top_index"], arrays["k"], np.nan_to_num(arrays["top_probability"])
        if "set_index" in arrays:  # thresholds per label may take a label and leave out a more probable one
            chosen = hits(top, arrays["set_indptr"], arrays["set_index"])
            size = chosen.sum(1)
        else:  # a run of an earlier version
            size = np.clip(np.rint(np.nan_to_num(k, nan=1.0)), 1, max(top.shape[1], 1)).astype(np.int64)
            chosen, size = None, np.minimum(size, top.shape[1])
        whole, weight = arrays.get("probability"), arrays.get("weight")
        return cls(arrays["target_indptr"], arrays["target_index"], top, sure, size, whole, chosen, weight)

    @cached_property
    def inside(self) -> np.ndarray:
        """Which of the best labels are the predicted label set, ``(n, m)``."""
        if self.chosen is not None:
            return self.chosen
        inside: np.ndarray = np.arange(self.top_index.shape[1]) < self.size[:, None]
        return inside

    @cached_property
    def order(self) -> np.ndarray | None:
        """The places of the best labels with those of the set first, ``(n, m)``; None if they are in that order."""
        if bool((self.inside[:, 1:] <= self.inside[:, :-1]).all()):
            return None
        return np.argsort(~self.inside, axis=1, kind="stable")

    def __len__(self) -> int:
        return len(self.size)

    @cached_property
    def hits(self) -> np.ndarray:
        """Whether each of the best labels is a true one, ``(n, m)``."""
        return hits(self.top_index, self.indptr, self.index)

    def listed(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the best labels of a row and their probabilities, those of its predicted label set first."""
        at = slice(None) if self.order is None else self.order[row]
        return self.top_index[row, at], self.top_probability[row, at]

    def taken(self) -> np.ndarray:
        """Return the predicted label sets as index lists padded with -1."""
        most = int(self.size.max(initial=0))
        top = self.top_index if self.order is None else np.take_along_axis(self.top_index, self.order, 1)
        return np.where(np.arange(most) < self.size[:, None], top[:, :most], -1)


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
    suggestions: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, Any] = field(default_factory=dict)

    def parts(self) -> dict[str, Any]:
        """Return what data.json tells about the parts; empty if it tells nothing."""
        parts = self.data.get("parts")
        return parts if isinstance(parts, dict) else {}


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
        raise no_folder(folder)
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
        suggestions=_suggestions(run),
        reasons=_reasons(run),
    )


def _suggestions(run: RunFolder) -> dict[str, Any]:
    """Return what ``lastlayer suggest`` stored, or an empty dictionary."""
    found = run.read_optional("suggestions.json")
    kinds = {"items": list, "names": list, "texts": dict, "rates": list, "file": dict}
    if found and not all(isinstance(found.get(key), kind) for key, kind in kinds.items()):
        raise damaged(run / "suggestions.json", "must hold items, names, texts, rates and file")
    return found


def _reasons(run: RunFolder) -> dict[str, Any]:
    """Return why rows get their labels, or an empty dictionary."""
    found = run.read_optional("reasons.json")
    if not found:
        return {}
    labels = [*found.get("rows", {}).values()] if isinstance(found.get("rows"), dict) else [None]
    if not all(isinstance(one, dict) and all(map(_is_reason, one.values())) for one in [*labels, found.get("labels")]):
        raise damaged(run / "reasons.json", "must hold rows and labels with features for and against")
    return found


def _is_reason(value: Any) -> bool:
    """Whether it is two lists of pairs of a name and a number."""
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(some, list) for some in value)
        and all(
            isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], int | float)
            for some in value
            for pair in some
        )
    )
