"""Losses for incomplete labels: what is not observed may be a label that nobody recorded.

A target of 1 is an observed label, 0 is not observed, -1 is left out altogether.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lastlayer import _check
from lastlayer._check import Labels, Reduction, Target
from lastlayer._module import FunctionModule, LossModule
from lastlayer.loss import _rows
from lastlayer.shard import ClassShard, local_part, total, unwrap


def assume_negative_loss(
    logits: Tensor,
    target: Target,
    *,
    label_smoothing: float = 0.0,
    negative_weight: float = 1.0,
    weight: Tensor | None = None,
    pos_weight: float | Tensor | None = None,
    sample_weight: Tensor | None = None,
    shard: ClassShard | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Compute the binary cross-entropy that takes what is not observed for a negative (AN, AN-LS, WAN).

    .. math:: -\sum_{j \in Y} \big[(1 - \varepsilon) \log p_j + \varepsilon \log(1 - p_j)\big]
        - w \sum_{j \notin Y} \big[(1 - \varepsilon) \log(1 - p_j) + \varepsilon \log p_j\big], \qquad p = \sigma(x)

    The baselines of Cole et al. (2021): AN by default, AN-LS with `label_smoothing`, WAN with
    ``negative_weight=1 / (n_classes - 1)``. The paper also divides by ``n_classes``. Here :math:`\varepsilon` is the
    whole part moved to the other side, twice that of :func:`~lastlayer.binary_loss`.

    Args:
        logits: The scores, shape ``(*batch, n_classes)``; ``-inf`` rules a class out.
        target: Multi-hot of the shape of `logits` (1 is a label, 0 not observed, -1 left out; a number between 0 and 1
            takes that share of the label's term and the rest of the other), one class per row (``batch``), or index
            lists padded with -1 (``(*batch, m)``).
        label_smoothing: :math:`\varepsilon`.
        negative_weight: :math:`w`, at least 0.
        weight: One weight per class, ``(n_classes,)``, or any tensor that broadcasts to `logits`, for its terms.
        pos_weight: The same, only for the terms of labels; one number applies to all classes.
        sample_weight: One weight per row, shape ``batch``; the mean is weighted by it.
        shard: This rank's slice, when the classes are split over processes; index targets hold global classes.
        reduction: ``"none"`` is one loss per row, the sum over its classes; ``"mean"`` is over the rows with a known
            class, 0 without one.

    Returns:
        The loss, of the dtype of `logits`.

    Example:
        >>> assume_negative_loss(torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([0]), negative_weight=0.5)
        tensor(0.8201)
    """
    op = "assume_negative_loss"
    smoothing = _check.number(op, "label_smoothing", label_smoothing, 0, 1)
    silence = _check.number(op, "negative_weight", negative_weight, 0)
    logits, shard, _ = unwrap(op, logits, shard)
    x, labels, live = _rows.enter(op, logits, target, shard, sample_weight)
    each, positives = _rows.class_weights(op, weight, pos_weight, x)
    yes, no = -F.logsigmoid(x), -F.logsigmoid(-x)
    if smoothing > 0:
        yes, no = yes + smoothing * (no - yes), no + smoothing * (yes - no)
    loss = _rows.mixed(labels, live, _rows.weighed(yes, positives), silence * no)
    loss = _rows.over_classes(loss, live, shard, each)
    return _rows.leave(op, loss, reduction, _rows.any_class(live, shard), logits.dtype, sample_weight)


