"""Scores of predicted sets against true ones, as error analysis needs them: plain numbers from Boolean tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lastlayer import _check

Measure = Callable[[Tensor, Tensor, Tensor], float]


def measure(op: str, metric: Any) -> Measure:
    """Return the function of a name; a function is taken as it is."""
    if callable(metric):
        return lambda said, true, known: float(metric(said, true, known))
    return _NAMED[_check.choice(op, "metric", metric, tuple(_NAMED))]


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(whole > 0, part / whole.clamp(min=1), 1.0)


def _mean_over_rows(value: Tensor, known: Tensor) -> float:
    some = known.any(-1)
    return float(torch.where(some, value, 0).sum() / some.sum().clamp(min=1))


def _f1(said: Tensor, true: Tensor, known: Tensor) -> float:
    return _mean_over_rows(_ratio(2 * (said & true).sum(-1).double(), said.sum(-1) + true.sum(-1)), known)


def _jaccard(said: Tensor, true: Tensor, known: Tensor) -> float:
    return _mean_over_rows(_ratio((said & true).sum(-1).double(), (said | true).sum(-1)), known)


def _exact(said: Tensor, true: Tensor, known: Tensor) -> float:
    return _mean_over_rows((said == true).all(-1).double(), known)


def _micro_f1(said: Tensor, true: Tensor, known: Tensor) -> float:
    return float(_ratio(2 * (said & true).sum().double(), said.sum() + true.sum()))


def _macro_f1(said: Tensor, true: Tensor, known: Tensor) -> float:
    size = said.sum(0) + true.sum(0)
    value = _ratio(2 * (said & true).sum(0).double(), size)
    return (
        float(torch.where(size > 0, value, 0).sum() / (size > 0).sum().clamp(min=1)) if bool((size > 0).any()) else 1.0
    )


_NAMED: dict[str, Measure] = {
    "f1": _f1,
    "micro_f1": _micro_f1,
    "macro_f1": _macro_f1,
    "jaccard": _jaccard,
    "exact": _exact,
}
