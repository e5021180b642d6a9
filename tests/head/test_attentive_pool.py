"""Attentive pooling: the formula, its tails, masks and modalities, and what the head learns from bags."""

import pytest
import torch
import torch.nn.functional as F

import lastlayer as ll
from lastlayer.head import AttentivePoolHead, attentive_pool

F64 = torch.float64


def by_hand(x, a, b=None):
    weight = a.softmax(-2 if b is None else -3)
    if b is not None:
        weight = weight * b.softmax(-2)
        weight = weight / weight.sum((-3, -2), keepdim=True)
    p = (weight * x.sigmoid()).sum(-2 if b is None else (-3, -2))
    return p.logit()


def test_is_the_weighted_mean_of_the_probabilities():
    x, a, b = torch.randn(3, 4, 5, 2, 6, dtype=F64).unbind(0)
    torch.testing.assert_close(attentive_pool(x[:, :, 0], a[:, :, 0]), by_hand(x[:, :, 0], a[:, :, 0]))
    torch.testing.assert_close(attentive_pool(x, a, modality_logits=b), by_hand(x, a, b))
    mean = x[:, :, 0].sigmoid().mean(-2)
    torch.testing.assert_close(attentive_pool(x[:, :, 0], torch.zeros(1, dtype=F64)).sigmoid(), mean)


def test_two_modalities_as_published_can_exceed_one():
    a = torch.tensor([[9.0, -9.0], [-9.0, 9.0]]).unsqueeze(-1)  # instance 0 for modality 0, instance 1 for modality 1
    weight = a.softmax(0) * a.softmax(1)
    assert weight.sum() > 1.99
    assert attentive_pool(torch.full((2, 2, 1), 3.0), a, modality_logits=a).item() == pytest.approx(3.0, abs=1e-5)


@pytest.mark.parametrize("value", [-200.0, -40.0, 40.0, 200.0])
def test_the_tails_are_exact(value):
    x = torch.full((3, 2), value)
    torch.testing.assert_close(attentive_pool(x, torch.randn(3, 2)), torch.full((2,), value))


@pytest.mark.parametrize("modalities", [1, 2])
def test_a_masked_instance_is_as_if_it_were_not_there(modalities):
    x, a, b = (torch.randn(4, 3, 5, dtype=F64) for _ in range(3))
    mask = torch.tensor([True, True, False, True])
    if modalities == 1:
        full = attentive_pool(x[:, 0], a[:, 0], mask)
        torch.testing.assert_close(full, attentive_pool(x[mask, 0], a[mask, 0]))
        return
    full = attentive_pool(x, a, mask[:, None].expand(4, 3), modality_logits=b)
    torch.testing.assert_close(full, attentive_pool(x[mask], a[mask], modality_logits=b[mask]))
    one = torch.tensor([True, False, True]).expand(4, 3)  # a modality that is not there
    kept = [t[:, [0, 2]] for t in (x, a, b)]
    torch.testing.assert_close(
        attentive_pool(x, a, one, modality_logits=b), attentive_pool(*kept[:2], modality_logits=kept[2])
    )


def test_a_bag_without_instances_has_no_label_and_no_gradient():
    x, a = torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 3, 4, requires_grad=True)
    bag = attentive_pool(x, a, torch.tensor([[True] * 3, [False] * 3]))
    assert (bag[1] == -torch.inf).all()
    grads = torch.autograd.grad(bag[0].sum(), (x, a))
    assert all(g.isfinite().all() and (g[1] == 0).all() for g in grads)


def test_gradients():
    x, a, b = (torch.randn(2, 3, 2, 4, dtype=F64, requires_grad=True) for _ in range(3))
    mask = torch.tensor([[[True, True], [True, False], [False, False]], [[True, True]] * 3])
    assert torch.autograd.gradcheck(lambda *t: attentive_pool(t[0], t[1], mask, modality_logits=t[2]), (x, a, b))
    assert torch.autograd.gradgradcheck(lambda *t: attentive_pool(t[0][:, :, 0], t[1][:, :, 0], None), (x, a))


