"""Trained models without the trainer: load a run, and get scores, probabilities and label sets for new rows.

The config of a run names the kind of its model (``model``). Each kind is a module with ``load(run, ...)`` that returns
a :class:`Scorer`. Everything else (features, probabilities, label sets, metrics) is shared. Nothing here imports
Lightning.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from lastlayer.data import DataError, LabelData
from lastlayer.runs import RunFolder
from lastlayer.runs.files import RunError, damaged
from lastlayer.runs.folder import finished
from lastlayer.shard import ClassShard, gather, reduce
from lastlayer.train.calibrate import Calibration, true_probability
from lastlayer.train.config import Config, make
from lastlayer.train.count import CountModel
from lastlayer.train.decide import Decision
from lastlayer.train.features import FeatureMap
from lastlayer.train.placement import Placement
from lastlayer.train.resolved import Resolved

KINDS = {
    "network": "lastlayer.train.network_scorer",
    "encoder": "lastlayer.train.encode.scorer",
    "tree": "lastlayer.train.tree_scorer",
}  # the module of each kind of model


class Scores(NamedTuple):
    """The scores of rows: for all labels, or for the best labels of each row.

    Args:
        logits: ``(rows, n_labels)``; or ``(rows, m)``, best first, if `index` is given.
        index: None, or the labels that the logits belong to, ``(rows, m)`` int64, padded with -1 (logit ``-inf``).
    """

    logits: Tensor
    index: Tensor | None = None  # type: ignore[assignment]  # over tuple.index, which nobody needs here


class Scorer(Protocol):
    """One kind of trained model."""

    def scores(self, x: Any) -> Scores:
        """Score rows of features: a float32 array or CSR matrix, as the feature map of the run returns them."""

    def to(self, device: str | torch.device) -> None:
        """Move the model to a device; `scores` returns tensors there."""

    def save(self, run: RunFolder) -> None:
        """Write the model's files to a run folder."""


def odds(
    logits: Tensor, resolved: Resolved, count: Tensor | None = None, *, shard: ClassShard | None = None
) -> tuple[Tensor, Tensor | None]:
    """Turn logits into log-odds by the rule of the run.

    Args:
        logits: ``(rows, n_labels)``.
        resolved: The rule, k and the temperature of the run.
        count: The number of labels of each row, where it is predicted.
        shard: This process's slice of the labels.

    Returns:
        The log-odds, and the number of labels of each row where the rule fixes it.
    """
    from lastlayer.project.lml import lml_threshold

    logits = logits / resolved.temperature if resolved.temperature != 1 else logits
    if resolved.probability == "sigmoid":
        return logits, count
    k = logits.new_full(logits.shape[:1], resolved.k) if count is None else count
    impl: Any = "torch" if torch.compiler.is_compiling() else "auto"
    return logits + lml_threshold(logits, k, shard=shard, impl=impl).unsqueeze(-1), k


def probabilities(
    logits: Tensor,
    resolved: Resolved,
    count: Tensor | None = None,
    *,
    calibration: tuple[Tensor, Tensor, float] | None = None,
    shard: ClassShard | None = None,
) -> tuple[Tensor, Tensor]:
    """Turn logits into probabilities.

    Args:
        logits: ``(rows, n_labels)``.
        resolved: The rule, k and the temperature of the run.
        count: The number of labels of each row, where it is predicted.
        calibration: One slope and one offset per label for the log-odds, and the share of true labels that is
            observed.
        shard: This process's slice of the labels.

    Returns:
        The probabilities, and the expected number of labels of each row. Without calibration the LML rule makes each
        row sum to k; with it, the number is the sum of the row.
    """
    from lastlayer.project.lml import lml

    if calibration is not None:
        scores, _ = odds(logits, resolved, shard=shard)  # what was calibrated; a predicted number is the set's size
        slope, offset, observed = calibration
        y = true_probability((scores * slope + offset).sigmoid(), observed)
        return y, reduce(y, "sum", shard).squeeze(-1) if count is None else count
    if resolved.probability == "sigmoid":
        y = odds(logits, resolved)[0].sigmoid()
        return y, reduce(y, "sum", shard).squeeze(-1) if count is None else count
    logits = logits / resolved.temperature if resolved.temperature != 1 else logits
    k = logits.new_full(logits.shape[:1], resolved.k) if count is None else count
    return lml(logits, k, shard=shard, impl="torch" if torch.compiler.is_compiling() else "auto"), k


class Batch(NamedTuple):
    """The predictions for some rows."""

    logits: Tensor  # (rows, n_labels), or (rows, m)
    probability: Tensor  # likewise
    k: Tensor  # (rows,), the expected number of labels
    index: Tensor | None  # type: ignore[assignment]  # (rows, m), the labels of lists


