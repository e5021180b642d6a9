"""Sharded = whole, on two and four processes; what they check is in checks.py."""

import importlib
import sys
from pathlib import Path

import pytest
from processes import run_ranks

sys.path.insert(0, str(Path(__file__).parent))  # the processes import it by this name

checks = importlib.import_module("checks")
NAMES = [name for name in dir(checks) if name.startswith("check_")]
LONG = [  # half a second and more in each process
    "check_balanced",
    "check_dtensor",
    "check_layer_trains_alike",
    "check_linear",
    "check_losses_of_incomplete_labels",
    "check_traffic",
    "check_warm_start",
    "check_weights_and_other_losses",
]
RUNS = {"two splits": [name for name in NAMES if name not in LONG], "all splits": NAMES}


@pytest.mark.parametrize("which", ["two splits", pytest.param("all splits", marks=pytest.mark.slow)])
def test_sharded_is_whole(which, tmp_path):
    """One test for all checks: they share one start of four processes, which the workers of pytest would repeat."""
    for rank, passed, failure in run_ranks(checks.run, 4, RUNS[which], str(tmp_path / "file"), which):
        assert passed == RUNS[which], f"rank {rank}: {failure}"
