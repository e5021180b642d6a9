"""A linear layer and the LML loss in one: rows x classes is never there as a whole, on one device or on many."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lastlayer import _check
from lastlayer._check import Labels, Reduction
from lastlayer.project import lml as projection
from lastlayer.shard import ClassShard, limited, local_part, reduce, spread, unwrap, wrap_rows

_TILE = {"cpu": 1 << 18, "cuda": 1 << 23}  # logits that are there at a time, with up to a dozen temporaries
_CANDIDATES = 1024  # up to this k the largest logits of a row are kept for the start
_SAMPLE = 4096  # above it, the start is the solution on so many classes
_PASSES = 40  # a bound: three or four end the search on all but built rows


def linear_lml_loss(
    features: Tensor,
    weight: Tensor,
    target: Tensor,
    k: float | Tensor,
    *,
    bias: Tensor | None = None,
    shard: ClassShard | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Compute ``lml_loss(F.linear(features, weight, bias), target, k)`` without ever holding the logits.

    .. math:: -\sum_{j \in Y} \log \sigma(w_j^\top f + b_j + \nu), \qquad \sum_j \sigma(w_j^\top f + b_j + \nu) = k

    Blocks of classes are computed, used and dropped: once for the start and the labels, once for each pass of the
    search (two or three as a rule), once more in backward. Memory beyond the arguments and their gradients is a few
    numbers a row and one block. On a GPU one flag a pass is read back, so it cannot be captured in a CUDA graph.

    Args:
        features: The inputs of the layer, shape ``(*batch, in_features)``.
        weight: Shape ``(n_classes, in_features)``; with `shard`, the rows of this rank's classes.
        target: One class a row (``batch``), index lists padded with -1 (``(*batch, m)``), or multi-hot
            ``(*batch, n_classes)``, which is turned into index lists.
        k: The number of labels a row has, observed or not; a number or a tensor that broadcasts to ``batch``.
        bias: Shape ``(n_classes,)``; ``-inf`` rules a class out.
        shard: This rank's slice, when the classes are split over processes; index targets hold global classes.
        reduction: ``"none"`` is a loss a row; ``"mean"`` is over the rows with a label, 0 if there is none.

    Returns:
        The loss, of the dtype the logits would have, as in :func:`~lastlayer.lml_loss` with ``observed=0``. First
        derivatives only.

    Example:
        >>> features, weight = torch.eye(2), torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.0, 3.0], [-1.0, 0.0]])
        >>> linear_lml_loss(features, weight, torch.tensor([[0, 1], [2, -1]]), k=2)
        tensor(0.3801)
    """
    op = "linear_lml_loss"
    weight, shard, _ = unwrap(op, weight, shard, 0, k)
    bias = local_part(bias)
    _check_layer(op, features, weight, bias, shard)
    _check.choice(op, "reduction", reduction, ("none", "mean", "sum"))
    batch, n = features.shape[:-1], weight.shape[0]
    rows = batch.numel()
    dtype = _dot_dtype(features)
    shape = torch.empty((), dtype=dtype, device=features.device).expand(*batch, n)
    labels = _check.target(op, local_part(target), shape, shard)
    cardinality = _check.cardinality(op, k, shape, shard)
    index = _index_lists(labels)
    loss, count = _LinearLML.apply(
        spread(features, shard).reshape(rows, features.shape[-1]),
        weight,
        bias,
        cardinality.reshape(rows, 1),
        index.reshape(rows, index.shape[-1]),
        dtype,
        _largest_rank(k),
        shard,
    )
    return _check.reduced(op, loss.view(batch), reduction, count.view(batch) > 0).to(dtype)


def _check_layer(op: str, features: Any, weight: Any, bias: Any, shard: ClassShard | None) -> None:
    _check.logits(op, features, "features")
    _check.logits(op, weight, "weight")
    if weight.ndim != 2 or weight.shape[1] != features.shape[-1]:
        raise ValueError(
            f"{op}: `weight` must have shape (n_classes, {features.shape[-1]}), got {tuple(weight.shape)}. "
            "Its rows are classes, as in torch.nn.Linear."
        )
    if shard is not None and weight.shape[0] != shard.size:
        raise ValueError(
            f"{op}: `weight` must hold the {shard.size} classes of `shard`, got {weight.shape[0]} rows. "
            "Pass this rank's rows."
        )
    if bias is not None and (not isinstance(bias, Tensor) or bias.shape != weight.shape[:1]):
        got = tuple(bias.shape) if isinstance(bias, Tensor) else type(bias).__name__
        raise ValueError(f"{op}: `bias` must have shape ({weight.shape[0]},), got {got}.")
    autocast = torch.is_autocast_enabled(features.device.type)
    if weight.dtype != features.dtype and not autocast:
        raise TypeError(
            f"{op}: `weight` must be of the dtype of `features`, {features.dtype}, got {weight.dtype}. "
            "Convert one, or use torch.autocast."
        )


