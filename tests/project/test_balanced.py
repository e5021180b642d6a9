"""The balanced assignment: rows and columns exact, entries at most 1, derivatives of the solution."""

import numpy as np
import pytest
import torch
from tools import slow

import lastlayer as ll

DOUBLE = torch.float64


def matrix(rows, columns, spread=2.0, bias=1.0, seed=0, dtype=DOUBLE):
    generator = torch.Generator().manual_seed(seed)
    x = spread * torch.randn(rows, columns, generator=generator, dtype=DOUBLE)
    return (x + bias * torch.randn(columns, generator=generator, dtype=DOUBLE)).to(dtype)


def capacities(columns, total, seed=0):
    c = torch.rand(columns, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE) + 0.5
    return c * total / c.sum()


def test_golden():
    # Two rows, two columns, one each: y_11 = y_22 = s(d) and y_12 = y_21 = s(-d). The duals cancel everything but
    # z_11 + z_22 - z_12 - z_21 = 4 d.
    x = torch.tensor([[3.0, 1.0], [0.5, 0.5]], dtype=DOUBLE)
    d = torch.tensor((3.0 + 0.5 - 1.0 - 0.5) / 4, dtype=DOUBLE)
    y = ll.lml_balanced(x, 1)
    torch.testing.assert_close(y, torch.stack([d.sigmoid(), (-d).sigmoid(), (-d).sigmoid(), d.sigmoid()]).view(2, 2))
    nu, mu = ll.lml_balanced_duals(x, 1)
    torch.testing.assert_close((x + nu[:, None] + mu).sigmoid(), y)
    assert abs(mu.mean()) < 1e-12


@pytest.mark.parametrize("at_most", [False, True])
@pytest.mark.parametrize("shape", [(4, 4), (7, 5), (5, 9), (64, 8), (16, 96), (200, 32)])
def test_rows_and_columns_are_exact(shape, at_most):
    """In float32, over spreads, biases, sizes of k, real k per row and uneven capacities."""
    rows, columns = shape
    for spread in (0.5, 12.0):
        for bias in (0.0, 6.0):
            for seed, k in enumerate((1.0, 1.37, columns / 2, None)):
                x = matrix(rows, columns, spread, bias, seed, torch.float32)
                generator = torch.Generator().manual_seed(seed)
                per_row = 0.5 + torch.rand(rows, generator=generator, dtype=DOUBLE) * (columns / 2 - 0.5)
                sums = per_row if k is None else torch.full((rows,), k, dtype=DOUBLE)
                c = capacities(columns, sums.sum().item() * (1.25 if at_most else 1.0), seed)
                if (c >= rows).any():
                    c = torch.full_like(c, c.mean().item())
                y = ll.lml_balanced(x, sums if k is None else k, c, at_most=at_most).double()
                off = (y.sum(0) - c) / c
                assert ((y.sum(1) - sums).abs() / sums).max() < 1e-6
                assert (off.clamp(min=0) if at_most else off.abs()).max() < 1e-6
                assert y.min() >= 0
                assert y.max() <= 1


@pytest.mark.parametrize("at_most", [False, True])
def test_is_the_optimum(at_most):
    cp = pytest.importorskip("cvxpy")
    x, k = matrix(4, 3), 1.2
    c = capacities(3, 4 * k * (1.3 if at_most else 1), 1)
    v = cp.Variable((4, 3))
    columns = cp.sum(v, axis=0) <= c.numpy() if at_most else cp.sum(v, axis=0) == c.numpy()
    objective = cp.Minimize(-cp.sum(cp.multiply(x.numpy(), v)) - cp.sum(cp.entr(v) + cp.entr(1 - v)))
    cp.Problem(objective, [cp.sum(v, axis=1) == k, columns]).solve(solver=cp.CLARABEL)
    torch.testing.assert_close(ll.lml_balanced(x, k, c, at_most=at_most), torch.tensor(v.value), rtol=0, atol=1e-4)


