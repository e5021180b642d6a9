"""The spherical head and loss: formulas, signs, the turn by 45 degrees, and what it learns."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lastlayer import SphericalHead, SphericalLoss, angular_error, rotation_error, spherical_exp, spherical_loss
from lastlayer.head.sphere import canonical_quaternion
from lastlayer.loss.sphere import sign_class, signs_of

F64 = torch.float64


def test_loss_is_the_formula():
    o, s = torch.randn(6, 3, dtype=F64), torch.randn(6, 8, dtype=F64)
    y = F.normalize(torch.randn(6, 3, dtype=F64), dim=-1)
    classes = (y < 0).long() @ torch.tensor([1, 2, 4])
    cosine = -(spherical_exp(o) * y.abs()).sum(-1)
    signs = F.cross_entropy(s, classes, reduction="none")
    torch.testing.assert_close(spherical_loss(o, s, y, reduction="none"), cosine + signs)
    torch.testing.assert_close(spherical_loss(o, s, 3 * y), (cosine + signs).mean())  # the direction counts
    squares = F.cross_entropy(2 * o, y.square(), reduction="none")
    torch.testing.assert_close(
        spherical_loss(o, s, y, kind="squares", sign_weight=0.5, reduction="none"), squares + 0.5 * signs
    )
    torch.testing.assert_close(SphericalLoss(kind="squares")(o, s, y), (squares + signs).mean())


def test_gradient_in_closed_form():
    o = torch.randn(1, 4, dtype=F64, requires_grad=True)
    y = F.normalize(torch.rand(1, 4, dtype=F64), dim=-1)
    s = torch.zeros(1, 16, dtype=F64)
    (grad,) = torch.autograd.grad(spherical_loss(o, s, y), o)
    p = spherical_exp(o)
    torch.testing.assert_close(grad, -p * (y - p * (p * y).sum(-1, keepdim=True)))
    assert torch.autograd.gradcheck(lambda o: spherical_loss(o, s, y), o)
    assert torch.autograd.gradgradcheck(lambda o: spherical_loss(o, s, y, kind="squares"), o)


def test_signs_go_there_and_back():
    y = torch.randn(50, 4)
    for signed in ((0, 1, 2, 3), (1, 2, 3)):
        back = signs_of(sign_class(y, signed), signed, y)
        assert torch.equal(back[:, list(signed)], y.sign()[:, list(signed)])
    assert sign_class(torch.tensor([0.0, -0.0]), (0, 1)) == 0  # zero counts as positive


@pytest.mark.parametrize(("sphere", "hemisphere"), [(1, True), (2, True), (2, False), (3, True)])
def test_perfect_logits_give_the_target_back(sphere, hemisphere):
    head = SphericalHead(4, sphere, hemisphere=hemisphere).double()
    y = F.normalize(torch.randn(40, sphere + 1, dtype=F64), dim=-1)
    if sphere == 2 and hemisphere:
        y[:, 2] = -y[:, 2].abs()
    learned = head.canonical(y)
    logits = torch.cat([learned.abs().log(), torch.zeros(40, 2 ** len(head.signed), dtype=F64)], -1)
    classes = sign_class(learned, head.signed)
    logits[torch.arange(40), head.size + classes] = 9
    head.linear = nn.Identity()
    p = head.predict(logits)
    if sphere == 3:
        assert rotation_error(p, y).max() < 1e-6
    else:
        torch.testing.assert_close(p, y)
    assert head.loss(logits, y, kind="cosine", sign_weight=1.0) < -0.99  # -1 for the magnitudes


@pytest.mark.parametrize(("sphere", "kind", "weight"), [(1, "squares", 0.25), (2, "cosine", 0.1), (3, "cosine", 0.1)])
def test_the_head_mixes_magnitudes_and_signs_as_the_authors_do(sphere, kind, weight):
    head, features = SphericalHead(5, sphere), torch.randn(6, 5)
    y = F.normalize(torch.randn(6, sphere + 1), dim=-1)
    logits = head(features)
    parts = (logits[:, : sphere + 1], logits[:, sphere + 1 :], head.canonical(y))
    loss = spherical_loss(*parts, signed=head.signed, kind=kind, sign_weight=weight)
    torch.testing.assert_close(head.loss(features, y), loss)
    other = "cosine" if kind == "squares" else "squares"
    torch.testing.assert_close(
        head.loss(features, y, kind=other, sign_weight=2.0),
        spherical_loss(*parts, signed=head.signed, kind=other, sign_weight=2.0),
    )


def test_quaternions():
    q = F.normalize(torch.randn(20, 4), dim=-1)
    assert torch.equal(canonical_quaternion(q), canonical_quaternion(-q))
    half_turn = torch.tensor([[0.0, -1.0, 0.0, 0.0], [0.0, 0.0, 0.6, -0.8]])
    assert canonical_quaternion(half_turn).tolist() == [
        [0.0, 1.0, 0.0, 0.0],
        [0.0, 0.0, 0.6000000238418579, -0.800000011920929],
    ]
    head, features = SphericalHead(5, 3), torch.randn(20, 5)
    torch.testing.assert_close(head.loss(features, q), head.loss(features, -q))


def test_edges():
    head, features = SphericalHead(5, 1), torch.randn(3, 5)
    y = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, -1.0]])
    loss = head.loss(features, y, reduction="none")
    assert loss[1] == 0  # unknown
    torch.testing.assert_close(head.loss(features, y), (loss[0] + loss[2]) / 2)
    assert head.loss(features, torch.zeros(3, 2)) == 0
    assert head.loss(features[:0], y[:0]) == 0
    assert head.predict(torch.randn(2, 3, 5)).shape == (2, 3, 2)
    big = spherical_loss(torch.tensor([[1e4, -1e4]]).half(), torch.zeros(1, 4).half(), y[:1].half())
    assert big.dtype == torch.float16
    assert big.isfinite()
    assert "sphere=1" in repr(head)
    compiled = torch.compile(head.loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(features, y), head.loss(features, y))


def learn(head, loss, predict):
    """Angles of things whose front and back look nearly alike; the median error in degrees."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(4, 24, generator=generator)

    def batch(n):
        t = 2 * math.pi * torch.rand(n, generator=generator)
        seen = torch.stack([(2 * t).cos(), (2 * t).sin(), 0.08 * t.cos(), 0.08 * t.sin()], -1) @ mix
        return seen + 0.3 * torch.randn(n, 24, generator=generator), torch.stack([t.cos(), t.sin()], -1)

    body = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=3e-3)
    for _ in range(300):
        x, y = batch(128)
        optimizer.zero_grad()
        loss(body(x), y).backward()
        optimizer.step()
    x, y = batch(4000)
    with torch.no_grad():
        return angular_error(predict(body(x)), y, degrees=True, reduction="median").item()


