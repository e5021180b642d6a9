"""The multi-label losses side by side on complete labels: one tuned linear model and one with a hidden layer each.

    python -m experiments.multilabel_losses.run --data FOLDER [--sets bibtex ...] [--heads linear mlp] [--workers 4]

A fifth of the training rows chooses learning rate, weight decay and what else a loss leaves open, by the mean of mAP
per class and mAP per sample. Ranks over the sets come with a Friedman test and Nemenyi's critical difference.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import lastlayer as ll
from experiments import common, tabular
from experiments.label_losses import LOSSES
from experiments.tabular import Data

HERE = Path(__file__).parent
SETS = (
    "bibtex", "goemotions", "corel5k", "stackex_chess", "slashdot", "langlog", "medical", "yeast", "birds", "scene",
    "emotions", "genbase", "cal500", "debian_tags", "delicious", "imdb_meka",
)  # fmt: skip
NAMES = {
    "binary": "assume negative", "label smoothing": "label smoothing", "asymmetric": "asymmetric", "Hill": "Hill",
    "SPLC": "SPLC", "multi-hot softmax": "multi-hot softmax", "two-way": "two-way",
    "truncated entropy": "truncated entropy", "quasibinary": "quasibinary", "WARP": "WARP", "RML": "RML",
    "LML": "LML", "LML Fenchel-Young": "LML Fenchel-Young", "LML thinned": "LML thinned, k auto",
}  # fmt: skip
METRICS = {
    "map_class": "mAP per class", "map_sample": "mAP per sample", "precision1": "P@1", "precision3": "P@3",
    "recall3": "R@3", "recall5": "R@5", "ece": "ECE",
}  # fmt: skip
MANY_ROWS = 4000  # from here on, two seeds are enough to tune on


def score(scores: Tensor, target: Tensor) -> Tensor:
    """The mean of both average precisions, for each model."""
    return torch.stack([_both(s, t) for s, t in zip(scores, target, strict=True)])


def _both(scores: Tensor, target: Tensor) -> Tensor:
    of_class = ll.mean_average_precision(scores, target)
    return (of_class + ll.mean_average_precision(scores, target, per="sample")) / 2


def measure(scores: Tensor, data: Data, probability: str, k: float) -> dict[str, float]:
    """Metrics of the test rows; the calibration error is that of each row's most likely labels, as many as the mean."""
    y, n = data.test_y, data.test_y.shape[1]
    p = tabular.probabilities(scores, probability, k)
    precision = ll.precision_at_k(scores, y, [1, 3]).tolist()
    recall = ll.recall_at_k(scores, y, [3, min(5, n)]).tolist()
    found = {
        "map_class": ll.mean_average_precision(scores, y).item(),
        "map_sample": ll.mean_average_precision(scores, y, per="sample").item(),
        "precision1": precision[0],
        "precision3": precision[1],
        "recall3": recall[0],
        "recall5": recall[1],
        "ece": ll.label_calibration_error(p, y, k=min(max(round(k), 1), n)).item(),
    }
    return {name: round(value, 5) for name, value in found.items()}


def work(setting: dict[str, str], arguments: Any) -> list[common.Row]:
    """Tune and train one loss with one head on one set."""
    tabular.prepare(arguments.device)
    start, data = time.time(), tabular.loaded(arguments, setting["set"])
    few = len(data.train_x) < MANY_ROWS
    rows = tabular.fit(
        data,
        setting["head"],
        LOSSES[NAMES[setting["loss"]]],
        ["1"],
        seeds=arguments.seeds,
        tuned_on=1 if arguments.smoke else arguments.seeds if few else min(2, arguments.seeds),
        score=score,
        measure=measure,
        plan=tabular.Plan(64, 2, hidden=8, rounds=2) if arguments.smoke else None,
    )
    return [row | {"seconds": round(time.time() - start, 1)} for row in list(rows)]


def complete(rows: Sequence[common.Row]) -> list[common.Row]:
    """The rows of sets and heads for which every loss is there."""
    losses = {row["loss"] for row in rows}
    found: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        found.setdefault((row["set"], row["head"]), set()).add(row["loss"])
    whole = [row for row in rows if found[row["set"], row["head"]] == losses]
    return sorted(whole, key=lambda row: (SETS.index(row["set"]), list(NAMES).index(row["loss"])))


def means(rows: Sequence[common.Row], metric: str) -> tuple[list[str], list[str], np.ndarray]:
    """Sets, losses, and the mean over seeds for each, sets x losses; larger is better."""
    sets, losses = (list(dict.fromkeys(row[name] for row in rows)) for name in ("set", "loss"))
    values: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        values.setdefault((row["set"], row["loss"]), []).append(-row[metric] if metric == "ece" else row[metric])
    return sets, losses, np.array([[np.mean(values[name, loss]) for loss in losses] for name in sets])


