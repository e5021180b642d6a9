"""The LML losses: golden numbers, second formulas, derivatives, targets, edges."""

import copy
import math

import pytest
import torch
from tools import DEVICE, slow
from torch.autograd import gradcheck, gradgradcheck

import lastlayer as ll
from lastlayer import _native as native

INF, NAN = math.inf, math.nan
LISTS = torch.tensor([[0, 2, -1], [1, 1, 3], [-1, -1, -1], [5, 4, 0]])
HOT = torch.tensor([[1, 0, 1, 0, 0, 0], [0, 1, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 1, 1]], dtype=torch.int8)
K = torch.tensor([1.5, 2.0, 3.0, 4.5], dtype=torch.float64)


def normal(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


def by_formula(x, hot, k, rho):
    y = ll.lml(x, k)
    return -torch.where(hot > 0, y.log(), 0).sum(-1) - torch.where(hot == 0, (1 - rho * y).log(), 0).sum(-1)


def test_two_classes_by_hand():
    # As in the projection: y = sigmoid(+-1) for logits 3 and 1 with k = 1.
    x = torch.tensor([[3.0, 1.0]], dtype=torch.float64)
    y = 1 / (1 + math.exp(-1))
    assert ll.lml_loss(x, torch.tensor([0]), 1).item() == pytest.approx(-math.log(y), abs=1e-15)
    assert ll.lml_loss(x, torch.tensor([0]), 1, observed=0.5).item() == pytest.approx(
        -math.log(y) - math.log(1 - 0.5 * (1 - y)), abs=1e-15
    )


@pytest.mark.parametrize("impl", ["torch", "auto"])
@pytest.mark.parametrize("rho", [0.0, 0.3, 1.0])
def test_equals_the_formula(rho, impl):
    x = normal(4, 6)
    expected = by_formula(x, HOT, K, rho) if rho else by_formula(x, HOT, K, 0.0)
    for target in (LISTS, HOT, HOT.bool(), HOT.double()):
        torch.testing.assert_close(
            ll.lml_loss(x, target, K, observed=rho, reduction="none", impl=impl), expected, atol=1e-13, rtol=0
        )
    single = torch.tensor([0, 3, -1, 5])
    torch.testing.assert_close(
        ll.lml_loss(x, single, K, observed=rho, reduction="none", impl=impl),
        ll.lml_loss(x, single[:, None], K, observed=rho, reduction="none", impl=impl),
    )


SOFT = torch.tensor(
    [[1, 0.25, 0, 0.5, -1, 0], [0.1, 0.9, 0.3, 0, 0, 1], [0, 0, 0, 0, 0, 0], [1, 1, 1, 0.75, 0, 0.5]],
    dtype=torch.float64,
)


def test_soft_labels_by_hand():
    x = torch.tensor([[3.0, 1.0]], dtype=torch.float64)
    y = 1 / (1 + math.exp(-1))
    target = torch.tensor([[0.75, 0.25]], dtype=torch.float64)
    hits = 0.75 * math.log(y) + 0.25 * math.log(1 - y)
    rest = 0.25 * math.log(1 - 0.5 * y) + 0.75 * math.log(1 - 0.5 * (1 - y))
    assert ll.lml_loss(x, target, 1).item() == pytest.approx(-hits, abs=1e-15)
    assert ll.lml_loss(x, target, 1, observed=0.5).item() == pytest.approx(-hits - rest, abs=1e-15)
    assert ll.lml_loss(x, target.bfloat16(), 1).item() == pytest.approx(-hits, abs=1e-15)
    # softplus(1) + softplus(-1) - k nu - <t, x>, with nu = -2
    young = 2 * math.log(1 + math.exp(-1)) + 1 + 2 - (0.75 * 3 + 0.25)
    assert ll.lml_fenchel_young_loss(x, target).item() == pytest.approx(young, abs=1e-14)


@pytest.mark.parametrize("impl", ["torch", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rho", [0.0, 0.3, 1.0])
def test_soft_labels_mix_hard_ones(rho, dtype, impl):
    """The loss is linear in the target: mixup of targets is mixup of losses. Gradients too, of easy and hard rows."""
    target = SOFT.to(dtype)
    for scale in (1.0, 200.0):
        x = (scale * normal(4, 6)).to(dtype).requires_grad_()
        k = K.to(dtype).requires_grad_()

        def run(target, x=x, k=k):
            loss = ll.lml_loss(x, target, k, observed=rho, reduction="none", impl=impl)
            return [loss.detach(), *torch.autograd.grad(loss.sum(), (x, k))]

        unknown, parts = target < 0, [0.0, 0.0, 0.0]
        for level in (0.1, 0.25, 0.3, 0.5, 0.75, 0.9, 1.0):  # t is the share of the levels at which it counts
            below = max([0.0, *(t for t in (0.1, 0.25, 0.3, 0.5, 0.75, 0.9) if t < level)])
            hot = torch.where(unknown, -1, (target >= level - 1e-3).int()).to(torch.int8)
            parts = [p + (level - below) * f for p, f in zip(parts, run(hot), strict=True)]
        if rho == 0:
            parts = [torch.where((target > 0).any(-1).view(-1, *[1] * (p.ndim - 1)), p, 0) for p in parts]
        for found, expected in zip(run(target), parts, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize("impl", ["torch", "auto"])
@pytest.mark.parametrize("rho", [0.0, 0.3, 1.0])
def test_hard_targets_of_floats_are_those_of_integers(rho, impl):
    x = normal(4, 6).requires_grad_()
    hot = torch.where(torch.arange(6) == 4, -1, HOT).to(torch.int8)
    results = []
    for target in (hot, hot.double(), hot.to(torch.bfloat16), 3.0 * hot):  # what is above 1 counts as 1
        loss = ll.lml_loss(x, target, K, observed=rho, reduction="none", impl=impl)
        young = ll.lml_fenchel_young_loss(x, target, reduction="none")
        results.append([loss, young, *torch.autograd.grad(loss.sum() + young.sum(), x)])
    for other in results[1:]:
        for found, expected in zip(other, results[0], strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("impl", ["torch", "auto"])
def test_a_target_of_nan_stays_in_its_row(impl):
    target = torch.tensor([[0.5, NAN, 0.0], [0.5, 0.0, 0.0]])
    loss = ll.lml_loss(torch.zeros(2, 3), target, 1, observed=0.5, reduction="none", impl=impl)
    assert loss.isnan().tolist() == [True, False]


def test_soft_fenchel_young_has_the_difference_as_gradient():
    x = normal(4, 6).requires_grad_()
    target = SOFT.clamp(min=0)
    loss = ll.lml_fenchel_young_loss(x, target, reduction="sum")
    (grad,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(grad, ll.lml(x, target.sum(-1)) - target)
    fitted = torch.logit(target[:2, :2].clamp(0.1, 0.9))  # there y is the target, and the loss its entropy
    found = ll.lml_fenchel_young_loss(fitted, fitted.sigmoid(), reduction="none")
    y = fitted.sigmoid()
    torch.testing.assert_close(found, -(y * y.log() + (1 - y) * (1 - y).log()).sum(-1))
    assert gradcheck(lambda x: ll.lml_fenchel_young_loss(x, SOFT, reduction="none"), (x,))


@pytest.mark.parametrize("impl", [slow("torch"), "auto"])
@pytest.mark.parametrize("rho", [slow(0.0), 0.3, slow(1.0)])
@pytest.mark.parametrize("target", [LISTS, slow(HOT), SOFT])
def test_derivatives(rho, target, impl):
    x, k = normal(4, 6).requires_grad_(), K.clone().requires_grad_()

    def loss(x, k):
        return ll.lml_loss(x, target, k, observed=rho, temperature=0.7, reduction="none", impl=impl)

    def mean(x, k):
        return ll.lml_loss(x, target, k, observed=rho, impl=impl)

    assert gradcheck(loss, (x, k), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(loss, (x, k))
    assert gradcheck(mean, (x, k), check_batched_grad=True)


def test_the_gradient_of_algorithm_2_in_closed_form():
    x = normal(4, 6).requires_grad_()
    y = ll.lml(x, 2).detach()
    h = y * (1 - y)
    missing = torch.where(HOT > 0, 1 - y, 0)
    expected = h / h.sum(-1, keepdim=True) * missing.sum(-1, keepdim=True) - missing
    (found,) = torch.autograd.grad(ll.lml_loss(x, LISTS, 2, reduction="sum"), x)
    torch.testing.assert_close(found, expected)


def test_a_small_rho_is_algorithm_2_to_first_order():
    x = normal(4, 6)
    y = ll.lml(x, 2)
    rho = 1e-6
    unseen = torch.where(HOT == 0, y, 0).sum(-1)
    plain, thinned = (ll.lml_loss(x, LISTS, 2, observed=r, reduction="none") for r in (0.0, rho))
    torch.testing.assert_close((thinned - plain) / rho, unseen, atol=1e-5, rtol=0)


@pytest.mark.parametrize("impl", ["torch", "auto"])
def test_reductions_and_rows_that_contribute(impl):
    x = normal(4, 6).float()
    rows = ll.lml_loss(x, LISTS, 2, reduction="none", impl=impl)
    assert rows[2] == 0
    torch.testing.assert_close(ll.lml_loss(x, LISTS, 2, impl=impl), rows.sum() / 3)
    torch.testing.assert_close(ll.lml_loss(x, LISTS, 2, reduction="sum", impl=impl), rows.sum())
    thinned = ll.lml_loss(x, LISTS, 2, observed=0.5, reduction="none", impl=impl)
    torch.testing.assert_close(ll.lml_loss(x, LISTS, 2, observed=0.5, impl=impl), thinned.mean())
    unknown = HOT.clone()
    unknown[1] = -1
    torch.testing.assert_close(ll.lml_loss(x, unknown, 2, observed=0.5, impl=impl), thinned[[0, 2, 3]].sum() / 3)
    nothing = x.clone().requires_grad_()
    loss = ll.lml_loss(nothing, torch.full((4, 2), -1), 2, impl=impl)
    loss.backward()
    assert loss == 0
    assert (nothing.grad == 0).all()


@pytest.mark.parametrize("impl", ["torch", "auto"])
def test_unknown_labels_are_in_neither_sum(impl):
    x = normal(4, 6)
    target = torch.where(torch.tensor([False, False, False, False, False, True]), -1, HOT)
    y = ll.lml(x, 2)
    expected = -torch.where(target > 0, y.log(), 0).sum(-1) - torch.where(target == 0, (1 - 0.4 * y).log(), 0).sum(-1)
    found = ll.lml_loss(x, target, 2, observed=0.4, reduction="none", impl=impl)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("impl", ["torch", "auto"])
@pytest.mark.parametrize("gap", [40.0, 100.0, 1e4])
def test_a_label_far_below_has_the_gap_as_loss_and_a_full_gradient(gap, impl):
    x = torch.tensor([[gap, gap, 0.0, -1.0]], requires_grad=True)
    loss = ll.lml_loss(x, torch.tensor([[2]]), 2, impl=impl)
    loss.backward()
    exact = ll.lml_loss(x.detach().double(), torch.tensor([[2]]), 2)
    assert loss.item() == pytest.approx(exact.item(), rel=1e-6)
    p = torch.cat([torch.tensor([0.25, 0.25]), 0.5 * torch.tensor([0.0, -1.0]).softmax(0)])
    torch.testing.assert_close(x.grad[0], p - torch.tensor([0.0, 0, 1, 0]), atol=1e-3, rtol=0)


@pytest.mark.parametrize("impl", ["torch", "auto"])
def test_edges(impl):
    x = torch.tensor([[1.0, -INF, 0, 2], [1, 2, 3, NAN], [1, 2, 3, 4], [1, 2, 3, 4]], requires_grad=True)
    target = torch.tensor([[0, -1], [0, 1], [1, 2], [0, 1]])
    loss = ll.lml_loss(x, target, torch.tensor([2.0, 2, 4, 0]), reduction="none", impl=impl)
    assert loss.isnan().tolist() == [False, True, False, False]
    assert loss[2] == 0
    assert loss[3] == INF
    loss[[0, 2]].sum().backward()
    assert x.grad[[0, 2, 3]].isfinite().all()
    assert x.grad[0, 1] == 0
    assert (x.grad[2:] == 0).all()
    ruled_out = ll.lml_loss(x, torch.tensor([[1], [0], [0], [0]]), torch.tensor([2.0, 2, 2, 2]), reduction="none")
    assert ruled_out[0] == INF
    assert ll.lml_loss(torch.empty(0, 5), torch.empty(0, 2, dtype=torch.long), 2, impl=impl) == 0
    one = ll.lml_loss(torch.tensor([[3.0]], requires_grad=True), torch.tensor([0]), 1, impl=impl)
    assert one == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    x = torch.tensor([[1e4, -1e4, 3.0, 2.0], [1, 2, 3, 4]], dtype=dtype, requires_grad=True)
    loss = ll.lml_loss(x, torch.tensor([[1, 2], [0, 1]]), 2, observed=0.3)
    loss.backward()
    assert loss.dtype == dtype
    assert loss.isfinite()
    assert x.grad.isfinite().all()


def test_a_million_classes_with_index_lists():
    x = torch.randn(2, 1_000_000, requires_grad=True)
    loss = ll.lml_loss(x, torch.tensor([[5, 999_999], [7, -1]]), 20)
    loss.backward()
    assert loss.isfinite()
    assert (x.grad[0, 5] < 0) & (x.grad[0, 6] > 0)


def test_masks_leave_classes_out():
    x = normal(3, 6)
    mask = torch.tensor([True, True, False, True, True, False])
    target = torch.tensor([[0], [1], [3]])
    expected = ll.lml_loss(x[:, mask], torch.tensor([[0], [1], [2]]), 2, observed=0.3)
    torch.testing.assert_close(ll.lml_loss(x, target, 2, observed=0.3, mask=mask), expected)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: ll.lml_loss(x, torch.zeros(3), 1), ValueError, r"lml_loss: `target` must have shape \(2, 4\)"),
        (
            lambda x: ll.lml_loss(x, torch.zeros(2), 1),
            TypeError,
            r"holds class indices and must be of int64 or int32",
        ),
        (lambda x: ll.lml_loss(x, [0, 1], 1), TypeError, r"lml_loss: `target` must be a tensor, got list"),
        (
            lambda x: ll.lml_loss(x, torch.tensor([0, 1]), 5),
            ValueError,
            r"lml_loss: `k` must be between 0 and n_classes=4",
        ),
        (
            lambda x: ll.lml_loss(x, torch.tensor([0, 1]), 1, observed=2),
            ValueError,
            r"lml_loss: `observed` must be between 0 and 1, got 2",
        ),
        (
            lambda x: ll.lml_loss(x, torch.tensor([0, 1]), 1, reduction="avg"),
            ValueError,
            r"lml_loss: `reduction` must be one of 'none', 'mean', 'sum', got 'avg'",
        ),
    ],
)
def test_messages(call, error, text):
    with pytest.raises(error, match=text):
        call(torch.randn(2, 4))


@pytest.mark.parametrize("impl", ["torch", "auto"])
@pytest.mark.parametrize("rows", ["nan", "too few classes"])
def test_a_row_without_a_label_is_silent_whatever_its_logits(rows, impl):
    x = torch.tensor([[NAN, 1.0] if rows == "nan" else [-INF, 1.0], [0.0, 1.0]], requires_grad=True)
    target, k = torch.tensor([-1, 0]), torch.tensor([2.0, 1.0])
    loss = ll.lml_loss(x, target, k, impl=impl)
    torch.testing.assert_close(loss, ll.lml_loss(x[1:], target[1:], 1.0))
    (grad,) = torch.autograd.grad(loss, x)
    assert grad[0].tolist() == [0, 0]
    assert grad[1, 0] < 0


@pytest.mark.parametrize("impl", ["torch", "auto"])
def test_every_class_asked_for_and_every_label_seen(impl):
    x = torch.tensor([[0.0, 1, 2]])
    assert ll.lml_loss(x, torch.tensor([1]), 3, observed=1.0, impl=impl) == INF
    assert ll.lml_loss(x, torch.tensor([[0, 1, 2, -1]]), 3, observed=1.0, impl=impl) == 0


def test_classes_that_do_not_exist_are_an_error():
    x = torch.zeros(3, 4)
    for loss in (ll.binary_loss, ll.two_way_loss, lambda x, t: ll.lml_loss(x, t, 2)):
        with pytest.raises(
            ValueError, match=r"`target` must hold classes below n_classes=4, got 4. Classes count from 0"
        ):
            loss(x, torch.tensor([4, 1, 2]))


def test_float16_stays_finite():
    x = torch.full((4, 8), -1e4, dtype=torch.float16)
    x[:, :2] = 1e4
    target = torch.zeros(4, 8)
    target[:, 2:] = 1
    assert ll.lml_loss(x, target, 2, reduction="sum") == 65504
    assert ll.lml_fenchel_young_loss(x, target, 2).isfinite()


# the convex loss


def test_fenchel_young_gradient_is_the_difference():
    x = normal(4, 6).requires_grad_()
    for k in (None, 2.5):
        (found,) = torch.autograd.grad(ll.lml_fenchel_young_loss(x, LISTS, k, reduction="sum"), x)
        torch.testing.assert_close(found, ll.lml(x.detach(), HOT.sum(-1) if k is None else k) - HOT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fenchel_young_gradient_is_the_difference_where_the_loss_is_infinite(dtype):
    logits = torch.randn(4, 6, dtype=dtype)
    logits[0, 1], logits[1, 2], logits[2, 0] = -torch.inf, torch.inf, torch.inf
    logits[3, 4] = -torch.inf
    target = torch.zeros(4, 6, dtype=dtype)
    target[0, :2] = target[1, 3:5] = target[2, :2] = 1  # ruled out; a rival at +inf; a label there
    target[3, 3], target[3, 4] = 1, 0.5
    for k in (2, 1.5):
        for given in (target, target > 0):
            leaf = logits.clone().requires_grad_()
            loss = ll.lml_fenchel_young_loss(leaf, given, k, reduction="none")
            assert loss.isinf().tolist() == [True, True, False, True]
            (grad,) = torch.autograd.grad(loss.sum(), leaf)
            right = torch.where(logits.isfinite(), ll.lml(logits, k) - given.to(dtype), 0)
            torch.testing.assert_close(grad, right)


def test_fenchel_young_value_and_derivatives():
    x, k = normal(4, 6).requires_grad_(), K.clone().requires_grad_()
    nu = ll.lml_threshold(x, k)
    expected = torch.nn.functional.softplus(x + nu[:, None]).sum(-1) - k * nu - (x * HOT).sum(-1)
    torch.testing.assert_close(ll.lml_fenchel_young_loss(x, HOT, k, reduction="none"), expected)
    assert gradcheck(lambda x, k: ll.lml_fenchel_young_loss(x, LISTS, k), (x, k))
    assert gradgradcheck(lambda x, k: ll.lml_fenchel_young_loss(x, LISTS, k), (x, k))


def test_fenchel_young_is_convex_and_not_negative():
    a, b = normal(200, 6), normal(200, 6)
    target = torch.randint(6, (200, 2))
    at = [ll.lml_fenchel_young_loss(x, target, reduction="none") for x in (a, b, (a + b) / 2)]
    assert (at[2] <= (at[0] + at[1]) / 2 + 1e-12).all()
    assert (at[0] >= 0).all()
    sure = torch.tensor([[50.0, 50.0, -50.0]])
    assert ll.lml_fenchel_young_loss(sure, torch.tensor([[0, 1]])) < 1e-20


def test_fenchel_young_asks_for_no_more_than_is_known():
    x = torch.randn(3, 4, requires_grad=True)
    target = torch.tensor([[1, 0, 0, 0], [-1, -1, -1, -1], [0, 1, -1, -1]], dtype=torch.int8)
    loss = ll.lml_fenchel_young_loss(x, target, 3, reduction="none")
    assert loss[1] == 0
    assert loss.isfinite().all()
    (grad,) = torch.autograd.grad(loss.sum(), x)
    assert (grad[1] == 0).all()
    assert (grad[2, 2:] == 0).all()


def test_fenchel_young_edges():
    x = torch.tensor([[1.0, 2, 3, 4], [1, -INF, 3, 4]], requires_grad=True)
    none = ll.lml_fenchel_young_loss(x, torch.full((2, 1), -1), reduction="none")
    assert none.tolist() == [0, 0]
    at_ends = ll.lml_fenchel_young_loss(x[:1], torch.tensor([[0]]), torch.tensor([4.0]), reduction="none")
    assert at_ends.tolist() == [9.0]
    assert ll.lml_fenchel_young_loss(x[:1], torch.tensor([[0]]), 0).item() == -1
    assert ll.lml_fenchel_young_loss(x[1:], torch.tensor([[1]]), 1) == INF
    unknown = torch.tensor([[1, 0, -1, 0]], dtype=torch.int8)
    (grad,) = torch.autograd.grad(ll.lml_fenchel_young_loss(x[:1], unknown), x)
    assert grad[0, 2] == 0
    torch.testing.assert_close(
        ll.lml_fenchel_young_loss(x[:1], unknown),
        ll.lml_fenchel_young_loss(x[:1, [0, 1, 3]], torch.tensor([[0]])),
    )


def test_modules():
    x = torch.randn(4, 6)
    torch.testing.assert_close(ll.LMLLoss(2, observed=0.3)(x, LISTS), ll.lml_loss(x, LISTS, 2, observed=0.3))
    torch.testing.assert_close(ll.LMLFenchelYoungLoss()(x, LISTS), ll.lml_fenchel_young_loss(x, LISTS))


@pytest.mark.slow  # test_contract.py compiles it without `observed`
def test_compile():
    torch.compiler.reset()
    x = torch.randn(4, 6, requires_grad=True)
    compiled = torch.compile(lambda x: ll.lml_loss(x, LISTS, 2.0, observed=0.3), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), ll.lml_loss(x, LISTS, 2.0, observed=0.3))
    torch.testing.assert_close(
        torch.autograd.grad(compiled(x), x), torch.autograd.grad(ll.lml_loss(x, LISTS, 2.0, observed=0.3), x)
    )


@pytest.mark.parametrize("target", [torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[0]])], ids=["multi-hot", "lists"])
def test_a_label_that_is_ruled_out_has_an_infinite_fenchel_young_loss(target):
    for x in ([-torch.inf, 1.0, -torch.inf], [-torch.inf, 1.0, 2.0]):  # the first projection is a vertex
        assert ll.lml_fenchel_young_loss(torch.tensor([x]), target).item() == torch.inf
    assert ll.lml_fenchel_young_loss(torch.tensor([[1.0, -torch.inf, -torch.inf]]), target).item() == 0


@pytest.mark.parametrize("impl", ["torch", "native", "auto"])
@pytest.mark.parametrize("observed", [0.0, 0.5])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_row_without_a_solution_has_a_gradient_of_nan(impl, observed, reduction):
    """If it contributes; with every implementation, and without harm to the other rows."""
    if impl == "native" and native.missing:
        pytest.skip(native.missing)
    x, k = torch.randn(4, 5, requires_grad=True), torch.tensor([2.0, 7, 2, 7])
    target = torch.eye(5)[:4].clone()
    target[3] = -1
    loss = ll.lml_loss(x, target, k, observed=observed, reduction=reduction, impl=impl)
    loss.sum().backward()
    assert loss.reshape(-1).isnan().tolist() == ([False, True, False, False] if reduction == "none" else [True])
    assert x.grad.isnan().all(-1).tolist() == [False, True, False, False]
    assert x.grad[[0, 2]].isfinite().all()
    assert (x.grad[3] == 0).all()


@pytest.mark.parametrize("impl", ["torch", "auto"])
def test_a_row_without_a_solution_spoils_no_other_row_of_a_batch_of_gradients(impl):
    x, k = torch.randn(4, 5, requires_grad=True), torch.tensor([2.0, -1.0, 2.0, 1.5], requires_grad=True)
    loss = ll.lml_loss(x, torch.arange(4), k, reduction="none", impl=impl)
    for leaf in (x, k):
        (each,) = torch.autograd.grad(loss, leaf, torch.eye(4), retain_graph=True, is_grads_batched=True)
        for row, found in enumerate(each):
            (right,) = torch.autograd.grad(loss[row], leaf, retain_graph=True)
            torch.testing.assert_close(found, right, equal_nan=True)


@pytest.mark.slow
def test_new_numbers_are_not_compiled_anew():
    """One graph for the first numbers, and one for all others: in Dynamo, and in what follows it."""
    from torch._dynamo.backends.debugging import aot_eager

    torch.compiler.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    def loss(x, k, observed, temperature):
        return ll.lml_loss(x, target, k, observed=observed, temperature=temperature)

    x, target = torch.randn(4, 20), torch.eye(20)[:4]
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    for i in range(10):
        numbers = 3 + i / 7, 0.1 + i / 20, 0.5 + i
        torch.testing.assert_close(compiled(x, *numbers), loss(x, *numbers))
    assert len(graphs) == 2


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("observed", [0.0, 0.4])
def test_a_captured_step_is_an_eager_step(observed):
    """Forward, backward and optimiser as one CUDA graph, replayed on new rows."""
    torch.manual_seed(0)
    first = torch.nn.Linear(20, 30, device=DEVICE)
    second = copy.deepcopy(first)
    batches = [(torch.randn(16, 20, device=DEVICE), torch.randint(30, (16,), device=DEVICE)) for _ in range(5)]
    x, y = (part.clone() for part in batches[0])
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]

    def step(model, optimizer, x, y):
        optimizer.zero_grad(set_to_none=True)
        loss = ll.lml_loss(model(x), y, 3, observed=observed)
        loss.backward()
        optimizer.step()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # past the calls after which a kernel is made for a length
        for _ in range(8):
            step(first, optimizers[0], x, y)
    torch.cuda.current_stream().wait_stream(side)
    second.load_state_dict(first.state_dict())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(first, optimizers[0], x, y)
    for rows, labels in batches:
        x.copy_(rows), y.copy_(labels)
        graph.replay()
        expected = step(second, optimizers[1], rows, labels)
        torch.testing.assert_close(captured.detach(), expected.detach())
    torch.testing.assert_close(first.weight, second.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options", [{}, {"observed": 0.5}, {"temperature": 0.5}, {"weight": torch.linspace(0.5, 2, 20)}]
)
def test_gradients_of_half_precision_are_rounded_once(dtype, options):
    x = torch.randn(50, 20, generator=torch.Generator().manual_seed(0)).to(dtype)
    for target in (torch.arange(50) % 20, (x > 1).float()):
        found, exact = (
            torch.autograd.grad(ll.lml_loss(leaf, target, 3.0, impl="torch", reduction="none", **options).sum(), leaf)[
                0
            ]
            for leaf in (x.clone().requires_grad_(), x.float().requires_grad_())
        )
        assert torch.equal(found, exact.to(dtype))
    # The two parts are 4e9 and -4e9.
    one = torch.tensor([[0.44]], dtype=dtype, requires_grad=True)
    loss = ll.lml_loss(one, torch.tensor([[0.055]]), 0.2, temperature=1e-10, impl="torch", reduction="none")
    assert torch.autograd.grad(loss.sum(), one)[0].isfinite().all()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_temperatures_of_rows_leave_the_dtype_alone(dtype, reduction):
    x, heat = torch.randn(4, 6).to(dtype), torch.linspace(0.5, 2, 4)
    for target in (LISTS, HOT):
        for scores in (x, x.clone().requires_grad_()):
            loss = ll.lml_loss(scores, target, 2.0, temperature=heat, reduction=reduction)
            assert loss.dtype == dtype
    (grad,) = torch.autograd.grad(loss.sum(), scores)
    assert grad.dtype == dtype
