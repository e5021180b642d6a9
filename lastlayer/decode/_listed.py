"""The last step of :func:`lastlayer.suggest_labels` where scores are lists: listed and written labels alone.

Labels that are neither listed nor written all have the lowest score. What they add to the sums over a row is the same
in every row, and is taken from one vector. A row then costs the square of its number of listed labels instead of its
number of labels times that of the frequent ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lastlayer.decode._context import FLOOR, Context, Data, features_of

BUDGET = 1 << 21  # entries of a chunk: rows x (listed labels) squared


class Entries(NamedTuple):
    """Labels of some rows, listed or written, with the log-odds that each is written down; all of one length."""

    row: Tensor
    label: Tensor
    written: Tensor
    logit: Tensor


def entries(data: Data, context: Context) -> Iterator[Entries]:
    """Yield the listed and the written labels of all rows, a bounded number at a time."""
    assert data.indices is not None
    assert data.labels.index is not None
    device, n = data.scores.device, data.n_classes
    place = torch.full((n + 1,), -1, dtype=torch.int64, device=device)  # of a label among the frequent ones
    place[context.frequent] = torch.arange(len(context.frequent), device=device)
    floor = torch.tensor(FLOOR, device=device).logit()
    base = torch.cat([(context.slope * floor + context.shift).sigmoid(), torch.zeros(1, device=device)])
    said_by_all = torch.cat([-base[context.frequent] @ context.pull, base.new_zeros(1)])
    width = data.indices.shape[1] + data.labels.index.shape[1]
    size = max(BUDGET // max(width * width, 1), 1)
    for start in range(0, len(data), size):
        rows = slice(start, start + size)
        listed, given = data.indices[rows].long(), data.labels.index[rows].long()
        both = (listed[:, :, None] == given[:, None, :]) & (given >= 0)[:, None, :]
        valid = torch.cat([listed >= 0, (given >= 0) & ~both.any(1)], 1)
        column = torch.where(valid, torch.cat([listed, given], 1), n)
        written = torch.cat([both.any(2), torch.ones_like(given, dtype=torch.bool)], 1) & valid
        p = torch.cat([data.scores[rows].float().nan_to_num(0), given.new_zeros(given.shape).float()], 1)
        shift = torch.cat([context.shift, base.new_zeros(1)])[column]
        logit = context.slope * p.clamp(FLOOR, 1 - FLOOR).logit() + shift
        own, label = torch.where(valid, logit.sigmoid(), 0), written.to(logit.dtype)
        more_than_base = torch.where(valid, label - own + base[column], 0)
        at = place[column]
        pull = context.pull[at.clamp(min=0)[:, :, None], column.clamp(max=n - 1)[:, None, :]]
        more_than_base = torch.where(at >= 0, more_than_base, 0)
        said = torch.einsum("rw,rwc->rc", more_than_base, pull) + said_by_all[column]
        total = (own - torch.where(valid, base[column], 0)).sum(-1, keepdim=True) + base.sum()
        others = label.sum(-1, keepdim=True) - label
        found = context.curved(context.combined(features_of(logit, own, said, others, total - own)))
        row = (torch.arange(len(column), device=device) + start)[:, None].expand_as(column)
        yield Entries(row[valid], column[valid], written[valid], found[valid])
