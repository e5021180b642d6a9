"""Runs whose labels are split over processes: what each process computes, who writes, what a checkpoint holds.

    torchrun --nproc-per-node 4 -m lastlayer train rows.jsonl --out run --hidden 256 --shard-classes

Each process runs a Lightning Trainer with one device. It holds the output layer of its own labels, and the same rows
and hidden layers as the other processes. With --data-parallel D the processes form D groups; each group splits the
labels and takes a share of the rows of a batch. The processes communicate in the losses, decoders and metrics
(``shard=``), never in Lightning. The first process writes the run folder, which is an ordinary one. Without torchrun
there is one process.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from lastlayer import shard as sharding
from lastlayer._check import label_lists
from lastlayer.data import DataError
from lastlayer.runs import RunError, RunFolder
from lastlayer.runs.files import damaged, missing
from lastlayer.shard import ClassShard, Replicas
from lastlayer.train.config import Config, ConfigError
from lastlayer.train.losses import LOSSES, compares_rows, over_every_row, takes_shard
from lastlayer.train.network import Input, LabelSetNetwork
from lastlayer.train.placement import Placement

if TYPE_CHECKING:  # Lightning, which prediction does not need
    from lastlayer.train.checkpoint_io import SafeCheckpointIO
    from lastlayer.train.module import LabelSetModule

IN_BLOCKS = 100_000  # from so many labels per process the LML loss never holds the logits

T = TypeVar("T")


@contextlib.contextmanager
def world(accelerator: str = "auto") -> Iterator[None]:
    """Join the processes that torchrun started, if any; all but the first are silent."""
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
    dist.destroy_process_group()  # not after an error: the other processes may never answer


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
    """Whether this is the first process, which writes."""
    return not dist.is_initialized() or dist.get_rank() == 0


def local_rank() -> int:
    """The number of this process on its machine, which is also the number of its device."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def once(function: Callable[[], T]) -> T:
    """Run a function in the first process; every process gets the result, or the error."""
    if not dist.is_initialized():
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
    result: T = box[0]
    return result


class ReadOnlyRun(RunFolder):
    """A run folder that another process writes; writing here does nothing."""

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """Do nothing."""

    def write_tensors(self, name: str, tensors: dict[str, Any], metadata: dict[str, str] | None = None) -> None:
        """Do nothing."""

    def write_history(self, rows: Any) -> None:
        """Do nothing."""


