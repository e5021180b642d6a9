"""Binary ranking problems: one per class (over the rows) or one per row (over the classes), a few at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lastlayer._check import Labels
from lastlayer.metrics import _ranking

Per = Literal["class", "sample"]

_COPIES = 8  # temporaries of the size of a chunk that a sort and its running counts need


class Problems(NamedTuple):
    """Scores, -inf where an item takes no part, and the positive and negative items, all ``(problems, items)``."""

    scores: Tensor
    positive: Tensor
    negative: Tensor


def problems(scores: Tensor, labels: Labels, per: Per | Literal["all"]) -> Iterator[Problems]:
    """Split scores ``(rows, n_classes)`` into problems, a bounded number of entries at a time."""
    rows, n = scores.shape
    if per == "all":
        positive, known = labels.positive(), labels.known()
        yield _problem(scores.reshape(1, -1), positive.reshape(1, -1), None if known is None else known.reshape(1, -1))
    elif per == "sample":
        for c in _ranking.chunks(rows, n * _COPIES):
            part = _ranking.rows_of(labels, c)
            yield _problem(scores[c], part.positive(), part.known())
    else:
        for c in _ranking.chunks(n, rows * _COPIES):
            part = _columns(labels, c)
            known = part.known()
            yield _problem(scores[:, c].T, part.positive().T, None if known is None else known.T)


def _columns(labels: Labels, part: slice) -> Labels:
    """The labels of some classes, counted from 0."""
    size = part.stop - part.start
    if labels.dense is not None:
        return Labels(None, labels.dense[:, part], size)
    assert labels.index is not None
    index = labels.index - part.start
    return Labels(torch.where((index >= 0) & (index < size), index, -1), None, size)


def _problem(scores: Tensor, positive: Tensor, known: Tensor | None) -> Problems:
    out = scores.isnan() if known is None else scores.isnan() | ~known
    negative = ~positive if known is None else ~positive & known
    return Problems(torch.where(out, -torch.inf, scores), positive, negative)


def tie_ends(ordered: Tensor) -> Tensor:
    """The position of the last entry equal to each, in rows that are in order."""
    position = torch.arange(ordered.shape[-1], device=ordered.device).expand_as(ordered)
    last = torch.ones_like(ordered, dtype=torch.bool)
    last[:, :-1] = ordered[:, :-1] != ordered[:, 1:]
    return torch.where(last, position, ordered.shape[-1]).flip(-1).cummin(-1).values.flip(-1)
