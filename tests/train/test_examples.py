"""The examples run, and learn."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "needs"),
    [("plain_loop", "torch"), ("lightning", "pytorch_lightning"), ("huggingface_trainer", "transformers"),
     ("skorch_criterion", "skorch")],
)  # fmt: skip
def test_example(name, needs):
    pytest.importorskip(needs)
    recall = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]()
    assert recall > 0.8  # chance is 0.25