@pytest.mark.parametrize("at_most", [False, True])
@pytest.mark.parametrize("shape", [(4, 3), slow((3, 4))])
def test_derivatives(shape, at_most):
    x = matrix(*shape).requires_grad_()
    k = (0.7 + torch.rand(shape[0], generator=torch.Generator().manual_seed(1), dtype=DOUBLE)).requires_grad_()
    c = capacities(shape[1], k.sum().item() * (1.3 if at_most else 1)).requires_grad_()

    def function(x, k, c):
        scaled = c if at_most else c * k.sum() / c.sum()
        return ll.lml_balanced(x, k, scaled, at_most=at_most), *ll.lml_balanced_duals(x, k, scaled, at_most=at_most)

    assert torch.autograd.gradcheck(function, (x, k, c), check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda x, k, c: function(x, k, c)[0], (x, k, c), fast_mode=True)


@pytest.mark.parametrize("at_most", [False, True])
def test_a_gradient_of_0_has_a_derivative(at_most):
    """`torch.autograd.functional` differentiates gradients where what comes from above is 0."""

    def run(x, c):
        limits = c if at_most else c * 4.8 / c.sum()
        return ll.lml_balanced(x, 1.2, limits, at_most=at_most), *ll.lml_balanced_duals(x, 1.2, limits, at_most=at_most)

    inputs, along = (matrix(4, 3), capacities(3, 5.0)), (matrix(4, 3, seed=1), capacities(3, 1.0, 2))
    torch.testing.assert_close(torch.autograd.functional.jvp(run, inputs, along), torch.func.jvp(run, inputs, along))

    def total(x, c):
        return sum(part.square().sum() for part in run(x, c))

    found, expected = (getattr(torch.autograd.functional, name)(total, inputs, along)[1] for name in ("hvp", "vhp"))
    torch.testing.assert_close(found, expected)


def test_backward_is_that_of_an_unrolled_search():
    x, c = matrix(12, 6), capacities(6, 12 * 1.5)
    weight = matrix(12, 6, seed=3)

    def unrolled(x):
        mu = torch.zeros(6, dtype=DOUBLE)
        for _ in range(200):
            nu = ll.lml_threshold(x + mu, 1.5)
            mu = ll.lml_threshold((x + nu[:, None]).T, c)
        return (x + ll.lml_threshold(x + mu, 1.5)[:, None] + mu).sigmoid()

    grads = []
    for function in (unrolled, lambda x: ll.lml_balanced(x, 1.5, c)):
        leaf = x.clone().requires_grad_()
        (function(leaf) * weight).sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-5, atol=1e-8)


