"""What the rooms export: every name is there, documented, and listed once."""

import importlib
import inspect

import pytest
import torchmetrics

import lastlayer
from lastlayer.metrics import _STREAMS


@pytest.mark.parametrize("room", ["metrics", "decode"])
def test_the_room_exports_its_names(room):
    module = importlib.import_module(f"lastlayer.{room}")
    assert module.__all__ == sorted(set(module.__all__))
    for name in module.__all__:
        value = getattr(module, name)
        assert value.__doc__, f"{name} has no docstring"
        assert value.__module__.startswith(f"lastlayer.{room}.")
    with pytest.raises(AttributeError, match=f"module 'lastlayer.{room}' has no attribute 'nothing'"):
        _ = module.nothing


def test_every_stream_is_exported():
    exported = set(lastlayer.metrics.__all__)
    for module, names in _STREAMS.items():
        classes = inspect.getmembers(importlib.import_module(module), inspect.isclass)
        own = {name for name, value in classes if value.__module__ == module and not name.startswith("_")}
        assert own == set(names.split())
        assert own <= exported


def test_streams_are_metrics():
    """They are imported on demand, which tests/test_layout.py watches."""
    assert issubclass(lastlayer.metrics.RecallAtK, torchmetrics.Metric)
