"""Trees of CIFAR-100's classes, and what decoders reach on them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import lastlayer as ll
from experiments import common
from lastlayer import LabelTree

LINKAGES = ("ward", "complete", "average", "single", "centroid")
TREES = {
    "prototypes": "Ward, prototypes",
    "linear": "Ward, weights of the linear layer",
    "quadratic": "Ward, label vectors by quadratic loss",
    "means": "Ward, class means of the features",
    "hinton": "k-means, covariance of predictions",
    "hdcnn": "spectral, confusion",
    "coarse": "coarse classes",
    "shuffled": "Ward tree, classes shuffled",
}
THETAS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1.0)
WANTED = (0.75, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99)
SIZES = (1, 2, 3, 5, 10, 20, 50, 100)


class Scores(NamedTuple):
    """What a trained network left behind."""

    valid: Tensor
    valid_target: Tensor
    test: Tensor
    test_target: Tensor
    weight: np.ndarray
    means: np.ndarray
    coarse: list[int]


def read(path: Path) -> Scores:
    with np.load(path, allow_pickle=False) as z:
        valid, test = (torch.from_numpy(z[f"{part}_scores"]).float().softmax(-1) for part in ("valid", "test"))
        valid_target, test_target = (torch.from_numpy(z[f"{part}_fine"]).long() for part in ("valid", "test"))
        return Scores(valid, valid_target, test, test_target, z["weight"], z["means"], z["coarse"].tolist())


def coarse_tree(coarse: list[int]) -> LabelTree:
    """The classes under their coarse classes under a root."""
    n, groups = len(coarse), max(coarse) + 1
    return LabelTree.from_parents([n + c for c in coarse] + [n + groups] * groups + [-1])


def shuffled(tree: LabelTree, seed: int) -> LabelTree:
    """The same shape with the classes in other places."""
    order = np.random.default_rng(seed).permutation(tree.n_leaves).tolist()
    return LabelTree.from_parents([tree.parents[v] for v in order] + list(tree.parents[tree.n_leaves :]))


def trees(scores: Scores, weights: dict[str, np.ndarray], seed: int) -> dict[str, LabelTree]:
    """All trees to compare, by name: of the prototypes, of other last layers, then other linkages of the prototypes."""
    confusion = torch.zeros(100, 100, dtype=torch.long)
    confusion.index_put_((scores.valid_target, scores.valid.argmax(-1)), torch.tensor(1), accumulate=True)
    ward = LabelTree.from_prototypes(scores.weight)
    found = {
        "prototypes": ward,
        "means": LabelTree.from_prototypes(scores.means),
        "hinton": LabelTree.from_confusion(torch.cov(scores.valid.T), "hinton", seed=seed),
        "hdcnn": LabelTree.from_confusion(confusion, "hdcnn", seed=seed),
        "coarse": coarse_tree(scores.coarse),
        "shuffled": shuffled(ward, seed),
    }
    found |= {name: LabelTree.from_prototypes(weight) for name, weight in weights.items()}
    return found | {name: LabelTree.from_prototypes(scores.weight, name) for name in LINKAGES[1:]}


def point(index: Tensor, target: Tensor, tree: LabelTree) -> tuple[float, float]:
    return ll.tree_accuracy(index, target, tree).item(), ll.tree_specificity(index, target, tree).item()


def top_k(scores: Scores) -> Iterator[common.Row]:
    """The k likeliest classes as one set: right if the class is among them, as specific as k classes are."""
    ranks = (scores.test > scores.test.gather(-1, scores.test_target[:, None])).sum(-1)
    for k in SIZES:
        accuracy = (ranks < k).double().mean().item()
        yield {"at": k, "accuracy": accuracy, "specificity": accuracy * (1 - np.log(k) / np.log(100))}


def max_rew(scores: Scores, tree: LabelTree) -> Iterator[common.Row]:
    nodes = tree.probabilities(scores.test)
    for theta in THETAS:
        accuracy, specificity = point(ll.decode_tree(nodes, tree, theta=theta).index, scores.test_target, tree)
        yield {"at": theta, "accuracy": accuracy, "specificity": specificity}


def darts(scores: Scores, tree: LabelTree) -> Iterator[common.Row]:
    """The multiplier is tuned on the validation images for an accuracy; 0 is the first point."""
    valid, nodes = tree.probabilities(scores.valid), tree.probabilities(scores.test)
    lambdas = [0.0] + [ll.tune_darts(valid, scores.valid_target, tree, accuracy=wanted) for wanted in WANTED]
    for wanted, lamb in zip((0.0, *WANTED), lambdas, strict=True):
        index = ll.decode_tree(nodes, tree, method="darts", lamb=lamb).index
        accuracy, specificity = point(index, scores.test_target, tree)
        yield {"at": wanted, "lambda": lamb, "accuracy": accuracy, "specificity": specificity}


def measure(scores: Scores, weights: dict[str, np.ndarray], seed: int) -> Iterator[common.Row]:
    """All curves and matches for the probabilities of one network."""
    for row in top_k(scores):
        yield {"part": "curve", "tree": "none", "decoder": "top-k", "seed": seed} | row
    coarse = coarse_tree(scores.coarse)
    for name, tree in trees(scores, weights, seed).items():
        shape = tree.statistics()
        yield {
            "part": "tree",
            "tree": name,
            "seed": seed,
            "coarse to tree": coarse.match(tree),
            "tree to coarse": tree.match(coarse),
            "height": shape.height,
            "inner nodes": shape.n_internal,
        }
        for decoder, curve in (("MAX-REW", max_rew), ("DARTS", darts)):
            for row in curve(scores, tree):
                yield {"part": "curve", "tree": name, "decoder": decoder, "seed": seed} | row


def specificity_at(points: list[tuple[float, float]], accuracy: float) -> float:
    """Read a curve of (accuracy, specificity) at an accuracy, along straight lines between the points."""
    points = sorted(set(points))
    return float(np.interp(accuracy, [a for a, _ in points], [s for _, s in points]))


def area(points: list[tuple[float, float]], start: float) -> float:
    """The mean specificity of a curve over accuracies from `start`, that of the likeliest class, to 1."""
    grid = np.linspace(start, 1, 201)
    return float(np.mean([specificity_at([*points, (1.0, 0.0)], a) for a in grid]))
