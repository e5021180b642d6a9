"""Error analysis: each kind by hand, and the laws that make the prices mean something."""

import itertools
import json

import pytest
import torch

from lastlayer import Decoded, LabelTree, decode_threshold, decode_top_k, label_set_errors
from lastlayer.metrics.errors import error_kinds

TREE = LabelTree.from_dict({"pet": ["cat", "dog"], "car": ["van", "bus"]})


def kinds(found):
    return {kind.name: (kind.false_alarms, kind.misses) for kind in found.kinds if kind.false_alarms or kind.misses}


def one(scores, target, **options):
    return kinds(label_set_errors(torch.tensor([scores]), torch.tensor([target], dtype=torch.int8), **options))


def test_each_kind_by_hand():
    # A wrong label in place of the true one.
    assert one([0.9, 0.4, 0.1, 0.1], [0, 1, 0, 0]) == {"confusion": (1, 1)}
    assert one([0.9, 0.4, 0.1, 0.1], [0, 1, 0, 0], tree=TREE) == {"sibling confusion": (1, 1)}
    assert one([0.9, 0.1, 0.4, 0.1], [0, 0, 1, 0], tree=TREE) == {"other confusion": (1, 1)}
    # The ranking is right, the number is not.
    assert one([0.9, 0.8, 0.1, 0.1], [1, 0, 0, 0]) == {"count": (1, 0)}
    assert one([0.9, 0.4, 0.1, 0.1], [1, 1, 0, 0]) == {"count": (0, 1)}
    # The siblings are paired, the rest is not in the best three: with a threshold of its own it would be found.
    assert one([0.9, 0.2, 0.3, 0.1], [0, 1, 0, 1], tree=TREE) == {"sibling confusion": (1, 1), "threshold": (0, 1)}


def test_hallucination_miss_and_threshold():
    scores = torch.tensor([[0.9, 0.8], [0.7, 0.1], [0.6, 0.2]])
    # Class 0 is true only where its score is low: no threshold helps. Rows 0 and 1 predict it over the true class 1.
    found = label_set_errors(scores, torch.tensor([[0, 1], [0, 0], [1, 0]], dtype=torch.int8))
    assert kinds(found) == {"hallucination": (2, 0)}
    # A threshold of 0.65 for class 0 decides the last row right; the row has no label, so its count is not at fault.
    found = label_set_errors(scores, torch.tensor([[1, 1], [1, 0], [0, 0]], dtype=torch.int8))
    assert kinds(found) == {"threshold": (1, 0)}
    # A miss below another wrong class, which no threshold of its own finds without two false alarms.
    scores = torch.tensor([[0.9, 0.4, 0.1], [0.1, 0.1, 0.4], [0.9, 0.1, 0.4], [0.9, 0.1, 0.4], [0.1, 0.1, 0.9]])
    target = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 0, 0], [1, 0, 0], [0, 0, 1]], dtype=torch.int8)
    assert kinds(label_set_errors(scores, target)) == {"miss": (0, 1)}


def test_gains_by_hand():
    scores = torch.tensor([[0.9, 0.8, 0.1], [0.2, 0.7, 0.1]])
    found = label_set_errors(scores, torch.tensor([[1, 0, 0], [1, 0, 0]], dtype=torch.int8))
    gains = {kind.name: kind.gain for kind in found.kinds}
    assert found.value == pytest.approx((2 / 3 + 0) / 2)
    assert gains["confusion"] == pytest.approx((2 / 3 + 1) / 2 - found.value)
    assert gains["count"] == pytest.approx((1 + 0) / 2 - found.value)
    assert found.oracles["no false alarms"] == pytest.approx((1 + 0) / 2 - found.value)
    assert found.oracles["no misses"] == pytest.approx((2 / 3 + 2 / 3) / 2 - found.value)
    assert found.oracles["true count"] == pytest.approx(0.5 - found.value)
    assert [(c.truth, c.predicted, c.count) for c in found.confusions] == [(0, 1, 1)]


def random_case(rows=80, n=4):
    target = (torch.rand(rows, n) < 0.4).to(torch.int8)
    scores = (target + torch.randn(rows, n)).sigmoid().round(decimals=2)
    target[torch.rand(rows, n) < 0.1] = -1
    return scores, target


