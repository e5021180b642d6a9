"""One seeded generator of hostile rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

# Distances at which some code changes its mind: limits of exponentials, of searches, of what is close or apart.
CONSTANTS = (0.03, 0.3, 0.5, 1, 4, 8, 16, 17, 46, 60, 69, 80, 87, 88.7, 103, 128, 160, 174, 460, 600, 690, 708, 745)
CONSTANTS += (1200, 1416, 1e4, 6e4, 2**24, 3.4e7, 2**31, 1e10, 1e15, 1.8e16, 1e20)
SIZES = (0, 1, 2, 2, 3, 3, 4, 5, 6, 8, 10, 15, 16, 17, 31, 33, 64, 100, 130)
LONG = (257, 1000, 1024, 1025, 2500)
SHORT_BATCHES, BATCHES, LONG_BATCHES = (0, 1, 3, 20, 70, 300, 2000), (0, 1, 3, 20, 70), (1, 4)  # rows
LAYOUTS = ("plain", "plain", "batched", "transposed", "strided", "flipped")
DTYPES = (torch.float32, torch.float32, torch.float32, torch.float64, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """Rows of logits, and what a function takes with them; `target` holds the share of each class that is a label."""

    logits: Tensor  # (rows, n)
    k: Tensor  # (rows,), of the dtype of the arithmetic
    mask: Tensor | None = None  # (rows, n)
    temperature: float = 1.0
    target: Tensor | None = None  # (rows, n), -1 where unknown
    layout: str = "plain"
    one_k: bool = False  # pass the k of the first row as a Python number
    observed: float = 0.0

    @property
    def work(self) -> torch.dtype:
        return torch.promote_types(self.logits.dtype, torch.float32)

    @property
    def wide(self) -> type[np.floating]:
        """The type of the reference, with digits to spare."""
        return np.longdouble if self.work == torch.float64 else np.float64

    def scores(self, impl: str) -> np.ndarray:
        """Return the scores as an implementation forms them, for the reference."""
        x = self.logits.to(self.work)
        if self.temperature != 1:
            # The GPU kernels multiply by the inverse, rounded to float32.
            inverse = torch.tensor(1 / self.temperature, dtype=torch.float32)
            x = x * inverse if impl == "triton" else x / self.temperature
        if self.mask is not None:
            x = x.masked_fill(~self.mask, -torch.inf)
        return x.numpy().astype(self.wide)

    def sizes(self) -> np.ndarray:
        k = self.k[:1].expand_as(self.k) if self.one_k else self.k
        return k.numpy().astype(self.wide)

    def rows(self, part: Tensor | slice) -> Case:
        """Return the case with some rows only."""
        count = len(self.logits[part])
        return replace(
            self,
            logits=self.logits[part],
            k=self.k[:count] if self.one_k else self.k[part],
            mask=None if self.mask is None else self.mask[part],
            target=None if self.target is None else self.target[part],
        )

    def row(self, i: int) -> Case:
        """Return the case of one row alone."""
        return replace(self.rows(slice(i, i + 1)), layout="plain")

    def plain(self, wanted: Tensor) -> Case:
        """Return the case with the wanted rows, without a mask, in float32 if it was in half precision."""
        return replace(self.rows(wanted), logits=self.logits[wanted].to(self.work), mask=None)

    def columns(self, keep: Tensor) -> Case:
        """Return the case with some classes only."""
        return replace(
            self,
            logits=self.logits[:, keep],
            mask=None if self.mask is None else self.mask[:, keep],
            target=None if self.target is None else self.target[:, keep],
        )


def generate(seed: int, largest: float = 1e30, long_rows: bool = False) -> Case:
    """Return a case; the same for the same arguments."""
    rng = np.random.Generator(np.random.PCG64(seed))
    dtype = DTYPES[rng.integers(len(DTYPES))]
    n = int(rng.choice(LONG if long_rows else SIZES))
    count = int(rng.choice(LONG_BATCHES if n > 130 else BATCHES if n > 17 else SHORT_BATCHES))
    if dtype in (torch.float16, torch.bfloat16):
        largest = min(largest, 1e4)
    x = np.array([_row(rng, n, largest) for _ in range(min(count, 100))]).reshape(min(count, 100), n)
    if count > 100:  # the others are like them, in another order and of another size
        more = rng.permuted(x[rng.integers(0, 100, count - 100)], axis=1)
        x = np.concatenate([x, np.clip(more * rng.choice((0.5, 0.99, 1, 1.01), (len(more), 1)), -largest, largest)])
    limit = torch.finfo(dtype).max
    logits = torch.from_numpy(np.clip(x, -limit, limit)).to(dtype)
    _sprinkle(rng, logits)
    mask = None
    if rng.random() < 0.25:
        mask = torch.from_numpy(rng.random((count, n)) < rng.choice((0.9, 0.5, 0.1, 0.0)))
    temperature = 1.0
    if rng.random() < 0.25:
        temperature = float(rng.choice((0.5, 0.7, 3.0, 1e-4, 1e-10, 1e10)))
    work = torch.promote_types(dtype, torch.float32)
    k = torch.tensor([_size(rng, n) for _ in range(count)], dtype=torch.float64).to(work)
    one_k = count > 0 and rng.random() < 0.3 and 0 <= float(k[0]) <= n
    return Case(
        logits,
        k,
        mask,
        temperature,
        torch.from_numpy(_target(rng, count, n)).to(work),
        str(rng.choice(LAYOUTS)),
        bool(one_k),
        float(rng.choice((0.0, 0.0, 0.3, 1.0))),
    )


def _row(rng: np.random.Generator, n: int, largest: float) -> np.ndarray:
    normal = rng.standard_normal(n)
    scale = math.exp(rng.uniform(math.log(1e-30), math.log(largest)))
    if rng.random() < 0.6:
        scale = math.exp(rng.uniform(math.log(1e-2), math.log(min(100.0, largest))))
    gap = float(rng.choice(CONSTANTS)) * float(rng.choice((0.5, 0.9, 0.999, 1, 1.001, 1.1, 2)))
    gap = min(gap, largest)
    top = int(rng.integers(0, n + 1))
    style = rng.integers(13)
    if style == 0:
        x = scale * normal
    elif style == 1:
        x = normal + scale
    elif style == 2:
        x = np.full(n, scale * normal[0]) if n else normal
    elif style == 3:
        x = np.where(np.arange(n) < top, gap, 0.0)
    elif style == 4:
        x = np.where(np.arange(n) < top, gap, 0.0) + normal * float(rng.choice((1e-3, 0.1, 1)))
    elif style == 5:
        x = gap * rng.integers(-2, 3, n)
    elif style == 6:
        x = np.round(normal * float(rng.choice((1, 3, 10)))) * float(rng.choice((1, gap)))
    elif style == 7:
        x = np.sign(normal) * np.exp(rng.uniform(math.log(1e-30), math.log(largest), n))
    elif style == 8:
        x = np.tan(math.pi * (rng.random(n) - 0.5))
    elif style == 9:
        x = normal + np.where(np.arange(n) == top, float(rng.choice((-gap, gap))), 0)
    elif style == 10:
        x = np.linspace(-gap, gap, n) + normal * 0.01
    elif style == 11:
        x = scale + normal * scale * 2.0 ** -float(rng.integers(1, 60))  # an offset, with few digits left
    else:
        x = -normal - gap * (np.arange(n) % 3 == 0)
    return rng.permutation(np.clip(x, -largest, largest)) if rng.random() < 0.8 else np.clip(x, -largest, largest)


def _sprinkle(rng: np.random.Generator, logits: Tensor) -> None:
    """Put infinities and, rarely, nan into some rows."""
    rows, n = logits.shape
    for value, often in ((-math.inf, 0.12), (math.inf, 0.06), (math.nan, 0.01)):
        for i in np.flatnonzero(rng.random(rows) < often):
            found = torch.from_numpy(rng.random(n) < rng.choice((0.1, 0.5, 0.95)))
            logits[int(i)] = torch.where(found, value, logits[int(i)])


def _size(rng: np.random.Generator, n: int) -> float:
    style = rng.integers(10)
    whole = float(rng.integers(0, n + 1))
    if style <= 2:
        return whole
    if style <= 4:
        return float(rng.uniform(0, n))
    if style == 5:
        return 10.0 ** rng.uniform(-30, -1)
    if style == 6:
        return n - 10.0 ** rng.uniform(-7, -1)
    if style == 7:
        return whole + float(rng.choice((-1, 1))) * 10.0 ** rng.uniform(-7, -1)
    if style == 8:
        return min(n, 1.0)
    return float(rng.choice((0, n, n + 1, -1, math.nan, 0.5, n - 0.5)))


def _target(rng: np.random.Generator, rows: int, n: int) -> np.ndarray:
    """Return shares of labels; most rows have few labels, some none, and some entries are unknown."""
    share = (rng.random((rows, n)) < rng.choice((0.1, 0.3, 0.9), (rows, 1))).astype(float)
    soft = np.where(rng.random((rows, 1)) < 0.3, rng.random((rows, n)), 1.0)
    unknown = (rng.random((rows, n)) < 0.2) & (rng.random((rows, 1)) < 0.3)
    return np.where(unknown, -1.0, share * soft)
