"""Every experiment runs on tiny data, resumes, and its README shows the numbers of its results file."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXPERIMENTS = sorted(path.parent.name for path in ROOT.glob("experiments/*/run.py"))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_smoke_run_and_resume(name, tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    run = importlib.import_module(f"experiments.{name}.run")
    out = tmp_path / "results.json"
    arguments = ["--smoke", "--out", str(out), "--device", "cpu"]
    run.main(arguments)
    first = json.loads(out.read_text())["rows"]
    assert first
    capsys.readouterr()
    run.main(arguments)  # everything is there: nothing runs again
    assert json.loads(out.read_text())["rows"] == first


@pytest.mark.parametrize("name", [n for n in EXPERIMENTS if (ROOT / "experiments" / n / "results").exists()])
def test_readme_equals_the_results(name, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    common = importlib.import_module("experiments.common")
    run = importlib.import_module(f"experiments.{name}.run")
    folder = ROOT / "experiments" / name
    rows = common.Results(folder / "results" / "results.json").rows
    assert common.fill(folder / "README.md", run.tables(rows)) == (folder / "README.md").read_text()


def test_results_count_the_seconds_of_all_runs(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    common = importlib.import_module("experiments.common")
    clock = iter([0.0, 5.0, 100.0, 103.0])
    monkeypatch.setattr(common.time, "monotonic", lambda: next(clock))
    for run in range(2):
        common.Results(tmp_path / "results.json").add(run=run)
    assert list(json.loads((tmp_path / "results.json").read_text())["seconds"].values()) == [8.0]