def _dot_dtype(features: Tensor) -> torch.dtype:
    """The dtype in which the logits are computed, as F.linear would."""
    device = features.device.type
    if torch.is_autocast_enabled(device) and features.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return features.dtype


def _index_lists(labels: Labels) -> Tensor:
    """Return the labels as index lists; a dense target is there already, so reading its largest count costs little."""
    if labels.index is not None:
        return labels.index
    assert labels.dense is not None
    found = (labels.dense > 0).to(torch.uint8)
    most = int(found.sum(-1).max()) if found.numel() else 0
    values, index = found.topk(most, -1)
    return torch.where(values > 0, index, -1)


def _largest_rank(k: float | Tensor) -> int:
    """The largest rank of a logit that the start needs; reads a tensor of cardinalities."""
    if isinstance(k, Tensor):
        k = float(k.detach().double().nan_to_num(0, 0, 0).max()) if k.numel() else 0.0
    return math.floor(float(k)) + 1


class _Layer:
    """The layer as blocks of logits, and what is done with a block: in plain torch, or by kernels where they apply."""

    def __init__(self, features: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.features = features.to(dtype)
        self.weight, self.bias, self.dtype = weight, bias, dtype
        self.work = torch.promote_types(dtype, torch.float32)
        self.rows, self.n = features.shape[0], weight.shape[0]
        self.kernels = _kernels(self.features)
        self.step = max(256, _TILE.get(features.device.type, 1 << 23) // max(self.rows, 1))

    def logits(self, classes: slice) -> Tensor:
        bias = None if self.bias is None else self.bias[classes].to(self.dtype)
        with torch.autocast(self.features.device.type, enabled=False):
            return F.linear(self.features, self.weight[classes].to(self.dtype), bias)

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        for start in range(0, self.n, self.step):
            classes = slice(start, min(start + self.step, self.n))
            yield classes, self.logits(classes)

    def zeros(self, numbers: int) -> Tensor:
        """Return what the blocks' sums are added to: ``(rows, parts, numbers)``."""
        if self.kernels is not None:
            return self.kernels.partial_sums(self.features[:, :1].expand(-1, min(self.step, max(self.n, 1))), numbers)
        return self.features.new_zeros(self.rows, 1, numbers, dtype=self.work)

    def add_counts(self, sums: Tensor, x: Tensor) -> None:
        """Add how many logits of a block are finite, ``+inf`` and nan."""
        if self.kernels is not None:
            self.kernels.add_counts(sums, x)
        else:
            for i, flag in enumerate((x.isfinite(), x == torch.inf, x.isnan())):
                sums[:, 0, i] += flag.sum(-1)

    def add_sums(self, sums: Tensor, x: Tensor, center: Tensor, delta: Tensor, peak: Tensor) -> None:
        """Add the sums of :func:`~lastlayer.project.lml.small_parts` of a block, and that of the squares of h."""
        if self.kernels is not None:
            self.kernels.add_sums(sums, x, center, delta, peak)
            return
        d = _finite(x.to(self.work)) - center
        a, b, *others = projection.small_parts(d, peak, delta)
        squares = (a + b).square() * peak.exp()
        for i, part in enumerate((a, b, *others, squares)):
            sums[:, 0, i] += part.sum(-1)

    def grad(self, x: Tensor, center: Tensor, delta: Tensor, log_mass: Tensor, pulled: Tensor) -> Tensor:
        """Return ``pulled * h / sum h`` for a block."""
        if self.kernels is not None:
            return self.kernels.grad_block(x, center, delta, log_mass, pulled)
        depth = -((x.to(self.work) - center) + delta).abs()
        share = (depth - 2 * depth.exp().log1p() - log_mass).exp()
        dx = torch.where(x.isfinite() & ~delta.isinf(), share, 0) * pulled
        return torch.where(delta.isnan(), delta, dx)


def _kernels(x: Tensor) -> ModuleType | None:
    from lastlayer._triton import unavailable

    if x.dtype == torch.float64 or unavailable(x.device):
        return None
    return importlib.import_module("lastlayer._triton.linear")


def _finite(x: Tensor) -> Tensor:
    return x.nan_to_num(-torch.inf, -torch.inf, -torch.inf)


def _within(index: Tensor, classes: slice) -> tuple[Tensor, Tensor]:
    """Return which labels are in a block, and their place there (0 where they are not)."""
    inside = (index >= classes.start) & (index < classes.stop)
    return inside, torch.where(inside, index - classes.start, 0)


class _Scan:
    """What one look at all logits gives: counts, the labels' logits, the largest, and the range."""

    def __init__(self, layer: _Layer, index: Tensor, limit: int) -> None:
        zero = layer.features.new_zeros(layer.rows, 1, dtype=layer.work)
        counts = layer.zeros(3)
        self.labels = torch.full(index.shape, -torch.inf, dtype=layer.work, device=index.device)
        self.top = zero[:, :0]
        self.high, self.low = zero - torch.inf, zero + torch.inf
        for classes, x in layer.blocks():
            inside, place = _within(index, classes)
            self.labels = torch.where(inside, x.gather(-1, place).to(layer.work), self.labels)
            layer.add_counts(counts, x)
            if limit <= _CANDIDATES:
                best = _finite(x).topk(min(limit, x.shape[-1]), -1).values.to(layer.work)
                best = torch.cat([self.top, best], -1)
                self.top = best.topk(min(limit, best.shape[-1]), -1).values
            else:
                self.high = torch.maximum(self.high, _finite(x).amax(-1, keepdim=True))
                self.low = torch.minimum(self.low, -_finite(-x).amax(-1, keepdim=True))
        self.n, self.n_top, self.n_nan = counts.sum(1).split(1, -1)


def _start(
    layer: _Layer, scan: _Scan, k: Tensor, n: Tensor, solvable: Tensor, limit: int, shard: ClassShard | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return ``(center, lo, hi, near)`` as :func:`~lastlayer.project.lml.bracket` does; near is None if unknown."""
    if limit <= _CANDIDATES:
        return projection.bracket(scan.top, k, n, solvable, limited(shard, limit - 1))
    sample = layer.logits(slice(0, layer.n, max(1, layer.n // _SAMPLE))).to(layer.work)
    held = reduce(sample.isfinite().to(k.dtype), "sum", shard)
    share = torch.where(solvable, k * held / n.clamp(min=1), 0)
    center, delta = projection.solve(_finite(sample), share, shard)
    high, low = reduce([scan.high, -scan.low], "max", shard)
    center = torch.where(delta.isfinite(), center - delta, (high - low) / 2).clamp(-low, high)
    middle = torch.where(solvable, k.log() - (n - k).log(), 0)
    slack = 8 * torch.finfo(k.dtype).eps * (1 + center.abs() + middle.abs())
    center = torch.where(solvable, center, 0)
    high, low = torch.where(solvable, high, 0), torch.where(solvable, -low, 0)
    return center, middle - (high - center) - slack, middle + (center - low) + slack, None


def _sums(
    layer: _Layer, center: Tensor, delta: Tensor, near: Tensor | None, shard: ClassShard | None
) -> tuple[list[Tensor], Tensor]:
    """Return the sums of a pass over ``exp(peak)``, the last of them that of the squares of h, and the peak."""
    fixed = None if near is None else (-(near - center).abs()).amax(-1, keepdim=True)
    peak = torch.full_like(center, -torch.inf) if fixed is None else fixed
    sums = layer.zeros(6)
    center, delta = center.contiguous(), delta.contiguous()
    for _, x in layer.blocks():
        if fixed is None:
            nearest = -(_finite(x.to(layer.work)) - center).abs().amin(-1, keepdim=True)
            moved = torch.maximum(peak, nearest)
            sums, peak = _rescaled(sums, peak, moved), moved
        layer.add_sums(sums, x, center, delta, peak if near is not None else _usable(peak))
    if shard is not None and fixed is None:
        moved = reduce(peak, "max", shard)
        sums, peak = _rescaled(sums, peak, moved), moved
    return list(reduce(sums.sum(1).split(1, -1), "sum", shard)), _usable(peak)


def _usable(peak: Tensor) -> Tensor:
    return torch.where(peak.isfinite(), peak, 0)


def _rescaled(sums: Tensor, peak: Tensor, moved: Tensor) -> Tensor:
    factor = torch.where(peak.isfinite(), (peak - moved).exp(), 0).unsqueeze(-1)
    counts = torch.arange(sums.shape[-1], device=sums.device) == 2  # a count has no scale
    return torch.where(counts, sums, sums * factor)


def _search(
    layer: _Layer, scan: _Scan, k: Tensor, limit: int, shard: ClassShard | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(center, delta, log sum h)`` of each row, as in :func:`~lastlayer.project.lml.solve`."""
    n, n_top, n_nan = reduce([scan.n, scan.n_top, scan.n_nan], "sum", shard)
    k = k - n_top
    solvable = (k > 0) & (k < n) & (n_nan == 0)
    end = torch.where(n_nan > 0, torch.nan, torch.where(k == 0, -torch.inf, torch.where(k == n, torch.inf, torch.nan)))
    k = torch.where(solvable, k, n / 2)
    center, lo, hi, near = _start(layer, scan, k, n, solvable, limit, shard)
    delta, done, log_mass = torch.zeros_like(center), ~solvable, torch.zeros_like(center)
    for _ in range(_PASSES):
        (*sums, squares), peak = _sums(layer, center, delta, near, shard)
        step, lo, hi, close = projection.advance(sums, peak, k, lo, hi)
        step = torch.where(done, 0, step)
        t = torch.where(close, step, 0)
        mass = sums[0] + sums[1]
        mass = mass + (sums[1] - sums[0]) * t + (mass - 6 * squares) * t * t / 2  # sum h after the step
        log_mass = torch.where(done, log_mass, peak + mass.log())
        moved = torch.where(done | close, center, center - (delta + step))
        delta = (delta + step) + (moved - center)
        center, lo, hi, done = moved, lo - step, hi - step, done | close
        if bool(done.all()):
            break
    return torch.where(solvable, center, 0), torch.where(solvable, delta, end), log_mass


class _LinearLML(torch.autograd.Function):
    """``(features, weight, bias, k) -> (loss, number of labels)``, each a row."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        k: Tensor,
        index: Tensor,
        dtype: torch.dtype,
        limit: int,
        shard: ClassShard | None,
    ) -> tuple[Tensor, Tensor]:
        layer = _Layer(features, weight, bias, dtype)
        scan = _Scan(layer, index, limit)
        center, delta, log_mass = _search(layer, scan, k, limit, shard)
        z = projection.points(scan.labels, center, delta)
        held = index >= 0
        live = held & scan.labels.isfinite() & delta.isfinite()
        loss, pull, count = reduce(
            [
                torch.where(held, -F.logsigmoid(z), 0),
                torch.where(live, (-z).sigmoid(), 0),
                held.to(z.dtype),
            ],
            "sum",
            shard,
        )
        center, delta, log_mass = center.contiguous(), delta.contiguous(), log_mass.contiguous()
        ctx.save_for_backward(
            features, weight, bias, index, center, delta, log_mass, pull, torch.where(live, z, torch.inf)
        )
        ctx.dtype = dtype
        ctx.mark_non_differentiable(count)
        return loss.squeeze(-1), count.squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        features, weight, bias, index, center, delta, log_mass, pull, z = ctx.saved_tensors
        layer = _Layer(features, weight, bias, ctx.dtype)
        grad = grad.unsqueeze(-1).to(layer.work)
        pulled = (grad * pull).contiguous()
        toward = -grad * (-z).sigmoid()
        wants_features, wants_weight, wants_bias, wants_k = ctx.needs_input_grad[:4]
        grad_features = torch.zeros_like(features, dtype=layer.work) if wants_features else None
        grad_weight = torch.empty_like(weight) if wants_weight else None
        grad_bias = torch.empty_like(bias) if wants_bias else None
        for classes, x in layer.blocks():
            dx = layer.grad(x, center, delta, log_mass, pulled)
            inside, place = _within(index, classes)
            dx.scatter_add_(-1, place, torch.where(inside, toward, 0))
            if grad_bias is not None:
                grad_bias[classes] = dx.sum(0)
            dx = dx.to(ctx.dtype)
            if grad_features is not None:
                grad_features += dx @ layer.weight[classes].to(ctx.dtype)
            if grad_weight is not None:
                grad_weight[classes] = dx.T @ layer.features
        grad_k = torch.where(delta.isinf(), 0, -pulled * (-log_mass).exp()) if wants_k else None
        if grad_features is not None:
            grad_features = grad_features.to(features.dtype)
        return grad_features, grad_weight, grad_bias, grad_k, None, None, None, None


class ShardedLinear(nn.Module):
    """A linear layer whose classes are split over processes: each holds its rows of the weight.

    Every rank passes the same features and gets the logits of its own classes; the gradient of the features is added
    up over the ranks. :meth:`loss` never holds the logits. The initial values of a class depend on the seed and the
    class alone, not on the split, so long as all ranks have the same seed.

    Args:
        in_features: The size of a feature vector.
        n_classes: The number of classes of all ranks together.
        bias: Whether there is a bias.
        shard: This rank's slice; ``None`` holds all classes. See :meth:`ClassShard.split`.
        device: Where the parameters are.
        dtype: The dtype of the parameters.

    Example:
        >>> layer = ShardedLinear(8, 100)
        >>> features = torch.randn(4, 8)
        >>> layer(features).shape
        torch.Size([4, 100])
        >>> layer.loss(features, torch.tensor([3, 1, 4, 1]), k=5).backward()
    """

    _init_block = 4096  # classes that share a random state

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        *,
        bias: bool = True,
        shard: ClassShard | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if shard is not None and shard.stop > n_classes:
            raise ValueError(
                f"ShardedLinear: `shard` must end at n_classes={n_classes} or before, got {shard.stop}. "
                "Use ClassShard.split(n_classes)."
            )
        self.in_features, self.n_classes, self.shard = in_features, n_classes, shard
        rows = n_classes if shard is None else shard.size
        self.weight = nn.Parameter(torch.empty(rows, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial values of nn.Linear, alike for every split of the classes."""
        seed = int(torch.randint(2**62, ()))  # one draw of the caller's random state, on every rank
        start = 0 if self.shard is None else self.shard.start
        stop = start + self.weight.shape[0]
        bound = 1 / math.sqrt(max(self.in_features, 1))
        with torch.no_grad():
            for first in range(start // self._init_block * self._init_block, stop, self._init_block):
                generator = torch.Generator().manual_seed((seed + first) % 2**62)
                values = torch.rand(self._init_block, self.in_features + 1, generator=generator)
                low, high = max(first, start), min(first + self._init_block, stop)
                values = ((2 * values - 1) * bound)[low - first : high - first]
                self.weight[low - start : high - start] = values[:, :-1].to(self.weight)
                if self.bias is not None:
                    self.bias[low - start : high - start] = values[:, -1].to(self.bias)

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits of this rank's classes, shape ``(*batch, local classes)``."""
        return F.linear(spread(features, self.shard), self.weight, self.bias)

    def loss(self, features: Tensor, target: Tensor, k: float | Tensor, *, reduction: Reduction = "mean") -> Tensor:
        """Return :func:`linear_lml_loss` of this layer: the same number on every rank."""
        return linear_lml_loss(features, self.weight, target, k, bias=self.bias, shard=self.shard, reduction=reduction)

    def sharded_state(self) -> dict[str, Tensor]:
        """Return the parameters for torch.distributed.checkpoint, which loads into them in place.

        What four ranks save, two or one can load: ``dcp.save({"head": layer.sharded_state()}, checkpoint_id=path)``.
        """
        state = {"weight": self.weight.detach()}
        if self.bias is not None:
            state["bias"] = self.bias.detach()
        return {name: wrap_rows(value, self.n_classes, self.shard) for name, value in state.items()}

    def extra_repr(self) -> str:
        """Say what is shown between the brackets of the layer's name."""
        held = "" if self.shard is None else f", classes {self.shard.start} to {self.shard.stop}"
        return f"in_features={self.in_features}, n_classes={self.n_classes}, bias={self.bias is not None}{held}"
