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


def test_nan_is_null_and_numbers_out_of_range_are_damage(tmp_path):
    run = RunFolder(tmp_path)
    (tmp_path / "errors.json").write_text('{"format": 1, "value": NaN, "more": [Infinity, 1e308]}')
    assert run.read_json("errors.json") == {"format": 1, "value": None, "more": [None, 1e308]}
    for number in ("1e999", "1" + 30 * "0", "9" * 5000, f"-{1 << 63}"):
        (tmp_path / "errors.json").write_text(f'{{"format": 1, "other": [{number}]}}')
        with pytest.raises(RunError, match=r"errors\.json: damaged: must hold (whole )?numbers in the range of"):
            run.read_json("errors.json")


def test_nesting_has_an_end(tmp_path):
    run = RunFolder(tmp_path)
    run.write_json("a.json", {"x": json.loads("[" * 40 + "]" * 40)})
    run.read_json("a.json")
    for depth in (60, 900, 100_000):
        (tmp_path / "a.json").write_text(f'{{"format": 1, "x": {"[" * depth}{"]" * depth}}}')
        with pytest.raises(RunError, match=r"a\.json: damaged: (must not be nested|maximum recursion)"):
            run.read_json("a.json")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data.json", {"resolved": 1e308}, "`resolved` must be an object"),
        ("data.json", {"resolved": {"at": [{}]}}, r"`resolved\.at\.0` must be a whole number"),
        ("data.json", {"resolved": {"k": "x"}}, r"`resolved\.k` must be a number"),
        ("data.json", {"parts": {"train": {"rows": True}}}, r"`parts\.train\.rows` must be a number"),
        (
            "folds.json",
            {"data": {"source": {"options": {"id_column": 0}}}},
            "`data.source.options.id_column` must be a name",
        ),
        ("decision.json", {"rule": 0}, "`rule` must be a text"),
        ("environment.json", {"started": 3}, "`started` must be a text"),
        ("examples.json", {"rows": [{"row": True}]}, r"`rows\.0\.row` must be a whole number"),
        ("folds.json", {"metrics": {"map": {"mean": []}}}, r"`metrics\.map\.mean` must be a number"),
        ("metrics.json", {"metrics": {}, "labels": [1]}, "`labels` must be an object"),
        ("errors.json", {"kinds": {"x": 1}}, "`kinds` must be a list"),
    ],
)
def test_fields_that_hold_something_else_are_damage_that_names_file_and_field(tmp_path, name, content, message):
    run = RunFolder(tmp_path)
    run.write_json(name, content)
    with pytest.raises(RunError, match=rf"{name}: damaged: {message}"):
        run.read_json(name)


@pytest.mark.parametrize("part", ["value", "low", "high"])
@pytest.mark.parametrize("missing", [True, False])
def test_a_metric_without_all_its_numbers_has_no_interval(tmp_path, part, missing):
    folder = make_run(tmp_path / "a")
    metrics = get(folder, "metrics.json")
    for one in metrics["metrics"].values():
        if missing:
            one.pop(part, None)
        else:
            one[part] = None
    put(folder, "metrics.json", metrics)
    for other in ([], [make_run(tmp_path / "b")]):
        for form in ("html", "md", "json"):
            report.write([folder, *other], tmp_path / f"report.{form}")
    assert all(m["low"] is None for m in report.summary(folder)["runs"][0]["metrics"].values())


def test_nan_among_the_reasons_names_the_file(tmp_path):
    folder = make_run(tmp_path / "a")
    (folder / "reasons.json").write_text('{"format": 1, "rows": {}, "labels": {"0": [[["word", NaN]], []]}}')
    with pytest.raises(RunError, match=r"reasons\.json: damaged: must hold rows and labels"):
        report.write(folder, tmp_path / "report.html")
