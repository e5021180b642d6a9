"""The losses and projections of the GPU's fused kernels against plain torch: on a GPU, or in Triton's interpreter."""

import importlib
import itertools

import pytest
import torch
from fused_tools import LOSSES, arguments, labels, scores
from fused_tools import PROJECTIONS as SHARED
from tools import DEVICE, GPU_KERNELS

import lastlayer as ll
from lastlayer.loss import _gradient, lml, multilabel, quasibinary
from lastlayer.project import capped, subset

pytestmark = GPU_KERNELS
EPS = torch.finfo(torch.float32).eps
KINDS = ("hard", "soft", "unknown", "lists", "long lists", "one class", "bool")
QUICK = (
    "binary",
    "asymmetric",
    "two-way",
    "truncated 4",
    "svm 5",
    "warp",
    "quasibinary",
    "Fenchel-Young 2.5",
    "capped softmax 3.7",
    "capped sparsemax 3.7",
    "marginals 5",
    "at most 3.5",
)
PROJECTIONS = SHARED | {
    "at most 3.5": (ll.lml_at_most, {"k": 3.5}),
    "at most 0.2": (ll.lml_at_most, {"k": 0.2, "temperature": 2.0}),
    "at most 60": (ll.lml_at_most, {"k": 60, "temperature": 0.25}),
}
PLAIN = (_gradient, capped, subset, lml, multilabel, quasibinary, importlib.import_module("lastlayer.project.lml"))


def results(function, x, positional, options, dtype, upstream):
    """Return values and gradient for scores of a dtype, in float64."""

    def cast(value):
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.dtype == torch.float32 else value

    leaf = x.to(dtype).requires_grad_()
    out = function(leaf, *map(cast, positional), **{name: cast(v) for name, v in options.items()})
    (grad,) = torch.autograd.grad(out, leaf, upstream.expand(out.shape).to(out.dtype))
    return out.detach().double(), grad.double()


@pytest.fixture
def watched(monkeypatch):
    """What the kernels were asked for, and whether they took it."""
    from lastlayer._triton import fused

    run, ran = fused.run, []

    def watching(name, *given, **more):
        found = run(name, *given, **more)
        ran.append((name, found is not None))
        return found

    monkeypatch.setattr(fused, "run", watching)
    return ran


def three(monkeypatch, function, x, positional, options, upstream):
    """Return the results of the kernels, those in float64, and those of plain torch in float32."""
    given = function, x, positional, options
    found = results(*given, torch.float32, upstream)
    with monkeypatch.context() as patch:
        for module in PLAIN:
            patch.setattr(module, "compiled", lambda *_: False)
        exact = results(*given, torch.float64, upstream)
        plain = results(*given, torch.float32, upstream)
    return found, exact, plain


def check_as_accurate(found, exact, plain, name):
    """Assert that the error is at most twice that of plain torch in float32, and 2 eps."""
    for what, value, right, other in zip(("value", "gradient"), found, exact, plain, strict=True):
        assert torch.equal(value.isfinite(), right.isfinite()), f"{name}: {what}"
        size = max(1.0, float(right.abs().max()))
        error, allowed = float((value - right).abs().max()), 2 * float((other - right).abs().max())
        assert error <= allowed + 2 * EPS * size, f"{name}, {what}: {error} > {allowed}"


def case(function, options, rows, n, scale, kind, reduction="none"):
    x, target = scores(rows, n, scale).to(DEVICE), labels(rows, n, kind).to(DEVICE)
    given = arguments(options, rows, n)
    if function is not ll.two_way_loss or options.get("per") != "class":
        given["reduction"] = reduction
    upstream = torch.rand(rows) if given.get("reduction") == "none" else torch.tensor(1.0)
    return x, (target,), given, upstream.to(DEVICE)


def test_each_kernel_once(monkeypatch, watched):
    for number, name in enumerate(QUICK):
        function, options = (LOSSES | PROJECTIONS)[name]
        if name in PROJECTIONS:
            x = scores(2, 40, "normal").to(DEVICE)
            given = x, (), options, torch.randn(x.shape).to(DEVICE)
        else:
            given = case(function, options, 2, 40, "normal", ("unknown", "lists")[number % 2])
        check_as_accurate(*three(monkeypatch, function, *given), name)
    assert all(done for _, done in watched), watched
    assert len({name for name, _ in watched}) == 18


