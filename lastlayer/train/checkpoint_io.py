"""Lightning's side of checkpoints, for whole labels and for labels that are split over processes."""

from __future__ import annotations

import inspect
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.plugins.io import CheckpointIO
from torch import Tensor

from lastlayer import shard as sharding
from lastlayer.runs import RunError
from lastlayer.train import checkpoint as checkpoint_file
from lastlayer.train.module import LabelSetModule
from lastlayer.train.sharded import ShardedPlacement, once

_MARK = "split over processes"


class SafeCheckpointIO(CheckpointIO):
    """The Lightning plugin that writes and reads the files of :mod:`lastlayer.train.checkpoint`."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint."""
        checkpoint_file.write(Path(path), checkpoint)

    def load_checkpoint(self, path: Any, map_location: Any | None = None, weights_only: Any = None) -> dict[str, Any]:
        """Read a checkpoint."""
        return checkpoint_file.read(Path(path))

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a checkpoint."""
        Path(path).unlink(missing_ok=True)


class Agreement(Callback):
    """Sends the hidden layers of the first process to all others each epoch.

    They drift apart where sums have no fixed order.
    """

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Send them."""
        assert isinstance(pl_module, LabelSetModule)
        own, placement = pl_module.network.class_dims(), pl_module.placement
        assert isinstance(placement, ShardedPlacement)
        data = placement.data
        for name, parameter in pl_module.network.named_parameters():
            if placement.shard is not None and name not in own:
                sharding._answered(dist.broadcast, parameter.data, 0, group=None)
            elif data is not None:
                first = dist.get_global_rank(data.group, 0)
                sharding._answered(dist.broadcast, parameter.data, first, group=data.group)


class ShardedCheckpointIO(SafeCheckpointIO):
    """Checkpoints of split labels: any number of processes can load what any other number of processes saved.

    torch.distributed.checkpoint first writes the tensors of the split labels to a folder. Then the file of
    :class:`~lastlayer.train.SafeCheckpointIO` is written, with everything else. So a checkpoint whose file is there is
    whole.

    Args:
        module: The module whose checkpoints they are.
    """

    def __init__(self, module: LabelSetModule) -> None:
        self.module = module

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint, all processes together."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.api import CheckpointException

        path = Path(path)
        parts: dict[str, Tensor] = {}
        state = self._without_parts(checkpoint, parts)
        state["shards"] = f"{path.stem}-{checkpoint['global_step']}"
        folder = path.parent / "shards" / state["shards"]
        once(lambda: shutil.rmtree(folder, ignore_errors=True))  # half of it, from a process that died
        alone = not dist.is_initialized()

        def save(group: Any) -> None:
            dcp.save(parts, checkpoint_id=str(folder), process_group=group, **_alone(dcp.save))

        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                sharding._answered(save, group=None) if not alone else save(None)
        except CheckpointException as error:
            raise RunError(f"{folder}: cannot be written: {' '.join(str(error).split())[:100]}.") from None
        once(lambda: super(ShardedCheckpointIO, self).save_checkpoint(state, path))
        once(lambda: _remove_others(path, folder))

    def load_checkpoint(self, path: Any, map_location: Any | None = None, weights_only: Any = None) -> dict[str, Any]:
        """Read a checkpoint, this process's slice of the labels."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.api import CheckpointException

        path = Path(path)
        state: dict[str, Any] = super().load_checkpoint(path)
        folder = path.parent / "shards" / str(state.pop("shards", ""))
        parts: dict[str, Tensor] = {}
        state = self._with_parts(state, parts)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load(parts, checkpoint_id=str(folder), **_alone(dcp.load))
        except (CheckpointException, OSError, ValueError, KeyError, EOFError) as error:
            reason = " ".join(str(error).split())[:100]
            raise RunError(f"{folder}: damaged checkpoint: {type(error).__name__}: {reason}.") from None
        return state

    def _without_parts(self, state: dict[str, Any], parts: dict[str, Tensor]) -> dict[str, Any]:
        """Return the state with marks in place of the split tensors, which move to `parts`."""
        dims = {f"network.{name}": dim for name, dim in self.module.network.class_dims().items()}
        state = dict(state)
        state["state_dict"] = {
            name: self._part(value, dims[name], name, parts) if name in dims else value
            for name, value in state["state_dict"].items()
        }
        if "optimizer_states" not in state:
            return state
        groups = self.module.trainer.optimizers[0].param_groups
        names = {p: name for name, p in self.module.named_parameters()}
        order = [(names[p], p) for group in groups for p in group["params"]]
        (optimizer,) = state["optimizer_states"]
        moved = {}
        for i, values in optimizer["state"].items():
            name, parameter = order[i]
            moved[i] = {
                key: self._part(value, dims[name], f"{name}:{key}", parts)
                if name in dims and isinstance(value, Tensor) and value.shape == parameter.shape
                else value
                for key, value in values.items()
            }
        state["optimizer_states"] = [{**optimizer, "state": moved}]
        return state

    def _part(self, value: Tensor, dim: int, key: str, parts: dict[str, Tensor]) -> dict[str, Any]:
        parts[key] = self._rows(value, dim)
        rest = [size for i, size in enumerate(value.shape) if i != dim]
        return {_MARK: key, "dim": dim, "rest": rest, "dtype": str(value.dtype).removeprefix("torch.")}

    def _rows(self, value: Tensor, dim: int) -> Tensor:
        """The tensor as the checkpoint holds it: labels first; it shares memory with `value`."""
        network = self.module.network
        return sharding.wrap_rows(value.detach().movedim(dim, 0), network.n_labels, network.shard)

    def _with_parts(self, state: Any, parts: dict[str, Tensor]) -> Any:
        """Undo :meth:`_without_parts`: make room for this process's slices, and list them in `parts`."""
        if isinstance(state, list):
            return [self._with_parts(value, parts) for value in state]
        if not isinstance(state, dict):
            return state
        if _MARK not in state:
            return {key: self._with_parts(value, parts) for key, value in state.items()}
        network, shape = self.module.network, list(state["rest"])
        size = network.n_labels if network.shard is None else network.shard.size
        shape.insert(state["dim"], size)
        value = torch.empty(shape, dtype=getattr(torch, state["dtype"]))
        parts[state[_MARK]] = self._rows(value, state["dim"])
        return value


def _alone(call: Callable[..., Any]) -> dict[str, bool]:
    """Return what tells a call of torch that there is one process; torch 2.6 sees it for itself."""
    return {"no_dist": not dist.is_initialized()} if "no_dist" in inspect.signature(call).parameters else {}


def _remove_others(path: Path, folder: Path) -> None:
    """Remove the folders of earlier checkpoints of this name."""
    for other in folder.parent.glob(f"{path.stem}-*"):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
