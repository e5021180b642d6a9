"""Streaming metrics inside of torchmetrics' collections and wrappers."""

import math

import pytest
import torch
from tools import DEVICE

import lastlayer as ll

torchmetrics = pytest.importorskip("torchmetrics")

N = 6
TREE = ll.LabelTree.from_parents([6, 6, 6, 7, 7, 7, 8, 8, -1])
OTHER_TREE = ll.LabelTree.from_parents([6, 7, 6, 7, 6, 7, 8, 8, -1])


def batches():
    """The first batch has no hit at any k, as in the first steps of training; the second has some."""
    generator = torch.Generator().manual_seed(3)
    scores = torch.rand(2, 10, N, generator=generator)
    target = (torch.rand(2, 10, N, generator=generator) < 0.3).float()
    target[:, 0] = 1
    scores[0] = torch.where(target[0] > 0, -torch.inf, scores[0])
    return scores.to(DEVICE), target.to(DEVICE)


def members():
    """Metrics whose states would coincide after the first batch if nothing told them apart."""
    at_k = (ll.PrecisionAtK, ll.RecallAtK, ll.F1AtK, ll.RPrecisionAtK, ll.NDCGAtK, ll.TopKAccuracy, ll.PSPAtK)
    found = {f"{metric.__name__}@{k}": metric(k) for metric in at_k for k in (1, 3, 5)}
    weights = (torch.full((N,), 0.5), torch.linspace(0.1, 1, N))
    found |= {f"psp {i}": ll.PSPAtK(3, w) for i, w in enumerate(weights)}
    found |= {f"macro {i}": m(3, average="macro", n_classes=N) for i, m in enumerate(at_k[:3])}
    found |= {f"map {t}": ll.MeanAveragePrecision(thresholds=t, n_classes=N) for t in (None, 9)}
    found |= {f"auroc {t}": ll.AUROC(thresholds=t, n_classes=N) for t in (None, 9)}
    found["map sample"] = ll.MeanAveragePrecision(per="sample")
    found |= {f"ece {k}": ll.LabelCalibrationError(k) for k in (None, 1, 3)}
    found |= {f"errors {t:.0%}": ll.LabelSetErrorsMetric(threshold=t) for t in (0.2, 0.9)}
    return {name: metric.to(DEVICE) for name, metric in found.items()}


def test_a_collection_reports_what_its_members_report_alone():
    scores, target = batches()
    alone, collection = members(), torchmetrics.MetricCollection(members())
    for s, t in zip(scores, target, strict=True):
        collection.update(s, t)
        for metric in alone.values():
            metric.update(s, t)
    together = collection.compute()
    for name, metric in alone.items():
        expected = metric.compute()
        if isinstance(expected, dict):
            assert {key: together[f"{name}_{key}"] for key in expected} == expected, name
            continue
        torch.testing.assert_close(together[name], expected, msg=lambda text, name=name: f"{name}: {text}")


def test_structures_in_a_collection():
    """Wrong nodes first: accuracy and specificity are 0 under both trees, and equal states must not be merged."""
    make = {
        "accuracy": lambda: ll.TreeAccuracy(TREE),
        "accuracy, other tree": lambda: ll.TreeAccuracy(OTHER_TREE),
        "specificity": lambda: ll.TreeSpecificity(TREE),
        "all": lambda: ll.TreeSpecificity(TREE, hits_only=False),
    }
    collection = torchmetrics.MetricCollection({name: m() for name, m in make.items()})
    alone = {name: m() for name, m in make.items()}
    for nodes, target in (([[3], [0]], [0, 3]), ([[6], [7]], [0, 4])):
        for metric in (collection, *alone.values()):
            metric.update(torch.tensor(nodes), torch.tensor(target))
    for name, value in collection.compute().items():
        assert value == alone[name].compute(), name

    collection = torchmetrics.MetricCollection(
        {f"{m.__name__} {r}": m(r) for m in (ll.RotationError, ll.AngularError) for r in ("mean", "median")}
    )
    eye, turned = torch.eye(3)[None], torch.tensor([[[0.0, -1, 0], [1, 0, 0], [0, 0, 1]]])
    for prediction in (eye, turned, turned):
        collection.update(prediction.to(DEVICE), eye.to(DEVICE))
    values = {name: round(value.item(), 4) for name, value in collection.compute().items()}
    assert values["RotationError mean"] == round(math.pi / 3, 4)
    assert values["RotationError median"] == round(math.pi / 2, 4)


def test_equal_metrics_still_share_their_states():
    collection = torchmetrics.MetricCollection({"a": ll.RecallAtK(3), "b": ll.RecallAtK(3), "c": ll.RecallAtK(2)})
    scores, target = batches()
    collection.update(scores[0].cpu(), target[0].cpu())
    assert sorted(map(sorted, collection.compute_groups.values())) == [["a", "b"], ["c"]]


