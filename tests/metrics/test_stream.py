"""Streaming metrics: halves merged are the whole, and the whole is the function."""

import importlib
import sys

import numpy as np
import pytest
import torch
from tools import DEVICE
from torch import Tensor

import lastlayer as ll

torchmetrics = pytest.importorskip("torchmetrics")

KS = [1, 3, 5]
ROWS, N = 40, 7
PROPENSITIES = torch.linspace(0.1, 1, N)

AT_K = [
    (ll.PrecisionAtK, ll.precision_at_k),
    (ll.RecallAtK, ll.recall_at_k),
    (ll.F1AtK, ll.f1_at_k),
    (ll.RPrecisionAtK, ll.r_precision_at_k),
    (ll.NDCGAtK, ll.ndcg_at_k),
    (ll.PSPAtK, ll.psp_at_k),
    (ll.TopKAccuracy, ll.top_k_accuracy),
    (ll.metrics.FallOutAtK, ll.metrics.fall_out_at_k),
]


def data() -> tuple[Tensor, Tensor]:
    scores = (10 * torch.rand(ROWS, N, device=DEVICE)).round() / 10
    target = (torch.rand(ROWS, N, device=DEVICE) < 0.3).to(torch.int8)
    target[:3] = 0
    target[7, 2:] = -1
    return scores, target


def stream(metric, scores, target, sizes=(1, 16, 0, 23)):
    """Update with uneven parts of the rows."""
    start = 0
    for size in sizes:
        metric.update(scores[start : start + size], target[start : start + size])
        start += size
    return metric


def cases():
    for stream_class, function in AT_K:
        for empty in ("skip", "zero", "one"):
            yield stream_class(KS, empty=empty), lambda s, t, f=function, e=empty: f(s, t, KS, empty=e)
            yield stream_class(3, empty=empty), lambda s, t, f=function, e=empty: f(s, t, 3, empty=e)
    for stream_class, function in AT_K[:3]:
        for average in ("macro", "micro", "weighted", "none"):
            yield (
                stream_class(KS, average=average, n_classes=N),
                lambda s, t, f=function, a=average: f(s, t, KS, average=a),
            )
    yield ll.NDCGAtK(KS, gain="linear"), lambda s, t: ll.ndcg_at_k(s, t, KS, gain="linear")
    yield ll.PSPAtK(KS, PROPENSITIES), lambda s, t: ll.psp_at_k(s, t, KS, PROPENSITIES)
    for empty in ("skip", "zero", "one"):
        yield (
            ll.MeanAveragePrecision(per="sample", empty=empty),
            lambda s, t, e=empty: ll.mean_average_precision(s, t, per="sample", empty=e),
        )
        for thresholds in (None, 25):
            for average in ("macro", "micro", "weighted", "none"):
                options = {"average": average, "empty": empty}
                yield (
                    ll.MeanAveragePrecision(thresholds=thresholds, n_classes=N, **options),
                    lambda s, t, o=options: ll.mean_average_precision(s, t, **o),
                )
                yield (
                    ll.AUROC(thresholds=thresholds, n_classes=N, **options),
                    lambda s, t, o=options: ll.auroc(s, t, **o),
                )
    for k in (None, 2):
        yield ll.LabelCalibrationError(k), lambda s, t, k=k: ll.label_calibration_error(s, t, k)
        yield (
            ll.LabelCalibrationError(k, per="class", n_classes=N, norm="l2"),
            lambda s, t, k=k: ll.label_calibration_error(s, t, k, per="class", norm="l2"),
        )

    yield from cases_of_sets_and_ranks()


def cases_of_sets_and_ranks():
    m = ll.metrics
    pairs = [
        (m.LabelSetPrecision, m.label_set_precision),
        (m.LabelSetRecall, m.label_set_recall),
        (m.LabelSetF1, m.label_set_f1),
        (m.LabelSetJaccard, m.label_set_jaccard),
    ]
    for stream_class, function in pairs:
        for average in ("samples", "macro", "micro", "weighted", "none"):
            for empty in ("skip", "one") if average in ("samples", "macro") else ("skip",):
                options = {"threshold": 0.5, "average": average, "empty": empty, "n_classes": N}
                yield stream_class(**options), lambda s, t, f=function, o=options: f(s, t, **o)
    yield m.HammingLoss(threshold=0.5), lambda s, t: m.hamming_loss(s, t, threshold=0.5)
    yield m.ExactMatch(threshold=0.2), lambda s, t: m.exact_match(s, t, threshold=0.2)
    for empty in ("skip", "zero", "one"):
        yield m.MeanReciprocalRank(3, empty=empty), lambda s, t, e=empty: m.mean_reciprocal_rank(s, t, 3, empty=e)
        yield m.CoverageError(empty=empty), lambda s, t, e=empty: m.coverage_error(s, t, empty=e)
        yield m.LabelRankingLoss(empty=empty), lambda s, t, e=empty: m.label_ranking_loss(s, t, empty=e)


