"""One process of a training run whose labels are split: runs commands, and is killed or interrupted as told.

torchrun runs this file; `forked` is for processes that have imported everything.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist

from lastlayer.cli import main
from lastlayer.shard import join
from lastlayer.train.module import LabelSetModule

first_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
real = LabelSetModule.training_step
plan: dict[str, Any] = {}


def step(self, batch, batch_idx):
    if first_attempt and plan.get("kill") == [dist.get_rank(), self.global_step]:
        os.kill(os.getpid(), signal.SIGKILL)
    if plan.get("interrupt") == self.global_step:
        raise KeyboardInterrupt
    return real(self, batch, batch_idx)


def follow(plans: list[dict[str, Any]]) -> int:
    """Run the commands; return the status of the first that ends otherwise than planned, else 0."""
    torch.set_num_threads(1)
    LabelSetModule.training_step = step
    for one in plans:
        plan.clear()
        plan.update(one)
        status = main(plan["command"])
        if status != plan.get("status", 0):
            return status or 1
    dist.destroy_process_group()
    return 0


def forked(rank: int, ranks: int, store: str, plans: list[dict[str, Any]], results: Any) -> None:
    """Follow the plans as one rank; report the status and what was said."""
    patience = datetime.timedelta(seconds=1800)  # a busy machine is slow
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=patience)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        status = follow(plans)
    results.put((status, said.getvalue()))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends all ranks when one dies; first say why this one stops
    join("gloo", 1800)  # a busy machine is slow
    sys.exit(follow(json.loads(sys.argv[1])))
