"""Label trees: shapes, node problems, search, calibration, files, workers, hard input."""

import json
import math

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.preprocessing import normalize
from tools import slow

import lastlayer as ll
from lastlayer._native import linear as native
from lastlayer.train.linear import LinearTree, TreeSettings, choose_tree, fit_linear, monotone
from lastlayer.train.linear import tree as tree_module
from lastlayer.train.linear.rows import check_labels
from lastlayer.train.linear.shape import TreeShape, cluster, label_vectors
from lastlayer.train.linear.tree import _held_out

built = pytest.mark.skipif(bool(native.unavailable()), reason=f"no compiled solver: {native.unavailable()}")
SMALL = TreeSettings(trees=2, leaf=4, branching=2, threads=1)


def made_up(rows=300, labels=24, features=40, seed=0):
    """Rows near the directions of one or two labels."""
    rng = np.random.default_rng(seed)
    directions = rng.normal(size=(labels, features)) * (rng.random((labels, features)) < 0.3)
    y = [sorted({int(rng.integers(labels)), int(rng.integers(labels))}) for _ in range(rows)]
    x = np.stack([directions[row].sum(0) for row in y]) + 0.3 * rng.normal(size=(rows, features))
    return sp.csr_matrix(np.where(np.abs(x) > 0.3, x, 0).astype(np.float32)), y


def test_the_shape_of_a_hierarchy():
    tree = ll.LabelTree.from_parents([5, 5, 6, 6, 7, 6, 7, -1])  # ((0 1) 2 3) 4
    shape = TreeShape.from_parents(tree.parents)
    assert shape.child_start.tolist() == [0, 2, 5, 7]
    assert shape.child.tolist() == [4, ~1, 2, 3, ~2, 0, 1]
    labels = check_labels("t", [[0], [1, 4], [], [3], [4]], 5, 5)
    reach = shape.node_rows(labels, 5)
    lists = [rows.tolist() for rows in np.split(reach.rows, reach.start[1:-1])]
    assert lists == [[0, 1, 2, 3, 4], [0, 1, 3], [0, 1]]
    problems = shape.problems(labels, 5)
    lists = [rows.tolist() for rows in np.split(problems.labels.rows, problems.labels.start[1:-1])]
    assert lists == [[1, 4], [0, 1, 3], [], [3], [0, 1], [0], [1]]


@pytest.mark.parametrize(("n", "leaf", "branching"), [(3, 4, 2), (37, 4, 2), (100, 5, 8), (64, 2, 3)])
def test_clusters_hold_each_label_once_and_are_balanced(n, leaf, branching):
    vectors = np.random.default_rng(0).normal(size=(n, 5)).astype(np.float32)
    shape = cluster(vectors, leaf=leaf, branching=branching, seed=0)
    assert sorted(shape.child[shape.child >= 0].tolist()) == list(range(n))
    assert sorted((~shape.child[shape.child < 0]).tolist()) == list(range(1, shape.n_nodes))
    assert (~shape.child[shape.child < 0] > shape.owner()[shape.child < 0]).all()
    sizes = np.diff(shape.child_start)[np.bincount(shape.owner(), shape.child >= 0, shape.n_nodes) > 0]
    assert sizes.max() <= leaf
    assert sizes.max() - sizes.min() <= 1


def test_clusters_find_groups_of_labels():
    rng = np.random.default_rng(1)
    group = rng.permutation(16) % 2
    vectors = np.eye(2, dtype=np.float32)[group] + 0.1 * rng.normal(size=(16, 2)).astype(np.float32)
    shape = cluster(vectors, leaf=8, branching=2, seed=0)
    assert {tuple(sorted(group[shape.child[a:b]])) for a, b in ((2, 10), (10, 18))} == {(0,) * 8, (1,) * 8}


