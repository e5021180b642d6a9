"""The shape of a label tree: clusters of labels with similar rows, or a hierarchy that is given."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp

from lastlayer.train.linear.rows import LabelRows, take_lists
from lastlayer.train.linear.solver import Problems

FEATURES = 2048  # the largest number of features in the vector of one label
PRODUCTS = 1 << 24  # label vectors are summed over about this many feature values at a time
BLOCK = 1 << 20  # values of a sparse matrix that are looked at together
ROUNDS = 20  # of 2-means at most
GAIN = 1e-4  # of 2-means, below which it stops


@dataclass(frozen=True)
class TreeShape:
    """A tree whose leaves are the labels; node 0 is the root, and every node comes before its children.

    Args:
        child_start: Where the children of each node start in `child`, one more number than there are nodes.
        child: A label, or ``~node`` (which is negative) for a node.
    """

    child_start: np.ndarray
    child: np.ndarray

    @property
    def n_nodes(self) -> int:
        """The number of nodes that are not labels."""
        return len(self.child_start) - 1

    def owner(self) -> np.ndarray:
        """Return the node that each child belongs to."""
        return np.repeat(np.arange(self.n_nodes), np.diff(self.child_start))

    def node_rows(self, labels: LabelRows, n_rows: int, rows: np.ndarray | None = None) -> LabelRows:
        """Return the rows that reach each node: all rows for the root, else the rows with a label below the node.

        `rows` are all rows, if they are a part of those that `labels` counts; only these carry labels then.
        """
        owner, inner = self.owner(), self.child < 0
        parent = np.full(self.n_nodes, -1)
        parent[~self.child[inner]] = owner[inner]
        label, node = self.child[~inner], owner[~inner]
        nodes, below = [], []
        while len(node):  # the nodes above each label, one level at a time; the root is left out
            label, node = label[node > 0], node[node > 0]
            nodes.append(node)
            below.append(label)
            node = parent[node]
        pairs = (np.concatenate(nodes), np.concatenate(below)) if nodes else (np.zeros(0, int), np.zeros(0, int))
        above = sp.csr_matrix((np.ones(len(pairs[0]), bool), pairs), shape=(self.n_nodes, labels.n_labels))
        carried = sp.csr_matrix((np.ones(len(labels.rows), bool), labels.rows, labels.start), (labels.n_labels, n_rows))
        reach = (above @ carried).tocsr()
        reach.sort_indices()
        every = np.arange(n_rows, dtype=np.int32) if rows is None else rows.astype(np.int32)
        start = np.append(0, reach.indptr[1:].astype(np.int64) + len(every))
        return LabelRows(start, np.concatenate([every, reach.indices.astype(np.int32)]))

    def problems(self, labels: LabelRows, n_rows: int, rows: np.ndarray | None = None) -> Problems:
        """Return one problem per node: its rows, and for each child the rows that carry the label or reach the node."""
        reach = self.node_rows(labels, n_rows, rows)
        start = np.concatenate([labels.start, reach.start[1:] + len(labels.rows)])
        lists = np.where(self.child >= 0, self.child, labels.n_labels + ~self.child)
        below = LabelRows(*take_lists(start, np.concatenate([labels.rows, reach.rows]), lists))
        return Problems(self.child_start, below, reach.start, reach.rows)

    @staticmethod
    def from_parents(parents: Sequence[int]) -> TreeShape:
        """Build the shape from the parent of each node, -1 for the root; the leaves are the labels, in their order."""
        above = np.asarray(parents)
        children = [np.zeros(0, int)] * len(above)
        order = np.argsort(above, kind="stable")
        edges = np.searchsorted(above[order], np.arange(len(above) + 1))
        for node in range(len(above)):
            children[node] = order[edges[node] : edges[node + 1]]
        label = np.full(len(above), -1)
        leaves = np.flatnonzero([len(below) == 0 for below in children])
        label[leaves] = np.arange(len(leaves))
        nodes, child, start, at = [int(np.flatnonzero(above < 0)[0])], [], [0], 0
        while at < len(nodes):
            for below in children[nodes[at]].tolist():
                child.append(int(label[below]) if label[below] >= 0 else ~len(nodes))
                if label[below] < 0:
                    nodes.append(below)
            start.append(len(child))
            at += 1
        return TreeShape(np.array(start, np.int64), np.array(child, np.int32))


def label_vectors(x: Any, labels: LabelRows) -> Any:
    """Return one unit vector per label: the sum of its rows' features, each row of unit length; 0 without rows.

    Of each label the 2,048 largest features are kept, so the memory grows with the labels.
    """
    sparse = sp.issparse(x)
    scale = (1 / _lengths(x)).astype(np.float32)
    members = sp.csr_matrix((scale[labels.rows], labels.rows, labels.start), (labels.n_labels, x.shape[0]))
    if not sparse:
        return unit_rows(np.asarray(members @ x, np.float32))
    work = np.append(0, np.cumsum(np.diff(x.indptr).astype(np.int64)[labels.rows]))[labels.start]
    blocks = []
    first = 0
    while first < labels.n_labels:
        last = max(first + 1, int(np.searchsorted(work, work[first] + PRODUCTS)))
        blocks.append(_largest(unit_rows((members[first:last] @ x).tocsr()), FEATURES))
        first = last
    return sp.vstack(blocks, "csr") if blocks else sp.csr_matrix((0, x.shape[1]), dtype=np.float32)


def unit_rows(x: Any) -> Any:
    """Return the rows at unit length, rows of zeros as they are; a sparse matrix shares its indices with the answer.

    Rows that all have unit length are returned as they are.
    """
    lengths = _lengths(x)
    if x.dtype == np.float32 and (np.abs(lengths - 1) < 1e-6).all():
        return x
    if not sp.issparse(x):
        return (x / lengths[:, None]).astype(np.float32)
    values = np.empty(len(x.data), np.float32)
    for rows in _blocks(x):
        part = slice(x.indptr[rows.start], x.indptr[rows.stop])
        values[part] = x.data[part] / np.repeat(lengths[rows], np.diff(x.indptr[rows.start : rows.stop + 1]))
    return sp.csr_matrix((values, x.indices, x.indptr), shape=x.shape)


def _blocks(x: Any) -> Iterator[slice]:
    """Yield runs of the rows of a sparse matrix with about a million values each."""
    cuts = np.searchsorted(x.indptr, np.arange(0, x.indptr[-1], BLOCK), side="right") - 1
    for first, last in itertools.pairwise(np.unique([*cuts, 0, x.shape[0]]).tolist()):
        yield slice(first, last)


def _lengths(x: Any) -> np.ndarray:
    """Return the length of each row, in float64; 1 for rows of zeros."""
    if sp.issparse(x):
        squares = np.zeros(x.shape[0])
        for rows in _blocks(x):
            start = x.indptr[rows.start : rows.stop + 1]
            row = np.repeat(np.arange(len(start) - 1), np.diff(start))
            square = np.square(x.data[start[0] : start[-1]], dtype=np.float64)
            squares[rows] = np.bincount(row, square, len(start) - 1)
    else:
        squares = np.square(x, dtype=np.float64).sum(1)
    lengths = np.sqrt(squares)
    return np.where(lengths > 0, lengths, 1.0)


def _largest(matrix: sp.csr_matrix, most: int) -> sp.csr_matrix:
    """Keep the largest entries of each row."""
    for row in np.flatnonzero(np.diff(matrix.indptr) > most):
        values = matrix.data[matrix.indptr[row] : matrix.indptr[row + 1]]
        values[np.argpartition(np.abs(values), len(values) - most)[: len(values) - most]] = 0
    matrix.eliminate_zeros()
    return matrix


def halve(vectors: Any, rng: np.random.Generator) -> np.ndarray:
    """Cut unit vectors into halves of the same size (to one) by spherical 2-means; True marks the second half."""
    n = vectors.shape[0]
    first, second = rng.choice(n, 2, replace=False)
    centre = vectors[[second]] - vectors[[first]]
    centre = np.asarray(centre.todense() if sp.issparse(centre) else centre).ravel()
    total = vectors.T @ np.ones(n, np.float32)
    best, upper_half = -np.inf, np.zeros(n, bool)
    for _ in range(ROUNDS):
        order = np.argpartition(vectors @ centre, n // 2)
        upper = np.zeros(n, bool)
        upper[order[n // 2 :]] = True
        high = vectors.T @ upper.astype(np.float32)
        low = total - high
        lengths = float(np.linalg.norm(low)), float(np.linalg.norm(high))
        if sum(lengths) <= best * (1 + GAIN):  # the sum of the cosines to the centre of the own half
            break
        best, upper_half = sum(lengths), upper
        centre = high / max(lengths[1], 1e-30) - low / max(lengths[0], 1e-30)
    return upper_half


def cluster(vectors: Any, *, leaf: int, branching: int, seed: int) -> TreeShape:
    """Build a balanced tree by halving the labels again and again.

    Args:
        vectors: One unit vector per label.
        leaf: The largest number of labels in a node.
        branching: About the largest number of children of the other nodes.
        seed: Of the starts of 2-means.
    """
    rng = np.random.default_rng(seed)
    n = vectors.shape[0]
    bits = max(0, int(np.ceil(np.log2(max(n, 1) / leaf))))
    levels = max(1, int(np.ceil(bits / np.log2(branching)))) if bits else 0
    parts = [np.arange(n)]
    for _ in range(bits):
        halves = ((part, halve(vectors[part], rng)) for part in parts)
        parts = [half for part, upper in halves for half in (part[~upper], part[upper])]
    widths = [1 << round(bits * level / max(levels, 1)) for level in range(levels + 1)]
    start, child, at = [0], [], 1
    for width, below in itertools.pairwise(widths):
        for node in range(width):
            first = at + node * (below // width)
            child += [~i for i in range(first, first + below // width)]
            start.append(len(child))
        at += below
    for part in parts:
        child += sorted(part.tolist())
        start.append(len(child))
    return TreeShape(np.array(start, np.int64), np.array(child, np.int32))
