"""The demo on tiny data: each loss gets the same learning rates, the validation rows choose, the test rows wait."""

import subprocess
import sys

import numpy as np
import pytest
from tools import HUNG
from train_tools import make_rows

from lastlayer.cli import main
from lastlayer.train import RunFolder
from lastlayer.train import demo as module


@pytest.fixture
def sample(monkeypatch):
    rows = make_rows(160, labels=30)
    parts = {"train": rows.take(np.arange(100)), "valid": rows.take(np.arange(100, 130))}
    parts["test"] = rows.take(np.arange(130, 160))
    monkeypatch.setattr(module, "load_sample", lambda: parts)


@pytest.mark.slow
def test_the_validation_rows_choose_among_the_same_factors_for_each_loss(sample, tmp_path):
    said = []
    losses, factors = ("binary", "expected_positive"), (1e-6, 1.0)
    runs = module.demo(tmp_path, losses=losses, epochs=30, factors=factors, step=lambda *what: said.append(what))
    assert [run.path.name for run in runs] == list(losses)
    assert [run.metrics()["part"] for run in runs] == ["test", "test"]
    rates = [run.read_json("data.json")["resolved"]["lr"] for run in runs]
    assert [float(rate) for rate in rates] == [10.0, 0.05]  # a millionth of them learns nothing
    trials = {path.name for path in (tmp_path / "trials").iterdir()}
    assert trials == {"binary_1e-05", "binary_10.0", "expected_positive_0.05", "expected_positive_5e-08"}
    assert all(RunFolder(tmp_path / "trials" / name).metrics()["part"] == "valid" for name in trials)
    assert [what[1:] for what in said] == [(i, 6) for i in range(7)]
    assert "hidden" in runs[0].metrics()["notes"][0]


def test_finished_runs_are_kept(sample, tmp_path):
    first = module.demo(tmp_path, losses=["lml"], epochs=1, factors=[1.0])[0]
    before = (first / "done.json").stat().st_mtime_ns
    assert not (tmp_path / "trials").exists()
    again = module.demo(tmp_path, losses=["lml"], epochs=1, factors=[1.0])[0]
    assert (again / "done.json").stat().st_mtime_ns == before


@pytest.mark.slow
def test_it_says_what_it_does_who_wins_and_how_to_see_it(sample, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(module, "FACTORS", (1.0,))
    monkeypatch.setattr(module.demo, "__kwdefaults__", {**module.demo.__kwdefaults__, "factors": (1.0,)})
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    words = ["demo", "--out", str(tmp_path / "out"), "--epochs", "30", "--losses", "binary,expected_positive,lml"]
    assert main(words) == 0
    text = capsys.readouterr().out
    whole = " ".join(text.split())
    assert whole.startswith("data: 100 descriptions of Debian packages with 30 tags; 50% of the tags are hidden task: ")
    assert "work: 3 losses" in text
    runs = {name: RunFolder(tmp_path / "out" / name).metrics()["metrics"] for name in words[-1].split(",")}
    metric = max((name for name in runs["lml"] if name.startswith("recall@")), key=lambda name: int(name[7:]))
    first, second = sorted(runs, key=lambda name: -runs[name][metric]["value"])[:2]
    value, other = (100 * runs[name][metric]["value"] for name in (first, second))
    assert f"{first} finds most: {value:.1f} % of the true tags" in whole
    assert f"{value - other:.1f} points ahead of {second} (95 % interval" in whole
    assert max(len(line) for line in text.splitlines() if not line.startswith(("report:", "open it:"))) <= 80
    assert "expected_positive" in text, "names are whole"
    assert text.endswith("--open\n")
    assert opened == []
    assert main([*words, "--open"]) == 0
    assert opened == [(tmp_path / "out" / "report.html").as_uri()]


def test_its_opening_words_come_before_torch():
    """In a process of its own: what the demo does is said without importing torch."""
    code = "import sys; from lastlayer.train.demo import LOSSES, opening; print(opening(LOSSES, 0.5, 8))"
    code += "; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HUNG)
    assert done.returncode == 0, done.stderr
    assert "252 tags" in done.stdout
