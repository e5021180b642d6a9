"""Where does a simple tagger go wrong? Error analysis on the sample that ships with the package, in a few seconds.

    python examples/errors.py

A ridge regression on hashed words scores 252 Debian tags; thresholds are tuned on the validation rows. Tags have the
form facet::tag, which makes a tree: two tags of one facet are siblings.
"""

from __future__ import annotations

import re
import zlib

import torch
from torch import Tensor

import lastlayer as ll
from lastlayer.data import LabelData, load_sample

N_FEATURES = 8192


def features(data: LabelData) -> Tensor:
    """Hashed words of each text, rows of length 1."""
    x = torch.zeros(len(data), N_FEATURES)
    for row, text in enumerate(data.texts):
        for word in set(re.findall(r"[a-z]{2,}", text.lower())):
            x[row, zlib.crc32(word.encode()) % N_FEATURES] = 1
    return torch.nn.functional.normalize(x)


def labels(data: LabelData) -> Tensor:
    """The labels, multi-hot."""
    y = torch.zeros(len(data), data.n_labels)
    for row in range(len(data)):
        y[row, torch.from_numpy(data.row_labels(row))] = 1
    return y


def facets(names: list[str]) -> ll.LabelTree:
    """The tree of facet::tag names."""
    parents: dict[str, str | None] = {name: "facet " + name.split("::")[0] for name in names}
    parents |= dict.fromkeys([*parents.values()], "tags") | {"tags": None}
    return ll.LabelTree.from_parents(parents)


def main() -> ll.metrics.LabelSetErrors:
    parts = load_sample()
    x = {name: features(part) for name, part in parts.items()}
    y = {name: labels(part) for name, part in parts.items()}
    mean = y["train"].mean(0)
    kernel = x["train"] @ x["train"].T + 0.5 * torch.eye(len(x["train"]))
    weight = x["train"].T @ torch.linalg.solve(kernel, y["train"] - mean)
    scores = {name: x[name] @ weight + mean for name in x}
    threshold = ll.tune_thresholds(scores["valid"], y["valid"], per="all")
    names = list(parts["train"].label_names)
    predicted = ll.decode_threshold(scores["test"], threshold, at_least=1)
    found = ll.metrics.label_set_errors(scores["test"], y["test"], predicted=predicted, tree=facets(names), top=8)
    print(f"{found.n_rows} rows, {found.n_labels} labels, mean F1 of the rows {found.value:.3f}\n")
    print(found.to_markdown())
    print("Most frequent confusions (true: predicted instead)")
    for c in found.confusions:
        print(f"  {c.count:3d}  {c.truth_name}: {c.predicted_name}{'  (siblings)' if c.sibling else ''}")
    print("\nTogether in the predictions, together in the data")
    for pair in found.cooccurrence:
        print(f"  {pair.predicted:4d} {pair.true:4d}  {pair.first_name} + {pair.second_name}")
    print({name: round(gain, 3) for name, gain in found.oracles.items()})
    return found


if __name__ == "__main__":
    main()
