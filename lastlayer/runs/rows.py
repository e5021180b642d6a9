"""Metrics of single rows, from their best labels and true labels as ragged lists; memory grows with the rows alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from lastlayer._check import label_lists
from lastlayer.metrics.at_k import ndcg_at_k, precision_at_k, recall_at_k

AT_K: dict[str, Callable[..., Tensor]] = {"precision": precision_at_k, "recall": recall_at_k, "ndcg": ndcg_at_k}
CELLS = 1 << 20  # entries of the padded lists that are held at a time


def hits(top_index: np.ndarray, indptr: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return whether each of the best labels is a true one.

    Args:
        top_index: The best labels of each row, ``(n, m)``, -1 padded.
        indptr: Where the true labels of each row start in `index`, ``(n + 1,)``.
        index: The true labels of all rows.
    """
    wide = int(max(top_index.max(initial=0), index.max(initial=0))) + 1
    row = np.arange(len(top_index))
    true = np.repeat(row, np.diff(indptr)) * wide + index
    return np.isin(row[:, None] * wide + top_index, true) & (top_index >= 0)


def row_metrics(
    top_index: np.ndarray, indptr: np.ndarray, index: np.ndarray, at: Sequence[int]
) -> dict[str, np.ndarray]:
    """Return precision, recall and nDCG at each k for each row; nan for a row without labels.

    Args:
        top_index: The best labels of each row, best first, ``(n, m)``, -1 padded.
        indptr: Where the true labels of each row start in `index`, ``(n + 1,)``.
        index: The true labels of all rows.
        at: The k.
    """
    n, most = top_index.shape
    ranks = torch.arange(most, 0, -1, dtype=torch.float64)  # any falling scores: the order is given
    out = {f"{name}@{k}": np.full(n, np.nan) for k in at for name in AT_K}
    for rows, lists in _padded(indptr, index):
        best = torch.from_numpy(top_index[rows])
        for name, function in AT_K.items():
            measured = function(
                ranks.expand(len(best), -1), label_lists(lists), list(at), indices=best, reduction="none"
            )
            for k, values in zip(at, measured.numpy().T, strict=True):
                out[f"{name}@{k}"][rows] = values
    return out


def set_counts(
    set_indptr: np.ndarray, set_index: np.ndarray, indptr: np.ndarray, index: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of right, predicted and true labels of each row, ``(n, 3)``, and which predictions are right.

    Args:
        set_indptr: Where the predicted labels of each row start in `set_index`, ``(n + 1,)``.
        set_index: The predicted labels of all rows.
        indptr: Where the true labels of each row start in `index`, ``(n + 1,)``.
        index: The true labels of all rows.
    """
    n = len(indptr) - 1
    wide = int(max(set_index.max(initial=0), index.max(initial=0))) + 1
    row = np.repeat(np.arange(n), np.diff(set_indptr))
    right = np.isin(row * wide + set_index, np.repeat(np.arange(n), np.diff(indptr)) * wide + index)
    counts = [np.bincount(row[right], minlength=n), np.diff(set_indptr), np.diff(indptr)]
    return np.stack(counts, -1).astype(np.float64), right


def set_rows(counts: np.ndarray, n_labels: int) -> dict[str, np.ndarray]:
    """Return sample-F1, Hamming loss and exact match of each row; F1 is nan where there is nothing to find or say."""
    right, said, true = counts.T
    wrong = said + true - 2 * right
    with np.errstate(invalid="ignore", divide="ignore"):
        f1 = 2 * right / (said + true)
    return {"sample_f1": f1, "hamming_loss": wrong / max(n_labels, 1), "exact_match": (wrong == 0).astype(np.float64)}


def row_mean(values: np.ndarray, weight: np.ndarray | None = None) -> float:
    """Return the mean of the rows that have a value, by their weights if there are any; 0 if no row has one.

    Example:
        >>> row_mean(np.array([1.0, np.nan, 0.0]), np.array([3.0, 2.0, 1.0]))
        0.75
    """
    seen = np.isfinite(values) if weight is None else np.isfinite(values) & (weight > 0)
    if not seen.any():
        return 0.0
    return float(np.nanmean(values)) if weight is None else float(np.average(values[seen], weights=weight[seen]))


def set_metrics(
    set_indptr: np.ndarray,
    set_index: np.ndarray,
    indptr: np.ndarray,
    index: np.ndarray,
    n_labels: int,
    *,
    weight: np.ndarray | None = None,
) -> dict[str, float]:
    """Return micro-, macro- and sample-F1, Hamming loss and exact match of label sets.

    They are those of :mod:`lastlayer.metrics`: macro-F1 is the mean over the labels that some row has or is predicted
    to have. Rows count by `weight`, one number per row; None for 1.

    Example:
        >>> measured = set_metrics(np.array([0, 2]), np.array([0, 1]), np.array([0, 1]), np.array([1]), n_labels=3)
        >>> {name: round(value, 3) for name, value in measured.items()}
        {'micro_f1': 0.667, 'macro_f1': 0.5, 'sample_f1': 0.667, 'hamming_loss': 0.333, 'exact_match': 0.0}
    """
    counts, right = set_counts(set_indptr, set_index, indptr, index)
    by_row = np.ones(len(counts)) if weight is None else np.asarray(weight, np.float64)
    sums = by_row @ counts
    said, true = np.repeat(by_row, np.diff(set_indptr)), np.repeat(by_row, np.diff(indptr))
    parts = (set_index[right], said[right]), (set_index, said), (index, true)
    each = [np.bincount(part, own, minlength=n_labels) for part, own in parts]
    under = each[1] + each[2]
    macro = 2 * each[0][under > 0] / under[under > 0]
    rows = set_rows(counts, n_labels)
    return {
        "micro_f1": float(2 * sums[0] / (sums[1] + sums[2])) if sums[1] + sums[2] else 0.0,
        "macro_f1": float(macro.mean()) if len(macro) else 0.0,
        **{name: row_mean(values, weight) for name, values in rows.items()},
    }


def _padded(indptr: np.ndarray, index: np.ndarray) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of the rows with their true labels as index lists, each as wide as its own longest list."""
    n, at = len(indptr) - 1, 0
    counts = np.diff(indptr)
    while at < n:
        size = max(CELLS // max(int(counts[at : at + CELLS].max()), 1), 1)
        rows = slice(at, min(at + size, n))
        part = counts[rows]
        out = np.full((len(part), max(int(part.max()), 1)), -1, dtype=np.int64)
        out[np.arange(out.shape[1]) < part[:, None]] = index[indptr[rows.start] : indptr[rows.stop]]
        yield rows, torch.from_numpy(out)
        at = rows.stop
