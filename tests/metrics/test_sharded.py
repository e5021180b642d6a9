"""Sharded = whole for metrics at k, on three processes; what they check is in sharded_at_k.py."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

import lastlayer as ll

sys.path.insert(0, str(Path(__file__).parent))  # the processes import it by this name

checks = importlib.import_module("sharded_at_k")


def test_sharded_is_whole(tmp_path):
    queue = mp.get_context("spawn").SimpleQueue()
    processes = mp.spawn(checks.run, args=(str(tmp_path / "store"), queue), nprocs=3, join=False)
    found = dict(queue.get() for _ in range(3))
    processes.join()
    assert not any(found.values()), "\n".join(found.values())


def test_averages_over_classes_need_all_of_them():
    with pytest.raises(
        ValueError, match="recall_at_k: `average` must be 'samples' with `indices` or `shard`, got 'macro'"
    ):
        ll.recall_at_k(torch.ones(2, 3), torch.ones(2, 3), 1, average="macro", shard=ll.ClassShard(0, 3))
