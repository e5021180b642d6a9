"""What the losses share: which entries of a row take part, sums over them, and the way back to the user's dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lastlayer import _check
from lastlayer._check import Labels, Reduction, Target
from lastlayer.shard import ClassShard, local_part, reduce, total


def enter(op: str, logits: Tensor, target: Target, shard: ClassShard | None = None) -> tuple[Tensor, Labels, Tensor]:
    """Check the input; return scores in the work dtype, labels, and the entries that take part.

    An entry takes part where the target is known and the logit is not ``-inf``. Scores are 0 elsewhere, so that nothing
    there has a value or a gradient.
    """
    logits = _check.logits(op, logits)
    labels = _check.target(op, local_part(target), logits, shard)
    live = logits != -torch.inf  # nan takes part, and shows
    if labels.dense is not None:
        live = live & (labels.dense >= 0)
    x = torch.where(live, logits.to(_check.work_dtype(logits)), 0)
    return x, labels, live


def mixed(labels: Labels, live: Tensor, if_positive: Tensor, if_negative: Tensor) -> Tensor:
    """Choose a loss for each entry; a soft label takes its share of both."""
    if labels.dense is None or not labels.dense.is_floating_point():
        return torch.where(labels.positive(), if_positive, if_negative)
    share = torch.where(live, labels.dense, 0).to(if_positive.dtype).clamp(0, 1)
    return share * if_positive + (1 - share) * if_negative


def over_classes(loss: Tensor, live: Tensor, shard: ClassShard | None = None) -> Tensor:
    """Sum the entries that take part over the classes of all ranks, shape ``batch``."""
    return total(torch.where(live, loss, 0).sum(-1), shard)


def over_positives(labels: Labels, live: Tensor, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Sum a function of the scores over the positives that take part, shape ``batch``; index lists gather first."""
    return labels.sum_over_positives(lambda score, here: torch.where(here > 0, function(score), 0), x, live)


def any_class(found: Tensor, shard: ClassShard | None = None) -> Tensor:
    """Whether a row has such an entry on any rank, shape ``batch``."""
    here = found.any(-1)
    return here if shard is None else reduce(here.unsqueeze(-1).float(), "max", shard).squeeze(-1) > 0


def logsumexp(
    x: Tensor, found: Tensor, shard: ClassShard | None = None, temperature: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``T log sum exp(x / T)`` over the entries found as ``peak + rest``, and whether there is an entry.

    The peak, a constant of shape ``(*batch, 1)``, is the largest entry; the rest, of shape ``batch``, is at least 0 and
    carries the gradient. Subtract the peak from scores before adding the rest: next to scores in the ten thousands the
    sum of the two has lost the digits of the rest in float32. Without an entry both are 0, with no gradient.
    """
    peak = reduce(torch.where(found, x, -torch.inf).detach(), "max", shard)
    some = peak != -torch.inf
    peak = torch.where(some, peak, 0)
    mass = torch.where(found, ((torch.where(found, x, peak) - peak) / temperature).exp(), 0).sum(-1, keepdim=True)
    # Each rank goes on alike from here, so the gradient of the sum must reach each rank once: total, not reduce.
    mass = total(mass, shard)
    rest = temperature * torch.where(some, mass, 1).log()
    return peak, rest.squeeze(-1), some.squeeze(-1)


def leave(op: str, loss: Tensor, reduction: Reduction, counts: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Reduce the losses of the rows and return the result in the user's dtype; in float16 a finite loss stays finite.

    Under autocast the result is float32 at least, as that of torch's own losses.
    """
    loss = _check.reduced(op, loss, reduction, counts)
    if _check.autocast(loss.device):
        return loss.to(_check.work_dtype(loss))
    if dtype == torch.float16:
        limit = torch.finfo(dtype).max
        over = loss.isfinite() & (loss.abs() > limit)
        held = loss.detach().clamp(-limit, limit) + (loss - loss.detach())  # the gradient is not held
        loss = torch.where(over, held, loss)
    return loss.to(dtype)
