"""The commands end to end on tiny data; wrong input is one line and exit status 2."""

import csv
import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from train_tools import make_rows

from lastlayer import cli_output
from lastlayer.cli import main
from lastlayer.runs import RunFolder

FAST = ["--loss=lml", "--epochs", "20", "--batch-size", "32", "--bootstrap", "20", "--quiet"]


def write(path, data, header=True):
    rows = [f"{data.ids[i]}\t{data.texts[i]}\t{','.join(data.names(i))}\n" for i in range(len(data))]
    path.write_text(("id\ttext\tlabels\n" if header else "") + "".join(rows))
    return str(path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    data = write(folder / "tags.tsv", make_rows(300))
    run = str(folder / "run")
    assert main(["train", data, "--out", run, *FAST]) == 0
    return folder, data, run


def error_of(capsys, argv) -> str:
    assert main(argv) == 2
    captured = capsys.readouterr()
    last = captured.err.strip().splitlines()[-1]
    assert last.startswith("lastlayer: error: ")
    assert "Traceback" not in captured.err
    return last


def test_train_prints_a_table(trained, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")  # in a narrow terminal headers are short and intervals are left out
    assert main(["train", trained[1], "--out", str(tmp_path / "run"), *FAST]) == 0
    out = capsys.readouterr()
    assert "recall@5" in out.out
    assert "±" in out.out
    assert f"run: {tmp_path / 'run'}" in out.out
    assert "300 rows, 6 labels" in out.err


@pytest.mark.parametrize(
    ("argv", "expected"),
    [([], "examples:"), (["--version"], "lastlayer 0"), (["train", "--help"], "[auto, adamw, sgd]")],
)
def test_help_and_version_need_no_torch(argv, expected):
    code = f"""
import sys
from lastlayer.cli import main
try:
    main({argv!r})
except SystemExit as stop:
    assert stop.code == 0
sys.stderr.write(str([m for m in ("torch", "sklearn", "pytorch_lightning") if m in sys.modules]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert expected in " ".join(done.stdout.split())
    assert done.stderr == "[]"


def test_every_flag_says_what_it_takes():
    from lastlayer.train import Config
    from lastlayer.train.config import accepts

    for item in dataclasses.fields(Config):
        assert accepts(item.name), item.name
    assert accepts("optimizer") == "auto, adamw, sgd"
    assert accepts("epochs") == "1 to 1000000"
    assert accepts("ngrams") == "a length, a range, auto"
    assert "two_way" in accepts("loss")


def test_the_end_of_training_fits_the_terminal(trained, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    names = [f"a-label-of-{n}" for n in range(9)]
    assert cli_output.fitting(names[:3], "  true: ") == "  true: a-label-of-0, a-label-of-1, a-label-of-2"
    assert cli_output.fitting(names, "  true: ") == f"  true: {', '.join(names[:4])} and 5 more"
    assert cli_output.fitting([], "  true: ") == "  true: -"
    cli_output.say("a note that is long " * 9)
    cli_output.summary(RunFolder(trained[2]))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("    true:      label") for line in lines) == 3


def test_the_next_command_can_be_pasted(trained, tmp_path, capsys):
    run = tmp_path / "my run"
    assert main(["train", trained[1], "--loss", "lml", "--epochs", "1", "--bootstrap", "0", "--out", str(run)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert shlex.split(last.removeprefix("next: lastlayer ")) == ["report", str(run)]


def test_runs_are_numbered_resumed_listed_and_reported(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    argv = ["train", trained[1], "--loss", "lml", "--epochs", "2", "--bootstrap", "0"]
    assert main(argv) == 0
    said = capsys.readouterr()
    lines = [line for line in said.err.splitlines() if line.startswith("epoch ")]
    assert [line.split()[1] for line in lines] == ["1/2", "2/2"]
    assert "train_loss" in lines[0]
    for part in ("k: 2", "sgd, learning rate 10", "best epoch: ", "best thresholds per label: ", "predicted: label",
                 "the first 3 of the test rows", "run: runs/tags-1", "next: lastlayer report runs/tags-1"):  # fmt: skip
        assert part in said.out
    assert main(argv) == 0  # finished: the next number
    (tmp_path / "runs/tags-2/done.json").unlink()
    assert main(argv) == 0  # unfinished and the same: resumed
    assert main([*argv, "--seed", "5"]) == 0  # other settings: the next number
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["tags-1", "tags-2", "tags-3"]
    capsys.readouterr()
    assert main(["runs"]) == 0
    out = capsys.readouterr().out
    assert [out.count(f"runs/tags-{n}") for n in (1, 2, 3)] == [1, 1, 1]
    assert "ndcg@5" in out
    assert main(["runs", "--json", "--sort", "recall@5"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    scores = [line["metrics"]["recall@5"] for line in found]
    assert scores == sorted(scores, reverse=True)
    assert main(["report"]) == 0
    assert "report: runs/tags-3/report.html" in capsys.readouterr().out


def test_a_finished_folder_is_replaced_on_demand(trained, tmp_path, capsys):
    out = tmp_path / "run"
    argv = ["train", trained[1], "--out", str(out), "--loss", "squared_hinge", "--quiet", "--bootstrap", "0"]
    assert main(argv) == 0
    (out / "mine.txt").write_text("precious")
    assert "use --overwrite" in error_of(capsys, argv)
    assert main([*argv, "--overwrite", "--loss", "binary"]) == 0
    assert "loss: binary" in (out / "config.yaml").read_text()
    assert (out / "mine.txt").read_text() == "precious"
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    assert main([*argv, "--overwrite", "--label-column", "none"]) == 2  # an error comes before anything is removed
    assert before == {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}


def test_evaluate_warns_about_rows_of_training_and_few_rows(trained, capsys, tmp_path):
    assert main(["evaluate", trained[2], trained[1]]) == 0
    assert "the run was trained on these rows" in capsys.readouterr().err
    few = write(tmp_path / "few.tsv", make_rows(20, seed=5))
    assert main(["evaluate", trained[2], few]) == 0
    said = capsys.readouterr().err
    assert "there are only 20 rows" in said
    assert "trained on these" not in said


def test_evaluate(trained, capsys, tmp_path):
    other = write(tmp_path / "other.tsv", make_rows(80, seed=5))
    assert main(["evaluate", trained[2], other, "--json", str(tmp_path / "m.json")]) == 0
    assert "all part, 80 rows" in capsys.readouterr().out
    found = json.loads((tmp_path / "m.json").read_text())
    assert found["metrics"]["recall@5"]["value"] > 0.9


def test_predict_jsonl_and_csv(trained, capsys, tmp_path):
    rows = make_rows(40, seed=6)
    other = write(tmp_path / "other.tsv", rows)
    assert main(["predict", trained[2], other, "-k", "3"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["id"] for line in lines] == rows.ids
    assert all(len(line["labels"]) == 3 for line in lines)
    first = [line["labels"][0]["label"] for line in lines]
    assert np.mean([name in rows.names(i) for i, name in enumerate(first)]) > 0.9
    assert all(0 <= p["probability"] <= 1 for line in lines for p in line["labels"])
    assert main(["predict", trained[2], other, "--format", "csv", "--out", str(tmp_path / "p.csv")]) == 0
    with open(tmp_path / "p.csv") as file:
        table = list(csv.DictReader(file))
    assert {row["id"] for row in table} == set(rows.ids)
    assert table[0]["label"] == first[0]


def test_an_error_in_a_late_row_leaves_the_earlier_predictions(trained, capsys, tmp_path):
    out, names = tmp_path / "p.jsonl", make_rows(3, seed=6)
    rows = write(tmp_path / "rows.tsv", names)
    out.write_text("earlier\n")
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "a b"}\n{"text": \n')
    error_of(capsys, ["predict", trained[2], str(broken), "--out", str(out)])
    assert out.read_text() == "earlier\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.jsonl", "p.jsonl", "rows.tsv"]
    if Path("/dev/full").exists():
        assert error_of(capsys, ["predict", trained[2], rows, "--out", "/dev/full"]).rstrip().endswith("'/dev/full'")
    assert "the folder" in error_of(capsys, ["predict", trained[2], rows, "--out", str(tmp_path / "none/p.jsonl")])
    assert main(["predict", trained[2], rows, "--out", str(out)]) == 0
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == names.ids


@pytest.mark.parametrize(("command", "flag"), [("predict", "--out"), ("evaluate", "--json")])
def test_a_command_does_not_write_over_what_it_reads(trained, capsys, tmp_path, monkeypatch, command, flag):
    rows = write(tmp_path / "rows.tsv", make_rows(3, seed=6))
    monkeypatch.chdir(tmp_path)
    before = Path(rows).read_bytes(), (Path(trained[2]) / "metrics.json").read_bytes()
    assert f"{flag} must not be the file of the rows" in error_of(capsys, [command, trained[2], rows, flag, "rows.tsv"])
    own = str(Path(trained[2]) / "metrics.json")
    assert f"{flag} must not be a file of the run" in error_of(capsys, [command, trained[2], rows, flag, own])
    assert "--out must not be a file of the run" in error_of(capsys, ["report", trained[2], "--out", own])
    assert (Path(rows).read_bytes(), Path(own).read_bytes()) == before


def test_predict_takes_all_labels_above_a_threshold(trained, capsys, tmp_path):
    other = write(tmp_path / "other.tsv", make_rows(40, seed=6))
    found = {}
    for flags in (["-k", "6"], ["--threshold", "0.02"], ["--threshold", "0.02", "-k", "2"]):
        assert main(["predict", trained[2], other, *flags]) == 0
        found[len(found)] = [json.loads(line)["labels"] for line in capsys.readouterr().out.splitlines()]
    everything, above, cut = found.values()
    assert above == [[pair for pair in row if pair["probability"] >= 0.02] for row in everything]
    assert max(len(row) for row in above) > 3  # more than the run's k of 2
    assert cut == [row[:2] for row in above]


def test_predict_writes_as_many_labels_as_asked_for(tmp_path, capsys):
    data = write(tmp_path / "tags.tsv", make_rows(300, labels=60))
    assert main(["train", data, "--out", str(tmp_path / "run"), *FAST, "--epochs", "1"]) == 0
    capsys.readouterr()
    for asked, expected in (("55", 55), ("70", 60)):
        assert main(["predict", str(tmp_path / "run"), data, "-k", asked]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert {len({pair["label"] for pair in line["labels"]}) for line in lines} == {expected}


def test_the_table_tells_what_was_measured(tmp_path, capsys):
    (tmp_path / "same.tsv").write_text("text\tlabels\n" + "hello world\ta\n" * 20)  # equal rows are never split
    assert main(["train", str(tmp_path / "same.tsv"), "--out", str(tmp_path / "run"), *FAST, "--bootstrap", "0"]) == 0
    out = capsys.readouterr().out
    assert "train part, 20 rows" in out
    assert "No rows were held out" in out
    assert "intervals" not in out


def test_wrong_lines_stop_or_are_skipped(trained, capsys, tmp_path):
    file = tmp_path / "bad.tsv"
    write(file, make_rows(100))
    file.write_text(file.read_text() + "only one cell\n")
    assert "line 102: must have 3 columns, has 1, got 'only one cell'" in error_of(
        capsys, ["train", str(file), "--out", str(tmp_path / "run"), *FAST]
    )
    assert not (tmp_path / "run").exists()
    assert main(["train", str(file), "--out", str(tmp_path / "run"), "--on-error", "skip", *FAST]) == 0
    said = capsys.readouterr().err
    assert "skipped 1 wrong line(s)" in said
    assert "line 102" in said
    noted = json.loads((tmp_path / "run/data.json").read_text())
    assert noted["parts"]["train"]["skipped"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torch", "onnx"])
def test_export(trained, capsys, tmp_path, kind):
    import torch

    from lastlayer.train.serve import load, probabilities

    out = tmp_path / f"model.{kind}"
    if kind == "onnx":
        pytest.importorskip("onnxscript")
        runtime = pytest.importorskip("onnxruntime")
    assert main(["export", trained[2], "--format", kind, "--out", str(out)]) == 0
    model = load(trained[2])
    x = torch.from_numpy(model.features(make_rows(7, seed=8)).toarray())
    with torch.no_grad():
        logits = model.scorer.network(x)
        expected, _ = probabilities(logits, model.resolved, calibration=model.calibration.tensors(logits))
    if kind == "torch":
        found = torch.export.load(out).module()(x)
    else:
        session = runtime.InferenceSession(str(out))
        found = [torch.from_numpy(v) for v in session.run(["logits", "probabilities"], {"features": x.numpy()})]
    torch.testing.assert_close(found[0], logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[1], expected, atol=1e-5, rtol=1e-5)
    assert "already there" in error_of(capsys, ["export", trained[2], "--format", kind, "--out", str(out)])


@pytest.mark.slow
def test_tune_resumes(trained, capsys, tmp_path):
    study = str(tmp_path / "study")
    argv = ["tune", trained[1], "--out", study, "--losses", "lml,binary", *FAST[:-1]]
    assert main([*argv, "--trials", "2"]) == 0
    before = (tmp_path / "study/trial_000/done.json").stat().st_mtime_ns
    assert (tmp_path / "study/best/done.json").exists()
    assert main([*argv, "--trials", "3"]) == 0
    assert (tmp_path / "study/trial_000/done.json").stat().st_mtime_ns == before
    found = json.loads((tmp_path / "study/trials.json").read_text())
    assert [t["loss"] for t in found["trials"]] == ["lml", "binary", "lml"]
    assert "other settings" in error_of(capsys, [*argv, "--trials", "2", "--seed", "4"])


@pytest.mark.slow
def test_a_better_trial_replaces_the_best_run_of_fewer(trained, tmp_path):
    from lastlayer.train import RunFolder

    argv = ["tune", trained[1], "--out", str(tmp_path), "--lr", "0.1", *FAST[:-1]]  # the first trial learns little
    for trials in ("1", "4"):
        assert main([*argv, "--trials", trials]) == 0
    found = json.loads((tmp_path / "trials.json").read_text())["trials"]
    best = max(found, key=lambda trial: (trial["ndcg@5"], -trial["trial"]))
    assert best["trial"] > 0
    assert RunFolder(tmp_path / "best").read_json("data.json")["resolved"]["lr"] == str(float(best["lr"]))


def test_config_files_and_flags(trained, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("loss: binary\nepochs: 3\nhidden: [8]\n")
    argv = ["train", trained[1], "--out", str(tmp_path / "run"), "--config", str(tmp_path / "run.yaml")]
    assert main([*argv, "--epochs", "2", "--quiet"]) == 0
    text = (tmp_path / "run/config.yaml").read_text()
    assert "loss: binary" in text
    assert "epochs: 2" in text
    capsys.readouterr()
    (tmp_path / "run.yaml").write_text("los: binary\n")
    assert "unknown field 'los'. Did you mean 'loss'" in error_of(capsys, argv)
    (tmp_path / "run.yaml").write_text("{{{")
    assert "must be YAML" in error_of(capsys, argv)


def test_errors_are_one_line_and_exit_2(trained, capsys, tmp_path):
    folder, data, run = trained
    out = str(tmp_path / "out")
    for argv, message in [
        (["train", str(tmp_path / "none.tsv"), "--out", out], "no such file"),
        (["nonsense"], "invalid choice"),
        (["train", data, "--out", out, "--loss", "nope"], "`loss` must be one of"),
        (["train", data, "--out", out, "--lr", "fast"], "`lr` must be a positive number"),
        (["train", data, "--out", run], "holds a finished run"),
        (["train", data, "--out", str(folder)], "not empty and not a run"),
        (["evaluate", str(tmp_path), data], "not a run folder"),
        (["evaluate", run, data, "--part", "valid"], "has no part 'valid'"),
        (["predict", run, data, "-k", "0"], "-k must be at least 1"),
        (["predict", run, data, "--threshold", "nan"], "--threshold must be a probability from 0 to 1, got nan"),
        (["report", str(tmp_path)], "not a finished run"),
        (["demo", "--keep", "7"], "--keep must be"),
        (["tune", data, "--out", out, "--trials", "0"], "--trials must be"),
        (["tune", data, "--out", out, "--devices", "2"], "one device"),
        (["train", data, "--out", out, "--devices", "4096", "--accelerator", "cpu"], "at most the number of cores"),
    ]:
        assert message in error_of(capsys, argv)
    assert not (tmp_path / "out").exists()


def test_evaluate_measures_all_rows_of_data_that_name_parts(trained, capsys, tmp_path):
    _, data, run = trained
    header, *lines = Path(data).read_text().splitlines()
    parts = ["train", "valid", "test"] * len(lines)
    named = tmp_path / "parts.tsv"
    named.write_text("\n".join([f"{header}\tsplit", *(f"{line}\t{p}" for line, p in zip(lines, parts, strict=False))]))
    for part, n in [("all", 300), ("test", 100)]:
        assert main(["evaluate", run, str(named), "--part", part]) == 0
        assert f"{part}: {n} rows" in capsys.readouterr().err


def test_rows_without_any_weight_are_refused(trained, capsys, tmp_path):
    header, *lines = Path(trained[1]).read_text().splitlines()
    weighted = tmp_path / "weighted.tsv"
    weighted.write_text("\n".join([f"{header}\tweight", *(f"{line}\t0" for line in lines)]))
    said = error_of(capsys, ["train", str(weighted), "--out", str(tmp_path / "run"), *FAST])
    assert "must have a weight above 0 somewhere, got only zeros" in said


@pytest.mark.skipif(sys.platform == "win32", reason="gloo")
@pytest.mark.parametrize("name", ["gpu", "mps"])
def test_a_device_that_is_not_there_leaves_no_folder(trained, capsys, tmp_path, monkeypatch, name):
    for where in ("torch.cuda.is_available", "torch.backends.mps.is_available"):
        monkeypatch.setattr(where, lambda: False)
    argv = ["train", trained[1], "--out", str(tmp_path / "out"), "--accelerator", name]
    assert "where there is no GPU" in error_of(capsys, argv)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_two_processes_train_one_run(trained, tmp_path):
    argv = [sys.executable, "-m", "lastlayer", "train", trained[1], "--out", str(tmp_path / "run"), *FAST]
    done = subprocess.run([*argv, "--devices", "2", "--accelerator", "cpu"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "error" not in done.stderr
    found = json.loads((tmp_path / "run/metrics.json").read_text())
    assert found["metrics"]["recall@5"]["value"] > 0.9
    assert found["epochs"] == 20


def test_bench_outside_of_a_checkout(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if not os.path.exists(os.path.join(p or ".", "benchmarks"))])
    for name in [name for name in sys.modules if name.split(".")[0] == "benchmarks"]:  # other tests may have loaded it
        monkeypatch.delitem(sys.modules, name)
    assert "in a checkout of the repository" in error_of(capsys, ["bench"])


def test_bench_takes_options(monkeypatch):
    seen = []
    module = SimpleNamespace(main=lambda arguments: seen.append(arguments))
    monkeypatch.setitem(sys.modules, "benchmarks", SimpleNamespace(run=module))
    monkeypatch.setitem(sys.modules, "benchmarks.run", module)
    assert main(["bench", "--rows", "lml/1k", "--json", "a b.json"]) == 0
    assert main(["bench"]) == 0
    assert seen == [["--rows", "lml/1k", "--json", "a b.json"], []]


def test_wrong_losses_are_refused_before_anything_is_trained(trained, tmp_path, capsys):
    for argv in (["tune", trained[1], "--trials", "2"], ["demo"]):
        line = error_of(capsys, [*argv, "--losses", "lml,nope", "--out", str(tmp_path / "new")])
        assert "`loss` must be one of" in line
        assert not (tmp_path / "new").exists()


def test_svm_files_keep_their_numbering(tmp_path, capsys):
    rng = np.random.default_rng(0)
    text = "".join(f"{j} {j + 1}:1 {rng.integers(5, 9)}:0.2\n" for j in rng.integers(0, 4, 200))
    (tmp_path / "a.svm").write_text(text)
    assert main(["train", str(tmp_path / "a.svm"), "--out", str(tmp_path / "run"), *FAST]) == 0
    (tmp_path / "b.svm").write_text("3 4:1\n0 1:1\n")
    capsys.readouterr()
    assert main(["predict", str(tmp_path / "run"), str(tmp_path / "b.svm"), "-k", "1"]) == 0
    found = [json.loads(line)["labels"][0]["label"] for line in capsys.readouterr().out.splitlines()]
    assert found == ["3", "0"]


KILLED = """
import os, signal, sys
from lastlayer.cli import main
from lastlayer.train.module import LabelSetModule

real = LabelSetModule.training_step

def step(self, *arguments):
    if self.global_step == 20:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, *arguments)

LabelSetModule.training_step = step
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_killed_command_leaves_a_checkpoint_and_damage_is_one_line(trained, tmp_path, capsys):
    command = ["train", trained[1], "--out", str(tmp_path / "run"), "--loss=lml", "--epochs=50", "--batch-size=32"]
    command.append("--quiet")
    done = subprocess.run([sys.executable, "-c", KILLED, *command], capture_output=True)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "run/checkpoints/last.ckpt").exists()
    assert not (tmp_path / "run/done.json").exists()
    file = tmp_path / "run/checkpoints/last.ckpt"
    file.write_bytes(file.read_bytes()[:-100])
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file() and p.name != ".lock"}
    message = error_of(capsys, command)
    assert "last.ckpt: damaged checkpoint" in message
    assert before == {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}