def test_reduced_losses_take_one_node_of_the_graph(monkeypatch):
    for number, name in enumerate(set(QUICK) & set(LOSSES)):
        function, options = LOSSES[name]
        given = case(function, options, 3, 40, "normal", ("unknown", "lists")[number % 2], ("mean", "sum")[number % 2])
        x, (target,), more, _ = given
        if "sample_weight" in more:  # then the reduction is torch's
            del more["sample_weight"]
        assert type(function(x.requires_grad_(), target, **more).grad_fn).__name__ == "_ByKernelsBackward", name
        check_as_accurate(*three(monkeypatch, function, x.detach(), *given[1:]), name)


@pytest.mark.slow
def test_losses_of_a_whole_batch_are_as_accurate_as_plain_torch(monkeypatch):
    for function in (ll.two_way_loss, ll.loss.quasibinary_loss, ll.lml_fenchel_young_loss):
        for kind, scale, reduction in (("hard", "wide", "mean"), ("soft", "offset", "sum"), ("bool", "ties", "mean")):
            given = case(function, {}, 3, 60, scale, kind, reduction)
            check_as_accurate(*three(monkeypatch, function, *given), f"{function.__name__}, {kind}, {scale}")


@pytest.mark.slow
def test_odd_scores_in_losses_of_a_whole_batch_are_those_of_plain_torch(monkeypatch):
    for function in (ll.two_way_loss, ll.loss.quasibinary_loss, ll.lml_fenchel_young_loss):
        for place, value in (((2, 5), torch.nan), ((2, 5), torch.inf), ((2, 6), torch.inf), ((3, 5), -torch.inf)):
            x, (target,), given, upstream = case(function, {}, 4, 40, "normal", "hard", "mean")
            target[2, 5] = target[3, 5] = 1
            target[2, 6] = 0
            x[place], x[1] = value, -torch.inf
            found, _, plain = three(monkeypatch, function, x, (target,), given, upstream)
            name = f"{function.__name__}, {place}, {value}"
            torch.testing.assert_close(found[0], plain[0], rtol=1e-5, atol=1e-5, equal_nan=True, msg=name)
            if plain[0].isfinite():
                torch.testing.assert_close(found[1], plain[1], rtol=1e-5, atol=1e-5, equal_nan=True, msg=name)


@pytest.mark.slow
def test_fenchel_young_where_every_class_or_none_is_chosen(monkeypatch):
    from lastlayer._triton import fused

    x, target = torch.randn(4, 30).to(DEVICE), labels(4, 30, "unknown").to(DEVICE)
    for longest in (fused.LONGEST, 8):  # rows in registers, and in memory
        monkeypatch.setattr(fused, "LONGEST", longest)
        for k in (30, 0, None):
            given = x, (target, k), {"reduction": "none"}, torch.rand(4).to(DEVICE)
            found, _, plain = three(monkeypatch, ll.lml_fenchel_young_loss, *given)
            torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.slow
def test_a_budget_per_row_with_a_mask(monkeypatch, watched):
    x, mask = scores(6, 90, "normal").to(DEVICE), (torch.rand(6, 90) < 0.8).to(DEVICE)
    for k in (4.5, torch.tensor([0.3, 1.0, 90.0, 7.5, 0.0, 33.0], device=DEVICE)):
        upstream = torch.randn(x.shape).to(DEVICE)
        check_as_accurate(*three(monkeypatch, ll.lml_at_most, x, (k,), {"mask": mask}, upstream), f"{k}")
    assert len(watched) == 4
    target = labels(6, 90, "unknown").to(DEVICE)
    mask = mask | (target > 0)
    for k in (None, torch.tensor([0.3, 1.0, 40.0, 7.5, 0.0, 33.0], device=DEVICE)):
        given = x, (target, k), {"mask": mask, "reduction": "none"}, torch.rand(6).to(DEVICE)
        check_as_accurate(*three(monkeypatch, ll.lml_fenchel_young_loss, *given), f"Fenchel-Young {k}")
    assert len(watched) == 6
    assert all(done for _, done in watched), watched


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_as_accurate_as_plain_torch(monkeypatch, watched, name):
    function, options = LOSSES[name]
    for number, kind in enumerate(KINDS):
        shapes = ((4, 100, "normal"), (4, 130, "wide"), (3, 100, "ties"), (2, 300, "offset"))
        rows, n, scale = shapes[number % 4]
        if scale in ("ties", "offset") and function is ll.loss.truncated_entropy_loss:
            scale = "normal"  # which of two equal rivals is spared is a matter of chance
        given = case(function, options, rows, n, scale, kind)
        check_as_accurate(*three(monkeypatch, function, *given), f"{kind}, {scale}")
    assert watched
    assert all(done for _, done in watched), watched


