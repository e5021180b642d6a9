"""The Limited Multi-Label projection (Amos, Koltun and Kolter, 2019): logits to a point of the k-label polytope."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lastlayer._module import FunctionModule
from lastlayer._ranked import exporting
from lastlayer._threshold import exported
from lastlayer._threshold.autograd import broken_rows, directly, mapped, nestable, without_transforms
from lastlayer._threshold.compiled import by_kernels, compiled, fused
from lastlayer._threshold.dispatch import (
    Impl,
    Problem,
    backward,
    compiled_with_transform,
    differentiated,
    direct,
    enter,
    forward,
    kernels,
    recorded,
    shortest,
    straight,
    transformed,
    unwatched,
)
from lastlayer._threshold.search import points, scores, shifted, sizes, solve, tails
from lastlayer._threshold.whole import whole_projection
from lastlayer.project.wider import Dim, Wider, project_wider
from lastlayer.shard import ClassShard, reduce, replicate

Kind = Literal["y", "log", "nu"]


@whole_projection("weight", "lower", "upper", "groups")
def lml(
    logits: Tensor,
    k: float | Tensor,
    *,
    dim: Dim = -1,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    weight: float | Tensor | None = None,
    lower: float | Tensor | None = None,
    upper: float | Tensor | None = None,
    groups: Tensor | None = None,
    group_limit: float | Tensor | None = None,
    shard: ClassShard | None = None,
    impl: Impl = "auto",
) -> Tensor:
    r"""Project logits onto the polytope of `k` labels: probabilities whose sum is `k`.

    .. math:: \min_{0 < y < 1} \; -x^\top y - H_b(y) \quad \text{subject to} \quad \sum_i y_i = k

    where :math:`H_b` is the binary entropy. The solution is :math:`y_i = \sigma(x_i + \nu)`, with one :math:`\nu` per
    row. The probabilities are in the order of the logits, and adding a constant to a row changes nothing. `k = 1` is
    not the softmax: each class has a probability of its own.

    With weights and bounds the solution is :math:`y_i = l_i + (u_i - l_i)\, \sigma(x_i + w_i \nu)`. Kernels solve such
    rows too. Rows with groups are solved in float64, by a kernel on a CPU; rows that keep all limits anyway cost little
    more than rows without groups do in float64.

    Args:
        logits: The scores :math:`x`, any shape. ``-inf`` rules a class out, ``+inf`` takes one unit of `k`.
        k: The expected number of labels, any real number with ``0 <= k <= n_classes``; or a differentiable tensor that
            broadcasts to the shape of the rows. A row with an infeasible `k` becomes NaN; other rows are unaffected.
        dim: The dimension of the classes; a tuple is one budget over several dimensions.
        temperature: Divides the logits. As it goes to 0 the result becomes the indicator of the `k` largest logits.
            A number, or a differentiable tensor that broadcasts to the shape of the rows; a row whose temperature is
            not positive and finite becomes NaN.
        mask: Boolean, True where a class takes part; broadcasts to the shape of `logits`.
        weight: What a unit of each class costs: the budget is :math:`\sum_i w_i y_i = k`. Of either sign; a class of
            weight 0 is free. Broadcasts to the shape of `logits`; differentiable, like the bounds.
        lower: The least value of each class, 0 if left out. A class at ``-inf`` gets it; one outside `mask` gets 0.
        upper: The largest value of each class, 1 if left out. As for `k`, a bad number is an error, but the values of
            tensors are not read: NaN, an infinite weight or bound, or `lower` above `upper` makes its row NaN. If `k`
            is out of reach by no more than 1e-6 of the sum, all classes are at their bounds.
        groups: The group of each class, an integer tensor ``(n_classes,)``; needs `group_limit`.
        group_limit: The largest sum within a group; a number, or one number per group.
        shard: This rank's slice, when the classes are split over processes.
        impl: ``"torch"``, ``"native"`` (compiled, CPU), ``"triton"`` (GPU), or ``"auto"``: the fastest that applies.

    Returns:
        Probabilities, of the shape and dtype of `logits`. Half precision is computed in float32.

    Example:
        >>> lml(torch.tensor([2.0, 1.0, 0.0, -1.0]), k=2)
        tensor([0.8176, 0.6225, 0.3775, 0.1824])
    """
    if not (weight is lower is upper is groups is group_limit is None and isinstance(dim, int)):
        given = Wider(weight, lower, upper, groups, group_limit)
        return project_wider("lml", "y", lml, logits, k, given, dim, temperature, mask, shard, impl)
    kernel = shortest(logits, k, dim, temperature, mask, shard, impl)
    if kernel is not None:
        return _by_short_way(logits, float(k), None, 1.0, kernel)
    problem, back = enter("lml", logits, k, dim, temperature, mask, shard, impl)
    if straight(problem):
        return back(_by_short_way(*problem[:4], problem.impl))
    if exporting() and problem.impl == "torch" and problem.shard is None:
        x, k, mask, divisor, _, _ = problem
        return back(exported.probabilities(scores(x, mask, divisor), k).to(x.dtype))
    return back(apply(problem, "y")[0])


def log_lml(
    logits: Tensor,
    k: float | Tensor,
    *,
    dim: Dim = -1,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    weight: float | Tensor | None = None,
    lower: float | Tensor | None = None,
    upper: float | Tensor | None = None,
    shard: ClassShard | None = None,
    impl: Impl = "auto",
) -> Tensor:
    r"""Compute the logarithm of :func:`lml`, accurate where the probability underflows or rounds to 1.

    .. math:: \log y_i = \log \sigma(x_i + \nu)

    Args:
        logits: The scores, any shape.
        k: The expected number of labels.
        dim: The dimension of the classes.
        temperature: Divides the logits.
        mask: Boolean, True where a class takes part.
        weight: As in :func:`lml`, like `lower` and `upper`.
        lower: The least value of each class.
        upper: The largest value of each class.
        shard: This rank's slice, when the classes are split over processes.
        impl: As in :func:`lml`.

    Returns:
        Log-probabilities, of the shape and dtype of `logits`; ``-inf`` for classes ruled out.

    Example:
        >>> log_lml(torch.tensor([200.0, 200.0, -200.0]), k=2)
        tensor([   0.0000,    0.0000, -199.6534])
    """
    if not (weight is lower is upper is None and isinstance(dim, int)):
        given = Wider(weight, lower, upper)
        return project_wider("log_lml", "log", log_lml, logits, k, given, dim, temperature, mask, shard, impl)
    problem, back = enter("log_lml", logits, k, dim, temperature, mask, shard, impl)
    return back(apply(problem, "log")[0])


def lml_threshold(
    logits: Tensor,
    k: float | Tensor,
    *,
    dim: Dim = -1,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    weight: float | Tensor | None = None,
    lower: float | Tensor | None = None,
    upper: float | Tensor | None = None,
    shard: ClassShard | None = None,
    impl: Impl = "auto",
) -> Tensor:
    r"""Compute the dual variable :math:`\nu` of :func:`lml`, differentiable in `logits` and `k`.

    .. math:: \sum_i \sigma(x_i / T + \nu) = k

    ``-nu`` is the logit at which a label is as likely as not. The dual is ``-inf`` at ``k = 0`` and ``+inf`` where
    `k` is the number of classes.

    Args:
        logits: The scores, any shape.
        k: The expected number of labels.
        dim: The dimension of the classes; the result does not have it.
        temperature: Divides the logits.
        mask: Boolean, True where a class takes part.
        weight: As in :func:`lml`, like `lower` and `upper`.
        lower: The least value of each class.
        upper: The largest value of each class.
        shard: This rank's slice, when the classes are split over processes.
        impl: As in :func:`lml`.

    Returns:
        One number per row, of the dtype of `logits`.

    Example:
        >>> lml_threshold(torch.tensor([[1.0, 1.0, 1.0, 1.0]]), k=2)
        tensor([-1.])
    """
    if not (weight is lower is upper is None and isinstance(dim, int)):
        given = Wider(weight, lower, upper)
        return project_wider(
            "lml_threshold", "nu", lml_threshold, logits, k, given, dim, temperature, mask, shard, impl
        )
    problem, _ = enter("lml_threshold", logits, k, dim, temperature, mask, shard, impl)
    _, center, delta = apply(problem, "nu")
    return (replicate(delta, problem.shard) - center).squeeze(-1).to(logits.dtype)


@whole_projection("weight", "lower", "upper")
def lml_at_most(
    logits: Tensor,
    k: float | Tensor,
    *,
    dim: Dim = -1,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    weight: float | Tensor | None = None,
    lower: float | Tensor | None = None,
    upper: float | Tensor | None = None,
    shard: ClassShard | None = None,
    impl: Impl = "auto",
) -> Tensor:
    r"""Project logits onto the budget polytope: probabilities whose sum is at most `k`.

    .. math:: \min_{0 < y < 1} \; -x^\top y - H_b(y) \quad \text{subject to} \quad \sum_i y_i \le k

    The result is the sigmoid where that meets the budget, and :func:`lml` elsewhere.

    Args:
        logits: The scores, any shape.
        k: The largest expected number of labels; from ``n_classes`` on it has no effect. With weights or bounds it is
            the largest sum. ``inf`` is no limit.
        dim: The dimension of the classes.
        temperature: Divides the logits.
        mask: Boolean, True where a class takes part.
        weight: As in :func:`lml`, like `lower` and `upper`.
        lower: The least value of each class.
        upper: The largest value of each class.
        shard: This rank's slice, when the classes are split over processes.
        impl: As in :func:`lml`.

    Returns:
        Probabilities, of the shape and dtype of `logits`.

    Example:
        >>> lml_at_most(torch.tensor([[0.0, 0.0], [9.0, 9.0]]), k=1)
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]])
    """
    if not (weight is lower is upper is None and isinstance(dim, int)):
        given = Wider(weight, lower, upper)
        return project_wider(
            "lml_at_most", "at most", lml_at_most, logits, k, given, dim, temperature, mask, shard, impl
        )
    if shortest(logits, k, dim, temperature, mask, shard, impl) == "native":
        return _at_most_natively(Problem(logits, float(k), None, 1.0, None, "native"))
    problem, back = enter("lml_at_most", logits, k, dim, temperature, mask, shard, impl, at_most_n=False)
    y = _at_most_by_kernel(problem)
    return back(_at_most(problem) if y is None else y)


def _at_most(problem: Problem) -> Tensor:
    """Return the projection to a budget from that to an exact one."""
    x = scores(problem.x, problem.mask, problem.temperature)
    if problem.shard is None and not isinstance(problem.k, Tensor):  # in fewer steps
        size = (x > -torch.inf).sum(-1, keepdim=True, dtype=x.dtype).clamp(max=problem.k)
    else:
        size = torch.minimum(sizes(problem.k, x), reduce((x > -torch.inf).to(x.dtype), "sum", problem.shard))
    tight, center, delta = apply(problem._replace(k=size), "y")
    return torch.where(delta >= center, x.sigmoid().to(tight.dtype), tight)


def _at_most_by_kernel(problem: Problem) -> Tensor | None:
    """Return the projection to a budget by one kernel each way, None where there is none."""
    x, k, mask, temperature, shard, impl = problem
    if impl == "native" and direct(x, k, mask) and not (recorded(k) or transformed()):
        return _at_most_natively(problem)
    if impl != "triton" or shard is not None or not compiled(x, k, mask):
        return None
    kernels = fused(x)
    if not kernels.takes("at_most", x.shape[:-1].numel(), x.shape[-1]):
        return None
    per_row = isinstance(k, Tensor)
    numbers, first = (0.0 if per_row else k, temperature), k.squeeze(-1) if per_row else None

    def forward(x: Tensor, gradient: bool) -> tuple[Tensor, Tensor]:
        found = kernels.run("at_most", x, None, numbers, mask=mask, first=first)
        return found.out, found.extra

    def backward(upstream: Tensor, x: Tensor, rows: Tensor) -> Tensor:
        given = (x, None, (temperature,))
        out: Tensor = kernels.run("at_most_backward", *given, each=upstream, positive=mask, first=rows).out
        return out

    return by_kernels(x, forward, backward, lambda x, _: _at_most(problem._replace(x=x)))


def _at_most_natively(problem: Problem) -> Tensor:
    """Return the projection to a budget by the kernel of the CPU, for a k without gradients."""
    x, k, mask, temperature, _, impl = problem

    def forward(x: Tensor, gradient: bool) -> tuple[Any, ...]:
        out, rows = kernels(impl).probabilities(x, k, mask, temperature, gradient, "at most")
        return out, rows, mask

    def backward(upstream: Tensor, x: Tensor, rows: Tensor, mask: Tensor | None) -> Tensor:
        return kernels(impl).probabilities_backward(x, mask, temperature, rows, upstream, "at most")

    return by_kernels(x, forward, backward, lambda x, _, mask: _at_most(problem._replace(x=x, mask=mask)))


def apply(problem: Problem, kind: Kind) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(out, center, delta)`` with ``nu = delta - center``; gradients flow into `out` and `delta`."""
    if exporting():  # which has no use for derivatives
        return _forward(problem, kind)
    if compiled_with_transform():
        problem = problem._replace(impl="torch")
    if torch.compiler.is_compiling():  # the compiler takes no Function that defines forward mode
        function: Any = _LML
    elif transformed():
        function = _LMLForwardMode
    elif recorded(problem.x, problem.k):
        function = _LMLBackward
    else:
        return _forward(problem, kind)  # without autograd's own overhead
    result: tuple[Tensor, Tensor, Tensor] = function.apply(*problem, kind)
    return result


