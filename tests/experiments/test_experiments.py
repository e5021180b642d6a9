"""Every experiment runs on tiny data, resumes, and its README shows the numbers of its results file."""

import argparse
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXPERIMENTS = sorted(path.parent.name for path in ROOT.glob("experiments/*/run.py"))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_smoke_run_and_resume(name, tmp_path, capsys, module):
    run = module(f"{name}.run")
    out = tmp_path / "results.json"
    arguments = ["--smoke", "--out", str(out), "--device", "cpu"]
    run.main(arguments)
    first = json.loads(out.read_text())["rows"]
    assert first
    capsys.readouterr()
    run.main(arguments)  # everything is there: nothing runs again
    assert json.loads(out.read_text())["rows"] == first


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scene_graphs.curves", "rotations.normals"])
def test_smoke_run_of_a_second_part(name, tmp_path, module):
    part = module(name)
    out = tmp_path / "results.json"
    part.main(["--smoke", "--seeds", "1", "--out", str(out), "--device", "cpu"])
    rows = module("common").Results(out).rows
    assert rows
    assert all("(not run)" not in table for table in part.tables(rows).values())


@pytest.mark.parametrize("name", [n for n in EXPERIMENTS if (ROOT / "experiments" / n / "results").exists()])
def test_readme_equals_the_results(name, module):
    common = module("common")
    run = module(f"{name}.run")
    folder = ROOT / "experiments" / name
    rows = common.Results(folder / "results" / "results.json").rows
    assert common.fill(folder / "README.md", run.tables(rows)) == (folder / "README.md").read_text()


@pytest.mark.parametrize("path", sorted(ROOT.glob("experiments/*/README.md")), ids=lambda path: path.parent.name)
def test_readme_shows_every_figure_with_words(path):
    shown = re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", path.read_text())
    drawn = {str(f.relative_to(path.parent)) for kind in ("svg", "png") for f in path.parent.rglob(f"*.{kind}")}
    assert {target for _, target in shown} == drawn
    assert all(len(words) >= 15 for words, _ in shown)


def test_results_count_the_seconds_of_all_runs(tmp_path, module, monkeypatch):
    common = module("common")
    clock = iter([0.0, 5.0, 100.0, 103.0])
    monkeypatch.setattr(common.time, "monotonic", lambda: next(clock))
    for run in range(2):
        common.Results(tmp_path / "results.json").add(run=run)
    assert list(json.loads((tmp_path / "results.json").read_text())["seconds"].values()) == [8.0]


@pytest.mark.parametrize("text", ['{"rows": [{"seed": 0}]}', '{"columns": ["seed"], "rows": [[0]]}'])
def test_results_keep_rows_that_differ_in_their_names(text, tmp_path, module):
    common = module("common")
    path = tmp_path / "results.json"
    path.write_text(text)
    common.Results(path).extend([{"seed": 1, "curve": [1, 2]}, {"loss": "LML"}])
    assert common.Results(path).rows == [{"seed": 0}, {"seed": 1, "curve": [1, 2]}, {"loss": "LML"}]


def test_merged_results_hold_each_row_once(tmp_path, module):
    common = module("common")
    here, there = common.Results(tmp_path / "here.json"), common.Results(tmp_path / "there.json")
    here.extend([{"seed": 0}, {"seed": 1}])
    there.extend([{"seed": 1}, {"seed": 2}])
    here.seconds, there.seconds = {"CPU": 1.0}, {"CPU": 2.0, "GPU": 3.0}
    here.merge(there)
    again = common.Results(tmp_path / "here.json")
    assert again.rows == [{"seed": 0}, {"seed": 1}, {"seed": 2}]
    assert again.seconds == {"CPU": 3.0, "GPU": 3.0}


def test_a_call_that_merges_writes_or_draws_does_nothing_else(tmp_path, module):
    common = module("common")
    common.Results(tmp_path / "out.json").add(seed=0)
    common.Results(tmp_path / "more.json").add(seed=1)
    readme = tmp_path / "README.md"
    readme.write_text("<!-- seeds -->\n<!-- end seeds -->\n")
    drawn = []

    def finish(**asked):
        arguments = {"out": tmp_path / "out.json", "merge": [], "readme": None, "figure": None} | asked
        tables = lambda rows: {"seeds": str(len(rows))}  # noqa: E731
        return common.finish(
            argparse.Namespace(**arguments), tables, lambda rows, path: drawn.append((len(rows), path))
        )

    assert not finish()
    assert finish(merge=[tmp_path / "more.json"], readme=readme, figure=tmp_path / "a.svg")
    assert drawn == [(2, tmp_path / "a.svg")]
    assert readme.read_text() == "<!-- seeds -->\n2\n<!-- end seeds -->\n"


@pytest.mark.slow
def test_workers_report_every_setting_and_a_failure_leaves_the_others(tmp_path, module, capsys):
    common, cifar = (module(name) for name in ("common", "cifar"))
    run = module("noisy_cifar100.run")
    settings = [
        {
            "network": "resnet", "width": 4, "noise": "blocks", "p": 0.2, "loss": loss, "part": "grid", "rate": 0.1,
            "decay": 5e-4, "seed": 0,
        }
        for loss in ("no such loss", "cross-entropy", "two-way")
    ]  # fmt: skip
    arguments = argparse.Namespace(smoke=True, device="cpu", workers=2, minutes=1e6)
    cifar.shrink(arguments)
    results = common.Results(tmp_path / "results.json")
    with pytest.raises(SystemExit, match="1 settings failed"):
        cifar.run(settings, run.train, arguments, results)
    assert {row["loss"] for row in results.rows} == {"cross-entropy", "two-way"}
    assert "KeyError: 'no such loss'" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["autoencoders", "label_next"])
def test_figures_are_drawn_from_the_results(name, tmp_path, module):
    module(f"{name}.run").main(["--figure", str(tmp_path / "figure.svg")])
    assert (tmp_path / "figure.svg").read_text().startswith("<?xml")
