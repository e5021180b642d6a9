"""Reciprocal rank, coverage and wrongly ordered pairs, against scikit-learn and a loop; precision-recall curves."""

import math

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from tools import DEVICE
from torch import Tensor

import lastlayer as ll
from lastlayer import metrics
from lastlayer.metrics import _ranking

METRICS = [metrics.mean_reciprocal_rank, metrics.coverage_error, metrics.label_ranking_loss]
ROWS, N = 40, 9


def data(ties: bool = True) -> tuple[Tensor, Tensor]:
    scores = torch.rand(ROWS, N, dtype=torch.float64, device=DEVICE)
    target = (torch.rand(ROWS, N, device=DEVICE) < 0.3).float()
    target[0], target[1] = 0, 1
    return (scores * 5).round() / 5 if ties else scores, target


def lists(target: Tensor) -> Tensor:
    index = torch.where(target > 0, torch.arange(N, device=DEVICE), -1)
    return torch.cat([index, index[:, :3]], 1)[:, torch.randperm(N + 3, device=DEVICE)]


def brute(name: str, scores: list[float], target: list[float]) -> float:
    """One row in plain Python: classes that are known, by score and then by number; nan where nothing is defined."""
    known = [c for c, t in enumerate(target) if t >= 0]
    s = {c: -math.inf if math.isnan(scores[c]) else scores[c] for c in known}
    labels, others = [c for c in known if target[c] > 0], [c for c in known if target[c] == 0]
    if not labels or (name == "label_ranking_loss" and not others):
        return math.nan
    if name == "coverage_error":
        return sum(s[c] >= min(s[t] for t in labels) for c in known)
    if name == "label_ranking_loss":
        return sum(s[o] >= s[t] for o in others for t in labels) / len(labels) / len(others)
    order = sorted((c for c in known if s[c] > -math.inf), key=lambda c: (-s[c], c))
    return next((1 / (i + 1) for i, c in enumerate(order) if c in labels), 0.0)


@pytest.mark.parametrize("metric", METRICS)
def test_against_a_loop(metric, monkeypatch):
    scores, target = data()
    scores[3, :4], scores[4], scores[5, 2], scores[6] = -math.inf, -math.inf, math.nan, math.nan
    target[7, :5], target[8] = -1, -1
    expected = [brute(metric.__name__, *row) for row in zip(scores.tolist(), target.tolist(), strict=True)]
    found = metric(scores, target, reduction="none")
    assert found.tolist() == pytest.approx(expected, nan_ok=True)
    assert metric(scores, target).item() == pytest.approx(np.nanmean(expected))
    monkeypatch.setattr(_ranking, "BUDGET", 30)
    torch.testing.assert_close(metric(scores, target, reduction="none"), found, equal_nan=True)
    target = target.clamp(min=0)
    for empty in ("skip", "zero", "one"):
        torch.testing.assert_close(metric(scores, lists(target), empty=empty), metric(scores, target, empty=empty))
    shaped = metric(scores.view(4, 10, N), lists(target).view(4, 10, N + 3), reduction="none")
    torch.testing.assert_close(shaped.flatten(), metric(scores, target, reduction="none"), equal_nan=True)
    assert metric(scores[:0], target[:0]).item() == 0
    assert metric(scores[:, :0], target[:, :0], reduction="none").isnan().all()


def test_coverage_and_ranking_loss_agree_with_scikit_learn():
    scores, target = data()
    truth = target.cpu().numpy().astype(int)
    expected = sk.coverage_error(truth, scores.cpu())
    assert metrics.coverage_error(scores, target, empty="zero").item() == pytest.approx(expected)
    expected = sk.label_ranking_loss(truth, scores.cpu())
    assert metrics.label_ranking_loss(scores, target, empty="zero").item() == pytest.approx(expected)


def test_reciprocal_rank_of_one_label_is_average_precision():
    scores, _ = data(ties=False)
    target = torch.randint(N, (ROWS,), device=DEVICE)
    found = metrics.mean_reciprocal_rank(scores, target, reduction="none")
    one = torch.nn.functional.one_hot(target, N)
    expected = sk.label_ranking_average_precision_score(one.cpu(), scores.cpu())
    assert found.mean().item() == pytest.approx(expected)
    limited = metrics.mean_reciprocal_rank(scores, target, 3, reduction="none")
    torch.testing.assert_close(limited, torch.where(found >= 1 / 3 - 1e-12, found, 0))


def test_ranking_loss_is_the_other_side_of_auroc():
    scores, target = data(ties=False)
    area = ll.auroc(scores, target, per="sample", average="none")
    torch.testing.assert_close(metrics.label_ranking_loss(scores, target, reduction="none"), 1 - area, equal_nan=True)


# Curves


