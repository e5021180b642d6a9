"""Find which field of a record is what: by options, by the names of the fields, else by what they hold."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from lastlayer.data.fields import BITS, PART_WORDS, TEXT, TRUE_FALSE, WORDS, ZERO_ONE, Fields, Form, has_comma
from lastlayer.data.labels import WHOLE, Ambiguous, guess_separator, list_in
from lastlayer.data.source import DataError

_MISSING = ("", "nan", "na", "n/a", "none", "null", "?")  # in a column of numbers
_INDEX = re.compile(r"(unnamed: \d+|__index_level_\d+__)?")  # the name of the column of row numbers that pandas writes


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
        self.places = [_places(names), _places(self.lower)]
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
        if form == "columns":
            self._check_label_names()
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
            **one,
        )

    def _asked(self, role: str) -> tuple[int, ...] | None:
        option = f"{role}_column"
        asked = self.options.get(option)
        if asked is None:
            return None
        if isinstance(asked, str) and asked.strip().lower() == "none":
            return ()
        if isinstance(asked, list | tuple):
            named = [self._place(option, str(name)) for name in asked]
        elif (place := self._find(str(asked))) is not None:
            named = [[place]]
        else:
            named = [self._place(option, name) for name in str(asked).split(",") if name.strip()]
        if option in self.soft and any(f is None for f in named):
            missing = next(
                n for n, f in zip([asked] if isinstance(asked, str) else asked, named, strict=False) if not f
            )
            if role in ("text", "vector"):
                self._tell_separator(missing)
                raise DataError(
                    f"{self.path}: has no column {missing!r}, where the run's training rows have their {role}. Its "
                    f"columns are {self._known()}. Name the one to use (--{role}-column)."
                )
            if role == "label" and any(f is not None for f in named):
                raise DataError(f"{self.path}: has some of the run's label columns, but not {missing!r}.")
            return None if role != "label" else ()
        places = tuple(i for f in named for i in f or ())
        if len(set(places)) != len(places) or (len(places) != 1 and role not in ("text", "label", "vector")):
            raise DataError(f"{self.path}: `{option}` must name columns once each, got {asked!r}.")
        return places

    def _tell_separator(self, name: str) -> None:
        """Raise an error if the one column would be several, with the wanted one, if they were separated otherwise."""
        header = self.lower[0] if self.cells and len(self.names) == 1 else ""
        for delimiter, word in ((",", ","), (";", "';'"), ("\t", "tab"), ("|", "'|'")):
            if name.strip().lower() in (cell.strip().strip('"') for cell in header.split(delimiter)):
                raise DataError(
                    f"{self.path}: has no column {name!r}, unless its columns are separated otherwise: --delimiter "
                    f"{word}."
                )

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
            for known, wanted in zip(self.places, (name, name.lower()), strict=True):
                found = known.get(wanted, [])
                if len(found) > 1:
                    raise DataError(
                        f"{self.path}: has {len(found)} columns named {name!r}. Name the one to use by its number, "
                        f"{_either(found)}."
                    )
                if found:
                    return found[0]
        if self.cells and name.isascii() and name.isdigit() and len(name) < 9 and int(name) < len(self.names):
            return int(name)
        return None

    def _known(self) -> str:
        if not self.named:
            return f"0 to {len(self.names) - 1}"
        return ", ".join(self.names[:20]) + (", ..." if len(self.names) > 20 else "")

    def _by_name(self, role: str) -> int | None:
        free = set(self._free())
        for word in WORDS[role]:
            if word in self.lower and self.lower.index(word) in free:
                if len(found := self.places[1][word]) > 1:
                    raise DataError(
                        f"{self.path}: has {len(found)} columns named {word!r}. Say which by its number: "
                        f"--{role}-column {_either(found)}."
                    )
                return self.lower.index(word)
        return None

    def _is_split(self, place: int) -> bool:
        return bool(self.values[place]) and all(str(v).strip().lower() in PART_WORDS for v in self.values[place])

    def _take_content(self, role: str, place: int) -> None:
        """Take a field by its name; a string in a field such as "x" is a text."""
        strings = all(isinstance(v, str) for v in self.values[place])
        numbers = self.cells and all(_is_vector(v) for v in self.values[place])
        if role == "vector" and strings and not numbers:
            role = "text"
        self.taken.setdefault(role, (place,))

    def _free(self) -> list[int]:
        used = {i for places in self.taken.values() for i in places}
        return [i for i in range(len(self.names)) if i not in used]

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
        if (gap := self._with_gaps(bits)) is not None:
            raise DataError(
                f"{self.path}: {self.names[gap]!r} may be a label like {listed}, but is not 0 or 1 in every row. Fill "
                f"its gaps, or say which columns are labels: --label-column {listed}."
            )
        self.taken["label"] = tuple(bits)
        self.guessed.add("label")
        return "columns", 0

    def _check_label_names(self) -> None:
        names = [self.names[i] for i in self.taken["label"]]
        if "" in names:
            raise DataError(f"{self.path}: has a label column without a name. Name it in the header.")
        if len(set(names)) != len(names):
            name, n = Counter(names).most_common(1)[0]
            raise DataError(f"{self.path}: has {n} label columns named {name!r}. Rename them in the header.")

    def _with_gaps(self, bits: list[int]) -> int | None:
        """Return a column that would be one of the label columns if no cell of it were missing."""
        known = next(words for words in BITS if str(self.values[bits[0]][0]).strip().lower() in words)
        for i in self._free():
            there = {str(v).strip().lower() for v in self.values[i] if not _is_gap(v)}
            if i not in bits and self.lower[i] not in ("", *TEXT) and there and there <= set(known):
                return i
        return None

    def _bit_columns(self) -> list[int]:
        free = [i for i in self._free() if self.values[i] and self.lower[i] not in ("", *TEXT)]
        for words in BITS:
            columns = [i for i in free if all(str(v).strip().lower() in words for v in self.values[i])]
            if len(columns) > 1:
                return columns
        return []

    def _form_of(self, places: tuple[int, ...]) -> tuple[Form, int]:
        """Tell lists of names from vectors of zeros and ones: a list of names never repeats one.

        Two labels need another rule. If they were names, all rows would have both.
        """
        values = self.values[places[0]] if places else []
        lists = [v for v in (_list_or_none(v) for v in values) if v is not None]
        if lists and len(lists) == len(values):
            self.guessed.add("lists")
        if not lists or len(lists) != len(values) or len({len(v) for v in lists}) != 1:
            items = [v for value in values for v in (value if isinstance(value, list) else [value])]
            if len(lists) < len(values) and all(isinstance(v, int) and not isinstance(v, bool) for v in items):
                self.guessed.add("number")
            return "names", 0
        words = {str(v).lower() for row in lists for v in row}
        bits = len(lists[0]) > 1 and (words <= set(ZERO_ONE) or words <= set(TRUE_FALSE))
        both = "label_separator" not in self.options and (len(lists) > 1 or "label_column" in self.soft)
        if bits and (both or any(len(set(row)) < len(row) for row in lists)):
            return "vectors", len(lists[0])
        return "names", 0

    def _choose_content(self) -> None:
        """Find the text: a name that contains a word for it, else the longest strings; else numeric columns."""
        if "text" in self.taken or "vector" in self.taken:  # "none" was asked for one of them
            return self._choose_numbers()
        if not self.named:
            return self._guess_columns()
        free = [i for i in self._free() if self.values[i] and all(isinstance(v, str) for v in self.values[i])]
        free = [i for i in free if not _is_numeric(self.values[i])]
        known = [i for i in free if set(re.split(r"[^a-z]+", self.lower[i])) & set(TEXT)]
        ranked = sorted(known or free, key=lambda i: -_length(self.values[i]))
        if not known:
            self._refuse_commas(ranked[:1])
        if len(ranked) > 1 and _length(self.values[ranked[0]]) < 2 * _length(self.values[ranked[1]]):
            names = " or ".join(repr(self.names[i]) for i in ranked[:2])
            raise DataError(f"{self.path}: the text may be in {names}. Say which: --text-column NAME (or NAME,NAME).")
        if ranked:
            if not known and not _are_texts(self.values[ranked[0]]) and (numbers := self._numeric()):
                name, like = self.names[ranked[0]], self.names[numbers[0]]
                raise DataError(
                    f"{self.path}: {name!r} may be the text, or a feature like {like!r}. Say which: --text-column "
                    f"{name}, or --text-column none, which takes the columns of numbers as features."
                )
            self.taken["text"] = (ranked[0],)
            self.guessed.add("text")
            return None
        return self._choose_numbers()

    def _choose_numbers(self) -> None:
        """Take all columns of numbers as features, where the labels were named."""
        if self.taken.get("text"):
            return
        if self.cells:
            self._refuse_commas(self._free())
        numeric = self._numeric()
        if numeric and self.options.get("label_column") is not None:
            self.taken["vector"] = tuple(numeric)
            self.guessed.add("vector")
            return
        if not self.cells:  # a text may still come
            return
        hint = "Name the text (--text-column)"
        if numeric or "label" in self.guessed:
            hint += ", or name the label columns (--label-column) and the other numbers become features"
        raise DataError(f"{self.path}: has no column that looks like a text; its columns are {self._known()}. {hint}.")

    def _numeric(self) -> list[int]:
        return [i for i in self._free() if _is_numeric(self.values[i]) and not _INDEX.fullmatch(self.lower[i])]

    def _refuse_commas(self, places: Sequence[int]) -> None:
        """Refuse a column of numbers with decimal commas."""
        for i in places:
            commas = [v for v in self.values[i] if has_comma(v)]
            if commas and all(has_comma(v) or _is_number(v) or _is_gap(v) for v in self.values[i]):
                raise DataError(
                    f"{self.path}: {self.names[i]!r} has decimal commas, as in {commas[0].strip()[:40]!r}. Write them "
                    "as points, or name the columns to use (--vector-column, --text-column)."
                )

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
            separator = guess_separator(cells)
        except Ambiguous as error:
            where = repr(self.names[places[0]]) if self.named else f"column {places[0]}"
            raise DataError(
                f"{self.path}: the labels in {where} {error}. Say which: --label-separator CHARACTER, or none."
            ) from None
        if "lists" not in self.guessed:
            self.guessed.add("separator" if any((separator or " ") in c for c in cells) else "unseen separator")
        return separator


def _places(names: Sequence[str]) -> dict[str, list[int]]:
    """Return where each name is; tables may have thousands of columns."""
    out: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        out.setdefault(name, []).append(i)
    return out


def _either(places: Sequence[int]) -> str:
    return " or ".join(map(str, places[:4]))


def named_character(text: str) -> str:
    """Return the character that a flag means: "tab", "space", "comma" and so on, or the character itself."""
    known = {"tab": "\t", "\\t": "\t", "space": " ", "comma": ",", "semicolon": ";", "pipe": "|"}
    return known.get(text.lower(), text)


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


def _is_numeric(values: list[Any]) -> bool:
    """Whether these are numbers, some of which may be missing."""
    there = [v for v in values if not _is_gap(v)]
    return any(map(_is_number, there)) and all(_is_number(v) or _is_infinite(v) for v in there)


def _is_gap(value: Any) -> bool:
    return str(value).strip().lower() in _MISSING


def _is_infinite(value: Any) -> bool:
    return str(value).strip().lower().lstrip("+-") in ("inf", "infinity")


def _are_texts(values: list[Any]) -> bool:
    """Whether at least half of the cells have several words, or are long, as dates and categories are not."""
    return 2 * sum(len(v) >= 20 or len(re.findall(r"[^\W\d_]{2,}", v)) > 1 for v in values) >= len(values)


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