def test_label_vectors_are_means_of_unit_rows():
    x = np.array([[3.0, 4.0, 0.0], [0.0, 2.0, 0.0]], np.float32)
    labels = check_labels("t", [[0, 1], [1]], 2, 3)
    expected = np.array([[0.6, 0.8, 0.0], [0.6, 1.8, 0.0], [0.0, 0.0, 0.0]])
    expected[1] /= np.linalg.norm(expected[1])
    np.testing.assert_allclose(label_vectors(x, labels), expected, atol=1e-6)
    np.testing.assert_allclose(label_vectors(sp.csr_matrix(x), labels).toarray(), expected, atol=1e-6)


@built
@pytest.mark.parametrize("loss", ["squared_hinge", "logistic"])
def test_every_node_is_the_exact_solution_on_its_rows(loss):
    x, y = made_up()
    close = {"C": 0.1, "tolerance": 1e-4, "max_passes": 3000}
    settings = TreeSettings(
        trees=1, leaf=6, branching=2, loss=loss, threshold=0.0, calibration=0, normalize=False, **close
    )
    tree = LinearTree.fit(x, y, settings).trees[0]
    labels = check_labels("t", y, x.shape[0])
    problems = tree.shape.problems(labels, x.shape[0])
    for node in range(tree.shape.n_nodes):
        rows = problems.rows[problems.row_start[node] : problems.row_start[node + 1]]
        children = np.arange(tree.shape.child_start[node], tree.shape.child_start[node + 1])
        target = np.zeros((x.shape[0], len(children)))
        for place, child in enumerate(children):
            target[problems.labels.rows[problems.labels.start[child] : problems.labels.start[child + 1]], place] = 1
        alone = fit_linear(x[rows], target[rows], loss=loss, **close)
        np.testing.assert_allclose(
            tree.weights.take(children).matrix().toarray(), alone.matrix().toarray(), rtol=1e-2, atol=1e-4
        )


@built
@pytest.mark.parametrize("beam", [1, 2, 100])
@pytest.mark.parametrize("trees", [1, 3])
def test_the_plain_search_finds_the_same_labels(trees, beam):
    x, y = made_up()
    tree = LinearTree.fit(x, y, TreeSettings(trees=trees, leaf=4, branching=2, calibration=0))
    plain = LinearTree(tree.trees, TreeSettings(impl="numpy"), tree.n_labels, tree.knots)
    index, p = tree.predict_proba(x, 4, beam=beam)
    other, q = plain.predict_proba(x, 4, beam=beam)
    np.testing.assert_allclose(p, q, rtol=1e-3, atol=1e-6)
    assert (index == other).mean() > 0.99  # rounding may swap labels that are nearly equal


@built
def test_a_wide_beam_gives_the_product_along_every_path():
    x, y = made_up()
    tree = LinearTree.fit(x, y, TreeSettings(trees=1, leaf=6, branching=2, calibration=0, normalize=False))
    one = tree.trees[0]
    z = 3 * ((x @ one.weights.matrix().T).toarray() + one.weights.intercept) + 1
    p, owner = 1 / (1 + np.exp(-z)), one.shape.owner()
    above = {0: np.ones(x.shape[0])}
    expected = np.zeros((x.shape[0], tree.n_labels))
    for place, child in enumerate(one.shape.child):
        product = above[owner[place]] * p[:, place]
        if child < 0:
            above[int(~child)] = product
        else:
            expected[:, child] = product
    np.testing.assert_allclose(tree.probabilities(x), expected, rtol=1e-3, atol=1e-6)


def test_the_tree_learns_and_its_probabilities_are_calibrated():
    x, y = made_up(rows=1500)
    tree = LinearTree.fit(x[500:], y[500:], SMALL)
    index, p = tree.predict_proba(x[:500], 3)
    hit = np.array([np.isin(row, labels) for row, labels in zip(index, y[:500], strict=True)])
    assert hit[:, 0].mean() > 0.9
    assert monotone.calibration_error(p.ravel(), hit.ravel()) < 0.05
    assert tree.calibration["ece_after"] < tree.calibration["ece_before"]
    assert (np.diff(p, axis=1) <= 0).all()
    odds = tree.decision_function(x[:500], 3)[1]
    np.testing.assert_allclose(1 / (1 + np.exp(-odds)), p, rtol=1e-5)


