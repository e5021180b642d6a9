"""The API reference names everything that is public, once."""

import ast
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

import lastlayer as ll

DOCS = Path(__file__).parents[2] / "docs"
pytest.importorskip("sphinx")
sys.path.insert(0, str(DOCS / "_ext"))
import reference  # noqa: E402


def names_in_the_source() -> set[str]:
    """What ``lastlayer/__init__.py`` imports as a public name, and its lazy names: read, not run."""
    found = set()
    for node in ast.parse(Path(ll.__file__).read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lastlayer"):
            found |= {alias.asname for alias in node.names if alias.asname}
        elif isinstance(node, ast.Assign) and node.targets[0].id == "_LAZY":
            found |= {key.value for key in node.value.keys}
    return {name for name in found if not name.startswith("_")}


def test_public_names_are_those_of_the_source():
    assert set(reference.public_names()) == names_in_the_source()


def test_every_public_name_is_in_the_reference():
    listed = re.findall(r"^\| \{py:obj\}`(\w+) <(lastlayer[\w.]*)>`", reference.api(), re.M)
    assert sorted(name for name, path in listed if not path.startswith("lastlayer.data.")) == sorted(
        names_in_the_source()
    )


def test_every_public_name_is_described_once():
    pages = [path.read_text("utf-8") for path in DOCS.rglob("*.md") if "_build" not in path.parts]
    described = [target for page in [*pages, reference.api()] for target in reference.DESCRIBED.findall(page)]
    counts = Counter(target.split(".")[-1] for target in described)
    assert {name: counts[name] for name in names_in_the_source() if counts[name] != 1} == {}


def test_device_time_is_the_sum_over_the_results():
    results = [
        {"rows": []},
        {"seconds": {"NVIDIA X": 90.0}},
        {"seconds": {"NVIDIA X": 30.0, "x86_64": 6.0, "CPU": 6.0}},
    ]
    found = reference.device_time(results)
    assert found.startswith("The results below took 0.2 minutes of CPU, 2.0 minutes of NVIDIA X (")
    assert reference.device_time([{"rows": []}]) == ""
