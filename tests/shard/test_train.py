"""`lastlayer train --shard-classes` on two processes: losses, weights and predictions of one, also when disturbed."""

import csv
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import run_ranks
from tools import HUNG
from train_tools import make_rows

from lastlayer.cli import main
from lastlayer.data import DataError, hide_labels
from lastlayer.loss import _scan
from lastlayer.train import Config, ConfigError, RunError, RunFolder, load, sharded, train
from lastlayer.train.batches import Rows
from lastlayer.train.losses import LOSSES, takes_shard
from lastlayer.train.module import LabelSetModule

sys.path.insert(0, str(Path(__file__).parent))  # the processes import it by this name

train_worker = importlib.import_module("train_worker")

COMMON = ["--epochs=3", "--batch-size=32", "--bootstrap=20", "--quiet", "--solver=sgd", "--calibrate=false"]
DEEP = [*COMMON, "--hidden=8", "--dropout=0.2", "--lr=0.02"]
RUNS = {  # labels: 7, so 4 and 3
    "deep": DEEP,
    "linear": [*COMMON, "--loss=binary", "--clip-norm=0.05", "--patience=5"],
    "two_way": [*DEEP, "--loss=two_way", "--optimizer=sgd", "--labels=incomplete", "--clip-norm=0.1"],
    "interrupted": [*DEEP, "--hidden=6"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder with the rows, and with the runs of two processes."""
    folder = tmp_path_factory.mktemp("sharded")
    rows = make_rows(150, labels=7)
    lines = [{"text": rows.texts[i], "labels": rows.names(i)} for i in range(len(rows))]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data, split = str(folder / "rows.jsonl"), "--shard-classes"
    pairs = {name: flags for name, flags in RUNS.items() if name not in MESH}
    jobs = [{"command": ["train", data, f"--out={folder / name}", split, *flags]} for name, flags in pairs.items()]
    jobs[-1].update(interrupt=9, status=130)
    jobs.append({"command": ["evaluate", str(folder / "deep"), data, f"--json={folder / 'two.json'}", split]})
    jobs.append(
        {"command": ["predict", str(folder / "deep"), data, "--format=csv", f"--out={folder / 'two.csv'}", split]}
    )
    for status, said in run_ranks(train_worker.forked, 2, 2, str(folder / "store"), jobs):
        assert status == 0, said
    return folder


MESH = {  # two groups of two processes; 33 rows a batch, so that the groups' shares differ
    "mesh": [*COMMON, "--hidden=8", "--dropout=0", "--lr=0.02", "--batch-size=33", "--clip-norm=0.5"],
    "mesh_two_way": [*COMMON, "--hidden=8", "--dropout=0", "--lr=0.02", "--batch-size=33", "--loss=two_way"],
    "mesh_binary": [*COMMON, "--loss=binary", "--batch-size=50"],  # of 101 rows: one group has none in the last step
    "mesh_incomplete": [*COMMON, "--labels=incomplete", "--keep=0.4", "--batch-size=50"],
    "mesh_interrupted": [*COMMON, "--hidden=6", "--dropout=0", "--lr=0.02"],
}
RUNS.update(MESH)


def train_on_a_mesh(folder, name, **plan):
    """Train on four processes, with the rows split over two pairs."""
    flags = ["--shard-classes", "--data-parallel=2", *RUNS[name]]
    job = {"command": ["train", str(folder / "rows.jsonl"), f"--out={folder / name}", *flags], **plan}
    for status, said in run_ranks(train_worker.forked, 4, 4, str(folder / f"store of {name}"), [job]):
        assert status == 0, said


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mesh", "mesh_two_way", "mesh_binary", "mesh_incomplete"])
def test_data_by_class_trains_as_one(folder, name):
    train_on_a_mesh(folder, name)
    assert_same(RunFolder(folder / name), one_process(folder, name))


@pytest.mark.slow
def test_one_process_resumes_what_a_mesh_began(folder):
    out, rows = folder / "mesh_interrupted", str(folder / "rows.jsonl")
    train_on_a_mesh(folder, "mesh_interrupted", interrupt=9, status=130)
    assert not RunFolder(out).is_done()
    assert main(["train", rows, f"--out={out}", "--shard-classes", *RUNS["mesh_interrupted"]]) == 0
    assert_same(RunFolder(out), one_process(folder, "mesh_interrupted"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_parallel": 2}, "`data_parallel` needs sharded classes"),
        ({"data_parallel": 2, "shard_classes": True}, "must divide the number of processes, 1, got 2"),
    ],
)
def test_rows_are_split_over_equal_groups(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        train({"all": make_rows(20)}, Config(epochs=1), tmp_path / "run", **options)


@pytest.mark.parametrize("loss", ["quasibinary", "expected_positive", "large"])
def test_groups_of_rows_are_refused_where_the_loss_compares_rows(monkeypatch, loss):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 4)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 0)
    with pytest.raises(ConfigError, match=f"`data_parallel` must be 1 with the loss {loss}, which compares the rows"):
        sharded.ShardedPlacement(2).check(Config(loss=loss))


def test_thresholds_of_sharded_classes_are_refused_before_training(tmp_path):
    config = Config(epochs=1, decide="micro_f1", loss="lml")
    with pytest.raises(ConfigError, match="`decide` must be auto or top_k with sharded classes"):
        train({"all": make_rows(20)}, config, tmp_path / "run", shard_classes=True)
    assert not (tmp_path / "run").exists()


def one_process(folder, name):
    out = folder / f"{name}-whole"
    assert main(["train", str(folder / "rows.jsonl"), f"--out={out}", *RUNS[name]]) == 0
    return RunFolder(out)


def assert_same(found: RunFolder, expected: RunFolder) -> None:
    assert found.is_done()
    assert len(found.history()) == len(expected.history())
    for line, other in zip(found.history(), expected.history(), strict=True):
        other["seconds"] = line["seconds"]
        assert line == pytest.approx(other, rel=2e-5, abs=2e-6)
    weights = expected.read_tensors("weights.safetensors")
    assert found.read_tensors("weights.safetensors").keys() == weights.keys()
    for name, value in found.read_tensors("weights.safetensors").items():
        torch.testing.assert_close(value, weights[name], rtol=1e-3, atol=1e-4)
    assert found.metrics()["metrics"].keys() == expected.metrics()["metrics"].keys()
    for name, value in expected.metrics()["metrics"].items():
        assert found.metrics()["metrics"][name]["value"] == pytest.approx(value["value"], abs=1e-4)
    assert found.predictions()["probability"] == pytest.approx(expected.predictions()["probability"], abs=1e-4)


@pytest.mark.parametrize("name", ["deep", "linear", "two_way"])
def test_two_processes_train_as_one(folder, name):
    assert_same(RunFolder(folder / name), one_process(folder, name))


OTHERS = [name for name in LOSSES if takes_shard(name) and name not in ("binary", "lml", "two_way")]


@pytest.mark.slow
def test_two_processes_train_as_one_with_every_loss(folder):
    flags = {name: [*COMMON, "--epochs=1", "--batch-size=64", f"--loss={name}"] for name in OTHERS}
    command = ["train", str(folder / "rows.jsonl")]
    jobs = [{"command": [*command, f"--out={folder / n}", "--shard-classes", *f]} for n, f in flags.items()]
    for status, said in run_ranks(train_worker.forked, 2, 2, str(folder / "store of losses"), jobs):
        assert status == 0, said
    for name in OTHERS:
        assert main([*command, f"--out={folder / name}-whole", *flags[name]]) == 0
        assert_same(RunFolder(folder / name), RunFolder(folder / f"{name}-whole"))


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_attempt_with_a_message_and_the_next_goes_on(folder):
    out, rows = folder / "killed", str(folder / "rows.jsonl")
    job = {"command": ["train", rows, f"--out={out}", "--shard-classes", *RUNS["deep"]]}
    job["kill"] = [1, 6]  # rank 1, in the second epoch of four steps
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    launcher.append("--monitor-interval=1")
    done = subprocess.run(
        [sys.executable, *launcher, train_worker.__file__, json.dumps([job])],
        capture_output=True,
        text=True,
        timeout=HUNG,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert "lastlayer: error: shard: rank 0 of 2 had no answer from the other ranks of the class group" in done.stderr
    assert "does not fit this run" not in done.stderr
    assert_same(RunFolder(out), RunFolder(folder / "deep"))


def test_one_process_resumes_what_two_began(folder):
    out = folder / "interrupted"
    assert not RunFolder(out).is_done()
    assert len(RunFolder(out).history()) == 2
    assert [p.name for p in (out / "checkpoints/shards").glob("last-*")] == ["last-8"]
    rows = str(folder / "rows.jsonl")
    assert main(["train", rows, f"--out={out}", *RUNS["interrupted"]]) == 2  # it needs the flag
    assert main(["train", rows, f"--out={out}", "--shard-classes", *RUNS["interrupted"]]) == 0
    assert_same(RunFolder(out), one_process(folder, "interrupted"))


def test_a_damaged_shard_is_an_error(folder, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(folder / "deep", out)
    (out / "done.json").unlink()
    for file in (out / "checkpoints/shards").glob("last-*/*.distcp"):
        file.unlink()
    rows = str(folder / "rows.jsonl")
    assert main(["train", rows, f"--out={out}", "--shard-classes", *RUNS["deep"]]) == 2
    assert "damaged checkpoint" in capsys.readouterr().err


def test_evaluate_and_predict_on_shards(folder, tmp_path):
    run, data = str(folder / "deep"), str(folder / "rows.jsonl")
    assert main(["evaluate", run, data, f"--json={tmp_path / 'one.json'}"]) == 0
    assert main(["predict", run, data, "--format=csv", f"--out={tmp_path / 'one.csv'}"]) == 0
    one, two = (json.loads((f / n).read_text()) for f, n in ((tmp_path, "one.json"), (folder, "two.json")))
    assert two["metrics"].keys() == one["metrics"].keys()
    for name, value in one["metrics"].items():
        assert two["metrics"][name]["value"] == pytest.approx(value["value"], abs=1e-5)
    one, two = ([*csv.reader((f / n).open())] for f, n in ((tmp_path, "one.csv"), (folder, "two.csv")))
    assert [line[:4] for line in two] == [line[:4] for line in one]
    assert [float(line[4]) for line in two[1:]] == pytest.approx([float(line[4]) for line in one[1:]], abs=1e-5)


@pytest.mark.parametrize("labels", ["complete", "incomplete"])
def test_loss_in_blocks_is_the_loss(tmp_path, monkeypatch, labels):
    config = Config(hidden=(5,), epochs=2, batch_size=16, bootstrap=0, labels=labels)
    rows = hide_labels(make_rows(60, labels=7), 0.4) if labels == "incomplete" else make_rows(60, labels=7)
    plain = train({"all": rows}, config, tmp_path / "plain")
    monkeypatch.setattr(sharded, "IN_BLOCKS", 7)
    monkeypatch.setattr(_scan, "TILE", {"cpu": 3})
    used = []
    real = LabelSetModule.loss_in_blocks
    monkeypatch.setattr(LabelSetModule, "loss_in_blocks", lambda *a: used.append(1) or real(*a))
    blocks = train({"all": rows}, config, tmp_path / "blocks", shard_classes=True)
    assert len(used) == 2 * len(range(0, 43, 16))
    assert_same(blocks, plain)
    model = load(plain)
    batch = Rows(model.features(rows), rows.with_labels(model.labels)[0])[range(20)]
    module = LabelSetModule(model.scorer.network, config, model.resolved, total_steps=1)
    with torch.no_grad():
        loss, _ = module.loss(batch["input"], batch["target"])
        torch.testing.assert_close(module.loss_in_blocks(batch["input"], batch["target"]), loss)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "warp"}, "`loss` must be one of .*hill.*lml.* with sharded classes, got 'warp'"),
        ({"devices": 2}, "`devices` must be 1 .* torchrun"),
        ({"precision": "16"}, "`precision` must be 32 or bf16"),
    ],
)
def test_what_cannot_be_split(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        train({"all": make_rows(20)}, Config(**options), tmp_path / "run", shard_classes=True)
    assert not (tmp_path / "run").exists()


def test_each_process_needs_a_label(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 5)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 4)
    placement = sharded.ShardedPlacement()
    placement.place(9)
    assert placement.shard.size == 1  # 2, 2, 2, 2, 1
    with pytest.raises(ConfigError, match="7 labels leave none for the last of 5 processes"):
        placement.place(7)  # 2, 2, 2, 1, 0


def test_an_unsplit_run_is_not_resumed_split(tmp_path):
    rows, config = {"all": make_rows(40)}, Config(loss="lml", epochs=1, bootstrap=0)
    train(rows, config, tmp_path / "run")
    (tmp_path / "run/done.json").unlink()
    with pytest.raises(RunError, match="unfinished run without --shard-classes"):
        train(rows, config, tmp_path / "run", shard_classes=True)


def test_plan_is_a_command(capsys):
    assert main(["plan", "--labels=1e6", "--features=512", "--rows=1024", "--devices=2"]) == 0
    assert "classes per device" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (make_rows(20), None),
        (make_rows(20, seed=1), r"rank 1 was given other train rows than rank 0 \(20 rows and 20 rows\)"),
        (make_rows(19), r"rank 1 was given other train rows than rank 0 \(19 rows and 20 rows\)"),
    ],
)
def test_ranks_with_other_rows_are_told(monkeypatch, rows, message):
    def told(data):
        return {"parts": {"train": {"rows": len(data), "fingerprint": data.fingerprint()}}}

    def gather(found, mine, group=None):
        theirs = told(rows)["parts"]["train"]
        found[:] = [mine, {"train": (theirs["rows"], theirs["fingerprint"])}]

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    monkeypatch.setattr(sharded.sharding, "_answered", lambda function, *a, **b: function(*a, **b))
    placement = sharded.ShardedPlacement()
    if message is None:
        placement.compare(told(make_rows(20)))
        return
    with pytest.raises(DataError, match=message):
        placement.compare(told(make_rows(20)))
