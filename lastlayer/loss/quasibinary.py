"""The quasibinary loss: one normaliser for all classes and all rows of a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from lastlayer import _check
from lastlayer._check import Labels, Reduction, Target
from lastlayer._module import LossModule
from lastlayer._threshold.compiled import by_kernels, compiled, fused, on_gpu
from lastlayer._threshold.dispatch import direct, recorded
from lastlayer.loss import _rows
from lastlayer.loss._gradient import End, at_once, with_shared_term
from lastlayer.loss._whole import whole_loss
from lastlayer.shard import ClassShard, Ranks, reduce, total, unwrap


@whole_loss
def quasibinary_loss(
    logits: Tensor,
    target: Target,
    *,
    log_normalizer: float | Tensor | None = None,
    sample_weight: Tensor | None = None,
    shard: ClassShard | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Compute the quasibinary loss (Liao, 2021): label probabilities that share one normaliser.

    .. math:: -\sum_k \bigl( y_k \log q_k - \max(\log q_k, 0) \bigr), \qquad q_k = e^{z_k} / C, \qquad
              C = \frac1N \sum_{i, k} e^{z_{ik}}

    with :math:`N` the number of labels in the batch, so that the batch's probabilities add up to its labels. The
    gradient flows through :math:`C`: it holds down the classes that are not labels, and rows without any label. The
    second term keeps :math:`q \le 1`. Computed in log space throughout.

    Args:
        logits: The scores :math:`z`, shape ``(*batch, n_classes)``; ``-inf`` rules a class out.
        target: Multi-hot (-1 is unknown: outside of :math:`C` and of the sum; a number between 0 and 1 weighs the
            label's term and counts as that much in :math:`N`), one class per row, or index lists padded with -1.
        log_normalizer: :math:`\log C`, a number or a scalar tensor, in place of the batch's own. Then only labels and
            entries above 1 have a gradient. :class:`~lastlayer.head.QuasibinaryHead` keeps a moving average of it.
        sample_weight: One weight per row, shape ``batch``; a weight of 2 counts as two equal rows, in :math:`C` too.
        shard: This rank's slice, when the classes are split over processes; index targets hold global classes.
        reduction: ``"none"`` is one loss per row; ``"mean"`` is over all rows, with labels or without.

    Returns:
        The loss, of the dtype of `logits`; it may be negative. A batch without any label has no normaliser: its loss
        is 0, unless `log_normalizer` is given.

    Example:
        >>> quasibinary_loss(torch.zeros(2, 3), torch.tensor([[0], [-1]]))  # C = 6, one label
        tensor(0.8959)
    """
    op = "quasibinary_loss"
    logits, shard, _ = unwrap(op, logits, shard)
    x, labels = _rows.given(op, logits, target, shard, sample_weight)
    if log_normalizer is None:
        whole = _by_kernels(End(op, reduction, logits.dtype, sample_weight), x, labels) if shard is None else None
        if whole is not None:
            return whole
        rows = _rows.row_weight(op, sample_weight, x)
        loss = _at_once(x, labels, rows) if shard is None and not recorded(rows) else None
        if loss is None:
            loss = _plain(x, labels, rows, shard)
    else:
        if not isinstance(log_normalizer, Tensor):
            log_normalizer = _check.constant(_check.number(op, "log_normalizer", log_normalizer), x.dtype, x.device)
        if log_normalizer.numel() != 1:
            raise ValueError(
                f"{op}: `log_normalizer` must be one number, got shape {tuple(log_normalizer.shape)}. All classes and "
                "rows share it."
            )
        log_c = log_normalizer.to(x).reshape(())
        loss = _given_normalizer(x, labels, torch.zeros_like(log_c), log_c) if shard is None and direct(log_c) else None
        if loss is None:
            x, live = _rows.taking_part(x, labels)
            loss = total(row_loss(x, labels, live, log_c), shard)
    return _rows.leave(op, loss, reduction, None, logits.dtype, sample_weight)


def _plain(x: Tensor, labels: Labels, weight: Tensor | None, shard: ClassShard | None) -> Tensor:
    """Return one loss per row by differentiable operations."""
    x, live = of_weight(*_rows.taking_part(x, labels), weight)
    # A constant added to the batch changes nothing: about the largest score the logarithms keep their digits.
    peak = reduce(torch.where(live, x, -torch.inf).detach().reshape(1, -1), "max", shard).reshape(())
    x = torch.where(live, x - torch.where(peak.isfinite(), peak, 0), 0)
    log_c, known = batch_log_normalizer(x, labels, live, shard, weight)
    return torch.where(known, total(row_loss(x, labels, live, log_c), shard), 0)


