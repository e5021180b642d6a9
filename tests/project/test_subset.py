"""Subsets of exactly k classes: against enumeration, a dynamic program in log space, and frequencies."""

import itertools
import math

import pytest
import torch
from tools import DEVICE, slow

from lastlayer import SampleSubset, SubsetMarginals, lml, sample_subset, subset_log_prob, subset_marginals
from lastlayer.project._symmetric import log_elementary

F64 = torch.float64


def enumerate_subsets(x, k):
    """All subsets, their log-probabilities and the marginals, for one row."""
    subsets = list(itertools.combinations(range(x.shape[-1]), k))
    scores = torch.stack([x[list(s)].sum() for s in subsets])
    log_prob = scores - scores.logsumexp(0)
    hot = torch.zeros(len(subsets), x.shape[-1], dtype=x.dtype)
    for row, s in zip(hot, subsets, strict=True):
        row[list(s)] = 1
    return subsets, log_prob, log_prob.exp() @ hot


def log_space(x, k):
    """log e_k by the textbook recurrence, O(n k)."""
    e = [torch.zeros(x.shape[:-1], dtype=x.dtype)] + [torch.full(x.shape[:-1], -torch.inf, dtype=x.dtype)] * k
    for i in range(x.shape[-1]):
        e = [e[0]] + [torch.logaddexp(e[j], e[j - 1] + x[..., i]) for j in range(1, k + 1)]
    return e[k]


