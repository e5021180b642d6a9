"""Loaded runs: label sets, probabilities and logits of new rows, without the trainer."""

import errno
import shutil
import subprocess
import sys

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from train_tools import make_rows

import lastlayer as ll
from lastlayer.data import DataError, LabelData, read_parts
from lastlayer.runs import RunError, RunFolder
from lastlayer.train import Config, train
from lastlayer.train.export import export
from lastlayer.train.serve import Batch, Scores

FAST = {"loss": "lml", "calibrate": False, "epochs": 6, "batch_size": 32, "bootstrap": 0}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train({"all": make_rows(300)}, Config(**FAST), tmp_path_factory.mktemp("run") / "a")


def test_texts_lists_and_tables_are_rows(run):
    model, rows = ll.load(run.path), make_rows(40, seed=4)
    y = model.predict_proba(rows.texts)
    assert y.shape == (40, 6)
    np.testing.assert_array_equal(y, model.predict_proba(rows))
    logits = torch.from_numpy(model.decision_function(rows.texts))
    np.testing.assert_allclose(y, ll.lml(logits, model.resolved.k), atol=1e-6)
    order = (-y).argsort(1, kind="stable")
    assert model.predict(rows.texts, k=2) == [[model.labels[j] for j in row[:2]] for row in order]
    size = round(model.resolved.k)
    assert model.predict(rows.texts) == [[model.labels[j] for j in row[:size]] for row in order]
    for threshold in (0.01, 0.5, 0.999):
        expected = [[model.labels[j] for j in row if p[j] >= threshold] for row, p in zip(order, y, strict=True)]
        assert model.predict(rows.texts, threshold=threshold) == expected
    assert model.thresholds.shape == (6,)
    assert model.predict([]) == []
    assert model.predict(np.array(rows.texts)) == model.predict(rows.texts)
    assert model.predict(np.array(rows.texts, dtype=object)) == model.predict(rows.texts)


def test_batches_do_not_change_the_result(run):
    model, texts = ll.load(run.path), make_rows(30, seed=4).texts
    whole = model.predict_proba(texts)
    model.batch_size = 7
    np.testing.assert_allclose(model.predict_proba(texts), whole, atol=1e-6)


def test_features_are_rows(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 5)).astype(np.float32)
    lists = [[str(j) for j in range(5) if row[j] > 0] for row in x]
    for name, features in (("dense", x), ("sparse", sp.csr_matrix(np.maximum(x, 0)))):
        train({"all": LabelData.from_lists(lists, features=features)}, Config(**FAST), tmp_path / name)
        model = ll.load(tmp_path / name)
        y = model.predict_proba(features[:9])
        assert y.shape == (9, 5)
        other = sp.csr_matrix(features[:9]) if name == "dense" else features[:9].toarray()
        np.testing.assert_allclose(model.predict_proba(other), y, atol=1e-6)
        for width in (4, 6):  # of an array; a sparse row may end early
            with pytest.raises(ValueError, match=f"was trained on 5 features, the rows have {width}"):
                model.predict_proba(np.ones((2, width)))
    with pytest.raises(ValueError, match=r"must be texts or have shape \(rows, features\), got \(5,\)"):
        model.predict(x[0])
    with pytest.raises(ValueError, match="was trained on features, the rows are texts"):
        model.predict(["a text"])


def test_columns_of_a_table_are_found_by_name(tmp_path):
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    table = pandas.DataFrame(rng.normal(size=(120, 3)), columns=["u", "v", "w"])
    table.assign(labels=np.where(table["u"] > 0, "up", "down")).to_csv(tmp_path / "a.csv", index=False)
    train(read_parts(tmp_path / "a.csv", label_column="labels"), Config(**FAST), tmp_path / "run")
    model = ll.load(tmp_path / "run")
    expected = model.predict_proba(table.to_numpy())
    for given in (table, table[["w", "u", "v"]], table.assign(z=1)[["z", "w", "v", "u"]]):
        np.testing.assert_array_equal(model.predict_proba(given), expected)
    np.testing.assert_array_equal(model.predict_proba(table.set_axis(["x", "y", "z"], axis=1)), expected)
    for given in (table[["v", "w"]].assign(z=1), table[["u", "v"]]):
        with pytest.raises(DataError, match=r"must have all columns that the run was trained on, .* lacks '[uw]'\."):
            model.predict_proba(given)


def test_messages(run):
    model = ll.load(run.path)
    with pytest.raises(TypeError, match="must be a list of texts, got one text"):
        model.predict("one text")
    with pytest.raises(ValueError, match="`k` must be at least 1, got 0"):
        model.predict(["a"], k=0)
    with pytest.raises(RunError, match="must be the folder of a finished run, and is not there"):
        ll.load("no/such/run")
    for path in (run / "config.yaml", str(run / "config.yaml")):
        with pytest.raises(RunError, match=r"config\.yaml: must be the folder of a finished run, and is a file\."):
            ll.load(path)


@pytest.mark.parametrize("rows", [[["a"]], ["a", None], [b"a"], {"a"}, (text for text in ["a"])])
def test_what_is_neither_text_nor_number_is_named(run, rows):
    with pytest.raises(TypeError, match=f"must be a list of texts, or numbers, got {type(rows).__name__} with"):
        ll.load(run.path).predict(rows)


