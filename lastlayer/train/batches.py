"""Rows to batches: which rows, in which order, and in the form that the network takes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from lastlayer.data import LabelData
from lastlayer.train.network import Input


class Rows(Dataset[dict[str, Any]]):
    """Rows as batches: indexed with a list of row numbers, it returns the whole batch at once."""

    def __init__(self, x: Any, labels: LabelData) -> None:
        self.x, self.labels = x, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: Any) -> dict[str, Any]:
        rows = np.asarray(rows, dtype=np.int64)
        out = {"input": rows_to_input(self.x, rows), "target": torch.from_numpy(self.labels.padded(rows))}
        if self.labels.weights is not None:
            out["weight"] = torch.from_numpy(self.labels.weights[rows].astype(np.float32))
        return out


def rows_to_input(x: Any, rows: np.ndarray) -> Input:
    """Return rows of a dense array or CSR matrix in the form that the network takes."""
    if hasattr(x, "inputs"):  # the rows of an encoder
        inputs: Input = x.inputs(rows)
        return inputs
    if isinstance(x, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(x[rows], dtype=np.float32))
    start, stop = x.indptr[rows].astype(np.int64), x.indptr[rows + 1].astype(np.int64)
    counts = stop - start
    offsets = np.cumsum(counts) - counts
    place = np.repeat(start - offsets, counts) + np.arange(counts.sum())
    index = torch.from_numpy(x.indices[place].astype(np.int64))
    value = torch.from_numpy(x.data[place].astype(np.float32))
    return index, torch.from_numpy(offsets), value


class EpochBatches(Sampler[list[int]]):
    """Lists of row numbers. Their order depends only on the seed and the epoch, so a resumed run repeats it.

    Args:
        n: The number of rows.
        size: Rows per step and process.
        seed: Of the order; None keeps the rows in order.
        rank: The number of this process among those that share the rows.
        world: The number of these processes.
        share: Which part of each batch to take, and of how many parts.
    """

    def __init__(
        self, n: int, size: int, *, seed: int | None, rank: int = 0, world: int = 1, share: tuple[int, int] = (0, 1)
    ) -> None:
        self.n, self.size, self.seed, self.rank, self.world, self.epoch = n, size, seed, rank, world, 0
        self.share = share

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; Lightning calls this at the start of each."""
        self.epoch = epoch

    def __len__(self) -> int:
        return max(math.ceil(self.n / (self.size * self.world)), 1) if self.n else 0

    def __iter__(self) -> Iterator[list[int]]:
        order = np.arange(self.n)
        if self.seed is not None:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(self.n)
        step = self.size * self.world
        for at in range(0, self.n, step):
            part = order[at : at + step]
            mine = part[self.rank :: self.world]
            mine = mine if len(mine) else part[:1]  # every rank takes part in every step
            first, of = self.share
            yield mine[first::of].tolist()
