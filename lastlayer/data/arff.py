"""ARFF with the labels named in an XML file (Mulan) or in the relation's name (Meka)."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard
from xml.parsers import expat

from lastlayer.data.builder import Row, Table
from lastlayer.data.labeldata import LabelData
from lastlayer.data.lines import Problems, lines
from lastlayer.data.source import DataError, Limits, read_bytes

_TOKEN = re.compile(r"""\s*(?:'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)"|([^\s,{}'"]+))""")


@dataclass(frozen=True)
class Attribute:
    """A column: its name, its values if it is nominal, and the value that sparse rows leave out."""

    name: str
    values: dict[str, float] | None
    default: float = 0.0


def read_arff(
    path: Path,
    limits: Limits,
    problems: Problems,
    *,
    options: dict[str, Any],
    like: Mapping[str, Any] | None = None,
) -> LabelData:
    """Read the file; labels are the attributes that the XML file names, else Meka's ``-C n``.

    With `like`, the ``source`` of rows that were read before, features are those of these rows, found by their names;
    so are labels if nothing else tells them.
    """
    attributes: list[Attribute] = []
    relation = ""
    numbered = lines(path, limits, problems)
    for number, line in numbered:
        word = line.strip().split(None, 1)
        if not word or word[0].startswith("%"):
            continue
        kind = word[0].lower()
        if kind == "@relation":
            relation = word[1] if len(word) > 1 else ""
        elif kind == "@attribute":
            attributes.append(_attribute(path, number, word[1] if len(word) > 1 else ""))
            if len(attributes) > limits.max_columns:
                raise DataError(f"{path}, line {number}: must have at most {limits.max_columns} attributes.")
        elif kind == "@data":
            break
        else:
            raise DataError(
                f"{path}, line {number}: must be @relation, @attribute or @data, got {line.strip()[:80]!r}."
            )
    else:
        raise DataError(f"{path}: has no @data line.")
    known = (like or {}).get("attributes")
    labels = _label_columns(path, attributes, relation, limits, options, (like or {}).get("labels"))
    names = [attributes[i].name for i in labels]
    at = {column: i for i, column in enumerate(labels)}
    features = {c: i for i, c in enumerate(c for c in range(len(attributes)) if c not in at)}
    if known:
        attributes, features = _as_before(path, attributes, at, known)
    table = Table(names, len(known or features))
    for row in _rows(path, numbered, attributes, at, features, problems):
        table.add(row)
    source: dict[str, Any] = {
        "format": "arff",
        "how": f"{len(labels)} label attributes",
        "suffix": ".arff",
        "labels": names,
    }
    source["attributes"] = known or _described([attributes[c] for c in features])
    return table.build(path, problems, source)


def _described(attributes: list[Attribute]) -> list[dict[str, Any]]:
    """Return the names of features, and the values of those that are nominal; none if names repeat."""
    if len({a.name for a in attributes}) != len(attributes):
        return []
    return [{"name": a.name} if a.values is None else {"name": a.name, "values": a.values} for a in attributes]


def _as_before(
    path: Path, attributes: list[Attribute], labels: Mapping[int, int], known: list[dict[str, Any]]
) -> tuple[list[Attribute], dict[int, int]]:
    """Find the features of earlier rows by name; return the attributes with their values, and the features' places."""
    names = Counter(a.name for i, a in enumerate(attributes) if i not in labels)
    wanted = {one["name"]: i for i, one in enumerate(known)}
    for name in wanted:
        if names[name] != 1:
            has = "no attribute" if not names[name] else f"{names[name]} attributes"
            raise DataError(f"{path}: has {has} {name[:60]!r}, which is a feature of the run's training rows.")
    features, out = {}, list(attributes)
    for i, attribute in enumerate(attributes):
        if i in labels or attribute.name not in wanted:
            continue
        features[i] = wanted[attribute.name]
        values, here = known[features[i]].get("values"), attribute.values
        if _is_nominal(values) != _is_nominal(here):
            kind = "nominal" if _is_nominal(values) else "numeric"
            raise DataError(f"{path}: the attribute {attribute.name[:60]!r} must be {kind}, as in the training rows.")
        if _is_nominal(values) and _is_nominal(here):
            out[i] = Attribute(attribute.name, values, values.get(next(iter(here)), 0.0))
    return out, features


