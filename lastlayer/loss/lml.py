"""Losses on the Limited Multi-Label projection: maximum likelihood of the observed labels, and the convex one."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lastlayer import _check
from lastlayer._check import Labels, Reduction, Target
from lastlayer._module import FunctionModule
from lastlayer._threshold import search
from lastlayer._threshold.autograd import apart, directly, without_transforms
from lastlayer._threshold.compiled import compiled, fused, on_gpu
from lastlayer._threshold.dispatch import (
    Impl,
    Problem,
    batched,
    differentiated,
    direct,
    enter,
    inlined,
    kernels,
    loss_backward,
    loss_forward,
    recorded,
    scaled,
    shortest,
    transformed,
    unwatched,
)
from lastlayer.loss import _rows
from lastlayer.loss._gradient import End, at_once, reduced_at_once
from lastlayer.loss._whole import whole_loss
from lastlayer.project.lml import apply
from lastlayer.shard import ClassShard, local_part, reduce, replicate, total, unwrap


@whole_loss
def lml_loss(
    logits: Tensor,
    target: Target,
    k: float | Tensor,
    *,
    observed: float = 0.0,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    weight: Tensor | None = None,
    pos_weight: float | Tensor | None = None,
    sample_weight: Tensor | None = None,
    shard: ClassShard | None = None,
    reduction: Reduction = "mean",
    impl: Impl = "auto",
) -> Tensor:
    r"""Compute the negative log-likelihood of the observed labels under :func:`~lastlayer.lml`.

    .. math:: -\sum_j t_j \log y_j \; - \sum_j (1 - t_j) \log(1 - \rho \, y_j), \qquad y = \mathrm{lml}(x, k)

    with :math:`t_j = 1` for a label and 0 for any other class; a soft label (mixup, smoothing) has parts of both.
    Predict with :func:`~lastlayer.lml` and the same `k`: a sigmoid of these logits has no meaning, since a constant
    added to a row does not change the loss.

    With `observed` :math:`= \rho = 0` this is Algorithm 2 of Amos, Koltun and Kolter (2019): labels that were not
    observed are not negatives, and only the sum `k` holds them down. With :math:`\rho > 0` it is the likelihood of
    labels thinned at random: a true label is observed with probability :math:`\rho`, so that the absence of a label,
    and a row without any, carry information too. ``rho = (mean number of observed labels per row) / k`` needs no
    tuning. If many rows have no label, leave them out, as ``lastlayer train --labels incomplete`` does: the likelihood
    takes labels for independent, so that such a row pulls its scores together, which can harm networks with hidden
    layers.

    Args:
        logits: The scores, shape ``(*batch, n_classes)``; ``-inf`` rules a class out.
        target: Multi-hot of the shape of `logits`, of floats between 0 and 1, booleans or bytes (-1 is unknown: in
            neither sum, still a class of the projection); one class per row (``batch``); or index lists padded with -1
            (``(*batch, m)``). Other numbers are not refused, since no value is read: one above 1 counts as 1, a
            negative one as unknown, and nan makes its row nan. The target has no gradient.
        k: The number of labels per row, observed or not; a number or a tensor that broadcasts to ``batch``.
        observed: The probability :math:`\rho` that a label is observed, between 0 and 1.
        temperature: Divides the logits.
        mask: Boolean, True where a class takes part.
        weight: One weight per class, ``(n_classes,)``, or any tensor that broadcasts to `logits`, for its terms. With
            it or `pos_weight` the loss is computed in plain torch.
        pos_weight: The same, only for the first sum; one number applies to all classes.
        sample_weight: One weight per row, shape ``batch``, without a gradient; the mean is weighted by it.
        shard: This rank's slice, when the classes are split over processes; index targets hold global classes.
        reduction: ``"none"`` is one loss per row; ``"mean"`` is over the rows that contribute: those with a label, soft
            or hard, and with `observed` those with a known class. Without such a row it is 0.
        impl: As in :func:`~lastlayer.lml`.

    Returns:
        The loss, of the dtype of `logits`. A row without a label has loss 0 if `observed` is 0; a label that is ruled
        out has an infinite loss and no gradient. A row that contributes and has an infeasible `k` or a nan has the loss
        nan and a gradient of nan, as in :func:`~lastlayer.lml`; other rows keep theirs.

    Example:
        >>> logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
        >>> lml_loss(logits, torch.tensor([[0, 1]]), k=2)
        tensor(0.6755)
        >>> lml_loss(logits, torch.tensor([[1.0, 0.5, 0.0, 0.0]]), k=2)  # the second label for half
        tensor(0.4385)
    """
    op = "lml_loss"
    rho = _check.number(op, "observed", observed, 0, 1)
    summed = weight is pos_weight is sample_weight is None and reduction in ("mean", "sum")
    kernel = shortest(logits, k, -1, temperature, mask, shard, impl) if summed else None
    form = None if kernel is None else _short_form(logits, target)
    if form is not None:
        if kernel == "native":
            return _summed(op, logits, float(k), None, 1.0, rho, *form, reduction == "mean")
        loss = _by_short_way(logits, float(k), rho, *form, reduction == "mean")
        if loss is not None:
            return loss if logits.itemsize == 4 else loss.to(logits.dtype)
    problem, _ = enter(op, logits, k, -1, temperature, mask, shard, impl)
    once = summed and problem.impl == "native" and _at_once(problem, target)
    labels = _check.target(op, target, problem.x, problem.shard, in_range=not once)
    if once:
        loss = _summed(op, *problem[:4], rho, labels.index, labels.dense, reduction == "mean")
        return loss if problem.x.dtype == logits.dtype else _rows.leave(op, loss, "none", None, logits.dtype)
    weighted = weight is not None or pos_weight is not None
    if weighted and impl not in ("auto", "torch"):
        raise ValueError(f"{op}: `impl` must be 'auto' or 'torch' with weights of classes, got {impl!r}.")
    compiled_step = reduction in ("mean", "sum") and problem.impl == "triton" and _compiled_both_ways(problem.x)
    # The other operators would be compiled again for each `observed`.
    plain = transformed() or (torch.compiler.is_compiling() and rho > 0 and not compiled_step)
    if weighted or (impl == "auto" and plain):
        problem = problem._replace(impl="torch")
    if problem.impl == "triton" and labels.index is not None and (rho == 1 or (compiled_step and rho > 0)):
        # Of index lists the kernel takes the labels' terms away again; they may be infinite.
        labels = Labels(None, labels.positive(), labels.n_classes)
    if problem.impl == "torch":
        loss = _plain(problem, rho, labels, *_rows.class_weights(op, weight, pos_weight, _like(problem.x)))
    elif reduction in ("mean", "sum") and _at_once(problem, labels.index if labels.dense is None else labels.dense):
        rows = _row_weights(op, labels, rho, reduction, problem, sample_weight)
        loss = _reduced(*problem[:4], problem.impl, rho, labels.index, labels.dense, rows)
        return _rows.leave(op, loss, "none", None, logits.dtype) if logits.itemsize < 4 else loss
    elif compiled_step:
        given = sample_weight is not None
        rows = _row_weights(op, labels, rho, reduction, problem, sample_weight) if given else None
        part = _check.constant(rho, torch.float32, problem.x.device) if rho > 0 else None
        loss = _LMLCompiledLoss.apply(*problem[:4], part, labels.index, labels.dense, rows, reduction == "mean")
        return _rows.leave(op, loss, "none", None, logits.dtype)
    else:
        loss = _by_kernel(problem, rho, labels)
    contributes = _contributes(labels, rho, loss.dtype, problem.shard)
    loss = torch.where(contributes, loss, 0)  # a row that does not contribute has no loss, even if it is NaN
    return _rows.leave(op, loss, reduction, contributes, logits.dtype, sample_weight)


def _by_short_way(
    logits: Tensor, k: float, rho: float, index: Tensor | None, dense: Tensor | None, mean: bool
) -> Tensor | None:
    """Return the reduced loss of the common training step on a GPU, in as few steps as there can be; or None."""
    n = logits.shape[-1]
    if logits.numel() == 0 or rho == 1:
        return None
    loss: Tensor
    if mean and (rho == 0 or index is None):
        labels = dense if index is None else index
        held = kernels("triton").step_of(logits, labels, rho)
        if held is not None:
            loss = _step(logits, k, rho, labels, held)
            return loss
    index = None if index is None else index.unsqueeze(-1)
    weight = kernels("triton").row_weights(index, dense, n, rho > 0, mean)
    loss = _reduced(logits, k, None, 1.0, "triton", rho, index, dense, weight)
    return loss


def _like(x: Tensor) -> Tensor:
    """Return a tensor of the shape of `x` in the dtype of the arithmetic, without its memory."""
    return x.new_empty((), dtype=_check.work_dtype(x)).expand(x.shape)


def _contributes(labels: Labels, rho: float, dtype: torch.dtype, shard: ClassShard | None) -> Tensor:
    """Which rows the mean is over: those with a label, and with `observed` those with a known class."""
    if labels.dense is None:
        assert labels.index is not None
        if rho > 0:
            return torch.ones(labels.index.shape[:-1], dtype=torch.bool, device=labels.index.device)
        if shard is None:
            return (labels.index >= 0).any(-1)
        return reduce(labels.count().unsqueeze(-1).to(dtype), "sum", shard).squeeze(-1) > 0
    if labels.n_classes == 0:
        top = torch.full((*labels.dense.shape[:-1], 1), -1, dtype=dtype, device=labels.dense.device)
    else:
        top = labels.dense.amax(-1, keepdim=True).to(dtype)
    top = reduce(top, "max", shard).squeeze(-1)
    return ~(top < 0) if rho > 0 else ~(top <= 0)  # a row with nan contributes, so that it shows


def _row_weights(
    op: str, labels: Labels, rho: float, reduction: Reduction, problem: Problem, sample_weight: Tensor | None
) -> Tensor | None:
    """The weight of each row in the reduced loss, or that of all rows; None as in the kernels' ``row_weights``."""
    x, work = problem.x, _check.work_dtype(problem.x)
    if sample_weight is not None:
        given = _check.weights(op, "sample_weight", sample_weight, _like(x), x.shape[:-1], "Give one weight per row.")
        assert given is not None
        weight = torch.where(_contributes(labels, rho, work, None), given.detach(), 0)
        mass = weight.sum()
        return weight / torch.where(mass == 0, 1, mass) if reduction == "mean" else weight
    if problem.impl == "triton":
        return kernels("triton").row_weights(labels.index, labels.dense, x.shape[-1], rho > 0, reduction == "mean")
    weight = _contributes(labels, rho, work, None).to(work)
    return weight / weight.sum().clamp(min=1) if reduction == "mean" else weight


