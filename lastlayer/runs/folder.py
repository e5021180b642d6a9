r"""A run folder holds everything about one training run.

JSON is UTF-8, tensors are safetensors, nothing is pickled (one exception: ``checkpoints/shards``). Each file is written
under a temporary name, flushed to disk and renamed, so a reader finds a whole file or the previous one. Format 1:

``config.yaml``
    Every field of :class:`~lastlayer.train.Config`, as given by the user.
``environment.json``
    ``{"format": 1, "lastlayer", "python", "torch", "platform", "device", "threads", "command", "started"}``.
``data.json``
    ``{"format": 1, "parts": {part: {"source", "rows", "labels_per_row", "fingerprint", "skipped", "listed"}}, "hidden",
    "resolved", "read"}``. ``part`` is train, valid or test; ``fingerprint`` is a SHA-256 of rows and labels.
    ``resolved`` holds the values that replaced "auto": ``{"k", "k_per_row", "observed", "loss", "probability",
    "temperature", "n_features", "n_labels", "monitor", "optimizer", "lr", "weight_decay"}``; ``k_per_row`` says whether
    the number of labels is predicted per row. ``read`` holds the fingerprints of the parts as they were read, before
    any rows were split off. Folders of version 0.1 have ``labels_a_row`` for ``labels_per_row``.
``labels.json``
    ``{"format": 1, "names": [...], "train_counts": [...]}``: the classes in the order of the outputs, and the number
    of training rows that have each.
``features.json``
    The state of the feature map (vocabulary and idf, hashing size, means and scales), which turns a row into the input
    of the network.
``weights.safetensors``
    The weights of the best epoch, with the names of :class:`~lastlayer.train.LabelSetNetwork`.
``encoder``
    Only if an encoder was trained: its folder, as its own library writes it (``config.json``, ``model.safetensors``, a
    tokenizer). ``weights.safetensors`` then holds what is on top of it. A frozen encoder stays where it is;
    ``features.json`` names its folder, with a digest of its files.
``encoded``
    Only with ``--freeze``: the features of rows by the encoder. It may be removed; ``--overwrite`` keeps it.
``count.safetensors``
    Only with ``--k predicted``: the regression of the number of labels on the features.
``calibration.safetensors``
    ``slope`` and ``offset``, one number per label: the log-odds of a label are ``slope * score + offset``, and its
    probability is their sigmoid. Not there if probabilities are not calibrated.
``decision.json``
    ``{"format": 1, "rule", "threshold", "rows"}``: how probabilities become label sets (``--decide``). A label is
    predicted if its probability is above the threshold, which is one number or one per label; null for ``top_k``.
``choice.json``
    Only with the exact solver or ``--loss auto``: ``{"format": 1, "line", "monitor", "candidates": [{"candidate",
    "loss", "thinned", "C", "value", "seconds", "left_out"}]}``, what was tried on held-out rows, best first.
``history.csv``
    One line per epoch, or per candidate that was tried: ``epoch, step, lr, train_loss, valid_loss, <valid metrics>,
    seconds``. A cell without a value is empty.
``metrics.json``
    ``{"format": 1, "part": "test" or "valid", "rows", "metrics": {name: {"value", "low", "high"}}, "best_epoch",
    "epochs", "notes": [...], "labels": {"support": [...], "precision": [...], "recall": [...], "threshold": [...],
    "average_precision": [...]}}``. Values are fractions; low and high are a 95 % bootstrap interval over rows. Names:
    ``precision@1``, ``recall@5``, ``ndcg@5``, ``map`` (mean over classes), ``map_sample``, ``ece`` (all pairs),
    ``ece@5`` (the five most probable labels of each row), ``ece_label`` (mean over labels), and of the predicted label
    sets ``micro_f1``, ``macro_f1``, ``sample_f1``, ``hamming_loss``, ``exact_match``. A missing number is
    null. The lists of ``labels`` have one entry per class.
``predictions.safetensors``
    The held-out rows: ``row`` (n,) int64, the position in the held-out part; ``target_indptr`` (n+1,) and
    ``target_index`` int64, the true labels of row i being ``target_index[target_indptr[i]:target_indptr[i+1]]``;
    ``top_index`` (n, m) int64 and ``top_probability`` (n, m) float32, the m most probable labels, best first;
    ``k`` (n,) float32, the expected number of labels; ``set_indptr`` (n+1,) and ``set_index`` int64, the predicted
    label sets in the same form as the true ones; ``probability`` (n, n_labels) float32, only if it has at most 8
    million entries; ``weight`` (n,) float64, only if the rows have weights: how much each counts, with a mean of 1.
    Read them with :meth:`RunFolder.predictions`.
``examples.json``
    ``{"format": 1, "rows": [{"row", "id", "text"}]}``: up to 2000 held-out rows in the order of
    ``predictions.safetensors``. ``row`` is the position there; ``text`` is null for rows without text, and is cut at
    2000 characters.
``reasons.json``
    Not for label trees: why the first 200 held-out rows get their labels, and what speaks for and against the 500 most
    frequent labels (:func:`lastlayer.train.explain.reasons`).
``errors.json``
    Not written by training. It may hold an analysis of your own, ``{"format": 1, **label_set_errors(...).to_dict()}``,
    for instance with a label tree; the report shows it instead of its own analysis.
``checkpoints/last.ckpt``, ``checkpoints/best.ckpt``
    The whole state of training after an epoch (:mod:`lastlayer.train.checkpoint`). A killed run resumes from
    ``last.ckpt``.
``checkpoints/shards``
    Only with ``--shard-classes``: the tensors of the sharded labels, as torch.distributed.checkpoint writes them. Its
    index is a pickle, the one exception. It is read when training resumes, and at the end for the weights of the best
    epoch. Resume only runs that you trust; opening a finished run does not read it.
``folds/1``, ``folds/2``, ..., ``folds.json``, ``out_of_fold.safetensors``
    Only with ``--folds``: a run for each fold, measured on its rows; ``{"format": 1, "folds", "rows", "metrics": {name:
    {"mean", "deviation", "values"}}, "data": {"path", "fingerprint", "source"}}``; and the probabilities of each row by
    the run that has not seen it: ``probability`` (rows, n_labels) float32, or for more than 50 million the best 50 of
    each row with their labels, ``index`` int64, padded with -1.
``suggestions.json``
    Only after ``lastlayer suggest RUN``: what the report shows as labels to look at
    (:func:`lastlayer.train.suggest_sheet.sheet`).
``model_card.md``
    Data, counts, metrics, intended use and limits in Markdown, for people. Nothing reads it.
``done.json``
    Written last: ``{"format": 1, "seconds"}``. A run without it is not finished.
"""

