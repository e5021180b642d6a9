"""Projections with weights, bounds, groups and column sums, derived from the rows of a case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import lastlayer as ll
from fuzz import reference
from fuzz.checks import DEVICE, Accuracy, Expected, Found, Op, device_of
from fuzz.rows import Case

SPREADS = (0.0, 1.0, 10.0)  # of the logarithms of weights


def budget(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Return weights of both signs and bounds as a dtype has them, and k between the least and the largest sum."""
    n = case.logits.shape[-1]
    place = torch.arange(n, dtype=torch.float64)
    spread = SPREADS[int(10 * case.observed) % 3]
    weight = torch.exp(spread * torch.cos(2.3 * place)) * torch.where(torch.arange(n) % 5 == 3, -1.0, 1.0)
    lower = 0.3 * torch.sin(1.1 * place).clamp(min=0)
    upper = lower + 0.2 + 0.5 * torch.cos(0.7 * place).abs()
    weight, lower, upper = (value.to(dtype) for value in (weight, lower, upper))
    ends = torch.stack([weight.double() * lower.double(), weight.double() * upper.double()])
    least, most = ends.amin(0).sum(), ends.amax(0).sum()
    part = torch.nan_to_num(case.k.double() / max(n, 1), nan=0.5).clamp(1e-3, 1 - 1e-3)
    return {"k": least + part * (most - least), "weight": weight, "lower": lower, "upper": upper}


def run_weighted(dtype: torch.dtype) -> Callable[[Case, str], Found]:
    def run(case: Case, impl: str) -> Found:
        device = device_of(impl)
        given = {name: value.to(device) for name, value in budget(case, dtype).items()}
        y = ll.lml(case.logits.to(device), impl=impl, **given)
        return {"value": y, "sum": (y.double() * given["weight"].double()).sum(-1)}

    return run


def expect_weighted(dtype: torch.dtype) -> Callable[[Case, str], Expected]:
    def expect(case: Case, impl: str) -> Expected:
        a = Accuracy.of(case)
        given = {name: value.numpy().astype(np.longdouble) for name, value in budget(case, dtype).items()}
        x, (k, w, lower, upper) = case.logits.double().numpy().astype(np.longdouble), given.values()
        z = reference.weighted(x, k, w, lower, upper)
        y, miss = np.exp(reference.log_sigmoid(z)), np.exp(reference.log_sigmoid(-z))
        # x + w nu is known to the rounding of its parts, in float64; the output has the digits of its dtype.
        parts = (1 + np.abs(x) + np.abs(z - x)) * np.finfo(np.float64).eps
        off = 256 * parts.max(-1, keepdims=True) * np.abs(w).max()
        each = 64 * parts
        if impl != "torch" and dtype == torch.float32 and case.logits.dtype != torch.float64:
            # A kernel rounds x + w nu once, and the sums that decide nu are at least 1 / 33 of those that are rounded.
            rounding = 64 * np.finfo(np.float32).eps * (1 + np.abs(z))
            off, each = off + rounding, each + rounding / 8
        value = lower + (upper - lower) * y
        fine = float(torch.finfo(case.logits.dtype).eps)
        slope = (upper - lower) * y * miss
        room = slope * np.minimum(off, 1) + 4 * fine * np.abs(value) + a.tiny
        return {
            "value": (value, room),
            "sum": (k, (np.abs(w) * (slope * each + 4 * fine * np.abs(value) + a.tiny)).sum(-1) + 1e-12),
        }

    return expect


def weighted_op(name: str, dtype: torch.dtype, *impls: str) -> Op:
    """Return the entry of the projection with weights and bounds of a dtype."""
    return Op(name, run_weighted(dtype), expect_weighted(dtype), impls, fits=_up_to(130), largest=1e6, adapt=_finite)


def groups_of(case: Case) -> dict[str, Any]:
    """Return three groups, a limit, and k between nothing and what the groups can hold."""
    n = case.logits.shape[-1]
    groups = torch.arange(n) % min(3, n)
    limit = 0.25 + 0.3 * n * (0.3 + case.observed)
    room = sum(min(limit, float(count)) for count in groups.bincount())
    part = torch.nan_to_num(case.k.double() / n, nan=0.5).clamp(1e-3, 1 - 1e-3)
    return {"k": part * room, "groups": groups, "group_limit": limit}


