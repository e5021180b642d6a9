"""Streaming on trees and graphs: two halves of a stream, in any order, equal the whole."""

import pytest
import torch

import lastlayer as ll

TREE = ll.LabelTree.from_parents([4, 4, 5, 5, 6, 6, -1])


@pytest.mark.parametrize("empty", ["skip", "zero", "one"])
def test_tree(empty):
    index = torch.randint(-1, 7, (30, 2))
    target = (torch.rand(30, 4) < 0.3).long()
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
