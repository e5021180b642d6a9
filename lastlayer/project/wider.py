"""LML with more than one plain budget per row: weights, bounds, groups, and budgets over several dimensions.

The projections of `lml.py` come here when such an argument is given; without one nothing of this runs.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lastlayer import _check
from lastlayer._threshold.dispatch import Impl, choose, direct, has_storage, shortest, tempered, transformed
from lastlayer._threshold.search import scores
from lastlayer.project import weighted
from lastlayer.project.groups import grouped
from lastlayer.shard import ClassShard, local_part, replicate, unwrap

Dim = int | tuple[int, ...]
_BY_TRITON = ("y", "at most")  # the kinds that have kernels on a GPU


class Wider(NamedTuple):
    """The arguments that make a projection a wider one; all None and an integer `dim` is the ordinary one."""

    weight: float | Tensor | None = None
    lower: float | Tensor | None = None
    upper: float | Tensor | None = None
    groups: Tensor | None = None
    group_limit: float | Tensor | None = None


def project_wider(
    op: str,
    kind: str,
    function: Callable[..., Tensor],
    logits: Tensor,
    k: float | Tensor,
    given: Wider,
    dim: Dim,
    temperature: float | Tensor,
    mask: Tensor | None,
    shard: ClassShard | None,
    impl: Impl,
) -> Tensor:
    """Return the projection `kind` ("y", "log", "nu" or "at most"); `function` is the ordinary one of that kind."""
    if given.groups is given.group_limit is None and (kind != "log" or given.lower is None):
        out = _by_short_way(kind, logits, k, given[:3], dim, temperature, mask, shard, impl)
        if out is not None:
            return out
    if isinstance(dim, tuple | list):
        return _over_dimensions(op, kind, function, logits, k, given, dim, temperature, mask, shard, impl)
    logits, shard, wrap = unwrap(op, logits, shard, dim, k)
    logits = _check.logits(op, logits)
    place = _check.dim(op, dim, logits.ndim)
    x = logits.movedim(place, -1)
    allowed = _check.mask(op, local_part(mask), logits)
    allowed = None if allowed is None else allowed.movedim(place, -1)
    x, divisor = tempered(op, x, temperature, shard)
    chosen = _choose(op, impl, x, shard, given)
    if given.groups is not None or given.group_limit is not None:
        out = _with_groups(op, kind, x, k, given, allowed, divisor, shard, chosen)
    else:
        out = _with_weights(op, kind, x, k, given, allowed, divisor, logits.ndim - 1 - place, shard, chosen, impl)
    out = out.to(logits.dtype)
    return out if kind == "nu" else wrap(out.movedim(-1, place))


def _by_short_way(
    kind: str,
    logits: Tensor,
    k: Any,
    terms: tuple[Any, ...],
    dim: Dim,
    temperature: Any,
    mask: Tensor | None,
    shard: ClassShard | None,
    impl: Impl,
) -> Tensor | None:
    """Return the result of the common call on a CPU: plain numbers and tensors, terms per class or per entry."""
    kernel = shortest(logits, 0, dim, temperature, mask, shard, impl)
    if kernel != "native" or not (type(k) is int or type(k) is float) or not math.isfinite(k):
        return None
    shape, dtype = logits.shape, logits.dtype
    n = shape[-1]
    strides, wide, graph, as_is = [0, 0, 0], False, logits.requires_grad, True
    for i, term in enumerate(terms):
        if term is None:
            continue
        if type(term) is not Tensor or not term.is_cpu:  # the kernel reads its memory as it is
            return None
        if term.dtype is not dtype and (term.dtype is not torch.float32 or logits.itemsize > 2):
            return None
        if term.ndim != 1 or term.shape[0] != n:
            if term.shape != shape:
                return None
            strides[i] = n
        if term.is_neg() or term._is_zerotensor() or not has_storage(term):
            return None
        wide, graph = True, graph or term.requires_grad
        as_is = as_is and term.is_contiguous() and term.itemsize > 2
    if not wide:
        return None
    found: Tensor
    if as_is and not (graph and torch.is_grad_enabled()):
        found = weighted.kernels("native").quick(logits, float(k), terms, strides, kind)
    else:
        found = weighted.project(logits, float(k), terms, None, 1.0, kind, "native")
    return found.squeeze(-1).to(dtype) if kind == "nu" else found


def _choose(op: str, impl: Impl, x: Tensor, shard: ClassShard | None, given: Wider) -> Impl:
    """Return the implementation; groups have no kernel on a GPU."""
    if given.groups is None and given.group_limit is None:
        return choose(op, impl, x, shard)
    if impl == "triton":
        raise RuntimeError(f'{op}: `impl="triton"` cannot run here: groups have no GPU kernel. Use `impl="auto"`.')
    chosen = choose(op, impl, x, shard)
    return "native" if chosen == "native" else "torch"


def _with_weights(
    op: str,
    kind: str,
    logits: Tensor,
    k: Any,
    given: Wider,
    mask: Tensor | None,
    temperature: float,
    behind: int,
    shard: ClassShard | None,
    impl: Impl,
    asked: Impl,
) -> Tensor:
    if kind == "log" and given.lower is not None and not _is_zero(given.lower):
        got = "a tensor" if isinstance(given.lower, Tensor) else given.lower
        raise ValueError(f"{op}: `lower` must be 0 where a logarithm is taken, got {got}. Leave it out.")

    def at_end(value: Tensor | None) -> Tensor | None:  # a tensor has the classes where the logits have them
        if value is None or value.ndim == 0:
            return value
        return value[(None,) * max(behind + 1 - value.ndim, 0)].movedim(-1 - behind, -1)

    _check_reach(op, kind, k, logits.shape[-1], given, mask is not None, shard)
    as_given = logits.movedim(-1, -1 - behind) if behind else logits
    checked = weighted.check(op, as_given, *map(local_part, given[:3]))
    checked = tuple(map(at_end, checked)) if behind else checked
    checked = (checked[0], None, checked[2]) if kind == "log" else checked  # a lower bound of 0
    if mask is not None and checked[1] is not None:  # what takes no part has no bounds to keep
        checked = checked[0], *(None if bound is None else torch.where(mask, bound, 0) for bound in checked[1:])
    number = isinstance(k, int | float) and not isinstance(k, bool) and abs(k) < 1e30
    number = number and impl == "triton" and kind in _BY_TRITON and not transformed()
    # A number stays one: a tensor takes a kernel to make.
    size: Any = float(k) if number else _size(op, k, logits, kind)
    if impl == "triton":
        reason = weighted.kernels(impl).unfit(logits, *checked)
        if reason and asked == impl:
            raise RuntimeError(f'{op}: `impl="{impl}"` cannot run here: {reason}. Use `impl="auto"`.')
        impl = "torch" if reason else impl
    able = impl == "native" or (impl == "triton" and kind in _BY_TRITON)
    if able and not transformed() and direct(logits, size, mask, *checked):
        found = weighted.project(logits, size, checked, mask, temperature, kind, impl)
        return found.squeeze(-1) if kind == "nu" else found
    size = _size(op, k, logits, kind) if number else size
    terms = weighted.in_one_shape(scores(logits.double(), mask, temperature), size, checked)
    solve = weighted.at_most_threshold if kind == "at most" else weighted.threshold
    nu = solve(terms, shard, impl)
    if kind == "nu":
        return replicate(nu, shard).squeeze(-1)
    return weighted.result(terms, nu, kind)


def _with_groups(
    op: str,
    kind: str,
    x: Tensor,
    k: Any,
    given: Wider,
    mask: Tensor | None,
    temperature: float,
    shard: ClassShard | None,
    impl: Impl,
) -> Tensor:
    if kind != "y":
        raise ValueError(f"{op}: `groups` must be None, got a tensor. Only `lml` takes groups.")
    if given.groups is None or given.group_limit is None:
        missing, there = ("groups", "group_limit") if given.groups is None else ("group_limit", "groups")
        raise ValueError(f"{op}: `{missing}` must be given with `{there}`.")
    if any(value is not None for value in given[:3]):
        raise ValueError(f"{op}: `groups` cannot be combined with `weight`, `lower` or `upper`.")
    if shard is not None:
        raise ValueError(f"{op}: `groups` cannot be combined with `shard`. Gather the classes first.")
    if not isinstance(k, Tensor):
        _check.cardinality_of_all(op, k, x.shape[-1], x.shape[-1])
    size = _size(op, k, x, kind)
    return grouped(op, x, k, size, given.groups, given.group_limit, mask, temperature, impl)


def _size(op: str, k: Any, x: Tensor, kind: str) -> Tensor:
    """Return `k` in float64, ``(..., 1)``; a weighted sum may be negative, and above the number of classes.

    An infinite budget is no limit, but an infinite sum cannot be reached.
    """
    if not isinstance(k, Tensor):
        value = float(k) if k != k else _check.number(op, "k", k)
        if not (-math.inf < value < math.inf or (kind == "at most" and value == math.inf)):
            raise ValueError(f"{op}: `k` must be finite, got {k}. Give the sum that is wanted.")
        return _check.constant(value, torch.float64, x.device).expand(*x.shape[:-1], 1)
    rows = torch.empty((), dtype=torch.float64, device=x.device).expand(x.shape)
    return _check.cardinality(op, k, rows, at_most_n=False)


def _check_reach(op: str, kind: str, k: Any, n: int, given: Wider, masked: bool, shard: ClassShard | None) -> None:
    """Refuse a sum that Python numbers already show to be out of reach."""
    usual = zip((k, *given[:3]), (None, 1.0, 0.0, 1.0), strict=True)
    values: list[Any] = [default if value is None else value for value, default in usual]
    if shard is not None or any(isinstance(v, bool) or not isinstance(v, numbers.Real) for v in values):
        return
    size, weight, lower, upper = (float(v) for v in values)
    least, most = n * weight * lower + 0.0, n * weight * upper + 0.0  # no -0
    if weight < 0:
        least, most = most, least
    if masked:  # fewer classes may take part
        least, most = min(least, 0.0), max(most, 0.0)
    room = 1e-6 * (abs(least) + abs(most))
    if lower <= upper and (size < least - room or (kind != "at most" and size > most + room)):
        raise ValueError(
            f"{op}: `k` must be between {least:g} and {most:g}, which is what {n} classes can add up to, got {k}. "
            "Choose a `k` in that range, or pass a tensor with one `k` per row."
        )


def _is_zero(value: Any) -> bool:
    return not isinstance(value, Tensor) and value == 0


def _over_dimensions(
    op: str,
    kind: str,
    function: Callable[..., Tensor],
    logits: Tensor,
    k: Any,
    given: Wider,
    dim: tuple[int, ...],
    temperature: Any,
    mask: Tensor | None,
    shard: ClassShard | None,
    impl: Impl,
) -> Tensor:
    """Flatten several dimensions into one, project, and unflatten."""
    logits = _check.logits(op, logits)
    if not dim:
        raise ValueError(f"{op}: `dim` must name at least one dimension, got {dim!r}. The usual one is -1.")
    if shard is not None:
        raise ValueError(f"{op}: `shard` needs one class dimension, got `dim={tuple(dim)}`.")
    places = [_check.dim(op, d, logits.ndim) for d in dim]
    if len(set(places)) != len(places):
        raise ValueError(f"{op}: `dim` must name each dimension once, got {tuple(dim)}.")
    ends = list(range(logits.ndim - len(places), logits.ndim))

    weighted.check(op, logits, *given[:3])  # here, where they have their shape

    def flat(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value
        return value.expand(logits.shape).movedim(places, ends).flatten(ends[0])

    x = flat(logits)
    out = function(
        x,
        k,
        temperature=temperature,
        mask=flat(_check.mask(op, mask, logits)),
        impl=impl,
        **{name: value if name.startswith("group") else flat(value) for name, value in _present(given).items()},
    )
    return out if kind == "nu" else out.unflatten(-1, [logits.shape[p] for p in places]).movedim(ends, places)


def _present(given: Wider) -> dict[str, Any]:
    return {name: value for name, value in given._asdict().items() if value is not None}