def _by_kernels(end: End, x: Tensor, labels: Labels) -> Tensor | None:
    """Return the reduced loss by kernels for the whole batch, None where these do not apply."""
    if not (end.number and on_gpu(x) and compiled(x, labels.dense, labels.index)):
        return None
    kernels, mean = fused(x), end.reduction == "mean"
    if not kernels.sums(x.shape[:-1].numel(), x.shape[-1]):
        return None

    def forward(x: Tensor, gradient: bool) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = kernels.quasibinary(x, labels, mean)
        return found

    def backward(upstream: Tensor, x: Tensor, result: Tensor) -> Tensor:
        grad: Tensor = kernels.quasibinary_backward(x, labels, mean, result, upstream)
        return grad

    def plain(x: Tensor, result: Tensor) -> Tensor:
        return _check.reduced(end.op, _plain(x, labels, None, None), end.reduction)

    return end.of_number(by_kernels(x.contiguous(), forward, backward, plain))


def _at_once(x: Tensor, labels: Labels, weight: Tensor | None) -> Tensor | None:
    """Return one loss per row by compiled operations, None where plain torch must."""
    if not compiled(x, labels.dense, labels.index, weight):
        return None
    wanted, fixed, run = recorded(x), x.detach(), fused(x).run
    with torch.no_grad():
        sums = run("logsumexp", fixed, labels, (), gradient=wanted)
        if sums is None:
            return None
        peaks, count = sums.extra.unbind(-1)
        kept = None if weight is None else weight != 0
        there = sums.counts if kept is None else sums.counts & kept
        peak = torch.where(there, peaks, -torch.inf).max()
        peak = torch.where(peak.isfinite(), peak, 0)
        mass = torch.where(there, (peaks - peak + sums.loss).exp(), 0)
        if weight is not None:
            mass, count = mass * weight, count * weight
        whole, count = mass.sum(), count.sum()
        known = (count > 0) & ~(whole <= 0)  # nan shows
        log_c = torch.where(known, whole / count, 1).log()
        found = run("quasibinary", fixed, labels, (), first=peak, second=log_c, gradient=wanted)
        if found is None:
            return None
        here = known if kept is None else known & kept
        loss = torch.where(here, found.loss, 0)
        if not wanted:
            return loss
        term = sums.out * torch.where(known, mass / whole, 0).unsqueeze(-1)
        grad, part = found.out * known, found.extra.squeeze(-1) * known
    return with_shared_term(x, loss, grad, part, term, lambda x: _plain(x, labels, weight, None))


def _given_normalizer(x: Tensor, labels: Labels, peak: Tensor, log_c: Tensor) -> Tensor | None:
    """Return one loss per row for scores less the peak, by a compiled operation, None where plain torch must."""
    fixed = log_c.detach()

    def plain(x: Tensor) -> Tensor:
        x, live = _rows.taking_part(x, labels)
        return row_loss(torch.where(live, x - peak, 0), labels, live, fixed)

    if not compiled(x):
        return None
    found = at_once("quasibinary", x, labels, (), plain, first=peak, second=fixed)
    if found is None:
        return None
    return found.loss + found.extra.squeeze(-1) * (log_c - fixed).nan_to_num()  # 0, also where both are infinite


def of_weight(x: Tensor, live: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the scores, and the entries that take part, without rows of weight 0: these may hold any number."""
    if weight is None:
        return x, live
    live = live & (weight != 0).expand(x.shape[:-1]).unsqueeze(-1)
    return torch.where(live, x, 0), live


def batch_log_normalizer(
    x: Tensor, labels: Labels, live: Tensor, ranks: Ranks | None, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return ``log C`` over all `ranks`, which hold other rows or other classes, and whether there is a label.

    Without a label ``log C`` is 0.
    """
    flat = torch.where(live, x, -torch.inf).reshape(1, -1)
    peak = reduce(flat.detach(), "max", ranks)
    peak = torch.where(peak.isfinite(), peak, 0)
    mass = torch.where(flat == -torch.inf, 0, (flat - peak).exp())
    count = _rows.over_positives(labels, live, torch.ones_like, x)
    if weight is not None:
        mass = mass * weight.expand(x.shape[:-1]).unsqueeze(-1).expand(x.shape).reshape(1, -1)
        count = count * weight
    mass, count = reduce([mass, count.reshape(1, -1)], "sum", ranks)
    known = (count > 0) & ~(mass <= 0)  # nan shows
    log_c = torch.where(known, mass, 1).log() + peak - torch.where(known, count, 1).log()
    return torch.where(known, log_c, 0).reshape(()), known.reshape(())


def row_loss(x: Tensor, labels: Labels, live: Tensor, log_c: Tensor) -> Tensor:
    """Return one loss per row, of this rank's classes, for a normaliser of shape ``()``."""
    log_q = torch.where(live, x - log_c, 0)
    above = _rows.above_0(log_q).sum(-1)
    return above - _rows.over_positives(labels, live, lambda q: q, log_q)


class QuasibinaryLoss(LossModule):
    """Module form of :func:`quasibinary_loss`, which documents the arguments."""

    function = staticmethod(quasibinary_loss)

    def __init__(
        self,
        *,
        log_normalizer: float | Tensor | None = None,
        shard: ClassShard | None = None,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(log_normalizer=log_normalizer, shard=shard, reduction=reduction)