def test_large_systems_are_solved_step_by_step(monkeypatch):
    x = matrix(30, 20).requires_grad_()
    direct = ll.lml_balanced(x, 2)
    expected = torch.autograd.grad((direct * matrix(30, 20, seed=1)).sum(), x)[0]
    monkeypatch.setattr("lastlayer.project.balanced._DENSE", 8)
    y = ll.lml_balanced(x, 2)
    torch.testing.assert_close(y, direct, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(
        torch.autograd.grad((y * matrix(30, 20, seed=1)).sum(), x)[0], expected, rtol=1e-7, atol=1e-9
    )


def test_rows_and_columns_that_take_nothing_or_everything():
    x = matrix(3, 4)
    y = ll.lml_balanced(x, torch.tensor([0.0, 4.0, 1.0]), torch.tensor([1.0, 2.0, 1.0, 1.0]))
    assert y.tolist() == [[0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0]]
    leaf = x.clone().requires_grad_()
    y = ll.lml_balanced(leaf, torch.tensor([0.0, 2.0, 2.0]), torch.tensor([0.0, 2.0, 1.0, 1.0]))
    assert y[0].tolist() == [0] * 4
    assert y[:, 0].tolist() == [0] * 3
    assert y[1:, 1].tolist() == [1, 1]
    torch.testing.assert_close(y.sum(1), torch.tensor([0.0, 2.0, 2.0], dtype=DOUBLE))
    y[1, 2].backward()
    assert leaf.grad.isfinite().all()
    assert leaf.grad[0].eq(0).all()


@pytest.mark.parametrize("masked", [False, True])
def test_decided_rows_and_columns_forgive_the_rounding_of_the_sums(masked):
    """Float32 sums of an assignment do not add up exactly, and what is full or empty cannot take the difference."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        y = torch.rand(6, 5, generator=generator)
        y[:, 0], y[1], y[:, 2], y[3, 3] = 1.0, 0.0, 0.0, 1.0
        mask = torch.rand(6, 5, generator=generator) < 0.7 if masked else torch.ones(6, 5, dtype=torch.bool)
        y = y * mask
        y[3] = mask[3]
        found = ll.lml_balanced(torch.randn(6, 5, generator=generator), y.sum(1), y.sum(0), mask=mask).double()
        torch.testing.assert_close(found.sum(1), y.double().sum(1), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found.sum(0), y.double().sum(0), rtol=1e-6, atol=1e-6)


def test_k_is_not_rounded_to_the_dtype_of_the_logits():
    x, weight = matrix(2, 3).float(), matrix(2, 3, seed=1).float()

    def gradient(x):
        k = torch.tensor([1.0, 1.3], dtype=DOUBLE, requires_grad=True)
        return torch.autograd.grad(ll.lml_balanced(x, k), k, weight.to(x))[0]

    torch.testing.assert_close(gradient(x), gradient(x.double()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("k", "capacity"), [([1.0, 1.0, 2.0], [0.0, 1.0, 1.2, 1.8]), ([1.0, 3.0, 2.0], [3.0, 0.75, 1.25, 1.0])]
)
def test_finite_duals_have_mean_0_beside_infinite_ones(k, capacity):
    def finite(x):
        nu, mu = ll.lml_balanced_duals(x, torch.tensor(k), torch.tensor(capacity))
        return nu[nu.isfinite()], mu[mu.isfinite()]

    x = matrix(3, 4, bias=4.0).requires_grad_()
    mu = finite(x)[1]
    assert mu.numel() == 3
    assert abs(mu.mean()) < 1e-12
    assert torch.autograd.gradcheck(finite, x, check_forward_ad=True)


def test_mask_and_infinite_logits():
    x, mask = matrix(6, 4), torch.ones(6, 4, dtype=torch.bool)
    mask[0, :2] = mask[3, 1] = False
    y = ll.lml_balanced(x, 1.5, mask=mask)
    assert y[~mask].eq(0).all()
    torch.testing.assert_close(y.sum(0), torch.full((4,), 2.25, dtype=DOUBLE))
    torch.testing.assert_close(ll.lml_balanced(x.masked_fill(~mask, -torch.inf), 1.5), y)
    high = x.clone()
    high[1, 2] = 60.0
    expected = ll.lml_balanced(high, 1.5)
    high[1, 2] = torch.inf  # a pair that is chosen for sure
    y = ll.lml_balanced(high.requires_grad_(), 1.5)
    torch.testing.assert_close(y, expected)
    (grad,) = torch.autograd.grad(y.square().sum(), high)
    assert grad.isfinite().all()
    assert ll.lml_balanced(x.index_fill(1, torch.tensor([0]), torch.inf), 1.5).isnan().all()  # 6 in a column of 2.25


@pytest.mark.parametrize("at_most", [False, True])
def test_a_chosen_pair_leaves_the_gradient_of_a_temperature(at_most):
    x = matrix(3, 4).index_put_((torch.tensor(0), torch.tensor(1)), torch.tensor(torch.inf, dtype=DOUBLE))
    capacity = torch.tensor([1.5, 1.8, 1.2, 1.5], dtype=DOUBLE)
    temperature = torch.tensor(0.7, dtype=DOUBLE, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda t: ll.lml_balanced(x, 2.0, capacity, at_most=at_most, temperature=t), temperature
    )


@pytest.mark.parametrize("at_most", [False, True])
def test_nan_is_not_a_pair_that_is_ruled_out(at_most):
    x, mask = torch.stack([matrix(6, 4), matrix(6, 4, seed=1)]), torch.ones(6, 4, dtype=torch.bool)
    x[0, 2, 1], mask[2, 1] = torch.nan, False
    y = ll.lml_balanced(x, 1.5, 2.25, at_most=at_most)
    assert y[0].isnan().all()
    torch.testing.assert_close(y[1], ll.lml_balanced(x[1], 1.5, 2.25, at_most=at_most))
    assert ll.lml_balanced(x, 1.5, mask=mask).isfinite().all()


def test_a_limit_above_what_a_column_can_take_is_no_limit():
    x, mask = matrix(4, 3), torch.ones(4, 3, dtype=torch.bool)
    mask[:3, 2] = False  # one pair is left in the last column
    expected = ll.lml_balanced(x, 1.0, torch.tensor([1.2, 1.9, 1.0]), at_most=True, mask=mask)
    torch.testing.assert_close(expected.sum(0)[:2], torch.tensor([1.2, 1.9], dtype=DOUBLE))  # the others are at theirs
    for limit in (1.5, 4.0, 9.0, torch.inf):
        limits = torch.tensor([1.2, 1.9, limit], requires_grad=True)
        y = ll.lml_balanced(x, 1.0, limits, at_most=True, mask=mask)
        torch.testing.assert_close(y, expected)
        (grad,) = torch.autograd.grad(y.square().sum(), limits)
        assert grad[:2].ne(0).all()
        assert grad[2] == 0


@pytest.mark.parametrize("at_most", [False, True])
def test_cold_assignments_reach_the_linear_programme(at_most):
    """Whole loads, masks and temperatures at which all but a few entries are 0 or 1."""
    linprog = pytest.importorskip("scipy.optimize").linprog
    draw = np.random.default_rng(0)
    for problem in range(24):
        rows, columns, k = draw.integers(6, 14), draw.integers(5, 9), draw.integers(1, 4)
        taken = draw.random((rows, columns)).argsort(1) < k  # the loads of an assignment that exists
        loads = taken.sum(0) + (draw.integers(0, 3, columns) if at_most else 0)
        scores = draw.standard_normal((rows, 3)) @ draw.standard_normal((3, columns))
        scores = scores if problem % 3 else (2 * scores).round() / 2  # with ties
        mask = taken | (draw.random((rows, columns)) > 0.1)
        every = np.vstack([np.kron(np.eye(rows), np.ones(columns)), np.kron(np.ones(rows), np.eye(columns))])
        upper, equal = (every[rows:], every[:rows]) if at_most else (None, every)
        sums = np.full(rows, k) if at_most else np.concatenate([np.full(rows, k), loads])
        best = linprog(
            -scores.ravel(), upper, loads if at_most else None, equal, sums, np.c_[0 * mask.ravel(), mask.ravel()]
        )
        for temperature in (0.03, 0.003, 0.0003):
            y = ll.lml_balanced(
                torch.tensor(scores),
                int(k),
                torch.tensor(loads),
                at_most=at_most,
                mask=torch.tensor(mask),
                temperature=temperature,
            ).numpy()
            np.testing.assert_allclose(y.sum(1), k, rtol=1e-6)
            over = y.sum(0) - loads
            assert (over if at_most else abs(over)).max() <= 1e-6 * rows
            assert (scores * y).sum() >= -best.fun - temperature * y.size * np.log(2) - 1e-6 * rows


@pytest.mark.parametrize("at_most", [False, True])
def test_the_sharpest_logits_have_a_solution_too(at_most):
    """At a spread of 10,000, one by one and as a batch: the solution cannot be followed over every doubling."""
    for seeds in ([48], [52], [55], [59], [117], [148], range(40, 60)):
        drawn = [torch.Generator().manual_seed(seed) for seed in seeds]
        x = torch.stack([1e4 * torch.randn(9, 6, generator=g, dtype=DOUBLE) for g in drawn])
        inside = torch.stack([torch.rand(9, 6, generator=g, dtype=DOUBLE) for g in drawn])
        sums, limits = inside.sum(-1), inside.sum(-2) * (1.3 if at_most else 1.0)
        y = ll.lml_balanced(x, sums, limits, at_most=at_most)
        torch.testing.assert_close(y.sum(-1), sums, rtol=1e-6, atol=0)
        over = y.sum(-2) - limits
        assert (over if at_most else over.abs()).max() <= 1e-5


@pytest.mark.parametrize("columns", [4, 9])
def test_the_sharpest_logits_have_a_gradient_too(columns):
    """With whole sums: beside pairs that are open, rows and columns hang together by 1e-100 of a pair."""
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        x = (3000 * torch.randn(7, columns, generator=generator, dtype=DOUBLE)).requires_grad_()
        k = torch.randint(1, columns, (7,), generator=generator)
        upstream = torch.randn(7, columns, generator=generator, dtype=DOUBLE)
        y = ll.lml_balanced(x, k)
        if y.isnan().any():  # the search has not found the solution
            continue
        (grad,) = torch.autograd.grad(y, x, upstream)
        slope = (y * (1 - y)).detach()
        assert (grad.abs() <= 20 * slope.max() + 1e-12).all()
        for dim in (0, 1):  # the sums of rows and columns stay
            assert grad.sum(dim).abs().max() <= 1e-12


def test_what_has_no_solution_is_nan_and_nothing_else():
    x = torch.stack([matrix(3, 4), matrix(3, 4, seed=1)])
    k = torch.tensor([[1.0, 1.0, 9.0], [1.0, 1.0, 2.0]])
    y = ll.lml_balanced(x, k)
    assert y[0].isnan().all()
    torch.testing.assert_close(y[1], ll.lml_balanced(x[1], k[1]))
    assert ll.lml_balanced(x[0], 1.0, torch.tensor([1.0, 1.0, 1.0, 1.0])).isnan().all()  # 4 is not 3
    assert ll.lml_balanced(x[0], torch.tensor(1.0), torch.tensor([0.5] * 4), at_most=True).isnan().all()
    for bad in (-1.0, torch.nan):
        for at_most in (False, True):
            assert ll.lml_balanced(x[0], 1.0, torch.tensor([bad, 2.0, 1.0, 1.0]), at_most=at_most).isnan().all()
    mask = torch.tensor([[True, False, False, False]] * 2 + [[True] * 4])
    assert ll.lml_balanced(x[0], 1.0, torch.tensor([1.0, 1.0, 0.5, 0.5]), mask=mask).isnan().all()
    for bad in (-1.0, 0.0, torch.nan):
        y = ll.lml_balanced(x, 1.0, temperature=torch.tensor([bad, 0.5]))
        assert y[0].isnan().all()
        torch.testing.assert_close(y[1], ll.lml_balanced(x[1], 1.0, temperature=0.5))


@pytest.mark.parametrize("at_most", [False, True])
def test_a_matrix_without_a_solution_that_is_not_used_spoils_no_gradient(at_most):
    x, capacity = torch.stack([matrix(3, 4), matrix(3, 4, seed=1)]), torch.tensor([1.5, 1.0, 0.5, 1.0], dtype=DOUBLE)
    k = torch.tensor([[1.0, 1.0, 2.0], [1.0, 9.0, 1.0]], dtype=DOUBLE)
    for part in (
        lambda *a: ll.lml_balanced(*a, at_most=at_most),
        lambda *a: ll.lml_balanced_duals(*a, at_most=at_most)[1],
    ):
        alone = [t.clone().requires_grad_() for t in (x[0], k[0], capacity)]
        both = [t.clone().requires_grad_() for t in (x, k, capacity)]
        expected = torch.autograd.grad(part(*alone).square().sum(), alone)
        found = torch.autograd.grad(part(*both)[0].square().sum(), both)
        torch.testing.assert_close(found[0][0], expected[0])
        torch.testing.assert_close(found[1][0], expected[1])
        torch.testing.assert_close(found[2], expected[2])
        again = torch.autograd.grad(part(*alone).square().sum(), alone, create_graph=True)
        expected = torch.autograd.grad(again[2].square().sum(), alone)
        again = torch.autograd.grad(part(*both)[0].square().sum(), both, create_graph=True)
        found = torch.autograd.grad(again[2].square().sum(), both)
        torch.testing.assert_close(found[2], expected[2])
        torch.testing.assert_close(found[0][0], expected[0])
        (spoilt,) = torch.autograd.grad(part(*both)[1].sum(), both[:1])
        assert spoilt[0].eq(0).all()
        assert spoilt[1].isnan().any()


def test_one_column_and_empty_batches():
    assert ll.lml_balanced(torch.zeros(3, 1), torch.tensor([0.2, 0.5, 0.3])).squeeze(-1).tolist() == pytest.approx(
        [0.2, 0.5, 0.3]
    )
    assert ll.lml_balanced(torch.zeros(0, 3, 4), 1).shape == (0, 3, 4)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"k": 1, "capacity": 2.0},
            ValueError,
            "`capacity` times 4 columns must be equal to `k` times 3 rows, 3, got 8",
        ),
        (
            {"k": 1, "capacity": 0.5, "at_most": True},
            ValueError,
            "must be at least `k` times 3 rows, 3, got 2. Raise it",
        ),
        ({"k": 1, "capacity": -1.0}, ValueError, "`capacity` must be at least 0 and finite, got -1"),
        ({"k": 1, "capacity": "1"}, TypeError, "`capacity` must be a number or a tensor, got str"),
        ({"k": 1, "capacity": torch.ones(3)}, ValueError, "got shape \\(3,\\). Give one number per column"),
        ({"k": 1, "capacity": torch.ones(4, dtype=torch.bool)}, TypeError, "`capacity` must be real"),
        ({"k": 5}, ValueError, "`k` must be between 0 and n_classes=4, got 5"),
        ({"k": 1, "at_most": "yes"}, TypeError, "`at_most` must be True or False, got 'yes'"),
        ({"k": 1, "at_most": torch.ones(2)}, TypeError, "`at_most` must be True or False, got tensor"),
        (
            {"k": 1, "temperature": torch.ones(3)},
            ValueError,
            r"`temperature` must broadcast to the batch shape \(\), got",
        ),
    ],
)
def test_messages(options, error, text):
    with pytest.raises(error, match=text):
        ll.lml_balanced(torch.randn(3, 4), **options)
    with pytest.raises(ValueError, match="`logits` must have rows and columns"):
        ll.lml_balanced(torch.randn(4), 1)


def test_half_precision_transforms_and_module():
    x = matrix(6, 4)
    y = ll.lml_balanced(x.bfloat16(), 2)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), ll.lml_balanced(x, 2), rtol=2e-2, atol=1e-2)
    batch = torch.stack([matrix(6, 4, seed=s) for s in range(3)])
    mapped = torch.func.vmap(lambda x: ll.lml_balanced(x, 2))(batch)
    torch.testing.assert_close(mapped, torch.stack([ll.lml_balanced(b, 2) for b in batch]), rtol=1e-9, atol=1e-9)
    module = ll.LMLBalanced(2, at_most=False, temperature=0.5)
    torch.testing.assert_close(module(x), ll.lml_balanced(x / 0.5, 2))
    assert "k=2" in repr(module)


@pytest.mark.slow
def test_compiles():
    function = torch.compile(ll.lml_balanced, fullgraph=True, backend="aot_eager")
    x = matrix(6, 4).requires_grad_()
    weight = matrix(6, 4, seed=2)
    expected = torch.autograd.grad((ll.lml_balanced(x, 1.5) * weight).sum(), x)[0]
    torch.testing.assert_close(torch.autograd.grad((function(x, 1.5) * weight).sum(), x)[0], expected)


def test_the_libraries_of_the_backward_pass_are_loaded_once(monkeypatch):
    from types import SimpleNamespace

    from lastlayer.project import balanced

    solved, capturing = [], [True]
    monkeypatch.setattr(balanced, "_solvers", set())
    monkeypatch.setattr(balanced, "_solve_something", solved.append)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    assert balanced._load_solver(torch.zeros(2)) is None  # on the CPU nothing is loaded
    on = [SimpleNamespace(device=torch.device("cuda", i)) for i in range(2)]
    assert balanced._load_solver(on[0]) is None  # a capture would be disturbed
    capturing[0] = False
    threads = [balanced._load_solver(one) for one in (*on, *on)]
    for thread in threads[:2]:
        thread.join()
    assert threads[2:] == [None, None]
    assert sorted(solved) == ["stream of cuda:0", "stream of cuda:1"]
