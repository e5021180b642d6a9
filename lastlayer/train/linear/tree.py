"""Label trees: linear classifiers at the nodes of trees of labels, for thousands of labels and more."""

from __future__ import annotations

import json
import numbers
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from lastlayer.train.linear import monotone
from lastlayer.train.linear.beam import LINKS, FittedTree, search
from lastlayer.train.linear.rows import LabelRows, check_labels, check_row_weight, check_rows
from lastlayer.train.linear.shape import TreeShape, cluster, label_vectors, unit_rows
from lastlayer.train.linear.solver import (
    Impl,
    LinearWeights,
    Loss,
    Problems,
    SolverSettings,
    Weighting,
    solve_problems,
    warn_unfinished,
)

FORMAT = 1
FEW_ROWS = 5000  # below this many rows every row is held out once for the calibration
GROUPED_ROWS = 10_000  # that are held out, part by part, where rows have groups: a few large groups may say much
BLOCK = 8192  # held-out rows that are scored at a time
LISTED = 10  # labels of each held-out row that the calibration uses
NEVER = -25.0  # log-odds of a child that no row reaches


def choose_tree(n_labels: int) -> bool:
    """Whether ``tree="auto"`` takes a label tree: from 4,000 labels on, where flat models get slow and large."""
    return n_labels >= 4000


