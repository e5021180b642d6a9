"""NumPy arrays, Parquet tables and folders of embeddings. Nothing is unpickled, and no declared size is believed."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lastlayer.data.builder import Row, Table, number_names
from lastlayer.data.labeldata import LabelData
from lastlayer.data.lines import DataError, Limits, Problems, lines
from lastlayer.data.text import IDS, LABELS, TEXT, VECTORS, label_list, split_labels

PARTS = ("train", "valid", "test")


def read_npy(path: Path, limits: Limits) -> np.ndarray:
    """Return the array of a .npy file, memory-mapped; its header must agree with the size of the file."""
    with path.open("rb") as file:
        dtype, shape, order, start = _header(path, file)
    size = math.prod(shape) * dtype.itemsize
    if start + size != path.stat().st_size:
        raise DataError(f"{path}: the header must agree with the file, says {size} bytes of data at byte {start}.")
    if size == 0:
        return np.empty(shape, dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=start, shape=shape, order=order)


def _header(path: Any, file: Any) -> tuple[np.dtype, tuple[int, ...], Any, int]:
    start = file.read(12)
    wide = start[6:8] in (b"\2\0", b"\3\0")
    size = int.from_bytes(start[8:12] if wide else start[8:10], "little")
    if start[:6] != b"\x93NUMPY" or not (wide or start[6:8] == b"\1\0") or size > 10_000:
        raise DataError(f"{path}: must be a NumPy array with a short header.")
    raw = io.BytesIO(start + file.read(size - (0 if wide else 2)))
    raw.seek(8)
    read = np.lib.format.read_array_header_2_0 if wide else np.lib.format.read_array_header_1_0
    try:
        shape, fortran, dtype = read(raw, max_header_size=10_000)
    except Exception as error:  # numpy's parser raises whatever Python's own does
        raise DataError(f"{path}: must be a NumPy array: {' '.join(str(error).split())[:100]}.") from None
    if dtype.hasobject or dtype.names is not None:
        raise DataError(f"{path}: must hold numbers or strings, got dtype {dtype}. Objects are never unpickled.")
    if any(s < 0 for s in shape):
        raise DataError(f"{path}: the header must hold a shape, got {shape}.")
    return dtype, tuple(int(s) for s in shape), "F" if fortran else "C", raw.tell()


def read_arrays(path: Path, limits: Limits) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz file, each no larger than its member and all within the limit."""
    left = limits.total(path)
    out: dict[str, np.ndarray] = {}
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise DataError(f"{path}: must be an .npz file: {error}.") from None
    with archive:
        for info in archive.infolist():
            left -= info.file_size
            if left < 0 or len(out) > 1000:
                raise DataError(f"{path}: declares more than {limits.total(path)} bytes, or more than 1000 arrays.")
            name = info.filename[:200].removesuffix(".npy")
            try:
                with archive.open(info) as file:
                    dtype, shape, order, start = _header(f"{path}:{name}", file)
                    size = math.prod(shape) * dtype.itemsize
                    if start + size != info.file_size:
                        raise DataError(f"{path}: the header of {name!r} must agree with its {info.file_size} bytes.")
                    raw = file.read(size)
            except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
                raise (
                    error if isinstance(error, DataError) else DataError(f"{path}: {name[:40]!r}: {str(error)[:100]}.")
                ) from None
            except Exception as error:  # zlib.error and its kin
                raise DataError(f"{path}: {name!r} cannot be decompressed: {error}.") from None
            if len(raw) != size:
                raise DataError(f"{path}: {name!r} ends early.")
            out[name] = np.frombuffer(raw, dtype).reshape(shape, order=order) if size else np.empty(shape, dtype)
    return out


