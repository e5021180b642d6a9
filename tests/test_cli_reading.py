"""How the commands read files: what they say, what a run remembers, and what is refused."""

import csv
import io
import json
import sys

import numpy as np
import pytest
from train_tools import make_rows

from lastlayer.cli import main

FAST = ["--loss=lml", "--epochs", "5", "--batch-size", "32", "--bootstrap", "0", "--quiet"]


def one_hot(path, data, delimiter=";"):
    """Write the rows as a one-hot table: the columns `nr`, `remark`, and one per label."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(["nr", "remark", *data.label_names])
        for i in range(len(data)):
            row = set(data.names(i))
            writer.writerow([i, data.texts[i], *(int(name in row) for name in data.label_names)])
    return str(path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reading")
    (folder / "run.yaml").write_text("id_column: nr\nencoding: latin-1\nheader: yes\non_error: skip\n")
    argv = ["train", one_hot(folder / "a.csv", make_rows(300)), "--out", str(folder / "run")]
    assert main([*argv, "--config", str(folder / "run.yaml"), *FAST]) == 0
    return folder, str(folder / "run")


def error_of(capsys, argv) -> str:
    assert main(argv) == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


def predictions(capsys, argv):
    assert main(["predict", *argv]) == 0
    captured = capsys.readouterr()
    return [json.loads(line) for line in captured.out.splitlines()], captured.err


def test_a_run_remembers_how_its_data_were_read(trained, capsys):
    folder, run = trained
    kept = json.loads((folder / "run/data.json").read_text())["parts"]["train"]["source"]
    assert kept["format"] == "csv"
    assert kept["options"] == {
        "encoding": "iso8859-1", "delimiter": ";", "quotes": True, "header": True, "text_column": "remark",
        "label_column": [f"label{i}" for i in range(6)], "id_column": "nr",
    }  # fmt: skip
    other = one_hot(folder / "b.csv", make_rows(80, seed=5))
    assert main(["evaluate", run, other, "--json", str(folder / "m.json")]) == 0
    said = capsys.readouterr().err
    assert "80 rows, 6 labels (csv: columns separated by semicolons" in said
    assert "6 columns of 0 and 1" in said
    assert "encoding iso8859-1" in said
    assert json.loads((folder / "m.json").read_text())["metrics"]["recall@5"]["value"] > 0.8
    (folder / "c.csv").write_text("remark;nr\nword1 word2;x7\n")
    found, said = predictions(capsys, [run, str(folder / "c.csv"), "-k", "2"])
    assert {label["label"] for label in found[0]["labels"]} == {"label1", "label2"}
    assert found[0]["id"] == "x7"
    assert "text in 'remark'" in said


def test_standard_input_and_one_text_per_line(trained, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"word1, then word2\n\nword3 noise1\n")))
    found, said = predictions(capsys, [trained[1], "-", "-k", "1"])
    assert [line["row"] for line in found] == [0, 2]
    assert found[1]["labels"][0]["label"] == "label3"
    assert "one text per line" in said


def test_rows_keep_their_numbers_in_the_file(trained, capsys, tmp_path):
    (tmp_path / "a.csv").write_text("remark;nr\nword1;a\n\nword2;b\nwrong\nword3;c\n")
    argv = [trained[1], str(tmp_path / "a.csv"), "-k", "1", "--on-error", "skip"]
    found, said = predictions(capsys, argv)
    assert [(line["row"], line["id"], line["labels"][0]["label"]) for line in found] == [
        (0, "a", "label1"), (2, "b", "label2"), (4, "c", "label3"),
    ]  # fmt: skip
    assert "skipped 1 wrong line(s)" in said
    assert "line 5: must have 2 columns" in said


def test_labels_that_look_like_formulas_are_quoted_in_csv(tmp_path, capsys):
    names = ["=1+1", "@x", "-1", "+a", "plain"]
    rows = "".join(f"word{i % 5} noise{i % 3}\t{names[i % 5]}\tid{i}\n" for i in range(60))
    (tmp_path / "a.tsv").write_text("text\tlabels\tid\n" + rows)
    assert main(["train", str(tmp_path / "a.tsv"), "--out", str(tmp_path / "run"), *FAST]) == 0
    capsys.readouterr()
    (tmp_path / "b.tsv").write_text("text\tid\nword0\t=cmd\n")
    argv = ["predict", str(tmp_path / "run"), str(tmp_path / "b.tsv"), "-k", "5", "--format", "csv"]
    assert main(argv) == 0
    found = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert {row["label"] for row in found} == {"'=1+1", "'@x", "-1", "'+a", "plain"}
    assert {row["id"] for row in found} == {"'=cmd"}


def test_evaluate_needs_labels_that_the_run_knows(trained, capsys, tmp_path):
    run = trained[1]
    (tmp_path / "a.csv").write_text("nr;remark\n1;word1\n")
    assert "no row has a label, so there is nothing to measure" in error_of(
        capsys, ["evaluate", run, str(tmp_path / "a.csv")]
    )
    (tmp_path / "b.jsonl").write_text(
        '{"remark": "word1", "labels": ["x", "y"]}\n{"remark": "word1", "labels": ["x"]}\n'
    )
    argv = ["evaluate", run, str(tmp_path / "b.jsonl"), "--label-column", "labels"]
    assert "all labels are unknown to the run: x, y." in error_of(capsys, argv)
    names = [f"new{i}" for i in range(7)]
    with open(tmp_path / "b.jsonl", "a") as file:
        file.write(json.dumps({"remark": "word1", "labels": ["label1", "new0", *names]}) + "\n")
    assert main(argv) == 0
    assert (
        "10 labels are unknown to the run and do not count: x, new0, new1, new2, new3, ..." in capsys.readouterr().err
    )


def test_train_names_unknown_labels_of_the_test_rows(tmp_path, capsys):
    (tmp_path / "a.tsv").write_text("text\tlabels\n" + "red apple\ta\nblue sky\tb\n" * 20)
    (tmp_path / "b.tsv").write_text("text\tlabels\nred apple\ta,z\n")
    argv = ["train", str(tmp_path / "a.tsv"), "--test", str(tmp_path / "b.tsv"), *FAST, "--out"]
    assert main([*argv, str(tmp_path / "run")]) == 0
    assert "1 labels of the test part are unknown to the training rows and do not count: z" in capsys.readouterr().err
    (tmp_path / "b.tsv").write_text("text\tlabels\nred apple\tz\n")
    assert "all labels of the test part are unknown" in error_of(capsys, [*argv, str(tmp_path / "run2")])
    argv[3] = ""  # a variable of the shell that is not set
    assert "--test must be a file or a folder, got an empty name." in error_of(capsys, [*argv, str(tmp_path / "run2")])
    assert not (tmp_path / "run2").exists()


def test_train_without_labels_names_the_flag(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("one, two\nthree\n")
    argv = ["train", str(tmp_path / "a.txt"), "--out", str(tmp_path / "run"), *FAST]
    (tmp_path / "b.csv").write_text("text,labels\n")
    (tmp_path / "b.svm").write_text("\n")
    for name in ("b.csv", "b.svm"):
        assert f"{name}: has no rows" in error_of(capsys, ["train", str(tmp_path / name), *argv[2:]])
    assert "a.txt: no row has a label. Name the column of labels (--label-column)" in error_of(capsys, argv)


def test_wrong_options_of_reading_in_a_config_file(tmp_path, capsys):
    (tmp_path / "a.tsv").write_text("text\tlabels\nx\ta\n")
    argv = ["train", str(tmp_path / "a.tsv"), "--out", str(tmp_path / "run"), "--config", str(tmp_path / "run.yaml")]
    for text, message in [
        ("header: maybe\n", "`header` must be yes or no, got 'maybe'"),
        ("label_column: {a: 1}\n", "`label_column` must be a word or a list of names"),
        ("format: xls\n", "`format` must be one of"),
        ("label_colum: a\n", "unknown field 'label_colum'"),
    ]:
        (tmp_path / "run.yaml").write_text(text)
        assert message in error_of(capsys, argv)


def test_label_names_in_two_forms_of_unicode_are_a_warning(tmp_path, capsys):
    names = ("caf\u00e9", "cafe\u0301", "a", "\u00fc")
    rows = ["text\tlabels", *(f"a text {i}\t{names[i % 4]}" for i in range(80))]
    (tmp_path / "a.tsv").write_text("\n".join(rows) + "\n", "utf-8")
    assert main(["train", str(tmp_path / "a.tsv"), "--out", str(tmp_path / "run"), *FAST]) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "Unicode" in line]
    assert line.startswith("lastlayer: warning: ")
    assert r"(NFC, NFD): 1, such as 'cafe\u0301' and 'caf\xe9'." in line
    known = json.loads((tmp_path / "run" / "labels.json").read_text("utf-8"))["names"]
    assert sorted(known) == sorted(names)


def test_half_an_emoji_does_not_stop_a_run(tmp_path, capsys):
    rows = [{"text": f"word{i % 3} noise{i % 7} {i}", "labels": [f"l{i % 3}"]} for i in range(60)]
    for row in rows[::7]:
        row["text"] += " lovely \ud83d"
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["train", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "run"), *FAST]) == 0
    assert "mended 9 text(s); the first:" in capsys.readouterr().err
    found, _ = predictions(capsys, [str(tmp_path / "run"), str(tmp_path / "a.jsonl"), "-k", "1"])
    assert np.mean([line["labels"][0]["label"] == f"l{i % 3}" for i, line in enumerate(found)]) > 0.9


@pytest.mark.parametrize(
    "rows",
    [
        "remark;weight;split;group\nword0 word1;;;\nword2;-1;later;a\n",
        '{"remark": "word0 word1", "weight": "high", "split": "later"}\n{"remark": "word2", "group": "a"}\n',
    ],
)
def test_predict_needs_no_weights_groups_or_parts(trained, capsys, tmp_path, rows):
    (tmp_path / "new").write_text(rows)
    found, _ = predictions(
        capsys, [trained[1], str(tmp_path / "new"), "--input-format", "csv" if ";" in rows else "jsonl"]
    )
    assert [row["row"] for row in found] == [0, 1]
