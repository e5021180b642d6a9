"""Learning from incomplete labels: which loss keeps its recall when training labels are hidden?

    python -m experiments.incomplete_labels.run --data FOLDER [--sets bibtex ...] [--heads linear mlp] [--workers 4]

Labels of the training rows are hidden (each kept with probability q, or a single one per row); the test labels
are complete. A fifth of the training rows, with their labels hidden alike, chooses learning rate, weight decay, k and
what else a loss leaves open.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

import lastlayer as ll
from experiments import common, tabular
from experiments.label_losses import LOSSES
from experiments.tabular import Data

HERE = Path(__file__).parent
SETS = (
    "bibtex", "goemotions", "corel5k", "stackex_chess", "slashdot", "langlog", "medical", "yeast", "birds",
    "debian_tags", "delicious",
)  # fmt: skip
KEEP = ("1", "0.5", "0.2", "0.1", "one")
METHODS = (
    "assume negative", "label smoothing", "weighted negatives", "binary thinned", "multi-hot softmax", "two-way",
    "asymmetric", "expected positive", "ROLE", "entropy maximisation", "Hill", "SPLC", "large loss",
    "LML, k tuned", "LML, k auto", "LML, k predicted",
    "LML thinned, k tuned", "LML thinned, k auto", "LML thinned, k predicted",
)  # fmt: skip
VARIANTS = (
    "thinned, k and rho tuned", "thinned, rho of each label", "thinned, temperature tuned", "thinned, start at 0",
    "thinned, with a class term", "thinned, k at least 2", "thinned, labelled rows",
    "thinned, labelled rows, k tuned",
)  # fmt: skip
PAIRS = (
    ("LML thinned, k tuned", "assume negative"), ("LML thinned, k tuned", "multi-hot softmax"),
    ("LML thinned, k tuned", "two-way"), ("LML thinned, k tuned", "large loss"),
    ("LML thinned, k tuned", "label smoothing"), ("LML thinned, k tuned", "binary thinned"),
    ("LML thinned, k tuned", "LML, k tuned"), ("LML thinned, k auto", "LML, k auto"),
    ("LML thinned, k auto", "assume negative"), ("LML thinned, k tuned", "LML thinned, k auto"),
)  # fmt: skip
BASE = "LML thinned, k auto"  # the variants are measured against it
CHOSEN = "thinned, labelled rows"  # what `lastlayer train --labels incomplete` does
MANY_ROWS = 4000  # from here on, two seeds are enough to tune on


def measure(scores: Tensor, data: Data, probability: str, k: float) -> dict[str, float]:
    y = data.test_y
    return {
        "recall5": round(ll.recall_at_k(scores, y, 5).item(), 5),
        "precision1": round(ll.precision_at_k(scores, y, 1).item(), 5),
        "map_class": round(ll.mean_average_precision(scores, y).item(), 5),
        "map_sample": round(ll.mean_average_precision(scores, y, per="sample").item(), 5),
    }


def work(setting: dict[str, str], arguments: Any) -> list[common.Row]:
    """Tune and train one loss with one head on one set, for all shares of labels kept."""
    tabular.prepare(arguments.device)
    start, data = time.time(), tabular.loaded(arguments, setting["set"])
    few = len(data.train_x) < MANY_ROWS
    rows = list(
        tabular.fit(
            data,
            setting["head"],
            LOSSES[setting["method"]],
            arguments.keep,
            seeds=arguments.seeds,
            tuned_on=1 if arguments.smoke else arguments.seeds if few else min(2, arguments.seeds),
            score=tabular.recall_at(5),
            measure=measure,
            plan=tabular.Plan(64, 2, hidden=8, rounds=2) if arguments.smoke else None,
        )
    )
    return [row | {"seconds": round(time.time() - start, 1)} for row in rows]


def complete(rows: Sequence[common.Row]) -> list[common.Row]:
    """The rows of the sets and heads for which every method is there, without the variants."""
    rows = [row for row in rows if row["method"] not in VARIANTS]
    methods = {row["method"] for row in rows}
    found: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        found.setdefault((row["set"], row["head"]), set()).add(row["method"])
    whole = [row for row in rows if found[row["set"], row["head"]] == methods]
    return sorted(whole, key=lambda row: METHODS.index(row["method"]))


def tables(rows: Sequence[common.Row]) -> dict[str, str]:
    made = {"variants": variants(rows)}
    for name, heads in {"chosen": tabular.HEADS, "chosen linear": ("linear",), "chosen mlp": ("mlp",)}.items():
        made[name] = summary(beside_chosen([row for row in rows if row["head"] in heads]), "recall5")
    rows = complete(rows)
    made["grid"] = ends(rows)
    made["summary"] = summary(rows, "recall5")
    made["pairs"] = pairs(rows)
    for head in tabular.HEADS:
        some = [row for row in rows if row["head"] == head]
        made[f"summary {head}"] = summary(some, "recall5")
        made[f"mAP {head}"] = summary(some, "map_class")
        for name in SETS:
            of_set = [row for row in some if row["set"] == name]
            made[f"{name} {head}"] = common.table(of_set, "method", "keep", "recall5") if of_set else "(not run)"
    return made


def beside_chosen(rows: Sequence[common.Row]) -> list[common.Row]:
    """The rows of the chosen loss and of all methods, in the sets, heads and shares kept where both are there."""
    parts = [complete(rows), [row for row in rows if row["method"] == CHOSEN]]
    found = [{(row["set"], row["head"], row["keep"]) for row in part} for part in parts]
    return [row for part in parts for row in part if (row["set"], row["head"], row["keep"]) in found[0] & found[1]]


def gaps(rows: Sequence[common.Row], metric: str) -> dict[tuple[str, str, str], dict[str, tuple[float, float]]]:
    """For each set, head and share kept: the rank of each method, and its gap to the best, in points."""
    cells: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    for row in rows:
        cell = cells.setdefault((row["set"], row["head"], row["keep"]), {})
        cell.setdefault(row["method"], []).append(100 * row[metric])
    found = {}
    for key, cell in cells.items():
        means = {method: float(np.mean(values)) for method, values in cell.items()}
        ranks = tabular.ranks(np.array([list(means.values())]))[0]
        best = max(means.values())
        found[key] = {m: (rank, best - means[m]) for m, rank in zip(means, ranks, strict=True)}
    return found


def summary(rows: Sequence[common.Row], metric: str) -> str:
    """Mean rank, and gaps to the best of all methods, over sets and shares of labels kept."""
    if not rows:
        return "(not run)"
    found = gaps(rows, metric)
    keeps = list(dict.fromkeys(row["keep"] for row in rows))
    heads = ["method", "mean rank", "mean gap", "worst gap", *(f"gap, {keep}" for keep in keeps)]
    lines = ["| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
    methods = {row["method"] for row in rows}
    ranks = {m: float(np.mean([cell[m][0] for cell in found.values()])) for m in methods}
    for m in sorted(methods, key=lambda name: (ranks[name], name)):
        behind = [cell[m][1] for cell in found.values()]
        of_keep = [np.mean([cell[m][1] for key, cell in found.items() if key[2] == keep]) for keep in keeps]
        numbers = [ranks[m], np.mean(behind), max(behind), *of_keep]
        lines.append(f"| {m} | " + " | ".join(f"{v:.2f}" for v in numbers) + " |")
    return "\n".join(lines)


def pairs(rows: Sequence[common.Row]) -> str:
    """The points of recall@5 that one method is ahead of another, for each head and for both."""
    heads = {"linear": ("linear",), "hidden layer": ("mlp",), "both": tabular.HEADS}
    lines = ["| | | " + " | ".join(f"{h} | ahead in | p" for h in heads) + " |", "| --- " * (2 + 3 * len(heads)) + "|"]
    for method, other in PAIRS:
        cells = []
        for some in heads.values():
            ahead = _ahead([row for row in rows if row["head"] in some], method, "recall5", other)
            won = f"{sum(d > 0 for d in ahead)} of {len(ahead)}"
            cells += [f"{np.mean(ahead):+.2f}", won, _sign_rank(ahead)] if ahead else ["", "", ""]
        lines.append(f"| {method} | {other} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def variants(rows: Sequence[common.Row]) -> str:
    """The points that each variant is ahead of the base, over the cells where both are there and differ."""
    heads = ["linear", "ahead in", "p", "hidden layer", "ahead in", "p", "mAP, linear", "p", "mAP, hidden layer", "p"]
    lines = ["| variant | " + " | ".join(heads) + " |", "| --- " * (1 + len(heads)) + "|"]
    others = [BASE.replace("auto", "tuned"), BASE.replace("auto", "predicted"), "LML, k tuned", "LML, k auto"]
    others += ["two-way", "large loss", "multi-hot softmax", "assume negative", *VARIANTS]
    for method in others:
        cells: list[str] = []
        for metric in ("recall5", "map_class"):
            for head in tabular.HEADS:
                ahead = [d for d in _ahead([r for r in rows if r["head"] == head], method, metric, BASE) if d]
                won = [f"{sum(d > 0 for d in ahead)} of {len(ahead)}"] if metric == "recall5" else []
                cells += [f"{np.mean(ahead):+.2f}", *won, _sign_rank(ahead)] if ahead else ["", *["" for _ in won], ""]
        if any(cells):
            lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _ahead(rows: Sequence[common.Row], method: str, metric: str, base: str) -> list[float]:
    """The points that a method is ahead of another in each set, head and share kept where both are there."""
    cells: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    for row in rows:
        if row["method"] in (method, base):
            cell = cells.setdefault((row["set"], row["head"], row["keep"]), {})
            cell.setdefault(row["method"], []).append(100 * row[metric])
    return [float(np.mean(c[method]) - np.mean(c[base])) for c in cells.values() if len(c) == 2]


def _sign_rank(differences: list[float]) -> str:
    """The p-value of Wilcoxon's signed-rank test."""
    from scipy import stats

    return f"{stats.wilcoxon(differences).pvalue:.1g}" if any(differences) else "1"


