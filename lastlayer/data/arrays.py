"""NumPy arrays, Parquet tables and folders of embeddings. Nothing is unpickled, and no declared size is believed."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from lastlayer.data.builder import Table, number_names
from lastlayer.data.fields import Fields
from lastlayer.data.labeldata import LabelData
from lastlayer.data.labels import is_torn, split_labels
from lastlayer.data.lines import Problems, lines
from lastlayer.data.sniff import sniff_fields
from lastlayer.data.source import DataError, Limits

PARTS = ("train", "valid", "test")


def read_npy(path: Path, limits: Limits) -> np.ndarray:
    """Return the array of a .npy file, memory-mapped; its header must agree with the size of the file."""
    with path.open("rb") as file:
        dtype, shape, order, start = _header(path, file)
    size = math.prod(shape) * dtype.itemsize
    if start + size != path.stat().st_size:
        raise DataError(f"{path}: the header must agree with the file, says {size} bytes of data at byte {start}.")
    if size == 0:
        return _empty(path, shape, dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=start, shape=shape, order=order)


def _empty(path: Any, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an array without entries; a shape such as (2**58, 0) costs memory later, so it is refused."""
    if max(shape, default=0) > 1_000_000:
        raise DataError(f"{path}: the header must hold the shape of an array with entries, got {shape}.")
    return np.empty(shape, dtype)


def _header(path: Any, file: Any) -> tuple[np.dtype, tuple[int, ...], Any, int]:
    start = file.read(12)
    wide = start[6:8] in (b"\2\0", b"\3\0")
    if len(start) < 12:
        raise DataError(f"{path}: must be a NumPy array, ends after {len(start)} bytes.")
    size = int.from_bytes(start[8:12] if wide else start[8:10], "little")
    if start[:6] != b"\x93NUMPY" or not (wide or start[6:8] == b"\1\0") or not 2 <= size <= 10_000:
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
            whole = np.frombuffer(raw, dtype).reshape(shape, order=order) if size else _empty(path, shape, dtype)
            out[name] = whole
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
        extra = {
            "weights": _weights(
                path, next((arrays[n] for n in (f"{prefix}weights", f"{prefix}weight") if n in arrays), None)
            ),
            "groups": strings(path, arrays[f"{prefix}groups"]) if f"{prefix}groups" in arrays else None,
        }
        data = from_matrices(path, features, target, texts, row_ids, {"format": "npz"}, problems, limits)
        parts[part] = with_columns(path, data, **extra)
    return parts


def strings(path: Any, value: np.ndarray) -> list[str]:
    """Return the entries of a one-dimensional array as text."""
    if value.ndim != 1 or value.dtype.kind not in "UiuS":
        raise DataError(f"{path}: names must be a list of strings, got {value.dtype} of shape {value.shape}.")
    try:
        out = [v.decode("utf-8", "replace") if isinstance(v, bytes) else str(v) for v in value.tolist()]
    except ValueError as error:  # code points beyond Unicode
        raise DataError(f"{path}: names must be Unicode text: {error}.") from None
    if any(is_torn(name) for name in out):
        raise DataError(f"{path}: names must be whole Unicode text, without half of a surrogate pair.")
    return out


def _weights(path: Any, value: np.ndarray | None) -> np.ndarray | None:
    if value is None:
        return None
    if value.ndim != 1 or value.dtype.kind not in "fiub" or not np.isfinite(value).all() or (value < 0).any():
        raise DataError(f"{path}: weights must be a list of finite numbers of at least 0.")
    return np.asarray(value, dtype=np.float64)


def with_columns(path: Any, data: LabelData, **columns: Any) -> LabelData:
    """Return the rows with weights and groups, if they have one entry per row."""
    for name, column in columns.items():
        if column is not None and len(column) != len(data):
            raise DataError(f"{path}: {name} must have one entry per row, {len(data)}, has {len(column)}.")
    return replace(data, **columns)


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
        fail("data must be finite numbers, one per index")
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
    limits: Limits | None = None,
) -> LabelData:
    """Put features and an indicator matrix (dense or CSR; or None) together."""
    if isinstance(x, np.ndarray):
        if x.ndim != 2 or x.dtype.kind not in "fiub":
            raise DataError(f"{path}: features must be a matrix of numbers, got {x.dtype} of shape {x.shape}.")
        if x.shape[1] == 0:
            raise DataError(f"{path}: features must have at least one column, got shape {x.shape}.")
        for first in range(0, len(x), 4096):
            if len(bad := np.argwhere(~np.isfinite(x[first : first + 4096]))):
                row, column = int(bad[0, 0]) + first, int(bad[0, 1])
                raise DataError(
                    f"{path}: features must be finite, got {x[row, column]} in row {row}, column {column}. "
                    "Replace such values or leave these rows out."
                )
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
        most = (limits or Limits()).labels(path)
        if names is None and width > most:
            raise DataError(f"{path}: must declare at most {most} labels for a file of its size, got {width}.")
    label_names: Sequence[str] = number_names(width) if names is None else names
    if len(label_names) != width or len(set(label_names)) != width:
        raise DataError(f"{path}: must name its {width} labels, each once, got {len(label_names)} names.")
    if ids is not None and len(ids) != n:
        raise DataError(f"{path}: must have one id per row, {n}, got {len(ids)}.")
    return LabelData(None, x, indptr, indices, label_names, ids=ids, source=source, problems=problems)


