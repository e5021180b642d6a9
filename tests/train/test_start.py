"""Runs that start from other runs: the same features and weights, and labels added."""

import numpy as np
import pytest
from train_tools import make_rows

from lastlayer.cli import main
from lastlayer.data import LabelData
from lastlayer.train import Config, load, train
from lastlayer.train.config import make
from lastlayer.train.start import settings

FAST = {"bootstrap": 0, "accelerator": "cpu"}


def renamed(rows):
    """The same rows with one label under a name that the first run does not know."""
    lists = [["a new one" if name == "label5" else name for name in rows.names(i)] for i in range(len(rows))]
    return LabelData.from_lists(lists, texts=rows.texts)


@pytest.mark.parametrize("options", [{"loss": "squared_hinge", "C": "1"}, {"hidden": (8,), "epochs": 3}])
def test_starts_where_the_other_ended_and_adds_labels(tmp_path, options):
    first = train({"all": make_rows(300)}, Config(**FAST, **options), tmp_path / "first")
    values = {**settings(first.path), "lr": 1e-9, "weight_decay": 0, "epochs": 1, "calibrate": False}
    second = train({"all": renamed(make_rows(200, seed=5))}, make(values), tmp_path / "second", start=first.path)
    before, after = load(first.path), load(second.path)
    assert list(after.labels) == [*before.labels, "a new one"]
    assert after.features.state == before.features.state
    texts = make_rows(20, seed=7).texts
    found = after.decision_function(texts)
    np.testing.assert_allclose(found[:, : len(before.labels)], before.decision_function(texts), atol=1e-5)
    assert second.config()["loss"] == ("binary" if "loss" in options else "lml")


def test_the_command_learns_new_labels_and_says_what_does_not_fit(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, rows in (("old", make_rows(200)), ("new", renamed(make_rows(300, seed=5)))):
        lines = [f"{text}\t{','.join(rows.names(i))}" for i, text in enumerate(rows.texts)]
        (tmp_path / f"{name}.tsv").write_text("\n".join(["text\tlabels", *lines]) + "\n")
    flags = ["--bootstrap", "0", "--accelerator", "cpu", "--quiet"]
    assert main(["train", "old.tsv", "--loss", "binary", "--C", "1", "--out", "first", *flags]) == 0
    assert main(["train", "new.tsv", "--from", "first", "--epochs", "5", "--out", "second", *flags]) == 0
    assert load("second").predict(["word5"], k=1) == [["a new one"]]
    capsys.readouterr()
    assert main(["train", "new.tsv", "--from", "first", "--hidden", "4", "--out", "third", *flags]) == 2
    assert "`hidden` must be that of the run to continue, [], got [4]" in capsys.readouterr().err
    assert main(["train", "new.tsv", "--from", "nowhere", "--out", "third", *flags]) == 2
    assert main(["train", "new.tsv", "--from", "first", "--folds", "2", "--out", "third", *flags]) == 2
    assert "--from must be left out" in capsys.readouterr().err
    assert not (tmp_path / "third").exists()