def test_the_length_of_rows_does_not_matter():
    x, y = made_up()
    longer = sp.diags(np.linspace(0.01, 100, 300).astype(np.float32)) @ x
    one, other = (LinearTree.fit(rows, y, SMALL).probabilities(x.toarray() * 7) for rows in (x, longer))
    np.testing.assert_allclose(one, other, atol=0.02)
    flat = LinearTree.fit(x, y, TreeSettings(normalize=False, calibration=0))
    assert np.abs(flat.probabilities(x) - flat.probabilities(x * 7)).max() > 0.1


def test_the_map_recovers_probabilities_and_increases():
    rng = np.random.default_rng(0)
    p = rng.random(20000)
    hit = rng.random(20000) < p**2
    knots = monotone.fit_map(monotone.log_odds(np.log(p)), hit)
    assert (np.diff(knots, axis=1) > 0).all()
    grid = np.linspace(0.1, 0.95, 30)
    found = 1 / (1 + np.exp(-monotone.apply_map(knots, monotone.log_odds(np.log(grid)))))
    np.testing.assert_allclose(found, grid**2, atol=0.04)
    slope, intercept = monotone.fit_platt(np.array([-1.0, 1.0] * 2000), np.array([0, 1, 1, 0, 0, 1, 0, 1] * 500))
    assert math.isclose(1 / (1 + math.exp(-slope - intercept)), 0.75, abs_tol=0.01)
    assert monotone.fit_map(np.array([0.0, 1.0]), np.array([False, True])).shape == (2, 2)


def test_rows_of_little_weight_hardly_count_for_the_calibration():
    x, y = made_up(rows=1200)
    wrong = np.arange(1200) % 2 == 0  # labels of other rows
    spoilt = [y[(i + 100) % 1200] if wrong[i] else y[i] for i in range(1200)]
    weight = np.where(wrong, 1e-3, 1.0)
    tree = LinearTree.fit(x, spoilt, SMALL, row_weight=weight)
    new, labels = made_up(rows=1600)
    index, p = tree.predict_proba(new[1200:], 3)
    hit = np.array([np.isin(row, own) for row, own in zip(index, labels[1200:], strict=True)])
    assert monotone.calibration_error(p.ravel(), hit.ravel()) < 0.06
    assert tree.calibration["ece_after"] < 0.1


def test_a_weight_of_2_is_that_of_two_pairs_in_the_map():
    rng = np.random.default_rng(0)
    score, times = rng.normal(size=2000), rng.integers(1, 4, 2000)
    hit = rng.random(2000) < 1 / (1 + np.exp(-2 * score * times))
    again = np.repeat(np.arange(2000), times)
    one, other = monotone.fit_map(score, hit, times.astype(float)), monotone.fit_map(score[again], hit[again])
    grid = np.linspace(-2, 2, 20)
    np.testing.assert_allclose(monotone.apply_map(one, grid), monotone.apply_map(other, grid), atol=0.1)
    p = 1 / (1 + np.exp(-score))
    error = monotone.calibration_error(p, hit, weight=times.astype(float))
    assert error == pytest.approx(monotone.calibration_error(p[again], hit[again]))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("count", [30, 3000])
def test_the_map_of_scores_that_separate_all_is_finite(count):
    score = np.concatenate([np.full(count, -30.0), np.full(count, 30.0)])
    for hit in (score > 0, score < 0, score > 40, score < 40):
        knots = monotone.fit_map(score, hit)
        assert np.isfinite(knots).all()
        assert (np.diff(knots, axis=1) >= 0).all()


