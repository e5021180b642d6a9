"""Read run folders: JSON, CSV, YAML and safetensors, checked before a number of them is used."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = 1


class ReportError(ValueError):
    """A run folder that no report can be made of: one line that says which file, and why."""


@dataclass(frozen=True)
class Held:
    """The held-out rows: true labels as a ragged list, the best labels of each row, and all probabilities if stored."""

    indptr: np.ndarray  # (n + 1,)
    index: np.ndarray
    top_index: np.ndarray  # (n, m)
    top_probability: np.ndarray  # (n, m)
    size: np.ndarray  # (n,), how many labels are put out
    probability: np.ndarray | None  # (n, n_labels)

    def __len__(self) -> int:
        return len(self.size)

    @cached_property
    def hits(self) -> np.ndarray:
        """Whether each of the best labels is a true one, ``(n, m)``."""
        wide = int(max(self.top_index.max(initial=0), self.index.max(initial=0))) + 1
        row = np.arange(len(self))
        true = np.repeat(row, np.diff(self.indptr)) * wide + self.index
        return np.isin(row[:, None] * wide + self.top_index, true)

    def taken(self) -> np.ndarray:
        """The labels put out as index lists padded with -1."""
        most = int(self.size.max(initial=0))
        return np.where(np.arange(most) < self.size[:, None], self.top_index[:, :most], -1)


@dataclass(frozen=True)
class Run:
    """What a run folder says; what it does not is empty or None."""

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
    """Read run folders; each has a name of its own."""
    if isinstance(paths, str | Path):
        paths = [paths]
    if not paths:
        raise ReportError("report: `run_dirs` must name at least one run folder, got none.")
    folders = [Path(p) for p in paths]
    return [_read(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]


def _names(folders: list[Path]) -> list[str]:
    """The last part of each path, as much of the path before it as tells them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    seen: dict[str, int] = {}
    out = []
    for folder in folders:  # one run given twice
        seen[folder.name] = seen.get(folder.name, 0) + 1
        out.append(folder.name if seen[folder.name] == 1 else f"{folder.name} ({seen[folder.name]})")
    return out


def _read(folder: Path, name: str) -> Run:
    if not folder.is_dir():
        raise ReportError(f"{folder}: must be the folder of a finished run, and is not there. Run `lastlayer train`.")
    labels = _required(folder / "labels.json")
    names = labels.get("names")
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise _damaged(folder / "labels.json", "must hold a list of names")
    counts = labels.get("train_counts", [])
    if not _numbers(counts) or len(counts) not in (0, len(names)):
        raise _damaged(folder / "labels.json", "`train_counts` must hold one number a label")
    metrics = _metrics(folder / "metrics.json", len(names))
    return Run(
        name=name,
        labels=names,
        train_counts=counts,
        metrics=metrics,
        held=_held(folder / "predictions.safetensors", len(names)),
        history=_history(folder / "history.csv"),
        examples=_examples(folder / "examples.json"),
        errors=_errors(folder / "errors.json"),
        data=_optional(folder / "data.json") or {},
        environment=_optional(folder / "environment.json") or {},
        config=_config(folder / "config.yaml"),
    )


def _damaged(path: Path, why: object) -> ReportError:
    return ReportError(f"{path}: damaged: {' '.join(str(why).split())[:200]}.")


def _optional(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, error) from None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise _damaged(path, f"must be an object of format {FORMAT}")
    return value


def _required(path: Path) -> dict[str, Any]:
    value = _optional(path)
    if value is None:
        raise ReportError(f"{path}: not there. Is {path.parent} a finished run of `lastlayer train`?")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(values: Any) -> bool:
    return isinstance(values, list) and all(v is None or _is_number(v) for v in values)


def _metrics(path: Path, n_labels: int) -> dict[str, Any]:
    found = _required(path)
    metrics = found.get("metrics")
    if not isinstance(metrics, dict) or not all(isinstance(m, dict) for m in metrics.values()):
        raise _damaged(path, "`metrics` must be an object of {value, low, high}")
    for name, metric in metrics.items():
        if not all(metric.get(key) is None or _is_number(metric[key]) for key in ("value", "low", "high")):
            raise _damaged(path, f"`{name}` must hold numbers or null")
    for key, values in (found.get("labels") or {}).items():
        if not _numbers(values) or len(values) != n_labels:
            raise _damaged(path, f"`labels.{key}` must hold one number a label ({n_labels})")
    if not _is_number(found.get("rows", 0)):
        raise _damaged(path, "`rows` must be a number")
    return found


def _held(path: Path, n_labels: int) -> Held | None:
    if not path.exists():
        return None
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        found = load_file(path)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise _damaged(path, error) from None
    needed = ("target_indptr", "target_index", "top_index", "top_probability", "k")
    if missing := [name for name in needed if name not in found]:
        raise _damaged(path, f"must hold {', '.join(missing)}")
    indptr, index, top, probability, k = (found[name] for name in needed)
    n, whole = len(k), found.get("probability")
    fits = top.ndim == 2 and top.shape == probability.shape and len(top) == n and indptr.shape == (n + 1,)
    if not fits or (whole is not None and whole.shape != (n, n_labels)):
        raise _damaged(path, "the shapes must agree in the number of rows and labels")
    if indptr[0] != 0 or indptr[-1] != len(index) or (np.diff(indptr) < 0).any():
        raise _damaged(path, "`target_indptr` must grow from 0 to the number of true labels")
    for name in ("target_index", "top_index"):
        if ((found[name] < 0) | (found[name] >= n_labels)).any():
            raise _damaged(path, f"`{name}` must be between 0 and {n_labels - 1}")
    size = np.clip(np.rint(np.nan_to_num(k, nan=1.0)), 1, max(top.shape[1], 1)).astype(np.int64)
    return Held(indptr, index, top, np.nan_to_num(probability), np.minimum(size, top.shape[1]), whole)


def _history(path: Path) -> list[dict[str, float | None]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [{k: _cell(v) for k, v in row.items() if k} for row in csv.DictReader(file)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, csv.Error) as error:
        raise _damaged(path, error) from None
    return rows


def _cell(text: str | None) -> float | None:
    value = float(text) if text else math.nan
    return value if math.isfinite(value) else None


def _examples(path: Path) -> list[dict[str, Any]]:
    rows = (_optional(path) or {"rows": []}).get("rows")
    if not isinstance(rows, list) or not all(isinstance(r, dict) and isinstance(r.get("row"), int) for r in rows):
        raise _damaged(path, "`rows` must be a list of {row, id, text}")
    return rows


def _errors(path: Path) -> dict[str, Any] | None:
    found = _optional(path)
    needed = ("metric", "value", "n_false_alarms", "n_misses", "kinds", "oracles", "confusions", "cooccurrence")
    if found is not None and (missing := [name for name in needed if name not in found]):
        raise _damaged(path, f"must hold {', '.join(missing)}, as LabelSetErrors.to_dict() does")
    return found


def _config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    import yaml

    try:
        value = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise _damaged(path, error) from None
    if not isinstance(value, dict):
        raise _damaged(path, "must be a mapping of fields")
    return {str(k): v for k, v in value.items()}