@pytest.mark.parametrize("metric", ["f1", "micro_f1", "macro_f1", "jaccard", "exact"])
@pytest.mark.parametrize("tree", [None, TREE], ids=["flat", "tree"])
def test_laws(metric, tree):
    scores, target = random_case()
    found = label_set_errors(scores, target, metric=metric, tree=tree)
    said, known = scores > 0.5, target >= 0
    wrong_said, missed = (said & (target == 0)).sum(), (~said & (target == 1)).sum()
    # Every error has one kind, and mending a kind never hurts.
    assert sum(kind.false_alarms for kind in found.kinds) == found.n_false_alarms == wrong_said
    assert sum(kind.misses for kind in found.kinds) == found.n_misses == missed
    assert found.n_right == (said & (target == 1)).sum()
    assert all(kind.gain >= 0 for kind in found.kinds)
    assert all((kind.gain > 0) <= (kind.false_alarms + kind.misses > 0) for kind in found.kinds)
    # As many confusions as false alarms and misses can be paired.
    paired = torch.minimum((said & (target == 0)).sum(-1), (~said & (target == 1)).sum(-1)).sum()
    confused = [kind for kind in found.kinds if "confusion" in kind.name]
    assert sum(kind.false_alarms for kind in confused) == sum(kind.misses for kind in confused) == paired
    assert sum(c.count for c in label_set_errors(scores, target, tree=tree, top=99).confusions) == paired
    # Right sets have no error, whatever is said of unknown labels.
    right = label_set_errors((target == 1).float() + (~known).float(), target, metric=metric, tree=tree)
    assert right.value == 1
    assert kinds(right) == {}
    both = found.oracles["no false alarms"] + found.value, found.oracles["no misses"] + found.value
    assert max(both) <= 1


def test_unknown_labels_change_nothing():
    scores, target = random_case()
    found = label_set_errors(scores, target)
    other = torch.where(target < 0, torch.rand_like(scores), scores)
    assert label_set_errors(other, target) == found


def test_rows_and_classes_can_be_permuted():
    scores, target = random_case()
    scores = scores + 1e-4 * torch.rand_like(scores)  # no ties
    rows, classes = torch.randperm(80), torch.randperm(4)
    plain = label_set_errors(scores, target)
    moved = label_set_errors(scores[rows][:, classes], target[rows][:, classes])
    assert kinds(moved) == kinds(plain)
    for a, b in zip(plain.kinds, moved.kinds, strict=True):
        assert a.gain == pytest.approx(b.gain)


def test_predictions_in_every_form_agree():
    scores, target = random_case()
    target = target.clamp(min=0)
    level = torch.tensor([0.3, 0.5, 0.6, 0.4])
    plain = label_set_errors(scores, target, threshold=level)
    assert label_set_errors(scores, target, predicted=decode_threshold(scores, level)) == plain
    lists = torch.where(target == 1, torch.arange(4), -1)
    lists = torch.cat([lists, torch.full((80, 1), -1)], -1)
    assert label_set_errors(scores, lists, threshold=level) == plain
    top = label_set_errors(scores, target, 2)
    assert label_set_errors(scores, target, predicted=decode_top_k(scores, 2).index) == top
    assert label_set_errors(scores, target, torch.full((80,), 2)) == top
    shaped = label_set_errors(scores.view(8, 10, 4), target.view(8, 10, 4), 2)
    assert shaped == top


def test_a_metric_of_ones_own():
    scores, target = random_case()

    def hamming(said, true, known):
        return (said == true)[known].double().mean()

    found = label_set_errors(scores, target, metric=hamming)
    assert found.metric == "hamming"
    total = found.value + sum(kind.gain for kind in found.kinds)
    assert total == pytest.approx(1)  # this one adds up