@pytest.mark.parametrize("observed", [None, 0.5, "each"])
def test_files(tmp_path, observed):
    x, y = made_up()
    share = np.linspace(0.2, 1, 24) if observed == "each" else observed
    tree = LinearTree.fit(x, y, TreeSettings(trees=2, leaf=4, branching=2, observed=share, tail=0.5))
    tree.save(tmp_path / "run")
    assert sorted(file.name for file in (tmp_path / "run").iterdir()) == ["tree.json", "tree.safetensors"]
    again = LinearTree.load(tmp_path / "run")
    for one, other in zip(tree.predict_proba(x), again.predict_proba(x), strict=True):
        assert np.array_equal(one, other)
    assert (again.n_labels, again.n_features, again.n_weights) == (24, 40, tree.n_weights)
    assert np.array_equal(again.settings.observed, share) if observed == "each" else again.settings == tree.settings


@built
def test_threads_and_workers_change_nothing():
    joblib = pytest.importorskip("joblib")
    x, y = made_up()
    reports = []
    settings = TreeSettings(trees=2, leaf=4, branching=2, observed=0.7, threads=1)
    alone = LinearTree.fit(x, y, settings, progress=lambda done, total: reports.append((done, total)))
    many = LinearTree.fit(x, y, TreeSettings(trees=2, leaf=4, branching=2, observed=0.7, threads=3))
    shared = LinearTree.fit(x, y, settings, parallel=joblib.Parallel(n_jobs=2, backend="threading"))
    for other in (many, shared):
        assert np.array_equal(alone.knots, other.knots)
        for a, b in zip(alone.trees, other.trees, strict=True):
            assert np.array_equal(a.shape.child, b.shape.child)
            assert np.array_equal(a.weights.values, b.weights.values)
    assert reports[-1][0] == reports[-1][1]
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)


def test_rare_labels_raise_the_weight_of_positive_rows():
    x, y = made_up(rows=120)
    counts = np.bincount(np.concatenate(y), minlength=24)
    rare = 1 + (np.log(120) - 1) * 2.5**0.55 * (counts + 1.5) ** -0.55
    close = {"tolerance": 1e-3, "C": 0.1}
    for tail in (0.5, 1.0):
        settings = TreeSettings(leaf=24, calibration=0, threshold=0, normalize=False, tail=tail, **close)
        tree = LinearTree.fit(x, y, settings)
        alone = fit_linear(x, y, positive_weight=rare**tail, **close)
        np.testing.assert_allclose(tree.trees[0].weights.matrix().toarray(), alone.matrix().toarray(), atol=2e-3)


@pytest.mark.parametrize("share", [0.5, "each"])
def test_probabilities_of_incomplete_labels_are_those_of_the_true_labels(share):
    x, y = made_up(rows=3000)
    rng = np.random.default_rng(1)
    shares = np.full(24, 0.5) if share == 0.5 else rng.uniform(0.3, 1, 24)
    seen = [[label for label in row if rng.random() < shares[label]] for row in y]
    settings = TreeSettings(trees=2, leaf=6, branching=2, observed=0.5 if share == 0.5 else shares)
    tree = LinearTree.fit(x[1000:], seen[1000:], settings, n_labels=24)
    index, p = tree.predict_proba(x[:1000], 3)
    hit = np.array([np.isin(row, labels) for row, labels in zip(index, y[:1000], strict=True)])
    plain = LinearTree(tree.trees, SMALL, 24, tree.knots).predict_proba(x[:1000], 3)[1]
    assert monotone.calibration_error(p.ravel(), hit.ravel()) < 0.07
    assert monotone.calibration_error(plain.ravel(), hit.ravel()) > 0.15
    assert (np.diff(p, axis=1) <= 0).all()
    every = tree.probabilities(x[:50])
    np.testing.assert_allclose(np.sort(every)[:, :-4:-1], p[:50], atol=1e-3)  # few labels per tree are summed
    assert tree.predict_proba(x[:2], 30)[0].shape == (2, 30)


