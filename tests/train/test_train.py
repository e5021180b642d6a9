import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tools import slow
from train_tools import make_rows

import lastlayer as ll
from lastlayer import report
from lastlayer.data import DataError, LabelData
from lastlayer.train import Config, ConfigError, FeatureMap, LabelSetNetwork, RunError, RunFolder, evaluate, train
from lastlayer.train.batches import EpochBatches, rows_to_input
from lastlayer.train.config import load, make
from lastlayer.train.engine import prepare
from lastlayer.train.measure import measure, notes, predict
from lastlayer.train.module import LabelSetModule
from lastlayer.train.resolved import Resolved
from lastlayer.train.serve import load as load_run

FAST = {"loss": "lml", "epochs": 8, "batch_size": 32, "bootstrap": 20}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train({"all": make_rows(400)}, Config(**FAST), tmp_path_factory.mktemp("run") / "a")


def test_a_run_folder_holds_what_its_format_says(run):
    names = {p.name for p in run.path.iterdir()}
    assert names >= {
        "config.yaml", "environment.json", "data.json", "labels.json", "features.json", "weights.safetensors",
        "history.csv", "metrics.json", "predictions.safetensors", "examples.json", "done.json", "checkpoints",
    }  # fmt: skip
    metrics, found, labels = run.metrics(), run.predictions(), run.labels()
    n = metrics["rows"]
    assert metrics["part"] == "test"
    assert labels == [f"label{i}" for i in range(6)]
    assert found["probability"].shape == (n, 6)
    assert found["top_index"].shape == (n, 6)
    assert found["target_indptr"][-1] == len(found["target_index"])
    assert len(run.examples()) == n
    assert run.examples()[0].keys() == {"row", "id", "text"}
    assert len(run.history()) == 8
    assert all(len(column) == 6 for column in metrics["labels"].values())
    assert metrics["metrics"]["recall@5"]["value"] > 0.9  # the words tell the labels
    assert run.read_json("data.json")["resolved"]["k"] == pytest.approx(2, abs=0.2)


def test_numbers_in_a_run_folder_are_those_of_the_metrics(run):
    found, values = run.predictions(), run.metrics()["metrics"]
    n = len(found["row"])
    target = torch.zeros(n, 6, dtype=torch.bool)
    for i in range(n):
        target[i, found["target_index"][found["target_indptr"][i] : found["target_indptr"][i + 1]]] = 1
    y = torch.from_numpy(found["probability"])
    for k in (1, 3, 5):
        assert values[f"precision@{k}"]["value"] == pytest.approx(float(ll.precision_at_k(y, target, k)), abs=1e-6)
        assert values[f"recall@{k}"]["value"] == pytest.approx(float(ll.recall_at_k(y, target, k)), abs=1e-6)
        assert values[f"ndcg@{k}"]["value"] == pytest.approx(float(ll.ndcg_at_k(y, target, k)), abs=1e-6)
    assert values["map"]["value"] == pytest.approx(float(ll.mean_average_precision(y, target)), abs=1e-6)
    assert values["ece@5"]["value"] == pytest.approx(float(ll.label_calibration_error(y, target, 5)), abs=1e-5)
    assert values["ece"]["value"] == pytest.approx(float(ll.label_calibration_error(y, target)), abs=1e-5)
    for name, value in values.items():
        if value["low"] is not None and name != "ece@5":
            assert value["low"] <= value["value"] + 1e-9
            assert value["value"] <= value["high"] + 1e-9