@pytest.mark.slow
def test_rows_longer_than_a_block(monkeypatch, watched):
    for name in ("binary", "asymmetric", "two-way, rows", "quasibinary", "Fenchel-Young 2.5"):
        function, options = LOSSES[name]
        given = case(function, options, 2, 2500, "normal", "unknown")
        check_as_accurate(*three(monkeypatch, function, *given), name)
    assert all(done for _, done in watched), watched


@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("detach", [False, True])
def test_asymmetric_gradient_is_finite_at_almost_infinite_scores(watched, label, detach):
    scores = [3e38, -3e38, torch.inf]
    x = torch.tensor([[score, 0.0] for score in scores]).to(DEVICE).requires_grad_()
    target, options = torch.full((3,), label).to(DEVICE), {"gamma_positive": 2.5, "gamma_negative": 2.5, "clip": 0.0}
    loss = ll.asymmetric_loss(x, target, **options, detach_weight=detach, reduction="none")
    (grad,) = torch.autograd.grad(loss.sum(), x)
    assert grad[:, 0].tolist() == ([0, -1, 0] if label == 0 else [1, 0, 1])
    assert watched
    assert all(done for _, done in watched), watched


@pytest.mark.slow
def test_two_way_gradients_of_many_rows(monkeypatch):
    from lastlayer._triton import fused

    monkeypatch.setattr(fused, "MANY", 2)
    for kind, scale, reduction in (("hard", "wide", "mean"), ("soft", "offset", "sum")):
        given = case(ll.two_way_loss, {}, 6, 20, scale, kind, reduction)
        check_as_accurate(*three(monkeypatch, ll.two_way_loss, *given), f"{kind}, {scale}")


def test_gradients_of_reduced_losses_are_handed_over_once_and_scaled():
    """A gradient may be changed by whom it is given to; rows that do not count change the mean."""
    x = torch.randn(4, 20).to(DEVICE).requires_grad_()
    full = (torch.rand(4, 20) < 0.3).float().to(DEVICE)
    full[:, 0] = 1.0
    some = full.clone()
    some[1] = 0.0
    losses = (
        (ll.loss.truncated_entropy_loss, {"k": 3}),
        (ll.loss.warp_loss, {}),
        (ll.loss.smooth_topk_svm_loss, {"k": 3}),
    )
    for function, options in losses:
        for target in (full, some) if function is not ll.loss.smooth_topk_svm_loss else (torch.tensor([2, 0, 5, 1]),):
            given = x, target.to(DEVICE)
            rows = function(*given, **options, reduction="none")
            (right,) = torch.autograd.grad(rows.sum() / max(1, int((rows != 0).sum())), x)
            loss = function(*given, **options)
            for factor in (1.0, 3.0, 1.0):
                (grad,) = torch.autograd.grad(loss, x, torch.tensor(factor, device=DEVICE), retain_graph=True)
                torch.testing.assert_close(grad, factor * right)
                grad.zero_()


