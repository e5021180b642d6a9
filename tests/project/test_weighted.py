"""Weights, bounds, groups and several dimensions at once: golden numbers, the optimum, exact sums, derivatives."""

import math

import pytest
import torch
from tools import slow

import lastlayer as ll
from lastlayer import _native
from lastlayer.project.groups import _tables

DOUBLE = torch.float64
IMPLS = ["torch"] if _native.missing else ["torch", "native"]


def draw(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def uniform(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def ends(weight, lower, upper):
    """The least and the largest weighted sum."""
    return torch.minimum(weight * lower, weight * upper).sum(-1), torch.maximum(weight * lower, weight * upper).sum(-1)


def test_golden():
    # Two classes that cost 1 and 2, a budget of 1.5: at nu = 0 both are one half, and 0.5 + 2 * 0.5 = 1.5.
    y = ll.lml(torch.zeros(2, dtype=DOUBLE), 1.5, weight=torch.tensor([1.0, 2.0]))
    torch.testing.assert_close(y, torch.tensor([0.5, 0.5], dtype=DOUBLE))
    # Bounds 0 and 3 on one of two equal classes: s + 3 s = 2 at s = 1/2.
    y = ll.lml(torch.zeros(2, dtype=DOUBLE), 2, upper=torch.tensor([1.0, 3.0]))
    torch.testing.assert_close(y, torch.tensor([0.5, 1.5], dtype=DOUBLE))
    # A negative weight: y_1 - y_2 = 0 at equal logits, and the threshold moves them apart.
    y = ll.lml(torch.zeros(2, dtype=DOUBLE), 0.5, weight=torch.tensor([1.0, -1.0]))
    torch.testing.assert_close(y, torch.tensor([0.75, 0.25], dtype=DOUBLE))
    nu = ll.lml_threshold(torch.zeros(2, dtype=DOUBLE), 0.5, weight=torch.tensor([1.0, -1.0]))
    torch.testing.assert_close(nu, torch.tensor(math.log(3), dtype=DOUBLE))


def test_weights_of_one_are_the_ordinary_projection():
    x = draw(50, 30, scale=5.0)
    for function in (ll.lml, ll.log_lml, ll.lml_threshold, ll.lml_at_most):
        torch.testing.assert_close(function(x, 4.5, weight=1.0), function(x, 4.5), rtol=1e-12, atol=1e-14)


DEPENDENT = {  # arguments that are computed from each other, as functions of one vector of positive numbers
    "k and weight": lambda p: ll.lml(X, 0.4 * p.sum(), weight=p),
    "lower and upper": lambda p: ll.lml(X, 12.0, lower=p, upper=p + 0.8),
    "weight and upper": lambda p: ll.lml(X, 1.0, weight=p, upper=p),
    "logits and upper": lambda p: ll.lml(p, 1.5, upper=p.sigmoid()),
    "at most": lambda p: ll.lml_at_most(X, 0.2 * p.sum(), weight=p),
    "logits and k": lambda p: ll.lml(p, 0.3 * p.sum()),
    "loss": lambda p: ll.lml_loss(p, torch.tensor(2), 0.3 * p.sum(), observed=0.5),
    "balanced": lambda p: ll.lml_balanced((p * X[:4, None]).log_softmax(0), p.new_full((4,), 1.5), 6 * p / p.sum()),
}
X = torch.tensor([0.3, -1.0, 0.5, 1.25, -0.2, 0.1], dtype=DOUBLE)


@pytest.mark.parametrize("name", DEPENDENT)
def test_arguments_that_depend_on_each_other(name):
    """The gradient is the same where it is to be differentiated again, and so is that of forward mode."""
    p = (1 + uniform(6, seed=5)).requires_grad_()
    pull = draw(6, seed=6)

    def function(p):
        return (DEPENDENT[name](p) * pull).sum()

    (once,) = torch.autograd.grad(function(p), p)
    (again,) = torch.autograd.grad(function(p), p, create_graph=True)
    torch.testing.assert_close(again, once)
    torch.testing.assert_close(torch.func.jacfwd(function)(p.detach()), once)
    assert torch.autograd.gradgradcheck(function, (p,))


@pytest.mark.parametrize("function", [ll.lml, slow(ll.log_lml), slow(ll.lml_threshold), slow(ll.lml_at_most)])
def test_forward_mode_in_forward_mode(function):
    def run(p):
        return function(X + p[0], 1.5 + p[1], weight=1 + p[2:8], upper=1 + p[8:14], temperature=1 + p[14])

    p = 0.1 * uniform(15, seed=7)
    twice = torch.func.jacfwd(torch.func.jacfwd(run))(p)
    torch.testing.assert_close(twice, torch.func.jacrev(torch.func.jacrev(run))(p))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("scale", [slow(1.0), 30.0, slow(300.0)])
@pytest.mark.parametrize("kind", ["wide", "signs", "zeros"])
def test_sums_are_exact(kind, scale, impl):
    shape = (300, 40)
    weight = {
        "wide": 10 ** (9 * uniform(*shape, seed=1)),
        "signs": draw(*shape, seed=1) * 10 ** (6 * uniform(*shape, seed=2)),
        "zeros": draw(*shape, seed=1) * (uniform(*shape, seed=2) > 0.5),
    }[kind]
    x, lower, upper = draw(*shape, scale=scale), 0.3 * uniform(*shape, seed=3), 0.5 + uniform(*shape, seed=4)
    least, most = ends(weight, lower, upper)
    for share in (1e-6, 0.1, 0.5, 0.99):
        k = least + share * (most - least)
        y = ll.lml(x, k, weight=weight, lower=lower, upper=upper, impl=impl)
        off = ((weight * y).sum(-1) - k).abs() / (weight * y).abs().sum(-1)
        assert off.max() < 1e-12
        assert (y >= lower).all()
        assert (y <= upper).all()
        half = ll.lml(x.float(), k, weight=weight, lower=lower, upper=upper, impl=impl)
        off = ((weight * half).sum(-1) - k).abs() / (weight * half).abs().sum(-1)
        assert off.max() < 1e-6
        single = ll.lml(x.float(), k, weight=weight.float(), lower=lower.float(), upper=upper.float(), impl=impl)
        off = ((weight.float().double() * single).sum(-1) - k).abs() / (weight * single).abs().sum(-1)
        assert off.max() < 1e-6


@pytest.mark.parametrize("impl", IMPLS)
def test_is_the_optimum(impl):
    cp = pytest.importorskip("cvxpy")
    x, weight = draw(6), torch.tensor([1.0, 2.0, 0.5, -1.0, 0.0, 3.0], dtype=DOUBLE)
    lower, upper = 0.2 * uniform(6, seed=1), 0.5 + uniform(6, seed=2)
    k = 2.0
    v = cp.Variable(6)
    s = cp.multiply(v - lower.numpy(), 1 / (upper - lower).numpy())
    entropy = cp.sum(cp.multiply((upper - lower).numpy(), cp.entr(s) + cp.entr(1 - s)))
    for at_most, function in ((False, ll.lml), (True, ll.lml_at_most)):
        budget = weight.numpy() @ v <= k if at_most else weight.numpy() @ v == k
        cp.Problem(cp.Minimize(-x.numpy() @ v - entropy), [budget]).solve(solver=cp.CLARABEL)
        y = function(x, k, weight=weight, lower=lower, upper=upper, impl=impl)
        torch.testing.assert_close(y, torch.tensor(v.value), rtol=0, atol=1e-4)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind", ["weight", "bounds", "both", "at most", "groups"])
def test_cvxpy_finds_the_same_answer(kind, impl):
    cp = pytest.importorskip("cvxpy")
    x, n = draw(5, seed=3, scale=2), 5
    weight = uniform(n, seed=1) * 3 - 1 if kind in ("weight", "both") else torch.ones(n, dtype=DOUBLE)
    wide = kind in ("bounds", "both")
    lower = 0.3 * uniform(n, seed=2) if wide else torch.zeros(n, dtype=DOUBLE)
    upper = 0.6 + uniform(n, seed=4) if wide else torch.ones(n, dtype=DOUBLE)
    low, high = ends(weight, lower, upper)
    k = 1.2 if kind in ("at most", "groups") else float(0.6 * low + 0.4 * high)
    y, group = cp.Variable(n), torch.tensor([0, 0, 1, 1, 1])
    entropy = cp.sum(cp.entr(y - lower.numpy()) + cp.entr(upper.numpy() - y))
    total = weight.numpy() @ y
    limits = [total <= k] if kind == "at most" else [total == k]
    if kind == "groups":
        limits += [cp.sum(y[:2]) <= 0.7, cp.sum(y[2:]) <= 0.7]
    cp.Problem(cp.Minimize(-x.numpy() @ y - entropy), limits).solve(
        solver="CLARABEL", tol_gap_abs=1e-12, tol_gap_rel=1e-12, tol_feas=1e-12
    )
    function = ll.lml_at_most if kind == "at most" else ll.lml
    options = {"weight": weight, "lower": lower, "upper": upper, "impl": impl}
    if kind == "groups":
        options = {"groups": group, "group_limit": 0.7}
    torch.testing.assert_close(function(x, k, **options), torch.as_tensor(y.value), atol=1e-5, rtol=0)


@pytest.mark.parametrize("impl", IMPLS)
def test_derivatives(impl):
    x, weight = draw(3, 4).requires_grad_(), draw(3, 4, seed=1).requires_grad_()
    lower, upper = (0.3 * uniform(3, 4, seed=2)).requires_grad_(), (0.6 + uniform(3, 4, seed=3)).requires_grad_()
    least, most = (end.detach() for end in ends(weight, lower, upper))
    k = (least + 0.4 * (most - least)).requires_grad_()

    def function(x, k, weight, lower, upper):
        options = {"weight": weight, "lower": lower, "upper": upper, "impl": impl}
        return ll.lml(x, k, **options), ll.lml_threshold(x, k, **options), ll.lml_at_most(x, k, **options)

    inputs = (x, k, weight, lower, upper)
    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *a: function(*a)[0], inputs, fast_mode=True)
    positive = (weight.detach().abs(), None, upper)
    log = torch.autograd.gradcheck(
        lambda x, u: ll.log_lml(x, 1.0, weight=positive[0], upper=u), (x, upper), fast_mode=True
    )
    assert log


@pytest.mark.parametrize("impl", ["torch", "auto"])
def test_second_derivatives_where_a_class_has_no_share(impl):
    x, k = draw(3, 5).requires_grad_(), torch.tensor([0.7, 1.1, 1.5], dtype=DOUBLE).requires_grad_()
    weight = torch.tensor([1.0, -0.6, 0.5, 2.0, 0.0], dtype=DOUBLE, requires_grad=True)  # the last is free

    def function(x, k, weight):
        options = {"weight": weight, "impl": impl}
        return ll.lml(x, k, **options), ll.lml_threshold(x, k, **options), ll.log_lml(x, k, **options)

    assert torch.autograd.gradgradcheck(function, (x, k, weight))

    def second(width):  # of the thresholds, in the scores and an upper bound that is as low as the lower one
        upper = torch.tensor([1.0, 1.0, 0.9, 1.0, 0.3 + width], dtype=DOUBLE, requires_grad=True)
        lower = torch.tensor([0.0, 0.0, 0.1, 0.0, 0.3], dtype=DOUBLE)
        nu = ll.lml_threshold(x, k + 1, lower=lower, upper=upper, impl=impl)
        (first,) = torch.autograd.grad((nu * torch.arange(1, 4)).sum(), x, create_graph=True)
        return torch.autograd.grad((first * first.detach().cos()).sum(), upper)[0]

    torch.testing.assert_close(second(0.0), second(1e-9), rtol=1e-6, atol=1e-9)


def test_second_derivatives_stay_finite_beside_a_free_class_of_a_decided_row():
    x = torch.tensor([1e4, -1e4, 0.0], dtype=DOUBLE, requires_grad=True)
    weight = torch.tensor([1.0, 1.0, 0.0], dtype=DOUBLE, requires_grad=True)
    (first,) = torch.autograd.grad(ll.lml(x, 1.0, weight=weight)[0], x, create_graph=True)
    assert torch.cat(torch.autograd.grad(first[0], [x, weight])).isfinite().all()


def test_ends_and_rows_without_a_solution():
    x = torch.stack([draw(3)] * 4)
    weight = torch.tensor([1.0, 2.0, -1.0])
    y = ll.lml(x, torch.tensor([-1.0, 3.0, 3.5, 1.0]), weight=weight)
    assert y[0].tolist() == [0, 0, 1]
    assert y[1].tolist() == [1, 1, 0]
    assert y[2].isnan().all()
    assert y[3].isfinite().all()
    nu = ll.lml_threshold(x, torch.tensor([-1.0, 3.0, 3.5, 1.0]), weight=weight)
    assert nu[0] == -torch.inf
    assert nu[1] == torch.inf
    assert nu[2].isnan()
    leaf = x.clone().requires_grad_()
    ll.lml(leaf, torch.tensor([-1.0, 3.0, 1.0, 1.0]), weight=weight)[:2].sum().backward()
    assert leaf.grad.eq(0).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("term", ["weight", "lower", "upper"])
def test_an_infinite_budget_is_no_limit(term, impl):
    x, options = draw(2, 5).requires_grad_(), {term: uniform(5) / 2}
    lower, upper = options.get("lower", 0.0), options.get("upper", 1.0)
    expected = lower + (upper - lower) * x.sigmoid()
    slope = (upper - lower) * x.sigmoid() * (-x).sigmoid()
    for k in (math.inf, torch.tensor(math.inf), torch.full((2,), math.inf)):
        y = ll.lml_at_most(x, k, **options, impl=impl)
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], slope)
    for function, k in ((ll.lml_at_most, -math.inf), (ll.lml_at_most, math.nan), (ll.lml, math.inf)):
        with pytest.raises(ValueError, match=r"`k` must be finite, got (inf|-inf|nan)\. Give the sum that is wanted\."):
            function(x, k, **options, impl=impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("name", "value"),
    [("weight", torch.nan), ("weight", torch.inf), ("lower", 2.0), ("lower", -torch.inf), ("lower", torch.nan),
     ("upper", -1.0), ("upper", torch.inf), ("upper", torch.nan)],
)  # fmt: skip
def test_bad_values_inside_a_tensor_make_their_row_nan(impl, name, value):
    # No value of a tensor is read before the search: an error would wait for the device.
    x = draw(3, 4).float()
    term = torch.full((3, 4), 0.1 if name == "lower" else 1.0)
    good = {function: function(x, 1.5, **{name: term}, impl=impl) for function in (ll.lml, ll.lml_at_most)}
    good[ll.lml_threshold] = ll.lml_threshold(x, 1.5, **{name: term}, impl=impl)
    term[1, 2] = value
    for function, expected in good.items():
        for k in (1.5, torch.tensor(9.0)):
            found = function(x, k, **{name: term}, impl=impl)
            assert found[1].isnan().all()
            if isinstance(k, float):
                assert torch.equal(found[::2], expected[::2])
    y = ll.lml(x, 1.5, **{name: term.requires_grad_()}, impl=impl)
    (grad,) = torch.autograd.grad(y[::2].square().sum(), term)
    assert grad[::2].isfinite().all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("function", [ll.lml, ll.lml_at_most, ll.log_lml, ll.lml_threshold])
