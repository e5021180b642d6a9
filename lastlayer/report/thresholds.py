"""Precision and recall of each label by threshold, in few numbers: what the page's slider moves along."""

from __future__ import annotations

from typing import Any

import numpy as np

from lastlayer.runs.contents import Held, Run

LABELS = 500  # with a curve in the page, the most frequent ones
POINTS = 40  # of a label's curve


def curves(run: Run, order: list[int]) -> dict[str, Any] | None:
    """Return the curves of the first labels of `order`, or None without stored predictions.

    A point is ``threshold, labels predicted, of these right``, where a label is predicted at a probability of at
    least the threshold. Every point is an exact count. Points lie at the scores of the true labels, because precision
    only falls between them. Of more than POINTS, some spread over the curve are kept, and the one with the best F1.

    Args:
        run: A run.
        order: Labels, the most frequent first.

    Returns:
        ``{"stored", "points"}``: how many labels per row have a stored score, and one flat list of points per label.
    """
    if run.held is None or not len(run.held):
        return None
    held = run.held
    true = _Rows(held.index, np.repeat(np.arange(len(held)), np.diff(held.indptr)))
    best = None if held.probability is not None else _Rows(held.top_index.ravel(), np.arange(held.top_index.size))
    labels = []
    for label in order[:LABELS]:
        right = np.zeros(len(held), dtype=bool)
        right[true.of(label)] = True
        score, at = _scores(held, label, best)
        labels.append(_points(score, right[at], int(right.sum())))
    return {"stored": len(run.labels) if best is None else held.top_index.shape[1], "points": labels}


class _Rows:
    """Where each label occurs."""

    def __init__(self, labels: np.ndarray, places: np.ndarray) -> None:
        order = np.argsort(labels, kind="stable")
        self.labels, self.places = labels[order], places[order]

    def of(self, label: int) -> np.ndarray:
        first, last = np.searchsorted(self.labels, [label, label + 1])
        return self.places[first:last]


def _scores(held: Held, label: int, best: _Rows | None) -> tuple[np.ndarray, np.ndarray]:
    """A label's probabilities where they are stored, and the rows of these."""
    if best is None:
        assert held.probability is not None
        return np.nan_to_num(held.probability[:, label]), np.arange(len(held))
    at = best.of(label)
    return held.top_probability.ravel()[at], at // held.top_index.shape[1]


def _points(score: np.ndarray, true: np.ndarray, support: int) -> list[float]:
    order = np.argsort(-score, kind="stable")
    score, true = score[order], true[order]
    right, said = true.cumsum(), np.arange(1, len(true) + 1)
    at = np.flatnonzero(np.diff(score, append=-np.inf))  # of equal scores, all are predicted or none
    at = at[np.diff(right[at], prepend=0) > 0]
    if len(at) > POINTS:
        kept = np.linspace(0, len(at) - 1, POINTS).round().astype(int)
        best = (2 * right[at] / (said[at] + support)).argmax()
        at = at[np.union1d(kept, [best])]
    return [v for i in at.tolist() for v in (float(f"{score[i]:.4g}"), int(said[i]), int(right[i]))]
