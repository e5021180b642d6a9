"""Balanced assignment: rows with `k` labels each, columns with a capacity each, every entry at most 1."""

from __future__ import annotations

import contextlib
import numbers
import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lastlayer import _check, _triton
from lastlayer._module import FunctionModule
from lastlayer._threshold.autograd import apart, nestable, stacked
from lastlayer._threshold.dispatch import (
    compiled_without_tangents,
    differentiated,
    direct,
    divided,
    recorded,
    transformed,
)
from lastlayer._threshold.operators import WAITS, fake, operator
from lastlayer.project.lml import lml_threshold
from lastlayer.shard import ClassShard, reduce, replicate, spread

_ALTERNATIONS = 3  # exact row and column thresholds in turn; then Newton's method, which ends quadratically
_STEPS = 60  # bounds the search; the hardest case of the tests' grid takes 20
_FAR = 8.0  # Newton steps that move a logit by more than this are taken every other time only
_HALVINGS = 20  # of the logits, before a second search
_LEAST_STEP = 0.1  # between two of its logits, in doublings: what cannot be followed that far is given up
_TOLERANCE = 1e-11  # of a column's sum, relative to its capacity
_ACCEPTED = 1e-6  # columns that are further off than this mean that there is no solution
_AGREEMENT = 1e-5  # how far the two totals may be apart: float32 capacities do not add up exactly
_DENSE = 1024  # the smaller side up to which Newton's system is solved directly
_SMALL = 1e-290  # of sums of y (1 - y): what has less does not move
_LOST = 2e-16  # of such sums: their rounding
_INNER = 500  # bounds the conjugate gradients
_INNER_TOLERANCE = 1e-13


def lml_balanced(
    logits: Tensor,
    k: float | Tensor,
    capacity: float | Tensor | None = None,
    *,
    at_most: bool = False,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    shard: ClassShard | None = None,
) -> Tensor:
    r"""Project a matrix of logits onto the assignments with given row and column sums and entries of at most 1.

    .. math::
        \min_{0 < y < 1} \; -\langle x, y \rangle - H_b(y) \quad \text{subject to} \quad
        \sum_j y_{ij} = k_i, \quad \sum_i y_{ij} = c_j

    The solution is :math:`y_{ij} = \sigma(x_{ij} + \nu_i + \mu_j)`: each row (token, paper) gets exactly `k` columns
    (experts, reviewers) in expectation, each column exactly its capacity, and no pair is counted twice. Optimal
    transport (Sinkhorn) has no such cap: its entries may exceed 1.

    Args:
        logits: The scores :math:`x`, shape ``(..., rows, columns)``; ``-inf`` rules a pair out, ``+inf`` chooses it.
        k: The sum of each row; a number, or a tensor that broadcasts to ``(..., rows)``. Differentiable.
        capacity: The sum of each column; a number, or a tensor that broadcasts to ``(..., columns)``. Differentiable.
            ``None`` shares the sum of `k` equally. The capacities must add up to the sum of `k`; with `at_most`, to
            at least that. A bad number is an error; the values of a tensor are not read.
        at_most: Whether `capacity` is an upper limit: columns that stay below it are free (:math:`\mu_j = 0`).
        mask: Boolean, True where a pair may be chosen; broadcasts to the shape of `logits`.
        temperature: Divides the logits.
        shard: This rank's slice of the columns, when they are split over processes; `capacity` then holds this
            rank's columns.

    Returns:
        The assignment, of the shape and dtype of `logits`. The search runs in float64; on a GPU a single
        matrix in float32 or half precision is tried by a kernel first, which is exact to 1e-6 of the sums. A matrix
        without a solution (sums that do not match, more than a row or column can hold, a nan) becomes NaN; other
        matrices of the batch are unaffected.

    Example:
        >>> lml_balanced(torch.tensor([[2.0, 0.0], [2.0, 0.0]]), k=1)  # both prefer the first column
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]])
    """
    op = "lml_balanced"
    if at_most is False and mask is None and shard is None:
        found = _by_kernel(op, logits, k, capacity, temperature)
        if found is not None:
            return _Assignment.apply(*found.inputs(), found.y, *found.split()) if found.recorded else found.y
    x, nu, mu, fixed = _duals(op, logits, k, capacity, at_most, mask, temperature, shard)
    return torch.where(nu.isnan(), nu, _points(x, nu, mu, fixed).sigmoid()).to(logits.dtype)


