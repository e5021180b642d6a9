"""Clusterings that build label trees: agglomerative, k-means and spectral, in numpy, deterministic.

scipy and scikit-learn have all of these, but the core needs torch and numpy alone.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

Linkage = Literal["ward", "single", "complete", "average", "centroid"]
LINKAGES = ("ward", "single", "complete", "average", "centroid")


def agglomerate(points: np.ndarray, method: Linkage) -> tuple[np.ndarray, np.ndarray]:
    """Merge the two nearest clusters until one is left.

    Lance-Williams updates of the distance matrix, with each cluster's nearest later cluster kept, so that a merge
    costs a few rows and not the matrix: O(n^2) memory, about O(n^2) time. Ties go to the lowest numbers.

    Returns:
        Merges ``(n - 1, 2)`` of cluster numbers (a leaf is its row, merge m makes cluster n + m) and their heights,
        as scipy's `linkage` scales them.
    """
    n, squared = len(points), method in ("ward", "centroid")
    x = torch.from_numpy(np.ascontiguousarray(points))
    # Differences, not the expanded square: equal rows are at distance 0 exactly, and ties stay ties.
    distance = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").numpy()
    if squared:
        distance = distance**2
    np.fill_diagonal(distance, np.inf)
    size, number = np.ones(n), np.arange(n)
    upper = np.where(np.triu(np.ones((n, n), dtype=bool), 1), distance, np.inf)
    nearest = upper.argmin(1) if n > 1 else np.zeros(n, dtype=int)
    gap = upper[np.arange(n), nearest]
    del upper
    merges, heights = np.zeros((n - 1, 2), dtype=int), np.zeros(n - 1)
    for m in range(n - 1):
        i = int(gap.argmin())
        j = int(nearest[i])
        merges[m], heights[m] = sorted((number[i], number[j])), distance[i, j]
        row = _updated(method, distance[i], distance[j], distance[i, j], size, i, j)
        # The union takes the place of j; i is gone.
        distance[j], distance[:, j] = row, row
        distance[i], distance[:, i] = np.inf, np.inf
        distance[j, j] = np.inf
        size[j], size[i], number[j] = size[i] + size[j], 0, n + m
        gap[i] = np.inf
        _refresh(distance, nearest, gap, size, i, j)
    return merges, np.sqrt(np.maximum(heights, 0)) if squared else heights


def _updated(
    method: Linkage, to_i: np.ndarray, to_j: np.ndarray, between: float, size: np.ndarray, i: int, j: int
) -> np.ndarray:
    """Distances of every cluster to the union of i and j, by Lance and Williams (1967)."""
    a, b = size[i], size[j]
    union: np.ndarray
    if method == "single":
        union = np.minimum(to_i, to_j)
    elif method == "complete":
        union = np.maximum(to_i, to_j)
    elif method == "average":
        union = (a * to_i + b * to_j) / (a + b)
    elif method == "centroid":
        union = (a * to_i + b * to_j) / (a + b) - a * b * between / (a + b) ** 2
    else:
        union = ((size + a) * to_i + (size + b) * to_j - size * between) / (size + a + b)
    return union


def _refresh(distance: np.ndarray, nearest: np.ndarray, gap: np.ndarray, size: np.ndarray, i: int, j: int) -> None:
    """Bring each cluster's nearest later cluster up to date after the union took place j and left place i."""
    n = len(distance)
    before = np.arange(j)
    closer = (distance[before, j] < gap[before]) & (size[before] > 0)
    lost = ((nearest[:j] == i) | (nearest[:j] == j)) & (size[:j] > 0) & ~closer
    nearest[before[closer]], gap[before[closer]] = j, distance[before[closer], j]
    for r in [*np.flatnonzero(lost), j]:
        if r + 1 >= n:
            gap[r] = np.inf
            continue
        nearest[r] = r + 1 + distance[r, r + 1 :].argmin()
        gap[r] = distance[r, nearest[r]]


def k_means(points: np.ndarray, n_clusters: int, seed: int, restarts: int = 10) -> np.ndarray:
    """Return one cluster per row, every cluster with at least one; Lloyd's iterations from k-means++ starts."""
    random = np.random.default_rng(seed)
    best, best_cost = np.zeros(len(points), dtype=int), np.inf
    for _ in range(restarts):
        centers = _spread(points, n_clusters, random)
        label = np.full(len(points), -1)
        for _ in range(100):
            to_center = _squared_distances(points, centers)
            new = _no_empty(to_center.argmin(1), to_center, n_clusters)
            if (new == label).all():
                break
            label = new
            centers = np.stack([points[label == c].mean(0) for c in range(n_clusters)])
        cost = float(((points - centers[label]) ** 2).sum())
        if cost < best_cost:
            best, best_cost = label, cost
    return best


def _squared_distances(points: np.ndarray, centers: np.ndarray) -> np.ndarray:
    square = (points**2).sum(1)[:, None] - 2 * points @ centers.T + (centers**2).sum(1)
    held: np.ndarray = np.maximum(square, 0)
    return held


def _spread(points: np.ndarray, n_clusters: int, random: np.random.Generator) -> np.ndarray:
    """Choose starts as k-means++ does: each next one with probability in proportion to its squared distance."""
    chosen = [int(random.integers(len(points)))]
    nearest = ((points - points[chosen[0]]) ** 2).sum(1)
    while len(chosen) < n_clusters:
        mass = nearest.sum()
        pick = int(random.choice(len(points), p=nearest / mass)) if mass > 0 else int(random.integers(len(points)))
        chosen.append(pick)
        nearest = np.minimum(nearest, ((points - points[pick]) ** 2).sum(1))
    return points[chosen]


def _no_empty(label: np.ndarray, to_center: np.ndarray, n_clusters: int) -> np.ndarray:
    """Give each empty cluster the point that fits its own cluster worst, out of a cluster that can spare one."""
    label = label.copy()
    for c in range(n_clusters):
        counts = np.bincount(label, minlength=n_clusters)
        if counts[c] == 0:
            fit = np.where(counts[label] > 1, to_center[np.arange(len(label)), label], -1)
            label[int(fit.argmax())] = c
    return label


def spectral(affinity: np.ndarray, n_clusters: int, seed: int) -> np.ndarray:
    """Return one cluster per row: k-means on the rows of the leading eigenvectors (Ng, Jordan and Weiss, 2001)."""
    degree = affinity.sum(1)
    scale = np.where(degree > 0, 1 / np.sqrt(np.where(degree > 0, degree, 1)), 0)
    _, vectors = np.linalg.eigh(scale[:, None] * affinity * scale)
    leading = vectors[:, -n_clusters:]
    length = np.linalg.norm(leading, axis=1, keepdims=True)
    return k_means(leading / np.where(length > 0, length, 1), n_clusters, seed)
