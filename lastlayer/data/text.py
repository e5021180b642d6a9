"""Text formats: TSV, CSV, JSON lines, JSON arrays, fastText lines, and one text per line."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

from lastlayer.data.builder import Row
from lastlayer.data.fields import IDS, LABELS, PARTS, TEXT, Fields
from lastlayer.data.labels import whole
from lastlayer.data.lines import Problems, encoding_of, head, lines, opening, pieces, shorten
from lastlayer.data.sniff import named_character, sniff_fields
from lastlayer.data.source import DataError, Limits, Source

SAMPLE, SAMPLE_BYTES = 200, 4 << 20  # what is looked at before the first row is made
DELIMITERS = (",", ";", "\t", "|")
_LABEL = re.compile(r"(?:^|(?<=\s))__label__(\S*)\s*")


class TextRows(NamedTuple):
    """The rows of a text file, the names of the labels if the file tells them beforehand, and how it is read."""

    rows: Iterator[Row]
    label_names: Sequence[str] | None
    options: dict[str, Any]
    how: str


class Record(NamedTuple):
    """What a row is made of: cells or a JSON object, the line it starts in, and its number among the file's rows."""

    line: int
    number: int
    value: Any
    raw: str


def text_rows(
    source: Source,
    kind: str,
    limits: Limits,
    problems: Problems,
    options: dict[str, Any],
    soft: frozenset[str] = frozenset(),
) -> TextRows:
    """Read a text file of the given format; `soft` names the options that are remembered from another file."""
    encoding = encoding_of(source, options.get("encoding"), limits)
    kept: dict[str, Any] = {"format": kind, "encoding": encoding}
    shift = 0
    if kind == "txt":
        rows = _line_rows(source, limits, problems, encoding)
        return TextRows(rows, None, kept, f"one text per line{_shown(encoding)}")
    if kind == "fasttext":
        return TextRows(_fasttext_rows(source, limits, problems, encoding), None, kept, f"__label__{_shown(encoding)}")
    if kind in ("json", "jsonl"):
        items = _json_items if kind == "json" else _json_lines
        records = items(source, limits, problems, encoding)
        first = _first(records)
        objects = [r.value for r in first]
        names = list(dict.fromkeys(str(key) for item in objects for key in item))
        fields = sniff_fields(source, names, objects, options, cells=False, header=False, soft=soft)
        start: Iterable[Record] = first
    else:
        dialect = sniff_dialect(source, kind, limits, options, encoding)
        records = _cell_records(source, limits, problems, dialect, encoding)
        if dialect.said:
            next(records, None)
        first = _first(records)
        if not first and soft:
            raise DataError(f"{source}: has no rows.")
        header, names = sniff_header(source, [r.value for r in first], options, soft)
        cells = [r.value for r in first[header:]]
        if not first:
            names = ["0"]
        fields = sniff_fields(source, names, cells, options, cells=True, header=header, soft=soft)
        start = first[header:]
        shift = header + dialect.said
        kept.update(delimiter=dialect.delimiter, quotes=dialect.quotes, header=header)
        records = _of_width(source, chain(start, records), len(names), problems)
        start = ()
    how = fields.describe()
    if kind in ("csv", "tsv"):
        how = f"{_dialect_shown(dialect)}{'' if fields.header else '; no header'}; {how}"
    rows = _rows(source, chain(start, records), fields, problems, shift)
    return TextRows(rows, fields.label_names, {**kept, **fields.options()}, how + _shown(encoding))


def _first(records: Iterator[Record]) -> list[Record]:
    """Take the first records, fewer if they are long."""
    out: list[Record] = []
    size = 0
    for record in islice(records, SAMPLE):
        out.append(record)
        size += sum(map(len, record.value)) if isinstance(record.value, list) else len(record.raw)
        if size > SAMPLE_BYTES:
            break
    return out


def _shown(encoding: str) -> str:
    return "" if encoding == "utf-8" else f"; encoding {encoding}"