def read_parquet(
    path: Path, limits: Limits, problems: Problems, *, options: dict[str, Any], soft: frozenset[str] = frozenset()
) -> dict[str, LabelData]:
    """Read a Parquet table with a text or vector column and a column of label lists, by part if it names parts."""
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
            table, fields = _parquet_table(path, file, problems, options, soft)
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise (
            error if isinstance(error, DataError) else DataError(f"{path}: must be Parquet: {str(error)[:120]}.")
        ) from None
    source = {"format": "parquet", "how": fields.describe(), "suffix": ".parquet", "options": fields.options()}
    return table.by_part(path, table.build(path, problems, source))


def _parquet_table(
    path: Path, file: Any, problems: Problems, options: dict[str, Any], soft: frozenset[str]
) -> tuple[Table, Fields]:
    names = list(file.schema_arrow.names)
    batches = file.iter_batches(batch_size=1024)
    first = next(batches, None)
    records = [] if first is None else first.to_pylist()
    fields = sniff_fields(path, names, records[:200], options, cells=False, header=False, soft=soft)
    if not fields.text and not fields.vector:
        hint = "Name it, or name the label columns (--label-column) and the other numbers become features."
        raise DataError(f"{path}: must have a text or vector column, has {names[:12]}. {hint}")
    table = Table(fields.label_names)
    every = chain(records, (item for batch in batches for item in batch.to_pylist()))
    for number, item in enumerate(fields.watched(path, every, lambda item: item)):
        try:
            table.add(fields.row(item, number + 1, number, partial(problems.mend, path)))
        except ValueError as error:
            problems.report(path, number + 1, str(error), str(item)[:80])
    return table, fields


def read_folder(path: Path, limits: Limits, problems: Problems, separator: str = ",") -> dict[str, LabelData]:
    """Read a folder of embeddings: ``X.npy`` (or embeddings.npy, features.npy, .npz) and labels beside it.

    Labels: ``labels.txt`` (one line of names per row, with `separator` between) or ``Y.npy`` / ``Y.npz`` with
    ``label_names.txt``. ``ids.txt``, ``groups.txt`` and ``weights.npy`` are optional. Folders ``train``, ``valid`` and
    ``test`` inside are parts.
    """
    parts = {p: path / p for p in PARTS if (path / p).is_dir()}
    if parts:
        return {p: read_folder(folder, limits, problems, separator)["all"] for p, folder in parts.items()}
    features_path = _first(path, ("X", "embeddings", "features"), (".npy", ".npz"))
    if features_path is None:
        raise DataError(f"{path}: must hold X.npy, embeddings.npy or features.npy.")
    if features_path.suffix == ".npz":
        whole = read_npz(features_path, limits, problems)
        if "all" not in whole:
            return whole
        features = whole["all"].features
    else:
        features = read_npy(features_path, limits)
    ids = _list(path / "ids.txt", limits)
    lists = _first(path, ("labels",), (".txt", ".txt.gz", ".txt.xz"))
    if lists is not None:
        rows = [_names(lists, number, line, separator) for number, line in lines(lists, limits, Problems())]
        data = LabelData.from_lists(
            rows, features=None, source={"format": "folder", "separator": separator}, problems=problems
        )
        checked = from_matrices(path, features, None, None, ids, {}, problems)
        if len(checked) != len(data):
            raise DataError(f"{lists}: must have one line per row, {len(checked)}, has {len(data)}.")
        data = replace(data, features=checked.features, ids=ids)
        return {"all": with_columns(path, data, **_folder_columns(path, limits))}
    target = _first(path, ("Y",), (".npy", ".npz"))
    y: Any = None
    if target is not None and target.suffix == ".npy":
        y = read_npy(target, limits)
    elif target is not None:
        arrays = read_arrays(target, limits)
        name = "Y" if any(n.startswith("Y") for n in arrays) else ""
        y = _matrix(target, {(f"Y_{n}" if not name else n): v for n, v in arrays.items()}, "Y", limits)
    names = _list(path / "label_names.txt", limits)
    data = from_matrices(path, features, y, names, ids, {"format": "folder"}, problems, limits)
    return {"all": with_columns(path, data, **_folder_columns(path, limits))}


def _folder_columns(path: Path, limits: Limits) -> dict[str, Any]:
    weights_path = _first(path, ("weights",), (".npy",))
    weights = None if weights_path is None else _weights(weights_path, read_npy(weights_path, limits))
    return {"weights": weights, "groups": _list(path / "groups.txt", limits)}


def _names(path: Path, number: int, line: str, separator: str) -> list[str]:
    try:
        return split_labels(line, separator) or []
    except ValueError as error:
        raise DataError(f"{path}, line {number}: {error}, got {line[:60]!r}.") from None


def _first(folder: Path, stems: Sequence[str], suffixes: Sequence[str]) -> Path | None:
    return next((p for s in stems for e in suffixes if (p := folder / f"{s}{e}").is_file()), None)


def _list(path: Path, limits: Limits) -> list[str] | None:
    return [line for _, line in lines(path, limits, Problems())] if path.is_file() else None
