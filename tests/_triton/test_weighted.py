"""The GPU kernels with weights and bounds against plain torch: on a GPU, or in Triton's interpreter."""

import pytest
import torch
from tools import DEVICE, GPU_KERNELS, INTERPRETED

import lastlayer as ll

pytestmark = GPU_KERNELS
DOUBLE = torch.float64


def problem(rows, n, kind, scale, per_row=False):
    """Return logits, k per row within reach, and weights and bounds, shared or per row; all in float32 but k."""
    generator = torch.Generator(DEVICE).manual_seed(n)
    shape = (rows, n) if per_row else (n,)

    def draw(*size):
        return torch.randn(*size, generator=generator, device=DEVICE)

    weight = {
        "positive": draw(*shape).sigmoid() + 0.5,
        "signs": draw(*shape) * (draw(*shape) > -1),
        "wide": 10 ** (4.5 * draw(*shape).clamp(-1, 1)),
    }[kind]
    lower = 0.3 * draw(*shape).sigmoid() if kind == "signs" else None
    upper = 0.5 + draw(*shape).sigmoid() if kind == "signs" else None
    low, high = (weight.double() * (d if v is None else v.double()) for v, d in ((lower, 0.0), (upper, 1.0)))
    least, most = (t.expand(rows, n).sum(-1) for t in (torch.minimum(low, high), torch.maximum(low, high)))
    k = least + torch.linspace(0.02, 0.7, rows, dtype=DOUBLE, device=DEVICE) * (most - least)
    return scale * draw(rows, n), k, {"weight": weight, "lower": lower, "upper": upper}


def results(function, x, k, options, impl, **more):
    """Return values and the gradients of everything that is given."""
    names = [name for name, value in options.items() if value is not None]
    leaves = [t.detach().requires_grad_() for t in (x, k, *(options[name] for name in names))]
    y = function(leaves[0], leaves[1], impl=impl, **dict(zip(names, leaves[2:], strict=True)), **more)
    grad = torch.linspace(-1, 1, y.numel(), device=DEVICE).reshape(y.shape).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


@pytest.mark.parametrize("kind", ["positive", "signs", "wide"])
@pytest.mark.parametrize(
    ("rows", "n", "per_row", "scale"), [(20, 20, False, 2.0), (3, 70, True, 3.0), (4, 7, False, 60.0)]
)
def test_agrees_with_plain_torch(kind, rows, n, per_row, scale):
    x, k, options = problem(rows, n, kind, scale, per_row)
    wide = {name: None if value is None else value.double() for name, value in options.items()}
    for function, more in ((ll.lml, {}), (ll.lml_at_most, {"temperature": 0.7})):
        found = results(function, x, k, options, "triton", **more)
        exact = results(function, x.double(), k, wide, "torch", **more)
        for value, expected in zip(found, exact, strict=True):
            room = 2e-5 * float(1 + expected.abs().max())
            torch.testing.assert_close(value.double(), expected, rtol=2e-5, atol=room)
        weight = options["weight"].double()
        if function is ll.lml:
            off = ((weight * found[0].double()).sum(-1) - k).abs() / (weight * found[0].double()).abs().sum(-1)
            assert off.max() < 1e-6


@pytest.mark.parametrize("kind", ["positive", "signs", "wide"])
@pytest.mark.parametrize("per_row", [False, True])
def test_rarely_met_lengths(kind, per_row, monkeypatch):
    from lastlayer._triton import plan

    monkeypatch.setattr(plan, "PATIENCE", plan.OFTEN)
    x, k, options = problem(6, 90, kind, 2.0, per_row)
    x[1, 3], x[2, 4] = -torch.inf, torch.inf
    k[2] += options["weight"].expand(6, 90)[2, 4].clamp(max=0).double()
    k[5] = 1e-4
    mask = torch.rand(6, 90, generator=torch.Generator(DEVICE).manual_seed(1), device=DEVICE) > 0.1
    wide = {name: None if value is None else value.double() for name, value in options.items()}
    for function, more in ((ll.lml, {}), (ll.lml_at_most, {"temperature": 0.7}), (ll.lml, {"mask": mask})):
        if "mask" in more:  # where a row without a solution has other gradients
            x, k = x.clamp(-9, 9), torch.full_like(k, 0.3)
        found = results(function, x, k, options, "triton", **more)
        exact = results(function, x.double(), k, wide, "torch", **more)
        for value, expected in zip(found, exact, strict=True):
            room = 2e-5 * float(1 + expected.abs().nan_to_num().max())
            torch.testing.assert_close(value.double(), expected, rtol=2e-5, atol=room, equal_nan=True)