def run_with(encoding, *arguments):
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    command = [sys.executable, "-m", "lastlayer", *arguments]
    return subprocess.run(command, capture_output=True, env=environment, check=False)


def test_labels_that_the_terminal_cannot_show(tmp_path):
    rows = tmp_path / "rows.csv"
    rows.write_text("text,labels\n" + "red apple,\u0131\nblue sky,\u015f\n" * 12, encoding="utf-8")
    run = str(tmp_path / "run")
    trained = run_with("ascii", "train", str(rows), "--out", run, "--loss=binary", "--C=1", "--bootstrap=0")
    assert trained.returncode == 0, trained.stderr
    assert b"\\u0131" in trained.stdout
    made = run_with("ascii", "predict", run, str(rows))
    assert made.returncode == 0
    assert json.loads(made.stdout.decode("utf-8").splitlines()[0])["labels"][0]["label"] == "\u0131"


def test_files_without_rows_say_so(trained, tmp_path, capsys):
    header, empty = tmp_path / "header.tsv", tmp_path / "empty.tsv"
    header.write_text("text\tlabels\n")
    empty.write_text("")
    assert main(["predict", trained[2], str(header)]) == 0
    assert capsys.readouterr().err == f"lastlayer: warning: {header}: has no rows.\n"
    for command in (["evaluate", trained[2], str(header)], ["predict", trained[2], str(empty)], ["train", str(empty)]):
        assert error_of(capsys, command).endswith(": has no rows.")


