"""The page without a browser: it parses, holds every part, escapes what is the user's, and fails in one line."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from report_tools import HOSTILE, get, make_run, put
from safetensors.numpy import load_file, save_file

from lastlayer import report
from lastlayer.report import ReportError
from lastlayer.report.digest import percent
from lastlayer.report.markdown import text as escaped
from lastlayer.report.page import embedded

VOID = {"meta", "br", "input", "img", "link", "hr", "wbr"}
SECTIONS = {"summary", "curves", "reliability", "errors", "together", "labels", "examples", "learning", "settings"}


class Page(HTMLParser):
    """Tags with attributes and text; the nesting must be right."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: dict[str, list[str]] = {}
        self.scripts: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif self.open and self.open[-1] != "style":
            self.text += data
        if self.open and self.open[-1] == "td" and (name := self.tags[-1][1].get("data-metric")):
            self.cells.setdefault(name, []).append(data)

    def ids(self) -> list[str]:
        return [a["id"] for _, a in self.tags if "id" in a]

    def data(self) -> dict:
        return json.loads(self.scripts[1])


def page(runs, out) -> Page:
    assert report.write(runs, out) == out
    return Page(out.read_text("utf-8"))


def test_one_run_has_every_part_and_needs_no_network(tmp_path):
    found = page(make_run(tmp_path / "a"), tmp_path / "report.html")
    ids = found.ids()
    assert set(ids) >= SECTIONS
    assert len(ids) == len(set(ids))
    assert "differences" not in ids
    for tag, attributes in found.tags:
        assert "src" not in attributes
        assert tag not in ("link", "img", "iframe", "object", "base")
        assert not any(name.startswith("on") or name == "style" for name in attributes)
        if "href" in attributes:
            assert attributes["href"][0] == "#"
            assert attributes["href"][1:] in ids
        if "aria-labelledby" in attributes:
            assert attributes["aria-labelledby"] in ids
    html = (tmp_path / "report.html").read_text("utf-8")
    assert set(re.findall(r"https?://[^\"'\s]+", html)) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in html
    assert "url(" not in html
    policy = next(a["content"] for t, a in found.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


def test_numbers_are_those_of_the_metrics_file(tmp_path):
    runs = [make_run(tmp_path / name, noise=noise) for name, noise in (("a", 0.2), ("b", 0.6))]
    found = page(runs, tmp_path / "report.html")
    metrics = [get(run, "metrics.json")["metrics"] for run in runs]
    assert set(found.cells) == set(metrics[0])
    for name, cells in found.cells.items():
        assert cells == [percent(one[name]) for one in metrics]
    assert percent(metrics[0]["ece"]) == "12.5\u00a0%"
    report.write(runs, tmp_path / "report.json")
    summary = json.loads((tmp_path / "report.json").read_text("utf-8"))
    assert [run["metrics"] for run in summary["runs"]] == metrics
    assert summary == report.summary(runs)
    for run, folder in zip(summary["runs"], runs, strict=True):
        stored = get(folder, "metrics.json")["labels"]
        assert run["labels"]["support"] == stored["support"]
        assert run["labels"]["threshold"] == stored["threshold"]
        assert run["labels"]["half_recall"] == stored["recall"]


def test_several_runs_stand_side_by_side(tmp_path):
    runs = [make_run(tmp_path / name / "run", noise=noise) for name, noise in (("a", 0.05), ("b", 0.9), ("c", 0.9))]
    found = page(runs, tmp_path / "report.html")
    assert {"differences", "run", "reference", "difference-table"} <= set(found.ids())
    assert [run["name"] for run in found.data()["runs"]] == ["a/run", "b/run", "c/run"]
    assert "a/run finds most" in found.text
    assert "It is ahead of" in found.text
    assert "Paired bootstrap" in found.text
    assert len(found.data()["texts"]) == 60, "the texts are stored once"
    names = [run["name"] for run in report.summary([runs[0], runs[0]])["runs"]]
    assert names == ["run", "run (2)"]


def test_examples_say_what_was_right_wrong_and_missed(tmp_path):
    found = page(make_run(tmp_path / "a"), tmp_path / "report.html").data()
    arrays = load_file(tmp_path / "a" / "predictions.safetensors")
    names, run = found["names"], found["runs"][0]
    assert len(run["examples"]) == 60
    for row, one in enumerate(run["examples"]):
        true = arrays["target_index"][arrays["target_indptr"][row] : arrays["target_indptr"][row + 1]]
        taken = arrays["top_index"][row, :3]
        assert found["texts"][one["x"]] == {"row": row, "id": f"id{row}", "text": f"the text of row {row}"}
        assert [names[c] for c in one["t"]] == [f"label{c}" for c in true]
        assert [names[c] for c in one["p"][: one["n"]]] == [f"label{c}" for c in taken]
        assert {names[m[0]] for m in one["m"]} == {f"label{c}" for c in set(true) - set(taken)}
        assert [a >= 0 for a in one["a"]] == [c not in true for c in taken]
        for name, thousandths, kind in one["m"]:
            assert thousandths == round(1000 * float(arrays["probability"][row, int(names[name][5:])]))
            assert kind >= 0


def test_notes_of_single_runs_carry_their_names(tmp_path):
    folders = [make_run(tmp_path / name) for name in ("a", "b")]
    for folder, notes in zip(folders, (["hidden", "calibrated 1"], ["hidden"]), strict=True):
        put(folder, "metrics.json", {**get(folder, "metrics.json"), "notes": notes})
    text = report.write(folders, tmp_path / "report.html").read_text("utf-8")
    assert text.count('<p class="note">hidden</p>') == 1
    assert '<p class="note">calibrated 1</p>' not in text
    assert "<b>a</b>: calibrated 1</p>" in text
    assert text.index("<b>a</b>: calibrated 1") > text.index('aria-label="Headline metrics"')
    text = report.write(folders[0], tmp_path / "report.html").read_text("utf-8")
    assert '<p class="note">calibrated 1</p>' in text
    lines = report.write(folders, tmp_path / "report.md").read_text("utf-8").splitlines()
    assert [line for line in lines if line.startswith(">")] == ["> hidden", "> a: calibrated 1"]


def test_hostile_strings_stay_text(tmp_path):
    names = [HOSTILE, "</title>", "a|b`c`[d](javascript:alert(1))", "ü\u202e", "", "\ud800", "x" * 500, "{% raw %}"]
    folder = make_run(tmp_path / "<b onload=x>", names=names, text=HOSTILE)
    put(folder, "metrics.json", {**get(folder, "metrics.json"), "notes": [HOSTILE]})
    (folder / "config.yaml").write_text(json.dumps({"loss": HOSTILE, HOSTILE: 1}))
    found = page(folder, tmp_path / "report.html")
    assert [tag for tag, _ in found.tags].count("script") == 3
    assert {"img", "b onload"}.isdisjoint(tag for tag, _ in found.tags)
    assert HOSTILE in found.text
    assert HOSTILE in found.data()["names"]
    assert found.data()["texts"][0]["text"] == f"{HOSTILE} 0"
    for letter in "<>&\u2028":
        assert letter not in found.scripts[1]
    report.write(folder, tmp_path / "report.md")
    written = (tmp_path / "report.md").read_text("utf-8")
    assert "<img" not in written.replace("\\<img", "")
    assert "[d](" not in written


def test_embedded_json_is_the_same_value():
    value = {"a": HOSTILE, "b": [None, True, 1.5, "\u2029"], HOSTILE: 1}
    assert json.loads(embedded(value)) == value
    assert re.search(r"[<>&\u2028\u2029]", embedded(value)) is None


def test_markdown_escapes_and_has_the_tables(tmp_path):
    assert escaped("a|b\n*c*") == "a\\|b \\*c\\*"
    runs = [make_run(tmp_path / name, noise=noise) for name, noise in (("a", 0.2), ("b_", 0.6))]
    report.write(runs, tmp_path / "report.md")
    lines = (tmp_path / "report.md").read_text("utf-8").splitlines()
    assert lines[0] == "# lastlayer report"
    for head in ("## Metrics", "## Differences", "## Errors: a", "## Labels: b\\_"):
        assert head in lines
    value = get(runs[0], "metrics.json")["metrics"]["recall@3"]
    assert any(line.startswith("| recall@3 ") and percent(value) in line for line in lines)
    widths = [line.count(" | ") for line in lines if line.startswith("|")]
    assert min(widths) >= 1


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        ("history.csv", {"learning"}),
        ("predictions.safetensors", {"curves", "reliability", "errors", "together", "examples"}),
        ("examples.json", set()),
        ("data.json", set()),
        ("environment.json", set()),
        ("config.yaml", set()),
    ],
)
def test_parts_that_are_not_there_are_left_out(tmp_path, name, gone):
    folder = make_run(tmp_path / "a")
    (folder / name).unlink()
    found = page(folder, tmp_path / "report.html")
    assert set(found.ids()) & SECTIONS == SECTIONS - gone
    for link in re.findall(r'href="#([a-z]+)"', (tmp_path / "report.html").read_text("utf-8")):
        assert link in found.ids()
    report.write(folder, tmp_path / "report.md")
    if name == "examples.json":
        assert found.data()["texts"][0] == {"row": 0, "id": None, "text": None}


