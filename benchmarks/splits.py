"""How even and how fast stratified splits are, beside the package iterative-stratification and splits by chance.

    python -m benchmarks.splits [--data FILE ...] [--json benchmarks/results/splits-cpu.json]

Each file is anything that `lastlayer.data` reads; its features are not looked at. Per set and method, over five seeds:

- share: mean over labels and parts of |share of the label's rows in the part - wanted share|, in percentage points, for
  labels with at least as many rows as there are parts;
- LD: the label distribution measure of Sechidis et al. (2011), mean |odds of the label in the part - odds in all rows|;
- pairs: as share, for the commonest 20,000 pairs of the 1,000 commonest labels;
- size: mean |rows of the part - wanted rows|;
- empty: how many labels of those have no row in some part;
- seconds of processor time.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from lastlayer.data import LabelData, fold_rows, read_parts, split_rows
from lastlayer.data.labeldata import NumberNames

SEEDS = 5
LARGEST_DENSE = 200_000_000  # entries of the indicator matrix that the peer needs


def synthetic(rows: int, labels: int, mean: float = 5.0) -> LabelData:
    """Label sets of independent labels with Zipf frequencies."""
    rng = np.random.default_rng(0)
    frequency = 1 / np.arange(1, labels + 1)
    drawn = rng.choice(labels, size=(counts := rng.poisson(mean, rows)).sum(), p=frequency / frequency.sum())
    key = np.unique(np.repeat(np.arange(rows), counts) * labels + drawn)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(key // labels, minlength=rows))])
    return LabelData(None, None, indptr, key % labels, NumberNames(labels))


def only_labels(path: Path) -> LabelData:
    """The label lists of all parts of a file."""
    parts = list(read_parts(path).values())
    indptr = np.concatenate([[0], np.cumsum(np.concatenate([p.row_counts() for p in parts]))])
    return LabelData(None, None, indptr, np.concatenate([p.indices for p in parts]), parts[0].label_names)


def matrix(data: LabelData) -> Any:
    ones = np.ones(len(data.indices), dtype=np.int64)
    return sp.csr_matrix((ones, data.indices, data.indptr), shape=(len(data), data.n_labels))


def ours(order: int) -> Callable[[LabelData, list[float], int], np.ndarray]:
    def run(data: LabelData, fractions: list[float], seed: int) -> np.ndarray:
        if len(set(fractions)) == 1:
            return fold_rows(data, len(fractions), seed=seed, order=order)
        parts = split_rows(data, fractions, seed=seed, stratify=True, order=order)
        out = np.empty(len(data), dtype=np.int64)
        for i, part in enumerate(parts):
            out[part.row_numbers()] = i
        return out

    return run


def chance(data: LabelData, fractions: list[float], seed: int) -> np.ndarray:
    order = np.random.default_rng(seed).permutation(len(data))
    out = np.empty(len(data), dtype=np.int64)
    out[order] = np.searchsorted(np.cumsum(fractions)[:-1] * len(data), np.arange(len(data)), side="right")
    return out


def peer(data: LabelData, fractions: list[float], seed: int) -> np.ndarray:
    from iterstrat.ml_stratifiers import MultilabelStratifiedKFold, MultilabelStratifiedShuffleSplit

    y = matrix(data).toarray()
    out = np.zeros(len(data), dtype=np.int64)
    if len(set(fractions)) == 1:
        folds = MultilabelStratifiedKFold(n_splits=len(fractions), shuffle=True, random_state=seed)
        for i, (_, held) in enumerate(folds.split(y, y)):
            out[held] = i
        return out
    once = MultilabelStratifiedShuffleSplit(n_splits=1, test_size=fractions[1], random_state=seed)
    out[next(iter(once.split(y, y)))[1]] = 1
    return out


def evenness(data: LabelData, part: np.ndarray, fractions: list[float]) -> dict[str, float]:
    """The measures of one split."""
    y, share = matrix(data), np.array(fractions)
    n_parts = len(fractions)
    counts = np.stack([np.asarray(y[part == j].sum(0)).ravel() for j in range(n_parts)])
    total = counts.sum(0)
    enough = total >= n_parts
    sizes = np.bincount(part, minlength=n_parts)
    odds = counts / np.maximum(sizes[:, None] - counts, 1)
    whole = total / np.maximum(len(data) - total, 1)
    common = y[:, np.argsort(-total, kind="stable")[:1000]]
    pairs = sp.triu(common.T @ common, 1).tocoo()
    frequent = np.argsort(-pairs.data, kind="stable")[:20_000]
    frequent = frequent[pairs.data[frequent] >= n_parts]
    a, b, seen = pairs.row[frequent], pairs.col[frequent], pairs.data[frequent]
    by_part = [np.asarray((z.T @ z).tocsr()[a, b]).ravel() for z in (common[part == j] for j in range(n_parts))]
    gap = np.abs(np.stack(by_part) / np.maximum(seen, 1) - share[:, None]) if len(a) else np.zeros((1, 1))
    return {
        "share": 100 * float(np.abs(counts[:, enough] / total[enough] - share[:, None]).mean()),
        "LD": float(np.abs(odds - whole)[:, total > 0].mean()),
        "pairs": 100 * float(gap.mean()),
        "size": float(np.abs(sizes - share * len(data)).mean()),
        "empty": float((counts[:, enough] == 0).any(0).sum()),
    }


def measure(data: LabelData, fractions: list[float], method: Callable[..., np.ndarray], seeds: int) -> dict[str, Any]:
    found = []
    for seed in range(seeds):
        start = time.process_time()
        part = method(data, fractions, seed)
        seconds = time.process_time() - start
        found.append({**evenness(data, part, fractions), "seconds": seconds})
    return {name: float(f"{np.mean([f[name] for f in found]):.4g}") for name in found[0]}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="*", default=[])
    parser.add_argument("--synthetic", type=int, nargs="*", default=[100_000, 100, 1_000_000, 10_000])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    cases = {path.name.partition(".")[0]: only_labels(path) for path in arguments.data}
    sizes = arguments.synthetic
    for rows, labels in zip(sizes[::2], sizes[1::2], strict=True):
        cases[f"made up {rows:,} x {labels:,}"] = synthetic(rows, labels)
    methods = {"lastlayer": ours(1), "lastlayer, pairs": ours(2), "iterative-stratification": peer, "chance": chance}
    out: list[dict[str, Any]] = []
    for name, data in cases.items():
        for title, fractions in (("5 folds", [0.2] * 5), ("80 % and 20 %", [0.8, 0.2])):
            for method, run in methods.items():
                large = len(data) * data.n_labels > LARGEST_DENSE
                if large and method not in ("lastlayer", "chance"):
                    continue  # the peer needs a dense matrix, and the pairs half an hour
                slow = method != "lastlayer" and len(data.indices) > 100_000  # minutes per split
                seeds = 1 if large or (slow and run is not chance) else arguments.seeds
                line = {"data": name, "rows": len(data), "labels": data.n_labels, "split": title, "method": method}
                out.append({**line, "seeds": seeds, **measure(data, fractions, run, seeds)})
                print(json.dumps(out[-1]), flush=True)
    if arguments.json:
        versions = {"python": platform.python_version(), "numpy": np.__version__, "machine": platform.machine()}
        arguments.json.write_text(json.dumps({"versions": versions, "results": out}, indent=1) + "\n")


if __name__ == "__main__":
    main()