def test_a_row_without_a_solution_that_is_not_used_spoils_no_gradient(function, impl):
    x, weight, upper = draw(4, 3), uniform(3) + 0.5, uniform(3, seed=1) + 0.5
    x[2, 1] = torch.nan
    k = torch.tensor([0.5, -9.0, 0.5, 0.7], dtype=DOUBLE)
    used = [0, 3]

    def gradients(rows):
        leaves = [t.clone().requires_grad_() for t in (x[rows], k[rows], weight, upper)]
        y = function(leaves[0], leaves[1], weight=leaves[2], upper=leaves[3], impl=impl)
        kept = y if len(rows) == 2 else y[used]
        return torch.autograd.grad(kept.square().sum(), leaves)

    alone, beside = gradients(used), gradients([0, 1, 2, 3])
    for a, b in zip(alone[2:], beside[2:], strict=True):  # shared by all rows
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(alone[0], beside[0][used])
    torch.testing.assert_close(alone[1], beside[1][used])


BAD = [
    ("x", torch.nan), ("k", torch.nan), ("k", 99.0), ("weight", torch.nan), ("weight", torch.inf), ("lower", torch.nan),
    ("lower", -torch.inf), ("lower", 2.0), ("upper", torch.inf), ("upper", -1.0),
]  # fmt: skip


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("name", "value"), BAD)
def test_what_is_bad_in_a_row_that_is_not_used_spoils_no_gradient(impl, name, value):
    """Not even where its class is free, and where the gradient is differentiated again."""
    weight = torch.tensor([1.0, 0.7, 0.0, 1.3], dtype=DOUBLE).expand(3, 4).clone()
    terms = {"x": draw(3, 4), "k": torch.ones(3, dtype=DOUBLE), "weight": weight}
    terms |= {"lower": torch.full((3, 4), 0.1, dtype=DOUBLE), "upper": torch.full((3, 4), 0.9, dtype=DOUBLE)}
    terms[name][(1, 2) if name != "k" else 1] = value

    def gradients(function, rows):
        parts = {term: value[rows].clone().requires_grad_() for term, value in terms.items()}
        y = function(parts["x"], parts["k"], **dict(list(parts.items())[2:]), impl=impl)
        kept = y if len(rows) == 2 else y[::2]
        once = torch.autograd.grad(kept.square().sum(), parts.values(), create_graph=True)
        again = torch.autograd.grad(sum(g.square().sum() for g in once), parts.values())
        return [gradient.sum(0) for gradient in (*once, *again)]  # that of what all rows share

    for function in (ll.lml, ll.lml_at_most, ll.lml_threshold):
        torch.testing.assert_close(gradients(function, [0, 1, 2]), gradients(function, [0, 2]))
    y = ll.lml(terms["x"].requires_grad_(), terms["k"], weight=weight, lower=terms["lower"], impl=impl)
    if y.isnan().any():  # what is used is nan
        assert torch.autograd.grad(y.sum(), terms["x"])[0][1].isnan().all()


