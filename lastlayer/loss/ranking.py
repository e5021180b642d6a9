"""Ranking losses: hinges between every positive and every negative of a row, weighted by the rank of the positive."""

from __future__ import annotations

import torch
from torch import Tensor

from lastlayer import _check
from lastlayer._check import Labels, Reduction, Target
from lastlayer._module import LossModule
from lastlayer._renamed import renamed
from lastlayer.loss import _rows
from lastlayer.loss._gradient import End, reduced_at_once
from lastlayer.loss._whole import whole_loss
from lastlayer.shard import ClassShard

_FEW = 64  # positives of a row up to which each is compared with every negative; more are ranked by sorting


@whole_loss
def warp_loss(
    logits: Tensor,
    target: Target,
    *,
    exact: bool = True,
    generator: torch.Generator | None = None,
    weight: Tensor | None = None,
    sample_weight: Tensor | None = None,
    shard: ClassShard | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Compute the weighted approximate-rank pairwise loss (Weston et al., 2011) over all pairs of a row.

    .. math:: \sum_{p \in P} L(r_p) \sum_{n \in N} \max(0, 1 - x_p + x_n), \qquad L(r) = \sum_{j=1}^{r} \frac{1}{j}

    with :math:`r_p` the number of negatives that come within the margin 1 of the positive `p`. The weight is a constant
    for the gradient.

    Args:
        logits: The scores, shape ``(*batch, n_classes)``; ``-inf`` rules a class out.
        target: Multi-hot of the shape of `logits` (1 is positive, 0 negative, -1 unknown and left out; a number between
            0 and 1 is a positive whose terms it weighs), one class per row (``batch``), or index lists padded with -1
            (``(*batch, m)``).
        exact: Count :math:`r_p`; if False estimate it as the papers do, by ``round((n_classes - 1) / draws)``, where
            draws is how many negatives are drawn, without replacement, until one comes within the margin (their number
            plus 1 if none does). The positives of a row share one order of draws.
        generator: The random numbers of ``exact=False``.
        weight: One weight per class, ``(n_classes,)``, or any tensor that broadcasts to `logits`: that of the positive.
        sample_weight: One weight per row, shape ``batch``; the mean is weighted by it.
        shard: Must be None: the ranks need all classes of a row on one process.
        reduction: ``"none"`` is one loss per row; ``"mean"`` is over the rows with a positive and a negative.

    Returns:
        The loss, of the dtype of `logits`. A row without positives or without negatives has loss 0, and so has the mean
        without other rows.

    Example:
        >>> warp_loss(torch.tensor([[1.0, 2.0, 0.5, -3.0]]), torch.tensor([0]))  # r = 2: (1 + 1/2) (2 + 0.5)
        tensor(3.7500)
    """
    op = "warp_loss"
    logits = _rows.whole(op, logits, shard, "its ranks need all classes of a row")
    x, labels = _rows.given(op, logits, target, sample_weight=sample_weight)
    each = _rows.class_weight(op, "weight", weight, x)

    def plain(x: Tensor) -> tuple[Tensor, Tensor]:
        picked, is_label, negatives, live, share = _sorted(x, labels, each)
        by_rank = _weights(picked, negatives, live.shape[-1], exact, generator)
        loss = torch.where(is_label, _rows.weighed(by_rank * _hinges(picked, negatives, 1.0), share), 0).sum(-1)
        return loss, is_label.any(-1) & (negatives != -torch.inf).any(-1)

    end, loss = End(op, reduction, logits.dtype, sample_weight), None
    if exact:
        loss = reduced_at_once(end, "warp", x, labels, (_FEW,), lambda x: plain(x)[0], each=each)
    return end.of(*plain(x)) if loss is None else loss


@renamed("rml_loss", class_weight="unary_weight")
def rml_loss(
    logits: Tensor,
    target: Target,
    *,
    exact: bool = True,
    generator: torch.Generator | None = None,
    unary_weight: float = 5.0,
    ramp_start: float = -0.8,
    beta: float = 0.9,
    sample_weight: Tensor | None = None,
    shard: ClassShard | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Compute the robust ranking loss RML: :func:`warp_loss` with ramps for hinges, and a threshold at 0.

    .. math:: C_u \sum_{p \in P} R(x_p) + C_u \sum_{n \in N} R(-x_n)
        + \sum_{p \in P} L(r_p) \sum_{n \in N} R(x_p - x_n)

    with the ramp :math:`R(t) = H_1(t) - \beta H_s(t)`, :math:`H_a(t) = \max(0, a - t)`: beyond `ramp_start` the slope
    falls to :math:`1 - \beta`, so that a few wrong labels cannot dominate. The public code divides by 20 on top.

    Args:
        logits: The scores, shape ``(*batch, n_classes)``; ``-inf`` rules a class out.
        target: Multi-hot of the shape of `logits` (1 is positive, 0 negative, -1 unknown and left out; a number between
            0 and 1 is a positive whose terms it weighs), one class per row (``batch``), or index lists padded with -1
            (``(*batch, m)``).
        exact: As in :func:`warp_loss`.
        generator: As in :func:`warp_loss`.
        unary_weight: :math:`C_u`, at least 0.
        ramp_start: :math:`s`, at most 1.
        beta: How far the ramp flattens, from 0 (the hinge) to 1 (a constant, the ramp of the paper).
        sample_weight: One weight per row, shape ``batch``; the mean is weighted by it.
        shard: Must be None: the ranks need all classes of a row on one process.
        reduction: ``"none"`` is one loss per row; ``"mean"`` is over the rows with a known class, 0 without one.

    Returns:
        The loss, of the dtype of `logits`. A row without positives has only the loss of its negatives.

    Example:
        >>> rml_loss(torch.tensor([[3.0, -3.0]]), torch.tensor([0]))
        tensor(0.)
    """
    op = "rml_loss"
    unary = _check.number(op, "unary_weight", unary_weight, 0)
    start = _check.number(op, "ramp_start", ramp_start, high=1)
    flat = _check.number(op, "beta", beta, 0, 1)
    logits = _rows.whole(op, logits, shard, "its ranks need all classes of a row")
    picked, is_label, negatives, live, share = _sorted(*_rows.given(op, logits, target, sample_weight=sample_weight))
    weight = _weights(picked, negatives, live.shape[-1], exact, generator)
    pairs = _hinges(picked, negatives, 1.0) - flat * _hinges(picked, negatives, start)
    terms = _rows.weighed(weight * pairs + unary * _ramp(picked, start, flat), share)
    loss = torch.where(is_label, terms, 0).sum(-1)
    here = negatives != -torch.inf
    below = _ramp(-torch.where(here, negatives, 0), start, flat)
    loss = loss + unary * torch.where(here, below, 0).sum(-1)
    return _rows.leave(op, loss, reduction, _rows.any_class(live), logits.dtype, sample_weight)


def _sorted(
    x: Tensor, labels: Labels, each: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return the positives' scores and where they are, the negatives in descending order (``-inf`` where none).

    Then which entries take part, and the factors of the positives' terms: shares of soft labels, and weights.
    """
    x, live = _rows.taking_part(x, labels)
    positive = labels.positive() & live
    negatives = torch.where(live & ~positive, x, -torch.inf).sort(-1, descending=True).values
    if labels.index is None:
        if _rows.soft(labels):
            each = _rows.weighed(_rows.share(labels, live, x.dtype), each)
        return x, positive, negatives, live, each
    place = labels.index.clamp(min=0)
    is_label = (labels.index >= 0) & live.gather(-1, place)
    each = None if each is None else each.expand(x.shape).gather(-1, place)
    return torch.where(is_label, x.gather(-1, place), 0), is_label, negatives, live, each


def _above(picked: Tensor, negatives: Tensor, margin: float) -> Tensor:
    """Count the negatives above ``x_p - margin``."""
    bound = _check.variable(margin, picked) - picked.detach()
    return torch.searchsorted((-negatives.detach()).contiguous(), bound.contiguous())


def _hinges(picked: Tensor, negatives: Tensor, margin: float) -> Tensor:
    """Return ``sum over n of max(0, margin - x_p + x_n)``: the sum of those above, by one cumulative sum per row."""
    count = _above(picked, negatives, margin)
    # In float64: the cumulative sum of many large scores would cancel in float32.
    wide = torch.where(negatives == -torch.inf, 0, negatives).double()
    sums = torch.nn.functional.pad(wide.cumsum(-1), (1, 0)).gather(-1, count)
    score = picked.double()
    return (count * (_check.variable(margin, score) - score) + sums).to(picked.dtype)


def _ramp(t: Tensor, start: float, flat: float) -> Tensor:
    return _rows.above_0(1 - t) - flat * _rows.above_0(_check.variable(start, t) - t)


def _weights(
    picked: Tensor, negatives: Tensor, n_classes: int, exact: bool, generator: torch.Generator | None
) -> Tensor:
    """Return L of the rank of each positive, counted or estimated."""
    rank = _above(picked, negatives, 1.0)
    if not exact:
        here = negatives != -torch.inf
        key = torch.rand(negatives.shape, generator=generator, device=negatives.device)
        order = torch.where(here, key, torch.inf).argsort(-1).argsort(-1) + 1  # the draw in which each negative comes
        # The first draw among the `rank` largest negatives is a running minimum.
        never = here.sum(-1, keepdim=True) + 1
        first = torch.cat([never, order.cummin(-1).values], -1).gather(-1, rank)
        rank = ((n_classes - 1) / first).round().long()
    steps = torch.arange(1, n_classes + 1, device=picked.device, dtype=torch.float64).reciprocal().cumsum(0)
    return torch.nn.functional.pad(steps, (1, 0))[rank].to(picked.dtype)


class WARPLoss(LossModule):
    """Module form of :func:`warp_loss`, which documents the arguments."""

    function = staticmethod(warp_loss)

    def __init__(
        self,
        *,
        exact: bool = True,
        generator: torch.Generator | None = None,
        weight: Tensor | None = None,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(exact=exact, generator=generator, weight=weight, reduction=reduction)


class RMLLoss(LossModule):
    """Module form of :func:`rml_loss`, which documents the arguments."""

    function = staticmethod(rml_loss)

    @renamed("RMLLoss", class_weight="unary_weight")
    def __init__(
        self,
        *,
        exact: bool = True,
        generator: torch.Generator | None = None,
        unary_weight: float = 5.0,
        ramp_start: float = -0.8,
        beta: float = 0.9,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(
            exact=exact,
            generator=generator,
            unary_weight=unary_weight,
            ramp_start=ramp_start,
            beta=beta,
            reduction=reduction,
        )
