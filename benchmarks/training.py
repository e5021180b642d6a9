"""How fast linear models train: `LabelSetClassifier` beside scikit-learn's one-versus-rest logistic regression.

    python -m benchmarks.training [--data MULAN] [--json benchmarks/results/training-cpu.json]
    python -m benchmarks.training --flat FOLDER [--peers PYTHON] [--json benchmarks/results/training-cpu.json]

Both get the same sparse rows in one run, and one thread; rows per second are training rows over the processor time of
one `fit`, which other programs of the machine disturb less than the time of the clock. P@1 on held-out rows stands
beside it: a model that is fast because it learned nothing would show.

The second form compares the exact solver (`fit_linear`) with scikit-learn's `LinearSVC`, PECOS without a tree and
LibMultiLabel, on the sets of `benchmarks.label_sets`; each program runs in a process of its own. `PYTHON` is that of an
environment with libpecos and libmultilabel. A label is predicted where its margin is positive. Macro-F1 is over all
labels that training rows carry.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
import sklearn
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.multiclass import OneVsRestClassifier

import lastlayer as ll
from benchmarks.label_sets import SETS, Rows
from benchmarks.xmc import run_one, write_rows

FLAT_SETS = ("bibtex", "medical", "corel5k", "goemotions", "delicious", "debian tags")
FLAT_PROGRAMS = ("lastlayer_flat", "linearsvc", "pecos_flat", "libmultilabel")
OTHERS = FLAT_PROGRAMS[2:]  # in an environment of their own


def bibtex(folder: Path) -> tuple[Any, ...]:
    """The official split of Mulan's bibtex, from ``bibtex.npz``."""
    with np.load(folder / "bibtex.npz", allow_pickle=False) as z:

        def matrix(name: str) -> scipy.sparse.csr_matrix:
            indices = z[f"{name}_indices"].astype(np.int32)
            values = z[f"{name}_data"] if f"{name}_data" in z else np.ones(len(indices), np.float32)
            return scipy.sparse.csr_matrix((values, indices, z[f"{name}_indptr"]), shape=tuple(z[f"{name}_shape"]))

        train_x, train_y, test_x, test_y = (matrix(n) for n in ("train_X", "train_Y", "test_X", "test_Y"))
    return train_x, train_y.toarray().astype(int), test_x, test_y.toarray().astype(int)


def synthetic(rows: int, features: int = 2000, labels: int = 50, words: int = 20) -> tuple[Any, ...]:
    """Bags of words whose labels are the largest scores of a hidden linear model."""
    rng = np.random.default_rng(0)
    total = rows + rows // 10
    indices = rng.integers(0, features, total * words)
    x = scipy.sparse.csr_matrix(
        (np.full(total * words, words**-0.5, np.float32), indices, np.arange(0, total * words + 1, words)),
        shape=(total, features),
    )
    x.sum_duplicates()
    scores = x @ rng.normal(size=(features, labels)) + 0.3 * rng.normal(size=(total, labels))
    y = (scores >= np.partition(scores, -3, axis=1)[:, [-3]]).astype(int)
    return x[:rows], y[:rows], x[rows:], y[rows:]


def measure(name: str, model: Any, data: tuple[Any, ...]) -> dict[str, Any]:
    train_x, train_y, test_x, test_y = data
    start = time.process_time()
    model.fit(train_x, train_y)
    seconds = time.process_time() - start
    scores = torch.as_tensor(np.asarray(model.decision_function(test_x)))
    precision = ll.precision_at_k(scores, torch.as_tensor(test_y), 1).item()
    return {
        "model": name,
        "seconds": round(seconds, 2),
        "rows/s": round(len(train_y) / seconds),
        "P@1": round(precision, 4),
    }


