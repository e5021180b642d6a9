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
            found = function(ranks.expand(len(best), -1), label_lists(lists), list(at), indices=best, reduction="none")
            for k, values in zip(at, found.numpy().T, strict=True):
                out[f"{name}@{k}"][rows] = values
    return out


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
