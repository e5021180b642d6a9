"""Launching kernels: Triton binds arguments by name each time, which takes longer than a small batch.

A compiled kernel is kept with its constants, and from then on called directly. `launch` finds it by looking at every
argument; `relaunch`, which the most common calls use, by a short key that its caller knows to be enough.

With nothing cached, Triton first builds its driver, unless torch loads the kernels, and hashes itself. Threads do both
while kernels are imported, if those of the package cannot be used; else Triton, which is 400 MB to read, is hashed when
it has to compile.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch
import triton
from torch import Tensor

from lastlayer._triton import INTERPRETED, loaded
from lastlayer._triton.loaded import Loaded, Refused

# Since Triton 3.4 a compiled kernel takes all arguments, constants too, in the order of its signature; a pointer may be
# a number, which spares asking each tensor for its address and the driver whether it is one of the device.
_DIRECT = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6) and not INTERPRETED
_runtime: Any = getattr(getattr(triton, "knobs", None), "runtime", None)  # profilers hang their hooks there
_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # which a build of torch without CUDA lacks
_current: Any = getattr(torch._C, "_cuda_getDevice", None)
_compiled: dict[tuple[Any, ...], tuple[Any, ...]] = {}
_early: dict[tuple[Any, ...], Any] = {}  # compiled, but not loaded yet
_ready: dict[tuple[Any, ...], tuple[Any, ...]] = {}
_slower: dict[tuple[Any, ...], int] = {}  # launches of kernels that assume less than they could
PATIENCE = 3  # launches after which such a kernel is worth another
_starting: list[threading.Thread] = []
_hashing = threading.Lock()


def in_thread(target: Any, *args: Any) -> threading.Thread:
    """Start a thread. Python waits for it at its end: to be stopped in the middle of the compiler would be a crash."""
    thread = threading.Thread(target=target, args=args, daemon=False)  # or it would be, if autograd's thread started it
    thread.start()
    return thread


def _driver() -> None:
    with contextlib.suppress(Exception):  # the call that needs it will say what is wrong
        triton.runtime.driver.active.get_current_target()


def _hash() -> None:
    with _hashing, contextlib.suppress(Exception):  # which one thread does for all
        triton.runtime.cache.triton_key()


def start_driver() -> None:
    """Have Triton's driver built, for kernels that torch does not launch."""
    if not INTERPRETED and torch.cuda.is_available():
        _starting.append(in_thread(_driver))


def wait_for_start() -> None:
    """Wait until Triton has its hash and, where it was started, its driver; several threads may wait."""
    for thread in list(_starting):
        thread.join()
    _hash()


if not INTERPRETED and torch.cuda.is_available() and not loaded.AVAILABLE:
    _starting.append(in_thread(_hash))
    start_driver()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int, **constants: Any) -> Any:
    """Launch ``kernel[grid](*args, **constants)`` on the device of the first argument.

    Triton compiles a kernel for its constants, the types of the arguments, the alignment of pointers, and numbers that
    are 1 or multiples of 16. That happens once for each such case; after that the compiled kernel is called directly.
    Return what is kept of it, for `prepare`.
    """
    if not _DIRECT:
        with torch.cuda.device_of(args[0]):
            kernel[grid](*args, num_warps=num_warps, **constants)
        return None
    device = args[0].get_device()
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, grid, *args, num_warps=num_warps, **constants)
    key, given = case_of(kernel, device, args, num_warps, constants)
    held = _compiled.get(key)
    if held is None:
        options = {"num_warps": num_warps, **constants}
        compiled = _load(key, kernel, device, args, options) or _by_triton(kernel, grid, args, options)
        last = tuple(constants[name] for name in kernel.arg_names[len(args) :])
        held = _compiled[key] = compiled, last, kernel, key in _slower  # the kernel stays alive: its id is in the key
    elif held[3]:
        compiled = _faster(key, kernel, device, args, {"num_warps": num_warps, **constants})
        if compiled is not None:
            held = _compiled[key] = compiled, *held[1:3], False
    try:
        _launch(held, grid, device, given)
    except Refused:
        compiled = _by_triton(kernel, grid, args, {"num_warps": num_warps, **constants})
        held = _compiled[key] = compiled, *held[1:3], False
        _launch(held, grid, device, given)
    return held


