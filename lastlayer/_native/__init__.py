"""The compiled CPU kernels; nothing else loads compiled code."""

import torch


def unavailable(device: torch.device) -> str:
    """Why the compiled kernels cannot run on this device; empty if they can."""
    return "not built"
