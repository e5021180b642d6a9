"""UniLoss (Liu et al., 2020): a metric made of comparisons of scores, smoothed by interpolation between true values."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lastlayer import _check
from lastlayer._check import Labels, Target
from lastlayer._module import FunctionModule
from lastlayer.loss import _rows
from lastlayer.loss.topk import first_label
from lastlayer.shard import ClassShard

_OP = "metric_surrogate_loss"


@dataclass(frozen=True)
class MetricRefactoring:
    """A metric as a function of comparisons between scores, to be maximised.

    Args:
        comparisons: ``(scores, target) -> c``, differentiable, of any shape; ``c > 0`` is a comparison that holds. A
            comparison of ``+inf`` is settled: it holds, and no anchor changes it. Scores have the shape of the logits.
        value: ``(bits, target) -> metric`` for boolean `bits` of shape ``(anchors, *c.shape)``, one number per anchor.
        best: ``(c, target) -> bits`` of the best configuration; ``None``: every comparison holds.

    Example:
        >>> hits = MetricRefactoring(  # the share of rows whose first class is above the second
        ...     comparisons=lambda scores, target: scores[..., 0] - scores[..., 1],
        ...     value=lambda bits, target: bits.float().mean(-1),
        ... )
        >>> loss = metric_surrogate_loss(torch.zeros(4, 2), torch.zeros(4, 2), hits)
    """

    comparisons: Callable[[Tensor, Any], Tensor]
    value: Callable[[Tensor, Any], Tensor]
    best: Callable[[Tensor, Any], Tensor] | None = None

    @classmethod
    def accuracy(cls) -> MetricRefactoring:
        """Return the share of rows whose label has the highest score: one comparison for each other class."""
        return cls(_against_label, _accuracy)

    @classmethod
    def average_precision(cls) -> MetricRefactoring:
        """Return the mean average precision of the rows: each label is compared with each class that is no label."""
        return cls(_label_against_rest, _average_precision)

    @classmethod
    def recall_at_k(cls, k: int | None = None) -> MetricRefactoring:
        """Return the mean share of a row's labels among the `k` highest scores; None: `k` is the number of labels.

        Each label is compared with each class that is no label: two labels cannot both be above each other.
        """
        k = _check.plain(k)
        if k is not None and (isinstance(k, bool) or not isinstance(k, int) or k < 1):
            raise ValueError(f"MetricRefactoring.recall_at_k: `k` must be a positive integer or None, got {k!r}.")
        return cls(_label_against_rest, lambda bits, target: _recall(bits, target, k))


def metric_surrogate_loss(
    logits: Tensor,
    target: Target,
    metric: str | MetricRefactoring,
    *,
    anchors: int = 16,
    generator: torch.Generator | None = None,
    shard: ClassShard | None = None,
) -> Tensor:
    r"""Compute minus a metric of the batch, smoothed so that it has a gradient (Liu et al., 2020).

    .. math:: -\tilde g(u), \qquad \tilde g(u) = \frac{\sum_i g(a_i) / \|u - a_i\|}{\sum_i 1 / \|u - a_i\|}, \qquad
              u = \sigma(c)

    with :math:`c` the comparisons of scores that make up the metric, and :math:`a_i` anchors: configurations of the
    comparisons, with the true metric :math:`g(a_i)`. There are three kinds, drawn in each call: the best configuration
    and some that differ from it in one bit; the current one with one wrong bit corrected (one bit off the best if none
    is wrong); and random ones. The gradient is that of the formula with fixed anchors; where `u` is an anchor the value
    is exact and the gradient 0. The gradient becomes smaller as the comparisons grow in number: tune the learning rate
    again.

    Args:
        logits: The scores, shape ``(*batch, n_classes)``; ``-inf`` rules a class out.
        target: Multi-hot (-1 is unknown, and takes part in no comparison), one class per row, or index lists padded
            with -1.
        metric: ``"accuracy"`` (of several labels the lowest class counts), ``"average_precision"``, ``"recall_at_5"``
            for any number, ``"recall_at_k"`` with each row's number of labels as `k`, or a :class:`MetricRefactoring`.
            All are means over the rows with a label. For the metric of a class over the batch, pass ``logits.T`` and
            ``target.T``.
        anchors: The number of anchors of each kind.
        generator: The source of randomness; a seeded one repeats the anchors.
        shard: Must be None: the comparisons need all classes of a row on one process.

    Returns:
        A number, of the dtype of `logits`: minus the smoothed metric; 0 without a label. Accuracy costs
        ``rows * n_classes`` comparisons, the others ``rows * n_classes ** 2``, each `3 * anchors` times.

    Example:
        >>> logits = torch.tensor([[99.0, -99.0], [-99.0, 99.0]])
        >>> metric_surrogate_loss(logits, torch.tensor([0, 1]), "accuracy")
        tensor(-1.)
    """
    logits = _check.logits(_OP, _rows.whole(_OP, logits, shard, "its comparisons need all classes of a row"))
    if not isinstance(target, Tensor | _check.LabelLists):
        raise TypeError(f"{_OP}: `target` must be a tensor, got {type(target).__name__}. Use torch.as_tensor.")
    refactoring = _refactoring(metric)
    anchors = _check.plain(anchors)
    if isinstance(anchors, bool) or not isinstance(anchors, int) or anchors < 1:
        raise ValueError(f"{_OP}: `anchors` must be a positive integer, got {anchors!r}.")
    c = refactoring.comparisons(logits.to(_check.work_dtype(logits)), target)
    best = torch.ones_like(c, dtype=torch.bool) if refactoring.best is None else refactoring.best(c.detach(), target)
    bits = _anchors(c.detach().reshape(-1), best.reshape(-1), anchors, generator)
    value = refactoring.value(bits.reshape(bits.shape[0], *c.shape), target).detach().to(c.dtype)
    loss = -_interpolated(c.reshape(-1), bits, value)
    return _rows.leave(_OP, loss, "none", None, logits.dtype)


def _refactoring(metric: Any) -> MetricRefactoring:
    if isinstance(metric, MetricRefactoring):
        return metric
    if metric == "accuracy":
        return MetricRefactoring.accuracy()
    if metric == "average_precision":
        return MetricRefactoring.average_precision()
    match = re.fullmatch(r"recall_at_(k|[1-9]\d*)", metric) if isinstance(metric, str) else None
    if match is None:
        raise ValueError(
            f"{_OP}: `metric` must be 'accuracy', 'average_precision', 'recall_at_k', 'recall_at_5' (any number) or a "
            f"MetricRefactoring, got {metric!r}."
        )
    return MetricRefactoring.recall_at_k(None if match[1] == "k" else int(match[1]))


def _anchors(c: Tensor, best: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """Return anchors ``(3 * count, l)`` for comparisons and best bits of shape ``(l,)``."""
    free = c != torch.inf
    best = best | ~free
    now = torch.where(free, c > 0, best)
    off = _drawn(free, 2 * count, generator)
    good = best ^ torch.cat([torch.zeros_like(off[:1]), off[1:count]])
    wrong = now != best
    near = torch.where(wrong.any(), now ^ _drawn(wrong, count, generator), best ^ off[count:])
    random = torch.rand((count, c.shape[0]), generator=generator, device=c.device) < 0.5
    return torch.cat([good, near, torch.where(free, random, best)])


def _drawn(marks: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """Return `count` rows, each with one of the places in `marks` marked, or none if there is none."""
    rank = marks.long().cumsum(0)
    uniform = torch.rand(count, generator=generator, dtype=torch.float64, device=marks.device)
    wanted = (uniform * marks.sum()).long() + 1
    place = torch.searchsorted(rank, wanted).clamp(max=max(marks.shape[0] - 1, 0))
    if marks.shape[0] == 0:
        return marks.expand(count, 0)
    return torch.zeros((count, *marks.shape), dtype=torch.bool, device=marks.device).scatter(
        1, place.unsqueeze(1), marks[place].unsqueeze(1)
    )


def _interpolated(c: Tensor, bits: Tensor, value: Tensor) -> Tensor:
    """Return the inverse-distance interpolation at ``sigmoid(c)``: the exact value where that is an anchor."""
    # In float64: near an anchor, where a batch is well fitted, the squares of float32 underflow, and their inverses
    # overflow in the gradient. Only the ratios of the weights matter: that of the nearest anchor is 1.
    wide, chosen = c.double(), bits.double()
    # (u - a)^2 is (1 - u)^2 or u^2: sums of positive terms, no difference of large numbers.
    square = chosen @ (-wide).sigmoid().square() + (1 - chosen) @ wide.sigmoid().square()
    exact = square < 1e-290
    square = torch.where(exact, 1, square)
    weight = torch.where(exact.any(), exact.to(wide.dtype), (square / square.detach().amin()).rsqrt())
    return ((weight * value).sum() / weight.sum()).to(c.dtype)


def _labels(scores: Tensor, target: Target) -> tuple[Labels, Tensor]:
    """Return the labels, and which classes take part: those known and not ruled out."""
    labels = _check.target(_OP, target, scores)
    known = labels.known()
    return labels, torch.ones_like(scores, dtype=torch.bool) if known is None else known


def _against_label(scores: Tensor, target: Target) -> Tensor:
    """Return the label's score minus that of each other class, shape ``(*batch, n)``."""
    labels, known = _labels(scores, target)
    here = first_label(labels)
    own = torch.arange(scores.shape[-1], device=scores.device) == here
    rival = known & (scores != -torch.inf) & ~own & (here >= 0)
    if scores.shape[-1] == 0:
        return scores
    return torch.where(rival, scores.gather(-1, here.clamp(min=0)) - torch.where(rival, scores, 0), torch.inf)


