"""The gradient of sparse rows, and steps that touch the features of a batch alone."""

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from lastlayer.data import LabelData
from lastlayer.train import Config, LabelSetNetwork, lazy
from lastlayer.train.batches import rows_to_input
from lastlayer.train.module import LabelSetData, LabelSetModule, fit_in_process
from lastlayer.train.resolved import Resolved


def network(dtype=torch.float64):
    made = LabelSetNetwork(7, 3, hidden=(4,), sparse=True).to(dtype)
    torch.nn.init.normal_(made.first.weight)
    return made


@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4], [2], [3, 3, 1], []])
def test_the_gradient_is_that_of_the_embedding_bag(rows):
    x = sp.csr_matrix(np.array([[0, 2, 0, 1, 0, 0, 3], [1, 0, 0, 0, 0, 0, 0], [0] * 7, [0, 1, 0, 4, 0, 0, 0], [1] * 7]))
    index, offsets, value = rows_to_input(x, np.array(rows, dtype=np.int64))
    made = network()
    grad = torch.randn(len(rows), 4, dtype=torch.float64)
    found = torch.autograd.grad(made.before_output((index, offsets, value)), made.first.weight, grad)[0]
    bag = made.first(index, offsets, per_sample_weights=value.double()) + made.bias
    torch.testing.assert_close(found, torch.autograd.grad(bag.relu(), made.first.weight, grad)[0])


def test_gradcheck():
    index, offsets, value = torch.tensor([0, 6, 6, 2]), torch.tensor([0, 2, 2]), torch.randn(4, dtype=torch.float64)
    made = network()

    def logits(weight):
        state = {**dict(made.named_parameters()), "first.weight": weight}
        return torch.func.functional_call(made, state, ((index, offsets, value),))

    assert torch.autograd.gradcheck(logits, made.first.weight.detach().clone().requires_grad_())


def test_a_feature_twice_in_a_row_counts_twice():
    made = network()
    twice = (torch.tensor([1, 1]), torch.tensor([0]), torch.tensor([1.0, 2.0]))
    once = (torch.tensor([1]), torch.tensor([0]), torch.tensor([3.0]))
    grads = [torch.autograd.grad(made(rows).sum(), made.first.weight)[0] for rows in (twice, once)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("steps", [7, 2048])  # products are kept for all steps, or begun anew some times
def test_steps_on_the_features_of_a_batch_give_the_weights_of_sgd(steps, monkeypatch):
    rng = np.random.default_rng(0)
    x = sp.random(60, 300, 0.02, "csr", random_state=rng, dtype=np.float32)
    labels = LabelData.from_lists([[str(i % 5)] for i in range(60)])
    config = Config(loss="lml", weight_decay=0.01, lr=5.0, batch_size=8).settled(sparse=True)
    resolved, start = Resolved.of(config, labels), torch.randn(300, 5)
    found, states = [], []
    for share in (0.0, 0.3):
        monkeypatch.setattr(lazy, "SHARE", share)
        monkeypatch.setattr(lazy, "STEPS", steps)
        model = LabelSetNetwork(300, 5, sparse=True)
        with torch.no_grad():
            model.first.weight.copy_(start)
        module = LabelSetModule(model, config, resolved, total_steps=24)
        optimizer = fit_in_process(module, LabelSetData(x, labels, batch_size=8, seed=0), 3)
        found.append(model.state_dict())
        states.append(optimizer.state_dict()["state"])
    assert lazy.worthwhile(model, optimizer, 10)
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states[0][0]["momentum_buffer"], states[1][0]["momentum_buffer"], rtol=1e-4, atol=1e-5)
