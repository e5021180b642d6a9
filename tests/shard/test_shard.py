"""Sharded = whole, on two and four processes; what they check is in checks.py."""

import importlib
import sys
from pathlib import Path

import pytest
from processes import run_ranks

sys.path.insert(0, str(Path(__file__).parent))  # the processes import it by this name

checks = importlib.import_module("checks")
NAMES = [name for name in dir(checks) if name.startswith("check_")]


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What each process reports, from one start of four processes for all checks."""
    return run_ranks(checks.run, 4, NAMES, str(tmp_path_factory.mktemp("store") / "file"))


@pytest.mark.parametrize("name", NAMES)
def test_sharded_is_whole(reports, name):
    for rank, passed, failure in reports:
        assert name in passed, f"rank {rank}: {failure}"
