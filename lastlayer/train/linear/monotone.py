"""Scores to probabilities by an increasing map: isotonic regression that is drawn towards Platt's scaling."""

from __future__ import annotations

import numpy as np

BINS = 50
PRIOR = 20.0  # each bin counts as this many more pairs with the rate of Platt's scaling
LARGEST = 30.0  # log-odds of scores are clipped to this size
FURTHEST = 80.0  # and those of probabilities to this


def log_odds(log_p: np.ndarray) -> np.ndarray:
    """Return ``log(p / (1 - p))`` of logarithms of probabilities, clipped to +-30."""
    log_p = np.minimum(np.asarray(log_p, np.float64), -1e-13)
    return np.asarray(np.clip(log_p - np.log(-np.expm1(log_p)), -LARGEST, LARGEST))


def fit_platt(score: np.ndarray, hit: np.ndarray, weight: np.ndarray | None = None) -> tuple[float, float]:
    """Return slope and intercept of Platt's scaling (Newton's method, a weak prior towards the identity)."""
    slope, intercept = 1.0, 0.0
    weight = np.ones(len(score)) if weight is None else weight
    for _ in range(50):
        p = 1 / (1 + np.exp(-np.clip(slope * score + intercept, -FURTHEST, FURTHEST)))
        gap, curve = weight * (p - hit), weight * p * (1 - p)
        gradient = np.array([gap @ score + (slope - 1), gap.sum() + intercept])
        cross = curve @ score
        hessian = np.array([[curve @ (score * score) + 1, cross], [cross, curve.sum() + 1]])
        step = np.linalg.solve(hessian, gradient)
        step *= min(1.0, 2.0 / max(np.abs(step).max(), 1e-30))
        slope, intercept = slope - float(step[0]), intercept - float(step[1])
        if np.abs(step).max() < 1e-8:
            break
    return max(slope, 1e-3), intercept


def fit_map(score: np.ndarray, hit: np.ndarray, weight: np.ndarray | None = None) -> np.ndarray:
    """Return the knots of the map, two rows: log-odds of scores, and log-odds of probabilities, both increasing.

    The pairs are cut into bins of about the same number of hits. The share of hits in each bin, with 20 more pairs from
    Platt's scaling, is made increasing by pooling neighbours. A pair counts as `weight` pairs; None for 1.
    """
    weight = np.ones(len(score)) if weight is None else weight
    slope, intercept = fit_platt(score, hit, weight)
    ends = np.array([-LARGEST, LARGEST])
    line = np.stack([ends, np.clip(slope * ends + intercept, -FURTHEST, FURTHEST)])
    if weight @ hit < 2 * PRIOR:
        return line
    order = np.argsort(score, kind="stable")
    score, weight = score[order], weight[order]
    hit = weight * hit[order]
    below = np.cumsum(hit + weight * (hit.sum() / weight.sum()))  # hits and pairs count alike
    edges = np.unique(np.searchsorted(below, below[-1] * np.arange(1, BINS) / BINS))
    pooled: list[list[float]] = []  # pairs with the prior, hits with it, sum of scores, pairs
    for part in np.split(np.arange(len(score)), edges):
        if not len(part):
            continue
        size, total = float(weight[part].sum()), float((weight[part] * score[part]).sum())
        rate = 1 / (1 + np.exp(-np.clip(slope * total / size + intercept, -FURTHEST, FURTHEST)))
        pooled.append([size + PRIOR, hit[part].sum() + PRIOR * rate, total, size])
        while len(pooled) > 1 and pooled[-2][1] * pooled[-1][0] >= pooled[-1][1] * pooled[-2][0]:
            last = pooled.pop()
            pooled[-1] = [a + b for a, b in zip(pooled[-1], last, strict=True)]
    count, hits, totals, pairs = np.array(pooled).T
    knots = np.stack([totals / pairs, np.log(hits / (count - hits))])
    (x0, y0), (x1, y1) = knots[:, 0], knots[:, -1]
    under = [[-LARGEST], [np.clip(y0 - slope * (x0 + LARGEST), -FURTHEST, y0 - 1e-3)]]
    over = [[LARGEST], [np.clip(y1 + slope * (LARGEST - x1), y1 + 1e-3, FURTHEST)]]
    return np.concatenate([under, knots, over], axis=1)


def apply_map(knots: np.ndarray, score: np.ndarray) -> np.ndarray:
    """Return the log-odds of the probabilities."""
    return np.asarray(np.interp(score, knots[0], knots[1]))


def calibration_error(p: np.ndarray, hit: np.ndarray, bins: int = 10, *, weight: np.ndarray | None = None) -> float:
    """Return the expected calibration error over bins of equal width; a pair counts as `weight` pairs."""
    weight = np.ones(len(p)) if weight is None else weight
    place = np.minimum((p * bins).astype(int), bins - 1)
    gap = np.bincount(place, weight * p, bins) - np.bincount(place, weight * hit, bins)
    return float(np.abs(gap).sum() / (weight.sum() or 1.0))
