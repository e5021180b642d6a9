"""Kernels that torch loads and launches, so that a first call does not wait for a C compiler.

Triton has its driver built by one, and up to version 3.7 a launcher for each pattern of arguments: most of a second
where nothing is cached. The compiler needs neither, and torch has a launcher for the kernels of its own compiler.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import functools
import operator
import tempfile
from typing import Any

import torch
import triton
from torch import Tensor

from lastlayer._triton import INTERPRETED, store

_launcher: Any = getattr(torch._C, "_StaticCudaLauncher", None)  # since torch 2.7, in builds with CUDA
_TYPES = {"i1": "i", "i8": "b", "i16": "h", "i32": "i", "i64": "l", "u32": "I", "u64": "K", "fp32": "f", "fp64": "d"}
_SCRATCH = ("global_scratch_size", "profile_scratch_size")  # a kernel has a parameter for each that is known
AVAILABLE = _launcher is not None and not INTERPRETED and torch.version.hip is None


def takes(options: dict[str, Any]) -> bool:
    """Whether torch can launch a kernel with such options; it starts no programs that wait for each other."""
    return AVAILABLE and not options.get("launch_cooperative_grid")


class Loaded:
    """A kernel on a device; `compiled` is what Triton knows of it, None where it comes with the package."""

    def __init__(self, one: store.Kernel, path: str, device: int, compiled: Any = None) -> None:
        places = [i for i, kind in enumerate(one.types) if kind != "constexpr"]
        kinds = [one.types[i] for i in places]
        scratch = one.types[len(one.types) - one.types.count("scratch") :]
        self.compiled = compiled
        self.function = _launcher._load_kernel(path, one.name, one.shared, device)[-3]
        self._options = (one.warps, one.shared, "".join(_TYPES.get(kind, "O") for kind in kinds))
        self._scratch = (None,) * len(scratch)
        self._arguments: Any = operator.itemgetter(*places[: len(places) - len(scratch)])  # two or more

    def launch(self, x: int, y: int, z: int, stream: int, given: tuple[Any, ...]) -> None:
        """Launch with all arguments in the order of the signature, constants among or after them or not.

        Pointers are numbers.
        """
        warps, shared, types = self._options
        arguments = self._arguments(given) + self._scratch
        _launcher._launch_kernel(self.function, x, y, z, warps, shared, types, arguments, stream)


def described(compiled: Any) -> store.Kernel:
    """Return what a launcher has to know of a compiled kernel."""
    metadata = compiled.metadata
    sizes = [getattr(metadata, name) for name in _SCRATCH if hasattr(metadata, name)]
    types = (*compiled.src.signature.values(), *("scratch" for _ in sizes))
    known = all(kind in _TYPES or kind in ("constexpr", "scratch") or kind.startswith("*") for kind in types)
    plain = metadata.num_ctas == 1 and not getattr(metadata, "launch_cooperative_grid", False)
    if any(sizes) or not plain or not known:
        raise NotImplementedError("such a kernel is for Triton's own launcher")
    return store.Kernel(metadata.name, metadata.num_warps, metadata.shared, types, b"")


def load(compiled: Any, device: int) -> Loaded:
    """Load a kernel that Triton has compiled."""
    path = next(path for name, path in compiled.metadata_group.items() if name.endswith(".cubin"))
    return Loaded(described(compiled), str(path), device, compiled)


@functools.cache
def serves(device: int) -> bool:
    """Whether a device takes the kernels that come with the package; -1 is the CPU, which does not."""
    return device >= 0 and bool(torch.cuda.get_device_capability(device) >= store.LEAST)


def stored_key(device: int, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[str | None, bool]:
    """Return the key of the variant for arguments and constants that comes with the package, if there is one.

    And whether it is as fast as one that would be compiled for them: it may assume less of the arguments.
    """
    if not serves(device):
        return None, False
    key = key_of(target_of(device), kernel, args, options)
    found = store.find(kernel, key)
    return found, found == key or not _uses_alignment(kernel, options)


def _uses_alignment(kernel: Any, options: dict[str, Any]) -> bool:
    """Whether a kernel reads several classes at once where it knows that rows begin at multiples of 16 bytes."""
    if "ALIGN" in options:
        return bool(options["ALIGN"] != 1)
    return any(one.name in ("n", "stride") and not one.do_not_specialize for one in kernel.params)


@functools.cache
def load_stored(kernel: Any, key: str, device: int) -> Loaded:
    """Load a kernel that comes with the package; once, though it may serve several patterns of arguments."""
    one = store.load(kernel, key)
    with tempfile.NamedTemporaryFile(suffix=".ptx") as file:
        file.write(one.ptx)
        file.flush()
        return Loaded(one, file.name, device)


@functools.cache
def target_of(device: int) -> Any:
    """Return what Triton compiles for on a device."""
    major, minor = torch.cuda.get_device_capability(device)
    return triton.backends.compiler.GPUTarget("cuda", 10 * major + minor, 32)


def like(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments for which the same would be compiled, with small tensors in the place of large ones."""
    return tuple(
        torch.empty(32, dtype=one.dtype)[0 if one.data_ptr() % 16 == 0 else 1 :] if isinstance(one, Tensor) else one
        for one in args
    )


def _bind(target: Any, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any, list[Any]]:
    """Return the backend, all arguments by name, and what is known of each when the kernel is compiled."""
    backend = triton.compiler.make_backend(target)
    bind = triton.runtime.jit.create_function_from_signature(kernel.signature, kernel.params, backend)
    given, specialization, _ = bind(*args, **options)
    return backend, given, specialization


def key_of(target: Any, kernel: Any, args: tuple[Any, ...], options: dict[str, Any], *, general: bool = False) -> str:
    """Return the key in `store` of a kernel for arguments and constants; it is the same for every target.

    `general` is the variant that assumes nothing of the arguments.
    """
    _, _, specialization = _bind(target, kernel, args, options)
    specialization = store.weaker(specialization, kernel) if general else specialization
    free = {name: value for name, value in options.items() if name not in kernel.arg_names}
    return store.key_of(kernel, specialization, free)


def compile_for(
    target: Any, kernel: Any, args: tuple[Any, ...], options: dict[str, Any], *, general: bool = False
) -> Any:
    """Compile a kernel for arguments and constants as its method `run` does, but without Triton's driver."""
    backend, given, specialization = _bind(target, kernel, args, options)
    specialization = store.weaker(specialization, kernel) if general else specialization
    parsed, *parts = kernel._pack_args(backend, options, given, specialization, options)
    source = triton.compiler.ASTSource(kernel, *parts)
    return triton.compile(source, target=target, options=parsed.__dict__)
