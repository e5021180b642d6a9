"""Precision, recall, F1, Jaccard index, Hamming loss and exact match of label sets, against scikit-learn."""

import itertools
import warnings

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from tools import DEVICE
from torch import Tensor

import lastlayer as ll
from lastlayer import metrics
from lastlayer.metrics import _ranking

QUOTIENTS = {
    metrics.label_set_precision: sk.precision_score,
    metrics.label_set_recall: sk.recall_score,
    metrics.label_set_f1: sk.f1_score,
    metrics.label_set_jaccard: sk.jaccard_score,
}
ROWS, N = 30, 7


def data() -> tuple[Tensor, Tensor]:
    """Boolean sets: rows 0 and 1 have no labels, rows 1 and 2 no predictions; the same for classes."""
    predicted, target = torch.rand(ROWS, N, device=DEVICE) < 0.4, torch.rand(ROWS, N, device=DEVICE) < 0.3
    target[:2], predicted[1:3] = False, False
    target[:, :2], predicted[:, 1:3] = False, False
    return predicted, target


def lists(hot: Tensor, width: int = 9) -> Tensor:
    """Index lists of Boolean sets, in no order, with repeats and padding."""
    index = torch.where(hot, torch.arange(N, device=hot.device), -1)
    index = torch.cat([index, index[:, :4]], 1)
    order = index.argsort(1, descending=True)[:, :width]
    return index.gather(1, order)[:, torch.randperm(width, device=hot.device)]


def forms(predicted: Tensor, target: Tensor):
    """The same sets in every pair of forms."""
    given = {
        "lists": (lists(predicted), {}),
        "int32": (lists(predicted).int(), {}),
        "marked": (ll.label_lists(lists(predicted, N)), {}),
        "decoded": ((lists(predicted), None), {}),
        "bool": (predicted, {}),
        "int8": (predicted.to(torch.int8), {}),
        "scores": (predicted * 0.5 + 0.3, {"threshold": 0.5}),
        "scores, one threshold per class": (predicted * 1.0, {"threshold": torch.linspace(0.1, 0.9, N)}),
    }
    targets = {
        "bool": target,
        "float": target.float(),
        "lists": lists(target, 8),
        "marked": ll.label_lists(lists(target, N)),
    }
    for (a, (p, options)), (b, t) in itertools.product(given.items(), targets.items()):
        yield f"{a} and {b}", p, t, options


# 1 worked by hand


def test_hand_worked():
    predicted = torch.tensor([[0, 1], [2, -1], [-1, -1]])
    target = torch.tensor([[1, 2, 3], [2, -1, -1], [0, -1, -1]])
    values = {
        metrics.label_set_precision: [1 / 2, 1, float("nan")],
        metrics.label_set_recall: [1 / 3, 1, 0],
        metrics.label_set_f1: [2 / 5, 1, 0],
        metrics.label_set_jaccard: [1 / 4, 1, 0],
        metrics.exact_match: [0, 1, 0],
    }
    for metric, expected in values.items():
        assert metric(predicted, target, reduction="none").tolist() == pytest.approx(expected, nan_ok=True)
        assert metric(predicted, target).item() == pytest.approx(np.nanmean(expected))
    assert metrics.hamming_loss(predicted, target, n_classes=4, reduction="none").tolist() == [0.75, 0, 0.25]
    assert metrics.label_set_f1(predicted, target, average="micro").item() == pytest.approx(4 / 8)


# 2 against scikit-learn


@pytest.mark.parametrize("metric", list(QUOTIENTS))
@pytest.mark.parametrize("average", ["samples", "macro", "micro", "weighted", "none"])
def test_agrees_with_scikit_learn(metric, average):
    predicted, target = data()
    name = None if average == "none" else average
    for empty, instead in (("zero", 0), ("one", 1), ("skip", np.nan)):
        if metric is metrics.label_set_jaccard and empty == "skip":
            continue  # scikit-learn has no such policy for it
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = QUOTIENTS[metric](target.cpu(), predicted.cpu(), average=name, zero_division=instead)
        for form, p, t, options in forms(predicted, target):
            found = metric(p, t, average=average, empty=empty, n_classes=N, **options)
            assert found.tolist() == pytest.approx(np.asarray(expected).tolist(), nan_ok=True), f"{form} {empty}"


def test_hamming_loss_and_exact_match_agree_with_scikit_learn():
    predicted, target = data()
    predicted[5:9] = target[5:9]
    for _, p, t, options in forms(predicted, target):
        expected = sk.hamming_loss(target.cpu(), predicted.cpu())
        assert metrics.hamming_loss(p, t, n_classes=N, **options).item() == pytest.approx(expected)
        expected = sk.accuracy_score(target.cpu(), predicted.cpu())
        assert metrics.exact_match(p, t, **options).item() == pytest.approx(expected)


