"""The kind of model ``tree``: label trees, for thousands of labels and more, or a hierarchy that the user gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lastlayer.hierarchy import LabelTree
from lastlayer.runs import RunFolder
from lastlayer.runs.files import RunError, damaged
from lastlayer.train.config import Config, ConfigError
from lastlayer.train.features import FeatureMap
from lastlayer.train.linear import LinearTree
from lastlayer.train.placement import Placement
from lastlayer.train.serve import Scores

LISTED = 50  # labels of each row that are scored


class TreeScorer:
    """Scores the best labels of each row with label trees.

    Args:
        tree: The trees.
    """

    def __init__(self, tree: LinearTree) -> None:
        self.tree = tree

    def scores(self, x: Any) -> Scores:
        """Return the log-odds of the best labels of each row; labels that the search did not reach have -inf."""
        index, z = self.tree.decision_function(x, min(LISTED, self.tree.n_labels), threads=torch.get_num_threads())
        index = np.array(index)
        for row in np.flatnonzero((index < 0).any(1)):  # few labels, or a narrow search
            absent = index[row] < 0
            index[row, absent] = np.setdiff1d(np.arange(self.tree.n_labels), index[row])[: absent.sum()]
        return Scores(torch.from_numpy(np.ascontiguousarray(z, np.float32)), torch.from_numpy(index.astype(np.int64)))

    def to(self, device: str | torch.device) -> None:
        """Do nothing: label trees are searched on the CPU."""

    def save(self, run: RunFolder) -> None:
        """Write tree.json and tree.safetensors."""
        self.tree.save(run.path)


def load(run: RunFolder, config: Config, features: FeatureMap, n_labels: int, placement: Placement) -> TreeScorer:
    """Load the trees of a finished run."""
    try:
        tree = LinearTree.load(run.path)
    except OSError as error:
        raise damaged(run / "tree.safetensors", error) from None
    except ValueError as error:  # which names the file
        raise RunError(str(error)) from None
    if (tree.n_labels, tree.n_features) != (n_labels, features.n_features):
        raise damaged(run / "tree.safetensors", "does not fit the labels and features of the run")
    return TreeScorer(tree)


def read_hierarchy(path: str | Path, labels: list[str]) -> LabelTree:
    """Read a tree whose leaves are the labels.

    Args:
        path: JSON of nested objects and lists, whose innermost names are the labels; or lines of text, each with a name
            and the name above it, separated by a tab or a comma.
        labels: The names of the labels.
    """
    try:
        text = Path(path).read_text("utf-8")
        if text.lstrip().startswith("{"):
            return LabelTree.from_dict(json.loads(text), classes=labels)
        return LabelTree.from_dict(_nested(text), classes=labels)
    except OSError as error:
        raise ConfigError(f"`hierarchy` must be a file, got {str(path)!r}: {error.strerror}.") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"`hierarchy`: {path}: {' '.join(str(error).split())[:200]}") from None


def _nested(text: str) -> dict[str, Any]:
    """Turn lines of a name and the name above it into nested dictionaries."""
    below: dict[str, dict[str, Any]] = {}
    inner = set()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        name, _, above = (part.strip() for part in line.partition("\t" if "\t" in line else ","))
        if not name or not above:
            raise ValueError(f"line {number} must hold a name and the name above it, got {line[:60]!r}.")
        below.setdefault(above, {})[name] = below.setdefault(name, {})
        inner.add(name)
    top = {name: rest for name, rest in below.items() if name not in inner}
    if not top:
        raise ValueError("no name is at the top: the lines form a circle.")
    return top
