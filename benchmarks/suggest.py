"""How many hidden labels are found again, beside cleanlab's finder of label errors and plain scores.

    python -m benchmarks.suggest --data DIR [--sets bibtex delicious debian goemotions] [--json FILE]

DIR holds ``mulan/bibtex.npz``, ``mulan/delicious.npz``, ``debian_tags/debian_bookworm.jsonl.xz`` (name, short, long,
tags and source of each package) and ``goemotions/train.tsv.xz``, ``goemotions/test.tsv.xz``; anything that
`lastlayer.data` reads will do, see ``SETS``. A fifth of the labels of the training rows is hidden: each with
probability 0.2 ("random"), or with a probability that falls with the frequency of the label ("rare"). Five folds give
out-of-fold probabilities of logistic regressions, one per label, fitted to what is left. Every finder sees these
probabilities and the labels that are left, nothing else.

Per set, kind of hiding and finder, over the seeds:

- precision: the share of hidden labels among the first N suggestions, N being the number of hidden labels. A label
  that nobody wrote down counts as an error although it may be true, for all finders alike;
- with ``--labelled``, the same where rows that hiding left without any label are not looked at. That such a row lacks a
  label is easy to guess where every row had one;
- recall@5 on test rows with all their labels, of a model trained on all labels, on those left, and on those left with
  the first N suggestions of a finder accepted; "recovered" is the share of the loss by hiding that comes back, and
  "recovered, checked" what a person wins back who looks at all N and accepts those that were hidden.

cleanlab is asked in four ways. Two are its finder of label errors per class (`find_multilabel_issues_per_class`, by two
of its rules): what it finds comes first, then the rest, each by self-confidence. As it often finds fewer than N missing
labels, the precision is also taken at its own number. Two are its quality scores per class, self-confidence and
normalised margin, adjusted by its thresholds per class. Of each only labels that are not written down are taken, as
these are in question.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
import torch

import lastlayer as ll
from lastlayer.data import LabelData, fold_rows, read_parts, split_rows
from lastlayer.decode.suggest import suggest_labels
from lastlayer.train.config import Config
from lastlayer.train.features import FeatureMap
from lastlayer.train.linear import fit_linear

SETS: dict[str, tuple[str, dict[str, Any]]] = {
    "bibtex": ("mulan/bibtex.npz", {}),
    "delicious": ("mulan/delicious.npz", {}),
    "debian": (
        "debian_tags/debian_bookworm.jsonl.xz",
        {"text_column": "name,short,long", "label_column": "tags", "group_column": "source"},
    ),
    "goemotions": ("goemotions/train.tsv.xz", {}),
}
FOLDS, HIDDEN = 5, 0.2
Found = tuple[np.ndarray, np.ndarray]  # rows and labels, the most probable first
Finder = Callable[[np.ndarray, sp.csr_matrix, int], Found]


class Rows(NamedTuple):
    """Features, labels (Boolean CSR) and the table that the folds are made from."""

    x: Any
    y: sp.csr_matrix
    data: LabelData


def load(folder: Path, name: str) -> tuple[Rows, Rows]:
    """Read a set; return training and test rows, at least one label each."""
    file, options = SETS[name]
    parts = read_parts(folder / file, **options)
    if "all" in parts and (other := folder / file.replace("train", "test")) != folder / file:
        parts = {"train": parts["all"], "test": read_parts(other)["all"]}
    if "all" in parts:
        kept = parts["all"].take(np.flatnonzero(parts["all"].row_counts()))
        parts = dict(zip(("train", "test"), split_rows(kept, [0.8, 0.2]), strict=True))
    train, test = parts["train"], parts["test"].with_labels(parts["train"].label_names)[0]
    features = FeatureMap.fit(train, Config(scale="l2"))
    return tuple(Rows(features(d), matrix(d), d) for d in (train, test))  # type: ignore[return-value]


def matrix(data: LabelData) -> sp.csr_matrix:
    shape = (len(data), data.n_labels)
    return sp.csr_matrix((np.ones(len(data.indices), np.float32), data.indices, data.indptr), shape=shape)


def hide(y: sp.csr_matrix, kind: str, seed: int) -> sp.csr_matrix:
    """Return what is left of the labels: a fifth is hidden, each alike, or rare labels more often."""
    rng = np.random.default_rng(seed)
    found = y.tocoo()
    chance = np.full(found.nnz, HIDDEN)
    if kind == "rare":
        count = np.asarray(y.sum(0)).ravel()
        weight = 1 / np.sqrt(np.maximum(count, 1))
        low, high = 0.0, 1e6
        for _ in range(100):  # the factor with which a fifth of all labels is hidden, none with more than 0.8
            middle = (low + high) / 2
            expected = (count * np.minimum(middle * weight, 0.8)).sum() / count.sum()
            low, high = (middle, high) if expected < HIDDEN else (low, middle)
        chance = np.minimum(low * weight, 0.8)[found.col]
    kept = rng.random(found.nnz) >= chance
    return sp.csr_matrix((found.data[kept], (found.row[kept], found.col[kept])), shape=y.shape)


def fit(x: Any, y: sp.csr_matrix, cost: float) -> Any:
    options: dict[str, Any] = {"n_labels": y.shape[1], "tolerance": 0.1, "threads": torch.get_num_threads()}
    return fit_linear(x, y, loss="logistic", C=cost, **options)


def logits(model: Any, x: Any) -> np.ndarray:
    found = x @ model.matrix().T
    return np.asarray(found.toarray() if sp.issparse(found) else found) + model.intercept


def out_of_fold(rows: Rows, y: sp.csr_matrix, cost: float, seed: int) -> np.ndarray:
    """Return the probability of each label by the models that have not seen the row, float32."""
    fold = fold_rows(rows.data, FOLDS, seed=seed)
    p = np.empty(y.shape, np.float32)
    for i in range(FOLDS):
        z = logits(fit(rows.x[fold != i], y[fold != i], cost), rows.x[fold == i])
        p[fold == i] = 1 / (1 + np.exp(-z))
    return p


def ours(p: np.ndarray, y: sp.csr_matrix, n: int) -> Found:
    found = suggest_labels(torch.from_numpy(p), torch.from_numpy(y.toarray()), n=n, kind="missing")
    return found.row.numpy(), found.label.numpy()


def ours_balanced(p: np.ndarray, y: sp.csr_matrix, n: int) -> Found:
    options = {"n": n, "kind": "missing", "balanced": True}
    found = suggest_labels(torch.from_numpy(p), torch.from_numpy(y.toarray()), **options)  # type: ignore[arg-type]
    return found.row.numpy(), found.label.numpy()


def ours_by_rates(p: np.ndarray, y: sp.csr_matrix, n: int) -> Found:
    scores, target = torch.from_numpy(p), torch.from_numpy(y.toarray())
    rates = suggest_labels(scores, target, n=1).rates
    found = suggest_labels(scores, target, observed=rates, n=n, kind="missing")
    return found.row.numpy(), found.label.numpy()


def by_score(p: np.ndarray, y: sp.csr_matrix, n: int) -> Found:
    return _first(np.where(y.toarray() > 0, -1, p), n)


def _first(key: np.ndarray, n: int) -> Found:
    best = np.argpartition(-key.ravel(), n - 1)[:n]
    return np.unravel_index(best[np.argsort(-key.ravel()[best], kind="stable")], key.shape)  # type: ignore[return-value]


def cleanlab_filter(filter_by: str) -> Finder:
    """The labels that cleanlab's multi-label filter finds first, then the others, each by self-confidence."""

    def find(p: np.ndarray, y: sp.csr_matrix, n: int) -> Found:
        from cleanlab.multilabel_classification.filter import find_multilabel_issues_per_class

        lists = [row.tolist() for row in np.split(y.indices, y.indptr[1:-1])]
        issues = np.asarray(find_multilabel_issues_per_class(lists, p, filter_by=filter_by, n_jobs=1))
        return _first(np.where(y.toarray() > 0, -1, p + issues), n)

    return find


