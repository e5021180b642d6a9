"""The Module form of a function: it stores the options and calls the function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from lastlayer._check import Target


class FunctionModule(nn.Module):
    """A Module that stores the options of a function and calls it.

    A subclass names the function, takes the options in ``__init__``, and declares ``forward`` with the arguments that
    change from call to call and their types::

        class LML(FunctionModule):
            function = staticmethod(lml)

            def __init__(self, k: float | Tensor, *, dim: int = -1) -> None:
                super().__init__(k=k, dim=dim)

            def forward(self, logits: Tensor, *, mask: Tensor | None = None) -> Tensor:
                out: Tensor = self._call(logits, mask=mask)
                return out

    Tensors among the options become buffers: they move with the Module from device to device and are saved with it.
    They are arguments, not activations, so ``module.bfloat16()`` leaves their dtype as it is: 257 stays 257. A
    ``Parameter`` is cast like any other.
    """

    function: ClassVar[Callable[..., Any]]

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options = tuple(options)
        for name, value in options.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def _call(self, *inputs: Any, **more: Any) -> Any:
        """Call the function on inputs, with the options and what a call adds to them."""
        options = {name: getattr(self, name) for name in self._options} | more
        return type(self).function(*inputs, **options)

    forward: Callable[..., Any] = _call  # for a subclass that declares none

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = {name: self._buffers[name] for name in self._options if name in self._buffers}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in before.items():
            moved = self._buffers[name]
            if value is not None and moved is not None and moved.dtype != value.dtype:
                self._buffers[name] = value.to(moved.device)
        return self

    def extra_repr(self) -> str:
        options = {name: getattr(self, name) for name in self._options}
        return ", ".join(f"{name}={value!r}" for name, value in options.items() if value is not None)


class LossModule(FunctionModule):
    """A loss of logits and a target; the weights of the rows belong to a batch, and so to the call."""

    def forward(self, logits: Tensor, target: Target, *, sample_weight: Tensor | None = None) -> Tensor:
        """Return the loss of a batch."""
        loss: Tensor = self._call(logits, target, sample_weight=sample_weight)
        return loss
