"""Files of a run folder: whole or not there, checked when they are read."""

import errno
import json
import os

import numpy as np
import pytest
from report_tools import get, make_run, put

from lastlayer import report
from lastlayer.runs import RunError, RunFolder


def test_json_holds_numbers_that_json_has_no_word_for_and_lone_surrogates(tmp_path):
    run = RunFolder(tmp_path)
    run.write_json("a.json", {"x": np.float32(0.5), "nan": float("nan"), "text": "lovely \ud83d", "list": np.arange(2)})
    assert run.read_json("a.json") == {"format": 1, "x": 0.5, "nan": None, "text": "lovely \ud83d", "list": [0, 1]}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_file_that_cannot_be_written_leaves_the_previous_one(tmp_path):
    run = RunFolder(tmp_path)
    run.write_json("a.json", {"x": 1})
    loop: dict = {}
    loop["x"] = loop
    with pytest.raises(RecursionError):
        run.write_json("a.json", loop)
    assert run.read_json("a.json")["x"] == 1


def test_folders_of_version_0_1_are_read(tmp_path):
    folder = make_run(tmp_path / "a")
    data = get(folder, "data.json")
    data["parts"]["test"]["labels_a_row"] = data["parts"]["test"].pop("labels_per_row")
    put(folder, "data.json", data)
    assert report.summary(folder)["runs"][0]["parts"]["test"]["labels_per_row"] > 1
    report.write(folder, tmp_path / "report.html")
    assert "labels each" in (tmp_path / "report.html").read_text("utf-8")


def test_another_format_is_one_line(tmp_path):
    (tmp_path / "labels.json").write_text(json.dumps({"format": 2, "names": []}))
    with pytest.raises(RunError, match=r"labels\.json: damaged: must be an object of format 1\.$"):
        RunFolder(tmp_path).labels()
    with pytest.raises(RunError, match=r"metrics\.json: not there\. Is .* a finished run"):
        RunFolder(tmp_path).metrics()


def test_a_full_disk_names_the_file_and_leaves_the_old_one(tmp_path, monkeypatch):
    run = RunFolder(tmp_path)
    run.write_json("labels.json", {"names": ["a"]})

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*labels\.json'"):
        run.write_json("labels.json", {"names": ["b"]})
    assert run.labels() == ["a"]
    assert [path.name for path in tmp_path.iterdir()] == ["labels.json"]