def lml_balanced_duals(
    logits: Tensor,
    k: float | Tensor,
    capacity: float | Tensor | None = None,
    *,
    at_most: bool = False,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    shard: ClassShard | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Compute the dual variables :math:`\nu` and :math:`\mu` of :func:`lml_balanced`; both are differentiable.

    .. math:: y_{ij} = \sigma(x_{ij} / T + \nu_i + \mu_j)

    A moving average of ``mu`` is the bias that balances the columns when rows arrive one at a time.

    Args:
        logits: The scores, shape ``(..., rows, columns)``.
        k: The sum of each row.
        capacity: The sum of each column, or ``None`` for equal shares.
        at_most: Whether `capacity` is an upper limit.
        mask: Boolean, True where a pair may be chosen.
        temperature: Divides the logits.
        shard: This rank's slice of the columns.

    Returns:
        ``(nu, mu)`` of shapes ``(..., rows)`` and ``(..., columns)`` and of the dtype of `logits`. Without `at_most`
        a constant can move between the two; the mean of ``mu`` over its finite entries is 0. A row that takes
        nothing has ``-inf``, and one that takes everything ``+inf``; likewise for columns. On the GPU they are those
        of the kernel of :func:`lml_balanced`: the sums that they give are exact to 1e-6.

    Example:
        >>> nu, mu = lml_balanced_duals(torch.tensor([[2.0, 0.0], [2.0, 0.0]]), k=1)
        >>> mu
        tensor([-1.,  1.])
    """
    op = "lml_balanced_duals"
    if at_most is False and mask is None and shard is None:
        found = _by_kernel(op, logits, k, capacity, temperature)
        if found is not None:
            nu, mu = found.split()
            mean = mu.mean()
            nu, mu = nu + mean, mu - mean
            if found.recorded:
                nu, mu = _FoundDuals.apply(*found.inputs(), nu, mu)
            return nu.squeeze(-1).to(logits.dtype), mu.squeeze(-2).to(logits.dtype)
    _, nu, mu, _ = _duals(op, logits, k, capacity, at_most, mask, temperature, shard)
    nu = replicate(nu, shard)
    return nu.squeeze(-1).to(logits.dtype), mu.squeeze(-2).to(logits.dtype)


def _duals(
    op: str,
    logits: Tensor,
    k: float | Tensor,
    capacity: float | Tensor | None,
    at_most: bool,
    mask: Tensor | None,
    temperature: float | Tensor,
    shard: ClassShard | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Check the arguments; return scores, nu ``(..., rows, 1)``, mu ``(..., 1, columns)`` and the fixed pairs."""
    logits = _check.logits(op, logits)
    if logits.ndim < 2:
        raise ValueError(
            f"{op}: `logits` must have rows and columns, got shape {tuple(logits.shape)}. Use `lml` for one row."
        )
    mask = _check.mask(op, mask, logits)
    divisor = _check.temperature(op, temperature)
    rows, columns = logits.shape[-2:]
    _check_sums(op, k, capacity, rows, columns, at_most, shard)
    x = logits.double()
    if not isinstance(divisor, float):
        divisor = _check.temperatures(op, spread(divisor, shard), logits.shape[:-2], x.dtype)[..., None, None]
    live = logits != -torch.inf if mask is None else mask & (logits != -torch.inf)
    x = torch.where(live, x, 0)
    x = x / divisor if isinstance(divisor, float) else divided(x, divisor)
    sums = _check.cardinality(op, k, x, shard)  # (..., rows, 1)
    limits = _column_sums(op, capacity, sums, logits, shard)
    limits = limits if at_most else _agreeing(sums, limits, shard)
    function = _Duals if compiled_without_tangents("lml_balanced") else _DualsForwardMode
    return x, *function.apply(x, live, sums, limits, at_most, shard)


class _Found(NamedTuple):
    """A solution of the kernel with what it is the solution of; `duals` are nu and then mu, in float64."""

    logits: Tensor
    sums: Tensor | float
    limits: Tensor | float
    temperature: float
    y: Tensor
    duals: Tensor
    recorded: bool

    def split(self) -> tuple[Tensor, Tensor]:
        """Return nu ``(rows, 1)`` and mu ``(1, columns)``."""
        rows = self.logits.shape[0]
        return self.duals[:rows].unsqueeze(1), self.duals[rows:].unsqueeze(0)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, float]:
        """Return logits, row sums ``(rows, 1)``, column sums ``(1, columns)`` and temperature."""
        rows, columns = self.logits.shape
        sums, limits = (
            value if isinstance(value, Tensor) else self.duals.new_full((), value).expand(shape)
            for value, shape in ((self.sums, (rows, 1)), (self.limits, (1, columns)))
        )
        return self.logits, sums, limits, self.temperature


