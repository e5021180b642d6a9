"""Launching kernels: Triton binds arguments by name each time, which takes longer than a small batch."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from lastlayer._triton import INTERPRETED

# Since Triton 3.4 a compiled kernel takes all arguments, constants too, in the order of its signature.
_DIRECT = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6) and not INTERPRETED
_runtime: Any = getattr(getattr(triton, "knobs", None), "runtime", None)  # profilers hang their hooks there
_compiled: dict[tuple[Any, ...], tuple[Any, ...]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int, **constants: Any) -> None:
    """Launch ``kernel[grid](*args, **constants)`` on the device of the first argument.

    Triton compiles a kernel for its constants, the types of the arguments, the alignment of pointers, and numbers that
    are 1 or multiples of 16. That happens once for each such case; after that the compiled kernel is called directly.
    """
    if not _DIRECT:
        with torch.cuda.device_of(args[0]):
            kernel[grid](*args, num_warps=num_warps, **constants)
        return
    device = args[0].get_device()
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, grid, *args, num_warps=num_warps, **constants)
    case = [id(kernel), device, num_warps, *constants.values()]
    for value in args:
        if isinstance(value, Tensor):
            case += (value.dtype, value.data_ptr() & 15)
        elif isinstance(value, int):
            case.append((value == 1) + 2 * (value % 16 == 0) + 4 * (value.bit_length() > 31))
        else:
            case.append(type(value))
    key = tuple(case)
    held = _compiled.get(key)
    if held is None:
        compiled = kernel[grid](*args, num_warps=num_warps, **constants)
        last = tuple(constants[name] for name in kernel.arg_names[len(args) :])
        _compiled[key] = compiled, last, kernel  # which stays alive: its id is in the key
        return
    compiled, last, _ = held
    x, y, z = (*grid, 1, 1)[:3]
    stream = torch._C._cuda_getCurrentRawStream(device)
    given = (*args, *last)
    # As `compiled[grid](*given)`, which asks for the device and prepares the kernel each time.
    metadata = compiled.launch_metadata((x, y, z), stream, *given)
    hooks = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, metadata, *hooks, *given)
