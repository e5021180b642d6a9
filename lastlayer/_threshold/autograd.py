"""What autograd and the functional transforms want to know, and the glue between them and the kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def recorded(*inputs: Tensor | float) -> bool:
    """Whether autograd wants to know what becomes of the inputs."""
    return torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in inputs)


def without_transforms(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """The same with `setup_context` in `forward`: autograd then binds no signature, which takes long."""

    def forward(ctx: Any, *inputs: Any) -> Any:
        output = function.forward(*inputs)
        function.setup_context(ctx, inputs, output)
        return output

    members = {"forward": staticmethod(forward), "backward": staticmethod(function.backward)}
    return type(f"{function.__name__}Backward", (torch.autograd.Function,), members)


def batched(gradient: Tensor) -> bool:
    """Whether this is a batch of gradients that poses as one: ``torch.autograd.grad(..., is_grads_batched=True)``."""
    return not torch._C._has_storage(gradient)


def transformed(*gradients: Tensor | None) -> bool:
    """Whether a transform, forward mode or a batch of gradients is at work, which kernels cannot see through."""
    if not torch.compiler.is_compiling() and any(batched(g) for g in gradients if g is not None):
        return True
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