def _by_kernel(op: str, logits: Any, k: Any, capacity: Any, temperature: Any) -> _Found | None:
    """Return the solution from the GPU kernel; None where it is not for it, or has not found one."""
    if not isinstance(logits, Tensor) or not isinstance(temperature, float | int) or transformed():
        return None
    if not direct(logits, k, capacity) or _triton.unavailable(logits.device) or not logits.is_floating_point():
        return None
    loading = _load_solver(logits) if recorded(logits, k, capacity) else None
    from lastlayer._triton import balanced

    if balanced.unfit(logits):
        return None
    divisor = float(_check.temperature(op, temperature))
    rows, columns = logits.shape
    _check_sums(op, k, capacity, rows, columns, False, None)
    sums: Tensor | float
    limits: Tensor | float
    given: tuple[Tensor | float, Tensor | float]
    if isinstance(k, Tensor) or isinstance(capacity, Tensor):
        wide = logits.new_empty((), dtype=torch.float64).expand(logits.shape)  # `k` takes its dtype
        sums = _check.cardinality(op, k, wide)
        limits = _column_sums(op, capacity, sums, logits, None)
        limits = limits if capacity is None else _agreeing(sums, limits, None)
        given = sums.detach(), limits.detach()
    else:  # numbers stay numbers: a small tensor takes as long to make as the kernel to run
        sums = _check.cardinality_of_all(op, k, columns, columns)
        limits = rows * sums / columns
        given = sums, limits
    y, duals, wrong = balanced.solve(logits.detach(), given[0], given[1], divisor)
    if loading is not None:
        loading.join()  # so that nothing goes on beside what follows, which may be the capture of a CUDA graph
    if wrong:
        return None
    return _Found(logits, sums, limits, divisor, y, duals, recorded(logits, sums, limits))


_solvers: set[torch.device] = set()  # the devices on which a system of equations has been solved


def _load_solver(logits: Tensor) -> threading.Thread | None:
    """Have torch load the libraries of the backward pass in a thread, beside the first forward pass of a device.

    With nothing cached that takes about as long as the rest of a first call.
    """
    device = logits.device
    if device in _solvers or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    _solvers.add(device)
    thread = threading.Thread(target=_solve_something, args=(torch.cuda.current_stream(device),), daemon=False)
    thread.start()
    return thread


def _solve_something(stream: torch.cuda.Stream) -> None:
    with contextlib.suppress(Exception), torch.cuda.stream(stream):  # what is wrong will show in the backward pass
        one = torch.eye(2, dtype=torch.float64, device=stream.device)
        torch.linalg.solve_ex(one @ one, one)


def _agreeing(sums: Tensor, limits: Tensor, shard: ClassShard | None) -> Tensor:
    """Return the column sums, scaled to the total of the rows if they agree to rounding, and else NaN."""
    room = reduce(limits, "sum", shard)
    given = spread(sums.sum(-2, keepdim=True), shard)
    ratio = torch.where(room > 0, given / room.where(room > 0, 1), 1)
    return torch.where((ratio - 1).abs() <= _AGREEMENT, limits * ratio, torch.nan)


def _check_sums(
    op: str, k: Any, capacity: Any, rows: int, columns: int, at_most: bool, shard: ClassShard | None
) -> None:
    """Refuse what Python numbers already show to have no solution."""
    if isinstance(at_most, Tensor) or at_most not in (True, False):
        raise TypeError(f"{op}: `at_most` must be True or False, got {at_most!r}.")
    if capacity is None or isinstance(capacity, Tensor):
        return
    if isinstance(capacity, bool) or not isinstance(capacity, numbers.Real):
        raise TypeError(
            f"{op}: `capacity` must be a number or a tensor, got {type(capacity).__name__}. Use `torch.tensor`."
        )
    if not 0 <= float(capacity) < float("inf"):
        raise ValueError(
            f"{op}: `capacity` must be at least 0 and finite, got {capacity}. Give the sum that a column can take."
        )
    if isinstance(k, Tensor) or not isinstance(k, numbers.Real) or shard is not None:
        return
    have, need = columns * float(capacity), rows * float(k)
    if have < need * (1 - 1e-6) or (not at_most and have > need * (1 + 1e-6)):
        rule = "at least" if at_most else "equal to"
        raise ValueError(
            f"{op}: `capacity` times {columns} columns must be {rule} `k` times {rows} rows, {need:g}, got {have:g}. "
            + ("Raise it." if at_most else "Leave it out for equal shares, or use `at_most=True`.")
        )
    if not at_most and float(capacity) > rows:
        raise ValueError(
            f"{op}: `capacity` must be at most the number of rows, {rows}, got {capacity}. An entry is at most 1."
        )


