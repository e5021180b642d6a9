"""The scikit-learn estimator, on the same engine as the command line."""

from __future__ import annotations

import copy
import math
import numbers
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_array, check_random_state
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_is_fitted, validate_data

from lastlayer._check import label_lists
from lastlayer.data import LabelData
from lastlayer.data.labeldata import NumberNames
from lastlayer.hierarchy import LabelTree
from lastlayer.train import choose
from lastlayer.train.batches import EpochBatches, rows_to_input
from lastlayer.train.calibrate import Calibration, true_probability
from lastlayer.train.config import Config
from lastlayer.train.count import CountModel
from lastlayer.train.decide import Decision
from lastlayer.train.features import FeatureMap
from lastlayer.train.fit_network import quiet
from lastlayer.train.held_out import HeldOut, decided, with_share
from lastlayer.train.linear import LinearTree
from lastlayer.train.linear.rows import check_row_weight
from lastlayer.train.module import LabelSetData, LabelSetModule, fit_in_process
from lastlayer.train.network_scorer import build
from lastlayer.train.placement import Placement
from lastlayer.train.resolved import Resolved
from lastlayer.train.serve import odds
from lastlayer.train.tree_scorer import LISTED


class LabelSetClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Fit label sets, or single labels, with a linear model or a multi-layer network and any loss of the package.

    With an indicator matrix or one list of labels per row it is a multi-label classifier; with one label per row it is
    an ordinary one, trained for its top k. Inputs are dense or sparse. Rows without labels are allowed.

    Args:
        k: The expected number of labels per row, or ``"auto"``: the mean number of labels (1 for single labels; with
            incomplete labels the 90th percentile, but at most half of all labels unless the mean is above that), at
            least 0.5, or ``"predicted"``: a regression on the features predicts it for each row.
        loss: A loss by name: ``"squared_hinge"``, ``"binary"``, ``"lml"``, ``"two_way"``, ``"asymmetric"``, ... By
            default, ``"auto"``, a linear model for label sets takes the best of the first four on held-out rows;
            networks and single labels take ``"lml"``.
        loss_options: Its options, a dictionary.
        labels: ``"complete"``, or ``"incomplete"``: a label that is not given may still apply.
        observed: The share of true labels that are observed, or ``"auto"``.
        hidden: Widths of hidden layers; none is a linear model.
        dropout: Dropout after hidden layers.
        solver: ``"dual"``, the exact solver for ``"squared_hinge"`` and ``"binary"`` on linear models; ``"sgd"``,
            minibatches; or ``"auto"``: the former where it can be used and no setting of minibatches is given.
        C: The cost of errors for the exact solver; ``"auto"`` is the best of a path on held-out rows.
        label_weight: None, or ``"balanced"``: rows with and without a label weigh the same (exact solver).
        tree: The number of label trees, or ``"off"``; ``"auto"`` is 3 from 4,000 labels on, for linear models. A
            :class:`lastlayer.LabelTree` whose leaves are the labels is used as it is.
        calibrate: Whether to calibrate the probability of each label on held-out rows (exact solver and ``"auto"``).
        decide: How ``predict`` makes label sets: ``"micro_f1"``, ``"macro_f1"``, ``"recall=0.9"``, ``"precision=0.8"``
            tune thresholds on held-out rows, ``"top_k"`` takes the expected number of labels; ``"auto"`` is
            ``"micro_f1"`` where probabilities are calibrated and `k` is not given.
        epochs: Passes over the rows by minibatches, or ``"auto"``: 1600 divided by the square root of their number,
            at most 50 (up to 1,000 rows) and at least 8 (from 40,000 on).
        lr: The learning rate at its peak; ``"auto"`` follows the optimiser: 10, 0.05, or 0.005 with hidden layers.
        weight_decay: The weight decay, or ``"auto"``: 1e-5 with SGD, 0.01 (decoupled) with AdamW.
        batch_size: Rows per step.
        optimizer: ``"adamw"``, ``"sgd"``, or ``"auto"``: SGD for linear models on sparse rows, else AdamW.
        schedule: ``"cosine"`` or ``"constant"``.
        scale: ``"auto"`` (standardise dense, normalise sparse rows), ``"standard"``, ``"l2"`` or ``"none"``.
        threshold: ``predict`` returns labels that are at least this probable; by default those that `decide` tuned,
            or 0.5.
        random_state: The seed, or random state, for the order of rows, dropout and initial weights.

    Attributes:
        classes_: The labels: those of single labels and of lists, sorted; for an indicator the names of its columns
            where it is a DataFrame that has them, else their numbers.
        n_features_in_: The number of features.
        k_: The number of labels per row that the model expects; None if it is predicted.
        loss_: The loss that was used, or chosen.
        choice_: What was chosen and by how much, one line; empty if nothing was.

    Example:
        >>> import numpy as np
        >>> from lastlayer import LabelSetClassifier
        >>> X = np.array([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]] * 8)
        >>> Y = [["b"], ["a"], ["a", "b"], ["b"]] * 8
        >>> model = LabelSetClassifier(random_state=0).fit(X, Y)
        >>> model.predict_labels(np.array([[1.0, 0.0], [0.0, 1.0]]), k=1)
        [['a'], ['b']]
    """

    loss_: str
    choice_: str
    resolved_: Resolved
    calibration_: Calibration | None
    decision_: Decision | None
    tree_: LinearTree | None

    def __init__(
        self,
        k: float | str = "auto",
        *,
        loss: str = "auto",
        loss_options: dict[str, Any] | None = None,
        labels: str = "complete",
        observed: float | str = "auto",
        hidden: Sequence[int] = (),
        dropout: float = 0.0,
        solver: str = "auto",
        C: float | str = "auto",
        label_weight: str | None = None,
        tree: Any = "auto",
        calibrate: bool = True,
        decide: str = "auto",
        epochs: int | str = "auto",
        lr: float | str = "auto",
        weight_decay: float | str = "auto",
        batch_size: int = 128,
        optimizer: str = "auto",
        schedule: str = "cosine",
        scale: str = "auto",
        threshold: float | None = None,
        random_state: Any = None,
    ) -> None:
        self.k = k
        self.loss = loss
        self.loss_options = loss_options
        self.labels = labels
        self.observed = observed
        self.hidden = hidden
        self.dropout = dropout
        self.solver = solver
        self.C = C
        self.label_weight = label_weight
        self.tree = tree
        self.calibrate = calibrate
        self.decide = decide
        self.epochs = epochs
        self.lr = lr
        self.weight_decay = weight_decay
        self.batch_size = batch_size
        self.optimizer = optimizer
        self.schedule = schedule
        self.scale = scale
        self.threshold = threshold
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        tags.input_tags.sparse = True
        return tags

    def fit(
        self, X: Any, y: Any, sample_weight: Any = None, *, row_weight: Any = None, groups: Any = None
    ) -> LabelSetClassifier:
        """Train from the beginning.

        Args:
            X: Features, dense or sparse, ``(n_samples, n_features)``.
            y: An indicator matrix (dense or sparse), a list of label lists, or one label per row.
            sample_weight: One number per row, at least 0; None for 1. Minibatches weigh the terms of the loss, so that
                a weight of 2 is not exactly that of two equal rows.
            row_weight: The same, by the name that `fit_linear` has for it.
            groups: One value per row (author, project, ...), or None. Rows of one group are held out together, so that
                the loss is chosen, and probabilities are calibrated, for rows of new groups. A row whose value is None,
                nan or empty is a group of its own.

        Returns:
            Itself.
        """
        if sample_weight is not None and row_weight is not None:
            raise ValueError("LabelSetClassifier: `row_weight` must be None with `sample_weight`, which is the same.")
        row_weight = sample_weight if row_weight is None else row_weight
        columns = _column_names(y)
        X, y = self._checked(X, y, reset=True)
        weights = None
        if row_weight is not None:
            weights = check_row_weight("LabelSetClassifier", row_weight, X.shape[0], "sample_weight")
            if not np.any(weights):
                raise ValueError("LabelSetClassifier: `sample_weight` must be above 0 for some row, got only zeros.")
        self._start(X, y, None, weights=weights, columns=columns)
        labels = replace(self._labels(y), weights=weights)
        if groups is not None:
            if len(groups) != X.shape[0]:
                raise ValueError(
                    f"LabelSetClassifier: `groups` must have one value per row, {X.shape[0]}, got {len(groups)}."
                )
            labels = replace(labels, groups=["" if _is_missing(group) else str(group) for group in groups])
        if self._is_exact() and self._config().takes_tree(labels.n_labels):
            self._grow(X, labels)
        elif self._is_exact():
            self._choose(X, labels)
        else:
            self.n_iter_ = _epochs(X.shape[0]) if self.epochs == "auto" else self._config().epochs
            self._train(X, labels, self.n_iter_)
        self._fit_counts(X, labels)
        return self

    def _is_exact(self) -> bool:
        """Whether the exact solver takes part; single labels take the LML loss unless another is named."""
        return self._config().minibatches() is None and (self.multilabel_ or self.loss != "auto")

    def _grow(self, X: Any, labels: LabelData) -> None:
        """Fit label trees, which calibrate their probabilities themselves."""
        from lastlayer.train.fit_tree import groups_of, settings_of

        settings = settings_of(self._config(seed=self.seed_), self.resolved_)
        given = self.tree if isinstance(self.tree, LabelTree) else None
        x = self.features_.transform(X)
        options: dict[str, Any] = {"hierarchy": given, "row_weight": labels.weights, "groups": groups_of(labels)}
        self.tree_ = LinearTree.fit(x, labels, settings, **options)
        self.loss_, self.n_iter_ = settings.loss, 1

    def _choose(self, X: Any, labels: LabelData) -> None:
        """Choose the loss and C, fit all rows, calibrate and tune thresholds."""
        config, x = self._config(seed=self.seed_), self.features_.transform(X)
        pool = choose.Pool(x, labels, len(labels)).counted()
        choice = choose.choose(pool, config, self.resolved_, folds=True)
        self.network_ = choose.fit(choice.blend, pool.x, pool.labels, config, choice.resolved)
        held = None if choice.scores is None else HeldOut(choice.scores, choice.labels)  # type: ignore[arg-type]
        resolved = replace(choice.resolved, k=self.resolved_.k)
        if self.multilabel_:
            resolved = with_share(choice.resolved, held, config)
        self.resolved_, self.loss_, self.choice_, self.n_iter_ = resolved, resolved.loss, choice.line, 1
        if self.multilabel_ and len(labels.indices):  # rows without any label predict none
            self.calibration_, self.decision_ = decided(held, config, resolved)

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> LabelSetClassifier:
        """Train for one more pass over some rows, at a constant learning rate; the optimiser keeps its state.

        Args:
            X: Features.
            y: Labels, in the form of the first call.
            classes: All labels that will occur; needed in the first call unless `y` is an indicator matrix.

        Returns:
            Itself.
        """
        first = not hasattr(self, "resolved_")
        if (self.loss if first else self.loss_) == "squared_hinge" or getattr(self, "tree_", None) is not None:
            raise ValueError("LabelSetClassifier: partial_fit needs a loss of minibatches, such as lml or binary.")
        if not first:
            self._check_columns(y)
        columns = _column_names(y)
        X, y = self._checked(X, y, reset=first)
        if first:
            self._start(X, y, classes, minibatches=True, columns=columns)
        elif classes is not None and set(classes) != set(self.classes_.tolist()):
            raise ValueError("LabelSetClassifier: `classes` must be those of the first call to partial_fit.")
        if isinstance(y, _Lists):
            known = set(self.classes_.tolist())
            unknown = [name for row in y.rows for name in row if name not in known]
            if unknown:
                raise ValueError(f"LabelSetClassifier: `y` must hold labels among `classes`, got {unknown[0]!r}.")
        labels = self._labels(y)
        self._train(X, labels, 1, schedule="constant", warmup=0.0)
        if self.count_ is None:  # the counts of the first rows
            self._fit_counts(X, labels)
        self.n_iter_ = getattr(self, "n_iter_", 0) + 1
        return self

    def decision_function(self, X: Any) -> np.ndarray:
        """Return the log-odds of each label, ``(n_samples, n_labels)``; for two single labels those of the second."""
        y = self._log_odds(X)[0].numpy()
        return y[:, 1] if self._is_binary() else y

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return probabilities, ``(n_samples, n_labels)``; rows sum to 1 for single labels.

        They are calibrated on held-out rows where the exact solver or ``loss="auto"`` was used. With another loss that
        only orders labels they sum to k.
        """
        return self._log_odds(X)[0].sigmoid().numpy()

    def predict(self, X: Any) -> np.ndarray:
        """Return an indicator matrix of the labels above the threshold, or the best single label."""
        odds, counts = self._log_odds(X)
        if not self.multilabel_:
            return np.asarray(self.classes_[odds.argmax(-1).numpy()])
        y = odds.sigmoid()
        level = None if self.decision_ is None else self.decision_.threshold
        if self.threshold is not None:
            said = y >= self.threshold
        elif level is not None:
            said = y > torch.from_numpy(np.asarray(level)).double()
        elif self.decision_ is not None:  # the rule top_k
            rank = odds.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
            said = rank < counts.round().clamp(min=1).unsqueeze(-1)
        else:
            said = y >= 0.5
        return said.numpy().astype(self.y_dtype_)

    def predict_labels(self, X: Any, k: int | None = None) -> list[list[Any]]:
        """Return the names of the `k` best labels of each row, best first; None: as many as the row expects."""
        if k is not None and (isinstance(k, bool) or not isinstance(k, numbers.Integral) or k < 0):
            raise ValueError(f"LabelSetClassifier: `k` must be None or a whole number of at least 0, got {k!r}.")
        odds, counts = self._log_odds(X)
        order = odds.argsort(dim=-1, descending=True, stable=True).numpy()
        sizes = [max(round(float(c)), 1) if k is None else k for c in counts]
        return [self.classes_[row[:size]].tolist() for row, size in zip(order, sizes, strict=True)]

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Return the accuracy for single labels, the mean average precision of the rows for label sets.

        The latter does not depend on `k`, so that a search may compare several; rows without labels do not count.
        Neither do labels that were not seen in training: a warning tells how many there are.
        """
        from lastlayer.metrics.average_precision import mean_average_precision

        check_is_fitted(self)
        if not self.multilabel_:
            return float(super().score(X, y, sample_weight))
        self._check_columns(y)
        y = _target(y)
        odds, labels = self._log_odds(X)[0], self._labels(y)
        if isinstance(y, _Lists):
            self._tell_unknown(y)
        target = label_lists(torch.from_numpy(labels.padded(np.arange(len(labels)))))
        values = mean_average_precision(odds, target, per="sample", average="none").numpy()
        weight = check_row_weight("LabelSetClassifier", sample_weight, len(values), "sample_weight")
        weight = np.ones(len(values)) if weight is None else weight
        seen = np.isfinite(values) & (weight > 0)
        return float(np.average(values[seen], weights=weight[seen])) if seen.any() else 0.0

    def _tell_unknown(self, y: _Lists) -> None:
        """Warn of labels that are not among `classes_`, the most frequent first."""
        known = set(self.classes_.tolist())
        unknown = Counter(name for row in y.rows for name in set(row) if name not in known)
        if unknown:
            first = sorted(unknown, key=lambda name: (-unknown[name], str(name)))[:5]
            shown = ", ".join(map(str, first)) + (", ..." if len(unknown) > 5 else "")
            warnings.warn(
                f"LabelSetClassifier: {unknown.total()} labels of `y` were not seen in training and do not count: "
                f"{shown}.",
                stacklevel=3,
            )

    def _is_binary(self) -> bool:
        return not self.multilabel_ and len(self.classes_) == 2

    def _check_columns(self, y: Any) -> None:
        """Refuse a DataFrame whose columns are other labels than those of training, or in another order."""
        names = _column_names(y)
        if names is not None and self.classes_.dtype == object and names.tolist() != self.classes_.tolist():
            raise ValueError("LabelSetClassifier: `y` must have the columns of `classes_`, in their order.")

    def _checked(self, X: Any, y: Any, reset: bool) -> tuple[Any, Any]:
        if y is None:
            raise ValueError("This LabelSetClassifier requires y to be passed, but the target y is None.")
        options: dict[str, Any] = {"accept_sparse": "csr", "dtype": [np.float32, np.float64], "reset": reset}
        y = _target(y)
        if isinstance(y, _Lists):
            X = validate_data(self, X, **options)
        else:
            X, y = validate_data(self, X, y, multi_output=True, **options)
            if getattr(y, "ndim", 1) == 2 and y.shape[1] == 1:
                from sklearn.exceptions import DataConversionWarning

                message = "A column-vector y was passed when a 1d array was expected."
                warnings.warn(message, DataConversionWarning, stacklevel=3)
                y = (y.toarray() if sp.issparse(y) else y)[:, 0]
            check_classification_targets(y)
            if type_of_target(y) == "multiclass-multioutput":
                raise _not_an_indicator()
        if len(y) != X.shape[0] if isinstance(y, _Lists) else y.shape[0] != X.shape[0]:
            raise ValueError(f"LabelSetClassifier: X and y must have as many rows, got {X.shape[0]} and {len(y)}.")
        return X, y

    def _config(self, **changes: Any) -> Config:
        k = float(self.k) if isinstance(self.k, numbers.Real) else self.k  # what is no number is refused by Config
        widths: Any = self.hidden
        widths = tuple(widths) if isinstance(widths, Sequence | np.ndarray) and not isinstance(widths, str) else widths
        return Config(
            solver=self.solver, C=self.C, label_weight=self.label_weight or "none",  # type: ignore[arg-type]
            calibrate=self.calibrate, decide=self.decide,
            tree="1" if isinstance(self.tree, LabelTree) else str(self.tree),
            loss=self.loss, loss_options=self.loss_options or {}, labels=self.labels, k=k,  # type: ignore[arg-type]
            observed=self.observed, hidden=widths, dropout=self.dropout,  # type: ignore[arg-type]
            epochs=1 if self.epochs == "auto" else self.epochs,  # type: ignore[arg-type]
            lr=self.lr, weight_decay=self.weight_decay, batch_size=self.batch_size, optimizer=self.optimizer,  # type: ignore[arg-type]
            scale=self.scale, schedule=changes.pop("schedule", self.schedule), accelerator="cpu",
            **changes,
        )  # fmt: skip

    def _start(
        self,
        X: Any,
        y: Any,
        classes: Any,
        *,
        minibatches: bool = False,
        weights: np.ndarray | None = None,
        columns: np.ndarray | None = None,
    ) -> None:
        """Choose classes, scaling and k; make the network."""
        lists = isinstance(y, _Lists)
        self.multilabel_ = lists or type_of_target(y) == "multilabel-indicator"
        self.y_dtype_ = np.dtype(int) if lists or not self.multilabel_ else y.dtype
        if lists:
            self.classes_ = _names(classes if classes is not None else (name for row in y.rows for name in row))
        elif classes is not None:
            self.classes_ = np.unique(np.asarray(classes))
        elif self.multilabel_:
            self.classes_ = np.arange(y.shape[1]) if columns is None else columns
        else:
            self.classes_ = np.unique(y)
        if len(self.classes_) == 0:
            raise ValueError("LabelSetClassifier: `y` must hold at least one label.")
        level = self.threshold
        if level is not None and not (isinstance(level, numbers.Real) and 0 <= level <= 1):
            raise ValueError(f"LabelSetClassifier: `threshold` must be a probability or None, got {level!r}.")
        seed = check_random_state(self.random_state).randint(2**31 - 1)
        labels = replace(self._labels(y), weights=weights)
        config = self._config(seed=seed)
        self.seed_ = seed
        data = replace(labels, features=X)
        self.features_ = FeatureMap.fit(data, config)
        resolved = Resolved.of(config, labels)
        if not self.multilabel_ and self.k == "auto":
            resolved = Resolved(**{**vars(resolved), "k": 1.0})
        self.resolved_, self.k_ = resolved, None if resolved.k_per_row else resolved.k
        if minibatches or not self._is_exact():
            self.network_ = build(config, self.features_, len(self.classes_), Placement())
            LabelSetModule(self.network_, config, resolved, total_steps=1).start_at_frequencies(labels)
        self.optimizer_state_: dict[str, Any] | None = None
        self.count_: CountModel | None = None
        self.calibration_, self.decision_, self.tree_ = None, None, None
        self.loss_, self.choice_ = resolved.loss, ""

    def _fit_counts(self, X: Any, labels: LabelData) -> None:
        if self.resolved_.k_per_row and self.multilabel_:
            counts = labels.row_counts() / (self.resolved_.observed or 1.0)
            x = self.features_.transform(X)
            self.count_ = CountModel.fit(x, counts, labels.n_labels, weight=labels.weights, seed=self.seed_)

    def _labels(self, y: Any) -> LabelData:
        """Return targets as label lists over `classes_`."""
        names = NumberNames(len(self.classes_))
        if isinstance(y, _Lists):
            place = {name: i for i, name in enumerate(self.classes_.tolist())}
            rows = [sorted({place[n] for n in row if n in place}) for row in y.rows]
            return LabelData.from_lists([[str(i) for i in row] for row in rows], label_names=names)
        if self.multilabel_:
            table = sp.csr_matrix(y)
            table.eliminate_zeros()
            if (table.data != 1).any():
                raise _not_an_indicator()
            table.sort_indices()
            if table.shape[1] != len(self.classes_):
                raise ValueError(
                    f"LabelSetClassifier: `y` must have {len(self.classes_)} columns, got {table.shape[1]}."
                )
            return LabelData(None, None, table.indptr.astype(np.int64), table.indices.astype(np.int64), names)
        place_of = np.searchsorted(self.classes_, y).clip(0, len(self.classes_) - 1)
        if (self.classes_[place_of] != y).any():
            raise ValueError("LabelSetClassifier: `y` must hold labels among `classes`, got others.")
        return LabelData(None, None, np.arange(len(y) + 1), place_of.astype(np.int64), names)

    def _train(self, X: Any, labels: LabelData, epochs: int, **changes: Any) -> None:
        done = getattr(self, "n_iter_", 0) if changes else 0
        config = self._config(seed=(self.seed_ + done) % (2**31 - 1), **changes)
        x = self.features_.transform(X)
        steps = len(EpochBatches(len(labels), config.batch_size, seed=0)) * epochs
        module = LabelSetModule(self.network_, config, self.resolved_, total_steps=steps)
        module.optimizer_state = self.optimizer_state_ if changes else None
        data = LabelSetData(x, labels, batch_size=config.batch_size, seed=config.seed)
        with quiet():
            optimizer = fit_in_process(module, data, epochs)
        self.optimizer_state_ = optimizer.state_dict() if changes else None
        self.network_.eval()

    def _log_odds(self, X: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-odds and expected counts, in float64, so that a row's result does not depend on its batch."""
        from lastlayer.project.lml import lml_threshold

        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=[np.float32, np.float64], reset=False)
        x = self.features_.transform(X)
        if self.tree_ is not None:
            index, z = self.tree_.decision_function(x, min(LISTED, self.tree_.n_labels))
            odds_of = torch.full((x.shape[0], self.tree_.n_labels + 1), -torch.inf, dtype=torch.float64)
            at = torch.from_numpy(np.where(index < 0, self.tree_.n_labels, index).astype(np.int64))
            odds_of.scatter_(1, at, torch.from_numpy(np.asarray(z, np.float64)))
            odds_of = odds_of[:, :-1]
            return odds_of, odds_of.sigmoid().sum(-1)
        with torch.no_grad():
            rows: Any = rows_to_input(x, np.arange(x.shape[0]))
            rows = (rows[0], rows[1], rows[2].double()) if isinstance(rows, tuple) else rows.double()
            logits = copy.deepcopy(self.network_).double()(rows)
            count = None if self.count_ is None else torch.from_numpy(self.count_(x))
            if self.calibration_ is not None:
                slope, offset, observed = self.calibration_.tensors(logits)
                logits = odds(logits, self.resolved_)[0] * slope + offset
                if observed < 1:
                    logits = true_probability(logits.sigmoid(), observed).logit()
                if count is None and isinstance(self.k, str):
                    return logits, logits.sigmoid().sum(-1)
                return logits, torch.full_like(logits[:, 0], self.resolved_.k) if count is None else count.double()
            logits = logits / self.resolved_.temperature
            if self.multilabel_ and self.resolved_.probability == "sigmoid":
                return logits, logits.sigmoid().sum(-1) if count is None else count.double()
            fixed = self.resolved_.k if self.multilabel_ else 1.0
            k = torch.full_like(logits[:, 0], fixed) if count is None else count.double()
            return logits + lml_threshold(logits, k).unsqueeze(-1), k


