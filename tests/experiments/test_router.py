"""The mixtures of experts of `experiments/router`: every expert's output arrives, and only what is over is dropped."""

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
    got, wanted = (torch.autograd.grad((y * ask).sum(), x, retain_graph=True)[0] for y in (found, expected))
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
