"""Which implementations this installation can run, and why not the others."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Configuration:
    """Which implementations this installation can run; ``str`` of it is a short table.

    Args:
        lastlayer: The version of the package.
        torch: The version of torch.
        threads: The number of CPU threads of torch and of the compiled kernel.
        native: The compiled CPU kernel: its instruction set, or why it cannot run.
        triton: The GPU kernels: the device they run on, how many were compiled and where they are kept, or why they
            cannot run.
    """

    lastlayer: str
    torch: str
    threads: int
    native: str
    triton: str

    def __str__(self) -> str:
        rows = [f"{name:<10}{value}" for name, value in vars(self).items()]
        return "\n".join(rows)


def show_config() -> Configuration:
    """Return which implementations are in use, and why the others are not.

    Returns:
        The versions, the number of threads, and the state of the compiled CPU kernel and of the GPU kernels. Print
        it to read it.

    Example:
        >>> show_config().torch == torch.__version__
        True
    """
    import lastlayer

    return Configuration(lastlayer.__version__, torch.__version__, torch.get_num_threads(), _native(), _triton())


def _native() -> str:
    from lastlayer import _native as native

    reason = native.unavailable(torch.device("cpu"))
    return f"not in use: {reason}; plain torch instead" if reason else f"compiled, {native.instruction_set()}"


def _triton() -> str:
    from lastlayer import _triton as triton

    reason = triton.unavailable(torch.device("cuda"))
    if not reason and not torch.cuda.is_available():
        reason = "torch sees no CUDA device"
    return f"not in use: {reason}" if reason else f"on {torch.cuda.get_device_name()}, {_compiled()}"


def _compiled() -> str:
    """Tell how many GPU kernels this process has loaded, and where those are kept that were compiled."""
    launch = sys.modules.get("lastlayer._triton.launch")  # imported by the first call
    kernels = [] if launch is None else list({id(held[0]): held[0] for held in launch._compiled.values()}.values())
    ready = sum(getattr(kernel, "compiled", kernel) is None for kernel in kernels)
    folder = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
    return f"kernels so far: {ready} of the package, {len(kernels) - ready} compiled and kept in {folder}"
