"""What the fields of the JSON files of a run hold: one table, checked where a file is read.

It has the fields that are computed with. A field that is absent or null passes here: what reads it decides whether it
can do without. Fields that are not in the table may hold anything.
"""

from __future__ import annotations

from types import EllipsisType
from typing import Any

NUMBER, NAMES = (int, float), (str, list)
Form = type | tuple[type, ...] | list[Any] | dict[str | EllipsisType, Any]

_ROLES = ("text", "label", "id", "vector", "group", "weight", "split")
_SOURCE: Form = {
    "options": {"encoding": str, **dict.fromkeys([f"{role}_column" for role in _ROLES], NAMES)},
    "attributes": [{"name": str, "values": {...: NUMBER}}],
    "labels": [str],
}

FORMS: dict[str, dict[str | EllipsisType, Form]] = {
    "data.json": {
        "parts": {
            ...: {"source": _SOURCE, "rows": NUMBER, "labels_per_row": NUMBER, "labels_a_row": NUMBER},
        },
        "resolved": {
            **dict.fromkeys(("k", "mean_count", "observed", "temperature"), NUMBER),
            **dict.fromkeys(("loss", "probability", "monitor", "blend"), str),
            "at": [int],
            "k_per_row": bool,
        },
        "read": dict,
    },
    "decision.json": {"rule": str, "rows": NUMBER},
    "environment.json": {"started": str},
    "errors.json": {
        **dict.fromkeys(("value", "n_false_alarms", "n_misses"), NUMBER),
        "metric": str,
        "kinds": [{"name": str, "meaning": str, "gain": NUMBER}],
    },
    "tree.json": {
        **dict.fromkeys(("n_labels", "n_features", "trees"), int),
        "settings": {
            **dict.fromkeys(("trees", "leaf", "branching", "max_passes", "beam", "seed", "threads"), int),
            **dict.fromkeys(("C", "bias", "threshold", "tolerance", "calibration", "observed", "tail"), NUMBER),
            **dict.fromkeys(("loss", "impl"), str),
            "normalize": bool,
        },
        "calibration": {...: NUMBER},
    },
    "examples.json": {"rows": [{"row": int}]},
    "folds.json": {
        **dict.fromkeys(("folds", "rows"), int),
        "metrics": {...: {"mean": NUMBER, "deviation": NUMBER, "values": [NUMBER]}},
        "data": {"path": str, "fingerprint": str, "source": _SOURCE},
    },
    "metrics.json": {
        "rows": NUMBER,
        "best_epoch": int,
        "epochs": int,
        "metrics": {...: {"value": NUMBER, "low": NUMBER, "high": NUMBER}},
        "notes": list,
        "labels": {...: [NUMBER]},
    },
}


def mismatch(value: Any, form: Form, at: str = "") -> str | None:
    """Return what a value should hold and does not, or None.

    A form is a type or several; ``[form]`` for a list; or fields with their forms for an object, where ``...`` stands
    for every field.

    Example:
        >>> mismatch({"rows": 3, "parts": {"test": {"rows": "x"}}}, {"rows": int, "parts": {...: {"rows": int}}})
        '`parts.test.rows` must be a whole number'
    """
    if value is None:
        return None
    if isinstance(form, dict):
        if not isinstance(value, dict):
            return f"`{at}` must be an object"
        inside = [(name, one, form.get(name, form.get(...))) for name, one in value.items()]
    elif isinstance(form, list):
        if not isinstance(value, list):
            return f"`{at}` must be a list"
        inside = [(str(i), one, form[0]) for i, one in enumerate(value)]
    else:
        fits = isinstance(value, form) and (form is bool or not isinstance(value, bool))
        return None if fits else f"`{at}` must be {_WORDS[form]}"
    found = (mismatch(one, own, f"{at}.{name}".lstrip(".")) for name, one, own in inside if own is not None)
    return next((why for why in found if why is not None), None)


_WORDS: dict[Any, str] = {
    NUMBER: "a number",
    NAMES: "a name or a list of names",
    int: "a whole number",
    str: "a text",
    bool: "true or false",
    dict: "an object",
    list: "a list",
}
