"""What a call needs, which implementation takes it and why another does not, and how a kernel is called.

A kernel reads memory, so it is called directly only on plain tensors while nothing watches the call. In every other
case (tracing, a dispatch mode, a tensor subclass) the registered operator of `operators.py` is called instead: the
dispatcher unwraps, records or fakes it, and in the end hands plain tensors to the same kernel.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn, strided
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from lastlayer import _check, _native, _triton
from lastlayer._ranked import exporting
from lastlayer._threshold.search import sizes
from lastlayer.shard import ClassShard, local_part, spread, unwrap

Impl = Literal["auto", "torch", "native", "triton"]
_Function = TypeVar("_Function", bound=Callable[..., Any])
P = ParamSpec("P")
WHOLE: dict[str, Callable[..., Tensor]] = {}  # functions that the compiler may see as one operator, by their names

# By name, since the shortest calls notice the way through modules.
_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_interpreters: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
has_storage: Callable[[Tensor], bool] = torch._C._has_storage
_is_tracing: Callable[[], bool] = torch._C._is_tracing


def whole(
    function: Callable[P, Tensor], by_operator: Callable[[str, dict[str, Any]], Tensor | None]
) -> Callable[P, Tensor]:
    """Let the compiler see ``by_operator(name, arguments)`` for a function, unless that is None.

    The arguments are those that are not None, in the order of the signature. A call that does not fit the signature, or
    has a None where that is not the default, goes to the function, which says so.
    """
    name, parameters = function.__name__, inspect.signature(function).parameters
    names = tuple(parameters)
    in_place = tuple(n for n in names if parameters[n].kind is not inspect.Parameter.KEYWORD_ONLY)
    may_be_none = tuple(n for n in names if parameters[n].default is None)
    WHOLE[name] = function

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> Tensor:
        if is_compiling():
            given = dict(zip(in_place[: len(args)], args))  # noqa: B905 - torch 2.6 knows no `strict`
            once = len(given) == len(args) and all(n in names and n not in given for n in options)
            given.update(options)
            if once and all(given[n] is not None or n in may_be_none for n in given):
                result = by_operator(name, {n: given[n] for n in names if given.get(n) is not None})
                if result is not None:
                    return result
        return function(*args, **options)

    return call


class Problem(NamedTuple):
    """Rows to be solved: checked, with the classes in the last dimension, for one implementation."""

    x: Tensor
    k: Any  # one number for all rows, or a tensor (*batch, 1) of the work dtype
    mask: Tensor | None
    temperature: float
    shard: ClassShard | None
    impl: Impl


def enter(
    op: str,
    logits: Tensor,
    k: float | Tensor,
    dim: int,
    temperature: float | Tensor,
    mask: Tensor | None,
    shard: ClassShard | None,
    impl: Impl,
    *,
    at_most_n: bool = True,
) -> tuple[Problem, Callable[[Tensor], Tensor]]:
    """Check the arguments; return the problem, and the way back to the form of the input."""
    if mask is None and shard is None and dim == -1 and impl == "auto" and ordinary(logits, k, temperature):
        return Problem(logits, float(k), None, 1.0, None, "native" if logits.is_cpu else "triton"), _unchanged
    back: Callable[[Tensor], Tensor] = _unchanged
    if shard is not None or type(logits) is not Tensor:
        logits, shard, back = unwrap(op, logits, shard, dim, k)
    x = _check.logits(op, logits)
    if mask is not None:
        mask = _check.mask(op, local_part(mask), x)
    if dim != -1:
        place, wrap = _check.dim(op, dim, x.ndim), back
        x, mask = x.movedim(place, -1), None if mask is None else mask.movedim(place, -1)
        back = lambda out: wrap(out.movedim(-1, place))  # noqa: E731
    dtype, wrapped = x.dtype, back
    x, divisor = tempered(op, x, temperature, shard)
    if x.dtype != dtype:
        back = lambda out: wrapped(out.to(dtype))  # noqa: E731
    impl = choose(op, impl, x, shard)
    if isinstance(k, Tensor) or (torch.compiler.is_compiling() and not exporting()):
        k = _check.cardinality(op, k, x, shard, at_most_n=at_most_n)
    else:
        n = x.shape[-1]
        k = _check.cardinality_of_all(op, k, n, n if at_most_n and shard is None else math.inf)
    return Problem(x, k, mask, divisor, shard, impl), back


def ordinary(logits: Any, k: Any, temperature: Any) -> bool:
    """Whether this is the common call, for which nothing else need be looked at."""
    return (
        not is_compiling()
        and type(logits) is Tensor
        and (type(k) is int or type(k) is float)
        and type(temperature) is float
        and temperature == 1
        and logits.dtype in _check.FLOATS
        and (not _native.missing if logits.is_cpu else logits.is_cuda and _triton.FOUND and logits.itemsize < 8)
        and logits.layout is strided
        and not logits.is_nested
        and logits.ndim > 0
        and 0 <= k <= logits.shape[-1]
        and not (_triton.INTERPRETED or _is_tracing())
    )


def tempered(op: str, x: Tensor, temperature: float | Tensor, shard: ClassShard | None) -> tuple[Tensor, float]:
    """Return the scores and the number that kernels divide them by; scores divided here are in the work dtype."""
    divisor = _check.temperature(op, temperature)
    if isinstance(divisor, Tensor):  # one per row; autograd sees the division
        x = x.to(_check.work_dtype(x))
        rows = _check.temperatures(op, spread(divisor, shard), x.shape[:-1], x.dtype)
        return divided(x, rows.unsqueeze(-1)), 1.0
    if torch.compiler.is_compiling() and not exporting() and not _known_to_be_1(divisor):
        return x.to(_check.work_dtype(x)) / divisor, 1.0  # an operator would be compiled again for each number
    return x, float(divisor)


def _known_to_be_1(number: float) -> bool:
    """Whether the compiler knows that a number is 1; to ask whether it is 1 would fix a number that varies."""
    if not hasattr(torch.compiler, "is_exporting"):  # the compiler of torch 2.6 cannot say
        return number == 1
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # half a second, spent when compiling

    return bool(statically_known_true(number == 1))


def _unchanged(out: Tensor) -> Tensor:
    return out


def divided(x: Tensor, temperature: Tensor) -> Tensor:
    """Divide by a temperature, which does not change an infinite score."""
    finite = x.isfinite()
    return torch.where(finite, torch.where(finite, x, 0) / temperature, x)


def choose(op: str, impl: Impl, x: Tensor, shard: ClassShard | None) -> Impl:
    """Turn ``"auto"`` into the fastest implementation that applies; check an explicit one."""
    if impl == "auto":
        if exporting():  # a graph for other runtimes holds plain operators
            return "torch"
        if (x.is_cuda or _triton.INTERPRETED) and not _unfit("triton", x, shard):
            return "triton"
        return "torch" if _unfit("native", x, shard) else "native"
    _check.choice(op, "impl", impl, ("auto", "torch", "native", "triton"))
    reason = "" if impl == "torch" else _unfit(impl, x, shard)
    if reason:
        raise RuntimeError(f'{op}: `impl="{impl}"` cannot run here: {reason}. Use `impl="auto"`.')
    return impl


def _unfit(impl: Impl, x: Tensor, shard: ClassShard | None) -> str:
    """Say why an implementation cannot take this input; empty if it can."""
    if shard is not None:
        return "the classes are sharded"
    if torch.jit.is_tracing():
        return "a trace holds plain operators"
    if impl == "triton":
        if x.dtype == torch.float64:
            return "the kernels are for float32, bfloat16 and float16"
        return _triton.unavailable(x.device)
    return _native.missing if x.is_cpu else _native.unavailable(x.device)


def _known_when_compiled(function: _Function) -> _Function:
    """As `torch.compiler.assume_constant_result`, which imports the whole compiler, for more than a second."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def transformed() -> bool:
    """Whether a functional transform or forward mode is at work, which kernels cannot see through."""
    return bool(_transform()) or forward_ad._current_level >= 0