@pytest.mark.parametrize("function", [ll.lml, ll.log_lml, ll.lml_threshold, ll.lml_at_most])
def test_a_gradient_of_0_has_a_derivative(function):
    """`torch.autograd.functional` differentiates gradients where what comes from above is 0."""

    def run(x, k, weight, upper):
        return function(x, k, weight=weight, upper=upper)

    inputs = draw(2, 4), torch.tensor([0.7, 1.5], dtype=DOUBLE), 0.5 + uniform(4, seed=1), 0.6 + uniform(4, seed=2)
    along = draw(2, 4, seed=3), draw(2, seed=4), draw(4, seed=5), draw(4, seed=6)
    torch.testing.assert_close(torch.autograd.functional.jvp(run, inputs, along), torch.func.jvp(run, inputs, along))

    def total(*inputs):
        return run(*inputs).square().sum()

    found, expected = (getattr(torch.autograd.functional, name)(total, inputs, along)[1] for name in ("hvp", "vhp"))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gap", [40.0, 100.0, 1e4])
def test_a_decided_row_is_as_exact_as_without_weights(gap, impl):
    # Both sides of the gap add up to whole numbers: only the tails, far below rounding, tell where the threshold is.
    x = torch.tensor([[gap, gap, 0.0, -3.0], [gap / 2, gap / 2 + 1, -gap / 2, -gap / 2]], dtype=DOUBLE)
    for function in (ll.log_lml, ll.lml_threshold):
        pairs = []
        for options in ({}, {"weight": torch.full((4,), 3.0, dtype=DOUBLE)}):  # an odd weight: no power of two
            scores = x.clone().requires_grad_()
            scale = 3.0 if options else 1.0
            out = function(scores, 2 * scale, **options, impl=impl)
            out = out * scale if function is ll.lml_threshold else out
            pairs.append((out.detach(), *torch.autograd.grad(out.sum(), scores)))
        for one, other in zip(*pairs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
        leaves = [torch.full((4,), value, dtype=DOUBLE, requires_grad=True) for value in (1.0, 1.0)]
        out = function(x, 2, weight=leaves[0], upper=leaves[1], impl=impl)
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize("impl", IMPLS)
def test_a_decided_row_has_the_derivative_of_its_tails(impl):
    # Classes 2 and 3 are left at exp(-41) and exp(-40 + 3 nu), class 1 lacks exp(-60 - 2 nu): with weights 2, 1 and 3
    # and k = 2 the sum is 2 where 2 exp(-60 - 2 nu) = exp(-41 + nu) + 3 exp(-40 + 3 nu).
    x = torch.tensor([60.0, -41.0, -40.0], dtype=DOUBLE)
    weight = torch.tensor([2.0, 1.0, 3.0], dtype=DOUBLE)
    nu = ll.lml_threshold(x, 2, weight=weight, impl=impl)
    tails = torch.stack([-60 - 2 * nu, -41 + nu, -40 + 3 * nu]).exp() * weight
    torch.testing.assert_close(tails[0], tails[1:].sum(), rtol=1e-12, atol=0)
    k = torch.tensor(2.0, dtype=DOUBLE, requires_grad=True)
    for i, y in enumerate(ll.lml(x, k, weight=weight, impl=impl)):
        (grad,) = torch.autograd.grad(y, k, retain_graph=True)
        torch.testing.assert_close(grad, tails[i] / (weight * tails).sum(), rtol=1e-11, atol=0)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_whole_budget_is_in_reach_however_it_was_added_up(impl):
    weight, lower = 1e6 * uniform(1000).float(), uniform(1000, seed=1).float()
    x, shift = draw(2, 1000, seed=2).float(), 1 + 5e-7
    for function in (ll.lml, ll.lml_at_most):
        for k in (weight.sum() * shift, float(weight.double().sum() * shift)):
            whole = function(x, k, weight=weight, impl=impl)
            assert whole.isfinite().all()
            assert function is not ll.lml or (whole == 1).all()
        for k in ((weight * lower).sum() / shift, float((weight * lower).double().sum() / shift)):
            assert torch.equal(function(x, k, weight=weight, lower=lower, impl=impl), lower.expand(2, -1))
        least = (weight * lower).double().sum()
        assert function(x, least * 0.9999, weight=weight, lower=lower, impl=impl).isnan().all()
    assert ll.lml(x, weight.double().sum() * 1.0001, weight=weight, impl=impl).isnan().all()


def test_a_class_that_may_take_nothing_has_no_logarithm_and_no_slope():
    upper = torch.tensor([1.0, 0.0, 0.5], dtype=DOUBLE, requires_grad=True)
    log_y = ll.log_lml(draw(2, 3), 0.7, upper=upper)
    assert (log_y[:, 1] == -torch.inf).all()
    (grad,) = torch.autograd.grad(log_y[:, ::2].sum(), upper)
    assert grad.isfinite().all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_a_logarithm_that_is_infinite_anyway_pulls_at_nothing(impl, dtype):
    x = draw(3, 6).to(dtype)
    x[1, 2], x[2, 4] = -torch.inf, torch.inf
    mask = torch.tensor([[True] * 5 + [False]] * 3)
    for given in ({}, {"mask": mask}):
        x.requires_grad_()
        (wanted,) = torch.autograd.grad(ll.log_lml(x, 2.5, **given).sum(), x)
        (found,) = torch.autograd.grad(
            ll.log_lml(x, 2.5, weight=torch.ones(6, dtype=dtype), impl=impl, **given).sum(), x
        )
        torch.testing.assert_close(found, wanted)
        # A bound of 0 rules a class out as a mask does.
        upper = torch.where(mask[0], 1, 0).to(dtype)
        (found,) = torch.autograd.grad(ll.log_lml(x, 2.5, upper=upper, impl=impl).sum(), x)
        (wanted,) = torch.autograd.grad(ll.log_lml(x, 2.5, mask=mask, impl=impl, upper=1.0).sum(), x)
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("impl", ["torch", "auto"])
@pytest.mark.parametrize("bound", [0.2, torch.full((5,), 0.2, dtype=DOUBLE)])
def test_what_a_mask_leaves_out_has_no_lower_bound(impl, bound):
    x, upper = draw(3, 5), torch.tensor([0.9, 0.8, 0.9, 1.0, 0.7], dtype=DOUBLE)
    mask = torch.tensor([[True, False, True, True, False]]).expand(3, 5)
    kept, options = mask[0], {"impl": impl}
    for k in (0.7, 1.6, torch.tensor([0.7, 1.0, 2.5], dtype=DOUBLE)):  # 0.7 is below the bounds of all five
        for function in (ll.lml, ll.lml_at_most):
            y = function(x, k, lower=bound, upper=upper, mask=mask, **options)
            assert (y[~mask] == 0).all()
            few = bound if isinstance(bound, float) else bound[kept]
            expected = function(x[:, kept], k, lower=few, upper=upper[kept], **options)
            torch.testing.assert_close(y[:, kept], expected)
    assert (ll.lml(x, 0.7, lower=bound, mask=mask, **options)[~mask] == 0).all()
    at_infinity = ll.lml(x.masked_fill(~mask, -torch.inf), 1.6, lower=bound, **options)
    assert (at_infinity[~mask] == 0.2).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("function", [ll.lml, ll.lml_at_most, ll.lml_threshold])
def test_the_lowest_number_rules_a_class_out(function, impl):
    x, out = draw(200, 6), uniform(200, 6, seed=1) < 0.4
    weight = 10 ** (4 * uniform(200, 6, seed=2) - 2) * torch.tensor([1.0, 1.0, -1.0, 1.0, 1.0, 1.0])
    upper = 0.5 + uniform(6, seed=3)
    for terms in ({"weight": weight}, {"weight": weight.abs(), "upper": upper}):
        least, most = ends(terms["weight"], torch.zeros(()), terms.get("upper", torch.ones(())).expand(6) * ~out)
        k = least + 0.4 * (most - least)
        found, exact = (
            function(x.masked_fill(out, low), k, impl=impl, **terms) for low in (torch.finfo(DOUBLE).min, -torch.inf)
        )
        solved = most > least
        torch.testing.assert_close(found[solved], exact[solved])


def test_masked_and_free_classes():
    x = draw(5)
    mask = torch.tensor([True, False, True, True, True])
    weight = torch.tensor([1.0, 1.0, 2.0, 0.0, 1.0])
    y = ll.lml(x, 1.5, weight=weight, mask=mask)
    assert y[1] == 0
    torch.testing.assert_close(y[3], x[3].sigmoid())  # it costs nothing: nobody holds it down
    torch.testing.assert_close((weight * y).sum(), torch.tensor(1.5, dtype=DOUBLE))
    torch.testing.assert_close(ll.lml(x.masked_fill(~mask, -torch.inf), 1.5, weight=weight), y)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"lower": 2.0}, ValueError, r"`lower` must be at most `upper`, got 2.0 and 1.0\. Give `upper`"),
        ({"weight": "1"}, TypeError, "`weight` must be a number or a tensor, got str"),
        ({"weight": math.nan}, ValueError, "`weight` must be finite, got nan"),
        ({"upper": torch.ones(7)}, ValueError, r"`upper` must broadcast to the shape \(2, 4\), got shape \(7,\)"),
        ({"weight": torch.ones(4, dtype=torch.bool)}, TypeError, "`weight` must be real"),
        ({"weight": 1.0, "groups": torch.zeros(4, dtype=torch.long), "group_limit": 1}, ValueError, "`groups` cannot"),
        ({"groups": torch.zeros(4, dtype=torch.long)}, ValueError, "`group_limit` must be given with `groups`"),
        (
            {"groups": torch.zeros(4), "group_limit": 1},
            TypeError,
            "`groups` must be a tensor of int64 or int32, got torch",
        ),
        ({"groups": [0] * 4, "group_limit": 1}, TypeError, "`groups` must be a tensor of int64 or int32, got list"),
        (
            {"groups": torch.tensor([0, 1]), "group_limit": 1},
            ValueError,
            r"group of each of 4 classes, got shape \(2,\)",
        ),
        ({"groups": torch.tensor([0, -1, 0, 0]), "group_limit": 1}, ValueError, "`groups` must be at least 0, got -1"),
        ({"weight": 0.2}, ValueError, "`k` must be between 0 and 0.8, which is what 4 classes can add up to, got 1"),
        ({"upper": 0.2, "lower": 0.1}, ValueError, "`k` must be between 0.4 and 0.8"),
        ({"weight": -0.2}, ValueError, "`k` must be between -0.8 and 0, which is"),
        (
            {"groups": torch.zeros(4, dtype=torch.long), "group_limit": -1},
            ValueError,
            "`group_limit` must be at least 0",
        ),
        (
            {"groups": torch.zeros(4, dtype=torch.long), "group_limit": torch.tensor([True])},
            TypeError,
            "`group_limit` must be real, got a tensor of torch.bool",
        ),
        ({"weight": torch.ones(7), "dim": (0, 1)}, ValueError, r"`weight` must broadcast to the shape \(2, 4\), got"),
        ({"weight": 1.0, "temperature": torch.ones(3)}, ValueError, r"`temperature` must broadcast to .* \(2,\), got"),
        (
            {"groups": torch.zeros(4, dtype=torch.long), "group_limit": 1, "impl": "triton"},
            RuntimeError,
            "cannot run here",
        ),
    ],
)
def test_messages(options, error, text):
    with pytest.raises(error, match=text):
        ll.lml(torch.randn(2, 4), 1, **options)
    if "lower" in options:
        with pytest.raises(ValueError, match="`lower` must be 0"):
            ll.log_lml(torch.randn(2, 4), 1, lower=0.1)