def test_a_device_that_is_not_there_is_refused(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cuda", torch.device("cuda:1")):
        text = rf'`device="{device}"` cannot be used here: torch finds no GPU of this kind\. Use `device="cpu"`\.'
        with pytest.raises(RuntimeError, match=f"^load: {text}"):
            ll.load(run.path, device=device)
        with pytest.raises(RuntimeError, match=f"^TrainedModel.to: {text}"):
            ll.load(run.path).to(device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(RuntimeError, match=r"cannot be used here: torch finds 2 GPU\(s\), counted from 0\. Use"):
        ll.load(run.path, device="cuda:2")


@pytest.mark.slow
def test_loading_and_predicting_import_no_lightning(run):
    code = (
        f"import sys, lastlayer as ll; ll.load({str(run.path)!r}).predict(['word1 word2']); "
        "print([m for m in ('pytorch_lightning', 'torchmetrics') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
@pytest.mark.parametrize("probability", ["auto", "sigmoid"])
def test_the_temperature_of_the_loss_is_that_of_the_probabilities(tmp_path, probability):
    config = Config(**FAST, loss_options="temperature=3", probability=probability)
    run, rows = train({"all": make_rows(200)}, config, tmp_path / "run"), make_rows(20, seed=2)
    model = ll.load(run.path)
    logits = torch.from_numpy(model.decision_function(rows)) / 3
    expected = logits.sigmoid() if probability == "sigmoid" else ll.lml(logits, model.resolved.k)
    np.testing.assert_allclose(model.predict_proba(rows), expected, atol=1e-6)
    stored = torch.from_numpy(run.predictions()["probability"])
    assert (stored - torch.from_numpy(model.predict_proba(rows))[:1]).abs().max() > 0
    export(run.path, tmp_path / "model.pt2", "torch")
    program = torch.export.load(tmp_path / "model.pt2").module()
    found = program(torch.from_numpy(model.matrix(rows).toarray()))[1]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_predicted_counts_do_not_touch_the_order(tmp_path):
    rows, other = make_rows(400), make_rows(200, seed=3)
    runs = [train({"all": rows}, Config(**FAST, k=k), tmp_path / k) for k in ("auto", "predicted")]
    fixed, counted = (ll.load(run.path) for run in runs)
    np.testing.assert_array_equal(fixed.decision_function(other), counted.decision_function(other))
    counts = counted.predict_proba(other).sum(1)
    true = other.row_counts()
    assert np.abs(counts - true).mean() < 0.7 * np.abs(fixed.resolved.k - true).mean()
    assert {len(labels) for labels in counted.predict(other)} > {2}
    np.testing.assert_allclose(counts, counted.count(counted.matrix(other)), rtol=1e-5)
    (runs[1] / "count.safetensors").unlink()
    with pytest.raises(RunError, match=r"trained by version 0\.1 with `k: predicted`"):
        ll.load(runs[1].path)


@pytest.mark.slow
def test_predicted_counts_are_exported(tmp_path):
    rows = make_rows(100)
    run = train({"all": rows}, Config(**FAST, k="predicted"), tmp_path / "run")
    model = ll.load(run.path)
    export(run.path, tmp_path / "model.pt2", "torch")
    program = torch.export.load(tmp_path / "model.pt2").module()
    probability = program(torch.from_numpy(model.matrix(rows).toarray()))[1]
    np.testing.assert_allclose(probability.detach(), model.predict_proba(rows), atol=1e-5)


class Lists:
    """A kind of model that scores only the two best of six labels."""

    def scores(self, x):
        rows = torch.arange(x.shape[0])
        index = torch.stack([rows % 6, torch.where(rows % 2 == 0, (rows + 1) % 6, -1)], 1)
        return Scores(torch.where(index >= 0, torch.tensor([1.0, -1.0]), -torch.inf), index)

    def to(self, device):
        pass


def test_a_kind_of_model_may_score_the_best_labels_only(run):
    model = ll.load(run.path)
    model.scorer, model.resolved = Lists(), type(model.resolved)(**{**vars(model.resolved), "probability": "sigmoid"})
    texts = make_rows(4, seed=1).texts
    assert isinstance(next(model.batches(model.matrix(texts))), Batch)
    assert model.predict(texts, k=2) == [["label0", "label1"], ["label1"], ["label2", "label3"], ["label3"]]
    y = model.predict_proba(texts)
    assert y[1].tolist() == pytest.approx([0, torch.tensor(1.0).sigmoid().item(), 0, 0, 0, 0])
    assert np.isneginf(model.decision_function(texts)).sum() == 4 * 6 - 6
    from lastlayer.train.measure import measure, predict

    rows = make_rows(4, seed=1).with_labels(model.labels)[0]
    found = predict(model, model.features(rows), rows)
    assert found.probability is None
    assert measure(found, (1, 2))["rows"] == 4


def test_an_export_that_fails_leaves_nothing_behind(run, tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("lastlayer.train.export.write_atomically", full)
    with pytest.raises(OSError, match="No space left"):
        export(run.path, tmp_path / "model.pt2", "torch")
    assert not list(tmp_path.iterdir())


def test_an_onnx_graph_for_which_there_is_no_room_is_named_and_removed(run, tmp_path, monkeypatch):
    def full(program, example, out):
        out.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("lastlayer.train.export._onnx", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*model\.onnx'"):
        export(run.path, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["probability", "k"])
def test_a_run_that_lacks_a_value_names_it(run, tmp_path, name):
    copy = RunFolder(shutil.copytree(run.path, tmp_path / "run"))
    data = copy.read_json("data.json")
    del data["resolved"][name]
    copy.write_json("data.json", data)
    with pytest.raises(RunError, match=rf"data\.json: damaged: `resolved\.{name}` must be there"):
        ll.load(copy.path)
