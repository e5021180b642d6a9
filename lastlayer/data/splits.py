"""Split rows into parts or folds: with the labels in proportion, groups together, the same way each time."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from lastlayer.data.labeldata import LabelData

FEW_LABELS = 100_000  # up to here "auto" keeps labels in proportion
_MANY_ITEMS = 20_000  # from here a heap finds the next label faster than a scan
_MOST_PAIRS = 100_000_000
_PASSES, _MOVES = 10, 20_000  # of the refinement, and of each pass
_OFF = 0.1  # of its rows by which a part may miss its size for the sake of labels
_NEVER = np.iinfo(np.int64).max


def split_rows(
    data: LabelData,
    fractions: Sequence[float],
    *,
    seed: int = 0,
    stratify: bool | Literal["auto"] = False,
    groups: Sequence[Any] | None = None,
    order: int = 1,
) -> list[LabelData]:
    """Split rows into parts of the given sizes. Rows of a group, and equal rows, stay together.

    Without `stratify`, a hash of a row's group, id, text or features decides its part, whatever the other rows are: a
    file that grows keeps its split. With it, every label has about the given share of its rows in every part (iterative
    stratification; Sechidis, Tsoumakas and Vlahavas 2011). Labels that occur in a single row would all go to the
    largest part. If that makes a part a tenth too small or too large, they are ignored, then those of two rows, and so
    on.

    Args:
        data: The rows.
        fractions: The size of each part; they sum to 1.
        seed: Another seed is another split.
        stratify: Whether to keep labels in proportion; ``"auto"`` does so for up to 100,000 labels.
        groups: What to keep together, one per row; None is ``data.groups``, else equal texts or features. An empty name
            is a group of its own.
        order: With `stratify`, 1 keeps single labels in proportion, 2 pairs of labels too (Szymanski and Kajdanowicz
            2017).

    Returns:
        One table per fraction, each in the order of the rows.

    Example:
        >>> from lastlayer.data import LabelData, split_rows
        >>> data = LabelData.from_lists([["a"]] * 8 + [["a", "b"]] * 4)
        >>> parts = split_rows(data, [0.75, 0.25], stratify=True)
        >>> [part.label_counts().tolist() for part in parts]
        [[9, 3], [3, 1]]
    """
    if len(fractions) < 1 or any(not 0 <= f <= 1 for f in fractions) or abs(sum(fractions) - 1) > 1e-9:
        raise ValueError(f"split_rows: `fractions` must be between 0 and 1 and sum to 1, got {list(fractions)}.")
    if stratify not in (True, False, "auto"):
        raise ValueError(f"split_rows: `stratify` must be true, false or 'auto', got {stratify!r}.")
    groups = _checked_groups("split_rows", data, groups)
    if stratify is True or (stratify == "auto" and data.n_labels <= FEW_LABELS):
        part = _stratified("split_rows", data, fractions, seed, _units(data, groups), order)
    else:
        keys = _keys(data)
        if groups is not None:
            keys = [str(g).encode("utf-8", "surrogatepass") or key for g, key in zip(groups, keys, strict=True)]
        place = np.array([_unit(f"{seed}:".encode() + key) for key in keys])
        part = np.searchsorted(np.cumsum(fractions)[:-1], place, side="right")
    return [data.take(np.flatnonzero(part == i)) for i in range(len(fractions))]


def fold_rows(
    data: LabelData, n_folds: int, *, seed: int = 0, groups: Sequence[Any] | None = None, order: int = 1
) -> np.ndarray:
    """Return the fold of each row for cross-validation, from 0 to ``n_folds - 1``, with the labels in proportion.

    Args:
        data: The rows.
        n_folds: The number of folds, at least 2.
        seed: Another seed makes other folds.
        groups: What to keep together, as for :func:`split_rows`.
        order: 1 for labels, 2 for pairs of labels too, as for :func:`split_rows`.

    Returns:
        Whole numbers, one per row: fold ``i`` trains on the rows of all others and is measured on its own.

    Example:
        >>> import numpy as np
        >>> from lastlayer.data import LabelData, fold_rows
        >>> data = LabelData.from_lists([["a"]] * 6 + [["b"]] * 3)
        >>> fold = fold_rows(data, 3)
        >>> [data.take(np.flatnonzero(fold == i)).label_counts().tolist() for i in range(3)]
        [[2, 1], [2, 1], [2, 1]]
    """
    if isinstance(n_folds, bool) or not isinstance(n_folds, int | np.integer) or not 2 <= n_folds <= max(len(data), 2):
        raise ValueError(
            f"fold_rows: `n_folds` must be a whole number from 2 to the {len(data)} rows, got {n_folds!r}."
        )
    groups = _checked_groups("fold_rows", data, groups)
    units = _units(data, groups)
    if units[1] < n_folds and len(data):
        what = _what(groups)
        raise ValueError(f"fold_rows: `n_folds` must be at most the number of {what}, {units[1]}, got {n_folds}.")
    return _stratified("fold_rows", data, [1 / n_folds] * n_folds, seed, units, order)


def most_folds(data: LabelData) -> tuple[int, str]:
    """Return the largest number of folds, and what it is the number of."""
    return _units(data, data.groups)[1], _what(data.groups)


def _what(groups: Sequence[Any] | None) -> str:
    return "different rows" if groups is None else "groups"


def _checked_groups(op: str, data: LabelData, groups: Sequence[Any] | None) -> Sequence[Any] | None:
    if groups is None:
        return data.groups
    if len(groups) != len(data):
        raise ValueError(f"{op}: `groups` must have one entry per row, {len(data)}, got {len(groups)}.")
    return groups


def _stratified(
    op: str, data: LabelData, fractions: Sequence[float], seed: int, units: tuple[np.ndarray, int], order: int
) -> np.ndarray:
    if order not in (1, 2):
        raise ValueError(f"{op}: `order` must be 1 or 2, got {order!r}.")
    unit, n_units = units
    row = np.repeat(np.arange(len(data)), data.row_counts())
    item, n_items = data.indices, data.n_labels
    if order == 2:
        pair_row, pair = _pairs(op, data)
        row, item = np.concatenate([row, pair_row]), np.concatenate([item, n_items + pair])
        n_items += int(pair.max(initial=-1)) + 1
    holder, size = unit[row], np.bincount(unit, minlength=n_units)
    part, least = _assign(holder, item, n_items, size, fractions, seed), 2
    if not _fits(part, size, fractions):
        of_item = np.bincount(np.unique(holder * n_items + item) % max(n_items, 1), minlength=n_items)
    while len(item) and not _fits(part, size, fractions):
        kept = of_item[item] >= least
        holder, item, least = holder[kept], item[kept], 2 * least - 1
        part = _assign(holder, item, n_items, size, fractions, seed)
    return np.asarray(part[unit])


def _fits(part: np.ndarray, size: np.ndarray, fractions: Sequence[float]) -> bool:
    """Whether each part has about as many rows as it should.

    The rarest labels come first, and the part that gets most of them is the largest one: where they are many, it would
    take nearly all rows.
    """
    wanted = size.sum() * np.asarray(fractions, np.float64)
    off = np.abs(np.bincount(part, size, minlength=len(wanted)) - wanted)
    return bool((off <= np.maximum(_OFF * wanted, size.max(initial=0))).all())


def _units(data: LabelData, groups: Sequence[Any] | None) -> tuple[np.ndarray, int]:
    """Return for each row the number of what it belongs to: its group, or the rows that equal it."""
    places: dict[Any, int] = {}
    if groups is not None:
        unit = [places.setdefault(g if g != "" else (i,), len(places)) for i, g in enumerate(groups)]
    elif data.texts is None and data.features is None:
        return np.arange(len(data)), len(data)
    else:
        unit = [places.setdefault(key, len(places)) for key in (data.texts or _feature_keys(data.features))]
    return np.array(unit, dtype=np.int64), len(places)


def _pairs(op: str, data: LabelData) -> tuple[np.ndarray, np.ndarray]:
    """Return the pairs of labels of each row as (row, number of the pair); pairs that occur once cannot be split."""
    counts = data.row_counts()
    total = int((counts * (counts - 1) // 2).sum())
    if total > _MOST_PAIRS:
        raise ValueError(f"{op}: `order` must be 1 for rows with {total} pairs of labels, got 2.")
    rows, keys = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for m in np.unique(counts[counts > 1]).tolist():
        at = np.flatnonzero(counts == m)
        lists = data.indices[data.indptr[at][:, None] + np.arange(m)]
        first, second = np.triu_indices(m, 1)
        rows.append(np.repeat(at, len(first)))
        keys.append((lists[:, first] * data.n_labels + lists[:, second]).ravel())
    row, key = np.concatenate(rows), np.concatenate(keys)
    _, number, seen = np.unique(key, return_inverse=True, return_counts=True)
    kept = seen[number] > 1
    return row[kept], np.unique(number[kept], return_inverse=True)[1]


def _assign(
    unit: np.ndarray, item: np.ndarray, n_items: int, size: np.ndarray, fractions: Sequence[float], seed: int
) -> np.ndarray:
    """Return the part of each unit.

    The rarest item that is left goes first. Its units are dealt out so that each part gets the share that it still
    wants. As only the numbers count for that, the units of an item are dealt at once, and which of them goes where is
    free: sorted by their other items, rarest first, the parts take turns with them, so that equal sets are spread too.

    Args:
        unit: The unit of each entry.
        item: The item of each entry; equal entries add up.
        n_items: The number of items.
        size: The number of rows of each unit.
        fractions: The share of each part.
        seed: Of what is left to chance.
    """
    if not len(size):
        return np.empty(0, dtype=np.int64)
    rng = np.random.default_rng(seed)
    share = np.asarray(fractions, dtype=np.float64)
    entries = _Entries(unit, item, n_items, len(size), rng)
    size = size[entries.order]
    wanted = entries.total[:, None] * share
    room = size.sum() * share
    part = np.full(len(size), -1, dtype=np.int64)
    left = np.where(entries.total > 0, entries.total, _NEVER)
    for i in _rarest(left, entries):
        members, weight = entries.of_item(i)
        free = part[members] < 0
        members, weight = members[free], weight[free]
        part[members] = _deal(wanted[i], room, share, weight, size[members], rng)
        items, weights, repeat = entries.of_units(members)
        np.subtract.at(wanted, (items, np.repeat(part[members], repeat)), weights)
        np.subtract.at(left, items, weights)
        left[items[left[items] <= 0]] = _NEVER
        entries.touched = items
    rest = np.flatnonzero(part < 0)
    part[rest] = _deal(room.copy(), room, share, size[rest], size[rest], rng)
    _refine(part, entries, size, share)
    out = np.empty_like(part)
    out[entries.order] = part
    return out


class _Entries:
    """The items of each unit and the units of each item, units in the order in which they are dealt."""

    def __init__(
        self, unit: np.ndarray, item: np.ndarray, n_items: int, n_units: int, rng: np.random.Generator
    ) -> None:
        key = unit * n_items + item
        if len(key) and not (np.diff(key) > 0).all():
            key, weight = np.unique(key, return_counts=True)
        else:
            weight = np.ones(len(key), dtype=np.int64)
        unit, item = (key // n_items, key % n_items) if n_items else (key, key)
        self.total = np.bincount(item, weights=weight, minlength=n_items).astype(np.int64)
        self.order = _by_rarest(unit, item, self.total, n_units, rng)
        rank = np.empty(n_units, dtype=np.int64)
        rank[self.order] = np.arange(n_units)
        unit = rank[unit]
        by_unit = np.argsort(unit, kind="stable")
        self.items, self.item_weight = item[by_unit], weight[by_unit]
        self.unit_start = np.concatenate([[0], np.cumsum(np.bincount(unit, minlength=n_units))])
        by_item = by_unit[np.argsort(self.items, kind="stable")]  # within an item in the order of the units
        self.members, self.member_weight = unit[by_item], weight[by_item]
        self.item_start = np.concatenate([[0], np.cumsum(np.bincount(item, minlength=n_items))])
        self.touched = np.empty(0, dtype=np.int64)

    def of_item(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the units of an item and their weights in it."""
        place = slice(self.item_start[i], self.item_start[i + 1])
        return self.members[place], self.member_weight[place]

    def of_units(self, units: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the items of units, their weights, and how many each unit has."""
        start, count = self.unit_start[units], self.unit_start[units + 1] - self.unit_start[units]
        ends = np.cumsum(count)
        place = np.repeat(start - ends + count, count) + np.arange(ends[-1] if len(ends) else 0)
        return self.items[place], self.item_weight[place], count


def _refine(part: np.ndarray, entries: _Entries, size: np.ndarray, share: np.ndarray) -> None:
    """Move units to another part while that lessens the sum of (rows - wanted rows)^2 / scale over items and parts.

    The rows as a whole are an item too. A move from part a to b changes the sum by 2 w (w - excess_a + excess_b) /
    scale for each item of the unit, w being its weight there. The scale is rows^1.5: with the rows themselves rare
    labels suffer, with their square common ones.
    """
    total = np.append(entries.total, size.sum())
    unit = np.repeat(np.arange(len(size)), np.diff(entries.unit_start))
    scale = np.maximum(total, 1) ** 1.5
    scaled = entries.item_weight / scale[entries.items]
    cost = np.bincount(unit, scaled * entries.item_weight, minlength=len(size)) + size * size / scale[-1]
    usable = np.flatnonzero(share > 0)
    for _ in range(_PASSES):
        excess = np.zeros((len(total), len(share)))
        np.add.at(excess, (entries.items, part[unit]), entries.item_weight)
        excess[-1] = np.bincount(part, size, minlength=len(share))
        excess -= total[:, None] * share
        pull = np.stack([np.bincount(unit, scaled * excess[entries.items, j], minlength=len(size)) for j in usable], 1)
        pull = pull + size[:, None] * excess[-1, usable] / scale[-1]
        at = np.searchsorted(usable, part)
        gain = pull[np.arange(len(size)), at] - pull.min(1) - cost
        tried = np.argsort(-gain, kind="stable")[:_MOVES]
        moved = 0
        for u in tried[gain[tried] > 1e-9].tolist():
            place = slice(entries.unit_start[u], entries.unit_start[u + 1])
            items, weight = entries.items[place], entries.item_weight[place]
            here = scaled[place] @ excess[items] + size[u] * excess[-1] / scale[-1]
            to = usable[here[usable].argmin()]
            if here[part[u]] - here[to] - cost[u] > 1e-9:
                excess[items, part[u]] -= weight
                excess[items, to] += weight
                excess[-1, part[u]] -= size[u]
                excess[-1, to] += size[u]
                part[u] = to
                moved += 1
        if not moved:
            return


def _by_rarest(
    unit: np.ndarray, item: np.ndarray, total: np.ndarray, n_units: int, rng: np.random.Generator
) -> np.ndarray:
    """Sort units by their rarest items, the rarest first, and by chance where four of them agree."""
    rank = np.empty(len(total), dtype=np.int64)
    rank[np.argsort(total, kind="stable")] = np.arange(len(total))
    place = np.lexsort((rank[item], unit))
    unit, item = unit[place], rank[item[place]]
    start = np.concatenate([[0], np.cumsum(np.bincount(unit, minlength=n_units))])
    at = np.arange(len(unit)) - start[unit]
    keys = [rng.permutation(n_units)]
    for depth in (3, 2, 1, 0):
        key = np.full(n_units, len(total), dtype=np.int64)
        key[unit[at == depth]] = item[at == depth]
        keys.append(key)
    return np.lexsort(keys)


def _rarest(left: np.ndarray, entries: _Entries) -> Iterator[int]:
    """Yield the item with the fewest rows left, until none is; `left` changes between the steps."""
    if len(left) <= _MANY_ITEMS:
        while len(left) and left[i := int(left.argmin())] != _NEVER:
            yield i
        return
    heap = [(n, i) for i, n in enumerate(left.tolist()) if n != _NEVER]
    heapq.heapify(heap)
    while heap:
        n, i = heapq.heappop(heap)
        if n != left[i]:  # it has changed since, and is in the heap again
            continue
        yield i
        changed = np.unique(entries.touched)
        for pair in zip(left[changed].tolist(), changed.tolist(), strict=True):
            if pair[0] != _NEVER:
                heapq.heappush(heap, pair)


def _deal(
    wanted: np.ndarray,
    room: np.ndarray,
    share: np.ndarray,
    weight: np.ndarray,
    size: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    """Return the part of each unit of an item: large units go first, one by one, then those of one row take turns.

    Each goes to the part that wants most of the item, and of these to the one with the most room. `room` is updated.
    """
    wanted, out = wanted.copy(), np.empty(len(size), dtype=np.int64)
    large = np.flatnonzero(size > 1)
    for place in large[np.lexsort((-size[large], -weight[large]))].tolist():
        best = _most(wanted, room, share, rng)
        out[place] = best
        wanted[best] -= weight[place]
        room[best] -= size[place]
    ones = np.flatnonzero(size == 1)
    counts = _fill(wanted, len(ones), room, share, rng)
    room -= counts
    turn = np.concatenate([(np.arange(n) + rng.random()) / n for n in counts.tolist() if n] or [np.empty(0)])
    out[ones] = np.repeat(np.arange(len(counts)), counts)[np.argsort(turn, kind="stable")]
    return out


def _most(wanted: np.ndarray, room: np.ndarray, share: np.ndarray, rng: np.random.Generator) -> int:
    best = np.flatnonzero(share > 0)
    for value in (wanted, room):
        best = best[value[best] > value[best].max() - 1e-9]
    return int(best[rng.integers(len(best))]) if len(best) > 1 else int(best[0])


def _fill(wanted: np.ndarray, count: int, room: np.ndarray, share: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return how many of `count` units of one row each part gets if each goes where most are wanted."""
    counts = np.zeros(len(wanted), dtype=np.int64)
    if count == 0:
        return counts
    usable = np.flatnonzero(share > 0)
    high = np.sort(wanted[usable])[::-1]
    levels = (np.cumsum(high) - count) / np.arange(1, len(high) + 1)  # that of water over the highest 1, 2, ...
    level = levels[np.flatnonzero(levels < high)[-1]]
    counts[usable] = np.maximum(np.floor(wanted[usable] - level + 1e-9), 0).astype(np.int64)
    for _ in range(count - int(counts.sum())):
        counts[_most(wanted - counts, room - counts, share, rng)] += 1
    return counts


def _keys(data: LabelData) -> list[bytes]:
    for names in (data.ids, data.texts):
        if names is not None:
            return [name.encode("utf-8", "surrogatepass") for name in names]
    if data.features is None:
        return [str(i).encode() for i in range(len(data))]
    return list(_feature_bytes(data.features))


def _feature_bytes(x: Any) -> Iterator[bytes]:
    if isinstance(x, np.ndarray):
        yield from (np.ascontiguousarray(row).tobytes() for row in x)
        return
    spans = zip(x.indptr[:-1].tolist(), x.indptr[1:].tolist(), strict=True)
    yield from (x.indices[a:b].astype(np.int64).tobytes() + x.data[a:b].tobytes() for a, b in spans)


def _feature_keys(x: Any) -> Iterator[bytes]:
    return (hashlib.blake2b(row, digest_size=16).digest() for row in _feature_bytes(x))


def _unit(key: bytes) -> float:
    return int.from_bytes(hashlib.md5(key, usedforsecurity=False).digest()[:7], "big") / 2**56
