"""Label trees: build them, put probabilities on their nodes, compare and draw them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lastlayer import _check, _cluster, _tree_build, _tree_nodes, _tree_text

__all__ = ["LabelTree", "TreeStatistics"]

Rule = Literal["sum", "negation"]


class TreeStatistics(NamedTuple):
    """The shape of a tree: `height` counts levels, so a root with its leaves has 2; `std_children` divides by n."""

    height: int
    n_internal: int
    mean_children: float
    std_children: float
    n_leaves: int


@dataclass(frozen=True, repr=False)
class LabelTree:
    """A tree whose leaves are the classes; an immutable value.

    The builder numbers the nodes; classes are the leaves in the order of their numbers. Trees built from
    weights or a matrix have the classes first, then the inner nodes, then the root.

    Args:
        parents: The parent of each node; -1 for the root.
        names: One name per node; empty if there are none.

    Example:
        >>> tree = LabelTree.from_parents([4, 4, 5, 5, 6, 6, -1])
        >>> tree.probabilities(torch.tensor([0.5, 0.25, 0.125, 0.125]))
        tensor([0.5000, 0.2500, 0.1250, 0.1250, 0.7500, 0.2500, 1.0000])
    """

    parents: tuple[int, ...]
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _tree_build.check_parents(self.parents)
        if self.names and len(self.names) != len(self.parents):
            raise ValueError(
                f"LabelTree: `names` must hold one name per node ({len(self.parents)}), got {len(self.names)}."
            )

    def __repr__(self) -> str:
        height = max(self.depth) + 1
        return f"LabelTree(n_leaves={self.n_leaves}, n_nodes={self.n_nodes}, height={height})"

    @classmethod
    def from_parents(
        cls, parents: Sequence[int] | Tensor | np.ndarray | Mapping[str, str | None], *, names: Iterable[str] = ()
    ) -> LabelTree:
        """Build a tree from each node's parent.

        Args:
            parents: The number of each node's parent, -1 (or None) for the root; or a mapping from a node's name to
                its parent's, None for the root. A mapping puts leaves first, in its own order.
            names: Names of the nodes in order; with as many names as leaves, of the classes.

        Example:
            >>> LabelTree.from_parents({"cat": "pet", "dog": "pet", "pet": None}).parents
            (2, 2, -1)
        """
        if isinstance(parents, Mapping):
            return cls(*_tree_build.numbered(parents, None))
        if isinstance(parents, (Tensor, np.ndarray)):
            parents = parents.tolist()
        if isinstance(parents, str) or not isinstance(parents, Sequence):
            raise TypeError(
                f"LabelTree.from_parents: `parents` must be a sequence of integers or a mapping of names, "
                f"got {type(parents).__name__}."
            )
        bad = [p for p in parents if p is not None and (isinstance(p, bool) or not isinstance(p, (int, np.integer)))]
        if bad:
            raise TypeError(
                f"LabelTree.from_parents: `parents` must hold integers, got {bad[0]!r}. Use -1 for the root."
            )
        tree = cls(tuple(-1 if p is None else int(p) for p in parents))
        return tree.with_names(names)

    @classmethod
    def from_dict(cls, nested: Mapping[str, Any], *, classes: Sequence[str] | None = None) -> LabelTree:
        """Build a tree from nested dictionaries, as in ``{"animal": {"cat": None, "bird": ["duck", "crow"]}}``.

        A leaf is a name with None or nothing under it, or a string in a list. A single name at the top is the root; if
        there are several, a root named "root" is added.

        Args:
            nested: Names to what is under them.
            classes: All leaf names in the order of the classes; by default the order in which they occur.

        Example:
            >>> tree = LabelTree.from_dict({"pet": ["cat", "dog"], "plant": None})
            >>> tree.to_newick()
            '(plant,(cat,dog)pet)root;'
        """
        if not isinstance(nested, Mapping) or not nested:
            raise TypeError(
                f"LabelTree.from_dict: `nested` must be a dictionary with at least one name, got {nested!r}."
            )
        parents: dict[str, str | None] = {}
        if len(nested) > 1:
            parents["root"] = None
        stack: list[tuple[str | None, Any]] = [("root" if len(nested) > 1 else None, nested)]
        while stack:
            above, below = stack.pop()
            for name, rest in _tree_build.items(below):
                if name in parents:
                    raise ValueError(f"LabelTree.from_dict: each name must occur once, got {name!r} twice. Rename one.")
                parents[name] = above
                if rest:
                    stack.append((name, rest))
        return cls(*_tree_build.numbered(parents, _tree_build.leaf_order(nested) if classes is None else classes))

    @classmethod
    def from_prototypes(
        cls, weights: Tensor | np.ndarray, method: _cluster.Linkage = "ward", *, names: Iterable[str] = ()
    ) -> LabelTree:
        r"""Build a binary tree by agglomerative clustering of the classes' prototypes.

        Ward's linkage (1963) merges the two clusters whose union adds least to the sum of squares,

        .. math:: d(A, B) = \frac{|A||B|}{|A|+|B|} \lVert m_A - m_B \rVert^2 .

        The tree follows the order of the merges, since centroid linkage can merge at a lower height than before.
        Takes O(n^2) memory: meant for up to a few thousand classes.

        Args:
            weights: One prototype (or row of a last linear layer) per class, shape ``(n_classes, n_features)``.
            method: ``"ward"``, ``"single"``, ``"complete"``, ``"average"`` or ``"centroid"``.
            names: Names of the classes, or of all nodes.

        Example:
            >>> LabelTree.from_prototypes(torch.tensor([[0.0], [5.0], [0.1], [5.2]])).to_newick()
            '((0,2)4,(1,3)5)6;'
        """
        op = "LabelTree.from_prototypes"
        _check.choice(op, "method", method, _cluster.LINKAGES)
        points = _tree_build.matrix(op, "weights", weights)
        merges, _ = _cluster.agglomerate(points, method)
        n = len(points)
        parents = [-1] * (2 * n - 1)
        for m, pair in enumerate(merges.tolist()):
            for child in pair:
                parents[child] = n + m
        return cls(tuple(parents)).with_names(names)

    @classmethod
    def from_confusion(
        cls,
        matrix: Tensor | np.ndarray,
        method: Literal["hinton", "hdcnn"] = "hdcnn",
        *,
        n_clusters: int | None = None,
        seed: int = 0,
        names: Iterable[str] = (),
    ) -> LabelTree:
        """Build a tree of two levels, clusters of classes under a root, from a class-by-class matrix.

        ``"hdcnn"`` (after Yan et al., 2015) clusters classes that are confused: spectral clustering of a confusion
        matrix, made symmetric, rows divided by their sums. ``"hinton"`` (after Hinton et al., 2015) runs k-means on the
        rows of a covariance matrix of the predictions, e.g. ``torch.cov(probabilities.T)``.

        Args:
            matrix: Confusion counts or rates (row: truth), or a covariance, shape ``(n_classes, n_classes)``.
            method: ``"hdcnn"`` or ``"hinton"``.
            n_clusters: By default one for every ten classes, rounded down, at least one.
            seed: The seed of the k-means starts; the same seed gives the same tree.
            names: Names of the classes, or of all nodes.

        Example:
            >>> confusion = torch.tensor([[8, 2, 0, 0], [2, 8, 0, 0], [0, 0, 9, 1], [0, 0, 1, 9]])
            >>> LabelTree.from_confusion(confusion, n_clusters=2).to_newick()
            '((0,1)4,(2,3)5)6;'
        """
        op = "LabelTree.from_confusion"
        _check.choice(op, "method", method, ("hinton", "hdcnn"))
        values = _tree_build.matrix(op, "matrix", matrix)
        n = len(values)
        if values.shape[1] != n:
            raise ValueError(f"{op}: `matrix` must be square, one row and column per class, got shape {values.shape}.")
        if n_clusters is None:
            n_clusters = max(n // 10, 1)
        n_clusters = _check.plain(n_clusters)
        if isinstance(n_clusters, bool) or not isinstance(n_clusters, int) or not 1 <= n_clusters <= n:
            raise ValueError(f"{op}: `n_clusters` must be an integer between 1 and n_classes={n}, got {n_clusters!r}.")
        if method == "hinton":
            label = _cluster.k_means(values, n_clusters, seed)
        else:
            if (values < 0).any():
                raise ValueError(f'{op}: `matrix` must not be negative for method="hdcnn", got {values.min():g}.')
            total = values.sum(1, keepdims=True)
            rates = values / np.where(total > 0, total, 1)
            affinity = (rates + rates.T) / 2
            np.fill_diagonal(affinity, 0)
            label = _cluster.spectral(affinity, n_clusters, seed)
        first = {c: place for place, c in enumerate(dict.fromkeys(label.tolist()))}  # numbered by their lowest class
        parents = [n + first[c] for c in label.tolist()] + [n + n_clusters] * n_clusters + [-1]
        return cls(tuple(parents)).with_names(names)

    def with_names(self, names: Iterable[str]) -> LabelTree:
        """Return the same tree with one name per node, or per class (inner nodes then have their numbers as names)."""
        given = tuple(str(name) for name in names)
        if len(given) == self.n_leaves != self.n_nodes:
            table = [str(v) for v in range(self.n_nodes)]
            for leaf, name in zip(self._leaves, given, strict=True):
                table[leaf] = name
            given = tuple(table)
        if given and len(given) != self.n_nodes:
            raise ValueError(
                f"LabelTree: `names` must hold one name per class ({self.n_leaves}) or per node ({self.n_nodes}), "
                f"got {len(given)}."
            )
        return LabelTree(self.parents, given)

    @property
    def n_nodes(self) -> int:
        """The number of nodes."""
        return len(self.parents)

    @property
    def n_leaves(self) -> int:
        """The number of leaves, which is the number of classes."""
        return len(self._leaves)

    @cached_property
    def root(self) -> int:
        """The number of the root."""
        return self.parents.index(-1)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """The children of each node, in the order of their numbers."""
        below: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                below[parent].append(node)
        return tuple(tuple(b) for b in below)

    @property
    def leaves(self) -> Tensor:
        """The node of each class, shape ``(n_classes,)``."""
        return torch.tensor(self._leaves)

    @cached_property
    def _leaves(self) -> tuple[int, ...]:
        return tuple(v for v, below in enumerate(self.children) if not below)

    @cached_property
    def _order(self) -> tuple[int, ...]:
        """Nodes in the order of a walk that visits a parent first, then its children one subtree at a time."""
        out, stack = [], [self.root]
        while stack:
            node = stack.pop()
            out.append(node)
            stack.extend(reversed(self.children[node]))
        return tuple(out)

    @cached_property
    def depth(self) -> tuple[int, ...]:
        """The number of steps from the root to each node."""
        out = [0] * self.n_nodes
        for v in self._order[1:]:
            out[v] = out[self.parents[v]] + 1
        return tuple(out)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of leaves under each node; 1 for a leaf."""
        begin, end = self.spans
        return tuple(e - b for b, e in zip(begin, end, strict=True))

    @cached_property
    def spans(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The begin and end of each node's leaves in the order of a walk: a node contains another if its span does."""
        begin, end, count = [0] * self.n_nodes, [0] * self.n_nodes, 0
        for v in self._order:
            begin[v] = count
            count += not self.children[v]
        for v in reversed(self._order):
            end[v] = end[self.children[v][-1]] if self.children[v] else begin[v] + 1
        return tuple(begin), tuple(end)

    @property
    def specificity(self) -> Tensor:
        r"""The information gain of each node, :math:`1 - \log|Y| / \log N`: 1 for a leaf, 0 for the root; float64.

        The root of a tree of one class is its leaf, and has 1.
        """
        size = torch.tensor(self.sizes, dtype=torch.float64)
        return 1 - size.log() / (math.log(self.n_leaves) if self.n_leaves > 1 else 1)

    def membership(self) -> Tensor:
        """Return which classes are under which node: boolean, shape ``(n_nodes, n_classes)``."""
        begin, end = torch.tensor(self.spans)
        place = begin[self.leaves]
        inside: Tensor = (begin[:, None] <= place) & (place < end[:, None])
        return inside

    def leaves_under(self, node: int) -> tuple[int, ...]:
        """Return the classes under a node, in increasing order."""
        begin, end = self.spans
        return tuple(c for c, leaf in enumerate(self._leaves) if begin[node] <= begin[leaf] < end[node])

    def probabilities(self, p: Tensor, rule: Rule = "sum", *, recalibrate: bool = True) -> Tensor:
        r"""Compute the probabilities of all nodes from those of the classes; differentiable.

        .. math:: P(V) = \sum_{l \in V} p_l \quad \text{(sum)}, \qquad
            P(V) = 1 - \prod_{l \in V} (1 - p_l) \quad \text{(negation)}

        The sum rule is for one label per row. The negation rule assumes that labels are independent, so it is too high
        where labels occur together. With `recalibrate` all nodes are divided by P(root), which then is exactly 1. In a
        row where every label is unlikely this inflates tiny numbers, so turn it off where rows without labels matter.
        P never decreases towards the root, not even by rounding.

        Args:
            p: Probabilities of the classes, shape ``(..., n_classes)``.
            rule: ``"sum"`` or ``"negation"``.
            recalibrate: Divide by P(root). A row with P(root) = 0 is 0, and 1 at the root.

        Returns:
            Probabilities of the nodes, shape ``(..., n_nodes)``, of the dtype of `p`.

        Example:
            >>> tree = LabelTree.from_parents([2, 2, -1])
            >>> tree.probabilities(torch.tensor([0.5, 0.5]), "negation", recalibrate=False)
            tensor([0.5000, 0.5000, 0.7500])
        """
        op = "LabelTree.probabilities"
        _check.choice(op, "rule", rule, ("sum", "negation"))
        x = self._leaf_values(op, "p", p)
        levels = self._levels(p.device)
        node = _tree_nodes.by_sum(x, levels) if rule == "sum" else _tree_nodes.by_negation(x, levels)
        if recalibrate:
            top = node[..., self.root : self.root + 1]
            node = torch.where(top > 0, node / torch.where(top > 0, top, 1), node)
            node = torch.where(self._is_root(p.device) & ~top.isnan(), 1, node)
        return node.to(p.dtype)

    def log_probabilities(self, log_p: Tensor, rule: Rule = "sum", *, recalibrate: bool = True) -> Tensor:
        """Compute the log-probabilities of all nodes from those of the classes, accurate where probabilities underflow.

        Args:
            log_p: Log-probabilities of the classes, shape ``(..., n_classes)``, e.g. from `log_softmax`.
            rule: As in :meth:`probabilities`.
            recalibrate: Subtract log P(root).

        Returns:
            Log-probabilities of the nodes, shape ``(..., n_nodes)``.

        Example:
            >>> tree = LabelTree.from_parents([3, 3, 4, 4, -1])
            >>> tree.log_probabilities(torch.tensor([-300.0, -300.0, 0.0]))
            tensor([-300.0000, -300.0000,    0.0000, -299.3069,    0.0000])
        """
        op = "LabelTree.log_probabilities"
        _check.choice(op, "rule", rule, ("sum", "negation"))
        x = self._leaf_values(op, "log_p", log_p)
        levels = self._levels(x.device)
        node = _tree_nodes.by_log_sum(x, levels) if rule == "sum" else _tree_nodes.by_log_negation(x, levels)
        if recalibrate:
            top = node[..., self.root : self.root + 1]
            node = torch.where(top > -torch.inf, node - torch.where(top > -torch.inf, top, 0), node)
            node = torch.where(self._is_root(x.device) & ~top.isnan(), 0, node)
        return node.to(log_p.dtype)

    def _leaf_values(self, op: str, name: str, p: Tensor) -> Tensor:
        p = _check.logits(op, p, name)
        if p.shape[-1] != self.n_leaves:
            raise ValueError(
                f"{op}: `{name}` must have {self.n_leaves} classes in its last dimension, one per leaf of the tree, "
                f"got shape {tuple(p.shape)}."
            )
        return p.to(_check.work_dtype(p))

    def _is_root(self, device: torch.device) -> Tensor:
        return torch.arange(self.n_nodes, device=device) == self.root

    def _levels(self, device: torch.device) -> _tree_nodes.Levels:
        """The nodes by depth, leaves before inner nodes, for sums that climb a level at a time."""
        by_depth: list[list[int]] = [[] for _ in range(max(self.depth) + 1)]
        for v in sorted(range(self.n_nodes), key=lambda v: bool(self.children[v])):
            by_depth[self.depth[v]].append(v)
        class_of = {leaf: c for c, leaf in enumerate(self._leaves)}
        steps, place = [], {-1: 0}
        for nodes in by_depth:
            parent = torch.tensor([place[self.parents[v]] for v in nodes], device=device)
            classes = torch.tensor([class_of[v] for v in nodes if v in class_of], dtype=torch.long, device=device)
            inner = [v for v in nodes if v not in class_of]
            place = {v: i for i, v in enumerate(inner)}
            steps.append(_tree_nodes.Level(classes, len(inner), parent))
        order = torch.tensor([v for nodes in by_depth for v in nodes], device=device)
        return _tree_nodes.Levels(tuple(steps), order.argsort())

    def match(self, other: LabelTree) -> float:
        r"""Measure how well the inner nodes of this tree are found in another tree over the same classes.

        .. math:: m(H \to H') = \frac{1}{|H|} \sum_{Y \in H} \max_{Z \in H'} \frac{|Y \cap Z|}{|Y \cup Z|}

        over the inner nodes of both, as sets of classes. It is 1 if every inner node has an equal one there, and it is
        not symmetric. Classes are matched by name if both trees have the same class names, else by number.

        Args:
            other: A tree with as many classes.

        Example:
            >>> fine = LabelTree.from_parents([4, 4, 5, 5, 6, 6, -1])
            >>> flat = LabelTree.from_parents([4, 4, 4, 4, -1])
            >>> flat.match(fine), round(fine.match(flat), 4)
            (1.0, 0.6667)
        """
        if other.n_leaves != self.n_leaves:
            raise ValueError(
                f"LabelTree.match: `other` must have the same classes ({self.n_leaves}), got {other.n_leaves}."
            )
        mine, theirs = self._inner_sets(), other._inner_sets()
        if not len(mine) or not len(theirs):
            return 1.0  # one class: the trees are equal
        names, others = self.class_names, other.class_names
        if self.names and other.names and names != others and set(names) == set(others):
            theirs = theirs[:, [others.index(name) for name in names]]
        both = mine @ theirs.T
        union = mine.sum(1)[:, None] + theirs.sum(1) - both
        return float((both / union).amax(1).mean())

    def _inner_sets(self) -> Tensor:
        inner = [v for v, below in enumerate(self.children) if below]
        return self.membership()[inner].double()

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes in order; their numbers if there are none."""
        if not self.names:
            return tuple(str(c) for c in range(self.n_leaves))
        return tuple(self.names[leaf] for leaf in self._leaves)

    def statistics(self) -> TreeStatistics:
        """Count levels, inner nodes and children.

        Example:
            >>> LabelTree.from_parents([4, 4, 5, 5, 6, 6, -1]).statistics()
            TreeStatistics(height=3, n_internal=3, mean_children=2.0, std_children=0.0, n_leaves=4)
        """
        counts = np.array([len(below) for below in self.children if below] or [0], dtype=float)
        n_internal = self.n_nodes - self.n_leaves
        return TreeStatistics(max(self.depth) + 1, n_internal, counts.mean().item(), counts.std().item(), self.n_leaves)

    def _labels(self) -> tuple[str, ...]:
        return self.names or tuple(str(v) for v in range(self.n_nodes))

    def to_newick(self) -> str:
        """Write the tree in the Newick format; nodes without names are written as their numbers."""
        return _tree_text.newick(self.children, self.root, self._labels())

    def to_graphviz(self) -> str:
        """Write the tree in Graphviz's dot language."""
        return _tree_text.graphviz(self.children, self._labels())

    def to_svg(self) -> str:
        """Draw the tree as an SVG image, leaves on the right; takes the colour of the text around it."""
        return _tree_text.svg(self.children, self._order, self.depth, self._labels(), bool(self.names))
