"""Losses for incomplete labels that correct the target during training: SPLC and the large-loss family."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lastlayer import _check
from lastlayer._check import Labels, Reduction, Target
from lastlayer._module import LossModule
from lastlayer.loss import _rows
from lastlayer.loss.incomplete import focal_positive
from lastlayer.shard import ClassShard, kth_largest, unwrap

Mode = Literal["reject", "temporary", "permanent"]


def splc_loss(
    logits: Tensor,
    target: Target,
    *,
    threshold: float = 0.6,
    margin: float = 1.0,
    gamma: float = 2.0,
    epoch: int = 1,
    change_epoch: int = 1,
    weight: Tensor | None = None,
    pos_weight: float | Tensor | None = None,
    sample_weight: Tensor | None = None,
    shard: ClassShard | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Compute the focal loss with self-paced label correction (Zhang et al., 2021).

    .. math:: -\sum_{j \in Y} (1 - m_j)^\gamma \log m_j - \sum_{j \in C} (1 - p_j)^\gamma \log p_j
        - \sum_{j \notin Y \cup C} p_j^\gamma \log(1 - p_j), \qquad p = \sigma(x),\; m = \sigma(x - \text{margin})

    C holds the entries that were not observed and have :math:`p` above `threshold`, once `epoch` has reached
    `change_epoch`; before that, it is empty. Which entries these are is a constant for the gradient.

    Args:
        logits: The scores, shape ``(*batch, n_classes)``; ``-inf`` rules a class out.
        target: Multi-hot of the shape of `logits` (1 is a label, 0 not observed, -1 left out; a number between 0 and 1
            takes that share of the label's term and the rest of the other), one class per row (``batch``), or index
            lists padded with -1 (``(*batch, m)``).
        threshold: Above this probability an entry becomes a label; the paper has 0.6, and 0.65 where three quarters
            of the labels are there.
        margin: How far observed labels must be beyond 0.
        gamma: The focal exponent, at least 0.
        epoch: The current epoch, from 0; the default corrects.
        change_epoch: The first epoch that corrects.
        weight: One weight per class, ``(n_classes,)``, or any tensor that broadcasts to `logits`, for its terms.
        pos_weight: The same, only for the terms of observed labels; one number applies to all classes.
        sample_weight: One weight per row, shape ``batch``; the mean is weighted by it.
        shard: This rank's slice, when the classes are split over processes; index targets hold global classes.
        reduction: ``"none"`` is one loss per row, the sum over its classes; ``"sum"`` is the sum over all entries, as
            in the public code; ``"mean"`` is over the rows with a known class, 0 without one.

    Returns:
        The loss, of the dtype of `logits`.

    Example:
        >>> splc_loss(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))  # log(2) / 4, twice
        tensor(0.3466)
    """
    op = "splc_loss"
    limit = _check.number(op, "threshold", threshold, 0, 1)
    shift = _check.number(op, "margin", margin)
    power = _check.number(op, "gamma", gamma, 0)
    active = _check.number(op, "epoch", epoch, 0) >= _check.number(op, "change_epoch", change_epoch, 0)
    logits, shard, _ = unwrap(op, logits, shard)
    x, labels, live = _rows.enter(op, logits, target, shard, sample_weight)
    each, positives = _rows.class_weights(op, weight, pos_weight, x)
    silent = focal_positive(-x, power)
    if active:
        silent = torch.where(x.detach().sigmoid() > limit, focal_positive(x, power), silent)
    fit = _rows.weighed(focal_positive(x - shift, power), positives)
    loss = _rows.over_classes(_rows.mixed(labels, live, fit, silent), live, shard, each)
    return _rows.leave(op, loss, reduction, _rows.any_class(live, shard), logits.dtype, sample_weight)