@pytest.mark.parametrize(("metric", "function"), list(cases()))
def test_whole_halves_and_reset(metric, function):
    scores, target = data()  # in tenths: with 25 bins on [0, 1] different scores are in different bins
    whole = function(scores, target)
    metric = metric.to(DEVICE)
    torch.testing.assert_close(stream(metric, scores, target).compute(), whole, equal_nan=True)
    metric.reset()
    torch.testing.assert_close(stream(metric, scores, target, (ROWS,)).compute(), whole, equal_nan=True)

    other = metric.clone()
    metric.reset()
    other.reset()
    stream(metric, scores[:13], target[:13], (5, 8))
    stream(other, scores[13:], target[13:], (20, 7))
    metric.merge_state(other)
    torch.testing.assert_close(metric.compute(), whole, equal_nan=True)


def test_states_add_up():
    """All but the lists of scores are reduced by a sum, which is what DDP does."""
    for metric, _ in cases():
        for name, reduction in metric._reductions.items():
            if isinstance(metric._defaults[name], list):
                assert name.startswith(("scores_", "target_"))
            else:
                assert reduction(torch.tensor([[1.0], [2.0]])).item() == 3.0


def test_index_lists_of_different_lengths():
    scores, target = data()
    target = target.clamp(min=0)
    index = torch.where(target > 0, torch.arange(N, device=DEVICE), -1)
    for metric, function in (
        (ll.RecallAtK(3), lambda: ll.recall_at_k(scores, target, 3)),
        (ll.MeanAveragePrecision(), lambda: ll.mean_average_precision(scores, target)),
        (ll.MeanAveragePrecision(thresholds=25, n_classes=N), lambda: ll.mean_average_precision(scores, target)),
    ):
        metric = metric.to(DEVICE)
        metric.update(scores[:20], torch.cat([index[:20], index[:20, :1]], 1))
        metric.update(scores[20:], torch.cat([index[20:], index[20:]], 1))
        torch.testing.assert_close(metric.compute(), function())


def test_decoded_lists():
    scores, target = data()
    index = torch.where(target > 0, torch.arange(N, device=DEVICE), -1)
    values, indices = scores.sort(dim=-1, descending=True, stable=True)
    for metric in (ll.RecallAtK(3), ll.RecallAtK(3, average="macro", n_classes=N)):
        metric = metric.to(DEVICE)
        metric.update(values[:, :3], index, indices=indices[:, :3])
        expected = ll.recall_at_k(scores, target.clamp(min=0), 3, average=metric.average)
        torch.testing.assert_close(metric.compute(), expected)


def test_one_problem():
    scores, target = torch.rand(50).round(decimals=1), torch.randint(-1, 2, (50,))
    for metric in (ll.AUROC(), ll.AUROC(thresholds=25)):
        torch.testing.assert_close(stream(metric, scores, target, (20, 30)).compute(), ll.auroc(scores, target))
    metric = ll.MeanMaxConfidence()
    metric.update(torch.tensor([[0.1, 0.5]]))
    metric.update(torch.tensor([[0.2, 0.1], [0.3, 0.9], [0.0, 0.0]]))
    assert metric.compute().item() == pytest.approx(0.4)


def test_confidence_in_a_collection_takes_no_notice_of_the_target():
    scores, target = data()
    both = torchmetrics.MetricCollection([ll.MeanMaxConfidence(), ll.RecallAtK(3)]).to(DEVICE)
    for half in (slice(0, 20), slice(20, None)):
        both.update(scores[half], target[half])
    both.update(scores=scores[:0], target=target[:0])
    found = both.compute()
    torch.testing.assert_close(found["MeanMaxConfidence"], ll.metrics.mean_max_confidence(scores))
    torch.testing.assert_close(found["RecallAtK"], ll.recall_at_k(scores, target, 3))
    assert both(scores, target)["MeanMaxConfidence"] == ll.metrics.mean_max_confidence(scores)


