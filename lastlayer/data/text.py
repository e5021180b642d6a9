"""TSV, CSV and JSON lines: texts (or vectors) with label lists."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from lastlayer.data.builder import Row
from lastlayer.data.lines import DataError, Limits, Problems, lines

TEXT = ("text", "texts", "document", "body", "content", "description", "sentence", "title")
LABELS = ("labels", "label", "tags", "tag", "classes", "categories", "category", "topics", "y")
IDS = ("id", "ids", "uid", "key", "name")
PARTS = ("split", "part", "fold")
GROUPS = ("group", "groups", "source")
VECTORS = ("vector", "embedding", "features", "x")
SEPARATORS = (",", ";", "|", " ")
_WORDS = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "validation": "valid",
    "dev": "valid",
    "test": "test",
}


@dataclass(frozen=True)
class Columns:
    """Which cell is what, and how labels are told apart; None: there is none."""

    text: int | None
    labels: int | None
    id: int | None = None
    part: int | None = None
    group: int | None = None
    separator: str = ","
    header: bool = False
    width: int = 0

    def describe(self) -> dict[str, Any]:
        """Return the choices, as a run folder notes them."""
        return {k: v for k, v in vars(self).items() if v is not None}


def rows_of_cells(
    path: Path, limits: Limits, problems: Problems, *, delimiter: str, options: dict[str, Any]
) -> tuple[Columns, Iterator[Row]]:
    """Read a TSV or CSV file; `options`: text_column, label_column, id_column, label_separator, header."""
    cells = _tsv(path, limits, problems) if delimiter == "\t" else _csv(path, limits, problems, delimiter)
    first = list(islice(cells, 200))
    columns = sniff_columns(path, [c for _, c in first], options)
    start = first[1:] if columns.header else first
    return columns, _cell_rows(path, chain(start, cells), columns, problems)


def _tsv(path: Path, limits: Limits, problems: Problems) -> Iterator[tuple[int, list[str]]]:
    for number, line in lines(path, limits, problems):
        if line.strip():
            yield number, line.split("\t")


def _csv(path: Path, limits: Limits, problems: Problems, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    at = 0

    def feed() -> Iterator[str]:
        nonlocal at
        for number, line in lines(path, limits, problems):
            at = number
            yield line + "\n"

    reader = csv.reader(feed(), delimiter=delimiter, strict=True)
    while True:
        begin = at + 1
        before = csv.field_size_limit(limits.max_line)
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            problems.report(path, begin, f"must be CSV ({error})")
            continue
        finally:
            csv.field_size_limit(before)
        if cells and any(c.strip() for c in cells):
            yield begin, cells


def sniff_columns(path: Any, sample: list[list[str]], options: dict[str, Any]) -> Columns:
    """Choose columns by the names in a header, else by what the cells look like."""
    if not sample:
        return Columns(0, None)
    names = [c.strip().lower() for c in sample[0]]
    width = max(len(c) for c in sample)
    header = options.get("header")
    if header is None:
        header = any(n in TEXT for n in names) or sum(n in LABELS + IDS + PARTS for n in names) >= 2
    body = sample[1:] if header else sample
    if header:
        find = lambda words: next((names.index(w) for w in words if w in names), None)  # noqa: E731
        text, labels, row_id = find(TEXT), find(LABELS), find(IDS)
        part, group = find(PARTS), find(GROUPS)
    else:
        text, labels, row_id = _guess(body, width)
        part = group = None
    text = _column(path, "text_column", options.get("text_column"), names, header, text, width)
    labels = _column(path, "label_column", options.get("label_column"), names, header, labels, width)
    row_id = _column(path, "id_column", options.get("id_column"), names, header, row_id, width)
    separator = options.get("label_separator") or _separator(body, labels)
    return Columns(text, labels, row_id, part, group, separator, bool(header), len(names) if header else width)


def _column(
    path: Any, option: str, asked: Any, names: list[str], header: bool, found: int | None, width: int
) -> int | None:
    if asked is None:
        return found
    if str(asked).lower() == "none":
        return None
    if header and str(asked).lower() in names:
        return names.index(str(asked).lower())
    if str(asked).isdigit() and int(asked) < width:
        return int(asked)
    known = ", ".join(names) if header else f"0 to {width - 1}"
    raise DataError(f"{path}: `{option}` must be a column of the file ({known}), got {asked!r}.")


def _guess(body: list[list[str]], width: int) -> tuple[int | None, int | None, int | None]:
    """Without a header: the text has the longest cells, labels repeat, an id never does."""
    cells = [[row[i] for row in body if len(row) > i] for i in range(width)]
    length = [sum(map(len, c)) / max(len(c), 1) for c in cells]
    text = max(range(width), key=lambda i: (length[i], i))
    rest = [i for i in range(width) if i != text]
    if not rest:
        return text, None, None

    def repeats(i: int) -> float:
        words = [w for c in cells[i] for w in c.replace(",", " ").replace(";", " ").replace("|", " ").split()]
        return 1 - len(set(words)) / max(len(words), 1)

    labels = max(rest, key=lambda i: (repeats(i), -i))
    ids = [i for i in rest if i != labels and len(set(cells[i])) == len(cells[i])]
    return text, labels, ids[0] if ids else None


def _separator(body: list[list[str]], labels: int | None) -> str:
    cells = [] if labels is None else [row[labels] for row in body if len(row) > labels]
    return next((s for s in SEPARATORS if any(s in c.strip() for c in cells)), ",")


def _cell_rows(
    path: Any, cells: Iterable[tuple[int, list[str]]], columns: Columns, problems: Problems
) -> Iterator[Row]:
    for line, row in cells:
        if len(row) != columns.width:
            problems.report(path, line, f"must have {columns.width} columns, has {len(row)}", "\t".join(row))
            continue
        get = lambda i, row=row: None if i is None else row[i]  # noqa: E731
        try:
            labels = split_labels(get(columns.labels), columns.separator)
            part = part_of(get(columns.part))
        except ValueError as error:
            problems.report(path, line, str(error), "\t".join(row))
            continue
        text = get(columns.text)
        yield Row(line, text=text, labels=labels, id=get(columns.id), part=part, group=get(columns.group))


def split_labels(cell: str | None, separator: str) -> list[str] | None:
    """Return the label names of a cell: separated, or a JSON list."""
    if cell is None:
        return None
    cell = cell.strip()
    if cell.startswith("[") and cell.endswith("]"):
        try:
            return label_list(json.loads(cell))
        except (json.JSONDecodeError, RecursionError):
            raise ValueError("labels must be a JSON list of names") from None
    return [name for part in (cell.split() if separator == " " else cell.split(separator)) if (name := part.strip())]


def label_list(value: Any) -> list[str]:
    """Check a JSON value as a list of label names."""
    if not isinstance(value, list) or not all(isinstance(v, str | int) and not isinstance(v, bool) for v in value):
        raise ValueError("labels must be a list of names or whole numbers")
    return [str(v) for v in value]


def part_of(cell: Any) -> str | None:
    """Return "train", "valid" or "test" for a cell of a split column."""
    if cell is None:
        return None
    word = _WORDS.get(str(cell).strip().lower())
    if word is None:
        raise ValueError("split must be train, valid or test")
    return word


def rows_of_json(path: Path, limits: Limits, problems: Problems, *, options: dict[str, Any]) -> Iterator[Row]:
    """Read JSON lines: one object a line with a text or a vector, a list of labels, perhaps an id, a split, a group."""
    for number, line in lines(path, limits, problems):
        if not line.strip():
            continue
        try:
            yield _json_row(number, line, options)
        except (ValueError, RecursionError, OverflowError) as error:
            what = "must be JSON" if isinstance(error, json.JSONDecodeError | RecursionError) else str(error)
            problems.report(path, number, what, line)


def _json_row(number: int, line: str, options: dict[str, Any]) -> Row:
    item = json.loads(line)
    if not isinstance(item, dict):
        raise ValueError("must be a JSON object")

    def find(option: str, words: tuple[str, ...]) -> Any:
        asked = options.get(option)
        if asked is not None and asked not in item:
            raise ValueError(f"must have the key {asked!r}")
        return item[asked] if asked is not None else next((item[w] for w in words if w in item), None)

    text, vector = find("text_column", TEXT), find("vector_column", VECTORS)
    if isinstance(vector, str) and text is None:
        text, vector = vector, None
    if text is None and vector is None:
        raise ValueError(f"must have a text ({', '.join(TEXT[:4])}, ...) or a vector ({', '.join(VECTORS)})")
    if text is not None and not isinstance(text, str):
        raise ValueError("text must be a string")
    if vector is not None:
        vector = numbers_of(vector)
    labels, separator = find("label_column", LABELS), options.get("label_separator") or ","
    found = (
        split_labels(labels, separator) if isinstance(labels, str) else None if labels is None else label_list(labels)
    )
    row_id, group = find("id_column", IDS), find("group_column", GROUPS)
    return Row(
        number,
        text=text,
        dense=vector if text is None else None,
        labels=found,
        id=None if row_id is None else str(row_id),
        part=part_of(find("part_column", PARTS)),
        group=None if group is None else str(group),
    )


def numbers_of(value: Any) -> list[float]:
    """Check a JSON value as a list of finite numbers."""
    if not isinstance(value, list) or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in value):
        raise ValueError("vector must be a list of numbers")
    out = [float(v) for v in value]
    if not all(map(math.isfinite, out)):
        raise ValueError("vector must be a list of finite numbers")
    return out
