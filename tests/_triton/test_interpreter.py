"""Run few tests of the kernels in Triton's interpreter, in a process of their own, since Triton decides at its import.

`make test-triton` runs all of them, with other versions of Triton too, and CI calls it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tools import DEVICE, HUNG

from lastlayer import _triton

FILES = [Path(__file__).with_name(f"test_{name}.py") for name in ("lml", "weighted", "fused")]
FILES.append(Path(__file__).parents[1] / "loss/test_linear.py")
SHARP = (
    "(test_edges_of_the_loss and 0.4) or (test_short_rows and 333) or (test_kernels_are_plain and dtype0 and shape0) "
    "or test_rows_at_their_ends or test_each_kernel_once"
)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there is a GPU: the tests of the kernels run on it")
@pytest.mark.skipif(not _triton.FOUND, reason="no triton that is new enough")
def test_kernels_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-W", "ignore", *map(str, FILES)]
    command += ["-m", "kernels and not slow", "-k", SHARP]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HUNG)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "skipped" not in done.stdout
    for path in FILES:
        assert path.name in done.stdout
