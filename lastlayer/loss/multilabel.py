"""Multi-label losses: two-way, asymmetric, and two baselines: one softmax per row, and one sigmoid per class."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lastlayer import _check
from lastlayer._check import Labels, Reduction, Target
from lastlayer._module import LossModule
from lastlayer._threshold.compiled import by_kernels, compiled, fused, on_gpu
from lastlayer._threshold.dispatch import recorded
from lastlayer.loss import _rows
from lastlayer.loss._gradient import End, at_once, per_class, with_shared_term
from lastlayer.loss._whole import whole_loss
from lastlayer.shard import ClassShard, Ranks, Replicas, averaged, total, unwrap


@whole_loss
def two_way_loss(
    logits: Tensor,
    target: Target,
    *,
    positive_temperature: float = 4.0,
    negative_temperature: float = 1.0,
    margin: float = 0.0,
    per: Literal["sample", "class", "both"] = "both",
    sample_weight: Tensor | None = None,
    shard: ClassShard | None = None,
    data_group: Any = None,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Compute the two-way loss (Kobayashi, 2023): every positive above every negative, in rows and in columns.

    .. math:: \ell(P, N) = \mathrm{softplus}\Big(T_N \log \sum_{n \in N} e^{x_n / T_N}
        + T_P \log \sum_{p \in P} e^{-x_p / T_P} + \epsilon\Big)

    For a sample, P and N are the positive and negative classes of its row; for a class, the positive and negative
    samples of its column in the batch. The loss is the mean over the samples with a positive, plus the mean over the
    classes with a positive. With one positive per row and both temperatures 1, the sample term is the softmax
    cross-entropy. A constant added to a row does not change its sample term, so there is no absolute threshold between
    labels and the rest: decode by rank, or choose a threshold on held-out data. The class term depends on the batch;
    with one row it is 0.

    Args:
        logits: The scores, shape ``(*batch, n_classes)``; ``-inf`` rules a class out.
        target: Multi-hot of the shape of `logits` (1 is positive, 0 negative, -1 unknown and left out; a number t in
            between is in both sums, weighted by t and by 1 - t), one class per row (``batch``), or index lists padded
            with -1 (``(*batch, m)``).
        positive_temperature: :math:`T_P`; above 1, every positive gets a share of the gradient.
        negative_temperature: :math:`T_N`.
        margin: :math:`\epsilon`, by how much positives should lead; the paper's margin form has both temperatures 1.
        per: ``"sample"`` for rows, ``"class"`` for columns, ``"both"`` for their sum.
        sample_weight: One weight per row, shape ``batch``; a weight of 2 counts as two equal rows, in columns too.
        shard: This rank's slice, when the classes are split over processes; index targets hold global classes.
        data_group: The process group whose ranks hold other rows of the batch and the same classes. The class term is
            then that of all their rows, the same on every rank; its gradient is scaled by the number of ranks, so that
            the mean over ranks that DDP or FSDP takes is the gradient of the whole batch. ``None``: of the rows here.
        reduction: ``"none"`` is one loss per row; with ``per="both"`` the class term of the batch is added to each row
            that has a positive, and with ``per="class"`` it is one loss per class (of this rank). ``"mean"`` is over
            the rows, or classes, with a positive; 0 without one. ``"sum"`` is the sum of ``"none"``.

    Returns:
        The loss, of the dtype of `logits`. A row or column without a positive has loss 0 and does not count in the
        mean; one without a negative has loss 0 and counts.

    Example:
        >>> logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0]])
        >>> two_way_loss(logits, torch.tensor([[0, 1], [1, -1]]), per="sample", reduction="none")
        tensor([1.5440, 0.1698])
    """
    op = "two_way_loss"
    _check.choice(op, "per", per, ("sample", "class", "both"))
    _check.choice(op, "reduction", reduction, ("none", "mean", "sum"))
    form = _Form(
        _temperature(op, "positive_temperature", positive_temperature),
        _temperature(op, "negative_temperature", negative_temperature),
        _check.number(op, "margin", margin),
    )
    logits, shard, _ = unwrap(op, logits, shard)
    x, labels = _rows.given(op, logits, target, shard, sample_weight)
    if per == "both" and shard is None and data_group is None:
        whole = _by_kernels(End(op, reduction, logits.dtype, sample_weight), x, labels, form)
        if whole is not None:
            return whole
        rows = _check.weights(op, "sample_weight", sample_weight, x, x.shape[:-1], "Give one weight per row.")
        both = _both_at_once(x, labels, form, rows)
        if both is not None:
            return _rows.leave(op, both[0], reduction, both[1], logits.dtype, sample_weight)
    if per != "class":
        loss, counts = _per_sample(x, labels, form, shard)
        if per == "sample":
            return _rows.leave(op, loss, reduction, counts, logits.dtype, sample_weight)
    # The classes of a column are on one rank: only the means go over the ranks of `shard`.
    data = None if data_group is None else Replicas(data_group)
    rows = _check.weights(op, "sample_weight", sample_weight, x, x.shape[:-1], "Give one weight per row.")
    by_class, occurs = _per_class(x, labels, form, rows, data)
    if per == "class" and (reduction == "none" or shard is None):
        return _rows.leave(op, by_class, reduction, occurs, logits.dtype)
    summed, classes = total(by_class.sum(), shard), total(occurs.sum().to(x.dtype), shard)
    mean = summed / classes.clamp(min=1)
    if per == "class":
        return _rows.leave(op, summed if reduction == "sum" else mean, "sum", None, logits.dtype)
    return _rows.leave(op, loss + torch.where(counts, mean, 0), reduction, counts, logits.dtype, sample_weight)


