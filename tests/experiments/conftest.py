import importlib
from pathlib import Path

import pytest


@pytest.fixture
def module(monkeypatch):
    """Import a module of `experiments`, which is not installed with the package."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    return lambda name: importlib.import_module(f"experiments.{name}")