@pytest.mark.parametrize("kind", ["positive", "signs", "wide"])
def test_long_rows(kind, monkeypatch):
    from lastlayer._triton import weighted

    monkeypatch.setattr(weighted, "LONGEST", 16)
    monkeypatch.setattr(weighted, "STREAM", {"C": 32, "num_warps": 1})
    monkeypatch.setattr(
        weighted, "LONG", {key: {"W": 2, "C": 32, "SAMPLE": 32, "num_warps": 1} for key in weighted.LONG}
    )
    x, k, options = problem(4, 70, kind, 2.0)
    x[1, 3], x[2, 4] = -torch.inf, torch.inf
    k[2] += options["weight"][4].clamp(max=0).double()
    wide = {name: None if value is None else value.double() for name, value in options.items()}
    for function in (ll.lml, ll.lml_at_most):
        found = results(function, x, k, options, "triton")
        exact = results(function, x.double(), k, wide, "torch")
        for value, expected in zip(found, exact, strict=True):
            room = 2e-5 * float(1 + expected.abs().nan_to_num().max())
            torch.testing.assert_close(value.double(), expected, rtol=2e-5, atol=room, equal_nan=True)


@pytest.mark.parametrize("stages", [0, 1, 2, 3])
def test_rows_that_are_on_their_way_ahead_of_time(stages, monkeypatch):
    """More rows than programs at once, an odd number of them, and one tile per row or three."""
    from lastlayer._triton import plan, weighted

    monkeypatch.setattr(plan, "PATIENCE", 1)
    monkeypatch.setattr(weighted, "_fit", lambda *_: (128, stages))
    monkeypatch.setattr(weighted, "_programs", lambda *_: 3)
    for n in (28, 112):
        x, k, options = problem(61, n, "positive", 2.0)
        x[5, 2] = -torch.inf
        x[9] *= 30  # where the guess is far off
        given = {"weight": options["weight"], "upper": torch.linspace(1, 0.4, n, device=DEVICE)}
        wide = {name: value.double() for name, value in given.items()}
        one = float(k.min())  # for all rows
        y, right = ll.lml(x, one, impl="triton", **given), ll.lml(x.double(), one, impl="torch", **wide)
        torch.testing.assert_close(y.double(), right, rtol=2e-5, atol=2e-5)
        found, exact = results(ll.lml, x, k, given, "triton"), results(ll.lml, x.double(), k, wide, "torch")
        for value, expected in zip(found, exact, strict=True):
            room = 2e-5 * float(1 + expected.abs().nan_to_num().max())
            torch.testing.assert_close(value.double(), expected, rtol=2e-5, atol=room, equal_nan=True)