from __future__ import annotations

import csv
import io
import math
import platform
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lastlayer.runs.files import RunError, damaged, missing, read_json, read_yaml, to_json, write_atomically

FOLDERS = ("checkpoints", "csv", "tensorboard", "wandb", "folds", "encoder")
FILES = (
    "environment.json", "data.json", "labels.json", "features.json", "weights.safetensors", "count.safetensors",
    "calibration.safetensors", "decision.json", "choice.json", "tree.json", "tree.safetensors", "history.csv",
    "metrics.json", "predictions.safetensors", "examples.json", "errors.json", "report.html", "folds.json",
    "out_of_fold.safetensors", "model_card.md", "suggestions.json", "reasons.json",
)  # fmt: skip


def _are_weights(weight: np.ndarray, n: int) -> bool:
    whole = weight.shape == (n,) and np.issubdtype(weight.dtype, np.floating) and bool(np.isfinite(weight).all())
    return whole and bool((weight >= 0).all() and weight.any())


class RunFolder:
    """The files of a run; :mod:`lastlayer.runs.folder` documents each.

    Reading checks a file before any number of it is used. A missing, damaged or foreign file raises
    :class:`~lastlayer.runs.RunError`, one line that names the file.

    Args:
        path: The folder.

    Example:
        >>> import tempfile
        >>> from lastlayer.runs import RunFolder
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
        """Whether the folder holds a run, finished or not."""
        return (self / "config.yaml").exists()

    def is_done(self) -> bool:
        """Whether training and evaluation have finished."""
        return (self / "done.json").exists()

    def clear(self) -> None:
        """Remove the files of a run, and leave all others. A folder without a run is left alone."""
        if not self.exists():
            return
        for name in ("done.json", *FOLDERS, *FILES, "config.yaml"):  # first what makes it a finished run
            path = self / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def is_own(self, path: Path) -> bool:
        """Whether a file is one that makes up the run; its report is not."""
        names = {*FILES, "config.yaml", "done.json"} - {"report.html"}
        return path.name in names and path.resolve().parent == self.path.resolve()

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """Write a JSON file with its format number; nan becomes null."""
        write_atomically(self / name, to_json(value))

    def read_json(self, name: str) -> dict[str, Any]:
        """Read a JSON file and check its format number."""
        value = read_json(self / name)
        if value is None:
            raise missing(self / name)
        return value

    def read_optional(self, name: str) -> dict[str, Any]:
        """Read a JSON file; return an empty dictionary if there is no such file."""
        return read_json(self / name) or {}

    def write_tensors(self, name: str, tensors: dict[str, Any], metadata: dict[str, str] | None = None) -> None:
        """Write a safetensors file of torch tensors."""
        from safetensors.torch import save

        whole = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
        write_atomically(self / name, save(whole, metadata))

    def read_tensors(self, name: str) -> dict[str, Any]:
        """Read a safetensors file as torch tensors."""
        from safetensors.torch import load_file

        return self._load(name, load_file)

    def _load(self, name: str, load_file: Any) -> dict[str, Any]:
        from safetensors import SafetensorError

        if not (self / name).is_file():
            raise missing(self / name)
        try:
            tensors: dict[str, Any] = load_file(self / name)
            return tensors
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise damaged(self / name, error) from None

    def write_history(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write the learning curves."""
        names = list(dict.fromkeys(name for row in rows for name in row))
        out = io.StringIO()
        writer = csv.DictWriter(out, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(self / "history.csv", out.getvalue().encode())

    def history(self) -> list[dict[str, float | None]]:
        """Read the learning curves: one dictionary per epoch, None for a cell that is empty or not finite."""
        try:
            with (self / "history.csv").open(newline="", encoding="utf-8") as file:
                return [{k: _cell(v) for k, v in row.items() if k} for row in csv.DictReader(file)]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, csv.Error) as error:
            raise damaged(self / "history.csv", error) from None

    def config(self) -> dict[str, Any]:
        """Read the fields of config.yaml as plain values; empty if there is no such file."""
        path = self / "config.yaml"
        return read_yaml(path) if path.exists() else {}

    def labels(self) -> list[str]:
        """Read the label names."""
        names = self.read_json("labels.json").get("names")
        if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            raise damaged(self / "labels.json", "must hold a list of names")
        return names

    def train_counts(self) -> list[int]:
        """Read the number of training rows per label; empty if it was not stored."""
        labels = self.read_json("labels.json")
        counts: list[int] = labels.get("train_counts", [])
        if not _are_numbers(counts) or len(counts) not in (0, len(labels.get("names") or [])):
            raise damaged(self / "labels.json", "`train_counts` must hold one number per label")
        return counts

    def metrics(self) -> dict[str, Any]:
        """Read the metrics of the held-out rows."""
        path = self / "metrics.json"
        result = self.read_json("metrics.json")
        metrics = result.get("metrics")
        if not isinstance(metrics, dict) or not all(isinstance(m, dict) for m in metrics.values()):
            raise damaged(path, "`metrics` must be an object of {value, low, high}")
        result["metrics"] = {name: _with_whole_interval(metric) for name, metric in metrics.items()}
        if per_label := result.get("labels"):
            n_labels = len(self.labels())
            for key, values in per_label.items():
                if values is None or len(values) != n_labels:
                    raise damaged(path, f"`labels.{key}` must hold one number per label ({n_labels})")
        return result

    def examples(self) -> list[dict[str, Any]]:
        """Read the held-out texts; empty if they were not stored."""
        rows = self.read_optional("examples.json").get("rows", [])
        if not isinstance(rows, list) or not all(isinstance(r, dict) and isinstance(r.get("row"), int) for r in rows):
            raise damaged(self / "examples.json", "`rows` must be a list of {row, id, text}")
        return rows

    def predictions(self) -> dict[str, np.ndarray]:
        """Read the predictions for the held-out rows as NumPy arrays whose shapes and indices are checked."""
        from safetensors.numpy import load_file

        path, n_labels = self / "predictions.safetensors", len(self.labels())
        tensors = self._load("predictions.safetensors", load_file)
        needed = ("target_indptr", "target_index", "top_index", "top_probability", "k")
        if absent := [name for name in needed if name not in tensors]:
            raise damaged(path, f"must hold {', '.join(absent)}")
        for name in ("target_indptr", "target_index", "top_index", "set_indptr", "set_index"):
            if name in tensors and not np.issubdtype(tensors[name].dtype, np.integer):
                raise damaged(path, f"`{name}` must hold whole numbers")
        indptr, index, top, probability, k = (tensors[name] for name in needed)
        n, whole = len(k), tensors.get("probability")
        fits = top.ndim == 2 and top.shape == probability.shape and len(top) == n and indptr.shape == (n + 1,)
        if not fits or (whole is not None and whole.shape != (n, n_labels)):
            raise damaged(path, "the shapes must agree in the number of rows and labels")
        if indptr[0] != 0 or indptr[-1] != len(index) or (np.diff(indptr) < 0).any():
            raise damaged(path, "`target_indptr` must grow from 0 to the number of true labels")
        if "set_index" in tensors:
            starts = tensors.get("set_indptr", indptr[:0])
            end = len(tensors["set_index"])
            if starts.shape != (n + 1,) or starts[0] != 0 or starts[-1] != end or (np.diff(starts) < 0).any():
                raise damaged(path, "`set_indptr` must grow from 0 to the number of predicted labels")
        if (weight := tensors.get("weight")) is not None and not _are_weights(weight, n):
            raise damaged(path, "`weight` must be one number per row, at least 0 and above 0 somewhere")
        for name in ("target_index", "top_index", *(["set_index"] if "set_index" in tensors else [])):
            if ((tensors[name] < 0) | (tensors[name] >= n_labels)).any():
                raise damaged(path, f"`{name}` must be between 0 and {n_labels - 1}")
        return tensors

    def errors(self) -> dict[str, Any] | None:
        """Read an error analysis that was put into the folder."""
        result = read_json(self / "errors.json")
        needed = ("metric", "value", "n_false_alarms", "n_misses", "kinds", "oracles", "confusions", "cooccurrence")
        if result is not None and (absent := [name for name in needed if name not in result]):
            raise damaged(self / "errors.json", f"must hold {', '.join(absent)}, as LabelSetErrors.to_dict() does")
        return result

    def write_environment(self, command: Sequence[str] | None = None) -> None:
        """Note the versions, the machine and the command."""
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


