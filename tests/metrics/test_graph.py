"""Recall of relations: toy graphs worked out by hand, and an evaluator written as loops over sets."""

import itertools

import pytest
import torch

from lastlayer import decode_graph, graph_mean_recall_at_k, graph_recall_at_k, graph_zero_shot_recall_at_k

BOXES = torch.tensor([[0, 0, 9, 9], [20, 0, 29, 9], [0, 0, 9, 11], [40, 40, 49, 49]])
LABELS = torch.tensor([1, 2, 1, 2])
PLACES = {"boxes": BOXES, "labels": LABELS}


def recall(predicted, target, k=20, **places):
    return graph_recall_at_k(torch.tensor(predicted), torch.tensor(target), k, **(places or PLACES)).item()


def test_duplicates_count_twice():
    assert recall([[0, 1, 7]], [[0, 1, 7], [0, 1, 7], [1, 0, 3]]) == pytest.approx(2 / 3)


def test_two_predicates_on_one_edge():
    target = torch.tensor([[0, 1, 0], [0, 1, 1]])
    scores, pairs = torch.tensor([[0.9, 0.8, 0.1], [0.3, 0.2, 0.1]]), torch.tensor([[0, 1], [1, 0]])
    for constrained, value in ((True, 0.5), (False, 1.0)):
        index = decode_graph(scores, pairs, 20, constrained=constrained)
        assert graph_recall_at_k(index, target, 20, **PLACES).item() == value


def test_another_box_of_the_class_is_a_hit_if_it_overlaps():
    assert recall([[2, 1, 7]], [[0, 1, 7]]) == 1  # box 2 is box 0 and two rows more: IoU 100/120
    assert recall([[0, 3, 7]], [[0, 1, 7]]) == 0  # box 3 is elsewhere
    same = {"boxes": BOXES, "labels": torch.tensor([1, 2, 3, 2])}
    assert recall([[2, 1, 7]], [[0, 1, 7]], **same) == 0  # and of another class


def test_overlap_counts_pixels_inclusively():
    # 10 x 10 against 10 x 5 inclusive pixels: IoU 0.5 exactly; without the +1 it would be 4/9.
    boxes = torch.tensor([[0, 0, 9, 9], [0, 0, 9, 4], [50, 50, 60, 60]])
    places = {"boxes": boxes, "labels": torch.tensor([1, 1, 2])}
    assert recall([[1, 2, 0]], [[0, 2, 0]], **places) == 1
    assert recall([[1, 2, 0]], [[0, 2, 0]], **places, iou=0.51) == 0


def test_one_prediction_may_find_several_and_only_the_first_k_count():
    target = [[0, 1, 7], [2, 1, 7]]  # both boxes of class 1 overlap
    assert recall([[0, 1, 7]], target) == 1
    ranked = [[1, 0, 7], [0, 1, 7]]
    assert recall(ranked, target, 1) == 0
    assert recall(ranked, target, 2) == 1
    several = graph_recall_at_k(torch.tensor(ranked), torch.tensor(target), [1, 2, 100], **PLACES)
    assert several.tolist() == [0, 1, 1]


def test_mean_is_over_images_and_no_prediction_is_zero():
    index = torch.tensor([[[0, 1, 7]], [[-1, -1, -1]], [[0, 1, 7]]])
    gone = [-1, -1, -1]
    target = torch.tensor([[[0, 1, 7], gone, gone], [[0, 1, 7], [1, 0, 7], [1, 0, 2]], [gone, gone, gone]])
    assert graph_recall_at_k(index, target, 20, **PLACES).item() == 0.5
    for empty, value in (("zero", 1 / 3), ("one", 2 / 3)):
        assert graph_recall_at_k(index, target, 20, **PLACES, empty=empty).item() == pytest.approx(value)
    none = torch.empty(0, 3, dtype=torch.long)
    assert graph_recall_at_k(none, torch.tensor([[0, 1, 7]]), 20, **PLACES).item() == 0
    assert graph_recall_at_k(none, none, 20, **PLACES).item() == 0
    assert graph_recall_at_k(none[None][:0], none[None][:0], 20, **PLACES).item() == 0


