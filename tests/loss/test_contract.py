"""What every loss promises: one list of losses, one test a promise.

A loss that is added to the package joins by one line in `LOSSES`; `test_every_loss_is_in_the_list` sees to it.
"""

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from tools import DEVICE
from torch import Tensor

import lastlayer as ll


class Loss(NamedTuple):
    name: str
    module: str
    args: tuple[Any, ...] = ()  # after the target
    options: Mapping[str, Any] = MappingProxyType({})
    labels: bool = True  # takes a target of labels
    single: bool = False  # takes one label a row
    rows: bool = True  # a row's loss does not depend on the others
    sees_unknown: bool = False  # unknown classes stay in the projection
    counts_all: bool = False  # the mean is over all rows, also those that say nothing

    @property
    def function(self) -> Callable[..., Tensor]:
        return getattr(ll, self.name)

    def __call__(self, x: Tensor, target: Tensor, **options: Any) -> Tensor:
        extra = [a(x) if callable(a) else a for a in self.args]
        return self.function(*[x, target][: 1 + self.labels], *extra, **self.options, **options)

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


@every(TRACED)
def test_compiles(loss):
    x, target = case(loss, dtype=torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, t: loss(x, t), fullgraph=True, backend="aot_eager")
    x.requires_grad_()
    value = compiled(x, target)
    torch.testing.assert_close(value, loss(x, target))
    torch.testing.assert_close(torch.autograd.grad(value, x)[0], grad_of(loss, x, target)[1])


@pytest.mark.slow
@every(TRACED)
def test_exports(loss):
    class Call(torch.nn.Module):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return loss(x, target)

    x, target = case(loss, dtype=torch.float32)
    target = target.argmax(-1) if loss.single else lists(target)
    program = torch.export.export(Call(), (x, target))
    torch.testing.assert_close(program.module()(x, target), loss(x, target))


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
