"""What pytest collects: doctests import every module, and the kernels' cannot be imported without triton."""

import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["lastlayer/_triton/*.py"]

LONG_PAGES = {
    "curate.md",
    "decisions.md",
    "encoders.md",
    "images.md",
    "relations.md",
    "tags.md",
    "train.md",
}  # they train models


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the examples of long pages to `make test-all`."""
    for item in items:
        if item.path.name in LONG_PAGES:
            item.add_marker(pytest.mark.slow)
