"""What the losses share: which entries of a row take part, sums over them, and the way back to the user's dtype."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lastlayer import _check
from lastlayer._check import Labels, Reduction, Target
from lastlayer._threshold.dispatch import direct, transformed
from lastlayer.shard import ClassShard, Ranks, local_part, reduce, total, unwrap


def enter(
    op: str, logits: Tensor, target: Target, shard: ClassShard | None = None, sample_weight: Any = None
) -> tuple[Tensor, Labels, Tensor]:
    """Check the input; return scores in the work dtype, labels, and the entries that take part.

    An entry takes part where the target is known and the logit is not ``-inf``. Scores are 0 elsewhere, so that nothing
    there has a value or a gradient.
    """
    logits, labels = given(op, logits, target, shard, sample_weight)
    x, live = taking_part(logits, labels)
    return x, labels, live


def given(
    op: str, logits: Tensor, target: Target, shard: ClassShard | None = None, sample_weight: Any = None
) -> tuple[Tensor, Labels]:
    """Check the input; return the scores in the work dtype, and the labels."""
    logits = _check.logits(op, logits)
    labels = _check.target(op, local_part(target), logits, shard)
    return without_left_out(op, logits.to(_check.work_dtype(logits)), sample_weight), labels


def without_left_out(op: str, x: Tensor, sample_weight: Any) -> Tensor:
    """Return the scores, with no gradient in rows of weight 0: these may hold nan, and 0 times nan is nan."""
    return x if sample_weight is None else torch.where(_kept(op, x, sample_weight), x, x.detach())


def features_of_weight(op: str, features: Tensor, sample_weight: Any) -> Tensor:
    """Return the features, 0 in rows of weight 0: what multiplies them has no gradient from there."""
    return features if sample_weight is None else torch.where(_kept(op, features, sample_weight), features, 0)


def _kept(op: str, x: Tensor, sample_weight: Any) -> Tensor:
    """Return which rows of `x` have a weight that is not 0, ``(*batch, 1)``."""
    like = x.new_empty((), dtype=_check.work_dtype(x))
    weight = _check.weights(op, "sample_weight", sample_weight, like, x.shape[:-1], "Give one weight per row.")
    assert weight is not None
    return (weight != 0).expand(x.shape[:-1]).unsqueeze(-1)


def taking_part(x: Tensor, labels: Labels) -> tuple[Tensor, Tensor]:
    """Return the scores, 0 where an entry takes no part, and the entries that take part."""
    live = x != -torch.inf  # nan takes part, and shows
    if labels.dense is not None:
        live = live & (labels.dense >= 0)
    return torch.where(live, x, 0), live


def class_weight(op: str, name: str, value: Any, x: Tensor) -> Tensor | None:
    """Check `weight` or `pos_weight`: one number per class, or anything that broadcasts to the logits."""
    return _check.weights(op, name, value, x, x.shape, "Give one number per class.")


def class_weights(op: str, weight: Any, pos_weight: Any, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Check both kinds of weights of classes."""
    return class_weight(op, "weight", weight, x), class_weight(op, "pos_weight", pos_weight, x)


def weighed(value: Tensor, weight: Tensor | None) -> Tensor:
    """Return the value times its weight."""
    return value if weight is None else weight * value


def soft(labels: Labels) -> bool:
    """Whether the target may hold numbers between 0 and 1; its dtype tells."""
    return labels.dense is not None and labels.dense.is_floating_point()


def hard(labels: Labels) -> bool:
    """Whether a target that may be soft is known to have no share but 0 and 1; looked at only where that is cheap."""
    dense = labels.dense
    if dense is None or not dense.is_cpu or not direct(dense) or transformed() or torch.jit.is_tracing():
        return False
    return bool((dense[dense > 0] >= 1).all())


def share(labels: Labels, live: Tensor, dtype: torch.dtype) -> Tensor:
    """Return how much of a label each entry is: 1, 0 or, for soft targets, a number between."""
    if labels.dense is None or not soft(labels):
        return labels.positive().to(dtype)
    return from_0_to_1(torch.where(live, labels.dense, 0).to(dtype))


def from_0_to_1(part: Tensor) -> Tensor:
    """Clamp the shares of soft labels; their gradient is 1 at both ends too, where newer versions of torch have 0."""
    held = part.clamp(0, 1)
    return torch.where(part == held, part, held)


def above_0(x: Tensor) -> Tensor:
    """Clamp to 0 or more, with a gradient of 1 at 0, where newer versions of torch have 0."""
    return torch.where(x < 0, 0, x)


def capped(x: Tensor) -> Tensor:
    """Clamp to a score whose sigmoid is 1: a power of it has a gradient of 0 above, not 0 times an infinite number."""
    return x.clamp(max=1000)


def mixed(labels: Labels, live: Tensor, if_positive: Tensor, if_negative: Tensor) -> Tensor:
    """Choose a loss for each entry; a soft label takes its share of both."""
    if not soft(labels):
        return torch.where(labels.positive(), if_positive, if_negative)
    part = share(labels, live, if_positive.dtype)
    return part * if_positive + (1 - part) * if_negative


