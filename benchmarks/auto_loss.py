"""How close `loss="auto"` comes to the best single loss: R@5 and more on test rows, complete labels and half hidden.

    python -m benchmarks.auto_loss --data MULAN [--sets bibtex medical ...] [--json benchmarks/results/auto-loss.json]

Every candidate is fitted to the same rows, with its own C chosen out of fold where it has one, and measured on the test
rows of the set, which no choice sees. The gap is the best candidate's R@5 minus that of "auto", in points. A set
without a test part gets a random fifth of its rows. With hidden labels each training label is dropped with probability
one half, the estimator is told `labels="incomplete"`, and the test rows keep all of their labels. Calibration errors
before calibration are those of the sigmoid of the scores.
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
from lastlayer import metrics

SINGLE: dict[str, dict[str, Any]] = {
    "squared_hinge": {"loss": "squared_hinge"},
    "binary": {"loss": "binary"},
    "lml": {"loss": "lml"},
    "two_way": {"loss": "two_way"},
}


def read(folder: Path, name: str) -> tuple[Any, Any, Any, Any]:
    """Return training and test rows of a set of the Mulan repository, from ``NAME.npz``."""
    with np.load(folder / f"{name}.npz", allow_pickle=False) as z:

        def matrix(key: str) -> Any:
            if key in z:
                return z[key].astype(np.float32)
            indices = z[f"{key}_indices"].astype(np.int32)
            values = z[f"{key}_data"] if f"{key}_data" in z else np.ones(len(indices), np.float32)
            return sp.csr_matrix((values, indices, z[f"{key}_indptr"]), shape=tuple(z[f"{key}_shape"]))

        if "train_Y_indptr" in z:
            return matrix("train_X"), matrix("train_Y"), matrix("test_X"), matrix("test_Y")
        x, y = matrix("all_X"), matrix("all_Y")
    test = np.random.default_rng(0).random(y.shape[0]) < 0.2
    return x[~test], y[~test], x[test], y[test]


def hide(y: sp.csr_matrix, share: float) -> sp.csr_matrix:
    """Drop each label with a probability."""
    y = y.tocoo()
    kept = np.random.default_rng(1).random(len(y.data)) >= share
    return sp.csr_matrix((y.data[kept], (y.row[kept], y.col[kept])), shape=y.shape)


def measure(options: dict[str, Any], data: tuple[Any, Any, Any, Any]) -> dict[str, Any]:
    """Fit one estimator and measure it on the test rows."""
    x, y, test_x, test_y = data
    model = ll.LabelSetClassifier(random_state=0, **options)
    begun = time.process_time()
    model.fit(x, y.astype(int))
    seconds = time.process_time() - begun
    scores, hot = torch.from_numpy(model.decision_function(test_x)), torch.from_numpy(test_y.toarray() > 0)
    said = torch.from_numpy(np.asarray(model.predict(test_x)) > 0)
    p = torch.from_numpy(model.predict_proba(test_x))
    out = {
        "P@1": 100 * float(ll.precision_at_k(scores, hot, 1)),
        "R@5": 100 * float(ll.recall_at_k(scores, hot, 5)),
        "micro_f1": 100 * float(metrics.label_set_f1(said, hot, average="micro")),
        "macro_f1": 100 * float(metrics.label_set_f1(said, hot, average="macro")),
        "ece@5": 100 * float(ll.label_calibration_error(p, hot, min(5, hot.shape[1]))),
    }
    return {**{name: round(v, 2) for name, v in out.items()}, "seconds": round(seconds, 1), "chosen": model.choice_}


def main(argv: list[str] | None = None) -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with NAME.npz of the Mulan sets")
    parser.add_argument("--sets", nargs="*", default=["bibtex", "medical", "slashdot", "langlog", "yeast", "scene"])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = []
    for name in arguments.sets:
        x, y, test_x, test_y = read(arguments.data, name)
        for hidden in (0.0, 0.5):
            data = (x, hide(y, hidden) if hidden else y, test_x, test_y)
            labels = {"labels": "incomplete"} if hidden else {}
            cases = {**SINGLE, "auto": {}}
            if hidden:
                cases = {**SINGLE, "lml, thinned": {"loss": "lml", **labels}, "auto": labels}
            found = {case: measure(options, data) for case, options in cases.items()}
            best = max((f["R@5"] for case, f in found.items() if case != "auto"))
            gap = round(best - found["auto"]["R@5"], 2)
            for case, values in found.items():
                rows.append({"set": name, "hidden": hidden, "case": case, **values})
                print(*rows[-1].values(), sep="  ", flush=True)
            print(f"{name}, {hidden:.0%} hidden: gap {gap} points of R@5", flush=True)
            if arguments.json:
                machine = {"cpu": platform.processor() or platform.machine(), "torch": torch.__version__}
                arguments.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