def cleanlab_scores(method: str) -> Finder:
    """The labels of the lowest quality by cleanlab, after its thresholds per class are subtracted."""

    def find(p: np.ndarray, y: sp.csr_matrix, n: int) -> Found:
        from cleanlab.rank import get_label_quality_scores

        written = y.toarray() > 0
        key = np.full(y.shape, -1.0)
        for c in np.flatnonzero(written.any(0) & ~written.all(0)):
            both = np.stack([1 - p[:, c], p[:, c]], 1)
            options = {"method": method, "adjust_pred_probs": True}
            key[:, c] = 1 - get_label_quality_scores(written[:, c].astype(int), both, **options)
        return _first(np.where(written, -1, key), n)

    return find


FINDERS: dict[str, Finder] = {
    "suggest_labels": ours,
    "suggest_labels, balanced": ours_balanced,
    "suggest_labels, observed=rates": ours_by_rates,
    "cleanlab, prune_by_noise_rate": cleanlab_filter("prune_by_noise_rate"),
    "cleanlab, confident_learning": cleanlab_filter("confident_learning"),
    "cleanlab, adjusted self_confidence": cleanlab_scores("self_confidence"),
    "cleanlab, adjusted normalized_margin": cleanlab_scores("normalized_margin"),
    "score": by_score,
}
RETRAINED = ("suggest_labels", "suggest_labels, balanced", "cleanlab, prune_by_noise_rate", "score")


def own_count(p: np.ndarray, y: sp.csr_matrix) -> int:
    """How many missing labels cleanlab's filter finds by itself."""
    from cleanlab.multilabel_classification.filter import find_multilabel_issues_per_class

    lists = [row.tolist() for row in np.split(y.indices, y.indptr[1:-1])]
    return int((np.asarray(find_multilabel_issues_per_class(lists, p, n_jobs=1)) & (y.toarray() == 0)).sum())