def launch_compiled(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Do the same as `launch` with a kernel that is compiled by now; otherwise do nothing, and return None."""
    device = args[0].get_device()
    if not _DIRECT or device != torch.cuda.current_device():
        return None
    constants = options.copy()
    key, given = case_of(kernel, device, args, constants.pop("num_warps"), constants)
    held = _compiled.get(key)
    if held is None or held[3]:
        return None
    try:
        _launch(held, grid, device, given)
    except Refused:  # `launch` is to find another way
        return None
    return held


def _launch(held: tuple[Any, ...], grid: tuple[int, ...], device: int, given: list[Any]) -> None:
    compiled, last, _, _ = held
    x, y, z = (*grid, 1, 1)[:3]
    _run(compiled, (x, y, z), device, (*given, *last))


def case_of(
    kernel: Any, device: int, args: tuple[Any, ...], num_warps: int, constants: dict[str, Any]
) -> tuple[tuple[Any, ...], list[Any]]:
    """Return all that a kernel is compiled for, and its arguments with addresses in place of tensors."""
    case = [id(kernel), device, num_warps, *constants.values()]
    given: list[Any] = []
    for value in args:
        if isinstance(value, Tensor):
            address = value.data_ptr()
            case += (value.dtype, address & 15)
            given.append(address)
            continue
        if isinstance(value, int):
            case.append((value == 1) + 2 * (value % 16 == 0) + 4 * (value.bit_length() > 31))
        else:
            case.append(type(value))
        given.append(value)
    return tuple(case), given


def _load(key: tuple[Any, ...], kernel: Any, device: int, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Load a kernel with torch, and compile it if it neither comes with the package nor is compiled by now.

    None if that cannot be, and Triton is to do it.
    """
    if not loaded.takes(options):
        return None
    with contextlib.suppress(Exception):  # the driver may be too old for it, or Triton tell arguments otherwise
        stored, fast = loaded.stored_key(device, kernel, args, options)
        if stored is not None:
            found = loaded.load_stored(kernel, stored, device, _together(options))
            if not fast:
                _slower[key] = 1
            return found
    with contextlib.suppress(Exception):  # other versions of Triton or torch; or Triton will raise it again
        wait_for_start()
        compiled = _early.pop(key, None) or loaded.compile_for(loaded.target_of(device), kernel, args, options)
        return loaded.load(compiled, device)
    return None


def _faster(key: tuple[Any, ...], kernel: Any, device: int, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Count a launch of a kernel that assumes less than it could; in the end, return one compiled meanwhile."""
    if key in _early:
        if torch.cuda.is_current_stream_capturing():  # loading could disturb it
            return None
        _slower.pop(key, None)
        with contextlib.suppress(Exception):
            return loaded.load(_early.pop(key), device)
        return None
    launches = _slower.get(key)
    if launches is not None:  # or another thread has the faster one by now
        _slower[key] = launches + 1
        if launches + 1 == PATIENCE:
            compile_meanwhile(key, kernel, device, args, options)
    return None


def compile_meanwhile(
    key: tuple[Any, ...], kernel: Any, device: int, args: tuple[Any, ...], options: dict[str, Any]
) -> threading.Thread:
    """Have a kernel compiled while others do its work; the large tensors among the arguments are not kept."""
    return in_thread(_compile_meanwhile, key, kernel, device, loaded.like(args), options)


def _compile_meanwhile(
    key: tuple[Any, ...], kernel: Any, device: int, args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    with contextlib.suppress(Exception):
        wait_for_start()
        _early[key] = loaded.compile_for(loaded.target_of(device), kernel, args, options)


def at_hand(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Whether a kernel is compiled or comes with the package; or cannot come with it, so that it is to be compiled."""
    device = args[0].get_device()
    if not (_DIRECT and loaded.takes(options) and loaded.serves(device)):
        return True
    key = key_of(kernel, device, args, options)
    if key in _compiled or key in _early:
        return True
    try:
        return loaded.stored_key(device, kernel, args, options)[0] is not None
    except Exception:  # as in `_load`: Triton may tell arguments otherwise, and is to compile it
        return True


def key_of(kernel: Any, device: int, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """Return all that a kernel is compiled for."""
    constants = options.copy()
    return case_of(kernel, device, args, constants.pop("num_warps"), constants)[0]


def _by_triton(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    wait_for_start()
    return kernel.warmup(*args, grid=grid, **options)


def compile_early(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Compile a kernel that is launched later; it is not loaded, which could disturb the capture of a CUDA graph."""
    device = args[0].get_device()
    if loaded.takes(options):
        if loaded.stored_key(device, kernel, args, options)[0] is None:
            wait_for_start()
            key = key_of(kernel, device, args, options)
            _early[key] = loaded.compile_for(loaded.target_of(device), kernel, args, options)
        return
    wait_for_start()
    with torch.cuda.device(device):  # each thread has its own
        compiled = kernel.warmup(*args, grid=(1,), **options)
        triton.runtime.driver.active.launcher_cls(compiled.src, compiled.metadata)  # which is then cached


def load_early(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Load a kernel that is launched later, if it comes with the package; return whether it does."""
    device = args[0].get_device()
    stored = loaded.stored_key(device, kernel, args, options)[0] if loaded.takes(options) else None
    if stored is not None:
        loaded.load_stored(kernel, stored, device, _together(options))
    return stored is not None


def _together(options: dict[str, Any]) -> bool:
    return bool(options.get("launch_cooperative_grid"))


def _run(compiled: Any, grid: tuple[int, int, int], device: int, given: tuple[Any, ...]) -> None:
    """As ``compiled[grid](*given)``, which asks for the device and prepares the kernel each time."""
    stream, told = _stream(device), _is_told()
    if isinstance(compiled, Loaded):
        if not told or compiled.compiled is None:  # of a kernel of the package there is nothing to tell
            compiled.launch(grid[0], grid[1], grid[2], stream, given)
            return
        compiled = compiled.compiled
    enter = leave = metadata = None
    if told:
        enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
        metadata = compiled.launch_metadata(grid, stream, *given)
    compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, metadata, enter, leave, *given)


def _is_told() -> bool:
    """Whether a profiler listens; chains of hooks are there when they are empty too."""
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    if enter is not None and getattr(enter, "calls", True):
        return True
    return leave is not None and bool(getattr(leave, "calls", True))


def prepare(key: tuple[Any, ...], held: Any, rows: int) -> None:
    """Keep what `launch` has returned under a short key, with the number of rows per program."""
    if held is not None and not held[3]:  # or `launch` would not replace it
        _ready[key] = (*held[:2], rows)


def relaunch(key: tuple[Any, ...], device: int, rows: int, *given: Any) -> bool:
    """Launch again what was prepared under `key`; return False, and do nothing, if there is no such kernel.

    The key stands for all that a kernel is compiled for. Pointers are given as numbers.
    """
    held = _ready.get(key)
    if held is None or device != _current():
        return False
    try:
        run_again(held, device, rows, given)
    except Refused:  # `launch` is to find another way
        _ready.pop(key, None)
        return False
    return True


def on_current(device: int) -> bool:
    """Whether a device is the one that kernels are launched on."""
    return bool(device == _current())


def stream_of(device: int) -> int:
    """Return the handle of the stream on which kernels are launched."""
    return 0 if INTERPRETED else _stream(device)


def ready(key: tuple[Any, ...]) -> Any:
    """Return what was prepared under `key`, for `run_again`; None if there is nothing."""
    return _ready.get(key)


def run_again(held: Any, device: int, rows: int, given: tuple[Any, ...]) -> None:
    """Launch what `ready` has returned on the current device."""
    compiled, last, per = held
    if isinstance(compiled, Loaded) and not _is_told():
        compiled.launch(-(-rows // per), 1, 1, _stream(device), given)  # which needs no constants
    else:
        _run(compiled, (-(-rows // per), 1, 1), device, (*given, *last))
