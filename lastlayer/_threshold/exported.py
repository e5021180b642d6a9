"""The projection as a short graph of plain operators, for exports to other runtimes.

The search of `search.py` unrolls to some 1,500 operators. Here are two shorter ones. Both take exponentials once, since
a sigmoid of other runtimes is 1e-8 at the least and of no use for sums of many classes.

`project` serves every kind of row, and is as accurate as `search.py`. It takes steps that need no bounds: each is the
root of a model that never passes the solution, and its error is of the third order. ``torch.onnx`` makes one Loop of
the passes, which ends when all rows are close; other exports hold a fixed number of passes one after another. A last
pass sums without cancellation and takes the step that decides the accuracy.

`probabilities` puts a quick search before that, where ``torch.onnx`` is at work: each operator of another runtime reads
and writes the whole batch, so that few of them count. From ``p = softmax(x)`` on, all classes have
``y = p / (p + v)`` with one v per row. A batch in which some row does not get close, such as one without a solution,
one with an infinite score, or one with a wide gap after k classes, is given to `project`.
"""

from __future__ import annotations

import math
from types import CodeType

import torch
from torch import Tensor

from lastlayer._ranked import to_onnx
from lastlayer._threshold.search import points

_PASSES = 5  # one after another; of 200,000 rows of every kind none takes more to be exact in float64
_MOST = 20  # of the loop
_CLOSE = 0.05  # a step; the next one would be below 1e-4, and the last pass squares that
_QUICK = 8  # passes of the quick search, which take v no further than 1e-21 from its start: nothing underflows
_START = 0.75  # the start over the solution for equal scores: others have a smaller one
_STRIDE = math.exp(6)  # the largest factor of v in one pass


def probabilities(x: Tensor, k: float | Tensor) -> Tensor:
    """Return y of scores in the dtype of the arithmetic, by the quick search where that gets close to all rows."""
    n = x.shape[-1]
    if n == 0 or not _loops():
        return project(x, k, "y")[0]
    p = x.softmax(-1)
    sizes = (k.squeeze(-1).expand(x.shape[:-1]),) if isinstance(k, Tensor) else ()
    v, close = _quick(p, sizes[0] if sizes else k)

    # As in `_searched`, numbers per row have the shape of the batch on their way in, and n is a number.
    def quick(x: Tensor, p: Tensor, v: Tensor, *sizes: Tensor) -> Tensor:
        return p / (p + v.unsqueeze(-1))

    def sure(x: Tensor, p: Tensor, v: Tensor, *sizes: Tensor) -> Tensor:
        return _sure(x, sizes[0].unsqueeze(-1) if sizes else k, n, "y", loops=True)[0]

    y: Tensor = torch.cond(close, quick, sure, (x, p, v, *sizes))
    return y


