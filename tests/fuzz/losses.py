"""The losses: how each is called, and what is expected of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import lastlayer as ll
import lastlayer.loss as lo
from fuzz import reference
from fuzz.checks import DEVICE, SLACK, Accuracy, Expected, Found, Op, device_of, graded
from fuzz.rows import Case


def lists(case: Case) -> Tensor:
    """Return the hard labels of the target as index lists."""
    assert case.target is not None
    hot = case.target > 0
    width = int(hot.sum(-1).max()) + 1 if len(hot) else 1
    width += width == hot.shape[-1]
    found = torch.full((len(hot), width), -1)
    for i, row in enumerate(hot):
        place = row.nonzero()[:, 0]
        found[i, : len(place)] = place
    return found


def run_lml_loss(case: Case, impl: str) -> Found:
    assert case.target is not None
    device = device_of(impl)
    target = case.target if case.layout == "plain" else lists(case)
    k: Any = float(case.k[0]) if case.one_k else case.k.to(device)
    x = case.logits.detach().to(device).requires_grad_()
    mask = None if case.mask is None else case.mask.to(device)
    options = {"observed": case.observed, "temperature": case.temperature, "mask": mask, "impl": impl}
    loss = ll.lml_loss(x, target.to(device), k, reduction="none", **options)
    (grad,) = torch.autograd.grad(loss.sum(), x)
    found = {"value": loss, "gradient": grad}
    if len(loss) and bool(loss.isfinite().all()):
        total = ll.lml_loss(x, target.to(device), k, reduction="sum", **options)
        (found["gradient of the sum"],) = torch.autograd.grad(total, x)
    else:
        found["gradient of the sum"] = grad
    return found


def expect_lml_loss(case: Case, impl: str) -> Expected:
    assert case.target is not None
    a, k, rho = Accuracy.of(case), case.sizes(), case.observed
    share = case.target.numpy().astype(case.wide)
    if case.layout != "plain":
        share = (share > 0).astype(case.wide)
    solution = reference.lml(case.scores(impl), k)
    z = solution.points
    known, share = share >= 0, np.maximum(share, 0)
    with np.errstate(all="ignore"):
        log_y, log_miss = reference.log_sigmoid(z), reference.log_sigmoid(-z)
        y, miss = np.exp(log_y), np.exp(log_miss)
        # log(1 - rho y), from 1 - rho y = (1 - y) + (1 - rho) y
        unseen = (
            np.logaddexp(
                log_miss, np.log(case.wide(1 - (np.float32(rho) if case.work == torch.float32 else rho))) + log_y
            )
            if rho < 1
            else log_miss
        )
        slope_unseen = rho * y * np.exp(log_miss - unseen)
        rest = np.where(known, 1 - share, 0)
        terms = np.where(share > 0, -share * log_y, 0)
        d = np.where(share > 0, -share * miss, 0)
        if rho > 0:
            terms = terms + np.where(rest > 0, -rest * unseen, 0)
            d = d + np.where(rest > 0, rest * slope_unseen, 0)
        loss = terms.sum(-1)
        says = (share > 0).any(-1) | ((rho > 0) & known.any(-1) & (case.layout == "plain"))
        says |= (rho > 0) & (case.layout != "plain")
        loss = np.where(says, np.where(np.isnan(z).any(-1), np.nan, loss), 0)
        off = SLACK * a.eps * (1 + np.where(np.isfinite(z), np.abs(z), 0))
        size = np.where(np.isfinite(terms), np.abs(terms), 0)
        # Where rho is 1 to rounding the loss of a sure class depends on 1 - rho, which is known to eps.
        tolerance = (np.abs(d) * off + size * (8 * a.eps + a.out) + 4 * a.eps * y).sum(-1) + 4 * a.eps
        live = np.isfinite(z) & solution.inside[:, None]
        d = np.where(live, d, 0)
        pull = d.sum(-1, keepdims=True)
        p, _ = reference.weights(solution)
        pull_off = (np.abs(d) * (off + 16 * a.eps)).sum(-1, keepdims=True) + 4 * a.eps * (rho > 0)
        p_off = (p * off).sum(-1, keepdims=True)
        wrong = np.abs(d) * (off + 16 * a.eps + a.out) + p * (
            np.abs(pull) * (2 * off + p_off + 16 * a.eps + a.out) + pull_off
        )
        wrong = wrong + 4 * a.eps * y * miss
    value, room = graded(case, solution, d - p * pull, wrong, off, p)
    room = np.where(np.isfinite(loss)[:, None], room, np.inf)  # an infinite loss, or nan, says that something is wrong
    value, room = (np.where(says[:, None], v, 0) for v in (value, room))
    return {"value": (loss, tolerance), "gradient": (value, room), "gradient of the sum": (value, room)}


def run_fenchel_young(case: Case, impl: str) -> Found:
    del impl
    assert case.target is not None
    x = case.logits.detach().to(DEVICE).requires_grad_()
    mask = None if case.mask is None else case.mask.to(DEVICE)
    loss = ll.lml_fenchel_young_loss(x, case.target.to(DEVICE), mask=mask, reduction="none")
    (grad,) = torch.autograd.grad(loss.sum(), x)
    return {"value": loss, "gradient": grad}


def expect_fenchel_young(case: Case, impl: str) -> Expected:
    del impl
    assert case.target is not None
    a = Accuracy.of(case)
    share = case.target.numpy().astype(case.wide)
    x = case.logits.to(case.work).numpy().astype(case.wide)
    known = share >= 0
    if case.mask is not None:
        known &= case.mask.numpy()
    count = case.target.clamp(min=0).sum(-1).numpy().astype(case.wide)  # as the library rounds it
    share = np.maximum(share, 0)
    solution = reference.lml(np.where(known, x, -np.inf), count)
    z = solution.points
    with np.errstate(all="ignore"):
        y, miss = np.exp(reference.log_sigmoid(z)), np.exp(reference.log_sigmoid(-z))
        terms = np.where(share > 0, -share * reference.log_sigmoid(z), 0)
        terms = terms + np.where(share < 1, -(1 - share) * reference.log_sigmoid(-z), 0)
        loss = terms.sum(-1)
        off = SLACK * a.eps * (1 + np.where(np.isfinite(z), np.abs(z), 0))
        size = np.where(np.isfinite(terms), np.abs(terms), 0)
        tolerance = (np.abs(y - share) * off + size * (8 * a.eps + a.out)).sum(-1) + 8 * a.eps
        flat = np.where(np.isfinite(x) & known, x, 0)
        end = (flat * np.where(solution.t[:, None] > 0, 1 - share, -share)).sum(-1)
        sure = ~solution.inside & ~np.isnan(solution.t)
        lost = ((x == -np.inf) | ~known) & (share > 0)  # a label that is ruled out
        end = np.where(lost.any(-1), np.inf, end)
        loss = np.where(sure, end, loss)
        room = 64 * a.eps * np.abs(flat).sum(-1) + a.out * np.where(np.isfinite(end), np.abs(end), 0)
        tolerance = np.where(sure, room, tolerance)
        live = np.isfinite(z) & solution.inside[:, None]
        gradient = np.where(live, y - share, 0)
        wrong = np.where(live, y * miss * off + (y + share) * (8 * a.eps + a.out), 0) + a.flushed(count)
        # at a vertex: 1 or 0, less the target
        gradient = np.where(sure[:, None] & np.isfinite(x) & known, (solution.t[:, None] > 0) - share, gradient)
        # The gradient goes through nu too: what rounding leaves of sum y - k is shared out by the weights.
        p, _ = reference.weights(solution)
        wrong = wrong + p * 16 * a.eps * ((y + share) * known).sum(-1, keepdims=True)
    bad = np.isnan(solution.t)
    free = (bad | np.isinf(loss))[:, None]  # the loss says that something is wrong; the gradient may be anything
    return {"value": (np.where(bad, np.nan, loss), tolerance), "gradient": (gradient, np.where(free, np.inf, wrong))}


class Loss(NamedTuple):
    """A loss of one number per row, or of one for the batch; the reference is of the same shape."""

    call: Callable[[Tensor, Tensor], Tensor]
    reference: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None
    kinks: bool = False  # at a kink rounding decides on the gradient, which must be finite then and nothing else


def held(loss: Loss) -> tuple[Callable[..., Found], Callable[..., Expected]]:
    """A loss and its gradient are held to float64, its value to the reference where there is one; none may be nan."""

    def run(case: Case, impl: str, dtype: torch.dtype | None = None) -> Found:
        del impl
        assert case.target is not None
        x = case.logits.detach().to(DEVICE, dtype or case.logits.dtype).requires_grad_()
        value = loss.call(x, case.target.to(DEVICE, x.dtype))
        (grad,) = torch.autograd.grad(value.sum(), x)
        return {"value": value.expand(len(x)), "gradient": grad}

    def expect(case: Case, impl: str) -> Expected:
        assert case.target is not None
        a, x, n = Accuracy.of(case), case.logits.double().numpy(), case.logits.shape[-1]
        found = {name: value.detach().cpu().numpy() for name, value in run(case, impl, torch.float64).items()}
        value, size = found["value"], np.abs(np.nan_to_num(found["gradient"], posinf=0, neginf=0)).max(initial=0)
        if loss.reference is not None:
            share = case.target.numpy().astype(np.longdouble)
            value = np.broadcast_to(loss.reference(x.astype(np.longdouble), share), value.shape)
        with np.errstate(all="ignore"):
            reach = np.abs(np.where(np.isfinite(x), x, 0)).max(-1, initial=0)
            reach = np.full(len(x), reach.sum()) if loss.call(torch.zeros(2, 1), torch.ones(2, 1)).ndim == 0 else reach
            room = 64 * a.eps * (np.abs(np.nan_to_num(value, posinf=0, neginf=0)) + n * (1 + reach))
        steep = np.broadcast_to(64 * a.eps * (1 + n + reach[:, None]) * (size + 1), x.shape)
        steep = np.where(loss.kinks, np.finfo(float).max, steep)
        return {
            "value": (np.nan_to_num(value, nan=0.0, posinf=np.inf, neginf=-np.inf), room),
            "gradient": (np.nan_to_num(found["gradient"], nan=0.0), steep),
        }

    return run, expect


def few(x: Tensor) -> int:
    return min(2, x.shape[-1])


def teacher(x: Tensor) -> Tensor:
    """Return logits without ties: which of equal ones is among the best would show in the gradient."""
    wave = (3 * torch.cos(1.7 * torch.arange(x.shape[-1], device=x.device))).to(x.dtype)
    return torch.where(x == -torch.inf, x, wave).detach()


LOSSES = {
    "truncated_entropy_loss": Loss(  # which of two equal rivals is spared is a matter of chance
        lambda x, t: lo.truncated_entropy_loss(x, t, few(x), reduction="none"), kinks=True
    ),
    "smooth_topk_svm_loss": Loss(lambda x, t: lo.smooth_topk_svm_loss(x, t.argmax(-1), few(x), reduction="none")),
    "topk_distillation_loss": Loss(
        lambda x, t: lo.topk_distillation_loss(x, teacher(x), few(x), reduction="none"),
    ),
    "two_way_loss": Loss(lambda x, t: lo.two_way_loss(x, t, per="sample", reduction="none"), reference.two_way),
    "two_way_loss of classes": Loss(lambda x, t: lo.two_way_loss(x, t, per="class")),
    "asymmetric_loss": Loss(lambda x, t: lo.asymmetric_loss(x, t, reduction="none")),
    "multihot_softmax_loss": Loss(
        lambda x, t: lo.multihot_softmax_loss(x, t, label_smoothing=0.125, reduction="none"), reference.multihot_softmax
    ),
    "binary_loss": Loss(
        lambda x, t: lo.binary_loss(x, t, label_smoothing=0.125, reduction="none"),
        lambda x, t: reference.binary(x, t, 0.125),
    ),
    "warp_loss": Loss(lambda x, t: lo.warp_loss(x, t, reduction="none"), kinks=True),
    "rml_loss": Loss(lambda x, t: lo.rml_loss(x, t, reduction="none"), kinks=True),
    "quasibinary_loss": Loss(lambda x, t: lo.quasibinary_loss(x, t, reduction="sum"), reference.quasibinary),
    "assume_negative_loss": Loss(
        lambda x, t: lo.assume_negative_loss(x, t, reduction="none"), lambda x, t: reference.binary(x, t, 0)
    ),
    "expected_positive_loss": Loss(lambda x, t: lo.expected_positive_loss(x, t, 1)),
    "role_loss": Loss(lambda x, t: lo.role_loss(x, t, torch.zeros_like(x), 1)),
    "entropy_max_loss": Loss(lambda x, t: lo.entropy_max_loss(x, t, reduction="none")),
    "hill_loss": Loss(lambda x, t: lo.hill_loss(x, t, reduction="none")),
    "splc_loss": Loss(lambda x, t: lo.splc_loss(x, t, reduction="none")),
    "large_loss": Loss(lambda x, t: lo.large_loss(x, t)),
    "outlier_uniform_loss": Loss(
        lambda x, t: lo.outlier_uniform_loss(x, reduction="none"), lambda x, t: reference.outlier_uniform(x)
    ),
    "outlier_max_confidence_loss": Loss(
        lambda x, t: lo.outlier_max_confidence_loss(x, reduction="none"), lambda x, t: reference.max_confidence(x)
    ),
    "metric_surrogate_loss": Loss(
        lambda x, t: lo.metric_surrogate_loss(
            x, t, "average_precision", generator=torch.Generator(x.device).manual_seed(0)
        )
    ),
}


def _held_to(case: Case) -> Case:
    """Leave rows without +inf and nan, whose meaning differs from loss to loss, and without a lost label."""
    assert case.target is not None
    lost = (case.logits == -torch.inf) & (case.target > 0)
    return case.plain(((case.logits < torch.inf) & ~lost).all(-1))


def _some(case: Case) -> bool:
    return case.logits.numel() > 0


def ops() -> Iterator[Op]:
    """All losses."""
    yield Op("lml_loss", run_lml_loss, expect_lml_loss, ("torch", "native", "triton"), fits=_classes)
    yield Op("lml_fenchel_young_loss", run_fenchel_young, expect_fenchel_young, adapt=_without_infinity)
    for name, loss in LOSSES.items():
        yield Op(name, *held(loss), fits=_some, largest=1e6, adapt=_held_to)


def _classes(case: Case) -> bool:
    return case.logits.shape[-1] > 0


def _without_infinity(case: Case) -> Case:
    return case.rows((case.logits < torch.inf).all(-1))
