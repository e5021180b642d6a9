"""A linear layer and the LML loss in one: rows x classes is never there as a whole, on one device or on many."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lastlayer import _check
from lastlayer._check import Labels, Reduction, Target
from lastlayer._threshold import dispatch, search
from lastlayer.loss import _rows
from lastlayer.loss.lml import lml_loss
from lastlayer.project.lml import apply
from lastlayer.shard import (
    ClassShard,
    Thresholds,
    gather,
    limited,
    local_part,
    reduce,
    spread,
    total,
    unwrap,
    wrap_rows,
)

_TILE = {"cpu": 1 << 20, "cuda": 1 << 27}  # bytes of the logits that are there at a time
_WHOLE = 1024  # up to so many classes all logits of a row are kept
_SAMPLE = 16384  # classes that say how deep the lists of the largest logits go
_REACH = 0.35  # the largest exp(x + nu) that a sum of powers stands for
_PASSES = 10  # a bound on the search; a row that needs more is solved from all its logits
_STEP = ("y2(1-y)", "y(1-y)2", "y", "bend", "h2")  # what a step of the search sums, by the names of their series
_UNSEEN = ("silent", "leak")  # and with `observed`


def linear_lml_loss(
    features: Tensor,
    weight: Tensor,
    target: Target,
    k: float | Tensor,
    *,
    bias: Tensor | None = None,
    observed: float = 0.0,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    negatives: int | tuple[Tensor, Tensor] | None = None,
    generator: torch.Generator | None = None,
    shard: ClassShard | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Compute ``lml_loss(F.linear(features, weight, bias), target, k)`` without ever holding the logits.

    .. math:: -\sum_{j \in Y} \log \sigma(w_j^\top f + b_j + \nu), \qquad \sum_j \sigma(w_j^\top f + b_j + \nu) = k

    Blocks of classes are computed, used and dropped: once in forward, once more in backward. What one look keeps of a
    row are its largest logits and power sums of the rest, from which the threshold and the loss follow to rounding; a
    row of which that is not true (`k` above about 1 % of the classes, as a rule) is solved from all its logits, a few
    rows at a time. Memory beyond the arguments and their gradients is one block, and some thousand numbers a row. On a
    GPU a flag is read back, so it cannot be captured in a CUDA graph. Logits of one block or less (128 MB on a GPU, 1
    MB on a CPU) are simply given to :func:`~lastlayer.lml_loss`.

    Args:
        features: The inputs of the layer, shape ``(*batch, in_features)``.
        weight: Shape ``(n_classes, in_features)``; with `shard`, the rows of this rank's classes.
        target: One class a row (``batch``), index lists padded with -1 (``(*batch, m)``), or multi-hot
            ``(*batch, n_classes)``, which is turned into index lists.
        k: The number of labels a row has, observed or not; a number or a tensor that broadcasts to ``batch``.
        bias: Shape ``(n_classes,)``; ``-inf`` rules a class out.
        observed: The probability that a label is observed, as in :func:`~lastlayer.lml_loss`.
        temperature: Divides the logits; a number, or a tensor that broadcasts to ``batch``.
        mask: Boolean, True where a class takes part; broadcasts to ``(*batch, n_classes)``.
        negatives: ``None`` sums over all classes. A number draws so many classes (of this rank), uniformly and without
            replacement, alike for all rows; a pair is a sample of your own: class ids (of this rank, from 0) and the
            probability with which each was to be drawn. A row's labels count in full, and a sampled class that is none
            of them as ``1 / probability`` classes: the sums over classes are those of all classes in expectation.
            Threshold and loss are no linear functions of them, so they have a bias, of the order of one over the
            number drawn. Holds the sampled logits; the weight's gradient is 0 for classes that were not drawn.
        generator: Of the draw; with `shard`, each rank draws from its own classes.
        shard: This rank's slice, when the classes are split over processes; index targets hold global classes.
        reduction: ``"none"`` is a loss a row; ``"mean"`` is over the rows that contribute, 0 if there is none.

    Returns:
        The loss, of the dtype the logits would have, as in :func:`~lastlayer.lml_loss`. First derivatives only, but for
        logits of one block.

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
    rho = _check.number(op, "observed", observed, 0, 1)
    batch, n = features.shape[:-1], weight.shape[0]
    rows = batch.numel()
    dtype = _dot_dtype(features)
    shape = torch.empty((), dtype=dtype, device=features.device).expand(*batch, n)
    labels = _check.target(op, local_part(target), shape, shard)
    cardinality = _check.cardinality(op, k, shape, shard)
    mask = _check.mask(op, local_part(mask), shape)
    divisor = _check.temperature(op, temperature)
    if rows * n <= _tile(shape) and shard is None and negatives is None:
        x = F.linear(features.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        options = {"observed": rho, "temperature": temperature, "mask": mask, "reduction": reduction}
        return lml_loss(x, target, k, **options)  # type: ignore[arg-type]
    if isinstance(divisor, Tensor):
        divisor = spread(divisor, shard).to(dtype).expand(batch).reshape(rows, 1)
    index = _index_lists(labels, lambda dense: dense > 0)
    width = index.shape[-1]
    if rho > 0 and labels.dense is not None:
        index = torch.cat([index, _index_lists(labels, lambda dense: dense < 0)], -1)
    arguments = (
        spread(features, shard).reshape(rows, features.shape[-1]),
        weight,
        bias,
        cardinality.reshape(rows, 1),
        divisor,
        None if mask is None else mask.reshape(rows, n),
        index.reshape(rows, index.shape[-1]).contiguous(),
        width,
        rho,
        dtype,
    )
    if negatives is None:
        loss, count = _LinearLML.apply(*arguments, _largest_rank(k), shard)
    else:
        drawn, counts_for = _drawn(op, negatives, n, features.device, generator, 0 if shard is None else shard.start)
        loss, count = _sampled(*arguments, drawn, counts_for, shard)
    contributes = count.view(batch) > 0
    if rho > 0:
        contributes = _says_something(labels, shard) | contributes
    loss = torch.where(contributes, loss.view(batch), 0)
    return _rows.leave(op, loss, reduction, contributes, dtype)


def _says_something(labels: Labels, shard: ClassShard | None) -> Tensor:
    """Which rows have a known class."""
    if labels.dense is None:
        assert labels.index is not None
        return torch.ones(labels.index.shape[:-1], dtype=torch.bool, device=labels.index.device)
    known = (labels.dense >= 0).any(-1, keepdim=True)
    return reduce(known.float(), "sum", shard).squeeze(-1) > 0


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
    if weight.dtype != features.dtype and not _check.autocast(features.device):
        raise TypeError(
            f"{op}: `weight` must be of the dtype of `features`, {features.dtype}, got {weight.dtype}. "
            "Convert one, or use torch.autocast."
        )


def _dot_dtype(features: Tensor) -> torch.dtype:
    """The dtype in which the logits are computed, as F.linear would."""
    if _check.autocast(features.device) and features.dtype != torch.float64:
        return torch.get_autocast_dtype(features.device.type)
    return features.dtype


def _index_lists(labels: Labels, wanted: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the labels as index lists; a dense target is there already, so reading its largest count costs little."""
    if labels.index is not None:
        return labels.index
    assert labels.dense is not None
    found = wanted(labels.dense).to(torch.uint8)
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

    def __init__(
        self,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        temperature: float | Tensor = 1.0,
        mask: Tensor | None = None,
    ) -> None:
        self.features = features.to(dtype)
        self.weight, self.bias, self.dtype, self.temperature, self.mask = weight, bias, dtype, temperature, mask
        self.work = torch.promote_types(dtype, torch.float32)
        self.rows, self.n = features.shape[0], weight.shape[0]
        self.kernels = _kernels(self.features)
        self.step = max(256, _tile(self.features) // max(self.rows, 1) // 256 * 256)

    def of_rows(self, rows: Tensor | slice) -> _Layer:
        """The same layer for some of the rows."""
        temperature = self.temperature[rows] if isinstance(self.temperature, Tensor) else self.temperature
        mask = None if self.mask is None else self.mask[rows]
        return _Layer(self.features[rows], self.weight, self.bias, self.dtype, temperature, mask)

    def logits(self, classes: slice, out: Tensor | None = None) -> Tensor:
        weight = self.weight[classes].to(self.dtype).T
        if self.bias is None:
            x = torch.mm(self.features, weight, out=out)
        else:
            x = torch.addmm(self.bias[classes].to(self.dtype), self.features, weight, out=out)
        if isinstance(self.temperature, Tensor) or self.temperature != 1.0:
            x /= self.temperature
        return x if self.mask is None else x.masked_fill_(~self.mask[:, classes], -torch.inf)

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the logits, block by block: each takes the place of the one before."""
        place = self.features.new_empty(self.rows, min(self.step, -(-self.n // 16) * 16))
        for start in range(0, self.n, self.step):
            classes = slice(start, min(start + self.step, self.n))
            yield classes, self.logits(classes, place[:, : classes.stop - start])

    def grad(
        self, x: Tensor, first: int, rows: _Rows, pulled: Tensor, toward: Tensor, scale: Tensor, keep: bool = False
    ) -> Tensor:
        """Return the gradient of a block: ``pulled h / sum h + scale * leak``, and `toward` at the labels.

        It may take the place of the block, unless `keep`.
        """
        if self.kernels is not None:
            numbers = (rows.center, rows.delta, rows.log_mass, pulled, scale)
            lists = (rows.index, rows.labels, toward)
            return self.kernels.grad_block(x, *numbers, *lists, first, rows.rho, torch.empty_like(x) if keep else x)
        z = (x.to(self.work) - rows.center) + rows.delta
        depth = -z.abs()
        dx = (depth - 2 * depth.exp().log1p() - rows.log_mass).exp() * pulled
        if rows.rho > 0:
            dx = dx + scale * _leak(z, rows.rho)
        dx = torch.where(x.isfinite() & ~rows.delta.isinf(), dx, 0)
        dx = torch.where(rows.delta.isnan(), rows.delta, dx)
        inside, place = _within(rows.index, slice(first, first + x.shape[-1]))
        return dx.scatter_add_(-1, place, torch.where(inside, toward, 0)).to(self.dtype)


def _tile(x: Tensor) -> int:
    return _TILE.get(x.device.type, 1 << 27) // x.element_size()


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


def _silent(z: Tensor, rho: float) -> Tensor:
    """Return ``-log(1 - rho y)``, what a class says that is not observed."""
    stays = F.logsigmoid(-z)
    return -stays if rho == 1 else -torch.logaddexp(stays, math.log1p(-rho) + F.logsigmoid(z))


def _leak(z: Tensor, rho: float) -> Tensor:
    """Return the derivative of :func:`_silent`."""
    y, rest = z.sigmoid(), (-z).sigmoid()
    return y if rho == 1 else rho * y * rest / (rest + (1 - rho) * y)


@functools.lru_cache(maxsize=64)
def _series(name: str, terms: int, rho: float = 0.0) -> Tensor:
    """Return c with ``sum_j c_j w^(j + 1)`` equal, to rounding, to a function of ``w = exp(z)`` on [0, _REACH]."""
    t = (1 + (math.pi * (torch.arange(terms, dtype=torch.float64) + 0.5) / terms).cos()) / 2
    w, power = _REACH * t, torch.arange(terms, dtype=torch.float64)
    values = {
        "y": lambda: w / (1 + w),
        "y2(1-y)": lambda: w**2 / (1 + w) ** 3,
        "y(1-y)2": lambda: w / (1 + w) ** 3,
        "bend": lambda: w**2 * (3 + w) / (1 + w) ** 3,
        "h2": lambda: w**2 / (1 + w) ** 4,
        "silent": lambda: w.log1p() - ((1 - rho) * w).log1p(),
        "leak": lambda: _leak(w.log(), rho),
    }[name]()
    return torch.linalg.solve(t.unsqueeze(-1) ** power, values / w) / _REACH**power


@functools.lru_cache(maxsize=64)
def _table(names: tuple[str, ...], terms: int, rho: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The coefficients of several functions, one a column, where they are needed."""
    return torch.stack([_series(name, terms, rho) for name in names], -1).to(device, dtype)


class _Scan:
    """What one look at all logits keeps of a row.

    The logits above a floor, one by one, and of the many below it the sums of ``exp(j (x - floor))``: a sum over all
    classes of any smooth function of ``x + nu`` follows for every nu that leaves the floor below ``-nu``.
    """

    def __init__(self, layer: _Layer, index: Tensor, limit: int) -> None:
        self.index, self.terms = index, 16 if layer.work == torch.float64 else 8
        self.labels = torch.full(index.shape, -torch.inf, dtype=layer.work, device=index.device)
        self.floor, room = _floor(layer, limit)
        dense = room > max(layer.n // 8, _WHOLE)  # k is too large for lists: rows are solved one by one
        room = 0 if dense else room
        self.sums = layer.features.new_zeros(layer.rows, 1, self.terms + 3, dtype=torch.float64)
        if layer.kernels is not None:
            self.sums = layer.kernels.partial_sums(layer.rows, min(layer.step, layer.n), index.device)
        self.top = self.floor.new_full((layer.rows, room), -torch.inf)
        self.fill = torch.zeros(layer.rows, dtype=torch.int32, device=index.device)
        for classes, x in layer.blocks():
            if layer.kernels is not None:
                lists = (self.top, self.fill, index, self.labels)
                layer.kernels.scan_block(x, self.floor, self.sums, *lists, classes.start)
                continue
            inside, place = _within(index, classes)
            self.labels = torch.where(inside, x.gather(-1, place).to(layer.work), self.labels)
            self._add(x.to(layer.work))

    def add_up(self, limit: int) -> None:
        """Sort the lists and add up the sums, for the search in plain torch."""
        *powers, n, n_top, n_nan = self.sums.sum(1, dtype=torch.float64).to(self.floor.dtype).split(1, -1)
        self.powers, self.n, self.n_top, self.n_nan = torch.cat(powers, -1), n, n_top, n_nan
        self.held, room = self.fill.unsqueeze(-1).to(self.floor.dtype), self.top.shape[-1]
        self.overflow = (self.held > room) | (room == 0)
        filled = int(self.fill.max()) if len(self.fill) else 0
        self.top = self.top[:, : min(room, filled)].sort(-1, descending=True).values
        self.few = self.held < n.clamp(max=limit)

    def _add(self, x: Tensor) -> None:
        finite = x.isfinite()
        above = finite & (x > self.floor)
        for i, flag in enumerate((finite, x == torch.inf, x.isnan())):
            self.sums[:, 0, self.terms + i] += flag.sum(-1)
        w = torch.where(finite & ~above, (x - self.floor).exp(), 0)
        power = w
        for j in range(self.terms):
            self.sums[:, 0, j] += power.sum(-1)
            power = power * w
        row, place = above.nonzero(as_tuple=True)
        count = above.sum(-1)
        slot = self.fill[row] + torch.arange(len(row), device=row.device) - (count.cumsum(0) - count)[row]
        kept = slot < self.top.shape[-1]
        self.top[row[kept], slot[kept]] = x[row, place][kept]
        self.fill += count.to(torch.int32)

    def tail(self, names: tuple[str, ...], depth: Tensor, unit: Tensor | float = 0.0, rho: float = 0.0) -> list[Tensor]:
        """Return the sums of functions over the classes below the floor, over ``exp(unit)``; depth is floor + nu."""
        series = _table(names, self.terms, rho, depth.dtype, depth.device)
        w = depth.clamp(max=math.log(_REACH)).exp()
        power = self.powers * w ** torch.arange(self.terms, device=w.device)
        sums = (power.unsqueeze(-1) * series).sum(-2)  # not a product: those may be set to TF32
        return list(torch.where(sums == 0, 0, sums * (depth - unit).exp()).split(1, -1))


def list_sizes(n_classes: int, limit: int) -> tuple[int, int, int]:
    """Return the stride of the sample of classes, the rank of the floor in it, and the room of the lists above it.

    The floor is some times `limit` logits deep, as far as a sample can say; the lists hold what chance may add.
    """
    stride = max(1, -(-n_classes // min(max(n_classes // 32, _WHOLE), _SAMPLE)))
    size = -(-n_classes // stride)
    rank = min(4 + math.ceil(4 * limit * size / n_classes), size)
    return stride, rank, math.ceil((rank + 4 * math.sqrt(rank) + 8) * n_classes / size)


def _floor(layer: _Layer, limit: int) -> tuple[Tensor, int]:
    """Return the floor of each row's list, and the room of the lists."""
    if layer.n <= _WHOLE:
        return layer.features.new_full((layer.rows, 1), -torch.inf, dtype=layer.work), layer.n
    stride, rank, room = list_sizes(layer.n, limit)
    piece = max(1, _tile(layer.features) * stride // layer.n)  # rows whose sample is as large as a block
    floor = layer.features.new_empty(layer.rows, 1, dtype=layer.work)
    for start in range(0, layer.rows, piece):
        rows = slice(start, start + piece)
        sample = layer.of_rows(rows).logits(slice(0, layer.n, stride))
        if layer.kernels is not None:
            floor[rows] = layer.kernels.floors(sample, rank)
        else:
            floor[rows] = _finite(sample).topk(rank, -1).values[:, -1:].to(layer.work)
    return floor, room


@dataclass
class _Rows:
    """What is known of each row once its threshold is found."""

    center: Tensor
    delta: Tensor
    log_mass: Tensor
    index: Tensor
    labels: Tensor  # the logits at the index
    rho: float = 0.0
    silent: Tensor = field(init=False)  # sums over the classes of this rank
    leak: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.silent = self.leak = torch.zeros_like(self.center)


def _search(
    scan: _Scan, k: Tensor, limit: int, shard: ClassShard | None, known: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``(center, delta, log sum h)`` of each row, and which rows it did not find; `known` is a nu to start."""
    mass = scan.floor + scan.powers[:, :1].log()  # log sum exp of the classes below the floor
    counts = torch.cat([scan.n, scan.n_top, scan.n_nan, scan.few, scan.overflow, mass], -1)
    n, n_top, n_nan, few, overflow, mass = gather(counts, shard).unflatten(-1, (-1, 6)).unbind(-1)
    n, n_top, n_nan = (v.sum(-1, keepdim=True) for v in (n, n_top, n_nan))
    few, overflow = (v.any(-1, keepdim=True) for v in (few, overflow))
    left = search.feasible(k, n, n_top, n_nan)
    if known is None:
        near_end = limited(shard, limit - 1)
        listed = left._replace(solvable=left.solvable & ~few)
        start, near = search.bracket(scan.top[:, :limit], listed, near_end)
        # Without the order statistics: as if every y were small.
        loose = search.anywhere(mass.logsumexp(-1, keepdim=True) - left.k.log())
        start = search.Start(*(torch.where(few & left.solvable, l, s) for l, s in zip(loose, start, strict=True)))
    else:
        start, few, near = search.anywhere(-known), torch.ones_like(few), -known

    def sums(center: Tensor, delta: Tensor) -> search.Sums:
        peak = torch.where(few | ~left.solvable, 0, (-(near - center).abs()).amax(-1, keepdim=True))
        *parts, deep = reduce(_small_sums(scan, center, delta, peak), "sum", shard)
        return search.Sums(parts, peak, deep == 0)

    lost = left.solvable & overflow
    found = search.iterate(sums, left.k, start, ~left.solvable | lost, _PASSES, stops=True)
    a, b, *_, squares = found.sums.parts
    mass, t = a + b, torch.where(found.done, found.step, 0)
    mass = mass + (b - a) * t + (mass - 6 * squares) * t * t / 2  # sum h after the last step
    log_mass = torch.where(left.solvable, found.sums.peak + mass.log(), 0)
    return *search.ended(found, left), log_mass, lost | ~found.done


def _small_sums(scan: _Scan, center: Tensor, delta: Tensor, peak: Tensor) -> list[Tensor]:
    """Return the sums of `search.small_parts` and of h^2, and whether the series is valid."""
    a, b, above, residual, bend = search.small_parts(scan.top - center, peak, delta)
    squares = (a + b).square() * peak.exp()
    depth = (scan.floor - center) + delta
    rest = scan.tail(_STEP, depth, peak)
    rest.insert(2, torch.zeros_like(depth))  # none is above
    sums = [p.sum(-1, keepdim=True) + r for p, r in zip((a, b, above, residual, bend, squares), rest, strict=True)]
    below = scan.powers[:, :1] > 0
    return [*sums, (below & ~(depth < math.log(0.9 * _REACH))).to(depth.dtype)]


def _unseen(scan: _Scan, rows: _Rows) -> None:
    """Fill in the sums of :func:`_silent` and :func:`_leak` over the finite logits of this rank."""
    z = torch.where(scan.top.isfinite(), search.points(scan.top, rows.center, rows.delta), -torch.inf)
    depth = torch.where(rows.delta.isfinite(), (scan.floor - rows.center) + rows.delta, -torch.inf)
    silent, leak = scan.tail(_UNSEEN, depth, rho=rows.rho)
    rows.silent = _silent(z, rows.rho).sum(-1, keepdim=True) + silent
    every = _times(scan.n, -_log1p(-rows.rho))  # k takes every class
    rows.silent = torch.where(rows.delta == torch.inf, every, rows.silent)
    rows.leak = _leak(z, rows.rho).sum(-1, keepdim=True) + leak


def _log1p(value: float) -> float:
    return math.log1p(value) if value > -1 else -math.inf


def _times(count: Tensor, value: float) -> Tensor:
    return torch.where(count == 0, 0, count * value)


def _solve_lost(layer: _Layer, lost: Tensor, k: Tensor, rows: _Rows, shard: ClassShard | None) -> None:
    """Find the thresholds of the rows that are lost from all their logits, a few rows at a time."""
    if not bool(lost.any()):
        return
    which = lost.squeeze(-1).nonzero().squeeze(-1)
    shard = None if shard is None else shard.starting_at(Thresholds())
    most = int(reduce(k.new_full((1, 1), layer.n), "max", shard))  # the same pieces on every rank
    for part in which.split(max(1, _tile(k) // 4 // max(most, 1))):  # with a dozen temporaries
        x = layer.of_rows(part).logits(slice(None))
        impl = dispatch.choose("linear_lml_loss", "auto", x, shard)
        _, center, delta = apply(dispatch.Problem(x, k[part], None, 1.0, shard, impl), "nu")
        z = search.points(x.to(layer.work), center, delta)
        live = x.isfinite() & delta.isfinite()
        rows.center[part], rows.delta[part] = center, delta
        rows.log_mass[part] = _log_mass(z, 1.0, shard)
        if rows.rho > 0:
            rows.silent[part] = torch.where(x.isfinite(), _silent(z, rows.rho), 0).sum(-1, keepdim=True)
            rows.leak[part] = torch.where(live, _leak(z, rows.rho), 0).sum(-1, keepdim=True)


def _said_by_all(rows: _Rows, n: Tensor) -> Tensor:
    """Return what `n` classes say where k takes every one, less the listed; an infinite term is not taken away."""
    others = n - ((rows.index >= 0) & (rows.labels > -torch.inf)).sum(-1, keepdim=True)
    return _times(others, -_log1p(-rows.rho))


Settled = tuple[_Rows, Tensor, Tensor, Tensor, Tensor]  # and loss, pull and number of labels a row, slopes at labels


def _settle(
    layer: _Layer, scan: _Scan, k: Tensor, limit: int, labels: int, rho: float, shard: ClassShard | None
) -> Settled:
    """Find the thresholds and the loss from what a scan has kept; the first `labels` of an index list are positive."""
    scan.add_up(limit)
    known = None if shard is None else shard.known(k.shape[:-1], layer.work)
    center, delta, log_mass, lost = _search(scan, k, limit, shard, known)
    if known is not None and bool(lost.any()):
        center, delta, log_mass, lost = _search(scan, k, limit, shard)
    rows = _Rows(center.contiguous(), delta.contiguous(), log_mass.contiguous(), scan.index, scan.labels, rho)
    if rho > 0:
        _unseen(scan, rows)
    _solve_lost(layer, lost, k, rows, shard)
    if shard is not None:
        shard.note(rows.delta - rows.center)
    z = search.points(rows.labels, rows.center, rows.delta)
    held = rows.index >= 0
    live = held & rows.labels.isfinite() & rows.delta.isfinite()
    positive = held & (torch.arange(held.shape[-1], device=held.device) < labels)
    loss = torch.where(positive, -F.logsigmoid(z), 0).sum(-1, keepdim=True)
    toward = torch.where(positive & live, -(-z).sigmoid(), 0)
    pull = -toward.sum(-1, keepdim=True)
    if rho > 0:
        said = torch.where(held & rows.labels.isfinite(), _silent(z, rho), 0).sum(-1, keepdim=True)
        n_top = scan.n_top - (held & (rows.labels == torch.inf)).sum(-1, keepdim=True)
        said = (rows.silent - said) + _times(n_top, -_log1p(-rho))
        loss = loss + torch.where(rows.delta == torch.inf, _said_by_all(rows, scan.n + scan.n_top), said)
        loss = torch.where(rows.delta.isnan(), torch.nan, loss)  # which no class may be left to say
        leak = torch.where(live, _leak(z, rho), 0)
        toward, pull = toward - leak, pull - torch.where(rows.delta.isinf(), 0, rows.leak) + leak.sum(-1, True)
    loss, pull, count = reduce([loss, pull, positive.to(z.dtype)], "sum", shard)
    return rows, loss, pull, count, toward


def _settle_by_kernels(
    layer: _Layer, scan: _Scan, k: Tensor, limit: int, labels: int, rho: float, shard: ClassShard | None
) -> Settled:
    """As :func:`_settle`, in a few launches, for classes that are all here."""
    assert layer.kernels is not None
    assert shard is None
    names = _STEP + _UNSEEN if rho > 0 else _STEP
    series = _table(names, scan.terms, rho, layer.work, k.device)
    reach, every = (math.log(_REACH), math.log(0.9 * _REACH)), -_log1p(-rho)
    kept = (scan.top, scan.fill, scan.floor, scan.sums)
    found = layer.kernels.search(*kept, k, series, limit, reach, _PASSES, rho, every)
    center, delta, log_mass, lost, _, silent, leak = found.unsqueeze(-1)
    rows = _Rows(center, delta, log_mass, scan.index, scan.labels, rho)
    rows.silent, rows.leak = silent, leak
    _solve_lost(layer, lost > 0, k, rows, None)
    sums, toward = layer.kernels.losses(found, rows.index, rows.labels, labels, rho, every)
    loss, pull, count = sums.unsqueeze(-1)
    if rho > 0:
        loss = torch.where(rows.delta.isnan(), torch.nan, loss)  # which no class may be left to say
    if rho == 1:  # where k takes every class, the kernel takes infinite terms away
        n = scan.sums[..., scan.terms : scan.terms + 2].sum((1, 2)).unsqueeze(-1)
        ruled_out = (rows.index[:, :labels] >= 0) & (rows.labels[:, :labels] == -torch.inf)
        said = torch.where(ruled_out.any(-1, keepdim=True), torch.inf, _said_by_all(rows, n))
        loss = torch.where(rows.delta == torch.inf, said, loss)
    return rows, loss, pull, count, toward


class _LinearLML(torch.autograd.Function):
    """``(features, weight, bias, k, temperature) -> (loss, number of labels)``, each a row."""

    @staticmethod
    def forward(
        ctx: Any,
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
        limit: int,
        shard: ClassShard | None,
    ) -> tuple[Tensor, Tensor]:
        layer = _Layer(features, weight, bias, dtype, temperature, mask)
        with torch.autocast(features.device.type, enabled=False):
            scan = _Scan(layer, index, limit)
            by_kernels = layer.kernels is not None and shard is None
            settle = _settle_by_kernels if by_kernels else _settle
            rows, loss, pull, count, toward = settle(layer, scan, k, limit, labels, rho, shard)
        scale = temperature if isinstance(temperature, Tensor) else None
        found = (rows.center, rows.delta, rows.log_mass, rows.labels, pull, toward)
        ctx.save_for_backward(features, weight, bias, mask, scale, index, *found)
        ctx.dtype, ctx.rho, ctx.temperature = dtype, rho, None if scale is not None else temperature
        ctx.mark_non_differentiable(count)
        return loss.squeeze(-1), count.squeeze(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        found = _first_derivatives(ctx, grad.detach())
        if torch.is_grad_enabled():
            found = _FirstOnly.apply(grad, *ctx.saved_tensors[:2], *found)
        return (*found, *(None,) * 7)


def _first_derivatives(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of features, weight, bias, k and temperature, block by block."""
    features, weight, bias, mask, scale, index, center, delta, log_mass, labels, pull, toward = ctx.saved_tensors
    temperature = ctx.temperature if scale is None else scale
    with torch.no_grad(), torch.autocast(features.device.type, enabled=False):
        layer = _Layer(features, weight, bias, ctx.dtype, temperature, mask)
        wants_features, wants_weight, wants_bias, wants_k, wants_temperature = ctx.needs_input_grad[:5]
        grad = grad.unsqueeze(-1).to(layer.work)
        pulled, toward = grad * pull, grad * toward
        delta = torch.where((grad == 0) & delta.isnan(), torch.inf, delta)  # a row nobody asks for has no gradient
        grad_k = torch.where(delta.isinf(), 0, -pulled * (-log_mass).exp()) if wants_k else None
        rows = _Rows(center, delta, log_mass, index, labels, ctx.rho)
        if scale is not None or temperature != 1.0:
            pulled, toward, grad = (t / temperature for t in (pulled, toward, grad))
        pulled, toward, grad = (t.contiguous() for t in (pulled, toward, grad))
        grad_features = torch.zeros_like(features, dtype=layer.work) if wants_features else None
        grad_weight = torch.empty_like(weight) if wants_weight else None
        grad_bias = torch.empty_like(bias) if wants_bias else None
        grad_temperature = torch.zeros_like(center) if wants_temperature else None
        for classes, x in layer.blocks():
            dx = layer.grad(x, classes.start, rows, pulled, toward, grad, keep=wants_temperature)
            if grad_temperature is not None:
                grad_temperature -= (dx * torch.where(x.isfinite(), x, 0)).sum(-1, keepdim=True, dtype=layer.work)
            if grad_bias is not None:
                grad_bias[classes] = dx.sum(0)
            if grad_features is not None and ctx.dtype == layer.work:
                grad_features.addmm_(dx, layer.weight[classes].to(ctx.dtype))
            elif grad_features is not None:
                grad_features += dx @ layer.weight[classes].to(ctx.dtype)
            if grad_weight is not None and grad_weight.dtype == ctx.dtype:
                torch.mm(dx.T, layer.features, out=grad_weight[classes])
            elif grad_weight is not None:
                grad_weight[classes] = dx.T @ layer.features
        if grad_features is not None:
            grad_features = grad_features.to(features.dtype)
        if grad_temperature is not None:
            grad_temperature = grad_temperature.to(scale.dtype)
    return grad_features, grad_weight, grad_bias, grad_k, grad_temperature


class _FirstOnly(torch.autograd.Function):
    """Hands gradients on, and says what is missing where they are to be differentiated."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, features: Tensor, weight: Tensor, *found: Any) -> tuple[Tensor | None, ...]:
        return tuple(None if f is None else f.view_as(f) for f in found)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "linear_lml_loss: has first derivatives only. Use lml_loss(F.linear(features, weight, bias), target, k)."
        )


def _drawn(
    op: str, negatives: Any, n: int, device: torch.device, generator: torch.Generator | None, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the sampled classes, and for how many classes each of them counts."""
    if isinstance(negatives, int) and not isinstance(negatives, bool):
        if negatives < 1:
            raise ValueError(f"{op}: `negatives` must be at least 1, got {negatives}. None takes all classes.")
        if generator is None:  # one draw of the caller's random state, so that ranks stay in step
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
    if drawn.ndim != 1 or drawn.shape != probability.shape or drawn.is_floating_point():
        raise ValueError(
            f"{op}: `negatives` must be class ids and probabilities of one shape (m,), got {tuple(drawn.shape)} of "
            f"{drawn.dtype} and {tuple(probability.shape)}."
        )
    return drawn, 1 / probability


def _sampled(
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
    """Return the loss and the number of labels a row, with sums over classes estimated from a sample of them."""
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
    for column in index.split(1, -1):
        listed |= column == drawn
    x = torch.cat([own, others], -1).to(k.dtype) / temperature
    share = torch.cat([held.to(x.dtype), torch.where(listed, 0, counts_for.to(x.dtype))], -1)
    x = torch.where(share > 0, x, -torch.inf)
    z = x + _WeightedThreshold.apply(x, share, k, shard)
    positive = held & (torch.arange(index.shape[-1], device=index.device) < labels)
    loss = torch.where(positive, -F.logsigmoid(z[:, : index.shape[-1]]), 0).sum(-1)
    if rho > 0:
        z, share = z[:, index.shape[-1] :], share[:, index.shape[-1] :]
        loss = loss + (share * torch.where(share > 0, _silent(z, rho), 0)).sum(-1)
    count = reduce(positive.to(x.dtype), "sum", shard).squeeze(-1)
    return total(loss, shard), count


class _WeightedThreshold(torch.autograd.Function):
    """``(x, share, k) -> nu`` with ``sum share * sigmoid(x + nu) = k`` in each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: Tensor, k: Tensor, shard: ClassShard | None) -> Tensor:
        nu, log_mass = _solve_weighted(x, share, k, shard)
        ctx.save_for_backward(x, share, nu, log_mass)
        ctx.shard = shard
        return nu

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, share, nu, log_mass = ctx.saved_tensors
        with torch.no_grad():
            given = reduce(grad.detach(), "sum", ctx.shard)
            z = x + nu
            p = share * (F.logsigmoid(z) + F.logsigmoid(-z) - log_mass).exp()
            dx = torch.where(x.isfinite() & nu.isfinite(), -p * given, 0)
            dk = torch.where(nu.isfinite(), given * (-log_mass).exp(), 0)
        if torch.is_grad_enabled():
            dx, dk = _FirstOnly.apply(grad, x, share, dx, dk)
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

    found = search.iterate(sums, k, start, ~solvable, 4 * _PASSES, stops=True)
    nu = torch.where(solvable, found.delta - found.center, end)
    return nu, _log_mass(torch.where(finite, x + nu, torch.nan), share, shard)


def _log_mass(z: Tensor, share: Tensor | float, shard: ClassShard | None) -> Tensor:
    """Return ``log sum share h`` over the points that are finite."""
    log_h = torch.where(z.isfinite(), F.logsigmoid(z) + F.logsigmoid(-z), -torch.inf)
    peak = reduce(log_h, "max", shard)
    peak = torch.where(peak.isfinite(), peak, 0)
    return peak + reduce(share * (log_h - peak).exp(), "sum", shard).log()


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

    def loss(self, features: Tensor, target: Target, k: float | Tensor, **options: Any) -> Tensor:
        """Return :func:`linear_lml_loss` of this layer, which documents the options: the same number on every rank."""
        return linear_lml_loss(features, self.weight, target, k, bias=self.bias, shard=self.shard, **options)

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