def test_one_class_per_row():
    predicted, _ = data()
    target = torch.randint(N, (ROWS,), device=DEVICE)
    hot = torch.nn.functional.one_hot(target, N).bool()
    for metric in QUOTIENTS:
        for p in (predicted, lists(predicted)):
            torch.testing.assert_close(metric(p, target), metric(predicted, hot))


# 3 laws


def test_unknown_labels_do_not_count():
    """Unknown entries change nothing, whatever is predicted there; a row of unknown entries has neither."""
    predicted, target = data()
    unknown = torch.rand(ROWS, N, device=DEVICE) < 0.3
    unknown[4] = True
    marked = torch.where(unknown, -1, target.to(torch.int8))
    for p in (predicted, lists(predicted), predicted | unknown, lists(predicted | unknown)):
        for metric in QUOTIENTS:
            for average in ("samples", "macro", "micro"):
                expected = metric(predicted & ~unknown, target & ~unknown, average=average)
                torch.testing.assert_close(metric(p, marked, average=average), expected)
        wrong = ((predicted != target) & ~unknown).sum()
        torch.testing.assert_close(metrics.hamming_loss(p, marked), wrong / (~unknown).sum())
        right = ((predicted == target) | unknown).all(1)
        torch.testing.assert_close(metrics.exact_match(p, marked), right[~unknown.all(1)].float().mean())


@pytest.mark.parametrize("metric", [*QUOTIENTS, metrics.hamming_loss, metrics.exact_match])
def test_any_batch_shape_and_chunks(metric, monkeypatch):
    predicted, target = data()
    options = {"n_classes": N} if metric is metrics.hamming_loss else {}
    rows = metric(predicted, target, reduction="none")
    assert rows.shape == (ROWS,)
    for p, t in ((predicted, target), (lists(predicted), lists(target, 8))):
        shaped = metric(p.view(2, 15, -1), t.view(2, 15, -1), reduction="none", **options)
        torch.testing.assert_close(shaped.flatten(), rows, equal_nan=True)
        with monkeypatch.context() as patch:
            patch.setattr(_ranking, "BUDGET", 20)
            torch.testing.assert_close(metric(p, t, **options), metric(predicted, target))
        assert metric(p[:0], t[:0], **options).item() == 0
    assert metric(torch.zeros(2, 0, dtype=torch.bool), torch.zeros(2, 0)).item() == 0


def test_a_decoder_and_its_metric_agree_with_metrics_at_k():
    scores, target = torch.rand(ROWS, N, device=DEVICE), data()[1]
    found = ll.decode_top_k(scores, 3)
    torch.testing.assert_close(metrics.label_set_recall(found, target), ll.recall_at_k(scores, target, 3))
    micro = ll.f1_at_k(scores, target, 3, average="micro")
    torch.testing.assert_close(metrics.label_set_f1(found, target, average="micro"), micro)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda p, t: metrics.label_set_f1([1], t), TypeError, "label_set_f1: `predicted` must be a tensor, got list"),
        (
            lambda p, t: metrics.label_set_f1(p.float(), t),
            TypeError,
            r"label_set_f1: `threshold` must be given where `predicted` holds scores \(torch.float32\), got None",
        ),
        (
            lambda p, t: metrics.label_set_f1(p, t, threshold=0.5),
            ValueError,
            r"`threshold` must be left out for label sets of torch.bool, got 0.5",
        ),
        (
            lambda p, t: metrics.label_set_f1(p.float(), t, threshold=torch.ones(3)),
            ValueError,
            r"`threshold` must be one number or one per class \(7\), got shape \(3,\)",
        ),
        (
            lambda p, t: metrics.label_set_f1(lists(p), lists(t), average="macro"),
            ValueError,
            "label_set_f1: `n_classes` must be given where both label sets and target are lists, got None",
        ),
        (
            lambda p, t: metrics.hamming_loss(lists(p), lists(t)),
            ValueError,
            "hamming_loss: `n_classes` must be given where both",
        ),
        (
            lambda p, t: metrics.hamming_loss(p, t, n_classes=9),
            ValueError,
            "hamming_loss: `n_classes` must be the number of columns, 7, got 9",
        ),
        (
            lambda p, t: metrics.label_set_f1(lists(p) + 3, lists(t), average="macro", n_classes=N),
            ValueError,
            "label_set_f1: `predicted` must hold classes below n_classes=7, got",
        ),
        (
            lambda p, t: metrics.label_set_f1(p, t, average="macro", reduction="none"),
            ValueError,
            "`average` must be 'samples' with reduction='none', got 'macro'",
        ),
        (lambda p, t: metrics.label_set_f1(p, t[:3]), ValueError, "label_set_f1: `target` must have shape"),
        (
            lambda p, t: metrics.LabelSetF1(average="macro"),
            ValueError,
            "LabelSetF1: `n_classes` must be given with average='macro', got None",
        ),
    ],
)
def test_messages(call, error, text):
    with pytest.raises(error, match=text):
        call(*(t.cpu() for t in data()))  # on a GPU indices are not read, which would wait for it
