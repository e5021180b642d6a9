"""LibSVM text and its extreme-classification form: ``label,label index:value index:value``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

from lastlayer.data.builder import Row, declared, number_names
from lastlayer.data.lines import Problems, encoding_of, lines
from lastlayer.data.source import DataError, Limits, Source

Header = tuple[int, int, int]  # rows, features, labels


class SvmRows(NamedTuple):
    """The rows of a file, each checked, and what its header and the options say.

    A `zero_based` of None is not known yet: without a header features count from 1, unless a 0 occurs.
    """

    rows: Iterator[Row]
    header: Header | None
    label_names: Sequence[str] | None
    n_features: int | None
    zero_based: bool | None
    shift: int
    options: dict[str, Any]
    how: str = ""


def svm_rows(source: Source, limits: Limits, problems: Problems, options: dict[str, Any]) -> SvmRows:
    """Read the file; a line of three whole numbers at its head is the header "rows features labels".

    With a header, features and labels count from 0. Without one, labels are names, and features count from 1 unless a
    0 occurs; ``zero_based`` says it explicitly. Lines that start with "#" and a space are comments, as scikit-learn
    writes them at the head of a file.
    """
    encoding = encoding_of(source, options.get("encoding"), limits)
    every = lines(source, limits, problems, encoding)
    numbered = (one for one in every if one[1].split(maxsplit=1)[:1] != ["#"])
    first = list(islice(numbered, 1))
    header = None if not first else _header(source, first[0][1], limits)
    zero_based = options.get("zero_based")
    if zero_based is None and header is not None:
        zero_based = True
    given = options.get("n_features")
    n_features = given if header is None or given is not None else header[1]
    rows = _rows(source, chain([] if header else first, numbered), header, n_features, zero_based, limits, problems)
    names = None if header is None else number_names(header[2])
    kept = {"format": "svm", "zero_based": zero_based, "encoding": encoding}
    return SvmRows(rows, header, names, n_features, zero_based, 0 if zero_based else 1, kept)


def _header(source: Source, line: str, limits: Limits) -> Header | None:
    tokens = line.split()
    if len(tokens) != 3 or not all(t.isascii() and t.isdigit() for t in tokens):
        return None
    sizes = [int(t) if len(t) < 19 else -1 for t in tokens]
    declared(source, 1, line, sizes, limits.max_columns)
    if sizes[2] > limits.labels(source):
        raise DataError(
            f"{source}, line 1: the header must declare at most {limits.labels(source)} labels for a file of "
            f"{source.size} bytes, got {sizes[2]}."
        )
    return sizes[0], sizes[1], sizes[2]


def _rows(
    source: Source,
    numbered: Any,
    header: Header | None,
    n_features: int | None,
    zero_based: bool | None,
    limits: Limits,
    problems: Problems,
) -> Iterator[Row]:
    low = 0 if zero_based or zero_based is None else 1
    most = None if n_features is None else n_features - (zero_based is True)
    for line, text in numbered:
        text = text.split(" #", 1)[0]
        if not text.strip() and header is None:
            continue
        try:
            row = parse(line, text, header, limits.max_columns)
            columns = row.columns or ()
            if any(i < low for i in columns):
                raise ValueError("feature indices must start at 1 with zero_based=False")
            if most is not None and any(i > most for i in columns):
                raise ValueError(f"feature indices must be below {most + 1}")
        except ValueError as error:
            problems.report(source, line, str(error), text)
        else:
            yield row._replace(number=line - 1 - (header is not None))


def parse(number: int, line: str, header: Header | None, most: int) -> Row:
    """Read one line."""
    tokens = line.split()
    labels: list[Any] = []
    if tokens and ":" not in tokens[0]:
        labels = [name for name in tokens.pop(0).split(",") if name]
    if header is not None:
        if not all(name.isascii() and name.isdigit() and len(name) < 19 and int(name) < header[2] for name in labels):
            raise ValueError(f"labels must be whole numbers from 0 to {header[2] - 1}")
        labels = [int(name) for name in labels]
    index, value = [], []
    for token in tokens:
        left, colon, right = token.partition(":")
        if not colon or not (left.isascii() and left.isdigit()) or len(left) > 18 or int(left) > most:
            raise ValueError(f"features must be index:value with an index up to {most}, not {token[:40]!r}")
        try:
            number_ = float(right)
        except ValueError:
            number_ = math.nan
        if not math.isfinite(number_) or abs(number_) > 3.4e38:
            raise ValueError(f"feature values must be finite numbers, not {token[:40]!r}")
        index.append(int(left))
        value.append(number_)
    if len(set(index)) != len(index):
        raise ValueError("feature indices must not repeat")
    return Row(number, columns=index, value=value, labels=labels)
