"""What `k="predicted"` costs and gives: precision at 1 beside `k="auto"`, and the error of the predicted counts.

    python -m benchmarks.predicted_count --data FOLDER [--sets bibtex ...] [--json FILE]

Both models are fitted to the same rows. The counts are compared on the test rows with the best constant known from
the training rows: their mean for the squared error, their median for the absolute one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch

import lastlayer as ll
from benchmarks.label_sets import mulan

SETS = ("bibtex", "slashdot", "medical", "stackex_chess", "yeast")


def compare(folder: Path, name: str) -> dict[str, object]:
    """Fit both models to one set and measure them on its test rows."""
    x, y, test_x, test_y, *_ = mulan(folder, name)
    hot = torch.from_numpy(test_y.toarray() > 0)
    row: dict[str, object] = {"set": name, "rows": y.shape[0], "test_rows": len(hot)}
    for k in ("auto", "predicted"):
        model = ll.LabelSetClassifier(loss="lml", k=k, random_state=0).fit(x, y.astype(int))
        scores = torch.from_numpy(model.decision_function(test_x))
        row[f"P@1, {k}"] = round(100 * float(ll.precision_at_k(scores, hot, 1)), 2)
    counts, seen = hot.sum(1).double().numpy(), np.asarray(y.sum(1)).ravel()
    said = model.count_(model.features_.transform(test_x))
    for kind, predicted in {"predicted": said, "mean": seen.mean(), "median": np.median(seen)}.items():
        row[f"absolute error, {kind}"] = round(float(np.abs(predicted - counts).mean()), 3)
        row[f"squared error, {kind}"] = round(float(((predicted - counts) ** 2).mean()), 3)
    return row


def main(argv: list[str] | None = None) -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with mulan/NAME.npz")
    parser.add_argument("--sets", nargs="*", default=SETS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = []
    for name in arguments.sets:
        rows.append(compare(arguments.data, name))
        print(rows[-1], flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
