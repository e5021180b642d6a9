"""The logits of a linear layer, block by block: what one scan of them keeps, and the search for thresholds in that."""

from __future__ import annotations

import functools
import importlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lastlayer import _triton
from lastlayer._threshold import search
from lastlayer._threshold.dispatch import direct
from lastlayer.shard import ClassShard, gather, limited, reduce

FIRST_ONLY = "linear_lml_loss: has first derivatives only. Use lml_loss(F.linear(features, weight, bias), target, k)."
TILE = {"cpu": 1 << 20, "cuda": 1 << 27}  # bytes of the logits that exist at a time
REACH = {5: 0.08, 8: 0.35, 16: 0.35}  # the largest exp(x + nu) that so many sums of powers stand for
PASSES = 10  # bounds the search; a row that needs more is solved from all its logits
STEP = ("y2(1-y)", "y(1-y)2", "y", "bend", "h2")  # what a step of the search sums, by the names of their series
UNSEEN = ("silent", "leak")  # and with `observed`
_WHOLE = 1024  # up to this number of classes all logits of a row are kept
_FIRST = 8  # blocks that a GPU computes, at most, while the host prepares the scan and looks at the labels
_MOST = 1 << 30  # logits of a block, at most
# Classes of a wide block in the backward pass, at least and at most, by the bytes of a logit, found on an H200: long
# products are faster, above all in float32, but a small block is still in the cache in part when it is used next.
_WIDE = {2: (0, 32768), 4: (150_000, _MOST)}
_SAMPLE = 16384  # classes that tell how deep the lists of the largest logits go