def _is_nominal(values: dict[str, float] | None) -> TypeGuard[dict[str, float]]:
    """Whether values are no numbers."""
    return values is not None and not set(values) <= {"0", "1"}


def _attribute(path: Any, number: int, text: str) -> Attribute:
    match = _TOKEN.match(text)
    if not match:
        raise DataError(f"{path}, line {number}: @attribute must have a name and a type, got {text[:80]!r}.")
    name, kind = _unquoted(match), text[match.end() :].strip()
    if kind.startswith("{") and kind.endswith("}"):
        try:
            values = _cells(kind[1:-1])
        except ValueError as error:
            raise DataError(f"{path}, line {number}: {error}, got {text[:80]!r}.") from None
        # Nominal 0/1 columns are numbers; others become the index of their value.
        binary = set(values) <= {"0", "1"}
        return Attribute(name, {v: float(v) if binary else float(i) for i, v in enumerate(values)})
    if kind.lower() in ("numeric", "real", "integer"):
        return Attribute(name, None)
    raise DataError(f"{path}, line {number}: attribute {name[:40]!r} must be numeric or nominal, got {kind[:40]!r}.")


def _unquoted(match: re.Match[str]) -> str:
    quoted = match.group(1) if match.group(1) is not None else match.group(2)
    return match.group(3) if quoted is None else re.sub(r"\\(.)", r"\1", quoted)


def _label_columns(
    path: Path,
    attributes: list[Attribute],
    relation: str,
    limits: Limits,
    options: dict[str, Any],
    known: list[str] | None,
) -> list[int]:
    xml = options.get("xml")
    xml = Path(xml) if xml else _companion(path)
    if xml is not None:
        names, place = label_names(xml, limits), {a.name: i for i, a in enumerate(attributes)}
        missing = [name for name in names if name not in place]
        if missing:
            raise DataError(f"{xml}: names the label {missing[0][:60]!r}, which is no attribute of {path}.")
        return [place[name] for name in names]
    count = re.search(r"-[Cc]\s+(-?\d{1,9})", relation)
    if count is None and known is not None:
        before = set(known)
        return [i for i, attribute in enumerate(attributes) if attribute.name in before]
    if count is None:
        raise DataError(f"{path}: no XML file with the label names beside it, and no -C in @relation. Use --xml FILE.")
    n = int(count.group(1))
    if abs(n) > len(attributes):
        raise DataError(f"{path}: -C {n} in @relation must be at most the {len(attributes)} attributes.")
    return list(range(n)) if n >= 0 else list(range(len(attributes) + n, len(attributes)))


def _companion(path: Path) -> Path | None:
    stem = path.name.lower()
    for end in (".gz", ".xz", ".bz2", ".arff"):
        stem = stem.removesuffix(end)
    for name in (stem, stem.removesuffix("-train"), stem.removesuffix("-test")):
        for candidate in path.parent.glob("*.xml"):
            if candidate.name.lower() == name + ".xml":
                return candidate
    return None


def label_names(path: Path, limits: Limits) -> list[str]:
    """Read the label names of a Mulan XML file; entities are refused, so that none can expand."""
    raw = read_bytes(path, limits, limits.max_line)
    names: list[str | None] = []
    parser = expat.ParserCreate(namespace_separator=" ")

    def refuse(*_: Any) -> None:
        raise DataError(f"{path}: must be XML without a document type.")

    def start(tag: str, attributes: dict[str, str]) -> None:
        if tag.rpartition(" ")[2] == "label":
            names.append(attributes.get("name"))

    parser.StartDoctypeDeclHandler = parser.EntityDeclHandler = refuse  # in every encoding that expat reads
    parser.StartElementHandler = start
    try:
        parser.Parse(raw, True)
    except (expat.ExpatError, ValueError, LookupError) as error:
        raise error if isinstance(error, DataError) else DataError(f"{path}: must be XML: {error}.") from None
    if not names or any(name is None for name in names) or len(set(names)) != len(names):
        raise DataError(f"{path}: must hold distinct <label name=...> entries.")
    return [str(name) for name in names]


