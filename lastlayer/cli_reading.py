"""What the commands share about reading: the flags, the rows of each part, and one line on how they were read."""

from __future__ import annotations

import argparse
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

_COLUMNS = {
    "text": "column of the text, or several joined by commas",
    "label": "column of the labels, or columns of 0 and 1: a,b,c or first..last",
    "id": "column of row names",
    "vector": "column of a list of numbers, or columns of numbers",
    "group": "column of groups, which a split keeps together",
    "weight": "column of row weights",
    "split": "column that says train, valid or test",
}
_SWITCHES = ("header", "quotes", "zero_based")
OPTIONS = (
    "format", *(f"{name}_column" for name in _COLUMNS), "label_separator", "delimiter", *_SWITCHES, "encoding", "xml",
    "on_error",
)  # fmt: skip


def add_flags(made: argparse.ArgumentParser, formats: bool = False) -> None:
    """Add the flags of reading to a command; with `formats`, ``--format`` is the form of its output."""
    from lastlayer.data.read import FORMATS

    text = (
        "Columns are given by name, or by number from 0; without a flag they are found by the header, or by what they "
        "hold. For train and tune these flags are keys of --config as well."
    )
    group = made.add_argument_group("reading", text)
    names = ["--format", "--input-format"]
    if formats:
        made.add_argument("--format", dest="output_format", choices=("jsonl", "csv"), default="jsonl")
        names = ["--input-format"]
    text = "format of the file (default: by its name and first lines)"
    group.add_argument(*names, dest="reader_format", choices=FORMATS, help=text)
    for name, text in _COLUMNS.items():
        group.add_argument(f"--{name}-column", dest=f"reader_{name}_column", metavar="NAME", help=text)
    text = "between label names: a character, space, or none (one name per cell)"
    group.add_argument("--label-separator", dest="reader_label_separator", metavar="CHAR", help=text)
    group.add_argument(
        "--delimiter", dest="reader_delimiter", metavar="CHAR", help="between columns: a character or tab"
    )
    texts = ("whether the first line names the columns", "whether cells may be quoted", "LibSVM features count from 0")
    for name, text in zip(_SWITCHES, texts, strict=True):
        group.add_argument(f"--{name.replace('_', '-')}", dest=f"reader_{name}", choices=("yes", "no"), help=text)
    text = "character encoding (default: utf-8, unless the file says otherwise)"
    group.add_argument("--encoding", dest="reader_encoding", metavar="NAME", help=text)
    group.add_argument("--xml", dest="reader_xml", metavar="FILE", help="label names of an ARFF file")
    text = "what to do at a wrong line (default: raise)"
    group.add_argument("--on-error", dest="reader_on_error", choices=("raise", "skip"), help=text)


def take_from_config(arguments: argparse.Namespace, values: dict[str, Any]) -> None:
    """Move the options of reading out of the values of a config file; flags win."""
    for name in OPTIONS:
        if name in values:
            given = values.pop(name)
            if getattr(arguments, f"reader_{name}") is None:
                setattr(arguments, f"reader_{name}", given)


