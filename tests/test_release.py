"""What is released: a wheel built from the sdist, installed, and tested with the tests of the sdist."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import lastlayer

ROOT = Path(__file__).parents[1]
LEFT_OUT = [".git", ".venv", "build", "_build", "_generated", "__pycache__", "*.so", "*.egg-info", ".*_cache"]
BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"
SHOW = """
import lastlayer, torch
from importlib.metadata import version
reason = lastlayer._native.unavailable(torch.device("cpu"))
print(lastlayer.__file__, lastlayer.__version__, version("lastlayer"), reason)
"""


def run(*command, cwd, **environment):
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """The folder of the unpacked sdist, and the wheel built from it."""
    folder = tmp_path_factory.mktemp("release")
    shutil.copytree(ROOT, folder / "tree", ignore=shutil.ignore_patterns(*LEFT_OUT))
    run(sys.executable, "-c", BUILD, "build_sdist", str(folder), cwd=folder / "tree")
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    source = folder / sdist.name.removesuffix(".tar.gz")
    run(sys.executable, "-c", BUILD, "build_wheel", str(folder), cwd=source)
    (wheel,) = folder.glob("*.whl")
    return source, wheel


def test_releases_of_the_changelog_are_in_order_and_not_after_the_version():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    entries = [tuple(map(int, entry)) for entry in re.findall(r"^## \[(\d+)\.(\d+)\.(\d+)\]", changelog, re.MULTILINE)]
    assert entries == sorted(set(entries), reverse=True)
    assert entries[0] <= tuple(int(part) for part in re.findall(r"\d+", lastlayer.__version__)[:3])


@pytest.mark.slow
def test_the_sdist_holds_every_file(released):
    source, _ = released
    try:
        tracked = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
    except (AssertionError, FileNotFoundError):
        pytest.skip("needs a checkout and git")
    assert [name for name in tracked if not (source / name).exists() and (ROOT / name).exists()] == []


@pytest.mark.slow
def test_the_wheel_is_for_every_python_and_holds_the_package_alone(released):
    _, wheel = released
    assert wheel.name.startswith(f"lastlayer-{lastlayer.__version__}-py3-none-")
    assert not wheel.name.endswith("-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names} == {"lastlayer", f"lastlayer-{lastlayer.__version__}.dist-info"}
    suffixes = {Path(name).suffix for name in names if name.startswith("lastlayer/")}
    assert not suffixes & {".c", ".h"}
    assert {"lastlayer/_native/_lml.so", "lastlayer/_native/_linear.so"} <= set(names)
    assert {"lastlayer/py.typed", "lastlayer/report/page.html", "lastlayer/data/sample/debian.jsonl.xz"} <= set(names)


@pytest.mark.slow
def test_the_wheel_passes_the_tests_of_the_sdist(released, tmp_path):
    source, wheel = released
    installed = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(installed)]
    run(*pip, str(wheel), cwd=tmp_path)
    path, version, of_metadata, *reason = run(
        sys.executable, "-c", SHOW, cwd=tmp_path, PYTHONPATH=str(installed)
    ).split(maxsplit=3)
    assert Path(path).parent == installed / "lastlayer"
    assert version == of_metadata == lastlayer.__version__
    assert not reason, "the compiled kernel does not run"
    shutil.rmtree(source / "lastlayer")  # the tests may find the installed package only
    chosen = ["tests/project/test_lml.py", "tests/data/test_read.py", "-k", "golden or read"]
    said = run(
        *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *chosen), cwd=source, PYTHONPATH=str(installed)
    )
    assert "failed" not in said
