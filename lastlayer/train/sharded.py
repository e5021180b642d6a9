"""Runs whose labels are split over processes: who writes, what a checkpoint holds, and how the parts become whole.

    torchrun --nproc-per-node 4 -m lastlayer train rows.jsonl --out run --hidden 256 --shard-classes

Each process is a Lightning Trainer of one device, with the output layer of its own labels and the same rows and hidden
layers as the others. With --data-parallel D the processes are D groups that split the labels, each with a share of the
rows of a batch. They meet in the losses, decoders and metrics (``shard=``), never in Lightning. The first process
writes the run folder, which is an ordinary one. Without torchrun it is a world of one process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytorch_lightning as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.plugins.environments import LightningEnvironment
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lastlayer import shard as sharding
from lastlayer.runs import RunError, RunFolder
from lastlayer.shard import ClassShard, wrap_rows
from lastlayer.train import checkpoint
from lastlayer.train.config import Config, ConfigError
from lastlayer.train.losses import LOSSES
from lastlayer.train.module import LabelSetModule
from lastlayer.train.network import LabelSetNetwork

IN_BLOCKS = 100_000  # labels of a process from which the LML loss never holds the logits
_MARK = "split over processes"

T = TypeVar("T")


@contextlib.contextmanager
def world(accelerator: str = "auto") -> Iterator[None]:
    """Join the processes that torchrun started, if it did; all but the first are silent."""
    if dist.is_initialized() or "WORLD_SIZE" not in os.environ:
        with _silent(not is_first()):
            yield
        return
    cuda = accelerator in ("auto", "gpu") and torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(local_rank())
    sharding.join("cpu:gloo,cuda:nccl" if cuda else "gloo")
    with _silent(not is_first()):
        yield
    dist.destroy_process_group()  # not after an error: the others may never answer


@contextlib.contextmanager
def _silent(wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


def is_first() -> bool:
    """Whether this process is the one that writes."""
    return not dist.is_initialized() or dist.get_rank() == 0


def local_rank() -> int:
    """The number of this process on its machine, and of its device."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def groups(data_parallel: int) -> tuple[Any, ClassShard | None]:
    """The group over which labels are split, and the processes with the same labels and other rows, if any."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if data_parallel < 1 or world % data_parallel:
        raise ConfigError(f"`data_parallel` must divide the number of processes, {world}, got {data_parallel}.")
    return (None, None) if data_parallel == 1 else sharding.mesh(world // data_parallel)


def split(n_labels: int, group: Any = None) -> ClassShard | None:
    """This process's labels; None where it is the only one."""
    if not dist.is_initialized():
        return None
    ranks = dist.get_world_size(group)
    if -(-n_labels // ranks) * (ranks - 1) >= n_labels:
        raise ConfigError(f"{n_labels} labels leave none for the last of {ranks} processes. Start fewer processes.")
    return ClassShard.split(n_labels, group)


def once(function: Callable[[], T], wanted: bool = True) -> T:
    """Run on the first process, if that is wanted; every process gets the result, or the error."""
    if not wanted or not dist.is_initialized():
        return function()
    box: list[Any] = [None, None]
    if is_first():
        try:
            box[0] = function()
        except Exception as error:
            box[1] = error
    sharding._answered(dist.broadcast_object_list, box, 0, group=None)
    if box[1] is not None:
        raise box[1]
    return box[0]


class ReadOnlyRun(RunFolder):
    """A run folder that another process writes."""

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """Do nothing."""

    def write_tensors(self, name: str, tensors: dict[str, Any], metadata: dict[str, str] | None = None) -> None:
        """Do nothing."""

    def write_history(self, rows: Any) -> None:
        """Do nothing."""


def run_folder(path: str | Path) -> RunFolder:
    """The run folder, which the first process alone writes."""
    return RunFolder(path) if is_first() else ReadOnlyRun(path)


def check(config: Config) -> None:
    """Refuse what cannot be split."""
    if not LOSSES[config.loss].sharded:
        able = [name for name, loss in LOSSES.items() if loss.sharded]
        raise ConfigError(f"`loss` must be one of {', '.join(able)} with split classes, got {config.loss!r}.")
    if config.k == "predicted":
        raise ConfigError("`k` must be a number or auto with split classes, got 'predicted'.")
    if config.devices != 1:
        raise ConfigError(
            f"`devices` must be 1 with split classes, got {config.devices}. Start one process a device with torchrun."
        )
    if config.precision == "16":
        raise ConfigError("`precision` must be 32 or bf16 with split classes, got '16'. Its scale differs by process.")


def setup(module: LabelSetModule) -> tuple[checkpoint.SafeCheckpointIO, dict[str, Any]]:
    """Choose the way of the loss; return the checkpoints and the options of the Trainer, which knows of one device."""
    config, output = module.config, module.network.output_bias()
    lml = module.resolved.loss == "lml" and set(config.loss_options) <= {"temperature"}
    module.in_blocks = lml and bool(config.hidden) and len(output) >= IN_BLOCKS
    files = ShardedCheckpointIO(module)
    options: dict[str, Any] = {"plugins": [files, LightningEnvironment()], "callbacks": [Agreement()]}
    if module.shard is not None and torch.cuda.is_available() and config.accelerator in ("auto", "gpu"):
        options["devices"] = [local_rank()]
    return files, options


class Agreement(Callback):
    """Gives every process the first one's hidden layers each epoch: they drift where sums have no fixed order."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Send them."""
        assert isinstance(pl_module, LabelSetModule)
        own, data = pl_module.network.class_dims(), pl_module.data
        for name, parameter in pl_module.network.named_parameters():
            if pl_module.shard is not None and name not in own:
                sharding._answered(dist.broadcast, parameter.data, 0, group=None)
            elif data is not None:
                first = dist.get_global_rank(data.group, 0)
                sharding._answered(dist.broadcast, parameter.data, first, group=data.group)


def whole_weights(network: LabelSetNetwork) -> dict[str, Tensor]:
    """Return the weights of all labels, on the first process; the others get none of them."""
    state: dict[str, Tensor] = dict(network.state_dict())
    shard = network.shard
    if shard is None:
        return state
    size = -(-network.n_labels // shard.ranks)
    group: Any = shard.group or dist.group.WORLD
    first = dist.get_global_rank(group, 0)
    for name, dim in network.class_dims().items():
        value = state[name].movedim(dim, -1)
        value = F.pad(value, (0, size - value.shape[-1])).contiguous()
        parts = [torch.empty_like(value) for _ in range(shard.ranks)] if dist.get_rank() == first else None
        sharding._answered(dist.gather, value, parts, first, group=group)
        if parts is not None:
            state[name] = torch.cat(parts, -1)[..., : network.n_labels].movedim(-1, dim)
    return state if is_first() else {}


def read_weights(run: RunFolder, network: LabelSetNetwork) -> dict[str, Tensor]:
    """Read weights.safetensors, of the class dimension only this process's slice."""
    if network.shard is None:
        return run.read_tensors("weights.safetensors")
    own, shard = network.class_dims(), network.shard
    try:
        with safe_open(run / "weights.safetensors", framework="pt") as file:
            out = {}
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                if own.get(name) == 0:
                    out[name] = part[shard.start : shard.stop]
                else:
                    out[name] = part[:, shard.start : shard.stop] if name in own else part[:]
            return out
    except FileNotFoundError:
        raise RunError(f"{run / 'weights.safetensors'}: not there. Is {run.path} a finished run?") from None
    except (SafetensorError, OSError, ValueError, IndexError) as error:
        raise RunError(f"{run / 'weights.safetensors'}: damaged: {str(error)[:100]}.") from None


class ShardedCheckpointIO(checkpoint.SafeCheckpointIO):
    """Checkpoints of split labels: any number of processes can load what another number of them saved.

    The file of :class:`~lastlayer.train.SafeCheckpointIO` holds all but the tensors of the split labels, which
    torch.distributed.checkpoint writes to a folder beside it first. So the file counts once all of it is there.

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
            dcp.save(parts, checkpoint_id=str(folder), process_group=group, no_dist=alone)

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
        state = super().load_checkpoint(path)
        folder = path.parent / "shards" / str(state.pop("shards", ""))
        parts: dict[str, Tensor] = {}
        state = self._with_parts(state, parts)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load(parts, checkpoint_id=str(folder), no_dist=not dist.is_initialized())
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
        return wrap_rows(value.detach().movedim(dim, 0), network.n_labels, network.shard)

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


def _remove_others(path: Path, folder: Path) -> None:
    """Remove the folders of earlier checkpoints of this name."""
    for other in folder.parent.glob(f"{path.stem}-*"):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)


def is_split(run: RunFolder) -> bool:
    """Whether the checkpoints of an unfinished run are of split labels."""
    return (run / "checkpoints/shards").is_dir()
