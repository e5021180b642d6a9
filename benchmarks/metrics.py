"""Recall at 1 to 100 over many labels: streamed with index lists, against the dense ways where they fit.

    python -m benchmarks.metrics [--rows 10000] [--classes 100000] [--json benchmarks/results/metrics-cpu.json]

Scores are made a chunk at a time, as a model would. Each way has a process of its own: the memory is the peak beyond
what it held before, the time is that of one thread at work on the metric. Results are checked against one another
before they are reported.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

KS = range(1, 101)
LABELS = 5


def batches(rows: int, n_classes: int, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Scores and index lists; a third of the labels get a high score, so that recall is neither 0 nor 1."""
    generator = torch.Generator().manual_seed(0)
    for start in range(0, rows, chunk):
        size = min(chunk, rows - start)
        scores = torch.rand(size, n_classes, generator=generator)
        target = torch.randint(n_classes, (size, LABELS), generator=generator)
        lift = torch.where(torch.rand(size, LABELS, generator=generator) < 1 / 3, 1.0, 0.0)
        yield scores.scatter_add_(1, target, lift), target


def streamed(rows: int, n_classes: int, chunk: int) -> tuple[list[float], float]:
    """The streaming class, index lists, 100 cuts in one pass."""
    import lastlayer as ll

    metric = ll.RecallAtK(list(KS))
    seconds = 0.0
    for scores, target in batches(rows, n_classes, chunk):
        start = time.process_time()
        metric.update(scores, target)
        seconds += time.process_time() - start
    return metric.compute().tolist(), seconds


def functional(rows: int, n_classes: int, chunk: int) -> tuple[list[float], float]:
    """The function on all scores at once."""
    import lastlayer as ll

    parts = list(batches(rows, n_classes, chunk))
    scores, target = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
    del parts
    start = time.process_time()
    result = ll.recall_at_k(scores, target, list(KS)).tolist()
    return result, time.process_time() - start


def _dense(rows: int, n_classes: int, chunk: int) -> tuple[Tensor, Tensor]:
    parts = list(batches(rows, n_classes, chunk))
    scores, target = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
    return scores, torch.zeros(rows, n_classes, dtype=torch.int64).scatter_(1, target, 1)


def dense_sklearn(rows: int, n_classes: int, chunk: int) -> tuple[list[float], float]:
    """scikit-learn on indicator matrices, one call for each of three cuts, scaled to 100."""
    from sklearn.metrics import recall_score

    scores, target = _dense(rows, n_classes, chunk)
    cuts = (1, 50, 100)
    start = time.process_time()
    result = []
    for k in cuts:
        predicted = torch.zeros_like(target).scatter_(1, scores.topk(k).indices, 1)
        result.append(float(recall_score(target.numpy(), predicted.numpy(), average="samples", zero_division=0)))
    return result, (time.process_time() - start) * len(KS) / len(cuts)


def dense_torchmetrics(rows: int, n_classes: int, chunk: int) -> tuple[list[float], float]:
    """torchmetrics' retrieval recall, which wants each pair's row beside it; three cuts, scaled to 100."""
    from torchmetrics.retrieval import RetrievalRecall

    scores, target = _dense(rows, n_classes, chunk)
    index = torch.arange(rows).repeat_interleave(n_classes)
    cuts = (1, 50, 100)
    start = time.process_time()
    result = []
    for k in cuts:
        metric = RetrievalRecall(top_k=k)
        metric.update(scores.flatten(), target.flatten(), indexes=index)
        result.append(float(metric.compute()))
    return result, (time.process_time() - start) * len(KS) / len(cuts)


def _measured(way: Callable[..., Any], shape: tuple[int, int, int], queue: Any) -> None:
    torch.set_num_threads(1)
    import sklearn.metrics
    import torchmetrics.retrieval

    import lastlayer

    way(4, 128, 4)  # imports and first calls are not what is measured
    _ = lastlayer, sklearn, torchmetrics
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result, seconds = way(*shape)
    queue.put((result, seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024))


def measure(way: Callable[..., Any], rows: int, n_classes: int, chunk: int) -> dict[str, Any]:
    """Run one way in a process of its own."""
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=_measured, args=(way, (rows, n_classes, chunk), queue))
    process.start()
    result, seconds, peak = queue.get()
    process.join()
    row = {"way": way.__name__, "rows": rows, "classes": n_classes, "chunk": chunk}
    return row | {"CPU s": round(seconds, 2), "peak MiB": round(peak), "recall": result}


def compare(rows: int, n_classes: int, small: int, chunk: int) -> list[dict[str, Any]]:
    """The rows of the table: the stream at a tenth of the rows and at all, and every way at a size where all fit."""
    large = [measure(streamed, size, n_classes, chunk) for size in (rows // 10, rows)]
    ways = (streamed, functional, dense_sklearn, dense_torchmetrics)
    few = [measure(way, small, n_classes // 10, chunk) for way in ways]
    reference = few[0]["recall"]
    for row in few[1:]:
        cuts = [0, 49, 99] if len(row["recall"]) == 3 else range(100)
        error = max(abs(a - reference[c]) for a, c in zip(row["recall"], cuts, strict=True))
        if error > 1e-5:
            raise AssertionError(f"{row['way']} is off by {error:.1e}; a wrong number has no speed.")
    for row in large + few:
        row["recall"] = {"at 1": round(row["recall"][0], 4), "at 100": round(row["recall"][-1], 4)}
    return large + few


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--classes", type=int, default=100_000)
    parser.add_argument("--small", type=int, default=2_000)
    parser.add_argument("--chunk", type=int, default=50)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    table = compare(options.rows, options.classes, options.small, options.chunk)
    for line in table:
        print(json.dumps(line))
    if options.json:
        machine = {
            "cpu": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        lines = ",\n".join("  " + json.dumps(line) for line in table)
        options.json.write_text(f'{{"machine": {json.dumps(machine)}, "metrics": [\n{lines}\n]}}\n')
