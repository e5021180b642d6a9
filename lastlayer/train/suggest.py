"""Labels to look at in rows with labels: out-of-fold scores of linear models, and what they say of each label."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lastlayer.data import DataError, LabelData, fold_rows
from lastlayer.decode.suggest import LabelSuggestions, suggest_labels
from lastlayer.runs import RunFolder
from lastlayer.runs.files import RunError, damaged
from lastlayer.train.config import Config
from lastlayer.train.features import FeatureMap

COST = 3.0  # of errors of the linear models
DENSE = 50_000_000  # scores up to which all are kept; above, the best of each row
LISTED = 50
CHUNK = 4_000_000  # scores at a time
FILE = "out_of_fold.safetensors"


@dataclass(frozen=True)
class OutOfFold:
    """Probabilities of rows by models that have not seen them: of all labels, or of the best of each row.

    Args:
        probability: ``(rows, n_labels)``; or ``(rows, m)`` where `index` is given.
        index: None, or the labels of the probabilities, padded with -1.
    """

    probability: Tensor
    index: Tensor | None

    def save(self, run: RunFolder) -> None:
        """Write ``out_of_fold.safetensors``."""
        held = {"probability": self.probability} | ({} if self.index is None else {"index": self.index})
        run.write_tensors(FILE, held)

    @classmethod
    def load(cls, run: RunFolder, rows: int, n_labels: int) -> OutOfFold:
        """Read ``out_of_fold.safetensors`` and check it."""
        if not (run / FILE).exists():
            raise RunError(
                f"{run.path}: has no out-of-fold scores. Train with --folds 5, or give the file of rows: lastlayer "
                "suggest FILE."
            )
        held = run.read_tensors(FILE)
        probability, index = held.get("probability"), held.get("index")
        if probability is None or probability.ndim != 2 or not probability.is_floating_point():
            raise damaged(run / FILE, "must hold `probability`, rows x labels")
        if len(probability) != rows or (index is None and probability.shape[1] != n_labels):
            raise damaged(run / FILE, f"must hold {rows} rows and {n_labels} labels")
        if index is not None and (index.shape != probability.shape or bool((index >= n_labels).any())):
            raise damaged(run / FILE, f"`index` must have the shape of `probability` and be below {n_labels}")
        return cls(probability, index)


class Collector:
    """Gathers out-of-fold probabilities, a part of the rows at a time."""

    def __init__(self, rows: int, n_labels: int) -> None:
        self.dense = rows * n_labels <= DENSE
        width = n_labels if self.dense else min(LISTED, n_labels)
        self.probability = torch.zeros(rows, width)
        self.index = None if self.dense else torch.full((rows, width), -1, dtype=torch.int64)

    def add(self, rows: np.ndarray, probability: Tensor, index: Tensor | None = None) -> None:
        """Take the probabilities of some rows: of all labels, or with the labels that they belong to."""
        at, probability = torch.from_numpy(np.asarray(rows, np.int64)), probability.float().cpu()
        if self.index is None:
            whole = probability if index is None else self._spread(probability, index.cpu())
            self.probability[at] = whole
            return
        width = min(self.probability.shape[1], probability.shape[1])
        best = probability.topk(width)
        place = best.indices if index is None else index.cpu().gather(1, best.indices)
        self.probability[at[:, None], torch.arange(width)] = best.values
        self.index[at[:, None], torch.arange(width)] = place

    def _spread(self, probability: Tensor, index: Tensor) -> Tensor:
        n = self.probability.shape[1]
        out = torch.zeros(len(probability), n + 1)
        return out.scatter_(1, torch.where(index < 0, n, index), probability)[:, :n]

    def found(self) -> OutOfFold:
        """Return what was gathered."""
        return OutOfFold(self.probability, self.index)


def out_of_fold(
    data: LabelData,
    *,
    folds: int = 5,
    seed: int = 0,
    config: Config | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> OutOfFold:
    """Score each row by logistic regressions, one per label, that were fitted to the rows of the other folds.

    Args:
        data: Rows with labels. Groups stay together.
        folds: The number of folds, at least 2.
        seed: Another seed makes other folds.
        config: How rows become features; None is the default.
        say: Called with a line after each fold.

    Returns:
        The probabilities.
    """
    from lastlayer.train.linear import fit_linear

    if not len(data.indices):
        raise DataError("no row has a label, so there is nothing to learn from.")
    fold = fold_rows(data, folds, seed=seed)
    config = config or Config()
    collected = Collector(len(data), data.n_labels)
    for i in range(folds):
        inside, outside = np.flatnonzero(fold != i), np.flatnonzero(fold == i)
        train, held = data.take(inside), data.take(outside)
        try:
            features = FeatureMap.fit(train, config)
        except DataError as error:
            raise DataError(
                f"{error} `lastlayer train FILE --folds {folds}` has settings; suggest from its run."
            ) from None
        model = fit_linear(features(train), train, loss="logistic", C=COST, n_labels=data.n_labels, tolerance=0.1)
        for at, logits in _logits(model, features(held)):
            collected.add(outside[at], torch.from_numpy(logits).sigmoid())
        say(f"fold {i + 1} of {folds}: {len(inside)} rows to learn from, {len(outside)} scored")
    return collected.found()


def _logits(model: Any, x: Any) -> Iterator[tuple[slice, np.ndarray]]:
    weight = model.matrix().T.tocsr()
    size = max(CHUNK // max(model.n_labels, 1), 1)
    for at in range(0, x.shape[0], size):
        part = x[at : at + size] @ weight
        dense = part.toarray() if hasattr(part, "toarray") else np.asarray(part)
        yield slice(at, at + size), (dense + model.intercept).astype(np.float32)


def suggest(
    data: LabelData,
    scores: OutOfFold,
    *,
    observed: float | None = None,
    kind: Literal["both", "missing", "wrong"] = "both",
    n: int | None = None,
    balanced: bool = False,
) -> LabelSuggestions:
    """Return the labels to look at; the arguments are those of :func:`lastlayer.suggest_labels`."""
    from lastlayer._check import label_lists

    target = label_lists(torch.from_numpy(data.padded(np.arange(len(data)))))
    lists: dict[str, Any] = {} if scores.index is None else {"indices": scores.index, "n_classes": data.n_labels}
    options: dict[str, Any] = {"observed": observed, "kind": kind, "n": n, "balanced": balanced}
    return suggest_labels(scores.probability, target, **options, **lists)