def _by_short_way(x: Tensor, k: float, mask: Tensor | None, temperature: float, impl: Impl) -> Tensor:
    """Return y from a kernel for one k, in as few steps as there can be."""
    if x.requires_grad and torch.is_grad_enabled():
        out: Tensor = _probabilities(x, k, mask, temperature, impl)
        return out
    return kernels(impl).probabilities(x, k, mask, temperature, False)[0]


def _forward(problem: Problem, kind: Kind) -> tuple[Tensor, Tensor, Tensor]:
    return _plain(problem, kind) if problem.impl == "torch" else forward(problem, kind)


def _plain(problem: Problem, kind: Kind) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(out, center, delta)`` in plain torch: the fallback, and what the kernels are checked against."""
    dtype, x = problem.x.dtype, scores(problem.x, problem.mask, problem.temperature)
    if problem.shard is None and exporting():
        out, center, delta = exported.project(x, problem.k, kind)
        return out.to(dtype), center, delta
    center, delta = solve(x, sizes(problem.k, x), problem.shard)
    if kind == "nu":
        return x.new_empty(0, dtype=dtype), center, delta
    if kind == "log":
        return F.logsigmoid(points(x, center, delta)).to(dtype), center, delta
    infinite = ~delta.isfinite()
    z, rest = shifted(points(x, center, torch.where(infinite, delta, 0)), torch.where(infinite, 0, delta))
    tail = tails(z, torch.zeros_like(delta), rest)
    y = torch.where(z > 0, 1, tail) / (1 + tail)
    return torch.where(delta.isnan(), delta, y).to(dtype), center, delta


class _LML(torch.autograd.Function):
    """``(logits, k) -> (out, center, delta)``: one definition of the derivatives for every implementation."""

    @staticmethod
    def forward(
        logits: Tensor,
        k: Any,
        mask: Tensor | None,
        temperature: float,
        shard: ClassShard | None,
        impl: Impl,
        kind: Kind,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _forward(Problem(logits, k, mask, temperature, shard, impl), kind)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        logits, _, mask, ctx.temperature, ctx.shard, ctx.impl, ctx.kind = inputs
        _, center, delta = output
        ctx.mark_non_differentiable(center)
        ctx.save_for_backward(logits, mask, center, delta)
        ctx.save_for_forward(logits, mask, center, delta)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        logits, mask, center, delta = ctx.saved_tensors
        grad_out, _, grad_delta = grads
        if ctx.kind == "nu":
            grad_out = None
        if grad_out is None and grad_delta is None:
            return (None,) * 7
        arguments = (logits, mask, ctx.temperature, center, delta, grad_out, grad_delta, ctx.kind)
        if ctx.impl == "torch" or differentiated(grad_out, grad_delta):
            grad_logits, grad_k = _plain_backward(*arguments, ctx.shard)
        else:
            grad_logits, grad_k = backward(ctx.impl, *arguments)
        return grad_logits, grad_k if ctx.needs_input_grad[1] else None, None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        x, k, mask = mapped(info.batch_size, in_dims, *inputs[:3])
        *rest, kind = inputs[3:]
        return apply(Problem(x, k, mask, *rest), kind), (0 if kind != "nu" else None, 0, 0)


_LMLBackward = without_transforms(_LML)


class _Probabilities(torch.autograd.Function):
    """``logits -> y`` by a kernel, for one k; further derivatives are those of `_LML`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, k: float, mask: Tensor | None, temperature: float, impl: Impl) -> Tensor:
        out, rows = kernels(impl).probabilities(logits, k, mask, temperature, True)
        ctx.save_for_backward(logits, mask, rows)
        ctx.k, ctx.temperature, ctx.impl = k, temperature, impl
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        logits, mask, rows = ctx.saved_tensors
        (grad,) = grads
        if unwatched(grad) and not torch.is_grad_enabled():
            found = kernels(ctx.impl).probabilities_backward(logits, mask, ctx.temperature, rows, grad)
        elif differentiated(grad):
            problem = Problem(logits, ctx.k, mask, ctx.temperature, None, ctx.impl)
            _, center, delta = _LMLBackward.apply(*problem, "y")
            found = _plain_backward(logits, mask, ctx.temperature, center, delta, grad, None, "y")[0]
        else:
            center, delta = rows[:2].unsqueeze(-1)
            found = backward(ctx.impl, logits, mask, ctx.temperature, center, delta, grad, None, "y")[0]
        return found, None, None, None, None


