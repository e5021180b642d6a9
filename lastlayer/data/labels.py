"""From a cell to label names: separated names, JSON lists, Python lists, and which separator a column uses."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

SEPARATORS = (",", ";", "|")
WHOLE = ""  # the separator of cells that hold one name each
_QUOTED = r"""[uU]?(?:'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")"""
_ITEM = re.compile(rf"\s*(?:np\.str_\(\s*({_QUOTED})\s*\)|({_QUOTED})|([-+]?\d{{1,18}}))\s*(,|(?=['\"0-9uU+-])|$)")
_BRACKETS = {"[": "]", "(": ")", "{": "}"}
_OPEN = frozenset("[({s")  # an s for "set()"


class Ambiguous(ValueError):
    """Cells that can be read in two ways."""


def split_labels(cell: str | None, separator: str) -> list[str] | None:
    """Return the label names of a cell: separated names, a JSON list or a Python list."""
    if cell is None:
        return None
    cell = cell.strip()
    if cell[:1] in _OPEN and (items := list_in(cell)) is not None:
        return items
    if separator == WHOLE:
        return [cell] if cell else []
    return [name for part in (cell.split() if separator == " " else cell.split(separator)) if (name := part.strip())]


def list_in(cell: str) -> list[Any] | None:
    """Return the names that a cell holds as a JSON or Python list; None if it is not written as a list."""
    if not (cell[:1] in _BRACKETS and cell.endswith(_BRACKETS[cell[0]])) and cell != "set()":
        return None
    if cell.startswith("["):
        try:
            return label_list(json.loads(cell))
        except (json.JSONDecodeError, RecursionError):
            pass
    if cell in ("set()", "()", "{}", "[]"):
        return []
    items = _python_items(cell[1:-1])
    if items is None and (cell.startswith("[") or cell[1:2] in ("'", '"')):
        raise ValueError("labels must be a JSON list of names or a Python list of names")
    return items


def _python_items(inside: str) -> list[str] | None:
    """Read ``'a', "b", 3`` (or NumPy's ``'a' 'b'``); None if it is anything else."""
    items, at = [], 0
    while at < len(inside):
        match = _ITEM.match(inside, at)
        if match is None:
            return None
        text = match.group(1) or match.group(2)
        if text is None:
            items.append(str(int(match.group(3))))
        elif "\\" in text:
            try:
                items.append(str(ast.literal_eval(text)))  # one string literal, nothing else matches
            except (SyntaxError, ValueError):
                return None
        else:
            items.append(text.lstrip("uU")[1:-1])
        at = match.end()
    return whole(items)


def label_list(value: Any) -> list[str]:
    """Check a JSON value as a list of label names."""
    if not isinstance(value, list) or not all(isinstance(v, str | int) and not isinstance(v, bool) for v in value):
        raise ValueError("labels must be a list of names or whole numbers")
    return whole([str(v) for v in value])


def whole(names: list[str]) -> list[str]:
    """Refuse names that hold half of a surrogate pair, which no file can be written with, and drop blank ones.

    Splitting an empty cell in Python makes a list of one empty name, which stands for no label.
    """
    if any(is_torn(name) for name in names):
        raise ValueError("labels must be whole Unicode text, without half of a surrogate pair")
    return [name for name in names if name.strip()]


def is_torn(text: str) -> bool:
    """Whether a text holds half of a surrogate pair, such as an emoji that was cut in two."""
    if text.isascii():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def guess_separator(cells: Sequence[str]) -> str:
    """Return the separator of a column of labels, or raise `Ambiguous` with the flag that decides.

    One of ``, ; |`` that occurs decides. Cells with spaces alone are several names if the words recur in other cells,
    and one name if whole cells recur and their words do not.
    """
    plain = [c.strip() for c in cells if c.strip() and not _looks_like_list(c.strip())]
    candidates = [s for s in SEPARATORS if any(s in c for c in plain)]
    if len(candidates) > 1:
        raise Ambiguous(
            f"may be separated by {' or by '.join(map(repr, candidates))}, as in {_example(plain, candidates)}"
        )
    if candidates:
        return candidates[0]
    several = [c for c in plain if len(c.split()) > 1]
    if not several:
        return ","
    words: dict[str, set[str]] = {}
    for cell in set(plain):
        for word in cell.split():
            words.setdefault(word, set()).add(cell)
    shared = sum(all(len(words[w]) > 1 for w in set(c.split())) for c in set(several)) / len(set(several))
    if shared >= 0.8 and len(words) <= len(set(plain)):
        return " "
    if len(plain) >= 20 and shared <= 0.2 and 2 * len(set(plain)) <= len(plain):
        return WHOLE
    raise Ambiguous(f"may be one name or several separated by spaces, as in {several[0][:60]!r}")


class LaterCells:
    """Cells behind the first ones, from which a separator was guessed that they do not show.

    Args:
        separator: What was guessed: the comma, the space or `WHOLE`.
    """

    def __init__(self, separator: str) -> None:
        self.separator, self.settled = separator, False
        self.cells: Counter[str] = Counter()

    def see(self, value: Any) -> None:
        """Take a cell; raise `Ambiguous` if it may be separated by another character than was guessed."""
        cell = value.strip() if isinstance(value, str) and not self.settled else ""
        if not cell or _looks_like_list(cell):
            return
        if shown := [s for s in SEPARATORS if s in cell]:
            if shown != [self.separator]:
                raise Ambiguous(f"may be separated by {' or by '.join(map(repr, shown))}, as in {cell[:60]!r}")
            self.settled = True
        elif self.separator == ",":
            self.cells[cell] += 1

    def end(self) -> None:
        """Raise `Ambiguous` if all cells together may be separated by spaces."""
        if not self.settled and guess_separator(list(self.cells.elements())) == " ":
            cell = next(c for c in self.cells if len(c.split()) > 1)
            raise Ambiguous(f"may be separated by spaces, as in {cell[:60]!r}")


def _looks_like_list(cell: str) -> bool:
    return cell[0] in _BRACKETS and cell.endswith(_BRACKETS[cell[0]])


def _example(cells: list[str], separators: list[str]) -> str:
    return repr(next((c for c in cells if all(s in c for s in separators)), cells[0])[:60])