@dataclass(frozen=True)
class TreeSettings:
    """How label trees are built, fitted and searched.

    Args:
        trees: The number of trees; the scores of a label are averaged over them.
        leaf: The largest number of labels in a node.
        branching: About the largest number of children of the nodes above.
        loss: The loss of the node classifiers, ``"squared_hinge"`` or ``"logistic"``.
        C: The cost of errors.
        bias: The constant feature, 0 for none.
        threshold: Weights smaller than this in size are cut.
        tolerance: When the solver stops.
        max_passes: The largest number of passes of the solver.
        beam: How many nodes are followed at each depth in prediction.
        calibration: The share of rows that are held out to calibrate the probabilities; all rows are fitted after that.
            0 leaves the scores as they are.
        observed: For incomplete labels, the share of the true labels that the rows carry: one number, or one per
            label. Probabilities are then those of the true labels: what the rows show, divided by this share.
        tail: Above 0, rare labels count more: the inverse propensity (Jain et al. 2016) to this power.
        normalize: Whether rows are scaled to unit length, in training and in prediction.
        seed: Of the clusters, the solver and the rows that are held out.
        threads: The number of threads; None is one per processor.
        impl: ``"native"``, ``"numpy"`` or ``"auto"``.
    """

    trees: int = 3
    leaf: int = 100
    branching: int = 32
    loss: Loss = "squared_hinge"
    C: float = 1.0
    bias: float = 1.0
    threshold: float = 0.1
    tolerance: float = 0.1
    max_passes: int = 100
    beam: int = 10
    calibration: float = 0.2
    observed: Any = None
    tail: float = 0.0
    normalize: bool = True
    seed: int = 0
    threads: int | None = None
    impl: Impl = "auto"

    def solver(self) -> SolverSettings:
        """Return the settings of the solver."""
        return SolverSettings(
            self.loss, self.bias, self.threshold, self.tolerance, self.max_passes, self.seed, self.threads, self.impl
        )

    def check(self, op: str) -> None:
        """Check the fields; the solver's own are checked first."""
        self.solver().check(op, [self.C])
        for name, least in (("trees", 1), ("leaf", 2), ("branching", 2), ("beam", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{op}: `{name}` must be at least {least}, got {getattr(self, name)}.")
        if not 0 <= self.calibration <= 0.5:
            raise ValueError(f"{op}: `calibration` must be a share of rows from 0 to 0.5, got {self.calibration}.")
        if not 0 <= self.tail < np.inf:
            raise ValueError(f"{op}: `tail` must be at least 0 and finite, got {self.tail}. Use 0 for no weights.")


@dataclass(frozen=True)
class LinearTree:
    """Label trees with their classifiers: :meth:`fit` or :meth:`load` makes one.

    The probability of a label is the product of the node probabilities along its path, averaged over the trees, and
    calibrated by an increasing map that was fitted on held-out rows.

    Args:
        trees: The trees.
        settings: What they were fitted with.
        n_labels: The number of labels.
        knots: The calibration: log-odds of scores in the first row, of probabilities in the second.
        calibration: What the held-out rows showed: ``rows``, ``ece_before`` and ``ece_after`` (of the five best labels,
            the map fitted on one half of the rows and measured on the other).

    Example:
        >>> import numpy as np
        >>> from lastlayer.train.linear import LinearTree, TreeSettings
        >>> x = np.repeat(np.eye(4, dtype="float32"), 10, axis=0)
        >>> tree = LinearTree.fit(x, [[i // 10] for i in range(40)], TreeSettings(leaf=2, branching=2))
        >>> tree.predict_proba(np.eye(4), k=1)[0].ravel().tolist()
        [0, 1, 2, 3]
    """

    trees: list[FittedTree]
    settings: TreeSettings
    n_labels: int
    knots: np.ndarray
    calibration: dict[str, float] = field(default_factory=dict)

    @property
    def n_features(self) -> int:
        """The number of features."""
        return self.trees[0].weights.n_features

    @property
    def n_weights(self) -> int:
        """The number of weights that are stored."""
        return sum(len(tree.weights.values) for tree in self.trees)

    @classmethod
    def fit(
        cls,
        x: Any,
        y: Any,
        settings: TreeSettings | None = None,
        *,
        hierarchy: Any = None,
        n_labels: int | None = None,
        row_weight: Any = None,
        groups: Any = None,
        parallel: Any = None,
        progress: Callable[[int, int], Any] | None = None,
    ) -> LinearTree:
        """Fit label trees.

        The answer is the same for any number of threads and workers. Memory grows with the values in `x`, the labels
        of the rows times the depth of the tree, and the weights.

        Args:
            x: Rows, a SciPy sparse matrix or an array, ``(rows, features)``; worked on in float32.
            y: Labels, as for :func:`fit_linear`.
            settings: How to fit.
            hierarchy: A :class:`lastlayer.LabelTree` that is used as it is; its leaves are the labels. There is one
                tree then.
            n_labels: The number of labels, where `y` does not tell.
            row_weight: One number per row; rows with 0 are left out.
            groups: One value per row. Rows of one group are held out together, so that the calibration is that for
                rows of new groups.
            parallel: A ``joblib.Parallel`` whose workers build trees and solve nodes.
            progress: Called now and then with the classifiers solved and to be solved.
        """
        op = "LinearTree.fit"
        settings = settings or TreeSettings()
        settings.check(op)
        x = _rows(op, x, normalize=settings.normalize)
        labels = check_labels(op, y, x.shape[0], n_labels)
        row_weight = check_row_weight(op, row_weight, x.shape[0])
        _observed(op, settings.observed, labels.n_labels)
        group = _groups(op, groups, x.shape[0])
        if row_weight is not None and (row_weight == 0).any():
            kept = np.flatnonzero(row_weight)
            group = _groups(op, group[kept], len(kept))
            x, labels, row_weight = x[kept], labels.among(kept, x.shape[0]), row_weight[kept]
        if x.shape[0] == 0 or labels.n_labels == 0:
            raise ValueError(
                f"{op}: `x` and `y` must have rows (of positive weight) and labels, got {x.shape[0]} and "
                f"{labels.n_labels}."
            )
        shapes = _shapes(op, x, labels, settings, hierarchy, parallel)
        held = _held_out(group, settings)
        report = _Progress(progress, sum(len(shape.child) for shape in shapes) * (len(held) + 1))
        fitter = _Fitter(settings, parallel, report)
        scores, hits = [], []
        for out in held:
            kept = np.setdiff1d(np.arange(x.shape[0]), out)
            trees = fitter.fit(x, labels.keep(kept, x.shape[0]), row_weight, shapes, kept)
            for some in np.array_split(out, -(-len(out) // BLOCK)):
                score, hit = _score_held_out(trees, x[some], labels.among(some, x.shape[0]), settings)
                scores.append(score)
                hits.append(hit)
        weight = None if row_weight is None or not held else row_weight[np.concatenate(held)]
        knots, quality = _calibrate(scores, hits, weight)
        return cls(fitter.fit(x, labels, row_weight, shapes), settings, labels.n_labels, knots, quality)

    def predict_proba(
        self, x: Any, k: int = 5, *, beam: int | None = None, threads: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the `k` most probable labels of each row and their probabilities.

        Args:
            x: Rows with the features of training.
            k: How many labels.
            beam: How many nodes are followed at each depth; None is that of the settings.
            threads: The number of threads; None is that of the settings.

        Returns:
            Label numbers, ``(rows, k)``, best first, padded with -1, and probabilities, padded with 0.
        """
        return self._probable("LinearTree.predict_proba", x, k, beam, threads)

    def decision_function(
        self, x: Any, k: int = 5, *, beam: int | None = None, threads: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return what :meth:`predict_proba` does with the log-odds of the probabilities, padded with -inf."""
        return self._scored("LinearTree.decision_function", x, k, beam, threads)

    def probabilities(self, x: Any) -> np.ndarray:
        """Return the probabilities of all labels, ``(rows, n_labels)``; every node is visited."""
        beam = max(tree.shape.n_nodes for tree in self.trees)
        index, p = self._probable("LinearTree.probabilities", x, self.n_labels, beam, None)
        out = np.zeros((len(index), self.n_labels + 1), np.float32)  # the last column takes the padding
        np.put_along_axis(out, index % (self.n_labels + 1), p, 1)
        return out[:, :-1]

    def _probable(
        self, op: str, x: Any, k: int, beam: int | None, threads: int | None
    ) -> tuple[np.ndarray, np.ndarray]:
        index, odds = self._scored(op, x, k, beam, threads)
        return index, (1 / (1 + np.exp(-odds.astype(np.float64)))).astype(np.float32)

    def _scored(self, op: str, x: Any, k: int, beam: int | None, threads: int | None) -> tuple[np.ndarray, np.ndarray]:
        for name, value in (("k", k), ("beam", self.settings.beam if beam is None else beam)):
            if isinstance(value, bool) or not isinstance(value, numbers.Integral):
                raise TypeError(f"{op}: `{name}` must be a whole number, got {value!r}.")
            if value < 1:
                raise ValueError(f"{op}: `{name}` must be at least 1, got {value}.")
        settings = self.settings
        rows = sp.csr_matrix(_rows(op, x, self.n_features, normalize=settings.normalize))
        index, score = search(
            self.trees,
            rows,
            loss=settings.loss,
            n_labels=self.n_labels,
            k=k if np.ndim(settings.observed) == 0 else min(4 * k, self.n_labels),  # the order may change
            beam=beam or settings.beam,
            threads=threads or settings.threads or 0,
            impl=settings.impl,
        )
        odds = monotone.apply_map(self.knots, monotone.log_odds(score)).astype(np.float32)
        odds[index < 0] = -np.inf
        share = _observed(op, settings.observed, self.n_labels)
        return (index, odds) if share is None else _complete(index, odds, share, k)

    def save(self, folder: str | Path) -> None:
        """Write ``tree.safetensors`` and ``tree.json`` into a folder."""
        from safetensors.numpy import save

        from lastlayer.runs.files import write_atomically

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {"knots": self.knots}
        settings = asdict(self.settings)
        if np.ndim(settings["observed"]):
            tensors["observed"], settings["observed"] = np.asarray(settings["observed"], np.float64), None
        for number, tree in enumerate(self.trees):
            arrays = {"child_start": tree.shape.child_start, "child": tree.shape.child}
            arrays |= {name: getattr(tree.weights, name) for name in _STORED}
            tensors |= {f"{number}.{name}": np.ascontiguousarray(array) for name, array in arrays.items()}
        info = {"format": FORMAT, "n_labels": self.n_labels, "n_features": self.n_features, "trees": len(self.trees)}
        text = json.dumps(info | {"settings": settings, "calibration": self.calibration}, indent=2)
        write_atomically(folder / "tree.safetensors", save(tensors))
        write_atomically(folder / "tree.json", text.encode())

    @classmethod
    def load(cls, folder: str | Path) -> LinearTree:
        """Read what :meth:`save` wrote; a damaged file is a ValueError that names it."""
        from safetensors.numpy import load_file

        from lastlayer.runs.files import in_range, whole_in_range
        from lastlayer.runs.forms import FORMS, mismatch

        about, stored = Path(folder) / "tree.json", Path(folder) / "tree.safetensors"
        with _whole(about):
            text = about.read_text(encoding="utf-8")
            info = dict(json.loads(text, parse_float=in_range, parse_int=whole_in_range))
            if (found := info["format"]) == FORMAT:
                if (why := mismatch(info, FORMS["tree.json"])) is not None:
                    raise ValueError(why)
                if info["trees"] < 1:
                    raise ValueError("`trees` must be at least 1")
                settings, numbers = TreeSettings(**info["settings"]), range(int(info["trees"]))
                n_labels, n_features, calibration = info["n_labels"], info["n_features"], info["calibration"]
                settings.check("LinearTree.load")
                _observed("LinearTree.load", settings.observed, n_labels)
        if found != FORMAT:
            raise ValueError(f"{about}: `format` must be {FORMAT}, got {found}. Update lastlayer.")
        with _whole(stored):
            tensors = load_file(stored)
            if "observed" in tensors:
                settings = replace(settings, observed=tensors["observed"])
            trees = []
            for number in numbers:
                arrays = {name: tensors[f"{number}.{name}"] for name in ("child_start", "child", *_STORED)}
                shape = TreeShape(arrays.pop("child_start"), arrays.pop("child"))
                trees.append(FittedTree(shape, LinearWeights(**arrays, n_features=n_features, C=settings.C)))
            return cls(trees, settings, n_labels, tensors["knots"], calibration)


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Name the file where what is read from it is not what was written."""
    from safetensors import SafetensorError

    try:
        yield
    except (KeyError, TypeError, ValueError, RecursionError, SafetensorError) as error:
        why = f"{error.args[0]} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())[:200]
        raise ValueError(
            f"{path}: damaged: {why.rstrip('.')}. Restore the file, or fit and save the tree again."
        ) from None


_STORED = ("indptr", "indices", "values", "intercept", "passes")


def _rows(op: str, x: Any, n_features: int | None = None, *, normalize: bool) -> Any:
    """Check the rows, in float32, and scale them; values that overflow float32 are refused as infinite."""
    if getattr(x, "dtype", None) == np.float64:
        with np.errstate(over="ignore"):
            x = x.astype(np.float32)
    x = check_rows(op, x, n_features)
    return unit_rows(x) if normalize else x


def _observed(op: str, observed: Any, n_labels: int) -> np.ndarray | None:
    """Return the share of each label that is observed."""
    if observed is None:
        return None
    share = np.asarray(observed, np.float64)
    if share.shape not in ((), (n_labels,)):
        raise ValueError(f"{op}: `observed` must be one number or one per label, {n_labels}, got shape {share.shape}.")
    if not ((share > 0) & (share <= 1)).all():
        wrong = share.ravel()[~((share > 0) & (share <= 1)).ravel()][0]
        raise ValueError(f"{op}: `observed` must be above 0 and at most 1, got {wrong}. Use 1 for complete labels.")
    return np.broadcast_to(share, (n_labels,))


def _complete(index: np.ndarray, odds: np.ndarray, share: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Turn the odds of observed labels into those of true labels, whose probability is higher by 1 / share."""
    p = np.minimum(1 / (1 + np.exp(-odds.astype(np.float64))) / share[index], 1 - 1e-7)
    with np.errstate(divide="ignore"):
        true = np.where(index < 0, -np.inf, np.log(p) - np.log1p(-p))
    order = np.argsort(-true, axis=1, kind="stable")[:, :k]
    out = np.full((len(index), k), -1), np.full((len(index), k), -np.inf, np.float32)
    out[0][:, : order.shape[1]] = np.take_along_axis(index, order, 1)
    out[1][:, : order.shape[1]] = np.take_along_axis(true, order, 1)
    return out


def _shapes(
    op: str, x: Any, labels: LabelRows, settings: TreeSettings, hierarchy: Any, parallel: Any
) -> list[TreeShape]:
    if hierarchy is not None:
        shape = hierarchy if isinstance(hierarchy, TreeShape) else TreeShape.from_parents(hierarchy.parents)
        leaves = int((shape.child >= 0).sum())
        if leaves != labels.n_labels:
            raise ValueError(
                f"{op}: `hierarchy` must have one leaf per label, {labels.n_labels}, got {leaves}. "
                "Name every label in it once."
            )
        return [shape]
    vectors = label_vectors(x, labels)
    options = [
        {"leaf": settings.leaf, "branching": settings.branching, "seed": settings.seed + number}
        for number in range(settings.trees if labels.n_labels > settings.leaf else 1)  # else all trees are the same
    ]
    if parallel is None:
        return [cluster(vectors, **option) for option in options]
    from joblib import delayed

    return list(parallel(delayed(cluster)(vectors, **option) for option in options))


def _groups(op: str, groups: Any, n_rows: int) -> np.ndarray:
    """Return the number of each row's group; without groups each row is one."""
    if groups is None:
        return np.arange(n_rows)
    if len(groups) != n_rows:
        raise ValueError(f"{op}: `groups` must have one value per row, {n_rows}, got {len(groups)}.")
    if any(all(isinstance(value, kind) for value in groups) for kind in (str, numbers.Real)):
        return np.unique(np.asarray(groups), return_inverse=True)[1].ravel()
    number: dict[Any, int] = {}  # of values of any kind: None beside names, or pairs
    return np.array([number.setdefault(value, len(number)) for value in groups], dtype=np.int64)


def _held_out(group: np.ndarray, settings: TreeSettings) -> list[np.ndarray]:
    """Return the sets of rows that are held out: one, or as many as it takes to hold out enough rows."""
    n_rows, sizes = len(group), np.bincount(group)
    if round(settings.calibration * n_rows) < 2 or len(sizes) < 2:
        return []
    order = np.random.default_rng(settings.seed).permutation(len(sizes))
    before = np.empty(len(sizes), np.int64)  # rows of the groups that come before, in random order
    before[order] = np.cumsum(sizes[order]) - sizes[order]
    if len(sizes) == n_rows and n_rows >= FEW_ROWS:
        return [np.flatnonzero(before[group] < round(settings.calibration * n_rows))]
    part = before[group] * max(2, round(1 / settings.calibration)) // n_rows
    held = [np.flatnonzero(part == number) for number in np.unique(part)]
    ends = np.cumsum([len(rows) for rows in held])
    return held[: 1 + int(np.searchsorted(ends, GROUPED_ROWS))]


def _score_held_out(
    trees: list[FittedTree], x: Any, labels: LabelRows, settings: TreeSettings
) -> tuple[np.ndarray, np.ndarray]:
    """Return the log-odds of the best labels of each row, and whether the row carries them; nan where there is none."""
    index, score = search(
        trees,
        sp.csr_matrix(x),
        loss=settings.loss,
        n_labels=labels.n_labels,
        k=min(LISTED, labels.n_labels),
        beam=settings.beam,
        threads=settings.threads or 0,
        impl=settings.impl,
    )
    start, carried = labels.by_row(x.shape[0])
    given = np.repeat(np.arange(x.shape[0]), np.diff(start)) * labels.n_labels + carried
    hit = np.isin(np.arange(len(index))[:, None] * labels.n_labels + index, given)
    return np.where(index >= 0, monotone.log_odds(score), np.nan), hit


def _calibrate(
    scores: list[np.ndarray], hits: list[np.ndarray], row_weight: np.ndarray | None
) -> tuple[np.ndarray, dict[str, float]]:
    """Return the map, and how well maps of one half of the rows do on the other; rows count by their weights."""
    ends = np.array([-monotone.LARGEST, monotone.LARGEST])
    if not scores:
        return np.stack([ends, ends]), {}
    score, hit = np.concatenate(scores), np.concatenate(hits)
    by_row = np.ones(len(score)) if row_weight is None else row_weight / row_weight.mean()
    weight, real = np.broadcast_to(by_row[:, None], score.shape), ~np.isnan(score)
    best = np.broadcast_to(np.arange(score.shape[1]) < 5, score.shape)
    half = np.broadcast_to(np.arange(len(score))[:, None] % 2 == 0, score.shape)
    odds = np.zeros(score.shape)
    for part in (half, ~half):
        other = real & ~part
        if other.any():
            knots = monotone.fit_map(score[other], hit[other], weight[other])
            odds[part] = monotone.apply_map(knots, np.nan_to_num(score[part]))
    used = real & best
    before, after = (
        monotone.calibration_error(1 / (1 + np.exp(-values[used])), hit[used], weight=weight[used])
        for values in (score, odds)
    )
    quality = {"rows": float(len(score)), "ece_before": before, "ece_after": after}
    return monotone.fit_map(score[real], hit[real], weight[real]), quality


class _Progress:
    """Adds the progress of several calls of the solver."""

    def __init__(self, report: Callable[[int, int], Any] | None, total: int) -> None:
        self.report, self.total, self.before = report, total, 0

    def __call__(self, done: int, _: int) -> None:
        if self.report is not None:
            self.report(self.before + done, self.total)

    def end(self, count: int) -> None:
        self.before += count
        self(0, 0)


@dataclass(frozen=True)
class _Fitter:
    """Fits the classifiers of trees whose shapes are known."""

    settings: TreeSettings
    parallel: Any
    report: _Progress

    def fit(
        self,
        x: Any,
        labels: LabelRows,
        row_weight: np.ndarray | None,
        shapes: list[TreeShape],
        rows: np.ndarray | None = None,
    ) -> list[FittedTree]:
        """Fit all trees on all rows, or on some, which alone carry labels then; nothing is copied."""
        settings, trees = self.settings, []
        solver = settings.solver() if self.parallel is None else replace(settings.solver(), threads=1)
        for shape in shapes:
            problems = shape.problems(labels, x.shape[0], rows)
            count = x.shape[0] if rows is None else len(rows)
            weighting = Weighting(row_weight, self._positive_weight(shape, labels, count), 1.0)
            (weights,) = solve_problems(
                x,
                problems,
                [settings.C],
                solver,
                weighting,
                progress=self.report,
                parallel=self.parallel,
                op="LinearTree.fit",
            )
            if (weights.passes < 0).mean() > 0.1:
                warn_unfinished([weights], solver, "LinearTree.fit")
            intercept = _settle(shape, problems, weights.intercept, settings.loss)
            trees.append(FittedTree(shape, replace(weights, intercept=intercept)))
            self.report.end(len(shape.child))
        return trees

    def _positive_weight(self, shape: TreeShape, labels: LabelRows, n_rows: int) -> Any:
        """Return the weight of positive rows for each child: larger for rare labels."""
        label, weight = shape.child >= 0, np.ones(len(shape.child))
        if self.settings.tail:
            rare = inverse_propensity(labels.counts(), n_rows)
            weight[label] = rare[shape.child[label]] ** self.settings.tail
        return weight


def inverse_propensity(counts: np.ndarray, n_rows: int) -> np.ndarray:
    """Return the inverse propensity of each label by its number of rows (Jain et al. 2016, A = 0.55, B = 1.5)."""
    return np.asarray(1 + max(np.log(max(n_rows, 1)) - 1, 0) * 2.5**0.55 * (counts + 1.5) ** -0.55)


def _settle(shape: TreeShape, problems: Problems, intercept: np.ndarray, loss: str) -> np.ndarray:
    """Set the intercepts of the children whose rows are all alike to what the counts say; they have no weights."""
    scale, offset = LINKS[loss]
    owner = shape.owner()
    assert problems.row_start is not None
    rows = np.diff(problems.row_start)[owner].astype(np.float64)
    positive = problems.labels.counts()
    odds = np.where(positive == 0, NEVER, np.log(rows + 1))
    odds[(owner > 0) & (np.diff(shape.child_start)[owner] == 1)] = monotone.LARGEST  # an only child has all the rows
    settled = (odds - offset) / scale
    return np.where((positive == 0) | (positive == rows), settled, intercept).astype(np.float32)