def _rows(source: Source, records: Iterable[Record], fields: Fields, problems: Problems, shift: int) -> Iterator[Row]:
    note = partial(problems.mend, source)
    for record in fields.watched(source, records, lambda record: record.value):
        try:
            yield fields.row(record.value, record.line, record.number - shift, note)
        except (ValueError, RecursionError, OverflowError) as error:
            problems.report(source, record.line, str(error), record.raw)


def _line_rows(source: Source, limits: Limits, problems: Problems, encoding: str) -> Iterator[Row]:
    for line, text in lines(source, limits, problems, encoding):
        if text.strip():
            yield Row(line, text=text, number=line - 1)


def _fasttext_rows(source: Source, limits: Limits, problems: Problems, encoding: str) -> Iterator[Row]:
    for line, text in lines(source, limits, problems, encoding):
        if text.strip():
            labels = whole([name for name in _LABEL.findall(text) if name])
            yield Row(line, text=_LABEL.sub("", text).strip(), labels=labels, number=line - 1)


# JSON


def _json_lines(source: Source, limits: Limits, problems: Problems, encoding: str) -> Iterator[Record]:
    for number, line in lines(source, limits, problems, encoding):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            if not isinstance(item, dict):
                raise ValueError("must be a JSON object")
        except (ValueError, RecursionError, OverflowError) as error:
            known = isinstance(error, json.JSONDecodeError | RecursionError)
            problems.report(source, number, "must be JSON" if known else str(error), line)
            continue
        yield Record(number, number - 1, item, line)


def _json_items(source: Source, limits: Limits, problems: Problems, encoding: str) -> Iterator[Record]:
    """Yield the objects of a JSON array as they are read; no more than one object is held."""
    decoder, parts = json.JSONDecoder(), pieces(source, limits, encoding)
    buffer, at, line, number = "", 0, 1, 0
    ended = False

    def more(least: int) -> None:
        nonlocal buffer, at, ended
        got = [buffer[at:]]
        size = 0
        while size < least and not ended:
            piece = next(parts, None)
            ended = piece is None
            got.append(piece or "")
            size += len(got[-1])
        buffer, at = "".join(got), 0

    def skip(characters: str) -> str:
        """Go to the next character that is neither space nor among those given, and return it."""
        nonlocal at, line
        while True:
            while at < len(buffer) and (buffer[at].isspace() or buffer[at] in characters):
                line += buffer[at] == "\n"
                at += 1
            if at < len(buffer) or ended:
                return buffer[at : at + 1]
            more(1)

    if skip("") != "[":
        raise DataError(f"{source}, line {line}: must be a JSON array, got {shorten(buffer[at : at + 60])}.")
    at += 1
    while (begin := skip("" if number == 0 else ",")) != "]":
        if not begin:
            raise DataError(f"{source}, line {line}: the JSON array must end with ].")
        while True:
            try:
                item, end = decoder.raw_decode(buffer, at)
                break
            except (ValueError, RecursionError) as error:
                if ended or len(buffer) - at > limits.max_line or isinstance(error, RecursionError):
                    start = shorten(buffer[at : at + 200])
                    raise DataError(f"{source}, line {line}: must be a JSON array of objects, got {start}.") from None
                more(len(buffer) - at + 1)  # at least twice as much, so that long objects take linear time
        raw = buffer[at : min(end, at + 200)]
        if isinstance(item, dict):
            yield Record(line, number, item, raw)
        else:
            problems.report(source, line, "must be a JSON object", raw)
        line += buffer.count("\n", at, end)
        number, at = number + 1, end
    at += 1
    if skip(""):
        got = shorten(buffer[at : at + 60])
        raise DataError(f"{source}, line {line}: the JSON array must be the whole file, got {got} behind it.")


# Cells


class Dialect(NamedTuple):
    """How the cells of a line are told apart."""

    delimiter: str
    quotes: bool
    guessed: bool = False
    said: bool = False  # by a first line such as "sep=;", which spreadsheets write


def _dialect_shown(dialect: Dialect) -> str:
    name = {"\t": "tabs", ",": "commas", ";": "semicolons", " ": "spaces"}.get(dialect.delimiter, dialect.delimiter)
    return f"columns separated by {name}" + (" (guessed)" if dialect.guessed else "")


