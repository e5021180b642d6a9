"""Exact linear models, one per label: L2-regularised squared hinge or logistic loss by dual coordinate descent."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import scipy.sparse as sp

from lastlayer._native import linear as native
from lastlayer.train.linear import plain
from lastlayer.train.linear.rows import (
    LabelRows,
    check_label_weight,
    check_labels,
    check_row_weight,
    check_rows,
)

Loss = Literal["squared_hinge", "logistic"]
Impl = Literal["auto", "native", "numpy"]
Progress = Callable[[int, int], Any]
BLOCK = 16  # labels that are solved at once (8 in float64)


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

    def take(self, labels: np.ndarray) -> LinearWeights:
        """Return the weights of the given labels, in that order."""
        indptr = np.append(0, np.cumsum(np.diff(self.indptr)[labels])).astype(np.int64)
        edges = list(zip(self.indptr[labels].tolist(), self.indptr[labels + 1].tolist(), strict=True))
        indices, values = (np.concatenate([a[:0], *(a[i:j] for i, j in edges)]) for a in (self.indices, self.values))
        return LinearWeights(
            indptr, indices, values, self.intercept[labels], self.n_features, self.C, self.passes[labels]
        )

    @staticmethod
    def join(parts: Sequence[LinearWeights]) -> LinearWeights:
        """Return the labels of all parts, one part after the other."""
        ends = np.cumsum([0, *(part.indptr[-1] for part in parts)])
        starts = [part.indptr[:-1] + end for part, end in zip(parts, ends, strict=False)]
        indptr = np.concatenate([*starts, ends[-1:]]).astype(np.int64)
        columns = (
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("indices", "values", "intercept", "passes")
        )
        indices, values, intercept, passes = columns
        return LinearWeights(indptr, indices, values, intercept, parts[0].n_features, parts[0].C, passes)


@dataclass(frozen=True)
class SolverSettings:
    """How the solver works; :func:`fit_linear` documents the fields."""

    loss: Loss = "squared_hinge"
    bias: float = 1.0
    threshold: float = 0.0
    tolerance: float = 0.01
    max_passes: int = 1000
    seed: int = 0
    threads: int | None = None
    impl: Impl = "auto"

    def check(self, op: str, costs: Sequence[float]) -> np.ndarray:
        """Check the fields and return the costs as an array."""
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
        if self.loss not in native.LOSSES:
            raise ValueError(f"{op}: `loss` must be one of {', '.join(native.LOSSES)}, got {self.loss!r}.")
        if self.impl not in ("auto", "native", "numpy"):
            raise ValueError(f"{op}: `impl` must be auto, native or numpy, got {self.impl!r}.")
        for name in ("bias", "threshold"):
            if not 0 <= getattr(self, name) < np.inf:
                raise ValueError(f"{op}: `{name}` must be at least 0 and finite, got {getattr(self, name)}.")
        if not 0 < self.tolerance < np.inf:
            raise ValueError(f"{op}: `tolerance` must be positive and finite, got {self.tolerance}.")
        if self.max_passes < 1:
            raise ValueError(f"{op}: `max_passes` must be at least 1, got {self.max_passes}.")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"{op}: `threads` must be at least 1, got {self.threads}. Use None for one per processor.")
        return path


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

    The answer is the same for any number of threads. Memory beyond the rows is, per thread, that of 16 labels' weights
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
        >>> weights = fit_linear(x, [[1], [0], [0, 1], [1]], tolerance=1e-6)
        >>> np.round(weights.matrix().toarray(), 3), np.round(weights.intercept, 3)
        (array([[ 1.047, -0.403],
               [-0.314,  1.02 ]]), array([-0.107, -0.118]))
    """
    settings = SolverSettings(loss, bias, threshold, tolerance, max_passes, seed, threads, impl)
    weights = Weighting(row_weight, positive_weight, negative_weight)
    return fit_path(x, y, [C], settings, weights, n_labels=n_labels, progress=progress, op="fit_linear")[0]


@dataclass(frozen=True)
class Weighting:
    """How much rows and labels count; :func:`fit_linear` documents the fields."""

    row: Any = None
    positive: Any = 1.0
    negative: Any = 1.0