def _accuracy(bits: Tensor, target: Target) -> Tensor:
    has_label = _check.target(_OP, target, bits[0]).count() > 0
    return _mean(bits.all(-1).float(), has_label)


def _label_against_rest(scores: Tensor, target: Target) -> Tensor:
    """Return each label's score minus that of each class that is no label, shape ``(*batch, n, n)``."""
    labels, known = _labels(scores, target)
    positive = labels.positive()
    rival = known & ~positive & (scores != -torch.inf)
    return _pairs(scores, positive.unsqueeze(-1) & rival.unsqueeze(-2))


def _pairs(scores: Tensor, marks: Tensor) -> Tensor:
    rival = torch.where(scores == -torch.inf, 0, scores).unsqueeze(-2)
    return torch.where(marks, scores.unsqueeze(-1) - rival, torch.inf)


def _average_precision(bits: Tensor, target: Target) -> Tensor:
    """(1/P) sum_i i / (i + v_i) for every bit pattern."""
    labels, rank, above = _places_of_labels(bits, target)
    return _mean((rank / (rank + above)).sum(-1) / labels.count().clamp(min=1), labels.count() > 0)


def _recall(bits: Tensor, target: Target, k: int | None) -> Tensor:
    """(1/P) sum_i [i + v_i <= k] for every bit pattern."""
    labels, rank, above = _places_of_labels(bits, target)
    count = labels.count()
    places = count.unsqueeze(-1) if k is None else k
    return _mean((rank + above <= places).sum(-1) / count.clamp(min=1), count > 0)


