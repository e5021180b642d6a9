"""The mixtures of experts of `experiments/router`: every expert's output arrives, and only what is over is dropped."""

import argparse

import pytest
import torch
import torch.nn.functional as F

import lastlayer as ll

METHODS = ["softmax", "sigmoid", "lml", "balanced lml"]


@pytest.fixture
def model(module):
    return module("router.model")


def one_by_one(layer, x, slots):
    """Each token to its experts in turn, until an expert has had `slots` of them."""
    chosen, weight, _ = layer.router(x)
    out, used = torch.zeros_like(x), [0] * layer.experts
    for token in range(len(x)):
        for j in range(layer.k):
            e = int(chosen[token, j])
            if used[e] < slots:
                used[e] += 1
                out[token] = out[token] + weight[token, j] * (F.gelu(x[token] @ layer.into[e]) @ layer.out[e])
    return out


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("capacity", [None, 1.25])
def test_experts_are_those_of_a_loop(model, method, capacity):
    torch.manual_seed(0)
    layer = model.Experts(method, 6, 5, 8, 3, 0.5).double().eval()
    layer.capacity = capacity
    x = (torch.randn(20, 6, dtype=torch.float64) + torch.randn(6)).requires_grad_()  # with favourites
    layer.router.gate.float()  # scores are always of float32
    found = layer(x)
    expected = one_by_one(layer, x, layer.slots)
    torch.testing.assert_close(found, expected)
    ask = torch.randn_like(found)
    leaves = x, layer.into, layer.out
    got, wanted = (torch.autograd.grad((y * ask).sum(), leaves, retain_graph=True) for y in (found, expected))
    torch.testing.assert_close(got, wanted)
    assert (layer.dropped > 0) == (capacity is not None)


def test_balanced_training_evens_out_the_loads_and_so_does_the_bias_alone(model):
    torch.manual_seed(0)
    routers = {method: model.Router(method, 8, 16, 2, 1.0) for method in ("lml", "balanced lml")}
    x = torch.randn(2000, 8) + 2 * torch.randn(8)
    for router in routers.values():
        router.gate.weight.data = routers["lml"].gate.weight.data

    def load(router):
        counts = model.counts_of(router(x)[0], 16)
        return counts.max() / counts.mean()

    assert load(routers["balanced lml"]) < 1.6 < 4 < load(routers["lml"])
    assert load(routers["balanced lml"].eval()) < 1.6


def test_bias_is_that_of_the_dual_variables(model):
    torch.manual_seed(0)
    router = model.Router("balanced lml", 8, 16, 2, 0.25)
    x = torch.randn(300, 8) + torch.randn(8)
    router(x)
    expected = ll.lml_balanced_duals(router.gate(x), 2, temperature=0.25)[1]
    torch.testing.assert_close(router.bias, expected.detach(), atol=1e-3, rtol=1e-3)


def test_settings_are_searched_among_runs_that_ended_and_seeds_come_one_by_one(module, tmp_path):
    run, results = module("router.run"), module("common").Results(tmp_path / "results.json")
    shared = {"methods": METHODS, "rates": [0.0015, 0.003, 0.006], "seeds": 2, "short": 150, "steps": 500, "fit": False}
    arguments = argparse.Namespace(experts=[16, 64], neighbours=False, **shared)

    def valid(setting):  # more is better in both, but softmax does not end with the highest rate
        slow = setting["method"] == "softmax" and setting["rate"] == 0.006
        return {"taken": 75 if slow else setting["steps"], "valid": 2 - setting["rate"] - setting["strength"] / 100}

    for jobs in run.stages(results, arguments):
        final = [setting for setting, _ in jobs]
        if final[0]["part"] == "grid":
            results.extend([setting | valid(setting) for setting in final])
    chosen = {"softmax": (0.003, 1.0), "sigmoid": (0.006, 0.03), "lml": (0.006, 1.0), "balanced lml": (0.006, 1.0)}
    assert [(s["seed"], s["experts"], s["method"], s["rate"], s["strength"]) for s in final] == [
        (seed, n, m, *chosen[m]) for seed in (0, 1) for n in (16, 64) for m in METHODS
    ]
    tried = run.grid(results.rows, 64, "lml")  # begins where 16 experts ended
    assert sorted((row["rate"], row["strength"]) for row in tried) == [(0.003, 1.0), (0.006, 0.5), (0.006, 1.0)]
    results.add(**final[0], taken=500, valid=1.0)
    (again,) = run.stages(results, arguments)  # nothing is searched again
    assert [setting for setting, _ in again] == final[1:]
    arguments.neighbours, arguments.methods, arguments.seeds = True, ["lml"], 1
    (more,) = run.stages(results, arguments)
    assert [(s["experts"], s["strength"]) for s, _ in more] == [(16, 0.5), (16, 1.0), (64, 0.5), (64, 1.0)]


def test_as_many_steps_as_fit(module, monkeypatch):
    run = module("router.run")
    monkeypatch.setattr(run.time, "monotonic", lambda: 100.0)
    rows = [{"part": "grid", "taken": 150, "seconds": s} for s in (20.0, 40.0)] + [{"part": "grid", "seconds": 900.0}]
    arguments = argparse.Namespace(methods=METHODS, experts=[16, 64], seeds=3, workers=8, end=100.0 + 24 * 7.77)
    assert run.fitting(rows, arguments) == 300  # 7.77 s per network; 60 s for 300 steps on one of eight workers


def test_differences_are_those_of_the_same_seed_and_number_of_steps(module):
    bits = {"softmax": (2.2, 2.1, 2.3), "balanced lml": (2.1, 2.0, 2.1), "lml": (2.5,)}
    rows = [{"method": m, "seed": s, "steps": 500, "test_bits": b} for m, v in bits.items() for s, b in enumerate(v)]
    rows += [row | {"steps": 1000, "test_bits": 2 * row["test_bits"]} for row in rows]
    table = module("router.run").differences(rows, "test_bits").splitlines()
    assert table[2:] == [
        "| 500 | softmax, auxiliary loss | +0.1333 | 0.0333 | +0.100, +0.100, +0.200 | 0.057 |",
        "| 1,000 | softmax, auxiliary loss | +0.2667 | 0.0667 | +0.200, +0.200, +0.400 | 0.057 |",
    ]
