"""The sparse autoencoders of `experiments/autoencoders`: all kinds have the same number of active latents."""

import pytest
import torch

KINDS = ["TopK", "BatchTopK", "LML, k per row", "LML, k per batch"]


@pytest.fixture
def model(module):
    return module("autoencoders.model")


def test_masks_by_hand(model):
    pre = torch.tensor([[3.0, 1.0, 2.0], [9.0, 8.0, 7.0]])
    assert model.by_rank(pre, 1).tolist() == [[True, False, False], [True, False, False]]
    assert model.by_rank(pre, torch.tensor([1, 2])).tolist() == [[True, False, False], [True, True, False]]
    assert model.of_batch(pre, 2).tolist() == [[True, False, False], [True, True, True]]


@pytest.mark.parametrize("kind", KINDS)
def test_k_latents_are_active_on_average_and_hard_is_cold(model, kind):
    torch.manual_seed(0)
    net = model.Autoencoder(kind, 8, 64, 6).double()
    x = torch.randn(200, 8, dtype=torch.float64)
    torch.nn.init.normal_(net.size.weight)
    net.settle([x])
    assert (net.active(x) > 0).sum(-1).double().mean().item() == pytest.approx(6, abs=0.05)
    raw = net.sizes(x).detach()
    sizes = (6 * raw / raw.mean()).round() if "row" in kind else None
    pre = net.scores(x).detach().requires_grad_()
    hard, cold = (model.select(kind, pre, 6, sizes, 1e-7, soft) for soft in (False, True))
    torch.testing.assert_close(hard, cold, atol=1e-5, rtol=1e-5)
    warm = model.select(kind, pre, 6, sizes, 1.0, False)
    torch.testing.assert_close(warm, hard)
    slope = torch.autograd.grad(warm.sum(), pre)[0]
    assert (slope[(hard == 0) & (pre > 0)] != 0).any() == ("LML" in kind)  # LML tells those left out


def test_differences_are_those_of_the_same_seed(module):
    errors = {"TopK": (0.06, 0.07, 0.06), "LML, k per row": (0.05, 0.06, 0.04)}
    rows = [{"kind": kind, "k": 8, "seed": s, "error": e} for kind, v in errors.items() for s, e in enumerate(v)]
    table = module("autoencoders.run").differences(rows).splitlines()
    assert table[2:] == ["| 8 | LML, k per row | TopK | +1.333 | 0.333 | +1.00, +1.00, +2.00 | 0.057 |"]
