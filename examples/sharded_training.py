"""Train a head whose classes are split over processes, with checkpoints from which any number of them resumes.

    torchrun --nproc-per-node 4 --max-restarts 2 examples/sharded_training.py --folder run

Every rank holds a slice of the classes (`ShardedLinear`) and the same body below; logits are never materialised. After
a rank dies the others stop with a message, torchrun starts them again, and training goes on from the last checkpoint.
Runs on CPUs as it stands; on GPUs choose the backend "nccl" and move model and data.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import lastlayer as ll
from lastlayer.shard import ClassShard, join, wrap_rows

N_CLASSES, SIZE, ROWS, LABELS = 1003, 16, 512, 3


def data() -> tuple[Tensor, Tensor]:
    """Rows whose three labels are the best of a hidden linear layer; alike on every rank."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(ROWS, SIZE, generator=generator, dtype=torch.float64)
    hidden = torch.randn(N_CLASSES, SIZE, generator=generator, dtype=torch.float64)
    return features, (features @ hidden.T).topk(LABELS).indices


class Training:
    """A body, a sharded head and their optimizer; the state is what a checkpoint holds."""

    def __init__(self, shard: ClassShard | None) -> None:
        torch.manual_seed(1)
        self.shard, self.step = shard, 0
        self.body = nn.Linear(SIZE, SIZE, dtype=torch.float64)
        self.head = ll.head.ShardedLinear(SIZE, N_CLASSES, shard=shard, dtype=torch.float64)
        self.optimizer = torch.optim.SGD([*self.body.parameters(), *self.head.parameters()], lr=0.5, momentum=0.9)
        for parameter in (*self.body.parameters(), *self.head.parameters()):  # so that there is something to load into
            self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    def state(self) -> dict[str, object]:
        buffer = {p: s["momentum_buffer"] for p, s in self.optimizer.state.items()}
        return {
            "body": self.body.state_dict(),
            "body_momentum": {name: buffer[p] for name, p in self.body.named_parameters()},
            "head": self.head.sharded_state(),
            "head_momentum": {
                name: wrap_rows(buffer[p], N_CLASSES, self.shard) for name, p in self.head.named_parameters()
            },
        }

    def advance(self, features: Tensor, target: Tensor) -> Tensor:
        begin = 64 * self.step % ROWS
        batch = slice(begin, begin + 64)
        loss = self.head.loss(self.body(features[batch]), target[batch], k=LABELS)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        return loss.detach()

    def metrics(self, features: Tensor, target: Tensor) -> dict[str, float]:
        with torch.no_grad():
            logits = self.head(self.body(features))
            recall = ll.recall_at_k(logits, target, LABELS, shard=self.shard)
            loss = ll.lml_loss(logits, target, LABELS, shard=self.shard)
        return {"steps": self.step, "loss": float(loss), "recall": float(recall)}


def save(training: Training, folder: Path, primary: bool) -> None:
    name = f"step{training.step}"
    dcp.save(training.state(), checkpoint_id=str(folder / name), no_dist=not dist.is_initialized())
    if primary:  # the checkpoint counts from here on
        (folder / "latest.tmp").write_text(name)
        os.replace(folder / "latest.tmp", folder / "latest")


def resume(training: Training, folder: Path) -> None:
    if (folder / "latest").exists():
        name = (folder / "latest").read_text()
        dcp.load(training.state(), checkpoint_id=str(folder / name), no_dist=not dist.is_initialized())
        training.step = int(name.removeprefix("step"))


def train(folder: Path, steps: int, every: int, kill_rank: int = -1, kill_step: int = -1) -> dict[str, float]:
    """Train to `steps`, from the last checkpoint in the folder if there is one."""
    sharded = dist.is_initialized()
    rank = dist.get_rank() if sharded else 0
    training = Training(ClassShard.split(N_CLASSES) if sharded else None)
    resume(training, folder)
    features, target = data()
    while training.step < steps:
        if (rank, training.step) == (kill_rank, kill_step):  # to try it out
            os.kill(os.getpid(), signal.SIGKILL)
        training.advance(features, target)
        if training.step % every == 0:
            save(training, folder, rank == 0)
    return training.metrics(features, target)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--timeout", type=float, default=60, help="seconds a rank waits for the others")
    parser.add_argument("--kill-rank", type=int, default=-1, help="this rank ends itself, the first time")
    parser.add_argument("--kill-step", type=int, default=-1)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends all ranks when one dies; first say why this one stops
    join("gloo", options.timeout)
    rank, attempt = dist.get_rank(), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    try:
        kill = (options.kill_rank, options.kill_step) if attempt == 0 else (-1, -1)
        found = train(options.folder, options.steps, options.every, *kill)
    except RuntimeError as error:
        message = f"rank {rank} ends: {error}"
        with (options.folder / f"stopped-rank{rank}-attempt{attempt}.txt").open("w") as file:
            file.write(message)
        print(message, file=sys.stderr, flush=True)
        return 1
    if rank == 0:
        (options.folder / "metrics.json").write_text(json.dumps({**found, "attempt": attempt}))
        print(json.dumps(found))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
