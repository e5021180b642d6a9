"""The trainer of the label-set experiments: a model of a stack is the model that plain torch would train."""

import contextlib
import importlib
import math
import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

import lastlayer as ll

sys.path.insert(0, str(Path(__file__).parents[2]))  # experiments are not installed with the package
label_losses = importlib.import_module("experiments.label_losses")
tabular = importlib.import_module("experiments.tabular")
SETTINGS = [(1.0, 1e-3), (4.0, 0.0)]
PLAN = tabular.Plan(32, 3, hidden=4)


@pytest.fixture
def data():
    return tabular.tiny("tiny", "cpu")


def batches(observed, plan):
    """The rows of each step of seed 0, as the stack draws them."""
    generator = torch.Generator().manual_seed(observed.seeds[0])
    n = observed.train.shape[1]
    for _ in range(plan.epochs):
        order = torch.rand(len(observed.seeds), n, generator=generator).argsort(1)
        for step in range(n // plan.batch):
            yield observed.train[0][order[0, step * plan.batch : (step + 1) * plan.batch]]


@pytest.mark.parametrize("name", ["assume negative", "two-way", "LML thinned, k tuned"])
def test_linear_models_are_those_of_torch(data, name):
    observed = tabular.observe(data, ("1", "0.5"), (0, 1))
    method = label_losses.LOSSES[name]
    stack = tabular.Stack(data, observed, "linear", method, SETTINGS, PLAN)
    stack.train()
    model = len(method.options) * len(SETTINGS) + 1  # keep 0.5, first option, second setting
    cell = stack.cells[len(method.options)]
    assert cell.keep == "0.5"

    seen = observed.seen[1, 0]
    counts = seen[observed.train[0]].sum(0)
    weight = torch.zeros(12, 9, requires_grad=True)
    bias = ((counts + 0.5) / (observed.train.shape[1] - counts + 0.5)).log().requires_grad_()
    rate, decay = SETTINGS[1]
    groups = [{"params": [weight], "weight_decay": decay}, {"params": [bias]}]
    optimizer = torch.optim.SGD(groups, lr=rate, momentum=tabular.MOMENTUM)
    steps = list(batches(observed, PLAN))
    for i, rows in enumerate(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min((i + 1) / (0.05 * len(steps)), 1) * 0.5 * (1 + math.cos(math.pi * i / len(steps)))
        optimizer.zero_grad()
        logits = data.train_x[rows] @ weight + bias
        method.loss(tabular.Batch(logits, seen[rows], cell, 0.0)).mean().backward()
        optimizer.step()
    expected = (data.test_x @ weight + bias).detach()
    torch.testing.assert_close(stack.scores_of(0, model, data.test_x), expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(stack.scores(0, data.test_x)[model], expected, rtol=1e-3, atol=1e-3)


def test_hidden_layer_moves_as_adamw(data, monkeypatch):
    monkeypatch.setattr(tabular, "DROPOUT", 0.0)
    observed, settings = tabular.observe(data, ("1",), (0,)), [(0.01, 0.3)]
    stack = tabular.Stack(data, observed, "mlp", label_losses.LOSSES["assume negative"], settings, PLAN)
    shapes = [(12, 4), (4,), (4, 9), (9,)]
    values = [v.detach().clone().reshape(s).requires_grad_() for v, s in zip(stack.values, shapes, strict=True)]
    stack.train()

    groups = [{"params": values[::2], "weight_decay": 0.3}, {"params": values[1::2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    steps = list(batches(observed, PLAN))
    for i, rows in enumerate(steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * min((i + 1) / (0.05 * len(steps)), 1) * 0.5 * (1 + math.cos(math.pi * i / len(steps)))
        optimizer.zero_grad()
        logits = (data.train_x[rows] @ values[0] + values[1]).relu() @ values[2] + values[3]
        ll.binary_loss(logits, observed.seen[0, 0][rows]).backward()
        optimizer.step()
    expected = ((data.test_x @ values[0] + values[1]).relu() @ values[2] + values[3]).detach()
    torch.testing.assert_close(stack.scores_of(0, 0, data.test_x), expected, rtol=1e-3, atol=1e-3)


def test_hiding_is_nested_and_keeps_one_per_row(data):
    observed = tabular.observe(data, ("1", "0.5", "0.2", "one"), (3,))
    every, half, fifth, one = observed.seen[:, 0]
    assert torch.equal(every, data.train_y)
    assert (fifth <= half).all()
    assert (half <= every).all()
    assert 0 < fifth.sum() < half.sum() < every.sum()
    assert torch.equal(one.sum(-1), data.train_y.any(-1).long())
    rows = torch.cat([observed.train[0], observed.held_out[0]])
    assert torch.equal(rows.sort().values, torch.arange(len(data.train_x)))


def test_recall_is_the_library_s(data):
    scores = torch.randn(3, *data.test_y.shape)
    found = tabular.recall_at(3)(scores, data.test_y.expand(scores.shape))
    torch.testing.assert_close(found, torch.stack([ll.recall_at_k(s, data.test_y, 3) for s in scores]))


def test_a_best_rate_at_an_end_widens_the_grid(data):
    assert tabular._beyond(4.0, [1.0, 4.0, 16.0]) == ()
    assert tabular._beyond(16.0, [1.0, 4.0, 16.0]) == (64.0, 256.0)
    assert tabular._beyond(1.0, [1.0, 4.0, 16.0]) == (0.0625, 0.25)
    rows = list(
        tabular.fit(
            data,
            "linear",
            label_losses.LOSSES["LML, k tuned"],
            ["1", "one"],
            seeds=3,
            tuned_on=2,
            score=tabular.recall_at(3),
            measure=lambda scores, data, probability, k: {"top": scores.max().item()},
            plan=PLAN,
        )
    )
    assert [(row["keep"], row["seed"]) for row in rows] == [(keep, s) for keep in ("1", "one") for s in range(3)]
    assert all(row["option"] in label_losses.CARDINALITIES and 0 < row["valid"] <= 1 for row in rows)


@pytest.mark.parametrize("link", ["sigmoid", "lml", "quasibinary"])
def test_probabilities(link):
    p = tabular.probabilities(torch.randn(50, 6), link, 2.0)
    assert ((p >= 0) & (p <= 1)).all()
    if link == "lml":
        torch.testing.assert_close(p.sum(-1), torch.full((50,), 2.0))


def test_sets_with_and_without_a_split(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 4)).astype(np.float32), rng.random((20, 3)) < 0.4
    indptr = np.concatenate([[0], y.sum(1).cumsum()])
    labels = {"Y_indices": y.nonzero()[1], "Y_indptr": indptr, "Y_shape": np.array(y.shape)}
    np.savez(tmp_path / "whole.npz", all_X=x, **{f"all_{k}": v for k, v in labels.items()})
    both = {f"{part}_{k}": v for part in ("train", "test") for k, v in labels.items()}
    sparse = {"X_indices": np.tile(np.arange(4), 20), "X_indptr": np.arange(21) * 4, "X_data": x.ravel()}
    sparse["X_shape"] = np.array(x.shape)
    np.savez(tmp_path / "split.npz", **both, **{f"{p}_{k}": v for p in ("train", "test") for k, v in sparse.items()})
    whole, split = (tabular.load(tmp_path, name, "cpu") for name in ("whole", "split"))
    assert len(whole.train_x) == 14
    assert len(whole.test_x) == 6
    torch.testing.assert_close(whole.train_x.mean(0), torch.zeros(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(split.train_x.norm(dim=1), torch.ones(20))
    assert torch.equal(split.test_y, torch.from_numpy(y))


def test_ranks_and_significance():
    run = importlib.import_module("experiments.multilabel_losses.run")
    assert tabular.ranks(np.array([[3.0, 1.0, 3.0], [0.0, 2.0, 1.0]])).tolist() == [[1.5, 3, 1.5], [3, 1, 2]]
    pytest.importorskip("scipy")
    rows = [
        {"set": f"s{i}", "loss": loss, "map_class": value + 0.01 * i}
        for i in range(10)
        for loss, value in (("a", 0.5), ("b", 0.4), ("c", 0.3))
    ]
    text = run.significance(rows, "map_class")
    assert "Best is a (1.00)" in text
    assert "significantly worse than it: c." in text
    assert "1.05 ranks" in text


def test_texts_become_rows(tmp_path):
    pytest.importorskip("sklearn")
    features = importlib.import_module("experiments.text_features")
    parts = {"train": [("red apple", [0]), ("red sky", [1]), ("blue sky apple", [0, 1])], "test": [("sky", [1])]}
    np.savez(tmp_path / "words.npz", **features.matrices(parts, 10))
    data = tabular.load(Path(tmp_path), "words", "cpu")
    assert data.train_x.shape == (3, 3)
    assert data.test_y.tolist() == [[False, True]]
    torch.testing.assert_close(data.train_x.norm(dim=1), torch.ones(3), atol=1e-3, rtol=0)


class FakeGraph:
    """Stands in for a CUDA graph: counts replays, and may refuse to record."""

    made: ClassVar[list["FakeGraph"]] = []
    refuses = False

    def __init__(self):
        self.replays = 0
        self.made.append(self)

    def capture_begin(self):
        pass

    def capture_end(self):
        if self.refuses:
            raise RuntimeError("not while capturing")

    def replay(self):
        self.replays += 1


@pytest.mark.parametrize("refuses", [False, True])
def test_steps_are_recorded_once_for_each_phase(monkeypatch, refuses, capsys):
    monkeypatch.setattr(FakeGraph, "made", [])
    monkeypatch.setattr(FakeGraph, "refuses", refuses)
    for name, value in {
        "CUDAGraph": FakeGraph,
        "Stream": lambda: None,
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    calls = []
    step = tabular.Recorded(calls.append, torch.device("cuda"))
    for phase in (0.0, 1.0):
        for _ in range(5):
            step(phase)
    if refuses:  # one try, then every step is a call
        assert len(FakeGraph.made) == 1
        assert len(calls) == 11
        assert "not recorded" in capsys.readouterr().out
    else:  # two calls and the recording, then replays
        assert [graph.replays for graph in FakeGraph.made] == [3, 3]
        assert calls == [0.0] * 3 + [1.0] * 3


def test_pairs_and_variants_compare_the_cells_of_both():
    run = importlib.import_module("experiments.incomplete_labels.run")
    values = {"1": {run.BASE: [0.5], "two-way": [0.6, 0.7]}, "one": {run.BASE: [0.4], "two-way": [0.4]}}
    rows = [
        {"set": "tiny", "head": "linear", "keep": keep, "method": method, "recall5": value, "map_class": value}
        for keep, methods in values.items()
        for method, found in methods.items()
        for value in found
    ]
    assert run._ahead(rows, "two-way", "recall5", run.BASE) == pytest.approx([15.0, 0.0])
    assert "| two-way | +15.00 | 1 of 1 | 1 |  |  |  | +15.00 | 1 |  |  |" in run.variants(rows)
    assert run.beside_chosen(rows) == []
    chosen = rows[0] | {"method": run.CHOSEN, "recall5": 0.55}
    found = run.beside_chosen([*rows, chosen, chosen | {"set": "other"}])
    assert [row["method"] for row in found] == ["two-way", "two-way", run.BASE, run.CHOSEN]


def test_rows_without_a_label_have_no_loss_in_labelled_rows():
    tabular, losses = (importlib.import_module(f"experiments.{name}") for name in ("tabular", "label_losses"))
    x, target = torch.randn(4, 6), torch.zeros(4, 6, dtype=torch.bool)
    target[0, 1] = target[2, 3] = True
    batch = tabular.Batch(x, target, tabular.Cell("0.1", 2.0, mean=0.5, guess=1.0), progress=0.0)
    for name, whole in (("thinned, labelled rows", "k auto"), ("thinned, labelled rows, k tuned", "k tuned")):
        expected = losses.LOSSES[f"LML thinned, {whole}"].loss(batch) * torch.tensor([1, 0, 1, 0])
        torch.testing.assert_close(losses.LOSSES[name].loss(batch), expected)