def test_bootstrap_intervals_agree_with_drawing_rows_again():
    rng = np.random.default_rng(0)
    labels = LabelData.from_lists([[str(j) for j in rng.choice(8, 2, replace=False)] for _ in range(300)])
    y = torch.rand(300, 8, generator=torch.Generator().manual_seed(0))
    target = torch.from_numpy(labels.padded(np.arange(300)))
    from lastlayer.train.measure import Predictions

    top = y.sort(descending=True)
    found = measure(Predictions(top.indices, top.values, y.sum(-1), y, labels), (1, 3), resamples=400)["metrics"]
    generator = torch.Generator().manual_seed(1)
    for name, function in [
        ("recall@3", lambda s, t: ll.recall_at_k(s, t, 3)),
        ("map", ll.mean_average_precision),
        ("ece@3", lambda s, t: ll.label_calibration_error(s, t, 3)),
    ]:
        slow = ll.bootstrap(function, y, target, n_resamples=400, generator=generator)
        width = float(slow.high - slow.low)
        assert found[name]["value"] == pytest.approx(float(slow.value), abs=1e-5)
        assert found[name]["low"] == pytest.approx(float(slow.low), abs=0.3 * width)
        assert found[name]["high"] == pytest.approx(float(slow.high), abs=0.3 * width)


def test_loading_predicts_the_same(run):
    model = load_run(run)
    data = make_rows(50, seed=3).with_labels(model.labels)[0]
    found = predict(model, model.features(data), data)
    again = predict(model, model.features(data), data, batch_size=7)
    torch.testing.assert_close(found.probability, again.probability)
    out = evaluate(run.path, make_rows(50, seed=3))
    assert out["unknown_labels"] == 0
    assert out["metrics"]["recall@5"]["value"] > 0.9


@pytest.mark.parametrize(
    "changes",
    [{"loss": "binary"}, slow({"k": "predicted"}), {"hidden": [16], "dropout": 0.1, "lr": 0.02},
     slow({"vectorizer": "hashing"}), {"labels": "incomplete", "keep": 0.5}, slow({"schedule": "constant"}),
     {"optimizer": "sgd", "lr": 2.0, "clip_norm": 1.0}, slow({"precision": "bf16"}),
     slow({"single_positive": True, "labels": "incomplete", "loss": "expected_positive"})],
)  # fmt: skip
def test_choices_train(tmp_path, changes):
    values = {**FAST, **changes}
    run = train({"all": make_rows(300)}, make(values), tmp_path / "a")
    assert run.metrics()["metrics"]["recall@5"]["value"] > 0.85
    assert load_run(run).config.to_dict() == make(values).to_dict()


def test_dense_and_sparse_features(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 5)).astype(np.float32) + 100  # far from 0: standardised
    lists = [[str(j) for j in range(5) if row[j] > 100] for row in x]
    import scipy.sparse as sp

    for name, features in [("dense", x), ("sparse", sp.csr_matrix(np.maximum(x - 100, 0)))]:
        data = LabelData.from_lists(lists, features=features)
        run = train({"all": data}, make({**FAST, "epochs": 20}), tmp_path / name)
        assert run.metrics()["metrics"]["precision@1"]["value"] > 0.9


def test_early_stopping_and_loggers(tmp_path):
    config = make({**FAST, "epochs": 200, "patience": 2, "loggers": "csv,tensorboard"})
    run = train({"all": make_rows(200)}, config, tmp_path / "a")
    assert len(run.history()) < 100
    assert (run / "csv/metrics.csv").exists()
    assert list((run / "tensorboard").glob("events*"))
    best = run.metrics()["best_epoch"]
    scores = [row["ndcg@5"] for row in run.history()]
    assert scores[best] == max(scores)


def test_the_network_is_the_same_dense_and_sparse():
    import scipy.sparse as sp

    x = sp.random(6, 9, 0.5, format="csr", dtype=np.float32, random_state=0)
    network = LabelSetNetwork(9, 4, hidden=(5,), sparse=True)
    torch.testing.assert_close(network(rows_to_input(x, np.arange(6))), network(torch.from_numpy(x.toarray())))
    assert sum(p.numel() for p in network.parameters()) == LabelSetNetwork.count_parameters(9, 4, (5,))


