"""The LML projection: golden numbers, laws, oracles, derivatives, edges, messages, tracing."""

import itertools
import math
from functools import partial

import accuracy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tools import slow
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import lastlayer as ll
from lastlayer._threshold import exported

INF, NAN = math.inf, math.nan
PROJECTIONS = [ll.lml, ll.log_lml, ll.lml_threshold, ll.lml_at_most]


def normal(*shape, dtype=torch.float64, scale=1.0):
    return scale * torch.randn(*shape, dtype=dtype)


# 1 golden numbers


def test_two_classes_by_hand():
    # y1 + y2 = 1 with y = sigmoid(x + nu): nu = -(x1 + x2) / 2, so y1 = sigmoid((x1 - x2) / 2).
    y = ll.lml(torch.tensor([3.0, 1.0], dtype=torch.float64), 1)
    expected = 1 / (1 + math.exp(-1))
    assert y.tolist() == pytest.approx([expected, 1 - expected], abs=1e-15)


def test_constant_rows_by_hand():
    x = torch.full((2, 5), 7.0, dtype=torch.float64)
    assert ll.lml(x, 2).tolist() == [pytest.approx([0.4] * 5, abs=1e-15)] * 2
    assert ll.lml_threshold(x, 2).tolist() == pytest.approx([math.log(2 / 3) - 7] * 2, abs=1e-14)


def test_k_one_is_not_softmax():
    x = torch.tensor([1.0, 0.0, -1.0])
    assert (ll.lml(x, 1) - x.softmax(-1)).abs().max() > 0.01


# 2 laws


@pytest.mark.parametrize("k", [0.5, 1, 2.5, 6])
def test_laws(k):
    x = normal(20, 7, scale=3)
    y = ll.lml(x, k)
    assert ((y > 0) & (y < 1)).all()
    torch.testing.assert_close(y.sum(-1), torch.full((20,), float(k), dtype=y.dtype))
    torch.testing.assert_close(ll.lml(x + 123.0, k), y)  # shift
    torch.testing.assert_close(1 - ll.lml(-x, 7 - k), y)  # complement
    order = torch.randperm(7)
    torch.testing.assert_close(ll.lml(x[:, order], k), y[:, order])  # permutation
    assert (x.argsort(-1) == y.argsort(-1)).all()  # order
    assert (ll.lml(x, k + 0.25) > y).all()  # monotone in k
    torch.testing.assert_close(ll.log_lml(x, k).exp(), y)
    torch.testing.assert_close((x + ll.lml_threshold(x, k)[:, None]).sigmoid(), y)


def test_temperature_goes_to_the_hard_top_k_and_to_the_flat_answer():
    x = torch.tensor([0.3, 0.1, 0.2, -0.5], dtype=torch.float64)
    torch.testing.assert_close(ll.lml(x, 2, temperature=1e-4), torch.tensor([1.0, 0, 1, 0], dtype=x.dtype))
    torch.testing.assert_close(ll.lml(x, 2, temperature=1e6), torch.full_like(x, 0.5), atol=1e-6, rtol=0)
    torch.testing.assert_close(ll.lml(x, 2, temperature=0.5), ll.lml(2 * x, 2))
    rows = torch.tensor([0.5, 2.0], dtype=torch.float64)
    torch.testing.assert_close(
        ll.lml(x.expand(2, 4), 2, temperature=rows), torch.stack([ll.lml(2 * x, 2), ll.lml(x / 2, 2)])
    )


@pytest.mark.parametrize("function", [ll.lml, ll.log_lml, ll.lml_threshold, ll.lml_at_most])
@pytest.mark.parametrize("options", [{}, {"weight": 1.0}])
def test_temperatures_of_rows_divide_half_precision_in_float32(function, options):
    x = normal(3, 40, scale=9).bfloat16()
    rows = function(x, 3, temperature=torch.full((3,), 0.3), **options)
    assert rows.dtype == x.dtype
    assert torch.equal(rows, function(x, 3, temperature=0.3, **options))


def test_sigmoid_and_softmax_are_the_neighbours():
    x = normal(6, scale=2)
    torch.testing.assert_close(ll.lml(x, x.sigmoid().sum().item()), x.sigmoid())  # where nu = 0
    wide = torch.cat([x - 30, torch.tensor([0.0], dtype=x.dtype)])
    y = ll.lml(wide, 1e-6)  # for k -> 0 it is k softmax
    torch.testing.assert_close(y / 1e-6, wide.softmax(-1), atol=0, rtol=1e-5)


def test_at_most_is_the_sigmoid_where_it_fits():
    x = torch.cat([normal(50, 6, scale=2), normal(50, 6) + 3])
    y = ll.lml_at_most(x, 3)
    fits = x.sigmoid().sum(-1) <= 3
    assert 0 < fits.sum() < 100
    torch.testing.assert_close(y[fits], x.sigmoid()[fits])
    torch.testing.assert_close(y[~fits], ll.lml(x, 3)[~fits])
    torch.testing.assert_close(ll.lml_at_most(x, 1e9), x.sigmoid())  # a budget that never binds


