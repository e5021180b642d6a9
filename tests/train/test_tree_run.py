"""Label trees in runs and in the estimator."""

import json

import numpy as np
import pytest
from train_tools import make_rows

import lastlayer as ll
from lastlayer.train import Config, ConfigError, LabelSetClassifier, RunError, evaluate, train
from lastlayer.train.config import Config as Settings
from lastlayer.train.export import export
from lastlayer.train.tree_scorer import read_hierarchy

NESTED = {"even": ["label0", "label2", "label4"], "odd": {"small": ["label1", "label3"], "label5": None}}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tree")
    (folder / "tree.json").write_text(json.dumps(NESTED))
    config = Config(hierarchy=str(folder / "tree.json"), decide="micro_f1", bootstrap=0)
    return train({"all": make_rows(300)}, config, folder / "run")


def test_the_run_of_a_tree_is_a_run_like_any_other(run, tmp_path):
    from lastlayer import report

    model, rows = ll.load(run.path), make_rows(50, seed=3)
    y = model.predict_proba(rows)
    np.testing.assert_allclose(y, model.scorer.tree.probabilities(model.matrix(rows)), atol=1e-5)
    assert evaluate(model, rows)["metrics"]["recall@5"]["value"] > 0.9
    expected = [{model.labels[j] for j in np.flatnonzero(p > model.thresholds[0])} for p in y]
    assert [set(names) for names in model.predict(rows)] == expected
    assert "6 labels, 1 tree" in run.metrics()["notes"][0]
    assert "micro_f1: one threshold" in run.metrics()["notes"][-1]
    report.write([run.path], tmp_path / "report.html")
    with pytest.raises(RunError, match="label trees have no ONNX"):
        export(run.path, tmp_path / "a.onnx")


def test_hierarchies_are_read_from_json_and_from_lines(tmp_path):
    labels = [f"label{i}" for i in range(6)]
    (tmp_path / "a.json").write_text(json.dumps(NESTED))
    pairs = [
        "label0\teven",
        "label2\teven",
        "label4\teven",
        "small\todd",
        "label1\tsmall",
        "label3\tsmall",
        "label5\todd",
    ]
    (tmp_path / "a.tsv").write_text("\n".join(pairs))
    one, two = (read_hierarchy(tmp_path / name, labels) for name in ("a.json", "a.tsv"))
    assert one.n_leaves == two.n_leaves == 6
    assert sorted(one.depth) == sorted(two.depth)
    (tmp_path / "b.tsv").write_text("label0 even")
    for name, message in [
        ("b.tsv", "line 1 must hold a name"),
        ("none", "must be a file"),
        ("c.json", "`hierarchy`: "),
    ]:
        if name == "c.json":
            (tmp_path / name).write_text('{"a": ["label0"]}')
        with pytest.raises(ConfigError, match=message):
            read_hierarchy(tmp_path / name, labels)


def test_when_a_tree_is_taken():
    assert Settings().takes_tree(4000)
    assert not Settings().takes_tree(3999)
    assert not Settings(tree="off").takes_tree(10**6)
    assert not Settings(loss="lml").takes_tree(10**6)
    assert Settings(tree=2).takes_tree(10)
    with pytest.raises(ConfigError, match="`tree` must be auto or off"):
        Settings(tree=2, hidden=(8,))


def test_the_estimator_fits_trees():
    rows = make_rows(200)
    x = np.array([[text.count(f"word{j}") for j in range(6)] for text in rows.texts], float)
    y = [rows.names(i) for i in range(len(rows))]
    model = LabelSetClassifier(tree=1, random_state=0).fit(x, y)
    assert model.score(x, y) > 0.95
    assert model.predict_proba(x).shape == (200, 6)
    assert (model.predict(x).sum(1) >= 1).mean() > 0.9