def box_overlap(a, b):
    w = min(a[2], b[2]) - max(a[0], b[0]) + 1
    h = min(a[3], b[3]) - max(a[1], b[1]) + 1
    shared = max(w, 0) * max(h, 0)
    return shared / ((a[2] - a[0] + 1) * (a[3] - a[1] + 1) + (b[2] - b[0] + 1) * (b[3] - b[1] + 1) - shared)


def evaluator(predicted, target, k, boxes, labels, true_boxes, true_labels):
    """The rows of one image that the first k predictions find, by the book."""
    matched = set()
    for (s, o, r), (row, (ts, to, tr)) in itertools.product(predicted[:k], enumerate(target)):
        same = (labels[s], labels[o], r) == (true_labels[ts], true_labels[to], tr)
        near = box_overlap(boxes[s], true_boxes[ts]) >= 0.5 and box_overlap(boxes[o], true_boxes[to]) >= 0.5
        if same and near:
            matched.add(row)
    return matched


def random_graphs(n_images=12, n_boxes=6, g=5, m=15):
    corner = torch.randint(0, 4, (n_boxes, 2))
    boxes = torch.cat([corner, corner + torch.randint(3, 8, (n_boxes, 2))], -1)
    jitter = boxes + torch.randint(-1, 2, boxes.shape)
    labels = torch.randint(0, 2, (n_boxes,))
    index = torch.cat([torch.randint(0, n_boxes, (n_images, m, 2)), torch.randint(0, 3, (n_images, m, 1))], -1)
    target = torch.cat([torch.randint(0, n_boxes, (n_images, g, 2)), torch.randint(0, 3, (n_images, g, 1))], -1)
    index[torch.rand(n_images, m) < 0.2] = -1
    target[torch.rand(n_images, g) < 0.3] = -1
    target[3] = -1
    return index, target, boxes, labels, jitter, labels


def lists(x):
    return [[r for r in image if r[0] >= 0] for image in x.tolist()]


def test_agrees_with_the_evaluator():
    for _ in range(5):
        index, target, *places = random_graphs()
        # Padding in the middle keeps its place, as a prediction that finds nothing.
        names = dict(zip(("boxes", "labels", "target_boxes", "target_labels"), places, strict=True))
        plain_places = [p.tolist() for p in places]
        guesses = [[r if r[0] >= 0 else [0, 0, 99] for r in image] for image in index.tolist()]
        truths = lists(target)
        cuts = [1, 4, 10, 50]
        shares, per_predicate, zero = [], {r: [] for r in range(3)}, []
        seen = torch.tensor([[0, 0, 0], [0, 1, 1], [1, 1, 2]])
        for guess, truth in zip(guesses, truths, strict=True):
            if not truth:
                continue
            found = [evaluator(guess, truth, k, *plain_places) for k in cuts]
            shares.append([len(f) / len(truth) for f in found])
            for r in {t[2] for t in truth}:
                rows = {i for i, t in enumerate(truth) if t[2] == r}
                per_predicate[r].append(len(rows & found[2]) / len(rows))
            classes = places[3].tolist()
            new = {i for i, (s, o, r) in enumerate(truth) if [classes[s], classes[o], r] not in seen.tolist()}
            if new:
                zero.append(len(new & found[2]) / len(new))
        value = graph_recall_at_k(index, target, cuts, **names)
        torch.testing.assert_close(value, torch.tensor(shares, dtype=torch.float64).mean(0))
        by_predicate = [sum(v) / len(v) for v in per_predicate.values()]
        mean = graph_mean_recall_at_k(index, target, 10, n_predicates=3, **names)
        assert mean.item() == pytest.approx(sum(by_predicate) / 3)
        each = graph_mean_recall_at_k(index, target, [10], n_predicates=4, average="none", **names)
        assert each[0, :3].tolist() == pytest.approx(by_predicate)
        assert each[0, 3].isnan()
        assert graph_mean_recall_at_k(index, target, 10, n_predicates=4, empty="zero", **names).item() == pytest.approx(
            sum(by_predicate) / 4
        )
        found = graph_zero_shot_recall_at_k(index, target, 10, seen=seen, **names)
        assert found.item() == pytest.approx(sum(zero) / len(zero))


