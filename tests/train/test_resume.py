"""A run that is killed, at any moment and as often as one likes, ends where an undisturbed one does."""

import json
import os
import random
import signal

import pytest
import torch
from processes import CONTEXT
from tools import HUNG, slow
from train_tools import CONFIG, make_rows, work

from lastlayer.train import Config, RunError, RunFolder, TrainingError, checkpoint, train
from lastlayer.train.engine import _holds_something
from lastlayer.train.module import LabelSetModule
from lastlayer.train.tune import _same_study


@pytest.fixture(scope="module")
def context():
    return CONTEXT


def results(path) -> tuple[dict, dict, list]:
    run = RunFolder(path)
    history = [{k: v for k, v in row.items() if k != "seconds"} for row in run.history()]
    return run.metrics(), run.read_tensors("weights.safetensors"), history


def same(a, b) -> None:
    assert a[0] == b[0]
    assert a[2] == b[2]
    assert a[1].keys() == b[1].keys()
    assert all(torch.equal(a[1][name], b[1][name]) for name in a[1])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, context):
    out = tmp_path_factory.mktemp("run") / "whole"
    process = context.Process(target=work, args=(make_rows(), str(out), -1))
    process.start()
    process.join(HUNG)
    assert process.exitcode == 0
    return results(out)


def test_killed_ten_times_it_ends_the_same(tmp_path, context, undisturbed):
    out, rng, killed = tmp_path / "run", random.Random(5), 0
    while killed < 10:
        process = context.Process(target=work, args=(make_rows(), str(out), rng.randint(3, 12)))
        process.start()
        process.join(HUNG)
        assert process.exitcode == -signal.SIGKILL
        killed += 1
    if not RunFolder(out).is_done():
        process = context.Process(target=work, args=(make_rows(), str(out), -1))
        process.start()
        process.join(HUNG)
        assert process.exitcode == 0
    same(results(out), undisturbed)
    assert [p.name for p in out.rglob(".*")] == []  # neither temporary files nor a lock


def test_a_folder_in_use_is_left_alone(tmp_path, rows):
    from lastlayer.runs.lock import locked

    with locked(tmp_path / "run"):
        with pytest.raises(RunError, match=rf"run: in use by process {os.getpid()} on .*choose another folder"):
            train({"all": rows}, CONFIG, tmp_path / "run")
        assert [p.name for p in (tmp_path / "run").iterdir()] == [".lock"]
        (tmp_path / "run/.metrics.json.17.tmp").write_text("half")
    (tmp_path / "run/checkpoints").mkdir()
    with locked(tmp_path / "run"):  # nobody holds it any more; what a killed process left is removed
        pass
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["checkpoints"]


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_a_random_time(tmp_path, context, undisturbed, seed):
    out, rng = tmp_path / "run", random.Random(seed)
    for _ in range(3):
        process = context.Process(target=work, args=(make_rows(), str(out), -1))
        process.start()
        process.join(rng.uniform(0.05, 1.5))
        process.kill()
        process.join(HUNG)
    if not RunFolder(out).is_done():
        process = context.Process(target=work, args=(make_rows(), str(out), -1))
        process.start()
        process.join(HUNG)
        assert process.exitcode == 0
    same(results(out), undisturbed)


def test_a_first_file_that_was_half_written_is_no_other_content(tmp_path):
    (tmp_path / ".config.yaml.123.tmp").write_text("loss: l")
    assert not _holds_something(tmp_path)
    (tmp_path / "thesis.tex").write_text("")
    assert _holds_something(tmp_path)


def test_a_checkpoint_comes_back_as_it_was(tmp_path):
    state = {
        "tensors": {"a": torch.randn(3, 2), "b": torch.zeros(0), "c": torch.tensor(3), "d": torch.ones(2).bool()},
        "half": torch.randn(4).bfloat16(), "keys": {0: (1, 2.5), "~": None}, "numbers": [float("inf"), -1, True, "é"],
    }  # fmt: skip
    checkpoint.write(tmp_path / "a.ckpt", state)
    back = checkpoint.read(tmp_path / "a.ckpt")
    assert back["keys"] == state["keys"]
    assert back["numbers"] == state["numbers"]
    assert all(torch.equal(back["tensors"][n], state["tensors"][n]) for n in state["tensors"])
    assert torch.equal(back["half"], state["half"])
    assert back["half"].dtype == torch.bfloat16
    with pytest.raises(TypeError, match="plain values and tensors, got object"):
        checkpoint.write(tmp_path / "b.ckpt", {"a": object()})
    assert [p.name for p in tmp_path.iterdir()] == ["a.ckpt"]


