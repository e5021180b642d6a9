"""Calls in their general form, whose kernels come with the package: on a GPU, or in Triton's interpreter."""

import pytest
import torch
from tools import DEVICE, GPU_KERNELS, INTERPRETED

import lastlayer as ll

pytestmark = GPU_KERNELS


@pytest.fixture
def taken(monkeypatch):
    """Have no kernel at hand; which calls were made in their general form."""
    from lastlayer._triton import ahead, fused, plan

    found = []

    def at_hand(kernel, *given):
        found.append(kernel.fn.__name__)
        return False

    monkeypatch.setattr(ahead, "_provided", lambda x: not plan.in_general_form())
    monkeypatch.setattr(ahead, "_absent", {})
    monkeypatch.setattr(ahead, "at_hand", at_hand)
    monkeypatch.setattr(ahead, "PATIENCE", -1)  # nothing is compiled meanwhile
    monkeypatch.setattr(plan, "PATIENCE", 3)  # which the interpreter does not have
    monkeypatch.setattr(plan, "_seen", {})
    monkeypatch.setattr(fused, "_own", set())
    monkeypatch.setattr(fused, "MANY", 4)
    return found


def inputs(rows, n):
    generator = torch.Generator(DEVICE).manual_seed(n)
    x = 2 * torch.randn(rows, n, generator=generator, device=DEVICE)
    y = (torch.rand(rows, n, generator=generator, device=DEVICE) < 0.2).float()
    y[:, 0] = 1
    w = torch.rand(n, generator=generator, device=DEVICE) + 0.5
    k = torch.linspace(1, 3, rows, device=DEVICE)
    return x, y, w, k, torch.stack([y.argmax(-1), y.cumsum(-1).argmax(-1), -torch.ones_like(k).long()], -1)


CALLS = {
    "lml": lambda x, y, w, k, t: ll.lml(x, 2.5, temperature=1.5),
    "lml, k": lambda x, y, w, k, t: ll.lml(x, k),
    "lml, mask": lambda x, y, w, k, t: ll.lml(x, 1.5, mask=y == 0),
    "log_lml": lambda x, y, w, k, t: ll.log_lml(x, k),
    "lml_threshold": lambda x, y, w, k, t: ll.lml_threshold(x, k, mask=y == 0),
    "weight": lambda x, y, w, k, t: ll.lml(x, 2.5, weight=w, temperature=1.5),
    "one row of weights": lambda x, y, w, k, t: ll.lml(
        x, 2.5, weight=w[None], upper=torch.full((1, 1), 0.9, device=DEVICE)
    ),
    "weights": lambda x, y, w, k, t: ll.lml(x, k, weight=y + 0.5, upper=w, mask=w > 0.6),
    "bounds": lambda x, y, w, k, t: ll.lml(x, 2.5, lower=0.01 * w, upper=0.6 * w),
    "lml_at_most": lambda x, y, w, k, t: ll.lml_at_most(x, k, weight=w),
    "loss": lambda x, y, w, k, t: ll.lml_loss(x, t[:, 0], k),
    "loss, temperature": lambda x, y, w, k, t: ll.lml_loss(x, t[:, 0], 2.5, temperature=1.5),
    "loss, lists": lambda x, y, w, k, t: ll.lml_loss(x, t, 2.5),
    "loss, observed": lambda x, y, w, k, t: ll.lml_loss(x, t, 2.5, observed=0.5),
    "loss, boolean": lambda x, y, w, k, t: ll.lml_loss(x, y > 0, 2.5),
    "loss, half": lambda x, y, w, k, t: ll.lml_loss(x, 0.5 * y.half(), 2.5, observed=0.5),
    "loss, per row": lambda x, y, w, k, t: ll.lml_loss(x, t, 2.5, reduction="none"),
    "loss, unknown": lambda x, y, w, k, t: ll.lml_loss(x, (2 * y - 1).to(torch.int8), 2.5, observed=0.5),
    "loss, weights": lambda x, y, w, k, t: ll.lml_loss(x, y, 2.5, mask=w > 0.6, sample_weight=k),
    "truncated": lambda x, y, w, k, t: ll.loss.truncated_entropy_loss(x, 0.5 * y.half(), 2),
    "asymmetric": lambda x, y, w, k, t: ll.asymmetric_loss(x, (3 * y - 1).to(torch.int8), weight=w),
    "svm": lambda x, y, w, k, t: ll.loss.smooth_topk_svm_loss(x, y.half(), 2),
    "two_way": lambda x, y, w, k, t: ll.two_way_loss(x, y.bfloat16()),
    "quasibinary": lambda x, y, w, k, t: ll.loss.quasibinary_loss(x, y.double()),
}