def test_weights_that_are_read_again_in_the_backward_pass(monkeypatch):
    """More than 64 classes per thread, whose weights are not held."""
    from lastlayer._triton import plan, weighted

    monkeypatch.setattr(plan, "PATIENCE", 1)
    monkeypatch.setattr(weighted, "BACKWARD", {4: ((weighted.LONGEST, 80),)})
    x, k, options = problem(9, 150, "positive", 2.0)
    upstream = torch.linspace(-1, 1, x.numel(), device=DEVICE).view_as(x)
    found = []
    for scores, weight, impl in ((x, options["weight"], "triton"), (x.double(), options["weight"].double(), "torch")):
        leaf = scores.detach().requires_grad_()
        y = ll.lml(leaf, k, weight=weight, impl=impl)
        found.append(torch.autograd.grad(y, leaf, upstream.to(y.dtype))[0].double())
    torch.testing.assert_close(*found, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("per_row", [False, True])
def test_long_rows_with_bounds(per_row, monkeypatch):
    from lastlayer._triton import weighted

    monkeypatch.setattr(weighted, "LONGEST", 16)
    monkeypatch.setattr(weighted, "STREAM", {"C": 64, "num_warps": 1})
    monkeypatch.setattr(
        weighted, "LONG", {key: {"W": 2, "C": 64, "SAMPLE": 64, "num_warps": 1} for key in weighted.LONG}
    )
    x, _, options = problem(6, 300, "positive", 3.0, per_row)
    x[4, 7] = -torch.inf
    # What is certain is little, or more than what is left of the budget; a row has to take most of what it can.
    options["lower"] = torch.linspace(0, 0.05, 300, device=DEVICE).expand(options["weight"].shape).contiguous()
    options["upper"] = torch.linspace(1, 0.4, 300, device=DEVICE).expand(options["weight"].shape).contiguous()
    certain = (options["weight"] * options["lower"]).double().expand(6, 300).sum(-1)
    k = certain + torch.tensor([60.0, 20.0, 3.0, 1e-3, 40.0, 190.0], dtype=DOUBLE, device=DEVICE)
    wide = {name: value.double() for name, value in options.items()}
    for one in (options, options | {"lower": None}, options | {"upper": None}):
        both = {name: None if value is None else wide[name] for name, value in one.items()}
        for function in (ll.lml, ll.lml_at_most):
            found = results(function, x, k, one, "triton")
            exact = results(function, x.double(), k, both, "torch")
            for value, expected in zip(found, exact, strict=True):
                room = 2e-5 * float(1 + expected.abs().nan_to_num().max())
                torch.testing.assert_close(value.double(), expected, rtol=2e-5, atol=room, equal_nan=True)


@pytest.mark.usefixtures("no_general_form")
@pytest.mark.parametrize("n", [12, 33, 600])
def test_rows_that_float32_does_not_solve_are_settled_in_the_same_kernel(n, monkeypatch):
    """More rows of a program than it looks at together; every fifth is decided, or has another end."""
    from lastlayer._triton import plan, weighted, weighted_long, weighted_shared

    monkeypatch.setattr(plan, "PATIENCE", 1)
    monkeypatch.setattr(weighted, "_programs", lambda *_: 2)
    if INTERPRETED:
        monkeypatch.setattr(weighted_shared, "GROUP", weighted_shared.tl.constexpr(16))
    launched = []
    launch_all = weighted.launch_all
    monkeypatch.setattr(
        weighted,
        "launch_all",
        lambda launches, *more, **options: (launched.extend(launches), launch_all(launches, *more, **options)),
    )
    rows = 52
    x, k, options = problem(rows, n, "positive", 2.0)
    x[::5] *= 400
    x[3, 1], x[8] = torch.nan, torch.inf
    k[13], k[18] = 0.0, 2 * options["weight"].double().sum()
    wide = {name: None if value is None else value.double() for name, value in options.items()}
    exact = results(ll.lml, x.double(), k, wide, "torch")
    for longest, kernel in ((weighted.LONGEST, weighted_shared.shared), (8, weighted_long.forward_row)):
        monkeypatch.setattr(weighted, "LONGEST", longest)
        launched.clear()
        found = results(ll.lml, x, k, options, "triton")
        assert launched[0].kernel is kernel
        assert len(launched) == 2  # one each way
        for value, expected in zip(found[:2], exact[:2], strict=True):
            torch.testing.assert_close(value.double(), expected, rtol=2e-5, atol=2e-5, equal_nan=True)


def test_masked_infinite_and_half_precision_rows():
    x, k, options = problem(6, 30, "signs", 2.0)
    mask = torch.rand(6, 30, generator=torch.Generator(DEVICE).manual_seed(1), device=DEVICE) > 0.2
    k = torch.full_like(k, 0.3)
    x[1, 3], x[2, 4], x[3, 5] = torch.inf, -torch.inf, torch.nan
    for given in ({"mask": mask}, {}):
        pair = [ll.lml(x, k, impl=impl, **given, **options) for impl in ("triton", "torch")]
        torch.testing.assert_close(*pair, rtol=2e-6, atol=2e-6, equal_nan=True)
    half = x.bfloat16()
    pair = [ll.lml(half, k, impl=impl, **options) for impl in ("triton", "torch")]
    torch.testing.assert_close(*pair, equal_nan=True)


@pytest.mark.parametrize("n", [40, 300])
@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("score", [torch.inf, -torch.inf, torch.nan])
def test_odd_scores_beside_a_mask(score, hidden, n):
    x = torch.randn(4, n, generator=torch.Generator(DEVICE).manual_seed(0), device=DEVICE)
    mask = torch.rand(4, n, generator=torch.Generator(DEVICE).manual_seed(1), device=DEVICE) < 0.8
    x[0, 2], mask[:, 2] = score, not hidden
    weight = torch.rand(4, n, generator=torch.Generator(DEVICE).manual_seed(2), device=DEVICE) + 0.5
    for given in ({"weight": weight}, {"weight": weight[0], "upper": weight[1]}, {"upper": weight}):
        wide = {name: value.double() for name, value in given.items()}
        found = ll.lml(x, 0.2 * n, mask=mask, impl="triton", **given)
        exact = ll.lml(x.double(), 0.2 * n, mask=mask, impl="torch", **wide)
        torch.testing.assert_close(found.double(), exact, rtol=2e-5, atol=2e-5, equal_nan=True)
        assert found[0].isnan().all() == (score != score and not hidden)


@pytest.mark.parametrize("longest", [16384, 1])
def test_a_free_class_has_a_gradient_in_a_row_at_its_end(longest, monkeypatch):
    monkeypatch.setattr("lastlayer._triton.weighted.LONGEST", longest)  # 1: the kernel of long rows
    x, weight = torch.tensor([[0.3, -0.2, 0.5]] * 3, device=DEVICE), torch.tensor([1.0, 0.0, 2.0], device=DEVICE)
    k = torch.tensor([0.0, 3.0, 1.0], dtype=DOUBLE, device=DEVICE)
    pair = [results(ll.lml, x, k, {"weight": weight}, impl) for impl in ("triton", "torch")]
    for value, expected in zip(*pair, strict=True):
        torch.testing.assert_close(value, expected, rtol=2e-6, atol=2e-6)


def test_rows_at_their_ends():
    x = torch.zeros(4, 3, device=DEVICE)
    weight = torch.tensor([1.0, 2.0, -1.0], device=DEVICE)
    k = torch.tensor([-1.0, 3.0, 3.5, 1.0], device=DEVICE)
    leaf = x.clone().requires_grad_()
    y = ll.lml(leaf, k, weight=weight, impl="triton")
    assert y[:2].tolist() == [[0, 0, 1], [1, 1, 0]]
    assert y[2].isnan().all()
    y[[0, 1, 3]].sum().backward()
    assert leaf.grad[:3].eq(0).all()
    positive = weight.abs()
    for k, end in ((4 * (1 + 1e-7), 1), (-4e-7, 0)):  # out of reach by rounding alone
        assert ll.lml(x, torch.tensor(k, dtype=DOUBLE), weight=positive, impl="triton").eq(end).all()
    free = ll.lml(x, 0.0, weight=torch.zeros(3, device=DEVICE), impl="triton")
    torch.testing.assert_close(free, torch.full_like(x, 0.5))


@pytest.mark.parametrize("kind", ["positive", "signs", "wide"])
@pytest.mark.parametrize(("n", "per_row", "scale"), [(20, False, 2.0), (70, True, 3.0), (30, False, 2000.0)])
def test_logarithms_and_thresholds_start_where_a_kernel_has_found_nu(kind, n, per_row, scale, monkeypatch):
    """The search in float64 takes a few steps then, and its own start takes a dozen more."""
    from lastlayer.project import weighted

    x, k, options = problem(9, n, kind, scale, per_row)
    options = options | {"lower": None}
    mask = torch.ones(9, n, dtype=torch.bool, device=DEVICE)
    mask[4, :5], x[1, 3], x[2, 4], x[3, 5] = False, -torch.inf, torch.inf, torch.nan
    weight = options["weight"].double().expand(9, n).clamp(min=0).masked_fill(~mask, 0)
    upper = 1.0 if options["upper"] is None else options["upper"].double()
    k[5], k[6], k[7] = 0.0, (weight * upper).sum(-1)[6], 1e-4
    wide = {name: None if value is None else value.double() for name, value in options.items()}
    for function in (ll.log_lml, ll.lml_threshold):
        exact = results(function, x.double(), k, wide, "torch", mask=mask, temperature=0.7)
        with monkeypatch.context() as few:
            few.setattr(weighted, "_STEPS", 8 if scale > 100 else 4)
            found = results(function, x, k, options, "triton", mask=mask, temperature=0.7)
        assert exact[0][[0, 4, 7, 8]].isfinite().any()
        for value, expected in zip(found, exact, strict=True):
            room = 1e-6 * float(1 + expected.nan_to_num(0, 0, 0).abs().max())
            torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=room, equal_nan=True)


