"""The input of the linear models: rows as CSR or dense arrays, labels as lists of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp


class LabelRows(NamedTuple):
    """The rows of each label: those of label l are ``rows[start[l]:start[l + 1]]``, increasing and distinct."""

    start: np.ndarray
    rows: np.ndarray

    @property
    def n_labels(self) -> int:
        """The number of labels."""
        return len(self.start) - 1

    def counts(self) -> np.ndarray:
        """The number of rows of each label."""
        return np.diff(self.start)

    def take(self, labels: np.ndarray) -> LabelRows:
        """Return the given labels, in that order."""
        return LabelRows(*take_lists(self.start, self.rows, labels))

    def by_row(self, n_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the labels of each row as ``(start, labels)``."""
        return flip_lists(self.start, self.rows, n_rows)

    def keep(self, rows: np.ndarray, n_rows: int) -> LabelRows:
        """Return the labels without all rows but the given ones, which keep their numbers."""
        kept = np.zeros(n_rows, bool)
        kept[rows] = True
        left = kept[self.rows]
        return LabelRows(np.concatenate([[0], np.cumsum(left)])[self.start], self.rows[left])

    def among(self, rows: np.ndarray, n_rows: int) -> LabelRows:
        """Return the labels of the given rows (increasing), which are then numbered from 0."""
        place = np.full(n_rows, -1, np.int32)
        place[rows] = np.arange(len(rows), dtype=np.int32)
        place_of = place[self.rows]
        sums = np.concatenate([[0], np.cumsum(place_of >= 0)])
        return LabelRows(sums[self.start], place_of[place_of >= 0])


