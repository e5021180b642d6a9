"""The parts of the CIFAR-100 experiments that their numbers rest on."""

import argparse

import numpy as np
import pytest
import torch

import lastlayer as ll

FINE = np.arange(100).repeat(6)
KINDS = ("fine", "coarse")
COARSE = (FINE * 7) % 20  # five fine classes each, not next to each other


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


def test_a_step_is_that_of_sgd(module):
    cifar = module("cifar")
    start = [torch.randn(4, 3), torch.randn(3)]
    ours, theirs = ([v.clone().requires_grad_() for v in start] for _ in range(2))
    x, y = torch.randn(40, 4), torch.randn(40, 3)
    groups = [{"params": ours[:1]}, {"params": ours[1:], "weight_decay": 0.0}]

    def loss_of(values, x, y):
        return 30 * (x @ values[0] + values[1] - y).square().mean()  # large: the gradient is clipped at first

    cifar.fit(lambda x, y: loss_of(ours, x, y), groups, x, y, peak=0.05, epochs=4, batch=40, seed=0, decay=0.1)
    groups = [{"params": theirs[:1], "weight_decay": 0.1}, {"params": theirs[1:]}]
    sgd = torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(sgd, 0.05, total_steps=5, pct_start=0.25)
    for _ in range(4):
        sgd.zero_grad()
        loss_of(theirs, x, y).backward()
        torch.nn.utils.clip_grad_norm_(theirs, 5.0)
        sgd.step()
        schedule.step()
    torch.testing.assert_close(ours, theirs)
    assert (ours[0] - start[0]).abs().max() > 0.01


def test_a_grid_grows_until_its_best_lies_inside(module):
    noisy = module("noisy_cifar100.run")

    def accuracy(rate, decay):
        return 1 - abs(np.log(rate / 6.4)) - abs(np.log(decay / 5e-4)) / 10

    grid, asked = [], 0
    while pairs := noisy.grid_of(grid, noisy.RATES, noisy.DECAYS):
        asked += len(pairs)
        grid += [{"rate": r, "decay": d, "valid_top5": accuracy(r, d)} for r, d in pairs]
    assert noisy.best(grid) == (6.4, 5e-4)  # one step beyond the largest rate of the start
    assert {25.6, 1.6} <= {row["rate"] for row in grid if row["decay"] == 5e-4}
    assert asked == len({(row["rate"], row["decay"]) for row in grid}) == 13


def test_seeds_are_trained_with_what_the_validation_rows_chose(module):
    noisy = module("noisy_cifar100.run")
    arguments = argparse.Namespace(
        network="resnet", width=8, noise=["blocks"], p=[0.2, 0.6], losses=["LML"], rates=[0.1, 0.4, 1.6],
        decays=[5e-4, 2e-3, 8e-3], seeds=2, grow=2,
    )  # fmt: skip
    first = noisy.wanted([], arguments)
    assert len(first) == 9
    assert {(s["part"], s["p"], s["seed"]) for s in first} == {("grid", noisy.TUNED_AT, 0)}
    rows = [s | {"valid_top5": 0.9 if (s["rate"], s["decay"]) == (0.4, 2e-3) else 0.5} for s in first]
    final = noisy.wanted(rows, arguments)
    assert {(s["part"], s["rate"], s["decay"]) for s in final} == {("test", 0.4, 2e-3)}
    assert [(s["p"], s["seed"]) for s in final] == [(0.2, 0), (0.6, 0), (0.2, 1), (0.6, 1)]


def test_densities_are_those_of_a_second_computation(module):
    flow = module("open_set.flow")
    torch.manual_seed(0)
    x, y = torch.randn(200, 3) @ torch.randn(3, 3), torch.randint(0, 2, (200,))
    made = flow.Gaussians(x, y, 2, ridge=0.0)
    rest = x.double() - torch.stack([x[y == c].double().mean(0) for c in range(2)])[y]
    normals = torch.distributions.MultivariateNormal(made.mean, rest.T @ rest / 200)
    expected = (normals.log_prob(x.double()[:, None]) + made.log_share).logsumexp(-1)
    torch.testing.assert_close(made.log_density(x), expected)
    net = flow.RealNVP(4, hidden=8, layers=3).double()
    for coupling in net.couplings:
        torch.nn.init.normal_(coupling.net[-1].weight)
    point = torch.randn(4, dtype=torch.float64)

    def through(z):
        for coupling, order in zip(net.couplings, net.orders, strict=True):
            z = coupling(z[None, order])[0][0]
        return z

    jacobian = torch.autograd.functional.jacobian(through, point)
    normal = torch.distributions.Normal(0, 1).log_prob(through(point)).sum()
    torch.testing.assert_close(net.log_density(point[None])[0], normal + jacobian.det().abs().log())


def test_open_set_scores_by_hand(module):
    run = module("open_set.run")
    decided, truth = torch.tensor([0, 0, -1, 1, -1, 1]), torch.tensor([0, 1, 1, 1, -1, -1])
    assert run.open_f(decided, truth, 2) == pytest.approx((2 / 3 + 2 / 5 + 2 / 4) / 3)
    assert run.openness(64) == pytest.approx(0.2)


def test_bags_hold_each_row_once_and_the_union_of_its_labels(module):
    bags = module("bags.run").bags_of(torch.eye(50, 4).bool(), 6, seed=1)
    rows = bags.rows[bags.there]
    assert rows.unique().numel() == rows.numel() > 40
    assert bags.there.sum(-1).unique().tolist() == [3, 4, 5, 6]
    where = (bags.rows == 2).logical_and(bags.there).any(-1)
    assert (bags.target[:, 2] == where).all()


def test_poolings_of_one_instance_are_its_logits(module):
    run = module("bags.run")
    x, there = torch.randn(3, 2, 5), torch.tensor([[True, False]]).expand(3, 2)
    for pooling, _ in run.METHODS.values():
        if pooling is not None:
            torch.testing.assert_close(pooling(x, torch.randn(3, 2, 5), there), x[:, 0])


def test_of_two_grids_the_row_with_the_better_held_out_bags_counts(module):
    run = module("bags.run")
    row = {"set": "cifar100", "size": 4, "method": "max", "seed": 0} | dict.fromkeys(run.VALUES, 0.5)
    rows = [row | {"valid": 0.4}, row | {"valid": 0.6, "bag_map": 0.3}, row | {"valid": 0.5}]
    assert run.chosen(rows) == [rows[1]]
    assert "| max | 30.0 | 50.0 | 50.0 | 50.0 |" in run.tables(rows)["cifar100 4"]


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
@pytest.mark.long
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
