"""Numbers that are hard to get right: large logits, batches that are fitted well, classes that are ruled out."""

from functools import partial

import pytest
import torch

import lastlayer as ll

INF = torch.inf
TARGET = torch.tensor([[0, 2], [4, -1], [1, 3]])

# Losses that a constant added to all logits does not change.
INVARIANT = {
    "lml_loss": lambda x: ll.lml_loss(x, TARGET, 2.5, observed=0.3),
    "lml_fenchel_young_loss": lambda x: ll.lml_fenchel_young_loss(x, TARGET),
    "multihot_softmax_loss": lambda x: ll.multihot_softmax_loss(x, TARGET, label_smoothing=0.1),
    "two_way_loss": lambda x: ll.two_way_loss(x, TARGET),
    "truncated_entropy_loss": lambda x: ll.truncated_entropy_loss(x, TARGET, 2),
    "smooth_topk_svm_loss": lambda x: ll.smooth_topk_svm_loss(x, TARGET[:, 0], 2),
    "topk_distillation_loss": lambda x: ll.topk_distillation_loss(x, x.detach().flip(-1), 2),
    "quasibinary_loss": lambda x: ll.quasibinary_loss(x, TARGET),
    "warp_loss": lambda x: ll.warp_loss(x, TARGET),
    "outlier_uniform_loss": lambda x: ll.outlier_uniform_loss(x),
    "outlier_max_confidence_loss": lambda x: ll.outlier_max_confidence_loss(x),
    "spherical_loss": lambda x: ll.spherical_loss(x, x[:, :2].repeat(1, 2**4), torch.ones_like(x), kind="squares"),
}


@pytest.mark.parametrize("name", INVARIANT)
def test_large_logits_keep_their_digits(name):
    """In float32 a logsumexp of 6e4 is known to 0.004; its difference from a score must not be."""
    logits = (6e4 + torch.randn(3, 5)).requires_grad_()  # as float32 holds them
    wide = logits.detach().double().requires_grad_()
    found, exact = INVARIANT[name](logits), INVARIANT[name](wide)
    torch.testing.assert_close(found.double(), exact, rtol=2e-6, atol=2e-6)
    (found,), (exact,) = torch.autograd.grad(found, logits), torch.autograd.grad(exact, wide)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("margin", [10.0, 30.0, 35.0, 50.0, 200.0, 1000.0])
@pytest.mark.parametrize("metric", ["accuracy", "average_precision", "recall_at_1"])
def test_the_surrogate_of_a_well_fitted_batch_has_a_gradient(margin, metric):
    logits = torch.tensor([[margin, 0.0]] * 8, requires_grad=True)
    target = torch.zeros(8, dtype=torch.int64)
    loss = ll.metric_surrogate_loss(logits, target, metric, generator=torch.Generator().manual_seed(0))
    (grad,) = torch.autograd.grad(loss, logits)
    assert loss.item() == pytest.approx(-1, abs=2e-3)
    assert grad.isfinite().all()
    assert (grad[:, 0] <= 0).all()
    if margin <= 30:  # beyond, the best anchor is met to rounding
        assert (grad[:, 0] < 0).any()


SOFT = {
    "binary_loss": ll.binary_loss,
    "asymmetric_loss": lambda x, t: ll.asymmetric_loss(x, t, gamma_positive=0.0, gamma_negative=0.0),
    "hill_loss": ll.hill_loss,
}


@pytest.mark.parametrize("name", SOFT)
def test_targets_of_0_and_1_have_the_gradient_of_those_between(name):
    """Soft labels that are learnt begin there. The gradient of `clamp` at its ends is 0 in newer versions of torch."""
    x = torch.randn(3, 5, dtype=torch.float64)
    hard = (torch.arange(15).reshape(3, 5) % 3 == 0).double().requires_grad_()
    near = (0.5 + (1 - 2e-9) * (hard.detach() - 0.5)).requires_grad_()
    gradients = [torch.autograd.grad(SOFT[name](x, target), target)[0] for target in (hard, near)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-6, atol=1e-7)


def test_the_gradient_of_a_quasibinary_probability_of_1_is_that_above():
    x = torch.tensor([[2.0, 1.0]], dtype=torch.float64, requires_grad=True)
    loss = ll.quasibinary_loss(x, torch.tensor([[-1]]), log_normalizer=2.0)
    assert torch.autograd.grad(loss, x)[0].tolist() == [[1.0, 0.0]]


def test_truncated_entropy_of_a_label_that_is_ruled_out():
    loss = partial(ll.truncated_entropy_loss, reduction="none")
    logits = torch.tensor([[-INF, 1.0]], requires_grad=True)
    without_rivals = loss(logits, torch.tensor([0]), 2)
    assert without_rivals.tolist() == [0.0]
    assert torch.autograd.grad(without_rivals.sum(), logits)[0].tolist() == [[0.0, 0.0]]
    assert loss(logits, torch.tensor([0]), 1).tolist() == [INF]
