"""The compiled CPU kernels; nothing else loads compiled code.

`lml.c` and `fused.c` are plain C. They are built when the package is installed, if there is a compiler, and loaded here
as one shared library.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import struct
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

_ISA = ("baseline", "AVX2", "AVX-512")


# ``struct call`` of `lml.c`, in native alignment: rows, n, logits, k, k_stride, mask, mask_stride, temperature, kind,
# threads, out, center, delta, grad, grad_delta, grad_k, observed, index, m, dense, dense_type, log_mass, pull,
# weight, total, mean, slope, over, unit, half.
CALL = struct.Struct("@qqPPqPqdiiPPPPPPdPqPiPPPPqPPdq")


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
        library = ctypes.CDLL(str(path))
        if library.lastlayer_call_size() != CALL.size:
            return None, f"{path.name} is of another version; install the package again"
        for run in (library.lastlayer_run, library.lastlayer_run_weighted):
            run.argtypes = (ctypes.c_char_p, ctypes.c_int, ctypes.c_int)
        library.lastlayer_run_grouped.argtypes = (ctypes.c_char_p,)
        library.lastlayer_run_fused.argtypes = (ctypes.c_char_p,)
        pointer, whole = ctypes.c_void_p, ctypes.c_int
        types = (pointer, ctypes.c_double, pointer, ctypes.c_int64, whole, whole)
        library.lastlayer_scale_to_half.argtypes = types
        library.lastlayer_use_team.argtypes = (ctypes.c_void_p,)
        library.lastlayer_use_team(_team())
    except (OSError, AttributeError) as error:
        return None, f"{path.name} cannot be loaded ({error})"
    return library, ""


def _team() -> int | None:
    """Return the address at which torch's OpenMP runtime starts a parallel region; None if there is no such runtime.

    It is looked for among the libraries that torch itself is linked to: another package may have loaded its own
    runtime, with other threads. A process that was forked has none of the runtime's threads, and would wait for them.
    """
    if multiprocessing.parent_process() is not None and "multiprocessing.popen_fork" in sys.modules:
        return None
    try:
        return ctypes.cast(ctypes.CDLL(torch._C.__file__).GOMP_parallel, ctypes.c_void_p).value
    except (AttributeError, OSError):
        return None


_library, missing = _load()  # once, and here: a tracing compiler then sees two constants