def test_exact_curve_agrees_with_scikit_learn():
    scores, target = data()
    target[:, 3] = 0
    found = metrics.precision_recall_curve(scores, target)
    assert found.precision.shape == found.recall.shape == found.threshold.shape == (N, ROWS)
    for c in range(N):
        kept = ~found.threshold[c].isnan()
        assert kept.tolist() == sorted(kept.tolist(), reverse=True)  # nan comes last
        if c == 3:
            assert found.recall[c].isnan().all()
            continue
        p, r, t = sk.precision_recall_curve(target[:, c].cpu(), scores[:, c].cpu())
        assert found.precision[c, kept].tolist() == pytest.approx(p[:-1][::-1].tolist())
        assert found.recall[c, kept].tolist() == pytest.approx(r[:-1][::-1].tolist())
        assert found.threshold[c, kept].tolist() == t[::-1].tolist()
        one = metrics.precision_recall_curve(scores[:, c], target[:, c])
        for a, b in zip(one, found, strict=True):
            assert torch.equal(a.nan_to_num(-1), b[c].nan_to_num(-1))
    p, r, _ = sk.precision_recall_curve(target.flatten().cpu(), scores.flatten().cpu())
    micro = metrics.precision_recall_curve(scores, target, average="micro")
    assert micro.precision[~micro.precision.isnan()].tolist() == pytest.approx(p[:-1][::-1].tolist())


@pytest.mark.parametrize("thresholds", [6, torch.tensor([-1.0, 0.19, 0.2, 0.61, 7.0])])
def test_curve_on_a_grid(thresholds):
    scores, target = data()
    scores[2, 1], scores[3, 1], target[4:9, 2] = math.nan, -math.inf, -1
    grid = thresholds if isinstance(thresholds, Tensor) else torch.arange(thresholds).double() / (thresholds - 1)
    found = metrics.precision_recall_curve(scores, target, thresholds=thresholds)
    assert found.precision.shape == found.recall.shape == (N, len(grid))
    known = target >= 0
    for j, t in enumerate(grid.to(DEVICE).double()):
        taken = (scores >= t) & known & (scores > -math.inf)
        right = (taken & (target > 0)).sum(0).double()
        torch.testing.assert_close(found.recall[:, j], right / (target > 0).sum(0))
        precision = torch.where(taken.any(0), right / taken.sum(0).clamp(min=1), 1)
        torch.testing.assert_close(found.precision[:, j], precision)
    target = target.clamp(min=0)
    a = metrics.precision_recall_curve(scores, lists(target), thresholds=thresholds)
    b = metrics.precision_recall_curve(scores, target, thresholds=thresholds)
    torch.testing.assert_close(a, b)
    stream = metrics.PrecisionRecallCurve(thresholds=thresholds, n_classes=N).to(DEVICE)
    for part in (slice(0, 11), slice(11, 11), slice(11, ROWS)):
        stream.update(scores[part], lists(target)[part])
    torch.testing.assert_close(stream.compute(), metrics.Curve(*(x.float() for x in b)))
    micro = metrics.PrecisionRecallCurve(thresholds=thresholds, n_classes=N, average="micro").to(DEVICE)
    micro.update(scores, target)
    expected = metrics.precision_recall_curve(scores.flatten(), target.flatten(), thresholds=thresholds)
    torch.testing.assert_close(micro.compute(), metrics.Curve(*(x.float() for x in expected)))


def test_curve_plots():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    scores, target = data()
    stream = metrics.PrecisionRecallCurve(n_classes=N)
    stream.update(scores.cpu(), target.cpu())
    _, axes = stream.plot()
    assert len(axes.get_lines()) == N
    assert axes.get_xlabel() == "Recall"
    pyplot.close("all")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda s, t: metrics.mean_reciprocal_rank(s, t, 0),
            "mean_reciprocal_rank: `k` must be None or a whole number",
        ),
        (lambda s, t: metrics.coverage_error(s, t, empty="x"), "coverage_error: `empty` must be one of"),
        (
            lambda s, t: metrics.label_ranking_loss(s, t, reduction="x"),
            "label_ranking_loss: `reduction` must be one of",
        ),
        (lambda s, t: metrics.MeanReciprocalRank(1.5), "MeanReciprocalRank: `k` must be None or a whole number"),
        (
            lambda s, t: metrics.precision_recall_curve(s, t, thresholds=1),
            "`thresholds` must be a whole number of at le",
        ),
        (
            lambda s, t: metrics.precision_recall_curve(s, t, thresholds=torch.ones(2, 2)),
            r"`thresholds` must be a vector of floating-point numbers, got shape \(2, 2\)",
        ),
        (
            lambda s, t: metrics.PrecisionRecallCurve(n_classes=3).update(s, t),
            "PrecisionRecallCurve: `scores` must have n_classes=3 classes, got 9",
        ),
    ],
)
def test_messages(call, text):
    with pytest.raises(ValueError, match=text):
        call(*data())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_score_reaches_the_threshold_of_its_own_number(dtype):
    scores, target = torch.tensor([i / 10 for i in range(11)], dtype=dtype), torch.ones(11)
    stream = metrics.PrecisionRecallCurve(thresholds=11)
    stream.update(scores, target)
    for curve in (metrics.precision_recall_curve(scores, target, thresholds=11), stream.compute()):
        assert (11 * curve.recall).round().tolist() == list(range(11, 0, -1))
