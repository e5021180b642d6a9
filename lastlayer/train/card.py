"""The model card of a run: what it was trained on, how good it is, what it is for and what it is not for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lastlayer.runs import RunFolder, write_atomically
from lastlayer.train.explain import strongest
from lastlayer.train.serve import TrainedModel

FILE = "model_card.md"
FEW = 10  # training rows below which a label is called rare
SHOWN = 10  # labels in a table
_SPECIAL = "\\`*_{}[]<>()#|~$!&"


def write(run: RunFolder, model: TrainedModel | None = None) -> None:
    """Write ``model_card.md`` from the other files of a run."""
    write_atomically(run / FILE, card(run, model).encode("utf-8", "backslashreplace"))


def card(run: RunFolder, model: TrainedModel | None = None) -> str:
    """Return the model card of a run as Markdown.

    Args:
        run: The run folder; what it does not hold is left out.
        model: Its model, for the features that speak most for labels.
    """
    about, metrics = run.read_json("data.json"), run.metrics()
    lines = [f"# Model card: {text(run.path.name)}", "", _first(run, about), ""]
    lines += ["## Intended use", "", *_use(run, about, model)]
    lines += ["## Data", "", *_data(about)]
    lines += ["## Metrics", "", *_metrics(run, metrics)]
    lines += ["## Labels", "", *_labels(run, metrics)]
    if model is not None and (features := _features(run, model)):
        lines += ["## What speaks for a label", "", "The words or features with the largest weights.", "", *features]
    lines += ["## Limits", "", *_limits(run, about, metrics)]
    return "\n".join(lines).rstrip() + "\n"


def text(value: object) -> str:
    """Return a user's words on one line, with what Markdown would read as markup escaped."""
    return "".join(f"\\{c}" if c in _SPECIAL else c for c in " ".join(str(value).split()))


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Return a table; all columns but the first hold numbers."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *rows)] + [""]


def _first(run: RunFolder, about: dict[str, Any]) -> str:
    config, made = run.config(), run.read_optional("environment.json")
    hidden = config.get("hidden") or []
    kind = f"a network with hidden layers of {', '.join(map(str, hidden))}" if hidden else "a linear model"
    made_by = ""
    if config.get("encoder"):
        how = "which is frozen" if config.get("freeze") else "which was trained with the labels"
        made_by = f" from the encoder {text(Path(str(config['encoder'])).name)}, {how}"
    resolved = about["resolved"]
    loss = text(resolved.get("blend") or resolved["loss"])
    return (
        f"It predicts sets of {resolved['n_labels']} labels by {kind} of {resolved.get('n_features', '?')} features"
        f"{made_by}, trained with the loss {loss} by lastlayer {made.get('lastlayer', '?')} (torch "
        f"{made.get('torch', '?')}), started {made.get('started', '?')}."
    )


def _use(run: RunFolder, about: dict[str, Any], model: TrainedModel | None) -> list[str]:
    what = "texts" if model is not None and model.features.is_text else "rows of features"
    if model is None:
        what = "rows"
    elif model.config.images:
        what = "images"
    names = run.labels()
    shown = ", ".join(text(name) for name in names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return [
        f"To suggest labels for {what} like those of the training part: {shown}.",
        "",
        "It knows no other labels. Nobody has checked it for decisions about people, nor for rows from other sources. "
        "Say here who may rely on it, and for what.",
        "",
    ]


def _data(about: dict[str, Any]) -> list[str]:
    rows = []
    for name, part in about["parts"].items():
        source = part.get("source") or {}
        per_row = part.get("labels_per_row", part.get("labels_a_row", 0.0))
        numbers = [str(part["rows"]), f"{per_row:.2f}", str(part.get("skipped", 0))]
        rows.append([name, *numbers, text(source.get("format", "-")), f"`{part['fingerprint'][:12]}`"])
    lines = table(["part", "rows", "labels per row", "skipped", "format", "SHA-256"], rows)
    hidden = about.get("hidden") or {}
    if hidden.get("keep", 1.0) < 1 or hidden.get("single_positive"):
        lines += ["Labels of the training part were hidden on purpose.", ""]
    return lines


def _metrics(run: RunFolder, metrics: dict[str, Any]) -> list[str]:
    measured = run.read_optional("folds.json")
    folds = measured.get("metrics") or {}
    head = ["metric", "percent", "95 % interval"]
    rows = []
    for name, one in metrics["metrics"].items():
        known = one.get("low") is not None and one.get("high") is not None
        row = [name, _percent(one["value"]), f"{_percent(one['low'])} to {_percent(one['high'])}" if known else "-"]
        if folds:
            mean, deviation = (folds.get(name, {}).get(key) for key in ("mean", "deviation"))
            row.append(f"{_percent(mean)} ± {_percent(deviation)}")
        rows.append(row)
    lines = [f"On {metrics['rows']} rows of the {metrics['part']} part; intervals by bootstrap over rows.", ""]
    if folds:
        head.append(f"mean ± deviation of {measured['folds']} folds")
    return lines + table(head, rows)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _labels(run: RunFolder, metrics: dict[str, Any]) -> list[str]:
    counts = np.array(run.train_counts() or [0])
    rare = int((counts < FEW).sum())
    lines = [
        f"Training rows per label: {counts.min()} to {counts.max()}, median {int(np.median(counts))}. "
        f"{rare} of {len(counts)} labels have fewer than {FEW}.",
        "",
    ]
    each = metrics.get("labels") or {}
    if not each:
        return lines
    names, support = run.labels(), each["support"]
    value = each["average_precision"]
    known = [i for i in range(len(names)) if (support[i] or 0) >= FEW and value[i] is not None]
    worst = sorted(known, key=lambda i: (value[i], i))[:SHOWN]
    if worst:
        rows = [[text(names[i]), str(counts[i]), str(support[i]), _percent(value[i])] for i in worst]
        lines += [f"The weakest labels of those with at least {FEW} held-out rows:", ""]
        lines += table(["label", "training rows", "held-out rows", "average precision"], rows)
    return lines


def _features(run: RunFolder, model: TrainedModel) -> list[str]:
    try:
        frequent = np.argsort(-np.array(run.train_counts() or [0]), kind="stable")[:SHOWN]
        reasons = [strongest(model, int(i), 6) for i in frequent]
    except ValueError:  # a kind of model without such weights
        return []
    rows = [[text(r.label), ", ".join(text(name) for name, _ in r.speaks_for) or "-"] for r in reasons if r is not None]
    return table(["label", "speaks for it"], rows) if rows else []


def _limits(run: RunFolder, about: dict[str, Any], metrics: dict[str, Any]) -> list[str]:
    said = list(metrics.get("notes") or [])
    counts = np.array(run.train_counts() or [0])
    if rare := int((counts < FEW).sum()):
        said.append(f"{rare} labels have fewer than {FEW} training rows; expect little of them.")
    if metrics["rows"] < 100:
        said.append(f"Only {metrics['rows']} rows were held out: look at the intervals.")
    said.append("The numbers hold for rows from the same source. Measure again where rows change: lastlayer evaluate.")
    said.append("Labels that people forgot or got wrong count as recorded: lastlayer suggest finds the likely ones.")
    return [*(f"- {text(line)}" for line in said), ""]


def of(path: str | Path) -> str:
    """Return the model card of a finished run, made anew."""
    from lastlayer.train.serve import load

    return card(RunFolder(path), load(path))
