"""The CUDA driver itself, for what torch's loader and launcher do not do.

Torch holds Python's lock while the driver translates a kernel, and starts no programs that wait for each other. Whoever
calls these functions has another way if they raise, or are not there.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import ctypes
import functools
from typing import Any

_POINTER = ctypes.c_void_p
_SIGNATURES: dict[str, list[Any]] = {
    "cuCtxGetCurrent": [_POINTER],
    "cuCtxSetCurrent": [_POINTER],
    "cuDevicePrimaryCtxRetain": [_POINTER, ctypes.c_int],
    "cuThreadExchangeStreamCaptureMode": [_POINTER],
    "cuModuleLoadData": [_POINTER, ctypes.c_char_p],
    "cuModuleGetFunction": [_POINTER, _POINTER, ctypes.c_char_p],
    "cuFuncGetAttribute": [_POINTER, ctypes.c_int, _POINTER],
    # The sizes are those of the grid, of a program, and of the memory that its threads share.
    "cuLaunchCooperativeKernel": [_POINTER, *[ctypes.c_uint] * 7, _POINTER, _POINTER],
}
_REGISTERS = 4  # the attribute of a function
_RELAXED = 2  # the mode of a thread that may do what has no place in a CUDA graph while one is captured


@functools.cache
def _functions() -> dict[str, Any]:
    """Return the functions of the driver by their names; those that are not there are left out."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return {}
    found = {name: getattr(library, name) for name in _SIGNATURES if hasattr(library, name)}
    for name, function in found.items():
        function.argtypes, function.restype = _SIGNATURES[name], ctypes.c_int
    return found


def launcher() -> Any:
    """Return the function that launches programs which all run at once; None where there is none."""
    return _functions().get("cuLaunchCooperativeKernel")


def _call(name: str, *given: Any) -> None:
    function = _functions().get(name)
    if function is None:
        raise RuntimeError(f"the CUDA driver has no {name}")
    error = function(*given)
    if error:
        raise RuntimeError(f"{name} of the CUDA driver: error {error}")


def load(image: bytes, name: str, device: int) -> int:
    """Return the address of a kernel of at most 48 kB of shared memory, from PTX that ends with a zero or from a cubin.

    Several threads may load kernels at a time, while others run Python or capture a CUDA graph.
    """
    context, module, function, registers = _POINTER(), _POINTER(), _POINTER(), ctypes.c_int()
    _call("cuCtxGetCurrent", ctypes.byref(context))
    if not context:  # in a new thread
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        _call("cuCtxSetCurrent", context)
    mode = ctypes.c_int(_RELAXED)
    _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))  # which leaves the former mode there
    try:
        _call("cuModuleLoadData", ctypes.byref(module), image)
        _call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        _call("cuFuncGetAttribute", ctypes.byref(registers), _REGISTERS, function)  # or the driver may put it off
    finally:
        _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    assert function.value is not None
    return function.value
