"""The value that every reader returns: rows, their label lists, and the names of the labels."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lastlayer.data.lines import Problems
from lastlayer.data.source import DataError


class NumberNames(Sequence[str]):
    """The names "0", "1", ... of labels without names; takes no memory, whatever a header declares."""

    def __init__(self, count: int) -> None:
        self.size = count

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        place = range(self.size)[index]
        return [str(i) for i in place] if isinstance(place, range) else str(place)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(other) == len(self) and all(a == b for a, b in zip(self, other))  # noqa: B905

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class LabelData:
    """Rows with label lists.

    Args:
        texts: One text per row, or None.
        features: A dense array or a SciPy CSR matrix with one line per row, or None.
        indptr: Where the labels of each row start in `indices`; one entry more than there are rows.
        indices: The labels of all rows, as positions in `label_names`; sorted and distinct within a row.
        label_names: The names of the labels.
        ids: One name per row, or None.
        groups: What a split must keep together (an author, a source), one per row, or None. An empty name is a group
            of its own.
        source: How the rows were read: the format, the options that read such a file again, and a sentence.
        problems: What was skipped.
        weights: One weight per row, finite and at least 0, or None: all rows count the same.
        rows: The number of each row in its file, from 0, or None: the rows are numbered as they come.

    Example:
        >>> from lastlayer.data import LabelData
        >>> data = LabelData.from_lists([["a", "b"], [], ["b"]], texts=["x", "y", "z"])
        >>> len(data), data.n_labels, data.label_counts().tolist()
        (3, 2, [1, 2])
    """

    texts: list[str] | None
    features: Any
    indptr: np.ndarray
    indices: np.ndarray
    label_names: Sequence[str]
    ids: list[str] | None = None
    groups: list[str] | None = None
    source: dict[str, Any] = field(default_factory=dict)
    problems: Problems = field(default_factory=Problems)
    weights: np.ndarray | None = None
    rows: np.ndarray | None = None

    @classmethod
    def from_lists(
        cls, lists: Sequence[Sequence[Any]], *, label_names: Sequence[str] | None = None, **fields: Any
    ) -> LabelData:
        """Make it from one list of label names per row; names not given are those found, sorted."""
        if label_names is None:
            label_names = sort_names({str(name) for row in lists for name in row})
        place = {name: i for i, name in enumerate(label_names)}
        rows = [sorted({place[str(name)] for name in row}) for row in lists]
        indptr = np.concatenate([[0], np.cumsum([len(r) for r in rows], dtype=np.int64)]).astype(np.int64)
        indices = np.array([i for r in rows for i in r], dtype=np.int64)
        return cls(fields.pop("texts", None), fields.pop("features", None), indptr, indices, label_names, **fields)

    def __post_init__(self) -> None:
        n = len(self.indptr) - 1
        for name in ("texts", "ids", "groups", "weights", "rows"):
            value = getattr(self, name)
            if value is not None and len(value) != n:
                raise DataError(f"LabelData: `{name}` must have one entry per row, {n}, got {len(value)}.")
        if self.features is not None and self.features.shape[0] != n:
            raise DataError(f"LabelData: `features` must have one line per row, {n}, got {self.features.shape[0]}.")
        indptr, indices = self.indptr, self.indices
        if n < 0 or indptr[0] != 0 or indptr[-1] != len(indices) or (n and int(np.diff(indptr).min()) < 0):
            raise DataError(f"LabelData: `indptr` must rise from 0 to the {len(indices)} `indices`.")
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < self.n_labels:
            raise DataError(f"LabelData: `indices` must be between 0 and {self.n_labels - 1}, got {_outside(self)}.")
        if self.weights is not None and not (np.isfinite(self.weights).all() and (self.weights >= 0).all()):
            raise DataError("LabelData: `weights` must be finite and at least 0.")

    def __len__(self) -> int:
        return len(self.indptr) - 1

    @property
    def n_labels(self) -> int:
        """The number of labels."""
        return len(self.label_names)

    def row_counts(self) -> np.ndarray:
        """Return the number of labels of each row."""
        return np.diff(self.indptr)

    def label_counts(self) -> np.ndarray:
        """Return the number of rows of each label."""
        return np.bincount(self.indices, minlength=self.n_labels)

    def row_labels(self, row: int) -> np.ndarray:
        """Return the labels of one row."""
        return self.indices[self.indptr[row] : self.indptr[row + 1]]

    def names(self, row: int) -> list[str]:
        """Return the names of the labels of one row."""
        return [self.label_names[i] for i in self.row_labels(row)]

    def take(self, rows: np.ndarray) -> LabelData:
        """Return the given rows, in that order."""
        rows = np.asarray(rows, dtype=np.int64)
        counts = self.row_counts()[rows]
        indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        place = np.repeat(self.indptr[rows] - indptr[:-1], counts) + np.arange(indptr[-1])
        columns = (self.texts, self.ids, self.groups)
        texts, ids, groups = (None if c is None else [c[i] for i in rows] for c in columns)
        features = None if self.features is None else self.features[rows]
        return replace(
            self,
            features=features,
            indptr=indptr,
            indices=self.indices[place],
            texts=texts,
            ids=ids,
            groups=groups,
            weights=None if self.weights is None else self.weights[rows],
            rows=self.row_numbers()[rows],
        )

    def row_numbers(self) -> np.ndarray:
        """Return the number of each row in its file, from 0."""
        return np.arange(len(self)) if self.rows is None else self.rows

    def unknown_labels(self, label_names: Sequence[str]) -> dict[str, int]:
        """Return the labels that are not among the given names, and how often each occurs, the most frequent first.

        Example:
            >>> from lastlayer.data import LabelData
            >>> LabelData.from_lists([["a", "b"], ["c"], ["b", "a"]]).unknown_labels(["a"])
            {'b': 2, 'c': 1}
        """
        if self.label_names is label_names:
            return {}
        known, counts = set(label_names), self.label_counts()
        counted = {self.label_names[i]: int(counts[i]) for i in np.flatnonzero(counts).tolist()}
        return dict(sorted(((n, c) for n, c in counted.items() if n not in known), key=lambda pair: -pair[1]))

    def with_labels(self, label_names: Sequence[str]) -> tuple[LabelData, int]:
        """Return the rows with labels named as given, and how many label occurrences had another name."""
        if self.label_names == label_names or list(self.label_names) == list(label_names):
            return replace(self, label_names=label_names), 0
        place = {name: i for i, name in enumerate(label_names)}
        to = np.array([place.get(name, -1) for name in self.label_names], dtype=np.int64)
        moved = to[self.indices] if len(self.indices) else self.indices
        rows = np.repeat(np.arange(len(self)), self.row_counts())[moved >= 0]
        kept = moved[moved >= 0]
        order = np.lexsort((kept, rows))
        indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(self)))]).astype(np.int64)
        return replace(self, indptr=indptr, indices=kept[order], label_names=label_names), int((moved < 0).sum())

    def padded(self, rows: np.ndarray) -> np.ndarray:
        """Return index lists padded with -1 for the given rows."""
        counts = self.row_counts()[rows]
        width = max(int(counts.max(initial=0)), 1)
        out = np.full((len(rows), width), -1, dtype=np.int64)
        where = np.arange(width) < counts[:, None]
        start = np.repeat(self.indptr[rows], counts)
        step = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        out[where] = self.indices[start + step]
        return out

    def fingerprint(self) -> str:
        """Return a SHA-256 of rows, labels, label names and weights."""
        digest = hashlib.sha256()
        for text in self.texts or []:
            digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
        for array in _arrays(self.features):
            digest.update(np.ascontiguousarray(array).tobytes())
        digest.update(self.indptr.tobytes() + self.indices.tobytes())
        digest.update("\0".join(self.label_names).encode("utf-8", "surrogatepass"))
        if self.weights is not None:
            digest.update(b"weights" + np.ascontiguousarray(self.weights, dtype=np.float64).tobytes())
        return digest.hexdigest()


def _outside(data: LabelData) -> int:
    return int(data.indices.min() if data.indices.min() < 0 else data.indices.max())


def _arrays(features: Any) -> Iterator[np.ndarray]:
    if features is None:
        return
    if isinstance(features, np.ndarray):
        yield features
    else:
        yield from (features.indptr, features.indices, features.data)


def sort_names(names: Any) -> list[str]:
    """Sort label names: as numbers if all are whole numbers, else as text."""
    names = list(names)
    if all(name.isascii() and name.isdigit() and len(name) < 19 for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)
