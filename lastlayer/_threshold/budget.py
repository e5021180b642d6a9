"""A projection with weights and bounds, as the kernels take it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Budget(NamedTuple):
    """Logits with all that belongs to them but `k`."""

    logits: Tensor
    terms: Sequence[Tensor | None]  # weight, lower and upper bound; None is 1, 0 and 1
    mask: Tensor | None
    temperature: float
    kind: str  # "y", "at most", "log" or "nu"

    @property
    def at_most(self) -> bool:
        return self.kind == "at most"
