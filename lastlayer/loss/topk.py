"""Losses for the k best: truncated entropy, the smooth top-k SVM, distillation of the teacher's k best classes."""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lastlayer import _check
from lastlayer._check import Labels, Reduction, Target
from lastlayer._module import FunctionModule, LossModule
from lastlayer.loss import _rows
from lastlayer.loss._gradient import End, reduced_at_once
from lastlayer.loss._whole import whole_loss
from lastlayer.project._symmetric import balance, log_counts
from lastlayer.shard import ClassShard, gather, local_part, reduce, total, unwrap

_FEW = 16  # places for which the compiled loss divides polynomials


@whole_loss
def truncated_entropy_loss(
    logits: Tensor,
    target: Target,
    k: int,
    *,
    weight: Tensor | None = None,
    sample_weight: Tensor | None = None,
    shard: ClassShard | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Compute the truncated top-k entropy loss (Lapin, Hein and Schiele, 2016): cross-entropy without the best rivals.

    .. math:: \sum_{y \in Y} \log\Bigl(1 + \sum_{j \in J} e^{x_j - x_y}\Bigr)

    with :math:`J` the ``n_classes - k`` classes of the lowest scores that are not labels: the ``k - |Y|`` best rivals
    may be beside the labels in the first `k` places at no cost. With one label and ``k = 1`` it is cross-entropy.

    Args:
        logits: The scores, shape ``(*batch, n_classes)``; ``-inf`` rules a class out.
        target: Multi-hot (-1 is unknown: neither a label nor a rival; a number between 0 and 1 is a label whose term it
            weighs), one class per row, or index lists padded with -1.
        k: The number of places, a Python integer, ``1 <= k <= n_classes``.
        weight: One weight per class, ``(n_classes,)``, or any tensor that broadcasts to `logits`, for their terms.
        sample_weight: One weight per row, shape ``batch``; the mean is weighted by it.
        shard: This rank's slice, when the classes are split over processes; index targets hold global classes.
        reduction: ``"none"`` is one loss per row; ``"mean"`` is over the rows with a label, 0 if there is none.

    Returns:
        The loss, of the dtype of `logits`. A row without a label, or without rivals in :math:`J`, has loss 0. A label
        that is ruled out has an infinite loss if there are rivals.

    Example:
        >>> logits = torch.tensor([[2.0, 5.0, 1.0, 0.0]])
        >>> truncated_entropy_loss(logits, torch.tensor([0]), k=1)
        tensor(3.0722)
        >>> truncated_entropy_loss(logits, torch.tensor([0]), k=2)
        tensor(0.4076)
    """
    op = "truncated_entropy_loss"
    logits, shard, _ = unwrap(op, logits, shard)
    logits = _check.logits(op, logits)
    k = _places(op, k, logits.shape[-1] if shard is None else None)
    x, labels = _rows.given(op, logits, target, shard, sample_weight)
    each = _rows.class_weight(op, "weight", weight, x)
    end, loss = End(op, reduction, logits.dtype, sample_weight), None
    if shard is None:
        plain = lambda x: _truncated(x, labels, k, each, None)[0]  # noqa: E731
        loss = reduced_at_once(end, "truncated", x, labels, (k,), plain, each=each)
    return end.of(*_truncated(x, labels, k, each, shard)) if loss is None else loss


def _truncated(
    x: Tensor, labels: Labels, k: int, weight: Tensor | None, shard: ClassShard | None
) -> tuple[Tensor, Tensor]:
    """Return the loss of each row, and whether it has a label, by differentiable operations."""
    x, live = _rows.taking_part(x, labels)
    positive = labels.positive()
    rival = live & ~positive
    here = labels.count()
    count = here if shard is None else reduce(here.unsqueeze(-1).to(x.dtype), "sum", shard).squeeze(-1)
    rival = rival & ~_best(torch.where(rival, x, -torch.inf).detach(), k - count, k - 1, shard)
    x = torch.where(live | ~positive, x, -torch.inf)  # a label ruled out has an infinite loss, if there are rivals
    return _above(x, labels, rival, _rows.label_factors(labels, live, x.dtype, weight), shard), count > 0


def _above(x: Tensor, labels: Labels, rival: Tensor, factors: list[Tensor], shard: ClassShard | None) -> Tensor:
    """Return ``sum over the labels of log(1 + sum over rivals of exp(x_j - x_y))`` by differentiable operations."""
    peak = reduce(torch.where(rival, x, -torch.inf).detach(), "max", shard)
    some = peak != -torch.inf
    peak = torch.where(some, peak, 0)
    mass = reduce(torch.where(rival, (torch.where(rival, x, peak) - peak).exp(), 0), "sum", shard)
    rest = torch.where(some, mass, 1).log()

    def term(x: Tensor, peak: Tensor, rest: Tensor, some: Tensor, *factors: Tensor) -> Tensor:
        value = torch.where(some > 0, -F.logsigmoid((x - peak) - rest), 0)
        return _rows.times(value, factors)

    return total(labels.sum_over_positives(term, x, peak, rest, some.to(x.dtype), *factors), shard)


@whole_loss
def smooth_topk_svm_loss(
    logits: Tensor,
    target: Target,
    k: int,
    *,
    tau: float = 1.0,
    alpha: float = 1.0,
    weight: Tensor | None = None,
    sample_weight: Tensor | None = None,
    shard: ClassShard | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Compute the smooth top-k SVM loss (Berrada, Zisserman and Kumar, 2018), exactly.

    .. math:: \tau \log \sum_{|A| = k} e^{(\alpha [y \notin A] + \frac1k \sum_A x) / \tau}
              - \tau \log \sum_{|A| = k,\, y \in A} e^{\frac1k \sum_A x / \tau}

    over all subsets :math:`A` of `k` classes; ``tau`` to 0 is the hard hinge with margin `alpha`. It is
    :math:`\tau\,\mathrm{softplus}(\alpha / \tau + \log e_k - \log e_{k-1} - x_y / k\tau)`, with the elementary
    symmetric polynomials of the other classes as in :func:`~lastlayer.project.subset_log_prob`. It never
    switches to the hard loss.

    Args:
        logits: The scores, shape ``(*batch, n_classes)``; ``-inf`` rules a class out.
        target: One class per row; or a multi-hot tensor or index lists with one label per row. Of several labels the
            lowest class counts; a soft label counts as a whole one. Classes marked -1 in a multi-hot target are left
            out.
        k: The number of places, a Python integer, ``1 <= k <= n_classes``.
        tau: The temperature of the smoothing, positive.
        alpha: The margin.
        weight: One weight per class, ``(n_classes,)``, or any tensor that broadcasts to `logits`: that of the label.
        sample_weight: One weight per row, shape ``batch``; the mean is weighted by it.
        shard: Must be None: the polynomials need all classes of a row on one process.
        reduction: ``"none"`` is one loss per row; ``"mean"`` is over the rows with a label, 0 if there is none.

    Returns:
        The loss, of the dtype of `logits`. It is 0 for a row without a label, and where all classes fit into `k`.

    Example:
        >>> smooth_topk_svm_loss(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([0]), k=2)
        tensor(1.3323)
    """
    op = "smooth_topk_svm_loss"
    logits = _check.logits(op, _rows.whole(op, logits, shard, "its polynomials need all classes of a row"))
    k = _places(op, k, logits.shape[-1])
    tau, alpha = _positive(op, "tau", tau), _check.number(op, "alpha", alpha)
    x, labels = _rows.given(op, logits, target, None, sample_weight)
    each = _rows.class_weight(op, "weight", weight, x)
    end, loss = End(op, reduction, logits.dtype, sample_weight), None
    if k <= _FEW:
        numbers = (k, tau, alpha)
        plain = lambda x: _svm(x, labels, *numbers, each)[0]  # noqa: E731
        loss = reduced_at_once(end, "smooth_svm", x, labels, numbers, plain, each=each)
    return end.of(*_svm(x, labels, k, tau, alpha, each)) if loss is None else loss


def _svm(x: Tensor, labels: Labels, k: int, tau: float, alpha: float, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the loss of each row, and whether it has a label, by differentiable operations."""
    x, live = _rows.taking_part(x, labels)
    here = first_label(labels)
    has_label = here >= 0
    own = torch.arange(x.shape[-1], device=x.device) == here
    # A constant added to the row changes nothing: about the label's score the sums keep their digits.
    pivot = torch.where(has_label, x.gather(-1, here.clamp(min=0)), 0).detach() if x.shape[-1] else x
    scores = torch.where(live, x - pivot, -torch.inf) / (k * tau)
    others = scores.masked_fill(own, -torch.inf)
    # Half way between k - 1 and k classes both sums are near the most likely count.
    enough = (others != -torch.inf).sum(-1, keepdim=True) >= k
    others = torch.where(enough, others, 0)  # any feasible row: its loss is 0
    if k == x.shape[-1]:
        ratio = torch.zeros_like(scores[..., :1])
    else:
        nu = balance(others, k - 0.5)
        ratio = log_counts(others, nu, (k, k - 1), (1.0, -1.0)).unsqueeze(-1) - nu
    score = torch.where(has_label, scores.gather(-1, here.clamp(min=0)), 0) if x.shape[-1] else ratio
    loss = -tau * F.logsigmoid(score - ratio - alpha / tau)  # F.softplus drops what is below 1e-9
    if weight is not None and x.shape[-1]:
        loss = loss * weight.expand(x.shape).gather(-1, here.clamp(min=0))
    return torch.where(has_label & enough, loss, 0).squeeze(-1), has_label.squeeze(-1)


def topk_distillation_loss(
    logits: Tensor,
    teacher_logits: Tensor,
    k: int,
    *,
    temperature: float = 1.0,
    sample_weight: Tensor | None = None,
    shard: ClassShard | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Compute the divergence of the student from the teacher on the teacher's `k` best classes (Wei et al., 2020).

    .. math:: T^2 \sum_{c \in C_k} t_c \log \frac{t_c}{s_c}, \qquad t = \mathrm{softmax}(\text{teacher} / T),\;
              s = \mathrm{softmax}(x / T)

    Both softmaxes are over all classes, and are not renormalised within the `k`: with ``k = n_classes`` it is the
    usual distillation loss. The factor :math:`T^2` keeps the size of the gradient (Hinton et al., 2015).

    Args:
        logits: The student's scores, shape ``(*batch, n_classes)``.
        teacher_logits: The teacher's scores, of the same shape; ``-inf`` rules a class out. They get no gradient.
        k: The number of classes to imitate, a Python integer, ``1 <= k <= n_classes``.
        temperature: Divides both logits.
        sample_weight: One weight per row, shape ``batch``; the mean is weighted by it.
        shard: This rank's slice, when the classes are split over processes.
        reduction: ``"none"`` is one loss per row; ``"mean"`` is over all rows.

    Returns:
        The loss, of the dtype of `logits`. With ``k < n_classes`` it may be slightly negative. A row in which the
        teacher rules every class out has loss 0.

    Example:
        >>> teacher = torch.tensor([[3.0, 1.0, 0.0]])
        >>> topk_distillation_loss(torch.zeros(1, 3), teacher, k=2)
        tensor(0.6614)
    """
    op = "topk_distillation_loss"
    logits, shard, _ = unwrap(op, logits, shard)
    logits = _check.logits(op, logits)
    teacher_logits = _check.logits(op, local_part(teacher_logits), "teacher_logits")
    if teacher_logits.shape != logits.shape:
        raise ValueError(
            f"{op}: `teacher_logits` must have the shape of `logits` {tuple(logits.shape)}, "
            f"got {tuple(teacher_logits.shape)}."
        )
    k = _places(op, k, logits.shape[-1] if shard is None else None)
    temperature = _positive(op, "temperature", temperature)
    dtype = torch.promote_types(_check.work_dtype(logits), _check.work_dtype(teacher_logits))
    log_t = _log_softmax(teacher_logits.detach().to(dtype) / temperature, shard)
    x = _rows.without_left_out(op, logits.to(dtype), sample_weight)
    log_s = _log_softmax(x / temperature, shard)
    if shard is None:
        log_t, best = log_t.topk(k, dim=-1)
        log_s, chosen = log_s.gather(-1, best), log_t != -torch.inf
    else:
        chosen = _best(log_t, log_t.new_full(log_t.shape[:-1], k), k, shard) & (log_t != -torch.inf)
    gap = torch.where(chosen, log_t - torch.where(chosen, log_s, 0), 0)
    loss = temperature**2 * total((log_t.exp() * gap).sum(-1), shard)
    return _rows.leave(op, loss, reduction, None, logits.dtype, sample_weight)


def _log_softmax(x: Tensor, shard: ClassShard | None) -> Tensor:
    """Return the log of the softmax, ``-inf`` throughout a row without a class."""
    peak = reduce(x.detach(), "max", shard)
    some = peak != -torch.inf
    x = torch.where(some, x, 0)
    if shard is None:
        return torch.where(some, x.log_softmax(-1), -torch.inf)
    x = x - torch.where(some, peak, 0)
    return torch.where(some, x - reduce(x.exp(), "sum", shard).log(), -torch.inf)


def _places(op: str, k: Any, n: int | None) -> int:
    if isinstance(k, bool) or not isinstance(k, numbers.Integral):
        raise TypeError(f"{op}: `k` must be a Python integer, the number of places, got {type(k).__name__}.")
    if int(k) < 1 or (n is not None and int(k) > n):
        raise ValueError(f"{op}: `k` must be between 1 and n_classes={n}, got {k}.")
    return int(k)


def _positive(op: str, name: str, value: Any) -> float:
    if not 0 < _check.number(op, name, value) < math.inf:
        raise ValueError(f"{op}: `{name}` must be positive and finite, got {value}.")
    return float(value)


def first_label(labels: Labels) -> Tensor:
    """Return the lowest class among each row's labels, -1 where there is none, shape ``(*batch, 1)``."""
    if labels.index is not None:
        first = torch.where(labels.index < 0, labels.n_classes, labels.index)
        first = F.pad(first, (0, 1), value=labels.n_classes).amin(-1, keepdim=True)
    else:
        place = torch.arange(labels.n_classes, device=labels.positive().device)
        first = torch.where(labels.positive(), place, labels.n_classes)
        first = F.pad(first, (0, 1), value=labels.n_classes).amin(-1, keepdim=True)
    return torch.where(first == labels.n_classes, -1, first)


def _best(x: Tensor, wanted: Tensor, most: int, shard: ClassShard | None) -> Tensor:
    """Mark each row's `wanted` (shape ``batch``, at most `most`) largest entries over the classes of all ranks."""
    best = torch.zeros_like(x, dtype=torch.bool)
    size = min(most, x.shape[-1])
    if most == 0 or (size == 0 and shard is None):
        return best
    value, place = x.topk(size, dim=-1)
    rank = torch.arange(size, device=x.device)
    if shard is not None:
        # The ranks' candidates side by side, in order; the place of mine among all of them is what counts.
        everyone = gather(F.pad(value, (0, most - size), value=-torch.inf), shard)
        order = everyone.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        mine = torch.distributed.get_rank(shard.group) * most
        rank = order[..., mine : mine + size]
    return best.scatter(-1, place, rank < wanted.unsqueeze(-1))


class TruncatedEntropyLoss(LossModule):
    """Module form of :func:`truncated_entropy_loss`, which documents the arguments."""

    function = staticmethod(truncated_entropy_loss)

    def __init__(
        self,
        k: int,
        *,
        weight: Tensor | None = None,
        shard: ClassShard | None = None,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(k=k, weight=weight, shard=shard, reduction=reduction)


class SmoothTopKSVMLoss(LossModule):
    """Module form of :func:`smooth_topk_svm_loss`, which documents the arguments."""

    function = staticmethod(smooth_topk_svm_loss)

    def __init__(
        self,
        k: int,
        *,
        tau: float = 1.0,
        alpha: float = 1.0,
        weight: Tensor | None = None,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(k=k, tau=tau, alpha=alpha, weight=weight, reduction=reduction)


class TopKDistillationLoss(FunctionModule):
    """Module form of :func:`topk_distillation_loss`, which documents the arguments."""

    function = staticmethod(topk_distillation_loss)

    def __init__(
        self,
        k: int,
        *,
        temperature: float = 1.0,
        shard: ClassShard | None = None,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(k=k, temperature=temperature, shard=shard, reduction=reduction)

    def forward(self, logits: Tensor, teacher_logits: Tensor, *, sample_weight: Tensor | None = None) -> Tensor:
        """Return the loss of a batch."""
        loss: Tensor = self._call(logits, teacher_logits, sample_weight=sample_weight)
        return loss
