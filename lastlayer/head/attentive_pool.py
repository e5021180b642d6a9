"""Multiple-instance pooling: from the logits of instances to those of their bag, by attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lastlayer import _check
from lastlayer._check import Reduction, Target
from lastlayer.loss.multilabel import binary_loss


def attentive_pool(
    logits: Tensor, attention_logits: Tensor, mask: Tensor | None = None, *, modality_logits: Tensor | None = None
) -> Tensor:
    r"""Pool the logits of the instances of a bag into one per class (attentive MMIL pooling; Tian, Li and Xu, 2020).

    .. math:: p_c = \sum_t w_{tc}\, \sigma(x_{tc}), \qquad w_{\cdot c} = \mathrm{softmax}_t(a_{\cdot c}),
              \qquad \text{returned as}\ \log p_c - \log (1 - p_c)

    A bag is labelled, its instances are not. Each class has weights of its own over the instances. The result is a
    logit, exact in both tails, so that every loss of the package applies to bags. With `modality_logits` :math:`b` the
    instances have several modalities :math:`m`, and the weights :math:`w_{tmc}` are proportional to
    :math:`\mathrm{softmax}_t(a)_{tmc}\, \mathrm{softmax}_m(b)_{tmc}`. As published the product is not divided by its
    sum over `t` and `m`, which may be anything up to the number of modalities, so that "probabilities" above 1 occur;
    here they are averages.

    Args:
        logits: The scores of the instances, shape ``(*batch, n_instances, n_classes)``, or with modalities
            ``(*batch, n_instances, n_modalities, n_classes)``; ``-inf`` is a probability of 0, and rules a class out
            that has it in all instances.
        attention_logits: The scores :math:`a` of the weights over the instances, of a shape that broadcasts to that of
            `logits`: zeros give the mean of the probabilities.
        mask: True where there is an instance, shape ``(*batch, n_instances)``, or with modalities
            ``(*batch, n_instances, n_modalities)``.
        modality_logits: The scores :math:`b` of the weights over the modalities, of a shape that broadcasts to that of
            `logits`.

    Returns:
        The logits of the bags, shape ``(*batch, n_classes)``, of the dtype of `logits`. A bag without an instance has
        ``-inf``: it has no label.

    Example:
        >>> logits = torch.tensor([[2.0, -3.0], [-1.0, -3.0]])  # two instances, two classes
        >>> attentive_pool(logits, torch.tensor([[5.0, 0.0], [0.0, 0.0]])).sigmoid()
        tensor([0.8767, 0.0474])
    """
    op = "attentive_pool"
    x = _check.logits(op, logits)
    inner = 1 if modality_logits is None else 2
    if x.ndim < inner + 1:
        shape = "(*batch, n_instances, n_classes)" if inner == 1 else "(*batch, n_instances, n_modalities, n_classes)"
        raise ValueError(f"{op}: `logits` must have the shape {shape}, got {tuple(x.shape)}.")
    wide = x.to(_check.work_dtype(x))
    there = _present(op, mask, x)
    weight = _weight(op, "attention_logits", attention_logits, wide, there, -1 - inner)
    if modality_logits is not None:
        weight = weight + _weight(op, "modality_logits", modality_logits, wide, there, -2)
    weight, wide = weight.flatten(-1 - inner, -2), wide.flatten(-1 - inner, -2)
    absent = torch.zeros_like(wide, dtype=torch.bool) if there is None else ~there.flatten(-1 - inner, -2)
    none = (absent | (wide == -torch.inf)).all(-2, keepdim=True)  # the class is ruled out, or there is no instance
    wide = torch.where(absent | none, 0, wide)  # a constant, so that no gradient is nan
    log_w = weight.log_softmax(-2)
    pooled = [torch.logsumexp(log_w + F.logsigmoid(sign * wide), -2) for sign in (1, -1)]
    bag = torch.where(none.squeeze(-2), -torch.inf, pooled[0] - pooled[1])
    return bag.to(logits.dtype)


def _present(op: str, mask: Any, x: Tensor) -> Tensor | None:
    """Check the mask of the instances, and give it a class dimension."""
    if not isinstance(mask, Tensor):
        return _check.mask(op, mask, x)
    if mask.ndim == 0 or mask.shape[-1] != x.shape[-2]:
        raise ValueError(
            f"{op}: `mask` must have the shape {tuple(x.shape[:-1])}, one entry per instance, got {tuple(mask.shape)}."
        )
    return _check.mask(op, mask[..., None], x)


def _weight(op: str, name: str, value: Tensor, x: Tensor, there: Tensor | None, dim: int) -> Tensor:
    """Return the log-weights along a dimension; those of absent instances are far below all others."""
    scores = _check.logits(op, value, name)
    _check.on_device(op, name, scores, x)
    try:
        scores = scores.to(x.dtype).expand(x.shape)
    except RuntimeError:
        raise ValueError(
            f"{op}: `{name}` must broadcast to the shape of `logits`, {tuple(x.shape)}, got {tuple(value.shape)}."
        ) from None
    if there is None:
        return scores.log_softmax(dim)
    lowest = torch.finfo(x.dtype).min / 4  # finite, so that a bag without instances has a gradient of 0
    return torch.where(there, torch.where(there, scores, lowest).log_softmax(dim), lowest)


class AttentivePoolHead(nn.Module):
    r"""Label bags of instances, and through them the instances, by :func:`attentive_pool` (Tian, Li and Xu, 2020).

    One linear layer gives the logits of an instance, another the attention of each class; with several modalities a
    third one weighs the modalities, and all share the layer of the logits. :meth:`loss` is the binary loss of the bag
    and, with several modalities, that of each modality pooled alone, with smoothed labels, since a label of the bag may
    be absent from one of its modalities (the guided loss of the paper).

    Args:
        in_features: The size of a feature vector.
        n_classes: The number of classes.
        n_modalities: The number of modalities: 1, features of shape ``(*batch, n_instances, in_features)``; or more,
            ``(*batch, n_instances, n_modalities, in_features)``.
        label_smoothing: The part of the labels that is moved to an even chance: in the guided terms if there are
            several modalities, else in the loss of the bag.

    Example:
        >>> head = AttentivePoolHead(8, 3)
        >>> features, target = torch.randn(4, 5, 8), torch.tensor([[0, 2], [1, -1], [-1, -1], [2, -1]])
        >>> head.loss(features, target).backward()  # four bags of five instances
        >>> head.predict(features).shape, head.instances(features).shape
        (torch.Size([4, 3]), torch.Size([4, 5, 3]))
    """

    def __init__(
        self, in_features: int, n_classes: int, *, n_modalities: int = 1, label_smoothing: float = 0.0
    ) -> None:
        super().__init__()
        n_modalities = _check.plain(n_modalities)
        if not isinstance(n_modalities, int) or n_modalities < 1:
            raise ValueError(f"AttentivePoolHead: `n_modalities` must be a positive integer, got {n_modalities!r}.")
        self.n_modalities = n_modalities
        self.label_smoothing = _check.number("AttentivePoolHead", "label_smoothing", label_smoothing, 0, 1)
        self.linear = nn.Linear(in_features, n_classes)
        self.attention = nn.Linear(in_features, n_classes)
        self.modality = nn.Linear(in_features, n_classes) if n_modalities > 1 else None
        for layer in (self.attention, self.modality):
            if layer is not None:  # all instances alike, at first
                nn.init.zeros_(layer.weight)
                nn.init.zeros_(layer.bias)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the logits of the bags, shape ``(*batch, n_classes)``; `mask` is True where there is an instance."""
        self._check_features(features)
        modality = None if self.modality is None else self.modality(features)
        return attentive_pool(self.linear(features), self.attention(features), mask, modality_logits=modality)

    def loss(
        self,
        features: Tensor,
        target: Target,
        mask: Tensor | None = None,
        *,
        sample_weight: Tensor | None = None,
        reduction: Reduction = "mean",
    ) -> Tensor:
        """Return the binary loss of the bags, plus that of each of several modalities with smoothed labels."""
        self._check_features(features)
        options: dict[str, Any] = {"sample_weight": sample_weight, "reduction": reduction}
        if self.modality is None:
            return binary_loss(self(features, mask), target, label_smoothing=self.label_smoothing, **options)
        logits, attention = self.linear(features), self.attention(features)
        bag = attentive_pool(logits, attention, mask, modality_logits=self.modality(features))
        total = binary_loss(bag, target, **options)
        for m in range(self.n_modalities):
            alone = None if mask is None else mask[..., m]
            guided = attentive_pool(logits[..., m, :], attention[..., m, :], alone)
            if alone is not None:  # nothing is learned of a modality that is not there
                guided = torch.where(alone.any(-1, keepdim=True), guided, 0)
            total = total + binary_loss(guided, target, label_smoothing=self.label_smoothing, **options)
        return total

    def predict(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the probabilities of the bags, shape ``(*batch, n_classes)``."""
        logits: Tensor = self(features, mask)
        return logits.sigmoid()

    def instances(self, features: Tensor) -> Tensor:
        """Return the probabilities of the instances, shape ``(*features.shape[:-1], n_classes)``."""
        logits: Tensor = self.linear(features)
        return logits.sigmoid()

    def _check_features(self, features: Tensor) -> None:
        several = self.n_modalities > 1
        if features.ndim < 2 + several or (several and features.shape[-2] != self.n_modalities):
            inner = f"n_instances, {self.n_modalities}, in_features" if several else "n_instances, in_features"
            raise ValueError(
                f"AttentivePoolHead: `features` must have the shape (*batch, {inner}), got {tuple(features.shape)}."
            )

    def extra_repr(self) -> str:
        """Return what is not in the layers."""
        return f"n_modalities={self.n_modalities}, label_smoothing={self.label_smoothing}"
