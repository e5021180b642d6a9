"""Losses for incomplete labels: what is not observed may be a label that nobody wrote down.

A target of 1 is observed, 0 not observed, -1 left out altogether.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lastlayer import _check
from lastlayer._check import Labels, Reduction, Target
from lastlayer._module import FunctionModule
from lastlayer.loss import _rows


def assume_negative_loss(
    logits: Tensor,
    target: Target,
    *,
    label_smoothing: float = 0.0,
    negative_weight: float = 1.0,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Compute the binary cross-entropy that takes what is not observed for a negative (AN, AN-LS, WAN).

    .. math:: -\sum_{j \in Y} \big[(1 - \varepsilon) \log p_j + \varepsilon \log(1 - p_j)\big]
        - w \sum_{j \notin Y} \big[(1 - \varepsilon) \log(1 - p_j) + \varepsilon \log p_j\big], \qquad p = \sigma(x)

    The baselines of Cole et al. (2021): AN as it is, AN-LS with `label_smoothing`, WAN with
    ``negative_weight=1 / (n_classes - 1)``. They divide by ``n_classes`` on top. Mind that :math:`\varepsilon` is the
    whole part moved to the other side, twice that of :func:`~lastlayer.binary_loss`.

    Args:
        logits: The scores, shape ``(*batch, n_classes)``; ``-inf`` rules a class out.
        target: Multi-hot of the shape of `logits` (0 is not observed, hence assumed negative; -1 is left out; values
            between 0 and 1 are soft labels), one class a row (``batch``), or index lists padded with -1.
        label_smoothing: :math:`\varepsilon`.
        negative_weight: :math:`w`, at least 0.
        reduction: ``"none"`` is a loss a row, the sum over its classes; ``"mean"`` is over the rows with a known class,
            0 without one.

    Returns:
        The loss, of the dtype of `logits`.

    Example:
        >>> assume_negative_loss(torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([0]), negative_weight=0.5)
        tensor(0.8201)
    """
    op = "assume_negative_loss"
    smoothing = _check.number(op, "label_smoothing", label_smoothing, 0, 1)
    weight = _check.number(op, "negative_weight", negative_weight, 0)
    x, labels, live = _rows.enter(op, logits, target)
    yes, no = -F.logsigmoid(x), -F.logsigmoid(-x)
    if smoothing > 0:
        yes, no = yes + smoothing * (no - yes), no + smoothing * (yes - no)
    loss = _rows.over_classes(_rows.mixed(labels, live, yes, weight * no), live)
    return _rows.leave(op, loss, reduction, live.any(-1), logits.dtype)


def expected_positive_loss(
    logits: Tensor, target: Target, k: float | Tensor, *, reduction: Reduction = "mean"
) -> Tensor:
    r"""Compute expected positive regularisation (Cole et al., 2021): fit the positives, hold the mean count at `k`.

    .. math:: -\frac{1}{n} \sum_{j \in Y} \log p_j
        + \frac{1}{n^2} \Big(\frac{1}{B} \sum_{i=1}^{B} \sum_{j=1}^{n} p_{ij} - k\Big)^2, \qquad p = \sigma(x)

    for each of the B rows, with n classes: the mean is the paper's number. The second term is one number for the batch,
    so a row's loss depends on the others, and small batches hold each row nearer to `k` than large ones.

    Args:
        logits: The scores, shape ``(*batch, n_classes)``; ``-inf`` rules a class out.
        target: Multi-hot of the shape of `logits` (above 0 is positive, 0 not observed, -1 left out, also of the
            count), one class a row (``batch``), or index lists padded with -1 (``(*batch, m)``).
        k: The expected number of labels of a row; a number, or a tensor that broadcasts to ``batch``: its mean counts.
        reduction: ``"none"`` is a loss a row, the second term added to each; ``"mean"`` is over the rows with a known
            class, 0 without one.

    Returns:
        The loss, of the dtype of `logits`. A row without positives has the second term alone.

    Example:
        >>> expected_positive_loss(torch.zeros(1, 4), torch.tensor([0]), k=1)  # log(2) / 4 + (2 - 1)^2 / 16
        tensor(0.2358)
    """
    op = "expected_positive_loss"
    x, labels, live = _rows.enter(op, logits, target)
    size = _check.cardinality(op, k, logits).squeeze(-1)
    fit = _rows.over_positives(labels, live, lambda score: -F.logsigmoid(score), x) / x.shape[-1]
    loss = torch.where(live.any(-1), fit + _surplus(x, live, size), 0)
    return _rows.leave(op, loss, reduction, live.any(-1), logits.dtype)


def _surplus(x: Tensor, live: Tensor, size: Tensor) -> Tensor:
    """Return the square of the batch's mean surplus of expected positives, as a share of the classes."""
    counts = live.any(-1)
    surplus = torch.where(counts, torch.where(live, x.sigmoid(), 0).sum(-1) - size, 0).sum()
    return (surplus / counts.sum().clamp(min=1) / x.shape[-1]) ** 2


