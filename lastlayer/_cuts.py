"""The best threshold of a class: decoders apply it, error analysis asks whether it would help."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Objective = Literal["f1", "precision", "recall"]


def best_cuts(x: Tensor, hit: Tensor, known: Tensor, objective: Objective, wanted: float = 0.0) -> Tensor:
    """Choose a threshold for each class among all cuts of its scores.

    Scores, labels and what is known have shape ``(classes, rows)``; unknown scores are ``-inf``. Position 0 of what
    follows takes nothing, position i the first i.
    """
    if x.shape[-1] == 0:
        return x.new_full(x.shape[:1], torch.inf)
    # Unknown entries go last, also after known scores of -inf.
    order = x.argsort(dim=-1, descending=True, stable=True)
    order = order.gather(-1, known.gather(-1, order).to(torch.uint8).argsort(dim=-1, descending=True, stable=True))
    x, hit, known = x.gather(-1, order), hit.gather(-1, order), known.gather(-1, order)
    right = F.pad(hit.double().cumsum(-1), (1, 0))
    taken = F.pad(known.double().cumsum(-1), (1, 0))
    total = right[:, -1:]
    lower = torch.cat([x, torch.full_like(x[:, :1], -torch.inf)], -1)  # the first score that is not taken
    upper = torch.cat([torch.full_like(x[:, :1], torch.inf), x], -1)
    inside = F.pad(known, (1, 0), value=True)
    last = taken == taken[:, -1:]
    lower = torch.where(last, torch.nextafter(upper, torch.full_like(upper, -torch.inf)), lower)
    level = lower + (upper - lower) / 2
    level = torch.where((level >= lower) & (level < upper), level, lower)
    level = torch.where(taken == 0, torch.where(last, torch.inf, lower), level)
    if objective == "f1":
        merit = 2 * right / (taken + total).clamp(min=1)
    elif objective == "precision":  # the longest list that is good enough; nothing taken is the last resort
        merit = torch.where((right >= wanted * taken) & (taken > 0), taken, 0)
    else:  # the shortest list that finds enough
        merit = torch.where(right >= wanted * total, -taken, -torch.inf)
    merit = torch.where(inside & (upper > lower) & (total > 0), merit, -torch.inf)
    merit = torch.where(total > 0, merit, -taken)
    best = merit.argmax(-1, keepdim=True)  # the first, so the highest threshold
    return level.gather(-1, best).squeeze(-1)
