"""An interpreter of Triton that is quicker and rounds as a GPU does, for the tests."""

from collections.abc import Callable
from typing import Any

import numpy as np


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


def round_as_a_gpu() -> None:
    """Drop nan in maxima and minima, and take subnormal arguments and results of `exp2`, `log2` and `sqrt` for 0.

    So do the instructions for which the kernels are compiled. It stays as it is where a version of Triton has other
    names.
    """
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    tiny = np.finfo(np.float32).tiny

    def flushed(value: Any) -> Any:
        small = (value.dtype == np.float32) & (np.abs(value) < tiny)
        return np.where(small, np.copysign(value.dtype.type(0), value), value)

    def unary(function: Any) -> Any:
        return lambda self, arg: self.unary_op(arg, lambda value: flushed(function(flushed(value))))

    def binary(function: Any) -> Any:
        return lambda self, one, other: self.binary_op(one, other, function)

    patches = {f"create_{name}": unary(getattr(np, name)) for name in ("exp2", "log2", "sqrt")}
    patches |= {"create_maxnumf": binary(np.fmax), "create_minnumf": binary(np.fmin)}
    for name, patch in patches.items():
        if hasattr(builder, name):
            setattr(builder, name, patch)