def test_a_hierarchy_is_used_as_it_is():
    x, y = made_up()
    parents = [24 + label // 8 for label in range(24)] + [27, 27, 27, -1]
    tree = LinearTree.fit(x, y, SMALL, hierarchy=ll.LabelTree.from_parents(parents), n_labels=24)
    assert tree.trees[0].shape.child.tolist() == [~1, ~2, ~3, *range(24)]
    assert (tree.predict_proba(x, 1)[0][:, 0] == [row[0] for row in y]).mean() > 0.4
    with pytest.raises(ValueError, match=r"LinearTree.fit: `hierarchy` must have one leaf per label, 24, got 2\."):
        LinearTree.fit(x, y, SMALL, hierarchy=ll.LabelTree.from_parents([2, 2, -1]))


def test_labels_without_rows_and_empty_nodes():
    x, y = made_up()
    rows = [[label for label in row if label >= 8] for row in y]  # the first node below has no rows at all
    parents = [24 + label // 8 for label in range(24)] + [27, 27, 27, -1]
    for hierarchy in (ll.LabelTree.from_parents(parents), None):
        tree = LinearTree.fit(x, rows, SMALL, hierarchy=hierarchy, n_labels=24)
        p = tree.probabilities(x)
        assert np.isfinite(p).all()
        assert p[:, :8].max() < 0.01
        assert tree.predict_proba(x, 5)[0].min() >= 8


def test_an_only_child_is_certain():
    x, y = made_up(labels=3)
    shape = TreeShape.from_parents([3, 4, 4, 5, 6, 6, -1])  # label 0 lies below two nodes with one child each
    tree = LinearTree.fit(x, y, TreeSettings(calibration=0), hierarchy=shape, n_labels=3)
    flat = LinearTree.fit(x, y, TreeSettings(calibration=0), hierarchy=TreeShape.from_parents([4, 3, 3, 4, -1]))
    np.testing.assert_allclose(tree.probabilities(x)[:, 0], flat.probabilities(x)[:, 0], rtol=1e-5)


@pytest.mark.parametrize("leaf", [2, 100])
def test_all_rows_with_the_same_labels(leaf):
    x, _ = made_up(rows=50)
    tree = LinearTree.fit(x, [[1, 3, 4]] * 50, TreeSettings(leaf=leaf, branching=2), n_labels=6)
    index, p = tree.predict_proba(x, 3)
    assert (np.sort(index) == [1, 3, 4]).all()
    assert p.min() > 0.9


@pytest.mark.parametrize("names", [[None, "b", "c"], [(1, 2), (3, 4), (1, 4)], [0, 1, 2], ["a", "b", "c"]])
def test_groups_are_values_of_any_kind(names):
    x, y = made_up(rows=30)
    found = LinearTree.fit(x, y, SMALL, groups=names * 10)
    same = LinearTree.fit(x, y, SMALL, groups=np.arange(30) % 3)
    np.testing.assert_array_equal(found.knots, same.knots)


@pytest.mark.parametrize(("n", "parts"), [(60, (5, 2)), (24_000, (3, 1)), (60_000, (1, 1))])
def test_groups_are_held_out_together(n, parts):
    group = np.random.default_rng(0).integers(n // 6, size=n)
    for share, number in zip((0.2, 0.5), parts, strict=True):
        settings = TreeSettings(calibration=share)
        held = _held_out(group, settings)
        assert len(held) == number
        for rows in held:
            assert np.isin(group[rows], group[np.setdiff1d(np.arange(n), rows)]).sum() == 0
            assert abs(len(rows) - settings.calibration * n) <= 15
    assert len(_held_out(np.arange(n), settings)) == (2 if n < 5000 else 1)  # no groups
    assert _held_out(np.zeros(n, int), settings) == []
    with pytest.raises(ValueError, match=r"LinearTree.fit: `groups` must have one value per row, 30, got 2\."):
        LinearTree.fit(*made_up(rows=30), SMALL, groups=["a", "b"])


def test_rows_of_weight_zero_are_left_out():
    x, y = made_up()
    weight = (np.arange(300) % 3 > 0).astype(float)
    kept = np.flatnonzero(weight)
    groups = np.arange(300) // 5
    one = LinearTree.fit(x, y, SMALL, row_weight=weight, groups=groups)
    left = {"row_weight": weight[kept], "groups": groups[kept], "n_labels": 24}
    other = LinearTree.fit(x[kept], [y[i] for i in kept], SMALL, **left)
    assert np.array_equal(one.knots, other.knots)
    assert np.array_equal(one.trees[0].weights.values, other.trees[0].weights.values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"C": 0}, r"LinearTree.fit: `C` must be positive and finite, got 0.0"),
        ({"trees": 0}, r"LinearTree.fit: `trees` must be at least 1, got 0\."),
        ({"leaf": 1}, r"LinearTree.fit: `leaf` must be at least 2, got 1\."),
        ({"calibration": 0.7}, r"LinearTree.fit: `calibration` must be a share of rows from 0 to 0.5, got 0.7\."),
        ({"observed": 0.0}, r"LinearTree.fit: `observed` must be above 0 and at most 1, got 0.0"),
        ({"observed": [0.5, 0.5]}, r"LinearTree.fit: `observed` must be one number or one per label, 24, got shape"),
        ({"tail": -1.0}, r"LinearTree.fit: `tail` must be at least 0 and finite, got -1.0"),
    ],
)
def test_messages_of_settings(change, message):
    x, y = made_up(rows=30)
    with pytest.raises(ValueError, match=message):
        LinearTree.fit(x, y, TreeSettings(**change), n_labels=24)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