def take_lists(start: np.ndarray, items: np.ndarray, lists: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the given lists of those that lie one after the other in `items`."""
    counts = np.diff(start)[lists]
    out = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    place = np.repeat(start[lists] - out[:-1], counts) + np.arange(out[-1])
    return out, items[place]


def flip_lists(start: np.ndarray, items: np.ndarray, n_items: int) -> tuple[np.ndarray, np.ndarray]:
    """Turn lists of items into the lists that each item is in."""
    matrix = sp.csr_matrix((np.ones(len(items), np.int8), items, start), shape=(len(start) - 1, n_items)).tocsc()
    return matrix.indptr.astype(np.int64), matrix.indices.astype(np.int32)


def check_rows(op: str, x: Any, n_features: int | None = None) -> Any:
    """Return rows as a canonical CSR matrix or a contiguous array, of float32 or float64, with finite values."""
    sparse = sp.issparse(x)
    if not sparse:
        x = np.asarray(x)
        if x.ndim != 2 or x.dtype.kind not in "fiub":
            raise TypeError(
                f"{op}: `x` must be a SciPy sparse matrix or an array of numbers with two dimensions, got "
                f"{type(x).__name__} of shape {x.shape} and dtype {x.dtype}. Use one row per example."
            )
    if n_features is not None and x.shape[1] != n_features:
        raise ValueError(f"{op}: `x` must have {n_features} columns, got {x.shape[1]}. Use the features of training.")
    if x.shape[0] >= 2**31 - 1 or x.shape[1] >= 2**31 - 1:
        raise ValueError(f"{op}: `x` must have fewer than 2^31 - 1 rows and columns, got shape {x.shape}.")
    dtype = np.float64 if x.dtype == np.float64 else np.float32
    if sparse:
        if x.format in ("csr", "csc"):
            _check_compressed(op, x)
        given, x = x, sp.csr_matrix(x, dtype=dtype)
        if not x.has_canonical_format:
            x = x.copy() if x.data is getattr(given, "data", None) else x
            x.sum_duplicates()
    else:
        x = np.ascontiguousarray(x, dtype=dtype)
    values = x.data if sparse else x
    if (bad := _not_finite(values.ravel())) is not None:
        row = int(np.searchsorted(x.indptr, bad, side="right")) - 1 if sparse else int(bad) // x.shape[1]
        column = int(x.indices[bad]) if sparse else int(bad) % x.shape[1]
        raise ValueError(
            f"{op}: `x` must be finite, got {values.ravel()[bad]} in row {row}, column {column}. "
            "Replace such values or leave these rows out."
        )
    return x


def _check_compressed(op: str, x: Any) -> None:
    """Refuse places outside of the matrix, which SciPy does not look for and compiled code would read and write."""
    start, count = x.indptr, x.shape[x.format == "csr"]
    there = min(len(x.indices), len(x.data))
    if start[0] != 0 or start[-1] > there or (start[1:] < start[:-1]).any():
        raise ValueError(f"{op}: `x` must have an `indptr` that rises from 0 to {there} at most. Check its parts.")
    index = x.indices[: start[-1]]
    low, high = (int(index.min()), int(index.max())) if len(index) else (0, -1)
    if low < 0 or high >= count:
        raise ValueError(
            f"{op}: `x` must have indices from 0 to {count - 1}, got {min(low, 0) or high}. Check its shape."
        )


def _not_finite(values: np.ndarray, size: int = 1 << 20) -> int | None:
    """Return the place of the first value that is not finite."""
    for at in range(0, len(values), size):
        finite = np.isfinite(values[at : at + size])
        if not finite.all():
            return at + int(finite.argmin())
    return None


def check_labels(op: str, y: Any, n_rows: int, n_labels: int | None = None) -> LabelRows:
    """Return the rows of each label.

    `y` is a :class:`lastlayer.data.LabelData` or anything with ``indptr``, ``indices`` and ``n_labels``; a SciPy sparse
    matrix or an array of 0 and 1 (or of -1 and 1), rows x labels; or one list of label numbers per row.
    """
    if isinstance(y, LabelRows):
        start, rows = np.asarray(y.start, np.int64), np.ascontiguousarray(y.rows, np.int32)
        if len(rows) and not 0 <= rows.min() <= rows.max() < n_rows:
            raise ValueError(f"{op}: `y` must have rows below {n_rows}, got {int(rows.max())}. Use the rows of `x`.")
        return LabelRows(start, rows)
    if sp.issparse(y):
        _check_indicator(op, y)
        matrix = sp.csr_matrix(y > 0)
        matrix.eliminate_zeros()
        indptr, indices, count = matrix.indptr, matrix.indices, y.shape[1]
    elif hasattr(y, "indptr") and hasattr(y, "n_labels"):
        indptr, indices, count = y.indptr, y.indices, y.n_labels
    elif isinstance(y, np.ndarray) and y.ndim == 2:
        _check_indicator(op, y)
        matrix = sp.csr_matrix(y > 0)
        indptr, indices, count = matrix.indptr, matrix.indices, y.shape[1]
    elif isinstance(y, Sequence) and not any(isinstance(row, str) or not hasattr(row, "__len__") for row in y):
        indptr = np.concatenate([[0], np.cumsum([len(row) for row in y])])
        listed = np.array([label for row in y for label in row])
        if len(listed) and listed.dtype.kind not in "iu":
            raise TypeError(f"{op}: `y` must hold label numbers, got {listed.dtype}. Use whole numbers from 0 on.")
        indices = listed.astype(np.int64)
        count = n_labels if n_labels is not None else int(indices.max(initial=-1)) + 1
    else:
        raise TypeError(
            f"{op}: `y` must be label data, a matrix of rows x labels or lists of label numbers, got "
            f"{type(y).__name__}. Use one list per row."
        )
    count = count if n_labels is None else n_labels
    indptr, indices = np.asarray(indptr, np.int64), np.asarray(indices)
    if len(indptr) - 1 != n_rows:
        raise ValueError(f"{op}: `y` must have one entry per row of `x`, {n_rows}, got {len(indptr) - 1}.")
    if len(indices) and not 0 <= indices.min() <= indices.max() < count:
        wrong = indices.min() if indices.min() < 0 else indices.max()
        raise ValueError(f"{op}: `y` must hold label numbers from 0 to {count - 1}, got {int(wrong)}.")
    matrix = sp.csr_matrix((np.ones(len(indices), bool), indices, indptr), shape=(n_rows, count)).tocsc()
    matrix.sum_duplicates()
    return LabelRows(matrix.indptr.astype(np.int64), matrix.indices.astype(np.int32))


def _check_indicator(op: str, y: Any) -> None:
    """Refuse nan, and -1 beside 0, where it stands for unknown; beside 1 alone it is 0."""
    values = y.tocsr().data if sp.issparse(y) else y
    if values.dtype.kind not in "if" or not values.size or values.min() >= 0:
        return
    if np.isnan(values).any() or values.size < np.prod(y.shape) or (values == 0).any():
        raise ValueError(
            f"{op}: `y` must be a matrix of 0 and 1, or of -1 and 1, got {values.min()} as well. "
            "Leave rows with unknown labels out, or call them 0."
        )


def check_row_weight(op: str, weight: Any, n_rows: int, name: str = "row_weight") -> np.ndarray | None:
    """Return the weight of each row, or None where all are 1."""
    if weight is None:
        return None
    weights = np.ascontiguousarray(weight, np.float64)
    if weights.shape != (n_rows,):
        raise ValueError(f"{op}: `{name}` must have one number per row, {n_rows}, got shape {weights.shape}.")
    usable = np.isfinite(weights) & (weights >= 0)
    if not usable.all():
        raise ValueError(f"{op}: `{name}` must be finite and not negative, got {weights[~usable][0]}.")
    return weights


def check_label_weight(op: str, name: str, weight: Any, n_labels: int) -> np.ndarray:
    """Return one positive weight per label."""
    weight = np.asarray(weight, np.float64)
    if weight.shape not in ((), (n_labels,)):
        raise ValueError(f"{op}: `{name}` must be one number or one per label, {n_labels}, got shape {weight.shape}.")
    if not (np.isfinite(weight).all() and (weight > 0).all()):
        wrong = weight.ravel()[~(np.isfinite(weight) & (weight > 0)).ravel()][0]
        raise ValueError(f"{op}: `{name}` must be positive, got {wrong}. Use `row_weight` to leave rows out.")
    return np.ascontiguousarray(np.broadcast_to(weight, (n_labels,)))
