"""Last layers for rows with no label, one label or several: each has ``loss``, ``predict`` and ``confidence``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

import lastlayer as ll


class Binary(nn.Linear):
    """One sigmoid per class; `prior` starts it from the chance of one label per row."""

    def __init__(self, features: int, classes: int, prior: bool = False) -> None:
        super().__init__(features, classes)
        if prior:
            nn.init.constant_(self.bias, -math.log(classes - 1))

    def loss(self, features: Tensor, target: Tensor) -> Tensor:
        return ll.binary_loss(self(features), target)

    def predict(self, features: Tensor) -> Tensor:
        return self(features).sigmoid()

    def confidence(self, features: Tensor) -> Tensor:
        return self.predict(features).amax(-1)


class Softmax(nn.Linear):
    """Cross-entropy on the rows with a label and, if given, another loss on those without."""

    def __init__(self, features: int, classes: int, outlier: Callable[..., Tensor] | None = None) -> None:
        super().__init__(features, classes)
        self.outlier = outlier

    def loss(self, features: Tensor, target: Tensor) -> Tensor:
        logits, out = self(features), target < 0
        inner = F.cross_entropy(logits, target, ignore_index=-1, reduction="sum") / (~out).sum().clamp(min=1)
        if self.outlier is None:
            return inner
        return inner + (self.outlier(logits, reduction="none") * out).sum() / out.sum().clamp(min=1)

    def predict(self, features: Tensor) -> Tensor:
        return self(features).softmax(-1)

    def confidence(self, features: Tensor) -> Tensor:
        return self.predict(features).amax(-1)


class Quasibinary(ll.QuasibinaryHead):
    def confidence(self, features: Tensor) -> Tensor:
        return self.predict(features).amax(-1)


class Reciprocal(ll.ReciprocalPointHead):
    """Reciprocal points with squared distances divided by the number of features."""

    def _scaled(self, features: Tensor) -> Tensor:
        return features / math.sqrt(features.shape[-1])

    def loss(self, features: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        return super().loss(self._scaled(features), target)

    def predict(self, features: Tensor) -> Tensor:
        return super().predict(self._scaled(features))

    def confidence(self, features: Tensor) -> Tensor:
        return self.known_score(self._scaled(features))


Head = Callable[[int, int], Any]  # features, classes -> a module
ONE_VERSUS_REST: dict[str, Head] = {
    "binary": Binary,
    "binary, prior bias": lambda n, c: Binary(n, c, prior=True),
    "softmax": Softmax,
    "quasibinary": Quasibinary,
}
ZERO_LABELS: dict[str, Head] = {
    "softmax, labelled rows alone": Softmax,
    "binary": Binary,
    "binary, prior bias": lambda n, c: Binary(n, c, prior=True),
    "softmax + uniform": lambda n, c: Softmax(n, c, ll.outlier_uniform_loss),
    "softmax + max-confidence": lambda n, c: Softmax(n, c, ll.outlier_max_confidence_loss),
    "quasibinary": Quasibinary,
    "reciprocal points": lambda n, c: Reciprocal(n, c, scale=4.0),
}
