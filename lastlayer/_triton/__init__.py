"""The GPU kernels; nothing else imports triton."""

import importlib.util
import os

import torch

# Looked up once: the compiler cannot trace it, and Triton decides when kernels are defined.
FOUND = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"  # Triton runs kernels in Python, on the CPU


def unavailable(device: torch.device) -> str:
    """Why the GPU kernels cannot run on this device; empty if they can."""
    if not FOUND:
        return "triton is not installed"
    if device.type == "cuda" or (device.type == "cpu" and INTERPRETED):
        return ""
    return f"the kernels are for CUDA devices, and the input is on {device.type!r}"
