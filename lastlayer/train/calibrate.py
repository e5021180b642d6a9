"""Calibrated probabilities: Platt scaling per label, drawn towards one fit for all labels.

The scores of held-out rows tell how often a label with a given score is right. One slope and offset for all labels is
fitted first. Each label then gets a slope and an offset of its own, with a penalty on how far they are from the common
ones: a label with few positive rows stays close to them. The penalty is the one of a few that predicts held-out halves
of the rows best.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lastlayer.runs import RunFolder
from lastlayer.runs.files import damaged

FILE = "calibration.safetensors"
PENALTIES = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, np.inf)
CELLS = 1 << 21  # pairs of row and label that are held in float64 at a time
POOLED, TRIED = 4_000_000, 4_000_000  # pairs that the common fit, and the choice of the penalty, look at
STEPS = 25  # of Newton's method
FEWEST = 20  # positive pairs below which nothing but the offset is fitted
MARGIN = 1e-3  # by which probabilities of true labels stay below 1


@dataclass(frozen=True)
class Calibration:
    """The log-odds of each label as ``slope * score + offset``.

    Args:
        slope: One positive number per label.
        offset: One number per label.
        rows: The number of rows it was fitted to.
        penalty: The penalty on what differs between labels; infinity if nothing does.
        observed: The share of the true labels that these rows carry; 1 for all. Probabilities are those of the true
            labels: see :func:`true_probability`.
    """

    slope: np.ndarray
    offset: np.ndarray
    rows: int
    penalty: float
    observed: float = 1.0

    @classmethod
    def fit(
        cls,
        scores: np.ndarray,
        hot: Any,
        *,
        weight: np.ndarray | None = None,
        penalties: Sequence[float] = PENALTIES,
        seed: int = 0,
    ) -> Calibration:
        """Fit to the scores of held-out rows.

        Args:
            scores: One score per row and label, the larger the likelier, ``(rows, n_labels)``.
            hot: A SciPy CSR matrix of the same shape with 1 for the labels of each row.
            weight: One number per row; None for 1.
            penalties: Those to choose from; infinity is one slope and offset for all labels.
            seed: Of the halves that choose the penalty.

        Example:
            >>> import scipy.sparse as sp
            >>> scores = np.array([[2.0], [1.0], [-1.0], [-2.0]] * 50)
            >>> hot = sp.csr_matrix(np.array([[1], [0], [1], [0]] * 50))
            >>> calibration = Calibration.fit(scores, hot)
            >>> bool(calibration.slope[0] < 1), calibration.rows
            (True, 200)
        """
        n, n_labels = scores.shape
        weight = np.ones(n) if weight is None else np.asarray(weight, np.float64)
        rows = np.random.default_rng(seed).permutation(n)
        some = np.sort(rows[: max(POOLED // max(n_labels, 1), 1)])
        slope, offset = _pooled(scores[some], hot[some], weight[some])
        penalty = _penalty(scores, hot, weight, rows, (slope, offset), penalties)
        own = _per_label(scores, hot, weight, (slope, offset), penalty)
        return cls((slope * own[0]).astype(np.float32), (offset * own[0] + own[1]).astype(np.float32), n, penalty)

    def log_odds(self, scores: np.ndarray) -> np.ndarray:
        """Return the log-odds that labels with these scores are written down, ``(rows, n_labels)`` float32."""
        return np.asarray(scores * self.slope + self.offset)

    def probability(self, scores: np.ndarray) -> np.ndarray:
        """Return the probabilities of scores, ``(rows, n_labels)`` float32."""
        recorded = torch.from_numpy(self.log_odds(scores).astype(np.float32)).sigmoid()
        return true_probability(recorded, self.observed).numpy()

    def tensors(self, like: Tensor) -> tuple[Tensor, Tensor, float]:
        """Return slope and offset in the dtype and on the device of a tensor, and the observed share."""
        return torch.from_numpy(self.slope).to(like), torch.from_numpy(self.offset).to(like), self.observed

    def save(self, run: RunFolder) -> None:
        """Write calibration.safetensors."""
        numbers = torch.tensor([self.rows, self.penalty, self.observed], dtype=torch.float64)
        run.write_tensors(
            FILE,
            {"slope": torch.from_numpy(self.slope), "offset": torch.from_numpy(self.offset), "numbers": numbers},
        )

    @classmethod
    def load(cls, run: RunFolder, n_labels: int) -> Calibration | None:
        """Read calibration.safetensors; None if the run has none."""
        if not (run / FILE).exists():
            return None
        tensors = run.read_tensors(FILE)
        try:
            slope, offset = tensors["slope"].numpy(), tensors["offset"].numpy()
            rows, penalty, *rest = tensors["numbers"].tolist()
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(run / FILE, error) from None
        if slope.shape != (n_labels,) or offset.shape != (n_labels,):
            raise damaged(run / FILE, f"must hold one slope and offset per label ({n_labels})")
        if not (np.isfinite(slope).all() and np.isfinite(offset).all() and np.isfinite(rows)):
            raise damaged(run / FILE, "must hold finite numbers")
        observed = rest[0] if rest else 1.0  # runs that were written before there was one have no third number
        if not 0 < observed <= 1:
            raise damaged(run / FILE, "must hold an observed share above 0 and at most 1")
        return cls(slope, offset, int(rows), penalty, observed)


def true_probability(recorded: Tensor, observed: float) -> Tensor:
    """Return the probability that a label applies, from the probability that it is written down.

    Where labels are missing at random this is ``min(1, recorded / observed)``. Probabilities that would exceed 1 stay
    below it by at most 0.001, so that the order of the labels does not change.

    Args:
        recorded: The probability that the label is written down.
        observed: The share of the true labels that are written down.

    Example:
        >>> true_probability(torch.tensor([0.1, 0.4, 0.8, 0.9]), 0.5)
        tensor([0.2000, 0.8000, 0.9998, 0.9999])
    """
    return recorded if observed == 1 else torch.minimum(recorded / observed, 1 - MARGIN * (1 - recorded))


def _blocks(n: int, n_labels: int) -> Iterator[slice]:
    """Yield slices of the labels, so that a block of all rows has a bounded number of entries."""
    step = max(CELLS // max(n, 1), 1)
    for at in range(0, n_labels, step):
        yield slice(at, min(at + step, n_labels))


def _pooled(scores: np.ndarray, hot: Any, weight: np.ndarray) -> tuple[float, float]:
    """Fit one slope and offset to all pairs by Newton's method with halved steps.

    Scores are centred and scaled first. Margins lie close to -1 where C is small, and the method would not leave a
    start at which all probabilities are 0.
    """
    s = scores.astype(np.float64).ravel()
    y = np.asarray(hot.toarray(), np.float64).ravel()
    w = np.repeat(weight, scores.shape[1])
    positive, total = float(w @ y), float(w.sum())
    middle, scale = float(np.average(s, weights=w)) if total else 0.0, float(s.std()) or 1.0
    s = (s - middle) / scale
    base = float(np.log((positive + 0.5) / (total - positive + 0.5)))
    if positive < FEWEST or total - positive < FEWEST:
        return 1.0 / scale, base - middle / scale if total else 0.0
    theta = np.array([1.0, base])
    best = _loss(theta, s, y, w)
    for _ in range(STEPS):
        p = _sigmoid(theta[0] * s + theta[1])
        error, curve = w * (p - y), w * p * (1 - p)
        gradient = np.array([error @ s, error.sum()])
        a, b, c = curve @ (s * s) + 1e-9, curve @ s, curve.sum() + 1e-9
        step = np.array([c * gradient[0] - b * gradient[1], a * gradient[1] - b * gradient[0]]) / max(
            a * c - b * b, 1e-12
        )
        size = 1.0
        while size > 1e-4 and (value := _loss(theta - size * step, s, y, w)) > best:
            size /= 2
        if size <= 1e-4:
            break
        theta, gained, best = theta - size * step, best - value, value
        if gained < 1e-9 * max(abs(best), 1):
            break
    slope = max(float(theta[0]), 1e-3) / scale
    return slope, float(theta[1]) - slope * middle


def _loss(theta: np.ndarray, s: np.ndarray, y: np.ndarray, w: np.ndarray) -> float:
    z = theta[0] * s + theta[1]
    return float(w @ (np.logaddexp(0, z) - y * z))


def _penalty(
    scores: np.ndarray,
    hot: Any,
    weight: np.ndarray,
    rows: np.ndarray,
    pooled: tuple[float, float],
    penalties: Sequence[float],
) -> float:
    """Return the penalty whose fit to one half of the rows predicts the other half best."""
    most = max(TRIED // max(scores.shape[1], 1), 2)
    halves = np.sort(rows[:most][0::2]), np.sort(rows[:most][1::2])
    if len(halves[1]) < 2 or len(penalties) == 1:
        return penalties[-1]
    losses = []
    for penalty in penalties:
        lost = 0.0
        for fitted, held in (halves, halves[::-1]):
            own = _per_label(scores[fitted], hot[fitted], weight[fitted], pooled, penalty)
            lost += _log_loss(scores[held], hot[held], weight[held], pooled, own)
        losses.append(lost)
    return penalties[int(np.argmin(losses))]


def _per_label(
    scores: np.ndarray, hot: Any, weight: np.ndarray, pooled: tuple[float, float], penalty: float
) -> np.ndarray:
    """Return for each label the slope and the offset that are applied to the pooled log-odds, ``(2, n_labels)``."""
    n, n_labels = scores.shape
    out = np.stack([np.ones(n_labels), np.zeros(n_labels)])
    if penalty == np.inf:
        return out
    hot, w = hot.tocsc(), weight[:, None]
    for part in _blocks(n, n_labels):
        z = pooled[0] * scores[:, part].astype(np.float64) + pooled[1]
        y = np.asarray(hot[:, part].toarray(), np.float64)
        slope, offset = np.ones(z.shape[1]), np.zeros(z.shape[1])
        for _ in range(STEPS):
            p = _sigmoid(slope * z + offset)
            error, curve = w * (p - y), w * p * (1 - p)
            g = (error * z).sum(0) + penalty * (slope - 1), error.sum(0) + penalty * offset
            a, b, c = (curve * z * z).sum(0) + penalty, (curve * z).sum(0), curve.sum(0) + penalty
            det = np.maximum(a * c - b * b, 1e-12)
            step = np.stack([(c * g[0] - b * g[1]) / det, (a * g[1] - b * g[0]) / det])
            step /= np.maximum(np.abs(step).max(0), 1.0)  # at most 1 at a time, so that it cannot overshoot for long
            slope, offset = np.maximum(slope - step[0], 0.05), offset - step[1]
            if np.abs(step).max(initial=0) < 1e-5:
                break
        out[:, part] = slope, offset
    return out


def _log_loss(scores: np.ndarray, hot: Any, weight: np.ndarray, pooled: tuple[float, float], own: np.ndarray) -> float:
    hot, total = hot.tocsc(), 0.0
    for part in _blocks(*scores.shape):
        z = (pooled[0] * scores[:, part].astype(np.float64) + pooled[1]) * own[0, part] + own[1, part]
        total += float(weight @ (np.logaddexp(0, z) - np.asarray(hot[:, part].toarray()) * z).sum(1))
    return total


def _sigmoid(z: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-np.clip(z, -500, 500))))