def flat_quality(rows: Rows, scores: np.ndarray) -> dict[str, float]:
    """Precision and recall of the best labels, and F1 of the labels with a positive margin, in percent."""
    target = rows.yt.toarray() > 0
    best = np.argsort(-scores, axis=1, kind="stable")[:, :5]
    hit = np.take_along_axis(target, best, 1)
    said = scores > 0
    right, wrong, missed = ((a & b).sum(0) for a, b in ((said, target), (said, ~target), (~said, target)))
    known = np.diff(rows.y.tocsc().indptr) > 0
    f1 = 2 * right / np.maximum(2 * right + wrong + missed, 1)
    out = {"P@1": hit[:, 0].mean(), "R@5": (hit.sum(1) / target.sum(1)).mean()}
    out["micro-F1"] = 2 * right.sum() / max(2 * right.sum() + wrong.sum() + missed.sum(), 1)
    out["macro-F1"] = f1[known].mean()
    return {name: round(100 * float(value), 2) for name, value in out.items()}


def flat(folder: Path, peers: str | None, names: list[str], save: Any) -> None:
    """Measure the exact solver and its peers, set by set."""
    programs = [name for name in FLAT_PROGRAMS if peers is not None or name not in OTHERS]
    for name in names:
        rows = SETS[name](folder)
        with tempfile.TemporaryDirectory() as place:
            write_rows(rows, Path(place))
            for program in programs:
                found = run_one(program, Path(place), peers if program in OTHERS else None)
                row: dict[str, Any] = {"case": name, "rows": rows.x.shape[0], "labels": rows.y.shape[1]}
                row["program"] = program
                if "failed" in found:
                    row["failed"] = found["failed"]
                else:
                    row |= flat_quality(rows, found["scores"])
                    row |= {
                        "train s": round(found["train"], 2),
                        "peak MB with imports and rows": round(found["peak_mb"]),
                    }
                    row["peak MB of training"] = round(found["peak_mb"] - found["start_mb"])
                print(*row.values(), sep="  ", flush=True)
                save(row)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with bibtex.npz; without it that case is left out")
    parser.add_argument("--rows", type=int, nargs="*", default=[10_000, 100_000], help="of the synthetic sets")
    parser.add_argument("--flat", type=Path, metavar="FOLDER", help="compare the exact solver on the sets in it")
    parser.add_argument("--peers", help="the Python of an environment with libpecos and libmultilabel")
    parser.add_argument("--sets", nargs="*", default=list(FLAT_SETS), help="of the comparison of exact solvers")
    parser.add_argument("--json", type=Path, help="results are merged into this file")
    arguments = parser.parse_args(argv)
    kept = json.loads(arguments.json.read_text()) if arguments.json is not None and arguments.json.exists() else {}
    if arguments.flat is not None:

        def save(row: dict[str, Any]) -> None:
            others = [
                one for one in kept.get("flat", []) if (one["case"], one["program"]) != (row["case"], row["program"])
            ]
            kept["flat"] = [*others, row]
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(kept, indent=1) + "\n")

        flat(arguments.flat, arguments.peers, arguments.sets, save)
        return
    cases = {} if arguments.data is None else {"bibtex": bibtex(arguments.data)}
    cases.update({f"synthetic {rows:,} x 50 labels": synthetic(rows) for rows in arguments.rows})
    torch.set_num_threads(1)
    small = synthetic(100)
    ll.LabelSetClassifier(loss="lml", epochs=1).fit(small[0], small[1])  # imports are no part of training
    rows = []
    for case, data in cases.items():
        models = {
            "LabelSetClassifier, lml": ll.LabelSetClassifier(loss="lml", random_state=0),
            "LabelSetClassifier, binary": ll.LabelSetClassifier(loss="binary", solver="sgd", random_state=0),
            "one-vs-rest logistic regression": OneVsRestClassifier(LogisticRegression(solver="liblinear"), n_jobs=1),
        }
        for name, model in models.items():
            rows.append({"case": case, **measure(name, model, data)})
            print(*rows[-1].values(), sep="  ", flush=True)
    if arguments.json:
        machine = {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "scikit-learn": sklearn.__version__,
        }
        arguments.json.write_text(json.dumps(kept | {"machine": machine, "training": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
