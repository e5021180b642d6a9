"""Heads whose classes are points of the feature space: prototypes, and reciprocal points."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from lastlayer import _check
from lastlayer._check import Reduction, Target
from lastlayer._renamed import old_attribute, renamed
from lastlayer.loss import _rows
from lastlayer.loss.multilabel import binary_loss, multihot_softmax_loss
from lastlayer.loss.reciprocal import reciprocal_point_loss, squared_distances


def _probabilities(logits: Tensor, features: Tensor) -> Tensor:
    """Return the softmax in the dtype of the features; under autocast, where torch's is too, in that of the logits."""
    p = logits.softmax(-1)
    return p if _check.autocast(p.device) else p.to(features.dtype)


class PrototypeHead(nn.Module):
    r"""Classify by the distance to a prototype of each class (the RBF layer of Liao, 2021, chapter 5).

    .. math:: p_k = \mathrm{softmax}(-d)_k, \quad d_k = \|w_k - f\|^2 / s_k
              \qquad \text{or, multi-label,} \qquad p_k = \sigma(d_k^- - d_k^+)

    It replaces the last linear layer. After training, classes that are confused have prototypes near each other, so
    that the tree :meth:`LabelTree.from_prototypes <lastlayer.LabelTree.from_prototypes>` groups them. With
    ``multilabel=True`` each class has two prototypes, of presence and of absence. Use no weight decay on this layer.

    Args:
        in_features: The size of a feature vector.
        n_classes: The number of classes.
        multilabel: Whether a row may have any number of labels.
        width: The widths :math:`s`: a positive number, or a tensor with one per class; not trained.

    Attributes:
        weight: The prototypes (of presence), shape ``(n_classes, in_features)``; at first normal, of deviation 0.005.
        absent: The prototypes of absence, or None.

    Example:
        >>> head = PrototypeHead(8, 3)
        >>> features = torch.randn(5, 8)
        >>> head.loss(features, torch.tensor([0, 2, 1, 1, 0])).backward()
        >>> head.predict(features).shape
        torch.Size([5, 3])
    """

    width: Tensor
    gamma = old_attribute("PrototypeHead", "gamma", "width")

    @renamed("PrototypeHead", gamma="width")
    def __init__(
        self, in_features: int, n_classes: int, *, multilabel: bool = False, width: float | Tensor = 1.0
    ) -> None:
        super().__init__()
        self.multilabel = multilabel
        self.weight = nn.Parameter(torch.empty(n_classes, in_features))
        self.absent = nn.Parameter(torch.empty(n_classes, in_features)) if multilabel else None
        if not isinstance(width, Tensor) and not 0 < _check.number("PrototypeHead", "width", width) < math.inf:
            raise ValueError(f"PrototypeHead: `width` must be positive and finite, got {width}.")
        if isinstance(width, Tensor) and width.shape not in (torch.Size([]), torch.Size([n_classes])):
            raise ValueError(
                f"PrototypeHead: `width` must be one number or one per class ({n_classes}), got shape "
                f"{tuple(width.shape)}."
            )
        self.register_buffer("width", torch.as_tensor(width, dtype=torch.get_default_dtype()).expand(n_classes).clone())
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the prototypes again."""
        for points in (self.weight, self.absent):
            if points is not None:
                nn.init.normal_(points, std=0.005)

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits, shape ``(*batch, n_classes)``: ``-d``, or ``d- - d+``."""
        if self.absent is None:
            return self._logits(features).to(features.dtype)
        # |w- - f|^2 - |w+ - f|^2 without the squares of f, which would cancel.
        gap = self.weight - self.absent
        shift = self.absent.square().sum(-1) - self.weight.square().sum(-1)
        return (2 * features @ gap.T + shift) / self.width

    def _logits(self, features: Tensor) -> Tensor:
        """Return the logits; distances in float32 at least: half precision keeps 8 bits of what may be thousands."""
        if self.absent is not None:
            logits: Tensor = self(features)
            return logits
        return -squared_distances(features, self.weight) / self.width

    def loss(
        self,
        features: Tensor,
        target: Target,
        *,
        sample_weight: Tensor | None = None,
        reduction: Reduction = "mean",
    ) -> Tensor:
        """Return the cross-entropy, or with ``multilabel=True`` :func:`~lastlayer.binary_loss`."""
        function = binary_loss if self.multilabel else multihot_softmax_loss
        loss = function(self._logits(features), target, sample_weight=sample_weight, reduction=reduction)
        return _rows.leave("PrototypeHead.loss", loss, "none", None, features.dtype)

    def predict(self, features: Tensor) -> Tensor:
        """Return probabilities, shape ``(*batch, n_classes)``."""
        logits = self._logits(features)
        return logits.sigmoid() if self.multilabel else _probabilities(logits, features)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **options: Any) -> None:
        if f"{prefix}gamma" in state_dict:  # the name of the widths in 0.1
            state_dict[f"{prefix}width"] = state_dict.pop(f"{prefix}gamma")
        super()._load_from_state_dict(state_dict, prefix, *args, **options)

    def extra_repr(self) -> str:
        """Return the sizes."""
        n_classes, in_features = self.weight.shape
        return f"in_features={in_features}, n_classes={n_classes}, multilabel={self.multilabel}"


