"""The example that predicts without lastlayer: the same features and label sets as the run itself."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from train_tools import make_rows

import lastlayer as ll
from lastlayer.train import Config, train
from lastlayer.train.export import export

pytest.importorskip("onnxruntime")
EXAMPLE = Path(__file__).parents[2] / "examples" / "onnx_predict.py"
FAST = {"epochs": 4, "bootstrap": 0, "accelerator": "cpu"}


class Program:
    """Stands for a session of ONNX Runtime: runs the torch.export program beside the JSON file."""

    def __init__(self, path):
        self.program = torch.export.load(Path(path)).module()

    def run(self, names, inputs):
        with torch.no_grad():
            return [value.numpy() for value in self.program(torch.from_numpy(inputs["features"]))]


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        pytest.param({"analyzer": "char", "ngrams": "2-3", "hidden": (8,)}, "torch", marks=pytest.mark.slow),
        ({"decide": "top_k", "loss": "squared_hinge"}, "torch"),
        ({"decide": "macro_f1", "loss": "binary", "C": "1"}, "torch"),
        pytest.param({"ngrams": "2", "loss": "lml"}, "onnx", marks=pytest.mark.slow),
    ],
)
def test_predicts_as_the_run_does(tmp_path, monkeypatch, options, kind):
    spec = importlib.util.spec_from_file_location("onnx_predict", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    run = train({"all": make_rows(200)}, Config(**FAST, **options), tmp_path / "run")
    model, texts = ll.load(run.path), [*make_rows(20, seed=3).texts, "nothing known", "Word1 WORD1  word2"]
    out = export(run.path, tmp_path / "model.onnx", kind)
    if kind == "torch":
        monkeypatch.setattr(example.onnxruntime, "InferenceSession", Program)
    about = json.loads((tmp_path / "model.json").read_text())
    x = example.features(texts, about["features"])
    np.testing.assert_allclose(x, model.matrix(texts).toarray(), atol=1e-6)
    assert example.predict(str(out), texts) == model.predict(texts)