def test_laws():
    index, target, *places = random_graphs()
    names = dict(zip(("boxes", "labels", "target_boxes", "target_labels"), places, strict=True))
    values = graph_recall_at_k(index, target, [1, 2, 5, 15, 99], **names)
    assert (values.diff() >= 0).all()
    assert values[3] == values[4]
    order = torch.randperm(12)
    assert torch.equal(graph_recall_at_k(index[order], target[order], [1, 2, 5, 15, 99], **names), values)
    perfect = {"boxes": places[0], "labels": places[1]}
    assert graph_recall_at_k(target, target, 5, **perfect).item() == 1
    assert graph_mean_recall_at_k(target, target, 5, n_predicates=3, **perfect).item() == 1
    assert graph_recall_at_k(target, target, 5).item() == 1
    seen = torch.tensor([[0, 0, 0]])
    assert graph_zero_shot_recall_at_k(target, target, 5, seen=seen, labels=places[1]).item() == 1


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda t: graph_recall_at_k(t.float(), t, 1),
            TypeError,
            "graph_recall_at_k: `index` must be a tensor of an int",
        ),
        (lambda t: graph_recall_at_k(t[:, :2], t, 1), ValueError, r"`index` must hold relations .* got shape \(2, 2\)"),
        (lambda t: graph_recall_at_k(t[None], t, 1), ValueError, "`index` and `target` must have the same images"),
        (lambda t: graph_recall_at_k(t, t, 1, boxes=BOXES), ValueError, "`boxes` and `labels` must be given together"),
        (
            lambda t: graph_recall_at_k(t, t, 1, boxes=BOXES[:2], labels=LABELS),
            ValueError,
            r"`boxes` must have shape \(n_boxes, 4\) and `labels` \(n_boxes,\), got \(2, 4\) and \(4,\)",
        ),
        (
            lambda t: graph_recall_at_k(t + 4, t, 1, boxes=BOXES, labels=LABELS),
            ValueError,
            "graph_recall_at_k: `index` must hold boxes below n_boxes=4, got 5",
        ),
        (
            lambda t: graph_zero_shot_recall_at_k(t, t + 4, 1, seen=t, labels=LABELS),
            ValueError,
            "graph_zero_shot_recall_at_k: `target` must hold boxes below n_boxes=4, got 5",
        ),
        (lambda t: graph_recall_at_k(t, t, 0), ValueError, "`k` must be a whole number of at least 1, got 0"),
        (lambda t: graph_recall_at_k(t, t, 1, iou=2), ValueError, "`iou` must be between 0 and 1, got 2"),
        (lambda t: graph_recall_at_k(t, t, 1, empty="x"), ValueError, "`empty` must be one of 'skip', 'zero', 'one'"),
        (
            lambda t: graph_mean_recall_at_k(t, t, 1, n_predicates=0),
            ValueError,
            "`n_predicates` must be a positive int",
        ),
        (
            lambda t: graph_mean_recall_at_k(t, t, 1, n_predicates=2, average="micro"),
            ValueError,
            "`average` must be one of 'macro', 'none'",
        ),
        (
            lambda t: graph_zero_shot_recall_at_k(t, t, 1, seen=t[0], labels=LABELS),
            ValueError,
            r"`seen` must have shape \(n, 3\), got \(3,\)",
        ),
    ],
)
def test_messages(call, error, text):
    with pytest.raises(error, match=text):
        call(torch.tensor([[0, 1, 0], [1, 0, 1]]))


def test_a_predicate_that_does_not_exist_is_an_error():
    with pytest.raises(ValueError, match=r"`target` must hold predicates below n_predicates=3, got 7"):
        graph_mean_recall_at_k(torch.tensor([[0, 1, 7]]), torch.tensor([[0, 1, 7], [1, 0, 2]]), 5, n_predicates=3)