def test_features_must_be_finite(value):
    x, y = made_up(rows=30)
    dense = x.toarray().astype(np.float64)
    dense[7, 2] = value
    shown = "nan" if np.isnan(value) else "inf"
    with pytest.raises(ValueError, match=f"`x` must be finite, got {shown} in row 7, column 2"):
        LinearTree.fit(dense, y, SMALL)
    tree = LinearTree.fit(x, y, TreeSettings(calibration=0))
    with pytest.raises(ValueError, match=r"LinearTree.predict_proba: `x` must be finite"):
        tree.predict_proba(dense)
    with pytest.raises(ValueError, match=r"LinearTree.decision_function: `x` must have 40 columns, got 3\."):
        tree.decision_function(dense[:, :3])
    for name in ("predict_proba", "decision_function"):
        with pytest.raises(ValueError, match=rf"LinearTree.{name}: `k` must be at least 1, got 0\."):
            getattr(tree, name)(x, 0)
        for k in (2.5, "2", True, None):
            with pytest.raises(TypeError, match=rf"^LinearTree.{name}: `k` must be a whole number, got {k!r}\.$"):
                getattr(tree, name)(x, k)
        with pytest.raises(TypeError, match=rf"^LinearTree.{name}: `beam` must be a whole number, got 2\.5\.$"):
            getattr(tree, name)(x, 2, beam=2.5)
    np.testing.assert_array_equal(tree.predict_proba(x, np.int64(2))[0], tree.predict_proba(x, 2)[0])
    with pytest.raises(ValueError, match=r"LinearTree.probabilities: `x` must be finite"):
        tree.probabilities(dense)


def test_a_damaged_file_is_named(tmp_path):
    x, y = made_up(rows=30)
    LinearTree.fit(x, y, TreeSettings(calibration=0)).save(tmp_path)
    about, stored = tmp_path / "tree.json", tmp_path / "tree.safetensors"
    whole, tensors = json.loads(about.read_text()), stored.read_bytes()

    def refuses(path, why):
        with pytest.raises(ValueError, match=why) as caught:
            LinearTree.load(tmp_path)
        assert str(caught.value).startswith(f"{path}: damaged: ")
        assert str(caught.value).endswith(". Restore the file, or fit and save the tree again.")

    for content in ("", "{", "[]", "null", "\ufeff"):
        about.write_text(content)
        refuses(about, "damaged: ")
    for name in whole:
        about.write_text(json.dumps({key: whole[key] for key in whole if key != name}))
        refuses(about, f"damaged: {name} is missing")
    for change in ({"settings": {"depth": 3}}, {"settings": 3}, {"trees": "x"}):
        about.write_text(json.dumps(whole | change))
        refuses(about, "damaged: ")
    for wrong in (
        {"beam": []},
        {"beam": 10**30},
        {"loss": "x"},
        {"loss": None},
        {"observed": -1},
        {"observed": [1, 1]},
    ):
        about.write_text(json.dumps(whole | {"settings": whole["settings"] | wrong}))
        refuses(about, "damaged: ")
    for number in (0, float("inf"), None):
        about.write_text(json.dumps(whole | {"trees": number}))
        refuses(about, "damaged: ")
    about.write_text(json.dumps(whole | {"trees": 9}))
    refuses(stored, "child_start is missing")
    about.write_text(json.dumps(whole | {"format": 2}))
    with pytest.raises(ValueError, match=r"tree\.json: `format` must be 1, got 2\. Update lastlayer\."):
        LinearTree.load(tmp_path)
    about.write_text(json.dumps(whole))
    stored.write_bytes(tensors[:50])
    refuses(stored, "damaged: ")
    stored.unlink()
    with pytest.raises(FileNotFoundError, match=r"tree\.safetensors"):
        LinearTree.load(tmp_path)


