import importlib.util
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `from tools import ...`

if importlib.util.find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    # No limit on the time of an example: a busy machine would exceed it.
    settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("suite")

if os.environ.get("TRITON_INTERPRET") == "1":
    from interpreter import quicken, round_as_a_gpu

    quicken()
    round_as_a_gpu()


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch  # here, since the process that only hands out the tests needs none

    torch.manual_seed(0)


@pytest.fixture
def no_general_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have calls wait for their own kernels, on a GPU too: the digits of another form may differ in the last place."""
    from lastlayer._triton import ahead

    monkeypatch.setattr(ahead, "_provided", lambda x: False)