def _column_sums(op: str, capacity: Any, sums: Tensor, logits: Tensor, shard: ClassShard | None) -> Tensor:
    """Return the capacities in float64, shape ``(..., 1, columns)``."""
    shape = (*logits.shape[:-2], 1, logits.shape[-1])
    if capacity is None:
        n = reduce(sums.new_ones(1, logits.shape[-1]), "sum", shard)
        return (spread(sums.sum(-2, keepdim=True), shard) / n).expand(shape)
    if not isinstance(capacity, Tensor):
        return _check.constant(float(capacity), torch.float64, logits.device).expand(shape)
    if capacity.is_complex() or capacity.dtype == torch.bool:
        raise TypeError(f"{op}: `capacity` must be real, got a tensor of {capacity.dtype}. Use a float.")
    wide = capacity.to(device=logits.device, dtype=torch.float64)
    try:
        wide = wide if wide.ndim == 0 else wide.unsqueeze(-2)
        return wide.expand(shape)
    except RuntimeError:
        raise ValueError(
            f"{op}: `capacity` must broadcast to {(*shape[:-2], shape[-1])}, got shape {tuple(capacity.shape)}. "
            "Give one number per column."
        ) from None


def _points(x: Tensor, nu: Tensor, mu: Tensor, fixed: Tensor) -> Tensor:
    """Return ``x + nu + mu``, infinite for the pairs that are fixed, and 0 where there is no solution."""
    free = fixed == 0
    z = x + torch.where(free, nu, 0) + torch.where(free, mu, 0)
    z = torch.where(free, z, torch.where(fixed > 0, torch.inf, -torch.inf).to(z.dtype))
    return torch.where(nu.isnan(), 0, z)


def _thresholds(x: Tensor, live: Tensor, sums: Tensor, shard: ClassShard | None) -> Tensor:
    """Return what to add to each row of `x` for it to sum to `sums`, ``(..., rows, 1)``; 0 where nothing is live."""
    nu = lml_threshold(torch.where(live, x, -torch.inf), sums.squeeze(-1), shard=shard).unsqueeze(-1)
    return torch.where(reduce(live.to(x.dtype), "max", shard) > 0, nu, 0)


