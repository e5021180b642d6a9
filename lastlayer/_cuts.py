"""The best threshold of a class: decoders apply it, error analysis asks whether it would help."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Objective = Literal["f1", "precision", "recall"]


def best_cuts(x: Tensor, hit: Tensor, known: Tensor, objective: Objective, wanted: float = 0.0) -> Tensor:
    """Choose a threshold for each class among all cuts of its scores.

    Scores, labels and what is known have shape ``(classes, rows)``. A score of ``-inf`` can be in no cut, though its
    label counts. Of what follows, position 0 takes nothing and position i the first i scores.
    """
    if x.shape[-1] == 0:
        return x.new_full(x.shape[:1], torch.inf)
    hit = hit & known
    total = hit.sum(-1, keepdim=True)
    x, order = torch.where(known, x, -torch.inf).sort(dim=-1, descending=True)
    can = x > -torch.inf
    right = F.pad((hit.gather(-1, order) & can).cumsum(-1, dtype=torch.int32), (1, 0))
    n_can = can.sum(-1, keepdim=True)
    taken = torch.arange(x.shape[-1] + 1, device=x.device)
    upper = F.pad(x, (1, 0), value=torch.inf)  # the last score that is taken
    lower = F.pad(x, (0, 1), value=-torch.inf)  # the first that is not
    is_cut = (taken <= n_can) & ((upper > lower) | (taken == 0))  # nothing is above infinity, not even infinity
    if objective == "f1":
        merit = 2 * right.double() / (taken + total).clamp(min=1)
    elif objective == "precision":  # the longest list that is good enough; to take nothing is the last resort
        merit = torch.where((right >= wanted * taken) & (taken > 0), taken, 0).double()
    else:  # the shortest list that finds enough, or all there is
        merit = torch.where((right >= wanted * total) | (taken == n_can), -taken, -torch.inf).double()
    merit = torch.where(is_cut & ((total > 0) | (taken == 0)), merit, -torch.inf)
    best = merit.argmax(-1, keepdim=True)  # the first of several: the highest threshold
    level = _between(lower.gather(-1, best), upper.gather(-1, best), (best == n_can) & (best > 0))
    return torch.where(n_can == 0, torch.inf, level).squeeze(-1)


def _between(lower: Tensor, upper: Tensor, all_taken: Tensor) -> Tensor:
    """A number at least `lower` and below `upper`, midway where that makes sense."""
    below = torch.nextafter(upper, torch.full_like(upper, -torch.inf))
    lower = torch.where(all_taken, below, lower)
    level = lower + (upper - lower) / 2
    return torch.where((level >= lower) & (level < upper) & (upper < torch.inf), level, lower)