@pytest.mark.parametrize("name", ["weight", "lower", "upper"])
def test_a_kernel_does_not_read_a_term_that_is_elsewhere(name):
    # The meta device stands for a GPU: its tensors have no memory that a CPU could read.
    term = torch.ones(4, device="meta")
    with pytest.raises(NotImplementedError, match="meta"):  # it is copied to the device of the scores first
        ll.lml(torch.zeros(2, 4), 1, **{name: term})


def test_several_dimensions_are_one_budget():
    x = draw(2, 3, 4)
    y = ll.lml(x, 5, dim=(1, 2))
    torch.testing.assert_close(y, ll.lml(x.flatten(1), 5).unflatten(1, (3, 4)))
    y = ll.lml(x, torch.tensor([2.0, 3.0, 4.0]), dim=(0, 2))
    torch.testing.assert_close(y.sum((0, 2)), torch.tensor([2.0, 3.0, 4.0], dtype=DOUBLE))
    assert ll.lml_threshold(x, 5, dim=(0, 1, 2)).shape == ()
    weight = uniform(3, 4) + 0.5
    y = ll.lml(x, 4, dim=(1, 2), weight=weight)
    torch.testing.assert_close((weight * y).sum((1, 2)), torch.full((2,), 4.0, dtype=DOUBLE))
    with pytest.raises(ValueError, match="`dim` must name each dimension once"):
        ll.lml(x, 5, dim=(1, 1))


