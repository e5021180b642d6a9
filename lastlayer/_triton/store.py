"""Kernels that come with the package, so that a first call compiles nothing: PTX, which every GPU since 2020 takes.

There is a file per kernel with its variants, made by ``make kernels``. A variant is found by a hash of the source, of
the types of the arguments and of the constants. After a change of the source it is compiled as any other, until it is
made anew.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import functools
import hashlib
import inspect
import json
import lzma
from pathlib import Path
from typing import Any, NamedTuple

import triton
import triton.language as tl

FOLDER = Path(__file__).parent / "kernels"
LEAST = (8, 0)  # the compute capability that the kernels need
_HEADER = 8  # bytes that hold the length of the index


class Kernel(NamedTuple):
    """A kernel as the driver takes it."""

    name: str
    warps: int
    shared: int  # bytes of memory that the threads of a program share
    types: tuple[str, ...]  # of its parameters
    ptx: bytes


def key_of(kernel: Any, specialization: list[Any], options: dict[str, Any]) -> str:
    """Return a hash of all that a kernel is compiled for; `options` are those that are no constants of it."""
    told = repr((fingerprint(kernel), [tuple(one) for one in specialization], sorted(options.items())))
    return hashlib.sha256(told.encode()).hexdigest()[:24]


@functools.cache
def fingerprint(kernel: Any) -> str:
    """Return a hash of the source of a kernel, and of the functions and numbers of this package that it uses."""
    found: dict[str, str] = {}
    todo = [kernel]
    while todo:
        function = todo.pop().fn
        found[f"{function.__module__}.{function.__name__}"] = inspect.getsource(function)
        for name in function.__code__.co_names:
            value = function.__globals__.get(name)
            # What is true or false tells the versions of Triton apart; what they make of a kernel serves all of them.
            if isinstance(value, tl.constexpr) and not isinstance(value.value, bool):
                found[f"{function.__module__}:{name}"] = repr(value.value)
            elif isinstance(value, triton.JITFunction) and value.fn.__module__.startswith("lastlayer."):
                todo += [value] if f"{value.fn.__module__}.{value.fn.__name__}" not in found else []
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()


def file_of(kernel: Any) -> Path:
    """Return the file with the variants of a kernel."""
    return FOLDER / f"{kernel.fn.__module__.rsplit('.', 1)[-1]}.{kernel.fn.__name__}.xz"


def find(kernel: Any, key: str) -> Kernel | None:
    """Return a variant of a kernel, if it comes with the package."""
    return read(file_of(kernel)).get(key)


@functools.cache
def read(path: Path) -> dict[str, Kernel]:
    """Return the kernels of a file by their keys."""
    if not path.exists():
        return {}
    data = lzma.decompress(path.read_bytes())
    end = _HEADER + int.from_bytes(data[:_HEADER], "little")
    return {
        key: Kernel(name, warps, shared, tuple(types), data[end + first : end + last])
        for key, (name, warps, shared, types, first, last) in json.loads(data[_HEADER:end]).items()
    }


def write(path: Path, kernels: dict[str, Kernel]) -> None:
    """Write a file of kernels, in the order of their sizes: much is the same from one to the next."""
    index, parts, place = {}, [], 0
    for key, one in sorted(kernels.items(), key=lambda item: (len(item[1].ptx), item[0])):
        index[key] = (*one[:-1], place, place + len(one.ptx))
        parts.append(one.ptx)
        place += len(one.ptx)
    head = json.dumps(index).encode()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(lzma.compress(len(head).to_bytes(_HEADER, "little") + head + b"".join(parts), preset=9))