@_known_when_compiled
def _transform() -> str:
    """Return the name of the functional transform at work; the compiler by itself would always see one."""
    interpreter = torch._C._functorch.peek_interpreter_stack()
    return "" if interpreter is None else str(interpreter.key().name)


def compiled_without_tangents(op: str) -> bool:
    """Whether a call is being compiled; in forward mode it cannot be, as its search would carry no derivative."""
    if not torch.compiler.is_compiling():
        return False
    if _transform() == "Jvp":  # the compiler runs the call as it is, or says this
        raise RuntimeError(f"{op}: forward mode cannot be compiled. Call `torch.func.jvp` outside of `torch.compile`.")
    return True


def compiled_with_transform() -> bool:
    """Whether a transform differentiates a call that is being compiled: the operators have no rule for that."""
    return torch.compiler.is_compiling() and _transform() in ("Grad", "Jvp")


def recorded(*inputs: Any) -> bool:
    """Whether autograd records what becomes of the inputs."""
    if torch.is_grad_enabled():
        for value in inputs:
            if isinstance(value, Tensor) and value.requires_grad:
                return True
    return False


def differentiated(*gradients: Tensor | None) -> bool:
    """Whether derivatives must be plain torch operations: to be differentiated again, transformed or batched."""
    if torch.is_grad_enabled() or transformed():
        return True
    return not torch.compiler.is_compiling() and any(batched(g) for g in gradients if g is not None)


