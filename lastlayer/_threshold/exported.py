"""The projection as a short graph of plain operators, for exports to other runtimes.

The search of `search.py` unrolls to some 1,500 operators. Here are two shorter ones. Both take exponentials once, since
a sigmoid of other runtimes is 1e-8 at the least and of no use for sums of many classes.

`project` serves every kind of row, and is as accurate as `search.py`. It takes steps that need no bounds: each is the
root of a model that never passes the solution, and its error is of the third order. ``torch.onnx`` makes one Loop of
the passes, which ends when all rows are exact. Other exports hold a fixed number of passes one after another, and a
Newton step at the end.

`probabilities` puts a quick search before that, where ``torch.onnx`` is at work: each operator of another runtime reads
and writes the whole batch, so that few of them count. From ``p = softmax(x)`` on, all classes have
``y = p / (p + v)`` with one v per row. After two passes most batches are close; others go on in a Loop. A batch in
which some row does not get close even there, such as one without a solution, one with an infinite score, or one with a
wide gap after k classes, is given to `project`.
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
_QUICK = 8  # passes of the quick search, which take v no further than 1e-21 from its start: nothing underflows
_START = 0.75  # the start over 1 / k, which is the solution for many equal scores: others have a smaller one
_STRIDE = math.exp(6)  # the largest factor of v in one pass


def probabilities(x: Tensor, k: float | Tensor) -> Tensor:
    """Return y of scores in the dtype of the arithmetic, by the quick search where that gets close to all rows."""
    n = x.shape[-1]
    if n == 0 or not _loops():
        return project(x, k, "y")[0]
    p = x.softmax(-1)
    v, far = _quick(p, k)
    sizes = (k.expand(v.shape).squeeze(-1),) if isinstance(k, Tensor) else ()

    # As in `_searched`, numbers per row have the shape of the batch on their way in, and n is a number.
    def close(x: Tensor, p: Tensor, v: Tensor, *sizes: Tensor) -> Tensor:
        return p / (p + v.unsqueeze(-1))

    def longer(x: Tensor, p: Tensor, v: Tensor, *sizes: Tensor) -> Tensor:
        v, far = _continued(p, sizes[0] if sizes else k, v)
        y: Tensor = torch.cond(far <= 0, close, sure, (x, p, v, *sizes))
        return y

    def sure(x: Tensor, p: Tensor, v: Tensor, *sizes: Tensor) -> Tensor:
        return _sure(x, sizes[0].unsqueeze(-1) if sizes else k, n, "y", loops=True)[0]

    y: Tensor = torch.cond(far <= 0, close, longer, (x, p, v.squeeze(-1), *sizes))
    return y


def _quick(p: Tensor, k: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return v after two passes, and the number of rows that are not close; both k and v have a last dimension of 1.

    The passes stand one after another: for one row, a loop costs more than its operators.
    """
    v, _ = _stepped(p, k, _START / k if isinstance(k, Tensor) or k else math.inf)
    v, close = _stepped(p, k, v)
    return v, torch.where(close, 0.0, 1.0).sum()


