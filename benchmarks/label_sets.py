"""The data of `benchmarks.xmc` and `benchmarks.training`: sparse rows of unit length and sparse labels, split in two.

The folder given by ``--data`` holds

- ``mulan/NAME.npz``: Mulan's sets with their own split, rows and labels as the parts of CSR matrices;
- ``goemotions/{train,test}.tsv.xz``: text, tab, label numbers with commas (Demszky et al. 2020);
- ``debian_tags/debian_bookworm.jsonl.xz``: the packages of Debian 12: ``name, short, long, source, tags, depends``.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.preprocessing import normalize


class Rows(NamedTuple):
    """Training rows, test rows, and the groups of both where the split is by group."""

    x: sp.csr_matrix
    y: sp.csr_matrix
    xt: sp.csr_matrix
    yt: sp.csr_matrix
    groups: np.ndarray | None = None
    test_groups: np.ndarray | None = None


def mulan(folder: Path, name: str) -> Rows:
    """One of Mulan's sets; four fifths of the rows by chance train where it has no split of its own."""
    with np.load(folder / "mulan" / f"{name}.npz", allow_pickle=False) as z:

        def matrix(part: str) -> sp.csr_matrix:
            if part in z:
                return sp.csr_matrix(z[part])
            indices = z[f"{part}_indices"].astype(np.int32)
            values = z[f"{part}_data"] if f"{part}_data" in z else np.ones(len(indices), np.float32)
            return sp.csr_matrix((values, indices, z[f"{part}_indptr"]), shape=tuple(z[f"{part}_shape"]))

        if "train_Y_indptr" in z:
            parts = [matrix(part) for part in ("train_X", "train_Y", "test_X", "test_Y")]
        else:
            x, y = matrix("all_X"), matrix("all_Y")
            test = np.random.default_rng(0).random(x.shape[0]) < 0.2
            parts = [x[~test], y[~test], x[test], y[test]]
    return rows_of(*parts)


def rows_of(
    x: Any, y: Any, xt: Any, yt: Any, groups: np.ndarray | None = None, test_groups: np.ndarray | None = None
) -> Rows:
    """Give the rows unit length and leave out test rows without labels."""
    kept = np.flatnonzero(np.diff(yt.tocsr().indptr))
    matrices = [part.tocsr().astype(np.float32) for part in (normalize(x), y, normalize(xt)[kept], yt.tocsr()[kept])]
    for matrix in matrices:
        matrix.sort_indices()
    return Rows(*matrices, groups, None if test_groups is None else test_groups[kept])


def of_texts(texts: list[str], labels: list[list[Any]], test: np.ndarray, groups: np.ndarray | None = None) -> Rows:
    """TF-IDF of words that two training rows have, with logarithms of counts; the labels that training rows carry."""
    train, held = np.flatnonzero(~test), np.flatnonzero(test)
    names = {name: i for i, name in enumerate(sorted({name for i in train for name in labels[i]}))}

    def matrix(rows: np.ndarray) -> sp.csr_matrix:
        lists = [sorted({names[name] for name in labels[i] if name in names}) for i in rows]
        starts = np.append(0, np.cumsum([len(one) for one in lists]))
        flat = np.array([label for one in lists for label in one], np.int32)
        return sp.csr_matrix((np.ones(len(flat), np.float32), flat, starts), shape=(len(rows), len(names)))

    words = TfidfVectorizer(sublinear_tf=True, min_df=2, dtype=np.float32)
    x, xt = words.fit_transform([texts[i] for i in train]), words.transform([texts[i] for i in held])
    parts = [] if groups is None else [groups[train], groups[held]]
    return rows_of(x, matrix(train), xt, matrix(held), *parts)


def debian(folder: Path, field: str) -> Rows:
    """Packages with their tags or dependencies; a fifth of the source packages is for tests."""
    with lzma.open(folder / "debian_tags" / "debian_bookworm.jsonl.xz", "rt", encoding="utf-8") as file:
        packages = [one for one in map(json.loads, file) if one[field]]
    hashes = [int(hashlib.md5(one["source"].encode(), usedforsecurity=False).hexdigest(), 16) for one in packages]
    texts = [f"{one['name']}. {one['short']}. {one['long']}" for one in packages]
    sources = np.unique([one["source"] for one in packages], return_inverse=True)[1]
    return of_texts(texts, [one[field] for one in packages], np.array([h % 5 == 0 for h in hashes]), sources)


def goemotions(folder: Path) -> Rows:
    """Short comments and 28 emotions, the official training and test rows."""
    texts, labels, test = [], [], []
    for part in ("train", "test"):
        with lzma.open(folder / "goemotions" / f"{part}.tsv.xz", "rt", encoding="utf-8") as file:
            for line in file:
                cells = line.rstrip("\n").split("\t")
                texts.append(cells[0])
                labels.append([int(label) for label in cells[1].split(",")])
                test.append(part == "test")
    return of_texts(texts, labels, np.array(test))


SETS: dict[str, Callable[[Path], Rows]] = {
    "debian dependencies": lambda folder: debian(folder, "depends"),
    "debian tags": lambda folder: debian(folder, "tags"),
    "goemotions": goemotions,
    **{
        name: lambda folder, name=name: mulan(folder, name)  # type: ignore[misc]
        for name in ("bibtex", "delicious", "medical", "corel5k", "slashdot")
    },
}


def zipf(n_rows: int, n_features: int, n_labels: int, *, words: int = 50, seed: int = 0) -> Rows:
    """Make up rows: a third of the words come from the row's labels; the others, and the labels, follow Zipf's law."""
    rng = np.random.default_rng(seed)

    def draw(n: int, size: Any) -> np.ndarray:  # frequency about 1 / (rank + 3)
        return np.minimum((4.0 ** (1 - (u := rng.random(size))) * (n + 3.0) ** u - 3).astype(np.int64), n - 1)

    total = n_rows + n_rows // 20
    own = rng.integers(0, n_features, (n_labels, 30))
    labels = draw(n_labels, (total, 5))
    columns = draw(n_features, (total, words))
    third = words // 3
    columns[:, :third] = own[
        labels[np.arange(total)[:, None], rng.integers(0, 5, (total, third))], rng.integers(0, 30, (total, third))
    ]
    x = sp.csr_matrix(
        (
            rng.random(total * words, np.float32) + 0.5,
            columns.ravel().astype(np.int32),
            np.arange(0, total * words + 1, words),
        ),
        shape=(total, n_features),
    )
    x.sum_duplicates()
    y = sp.csr_matrix(
        (np.ones(5 * total, np.float32), labels.ravel().astype(np.int32), np.arange(0, 5 * total + 1, 5)),
        shape=(total, n_labels),
    )
    y.sum_duplicates()
    y.data[:] = 1
    return rows_of(x[:n_rows], y[:n_rows], x[n_rows:], y[n_rows:])
