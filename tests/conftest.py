import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for `from tools import ...`


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