def expected_positive_loss(
    logits: Tensor,
    target: Target,
    k: float | Tensor,
    *,
    weight: Tensor | None = None,
    sample_weight: Tensor | None = None,
    shard: ClassShard | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Compute expected positive regularisation (Cole et al., 2021): fit the labels, hold the mean count at `k`.

    .. math:: -\frac{1}{n} \sum_{j \in Y} \log p_j
        + \frac{1}{n^2} \Big(\frac{1}{B} \sum_{i=1}^{B} \sum_{j=1}^{n} p_{ij} - k\Big)^2, \qquad p = \sigma(x)

    for each of the B rows, with n classes: the mean is the paper's number. The second term is one number for the batch,
    so a row's loss depends on the others, and small batches hold each row nearer to `k` than large ones.

    Args:
        logits: The scores, shape ``(*batch, n_classes)``; ``-inf`` rules a class out.
        target: Multi-hot of the shape of `logits` (1 is a label, 0 not observed, -1 left out, also of the count; a
            number between 0 and 1 weighs the label's term), one class per row (``batch``), or index lists padded with
            -1 (``(*batch, m)``).
        k: The expected number of labels per row; a number, or a tensor that broadcasts to ``batch``: its mean counts.
        weight: One weight per class, ``(n_classes,)``, or any tensor that broadcasts to `logits`: that of the labels.
        sample_weight: One weight per row, shape ``batch``; a weight of 2 counts as two equal rows, in the count too.
        shard: This rank's slice, when the classes are split over processes; index targets hold global classes.
        reduction: ``"none"`` is one loss per row, the second term added to each; ``"mean"`` is over the rows with a
            known class, 0 without one.

    Returns:
        The loss, of the dtype of `logits`. A row without labels has only the second term.

    Example:
        >>> expected_positive_loss(torch.zeros(1, 4), torch.tensor([0]), k=1)  # log(2) / 4 + (2 - 1)^2 / 16
        tensor(0.2358)
    """
    op = "expected_positive_loss"
    logits, shard, _ = unwrap(op, logits, shard)
    x, labels, live = _rows.enter(op, logits, target, shard, sample_weight)
    batch = _batch(op, logits, live, k, sample_weight, shard)
    each = _rows.class_weight(op, "weight", weight, x)
    fit = _rows.over_positives(labels, live, lambda score: -F.logsigmoid(score), x, weight=each)
    fit = total(fit, shard) / batch.n_classes
    loss = torch.where(batch.counts, fit + _surplus(x, live, batch), 0)
    return _rows.leave(op, loss, reduction, batch.counts, logits.dtype, sample_weight)


class _Batch(NamedTuple):
    """What the second term needs: which rows count and by how much, their sizes, and the number of classes."""

    counts: Tensor
    weight: Tensor
    size: Tensor
    n_classes: int | Tensor
    shard: ClassShard | None


def _batch(op: str, logits: Tensor, live: Tensor, k: Any, sample_weight: Any, shard: ClassShard | None) -> _Batch:
    size = _check.cardinality(op, k, logits, shard).squeeze(-1)
    counts = _rows.any_class(live, shard)
    weight = _check.weights(op, "sample_weight", sample_weight, size, counts.shape, "Give one weight per row.")
    weight = counts.to(size.dtype) if weight is None else torch.where(counts, weight, 0)
    return _Batch(counts, weight, size, _rows.n_classes(logits, shard), shard)


def _surplus(x: Tensor, live: Tensor, batch: _Batch) -> Tensor:
    """Return the square of the batch's mean surplus of expected positives, as a share of the classes."""
    expected = _rows.over_classes(x.sigmoid(), live, batch.shard)
    rows = batch.weight.sum()
    surplus = torch.where(batch.weight == 0, 0, batch.weight * (expected - batch.size)).sum()
    return (surplus / torch.where(rows == 0, 1, rows) / batch.n_classes) ** 2


def role_loss(
    logits: Tensor,
    target: Target,
    estimates: Tensor,
    k: float | Tensor,
    *,
    sample_weight: Tensor | None = None,
    shard: ClassShard | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Compute regularised online label estimation (Cole et al., 2021): model and label estimates teach each other.

    .. math:: \tfrac{1}{2} \big[ L(p, \bar q) + L(q, \bar p) \big], \qquad
        L(p, q) = -\frac{1}{n} \Big( \sum_{j \in Y} \log p_j + \sum_j \big[q_j \log p_j + (1 - q_j) \log(1 - p_j)\big]
        \Big) + \frac{1}{n^2} \Big(\frac{1}{B} \sum_i \sum_j p_{ij} - k\Big)^2

    with p the model and q the estimates; a bar marks what is a constant for the gradient.

    Args:
        logits: The scores of the model, shape ``(*batch, n_classes)``; ``-inf`` rules a class out.
        target: Multi-hot of the shape of `logits` (1 is a label, 0 not observed, -1 left out; a number between 0 and 1
            weighs the label's term), one class per row (``batch``), or index lists padded with -1 (``(*batch, m)``).
        estimates: The logits of the estimates for these rows, of the shape of `logits`: see :class:`LabelEstimates`.
        k: The expected number of labels per row; a number, or a tensor that broadcasts to ``batch``.
        sample_weight: One weight per row, shape ``batch``; a weight of 2 counts as two equal rows, in the count too.
        shard: This rank's slice, when the classes are split over processes; index targets hold global classes.
        reduction: ``"none"`` is one loss per row, the batch's terms added to each; ``"mean"`` is over the rows with a
            known class, 0 without one, and the paper's number.

    Returns:
        The loss, of the dtype of `logits`, with gradients for `logits` and `estimates`.

    Example:
        >>> table = LabelEstimates(100, 4)
        >>> rows = torch.tensor([7, 42])
        >>> role_loss(torch.zeros(2, 4), torch.tensor([0, 2]), table(rows), k=1).shape
        torch.Size([])
    """
    op = "role_loss"
    logits, shard, _ = unwrap(op, logits, shard)
    x, labels, live = _rows.enter(op, logits, target, shard, sample_weight)
    estimates = _check.logits(op, local_part(estimates), "estimates")
    if estimates.shape != logits.shape:
        raise ValueError(
            f"{op}: `estimates` must have the shape of `logits`, {tuple(logits.shape)}, got {tuple(estimates.shape)}. "
            "Take the rows of this batch from the table."
        )
    batch = _batch(op, logits, live, k, sample_weight, shard)
    e = torch.where(live, estimates.to(x.dtype), 0)
    loss = (_teach(x, e, labels, live, batch) + _teach(e, x, labels, live, batch)) / 2
    loss = torch.where(batch.counts, loss, 0)
    return _rows.leave(op, loss, reduction, batch.counts, logits.dtype, sample_weight)


def _teach(x: Tensor, teacher: Tensor, labels: Labels, live: Tensor, batch: _Batch) -> Tensor:
    q = teacher.detach().sigmoid()
    cross = _rows.over_classes(-q * F.logsigmoid(x) - (1 - q) * F.logsigmoid(-x), live, batch.shard)
    fit = total(_rows.over_positives(labels, live, lambda score: -F.logsigmoid(score), x), batch.shard)
    return (fit + cross) / batch.n_classes + _surplus(x, live, batch)


class LabelEstimates(nn.Module):
    """A table of label estimates, one row per training example: the state of :func:`role_loss`.

    Args:
        n_rows: The number of training examples.
        n_classes: The number of classes.
        target: The observed labels of all examples, in any form of target. They start at probability 0.995, all others
            at random between 0.4 and 0.6.
        generator: The random numbers of the start.

    Example:
        >>> LabelEstimates(100, 4)(torch.tensor([7, 42])).shape
        torch.Size([2, 4])
    """

    logits: nn.Parameter

    def __init__(
        self,
        n_rows: int,
        n_classes: int,
        *,
        target: Target | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        wide = math.log(0.6 / 0.4)
        start = wide * (2 * torch.rand(n_rows, n_classes, generator=generator) - 1)
        if target is not None:
            known = _check.target("LabelEstimates", target.cpu() if isinstance(target, Tensor) else target, start)
            start = torch.where(known.positive(), math.log(0.995 / 0.005), start)
        self.logits = nn.Parameter(start)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the logits of the estimates of some examples, shape ``(*rows.shape, n_classes)``."""
        return self.logits[rows]

    def extra_repr(self) -> str:
        """Return the size of the table."""
        return f"n_rows={self.logits.shape[0]}, n_classes={self.logits.shape[1]}"


def entropy_max_loss(
    logits: Tensor,
    target: Target,
    *,
    alpha: float = 0.1,
    beta: float = 0.02,
    pseudo_target: Tensor | None = None,
    weight: Tensor | None = None,
    pos_weight: float | Tensor | None = None,
    sample_weight: Tensor | None = None,
    shard: ClassShard | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Compute the entropy-maximisation loss (Zhou et al., 2022): fit the labels, stay undecided about the rest.

    .. math:: -\sum_{j \in Y} \log p_j - \alpha \sum_{j \notin Y} H(p_j), \qquad
        H(p) = -p \log p - (1 - p) \log(1 - p),\; p = \sigma(x)

    Entries with a pseudo-label q (EM + APL) have :math:`-\beta [q \log p + (1 - q) \log(1 - p)]` for the entropy term.

    Args:
        logits: The scores, shape ``(*batch, n_classes)``; ``-inf`` rules a class out.
        target: Multi-hot of the shape of `logits` (1 is a label, 0 not observed, -1 left out; a number between 0 and 1
            takes that share of the label's term and the rest of the other), one class per row (``batch``), or index
            lists padded with -1 (``(*batch, m)``).
        alpha: The weight of the entropy; the paper has 0.2 (VOC), 0.1 (COCO, NUS-WIDE) and 0.01 (CUB).
        beta: The weight of pseudo-labels; the paper has 0.02 (VOC), 0.9 (COCO), 0.2 (NUS-WIDE) and 0.4 (CUB).
        pseudo_target: Probabilities for entries that were not observed, of the shape of `logits`, negative where there
            is none. The paper takes the model's own, after some epochs, for the lowest scores of each class.
        weight: One weight per class, ``(n_classes,)``, or any tensor that broadcasts to `logits`, for its terms.
        pos_weight: The same, only for the terms of labels; one number applies to all classes.
        sample_weight: One weight per row, shape ``batch``; the mean is weighted by it.
        shard: This rank's slice, when the classes are split over processes; index targets hold global classes.
        reduction: ``"none"`` is one loss per row, the sum over its classes; ``"mean"`` is over the rows with a known
            class, 0 without one.

    Returns:
        The loss, of the dtype of `logits`. It may be negative.

    Example:
        >>> entropy_max_loss(torch.tensor([[0.0, 0.0]]), torch.tensor([0]))  # (1 - 0.1) log 2
        tensor(0.6238)
    """
    op = "entropy_max_loss"
    entropy_weight = _check.number(op, "alpha", alpha, 0)
    pseudo_weight = _check.number(op, "beta", beta, 0)
    logits, shard, _ = unwrap(op, logits, shard)
    x, labels, live = _rows.enter(op, logits, target, shard, sample_weight)
    each, positives = _rows.class_weights(op, weight, pos_weight, x)
    yes, no = -F.logsigmoid(x), -F.logsigmoid(-x)
    held = _rows.capped(x)  # of an infinite score the entropy is 0, and not 0 times infinity
    p = held.sigmoid()
    silent = entropy_weight * (p * F.logsigmoid(held) + (1 - p) * F.logsigmoid(-held))
    if pseudo_target is not None:
        pseudo_target = local_part(pseudo_target)
        if not isinstance(pseudo_target, Tensor) or pseudo_target.shape != logits.shape:
            got = tuple(pseudo_target.shape) if isinstance(pseudo_target, Tensor) else type(pseudo_target).__name__
            raise ValueError(
                f"{op}: `pseudo_target` must have the shape of `logits`, {tuple(logits.shape)}, got {got}."
            )
        q = pseudo_target.detach().to(x.dtype)
        silent = torch.where(q >= 0, pseudo_weight * (q * yes + (1 - q) * no), silent)
    loss = _rows.over_classes(_rows.mixed(labels, live, _rows.weighed(yes, positives), silent), live, shard, each)
    return _rows.leave(op, loss, reduction, _rows.any_class(live, shard), logits.dtype, sample_weight)


def hill_loss(
    logits: Tensor,
    target: Target,
    *,
    lamb: float = 1.5,
    margin: float = 1.0,
    gamma: float = 2.0,
    weight: Tensor | None = None,
    pos_weight: float | Tensor | None = None,
    sample_weight: Tensor | None = None,
    shard: ClassShard | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Compute the Hill loss (Zhang et al., 2021), which gives up on negatives that look like missed labels.

    .. math:: -\sum_{j \in Y} (1 - m_j)^\gamma \log m_j + \sum_{j \notin Y} (\lambda - p_j) \, p_j^2, \qquad
        p = \sigma(x),\; m = \sigma(x - \text{margin})

    The gradient of a negative falls again as p nears 1: with :math:`\lambda = 1.5` it is 0 there.

    Args:
        logits: The scores, shape ``(*batch, n_classes)``; ``-inf`` rules a class out.
        target: Multi-hot of the shape of `logits` (1 is a label, 0 not observed, -1 left out; a number between 0 and 1
            takes that share of the label's term and the rest of the other), one class per row (``batch``), or index
            lists padded with -1 (``(*batch, m)``).
        lamb: :math:`\lambda`.
        margin: How far labels must be beyond 0.
        gamma: The focal exponent of the labels, at least 0.
        weight: One weight per class, ``(n_classes,)``, or any tensor that broadcasts to `logits`, for its terms.
        pos_weight: The same, only for the terms of labels; one number applies to all classes.
        sample_weight: One weight per row, shape ``batch``; the mean is weighted by it.
        shard: This rank's slice, when the classes are split over processes; index targets hold global classes.
        reduction: ``"none"`` is one loss per row, the sum over its classes; ``"sum"`` is the sum over all entries, as
            in the public code; ``"mean"`` is over the rows with a known class, 0 without one.

    Returns:
        The loss, of the dtype of `logits`. A row without labels has the loss of its negatives.

    Example:
        >>> hill_loss(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))  # log(2) / 4 + (1.5 - 0.5) / 4
        tensor(0.4233)
    """
    op = "hill_loss"
    height = _check.number(op, "lamb", lamb)
    shift = _check.number(op, "margin", margin)
    power = _check.number(op, "gamma", gamma, 0)
    logits, shard, _ = unwrap(op, logits, shard)
    x, labels, live = _rows.enter(op, logits, target, shard, sample_weight)
    each, positives = _rows.class_weights(op, weight, pos_weight, x)
    p = x.sigmoid()
    fit = _rows.weighed(focal_positive(x - shift, power), positives)
    miss = (_check.variable(height, x) - p) * p * p
    loss = _rows.over_classes(_rows.mixed(labels, live, fit, miss), live, shard, each)
    return _rows.leave(op, loss, reduction, _rows.any_class(live, shard), logits.dtype, sample_weight)


def focal_positive(z: Tensor, gamma: float) -> Tensor:
    """Return ``-(1 - p)^gamma log p`` for ``p = sigmoid(z)``."""
    weight = (gamma * F.logsigmoid(_rows.capped(-z))).exp()
    return torch.addcmul(z.new_zeros(()), weight, F.logsigmoid(z), value=-1)  # one pass less than with a minus


class AssumeNegativeLoss(LossModule):
    """Module form of :func:`assume_negative_loss`, which documents the arguments."""

    function = staticmethod(assume_negative_loss)

    def __init__(
        self,
        *,
        label_smoothing: float = 0.0,
        negative_weight: float = 1.0,
        weight: Tensor | None = None,
        pos_weight: float | Tensor | None = None,
        shard: ClassShard | None = None,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(
            label_smoothing=label_smoothing,
            negative_weight=negative_weight,
            weight=weight,
            pos_weight=pos_weight,
            shard=shard,
            reduction=reduction,
        )


class ExpectedPositiveLoss(LossModule):
    """Module form of :func:`expected_positive_loss`, which documents the arguments."""

    function = staticmethod(expected_positive_loss)

    def __init__(
        self,
        k: float | Tensor,
        *,
        weight: Tensor | None = None,
        shard: ClassShard | None = None,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(k=k, weight=weight, shard=shard, reduction=reduction)


class ROLELoss(FunctionModule):
    """Module form of :func:`role_loss`, which documents the arguments."""

    function = staticmethod(role_loss)

    def __init__(self, k: float | Tensor, *, shard: ClassShard | None = None, reduction: Reduction = "mean") -> None:
        super().__init__(k=k, shard=shard, reduction=reduction)

    def forward(
        self, logits: Tensor, target: Target, estimates: Tensor, *, sample_weight: Tensor | None = None
    ) -> Tensor:
        """Return the loss of a batch and of the estimates of its rows."""
        loss: Tensor = self._call(logits, target, estimates, sample_weight=sample_weight)
        return loss


class EntropyMaxLoss(FunctionModule):
    """Module form of :func:`entropy_max_loss`, which documents the arguments; pseudo-labels belong to a batch."""

    function = staticmethod(entropy_max_loss)

    def __init__(
        self,
        *,
        alpha: float = 0.1,
        beta: float = 0.02,
        weight: Tensor | None = None,
        pos_weight: float | Tensor | None = None,
        shard: ClassShard | None = None,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(alpha=alpha, beta=beta, weight=weight, pos_weight=pos_weight, shard=shard, reduction=reduction)

    def forward(
        self,
        logits: Tensor,
        target: Target,
        *,
        pseudo_target: Tensor | None = None,
        sample_weight: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of a batch."""
        loss: Tensor = self._call(logits, target, pseudo_target=pseudo_target, sample_weight=sample_weight)
        return loss


class HillLoss(LossModule):
    """Module form of :func:`hill_loss`, which documents the arguments."""

    function = staticmethod(hill_loss)

    def __init__(
        self,
        *,
        lamb: float = 1.5,
        margin: float = 1.0,
        gamma: float = 2.0,
        weight: Tensor | None = None,
        pos_weight: float | Tensor | None = None,
        shard: ClassShard | None = None,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(
            lamb=lamb,
            margin=margin,
            gamma=gamma,
            weight=weight,
            pos_weight=pos_weight,
            shard=shard,
            reduction=reduction,
        )