def test_one_run_of_two_may_lack_its_predictions(tmp_path):
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    (b / "predictions.safetensors").unlink()
    found = page([b, a], tmp_path / "report.html")
    assert {"examples", "curves", "differences"} <= set(found.ids())
    assert found.data()["runs"][0]["curve"] is None


def test_an_analysis_in_the_folder_is_the_one_shown(tmp_path):
    folder = make_run(tmp_path / "a")
    given = report.summary(folder)["runs"][0]["errors"]
    given["kinds"][0] |= {"name": "sibling confusion", "gain": 0.75}
    put(folder, "errors.json", given)
    found = report.summary(folder)["runs"][0]
    assert found["errors"]["kinds"][0]["gain"] == 0.75
    assert "75.0 points higher" in page(folder, tmp_path / "report.html").text
    put(folder, "errors.json", {"metric": "f1"})
    with pytest.raises(ReportError, match=r"errors.json: damaged: must hold value, n_false_alarms"):
        report.summary(folder)


@pytest.mark.parametrize(("rows", "labels"), [(0, 3), (1, 1), (2, 1), (3, 4), (5, 2)])
def test_small_runs(tmp_path, rows, labels):
    """Among them: no row, no row with a label, one label."""
    runs = [
        make_run(tmp_path / name, rows=rows, labels=labels, noise=noise) for name, noise in (("a", 0.2), ("b", 0.4))
    ]
    for given in (runs[0], runs):
        found = page(given, tmp_path / "report.html")
        assert {"summary", "labels", "settings"} <= set(found.ids())
        report.write(given, tmp_path / "report.md")