def test_ties_are_bitwise_equal():
    x = torch.tensor([[2.0, 1, 1, 1, 0, 0], [5, 5, 5, 5, 5, 5]])
    y = ll.lml(x, 2)
    assert len(set(y[0, 1:4].tolist())) == len(set(y[0, 4:].tolist())) == len(set(y[1].tolist())) == 1


def test_the_jacobian_is_symmetric_psd_and_kills_constants():
    jacobian = jacrev(lambda x: ll.lml(x, 2))(normal(6))
    torch.testing.assert_close(jacobian, jacobian.T)
    assert torch.linalg.eigvalsh(jacobian).min() > -1e-12
    assert jacobian.sum(-1).abs().max() < 1e-15


def test_exactly_k_marginals_are_near():
    # The independent Bernoullis of mean k are the saddle-point approximation of the exactly-k distribution.
    x = normal(8)
    subsets = torch.tensor([[i in chosen for i in range(8)] for chosen in itertools.combinations(range(8), 3)])
    weight = (subsets.double() @ x).softmax(0)
    assert ((weight @ subsets.double()) - ll.lml(x, 3)).abs().max() < 0.06


# 3 oracles


@pytest.mark.parametrize("k", [1, 2, 2.5, 4])
def test_cvxpy_finds_the_same_answer(k):
    cvxpy = pytest.importorskip("cvxpy")
    for _ in range(3):
        x = normal(5, scale=2)
        y = cvxpy.Variable(5)
        problem = cvxpy.Problem(
            cvxpy.Minimize(-x.numpy() @ y - cvxpy.sum(cvxpy.entr(y) + cvxpy.entr(1 - y))), [cvxpy.sum(y) == k]
        )
        problem.solve(solver="CLARABEL", tol_gap_abs=1e-12, tol_gap_rel=1e-12, tol_feas=1e-12)
        torch.testing.assert_close(ll.lml(x, k), torch.as_tensor(y.value), atol=1e-5, rtol=0)


@pytest.mark.parametrize("impl", ["torch", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [2, slow(3), 10, slow(100), slow(1000)])
def test_accuracy(n, dtype, impl):
    limits = accuracy.LIMITS[dtype]
    for _, name, x, k in (case for case in accuracy.cases(n) if case[0] == n):
        found = accuracy.errors(x, k, dtype, impl)
        assert all(f <= limit for f, limit in zip(found, limits, strict=True)), f"{name}, k={k}: {found}"


@pytest.mark.parametrize("k", [slow(1), slow(2.5), slow(100), 50_000, slow(99_999)])
def test_accuracy_of_a_long_row(k):
    for name, x in accuracy.rows(100_000):
        if k < x.isfinite().sum() and name in ("normal", "constant", "30 x", "offset 1e4"):
            found = accuracy.errors(x, k, torch.float32, "auto")
            assert all(f <= limit for f, limit in zip(found, (1e-6, 1e-6, 1e-5), strict=True)), f"{name}: {found}"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=12),
    st.floats(0.01, 0.99),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_any_row_is_solved(values, share, dtype):
    x = torch.tensor([values], dtype=dtype)
    k = share * len(values)
    found = accuracy.errors(x, float(torch.tensor(k, dtype=dtype)), dtype, "torch")
    assert all(f <= 4 * limit for f, limit in zip(found, accuracy.LIMITS[dtype], strict=True)), found


# 4 gradients