def read_npz(path: Path, limits: Limits, problems: Problems) -> dict[str, LabelData]:
    """Read ``X`` and ``Y`` (dense, or CSR as ``X_data, X_indices, X_indptr, X_shape``), perhaps of several parts.

    The names of arrays may start with ``train_``, ``valid_`` or ``test_``. ``labels`` or ``label_names`` are names.
    A file of :func:`scipy.sparse.save_npz` is features without labels.
    """
    arrays = read_arrays(path, limits)
    if {"data", "indices", "indptr", "shape"} <= set(arrays):
        arrays = {f"X_{name}": value for name, value in arrays.items()}
    names = next((arrays[n] for n in ("label_names", "labels") if n in arrays and arrays[n].ndim == 1), None)
    texts = None if names is None else strings(path, names)
    prefixes = {p: f"{p}_" for p in PARTS if any(n.startswith(f"{p}_X") for n in arrays)} or {
        "all": "all_" if any(n.startswith("all_X") for n in arrays) else ""
    }
    parts = {}
    for part, prefix in prefixes.items():
        features = _matrix(path, arrays, f"{prefix}X", limits)
        if features is None:
            raise DataError(f"{path}: must hold an array X (or X_data, X_indices, ...), holds {sorted(arrays)[:12]}.")
        target = _matrix(path, arrays, f"{prefix}Y", limits)
        ids = arrays.get(f"{prefix}ids")
        row_ids = None if ids is None else strings(path, ids)
        parts[part] = from_matrices(path, features, target, texts, row_ids, {"format": "npz"}, problems)
    return parts


def strings(path: Any, value: np.ndarray) -> list[str]:
    """Return the entries of a one-dimensional array as text."""
    if value.ndim != 1 or value.dtype.kind not in "UiuS":
        raise DataError(f"{path}: names must be a list of strings, got {value.dtype} of shape {value.shape}.")
    out = [v.decode("utf-8", "replace") if isinstance(v, bytes) else str(v) for v in value.tolist()]
    return out


def _matrix(path: Any, arrays: dict[str, np.ndarray], name: str, limits: Limits) -> Any:
    if name in arrays:
        return arrays[name]
    if f"{name}_indptr" not in arrays or f"{name}_indices" not in arrays:
        return None
    indptr, indices = arrays[f"{name}_indptr"], arrays[f"{name}_indices"]
    data, shape = arrays.get(f"{name}_data"), arrays.get(f"{name}_shape")
    return csr(path, name, indptr, indices, data, shape, limits)


def csr(path: Any, name: str, indptr: Any, indices: Any, data: Any, shape: Any, limits: Limits) -> Any:
    """Check the three arrays of a CSR matrix and return it."""
    import scipy.sparse as sp

    def fail(rule: str) -> None:
        raise DataError(f"{path}: {name} must be a CSR matrix: {rule}.")

    if indptr.ndim != 1 or indices.ndim != 1 or indptr.dtype.kind not in "iu" or indices.dtype.kind not in "iu":
        fail("indptr and indices must be lists of whole numbers")
    indptr, indices = indptr.astype(np.int64), indices.astype(np.int64)
    if len(indptr) < 1 or indptr[0] != 0 or indptr[-1] != len(indices) or (np.diff(indptr) < 0).any():
        fail(f"indptr must rise from 0 to the {len(indices)} indices")
    if len(indices) and (indices.min() < 0 or indices.max() >= limits.max_columns):
        fail(f"indices must be between 0 and {limits.max_columns}")
    width = int(indices.max(initial=-1)) + 1
    if shape is not None:
        if shape.shape != (2,) or shape.dtype.kind not in "iu":
            fail("shape must be two whole numbers")
        if int(shape[0]) != len(indptr) - 1 or not width <= int(shape[1]) <= limits.max_columns:
            fail(f"shape {shape.tolist()} must fit {len(indptr) - 1} rows and indices below {width}")
        width = int(shape[1])
    values = np.ones(len(indices), np.float32) if data is None else data
    if values.shape != indices.shape or values.dtype.kind not in "fiub" or not np.isfinite(values).all():
        fail("data must be finite numbers, one an index")
    out = sp.csr_matrix((values.astype(np.float32), indices, indptr), shape=(len(indptr) - 1, max(width, 1)))
    out.sum_duplicates()
    return out


