"""What label trees are built from: checks of parents, nested dictionaries and matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor


def check_parents(parents: tuple[int, ...]) -> None:
    """Check that parents make one tree."""
    n = len(parents)
    if n == 0:
        raise ValueError("LabelTree: `parents` must hold at least one node, got none.")
    unknown = [(v, p) for v, p in enumerate(parents) if not -1 <= p < n]
    if unknown:
        raise ValueError(
            f"LabelTree: `parents` must be numbers of nodes, 0 to {n - 1}, or -1 for the root, "
            f"got {unknown[0][1]} as the parent of node {unknown[0][0]}."
        )
    roots = [v for v, p in enumerate(parents) if p == -1]
    if len(roots) > 1:
        raise ValueError(
            f"LabelTree: `parents` must have one root (-1), got {len(roots)}: nodes {roots[:5]}. "
            "Put a common root above them."
        )
    state = [0] * n  # 0 not seen, 1 on the way up, 2 known to lead to the root
    for start in range(n):
        path, v = [], start
        while v >= 0 and state[v] == 0:
            state[v] = 1
            path.append(v)
            v = parents[v]
        if v >= 0 and state[v] == 1:
            raise ValueError(f"LabelTree: `parents` must lead from every node to the root, got a cycle at node {v}.")
        for u in path:
            state[u] = 2


def items(below: Any) -> list[tuple[str, Any]]:
    """The names at one place of a nested dictionary, each with what is under it."""
    if isinstance(below, str):
        return [(below, None)]
    if isinstance(below, Mapping):
        return [(str(name), rest) for name, rest in below.items()]
    if isinstance(below, (list, tuple)):
        return [pair for part in below for pair in items(part)]
    raise TypeError(
        f"LabelTree.from_dict: `nested` must hold dictionaries, lists of names or None, got {type(below).__name__}."
    )


def leaf_order(nested: Any) -> list[str]:
    """Return the leaves in the order in which they occur."""
    out: list[str] = []
    stack = list(reversed(items(nested)))
    while stack:
        name, rest = stack.pop()
        if rest:
            stack.extend(reversed(items(rest)))
        else:
            out.append(name)
    return out


def numbered(
    parents: Mapping[str, str | None], classes: Sequence[str] | None
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Number named nodes, leaves first (in the order of `classes`), then the others as they come."""
    above = {p for p in parents.values() if p is not None}
    missing = sorted(str(p) for p in above if p not in parents)
    if missing:
        raise ValueError(
            f"LabelTree: every parent must be a node, got the unknown parent {missing[0]!r}. "
            "Add it, with None if it is the root."
        )
    leaves = [name for name in parents if name not in above]
    if classes is not None:
        if sorted(classes) != sorted(leaves):
            raise ValueError(f"LabelTree: `classes` must name each leaf once, got {_difference(classes, leaves)}.")
        leaves = list(classes)
    # Inner nodes from the bottom up, so that the root is the last, as in trees built from weights.
    names = leaves + [name for name in reversed(list(parents)) if name in above]
    number = {name: v for v, name in enumerate(names)}
    return tuple(-1 if (p := parents[name]) is None else number[p] for name in names), tuple(map(str, names))


def _difference(classes: Sequence[str], leaves: Sequence[str]) -> str:
    """Say in what classes and leaves differ, and what to do."""
    if absent := [name for name in classes if name not in set(leaves)]:
        return f"no leaf for {len(absent)} of {len(classes)} classes, {absent[0]!r} for one. Add a leaf for each"
    if extra := [name for name in leaves if name not in set(classes)]:
        return f"{len(extra)} of {len(leaves)} leaves without a class, {extra[0]!r} for one. Remove them from the tree"
    twice = next(name for at, name in enumerate(classes) if name in classes[:at])
    return f"{twice!r} twice. Name it once"


def matrix(op: str, name: str, value: Tensor | np.ndarray) -> np.ndarray:
    """Check a finite matrix and return it in float64."""
    if not isinstance(value, (Tensor, np.ndarray)):
        raise TypeError(f"{op}: `{name}` must be a tensor or an array, got {type(value).__name__}.")
    out = (value.detach().double().cpu().numpy() if isinstance(value, Tensor) else value).astype(np.float64)
    if out.ndim != 2 or not len(out):
        raise ValueError(f"{op}: `{name}` must have two dimensions and at least one row, got shape {out.shape}.")
    if not np.isfinite(out).all():
        raise ValueError(f"{op}: `{name}` must be finite, got nan or infinity. Check the training run.")
    return out
