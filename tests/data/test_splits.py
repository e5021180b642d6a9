"""Splits: labels in proportion, groups and equal rows together, the same way each time."""

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from lastlayer.data import LabelData, fold_rows, split_rows, splits


def make(n=1500, labels=40, mean=4.0, seed=0, **columns):
    """Label sets of independent labels, the i-th with a frequency of about 1/i; some rows have none."""
    rng = np.random.default_rng(seed)
    frequency = 1 / np.arange(1, labels + 1)
    sizes = np.minimum(rng.poisson(mean, n), labels)
    lists = [rng.choice(labels, m, replace=False, p=frequency / frequency.sum()) for m in sizes]
    return LabelData.from_lists(lists, label_names=[str(i) for i in range(labels)], **columns)


def counts(data, part, n_parts):
    row = np.repeat(np.arange(len(data)), data.row_counts())
    out = np.zeros((n_parts, data.n_labels), dtype=int)
    np.add.at(out, (part[row], data.indices), 1)
    return out


def numbers(parts, n):
    out = np.full(n, -1)
    for i, part in enumerate(parts):
        out[part.row_numbers()] = i
    return out


def sechidis(data, fractions, seed):
    """The algorithm of Sechidis et al. (2011) as it is written down, one row at a time."""
    rng = np.random.default_rng(seed)
    share = np.array(fractions)
    rows = {i: set(data.row_labels(i).tolist()) for i in rng.permutation(len(data)).tolist()}
    room = share * len(data)
    wanted = data.label_counts()[:, None] * share
    part = np.empty(len(data), dtype=int)
    while rows:
        left = np.bincount([label for row in rows.values() for label in row], minlength=data.n_labels)
        if not left.any():
            chosen, key = list(rows), None
        else:
            key = int(np.where(left > 0, left, len(data) + 1).argmin())
            chosen = [i for i, row in rows.items() if key in row]
        for i in chosen:
            order = np.lexsort((rng.random(len(share)), room, wanted[key] if key is not None else room))
            part[i] = order[-1]
            room[part[i]] -= 1
            for label in rows.pop(i):
                wanted[label, part[i]] -= 1
    return part


def deviation(data, part, fractions):
    share = np.array(fractions)
    found, total = counts(data, part, len(share)), data.label_counts()
    seen = total >= len(share)
    return np.abs(found[:, seen] / total[seen] - share[:, None]).mean()


@pytest.mark.parametrize("fractions", [[0.2] * 5, [0.8, 0.2], [0.6, 0.3, 0.1]])
def test_labels_are_at_least_as_even_as_by_the_algorithm_as_written(fractions):
    ours, plain = [], []
    for seed in range(3):
        data = make(400, 30, seed=seed)
        part = numbers(split_rows(data, fractions, seed=seed, stratify=True), len(data))
        ours.append(deviation(data, part, fractions))
        plain.append(deviation(data, sechidis(data, fractions, seed), fractions))
    assert np.mean(ours) <= np.mean(plain)
    assert np.mean(ours) < 0.02


def test_every_label_and_the_sizes_are_in_proportion():
    data = make()
    found = counts(data, fold_rows(data, 5), 5)
    wanted = data.label_counts() / 5
    assert (np.abs(found - wanted) < 2.5).all()
    assert np.abs(np.bincount(fold_rows(data, 5)) - 300).max() <= 3
    parts = split_rows(data, [0.7, 0.2, 0.1], stratify=True)
    assert [abs(len(p) - n) <= 5 for p, n in zip(parts, (1050, 300, 150), strict=True)] == [True] * 3
    assert all((np.diff(p.row_numbers()) > 0).all() for p in parts)


@pytest.mark.parametrize(
    ("rows", "labels", "per_row"), [(200, 5000, 5), (80, 400, 5), (80, 20_000, 400), (600, 2000, 8)]
)
def test_rare_labels_do_not_empty_the_small_parts(rows, labels, per_row):
    rng = np.random.default_rng(0)
    lists = [rng.choice(labels, per_row, replace=False).tolist() + ["all"] * (i % 2) for i in range(rows)]
    data = LabelData.from_lists(lists)
    parts = split_rows(data, [0.64, 0.16, 0.2], stratify=True)
    for part, share in zip(parts, (0.64, 0.16, 0.2), strict=True):
        assert abs(len(part) - share * rows) <= max(0.1 * share * rows, 1)
        common = part.label_counts()[data.label_names.index("all")]
        assert abs(common - share * rows / 2) <= 0.05 * rows  # labels that can be in proportion are


def test_equal_label_sets_are_spread():
    data = LabelData.from_lists([["a", "b"], ["a"], ["b"], []] * 25)
    fold = fold_rows(data, 5, seed=1)
    for i in range(4):
        assert np.bincount(fold[i::4], minlength=5).tolist() == [5] * 5


def test_pairs_are_in_proportion_with_order_2():
    rng = np.random.default_rng(0)
    sets = [["a", "b"], ["a", "c"], ["b", "c"], ["a"], ["b"], ["c"], ["a", "b", "c"], ["d", "a"]]
    data = LabelData.from_lists([sets[i] for i in rng.integers(0, 8, 800)])

    def of_pairs(order):
        fold = fold_rows(data, 5, seed=2, order=order)
        y = sp.csr_matrix((np.ones(len(data.indices)), data.indices, data.indptr))
        whole = sp.triu(y.T @ y, 1).toarray()
        gaps = [np.abs(sp.triu(y[fold == i].T @ y[fold == i], 1).toarray() - whole / 5).sum() for i in range(5)]
        return sum(gaps) / whole.sum()

    assert of_pairs(2) < 0.02
    assert of_pairs(2) <= of_pairs(1)


