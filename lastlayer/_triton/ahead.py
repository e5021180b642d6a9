"""First calls: what has to be done before a kernel runs for the first time, side by side and not in turn.

A kernel of the package is translated by the driver; any other is compiled by Triton first. Little of that is Python, so
that threads can share it. A first call then takes as long as its slowest kernel, and not as all of them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from lastlayer._triton import INTERPRETED, loaded
from lastlayer._triton.launch import (
    PATIENCE,
    at_hand,
    compile_early,
    compile_meanwhile,
    in_thread,
    key_of,
    launch_compiled,
    load_early,
)
from lastlayer._triton.launch import launch as launch_one
from lastlayer._triton.plan import in_general_form

_compiling: dict[tuple[Any, ...], threading.Thread] = {}
_met: set[tuple[Any, ...]] = set()  # kinds of calls whose kernels are compiled, or being compiled
_absent: dict[tuple[Any, ...], _Wait | None] = {}  # kinds of calls; None if their kernels are at hand
MOST = 7 << 20  # logits of a call that is made in its general form without looking at the memory there is
BYTES = 48  # per logit that the general form takes at most: copies in float32, weights and bounds, and their gradients


class Absent(Exception):
    """A kernel would have to be compiled first; the call is to be made in its general form, whose kernels are there."""


class _Wait:
    """A kind of call whose own kernels are not at hand."""

    def __init__(self) -> None:
        self.calls = 0
        self.threads: list[threading.Thread] = []


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


def _provided(x: Any) -> bool:
    """Whether kernels for the general form of a call come with the package, and can be used."""
    usable = not INTERPRETED and loaded.AVAILABLE and loaded.serves(x.get_device())
    return usable and not in_general_form()


def _has_room(x: Any) -> bool:
    """Whether the general form of a call takes little of the memory that is free; else its own kernels are waited for.

    A batch that just fits into the memory has to fit on its first call, too.
    """
    if x.numel() <= MOST:
        return True
    if torch.cuda.is_current_stream_capturing():
        return False
    device = x.get_device()
    try:
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    except RuntimeError:  # an allocator that does not tell
        return False
    return bool(BYTES * x.numel() <= free // 2)


def absent(launches: list[Launch], lasting: bool | None = None) -> bool:
    """Whether a call would have to wait for its own kernels, and is better made in its general form.

    As soon as they are worth it, its own kernels are compiled meanwhile, unless `lasting`. Kernels that hold rows in
    registers are not, if nothing else is said: they serve many lengths, and one that is met often is given others.
    """
    kernel, _, args, options = launches[0]
    if not _provided(args[0]):
        return False
    device = args[0].get_device()
    kind = (*key_of(kernel, device, args, options), *(one.case for one in launches[1:]))
    if kind not in _absent:
        _absent[kind] = None if all(at_hand(one.kernel, one.args, one.options) for one in launches) else _Wait()
    wait = _absent[kind]
    if wait is None or not _has_room(args[0]):
        return False
    wait.calls += 1
    lasting = "R" in options if lasting is None else lasting
    if wait.calls == PATIENCE and not lasting:
        cases = {key_of(one.kernel, device, one.args, one.options): one for one in launches}
        wait.threads = [compile_meanwhile(key, one.kernel, device, one.args, one.options) for key, one in cases.items()]
    compiled = wait.threads and not any(thread.is_alive() for thread in wait.threads)
    if compiled and not torch.cuda.is_current_stream_capturing():  # loading could disturb it
        _absent[kind] = None
        return False
    return True


def launch_all(
    launches: list[Launch],
    later: Callable[[], list[Launch]] | None = None,
    *,
    shared: bool = False,
    lasting: bool | None = None,
) -> Any:
    """Launch kernels one after another; the first time all of them, and those of `later`, are made ready side by side.

    Return what `launch` returns for the last of them. With `shared`, raise `Absent` instead of compiling any: see
    `absent`.
    """
    x = launches[0].args[0]
    shared = shared and _provided(x)
    if shared:
        held = _launch_compiled(launches)
        if held is not None:
            return held
        if absent(launches, lasting):
            raise Absent
    if is_new((x.get_device(), x.dtype, later is None, *(one.case for one in launches))):
        every = {one.case: one for one in launches[1:] + ([] if later is None else later())}
        # Unless there is no room for it, what is not at hand by then has its general form, too.
        _ahead(every.values(), compiles=not shared or not _has_room(x))
    held = None
    for kernel, grid, args, options in launches:
        held = launch(kernel, grid, *args, **options)
    return held


def _launch_compiled(launches: list[Launch]) -> Any:
    """Launch kernels that are compiled by now; None if one of them is not, and all have to be launched again."""
    held = None
    for kernel, grid, args, options in launches:
        held = launch_compiled(kernel, grid, args, options)
        if held is None:
            break
    return held


def compile_ahead(*launches: Launch) -> None:
    """Load kernels that will be launched soon, or compile them, each in a thread of its own."""
    _ahead(launches, compiles=True)


def _ahead(launches: Iterable[Launch], *, compiles: bool) -> None:
    loads = not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
    for one in launches:
        _compiling[one.case] = in_thread(_make_ready, one, loads, compiles)


def _make_ready(one: Launch, loads: bool, compiles: bool) -> None:
    given = one.kernel, one.args, one.options
    with contextlib.suppress(Exception):  # which the launch will raise
        if not (loads and load_early(*given)) and compiles:
            compile_early(*given)
