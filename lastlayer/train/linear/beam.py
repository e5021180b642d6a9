"""The best labels of each row down label trees: the compiled search, and the same in numpy."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse as sp

from lastlayer._native import linear as native
from lastlayer.train.linear.shape import TreeShape
from lastlayer.train.linear.solver import LinearWeights

LINKS = {
    "squared_hinge": (3.0, 1.0),
    "logistic": (1.0, 0.0),
}  # a child's probability is sigmoid(scale * score + offset)


@dataclass(frozen=True)
class FittedTree:
    """A shape and the weights of all children, node after node; the intercepts are float32."""

    shape: TreeShape
    weights: LinearWeights

    @cached_property
    def by_feature(self) -> dict[str, Any]:
        """The weights of each node ordered by feature, as the compiled search reads them."""
        shape, weights = self.shape, self.weights
        lists = (weights.indptr, weights.indices, weights.values)
        return native.group_features(shape.child_start, *lists, weights.n_features)


def search(
    trees: list[FittedTree], x: sp.csr_matrix, *, loss: str, n_labels: int, k: int, beam: int, threads: int, impl: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the best `k` labels of each row, best first, and the logarithms of their mean scores over the trees.

    The score of a label is the product of the probabilities of the nodes on its path. At each depth the `beam` best
    nodes are followed. Rows with fewer labels are padded with -1 and -inf. Equal scores are ordered by label.
    """
    if impl == "numpy" or (impl == "auto" and native.unavailable()):
        return _search_plain(trees, x, loss, n_labels, k, beam)
    scale, offset = LINKS[loss]
    arrays = []
    for tree in trees:
        shape, count = tree.shape, len(tree.shape.child)
        one = {"n_nodes": shape.n_nodes, "n_features": x.shape[1], "n_labels": n_labels}
        one |= {"child_start": shape.child_start, "child": shape.child, "intercept": tree.weights.intercept}
        one |= {"scale": np.full(count, scale, np.float32), "offset": np.full(count, offset, np.float32)}
        arrays.append(one | tree.by_feature)
    rows = (x.indptr.astype(np.int64), x.indices.astype(np.int32, copy=False), x.data)
    index, score = native.predict(arrays, rows, link="sigmoid", beam=beam, k=k, threads=threads or os.cpu_count() or 1)
    assert index is not None
    return index.astype(np.int64), score


def _search_plain(
    trees: list[FittedTree], x: sp.csr_matrix, loss: str, n_labels: int, k: int, beam: int
) -> tuple[np.ndarray, np.ndarray]:
    """Search without compiled code: the same answers up to rounding, and a hundred times slower."""
    walks = [_walk(tree, x, loss, beam) for tree in trees]
    if len(trees) > 1:
        walks = [_best(*one, keep=4 * k) for one in walks]
    row, label, score = (np.concatenate(part) for part in zip(*walks, strict=True))
    if len(trees) > 1:
        sums = sp.csr_matrix((np.exp(score) / len(trees) + 1e-37, (row, label)), shape=(x.shape[0], n_labels))
        row, label, score = sums.nonzero()[0], sums.indices, np.log(sums.data)
    row, label, score = _best(row, label, score, keep=k)
    index, out = np.full((x.shape[0], k), -1), np.full((x.shape[0], k), -np.inf, np.float32)
    place = np.arange(len(row)) - np.searchsorted(row, row)
    index[row, place], out[row, place] = label, score
    return index, out


def _walk(tree: FittedTree, x: sp.csr_matrix, loss: str, beam: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rows, labels and scores of all labels that the beam reaches."""
    shape, matrix, (scale, offset) = tree.shape, tree.weights.matrix(), LINKS[loss]
    row, node, score = np.arange(x.shape[0]), np.zeros(x.shape[0], int), np.zeros(x.shape[0])
    labels = []
    while len(row):
        reached: list[tuple[np.ndarray, ...]] = [(np.zeros(0, int), np.zeros(0, int), np.zeros(0))]
        for one in np.unique(node):
            here = node == one
            children = slice(int(shape.child_start[one]), int(shape.child_start[one + 1]))
            child = shape.child[children]
            z = scale * ((x[row[here]] @ matrix[children].T).toarray() + tree.weights.intercept[children]) + offset
            total = score[here][:, None] - np.logaddexp(0, -z)
            reached.append((np.repeat(row[here], len(child)), np.tile(child, int(here.sum())), total.ravel()))
        row, to, score = (np.concatenate(part) for part in zip(*reached, strict=True))
        labels.append((row[to >= 0], to[to >= 0], score[to >= 0]))
        row, node, score = _best(row[to < 0], ~to[to < 0], score[to < 0], keep=beam)
    row, label, score = (np.concatenate(part) for part in zip(*labels, strict=True))
    return row, label, score


def _best(
    row: np.ndarray, item: np.ndarray, score: np.ndarray, *, keep: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the `keep` best items of each row, by row and then best first."""
    order = np.lexsort((item, -score, row))
    row, item, score = row[order], item[order], score[order]
    kept = np.arange(len(row)) - np.searchsorted(row, row) < keep
    return row[kept], item[kept], score[kept]