def over_classes(loss: Tensor, live: Tensor, shard: ClassShard | None = None, weight: Tensor | None = None) -> Tensor:
    """Sum the entries that take part, each times its weight, over the classes of all ranks; shape ``batch``."""
    return total(torch.where(live, weighed(loss, weight), 0).sum(-1), shard)


def label_factors(labels: Labels, live: Tensor, dtype: torch.dtype, weight: Tensor | None) -> list[Tensor]:
    """Return what the terms of labels are multiplied by, of the shape of the logits: weights, shares of soft labels."""
    factors = [] if weight is None else [weight.expand(live.shape)]
    if labels.dense is not None and soft(labels):
        factors.append(from_0_to_1(labels.dense.to(dtype)))
    return factors


def times(value: Tensor, factors: Iterable[Tensor]) -> Tensor:
    """Return the product of a value and its factors."""
    for factor in factors:
        value = factor * value
    return value


def over_positives(
    labels: Labels, live: Tensor, function: Callable[..., Tensor], *values: Tensor, weight: Tensor | None = None
) -> Tensor:
    """Sum a function of the values over this rank's labels that take part, shape ``batch``; index lists gather first.

    A soft label counts with its share, and a label with its weight.
    """
    factors = label_factors(labels, live, values[0].dtype, weight)

    def term(here: Tensor, *given: Tensor) -> Tensor:
        value = times(function(*given[: len(values)]), given[len(values) :])
        return torch.where(here > 0, value, 0)

    return labels.sum_over_positives(term, live, *values, *factors)


def n_classes(x: Tensor, shard: ClassShard | None) -> int | Tensor:
    """Return the number of classes on all ranks."""
    here = x.shape[-1]
    return here if shard is None else reduce(x.new_ones(here, dtype=_check.work_dtype(x)), "sum", shard).squeeze(-1)


def any_class(marks: Tensor, shard: ClassShard | None = None) -> Tensor:
    """Whether a row has such an entry on any rank, shape ``batch``."""
    here = marks.any(-1)
    return here if shard is None else reduce(here.unsqueeze(-1).float(), "max", shard).squeeze(-1) > 0


def logsumexp(
    x: Tensor,
    marks: Tensor,
    shard: Ranks | None = None,
    temperature: float = 1.0,
    weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``T log sum w exp(x / T)`` over the entries found as ``peak + rest``, and whether there is an entry.

    The peak, a constant of shape ``(*batch, 1)``, is the largest entry; the rest, of shape ``batch``, carries the
    gradient, and without weights is at least 0. Subtract the peak from scores before adding the rest: next to scores
    in the ten thousands the sum of the two has lost the digits of the rest in float32. Without an entry both are 0,
    with no gradient. The weights of the entries found must be positive.
    """
    peak = reduce(torch.where(marks, x, -torch.inf).detach(), "max", shard)
    some = peak != -torch.inf
    peak = torch.where(some, peak, 0)
    mass = ((torch.where(marks, x, peak) - peak) / temperature).exp()
    mass = torch.where(marks, mass if weight is None else weight * mass, 0).sum(-1, keepdim=True)
    # All ranks continue in the same way, so the gradient of the sum must reach each rank once: total, not reduce.
    mass = total(mass, shard)
    rest = temperature * torch.where(some, mass, 1).log()
    return peak, rest.squeeze(-1), some.squeeze(-1)


def whole(op: str, logits: Tensor, shard: ClassShard | None, reason: str) -> Tensor:
    """Refuse classes that are split over processes."""
    logits, shard, _ = unwrap(op, logits, shard)
    if shard is not None:
        raise ValueError(f"{op}: `shard` must be None, got {shard}: {reason}. Gather the logits first.")
    return logits


def leave(
    op: str,
    loss: Tensor,
    reduction: Reduction,
    counts: Tensor | None,
    dtype: torch.dtype,
    sample_weight: Tensor | None = None,
) -> Tensor:
    """Reduce the losses of the rows and return the result in the user's dtype; in float16 a finite loss stays finite.

    Under autocast the result is float32 at least, as that of torch's own losses.
    """
    loss = _check.reduced(op, loss, reduction, counts, sample_weight)
    if _check.autocast(loss.device):
        return loss.to(_check.work_dtype(loss))
    if dtype == torch.float16:
        limit = torch.finfo(dtype).max
        over = loss.isfinite() & (loss.abs() > limit)
        held = loss.detach().clamp(-limit, limit) + (loss - loss.detach())  # the gradient is not held
        loss = torch.where(over, held, loss)
    return loss.to(dtype)


def leave_unseen(loss: Tensor, dtype: torch.dtype) -> Tensor:
    """Return one loss on the CPU as :func:`leave` does, where autograd does not look: in fewer operations."""
    if _check.autocast(loss.device):
        return loss
    if dtype == torch.float16:
        limit = torch.finfo(dtype).max
        if limit < abs(float(loss)) < math.inf:
            loss = loss.clamp(-limit, limit)
    return loss.to(dtype)
