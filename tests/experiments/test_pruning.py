"""The parts of the pruning experiment that its numbers rest on: budgets, masks, and the smaller network."""

import pytest
import torch

import lastlayer as ll


def test_multiply_adds_of_resnet_18(module):
    network = module("pruning.network")
    counts = network.full(64)
    assert network.multiply_adds(counts) == 555_468_800  # 0.56 billion, as is known of this network
    square, line = network.quadratic(counts)
    assert (square.sum() + line.sum()).item() == 555_468_800
    half = torch.full((12,), 0.5, dtype=torch.float64)
    assert (half @ square @ half + half @ line).item() == network.multiply_adds([c // 2 for c in counts])


def test_the_smaller_network_is_the_masked_one_and_its_multiply_adds_are_counted(module):
    network, run = module("pruning.network"), module("pruning.run")
    torch.manual_seed(0)
    net = network.Network(network.full(4))
    for norm in net.norms:
        torch.nn.init.normal_(norm.weight)
        torch.nn.init.normal_(norm.bias)
    x = torch.randn(8, 3, 32, 32)
    net(x)  # moves the running means
    kept = [3, 5, 9, 20, 1, 2, 4, 8, 11, 16, 30, 7]
    mask = run.largest(net.importance(), kept)
    small = network.smaller(net, mask).eval()
    assert small.counts == kept
    torch.testing.assert_close(small(x), net.eval()(x, mask))
    assert network.counted(small, x) == network.multiply_adds(kept)


@pytest.mark.parametrize("budget", [0.9, 0.5, 0.3])
def test_learned_ratios_cost_the_budget_and_are_even_without_a_shift(module, budget):
    network, run = module("pruning.network"), module("pruning.run")
    counts = network.full(32)
    square, line = network.quadratic(counts)
    limit = budget * network.multiply_adds(counts)
    even = run.uniform_ratio(counts, limit)
    torch.testing.assert_close(run.ratios(torch.zeros(12), counts, limit), torch.full((12,), even).double())
    shift = (2 * torch.randn(12, generator=torch.Generator().manual_seed(1))).requires_grad_()
    found = run.ratios(shift, counts, limit)
    assert (found @ square @ found + line @ found).item() == pytest.approx(limit, rel=1e-7)
    assert found.min() >= run.LEAST
    assert found.max() <= 1
    price = (square + square.T) @ found.detach() + line
    (along,) = torch.autograd.grad(found @ price, shift)  # the cost cannot be moved, to first order
    assert along.abs().max() < 1e-6 * price.max()


def test_whole_channels_stay_just_below_the_budget(module):
    network, run = module("pruning.network"), module("pruning.run")
    counts = network.full(32)
    limit = 0.3 * network.multiply_adds(counts)
    ratio = run.ratios(torch.linspace(-1, 1, 12), counts, limit).tolist()
    importance = torch.rand(12, 256, generator=torch.Generator().manual_seed(0))
    for found in (run.whole_counts(ratio, counts, limit), run.by_global_order(importance, counts, limit)):
        assert 0.99 * limit < network.multiply_adds(found) <= limit
        assert all(1 <= f <= c for f, c in zip(found, counts, strict=True))


def test_the_mask_of_a_group_is_the_published_function_of_its_importances():
    importance, slope = torch.tensor([0.2, 0.5, 0.9, 1.4, 2.0], dtype=torch.float64), 3.0
    p = ll.lml(importance.log(), 2.3, temperature=1 / slope)
    threshold = torch.exp(-ll.lml_threshold(importance.log(), 2.3, temperature=1 / slope) / slope)
    torch.testing.assert_close(p, 1 / (1 + (importance / threshold) ** -slope))
