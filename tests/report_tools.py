"""Run folders written by hand, to the letter of the format that lastlayer.train documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

import lastlayer as ll

HOSTILE = '</script><img src=x onerror="window.hacked=1">\'{{7*7}}&amp;\u2028<!--<script>'


def make_run(
    folder: Path,
    *,
    rows: int = 60,
    labels: int = 8,
    seed: int = 0,
    noise: float = 0.35,
    names: list[str] | None = None,
    text: str = "the text of row",
    dense: bool = True,
    top: int | None = None,
) -> Path:
    """Write a run folder; `seed` makes the rows, and `noise` how wrong the predictions are."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    hot = rng.random((rows, labels)) < np.linspace(0.6, 0.15, labels)
    hot[: min(3, rows)] = False  # rows without labels
    y = np.clip(0.15 + 0.6 * hot + noise * np.random.default_rng(int(1e6 * noise)).normal(size=hot.shape), 0.001, 0.999)
    y = y.astype(np.float32)
    order = np.argsort(-y, axis=1, kind="stable")[:, : top or labels]
    arrays = {
        "row": np.arange(rows),
        "target_indptr": np.concatenate([[0], hot.sum(1).cumsum()]).astype(np.int64),
        "target_index": hot.nonzero()[1].astype(np.int64),
        "top_index": order.astype(np.int64),
        "top_probability": np.take_along_axis(y, order, 1),
        "k": np.full(rows, 2.6, dtype=np.float32),
    }
    if dense:
        arrays["probability"] = y
    save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, folder / "predictions.safetensors")
    names = names or [f"label{c}" for c in range(labels)]
    put(folder, "labels.json", {"names": names, "train_counts": hot.sum(0).tolist()})
    put(folder, "metrics.json", metrics(y, hot))
    put(folder, "data.json", {
        "parts": {"test": {"source": {}, "rows": rows, "labels_per_row": float(hot.sum() / max(rows, 1)),
                           "fingerprint": f"print{seed}-{rows}", "skipped": 0, "listed": []}},
        "hidden": None, "resolved": {"k": 2.6, "monitor": "recall@3", "loss": "lml"}})  # fmt: skip
    put(folder, "environment.json", {"lastlayer": "0", "torch": "2", "command": ["lastlayer", "train", text]})
    listed = [{"row": i, "id": f"id{i}", "text": f"{text} {i}"} for i in range(rows)]
    put(folder, "examples.json", {"rows": listed})
    (folder / "config.yaml").write_text(f"loss: lml\nseed: {seed}\nlr: {noise}\n")
    (folder / "history.csv").write_text(
        "epoch,step,lr,train_loss,valid_loss,recall@3,seconds\n0,5,0.1,3.5,3.75,0.25,1\n1,10,0.1,2.5,,0.5,1\n"
    )
    put(folder, "done.json", {"seconds": 1.0})
    return folder


def metrics(y: np.ndarray, hot: np.ndarray) -> dict[str, Any]:
    scores, target = torch.from_numpy(y), torch.from_numpy(hot)
    values: dict[str, float] = {}
    for k in (1, 3):
        for name, function in (("precision", ll.precision_at_k), ("recall", ll.recall_at_k), ("ndcg", ll.ndcg_at_k)):
            values[f"{name}@{k}"] = float(function(scores, target, k)) if len(y) else float("nan")
    found = {n: {"value": v, "low": v - 0.01, "high": v + 0.02} for n, v in values.items() if v == v}
    found["ece"] = {"value": 0.125, "low": None, "high": None}
    n = hot.shape[1]
    return {
        "part": "test",
        "rows": len(y),
        "metrics": found,
        "best_epoch": 1,
        "epochs": 2,
        "notes": [],
        "labels": {
            "support": hot.sum(0).tolist(),
            "precision": [0.5] * (n - 1) + [None],
            "recall": [0.25] * n,
            "threshold": [0.4] * n,
            "average_precision": [0.6] * n,
        },
    }


def put(folder: Path, name: str, value: dict[str, Any]) -> None:
    (folder / name).write_text(json.dumps({"format": 1, **value}), "utf-8")


def get(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / name).read_text("utf-8"))
