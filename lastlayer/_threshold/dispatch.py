"""Which implementation takes an input, and why another does not."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from lastlayer import _check, _native, _triton
from lastlayer.shard import ClassShard

Impl = Literal["auto", "torch", "native", "triton"]


def choose(op: str, impl: Impl, x: Tensor, shard: ClassShard | None) -> Impl:
    """Turn ``"auto"`` into the fastest implementation that applies; check an explicit one."""
    _check.choice(op, "impl", impl, ("auto", "torch", "native", "triton"))
    if impl == "torch":
        return impl
    if impl == "auto":
        if _exporting():  # a graph for other runtimes holds plain operators
            return "torch"
        fastest: tuple[Impl, ...] = ("triton", "native")
        return next((name for name in fastest if not _unfit(name, x, shard)), "torch")
    reason = _unfit(impl, x, shard)
    if reason:
        raise RuntimeError(f'{op}: `impl="{impl}"` cannot run here: {reason}. Use `impl="auto"`.')
    return impl


def _unfit(impl: Impl, x: Tensor, shard: ClassShard | None) -> str:
    """Why an implementation cannot take this input; empty if it can."""
    if shard is not None:
        return "the classes are sharded"
    if torch.jit.is_tracing():
        return "a trace holds plain operators"
    if impl == "triton":
        if x.dtype == torch.float64:
            return "the kernels are for float32, bfloat16 and float16"
        return _triton.unavailable(x.device)
    if x.dtype not in (torch.float32, torch.float64):
        return "the compiled kernel is for float32 and float64"
    return _native.unavailable(x.device)


def _exporting() -> bool:
    is_exporting = getattr(torch.compiler, "is_exporting", None)
    return bool(is_exporting and is_exporting())


@functools.cache
def kernels(impl: str) -> ModuleType:
    """Import the kernels of an implementation."""
    if impl == "triton":
        return importlib.import_module("lastlayer._triton.lml")
    return importlib.import_module("lastlayer._native.lml")
