"""The quasibinary loss: one normaliser for all classes and all rows of a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from lastlayer import _check
from lastlayer._check import Labels, Reduction, Target
from lastlayer._module import FunctionModule
from lastlayer.loss import _rows
from lastlayer.shard import ClassShard, reduce


def quasibinary_loss(
    logits: Tensor, target: Target, *, log_normalizer: float | Tensor | None = None, reduction: Reduction = "mean"
) -> Tensor:
    r"""Compute the quasibinary loss (Liao, 2021): label probabilities that share one normaliser.

    .. math:: -\sum_k \bigl( y_k \log q_k - \max(\log q_k, 0) \bigr), \qquad q_k = e^{z_k} / C, \qquad
              C = \frac1N \sum_{i, k} e^{z_{ik}}

    with :math:`N` the number of labels in the batch, so that the batch's probabilities add up to its labels. The
    gradient flows through :math:`C`: it is what holds down the classes that are not labels, and rows without any
    label. The second term keeps :math:`q \le 1`. Log-space throughout.

    Args:
        logits: The scores :math:`z`, shape ``(*batch, n_classes)``; ``-inf`` rules a class out.
        target: Multi-hot (-1 is unknown: outside of :math:`C` and of the sum), one class a row, or index lists.
        log_normalizer: :math:`\log C`, a number or a scalar tensor, in place of the batch's own. Then only labels and
            entries above 1 have a gradient. :class:`~lastlayer.head.QuasibinaryHead` keeps a moving average of it.
        reduction: ``"none"`` is a loss a row; ``"mean"`` is over all rows, with labels or without.

    Returns:
        The loss, of the dtype of `logits`; it may be negative. A batch without any label has no normaliser: its loss
        is 0, unless `log_normalizer` is given.

    Example:
        >>> quasibinary_loss(torch.zeros(2, 3), torch.tensor([[0], [-1]]))  # C = 6, one label
        tensor(0.8959)
    """
    op = "quasibinary_loss"
    x, labels, live = _rows.enter(op, logits, target)
    if log_normalizer is None:
        # A constant added to the batch changes nothing: about the largest score the logarithms keep their digits.
        peak = torch.where(live, x, -torch.inf).detach().flatten()
        peak = peak.amax() if peak.numel() else x.new_zeros(())
        x = torch.where(live, x - torch.where(peak.isfinite(), peak, 0), 0)
        log_c, known = batch_log_normalizer(x, labels, live, None)
        loss = torch.where(known, row_loss(x, labels, live, log_c), 0)
    elif isinstance(log_normalizer, Tensor):
        loss = row_loss(x, labels, live, log_normalizer.to(x))
    else:
        loss = row_loss(x, labels, live, x.new_full((), _check.number(op, "log_normalizer", log_normalizer)))
    return _rows.leave(op, loss, reduction, None, logits.dtype)


def batch_log_normalizer(x: Tensor, labels: Labels, live: Tensor, ranks: ClassShard | None) -> tuple[Tensor, Tensor]:
    """Return ``log C`` over the batches of all `ranks`, and whether there is a label; without one ``log C`` is 0."""
    flat = torch.where(live, x, -torch.inf).reshape(1, -1)
    peak = reduce(flat.detach(), "max", ranks)
    peak = torch.where(peak.isfinite(), peak, 0)
    count = labels.count().sum().to(x.dtype).reshape(1, 1)
    mass, count = reduce([torch.where(flat == -torch.inf, 0, (flat - peak).exp()), count], "sum", ranks)
    known = (count > 0) & (mass > 0)
    log_c = torch.where(known, mass, 1).log() + peak - torch.where(known, count, 1).log()
    return torch.where(known, log_c, 0).reshape(()), known.reshape(())


def row_loss(x: Tensor, labels: Labels, live: Tensor, log_c: Tensor) -> Tensor:
    """Return the loss a row for a normaliser of shape ``()``."""
    log_q = torch.where(live, x - log_c, -torch.inf)
    above = torch.where(live, log_q, 0).clamp(min=0).sum(-1)
    return above - labels.sum_over_positives(lambda q: q, log_q)


class QuasibinaryLoss(FunctionModule):
    """Module form of :func:`quasibinary_loss`, which documents the arguments."""

    function = staticmethod(quasibinary_loss)

    def __init__(self, *, log_normalizer: float | Tensor | None = None, reduction: Reduction = "mean") -> None:
        super().__init__(log_normalizer=log_normalizer, reduction=reduction)
