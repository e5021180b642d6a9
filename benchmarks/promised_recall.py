"""Whether promised recalls are kept, and how large the sets are, beside MAPIE's controller of recall.

    python -m benchmarks.promised_recall --data DIR [--json FILE]

DIR holds ``mulan/*.npz`` as `lastlayer.data` reads them. Logistic regressions, one per label, are fitted to the
training part (a half of the rows where there is none). The other rows with labels are split 200 times into two halves
by chance: one chooses the threshold, the other is measured.

- recall: mean over the splits of the mean recall of the rows of the second half, with the standard error of that mean;
- size: the mean number of labels of their sets.

MAPIE (`MultiLabelClassificationController`, conformal risk control) is asked with its own grid of 100 thresholds, and
with a grid of 1000 between 0 and 1, in the first 10 and 3 splits, fewer where rows x labels x thresholds are many. Its
numbers are to be compared with ours of the same splits.
"""

from __future__ import annotations

import argparse
import json
import platform
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.suggest import Rows, fit, logits, matrix
from lastlayer import tune_recall
from lastlayer.data import read_parts, split_rows
from lastlayer.train.config import Config
from lastlayer.train.features import FeatureMap

SETS = (
    "emotions", "scene", "birds", "yeast", "genbase", "medical", "langlog", "slashdot", "cal500", "stackex_chess",
    "corel5k", "bibtex", "delicious",
)  # fmt: skip
SPLITS = 200
PEER_SPLITS = {100: 10, 1000: 3}  # by the number of thresholds
PEER_CELLS = 1e8  # rows x labels x thresholds x splits for the peer


def held_out(folder: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return probabilities and labels of rows that the model has not seen, at least one label each."""
    parts = read_parts(folder / "mulan" / f"{name}.npz")
    if "all" in parts:
        parts = dict(zip(("train", "test"), split_rows(parts["all"], [0.5, 0.5], stratify=True), strict=True))
    train, test = parts["train"], parts["test"].with_labels(parts["train"].label_names)[0]
    features = FeatureMap.fit(train, Config())
    made = [Rows(features(d), matrix(d), d) for d in (train, test)]
    z = logits(fit(made[0].x, made[0].y, 1.0), made[1].x)
    y = made[1].y.toarray() > 0
    return (1 / (1 + np.exp(-z)))[y.any(1)], y[y.any(1)]


def ours(p: np.ndarray, y: np.ndarray, recall: float) -> float:
    return float(tune_recall(torch.from_numpy(p), torch.from_numpy(y), recall))


def mapie(grid: int) -> Callable[[np.ndarray, np.ndarray, float], float]:
    def find(p: np.ndarray, y: np.ndarray, recall: float) -> float:
        from mapie.risk_control import MultiLabelClassificationController

        options = {"predict_params": np.arange(0, 1, 1 / grid)} if grid != 100 else {}
        controller = MultiLabelClassificationController(lambda x: x, target_level=recall, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            controller.calibrate(p, y.astype(int))
        return float(np.ravel(controller.best_predict_param)[0])

    return find


def measure(p: np.ndarray, y: np.ndarray, recall: float, method: Any, splits: int) -> dict[str, Any]:
    found = []
    for seed in range(splits):
        order = np.random.default_rng(seed).permutation(len(p))
        first, second = order[: len(p) // 2], order[len(p) // 2 :]
        chosen = p[second] > method(p[first], y[first], recall)
        kept = (chosen & y[second]).sum(1) / y[second].sum(1)
        found.append((kept.mean(), chosen.sum(1).mean()))
    recalls, sizes = np.array(found).T
    error = float(recalls.std(ddof=1) / np.sqrt(splits))
    return {"recall": float(recalls.mean()), "error": error, "size": float(sizes.mean()), "splits": splits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--recalls", nargs="+", type=float, default=[0.8, 0.9])
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for name in arguments.sets:
        p, y = held_out(arguments.data, name)
        for recall in arguments.recalls:
            one: dict[str, Any] = {
                "rows": len(p),
                "labels": p.shape[1],
                "tune_recall": measure(p, y, recall, ours, SPLITS),
            }
            for grid in () if arguments.no_peer else (100, 1000):
                splits = min(PEER_SPLITS[grid], int(PEER_CELLS / (p.size / 2 * grid)))
                if splits < 2:
                    continue
                one[f"MAPIE, {grid} thresholds"] = measure(p, y, recall, mapie(grid), splits)
                one[f"tune_recall, same splits as {grid}"] = measure(p, y, recall, ours, splits)
            results[f"{name}, {recall}"] = one
            shown = {key: (round(v["recall"], 4), round(v["size"], 2)) for key, v in one.items() if isinstance(v, dict)}
            print(name, recall, len(p), shown, flush=True)
        if arguments.json:
            about = {"python": platform.python_version(), "torch": torch.__version__, "splits": SPLITS}
            arguments.json.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
