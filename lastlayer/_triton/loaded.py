"""Kernels that torch loads and launches, so that a first call does not wait for a C compiler.

Triton has its driver built by one, and up to version 3.7 a launcher for each pattern of arguments: most of a second
where nothing is cached. The compiler needs neither, and torch has a launcher for the kernels of its own compiler. What
torch does not do is in `driver`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import functools
import operator
import tempfile
import threading
from typing import Any

import torch
import triton
from torch import Tensor

from lastlayer._triton import INTERPRETED, driver, store

_launcher: Any = getattr(torch._C, "_StaticCudaLauncher", None)  # since torch 2.7, in builds with CUDA
_TYPES = {"i1": "i", "i8": "b", "i16": "h", "i32": "i", "i64": "l", "u32": "I", "u64": "K", "fp32": "f", "fp64": "d"}
_SLOTS: dict[str, Any] = {
    "i1": ctypes.c_int32, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32, "i64": ctypes.c_int64,
    "u32": ctypes.c_uint32, "u64": ctypes.c_uint64, "fp32": ctypes.c_float, "fp64": ctypes.c_double,
}  # fmt: skip
_SCRATCH = ("global_scratch_size", "profile_scratch_size")  # a kernel has a parameter for each that is known
_PLAIN = 48 << 10  # bytes of shared memory that a kernel may have without being allowed more
AVAILABLE = _launcher is not None and not INTERPRETED and torch.version.hip is None


_refusals: list[int] = []  # errors of the driver, after which it is not asked again


class Refused(RuntimeError):
    """The driver has launched nothing, and Triton is to launch the kernel."""


def takes(options: dict[str, Any]) -> bool:
    """Whether a kernel with such options is loaded and launched here, and not by Triton."""
    return AVAILABLE and (
        not options.get("launch_cooperative_grid") or (driver.launcher() is not None and not _refusals)
    )


class Loaded:
    """A kernel on a device; `compiled` is what Triton knows of it, None where it comes with the package."""

    def __init__(self, one: store.Kernel, function: int, compiled: Any = None) -> None:
        places = [i for i, kind in enumerate(one.types) if kind != "constexpr"]
        kinds = [one.types[i] for i in places]
        scratch = one.types[len(one.types) - one.types.count("scratch") :]
        self.compiled, self.function = compiled, function
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


class Together(Loaded):
    """A kernel whose programs all run at once: torch loads it, and the driver launches it."""

    def __init__(self, one: store.Kernel, function: int, compiled: Any = None) -> None:
        super().__init__(one, function, compiled)
        self._start, self._sizes = driver.launcher(), (32 * one.warps, 1, 1, one.shared)
        kinds = [kind for kind in one.types if kind not in ("constexpr", "scratch")]
        # The driver is given the address of each argument, and has copied the arguments when it returns. There is no
        # scratch memory, so that its address stays 0.
        self._slots = [_SLOTS.get(kind, ctypes.c_uint64)() for kind in kinds]
        held = [*self._slots, *(ctypes.c_uint64() for _ in self._scratch)]
        self._places = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
        self._held = held  # or their memory would be taken for something else
        self._lock = threading.Lock()  # Python's own is not held while the driver reads them

    def launch(self, x: int, y: int, z: int, stream: int, given: tuple[Any, ...]) -> None:
        """Launch as `Loaded` does; raise `Refused` if the driver does not."""
        with self._lock:
            for slot, value in zip(self._slots, self._arguments(given), strict=True):
                slot.value = value
            error = self._start(self.function, x, y, z, *self._sizes, stream, ctypes.addressof(self._places))
        if error:
            _refusals.append(error)
            raise Refused(f"the CUDA driver did not launch programs that all run at once: its error {error}")


def described(compiled: Any) -> store.Kernel:
    """Return what a launcher has to know of a compiled kernel."""
    metadata = compiled.metadata
    sizes = [getattr(metadata, name) for name in _SCRATCH if hasattr(metadata, name)]
    types = (*compiled.src.signature.values(), *("scratch" for _ in sizes))
    known = all(kind in _TYPES or kind in ("constexpr", "scratch") or kind.startswith("*") for kind in types)
    if any(sizes) or metadata.num_ctas != 1 or not known:
        raise NotImplementedError("such a kernel is for Triton's own launcher")
    return store.Kernel(metadata.name, metadata.num_warps, metadata.shared, types, b"")


def load(compiled: Any, device: int) -> Loaded:
    """Load a kernel that Triton has compiled."""
    path = next(path for name, path in compiled.metadata_group.items() if name.endswith(".cubin"))
    together = getattr(compiled.metadata, "launch_cooperative_grid", False)
    one = described(compiled)
    return (Together if together else Loaded)(one, _by_torch(one, str(path), device), compiled)


def _by_torch(one: store.Kernel, path: str, device: int) -> int:
    return int(_launcher._load_kernel(path, one.name, one.shared, device)[-3])


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


_stored: dict[tuple[Any, ...], concurrent.futures.Future[Loaded]] = {}
_storing = threading.Lock()


def load_stored(kernel: Any, key: str, device: int, together: bool = False) -> Loaded:
    """Load a kernel that comes with the package; once, even if it serves several patterns of arguments or threads."""
    place = (id(kernel), key, device, together)
    with _storing:
        known = _stored.get(place)
        loading = known or _stored.setdefault(place, concurrent.futures.Future())
    if known is None:
        try:
            loading.set_result(_load_stored(kernel, *place[1:]))
        except BaseException:
            del _stored[place]
            loading.cancel()  # an error for those who wait
            raise
    return loading.result()


def _load_stored(kernel: Any, key: str, device: int, together: bool) -> Loaded:
    one = store.load(kernel, key)
    function = None
    if one.shared <= _PLAIN:
        native = store.load_native(kernel, key) if torch.cuda.get_device_capability(device) == store.NATIVE else None
        for image in (one.ptx,) if native is None else (native, one.ptx):  # which a driver that is older may not take
            with contextlib.suppress(RuntimeError):
                function = driver.load(image, one.name, device)
                break
    if function is None:
        with tempfile.NamedTemporaryFile(suffix=".ptx") as file:
            file.write(one.ptx)
            file.flush()
            function = _by_torch(one, file.name, device)
    return (Together if together else Loaded)(one, function)


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
