"""Scores of rows that a model has not seen: what probabilities are calibrated and thresholds are tuned on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

from lastlayer.data import LabelData
from lastlayer.runs.rows import row_mean, row_metrics
from lastlayer.train.calibrate import PENALTIES, Calibration
from lastlayer.train.config import Config, ConfigError
from lastlayer.train.decide import Decision
from lastlayer.train.resolved import Resolved, most_labels
from lastlayer.train.serve import TrainedModel, odds, probabilities

CELLS = 40_000_000  # pairs of row and label that are looked at; of more, some rows are drawn
FEWEST = 20  # true labels of held-out rows below which nothing is calibrated or tuned
SPOILT = 0.002  # of a ranking metric that calibration may cost
SUREST = (0.01, 100, 0.1)  # pairs that tell the share of recorded labels: of the labels; at least; but at most of them


@dataclass(frozen=True)
class HeldOut:
    """Scores and labels of rows that a model has not seen.

    Args:
        scores: Log-odds before calibration, or margins, ``(rows, n_labels)`` float32.
        labels: The labels of these rows.
    """

    scores: np.ndarray
    labels: LabelData

    @classmethod
    def of(cls, model: TrainedModel, x: Any, labels: LabelData) -> HeldOut:
        """Score rows with a model; labels that it does not score have minus infinity."""
        most = max(CELLS // max(len(model.labels), 1), 1)
        if len(labels) > most:
            rows = np.sort(np.random.default_rng(0).permutation(len(labels))[:most])
            x, labels = x[rows], labels.take(rows)
        out, at = np.full((len(labels), len(model.labels)), -np.inf, np.float32), 0
        for batch in model.batches(x):
            scores = odds(batch.logits, model.resolved)[0].float().cpu().numpy()
            part = out[at : at + len(scores)]
            at += len(scores)
            if batch.index is None:
                part[:] = scores
            else:
                np.put_along_axis(part, batch.index.cpu().numpy(), scores, 1)
        return cls(out, labels)

    def hot(self) -> sp.csr_matrix:
        """Return the labels as a matrix of 0 and 1."""
        return hot_matrix(self.labels)

    def counted(self) -> HeldOut:
        """Return the rows that count: those of a weight above 0."""
        weights = self.labels.weights
        if weights is None or weights.all():
            return self
        rows = np.flatnonzero(weights)
        return HeldOut(self.scores[rows], self.labels.take(rows))


def hot_matrix(labels: LabelData) -> sp.csr_matrix:
    """Return the labels of rows as a matrix of 0 and 1."""
    ones = np.ones(len(labels.indices), np.int8)
    return sp.csr_matrix((ones, labels.indices, labels.indptr), shape=(len(labels), labels.n_labels))


def decided(held: HeldOut | None, config: Config, resolved: Resolved) -> tuple[Calibration | None, Decision]:
    """Calibrate probabilities and tune thresholds on held-out rows, as the settings of a run say.

    Rows count by their weights.

    Args:
        held: The rows; None if there are none.
        config: The settings.
        resolved: The rule for probabilities without calibration.
    """
    rule, held = config.decide, None if held is None else held.counted()
    enough = held is not None and len(held.labels.indices) >= FEWEST
    calibrate = config.calibrate and config.probability == "auto" and config.k != "predicted"
    if config.labels == "incomplete" and resolved.probability == "lml":
        calibrate = False  # its probabilities are of the true labels; held-out rows show the recorded ones alone
    if rule == "auto":
        tunable = enough and calibrate and config.labels == "complete" and config.k == "auto"
        rule = "micro_f1" if tunable else "top_k"
    if held is None or not enough:
        if rule != "top_k":
            raise ConfigError(not_enough(rule))
        return None, Decision("top_k")
    hot = held.hot()
    calibration = None
    if calibrate:
        calibration = calibrated(held, hot, resolved)
        if config.labels == "incomplete" and resolved.observed:
            calibration = replace(calibration, observed=resolved.observed)
    if calibration is not None:
        y = calibration.probability(held.scores)
    else:
        with torch.inference_mode():
            y = probabilities(torch.from_numpy(held.scores), resolved)[0].numpy()
    observed = resolved.observed if config.labels == "incomplete" else 0.0
    return calibration, Decision.tune(rule, y, hot, observed=observed, weight=held.labels.weights)


def with_share(resolved: Resolved, held: HeldOut | None, config: Config) -> Resolved:
    """Estimate the share of the true labels that are written down, where they are incomplete and nobody said it.

    The surest pairs of row and label are nearly all true, so the part of them that is written down is that share (Elkan
    and Noto 2008); where no pair is sure it is less. Rows are expected to have as many labels as that makes of those
    they carry.

    Args:
        resolved: The settings that the model was trained with.
        held: Scores of rows that it had not seen; None if there are none.
        config: The settings of the run.
    """
    given = config.labels != "incomplete" or config.observed != "auto" or config.k != "auto"
    held = None if held is None else held.counted()
    total = 0 if held is None else len(held.labels.indices)
    count = int(max(SUREST[0] * total, min(SUREST[1], SUREST[2] * total)))
    if given or held is None or count < FEWEST:
        return resolved
    hot = held.hot()
    sure = Calibration.fit(held.scores, hot, weight=held.labels.weights).log_odds(held.scores)
    surest = np.unravel_index(np.argpartition(-sure, count - 1, axis=None)[:count], sure.shape)
    n, mean = held.labels.n_labels, resolved.mean_count * (resolved.observed or 1)
    weight = np.ones(len(sure)) if held.labels.weights is None else held.labels.weights
    by_pair = (weight / weight.mean())[surest[0]]
    found = max(float(by_pair @ np.asarray(hot[surest]).ravel()), 1.0)
    k = min(mean * float(by_pair.sum()) / found, most_labels(mean, n))
    return replace(resolved, k=k, mean_count=k, observed=min(mean / k, 0.99))


def not_enough(rule: str) -> str:
    """Return the message where a rule cannot be tuned."""
    return (
        f"`decide` must be top_k where held-out rows have fewer than {FEWEST} labels, got {rule!r}. "
        "Give more validation rows."
    )


def calibrated(held: HeldOut, hot: sp.csr_matrix, resolved: Resolved) -> Calibration:
    """Calibrate each label by itself, as far as that does not spoil the order of the labels of a row."""
    weight, k = held.labels.weights, resolved.at[-1]
    calibration = Calibration.fit(held.scores, hot, weight=weight)
    before = _ranking(held.scores, held.labels, k)
    half = np.random.default_rng(0).permutation(len(held.labels)) % 2 == 0
    for penalty in [p for p in PENALTIES if p >= calibration.penalty]:
        if penalty == np.inf or len(held.labels) < 4:
            break
        crossed = np.empty_like(held.scores)
        for part in (half, ~half):
            own = None if weight is None else weight[part]
            one = Calibration.fit(held.scores[part], hot[part], weight=own, penalties=(penalty,))
            crossed[~part] = one.log_odds(held.scores[~part])
        if _ranking(crossed, held.labels, k) >= before - SPOILT:
            return Calibration.fit(held.scores, hot, weight=weight, penalties=(penalty,))
    return Calibration.fit(held.scores, hot, weight=weight, penalties=(np.inf,))


def _ranking(scores: np.ndarray, labels: LabelData, k: int) -> float:
    """Return recall at k, which depends on the order alone."""
    top = torch.from_numpy(scores).topk(min(k, scores.shape[1])).indices.numpy()
    each = row_metrics(top, labels.indptr, labels.indices, [k])[f"recall@{k}"]
    return row_mean(each, labels.weights)
