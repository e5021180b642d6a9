"""Nodes of a tree: against a search over all nodes in Python, and the laws of the predictors."""

import itertools
import math

import pytest
import torch

from lastlayer import DecodeTree, LabelTree, decode_tree, tree_accuracy, tune_darts

BINARY = LabelTree.from_parents([4, 4, 5, 5, 6, 6, -1])
CHAIN = LabelTree.from_parents([3, 3, 4, 5, 6, 6, -1])  # node 3 holds 0 and 1, node 4 holds 2 alone, root 6


def random_tree(n=12):
    return LabelTree.from_prototypes(torch.randn(n, 3))


def holds(tree, a, b):
    return set(tree.leaves_under(b)) <= set(tree.leaves_under(a))


def plain_rew(p, tree, theta, k):
    """Take nodes by size, probability, depth, number; skip what holds one already taken."""
    order = sorted(range(tree.n_nodes), key=lambda v: (tree.sizes[v], -p[v], -tree.depth[v], v))
    chosen = []
    for v in order:
        if p[v] >= theta and not any(holds(tree, v, c) for c in chosen):
            chosen.append(v)
    return chosen[:k] + [-1] * (k - len(chosen[:k]))


def test_by_hand():
    p = torch.tensor([0.4, 0.35, 0.15, 0.1])
    chosen = {theta: decode_tree(p, BINARY, theta=theta).index.item() for theta in (0, 0.3, 0.41, 0.75, 0.76, 1.0)}
    assert chosen == {0: 0, 0.3: 0, 0.41: 4, 0.75: 4, 0.76: 6, 1.0: 6}
    index, score = decode_tree(p, BINARY, method="maxk_rew", theta=0.3, k=3)
    assert index.tolist() == [0, 1, -1]  # 4 and 6 hold them
    torch.testing.assert_close(score, torch.tensor([0.4, 0.35, -math.inf]))
    assert decode_tree(p, BINARY, method="darts", lamb=0.0).index.item() == 0  # 1 * 0.4 against 0.5 * 0.75
    assert decode_tree(p, BINARY, method="darts", lamb=0.2).index.item() == 4  # 1.2 * 0.4 against 0.7 * 0.75
    assert decode_tree(p, BINARY, method="darts", lamb=math.inf).index.item() == 6


@pytest.mark.parametrize("k", [1, 3, 5])
def test_agrees_with_a_search_over_all_nodes(k):
    for tree in (BINARY, CHAIN, random_tree()):
        p = torch.rand(20, tree.n_leaves, dtype=torch.float64)
        for theta in (0.0, 0.2, 0.5, 0.9, 1.0):
            node = tree.probabilities(p, "negation")
            found = decode_tree(node, tree, method="maxk_rew", theta=theta, k=k).index
            assert found.tolist() == [plain_rew(row, tree, theta, k) for row in node.tolist()]


def test_darts_is_the_largest_reward():
    tree = random_tree()
    p = torch.randn(50, 12, dtype=torch.float64).softmax(-1)
    node = tree.probabilities(p)
    for lamb in (0.0, 0.1, 2.0, 50.0):
        found = decode_tree(p, tree, method="darts", lamb=lamb).index.squeeze(-1)
        value = (tree.specificity + lamb) * node
        torch.testing.assert_close(value.gather(-1, found[:, None]).squeeze(-1), value.amax(-1))


def test_theta_zero_is_top_1_and_theta_one_keeps_the_root():
    tree = random_tree()
    p = torch.randn(300, 12).softmax(-1)  # sums to 1 only up to rounding
    assert torch.equal(decode_tree(p, tree, theta=0).index, p.argmax(-1, keepdim=True))
    assert (decode_tree(p, tree, theta=1.0).index >= 0).all()


def test_accuracy_rises_with_theta():
    tree = random_tree()
    p = (3 * torch.randn(400, 12, dtype=torch.float64)).softmax(-1)
    chosen = [decode_tree(p, tree, theta=t / 10) for t in range(11)]
    # The expected accuracy of a row, if the probabilities are right; on a sample it may dip.
    expected = []
    for found in chosen:
        member = tree.membership()[found.index.squeeze(-1)]
        expected.append((p * member).sum(-1))
    assert all((b >= a - 1e-12).all() for a, b in itertools.pairwise(expected))
    target = torch.multinomial(p, 1).squeeze(-1)
    first, last = (tree_accuracy(chosen[t].index, target, tree).item() for t in (0, 10))
    assert first == pytest.approx((p.argmax(-1) == target).double().mean().item())
    assert last == 1


