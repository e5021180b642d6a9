"""Rows as they are read, and the table they grow into."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lastlayer.data.labeldata import LabelData, NumberNames, sort_names
from lastlayer.data.lines import Problems
from lastlayer.data.source import DataError


class Row(NamedTuple):
    """One row of a file; what it does not say is None."""

    line: int
    text: str | None = None
    columns: Sequence[int] | None = None  # sparse features: positions and values
    value: Sequence[float] | None = None
    dense: Sequence[float] | None = None
    labels: Sequence[Any] | None = None  # names, or numbers where the label names are known beforehand
    id: str | None = None
    part: str | None = None  # "train", "valid", "test"
    group: str | None = None
    weight: float | None = None
    number: int | None = None  # its place among the rows of the file, from 0


class Table:
    """Grows row by row: compact arrays for numbers, nothing allocated for what a header declares."""

    def __init__(self, label_names: Sequence[str] | None = None, n_features: int | None = None) -> None:
        self.given_names, self.n_features = label_names, n_features
        self.texts: list[str] = []
        self.ids: list[str] = []
        self.groups: list[str] = []
        self.parts: list[str] = []
        self.weights: list[float] = []
        self.numbers = array("q")
        self.index, self.value, self.ends = array("q"), array("d"), array("q", [0])
        self.dense: list[np.ndarray] = []
        self.places: dict[str, int] = {}
        self.labels, self.label_ends = array("q"), array("q", [0])

    def __len__(self) -> int:
        return len(self.label_ends) - 1

    def add(self, row: Row) -> None:
        """Take a row."""
        if row.text is not None:
            self.texts.append(row.text)
        if row.id is not None:
            self.ids.append(row.id)
        if row.group is not None:
            self.groups.append(row.group)
        if row.part is not None:
            self.parts.append(row.part)
        if row.weight is not None:
            self.weights.append(row.weight)
        self.numbers.append(len(self.numbers) if row.number is None else row.number)
        if row.columns is not None and row.value is not None:
            self.index.extend(row.columns)
            self.value.extend(row.value)
            self.ends.append(len(self.index))
        if row.dense is not None:
            self.dense.append(_compact(row.dense))
        if self.given_names is not None:
            labels = sorted(set(row.labels or ()))
        else:
            labels = sorted({self.places.setdefault(str(name), len(self.places)) for name in row.labels or ()})
        self.labels.extend(labels)
        self.label_ends.append(len(self.labels))

    def build(self, path: Any, problems: Problems, source: dict[str, Any], shift: int = 0) -> LabelData:
        """Return the rows; `shift` is taken from feature positions (1-based files)."""
        n = len(self)
        indptr = np.array(self.label_ends, dtype=np.int64)
        indices = np.array(self.labels, dtype=np.int64)
        names: Sequence[str]
        if self.given_names is not None:
            names = self.given_names
        else:
            names = sort_names(self.places)
            if len(names):
                to = np.empty(len(names), dtype=np.int64)
                to[[self.places[name] for name in names]] = np.arange(len(names))
                rows = np.repeat(np.arange(n), np.diff(indptr))
                indices = to[indices]
                indices = indices[np.lexsort((indices, rows))]
        columns: dict[str, Any] = {"texts": self.texts, "ids": self.ids, "groups": self.groups, "weights": self.weights}
        for name, column in columns.items():
            if column and len(column) != n:
                raise DataError(f"{path}: {name[:-1]} is given for {len(column)} of {n} rows. Give it for all or none.")
        if self.weights:
            columns["weights"] = np.array(self.weights)
        return LabelData(
            rows=np.array(self.numbers, dtype=np.int64),
            features=self._features(path, n, shift),
            indptr=indptr,
            indices=indices,
            label_names=names,
            source=source,
            problems=problems,
            **{name: column if len(column) else None for name, column in columns.items()},
        )

    def by_part(self, path: Any, data: LabelData) -> dict[str, LabelData]:
        """Return the rows that were built by the part that each names, or as "all" if none does."""
        if not self.parts:
            return {"all": data}
        if len(self.parts) != len(data):
            raise DataError(
                f"{path}: split is given for {len(self.parts)} of {len(data)} rows. Give it for all or none."
            )
        where = np.array(self.parts)
        every = ("train", "valid", "test")
        return {part: data.take(np.flatnonzero(where == part)) for part in every if (where == part).any()}

    def _features(self, path: Any, n: int, shift: int) -> Any:
        if self.dense:
            widths = {len(row) for row in self.dense}
            if len(self.dense) != n or len(widths) != 1 or 0 in widths:
                raise DataError(f"{path}: all rows must have vectors of one length, got lengths {sorted(widths)[:5]}.")
            return np.stack(self.dense)
        if len(self.ends) == 1:
            return None
        if len(self.ends) != n + 1:
            raise DataError(f"{path}: features are given for {len(self.ends) - 1} of {n} rows.")
        import scipy.sparse as sp

        index = np.array(self.index, dtype=np.int64) - shift
        width = self.n_features if self.n_features is not None else int(index.max(initial=-1)) + 1
        if len(index) and not 0 <= index.min() <= index.max() < width:  # SciPy would write outside its arrays
            wrong = int(index.min() if index.min() < 0 else index.max())
            rule = "start at 1 (or be read with zero_based=True)" if wrong < 0 else f"be below {width + shift}"
            raise DataError(f"{path}: feature indices must {rule}, got {wrong + shift}.")
        value = np.array(self.value, dtype=np.float32)
        table = sp.csr_matrix((value, index, np.array(self.ends, dtype=np.int64)), shape=(n, max(width, 1)))
        table.sort_indices()
        return table


def _compact(numbers: Sequence[float]) -> np.ndarray:
    """Return numbers in float32, or in float64 where large ones, such as times, would lose the digits that differ."""
    whole = np.asarray(numbers, dtype=np.float64)
    short = whole.astype(np.float32)
    return whole if (np.abs(whole[short != whole]) >= 1 << 16).any() else short


def declared(path: Any, line: int, text: str, sizes: Sequence[int], most: int) -> None:
    """Refuse sizes in a header that no file can fill."""
    if any(size < 0 or size > most for size in sizes):
        raise DataError(f"{path}, line {line}: sizes must be between 0 and {most}, got {text[:80]!r}.")


def number_names(count: int) -> NumberNames:
    """Return names for labels that have none."""
    return NumberNames(count)
