"""Loggers beside history.csv: settings, curves, metrics and the report reach each, for networks and exact models."""

import importlib.util

import pytest
import pytorch_lightning.loggers
from train_tools import make_rows

from lastlayer.train import Config, train

FAST = {"bootstrap": 0, "accelerator": "cpu"}
KINDS = [{"epochs": 2, "loss": "lml"}, {"loss": "binary", "C": "1"}]


class Client:
    def __init__(self):
        self.artifacts = []

    def log_artifact(self, run_id, path):
        self.artifacts.append(path)

    def save(self, path, base_path, policy):
        self.artifacts.append(path)


def fake(name, made):
    """A logger that writes down what it gets."""

    def __init__(self, *args, **options):
        self.lines, self.settings, self.experiment, self.run_id, self.ended = [], {}, Client(), "1", []
        made.append(self)

    methods = {
        "__init__": __init__,
        "log_metrics": lambda self, metrics, step=None: self.lines.append((step, metrics)),
        "log_hyperparams": lambda self, params, *_, **__: self.settings.update(params),
        "finalize": lambda self, status: self.ended.append(status),
        "name": property(lambda self: "lastlayer"),
        "version": property(lambda self: "1"),
    }
    return type(name, (pytorch_lightning.loggers.Logger,), methods)


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize(("name", "kind"), [("mlflow", "MLFlowLogger"), ("wandb", "WandbLogger")])
def test_everything_reaches_the_logger(tmp_path, monkeypatch, options, name, kind):
    made = []
    monkeypatch.setattr(pytorch_lightning.loggers, kind, fake(kind, made))
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: package)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    run = train({"all": make_rows(150)}, Config(**FAST, **options, loggers=(name,)), tmp_path / "run")
    (logger,) = made
    assert logger.settings["loss"] == options["loss"]
    assert [path.rsplit("/", 1)[1] for path in logger.experiment.artifacts] == ["report.html", "model_card.md"]
    metric = "recall_at_5" if name == "mlflow" else "recall@5"
    values = dict(item for _, line in logger.lines for item in line.items())
    assert values[f"test/{metric}"] == run.metrics()["metrics"]["recall@5"]["value"]
    assert len(logger.lines) == len(run.history()) + 1
    steps = [step for step, _ in logger.lines]
    assert steps == sorted(steps)
    assert logger.ended[-1] == "success"


def test_a_package_that_is_missing_is_an_error_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    with pytest.raises(ValueError, match=r"`loggers` must name installed packages, got mlflow. Install it with"):
        train({"all": make_rows(50)}, Config(**FAST, loggers=("mlflow",)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_the_packages_themselves(tmp_path, monkeypatch, name, options):
    package = pytest.importorskip(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'mlruns'}")
    run = train({"all": make_rows(150)}, Config(**FAST, **options, loggers=(name,)), tmp_path / "run")
    assert run.is_done()
    if name == "wandb":
        package.finish()
        assert list((run / "wandb").glob("offline-run-*"))
        return
    client = package.MlflowClient(f"file:{tmp_path / 'mlruns'}")
    (stored,) = client.search_runs([client.get_experiment_by_name("lastlayer").experiment_id])
    assert stored.data.params["loss"] == options["loss"]
    assert "test/recall_at_5" in stored.data.metrics
    assert {file.path for file in client.list_artifacts(stored.info.run_id)} == {"report.html", "model_card.md"}
