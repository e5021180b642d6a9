"""How rows are laid over programs: all sizes are here."""

import contextlib
import functools
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lastlayer._triton import INTERPRETED

LONGEST = 32768  # classes of a row held in the registers of one program
CHUNK = 32768  # classes per program of a row that is split over programs
SAMPLE = 8192  # classes of a long row from which its search starts
BLOCK = 1024  # classes at a time where a long row is settled
# A length that a function meets in so many calls in succession, or so often in all, is worth kernels of its own.
PATIENCE = 1 if INTERPRETED else 3
OFTEN = 64
CLASSES = (64, 256, 1024, 4096, 8192, 16384, LONGEST)  # until then it shares the kernels of the next of these lengths


@dataclass(frozen=True)
class Plan:
    """Rows and warps per program, and the constants of a kernel that holds rows in registers.

    Tiles of ``w * c`` classes cover a row, where ``w`` is the sum of the three powers of two WA, WB and WC. A row is
    settled BLOCK classes at a time: few per thread, since the registers are for the search.
    """

    rows: int
    warps: int
    align: int  # the length of a row is a multiple of it
    tiles: dict[str, int]


def cdiv(a: int, b: int) -> int:
    """A over b, rounded up; like `power_of_2` faster than Triton's own."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def alignment(n: int) -> int:
    """The largest power of two up to 16 that divides n: what Triton may assume about the start of a row."""
    return min(n & -n, 16) if n else 16


def group(splits: int) -> int:
    """A power of two that is at least the number of programs of a row; the same for all rows but the longest."""
    return max(128, power_of_2(splits))


def vector(n: int, itemsize: int) -> int:
    """The number of classes that a thread loads at once: up to 16 bytes, if every row starts on such a boundary."""
    return min(16 // itemsize, alignment(n))


def tiles(n: int, c: int) -> tuple[int, int, int]:
    """Cover n classes with at most three tiles of c * 2^i, wasting little."""
    need = cdiv(n, c)
    parts: list[int] = []
    while need > 0 and len(parts) < 2:
        part = 1 << (need.bit_length() - 1)
        parts.append(part)
        need -= part
    if need > 0:
        parts.append(1 << (need - 1).bit_length())
        if len(parts) == 3 and parts[2] == parts[1]:  # 4 + 2 + 2 is 8
            parts = [parts[0], 2 * parts[1]] if 2 * parts[1] < parts[0] else [2 * parts[0]]
    parts += [0] * (3 - len(parts))
    return parts[0], parts[1], parts[2]


# Up to a number of classes per row, the number of them that a thread holds; by search on an H200.
Table = tuple[tuple[int, int], ...]
FORWARD: dict[int, Table] = {
    4: ((256, 32), (768, 16), (2048, 32), (8192, 64), (20480, 128), (LONGEST, 64)),
    2: ((256, 32), (768, 16), (2048, 64), (8192, 32), (12288, 40), (20480, 128), (LONGEST, 64)),
}
LOSS: dict[int, Table] = {
    4: ((256, 32), (768, 16), (8192, 64), (20480, 128), (LONGEST, 64)),
    2: ((256, 32), (768, 16), (8192, 32), (12288, 40), (20480, 128), (LONGEST, 64)),
}
DENSE: dict[int, Table] = {  # a dense target has so much code per class that more of them take long to compile
    4: ((256, 8), (16384, 16), (LONGEST, 32)),
    2: ((256, 8), (16384, 16), (LONGEST, 32)),
}
BACKWARD: dict[int, Table] = {
    4: ((8192, 16), (12288, 64), (LONGEST, 20)),
    2: ((8192, 16), (12288, 40), (LONGEST, 20)),
}


class Seen:
    """How often one function has met each length of rows."""

    def __init__(self) -> None:
        self.last, self.run = 0, 0
        self.calls: dict[int, int] = {}

    def often(self, n: int) -> bool:
        """Count a call with rows of n classes; return whether that length is worth kernels of its own."""
        self.run = self.run + 1 if n == self.last else 1
        self.last = n
        calls = self.calls[n] = self.calls.get(n, 0) + 1
        return self.run >= PATIENCE or calls >= OFTEN


_seen: dict[tuple[int, int], Seen] = {}
_form = threading.local()


@contextlib.contextmanager
def general_form() -> Iterator[None]:
    """Have calls use the kernels that serve most of them, which come with the package."""
    before, _form.general = in_general_form(), True
    try:
        yield
    finally:
        _form.general = before


def in_general_form() -> bool:
    return getattr(_form, "general", False)


def longest(own: int | None = None) -> int:
    """Classes of a row that is held; few in the general form, since the code for many takes the driver long to load."""
    return CLASSES[4] if in_general_form() else LONGEST if own is None else own


def start_of_rows(n: int) -> int:
    """What a kernel for long rows assumes of their start; nothing in the general form."""
    return 1 if in_general_form() else alignment(n)


def inverse(temperature: float) -> float | None:
    """One over the temperature, None where it is 1: that is known when a kernel is compiled, and spares a product.

    In the general form it is a number, with the same result, so that there are fewer kernels.
    """
    return None if temperature == 1 and not in_general_form() else 1.0 / temperature


def plan(n: int, tables: dict[int, Table], itemsize: int) -> Plan:
    """Lay rows of n classes over threads; short rows share a warp.

    A kernel takes a second or more to compile. A length that has been met rarely is therefore given one that serves
    all lengths up to the next of `CLASSES` and is slower; kernels of its own follow when they are worth it.
    """
    if in_general_form():
        return shared(n)
    seen = _seen.get((id(tables), itemsize))
    if seen is None:
        seen = _seen[id(tables), itemsize] = Seen()
    return exact(n, tables[itemsize], itemsize) if seen.often(n) else shared(n)


@functools.lru_cache(maxsize=1024)
def exact(n: int, table: Table, itemsize: int) -> Plan:
    """The plan for one length: aligned loads of several classes, and tiles that waste little."""
    threads = _threads(n, table)
    c = threads * vector(n, itemsize)
    parts = tiles(n, c)
    return _plan(threads, c, parts, alignment(n), full=c * sum(parts) == n)


def shared(n: int) -> Plan:
    """The plan that a length shares with others."""
    return general(next(longest for longest in CLASSES if n <= longest))


@functools.lru_cache(maxsize=64)
def general(longest: int) -> Plan:
    """The plan for all lengths up to a power of two: few classes per thread, which are quick to compile."""
    threads = min(longest // 8, 1024)
    return _plan(threads, threads, (longest // threads, 0, 0), 1, full=False)


def _threads(n: int, table: Table) -> int:
    per_thread = next(per_thread for limit, per_thread in table if n <= limit)
    threads = 1
    while threads < 1024 and threads * per_thread < n:
        threads *= 2
    return threads


def _plan(threads: int, c: int, parts: tuple[int, int, int], align: int, *, full: bool) -> Plan:
    rows, warps = max(1, 32 // threads), max(1, threads // 32)
    constants = {"R": rows, "C": c, "WA": parts[0], "WB": parts[1], "WC": parts[2], "ALIGN": align}
    return Plan(rows, warps, align, {**constants, "FULL": full, "BLOCK": min(128 * warps, BLOCK)})


def floats(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Memory for numbers of float32 beside `x`; with a dtype torch takes longer to read the call."""
    return x.new_empty(shape) if x.dtype is torch.float32 else x.new_empty(shape, dtype=torch.float32)


def flat_mask(mask: Tensor | None, x: Tensor) -> tuple[Tensor, int, int]:
    """The mask as rows of classes, with its strides; without one the logits take its place."""
    if mask is None:
        return x, 0, 0
    flat = mask.reshape(x.shape)
    flat = flat.view(torch.uint8) if flat.dtype == torch.bool else flat
    return flat, flat.stride(0), flat.stride(1)


def stream(itemsize: int, split: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Tiles of ``W * C`` classes in which a long row is streamed, or a chunk of one; and how they are launched."""
    warps = 16 if itemsize == 4 and not split else 8
    c = 32 * warps * (16 // itemsize)
    return {"W": max(1, 512 * warps // c), "C": c}, {"num_warps": warps}


def is_split(rows: int, n: int) -> bool:
    """Whether one program per row would leave much of the chip idle."""
    return rows < 192