def large_loss(
    logits: Tensor,
    target: Target,
    *,
    mode: Mode = "reject",
    rate: float = 0.002,
    epoch: int = 1,
    weight: Tensor | None = None,
    pos_weight: float | Tensor | None = None,
    sample_weight: Tensor | None = None,
    shard: ClassShard | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Compute the binary cross-entropy without its largest terms for unobserved labels (Kim et al., 2022).

    .. math:: -\sum_{j \in Y} \log p_j - \sum_{j \notin Y \cup M} \log(1 - p_j)
        - [\text{mode} \ne \text{reject}] \sum_{j \in M} \log p_j, \qquad p = \sigma(x)

    M holds the entries that :func:`large_loss_corrections` finds. ``"reject"`` (LL-R) drops them, ``"temporary"``
    (LL-Ct) takes them for positives in this step, and so does ``"permanent"`` (LL-Cp), where the caller writes them
    into the labels of the training set as well. Weights do not change which entries are found.

    Args:
        logits: The scores, shape ``(*batch, n_classes)``; ``-inf`` rules a class out.
        target: Multi-hot of the shape of `logits` (1 is a label, 0 not observed, -1 left out; a number between 0 and 1
            takes that share of the label's term and the rest of the other), one class per row (``batch``), or index
            lists padded with -1 (``(*batch, m)``).
        mode: ``"reject"``, ``"temporary"`` or ``"permanent"``.
        rate: As in :func:`large_loss_corrections`.
        epoch: As in :func:`large_loss_corrections`.
        weight: One weight per class, ``(n_classes,)``, or any tensor that broadcasts to `logits`, for its terms.
        pos_weight: The same, only for the terms of observed labels; one number applies to all classes.
        sample_weight: One weight per row, shape ``batch``; the mean is weighted by it.
        shard: This rank's slice, when the classes are split over processes; index targets hold global classes.
        reduction: ``"none"`` is one loss per row, the sum over its classes; ``"mean"`` is over the rows with a known
            class, 0 without one.

    Returns:
        The loss, of the dtype of `logits`.

    Example:
        >>> large_loss(torch.tensor([[2.0, 3.0, 0.0]]), torch.tensor([0]))  # without the second class
        tensor(0.8201)
    """
    op = "large_loss"
    logits, shard, _ = unwrap(op, logits, shard)
    x, labels, live = _rows.enter(op, logits, target, shard, sample_weight)
    each, positives = _rows.class_weights(op, weight, pos_weight, x)
    yes, no = -F.logsigmoid(x), -F.logsigmoid(-x)
    large = _largest(op, x, labels, live, mode, rate, epoch, shard)
    changed = torch.zeros_like(yes) if mode == "reject" else yes
    loss = _rows.mixed(labels, live, _rows.weighed(yes, positives), torch.where(large, changed, no))
    loss = _rows.over_classes(loss, live, shard, each)
    return _rows.leave(op, loss, reduction, _rows.any_class(live, shard), logits.dtype, sample_weight)


def large_loss_corrections(
    logits: Tensor,
    target: Target,
    *,
    mode: Mode = "reject",
    rate: float = 0.002,
    epoch: int = 1,
    shard: ClassShard | None = None,
) -> Tensor:
    r"""Find the unobserved entries of a batch whose loss as a negative is among the largest.

    They are those at or above the m-th largest of the batch, :math:`m = \lceil B n \cdot \text{epoch} \cdot
    \text{rate} \rceil` for B rows of n classes; in mode ``"permanent"``, where corrections add up by themselves,
    :math:`m = \lceil B n \cdot \text{rate} \rceil`. In epoch 0 there are none.

    Args:
        logits: The scores, shape ``(*batch, n_classes)``.
        target: As in :func:`large_loss`.
        mode: As in :func:`large_loss`.
        rate: The share of all entries that is added in each epoch.
        epoch: The current epoch, from 0.
        shard: This rank's slice, when the classes are split over processes.

    Returns:
        Boolean, of the shape of `logits`. For ``"permanent"``: ``labels[rows][found] = 1`` in the training set.

    Example:
        >>> large_loss_corrections(torch.tensor([[2.0, 3.0, 0.0]]), torch.tensor([0]))
        tensor([[False,  True, False]])
    """
    op = "large_loss_corrections"
    logits, shard, _ = unwrap(op, logits, shard)
    x, labels, live = _rows.enter(op, logits, target, shard)
    return _largest(op, x, labels, live, mode, rate, epoch, shard)


def _largest(
    op: str,
    x: Tensor,
    labels: Labels,
    live: Tensor,
    mode: Mode,
    rate: float,
    epoch: int,
    shard: ClassShard | None,
) -> Tensor:
    """Return the entries with the largest losses as negatives. The scores have the same order, without its rounding."""
    _check.choice(op, "mode", mode, ("reject", "temporary", "permanent"))
    share, epochs = _check.number(op, "rate", rate, 0, 1), _check.number(op, "epoch", epoch, 0)
    share = min(share if mode == "permanent" else share * epochs, 1.0)
    unobserved = live & ~labels.positive()
    candidates = torch.where(unobserved, x.detach(), -torch.inf)
    if share == 0 or epochs == 0:
        return torch.zeros_like(unobserved)
    entries = _rows.n_classes(x, shard) * x.shape[:-1].numel()
    if isinstance(entries, int):
        many = math.ceil(entries * share - 1e-9)  # 1000 * 0.003 is a little above 3
        if many == 0:
            return torch.zeros_like(unobserved)
        least = candidates.flatten().topk(many).values[-1]
    else:
        wanted = (entries.double() * share - 1e-9).ceil().clamp(min=1)
        least = kth_largest(candidates.reshape(1, -1), wanted.reshape(1, 1), shard).reshape(())
    return unobserved & (candidates >= least)


class _Scheduled(LossModule):
    """A loss with an epoch."""

    epoch: int

    def step_epoch(self) -> None:
        """Count one more epoch."""
        self.epoch += 1


class SPLCLoss(_Scheduled):
    """Module form of :func:`splc_loss`; for the paper's schedule start at ``epoch=0`` and call :meth:`step_epoch`."""

    function = staticmethod(splc_loss)

    def __init__(
        self,
        *,
        threshold: float = 0.6,
        margin: float = 1.0,
        gamma: float = 2.0,
        epoch: int = 1,
        change_epoch: int = 1,
        weight: Tensor | None = None,
        pos_weight: float | Tensor | None = None,
        shard: ClassShard | None = None,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(
            threshold=threshold,
            margin=margin,
            gamma=gamma,
            epoch=epoch,
            change_epoch=change_epoch,
            weight=weight,
            pos_weight=pos_weight,
            shard=shard,
            reduction=reduction,
        )


class LargeLoss(_Scheduled):
    """Module form of :func:`large_loss`; for the paper's schedule start at ``epoch=0`` and call :meth:`step_epoch`."""

    function = staticmethod(large_loss)

    def __init__(
        self,
        *,
        mode: Mode = "reject",
        rate: float = 0.002,
        epoch: int = 1,
        weight: Tensor | None = None,
        pos_weight: float | Tensor | None = None,
        shard: ClassShard | None = None,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(
            mode=mode,
            rate=rate,
            epoch=epoch,
            weight=weight,
            pos_weight=pos_weight,
            shard=shard,
            reduction=reduction,
        )