def test_two_way_columns_in_parts(monkeypatch):
    """Columns are right whose parts are far from one another, or have no rival, no label or unusual scores."""
    from lastlayer._triton import fused

    monkeypatch.setattr(fused, "STRIP", (4, 8))
    monkeypatch.setattr(fused, "JOINED", (2, 8))
    torch.manual_seed(0)
    x, target = torch.randn(12, 10).to(DEVICE), (torch.rand(12, 10) < 0.3).float().to(DEVICE)
    x[:4, 0], x[8:, 1], x[4:, 2], x[:, 3] = -90.0, 60.0, -1e4, 80 * torch.randn(12).to(DEVICE)
    target[:4, 4], x[4:, 4] = 1.0, x[4:, 4] - 200  # the first part has no rival
    target[:, 5], target[:, 6], x[:, 7], x[:4, 8] = 1.0, 0.0, 1e4 + x[:, 7], -torch.inf
    target[9, 0] = target[9, 3] = 1.0
    target[:, 9] = 0.25
    for given in (target, target[:, :9].contiguous(), target.bool()):
        scores = x[:, : given.shape[1]].contiguous()
        check_as_accurate(
            *three(monkeypatch, ll.two_way_loss, scores, (given,), {}, torch.tensor(1.0, device=DEVICE)),
            f"{given.dtype}",
        )


@pytest.mark.slow
def test_subsets_of_rows_longer_than_a_tile(monkeypatch, watched):
    from lastlayer._triton import fused

    monkeypatch.setattr(fused, "MANY", 2)
    for name in ("marginals 5", "svm 5"):
        function, options = (LOSSES | PROJECTIONS)[name]
        if name in PROJECTIONS:
            x = scores(3, 600, "normal").to(DEVICE)
            given = x, (), options, torch.randn(x.shape).to(DEVICE)
        else:
            given = case(function, options, 3, 600, "normal", "unknown")
        check_as_accurate(*three(monkeypatch, function, *given), name)
    assert all(done for _, done in watched), watched


def test_subsets_of_scores_far_apart(monkeypatch, watched):
    """Where every class is sure to be in or out, only a threshold between two of them gives subsets a weight."""
    x = torch.stack([torch.randperm(20) for _ in range(3)]) * torch.tensor([30.0, 3e3, 1e5])[:, None]
    x, target = x.to(DEVICE), torch.randint(20, (3,)).to(DEVICE)
    for k in (2, 5):
        svm = ll.loss.smooth_topk_svm_loss, x, (target,), {"k": k, "reduction": "none"}, torch.rand(3).to(DEVICE)
        marginals = ll.subset_marginals, x, (), {"k": k}, torch.randn(x.shape).to(DEVICE)
        for given in (svm, marginals):
            ways = three(monkeypatch, *given)
            for row in range(len(x)):  # whose sizes differ
                one = [[value[row] for value in way] for way in ways]
                check_as_accurate(*one, f"{given[0].__name__}, {k}, row {row}")
    assert all(done for _, done in watched), watched


def test_flat_rows_of_subsets(monkeypatch, watched):
    """Rows whose marginals come from one pass, beside others that are a threshold's."""
    from lastlayer._triton import fused, fused_flat

    torch.manual_seed(0)
    x = torch.randn(7, 300)
    x[1] += 1e4
    x[2, ::2] = -torch.inf
    x[3] *= 3
    x[4, 75] = 40.0
    x[5] = x[5].round()
    x[6, 1:] *= 0.01
    x[6, 0] = 7.5
    x = x.to(DEVICE)
    for k in (1, 2, 3, 4, 5, 6):
        table = fused.run("marginals", x, None, (k,)).extra
        flat = table[:, 2] == fused_flat.FLAT_ROW.value
        assert flat.tolist() == [k < 6] * 4 + [k == 1] + [k < 6] * 2
        for upstream in (torch.randn(x.shape), torch.randn(7, 1).expand(x.shape)):
            given = x, (), {"k": k}, upstream.to(DEVICE)
            check_as_accurate(*three(monkeypatch, ll.subset_marginals, *given), f"{k} of {x.shape[-1]}")
    assert all(done for _, done in watched), watched