_probabilities = directly(_Probabilities)


class _LMLForwardMode(_LML):
    """As `_LML`, with forward-mode derivatives."""

    @staticmethod
    @nestable
    def jvp(ctx: Any, logits_t: Tensor | None, k_t: Tensor | None, *_: Any) -> Any:
        logits, mask, center, delta = ctx.saved_tensors
        x = scores(logits, mask, ctx.temperature)
        z = points(x, center, delta)
        live = x.isfinite() & delta.isfinite()
        dx = torch.zeros_like(x) if logits_t is None else torch.where(live, logits_t.to(x.dtype) / ctx.temperature, 0)
        dk = torch.zeros_like(delta) if k_t is None else k_t
        p, log_h, inverse, means, _unused = _weights(live, z, ctx.shard, [dx], [])
        mean = means[0]
        delta_t = _product(dk, inverse) - mean
        if ctx.kind == "nu":
            out_t = logits.new_empty(0)
        elif ctx.kind == "y":
            out_t = (log_h.exp() * (dx - mean) + p * dk).to(logits.dtype)
        else:
            out_t = torch.where(live, (-z).sigmoid() * (dx + delta_t), 0).to(logits.dtype)
        return out_t, None, delta_t


def _weights(
    live: Tensor, z: Tensor, shard: ClassShard | None, averaged: list[Tensor], added: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Return ``p = h / sum h``, ``log h`` and ``1 / sum h``, for ``h = y (1 - y)`` where there is a gradient.

    Also return the means of `averaged` under p and the sums of `added`, from the same collective.
    """
    log_h = torch.where(live, F.logsigmoid(z) + F.logsigmoid(-z), -torch.inf)
    peak = reduce(log_h.detach(), "max", shard)
    peak = torch.where(peak.isfinite(), peak, 0)
    e = (log_h - peak).exp()
    mass, *sums = reduce([e, *(e * v for v in averaged), *added], "sum", shard)
    mass = torch.where(mass > 0, mass, torch.inf)
    means = [s / mass for s in sums[: len(averaged)]]
    return e / mass, log_h, (-peak).exp() / mass, means, sums[len(averaged) :]


def _plain_backward(
    logits: Tensor,
    mask: Tensor | None,
    temperature: float,
    center: Tensor,
    delta: Tensor,
    grad_out: Tensor | None,
    grad_delta: Tensor | None,
    kind: Kind,
    shard: ClassShard | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of logits and k, in differentiable operations."""
    x = scores(logits, mask, temperature)
    z = torch.where(delta.isnan(), 0, points(x, center, delta))  # what is nan has derivatives that are nan
    live = x.isfinite() & delta.isfinite()
    given = torch.zeros_like(delta) if grad_delta is None else grad_delta
    if grad_out is None:
        p, log_h, inverse, _, (given,) = _weights(live, z, shard, [], [given])
        grad_x, grad_k = -p * given, _product(given, inverse)
    elif kind == "y":
        u = torch.where(live, grad_out.to(x.dtype), 0)
        p, log_h, inverse, (mean,), (given,) = _weights(live, z, shard, [u], [given])
        grad_x, grad_k = log_h.exp() * (u - mean) - p * given, mean + _product(given, inverse)
    else:
        v = torch.where(live, grad_out.to(x.dtype) * (-z).sigmoid(), 0)
        p, log_h, inverse, _, sums = _weights(live, z, shard, [], [v, given])
        given = sums[0] + sums[1]
        grad_x, grad_k = v - p * given, _product(given, inverse)
    if temperature != 1.0:
        grad_x = grad_x / temperature
    broken = broken_rows(delta, grad_out, grad_delta, shard)
    return torch.where(broken, torch.nan, grad_x).to(logits.dtype), torch.where(broken, torch.nan, grad_k)


def _product(given: Tensor, inverse: Tensor) -> Tensor:
    """Multiply by ``1 / sum h``, which overflows across a wide gap; 0 stays 0, but has a derivative where it can."""
    return given * torch.where((given == 0) & ~inverse.isfinite(), 0, inverse)


class _Projection(FunctionModule):
    """The Modules of this file: budget, weights and bounds are stored, the mask comes with a call."""

    def __init__(
        self,
        k: float | Tensor,
        *,
        dim: Dim = -1,
        temperature: float | Tensor = 1.0,
        weight: float | Tensor | None = None,
        lower: float | Tensor | None = None,
        upper: float | Tensor | None = None,
        impl: Impl = "auto",
    ) -> None:
        super().__init__(k=k, dim=dim, temperature=temperature, weight=weight, lower=lower, upper=upper, impl=impl)

    def forward(self, logits: Tensor, *, mask: Tensor | None = None, shard: ClassShard | None = None) -> Tensor:
        """Return what the function returns: a value per class, or per row for the threshold."""
        out: Tensor = self._call(logits, mask=mask, shard=shard)
        return out


class LML(_Projection):
    """Module form of :func:`lml`, which documents the arguments."""

    function = staticmethod(lml)

    def __init__(
        self,
        k: float | Tensor,
        *,
        dim: Dim = -1,
        temperature: float | Tensor = 1.0,
        weight: float | Tensor | None = None,
        lower: float | Tensor | None = None,
        upper: float | Tensor | None = None,
        groups: Tensor | None = None,
        group_limit: float | Tensor | None = None,
        impl: Impl = "auto",
    ) -> None:
        FunctionModule.__init__(
            self, k=k, dim=dim, temperature=temperature, weight=weight, lower=lower, upper=upper, groups=groups,
            group_limit=group_limit, impl=impl,
        )  # fmt: skip


class LogLML(_Projection):
    """Module form of :func:`log_lml`, which documents the arguments."""

    function = staticmethod(log_lml)


class LMLThreshold(_Projection):
    """Module form of :func:`lml_threshold`, which documents the arguments."""

    function = staticmethod(lml_threshold)


class LMLAtMost(_Projection):
    """Module form of :func:`lml_at_most`, which documents the arguments."""

    function = staticmethod(lml_at_most)
