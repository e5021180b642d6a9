"""Accuracy and specificity on a tree: by hand and against sets."""

import math

import pytest
import torch

import lastlayer as ll
from lastlayer import Decoded, LabelTree, tree_accuracy, tree_specificity

TREE = LabelTree.from_parents([4, 4, 5, 5, 6, 6, -1])


def plain(index, target, value):
    """Average over a row's nodes, then over rows; `value` sees the leaf set of a node and the labels."""
    rows = []
    for nodes, labels in zip(index, target, strict=True):
        nodes = [v for v in nodes if v >= 0]
        if labels:
            rows.append(sum(value(set(TREE.leaves_under(v)), labels) for v in nodes) / max(len(nodes), 1))
    return sum(rows) / len(rows)


def test_one_label_by_hand():
    index, target = torch.tensor([[0], [4], [5], [6]]), torch.tensor([0, 1, 1, 3])
    assert tree_accuracy(index, target, TREE).item() == 0.75
    assert tree_specificity(index, target, TREE).item() == pytest.approx((1 + 0.5 + 0 + 0) / 4)
    assert tree_specificity(index, target, TREE, hits_only=False).item() == pytest.approx((1 + 0.5 + 0.5 + 0) / 4)
    for same in (index.squeeze(-1), Decoded(index, torch.zeros(4, 1))):
        assert tree_accuracy(same, target, TREE).item() == 0.75
        assert tree_specificity(same, target, TREE).item() == pytest.approx(0.375)
    hot = torch.nn.functional.one_hot(target, 4).bool()
    assert tree_accuracy(index.squeeze(-1), hot, TREE).item() == 0.75
    assert tree_accuracy(torch.tensor([5, 0]), torch.tensor(0), TREE).item() == 0.5  # one row, two nodes


def test_several_labels_agree_with_sets():
    index = torch.randint(-1, 7, (40, 3))
    hot = (torch.rand(40, 4) < 0.4).to(torch.int8)
    target = [set(row.nonzero().flatten().tolist()) for row in hot]

    def gain(leaves, labels):
        return 1 - math.log(len(leaves)) / math.log(4)

    found = tree_accuracy(index, hot, TREE).item()
    assert found == pytest.approx(plain(index.tolist(), target, lambda a, b: bool(a & b)))
    found = tree_specificity(index, hot, TREE).item()
    assert found == pytest.approx(plain(index.tolist(), target, lambda a, b: bool(a & b) * gain(a, b)))
    found = tree_specificity(index, hot, TREE, hits_only=False).item()
    assert found == pytest.approx(plain(index.tolist(), target, gain))


def test_empty_rows_and_unknown_labels():
    index = torch.tensor([[0, 4], [-1, -1], [6, -1]])
    hot = torch.tensor([[1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.int8)
    assert tree_accuracy(index, hot, TREE).item() == 0.5  # right, nothing chosen, left out
    assert tree_accuracy(index, hot, TREE, empty="zero").item() == pytest.approx(1 / 3)
    assert tree_accuracy(index, hot, TREE, empty="one").item() == pytest.approx(2 / 3)
    unknown = torch.tensor([[1, 0, -1, 0]], dtype=torch.int8)
    assert tree_accuracy(torch.tensor([[0, 5]]), unknown, TREE).item() == 1  # 5 holds the unknown class 2
    assert tree_accuracy(torch.tensor([[0, 3]]), unknown, TREE).item() == 0.5
    assert tree_accuracy(torch.tensor([[2]]), unknown, TREE).item() == 0  # no row left
    assert tree_accuracy(torch.tensor([[2]]), unknown, TREE, empty="one").item() == 1
    assert tree_accuracy(torch.empty(0, 1, dtype=torch.long), torch.empty(0, 4), TREE).item() == 0


def test_perfect_classes_score_one():
    target = torch.tensor([[0, 1], [3, -1]])
    assert tree_accuracy(target, target, TREE).item() == 1
    assert tree_specificity(target, target, TREE).item() == 1


@pytest.mark.parametrize("function", [tree_accuracy, tree_specificity])
def test_messages(function):
    name, target = function.__name__, torch.tensor([0])
    with pytest.raises(TypeError, match=f"{name}: `index` must be a tensor of an integer dtype, got torch.float32"):
        function(torch.zeros(1, 1), target, TREE)
    with pytest.raises(ValueError, match=f"{name}: `index` must hold nodes below n_nodes=7, got 7"):
        function(torch.tensor([[7]]), target, TREE)
    with pytest.raises(ValueError, match=f"{name}: `empty` must be one of 'skip', 'zero', 'one', got 'x'"):
        function(torch.zeros(1, 1, dtype=torch.long), target, TREE, empty="x")
    with pytest.raises(ValueError, match=rf"{name}: `target` must have shape \(1, 4\)"):
        function(torch.zeros(1, 1, dtype=torch.long), torch.zeros(3, 2), TREE)


def test_a_node_is_right_if_it_holds_a_label_for_classes_in_any_order():
    tree = ll.LabelTree.from_prototypes(torch.randn(30, 4))
    index = torch.randint(tree.n_nodes, (40, 3))
    target = (torch.rand(40, 30) < 0.1).to(torch.int8)
    target[:, 0] = 1
    hit = (tree.membership()[index] & target.bool()[:, None]).any(-1).double()
    torch.testing.assert_close(tree_accuracy(index, target, tree), hit.mean())