@dataclass
class TrainedModel:
    """A trained model: what :func:`lastlayer.load` returns.

    Rows are given as a list of texts, a NumPy array or CSR matrix of features, or :class:`~lastlayer.data.LabelData`,
    and must be of the kind that the model was trained on. A table of pandas is read by the names of the columns that
    were the features, in any order; if it has none of these names, its columns are taken as they come. Any number of
    rows may be given; they are scored in batches.

    Attributes:
        labels: The names of the labels, in the order of the columns of `predict_proba`.
        thresholds: One probability per label, above which `predict` takes the label (``--decide``). For the rule
            ``top_k`` they are those with the best F1 on the held-out rows of the run, which `predict` does not use:
            None where the run stored none; nan for a label that no held-out row has.
        calibration: The slope and offset per label that make log-odds of scores, or None.
        decision: The rule of ``--decide``, or None for a run of an earlier version.
        config: The settings of the run.
    """

    scorer: Scorer
    features: FeatureMap
    labels: Sequence[str]
    config: Config
    resolved: Resolved
    reader: dict[str, Any]  # how the training rows were read
    count: CountModel | None = None
    thresholds: np.ndarray | None = None
    calibration: Calibration | None = None
    decision: Decision | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    shard: ClassShard | None = None
    batch_size: int = 512

    def predict(self, rows: Any, *, k: int | None = None, threshold: float | None = None) -> list[list[str]]:
        """Return the label set of each row, best label first.

        Args:
            rows: The rows.
            k: The number of labels per row. By default the run decides (``--decide``): every label above its
                threshold, or the number of labels that the run expects, at least 1.
            threshold: Instead of `k`: every label whose probability is at least this.
        """
        pairs = self.predict_pairs(rows, k=k, threshold=threshold)
        return [[name for name, _ in row] for row in pairs]

    def predict_pairs(
        self, rows: Any, *, k: int | None = None, threshold: float | None = None
    ) -> Iterator[list[tuple[str, float]]]:
        """Return the labels of each row with their probabilities, best first; the arguments are those of `predict`."""
        return self.pairs(self.matrix(rows), k=k, threshold=threshold)

    def pairs(
        self, x: Any, *, k: int | None = None, threshold: float | None = None
    ) -> Iterator[list[tuple[str, float]]]:
        """Yield what `predict_pairs` does, for rows of features as `matrix` returns them."""
        if k is not None and k < 1:
            raise ValueError(f"predict: `k` must be at least 1, got {k}.")
        if threshold is not None and not 0 <= threshold <= 1:
            raise ValueError(f"predict: `threshold` must be a probability from 0 to 1, got {threshold}.")
        for batch in self.batches(x):
            index, value, sizes = self.chosen(batch, k, threshold)
            for labels, values, size in zip(index.tolist(), value.tolist(), sizes, strict=True):
                pairs = zip(labels[:size], values[:size], strict=True)
                yield [(self.labels[label], p) for label, p in pairs if label >= 0]

    def chosen(
        self, batch: Batch, k: int | None = None, threshold: float | None = None
    ) -> tuple[Tensor, Tensor, list[int]]:
        """Return the labels of each row and their probabilities, best first, and how many of them are its set."""
        if k is None and threshold is None and self.decision is not None and self.decision.threshold is not None:
            batch = self._above(batch, self.decision.threshold)
            counts = (batch.probability > -torch.inf).sum(-1)
            most = max(int(counts.max()), 1) if len(counts) else 1
            return *self.best(batch, most), counts.tolist()
        index, value = self.best(batch, self._width(batch, k, threshold))
        return index, value, self._sizes(batch.k, value, k, threshold)

    def _above(self, batch: Batch, threshold: np.ndarray) -> Batch:
        """Return the batch with minus infinity for labels that are not above their threshold."""
        level = torch.from_numpy(np.asarray(threshold)).to(batch.probability)
        if batch.index is not None and level.ndim:
            level = level[batch.index.clamp(min=0)]
        y = torch.where(batch.probability > level, batch.probability, -torch.inf)
        if batch.index is None:
            return batch._replace(probability=y)
        order = (y == -torch.inf).to(torch.uint8).argsort(dim=-1, stable=True)
        return batch._replace(probability=y.gather(-1, order), index=batch.index.gather(-1, order))

    def predict_proba(self, rows: Any) -> np.ndarray:
        """Return the probability of each label, ``(rows, n_labels)`` float32; 0 for labels that were not scored."""
        return self._dense(rows, "probability", 0.0)

    def decision_function(self, rows: Any) -> np.ndarray:
        """Return the logit of each label, ``(rows, n_labels)`` float32; ``-inf`` for labels that were not scored."""
        return self._dense(rows, "logits", -np.inf)

    def to(self, device: str | torch.device) -> TrainedModel:
        """Move the model to a device; returns itself."""
        self.device = _device("TrainedModel.to", device)
        self.scorer.to(self.device)
        self.features.to(self.device)
        return self

    def matrix(self, rows: Any) -> Any:
        """Return the features of rows, a float32 array or CSR matrix."""
        if not isinstance(rows, LabelData):
            rows = _table(self._in_order(rows))
        return self.features(rows) if len(rows) else np.zeros((0, self.features.n_features), np.float32)

    def _in_order(self, rows: Any) -> Any:
        """Return the columns of a table that the run knows by name, in its order; anything else as it is."""
        options = self.reader.get("options")
        names = options.get("vector_column") if isinstance(options, dict) else None
        columns = set(getattr(rows, "columns", ()))
        if not isinstance(names, list) or columns.isdisjoint(names):
            return rows
        if absent := [name for name in names if name not in columns]:
            raise DataError(
                f"predict: `rows` must have all columns that the run was trained on, or none of their names, lacks "
                f"{absent[0]!r}."
            )
        return rows[names]

    def batches(self, x: Any, size: int | None = None) -> Iterator[Batch]:
        """Yield the predictions for rows of features, `size` rows at a time."""
        size = size or self.batch_size
        for at in range(0, x.shape[0], size):
            part = x[at : at + size]
            with torch.inference_mode():
                logits, index = self.scorer.scores(part)
                logits = logits.float()
                count = None
                if self.count is not None:
                    count = torch.from_numpy(self.count(part)).to(logits)
                calibration = None if self.calibration is None else self.calibration.tensors(logits)
                if calibration is not None and index is not None:
                    slope, offset, observed = calibration
                    calibration = slope[index.clamp(min=0)], offset[index.clamp(min=0)], observed
                y, k = probabilities(logits, self.resolved, count, calibration=calibration, shard=self.shard)
                if self.calibration is not None and self.fixed_k is not None:
                    k = torch.full_like(k, self.fixed_k)
                yield Batch(logits, y, k, index)

    @property
    def fixed_k(self) -> float | None:
        """The number of labels per row that the user gave, or None."""
        return None if self.config.k in ("auto", "predicted") else self.resolved.k

    def best(self, batch: Batch, most: int) -> tuple[Tensor, Tensor]:
        """Return the labels of the `most` largest probabilities of each row, best first, and these, on the CPU."""
        from lastlayer.decode.top_k import decode_top_k

        most = min(most, len(self.labels))
        if batch.index is not None:
            return batch.index[:, :most].cpu(), batch.probability[:, :most].float().cpu()
        index, value = decode_top_k(batch.probability, most, shard=self.shard)
        return index.cpu(), value.float().cpu()

    def whole(self, value: Tensor) -> Tensor:
        """Return ``(rows, n_labels)`` in every process from the slices of sharded labels."""
        if self.shard is None:
            return value
        n = len(self.labels)
        size = -(-n // self.shard.ranks)
        return gather(torch.nn.functional.pad(value, (0, size - value.shape[-1])), self.shard)[..., :n]

    def _width(self, batch: Batch, k: int | None, threshold: float | None) -> int:
        """How many labels of each row are needed at most."""
        if k is not None:
            return k
        if threshold is None:
            return max(int(batch.k.round().max()), 1)
        if self.shard is None:
            return max(int((batch.probability >= threshold).sum(-1).max()), 1)
        return len(self.labels)

    @staticmethod
    def _sizes(expected: Tensor, value: Tensor, k: int | None, threshold: float | None) -> list[int]:
        if threshold is not None:
            sizes = (value >= threshold).sum(-1)
            return (sizes if k is None else sizes.clamp(max=k)).tolist()
        return [k] * len(value) if k is not None else expected.round().clamp(min=1).int().tolist()

    def _dense(self, rows: Any, name: str, rest: float) -> np.ndarray:
        x = self.matrix(rows)
        out = np.full((x.shape[0], len(self.labels)), rest, np.float32)
        at = 0
        for batch in self.batches(x):
            value = getattr(batch, name).float()
            part = out[at : at + len(value)]
            at += len(value)
            if batch.index is None:
                part[:] = self.whole(value).cpu().numpy()
                continue
            row, column = (batch.index >= 0).nonzero(as_tuple=True)
            part[row.cpu().numpy(), batch.index[row, column].cpu().numpy()] = value[row, column].cpu().numpy()
        return out


def load(
    run: str | Path | RunFolder,
    *,
    device: str | torch.device = "cpu",
    placement: Placement | None = None,
    encoder: Any = None,
) -> TrainedModel:
    """Load a finished run for prediction.

    Args:
        run: The run folder.
        device: Where to compute.
        placement: Where the labels are; by default all of them are in this process.
        encoder: The encoder of the run if it was given in Python, or the folder of a frozen one that has moved.

    Returns:
        The model: ``predict``, ``predict_proba``, ``decision_function``, ``labels`` and ``thresholds``.

    Example:
        >>> import lastlayer as ll
        >>> model = ll.load("run")  # doctest: +SKIP
        >>> model.predict(["a text", "another text"])  # doctest: +SKIP
        [['label', 'another label'], ['label']]
    """
    device = _device("load", device)
    run = finished(run.path if isinstance(run, RunFolder) else run)
    config = make(run.config(), str(run / "config.yaml"))
    about, labels = run.read_json("data.json"), run.labels()
    try:
        features = features_of(run, encoder)
        resolved = Resolved.of_run(about["resolved"], config)
        reader = about["parts"]["train"]["source"]
        if not all(map(_is_option, (reader.get("options") or {}).values())):
            raise TypeError("`source` must hold names, numbers and lists of names as options")
    except DataError as error:
        raise RunError(f"{run.path}/{error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise damaged(run / "data.json", error) from None
    placement = placement or Placement()
    placement.place(len(labels))
    name = "encoder" if config.trains_encoder() else "tree" if (run / "tree.json").exists() else config.model
    kind = importlib.import_module(KINDS[name])
    decision = Decision.load(run, len(labels))
    tuned = None if decision is None else decision.per_label(len(labels))
    model = TrainedModel(
        scorer=kind.load(run, config, features, len(labels), placement),
        features=features,
        labels=labels,
        config=config,
        resolved=resolved,
        reader=reader,
        count=CountModel.load(run, features.n_features) if resolved.k_per_row else None,
        thresholds=_thresholds(run) if tuned is None else tuned,
        calibration=Calibration.load(run, len(labels)),
        decision=decision,
        shard=placement.shard,
    )
    return model if device.type == "cpu" else model.to(device)


def _is_option(value: Any) -> bool:
    """Whether this is what an option of reading can be."""
    return (
        value is None
        or isinstance(value, str | int)
        or (isinstance(value, list) and all(isinstance(one, str) for one in value))
    )


def _device(op: str, device: str | torch.device) -> torch.device:
    """Return the device; refuse a GPU that is not there, before anything is read or moved."""
    found = torch.device(device)
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    else:
        count = 0 if found.type == "mps" and not torch.backends.mps.is_available() else 1
    if count == 0 or (found.type == "cuda" and (found.index or 0) >= count):
        why = f"{count} GPU(s), counted from 0" if count else "no GPU of this kind"
        raise RuntimeError(f'{op}: `device="{device}"` cannot be used here: torch finds {why}. Use `device="cpu"`.')
    return found


def features_of(run: RunFolder, encoder: Any = None) -> FeatureMap:
    """Return the feature map of a run; one with an encoder is opened by :mod:`lastlayer.train.encode`."""
    state = run.read_json("features.json")
    if state.get("kind") not in ("encoder", "frozen"):
        return FeatureMap(state)
    from lastlayer.train.encode import maps

    return maps.load(run, state, encoder)


def _thresholds(run: RunFolder) -> np.ndarray | None:
    labels = run.metrics().get("labels") or {}
    if not labels.get("threshold"):
        return None
    return np.array([np.nan if t is None else t for t in labels["threshold"]], dtype=np.float32)


def _table(rows: Any) -> LabelData:
    """Return texts or features as rows without labels."""
    if isinstance(rows, str):
        raise TypeError("predict: `rows` must be a list of texts, got one text. Write [text].")
    if len(getattr(rows, "shape", ())) == 1 and hasattr(rows, "tolist"):  # an array, or a column of a table
        rows = rows.tolist()
    texts = isinstance(rows, list | tuple) and all(isinstance(row, str) for row in rows)
    if not texts and not hasattr(rows, "tocsr"):
        try:
            rows = np.asarray(rows, None if getattr(rows, "dtype", None) == np.float32 else np.float64)
        except (TypeError, ValueError):
            message = (
                f"predict: `rows` must be a list of texts, or numbers, got {type(rows).__name__} with other values."
            )
            raise TypeError(message) from None
    if not texts and len(rows.shape) != 2:
        raise ValueError(f"predict: `rows` must be texts or have shape (rows, features), got {tuple(rows.shape)}.")
    n = len(rows) if texts else rows.shape[0]
    zeros = np.zeros(n + 1, np.int64)
    features = None if texts else rows.tocsr() if hasattr(rows, "tocsr") else rows
    return LabelData(list(rows) if texts else None, features, zeros, zeros[:0], [])