def _epochs(rows: int) -> int:
    """Fewer passes over more rows: the steps grow with the root of their number."""
    return min(max(round(1600 / math.sqrt(rows)), 8), 50)


def _not_an_indicator() -> ValueError:
    return ValueError(
        "LabelSetClassifier: `y` must be a matrix of 0 and 1, a list of label lists or one label per row, got a matrix "
        "of other numbers. Labels that are coded -1 and 1 are `y > 0`; where -1 is unknown, use a loss in a loop of "
        "your own."
    )


class _Lists:
    """One list of labels per row."""

    def __init__(self, rows: Sequence[Sequence[Any]]) -> None:
        self.rows = [list(row) for row in rows]
        if any(name != name for row in self.rows for name in row):
            raise ValueError("LabelSetClassifier: `y` must hold labels, got nan. A row without any is an empty list.")

    def __len__(self) -> int:
        return len(self.rows)


def _names(given: Iterable[Any]) -> np.ndarray:
    """Return the different names in order, as they are: an array of NumPy would turn 1 beside "a" into "1"."""
    names = sorted(set(given), key=lambda name: (str(type(name)), name))
    if not any(isinstance(name, tuple) for name in names):
        plain = np.array(names)
        if plain.tolist() == names:
            return plain
    kept = np.empty(len(names), dtype=object)
    kept[:] = names
    return kept