def _at_once(problem: Problem, target: Any) -> bool:
    """Whether an ordinary backward pass may follow, so that a kernel may reduce the loss and prepare the gradient."""
    x, k, mask, *_ = problem
    target = target.index if isinstance(target, _check.LabelLists) else target
    return torch.is_grad_enabled() and x.requires_grad and direct(x, k, mask, target) and not transformed()


def _compiled_both_ways(x: Tensor) -> bool:
    """Whether a training step is being compiled."""
    return torch.compiler.is_compiling() and torch.is_grad_enabled() and x.requires_grad


def _short_form(logits: Tensor, target: Any) -> tuple[Tensor | None, Tensor | None] | None:
    """Return a target that needs no further check as ``(index, dense)``, if a gradient of the logits is wanted."""
    if not (unwatched(target) and logits.requires_grad and torch.is_grad_enabled()):
        return None
    one_per_row = target.dtype is torch.int64 and target.shape == logits.shape[:-1]
    if not (one_per_row or (target.dtype is torch.float32 and target.shape == logits.shape)):
        return None
    if target.layout is not torch.strided or target.is_nested or target.device != logits.device:
        return None
    return (target, None) if one_per_row else (None, target)


def _summed(
    op: str,
    x: Tensor,
    k: Any,
    mask: Tensor | None,
    temperature: float,
    rho: float,
    index: Tensor | None,
    dense: Tensor | None,
    mean: bool,
) -> Tensor:
    """Return the reduced loss by the compiled kernel, which looks for classes that do not exist as well."""
    try:
        loss: Tensor = _summed_at_once(x, k, mask, temperature, rho, index, dense, mean)
    except IndexError:
        assert index is not None
        _check.classes_below(op, index, x.shape[-1])
        raise
    return loss


