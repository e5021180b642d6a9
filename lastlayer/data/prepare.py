"""Hide labels and split rows, the same way each time."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
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
    """Keep one label a row, chosen at random; rows without labels stay so.

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


def split_rows(data: LabelData, fractions: Sequence[float], *, seed: int = 0) -> list[LabelData]:
    """Split rows by a hash of their group, id, text or features: a row's part does not depend on the other rows.

    Rows of a group, and equal rows, never straddle. The parts have about the given fractions of the rows.

    Args:
        data: The rows.
        fractions: The size of each part; they sum to 1.
        seed: Another seed is another split.

    Returns:
        One table a fraction.
    """
    if any(f < 0 for f in fractions) or abs(sum(fractions) - 1) > 1e-9:
        raise ValueError(f"split_rows: `fractions` must be positive and sum to 1, got {list(fractions)}.")
    place = np.array([_unit(f"{seed}:".encode() + key) for key in _keys(data)])
    part = np.searchsorted(np.cumsum(fractions)[:-1], place, side="right")
    return [data.take(np.flatnonzero(part == i)) for i in range(len(fractions))]


def _keys(data: LabelData) -> list[bytes]:
    for names in (data.groups, data.ids, data.texts):
        if names is not None:
            return [name.encode("utf-8", "surrogatepass") for name in names]
    if data.features is None:
        return [str(i).encode() for i in range(len(data))]
    if isinstance(data.features, np.ndarray):
        return [np.ascontiguousarray(row).tobytes() for row in data.features]
    x = data.features
    spans = zip(x.indptr[:-1], x.indptr[1:], strict=True)
    return [x.indices[a:b].astype(np.int64).tobytes() + x.data[a:b].tobytes() for a, b in spans]


def _unit(key: bytes) -> float:
    return int.from_bytes(hashlib.md5(key, usedforsecurity=False).digest()[:7], "big") / 2**56
