"""One process of a training run whose labels are split: runs commands, and is killed or interrupted as told."""

from __future__ import annotations

import json
import os
import signal
import sys

import torch
import torch.distributed as dist

from lastlayer.cli import main
from lastlayer.shard import join
from lastlayer.train.module import LabelSetModule

first_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
real = LabelSetModule.training_step


def step(self, batch, batch_idx):
    if first_attempt and plan.get("kill") == [dist.get_rank(), self.global_step]:
        os.kill(os.getpid(), signal.SIGKILL)
    if plan.get("interrupt") == self.global_step:
        raise KeyboardInterrupt
    return real(self, batch, batch_idx)


if __name__ == "__main__":
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends all ranks when one dies; first say why this one stops
    LabelSetModule.training_step = step
    join("gloo", 1800)  # a busy machine is slow
    for plan in json.loads(sys.argv[1]):
        status = main(plan["command"])
        if status != plan.get("status", 0):
            sys.exit(status or 1)
    dist.destroy_process_group()
