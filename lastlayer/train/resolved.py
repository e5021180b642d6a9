"""The values that replace "auto" once the training labels are known."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any

import numpy as np

from lastlayer.data import LabelData
from lastlayer.train.config import Config, ConfigError
from lastlayer.train.losses import LOSSES

SET_METRICS = ("micro_f1", "macro_f1", "sample_f1", "hamming_loss", "exact_match")


@dataclass(frozen=True)
class Resolved:
    """What "auto" became for given training labels.

    Args:
        k: The expected number of labels per row, with which the loss trains.
        mean_count: The mean number of labels per row, corrected for labels that were not observed.
        observed: The share of true labels that were recorded; 0 where every label was.
        loss: The loss by name.
        probability: How logits become probabilities, ``"sigmoid"`` or ``"lml"``.
        monitor: The validation metric that chooses the best epoch; empty without validation rows.
        at: The k of precision, recall and nDCG.
        temperature: Divides the logits before they become probabilities.
        k_per_row: Whether a count model predicts the number of labels of each row, for probabilities and label sets.
        blend: The losses of the models whose outputs are added, `loss` first; empty if there is one model.
    """

    k: float
    mean_count: float
    observed: float
    loss: str
    probability: str
    monitor: str
    at: tuple[int, ...]
    temperature: float = 1.0
    k_per_row: bool = False
    blend: str = ""

    @classmethod
    def of(cls, config: Config, data: LabelData) -> Resolved:
        """Choose from the label counts.

        With complete labels, k is the mean number of labels per row. With incomplete labels that is too low: k is the
        mean count divided by the observed share, if that is given, else the 90th percentile of the counts; the observed
        share is then the mean count divided by k. Rows count by their weights.
        """
        counts, n = data.row_counts(), data.n_labels
        even = data.weights is None or len(counts) == 0 or np.ptp(data.weights) == 0
        weights = None if even else data.weights
        loss = "lml" if config.loss == "auto" else config.loss  # the choice, if there is one, replaces it
        mean = float(np.average(counts, weights=weights)) if len(counts) else 0.0
        incomplete = config.labels == "incomplete"
        guess = _quantile(counts, 0.9, weights) if incomplete and len(counts) else mean
        guess = min(guess, most_labels(mean, n))
        if incomplete and config.observed != "auto" and float(config.observed):
            guess = mean / float(config.observed)
        guess = min(max(guess, mean, 0.5), 0.99 * n if n > 1 else 0.5)
        k = guess if config.k in ("auto", "predicted") else float(config.k)
        if k > n:
            raise ConfigError(f"`k` must be at most the number of labels, {n}, got {config.k}.")
        share = min(mean / k, 0.99) if incomplete else 0.0
        observed = share if config.observed == "auto" else float(config.observed)
        at = tuple(a for a in config.at if a <= n) or (1,)
        return cls(
            k=k,
            mean_count=min(max(mean / (observed or 1), 0.01), 0.99 * n),
            observed=observed,
            loss=loss,
            probability=LOSSES[loss].probability if config.probability == "auto" else config.probability,
            monitor=_monitor(config, at),
            at=at,
            temperature=float(config.loss_options.get("temperature", 1.0)),
            k_per_row=config.k == "predicted",
        )

    @classmethod
    def of_run(cls, stored: dict[str, Any], config: Config) -> Resolved:
        """Return what data.json holds; folders of version 0.1 have no temperature, and null for a predicted k."""
        temperature = float(config.loss_options.get("temperature", 1.0))
        values = {"temperature": temperature, **{k: v for k, v in stored.items() if k in cls.__dataclass_fields__}}
        if absent := [item.name for item in fields(cls) if item.default is MISSING and item.name not in values]:
            raise TypeError(f"`resolved.{absent[0]}` must be there")
        if values["k"] is None:
            values.update(k=values["mean_count"], k_per_row=True)
        if empty := [name for name, value in values.items() if value is None]:
            raise TypeError(f"`resolved.{empty[0]}` must not be null")
        return cls(**{**values, "at": tuple(values["at"])})


def most_labels(mean: float, n: int) -> float:
    """Return the largest guess of k that labels may lead to: half of `n` labels, unless rows have more on average."""
    return max(0.5 * n, min(mean, 0.99 * n)) if n > 1 else 0.5


def _quantile(values: np.ndarray, share: float, weights: np.ndarray | None) -> float:
    """Return the quantile of values; with weights, the first value that has the share of them up to it."""
    if weights is None:
        return float(np.quantile(values, share))
    order = np.argsort(values, kind="stable")
    below = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(below, share * below[-1])])


def _monitor(config: Config, at: tuple[int, ...]) -> str:
    monitor = config.monitor
    if monitor == "auto":
        monitor = f"{'recall' if config.labels == 'incomplete' else 'ndcg'}@{at[-1]}"
    allowed = [f"{m}@{a}" for m in ("precision", "recall", "ndcg") for a in at] + list(SET_METRICS)
    if monitor == "valid_loss" and not config.minibatches():
        raise ConfigError(
            "`monitor` must be a metric for the exact solver, whose losses differ in scale, got valid_loss."
        )
    if monitor not in [*allowed, "valid_loss"]:
        raise ConfigError(f"`monitor` must be one of {', '.join(allowed)}, valid_loss, got {monitor!r}.")
    return monitor


def lower_is_better(monitor: str) -> bool:
    """Whether a small value of a metric is a good one."""
    return monitor in ("valid_loss", "hamming_loss")