def _places_of_labels(bits: Tensor, target: Target) -> tuple[Labels, Tensor, Tensor]:
    """Return the labels, i = 1 ... n and v_i, the number of other classes above the i-th of them, in ascending order.

    The i-th label is at place ``i + v_i``, whatever the order among the labels. Beyond the number of labels v is
    infinite.
    """
    labels = _check.target(_OP, target, bits[0, ..., 0])
    above = torch.where(labels.positive(), (~bits).sum(-1).float(), torch.inf).sort(-1).values
    return labels, torch.arange(1, above.shape[-1] + 1, device=bits.device), above


def _mean(value: Tensor, has_label: Tensor) -> Tensor:
    """Return the mean over the rows with a label, one number per anchor; 0 if there is none."""
    total = torch.where(has_label, value, 0).reshape(len(value), -1).sum(1)
    return total / has_label.sum().clamp(min=1)


class MetricSurrogateLoss(FunctionModule):
    """Module form of :func:`metric_surrogate_loss`, which documents the arguments."""

    function = staticmethod(metric_surrogate_loss)

    def __init__(
        self, metric: str | MetricRefactoring, *, anchors: int = 16, generator: torch.Generator | None = None
    ) -> None:
        super().__init__(metric=metric, anchors=anchors, generator=generator)

    def forward(self, logits: Tensor, target: Target) -> Tensor:
        """Return the loss of a batch."""
        loss: Tensor = self._call(logits, target)
        return loss
