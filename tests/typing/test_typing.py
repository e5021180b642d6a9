"""Type checkers understand the package as a user sees it."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

CONSUMER = Path(__file__).with_name("consumer.py")
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_mypy_accepts_what_a_user_writes():
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed: it is in the extra `dev`")
    # With the settings of the package, which are strict, and so with the cache of `make check`.
    checked = subprocess.run([sys.executable, "-m", "mypy", str(CONSUMER)], capture_output=True, text=True, cwd=ROOT)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.slow
def test_pyright_accepts_what_a_user_writes(tmp_path):
    if importlib.util.find_spec("basedpyright") is None:
        pytest.skip("basedpyright is not installed: it is in the extra `dev`")
    settings = tmp_path / "pyrightconfig.json"
    settings.write_text(
        '{"typeCheckingMode": "standard", "reportUnnecessaryTypeIgnoreComment": "error", '
        f'"include": ["{CONSUMER}"], "extraPaths": ["{ROOT}"], "enableTypeIgnoreComments": false}}'
    )
    options = ["--project", str(settings), "--pythonpath", sys.executable]
    checked = subprocess.run(
        [sys.executable, "-m", "basedpyright", *options], capture_output=True, text=True, cwd=tmp_path
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
