"""One door for all formats: look at a file, choose the reader, return the rows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lastlayer.data.arff import read_arff
from lastlayer.data.arrays import from_matrices, read_folder, read_npy, read_npz, read_parquet
from lastlayer.data.builder import Row, Table, number_names
from lastlayer.data.labeldata import LabelData
from lastlayer.data.lines import DataError, Limits, OnError, Problems, lines, plain_suffix
from lastlayer.data.svm import parse, read_svm
from lastlayer.data.svm import rows as svm_rows
from lastlayer.data.text import rows_of_cells, rows_of_json

Format = Literal["tsv", "csv", "jsonl", "svm", "arff", "npz", "npy", "parquet", "folder"]
FORMATS = ("tsv", "csv", "jsonl", "svm", "arff", "npz", "npy", "parquet", "folder")
_SUFFIX = {
    ".tsv": "tsv", ".tab": "tsv", ".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".svm": "svm",
    ".libsvm": "svm", ".arff": "arff", ".npz": "npz", ".npy": "npy", ".parquet": "parquet", ".pq": "parquet",
}  # fmt: skip
OPTIONS = (
    "text_column", "label_column", "id_column", "vector_column", "label_separator", "header", "zero_based",
    "n_features", "xml",
)  # fmt: skip


def read_parts(
    path: str | Path,
    *,
    format: Format | None = None,
    on_error: OnError = "raise",
    limits: Limits | None = None,
    **options: Any,
) -> dict[str, LabelData]:
    """Read a file or folder that may name its parts: keys "train", "valid", "test", or "all" where it does not.

    Args:
        path: A file, perhaps compressed with gz, xz or bz2, or a folder of embeddings.
        format: One of ``FORMATS``; None looks at the name and the first line.
        on_error: ``"raise"`` at the first wrong line, or ``"skip"``: count it and list it in ``.problems``.
        limits: What the file may cost.
        **options: ``text_column``, ``label_column``, ``id_column``, ``vector_column`` (names or numbers from 0),
            ``label_separator``, ``header``, ``zero_based``, ``n_features``, ``xml``.

    Returns:
        The rows of each part; all parts share the label names.
    """
    path, limits, problems = _opened(path, format, on_error, limits, options)
    kind = format or sniff(path, limits)
    if kind == "folder":
        return _shared(read_folder(path, limits, problems, options.get("label_separator") or ","))
    if kind == "npz":
        return _shared(read_npz(path, limits, problems))
    if kind == "npy":
        return {"all": from_matrices(path, read_npy(path, limits), None, None, None, {"format": "npy"}, problems)}
    if kind == "parquet":
        return {"all": read_parquet(path, limits, problems, options=options)}
    if kind == "svm":
        return {"all": read_svm(path, limits, problems, options=options)}
    if kind == "arff":
        return {"all": read_arff(path, limits, problems, options=options)}
    source, found = _text_rows(path, kind, limits, problems, options)
    table = Table()
    for row in found:
        table.add(row)
    data = table.build(path, problems, source)
    if not table.parts:
        return {"all": data}
    if len(table.parts) != len(data):
        raise DataError(f"{path}: split is given for {len(table.parts)} of {len(data)} rows. Give it for all or none.")
    where = np.array(table.parts)
    return {
        part: data.take(np.flatnonzero(where == part)) for part in ("train", "valid", "test") if (where == part).any()
    }


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
    """Yield tables of at most `size` rows, for files larger than memory; lines are read as they are needed."""
    format, on_error = options.pop("format", None), options.pop("on_error", "raise")
    given = options.pop("limits", None)
    path, limits, problems = _opened(path, format, on_error, given, options)
    kind: Any = format or sniff(path, limits)
    if kind in ("tsv", "csv", "jsonl"):
        source, found = _text_rows(path, kind, limits, problems, options)
        shift = 0
    elif kind == "svm":
        header, found = svm_rows(path, limits, problems)
        zero_based = options.get("zero_based")
        shift = 0 if (header is not None if zero_based is None else zero_based) else 1
        source = {"format": "svm"}
    else:
        for data in read_parts(path, format=kind, on_error=on_error, limits=given, **options).values():
            for at in range(0, len(data), size):
                yield data.take(np.arange(at, min(at + size, len(data))))
        return
    while rows := list(islice(found, size)):
        table = Table(number_names(header[2]) if kind == "svm" and header else None, options.get("n_features"))
        for row in rows:
            table.add(row)
        yield table.build(path, problems, source, shift=shift)


def _opened(
    path: str | Path, format: Any, on_error: Any, limits: Limits | None, options: dict[str, Any]
) -> tuple[Path, Limits, Problems]:
    path = Path(path)
    if format is not None and format not in FORMATS:
        raise DataError(f"{path}: `format` must be one of {', '.join(FORMATS)}, got {format!r}.")
    if on_error not in ("raise", "skip"):
        raise DataError(f"{path}: `on_error` must be 'raise' or 'skip', got {on_error!r}.")
    for name in options:
        if name not in OPTIONS:
            raise DataError(f"{path}: unknown option {name!r}. Known: {', '.join(OPTIONS)}.")
    if not path.exists():
        raise DataError(f"{path}: no such file or folder.")
    if not (path.is_file() or path.is_dir()):
        raise DataError(f"{path}: must be a regular file or a folder.")
    return path, limits or Limits(), Problems(on_error)


def _text_rows(
    path: Path, kind: str, limits: Limits, problems: Problems, options: dict[str, Any]
) -> tuple[dict[str, Any], Iterator[Row]]:
    if kind == "jsonl":
        return {"format": "jsonl"}, rows_of_json(path, limits, problems, options=options)
    delimiter = "\t" if kind == "tsv" else ","
    columns, rows = rows_of_cells(path, limits, problems, delimiter=delimiter, options=options)
    return {"format": kind, "columns": columns.describe()}, rows


def _shared(parts: dict[str, LabelData]) -> dict[str, LabelData]:
    """Give all parts the label names of the first, extended by what the others add."""
    names = [list(p.label_names) for p in parts.values() if p.n_labels]
    if len(parts) == 1 or all(n == names[0] for n in names):
        return parts
    every = list(dict.fromkeys(name for part in names for name in part))
    return {part: data.with_labels(every)[0] for part, data in parts.items()}


def sniff(path: Path, limits: Limits | None = None) -> str:
    """Return the format of a file: by its name, else by its first line."""
    if path.is_dir():
        return "folder"
    if kind := _SUFFIX.get(plain_suffix(path)):
        return kind
    with path.open("rb") as file:
        start = file.read(6)
    if start[:4] == b"PK\x03\x04":
        return "npz"
    if start == b"\x93NUMPY":
        return "npy"
    if start[:4] == b"PAR1":
        return "parquet"
    skipping = Problems("skip")
    first = next((line for _, line in lines(path, limits or Limits(), skipping) if line.strip()), "")
    if first.lstrip().startswith("{"):
        return "jsonl"
    if first.lstrip().lower().startswith(("@relation", "%")):
        return "arff"
    if "\t" in first:
        return "tsv"
    tokens = first.split()
    if len(tokens) == 3 and all(t.isdigit() for t in tokens):
        return "svm"
    try:
        if parse(1, first, None, 10**8).columns:
            return "svm"
    except ValueError:
        pass
    if "," in first:
        return "csv"
    raise DataError(f"{path}: cannot tell its format from its name or first line. Use `format` ({', '.join(FORMATS)}).")
