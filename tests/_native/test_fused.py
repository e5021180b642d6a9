"""The compiled losses and projections against plain torch: values and gradients, all kinds of targets, odd rows."""

import pytest
import torch
from fused_tools import LOSSES, PROJECTIONS, arguments, labels, scores

import lastlayer as ll
from lastlayer import _native as native
from lastlayer.loss import _gradient, lml, multilabel, quasibinary
from lastlayer.project import capped, subset

pytestmark = pytest.mark.skipif(bool(native.missing), reason="the compiled kernel was not built")
DOUBLE = torch.float64
KINDS = ("hard", "soft", "unknown", "lists", "one class", "bool", "int8")


def results(function, x, more, dtype, upstream):
    """Return values and gradient for scores of a dtype, in float64."""

    def cast(value):
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.dtype == torch.float32 else value

    leaf = x.to(dtype).requires_grad_()
    out = function(leaf, *(cast(v) for v in more[0]), **{name: cast(v) for name, v in more[1].items()})
    (grad,) = torch.autograd.grad(out, leaf, upstream.expand(out.shape).to(dtype))
    return out.detach().double(), grad.double()


def plain_only(monkeypatch):
    for module in (_gradient, capped, subset, lml, multilabel, quasibinary):
        monkeypatch.setattr(module, "compiled", lambda *_: False)


def check_as_accurate(monkeypatch, function, x, positional, options, upstream, name=""):
    """Assert that the error is at most twice that of plain torch in float32, and 2 eps; return what ran compiled."""
    from lastlayer._native import fused

    ran, run = [], fused.run

    def watched(*given, **more):
        found = run(*given, **more)
        ran.append(found is not None)
        return found

    more = (positional, options)
    monkeypatch.setattr(fused, "run", watched)
    found = results(function, x, more, torch.float32, upstream)
    monkeypatch.undo()
    exact = results(function, x, more, DOUBLE, upstream)
    plain_only(monkeypatch)
    plain = results(function, x, more, torch.float32, upstream)
    monkeypatch.undo()
    for what, value, right, other in zip(("value", "gradient"), found, exact, plain, strict=True):
        assert torch.equal(value.isfinite(), right.isfinite()), f"{name}: {what}"
        size = max(1.0, float(right.abs().max()))
        error, allowed = float((value - right).abs().max()), 2 * float((other - right).abs().max())
        assert error <= allowed + 2 * torch.finfo(torch.float32).eps * size, f"{name}, {what}: {error} > {allowed}"
    return ran


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_as_accurate_as_plain_torch(monkeypatch, name):
    function, options = LOSSES[name]
    for kind in KINDS:
        for rows, n, scale in ((9, 100, "normal"), (7, 130, "wide"), (5, 100, "ties"), (3, 1000, "offset")):
            if scale in ("ties", "offset") and function is ll.loss.truncated_entropy_loss:
                continue  # which of two equal rivals is spared is a matter of chance
            x, target = scores(rows, n, scale), labels(rows, n, kind)
            given = arguments(options, rows, n)
            if function is not ll.two_way_loss or options.get("per") != "class":
                given["reduction"] = "none"
            upstream = torch.rand(rows) if given.get("reduction") == "none" else torch.tensor(1.0)
            ran = check_as_accurate(monkeypatch, function, x, (target,), given, upstream, f"{kind}, {scale}")
            assert ran, f"{kind}, {scale}: nothing ran"
            assert all(ran), f"{kind}, {scale}: plain torch ran"


def test_every_instruction_set(isa, monkeypatch):
    for name in ("asymmetric, not whole", "two-way", "truncated 4", "svm 5", "warp", "quasibinary", "Fenchel-Young"):
        function, options = LOSSES[name]
        x, target, given = scores(4, 130, "normal"), labels(4, 130, "hard"), arguments(options, 4, 130)
        assert all(check_as_accurate(monkeypatch, function, x, (target,), given, torch.tensor(1.0), name))


@pytest.mark.parametrize("name", LOSSES)
def test_odd_rows_are_left_to_plain_torch(monkeypatch, name):
    function, options = LOSSES[name]
    for place, value in (((2, 5), torch.nan), ((2, 5), torch.inf), ((3, 5), -torch.inf)):
        x, target, given = scores(4, 100, "normal"), labels(4, 100, "hard"), arguments(options, 4, 100)
        target[2, 5] = target[3, 5] = 1.0
        x[place] = value
        found = results(function, x, ((target,), given), torch.float32, torch.tensor(1.0))
        plain_only(monkeypatch)
        plain = results(function, x, ((target,), given), torch.float32, torch.tensor(1.0))
        monkeypatch.undo()
        torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("name", LOSSES)
def test_further_derivatives_go_through_plain_torch(monkeypatch, name):
    function, options = LOSSES[name]
    x, target, given = torch.randn(3, 100), labels(3, 100, "soft"), arguments(options, 3, 100)
    direction = torch.randn(3, 100)

    def derivatives(dtype):
        leaf = x.to(dtype).requires_grad_()
        more = {name: v.to(dtype) if isinstance(v, torch.Tensor) else v for name, v in given.items()}
        loss = function(leaf, target.to(dtype), **more)
        (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
        second = torch.autograd.grad((grad * direction).sum(), leaf)[0] if grad.requires_grad else torch.zeros(3, 100)
        _, forward = torch.func.jvp(lambda x: function(x, target.to(dtype), **more), (leaf,), (direction.to(dtype),))
        return grad.detach().double(), second.double(), forward.detach().double()

    torch.testing.assert_close(derivatives(torch.float32), derivatives(DOUBLE), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("rows", "n"), [(40, 90), (2, 90), (5, 1500)])  # several at once, alone, and long
def test_fenchel_young_of_rows_with_their_own_k_and_mask(isa, monkeypatch, rows, n):
    k, mask = torch.rand(rows) * 0.5 * n, torch.rand(rows, n) < 0.9
    for kind in ("hard", "soft", "unknown", "lists"):
        x, target = scores(rows, n, "normal"), labels(rows, n, kind)
        hot = torch.zeros(rows, n).scatter(-1, target.clamp(min=0), 1) if kind == "lists" else target
        for size in (None, k):
            given = {"k": size, "mask": mask | (hot > 0), "reduction": "none"}  # the loss of a label ruled out is inf
            more = (ll.lml_fenchel_young_loss, x, (target,), given, torch.rand(rows))
            assert all(check_as_accurate(monkeypatch, *more, f"{kind}, {size}"))


@pytest.mark.parametrize("name", PROJECTIONS)
def test_projections_are_as_accurate_as_plain_torch(monkeypatch, name):
    function, options = PROJECTIONS[name]
    for rows, n, scale in (
        (9, 100, "normal"),
        (7, 130, "wide"),
        (5, 100, "ties"),
        (3, 1000, "offset"),
        (4, 300, "gap"),
    ):
        x = scores(rows, n, scale)
        upstream = torch.randn(x.shape)
        ran = check_as_accurate(monkeypatch, function, x, (), options, upstream, scale)
        assert ran == [True, True], scale


def test_capped_projections_of_rows_with_their_own_k_and_mask(monkeypatch):
    x, k = scores(6, 90, "normal"), torch.tensor([0.3, 1.0, 2.0, 7.5, 60.0, 33.0])
    mask = torch.rand(6, 90) < 0.8
    for function in (ll.capped_softmax, ll.capped_sparsemax):
        ran = check_as_accurate(monkeypatch, function, x, (k,), {"mask": mask}, torch.randn(x.shape))
        assert ran == [True, True]
