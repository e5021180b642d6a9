"""The projections: how each is called, and what is expected of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import lastlayer as ll
from fuzz import reference
from fuzz.checks import DEVICE, SLACK, Accuracy, Expected, Found, Op, device_of, graded, sums, upstream
from fuzz.rows import Case


def presented(case: Case, device: torch.device) -> tuple[Tensor, dict[str, Any], Callable[[Tensor], Tensor]]:
    """Return the logits in the layout of the case, options, and the way back to rows."""
    x, mask = case.logits.to(device), None if case.mask is None else case.mask.to(device)
    k: Any = float(case.k[0]) if case.one_k else case.k.to(device)
    options: dict[str, Any] = {"k": k, "temperature": case.temperature}
    back: Callable[[Tensor], Tensor] = lambda out: out  # noqa: E731
    rows, n = x.shape
    if case.layout == "transposed":
        x, mask, back = x.T.contiguous(), None if mask is None else mask.T, lambda out: out.T
        options["dim"] = 0
    elif case.layout == "strided":
        x = torch.stack([x, x + 1], -1)[..., 0]
    elif case.layout == "flipped":
        x = x.flip(0).contiguous()
        mask, options["k"] = None if mask is None else mask.flip(0), k.flip(0) if isinstance(k, Tensor) else k
        back = lambda out: out.flip(0)  # noqa: E731
    elif case.layout == "batched" and rows % 2 == 0:
        x, mask = x.view(2, rows // 2, n), None if mask is None else mask.view(2, rows // 2, n)
        options["k"] = k.view(2, rows // 2) if isinstance(k, Tensor) else k
        back = lambda out: out.reshape(rows, n)  # noqa: E731
    options["mask"] = mask
    return x, options, back


def projection(function: Callable[..., Tensor], gradients: bool = True) -> Callable[[Case, str], Found]:
    def run(case: Case, impl: str) -> Found:
        x, options, back = presented(case, device_of(impl))
        x = x.detach().requires_grad_()
        out = function(x, impl=impl, **options)
        value = back(out)
        found = {"value": value, "sum": value.double().sum(-1)}
        if gradients:
            value.backward(upstream(case).to(value))
            assert x.grad is not None
            found["gradient"] = back(x.grad)
        return found

    return run


def run_threshold(case: Case, impl: str) -> Found:
    x, options, back = presented(case, device_of(impl))
    x = x.detach().requires_grad_()
    nu = ll.lml_threshold(x, impl=impl, **options)
    nu.sum().backward()
    assert x.grad is not None
    return {"value": nu.flip(0) if case.layout == "flipped" else nu.reshape(-1), "gradient": back(x.grad)}


def expect_lml(case: Case, impl: str) -> Expected:
    a, k = Accuracy.of(case), case.sizes()
    solution = reference.lml(case.scores(impl), k)
    z = solution.points
    with np.errstate(all="ignore"):
        y, miss = np.exp(reference.log_sigmoid(z)), np.exp(reference.log_sigmoid(-z))
        off = SLACK * a.eps * (1 + np.where(np.isfinite(z), np.abs(z), 0))
        tolerance = y * miss * off + y * (4 * a.eps + a.out) + a.flushed(k)
        p, _ = reference.weights(solution)
        u = upstream(case).to(case.logits.dtype).double().numpy()
        mean = (p * u).sum(-1, keepdims=True)
        mean_off = (p * off * np.abs(u - mean)).sum(-1, keepdims=True) + 16 * a.eps * np.abs(p * u).sum(
            -1, keepdims=True
        )
        gradient = np.where(p > 0, y * miss * (u - mean), 0)
        wrong = np.where(
            p > 0, y * miss * (np.abs(u - mean) * (2 * off + 16 * a.eps + a.out) + mean_off + 4 * a.eps), 0
        )
    return {
        "value": (y, tolerance),
        **sums(case, a, y, k),
        "gradient": graded(case, solution, gradient, wrong, off, p),
    }


def expect_log(case: Case, impl: str) -> Expected:
    a, k = Accuracy.of(case), case.sizes()
    solution = reference.lml(case.scores(impl), k)
    z = solution.points
    with np.errstate(all="ignore"):
        value, miss = reference.log_sigmoid(z), np.exp(reference.log_sigmoid(-z))
        off = SLACK * a.eps * (1 + np.where(np.isfinite(z), np.abs(z), 0))
        tolerance = miss * off + np.where(np.isfinite(value), np.abs(value), 0) * (8 * a.eps + a.out) + a.tiny
        p, _ = reference.weights(solution)
        v = np.where(p >= 0, miss * upstream(case).to(case.logits.dtype).double().numpy(), 0)
        v = np.where(np.isfinite(z) & solution.inside[:, None], v, 0)
        total = v.sum(-1, keepdims=True)
        total_off = (np.abs(v) * (off + 16 * a.eps)).sum(-1, keepdims=True)
        p_off = (p * off).sum(-1, keepdims=True)
        wrong = np.abs(v) * (off + 8 * a.eps + a.out) + p * (
            np.abs(total) * (2 * off + p_off + 16 * a.eps + a.out) + total_off
        )
    return {"value": (value, tolerance), "gradient": graded(case, solution, v - p * total, wrong, off, p)}


def expect_threshold(case: Case, impl: str) -> Expected:
    a, k = Accuracy.of(case), case.sizes()
    solution = reference.lml(case.scores(impl), k)
    with np.errstate(all="ignore"):
        nu = solution.t - solution.base
        t = np.where(np.isfinite(solution.t), np.abs(solution.t), 0)
        z = np.where(np.isfinite(solution.points), np.abs(solution.points), 0)
        off = SLACK * a.eps * (1 + z)
        p, _ = reference.weights(solution)
        tolerance = (8 * a.eps + a.out) * (np.abs(solution.base) + t) + (p * off).sum(-1) + SLACK * a.eps + a.tiny
        p_off = (p * off).sum(-1, keepdims=True)
        wrong = p * (2 * off + p_off + 16 * a.eps + a.out)
    return {"value": (nu, tolerance), "gradient": graded(case, solution, -p, wrong, off, p)}


def expect_at_most(case: Case, impl: str) -> Expected:
    a, k, x = Accuracy.of(case), case.sizes(), case.scores(impl)
    free = (x > -np.inf).sum(-1)
    tight = reference.lml(x, np.minimum(k, free))
    with np.errstate(all="ignore"):
        loose = reference.at_most(x, k)
        z = np.where(loose[:, None] & ~np.isnan(tight.points), x, tight.points)
        y, miss = np.exp(reference.log_sigmoid(z)), np.exp(reference.log_sigmoid(-z))
        off = SLACK * a.eps * (1 + np.where(np.isfinite(z), np.abs(z), 0))
        tolerance = y * miss * off + y * (4 * a.eps + a.out) + a.flushed(k)
    return {"value": (y, tolerance)}


def expect_capped_softmax(case: Case, impl: str) -> Expected:
    a, k = Accuracy.of(case), case.sizes()
    log_y = reference.capped_softmax(case.scores(impl), k)
    with np.errstate(all="ignore"):
        y = np.exp(log_y)
        off = SLACK * a.eps * (1 + np.where(np.isfinite(log_y), np.abs(log_y), 0))
        return {"value": (y, y * (off + a.out) + a.flushed(k)), **sums(case, a, y, k)}


def expect_capped_sparsemax(case: Case, impl: str) -> Expected:
    a, k = Accuracy.of(case), case.sizes()
    y = reference.capped_sparsemax(case.scores(impl), k)
    return {"value": (y, np.full(y.shape, SLACK * a.eps) + a.out * np.nan_to_num(y))}


def run_marginals(case: Case, impl: str) -> Found:
    del impl
    return {"value": ll.subset_marginals(case.logits.to(DEVICE), _whole(case))}


def _whole(case: Case) -> int:
    n = case.logits.shape[-1]
    return int(min(max(np.nan_to_num(float(case.k[0])), 0), n)) if len(case.k) else 0


def expect_marginals(case: Case, impl: str) -> Expected:
    del impl
    a, x = Accuracy.of(case), _below_the_first(case)
    with np.errstate(all="ignore"):
        y = np.exp(reference.subset_log_marginals(x, _whole(case)))
        reach = np.abs(np.where(np.isfinite(x), x, 0)).max(-1, keepdims=True, initial=0)
    return {"value": (y, y * (64 * a.eps * (x.shape[-1] + reach) + a.out) + 8 * a.eps)}


def _below_the_first(case: Case) -> np.ndarray:
    """Return scores less the largest of their row, which changes no result and leaves more digits."""
    x = case.logits.to(case.work).numpy().astype(np.longdouble)
    peak = x.max(-1, keepdims=True, initial=-np.inf)
    return x - np.where(np.isfinite(peak), peak, 0)


def run_sphere(case: Case, impl: str) -> Found:
    del impl
    return {"value": ll.spherical_exp(case.logits.to(DEVICE))}


def expect_sphere(case: Case, impl: str) -> Expected:
    del impl
    a, x = Accuracy.of(case), _below_the_first(case)
    with np.errstate(all="ignore"):
        log_p = x - reference.log_sum(2 * x, x > -np.inf)[:, None] / 2
        p = np.exp(log_p)
        off = SLACK * a.eps * (1 + np.where(np.isfinite(log_p), np.abs(log_p), 0))
    return {"value": (p, p * (off + a.out) + a.tiny)}


def _few(case: Case) -> bool:
    """Rows short enough for recursions over subsets."""
    return case.logits.shape[-1] <= 17


def _enough(case: Case) -> Case:
    """Rows with enough classes for the subset."""
    x, size = case.logits, _whole(case)
    wanted = (x < torch.inf).all(-1) & ((x > -torch.inf).sum(-1) >= size)
    return replace(
        case.plain(wanted), k=torch.full((int(wanted.sum()),), float(size), dtype=case.work), temperature=1.0
    )


def _below_infinity(case: Case) -> Case:
    return case.rows((case.logits < torch.inf).all(-1))


ALL = ("torch", "native", "triton")
PROJECTIONS = (
    Op("lml", projection(ll.lml), expect_lml, ALL),
    Op("log_lml", projection(ll.log_lml), expect_log, ALL),
    Op("lml_threshold", run_threshold, expect_threshold, ALL),
    Op("lml_at_most", projection(ll.lml_at_most, gradients=False), expect_at_most, ALL),
    Op("capped_softmax", projection(ll.capped_softmax, gradients=False), expect_capped_softmax),
    Op("capped_sparsemax", projection(ll.capped_sparsemax, gradients=False), expect_capped_sparsemax),
    Op("subset_marginals", run_marginals, expect_marginals, fits=_few, largest=1e6, adapt=_enough),
    Op("spherical_exp", run_sphere, expect_sphere, adapt=_below_infinity),
)
