"""One door for all formats: look at a file, choose the reader, return the rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lastlayer.data.arff import read_arff
from lastlayer.data.arrays import from_matrices, read_folder, read_npy, read_npz, read_parquet
from lastlayer.data.builder import Row, Table
from lastlayer.data.fields import LABELS, TEXT
from lastlayer.data.labeldata import LabelData
from lastlayer.data.lines import OnError, Problems, encoding_of, head, opening
from lastlayer.data.source import DataError, Limits, Source
from lastlayer.data.svm import SvmRows, parse, svm_rows
from lastlayer.data.text import TextRows, text_rows

Format = Literal["tsv", "csv", "jsonl", "json", "txt", "fasttext", "svm", "arff", "npz", "npy", "parquet", "folder"]
FORMATS = ("tsv", "csv", "jsonl", "json", "txt", "fasttext", "svm", "arff", "npz", "npy", "parquet", "folder")
TEXTUAL = ("tsv", "csv", "jsonl", "json", "txt", "fasttext")
_SUFFIX = {
    ".tsv": "tsv", ".tab": "tsv", ".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".svm": "svm",
    ".libsvm": "svm", ".arff": "arff", ".npz": "npz", ".npy": "npy", ".parquet": "parquet", ".pq": "parquet",
    ".ft": "fasttext", ".fasttext": "fasttext",
}  # fmt: skip
COLUMNS = tuple(f"{r}_column" for r in ("text", "label", "id", "vector", "group", "weight", "split"))
OPTIONS = (
    *COLUMNS, "label_separator", "delimiter", "quotes", "header", "encoding", "zero_based", "n_features", "xml",
)  # fmt: skip
_SHAPE = ("delimiter", "quotes", "header")  # what belongs to a format, not to the names of columns


def read_parts(
    path: str | Path,
    *,
    format: Format | None = None,
    on_error: OnError = "raise",
    limits: Limits | None = None,
    like: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, LabelData]:
    """Read a file or folder that may name its parts: keys "train", "valid", "test", or "all" where it does not.

    Args:
        path: A file, perhaps compressed with gz, xz, bz2 or zip; ``"-"``, standard input; or a folder of embeddings.
        format: One of ``FORMATS``; None looks at the name and the first lines.
        on_error: ``"raise"`` at the first wrong line, or ``"skip"``: count it and list it in ``.problems``.
        limits: What the file may cost.
        like: The ``source`` of rows that were read before: read this file the same way where it fits, unless an option
            says otherwise. Columns other than the text may be missing.
        **options: ``text_column``, ``label_column``, ``id_column``, ``vector_column``, ``group_column``,
            ``weight_column``, ``split_column``: a name or a number from 0; several for texts, features and columns of
            0 and 1, as ``"a,b"``, ``"first..last"`` or a list; ``"none"`` for none. ``label_separator`` (``"none"``:
            one name per cell), ``delimiter``, ``quotes``, ``header``, ``encoding``, ``zero_based``, ``n_features``,
            ``xml``.

    Returns:
        The rows of each part; all parts share the label names.
    """
    source, limits, problems = _opened(path, format, on_error, limits, options)
    kind, options, soft = _settled(source, format, limits, like, options)
    if kind in TEXTUAL:
        return _read_text(source, text_rows(source, kind, limits, problems, options, soft), problems)
    if kind == "svm":
        return {"all": _read_svm(source, svm_rows(source, limits, problems, options), problems)}
    return _read_whole(source, kind, limits, problems, options, soft, like)


def read(path: str | Path, **options: Any) -> LabelData:
    r"""Read a file or folder as one table; the arguments are those of :func:`read_parts`.

    Example:
        >>> import pathlib, tempfile
        >>> from lastlayer.data import read
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "tags.tsv"
        >>> _ = file.write_text("text\tlabels\nred apple\tfruit,red\nblue sky\tblue\n")
        >>> data = read(file)
        >>> data.label_names, data.names(0)
        (['blue', 'fruit', 'red'], ['fruit', 'red'])
    """
    parts = read_parts(path, **options)
    if len(parts) > 1:
        raise DataError(f"{path}: holds the parts {', '.join(parts)}. Use read_parts.")
    return next(iter(parts.values()))


def stream(path: str | Path, size: int, **options: Any) -> Iterator[LabelData]:
    """Yield tables of at most `size` rows, for files larger than memory; lines are read as they are needed.

    Args:
        path: A file, ``"-"`` or a folder, as for :func:`read_parts`.
        size: The largest number of rows of a table.
        **options: As for :func:`read_parts`.
    """
    if size < 1:
        raise ValueError(f"stream: `size` must be at least 1, got {size}.")
    format, on_error = options.pop("format", None), options.pop("on_error", "raise")
    limits, like = options.pop("limits", None), options.pop("like", None)
    source, limits, problems = _opened(path, format, on_error, limits, options)
    kind, options, soft = _settled(source, format, limits, like, options)
    reader: TextRows | SvmRows
    if kind in TEXTUAL:
        reader = text_rows(source, kind, limits, problems, options, soft)
    elif kind == "svm":
        reader = svm_rows(source, limits, problems, options)
    else:
        one = {**options, "split_column": "none"}  # rows in the order of the file, as from lines
        for data in _read_whole(source, kind, limits, problems, one, soft, like).values():
            for at in range(0, len(data), size):
                yield data.take(np.arange(at, min(at + size, len(data))))
        return
    rows: list[Row]
    while rows := list(islice(reader.rows, size)):
        table = _table(reader)
        for row in rows:
            table.add(row)
        yield table.build(source, problems, _source(source, reader), shift=getattr(reader, "shift", 0))


def _read_text(source: Source, reader: TextRows, problems: Problems) -> dict[str, LabelData]:
    table = _table(reader)
    for row in reader.rows:
        table.add(row)
    return table.by_part(source, table.build(source, problems, _source(source, reader)))


def _read_svm(source: Source, reader: SvmRows, problems: Problems) -> LabelData:
    table = _table(reader)
    for row in reader.rows:
        table.add(row)
    if reader.header is not None and problems.count == 0 and len(table) != reader.header[0]:
        raise DataError(
            f"{source}, line 1: the header must count the rows, says {reader.header[0]}, the file has {len(table)}."
        )
    shift = reader.shift
    if reader.zero_based is None and 0 in table.index:
        shift = 0
    data = table.build(source, problems, _source(source, reader), shift=shift)
    data.source["options"]["zero_based"] = shift == 0
    data.source["how"] = f"features count from {shift}" + (", with a header" if reader.header else "")
    return data


def _read_whole(
    source: Source,
    kind: str,
    limits: Limits,
    problems: Problems,
    options: dict[str, Any],
    soft: frozenset[str],
    like: Mapping[str, Any] | None,
) -> dict[str, LabelData]:
    """Read a format that is no stream of lines."""
    if source.is_stream:
        raise DataError(f"{source}: {kind} cannot be read from a pipe. Save it to a file.")
    path = source.path
    if kind == "folder":
        return _shared(read_folder(path, limits, problems, options.get("label_separator") or ","))
    if kind == "npz":
        return _shared(read_npz(path, limits, problems))
    if kind == "npy":
        return {"all": from_matrices(path, read_npy(path, limits), None, None, None, {"format": "npy"}, problems)}
    if kind == "parquet":
        return read_parquet(path, limits, problems, options=options, soft=soft)
    return {"all": read_arff(path, limits, problems, options=options, like=like)}


def _table(reader: TextRows | SvmRows) -> Table:
    return Table(reader.label_names, getattr(reader, "n_features", None))


def _source(source: Source, reader: TextRows | SvmRows) -> dict[str, Any]:
    return {
        "format": reader.options["format"],
        "how": reader.how,
        "suffix": source.suffix,
        "options": {k: v for k, v in reader.options.items() if k != "format"},
    }


def _opened(
    path: str | Path, format: Any, on_error: Any, limits: Limits | None, options: dict[str, Any]
) -> tuple[Source, Limits, Problems]:
    if format is not None and format not in FORMATS:
        raise DataError(f"{path}: `format` must be one of {', '.join(FORMATS)}, got {format!r}.")
    if on_error not in ("raise", "skip"):
        raise DataError(f"{path}: `on_error` must be 'raise' or 'skip', got {on_error!r}.")
    for name in options:
        if name not in OPTIONS:
            raise DataError(f"{path}: unknown option {name!r}. Known: {', '.join(OPTIONS)}.")
    return Source(path), limits or Limits(), Problems(on_error)


def _settled(
    source: Source, format: str | None, limits: Limits, like: Mapping[str, Any] | None, options: dict[str, Any]
) -> tuple[str, dict[str, Any], frozenset[str]]:
    """Return the format, the options with what is remembered, and the names of the options that are remembered."""
    options = {k: v for k, v in options.items() if v is not None}
    before = dict((like or {}).get("options") or {})
    encoding = options.get("encoding")
    if encoding is None and before.get("encoding") not in (None, "utf-8", "utf-16", "utf-32"):
        # A file that does not start with a byte order mark is in the encoding that had to be named before.
        encoding = before["encoding"] if encoding_of(source, None, limits) == "utf-8" else None
    kind = format or _kind(source, limits, encoding, like)
    if kind != (like or {}).get("format"):
        before = {k: v for k, v in before.items() if k not in (*_SHAPE, "zero_based", "n_features")}
    before["encoding"] = None if kind in ("json", "jsonl") and kind != (like or {}).get("format") else encoding
    remembered = {k: v for k, v in before.items() if v is not None and k in OPTIONS and k not in options}
    return kind, {**remembered, **options}, frozenset(remembered)


def _kind(source: Source, limits: Limits, encoding: str | None, like: Mapping[str, Any] | None) -> str:
    named = _SUFFIX.get(source.suffix)
    if named is None and like and source.suffix and source.suffix == like.get("suffix"):
        return str(like["format"])
    return sniff(source, limits, encoding, like)


def _shared(parts: dict[str, LabelData]) -> dict[str, LabelData]:
    """Give all parts the label names of the first, extended by what the others add."""
    names = [list(p.label_names) for p in parts.values() if p.n_labels]
    if len(parts) == 1 or all(n == names[0] for n in names):
        return parts
    every = list(dict.fromkeys(name for part in names for name in part))
    return {part: data.with_labels(every)[0] for part, data in parts.items()}


def sniff(
    path: str | Path | Source,
    limits: Limits | None = None,
    encoding: str | None = None,
    like: Mapping[str, Any] | None = None,
) -> str:
    """Return the format of a file: by its name, else by its first lines.

    A ``.txt`` file, and rows for a run that knows texts, hold one text per line unless they show otherwise.
    """
    source = path if isinstance(path, Source) else Source(path)
    if source.path.is_dir() and source.content is None and not source.is_stream:
        return "folder"
    kind = _SUFFIX.get(source.suffix)
    if kind is not None and kind not in ("json", "jsonl"):
        return kind
    start = source.start()
    for mark, binary in ((b"PK\x03\x04", "npz"), (b"\x93NUMPY", "npy"), (b"PAR1", "parquet")):
        if start.startswith(mark):
            return binary
    sample = [line for line in head(source, limits or Limits(), encoding) if line.strip()]
    first = sample[0].lstrip() if sample else opening(source, limits or Limits(), encoding)
    if kind is not None:
        return "json" if first.startswith("[") else "jsonl"
    if (guess := _sniff_lines(sample, first)) is not None:
        return guess
    if like and (guess := _as_before(sample, first, like)) is not None:
        return guess
    if _is_table(sample, ",") or _is_table(sample, ";"):
        header = {c.strip().lower() for c in first.replace(";", ",").split(",")}
        if header & {*TEXT, *LABELS} or not (like or source.suffix == ".txt"):
            return "csv"
    if source.suffix == ".txt" or (like and first):
        return "txt"
    if not first.strip():
        raise DataError(f"{source}: has no rows.")
    raise DataError(
        f"{source}: cannot tell its format from its name or first lines. Use `format` ({', '.join(FORMATS)})."
    )


def _sniff_lines(sample: list[str], first: str) -> str | None:
    if first.startswith("{"):
        return "jsonl"
    if first.startswith("[") and first[1:].lstrip()[:1] in ("{", ""):
        return "json"
    if first.lower().startswith(("@relation", "%")):
        return "arff"
    if first.startswith("__label__"):
        return "fasttext"
    tabs = {line.count("\t") for line in sample}
    if len(tabs) == 1 and 0 not in tabs:
        return "tsv"
    tokens = first.split()
    if len(tokens) == 3 and all(t.isascii() and t.isdigit() for t in tokens):
        return "svm"
    try:
        rows = [parse(1, line.split(" #", 1)[0], None, 10**8) for line in sample[:20]]
        if any(row.columns for row in rows):
            return "svm"
    except ValueError:
        pass
    return None


def _is_table(sample: list[str], delimiter: str) -> bool:
    counts = {line.count(delimiter) for line in sample}
    return bool(sample) and 0 not in counts and (len(counts) == 1 or '"' in "".join(sample))


def _as_before(sample: list[str], first: str, like: Mapping[str, Any]) -> str | None:
    """Return the remembered format, csv or tsv, if the lines have its columns."""
    before, kind = like.get("options") or {}, like.get("format")
    delimiter, column = before.get("delimiter"), before.get("text_column")
    if kind not in ("csv", "tsv") or not delimiter or column is None:
        return None
    if not before.get("header"):
        return kind if _is_table(sample, delimiter) else None
    names = {cell.strip().strip('"').lower() for cell in first.split(delimiter)}
    wanted = [column] if isinstance(column, str) else column
    return kind if any(str(name).strip().lower() in names for name in wanted) else None
