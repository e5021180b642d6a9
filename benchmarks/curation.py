"""Time and memory of suggestions, promised recalls and splits for very many rows and labels, on made-up sparse data.

    python -m benchmarks.curation [--rows 1000000] [--labels 10000] [--json FILE]

Labels are drawn with frequencies of 1/rank. Each row lists 50 scores, with their labels, and a label is written down
with the probability that its score says; no row has more than 20. Each part runs in a process of its own on one thread:
processor seconds of the call alone, and the peak of the process's memory with the data in it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import resource
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LISTED, MOST, CHUNK = 50, 20, 50_000


def made(rows: int, labels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores, their labels and index lists of written labels, each row by row, padded with -1."""
    generator = torch.Generator().manual_seed(0)
    weight = 1 / torch.arange(1, labels + 1).double()
    ends = (weight.cumsum(0) / weight.sum()).float()
    scores, indices = torch.empty(rows, LISTED), torch.empty(rows, LISTED, dtype=torch.int32)
    target = torch.empty(rows, MOST, dtype=torch.int32)
    for start in range(0, rows, CHUNK):
        part = slice(start, min(start + CHUNK, rows))
        shape = (part.stop - part.start, LISTED)
        index = torch.searchsorted(ends, torch.rand(shape, generator=generator)).clamp(max=labels - 1)
        index = index.sort(-1).values
        index[:, 1:][index[:, 1:] == index[:, :-1]] = -1  # drawn twice
        p = torch.where(index >= 0, torch.rand(shape, generator=generator) ** 4, 0)
        written = (torch.rand(shape, generator=generator) < p) & (index >= 0)
        scores[part], indices[part] = p, index
        target[part] = torch.where(written, index, -1).sort(-1, descending=True).values[:, :MOST]
    return scores, indices, target


def suggest(rows: int, labels: int) -> dict[str, Any]:
    """Measure `lastlayer.suggest_labels` with lists of scores."""
    from lastlayer._check import label_lists
    from lastlayer.decode.suggest import suggest_labels

    scores, indices, target = made(rows, labels)
    begun = time.process_time()
    found = suggest_labels(scores, label_lists(target), indices=indices, n_classes=labels, n=100_000)
    return {"seconds": time.process_time() - begun, "suggestions": len(found)}


def recall(rows: int, labels: int) -> dict[str, Any]:
    """Measure the streaming form of `lastlayer.tune_recall` on dense batches, which are not part of the time."""
    from lastlayer._check import label_lists
    from lastlayer.metrics import TuneRecall

    stream, seconds = TuneRecall(0.9), 0.0
    scores, indices, target = made(rows, labels)
    for start in range(0, rows, 1000):
        listed = indices[start : start + 1000].long()
        batch = torch.zeros(len(listed), labels + 1)
        batch = batch.scatter(1, torch.where(listed < 0, labels, listed), scores[start : start + 1000])[:, :labels]
        given = label_lists(target[start : start + 1000])
        begun = time.process_time()
        stream.update(batch, given)
        seconds += time.process_time() - begun
    return {"seconds": seconds, "threshold": float(stream.compute())}


def splits(rows: int, labels: int) -> dict[str, Any]:
    """Measure `lastlayer.data.fold_rows`, five folds with each label in proportion."""
    from lastlayer.data import LabelData, fold_rows

    target = made(rows, labels)[2]
    kept = target >= 0
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), kept.sum(1).cumsum(0)]).numpy()
    data = LabelData(None, None, indptr, target[kept].long().numpy(), [str(i) for i in range(labels)])
    begun = time.process_time()
    fold = fold_rows(data, 5)
    return {
        "seconds": time.process_time() - begun,
        "rows of the folds": torch.bincount(torch.from_numpy(fold)).tolist(),
    }


PARTS = {"suggest": suggest, "recall": recall, "splits": splits}


def _measured(name: str, rows: int, labels: int, queue: Any) -> None:
    torch.set_num_threads(1)
    found = PARTS[name](rows, labels)
    queue.put({**found, "peak GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--labels", type=int, default=10_000)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    context, results = multiprocessing.get_context("spawn"), {}
    for name in arguments.parts:
        queue = context.Queue()
        process = context.Process(target=_measured, args=(name, arguments.rows, arguments.labels, queue))
        process.start()
        results[name] = queue.get()
        process.join()
        print(name, results[name], flush=True)
    if arguments.json:
        about = {"python": platform.python_version(), "torch": torch.__version__, "threads": 1}
        about |= {"rows": arguments.rows, "labels": arguments.labels}
        arguments.json.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