def test_bins_are_the_reliability_diagram():
    scores, target = data()
    metric = stream(ll.LabelCalibrationError(3, n_bins=5).to(DEVICE), scores, target)
    for a, b in zip(metric.bins(), ll.reliability_bins(scores, target, 3, n_bins=5), strict=True):
        torch.testing.assert_close(a, b)


def test_in_a_collection():
    scores, target = data()
    collection = torchmetrics.MetricCollection(
        {"p": ll.PrecisionAtK(1), "r": ll.RecallAtK([1, 5]), "map": ll.MeanAveragePrecision(per="sample")}
    ).to(DEVICE)
    result = collection(scores, target)  # forward: the value of the batch
    torch.testing.assert_close(result["r"], ll.recall_at_k(scores, target, [1, 5]))
    torch.testing.assert_close(collection.compute()["p"], ll.precision_at_k(scores, target, 1))


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_before_any_row():
    for metric, _ in cases():
        if getattr(metric, "empty", "skip") != "skip":
            continue
        result = metric.compute()
        assert ((result == 0) | result.isnan()).all()  # nan: one class each, none with a value


def test_pickle_and_state_dict():
    scores, target = data()
    metric = ll.PSPAtK(3, PROPENSITIES).to(DEVICE)
    metric.persistent(True)
    stream(metric, scores, target)
    other = ll.PSPAtK(3, PROPENSITIES).to(DEVICE)
    other.persistent(True)
    other.load_state_dict(metric.state_dict())
    other._update_count = 1
    assert other.compute() == metric.compute()


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.bfloat16()])
def test_a_model_in_half_precision_leaves_its_metrics_as_they_are(cast):
    scores, target = torch.rand(600, N), torch.randint(0, N, (600,))

    def metrics():
        threshold = torch.linspace(0.1, 0.9, N)
        return torch.nn.ModuleDict(
            {
                "confidence": ll.MeanMaxConfidence(),  # each of these counts rows
                "precision": ll.metrics.MeanAveragePrecision(per="sample"),
                "recall": ll.RecallAtK(2, empty="zero"),
                "threshold": ll.metrics.TuneRecall(0.5),
                "sets": ll.metrics.LabelSetF1(threshold=threshold),
                "propensity": ll.PSPAtK(2, PROPENSITIES),
                "list": ll.AUROC(),
            }
        )

    expected, module = metrics(), cast(metrics())
    for name, metric in module.items():
        for row in range(0, 600, 2):
            metric.update(scores[row : row + 2], target[row : row + 2])
        cast(module)
        torch.testing.assert_close(metric.compute(), stream(expected[name], scores, target, (600,)).compute())


def test_set_dtype_changes_the_states():
    metric = ll.RecallAtK(1).set_dtype(torch.float32)
    assert {getattr(metric, name).dtype for name in metric._defaults} == {torch.float32}