@pytest.mark.parametrize("shape", [(4,), (4, 1), (1, 4), (4, 4), (4, 1, 1), (2, 1, 1, 1), (1, 4, 1, 4)])
@pytest.mark.parametrize("dim", [1, -2, 3])
def test_weights_broadcast_to_the_logits_for_any_dim(shape, dim):
    x, weight = draw(2, 4, 4, 4), uniform(*shape) + 0.5
    bounds = {"lower": 0.1 * uniform(*shape), "upper": 1 - 0.1 * uniform(*shape)}
    wide = {name: value.expand(x.shape).movedim(dim, -1) for name, value in {"weight": weight, **bounds}.items()}
    y = ll.lml(x, 1.5, dim=dim, weight=weight, **bounds)
    torch.testing.assert_close(y.movedim(dim, -1), ll.lml(x.movedim(dim, -1), 1.5, **wide))
    torch.testing.assert_close(y, ll.lml(x, 1.5, dim=(dim,), weight=weight, **bounds))
    with pytest.raises(ValueError, match=r"`weight` must broadcast to the shape \(2, 4, 4, 4\), got shape \(3, 1\)"):
        ll.lml(x, 1.5, dim=dim, weight=uniform(3, 1))


def groups_of(y, groups, n):
    return torch.zeros(*y.shape[:-1], n, dtype=y.dtype).index_add(-1, groups, y)