def test_the_loss_is_that_of_the_bag_and_of_each_modality():
    head = AttentivePoolHead(4, 3, n_modalities=2, label_smoothing=0.2).double()
    for layer in (head.attention, head.modality):
        torch.nn.init.normal_(layer.weight)
    features, y = torch.randn(5, 6, 2, 4, dtype=F64), (torch.rand(5, 3) < 0.5).to(F64)
    x, a, b = (layer(features) for layer in (head.linear, head.attention, head.modality))
    expected = F.binary_cross_entropy_with_logits(by_hand(x, a, b), y, reduction="sum") / 5
    for m in range(2):
        alone = by_hand(x[:, :, m], a[:, :, m])
        expected = expected + F.binary_cross_entropy_with_logits(alone, 0.8 * y + 0.1, reduction="sum") / 5
    torch.testing.assert_close(head.loss(features, y), expected)
    whole = torch.ones(5, 6, 2, dtype=torch.bool)
    torch.testing.assert_close(head.loss(features, y, whole), expected)
    torch.testing.assert_close(head.predict(features), by_hand(x, a, b).sigmoid())
    assert head.instances(features).shape == (5, 6, 2, 3)


def test_the_head_finds_the_instance_that_has_the_label():
    torch.manual_seed(0)
    features = torch.randn(256, 6, 8)
    truth = features[..., :3] > 1.0  # a class of an instance is one of its features
    target = truth.any(-2).float()
    head = AttentivePoolHead(8, 3)
    optimiser = torch.optim.Adam(head.parameters(), 0.05)
    for _ in range(100):
        optimiser.zero_grad()
        head.loss(features, target).backward()
        optimiser.step()
    found = (head.instances(features) > 0.5) == truth
    assert found.float().mean() > 0.9


def test_messages():
    x = torch.randn(2, 3, 4)
    with pytest.raises(ValueError, match=r"attentive_pool: `logits` must have the shape \(\*batch, n_instances, n_cl"):
        attentive_pool(torch.randn(4), torch.randn(4))
    with pytest.raises(ValueError, match=r"`attention_logits` must broadcast to the shape of `logits`, \(2, 3, 4\)"):
        attentive_pool(x, torch.randn(2, 3, 5))
    with pytest.raises(ValueError, match=r"`mask` must have the shape \(2, 3\), one entry per instance, got \(2, 4\)"):
        attentive_pool(x, x, torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(TypeError, match="attentive_pool: `mask` must be a boolean tensor"):
        attentive_pool(x, x, torch.ones(2, 3))
    with pytest.raises(ValueError, match="AttentivePoolHead: `n_modalities` must be a positive integer, got 0"):
        AttentivePoolHead(4, 3, n_modalities=0)
    with pytest.raises(
        ValueError, match=r"must have the shape \(\*batch, n_instances, 2, in_features\), got \(5, 3, 4\)"
    ):
        AttentivePoolHead(4, 3, n_modalities=2).loss(torch.randn(5, 3, 4), torch.zeros(5, 3))


@pytest.mark.parametrize("masked", [False, True])
def test_a_class_that_is_ruled_out_has_no_gradient(masked):
    """Also where only an absent instance has a score for it, and whatever the absent instance holds."""
    x, a = torch.randn(2, 4, 3), torch.randn(2, 4, 3)
    mask = torch.tensor([[True, True, True, False], [True] * 4]) if masked else None
    expected = attentive_pool(x[..., :2], a[..., :2], mask)
    x[..., 2] = -torch.inf
    if masked:
        x[0, 3] = torch.tensor([torch.nan, torch.inf, 0.5])
    x.requires_grad_()
    a.requires_grad_()
    bag = attentive_pool(x, a, mask)
    assert (bag[..., 2] == -torch.inf).all()
    torch.testing.assert_close(bag[..., :2], expected)
    for grad in torch.autograd.grad(ll.binary_loss(bag, torch.tensor([0, 1])), (x, a)):
        assert grad.isfinite().all()
        assert (grad[..., 2] == 0).all()
    assert (attentive_pool(x[:, :0], a[:, :0]) == -torch.inf).all()  # no instance