def test_cooccurrence_agrees_with_counting():
    scores, target = random_case()
    target = target.clamp(min=0)
    found = label_set_errors(scores, target, top=99).cooccurrence
    said = scores > 0.5
    for a, b in itertools.combinations(range(4), 2):
        expected = int((said[:, a] & said[:, b]).sum()), int(((target[:, a] == 1) & (target[:, b] == 1)).sum())
        pair = [(c.predicted, c.true) for c in found if (c.first, c.second) == (a, b)]
        assert pair == ([expected] if any(expected) else [])
    gaps = [abs(c.predicted - c.true) for c in found]
    assert gaps == sorted(gaps, reverse=True)


def test_plain_values():
    scores, target = random_case()
    found = label_set_errors(scores, target, tree=TREE)
    again = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert again["kinds"][0]["name"] == "sibling confusion"
    assert again["confusions"][0]["truth_name"] in TREE.class_names
    table = found.to_markdown()
    assert table.count("\n") == 2 + len(found.kinds)
    assert "| gain of f1 |" in table
    named = label_set_errors(scores, target, names=["a", "b", "c", "d"])
    assert {c.truth_name for c in named.confusions} <= set("abcd")


def test_edges():
    none = label_set_errors(torch.empty(0, 3), torch.empty(0, 3))
    assert (none.value, none.n_rows, kinds(none)) == (0, 0, {})
    unknown = label_set_errors(torch.rand(2, 3), torch.full((2, 3), -1.0))
    assert (unknown.value, kinds(unknown)) == (0, {})
    alone = label_set_errors(torch.rand(5), torch.tensor(2))
    assert alone.n_labels == 1
    single = label_set_errors(torch.tensor([[0.2], [0.9]]), torch.tensor([[1], [1]], dtype=torch.int8))
    assert kinds(single) == {"count": (0, 1)}
    broken = label_set_errors(torch.tensor([[torch.nan, 0.9]]), torch.tensor([[1, 0]], dtype=torch.int8))
    assert kinds(broken) == {"confusion": (1, 1)}
    empty = label_set_errors(torch.zeros(3, 2), torch.zeros(3, 2))
    assert (empty.value, kinds(empty)) == (1, {})  # rightly left empty


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"k": 1, "predicted": torch.zeros(2, 1).long()}, ValueError, "label_set_errors: `k` must be left out where"),
        (
            {"predicted": torch.zeros(2, 1)},
            TypeError,
            "`predicted` must be a tensor of an integer dtype, got torch.float32",
        ),
        ({"predicted": torch.zeros(3, 1).long()}, ValueError, r"`predicted` must have shape \(2, 'm'\).*got \(3, 1\)"),
        (
            {"predicted": torch.full((2, 1), 4)},
            ValueError,
            "label_set_errors: `predicted` must hold classes below n_classes=4, got 4",
        ),
        ({"k": [1, 2]}, TypeError, r"`k` must be one number, or a tensor with one per row, got \[1, 2\]"),
        (
            {"threshold": torch.zeros(3)},
            ValueError,
            r"`threshold` must be one number or one per class \(4\), got shape",
        ),
        ({"metric": "auc"}, ValueError, "`metric` must be one of 'f1', 'micro_f1'"),
        ({"names": ["a"]}, ValueError, r"`names` must hold one name per class \(4\), got 1"),
        (
            {"tree": LabelTree.from_parents([-1])},
            ValueError,
            "`tree` must have the 4 classes of `scores` as leaves, got 1",
        ),
    ],
)
def test_messages(options, error, text):
    with pytest.raises(error, match=text):
        label_set_errors(torch.rand(2, 4), torch.zeros(2, 4), **options)


def test_takes_a_pair_of_lists_and_scores():
    scores, target = random_case()
    decoded = decode_top_k(scores, 1)
    assert isinstance(decoded, Decoded)
    assert label_set_errors(scores, target, predicted=decoded) == label_set_errors(scores, target, 1)


def test_the_kinds_of_single_errors_add_up_to_the_counts():
    scores, target = random_case()
    found = label_set_errors(scores, target, 2)
    marked = error_kinds(scores, target, decode_top_k(scores, 2)[0])
    assert list(marked) == [kind.name for kind in found.kinds]
    assert [int(m.sum()) for m in marked.values()] == [kind.false_alarms + kind.misses for kind in found.kinds]
    assert int(torch.stack(list(marked.values())).sum(0).max()) == 1  # no error has two kinds
