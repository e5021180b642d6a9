"""Predict with label trees that `lastlayer export` wrote. Needs numpy alone; lastlayer copies this file as predict.py.

    python predict.py ROWS.npz [K]

prints the K (5) best labels of each row and their probabilities, one row per line. ``ROWS.npz`` holds rows of features
as the arrays ``indptr, indices, data`` of a CSR matrix; features.json defines the features. The other files:

- ``tree.json``: ``n_labels``, ``n_features``, ``trees`` (how many), and under ``settings`` what prediction needs:
  ``loss``, ``beam``, ``normalize``, ``observed``.
- ``tree.safetensors``, for each tree N: ``N.child_start`` (the children of node i are entries ``child_start[i]`` to
  ``child_start[i + 1]``), ``N.child`` (a label, or ``-1 - node``), and for each child its ``N.intercept`` and its
  weights, the features ``N.indices[N.indptr[j] : N.indptr[j + 1]]`` with ``N.values``. ``knots``: the calibration.
- ``labels.json``: the names of the labels.
"""

from __future__ import annotations

import json
import math
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

LINKS = {
    "squared_hinge": (3.0, 1.0),
    "logistic": (1.0, 0.0),
}  # a child's probability is sigmoid(scale * score + offset)
TYPES = {"F64": "<f8", "F32": "<f4", "I64": "<i8", "I32": "<i4"}
LISTED = 50  # labels of each row that are compared between the trees


def read_safetensors(path: str | Path) -> dict[str, np.ndarray]:
    """Return the arrays of a safetensors file: the length of a JSON header, the header, and the bytes."""
    raw = Path(path).read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    arrays = {}
    for name, about in json.loads(raw[8:start]).items():
        if name != "__metadata__":
            first, last = (start + offset for offset in about["data_offsets"])
            arrays[name] = np.frombuffer(raw[first:last], TYPES[about["dtype"]]).reshape(about["shape"])
    return arrays


class TreeModel:
    """Label trees.

    Args:
        folder: What `lastlayer export` wrote.
    """

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        about = json.loads((folder / "tree.json").read_text("utf-8"))
        arrays = read_safetensors(folder / "tree.safetensors")
        self.labels: list[str] = json.loads((folder / "labels.json").read_text("utf-8"))["names"]
        self.n_features, self.settings, self.knots = about["n_features"], about["settings"], arrays["knots"]
        self.observed: Any = arrays.get("observed", self.settings["observed"] or 1.0)
        self.trees = [
            {name.partition(".")[2]: array for name, array in arrays.items() if name.startswith(f"{number}.")}
            for number in range(about["trees"])
        ]

    def predict(self, indices: np.ndarray, data: np.ndarray, k: int = 5) -> list[tuple[str, float]]:
        """Return the `k` best labels of one row and their probabilities.

        Args:
            indices: The features of the row that are not 0.
            data: Their values.
            k: How many labels.
        """
        x = np.zeros(self.n_features, np.float32)
        x[indices] = data
        length = float(np.sqrt(np.square(x, dtype=np.float64).sum()))
        if self.settings["normalize"] and length > 0:
            x /= np.float32(length)
        share = np.broadcast_to(np.asarray(self.observed, float), len(self.labels))
        kept = LISTED * (4 if np.ndim(self.observed) else 1)
        mean: dict[int, float] = {}
        for tree in self.trees:
            reached = self._search(tree, x)
            best = sorted(reached, key=lambda label: (-reached[label], label))[: 4 * kept]
            for label in best:
                mean[label] = mean.get(label, 0.0) + math.exp(reached[label]) / len(self.trees)
        best = sorted(mean, key=lambda label: (-mean[label], label))[:kept]
        found = [(label, min(self._calibrated(mean[label]) / float(share[label]), 1 - 1e-7)) for label in best]
        found.sort(key=lambda pair: -pair[1])
        return [(self.labels[label], p) for label, p in found[:k]]

    def _search(self, tree: dict[str, np.ndarray], x: np.ndarray) -> dict[int, float]:
        """Return the logarithms of the products along the paths of the labels that the beam reaches."""
        scale, offset = LINKS[self.settings["loss"]]
        labels: dict[int, float] = {}
        front = [(0.0, 0)]
        while front:
            below = []
            for above, node in front:
                for j in range(tree["child_start"][node], tree["child_start"][node + 1]):
                    own = slice(tree["indptr"][j], tree["indptr"][j + 1])
                    score = float(x[tree["indices"][own]] @ tree["values"][own]) + float(tree["intercept"][j])
                    total = above - float(np.logaddexp(0, -(scale * score + offset)))
                    child = int(tree["child"][j])
                    if child >= 0:
                        labels[child] = total
                    else:
                        below.append((total, -1 - child))
            front = sorted(below, key=lambda pair: (-pair[0], pair[1]))[: self.settings["beam"]]
        return labels

    def _calibrated(self, p: float) -> float:
        """Return the calibrated probability of a score, which is a mean of products."""
        log_p = min(math.log(p + 1e-37), -1e-13)
        odds = min(max(log_p - math.log(-math.expm1(log_p)), -30.0), 30.0)
        return 1 / (1 + math.exp(-float(np.interp(odds, self.knots[0], self.knots[1]))))


def read_rows(path: str, n_features: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ``indptr, indices, data`` of the rows in a file, or raise a ValueError that says what is wrong with it."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in ("indptr", "indices", "data", "format") if name in file}
    except OSError as error:
        raise ValueError(f"`ROWS.npz` must be a file, got {path}: {error.strerror or error}.") from None
    except Exception:  # of a text, an array by itself, an empty or a torn file: each has its own
        raise ValueError(f"`ROWS.npz` must be a file that numpy.savez wrote, got {path}.") from None
    kind = arrays.pop("format", np.array(b"csr")).item()
    if len(arrays) < 3 or kind not in (b"csr", "csr"):
        raise ValueError(f"`ROWS.npz` must hold the arrays indptr, indices and data of a CSR matrix, got {path}.")
    indptr, indices, data = arrays["indptr"], arrays["indices"], arrays["data"]
    whole = indptr.dtype.kind in "iu" and indices.dtype.kind in "iu" and indptr.ndim == indices.ndim == data.ndim == 1
    if not (whole and len(indptr) and indptr[0] == 0 and indptr[-1] == len(indices) == len(data)):
        raise ValueError(f"`ROWS.npz` must hold a CSR matrix, got arrays in {path} that do not fit together.")
    if (np.diff(indptr) < 0).any() or (len(indices) and not 0 <= indices.min() <= indices.max() < n_features):
        raise ValueError(f"`ROWS.npz` must hold features from 0 to {n_features - 1}, got others in {path}.")
    return indptr, indices, data


def main(arguments: list[str], folder: Path) -> int:
    """Predict the rows of a file; return the status, 2 after one line about bad arguments."""
    try:
        if len(arguments) not in (1, 2):
            raise ValueError("give the file of the rows and, if you like, how many labels: ROWS.npz [K].")
        if len(arguments) == 2 and not (arguments[1].isdecimal() and int(arguments[1])):
            raise ValueError(f"`K` must be a whole number of labels, at least 1, got {arguments[1]}.")
        model = TreeModel(folder)
        indptr, indices, data = read_rows(arguments[0], model.n_features)
    except ValueError as error:
        print(f"predict.py: {error}", file=sys.stderr)
        return 2
    for first, last in pairwise(indptr):
        found = model.predict(indices[first:last], data[first:last], int(arguments[1]) if len(arguments) == 2 else 5)
        print("\t".join(f"{label} {p:.4f}" for label, p in found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path(__file__).parent))
