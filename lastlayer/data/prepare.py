"""Hide labels, the same way each time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lastlayer.data.labeldata import LabelData


def hide_labels(data: LabelData, keep: float, *, seed: int = 0) -> LabelData:
    """Keep each label with probability `keep`, independently; rows may be left without any.

    Example:
        >>> from lastlayer.data import LabelData, hide_labels
        >>> data = LabelData.from_lists([["a", "b"], ["a"], ["b", "c"]])
        >>> hide_labels(data, keep=0.5, seed=1).row_counts().tolist()
        [0, 1, 1]
    """
    if not 0 <= keep <= 1:
        raise ValueError(f"hide_labels: `keep` must be between 0 and 1, got {keep}.")
    kept = np.random.default_rng(seed).random(len(data.indices)) < keep
    return _only(data, kept)


def single_positive(data: LabelData, *, seed: int = 0) -> LabelData:
    """Keep one label per row, chosen at random; rows without labels stay so.

    Example:
        >>> from lastlayer.data import LabelData, single_positive
        >>> single_positive(LabelData.from_lists([["a", "b"], [], ["c"]])).row_counts().tolist()
        [1, 0, 1]
    """
    counts = data.row_counts()
    pick = (np.random.default_rng(seed).random(len(data)) * counts).astype(np.int64) + data.indptr[:-1]
    kept = np.zeros(len(data.indices), dtype=bool)
    kept[pick[counts > 0]] = True
    return _only(data, kept)


def _only(data: LabelData, kept: np.ndarray) -> LabelData:
    sums = np.concatenate([[0], np.cumsum(kept)])
    return replace(data, indptr=sums[data.indptr], indices=data.indices[kept])
