"""The LML loss of a linear layer from a sample of its classes."""

from __future__ import annotations

import numbers
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lastlayer import _check
from lastlayer._threshold import search
from lastlayer._threshold.autograd import FirstOnly
from lastlayer.loss._scan import FIRST_ONLY, PASSES, absence, log_mass_of
from lastlayer.shard import ClassShard, reduce, total


def draw(
    op: str, negatives: Any, n: int, device: torch.device, generator: torch.Generator | None, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the sampled classes, and the number of classes that each of them stands for."""
    if isinstance(negatives, numbers.Integral) and not isinstance(negatives, bool):
        negatives = int(negatives)
        if negatives < 1:
            raise ValueError(f"{op}: `negatives` must be at least 1, got {negatives}. None takes all classes.")
        if generator is None:  # one draw from the caller's random state, so that ranks stay in step
            generator = torch.Generator(device).manual_seed(int(torch.randint(2**62, ())) + first)
        size = min(negatives, n)
        drawn = torch.randperm(n, generator=generator, device=generator.device)[:size].to(device)
        return drawn, torch.full((size,), n / max(size, 1), dtype=torch.float64, device=device)
    if not (isinstance(negatives, tuple) and len(negatives) == 2 and all(isinstance(t, Tensor) for t in negatives)):
        raise TypeError(
            f"{op}: `negatives` must be a number or a pair of tensors (classes, probabilities), "
            f"got {type(negatives).__name__}."
        )
    drawn, probability = negatives
    if drawn.ndim != 1 or drawn.shape != probability.shape or drawn.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"{op}: `negatives` must be class ids (int64 or int32) and probabilities of one shape (m,), got "
            f"{tuple(drawn.shape)} of {drawn.dtype} and {tuple(probability.shape)}."
        )
    _check.below(op, "negatives", drawn, n, "classes below n_classes", "Classes count from 0, on each rank.")
    if len(drawn) and _check.readable(drawn) and int(drawn.min()) < 0:
        raise ValueError(f"{op}: `negatives` must hold classes from 0 on, got {int(drawn.min())}. It has no padding.")
    return drawn.to(device, torch.int64), 1 / probability.to(device)


def sampled(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    k: Tensor,
    temperature: float | Tensor,
    mask: Tensor | None,
    index: Tensor,
    labels: int,
    rho: float,
    dtype: torch.dtype,
    drawn: Tensor,
    counts_for: Tensor,
    shard: ClassShard | None,
) -> tuple[Tensor, Tensor]:
    """Return the loss and the number of labels of each row, with sums over classes estimated from a sample."""
    held, place = index >= 0, index.clamp(min=0)
    if weight.shape[0] == 0:  # an empty shard holds no label
        place, index, held = (t[:, :0] for t in (place, index, held))
        labels = 0
    features = features.to(dtype)
    with torch.autocast(features.device.type, enabled=False):
        own = (weight[place].to(dtype) * features.unsqueeze(1)).sum(-1)
        others = features @ weight[drawn].to(dtype).T
    if bias is not None:
        own, others = own + bias[place].to(dtype), others + bias[drawn].to(dtype)
    if mask is not None:
        own = own.masked_fill(~mask.gather(-1, place), -torch.inf)
        others = others.masked_fill(~mask[:, drawn], -torch.inf)
    listed = torch.zeros_like(others, dtype=torch.bool)
    for column in index.unbind(-1):
        listed |= column.unsqueeze(-1) == drawn
    x = torch.cat([own, others], -1).to(k.dtype) / temperature
    share = torch.cat([held.to(x.dtype), torch.where(listed, 0, counts_for.to(x.dtype))], -1)
    x = torch.where(share > 0, x, -torch.inf)
    nu, broken = _WeightedThreshold.apply(x, share, k, shard)
    z = torch.where(x.isnan(), 0, x) + nu
    positive = held & (torch.arange(index.shape[-1], device=index.device) < labels)
    loss = torch.where(positive, -F.logsigmoid(z[:, : index.shape[-1]]), 0).sum(-1)
    if rho > 0:
        z, share = z[:, index.shape[-1] :], share[:, index.shape[-1] :]
        loss = loss + (share * torch.where(share > 0, absence(z, rho), 0)).sum(-1)
    count = reduce(positive.to(x.dtype), "sum", shard).squeeze(-1)
    # Added, so that the threshold has the upstream gradient of such a row: without one it has no gradient.
    return total(loss, shard) + torch.where(broken.squeeze(-1), torch.nan, 0), count


class _WeightedThreshold(torch.autograd.Function):
    """``(x, share, k) -> nu`` with ``sum share * sigmoid(x + nu) = k`` in each row; 0 in those without, and which."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: Tensor, k: Tensor, shard: ClassShard | None) -> tuple[Tensor, Tensor]:
        nu, log_mass = _solve_weighted(x, share, k, shard)
        broken = nu.isnan()
        ctx.save_for_backward(x, share, nu, log_mass)
        ctx.shard = shard
        ctx.mark_non_differentiable(broken)
        return torch.where(broken, 0, nu), broken

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        x, share, nu, log_mass = ctx.saved_tensors
        with torch.no_grad():
            given = reduce(grad.detach(), "sum", ctx.shard)
            z = x + nu
            p = share * (F.logsigmoid(z) + F.logsigmoid(-z) - log_mass).exp()
            asked = nu.isnan() & (given != 0)
            dx = torch.where(x.isfinite() & nu.isfinite(), -p * given, torch.where(asked, torch.nan, 0))
            dk = torch.where(nu.isfinite(), given * (-log_mass).exp(), torch.where(asked, torch.nan, 0))
        if torch.is_grad_enabled():
            dx, dk = FirstOnly.apply(FIRST_ONLY, 3, grad, x, share, dx, dk)
        return dx, None, dk, None


def _solve_weighted(x: Tensor, share: Tensor, k: Tensor, shard: ClassShard | None) -> tuple[Tensor, Tensor]:
    """Return nu and ``log sum share h`` of each row; nu is nan where the shares do not reach k."""
    finite = x.isfinite() & (share > 0)
    n, n_top, n_nan = reduce([share * finite, share * (x == torch.inf), x.isnan().to(x.dtype)], "sum", shard)
    left = search.feasible(k, n, n_top, n_nan)
    k, n, solvable, end = left
    x = torch.where(finite, x, -torch.inf)
    high, low = reduce([x, torch.where(finite, -x, -torch.inf)], "max", shard)
    high, low = torch.where(solvable, high, 0), torch.where(solvable, -low, 0)
    center = high + reduce(share * (x - high).exp(), "sum", shard).log() - k.log()  # as if every y were small
    middle = k.log() - (n - k).log()
    slack = 8 * torch.finfo(x.dtype).eps * (1 + center.abs() + middle.abs())
    center = torch.where(solvable, center.clamp(max=high - middle), 0)
    start = search.Start(center, middle - (high - center) - slack, middle + (center - low) + slack)

    def sums(center: Tensor, delta: Tensor) -> search.Sums:
        d = x - center
        peak = torch.where(solvable, reduce(-d.abs(), "max", shard), 0)
        parts = [share * part for part in search.small_parts(d, peak, delta)]
        return search.Sums(reduce(parts, "sum", shard), peak)

    root = search.iterate(sums, k, start, ~solvable, 4 * PASSES, stops=True)
    nu = torch.where(solvable, root.delta - root.center, end)
    return nu, log_mass_of(torch.where(finite, x + nu, torch.nan), share, shard)
