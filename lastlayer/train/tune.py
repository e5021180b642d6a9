"""Random search over learning rate, weight decay, k and loss; each trial is a run folder, so a study resumes."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lastlayer.data import LabelData
from lastlayer.runs import RunError, RunFolder, write_atomically
from lastlayer.train.config import Config, load, make
from lastlayer.train.engine import OtherRunError, prepare, train
from lastlayer.train.resolved import Resolved, lower_is_better


def propose(config: Config, number: int, losses: Sequence[str], k: float, sparse: bool) -> Config:
    """Return the config of a trial: the first is as given, the others are drawn; the number decides, not the past."""
    rng = np.random.default_rng([config.seed, number])
    changes: dict[str, Any] = {"loss": losses[number % len(losses)]}
    if changes["loss"] != config.loss:
        changes["loss_options"] = {}
    if number >= len(losses):
        start = dataclasses.replace(config, loss=changes["loss"], loss_options={}).settled(sparse)
        changes["lr"] = f"{float(start.lr) * math.exp(rng.uniform(-1.6, 1.6)):.3g}"
        changes["weight_decay"] = f"{float(start.weight_decay) * math.exp(rng.uniform(-2.3, 2.3)):.3g}"
        if config.k == "auto":
            changes["k"] = float(f"{k * math.exp(rng.uniform(-0.7, 0.7)):.3g}")
    return dataclasses.replace(config, **changes)


def score(run: RunFolder, monitor: str) -> tuple[float, int]:
    """Return the best value of the monitored metric on the validation rows, larger is better, and its epoch."""
    values = [(row.get(monitor), int(row["epoch"] or 0)) for row in run.history()]
    sign = -1 if lower_is_better(monitor) else 1
    values_at = [(sign * v, e) for v, e in values if v is not None and math.isfinite(v)]
    return max(values_at, key=lambda pair: (pair[0], -pair[1])) if values_at else (-math.inf, 0)


def tune(
    parts: dict[str, LabelData],
    config: Config,
    out: str | Path,
    *,
    trials: int = 12,
    losses: Sequence[str] = (),
    say: Callable[[dict[str, Any]], None] = lambda line: None,
) -> RunFolder:
    """Search, then train the best config once more with the test part; only validation rows choose.

    Args:
        parts: Rows by part.
        config: What all trials share, and where the search starts.
        out: The folder of the study: ``trial_000`` and so on, ``trials.json``, and ``best``, the final run; more
            trials with a better one among them replace it.
        trials: How many.
        losses: The losses to try; empty is that of `config`.
        say: Called with a line of the table after each trial.

    Returns:
        The final run.
    """
    folder = Path(out)
    if config.loss == "auto":  # the search is over settings of minibatches
        config = dataclasses.replace(config, loss=losses[0] if losses else "lml")
    for loss in losses:  # those that cannot be are refused before the first trial
        dataclasses.replace(config, loss=loss)
    parts = prepare(parts, dataclasses.replace(config, keep=1.0, single_positive=False))
    if "valid" not in parts:
        raise RunError("tune: needs validation rows; `valid_fraction` is 0.")
    shown = {name: data for name, data in parts.items() if name != "test"}
    resolved = Resolved.of(config, prepare(shown, config)["train"])
    sparse = not isinstance(parts["train"].features, np.ndarray)
    asked = {"config": config.to_dict(), "losses": list(losses)}
    _same_study(folder, asked)
    lines = []
    for number in range(trials):
        trial = propose(config, number, losses or [config.loss], resolved.k, sparse)
        trial = dataclasses.replace(trial, bootstrap=0)
        run = RunFolder(folder / f"trial_{number:03d}")
        if not run.is_done():
            run = train(shown, trial, run.path)
        value, epoch = score(run, resolved.monitor)
        line = {
            "trial": number, "loss": trial.loss, "lr": trial.lr, "weight_decay": trial.weight_decay, "k": trial.k,
            "epoch": epoch, resolved.monitor: abs(value),
        }  # fmt: skip
        lines.append((value, number, trial, line))
        RunFolder(folder).write_json("trials.json", {"monitor": resolved.monitor, "trials": [t[-1] for t in lines]})
        say(line)
    best = dataclasses.replace(max(lines, key=lambda t: (t[0], -t[1]))[2], bootstrap=config.bootstrap)
    final = RunFolder(folder / "best")
    if final.exists() and make(load(final / "config.yaml"), str(final / "config.yaml")) != best:
        shutil.rmtree(final.path)  # it was the best of fewer trials
    return final if final.is_done() else train(parts, best, final.path)


def _same_study(folder: Path, asked: dict[str, Any]) -> None:
    """Refuse to mix two studies in one folder."""
    note = folder / "study.json"
    if note.exists():
        try:
            before = json.loads(note.read_text("utf-8"))
            same = make(before["config"]) == make(asked["config"]) and before["losses"] == asked["losses"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError):
            raise RunError(f"{note}: damaged. Choose another folder.") from None
        if not same:
            raise OtherRunError(f"{folder}: holds a study with other settings. Choose another folder.")
        return
    if folder.exists() and any(folder.iterdir()):
        raise RunError(f"{folder}: is not empty and not a study. Choose another folder.")
    write_atomically(note, json.dumps(asked, indent=1).encode())