def test_classwise_wrapper():
    scores, target = batches()
    wrapper = torchmetrics.ClasswiseWrapper(ll.RecallAtK(3, average="none", n_classes=N), labels=list("abcdef"))
    collection = torchmetrics.MetricCollection({"recall": wrapper, "p1": ll.PrecisionAtK(1)}).to(DEVICE)
    for s, t in zip(scores, target, strict=True):
        collection.update(s, t)
    values = collection.compute()
    both = scores.flatten(0, 1), target.flatten(0, 1)
    expected = ll.recall_at_k(*both, 3, average="none")
    assert [values[f"recallatk_{c}"].item() for c in "abcdef"] == expected.tolist()
    assert values["p1"] == ll.precision_at_k(*both, 1)


def test_tracker_knows_which_value_is_best():
    scores, target = batches()
    collection = torchmetrics.MetricCollection({"p1": ll.PrecisionAtK(1), "ece": ll.LabelCalibrationError()})
    tracker = torchmetrics.MetricTracker(collection.to(DEVICE))
    for s, t in zip(scores, target, strict=True):
        tracker.increment()
        tracker.update(s, t)
    best, step = tracker.best_metric(return_step=True)
    p1 = [ll.precision_at_k(s, t, 1).item() for s, t in zip(scores, target, strict=True)]
    ece = [ll.label_calibration_error(s, t).item() for s, t in zip(scores, target, strict=True)]
    assert best == pytest.approx({"p1": max(p1), "ece": min(ece)})
    assert step == {"p1": p1.index(max(p1)), "ece": ece.index(min(ece))}


def test_bootstrapper():
    torch.manual_seed(0)
    scores, target = (x.flatten(0, 1).repeat(10, 1) for x in batches())
    metric = torchmetrics.BootStrapper(ll.RecallAtK(3), num_bootstraps=50).to(DEVICE)
    metric.update(scores, target)
    rows = ll.recall_at_k(scores, target, 3)
    found = metric.compute()
    assert found["mean"].item() == pytest.approx(rows.item(), abs=0.02)
    assert 0.01 < found["std"].item() < 0.05


@pytest.mark.parametrize(
    ("metric", "function"),
    [
        (ll.RecallAtK(3), lambda s, t: ll.recall_at_k(s, t, 3)),
        (ll.MeanAveragePrecision(), ll.mean_average_precision),
        (ll.AUROC(), ll.auroc),
    ],
)
def test_running_window(metric, function):
    scores, target = batches()
    running = torchmetrics.wrappers.Running(metric, window=2).to(DEVICE)
    for i in (0, 0, 1):
        running.update(scores[i], target[i])
    torch.testing.assert_close(running.compute(), function(scores.flatten(0, 1), target.flatten(0, 1)))


def test_representations_show_the_options():
    assert repr(ll.RecallAtK(5)) == "RecallAtK(k=5)"
    assert repr(ll.NDCGAtK([1, 5], empty="zero")) == "NDCGAtK(k=[1, 5], empty='zero')"
    assert repr(ll.F1AtK(3, average="macro", n_classes=7)) == "F1AtK(k=3, average='macro', n_classes=7)"
    assert repr(ll.PSPAtK(3, torch.ones(4))) == "PSPAtK(k=3, propensities=tensor of shape (4,))"
    assert repr(ll.LabelCalibrationError(2, n_bins=15)) == "LabelCalibrationError(k=2, n_bins=15)"
    assert repr(ll.TreeAccuracy(TREE)) == "TreeAccuracy(label_tree=LabelTree(n_leaves=6, n_nodes=9, height=3))"
    assert repr(ll.MeanMaxConfidence()) == "MeanMaxConfidence()"


@pytest.mark.parametrize(
    ("metric", "legend"),
    [
        (lambda: ll.RecallAtK(3), []),
        (lambda: ll.RecallAtK([1, 3]), ["k=1", "k=3"]),
        (lambda: ll.RecallAtK(1, average="none", n_classes=2), ["Class 0", "Class 1"]),
        (
            lambda: ll.RecallAtK([1, 2], average="none", n_classes=2),
            [f"k={k}, class {c}" for k in (1, 2) for c in (0, 1)],
        ),
        (lambda: ll.AUROC(average="none"), ["Class 0", "Class 1"]),
        (lambda: ll.LabelCalibrationError(), []),
    ],
)
def test_plots(metric, legend):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    metric = metric()
    values = [metric(torch.rand(8, 2), (torch.rand(8, 2) < 0.5).float()) for _ in range(3)]
    for axes in (metric.plot()[1], metric.plot(values)[1]):
        shown = axes.get_legend()
        assert [text.get_text() for text in shown.get_texts() if text.get_text()] == legend if shown else not legend
        assert axes.get_ylabel() == type(metric).__name__
    pyplot.close("all")