def test_only_the_most_frequent_of_very_many_labels_are_in_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr("lastlayer.report.page.LABELS", 5)
    found = page(make_run(tmp_path / "a"), tmp_path / "report.html").data()["runs"][0]["labels"]
    assert found["all"] == 8
    assert len(found["name"]) == len(found["support"]) == 5
    assert found["support"] == sorted(found["support"], reverse=True)


def break_json(folder):
    (folder / "metrics.json").write_text('{"format": 1, "metrics": {')


def break_format(folder):
    put(folder, "metrics.json", {**get(folder, "metrics.json"), "format": 2})


def break_value(folder):
    put(folder, "metrics.json", {**get(folder, "metrics.json"), "metrics": {"recall@5": {"value": "<b>"}}})


def break_counts(folder):
    put(folder, "metrics.json", {**get(folder, "metrics.json"), "labels": {"support": [1]}})


def break_names(folder):
    put(folder, "labels.json", {"names": [1, 2]})


def break_tensors(folder):
    path = folder / "predictions.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def break_index(folder):
    arrays = load_file(folder / "predictions.safetensors")
    arrays["top_index"][0, 0] = 8
    save_file(arrays, folder / "predictions.safetensors")


def break_pointer(folder):
    arrays = load_file(folder / "predictions.safetensors")
    arrays["target_indptr"][4] = 10_000
    save_file(arrays, folder / "predictions.safetensors")