def test_batches_depend_on_seed_and_epoch_alone_and_ranks_share_them():
    a, b = EpochBatches(10, 3, seed=1), EpochBatches(10, 3, seed=1)
    b.set_epoch(0)
    assert list(a) == list(b)
    b.set_epoch(1)
    assert list(a) != list(b)
    assert sorted(sum(a, [])) == list(range(10))  # noqa: RUF017
    ranks = [list(EpochBatches(10, 2, seed=1, rank=r, world=2)) for r in range(2)]
    assert len(ranks[0]) == len(ranks[1]) == len(EpochBatches(10, 2, seed=1, world=2))
    assert sorted(i for rank in ranks for batch in rank for i in batch) == list(range(10))


def test_auto_follows_the_labels():
    data = LabelData.from_lists([["a", "b"], ["a"], ["b", "c"], ["d"]])
    complete = Resolved.of(Config(), data)
    assert (complete.k, complete.observed, complete.monitor) == (1.5, 0.0, "ndcg@3")
    incomplete = Resolved.of(Config(labels="incomplete"), data)
    assert (incomplete.k, incomplete.observed, incomplete.monitor) == (2.0, 0.75, "recall@3")
    assert Resolved.of(Config(labels="incomplete", observed="0.8"), data).k == 1.5 / 0.8
    assert Resolved.of(Config(loss="binary"), data).probability == "sigmoid"
    assert Resolved.of(Config(loss="two_way"), data).probability == "lml"


def test_auto_follows_rows_with_most_of_the_labels():
    data = LabelData.from_lists([["a", "b", "c"], ["a", "b", "c", "d"], ["b", "c", "d"], ["a", "b"]])
    assert Resolved.of(Config(), data).k == 3.0
    assert Resolved.of(Config(labels="incomplete"), data).k == 3.0
    assert Resolved.of(Config(labels="incomplete", observed="0.8"), data).k == 3.75
    assert Resolved.of(Config(labels="incomplete", observed="0.5"), data).k == 0.99 * 4
    assert Resolved.of(Config(), LabelData.from_lists([["a", "b"], ["a", "b"]])).k == 0.99 * 2


@pytest.mark.parametrize(("labels", "observed"), [("complete", "0.4"), ("incomplete", "0.4"), ("incomplete", "0")])
def test_a_row_without_a_label_has_no_loss_where_labels_are_incomplete(labels, observed):
    data = LabelData.from_lists([["a", "b"], [], ["c"], []])
    config = Config(labels=labels, observed=observed, k=2)
    module = LabelSetModule(LabelSetNetwork(5, 3), config, Resolved.of(config, data), total_steps=1)
    x, target = torch.randn(4, 5), torch.from_numpy(data.padded(np.arange(4)))
    loss, logits = module.loss(x, target)
    rows = ll.lml_loss(logits, target, 2.0, observed=float(observed), reduction="none")
    labelled = torch.tensor([True, False, True, False])
    expected = {"complete0.4": rows.mean(), "incomplete0.4": rows[labelled].sum() / 4, "incomplete0": rows.sum() / 2}
    torch.testing.assert_close(loss, expected[labels + observed])
    assert (rows[~labelled] > 0).all() == (observed != "0")


def test_parts_are_split_and_hidden_as_asked():
    parts = prepare({"all": make_rows(600)}, Config(keep=0.5))
    assert sorted(parts) == ["test", "train", "valid"]
    assert parts["train"].row_counts().mean() < 1.3
    assert parts["test"].row_counts().mean() > 1.7  # complete
    with pytest.raises(DataError, match="no rows to train on"):
        prepare({"test": make_rows(5)}, Config())
    with pytest.raises(DataError, match="no training row has a label"):
        prepare({"all": LabelData.from_lists([[], []], texts=["a", "b"], label_names=["x"])}, Config())


def test_feature_state_is_plain_and_comes_back():
    import json

    data = make_rows(50)
    for config in (Config(), Config(vectorizer="hashing", n_features=64), Config(ngrams=2)):
        features = FeatureMap.fit(data, config)
        back = FeatureMap(json.loads(json.dumps(features.state)))
        assert (features(data) != back(data)).nnz == 0
    from sklearn.feature_extraction.text import TfidfVectorizer

    theirs = TfidfVectorizer(max_features=20000, min_df=2, sublinear_tf=True).fit_transform(data.texts)
    np.testing.assert_allclose(FeatureMap.fit(data, Config())(data).toarray(), theirs.toarray(), atol=1e-6)
    with pytest.raises(DataError, match=r"features\.json: damaged"):
        FeatureMap({"kind": "tfidf", "n_features": 3, "vocabulary": ["a"], "idf": [1.0]})