def test_logarithms_and_thresholds_of_no_rows_or_several_dimensions():
    x = torch.randn(3, 2, 5, generator=torch.Generator(DEVICE).manual_seed(0), device=DEVICE)
    weight = torch.tensor([1.0, 2.0, 0.0, 0.5, 1.5], device=DEVICE)
    each = weight + torch.arange(3, device=DEVICE)[:, None, None]
    for function in (ll.log_lml, ll.lml_threshold):
        for scores, given in ((x, weight), (x, each), (x[:0], weight), (x[..., :0], weight[:0])):
            k = torch.full(scores.shape[:-1], 0.3 if scores.shape[-1] else 0.0, device=DEVICE)
            pair = [function(scores, k, weight=given, impl=impl) for impl in ("triton", "torch")]
            torch.testing.assert_close(*pair, equal_nan=True)
        across = function(x.mT, 0.3, dim=1, weight=weight[:, None], impl="triton")
        torch.testing.assert_close(across, function(x.mT, 0.3, dim=1, weight=weight[:, None], impl="torch"))
        half = [function(x.bfloat16(), 0.3, weight=weight, impl=impl) for impl in ("triton", "torch")]
        assert torch.equal(*half)


@pytest.mark.parametrize("gap", [30.0, 100.0, 600.0])
def test_rows_that_are_decided(gap):
    """The classes above the gap add up to k: the sum is flat, and the tails on both sides say where nu is."""
    x = torch.tensor([[1.0, -2.0, 0.5, 3.0, 0.0, -1.0], [0.0, 1.0, 2.0, -0.5, 0.3, 2.0]], device=DEVICE)
    x[:, [1, 4, 5]] += gap
    upper = torch.tensor([1.0, 0.5, 2.0, 1.0, 1.0, 0.25], device=DEVICE)
    for weight in (torch.ones(6, device=DEVICE), torch.tensor([1.0, 2.0, 3.0, 1.5, 0.5, 4.0], device=DEVICE)):
        for options in ({"weight": weight, "upper": None}, {"weight": weight, "upper": upper}):
            share = weight if options["upper"] is None else weight * upper
            k = share.double()[[1, 4, 5]].sum().expand(2).clone()
            wide = {name: None if value is None else value.double() for name, value in options.items()}
            exact = results(ll.lml, x.double(), k, wide, "torch")
            for value, expected in zip(results(ll.lml, x, k, options, "triton"), exact, strict=True):
                torch.testing.assert_close(value.double(), expected, rtol=1e-3, atol=2e-6)  # points of 300 in float32
            for function in (ll.log_lml, ll.lml_threshold):  # which are exact
                found, right = function(x, k, impl="triton", **options), function(x.double(), k, impl="torch", **wide)
                torch.testing.assert_close(found.double(), right, rtol=1e-6, atol=1e-6)


