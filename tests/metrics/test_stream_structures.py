"""Streaming on trees, graphs, rotations and label sets: two halves of a stream, in any order, equal the whole."""

import math

import pytest
import torch

import lastlayer as ll

torchmetrics = pytest.importorskip("torchmetrics")

TREE = ll.LabelTree.from_parents([4, 4, 5, 5, 6, 6, -1])


@pytest.mark.parametrize("empty", ["skip", "zero", "one"])
def test_tree(empty):
    index = torch.randint(-1, 7, (30, 2))
    target = (torch.rand(30, 4) < 0.3).to(torch.int8)
    for metric, function in (
        (ll.TreeAccuracy(TREE, empty=empty), ll.tree_accuracy),
        (ll.TreeSpecificity(TREE, empty=empty), ll.tree_specificity),
    ):
        for part in (slice(20, 30), slice(0, 1), slice(1, 20)):
            metric.update(index[part], target[part])
        torch.testing.assert_close(metric.compute(), function(index, target, TREE, empty=empty).float())
    loose = ll.TreeSpecificity(TREE, hits_only=False)
    loose.update(index, target)
    torch.testing.assert_close(loose.compute(), ll.tree_specificity(index, target, TREE, hits_only=False).float())


@pytest.mark.parametrize("empty", ["skip", "zero", "one"])
@pytest.mark.parametrize("k", [3, [1, 5, 10]])
def test_graph(k, empty):
    index, target = torch.randint(0, 3, (20, 10, 3)), torch.randint(0, 3, (20, 4, 3))
    target[:6] = -1
    boxes, labels = torch.tensor([[0, 0, 9, 9], [1, 0, 9, 9], [30, 30, 40, 40]]), torch.tensor([0, 0, 1])
    plain = ll.GraphRecallAtK(k, empty=empty)
    mean = ll.GraphMeanRecallAtK(k, 4, empty=empty, average="none")
    for metric in (plain, mean):
        for part in (slice(8, 20), slice(0, 8)):
            metric.update(index[part], target[part], boxes, labels)
    places = {"boxes": boxes, "labels": labels, "empty": empty}
    torch.testing.assert_close(plain.compute(), ll.graph_recall_at_k(index, target, k, **places).float())
    expected = ll.graph_mean_recall_at_k(index, target, k, n_predicates=4, average="none", **places).float()
    torch.testing.assert_close(mean.compute(), expected, equal_nan=True)


@pytest.mark.parametrize("by_box", [True, False])
def test_zero_shot(by_box):
    index, target = torch.randint(0, 3, (20, 10, 3)), torch.randint(0, 3, (20, 4, 3))
    labels, seen = torch.tensor([0, 0, 1]), torch.tensor([[0, 0, 1], [0, 1, 2], [1, 0, 0]])
    boxes = torch.tensor([[0, 0, 9, 9], [1, 0, 9, 9], [30, 30, 40, 40]]) if by_box else None
    metric = ll.GraphZeroShotRecallAtK([1, 5], seen)
    for part in (slice(8, 20), slice(0, 8)):
        metric.update(index[part], target[part], labels, boxes)
    whole = ll.graph_zero_shot_recall_at_k(index, target, [1, 5], seen=seen, labels=labels, boxes=boxes)
    assert 0 < whole[0] < whole[1] < 1
    torch.testing.assert_close(metric.compute(), whole.float())


@pytest.mark.parametrize("n", [1, 30, 31])
@pytest.mark.parametrize("degrees", [False, True])
@pytest.mark.parametrize(
    ("stream", "function"), [("RotationError", "rotation_error"), ("AngularError", "angular_error")]
)
def test_angles(n, degrees, stream, function):
    a, b = torch.randn(n, 4), torch.randn(n, 4)
    for reduction in ("mean", "median"):
        metrics = [getattr(ll, stream)(reduction, degrees=degrees)]
        bins = 100
        if reduction == "median":
            metrics.append(getattr(ll, stream)(degrees=degrees, bins=bins))
        whole = getattr(ll, function)(a, b, degrees=degrees, reduction=reduction)
        for metric in metrics:
            for part in (slice(20, n), slice(0, 0), slice(0, 20)):
                metric.update(a[part], b[part])
            half = (180 if degrees else math.pi) / bins / 2 if getattr(metric, "bins", None) else 0
            assert abs(metric.compute() - whole) <= half + 1e-5 * whole
            other = metric.clone()
            metric.merge_state(other)
            assert abs(metric.compute() - whole) <= half + 1e-5 * whole