class Layer:
    """The layer as blocks of logits, in plain torch or by kernels where they apply."""

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
        self.rows, self.n, self.spare = features.shape[0], weight.shape[0], 0  # the last classes may be spare ones
        self.kernels = kernels_for(self.features)
        self.products = products_for(self.features, weight) if self.kernels is not None else None
        self._parts: Tensor | None = None  # of the features, if they are few
        self.step = max(256, tile(self.features) // max(self.rows, 1) // 256 * 256)
        plain = weight.dtype == dtype and mask is None and not isinstance(temperature, Tensor)
        self.wide = self.kernels is not None and plain  # no memory but that of its logits grows with a block

    def of_rows(self, rows: Tensor | slice) -> Layer:
        """Return the same layer for some of the rows."""
        temperature = self.temperature[rows] if isinstance(self.temperature, Tensor) else self.temperature
        mask = None if self.mask is None else self.mask[rows]
        return Layer(self.features[rows], self.weight, self.bias, self.dtype, temperature, mask)

    def of_classes(self, classes: Tensor) -> Layer:
        """Return the same layer for some of the classes, and a few of weight 0: products prefer round numbers."""
        spare = -len(classes) % 64
        weight = F.pad(self.weight[classes], (0, 0, 0, spare))
        bias = None if self.bias is None else F.pad(self.bias[classes], (0, spare))
        mask = None if self.mask is None else F.pad(self.mask[:, classes], (0, spare))
        layer = Layer(self.features, weight, bias, self.dtype, self.temperature, mask)
        layer.spare = spare
        return layer

    def logits(self, classes: slice, out: Tensor | None = None) -> Tensor:
        weight = self.weight[classes]
        weight = (weight if weight.dtype == self.dtype else weight.to(self.dtype)).T
        bias = None if self.bias is None else self.bias[classes].to(self.dtype)
        x = None if self.products is None else self._by_parts(self.products, weight.T, bias, out)
        if x is None:
            given = (self.features, weight)
            x = torch.mm(*given, out=out) if bias is None else torch.addmm(bias, *given, out=out)
        if isinstance(self.temperature, Tensor) or self.temperature != 1.0:
            x /= self.temperature
        return x if self.mask is None else x.masked_fill_(~self.mask[:, classes], -torch.inf)

    def _by_parts(self, products: ModuleType, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor | None:
        """Return the products of features and weights as `products` has them; None if its kernel is not ready."""
        x = self.features.new_empty(self.rows, len(weight)) if out is None else out
        pieces = products.pieces(self.features)
        for rows in pieces:
            parts = self._parts
            if parts is None:
                parts = products.parts_of(self.features[rows])
            if not products.logits(parts, weight, bias, x[rows]):
                return None
            if len(pieces) == 1:
                self._parts = parts
        return x

    def blocks(self, held: Held | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Yield the logits block by block; each block overwrites the one before, except those that are held."""
        held = held or Held(self)
        held.filled = True
        for classes in held.order:
            yield classes, self.logits(classes, held.place(classes))

    def blocks_again(self, held: Held) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield the blocks once more, and memory for their gradients; first those that are held, from the last on."""
        for classes in (*held.blocks.last, *held.blocks.waiting):
            x = held.place(classes)
            if not held.filled:
                self.logits(classes, x)
            yield classes, x, held.out(classes)
        for classes in held.blocks.again:
            x = self.logits(classes, held.place(classes))
            yield classes, x, x

    def grad(
        self, x: Tensor, first: int, rows: Rows, pull: Tensor, toward: Tensor, scale: Tensor, out: Tensor
    ) -> Tensor:
        """Return the gradient of a block: `scale` times ``pull h / sum h + absence_slope``, plus `toward` at labels.

        Kernels write it to `out`, which may be the block itself.
        """
        dx = self._grad(x, first, rows, pull, toward, scale, out)
        if self.spare and first + x.shape[-1] == self.n:
            dx[:, -self.spare :] = 0
        return dx

    def _grad(
        self, x: Tensor, first: int, rows: Rows, pull: Tensor, toward: Tensor, scale: Tensor, out: Tensor
    ) -> Tensor:
        if self.kernels is not None:
            numbers = (rows.center, rows.delta, rows.log_mass, pull, scale)
            lists = (rows.index, rows.labels, toward)
            block: Tensor = self.kernels.grad_block(x, *numbers, *lists, first, rows.rho, out)
            return block
        z = (x.to(self.work) - rows.center) + rows.delta
        depth = -z.abs()
        dx = (depth - 2 * depth.exp().log1p() - rows.log_mass).exp() * (pull * scale)
        if rows.rho > 0:
            dx = dx + scale * absence_slope(z, rows.rho)
        dx = torch.where(x.isfinite() & ~rows.delta.isinf(), dx, 0)
        dx = torch.where(rows.delta.isnan(), torch.where(scale == 0, 0, rows.delta), dx)
        inside, place = within(rows.index, slice(first, first + x.shape[-1]))
        return dx.scatter_add_(-1, place, torch.where(inside, toward * scale, 0)).to(self.dtype)


class Held:
    """The logits that stay from the forward pass to the backward pass: the last block, and those before it that fit.

    They are held in the memory of the gradient of the weight, which takes their place class by class. From the last
    class to the first, the logits of a block are read before any gradient is written over them: the gradient of
    class j starts at ``j * per``, and the logits of the classes before it end there or earlier. The gradient of the
    logits is written to the memory of the last block, that of a wide block in its place: its logits end before the
    gradients of its classes start. Logits that are dropped lie in the memory of the last block, too, or, if the block
    is wide, where none are held yet or any longer. The memory of the last block's gradient is the last that is needed:
    it holds the lists of a scan, and the block may have some of the memory that these would take.
    """

    def __init__(self, layer: Layer, gradient: Tensor | None = None) -> None:
        # With as many rows as a power of 2, such blocks fill the 132 multiprocessors of an H100 or H200 evenly.
        step = layer.step if gradient is None or layer.kernels is None else layer.step * 33 // 32 // 256 * 256
        width = min(step, -(-layer.n // 16) * 16)
        self.gradient, self.block, self.filled = gradient, layer.features.new_empty(layer.rows, width), False
        self.rows, self.per, self.memory = layer.rows, 0, self.block
        if gradient is not None and min(layer.rows, layer.n - width) > 0:
            self.memory = gradient.view(-1).view(layer.dtype)
            self.per = self.memory.numel() // layer.n
        wide = _WIDE[layer.dtype.itemsize] if layer.wide else None
        self.blocks = split(layer.n, layer.rows, step, self.per, wide)
        self._free = self.memory[self.blocks.stop * self.per :].view(torch.uint8) if self.per else None

    def lists(self, room: int, dtype: torch.dtype) -> Tensor:
        """Return memory for `room` numbers per row, until the first gradient is written."""
        size = self.rows * room * dtype.itemsize
        offset = 0 if self._free is None else -self._free.data_ptr() % 16
        if self._free is None or len(self._free) < offset + size:
            return self.block.new_empty(self.rows, room, dtype=dtype)
        found, self._free = self._free[offset : offset + size], self._free[offset + size :]
        return found.view(dtype).view(self.rows, room)

    def drop(self) -> None:
        """Free the memory of the block: its logits are not needed again."""
        self.block = self.memory = self.block.new_empty(0)
        self._free = None

    @property
    def ahead(self) -> list[slice]:
        """The first blocks of the forward pass, as far as they leave the memory of the last block alone."""
        return self.blocks.dropped[:1] if self.blocks.inside else self.blocks.waiting

    @property
    def order(self) -> list[slice]:
        """The blocks in the order of the forward pass: those that lie where others will be held come first."""
        _, _, last, waiting, dropped, _, inside = self.blocks
        return [*dropped, *waiting, *last] if inside else [*waiting, *dropped, *last]

    def place(self, classes: slice) -> Tensor:
        """Return the memory of a block."""
        width = classes.stop - classes.start
        if self.blocks.first <= classes.start < self.blocks.stop:
            offset = (classes.start - self.blocks.first) * self.rows
        elif width > self.block.shape[1]:
            offset = 0
        else:
            return self.block[:, :width]
        return self.memory.as_strided((self.rows, width), (-(-width // 16) * 16, 1), offset)

    def out(self, classes: slice) -> Tensor:
        """Return the memory for the gradient of the logits of a block."""
        width = classes.stop - classes.start
        return self.place(classes) if width > self.block.shape[1] else self.block[:, :width]


class Blocks(NamedTuple):
    """How classes are split into blocks; from the last class on, as the backward pass takes them."""

    first: int  # the logits of the classes from here on are held
    stop: int  # from here on they stay in the block
    last: list[slice]
    waiting: list[slice]
    dropped: list[slice]
    again: list[slice]  # what is dropped, as the backward pass splits it
    inside: bool  # the gradient's memory has room for blocks that are dropped


@functools.lru_cache(maxsize=64)
def split(n: int, rows: int, step: int, per: int, wide: tuple[int, int] | None) -> Blocks:
    """Split n classes into blocks of `step`, or wide ones where the gradient's memory has room.

    `per` is the size of the gradient of a class; `wide` is how many classes a wide block has, at least and at most.
    """
    rows, stop = max(rows, 1), max(0, n - min(step, -(-n // 16) * 16))
    first = stop - min(stop, stop * per // rows) // 16 * 16
    least, most = wide or (0, 0)

    def parts(start: int, stop: int, least: int, most: int, room: Callable[[int], int]) -> list[slice]:
        found = []
        while stop > start:
            size = min(room(stop), most, _MOST // rows) // 16 * 16
            found.append(slice(max(start, stop - (size if size >= max(least, step) else step)), stop))
            stop = found[-1].start
        return found

    waiting = parts(first, stop, least, most, lambda end: end - -(-(end - first) * rows // per))
    dropped = parts(0, first, 0, n if wide else 0, lambda end: stop * per // rows)
    again = parts(0, first, least, most, lambda end: end * per // (rows + per))
    inside = bool(dropped) and dropped[0].stop - dropped[0].start > step
    return Blocks(first, stop, [slice(stop, n)] if n > 0 else [], waiting, dropped, again, inside)


def tile(x: Tensor) -> int:
    return TILE.get(x.device.type, 1 << 27) // x.element_size()


def kernels_for(x: Tensor) -> ModuleType | None:
    """Import the kernels that can take these features, if there are any."""
    if x.dtype == torch.float64 or _triton.unavailable(x.device) or not direct(x):
        return None
    return importlib.import_module("lastlayer._triton.linear")


def products_for(features: Tensor, weight: Tensor) -> ModuleType | None:
    """Import the products of kernels, if they are for such features and weights."""
    products = importlib.import_module("lastlayer._triton.products")
    return products if products.fits(features, weight) else None


def finite(x: Tensor) -> Tensor:
    return x.nan_to_num(-torch.inf, -torch.inf, -torch.inf)


def within(index: Tensor, classes: slice) -> tuple[Tensor, Tensor]:
    """Return which labels are in a block, and their place there (0 where they are not)."""
    inside = (index >= classes.start) & (index < classes.stop)
    return inside, torch.where(inside, index - classes.start, 0)


def absence(z: Tensor, rho: float) -> Tensor:
    """Return ``-log(1 - rho y)``, the loss of a class that is not observed."""
    stays = F.logsigmoid(-z)
    return -stays if rho == 1 else -torch.logaddexp(stays, math.log1p(-rho) + F.logsigmoid(z))


def absence_slope(z: Tensor, rho: float) -> Tensor:
    """Return the derivative of :func:`absence`."""
    y, rest = z.sigmoid(), (-z).sigmoid()
    return y if rho == 1 else rho * y * rest / (rest + (1 - rho) * y)


@functools.lru_cache(maxsize=64)
def series(name: str, terms: int, rho: float = 0.0) -> Tensor:
    """Return c with ``sum_j c_j w^(j + 1)`` equal, to rounding, to a function of ``w = exp(z)`` on [0, reach]."""
    reach = REACH[terms]
    t = (1 + (math.pi * (torch.arange(terms, dtype=torch.float64) + 0.5) / terms).cos()) / 2
    w, power = reach * t, torch.arange(terms, dtype=torch.float64)
    values = {
        "y": lambda: w / (1 + w),
        "y2(1-y)": lambda: w**2 / (1 + w) ** 3,
        "y(1-y)2": lambda: w / (1 + w) ** 3,
        "bend": lambda: w**2 * (3 + w) / (1 + w) ** 3,
        "h2": lambda: w**2 / (1 + w) ** 4,
        "silent": lambda: w.log1p() - ((1 - rho) * w).log1p(),
        "leak": lambda: absence_slope(w.log(), rho),
    }[name]()
    coefficients: Tensor = torch.linalg.solve(t.unsqueeze(-1) ** power, values / w) / reach**power
    return coefficients


@functools.lru_cache(maxsize=64)
def table(names: tuple[str, ...], terms: int, rho: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the coefficients of several functions, one per column, on the device that needs them."""
    return torch.stack([series(name, terms, rho) for name in names], -1).to(device, dtype)


class Scan:
    """What one scan of all logits keeps of each row.

    These are the logits above a floor and, for the many below it, the sums of ``exp(j (x - floor))``. The sum over all
    classes of any smooth function of ``x + nu`` follows from them for every nu with the floor below ``-nu``.
    """

    def __init__(self, layer: Layer, limit: int, named: bool = False, held: Held | None = None) -> None:
        """Begin with what needs no labels: the floors, and the first logits.

        `named` keeps the classes of the lists too, `held` some of the logits.
        """
        self.layer, self.kept = layer, held or Held(layer)
        self._blocks = layer.blocks(self.kept)
        self._begun = list(itertools.islice(self._blocks, min(len(self.kept.ahead), _FIRST)))  # a GPU has work now
        self.floor, self.terms = _floor(layer, limit, self.kept.block)
        room = list_room(layer.n, limit)
        self.top = self.kept.lists(room, self.floor.dtype)
        self.classes = self.kept.lists(room, torch.int32).zero_() if named and room else None
        if layer.kernels is not None:
            width = min(layer.step, layer.n)
            self.sums, self.fill = layer.kernels.partial_sums(layer.rows, width, self.terms, self.floor.device)
        else:
            self.sums = layer.features.new_zeros(layer.rows, 1, self.terms + 3, dtype=torch.float64)
            self.fill = torch.zeros(layer.rows, dtype=torch.int32, device=self.floor.device)

    def run(self, index: Tensor) -> None:
        """Scan all logits, and keep those of the labels."""
        layer, self.index = self.layer, index
        self.labels = torch.full(index.shape, -torch.inf, dtype=layer.work, device=index.device)
        for classes, x in itertools.chain(self._begun, self._blocks):
            if layer.kernels is not None:
                self._add(x, classes.start, index, self.labels)
            else:
                self._add(x, classes.start)
                self._take_labels(x, classes)
        self._begun = []

    def _take_labels(self, x: Tensor, classes: slice) -> None:
        inside, place = within(self.index, classes)
        self.labels = torch.where(inside, x.gather(-1, place).to(self.layer.work), self.labels)

    def add_up(self, limit: int) -> None:
        """Sort the lists and add up the sums, for the search in plain torch."""
        *powers, n, n_top, n_nan = self.sums.sum(1, dtype=torch.float64).to(self.floor.dtype).split(1, -1)
        self.powers, self.n, self.n_top, self.n_nan = torch.cat(powers, -1), n, n_top, n_nan
        self.held, room = self.fill.unsqueeze(-1).to(self.floor.dtype), self.top.shape[-1]
        self.overflow = (self.held > room) | (room == 0)
        filled = int(self.fill.max()) if len(self.fill) else 0
        top = self.top[:, : min(room, filled)]
        listed = torch.arange(top.shape[1], device=top.device) < self.fill.unsqueeze(-1)
        self.top, order = torch.where(listed, top, -torch.inf).sort(-1, descending=True)
        if self.classes is not None:
            self.classes = self.classes.gather(-1, order)
        self.few = self.held < n.clamp(max=limit)

    def _add(self, x: Tensor, start: int, *labels: Tensor) -> None:
        if self.layer.kernels is not None:
            kept = (self.floor, self.sums, self.top, self.fill, self.classes)
            self.layer.kernels.scan_block(x, *kept, start, *labels)
            return
        x = x.to(self.layer.work)
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
        if self.classes is not None:
            self.classes[row[kept], slot[kept]] = (start + place[kept]).to(torch.int32)
        self.fill += count.to(torch.int32)

    def tail(self, names: tuple[str, ...], depth: Tensor, unit: Tensor | float = 0.0, rho: float = 0.0) -> list[Tensor]:
        """Return the sums of functions over the classes below the floor, divided by exp(unit); depth is floor + nu."""
        series = table(names, self.terms, rho, depth.dtype, depth.device)
        w = depth.clamp(max=math.log(REACH[self.terms])).exp()
        power = self.powers * w ** torch.arange(self.terms, device=w.device)
        sums = (power.unsqueeze(-1) * series).sum(-2)  # not a matrix product, which may be set to TF32
        return list(torch.where(sums == 0, 0, sums * (depth - unit).exp()).split(1, -1))


def list_sizes(n_classes: int, limit: int) -> tuple[int, int, int]:
    """Return the stride of the sample of classes, the rank of the floor in it, and the room of the lists above it.

    As far as the sample can tell, about four times `limit` logits are above the floor; the lists have room for chance.
    """
    stride = max(1, -(-n_classes // min(max(n_classes // 32, _WHOLE), _SAMPLE)))
    size = -(-n_classes // stride)
    rank = min(4 + math.ceil(4 * limit * size / n_classes), size)
    return stride, rank, math.ceil((rank + 4 * math.sqrt(rank) + 8) * n_classes / size)


def list_room(n_classes: int, limit: int) -> int:
    """Return the room of the lists; 0 if k is too large for lists, and rows are solved from all their logits."""
    room = list_sizes(n_classes, limit)[2] if n_classes > _WHOLE else n_classes
    return 0 if room > max(n_classes // 8, _WHOLE) else room


def _floor(layer: Layer, limit: int, block: Tensor) -> tuple[Tensor, int]:
    """Return the floor of each row's list, and the number of powers to sum below the floor.

    The sample of logits is computed in the memory of a block.
    """
    most = 16 if layer.work == torch.float64 else 8
    if layer.n <= _WHOLE:
        return layer.features.new_full((layer.rows, 1), -torch.inf, dtype=layer.work), most
    stride, rank, _ = list_sizes(layer.n, limit)
    size = -(-layer.n // stride) // 16 * 16  # which products prefer
    rank = min(rank, size)
    memory = block.view(-1) if block.numel() >= size else block.new_empty(size)
    piece = len(memory) // size
    floors = []
    for start in range(0, layer.rows, piece):
        rows = slice(start, min(start + piece, layer.rows))
        place = memory.as_strided((rows.stop - start, size), (size, 1))
        sample = (layer if piece >= layer.rows else layer.of_rows(rows)).logits(slice(0, size * stride, stride), place)
        if layer.kernels is not None:
            floors.append(layer.kernels.floors(sample, rank))
        else:
            floors.append(finite(sample).topk(rank, -1).values[:, -1:].to(layer.work))
    none = layer.features.new_empty(0, 1, dtype=layer.work)
    floor = floors[0] if len(floors) == 1 else torch.cat([none, *floors])
    # With many logits above the floor for each label, exp(x + nu) is small below it, and few powers are enough.
    few = layer.kernels is not None and rank * stride >= 18 * limit
    return floor, 5 if few else most


@dataclass
class Rows:
    """What is known of each row once its threshold is known."""

    center: Tensor
    delta: Tensor
    log_mass: Tensor
    index: Tensor
    labels: Tensor  # the logits at the index
    rho: float = 0.0
    silent: Tensor = field(init=False)  # sums over the classes of this rank
    leak: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.silent = self.leak = torch.zeros((), dtype=self.center.dtype)

    def of_rows(self, which: Tensor) -> Rows:
        """Return what is known of some of the rows; not the last two."""
        center, delta, log_mass = self.center[which], self.delta[which], self.log_mass[which]
        return Rows(center, delta, log_mass, self.index[which], self.labels[which], self.rho)


def find(
    scan: Scan, k: Tensor, limit: int, shard: ClassShard | None, known: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``(center, delta, log sum h)`` per row, and which rows are not solved; `known` is a nu to start from."""
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
        # Without the order statistics, start as if every y were small.
        loose = search.anywhere(mass.logsumexp(-1, keepdim=True) - left.k.log())
        start = search.Start(*(torch.where(few & left.solvable, l, s) for l, s in zip(loose, start, strict=True)))
    else:
        start, few, near = search.anywhere(-known), torch.ones_like(few), -known

    def sums(center: Tensor, delta: Tensor) -> search.Sums:
        peak = torch.where(few | ~left.solvable, 0, (-(near - center).abs()).amax(-1, keepdim=True))
        *parts, deep = reduce(_small_sums(scan, center, delta, peak), "sum", shard)
        return search.Sums(parts, peak, deep == 0)

    lost = left.solvable & overflow
    root = search.iterate(sums, left.k, start, ~left.solvable | lost, PASSES, stops=True)
    a, b, *_, squares = root.sums.parts
    mass, t = a + b, torch.where(root.done, root.step, 0)
    mass = mass + (b - a) * t + (mass - 6 * squares) * t * t / 2  # sum h after the last step
    log_mass = torch.where(left.solvable, root.sums.peak + mass.log(), 0)
    return *search.ended(root, left), log_mass, lost | ~root.done


def _small_sums(scan: Scan, center: Tensor, delta: Tensor, peak: Tensor) -> list[Tensor]:
    """Return the sums of `search.small_parts` and of h^2, and whether the series is valid."""
    a, b, above, residual, bend = search.small_parts(scan.top - center, peak, delta)
    squares = (a + b).square() * peak.exp()
    depth = (scan.floor - center) + delta
    rest = scan.tail(STEP, depth, peak)
    rest.insert(2, torch.zeros_like(depth))  # no class below the floor is above 0
    sums = [p.sum(-1, keepdim=True) + r for p, r in zip((a, b, above, residual, bend, squares), rest, strict=True)]
    below = scan.powers[:, :1] > 0
    return [*sums, (below & ~(depth < math.log(0.9 * REACH[scan.terms]))).to(depth.dtype)]


def add_unseen(scan: Scan, rows: Rows) -> None:
    """Fill in the sums of :func:`absence` and :func:`absence_slope` over the finite logits of this rank."""
    z = torch.where(scan.top.isfinite(), search.points(scan.top, rows.center, rows.delta), -torch.inf)
    depth = torch.where(rows.delta.isfinite(), (scan.floor - rows.center) + rows.delta, -torch.inf)
    silent, leak = scan.tail(UNSEEN, depth, rho=rows.rho)
    rows.silent = absence(z, rows.rho).sum(-1, keepdim=True) + silent
    every = times(scan.n, -log1p(-rows.rho))  # k takes every class
    rows.silent = torch.where(rows.delta == torch.inf, every, rows.silent)
    rows.leak = absence_slope(z, rows.rho).sum(-1, keepdim=True) + leak


def log1p(value: float) -> float:
    return math.log1p(value) if value > -1 else -math.inf


def times(count: Tensor, value: float) -> Tensor:
    return torch.where(count == 0, 0, count * value)


def log_mass_of(z: Tensor, share: Tensor | float, shard: ClassShard | None) -> Tensor:
    """Return ``log sum share h`` over the points that are finite."""
    log_h = torch.where(z.isfinite(), F.logsigmoid(z) + F.logsigmoid(-z), -torch.inf)
    peak = reduce(log_h, "max", shard)
    peak = torch.where(peak.isfinite(), peak, 0)
    return peak + reduce(share * (log_h - peak).exp(), "sum", shard).log()