def ends(rows: Sequence[common.Row]) -> str:
    """How often the best learning rate was the first or last that was tried, and the rates chosen."""
    lines = ["| method | settings | at an end | rates, linear | rates, mlp |", "| --- " * 5 + "|"]
    for method in dict.fromkeys(row["method"] for row in rows):
        some = [row for row in rows if row["method"] == method and row["seed"] == 0]
        chosen = []
        for head in tabular.HEADS:
            rates = [row["lr"] for row in some if row["head"] == head]
            chosen.append(f"{min(rates):g} to {max(rates):g}" if rates else "")
        lines.append(f"| {method} | {len(some)} | {sum(row['at_end'] for row in some)} | " + " | ".join(chosen) + " |")
    return "\n".join(lines)


SHOWN = {
    "assume negative": ("#64748b", "o"),
    "multi-hot softmax": ("#059669", "s"),
    "two-way": ("#9333ea", "v"),
    "label smoothing": ("#ea580c", "^"),
    "ROLE": ("#b45309", "P"),
    "LML, k tuned": ("#93c5fd", "D"),
    "LML thinned, k tuned": ("#2563eb", "D"),
}


def draw(rows: Sequence[common.Row], path: Path) -> None:
    """The mean gap to the best method, over the sets, against the share of labels kept."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = gaps(complete(rows), "recall5")
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
    for axes, head in zip(panels, tabular.HEADS, strict=True):
        for method, (colour, mark) in SHOWN.items():
            mean = [
                np.mean(
                    [c[method][1] for key, c in found.items() if key[1:] == (head, keep) and method in c] or [np.nan]
                )
                for keep in KEEP
            ]
            axes.plot(range(len(KEEP)), mean, color=colour, marker=mark, label=method)
        axes.set_xticks(range(len(KEEP)), ["all", "50 %", "20 %", "10 %", "one per row"])
        sets = len({key[0] for key in found if key[1] == head})
        axes.set(title=f"{head}, {sets} sets", xlabel="training labels kept")
        axes.grid(alpha=0.3)
    panels[0].set(ylabel="recall@5: points behind the best loss", ylim=(5, 0))  # worse ones leave the picture
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=8, loc="outside right upper")
    common.save(figure, path)


def main(argv: list[str] | None = None) -> None:
    parser = tabular.parser(__doc__, HERE / "results" / "results.json", SETS)
    parser.add_argument("--keep", nargs="+", default=list(KEEP))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(LOSSES))
    arguments = parser.parse_args(argv)
    if common.finish(arguments, tables, draw):
        return
    results = common.Results(arguments.out)
    if arguments.smoke:
        arguments.sets, arguments.keep, arguments.seeds = ["tiny"], ["1", "one"], 2
        arguments.methods = [*METHODS, *VARIANTS]
    elif arguments.data is None:
        parser.error("--data is needed: a folder of label sets as npz (or --smoke)")
    settings = [
        {"set": name, "head": head, "method": method}
        for name in arguments.sets
        for head in arguments.heads
        for method in arguments.methods
    ]
    tabular.run(work, [s for s in settings if results.missing(**s)], arguments, results)


if __name__ == "__main__":
    main()
