"""Whether promised recalls are kept, and how large the sets are, beside MAPIE's controller of recall.

    python -m benchmarks.promised_recall --data DIR [--splits 200] [--json FILE]

DIR holds ``mulan/*.npz`` as `lastlayer.data` reads them. Logistic regressions, one per label, are fitted to the
training part (a half of the rows where there is none). The other rows with labels are split 200 times into two halves
by chance: one chooses the threshold, the other is measured.

- recall: mean over the splits of the mean recall of the rows of the second half, with the standard error of that mean;
- size: the mean number of labels of their sets.

MAPIE (`MultiLabelClassificationController`, conformal risk control) sees the same 200 splits, with its own grid of 100
thresholds, and with a grid of 1000 between 0 and 1 where rows x labels are not too many. It computes the risk of each
row and threshold once (`compute_risks`) and chooses a threshold for each split (`compute_best_predict_param`); the
first split is also given to `calibrate`, which must choose the same.
"""

from __future__ import annotations

import argparse
import json
import platform
import warnings
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
PEER_CELLS = 1e9  # rows x labels x thresholds, up to which the peer is asked


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


class Ours:
    """`lastlayer.tune_recall`."""

    def __init__(self, p: np.ndarray, y: np.ndarray) -> None:
        self.p, self.y = torch.from_numpy(p), torch.from_numpy(y)

    def threshold(self, rows: np.ndarray, recall: float) -> float:
        return float(tune_recall(self.p[rows], self.y[rows], recall))


class Mapie:
    """MAPIE's controller, whose risks of all rows are computed once."""

    def __init__(self, p: np.ndarray, y: np.ndarray, grid: int) -> None:
        self.p, self.y = p, y.astype(int)
        self.options = {"predict_params": np.arange(0, 1, 1 / grid)} if grid != 100 else {}
        controller, size = self._made(0.9), max(int(2e7 / (p.shape[1] * grid)), 1)
        for at in range(0, len(p), size):
            controller.compute_risks(p[at : at + size], self.y[at : at + size], _refit=at == 0)
        self.risks = controller._risks
        self.checked = False

    def threshold(self, rows: np.ndarray, recall: float) -> float:
        controller = self._made(recall)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            controller._risks = self.risks[rows]
            controller.compute_best_predict_param()
            found = float(np.ravel(controller.best_predict_param)[0])
            if not self.checked:
                self.checked = True
                controller.calibrate(self.p[rows], self.y[rows])
                assert float(np.ravel(controller.best_predict_param)[0]) == found
        return found

    def _made(self, recall: float) -> Any:
        from mapie.risk_control import MultiLabelClassificationController

        return MultiLabelClassificationController(lambda x: x, target_level=recall, **self.options)


def measure(p: np.ndarray, y: np.ndarray, recall: float, method: Ours | Mapie, splits: int) -> dict[str, Any]:
    found = []
    for seed in range(splits):
        order = np.random.default_rng(seed).permutation(len(p))
        first, second = order[: len(p) // 2], order[len(p) // 2 :]
        chosen = p[second] > method.threshold(first, recall)
        kept = (chosen & y[second]).sum(1) / y[second].sum(1)
        found.append((kept.mean(), chosen.sum(1).mean()))
    recalls, sizes = np.array(found).T
    error = float(recalls.std(ddof=1) / np.sqrt(splits))
    return {"recall": float(recalls.mean()), "error": error, "size": float(sizes.mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--recalls", nargs="+", type=float, default=[0.8, 0.9])
    parser.add_argument("--splits", type=int, default=200)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for name in arguments.sets:
        p, y = held_out(arguments.data, name)
        methods: dict[str, Ours | Mapie] = {"tune_recall": Ours(p, y)}
        for grid in () if arguments.no_peer else (100, 1000):
            if p.size * grid <= PEER_CELLS:
                methods[f"MAPIE, {grid} thresholds"] = Mapie(p, y, grid)
        for recall in arguments.recalls:
            one: dict[str, Any] = {"rows": len(p), "labels": p.shape[1]}
            one |= {method: measure(p, y, recall, found, arguments.splits) for method, found in methods.items()}
            results[f"{name}, {recall}"] = one
            shown = {key: (round(v["recall"], 4), round(v["size"], 2)) for key, v in one.items() if isinstance(v, dict)}
            print(name, recall, len(p), shown, flush=True)
        if arguments.json:
            about = {"python": platform.python_version(), "torch": torch.__version__, "splits": arguments.splits}
            arguments.json.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
