"""The LML projection with limits on groups of classes: exactly `k` in all, at most so many of each group."""

from __future__ import annotations

import importlib
import math
import numbers
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lastlayer._threshold.autograd import nestable, stacked
from lastlayer._threshold.dispatch import Impl, compiled_without_tangents, recorded, transformed
from lastlayer._threshold.operators import WAITS, fake, operator
from lastlayer._threshold.search import points, scores, solve

_SLACK = 1e-6  # how far `k` may be above the limits, which as float32 do not add up exactly
_CLEAR = 1e-6  # a sum that is further below its limit, as a part of it, is below whatever its rounding


def grouped(
    op: str,
    logits: Tensor,
    k: Any,
    size: Tensor,
    groups: Any,
    limit: Any,
    mask: Tensor | None,
    temperature: float,
    impl: Impl,
) -> Tensor:
    r"""Return the projection of logits (classes last) on `k` labels with group sums of at most `limit`.

    The solution is :math:`\sigma(x_i + \nu + \mu_g)` with :math:`\mu_g \le 0`. Rows that keep all limits without them
    are those of `lml`. In others, what binds and what does not are separate ordinary projections. `size` is `k` as a
    tensor ``(..., 1)``.
    """
    from lastlayer.project.lml import lml  # which comes here for its wider form

    n = logits.shape[-1]
    groups, n_groups = _check_groups(op, groups, n)
    groups = groups.to(logits.device)
    limits = _check_limit(op, limit, groups, n_groups)
    if n == 0:
        return lml(logits, size.squeeze(-1))
    if torch.compiler.is_compiling():  # the number of groups is not known, and each goes by its first class
        groups = _first_classes(groups)
    elif not (transformed() or recorded(limits)):
        number = size.squeeze(-1) if isinstance(k, Tensor) else k
        y = lml(logits.double(), number, mask=mask, temperature=temperature, impl=impl)
        return _where_limits_bind(y, logits, size, groups, limits, mask, temperature, impl)
    return _project(scores(logits.double(), mask, temperature), size, limits, groups, impl)


def _where_limits_bind(
    y: Tensor,
    logits: Tensor,
    k: Tensor,
    groups: Tensor,
    limits: Tensor,
    mask: Tensor | None,
    temperature: float,
    impl: Impl,
) -> Tensor:
    """Return `y`, which is the projection without limits, with those rows solved anew that may need them."""
    n, n_groups = logits.shape[-1], limits.shape[-1]
    rows = y.detach().reshape(-1, n)
    sums = _sums(rows, groups.expand(len(rows), n), n_groups)
    again = (~(sums < limits * (1 - _CLEAR)).all(-1)).nonzero().squeeze(-1)
    if len(again) == 0:
        return y
    x = scores(logits.double(), mask, temperature).reshape(-1, n)
    k = k.expand(*logits.shape[:-1], 1).reshape(-1, 1)
    if len(again) == len(rows):
        return _project(x, k, limits, groups, impl).view(y.shape)
    part = _project(x[again], k[again], limits, groups, impl)
    return y.reshape(-1, n).index_copy(0, again, part).view(y.shape)


def _project(x: Tensor, k: Tensor, limits: Tensor, groups: Tensor, impl: Impl) -> Tensor:
    """Return the projection from scores in float64, differentiable in scores, k and limits."""
    k, limits = k.expand(*x.shape[:-1], 1), limits.expand(*x.shape[:-1], limits.shape[-1])
    function = _Grouped if compiled_without_tangents("lml") else _GroupedForwardMode
    y: Tensor = function.apply(x, k, limits, groups, impl)[0]
    return y


def _cells(bound: Tensor, groups: Tensor) -> Tensor:
    """Return the projection that each class belongs to: its group's if that is bound, or the last one."""
    ids = groups.expand(*bound.shape[:-1], len(groups))
    return torch.where(bound.gather(-1, ids), ids, bound.shape[-1])


def _sums(value: Tensor, cell: Tensor, n: int) -> Tensor:
    """Return the sums of each of `n` cells, ``(..., n)``."""
    return value.new_zeros(*value.shape[:-1], n).scatter_add(-1, cell, value)