def test_rows_without_labels_name_their_column(tmp_path, capsys):
    (tmp_path / "a.csv").write_text("text,labels\na b,\nc d,\n")
    assert "no row has a label. They were looked for in 'labels'" in error_of(
        capsys, ["train", str(tmp_path / "a.csv")]
    )
    (tmp_path / "b.csv").write_text("text,labels\na b,x\nc d,y\n")
    message = error_of(capsys, ["train", str(tmp_path / "b.csv"), "--out", str(tmp_path / "run")])
    assert message.endswith("the texts hold no word of two characters or more.")


def test_a_narrow_terminal_leaves_out_columns_and_not_names(capsys, monkeypatch):
    from lastlayer import cli_output

    name = "experiments/a_long_name_of_a_run"
    metrics = {"precision@1": 0.5, "recall@5": 0.25, "ndcg@5": 0.125, "map": 0.1, "ece@5": 0.0625}
    row = {"run": name, "state": "finished", "loss": "truncated_entropy", "k": 3, "train_rows": 100, "metrics": metrics}
    for columns, head in ((160, "started (UTC)"), (80, "R@5"), (45, "P@1")):
        monkeypatch.setenv("COLUMNS", str(columns))
        cli_output.list_runs([{**row, "started": "2026-01-01T10:00:00"}])
        text = capsys.readouterr().out
        assert name in text
        assert head in text
        assert max(map(len, text.splitlines())) <= columns
        assert "…" not in text
