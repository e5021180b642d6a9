"""Where bytes come from: a file, an archive of one file, a pipe or standard input, with a bound on what comes out."""

from __future__ import annotations

import bz2
import io
import lzma
import os
import sys
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PEEK = _STEP = 1 << 18
_COMPRESSED = (".gz", ".xz", ".bz2", ".zip")
_FOREIGN = {  # files that people try, and what to do with them
    b"\x28\xb5\x2f\xfd": "is compressed with zstd. Decompress it first",
    b"\x89HDF": "is an HDF5 file. Save its arrays as .npz",
    b"%PDF": "is a PDF file. Extract its text first",
    b"SQLi": "is a SQLite database. Export a table as CSV",
    b"\xd0\xcf\x11\xe0": "is an old Office document. Save the sheet as CSV",
    b"\x80\x04\x95": "is a pickle, which can run code when it is loaded. Save the data as .npz, CSV or JSON lines",
    b"\x80\x05\x95": "is a pickle, which can run code when it is loaded. Save the data as .npz, CSV or JSON lines",
}


class DataError(ValueError):
    """A file that cannot be read as asked: one line that names the file, the place and the offending text."""


@dataclass(frozen=True)
class Limits:
    """What a hostile file may cost.

    A reader decompresses at most ``base_bytes + ratio * size of the file`` bytes, and holds at most one line of
    ``max_line`` bytes besides what it has accepted. Accepted rows take a few bytes of memory per byte read, at worst
    about 100 (rows of one character). Sizes that a header declares allocate nothing, and a file may declare at most
    ``base_labels + ratio * size of the file`` labels.
    """

    max_line: int = 16 << 20
    base_bytes: int = 16 << 20
    ratio: float = 100.0
    max_columns: int = 100_000_000
    base_labels: int = 2_000_000

    def total(self, path: Path | Source) -> int:
        """Return the number of bytes that may come out of a file."""
        return int(self.base_bytes + self.ratio * _size(path))

    def labels(self, path: Path | Source) -> int:
        """Return the number of labels that a file may declare."""
        return min(self.max_columns, int(self.base_labels + self.ratio * _size(path)))


def _size(path: Path | Source) -> int:
    return path.size if isinstance(path, Source) else path.stat().st_size


class Source:
    """Bytes with a name: a path, ``-`` for standard input, or bytes that are already here.

    Args:
        path: The path, or ``"-"``.
        content: The bytes, where there is no file to open.
    """

    def __init__(self, path: str | Path, content: bytes | None = None) -> None:
        self.path = Path(path)
        self.content = content
        self.name = str(path)
        self.is_stream = False
        self._file: Any = None
        self._member: zipfile.ZipInfo | None = None
        self._start: bytes | None = None
        if content is not None:
            self.size = len(content)
        elif str(path) == "-":
            self.name, self.is_stream, self.size = "standard input", True, 0
            self._file = getattr(sys.stdin, "buffer", sys.stdin)
        else:
            self._look()

    def __str__(self) -> str:
        return self.name

    def _look(self) -> None:
        if not self.path.exists():
            raise DataError(f"{self.path}: no such file or folder.")
        if self.path.is_fifo():
            self.is_stream, self.size = True, 0
            self._file = open(os.fspath(self.path), "rb")  # noqa: SIM115  it is read once, by `open`
            return
        if not (self.path.is_file() or self.path.is_dir()):
            raise DataError(f"{self.path}: must be a file, a pipe or a folder.")
        self.size = 0 if self.path.is_dir() else self.path.stat().st_size
        if self.path.is_file() and zipfile.is_zipfile(self.path) and plain_suffix(self.path) != ".npz":
            self._member = _only_member(self.path)

    @property
    def suffix(self) -> str:
        """The suffix that tells the format: ``.tsv`` for ``a.tsv.gz``, that of the file inside for a zip archive."""
        if self._member is not None and not plain_suffix(self.path):
            return plain_suffix(Path(self._member.filename))
        return plain_suffix(self.path)

    def start(self) -> bytes:
        """Return the first bytes (256 KB), as they are stored, without taking them."""
        if self._start is None:
            parts, left = [], PEEK
            with self.open() as file:
                while left > 0 and (piece := _read(self, file, left)):
                    parts.append(piece)
                    left -= len(piece)
            self._start = b"".join(parts)
        return self._start

    def open(self) -> Any:
        """Return a binary file; a stream can be read once."""
        if self.content is not None:
            return io.BytesIO(self.content)
        if self.is_stream:
            return _Again(self)
        try:
            if self._member is not None:
                return zipfile.ZipFile(self.path).open(self._member)
            return self.path.open("rb")
        except (OSError, RuntimeError, NotImplementedError, zipfile.BadZipFile) as error:
            raise DataError(f"{self.name}: cannot be opened: {getattr(error, 'strerror', None) or error}.") from None

    def is_compressed(self) -> bool:
        """Whether more bytes may come out than are stored."""
        return self._member is not None or _decompressor(self.start()) is not None