def both_ways(call, x, *others):
    leaf = x.detach().requires_grad_()
    out = call(leaf, *others)
    (grad,) = torch.autograd.grad(out, leaf, torch.linspace(-1, 1, out.numel(), device=DEVICE).reshape(out.shape))
    return out.detach(), grad


@pytest.mark.parametrize("name", CALLS)
def test_is_the_same(taken, name):
    given = inputs(5, 37)
    exact = both_ways(CALLS[name], given[0].double(), *given[1:])
    for value, right in zip(both_ways(CALLS[name], *given), exact, strict=True):
        torch.testing.assert_close(value.double(), right, rtol=1e-5, atol=1e-5)
    assert taken


@pytest.mark.parametrize("name", ["lml, k", "log_lml", "lml_threshold", "bounds", "loss, lists", "loss, boolean"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(taken, name, dtype):
    x, *others = inputs(5, 37)
    wide = both_ways(CALLS[name], x.to(dtype).float(), *others)
    for value, right in zip(both_ways(CALLS[name], x.to(dtype), *others), wide, strict=True):
        assert value.dtype == dtype or not value.ndim
        torch.testing.assert_close(value, right.to(value.dtype), rtol=2e-2, atol=2e-3)
    assert taken


@pytest.mark.parametrize(
    "name", ["lml", "lml, k", "lml_threshold", "loss", "loss, observed", "loss, boolean", "bounds"]
)
@pytest.mark.parametrize("split", [True, False])
def test_long_rows(taken, monkeypatch, name, split):
    from lastlayer._triton import plan

    monkeypatch.setattr(plan, "CLASSES", (8, 8, 8, 8, 16, 32, 64))
    monkeypatch.setattr(plan, "is_split", lambda rows, n: split)
    given = inputs(3, 61)
    exact = both_ways(CALLS[name], given[0].double(), *given[1:])
    for value, right in zip(both_ways(CALLS[name], *given), exact, strict=True):
        torch.testing.assert_close(value.double(), right, rtol=1e-5, atol=1e-5)
    assert taken


def test_a_loss_without_a_gradient(taken):
    x, y, *_ = inputs(5, 37)
    for loss in (ll.binary_loss, ll.asymmetric_loss, ll.loss.warp_loss):
        torch.testing.assert_close(loss(x, y).double(), loss(x.double(), y), rtol=1e-5, atol=1e-5)
    assert taken


def test_gradients_of_weights(taken):
    x, y, w, *_ = inputs(5, 37)
    for terms in ((w, None, 0.6 * w), (y + 0.5, 0.01 * w, None)):
        found, exact = (
            [None if term is None else term.detach().clone().to(dtype).requires_grad_() for term in terms]
            for dtype in (torch.float32, torch.float64)
        )
        for some in (found, exact):
            weight, lower, upper = some
            ll.lml(x.to(weight.dtype), 2.5, weight=weight, lower=lower, upper=upper).square().sum().backward()
        for one, right in zip(found, exact, strict=True):
            if one is not None:
                torch.testing.assert_close(one.grad.double(), right.grad, rtol=1e-4, atol=1e-5)
    assert taken


@pytest.mark.usefixtures("no_general_form")
def test_a_temperature_of_1_as_a_number_changes_nothing(monkeypatch):
    from lastlayer._triton import lml, plan

    monkeypatch.setattr(plan, "plan", lambda n, *given: plan.shared(n))

    x, y, _, k, _ = inputs(5, 37)
    mask = y == 0
    few = 0.0 if INTERPRETED else 5e-6  # a compiler may join other sums and products
    for kind in ("y", "log", "nu"):
        plain = lml._forward(x, k.unsqueeze(-1), mask, 1.0, kind)
        with plan.general_form():
            general = lml._forward(x, k.unsqueeze(-1), mask, 1.0, kind)
        for one, other in ((plain[0], general[0]), (plain[2] - plain[1], general[2] - general[1])):
            torch.testing.assert_close(one, other, rtol=few, atol=few, equal_nan=True)