def from_matrices(
    path: Any,
    x: Any,
    y: Any,
    names: Sequence[str] | None,
    ids: list[str] | None,
    source: dict[str, Any],
    problems: Problems,
) -> LabelData:
    """Put features and an indicator matrix (dense or CSR; or None) together."""
    if isinstance(x, np.ndarray):
        if x.ndim != 2 or x.dtype.kind not in "fiub":
            raise DataError(f"{path}: features must be a matrix of numbers, got {x.dtype} of shape {x.shape}.")
        if not all(np.isfinite(x[i : i + 4096]).all() for i in range(0, len(x), 4096)):
            raise DataError(f"{path}: features must be finite, got nan or inf.")
    n = x.shape[0]
    if y is None:
        indptr, indices, width = np.zeros(n + 1, np.int64), np.empty(0, np.int64), 0 if names is None else len(names)
    else:
        if isinstance(y, np.ndarray) and (y.ndim != 2 or y.dtype.kind not in "fiub"):
            raise DataError(f"{path}: labels must be an indicator matrix, got {y.dtype} of shape {y.shape}.")
        import scipy.sparse as sp

        y = sp.csr_matrix(y)
        y.eliminate_zeros()
        y.sort_indices()
        if len(y.data) and not (y.data == 1).all():
            raise DataError(f"{path}: labels must be 0 or 1 in an indicator matrix.")
        indptr, indices, width = y.indptr.astype(np.int64), y.indices.astype(np.int64), y.shape[1]
        if y.shape[0] != n:
            raise DataError(f"{path}: features and labels must have as many rows, got {n} and {y.shape[0]}.")
    found: Sequence[str] = number_names(width) if names is None else names
    if len(found) != width or len(set(found)) != width:
        raise DataError(f"{path}: must name its {width} labels, each once, got {len(found)} names.")
    if ids is not None and len(ids) != n:
        raise DataError(f"{path}: must have one id a row, {n}, got {len(ids)}.")
    return LabelData(None, x, indptr, indices, found, ids=ids, source=source, problems=problems)


