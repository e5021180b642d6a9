"""All numbers of a report in one dictionary, and what they say in a few sentences."""

from __future__ import annotations

from typing import Any

import lastlayer
from lastlayer.report import numbers
from lastlayer.report.compare import compare, p_value
from lastlayer.runs.contents import Run
from lastlayer.runs.files import plain

WORDS = {
    "precision": ("precision", "share of the predicted labels that are true"),
    "recall": ("recall", "share of the true labels that are predicted"),
    "ndcg": ("nDCG", "true labels among the best, the earlier the better"),
    "ece": ("ECE", "gap between confidence and accuracy; lower is better"),
    "map": ("mAP", "mean average precision over labels"),
    "ece_label": ("ECE per label", "gap between confidence and accuracy, mean over labels; lower is better"),
    "sample_f1": ("sample-F1", "mean F1 over rows"),
    "hamming_loss": ("Hamming loss", "share of wrong decisions; lower is better"),
    "map_sample": ("mAP by row", "mean average precision over rows"),
    "set_f1": ("set F1", "F1 of each row's label set, averaged over rows"),
    "micro_f1": ("micro F1", "F1 of all labels of all rows together"),
    "macro_f1": ("macro F1", "F1 of each label, averaged over labels"),
    "hamming": ("Hamming loss", "share of wrong decisions, one per row and label; lower is better"),
    "exact_match": ("exact match", "share of rows whose label set is exactly right"),
}


def summarise(runs: list[Run]) -> tuple[dict[str, Any], list[numbers.Analysis | None]]:
    """Return the summary of runs, and the error analyses, which know the kind of each error."""
    analyses = [numbers.Analysis(run) if run.held is not None and len(run.held) else None for run in runs]
    summary = {
        "format": 1,
        "lastlayer": lastlayer.__version__,
        "runs": [_run(run, analysis) for run, analysis in zip(runs, analyses, strict=True)],
        "comparison": compare(runs),
    }
    summary["sentences"] = sentences(summary)
    return plain(summary), analyses


def _run(run: Run, analysis: numbers.Analysis | None) -> dict[str, Any]:
    out: dict[str, Any] = {"name": run.name, **numbers.facts(run)}
    out |= {"headline": numbers.headline(run), "metrics": run.metrics["metrics"]}
    out["notes"] = [str(note) for note in run.metrics.get("notes") or []]
    out["labels"] = {"name": run.labels, **numbers.labels(run)}
    out["history"] = run.history
    out["errors"] = {k: v for k, v in run.errors.items() if k != "format"} if run.errors else None
    out["errors_note"] = ""
    out |= dict.fromkeys(("curve", "reliability", "together", "sets"))
    if analysis is not None:
        assert run.held is not None
        if run.errors is None:
            out |= {"errors": analysis.found, "errors_note": analysis.note}
        at = numbers.cuts(run)
        out["curve"] = numbers.curve(run.held)
        out["reliability"] = numbers.reliability(run.held, at[-1] if at else 5, len(run.labels))
        out["together"] = numbers.together(run)
        out["sets"] = numbers.sets(run)
    return out


def title(metric: str) -> str:
    """Return a metric's name as people write it."""
    stem, at, k = metric.partition("@")
    return WORDS.get(stem, (stem, ""))[0] + at + k


def meaning(metric: str) -> str:
    """Return what a metric says, in a few words; empty for metrics we do not know."""
    return WORDS.get(metric.partition("@")[0], ("", ""))[1]


def lower_is_better(metric: str) -> bool:
    """Whether a small value is a good one."""
    return metric.partition("@")[0] in ("ece", "ece_label", "hamming", "hamming_loss")


def percent(value: dict[str, Any] | None) -> str:
    """Return a value in percent, with its interval where there is one."""
    if not value or value.get("value") is None:
        return "-"
    text = f"{100 * value['value']:.1f}\u00a0%"
    if value.get("low") is None or value.get("high") is None:
        return text
    return f"{text} ({100 * value['low']:.1f} to {100 * value['high']:.1f})"


def best(runs: list[dict[str, Any]], metric: str) -> int | None:
    """Return which run has the best value of a metric."""
    values = [(run["metrics"].get(metric) or {}).get("value") for run in runs]
    known = [(v, -i) for i, v in enumerate(values) if v is not None]
    if not known:
        return None
    return -(min(known, key=lambda v: (v[0], -v[1])) if lower_is_better(metric) else max(known))[1]


def _main(runs: list[dict[str, Any]]) -> str | None:
    return next((name for name in runs[0]["headline"] if name.startswith("recall@")), None)


def leader(runs: list[dict[str, Any]]) -> int | None:
    """Return the run that finds most of the true labels."""
    main = _main(runs)
    return None if main is None else best(runs, main)


def sentences(summary: dict[str, Any]) -> list[str]:
    """Say the main things in words."""
    runs = summary["runs"]
    out = [_opening(runs)]
    main, first = _main(runs), leader(runs)
    if main is None or first is None:
        return out
    k, value = main.partition("@")[2], percent(runs[first]["metrics"].get(main))
    if len(runs) == 1:
        out.append(f"{value} of the true labels are among the {k} best of their row.")
        if one := runs[0]["metrics"].get("precision@1"):
            out.append(f"The best label is a true one in {percent(one)} of the rows.")
    else:
        out.append(f"{runs[first]['name']} finds most: {value} of the true labels are among the {k} best of their row.")
        out += _lead(summary, first, main)
    out += _costliest(runs[first], len(runs) > 1)
    return out


def _opening(runs: list[dict[str, Any]]) -> str:
    part = {"valid": "validation", "test": "test"}.get(str(runs[0]["part"]), "held-out")
    first = f"{runs[0]['rows']:,}" if isinstance(runs[0]["rows"], int) else "the"
    many = f"{len(runs)} runs, measured" if len(runs) > 1 else "Measured"
    return f"{many} on {first} {part} rows with {runs[0]['n_labels']:,} labels to choose from."


def _lead(summary: dict[str, Any], first: int, metric: str) -> list[str]:
    """How far ahead the best run is of the next, and whether that may be chance."""
    comparison, runs = summary["comparison"], summary["runs"]
    if comparison is None or metric not in comparison["metrics"]:
        return [] if comparison is None or comparison["why"] is None else [comparison["why"]]
    others = [i for i in range(len(runs)) if i != first]
    second = min(others, key=lambda i: comparison["pairs"][first][i][metric]["difference"])
    gap = comparison["pairs"][first][second][metric]
    sure = p_value(gap["p"], comparison["least"])
    ends = f"{100 * gap['low']:.1f} to {100 * gap['high']:.1f}"
    text = f"{100 * gap['difference']:.1f} points ({ends}; {sure}, paired bootstrap)"
    if gap["p"] < 0.05:
        return [f"It is ahead of {runs[second]['name']} by {text}."]
    return [f"Its lead over {runs[second]['name']}, {text}, may be chance."]


def _costliest(run: dict[str, Any], named: bool) -> list[str]:
    kinds = (run["errors"] or {}).get("kinds") or []
    if not kinds or max(kind["gain"] for kind in kinds) <= 0:
        return []
    worst = max(kinds, key=lambda kind: kind["gain"])
    of = f" of {run['name']}" if named else ""
    return [
        f"The costliest type of error{of} is {worst['name']} ({worst['meaning']}): "
        f"without it, F1 would be {100 * worst['gain']:.1f} points higher."
        if run["errors"]["metric"] == "f1"
        else f"The costliest type of error{of} is {worst['name']} ({worst['meaning']})."
    ]