def run_groups(case: Case, impl: str) -> Found:
    del impl
    given = {name: value.to(DEVICE) if name != "group_limit" else value for name, value in groups_of(case).items()}
    y = ll.lml(case.logits.to(DEVICE), **given)
    return {"value": y, "sum": y.double().sum(-1)}


def expect_groups(case: Case, impl: str) -> Expected:
    del impl
    a, given = Accuracy.of(case), groups_of(case)
    x = case.logits.double().numpy().astype(np.longdouble)
    k = given["k"].numpy().astype(np.longdouble)
    y = reference.grouped(x, k, given["groups"].numpy(), np.full(len(x), given["group_limit"], np.longdouble))
    fine = float(torch.finfo(case.logits.dtype).eps)
    off = 256 * np.finfo(np.float64).eps * (1 + np.abs(x).max(-1, keepdims=True, initial=0))
    room = y * (1 - y) * off + 8 * fine * y + 1e-13 + a.tiny
    return {"value": (y, room), "sum": (k, 8 * fine * k + 1e-11)}


def sums_of(case: Case) -> dict[str, Any]:
    """Return row sums between 0 and the number of columns, and column sums that add up to them."""
    rows, n = case.logits.shape
    part = torch.nan_to_num(case.k.double() / n, nan=0.5).clamp(0.05, 0.95)
    k = part * n
    share = (1 + 0.4 * torch.cos(1.3 * torch.arange(n, dtype=torch.float64))) * (0.5 if case.one_k else 0.0)
    even = k.sum() / n
    slack = torch.minimum(even, rows - even) * 0.4
    capacity = even + slack * (share - share.mean())
    return {"k": k, "capacity": capacity}


def run_balanced(case: Case, impl: str) -> Found:
    del impl
    given = {name: value.to(DEVICE) for name, value in sums_of(case).items()}
    x = case.logits.to(DEVICE)
    y = ll.lml_balanced(x, **given)
    fine = ll.lml_balanced(x.double(), **given)
    # The optimum: logit(y) - x is a number per row plus one per column.
    gap = fine.logit() - x.double()
    gap = gap - gap.mean(0) - gap.mean(1, keepdim=True) + gap.mean()
    columns = (fine.sum(0) - given["capacity"]).expand(len(x), -1)
    return {"value": y, "fine": fine, "sum": fine.sum(-1), "columns": columns, "gap": gap}


def expect_balanced(case: Case, impl: str) -> Expected:
    found, given = run_balanced(case, impl), sums_of(case)
    fine = found["fine"].cpu().numpy()
    a = float(torch.finfo(case.logits.dtype).eps)
    none = np.zeros(fine.shape)
    reach = 1 + case.logits.double().abs().max().item()
    # A probability near 1 keeps few digits of its logit: 1e-16 / (1 - y).
    near = 1e-15 / np.maximum(np.minimum(fine, 1 - fine), 1e-300)
    return {
        "value": (fine, 4 * a * fine + 16 * a),  # k and the capacities are rounded to the dtype of the logits
        "sum": (given["k"].numpy(), np.full(len(fine), 1e-9 * (1 + fine.shape[1]))),
        "columns": (none, none + 1e-9 * (1 + len(fine))),
        "gap": (none, 1e-9 * reach + 64 * near.max()),
    }


def _up_to(most: int) -> Callable[[Case], bool]:
    return lambda case: len(case.logits) > 0 and 0 < case.logits.shape[-1] <= most


def _finite(case: Case) -> Case:
    return case.plain(case.logits.isfinite().all(-1))


def _matrix(case: Case) -> Case:
    return _finite(case).rows(slice(20))


WIDER = (
    weighted_op("lml with weights and bounds", torch.float64, "torch", "native"),
    weighted_op("lml with weights and bounds in float32", torch.float32, "native", "triton"),
    Op("lml with groups", run_groups, expect_groups, fits=_up_to(130), largest=1e6, adapt=_finite),
    Op("lml_balanced", run_balanced, expect_balanced, fits=_up_to(17), largest=10.0, adapt=_matrix),
)