def test_no_rows():
    with pytest.raises(ValueError, match=r"LinearTree.fit: `x` and `y` must have rows .* and labels, got 0 and 0\."):
        LinearTree.fit(np.zeros((0, 3)), [], SMALL)
    x, y = made_up(rows=30)
    with pytest.raises(ValueError, match="must have rows"):
        LinearTree.fit(x, y, SMALL, row_weight=np.zeros(30))
    index, p = LinearTree.fit(x, y, SMALL).predict_proba(x[:0], 4)
    assert index.shape == p.shape == (0, 4)


def test_auto_takes_trees_for_thousands_of_labels():
    assert not choose_tree(3999)
    assert choose_tree(4000)


@built
@pytest.mark.slow
def test_rows_on_disk_give_the_same_model_and_are_not_copied(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    x = normalize(sp.random(3000, 400, 0.05, "csr", np.float32, random_state=0)).astype(np.float32)
    y = [rng.choice(40, 2, replace=False).tolist() for _ in range(3000)]
    for name in ("data", "indices", "indptr"):
        np.save(tmp_path / f"{name}.npy", getattr(x, name))
    parts = [np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in ("data", "indices", "indptr")]
    mapped = sp.csr_matrix(tuple(parts), shape=x.shape)
    seen = []
    solve = tree_module.solve_problems
    monkeypatch.setattr(
        tree_module, "solve_problems", lambda rows, *rest, **o: seen.append(rows) or solve(rows, *rest, **o)
    )
    settings = TreeSettings(trees=1, leaf=8, branching=4, threads=1)
    found, expected = LinearTree.fit(mapped, y, settings), LinearTree.fit(x, y, settings)
    for rows in seen[: len(seen) // 2]:  # the held-out parts and the final fit
        assert np.shares_memory(rows.data, parts[0])
        assert np.shares_memory(rows.indices, parts[1])
    np.testing.assert_array_equal(found.trees[0].weights.values, expected.trees[0].weights.values)
    np.testing.assert_array_equal(found.predict_proba(x[:9], k=3)[1], expected.predict_proba(mapped[:9], k=3)[1])


@pytest.mark.parametrize("backend", ["loky", slow("dask")])
def test_processes_of_joblib_and_dask_give_the_same_model(backend):
    joblib = pytest.importorskip("joblib")
    x, y = made_up(rows=400)
    alone = LinearTree.fit(x, y, SMALL)
    if backend == "dask":
        distributed = pytest.importorskip("distributed")
        with (
            distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster_,
            distributed.Client(cluster_),
            joblib.parallel_config(backend="dask"),
        ):
            shared = LinearTree.fit(x, y, SMALL, parallel=joblib.Parallel())
    else:
        shared = LinearTree.fit(x, y, SMALL, parallel=joblib.Parallel(n_jobs=2, backend="loky"))
    assert np.array_equal(alone.knots, shared.knots)
    for a, b in zip(alone.trees, shared.trees, strict=True):
        for name in ("indptr", "indices", "values", "intercept"):
            assert np.array_equal(getattr(a.weights, name), getattr(b.weights, name))