def sniff_dialect(
    source: Source, kind: str, limits: Limits, options: dict[str, Any], encoding: str | None = None
) -> Dialect:
    """Choose the separator of columns, and whether cells may be quoted."""
    asked, quotes = options.get("delimiter"), options.get("quotes")
    if asked is not None:
        asked = named_character(str(asked))
        if len(asked) != 1 or asked in '"\r\n':
            raise DataError(f"{source}: `delimiter` must be one character, or tab, got {asked!r}.")
    sample = head(source, limits, encoding)
    if sample and len(sample[0]) == 5 and sample[0].lower().startswith("sep="):
        return Dialect(asked or sample[0][4], True if quotes is None else bool(quotes), said=True)
    if kind == "tsv" or asked == "\t":
        delimiter = asked or "\t"
        return Dialect(delimiter, _is_quoted(sample, delimiter) if quotes is None else bool(quotes))
    if asked is not None:
        return Dialect(asked, True if quotes is None else bool(quotes))
    sample = sample or [opening(source, limits, encoding)]  # a first line that goes on beyond what is looked at
    delimiter, guessed = _delimiter(source, sample, options)
    return Dialect(delimiter, True if quotes is None else bool(quotes), guessed)


def _delimiter(source: Source, sample: list[str], options: dict[str, Any]) -> tuple[str, bool]:
    """Return the separator of columns of a CSV file, and whether it is other than the comma of its name."""
    parsed = {d: _parsed(sample, d) for d in DELIMITERS}
    wanted = {*TEXT, *LABELS}
    for key in ("text_column", "label_column"):
        asked = options.get(key) or ()
        wanted |= {str(name).strip().lower() for name in ([asked] if isinstance(asked, str) else asked)}
    for delimiter, rows in parsed.items():
        names = [c.strip().lower() for c in rows[0]] if rows else []
        if len(names) > 1 and wanted & set(names):
            return delimiter, delimiter != ","
    fits = [d for d, rows in parsed.items() if rows and len({len(r) for r in rows}) == 1 and len(rows[0]) > 1]
    if len(fits) > 1:
        shown = " or ".join(repr(d) for d in fits)
        raise DataError(
            f"{source}: its columns may be separated by {shown}, as in {shorten(sample[0])}. Say which: --delimiter "
            "CHARACTER (or tab)."
        )
    return (fits[0], fits[0] != ",") if fits else (",", False)


def _parsed(sample: list[str], delimiter: str) -> list[list[str]]:
    """Parse the first lines; an error in them leaves out the rest, which may be cut in the middle of a cell."""
    parsed: list[list[str]] = []
    try:
        for row in csv.reader((line + "\n" for line in sample), delimiter=delimiter, strict=True):
            if row and any(c.strip() for c in row):
                parsed.append(row)
    except csv.Error:
        return parsed if len(parsed) > 1 else []
    return parsed


def _is_quoted(sample: list[str], delimiter: str) -> bool:
    """Whether cells of a TSV file are quoted as in CSV: some need it, and those that look quoted are well-formed."""
    if not any(cell.startswith('"') for line in sample for cell in line.split(delimiter)):
        return False
    rows = _parsed(sample, delimiter)
    plain = {len(line.split(delimiter)) for line in sample if line.strip()}
    needed = any('"' in c or "\n" in c or delimiter in c for row in rows for c in row) or len(plain) > 1
    return bool(rows) and needed and len({len(r) for r in rows}) == 1 and _ends_well(sample, delimiter)


def _ends_well(sample: list[str], delimiter: str) -> bool:
    try:
        list(csv.reader((line + "\n" for line in sample), delimiter=delimiter, strict=True))
    except csv.Error as error:
        return "unexpected end" in str(error)
    return True


