"""The GPU kernels; nothing else imports triton."""

import importlib.util
import os

import torch

_FOUND = importlib.util.find_spec("triton") is not None  # looked up once: the compiler cannot trace it


def unavailable(device: torch.device) -> str:
    """Why the GPU kernels cannot run on this device; empty if they can."""
    if not _FOUND:
        return "triton is not installed"
    if device.type == "cuda" or (device.type == "cpu" and interpreted()):
        return ""
    return f"the kernels are for CUDA devices, and the input is on {device.type!r}"


def interpreted() -> bool:
    """Whether Triton runs kernels in Python, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"
