"""The projection with limits on groups: optimality on hostile rows, derivatives, transforms, the compiler."""

import pytest
import torch
from tools import slow

import lastlayer as ll
from lastlayer import _native as native
from lastlayer.project.groups import _first_classes, _solve

DOUBLE = torch.float64
SOLVERS = ["torch"] if native.missing else ["torch", "native"]


def solver(name):
    if name == "torch":
        return _solve
    from lastlayer._native import groups

    return groups.solve


def sums(value, groups, n):
    return value.new_zeros(*value.shape[:-1], n).index_add(-1, groups, value)


def hostile(seed):
    """Return scores, k, limits and groups with ties, infinities, wide spreads, and sums at and beyond their ends."""
    generator = torch.Generator().manual_seed(seed)

    def one_of(*choices):
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    def uniform(*shape):
        return torch.rand(*shape, generator=generator, dtype=DOUBLE)

    rows, n = 16, one_of(1, 2, 7, 30, 60)
    n_groups = one_of(1, n, one_of(2, 5, 13))
    groups = one_of(torch.arange(n) % n_groups, torch.randint(0, n_groups, (n,), generator=generator))
    x = torch.randn(rows, n, generator=generator, dtype=DOUBLE) * one_of(1e-3, 1, 1, 30, 1e3, 1e6)
    x = one_of(x, x, x.round(), torch.zeros_like(x))
    x = torch.where(uniform(rows, n) < one_of(0, 0, 0.2), -torch.inf, x)
    x = torch.where(uniform(rows, n) < one_of(0, 0, 0, 0.05), torch.inf, x)
    x[0, 0] = one_of(x[0, 0], x[0, 0], torch.nan)
    whole = torch.randint(0, 4, (rows, n_groups), generator=generator).to(DOUBLE)
    limits = one_of(3 * uniform(rows, n_groups), whole, 0.01 * uniform(rows, n_groups), torch.full_like(whole, n + 3.0))
    limits[:, 0] = one_of(limits[:, 0], limits[:, 0], torch.zeros(rows))
    room = torch.minimum(limits, sums((x != -torch.inf).to(DOUBLE), groups, n_groups)).sum(-1, keepdim=True)
    k = room * one_of(uniform(rows, 1), uniform(rows, 1), 1 - 1e-9 * uniform(rows, 1), 0.0, 1.0, 1.2)
    return x, one_of(k, k, k.floor()), limits, groups


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("seeds", [range(100), slow(range(100, 1500))], ids=str)
def test_conditions_of_optimality(name, seeds):
    for seed in seeds:
        x, k, limits, groups = hostile(seed)
        y, center, delta, bound = solver(name)(x, k, limits, groups)
        n_groups = limits.shape[-1]
        room = torch.minimum(limits, sums((x != -torch.inf).to(DOUBLE), groups, n_groups)).sum(-1, keepdim=True)
        sure = sums((x == torch.inf).to(DOUBLE), groups, n_groups)
        feasible = (k <= room * (1 + 1e-6)) & (sure <= limits).all(-1, keepdim=True) & ~x.isnan().any(-1, keepdim=True)
        feasible = feasible & (sure.sum(-1, keepdim=True) <= k)
        assert torch.equal(y.isnan(), ~feasible.expand_as(y)), seed
        solved = feasible.squeeze(-1)
        y, k, limits, room, bound = y[solved], k[solved], limits[solved], room[solved], bound[solved]
        slack = torch.where(k > room * (1 - 1e-6), 1e-6 * k, 0)  # where the limits are as good as missed
        within = sums(y, groups, n_groups)
        assert ((within.sum(-1, keepdim=True) - k).abs() <= 1e-10 * (1 + k) + slack).all(), seed
        assert (within <= limits + 1e-10 * (1 + limits) + slack).all(), seed
        # y = sigmoid(x + nu + mu) with mu at most 0, and 0 where a group is below its limit.
        nu = (delta - center)[solved]
        below = (nu[:, :-1] <= nu[:, -1:] + 1e-6 * (1 + nu[:, -1:].abs())) | nu[:, -1:].isinf() | nu[:, :-1].isinf()
        no_other = (bound[:, groups] | (x[solved] == -torch.inf)).all(-1, keepdim=True)
        assert (below | ~bound | no_other).all(), seed
        assert (within - limits).abs()[bound].le(1e-9).all(), seed


