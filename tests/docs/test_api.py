"""The API reference names everything that is public, once."""

import re
import sys
from collections import Counter
from pathlib import Path

import pytest

import lastlayer as ll

DOCS = Path(__file__).parents[2] / "docs"
pytest.importorskip("sphinx.application")
sys.path.insert(0, str(DOCS / "_ext"))
import reference  # noqa: E402


def paths() -> list[str]:
    return [path for names in reference.public_names().values() for path in names.values()]


def test_the_door_is_small_and_its_names_are_taught_by_their_short_path():
    door = [name for name in ll.__all__ if name not in ll._ROOMS]
    assert len(door) <= 45
    assert {f"lastlayer.{name}" for name in door} <= set(paths())
    assert "lastlayer.loss.warp_loss" in paths()  # one that the room has, and the door does not show


def test_every_public_name_is_in_the_reference():
    listed = re.findall(r"^\| \{py:obj\}`([\w.]+) <lastlayer[\w.]*>`", reference.api(), re.M)
    assert sorted(f"lastlayer.{name}" for name in listed) == sorted(paths())


def test_every_public_name_is_described_once_by_its_path():
    pages = [path.read_text("utf-8") for path in DOCS.rglob("*.md") if "_build" not in path.parts]
    described = [target for page in [*pages, reference.api()] for target in reference.DESCRIBED.findall(page)]
    counts = Counter(described)
    assert {path: counts[path] for path in paths() if counts[path] != 1} == {}


def test_every_function_is_described_on_the_page_of_its_room():
    described = set(reference.described().values())
    missing = [path for path in paths() if path.rsplit(".", 1)[1].islower() and path not in described]
    assert missing == [], "the page would hide them from who reads it; api.md alone lists them"


def test_device_time_is_the_sum_over_the_results():
    results = [
        {"rows": []},
        {"seconds": {"NVIDIA X": 90.0}},
        {"seconds": {"NVIDIA X": 30.0, "x86_64": 6.0, "CPU": 6.0}},
    ]
    found = reference.device_time(results)
    assert found.startswith("The committed results took 0.2 minutes of CPU, 2.0 minutes of NVIDIA X (")
    assert reference.device_time([{"rows": []}]) == ""
