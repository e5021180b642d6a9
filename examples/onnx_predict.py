"""Predict label sets with an exported run: NumPy and ONNX Runtime, without torch or lastlayer.

lastlayer export runs/tags-1                      # writes model.onnx and, beside it, model.json
python examples/onnx_predict.py runs/tags-1/model.onnx "a text" "another text"
"""

import json
import re
import sys
from pathlib import Path

import numpy as np
import onnxruntime


def features(texts: list[str], about: dict) -> np.ndarray:
    """Count the known words of each text, and weigh them: (1 + log count) x idf, scaled to unit length."""
    place = {word: i for i, word in enumerate(about["vocabulary"])}
    (low, high), join = about["ngrams"], " " if about["analyzer"] == "word" else ""
    counts = np.zeros((len(texts), len(place)), np.float32)
    for row, text in zip(counts, texts, strict=True):
        units = re.findall(about["token_pattern"], text.lower()) if join else re.sub(r"\s\s+", " ", text.lower())
        for n in range(low, high + 1):
            for i in range(len(units) - n + 1):
                if (at := place.get(join.join(units[i : i + n]))) is not None:
                    row[at] += 1
    weights = np.where(counts > 0, 1 + np.log(np.maximum(counts, 1)), 0) * np.array(about["idf"], np.float32)
    return weights / np.maximum(np.linalg.norm(weights, axis=1, keepdims=True), 1e-12)


def predict(path: str, texts: list[str]) -> list[list[str]]:
    """Return the labels of each text, best first."""
    about = json.loads(Path(path).with_suffix(".json").read_text(encoding="utf-8"))
    session = onnxruntime.InferenceSession(path)
    _, p = session.run(None, {"features": features(texts, about["features"]).astype(np.float32)})
    if about["thresholds"] is not None:
        sizes = (p > np.array(about["thresholds"], np.float32)).sum(1)
        p = np.where(p > np.array(about["thresholds"], np.float32), p, -1)
    else:  # as many labels as the row is expected to have
        sizes = np.maximum(np.rint(p.sum(1) if about["k"] is None else np.full(len(p), about["k"])), 1).astype(int)
    return [[about["labels"][c] for c in np.argsort(-row, kind="stable")[:n]] for row, n in zip(p, sizes, strict=True)]


if __name__ == "__main__":
    for labels in predict(sys.argv[1], sys.argv[2:]):
        print(", ".join(labels))
