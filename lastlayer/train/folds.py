"""Cross-validation: a run for each fold beside the run itself, means and spreads, and out-of-fold probabilities.

The run folder then holds ``folds/1``, ``folds/2``, ... (a run each, measured on the rows of its fold), ``folds.json``
and ``out_of_fold.safetensors``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lastlayer.data import LabelData, fold_rows
from lastlayer.runs import RunError, RunFolder
from lastlayer.train import card
from lastlayer.train.config import Config, ConfigError, make
from lastlayer.train.engine import train
from lastlayer.train.serve import load
from lastlayer.train.suggest import Collector

FILE = "folds.json"


def train_with_folds(
    parts: dict[str, LabelData],
    config: Config,
    out: str | Path,
    folds: int,
    *,
    path: str | None = None,
    tell: Callable[[str], None] = lambda line: None,
    **options: Any,
) -> RunFolder:
    """Train a run, then one more for each fold of the rows that are not test rows.

    A call that was stopped goes on where it was: finished folds are kept if their rows and settings are the same.

    Args:
        parts: Rows by part, as for :func:`lastlayer.train.train`.
        config: The settings of all runs.
        out: The run folder.
        folds: The number of folds, at least 2.
        path: The file of the rows, to note it.
        tell: Called with a line at the start of each fold.
        **options: Those of :func:`lastlayer.train.train`.

    Returns:
        The run folder.
    """
    rows = parts.get("all", parts.get("train"))
    if rows is None or not 2 <= folds <= len(rows):
        most = 0 if rows is None else len(rows)
        raise ConfigError(f"`folds` must be from 2 to the number of rows, {most}, got {folds}.")
    if options.get("shard_classes") or config.devices > 1:
        raise ConfigError("`folds` must be left out with --shard-classes and with several devices.")
    place = fold_rows(rows, folds, seed=config.seed)
    run, read = RunFolder(out), {name: data.fingerprint() for name, data in parts.items()}
    if options.get("overwrite") or (run / FILE).exists() or not _is_same(run, config, read):
        run = train(parts, config, out, **options)
    measured, collected = [], Collector(len(rows), rows.n_labels)
    for i in range(folds):
        tell(f"fold {i + 1} of {folds}")
        inside, held = rows.take(np.flatnonzero(place != i)), np.flatnonzero(place == i)
        one = {"train": inside, "test": rows.take(held)}
        each = RunFolder(run / f"folds/{i + 1}")
        if not _is_same(each, config, {name: data.fingerprint() for name, data in one.items()}):
            each = train(one, config, each.path, **{**options, "overwrite": True})
        measured.append({name: m["value"] for name, m in each.metrics()["metrics"].items()})
        model = load(each.path)
        at = 0
        for batch in model.batches(model.matrix(one["test"])):
            size = len(batch.probability)
            collected.add(held[at : at + size], batch.probability, batch.index)
            at += size
    collected.found().save(run)
    about = {"path": path, "fingerprint": rows.fingerprint(), "source": rows.source}
    run.write_json(FILE, {"folds": folds, "rows": len(rows), "metrics": spread(measured), "data": about})
    card.write(run, load(run.path))
    return run


def spread(measured: list[dict[str, float | None]]) -> dict[str, dict[str, Any]]:
    """Return for each metric its mean over the folds that have it, its standard deviation and its values.

    Example:
        >>> spread([{"recall@5": 0.5}, {"recall@5": 0.7}])["recall@5"]["mean"]
        0.6
    """
    out = {}
    for name in dict.fromkeys(name for one in measured for name in one):
        values = [one.get(name) for one in measured]
        known = np.array([v for v in values if v is not None and math.isfinite(v)])
        mean = float(known.mean()) if len(known) else None
        deviation = float(known.std(ddof=1)) if len(known) > 1 else None
        out[name] = {"mean": mean, "deviation": deviation, "values": values}
    return out


def rows_of(run: RunFolder, parts: dict[str, LabelData]) -> LabelData:
    """Return the rows that were cross-validated; it is an error if they are not those of the run any more."""
    about = run.read_optional(FILE).get("data")
    rows = parts.get("all", parts.get("train"))
    if not about or rows is None or rows.fingerprint() != about.get("fingerprint"):
        raise RunError(f"{run.path}: its out-of-fold scores belong to other rows. Train with --folds again.")
    return rows


def _is_same(run: RunFolder, config: Config, read: dict[str, str]) -> bool:
    """Whether the folder holds a finished run of these settings and rows."""
    if not run.is_done():
        return False
    return make(run.config(), str(run / "config.yaml")) == config and run.read_optional("data.json").get("read") == read
