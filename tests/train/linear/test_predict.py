"""The compiled predictions of linear models and label trees, against products of matrices in float64."""

import numpy as np
import pytest
import scipy.sparse as sp

from lastlayer._native import linear as native

pytestmark = pytest.mark.skipif(bool(native.unavailable()), reason=f"no compiled solver: {native.unavailable()}")


def tree_arrays(child_start, child, weights, n_labels, intercept, scale=1.0, offset=0.0):
    weights = weights.tocsr()
    count = len(child)
    arrays = {"n_nodes": len(child_start) - 1, "n_features": weights.shape[1], "n_labels": n_labels}
    arrays |= {"child_start": np.array(child_start, np.int64), "child": np.array(child, np.int32)}
    arrays |= {"intercept": intercept.astype(np.float32)}
    arrays |= {"scale": np.full(count, scale, np.float32), "offset": np.full(count, offset, np.float32)}
    lists = (weights.indptr.astype(np.int64), weights.indices.astype(np.int32), weights.data.astype(np.float32))
    return arrays | native.group_features(arrays["child_start"], *lists, weights.shape[1])


def made_up(rows, columns, density, seed):
    return sp.random(rows, columns, density, "csr", np.float32, np.random.default_rng(seed))


def as_lists(x):
    return x.indptr.astype(np.int64), x.indices.astype(np.int32), x.data


@pytest.mark.parametrize("density", [0.05, 0.6])
def test_scores_of_all_labels(density):
    x, w = made_up(200, 30, 0.3, 0), made_up(70, 30, density, 1)
    intercept = np.linspace(-1, 1, 70)
    flat = tree_arrays([0, 70], np.arange(70), w, 70, intercept)
    index, scores = native.predict([flat], as_lists(x), link="identity", beam=1, k=None, threads=2)
    assert index is None
    np.testing.assert_allclose(scores, (x @ w.T).toarray() + intercept, atol=1e-5)


@pytest.mark.parametrize("link", native.LINKS)
def test_the_best_labels_of_two_trees_are_those_of_all_paths(link):
    rng, n_labels = np.random.default_rng(3), 12
    x = made_up(40, 25, 0.4, 2)
    trees, expected = [], np.zeros((40, n_labels))
    for seed in (4, 5):
        labels = rng.permutation(n_labels)  # the root has two nodes and a label, the nodes five labels and six
        child, start = [~1, ~2, *labels], [0, 3, 8, 14]
        w, intercept = made_up(14, 25, 0.5, seed), rng.normal(size=14)
        trees.append(tree_arrays(start, child, w, n_labels, intercept, 1.5, -0.25))
        z = 1.5 * ((x @ w.T).toarray() + intercept) - 0.25
        log = {"identity": z, "sigmoid": -np.logaddexp(0, -z), "hinge": -np.square(np.maximum(0, 1 - z))}[link]
        total = np.empty((40, n_labels))
        for place, label in enumerate(labels, start=2):
            total[:, label] = log[:, place] + (0 if place == 2 else log[:, 0] if place < 8 else log[:, 1])
        expected += np.exp(total) / 2
    index, score = native.predict(trees, as_lists(x), link=link, beam=2, k=5, threads=1)
    np.testing.assert_allclose(np.exp(score), -np.sort(-expected)[:, :5], rtol=1e-4)
    np.testing.assert_allclose(np.take_along_axis(expected, index.astype(int), 1), np.exp(score), rtol=1e-4)


def test_fewer_labels_than_asked_for():
    x = made_up(3, 4, 0.5, 0)
    tree = tree_arrays([0, 2, 3, 3], [~1, ~2, 0], made_up(3, 4, 0.5, 1), 1, np.zeros(3))
    index, score = native.predict([tree], as_lists(x), link="sigmoid", beam=5, k=3, threads=1)
    assert (index == [0, -1, -1]).all()
    assert (score[:, 1:] == -np.inf).all()