def test_bad_values_inside_a_tensor_make_their_row_nan():
    x = torch.linspace(-2, 2, 24, device=DEVICE).reshape(8, 3)
    weight, lower, upper = torch.ones_like(x), torch.full_like(x, 0.1), torch.ones_like(x)
    weight[0, 0], weight[1, 1] = torch.nan, torch.inf
    lower[2, 2], lower[3, 0], lower[4, 1] = torch.nan, 2.0, -torch.inf
    upper[5, 2], upper[6, 0] = torch.inf, -1.0
    for k in (1.5, 9.0):
        found = ll.lml_at_most(x, torch.tensor(k), weight=weight, lower=lower, upper=upper, impl="triton")
        assert found[:7].isnan().all()
        assert found[7].isfinite().all()


@pytest.mark.usefixtures("no_general_form")
@pytest.mark.parametrize("patience", [1, 10**9])  # for kernels of this length, and those that serve several
def test_one_number_is_one_per_row(monkeypatch, patience):
    from lastlayer._triton import plan

    monkeypatch.setattr(plan, "PATIENCE", patience)
    monkeypatch.setattr(plan, "OFTEN", 10**9)
    x, _, options = problem(20, 20, "positive", 2.0)
    for k in (7.3, 1e-3):
        number, rows = (ll.lml(x, size, impl="triton", **options) for size in (k, torch.full((20,), k, dtype=DOUBLE)))
        assert torch.equal(number, rows)
        torch.testing.assert_close(number, ll.lml(x, k, impl="torch", **options), rtol=5e-6, atol=0)


