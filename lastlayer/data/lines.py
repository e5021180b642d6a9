"""Lines of a file that nobody vouches for, and what is wrong with them."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lastlayer.data.source import PEEK, DataError, Limits, Source, chunks

OnError = Literal["raise", "skip"]
_NOT_TEXT = ("idna", "punycode", "undefined", "unicode_escape", "raw_unicode_escape", "utf-7", "mbcs", "oem")
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark it starts with
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


@dataclass
class Problems:
    """What was wrong with a file: raised at once, or counted and listed. What could be mended is counted apart."""

    on_error: OnError = "raise"
    count: int = 0
    listed: list[str] = field(default_factory=list)
    keep: int = 1000
    mended: int = 0
    mended_first: str = ""
    told: bool = False  # whether the user has heard of them

    def report(self, path: Any, line: int, rule: str, text: Any = None) -> None:
        """Raise a DataError, or note it and go on with the next line."""
        message = f"{path}, line {line}: {rule}" + ("." if text is None else f", got {shorten(text)}.")
        if self.on_error == "raise":
            raise DataError(message)
        self.count += 1
        if len(self.listed) < self.keep:
            self.listed.append(message)

    def mend(self, path: Any, line: int, what: str) -> None:
        """Note something that was put right."""
        self.mended += 1
        self.mended_first = self.mended_first or f"{path}, line {line}: {what}"


def shorten(text: Any, width: int = 80) -> str:
    """Return the repr of a text, cut to a width."""
    shown = repr(text[: 2 * width] if isinstance(text, str | bytes) else text)
    shown = shown.encode("utf-8", "backslashreplace").decode()
    return shown if len(shown) <= width else shown[: width - 3] + "..."


def encoding_of(path: Path | Source, encoding: str | None, limits: Limits) -> str:
    """Return the encoding of a text file: the one asked for, or the one that the file's first bytes tell."""
    if encoding is not None:
        try:
            info = codecs.lookup(encoding)
            if info.name not in _NOT_TEXT and getattr(info, "_is_text_encoding", True):
                return info.name
        except (LookupError, TypeError, ValueError):
            pass
        raise DataError(
            f"{path}: `encoding` must be an encoding of text that Python knows, e.g. utf-8, utf-16, latin-1 or cp1252, "
            f"got {encoding!r}."
        )
    source = path if isinstance(path, Source) else Source(path)
    try:
        first = next(chunks(Source(source.path, content=source.start()), limits), b"")
    except DataError:
        first = b""  # the reader will say what is wrong with it
    return next((name for mark, name in _MARKS if first.startswith(mark)), "utf-8")


def pieces(path: Path | Source, limits: Limits, encoding: str | None = None, *, marked: bool = False) -> Iterator[str]:
    """Yield the text of a file in pieces; `marked` keeps a byte order mark that encoding it again would not write."""
    name = encoding_of(path, encoding, limits)
    decoder = codecs.getincrementaldecoder(name)("strict")
    read, first = 0, not marked
    try:
        for piece in chunks(path, limits):
            text = decoder.decode(piece)
            yield text.removeprefix("\ufeff") if first else text
            read, first = read + len(piece), first and not text
        yield decoder.decode(b"", True)
    except UnicodeError as error:
        raise DataError(f"{path}: must be {name} text: {error} (near byte {read}).{_hint(name)}") from None


def _hint(encoding: str) -> str:
    return " If it is in another encoding, name it (`encoding`), e.g. latin-1." if encoding == "utf-8" else ""


def lines(
    path: Path | Source, limits: Limits, problems: Problems, encoding: str | None = None
) -> Iterator[tuple[int, str]]:
    """Yield ``(number from 1, line without its end)``; a line too long or not decodable is a problem.

    Lines end with LF or CR LF; in a file that starts with 256 KB without an LF, with CR.
    """
    name = encoding_of(path, encoding, limits)
    if _breaks_lines(name):
        blocks: Iterable[bytes] = (text.encode() for text in pieces(path, limits, encoding))
        name = "utf-8"
    else:
        blocks = chunks(path, limits)
    number, rest, dropping, end = 0, bytearray(), False, b""

    def decode(raw: bytes) -> str | None:
        if number == 1:
            raw = raw.removeprefix(codecs.BOM_UTF8) if name == "utf-8" else raw
        try:
            text = raw.decode(name)
        except UnicodeError:
            rule = "must be UTF-8 text (another encoding must be named: --encoding latin-1, for instance)"
            problems.report(path, number, rule if name == "utf-8" else f"must be {name} text", raw)
            return None
        if "\0" in text:
            wide = raw[1:2] == b"\0" or raw[:1] == b"\0"
            problems.report(path, number, "must be text without NUL bytes" + (" (is it UTF-16?)" if wide else ""), text)
            return None
        return text.removesuffix("\r")

    for block in blocks:
        end = end or (b"\n" if b"\n" in block or b"\r" not in block else b"\r")
        parts = block.split(end)
        for i, part in enumerate(parts):
            last = i == len(parts) - 1
            if not dropping:
                rest += part
            if len(rest) > limits.max_line:
                problems.report(path, number + 1, f"must be shorter than {limits.max_line} bytes", bytes(rest[:100]))
                rest, dropping = bytearray(), True
            if last:
                break
            number += 1
            if not dropping and (text := decode(bytes(rest))) is not None:
                yield number, text
            rest, dropping = bytearray(), False
    if rest:
        number += 1
        if (text := decode(bytes(rest))) is not None:
            yield number, text


def _breaks_lines(encoding: str) -> bool:
    """Whether the byte of a line end can mean something else, so that a line cannot be cut before it is decoded."""
    return encoding.startswith(("utf-16", "utf-32", "iso2022", "hz")) or "\n".encode(encoding) != b"\n"


def head(source: Source, limits: Limits, encoding: str | None, most: int = 200) -> list[str]:
    """Return the first lines of a text file without taking them; what cannot be read is left out."""
    first: list[str] = []
    raw = source.start()
    try:
        for _, line in lines(Source(source.path, content=raw), limits, Problems("skip"), encoding):
            first.append(line)
            if len(first) > most:
                return first[:most]
    except DataError:  # a compressed file ends in the middle of a stream here; the lines so far are whole
        return first
    return first[:-1] if len(raw) == PEEK else first


def opening(source: Source, limits: Limits, encoding: str | None = None) -> str:
    """Return how a text file begins, for a first line that `head` leaves out because it is longer than what it sees."""
    try:
        parts = pieces(Source(source.path, content=source.start()), limits, encoding)
        return next((text for part in parts if (text := part.lstrip())), "")
    except DataError:
        return ""