class ReciprocalPointHead(nn.Module):
    r"""Classify by the distance from what a class is not (Chen et al., 2020), and tell known classes from unknown.

    .. math:: p_k = \mathrm{softmax}(\gamma d)_k, \qquad d_k = \frac1M \sum_i \|f - p_i^k\|^2

    Features of unknown classes end up near all points: :meth:`known_score` is low there.

    Args:
        in_features: The size of a feature vector.
        n_classes: The number of known classes.
        n_points: The number :math:`M` of points per class.
        scale: The factor :math:`\gamma` of the distances.
        open_weight: The weight of the open-space term of :func:`~lastlayer.loss.reciprocal_point_loss`.

    Attributes:
        points: The reciprocal points, shape ``(n_classes, n_points, in_features)``; at first normal, of deviation 0.1.
        radius: The learned distances, shape ``(n_classes,)``; at first 0.

    Example:
        >>> head = ReciprocalPointHead(8, 3)
        >>> features = torch.randn(5, 8)
        >>> head.loss(features, torch.tensor([0, 2, 1, 1, 0])).backward()
        >>> head.known_score(features).shape
        torch.Size([5])
    """

    gamma = old_attribute("ReciprocalPointHead", "gamma", "scale")
    weight = old_attribute("ReciprocalPointHead", "weight", "open_weight")

    @renamed("ReciprocalPointHead", gamma="scale", weight="open_weight")
    def __init__(
        self, in_features: int, n_classes: int, *, n_points: int = 1, scale: float = 1.0, open_weight: float = 0.1
    ) -> None:
        super().__init__()
        self.scale = _check.number("ReciprocalPointHead", "scale", scale)
        self.open_weight = _check.number("ReciprocalPointHead", "open_weight", open_weight, 0)
        n_points = _check.plain(n_points)
        if isinstance(n_points, bool) or not isinstance(n_points, int) or n_points < 1:
            raise ValueError(f"ReciprocalPointHead: `n_points` must be a positive integer, got {n_points!r}.")
        self.points = nn.Parameter(torch.empty(n_classes, n_points, in_features))
        self.radius = nn.Parameter(torch.zeros(n_classes))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the points again and set the distances to 0."""
        nn.init.normal_(self.points, std=0.1)
        nn.init.zeros_(self.radius)

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits, shape ``(*batch, n_classes)``."""
        return self._logits(features).to(features.dtype)

    def _logits(self, features: Tensor) -> Tensor:
        """Return the logits in float32 at least."""
        return self.scale * squared_distances(features, self.points).mean(-1)

    def loss(
        self,
        features: Tensor,
        target: Target,
        *,
        sample_weight: Tensor | None = None,
        reduction: Reduction = "mean",
    ) -> Tensor:
        """Return :func:`~lastlayer.loss.reciprocal_point_loss`."""
        return reciprocal_point_loss(
            features,
            self.points,
            self.radius,
            target,
            scale=self.scale,
            open_weight=self.open_weight,
            sample_weight=sample_weight,
            reduction=reduction,
        )

    def predict(self, features: Tensor) -> Tensor:
        """Return probabilities of the known classes, shape ``(*batch, n_classes)``."""
        return _probabilities(self._logits(features), features)

    def known_score(self, features: Tensor) -> Tensor:
        """Return the largest distance, shape ``batch``: the larger, the more likely a known class."""
        return squared_distances(features, self.points).mean(-1).amax(-1).to(features.dtype)

    def extra_repr(self) -> str:
        """Return the sizes."""
        n_classes, n_points, in_features = self.points.shape
        return f"in_features={in_features}, n_classes={n_classes}, n_points={n_points}"