def test_groups():
    # Three classes share one place, two more have a limit of their own: by hand 1 for the group, 1/2 for each other.
    groups = torch.tensor([0, 0, 0, 1, 2])
    y = ll.lml(torch.tensor([9.0, 8.0, 7.0, 0.0, 0.0]), 2, groups=groups, group_limit=1)
    torch.testing.assert_close(y[3:], torch.tensor([0.5, 0.5]))
    torch.testing.assert_close(y[:3], ll.lml(torch.tensor([9.0, 8.0, 7.0]), 1))
    x, groups = draw(200, 60, scale=4.0), torch.arange(60) % 13
    limit = 0.5 + uniform(13)
    y = ll.lml(x, 7.5, groups=groups, group_limit=limit)
    torch.testing.assert_close(y.sum(-1), torch.full((200,), 7.5, dtype=DOUBLE))
    assert (groups_of(y, groups, 13) <= limit + 1e-12).all()
    assert ll.lml(x, 12.9, groups=groups, group_limit=0.5).isnan().all()
    for bad in (-1.0, torch.nan):
        limit = torch.full((int(groups.max()) + 1,), 5.0, dtype=DOUBLE)
        limit[0] = bad
        assert ll.lml(x, 2.0, groups=groups, group_limit=limit).isnan().all()