def fit_path(
    x: Any,
    y: Any,
    costs: Sequence[float],
    settings: SolverSettings | None = None,
    weighting: Weighting | None = None,
    *,
    n_labels: int | None = None,
    progress: Progress | None = None,
    parallel: Any = None,
    op: str = "fit_path",
) -> list[LinearWeights]:
    """Fit the classifiers of :func:`fit_linear` for several C, each from the solution of the one before.

    Args:
        x: Rows, as for :func:`fit_linear`.
        y: Labels, likewise.
        costs: The values of C, increasing.
        settings: How to solve; by default as :func:`fit_linear` does.
        weighting: The weights of rows and labels; by default all 1.
        n_labels: The number of labels, where `y` does not tell.
        progress: Called now and then with the fits done and to be done.
        parallel: A ``joblib.Parallel``, whose workers then solve parts of the labels; the answer is the same.
        op: The name in messages.

    Returns:
        The weights for each C.

    Example:
        >>> import numpy as np
        >>> from lastlayer.train.linear import fit_path
        >>> path = fit_path(np.eye(3), [[0], [1], [0]], costs=[0.1, 1.0])
        >>> [(one.C, one.n_labels) for one in path]
        [(0.1, 2), (1.0, 2)]
    """
    settings, weighting = settings or SolverSettings(), weighting or Weighting()
    x = check_rows(op, x)
    labels = check_labels(op, y, x.shape[0], n_labels)
    row_weight = check_row_weight(op, weighting.row, x.shape[0])
    order = np.argsort(-labels.counts(), kind="stable")  # labels alike in size take about as many passes
    signs = [check_label_weight(op, f"{name}_weight", getattr(weighting, name), len(order))[order] for name in SIGNS]
    if row_weight is not None and (row_weight == 0).any():
        kept = np.flatnonzero(row_weight)
        x, labels, row_weight = x[kept], labels.among(kept, x.shape[0]), row_weight[kept]
    problems = Problems(_cut(len(order)), labels.take(order))
    path = solve_problems(
        x, problems, costs, settings, Weighting(row_weight, *signs), progress=progress, parallel=parallel, op=op
    )
    warn_unfinished(path, settings, op)
    back = np.argsort(order, kind="stable")
    return [one.take(back) for one in path]


SIGNS = ("positive", "negative")