def scaled(gradient: Tensor, upstream: Tensor) -> Tensor:
    """Multiply a gradient that was computed ahead of time; an upstream gradient of 0 gives 0, also where it is nan."""
    return torch.where(upstream == 0, 0, upstream * gradient)


def batched(gradient: Tensor) -> bool:
    """Whether this is a batch of gradients that poses as one: ``torch.autograd.grad(..., is_grads_batched=True)``."""
    return type(gradient) is Tensor and not torch._C._has_storage(gradient)


def shortest(
    logits: Any, k: Any, dim: Any, temperature: Any, mask: Tensor | None, shard: ClassShard | None, impl: Impl
) -> Impl | None:
    """Return which kernel takes the common call, on which nothing is to be changed, checked further or watched."""
    if not (mask is None and shard is None and dim == -1 and impl == "auto" and ordinary(logits, k, temperature)):
        return None
    if _dispatch_modes() or _interpreters() is not None or forward_ad._current_level >= 0:
        return None
    if logits.is_neg() or logits._is_zerotensor() or not has_storage(logits):
        return None
    return "native" if logits.is_cpu else "triton"


def unwatched(value: Any) -> bool:
    """Whether a kernel may read the memory of a plain tensor, unseen by any trace, mode or transform."""
    return not (
        type(value) is not Tensor
        or is_compiling()
        or _dispatch_modes()
        or _interpreters() is not None
        or forward_ad._current_level >= 0
        or value.is_neg()
        or value._is_zerotensor()
        or not has_storage(value)
    )


def straight(problem: Problem) -> bool:
    """Whether a kernel may take the shortest way: one k, plain tensors, no transform, no trace; on a GPU no mask."""
    x, k, mask, _, _, impl = problem
    fit = impl == "native" or (impl == "triton" and mask is None)
    return fit and type(k) is float and direct(x, mask) and not transformed()


