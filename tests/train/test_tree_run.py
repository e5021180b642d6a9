"""Label trees in runs and in the estimator."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
from train_tools import make_rows

import lastlayer as ll
from lastlayer.train import Config, ConfigError, LabelSetClassifier, RunError, evaluate, train
from lastlayer.train.config import Config as Settings
from lastlayer.train.export import export
from lastlayer.train.linear import LinearTree, TreeSettings, consumer
from lastlayer.train.linear.consumer import TreeModel
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


def test_exported_trees_are_read_with_numpy_alone(run, tmp_path):
    with pytest.raises(RunError, match="the format must be tree for label trees, got onnx"):
        export(run.path, tmp_path / "a.onnx")
    folder, model, rows = export(run.path, tmp_path / "out", "tree"), ll.load(run.path), make_rows(4, seed=3)
    x = model.matrix(rows)
    np.savez(tmp_path / "rows.npz", indptr=x.indptr, indices=x.indices, data=x.data)
    code = "import sys, runpy; sys.modules['lastlayer'] = sys.modules['torch'] = sys.modules['scipy'] = None; "
    code += "sys.argv[:] = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", code, str(folder / "predict.py"), str(tmp_path / "rows.npz"), "3"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines == ["\t".join(f"{name} {p:.4f}" for name, p in row) for row in model.predict_pairs(rows, k=3)]


def test_predict_py_says_in_one_line_what_is_wrong(run, tmp_path, capsys):
    folder = export(run.path, tmp_path / "out", "tree")
    x = sp.csr_matrix(np.eye(3, dtype=np.float32))
    (tmp_path / "text.npz").write_text("word another")
    (tmp_path / "empty.npz").touch()
    np.save(tmp_path / "array.npy", x.toarray())
    np.savez(tmp_path / "named.npz", rows=x.toarray())
    np.savez(tmp_path / "torn.npz", indptr=x.indptr, indices=x.indices, data=x.data[1:])
    np.savez(tmp_path / "wide.npz", indptr=x.indptr, indices=x.indices + 10**6, data=x.data)
    sp.save_npz(tmp_path / "csc.npz", x.tocsc())
    sp.save_npz(tmp_path / "good.npz", x)
    for arguments, message in {
        (): "give the file of the rows",
        ("good.npz", "none"): "`K` must be a whole number of labels, at least 1, got none.",
        ("missing.npz",): "`ROWS.npz` must be a file, got .*missing.npz: No such file or directory.",
        ("text.npz",): "`ROWS.npz` must be a file that numpy.savez wrote, got .*text.npz.",
        ("empty.npz",): "`ROWS.npz` must be a file that numpy.savez wrote, got .*empty.npz.",
        ("array.npy",): "`ROWS.npz` must be a file that numpy.savez wrote, got .*array.npy.",
        ("named.npz",): "`ROWS.npz` must hold the arrays indptr, indices and data of a CSR matrix, got .*named.npz.",
        ("csc.npz",): "`ROWS.npz` must hold the arrays indptr, indices and data of a CSR matrix, got .*csc.npz.",
        ("torn.npz",): "`ROWS.npz` must hold a CSR matrix, got arrays in .*torn.npz that do not fit together.",
        ("wide.npz",): "`ROWS.npz` must hold features from 0 to [0-9]+, got others in .*wide.npz.",
    }.items():
        assert consumer.main([str(tmp_path / name) for name in arguments[:1]] + [*arguments[1:]], folder) == 2
        out, line = capsys.readouterr()
        assert not out
        assert re.fullmatch(f"predict.py: {message}.*\n", line), line
    assert consumer.main([str(tmp_path / "good.npz")], folder) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.parametrize("observed", [None, 0.5, np.linspace(0.4, 0.9, 60)])
def test_exported_trees_predict_what_the_trees_do(observed, tmp_path):
    rng = np.random.default_rng(0)
    y = rng.integers(0, 60, (400, 2))
    x = sp.csr_matrix(np.eye(60, dtype=np.float32)[y].sum(1) + (rng.random((400, 60)) < 0.05))
    settings = TreeSettings(trees=2, leaf=6, branching=4, beam=3, loss="logistic", C=10.0, observed=observed)
    tree = LinearTree.fit(x, y.tolist(), settings)
    tree.save(tmp_path)
    (tmp_path / "labels.json").write_text(json.dumps({"names": [str(i) for i in range(60)]}))
    model, (index, p) = TreeModel(tmp_path), tree.predict_proba(x[:20], 5)
    for i in range(20):
        names, q = zip(*model.predict(x[i].indices, x[i].data), strict=True)
        np.testing.assert_allclose(q, p[i], rtol=1e-3, atol=1e-6)
        same = np.abs(np.diff(p[i])) > 1e-6  # equal ones may change places
        assert [int(n) for n, clear in zip(names, same, strict=False) if clear][:1] == index[i][:4][same][:1].tolist()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tree": 1, "monitor": "micro_f1"}, "`monitor` must be auto for label trees.*got 'micro_f1'"),
        ({"tree": 1, "decide": "micro_f1", "refit": "true"}, "`refit` must be auto or false for label trees"),
        (
            {"tree": 1, "decide": "micro_f1", "valid_fraction": 0},
            "`decide` must be top_k where held-out rows have fewer",
        ),
        (
            {"loss": "lml", "decide": "micro_f1", "valid_fraction": 0},
            "`decide` must be top_k where held-out rows have fewer",
        ),
    ],
)
def test_what_cannot_be_chosen_is_refused_before_training(settings, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        train({"all": make_rows(60)}, Config(**settings), tmp_path / "run")
    assert not (tmp_path / "run").exists()


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


def test_rows_without_a_group_stand_alone():
    data = make_rows(300)
    x = np.random.default_rng(0).normal(size=(300, 8)).astype(np.float32)
    lists = [data.names(i) for i in range(300)]
    p = {}
    for name, groups in (
        ("alone", [f"g{i:03d}" for i in range(300)]),
        ("none", [None] * 300),
        ("nan", [float("nan")] * 300),
        ("", [""] * 300),
    ):
        p[name] = LabelSetClassifier(tree=1, random_state=0).fit(x, lists, groups=groups).predict_proba(x)
        np.testing.assert_array_equal(p[name], p["alone"])


def test_rows_whose_group_is_the_na_of_pandas_stand_alone():
    pandas = pytest.importorskip("pandas")
    x = np.random.default_rng(0).normal(size=(60, 3))
    y = [["a"] if row[0] > 0 else ["b"] for row in x]
    groups = [None, *range(1, 30)] * 2
    given = (groups, pandas.array(groups, dtype="Int64"), pandas.Series(groups, dtype="Int64"))
    p = [LabelSetClassifier(loss="binary", random_state=0).fit(x, y, groups=g).predict_proba(x) for g in given]
    np.testing.assert_array_equal(p[0], p[1])
    np.testing.assert_array_equal(p[0], p[2])


def test_empty_groups_of_a_run_stand_alone(tmp_path):
    p, data, config = [], make_rows(300), Config(tree="1", valid_fraction=0, test_fraction=0, bootstrap=0)
    for name, groups in (("alone", [f"g{i:03d}" for i in range(300)]), ("empty", [""] * 300)):
        run = train({"train": replace(data, groups=groups)}, config, tmp_path / name)
        p.append(ll.load(run.path).predict_proba(data))
    np.testing.assert_array_equal(*p)
