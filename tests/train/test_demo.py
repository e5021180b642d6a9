"""The demo on tiny data: each loss gets the same learning rates, the validation rows choose, the test rows wait."""

import numpy as np
import pytest
from train_tools import make_rows

from lastlayer.train import RunFolder
from lastlayer.train import demo as module


@pytest.fixture
def sample(monkeypatch):
    rows = make_rows(160, labels=30)
    parts = {"train": rows.take(np.arange(100)), "valid": rows.take(np.arange(100, 130))}
    parts["test"] = rows.take(np.arange(130, 160))
    monkeypatch.setattr(module, "load_sample", lambda: parts)


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