def _continued(p: Tensor, k: float | Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same after more passes, from v on; k and v have the shape of the batch."""
    k = k.unsqueeze(-1) if isinstance(k, Tensor) else k

    def body(left: Tensor, far: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        v, close = _stepped(p, k, v.unsqueeze(-1))
        return left - 1, torch.where(close, 0.0, left).sum(), v.squeeze(-1)

    def unfinished(left: Tensor, far: Tensor, v: Tensor) -> Tensor:
        return torch.minimum(far, left) > 0

    left, far = (torch.full((), value, dtype=p.dtype, device=p.device) for value in (_QUICK - 2, 1))
    _, far, v = torch._higher_order_ops.while_loop(unfinished, body, (left, far, v))
    return v, far


def _stepped(p: Tensor, k: float | Tensor, v: float | Tensor) -> tuple[Tensor, Tensor]:
    """Take a step towards v with ``sum p / (p + v) = k``; the second says which rows are close after it, nan is not.

    The steps are Newton's for log sum y as a function of log v. One that changes v by a share d, close to the
    solution, leaves a relative error of at most d^2 / 2 times the mean of y weighted by y: twice the bend over the
    slope is a difference of that mean and one that is at most twice as large.
    """
    y = p / (p + v)
    total, squares = y.sum(-1, keepdim=True), (y * y).sum(-1, keepdim=True)
    steepness = total / (total - squares)
    ratio = (total / k).pow(steepness).clamp(1 / _STRIDE, _STRIDE)
    change = ratio - 1
    off = change * change * squares
    limit = 8 * torch.finfo(p.dtype).eps
    if isinstance(k, Tensor):
        off = off / k
    else:
        limit *= k
    if isinstance(k, Tensor) or k > 8:
        # What rounding takes from a sum above 8 shows where the slope is below 1 / 32 of it.
        steep = steepness * (limit / 32)
        off = torch.maximum(off, torch.where(k > 8, steep, 0) if isinstance(k, Tensor) else steep)
    return v * ratio, off <= limit


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
    beyond = _beyond(upper, half, k)
    k = k if isinstance(k, Tensor) else torch.full((), k, dtype=x.dtype, device=x.device)
    middle, half = torch.where(solvable, middle, 0), torch.where(solvable, half, 0)
    center = torch.where(solvable, middle - first, beyond)
    # A gap beyond that is made narrower from both sides: the solution stays where it is, and nothing underflows.
    spare = (half + 2.5 * math.log(torch.finfo(x.dtype).eps)).clamp(min=0)
    depth = torch.maximum(torch.minimum(x - middle, spare), -spare).detach() - (x - center)
    held = depth.clamp(max=math.log(torch.finfo(x.dtype).max / 1e6)).exp()  # so that its product with any s is finite
    s = _searched(held, k, solvable, loops=loops)
    s = s if loops else _last(held, k, solvable, s)
    none = 0 * s  # nan in a row with nan or with an infeasible k
    delta = torch.where(solvable, -s.log(), none - torch.inf * beyond)
    if kind == "y":
        y = 1 / (1 + held * s)
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


def _beyond(upper: Tensor, half: Tensor, k: float | Tensor) -> Tensor:
    """Return a center with all finite scores on one side, where nu is not finite: the largest number for ``-inf``.

    It is the smallest for ``inf``, and nan for an infeasible k, as in `search.feasible`.
    """
    large = torch.full((), torch.finfo(upper.dtype).max, dtype=upper.dtype, device=upper.device)
    side = torch.where(upper == torch.inf, large, -large)
    at_an_end = half == torch.inf
    if isinstance(k, Tensor):  # which may be nan
        at_an_end = at_an_end & (k == k.floor())
    return torch.where(at_an_end, side, torch.nan)


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
    """Return ``exp(-delta)``: exact in a loop, or close to the solution after a fixed number of passes.

    The numbers per row have the shape of the batch here. Given a fixed shape, the exporter takes the sizes within a
    loop for variable, and a last dimension of size 1 would not broadcast.
    """
    k, solvable = k.squeeze(-1), solvable.squeeze(-1)

    def body(left: Tensor, far: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, rest, f = _surplus(e * s.unsqueeze(-1), k)
        h = y * rest
        a, b = (h * y).sum(-1), (h * rest).sum(-1)
        # The root of a q^2 - 2 c q - b, the factor of s; their squares would underflow for a tiny k.
        size = a + b
        a, b, c = a / size, b / size, (f - (b - a)) / (2 * size)
        root = c.abs() + (c * c + a * b).sqrt()
        change = torch.where(solvable, torch.where(c > 0, root / a, b / root) - 1, 0 * f)
        return left - 1, (change * change > close * close).to(e.dtype).sum(), s + s * change

    def unfinished(left: Tensor, far: Tensor, s: Tensor) -> Tensor:
        return torch.minimum(left, far) > 0

    close = torch.finfo(e.dtype).eps ** (1 / 3) / 2  # the next change would be below eps
    left, far = (torch.full((), value, dtype=e.dtype, device=e.device) for value in (_MOST, 1))
    ones = torch.where(solvable, 1.0, 1.0).to(e.dtype)  # one operator, where `ones_like` of a variable size is two
    state = (left, far, ones)
    if loops:
        state = torch._higher_order_ops.while_loop(unfinished, body, state)
    else:
        for _ in range(_PASSES):
            state = body(*state)
    return state[2].unsqueeze(-1)


def _last(e: Tensor, k: Tensor, solvable: Tensor, s: Tensor) -> Tensor:
    """Return ``exp(-delta)`` after Newton's step from `s`, which has the derivatives of the solution."""
    y, rest, f = _surplus(e * s, k.squeeze(-1))
    step = f / (y * rest).sum(-1)
    return s * torch.where(solvable, step.unsqueeze(-1), 0 * f.unsqueeze(-1)).exp()


def _surplus(odds: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, 1 - y, and ``sum y - k`` by sums of whichever is small."""
    y = 1 / (1 + odds)
    rest, up = odds * y, odds < 1
    return y, rest, (up.to(y.dtype).sum(-1) - k) + torch.where(up, -rest, y).sum(-1)


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