def _temperature(op: str, name: str, value: float) -> float:
    value = _check.number(op, name, value)
    if not 0 < value < math.inf:
        raise ValueError(f"{op}: `{name}` must be positive and finite, got {value}.")
    return value


class _Form(NamedTuple):
    """The temperatures and the margin."""

    warm: float
    cool: float
    margin: float


class _Sides(NamedTuple):
    """Scores, which of them are positives and negatives, and the weights of these; None: all 1."""

    x: Tensor
    positive: Tensor
    negative: Tensor
    up: Tensor | None
    down: Tensor | None


def _sides(x: Tensor, live: Tensor, labels: Labels) -> _Sides:
    if not _rows.soft(labels) or _rows.hard(labels):
        positive = labels.positive()
        return _Sides(x, live & positive, live & ~positive, None, None)
    share = _rows.share(labels, live, x.dtype)
    return _Sides(x, live & (share > 0), live & (share < 1), share, 1 - share)


def _per_sample(x: Tensor, labels: Labels, form: _Form, shard: ClassShard | None) -> tuple[Tensor, Tensor]:
    """Return the loss of each row, and whether it has a positive."""

    def plain(x: Tensor) -> tuple[Tensor, Tensor]:
        return _positives_above(_sides(*_rows.taking_part(x, labels), labels), form, shard)

    found = None if shard is not None else at_once("two_way_rows", x, labels, form, lambda x: plain(x)[0])
    return plain(x) if found is None else (found.loss, found.counts)


def _per_class(
    x: Tensor, labels: Labels, form: _Form, rows: Tensor | None, data: Replicas | None
) -> tuple[Tensor, Tensor]:
    """Return the loss of each column of the batch, and whether it has a positive; `rows` are weights of the rows."""

    def plain(x: Tensor) -> tuple[Tensor, Tensor]:
        x, live = _rows.taking_part(x, labels)
        return _positives_above(_columns(_sides(averaged(x, data), live, labels), rows), form, data)

    found = None
    if data is None:
        found = at_once("two_way_columns", x, labels, form, lambda x: plain(x)[0], first=rows)
    return plain(x) if found is None else (found.loss, found.counts)


def _by_kernels(end: End, x: Tensor, labels: Labels, form: _Form) -> Tensor | None:
    """Return the reduced loss of rows and columns by kernels for the whole batch, None where these do not apply."""
    if not (end.number and on_gpu(x) and compiled(x, labels.dense, labels.index)):
        return None
    kernels, mean = fused(x), end.reduction == "mean"
    if not kernels.sums(x.shape[:-1].numel(), x.shape[-1], columns=True):
        return None

    def forward(x: Tensor, gradient: bool) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = kernels.two_way(x, labels, form, mean)
        return found

    def backward(upstream: Tensor, x: Tensor, *found: Tensor) -> Tensor:
        grad: Tensor = kernels.two_way_backward(x, labels, form, *found, upstream)
        return grad

    def plain(x: Tensor, *_: Tensor) -> Tensor:
        loss, counts = _both(x, labels, form, None)
        return _check.reduced(end.op, loss, end.reduction, counts)

    return end.of_number(by_kernels(x.contiguous(), forward, backward, plain))


