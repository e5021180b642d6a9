"""The parts of the two-way loss: its two terms alone, and a margin against a temperature (Kobayashi, 2023).

    python -m experiments.two_way.run --data FOLDER [--sets bibtex ...] [--heads linear mlp] [--workers 4]

The protocol is that of `experiments/multilabel_losses`: a fifth of the training rows chooses the learning rate, weight
decay and, where a row of the table leaves it open, the temperature or the margin.
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
from experiments.multilabel_losses.run import MANY_ROWS, measure, score
from experiments.tabular import Batch, Method

HERE = Path(__file__).parent
SETS = ("birds", "emotions", "medical", "slashdot", "yeast", "corel5k", "stackex_chess", "bibtex")
METRICS = {"map_class": "mAP per class", "map_sample": "mAP per sample", "recall5": "R@5"}
TEMPERATURES, MARGINS = (2.0, 4.0, 8.0, 16.0, 32.0), (1.0, 2.0, 4.0, 8.0)


def two_way(per: str, **options: float) -> Any:
    """Return a loss per row; the class term alone is one number, the same for all rows."""

    def loss(batch: Batch) -> Tensor:
        if per == "class":
            return ll.two_way_loss(*batch.args, per="class", **options).unsqueeze(-1)
        return ll.two_way_loss(*batch.args, per=per, reduction="none", **options)  # type: ignore[arg-type]

    return loss


def temperature(batch: Batch) -> Tensor:
    return ll.two_way_loss(*batch.args, positive_temperature=batch.cell.option, reduction="none")


def margin(batch: Batch) -> Tensor:
    return ll.two_way_loss(*batch.args, positive_temperature=1.0, margin=batch.cell.option, reduction="none")


ROWS = {
    "samples and classes, temperature 4": Method(two_way("both"), couples_rows=True),
    "samples alone, temperature 4": Method(two_way("sample"), couples_rows=True),
    "classes alone, temperature 4": Method(two_way("class"), couples_rows=True),
    "samples and classes, temperature 1": Method(two_way("both", positive_temperature=1.0), couples_rows=True),
    "samples alone, temperature 1": Method(two_way("sample", positive_temperature=1.0), couples_rows=True),
    "classes alone, temperature 1": Method(two_way("class", positive_temperature=1.0), couples_rows=True),
    "temperature tuned (2 to 32)": Method(temperature, TEMPERATURES, reads_cell=True, couples_rows=True),
    "margin tuned (1 to 8), temperature 1": Method(margin, MARGINS, reads_cell=True, couples_rows=True),
}


def work(setting: dict[str, str], arguments: Any) -> list[common.Row]:
    """Tune and train one row of the table with one head on one set."""
    tabular.prepare(arguments.device)
    start, data = time.time(), tabular.loaded(arguments, setting["set"])
    few = len(data.train_x) < MANY_ROWS
    rows = tabular.fit(
        data,
        setting["head"],
        ROWS[setting["loss"]],
        ["1"],
        seeds=arguments.seeds,
        tuned_on=1 if arguments.smoke else arguments.seeds if few else min(2, arguments.seeds),
        score=score,
        measure=measure,
        plan=tabular.Plan(64, 2, hidden=8, rounds=2) if arguments.smoke else None,
    )
    kept = ("seed", "option", "lr", "decay", "at_end", "valid", *METRICS)
    seconds = {"seconds": round(time.time() - start, 1)}
    return [{name: row[name] for name in kept} | seconds for row in rows]


def tables(rows: Sequence[common.Row]) -> dict[str, str]:
    made = {}
    for head in tabular.HEADS:
        some = whole([row for row in rows if row["head"] == head])
        some.sort(key=lambda row: (list(ROWS).index(row["loss"]), SETS.index(row["set"])))
        made[f"mean {head}"] = mean(some)
        for metric in METRICS:
            made[f"{metric} {head}"] = common.table(some, "loss", "set", metric, digits=1) if some else "(not run)"
    return made


def whole(rows: Sequence[common.Row]) -> list[common.Row]:
    """The rows of the sets that have every row of the table."""
    losses = {name: {row["loss"] for row in rows if row["set"] == name} for name in SETS}
    return [row for row in rows if losses[row["set"]] == set(ROWS)]


def mean(rows: Sequence[common.Row]) -> str:
    """The mean over the sets, with the spread over seeds of that mean, and the sets on which a row beats the first."""
    if not rows:
        return "(not run)"
    lines = ["| loss | " + " | ".join(f"{title} | ahead" for title in METRICS.values()) + " |"]
    lines.append("| --- " * (2 * len(METRICS) + 1) + "|")
    sets = list(dict.fromkeys(row["set"] for row in rows))
    base: dict[str, dict[str, float]] = {}
    for loss in dict.fromkeys(row["loss"] for row in rows):
        cells = []
        for metric in METRICS:
            of = {name: [100 * r[metric] for r in rows if (r["loss"], r["set"]) == (loss, name)] for name in sets}
            per_set = {name: float(np.mean(values)) for name, values in of.items() if values}
            over_seeds = np.mean([values for values in of.values() if values], axis=0)
            first = base.setdefault(metric, per_set)
            ahead = sum(per_set[name] > first[name] for name in per_set)
            words = "" if first is per_set else f"{ahead} of {len(per_set)}"
            cells.append(f"{over_seeds.mean():.2f} ± {over_seeds.std(ddof=1):.2f} | {words}")
        lines.append(f"| {loss} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = tabular.parser(__doc__, HERE / "results" / "results.json", SETS)
    parser.set_defaults(seeds=3)
    arguments = parser.parse_args(argv)
    if common.finish(arguments, tables):
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
        for loss in ROWS
    ]
    tabular.run(work, [s for s in settings if results.missing(**s)], arguments, results)


if __name__ == "__main__":
    main()
