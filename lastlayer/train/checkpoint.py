"""Checkpoints that are safe to open and never half-written.

A checkpoint is one safetensors file. It holds the tensors by number. Its metadata hold the rest of the state as JSON,
with references to the tensors, and a BLAKE2 digest of both. The file is written under a temporary name, flushed to
disk and renamed, so a process that is killed at any moment leaves the previous file or the new one. Reading unpickles
nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from lastlayer.runs import RunError, write_atomically

_KEY = "~"  # marks an encoded value among plain ones


def encode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Turn nested dictionaries, lists, tuples, numbers, strings and tensors into JSON; tensors move to `tensors`."""
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {_KEY: "tensor", "name": name}
    if isinstance(value, dict):
        if all(type(k) is str for k in value) and _KEY not in value:
            return {k: encode(v, tensors) for k, v in value.items()}
        return {_KEY: "dict", "items": [[encode(k, tensors), encode(v, tensors)] for k, v in value.items()]}
    if isinstance(value, tuple):
        return {_KEY: "tuple", "items": [encode(v, tensors) for v in value]}
    if isinstance(value, list):
        return [encode(v, tensors) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {_KEY: "float", "value": str(value)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    for kind in (str, int, float):  # a subclass, e.g. an enumeration or a NumPy number
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"checkpoint: state must hold plain values and tensors, got {type(value).__name__}.")


def decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Undo :func:`encode`."""
    if isinstance(value, list):
        return [decode(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_KEY)
    if kind is None:
        return {k: decode(v, tensors) for k, v in value.items()}
    if kind == "tensor":
        return tensors[value["name"]]
    if kind == "dict":
        return {decode(k, tensors): decode(v, tensors) for k, v in value["items"]}
    if kind == "tuple":
        return tuple(decode(v, tensors) for v in value["items"])
    if kind == "float":
        return float(value["value"])
    raise ValueError(f"unknown kind {kind!r}")


def _digest(text: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.blake2b(text.encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()


def write(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(encode(state, tensors), allow_nan=False)
    write_atomically(path, save(tensors, {"format": "lastlayer-1", "state": text, "digest": _digest(text, tensors)}))


def read(path: Path) -> dict[str, Any]:
    """Read a checkpoint; damage anywhere in it raises an error of one line."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if metadata.get("format") != "lastlayer-1":
            raise ValueError("not a checkpoint of this package")
        if _digest(metadata["state"], tensors) != metadata["digest"]:
            raise ValueError("its digest does not match its content")
        state: dict[str, Any] = decode(json.loads(metadata["state"]), tensors)
        return state
    except FileNotFoundError:
        raise RunError(f"{path}: no such checkpoint.") from None
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunError(f"{path}: damaged checkpoint: {str(error)[:100]}.") from None
