"""The rules that turn probabilities into label sets, by name; importing this imports nothing heavy."""

from __future__ import annotations

RULES = ("micro_f1", "macro_f1", "recall", "precision", "top_k")


def parse(text: str) -> tuple[str, float | None]:
    """Split a rule into its name and its number; a ValueError says what is wrong.

    Example:
        >>> parse("recall=0.9"), parse("micro_f1")
        (('recall', 0.9), ('micro_f1', None))
    """
    name, equals, number = text.partition("=")
    if name in ("recall", "precision"):
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if not 0 < value < 1:
            raise ValueError(f"`decide` must be {name}=P with a number above 0 and below 1, got {text!r}.")
        return name, value
    if equals or name not in RULES:
        raise ValueError(f"`decide` must be auto, micro_f1, macro_f1, recall=P, precision=P or top_k, got {text!r}.")
    return name, None