def role_loss(
    logits: Tensor, target: Target, estimates: Tensor, k: float | Tensor, *, reduction: Reduction = "mean"
) -> Tensor:
    r"""Compute regularised online label estimation (Cole et al., 2021): model and label estimates teach each other.

    .. math:: \tfrac{1}{2} \big[ L(p, \bar q) + L(q, \bar p) \big], \qquad
        L(p, q) = -\frac{1}{n} \Big( \sum_{j \in Y} \log p_j + \sum_j \big[q_j \log p_j + (1 - q_j) \log(1 - p_j)\big]
        \Big) + \frac{1}{n^2} \Big(\frac{1}{B} \sum_i \sum_j p_{ij} - k\Big)^2

    with p the model, q the estimates, and a bar for what is a constant to the gradient.

    Args:
        logits: The scores of the model, shape ``(*batch, n_classes)``; ``-inf`` rules a class out.
        target: Multi-hot of the shape of `logits` (above 0 is positive, 0 not observed, -1 left out), one class a row
            (``batch``), or index lists padded with -1 (``(*batch, m)``).
        estimates: The logits of the estimates for these rows, of the shape of `logits`: see :class:`LabelEstimates`.
        k: The expected number of labels of a row; a number, or a tensor that broadcasts to ``batch``.
        reduction: ``"none"`` is a loss a row, the batch's terms added to each; ``"mean"`` is over the rows with a known
            class, 0 without one, and the paper's number.

    Returns:
        The loss, of the dtype of `logits`, with gradients for `logits` and `estimates`.

    Example:
        >>> table = LabelEstimates(100, 4)
        >>> rows = torch.tensor([7, 42])
        >>> role_loss(torch.zeros(2, 4), torch.tensor([0, 2]), table(rows), k=1).shape
        torch.Size([])
    """
    op = "role_loss"
    x, labels, live = _rows.enter(op, logits, target)
    estimates = _check.logits(op, estimates, "estimates")
    if estimates.shape != logits.shape:
        raise ValueError(
            f"{op}: `estimates` must have the shape of `logits`, {tuple(logits.shape)}, got {tuple(estimates.shape)}. "
            "Take the rows of this batch from the table."
        )
    size = _check.cardinality(op, k, logits).squeeze(-1)
    e = torch.where(live, estimates.to(x.dtype), 0)
    loss = (_teach(x, e, labels, live, size) + _teach(e, x, labels, live, size)) / 2
    loss = torch.where(live.any(-1), loss, 0)
    return _rows.leave(op, loss, reduction, live.any(-1), logits.dtype)


def _teach(x: Tensor, teacher: Tensor, labels: Labels, live: Tensor, size: Tensor) -> Tensor:
    q = teacher.detach().sigmoid()
    cross = _rows.over_classes(-q * F.logsigmoid(x) - (1 - q) * F.logsigmoid(-x), live)
    fit = _rows.over_positives(labels, live, lambda score: -F.logsigmoid(score), x)
    return (fit + cross) / x.shape[-1] + _surplus(x, live, size)


class LabelEstimates(nn.Module):
    """A table of label estimates, one row for each training example: the state of :func:`role_loss`.

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
        """Say how large the table is."""
        return f"n_rows={self.logits.shape[0]}, n_classes={self.logits.shape[1]}"


def entropy_max_loss(
    logits: Tensor,
    target: Target,
    *,
    alpha: float = 0.1,
    beta: float = 0.02,
    pseudo_target: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Compute the entropy-maximisation loss (Zhou et al., 2022): fit the positives, stay undecided about the rest.

    .. math:: -\sum_{j \in Y} \log p_j - \alpha \sum_{j \notin Y} H(p_j), \qquad
        H(p) = -p \log p - (1 - p) \log(1 - p),\; p = \sigma(x)

    Entries with a pseudo-label q (EM + APL) have :math:`-\beta [q \log p + (1 - q) \log(1 - p)]` for the entropy term.

    Args:
        logits: The scores, shape ``(*batch, n_classes)``; ``-inf`` rules a class out.
        target: Multi-hot of the shape of `logits` (above 0 is positive, 0 not observed, -1 left out), one class a row
            (``batch``), or index lists padded with -1 (``(*batch, m)``).
        alpha: The weight of the entropy; the paper has 0.2 (VOC), 0.1 (COCO, NUS-WIDE) and 0.01 (CUB).
        beta: The weight of pseudo-labels; the paper has 0.02 (VOC), 0.9 (COCO), 0.2 (NUS-WIDE) and 0.4 (CUB).
        pseudo_target: Probabilities for entries that were not observed, of the shape of `logits`, negative where there
            is none. The paper takes the model's own, after some epochs, for the lowest scores of each class.
        reduction: ``"none"`` is a loss a row, the sum over its classes; ``"mean"`` is over the rows with a known class,
            0 without one.

    Returns:
        The loss, of the dtype of `logits`. It may be negative.

    Example:
        >>> entropy_max_loss(torch.tensor([[0.0, 0.0]]), torch.tensor([0]))  # (1 - 0.1) log 2
        tensor(0.6238)
    """
    op = "entropy_max_loss"
    entropy_weight = _check.number(op, "alpha", alpha, 0)
    pseudo_weight = _check.number(op, "beta", beta, 0)
    x, labels, live = _rows.enter(op, logits, target)
    yes, no = -F.logsigmoid(x), -F.logsigmoid(-x)
    p = x.sigmoid()
    silent = -entropy_weight * (p * yes + (1 - p) * no)
    if pseudo_target is not None:
        if not isinstance(pseudo_target, Tensor) or pseudo_target.shape != logits.shape:
            got = tuple(pseudo_target.shape) if isinstance(pseudo_target, Tensor) else type(pseudo_target).__name__
            raise ValueError(
                f"{op}: `pseudo_target` must have the shape of `logits`, {tuple(logits.shape)}, got {got}."
            )
        q = pseudo_target.detach().to(x.dtype)
        silent = torch.where(q >= 0, pseudo_weight * (q * yes + (1 - q) * no), silent)
    loss = _rows.over_classes(torch.where(labels.positive(), yes, silent), live)
    return _rows.leave(op, loss, reduction, live.any(-1), logits.dtype)