def sniff_header(
    source: Source, sample: list[list[str]], options: dict[str, Any], soft: frozenset[str] = frozenset()
) -> tuple[bool, list[str]]:
    """Tell whether the first row names the columns; return the names, or the columns' numbers."""
    if not sample:
        return False, []
    first = [c.strip() for c in sample[0]]
    lower = [c.lower() for c in first]
    width = max(len(row) for row in sample)
    header = options.get("header")
    if header is None:
        asked = [options.get(f"{role}_column") or () for role in ("text", "label", "id", "vector", "weight", "group")]
        wanted = [str(n).strip().lower() for a in asked for n in (str(a).split(",") if isinstance(a, str) else a)]
        header = any(n in lower and not n.isdigit() for n in wanted if n)
    known = any(n in TEXT for n in lower) or sum(n in LABELS + IDS + PARTS for n in lower) >= 2
    known = known or any(n in LABELS and _occurs_once(sample, i) for i, n in enumerate(lower))
    if known and header is False and "header" in soft:
        raise DataError(
            f"{source}: its first line may be a header, {shorten(', '.join(first))}; the run's training rows had none. "
            "Say which: --header yes or no."
        )
    if not header and options.get("header") is None:
        header = known or _is_above_numbers(sample)
        if not header and _may_be_header(sample):
            raise DataError(
                f"{source}: its first line may be a header or a row, {shorten(', '.join(first))}. Say which: --header "
                "yes or no."
            )
    return bool(header), first if header else [str(i) for i in range(width)]


def _occurs_once(sample: list[list[str]], place: int) -> bool:
    """Whether the first cell of a column is in no other cell of it."""
    return not any(sample[0][place].strip() in row[place] for row in sample[1:] if len(row) > place)


def _is_above_numbers(sample: list[list[str]]) -> bool:
    """Whether a column has numbers in all rows but the first, which has a word there."""
    for i, name in enumerate(sample[0]):
        cells = [row[i] for row in sample[1:] if len(row) > i]
        if cells and re.search(r"[^\W\d_]", name) and all(re.fullmatch(r"\s*-?\d+(\.\d*)?\s*", c) for c in cells):
            return True
    return False


def _may_be_header(sample: list[list[str]]) -> bool:
    """Whether the first row is of short names that never come again, above columns of texts and recurring labels."""
    first, body = sample[0], [row for row in sample[1:] if len(row) == len(sample[0])]
    if len(first) < 2 or len(body) < 3 or len(set(first)) != len(first):
        return False
    if not all(re.fullmatch(r"\s*[^\W\d]\w*([ _-]\w+)?\s*", name) for name in first):
        return False
    columns = [[row[i] for row in body] for i in range(len(first))]
    words = [sum(len(c.split()) for c in column) / len(column) for column in columns]
    seen = [re.search(rf"\b{re.escape(name.strip())}\b", " ".join(c)) for name, c in zip(first, columns, strict=True)]
    return max(words) >= 4 and not any(seen)


def _cell_records(
    source: Source, limits: Limits, problems: Problems, dialect: Dialect, encoding: str
) -> Iterator[Record]:
    if not dialect.quotes:
        for line, text in lines(source, limits, problems, encoding):
            if text.strip():
                yield Record(line, line - 1, text.split(dialect.delimiter), text)
        return
    at, number = 0, -1

    def feed() -> Iterator[str]:
        nonlocal at, number
        for line, text in lines(source, limits, problems, encoding):
            number += line - at - 1  # lines that could not be decoded were rows too
            at = line
            yield text + "\n"

    reader = csv.reader(feed(), delimiter=dialect.delimiter, strict=True)
    while True:
        begin = at + 1
        before = csv.field_size_limit(limits.max_line)
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            number += 1
            problems.report(source, begin, f"must be CSV ({error})")
            continue
        finally:
            csv.field_size_limit(before)
        number += 1
        if cells and any(c.strip() for c in cells):
            yield Record(begin, number, cells, dialect.delimiter.join(cells[:20]))


def _of_width(source: Source, records: Iterable[Record], width: int, problems: Problems) -> Iterator[Record]:
    for record in records:
        cells = record.value
        if len(cells) == width:
            yield record
        elif len(cells) > width and not any(c.strip() for c in cells[width:]):
            yield record._replace(value=cells[:width])  # separators at the end of the line
        else:
            problems.report(source, record.line, f"must have {width} columns, has {len(cells)}", record.raw)