def significance(rows: Sequence[common.Row], metric: str) -> str:
    """Friedman's test over the sets, and how far apart two mean ranks must be (Nemenyi, 5 %; Demsar, 2006)."""
    from scipy import stats

    sets, losses, values = means(rows, metric)
    if len(sets) < 3:
        return "Too few sets for a test."
    statistic, p = stats.friedmanchisquare(*values.T)
    k, n = len(losses), len(sets)
    difference = stats.studentized_range.ppf(0.95, k, np.inf) / math.sqrt(2) * math.sqrt(k * (k + 1) / (6 * n))
    mean = tabular.ranks(values).mean(0)
    best = int(mean.argmin())
    worse = [losses[i] for i in np.argsort(mean) if mean[i] - mean[best] > difference]
    return (
        f"{METRICS[metric]}: {n} sets, {k} losses; Friedman chi-square {statistic:.1f}, p = {p:.1g}; critical "
        f"difference {difference:.2f} ranks. Best is {losses[best]} ({mean[best]:.2f}); significantly worse than it: "
        f"{', '.join(worse) or 'none'}."
    )


def rank_table(rows: Sequence[common.Row]) -> str:
    """Mean rank over the sets for each metric, ordered by the first."""
    if not rows:
        return "(not run)"
    columns = {metric: tabular.ranks(means(rows, metric)[2]).mean(0) for metric in METRICS}
    losses = means(rows, "map_class")[1]
    lines = ["| loss | " + " | ".join(METRICS.values()) + " |", "| --- " * (len(METRICS) + 1) + "|"]
    for i in np.argsort(columns["map_class"], kind="stable"):
        lines.append(f"| {losses[i]} | " + " | ".join(f"{columns[m][i]:.2f}" for m in METRICS) + " |")
    return "\n".join(lines)


def mean_table(rows: Sequence[common.Row]) -> str:
    """The mean over the sets of each metric, with the standard deviation over seeds of that mean."""
    if not rows:
        return "(not run)"
    losses, seeds = (list(dict.fromkeys(row[name] for row in rows)) for name in ("loss", "seed"))
    of_seed = [
        {"loss": loss, "metric": title, "value": float(np.mean([r[metric] for r in found]))}
        for loss in losses
        for seed in seeds
        for metric, title in METRICS.items()
        if (found := [row for row in rows if row["loss"] == loss and row["seed"] == seed])
    ]
    return common.table(of_seed, "loss", "metric", "value")


def tables(rows: Sequence[common.Row]) -> dict[str, str]:
    rows = complete(rows)
    made = {}
    for head in tabular.HEADS:
        some = [row for row in rows if row["head"] == head]
        made[f"ranks {head}"], made[f"means {head}"] = rank_table(some), mean_table(some)
        tests = [significance(some, metric) for metric in ("map_class", "map_sample")] if some else ["(not run)"]
        made[f"tests {head}"] = "\n\n".join(tests)
        for metric in ("map_class", "map_sample"):
            made[f"{metric} {head}"] = common.table(some, "loss", "set", metric) if some else "(not run)"
    ends = [row for row in rows if row["seed"] == 0]
    made["grid"] = f"{sum(row['at_end'] for row in ends)} of {len(ends)} chosen rates are at an end of their grid."
    return made


def draw(rows: Sequence[common.Row], path: Path) -> None:
    """Mean ranks of the losses, with the critical difference as a bar."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from scipy import stats

    rows = complete(rows)
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")
    order: list[str] = []
    for axes, head in zip(panels, tabular.HEADS, strict=True):
        some = [row for row in rows if row["head"] == head]
        for metric, colour, mark in (("map_class", "#2563eb", "o"), ("map_sample", "#ea580c", "s")):
            sets, losses, values = means(some, metric)
            mean = dict(zip(losses, tabular.ranks(values).mean(0), strict=True))
            order = order or sorted(losses, key=mean.__getitem__, reverse=True)
            axes.plot([mean[name] for name in order], range(len(order)), mark, color=colour, label=METRICS[metric])
        k, n = len(order), len(sets)
        wide = stats.studentized_range.ppf(0.95, k, np.inf) / math.sqrt(2) * math.sqrt(k * (k + 1) / (6 * n))
        axes.plot([1, 1 + wide], [-0.9, -0.9], color="black", linewidth=2)
        axes.text(1 + wide / 2, -1.6, "critical difference", ha="center", fontsize=8)
        axes.set(title=f"{head}, {n} sets", xlabel="mean rank (1 is best)", ylim=(-2.2, None))
        axes.set_yticks(range(len(order)), order)
        axes.grid(axis="x", alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=8, loc="outside right upper")
    common.save(figure, path)


def main(argv: list[str] | None = None) -> None:
    parser = tabular.parser(__doc__, HERE / "results" / "results.json", SETS)
    parser.add_argument("--losses", nargs="+", default=list(NAMES), choices=list(NAMES))
    arguments = parser.parse_args(argv)
    if common.finish(arguments, tables, draw):
        return
    results = common.Results(arguments.out)
    if arguments.smoke:
        arguments.sets, arguments.seeds = ["tiny"], 2
    elif arguments.data is None:
        parser.error("--data is needed: a folder of label sets as npz (or --smoke)")
    settings = [
        {"set": name, "head": head, "loss": loss}
        for name in arguments.sets
        for head in arguments.heads
        for loss in arguments.losses
    ]
    tabular.run(work, [s for s in settings if results.missing(**s)], arguments, results)


if __name__ == "__main__":
    main()
