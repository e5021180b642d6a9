"""The quasibinary head: its moving average, batches without labels, and what it learns."""

import math

import pytest
import torch

from lastlayer import QuasibinaryHead, quasibinary_loss


def test_average_is_of_the_normaliser():
    head = QuasibinaryHead(4, 3, momentum=0.25)
    assert head.log_normalizer.item() == pytest.approx(math.log(3))
    seen = []
    for _ in range(3):
        features = torch.randn(5, 4)
        head.loss(features, torch.tensor([0, 1, -1, 2, -1]))
        seen.append(head(features).exp().sum().item() / 3)
    mean = seen[0]
    for c in seen[1:]:
        mean = 0.75 * mean + 0.25 * c
    assert head.log_normalizer.item() == pytest.approx(math.log(mean), rel=1e-5)
    assert head.num_batches_tracked.item() == 3


def test_loss_is_the_function_in_training_and_the_average_else():
    head, features, target = QuasibinaryHead(4, 3), torch.randn(5, 4), torch.tensor([0, 1, -1, 2, -1])
    torch.testing.assert_close(head.loss(features, target), quasibinary_loss(head(features), target))
    head.eval()
    before = head.log_normalizer.clone()
    expected = quasibinary_loss(head(features), target, log_normalizer=before)
    torch.testing.assert_close(head.loss(features, target), expected)
    assert torch.equal(head.log_normalizer, before)
    assert head.num_batches_tracked == 1


def test_batch_without_labels_pushes_down_and_leaves_the_average():
    head, features = QuasibinaryHead(4, 3), torch.randn(5, 4)
    head.loss(features, torch.tensor([0, 1, 0, 2, 1]))
    before = head.log_normalizer.clone()
    loss = head.loss(features, torch.full((5,), -1))
    q = (head(features) - before).exp()
    (grad,) = torch.autograd.grad(loss, head.linear.bias)
    torch.testing.assert_close(grad, q.clamp(max=1).sum(0) / 5, rtol=1e-5, atol=1e-6)
    assert torch.equal(head.log_normalizer, before)
    assert head.num_batches_tracked == 1
    huge = head.loss(1e5 * features, torch.full((5,), -1))
    assert huge.isfinite()


def test_the_gradient_has_no_step_where_the_loss_becomes_linear():
    head = QuasibinaryHead(1, 2)
    with torch.no_grad():
        head.linear.weight.zero_()
        head.linear.bias.copy_(head.log_normalizer)
    loss = head.loss(torch.zeros(3, 1), torch.full((3,), -1))
    assert torch.autograd.grad(loss, head.linear.bias)[0].tolist() == [1.0, 1.0]


def test_predictions_are_clipped():
    head = QuasibinaryHead(2, 2)
    p = head.predict(1e6 * torch.randn(50, 2))
    assert ((p >= 0) & (p <= 1)).all()
    assert (p == 1).any()


def test_state_travels():
    head = QuasibinaryHead(4, 3)
    head.loss(torch.randn(5, 4), torch.tensor([0, 1, -1, 2, -1]))
    other = QuasibinaryHead(4, 3)
    other.load_state_dict(head.state_dict())
    features = torch.randn(2, 4)
    assert torch.equal(other.predict(features), head.predict(features))
    assert "momentum=0.1" in repr(head)


def test_a_row_of_weight_0_may_hold_any_features():
    torch.manual_seed(0)
    head, alone = QuasibinaryHead(4, 3), QuasibinaryHead(4, 3)
    alone.load_state_dict(head.state_dict())
    features, y, weight = torch.randn(3, 4), torch.tensor([0, 2, 1]), torch.tensor([1.0, 0.0, 2.0])
    features[1] *= 1e5
    loss = head.loss(features, y, sample_weight=weight)
    torch.testing.assert_close(loss, alone.loss(features[[0, 2]], y[[0, 2]], sample_weight=weight[[0, 2]]))
    torch.testing.assert_close(head.log_normalizer, alone.log_normalizer)


def test_classes_without_labels_get_low_confidence():
    """20 known classes and 10 whose rows come without a label: the thesis's experiment in small."""
    generator = torch.Generator().manual_seed(0)
    centers = 1.5 * torch.randn(30, 20, generator=generator)

    def batch(size):
        y = torch.randint(30, (size,), generator=generator)
        return centers[y] + 0.7 * torch.randn(size, 20, generator=generator), torch.where(y < 20, y, -1)

    head = QuasibinaryHead(20, 20)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.03)
    for _ in range(400):
        optimizer.zero_grad()
        head.loss(*batch(128)).backward()
        optimizer.step()
    features, y = batch(2000)
    with torch.no_grad():
        confidence, guess = head.eval().predict(features).max(-1)
    known = y >= 0
    assert (guess == y)[known].float().mean() > 0.95
    assert confidence[known].mean() > 0.5
    assert confidence[~known].mean() < 0.1  # a softmax over 20 classes is far above, and never below 1/20
