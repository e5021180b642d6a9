r"""A run folder: everything about a training run, in files that are safe to open.

JSON is UTF-8, tensors are safetensors, nothing is pickled (but see ``checkpoints/shards``). Each file is written to a
temporary name, flushed to disk and renamed, so that a reader finds a whole file or the previous one. Format 1:

``config.yaml``
    Every field of :class:`~lastlayer.train.Config`, as asked for.
``environment.json``
    ``{"format": 1, "lastlayer", "python", "torch", "platform", "device", "threads", "command", "started"}``.
``data.json``
    ``{"format": 1, "parts": {part: {"source", "rows", "labels_a_row", "fingerprint", "skipped", "listed"}}, "hidden",
    "resolved"}``; ``part`` is train, valid or test; ``fingerprint`` is a SHA-256 of rows and labels; ``resolved``
    holds what "auto" became: ``{"k", "observed", "loss", "probability", "n_features", "n_labels", "monitor",
    "optimizer", "lr", "weight_decay"}``;
    ``k`` is a number, or null where it is predicted a row.
``labels.json``
    ``{"format": 1, "names": [...], "train_counts": [...]}``: the classes in the order of the outputs, and how many
    training rows carry each.
``features.json``
    The state of the feature map (vocabulary and idf, hashing size, means and scales): from a row to the input.
``weights.safetensors``
    The weights of the best epoch, named as in :class:`~lastlayer.train.LabelSetNetwork`.
``history.csv``
    One line an epoch: ``epoch, step, lr, train_loss, valid_loss, <valid metrics>, seconds``. A cell is empty where
    there is no such number.
``metrics.json``
    ``{"format": 1, "part": "test" or "valid", "rows", "metrics": {name: {"value", "low", "high"}}, "best_epoch",
    "epochs", "notes": [...], "labels": {"support": [...], "precision": [...], "recall": [...], "threshold": [...],
    "average_precision": [...]}}``. Values are fractions; low and high a 95 % bootstrap interval over rows. Names:
    ``precision@1``, ``recall@5``, ``ndcg@5``, ``map`` (mean over classes), ``map_sample``, ``ece`` (all
    pairs), ``ece@5`` (the five best of each row). A number that does
    not exist is null. ``labels`` has one entry a class.
``predictions.safetensors``
    The held-out rows: ``row`` (n,) int64, their position in the held-out part; ``target_indptr`` (n+1,) and
    ``target_index`` int64, the true labels of row i being ``target_index[target_indptr[i]:target_indptr[i+1]]``;
    ``top_index`` (n, m) int64 and ``top_probability`` (n, m) float32, the m most probable labels, best first;
    ``k`` (n,) float32, the expected number of labels; ``probability`` (n, n_labels) float32 only where it is at most 8
    million entries. Read with :meth:`RunFolder.predictions`.
``examples.json``
    ``{"format": 1, "rows": [{"row", "id", "text"}]}``: up to 2000 held-out rows in the order of
    ``predictions.safetensors``; ``row`` is the position there, ``text`` null for rows without one (cut at 2000
    characters).
``errors.json``
    Not written by training. An own analysis, ``{"format": 1, **label_set_errors(...).to_dict()}``, for instance with a
    label tree; the report shows it in place of its own.
``checkpoints/last.ckpt``, ``checkpoints/best.ckpt``
    The whole state of training after an epoch (:mod:`lastlayer.train.checkpoint`); ``last.ckpt`` is what a killed run
    resumes from.
``checkpoints/shards``
    Only with ``--shard-classes``: the tensors of the split labels, as torch.distributed.checkpoint writes them. Its
    index is a pickle, the one exception here; it is read when training is resumed, and at its end for the weights of
    the best epoch. Resume only such runs as you trust; a finished one is opened without it.
``done.json``
    Written last: ``{"format": 1, "seconds"}``. Without it the run is not finished.
"""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = 1