def test_too_large_a_network_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"would have \d+ parameters"):
        train({"all": make_rows(50)}, Config(max_parameters=10), tmp_path / "a")


@pytest.mark.parametrize(
    ("values", "message"),
    [({"lr": "fast"}, "`lr` must be a positive number"), ({"lrr": 1}, "unknown field 'lrr'. Did you mean 'lr'"),
     ({"epochs": 1.5}, "`epochs` must be a whole number"), ({"hidden": "a"}, "`hidden` must be a list of whole"),
     ({"k": "many"}, "`k` must be a positive number or auto or predicted"), ({"observed": 1}, "`observed` must be"),
     ({"single_positive": "perhaps"}, "must be true or false"), ({"loss_options": "a"}, "name=value"),
     ({"loss": "lml", "loss_options": {"observed": 0.5}}, "must be among"), ({"labels": 3}, "`labels` must be a word"),
     ({"valid_fraction": 0.6, "test_fraction": 0.6}, "less than 1"), ({"loggers": "comet"}, "mlflow or wandb"),
     ({"seed": True}, "`seed` must be a number"), ({"at": []}, "positive numbers"), ({"lr": float("nan")}, "number"),
     ({"weight_decay": -1}, "`weight_decay` must be a number of at least 0"),
     ({"C": 0}, "`C` must be a positive number or auto, got 0"), ({"decide": "f1"}, "`decide` must be auto, micro_f1"),
     ({"decide": "recall=2"}, "must be recall=P with a number above 0 and below 1"),
     ({"refit": "no"}, "`refit` must be"),
     ({"loss_options": {"tau": 1}}, "must be left out with the loss auto"),
     ({"loss": "squared_hinge", "hidden": [4]}, "must be binary, .* with hidden layers"),
     ({"solver": "dual", "loss": "lml"}, "`solver` must be auto or sgd for the loss lml")],
)  # fmt: skip
def test_wrong_fields_are_named(values, message):
    with pytest.raises(ConfigError, match=message):
        make(values)


def test_config_files_come_back_and_bombs_do_not(tmp_path):
    config = Config(hidden=(3, 4), loss="two_way", loss_options={"positive_temperature": 2.0}, k="3")
    (tmp_path / "a.yaml").write_bytes(config.to_yaml())
    assert make(load(tmp_path / "a.yaml")) == config
    for text, message in [
        ("a: &x [1, 2]\nb: *x\n", "aliases"),
        ("!!python/object/apply:os.system [ls]", "must be YAML"),
        ("- 1\n", "fields and"),
        ("a: [", "must be YAML"),
        ("\xff", "must be YAML"),
    ]:
        (tmp_path / "b.yaml").write_bytes(text.encode("latin-1"))
        with pytest.raises(ConfigError, match=message):
            load(tmp_path / "b.yaml")


def test_the_optimiser_follows_the_model():
    assert Config().settled(sparse=True).optimizer == "sgd"
    assert Config().settled(sparse=False).optimizer == "adamw"
    assert Config(hidden=(8,)).settled(sparse=True).lr == "0.005"
    assert Config(loss="expected_positive").settled(sparse=True).optimizer == "adamw"
    asked = Config(optimizer="adamw", lr=0.3).settled(sparse=True)
    assert (asked.optimizer, asked.lr, asked.weight_decay) == ("adamw", "0.3", "0.01")


def test_monitor_must_exist():
    with pytest.raises(ConfigError, match="`monitor` must be one of"):
        Resolved.of(Config(monitor="recall@77"), make_rows(20))


