"""Fields of a record: the place of each role, and the row that they make."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lastlayer.data.builder import Row
from lastlayer.data.labels import (
    SEPARATORS,
    WHOLE,
    Ambiguous,
    LaterCells,
    is_torn,
    label_list,
    list_in,
    split_labels,
    whole,
)
from lastlayer.data.source import DataError

TEXT = (
    "text", "texts", "document", "body", "content", "description", "sentence", "comment", "review", "abstract", "tweet",
    "message", "question", "title",
)  # fmt: skip
LABELS = (
    "labels", "label", "tags", "tag", "classes", "class", "categories", "category", "topics", "topic", "genres",
    "targets", "target", "y",
)  # fmt: skip
IDS = ("id", "ids", "uid", "key", "name")
PARTS = ("split", "part", "fold")
GROUPS = ("group", "groups", "source")
WEIGHTS = ("weight", "weights", "sample_weight")
VECTORS = ("vector", "embedding", "features", "x")
WORDS = {
    "text": TEXT,
    "label": LABELS,
    "id": IDS,
    "split": PARTS,
    "group": GROUPS,
    "weight": WEIGHTS,
    "vector": VECTORS,
}
PART_WORDS = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "dev": "valid",
    "test": "test",
}
ZERO_ONE = {"0": False, "1": True, "0.0": False, "1.0": True}
TRUE_FALSE = {"false": False, "true": True}
YES_NO = {"no": False, "yes": True, "n": False, "y": True}
BITS = (ZERO_ONE, TRUE_FALSE, YES_NO)
Form = Literal["names", "columns", "vectors"]


@dataclass(frozen=True)
class Fields:
    """The place of each role among the fields of a record, and how labels are written.

    Args:
        names: The names of all fields, or their numbers where there is no header.
        cells: Whether a record is a list of cells; else it is a mapping from names to values.
        header: Whether the names are those of a header.
        text: The fields that make up the text.
        labels: The field of label names, or one field per label.
        form: How labels are written: names in a cell, columns of 0 and 1, or one vector of 0 and 1.
        width: The number of labels with `form` ``"vectors"``.
        vector: The fields that make up the feature vector.
        id: The field of names of rows.
        split: The field that says "train", "valid" or "test".
        group: The field of groups.
        weight: The field of row weights.
        separator: What separates label names.
        guessed: What no option and no name of a field told.
    """

    names: tuple[str, ...]
    cells: bool = True
    header: bool = False
    text: tuple[int, ...] = ()
    labels: tuple[int, ...] = ()
    form: Form = "names"
    width: int = 0
    vector: tuple[int, ...] = ()
    id: int | None = None
    split: int | None = None
    group: int | None = None
    weight: int | None = None
    separator: str = ","
    guessed: frozenset[str] = frozenset()
    lazy: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def label_names(self) -> list[str] | None:
        """The names of the labels where the fields tell them."""
        if self.form == "columns":
            return [self.names[i] for i in self.labels]
        return [str(i) for i in range(self.width)] if self.form == "vectors" else None

    def options(self) -> dict[str, Any]:
        """Return the options that read a file of the same kind the same way."""
        times = Counter(self.names)

        def name(i: int) -> str:
            unique = times[self.names[i]] == 1
            return self.names[i] if unique and (self.header or not self.cells) else str(i)

        out: dict[str, Any] = {}
        for role, places in (("text", self.text), ("label", self.labels), ("vector", self.vector)):
            if places:
                out[f"{role}_column"] = [name(i) for i in places] if len(places) > 1 else name(places[0])
        for role in ("id", "split", "group", "weight"):
            if (place := getattr(self, role)) is not None:
                out[f"{role}_column"] = name(place)
        if self.labels and self.form == "names":
            out["label_separator"] = self.separator or "none"
        return out

    def describe(self) -> str:
        """Say in words which field is what."""

        def shown(places: Sequence[int]) -> str:
            words = [self._called(i) for i in places[:5]]
            return ", ".join(words) + (f", ... ({len(places)} columns)" if len(places) > 5 else "")

        out = []
        if self.text:
            out.append(f"text in {shown(self.text)}{self._mark('text')}")
        if self.vector:
            out.append(f"features in {shown(self.vector)}{self._mark('vector')}")
        if self.form == "columns":
            out.append(f"labels: {len(self.labels)} columns of 0 and 1 ({shown(self.labels)}){self._mark('label')}")
        elif self.form == "vectors":
            out.append(f"labels in {shown(self.labels)}, vectors of {self.width} zeros and ones")
        elif self.labels:
            how = {WHOLE: "one name each", " ": "separated by spaces"}.get(self.separator)
            how = "lists of names" if "lists" in self.guessed else how or f"separated by {self.separator!r}"
            how = "" if "unseen separator" in self.guessed else f", {how}{self._mark('separator')}"
            out.append(f"labels in {shown(self.labels)}{self._mark('label')}{how}")
        out += [
            f"{r} in {shown([i])}" for r in ("id", "split", "group", "weight") if (i := getattr(self, r)) is not None
        ]
        used = {*self.text, *self.labels, *self.vector, self.id, self.split, self.group, self.weight}
        if unused := [i for i in range(len(self.names)) if i not in used]:
            out.append(f"not used: {shown(unused)}")
        return "; ".join(out)

    def _called(self, place: int) -> str:
        return repr(self.names[place]) if self.header or not self.cells else f"column {place}"

    def _mark(self, role: str) -> str:
        return " (guessed)" if role in self.guessed else ""

    def row(self, record: Any, line: int, number: int, note: Callable[[int, str], None]) -> Row:
        """Make a row of a record, or raise a ValueError that says what is wrong; `note` hears of mended texts."""
        text = self._text(record, line, note)
        dense = None if text is not None else self._vector(record)
        if text is None and dense is None:
            raise ValueError(f"must have a text ({', '.join(TEXT[:4])}, ...) or a vector ({', '.join(VECTORS)})")
        labels = self._labels(record)
        if self.cells:
            name = None if self.id is None else record[self.id]
            part = None if self.split is None else part_of(record[self.split])
            group = None if self.group is None else record[self.group]
            weight = None if self.weight is None else weight_of(record[self.weight])
        else:
            name = self._name(record, "id", self.id)
            part = part_of(self._role(record, "split", self.split))
            group = self._name(record, "group", self.group)
            weight = self._role(record, "weight", self.weight)
            weight = None if weight is None else weight_of(weight)
        return Row(line, text, None, None, dense, labels, name, part, group, weight, number)

    def watched(self, path: Any, records: Iterable[Any], value: Callable[[Any], Any]) -> Iterator[Any]:
        """Yield records; it is an error if later ones show that the separator of label names was guessed wrong.

        `value` returns what :meth:`row` takes.
        """
        seen = self.separator in SEPARATORS and "separator" in self.guessed
        if seen or not {"separator", "unseen separator"} & self.guessed:
            yield from records
            return
        later = LaterCells(self.separator)
        try:
            for record in records:
                later.see(self._get(value(record), self.labels[0]))
                yield record
            later.end()
        except Ambiguous as error:
            raise DataError(
                f"{path}: the labels in {self._called(self.labels[0])} {error}. Say which: --label-separator "
                "CHARACTER, or none."
            ) from None

    def _get(self, record: Any, place: int) -> Any:
        return record[place] if self.cells else record.get(self.names[place])

    def _role(self, record: Any, role: str, place: int | None) -> Any:
        if place is not None:
            return self._get(record, place)
        # A key that the first records of a file do not have may still come.
        return next((record[w] for w in self.lazy.get(role, ()) if w in record), None)

    def _name(self, record: Any, role: str, place: int | None) -> str | None:
        value = self._role(record, role, place)
        if value is None:
            return None if place is None else ""  # as an empty cell
        text = str(value)
        if is_torn(text):
            raise ValueError(f"{role} must be whole Unicode text, without half of a surrogate pair")
        return text

    def _text(self, record: Any, line: int, note: Callable[[int, str], None]) -> str | None:
        if self.cells and len(self.text) == 1:
            return str(record[self.text[0]])
        parts = [self._get(record, i) for i in self.text]
        if not parts:
            parts = [v for v in [self._role(record, "text", None)] if v is not None]
        if not parts or all(v is None for v in parts):
            return None
        if not all(isinstance(v, str) for v in parts if v is not None):
            raise ValueError("text must be a string")
        text = parts[0] if len(parts) == 1 else "\n".join(v for v in parts if v)
        if is_torn(text):
            note(line, "half of a surrogate pair in the text, replaced by U+FFFD")
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return str(text)

    def _vector(self, record: Any) -> list[float] | None:
        if len(self.vector) > 1:
            return [number_of(self._called(i), self._get(record, i)) for i in self.vector]
        value = self._get(record, self.vector[0]) if self.vector else self._role(record, "vector", None)
        if value is None:
            return None
        if isinstance(value, str):
            value = [number_of("a feature", v) for v in value.strip().strip("[]").replace(",", " ").split()]
        return numbers_of(value if isinstance(value, list) else [value])

    def _labels(self, record: Any) -> list[Any] | None:
        if self.form == "columns":
            return [i for i, place in enumerate(self.labels) if _bit(self.names[place], self._get(record, place))]
        if self.cells and self.form == "names":
            return split_labels(record[self.labels[0]], self.separator) if self.labels else None
        value = self._role(record, "label", self.labels[0] if self.labels else None)
        if value is None:
            return None
        if self.form == "vectors":
            items = list_in(value.strip()) if isinstance(value, str) else value
            if not isinstance(items, list) or len(items) != self.width:
                raise ValueError(f"labels must be a vector of {self.width} zeros and ones")
            return [i for i, bit in enumerate(items) if _bit("labels", bit)]
        if isinstance(value, str):
            return whole(split_labels(value, self.separator) or [])
        return label_list([value] if "number" in self.guessed and isinstance(value, int) else value)


def part_of(cell: Any) -> str | None:
    """Return "train", "valid" or "test" for a cell of a split column."""
    if cell is None:
        return None
    word = PART_WORDS.get(str(cell).strip().lower())
    if word is None:
        raise ValueError("split must be train, valid or test")
    return word


def number_of(what: str, value: Any) -> float:
    """Check a cell or a JSON value as one finite number."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or abs(number) > 3.4e38:
        rule = "a number with a decimal point" if has_comma(value) else "a finite number"
        raise ValueError(f"{what} must be {rule}, not {str(value)[:40]!r}")
    return number


def has_comma(value: Any) -> bool:
    """Whether a cell is a number with a decimal comma."""
    return isinstance(value, str) and re.fullmatch(r"\s*[-+]?\d*,\d+\s*", value) is not None


def weight_of(value: Any) -> float:
    """Check a cell or a JSON value as the weight of a row."""
    number = number_of("weight", value)
    if number < 0:
        raise ValueError(f"weight must be at least 0, not {str(value)[:40]!r}")
    return number


def numbers_of(value: Any) -> list[float]:
    """Check a JSON value as a list of finite numbers."""
    if not isinstance(value, list) or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in value):
        raise ValueError("vector must be a list of numbers")
    out = [float(v) for v in value]
    if not all(math.isfinite(v) and abs(v) <= 3.4e38 for v in out):
        raise ValueError("vector must be a list of finite numbers")
    return out


_WORDS = {word: bit for words in BITS for word, bit in words.items()}


def _bit(name: str, value: Any) -> bool:
    word = str(value).strip().lower()
    bit = _WORDS.get(word)
    if bit is None:
        hint = "" if word else " (write 0 where the label does not apply)"
        raise ValueError(f"{name[:40]!r} must be 0 or 1, not {word[:40]!r}{hint}")
    return bit
