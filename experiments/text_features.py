"""Texts to rows of numbers, once: GoEmotions and Debian tags in the npz format of the other label sets.

    python -m experiments.text_features --data FOLDER --out FOLDER

The folder holds `goemotions/{train,test}.tsv.xz` (the official files: text, comma-separated label ids, comment id) and
`debian_tags/debian_bookworm.jsonl.xz` (one package a line: name, source, short, long, tags). Features are
scikit-learn's TF-IDF of words, sublinear counts, rows of length 1, for the most frequent words of the training rows.
Debian packages are test rows where md5(source package) % 5 == 0, so that packages of one source stay on one side; tags
on fewer than 20 training packages are left out, and so are packages without a tag that is left.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

Rows = list[tuple[str, list[int]]]


def goemotions(folder: Path) -> dict[str, Rows]:
    def read(part: str) -> Rows:
        with lzma.open(folder / "goemotions" / f"{part}.tsv.xz", "rt", encoding="utf8") as file:
            fields = [line.rstrip("\n").split("\t") for line in file]
        return [(text, [int(i) for i in labels.split(",")]) for text, labels, *_ in fields]

    return {part: read(part) for part in ("train", "test")}


def debian_tags(folder: Path, fewest: int = 20) -> dict[str, Rows]:
    with lzma.open(folder / "debian_tags" / "debian_bookworm.jsonl.xz", "rt", encoding="utf8") as file:
        packages = [package for package in map(json.loads, file) if package["tags"]]
    parts = [int(hashlib.md5(p["source"].encode()).hexdigest(), 16) % 5 for p in packages]
    counts = Counter(tag for p, part in zip(packages, parts, strict=True) if part for tag in p["tags"])
    number = {tag: i for i, tag in enumerate(sorted(t for t, count in counts.items() if count >= fewest))}
    rows: dict[str, Rows] = {"train": [], "test": []}
    for p, part in zip(packages, parts, strict=True):
        labels = sorted(number[tag] for tag in p["tags"] if tag in number)
        if labels:
            rows["train" if part else "test"].append((f"{p['name']}. {p['short']}. {p['long']}", labels))
    return rows


def matrices(parts: dict[str, Rows], words: int) -> dict[str, np.ndarray]:
    """Vectorise the texts; return the arrays of the npz file."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer = TfidfVectorizer(max_features=words, min_df=2, sublinear_tf=True, dtype=np.float32)
    vectorizer.fit(text for text, _ in parts["train"])
    n_labels = 1 + max(max(labels) for rows in parts.values() for _, labels in rows)
    made: dict[str, Any] = {}
    for part, rows in parts.items():
        x = vectorizer.transform([text for text, _ in rows])
        made |= {f"{part}_X_indices": x.indices.astype(np.uint16), f"{part}_X_indptr": x.indptr.astype(np.int32)}
        made |= {f"{part}_X_data": x.data.astype(np.float16), f"{part}_X_shape": np.array(x.shape)}
        made[f"{part}_Y_indices"] = np.array([i for _, labels in rows for i in labels], np.uint16)
        made[f"{part}_Y_indptr"] = np.cumsum([0] + [len(labels) for _, labels in rows]).astype(np.int32)
        made[f"{part}_Y_shape"] = np.array([len(rows), n_labels])
    return made


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--words", type=int, default=2500)
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for read in (goemotions, debian_tags):
        made = matrices(read(arguments.data), arguments.words)
        np.savez_compressed(arguments.out / f"{read.__name__}.npz", **made)
        print(read.__name__, {part: (made[f"{part}_X_shape"], made[f"{part}_Y_shape"]) for part in ("train", "test")})


if __name__ == "__main__":
    main()