def direct(*values: Any) -> bool:
    """Whether a kernel may read the memory of the tensors among the values, unseen by any trace or mode."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    for value in values:
        if not isinstance(value, Tensor):
            continue
        if type(value) is not Tensor and type(value) is not nn.Parameter:
            return False
        if value.is_neg() or value._is_zerotensor() or not torch._C._has_storage(value):
            return False  # the memory does not hold the values: a negative view, a symbolic zero, a batch of gradients
    return True


class Kernels(Protocol):
    """The functions of a module of kernels; the last four are those of the CPU, the seven before them of the GPU."""

    def forward(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]: ...
    def backward(self, *arguments: Any) -> tuple[Tensor, Tensor]: ...
    def loss_forward(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]: ...
    def loss_backward(self, *arguments: Any) -> tuple[Tensor, Tensor]: ...
    def probabilities(self, *arguments: Any) -> tuple[Tensor, Tensor | None]: ...
    def probabilities_backward(self, *arguments: Any) -> Tensor: ...
    def loss_forward_with_grad(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
    def scale_rows_(self, grad: Tensor, factor: Tensor) -> Tensor: ...
    def row_weights(self, *arguments: Any) -> Tensor | None: ...
    def step_of(self, *arguments: Any) -> Any: ...
    def take_step(self, *arguments: Any) -> tuple[Tensor, Tensor]: ...
    def reduced_loss(self, *arguments: Any) -> tuple[Tensor, Tensor, float]: ...
    def reduced_loss_rows(self, *arguments: Any) -> Tensor: ...
    def scaled_to_half(self, slope: Tensor, factor: float, dtype: torch.dtype) -> Tensor: ...
    def reduced_loss_backward(self, *arguments: Any) -> tuple[Tensor, Tensor | None]: ...


@functools.cache
def kernels(impl: str) -> Kernels:
    """Import the kernels of an implementation."""
    return cast(Kernels, importlib.import_module(f"lastlayer._{impl}.lml"))


@_known_when_compiled
def inlined(impl: Impl) -> bool:
    """Whether the compiler is to look into the kernels; the operators for that are registered when it first asks."""
    if impl != "triton" or _triton.INTERPRETED:
        return False
    importlib.import_module("lastlayer._triton.inline")
    return True


def forward(problem: Problem, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(out, center, delta)`` from a kernel."""
    x, k, mask, temperature, _, impl = problem
    if direct(x, k, mask):
        return kernels(impl).forward(x, k, mask, temperature, kind)
    result: tuple[Tensor, Tensor, Tensor]
    if torch.compiler.is_compiling() and inlined(impl):
        result = torch.ops.lastlayer.lml_forward_inline(x, sizes(k, x), mask, temperature, kind)
    else:
        result = torch.ops.lastlayer.lml_forward(x, sizes(k, x), mask, temperature, kind, impl)
    return result


def backward(impl: Impl, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the gradients of logits and `k` from a kernel."""
    if direct(*arguments):
        return kernels(impl).backward(*arguments)
    grads: tuple[Tensor, Tensor]
    if torch.compiler.is_compiling() and inlined(impl):
        grads = torch.ops.lastlayer.lml_backward_inline(*arguments)
    else:
        grads = torch.ops.lastlayer.lml_backward(*arguments, impl)
    return grads


def loss_forward(problem: Problem, rho: float, index: Tensor | None, dense: Tensor | None) -> tuple[Tensor, ...]:
    """Return ``(loss, center, delta, log_mass, pull)`` from a kernel."""
    x, k, mask, temperature, _, impl = problem
    if direct(x, k, mask, index, dense):
        return kernels(impl).loss_forward(x, k, mask, temperature, rho, index, dense)
    result: tuple[Tensor, ...] = torch.ops.lastlayer.lml_loss_forward(
        x, sizes(k, x), mask, temperature, rho, index, dense, impl
    )
    return result


def loss_backward(impl: Impl, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the gradients of logits and `k` from a kernel, for one upstream gradient per row."""
    if direct(*arguments):
        return kernels(impl).loss_backward(*arguments)
    grads: tuple[Tensor, Tensor] = torch.ops.lastlayer.lml_loss_backward(*arguments, impl)
    return grads
