"""Does another loss than the binary one help? Recall and calibration on eleven sets, with labels complete and hidden.

    python -m experiments.does_it_help.run --data FOLDER [--workers 4]

Each loss is trained once more with the learning rate, the weight decay and the option that the held-out rows of
`experiments/incomplete_labels` chose for it, and its probabilities are kept beside its ranking.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import lastlayer as ll
from experiments import common, tabular
from experiments.incomplete_labels.run import SETS
from experiments.label_losses import LOSSES

HERE = Path(__file__).parent
CHOICES = HERE.parent / "incomplete_labels" / "results" / "results.json"
KEEP = {"1": "complete", "0.5": "50 % hidden", "0.2": "80 % hidden"}
BINARY = "binary"
METHODS = {
    BINARY: "assume negative", "label smoothing": "label smoothing", "softmax": "multi-hot softmax",
    "two-way": "two-way", "asymmetric": "asymmetric", "large loss": "large loss", "binary thinned": "binary thinned",
    "LML": "LML, k auto", "LML thinned": "LML thinned, k auto",
}  # fmt: skip
HEADS = {"linear": "linear", "mlp": "hidden layer"}
METRICS = {"recall5": "recall@5", "ece5": "calibration error"}


def probabilities(scores: Tensor, method: str, cell: tabular.Cell) -> Tensor:
    """Scores to probabilities: by sigmoids, or by a projection to the number of labels that the loss assumes."""
    if method == "softmax":
        return (cell.mean * scores.softmax(-1)).clamp(max=1)
    k = cell.guess if method == "LML thinned" else cell.mean
    return tabular.probabilities(scores, LOSSES[METHODS[method]].probability, k)


def work(setting: dict[str, str], arguments: Any) -> list[common.Row]:
    """Train one loss with one head on one set with one share of labels, for all seeds at once."""
    tabular.prepare(arguments.device)
    start, data = time.time(), tabular.loaded(arguments, setting["set"])
    chosen = arguments.choices[tuple(setting[name] for name in ("set", "head", "method", "keep"))]
    option, rate, decay = chosen
    method = LOSSES[METHODS[setting["method"]]]._replace(options=(option,))
    observed = tabular.observe(data, (setting["keep"],), tuple(range(arguments.seeds)))
    plan = tabular.Plan(64, 2, hidden=8) if arguments.smoke else tabular.Plan.of(len(data.train_x) * 4 // 5)
    stack = tabular.Stack(data, observed, setting["head"], method, [(rate, decay)], plan)
    stack.train()
    rows = []
    for seed in range(arguments.seeds):
        scores = stack.scores_of(seed, 0, data.test_x)
        p = probabilities(scores, setting["method"], stack.cells[0])
        k = min(5, scores.shape[-1])
        found = {
            "recall5": round(ll.recall_at_k(scores, data.test_y, k).item(), 5),
            "ece5": round(ll.label_calibration_error(p, data.test_y, k=k).item(), 5),
        }
        rows.append({"seed": seed, **found})
    del stack
    if data.train_x.is_cuda:
        torch.cuda.empty_cache()
    return [row | {"seconds": round(time.time() - start, 1)} for row in rows]


def choices(smoke: bool) -> dict[tuple[str, str, str, str], tuple[float, float, float]]:
    """Return option, rate and decay of each set, head, method and share kept."""
    if smoke:
        rates = {"linear": 4.0, "mlp": 0.004}
        return {
            ("tiny", head, method, keep): (LOSSES[METHODS[method]].options[0], rates[head], 1e-5)
            for head in HEADS
            for method in METHODS
            for keep in KEEP
        }
    names = {there: here for here, there in METHODS.items()}
    return {
        (r["set"], r["head"], names[r["method"]], r["keep"]): (r["option"], r["lr"], r["decay"])
        for r in common.Results(CHOICES).rows
        if r["method"] in names
    }


def means(rows: Sequence[common.Row], metric: str) -> dict[tuple[str, str, str, str], float]:
    """The mean over the seeds in percent, by head, share kept, set and method."""
    found: dict[tuple[str, str, str, str], list[float]] = {}
    for row in rows:
        found.setdefault((row["head"], row["keep"], row["set"], row["method"]), []).append(100 * row[metric])
    return {key: float(np.mean(values)) for key, values in found.items()}


def gains(rows: Sequence[common.Row], metric: str, head: str, keep: str, method: str) -> dict[str, np.ndarray]:
    """By set, what each seed gains over the binary loss in points; less calibration error is a gain."""
    sign = 100 if metric == "recall5" else -100
    of: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        if (row["head"], row["keep"]) == (head, keep) and row["method"] in (BINARY, method):
            of.setdefault((row["set"], row["method"]), {})[row["seed"]] = sign * row[metric]
    return {
        name: np.array([of[name, method][seed] - of[name, BINARY][seed] for seed in of[name, BINARY]])
        for name in SETS
        if (name, BINARY) in of and (name, method) in of
    }


def tables(rows: Sequence[common.Row]) -> dict[str, str]:
    made = {
        "runs": f"{len(rows)} models: {len({r['set'] for r in rows})} sets, {len({r['seed'] for r in rows})} seeds."
    }
    made["best"] = best(rows)
    for metric, title in METRICS.items():
        for head in HEADS:
            made[f"{title} {head}"] = summary(rows, metric, head)
            for keep in KEEP:
                some = [r for r in rows if (r["head"], r["keep"]) == (head, keep)]
                some.sort(key=lambda r: (list(METHODS).index(r["method"]), SETS.index(r["set"])))
                body = common.table(some, "method", "set", metric, digits=1) if some else "(not run)"
                made[f"{title} {head} {keep}"] = body
    return made


def best(rows: Sequence[common.Row]) -> str:
    """The loss with the largest mean gain, for each metric, head and share of labels hidden."""
    lines = ["| labels | metric | linear | hidden layer |", "| --- | --- | --- | --- |"]
    for keep, words in KEEP.items():
        for metric, title in METRICS.items():
            cells = []
            for head in HEADS:
                of = {m: [g.mean() for g in gains(rows, metric, head, keep, m).values()] for m in list(METHODS)[1:]}
                first = sorted((m for m in of if of[m]), key=lambda m, of=of: -float(np.mean(of[m])))[:2]
                named = [f"{m} {np.mean(of[m]):+.1f} ({sum(g > 0 for g in of[m])} of {len(of[m])})" for m in first]
                cells.append(", ".join(named))
            lines.append(f"| {words} | {title} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def summary(rows: Sequence[common.Row], metric: str, head: str) -> str:
    """Mean gain over the sets, the sets on which it is a gain, and the worst and the best set."""
    lines = ["| loss | " + " | ".join(f"{name} | sets ahead | worst, best" for name in KEEP.values()) + " |"]
    lines.append("| --- " * (3 * len(KEEP) + 1) + "|")
    for method in list(METHODS)[1:]:
        cells = []
        for keep in KEEP:
            each = [gain.mean() for gain in gains(rows, metric, head, keep, method).values()]
            if each:
                ahead = f"{sum(g > 0 for g in each)} of {len(each)}"
                cells.append(f"{np.mean(each):+.2f} | {ahead} | {min(each):+.1f}, {max(each):+.1f}")
            else:
                cells.append("(not run) | |")
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(rows: Sequence[common.Row], path: Path) -> None:
    """A panel for each metric and head: the gain of each loss on each set, by the share of labels hidden."""
    import matplotlib.pyplot as plt

    drawn, axes = plt.subplots(2, 2, figsize=(11, 8), sharex="row", layout="constrained")
    colours = ["#1b6ca8", "#e08e0b", "#b5179e"]
    names = list(METHODS)[1:]
    for line, (metric, title) in zip(axes, METRICS.items(), strict=True):
        for axis, (head, words) in zip(line, HEADS.items(), strict=True):
            for place, (keep, label) in enumerate(KEEP.items()):
                for height, method in enumerate(names):
                    each = [gain.mean() for gain in gains(rows, metric, head, keep, method).values()]
                    if not each:
                        continue
                    y = height + 0.26 * (place - 1)
                    axis.plot(each, [y] * len(each), ".", color=colours[place], alpha=0.45, markersize=5)
                    axis.plot(
                        np.mean(each), y, "D", color=colours[place], markersize=6, markeredgecolor="white",
                        label=label if height == 0 else None,
                    )  # fmt: skip
            axis.axvline(0, color="0.4", linewidth=1)
            axis.set_xscale("symlog", linthresh=2)
            sizes = (1, 2, 5, 10, 20) if metric == "recall5" else (2, 5, 20, 80)
            ticks = [*(sign * size for sign in (-1, 1) for size in sizes), 0]
            limit = max(ticks)
            axis.set_xticks(ticks, [f"{t:+d}" if t else "0" for t in ticks], fontsize=8)
            axis.set_xlim(-limit, limit)
            axis.set_yticks(range(len(names)), names)
            axis.invert_yaxis()
            axis.set(title=f"{title}, {words}", xlabel="points better than the binary loss")
            axis.grid(alpha=0.25)
    axes[0][0].legend(fontsize=8, loc="lower left")
    common.save(drawn, path)


def main(argv: list[str] | None = None) -> None:
    parser = tabular.parser(__doc__, HERE / "results" / "results.json", SETS)
    parser.add_argument("--keep", nargs="+", default=list(KEEP))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    arguments = parser.parse_args(argv)
    if common.finish(arguments, tables, draw):
        return
    results = common.Results(arguments.out)
    if arguments.smoke:
        arguments.sets, arguments.seeds = ["tiny"], 2
    elif arguments.data is None:
        parser.error("--data is needed: a folder of label sets as npz (or --smoke)")
    arguments.choices = choices(arguments.smoke)
    settings = [
        {"set": name, "head": head, "keep": keep, "method": method}
        for name in arguments.sets
        for head in arguments.heads
        for keep in arguments.keep
        for method in arguments.methods
    ]
    tabular.run(work, [s for s in settings if results.missing(**s)], arguments, results)


if __name__ == "__main__":
    main()