@whole_loss
def lml_fenchel_young_loss(
    logits: Tensor,
    target: Target,
    k: float | Tensor | None = None,
    *,
    mask: Tensor | None = None,
    sample_weight: Tensor | None = None,
    shard: ClassShard | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Compute the Fenchel-Young loss of the LML projection: convex, with gradient ``lml(logits, k) - target``.

    .. math:: \sum_j \log(1 + e^{x_j + \nu}) - k \nu - \sum_j t_j x_j

    with :math:`t_j = 1` for a label and 0 for any other class, or a number between them for a soft label. If `k` is the
    number of labels and they are hard, it is at least 0, and 0 in the limit where the labels lead by a wide gap. With
    soft labels its least value is their entropy.

    Args:
        logits: The scores, shape ``(*batch, n_classes)``; ``-inf`` rules a class out.
        target: Multi-hot with numbers between 0 and 1, one class per row, or index lists padded with -1. Unknown
            classes (-1 in a multi-hot target) are left out of the projection: they have no influence and no gradient.
            Other numbers are taken as in :func:`lml_loss`.
        k: The size of the label set; ``None`` is each row's number of labels, the sum of the target where it is soft. A
            row with fewer known classes than that takes all of them; where nothing is known, the loss is 0.
        mask: Boolean, True where a class takes part.
        sample_weight: One weight per row, shape ``batch``; the mean is weighted by it.
        shard: This rank's slice, when the classes are split over processes; index targets hold global classes.
        reduction: ``"none"`` is one loss per row; ``"mean"`` is over all rows.

    Returns:
        The loss, of the dtype of `logits`. With ``k=None`` a row without labels has loss 0.

    Example:
        >>> lml_fenchel_young_loss(torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([[1.0, 1.0, 0.0, 0.0]]))
        tensor(1.3510)
    """
    op = "lml_fenchel_young_loss"
    logits, shard, _ = unwrap(op, logits, shard)
    logits = _check.logits(op, logits)
    labels = _check.target(op, target, logits, shard)
    mask = _check.mask(op, local_part(mask), logits)
    end = End(op, reduction, logits.dtype, sample_weight)
    whole = _fenchel_young_by_kernel(end, logits, labels, mask, k) if shard is None else None
    if whole is not None:
        return whole
    problem, count = _fenchel_young_problem(op, logits, labels, mask, k, shard)
    loss = _fenchel_young_at_once(problem, labels, count) if shard is None and on_gpu(problem.x) else None
    return end.of(_fenchel_young(problem, labels, count) if loss is None else loss, None)


def _fenchel_young_by_kernel(
    end: End, logits: Tensor, labels: Labels, mask: Tensor | None, k: float | Tensor | None
) -> Tensor | None:
    """Return the loss by one kernel, None where that does not apply."""
    x, n = logits.to(_check.work_dtype(logits)), logits.shape[-1]
    if not compiled(x, k, mask, labels.dense, labels.index):
        return None
    if on_gpu(x) and not fused(x).takes("fenchel_young", x.shape[:-1].numel(), n):
        return None
    first, number = None, -1.0
    if isinstance(k, Tensor):
        first = _check.cardinality(end.op, k, x).squeeze(-1)
    elif k is not None:
        number = _check.cardinality_of_all(end.op, k, n, n)

    def plain(x: Tensor) -> Tensor:
        problem, count = _fenchel_young_problem(end.op, x, labels, mask, k, None)
        return _fenchel_young(problem, labels, count)

    numbers = (number, float(labels.dense is not None))
    return reduced_at_once(end, "fenchel_young", x, labels, numbers, plain, mask=mask, first=first)


def _fenchel_young_problem(
    op: str, logits: Tensor, labels: Labels, mask: Tensor | None, k: float | Tensor | None, shard: ClassShard | None
) -> tuple[Problem, Tensor]:
    """Return the problem that the loss solves, and the number of labels per row."""
    work = _check.work_dtype(logits)
    if labels.dense is None:
        count = labels.count().to(work)
    else:
        share, known = _shares(labels.dense, work)
        mask = known if mask is None else mask & known
        count = share.sum(-1)
    count = total(count, shard)
    problem, _ = enter(op, logits, count if k is None else k, -1, 1.0, mask, shard, "auto")
    size = search.sizes(problem.k, problem.x)
    if labels.dense is not None:  # where less is known, less can be asked for
        size = torch.minimum(size, total(known.sum(-1, keepdim=True).to(size.dtype), shard))
    return problem._replace(k=size), count


def _fenchel_young_at_once(problem: Problem, labels: Labels, count: Tensor) -> Tensor | None:
    """Return one loss per row with its gradient, lml less the target, where the compiled loss applies."""
    x, mask = problem.x, problem.mask
    k: Tensor = problem.k
    if not compiled(x, k, mask, count, labels.dense, labels.index):
        return None
    if mask is not None and mask.is_cpu and bool(mask.all()):  # on a GPU it would have to be waited for
        mask = None
    with torch.no_grad():
        _, center, delta = apply(problem._replace(mask=mask), "nu")
    x = x.to(_check.work_dtype(x))
    numbers = (1.0, 0.0, 0.0, 1.0)
    found = at_once(
        "logistic",
        x,
        labels,
        numbers,
        lambda x: _fenchel_young(problem._replace(x=x), labels, count),
        mask=mask,
        first=center.squeeze(-1),
        second=delta.squeeze(-1),
    )
    if found is None:
        return None
    nu = (delta - center).squeeze(-1)
    return found.loss + (count - k.squeeze(-1)) * torch.where(nu.isinf(), 0, nu)


def _fenchel_young(problem: Problem, labels: Labels, count: Tensor) -> Tensor:
    """Return one loss per row by differentiable operations."""
    scores = search.scores(problem.x, problem.mask, 1.0)
    shard, size, work = problem.shard, problem.k, scores.dtype
    _, center, delta = apply(problem, "nu")

    z = _live_points(scores, center, delta)
    nu = (delta - center).squeeze(-1)
    # softplus(z) - z over the labels is softplus(-z): what is left is small where the fit is good.
    soft = -F.logsigmoid(-z)  # F.softplus drops the tail beyond 20
    if labels.dense is None:
        loss = soft.sum(-1) + labels.sum_over_positives(lambda z, s: -F.logsigmoid(z) - s, z, soft)
    else:
        share, _ = _shares(labels.dense, work)
        loss = (_times(share, -F.logsigmoid(z)) + _times(1 - share, soft)).sum(-1)
    flat = torch.where(scores.isfinite(), scores, 0)
    out, sure = (scores == -torch.inf).to(work), (scores == torch.inf).to(work)
    if labels.dense is None:
        linear, lost, met = (labels.sum_over_positives(lambda s: s, value) for value in (flat, out, sure))
    else:
        linear, lost, met = ((share * value).sum(-1) for value in (flat, out, sure))
    end = torch.where(nu > 0, flat.sum(-1), 0) - linear
    wrong = sure.sum(-1) - met  # classes at +inf that are not labels
    end, lost, wrong = (total(value, shard) for value in (end, lost, wrong))

    # All ranks hold the same threshold: their gradients count as one. The sum has none by the threshold, also where the
    # loss is infinite: finite scores share what infinite ones leave of `k`, and of the labels.
    level = (count - size.squeeze(-1)) + (wrong - lost)
    loss = total(loss, shard) + level * replicate(torch.where(nu.isinf(), 0, nu), shard)
    # At both ends the projection is a vertex, and the loss linear: <lml(x, k) - target, x>. It is infinite if a label
    # is ruled out, or if a class at +inf is not a label.
    return _with_broken_rows(torch.where(nu.isinf(), torch.where(lost + wrong > 0, torch.inf, end), loss), delta)


def _plain(
    problem: Problem, rho: float, labels: Labels, each: Tensor | None = None, positives: Tensor | None = None
) -> Tensor:
    """Return one loss per row in plain torch: the fallback, and what the kernels are checked against."""
    # Converted once, so that the parts of the gradient are added before it is rounded to half precision.
    problem = problem._replace(x=problem.x.to(_check.work_dtype(problem.x)), impl="torch")
    _, center, delta = apply(problem, "nu")
    z = _live_points(search.scores(problem.x, problem.mask, problem.temperature), center, delta)
    factors = [factor.expand(z.shape) for factor in (each, positives) if factor is not None]
    if labels.dense is None:
        loss = labels.sum_over_positives(lambda z, *factors: _rows.times(-F.logsigmoid(z), factors), z, *factors)
        if rho > 0:
            loss = loss + _unseen_by_lists(z, rho, labels, each)
    else:
        share, known = _shares(labels.dense, z.dtype)
        fit = _times(share, -F.logsigmoid(torch.where(share == 0, 0, z)))
        loss = _rows.times(fit, factors).sum(-1)
        if rho > 0:
            silent = _times(1 - share, _unseen(z, rho))
            loss = loss + torch.where(known, _rows.weighed(silent, each), 0).sum(-1)
    return _with_broken_rows(total(loss, problem.shard), delta)


def _with_broken_rows(loss: Tensor, delta: Tensor) -> Tensor:
    """Let the gradient of a row without a solution be nan, as that of the projection is, and not 0."""
    delta = delta.squeeze(-1)
    return torch.where(delta.isnan(), delta, loss)


def _shares(dense: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return how much of each class is a label, from 0 to 1, and where that is known."""
    return _rows.from_0_to_1(dense.to(dtype)), ~(dense < 0)  # nan is kept, and shows


def _times(share: Tensor, value: Tensor) -> Tensor:
    """Multiply, where nothing of an infinite value is nothing."""
    none = share == 0
    return torch.where(none, 0, share * torch.where(none, 0, value))


def _live_points(x: Tensor, center: Tensor, delta: Tensor) -> Tensor:
    """Return ``x + nu`` with no gradient where x or nu is infinite."""
    z = search.points(x, center, delta)
    return torch.where(x.isfinite() & delta.isfinite(), z, z.detach())


def _unseen(z: Tensor, rho: float) -> Tensor:
    """Return ``-log(1 - rho y)``."""
    if rho == 1:
        return -F.logsigmoid(-z)
    if torch.compiler.is_compiling():  # as a tensor, or the graph would be compiled again for each number
        rest: float | Tensor = _check.constant(-rho, torch.float64, z.device).log1p()
    else:
        rest = math.log1p(-rho)
    return -torch.logaddexp(F.logsigmoid(-z), rest + F.logsigmoid(z))  # of (1 - y) + (1 - rho) y


def _unseen_by_lists(z: Tensor, rho: float, labels: Labels, each: Tensor | None) -> Tensor:
    """Return ``-sum log(1 - rho y)`` over the classes that index lists do not hold."""
    silent = _rows.weighed(_unseen(z, rho), each)
    if rho == 1:  # a term may be infinite, and must not be taken away again
        return torch.where(labels.positive(), 0, silent).sum(-1)
    return silent.sum(-1) - labels.sum_over_positives(lambda s: s, silent)


def _plain_gradients(ctx: Any, problem: Problem, labels: Labels, upstream: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of logits and k through plain torch: for second derivatives, and batches of gradients."""
    further, needed = torch.is_grad_enabled(), ctx.needs_input_grad[:2]
    with torch.enable_grad():
        x, k = apart(problem.x, problem.k)
        problem = problem._replace(x=x, k=k)
        loss = _plain(problem, ctx.rho, labels)
    inputs = [value for value, wanted in zip(problem[:2], needed, strict=True) if wanted]
    gradients = iter(torch.autograd.grad(loss, inputs, upstream.expand_as(loss), create_graph=further))
    return tuple(next(gradients) if wanted else None for wanted in needed)


class _LMLLoss(torch.autograd.Function):
    """One loss per row by a kernel: ``(logits, k) -> loss``; only the gradient has the size of the logits."""

    @staticmethod
    def forward(
        logits: Tensor,
        k: Any,
        mask: Tensor | None,
        temperature: float,
        shard: ClassShard | None,
        impl: Impl,
        rho: float,
        index: Tensor | None,
        dense: Tensor | None,
    ) -> tuple[Tensor, ...]:
        return loss_forward(Problem(logits, k, mask, temperature, shard, impl), rho, index, dense)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        logits, k, mask, ctx.temperature, _, ctx.impl, ctx.rho, index, dense = inputs
        _, *rows = output
        ctx.mark_non_differentiable(*rows)
        _save(ctx, logits, k, mask, index, dense, *rows)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        problem, labels, rows = _saved(ctx)
        if torch.is_grad_enabled():
            grad_logits, grad_k = _plain_gradients(ctx, problem, labels, grads[0])
        else:
            several = not torch.compiler.is_compiling() and batched(grads[0])
            upstream = torch.ones_like(rows[0].squeeze(-1)) if several else grads[0]
            x, _, mask, temperature, _, impl = problem
            arguments = (x, mask, temperature, ctx.rho, labels.index, labels.dense, *rows, upstream)
            grad_logits, grad_k = loss_backward(impl, *arguments)
            if several:  # linear in the gradient, one number per row
                grad_logits, grad_k = (scaled(gradient, grads[0].unsqueeze(-1)) for gradient in (grad_logits, grad_k))
        return grad_logits, grad_k if ctx.needs_input_grad[1] else None, *(None,) * 7


_LMLLossBackward = without_transforms(_LMLLoss)


def _save(ctx: Any, logits: Tensor, k: Any, *tensors: Tensor | None) -> None:
    """Save for backward; a `k` that is one number goes past autograd."""
    ctx.k = None if isinstance(k, Tensor) else k
    ctx.save_for_backward(logits, k if isinstance(k, Tensor) else None, *tensors)


def _saved(ctx: Any) -> tuple[Problem, Labels, list[Tensor]]:
    """Return what :func:`_save` was given: the problem, the labels, and the rest."""
    logits, k, mask, index, dense, *rows = ctx.saved_tensors
    k = ctx.k if k is None else k
    if index is not None and index.ndim < logits.ndim:  # one class per row
        index = index.unsqueeze(-1)
    return Problem(logits, k, mask, ctx.temperature, None, ctx.impl), Labels(index, dense, logits.shape[-1]), rows


def _by_kernel(problem: Problem, rho: float, labels: Labels) -> Tensor:
    """Return one loss per row."""
    if torch.compiler.is_compiling() or transformed():
        function: Any = _LMLLoss
    elif recorded(problem.x, problem.k):
        function = _LMLLossBackward
    else:
        return loss_forward(problem, rho, labels.index, labels.dense)[0]
    loss: Tensor = function.apply(*problem, rho, labels.index, labels.dense)[0]
    return loss


def _gradient_of_k(upstream: Tensor, rows: Tensor) -> Tensor:
    """Return the gradient of k, from what a kernel has found of each row; 0 for rows without an upstream gradient."""
    _, _, log_mass, pull = rows
    upstream = upstream.unsqueeze(-1)
    return torch.where(upstream == 0, 0, upstream * pull * (-log_mass).exp())


class _LMLReducedLoss(torch.autograd.Function):
    """The reduced loss ``sum(weight * loss)`` by a kernel, called directly.

    On a GPU the kernel writes the gradient together with the loss, in one pass over the logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        k: Any,
        mask: Tensor | None,
        temperature: float,
        impl: Impl,
        rho: float,
        index: Tensor | None,
        dense: Tensor | None,
        weight: Tensor | None,
    ) -> Tensor:
        if impl == "triton":
            loss, rows, ctx.grad, weight = kernels(impl).loss_forward_with_grad(
                logits, k, mask, temperature, rho, index, dense, weight
            )
        else:
            assert weight is not None
            loss, *each = kernels(impl).loss_forward(logits, k, mask, temperature, rho, index, dense)
            loss, rows, ctx.grad = torch.where(weight > 0, weight * loss, 0), torch.stack(each), None
        ctx.temperature, ctx.rho, ctx.impl = temperature, rho, impl
        _save(ctx, logits, k, mask, index, dense, weight, rows)
        return loss.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad, ctx.grad = ctx.grad, None  # handed over once; a second backward pass computes it again
        plain, with_k = unwatched(grads[0]) and not torch.is_grad_enabled(), ctx.needs_input_grad[1]
        if grad is not None and plain and not with_k:
            return kernels(ctx.impl).scale_rows_(grad, grads[0]), *(None,) * 8
        problem, labels, (weight, rows) = _saved(ctx)
        if differentiated(*grads):
            grad_logits, grad_k = _plain_gradients(ctx, problem, labels, grads[0] * weight)
        elif grad is not None and plain:
            grad_logits = kernels(ctx.impl).scale_rows_(grad, grads[0])
            grad_k = _gradient_of_k(grads[0] * weight, rows)
        else:
            x, _, mask, temperature, _, impl = problem
            arguments = (x, mask, temperature, ctx.rho, labels.index, labels.dense, *rows, grads[0] * weight)
            grad_logits, grad_k = loss_backward(impl, *arguments)
        return grad_logits, grad_k if with_k else None, *(None,) * 7


_reduced = directly(_LMLReducedLoss)


class _LMLStep(torch.autograd.Function):
    """The same for a training step that has been taken before; whatever is unusual in its backward pass is not here."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, k: float, rho: float, labels: Tensor, held: Any) -> Tensor:
        loss, ctx.grad = kernels("triton").take_step(held, logits, k, labels, rho)
        ctx.given = k, rho
        ctx.save_for_backward(logits, labels)
        return loss.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        held, ctx.grad = ctx.grad, None  # handed over once
        if held is not None and not torch.is_grad_enabled() and unwatched(grads[0]):
            return kernels("triton").scale_rows_(held, grads[0]), None, None, None, None
        (logits, labels), (k, rho), further = ctx.saved_tensors, ctx.given, torch.is_grad_enabled()
        index, dense = (None, labels) if labels.is_floating_point() else (labels.unsqueeze(-1), None)
        with torch.enable_grad():
            weight = kernels("triton").row_weights(index, dense, logits.shape[-1], rho > 0, True)
            loss = _reduced(logits, k, None, 1.0, "triton", rho, index, dense, weight)
            (grad,) = torch.autograd.grad(loss, logits, grads[0], create_graph=further)
        return grad, None, None, None, None


_step = directly(_LMLStep)


class _LMLCompiledLoss(torch.autograd.Function):
    """The same for the compiler: one operator, whose gradient the backward pass only scales."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        k: Tensor,
        mask: Tensor | None,
        temperature: float,
        rho: Tensor | None,
        index: Tensor | None,
        dense: Tensor | None,
        weight: Tensor | None,
        mean: bool,
    ) -> Tensor:
        loss: Tensor
        ops = torch.ops.lastlayer
        operator = ops.lml_reduced_loss_inline if inlined("triton") else ops.lml_reduced_loss
        loss, rows, grad, weight = operator(logits, k, mask, temperature, rho, index, dense, weight, mean)
        ctx.save_for_backward(grad, rows, weight)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad, rows, weight = ctx.saved_tensors
        grad_k = _gradient_of_k(grads[0] * weight, rows) if ctx.needs_input_grad[1] else None
        return scaled(grad, grads[0]).to(grad.dtype), grad_k, *(None,) * 7