def test_each_changed_byte_of_a_checkpoint_is_noticed(tmp_path):
    file = tmp_path / "a.ckpt"
    checkpoint.write(file, {"weights": torch.randn(4), "epoch": 3})
    whole = file.read_bytes()
    for place in range(0, len(whole), 7):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            back = checkpoint.read(file)
        except RunError as error:
            assert "\n" not in str(error)  # noqa: PT017
        else:  # a changed byte that changes nothing, e.g. in the padding
            assert json.dumps(back["epoch"]) == "3"
    file.write_bytes(whole[:-5])
    with pytest.raises(RunError, match="damaged checkpoint"):
        checkpoint.read(file)


@pytest.fixture
def unfinished(tmp_path, rows):
    out = tmp_path / "run"
    train({"all": rows}, CONFIG, out)
    (out / "done.json").unlink()
    return out


def contents(folder) -> dict:
    return {p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("name", ["checkpoints/last.ckpt", slow("config.yaml"), slow("data.json")])
def test_damage_is_an_error_and_nothing_is_overwritten(unfinished, rows, name):
    file = unfinished / name
    file.write_bytes(file.read_bytes()[:40] + b"\xff\xff\xff")
    before = contents(unfinished)
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        train({"all": rows}, CONFIG, unfinished)
    assert contents(unfinished) == before


@pytest.mark.parametrize(("rate", "epochs"), [("1e30", 0), ("1e4", 1)])
def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, rows, rate, epochs, monkeypatch):
    config = Config(epochs=5, batch_size=32, bootstrap=0, lr=rate, optimizer="sgd", loss="asymmetric", patience=50)
    if epochs:  # a good epoch, then a loss of nan
        real = LabelSetModule.loss

        def loss(self, *batch):
            value, logits = real(self, *batch)
            return value * (float("nan") if self.training and self.current_epoch == 1 else 1), logits

        monkeypatch.setattr(LabelSetModule, "loss", loss)
    with pytest.raises(TrainingError, match=r"the loss became (nan|inf) in epoch .*Lower `lr`, which is") as error:
        train({"all": rows}, config, tmp_path / "run")
    assert "\n" not in str(error.value)
    run = RunFolder(tmp_path / "run")
    assert not run.is_done()
    assert len(run.history()) == epochs
    last = run / "checkpoints/last.ckpt"
    assert last.exists() == bool(epochs)
    if epochs:
        assert f"kept in {last}" in str(error.value)
        assert all(v.isfinite().all() for v in checkpoint.read(last)["state_dict"].values())


def test_other_settings_or_data_are_refused(unfinished, rows):
    before = contents(unfinished)
    with pytest.raises(RunError, match="another `lr`"):
        train({"all": rows}, Config(**{**CONFIG.__dict__, "lr": 0.5}), unfinished)
    with pytest.raises(RunError, match="on other data"):
        train({"all": make_rows(seed=9)}, CONFIG, unfinished)
    with pytest.raises(RunError, match="unfinished run"):
        train({"all": rows}, CONFIG, unfinished, resume=False)
    assert contents(unfinished) == before


def test_folders_with_other_things_are_refused(tmp_path, rows):
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(RunError, match="not empty and not a run"):
        train({"all": rows}, CONFIG, tmp_path)
    assert contents(tmp_path) == {(tmp_path / "mine.txt").relative_to(tmp_path): b"precious"}


@pytest.mark.parametrize("content", ["", "[]", "[" * 100_000, '{"config": 3, "losses": []}', '{"config": null}'])
def test_a_damaged_study_is_named(tmp_path, content):
    (tmp_path / "study.json").write_text(content)
    with pytest.raises(RunError, match=r"study\.json: damaged\. Choose another folder\."):
        _same_study(tmp_path, {"config": Config().to_dict(), "losses": []})
