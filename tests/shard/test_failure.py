"""A rank dies in training: the others say so and stop, torchrun starts again, and the run ends as if undisturbed."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tools import HUNG

EXAMPLE = Path(__file__).parents[2] / "examples" / "sharded_training.py"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_killed_rank(tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "--max-restarts=1"]
    launcher.append("--monitor-interval=1")  # seconds until torchrun ends the other ranks; time to say why they stop
    run = [
        "--folder",
        str(tmp_path / "killed"),
        "--steps=8",
        "--every=3",
        "--kill-rank=2",
        "--kill-step=5",
        f"--timeout={HUNG}",
    ]
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLE), *run],
        capture_output=True,
        text=True,
        timeout=HUNG,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    messages = [f.read_text() for f in (tmp_path / "killed").glob("stopped-rank*-attempt0.txt")]
    assert messages
    assert all("had no answer from the other ranks" in m and "last checkpoint" in m for m in messages)

    spec = importlib.util.spec_from_file_location("sharded_training", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    (tmp_path / "whole").mkdir()
    expected = example.train(tmp_path / "whole", steps=8, every=8)
    found = json.loads((tmp_path / "killed" / "metrics.json").read_text())
    assert found.pop("attempt") == 1
    assert found == pytest.approx(expected, rel=1e-12)