def test_groups_stay_together_and_labels_in_proportion():
    rng = np.random.default_rng(0)
    groups = [f"g{i}" for i in rng.integers(0, 300, 1500)]
    data = make(groups=groups)
    fold = fold_rows(data, 5)
    assert all(len({f for f, h in zip(fold.tolist(), groups, strict=True) if h == g}) == 1 for g in set(groups))
    found = counts(data, fold, 5)
    frequent = data.label_counts() >= 50
    assert np.abs(found / data.label_counts() - 0.2)[:, frequent].max() < 0.04
    other = rng.integers(0, 20, 1500)
    fold = fold_rows(data, 3, groups=other)
    assert all(len(set(fold[other == g].tolist())) == 1 for g in range(20))
    parts = split_rows(data, [0.5, 0.5], groups=other)  # the hash keeps them together too
    assert not set(other[parts[0].row_numbers()]) & set(other[parts[1].row_numbers()])


@pytest.mark.parametrize("stratify", [True, False])
def test_an_empty_group_is_a_group_of_its_own(stratify):
    data = make(groups=[""] * 1500, texts=[f"row {i}" for i in range(1500)])
    parts = split_rows(data, [0.5, 0.5], stratify=stratify)
    assert abs(len(parts[0]) - 750) < 100


@pytest.mark.parametrize("kind", ["texts", "dense", "sparse"])
def test_equal_rows_stay_together(kind):
    values = np.repeat(np.arange(100), 3)
    features = values[:, None].astype(np.float32)
    columns = {
        "texts": {"texts": [f"text {v}" for v in values]},
        "dense": {"features": features},
        "sparse": {"features": sp.csr_matrix(features)},
    }
    data = make(300, 10, **columns[kind])
    fold = fold_rows(data, 4)
    assert (fold.reshape(100, 3) == fold[::3, None]).all()


def test_one_large_group_does_not_fill_the_small_part():
    data = make(300, 10, groups=["all"] * 200 + [f"g{i}" for i in range(100)])
    big, small = split_rows(data, [0.8, 0.2], stratify=True)
    assert "all" in big.groups
    assert 40 <= len(small) <= 80


def test_a_seed_is_a_split():
    data = make(300, 10)
    assert (fold_rows(data, 5, seed=7) == fold_rows(data, 5, seed=7)).all()
    assert (fold_rows(data, 5, seed=7) != fold_rows(data, 5, seed=8)).any()


@pytest.mark.parametrize("order", [1, 2])
def test_the_heap_finds_the_same_labels_as_the_scan(monkeypatch, order):
    data = make(400, 60)
    before = fold_rows(data, 5, order=order)
    monkeypatch.setattr(splits, "_MANY_ITEMS", 0)
    assert (fold_rows(data, 5, order=order) == before).all()


@settings(max_examples=100, deadline=None)
@given(
    wanted=st.lists(st.floats(-3, 8), min_size=1, max_size=5),
    count=st.integers(0, 30),
    whole=st.booleans(),
)
def test_dealing_at_once_is_dealing_one_by_one(wanted, count, whole):
    wanted = np.round(wanted) if whole else np.array(wanted)
    share, room = np.ones(len(wanted)), np.arange(len(wanted)) * 100.0
    one_by_one, left = np.zeros(len(wanted), dtype=int), wanted.copy()
    for _ in range(count):
        best = np.flatnonzero(left > left.max() - 1e-9)[-1]  # of equals the one with the most room
        one_by_one[best] += 1
        left[best] -= 1
    found = splits._fill(wanted, count, room, share, np.random.default_rng(0))
    assert found.sum() == count
    np.testing.assert_allclose(np.sort(wanted - found), np.sort(wanted - one_by_one), atol=1e-6)


def test_edges():
    empty = LabelData.from_lists([], label_names=["a"])
    assert [len(p) for p in split_rows(empty, [0.5, 0.5], stratify=True)] == [0, 0]
    assert len(fold_rows(empty, 2)) == 0
    data = LabelData.from_lists([[]] * 10)
    assert np.bincount(fold_rows(data, 5)).tolist() == [2] * 5
    data = make(50, 5)
    assert [len(p) for p in split_rows(data, [1.0, 0.0], stratify=True)] == [50, 0]
    one = LabelData.from_lists([["a"]], texts=["x"])
    assert [len(p) for p in split_rows(one, [0.8, 0.2], stratify=True)] == [1, 0]
    assert sorted(fold_rows(LabelData.from_lists([["a"], ["a"]]), 2).tolist()) == [0, 1]
    auto = numbers(split_rows(data, [0.8, 0.2], stratify="auto"), 50)
    assert (auto == numbers(split_rows(data, [0.8, 0.2], stratify=True), 50)).all()


def test_messages():
    data = make(10, 5)
    for call, message in [
        (lambda: split_rows(data, [0.5, 0.6]), "`fractions` must be between 0 and 1 and sum to 1"),
        (lambda: split_rows(data, []), "`fractions` must be"),
        (lambda: split_rows(data, [0.5, 0.5], stratify="yes"), "`stratify` must be true, false or 'auto'"),
        (lambda: split_rows(data, [0.5, 0.5], groups=["a"]), "`groups` must have one entry per row, 10, got 1"),
        (lambda: split_rows(data, [0.5, 0.5], stratify=True, order=3), "`order` must be 1 or 2, got 3"),
        (lambda: fold_rows(data, 1), "`n_folds` must be a whole number from 2 to the 10 rows, got 1"),
        (lambda: fold_rows(data, 11), "`n_folds` must be"),
        (lambda: fold_rows(data, 2.5), "`n_folds` must be"),
        (lambda: fold_rows(data, 3, groups=["a", "b"] * 5), "`n_folds` must be at most the number of groups, 2, got 3"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
