"""Losses for rows without a label."""

import math

import pytest
import torch
import torch.nn.functional as F

from lastlayer import outlier_max_confidence_loss, outlier_uniform_loss

LOSSES = [outlier_uniform_loss, outlier_max_confidence_loss]


def test_uniform_is_the_divergence():
    x = torch.randn(4, 6, dtype=torch.float64)
    even = torch.full((4, 6), 1 / 6, dtype=torch.float64)
    exact = F.kl_div(x.log_softmax(-1), even, reduction="batchmean")
    torch.testing.assert_close(outlier_uniform_loss(x), exact)


def test_max_confidence_is_the_largest_log_probability():
    x = torch.randn(4, 6, dtype=torch.float64)
    torch.testing.assert_close(
        outlier_max_confidence_loss(x, reduction="none"), x.softmax(-1).amax(-1).log(), rtol=1e-12, atol=0
    )


def test_golden():
    x = torch.tensor([[0.0, math.log(3)]], dtype=torch.float64)  # softmax 1/4, 3/4
    assert outlier_uniform_loss(x).item() == pytest.approx(-math.log(2) - (math.log(1 / 4) + math.log(3 / 4)) / 2)
    assert outlier_max_confidence_loss(x).item() == pytest.approx(math.log(3 / 4))
    even = torch.zeros(3, 5, dtype=torch.float64)
    assert outlier_uniform_loss(even).abs() < 1e-15
    assert outlier_max_confidence_loss(even).item() == pytest.approx(-math.log(5))


@pytest.mark.parametrize("loss", LOSSES)
def test_gradcheck_and_shift(loss):
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(loss, x)
    assert torch.autograd.gradgradcheck(loss, x)
    torch.testing.assert_close(loss(x + 7), loss(x))


@pytest.mark.parametrize("loss", LOSSES)
def test_ruled_out_is_as_if_not_there(loss):
    x = torch.randn(3, 5, dtype=torch.float64)
    gone = x.clone()
    gone[:, :2] = -torch.inf
    gone[2] = -torch.inf
    gone.requires_grad_()
    rows = loss(gone, reduction="none")
    torch.testing.assert_close(rows[:2], loss(x[:2, 2:], reduction="none"))
    assert rows[2] == 0
    torch.testing.assert_close(loss(gone), rows[:2].mean())
    (grad,) = torch.autograd.grad(loss(gone), gone)
    assert grad.isfinite().all()
    assert (grad[:, :2] == 0).all()
    assert (grad[2] == 0).all()


@pytest.mark.parametrize("loss", LOSSES)
def test_messages(loss):
    with pytest.raises(TypeError, match=f"{loss.__name__}: `logits` must be of a floating-point dtype"):
        loss(torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match=f"{loss.__name__}: `reduction` must be one of"):
        loss(torch.zeros(2, 3), reduction="max")
