"""LibSVM text and its extreme-classification form: ``label,label index:value index:value``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from lastlayer.data.builder import Row, Table, declared, number_names
from lastlayer.data.labeldata import LabelData
from lastlayer.data.lines import DataError, Limits, Problems, lines


def read_svm(path: Path, limits: Limits, problems: Problems, *, options: dict[str, Any]) -> LabelData:
    """Read the file; a line of three whole numbers at its head is the header "rows features labels".

    With a header, features and labels count from 0. Without, labels are names, and features count from 1 unless a 0
    occurs; ``zero_based`` says it explicitly.
    """
    header, found = rows(path, limits, problems)
    n_labels = None if header is None else header[2]
    table = Table(None if n_labels is None else number_names(n_labels), options.get("n_features"))
    if header is not None:
        table.n_features = header[1]
    for row in found:
        table.add(row)
    if header is not None and problems.count == 0 and len(table) != header[0]:
        raise DataError(f"{path}, line 1: the header must count the rows, says {header[0]}, the file has {len(table)}.")
    zero_based = options.get("zero_based")
    if zero_based is None:
        zero_based = header is not None or 0 in table.index
    if not zero_based and 0 in table.index:
        raise DataError(f"{path}: feature indices must start at 1 with zero_based=False, got 0.")
    top = max(table.index, default=-1) - (not zero_based)
    if table.n_features is not None and top >= table.n_features:
        raise DataError(f"{path}: feature indices must be below {table.n_features}, got {top}.")
    source = {"format": "svm", "zero_based": bool(zero_based), "header": header is not None}
    return table.build(path, problems, source, shift=0 if zero_based else 1)


def rows(path: Path, limits: Limits, problems: Problems) -> tuple[tuple[int, int, int] | None, Iterator[Row]]:
    """Return the header, if there is one, and the rows."""
    numbered = lines(path, limits, problems)
    first = list(islice(numbered, 1))
    header = None
    if first:
        tokens = first[0][1].split()
        if len(tokens) == 3 and all(t.isascii() and t.isdigit() for t in tokens):
            if any(len(t) > 18 for t in tokens):
                declared(path, 1, first[0][1], [-1], limits.max_columns)
            header = (int(tokens[0]), int(tokens[1]), int(tokens[2]))
            declared(path, 1, first[0][1], header, limits.max_columns)
            first = []
    return header, _rows(path, chain(first, numbered), header, limits, problems)


def _rows(
    path: Any, numbered: Any, header: tuple[int, int, int] | None, limits: Limits, problems: Problems
) -> Iterator[Row]:
    for number, line in numbered:
        line = line.split(" #", 1)[0]
        if not line.strip() and header is None and not line:
            continue
        try:
            yield parse(number, line, header, limits.max_columns)
        except ValueError as error:
            problems.report(path, number, str(error), line)


def parse(number: int, line: str, header: tuple[int, int, int] | None, most: int) -> Row:
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
    if header is not None and any(i >= header[1] for i in index):
        raise ValueError(f"feature indices must be below {header[1]}")
    if len(set(index)) != len(index):
        raise ValueError("feature indices must not repeat")
    return Row(number, columns=index, value=value, labels=labels)