def test_without_torchmetrics(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    monkeypatch.delitem(sys.modules, "lastlayer.metrics.stream")
    monkeypatch.delitem(sys.modules, "lastlayer.metrics._stream")
    with pytest.raises(
        ImportError, match=r"need torchmetrics, which is not installed. Install the extra `lastlayer\[train\]`"
    ):
        _ = ll.RecallAtK
    monkeypatch.undo()
    importlib.import_module("lastlayer.metrics.stream")


def test_unknown_name():
    with pytest.raises(AttributeError, match="module 'lastlayer' has no attribute 'RecalAtK'"):
        _ = ll.RecalAtK
    assert "RecallAtK" in dir(ll.metrics)


def test_settings_that_differ_from_the_defaults_are_shown():
    assert repr(ll.RecallAtK(3, empty="zero")) == "RecallAtK(k=3, empty='zero')"
    assert repr(ll.PrecisionAtK(np.array([1, 5]))) == "PrecisionAtK(k=array([1, 5]))"
    assert repr(ll.GraphRecallAtK(np.array([1, 5]), iou=0.5)) == "GraphRecallAtK(k=array([1, 5]))"
    assert repr(ll.LabelSetErrorsMetric(names=np.array(["a", "b"]))).startswith("LabelSetErrorsMetric(names=array(")
    assert repr(ll.PSPAtK(3, torch.ones(4))) == "PSPAtK(k=3, propensities=tensor of shape (4,))"


@pytest.mark.parametrize("average", ["macro", "micro", "weighted", "none"])
@pytest.mark.parametrize(
    ("stream", "function"), [(ll.MeanAveragePrecision, ll.mean_average_precision), (ll.AUROC, ll.auroc)]
)
def test_batches_of_different_shapes(stream, function, average):
    """Such as frames of videos of different lengths, or rows that come one by one."""
    scores, target = torch.rand(22, 4), (torch.rand(22, 4) < 0.4).to(torch.int8)
    target[2, 1] = -1
    metric = stream(average=average)
    metric.update(scores[:6].view(2, 3, 4), target[:6].view(2, 3, 4))
    metric.update(scores[6:16].view(2, 5, 4), target[6:16].view(2, 5, 4))
    metric.update(scores[:0].view(3, 0, 4), target[:0].view(3, 0, 4))
    metric.update(scores[16:20], target[16:20])
    rest = 20
    if stream is ll.MeanAveragePrecision:  # one-dimensional scores are items of one problem for the other
        metric.update(scores[20], target[20])
        metric.update(scores[21], target[21])
        rest = 22
    torch.testing.assert_close(metric.compute(), function(scores[:rest], target[:rest], average=average))


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: ll.RecallAtK(0), ValueError, "RecallAtK: `k` must be a whole number of at least 1, got 0."),
        (
            lambda: ll.RecallAtK(torch.tensor(1)),
            TypeError,
            "RecallAtK: `k` must be a number or a list of numbers, got a te",
        ),
        (lambda: ll.RecallAtK(1, empty="x"), ValueError, "RecallAtK: `empty` must be one of"),
        (
            lambda: ll.RecallAtK(1, average="macro"),
            ValueError,
            "`n_classes` must be given with average='macro', got None.",
        ),
        (lambda: ll.MeanAveragePrecision(per="x"), ValueError, "MeanAveragePrecision: `per` must be one of"),
        (lambda: ll.MeanAveragePrecision(thresholds=9), ValueError, "`n_classes` must be given with `thresholds`"),
        (
            lambda: ll.MeanAveragePrecision(thresholds=1, n_classes=2),
            ValueError,
            "`thresholds` must be None or a whole",
        ),
        (
            lambda: ll.MeanAveragePrecision(per="sample", average="none"),
            ValueError,
            "`average` must be 'macro' with per",
        ),
        (lambda: ll.LabelCalibrationError(per="class"), ValueError, "`n_classes` must be given with per='class'"),
        (
            lambda: ll.AUROC(thresholds=9, n_classes=2).update(torch.rand(4, 3), torch.ones(4, 3)),
            ValueError,
            "AUROC: `scores` must have n_classes=2 classes, got 3.",
        ),
        (
            lambda: ll.LabelCalibrationError(per="class", n_classes=1).update(torch.rand(4, 3), torch.ones(4, 3)),
            ValueError,
            "LabelCalibrationError: `scores` must have n_classes=1 classes, got 3.",
        ),
        (
            lambda: ll.RecallAtK(1, average="macro", n_classes=2).update(torch.rand(4, 3), torch.ones(4, 3)),
            ValueError,
            "RecallAtK: `scores` must have n_classes=2 classes, got 3.",
        ),
        (
            lambda: ll.RecallAtK([1, 2], average="macro", n_classes=2).update(
                torch.rand(1, 2), torch.tensor([[0]]), indices=torch.tensor([[2, 1]])
            ),
            ValueError,
            "RecallAtK: `indices` must hold classes below n_classes=2, got 2.",
        ),
        (
            lambda: ll.RecallAtK(1, average="macro", n_classes=2).update(
                torch.rand(1, 2), ll.label_lists(torch.tensor([[0, 5]])), indices=torch.tensor([[0, 1]])
            ),
            ValueError,
            "RecallAtK: `target` must hold classes below n_classes=2, got 5.",
        ),
        (
            lambda: ll.MeanMaxConfidence().update([0.5]),
            TypeError,
            "MeanMaxConfidence: `scores` must be a tensor, got list. Use torch.as_tensor.",
        ),
    ],
)
def test_messages(make, error, text):
    with pytest.raises(error, match=text):
        make()
