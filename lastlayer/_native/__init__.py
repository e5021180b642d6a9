"""The compiled CPU kernels; nothing else loads compiled code.

`lml.c` is plain C, built when the package is installed if there is a compiler, and loaded here as a shared library.
"""

from __future__ import annotations

import ctypes
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

_ISA = ("baseline", "AVX2", "AVX-512")


class Call(ctypes.Structure):
    """``struct call`` of `lml.c`."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("logits", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("k_stride", ctypes.c_int64),
        ("mask", ctypes.c_void_p),
        ("mask_stride", ctypes.c_int64),
        ("temperature", ctypes.c_double),
        ("kind", ctypes.c_int),
        ("threads", ctypes.c_int),
        ("out", ctypes.c_void_p),
        ("center", ctypes.c_void_p),
        ("delta", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("grad_delta", ctypes.c_void_p),
        ("grad_k", ctypes.c_void_p),
        ("observed", ctypes.c_double),
        ("index", ctypes.c_void_p),
        ("m", ctypes.c_int64),
        ("dense", ctypes.c_void_p),
        ("dense_type", ctypes.c_int),
        ("log_mass", ctypes.c_void_p),
        ("pull", ctypes.c_void_p),
    )


def unavailable(device: torch.device) -> str:
    """Why the compiled kernels cannot run on this device; empty if they can."""
    if device.type != "cpu":
        return f"the compiled kernel is for the CPU, and the tensor is on {device.type}"
    return missing


def instruction_set() -> str:
    """The instruction set the kernels use on this machine."""
    return _ISA[library().lastlayer_isa()]


def library() -> ctypes.CDLL:
    """Return the loaded library."""
    if _library is None:
        raise RuntimeError(f"lastlayer: the compiled kernel cannot run here: {missing}.")
    return _library


def _load() -> tuple[ctypes.CDLL | None, str]:
    """Return the library, or why there is none."""
    # The plainest suffix first: one that names a version of Python is from before 0.2.
    files = [Path(__file__).with_name(f"_lml{suffix}") for suffix in reversed(EXTENSION_SUFFIXES)]
    path = next((file for file in files if file.exists()), None)
    if path is None:
        return None, "it was not built: the installation found no C compiler that could"
    try:
        found = ctypes.CDLL(str(path))
        if found.lastlayer_call_size() != ctypes.sizeof(Call):
            return None, f"{path.name} is of another version; install the package again"
    except (OSError, AttributeError) as error:
        return None, f"{path.name} cannot be loaded ({error})"
    found.lastlayer_run.argtypes = (ctypes.POINTER(Call), ctypes.c_int, ctypes.c_int)
    return found, ""


_library, missing = _load()  # once, and here: a tracing compiler then sees two constants