def _first_classes(groups: Tensor) -> Tensor:
    """Return the first class of the group of each class."""
    values, order = groups.sort(stable=True)
    begins = torch.cat([torch.ones_like(values[:1], dtype=torch.bool), values[1:] != values[:-1]])
    place = torch.where(begins, torch.arange(len(values), device=values.device), 0).cummax(0).values
    return torch.zeros_like(order).scatter(0, order, order[place])


# ---- The search: with some groups bound, all others are one projection. Its threshold is below that of the solution as
# long as groups are missing, so that a group beyond its limit there is bound for sure. It mostly takes two to five
# rounds, each with fewer rows. ----


def _solve(x: Tensor, k: Tensor, limits: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``(y, center, delta, bound)``: with the thresholds of bound groups, and last that of all other classes.

    For `n_groups` limits per row center and delta have the shape ``(..., n_groups + 1)``. A row without a solution has
    a delta of NaN.
    """
    batch, n, n_groups = x.shape[:-1], x.shape[-1], limits.shape[-1]
    x, k, limits = x.reshape(-1, n), k.reshape(-1, 1), limits.reshape(-1, n_groups)
    live = x != -torch.inf
    ids = groups.expand(len(x), n)
    size = _sums(live.to(x.dtype), ids, n_groups)
    capped = torch.minimum(limits, size)
    sound = (k <= capped.sum(-1, keepdim=True) * (1 + _SLACK)) & (capped >= 0).all(-1, keepdim=True)
    center, delta = x.new_zeros(2, len(x), n_groups + 1)
    bound = torch.zeros_like(limits, dtype=torch.bool)
    rows = sound.squeeze(-1).nonzero().squeeze(-1)
    free = live[rows]
    while len(rows):
        had, allowed, scored = bound[rows], limits[rows], x[rows]
        left = free.sum(-1, keepdim=True).to(k.dtype)
        rest = k[rows] - torch.where(had, allowed, 0).sum(-1, keepdim=True)
        near = torch.minimum(rest.clamp(min=0), left)  # rounding of what the groups took
        rest = torch.where((rest - near).abs() <= _SLACK * k[rows], near, rest)
        at, moved = _threshold(scored, rest, free)
        moved = torch.where(left == 0, 0, moved)  # of no class
        center[rows, -1:], delta[rows, -1:] = at, moved
        y = torch.where(free, points(scored, at, moved).sigmoid(), 0)
        new = (_sums(y, ids[rows], n_groups) > allowed) & (allowed < size[rows])
        more = new.any(-1)
        had = (had | new)[more]
        rows = rows[more]
        bound[rows] = had
        free = free[more] & ~had.gather(-1, ids[rows])
    _solve_bound(x, live, limits, groups, bound, center, delta)
    delta = torch.where(sound & ~delta.isnan().any(-1, keepdim=True), delta, torch.nan)
    cell = _cells(bound, groups)
    own = delta.gather(-1, cell)
    y = torch.where(own.isnan(), own, points(x, center.gather(-1, cell), own).sigmoid())
    cells = (*batch, n_groups + 1)
    return y.view(*batch, n), center.view(cells), delta.view(cells), bound.view(*batch, n_groups)


def _solve_bound(
    x: Tensor, live: Tensor, limits: Tensor, groups: Tensor, bound: Tensor, center: Tensor, delta: Tensor
) -> None:
    """Fill in the thresholds at which the bound groups reach their limits."""
    n = x.shape[-1]
    for ids, table in _tables(groups, limits.shape[-1]):
        row, place = bound[:, ids].nonzero(as_tuple=True)
        if len(row):
            classes, at = table[place].clamp(max=n - 1), (row, ids[place])
            inside = (table[place] < n) & live[row.unsqueeze(-1), classes]
            found = _threshold(x[row.unsqueeze(-1), classes], limits[at].unsqueeze(-1), inside)
            center[at], delta[at] = (value.squeeze(-1) for value in found)


def _tables(groups: Tensor, n_groups: int) -> list[tuple[Tensor, Tensor]]:
    """Return the groups of about one size and the table of their classes, for each such size.

    A table is as wide as its largest group; what a shorter one leaves is filled with the number of classes. One table
    for all groups would be as wide as the largest of them.
    """
    order = groups.argsort(stable=True)
    sizes = torch.bincount(groups, minlength=n_groups)
    first = sizes.cumsum(0) - sizes
    tables = []
    doublings = sizes.clamp(min=1).double().log2().ceil()
    for number in doublings.unique():
        ids = (doublings == number).nonzero().squeeze(-1)
        column = torch.arange(int(sizes[ids].max()), device=groups.device)
        place = (first[ids].unsqueeze(-1) + column).clamp(max=len(order) - 1)
        tables.append((ids, torch.where(column < sizes[ids].unsqueeze(-1), order[place], len(order))))
    return tables


def _threshold(x: Tensor, k: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    """Return center and delta of rows, of which some classes may be left out."""
    return solve(x.masked_fill(~inside, -torch.inf), k, None)


@operator("lml_groups", *WAITS)
def _op(x: Tensor, k: Tensor, limits: Tensor, groups: Tensor, impl: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    function = importlib.import_module("lastlayer._native.groups").solve if impl == "native" else _solve
    found: tuple[Tensor, Tensor, Tensor, Tensor] = function(x, k, limits, groups)
    return found


@fake("lml_groups")
def _(x: Tensor, k: Tensor, limits: Tensor, groups: Tensor, impl: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    cells = (*limits.shape[:-1], limits.shape[-1] + 1)
    bound = x.new_empty(limits.shape, dtype=torch.bool)
    return x.new_empty(x.shape), x.new_empty(cells), x.new_empty(cells), bound


class _Grouped(torch.autograd.Function):
    """``(x, k, limits) -> (y, center, delta, bound)``: bound groups are projections of their own, like all the rest."""

    @staticmethod
    def forward(x: Tensor, k: Tensor, limits: Tensor, groups: Tensor, impl: Impl) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = torch.ops.lastlayer.lml_groups(x, k, limits, groups, impl)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, center, delta, bound = output
        ctx.mark_non_differentiable(center, bound)
        ctx.save_for_backward(inputs[0], inputs[3], center, delta, bound)
        ctx.save_for_forward(inputs[0], inputs[3], center, delta, bound)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        at = _slopes(ctx)
        upstream, given = grads[0], grads[2]
        pull = torch.where(at.live, upstream, 0)
        mean = _sums(at.share * pull, at.cell, given.shape[-1])
        by_sum = (
            mean + given * at.inverse
        )  # of what each projection adds up to: a limit, or k less those of bound groups
        grad_x = at.h * (pull - mean.gather(-1, at.cell)) - at.share * given.gather(-1, at.cell)
        by_k = by_sum[..., -1:]
        found = grad_x, by_k, torch.where(at.bound, by_sum[..., :-1] - by_k, 0)
        asked = (upstream != 0).any(-1, keepdim=True) | (given != 0).any(-1, keepdim=True)
        return *(torch.where(at.unsolved & asked, torch.nan, gradient) for gradient in found), None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        tensors = stacked(in_dims[:3], inputs[:3])
        return _GroupedForwardMode.apply(*tensors, *inputs[3:]), (0, 0, 0, 0)


class _GroupedForwardMode(_Grouped):
    """As `_Grouped`, with forward-mode derivatives."""

    @staticmethod
    @nestable
    def jvp(ctx: Any, x_t: Tensor | None, k_t: Tensor | None, limits_t: Tensor | None, *_: Any) -> Any:
        at = _slopes(ctx)
        dx = torch.zeros_like(at.h) if x_t is None else torch.where(at.live, x_t, 0)
        taken = torch.where(at.bound, 0.0 if limits_t is None else limits_t, 0)
        left = -taken.sum(-1, keepdim=True) if k_t is None else k_t - taken.sum(-1, keepdim=True)
        added = torch.cat([taken, left], -1)
        mean = _sums(at.share * dx, at.cell, added.shape[-1])
        y_t = at.h * (dx - mean.gather(-1, at.cell)) + at.share * added.gather(-1, at.cell)
        found = y_t, None, added * at.inverse - mean, None
        return tuple(None if value is None else torch.where(at.unsolved, torch.nan, value) for value in found)


class _Slopes(NamedTuple):
    """What the derivatives of rows are made of; those without a solution have none."""

    cell: Tensor  # the projection that each class belongs to
    live: Tensor  # classes with a derivative
    h: Tensor  # y (1 - y)
    share: Tensor  # of the sum of h in the cell
    inverse: Tensor  # one over that sum
    bound: Tensor
    unsolved: Tensor


def _slopes(ctx: Any) -> _Slopes:
    """Return slopes. Sums of h may underflow where a cell is decided, and are taken relative to the largest."""
    x, groups, center, delta, bound = ctx.saved_tensors
    unsolved, n = delta[..., -1:].isnan(), delta.shape[-1]
    delta = torch.where(unsolved, 0, delta)
    cell = _cells(bound, groups)
    own = delta.gather(-1, cell)
    live = x.isfinite() & own.isfinite() & ~unsolved
    z = torch.where(live, points(torch.where(live, x, 0), center.gather(-1, cell), own), 0)
    log_h = torch.where(live, F.logsigmoid(z) + F.logsigmoid(-z), -torch.inf)
    peak = torch.full_like(delta, -torch.inf).scatter_reduce(-1, cell, log_h.detach(), "amax")
    peak = torch.where(peak.isfinite(), peak, 0)
    e = (log_h - peak.gather(-1, cell)).exp()
    mass = _sums(e, cell, n)
    mass = torch.where(mass > 0, mass, torch.inf)
    inverse = (-peak).exp() / mass  # may overflow across a wide gap, where there is no derivative
    inverse = torch.where(inverse.isfinite(), inverse, 0)
    return _Slopes(cell, live, log_h.exp(), e / mass.gather(-1, cell), inverse, bound, unsolved)


def _check_groups(op: str, groups: Any, n: int) -> tuple[Tensor, int]:
    """Return the groups and their number, which the compiler does not know: then 0."""
    if not isinstance(groups, Tensor) or groups.dtype not in (torch.int64, torch.int32):
        got = groups.dtype if isinstance(groups, Tensor) else type(groups).__name__
        raise TypeError(f"{op}: `groups` must be a tensor of int64 or int32, got {got}. Use `torch.as_tensor`.")
    if groups.shape != (n,):
        raise ValueError(
            f"{op}: `groups` must hold the group of each of {n} classes, got shape {tuple(groups.shape)}. "
            "All rows share their groups."
        )
    if torch.compiler.is_compiling():
        return groups.long(), 0
    if n and int(groups.min()) < 0:
        raise ValueError(f"{op}: `groups` must be at least 0, got {int(groups.min())}. Number the groups from 0.")
    return groups.long(), int(groups.max()) + 1 if n else 0


def _check_limit(op: str, limit: Any, groups: Tensor, n_groups: int) -> Tensor:
    """Return the limit of each group in float64; for the compiler that of the group of each class."""
    if isinstance(limit, Tensor):
        if limit.is_complex() or limit.dtype == torch.bool:
            raise TypeError(f"{op}: `group_limit` must be real, got a tensor of {limit.dtype}. Use a float.")
        given: Tensor = limit.to(groups.device, torch.float64)
        if torch.compiler.is_compiling():
            each: Tensor = limit[groups] if limit.ndim else limit.expand(len(groups))
            return each
        if limit.shape not in (torch.Size([]), torch.Size([n_groups])):
            raise ValueError(
                f"{op}: `group_limit` must be a number or one number for each of {n_groups} groups, "
                f"got shape {tuple(limit.shape)}."
            )
        return given.expand(n_groups)
    if isinstance(limit, bool) or not isinstance(limit, numbers.Real):
        raise TypeError(f"{op}: `group_limit` must be a number or a tensor, got {type(limit).__name__}.")
    if not 0 <= float(limit) < math.inf:
        raise ValueError(f"{op}: `group_limit` must be at least 0 and finite, got {limit}.")
    n = len(groups) if torch.compiler.is_compiling() else n_groups
    return torch.full((), float(limit), dtype=torch.float64, device=groups.device).expand(n)