@pytest.mark.parametrize("name", ["weights.safetensors", "features.json", "labels.json", "data.json", "config.yaml"])
def test_damaged_runs_are_named(run, tmp_path, name):
    copy = tmp_path / "copy"
    shutil.copytree(run.path, copy)
    (copy / name).write_bytes((copy / name).read_bytes()[:25] + b"\xff{")
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        load_run(copy)
    (copy / name).unlink()
    with pytest.raises(ValueError, match=r"not there|not a run"):
        load_run(copy)


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """A run that predicts counts, with the calibration of another one."""
    folder, config = tmp_path_factory.mktemp("counted"), Config(loss="binary", C="1", bootstrap=0)
    run = train({"all": make_rows()}, replace(config, k="predicted"), folder / "run")
    other = train({"all": make_rows()}, config, folder / "other")
    shutil.copy(other / "calibration.safetensors", run.path)
    return run


def _edit_json(path, place, value):
    whole = json.loads(path.read_text())
    inside = whole
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    path.write_text(json.dumps(whole))


def _edit_tensor(path, name, change):
    tensors = load_file(path)
    save_file({**tensors, name: np.ascontiguousarray(change(tensors[name]))}, path)


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("features.json", ["idf", 0], None),
        ("features.json", ["idf"], [[1.0]]),
        ("data.json", ["parts", "train", "source", "options"], {"label_column": 1.5}),
        ("calibration.safetensors", "numbers", lambda v: v * np.nan),
        ("count.safetensors", "weight", lambda v: v[1:]),
        ("count.safetensors", "weight", lambda v: v * np.nan),
        ("count.safetensors", "numbers", lambda v: v[0]),
    ],
)
def test_wrong_values_in_a_run_are_damage_that_names_the_file(counted, tmp_path, name, place, value):
    copy = tmp_path / "copy"
    shutil.copytree(counted.path, copy)
    (_edit_json if name.endswith("json") else _edit_tensor)(copy / name, place, value)
    with pytest.raises(RunError, match=rf"{re.escape(name)}: damaged"):
        load_run(copy)


@pytest.mark.parametrize("name", ["target_indptr", "top_index", "set_indptr"])
def test_wrong_predictions_in_a_run_are_damage_that_names_the_file(counted, tmp_path, name):
    copy = tmp_path / "copy"
    shutil.copytree(counted.path, copy)
    _edit_tensor(copy / "predictions.safetensors", name, lambda v: v.astype(np.float32))
    with pytest.raises(RunError, match=rf"predictions.safetensors: damaged: `{name}` must hold whole numbers"):
        RunFolder(copy).predictions()


def test_a_report_survives_wrong_descriptions(counted, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(counted.path, copy)
    _edit_json(copy / "data.json", ["parts"], None)
    _edit_json(copy / "metrics.json", ["labels", "precision", 0], -1)
    _edit_json(copy / "metrics.json", ["labels", "recall", 0], 1)
    assert report.summary([copy, copy])["runs"][0]["parts"] == {}
    _edit_json(copy / "data.json", ["parts"], 1.5)
    with pytest.raises(RunError, match=r"data\.json: damaged: `parts` must be an object\."):
        report.summary([copy, copy])


def test_unfinished_runs_are_not_loaded(run, tmp_path):
    with pytest.raises(RunError, match="not a run folder"):
        load_run(tmp_path)
    (tmp_path / "config.yaml").write_text("{}")
    with pytest.raises(RunError, match="not finished"):
        load_run(RunFolder(tmp_path))


@pytest.mark.parametrize(
    ("fields", "part", "starts"),
    [({}, "test", None), ({"labels": "incomplete"}, "test", "The labels are incomplete"),
     ({"labels": "incomplete", "keep": 0.5}, "test", "Labels of the training rows were hidden"),
     ({"single_positive": True}, "other", "Labels of the training rows were hidden"),
     ({"keep": 0.5}, "valid", "The labels are incomplete"), ({}, "train", "No rows were held out")],
)  # fmt: skip
def test_notes_tell_labels_that_are_missing_from_labels_that_were_hidden(fields, part, starts):
    found = notes(Config(**fields), part)
    assert [note[: len(starts or "")] for note in found] == ([] if starts is None else [starts])
