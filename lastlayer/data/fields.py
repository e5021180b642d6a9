"""Which field of a record is what: told by options, by the names of the fields, else by what they hold."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lastlayer.data.builder import Row
from lastlayer.data.labels import WHOLE, Ambiguous, guess_separator, is_torn, label_list, list_in, split_labels, whole
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
_PART = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "dev": "valid",
    "test": "test",
}
_ZERO_ONE = {"0": False, "1": True, "0.0": False, "1.0": True}
_TRUE_FALSE = {"false": False, "true": True}
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
        name = lambda i: self.names[i] if self.header or not self.cells else str(i)  # noqa: E731
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
            words = [repr(self.names[i]) if self.header or not self.cells else f"column {i}" for i in places[:5]]
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
            name = _name("id", self._role(record, "id", self.id))
            part = part_of(self._role(record, "split", self.split))
            group = _name("group", self._role(record, "group", self.group))
            weight = self._role(record, "weight", self.weight)
            weight = None if weight is None else weight_of(weight)
        return Row(line, text, None, None, dense, labels, name, part, group, weight, number)

    def _get(self, record: Any, place: int) -> Any:
        return record[place] if self.cells else record.get(self.names[place])

    def _role(self, record: Any, role: str, place: int | None) -> Any:
        if place is not None:
            return self._get(record, place)
        # A key that the first records of a file do not have may still come.
        return next((record[w] for w in self.lazy.get(role, ()) if w in record), None)

    def _text(self, record: Any, line: int, note: Callable[[int, str], None]) -> str | None:
        if self.cells and len(self.text) == 1:
            return str(record[self.text[0]])
        found = [self._get(record, i) for i in self.text]
        if not found:
            found = [v for v in [self._role(record, "text", None)] if v is not None]
        if not found or all(v is None for v in found):
            return None
        if not all(isinstance(v, str) for v in found if v is not None):
            raise ValueError("text must be a string")
        text = found[0] if len(found) == 1 else "\n".join(v for v in found if v)
        if is_torn(text):
            note(line, "half of a surrogate pair in the text, replaced by U+FFFD")
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return str(text)

    def _vector(self, record: Any) -> list[float] | None:
        if len(self.vector) > 1:
            return [number_of("a feature", self._get(record, i)) for i in self.vector]
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
            found = list_in(value.strip()) if isinstance(value, str) else value
            if not isinstance(found, list) or len(found) != self.width:
                raise ValueError(f"labels must be a vector of {self.width} zeros and ones")
            return [i for i, bit in enumerate(found) if _bit("labels", bit)]
        if isinstance(value, str):
            return whole(split_labels(value, self.separator) or [])
        return label_list([value] if "number" in self.guessed and isinstance(value, int) else value)


def sniff_fields(
    path: Any,
    names: Sequence[str],
    sample: Sequence[Any],
    options: dict[str, Any],
    *,
    cells: bool,
    header: bool,
    soft: frozenset[str] = frozenset(),
) -> Fields:
    """Choose the field of each role.

    Args:
        path: What messages call the file.
        names: The names of the fields, or their numbers.
        sample: The first records.
        options: ``text_column`` and so on: a name, several names, or "none"; ``label_separator``.
        cells: Whether records are lists of cells.
        header: Whether `names` are those of a header.
        soft: Options that are remembered from another file: what they name may be missing here, unless it is the text.
    """
    return _Sniffer(path, list(names), sample, options, cells, header, soft).fields()


class _Sniffer:
    def __init__(
        self,
        path: Any,
        names: list[str],
        sample: Sequence[Any],
        options: dict[str, Any],
        cells: bool,
        header: bool,
        soft: frozenset[str],
    ) -> None:
        self.path, self.names, self.options, self.soft = path, names, options, soft
        self.cells, self.header, self.named = cells, header, header or not cells
        self.lower = [name.strip().lower() for name in names]
        self.values = [self._column(sample, i) for i in range(len(names))]
        self.taken: dict[str, tuple[int, ...]] = {}
        self.guessed: set[str] = set()

    def _column(self, sample: Sequence[Any], place: int) -> list[Any]:
        if self.cells:
            return [row[place] for row in sample if len(row) > place]
        return [v for row in sample if (v := row.get(self.names[place])) is not None]

    def fields(self) -> Fields:
        """Choose every role, from the surest to the least sure."""
        for role in WORDS:
            if (asked := self._asked(role)) is not None:
                self.taken[role] = asked
        for role in ("id", "split", "group", "weight"):
            place = self._by_name(role) if self.named and role not in self.taken else None
            if place is not None and (role != "split" or self.lower[place] == "split" or self._is_split(place)):
                self.taken[role] = (place,)
        for role in ("text", "vector"):
            place = self._by_name(role) if self.named and role not in self.taken else None
            if place is not None and "text" not in self.taken:
                self._take_content(role, place)
                if sum(name in TEXT for name in self.lower) > 1:
                    self.guessed.add("text")
        form, width = self._choose_labels()
        if not self.taken.get("text") and not self.taken.get("vector"):
            self._choose_content()
        form, width = self._labels_left(form, width)
        one = {role: (self.taken.get(role) or (None,))[0] for role in ("id", "split", "group", "weight")}
        lazy = {} if self.cells else {r: w for r, w in WORDS.items() if r not in self.taken}
        if self.taken.get("vector") or self.taken.get("text"):
            lazy = {r: w for r, w in lazy.items() if r not in ("text", "vector")}
        return Fields(
            names=tuple(self.names),
            cells=self.cells,
            header=self.header,
            text=self.taken.get("text", ()),
            labels=self.taken.get("label", ()),
            form=form,
            width=width,
            vector=() if self.taken.get("text") else self.taken.get("vector", ()),
            separator=self._separator(form),
            guessed=frozenset(self.guessed),
            lazy=lazy,
            **one,  # type: ignore[arg-type]
        )

    def _asked(self, role: str) -> tuple[int, ...] | None:
        option = f"{role}_column"
        asked = self.options.get(option)
        if asked is None:
            return None
        if isinstance(asked, str) and asked.strip().lower() == "none":
            return ()
        if isinstance(asked, list | tuple):
            found = [self._place(option, str(name)) for name in asked]
        elif (place := self._find(str(asked))) is not None:
            found = [[place]]
        else:
            found = [self._place(option, name) for name in str(asked).split(",") if name.strip()]
        if option in self.soft and any(f is None for f in found):
            missing = next(
                n for n, f in zip([asked] if isinstance(asked, str) else asked, found, strict=False) if not f
            )
            if role in ("text", "vector"):
                raise DataError(
                    f"{self.path}: has no column {missing!r}, where the run's training rows have their {role}. Its "
                    f"columns are {self._known()}. Name the one to use (--{role}-column)."
                )
            if role == "label" and any(f is not None for f in found):
                raise DataError(f"{self.path}: has some of the run's label columns, but not {missing!r}.")
            return None if role != "label" else ()
        places = tuple(i for f in found for i in f or ())
        if len(set(places)) != len(places) or (len(places) != 1 and role not in ("text", "label", "vector")):
            raise DataError(f"{self.path}: `{option}` must name columns once each, got {asked!r}.")
        return places

    def _place(self, option: str, name: str) -> list[int] | None:
        if (place := self._find(name)) is not None:
            return [place]
        first, dots, last = name.partition("..")
        if dots and (a := self._find(first)) is not None and (b := self._find(last)) is not None and a <= b:
            return list(range(a, b + 1))
        if option in self.soft:
            return None
        raise DataError(
            f"{self.path}: `{option}` must be a column of the file ({self._known()}), got {name.strip()[:60]!r}."
        )

    def _find(self, name: str) -> int | None:
        name = name.strip()
        if self.named:
            for known, wanted in ((self.names, name), (self.lower, name.lower())):
                if known.count(wanted) > 1:
                    raise DataError(f"{self.path}: has {known.count(wanted)} columns named {name!r}. Use a number.")
                if wanted in known:
                    return known.index(wanted)
        if self.cells and name.isascii() and name.isdigit() and len(name) < 9 and int(name) < len(self.names):
            return int(name)
        return None

    def _known(self) -> str:
        if not self.named:
            return f"0 to {len(self.names) - 1}"
        return ", ".join(self.names[:20]) + (", ..." if len(self.names) > 20 else "")

    def _by_name(self, role: str) -> int | None:
        free = {i for i in range(len(self.names)) if not any(i in places for places in self.taken.values())}
        for word in WORDS[role]:
            if word in self.lower and self.lower.index(word) in free:
                if self.lower.count(word) > 1:
                    raise DataError(
                        f"{self.path}: has {self.lower.count(word)} columns named {word!r}. Use --{role}-column."
                    )
                return self.lower.index(word)
        return None

    def _is_split(self, place: int) -> bool:
        return bool(self.values[place]) and all(str(v).strip().lower() in _PART for v in self.values[place])

    def _take_content(self, role: str, place: int) -> None:
        """Take a field by its name; a string in a field such as "x" is a text."""
        strings = all(isinstance(v, str) for v in self.values[place])
        numbers = self.cells and all(_is_vector(v) for v in self.values[place])
        if role == "vector" and strings and not numbers:
            role = "text"
        self.taken.setdefault(role, (place,))

    def _free(self) -> list[int]:
        return [i for i in range(len(self.names)) if not any(i in places for places in self.taken.values())]

    def _choose_labels(self) -> tuple[Form, int]:
        if "label" in self.taken:
            places = self.taken["label"]
            return ("columns", 0) if len(places) > 1 else self._form_of(places)
        bits = self._bit_columns()
        place = self._by_name("label") if self.named else None
        if place is not None and not (place in bits and len(bits) > 1):
            self.taken["label"] = (place,)
            return self._form_of((place,))
        if len(bits) < 2:
            return "names", 0
        listed = ",".join(self.names[i] for i in bits[:8]) + (",..." if len(bits) > 8 else "")
        if place is not None:
            raise DataError(
                f"{self.path}: {self.names[place]!r} may hold the labels 0 and 1, or be one of {len(bits)} label "
                f"columns ({listed}). Say which: --label-column {self.names[place]}, or --label-column {listed}."
            )
        if not self.named:
            raise DataError(
                f"{self.path}: has {len(bits)} columns of 0 and 1 and no header. Name the label columns by their "
                f"numbers: --label-column {listed}."
            )
        self.taken["label"] = tuple(bits)
        self.guessed.add("label")
        return "columns", 0

    def _bit_columns(self) -> list[int]:
        free = [i for i in self._free() if self.values[i] and self.lower[i] not in ("", *TEXT)]
        for words in (_ZERO_ONE, _TRUE_FALSE):
            found = [i for i in free if all(str(v).strip().lower() in words for v in self.values[i])]
            if len(found) > 1:
                return found
        return []

    def _form_of(self, places: tuple[int, ...]) -> tuple[Form, int]:
        """Tell lists of names from vectors of zeros and ones: a list of names never repeats one."""
        values = self.values[places[0]] if places else []
        lists = [v for v in (_list_or_none(v) for v in values) if v is not None]
        if lists and len(lists) == len(values):
            self.guessed.add("lists")
        if not lists or len(lists) != len(values) or len({len(v) for v in lists}) != 1:
            if values and all(isinstance(v, int) and not isinstance(v, bool) for v in values):
                self.guessed.add("number")
            return "names", 0
        words = {str(v).lower() for row in lists for v in row}
        bits = len(lists[0]) > 1 and (words <= set(_ZERO_ONE) or words <= set(_TRUE_FALSE))
        if bits and any(len(set(row)) < len(row) for row in lists):
            return "vectors", len(lists[0])
        return "names", 0

    def _choose_content(self) -> None:
        """Find the text: a name that contains a word for it, else the longest strings; else numeric columns."""
        if "text" in self.taken or "vector" in self.taken:  # "none" was asked for one of them
            return self._choose_numbers()
        if not self.named:
            return self._guess_columns()
        free = [i for i in self._free() if self.values[i] and all(isinstance(v, str) for v in self.values[i])]
        free = [i for i in free if not all(_is_number(v) for v in self.values[i])]
        known = [i for i in free if set(re.split(r"[^a-z]+", self.lower[i])) & set(TEXT)]
        ranked = sorted(known or free, key=lambda i: -_length(self.values[i]))
        if len(ranked) > 1 and _length(self.values[ranked[0]]) < 2 * _length(self.values[ranked[1]]):
            names = " or ".join(repr(self.names[i]) for i in ranked[:2])
            raise DataError(f"{self.path}: the text may be in {names}. Say which: --text-column NAME (or NAME,NAME).")
        if ranked:
            self.taken["text"] = (ranked[0],)
            self.guessed.add("text")
            return None
        return self._choose_numbers()

    def _choose_numbers(self) -> None:
        """Take all columns of numbers as features, where the labels were named."""
        if not self.cells:
            return
        if self.taken.get("text"):
            return
        numeric = [i for i in self._free() if self.values[i] and all(_is_number(v) for v in self.values[i])]
        if numeric and self.options.get("label_column") is not None:
            self.taken["vector"] = tuple(numeric)
            self.guessed.add("vector")
            return
        hint = "Name the text (--text-column)"
        if numeric or "label" in self.guessed:
            hint += ", or name the label columns (--label-column) and the other numbers become features"
        raise DataError(f"{self.path}: has no column that looks like a text; its columns are {self._known()}. {hint}.")

    def _guess_columns(self) -> None:
        """Without a header: the text has the longest cells, labels repeat, an id never does."""
        free = self._free()
        if not free:
            return
        text = max(free, key=lambda i: (_length(self.values[i]), i))
        self.taken["text"] = (text,)
        self.guessed.add("text")
        rest = [i for i in free if i != text]
        if "label" not in self.taken and rest:
            self.taken["label"] = (max(rest, key=lambda i: (_repeats(self.values[i]), -i)),)
            self.guessed.add("label")
        ids = [i for i in self._free() if len(set(self.values[i])) == len(self.values[i])]
        if ids and "id" not in self.taken:
            self.taken["id"] = (ids[0],)

    def _labels_left(self, form: Form, width: int) -> tuple[Form, int]:
        """Take the one column that is left as labels if its cells repeat."""
        if "label" in self.taken:
            return self._form_of(self.taken["label"]) if form == "names" and self.taken["label"] else (form, width)
        rest = [i for i in self._free() if self.values[i] and not all(_is_number(v) for v in self.values[i])]
        rest = [i for i in rest if all(isinstance(v, str | list) for v in self.values[i])]
        if len(rest) == 1 and self.named and len(self.values[rest[0]]) > 3 and _repeats(self.values[rest[0]]) > 0.3:
            self.taken["label"] = (rest[0],)
            self.guessed.add("label")
            return self._form_of((rest[0],))
        return form, width

    def _separator(self, form: Form) -> str:
        asked = self.options.get("label_separator")
        if asked is not None:
            return WHOLE if str(asked).lower() == "none" else named_character(str(asked))
        places = self.taken.get("label", ())
        if form != "names" or len(places) != 1:
            return ","
        cells = [v for v in self.values[places[0]] if isinstance(v, str)]
        try:
            found = guess_separator(cells)
        except Ambiguous as error:
            where = repr(self.names[places[0]]) if self.named else f"column {places[0]}"
            raise DataError(
                f"{self.path}: the labels in {where} {error}. Say which: --label-separator CHARACTER, or none."
            ) from None
        if "lists" not in self.guessed:
            self.guessed.add("separator" if any((found or " ") in c for c in cells) else "unseen separator")
        return found


def named_character(text: str) -> str:
    """Return the character that a flag means: "tab", "space", "comma" and so on, or the character itself."""
    known = {"tab": "\t", "\\t": "\t", "space": " ", "comma": ",", "semicolon": ";", "pipe": "|"}
    return known.get(text.lower(), text)


def part_of(cell: Any) -> str | None:
    """Return "train", "valid" or "test" for a cell of a split column."""
    if cell is None:
        return None
    word = _PART.get(str(cell).strip().lower())
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
        raise ValueError(f"{what} must be a finite number, not {str(value)[:40]!r}")
    return number


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


def _name(what: str, value: Any) -> str | None:
    if value is None:
        return None
    text = str(value)
    if is_torn(text):
        raise ValueError(f"{what} must be whole Unicode text, without half of a surrogate pair")
    return text


def _bit(name: str, value: Any) -> bool:
    word = str(value).strip().lower()
    found = _ZERO_ONE.get(word, _TRUE_FALSE.get(word))
    if found is None:
        raise ValueError(f"{name[:40]!r} must be 0 or 1, not {word[:40]!r}")
    return found


def _is_number(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


def _is_vector(cell: Any) -> bool:
    words = str(cell).strip().strip("[]").replace(",", " ").split()
    return bool(words) and all(map(_is_number, words[:5]))


def _list_or_none(value: Any) -> list[Any] | None:
    if isinstance(value, list):
        return value
    try:
        return list_in(value.strip()) if isinstance(value, str) else None
    except ValueError:
        return None


def _length(values: list[Any]) -> float:
    return sum(len(str(v)) for v in values) / max(len(values), 1)


def _repeats(values: list[Any]) -> float:
    words = [w for v in values for w in str(v).replace(",", " ").replace(";", " ").replace("|", " ").split()]
    return 1 - len(set(words)) / max(len(words), 1)