def _rows(
    path: Any,
    numbered: Iterator[tuple[int, str]],
    attributes: list[Attribute],
    labels: dict[int, int],
    features: dict[int, int],
    problems: Problems,
) -> Iterator[Row]:
    at, left_out = 0, {i: a.default for i, a in enumerate(attributes) if a.default}
    for number, line in numbered:
        line = line.strip()
        if line.startswith("%"):
            continue
        at += 1
        if not line:
            continue
        try:
            pairs = _sparse(line, attributes, left_out) if line.startswith("{") else _full(line, attributes)
            yield _row(number, pairs, labels, features)._replace(number=at - 1)
        except ValueError as error:
            problems.report(path, number, str(error), line)


def _full(line: str, attributes: list[Attribute]) -> list[tuple[int, float]]:
    cells = _cells(line)
    if len(cells) != len(attributes):
        raise ValueError(f"must have {len(attributes)} values, has {len(cells)}")
    return [(i, _value(cell.strip(), attributes[i])) for i, cell in enumerate(cells)]


def _cells(text: str) -> list[str]:
    """Split at commas outside of quotes; each step goes forward, so that no line takes more than linear time."""
    if "'" not in text and '"' not in text:
        return [cell.strip() for cell in text.split(",")]
    cells, at = [], 0
    while True:
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError("quotes must close, and values must not be empty")
        cells.append(_unquoted(match))
        comma = re.compile(r"\s*(,|$)").match(text, match.end())
        if comma is None:
            raise ValueError("values must be separated by commas")
        if not comma.group(1):
            return cells
        at = comma.end()


def _sparse(line: str, attributes: list[Attribute], left_out: Mapping[int, float]) -> list[tuple[int, float]]:
    if not line.endswith("}"):
        raise ValueError("a sparse row must end with }")
    pairs: list[tuple[int, float]] = []
    for entry in line[1:-1].split(","):
        if not entry.strip():
            continue
        words = entry.split(None, 1)
        if len(words) != 2 or not (words[0].isascii() and words[0].isdigit()) or len(words[0]) > 9:
            raise ValueError(f"a sparse row must hold index and value pairs, not {entry[:40]!r}")
        if int(words[0]) >= len(attributes):
            raise ValueError(f"attribute indices must be below {len(attributes)}")
        column = int(words[0])
        pairs.append((column, _value(words[1].strip().strip("'\""), attributes[column])))
    given = {c for c, _ in pairs}
    if len(given) != len(pairs):
        raise ValueError("attribute indices must not repeat")
    return pairs + [(column, value) for column, value in left_out.items() if column not in given]


def _value(cell: str, attribute: Attribute) -> float:
    if attribute.values is not None:
        if cell not in attribute.values:
            raise ValueError(f"{attribute.name[:40]!r} must be one of its nominal values, not {cell[:40]!r}")
        return attribute.values[cell]
    try:
        number = float(cell)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or abs(number) > 3.4e38:
        raise ValueError(f"{attribute.name[:40]!r} must be a finite number, not {cell[:40]!r}")
    return number


def _row(number: int, pairs: list[tuple[int, float]], labels: dict[int, int], features: dict[int, int]) -> Row:
    marked, index, value = [], [], []
    for column, v in pairs:
        if column in labels:
            if v not in (0.0, 1.0):
                raise ValueError(f"labels must be 0 or 1, not {v}")
            if v:
                marked.append(labels[column])
        elif v != 0.0 and column in features:
            index.append(features[column])
            value.append(v)
    return Row(number, columns=index, value=value, labels=marked)