class _LMLSummedLoss(torch.autograd.Function):
    """The mean or sum of the loss by the compiled CPU kernel, which writes the gradient together with the loss."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        k: Any,
        mask: Tensor | None,
        temperature: float,
        rho: float,
        index: Tensor | None,
        dense: Tensor | None,
        mean: bool,
    ) -> Tensor:
        reduced_loss = kernels("native").reduced_loss
        loss, ctx.slope, ctx.over = reduced_loss(logits, k, mask, temperature, rho, index, dense, mean)
        ctx.given = temperature, rho, mean, logits.dtype
        _save(ctx, logits, k, mask, index, dense)
        return loss if logits.itemsize > 3 else _rows.leave_unseen(loss, logits.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), with_k, nothing = grads, ctx.needs_input_grad[1], (None,) * 6
        ctx.temperature, ctx.rho, ctx.mean, dtype = ctx.given
        slope, ctx.slope = ctx.slope, None  # handed over once; a second backward pass computes it again
        if slope is not None and ctx.over and not with_k and not differentiated(grad) and direct(grad):
            factor = float(grad) * ctx.over
            if slope.dtype != dtype:
                return kernels("native").scaled_to_half(slope, factor, dtype), None, *nothing
            return slope if factor == 1 else slope.mul_(factor), None, *nothing
        ctx.impl = "native"
        problem, labels, _ = _saved(ctx)
        x, k, mask, temperature, _, impl = problem
        given = (x.detach(), k, mask, temperature, ctx.rho, labels.index, labels.dense, ctx.mean)
        rows = kernels(impl).reduced_loss_rows(*given)
        if differentiated(grad):
            grad_logits, grad_k = _plain_gradients(ctx, problem, labels, grad * rows[5])
        elif direct(grad):
            arguments = (x, mask, temperature, ctx.rho, labels.index, labels.dense, rows, grad, with_k)
            grad_logits, grad_k = kernels(impl).reduced_loss_backward(*arguments)
        else:
            each = (row.unsqueeze(-1) for row in rows[1:5])
            arguments = (x, mask, temperature, ctx.rho, labels.index, labels.dense, *each, grad * rows[5])
            grad_logits, grad_k = loss_backward(impl, *arguments)
        return grad_logits, grad_k if with_k else None, *nothing


_summed_at_once = directly(_LMLSummedLoss)


class LMLLoss(FunctionModule):
    """Module form of :func:`lml_loss`, which documents the arguments."""

    function = staticmethod(lml_loss)

    def __init__(
        self,
        k: float | Tensor,
        *,
        observed: float = 0.0,
        temperature: float | Tensor = 1.0,
        weight: Tensor | None = None,
        pos_weight: float | Tensor | None = None,
        shard: ClassShard | None = None,
        reduction: Reduction = "mean",
        impl: Impl = "auto",
    ) -> None:
        super().__init__(
            k=k,
            observed=observed,
            temperature=temperature,
            weight=weight,
            pos_weight=pos_weight,
            shard=shard,
            reduction=reduction,
            impl=impl,
        )

    def forward(
        self,
        logits: Tensor,
        target: Target,
        *,
        mask: Tensor | None = None,
        sample_weight: Tensor | None = None,
        shard: ClassShard | None = None,
    ) -> Tensor:
        """Return the loss of a batch; `shard` takes the place of the stored one."""
        more = {} if shard is None else {"shard": shard}
        loss: Tensor = self._call(logits, target, mask=mask, sample_weight=sample_weight, **more)
        return loss


class LMLFenchelYoungLoss(FunctionModule):
    """Module form of :func:`lml_fenchel_young_loss`, which documents the arguments."""

    function = staticmethod(lml_fenchel_young_loss)

    def __init__(
        self, k: float | Tensor | None = None, *, shard: ClassShard | None = None, reduction: Reduction = "mean"
    ) -> None:
        super().__init__(k=k, shard=shard, reduction=reduction)

    def forward(
        self,
        logits: Tensor,
        target: Target,
        *,
        mask: Tensor | None = None,
        sample_weight: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of a batch."""
        loss: Tensor = self._call(logits, target, mask=mask, sample_weight=sample_weight)
        return loss