class _Again:
    """A stream whose first bytes were looked at: they come again, then the rest."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.rest = io.BytesIO(source._start or b"")

    def __enter__(self) -> _Again:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self, most: int) -> bytes:
        """Return up to `most` bytes."""
        if piece := self.rest.read(most):
            return piece
        piece = self.source._file.read(most)
        self.source.size += len(piece)
        return bytes(piece)


def plain_suffix(path: Path) -> str:
    """Return the suffix without that of a compressor: ``a.tsv.gz`` is ``.tsv``."""
    suffixes = [s.lower() for s in path.suffixes]
    while suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _only_member(path: Path) -> zipfile.ZipInfo | None:
    """Return the file in a zip archive of one file; None for an archive of arrays."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = [i for i in archive.infolist() if not i.is_dir() and not i.filename.startswith(("__MACOSX", "."))]
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise DataError(f"{path}: must be a zip archive: {error}.") from None
    if any(info.filename == "[Content_Types].xml" for info in members):
        raise DataError(f"{path}: is an Office document. Save the sheet as CSV.")
    if members and all(info.filename.endswith(".npy") for info in members):
        return None
    if len(members) != 1:
        shown = ", ".join(info.filename[:40] for info in members[:5])
        raise DataError(f"{path}: must hold one file, holds {len(members)} ({shown}). Unpack it and name one.")
    return members[0]


def chunks(path: Path | Source, limits: Limits) -> Iterator[bytes]:
    """Yield the bytes of a file, decompressed if its first bytes say so."""
    source = path if isinstance(path, Source) else Source(path)
    start, out = source.start()[:6], 0
    for begin, what in _FOREIGN.items():
        if start.startswith(begin):
            raise DataError(f"{source.name}: {what}.")
    make = _decompressor(start)
    with source.open() as file:
        pieces = iter(lambda: _read(source, file), b"") if make is None else _decompress(source, file, make)
        for piece in pieces:
            out += len(piece)
            if out > limits.total(source) and (make is not None or source.is_compressed()):
                raise DataError(
                    f"{source.name}: decompresses to more than {limits.total(source)} bytes, over {limits.ratio:.0f} "
                    "times its size. If you trust it, decompress it first."
                )
            yield piece


def _read(source: Source, file: Any, most: int = _STEP) -> bytes:
    try:
        return bytes(file.read(most))
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, NotImplementedError) as error:
        raise DataError(f"{source.name}: cannot be read: {error}.") from None


def _decompressor(start: bytes) -> Any:
    if start[:2] == b"\x1f\x8b":
        return lambda: zlib.decompressobj(31)
    if start[:6] == b"\xfd7zXZ\x00":
        return lambda: lzma.LZMADecompressor(memlimit=256 << 20)
    if start[:3] == b"BZh":
        return bz2.BZ2Decompressor
    return None


def _decompress(source: Source, file: Any, make: Any) -> Iterator[bytes]:
    """Yield what comes out in steps of bounded size; several streams in a row are one file."""
    engine, data = make(), file.read(_STEP)
    try:
        while data or not engine.eof:
            out = engine.decompress(data, _STEP)
            if out:
                yield out
            if engine.eof:
                data = (engine.unused_data or file.read(_STEP)).lstrip(b"\0") or file.read(_STEP)
                if not data:
                    return
                engine = make()
                continue
            if isinstance(getattr(engine, "unconsumed_tail", None), bytes):  # zlib hands back what it did not take
                data = engine.unconsumed_tail or file.read(_STEP)
                ended = not data and not out
            else:
                data = file.read(_STEP) if engine.needs_input else b""
                ended = engine.needs_input and not data
            if ended:
                raise EOFError("it ends in the middle of a stream")
    except (zlib.error, lzma.LZMAError, OSError, EOFError, ValueError, MemoryError) as error:
        raise DataError(f"{source.name}: cannot be decompressed: {error}.") from None


def read_bytes(path: Path | Source, limits: Limits, most: int) -> bytes:
    """Return a whole small file, decompressed."""
    parts, size = [], 0
    for piece in chunks(path, limits):
        size += len(piece)
        if size > most:
            raise DataError(f"{path}: must be smaller than {most} bytes.")
        parts.append(piece)
    return b"".join(parts)
