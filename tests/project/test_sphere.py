"""The spherical exponential: values, the Jacobian of the thesis, edges."""

import pytest
import torch

from lastlayer import SphericalExp, spherical_exp


def test_is_the_root_of_a_softmax():
    x = torch.randn(4, 5, dtype=torch.float64)
    p = spherical_exp(x)
    torch.testing.assert_close(p, x.exp() / x.exp().square().sum(-1, keepdim=True).sqrt())
    torch.testing.assert_close(p.square(), (2 * x).softmax(-1))
    torch.testing.assert_close(p.norm(dim=-1), torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(spherical_exp(x + 3), p)


def test_jacobian():
    x = torch.randn(5, dtype=torch.float64)
    p = spherical_exp(x)
    exact = (torch.eye(5, dtype=torch.float64) - torch.outer(p, p)) @ p.diag()
    torch.testing.assert_close(torch.func.jacrev(spherical_exp)(x), exact)
    torch.testing.assert_close(torch.func.jacfwd(spherical_exp)(x), exact)
    assert torch.autograd.gradgradcheck(spherical_exp, x.requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_large_logits(dtype):
    x = torch.tensor([[1e4, 1e4, -1e4], [50.0, 0.0, -50.0]]).to(dtype)
    p = spherical_exp(x)
    assert p.dtype == dtype
    torch.testing.assert_close(p[0].float(), torch.tensor([0.5**0.5, 0.5**0.5, 0.0]), rtol=4e-3, atol=0)
    torch.testing.assert_close(p[1].float(), torch.tensor([1.0, 0.0, 0.0]))


def test_ruled_out_class():
    x = torch.tensor([0.0, -torch.inf, 0.0], requires_grad=True)
    p = spherical_exp(x)
    assert p[1] == 0
    (grad,) = torch.autograd.grad(p[0], x)
    torch.testing.assert_close(grad, torch.tensor([1.0, 0.0, -1.0]) * 0.5**1.5)
    assert spherical_exp(torch.full((2,), -torch.inf)).isnan().all()


def test_shapes_modules_and_message():
    assert spherical_exp(torch.zeros(0, 3)).shape == (0, 3)
    assert spherical_exp(torch.zeros(1)).tolist() == [1.0]
    x = torch.randn(2, 3)
    torch.testing.assert_close(SphericalExp()(x), spherical_exp(x))
    torch.testing.assert_close(torch.compile(spherical_exp, fullgraph=True, backend="aot_eager")(x), spherical_exp(x))
    with pytest.raises(TypeError, match="spherical_exp: `logits` must be of a floating-point dtype"):
        spherical_exp(torch.zeros(3).long())