def test_flat_rows_of_few_classes():
    """Sums over all subsets, of which there are few; rows that lose too many digits are left to the threshold."""
    from lastlayer._triton import fused, fused_flat

    torch.manual_seed(0)
    scale = torch.tensor([0.0, 0.1, 1.0, 2.0, 4.0, 6.0, 12.0, 40.0])
    x = (torch.randn(8, 7) * scale[:, None]).double()
    x[2, 1] = x[2, 4]
    upstream = torch.randn(x.shape).double()
    taken = []
    for k in (1, 2, 3, 4, 5):
        subsets = torch.tensor([[float(i in one) for i in range(7)] for one in itertools.combinations(range(7), k)])
        leaf = x.clone().requires_grad_()
        exact = (leaf @ subsets.T.double()).softmax(-1) @ subsets.double()
        (slope,) = torch.autograd.grad(exact, leaf, upstream)
        found = fused.run("marginals", x.float().to(DEVICE), None, (k,))
        given = {"each": upstream.float().to(DEVICE), "first": found.extra}
        change = fused.run("marginals_backward", x.float().to(DEVICE), None, (k,), **given)
        torch.testing.assert_close(found.out.cpu().double(), exact.detach(), rtol=0, atol=8 * EPS)
        torch.testing.assert_close(change.out.cpu().double(), slope, rtol=0, atol=16 * EPS)
        taken.append((found.extra[:, 2] == fused_flat.FLAT_ROW.value).tolist())
    assert all(all(row[:4]) for row in taken)
    assert not any(row[7] for row in taken[1:])


def test_odd_scores_in_flat_rows(monkeypatch):
    from lastlayer._triton import fused

    x = torch.randn(6, 200)
    x[0, 0] = torch.nan
    x[1, 50] = torch.inf
    x[2, 3] = torch.nan
    x[3, :] = -torch.inf
    x[4, 2:] = -torch.inf
    x[5, :150] = -torch.inf
    given = x.to(DEVICE), (), {"k": 2}, torch.ones(x.shape).to(DEVICE)
    found, _, plain = three(monkeypatch, ll.subset_marginals, *given)
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6, equal_nan=True)
    # The upstream gradient of a class that is ruled out does not matter.
    x = torch.randn(2, 200).to(DEVICE)
    x[:, 7] = -torch.inf
    upstream = torch.randn(x.shape).to(DEVICE)
    table = fused.run("marginals", x, None, (3,)).extra
    grads = []
    for odd in (0.0, torch.nan):
        upstream[:, 7] = odd
        grads.append(fused.run("marginals_backward", x, None, (3,), each=upstream, first=table).out)
    assert grads[0].isfinite().all()
    assert torch.equal(*grads)


@pytest.mark.slow
def test_flat_rows_of_several_tiles(monkeypatch, watched):
    from lastlayer._triton import fused, fused_flat

    monkeypatch.setattr(fused, "MANY", 2)
    torch.manual_seed(0)
    for n in (500, 1000, 1500, 5000):
        x = (torch.randn(3, n) * torch.tensor([[1.0], [2.0], [3.0]])).to(DEVICE)
        assert (fused.run("marginals", x, None, (5,)).extra[:, 2] == fused_flat.FLAT_ROW.value).all()
        for upstream in (torch.randn(x.shape), torch.randn(3, 1).expand(x.shape)):
            given = x, (), {"k": 5}, upstream.to(DEVICE)
            check_as_accurate(*three(monkeypatch, ll.subset_marginals, *given), f"{n}")
    assert all(done for _, done in watched), watched


@pytest.mark.slow
def test_saturated_rows_of_a_budget(monkeypatch, watched):
    """Rows in which no class is near the threshold, and whose first score tells nothing about the others."""
    x = torch.randn(6, 90).to(DEVICE) * torch.tensor([1.0, 40.0, 400.0, 4e3, 4e4, 1e-4], device=DEVICE)[:, None]
    x[::2, 0] = -1e6
    target = labels(6, 90, "hard").to(DEVICE)
    for k in (0.5, 3, 40):
        upstream = torch.randn(x.shape).to(DEVICE)
        check_as_accurate(*three(monkeypatch, ll.lml_at_most, x, (k,), {}, upstream), f"at most {k}")
        given = x, (target, k), {"reduction": "none"}, torch.rand(6).to(DEVICE)
        check_as_accurate(*three(monkeypatch, ll.lml_fenchel_young_loss, *given), f"Fenchel-Young {k}")
    assert all(done for _, done in watched), watched


