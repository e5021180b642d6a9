"""The GPU kernels; nothing else imports triton."""

import importlib.util
import os
import re
from pathlib import Path

import torch

OLDEST = (3, 6)  # that the kernels are tested with; the compilers before 3.5 refuse some of them, or crash


def _version() -> tuple[int, ...] | None:
    """Return the version of Triton without importing it, None if it is not installed."""
    spec = importlib.util.find_spec("triton")
    if spec is None:
        return None
    said = re.search(r"__version__ = ['\"](\d+)\.(\d+)", Path(spec.origin).read_text()) if spec.origin else None
    return tuple(map(int, said.groups())) if said else OLDEST


# Looked up once: the compiler cannot trace it, and Triton decides when kernels are defined.
VERSION = _version()
FOUND = VERSION is not None and VERSION >= OLDEST
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"  # Triton runs kernels in Python, on the CPU


def unavailable(device: torch.device) -> str:
    """Why the GPU kernels cannot run on this device; empty if they can."""
    if VERSION is None:
        return "triton is not installed"
    if not FOUND:
        return f"triton {_dotted(VERSION)} is installed, and the kernels need {_dotted(OLDEST)} or newer"
    if device.type == "cuda" or (device.type == "cpu" and INTERPRETED):
        return ""
    return f"the kernels are for CUDA devices, and the input is on {device.type!r}"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
