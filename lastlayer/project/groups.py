"""The LML projection with limits on groups of classes: exactly `k` in all, at most so many of each group."""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch
from torch import Tensor

from lastlayer import _check

_SLACK = 1e-6  # how far `k` may be above the limits, which as float32 do not add up exactly


def grouped(op: str, x: Tensor, k: Tensor, groups: Any, limit: Any) -> Tensor:
    r"""Return the projection of scores `x` (classes last) on `k` labels with group sums of at most `limit`.

    The solution is :math:`\sigma(x_i + \nu + \mu_g)` with :math:`\mu_g \le 0`. A group binds once the threshold
    passes the one at which the group alone reaches its limit, so the groups that bind are found by bisection among
    these thresholds. What binds and what does not are then separate ordinary projections, whose derivatives are those
    of the whole.
    """
    from lastlayer.project.lml import lml, lml_threshold  # which comes here for its wider form

    groups, n_groups = _check_groups(op, groups, x.shape[-1])
    groups = groups.to(x.device)
    limits = _check_limit(op, limit, n_groups, x)
    live = x != -torch.inf
    if x.shape[-1] == 0:
        return lml(x, k.squeeze(-1))

    size = live.new_zeros((*x.shape[:-1], n_groups), dtype=limits.dtype).index_add(-1, groups, live.to(limits.dtype))
    may_bind = limits < size
    capped = torch.minimum(limits, size)
    tables = _tables(groups, n_groups)

    def by_group(value: Tensor, fill: Any, table: Tensor) -> Tensor:
        pad = value.new_full((*value.shape[:-1], 1), fill)
        return torch.cat([value, pad], -1)[..., table]

    parts, thresholds = [], []
    for ids, table in tables:
        inside, own = by_group(live, False, table), capped[..., ids]
        parts.append(lml(by_group(x, 0.0, table), own, mask=inside).flatten(-2))
        with torch.no_grad():
            thresholds.append(lml_threshold(by_group(x.detach(), 0.0, table), own, mask=inside))
    places = torch.cat([table.flatten() for _, table in tables])  # the classes table by table
    within = torch.cat(parts, -1)
    with torch.no_grad():
        at = torch.cat(thresholds, -1)[..., torch.cat([ids for ids, _ in tables]).argsort()]
        at = torch.where(may_bind, at, torch.inf)
        binds = _binding(x.detach(), live, k, groups, at, limits)
    bound = binds[..., groups]
    rest = k - torch.where(binds, limits, 0).sum(-1, keepdim=True)
    left = (live & ~bound).sum(-1, keepdim=True).to(k.dtype)
    near = torch.minimum(rest.clamp(min=0), left)  # rounding of what the groups took
    rest = torch.where((rest - near).abs() <= _SLACK * k, near, rest)
    free = lml(x, rest.squeeze(-1), mask=live & ~bound)
    y = torch.where(bound, within[..., places.argsort()[: len(groups)]], free)
    room = capped.sum(-1, keepdim=True)
    feasible = (k <= room * (1 + _SLACK)) & (capped >= 0).all(-1, keepdim=True)
    sound = ~within.isnan().any(-1, keepdim=True)  # a nan, or more than the limit at +inf
    return torch.where(feasible & sound, y, torch.nan)


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


def _binding(x: Tensor, live: Tensor, k: Tensor, groups: Tensor, at: Tensor, limits: Tensor) -> Tensor:
    """Return which groups bind: the first of the order of `at` while the total at that threshold is at most `k`."""
    order = at.sort(dim=-1)
    n_groups = at.shape[-1]
    low = torch.zeros_like(k, dtype=torch.long)  # so many groups bind for sure
    high = torch.full_like(low, n_groups)  # not more than these
    for _ in range(max(n_groups, 1).bit_length()):
        middle = (low + high + 1) // 2
        nu = order.values.gather(-1, (middle - 1).clamp(min=0))
        full = at <= nu
        y = torch.where(live & ~full[..., groups], (x.to(nu.dtype) + nu).sigmoid(), 0)
        total = y.sum(-1, keepdim=True) + torch.where(full, limits, 0).sum(-1, keepdim=True)
        fits = (total <= k) & (nu < torch.inf)
        low, high = torch.where(fits & (middle > low), middle, low), torch.where(fits, high, middle - 1)
        high = torch.maximum(low, high)
    rank = torch.empty_like(order.indices).scatter(
        -1, order.indices, torch.arange(n_groups, device=x.device).expand_as(order.indices)
    )
    return rank < low


def _check_groups(op: str, groups: Any, n: int) -> tuple[Tensor, int]:
    if not isinstance(groups, Tensor) or groups.dtype not in (torch.int64, torch.int32):
        got = groups.dtype if isinstance(groups, Tensor) else type(groups).__name__
        raise TypeError(f"{op}: `groups` must be a tensor of int64 or int32, got {got}. Use `torch.as_tensor`.")
    if groups.shape != (n,):
        raise ValueError(
            f"{op}: `groups` must hold the group of each of {n} classes, got shape {tuple(groups.shape)}. "
            "All rows share their groups."
        )
    if n and int(groups.min()) < 0:
        raise ValueError(f"{op}: `groups` must be at least 0, got {int(groups.min())}. Number the groups from 0.")
    return groups.long(), int(groups.max()) + 1 if n else 0


def _check_limit(op: str, limit: Any, n_groups: int, x: Tensor) -> Tensor:
    dtype = _check.work_dtype(x)
    if isinstance(limit, Tensor):
        if limit.is_complex() or limit.dtype == torch.bool:
            raise TypeError(f"{op}: `group_limit` must be real, got a tensor of {limit.dtype}. Use a float.")
        if limit.shape not in (torch.Size([]), torch.Size([n_groups])):
            raise ValueError(
                f"{op}: `group_limit` must be a number or one number for each of {n_groups} groups, "
                f"got shape {tuple(limit.shape)}."
            )
        return limit.to(x.device, dtype).expand(*x.shape[:-1], n_groups)
    if isinstance(limit, bool) or not isinstance(limit, numbers.Real):
        raise TypeError(f"{op}: `group_limit` must be a number or a tensor, got {type(limit).__name__}.")
    if not 0 <= float(limit) < math.inf:
        raise ValueError(f"{op}: `group_limit` must be at least 0 and finite, got {limit}.")
    return torch.full((), float(limit), dtype=dtype, device=x.device).expand(*x.shape[:-1], n_groups)