def read_parquet(path: Path, limits: Limits, problems: Problems, *, options: dict[str, Any]) -> LabelData:
    """Read a Parquet table with a text or vector column and a column of label lists."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise DataError(f"{path}: needs pyarrow to be read. Install it, or convert to JSON lines.") from None
    try:
        with pq.ParquetFile(path, thrift_string_size_limit=64 << 20, thrift_container_size_limit=1 << 20) as file:
            groups = range(file.metadata.num_row_groups)
            if sum(file.metadata.row_group(i).total_byte_size for i in groups) > limits.total(path):
                raise DataError(f"{path}: declares more than {limits.total(path)} bytes. If you trust it, convert it.")
            names = {name.lower(): name for name in file.schema_arrow.names}
            pick = lambda key, words: options.get(key) or next((names[w] for w in words if w in names), None)  # noqa: E731
            text, labels = pick("text_column", TEXT), pick("label_column", LABELS)
            vector, row_id = pick("vector_column", VECTORS), pick("id_column", IDS)
            if text is None and vector is None:
                raise DataError(f"{path}: must have a text or vector column, has {list(names)[:12]}.")
            wanted = [c for c in (text or vector, labels, row_id) if c is not None]
            table, number = Table(), 0
            for batch in file.iter_batches(batch_size=1024, columns=wanted):
                for item in batch.to_pylist():
                    number += 1
                    try:
                        table.add(_parquet_row(number, item, text, vector, labels, row_id, options))
                    except ValueError as error:
                        problems.report(path, number, str(error), str(item.get(labels))[:80])
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise (
            error if isinstance(error, DataError) else DataError(f"{path}: must be Parquet: {str(error)[:120]}.")
        ) from None
    return table.build(path, problems, {"format": "parquet"})


def _parquet_row(
    number: int, item: dict[str, Any], text: Any, vector: Any, labels: Any, row_id: Any, options: dict[str, Any]
) -> Row:
    from lastlayer.data.text import numbers_of

    cell = None if labels is None else item[labels]
    separator = options.get("label_separator") or ","
    found = split_labels(cell, separator) if isinstance(cell, str) else label_list(cell or [])
    if text is not None and not isinstance(item[text], str):
        raise ValueError("text must be a string")
    dense = None if text is not None else numbers_of(item[vector])
    name = None if row_id is None else str(item[row_id])
    return Row(number, text=None if text is None else item[text], dense=dense, labels=found, id=name)


def read_folder(path: Path, limits: Limits, problems: Problems, separator: str = ",") -> dict[str, LabelData]:
    """Read a folder of embeddings: ``X.npy`` (or embeddings.npy, features.npy, .npz) and labels beside it.

    Labels: ``labels.txt`` (one line of names a row, with `separator` between) or ``Y.npy`` / ``Y.npz`` with
    ``label_names.txt``. ``ids.txt`` is optional. Folders ``train``, ``valid`` and ``test`` inside are parts.
    """
    parts = {p: path / p for p in PARTS if (path / p).is_dir()}
    if parts:
        return {p: read_folder(folder, limits, problems, separator)["all"] for p, folder in parts.items()}
    found = _first(path, ("X", "embeddings", "features"), (".npy", ".npz"))
    if found is None:
        raise DataError(f"{path}: must hold X.npy, embeddings.npy or features.npy.")
    if found.suffix == ".npz":
        whole = read_npz(found, limits, problems)
        if "all" not in whole:
            return whole
        features = whole["all"].features
    else:
        features = read_npy(found, limits)
    ids = _list(path / "ids.txt", limits)
    lists = _first(path, ("labels",), (".txt", ".txt.gz", ".txt.xz"))
    if lists is not None:
        rows = [_names(lists, number, line, separator) for number, line in lines(lists, limits, Problems())]
        data = LabelData.from_lists(
            rows, features=None, source={"format": "folder", "separator": separator}, problems=problems
        )
        checked = from_matrices(path, features, None, None, ids, {}, problems)
        if len(checked) != len(data):
            raise DataError(f"{lists}: must have a line a row, {len(checked)}, has {len(data)}.")
        return {
            "all": LabelData(
                None,
                checked.features,
                data.indptr,
                data.indices,
                data.label_names,
                ids=ids,
                source=data.source,
                problems=problems,
            )
        }
    target = _first(path, ("Y",), (".npy", ".npz"))
    y: Any = None
    if target is not None and target.suffix == ".npy":
        y = read_npy(target, limits)
    elif target is not None:
        arrays = read_arrays(target, limits)
        name = "Y" if any(n.startswith("Y") for n in arrays) else ""
        y = _matrix(target, {(f"Y_{n}" if not name else n): v for n, v in arrays.items()}, "Y", limits)
    names = _list(path / "label_names.txt", limits)
    return {"all": from_matrices(path, features, y, names, ids, {"format": "folder"}, problems)}


def _names(path: Path, number: int, line: str, separator: str) -> list[str]:
    try:
        return split_labels(line, separator) or []
    except ValueError as error:
        raise DataError(f"{path}, line {number}: {error}, got {line[:60]!r}.") from None


def _first(folder: Path, stems: Sequence[str], suffixes: Sequence[str]) -> Path | None:
    return next((p for s in stems for e in suffixes if (p := folder / f"{s}{e}").is_file()), None)


def _list(path: Path, limits: Limits) -> list[str] | None:
    return [line for _, line in lines(path, limits, Problems())] if path.is_file() else None
