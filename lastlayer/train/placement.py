"""Where the labels of a run are: all of them in each process, or split over processes.

:class:`Placement` is the first case, and the interface; ``sharded.ShardedPlacement`` is the second.
Everything in training that differs between the two is a method here, so that no other file asks which it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

from lastlayer.runs import RunError, RunFolder
from lastlayer.shard import ClassShard
from lastlayer.train.network import Input, LabelSetNetwork

if TYPE_CHECKING:  # Lightning, which prediction does not need
    from lastlayer.train.checkpoint_io import SafeCheckpointIO
    from lastlayer.train.config import Config
    from lastlayer.train.module import LabelSetModule

T = TypeVar("T")


class Placement:
    """All labels are in this process."""

    shard: ClassShard | None = None  # this process's slice of the labels
    share: tuple[int, int] = (0, 1)  # which part of each batch this process takes, and of how many
    writes = True  # whether this process writes the run folder

    @property
    def locks(self) -> bool:
        """Whether this process locks the run folder; Lightning starts copies of it for further devices."""
        return os.environ.get("LOCAL_RANK", "0") == "0" and os.environ.get("NODE_RANK", "0") == "0"

    def check(self, config: Config) -> None:
        """Raise a ConfigError for what this placement cannot do."""

    def place(self, n_labels: int) -> None:
        """Choose this process's labels."""

    def run_folder(self, path: str | Path) -> RunFolder:
        """Return the run folder, whose writes do nothing in processes that must not write."""
        return RunFolder(path)

    def once(self, function: Callable[[], T]) -> T:
        """Run a function in one process; every process gets the result, or the error."""
        return function()

    def compare(self, about: dict[str, Any]) -> None:
        """Raise an error if the processes were given different data."""

    def check_checkpoints(self, run: RunFolder) -> None:
        """Raise an error if an unfinished run has checkpoints of another placement."""
        if _has_shards(run):
            raise RunError(
                f"{run.path}: holds an unfinished run with --shard-classes. Resume it so, or choose another folder."
            )

    def trainer_options(self, module: LabelSetModule) -> tuple[SafeCheckpointIO, dict[str, Any]]:
        """Return the checkpoint files, and options for the Lightning Trainer."""
        from lastlayer.train.checkpoint_io import SafeCheckpointIO

        files = SafeCheckpointIO()
        return files, {"plugins": [files]}

    def loss_options(self) -> dict[str, Any]:
        """Return options for the loss function."""
        return {}

    def own(self, values: Tensor) -> Tensor:
        """Return the entries of this process's labels."""
        return values

    def training_loss(self, module: LabelSetModule, rows: Input, target: Tensor) -> Tensor:
        """Return the loss of this process's part of a batch."""
        return module.loss(rows, target)[0]

    def mean_loss(self, value: Tensor) -> Tensor:
        """Return the mean of a loss over the processes that share a batch."""
        return value

    def average_gradients(self, network: nn.Module) -> None:
        """Average the gradients over the processes that hold the same labels."""

    def clip_gradients(self, module: LabelSetModule, optimizer: Any, bound: float | None, algorithm: Any) -> None:
        """Bound the norm of the gradient."""
        module.clip_gradients(optimizer, bound, algorithm)

    def seed_offset(self, module: LabelSetModule) -> int:
        """Return a number that differs between processes with different rows, for the seed of dropout."""
        return module.global_rank

    def whole_weights(self, network: LabelSetNetwork) -> dict[str, Tensor]:
        """Return the weights of all labels in the process that writes."""
        return dict(network.state_dict())

    def read_weights(self, run: RunFolder, network: LabelSetNetwork) -> dict[str, Tensor]:
        """Read the weights of this process's labels from weights.safetensors."""
        return run.read_tensors("weights.safetensors")


def placement_of(shard_classes: bool, data_parallel: int = 1) -> Placement:
    """Return where the labels of a run are."""
    if shard_classes:
        from lastlayer.train.sharded import ShardedPlacement

        return ShardedPlacement(data_parallel)
    if data_parallel != 1:
        from lastlayer.train.config import ConfigError

        raise ConfigError("`data_parallel` needs sharded classes (--shard-classes). Use `devices` to split rows alone.")
    return Placement()


def _has_shards(run: RunFolder) -> bool:
    return (run / "checkpoints/shards").is_dir()
