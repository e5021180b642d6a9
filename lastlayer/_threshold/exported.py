"""The projection as a short graph of plain operators, for exports to other runtimes.

The search of `search.py` unrolls to some 1,500 operators. This one takes steps that need no bounds: each is the root
of a model that never passes the solution, and its error is of the third order. ``torch.onnx`` makes one Loop of the
passes, which ends when all rows are close; other exports hold a fixed number of passes one after another. A last pass
sums without cancellation and takes the step that decides the accuracy.

Exponentials are taken once, as ``e = exp(-d)`` with the distances d from a center; from then on ``y = 1 / (1 + e s)``
with ``s = exp(-delta)``. Runtimes have sigmoids that are 1e-8 at the least, and are of no use for sums of many classes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lastlayer._ranked import to_onnx
from lastlayer._threshold.search import points
from lastlayer.shard import kth_largest

_PASSES = 5  # one after another; of 200,000 rows of every kind none takes more to be exact in float64
_MOST = 20  # of the loop
_CLOSE = 0.05  # a step; the next one would be below 1e-4, and the last pass squares that


def project(x: Tensor, k: float | Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(out, center, delta)`` as `project.lml._plain` does, of scores in the dtype of the arithmetic."""
    upper, lower = _neighbours(x, k)
    solvable = (upper < torch.inf) & (lower > -torch.inf)
    k = k if isinstance(k, Tensor) else torch.full((), k, dtype=x.dtype, device=x.device)
    upper, lower, end = torch.where(solvable, upper, 0), torch.where(solvable, lower, 0), _end(upper, lower, k)
    middle, large = lower / 2 + upper / 2, torch.finfo(x.dtype).max
    # Without a finite threshold all finite scores are on one side of the center.
    center = torch.where(solvable, middle - _first(k, x.shape[-1]), -(end.clamp(-large, large)))
    # A gap beyond that is made narrower from both sides: the solution stays where it is, and nothing underflows.
    spare = ((upper - lower) / 2 + 2.5 * math.log(torch.finfo(x.dtype).eps)).clamp(min=0)
    depth = torch.maximum(torch.minimum(x - middle, spare), -spare) - (x - center)
    held = depth.clamp(max=math.log(large / 1e6)).exp()  # so that its product with any s is finite
    s, delta, none = _last(held, k, _searched(held, k, solvable))
    delta = torch.where(solvable, delta, end + none)
    if kind == "y":
        y = 1 / (1 + held * torch.where(solvable, s, 1 + none))
        return torch.where(x == -torch.inf, 0 * y, y), center, delta  # 0, or nan in a row without a solution
    if kind == "nu":
        return x.new_empty(0), center, delta
    z = points(x, center, delta)
    z = torch.where(x == -torch.inf, z.detach(), z)
    return z.clamp(max=0) - (1 + (-z.abs()).exp()).log(), center, delta


def _neighbours(x: Tensor, k: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return the entries of ranks ``ceil(k)`` and ``floor(k) + 1``, 1 being the largest; infinite beyond the ends."""
    n = x.shape[-1]
    if isinstance(k, Tensor):
        rank = torch.where(k > 0, k, 0).clamp(max=n)  # of nan as well
        upper, lower = kth_largest(x, torch.cat([rank.ceil(), rank.floor() + 1], -1), None).split(1, -1)
        upper = torch.where(k > n, -torch.inf, torch.where(k > 0, upper, torch.inf))
        return upper, torch.where(k < 0, torch.inf, torch.where(k < n, lower, -torch.inf))
    upper_rank, lower_rank = math.ceil(k), math.floor(k) + 1
    best = x.topk(min(lower_rank, n), -1).values
    upper, lower = best[..., upper_rank - 1 : upper_rank], best[..., lower_rank - 1 : lower_rank]
    beyond = torch.full_like(best[..., :1], torch.inf)
    return upper if k > 0 else beyond, lower if k < n else -beyond


def _end(upper: Tensor, lower: Tensor, k: Tensor) -> Tensor:
    """Return nu where it is not finite, as `search.feasible` does: -inf, inf, or nan for an infeasible k."""
    nan = torch.full_like(upper, torch.nan)
    end = torch.where((upper == torch.inf) & (lower < torch.inf), -torch.inf, nan)
    end = torch.where((lower == -torch.inf) & (upper.abs() < torch.inf), torch.inf, end)
    return torch.where(k == k.floor(), end, nan)


def _first(k: Tensor, n: int) -> Tensor:
    """Return where the search begins, from the middle of the two neighbours: halfway between the bounds of nu."""
    k = k.clamp(0, n)
    lower = (k - (k.ceil() - 1)).log() - (n - k).log()
    upper = k.log() - (k.floor() + 1 - k).log()
    return (lower + upper).clamp(-200, 200) / 2  # infinite at both ends, where it is not used


def _searched(e: Tensor, k: Tensor, solvable: Tensor) -> Tensor:
    """Return ``delta`` close to the solution, in a loop or in a fixed number of passes.

    The numbers per row have the shape of the batch here. Given a fixed shape, the exporter takes the sizes within a
    loop for variable, and a last dimension of size 1 would not broadcast.
    """
    up = e < 1
    surplus, solvable = (up.to(e.dtype).sum(-1, keepdim=True) - k).squeeze(-1), solvable.squeeze(-1)

    def body(count: Tensor, step: Tensor, delta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        odds = e * (-delta).exp().unsqueeze(-1)
        y = 1 / (1 + odds)
        rest = odds * y
        h = y * rest
        a, b = (h * y).sum(-1), (h * rest).sum(-1)
        f = surplus + torch.where(up, -rest, y).sum(-1)
        # The root of b q^2 + 2 c q - a in q = exp(step); their squares would underflow for a tiny k.
        size = a + b
        a, b, c = a / size, b / size, (f - (b - a)) / (2 * size)
        root = c.abs() + (c * c + a * b).sqrt()
        step = torch.where(solvable, torch.where(c > 0, a / root, root / b).log(), 0)
        return count + 1, step, delta + step

    def unfinished(count: Tensor, step: Tensor, delta: Tensor) -> Tensor:
        return (count < _MOST) & (step.abs() > _CLOSE).any()

    count = torch.zeros((), dtype=torch.int64, device=e.device)
    state = (count, torch.ones_like(surplus), torch.zeros_like(surplus))
    if _loops():
        state = torch._higher_order_ops.while_loop(unfinished, body, state)
    else:
        for _ in range(_PASSES):
            state = body(*state)
    return state[2].unsqueeze(-1)


def _loops() -> bool:
    """Whether an ONNX file is being made by an exporter that knows loops."""
    if not to_onnx():
        return False
    try:
        from torch.onnx._internal.exporter._torchlib.ops import hop
    except ImportError:
        return False
    return hasattr(hop, "higher_order_while_loop")


def _last(e: Tensor, k: Tensor, delta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``exp(-delta)`` and ``delta`` after Newton's step from sums of what is small, y or 1 - y.

    The third is 0, or nan in a row with nan.
    """
    s = (-delta).exp()
    odds = e * s
    y = 1 / (1 + odds)
    rest = odds * y
    up = odds < 1
    f = (up.to(e.dtype).sum(-1, keepdim=True) - k) + torch.where(up, -rest, y).sum(-1, keepdim=True)
    step = f / (y * rest).sum(-1, keepdim=True)
    return s * step.exp(), delta - step, 0 * f
