"""The Module form of a function: it stores the arguments and calls the function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn


class FunctionModule(nn.Module):
    """A Module whose ``forward`` is ``function(*inputs, **options)``; tensors among the options become buffers.

    Keywords of a call, such as the mask of a batch, come on top of the options.
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

    def _call(self, *inputs: Tensor, **more: Any) -> Any:
        options = {name: getattr(self, name) for name in self._options} | more
        return type(self).function(*inputs, **options)

    forward: Callable[..., Any] = _call  # a class may declare its own, with a signature, and hand it on to `_call`

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in self._options)
