"""Top-k losses: against the printed formulas by enumeration and sorting."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from lastlayer import (
    SmoothTopKSVMLoss,
    TopKDistillationLoss,
    TruncatedEntropyLoss,
    smooth_topk_svm_loss,
    topk_distillation_loss,
    truncated_entropy_loss,
)

F64 = torch.float64


def svm_by_enumeration(x, y, k, tau, alpha):
    """The formula as printed: a sum over all subsets."""
    every, with_y = [], []
    for subset in itertools.combinations(range(len(x)), k):
        score = x[list(subset)].sum() / k / tau
        every.append(score + (0.0 if y in subset else alpha / tau))
        if y in subset:
            with_y.append(score)
    return tau * (torch.stack(every).logsumexp(0) - torch.stack(with_y).logsumexp(0))


def truncated_by_sorting(x, positives, k):
    """Equations 9 and 13: J is the m - k smallest of the classes that are not labels."""
    others = sorted(x[j].item() for j in range(len(x)) if j not in positives)[: len(x) - k]
    return sum(torch.tensor([0.0] + [v - x[y].item() for v in others], dtype=F64).logsumexp(0) for y in positives)


@pytest.mark.parametrize("n", [2, 4, 7])
@pytest.mark.parametrize(
    ("tau", "alpha", "scale"), [(1.0, 1.0, 1.0), (0.1, 0.5, 1.0), (0.05, 1.0, 20.0), (2.0, 1.0, 0.0)]
)
def test_svm_is_the_sum_over_subsets(n, tau, alpha, scale):
    x = scale * torch.randn(3, n, dtype=F64)
    y = torch.randint(n, (3,))
    for k in range(1, n + 1):
        x.requires_grad_()
        loss = smooth_topk_svm_loss(x, y, k, tau=tau, alpha=alpha, reduction="none")
        exact = torch.stack([svm_by_enumeration(a, b.item(), k, tau, alpha) for a, b in zip(x, y, strict=True)])
        if k == n:
            exact = exact * 0
        torch.testing.assert_close(loss, exact, rtol=1e-11, atol=1e-12)
        (grad,), (grad_exact,) = torch.autograd.grad(loss.sum(), x), torch.autograd.grad(exact.sum(), x)
        torch.testing.assert_close(grad, grad_exact, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("k", [1, 5, 30, 59])
@pytest.mark.parametrize("kind", ["normal", "near ties", "gap"])
def test_svm_of_long_rows_is_a_ratio_of_polynomials(k, kind):
    x = torch.randn(4, 60, dtype=F64)
    x = {"normal": x, "near ties": 1e-7 * x, "gap": x + torch.where(torch.arange(60) < k, 500.0, 0.0)}[kind]
    y, tau = torch.tensor([0, 20, 40, 59]), 0.1
    others = torch.stack([torch.cat([row[:c], row[c + 1 :]]) for row, c in zip(x, y.tolist(), strict=True)]) / (k * tau)
    e = [torch.zeros(4, dtype=F64)] + [torch.full((4,), -torch.inf, dtype=F64)] * k
    for i in range(59):
        e = [e[0]] + [torch.logaddexp(e[j], e[j - 1] + others[:, i]) for j in range(1, k + 1)]
    own = x.gather(1, y[:, None])[:, 0] / (k * tau)
    exact = tau * F.softplus(1 / tau + e[k] - e[k - 1] - own, threshold=100)
    loss = smooth_topk_svm_loss(x, y, k, tau=tau, reduction="none")
    torch.testing.assert_close(loss, exact, rtol=1e-10, atol=1e-12)


def test_svm_goes_to_the_hinge():
    x = torch.tensor([[1.0, 3.0, 2.0, 0.0]], dtype=F64)
    hinge = (1 + (3 + 2) / 2 - (3 + 1) / 2) * 1.0  # the best pair without the label, against the best with it
    loss = smooth_topk_svm_loss(x, torch.tensor([0]), 2, tau=1e-3)
    assert loss.item() == pytest.approx(hinge, abs=1e-2)


def test_svm_at_one_place():
    x = torch.randn(5, 6, dtype=F64)
    y = torch.randint(6, (5,))
    margin = 1 - F.one_hot(y, 6)
    torch.testing.assert_close(smooth_topk_svm_loss(x, y, 1), F.cross_entropy(x + margin, y))


def test_svm_gradients():
    x = torch.randn(2, 6, dtype=F64, requires_grad=True)
    y = torch.tensor([1, 4])
    for k in (1, 3, 5):
        assert torch.autograd.gradcheck(lambda x, k=k: smooth_topk_svm_loss(x, y, k), x, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(lambda x, k=k: smooth_topk_svm_loss(x, y, k), x)


def test_svm_in_float32_on_long_rows():
    x = 3 * torch.randn(8, 300, requires_grad=True)
    y = torch.randint(300, (8,))
    for k in (3, 100, 299):
        single = smooth_topk_svm_loss(x, y, k)
        double = smooth_topk_svm_loss(x.double(), y, k)
        torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=1e-6)
        a, b = torch.autograd.grad(single, x)[0], torch.autograd.grad(double, x)[0]
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)
        assert x.new_tensor(single.item()).isfinite()


def test_svm_edges():
    x = torch.randn(3, 4)
    assert smooth_topk_svm_loss(x, torch.tensor([0, 1, 2]), 4) == 0  # everything fits
    assert smooth_topk_svm_loss(x[:, :1], torch.tensor([0, 0, 0]), 1) == 0
    assert smooth_topk_svm_loss(x, torch.full((3,), -1), 2) == 0
    assert smooth_topk_svm_loss(x[:0], torch.zeros(0, dtype=torch.long), 2) == 0
    none = torch.zeros(0, 64, requires_grad=True)
    loss = smooth_topk_svm_loss(none, torch.zeros(0, dtype=torch.long), 20)
    assert loss == 0
    assert torch.autograd.grad(loss, none)[0].shape == (0, 64)
    masked = x.clone()
    masked[:, 3] = -torch.inf
    masked.requires_grad_()
    loss = smooth_topk_svm_loss(masked, torch.tensor([0, 1, 2]), 2)
    torch.testing.assert_close(loss, smooth_topk_svm_loss(x[:, :3], torch.tensor([0, 1, 2]), 2))
    (grad,) = torch.autograd.grad(loss, masked)
    assert grad.isfinite().all()
    assert (grad[:, 3] == 0).all()
    short = smooth_topk_svm_loss(masked, torch.tensor([0, 1, 2]), 3)  # two others are left for three places
    assert short == 0
    assert torch.autograd.grad(short, masked)[0].eq(0).all()


@pytest.mark.parametrize("k", [1, 2, 3, 5, 6])
def test_truncated_is_the_printed_sum(k):
    x = torch.randn(4, 6, dtype=F64)
    lists = torch.tensor([[0, -1, -1], [3, 1, -1], [5, 4, 2], [2, -1, -1]])
    loss = truncated_entropy_loss(x, lists, k, reduction="none")
    exact = [truncated_by_sorting(a, [c for c in b.tolist() if c >= 0], k) for a, b in zip(x, lists, strict=True)]
    torch.testing.assert_close(loss, torch.stack(exact))


def test_truncated_at_one_place_is_cross_entropy():
    x, y = torch.randn(7, 9, requires_grad=True), torch.randint(9, (7,))
    loss, exact = truncated_entropy_loss(x, y, 1), F.cross_entropy(x, y)
    torch.testing.assert_close(loss, exact)
    torch.testing.assert_close(torch.autograd.grad(loss, x)[0], torch.autograd.grad(exact, x)[0])


def test_truncated_gradient():
    x = torch.randn(3, 7, dtype=F64, requires_grad=True)
    target = (torch.rand(3, 7) < 0.3).to(torch.int8)
    target[0, 0] = -1
    assert torch.autograd.gradcheck(lambda x: truncated_entropy_loss(x, target, 3), x)
    assert torch.autograd.gradgradcheck(lambda x: truncated_entropy_loss(x, target, 3), x)


def test_truncated_edges():
    x = torch.tensor([[1.0, 2.0, 3.0], [0.0, -torch.inf, 0.0]], requires_grad=True)
    hot = torch.tensor([[1, -1, 0], [1, 0, 0]], dtype=torch.int8)
    loss = truncated_entropy_loss(x, hot, 1, reduction="none")
    torch.testing.assert_close(loss, F.softplus(torch.tensor([2.0, 0.0])))
    assert torch.autograd.grad(loss.sum(), x)[0].isfinite().all()
    assert truncated_entropy_loss(x, hot, 3).item() == 0
    assert truncated_entropy_loss(x, torch.zeros(2, 3), 2).item() == 0  # no label
    assert truncated_entropy_loss(x, torch.ones(2, 3), 2, reduction="none")[0] == 0  # no rival
    assert truncated_entropy_loss(x[:0], torch.zeros(0, dtype=torch.long), 2) == 0
    ties = truncated_entropy_loss(torch.zeros(1, 4), torch.tensor([1]), 3)
    torch.testing.assert_close(ties, torch.tensor(2.0).log())  # two of three rivals dropped, ties or not


def test_distillation_by_hand():
    x, teacher = torch.randn(5, 8, dtype=F64), torch.randn(5, 8, dtype=F64)
    for temperature in (1.0, 3.0):
        s, t = (x / temperature).softmax(-1), (teacher / temperature).softmax(-1)
        full = F.kl_div(s.log(), t, reduction="batchmean") * temperature**2
        torch.testing.assert_close(topk_distillation_loss(x, teacher, 8, temperature=temperature), full)
        best = teacher.argsort(-1, descending=True)[:, :3]
        t, s = t.gather(1, best), s.gather(1, best)
        part = temperature**2 * (t * (t / s).log()).sum(-1)
        got = topk_distillation_loss(x, teacher, 3, temperature=temperature, reduction="none")
        torch.testing.assert_close(got, part)


def test_distillation_gradient_is_the_students_alone():
    x = torch.randn(3, 6, dtype=F64, requires_grad=True)
    teacher = torch.randn(3, 6, dtype=F64, requires_grad=True)
    teacher.data[0, 1] = -torch.inf
    assert torch.autograd.gradcheck(lambda x: topk_distillation_loss(x, teacher, 6), x)
    topk_distillation_loss(x, teacher, 2).backward()
    assert teacher.grad is None
    assert x.grad.isfinite().all()


def test_distillation_of_a_row_without_a_class():
    x = torch.tensor([[0.0, 1.0], [-torch.inf, -torch.inf], [0.5, 0.0]], requires_grad=True)
    teacher = torch.tensor([[1.0, 0.0], [-torch.inf, -torch.inf], [-torch.inf, -torch.inf]])
    loss = topk_distillation_loss(x, teacher, 2, reduction="none")
    assert loss[1:].tolist() == [0, 0]
    loss.sum().backward()
    assert x.grad[0, 0] < 0
    assert (x.grad[1:] == 0).all()


LOSSES = [
    lambda x, y: truncated_entropy_loss(x, y, 2),
    lambda x, y: smooth_topk_svm_loss(x, y, 2),
    lambda x, y: topk_distillation_loss(x, F.one_hot(y, x.shape[-1]).to(x), 2),
]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_large_logits_are_finite(loss, dtype):
    x = (1e4 * torch.randn(4, 6).sign() * torch.rand(4, 6)).to(dtype).requires_grad_()
    value = loss(x, torch.randint(6, (4,)))
    assert value.dtype == dtype
    assert value.isfinite()
    assert torch.autograd.grad(value, x)[0].isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_compile_vmap(loss):
    x, y = torch.randn(4, 6), torch.tensor([0, 3, 5, 2])
    expected = loss(x, y)
    torch.testing.assert_close(torch.compile(loss, fullgraph=True, backend="aot_eager")(x, y), expected)
    torch.testing.assert_close(torch.func.vmap(loss)(x[:, None], y[:, None]).mean(), expected)


def test_target_forms_agree():
    x, y = torch.randn(4, 6), torch.tensor([0, 3, 5, 2])
    for loss in LOSSES[:2]:
        expected = loss(x, y)
        torch.testing.assert_close(loss(x, y[:, None]), expected)
        torch.testing.assert_close(loss(x, F.one_hot(y, 6).bool()), expected)
        torch.testing.assert_close(loss(x, F.pad(y[:, None], (1, 1), value=-1)), expected)


def test_modules():
    x, y = torch.randn(4, 6), torch.tensor([0, 3, 5, 2])
    torch.testing.assert_close(TruncatedEntropyLoss(2)(x, y), truncated_entropy_loss(x, y, 2))
    torch.testing.assert_close(SmoothTopKSVMLoss(2, tau=0.5)(x, y), smooth_topk_svm_loss(x, y, 2, tau=0.5))
    torch.testing.assert_close(TopKDistillationLoss(2)(x, x.flip(0)), topk_distillation_loss(x, x.flip(0), 2))


def test_messages():
    x, y = torch.randn(4, 6), torch.tensor([0, 3, 5, 2])
    with pytest.raises(ValueError, match="truncated_entropy_loss: `k` must be between 1 and n_classes=6, got 7"):
        truncated_entropy_loss(x, y, 7)
    with pytest.raises(
        TypeError, match="smooth_topk_svm_loss: `k` must be a Python integer, the number of places, got"
    ):
        smooth_topk_svm_loss(x, y, 2.5)
    with pytest.raises(ValueError, match="smooth_topk_svm_loss: `tau` must be positive and finite, got 0"):
        smooth_topk_svm_loss(x, y, 2, tau=0)
    with pytest.raises(ValueError, match=r"`teacher_logits` must have the shape of `logits` \(4, 6\), got \(4, 5\)"):
        topk_distillation_loss(x, x[:, :5], 2)
