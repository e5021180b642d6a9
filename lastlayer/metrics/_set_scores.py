"""Scores of predicted sets against true ones, as error analysis needs them: plain numbers from Boolean tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lastlayer import _check
from lastlayer.metrics import _sums, sets
from lastlayer.metrics._sums import Average, SetKind

Measure = Callable[[Tensor, Tensor, Tensor], float]

_NAMED: dict[str, tuple[SetKind, Average]] = {
    "f1": ("f1", "samples"),
    "micro_f1": ("f1", "micro"),
    "macro_f1": ("f1", "macro"),
    "jaccard": ("jaccard", "samples"),
    "exact": ("exact", "samples"),
}


def measure(op: str, metric: Any) -> Measure:
    """Return the function of a name; a function is taken as it is."""
    if callable(metric):
        return lambda said, true, known: float(metric(said, true, known))
    return partial(_measured, *_NAMED[_check.choice(op, "metric", metric, tuple(_NAMED))])


def _measured(kind: SetKind, average: Average, said: Tensor, true: Tensor, known: Tensor) -> float:
    """The metric of the rows of which something is known.

    A set that is rightly empty scores 1. A class without labels and predictions is left out of the mean over classes.
    """
    some = known.any(-1)
    said, target = said[some], torch.where(known, true.to(torch.int8), -1)[some]
    compared = sets.read("label_set_errors", said, target, None, None, False)
    if average != "macro":
        return float(sets.settle(kind, sets.sums(kind, compared, average), average, "one"))
    value, there = _sums.quotient(kind, sets.classes_of(compared))
    return float(value[there].mean()) if bool(there.any()) else 1.0