def hill_loss(
    logits: Tensor,
    target: Target,
    *,
    lamb: float = 1.5,
    margin: float = 1.0,
    gamma: float = 2.0,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Compute the Hill loss (Zhang et al., 2021), which gives up on negatives that look like missed labels.

    .. math:: -\sum_{j \in Y} (1 - m_j)^\gamma \log m_j + \sum_{j \notin Y} (\lambda - p_j) \, p_j^2, \qquad
        p = \sigma(x),\; m = \sigma(x - \text{margin})

    The gradient of a negative falls again as p nears 1: with :math:`\lambda = 1.5` it is 0 there.

    Args:
        logits: The scores, shape ``(*batch, n_classes)``; ``-inf`` rules a class out.
        target: Multi-hot of the shape of `logits` (0 is not observed, -1 left out; a value between 0 and 1 takes that
            share of the positive term and the rest of the other), one class a row, or index lists padded with -1.
        lamb: :math:`\lambda`.
        margin: How far positives must be beyond 0.
        gamma: The focal exponent of the positives, at least 0.
        reduction: ``"none"`` is a loss a row, the sum over its classes; ``"sum"`` is the sum over all entries, as in
            the public code; ``"mean"`` is over the rows with a known class, 0 without one.

    Returns:
        The loss, of the dtype of `logits`. A row without positives has the loss of its negatives.

    Example:
        >>> hill_loss(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))  # log(2) / 4 + (1.5 - 0.5) / 4
        tensor(0.4233)
    """
    op = "hill_loss"
    height = _check.number(op, "lamb", lamb)
    shift = _check.number(op, "margin", margin)
    power = _check.number(op, "gamma", gamma, 0)
    x, labels, live = _rows.enter(op, logits, target)
    p = x.sigmoid()
    loss = _rows.mixed(labels, live, focal_positive(x - shift, power), (height - p) * p * p)
    return _rows.leave(op, _rows.over_classes(loss, live), reduction, live.any(-1), logits.dtype)


def focal_positive(z: Tensor, gamma: float) -> Tensor:
    """Return ``-(1 - p)^gamma log p`` for ``p = sigmoid(z)``."""
    return -(gamma * F.logsigmoid(-z)).exp() * F.logsigmoid(z)


class AssumeNegativeLoss(FunctionModule):
    """Module form of :func:`assume_negative_loss`, which documents the arguments."""

    function = staticmethod(assume_negative_loss)

    def __init__(
        self, *, label_smoothing: float = 0.0, negative_weight: float = 1.0, reduction: Reduction = "mean"
    ) -> None:
        super().__init__(label_smoothing=label_smoothing, negative_weight=negative_weight, reduction=reduction)


class ExpectedPositiveLoss(FunctionModule):
    """Module form of :func:`expected_positive_loss`, which documents the arguments."""

    function = staticmethod(expected_positive_loss)

    def __init__(self, k: float | Tensor, *, reduction: Reduction = "mean") -> None:
        super().__init__(k=k, reduction=reduction)


class ROLELoss(FunctionModule):
    """Module form of :func:`role_loss`; call it as ``loss(logits, target, estimates)``."""

    function = staticmethod(role_loss)

    def __init__(self, k: float | Tensor, *, reduction: Reduction = "mean") -> None:
        super().__init__(k=k, reduction=reduction)


class EntropyMaxLoss(FunctionModule):
    """Module form of :func:`entropy_max_loss`; pseudo-labels belong to a batch, so the function alone takes them."""

    function = staticmethod(entropy_max_loss)

    def __init__(self, *, alpha: float = 0.1, beta: float = 0.02, reduction: Reduction = "mean") -> None:
        super().__init__(alpha=alpha, beta=beta, reduction=reduction)


class HillLoss(FunctionModule):
    """Module form of :func:`hill_loss`, which documents the arguments."""

    function = staticmethod(hill_loss)

    def __init__(
        self, *, lamb: float = 1.5, margin: float = 1.0, gamma: float = 2.0, reduction: Reduction = "mean"
    ) -> None:
        super().__init__(lamb=lamb, margin=margin, gamma=gamma, reduction=reduction)
