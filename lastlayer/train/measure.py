"""Predictions for held-out rows, and the numbers made of them, with intervals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lastlayer.data import DataError, LabelData
from lastlayer.runs.rows import hits, row_metrics, set_counts, set_metrics, set_rows
from lastlayer.train.config import Config
from lastlayer.train.serve import Batch, TrainedModel, load

DENSE = 8_000_000  # entries of a matrix of probabilities that is kept whole
TOP = 50  # labels per row whose probabilities are kept
CELLS = 1 << 22  # entries of resampled rows that are held at a time


@dataclass(frozen=True)
class Predictions:
    """The labels of rows, best first, and the true ones."""

    top_index: Tensor  # (n, m)
    top_probability: Tensor  # (n, m)
    k: Tensor  # (n,)
    probability: Tensor | None  # (n, n_labels), if it is small enough
    labels: LabelData
    set_indptr: np.ndarray | None = None  # (n + 1,), where the predicted labels of each row start in `set_index`
    set_index: np.ndarray | None = None

    def weight(self) -> np.ndarray | None:
        """Return how much each row counts, with a mean of 1; None if rows have no weights, or none but 0."""
        weights = self.labels.weights
        if weights is None or not weights.any():
            return None
        scaled = np.asarray(weights, np.float64) / weights.max()  # their sum may be infinite
        return np.asarray(scaled / scaled.mean())

    def tensors(self) -> dict[str, Tensor]:
        """Return what ``predictions.safetensors`` holds."""
        out = {
            "row": torch.arange(len(self.labels)),
            "target_indptr": torch.from_numpy(np.ascontiguousarray(self.labels.indptr)),
            "target_index": torch.from_numpy(np.ascontiguousarray(self.labels.indices)),
            "top_index": self.top_index,
            "top_probability": self.top_probability,
            "k": self.k,
        }
        if (weight := self.weight()) is not None:
            out["weight"] = torch.from_numpy(weight)
        if self.set_indptr is not None and self.set_index is not None:
            out |= {"set_indptr": torch.from_numpy(self.set_indptr), "set_index": torch.from_numpy(self.set_index)}
        return out if self.probability is None else {**out, "probability": self.probability}


def predict(
    model: TrainedModel, x: Any, labels: LabelData, *, batch_size: int | None = None, top: int = TOP
) -> Predictions:
    """Compute probabilities for rows of features, and keep those of the `top` best labels of each row."""
    n, n_labels = len(labels), len(model.labels)
    most, keep = min(top, n_labels), n * n_labels <= DENSE
    index, value, counts, whole, sets = [], [], [], [], []
    for batch in model.batches(x, batch_size):
        places, best = model.best(batch, most)
        sets += _sets(model, batch)
        index.append(places)
        value.append(best)
        counts.append(batch.k.float().cpu())
        keep = keep and batch.index is None
        if keep:
            whole.append(model.whole(batch.probability.float()).cpu())

    def joined(parts: list[Tensor], *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.cat(parts).clone() if parts else torch.zeros(shape, dtype=dtype)

    return Predictions(
        joined(index, 0, most, dtype=torch.int64),
        joined(value, 0, most),
        joined(counts, 0),
        joined(whole, 0, n_labels) if keep else None,
        labels,
        np.concatenate([[0], np.cumsum([len(one) for one in sets], dtype=np.int64)]).astype(np.int64),
        np.concatenate([*sets, np.zeros(0, np.int64)]),
    )


def _sets(model: TrainedModel, batch: Batch) -> list[np.ndarray]:
    """Return the label set of each row."""
    labels, _, sizes = model.chosen(batch)
    lists = [row[:size] for row, size in zip(labels.numpy(), sizes, strict=True)]
    return [row[row >= 0] for row in lists]


def measure(predictions: Predictions, at: tuple[int, ...], *, resamples: int = 200, seed: int = 0) -> dict[str, Any]:
    """Return the metrics of predictions, each with a 95 % bootstrap interval over rows.

    Rows count by their weights, if they have any; the numbers of each label count every row once.
    """
    from lastlayer.metrics.average_precision import mean_average_precision
    from lastlayer.metrics.calibration import bin_sums, calibration_error

    labels, n = predictions.labels, len(predictions.labels)
    own = predictions.weight()
    weight = torch.ones(n, dtype=torch.float64) if own is None else torch.from_numpy(own)
    usable = tuple(a for a in at if a <= predictions.top_index.shape[1]) or (1,)
    top_index = predictions.top_index.numpy()
    each_row = row_metrics(top_index, labels.indptr, labels.indices, usable)
    metrics = _means(each_row, weight, resamples, seed)
    if predictions.set_indptr is not None and predictions.set_index is not None:
        n_labels = labels.n_labels
        sets = predictions.set_indptr, predictions.set_index, labels.indptr, labels.indices
        whole, (counts, _) = set_metrics(*sets, n_labels, weight=own), set_counts(*sets)
        metrics["micro_f1"] = _micro(whole["micro_f1"], counts, weight, resamples, seed)
        metrics["macro_f1"] = _interval(whole["macro_f1"], torch.empty(0))
        metrics |= _means(set_rows(counts, n_labels), weight, resamples, seed)
    last = usable[-1]
    right = torch.from_numpy(hits(top_index[:, :last], labels.indptr, labels.indices))
    bins = _bins(predictions.top_probability[:, :last].double(), right)
    draws = torch.cat([_ece((times * weight) @ bins) for times in _weights(n, resamples, seed)])
    metrics[f"ece@{last}"] = _interval(_ece((weight @ bins)[None])[0], draws)
    per_label: dict[str, Any] = {}
    if predictions.probability is not None and n:
        y = predictions.probability
        hot = torch.zeros_like(y, dtype=torch.bool)
        hot[np.repeat(np.arange(n), labels.row_counts()), labels.indices] = True
        for name, per in (("ece", "all"), ("ece_label", "class")):
            sums = bin_sums("measure", y.double(), hot, None, 10, per, weight)
            metrics[name] = _interval(calibration_error(sums, "l1"), torch.empty(0))
        each = mean_average_precision(y, hot, average="none")
        value = (each.double() if own is None else _average_precisions(y, hot, weight)).nanmean()
        draws = _weighted_map(y, hot, resamples, seed, weight)
        # Rows drawn twice are easier to rank, and rare classes drop out: the draws tell the spread, not the place.
        metrics["map"] = _interval(value, draws - draws.mean() + value)
        by_row = mean_average_precision(y, hot, per="sample", average="none").double().numpy()
        metrics |= _means({"map_sample": by_row}, weight, resamples, seed)
        per_label = _per_label(y, hot, each)
    return {"rows": n, "metrics": metrics, "labels": per_label}


def _means(values: dict[str, np.ndarray], weight: Tensor, resamples: int, seed: int) -> dict[str, dict[str, float]]:
    """Return the mean of each metric over the rows that have it, with its interval."""
    table = torch.from_numpy(np.stack(list(values.values()), -1))
    seen = table.isfinite().double()
    sums = torch.cat([table.nan_to_num(), seen], -1) * weight[:, None]
    drawn = torch.cat([times @ sums for times in _weights(len(table), resamples, seed)])
    over, under = drawn.chunk(2, -1)
    mean, whole = sums.sum(0).chunk(2)
    means = mean / whole
    return {name: _interval(means[i], (over / under)[:, i]) for i, name in enumerate(values)}


def _micro(value: float, counts: np.ndarray, weight: Tensor, resamples: int, seed: int) -> dict[str, float]:
    """Return micro-F1 with its interval, from the right, predicted and true labels of each row."""
    table = torch.from_numpy(counts) * weight[:, None]
    drawn = torch.cat([times @ table for times in _weights(len(table), resamples, seed)])
    return _interval(value, 2 * drawn[:, 0] / (drawn[:, 1] + drawn[:, 2]))


def _weights(n: int, resamples: int, seed: int) -> Iterator[Tensor]:
    """Yield how often each row is drawn in each resample, ``(some, n)``, a few resamples at a time."""
    rng, resamples = np.random.default_rng(seed), max(resamples, 1)
    step = max(CELLS // max(n, 1), 1)
    for at in range(0, resamples, step):
        size = min(step, resamples - at)
        drawn = rng.integers(n, size=(size, n)) + np.arange(size)[:, None] * n if n else np.zeros((size, 0), np.int64)
        yield torch.from_numpy(np.bincount(drawn.ravel(), minlength=size * n).reshape(size, n)).double()


def _interval(value: Any, draws: Tensor) -> dict[str, float]:
    draws = draws[draws.isfinite()]
    out = {"value": float(value), "low": float("nan"), "high": float("nan")}
    if len(draws) > 1:
        low, high = torch.quantile(draws, torch.tensor([0.025, 0.975], dtype=draws.dtype))
        out.update(low=float(low), high=float(high))
    return out


def _bins(confidence: Tensor, hit: Tensor, n_bins: int = 10) -> Tensor:
    """Return the sums of confidence, hits and pairs in each bin of each row, ``(rows, 3 * n_bins)``."""
    place = (confidence * n_bins).long().clamp(0, n_bins - 1)
    parts = (confidence, hit.double(), torch.ones_like(confidence))
    sums = [confidence.new_zeros(len(confidence), n_bins).scatter_add_(1, place, part) for part in parts]
    return torch.cat(sums, -1)


def _ece(bins: Tensor) -> Tensor:
    """Return the calibration error of summed bins."""
    sure, right, pairs = bins.chunk(3, -1)
    total = pairs.sum(-1)
    return (sure - right).abs().sum(-1) / torch.where(total > 0, total, 1)


def _average_precisions(y: Tensor, hot: Tensor, weight: Tensor) -> Tensor:
    """Return the average precision of each class over rows that count by weights; nan for one without positives."""
    from lastlayer.metrics._problems import tie_ends

    out = []
    for part, true in zip(y.T.split(size := max(CELLS // len(y), 1)), hot.T.split(size), strict=True):
        ordered, order = part.sort(-1, descending=True)
        end, each = tie_ends(ordered), weight[order]
        right = true.gather(-1, order) * each
        precision = right.cumsum(-1).gather(-1, end) / each.cumsum(-1).gather(-1, end)
        out.append((right * precision.nan_to_num()).sum(-1) / right.sum(-1))
    return torch.cat(out)


def _weighted_map(y: Tensor, hot: Tensor, resamples: int, seed: int, weight: Tensor | None = None) -> Tensor:
    """Return the mean average precision over classes for resamples of the rows, as many as are affordable."""
    affordable = min(int(4e8 // max(y.numel(), 1)), 4 * CELLS // max(len(y), 1), resamples)
    if affordable < 20:
        return torch.empty(0)
    drawn = torch.cat(list(_weights(len(y), affordable, seed)))
    weights = (drawn if weight is None else drawn * weight).float().T.contiguous()  # rows x resamples
    tiny = torch.finfo(torch.float32).tiny
    total, classes = torch.zeros(affordable), torch.zeros(affordable)
    for c in hot.any(0).nonzero().squeeze(-1).tolist():
        order = y[:, c].argsort(descending=True, stable=True)
        true = hot[order, c]
        # Precision is needed at the labels alone: the weight of the rows up to each of them, from the sums in between.
        part = torch.empty_like(order).scatter_(0, order, true.cumsum(0) - true.long())
        between = torch.zeros(int(true.sum()) + 1, affordable).index_add_(0, part, weights)[:-1]
        right = weights[order[true]]
        positives = right.sum(0)
        gained = (right.cumsum(0) * right / between.cumsum(0).clamp(min=tiny)).sum(0)
        total += torch.where(positives > 0, gained / positives.clamp(min=tiny), 0)
        classes += positives > 0
    return (total / classes.clamp(min=1)).double()


def _per_label(y: Tensor, hot: Tensor, each: Tensor) -> dict[str, Any]:
    """Precision and recall of each label at 0.5, and the threshold that makes its F1 largest on these rows."""
    said = y >= 0.5
    right, support = (said & hot).sum(0).double(), hot.sum(0)
    ordered, order = y.sort(0, descending=True)
    gained = hot.gather(0, order).cumsum(0).double()
    f1 = 2 * gained / (torch.arange(1, len(y) + 1)[:, None] + support)
    f1[:-1][ordered[:-1] == ordered[1:]] = -1  # a threshold takes all rows of a score, or none
    threshold = ordered.gather(0, f1.argmax(0)[None])[0]
    return {
        "support": support.tolist(),
        "precision": (right / said.sum(0)).tolist(),  # nan, null in JSON, where it is never predicted
        "recall": (right / support).tolist(),
        "threshold": torch.where(support > 0, threshold, torch.nan).tolist(),
        "average_precision": each.tolist(),
    }


def calibration_note(model: TrainedModel, x: Any, after: dict[str, Any], at: tuple[int, ...]) -> str | None:
    """Return what calibration did to the calibration errors of rows that were measured with it."""
    if model.calibration is None:
        return None
    labels = after["labels"]
    raw = measure(predict(replace(model, calibration=None), x, labels), at, resamples=0)["metrics"]
    names = [name for name in raw if name.startswith("ece")]
    shown = [
        f"{n.replace('ece_label', 'ece per label')} {_percent(raw[n])} before, {_percent(after['metrics'][n])} after"
        for n in names
    ]
    own = "one slope and offset for all labels" if model.calibration.penalty == np.inf else "each label by itself"
    return f"Calibrated on {model.calibration.rows} held-out rows, {own}: {'; '.join(shown)}."


def _percent(value: dict[str, float]) -> str:
    return f"{100 * value['value']:.2f} %"


def weight_note(labels: LabelData) -> str | None:
    """Return that rows count by their weights, where they do."""
    if labels.weights is None or not labels.weights.any() or (labels.weights == labels.weights[0]).all():
        return None
    return "Metrics count the rows by their weights; the numbers of single labels and of errors count every row once."


def notes(config: Config, part: str) -> list[str]:
    """What to bear in mind when reading the numbers of a part."""
    if part == "train":
        return ["No rows were held out: these are the rows that were trained on, and say little about others."]
    hidden = config.keep < 1 or config.single_positive
    if hidden and part != "valid":
        return ["Labels of the training rows were hidden; these rows have all the labels that the data give them."]
    if not hidden and config.labels == "complete":
        return []
    return [
        "The labels are incomplete, and a right prediction whose label is missing counts as wrong: precision is a "
        "lower bound. Recall is not biased if labels are missing at random. All other metrics, calibration errors "
        "among them, may be off in either direction."
    ]


def evaluate(run: Any, data: LabelData, *, resamples: int = 200) -> dict[str, Any]:
    """Measure a finished run on other rows.

    Args:
        run: A run folder, or a model that was loaded from one.
        data: Rows with labels; labels that the run does not know are dropped and counted in the result. It is an error
            if none is left. Rows count by their weights, if they have any other than 0.
        resamples: The number of bootstrap resamples.

    Returns:
        ``{"rows", "metrics", "labels", "unknown_labels", "unknown_names", "notes"}``, with the names of the five
        most frequent unknown labels.
    """
    model = run if isinstance(run, TrainedModel) else load(run)
    known, unknown = data.with_labels(model.labels)
    names = list(data.unknown_labels(model.labels))[:5]
    if not len(known.indices):
        rows = f"all labels are unknown to the run: {', '.join(names)}" if names else "no row has a label"
        raise DataError(f"evaluate: `data` must have labels that the run knows; {rows}.")
    x = model.features(known)
    predictions = predict(model, x, known)
    out = measure(predictions, model.resolved.at, resamples=resamples, seed=model.config.seed)
    said = [
        *notes(model.config, "other"),
        weight_note(known),
        model.features.note(model.features.unknown_rows(x), len(known)),
    ]
    return {
        **out,
        "unknown_labels": unknown,
        "unknown_names": names,
        "notes": [note for note in said if note],
    }
