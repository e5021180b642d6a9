"""What every loss promises: one list of losses, one test a promise.

A loss that is added to the package joins by one line in `LOSSES`; `test_every_loss_is_in_the_list` sees to it.
"""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from tools import DEVICE, slow
from torch import Tensor

import lastlayer as ll
from lastlayer.loss._table import LOSSES as LOSS_FACTS
from lastlayer.loss._table import exceptions, loss_function, markdown


class Loss(NamedTuple):
    name: str
    module: str
    args: tuple[Any, ...] = ()  # after the target
    options: Mapping[str, Any] = MappingProxyType({})
    labels: bool = True  # takes a target of labels
    single: bool = False  # takes one label per row
    rows: bool = True  # a row's loss does not depend on the others
    sees_unknown: bool = False  # unknown classes stay in the projection
    counts_all: bool = False  # the mean is over all rows, also those that say nothing

    @property
    def function(self) -> Callable[..., Tensor]:
        return getattr(ll, self.name)

    def __call__(self, x: Tensor, target: Tensor, **options: Any) -> Tensor:
        return self.beside(x)(x, target, **options)

    def beside(self, x: Tensor) -> Callable[..., Tensor]:
        """Return a function of scores and target: the compiler of torch 2.6 does not see through this class."""
        extra = [a(x) if callable(a) else a for a in self.args]
        function, given, settings = self.function, 1 + self.labels, dict(self.options)
        return lambda x, target, **options: function(*[x, target][:given], *extra, **settings, **options)

    def build(self, **options: Any) -> torch.nn.Module:
        extra = [a for a in self.args if not callable(a)]
        return getattr(ll, self.module)(*extra, **self.options, **options)


def estimates(x: Tensor) -> Tensor:
    """A second tensor of scores, the same for the same shape: label estimates, or a teacher."""
    n = x.shape[-1]
    return (0.5 - torch.arange(n, device=x.device) / n).expand(x.shape).to(x.dtype)


LOSSES = [
    Loss("lml_loss", "LMLLoss", (1,), sees_unknown=True),
    Loss("lml_loss", "LMLLoss", (1,), {"observed": 0.5}, sees_unknown=True),
    Loss("lml_fenchel_young_loss", "LMLFenchelYoungLoss", counts_all=True),
    Loss("truncated_entropy_loss", "TruncatedEntropyLoss", (1,)),
    Loss("smooth_topk_svm_loss", "SmoothTopKSVMLoss", (1,), single=True),
    Loss("topk_distillation_loss", "TopKDistillationLoss", (estimates, 1), labels=False),
    Loss("two_way_loss", "TwoWayLoss", rows=False),
    Loss("two_way_loss", "TwoWayLoss", options={"per": "sample"}),
    Loss("asymmetric_loss", "AsymmetricLoss"),
    Loss("asymmetric_loss", "AsymmetricLoss", options={"clip": 0.0, "gamma_negative": 0.5, "detach_weight": True}),
    Loss("multihot_softmax_loss", "MultihotSoftmaxLoss"),
    Loss("multihot_softmax_loss", "MultihotSoftmaxLoss", options={"label_smoothing": 0.1}),
    Loss("binary_loss", "BinaryLoss"),
    Loss("binary_loss", "BinaryLoss", options={"label_smoothing": 0.1}),
    Loss("warp_loss", "WARPLoss"),
    Loss("rml_loss", "RMLLoss"),
    Loss("quasibinary_loss", "QuasibinaryLoss", rows=False, counts_all=True),
    Loss("assume_negative_loss", "AssumeNegativeLoss"),
    Loss("assume_negative_loss", "AssumeNegativeLoss", options={"label_smoothing": 0.1, "negative_weight": 0.2}),
    Loss("expected_positive_loss", "ExpectedPositiveLoss", (1,), rows=False),
    Loss("role_loss", "ROLELoss", (estimates, 1), rows=False),
    Loss("entropy_max_loss", "EntropyMaxLoss"),
    Loss("hill_loss", "HillLoss"),
    Loss("splc_loss", "SPLCLoss"),
    Loss("large_loss", "LargeLoss", rows=False),
    Loss("large_loss", "LargeLoss", options={"mode": "temporary", "rate": 0.1}, rows=False),
    Loss("outlier_uniform_loss", "OutlierUniformLoss", labels=False),
    Loss("outlier_max_confidence_loss", "OutlierMaxConfidenceLoss", labels=False),
]
# These take features, or have no reduction: their own tests hold them.
APART = {
    "linear_lml_loss",
    "metric_surrogate_loss",
    "spherical_loss",
    "reciprocal_point_loss",
}
FOUND = [loss for loss in LOSSES if hasattr(ll, loss.name)]
LABELS = [loss for loss in FOUND if loss.labels]
TRACED = list({loss.name: loss for loss in reversed(FOUND)}.values())  # tracing is slow: the first line of each name
MULTI = [loss for loss in LABELS if not loss.single]
# Compiling takes seconds each; the graph and the compiled form of every function are in tests/test_company.py.
SOME = [loss for i, loss in enumerate(TRACED) if i % 4 == 0 or loss.name in ("binary_loss", "lml_loss")]


