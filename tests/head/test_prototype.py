"""Prototype and reciprocal-point heads: formulas, edges, and what they learn."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lastlayer import PrototypeHead, ReciprocalPointHead, auroc, reciprocal_point_loss

F64 = torch.float64


def test_single_label_is_a_softmax_of_distances():
    head = PrototypeHead(4, 3, width=torch.tensor([1.0, 2.0, 0.5])).double()
    nn.init.normal_(head.weight)
    features, y = torch.randn(6, 4, dtype=F64), torch.tensor([0, 1, 2, 2, 1, 0])
    distance = (features[:, None] - head.weight).square().sum(-1) / head.width
    torch.testing.assert_close(head(features), -distance)
    torch.testing.assert_close(head.predict(features), (-distance).softmax(-1))
    torch.testing.assert_close(head.loss(features, y), F.cross_entropy(-distance, y))


def test_multilabel_is_a_softmax_of_two():
    head = PrototypeHead(4, 3, multilabel=True, width=2.0).double()
    nn.init.normal_(head.weight)
    nn.init.normal_(head.absent)
    features = torch.randn(6, 4, dtype=F64)
    present, absent = ((features[:, None] - w).square().sum(-1) / 2 for w in (head.weight, head.absent))
    exact = (-present).exp() / ((-present).exp() + (-absent).exp())
    torch.testing.assert_close(head.predict(features), exact)
    target = (torch.rand(6, 3) < 0.5).to(F64)
    assert head.loss(features, target).isfinite()


def test_far_features_are_finite():
    for head in (PrototypeHead(4, 3), PrototypeHead(4, 3, multilabel=True), ReciprocalPointHead(4, 3)):
        features = (100 * torch.randn(5, 4)).requires_grad_()
        loss = head.loss(features, torch.tensor([0, 1, 2, 0, 1]))
        assert loss.isfinite()
        loss.backward()
        assert features.grad.isfinite().all()
        assert head.predict(features).isfinite().all()
        assert head(torch.randn(2, 7, 4)).shape == (2, 7, 3)
        assert head(torch.randn(0, 4)).shape == (0, 3)
        assert head.loss(features, torch.full((5,), -1)) == 0 or isinstance(head, PrototypeHead)


def test_reciprocal_loss_by_hand():
    f, points = torch.randn(5, 3, dtype=F64), torch.randn(4, 2, 3, dtype=F64)
    radius, y = torch.rand(4, dtype=F64), torch.tensor([0, 3, 1, -1, 2])
    d = (f[:, None, None] - points).square().sum(-1)
    rows = torch.arange(5)
    expected = F.cross_entropy(0.7 * d.mean(-1), y.clamp(min=0), reduction="none")
    expected = expected + 0.2 * (d[rows, y] - radius[y][:, None]).square().mean(-1)
    expected = torch.where(y >= 0, expected, 0)
    loss = reciprocal_point_loss(f, points, radius, y, scale=0.7, open_weight=0.2, reduction="none")
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        reciprocal_point_loss(f, points, radius, y, scale=0.7, open_weight=0.2), expected.sum() / 4
    )
    hot = F.one_hot(y.clamp(min=0), 4).bool() & (y >= 0)[:, None]
    torch.testing.assert_close(
        reciprocal_point_loss(f, points, radius, hot), reciprocal_point_loss(f, points, radius, y)
    )
    inputs = tuple(t.requires_grad_() for t in (f, points, radius))
    assert torch.autograd.gradcheck(lambda *t: reciprocal_point_loss(*t, y), inputs)
    assert torch.autograd.gradgradcheck(lambda *t: reciprocal_point_loss(*t, y), inputs)


@pytest.mark.slow
@pytest.mark.parametrize("score", [torch.nan, torch.inf])
def test_rows_left_out_of_the_reciprocal_loss_do_not_reach_the_points(score):
    features, points, radius = torch.randn(3, 4), torch.randn(5, 2, 4), torch.zeros(5)
    features[1:] = score
    given = [t.requires_grad_() for t in (features, points, radius)]
    reciprocal_point_loss(*given, torch.tensor([2, -1, 0]), sample_weight=torch.tensor([1.0, 1.0, 0.0])).backward()
    alone = [t.detach().clone().requires_grad_() for t in (features[:1], points, radius)]
    reciprocal_point_loss(*alone, torch.tensor([2])).backward()
    assert (features.grad[1:] == 0).all()
    torch.testing.assert_close(features.grad[:1], alone[0].grad)
    torch.testing.assert_close(points.grad, alone[1].grad)
    torch.testing.assert_close(radius.grad, alone[2].grad)


def test_small_row_weights_of_the_reciprocal_loss_survive_float16():
    features, points, radius = torch.randn(3, 4).half().requires_grad_(), torch.randn(5, 2, 4), torch.zeros(5)
    target = torch.tensor([2, 1, 0])
    even = reciprocal_point_loss(features, points, radius, target)
    small = reciprocal_point_loss(features, points, radius, target, sample_weight=torch.full((3,), 1e-8))
    torch.testing.assert_close(small, even)
    (wanted,), (found,) = (torch.autograd.grad(loss, features) for loss in (even, small))
    torch.testing.assert_close(found, wanted)


def test_heads_compile():
    features, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    for head in (PrototypeHead(4, 3), PrototypeHead(4, 3, multilabel=True), ReciprocalPointHead(4, 3, n_points=2)):
        compiled = torch.compile(head.loss, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(features, y), head.loss(features, y))
        torch.testing.assert_close(torch.export.export(head, (features,)).module()(features), head(features))
        assert "n_classes=3" in repr(head)


def train(body, head, batch, steps):
    optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=0.01)
    for _ in range(steps):
        x, y = batch()
        optimizer.zero_grad()
        head.loss(body(x), y).backward()
        optimizer.step()


def test_confused_classes_have_prototypes_near_each_other():
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(4, 16, generator=generator).repeat_interleave(2, 0)  # pairs of classes that look alike
    centers = centers + 0.1 * torch.randn(8, 16, generator=generator)

    def batch():
        y = torch.randint(8, (128,), generator=generator)
        return centers[y] + 0.5 * torch.randn(128, 16, generator=generator), y

    body, head = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)), PrototypeHead(8, 8)
    train(body, head, batch, 250)
    distance = torch.cdist(head.weight, head.weight).detach().fill_diagonal_(torch.inf)
    assert distance.argmin(-1).tolist() == [1, 0, 3, 2, 5, 4, 7, 6]


def test_reciprocal_points_tell_known_from_unknown():
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(10, 16, generator=generator)

    def draw(low, high, n=128):
        y = torch.randint(low, high, (n,), generator=generator)
        return centers[y] + 0.5 * torch.randn(n, 16, generator=generator), y

    body, head = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)), ReciprocalPointHead(16, 6)
    train(body, head, lambda: draw(0, 6), 200)
    (known, y), (unknown, _) = draw(0, 6, 1000), draw(6, 10, 1000)
    with torch.no_grad():
        assert (head(body(known)).argmax(-1) == y).float().mean() > 0.95
        score = torch.cat([head.known_score(body(known)), head.known_score(body(unknown))])
    assert auroc(score, torch.arange(2000) < 1000) > 0.9


def test_messages():
    f, points, radius, y = torch.randn(5, 3), torch.randn(4, 2, 3), torch.rand(4), torch.zeros(5, dtype=torch.long)
    with pytest.raises(ValueError, match=r"reciprocal_point_loss: `points` must have shape \(n_classes, M, 3\), got"):
        reciprocal_point_loss(f, points[..., :2], radius, y)
    with pytest.raises(ValueError, match=r"reciprocal_point_loss: `radius` must have shape \(4,\), got \(3,\)"):
        reciprocal_point_loss(f, points, radius[:3], y)
    with pytest.raises(ValueError, match=r"PrototypeHead: `width` must be positive and finite, got 0.0"):
        PrototypeHead(3, 4, width=0.0)
    with pytest.raises(ValueError, match="ReciprocalPointHead: `open_weight` must be between 0 and inf, got -1"):
        ReciprocalPointHead(3, 4, open_weight=-1)
    with pytest.raises(ValueError, match=r"PrototypeHead: `width` must be one number or one per class \(4\)"):
        PrototypeHead(3, 4, width=torch.ones(3))
    with pytest.raises(ValueError, match="ReciprocalPointHead: `n_points` must be a positive integer, got 0"):
        ReciprocalPointHead(3, 4, n_points=0)
    with pytest.raises(ValueError, match="reciprocal_point_loss: `points` must hold at least one point per class"):
        reciprocal_point_loss(f, points[:, :0], radius, y)
    with pytest.raises(TypeError, match="reciprocal_point_loss: `radius` must be a tensor, got float"):
        reciprocal_point_loss(f, points, 1.0, y)


def test_widths_of_older_checkpoints_load():
    head = PrototypeHead(3, 4, width=2.0)
    state = head.state_dict()
    state["gamma"] = state.pop("width")
    fresh = PrototypeHead(3, 4)
    fresh.load_state_dict(state)
    assert torch.equal(fresh.width, torch.full((4,), 2.0))


def test_old_names_keep_working():
    f, points, radius, y = torch.randn(5, 3), torch.randn(4, 2, 3), torch.rand(4), torch.tensor([0, 1, 2, 3, 0])
    with pytest.warns(DeprecationWarning, match="reciprocal_point_loss: `gamma` is now called `scale`"):
        loss = reciprocal_point_loss(f, points, radius, y, gamma=0.7)
    assert loss == reciprocal_point_loss(f, points, radius, y, scale=0.7)
    with pytest.warns(DeprecationWarning, match="`weight` is now called `open_weight`"):
        head = ReciprocalPointHead(3, 4, weight=0.3)
    with pytest.warns(DeprecationWarning, match="`weight` is now called `open_weight`"):
        assert head.weight == head.open_weight == 0.3
    with pytest.warns(DeprecationWarning, match="PrototypeHead: `gamma` is now called `width`"):
        assert torch.equal(PrototypeHead(3, 4, gamma=2.0).gamma, torch.full((4,), 2.0))
    with pytest.raises(TypeError, match="PrototypeHead: `gamma` is the old name of `width`"):
        PrototypeHead(3, 4, gamma=2.0, width=1.0)


@pytest.mark.parametrize("head", [PrototypeHead(512, 4), ReciprocalPointHead(512, 4)])
def test_small_distances_of_long_vectors_survive_autocast(head):
    """They are what is left of the squares of lengths, 4,600 here: rounded to 8 bits, of 1.3 nothing is."""
    points = 3 * torch.randn(4, 512)
    parameter = head.weight if isinstance(head, PrototypeHead) else head.points
    with torch.no_grad():
        parameter.copy_(points.view_as(parameter))
    features = points + 0.05 * torch.randn(4, 512)
    with torch.autocast("cpu", torch.bfloat16):
        logits = head(features)
        loss = head.loss(features, torch.arange(4))
    assert logits.diagonal().abs().tolist() == pytest.approx([0.05**2 * 512] * 4, rel=0.3)
    torch.testing.assert_close(logits, head(features))
    torch.testing.assert_close(loss, head.loss(features, torch.arange(4)))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("head", [PrototypeHead(512, 8), ReciprocalPointHead(512, 8)])
def test_half_precision_is_that_of_features_and_not_of_distances(head, autocast):
    """Distances are hundreds here, where bfloat16 has steps of 2; what counts is their differences."""
    points = torch.randn(8, 512).bfloat16().float()
    parameter = head.weight if isinstance(head, PrototypeHead) else head.points
    with torch.no_grad():
        parameter.copy_(points.view_as(parameter))
    y = torch.arange(8)
    features = (points + points.roll(1, 0)).bfloat16() / 2
    exact = head.loss(features.float(), y, reduction="none")
    other = head if autocast else copy.deepcopy(head).bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss, p = other.loss(features, y, reduction="none"), other.predict(features)
    assert loss.dtype == (torch.float32 if autocast else torch.bfloat16)
    assert p.dtype == loss.dtype
    assert other(features).dtype == torch.bfloat16
    torch.testing.assert_close(loss.float(), exact, rtol=1e-2, atol=1e-4)
    torch.testing.assert_close(p.float(), head.predict(features.float()), rtol=1e-2, atol=4e-3)