def _quick(p: Tensor, k: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return v with ``sum p / (p + v) = k``, close to the solution, and whether all rows are; k has one number per row.

    The steps are Newton's for log sum y as a function of log v, from below where rows of equal scores have their
    solution. One that changes v by a share d, close to the solution, leaves a relative error of at most d^2 / 2 times
    the mean of y weighted by y: twice the bend over the slope is a difference of that mean and one that is at most
    twice as large.
    """
    n, tiny = p.shape[-1], 8 * torch.finfo(p.dtype).eps
    limit = tiny if isinstance(k, Tensor) else tiny * k
    rounds = isinstance(k, Tensor) or k > 8

    def stepped(column: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = p / (p + column)
        total, squares = y.sum(-1), (y * y).sum(-1)
        steepness = total / (total - squares)
        return (total / k).pow(steepness).clamp(1 / _STRIDE, _STRIDE), squares, steepness

    def body(left: Tensor, far: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ratio, squares, steepness = stepped(v.unsqueeze(-1))
        change = ratio - 1
        off = change * change * squares
        if isinstance(k, Tensor):
            off = off / k
        if rounds:  # what rounding takes from a sum above 8 shows where the slope is below 1 / 32 of it
            share = steepness.pow(4) * (limit / 32**4)
            off = off + (torch.where(k > 8, share, 0) if isinstance(k, Tensor) else share)
        return left - 1, torch.where(off <= limit, 0.0, left).sum(), v * ratio  # nan is not close

    def unfinished(left: Tensor, far: Tensor, v: Tensor) -> Tensor:
        return torch.minimum(far, left) > 0

    left, far = (torch.full((), value, dtype=p.dtype, device=p.device) for value in (_QUICK - 1, 1))
    start = _START * (1 / k - 1 / n) if isinstance(k, Tensor) or k else math.inf
    first = start * stepped(start.unsqueeze(-1) if isinstance(start, Tensor) else start)[0]
    _, far, v = torch._higher_order_ops.while_loop(unfinished, body, (left, far, first))
    return v, far <= 0


def project(x: Tensor, k: float | Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(out, center, delta)`` as `project.lml._plain` does, of scores in the dtype of the arithmetic."""
    return _sure(x, k, x.shape[-1], kind, loops=_loops())


def _sure(x: Tensor, k: float | Tensor, n: int, kind: str, *, loops: bool) -> tuple[Tensor, Tensor, Tensor]:
    """As `project`, with passes in a loop or one after another."""
    upper, lower = _neighbours(x, k, n)
    high, low = upper / 2, lower / 2
    middle, half = high + low, high - low
    solvable = half < torch.inf
    first = _first(k, n) if isinstance(k, Tensor) else _first_of_all(k, n, loops=loops)
    k = k if isinstance(k, Tensor) else torch.full((), k, dtype=x.dtype, device=x.device)
    beyond = _beyond(upper, half, k)
    middle, half = torch.where(solvable, middle, 0), torch.where(solvable, half, 0)
    center = torch.where(solvable, middle - first, beyond)
    # A gap beyond that is made narrower from both sides: the solution stays where it is, and nothing underflows.
    spare = (half + 2.5 * math.log(torch.finfo(x.dtype).eps)).clamp(min=0)
    depth = torch.maximum(torch.minimum(x - middle, spare), -spare).detach() - (x - center)
    held = depth.clamp(max=math.log(torch.finfo(x.dtype).max / 1e6)).exp()  # so that its product with any s is finite
    s, delta, none = _last(held, k, _searched(held, k, solvable, loops=loops))
    delta = torch.where(solvable, delta, none - torch.inf * beyond)
    if kind == "y":
        y = 1 / (1 + held * torch.where(solvable, s, 1 + none))
        return torch.where(x == -torch.inf, none, y), center, delta
    if kind == "nu":
        return x.new_empty(0), center, delta
    z = points(x, center, delta)
    z = torch.where(x == -torch.inf, z.detach(), z)
    below = torch.minimum(z, z.new_zeros(()))  # its gradient at 0 is 1/2, that of the logarithm of y
    return below - (1 + (-z.abs()).exp()).log(), center, delta


def _neighbours(x: Tensor, k: float | Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return the entries of ranks ``ceil(k)`` and ``floor(k) + 1``, 1 being the largest; infinite beyond the ends."""
    if isinstance(k, Tensor):
        if n == 0:
            return torch.full_like(k, -torch.inf), torch.full_like(k, -torch.inf)
        rank = torch.where(k > 0, k, 0).clamp(max=n)  # of nan as well
        place = (torch.cat([rank.ceil(), rank.floor() + 1], -1) - 1).clamp(0, n - 1).long()
        upper, lower = x.sort(dim=-1, descending=True).values.gather(-1, place).split(1, -1)
        upper = torch.where(k > n, -torch.inf, torch.where(k > 0, upper, torch.inf))
        return upper, torch.where(k < 0, torch.inf, torch.where(k < n, lower, -torch.inf))
    upper_rank, lower_rank = math.ceil(k), math.floor(k) + 1
    best = x.topk(lower_rank if k < n else n, -1).values  # the least of both would stay unknown where n is
    upper, lower = best[..., upper_rank - 1 : upper_rank], best[..., lower_rank - 1 : lower_rank]
    beyond = torch.full_like(best[..., :1], torch.inf)
    return upper if k > 0 else beyond, lower if k < n else -beyond


def _beyond(upper: Tensor, half: Tensor, k: Tensor) -> Tensor:
    """Return a center with all finite scores on one side, where nu is not finite: the largest number for ``-inf``.

    It is the smallest for ``inf``, and nan for an infeasible k, as in `search.feasible`.
    """
    large = torch.full((), torch.finfo(upper.dtype).max, dtype=upper.dtype, device=upper.device)
    side = torch.where(upper == torch.inf, large, -large)
    return torch.where((half == torch.inf) & (k == k.floor()), side, torch.nan)


def _first(k: Tensor, n: int) -> Tensor:
    """Return where the search begins, from the middle of the two neighbours: halfway between the bounds of nu."""
    k = k.clamp(0, n)
    lower = (k - (k.ceil() - 1)).log() - (n - k).log()
    upper = k.log() - (k.floor() + 1 - k).log()
    return (lower + upper).clamp(-200, 200) / 2  # infinite at both ends, where it is not used


def _first_of_all(k: float, n: int, *, loops: bool) -> float | Tensor:
    """As `_first`, for one k: a number, or an operator or two where n is variable."""
    if not 0 < k < n:
        return 0.0  # not used
    known = math.log(k) + math.log(k - (math.ceil(k) - 1)) - math.log(math.floor(k) + 1 - k)
    # A strict export shows a variable n as a number; so does a branch for ``torch.onnx``, where the loop finds its way.
    if isinstance(n, torch.SymInt) or (torch.compiler.is_dynamo_compiling() and not loops):
        return known / 2 - torch.full((), n - k).log() / 2
    return (known - math.log(n - k)) / 2


def _searched(e: Tensor, k: Tensor, solvable: Tensor, *, loops: bool) -> Tensor:
    """Return ``-delta`` close to the solution, in a loop or in a fixed number of passes.

    The numbers per row have the shape of the batch here. Given a fixed shape, the exporter takes the sizes within a
    loop for variable, and a last dimension of size 1 would not broadcast.
    """
    up = e < 1
    surplus, solvable = (up.to(e.dtype).sum(-1, keepdim=True) - k).squeeze(-1), solvable.squeeze(-1)

    def body(left: Tensor, far: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        odds = e * shift.exp().unsqueeze(-1)
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
        return left - 1, (step * step > _CLOSE**2).to(e.dtype).sum(), shift - step

    def unfinished(left: Tensor, far: Tensor, shift: Tensor) -> Tensor:
        return torch.minimum(left, far) > 0

    left, far = (torch.full((), value, dtype=e.dtype, device=e.device) for value in (_MOST, 1))
    state = (left, far, 0 * surplus)
    if loops:
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
    if not torch.compiler.is_dynamo_compiling():
        _forget_shapes()
    return hasattr(hop, "higher_order_while_loop")


def _forget_shapes() -> None:
    """Empty the compiler's caches of torch's own loops and branches.

    An entry with a fixed number of classes, left by an earlier export, would fix a variable one when it is looked at.
    """
    for function in (torch.cond, torch._higher_order_ops.while_loop):
        for code in function.__code__.co_consts:
            if isinstance(code, CodeType):
                torch._dynamo.eval_frame.reset_code(code)


def _last(e: Tensor, k: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``exp(-delta)`` and ``delta`` after Newton's step from ``-shift``, by sums of what is small, y or 1 - y.

    The third is 0, or nan in a row with nan or with an infeasible k.
    """
    s = shift.exp()
    odds = e * s
    y = 1 / (1 + odds)
    rest = odds * y
    up = odds < 1
    f = (up.to(e.dtype).sum(-1, keepdim=True) - k) + torch.where(up, -rest, y).sum(-1, keepdim=True)
    step = f / (y * rest).sum(-1, keepdim=True)
    return s * step.exp(), -(shift + step), 0 * f
