"""Decoders, trees and their metrics give the same on a GPU as on the CPU."""

import pytest
import torch

import lastlayer as ll

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def moved(value):
    return value.cuda() if isinstance(value, torch.Tensor) else value


def same(function, *inputs, **options):
    expected = function(*inputs, **options)
    found = function(*map(moved, inputs), **{name: moved(value) for name, value in options.items()})
    for a, b in zip(found, expected, strict=True) if isinstance(expected, tuple) else [(found, expected)]:
        if isinstance(b, torch.Tensor):
            assert a.is_cuda
            torch.testing.assert_close(a.cpu(), b)
        else:
            assert a == b


def test_decoders():
    scores, mask = torch.rand(20, 50).round(decimals=1), torch.rand(50) < 0.8
    target = (torch.rand(20, 50) < 0.2).to(torch.int8)
    scores[0, 3] = torch.nan
    for k in (5, torch.arange(20), "auto"):
        same(ll.decode_top_k, scores, k, mask=mask)
    same(ll.decode_threshold, scores, torch.rand(50), at_least=2, at_most=9)
    for objective, value in (("f1", None), ("precision", 0.4), ("recall", 0.7)):
        same(ll.tune_thresholds, scores, target, objective=objective, value=value)
    same(ll.decode_reject, scores, 0.9, by="log_density")
    same(ll.tune_reject, scores, 0.3)
    pairs, ptr = torch.randint(0, 8, (20, 2)), torch.tensor([0, 5, 5, 20])
    for constrained in (True, False):
        objects = torch.rand(8)
        same(ll.decode_graph, scores, pairs, 7, ptr=ptr, constrained=constrained, object_scores=objects, background=0)


def test_trees():
    tree = ll.LabelTree.from_prototypes(torch.randn(30, 4))
    p, target = torch.randn(40, 30, dtype=torch.float64).softmax(-1), torch.randint(0, 30, (40,))
    for rule in ("sum", "negation"):
        same(tree.probabilities, p, rule)
        same(tree.log_probabilities, p.log(), rule)
        same(ll.decode_tree, p, tree, method="maxk_rew", k=3, theta=0.2, rule=rule)
    same(ll.decode_tree, p, tree, method="darts", lamb=0.3)
    same(ll.tune_darts, p, target, tree, accuracy=0.9)
    index = ll.decode_tree(p, tree, theta=0.4).index
    same(ll.tree_accuracy, index, target, tree)
    same(ll.tree_specificity, index, target, tree)


def test_graphs_and_errors():
    index, target = torch.randint(0, 3, (6, 9, 3)), torch.randint(0, 3, (6, 4, 3))
    places = {"boxes": torch.tensor([[0, 0, 9, 9], [1, 0, 9, 9], [30, 30, 40, 40]]), "labels": torch.tensor([0, 0, 1])}
    same(ll.graph_recall_at_k, index, target, [1, 5], **places)
    same(ll.graph_mean_recall_at_k, index, target, 5, n_predicates=3, **places)
    same(ll.graph_zero_shot_recall_at_k, index, target, 5, seen=torch.tensor([[0, 0, 1]]), **places)
    scores, labels = torch.rand(30, 12, dtype=torch.float64), (torch.rand(30, 12) < 0.3).to(torch.int8)
    found, expected = ll.label_set_errors(scores.cuda(), labels.cuda()), ll.label_set_errors(scores, labels)
    assert (found.confusions, found.cooccurrence) == (expected.confusions, expected.cooccurrence)
    for a, b in zip(found.kinds, expected.kinds, strict=True):
        assert (a.name, a.false_alarms, a.misses) == (b.name, b.false_alarms, b.misses)
        assert abs(a.gain - b.gain) < 1e-12  # sums in another order
