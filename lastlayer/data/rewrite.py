"""Write a file again with other labels, in its own format; rows that do not change keep their characters."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lastlayer.data.labeldata import LabelData
from lastlayer.data.labels import split_labels
from lastlayer.data.lines import pieces
from lastlayer.data.read import read_parts
from lastlayer.data.source import DataError, Limits, Source

WRITABLE = ("tsv", "csv", "jsonl", "json", "fasttext", "svm")
_SUFFIX = {"fasttext": ".txt"}


class Change(NamedTuple):
    """Labels to add to a row and to take from it, by name."""

    add: frozenset[str] = frozenset()
    drop: frozenset[str] = frozenset()

    def of(self, labels: list[str]) -> list[str]:
        """Return the labels of a row after the change: those that stay in their order, then the new ones sorted."""
        kept = [name for name in labels if name not in self.drop]
        return kept + sorted(self.add - set(kept))


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
    kind, options = str(data.source.get("format")), dict(data.source.get("options") or {})
    if kind not in WRITABLE:
        raise DataError(f"{path}: a file of format {kind} cannot be written again, only {', '.join(WRITABLE)}.")
    source = Source(path)
    if source.is_stream:
        raise DataError(f"{source}: cannot be read a second time. Save it to a file.")
    encoding = str(options.get("encoding") or "utf-8")
    text = "".join(pieces(source, Limits(), encoding))
    made = "".join(_WRITERS[kind](text, options, changes))
    target = out.with_name(f"{out.name}{_SUFFIX.get(kind, f'.{kind}')}")
    _check(path, target.suffix, made.encode(encoding), data, changes)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(made.encode(encoding))
    return target


def _check(path: Any, suffix: str, raw: bytes, data: LabelData, changes: Mapping[int, Change]) -> None:
    """Compare the rows of the copy with what they should be."""
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


def _split(text: str) -> list[str]:
    """Return the lines with their ends, which are LF, or CR where there is no LF."""
    end = "\n" if "\n" in text or "\r" not in text else "\r"
    return [line for line in re.split(f"(?<={end})", text) if line]


def _ending(line: str) -> tuple[str, str]:
    body = line.rstrip("\r\n")
    return body, line[len(body) :]


def _lines(change: Callable[[str, Change], str]) -> Callable[..., Iterator[str]]:
    """Return a writer of a format with one row per line."""

    def write(text: str, options: dict[str, Any], changes: Mapping[int, Change]) -> Iterator[str]:
        for number, line in enumerate(_split(text)):
            body, end = _ending(line)
            yield change(body, changes[number]) + end if number in changes and body.strip() else line

    return write


def _fasttext(body: str, change: Change) -> str:
    pattern = re.compile(r"(?:^|(?<=\s))__label__(\S*)\s*")
    labels = change.of([name for name in pattern.findall(body) if name])
    return " ".join([*(f"__label__{name}" for name in labels), pattern.sub("", body).strip()])


def _svm(text: str, options: dict[str, Any], changes: Mapping[int, Change]) -> Iterator[str]:
    lines = _split(text)
    first = lines[0].split() if lines else []
    has_header = len(first) == 3 and all(token.isascii() and token.isdigit() for token in first)
    for i, line in enumerate(lines):
        number = i - has_header
        if number not in changes or number < 0:
            yield line
            continue
        body, end = _ending(line)
        given, space, rest = body.partition(" ")
        if ":" in given or not given:
            given, space, rest = "", " ", body.lstrip()
        yield ",".join(changes[number].of([name for name in given.split(",") if name])) + (space or " ") + rest + end


def _record(item: dict[str, Any], options: dict[str, Any], change: Change) -> dict[str, Any]:
    """Return a JSON object with its labels changed, in the form in which they are."""
    column = options.get("label_column", "labels")
    if isinstance(column, list):
        return {**item, **_flags({name: item.get(name) for name in column}, change)}
    held = item.get(column)
    if isinstance(held, str):
        return {**item, column: _cell(held, options, change)}
    if isinstance(held, list) and held and all(isinstance(v, int | float) and v in (0, 1) for v in held):
        numbers = [str(i) for i, v in enumerate(held) if v]
        if {str(i) for i in range(len(held))} >= {*change.add, *change.drop}:
            wanted = set(change.of(numbers))
            return {**item, column: [type(v)(str(i) in wanted) for i, v in enumerate(held)]}
    names = change.of([str(v) for v in held or []])
    numeric = bool(held) and all(isinstance(v, int) for v in held or [])
    return {**item, column: [int(n) for n in names] if numeric and all(n.isdigit() for n in names) else names}


def _flags(cells: dict[str, Any], change: Change) -> dict[str, Any]:
    """Return columns of 0 and 1 with some set, written as the others of the row are."""
    out = {}
    for name, value in cells.items():
        wanted = True if name in change.add else False if name in change.drop else None
        if wanted is None:
            out[name] = value
        elif isinstance(value, str):
            words = ("False", "True") if value.strip().lower() in ("true", "false") else ("0", "1")
            words = ("0.0", "1.0") if "." in value else words
            out[name] = words[wanted]
        else:
            out[name] = type(value)(wanted) if value is not None else int(wanted)
    return out


def _cell(cell: str, options: dict[str, Any], change: Change) -> str:
    """Return a cell of label names with some changed: a JSON list stays one, other lists become JSON."""
    separator = str(options.get("label_separator", ","))
    separator = {"space": " ", "none": "", "tab": "\t"}.get(separator, separator)
    names = change.of(split_labels(cell, separator) or [])
    if cell.strip()[:1] in ("[", "(", "{"):
        return json.dumps(names, ensure_ascii=False)
    wide = separator + " " if separator and f"{separator} " in cell and separator != " " else separator
    return (wide or ", ").join(names)


def _jsonl(text: str, options: dict[str, Any], changes: Mapping[int, Change]) -> Iterator[str]:
    def change(body: str, wanted: Change) -> str:
        return json.dumps(_record(json.loads(body), options, wanted), ensure_ascii=False)

    yield from _lines(change)(text, options, changes)


def _json(text: str, options: dict[str, Any], changes: Mapping[int, Change]) -> Iterator[str]:
    items = [_record(item, options, changes[i]) if i in changes else item for i, item in enumerate(json.loads(text))]
    yield json.dumps(items, ensure_ascii=False, indent=1) + "\n"


def _table(text: str, options: dict[str, Any], changes: Mapping[int, Change]) -> Iterator[str]:
    """Write CSV or TSV. Columns are named by the header, or numbered."""
    delimiter, quotes = str(options.get("delimiter") or ","), bool(options.get("quotes"))
    column = options.get("label_column", "labels")
    names: list[str] | None = None if options.get("header") else []
    number = 0
    for raw, cells in _records(text, delimiter, quotes):
        if number == 0 and raw.lower().startswith("sep=") and len(raw.strip()) == 5:
            yield raw
            continue
        if names is None:
            names = [cell.strip() for cell in cells]
            yield raw
            continue
        if number in changes:
            places = {name: i for i, name in enumerate(names)} if names else {str(i): i for i in range(len(cells))}
            cells = list(cells)
            if isinstance(column, list):
                for name, value in _flags({c: cells[places[c]] for c in column}, changes[number]).items():
                    cells[places[name]] = value
            else:
                cells[places[str(column)]] = _cell(cells[places[str(column)]], options, changes[number])
            raw = _joined(cells, delimiter, quotes) + _ending(raw)[1]
        yield raw
        number += 1


def _records(text: str, delimiter: str, quotes: bool) -> Iterator[tuple[str, list[str]]]:
    """Yield each record as it is written and as cells; a quoted cell may hold several lines."""
    if not quotes:
        for line in _split(text):
            yield line, _ending(line)[0].split(delimiter)
        return
    taken: list[str] = []

    def feed() -> Iterator[str]:
        for line in _split(text):
            taken.append(line)
            body, _ = _ending(line)
            yield body + "\n"

    before = csv.field_size_limit(len(text) + 1)
    try:
        for cells in csv.reader(feed(), delimiter=delimiter, strict=True):
            yield "".join(taken), cells
            taken.clear()
    finally:
        csv.field_size_limit(before)


def _joined(cells: list[str], delimiter: str, quotes: bool) -> str:
    if not quotes:
        return delimiter.join(cells)
    out = io.StringIO()
    csv.writer(out, delimiter=delimiter, lineterminator="").writerow(cells)
    return out.getvalue()


_WRITERS: dict[str, Callable[..., Iterator[str]]] = {
    "tsv": _table,
    "csv": _table,
    "jsonl": _jsonl,
    "json": _json,
    "fasttext": _lines(_fasttext),
    "svm": _svm,
}
