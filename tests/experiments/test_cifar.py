"""The parts of the CIFAR-100 experiments that their numbers rest on."""

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch

import lastlayer as ll

ROOT = Path(__file__).parents[2]
FINE = np.arange(100).repeat(6)
KINDS = ("fine", "coarse")
COARSE = (FINE * 7) % 20  # five fine classes each, not next to each other


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    return lambda name: importlib.import_module(f"experiments.{name}")


def test_networks_have_the_stated_sizes(module):
    cifar = module("cifar")
    for name, parameters in (("densenet", 1_941_620), ("resnet", 4_246_436)):
        body, features = cifar.network(name, 64)
        assert (
            sum(p.numel() for p in torch.nn.Sequential(body, torch.nn.Linear(features, 100)).parameters()) == parameters
        )


def test_largest_is_the_adaptive_pool(module):
    x = torch.randn(3, 5, 4, 4, requires_grad=True)
    pooled, largest = torch.nn.AdaptiveMaxPool2d(1)(x).flatten(1), module("cifar").Largest()(x)
    weight = torch.randn(3, 5)
    torch.testing.assert_close(largest, pooled)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, weight) for y in (largest, pooled)))


@pytest.mark.parametrize("kind", ["blocks", "coarse"])
def test_noise_stays_in_its_five_classes_and_hits_four_fifths_of_p(module, kind):
    fine, coarse = np.tile(FINE, 20), np.tile(COARSE, 20)
    drawn = module("noisy_cifar100.run").noisy(fine, coarse, kind, 0.5, seed=3)
    group = fine // 5 if kind == "blocks" else coarse
    other = drawn // 5 if kind == "blocks" else (drawn * 7) % 20
    assert (group == other).all()
    assert abs((drawn != fine).mean() - 0.4) < 0.02


def test_sixty_classes_keep_their_label_three_of_each_coarse_class(module):
    classes = module("zero_and_many_labels.run").known_classes(torch.tensor(FINE), torch.tensor(COARSE))
    kept = (classes >= 0).nonzero().squeeze()
    assert classes[kept].tolist() == list(range(60))
    assert torch.bincount(kept * 7 % 20).tolist() == [3] * 20


def test_a_softmax_with_an_outlier_loss_is_the_sum_of_two_means(module):
    head = module("zero_and_many_labels.heads").Softmax(4, 3, ll.outlier_uniform_loss)
    features, target = torch.randn(5, 4), torch.tensor([0, -1, 2, -1, -1])
    logits = head(features)
    inner = torch.nn.functional.cross_entropy(logits[[0, 2]], target[[0, 2]])
    torch.testing.assert_close(head.loss(features, target), inner + ll.outlier_uniform_loss(logits[[1, 3, 4]]))


def test_curves_are_read_along_straight_lines(module):
    curves = module("accuracy_specificity.curves")
    points = [(0.6, 0.6), (0.8, 0.4)]
    assert curves.specificity_at(points, 0.7) == pytest.approx(0.5)
    assert curves.area(points, 0.8) == pytest.approx(0.2)  # from 0.4 down to (1, 0)


def test_a_shuffled_tree_has_the_same_shape(module):
    tree = ll.LabelTree.from_prototypes(torch.randn(12, 3))
    mixed = module("accuracy_specificity.curves").shuffled(tree, seed=1)
    assert sorted(mixed.sizes) == sorted(tree.sizes)
    assert mixed.parents != tree.parents


def test_the_first_of_several_nodes_are_the_nodes_of_fewer(module):
    tree = module("accuracy_specificity.many").group_tree(["a", "a", "b", "c", "c", "c"])
    assert tree.sizes[6:] == (2, 3, 6)  # the group of one label is that label
    p = torch.rand(50, 6)
    five, two = (ll.decode_tree(p, tree, method="maxk_rew", k=k, theta=0.4, rule="negation").index for k in (5, 2))
    assert (five[:, :2] == two).all()


def test_features_are_read_and_trained_on_as_they_are(module, tmp_path):
    cifar = module("cifar")
    fine = np.tile(np.arange(100), 6)
    labels = {f"{split}_{kind}": fine // (1 if kind == "fine" else 5) for split in ("train", "test") for kind in KINDS}
    np.savez(tmp_path / "labels.npz", **labels)
    stored = np.random.default_rng(0).integers(0, 256, (600, 256)).astype(np.uint8)
    np.savez(tmp_path / "features.npz", train=stored, test=stored)
    raw = cifar.load_features(tmp_path / "features.npz")
    assert raw["train_x"][0, 0] == (int(stored[0, 0]) - 128) / 24
    data = cifar.prepared(raw, 100, "cpu")
    assert data["train_x"].shape == (500, 256)
    assert data["train_x"].dtype == torch.float32
    body, features = cifar.network("features", 8)
    head = torch.nn.Linear(features, 100)
    before = head.weight.detach().clone()

    def objective(x, y):
        return torch.nn.functional.cross_entropy(head(body(x)), y)

    both = [*body.parameters(), *head.parameters()]
    cifar.fit(objective, both, data["train_x"], data["train_fine"], peak=0.1, epochs=1, batch=100, seed=0)
    assert (head.weight != before).any()
    assert cifar.outputs(body, data["test_x"]).shape == (600, features)


@pytest.mark.slow
def test_a_head_that_was_trained_later_gets_its_curves(module, tmp_path):
    run, common = module("accuracy_specificity.run"), module("common")
    out = tmp_path / "results.json"
    arguments = ["--smoke", "--out", str(out), "--device", "cpu", "--parts"]
    run.main([*arguments, "train", "curves"])
    results = common.Results(out)
    whole, results.rows = results.rows, [row for row in results.rows if row.get("tree") != "quadratic"]
    assert len(results.rows) < len(whole)
    results.extend([])
    run.main([*arguments, "curves"])
    again = common.Results(out).rows
    assert sorted(map(str, again)) == sorted(map(str, whole))