def check_odd(found, plain, place, name):
    """Assert that the same values are finite, and equal; gradients too, but for the row and column of an odd score."""
    near = {"rtol": 1e-5, "atol": 1e-5, "equal_nan": True}
    fine = plain[0].isfinite()
    assert torch.equal(found[0].isfinite(), fine), f"{name}: {found[0]} for {plain[0]}"
    torch.testing.assert_close(found[0][fine], plain[0][fine], **near, msg=lambda text: f"{name}: {text}")
    if not fine.all() and not (fine[[0, 2, 3]] if fine.ndim else fine).any():  # row 1 has no classes
        return  # one score spoils the whole batch
    grads = [grad.clone() for grad in (found[1], plain[1])]
    for grad in grads:
        grad[place[0]], grad[:, place[1]] = 0, 0
    torch.testing.assert_close(*grads, **near, msg=lambda text: f"{name}, gradient: {text}")
    if found[0].isfinite().all():
        both = found[1].isfinite() & plain[1].isfinite()
        torch.testing.assert_close(found[1][both], plain[1][both], **near, msg=lambda text: f"{name}, beside: {text}")


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_odd_rows_are_those_of_plain_torch(monkeypatch, watched, name):
    function, options = LOSSES[name]
    for kind in ("hard", "bool"):
        for place, value in (((2, 5), torch.nan), ((2, 5), torch.inf), ((2, 6), torch.inf), ((3, 5), -torch.inf)):
            x, (target,), given, upstream = case(function, options, 4, 100 if "90" in name else 40, "normal", kind)
            target[2, 5] = target[3, 5] = 1
            target[2, 6] = 0
            x[place] = value
            x[1] = -torch.inf
            found, _, plain = three(monkeypatch, function, x, (target,), given, upstream)
            check_odd(found, plain, place, f"{kind}, {place}, {value}")
    assert all(done for _, done in watched), watched


@pytest.mark.slow
@pytest.mark.parametrize("name", PROJECTIONS)
def test_projections_are_as_accurate_as_plain_torch(monkeypatch, watched, name):
    function, options = PROJECTIONS[name]
    for rows, n, scale in ((3, 100, "normal"), (3, 130, "wide"), (2, 100, "ties"), (2, 300, "offset")):
        x = scores(rows, n, scale).to(DEVICE)
        upstream = torch.randn(x.shape).to(DEVICE)
        check_as_accurate(*three(monkeypatch, function, x, (), options, upstream), scale)
    assert len(watched) == 8
    assert all(done for _, done in watched), watched


@pytest.mark.slow
@pytest.mark.parametrize("name", PROJECTIONS)
def test_odd_rows_of_projections_are_those_of_plain_torch(monkeypatch, watched, name):
    function, options = PROJECTIONS[name]
    n = 72
    x = scores(7, n, "normal")
    x[0, 5], x[1, 5], x[2] = torch.nan, torch.inf, -torch.inf
    x[3, : n - 70], x[4, : n - 16], x[5, : n - 5] = -torch.inf, -torch.inf, -torch.inf
    upstream = torch.randn(x.shape).to(DEVICE)
    found, _, plain = three(monkeypatch, function, x.to(DEVICE), (), options, upstream)
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert all(done for _, done in watched), watched


@pytest.mark.slow
def test_capped_projections_of_rows_with_their_own_k_and_mask(monkeypatch, watched):
    x, k = scores(7, 90, "normal").to(DEVICE), torch.tensor([0.3, 1.0, 2.0, 7.5, 60.0, 33.0, 0.0], device=DEVICE)
    mask = (torch.rand(7, 90) < 0.8).to(DEVICE)
    for function in (ll.capped_softmax, ll.capped_sparsemax):
        upstream = torch.randn(x.shape).to(DEVICE)
        check_as_accurate(*three(monkeypatch, function, x, (k,), {"mask": mask}, upstream), function.__name__)
    assert all(done for _, done in watched), watched


