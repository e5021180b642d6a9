import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for `from tools import ...`

if os.environ.get("TRITON_INTERPRET") == "1":
    from interpreter import quicken

    quicken()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
