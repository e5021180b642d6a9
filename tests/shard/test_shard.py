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


@pytest.fixture(scope="module")
def reports(request, tmp_path_factory):
    """What each process reports, from one start of four processes for all checks."""
    return run_ranks(checks.run, 4, RUNS[request.param], str(tmp_path_factory.mktemp("store") / "file"), request.param)


@pytest.mark.parametrize("reports", ["two splits"], indirect=True)
@pytest.mark.parametrize("name", RUNS["two splits"])
def test_sharded_is_whole(reports, name):
    for rank, passed, failure in reports:
        assert name in passed, f"rank {rank}: {failure}"


@pytest.mark.slow
@pytest.mark.parametrize("reports", ["all splits"], indirect=True)
@pytest.mark.parametrize("name", RUNS["all splits"])
def test_sharded_is_whole_in_every_split(reports, name):
    test_sharded_is_whole(reports, name)