def _cut(n_labels: int) -> np.ndarray:
    """Cut labels that share all rows into problems: whole blocks, about eight, with at most eight blocks each."""
    blocks = -(-n_labels // BLOCK)
    size = BLOCK * min(max(-(-blocks // 8), 1), 8)
    return np.append(np.arange(0, n_labels, size), n_labels)


@dataclass(frozen=True)
class Problems:
    """Sets of rows, each with labels of its own.

    Args:
        label_start: Where the labels of each problem start; all labels are numbered one problem after the other.
        labels: The rows of each label; those that are no rows of its problem are ignored.
        row_start: Where the rows of each problem start in `rows`; None where each problem has all rows.
        rows: The rows of the problems, distinct within each.
        offset: How many labels come before these, if they are a part of more.
    """

    label_start: np.ndarray
    labels: LabelRows
    row_start: np.ndarray | None = None
    rows: np.ndarray | None = None
    offset: int = 0

    def part(self, first: int, last: int) -> Problems:
        """Return some of the problems."""
        start, stop = (int(self.label_start[i]) for i in (first, last))
        row_start, rows = None, None
        if self.row_start is not None and self.rows is not None:
            a, b = (int(self.row_start[i]) for i in (first, last))
            row_start, rows = self.row_start[first : last + 1] - a, self.rows[a:b]
        labels = self.labels.take(np.arange(start, stop))
        return Problems(self.label_start[first : last + 1] - start, labels, row_start, rows, self.offset + start)

    def work(self) -> np.ndarray:
        """Return about how much work each problem is: its rows times its blocks of labels."""
        blocks = -(-np.diff(self.label_start) // BLOCK)
        return blocks if self.row_start is None else blocks * np.diff(self.row_start)


def solve_problems(
    x: Any,
    problems: Problems,
    costs: Sequence[float],
    settings: SolverSettings,
    weighting: Weighting,
    *,
    progress: Progress | None = None,
    parallel: Any = None,
    op: str,
) -> list[LinearWeights]:
    """Solve several problems on rows that `check_rows` returned; :func:`fit_path` documents the arguments."""
    settings.check(op, costs)
    if parallel is None:
        solutions = _solve(x, problems, costs, settings, weighting, progress, op)
    else:
        from joblib import delayed

        edges = _shares(problems.work(), 4 * max(getattr(parallel, "n_jobs", 1) or 1, 1))
        jobs = []
        for first, last in itertools.pairwise(edges):
            part = problems.part(first, last)
            share = slice(part.offset - problems.offset, part.offset - problems.offset + part.labels.n_labels)
            signs = [_some(getattr(weighting, name), share) for name in SIGNS]
            jobs.append(delayed(_solve)(x, part, costs, settings, Weighting(weighting.row, *signs), None, op))
        parts = list(parallel(jobs))
        solutions = [LinearWeights.join(step) for step in zip(*parts, strict=True)]
    return solutions


def warn_unfinished(solutions: Sequence[LinearWeights], settings: SolverSettings, op: str) -> None:
    """Warn if the solver ended fits before they were within the tolerance."""
    late, total = (sum(int(count(one.passes)) for one in solutions) for count in (lambda p: (p < 0).sum(), len))
    if late:
        warnings.warn(
            f"{op}: {late} of {total} fits did not come within the tolerance {settings.tolerance} in "
            f"{settings.max_passes} passes. Scale the features, lower `C`, or raise `max_passes`.",
            stacklevel=4,
        )


@cache
def warn_slow(reason: str) -> None:
    """Warn, once, that there is no compiled solver."""
    warnings.warn(
        f"the compiled solver of linear models cannot run here ({reason}); the one in numpy is used, which is some "
        "hundred times slower. Install a C compiler and then lastlayer again, or use --solver sgd.",
        stacklevel=2,
    )


def _shares(work: np.ndarray, count: int) -> list[int]:
    """Cut problems into at most `count` runs of about the same work."""
    ends = np.cumsum(work)
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, count) / count) if len(work) else []
    return sorted({0, *(int(cut) + 1 for cut in cuts if cut + 1 < len(work)), len(work)})


def _some(weight: Any, share: slice) -> Any:
    return weight if np.ndim(weight) == 0 else weight[share]


def _solve(
    x: Any,
    problems: Problems,
    costs: Sequence[float],
    settings: SolverSettings,
    weighting: Weighting,
    progress: Progress | None,
    op: str,
) -> list[LinearWeights]:
    labels = problems.labels
    path = settings.check(op, costs)
    owner = np.repeat(np.arange(len(problems.label_start) - 1), np.diff(problems.label_start))
    sparse = sp.issparse(x)
    arrays: dict[str, np.ndarray | None] = {
        "indptr": _as(x.indptr, np.int64) if sparse else None,
        "indices": _as(x.indices, np.int32) if sparse else None,
        "values": x.data if sparse else x,
        "row_weight": weighting.row,
        "row_start": _as(problems.row_start, np.int64),
        "row_list": _as(problems.rows, np.int32),
        "label_start": _as(problems.label_start, np.int64),
        "order": np.lexsort((-labels.counts(), owner)).astype(np.int64),
        "positive_start": _as(labels.start, np.int64),
        "positives": _as(labels.rows, np.int32),
        "costs": path,
        "positive_weight": check_label_weight(op, "positive_weight", weighting.positive, labels.n_labels),
        "negative_weight": check_label_weight(op, "negative_weight", weighting.negative, labels.n_labels),
    }
    impl = settings.impl
    if impl == "auto":
        impl = "numpy" if native.unavailable() else "native"
        if impl == "numpy":
            warn_slow(native.unavailable())
    total = labels.n_labels * len(path)
    run = native.solve if impl == "native" else plain.solve
    solved = run(
        arrays,
        shape=x.shape,
        loss=settings.loss,
        bias=float(settings.bias),
        threshold=float(settings.threshold),
        tolerance=float(settings.tolerance),
        max_passes=settings.max_passes,
        seed=settings.seed,
        offset=problems.offset,
        threads=settings.threads or os.cpu_count() or 1,
        progress=None if progress is None else lambda done: progress(done, total),
    )
    return [LinearWeights(*one[:4], x.shape[1], float(cost), one[4]) for one, cost in zip(solved, path, strict=True)]


def _as(array: np.ndarray | None, dtype: Any) -> np.ndarray | None:
    return None if array is None else np.ascontiguousarray(array, dtype)
