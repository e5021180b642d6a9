"""Values that climb a label tree, from the classes to the root, one level at a time.

This costs O(nodes) per row, whatever the shape of the tree, and keeps what matters exact: a sum of numbers
that are not negative is never below one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Level(NamedTuple):
    """The nodes of one depth, leaves first: their classes, the number of inner nodes, and where their parents are.

    `parent` counts among the inner nodes of the level above.
    """

    classes: Tensor
    n_inner: int
    parent: Tensor


class Levels(NamedTuple):
    """All levels from the root down, and the place of each node in their concatenation."""

    steps: tuple[Level, ...]
    place: Tensor


Step = Callable[[Tensor, Tensor, int], Tensor]  # values of the children, their parents, the number of parents


def by_sum(p: Tensor, levels: Levels) -> Tensor:
    """P(V) is the sum over its leaves."""
    return _climb(p, levels, _sum)


def by_negation(p: Tensor, levels: Levels) -> Tensor:
    """P(V) is 1 - prod(1 - p) over its leaves."""
    # At p = 1 the value is mended by `_lifted`, while the gradient, prod over the other leaves of 1 - p, is kept.
    below_one = p + (p.clamp(max=1 - torch.finfo(p.dtype).eps) - p).detach()
    stay = _climb(torch.log1p(-below_one), levels, _sum)
    # The gradient of expm1 is computed from its value and is lost where that is nearly -1.
    far = stay < -1
    inner = torch.where(far, 1 - stay.exp(), -torch.expm1(torch.where(far, 0, stay)))
    return _lifted(p, inner, levels)


def by_log_sum(log_p: Tensor, levels: Levels) -> Tensor:
    """The logarithm of `by_sum`: a logsumexp at every node."""
    return _climb(log_p, levels, _log_sum)


def by_log_negation(log_p: Tensor, levels: Levels) -> Tensor:
    """The logarithm of `by_negation`; where P is below the precision of the dtype it is the sum."""
    eps = torch.finfo(log_p.dtype).eps
    fixed = log_p.detach()
    below_zero = log_p + torch.where(fixed > -eps, -eps - fixed, 0)  # -inf stays: the class has no part in the product
    stay = _climb(_log1mexp(below_zero), levels, _sum)
    inner = torch.where(stay < 0, _log1mexp(torch.where(stay < 0, stay, -1)), -torch.inf)
    total = _climb(log_p, levels, _log_sum)
    return _lifted(log_p, torch.where(total < math.log(eps), total, inner), levels)


def _climb(leaf: Tensor, levels: Levels, step: Step) -> Tensor:
    """Combine the values of the children at every node, from the bottom; return one value per node."""
    rows: list[Tensor] = []
    below: Tensor | None = None
    parent = levels.place
    for level in reversed(levels.steps):
        own = leaf.index_select(-1, level.classes)
        if below is not None:
            own = torch.cat([own, step(below, parent, level.n_inner)], -1)
        rows.append(own)
        below, parent = own, level.parent
    return torch.cat(rows[::-1], -1).index_select(-1, levels.place)


def _lifted(leaf: Tensor, node: Tensor, levels: Levels) -> Tensor:
    """Put the leaves' own values in, and raise a node that rounding left below one of its children."""
    split = node.detach().index_select(-1, levels.place.argsort()).split([_size(level) for level in levels.steps], -1)
    rows: list[Tensor] = []
    below: Tensor | None = None
    parent = levels.place
    for level, given in zip(reversed(levels.steps), reversed(split), strict=True):
        own = leaf.detach().index_select(-1, level.classes)
        if below is not None:
            inner = torch.maximum(given[..., own.shape[-1] :], _max(below, parent, level.n_inner))
            own = torch.cat([own, inner], -1)
        rows.append(own)
        below, parent = own, level.parent
    value = torch.cat(rows[::-1], -1).index_select(-1, levels.place)
    if not node.requires_grad:
        return value
    return torch.where(node.isfinite() & value.isfinite(), node + (value - node).detach(), value)


def _size(level: Level) -> int:
    return level.classes.shape[0] + level.n_inner


def _sum(values: Tensor, parent: Tensor, n: int) -> Tensor:
    return values.new_zeros((*values.shape[:-1], n)).index_add(-1, parent, values)


def _max(values: Tensor, parent: Tensor, n: int) -> Tensor:
    low = values.new_full((*values.shape[:-1], n), -torch.inf)
    return low.scatter_reduce(-1, parent.expand(values.shape), values, "amax")


def _log_sum(values: Tensor, parent: Tensor, n: int) -> Tensor:
    peak = _max(values.detach(), parent, n)
    peak = torch.where(peak.isfinite(), peak, 0)
    mass = _sum((values - peak.index_select(-1, parent)).exp(), parent, n)
    present = mass != 0  # true for nan, which must show
    return torch.where(present, torch.where(present, mass, 1).log() + peak, -torch.inf)


def _log1mexp(x: Tensor) -> Tensor:
    """Compute log(1 - exp(x)) for x < 0."""
    near = x > -math.log(2)
    close = torch.where(near, x, -1)
    far = torch.where(near, -1, x)
    return torch.where(near, (-torch.expm1(close)).log(), torch.log1p(-far.exp()))