def test_the_angle_of_a_half_turn_is_in_the_last_bin():
    metric = ll.RotationError(degrees=True, bins=2)
    metric.update(torch.tensor([[0.0, 1.0, 0.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    assert metric.compute().item() == pytest.approx(135.0)


def test_an_angle_that_is_not_a_number_is_in_the_last_bin():
    a, b = torch.tensor([[1.0, 0, 0, 0]]).expand(3, 4).clone(), torch.tensor([[1.0, 0, 0, 0]]).expand(3, 4)
    a[1] = torch.nan
    metric = ll.RotationError(bins=10)
    metric.update(a, b)
    assert metric.compute().item() == pytest.approx(math.pi / 20)
    metric.update(a[[1, 1]], b[:2])
    assert metric.compute().item() == pytest.approx(math.pi * 19 / 20)


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_angles_before_any_row():
    for metric in (ll.RotationError(), ll.RotationError("mean"), ll.RotationError(bins=5)):
        assert metric.compute() == 0


def label_sets(n=40):
    scores, target = torch.rand(n, 4), (torch.rand(n, 4) < 0.4).to(torch.int8)
    scores[3, 1] = torch.nan
    target[:3], target[5], target[6, :2] = 0, -1, -1
    return scores, target


@pytest.mark.parametrize(
    "options", [{}, {"k": 2, "metric": "micro_f1"}, {"tree": TREE, "metric": "macro_f1", "top": 3}]
)
def test_label_set_errors(options):
    scores, target = label_sets()
    metric = ll.LabelSetErrorsMetric(**options)
    for part in (slice(0, 25), slice(0, 0), slice(25, 40)):
        metric.update(scores[part], target[part])
    whole = ll.label_set_errors(scores, target, options.pop("k", None), **options)
    assert metric.analysis() == whole
    result = dict(metric.compute())
    assert result.pop("value").item() == pytest.approx(whole.value)
    assert {name: round(v.item(), 5) for name, v in result.items()} == {k.name: round(k.gain, 5) for k in whole.kinds}
    collection = torchmetrics.MetricCollection({"errors": metric.clone()})
    assert collection.compute()["value"].item() == pytest.approx(whole.value)


def test_label_set_errors_of_decoded_lists():
    scores, target = label_sets()
    metric = ll.LabelSetErrorsMetric(3)
    for part, k in ((slice(0, 25), 2), (slice(25, 40), 1)):  # lists of different widths
        metric.update(scores[part], target[part], ll.decode_top_k(scores[part], k).index)
    size = torch.tensor([2] * 25 + [1] * 15)
    assert metric.analysis() == ll.label_set_errors(scores, target, predicted=ll.decode_top_k(scores, size).index)


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_label_set_errors_before_any_row():
    assert ll.LabelSetErrorsMetric().compute() == {}
    with pytest.raises(ValueError, match="LabelSetErrorsMetric: `analysis` must be called after `update`, got no rows"):
        ll.LabelSetErrorsMetric().analysis()


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: ll.RotationError("none"), ValueError, "RotationError: `reduction` must be one of 'mean', 'median'"),
        (lambda: ll.RotationError("mean", bins=3), TypeError, "`bins` must be None, or a whole number for the median"),
        (lambda: ll.AngularError(bins=0), ValueError, "AngularError: `bins` must be at least 1, got 0."),
        (lambda: ll.LabelSetErrorsMetric(metric="x"), ValueError, "LabelSetErrorsMetric: `metric` must be one of 'f1'"),
        (
            lambda: ll.GraphZeroShotRecallAtK(1, torch.zeros(3, dtype=torch.long)),
            ValueError,
            r"GraphZeroShotRecallAtK: `seen` must have shape \(n, 3\), got \(3,\)",
        ),
    ],
)
def test_messages(make, error, text):
    with pytest.raises(error, match=text):
        make()