@pytest.mark.parametrize("function", PROJECTIONS)
def test_derivatives(function):
    x = normal(3, 5, scale=2).requires_grad_()
    k = torch.tensor([1.3, 2.0, 4.2], dtype=torch.float64, requires_grad=True)
    assert gradcheck(function, (x, k), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(function, (x, k))
    temperature = torch.tensor([0.7, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x, t: function(x, 2.0, temperature=t), (x, temperature))
    ruled_out = x.detach().masked_fill(torch.eye(3, 5, dtype=torch.bool), -INF)
    assert gradcheck(lambda t: function(ruled_out, 2.0, temperature=t).clamp(min=-1e3), temperature)
    mask = torch.tensor([True, True, True, True, False])
    assert gradcheck(lambda x: function(x, 2.0, mask=mask, temperature=0.5).clamp(min=-1e3), x)


@pytest.mark.parametrize("function", [*PROJECTIONS, partial(ll.lml_loss, target=torch.tensor([4, 0]))])
def test_a_gradient_of_0_has_a_derivative(function):
    """`torch.autograd.functional` differentiates gradients where what comes from above is 0."""

    def run(x, k):
        return function(x, k=k)

    inputs = normal(2, 5), torch.tensor([1.2, 2.5], dtype=torch.float64)
    along = normal(2, 5), torch.tensor([1.0, -0.5], dtype=torch.float64)
    torch.testing.assert_close(torch.autograd.functional.jvp(run, inputs, along), jvp(run, inputs, along))

    def total(x, k):
        return run(x, k).square().sum()

    found, expected = (getattr(torch.autograd.functional, name)(total, inputs, along)[1] for name in ("hvp", "vhp"))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("impl", ["torch", "auto"])
@pytest.mark.parametrize("function", PROJECTIONS[:3])
def test_a_row_without_a_solution_that_is_not_used_spoils_no_gradient(function, impl):
    """Nor one that is differentiated again."""
    x, k, scale = (
        normal(3, 5),
        torch.tensor([1.2, -9.0, 2.0], dtype=torch.float64),
        torch.tensor(0.7, dtype=torch.float64),
    )

    def gradients(rows):
        leaf = scale.clone().requires_grad_()
        y = function(leaf * x[rows], k[rows] * leaf, impl=impl)
        (once,) = torch.autograd.grad((y if len(rows) == 2 else y[::2]).square().sum(), leaf, create_graph=True)
        return once, *torch.autograd.grad(once, leaf)

    torch.testing.assert_close(gradients([0, 1, 2]), gradients([0, 2]))


@pytest.mark.parametrize("impl", ["torch", "auto"])
@pytest.mark.parametrize("function", [*PROJECTIONS, ll.capped_softmax, ll.capped_sparsemax])
def test_a_temperature_that_is_not_positive_makes_its_row_nan(function, impl):
    """As a number it is an error; a negative one inside a tensor chose the smallest logits, and 0 some other ones."""
    x = normal(6, 5, dtype=torch.float32)
    temperature = torch.tensor([0.7, -1.0, 0.0, 2.0, torch.nan, INF])
    for wider in ({}, {"weight": torch.ones(5)}):
        if wider and function not in PROJECTIONS:
            continue
        found = function(x, 2.0, temperature=temperature, impl=impl, **wider)
        good = torch.tensor([0, 3])
        torch.testing.assert_close(found[good], function(x[good], 2.0, temperature=temperature[good], **wider))
        assert found[[1, 2, 4, 5]].isnan().all()


@pytest.mark.parametrize("impl", ["torch", "auto"])
@pytest.mark.parametrize("gap", [40.0, 60.0, 100.0, 200.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_saturated_rows(gap, dtype, impl):
    # Far from the gap nothing moves; nu follows the two sides of it: p = h / sum h with h ~ exp(-|z|).
    x = torch.tensor([gap + 1, gap, 0.5, 0.0, -1.0], dtype=dtype, requires_grad=True)
    side = [torch.softmax(-x.detach()[:2].double(), 0), torch.softmax(x.detach()[2:].double(), 0)]
    p = torch.cat(side) / 2
    tolerance = 4 * gap * torch.finfo(dtype).eps + 4 * math.exp(-gap / 2)  # of the points; of h
    (found,) = torch.autograd.grad(ll.lml_threshold(x, 2, impl=impl), x)
    torch.testing.assert_close(found.double(), -p, atol=tolerance, rtol=0)
    for j in range(5):
        (found,) = torch.autograd.grad(ll.log_lml(x, 2, impl=impl)[j], x)
        expected = ((torch.arange(5) == j).double() - p) * (1.0 if j >= 2 else 0.0)
        torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=0)
    (found,) = torch.autograd.grad(ll.lml(x, 2, impl=impl).sum(), x)
    assert found.isfinite().all()


@pytest.mark.parametrize("impl", ["torch", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e7, 1e10, 1e16, 1e30])
def test_huge_scores_meet_k(size, dtype, impl):
    """Neighbouring floats are further apart than the sigmoid is wide: y is a hard choice, shared among ties alone."""
    logits = torch.randn(300, 5, dtype=dtype, requires_grad=True)
    hard = logits.detach().argsort(-1, descending=True).argsort(-1)
    for k, last in ((2, 0.0), (2.25, 0.25), (1e-7, 1e-7), (4, 0.0)):
        expected = torch.where(hard < int(k), 1.0, torch.where(hard == int(k), last, 0.0)).to(dtype)
        y = ll.lml(logits, k, temperature=1 / size, impl=impl)
        if size > 1e7:  # else a few gaps are narrow
            torch.testing.assert_close(y, expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(y.sum(-1), torch.full_like(y[:, 0], k), rtol=1e-6, atol=0)
        log_y = ll.log_lml(logits, k, temperature=1 / size, impl=impl)
        torch.testing.assert_close(log_y.exp(), y, rtol=1e-5, atol=1e-12)
        (of_nu,) = torch.autograd.grad(
            ll.lml_threshold(logits, k, temperature=1 / size, impl=impl).sum() / size, logits
        )
        torch.testing.assert_close(of_nu.sum(-1), torch.full_like(of_nu[:, 0], -1))
        (of_log,) = torch.autograd.grad(log_y.sum() / size, logits)
        assert of_log.isfinite().all()
    ties = size * torch.tensor([1.0, 1.0, 1.0, -1.0, 0.5], dtype=dtype)
    expected = torch.tensor([2 / 3, 2 / 3, 2 / 3, 0, 0], dtype=dtype)
    torch.testing.assert_close(ll.lml(ties, 2, impl=impl), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("impl", ["torch", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tiny_k(dtype, impl):
    """A k far below 1 is a softmax of that mass; one just below n is that of the complement."""
    logits = torch.tensor([[1.0], [30], [300]], dtype=dtype) * torch.randn(3, 20, dtype=dtype)
    for k in (1e-6, 1e-8, 1e-30):
        y = ll.lml(logits, k, impl=impl)
        torch.testing.assert_close(y, k * logits.softmax(-1), rtol=1e-5, atol=max(1e-20 * k, 1e-37))
        torch.testing.assert_close(ll.capped_softmax(logits, k), k * logits.softmax(-1), rtol=1e-5, atol=1e-37)
    k = torch.tensor(20, dtype=dtype) - 2.0**-19
    left = ll.log_lml(-logits, 20 - k, impl=impl)
    torch.testing.assert_close(ll.lml(logits, k, impl=impl), 1 - left.exp())


@pytest.mark.parametrize("impl", ["torch", "auto"])
def test_k_has_a_finite_gradient_across_a_wide_gap(impl):
    k = torch.tensor([2.0], requires_grad=True)
    y = ll.lml(torch.tensor([[1e3, 1e3, 0.0, 0.0]]), k, impl=impl)
    (found,) = torch.autograd.grad(y[0, 2], k)
    assert found.item() == pytest.approx(0.25)  # each of the four is as near to the gap


def test_k_learns():
    x = normal(4, 6)
    k = torch.full((4,), 2.0, dtype=torch.float64, requires_grad=True)
    ll.lml(x, k)[:, 0].sum().backward()
    eps = 1e-6
    expected = (ll.lml(x, 2 + eps)[:, 0] - ll.lml(x, 2 - eps)[:, 0]) / (2 * eps)
    torch.testing.assert_close(k.grad, expected, atol=1e-8, rtol=0)


# 5 edges: every row of the table


@pytest.mark.parametrize("impl", ["torch", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_k_at_both_ends(dtype, impl):
    x = torch.tensor([[3.0, -1.0, 2.0, -INF], [0.0, 0.0, 0.0, 0.0]], dtype=dtype, requires_grad=True)
    k = torch.tensor([3.0, 4.0], requires_grad=True)
    for number, expected in ((0, [[0.0] * 4] * 2), (k, [[1.0, 1, 1, 0], [1.0] * 4])):
        y = ll.lml(x, number, impl=impl)
        assert y.dtype == dtype
        assert y.tolist() == expected
        (found,) = torch.autograd.grad(y.sum() + (y * y).sum(), x)
        assert found.tolist() == [[0.0] * 4] * 2
    assert torch.autograd.grad(ll.lml(x, k, impl=impl).float().sum(), k)[0].tolist() == [0.0, 0.0]
    assert ll.log_lml(x, 0, impl=impl).tolist() == [[-INF] * 4] * 2
    assert ll.log_lml(x, k, impl=impl).tolist() == [[0.0, 0, 0, -INF], [0.0] * 4]
    assert ll.lml_threshold(x, k, impl=impl).tolist() == [INF, INF]
    assert ll.lml_threshold(x, 0, impl=impl).tolist() == [-INF, -INF]


@pytest.mark.parametrize("impl", ["torch", "auto"])
def test_a_row_that_cannot_be_met_is_nan_alone(impl):
    x = normal(6, 4).float()
    k = torch.tensor([2.0, 5.0, -1.0, NAN, INF, 2.0])
    y = ll.lml(x, k, impl=impl)
    assert y.isnan().all(-1).tolist() == [False, True, True, True, True, False]
    torch.testing.assert_close(y[[0, 5]], ll.lml(x[[0, 5]], 2, impl=impl))
    few = torch.tensor([[1.0, 2.0, -INF, -INF], [1.0, 2.0, 3.0, -INF]])
    y = ll.lml(few, torch.tensor(3), impl=impl)
    assert y[0].isnan().all()
    assert y[1].tolist() == [1, 1, 1, 0]


@pytest.mark.parametrize("impl", ["torch", "auto"])
@pytest.mark.parametrize("function", [ll.lml, ll.log_lml, ll.lml_at_most])
def test_masks_rule_out(function, impl):
    x = normal(5, 6).float().requires_grad_()
    mask = torch.tensor([True, False, True, True, False, True])
    y = function(x, 2, mask=mask, impl=impl)
    torch.testing.assert_close(y[:, mask], function(x[:, mask], 2, impl=impl))
    assert (y[:, ~mask] == (-INF if function is ll.log_lml else 0)).all()
    (found,) = torch.autograd.grad((y[:, mask] ** 2).sum(), x)
    assert found.isfinite().all()
    assert (found[:, ~mask] == 0).all()
    assert torch.equal(function(x.masked_fill(~mask, -INF), 2, impl=impl), y)


@pytest.mark.parametrize("impl", ["torch", "auto"])
def test_infinite_logits_take_a_unit(impl):
    x = torch.tensor([[INF, 1.0, 0.0, -1.0], [INF, INF, 0.0, -1.0], [INF, INF, INF, 0.0]], requires_grad=True)
    y = ll.lml(x, 2, impl=impl)
    torch.testing.assert_close(y[0, 1:], ll.lml(x[0, 1:], 1, impl=impl))
    assert y[0, 0] == 1
    assert y[1].tolist() == [1, 1, 0, 0]
    assert y[2].isnan().all()
    (found,) = torch.autograd.grad(y[:2].square().sum(), x)
    assert found[:2].isfinite().all()


@pytest.mark.parametrize("impl", ["torch", "auto"])
def test_a_nan_stays_in_its_row(impl):
    x = normal(3, 4).float()
    x[1, 2] = NAN
    y = ll.lml(x, 2, impl=impl)
    assert y.isnan().all(-1).tolist() == [False, True, False]
    torch.testing.assert_close(y[[0, 2]], ll.lml(x[[0, 2]], 2, impl=impl))


@pytest.mark.parametrize("impl", ["torch", "auto"])
@pytest.mark.parametrize(
    ("shape", "dim"), [((0, 5), -1), ((3, 0), 0), ((4, 1), 1), ((2, 3, 5), 1), ((5,), 0), ((2, 3, 4, 5), -2)]
)
def test_shapes(shape, dim, impl):
    x = normal(*shape).float()
    n = shape[dim]
    y = ll.lml(x, min(1, n), dim=dim, impl=impl)
    assert y.shape == x.shape
    assert ll.lml_threshold(x, min(1, n), dim=dim, impl=impl).shape == x.movedim(dim, -1).shape[:-1]
    if x.numel():
        torch.testing.assert_close(y.sum(dim), torch.ones_like(y.sum(dim)))
    strided = torch.empty(*shape, 2)[..., 0].copy_(x)
    torch.testing.assert_close(ll.lml(strided, min(1, n), dim=dim, impl=impl), y)


def test_no_classes_and_k_zero():
    assert ll.lml(torch.empty(3, 0), 0).shape == (3, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype):
    x = normal(10, 50).to(dtype)
    y = ll.lml(x, 3)
    assert y.dtype == dtype
    assert torch.equal(y, ll.lml(x.float(), 3).to(dtype))


def test_offsets_and_outliers_do_not_hurt_float32():
    x = normal(4, 1000).float()
    shifted = (x.double() + 1e4).float()
    torch.testing.assert_close(ll.lml(shifted, 5).double(), ll.lml(shifted.double() - 1e4, 5), atol=1e-6, rtol=0)


def test_nothing_is_printed_and_no_warning_given(recwarn, capfd):
    for x in (torch.zeros(3, 5000), torch.tensor([[1e4, 0.0, 0.0]]), torch.full((1, 4), NAN)):
        ll.lml(x, 1)
    assert not recwarn.list
    assert capfd.readouterr() == ("", "")


# 6 messages


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: ll.lml(x, 9), ValueError, r"lml: `k` must be between 0 and n_classes=4, got 9. Choose a"),
        (lambda x: ll.lml(x, -0.5), ValueError, r"lml: `k` must be between 0 and n_classes=4, got -0.5"),
        (lambda x: ll.log_lml(x, NAN), ValueError, r"log_lml: `k` must be between .* got nan"),
        (lambda x: ll.lml(x, "2"), TypeError, r"lml: `k` must be a number or a tensor, got str"),
        (lambda x: ll.lml(x, True), TypeError, r"lml: `k` must be a number or a tensor, got bool"),
        (lambda x: ll.lml(x, torch.tensor(True)), TypeError, r"lml: `k` must be a real number"),
        (
            lambda x: ll.lml(x, torch.ones(3)),
            ValueError,
            r"`k` must broadcast to the batch shape \(2,\), got shape \(3,\)",
        ),
        (lambda x: ll.lml(x.long(), 2), TypeError, r"lml: `logits` must be of a floating-point dtype, got torch.int64"),
        (lambda x: ll.lml([1.0, 2.0], 1), TypeError, r"lml: `logits` must be a tensor, got list"),
        (lambda x: ll.lml(x[0, 0], 1), ValueError, r"lml: `logits` must have a class dimension"),
        (lambda x: ll.lml(x, 2, dim=2), ValueError, r"lml: `dim` must be between -2 and 1, got 2"),
        (lambda x: ll.lml(x, 2, dim=0.5), TypeError, r"lml: `dim` must be an integer, got 0.5"),
        (
            lambda x: ll.lml(x, 2, temperature=0),
            ValueError,
            r"lml: `temperature` must be positive .* got 0. Near 0 choices",
        ),
        (
            lambda x: ll.lml(x, 2, temperature=torch.ones(7)),
            ValueError,
            r"`temperature` must broadcast to .*, got .*7,",
        ),
        (
            lambda x: ll.lml(x, 2, temperature="1"),
            TypeError,
            r"lml: `temperature` must be a number or a tensor, got str",
        ),
        (lambda x: ll.lml(x, 2, mask=x), TypeError, r"lml: `mask` must be a boolean tensor, .* got torch.float32"),
        (lambda x: ll.lml(x, 2, mask=x[:, :3] > 0), ValueError, r"`mask` must broadcast to the shape \(2, 4\), got"),
        (lambda x: ll.lml(x, 2, impl="cuda"), ValueError, r"lml: `impl` must be one of 'auto', 'torch'"),
        (lambda x: ll.lml(x.double(), 2, impl="triton"), RuntimeError, r'lml: `impl="triton"` cannot run here: '),
        (lambda x: ll.lml(x.to("meta"), 2, impl="native"), RuntimeError, r'lml: `impl="native"` cannot run here: '),
        (lambda x: ll.lml_at_most(x, -1), ValueError, r"lml_at_most: `k` must be between 0"),
    ],
)
def test_messages(call, error, text):
    with pytest.raises(error, match=text):
        call(torch.randn(2, 4))


# 7 transforms, tracing, other runtimes


def test_functional_transforms():
    x = normal(3, 5)
    k = torch.tensor([1.3, 2.0, 4.2], dtype=torch.float64)
    torch.testing.assert_close(vmap(lambda a: ll.lml(a, 2))(x), ll.lml(x, 2))
    torch.testing.assert_close(vmap(ll.lml)(x, k), ll.lml(x, k))
    torch.testing.assert_close(vmap(lambda b: ll.lml(x, b))(k)[1], ll.lml(x, 2.0))
    torch.testing.assert_close(
        vmap(lambda a: ll.lml_threshold(a, 2), in_dims=1)(x.T.contiguous()), ll.lml_threshold(x, 2)
    )
    torch.testing.assert_close(jacrev(lambda a: ll.lml(a, 2))(x[0]), jacfwd(lambda a: ll.lml(a, 2))(x[0]))
    one = jvp(lambda a: ll.lml(a, 2), (x,), (torch.ones_like(x),))[1]
    two = jvp(lambda a: ll.lml_threshold(a, 2), (x,), (torch.ones_like(x),))[1]
    torch.testing.assert_close(one, torch.zeros_like(x))
    torch.testing.assert_close(two, -torch.ones_like(two))
    per_row = vmap(grad(lambda a, b: ll.log_lml(a, b)[0]))(x, k)
    leaf = x.clone().requires_grad_()
    ll.log_lml(leaf, k)[:, 0].sum().backward()
    torch.testing.assert_close(per_row, leaf.grad)
    curvature = hessian(lambda a: ll.lml(a, 2)[0])(x[0])
    torch.testing.assert_close(curvature, curvature.T)


def test_the_compiler_sees_one_operator():
    """And not the plain search that exports hold, which takes minutes to compile."""
    torch.compiler.reset()
    names = []

    def backend(graph, _):
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    def run(x):
        return ll.lml(x, 2) + ll.lml_threshold(x, 2)[:, None] + ll.lml_loss(x, x[:, 0].long(), 2)

    torch.compile(run, backend=backend)(normal(4, 7).float())
    operators = [name for name in names if "lastlayer" in name]
    assert len(operators) == 3, names
    assert len(names) < 45, names


@pytest.mark.parametrize(
    "run",
    [
        lambda x: jvp(lambda a: ll.lml(a, 2), (x,), (x,))[1],
        slow(lambda x: grad(lambda a: ll.log_lml(a, 2)[0, 0])(x)),
        lambda x: vmap(lambda a: ll.lml(a, 2))(x),
        slow(lambda x: jvp(lambda a: ll.lml(a, 2, weight=torch.arange(1.0, 8.0)), (x,), (x,))[1]),
        slow(lambda x: jvp(lambda a: ll.lml_balanced(a, 2), (x,), (x,))[1]),
    ],
    ids=["jvp", "grad", "vmap", "weighted jvp", "balanced jvp"],
)
def test_transforms_within_the_compiler(run):
    torch.compiler.reset()
    x = normal(4, 7)
    torch.testing.assert_close(torch.compile(run, backend="eager")(x), run(x))


@pytest.mark.parametrize(
    ("function", "impl"),
    [(ll.lml, "auto"), slow(ll.lml, "torch"), *(slow(other, "auto") for other in PROJECTIONS if other is not ll.lml)],
)
def test_compile(function, impl):
    torch.compiler.reset()

    def run(x, k):
        return function(x, k, impl=impl)

    x, k = normal(4, 7).float().requires_grad_(), torch.tensor([1.0, 2, 3, 4], requires_grad=True)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for number in (k, 2):
        torch.testing.assert_close(compiled(x, number), run(x, number))
    expected = torch.autograd.grad(run(x, k).square().sum(), (x, k))
    torch.testing.assert_close(torch.autograd.grad(compiled(x, k).square().sum(), (x, k)), expected)


@pytest.mark.slow
def test_export():
    model = torch.nn.Sequential(torch.nn.Linear(6, 30), ll.LML(3)).eval()
    x = torch.randn(4, 6)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=1, max=64)},))
    torch.testing.assert_close(program.module()(x[:3]), model(x[:3]))


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_export_with_any_number_of_classes(strict):
    x, sizes = torch.randn(4, 12), {0: torch.export.Dim("rows"), 1: torch.export.Dim("n", min=4)}
    program = torch.export.export(ll.LML(3), (x,), dynamic_shapes={"logits": sizes}, strict=strict)
    for x in (torch.randn(5, 4), 30 * torch.randn(2, 70)):
        torch.testing.assert_close(program.module()(x), ll.lml(x, 3))


ENDS = torch.tensor(
    [
        [INF, 1, 0, -1, -2, -3],
        [INF, INF, 0, -1, -2, -3],
        [INF, INF, INF, -1, -2, -3],
        [2, 1, -INF, -INF, -INF, -INF],
        [2, -INF, -INF, -INF, -INF, -INF],
        [INF, 1, -INF, -INF, -INF, -INF],
        [INF, INF, -INF, -INF, -INF, -INF],
        [NAN, 1, 0, -1, -2, -3],
        [300, 300, 1, -1, -200, -INF],
        [1e4, 1e4 - 1, 1e4 - 2, 0, -1e4, -INF],
    ]
)


@pytest.fixture
def looped(monkeypatch):
    """Loops of exports as Python runs them, in place of an operator that would compile them."""

    def loop(unfinished, body, state):
        while unfinished(*state):
            state = body(*state)
        return state

    monkeypatch.setattr(torch._higher_order_ops, "while_loop", loop)


def quick(p, k):
    """The probabilities of the quick search of exports, and whether all rows are close."""
    v, far = exported._quick(p, k.unsqueeze(-1) if isinstance(k, torch.Tensor) else k)
    v = v.squeeze(-1)
    if far:
        v, far = exported._continued(p, k, v)
    return p / (p + v.unsqueeze(-1)), far <= 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_graph_for_exports_is_as_accurate_as_the_search(dtype, looped):
    for _, name, x, k in accuracy.cases(100):
        scores = x.to(dtype)
        found = exported.project(scores, k, "y")[0].double()
        by_loop = exported._sure(scores, k, x.shape[-1], "y", loops=True)[0].double()
        by_tensor = exported.project(x.to(dtype), torch.full((1, 1), k, dtype=dtype), "log")[0].double()
        expected = accuracy.exact(x[0].to(dtype), k)[None]
        live = expected.isfinite()
        limits = accuracy.LIMITS[dtype]
        assert abs(found.sum().item() - k) <= limits[0] * max(k, 1), (name, k)
        assert (found - expected.exp()).abs().max() <= limits[1], (name, k)
        assert abs(by_loop.sum().item() - k) <= limits[0] * max(k, 1), (name, k)
        assert (by_loop - expected.exp()).abs().max() <= limits[1], (name, k)
        off = (by_tensor - expected)[live].abs() / expected[live].abs().clamp(min=1)
        assert off.max() <= limits[2], (name, k)
        y, close = quick(scores.softmax(-1), k)
        assert not close or (y.double() - expected.exp()).abs().max() <= limits[1], (name, k)


@pytest.mark.parametrize("k", [0.1, 5, 30])
def test_the_quick_search_of_exports(k, looped):
    """It gets close to common rows, is accurate where it says so, and says so of no row that it cannot solve."""
    x = torch.cat([scale * torch.randn(20, 50) for scale in (0.1, 1, 3)])
    x[:, -3:] = -INF
    p = x.softmax(-1)
    for size in (k, torch.full((60,), float(k))):
        y, close = quick(p, size)
        assert close
        torch.testing.assert_close(y, ll.lml(x, k), atol=1e-6, rtol=1e-5)
    gap = torch.cat([torch.full((3,), 200.0), torch.zeros(47)])
    for row in (torch.full((50,), NAN), torch.cat([torch.tensor([INF]), x[0, 1:]]), gap, torch.full((50,), -INF)):
        assert not quick(torch.stack([x[0], row]).softmax(-1), k if row is not gap else k + 3)[1]


@pytest.mark.parametrize("kind", ["y", "log"])
def test_the_graph_for_exports_has_gradients(kind):
    """Where classes are ruled out too; nothing comes from what arrives there."""
    x = normal(5, 9)
    x[:, ::4] = -torch.inf
    upstream = normal(5, 9)
    gradients = []
    for function in (
        lambda x: exported.project(x, 2.5, kind)[0],
        lambda x: {"y": ll.lml, "log": ll.log_lml}[kind](x, 2.5),
    ):
        leaf = x.clone().requires_grad_()
        gradients.append(torch.autograd.grad(function(leaf), leaf, upstream)[0])
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("k", [1, 2.5, 3])
@pytest.mark.parametrize("kind", ["y", "log", "nu"])
def test_the_graph_for_exports_has_gradients_where_scores_are_equal(kind, k):
    """All of them, as those of an untrained layer, or those on either side of the threshold; and beside wide gaps."""
    x = torch.tensor([[3.0] * 6, [1.0, 1, 1, 1, 0, 0], [5.0, 5, 5, 1, 1, 1], [60.0, 60, 60, -60, -60, -60]]).double()
    upstream = normal(4, 6)[:, : 1 if kind == "nu" else 6]

    def threshold(x):
        _, center, delta = exported.project(x, k, "nu")
        return delta - center

    function = {"y": ll.lml, "log": ll.log_lml, "nu": lambda x, k: ll.lml_threshold(x, k).unsqueeze(-1)}[kind]
    graph = threshold if kind == "nu" else lambda x: exported.project(x, k, kind)[0]
    gradients = []
    for run in (graph, lambda x: function(x, k)):
        leaf = x.clone().requires_grad_()
        gradients.append(torch.autograd.grad(run(leaf), leaf, upstream)[0])
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("kind", ["y", "log"])
def test_the_graph_for_exports_at_the_ends(kind):
    function = {"y": ll.lml, "log": ll.log_lml}[kind]
    for k in (0, 0.5, 2, 5.5, 6):
        torch.testing.assert_close(exported.project(ENDS, k, kind)[0], function(ENDS, k), equal_nan=True)
    each = torch.tensor([-1, 0, 1e-25, 1, 2, 2.5, 5, 6, 6.5, NAN])[:, None]
    x = torch.arange(6.0).repeat(10, 1)
    found = exported.project(x, each, kind)[0]
    torch.testing.assert_close(found, function(x, each[:, 0]), equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "dynamic", "most"),
    [
        (ll.LML, True, 150),
        (lambda k: ll.LML(torch.tensor(float(k))), False, 165),
        (ll.LogLML, True, 150),
        (ll.LMLThreshold, True, 150),
    ],
)
def test_onnx(tmp_path, module, dynamic, most):
    """Few nodes, with those of the loop, and in another runtime as accurate as here."""
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    hop = pytest.importorskip("torch.onnx._internal.exporter._torchlib.ops.hop")
    model, path = module(2).eval(), str(tmp_path / "model.onnx")
    shapes = ({0: torch.export.Dim("rows")},) if dynamic else None
    torch.onnx.export(model, (ENDS,), path, dynamo=True, verbose=False, dynamic_shapes=shapes)
    if hasattr(hop, "higher_order_while_loop"):  # of older exporters the passes stand one after another
        graph = onnx.load(path).graph
        assert nodes(graph) <= most
        assert module is not ll.LML or "Loop" not in [node.op_type for node in graph.node]  # only in a branch
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    common = 2 * torch.randn(10, 6)  # by the quick search alone
    mixed = torch.cat([ENDS, *(scale * torch.randn(20, 6) for scale in (0.01, 1, 10, 100))]) if dynamic else ENDS
    for x in (common, mixed):
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.as_tensor(found), model(x), equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("module", [ll.LML, ll.LogLML])
def test_onnx_with_any_number_of_classes(tmp_path, module):
    """Also after an export with a fixed number."""
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    hop = pytest.importorskip("torch.onnx._internal.exporter._torchlib.ops.hop")
    model, path, any_size = module(3).eval(), str(tmp_path / "model.onnx"), torch.export.Dim.DYNAMIC
    for shapes in (None, ({0: any_size, 1: any_size},)):
        torch.onnx.export(model, (torch.randn(4, 12),), path, dynamo=True, verbose=False, dynamic_shapes=shapes)
    if hasattr(hop, "higher_order_while_loop"):
        assert nodes(onnx.load(path).graph) <= 150
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for x in (torch.randn(5, 4), 30 * torch.randn(2, 70)):
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.as_tensor(found), model(x))


