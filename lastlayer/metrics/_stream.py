"""What all streaming metrics share: settings, states that belong to one metric alone, and plots."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lastlayer import _check
from lastlayer.hierarchy import LabelTree

try:
    from torchmetrics import Metric
    from torchmetrics.utilities import dim_zero_cat
except ImportError as error:
    raise ImportError(
        "lastlayer: streaming metrics need torchmetrics, which is not installed. "
        "Install the extra `lastlayer[train]`, or use the functions, such as lastlayer.recall_at_k."
    ) from error


class Stream(Metric):
    """A metric whose states add up over batches and processes.

    A ``MetricCollection`` updates two metrics as one from the second batch on if their states have the same names
    and, after the first batch, the same values. Metrics at different `k` are often equal there: all are 0. So the
    name of a state ends with the class and a digest of the settings, and only equal metrics share states.

    Args:
        options: Of ``torchmetrics.Metric``.
        settings: The metric's own arguments, stored as attributes and shown by ``repr``; tensors become buffers.
    """

    is_differentiable = False
    higher_is_better: bool | None = True
    full_state_update = False
    plot_lower_bound: float | None = 0.0
    plot_upper_bound: float | None = 1.0
    plot_legend_name = "Class"

    def __init__(self, options: dict[str, Any], **settings: Any) -> None:
        super().__init__(**options)
        for name, value in settings.items():
            if isinstance(value, Tensor):
                self.register_buffer(name, value, persistent=False)
            else:
                setattr(self, name, value)
        self._settings = tuple(settings)
        self._suffix = f"{type(self).__name__}_{_digest(settings)}"

    def _sum(self, name: str, *shape: int) -> None:
        """Add a state of zeros, which batches and processes add to."""
        self.add_state(f"{name}_{self._suffix}", torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")

    def _list(self, name: str) -> None:
        """Add a state that keeps one tensor per batch."""
        self.add_state(f"{name}_{self._suffix}", [], dist_reduce_fx="cat")

    def _state(self, name: str) -> Any:
        return getattr(self, f"{name}_{self._suffix}")

    def _joined(self, name: str) -> Tensor:
        """The tensors of all batches so far as one."""
        return dim_zero_cat(self._state(name))

    def _add(self, **values: Tensor) -> None:
        for name, value in values.items():
            setattr(self, f"{name}_{self._suffix}", self._state(name) + value)

    def sync(
        self,
        dist_sync_fn: Callable[..., Any] | None = None,
        process_group: Any = None,
        should_sync: bool = True,
        distributed_available: Callable[..., bool] | None = None,
    ) -> None:
        """Join the states of all processes, as torchmetrics does; a process may have had no rows."""
        if should_sync and not self._is_synced and dist.is_available() and dist.is_initialized():
            self._begin_lists(process_group or self.process_group)
        super().sync(dist_sync_fn, process_group, should_sync, distributed_available)

    def _begin_lists(self, group: Any) -> None:
        """Give lists without a tensor one of no rows, of the form that the other processes have: they are gathered."""
        lists = {name: getattr(self, name) for name, default in self._defaults.items() if isinstance(default, list)}
        if not lists:
            return
        firsts = {name: value[0] for name, value in lists.items() if isinstance(value, list) and value}
        forms: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(forms, {name: (x.shape[1:], x.dtype) for name, x in firsts.items()}, group=group)
        for name in lists.keys() - firsts.keys():
            shape, dtype = next((form[name] for form in forms if name in form), (None, None))
            if shape is not None:
                setattr(self, name, [torch.empty(0, *shape, dtype=dtype, device=self.device)])

    def _apply(self, fn: Callable[..., Any], exclude_state: Sequence[str] = "") -> Any:
        """Move states and settings, and leave their dtypes to `set_dtype`: a count in bfloat16 stops at 256."""

        def moved(value: Tensor) -> Tensor:
            new: Tensor = fn(value)
            return new if self._dtype_convert or new.dtype == value.dtype else value.to(new.device)

        return super()._apply(moved, exclude_state)

    def reset(self) -> None:
        """Forget all rows. Lists stay as they are for whoever holds them, as the wrapper ``Running`` does."""
        for name, default in self._defaults.items():
            if isinstance(default, list):
                setattr(self, name, [])
        super().reset()

    def _same_classes(self, scores: Tensor, n_classes: int) -> None:
        op = type(self).__name__
        scores = _check.logits(op, scores, "scores")
        if scores.shape[-1] != n_classes:
            raise ValueError(f"{op}: `scores` must have n_classes={n_classes} classes, got {scores.shape[-1]}.")

    def extra_repr(self) -> str:
        """Show the settings that differ from the defaults."""
        defaults = inspect.signature(type(self).__init__).parameters
        shown = []
        for name in self._settings:
            value = getattr(self, name)
            if isinstance(value, Tensor):
                shown.append(f"{name}=tensor of shape {tuple(value.shape)}")
            elif name in defaults and repr(value) != repr(defaults[name].default):  # an array has no one truth value
                shown.append(f"{name}={value!r}")
        return ", ".join(shown)

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """Plot a value, or the values of several steps.

        Args:
            val: A result of ``compute`` or ``forward``, or a list of such results; by default ``compute()``.
            ax: The matplotlib axes to draw on; by default new ones.

        Returns:
            The figure and its axes.
        """
        val = self.compute() if val is None else val
        if isinstance(val, Sequence):
            return self._plot([self._named(v) for v in val], ax)
        return self._plot(self._named(val), ax)

    def _named(self, value: Any) -> Any:
        """A result as the plot takes it: the values at several `k` get their names."""
        if not getattr(self, "several", False) or not isinstance(value, Tensor):
            return value
        cuts: Any = self.k
        if value.ndim == 1:
            return {f"k={k}": v for k, v in zip(cuts, value, strict=True)}
        return {f"k={k}, class {c}": v for k, row in zip(cuts, value, strict=True) for c, v in enumerate(row)}


def _digest(settings: dict[str, Any]) -> str:
    """A short text that differs where settings differ, and is the same in every process."""
    digest = hashlib.sha256()
    for name, value in settings.items():
        if isinstance(value, Tensor):
            content = value.detach().double().cpu().numpy().tobytes()
        elif isinstance(value, LabelTree):  # its `repr` tells only the size
            content = repr((value.parents, value.names)).encode()
        elif callable(value):
            content = f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}".encode()
        else:
            content = repr(value).encode()
        digest.update(name.encode() + b"=" + content + b";")
    return digest.hexdigest()[:12]
