"""The quasibinary loss: printed formula, closed-form gradient, edges."""

import math

import pytest
import torch

from lastlayer import QuasibinaryLoss, quasibinary_loss

F64 = torch.float64


def printed(z, y):
    """Equations 4.10 to 4.12, with the sign of a loss, a row."""
    q = z.exp() / (z.exp().sum() / y.sum())
    return -(y * q.log() - q.log().clamp(min=0)).sum(-1)


def test_is_the_printed_formula():
    z, y = 2 * torch.randn(6, 5, dtype=F64), (torch.rand(6, 5) < 0.3).to(F64)
    torch.testing.assert_close(quasibinary_loss(z, y, reduction="none"), printed(z, y))
    torch.testing.assert_close(quasibinary_loss(z, y), printed(z, y).mean())
    torch.testing.assert_close(quasibinary_loss(z, y, reduction="sum"), printed(z, y).sum())
    torch.testing.assert_close(quasibinary_loss(z + 9, y), quasibinary_loss(z, y))  # the normaliser takes a shift


def test_gradient_in_closed_form():
    z = (2 * torch.randn(6, 5, dtype=F64)).requires_grad_()
    y = (torch.rand(6, 5) < 0.3).to(F64)
    (grad,) = torch.autograd.grad(quasibinary_loss(z, y), z)
    n = y.sum()
    q = z.exp() / (z.exp().sum() / n)
    a = (q > 1).to(F64)
    assert a.sum() > 0
    torch.testing.assert_close(grad, (-(y - a) + (n - a.sum()) * q / n) / 6)
    assert torch.autograd.gradcheck(lambda z: quasibinary_loss(z, y), z)
    assert torch.autograd.gradgradcheck(lambda z: quasibinary_loss(z, y), z)


def test_given_normalizer():
    z, y = torch.randn(4, 3), torch.tensor([0, 2, -1, 1])
    log_c = z.logsumexp((0, 1)) - math.log(3)
    torch.testing.assert_close(quasibinary_loss(z, y, log_normalizer=log_c), quasibinary_loss(z, y))
    torch.testing.assert_close(quasibinary_loss(z, y, log_normalizer=log_c.item()), quasibinary_loss(z, y))


def test_target_forms_and_unknown_classes():
    z = torch.randn(3, 4)
    lists = torch.tensor([[1, 3], [-1, -1], [0, -1]])
    hot = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]], dtype=torch.int8)
    torch.testing.assert_close(quasibinary_loss(z, lists), quasibinary_loss(z, hot))
    hot[:, 2] = -1
    some = [0, 1, 3]
    torch.testing.assert_close(quasibinary_loss(z, hot), quasibinary_loss(z[:, some], hot[:, some]))
    out = z.clone()
    out[:, 2] = -torch.inf
    out.requires_grad_()
    loss = quasibinary_loss(out, hot)
    torch.testing.assert_close(loss, quasibinary_loss(z, hot))
    assert torch.autograd.grad(loss, out)[0].isfinite().all()


def test_no_label_no_row():
    z = torch.randn(3, 4, requires_grad=True)
    loss = quasibinary_loss(z, torch.zeros(3, 4))
    assert loss == 0
    assert (torch.autograd.grad(loss, z)[0] == 0).all()
    assert quasibinary_loss(z, torch.full((3, 4), -1.0)) == 0
    assert quasibinary_loss(z[:0], torch.zeros(0, 4)) == 0
    torch.testing.assert_close(quasibinary_loss(z[:1, :1], torch.tensor([0])), torch.tensor(0.0))  # q = 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_large_logits(dtype):
    z = (1e4 * torch.randn(4, 6).sign()).to(dtype).requires_grad_()
    loss = quasibinary_loss(z, torch.randint(6, (4,)))
    assert loss.dtype == dtype
    assert loss.isfinite()
    assert torch.autograd.grad(loss, z)[0].isfinite().all()


@pytest.mark.slow
def test_compile_export_module():
    z, y = torch.randn(4, 3), torch.tensor([0, 2, -1, 1])
    expected = quasibinary_loss(z, y)
    torch.testing.assert_close(torch.compile(quasibinary_loss, fullgraph=True, backend="aot_eager")(z, y), expected)
    torch.testing.assert_close(torch.export.export(QuasibinaryLoss(), (z, y)).module()(z, y), expected)


def test_messages():
    with pytest.raises(TypeError, match="quasibinary_loss: `log_normalizer` must be a number, got str"):
        quasibinary_loss(torch.zeros(2, 3), torch.zeros(2, 3), log_normalizer="1")
    for dtype in (torch.float32, torch.float64):
        with pytest.raises(ValueError, match=r"`log_normalizer` must be one number, got shape \(3,\)"):
            quasibinary_loss(torch.zeros(2, 3, dtype=dtype), torch.zeros(2, 3), log_normalizer=torch.zeros(3))
    with pytest.raises(ValueError, match="quasibinary_loss: `reduction` must be one of"):
        quasibinary_loss(torch.zeros(2, 3), torch.zeros(2, 3), reduction="max")


def test_a_nan_shows():
    x = torch.zeros(2, 3, dtype=torch.float64)
    x[1, 2] = torch.nan
    for dtype in (torch.float64, torch.float32):
        assert quasibinary_loss(x.to(dtype), torch.tensor([0, 1])).isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("score", [torch.nan, torch.inf, 1e4])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_row_of_weight_0_may_hold_any_scores(dtype, score, reduction):
    """Such as a row of padding: the others must not see it, neither in the normaliser nor in the gradient."""
    z = torch.randn(4, 5, dtype=dtype)
    y, weight = torch.tensor([0, 3, -1, 2]), torch.tensor([1.0, 0.0, 2.0, 0.5])
    kept = [0, 2, 3]

    def run(z, y, weight):
        z = z.clone().requires_grad_()
        loss = quasibinary_loss(z, y, sample_weight=weight, reduction=reduction)
        grad = torch.autograd.grad(loss.sum(), z, create_graph=True)[0]
        return loss.detach(), grad.detach(), torch.func.grad(lambda z: quasibinary_loss(z, y, sample_weight=weight))(z)

    expected = run(z[kept], y[kept], weight[kept])
    z[1, 2] = score
    loss, *grads = run(z, y, weight)
    torch.testing.assert_close(loss if reduction == "mean" else loss[kept], expected[0])
    for grad, other in zip(grads, expected[1:], strict=True):
        torch.testing.assert_close(grad[kept], other)
        assert (grad[1] == 0).all()