def recall(model: Any, rows: Rows, k: int = 5) -> float:
    z = torch.from_numpy(np.ascontiguousarray(logits(model, rows.x), np.float32))
    return float(ll.recall_at_k(z, torch.from_numpy(rows.y.toarray()), k))


def measure(
    train: Rows,
    test: Rows,
    kind: str,
    seed: int,
    cost: float,
    full: float,
    retrain: bool,
    finders: list[str],
    only_labelled: bool = False,
) -> dict[str, Any]:
    left = hide(train.y, kind, seed)
    hidden = (train.y - left).tocsr()
    hidden.eliminate_zeros()
    n = hidden.nnz
    p = out_of_fold(train, left, cost, seed)
    peers = any(name.startswith("cleanlab") for name in finders)
    own = min(own_count(p, left), n) if peers else n
    out: dict[str, Any] = {"hidden": n} | ({"cleanlab's own number": own} if peers else {})
    dense = hidden.toarray() > 0
    labelled = left.getnnz(1) > 0 if only_labelled else None
    poor = recall(fit(train.x, left, cost), test) if retrain else 0.0
    for name in finders:
        finder = FINDERS[name]
        begun = time.process_time()
        row, label = finder(p, left, n)
        right = dense[row, label]
        one = {"precision": float(right.mean()), "seconds": time.process_time() - begun}
        if peers:
            one["precision at cleanlab's own number"] = float(right[: max(own, 1)].mean())
        if labelled is not None:
            row_of = np.flatnonzero(labelled)
            some = finder(p[row_of], left[row_of], m := int(dense[row_of].sum()))
            one["precision in rows with labels"] = float(dense[row_of][some].mean()) if m else 0.0
        if retrain and name in RETRAINED:
            added = sp.csr_matrix((np.ones(n, np.float32), (row, label)), shape=left.shape)
            again = recall(fit(train.x, (left + added).tocsr(), cost), test)
            one |= {"recall@5": again, "recovered": (again - poor) / (full - poor)}
            if name.startswith("suggest_labels"):
                kept = sp.csr_matrix((right.astype(np.float32), (row, label)), shape=left.shape)
                kept.eliminate_zeros()
                checked = recall(fit(train.x, (left + kept).tocsr(), cost), test)
                one |= {"recall@5, checked": checked, "recovered, checked": (checked - poor) / (full - poor)}
        out[name] = one
    return out | ({"recall@5 left": poor, "recall@5 full": full} if retrain else {})


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean over the seeds of each number, and the spread of the precision."""
    out: dict[str, Any] = {"seeds": len(found)}
    for name in found[0]:
        if isinstance(found[0][name], dict):
            out[name] = {key: float(np.mean([f[name][key] for f in found])) for key in found[0][name]}
            out[name]["precision of each seed"] = [round(f[name]["precision"], 4) for f in found]
        else:
            out[name] = float(np.mean([f[name] for f in found]))
    if "recall@5 left" in out:
        lost = out["recall@5 full"] - out["recall@5 left"]
        for name in set(RETRAINED) & set(out):  # of the means: a loss of one seed may be next to nothing
            for end in ("", ", checked"):
                if f"recall@5{end}" in out[name]:
                    out[name][f"recovered{end}"] = (out[name][f"recall@5{end}"] - out["recall@5 left"]) / lost
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--cost", type=float, default=3.0)
    parser.add_argument("--finders", nargs="+", default=list(FINDERS), choices=list(FINDERS))
    parser.add_argument("--kinds", nargs="+", default=["random", "rare"], choices=["random", "rare"])
    parser.add_argument("--no-retrain", action="store_true")
    parser.add_argument("--labelled", action="store_true", help="also leave out rows that hiding left without labels")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for name in arguments.sets:
        train, test = load(arguments.data, name)
        full = recall(fit(train.x, train.y, arguments.cost), test)
        print(f"{name}: {train.y.shape[0]} rows, {train.y.shape[1]} labels, recall@5 {full:.4f}", flush=True)
        for kind in arguments.kinds:
            found: list[dict[str, Any]] = []
            for seed in range(arguments.seeds):
                options = (not arguments.no_retrain, arguments.finders, arguments.labelled)
                found.append(measure(train, test, kind, seed, arguments.cost, full, *options))
                results[f"{name}, {kind}"] = made = summary(found)
                if arguments.json:
                    about = {"python": platform.python_version(), "torch": torch.__version__, "C": arguments.cost}
                    arguments.json.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")
            for finder in arguments.finders:
                shown = {key: round(v, 4) for key, v in made[finder].items() if isinstance(v, float)}
                print(f"  {kind:7} {finder:32} {shown}", flush=True)


if __name__ == "__main__":
    main()
