"""The GPU kernels; nothing else imports triton."""

import torch


def unavailable(device: torch.device) -> str:
    """Why the GPU kernels cannot run on this device; empty if they can."""
    return "not built"