def break_shape(folder):
    arrays = load_file(folder / "predictions.safetensors")
    arrays["k"] = np.ones(3, np.float32)
    save_file(arrays, folder / "predictions.safetensors")


def break_history(folder):
    (folder / "history.csv").write_text("epoch,train_loss\n0,much\n")


def break_config(folder):
    (folder / "config.yaml").write_text("a: [1, 2")


def break_examples(folder):
    put(folder, "examples.json", {"rows": [{"text": "no row"}]})


def remove_metrics(folder):
    (folder / "metrics.json").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_json, r"metrics\.json: damaged: Expecting"),
        (break_format, r"metrics\.json: damaged: must be an object of format 1"),
        (break_value, r"metrics\.json: damaged: `metrics.recall@5.value` must be a number"),
        (break_counts, r"metrics\.json: damaged: `labels.support` must hold one number per label \(8\)"),
        (break_names, r"labels\.json: damaged: must hold a list of names"),
        (break_tensors, r"predictions\.safetensors: damaged: "),
        (break_index, r"predictions\.safetensors: damaged: `top_index` must be between 0 and 7"),
        (break_pointer, r"predictions\.safetensors: damaged: `target_indptr` must grow"),
        (break_shape, r"predictions\.safetensors: damaged: the shapes must agree"),
        (break_history, r"history\.csv: damaged: could not convert"),
        (break_config, r"config\.yaml: must be YAML: "),
        (break_examples, r"examples\.json: damaged: `rows` must be a list"),
        (remove_metrics, r"metrics\.json: not there. Is .* a finished run"),
    ],
)
def test_a_damaged_folder_is_one_clear_line_and_writes_nothing(tmp_path, damage, message):
    good, bad = make_run(tmp_path / "good"), make_run(tmp_path / "bad")
    damage(bad)
    with pytest.raises(ReportError, match=message) as error:
        report.write([good, bad], tmp_path / "report.html")
    assert "\n" not in str(error.value)
    assert str(bad) in str(error.value)
    assert not (tmp_path / "report.html").exists()


def test_no_folder_and_no_run_at_all(tmp_path):
    with pytest.raises(ReportError, match="must be the folder of a finished run, and is not there"):
        report.write(tmp_path / "nothing", tmp_path / "report.html")
    (tmp_path / "rows.jsonl").write_text("{}")
    with pytest.raises(ReportError, match="must be the folder of a finished run, and is a file"):
        report.write(tmp_path / "rows.jsonl", tmp_path / "report.html")
    with pytest.raises(ReportError, match="`run_dirs` must name at least one run folder"):
        report.write([], tmp_path / "report.html")


def test_a_run_that_was_trained(tmp_path):
    """The format as the training code writes it, not as the tests think it is."""
    from train_tools import make_rows

    from lastlayer.cli import main
    from lastlayer.train import Config, train

    config = Config(loss="lml", epochs=2, batch_size=32, bootstrap=20, at=(1, 3))
    run = train({"all": make_rows()}, config, tmp_path / "run")
    found = page(run.path, tmp_path / "report.html")
    assert set(found.ids()) >= SECTIONS
    assert set(found.cells) == set(run.metrics()["metrics"])
    assert len(found.data()["runs"][0]["history"]) == 2
    assert main(["report", str(run.path), "--out", str(tmp_path / "again.html")]) == 0
    assert (tmp_path / "again.html").read_bytes() == (tmp_path / "report.html").read_bytes()
