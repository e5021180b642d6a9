"""How close `loss="auto"` comes to the best single loss: R@5 and more on test rows, complete labels and half hidden.

    python -m benchmarks.auto_loss --data FOLDER [--sets bibtex medical ...] [--json benchmarks/results/auto-loss.json]

`benchmarks.label_sets` says what the folder holds. Every candidate is fitted to the same rows, with its own C chosen
out of fold where it has one, and measured on the test rows of the set, which no choice sees. The gap is the best
candidate's R@5 minus that of "auto", in points, and ``gap_se`` its standard error over the test rows. With hidden
labels each training label is dropped with probability one half, the estimator is told `labels="incomplete"`, and the
test rows keep all of their labels.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

import lastlayer as ll
from benchmarks.label_sets import SETS
from lastlayer import metrics

SINGLE: dict[str, dict[str, Any]] = {
    "squared_hinge": {"loss": "squared_hinge"},
    "binary": {"loss": "binary"},
    "lml": {"loss": "lml"},
    "two_way": {"loss": "two_way"},
}


def hide(y: sp.csr_matrix, share: float) -> sp.csr_matrix:
    """Drop each label with a probability."""
    y = y.tocoo()
    kept = np.random.default_rng(1).random(len(y.data)) >= share
    return sp.csr_matrix((y.data[kept], (y.row[kept], y.col[kept])), shape=y.shape)


def measure(options: dict[str, Any], data: tuple[Any, Any, Any, Any]) -> tuple[dict[str, Any], np.ndarray]:
    """Fit one estimator and measure it on the test rows; also return the recall at 5 of each of them."""
    x, y, test_x, test_y = data
    model = ll.LabelSetClassifier(random_state=0, **options)
    begun = time.process_time()
    model.fit(x, y.astype(int))
    seconds = time.process_time() - begun
    scores, hot = torch.from_numpy(model.decision_function(test_x)), torch.from_numpy(test_y.toarray() > 0)
    said = torch.from_numpy(np.asarray(model.predict(test_x)) > 0)
    p = torch.from_numpy(model.predict_proba(test_x))
    recall = 100 * ll.recall_at_k(scores, hot, 5, reduction="none").numpy()
    out = {
        "P@1": 100 * float(ll.precision_at_k(scores, hot, 1)),
        "R@5": float(recall.mean()),
        "micro_f1": 100 * float(metrics.label_set_f1(said, hot, average="micro")),
        "macro_f1": 100 * float(metrics.label_set_f1(said, hot, average="macro")),
        "ece@5": 100 * float(ll.label_calibration_error(p, hot, min(5, hot.shape[1]))),
    }
    rounded = {name: round(value, 2) for name, value in out.items()}
    return {**rounded, "seconds": round(seconds, 1), "chosen": model.choice_}, recall


def compare(name: str, data: tuple[Any, Any, Any, Any], hidden: float) -> list[dict[str, Any]]:
    """Measure every single loss and "auto" on one set; the row of "auto" has the gap to the best."""
    labels = {"labels": "incomplete"} if hidden else {}
    cases = {**SINGLE, **({"lml, thinned": {"loss": "lml", **labels}} if hidden else {}), "auto": labels}
    rows, recalls = [], {}
    for case, options in cases.items():
        values, recalls[case] = measure(options, data)
        rows.append({"set": name, "hidden": hidden, "case": case, **values})
        print(*rows[-1].values(), sep="  ", flush=True)
    best = max((row["R@5"], row["case"]) for row in rows[:-1])[1]
    difference = recalls[best] - recalls["auto"]
    error = float(difference.std() / np.sqrt(len(difference)))
    rows[-1] |= {"best": best, "gap": round(float(difference.mean()), 2), "gap_se": round(error, 2)}
    print(f"{name}, {hidden:.0%} hidden: gap {rows[-1]['gap']} points of R@5, standard error {error:.2f}", flush=True)
    return rows


def main(argv: list[str] | None = None) -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the sets")
    names = ["bibtex", "delicious", "medical", "slashdot", "goemotions", "debian tags"]
    parser.add_argument("--sets", nargs="*", default=names, choices=SETS)
    parser.add_argument("--hidden", nargs="*", type=float, default=[0.0, 0.5], help="shares of hidden labels")
    parser.add_argument("--json", type=Path, help="results are merged into this file")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    kept = []
    if arguments.json is not None and arguments.json.exists():
        kept = json.loads(arguments.json.read_text())["rows"]
    for name in arguments.sets:
        rows = SETS[name](arguments.data)
        for hidden in arguments.hidden:
            data = (rows.x, hide(rows.y, hidden) if hidden else rows.y, rows.xt, rows.yt)
            kept = [row for row in kept if (row["set"], row["hidden"]) != (name, hidden)]
            kept += compare(name, data, hidden)
            if arguments.json is not None:
                machine = {"cpu": platform.processor() or platform.machine(), "torch": torch.__version__}
                arguments.json.write_text(json.dumps({"machine": machine, "rows": kept}, indent=1) + "\n")


if __name__ == "__main__":
    main()