def asked(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of reading that were given, with switches as booleans."""
    from lastlayer.data import DataError

    words = {"yes": True, "true": True, "no": False, "false": False}
    out: dict[str, Any] = {}
    for name in OPTIONS:
        given = getattr(arguments, f"reader_{name}", None)
        if given is None:
            continue
        if name in _SWITCHES:
            out[name] = given if isinstance(given, bool) else words.get(str(given).lower())
            if out[name] is None:
                raise DataError(f"`{name}` must be yes or no, got {given!r}.")
        elif isinstance(given, bool) or not isinstance(given, str | int | list):
            raise DataError(
                f"`{name}` must be a word or a list of names, got {given!r} (in YAML quote 'yes' and 'no')."
            )
        else:
            out[name] = [str(value) for value in given] if isinstance(given, list) else str(given)
    return out


def flags(arguments: argparse.Namespace) -> list[str]:
    """Return the flags of reading as they were given, for a command that reads the same rows."""
    given = {name: getattr(arguments, f"reader_{name}", None) for name in OPTIONS}
    return [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]


def training_parts(arguments: argparse.Namespace, images: str = "") -> dict[str, Any]:
    """Read the rows of ``train`` and ``tune``: the data, ``--valid`` and ``--test``, which are read like the data.

    With `images`, the column of that name holds image files, which are opened once to find those that are damaged.
    """
    from lastlayer.data import DataError, read_parts

    options = asked(arguments)
    if images:
        options["text_column"] = images
    parts = read_parts(arguments.data, **options)
    first = next(iter(parts.values()))
    extra = {k: v for k, v in options.items() if k != "xml"}
    if first.source.get("format") == "svm" and first.features is not None:
        extra["n_features"] = first.features.shape[1]
    for name in ("valid", "test"):
        if (path := getattr(arguments, name, None)) is not None:
            if not path:
                raise DataError(f"--{name} must be a file or a folder, got an empty name.")
            given = read_parts(path, like=first.source, **extra)
            parts[name] = given.get(name) or next(iter(given.values()))
            if "all" in parts and name == "test":
                parts.setdefault("train", parts.pop("all"))
    if images:
        for name, data in parts.items():
            path = getattr(arguments, name, None) or arguments.data
            parts[name] = with_images(data, path, options.get("on_error", "raise"))
    for name, data in parts.items():
        tell_about(name, data)
    tell_forms([name for data in parts.values() for name in data.label_names])
    if not any(len(data) for data in parts.values()):
        raise DataError(f"{arguments.data}: has no rows.")
    if not any(len(data.indices) for data in parts.values()):
        raise DataError(f"{arguments.data}: no row has a label. {_where_labels_are(first)}")
    train = parts.get("train", parts.get("all"))
    for name, data in parts.items():
        if train is not None and data is not train:
            tell_unknown(data, train.label_names, f"labels of the {name} part", "training rows")
    return parts


def _where_labels_are(data: Any) -> str:
    """Return what to do about rows without labels: their column is empty, or has to be named."""
    column = (data.source.get("options") or {}).get("label_column")
    if column is None:
        return "Name the column of labels (--label-column)."
    return f"They were looked for in {column!r}; --label-column names another column."


def part_to_measure(arguments: argparse.Namespace, model: Any) -> tuple[str, Any]:
    """Read the rows of ``evaluate`` as the training rows were read; return the name of the part and its rows."""
    from lastlayer.data import DataError, read_parts

    options = like_training(arguments, model)
    if arguments.part == "all":
        options["split_column"] = "none"
    parts = read_parts(arguments.data, **options)
    part = arguments.part or next((p for p in ("test", "all", "valid") if p in parts), "train")
    if part not in parts:
        raise DataError(f"{arguments.data}: has no part {part!r}, only {', '.join(parts)}.")
    if model.config.images:
        parts[part] = with_images(parts[part], arguments.data, arguments.reader_on_error)
    tell_about(part, parts[part])
    if not len(parts[part]):
        raise DataError(f"{arguments.data}: has no rows.")
    if not len(parts[part].indices):
        raise DataError(
            f"{arguments.data}: no row has a label, so there is nothing to measure. Name the column of labels "
            "(--label-column), or use `lastlayer predict`."
        )
    tell_unknown(parts[part], model.labels, "labels", "run")
    return part, parts[part]


def rows_to_predict(arguments: argparse.Namespace, model: Any, size: int = 512) -> Iterator[Any]:
    """Yield the rows of ``predict`` in tables of `size` rows, read as the training rows were read.

    Where the columns of the run are known, only these and ids are read: weights, groups and parts may be wrong.
    """
    from lastlayer.data import stream

    last = None
    known = {"text_column", "vector_column"} & set(model.reader.get("options") or {})
    unused = {f"{role}_column": "none" for role in ("label", *(("split", "group", "weight") if known else ()))}
    for data in stream(arguments.data, size, **{**like_training(arguments, model), **unused}):
        if last is None:
            print(f"reading {arguments.data}: {_how(data)}", file=sys.stderr)
        last = data
        if model.config.images:
            last = data = with_images(data, arguments.data, arguments.reader_on_error)
        yield data
    if last is None:
        print(f"lastlayer: warning: {arguments.data}: has no rows.", file=sys.stderr)
    else:
        tell_problems(last)


def like_training(arguments: argparse.Namespace, model: Any) -> dict[str, Any]:
    """Return the options that were given, and how the training rows were read."""
    options = {**asked(arguments), "like": model.reader}
    if model.reader.get("format") == "svm":
        options["n_features"] = model.features.n_features
        if "options" not in model.reader:  # a run of version 0.1
            options.setdefault("zero_based", model.reader.get("zero_based"))
    return options


def with_images(data: Any, path: str, on_error: str | None) -> Any:
    """Return rows of image files, which are named from the folder of their table.

    Files that cannot be opened are left out, or are an error; None leaves that to the moment when they are needed.
    """
    from pathlib import Path

    from lastlayer.data.images import in_folder, readable_images

    data = in_folder(data, Path(".") if path == "-" else Path(path).parent)
    return data if on_error is None else readable_images(data, on_error)


def tell_about(name: str, data: Any) -> None:
    """Write one line on what was read and how, and the lines that were skipped, to the error stream."""
    rows, labels = (f"{n} {word}{'' if n == 1 else 's'}" for n, word in ((len(data), "row"), (data.n_labels, "label")))
    print(f"{name}: {rows}, {labels} ({_how(data)})", file=sys.stderr)
    tell_problems(data)


def _how(data: Any) -> str:
    words = [str(data.source.get(key)) for key in ("format", "how") if data.source.get(key)]
    return ": ".join(words)


def tell_problems(data: Any) -> None:
    """Write what was skipped and what was mended to the error stream, once per file."""
    problems = data.problems
    if problems.told:
        return
    problems.told = True
    if problems.count:
        print(f"skipped {problems.count} wrong line(s):", file=sys.stderr)
        for message in problems.listed[:20]:
            print(f"  {message}", file=sys.stderr)
    if problems.mended:
        print(f"mended {problems.mended} text(s); the first: {problems.mended_first}", file=sys.stderr)


def tell_forms(names: Iterable[str]) -> None:
    """Warn if label names differ in nothing but how Unicode writes their characters, which no reader can see."""
    forms: dict[str, set[str]] = {}
    for name in names:
        if not name.isascii():
            forms.setdefault(unicodedata.normalize("NFC", name), set()).add(name)
    several = [sorted(ways) for ways in forms.values() if len(ways) > 1]
    if several:
        example = " and ".join(map(ascii, several[0][:2]))
        print(
            f"lastlayer: warning: label names that are written in more than one form of Unicode (NFC, NFD): "
            f"{len(several)}, such as {example}. Each form is a label of its own. Write the names in one form.",
            file=sys.stderr,
        )


def check_folds(folds: int, data: Any) -> None:
    """Refuse a number of folds that the rows cannot fill."""
    from lastlayer.cli import UsageError
    from lastlayer.data.splits import most_folds

    most, what = most_folds(data)
    if most < 2:
        raise UsageError(f"--folds needs rows of at least 2 {what}, got {most}.")
    if not 2 <= folds <= most:
        raise UsageError(
            f"--folds must be from 2 to {most}, the number of {what}, got {folds}. Use --folds {min(most, 5)}."
        )


def harmless(text: str) -> str:
    """Put an apostrophe before a text that a spreadsheet would take for a formula; numbers stay as they are.

    Example:
        >>> harmless("=1+1"), harmless("-1"), harmless("a-b")
        ("'=1+1", '-1', 'a-b')
    """
    if text[:1] not in ("=", "+", "-", "@", "\t", "\r"):
        return text
    try:
        float(text)
    except ValueError:
        return "'" + text
    return text


def tell_unknown(data: Any, label_names: Sequence[str], what: str, who: str) -> None:
    """Write which labels are not among the given ones; it is an error if none is."""
    from lastlayer.data import DataError

    unknown = data.unknown_labels(label_names)
    if not unknown:
        return
    shown = ", ".join(list(unknown)[:5]) + (", ..." if len(unknown) > 5 else "")
    if sum(unknown.values()) == len(data.indices):
        raise DataError(f"all {what} are unknown to the {who}: {shown}. Is it the right file and the right column?")
    print(f"{sum(unknown.values())} {what} are unknown to the {who} and do not count: {shown}", file=sys.stderr)