@pytest.mark.slow
def test_half_precision_and_more_dimensions(monkeypatch, watched):
    x = torch.randn(2, 3, 50).to(DEVICE)
    target = (torch.rand(2, 3, 50) < 0.1).to(DEVICE)
    for function, given in (
        (ll.asymmetric_loss, (target,)),
        (ll.two_way_loss, (target,)),
        (ll.loss.truncated_entropy_loss, (target, 3)),
        (ll.capped_softmax, (4.5,)),
    ):
        half = x.bfloat16().requires_grad_()
        out = function(half, *given)
        exact = function(half.detach().double(), *given)
        torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=2**-8)
        out.sum().backward()
        assert half.grad.dtype == torch.bfloat16
    assert all(done for _, done in watched), watched


@pytest.mark.slow
def test_second_derivatives_go_through_plain_torch():
    x = torch.randn(3, 20, device=DEVICE).requires_grad_()
    target = (torch.rand(3, 20) < 0.2).to(DEVICE)
    for function, given in ((ll.two_way_loss, (target,)), (ll.capped_softmax, (2.5,)), (ll.subset_marginals, (3,))):
        seconds = []
        for dtype in (torch.float32, torch.float64):
            out = function(x.to(dtype), *given)
            (grad,) = torch.autograd.grad((out**2).sum(), x, create_graph=True)
            seconds.append(torch.autograd.grad((grad**2).sum(), x)[0])
        torch.testing.assert_close(*seconds, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU: the interpreter takes a minute")
def test_warp_sums_many_positives():
    x, target = 0.03 * torch.randn(1, 2500, device=DEVICE), torch.rand(1, 2500, device=DEVICE) < 0.9
    found, exact = (ll.loss.warp_loss(scores, target, reduction="none") for scores in (x, x.double()))
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_nothing_waits_for_the_gpu():
    x, target = scores(4, 100, "normal").to(DEVICE).requires_grad_(), labels(4, 100, "hard").to(DEVICE)
    for name in QUICK:
        function, options = (LOSSES | PROJECTIONS)[name]
        given = (x,) if name in PROJECTIONS else (x, target)
        more = arguments(options, 4, 100)
        function(*given, **more).sum().backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            function(*given, **more).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_limits_of_registers_leave_room_for_all_threads():
    from lastlayer._triton import fused

    for name in fused._REGISTERS:
        for n, rows in itertools.product((2, 64, 1000, 4096, 5000, fused.LONGEST), (1, 256, 2048, 8192)):
            _, warps = fused._sizes(name, n, rows)
            limit = fused._limited(name, rows, warps).get("maxnreg", 0)
            assert limit * 32 * warps <= 65536
            assert rows < 2048 or limit > 0


@pytest.mark.parametrize("n", [40, 300])
def test_a_row_without_a_solution_has_no_gradient_where_its_loss_is_not_used(n):
    """Its gradient is nan, computed ahead of time, and the upstream gradient is 0."""
    x, target = torch.randn(3, n, device=DEVICE, requires_grad=True), torch.tensor([[0, 1], [2, -1], [3, 4]]).to(DEVICE)
    k = torch.tensor([2.0, -1.0, 1.0], device=DEVICE)
    for reduction in ("mean", "sum"):
        loss = ll.lml_fenchel_young_loss(x, target, k, reduction=reduction)
        for _ in range(2):
            assert torch.autograd.grad(torch.nan_to_num(loss), x, retain_graph=True)[0].eq(0).all()
    loss = ll.lml_fenchel_young_loss(x, target, k, reduction="none")
    alone = ll.lml_fenchel_young_loss(x[::2], target[::2], k[::2], reduction="none")
    for upstream in (torch.ones(3, device=DEVICE), torch.tensor([0.5, 3.0, -2.0], device=DEVICE)):
        (every,) = torch.autograd.grad(loss, x, upstream, retain_graph=True)
        (used,) = torch.autograd.grad(loss, x, upstream * loss.isfinite(), retain_graph=True)
        (right,) = torch.autograd.grad(alone, x, upstream[::2], retain_graph=True)
        assert every[1].isnan().all()
        for found in (every[::2], used[::2]):
            assert torch.equal(found, right[::2])
        assert used[1].eq(0).all()
