"""First calls: what Triton has to do before a kernel runs for the first time, side by side and not in turn.

With nothing cached Triton compiles the kernel. Little of that is Python, so that threads can share it. A first call
then takes as long as its slowest kernel, and not as all of them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from lastlayer._triton import INTERPRETED
from lastlayer._triton.launch import compile_early, in_thread
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


def launch_all(launches: list[Launch], later: Callable[[], list[Launch]] | None = None) -> Any:
    """Launch kernels one after another; the first time all of them, and those of `later`, are compiled side by side.

    Return what `launch` returns for the last of them.
    """
    x = launches[0].args[0]
    if is_new((x.get_device(), x.dtype, later is None, *(one.case for one in launches))):
        every = launches[1:] + ([] if later is None else later())
        compile_ahead(*{one.case: one for one in every}.values())
    held = None
    for kernel, grid, args, options in launches:
        held = launch(kernel, grid, *args, **options)
    return held


def compile_ahead(*launches: Launch) -> None:
    """Compile kernels that will be launched soon, each in a thread of its own."""
    for one in launches:
        _compiling[one.case] = in_thread(_compile, one)


def _compile(one: Launch) -> None:
    with contextlib.suppress(Exception):  # which the launch will raise
        compile_early(one.kernel, one.args, one.options)
