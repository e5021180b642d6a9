"""Run the kernels' tests in Triton's interpreter: a process of their own, since Triton decides at its import."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tools import DEVICE, HUNG

PARTS = [
    "short_rows or half or shapes",
    "scales or mask",
    "long_rows and not of",
    "long_rows_of or gradient or reduced or second or scale_rows",
    "saturated or edges",
    "test_loss and dense",
    "test_loss and not dense",
]


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there is a GPU: test_lml.py runs on it")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("part", PARTS)
def test_kernels_in_the_interpreter(part):
    tests = Path(__file__).with_name("test_lml.py")
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-W", "ignore", str(tests), "-k", part]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HUNG)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout
