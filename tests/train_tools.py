"""Rows to train on, and a training process that kills itself; importable by child processes."""

import os
import signal

import numpy as np
import torch

from lastlayer.data import LabelData
from lastlayer.train import Config

CONFIG = Config(epochs=12, batch_size=32, hidden=(8,), dropout=0.2, lr=0.01, k="predicted", patience=50, bootstrap=20)


def make_rows(n: int = 240, seed: int = 0, labels: int = 6) -> LabelData:
    """Texts whose words tell their labels."""
    rng = np.random.default_rng(seed)
    texts, lists = [], []
    for _ in range(n):
        chosen = sorted(rng.choice(labels, rng.integers(1, 4), replace=False).tolist())
        words = [f"word{label}" for label in chosen] + [f"noise{rng.integers(30)}" for _ in range(4)]
        texts.append(" ".join(rng.permutation(words)))
        lists.append([f"label{label}" for label in chosen])
    return LabelData.from_lists(lists, texts=texts, ids=[f"r{seed}-{i}" for i in range(n)])


def work(rows: LabelData, out: str, kill_at: int) -> None:
    """Train, and die at the given call of fsync: a file is written then, under its temporary name or its own."""
    from lastlayer.train import train

    torch.set_num_threads(1)
    calls, real = 0, os.fsync

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        real(descriptor)

    os.fsync = fsync
    train({"all": rows}, CONFIG, out)
