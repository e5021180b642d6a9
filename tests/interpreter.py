"""A quicker interpreter of Triton, for the tests."""

from collections.abc import Callable
from typing import Any


class _Nothing:
    def restore(self) -> None:
        """Leave everything as it is."""


def quicken() -> None:
    """Patch Triton's language once per launch: the interpreter does so again in every call of a device function.

    That is half of its time. It stays as it is where a version of Triton has other names.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    if not (hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "GridExecutor")):
        return
    patch: Callable[[Any], Any] = interpreter._patch_lang
    run = interpreter.GridExecutor.__call__
    patched: set[frozenset[int]] = set()
    languages: dict[Any, frozenset[int]] = {}

    def patch_once(fn: Any) -> Any:
        if fn not in languages:
            languages[fn] = frozenset(id(value) for value in fn.__globals__.values() if value is tl or value is tl.core)
        if languages[fn] in patched:
            return _Nothing()
        patched.add(languages[fn])
        return patch(fn)

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        try:
            return run(self, *args, **kwargs)
        finally:
            patched.clear()

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch
