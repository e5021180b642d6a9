"""Label trees: against scipy, sums over leaf sets, and the published statistics."""

import math
import re
import xml.etree.ElementTree

import numpy as np
import pytest
import torch
from scipy.cluster.hierarchy import linkage

from lastlayer import LabelTree
from lastlayer._cluster import LINKAGES, agglomerate, k_means

BINARY = LabelTree.from_parents([4, 4, 5, 5, 6, 6, -1])
ROOT_FIRST = LabelTree.from_parents([-1, 0, 0, 1, 1, 1, 2, 6])  # 2 -> 6 -> 7: a chain


def leaf_sets(merges, n):
    sets = [frozenset([i]) for i in range(n)]
    for a, b in merges:
        sets.append(sets[int(a)] | sets[int(b)])
    return set(sets)


def test_by_hand():
    assert BINARY.n_nodes == 7
    assert BINARY.n_leaves == 4
    assert BINARY.root == 6
    assert BINARY.sizes == (1, 1, 1, 1, 2, 2, 4)
    assert BINARY.depth == (2, 2, 2, 2, 1, 1, 0)
    assert BINARY.children[6] == (4, 5)
    assert BINARY.specificity.tolist() == [1, 1, 1, 1, 0.5, 0.5, 0]
    assert BINARY.leaves_under(5) == (2, 3)
    assert ROOT_FIRST.leaves.tolist() == [3, 4, 5, 7]
    assert ROOT_FIRST.leaves_under(2) == (3,)
    assert [ROOT_FIRST.leaves_under(v) for v in range(8)] == [
        tuple(row.nonzero().flatten().tolist()) for row in ROOT_FIRST.membership()
    ]


@pytest.mark.parametrize("tree", [BINARY, ROOT_FIRST], ids=["binary", "root first"])
def test_probabilities_are_those_of_the_leaf_sets(tree):
    p = torch.rand(5, 4, dtype=torch.float64)
    member = tree.membership().double()
    total = p @ member.T
    some = 1 - (1 - p[:, None] * member).prod(-1)
    for rule, plain in (("sum", total), ("negation", some)):
        torch.testing.assert_close(tree.probabilities(p, rule, recalibrate=False), plain)
        torch.testing.assert_close(tree.probabilities(p, rule), plain / plain[:, tree.root, None])
        torch.testing.assert_close(tree.log_probabilities(p.log(), rule).exp(), tree.probabilities(p, rule))
        torch.testing.assert_close(tree.log_probabilities(p.log(), rule, recalibrate=False), plain.log())


@pytest.mark.parametrize("rule", ["sum", "negation"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_probabilities_never_decrease_towards_the_root(rule, dtype):
    tree = LabelTree.from_prototypes(torch.randn(40, 3), "single")
    scale = torch.tensor([0.1, 1, 10, 1000])[:, None, None]
    p = (scale * torch.randn(4, 50, 40)).softmax(-1).to(dtype)
    p = torch.cat([p, torch.rand(1, 50, 40).to(dtype).round(), torch.rand(1, 50, 40).to(dtype) * 1e-7])
    child = torch.tensor([v for v in range(tree.n_nodes) if v != tree.root])
    parent = torch.tensor(tree.parents)[child]
    for recalibrate in (True, False):
        node = tree.probabilities(p, rule, recalibrate=recalibrate)
        assert (node[..., parent] >= node[..., child]).all()
        log = tree.log_probabilities(p.log(), rule, recalibrate=recalibrate)
        assert (log[..., parent] >= log[..., child]).all()
        if recalibrate:
            assert (node[..., tree.root] == 1).all()
            assert (log[..., tree.root] == 0).all()


@pytest.mark.parametrize("rule", ["sum", "negation"])
@pytest.mark.parametrize("recalibrate", [True, False])
def test_gradients(rule, recalibrate):
    p = torch.rand(2, 4, dtype=torch.float64, requires_grad=True)
    for tree in (BINARY, ROOT_FIRST):
        assert torch.autograd.gradcheck(lambda p, t=tree: t.probabilities(p, rule, recalibrate=recalibrate), p)
        assert torch.autograd.gradcheck(
            lambda p, t=tree: t.log_probabilities(p.log(), rule, recalibrate=recalibrate), p
        )


def test_gradient_of_negation_at_certainty():
    p = torch.tensor([1.0, 0.25, 0.0, 0.5], dtype=torch.float64, requires_grad=True)
    node = BINARY.probabilities(p, "negation", recalibrate=False)
    assert node.tolist() == [1, 0.25, 0, 0.5, 1, 0.5, 1]
    (grad,) = torch.autograd.grad(node[4], p)
    torch.testing.assert_close(grad, torch.tensor([0.75, 0, 0, 0], dtype=torch.float64), atol=1e-12, rtol=1e-12)
    zero = torch.zeros(4, requires_grad=True)
    for rule in ("sum", "negation"):
        node = BINARY.probabilities(zero, rule)
        assert node.tolist() == [0, 0, 0, 0, 0, 0, 1]
        node.sum().backward()
        assert zero.grad.isfinite().all()


def test_small_probabilities_are_not_lost():
    p = torch.full((4,), 1e-12)
    torch.testing.assert_close(BINARY.probabilities(p, "negation", recalibrate=False)[6], torch.tensor(4e-12))
    log = torch.tensor([-500.0, -500.0, -900.0, -math.inf])
    for rule in ("sum", "negation"):
        node = BINARY.log_probabilities(log, rule, recalibrate=False)
        torch.testing.assert_close(node, torch.tensor([*log, -500 + math.log(2), -900, -500 + math.log(2)]))


@pytest.mark.parametrize("recalibrate", [True, False])
@pytest.mark.parametrize("rule", ["sum", "negation"])
def test_a_class_without_a_probability_takes_none_from_the_others(rule, recalibrate):
    p = torch.tensor([[0.5, 0.5, 0.0, 0.25], [0.0, 1e-6, 0.0, 1e-6], [0.0, 1.0, 0.0, 0.5]], dtype=torch.float64)
    log = p.log().requires_grad_()
    node = BINARY.log_probabilities(log, rule, recalibrate=recalibrate)
    torch.testing.assert_close(node.exp(), BINARY.probabilities(p, rule, recalibrate=recalibrate))
    (grad,) = torch.autograd.grad(torch.where(node > -math.inf, node, 0).sum(), log)
    assert not grad.isnan().any()


def test_batch_shapes_and_half_precision():
    assert BINARY.probabilities(torch.rand(2, 3, 4)).shape == (2, 3, 7)
    assert BINARY.probabilities(torch.rand(0, 4)).shape == (0, 7)
    assert BINARY.probabilities(torch.rand(4)).shape == (7,)
    assert BINARY.probabilities(torch.rand(4).half()).dtype == torch.half
    assert LabelTree.from_parents([-1]).probabilities(torch.tensor([0.2])).tolist() == [1.0]
    assert LabelTree.from_parents([-1]).specificity.tolist() == [1.0]


@pytest.mark.parametrize("method", LINKAGES)
@pytest.mark.parametrize("n", [2, 3, 10, 80])
def test_linkage_agrees_with_scipy(method, n):
    for seed in range(3):
        points = np.random.default_rng(seed).normal(size=(n, 4))
        merges, heights = agglomerate(points, method)
        theirs = linkage(points, method)
        assert leaf_sets(merges, n) == leaf_sets(theirs[:, :2], n)
        np.testing.assert_allclose(np.sort(heights), np.sort(theirs[:, 2]), rtol=1e-10)
        tree = LabelTree.from_prototypes(torch.from_numpy(points), method)
        assert {frozenset(tree.leaves_under(v)) for v in range(tree.n_nodes)} == leaf_sets(merges, n)


def test_ward_merges_what_adds_least_to_the_squares():
    points = np.random.default_rng(0).normal(size=(6, 2))
    merges, _ = agglomerate(points, "ward")
    groups = {i: [i] for i in range(6)}

    def squares(group):
        return ((points[group] - points[group].mean(0)) ** 2).sum()

    for m, (a, b) in enumerate(merges.tolist()):
        cost = {
            (i, j): squares(groups[i] + groups[j]) - squares(groups[i]) - squares(groups[j])
            for i in groups
            for j in groups
            if i < j
        }
        assert min(cost, key=cost.get) == (a, b)
        groups[6 + m] = groups.pop(a) + groups.pop(b)


def test_equal_prototypes_and_one_class():
    tree = LabelTree.from_prototypes(torch.zeros(5, 3))
    assert tree.n_nodes == 9
    assert LabelTree.from_prototypes(torch.randn(1, 3)).parents == (-1,)


def planted(n, size, seed=0):
    """A confusion matrix whose classes are mistaken within groups of `size`."""
    noise = np.random.default_rng(seed).uniform(0, 1, (n, n))
    group = np.arange(n) // size
    return np.where(group[:, None] == group, 20 + 5 * noise, 0.1 * noise) + 100 * np.eye(n)


@pytest.mark.parametrize(
    ("method", "n", "internal", "mean"),
    [
        ("hinton", 100, 11, 10.0),
        ("hinton", 57, 6, 10.3),
        ("hdcnn", 100, 11, 10.0),
        ("hdcnn", 57, 6, 10.3),
        pytest.param("hdcnn", 1000, 101, 10.9, marks=pytest.mark.slow),
    ],
)
def test_two_level_builders_have_the_published_shape(method, n, internal, mean):
    tree = LabelTree.from_confusion(planted(n, 10), method)
    found = tree.statistics()
    assert (found.height, found.n_internal, round(found.mean_children, 1)) == (3, internal, mean)
    again = LabelTree.from_confusion(torch.from_numpy(planted(n, 10)), method)
    assert tree == again


@pytest.mark.parametrize("method", ["hinton", "hdcnn"])
def test_two_level_builders_find_planted_groups(method):
    shuffle = np.random.default_rng(1).permutation(60)
    matrix = planted(60, 10) - (100 * np.eye(60) if method == "hinton" else 0)
    matrix = matrix[shuffle][:, shuffle]
    tree = LabelTree.from_confusion(matrix, method)
    for v in range(60, 66):
        assert len({shuffle[c] // 10 for c in tree.leaves_under(v)}) == 1
    assert LabelTree.from_confusion(np.eye(7), method).statistics().n_internal == 2  # nothing is confused


def test_published_spread_of_children():
    # One cluster of 91 classes and nine of one: the spread printed for CIFAR100 in table C.1 is 25.7.
    tree = LabelTree.from_parents([100] * 91 + list(range(101, 110)) + [110] * 10 + [-1])
    found = tree.statistics()
    assert (found.n_internal, found.mean_children, round(found.std_children, 1)) == (11, 10.0, 25.7)
    binary = LabelTree.from_prototypes(torch.randn(100, 5)).statistics()
    assert (binary.n_internal, binary.mean_children, binary.std_children) == (99, 2.0, 0.0)


def test_k_means_fills_every_cluster():
    label = k_means(np.zeros((9, 2)), 4, seed=0)
    assert set(label.tolist()) == {0, 1, 2, 3}
    assert (k_means(np.arange(12.0)[:, None], 3, seed=1) == k_means(np.arange(12.0)[:, None], 3, seed=1)).all()


def test_match_by_hand():
    assert BINARY.match(BINARY) == 1
    other = LabelTree.from_parents([4, 5, 4, 5, 6, 6, -1])  # {0, 2} and {1, 3}
    assert BINARY.match(other) == pytest.approx((0.5 + 0.5 + 1) / 3)  # the root, 2 of 4, is the closest to each
    flat = LabelTree.from_parents([4, 4, 4, 4, -1])
    assert (flat.match(BINARY), BINARY.match(flat)) == (1, pytest.approx(2 / 3))
    a = LabelTree.from_dict({"x": ["a", "b"], "y": ["c", "d"]})
    b = LabelTree.from_dict({"y": ["d", "c"], "x": ["b", "a"]})
    assert a.match(b) == 1
    assert LabelTree.from_parents([-1]).match(LabelTree.from_parents([-1])) == 1


def test_from_names():
    tree = LabelTree.from_dict({"animal": {"bird": ["duck", "crow"], "cat": None}, "car": {}})
    assert tree.class_names == ("duck", "crow", "cat", "car")
    assert tree.names[tree.root] == "root"
    assert tree.parents[tree.names.index("bird")] == tree.names.index("animal")
    ordered = LabelTree.from_dict({"pet": ["cat", "dog"]}, classes=["dog", "cat"])
    assert ordered.class_names == ("dog", "cat")
    assert ordered.names[ordered.root] == "pet"
    parents = {"animal": None, "cat": "animal", "bird": "animal", "duck": "bird", "crow": "bird"}
    same = LabelTree.from_parents(parents)
    assert same.class_names == ("cat", "duck", "crow")
    assert BINARY.with_names("abcd").names == ("a", "b", "c", "d", "4", "5", "6")
    assert LabelTree.from_prototypes(torch.randn(3, 2), names=["x", "y", "z"]).class_names == ("x", "y", "z")


def test_is_a_value():
    assert LabelTree.from_parents(torch.tensor([4, 4, 5, 5, 6, 6, -1])) == BINARY
    assert len({BINARY, LabelTree.from_parents([4, 4, 5, 5, 6, 6, None])}) == 1
    assert repr(BINARY) == "LabelTree(n_leaves=4, n_nodes=7, height=3)"
    with pytest.raises(AttributeError):
        BINARY.parents = ()
    BINARY.specificity[0] = 7
    BINARY.leaves[0] = 7
    assert BINARY.specificity[0] == 1
    assert BINARY.leaves[0] == 0


def test_text_forms():
    tree = LabelTree.from_dict({"pet": ["my cat", "dog's"], 'a "b" <c>': None})
    assert tree.to_newick() == "('a \"b\" <c>',('my cat','dog''s')pet)root;"
    dot = tree.to_graphviz()
    assert len(re.findall(r"n\d+ -> n\d+;", dot)) == tree.n_nodes - 1
    assert r'label="a \"b\" <c>"' in dot
    drawing = xml.etree.ElementTree.fromstring(tree.to_svg())
    texts = [e.text for e in drawing.iter() if e.tag.endswith("text")]
    assert set(tree.class_names) < set(texts)
    assert sum(e.tag.endswith("path") for e in drawing.iter()) == tree.n_nodes - 1


def test_deep_trees_do_not_recurse():
    n = 3000
    tree = LabelTree.from_parents([n, *range(n, 2 * n - 1), *range(n + 1, 2 * n - 1), -1])
    assert tree.statistics().height == n
    assert tree.to_newick().count("(") == n - 1
    assert tree.to_svg().startswith("<svg")
    assert tree.probabilities(torch.full((n,), 1 / n))[tree.root] == 1


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: LabelTree.from_parents([]), ValueError, "LabelTree: `parents` must hold at least one node, got none"),
        (lambda: LabelTree.from_parents([1, 2, 0, -1]), ValueError, "lead from every node to the root, got a cycle at"),
        (lambda: LabelTree.from_parents([0]), ValueError, "got a cycle at node 0"),
        (lambda: LabelTree.from_parents([2, -1, -1]), ValueError, r"must have one root \(-1\), got 2: nodes \[1, 2\]"),
        (
            lambda: LabelTree.from_parents([5, -1]),
            ValueError,
            "0 to 1, or -1 for the root, got 5 as the parent of node 0",
        ),
        (lambda: LabelTree.from_parents([0.5, -1]), TypeError, "`parents` must hold integers, got 0.5"),
        (lambda: LabelTree.from_parents(3), TypeError, "`parents` must be a sequence of integers or a mapping"),
        (lambda: LabelTree.from_parents({"a": "b"}), ValueError, "got the unknown parent 'b'"),
        (
            lambda: LabelTree.from_parents([1, -1], names="abc"),
            ValueError,
            r"one name per class \(1\) or per node \(2\), got 3",
        ),
        (lambda: LabelTree((1, -1), ("a",)), ValueError, r"`names` must hold one name per node \(2\), got 1"),
        (lambda: LabelTree.from_dict({}), TypeError, "`nested` must be a dictionary with at least one name"),
        (
            lambda: LabelTree.from_dict({"a": {"b": 3}}),
            TypeError,
            "must hold dictionaries, lists of names or None, got int",
        ),
        (lambda: LabelTree.from_dict({"a": ["b", "b"]}), ValueError, "each name must occur once, got 'b' twice"),
        (
            lambda: LabelTree.from_dict({"a": ["b"]}, classes=["b", "c"]),
            ValueError,
            "`classes` must name each leaf once, got no leaf for 1 of 2 classes, 'c' for one. Add a leaf for each",
        ),
        (
            lambda: LabelTree.from_dict({"a": ["b"], "empty": {}}, classes=["b"]),
            ValueError,
            "got 1 of 2 leaves without a class, 'empty' for one. Remove them from the tree",
        ),
        (lambda: LabelTree.from_dict({"a": ["b"]}, classes=["b", "b"]), ValueError, "got 'b' twice. Name it once"),
        (
            lambda: LabelTree.from_prototypes(torch.tensor([[math.nan]])),
            ValueError,
            "LabelTree.from_prototypes: `weights` must be finite, got nan or infinity",
        ),
        (
            lambda: LabelTree.from_prototypes(torch.zeros(3)),
            ValueError,
            r"must have two dimensions .* got shape \(3,\)",
        ),
        (lambda: LabelTree.from_prototypes([[1.0]]), TypeError, "`weights` must be a tensor or an array, got list"),
        (lambda: LabelTree.from_prototypes(torch.zeros(2, 2), "x"), ValueError, "`method` must be one of 'ward'"),
        (lambda: LabelTree.from_confusion(torch.zeros(2, 3)), ValueError, "`matrix` must be square"),
        (lambda: LabelTree.from_confusion(torch.eye(3), "x"), ValueError, "must be one of 'hinton', 'hdcnn', got 'x'"),
        (lambda: LabelTree.from_confusion(-torch.eye(3)), ValueError, "`matrix` must not be negative for method"),
        (lambda: LabelTree.from_confusion(torch.eye(3), n_clusters=4), ValueError, "between 1 and n_classes=3, got 4"),
        (lambda: BINARY.probabilities(torch.zeros(3)), ValueError, r"`p` must have 4 classes .* got shape \(3,\)"),
        (lambda: BINARY.probabilities(torch.zeros(4), "max"), ValueError, "`rule` must be one of 'sum', 'negation'"),
        (lambda: BINARY.match(LabelTree.from_parents([-1])), ValueError, r"must have the same classes \(4\), got 1"),
    ],
)
def test_messages(call, error, text):
    with pytest.raises(error, match=text):
        call()
