"""Processes for the tests, forked from one that has imported torch and the trainer: the next ones start at once."""

from __future__ import annotations

import multiprocessing
import queue
from collections.abc import Callable
from typing import Any

from tools import HUNG

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "lastlayer.cli",
        "lastlayer.train.fit_network",
        "sklearn.feature_extraction.text",
        "torch.distributed.checkpoint",
        "train_tools",
    ]
)


def run_ranks(function: Callable[..., None], ranks: int, *arguments: Any) -> list[Any]:
    """Run ``function(rank, *arguments, results)`` in `ranks` processes; return what each puts into ``results``."""
    results = CONTEXT.Queue()
    started = [CONTEXT.Process(target=function, args=(rank, *arguments, results)) for rank in range(ranks)]
    for process in started:
        process.start()
    found: list[Any] = []
    while len(found) < ranks:
        try:
            found.append(results.get(timeout=1))
        except queue.Empty:
            dead = {rank: process.exitcode for rank, process in enumerate(started) if process.exitcode}
            if dead:
                for process in started:
                    process.kill()
                raise AssertionError(f"ranks ended without a result: exit status per rank {dead}") from None
    for process in started:
        process.join(HUNG)
    return found
