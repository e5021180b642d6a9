import numpy as np
import pytest

from lastlayer.data import DataError, LabelData, hide_labels, load_sample, single_positive, split_rows


def make(n=2000, labels=20, seed=0):
    rng = np.random.default_rng(seed)
    lists = [[f"l{j}" for j in rng.choice(labels, rng.integers(0, 6), replace=False)] for _ in range(n)]
    return LabelData.from_lists(lists, texts=[f"row {i}" for i in range(n)], groups=[f"g{i // 3}" for i in range(n)])


def test_hiding_keeps_the_share_and_nothing_new():
    data = make()
    hidden = hide_labels(data, 0.3, seed=5)
    assert abs(len(hidden.indices) / len(data.indices) - 0.3) < 0.03
    assert all(set(hidden.row_labels(i)) <= set(data.row_labels(i)) for i in range(len(data)))
    again = hide_labels(data, 0.3, seed=5)
    assert (again.indices == hidden.indices).all()
    assert hide_labels(data, 1.0).fingerprint() == data.fingerprint()
    with pytest.raises(ValueError, match="`keep` must be between 0 and 1"):
        hide_labels(data, 1.5)


def test_single_positive_is_uniform():
    data = LabelData.from_lists([["a", "b", "c"]] * 3000 + [[]])
    one = single_positive(data, seed=1)
    assert one.row_counts().tolist() == [1] * 3000 + [0]
    assert (np.abs(one.label_counts() / 3000 - 1 / 3) < 0.04).all()


def test_splits_keep_groups_whole_and_do_not_depend_on_other_rows():
    data = make()
    parts = split_rows(data, [0.7, 0.2, 0.1], seed=3)
    assert sum(map(len, parts)) == len(data)
    assert [abs(len(p) / len(data) - f) < 0.05 for p, f in zip(parts, [0.7, 0.2, 0.1], strict=True)] == [True] * 3
    groups = [set(p.groups) for p in parts]
    assert not groups[0] & groups[1]
    assert not groups[1] & groups[2]
    half = split_rows(data.take(np.arange(0, 2000, 2)), [0.7, 0.2, 0.1], seed=3)
    assert set(half[1].texts) <= set(parts[1].texts)
    assert set(split_rows(data, [0.7, 0.3], seed=4)[1].texts) != set(split_rows(data, [0.7, 0.3], seed=5)[1].texts)
    with pytest.raises(ValueError, match="sum to 1"):
        split_rows(data, [0.5, 0.6])


def test_equal_rows_never_straddle():
    data = LabelData.from_lists([["a"]] * 100, features=np.repeat(np.arange(20, dtype=np.float32), 5)[:, None])
    a, b = split_rows(data, [0.5, 0.5])
    assert not set(a.features[:, 0]) & set(b.features[:, 0])


def test_padded_lists():
    data = LabelData.from_lists([["a", "b", "c"], ["b"], []])
    padded = data.padded(np.arange(3))
    assert padded.tolist() == [[0, 1, 2], [1, -1, -1], [-1, -1, -1]]
    assert data.padded(np.array([2])).tolist() == [[-1]]


def test_with_labels_renames_and_counts_what_is_unknown():
    data = LabelData.from_lists([["a", "b"], ["c"], ["b", "a"]])
    moved, unknown = data.with_labels(["b", "a", "z"])
    assert unknown == 1
    assert [moved.names(i) for i in range(3)] == [["b", "a"], [], ["b", "a"]]


def test_take_repeats_and_orders():
    data = make(20)
    rows = np.array([5, 5, 0, 19])
    taken = data.take(rows)
    assert [taken.names(i) for i in range(4)] == [data.names(r) for r in rows]
    assert len(data.take(np.array([], dtype=int))) == 0


def test_columns_must_have_one_entry_per_row():
    with pytest.raises(DataError, match="`texts` must have one entry per row, 1, got 2"):
        LabelData.from_lists([["a"]], texts=["x", "y"])


def test_the_sample_is_as_its_readme_says():
    parts = load_sample()
    assert {name: len(p) for name, p in parts.items()} == {"train": 3575, "valid": 409, "test": 1016}
    assert all(p.n_labels == 252 for p in parts.values())
    assert parts["train"].label_counts().min() >= 10
    sources = {name: set(p.groups) for name, p in parts.items()}
    assert not sources["train"] & sources["test"]
    assert not sources["train"] & sources["valid"]
    assert not sources["valid"] & sources["test"]
