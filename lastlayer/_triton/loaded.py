"""Kernels that Triton compiles and torch loads and launches, so that a first call does not wait for a C compiler.

Triton has its driver built by one, and up to version 3.7 a launcher for each pattern of arguments: most of a second
where nothing is cached. The compiler needs neither, and torch has a launcher for the kernels of its own compiler.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import functools
import operator
from typing import Any

import torch
import triton

from lastlayer._triton import INTERPRETED

_launcher: Any = getattr(torch._C, "_StaticCudaLauncher", None)  # since torch 2.7, in builds with CUDA
_TYPES = {"i1": "i", "i8": "b", "i16": "h", "i32": "i", "i64": "l", "u32": "I", "u64": "K", "fp32": "f", "fp64": "d"}
_SCRATCH = (
    "global_scratch_size",
    "profile_scratch_size",
)  # memory for which a kernel has a parameter, if they are known
AVAILABLE = _launcher is not None and not INTERPRETED and torch.version.hip is None


class Loaded:
    """A compiled kernel on a device; `compiled` is what Triton knows of it."""

    def __init__(self, compiled: Any, device: int) -> None:
        metadata = compiled.metadata
        sizes = [getattr(metadata, name) for name in _SCRATCH if hasattr(metadata, name)]
        if any(sizes) or metadata.num_ctas != 1:
            raise NotImplementedError("such kernels are for Triton's own launcher")
        types = list(compiled.src.signature.values())
        places = [i for i, one in enumerate(types) if one != "constexpr"]
        binary = next(path for name, path in compiled.metadata_group.items() if name.endswith(".cubin"))
        self.compiled = compiled
        self.function = _launcher._load_kernel(str(binary), metadata.name, metadata.shared, device)[-3]
        self._arguments: Any = operator.itemgetter(*places)  # of at least two: a kernel reads and writes
        self._scratch = (None,) * len(sizes)
        kinds = ("O" if types[i].startswith("*") else _TYPES[types[i]] for i in places)
        self._options = (metadata.num_warps, metadata.shared, "".join(kinds) + "O" * len(sizes))

    def launch(self, grid: tuple[int, int, int], stream: int, given: tuple[Any, ...]) -> None:
        """Launch with all arguments in the order of the signature, constants among them; pointers are numbers."""
        arguments = self._arguments(given) + self._scratch
        _launcher._launch_kernel(self.function, *grid, *self._options, arguments, stream)


@functools.cache
def _target(device: int) -> Any:
    major, minor = torch.cuda.get_device_capability(device)
    return triton.backends.compiler.GPUTarget("cuda", 10 * major + minor, 32)


def compile_for(device: int, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Compile a kernel for arguments and constants as its method `run` does, but without Triton's driver."""
    target = _target(device)
    backend = triton.compiler.make_backend(target)
    bind = triton.runtime.jit.create_function_from_signature(kernel.signature, kernel.params, backend)
    given, specialization, _ = bind(*args, **options)
    parsed, *parts = kernel._pack_args(backend, options, given, specialization, options)
    source = triton.compiler.ASTSource(kernel, *parts)
    return triton.compile(source, target=target, options=parsed.__dict__)