def test_groups_with_odd_scores_and_limits():
    groups, x = torch.tensor([0, 0, 1, 2]), draw(4, 4)
    x[0, 1], x[1, 1], x[2, :2] = torch.nan, torch.inf, torch.inf
    y = ll.lml(x, 2, groups=groups, group_limit=1)
    assert y[[0, 2]].isnan().all()  # nan, and two that are sure of one place
    assert torch.equal(y[1, :2], torch.tensor([0.0, 1.0], dtype=DOUBLE))
    torch.testing.assert_close(y[3], ll.lml(x[3], 2, groups=groups, group_limit=1))
    full = ll.lml(x[3].float(), 0.9, groups=groups, group_limit=0.3)  # 3 * 0.3 is more than 0.9, as is its float32
    torch.testing.assert_close(groups_of(full, groups, 3), torch.full((3,), 0.3))
    with pytest.raises(ValueError, match="`k` must be between 0 and n_classes=4, got -1"):
        ll.lml(x, -1, groups=groups, group_limit=1)
    assert ll.lml(torch.empty(2, 0), 0, groups=groups[:0], group_limit=1).shape == (2, 0)


def test_groups_of_very_different_sizes():
    """One group of 20,000 and 20,000 of one class each: a table of groups as wide as the largest would take 3 GB."""
    groups = torch.cat([torch.zeros(20_000, dtype=torch.long), torch.arange(20_000, 0, -1)])
    x = draw(2, 40_000)
    y = ll.lml(x, 30.0, groups=groups, group_limit=2.0)  # only the large one can bind
    torch.testing.assert_close(y[:, :20_000], ll.lml(x[:, :20_000], 2.0))
    torch.testing.assert_close(y[:, 20_000:], ll.lml(x[:, 20_000:], 28.0))
    assert sum(table.numel() for _, table in _tables(groups, 20_001)) == 40_000
    mixed = torch.randint(0, 300, (5000,), generator=torch.Generator().manual_seed(0)) ** 2 // 300
    places = [table for _, table in _tables(mixed, 299)]
    assert sum(table.numel() for table in places) <= 2 * 5000 + 299
    assert torch.cat([table.flatten() for table in places]).unique().tolist() == list(range(5001))


