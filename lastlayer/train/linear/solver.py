"""Exact linear models, one per label: L2-regularised squared hinge or logistic loss by dual coordinate descent."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import scipy.sparse as sp

from lastlayer._native import linear as native
from lastlayer.train.linear import plain
from lastlayer.train.linear.rows import LabelRows, check_label_weight, check_labels, check_row_weight, check_rows

Loss = Literal["squared_hinge", "logistic"]
Impl = Literal["auto", "native", "numpy"]
Progress = Callable[[int, int], Any]


@dataclass(frozen=True)
class LinearWeights:
    """The weights of linear classifiers, one per label, with those that were cut left out.

    The weights of label l are ``values[indptr[l]:indptr[l + 1]]`` at the features ``indices[...]``.

    Args:
        indptr: Where each label's weights start, one more than there are labels.
        indices: The features of the weights.
        values: The weights.
        intercept: One number per label, added to its scores.
        n_features: The number of features.
        C: The cost of errors that they were fitted with.
        passes: How often the rows were gone through for each label; negative where that was not enough.
    """

    indptr: np.ndarray
    indices: np.ndarray
    values: np.ndarray
    intercept: np.ndarray
    n_features: int
    C: float
    passes: np.ndarray

    @property
    def n_labels(self) -> int:
        """The number of labels."""
        return len(self.indptr) - 1

    def matrix(self) -> sp.csr_matrix:
        """Return the weights as a sparse matrix, labels x features."""
        return sp.csr_matrix((self.values, self.indices, self.indptr), shape=(self.n_labels, self.n_features))


def fit_linear(
    x: Any,
    y: Any,
    *,
    loss: Loss = "squared_hinge",
    C: float = 1.0,
    bias: float = 1.0,
    row_weight: Any = None,
    positive_weight: Any = 1.0,
    negative_weight: Any = 1.0,
    threshold: float = 0.0,
    tolerance: float = 0.01,
    max_passes: int = 1000,
    n_labels: int | None = None,
    seed: int = 0,
    threads: int | None = None,
    progress: Progress | None = None,
    impl: Impl = "auto",
) -> LinearWeights:
    r"""Fit one linear classifier per label.

    .. math:: \min_{w_l} \tfrac12 \|w_l\|^2 + C \sum_i s_i v_{il} \, \ell(y_{il} \, w_l \cdot [x_i, b])

    with :math:`\ell(m) = \max(0, 1 - m)^2` or :math:`\log(1 + e^{-m})`, row weights :math:`s_i`, and
    :math:`v_{il}` the weight of positive or of negative rows of the label. The objective is liblinear's: that of
    scikit-learn's ``LinearSVC(loss="squared_hinge", intercept_scaling=b)`` and
    ``LogisticRegression(solver="liblinear")`` for each label. The dual is solved by coordinate descent (Hsieh et al.
    2008; Yu, Huang and Lin 2011); `train.linear.plain` has the formulas.

    The answer is the same for any number of threads. Memory beside the rows is, per thread, that of 16 labels' weights
    and dual variables, and what is stored of the weights. A label all of whose rows are alike (none positive, or all)
    has no weights, and the intercept that is best without any.

    Args:
        x: Rows, a SciPy sparse matrix or an array, ``(rows, features)``. float64 is solved in float64, all else in
            float32.
        y: The labels of each row: :class:`lastlayer.data.LabelData`, a matrix of rows x labels, sparse or dense, or one
            list of label numbers per row. Nothing is made dense.
        loss: ``"squared_hinge"`` or ``"logistic"``.
        C: The cost of errors; a larger one fits the rows more closely.
        bias: The constant :math:`b` whose weight is the intercept, ``intercept_scaling`` in scikit-learn; 0 for none.
        row_weight: One number per row; rows with 0 are left out.
        positive_weight: The weight of positive rows, one number or one per label.
        negative_weight: The weight of negative rows, likewise.
        threshold: Weights smaller than this in size are cut.
        tolerance: When to stop: the largest slope of the dual minus the smallest, as `tol` in ``LinearSVC``.
        max_passes: The largest number of passes over the rows; a label that needs more gives a warning.
        n_labels: The number of labels, where `y` does not tell.
        seed: Of the order in which rows are visited.
        threads: The number of threads; None is one per processor.
        progress: Called now and then with the labels solved and to be solved, from the thread of the caller.
        impl: ``"native"``, compiled; ``"numpy"``, some hundred times slower; ``"auto"`` is the former where there is
            one.

    Returns:
        The weights.

    Example:
        >>> import numpy as np
        >>> from lastlayer.train.linear import fit_linear
        >>> x = np.array([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0], [0.0, 2.0]])
        >>> found = fit_linear(x, [[1], [0], [0, 1], [1]], tolerance=1e-6)
        >>> np.round(found.matrix().toarray(), 3), np.round(found.intercept, 3)
        (array([[ 1.047, -0.403],
               [-0.314,  1.02 ]]), array([-0.107, -0.118]))
    """
    options = {"row_weight": row_weight, "positive_weight": positive_weight, "negative_weight": negative_weight}
    found = fit_path(
        x,
        y,
        costs=[C],
        loss=loss,
        bias=bias,
        threshold=threshold,
        tolerance=tolerance,
        max_passes=max_passes,
        n_labels=n_labels,
        seed=seed,
        threads=threads,
        progress=progress,
        impl=impl,
        op="fit_linear",
        **options,
    )
    return found[0]


def fit_path(
    x: Any,
    y: Any,
    *,
    costs: Sequence[float],
    loss: Loss = "squared_hinge",
    bias: float = 1.0,
    row_weight: Any = None,
    positive_weight: Any = 1.0,
    negative_weight: Any = 1.0,
    threshold: float = 0.0,
    tolerance: float = 0.01,
    max_passes: int = 1000,
    n_labels: int | None = None,
    seed: int = 0,
    threads: int | None = None,
    progress: Progress | None = None,
    impl: Impl = "auto",
    op: str = "fit_path",
) -> list[LinearWeights]:
    """Fit the classifiers of :func:`fit_linear` for several C, each from the solution of the one before.

    Args:
        x: As for :func:`fit_linear`, which documents the other arguments.
        y: Likewise.
        costs: The values of C, increasing.
        loss: Likewise, as all that follow.
        bias: ...
        row_weight: ...
        positive_weight: ...
        negative_weight: ...
        threshold: ...
        tolerance: ...
        max_passes: ...
        n_labels: ...
        seed: ...
        threads: ...
        progress: ...
        impl: ...
        op: The name in messages.

    Returns:
        The weights for each C.
    """
    x = check_rows(op, x)
    labels = check_labels(op, y, x.shape[0], n_labels)
    weight = check_row_weight(op, row_weight, x.shape[0])
    rows = None
    if weight is not None and (weight == 0).any():
        rows = np.flatnonzero(weight).astype(np.int32)
    problem = Problems(np.array([0, labels.n_labels]), labels, None if rows is None else np.array([0, len(rows)]), rows)
    return solve_problems(
        x,
        problem,
        costs=costs,
        loss=loss,
        bias=bias,
        row_weight=weight,
        positive_weight=positive_weight,
        negative_weight=negative_weight,
        threshold=threshold,
        tolerance=tolerance,
        max_passes=max_passes,
        seed=seed,
        threads=threads,
        progress=progress,
        impl=impl,
        op=op,
    )


@dataclass(frozen=True)
class Problems:
    """Sets of rows, each with labels of its own.

    Args:
        label_start: Where the labels of each problem start; all labels are numbered one problem after the other.
        labels: The rows of each label; those that are no rows of its problem are ignored.
        row_start: Where the rows of each problem start in `rows`; None for all rows.
        rows: The rows of the problems, distinct within each.
    """

    label_start: np.ndarray
    labels: LabelRows
    row_start: np.ndarray | None = None
    rows: np.ndarray | None = None


def solve_problems(
    x: Any,
    problems: Problems,
    *,
    costs: Sequence[float],
    loss: Loss,
    bias: float,
    row_weight: np.ndarray | None,
    positive_weight: Any,
    negative_weight: Any,
    threshold: float,
    tolerance: float,
    max_passes: int,
    seed: int,
    threads: int | None,
    progress: Progress | None,
    impl: Impl,
    op: str,
) -> list[LinearWeights]:
    """Solve several problems on rows that `check_rows` returned; the arguments are those of :func:`fit_linear`."""
    labels = problems.labels
    path = _check_numbers(op, costs, loss, bias, threshold, tolerance, max_passes, threads, impl)
    counts = np.zeros(labels.n_labels, np.int64) + labels.counts()
    owner = np.repeat(np.arange(len(problems.label_start) - 1), np.diff(problems.label_start))
    sparse = sp.issparse(x)
    arrays: dict[str, np.ndarray | None] = {
        "indptr": _as(x.indptr, np.int64) if sparse else None,
        "indices": _as(x.indices, np.int32) if sparse else None,
        "values": x.data if sparse else x,
        "row_weight": row_weight,
        "row_start": _as(problems.row_start, np.int64),
        "row_list": _as(problems.rows, np.int32),
        "label_start": _as(problems.label_start, np.int64),
        "order": np.lexsort((-counts, owner)).astype(np.int64),  # labels alike in size take about as many passes
        "positive_start": _as(labels.start, np.int64),
        "positives": _as(labels.rows, np.int32),
        "costs": path,
        "positive_weight": check_label_weight(op, "positive_weight", positive_weight, labels.n_labels),
        "negative_weight": check_label_weight(op, "negative_weight", negative_weight, labels.n_labels),
    }
    if impl == "auto":
        impl = "numpy" if native.unavailable() else "native"
    total = labels.n_labels * len(path)
    run = native.solve if impl == "native" else plain.solve
    found = run(
        arrays,
        shape=x.shape,
        loss=loss,
        bias=float(bias),
        threshold=float(threshold),
        tolerance=float(tolerance),
        max_passes=max_passes,
        seed=seed,
        threads=threads or os.cpu_count() or 1,
        progress=None if progress is None else lambda done: progress(done, total),
    )
    out = [LinearWeights(*one[:4], x.shape[1], float(cost), one[4]) for one, cost in zip(found, path, strict=True)]
    late = sum(int((one.passes < 0).sum()) for one in out)
    if late:
        warnings.warn(
            f"{op}: {late} of {total} fits did not come within the tolerance {tolerance} in {max_passes} passes. "
            "Scale the features, lower `C`, or raise `max_passes`.",
            stacklevel=3,
        )
    return out


def _as(array: np.ndarray | None, dtype: Any) -> np.ndarray | None:
    return None if array is None else np.ascontiguousarray(array, dtype)


def _check_numbers(
    op: str,
    costs: Sequence[float],
    loss: str,
    bias: float,
    threshold: float,
    tolerance: float,
    max_passes: int,
    threads: int | None,
    impl: str,
) -> np.ndarray:
    """Check the numbers of a call and return the costs."""
    path = np.ascontiguousarray(costs, np.float64)
    if path.ndim != 1 or len(path) == 0:
        raise ValueError(f"{op}: `costs` must be a list of numbers, got {costs!r}.")
    if not (np.isfinite(path).all() and (path > 0).all()):
        wrong = path[~(np.isfinite(path) & (path > 0))][0]
        raise ValueError(
            f"{op}: `C` must be positive and finite, got {wrong}. Use a small C for strong regularisation."
        )
    if (np.diff(path) <= 0).any():
        raise ValueError(f"{op}: `costs` must increase, got {path.tolist()}. Sort them.")
    if loss not in native.LOSSES:
        raise ValueError(f"{op}: `loss` must be one of {', '.join(native.LOSSES)}, got {loss!r}.")
    if impl not in ("auto", "native", "numpy"):
        raise ValueError(f"{op}: `impl` must be auto, native or numpy, got {impl!r}.")
    for name, value, low in (("bias", bias, 0), ("threshold", threshold, 0)):
        if not low <= value < np.inf:
            raise ValueError(f"{op}: `{name}` must be at least {low} and finite, got {value}.")
    if not 0 < tolerance < np.inf:
        raise ValueError(f"{op}: `tolerance` must be positive and finite, got {tolerance}.")
    if max_passes < 1:
        raise ValueError(f"{op}: `max_passes` must be at least 1, got {max_passes}.")
    if threads is not None and threads < 1:
        raise ValueError(f"{op}: `threads` must be at least 1, got {threads}. Use None for one per processor.")
    return path