@pytest.mark.skipif(bool(native.missing), reason="the compiled kernel was not built")
@pytest.mark.parametrize("limit", range(3))  # of the instruction set
def test_the_kernel_gives_what_plain_torch_gives(limit, request):
    native.library().lastlayer_limit_isa(limit)
    request.addfinalizer(lambda: native.library().lastlayer_limit_isa(2))
    for seed in range(60):
        case = hostile(seed)
        found, expected = solver("native")(*case)[0], _solve(*case)[0]
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10, equal_nan=True)
    x = torch.randn(3, 40_000, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    k, limits = torch.full((3, 1), 90.0, dtype=DOUBLE), torch.full((3, 2), 60.0, dtype=DOUBLE)
    limits[:, 1] = 41.0
    groups = torch.arange(40_000) % 2
    torch.testing.assert_close(solver("native")(x, k, limits, groups)[0], _solve(x, k, limits, groups)[0])


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE, torch.bfloat16])
def test_rows_that_keep_the_limits_are_those_of_lml(dtype):
    x, groups = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)).to(dtype), torch.arange(40) % 4
    x[2, ::4] += 30  # the only row with a group above 3
    y, plain = ll.lml(x, 8.0, groups=groups, group_limit=3), ll.lml(x.double(), 8.0).to(dtype)
    others = torch.arange(6) != 2
    assert torch.equal(y[others], plain[others])
    assert torch.equal(y[2], ll.lml(x[2], 8.0, groups=groups, group_limit=3))
    torch.testing.assert_close(sums(y[2].double(), groups, 4)[0].item(), 3.0, rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_low_temperatures_choose_the_best_of_each_group():
    x, groups = torch.randn(50, 30, generator=torch.Generator().manual_seed(0), dtype=DOUBLE), torch.arange(30) % 5
    y = ll.lml(x, 4, groups=groups, group_limit=1, temperature=1e-3)
    best = x.view(50, 6, 5).amax(1)
    taken = sums(y, groups, 5)
    chosen = best >= best.sort(-1, descending=True).values[:, 3:4]
    apart = (best.sort(-1, descending=True).values.diff(dim=-1).abs() > 0.05).all(-1)
    first, second = x.view(50, 6, 5).topk(2, dim=1).values.unbind(1)
    apart = apart & (first - second > 0.05).all(-1)
    assert apart.sum() > 5
    torch.testing.assert_close(taken[apart], chosen[apart].to(DOUBLE), rtol=0, atol=1e-9)


def bound_case(rows=3):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, 8, generator=generator, dtype=DOUBLE).mul(2)
    groups = torch.tensor([0, 1, 2, 0, 1, 2, 0, 3])
    return x, torch.linspace(1.2, 2.2, rows, dtype=DOUBLE), torch.tensor([0.6, 0.7, 1.1, 0.4], dtype=DOUBLE), groups


def test_derivatives():
    x, k, limits, groups = bound_case()

    def project(x, k, limits):
        return ll.lml(x, k, groups=groups, group_limit=limits)

    leaves = [value.requires_grad_() for value in (x, k, limits)]
    bound = (sums(project(*leaves).detach(), groups, 4) - limits.detach()).abs() < 1e-9
    assert 0 < bound.sum() < bound.numel()
    assert torch.autograd.gradcheck(project, leaves, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(project, leaves)
    from torch.func import jacfwd, jacrev, vmap

    x, k, limits = (value.detach() for value in leaves)
    for argnum in range(3):
        torch.testing.assert_close(jacfwd(project, argnum)(x, k, limits), jacrev(project, argnum)(x, k, limits))
    each = vmap(project, in_dims=(0, 0, None))(x, k, limits)
    torch.testing.assert_close(each, project(x, k, limits), rtol=1e-12, atol=1e-12)
    by_limits = vmap(project, in_dims=(None, None, 0))(x, k, torch.stack([limits, 2 * limits]))
    torch.testing.assert_close(by_limits[1], project(x, k, 2 * limits), rtol=1e-12, atol=1e-12)


def test_a_row_without_a_solution_has_no_derivative_and_does_not_spread():
    x, _, limits, groups = bound_case()
    x.requires_grad_()
    y = ll.lml(x, torch.tensor([1.2, 2.9, 1.5], dtype=DOUBLE), groups=groups, group_limit=limits)
    assert torch.equal(y.isnan().all(-1), torch.tensor([False, True, False]))
    (used,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
    assert torch.equal(used.isnan().all(-1), torch.tensor([False, True, False]))
    (unused,) = torch.autograd.grad(y[0].square().sum(), x)
    assert (unused[1:] == 0).all()
    assert (unused[0] != 0).any()


def test_first_classes():
    groups = torch.tensor([7, 2, 7, 0, 2, 7])
    assert _first_classes(groups).tolist() == [0, 1, 0, 3, 1, 0]


def test_is_one_graph():
    x, k, limits, groups = bound_case()
    torch.compiler.reset()

    def both(x, limits, impl):
        y = ll.lml(x, k, groups=groups, group_limit=limits, impl=impl)
        return y, *torch.autograd.grad((y * torch.arange(8)).sum(), (x, limits))

    x, limits = x.requires_grad_(), limits.requires_grad_()
    for impl in ("auto", "torch"):

        def project(x, limits, impl=impl):
            return ll.lml(x, k, groups=groups, group_limit=limits, impl=impl)

        y = torch.compile(project, fullgraph=True)(x, limits)
        found = torch.autograd.grad((y * torch.arange(8)).sum(), (x, limits))
        for value, expected in zip((y, *found), both(x, limits, "auto"), strict=True):
            torch.testing.assert_close(value, expected)
