"""First calls: what Triton has to do before a kernel runs for the first time, side by side and not in turn.

With nothing cached Triton compiles the kernel, and builds a launcher for each pattern of arguments. Little of that is
Python, so that threads can share it. A first call then takes as long as its slowest kernel, and not as all of them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import contextlib
import threading
from typing import Any, NamedTuple

import torch
import triton

from lastlayer._triton import INTERPRETED
from lastlayer._triton.launch import in_thread, wait_for_start
from lastlayer._triton.launch import launch as launch_one

_compiling: dict[tuple[Any, ...], threading.Thread] = {}
_met: set[tuple[Any, ...]] = set()  # kinds of calls whose kernels are compiled, or being compiled


class Launch(NamedTuple):
    """A kernel, its grid, arguments and constants."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def case(self) -> tuple[Any, ...]:
        """What tells variants of a kernel apart that are compiled at the same time."""
        return (id(self.kernel), *self.options.values())


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
    """Launch a kernel as `launch.launch` does; wait for it where it is being compiled."""
    if _compiling:
        _wait_for(Launch(kernel, grid, args, options).case)
    return launch_one(kernel, grid, *args, **options)


def _wait_for(case: tuple[Any, ...]) -> None:
    """Wait until a kernel is compiled, and forget those that are."""
    thread = _compiling.get(case)
    if thread is not None:
        thread.join()
    for one, thread in list(_compiling.items()):
        if not thread.is_alive():
            _compiling.pop(one, None)


def is_new(kind: tuple[Any, ...]) -> bool:
    """Whether there has been no call of a kind; from now on there has."""
    if kind in _met:
        return False
    _met.add(kind)
    return not INTERPRETED


def compile_ahead(*launches: Launch) -> None:
    """Compile kernels that will be launched soon, each in a thread of its own."""
    wait_for_start()
    for one in launches:
        _compiling[one.case] = in_thread(_compile, one)


def _compile(one: Launch) -> None:
    with contextlib.suppress(Exception), torch.cuda.device(one.args[0].get_device()):  # each thread has its own
        compiled = one.kernel.warmup(*one.args, grid=one.grid, **one.options)
        # Only the launcher, which is then cached: to load the kernel here could disturb the capture of a CUDA graph.
        triton.runtime.driver.active.launcher_cls(compiled.src, compiled.metadata)
