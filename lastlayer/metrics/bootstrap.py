"""Confidence intervals of any metric, by drawing rows again."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lastlayer import _check
from lastlayer._check import Target


class Interval(NamedTuple):
    """A metric on the data, and its confidence interval; each of the metric's shape."""

    value: Tensor
    low: Tensor
    high: Tensor


def bootstrap(
    metric: Callable[..., Tensor],
    *tensors: Target,
    n_resamples: int = 1000,
    level: float = 0.95,
    generator: torch.Generator | None = None,
) -> Interval:
    r"""Compute a percentile confidence interval by drawing rows with replacement (Efron, 1979).

    .. math:: [\, q_{(1 - \text{level}) / 2}, \; q_{(1 + \text{level}) / 2} \,]
              \quad \text{of} \quad m(x_{i_1}, \dots, x_{i_N}), \; i_j \sim U\{1..N\}

    Rows must be independent of one another. Each draw indexes every tensor, so give it small ones: with many classes,
    decode once and pass the lists (the metrics at k take them as `indices`). For two models on the same rows, pass
    both and let `metric` return the difference: that interval is much narrower than the two apart.

    Args:
        metric: Called with the tensors; returns a number or a vector of fixed shape.
        *tensors: One row each along the first dimension, such as scores and target; :func:`label_lists` too.
        n_resamples: The number of draws.
        level: The coverage wanted, between 0 and 1.
        generator: For a repeatable result; on its own device, CPU by default.

    Returns:
        ``(value, low, high)``: the metric on the rows as they are, and the two ends.

    Example:
        >>> scores = torch.tensor([[0.9, 0.1], [0.8, 0.3], [0.2, 0.4], [0.6, 0.1]])
        >>> target = torch.tensor([0, 1, 1, 0])
        >>> accuracy = lambda s, t: (s.argmax(-1) == t).float().mean()
        >>> bootstrap(accuracy, scores, target, generator=torch.Generator().manual_seed(0))
        Interval(value=tensor(0.7500), low=tensor(0.2500), high=tensor(1.))
    """
    op = "bootstrap"
    if not callable(metric):
        raise TypeError(f"{op}: `metric` must be a function of tensors, got {type(metric).__name__}.")
    rows = _rows(op, tensors)
    n_resamples = _check.plain(n_resamples)
    if isinstance(n_resamples, bool) or not isinstance(n_resamples, int):
        raise TypeError(f"{op}: `n_resamples` must be an integer, got {type(n_resamples).__name__}.")
    if n_resamples < 1:
        raise ValueError(f"{op}: `n_resamples` must be at least 1, got {n_resamples}. 1000 is usual.")
    if not 0 < _check.number(op, "level", level) < 1:
        raise ValueError(f"{op}: `level` must be between 0 and 1, got {level}. Use e.g. 0.95.")
    device = torch.device("cpu") if generator is None else generator.device
    value = torch.as_tensor(metric(*tensors))
    draws = []
    for _ in range(n_resamples):
        index = torch.randint(rows, (rows,), generator=generator, device=device)
        draws.append(torch.as_tensor(metric(*(t[index.to(t.device)] for t in tensors))))
    dtype = _check.work_dtype(value) if value.is_floating_point() else torch.float32
    drawn = torch.stack(draws).to(dtype).sort(0).values
    return Interval(value, _quantile(drawn, (1 - level) / 2), _quantile(drawn, (1 + level) / 2))


def _quantile(ordered: Tensor, share: float) -> Tensor:
    """Interpolate between sorted draws; torch.quantile compares values, which some versions cannot trace."""
    place = share * (ordered.shape[0] - 1)
    first = min(int(place), ordered.shape[0] - 1)
    between = torch.lerp(ordered[first], ordered[min(first + 1, ordered.shape[0] - 1)], place - first)
    return torch.where(ordered[-1].isnan(), torch.nan, between)  # nan is sorted last


def _rows(op: str, tensors: tuple[Target, ...]) -> int:
    if not tensors:
        raise TypeError(f"{op}: `tensors` must hold at least one tensor, got none. Pass scores and target.")
    for t in tensors:
        if not isinstance(t, Tensor | _check.LabelLists):
            raise TypeError(f"{op}: `tensors` must be tensors, got {type(t).__name__}. Use torch.as_tensor.")
    sizes = {t.shape[0] if len(t.shape) else -1 for t in tensors}
    if len(sizes) > 1 or -1 in sizes or 0 in sizes:
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
        raise ValueError(f"{op}: `tensors` must have the same number of rows, at least one, got shapes {shapes}.")
    return sizes.pop()
