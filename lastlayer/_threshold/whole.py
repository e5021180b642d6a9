"""A whole call as one operator, for the compiler: it would make many passes of what a kernel does in one.

Within the operator a function runs as it does without the compiler, with its checks, its kernels and its autograd. On
the CPU, where the kernels are compiled C, this is the way of all losses and projections that have such a kernel.
"""

# ruff: noqa: UP006, UP035 - torch 2.6 reads `List`, and not `list`, in the types of an operator
from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, List, Literal, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from lastlayer import _check, _native, _triton
from lastlayer._check import LabelLists
from lastlayer._ranked import exporting
from lastlayer._threshold.dispatch import WHOLE, scaled, transformed, whole
from lastlayer._threshold.operators import WAITS, fake, operator

P = ParamSpec("P")
_Result = TypeVar("_Result")
Shape = Literal["number", "rows", "classes", "like"]  # of the result: "like" is that of the first tensor


class Call(NamedTuple):
    """The arguments of a call as an operator takes them.

    The form has a word for each: "name:kind" for a tensor or a number, "name:0" for the first tensor where it is given
    again, "name=value" for truth values and "name/value" for words.
    """

    form: list[str]
    tensors: list[Tensor]  # the scores or features first
    numbers: list[float]


def compiling(*, anywhere: bool = False) -> bool:
    """Whether a call that the compiler sees can be one operator: on the CPU, if not anywhere, with its kernels."""
    fit = anywhere or not (_native.missing or _triton.INTERPRETED)
    return fit and not (exporting() or transformed() or torch.jit.is_tracing())


def packed(given: dict[str, Any], *, anywhere: bool = False) -> Call | None:
    """Return the arguments of a call, scores or features first; None where one of them is nothing for an operator."""
    call = Call([], [], [])
    for name, value in given.items():
        kind = _put(call, value, anywhere)
        if not kind:
            return None
        call.form.append(name + kind)
    if not (call.tensors and call.form[0].endswith(":tensor") and call.tensors[0].dtype in _check.FLOATS):
        return None  # the function will say what is wrong
    if _check.autocast(call.tensors[0].device):
        call.form.append(f"/{str(torch.get_autocast_dtype(call.tensors[0].device.type)).removeprefix('torch.')}")
    return call


def _put(call: Call, value: Any, anywhere: bool) -> str:
    """Add an argument to a call, and return its kind; empty for one that an operator does not take."""
    if isinstance(value, bool):
        return "=yes" if value else "="
    if isinstance(value, str):
        return f"/{value}" if value.isidentifier() else ""
    if isinstance(value, (int, float)):
        call.numbers.append(value)
        return ":int" if isinstance(value, int) else ":float"
    tensor = value.index if isinstance(value, LabelLists) else value
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return ""
    if not (anywhere or tensor.is_cpu):
        return ""
    for place, other in enumerate(call.tensors):
        if other is tensor:  # which the compiler does not let a Function have twice
            return f":{place}" if tensor is value else ""
    call.tensors.append(tensor)
    return ":lists" if isinstance(value, LabelLists) else ":tensor"


def run(name: str, call: Call, shape: Shape, *, ahead: bool = False) -> Tensor:
    """Return the result of a call; with `ahead` its gradients are computed at once, for a number that is a loss."""
    form, numbers = " ".join(call.form), _as_tensor(call.numbers)
    wanted = [i for i, tensor in enumerate(call.tensors) if tensor.requires_grad] if torch.is_grad_enabled() else []
    result: Tensor
    if not wanted:  # the compiler fails at a Function that has nothing to differentiate
        result = torch.ops.lastlayer.whole(name, form, numbers, call.tensors, shape)
    elif ahead:
        result = _Ahead.apply(name, form, numbers, wanted, *call.tensors)
    else:
        result = _Again.apply(name, form, numbers, wanted, shape, *call.tensors)
    return result


def _as_tensor(numbers: list[float]) -> Tensor:
    """Return numbers as a tensor: the graph would be compiled again for each of them."""
    cpu = torch.device("cpu")
    if not numbers:
        return torch.empty(0, dtype=torch.float64, device=cpu)
    return torch.stack([_check.constant(number, torch.float64, cpu) for number in numbers])


@functools.lru_cache(maxsize=256)
def _read(form: str) -> tuple[tuple[str, str, str], ...]:
    """Return name, mark and kind or value of each argument."""
    found = []
    for word in form.split(" "):
        mark = next(c for c in word if c in ":=/")
        name, kind = word.split(mark, 1)
        found.append((name, mark, kind))
    return tuple(found)


def _options(form: str, tensors: list[Tensor], numbers: Tensor) -> dict[str, Any]:
    """Return the arguments of a call by their names; that of no name is the dtype of autocast."""
    each, values = iter(tensors), iter(numbers.tolist())
    options: dict[str, Any] = {}
    for name, mark, kind in _read(form):
        if mark == "=":
            options[name] = bool(kind)
        elif mark == "/":
            options[name] = kind
        elif kind in ("tensor", "lists"):
            options[name] = LabelLists(next(each)) if kind == "lists" else next(each)
        elif kind.isdigit():
            options[name] = tensors[int(kind)]
        else:
            options[name] = int(next(values)) if kind == "int" else next(values)
    return options