def finished(path: str | Path) -> RunFolder:
    """Return the folder of a finished run, or raise an error that says what to do."""
    run = RunFolder(path)
    if not run.path.is_dir():
        raise no_folder(run.path)
    if not run.exists():
        raise RunError(f"{run.path}: not a run folder: there is no config.yaml in it.")
    if not run.is_done():
        raise RunError(f"{run.path}: the run is not finished. Resume it with `lastlayer train`.")
    return run


def no_folder(path: Path) -> RunError:
    """Return the error for a path that is not a folder: it is not there, or it is a file."""
    if path.exists():
        why = "is a file. Give the folder that `lastlayer train` wrote."
    else:
        why = "is not there. Run `lastlayer train`."
    return RunError(f"{path}: must be the folder of a finished run, and {why}")


def _with_whole_interval(metric: dict[str, Any]) -> dict[str, Any]:
    """Return a metric without its interval if a part is missing: readers compute with all three numbers or with one."""
    if all(metric.get(key) is not None for key in ("value", "low", "high")):
        return metric
    return {**metric, "value": metric.get("value"), "low": None, "high": None}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(v is None or _is_number(v) for v in values)


def _cell(text: str | None) -> float | None:
    value = float(text) if text else math.nan
    return value if math.isfinite(value) else None
