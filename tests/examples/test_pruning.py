"""The pruning example meets its budget and still reads digits."""

import runpy
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "pruning.py"


def test_pruned_network_meets_its_budget():
    example = runpy.run_path(str(EXAMPLE))
    for budget in (0.99, 0.5, 0.1):
        k = example["units"](torch.tensor([1.0, -1.0, 0.5]), budget)
        assert example["multiply_adds"](k).item() == pytest.approx(budget * 33408, rel=1e-4)
    accuracy, share, kept = example["pruned"](0.3, learn=True, steps=60)
    assert accuracy > 0.8  # chance is 0.1
    assert 0.25 < share <= 0.3
    a, b, c = kept
    assert share == pytest.approx((64 * a + a * b + b * c + 10 * c) / 33408)
