"""Lines of a file that nobody vouches for: decompressed in small steps, with a bound on what comes out."""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

OnError = Literal["raise", "skip"]
_STEP = 1 << 18


class DataError(ValueError):
    """A file that cannot be read as asked: one line that names the file, the place and the text that offends."""


@dataclass(frozen=True)
class Limits:
    """What a hostile file may cost.

    A reader decompresses at most ``base_bytes + ratio * size of the file`` bytes, and holds at most one line of
    ``max_line`` bytes besides what it has accepted. Accepted rows take a few bytes of memory a byte read, at worst
    about 100 (rows of one character). Sizes that a header declares allocate nothing.
    """

    max_line: int = 16 << 20
    base_bytes: int = 16 << 20
    ratio: float = 100.0
    max_columns: int = 100_000_000

    def total(self, path: Path) -> int:
        """The number of bytes that may come out of a file."""
        return int(self.base_bytes + self.ratio * path.stat().st_size)


@dataclass
class Problems:
    """What was wrong with a file: raised at once, or counted and listed."""

    on_error: OnError = "raise"
    count: int = 0
    listed: list[str] = field(default_factory=list)
    keep: int = 1000

    def report(self, path: Any, line: int, rule: str, text: Any = None) -> None:
        """Raise a DataError, or note it and go on with the next line."""
        message = f"{path}, line {line}: {rule}" + ("." if text is None else f", got {shorten(text)}.")
        if self.on_error == "raise":
            raise DataError(message)
        self.count += 1
        if len(self.listed) < self.keep:
            self.listed.append(message)


def shorten(text: Any, width: int = 80) -> str:
    """Return the repr of a text, cut to a width."""
    shown = repr(text[: 2 * width] if isinstance(text, str | bytes) else text)
    return shown if len(shown) <= width else shown[: width - 3] + "..."


def plain_suffix(path: Path) -> str:
    """Return the suffix without that of a compressor: ``a.tsv.gz`` is ``.tsv``."""
    suffixes = [s.lower() for s in path.suffixes]
    while suffixes and suffixes[-1] in (".gz", ".xz", ".bz2"):
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def chunks(path: Path, limits: Limits) -> Iterator[bytes]:
    """Yield the bytes of a file, decompressed if its first bytes say so."""
    allowed = limits.total(path)
    with path.open("rb") as file:
        start = file.read(6)
        file.seek(0)
        make = _decompressor(start)
        pieces = iter(lambda: file.read(_STEP), b"") if make is None else _decompress(path, file, make)
        for piece in pieces:
            allowed -= len(piece)
            if allowed < 0 and make is not None:
                raise DataError(
                    f"{path}: decompresses to more than {limits.total(path)} bytes, over {limits.ratio:.0f} times its "
                    "size. If you trust it, decompress it first."
                )
            yield piece


def _decompressor(start: bytes) -> Any:
    if start[:2] == b"\x1f\x8b":
        return lambda: zlib.decompressobj(31)
    if start[:6] == b"\xfd7zXZ\x00":
        return lambda: lzma.LZMADecompressor(memlimit=256 << 20)
    if start[:3] == b"BZh":
        return bz2.BZ2Decompressor
    return None


def _decompress(path: Path, file: Any, make: Any) -> Iterator[bytes]:
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
        raise DataError(f"{path}: cannot be decompressed: {error}.") from None


def read_bytes(path: Path, limits: Limits, most: int) -> bytes:
    """Return a whole small file, decompressed."""
    parts, size = [], 0
    for piece in chunks(path, limits):
        size += len(piece)
        if size > most:
            raise DataError(f"{path}: must be smaller than {most} bytes.")
        parts.append(piece)
    return b"".join(parts)


def lines(path: Path, limits: Limits, problems: Problems) -> Iterator[tuple[int, str]]:
    """Yield ``(number from 1, line without its end)``; a line too long or not UTF-8 is a problem."""
    number, rest, dropping = 0, b"", False

    def decode(raw: bytes) -> str | None:
        if number == 1 and raw[:3] == b"\xef\xbb\xbf":
            raw = raw[3:]
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            problems.report(path, number, "must be UTF-8 text", raw)
            return None
        if "\0" in text:
            problems.report(path, number, "must be text without NUL bytes", text)
            return None
        return text.removesuffix("\r")

    for piece in chunks(path, limits):
        parts = piece.split(b"\n")
        for i, part in enumerate(parts):
            last = i == len(parts) - 1
            rest = b"" if dropping else rest + part
            if len(rest) > limits.max_line:
                problems.report(path, number + 1, f"must be shorter than {limits.max_line} bytes", rest[:100])
                rest, dropping = b"", True
            if last:
                break
            number += 1
            if not dropping and (text := decode(rest)) is not None:
                yield number, text
            rest, dropping = b"", False
    if rest:
        number += 1
        if (text := decode(rest)) is not None:
            yield number, text
