"""``lastlayer suggest``: from a file or a run to suggestions, and to a corrected file; and ``train --folds``."""

import csv
import io
import json
import math
import os
import shlex
import shutil

import pytest
from train_tools import make_rows

from lastlayer.cli import main
from lastlayer.data import fold_rows, read
from lastlayer.runs import RunFolder
from lastlayer.train import load
from lastlayer.train.suggest import Collector, OutOfFold, out_of_fold

TRAIN = ["--loss", "binary", "--C", "1", "--bootstrap", "0", "--quiet", "--accelerator", "cpu"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A file in which label0 is missing from ten rows and label1 is wrong in ten others."""
    data, folder = make_rows(400), tmp_path_factory.mktemp("rows")
    lists = [data.names(i) for i in range(len(data))]
    having = [i for i, names in enumerate(lists) if "label0" in names and len(names) > 1]
    lacking = [i for i, names in enumerate(lists) if "label1" not in names]
    hidden, planted = having[:10], [i for i in lacking if i not in having[:10]][:10]
    for i in hidden:
        lists[i] = [name for name in lists[i] if name != "label0"]
    for i in planted:
        lists[i] = [*lists[i], "label1"]
    lines = [f"{t}\t{','.join(names)}" for t, names in zip(data.texts, lists, strict=True)]
    (folder / "tags.tsv").write_text("\n".join(["text\tlabels", *lines]) + "\n")
    return folder / "tags.tsv", set(hidden), set(planted)


def table(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_finds_what_was_hidden_and_planted_and_writes_a_corrected_file(rows, tmp_path, monkeypatch, capsys):
    path, hidden, planted = rows
    monkeypatch.chdir(tmp_path)
    assert main(["suggest", str(path), "-n", "20"]) == 0
    assert "labels are recorded in about" in capsys.readouterr().out
    found = table("tags-suggestions/suggestions.csv")
    lines = [json.loads(line) for line in (tmp_path / "tags-suggestions/suggestions.jsonl").read_text().splitlines()]
    assert [(int(f["row"]), f["label"], f["kind"]) for f in found] == [(f["row"], f["label"], f["kind"]) for f in lines]
    missing = {int(f["row"]) for f in found if f["kind"] == "missing" and f["label"] == "label0"}
    wrong = {int(f["row"]) for f in found if f["kind"] == "wrong" and f["label"] == "label1"}
    assert len(missing & hidden) >= 8
    assert len(wrong & planted) >= 5
    assert "Labels to look at" in (tmp_path / "tags-suggestions/suggestions.html").read_text()
    assert [f["label"] for f in table("tags-suggestions/rates.csv")] == [f"label{i}" for i in range(6)]
    for i, line in enumerate(found):
        line["accept"] = "x" if i < 3 else ""
    with open("ticked.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(found[0]))
        writer.writeheader()
        writer.writerows(found)
    shutil.copy("ticked.csv", "tags-suggestions/suggestions.csv")
    assert main(["suggest", str(path), "-n", "20"]) == 2
    assert "suggestions.csv: 3 of its rows are ticked. Use them (--accept" in capsys.readouterr().err
    assert table("tags-suggestions/suggestions.csv") == found
    assert main(["suggest", str(path), "--accept", "ticked.csv", "--out", "done"]) == 0
    before, after = read(path), read("done/corrected.tsv")
    changed = {i for i in range(len(before)) if set(before.names(i)) != set(after.names(i))}
    assert changed == {int(f["row"]) for f in found[:3]}
    assert main(["suggest", "done/corrected.tsv", "--accept", "ticked.csv", "--out", "again"]) == 2
    assert "has changed since. Suggest again." in capsys.readouterr().err
    assert main(["suggest", str(path), "--accept", "1.5"]) == 2
    assert main(["suggest", str(path), "--accept", "none.csv"]) == 2


@pytest.mark.parametrize(
    ("delimiter", "encoding", "first"),
    [(";", "utf-8-sig", ""), ("\t", "utf-16", ""), (";", "cp1252", ""), (",", "utf-8", "sep=,\r\n")],
)
def test_reads_ticks_as_spreadsheets_save_them(delimiter, encoding, first, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = [f"{'rouge' if i % 2 else 'bleu'} café {i % 7}\t{'r' if i % 2 else 'b'}" for i in range(40)]
    (tmp_path / "a.tsv").write_text("\n".join(["text\tlabels", *lines]) + "\n", encoding="utf-8")
    folder = tmp_path / "a-suggestions"
    folder.mkdir()
    made = io.StringIO(newline="")
    writer = csv.writer(made, delimiter=delimiter, lineterminator="\r\n")
    writer.writerow(["rank", "row", "id", "label", "kind", "probability", "accept", "text"])
    writer.writerow([1, 3, "", "b", "missing", 0.75, "x", "rouge café 3" + " long" * 30_000])
    writer.writerow([2, 4, "", "b", "wrong", 0.5, "", "bleu café 4"])
    saved = (first + made.getvalue()).encode(encoding)
    (folder / "suggestions.csv").write_bytes(saved)
    assert main(["suggest", "a.tsv"]) == 2
    assert "suggestions.csv: 1 of its rows are ticked." in capsys.readouterr().err
    assert (folder / "suggestions.csv").read_bytes() == saved
    assert main(["suggest", "a.tsv", "--accept", "a-suggestions/suggestions.csv"]) == 0
    after = read(folder / "corrected.tsv")
    assert [after.names(i) for i in (2, 3, 4)] == [["b"], ["b", "r"], ["b"]]


def test_a_table_of_ticks_that_cannot_be_read_is_one_line_and_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.tsv").write_text("text\tlabels\n" + "red\tr\nblue\tb\n" * 20)
    folder = tmp_path / "a-suggestions"
    folder.mkdir()
    table = folder / "suggestions.csv"
    for rows, message in (
        ("row,label,kind,accept\n\u00b2,b,missing,x\n", "line 2: must be a suggestion for these rows and labels."),
        ("row;label;kind\n1;b;missing\n", "must have the columns row, label, kind and accept; accept is missing."),
    ):
        table.write_text(rows, encoding="utf-8", newline="")
        assert main(["suggest", "a.tsv", "--accept", str(table)]) == 2
        assert f"suggestions.csv, {message}" in (err := capsys.readouterr().err) or f"suggestions.csv: {message}" in err
        assert main(["suggest", "a.tsv"]) == 2
        assert table.read_bytes() == rows.encode()
    table.write_text("row,label,kind,accept\n1,b,missing,perhaps\n")
    assert main(["suggest", "a.tsv"]) == 2
    assert "1 of its rows are ticked" in capsys.readouterr().err


def test_the_command_that_is_printed_reads_the_rows_the_same_way(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = [f"word{i % 4} one{i % 3}\t{['a;b', 'c', 'a;b - c'][i % 3]}" for i in range(60)]
    (tmp_path / "my rows.tsv").write_text("\n".join(["text\tlabels", *lines, ""]))
    assert main(["suggest", "my rows.tsv", "--label-separator", "-", "--out", "found", "-n", "4", "--folds", "2"]) == 0
    command = capsys.readouterr().out.splitlines()[-1].partition("then: lastlayer ")[2]
    assert main(shlex.split(command)) == 0
    assert (tmp_path / "found" / "corrected.tsv").exists()


def test_rows_of_standard_input_are_not_corrected(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"word{i % 4}\t{'ab'[i % 2]}\n" for i in range(40))
    for accept in ([], ["--accept", "0.5"]):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(f"text\tlabels\n{rows}".encode())))
        assert main(["suggest", "-", "--folds", "2", *accept]) == (2 if accept else 0)
        out, err = capsys.readouterr()
        assert "--accept" not in out
        if accept:
            assert "error: --accept needs a file: standard input cannot be read a second time." in err
            assert err.count("\n") == 1  # before any model is trained
        else:
            assert os.listdir() == ["data-suggestions"]


def test_folds_that_cannot_be_filled_and_words_that_come_once_are_refused_first(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = [f"word{i}\t{'ab'[i % 2]}\tone" for i in range(40)]
    (tmp_path / "rows.tsv").write_text("\n".join(["text\tlabels\twho", *lines, ""]))
    for command in (["train", "rows.tsv", "--folds", "3", "--out", "run"], ["suggest", "rows.tsv", "--folds", "3"]):
        assert main([*command, "--group-column", "who"]) == 2
        assert "--folds needs rows of at least 2 groups, got 1." in capsys.readouterr().err
    assert main(["suggest", "rows.tsv"]) == 2
    assert "Lower `min_rows`. `lastlayer train FILE --folds 5` has settings; suggest" in capsys.readouterr().err
    assert os.listdir() == ["rows.tsv"]
    (tmp_path / "few.tsv").write_text("\n".join(["text\tlabels\twho", *lines[:3], lines[2], ""]))
    for flags in ([], ["--folds", "5"], ["--folds", "1"]):
        assert main(["suggest", "few.tsv", *flags]) == 2
        text = f"--folds must be from 2 to 3, the number of different rows, got {(flags or '5')[-1]}. Use --folds 3."
        assert text in capsys.readouterr().err
    assert main(["train", "few.tsv", "--folds", "4", "--out", "run"]) == 2
    assert "--folds must be from 2 to 3, the number of different rows, got 4." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["-n", "-3"], "-n must be at least 0, got -3."),
        (["--observed", "1.5"], "--observed must be above 0 and at most 1, got 1.5."),
        (["--observed", "nan"], "--observed must be above 0 and at most 1, got nan."),
    ],
)
def test_numbers_out_of_range_are_refused_before_models_are_trained(rows, tmp_path, monkeypatch, capsys, flags, text):
    monkeypatch.chdir(tmp_path)
    assert main(["suggest", str(rows[0]), *flags]) == 2
    err = capsys.readouterr().err
    assert text in err
    assert "fold 1" not in err


def test_balanced_suggestions_are_accepted_unseen(rows, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = ["-n", "40", "--kind", "missing", "--folds", "2", "--out", "found"]
    assert main(["suggest", str(rows[0]), *flags, "--balanced", "--accept", "0"]) == 0
    assert "(40 labels changed)" in capsys.readouterr().out
    before, after, found = read(rows[0]), read("found/corrected.tsv"), table("found/suggestions.csv")
    added = after.label_counts() - before.label_counts()
    assert added.sum() == 40
    assert (added <= 1 + 40 * before.label_counts() / before.label_counts().sum()).all()
    assert {line["kind"] for line in found} == {"missing"}
    assert main(["suggest", str(rows[0]), "--balanced"]) == 2
    assert "--balanced must be given with -n and --kind missing" in capsys.readouterr().err


def test_scores_come_from_models_that_have_not_seen_the_row(rows):
    data = read(rows[0])
    fold = fold_rows(data, 3, seed=0)
    whole = out_of_fold(data, folds=3)
    lists = [[] if fold[i] == 1 else data.names(i) for i in range(len(data))]
    blank = type(data).from_lists(lists, label_names=data.label_names, texts=data.texts)
    assert whole.probability.shape == (400, 6)
    # Without the labels of fold 1 the folds would differ, so the model of fold 1 is fitted by hand.
    from lastlayer.train import Config, FeatureMap
    from lastlayer.train.linear import fit_linear

    inside = blank.take((fold != 1).nonzero()[0])
    features = FeatureMap.fit(inside, Config())
    model = fit_linear(features(inside), inside, loss="logistic", C=3.0, n_labels=6, tolerance=0.1)
    held = features(data.take((fold == 1).nonzero()[0]))
    logits = (held @ model.matrix().T).toarray() + model.intercept
    expected = 1 / (1 + math.e**-logits)
    assert abs(whole.probability[fold == 1].numpy() - expected).max() < 1e-5


def test_lists_of_the_best_labels(monkeypatch):
    import torch

    from lastlayer.train import suggest

    monkeypatch.setattr(suggest, "DENSE", 10)
    monkeypatch.setattr(suggest, "LISTED", 3)
    gathered, p = Collector(4, 6), torch.rand(4, 6)
    gathered.add([2, 0], p[[2, 0]])
    gathered.add([1, 3], p[[1, 3]])
    found = gathered.found()
    assert torch.equal(found.index, p.topk(3).indices)
    assert torch.equal(found.probability, p.topk(3).values)


def test_folds_give_means_spreads_and_scores(rows, tmp_path, monkeypatch, capsys):
    path = rows[0]
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(path), "--out", "run", "--folds", "2", *TRAIN]) == 0
    assert "standard deviation over 2 folds" in capsys.readouterr().out
    run, folds = RunFolder("run"), [RunFolder(f"run/folds/{i}") for i in (1, 2)]
    found = run.read_json("folds.json")["metrics"]["recall@5"]
    values = [fold.metrics()["metrics"]["recall@5"]["value"] for fold in folds]
    assert found["values"] == pytest.approx(values)
    assert found["mean"] == pytest.approx(sum(values) / 2)
    assert found["deviation"] == pytest.approx(abs(values[0] - values[1]) / math.sqrt(2))
    data = read(path)
    scores = OutOfFold.load(run, len(data), data.n_labels)
    place = fold_rows(data, 2, seed=0)
    expected = load("run/folds/1").predict_proba(data.take((place == 0).nonzero()[0]))
    assert abs(scores.probability[place == 0].numpy() - expected).max() < 1e-6
    stamp = (run / "folds/1/done.json").stat().st_mtime_ns
    (run / "folds.json").unlink()  # as if the run had been stopped here
    assert main(["train", str(path), "--out", "run", "--folds", "2", *TRAIN]) == 0
    assert (run / "folds/1/done.json").stat().st_mtime_ns == stamp
    assert main(["suggest", "run", "-n", "5", "--out", "found"]) == 0
    assert len(table("found/suggestions.csv")) == 5
    stored = run.read_json("suggestions.json")
    assert len(stored["items"]) == 5
    assert stored["file"]["text"] == path.read_text()
    assert main(["report", "run"]) == 0
    assert 'id="suggestions"' in (run / "report.html").read_text()
    run.write_json("suggestions.json", {"items": 3})
    assert main(["report", "run"]) == 2
    assert "suggestions.json: damaged" in capsys.readouterr().err
    (run / "suggestions.json").unlink()
    (run / "out_of_fold.safetensors").unlink()
    assert main(["suggest", "run"]) == 2
    assert "has no out-of-fold scores. Train with --folds 5" in capsys.readouterr().err
    assert main(["train", str(path), "--out", "other", "--folds", "1", *TRAIN]) == 2
    assert "--folds must be from 2 to " in capsys.readouterr().err