def test_groups_are_optimal_and_differentiable():
    cp = pytest.importorskip("cvxpy")
    groups, limit = torch.tensor([0, 1, 2, 0, 1, 2, 0]), torch.tensor([0.6, 0.7, 1.1], dtype=DOUBLE)
    for seed in range(3):
        x = draw(7, seed=seed, scale=2.0)
        v = cp.Variable(7)
        limits = [cp.sum(v[[i for i in range(7) if groups[i] == g]]) <= limit[g].item() for g in range(3)]
        objective = cp.Minimize(-x.numpy() @ v - cp.sum(cp.entr(v) + cp.entr(1 - v)))
        cp.Problem(objective, [cp.sum(v) == 1.8, *limits]).solve(solver=cp.CLARABEL)
        y = ll.lml(x, 1.8, groups=groups, group_limit=limit)
        torch.testing.assert_close(y, torch.tensor(v.value), rtol=0, atol=2e-4)
    leaves = (
        draw(2, 7).requires_grad_(),
        torch.tensor([1.2, 1.9], dtype=DOUBLE).requires_grad_(),
        limit.requires_grad_(),
    )
    assert torch.autograd.gradcheck(
        lambda x, k, limit: ll.lml(x, k, groups=groups, group_limit=limit), leaves, fast_mode=True
    )


@pytest.mark.slow
def test_new_numbers_are_not_compiled_anew():
    """One graph for the first numbers, and one for all others."""
    torch.compiler.reset()
    x = torch.randn(4, 9, requires_grad=True)

    def project(k, weight, upper):
        return ll.lml(x, k, weight=weight, upper=upper)

    compiled = torch.compile(project, fullgraph=True, backend="aot_eager")
    for i, numbers in enumerate([(2.5, 0.9, 0.8), (3.5, 1.1, 0.7), (1.5, 0.5, 0.6)]):
        with torch._dynamo.config.patch(error_on_recompile=i > 1):
            out = compiled(*numbers)
        torch.testing.assert_close(out, project(*numbers))