def nodes(graph):
    """The number of nodes of a graph and of the graphs within it."""
    inner = (nodes(a.g) for node in graph.node for a in node.attribute if a.HasField("g"))
    return len(graph.node) + sum(inner)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("learns", [False, True])
def test_jit_trace(learns):
    """The example is solved in fewer passes than the rows that follow."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 30), ll.LML(3)).requires_grad_(learns)
    traced = torch.jit.trace(model, torch.zeros(4, 6), check_trace=False)
    x = 20 * torch.randn(9, 6)
    torch.testing.assert_close(traced(x), model(x))
    with pytest.raises(RuntimeError, match="a trace holds plain operators"):
        torch.jit.trace(ll.LML(3, impl="native"), x)


def test_autocast_meta_and_modules():
    x = torch.randn(3, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert ll.lml(torch.nn.Linear(5, 4)(x), 2).dtype == torch.bfloat16
        torch.testing.assert_close(ll.lml(x, 2), ll.LML(2)(x))
    meta = torch.empty(2, 3, 4, device="meta")
    assert ll.lml(meta, 2, dim=1).shape == (2, 3, 4)
    assert ll.lml_threshold(meta, 2, dim=1).shape == (2, 4)
    torch.testing.assert_close(ll.LogLML(2)(x), ll.log_lml(x, 2))
    torch.testing.assert_close(ll.LMLThreshold(2)(x), ll.lml_threshold(x, 2))
    torch.testing.assert_close(ll.LMLAtMost(2)(x), ll.lml_at_most(x, 2))
    k = torch.nn.Parameter(torch.tensor(2.0))
    assert list(ll.LML(k).parameters()) == [k]
    assert repr(ll.LML(2, temperature=0.5)) == "LML(k=2, dim=-1, temperature=0.5, impl='auto')"
    x, weight = torch.randn(4, 6), torch.tensor([1.0, 2, 3, 1, 2, 3])
    module = ll.LML(4.0, weight=weight, upper=0.9)
    assert list(module.state_dict()) == ["weight"]
    torch.testing.assert_close(module(x), ll.lml(x, 4.0, weight=weight, upper=0.9))
    groups = torch.tensor([0, 0, 1, 1, 1])
    grouped = ll.LML(2.0, groups=groups, group_limit=1.2)
    assert "groups" in grouped.state_dict()
    x = torch.randn(3, 5)
    torch.testing.assert_close(grouped(x), ll.lml(x, 2.0, groups=groups, group_limit=1.2))


def test_the_backward_keeps_one_tensor_of_the_size_of_the_input():
    saved = []
    x = torch.randn(8, 100, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ll.lml(x, 3)
    assert sum(t.numel() >= 800 for t in saved) == 1
