"""Sharded = whole for metrics at k, on three processes; what they check is in sharded_at_k.py."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from processes import run_ranks

import lastlayer as ll

sys.path.insert(0, str(Path(__file__).parent))  # the processes import it by this name

checks = importlib.import_module("sharded_at_k")


def test_sharded_is_whole(tmp_path):
    found = dict(run_ranks(checks.run, 3, str(tmp_path / "store")))
    assert not any(found.values()), "\n".join(found.values())


def test_averages_over_classes_need_all_of_them():
    with pytest.raises(
        ValueError, match="recall_at_k: `average` must be 'samples' with `indices` or `shard`, got 'macro'"
    ):
        ll.recall_at_k(torch.ones(2, 3), torch.ones(2, 3), 1, average="macro", shard=ll.ClassShard(0, 3))
