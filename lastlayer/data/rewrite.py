"""Write a file again with other labels, in its own format: only the characters that name labels change.

For each row that changes, a reader of its format finds the places of its labels, and how they are written there
(:class:`Spot`). The text between the places is copied. The report's page does the same with the same places, in
``lastlayer/report/suggest.js``.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from lastlayer.data.labeldata import LabelData
from lastlayer.data.labels import split_labels
from lastlayer.data.lines import pieces
from lastlayer.data.read import read_parts
from lastlayer.data.source import DataError, Limits, Source

WRITABLE = ("tsv", "csv", "jsonl", "json", "fasttext", "svm")
SUFFIX = {"fasttext": ".txt"}


class Change(NamedTuple):
    """Labels to add to a row and to take from it, by name."""

    add: frozenset[str] = frozenset()
    drop: frozenset[str] = frozenset()

    def of(self, labels: list[str]) -> list[str]:
        """Return the labels of a row after the change: those that stay in their order, then the new ones sorted."""
        kept = [name for name in labels if name not in self.drop]
        return kept + sorted(self.add - set(kept))


@dataclass(frozen=True)
class Spot:
    """A place of a text that names labels, and how.

    Args:
        start: The first character.
        end: The character after the last.
        labels: The labels that are there. Of a flag: the one label that it stands for.
        style: ``"words"``: names with `join` between them; ``"json"``: a JSON list of names; ``"numbers"``: of whole
            numbers; ``"flag"``: one of the two `words`, for no and yes.
        join: What stands between names.
        words: The words of a flag.
        prefix: What stands before each name.
        after: What follows the names; without names it loses the spaces at its start.
        quote: How the whole is wrapped: as it is, as a JSON string (``"json"``), or in the quotes of a CSV file where
            it holds a quote, a line end or the delimiter, which is given here.
    """

    start: int
    end: int
    labels: tuple[str, ...]
    style: str = "words"
    join: str = ","
    words: tuple[str, str] = ("", "")
    prefix: str = ""
    after: str = ""
    quote: str = ""

    def moved(self, by: int) -> Spot:
        """Return the place where so many characters are put before the text."""
        return replace(self, start=self.start + by, end=self.end + by) if by else self

    def written(self, change: Change) -> str:
        """Return what stands here after a change."""
        if self.style == "flag":
            return self.words[self.labels[0] in change.add]
        names = change.of(list(self.labels))
        if self.style == "numbers" and all(name.isascii() and name.isdigit() for name in names):
            return f"[{', '.join(names)}]"
        if self.style != "words":
            text = json.dumps(names, ensure_ascii=False)
        else:
            text = self.join.join(f"{self.prefix}{name}" for name in names)
            text += self.after if names else self.after.lstrip(" ")
        if self.quote == "json":
            return json.dumps(text, ensure_ascii=False)
        if self.quote and any(mark in text for mark in (self.quote, '"', "\n", "\r")):
            return '"' + text.replace('"', '""') + '"'
        return text


Rows = Mapping[int, frozenset[str]]  # the labels in question, for rows by their number in the file


def rewrite(path: str | Path, out: Path, data: LabelData, changes: Mapping[int, Change]) -> Path:
    """Write a copy of a file with some labels changed.

    The copy is read again before it is kept: if it does not hold the rows of the file with the changed labels, it is an
    error, and nothing is written.

    Args:
        path: The file that `data` was read from: TSV, CSV, JSON, JSON lines, fastText or LibSVM. It may be compressed;
            the copy is not.
        out: The copy without its suffix, which is that of the format.
        data: Rows of the file, which tell how it is read.
        changes: For each row, by its number in the file from 0, the labels to add and to drop.

    Returns:
        The path of the copy.
    """
    kind = str(data.source.get("format"))
    if kind not in WRITABLE:
        raise DataError(f"{path}: a file of format {kind} cannot be written again, only {', '.join(WRITABLE)}.")
    target = out.with_name(f"{out.name}{SUFFIX.get(kind, f'.{kind}')}")
    if target.exists() and target.samefile(path):
        raise DataError(
            f"{path}: would be overwritten by its corrected copy. Name another folder for the copy (--out)."
        )
    text, encoding = text_of(path, data)
    found = spots(text, data, {row: change.add | change.drop for row, change in changes.items()})
    raw = copied(text, found, changes).encode(encoding)
    check_copy(path, target.suffix, raw, data, changes)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(raw)
    return target


def copied(text: str, places: Mapping[int, list[Spot]], changes: Mapping[int, Change]) -> str:
    """Return the text with the labels at the places changed."""
    made, at = [], 0
    for row, spot in sorted(((row, spot) for row, some in places.items() for spot in some), key=lambda x: x[1].start):
        made += [text[at : spot.start], spot.written(changes[row])]
        at = spot.end
    return "".join([*made, text[at:]])


def text_of(path: str | Path, data: LabelData) -> tuple[str, str]:
    """Return the text of the file that rows were read from, with its byte order mark, and its encoding."""
    source = Source(path)
    if source.is_stream:
        raise DataError(f"{source}: cannot be read a second time. Save it to a file.")
    encoding = str((data.source.get("options") or {}).get("encoding") or "utf-8")
    return "".join(pieces(source, Limits(), encoding, marked=True)), encoding


def spots(text: str, data: LabelData, rows: Rows) -> dict[int, list[Spot]]:
    """Return the places of the labels of rows.

    Args:
        text: The text of the file.
        data: Rows of the file, which tell how it is read.
        rows: For each row that may change, by its number in the file, the labels in question.

    Returns:
        The places by row. A row that cannot be found has none.
    """
    options, body = dict(data.source.get("options") or {}), text.removeprefix("\ufeff")
    mark = len(text) - len(body)
    places = _FINDERS[str(data.source["format"])](body, options, rows)
    return {row: [spot.moved(mark) for spot in found] for row, found in places if found}


def check_copy(path: Any, suffix: str, raw: bytes, data: LabelData, changes: Mapping[int, Change]) -> None:
    """Read the copy, and raise an error unless its rows have the labels that they should have."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / f"copy{suffix}"
        copy.write_bytes(raw)
        options = {"on_error": data.problems.on_error, **(data.source.get("options") or {})}
        if data.features is not None and data.source["format"] == "svm":
            options["n_features"] = data.features.shape[1]
        parts = read_parts(copy, format=data.source["format"], **options)
    again = {int(n): part.names(i) for part in parts.values() for i, n in enumerate(part.row_numbers())}
    for i, number in enumerate(data.row_numbers().tolist()):
        wanted = changes[number].of(data.names(i)) if number in changes else data.names(i)
        if sorted(again.get(number, [])) != sorted(wanted):
            raise DataError(
                f"{path}, row {number}: the labels {', '.join(wanted) or 'none'} cannot be written in its format "
                f"(they would be read as {', '.join(again.get(number, [])) or 'none'})."
            )


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines, without their ends, and where they start. Lines end with LF, or CR where there is no LF."""
    end, at = "\n" if "\n" in text or "\r" not in text else "\r", 0
    for line in text.split(end):
        yield at, line.removesuffix("\r") if end == "\n" else line
        at += len(line) + 1


def _fasttext(text: str, options: dict[str, Any], rows: Rows) -> Iterator[tuple[int, list[Spot]]]:
    pattern = re.compile(r"(?:^|(?<=\s))__label__(\S*)\s*")
    for number, (start, body) in enumerate(_lines(text)):
        if number in rows and body.strip():
            labels = tuple(name for name in pattern.findall(body) if name)
            rest = pattern.sub("", body).strip()
            yield number, [Spot(start, start + len(body), labels, join=" ", prefix="__label__", after=f" {rest}")]


def _svm(text: str, options: dict[str, Any], rows: Rows) -> Iterator[tuple[int, list[Spot]]]:
    lines = list(_lines(text))
    first = next((tokens for _, body in lines if (tokens := body.split())[:1] not in ([], ["#"])), [])
    has_header = len(first) == 3 and all(token.isascii() and token.isdigit() for token in first)
    for number, (start, body) in enumerate(lines, -int(has_header)):
        if number not in rows:
            continue
        given = body.split(" ", 1)[0]
        if ":" in given or not given:  # no labels: they go before the space at the start
            place = start + len(body) - len(body.lstrip())
            yield number, [Spot(start, place, (), after=" ")]
            continue
        labels = tuple(name for name in given.split(",") if name)
        yield number, [Spot(start, start + len(given), labels)]


def _jsonl(text: str, options: dict[str, Any], rows: Rows) -> Iterator[tuple[int, list[Spot]]]:
    for number, (start, body) in enumerate(_lines(text)):
        if number in rows and body.strip():
            yield number, _record(text, start, options, rows[number])


def _json(text: str, options: dict[str, Any], rows: Rows) -> Iterator[tuple[int, list[Spot]]]:
    for number, (start, _, _) in enumerate(_items(text, 0)):
        if number in rows:
            yield number, _record(text, start, options, rows[number])


_VALUE, _SPACE = json.JSONDecoder(), re.compile(r"\s*")


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def _items(text: str, at: int) -> Iterator[tuple[int, int, Any]]:
    """Yield the items of a JSON list that starts here or after space: where each starts and ends, and its value."""
    at = _after_space(text, at)
    if text[at : at + 1] != "[":
        return
    at = _after_space(text, at + 1)
    while text[at] != "]":
        value, end = _VALUE.raw_decode(text, at)
        yield at, end, value
        at = _after_space(text, end)
        at = _after_space(text, at + 1) if text[at] == "," else at


def _fields(text: str, at: int) -> dict[str, tuple[int, int, Any]]:
    """Return the fields of a JSON object that starts here or after space: where each value is, and the value."""
    out, at = {}, _after_space(text, _after_space(text, at) + 1)
    while text[at] != "}":
        name, at = _VALUE.raw_decode(text, at)
        start = _after_space(text, _after_space(text, at) + 1)
        value, end = _VALUE.raw_decode(text, start)
        out[name] = start, end, value
        at = _after_space(text, end)
        at = _after_space(text, at + 1) if text[at] == "," else at
    return out


def _record(text: str, at: int, options: dict[str, Any], labels: frozenset[str]) -> list[Spot]:
    """Return the places of the labels of a JSON object, in the form in which they are."""
    fields, column = _fields(text, at), options.get("label_column", "labels")
    if isinstance(column, list):
        absent = [name for name in column if name in labels and name not in fields]
        if absent:
            raise DataError(f"the field {absent[0]!r} must be in each row whose labels change.")
        return [_flag(text, *fields[name][:2], name) for name in column if name in labels]
    if column not in fields:
        raise DataError(f"the field {column!r} must be in each row whose labels change.")
    start, end, held = fields[column]
    if _are_vectors(options):
        return _bits(text, start, end, labels)
    if isinstance(held, str):
        return [_cell(held, start, end, options, quote="json")]
    held = [held] if isinstance(held, int) else held or []
    numeric = bool(held) and all(isinstance(v, int) for v in held)
    return [Spot(start, end, tuple(str(v) for v in held), style="numbers" if numeric else "json")]


def _are_vectors(options: dict[str, Any]) -> bool:
    """Whether the labels of a row are a vector of zeros and ones; how names are separated is always remembered."""
    return isinstance(options.get("label_column"), str) and "label_separator" not in options


def _bits(text: str, start: int, end: int, labels: frozenset[str]) -> list[Spot]:
    """Return the places of labels in a vector of zeros and ones."""
    each = [(start + bit.start(), start + bit.end()) for bit in re.finditer(r"[\w.]+", text[start:end])]
    return [_flag(text, *each[int(name)], name) for name in sorted(labels, key=int) if int(name) < len(each)]


_PAIRS = {
    **dict.fromkeys(("false", "true"), ("False", "True")),
    **dict.fromkeys(("no", "yes"), ("No", "Yes")),
    **dict.fromkeys(("n", "y"), ("N", "Y")),
}


def _flag(text: str, start: int, end: int, label: str) -> Spot:
    """Return the place of a 0 or 1, which is written as it was: as a number, a fraction or a word."""
    held = text[start:end]
    low = held.strip().strip('"').lower()
    words = _PAIRS.get(low, ("0", "1"))
    for style in (str.lower, str.upper):
        if low in _PAIRS and held == style(held):
            words = (style(words[0]), style(words[1]))
    words = ("0.0", "1.0") if "." in low else words
    if held.strip().startswith('"'):
        words = (f'"{words[0]}"', f'"{words[1]}"')
    return Spot(start, end, (label,), style="flag", words=words)


def _cell(cell: str, start: int, end: int, options: dict[str, Any], quote: str = "") -> Spot:
    """Return the place of a cell of label names: a JSON list stays one, other lists become JSON."""
    separator = str(options.get("label_separator", ","))
    separator = {"space": " ", "none": "", "tab": "\t"}.get(separator, separator)
    labels = tuple(split_labels(cell, separator) or [])
    if cell.strip()[:1] in ("[", "(", "{"):
        return Spot(start, end, labels, style="json", quote=quote)
    wide = separator + " " if separator and f"{separator} " in cell and separator != " " else separator
    return Spot(start, end, labels, join=wide or ", ", quote=quote)


def _table(text: str, options: dict[str, Any], rows: Rows) -> Iterator[tuple[int, list[Spot]]]:
    """Find the cells of CSV or TSV. Columns are named by the header, or numbered."""
    delimiter, quotes = str(options.get("delimiter") or ","), bool(options.get("quotes"))
    column = options.get("label_column", "labels")
    names: list[str] | None = None if options.get("header") else []
    number = 0
    for start, raw, cells in _records(text, delimiter, quotes):
        if number == 0 and raw.lower().startswith("sep=") and len(raw.strip()) == 5:
            continue
        if names is None:
            names = [cell.strip() for cell in cells]
            continue
        if number in rows:
            places = {str(i): i for i in range(len(cells))} | {name: i for i, name in enumerate(names)}
            at = list(_cells(raw, delimiter, quotes))
            quote = delimiter if quotes else ""
            if isinstance(column, list):
                chosen = [(name, *at[places[name]]) for name in column if name in rows[number]]
                yield number, [_flag(text, start + a, start + b, name) for name, a, b in chosen]
            else:
                place = places[str(column)]
                a, b = start + at[place][0], start + at[place][1]
                if _are_vectors(options):
                    yield number, _bits(text, a, b, rows[number])
                else:
                    yield number, [_cell(cells[place], a, b, options, quote)]
        number += 1


def _records(text: str, delimiter: str, quotes: bool) -> Iterator[tuple[int, str, list[str]]]:
    """Yield where each record starts, its text without its end, and its cells; a quoted cell may hold lines."""
    if not quotes:
        for start, line in _lines(text):
            yield start, line, line.split(delimiter)
        return
    taken: list[tuple[int, int]] = []

    def feed() -> Iterator[str]:
        for start, line in _lines(text):
            taken.append((start, start + len(line)))
            yield line + "\n"

    before = csv.field_size_limit(len(text) + 1)
    try:
        for cells in csv.reader(feed(), delimiter=delimiter, strict=True):
            yield taken[0][0], text[taken[0][0] : taken[-1][1]], cells
            taken.clear()
    finally:
        csv.field_size_limit(before)


def _cells(raw: str, delimiter: str, quotes: bool) -> Iterator[tuple[int, int]]:
    """Yield where each cell of a record starts and ends, with its quotes."""
    at = 0
    while True:
        end = at
        if quotes and raw[at : at + 1] == '"':
            end = at + 1
            while raw[end : end + 1] and (raw[end] != '"' or raw[end : end + 2] == '""'):
                end += 1 + (raw[end] == '"')
            end += 1
        while raw[end : end + 1] and raw[end] != delimiter:
            end += 1
        yield at, end
        if end >= len(raw):
            return
        at = end + 1


_FINDERS: dict[str, Callable[..., Iterator[tuple[int, list[Spot]]]]] = {
    "tsv": _table,
    "csv": _table,
    "jsonl": _jsonl,
    "json": _json,
    "fasttext": _fasttext,
    "svm": _svm,
}