class ShardedPlacement(Placement):
    """The labels are split over the processes of the default process group.

    Args:
        data_parallel: The number of groups of processes. Each group holds all labels, and takes a share of the rows of
            a batch.
    """

    def __init__(self, data_parallel: int = 1) -> None:
        self.data_parallel = data_parallel
        self.data: Replicas | None = None  # the processes with the same labels and other rows
        self.in_blocks = False  # whether the loss never holds the logits of all labels
        self.writes = is_first()

    @property
    def locks(self) -> bool:
        """Whether this is the first process."""
        return self.writes

    def check(self, config: Config) -> None:
        """Raise a ConfigError for what cannot be split."""
        if not takes_shard(config.loss):
            able = ", ".join(name for name in LOSSES if takes_shard(name))
            raise ConfigError(f"`loss` must be one of {able} with sharded classes, got {config.loss!r}.")
        if config.encoder:
            raise ConfigError("`encoder` must be left out with sharded classes. Compute its features first.")
        if config.devices != 1:
            raise ConfigError(
                f"`devices` must be 1 with sharded classes, got {config.devices}. "
                "Start one process per device with torchrun."
            )
        if config.precision == "16":
            raise ConfigError(
                "`precision` must be 32 or bf16 with sharded classes, got '16', whose scale differs between processes."
            )
        if config.decide not in ("auto", "top_k"):
            raise ConfigError(
                f"`decide` must be auto or top_k with sharded classes, got {config.decide!r}. Tune thresholds later, "
                "with `lastlayer.tune_recall` for instance."
            )
        world = dist.get_world_size() if dist.is_initialized() else 1
        if self.data_parallel < 1 or world % self.data_parallel:
            raise ConfigError(
                f"`data_parallel` must divide the number of processes, {world}, got {self.data_parallel}."
            )
        if self.data_parallel > 1 and config.loss != "two_way" and compares_rows(config.loss):
            raise ConfigError(
                f"`data_parallel` must be 1 with the loss {config.loss}, which compares the rows of a batch, got "
                f"{self.data_parallel}."
            )

    def place(self, n_labels: int) -> None:
        """Choose this process's labels; a single process has all of them."""
        if not dist.is_initialized():
            return
        group = None
        if self.data_parallel > 1:
            group, self.data = sharding.mesh(dist.get_world_size() // self.data_parallel)
            self.share = (self.data.rank, self.data.ranks)
        ranks = dist.get_world_size(group)
        if -(-n_labels // ranks) * (ranks - 1) >= n_labels:
            raise ConfigError(f"{n_labels} labels leave none for the last of {ranks} processes. Start fewer processes.")
        self.shard = ClassShard.split(n_labels, group)

    def run_folder(self, path: str | Path) -> RunFolder:
        """Return the run folder, which only the first process writes."""
        return RunFolder(path) if self.writes else ReadOnlyRun(path)

    def once(self, function: Callable[[], T]) -> T:
        """Run a function in the first process; every process gets the result, or the error."""
        return once(function)

    def compare(self, about: dict[str, Any]) -> None:
        """Raise an error in every process if one of them was given other rows than the first."""
        if not dist.is_initialized():
            return
        mine = {name: (part["rows"], part["fingerprint"]) for name, part in about["parts"].items()}
        gathered: list[Any] = [None] * dist.get_world_size()
        sharding._answered(dist.all_gather_object, gathered, mine, group=None)
        for rank, theirs in enumerate(gathered):
            for name in sorted({*gathered[0], *theirs}):
                if theirs.get(name) != gathered[0].get(name):
                    raise DataError(
                        f"rank {rank} was given other {name} rows than rank 0 ({_rows(theirs, name)} and "
                        f"{_rows(gathered[0], name)}). Give every process the same files."
                    )

    def check_checkpoints(self, run: RunFolder) -> None:
        """Raise an error if an unfinished run has checkpoints of whole labels."""
        if not (run / "checkpoints/shards").is_dir():
            raise RunError(
                f"{run.path}: holds an unfinished run without --shard-classes. Resume it so, or choose another folder."
            )

    def trainer_options(self, module: LabelSetModule) -> tuple[SafeCheckpointIO, dict[str, Any]]:
        """Choose how the loss is computed; return the checkpoint files and options of a Trainer with one device."""
        from pytorch_lightning.plugins.environments import LightningEnvironment

        from lastlayer.train.checkpoint_io import Agreement, ShardedCheckpointIO

        config, output = module.config, module.network.output_bias()
        lml = module.resolved.loss == "lml" and set(config.loss_options) <= {"temperature"}
        self.in_blocks = lml and bool(config.hidden) and len(output) >= IN_BLOCKS
        files = ShardedCheckpointIO(module)
        options: dict[str, Any] = {"plugins": [files, LightningEnvironment()], "callbacks": [Agreement()]}
        if self.shard is not None and torch.cuda.is_available() and config.accelerator in ("auto", "gpu"):
            options["devices"] = [local_rank()]
        return files, options

    def loss_options(self) -> dict[str, Any]:
        """Return the shard; a single process needs none."""
        return {} if self.shard is None else {"shard": self.shard}

    def own(self, values: Tensor) -> Tensor:
        """Return the entries of this process's labels."""
        return values if self.shard is None else values[self.shard.start : self.shard.stop]

    def training_loss(self, module: LabelSetModule, rows: Input, target: Tensor) -> Tensor:
        """Return the loss of this process's part of a batch, weighted so that the mean over groups is the loss."""
        if self.data is None:
            return self._loss(module, rows, target)
        share = self._share_of_rows(module, target)
        if compares_rows(module.resolved.loss):
            return self._two_way(module, rows, target, share)
        return self._loss(module, rows, target) * share

    def _loss(self, module: LabelSetModule, rows: Input, target: Tensor) -> Tensor:
        return module.loss_in_blocks(rows, target) if self.in_blocks else module.loss(rows, target)[0]

    def _share_of_rows(self, module: LabelSetModule, target: Tensor) -> Tensor:
        """The weight of the mean over this process's rows, so that the mean over processes is that over all rows."""
        assert self.data is not None
        every = over_every_row(module.resolved.loss) or bool(module.options.get("observed"))
        counts = target.new_tensor(len(target)) if every else (target >= 0).any(-1).sum()
        here = counts.double().view(1, 1)
        return (here * self.data.ranks / sharding.reduce(here, "sum", self.data).clamp(min=1)).view(()).float()

    def _two_way(self, module: LabelSetModule, rows: Input, target: Tensor, share: Tensor) -> Tensor:
        """The sample term of this process's rows, and the class term of the rows of all groups."""
        assert self.data is not None
        logits = module.network(rows).float()
        lists, options = label_lists(target), {"per": "both", **module.options}
        per = options.pop("per")
        value: Tensor = logits.sum() * 0
        if per != "class":
            value = value + share * module.function(logits, lists, **options, per="sample")
        if per != "sample":
            value = value + module.function(logits, lists, **options, per="class", data_group=self.data.group)
        return value

    def mean_loss(self, value: Tensor) -> Tensor:
        """Return the mean of a loss over the groups that share a batch."""
        return value if self.data is None else sharding.total(value, self.data) / self.data.ranks

    def average_gradients(self, network: nn.Module) -> None:
        """Average the gradients over the processes that hold the same labels."""
        if self.data is None:
            return
        for parameter in network.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad = sharding.total(parameter.grad, self.data) / self.data.ranks

    def clip_gradients(self, module: LabelSetModule, optimizer: Any, bound: float | None, algorithm: Any) -> None:
        """Bound the norm of the gradient over the labels of all processes."""
        if self.shard is None or not bound:
            module.clip_gradients(optimizer, bound, algorithm)
            return
        split = module.network.class_dims()
        grads = {name: p.grad for name, p in module.network.named_parameters() if p.grad is not None}
        zero = torch.zeros((), device=module.device)
        own = sum((g.float().square().sum() for n, g in grads.items() if n in split), zero)
        squares = sharding.total(own, self.shard)
        squares = sum((g.float().square().sum() for n, g in grads.items() if n not in split), squares)
        scale = (bound / (squares.sqrt() + 1e-6)).clamp(max=1)
        for grad in grads.values():
            grad.mul_(scale)

    def seed_offset(self, module: LabelSetModule) -> int:
        """Return the same number in all processes of a group, whose hidden layers must drop the same units."""
        return module.global_rank if self.data is None else self.data.rank

    def whole_weights(self, network: LabelSetNetwork) -> dict[str, Tensor]:
        """Return the weights of all labels in the first process; the others get an empty dictionary."""
        state, shard = dict(network.state_dict()), self.shard
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
        return state if self.writes else {}

    def read_weights(self, run: RunFolder, network: LabelSetNetwork) -> dict[str, Tensor]:
        """Read weights.safetensors; in the class dimension only this process's slice."""
        if self.shard is None:
            return run.read_tensors("weights.safetensors")
        own, shard = network.class_dims(), self.shard
        path = run / "weights.safetensors"
        try:
            with safe_open(path, framework="pt") as file:
                out = {}
                for name in file.keys():  # noqa: SIM118
                    part = file.get_slice(name)
                    if own.get(name) == 0:
                        out[name] = part[shard.start : shard.stop]
                    else:
                        out[name] = part[:, shard.start : shard.stop] if name in own else part[:]
                return out
        except FileNotFoundError:
            raise missing(path) from None
        except (SafetensorError, OSError, ValueError, IndexError) as error:
            raise damaged(path, error) from None


def _rows(parts: dict[str, tuple[int, str]], name: str) -> str:
    return f"{parts[name][0]} rows" if name in parts else "none"
