"""Old names of arguments and attributes, which keep working with a warning."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def renamed(op: str, **names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function take keywords by the names they had before: ``@renamed("op", old="new")``."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> R:
            for old in names.keys() & options.keys():
                new = names[old]
                if new in options:
                    raise TypeError(f"{op}: `{old}` is the old name of `{new}`. Give `{new}` alone.")
                _warn(op, old, new)
                options[new] = options.pop(old)
            return function(*args, **options)

        return call

    return decorate


def old_attribute(op: str, old: str, new: str) -> Any:
    """Return a property that reads an attribute by the name it had before."""

    def read(self: Any) -> Any:
        _warn(op, old, new)
        return getattr(self, new)

    return property(read, doc=f"The old name of `{new}`.")


def _warn(op: str, old: str, new: str) -> None:
    warnings.warn(f"{op}: `{old}` is now called `{new}`.", DeprecationWarning, stacklevel=3)
