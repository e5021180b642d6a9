"""Kernels that come with the package, so that a first call compiles nothing: PTX, which every GPU since 2020 takes.

There is a file per kernel with its variants, made by ``make kernels``. The key of a variant is a hash of the source, of
the types of the arguments and of the constants, followed by what the variant assumes of each argument. After a change
of the source a variant is compiled as any other, until it is made anew.

A file is an index and groups of variants, each compressed by itself: a call reads the groups that it needs.

The driver translates PTX, which takes up to a second for the largest kernels. For one kind of GPU these come
translated, too, in files of the same form.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import functools
import hashlib
import inspect
import json
import lzma
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import triton
import triton.language as tl

FOLDER = Path(__file__).parent / "kernels"
LEAST = (8, 0)  # the compute capability that the kernels need
GROUP = 32  # variants at most; larger groups are smaller in all, but take longer to read
NATIVE = (9, 0)  # the compute capability for which large kernels come translated: H100, H200
LARGE = 175 << 10  # bytes of PTX
_ELF = b"\x7fELF"  # how a translated kernel begins
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 4, "lp": 0, "pb": 0}]  # for text
_FOR_CODE = [{"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 0, "lp": 4, "pb": 4}]  # for instructions of 16 bytes
_HEADER = 8  # bytes that hold the length of the index
_HASH = 24  # characters
NOTHING, ONE, MULTIPLE = "-", "1", "D"  # is assumed of an argument; that it is 1; that it is a multiple of 16


class Kernel(NamedTuple):
    """A kernel as the driver takes it."""

    name: str
    warps: int
    shared: int  # bytes of memory that the threads of a program share
    types: tuple[str, ...]  # of its parameters
    ptx: bytes  # or what it was translated to


def key_of(kernel: Any, specialization: list[Any], options: dict[str, Any]) -> str:
    """Return the key of a variant from all that it is compiled for; `options` are those that are no constants of it."""
    types: list[tuple[Any, ...]] = []
    assumed = ""
    for (kind, extra), parameter in zip(specialization, kernel.params, strict=True):
        if parameter.is_constexpr or (kind == "constexpr" and extra is None):
            types.append((kind, extra))
            assumed += NOTHING
        elif kind == "constexpr":  # 1, the only number that Triton takes as a constant
            types.append(("i32",))
            assumed += ONE
        else:
            types.append((kind,))
            assumed += MULTIPLE if extra == "D" else NOTHING
    told = repr((fingerprint(kernel), types, sorted(options.items())))
    return hashlib.sha256(told.encode()).hexdigest()[:_HASH] + assumed


def weaker(specialization: list[Any], kernel: Any) -> list[Any]:
    """Return the specialization of the variant that assumes nothing of the arguments but their types."""
    found: list[Any] = []
    for (kind, extra), parameter in zip(specialization, kernel.params, strict=True):
        if parameter.is_constexpr or (kind == "constexpr" and extra is None):
            found.append((kind, extra))
        else:
            found.append(("i32" if kind == "constexpr" else kind, ""))
    return found


_fingerprints: dict[int, tuple[str, Any]] = {}  # by the address of a kernel, since Triton parses it for its hash


def fingerprint(kernel: Any) -> str:
    """Return a hash of the source of a kernel, and of the functions and numbers of this package that it uses."""
    known = _fingerprints.get(id(kernel))
    if known is None:
        known = _fingerprints[id(kernel)] = _fingerprint(kernel), kernel  # which stays alive
    return known[0]


def _fingerprint(kernel: Any) -> str:
    found: dict[str, str] = {}
    todo = [kernel]
    while todo:
        one = todo.pop()
        function = one.fn
        # Triton has read the source, which takes long: the file is tokenized for it.
        source = "".join(one.raw_src) if hasattr(one, "raw_src") else inspect.getsource(function)
        found[f"{function.__module__}.{function.__name__}"] = source
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


def native_of(path: Path) -> Path:
    """Return the file with those variants that come translated."""
    return path.parent / f"sm_{NATIVE[0]}{NATIVE[1]}" / path.name


def find(kernel: Any, key: str) -> str | None:
    """Return the key of the variant that serves a call best, if one comes with the package."""
    return best(_index(file_of(kernel))[0], key)


def best(keys: Collection[str], key: str) -> str | None:
    """Return which of some variants of a kernel assumes nothing that is not so, and most of what is."""
    if key in keys:
        return key
    head, wanted = key[:_HASH], key[_HASH:]
    fit = [
        one
        for one in keys
        if one.startswith(head) and all(has in (NOTHING, asked) for has, asked in zip(one[_HASH:], wanted, strict=True))
    ]
    return min(fit, key=lambda one: one.count(NOTHING), default=None)


def load(kernel: Any, key: str) -> Kernel:
    """Return a variant of a kernel."""
    return _kernel(file_of(kernel), key)


def load_native(kernel: Any, key: str) -> bytes | None:
    """Return a variant of a kernel in the code of the GPUs of `NATIVE`, if it comes with the package."""
    path = native_of(file_of(kernel))
    return _kernel(path, key).ptx if key in _index(path)[0] else None


def read(path: Path) -> dict[str, Kernel]:
    """Return the kernels of a file by their keys."""
    return {key: _kernel(path, key) for key in _index(path)[0]}


def _kernel(path: Path, key: str) -> Kernel:
    index, _ = _index(path)
    name, warps, shared, types, group, first, last = index[key]
    return Kernel(name, warps, shared, tuple(types), _restored(_group(path, group)[first:last]))


@functools.cache
def _index(path: Path) -> tuple[dict[str, list[Any]], list[tuple[int, int]]]:
    """Return what a file says of its variants, and where its groups begin and end."""
    if not path.exists():
        return {}, []
    with path.open("rb") as file:
        size = int.from_bytes(file.read(_HEADER), "little")
        index, sizes = json.loads(lzma.decompress(file.read(size)))
    ends = [_HEADER + size + sum(sizes[: i + 1]) for i in range(len(sizes))]
    return index, [(end - length, end) for length, end in zip(sizes, ends, strict=True)]


@functools.lru_cache(maxsize=8)
def _group(path: Path, group: int) -> bytes:
    first, last = _index(path)[1][group]
    with path.open("rb") as file:
        file.seek(first)
        return lzma.decompress(file.read(last - first))


def forget() -> None:
    """Read files anew, after they have been written."""
    _index.cache_clear()
    _group.cache_clear()


def write(path: Path, kernels: dict[str, Kernel]) -> None:
    """Write a file of kernels, in the order of their sizes: much is the same from one to the next."""
    order = sorted(kernels.items(), key=lambda item: (len(item[1].ptx), item[0]))
    index: dict[str, tuple[Any, ...]] = {}
    groups: list[bytes] = []
    for start in range(0, len(order), GROUP):
        group = b""
        for key, one in order[start : start + GROUP]:
            text = _shortened(one.ptx)
            assert _restored(text) == one.ptx
            index[key] = (*one[:-1], len(groups), len(group), len(group) + len(text))
            group += text
        groups.append(group)
    parts = [lzma.compress(part, filters=_FOR_CODE if part.startswith(_ELF) else _FILTERS) for part in groups]
    head = lzma.compress(json.dumps((index, [len(part) for part in parts])).encode(), filters=_FILTERS)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join([len(head).to_bytes(_HEADER, "little"), head, *parts]))
    forget()


def _shortened(ptx: bytes) -> bytes:
    """Number each register from the one before it: where two kernels do the same, they then read the same."""
    if ptx.startswith(_ELF):
        return ptx
    last: dict[bytes, int] = {}

    def step(found: re.Match[bytes]) -> bytes:
        kind, number = found[1], int(found[2])
        before, last[kind] = last.get(kind, 0), number
        return b"%%%s%+d" % (kind, number - before)

    return re.sub(rb"%([a-z]+)(\d+)", step, ptx)


def _restored(text: bytes) -> bytes:
    """Return the PTX that was shortened."""
    if text.startswith(_ELF):
        return text
    last: dict[bytes, int] = {}

    def number(found: re.Match[bytes]) -> bytes:
        kind = found[1]
        last[kind] = last.get(kind, 0) + int(found[2])
        return b"%%%s%d" % (kind, last[kind])

    return re.sub(rb"%([a-z]+)([+-]\d+)", number, text)