class RunError(ValueError):
    """A run folder that is missing, unfinished or damaged: one line that says which file."""


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that it is whole or not there: temporary name, flush to disk, rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class RunFolder:
    """The files of a run; the module's text documents each.

    Args:
        path: The folder.

    Example:
        >>> import tempfile
        >>> from lastlayer.train import RunFolder
        >>> run = RunFolder(tempfile.mkdtemp())
        >>> run.write_json("labels.json", {"names": ["a", "b"], "train_counts": [3, 1]})
        >>> run.labels(), run.is_done()
        (['a', 'b'], False)
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def exists(self) -> bool:
        """Whether there is a run here, finished or not."""
        return (self / "config.yaml").exists()

    def is_done(self) -> bool:
        """Whether training and evaluation came to their end."""
        return (self / "done.json").exists()

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """Write a JSON file, with its format number; nan becomes null."""
        text = json.dumps(_plain({"format": FORMAT, **value}), ensure_ascii=False, indent=1, allow_nan=False)
        write_atomically(self / name, text.encode("utf-8"))

    def read_json(self, name: str) -> dict[str, Any]:
        """Read a JSON file and check its format number."""
        try:
            value = json.loads((self / name).read_text("utf-8"))
        except FileNotFoundError:
            raise RunError(f"{self / name}: not there. Is {self.path} a finished run of `lastlayer train`?") from None
        except (OSError, ValueError, RecursionError) as error:
            raise RunError(f"{self / name}: damaged: {str(error)[:100]}.") from None
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise RunError(f"{self / name}: damaged, or of another version: must be an object of format {FORMAT}.")
        return value

    def write_tensors(self, name: str, tensors: dict[str, Any], metadata: dict[str, str] | None = None) -> None:
        """Write a safetensors file of torch tensors."""
        from safetensors.torch import save

        whole = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
        write_atomically(self / name, save(whole, metadata))

    def read_tensors(self, name: str) -> dict[str, Any]:
        """Read a safetensors file as torch tensors."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        if not (self / name).is_file():
            raise RunError(f"{self / name}: not there. Is {self.path} a finished run of `lastlayer train`?")
        try:
            return load_file(self / name)
        except (SafetensorError, OSError, ValueError) as error:
            raise RunError(f"{self / name}: damaged: {str(error)[:100]}.") from None

    def write_history(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write the learning curves."""
        names = list(dict.fromkeys(name for row in rows for name in row))
        out = io.StringIO()
        writer = csv.DictWriter(out, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(self / "history.csv", out.getvalue().encode())

    def history(self) -> list[dict[str, float | None]]:
        """Read the learning curves: one dictionary an epoch."""
        try:
            with (self / "history.csv").open(newline="") as file:
                return [{k: float(v) if v else None for k, v in row.items() if k} for row in csv.DictReader(file)]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, csv.Error) as error:
            raise RunError(f"{self / 'history.csv'}: damaged: {str(error)[:100]}.") from None

    def labels(self) -> list[str]:
        """Read the label names."""
        names = self.read_json("labels.json").get("names")
        if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            raise RunError(f"{self / 'labels.json'}: damaged: must hold a list of names.")
        return names

    def metrics(self) -> dict[str, Any]:
        """Read the metrics of the held-out rows."""
        return self.read_json("metrics.json")

    def examples(self) -> list[dict[str, Any]]:
        """Read the held-out texts."""
        return self.read_json("examples.json")["rows"]

    def predictions(self) -> dict[str, np.ndarray]:
        """Read the predictions for the held-out rows as NumPy arrays."""
        return {name: value.numpy() for name, value in self.read_tensors("predictions.safetensors").items()}

    def write_environment(self, command: Sequence[str] | None = None) -> None:
        """Note what ran where."""
        import torch

        import lastlayer

        device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu"
        self.write_json(
            "environment.json",
            {
                "lastlayer": lastlayer.__version__,
                "python": platform.python_version(),
                "torch": torch.__version__,
                "platform": platform.platform(),
                "device": device,
                "threads": torch.get_num_threads(),
                "command": list(sys.argv if command is None else command),
                "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            },
        )


def _plain(value: Any) -> Any:
    """Turn NumPy numbers into Python's and what is not finite into null."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value