def rows(kind, n, k):
    x = torch.randn(3, n, dtype=F64)
    return {
        "normal": x,
        "wide": 30 * x,
        "near ties": 1e-9 * x,
        "ties": torch.zeros_like(x),
        "gap": x + torch.where(torch.arange(n) < k, 1e3, 0.0),
        "gap off k": x + torch.where(torch.arange(n) < k // 2, 1e3, 0.0),
        "offset": x + 1e4,
        "half out": torch.where((torch.arange(n) % 2 == 1) & (torch.arange(n) >= 2 * k), -torch.inf, x),
    }[kind]


def test_by_hand():
    # e_2 of (1, 2, 3) is 2 + 3 + 6 = 11; the pairs have 2/11, 3/11, 6/11.
    x = torch.tensor([1.0, 2.0, 3.0], dtype=F64).log()
    assert log_elementary(x, 2).exp().item() == pytest.approx(11)
    torch.testing.assert_close(subset_marginals(x, 2), torch.tensor([5 / 11, 8 / 11, 9 / 11], dtype=F64))
    assert subset_log_prob(x, 2, torch.tensor([2, 1])).exp().item() == pytest.approx(6 / 11)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_agrees_with_enumeration(n, scale):
    x = scale * torch.randn(n, dtype=F64)
    for k in range(n + 1):
        subsets, log_prob, marginals = enumerate_subsets(x, k)
        torch.testing.assert_close(subset_marginals(x, k), marginals, rtol=1e-10, atol=1e-14)
        lists = torch.tensor(subsets, dtype=torch.int64).reshape(len(subsets), k)
        torch.testing.assert_close(subset_log_prob(x, k, lists), log_prob, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["normal", "wide", "near ties", "ties", "gap", "gap off k", "offset", "half out"])
@pytest.mark.parametrize(("n", "k"), [(7, 6), slow(30, 3), (40, 39), (41, 20), slow(100, 37), slow(200, 180)])
def test_agrees_with_log_space(kind, n, k):
    x = rows(kind, n, k)
    if (x > -torch.inf).sum(-1).min() < k:
        assert log_elementary(x, k).isnan().all()
        return
    exact = log_space(x, k)
    torch.testing.assert_close(log_elementary(x, k), exact, rtol=1e-13, atol=1e-12)
    # A marginal is a ratio of sums without the class: pi_i = exp(x_i) e_{k-1}(others) / e_k.
    pi = subset_marginals(x, k)
    if kind == "offset":  # the reference rounds at the size of its result
        x = x - 1e4
        exact = log_space(x, k)
    for i in (0, n // 2, n - 1):
        others = torch.cat([x[..., :i], x[..., i + 1 :]], -1)
        torch.testing.assert_close(
            pi[..., i], (x[..., i] + log_space(others, k - 1) - exact).exp(), rtol=1e-10, atol=1e-13
        )
    torch.testing.assert_close(pi.sum(-1), torch.full((3,), float(k), dtype=F64))


def test_small_marginals_have_small_relative_error():
    x = torch.tensor([50.0, 50.0, 0.0, -30.0, -60.0], dtype=F64)  # the third class: 2 exp(-50)
    pi = subset_marginals(x, 2)
    _, _, exact = enumerate_subsets(x, 2)
    torch.testing.assert_close(pi[2:], exact[2:], rtol=1e-12, atol=0)


@pytest.mark.parametrize(("n", "k"), [(6, 2), (6, 5), (20, 10), (40, 18)])
def test_marginals_are_the_gradient_of_the_log_sum(n, k):
    x = torch.randn(2, n, dtype=F64, requires_grad=True)
    (grad,) = torch.autograd.grad(log_elementary(x, k).sum(), x)
    torch.testing.assert_close(grad, subset_marginals(x, k))


@pytest.mark.parametrize(("n", "k"), [(5, 0), (5, 2), slow(5, 4), (5, 5), slow(36, 17)])
def test_gradients(n, k):
    x = torch.randn(1 if n > 30 else 2, n, dtype=F64, requires_grad=True)
    subset = torch.arange(k).expand(x.shape[0], k)
    for function in (lambda x: subset_marginals(x, k), lambda x: subset_log_prob(x, k, subset)):
        assert torch.autograd.gradcheck(function, x, check_forward_ad=n < 30)
        assert n > 30 or torch.autograd.gradgradcheck(function, x)


def test_log_prob_gradient_is_the_set_minus_the_marginals():
    x = torch.randn(4, 12, dtype=F64, requires_grad=True)
    hot = torch.zeros(4, 12)
    hot[:, [1, 5, 7]] = 1
    (grad,) = torch.autograd.grad(subset_log_prob(x, 3, hot).sum(), x)
    torch.testing.assert_close(grad, hot - subset_marginals(x, 3))


@pytest.mark.parametrize(("n", "k"), [(5, 2), (6, 5), (7, 1)])
def test_draws_have_the_frequencies_of_the_law(n, k):
    x = torch.randn(n, dtype=F64, device=DEVICE)
    draws = sample_subset(x.expand(40_000, n), k, generator=torch.Generator(DEVICE).manual_seed(3)).cpu()
    assert draws.dtype == torch.int64
    assert (draws[:, 1:] > draws[:, :-1]).all()
    subsets, log_prob, _ = enumerate_subsets(x.cpu(), k)
    code = (draws * (n ** torch.arange(k))).sum(-1)
    chi = 0.0
    for subset, p in zip(subsets, log_prob.exp().tolist(), strict=True):
        expected = 40_000 * p
        found = (code == sum(c * n**i for i, c in enumerate(subset))).sum().item()
        chi += (found - expected) ** 2 / expected
    freedom = len(subsets) - 1
    assert chi < freedom + 5 * math.sqrt(2 * freedom) + 5


def test_draws_of_long_rows_have_the_marginals():
    x = 2 * torch.randn(80)
    draws = sample_subset(x.expand(4000, 80), 30, generator=torch.Generator().manual_seed(0))
    hot = torch.zeros(4000, 80).scatter(1, draws, 1.0)
    assert (hot.sum(1) == 30).all()
    pi = subset_marginals(x, 30)
    error = (hot.mean(0) - pi).abs() / (pi * (1 - pi) / 4000).sqrt().clamp(min=1e-3)
    assert error.max() < 5


def test_generator_repeats_a_draw():
    x = torch.randn(6, 30)
    first, second = (sample_subset(x, 4, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("k", [1, 3, 18])
def test_shift_and_complement(k):
    x = torch.randn(3, 36, dtype=F64)
    pi = subset_marginals(x, k)
    torch.testing.assert_close(subset_marginals(x + 5, k), pi)
    torch.testing.assert_close(subset_marginals(-x, 36 - k), 1 - pi)


def test_lml_is_near_the_marginals():
    x = torch.randn(4, 400, dtype=F64)
    assert (subset_marginals(x, 40) - lml(x, 40)).abs().max() < 5e-3


@pytest.mark.parametrize("k", [1, 4, 20])
def test_one_label_is_the_softmax_and_infinite_logits(k):
    x = torch.randn(3, 40, dtype=F64)
    if k == 1:
        torch.testing.assert_close(subset_marginals(x, 1), x.softmax(-1))
    x[0, 3] = torch.inf
    x[1, 5] = -torch.inf
    x[2, 0] = torch.nan
    x.requires_grad_()
    pi = subset_marginals(x, k)
    assert pi[0, 3] == 1
    assert pi[1, 5] == 0
    assert pi[2].isnan().all()
    assert not pi[:2].isnan().any()
    (grad,) = torch.autograd.grad(pi[:2, :9].square().sum(), x)
    assert grad[:2].isfinite().all()
    assert grad[0, 3] == 0
    assert grad[1, 5] == 0
    draws = sample_subset(x, k)
    assert (draws[0] == 3).any()
    assert not (draws[1] == 5).any()
    assert (draws[2] == -1).all()
    assert subset_log_prob(x, k, torch.arange(5, 5 + k).expand(3, k))[1] == -torch.inf


def test_too_few_classes_is_nan_in_that_row_alone():
    x = torch.zeros(2, 4)
    x[0, :2] = -torch.inf
    assert subset_marginals(x, 3)[0].isnan().all()
    torch.testing.assert_close(subset_marginals(x, 3)[1], torch.full((4,), 0.75))
    assert torch.equal(sample_subset(x, 3)[0], torch.tensor([-1, -1, -1]))
    assert subset_log_prob(x, 3, torch.tensor([1, 2, 3])).isnan().tolist() == [True, False]


def test_all_or_none_of_the_allowed_classes():
    x = torch.tensor([[1.0, -torch.inf, 2.0], [0.0, 3.0, -torch.inf]])
    assert torch.equal(subset_marginals(x, 2), (x > -torch.inf).float())
    assert torch.equal(sample_subset(x, 2), torch.tensor([[0, 2], [0, 1]]))
    assert torch.equal(subset_marginals(x, 0), torch.zeros(2, 3))
    assert sample_subset(x, 0).shape == (2, 0)
    assert torch.equal(subset_log_prob(x, 0, torch.zeros(2, 3)), torch.zeros(2))
    assert log_elementary(x, 2).tolist() == [3.0, 3.0]


def test_what_is_no_subset_has_no_probability():
    x = torch.randn(5)
    bad = torch.tensor([[0, 0], [-1, 2], [1, 9]])
    assert (subset_log_prob(x, 2, bad) == -torch.inf).all()
    assert subset_log_prob(x, 2, torch.ones(5)) == -torch.inf


def test_forms_of_a_subset_agree():
    x = torch.randn(3, 4)
    lists = torch.tensor([[0, 2], [3, 1], [2, 3]])
    hot = torch.zeros(3, 4).scatter(1, lists, 1.0)
    torch.testing.assert_close(subset_log_prob(x, 2, lists), subset_log_prob(x, 2, hot))
    torch.testing.assert_close(subset_log_prob(x, 2, lists), subset_log_prob(x, 2, hot.bool()))
    everything = torch.arange(4).expand(3, 4)
    for subset in (everything, everything.int(), torch.ones(3, 4), torch.ones(3, 4).bool()):
        assert torch.equal(subset_log_prob(x, 4, subset), torch.zeros(3))


@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5), (1,), (2, 3, 5)])
def test_shapes(shape):
    x = torch.randn(shape)
    assert subset_marginals(x, 1).shape == shape
    assert sample_subset(x, 1).shape == (*shape[:-1], 1)
    assert subset_log_prob(x, 1, sample_subset(x, 1)).shape == shape[:-1]


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
def test_jit_trace_of_lists():
    x, subset = torch.randn(2, 5), torch.tensor([[0, 3], [4, 1]])
    traced = torch.jit.trace(lambda x, subset: subset_log_prob(x, 2, subset), (x, subset), check_trace=False)
    torch.testing.assert_close(traced(-x, 4 - subset), subset_log_prob(-x, 2, 4 - subset))


@pytest.mark.parametrize("k", [20, 40])
@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)])
def test_no_rows_with_many_places(shape, k):  # torch's FFT refuses them
    x = torch.randn(shape, requires_grad=True)
    pi = subset_marginals(x, k)
    (grad,) = torch.autograd.grad(pi.sum(), x, create_graph=True)
    assert pi.shape == grad.shape == shape
    assert sample_subset(x, k).shape == (*shape[:-1], k)
    log_prob = subset_log_prob(x, k, torch.zeros(shape, dtype=torch.bool))
    assert log_prob.shape == shape[:-1]
    assert torch.autograd.grad(log_prob.sum(), x)[0].shape == shape


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("k", [3, 30])
def test_low_precision_is_computed_in_float32(dtype, k):
    x = torch.randn(4, 64).to(dtype)
    pi = subset_marginals(x, k)
    assert pi.dtype == dtype
    torch.testing.assert_close(pi.double(), subset_marginals(x.double(), k), rtol=0, atol=2 * torch.finfo(dtype).eps)
    x = torch.cat([x[:, :32] + 1e4, x[:, 32:]], -1) if dtype == torch.float32 else x
    log_prob = subset_log_prob(x, k, torch.arange(k).expand(4, k))
    exact = subset_log_prob(x.double(), k, torch.arange(k).expand(4, k))
    torch.testing.assert_close(log_prob.double(), exact, rtol=4 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.slow
def test_compile_export_vmap_jvp():
    x, k = torch.randn(3, 36, dtype=F64), 17
    expected = subset_marginals(x, k)
    compiled = torch.compile(subset_marginals, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, k), expected)
    exported = torch.export.export(SubsetMarginals(k), (x,)).module()
    torch.testing.assert_close(exported(x), expected)
    torch.testing.assert_close(torch.func.vmap(lambda row: subset_marginals(row, k))(x), expected)
    tangent = torch.randn_like(x)
    _, forward = torch.func.jvp(lambda x: subset_marginals(x, k), (x,), (tangent,))
    (reverse,) = torch.func.vjp(lambda x: subset_marginals(x, k), x)[1](tangent)
    torch.testing.assert_close(forward, reverse)  # a covariance is symmetric


