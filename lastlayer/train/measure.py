"""Predictions for held-out rows, and the numbers made of them, with intervals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lastlayer.data import DataError, LabelData
from lastlayer.train.config import Config
from lastlayer.train.serve import TrainedModel, load

DENSE = 8_000_000  # entries of a matrix of probabilities that is kept whole
TOP = 50


@dataclass(frozen=True)
class Predictions:
    """The labels of rows, best first, and the true ones."""

    top_index: Tensor  # (n, m)
    top_probability: Tensor  # (n, m)
    k: Tensor  # (n,)
    probability: Tensor | None  # (n, n_labels), if it is small enough
    labels: LabelData

    @property
    def target(self) -> Tensor:
        """The true labels as index lists padded with -1."""
        return torch.from_numpy(self.labels.padded(np.arange(len(self.labels))))

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
        return out if self.probability is None else {**out, "probability": self.probability}


def predict(
    model: TrainedModel, x: Any, labels: LabelData, *, batch_size: int | None = None, top: int = TOP
) -> Predictions:
    """Compute probabilities for rows of features, and keep those of the `top` best labels of each row."""
    n, n_labels = len(labels), len(model.labels)
    most, keep = min(top, n_labels), n * n_labels <= DENSE
    index, value, counts, whole = [], [], [], []
    for batch in model.batches(x, batch_size):
        places, best = model.best(batch, most)
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
    )


def top_metrics(top: Tensor, target: Tensor, at: tuple[int, ...]) -> dict[str, Tensor]:
    """Return precision, recall and nDCG at each k for each row, from its best classes; nan for a row without labels."""
    hit = (top.unsqueeze(-1) == target.unsqueeze(-2)).any(-1).double()
    count = (target >= 0).sum(-1).double()
    none = torch.where(count > 0, 0.0, torch.nan)
    discount = 1 / torch.arange(2, max(at) + 2, device=top.device, dtype=torch.float64).log2()
    ideal = discount.cumsum(0)
    out = {}
    for k in at:
        right = hit[:, :k].sum(-1)
        out[f"precision@{k}"] = right / k + none
        out[f"recall@{k}"] = right / count.clamp(min=1) + none
        best = ideal[(count.clamp(1, k) - 1).long()]
        out[f"ndcg@{k}"] = (hit[:, :k] * discount[: min(k, hit.shape[1])]).sum(-1) / best + none
    return out


def measure(found: Predictions, at: tuple[int, ...], *, resamples: int = 200, seed: int = 0) -> dict[str, Any]:
    """Return the metrics of predictions, each with a 95 % bootstrap interval over rows."""
    from lastlayer.metrics.average_precision import mean_average_precision
    from lastlayer.metrics.calibration import label_calibration_error

    target, n = found.target, len(found.labels)
    usable = tuple(a for a in at if a <= found.top_index.shape[1]) or (1,)
    weights = _weights(n, resamples, seed)
    metrics: dict[str, dict[str, float]] = {}
    for name, values in top_metrics(found.top_index, target, usable).items():
        seen = values.isfinite()
        metrics[name] = _interval(
            values[seen].mean(), (weights * values.nan_to_num()).sum(-1) / (weights * seen).sum(-1)
        )
    last = usable[-1]
    hit = (found.top_index[:, :last, None] == target[:, None, :]).any(-1)
    top = found.top_probability[:, :last].double()
    metrics[f"ece@{last}"] = _interval(_ece(top, hit, weights[:1] * 0 + 1)[0], _ece(top, hit, weights))
    labels: dict[str, Any] = {}
    if found.probability is not None and n:
        y = found.probability
        hot = torch.zeros_like(y, dtype=torch.bool)
        hot[torch.arange(n)[:, None].expand_as(target)[target >= 0], target[target >= 0]] = True
        metrics["ece"] = _interval(label_calibration_error(y.double(), hot), torch.empty(0))
        each = mean_average_precision(y, hot, average="none")
        value, draws = each.double().nanmean(), _weighted_map(y, hot, weights)
        # Rows drawn twice are easier to rank, and rare classes drop out: the draws tell the spread, not the place.
        metrics["map"] = _interval(value, draws - draws.mean() + value)
        by_row = mean_average_precision(y, hot, per="sample", average="none").double()
        seen = by_row.isfinite()
        drawn = (weights * by_row.nan_to_num()).sum(-1) / (weights * seen).sum(-1)
        metrics["map_sample"] = _interval(by_row.nanmean(), drawn)
        labels = _per_label(y, hot, each)
    return {"rows": n, "metrics": metrics, "labels": labels}


def _weights(n: int, resamples: int, seed: int) -> Tensor:
    """Return how often each row is drawn in each resample, ``(resamples, n)``."""
    drawn = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / max(n, 1)), size=max(resamples, 1))
    return torch.from_numpy(drawn).double() if n else torch.zeros(max(resamples, 1), 0, dtype=torch.float64)


def _interval(value: Any, draws: Tensor) -> dict[str, float]:
    draws = draws[draws.isfinite()]
    out = {"value": float(value), "low": float("nan"), "high": float("nan")}
    if len(draws) > 1:
        low, high = torch.quantile(draws, torch.tensor([0.025, 0.975], dtype=draws.dtype))
        out.update(low=float(low), high=float(high))
    return out


def _ece(confidence: Tensor, hit: Tensor, weights: Tensor, n_bins: int = 10) -> Tensor:
    """The calibration error of the given pairs for each row of weights."""
    place = (confidence * n_bins).long().clamp(0, n_bins - 1)
    shape = (len(confidence), n_bins)
    sums = [
        torch.zeros(shape, dtype=torch.float64).scatter_add_(1, place, part)
        for part in (confidence, hit.double(), torch.ones_like(confidence))
    ]
    sure, right, pairs = (weights @ s for s in sums)
    return (sure - right).abs().sum(-1) / pairs.sum(-1).clamp(min=1)


def _weighted_map(y: Tensor, hot: Tensor, weights: Tensor) -> Tensor:
    """The mean average precision over classes for each row of weights."""
    work = max(int(4e8 // max(y.numel(), 1)), 0)
    weights = weights[: max(min(len(weights), work), 0)].float()
    if len(weights) < 20:  # too large to draw again
        return torch.empty(0)
    total, classes = torch.zeros(len(weights)), torch.zeros(len(weights))
    for c in hot.any(0).nonzero().squeeze(-1).tolist():
        order = y[:, c].argsort(descending=True, stable=True)
        w = weights[:, order]
        right = w * hot[order, c]
        gained = right.cumsum(-1) * right / w.cumsum(-1).clamp(min=1)
        positives = right.sum(-1)
        total += torch.where(positives > 0, gained.sum(-1) / positives.clamp(min=1), 0)
        classes += positives > 0
    return (total / classes.clamp(min=1)).double()


def _per_label(y: Tensor, hot: Tensor, each: Tensor) -> dict[str, Any]:
    """Precision and recall of each label at 0.5, and the threshold that makes its F1 largest on these rows."""
    said = y >= 0.5
    right, support = (said & hot).sum(0).double(), hot.sum(0)
    order = y.argsort(0, descending=True)
    gained = hot.gather(0, order).cumsum(0).double()
    f1 = 2 * gained / (torch.arange(1, len(y) + 1)[:, None] + support)
    best = f1.argmax(0)
    threshold = y.gather(0, order).gather(0, best[None])[0]
    return {
        "support": support.tolist(),
        "precision": (right / said.sum(0)).tolist(),  # nan, null in JSON, where it is never predicted
        "recall": (right / support).tolist(),
        "threshold": torch.where(support > 0, threshold, torch.nan).tolist(),
        "average_precision": each.tolist(),
    }


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
        "The labels are incomplete: precision, average precision and calibration count right predictions that nobody "
        "labelled as wrong, so they are lower bounds; recall is not affected by labels that are missing at random."
    ]


def evaluate(run: Any, data: LabelData, *, resamples: int = 200) -> dict[str, Any]:
    """Measure a finished run on other rows.

    Args:
        run: A run folder, or a model that was loaded from one.
        data: Rows with labels; labels that the run does not know are dropped and counted in the result. It is an error
            if none is left.
        resamples: The number of bootstrap resamples.

    Returns:
        ``{"rows", "metrics", "labels", "unknown_labels", "unknown_names", "notes"}``, with the names of the five
        commonest unknown labels.
    """
    model = run if isinstance(run, TrainedModel) else load(run)
    known, unknown = data.with_labels(model.labels)
    names = list(data.unknown_labels(model.labels))[:5]
    if not len(known.indices):
        rows = f"all labels are unknown to the run: {', '.join(names)}" if names else "no row has a label"
        raise DataError(f"evaluate: `data` must have labels that the run knows; {rows}.")
    x = model.features(known)
    found = predict(model, x, known)
    out = measure(found, model.resolved.at, resamples=resamples, seed=model.config.seed)
    said = [*notes(model.config, "other"), model.features.note(model.features.unknown_rows(x), len(known))]
    return {
        **out,
        "unknown_labels": unknown,
        "unknown_names": names,
        "notes": [note for note in said if note],
    }