def every(losses: list[Loss]) -> Any:
    def name(loss: Loss) -> str:
        return "-".join([loss.name, *(f"{k}={v}" for k, v in loss.options.items())])

    return pytest.mark.parametrize("loss", losses, ids=name)


def case(loss: Loss, rows: int = 4, n: int = 6, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Logits and multi-hot labels; each row has a positive and a negative, no class has all rows."""
    x = 2 * torch.randn(rows, n, dtype=dtype, device=DEVICE)
    target = torch.zeros(rows, n, dtype=torch.int8, device=DEVICE)
    target[torch.arange(rows), torch.arange(rows) % n] = 1
    if not loss.single:
        target[torch.arange(0, rows, 2), (torch.arange(0, rows, 2) + 2) % n] = 1
    return x, target


def lists(target: Tensor, m: int = 3) -> Tensor:
    """The labels of a multi-hot target as index lists padded with -1."""
    place = torch.arange(target.shape[-1], device=target.device).expand(target.shape)
    return torch.where(target > 0, place, -1).sort(-1, descending=True).values[..., :m]


def grad_of(loss: Loss, x: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    value = loss(x, target, **options)
    return value.detach(), torch.autograd.grad(value.sum(), x)[0]


def test_every_loss_is_in_the_list():
    there = {name for name in ll.loss.__all__ if name.endswith("_loss")}
    assert there <= {loss.name for loss in LOSSES} | APART


@every(FOUND)
def test_reductions_agree(loss):
    x, target = case(loss)
    rows = loss(x, target, reduction="none")
    assert rows.shape == (4,)
    torch.testing.assert_close(loss(x, target, reduction="sum"), rows.sum())
    torch.testing.assert_close(loss(x, target, reduction="mean"), rows.mean())
    torch.testing.assert_close(loss(x, target), rows.mean())


@every(LABELS)
def test_target_forms_agree(loss):
    x, target = case(loss)
    whole = loss(x, target, reduction="none")
    for dtype in (torch.bool, torch.uint8, torch.float32, torch.float64, torch.bfloat16):
        torch.testing.assert_close(loss(x, target.to(dtype), reduction="none"), whole)
    if not loss.single:
        torch.testing.assert_close(loss(x, lists(target), reduction="none"), whole)
        repeated = torch.cat([lists(target, 2), lists(target, 2)], -1)
        torch.testing.assert_close(loss(x, repeated, reduction="none"), whole)
    one = target.argmax(-1)
    hot = torch.nn.functional.one_hot(one, 6).bool()
    for form in (hot, one.unsqueeze(-1), lists(hot), one.int()):
        torch.testing.assert_close(loss(x, form, reduction="none"), loss(x, one, reduction="none"))


@every(FOUND)
def test_batch_shapes(loss):
    x, target = case(loss, 6)
    rows = loss(x, target, reduction="none")
    block = loss(x.view(2, 3, 6), target.view(2, 3, 6), reduction="none")
    torch.testing.assert_close(block, rows.view(2, 3))
    if loss.rows:
        torch.testing.assert_close(loss(x[0], target[0], reduction="none"), rows[0])


@every([loss for loss in MULTI if not loss.sees_unknown])
def test_unknown_labels_have_no_influence(loss):
    x, target = case(loss)
    target[:, 4] = -1
    target[1, 3] = -1
    value, grad = grad_of(loss, x, target)
    assert (grad[target < 0] == 0).all()
    assert grad.abs().sum() > 0
    for other in (100 * torch.randn_like(x), torch.full_like(x, torch.inf), torch.full_like(x, torch.nan)):
        moved = torch.where(target < 0, other, x)
        for a, b in zip(grad_of(loss, moved, target), (value, grad), strict=True):
            torch.testing.assert_close(a, b)


@every(MULTI)
def test_rows_of_unknown_labels_are_left_out(loss):
    x, target = case(loss)
    known = loss(x, target)
    x = torch.cat([x, torch.randn_like(x[:1])])
    value, grad = grad_of(loss, x, torch.cat([target, torch.full_like(target[:1], -1)]))
    if loss.name != "large_loss":  # it changes a share of all entries
        torch.testing.assert_close(value, known * 4 / 5 if loss.counts_all else known)
    assert (grad[-1] == 0).all()
    value, grad = grad_of(loss, x, torch.full_like(x, -1))
    assert value == 0
    assert (grad == 0).all()


@every([loss for loss in LABELS if LOSS_FACTS[loss.name].mean in ("label", "pair", "observed") and loss.rows])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("score", [torch.nan, torch.inf, -torch.inf])
def test_rows_without_a_label_have_no_gradient_whatever_they_hold(loss, dtype, score):
    x, target = case(loss, dtype=dtype)
    target[3] = 0
    if loss.options.get("observed"):
        target[3] = -1  # there a row without a label says that it has none
    for places in (slice(None), slice(4, 5)):
        moved = x.clone()
        moved[3, places] = score
        for form in (target, lists(target)) if not loss.options.get("observed") else (target,):
            for found, wanted in zip(grad_of(loss, moved, form), grad_of(loss, x, form), strict=True):
                torch.testing.assert_close(found, wanted)
            assert (grad_of(loss, moved, form)[1][3] == 0).all()


@every(FOUND)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("score", [torch.nan, torch.inf, -torch.inf])
def test_rows_of_weight_0_have_no_gradient_whatever_they_hold(loss, dtype, score):
    x, target = case(loss, dtype=dtype)
    weight = torch.tensor([1.0, 2.0, 3.0, 0.0], device=DEVICE)
    for reduction in ("none", "mean", "sum"):
        value, grad = grad_of(loss, x, target, sample_weight=weight, reduction=reduction)
        for places in (slice(None), slice(4, 5)):
            moved = x.clone()
            moved[3, places] = score
            other, found = grad_of(loss, moved, target, sample_weight=weight, reduction=reduction)
            assert (found[3] == 0).all()
            assert other.isfinite().all()
            if loss.name != "large_loss":  # what it changes does not depend on weights
                torch.testing.assert_close(other, value)
                torch.testing.assert_close(found, grad)


@every(FOUND)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtype_and_device(loss, dtype):
    x, target = case(loss, dtype=dtype)
    value, grad = grad_of(loss, x, target)
    assert value.dtype == grad.dtype == dtype
    assert value.device == x.device
    exact, exact_grad = grad_of(loss, x.double(), target)
    eps = torch.finfo(dtype).eps
    assert (value.double() - exact).abs() <= 8 * max(
        eps, 2**-24 if dtype != torch.float64 else eps
    ) * exact.abs().clamp(1)
    torch.testing.assert_close(grad.double(), exact_grad, rtol=8 * eps, atol=8 * eps * exact_grad.abs().max().item())


@every(FOUND)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_finite_at_ten_thousand(loss, dtype):
    for x in (torch.tensor([1e4, -1e4, 1e4, -1e4, 0.0, 1.0]), torch.tensor([-1e4, 1e4, -1e4, 1e4, 0.0, 1.0])):
        x = torch.stack([x, x.roll(1), torch.full_like(x, 1e4), torch.full_like(x, -1e4)]).to(DEVICE, dtype)
        value, grad = grad_of(loss, x, case(loss)[1], reduction="none")
        assert value.isfinite().all()
        assert grad.isfinite().all()
        assert loss(x, case(loss)[1], reduction="sum").isfinite()


@every([loss for loss in FOUND if loss.name != "rml_loss"])  # its ramp is a difference of sums that overflow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("score", [3e38, -3e38])
def test_gradients_are_finite_where_a_score_is_almost_the_largest_number(loss, dtype, score):
    for place in range(3):  # the first class is a label in row 0, the second in row 1
        x = torch.zeros(2, 6, dtype=dtype, device=DEVICE)
        x[:, place] = score
        for row in range(2):
            value, grad = grad_of(loss, x[row : row + 1], case(loss)[1][row : row + 1])
            assert not value.isnan()
            assert grad.isfinite().all()


@every(FOUND)
def test_a_class_ruled_out_has_no_gradient(loss):
    x, target = case(loss)
    x[:, 4:] = -torch.inf  # negatives everywhere but in row 2, where class 4 is a label
    value, grad = grad_of(loss, x[:2], target[:2])
    assert value.isfinite()
    assert grad.isfinite().all()
    assert (grad[:, 4:] == 0).all()


@every(FOUND)
def test_edges_are_defined(loss):
    def check(x: Tensor, target: Tensor) -> None:
        rows, grad = grad_of(loss, x, target, reduction="none")
        assert rows.shape == x.shape[:-1]
        assert rows.isfinite().all()
        assert grad.isfinite().all()
        value, grad = grad_of(loss, x, target)
        assert value.isfinite()
        assert grad.isfinite().all()

    x, target = case(loss)
    check(x[:1], target[:1])  # one row
    check(x[:, :1], torch.zeros(4, dtype=torch.long, device=DEVICE))  # one class
    check(x[:0], target[:0])  # no row
    check(x[:0], target[:0].argmax(-1))
    assert loss(x[:0], target[:0]) == 0
    if loss.labels and not loss.single:
        check(x, torch.zeros_like(target))  # no positive in any row
        check(x, torch.full((4, 3), -1, device=DEVICE))
        check(x, torch.full((4, 0), -1, device=DEVICE))
        check(x, torch.ones_like(target))  # no negative
        target[0], target[1] = 0, 1
        check(x, target)


@pytest.mark.parametrize(
    "loss",
    [loss if loss.name == "binary_loss" else slow(loss) for loss in SOME],
    ids=lambda loss: loss.name,
)
def test_compiles(loss):
    x, target = case(loss, dtype=torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(loss.beside(x), fullgraph=True, backend="aot_eager")
    x.requires_grad_()
    value = compiled(x, target)
    torch.testing.assert_close(value, loss(x, target))
    torch.testing.assert_close(torch.autograd.grad(value, x)[0], grad_of(loss, x, target)[1])


@pytest.mark.slow
@every(SOME)
def test_exports(loss):
    class Call(torch.nn.Module):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return loss(x, target)

    x, target = case(loss, dtype=torch.float32)
    target = target.argmax(-1) if loss.single else lists(target)
    rows = {} if loss.name == "large_loss" else {0: torch.export.Dim("rows")}  # it takes a share of all entries
    program = torch.export.export(Call(), (x, target), dynamic_shapes=(rows, rows))
    for part in (slice(4), slice(2) if rows else slice(4)):
        torch.testing.assert_close(program.module()(x[part], target[part]), loss(x[part], target[part]))


def case_in(loss: Loss, form: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    x, target = case(loss)
    return x, target.argmax(-1) if loss.single else form(target)


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
@every(TRACED)
@pytest.mark.parametrize("form", [lists, lambda target: target], ids=["lists", "multi-hot"])
def test_jit_traces_hold_for_other_values(loss, form):
    traced = torch.jit.trace(lambda x, target: loss(x, target), case_in(loss, form), check_trace=False)
    x, target = case_in(loss, form)
    torch.testing.assert_close(traced(x.flip(0), target.flip(0)), loss(x.flip(0), target.flip(0)))


@every(FOUND)
def test_autocast(loss):
    x, target = case(loss, dtype=torch.float32)
    weight = torch.randn(6, 6, device=DEVICE, requires_grad=True)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        value = loss(x @ weight, target)
    assert value.isfinite()
    assert torch.autograd.grad(value, weight)[0].isfinite().all()
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        torch.testing.assert_close(loss(x, target), loss(x.clone(), target))
        inside = loss(x, target)
    torch.testing.assert_close(inside, loss(x, target))  # float32 stays float32


@every([loss for loss in FOUND if loss.rows])
def test_vmap(loss):
    x, target = case(loss)
    target = target.argmax(-1) if loss.single else lists(target)
    rows = loss(x, target, reduction="none")
    torch.testing.assert_close(torch.func.vmap(lambda x, t: loss(x, t, reduction="none"))(x, target), rows)
    grads = torch.func.vmap(torch.func.grad(lambda x, t: loss(x, t, reduction="sum")))(x, target)
    torch.testing.assert_close(grads, grad_of(loss, x, target, reduction="sum")[1])


@every(FOUND)
def test_module_is_the_function(loss):
    x, target = case(loss)
    inputs = [x, target][: 1 + loss.labels] + [a(x) for a in loss.args if callable(a)]
    for reduction in ("none", "mean", "sum"):
        module = loss.build(reduction=reduction)
        torch.testing.assert_close(module(*inputs), loss(x, target, reduction=reduction))
    assert "reduction='sum'" in repr(module)
    function = inspect.signature(loss.function).parameters
    for name, parameter in inspect.signature(type(module)).parameters.items():
        assert name in function
        assert parameter.default == function[name].default
        assert parameter.annotation == function[name].annotation, name


# Weights of rows and of classes, soft labels


@every([loss for loss in FOUND if loss.name != "large_loss"])  # it changes a share of all entries
def test_a_row_of_weight_two_counts_as_two_rows(loss):
    x, target = case(loss)
    twice = torch.tensor([0, 1, 1, 2, 2, 2])
    weight = torch.tensor([1.0, 2.0, 3.0, 0.0], device=DEVICE)
    for reduction in ("mean", "sum"):
        value, grad = grad_of(loss, x, target, sample_weight=weight, reduction=reduction)
        many, many_grad = grad_of(loss, x[twice], target[twice], reduction=reduction)
        if (
            loss.name != "two_way_loss" or loss.rows or reduction == "mean"
        ):  # where rows share a term, it is added to each
            torch.testing.assert_close(value, many)
            torch.testing.assert_close(grad, torch.zeros_like(grad).index_add(0, twice.to(DEVICE), many_grad))
    rows = loss(x, target, reduction="none", sample_weight=weight)
    torch.testing.assert_close(rows.sum(), loss(x, target, reduction="sum", sample_weight=weight))
    assert loss(x, target, sample_weight=torch.zeros(4, device=DEVICE)) == 0
    module = loss.build()
    inputs = [x, target][: 1 + loss.labels] + [a(x) for a in loss.args if callable(a)]
    torch.testing.assert_close(module(*inputs, sample_weight=weight), loss(x, target, sample_weight=weight))


@every([loss for loss in FOUND if loss.name != "large_loss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_of_weight_0_may_hold_nan(loss, dtype):
    x, target = case(loss, dtype=dtype)
    target = target if target.dtype == torch.int64 else target.to(dtype)
    bad = x.detach().index_fill(0, torch.tensor([0], device=x.device), torch.nan)
    weight = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=dtype, device=DEVICE)
    for reduction in ("none", "mean", "sum"):
        options = {"sample_weight": weight, "reduction": reduction}
        for found, expected in zip(
            grad_of(loss, bad, target, **options), grad_of(loss, x, target, **options), strict=True
        ):
            torch.testing.assert_close(found, expected)


def test_features_of_a_row_of_weight_0_may_hold_nan():
    generator = torch.Generator().manual_seed(0)
    features, points = torch.randn(3, 4, generator=generator), torch.randn(5, 4, generator=generator).requires_grad_()
    bad = features.index_fill(0, torch.tensor([0]), torch.nan).requires_grad_()
    weight, target = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([1, 2, 3])

    def reciprocal(features, sample_weight=None):
        return ll.loss.reciprocal_point_loss(
            features, points[:, None], torch.ones(5), target[-len(features) :], sample_weight=sample_weight
        )

    def linear(features, sample_weight=None):
        return ll.linear_lml_loss(features, points, target[-len(features) :], 2, sample_weight=sample_weight)

    for loss in (reciprocal, linear):
        found, expected = loss(bad, weight), loss(features[1:], weight[1:])
        torch.testing.assert_close(found, expected)
        by_features, by_points = torch.autograd.grad(found, (bad, points))
        torch.testing.assert_close(by_points, torch.autograd.grad(expected, points)[0])
        assert by_features[0].eq(0).all()
    loss = ll.loss.spherical_loss(bad, torch.zeros(3, 16), torch.ones(3, 4), sample_weight=weight)
    assert torch.autograd.grad(loss, bad)[0][0].eq(0).all()


def test_rows_left_out_do_not_count_in_a_weighted_mean():
    x, target = torch.randn(3, 4), torch.tensor([[0, 1], [-1, -1], [2, -1]])
    weight = torch.tensor([1.0, 5.0, 3.0])
    rows = ll.lml_loss(x, target, 2, reduction="none")
    torch.testing.assert_close(ll.lml_loss(x, target, 2, sample_weight=weight), (rows[0] + 3 * rows[2]) / 4)


def test_sample_weights_by_the_kernel_that_reduces():
    """With a gradient to come, a kernel reduces the loss itself."""
    x, target, weight = torch.randn(5, 9), torch.randint(9, (5, 2)), torch.rand(5)
    for observed in (0.0, 0.4):
        for reduction in ("mean", "sum"):
            found = []
            for impl in ("auto", "torch"):
                leaf = x.clone().requires_grad_()
                options = {"observed": observed, "reduction": reduction, "sample_weight": weight}
                loss = ll.lml_loss(leaf, target, 2, impl=impl, **options)
                found.append((loss.detach(), torch.autograd.grad(loss, leaf)[0]))
            torch.testing.assert_close(found[0], found[1])


SEPARABLE = [loss for loss in FOUND if LOSS_FACTS[loss.name].pos_weight and not loss.sees_unknown]


@every(
    [
        loss._replace(options={**loss.options, "epoch": 0} if loss.name == "large_loss" else loss.options)
        for loss in SEPARABLE
    ]
)
def test_weights_of_classes_and_soft_labels_by_hand(loss):
    """These losses are sums of one term per class: each class alone gives its terms."""
    x, target = case(loss)
    weight, pos_weight = torch.rand(6, dtype=x.dtype, device=DEVICE), torch.rand(6, dtype=x.dtype, device=DEVICE) + 1
    share = torch.rand(4, 6, dtype=x.dtype, device=DEVICE)
    share[:, 0], share[:, 1] = 1, 0

    def alone(value: float) -> Tensor:
        labels = torch.full((4, 1), value, dtype=x.dtype, device=DEVICE)
        return torch.stack([loss(x[:, j : j + 1], labels, reduction="none") for j in range(6)], -1)

    smooth = loss.options.get("label_smoothing", 0.0) if loss.name == "binary_loss" else 0.0
    if not smooth:  # torch's smoothing mixes the two terms before they are weighed
        terms = share * pos_weight * alone(1) + (1 - share) * alone(0)
        options = {"weight": weight, "pos_weight": pos_weight, "reduction": "none"}
        torch.testing.assert_close(loss(x, share, **options), (weight * terms).sum(-1))
        torch.testing.assert_close(loss.build(**options)(x, share), loss(x, share, **options))
        hard = torch.where(target > 0, pos_weight * alone(1), alone(0))
        torch.testing.assert_close(loss(x, lists(target), **options), (weight * hard).sum(-1))
    torch.testing.assert_close(loss(x, share, reduction="none"), (share * alone(1) + (1 - share) * alone(0)).sum(-1))


@every([loss for loss in FOUND if LOSS_FACTS[loss.name].soft and loss.labels and loss.rows and loss not in SEPARABLE])
def test_soft_labels_are_between_hard_ones(loss):
    """Weighing is continuous: a label of almost 1 is a label, one of almost 0 none."""
    x, target = case(loss)
    for t in (0.0, 1.0):
        near, hard = target.double(), target.double()
        near[0, 1], hard[0, 1] = abs(t - 1e-9), t
        if loss.name not in ("truncated_entropy_loss", "warp_loss", "rml_loss") or t == 1:  # there it is no rival
            torch.testing.assert_close(loss(x, near), loss(x, hard), atol=1e-6, rtol=0)
    half = target.double()
    half[0, 1] = 0.5
    assert loss(x, half, reduction="none")[0] != loss(x, half.ceil(), reduction="none")[0]


def test_torchs_weights():
    x, target = torch.randn(4, 6, dtype=torch.float64), torch.rand(4, 6, dtype=torch.float64)
    weight, pos_weight = torch.rand(6).double(), torch.rand(6).double() + 1
    bce = torch.nn.BCEWithLogitsLoss(weight=weight, pos_weight=pos_weight, reduction="sum")
    ours = ll.BinaryLoss(weight=weight, pos_weight=pos_weight, reduction="sum")
    torch.testing.assert_close(ours(x, target), bce(x, target))
    smooth = ll.binary_loss(x, target, label_smoothing=0.2, weight=weight, pos_weight=pos_weight, reduction="sum")
    torch.testing.assert_close(smooth, bce(x, 0.8 * target + 0.1))
    share = target / target.sum(-1, keepdim=True)
    for smoothing in (0.0, 0.3):
        expected = torch.nn.functional.cross_entropy(x, share, weight=weight, label_smoothing=smoothing)
        torch.testing.assert_close(
            ll.multihot_softmax_loss(x, target, weight=weight, label_smoothing=smoothing), expected
        )
    y = torch.randint(6, (4,))
    expected = torch.nn.functional.cross_entropy(x, y, weight=weight, reduction="sum")
    torch.testing.assert_close(ll.multihot_softmax_loss(x, y, weight=weight, reduction="sum"), expected)


def test_weights_of_labels_and_what_the_others_add():
    """The terms of a label are weighed; what the batch or the negatives add is not."""
    x, target = torch.randn(4, 6, dtype=torch.float64), torch.tensor([[0, 2], [3, -1], [5, 0], [0, 4]])
    hot = torch.zeros(4, 7).scatter(1, target % 7, 1)[:, :6]
    weight, one = torch.rand(6).double(), torch.eye(6).double()
    for function, rest in (
        (lambda w, t: ll.warp_loss(x, t, weight=w, reduction="none"), 0.0),
        (
            lambda w, t: ll.expected_positive_loss(x, t, 2, weight=w, reduction="none"),
            ll.expected_positive_loss(x, torch.zeros(4, 6), 2, reduction="none"),
        ),
    ):
        expected = rest + sum(weight[j] * (function(one[j], target) - rest) for j in range(6))
        for form in (target, hot, hot.bool()):
            torch.testing.assert_close(function(weight, form), expected)
        torch.testing.assert_close(function(weight, hot / 2) - rest, (expected - rest) / 2)
        torch.testing.assert_close(function(torch.ones(6), target), function(None, target))


@pytest.mark.parametrize("name", ["lml_loss", "truncated_entropy_loss", "smooth_topk_svm_loss"])
def test_weights_of_labels(name):
    """A sum over labels, or of one label: a weight of 0 for all classes but one leaves the terms of that one."""
    x, k = torch.randn(4, 6, dtype=torch.float64), 2
    target = (
        torch.tensor([[0], [3], [5], [0]])
        if name == "smooth_topk_svm_loss"
        else torch.tensor([[0, 2], [3, 1], [5, 0], [0, 4]])
    )
    weight, function = torch.rand(6).double(), getattr(ll, name)
    one = torch.eye(6).double()
    parts = [weight[j] * function(x, target, k, weight=one[j], reduction="none") for j in range(6)]
    torch.testing.assert_close(function(x, target, k, weight=weight, reduction="none"), sum(parts))
    torch.testing.assert_close(sum(parts) / weight.mean(), sum(p / weight.mean() for p in parts))
    plain = function(x, target, k, reduction="none")
    torch.testing.assert_close(function(x, target, k, weight=torch.ones(6), reduction="none"), plain)
    if name == "lml_loss":
        y = ll.lml(x, k)
        hot = torch.zeros(4, 6).scatter(1, target, 1).double()
        fit, silent = -hot * y.log(), -(1 - hot) * (1 - 0.3 * y).log()
        options = {"observed": 0.3, "weight": weight, "pos_weight": 2.0, "reduction": "none"}
        for form in (target, hot, hot.bool()):
            torch.testing.assert_close(ll.lml_loss(x, form, k, **options), (weight * (2 * fit + silent)).sum(-1))


def test_soft_two_way_by_hand():
    x, t = torch.randn(5, 4, dtype=torch.float64), torch.rand(5, 4, dtype=torch.float64)
    w = torch.rand(5, dtype=torch.float64)
    sample = torch.log1p(((1 - t) * x.exp()).sum(-1) * (t * (-x / 4).exp()).sum(-1) ** 4)
    torch.testing.assert_close(ll.two_way_loss(x, t, per="sample", reduction="none"), sample)
    up, down = w[:, None] * t, w[:, None] * (1 - t)
    by_class = torch.log1p((down * x.exp()).sum(0) * (up * (-x / 4).exp()).sum(0) ** 4)
    torch.testing.assert_close(ll.two_way_loss(x, t, per="class", sample_weight=w, reduction="none"), by_class)
    both = (w * sample).sum() / w.sum() + by_class.mean()
    torch.testing.assert_close(ll.two_way_loss(x, t, sample_weight=w), both)


def test_soft_quasibinary_by_hand():
    z, t, w = (
        torch.randn(3, 4, dtype=torch.float64),
        torch.rand(3, 4, dtype=torch.float64),
        torch.tensor([1.0, 0.5, 2.0]),
    )
    c = (w[:, None] * z.exp()).sum() / (w[:, None] * t).sum()
    q = z.exp() / c
    rows = (q.log().clamp(min=0) - t * q.log()).sum(-1)
    torch.testing.assert_close(ll.quasibinary_loss(z, t, sample_weight=w), (w * rows).sum() / w.sum())


def test_messages_of_weights():
    x, target = torch.randn(4, 6), torch.tensor([0, 1, 2, 3])
    with pytest.raises(
        ValueError, match=r"binary_loss: `weight` must broadcast to the shape \(4, 6\), got shape \(5,\)\. Give one"
    ):
        ll.binary_loss(x, target, weight=torch.ones(5))
    with pytest.raises(
        ValueError, match=r"hill_loss: `sample_weight` must broadcast to the shape \(4,\), got shape \(6,\)\. Give"
    ):
        ll.hill_loss(x, target, sample_weight=torch.ones(6))
    with pytest.raises(TypeError, match=r"splc_loss: `pos_weight` must be a tensor of real numbers, got list"):
        ll.splc_loss(x, target, pos_weight=[1.0] * 6)
    with pytest.raises(TypeError, match=r"lml_loss: `weight` must be a tensor of real numbers, got torch\.bool"):
        ll.lml_loss(x, target, 2, weight=torch.ones(6, dtype=torch.bool))
    with pytest.raises(
        ValueError, match=r"lml_loss: `impl` must be 'auto' or 'torch' with weights of classes, got 'native'"
    ):
        ll.lml_loss(x, target, 2, weight=torch.ones(6), impl="native")


# The table of facts


def test_the_table_has_every_loss_with_its_parameters():
    there = {name for name in ll.loss.__all__ if name.endswith("_loss")}
    assert there == set(LOSS_FACTS)
    for name, facts in LOSS_FACTS.items():
        function = loss_function(name)
        assert function is getattr(ll, name)
        given = list(inspect.signature(function).parameters)
        assert tuple(given[: len(facts.inputs)]) == facts.inputs, name
        assert ("k" in given) == (facts.k != "none"), name
        own = set(given) - set(facts.inputs)  # a layer's weight is no weight of classes
        assert (facts.weight, facts.pos_weight) == ("weight" in own, "pos_weight" in own), name
        assert facts.sample_weight == ("sample_weight" in given), name
        assert facts.shard <= ("shard" in given), name
        assert ("reduction" in given) or facts.apart
    for loss in LOSSES:
        facts = LOSS_FACTS[loss.name]
        assert loss.labels == facts.lists
        assert facts.by_row == loss.rows or loss.options.get("per") == "sample"
        assert (facts.mean == "all") == loss.counts_all or not loss.labels


@every(LABELS)
def test_the_mean_is_over_the_rows_of_the_table(loss):
    """Rows with a label and another class, with none, with nothing but labels, and with nothing known."""
    x = torch.linspace(-1.0, 1.5, 20, device=DEVICE).view(4, 5).sin()
    target = torch.tensor([[1.0, 1, 0, 0, 0], [0] * 5, [1] * 5, [-1] * 5], device=DEVICE)
    kind = LOSS_FACTS[loss.name].mean
    if kind == "observed":
        kind = "known" if loss.options.get("observed") else "label"
    rows = {"pair": 1, "label": 2, "known": 3, "all": 4}[kind]
    torch.testing.assert_close(loss(x, target, reduction="sum"), rows * loss(x, target, reduction="mean"))


@pytest.mark.parametrize("name", [name for name, facts in LOSS_FACTS.items() if facts.inputs == ("logits",)])
def test_the_mean_without_a_target_is_over_the_rows_of_the_table(name):
    loss = loss_function(name)
    x = torch.tensor([[1.0, -1.0], [2.0, -torch.inf], [-torch.inf, -torch.inf]], device=DEVICE)
    rows = {"open": 2, "all": 3}[LOSS_FACTS[name].mean]
    torch.testing.assert_close(loss(x, reduction="sum"), rows * loss(x, reduction="mean"))


def test_the_trainers_table_agrees():
    from lastlayer.train.losses import LOSSES as TRAINED

    for name, loss in TRAINED.items():
        if loss.exact == "only":  # the solver of linear models has it, and no function
            continue
        facts = LOSS_FACTS[f"{name}_loss"]
        assert loss.module == facts.module
        assert loss.k == facts.k or name == "lml_fenchel_young"  # its default is each row's own number of labels


@pytest.mark.parametrize("name", [name for name, facts in LOSS_FACTS.items() if not facts.shard])
def test_losses_that_need_a_whole_row_refuse_a_shard(name):
    function = getattr(ll, name)
    if "shard" not in inspect.signature(function).parameters:
        return
    extra = {"smooth_topk_svm_loss": (2,), "metric_surrogate_loss": ("accuracy",)}.get(name, ())
    with pytest.raises(
        ValueError, match=rf"{name}: `shard` must be None, got ClassShard.*all classes of a row\. Gather"
    ):
        function(torch.randn(2, 4), torch.tensor([0, 1]), *extra, shard=ll.ClassShard(0, 4))


def test_modules_have_signatures():
    for name in {loss.module for loss in LOSSES} | {"SphericalLoss", "MetricSurrogateLoss"}:
        forward = inspect.signature(getattr(ll, name).forward)
        kinds = {p.kind for p in forward.parameters.values()}
        assert not kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}, name
        assert forward.return_annotation == "Tensor"
        assert all(p.annotation != inspect.Parameter.empty for n, p in forward.parameters.items() if n != "self")


def test_the_documentation_shows_the_table():
    page = (Path(__file__).parents[2] / "docs" / "loss.md").read_text("utf-8")
    assert markdown() in page
    assert exceptions() in page
