"""From probabilities to label sets: the rule of ``--decide`` and its thresholds, tuned on held-out rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lastlayer._check import label_lists
from lastlayer.decode.recall import tune_recall
from lastlayer.runs import RunFolder
from lastlayer.runs.files import damaged
from lastlayer.train.decision_rule import parse

FILE = "decision.json"
FEW = 5  # positive held-out rows below which a label takes the common threshold
LOWEST = 0.01  # no threshold for F1 is lower, since that of the best F1 is half of it


@dataclass(frozen=True)
class Decision:
    """Which labels of a row are predicted.

    Args:
        rule: As in ``--decide``.
        threshold: A label is predicted if its probability is above this; one number, or one per label. None for the
            rule ``top_k``: the number of labels that the row is expected to have.
        rows: The number of held-out rows that the thresholds were tuned on.
    """

    rule: str
    threshold: np.ndarray | None = None
    rows: int = 0

    @classmethod
    def tune(
        cls,
        rule: str,
        probability: np.ndarray,
        hot: Any,
        *,
        observed: float = 0.0,
        weight: np.ndarray | None = None,
    ) -> Decision:
        """Choose the thresholds on held-out rows.

        Args:
            rule: As in ``--decide``.
            probability: Of each row and label, ``(rows, n_labels)`` float32.
            hot: A SciPy CSR matrix of the same shape with 1 for the labels of each row.
            observed: The share of the true labels that are written down; 0 for all. F1 and precision then count
                ``1 / observed`` true labels for each one that is written down.
            weight: One number per row; None for 1. Recall does not use it: its promise is one for rows that count
                the same.

        Example:
            >>> import scipy.sparse as sp
            >>> p = np.array([[0.9, 0.2], [0.6, 0.3], [0.4, 0.1]], np.float32)
            >>> decision = Decision.tune("micro_f1", p, sp.csr_matrix([[1, 0], [1, 0], [0, 0]]))
            >>> float(decision.threshold.round(3))
            0.5
        """
        name, value = parse(rule)
        if name == "top_k":
            return cls(rule)
        if name == "recall":
            assert value is not None
            threshold = tune_recall(torch.from_numpy(probability), label_lists(_lists(hot)), value).numpy()
            return cls(rule, threshold, len(probability))
        share = observed or 1.0
        hot = hot.tocsr().sorted_indices()
        row, column = np.nonzero(probability >= (LOWEST if name != "precision" else 0.0))
        p = probability[row, column]
        hit = np.asarray(hot[row, column]).ravel() > 0 if len(row) else np.zeros(0, bool)
        by_row = np.ones(len(probability)) if weight is None else np.asarray(weight, np.float64)
        by_label, each = np.repeat(by_row, np.diff(hot.indptr)), by_row[row]
        common = _cut(p, hit, each, float(by_label.sum()), share, value)
        if name != "macro_f1":
            return cls(rule, np.array(common, np.float32), len(probability))
        positives = np.bincount(hot.indices, minlength=hot.shape[1])
        totals = np.bincount(hot.indices, by_label, minlength=hot.shape[1])
        out = np.full(hot.shape[1], common, np.float32)
        order = np.argsort(column, kind="stable")
        ends = np.searchsorted(column[order], np.arange(hot.shape[1] + 1))
        for label in np.flatnonzero(positives >= FEW):
            own = order[ends[label] : ends[label + 1]]
            out[label] = _cut(p[own], hit[own], each[own], float(totals[label]), share, None)
        return cls(rule, out, len(probability))

    def per_label(self, n_labels: int) -> np.ndarray | None:
        """Return one threshold per label, or None for the rule ``top_k``."""
        if self.threshold is None:
            return None
        return np.broadcast_to(self.threshold, (n_labels,)).astype(np.float32)

    def words(self) -> str:
        """Return the rule and its thresholds in one line."""
        if self.threshold is None:
            return "label sets: as many labels as the row is expected to have"
        level = self.threshold
        if level.ndim == 0:
            text = f"one threshold, {float(level):.3f}"
        else:
            text = f"one threshold per label, {level.min():.3f} to {level.max():.3f}, median {np.median(level):.3f}"
        return f"label sets by {self.rule}: {text}, tuned on {self.rows} held-out rows"

    def save(self, run: RunFolder) -> None:
        """Write decision.json."""
        level = None if self.threshold is None else self.threshold.tolist()
        run.write_json(FILE, {"rule": self.rule, "threshold": level, "rows": self.rows})

    @classmethod
    def load(cls, run: RunFolder, n_labels: int) -> Decision | None:
        """Read decision.json; None for a run of an earlier version."""
        stored = run.read_optional(FILE)
        if not stored:
            return None
        try:
            level = stored["threshold"]
            with np.errstate(over="ignore"):
                threshold = None if level is None else np.asarray(level, np.float32)
            if threshold is not None and np.isinf(threshold).any():
                raise ValueError("must hold thresholds in the range of float32")
            if threshold is not None and threshold.shape not in ((), (n_labels,)):
                raise ValueError(f"must hold one threshold, or one per label ({n_labels})")
            if (threshold is None) != (parse(str(stored["rule"]))[0] == "top_k"):
                raise ValueError("the rule and the threshold do not fit")
            return cls(str(stored["rule"]), threshold, int(stored.get("rows", 0)))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise damaged(run / FILE, error) from None


def _cut(
    p: np.ndarray, hit: np.ndarray, weight: np.ndarray, total: float, share: float, precision: float | None
) -> float:
    """Return the threshold of the best F1, or the lowest one with the given precision; above all p if there is none."""
    order = np.argsort(-p, kind="stable")
    p, right = p[order], np.cumsum((weight * hit)[order])
    taken = share * np.cumsum(weight[order])
    is_cut = np.append(p[1:] < p[:-1], True) if len(p) else np.zeros(0, bool)
    if precision is None:
        merit = np.where(is_cut, 2 * right / (taken + total), -1)
    else:
        merit = np.where(is_cut & (right >= (precision - 1e-9) * taken), np.arange(1, len(p) + 1), -1)
    if not len(p) or merit.max() <= 0:
        return float(p[0]) if len(p) else 0.5
    best = int(merit.argmax())
    below = p[best + 1] if best + 1 < len(p) else min(LOWEST, p[best]) if precision is None else 0.0
    level = (float(p[best]) + float(below)) / 2
    return level if np.float32(level) < p[best] else float(np.nextafter(p[best], np.float32(0)))


def _lists(hot: Any) -> torch.Tensor:
    """Return the labels of each row of a CSR matrix, padded with -1."""
    counts = np.diff(hot.indptr)
    out = np.full((len(counts), max(int(counts.max(initial=0)), 1)), -1, np.int64)
    out[np.arange(out.shape[1]) < counts[:, None]] = hot.indices
    return torch.from_numpy(out)
