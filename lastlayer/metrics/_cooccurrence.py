"""Which labels come together: in the data, and in the predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lastlayer.metrics import _ranking


@dataclass(frozen=True)
class CoOccurrence:
    """Two labels: in how many rows they are predicted together, and in how many they are true together."""

    first: int
    second: int
    predicted: int
    true: int
    first_name: str
    second_name: str


def label_cooccurrence_of(said: Tensor, true: Tensor, names: Sequence[str], top: int) -> tuple[CoOccurrence, ...]:
    """The pairs whose two counts differ most, of sets given as Boolean tensors ``(rows, n_classes)``."""
    n = said.shape[-1]
    counts: dict[int, list[int]] = {}
    for place, sets in enumerate((said, true)):
        keys, number = _pairs(sets)
        for key, value in zip(keys.tolist(), number.tolist(), strict=True):
            counts.setdefault(key, [0, 0])[place] = value
    ranked = sorted(counts.items(), key=lambda item: (-abs(item[1][0] - item[1][1]), -max(item[1]), item[0]))
    return tuple(
        CoOccurrence(key // n, key % n, both[0], both[1], names[key // n], names[key % n]) for key, both in ranked[:top]
    )


def _pairs(sets: Tensor) -> tuple[Tensor, Tensor]:
    """Keys ``a * n + b`` (a < b) of the pairs that occur, and how often; only what occurs is held."""
    rows, n = sets.shape
    size = sets.sum(-1)
    most = int(size.max()) if rows else 0
    keys = torch.empty(0, dtype=torch.int64, device=sets.device)
    number = torch.empty(0, dtype=torch.int64, device=sets.device)
    if most < 2:
        return keys, number
    a, b = torch.triu_indices(most, most, 1, device=sets.device)
    for part in _ranking.chunks(rows, max(len(a), n)):
        lists = sets[part].to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[:, :most]
        inside = b < size[part, None]  # both are there if the later one is
        pairs = (lists[:, a] * n + lists[:, b])[inside]
        keys, place = torch.cat([keys, pairs]).unique(return_inverse=True)
        weight = torch.cat([number, torch.ones_like(pairs)])
        number = torch.zeros_like(keys).index_add(0, place, weight)
    return keys, number