def test_messages():
    x = torch.zeros(2, 4, device=DEVICE)
    with pytest.raises(RuntimeError, match="weights and bounds must be float32, bfloat16 or float16"):
        ll.lml(x, 1, weight=torch.ones(4, dtype=DOUBLE), impl="triton")
    with pytest.raises(RuntimeError, match="rows of weights have at most 4194304 classes"):
        ll.lml(torch.zeros(1, 4194305, device=DEVICE), 1, weight=2.0, impl="triton")
    torch.testing.assert_close(ll.lml(x, 1.0, weight=torch.ones(4, dtype=DOUBLE)), torch.full_like(x, 0.25))


@pytest.mark.usefixtures("no_general_form")
@pytest.mark.parametrize("longest", [None, 2])
def test_what_is_bad_in_a_row_that_is_not_used_spoils_no_gradient(longest, monkeypatch):
    """As in `tests/project/test_weighted.py`: rows that programs hold, and longer ones."""
    from lastlayer._triton import plan, weighted

    monkeypatch.setattr(plan, "PATIENCE", 1)
    if longest is not None:
        monkeypatch.setattr(weighted, "LONGEST", longest)
        monkeypatch.setattr(weighted, "STREAM", {"C": 32, "num_warps": 1})
        tiles = {"W": 2, "C": 32, "SAMPLE": 32, "num_warps": 1}
        monkeypatch.setattr(weighted, "LONG", dict.fromkeys(weighted.LONG, tiles))
    bad = [
        ("x", torch.nan), ("k", torch.nan), ("k", 99.0), ("weight", torch.nan), ("weight", torch.inf),
        ("lower", torch.nan), ("lower", -torch.inf), ("lower", 2.0), ("upper", torch.inf), ("upper", -1.0),
    ]  # fmt: skip
    rows = len(bad) + 2  # the first and the last are used
    weight = torch.tensor([1.0, 0.7, 0.0, 1.3], device=DEVICE).repeat(rows, 1)
    terms = {"x": torch.randn(rows, 4, device=DEVICE), "k": torch.ones(rows, dtype=DOUBLE, device=DEVICE)}
    terms |= {"weight": weight, "lower": torch.full_like(weight, 0.1), "upper": torch.full_like(weight, 0.9)}
    for row, (name, value) in enumerate(bad, 1):
        terms[name][(row, 2) if name != "k" else row] = value

    def gradients(function, values, kept):
        parts = {name: value.detach().clone().requires_grad_() for name, value in values.items()}
        y = function(parts["x"], parts["k"], **dict(list(parts.items())[2:]), impl="triton")
        return y, torch.autograd.grad(y[kept].square().sum(), parts.values())

    used = [0, rows - 1]
    for function in (ll.lml, ll.lml_at_most):
        _, alone = gradients(function, {name: value[used] for name, value in terms.items()}, [0, 1])
        y, beside = gradients(function, terms, used)
        for one, both in zip(alone, beside, strict=True):
            assert both[1:-1].eq(0).all()
            torch.testing.assert_close(one, both[used])
        _, every = gradients(function, terms, list(range(rows)))  # what is used is nan
        for both in every:
            assert torch.equal(both.reshape(rows, -1).isnan().all(-1), y.isnan().any(-1))
