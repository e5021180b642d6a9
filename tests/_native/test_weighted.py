"""The compiled projection with weights and bounds against plain torch: values, gradients, ends, layouts."""

import importlib
from functools import partial

import pytest
import torch
from tools import slow

import lastlayer as ll
from lastlayer import _native as native

pytestmark = pytest.mark.skipif(bool(native.missing), reason="the compiled kernel was not built")
DOUBLE = torch.float64
weighted = None if native.missing else importlib.import_module("lastlayer._native.weighted")


def problem(rows, n, kind, dtype, seed=0, scale=2.0, per_row=False, below=True):
    """Return logits, k per row within reach, and weights and bounds, shared or per row; with lower ones if `below`."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, n) if per_row else (n,)

    def draw(*size):
        return torch.randn(*size, generator=generator, dtype=DOUBLE)

    weight = {
        "positive": draw(*shape).sigmoid() + 0.5,
        "signs": draw(*shape) * (draw(*shape) > -1),
        "wide": 10 ** (4.5 * draw(*shape).clamp(-1, 1)),
        "bounds": torch.ones(shape, dtype=DOUBLE),
    }[kind].to(dtype)
    bounded = kind in ("bounds", "signs")
    lower = (0.3 * draw(*shape).sigmoid()).to(dtype) if bounded and below else None
    upper = (0.5 + draw(*shape).sigmoid()).to(dtype) if bounded else None
    x = (scale * draw(rows, n)).to(dtype)
    low = weight.double() * (0.0 if lower is None else lower.double())
    high = weight.double() * (upper.double() if bounded else 1.0)
    least, most = (t.expand(rows, n).sum(-1) for t in (torch.minimum(low, high), torch.maximum(low, high)))
    k = least + torch.linspace(0.02, 0.7, rows, dtype=DOUBLE) * (most - least)
    return x, k, {"weight": weight, "lower": lower, "upper": upper}


def results(function, x, k, options, impl, grad):
    """Return values and the gradients of everything that is given."""
    leaves = [t.detach().requires_grad_() for t in (x, k, *(v for v in options.values() if v is not None))]
    names = [name for name, value in options.items() if value is not None]
    y = function(leaves[0], leaves[1], impl=impl, **dict(zip(names, leaves[2:], strict=True)))
    grad = grad if y.ndim == grad.ndim else grad[..., 0]  # one number per row
    return [y.detach(), *torch.autograd.grad(y, leaves, grad.to(y.dtype))]


@pytest.mark.parametrize("kind", ["positive", "signs", "wide", "bounds"])
@pytest.mark.parametrize("function", [ll.lml, ll.lml_at_most, ll.log_lml, ll.lml_threshold])
def test_agrees_with_plain_torch(isa, kind, function):
    for dtype, rows, n, per_row, scale in (
        (DOUBLE, 9, 40, False, 2.0),
        (torch.float32, 33, 100, False, 2.0),
        (torch.float32, 3, 1500, True, 3.0),
        (torch.float32, 19, 45, True, 2.0),
        (torch.float32, 20, 7, False, 60.0),
        (DOUBLE, 11, 150, True, 2.0),
        (torch.float32, 37, 300, False, 2.0),
        (torch.float32, 21, 1001, True, 2.0),
        (torch.float32, 16, 256, False, 40.0),
    ):
        x, k, options = problem(rows, n, kind, dtype, scale=scale, per_row=per_row, below=function is not ll.log_lml)
        grad = torch.linspace(-1, 1, x.numel(), dtype=DOUBLE).reshape(x.shape)
        wide = {name: None if value is None else value.double() for name, value in options.items()}
        found = results(function, x, k, options, "native", grad)
        exact = results(function, x.double(), k, wide, "torch", grad)
        eps = torch.finfo(dtype).eps
        for value, expected in zip(found, exact, strict=True):
            size = expected.abs().max()  # of a gradient of a weight, which is a sum over rows
            torch.testing.assert_close(value.double(), expected, rtol=200 * eps, atol=float(200 * eps * (1 + size)))


@pytest.mark.parametrize("n", [30, 300])
def test_masked_infinite_and_half_precision_rows(n):
    x, k, options = problem(6, n, "signs", torch.float32)
    mask = torch.rand(6, n, generator=torch.Generator().manual_seed(1)) > 0.2
    k = torch.full_like(k, 0.3)
    x[1, 3], x[2, 4], x[3, 5] = torch.inf, -torch.inf, torch.nan
    for given in ({"mask": mask}, {}):
        pair = [ll.lml(x, k, impl=impl, temperature=0.7, **given, **options) for impl in ("native", "torch")]
        torch.testing.assert_close(*pair, rtol=1e-6, atol=1e-6, equal_nan=True)
        assert pair[0].isnan().any(-1).sum() == (0 if "mask" in given and not mask[3, 5] else 1)
    half = x.bfloat16()
    torch.testing.assert_close(
        ll.lml(half, k, impl="native", **options), ll.lml(half, k, impl="torch", **options), equal_nan=True
    )
    columns = {name: value[:, None] for name, value in options.items()}
    assert ll.lml(x.mT.contiguous(), k, dim=0, impl="native", **columns).shape == (n, 6)
    assert ll.lml(x[:0], k[:0], impl="native", **options).shape == (0, n)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["positive", "signs", "bounds"])
def test_half_precision_is_the_rounded_float32_result(isa, kind, dtype):
    wider = torch.float32 if weighted._FUSED else DOUBLE
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    for rows, n, per_row in (
        (9, 1, False), (37, 33, False), (300, 100, False), (21, 129, False), (50, 1000, False), (3, 700, False),
        (5, 2048, False), (7, 5001, False), (37, 33, True), (50, 301, True), (5, 4096, True),
    ):  # fmt: skip
        x, k, options = problem(rows, n, kind, torch.float32, scale=6.0, per_row=per_row)
        x = x.to(dtype)  # many values are subnormal in float16
        if n > 6:
            x[0, 3], x[1, 4], x[2, 5] = torch.inf, -torch.inf, torch.nan
        upstream = torch.randn(rows, n, generator=torch.Generator().manual_seed(1)).to(dtype)
        mask = torch.rand(rows, n, generator=torch.Generator().manual_seed(2)) < 0.9
        for function in (ll.lml, ll.lml_at_most, ll.log_lml):
            terms = options | {"lower": None} if function is ll.log_lml else options
            for given in ({}, {"mask": mask}, {"temperature": 0.7}):
                call = partial(function, **given)
                found = results(call, x, k, terms, "native", upstream)
                exact = results(call, x.to(wider), k, terms, "native", upstream)
                for ours, wanted in zip(found, exact, strict=True):
                    torch.testing.assert_close(ours, wanted.to(ours.dtype), rtol=0, atol=0, equal_nan=True)
                assert found[0].dtype == found[1].dtype == dtype
        columns = {
            name: value if value is None else value.mT if per_row else value[:, None] for name, value in options.items()
        }
        across = ll.lml(x.mT, k, dim=0, impl="native", **columns)
        torch.testing.assert_close(across, ll.lml(x, k, impl="native", **options).mT, rtol=0, atol=0, equal_nan=True)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_common_calls_in_half_precision(isa, dtype):
    wider = torch.float32 if weighted._FUSED else DOUBLE
    x, _, options = problem(40, 301, "bounds", torch.float32)
    for weight in (options["weight"], options["weight"].to(dtype)):
        terms = options | {"weight": weight}
        for scores in (x.to(dtype), x.to(dtype)[::2], x.to(dtype)[:, :1].expand(40, 301), x.to(dtype)[:0]):
            found = ll.lml(scores, 100.0, **terms)
            wanted = ll.lml(scores.to(wider), 100.0, **terms)
            assert found.dtype == dtype
            assert torch.equal(found, wanted.to(dtype))
    with pytest.raises(ValueError, match="must broadcast"):
        ll.lml(x.to(dtype), 100.0, weight=options["weight"][:-1])


def test_rows_at_their_ends():
    x = torch.zeros(4, 3)
    weight, k = torch.tensor([1.0, 2.0, -1.0]), torch.tensor([-1.0, 3.0, 3.5, 1.0])
    leaf = x.clone().requires_grad_()
    y = ll.lml(leaf, k, weight=weight, impl="native")
    assert y[:2].tolist() == [[0, 0, 1], [1, 1, 0]]
    assert y[2].isnan().all()
    y[[0, 1, 3]].sum().backward()
    assert leaf.grad[:3].eq(0).all()
    free = ll.lml(x, 0.0, weight=torch.zeros(3), impl="native")
    torch.testing.assert_close(free, torch.full((4, 3), 0.5))
    nu = ll.lml_threshold(x.double(), k, weight=weight, impl="native")
    torch.testing.assert_close(nu, ll.lml_threshold(x.double(), k, weight=weight, impl="torch"), equal_nan=True)


@pytest.mark.parametrize("n", [33, 300])
def test_odd_weights_per_row(n):
    x, k, options = problem(24, n, "positive", torch.float32, per_row=True)
    weight = options["weight"]
    weight[2], weight[3, 5], weight[4, 6], weight[5, 7] = 0.0, torch.nan, torch.inf, -1.0
    weight[6] *= 1e-37
    weight[7] *= 1e36
    weight[8, ::2] = 0.0
    weight[9, 1:] *= 1e-12
    weight[13] *= 1e7
    weight[14] *= 1e-7
    x[10, 3], x[11, 4] = torch.inf, torch.nan
    k = torch.where(torch.arange(24) == 12, 0.0, 0.3 * weight.double().sum(-1))
    for at_most in (False, True):
        function = ll.lml_at_most if at_most else ll.lml
        found = function(x, k, weight=weight, impl="native")
        alone = torch.cat(
            [function(x[i : i + 1], k[i : i + 1], weight=weight[i : i + 1], impl="native") for i in range(24)]
        )
        exact = function(x, k, weight=weight, impl="torch")
        torch.testing.assert_close(found, alone, rtol=0, atol=3e-7, equal_nan=True)
        torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-6, equal_nan=True)
        assert found.isnan().any(-1).nonzero().flatten().tolist() == [3, 4, 11]


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_long_rows_with_odd_scores(isa, dtype):
    # The first guess of a long row reads some of its classes; what is odd in another shows in the first pass.
    n, odd = 4096, [1000, 1003, 1020, 4095]
    x, _, options = problem(14, n, "positive", dtype)
    weight = options["weight"].mul(1024).round() / 1024  # their sum is exact
    x[1, odd], x[2, odd], x[3, odd[0]] = torch.inf, -torch.inf, torch.nan
    x[4, odd], x[5, odd], x[6] = 200.0, -1e4, x[6] * 30
    x[7, odd], x[8], x[9] = 1e30, 1e4, x[9].sort().values
    x[10, ::128], x[11, 1::2] = 30.0, -30.0
    k = 0.01 * weight.double().sum()
    k = torch.where(torch.arange(14) == 12, 0.0, torch.where(torch.arange(14) == 13, weight.double().sum(), k))
    for given in ({}, {"upper": 0.5 + weight}, {"lower": 0.001 * weight, "upper": 0.5 + weight}):
        for function in (ll.lml, ll.lml_at_most):
            found = function(x, k, weight=weight, impl="native", **given)
            wide = {name: value.double() for name, value in given.items()}
            exact = function(x.double(), k, weight=weight.double(), impl="torch", **wide)
            eps = torch.finfo(dtype).eps
            rows = torch.arange(14) != 8  # scores of 1e4 have few digits left
            torch.testing.assert_close(
                found.double()[rows], exact[rows], rtol=200 * eps, atol=200 * eps, equal_nan=True
            )
            torch.testing.assert_close(found.double()[8], exact[8], rtol=2e4 * eps, atol=2e4 * eps)


GIVEN = {  # what rows can have of their own
    "upper": ("upper",),
    "lower": ("lower",),
    "bounds": ("lower", "upper"),
    "signs": ("weight",),
    "all": ("weight", "lower", "upper"),
    "shared": (),
}


@pytest.mark.parametrize("n", [5, 17, 48, 100, 513, slow(527), slow(1024), slow(1040), slow(2500)])
@pytest.mark.parametrize("kind", GIVEN)
@pytest.mark.parametrize("dtype", [torch.float32, slow(DOUBLE)])
def test_rows_of_any_kind(isa, dtype, kind, n):
    """Bounds, signs, masks and odd scores of each row; blocks of classes end anywhere in a row."""
    rows = 37
    generator = torch.Generator().manual_seed(n)
    x = 2 * torch.randn(rows, n, generator=generator, dtype=DOUBLE)
    draw = partial(torch.rand, rows, n, generator=generator, dtype=DOUBLE)
    signs = torch.where(draw() < 0.4, -1.0, 1.0)
    terms = {"weight": (draw() + 0.5) * signs, "lower": 0.2 * draw(), "upper": draw() + 0.3}
    terms["weight"][:, ::4] *= torch.where(draw()[:, ::4] < 0.3, 0.0, 1.0)  # -0 as well
    terms["lower"][1::9] -= 0.1
    terms = {name: terms[name] for name in GIVEN[kind]} or {"weight": terms["weight"].abs()[0] + 0.1}
    x[2, 1::3], x[3, 0], x[4, n - 1], x[5, ::2] = -torch.inf, torch.inf, torch.nan, -torch.inf
    if "upper" in terms and "lower" in terms:
        terms["upper"][6, 2] = terms["lower"][6, 2] - 0.01
        terms["lower"][7, 3] = torch.nan
    x, terms = x.to(dtype), {name: value.to(dtype) for name, value in terms.items()}
    wide = {name: value.double() for name, value in terms.items()}
    ones = torch.ones(rows, n, dtype=DOUBLE)
    weight, upper = wide.get("weight", ones).expand(rows, n), wide.get("upper", ones)
    lower = wide.get("lower", 0 * ones)
    low, high = weight * lower, weight * upper
    least, most = (t.nan_to_num().sum(-1) for t in (torch.minimum(low, high), torch.maximum(low, high)))
    k = least + torch.linspace(0.05, 0.5, rows, dtype=DOUBLE) * (most - least)
    mask = draw() < 0.8
    for function in (ll.lml, ll.lml_at_most):
        for more in ({}, {"mask": mask}, {"temperature": 0.7}, {"mask": mask[0]}):
            found = function(x, k, impl="native", **terms, **more)
            exact = function(x.double(), k, impl="torch", **wide, **more)
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(found.double(), exact, rtol=50 * eps, atol=50 * eps, equal_nan=True)
            given = {t: v[9:11] if v.ndim > 1 else v for t, v in terms.items()}
            part = {"mask": mask[9:11]} if more.get("mask") is mask else more
            alone = function(x[9:11], k[9:11], impl="native", **given, **part)
            torch.testing.assert_close(alone, found[9:11], rtol=10 * eps, atol=10 * eps, equal_nan=True)
    found = ll.lml(x, k, impl="native", **terms)
    assert found[4].isnan().all()
    assert found[8:].isnan().sum() == 0 or kind == "shared"


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("place", [0, 1, 1000, 4080, 4095])
def test_a_nan_in_a_long_row_shows(isa, dtype, place):
    x = torch.full((2, 4096), -100.0, dtype=dtype)
    x[:, 5] = 100.0
    x[0, place] = torch.nan
    for terms in ({"weight": torch.ones(4096, dtype=dtype)}, {"upper": torch.full((4096,), 0.5, dtype=dtype)}):
        for function in (ll.lml, ll.lml_at_most, ll.lml_threshold):
            found = function(x, 0.4, impl="native", **terms)
            assert found[0].isnan().all()
            assert not found[1].isnan().any()


@pytest.mark.parametrize("n", [33, 200, 1000])
@pytest.mark.parametrize("per_row", [False, True])
def test_temperatures_and_thresholds(isa, n, per_row):
    x, k, options = problem(20, n, "positive", torch.float32, per_row=per_row)
    for function in (ll.lml, ll.lml_at_most, ll.lml_threshold):
        kwargs = {"weight": options["weight"], "temperature": 0.7}
        found = function(x, k, impl="native", **kwargs)
        exact = function(x.double(), k, impl="torch", **kwargs | {"weight": options["weight"].double()})
        torch.testing.assert_close(found.double(), exact, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("n", [5, 100, 300, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("per_row", [False, True])
def test_logarithms_and_thresholds_of_odd_rows(isa, dtype, n, per_row):
    """Ruled-out classes, bounds of 0 and next to 0, far scores, sums at their ends and out of reach."""
    x, k, options = problem(12, n, "bounds", dtype, scale=3.0, per_row=per_row, below=False)
    x[1, 0], x[2, 1:3], x[3, 4], x[4] = torch.inf, -torch.inf, torch.nan, 100 * x[4]
    x[5, 2:] = -500.0  # logarithms that values of the type do not have
    weight, upper = options["weight"], options["upper"].clone()
    upper[..., 3], upper[..., 4] = 0, 1e-42 if dtype == torch.float32 else 1e-310
    most = (weight * upper).double().expand(x.shape).sum(-1)
    k[6], k[7], k[8] = 0, most[7] * (1 + 1e-8), 2 * most[8]  # sums within 1e-6 of the end are taken for it
    options = {"weight": weight, "upper": upper}
    wide = {name: value.double() for name, value in options.items()}
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    mask = torch.rand(x.shape, generator=torch.Generator().manual_seed(2)) < 0.8
    for function in (ll.log_lml, ll.lml_threshold):
        for given in ({}, {"mask": mask}, {"temperature": 0.7}):
            call = partial(function, **given)
            grad = upstream if function is ll.lml_threshold else torch.where(upper > 1e-40, upstream, 0)
            found = results(call, x, k, options, "native", grad)
            exact = results(call, x.double(), k, wide, "torch", grad)
            for value, expected in zip(found, exact, strict=True):
                rows = (12, -1) if len(value) == 12 else (1, -1)  # what rows share is a sum over them
                value, expected = value.double().reshape(rows), expected.reshape(rows)
                bad = expected.isnan().any(-1)
                assert torch.equal(value.isnan().any(-1), bad)
                value, expected = value[~bad], expected[~bad]
                infinite = expected.isinf()
                assert torch.equal(value[infinite], expected[infinite])
                value, expected = value.masked_fill(infinite, 0), expected.masked_fill(infinite, 0)
                size = 1 + expected.abs().amax(-1) if expected.numel() else expected.sum(-1)
                assert (
                    (value - expected).abs().amax(-1) <= 5000 * torch.finfo(dtype).eps * size
                ).all()  # scores reach 1000


@pytest.mark.parametrize("n", [33, 500, 1000, 4096])
@pytest.mark.parametrize("sign", [1, -1])
def test_values_are_exact_beside_either_bound(isa, sign, n):
    # From 0 to 1, or from -1 to 0, with a sum at which nearly all classes are next to one bound, or next to the other.
    generator = torch.Generator().manual_seed(0)
    lower = torch.zeros(n) if sign > 0 else -torch.ones(n)
    lower[::3] += 2.0**-20 * sign  # so that the bounds differ from class to class
    upper = lower + 1 - 2.0**-10 * torch.rand(n, generator=generator)
    x = torch.randn(20, n, generator=generator)
    least, most = lower.double().sum(), upper.double().sum()
    for part in (1e-5, 0.3, 0.99999):
        k = least + part * (most - least)
        found = ll.lml(x, k, lower=lower, upper=upper, impl="native")
        exact = ll.lml(x.double(), k, lower=lower.double(), upper=upper.double(), impl="torch")
        assert ((found >= lower) & (found <= upper)).all()
        error, size = (found.double() - exact).abs().amax(-1), exact.abs().amax(-1)
        assert (error <= 16 * torch.finfo(torch.float32).eps * size).all()  # points of 10 have an error of 8 eps


@pytest.mark.parametrize("names", [("weight",), ("upper",), ("lower", "upper"), ("weight", "upper")])
@pytest.mark.parametrize("n", [5, 48, 300])
def test_a_bad_value_of_a_class_that_is_ruled_out_shows(isa, names, n):
    # The same whether a row comes alone or with others, and as in plain torch.
    rows, generator = 6, torch.Generator().manual_seed(n)
    values = {"weight": torch.ones(rows, n), "lower": torch.full((rows, n), 0.1), "upper": torch.full((rows, n), 0.9)}
    mask = torch.ones(rows, n, dtype=torch.bool)
    mask[:, 1] = False
    for name in names:
        for bad in (torch.nan, torch.inf):
            terms = {other: values[other].clone() for other in names}
            terms[name][::2, 1] = bad
            x = torch.randn(rows, n, generator=generator)
            for score in (torch.inf, -torch.inf):
                x[:, 1] = score
                found = ll.lml(x, 0.5 * n, impl="native", **terms)
                assert found[::2].isnan().all()
                assert not found[1::2].isnan().any()
            if "lower" not in names:  # else bounds of what is left out are 0
                found = ll.lml(x, 0.5 * n, impl="native", mask=mask, **terms)
                assert found[::2].isnan().all()
                assert not found[1::2].isnan().any()


@pytest.mark.parametrize("given", [("lower", "upper"), ("weight", "upper"), ("weight", "lower", "upper")])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_rounding_of_many_shares_does_not_add_up(isa, sign, given):
    # All but a tenth of the budget is spent on classes at their bounds, whose sum must be known to more than that.
    rows, n = 5, 10_000
    x = 10 * torch.randn(rows, n, generator=torch.Generator().manual_seed(0))
    x[:, 0] = 0
    values = {"weight": torch.full((rows, n), 0.3), "lower": torch.full((rows, n), 0.1)}
    values["weight"][:, ::2] *= sign
    terms = {**values, "upper": torch.full((rows, n), 1.1)}
    terms = {name: value for name, value in terms.items() if name in given}
    weight, lower = (terms.get(name, other).double() for name, other in (("weight", x * 0 + 1), ("lower", x * 0)))
    ends = weight * lower, weight * terms["upper"].double()
    for k in (torch.maximum(*ends).sum(-1) - 0.1, torch.minimum(*ends).sum(-1) + 0.1):
        found = ll.lml(x, k, impl="native", **terms)
        exact = ll.lml(x.double(), k, impl="torch", **{name: value.double() for name, value in terms.items()})
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=2e-6)


@pytest.mark.parametrize("n", [90, 300])
@pytest.mark.parametrize("per_row", [False, True])
def test_a_row_does_not_depend_on_its_neighbours(n, per_row):
    x, _, options = problem(40, n, "positive", torch.float32, per_row=per_row)
    given = options["weight"]
    whole = ll.lml(x, 5.0, weight=given, impl="native")
    for rows in (slice(0, 8), slice(3, 20), slice(17, 40)):
        part = ll.lml(x[rows], 5.0, weight=given[rows] if per_row else given, impl="native")
        torch.testing.assert_close(part, whole[rows], rtol=0, atol=1e-7)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    long, size, terms = problem(40, 2000, "signs", torch.float32)
    again = ll.lml(long, size, impl="native", **terms)
    torch.set_num_threads(1)
    assert torch.equal(again, ll.lml(long, size, impl="native", **terms))
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE, torch.bfloat16])
@pytest.mark.parametrize("function", [ll.lml, ll.lml_at_most, ll.log_lml, ll.lml_threshold])
def test_the_short_way_gives_what_the_long_one_gives(isa, dtype, function):
    for rows, n in ((1, 100), (40, 9), (0, 5), (3, 0), (1, 1)):
        x, _, shared = problem(rows, n, "signs", dtype)
        _, _, own = problem(rows, n, "signs", dtype, per_row=True)
        for terms in (shared, own, {"weight": own["weight"].mT.contiguous().mT, "upper": shared["upper"].float()}):
            given = {name: value for name, value in terms.items() if name != "lower" or function is not ll.log_lml}
            for scores in (x, x[:, None].expand(rows, 2, n)[:, 1]):
                short, long = (function(scores, 0.3 * n, impl=impl, **given) for impl in ("auto", "native"))
                torch.testing.assert_close(short, long, rtol=0, atol=0, equal_nan=True)
