"""Whether two runs differ: a paired bootstrap over the rows they were both measured on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lastlayer.metrics.average_precision import mean_average_precision
from lastlayer.report.numbers import cuts, hot
from lastlayer.runs.contents import Held, Run
from lastlayer.runs.rows import row_metrics

TEST = (
    "Paired bootstrap: the held-out rows are drawn again with replacement ({draws:,} times), the same rows for every "
    "run, and the difference of the two runs is computed on each draw. The interval is the middle 95 % of these "
    "differences; p is twice the share of draws on the other side of zero, adjusted by Holm's method for the number of "
    "runs compared."
)


def compare(runs: list[Run], *, seed: int = 0) -> dict[str, Any] | None:
    """Compare each run with each other.

    Returns:
        None for one run. Otherwise ``{"test", "why", "metrics", "pairs"}``: ``why`` is a sentence where the runs cannot
        be compared row by row; ``pairs[a][b][metric]`` is ``{"difference", "low", "high", "p"}`` of run a minus run b,
        null for a = b; p is adjusted over the runs a for each b and metric; ``least`` is the smallest that it can be.
    """
    if len(runs) < 2:
        return None
    why = _why_not(runs)
    if why:
        return _untested(why)
    held = [run.held for run in runs if run.held is not None]
    at = sorted(set.intersection(*(set(cuts(run)) for run in runs)))
    at = [k for k in at if all(k <= h.top_index.shape[1] for h in held)]
    rows = [row_values(h, at, len(run.labels)) for h, run in zip(held, runs, strict=True)]
    names = [name for name in rows[0] if all(name in r for r in rows)]
    values = np.stack([np.stack([r[name] for name in names]) for r in rows])  # (runs, metrics, rows)
    counted = np.ones(len(held[0])) if held[0].weight is None else held[0].weight
    kept = np.isfinite(values).all((0, 1)) & (counted > 0)
    values, weight = values[:, :, kept], counted[kept]
    if not names or values.shape[-1] < 2:
        return _untested("There are fewer than two held-out rows with labels.")
    draws = int(np.clip(2e8 // values.shape[-1], 2000, 10000))
    drawn, means = _drawn(values, draws, seed, weight), values @ weight / weight.sum()
    pairs: list[list[Any]] = [[None] * len(runs) for _ in runs]
    for b in range(len(runs)):
        for a in range(len(runs)):
            if a != b:
                some = (drawn[a] - drawn[b]).T
                pairs[a][b] = dict(zip(names, map(_difference, means[a] - means[b], some), strict=True))
        for name in names:
            _holm([row[b][name] for row in pairs if row[b]])
    least = 2 * (len(runs) - 1) / (draws + 1)  # p of a difference that no draw turns around, adjusted
    return {
        "test": TEST.format(draws=draws),
        "why": None,
        "metrics": names,
        "pairs": pairs,
        "draws": draws,
        "least": min(least, 1.0),
    }


def _untested(why: str) -> dict[str, Any]:
    return {"test": None, "why": why, "metrics": [], "pairs": [], "draws": 0, "least": None}


def p_value(p: float, least: float) -> str:
    """Return p as text: "p = 0.03", or "p ≤ 0.002" where the number of draws can say no more."""
    return f"p {'≤' if p <= least * 1.001 else '='} {p:.1g}" if p < 0.1 else f"p = {p:.2f}"


def _why_not(runs: list[Run]) -> str | None:
    first = runs[0]
    for run in runs:
        if run.held is None:
            return f"The run {run.name} has no stored predictions, so runs cannot be compared row by row."
        assert first.held is not None
        same = run.labels == first.labels and len(run.held) == len(first.held)
        same = same and np.array_equal(run.held.indptr, first.held.indptr)
        if not same or not np.array_equal(run.held.index, first.held.index) or _print(run) != _print(first):
            return (
                f"The runs {first.name} and {run.name} were not measured on the same rows and labels, so their "
                "differences have no paired test."
            )
    return None


def _print(run: Run) -> Any:
    part = run.parts().get(str(run.metrics.get("part")))
    return part.get("fingerprint") if isinstance(part, dict) else None


def row_values(held: Held, at: list[int], n_labels: int) -> dict[str, np.ndarray]:
    """Return the metrics of each row; nan for a row without labels."""
    out = row_metrics(held.top_index, held.indptr, held.index, at)
    none = np.where(np.diff(held.indptr) > 0, 0.0, np.nan)
    if held.probability is not None:
        target = torch.from_numpy(hot(held, n_labels))
        scores = torch.from_numpy(held.probability)
        out["map_sample"] = mean_average_precision(scores, target, per="sample", average="none").double().numpy() + none
    return out


def _drawn(values: np.ndarray, draws: int, seed: int, weight: np.ndarray | None = None) -> np.ndarray:
    """The means of the metrics on each draw, ``(runs, draws, metrics)``; a few draws are held at a time."""
    runs, metrics, n = values.shape
    rng = np.random.default_rng(seed)
    flat = np.concatenate([values.reshape(-1, n), np.ones((1, n))]).T * (1.0 if weight is None else weight[:, None])
    out = np.empty((draws, runs * metrics + 1))
    step = max(int(4e6 // n), 1)
    for at in range(0, draws, step):
        size = min(step, draws - at)
        drawn = rng.integers(n, size=(size, n)) + np.arange(size)[:, None] * n
        out[at : at + size] = np.bincount(drawn.ravel(), minlength=size * n).reshape(size, n) @ flat
    means = out[:, :-1] / out[:, -1:]
    return means.reshape(draws, runs, metrics).transpose(1, 0, 2)


def _difference(mean: float, drawn: np.ndarray) -> dict[str, float]:
    low, high = np.quantile(drawn, [0.025, 0.975])
    slack = 1e-12  # sums in another order: equal runs differ by nothing
    side = min(int((drawn <= slack).sum()), int((drawn >= -slack).sum()))
    p = min(2 * (side + 1) / (len(drawn) + 1), 1.0)
    return {"difference": float(mean), "low": float(low), "high": float(high), "p": p}


def _holm(tests: list[dict[str, float]]) -> None:
    """Adjust p in place (Holm, 1979)."""
    worst = 0.0
    for place, one in enumerate(sorted(tests, key=lambda d: d["p"])):
        worst = max(worst, min((len(tests) - place) * one["p"], 1.0))
        one["p"] = worst
