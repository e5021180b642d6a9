"""UniLoss: the printed interpolation and its gradient, true metric values of bit patterns, and what it learns."""

import pytest
import torch

from lastlayer import MetricRefactoring, MetricSurrogateLoss, metric_surrogate_loss
from lastlayer.loss.surrogate import _anchors, _interpolated, _refactoring

F64 = torch.float64
METRICS = ["accuracy", "average_precision", "recall_at_2", "recall_at_k"]


def seeded(logits, target, metric, seed=0, **options):
    return metric_surrogate_loss(logits, target, metric, generator=torch.Generator().manual_seed(seed), **options)


def average_precision(scores, hot):
    order = scores.argsort(descending=True)
    hits = hot[order].float()
    return ((hits.cumsum(0) / torch.arange(1, len(hits) + 1)) * hits).sum() / hits.sum()


def recall(scores, hot, k):
    return hot[scores.topk(k).indices].float().sum() / hot.sum()


def test_values_of_real_rankings_are_the_metrics():
    scores, hot = torch.randn(5, 7), torch.rand(5, 7) < 0.4
    hot[:, 0] = True
    rows = list(zip(scores, hot, strict=True))
    for refactoring, exact in (
        (MetricRefactoring.average_precision(), [average_precision(s, h) for s, h in rows]),
        (MetricRefactoring.recall_at_k(3), [recall(s, h, 3) for s, h in rows]),
        (MetricRefactoring.recall_at_k(), [recall(s, h, int(h.sum())) for s, h in rows]),
    ):
        bits = refactoring.comparisons(scores, hot) > 0
        torch.testing.assert_close(refactoring.value(bits[None], hot)[0], torch.stack(exact).mean())
    y = torch.tensor([0, 1, 2, 3, -1])
    refactoring = MetricRefactoring.accuracy()
    bits = refactoring.comparisons(scores, y) > 0
    exact = (scores.argmax(-1) == y)[:4].float().mean()
    torch.testing.assert_close(refactoring.value(bits[None], y)[0], exact)


@pytest.mark.parametrize("metric", ["average_precision", "recall_at_1", "recall_at_2", "recall_at_k"])
def test_the_best_configuration_is_that_of_a_ranking(metric):
    """The anchor that all others are drawn around: no two labels may each have to beat the other."""
    hot = torch.tensor([[1.0, 1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0, 0.0]])
    scores = hot - 0.1 * torch.arange(5)  # labels above the rest
    refactoring = _refactoring(metric)
    comparisons = refactoring.comparisons(scores, hot)
    assert (comparisons > 0).all()
    best = refactoring.value(torch.ones(1, *comparisons.shape, dtype=torch.bool), hot)
    places = {"recall_at_1": (1 / 3 + 1) / 2, "recall_at_2": (2 / 3 + 1) / 2}.get(metric, 1.0)
    torch.testing.assert_close(best, torch.tensor([places]))


def test_average_precision_of_an_impossible_pattern():
    # Labels 0 and 1, others 2 and 3; label 0 is above neither, label 1 above both: v = (0, 2), AP = (1 + 2/4) / 2.
    bits = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    bits[0, 0, 0, 2:] = False
    value = MetricRefactoring.average_precision().value(bits, torch.tensor([[1, 1, 0, 0]], dtype=torch.int8))
    assert value.tolist() == [0.75]


def test_interpolation_by_hand():
    c = torch.randn(5, dtype=F64, requires_grad=True)
    bits, value = torch.rand(7, 5) < 0.5, torch.rand(7, dtype=F64)
    u = c.sigmoid()
    d = (u - bits.to(F64)).norm(dim=-1)
    e = (value / d).sum() / (1 / d).sum()
    torch.testing.assert_close(_interpolated(c, bits, value), e)
    # The gradient in closed form: attraction to anchors better than the current value, repulsion from worse.
    exact = -((value - e)[:, None] * (u - bits.to(F64)) / d[:, None] ** 3).sum(0) / (1 / d).sum() * u * (1 - u)
    (grad,) = torch.autograd.grad(_interpolated(c, bits, value), c)
    torch.testing.assert_close(grad, exact.detach())


def test_anchor_is_exact():
    c = torch.tensor([200.0, -200.0, 200.0], requires_grad=True)  # saturated: u is the first anchor
    bits = torch.tensor([[True, False, True], [True, True, True]])
    value = _interpolated(c, bits, torch.tensor([0.25, 1.0]))
    assert value.item() == 0.25
    assert torch.autograd.grad(value, c)[0].tolist() == [0.0, 0.0, 0.0]


def test_kinds_of_anchors():
    c = torch.tensor([1.0, -1.0, torch.inf, 2.0, -3.0])
    best = torch.ones(5, dtype=torch.bool)
    good, near, random = _anchors(c, best, 6, torch.Generator().manual_seed(0)).chunk(3)
    assert good[0].all()
    assert ((~good[1:]).sum(-1) == 1).all()
    now = c > 0
    assert ((near != now).sum(-1) == 1).all()
    assert ((~near).sum(-1) == 1).all()  # one of two wrong bits put right
    assert random[:, 2].all()  # settled
    near = _anchors(c.abs(), best, 6, None)[6:12]
    assert ((~near).sum(-1) == 1).all()