def _is_row(value: Any) -> bool:
    """Whether this is the labels of one row; tables from Parquet files hold arrays."""
    return isinstance(value, list | tuple | set | frozenset) or (isinstance(value, np.ndarray) and value.ndim == 1)


def _is_missing(value: Any) -> bool:
    """Whether this is None, nan, or the NA of pandas, which equals nothing and is neither true nor false."""
    try:
        return value is None or bool(value != value)
    except TypeError:
        return True


def _column_names(y: Any) -> np.ndarray | None:
    """Return the names of the columns of a DataFrame; None if there are none, or if they are no names."""
    names = list(getattr(y, "columns", ()))
    if not names or not all(isinstance(name, str) for name in names) or len(set(names)) != len(names):
        return None
    return np.array(names, dtype=object)


def _target(y: Any) -> Any:
    """Tell label lists from arrays."""
    if isinstance(y, _Lists) or sp.issparse(y):
        return y
    rows = y.to_numpy() if hasattr(y, "to_numpy") else y  # a column of a table
    nested = isinstance(rows, list | tuple) or (
        isinstance(rows, np.ndarray) and rows.dtype == object and rows.ndim == 1
    )
    lists = [_is_row(row) for row in rows] if nested else []
    if any(lists) and not all(lists):
        wrong = lists.index(False)
        raise ValueError(
            f"LabelSetClassifier: `y` must be a list of labels in every row, got {rows[wrong]!r} in row {wrong}. A row "
            "without any is an empty list."
        )
    if any(lists):
        y = [row.tolist() if isinstance(row, np.ndarray) else row for row in rows]
        equal = len({len(row) for row in y}) == 1 and not any(isinstance(row, set | frozenset) for row in y)
        numeric = all(isinstance(v, numbers.Real) for row in y for v in row)
        if not (equal and numeric and set(np.unique([v for row in y for v in row])) <= {0, 1} and len(list(y[0])) > 1):
            return _Lists(y)
        return check_array(y)
    return y