@pytest.mark.parametrize("kind", ["cosine", "squares"])
@pytest.mark.parametrize("score", [torch.nan, torch.inf, -torch.inf])
def test_rows_left_out_have_no_gradient_whatever_they_hold(kind, score):
    o, s = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 16, dtype=torch.float64)
    y = torch.randn(3, 4, dtype=torch.float64)
    y[1] = 0
    o[1:], s[1:] = score, score
    o.requires_grad_()
    s.requires_grad_()
    spherical_loss(o, s, y, kind=kind, sample_weight=torch.tensor([1.0, 1.0, 0.0])).backward()
    for grad in (o.grad, s.grad):
        assert (grad[1:] == 0).all()
        assert grad[0].isfinite().all()
        assert grad[0].abs().sum() > 0


def test_less_error_than_direct_regression():
    sphere, direct = SphericalHead(64, 1), nn.Linear(64, 2)
    by_sphere = learn(sphere, sphere.loss, sphere.predict)
    by_regression = learn(direct, lambda f, y: F.smooth_l1_loss(direct(f), y), direct)
    assert by_sphere < 0.75 * by_regression


def test_messages():
    o, s, y = torch.randn(6, 3), torch.randn(6, 8), torch.randn(6, 3)
    with pytest.raises(
        ValueError, match=r"spherical_loss: `sign_logits` must have shape \(6, 4\), one class per choice"
    ):
        spherical_loss(o, s, y, signed=(0, 1))
    with pytest.raises(ValueError, match=r"spherical_loss: `signed` must hold coordinates from -3 to 2, got"):
        spherical_loss(o, s, y, signed=(0, 1, 3))
    with pytest.raises(ValueError, match=r"`target` must have the shape of `magnitude_logits` \(6, 3\), got \(6, 2\)"):
        spherical_loss(o, s, y[:, :2])
    with pytest.raises(ValueError, match="SphericalHead: `sphere` must be one of 1, 2, 3, got 4"):
        SphericalHead(5, 4)