def _solve(
    x: Tensor, live: Tensor, sums: Tensor, limits: Tensor, at_most: bool, shard: ClassShard | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(nu, mu, fixed)``: alternate, then Newton's method on the columns, with the rows solved exactly.

    With exact rows the dual is a convex function of mu whose third derivative is bounded by its second: a step of
    length ``log(1 + d) / d``, with d the largest change of a logit, always decreases it (Sun and Tran-Dinh, 2019).
    No line search is needed. `fixed` is 1 and -1 for the pairs that the sums alone decide.

    With sharp logits nearly all entries are 0 or 1, and Newton's system falls apart into pieces whose links are lost in
    rounding. Where that stops the search it begins anew with blunt logits, which are doubled again and again.
    """
    given, room = sums.sum(-2, keepdim=True), reduce(limits, "sum", shard)
    agree = room >= given * (1 - _ACCEPTED) if at_most else (room - given).abs() <= _ACCEPTED * given
    slack = _ACCEPTED * sums, _ACCEPTED * limits
    fixed, ends, sums, limits = _decide(x, live, sums, limits, at_most, shard)
    live = fixed == 0
    if not at_most:
        limits = _left(live, sums, limits, shard)
    if at_most:  # a limit above what a column can take is none
        limits = torch.minimum(limits, live.sum(-2, keepdim=True))
    unknown = reduce((x.isnan() & live).to(x.dtype).flatten(-2), "max", shard).unsqueeze(-1) > 0
    possible = agree & _fits(live, sums, limits, slack, at_most, shard) & ~unknown
    best, nu, mu = _search(x, live, sums, limits, torch.zeros_like(limits), possible, at_most, shard)
    unsolved = possible & (best > _ACCEPTED)
    if bool(unsolved.any()):
        found = _sharpen(x, live, sums, limits, unsolved, at_most, shard)
        best, nu, mu = (torch.where(unsolved, new, old) for new, old in zip(found, (best, nu, mu), strict=True))
    possible = possible & (best <= _ACCEPTED)
    nu, mu = (torch.where(end == 0, dual, end * torch.inf) for end, dual in zip(ends, (nu, mu), strict=True))
    if not at_most:  # the search had a mean of 0 over all columns, with those that are now infinite
        ended = reduce((ends[1] != 0).to(x.dtype), "max", shard) > 0
        surplus = torch.where(ended, _mean(mu, shard), 0)
        nu, mu = nu + surplus, mu - surplus
    return torch.where(possible, nu, torch.nan), torch.where(possible, mu, torch.nan), fixed


def _sharpen(
    x: Tensor, live: Tensor, sums: Tensor, limits: Tensor, wanted: Tensor, at_most: bool, shard: ClassShard | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `_search` does, from blunt logits on that get sharper as fast as the solution can be followed.

    Each search starts from the solution before. Where one fails, a smaller step follows from there.
    """
    halvings, step = float(_HALVINGS), 1.0
    best, nu, mu = _search(
        x * 0.5**halvings, live, sums, limits, torch.zeros_like(limits), wanted, at_most, shard, True
    )
    wanted = wanted & (best <= _ACCEPTED)  # what has no solution for blunt logits has none at all
    while halvings > 0 and bool(wanted.any()):
        less = max(halvings - step, 0.0)
        sharper, start = 0.5**less, mu * 2 ** (halvings - less)
        found = _search(x * sharper, live, sums, limits, start, wanted, at_most, shard, True)
        solved = wanted & (found[0] <= _ACCEPTED)
        if bool((solved == wanted).all()) or step < _LEAST_STEP:
            wanted, halvings, (best, nu, mu) = solved, less, found
            step = min(2 * step, 1.0)
        else:
            step /= 2
    return torch.where(wanted, best, torch.inf), nu, mu


def _search(
    x: Tensor,
    live: Tensor,
    sums: Tensor,
    limits: Tensor,
    mu: Tensor,
    wanted: Tensor,
    at_most: bool,
    shard: ClassShard | None,
    careful: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest error of a column, relative to its sum, and ``(nu, mu)``, from a first `mu` on.

    `wanted` are the matrices that have to be solved. A `careful` search takes back a step of Newton's method that
    brought no gain, and alternates instead.
    """
    best = torch.full_like(wanted, torch.inf, dtype=x.dtype)
    duals, tried = (torch.zeros_like(sums), mu), torch.zeros_like(wanted)
    for step in range(_STEPS):
        nu = _thresholds(x + mu, live, sums, shard)
        z = torch.where(live, x + nu + mu, -torch.inf)
        excess = z.sigmoid().sum(-2, keepdim=True) - limits
        bound = (mu < 0) | (excess > 0) if at_most else torch.ones_like(mu, dtype=torch.bool)
        off = torch.where(bound & live.any(-2, keepdim=True), excess.abs() / limits, 0)
        residual = reduce(off, "max", shard)
        better = residual < best
        best = torch.where(better, residual, best)
        duals = torch.where(better, nu, duals[0]), torch.where(better, mu, duals[1])
        if bool(((best <= _TOLERANCE) | ~wanted).all()):
            break
        failed = tried & ~better if careful else torch.zeros_like(better)
        moved = _thresholds((x + torch.where(failed, duals[0], nu)).mT, live.mT, limits.mT, None).mT
        if step >= _ALTERNATIONS:
            h = z.sigmoid() * (-z).sigmoid()
            _, change = _system(h, torch.zeros_like(sums), torch.where(bound, -excess, 0), bound, shard)
            width = reduce(change, "max", shard) - reduce(change, "min", shard)
            newton = mu + change * torch.where(width > 0, width.log1p() / width, 1)
            tried = ~failed & ((width < _FAR) | (step % 2 == 0))
            moved = torch.where(tried & newton.isfinite(), newton, moved)
        mu = moved.clamp(max=0) if at_most else moved - _mean(moved, shard)
    return best, *duals


def _decide(
    x: Tensor, live: Tensor, sums: Tensor, limits: Tensor, at_most: bool, shard: ClassShard | None
) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor, Tensor]:
    """Fix the pairs at ``+inf``, and those of rows and columns that take nothing or everything, until none is left.

    Returns ``fixed`` (1, -1, or 0 for free), the same per row and per column, and what is left of the sums. A dual
    variable of a fixed row is infinite; with two infinities of opposite sign the sum would say nothing.
    """
    sure = live & (x == torch.inf)
    fixed = torch.where(live, sure.to(torch.int8), -1)
    sums = sums - reduce(sure.to(sums.dtype), "sum", shard)
    limits = limits - sure.sum(-2, keepdim=True)
    row_end, column_end = torch.zeros_like(sums), torch.zeros_like(limits)
    tiny = 1e-12
    for _ in range(sum(live.shape[-2:]) + 1):
        free = fixed == 0
        n = reduce(free.to(sums.dtype), "sum", shard)
        end = torch.where(sums <= tiny, -1.0, torch.where(sums >= n - tiny, 1.0, 0.0)) * (n > 0)
        row_end = row_end + end
        now = torch.where(free, end, 0)
        sums = torch.where(end > 0, sums - n, sums)
        limits = limits - (now > 0).sum(-2, keepdim=True)
        free = free & (now == 0)
        m = free.sum(-2, keepdim=True).to(sums.dtype)
        full = 0.0 if at_most else torch.where(limits >= m - tiny, 1.0, 0.0)
        end = torch.where(limits <= tiny, -1.0, full) * (m > 0)
        column_end = column_end + end
        now = now + torch.where(free, end, 0)
        limits = torch.where(end > 0, limits - m, limits)
        sums = sums - reduce((free & (end > 0)).to(sums.dtype), "sum", shard)
        fixed = fixed + now.to(torch.int8)
        if not bool(reduce((now != 0).to(sums.dtype).flatten(-2), "max", shard).any()):
            break
    return fixed, (row_end.clamp(-1, 1), column_end.clamp(-1, 1)), sums, limits


def _left(free: Tensor, sums: Tensor, limits: Tensor, shard: ClassShard | None) -> Tensor:
    """Return the column sums with those of free columns scaled to what the rows have left.

    The totals of all agree, but a column that is decided cannot take its part of their rounding.
    """
    row, column = reduce(free.to(sums.dtype), "max", shard) > 0, free.any(-2, keepdim=True)
    given = spread(torch.where(row, sums, 0).sum(-2, keepdim=True), shard)
    room = reduce(torch.where(column, limits, 0), "sum", shard)
    ratio = torch.where(room > 0, given / room.where(room > 0, 1), 1)
    off = (ratio - 1).abs()
    return torch.where(column & (off > _TOLERANCE) & (off <= _AGREEMENT), limits * ratio, limits)


def _fits(
    free: Tensor, sums: Tensor, limits: Tensor, slack: tuple[Tensor, Tensor], at_most: bool, shard: ClassShard | None
) -> Tensor:
    """Which matrices can hold what is left of the sums, ``(..., 1, 1)``; necessary, not sufficient."""
    tiny, (row, column) = 1e-9, slack
    n, m = reduce(free.to(sums.dtype), "sum", shard), free.sum(-2, keepdim=True)
    fits = ((sums >= -tiny - row) & (sums <= n + tiny + row)).all(-2, keepdim=True)
    wrong = (limits < -tiny - column) | limits.isnan() | (False if at_most else limits > m + tiny + column)
    return fits & (reduce(wrong.to(sums.dtype), "max", shard) == 0)


def _mean(mu: Tensor, shard: ClassShard | None) -> Tensor:
    """Return the mean of the finite entries, ``(..., 1, 1)``."""
    finite = mu.isfinite()
    added, n = reduce([torch.where(finite, mu, 0), finite.to(mu.dtype)], "sum", shard)
    return added / n.clamp(min=1)


def _system(
    h: Tensor, v: Tensor, w: Tensor, bound: Tensor, shard: ClassShard | None, lost: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Solve ``r a + h b = v``, ``h' a + c b = w`` for a ``(..., rows, 1)`` and b ``(..., 1, columns)``.

    r and c are the row and column sums of h; b is 0 where a column is not bound. If all are bound, (1, -1) solves the
    homogeneous system, and b has mean 0. What only a part `lost` of the largest sum holds to others then stays where it
    is: two such columns would make the system singular, and where they are to go is lost in rounding.
    """
    r, c = reduce(h, "sum", shard), h.sum(-2, keepdim=True)
    least = _SMALL if lost else 0.0
    over_r = torch.where(r > least, 1 / r.where(r > least, 1), 0)
    kept, closed = bound & (c > least), bound.all(-1, keepdim=True)
    held, w = torch.where(kept, h, 0), torch.where(kept, w, 0)
    right = w - (held * (over_r * v)).sum(-2, keepdim=True)
    if shard is not None or min(h.shape[-2:]) > _DENSE:
        b = _conjugate_gradients(held, over_r, torch.where(kept, c, 1), right, shard)
    elif h.shape[-1] <= h.shape[-2]:
        b = _laplacian_solve((h * over_r).mT @ h, kept.mT, lost * c.mT, closed, right.mT).mT
    else:  # the same with the roles of rows and columns exchanged
        over_c = torch.where(kept, 1 / c.where(kept, 1), 0)
        links = (held * over_c) @ held.mT
        leak = (h - held).sum(-1, keepdim=True)
        a = _laplacian_solve(links, r > least, lost * r, closed, v - held @ (over_c * w).mT, leak)
        b = over_c * (w - (held * a).sum(-2, keepdim=True))
    return over_r * (v - reduce(held * b, "sum", shard)), b


def _laplacian_solve(
    links: Tensor, kept: Tensor, lost: Tensor, closed: Tensor, right: Tensor, leak: Tensor | float = 0.0
) -> Tensor:
    """Solve ``(D - links) s = right`` on the kept nodes, D being such that rows of a closed system sum to 0.

    The diagonal is added up from the links, not subtracted: it stays exact where links are many orders apart. Nodes of
    a closed system whose links to others add up to less than the largest of `lost` stay where they are.
    """
    links = links - torch.diag_embed(links.diagonal(dim1=-2, dim2=-1))
    degree = links.sum(-1, keepdim=True) + leak
    kept = kept & ~(closed & (degree < lost.amax(-2, keepdim=True)))
    both = kept & kept.mT
    gauge = torch.where(closed & both, degree.mean((-2, -1), keepdim=True) / links.shape[-1], 0)
    degree = torch.where(kept & (degree > 0), degree * (1 + 1e-14), 1)
    matrix = torch.diag_embed(degree.squeeze(-1)) - torch.where(both, links, 0) + gauge
    solution: Tensor = torch.linalg.solve_ex(matrix, torch.where(kept, right, 0)).result
    return solution


def _conjugate_gradients(held: Tensor, over_r: Tensor, c: Tensor, right: Tensor, shard: ClassShard | None) -> Tensor:
    """Solve ``(c - h' h / r) b = right`` by conjugate gradients, preconditioned with c."""

    def dot(p: Tensor, q: Tensor) -> Tensor:
        return reduce(p * q, "sum", shard)

    b, rest = torch.zeros_like(right), right
    scaled = rest / c
    direction, size = scaled, dot(rest, scaled)
    enough = _INNER_TOLERANCE**2 * size
    for _ in range(_INNER):
        if bool((size <= enough).all()):
            break
        image = c * direction - (held * (over_r * reduce(held * direction, "sum", shard))).sum(-2, keepdim=True)
        curvature = dot(direction, image)
        length = torch.where((curvature > 0) & (size > enough), size / curvature.where(curvature > 0, 1), 0)
        b, rest = b + length * direction, rest - length * image
        scaled = rest / c
        smaller = dot(rest, scaled)
        direction = scaled + torch.where(size > 0, smaller / size.where(size > 0, 1), 0) * direction
        size = smaller
    return b


@operator("balanced_duals", *WAITS)
def _op(x: Tensor, live: Tensor, sums: Tensor, limits: Tensor, at_most: bool) -> tuple[Tensor, Tensor, Tensor]:
    return _solve(x, live, sums, limits, at_most, None)


@fake("balanced_duals")
def _(x: Tensor, live: Tensor, sums: Tensor, limits: Tensor, at_most: bool) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(sums.shape), x.new_empty(limits.shape), x.new_empty(x.shape, dtype=torch.int8)


class _Duals(torch.autograd.Function):
    """``(x, k, capacity) -> (nu, mu, fixed)``; the derivatives are those of the two sums, solved for the duals."""

    @staticmethod
    def forward(
        x: Tensor, live: Tensor, sums: Tensor, limits: Tensor, at_most: bool, shard: ClassShard | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if shard is not None:
            return _solve(x, live, sums, limits, at_most, shard)
        duals: tuple[Tensor, Tensor, Tensor] = torch.ops.lastlayer.balanced_duals(x, live, sums, limits, at_most)
        return duals

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, _, _, _, ctx.at_most, ctx.shard = inputs
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(x, *output)
        ctx.save_for_forward(x, *output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        h, bound, finite, unsolved = _curvature(ctx)
        grad_nu = reduce(grads[0], "sum", ctx.shard)
        grad_mu = torch.where(finite, grads[1], 0)
        # A matrix without a solution that is not used has no part in the gradient of what it shares.
        used = (grad_nu != 0).any(-2, keepdim=True) | (reduce((grads[1] != 0).to(h.dtype), "max", ctx.shard) > 0)
        if not ctx.at_most:
            grad_mu = grad_mu + _share_of_mean(grad_nu, grad_mu, finite, ctx.shard)
        a, b = _system(h, grad_nu, grad_mu, bound, ctx.shard, _LOST)
        grad_x, a, b = (torch.where(unsolved & used, torch.nan, found) for found in (-h * (a + b), a, b))
        return grad_x, None, a, b, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        tensors = stacked(in_dims[:4], inputs[:4], own=2)
        return _DualsForwardMode.apply(*tensors, *inputs[4:]), (0, 0, 0)


class _DualsForwardMode(_Duals):
    """As `_Duals`, with forward-mode derivatives."""

    @staticmethod
    @nestable
    def jvp(ctx: Any, x_t: Tensor | None, _: Any, sums_t: Tensor | None, limits_t: Tensor | None, *__: Any) -> Any:
        h, bound, finite, unsolved = _curvature(ctx)
        h = torch.where(unsolved, torch.nan, h)
        v, w = h.new_zeros(*h.shape[:-1], 1), h.new_zeros(*h.shape[:-2], 1, h.shape[-1])
        if x_t is not None:
            v, w = v - reduce(h * x_t, "sum", ctx.shard), w - (h * x_t).sum(-2, keepdim=True)
        v, w = v if sums_t is None else v + sums_t, w if limits_t is None else w + limits_t
        nu_t, mu_t = _system(h, v, w, bound, ctx.shard, _LOST)
        if ctx.at_most:
            return nu_t, mu_t, None
        mean = _mean(torch.where(finite, mu_t, torch.inf), ctx.shard)
        return nu_t + mean, torch.where(finite, mu_t - mean, 0), None


def _share_of_mean(grad_nu: Tensor, grad_mu: Tensor, finite: Tensor, shard: ClassShard | None) -> Tensor:
    """Return what each mu gets of the gradient of its mean, which was taken from mu and given to nu."""
    surplus = grad_nu.sum(-2, keepdim=True) - reduce(grad_mu, "sum", shard)
    n = reduce(finite.to(grad_mu.dtype), "sum", shard).clamp(min=1)
    return torch.where(finite, surplus / n, 0)


class _FoundDuals(torch.autograd.Function):
    """``(logits, k, capacity) -> (nu, mu)`` for a solution that is there; like `_Assignment`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        logits, sums, limits, ctx.temperature, nu, mu = inputs
        ctx.save_for_backward(logits, sums, limits, nu, mu)
        return nu.clone(), mu.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        logits, sums, limits, nu, mu = ctx.saved_tensors
        if differentiated(*grads):
            return *_plain_gradients(ctx, logits, sums, limits, *grads), None, None, None
        z = logits.double() / ctx.temperature + nu + mu
        h = z.sigmoid() * (-z).sigmoid()
        bound = torch.ones_like(mu, dtype=torch.bool)
        grad_nu, grad_mu = grads
        a, b = _system(h, grad_nu, grad_mu + _share_of_mean(grad_nu, grad_mu, bound, None), bound, None, _LOST)
        return (-h * (a + b) / ctx.temperature).to(logits.dtype), a, b, None, None, None


class _Assignment(torch.autograd.Function):
    """``(logits, k, capacity) -> y`` for a solution that is there; further derivatives are those of plain torch."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        logits, sums, limits, ctx.temperature, y, nu, mu = inputs
        ctx.save_for_backward(logits, sums, limits, nu, mu)
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        logits, sums, limits, nu, mu = ctx.saved_tensors
        (grad,) = grads
        if differentiated(grad):
            return *_plain_gradients(ctx, logits, sums, limits, grad), None, None, None, None
        z = logits.double() / ctx.temperature + nu + mu
        h = z.sigmoid() * (-z).sigmoid()
        pull = h * grad.double()
        bound = torch.ones_like(mu, dtype=torch.bool)
        a, b = _system(h, pull.sum(-1, keepdim=True), pull.sum(-2, keepdim=True), bound, None, _LOST)
        grad_x = (pull - h * (a + b)) / ctx.temperature
        return grad_x.to(logits.dtype), a, b, None, None, None, None


def _plain_gradients(ctx: Any, logits: Tensor, sums: Tensor, limits: Tensor, *grads: Tensor) -> list[Tensor | None]:
    """Return the gradients of logits, k and capacity in differentiable operations, from that of y or of both duals."""
    with torch.enable_grad():
        logits, sums, limits = apart(logits, sums, limits)
        inputs = zip((logits, sums, limits), ctx.needs_input_grad[:3], strict=True)
        wanted = [value for value, asked in inputs if asked]
        x = logits.double() / ctx.temperature
        live = torch.ones_like(x, dtype=torch.bool)
        nu, mu, fixed = _DualsForwardMode.apply(x, live, sums, limits, False, None)
        outputs = (nu, mu) if len(grads) == 2 else (_points(x, nu, mu, fixed).sigmoid().to(logits.dtype),)
    found = iter(torch.autograd.grad(outputs, wanted, grads, create_graph=torch.is_grad_enabled()))
    return [next(found) if asked else None for asked in ctx.needs_input_grad[:3]]


def _curvature(ctx: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``y (1 - y)``, which columns are at their capacity, which mu are finite, and which matrices are unsolved.

    Those have a ``y (1 - y)`` of 0.
    """
    x, nu, mu, fixed = ctx.saved_tensors
    z = _points(x, nu, mu, fixed)
    unsolved = nu.isnan().any(-2, keepdim=True)
    h = torch.where((fixed == 0) & ~unsolved, z.sigmoid() * (-z).sigmoid(), 0)
    bound = mu < 0 if ctx.at_most else torch.ones_like(mu, dtype=torch.bool)
    return h, bound, mu.isfinite(), unsolved


class LMLBalanced(FunctionModule):
    """Module form of :func:`lml_balanced`, which documents the arguments."""

    function = staticmethod(lml_balanced)

    def __init__(
        self,
        k: float | Tensor,
        capacity: float | Tensor | None = None,
        *,
        at_most: bool = False,
        temperature: float | Tensor = 1.0,
    ) -> None:
        super().__init__(k=k, capacity=capacity, at_most=at_most, temperature=temperature)

    def forward(self, logits: Tensor, mask: Tensor | None = None, *, shard: ClassShard | None = None) -> Tensor:
        """Return the balanced assignment of `logits`."""
        out: Tensor = self._call(logits, mask=mask, shard=shard)
        return out
