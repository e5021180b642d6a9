"""What the commands share about reading: the flags, the rows of each part, and one line on how they were read."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

OPTIONS = (
    "format",
    "text_column",
    "label_column",
    "id_column",
    "vector_column",
    "label_separator",
    "zero_based",
    "xml",
)


def add_flags(made: argparse.ArgumentParser, formats: bool = False) -> None:
    """Add the flags of reading to a command; with `formats`, ``--format`` is the form of its output."""
    from lastlayer.data.read import FORMATS

    group = made.add_argument_group("reading")
    names = ["--format", "--input-format"]
    if formats:
        made.add_argument("--format", dest="output_format", choices=("jsonl", "csv"), default="jsonl")
        names = ["--input-format"]
    group.add_argument(*names, dest="reader_format", choices=FORMATS, help="else by name and first line")
    for name in ("text", "label", "id", "vector"):
        group.add_argument(f"--{name}-column", dest=f"reader_{name}_column", help="name, or number from 0")
    group.add_argument("--label-separator", dest="reader_label_separator")
    group.add_argument("--zero-based", dest="reader_zero_based", choices=("yes", "no"), help="LibSVM feature numbers")
    group.add_argument("--xml", dest="reader_xml", help="label names of an ARFF file")
    group.add_argument("--on-error", choices=("raise", "skip"), default="raise", help="at a wrong line")


def asked(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of reading that were given as flags."""
    found = {name: getattr(arguments, f"reader_{name}") for name in OPTIONS}
    if found["zero_based"] is not None:
        found["zero_based"] = found["zero_based"] == "yes"
    return {**{k: v for k, v in found.items() if v is not None}, "on_error": arguments.on_error}


def training_parts(arguments: argparse.Namespace) -> dict[str, Any]:
    """Read the rows of ``train`` and ``tune``: the data, ``--valid`` and ``--test``."""
    from lastlayer.data import read_parts

    options = asked(arguments)
    parts = read_parts(arguments.data, **options)
    width = next((p.features.shape[1] for p in parts.values() if p.features is not None), None)
    extra = {k: v for k, v in options.items() if k != "xml"}
    if width is not None and next(iter(parts.values())).source.get("format") == "svm":
        extra["n_features"] = width
    for name in ("valid", "test"):
        if path := getattr(arguments, name, None):
            given = read_parts(path, **extra)
            parts[name] = given.get(name) or next(iter(given.values()))
            if "all" in parts and name == "test":
                parts.setdefault("train", parts.pop("all"))
    for name, data in parts.items():
        tell_about(name, data)
    return parts


def part_to_measure(arguments: argparse.Namespace, model: Any) -> tuple[str, Any]:
    """Read the rows of ``evaluate`` as the training rows were read; return the name of the part and its rows."""
    from lastlayer.data import DataError, read_parts

    parts = read_parts(arguments.data, **like_training(arguments, model))
    part = arguments.part or next((p for p in ("test", "all", "valid") if p in parts), "train")
    if part not in parts:
        raise DataError(f"{arguments.data}: has no part {part!r}, only {', '.join(parts)}.")
    tell_about(part, parts[part])
    return part, parts[part]


def rows_to_predict(arguments: argparse.Namespace, model: Any, size: int = 512) -> Iterator[Any]:
    """Yield the rows of ``predict`` in tables of `size` rows, read as the training rows were read."""
    from lastlayer.data import stream

    return stream(arguments.data, size, **like_training(arguments, model))


def like_training(arguments: argparse.Namespace, model: Any) -> dict[str, Any]:
    """Return the options with which the training rows were read, unless flags say otherwise."""
    options = asked(arguments)
    if model.reader.get("format") == "svm":
        options.setdefault("zero_based", model.reader.get("zero_based"))
        options.setdefault("n_features", model.features.n_features)
    return options


def tell_about(name: str, data: Any) -> None:
    """Write one line on what was read and how, and the lines that were skipped, to the error stream."""
    how = ", ".join(f"{k} {v}" for k, v in data.source.items() if k != "columns")
    for key, value in data.source.get("columns", {}).items():
        how += f", {key} {value!r}"
    print(f"{name}: {len(data)} rows, {data.n_labels} labels ({how})", file=sys.stderr)
    if data.problems.count:
        print(f"skipped {data.problems.count} wrong line(s):", file=sys.stderr)
        for message in data.problems.listed[:20]:
            print(f"  {message}", file=sys.stderr)
        data.problems.listed[:] = data.problems.listed[:1000]
