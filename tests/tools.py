"""What several test files share."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# The marks of a file that tests GPU kernels.
GPU_KERNELS = [
    pytest.mark.kernels,
    pytest.mark.skipif(
        not (INTERPRETED or DEVICE.type == "cuda"),
        reason="needs a GPU, or TRITON_INTERPRET=1 (see test_interpreter.py)",
    ),
]

# Seconds after which a process counts as hung. It is long, so that a busy machine does not fail a test.
HUNG = 1800.0


def assert_as_accurate(actual: Tensor, plain: Tensor, exact: Tensor, slack: float = 2.0) -> None:
    """``actual`` is as close to float64 as plain torch in the same dtype, within ``slack``."""
    assert actual.shape == exact.shape
    if actual.numel() == 0:
        return
    error = (actual.double() - exact).abs().max().item()
    allowed = slack * (plain.double() - exact).abs().max().item()
    allowed += 2 * torch.finfo(actual.dtype).eps * exact.abs().max().item()
    assert error <= allowed, f"error {error:.2e} to float64, allowed {allowed:.2e}"


def slow(*values: Any) -> Any:
    """Values of parameters whose cases `make test` leaves out, and `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def long(*values: Any) -> Any:
    """Values of parameters whose cases take so long that CI leaves them out too; `make test-long` runs them."""
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.long])
