"""Single files of a run folder: atomic writes, JSON and YAML that is checked when it is read."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from lastlayer.runs.forms import FORMS, mismatch

FORMAT = 1
DEEPEST = 50  # levels of lists and objects in a JSON file
LARGEST_YAML = 1 << 20


class RunError(ValueError):
    """A run folder that is missing, unfinished or damaged. The message is one line and names the file."""


def damaged(path: Path, why: object) -> RunError:
    """Return the error for a file that is there but cannot be used."""
    return RunError(f"{path}: damaged: {' '.join(str(why).split())[:200].rstrip('.')}.")


def missing(path: Path) -> RunError:
    """Return the error for a file that must be there."""
    return RunError(f"{path}: not there. Is {path.parent} a finished run of `lastlayer train`?")


def write_atomically(path: Path, content: bytes) -> None:
    """Write a whole file or nothing: write under a temporary name, flush to disk, rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None  # not the temporary name
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in an error of the operating system that names none, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def plain(value: Any) -> Any:
    """Convert to what JSON can hold: NumPy numbers to Python numbers, non-finite numbers to null, the rest to text."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def to_json(value: dict[str, Any]) -> bytes:
    """Return a JSON file with the format number."""
    value = plain({"format": FORMAT, **value})
    try:
        return json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False).encode()
    except UnicodeEncodeError:  # a lone surrogate has no UTF-8, but JSON can escape it
        return json.dumps(value, indent=1, allow_nan=False).encode()


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON file and check its format number and its fields; None if there is no such file. Nan becomes null."""
    try:
        value = json.loads(
            path.read_text("utf-8"), parse_constant=lambda _: None, parse_float=in_range, parse_int=whole_in_range
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, error) from None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise damaged(path, f"must be an object of format {FORMAT}")
    if _is_deeper(value, DEEPEST):
        raise damaged(path, f"must not be nested more than {DEEPEST} levels deep")
    if (why := mismatch(value, FORMS.get(path.name, {}))) is not None:
        raise damaged(path, why)
    return value


def in_range(text: str) -> float:
    """Return a number of a JSON file that float64 can hold."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"must hold numbers in the range of float64, got {text[:20]}")
    return value


def whole_in_range(text: str) -> int:
    """Return a whole number of a JSON file that int64 can hold."""
    value = int(text) if len(text) < 20 else 1 << 63  # int() refuses thousands of digits in words of its own
    if abs(value) >= 1 << 63:
        raise ValueError(f"must hold whole numbers in the range of int64, got {text[:20]}...")
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested deeper than that: code that descends into them would not come back."""
    inside = [value]
    for _ in range(levels):
        every = (one.values() if isinstance(one, dict) else one for one in inside)
        inside = [one for some in every for one in some if isinstance(one, dict | list)]
    return bool(inside)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping. Tags that construct objects, and aliases, which can expand, are refused."""
    import yaml

    try:
        raw = path.read_bytes()
        if len(raw) > LARGEST_YAML:
            raise RunError(f"{path}: must be smaller than 1 MiB.")
        text = raw.decode("utf-8")
        if any(isinstance(t, yaml.AliasToken) for t in yaml.scan(text, Loader=yaml.SafeLoader)):
            raise RunError(f"{path}: must not use aliases.")
        value = yaml.safe_load(text)
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        if isinstance(error, RunError):
            raise
        raise RunError(f"{path}: must be YAML: {' '.join(str(error).split())[:160]}.") from None
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(k, str) for k in value):
        raise RunError(f"{path}: must hold fields and values, e.g. `loss: lml`.")
    return value
