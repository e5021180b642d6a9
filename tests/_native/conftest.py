"""What the tests of the compiled kernels share."""

import importlib

import pytest
import torch
from tools import slow

from lastlayer import _native as native

SETS = ("baseline", "AVX2", "AVX-512")
USED = "" if native.unavailable(torch.device("cpu")) else native.instruction_set()


@pytest.fixture(params=[name if name == USED else slow(name) for name in SETS])
def isa(request, monkeypatch):
    """Run a test with each instruction set: the one in use always, the others among the longer tests."""
    library = native.library()
    weighted = importlib.import_module("lastlayer._native.weighted")  # it reads float only where that set can
    library.lastlayer_limit_isa(SETS.index(request.param))
    monkeypatch.setattr(weighted, "_FUSED", bool(library.lastlayer_fused()))
    if native.instruction_set() != request.param:
        library.lastlayer_limit_isa(2)
        pytest.skip(f"this processor has no {request.param}")
    yield
    library.lastlayer_limit_isa(2)