def _both(x: Tensor, labels: Labels, form: _Form, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the loss of each row with that of the columns, and which count, by differentiable operations."""
    sides = _sides(*_rows.taking_part(x, labels), labels)
    loss, counts = _positives_above(sides, form, None)
    by_class, occurs = _positives_above(_columns(sides, rows), form, None)
    return loss + torch.where(counts, by_class.sum() / occurs.sum().clamp(min=1), 0), counts


def _both_at_once(x: Tensor, labels: Labels, form: _Form, rows: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Return the loss of each row with that of the columns, by compiled operations, None where plain torch must."""
    if not compiled(x, labels.dense, labels.index, rows):
        return None
    wanted, fixed, run = recorded(x), x.detach(), fused(x).run
    with torch.no_grad():
        found = run("two_way_rows", fixed, labels, form, gradient=wanted)
        columns = None if found is None else run("two_way_columns", fixed, labels, form, first=rows, gradient=wanted)
        if columns is None:
            return None
        classes = columns.counts.sum().clamp(min=1)
        loss = found.loss + torch.where(found.counts, columns.loss.sum() / classes, 0)
        if not wanted:
            return loss, found.counts
        term, part = columns.out / classes, found.counts.to(x.dtype)
    plain = lambda x: _both(x, labels, form, rows)[0]  # noqa: E731
    return with_shared_term(x, loss, found.out, part, term, plain), found.counts


def _columns(sides: _Sides, rows: Tensor | None) -> _Sides:
    """Return the columns of the batch as rows; the weights of rows become those of their entries."""
    x, positive, negative, up, down = sides
    if rows is not None:
        rows = rows.expand(x.shape[:-1]).unsqueeze(-1).expand(x.shape)
        positive, negative = positive & (rows > 0), negative & (rows > 0)
        up, down = rows if up is None else rows * up, rows if down is None else rows * down

    def turned(t: Tensor) -> Tensor:
        return t.unsqueeze(0).flatten(0, -2).transpose(0, 1)

    weights = (None if t is None else turned(t) for t in (up, down))
    return _Sides(turned(x), turned(positive), turned(negative), *weights)


def _positives_above(sides: _Sides, form: _Form, shard: Ranks | None) -> tuple[Tensor, Tensor]:
    """Return the loss of each row, and whether it has a positive, by differentiable operations."""
    lowest, below, has_positive = _rows.logsumexp(-sides.x, sides.positive, shard, form.warm, sides.up)
    negative = sides.negative & has_positive.unsqueeze(-1)  # else an infinite score would have a gradient of nan
    highest, above, has_negative = _rows.logsumexp(sides.x, negative, shard, form.cool, sides.down)
    active = has_positive & has_negative
    z = torch.where(active, (highest + lowest).squeeze(-1) + above + below + form.margin, 0)
    return torch.where(active, -F.logsigmoid(-z), 0), has_positive


@whole_loss
def asymmetric_loss(
    logits: Tensor,
    target: Target,
    *,
    gamma_positive: float = 1.0,
    gamma_negative: float = 4.0,
    clip: float = 0.05,
    detach_weight: bool = False,
    weight: Tensor | None = None,
    pos_weight: float | Tensor | None = None,
    sample_weight: Tensor | None = None,
    shard: ClassShard | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Compute the asymmetric loss (Ridnik et al., 2021), with separate focal weights for positives and negatives.

    .. math:: -\sum_{j \in Y} (1 - p_j)^{\gamma_+} \log p_j - \sum_{j \notin Y} m_j^{\gamma_-} \log(1 - m_j),
        \qquad p = \sigma(x),\; m_j = \max(p_j - c, 0)

    Negatives that are already easy (:math:`p` below `clip`) have no loss and no gradient. With both gammas and `clip` 0
    it is :func:`binary_loss`. The public code clamps the logarithms at a small number and this function does not: the
    two differ where a probability is below 1e-8, and there this gradient does not vanish.

    Args:
        logits: The scores, shape ``(*batch, n_classes)``; ``-inf`` rules a class out.
        target: Multi-hot of the shape of `logits` (-1 is unknown and left out; a number between 0 and 1 takes that
            share of the positive term and the rest of the negative one), one class per row, or index lists padded
            with -1.
        gamma_positive: :math:`\gamma_+`, at least 0.
        gamma_negative: :math:`\gamma_-`, at least 0.
        clip: :math:`c`, from 0 to below 1.
        detach_weight: Whether the focal weights are constants for the gradient.
        weight: One weight per class, ``(n_classes,)``, or any tensor that broadcasts to `logits`, for its terms.
        pos_weight: The same, only for the positive terms; one number applies to all classes.
        sample_weight: One weight per row, shape ``batch``; the mean is weighted by it.
        shard: This rank's slice, when the classes are split over processes; index targets hold global classes.
        reduction: ``"none"`` is one loss per row, the sum over its classes; ``"sum"`` is the sum over all entries, as
            in the public code; ``"mean"`` is over the rows with a known class, 0 without one.

    Returns:
        The loss, of the dtype of `logits`. A row without positives has the loss of its negatives.

    Example:
        >>> asymmetric_loss(torch.tensor([[2.0, 1.0, 0.0, -4.0]]), torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
        tensor(0.2855)
    """
    op = "asymmetric_loss"
    plus = _check.number(op, "gamma_positive", gamma_positive, 0)
    minus = _check.number(op, "gamma_negative", gamma_negative, 0)
    cut = _check.number(op, "clip", clip, 0)
    if not cut < 1:
        raise ValueError(f"{op}: `clip` must be below 1, got {clip}. No negative would be left.")
    logits, shard, _ = unwrap(op, logits, shard)
    x, labels = _rows.given(op, logits, target, shard, sample_weight)
    each, positives = _rows.class_weights(op, weight, pos_weight, x)

    def plain(x: Tensor) -> Tensor:
        x, live = _rows.taking_part(x, labels)
        gain = -F.logsigmoid(x)
        if plus > 0:  # of an infinite score the power 0 would be nan
            gain = _focal((plus * F.logsigmoid(_rows.capped(-x))).exp(), detach_weight) * gain
        gain = _rows.weighed(gain, positives)
        loss = _rows.mixed(labels, live, gain, _shifted_negatives(x, minus, cut, detach_weight))
        return _rows.over_classes(loss, live, shard, each)

    numbers = (plus, minus, cut, float(not detach_weight))
    end = End(op, reduction, logits.dtype, sample_weight)
    return per_class(end, "asymmetric", x, labels, numbers, plain, shard, each, positives)


def _focal(weight: Tensor, detach: bool) -> Tensor:
    return weight.detach() if detach else weight


def _shifted_negatives(x: Tensor, gamma: float, clip: float, detach: bool) -> Tensor:
    """Return ``-m^gamma log(1 - m)`` for ``m = max(sigmoid(x) - clip, 0)``."""
    if clip == 0:
        return -_focal((gamma * F.logsigmoid(_rows.capped(x))).exp(), detach) * F.logsigmoid(-x)
    cut, power = _check.variable(clip, x), _check.variable(gamma, x)
    log_cut = cut.log() if isinstance(cut, Tensor) else torch.full_like(x, math.log(clip))
    easy = x.sigmoid() <= cut
    m = torch.where(easy, cut, x.sigmoid() - cut)  # any number inside (0, 1) where the loss is 0
    # 1 - m from the side that does not cancel.
    log = torch.where(x > 0, torch.logaddexp(F.logsigmoid(-x), log_cut), torch.log1p(-torch.where(x > 0, cut, m)))
    return torch.where(easy, 0, -_focal(m**power, detach) * log)


def multihot_softmax_loss(
    logits: Tensor,
    target: Target,
    *,
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
    sample_weight: Tensor | None = None,
    shard: ClassShard | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Compute the cross-entropy of the softmax to the row's labels, each with an equal share.

    .. math:: -\sum_j w_j \, q_j \log \mathrm{softmax}(x)_j, \qquad q_j = (1 - \varepsilon) \frac{t_j}{\sum_i t_i}
        + \frac{\varepsilon}{n}

    For one label per row and without weights it is ``torch.nn.functional.cross_entropy``. With weights the mean is over
    rows, as there for targets that are probabilities; for class indices torch divides by the weights of the labels.

    Args:
        logits: The scores, shape ``(*batch, n_classes)``; ``-inf`` rules a class out.
        target: Multi-hot of the shape of `logits` (-1 is unknown and left out of the softmax too; soft labels share in
            proportion), one class per row, or index lists padded with -1.
        label_smoothing: :math:`\varepsilon`, the part spread evenly over the classes that take part.
        weight: One weight :math:`w` per class, ``(n_classes,)``, or any tensor that broadcasts to `logits`.
        sample_weight: One weight per row, shape ``batch``; the mean is weighted by it.
        shard: This rank's slice, when the classes are split over processes; index targets hold global classes.
        reduction: ``"none"`` is one loss per row; ``"mean"`` is over the rows with a label, 0 without one.

    Returns:
        The loss, of the dtype of `logits`. A row without a label has loss 0.

    Example:
        >>> multihot_softmax_loss(torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([[0, 1]]))
        tensor(0.9402)
    """
    op = "multihot_softmax_loss"
    smoothing = _check.number(op, "label_smoothing", label_smoothing, 0, 1)
    logits, shard, _ = unwrap(op, logits, shard)
    x, labels, live = _rows.enter(op, logits, target, shard, sample_weight)
    each = _rows.class_weight(op, "weight", weight, x)
    each = None if each is None else each.expand(x.shape)
    peak, rest, _ = _rows.logsumexp(x, live, shard)
    if labels.dense is None:  # gather: nothing of the size of the logits
        here = live.to(x.dtype)
        mass = labels.sum_over_positives(lambda here: here, here)
        held = mass if each is None else labels.sum_over_positives(torch.mul, here, each)
        parts = (here, x, peak) if each is None else (here, x, peak, each)
        hit = labels.sum_over_positives(lambda here, score, top, w=1.0: here * w * (score - top), *parts)
    else:
        part = torch.where(live & (labels.dense > 0), labels.dense.to(x.dtype), 0)
        mass, part = part.sum(-1), part if each is None else part * each
        held, hit = part.sum(-1), (part * (x - peak)).sum(-1)
    mass, held, hit = (total(value, shard) for value in (mass, held, hit))
    counts = mass > 0
    mass = torch.where(counts, mass, 1)
    loss = held / mass * rest - hit / mass
    if smoothing > 0:
        n = total(live.sum(-1).to(x.dtype), shard).clamp(min=1)
        held = n if each is None else _rows.over_classes(each, live, shard)
        even = held / n * rest - _rows.over_classes(x - peak, live, shard, each) / n
        loss = (1 - smoothing) * loss + smoothing * even
    return _rows.leave(op, torch.where(counts, loss, 0), reduction, counts, logits.dtype, sample_weight)


@whole_loss
def binary_loss(
    logits: Tensor,
    target: Target,
    *,
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
    pos_weight: float | Tensor | None = None,
    sample_weight: Tensor | None = None,
    shard: ClassShard | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Compute the binary cross-entropy: one sigmoid per class, each class on its own.

    .. math:: -\sum_j w_j \big[ w^+_j q_j \log \sigma(x_j) + (1 - q_j) \log \sigma(-x_j) \big],
        \qquad q_j = (1 - \varepsilon) t_j + \varepsilon / 2

    The sum over the classes of ``torch.nn.functional.binary_cross_entropy_with_logits``; divide the mean by
    ``n_classes`` for torch's mean over entries.

    Args:
        logits: The scores, shape ``(*batch, n_classes)``; ``-inf`` rules a class out.
        target: Multi-hot of the shape of `logits` (-1 is unknown and left out; numbers between 0 and 1 are soft
            labels), one class per row, or index lists padded with -1.
        label_smoothing: :math:`\varepsilon`, the part moved to an even chance.
        weight: One weight :math:`w` per class, ``(n_classes,)``, or any tensor that broadcasts to `logits`.
        pos_weight: The same, :math:`w^+`, only for the positive terms; one number applies to all classes. Above 1 it
            raises recall at the cost of precision.
        sample_weight: One weight per row, shape ``batch``; the mean is weighted by it.
        shard: This rank's slice, when the classes are split over processes; index targets hold global classes.
        reduction: ``"none"`` is one loss per row, the sum over its classes; ``"mean"`` is over the rows with a known
            class, 0 without one.

    Returns:
        The loss, of the dtype of `logits`. A row without positives has the loss of its negatives.

    Example:
        >>> binary_loss(torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([[1.0, 0.0, -1.0, 0.0]]))
        tensor(1.7535)
    """
    op = "binary_loss"
    smoothing = _check.number(op, "label_smoothing", label_smoothing, 0, 1)
    logits, shard, _ = unwrap(op, logits, shard)
    x, labels = _rows.given(op, logits, target, shard, sample_weight)
    each, positives = _rows.class_weights(op, weight, pos_weight, x)

    def plain(x: Tensor) -> Tensor:
        x, live = _rows.taking_part(x, labels)
        yes, no = _rows.weighed(-F.logsigmoid(x), positives), -F.logsigmoid(-x)
        loss = _rows.mixed(labels, live, yes, no)
        if smoothing > 0:
            loss = (1 - smoothing) * loss + smoothing / 2 * (yes + no)
        return _rows.over_classes(loss, live, shard, each)

    # The compiled loss weighs the part of a label by `pos_weight`, not what smoothing gives to the other classes.
    name = "logistic" if smoothing == 0 or positives is None else ""
    numbers = (1 - smoothing / 2, smoothing / 2, smoothing / 2, 1 - smoothing / 2)
    end = End(op, reduction, logits.dtype, sample_weight)
    return per_class(end, name, x, labels, numbers, plain, shard, each, positives)


class TwoWayLoss(LossModule):
    """Module form of :func:`two_way_loss`, which documents the arguments."""

    function = staticmethod(two_way_loss)

    def __init__(
        self,
        *,
        positive_temperature: float = 4.0,
        negative_temperature: float = 1.0,
        margin: float = 0.0,
        per: Literal["sample", "class", "both"] = "both",
        shard: ClassShard | None = None,
        data_group: Any = None,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(
            positive_temperature=positive_temperature,
            negative_temperature=negative_temperature,
            margin=margin,
            per=per,
            shard=shard,
            data_group=data_group,
            reduction=reduction,
        )


class AsymmetricLoss(LossModule):
    """Module form of :func:`asymmetric_loss`, which documents the arguments."""

    function = staticmethod(asymmetric_loss)

    def __init__(
        self,
        *,
        gamma_positive: float = 1.0,
        gamma_negative: float = 4.0,
        clip: float = 0.05,
        detach_weight: bool = False,
        weight: Tensor | None = None,
        pos_weight: float | Tensor | None = None,
        shard: ClassShard | None = None,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(
            gamma_positive=gamma_positive,
            gamma_negative=gamma_negative,
            clip=clip,
            detach_weight=detach_weight,
            weight=weight,
            pos_weight=pos_weight,
            shard=shard,
            reduction=reduction,
        )


class MultihotSoftmaxLoss(LossModule):
    """Module form of :func:`multihot_softmax_loss`, which documents the arguments."""

    function = staticmethod(multihot_softmax_loss)

    def __init__(
        self,
        *,
        label_smoothing: float = 0.0,
        weight: Tensor | None = None,
        shard: ClassShard | None = None,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(label_smoothing=label_smoothing, weight=weight, shard=shard, reduction=reduction)


class BinaryLoss(LossModule):
    """Module form of :func:`binary_loss`, which documents the arguments."""

    function = staticmethod(binary_loss)

    def __init__(
        self,
        *,
        label_smoothing: float = 0.0,
        weight: Tensor | None = None,
        pos_weight: float | Tensor | None = None,
        shard: ClassShard | None = None,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(
            label_smoothing=label_smoothing,
            weight=weight,
            pos_weight=pos_weight,
            shard=shard,
            reduction=reduction,
        )
