"""Suggestions as one dictionary of plain values, from which the report makes a list to tick and a corrected file."""

from __future__ import annotations

import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lastlayer.data import DataError, LabelData
from lastlayer.data.rewrite import SUFFIX, WRITABLE, Change, Spot, check_copy, copied, spots, text_of
from lastlayer.data.source import Source
from lastlayer.decode.suggest import LabelSuggestions

FILE = "suggestions.json"
MOST, LONGEST, RATES = 5000, 2000, 20_000  # suggestions, letters of a text, labels with a rate
PART = 4_000_000  # bytes up to which the file becomes a part of the page


def sheet(path: str, data: LabelData, found: LabelSuggestions) -> dict[str, Any]:
    """Return what a page of suggestions holds.

    Args:
        path: The file of the rows.
        data: The rows.
        found: The suggestions for them.

    Returns:
        ``items`` (the most probable first: rank, row in the file, label, missing, probability), the ``names`` of their
        labels in order, ``texts`` by row (id, text and labels), ``rates`` of labels, and ``file``: where the labels of
        the rows stand in it, or ``why`` the page cannot write it again.
    """
    numbers, shown = data.row_numbers(), found[:MOST]
    names = sorted({data.label_names[one.label] for one in shown})
    place = {name: i for i, name in enumerate(names)}
    items = [
        {
            "rank": rank,
            "row": int(numbers[one.row]),
            "label": place[data.label_names[one.label]],
            "missing": one.kind == "missing",
            "probability": round(one.probability, 4),
        }
        for rank, one in enumerate(shown)
    ]
    texts = {
        str(numbers[row]): {
            "id": None if data.ids is None else data.ids[row],
            "text": None if data.texts is None else data.texts[row][:LONGEST],
            "labels": data.names(row),
        }
        for row in dict.fromkeys(one.row for one in shown)
    }
    counts = data.label_counts()
    frequent = sorted(range(data.n_labels), key=lambda i: (-int(counts[i]), i))[:RATES]
    rates = [[data.label_names[i], int(counts[i]), round(float(found.rates[i]), 3)] for i in frequent]
    held = _file(path, data, items, names)
    mark = zlib.crc32(repr([(i["row"], i["label"], i["missing"]) for i in items]).encode())
    return {
        "name": Path(path).name, "mark": mark, "rows": len(data), "all": len(found), "rate": found.rate,
        "items": items, "names": names, "texts": texts, "rates": rates, "file": held,
    }  # fmt: skip


def _file(path: str, data: LabelData, items: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """Return how the file can be written again by a page: places in bytes of UTF-8, and its text if it is short."""
    name, kind = Path(path).name, str(data.source.get("format"))
    if path == "-" or kind not in WRITABLE or Path(path).is_dir():
        return {"name": name, "why": f"A page cannot write a file of format {kind} again."}
    changes: dict[int, Change] = {}
    for item in items:
        before, label = changes.get(item["row"], Change()), frozenset({names[item["label"]]})
        changes[item["row"]] = (
            before._replace(add=before.add | label) if item["missing"] else before._replace(drop=before.drop | label)
        )
    try:
        text, encoding = text_of(path, data)
        places = spots(text, data, {row: change.add | change.drop for row, change in changes.items()})
        suffix = SUFFIX.get(kind, f".{kind}")
        check_copy(path, suffix, copied(text, places, changes).encode(encoding), data, changes)
    except DataError as error:
        return {"name": name, "why": f"A page cannot write this file again: {error}"}
    if encoding != "utf-8":
        return {"name": name, "why": f"The file is in {encoding}, which a page cannot write."}
    raw = text.encode()
    held = len(raw) <= PART
    if not held and Source(path).is_compressed():
        return {"name": name, "why": "The file is compressed and too large to be a part of this page."}
    return {
        "name": name, "suffix": suffix, "size": len(raw), "crc32": zlib.crc32(raw), "text": text if held else None,
        "spots": _in_bytes(text, places),
    }  # fmt: skip


def _in_bytes(text: str, places: dict[int, list[Spot]]) -> dict[str, list[dict[str, Any]]]:
    """Return the places by row, counted in bytes."""
    marks = sorted({at for some in places.values() for spot in some for at in (spot.start, spot.end)})
    count, last, size = {}, 0, 0
    for at in marks:
        size += len(text[last:at].encode())
        count[at], last = size, at
    return {
        str(row): [{**asdict(spot), "start": count[spot.start], "end": count[spot.end]} for spot in some]
        for row, some in places.items()
    }