def test_single_child_chains_go_to_the_deeper_node():
    p = torch.tensor([0.1, 0.2, 0.7])
    assert decode_tree(p, CHAIN, theta=0.7).index.item() == 2
    assert decode_tree(p, CHAIN, method="darts").index.item() == 2
    assert decode_tree(p, CHAIN, method="maxk_rew", theta=0.25, k=5).index.tolist() == [2, 3, -1, -1, -1]


def test_shapes_dtypes_and_one_class():
    p = torch.rand(2, 3, 4).softmax(-1)
    assert decode_tree(p, BINARY).index.shape == (2, 3, 1)
    assert decode_tree(p[:0], BINARY).index.shape == (0, 3, 1)
    assert decode_tree(p.bfloat16(), BINARY).score.dtype == torch.bfloat16
    assert decode_tree(p, BINARY, method="maxk_rew", k=0).index.shape == (2, 3, 0)
    one = LabelTree.from_parents([-1])
    assert decode_tree(torch.tensor([[0.3]]), one).index.tolist() == [[0]]
    nodes = BINARY.probabilities(0.1 * p, "negation", recalibrate=False)
    assert (decode_tree(nodes, BINARY, theta=0.9).index == -1).all()  # nothing is likely, nothing is chosen
    nodes = BINARY.probabilities(torch.full((4,), torch.nan))
    assert decode_tree(nodes, BINARY, method="darts").index.item() == -1


def test_module():
    p = torch.rand(5, 4).softmax(-1)
    assert torch.equal(DecodeTree(BINARY, theta=0.7)(p).index, decode_tree(p, BINARY, theta=0.7).index)


def test_tuned_darts_reaches_the_accuracy_and_hardly_more():
    tree = random_tree()
    p = (2 * torch.randn(500, 12, dtype=torch.float64)).softmax(-1)
    target = torch.multinomial(p, 1).squeeze(-1)

    def accuracy(lamb):
        return tree_accuracy(decode_tree(p, tree, method="darts", lamb=lamb).index, target, tree).item()

    for wanted in (0.8, 0.9, 0.99, 1.0):
        lamb = tune_darts(p, target, tree, accuracy=wanted)
        assert accuracy(lamb) >= wanted
        assert lamb == 0 or accuracy(lamb * (1 - 1e-5)) < wanted
    assert tune_darts(p, target, tree, accuracy=0.0) == 0.0
    sure = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    assert tune_darts(sure, torch.tensor([3]), BINARY, accuracy=1.0) == math.inf


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda p: decode_tree(p, BINARY, method="best"), ValueError, "decode_tree: `method` must be one of 'max_rew'"),
        (lambda p: decode_tree(p, BINARY, theta=1.1), ValueError, "`theta` must be between 0 and 1, got 1.1"),
        (lambda p: decode_tree(p, BINARY, lamb=-1), ValueError, "`lamb` must be between 0 and inf, got -1"),
        (
            lambda p: decode_tree(p, BINARY, k=3),
            ValueError,
            '`k` must be 1 for method="max_rew", got 3. Use method="maxk',
        ),
        (lambda p: decode_tree(p, [0]), TypeError, "`tree` must be a LabelTree, got list"),
        (lambda p: decode_tree(p, BINARY, rule="max"), ValueError, "`rule` must be one of 'sum', 'negation'"),
        (lambda p: decode_tree(p[:, :3], BINARY), ValueError, r"must have 4 classes or 7 nodes .* got shape \(2, 3\)"),
        (
            lambda p: tune_darts(p, torch.full((2,), -1), BINARY, accuracy=1),
            ValueError,
            "tune_darts: `target` must hold at least one label, got none",
        ),
    ],
)
def test_messages(call, error, text):
    with pytest.raises(error, match=text):
        call(torch.full((2, 4), 0.25))