@functools.cache
def _dispatch_keys() -> tuple[Any, Any]:
    """Return the keys of a new thread: where an operator is called from, autograd and conjugation may be left out."""
    found: list[Any] = []

    def look() -> None:
        found.extend((torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0], found[1]


def _call(
    name: str,
    form: str,
    numbers: Tensor,
    tensors: list[Tensor],
    wanted: list[int],
    finish: Callable[[Tensor, list[Tensor]], _Result],
) -> _Result:
    """Call a function, and return ``finish(its result, the tensors by which it is to be differentiated)``."""
    with torch._C._ForceDispatchKeyGuard(*_dispatch_keys()), torch.set_grad_enabled(bool(wanted)):
        given = [tensor.detach() for tensor in tensors]
        inputs = [given[i].requires_grad_() for i in wanted]
        options = _options(form, given, numbers)
        cast = options.pop("", None)
        device = tensors[0].device.type
        if cast is None and not torch.is_autocast_enabled(device):
            return finish(WHOLE[name](**options), inputs)
        with torch.autocast(device, dtype=getattr(torch, cast or "bfloat16"), enabled=cast is not None):
            out = WHOLE[name](**options)
        return finish(out, inputs)


def _gradients(out: Tensor, inputs: list[Tensor], upstream: Tensor | None = None) -> list[Tensor]:
    if not out.requires_grad:  # as where only the target, which has no gradient, asks for one
        return [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in inputs]
    found = torch.autograd.grad(out, inputs, upstream, allow_unused=True, materialize_grads=True)
    return [grad.contiguous() for grad in found]


@operator("whole", *WAITS)
def _whole(name: str, form: str, numbers: Tensor, tensors: List[Tensor], shape: str) -> Tensor:
    return _call(name, form, numbers, tensors, [], lambda out, _: out.contiguous())


@fake("whole")
def _(name: str, form: str, numbers: Tensor, tensors: List[Tensor], shape: str) -> Tensor:
    return _empty(form, tensors[0], shape)


def _empty(form: str, x: Tensor, shape: str) -> Tensor:
    if shape == "like":
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    cast = any(not name for name, _, _ in _read(form))  # a loss is then in float32
    sizes = {"number": (), "rows": x.shape[:-1], "classes": x.shape[-1:]}[shape]
    return x.new_empty(sizes, dtype=_check.work_dtype(x) if cast else x.dtype)


@operator("whole_ahead", *WAITS)
def _ahead(name: str, form: str, numbers: Tensor, tensors: List[Tensor], wanted: List[int]) -> List[Tensor]:
    def finish(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
        return [out.detach(), *_gradients(out, inputs)]

    return _call(name, form, numbers, tensors, wanted, finish)


@fake("whole_ahead")
def _(name: str, form: str, numbers: Tensor, tensors: List[Tensor], wanted: List[int]) -> List[Tensor]:
    return [_empty(form, tensors[0], "number"), *(_empty(form, tensors[i], "like") for i in wanted)]


@operator("whole_backward", *WAITS)
def _backward(
    name: str, form: str, numbers: Tensor, tensors: List[Tensor], wanted: List[int], upstream: Tensor
) -> List[Tensor]:
    def finish(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
        return _gradients(out, inputs, upstream)

    return _call(name, form, numbers, tensors, wanted, finish)


@fake("whole_backward")
def _(
    name: str, form: str, numbers: Tensor, tensors: List[Tensor], wanted: List[int], upstream: Tensor
) -> List[Tensor]:
    return [_empty(form, tensors[i], "like") for i in wanted]


class _Ahead(torch.autograd.Function):
    """A loss whose gradients are computed together with it."""

    @staticmethod
    def forward(ctx: Any, name: str, form: str, numbers: Tensor, wanted: list[int], *tensors: Tensor) -> Tensor:
        result: Tensor
        result, *gradients = torch.ops.lastlayer.whole_ahead(name, form, numbers, list(tensors), wanted)
        ctx.wanted, ctx.inputs = wanted, len(tensors)
        ctx.save_for_backward(*gradients)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        found = [scaled(gradient, grads[0]).to(gradient.dtype) for gradient in ctx.saved_tensors]
        return None, None, None, None, *_placed(found, ctx.wanted, ctx.inputs)


class _Again(torch.autograd.Function):
    """Any result, which is computed once more in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, name: str, form: str, numbers: Tensor, wanted: list[int], shape: str, *tensors: Tensor
    ) -> Tensor:
        ctx.name, ctx.form, ctx.wanted = name, form, wanted
        ctx.save_for_backward(numbers, *tensors)
        result: Tensor = torch.ops.lastlayer.whole(name, form, numbers, list(tensors), shape)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        numbers, *tensors = ctx.saved_tensors
        given = (ctx.name, ctx.form, numbers, list(tensors), ctx.wanted, grads[0])
        found = torch.ops.lastlayer.whole_backward(*given)
        return None, None, None, None, None, *_placed(found, ctx.wanted, len(tensors))


def _placed(gradients: list[Tensor], places: list[int], n: int) -> list[Tensor | None]:
    found: list[Tensor | None] = [None] * n
    for place, gradient in zip(places, gradients, strict=True):
        found[place] = gradient
    return found


def whole_projection(*only_with: str) -> Callable[[Callable[P, Tensor]], Callable[P, Tensor]]:
    """Let the compiler see a projection as one operator each way; if arguments are named, only with one of them."""

    def by_operator(name: str, given: dict[str, Any]) -> Tensor | None:
        ordinary = bool(only_with) and not any(argument in given for argument in only_with)
        if ordinary or given.get("impl", "auto") != "auto" or not compiling():
            return None
        call = packed(given)
        return None if call is None else run(name, call, "like")

    return lambda function: whole(function, by_operator)