@pytest.mark.parametrize("metric", METRICS)
def test_gradient_is_that_of_the_formula(metric):
    x = torch.randn(3, 5, dtype=F64, requires_grad=True)
    target = torch.tensor([[1, 0, 0, 1, 0], [0, 1, -1, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.int8)
    assert torch.autograd.gradcheck(lambda x: seeded(x, target, metric, anchors=4), x)
    assert torch.autograd.gradgradcheck(lambda x: seeded(x, target, metric, anchors=4), x)


@pytest.mark.parametrize("metric", METRICS)
def test_confident_scores_have_the_metric(metric):
    target = torch.tensor([[1, 0, 0, 0, 0], [0, 0, 1, 0, 0]], dtype=torch.int8)
    scores = 200.0 * target - 400.0 * torch.arange(5) / 5
    scores[1, 2] += 400
    assert metric_surrogate_loss(scores, target, metric).item() == -1.0
    wrong = metric_surrogate_loss(-scores, target, metric).item()  # near anchors, and at none of them
    assert wrong > -0.9


@pytest.mark.parametrize("metric", METRICS)
def test_edges(metric):
    x = torch.randn(3, 4, requires_grad=True)
    for logits, target in (
        (x, torch.full((3,), -1)),
        (x, torch.zeros(3, 4)),
        (x, torch.full((3, 4), -1.0)),
        (x, torch.ones(3, 4)),
        (x[:, :1], torch.zeros(3, dtype=torch.long)),
        (x[:0], torch.zeros(0, dtype=torch.long)),
        (1e4 * x, torch.tensor([0, 1, 2])),
    ):
        loss = metric_surrogate_loss(logits, target, metric)
        assert loss.shape == ()
        assert loss.isfinite()
        if loss.requires_grad:
            assert torch.autograd.grad(loss, x)[0].isfinite().all()
    assert metric_surrogate_loss(x, torch.zeros(3, 4), metric) == 0
    out = torch.tensor([[1.0, -torch.inf, 0.0]], requires_grad=True)
    (grad,) = torch.autograd.grad(metric_surrogate_loss(out, torch.tensor([2]), metric), out)
    assert grad.isfinite().all()
    assert grad[0, 1] == 0
    for dtype in (torch.float16, torch.bfloat16):
        assert metric_surrogate_loss(x.to(dtype), torch.tensor([0, 1, 2]), metric).dtype == dtype


@pytest.mark.parametrize("metric", METRICS)
def test_target_forms_unknown_and_seed(metric):
    x = torch.randn(3, 4)
    lists = torch.tensor([[1, 3], [2, -1], [0, -1]])
    hot = torch.tensor([[0, 1, 0, 1], [0, 0, 1, 0], [1, 0, 0, 0]], dtype=torch.int8)
    torch.testing.assert_close(seeded(x, lists, metric), seeded(x, hot, metric))
    unknown, changed = hot.clone(), x.clone()
    unknown[:2, 0] = -1
    changed[:2, 0] = 7
    torch.testing.assert_close(seeded(x, unknown, metric), seeded(changed, unknown, metric))
    assert seeded(x, hot, metric, seed=1) != seeded(x, hot, metric, seed=2)


def test_own_metric_and_module():
    hits = MetricRefactoring(lambda s, t: s[..., 0] - s[..., 1], lambda bits, t: bits.float().mean(-1))
    loss = metric_surrogate_loss(torch.tensor([[300.0, 0.0], [0.0, 300.0]]), torch.zeros(2, 2), hits)
    assert -1 < loss < 0
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    module = MetricSurrogateLoss("accuracy", anchors=3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(module(x, y), seeded(x, y, "accuracy", anchors=3))


@pytest.mark.slow
def test_compiles():
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    compiled = torch.compile(metric_surrogate_loss, fullgraph=True, backend="aot_eager")
    assert compiled(x, y, "accuracy").isfinite()


def test_learns():
    generator = torch.Generator().manual_seed(0)
    centers = 2 * torch.randn(4, 6, generator=generator)
    y = torch.randint(4, (200,), generator=generator)
    x = centers[y] + 0.7 * torch.randn(200, 6, generator=generator)
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    before = (model(x).argmax(-1) == y).float().mean()
    for _ in range(60):
        optimizer.zero_grad()
        metric_surrogate_loss(model(x), y, "accuracy", generator=generator).backward()
        optimizer.step()
    after = (model(x).argmax(-1) == y).float().mean()
    assert after > max(0.9, before + 0.2)


def test_messages():
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    with pytest.raises(ValueError, match=r"metric_surrogate_loss: `metric` must be 'accuracy'.*got 'f1'"):
        metric_surrogate_loss(x, y, "f1")
    with pytest.raises(ValueError, match="metric_surrogate_loss: `anchors` must be a positive integer, got 0"):
        metric_surrogate_loss(x, y, "accuracy", anchors=0)
    with pytest.raises(TypeError, match="metric_surrogate_loss: `target` must be a tensor, got list"):
        metric_surrogate_loss(x, [0, 1, 2, 0], "accuracy")
    with pytest.raises(
        ValueError, match=r"MetricRefactoring.recall_at_k: `k` must be a positive integer or None, got 0"
    ):
        MetricRefactoring.recall_at_k(0)


@pytest.mark.parametrize("metric", ["accuracy", "average_precision", "recall_at_2"])
def test_one_row_without_a_batch(metric):
    x = torch.randn(4)
    for target in (torch.tensor([0.0, 1, 0, 1]), torch.tensor(2)):
        loss = metric_surrogate_loss(x, target, metric, generator=torch.Generator().manual_seed(0))
        expected = metric_surrogate_loss(x[None], target[None], metric, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(loss, expected)