def test_no_classes():
    x = torch.zeros(2, 0)
    assert subset_marginals(x, 0).shape == (2, 0)
    assert sample_subset(x, 0).shape == (2, 0)
    assert subset_log_prob(x, 0, torch.zeros(2, 0)).tolist() == [0.0, 0.0]


def test_modules():
    x = torch.randn(2, 5)
    torch.testing.assert_close(SubsetMarginals(2)(x), subset_marginals(x, 2))
    assert SampleSubset(2)(x).shape == (2, 2)


def test_messages():
    x = torch.zeros(2, 4)
    with pytest.raises(TypeError, match=r"sample_subset: `k` must be a Python integer.*got float. For a real"):
        sample_subset(x, 2.0)
    with pytest.raises(ValueError, match=r"subset_marginals: `k` must be between 0 and n_classes=4, got 5. Lower `k`."):
        subset_marginals(x, 5)
    with pytest.raises(TypeError, match="subset_log_prob: `subset` must be a tensor, got list"):
        subset_log_prob(x, 2, [0, 1])
    for subset in (torch.zeros(2, 3), torch.zeros(2, 2), torch.zeros(2, 4, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"`subset` must have shape \(..., 2\) \(index lists.* or \(..., 4\)"):
            subset_log_prob(x, 2, subset)


@pytest.mark.slow
def test_samples_compile_with_dynamic_shapes():
    torch.compiler.reset()
    compiled = torch.compile(lambda x: sample_subset(x, 2), fullgraph=True, dynamic=True, backend="eager")
    for i, n in enumerate((6, 7, 100)):  # trees of another depth
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            found = compiled(torch.randn(5, n))
        assert found.shape == (5, 2)
        assert (found.sort(-1).values.diff(dim=-1) > 0).all()
        assert ((found >= 0) & (found < n)).all()


@pytest.mark.parametrize("k", [6, 20])
def test_autocast_changes_nothing(k):
    """The polynomials are multiplied by matrix products, which autocast would round to 8 bits."""
    x, chosen = torch.randn(4, 40), torch.arange(k).expand(4, k)
    for function in (lambda x: subset_marginals(x, k), lambda x: subset_log_prob(x, k, chosen)):
        found = []
        for enabled in (False, True):
            z = x.clone().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                value = function(z)
            found.append((value, *torch.autograd.grad((value * torch.linspace(-1, 1, value.shape[-1])).sum(), z)))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
