"""The report as Markdown, for pull requests and notebooks."""

from __future__ import annotations

from typing import Any

from lastlayer.report import digest as words
from lastlayer.report.compare import p_value

SPECIAL = "\\`*_{}[]<>()#|~$!&"


def text(value: object) -> str:
    """Return a user's words on one line, with what Markdown and HTML would read as markup escaped."""
    return "".join(f"\\{c}" if c in SPECIAL else c for c in " ".join(str(value).split()))


def markdown(summary: dict[str, Any], *, labels: int = 20) -> str:
    """Return the summary of :func:`lastlayer.report.summary` as Markdown, with the `labels` most frequent labels."""
    runs = summary["runs"]
    lines = ["# lastlayer report", "", " ".join(text(s) for s in summary["sentences"]), ""]
    for note in dict.fromkeys(note for run in runs for note in run["notes"]):
        about = [run["name"] for run in runs if note in run["notes"]]
        lines += [f"> {text(note if len(about) == len(runs) else ', '.join(about) + f': {note}')}", ""]
    names = list(dict.fromkeys(name for run in runs for name in run["metrics"]))
    heads = [text(run["name"]) for run in runs]
    lines += ["## Metrics", "", "Value and 95 % interval over rows.", ""]
    lines += _table(["metric", *heads], [[words.title(m), *_values(runs, m)] for m in names])
    if any(run["sets"] for run in runs):
        lines += ["## Label sets", "", "Of the sets that are predicted.", "", *_sets(runs, heads)]
    if summary["comparison"]:
        lines += _comparison(summary["comparison"], heads)
    for run in runs:
        of = f": {text(run['name'])}" if len(runs) > 1 else ""
        if run["errors"]:
            lines += [f"## Errors{of}", "", *_errors(run["errors"])]
        lines += [f"## Labels{of}", "", *_labels(run["labels"], labels)]
    return "\n".join(lines).rstrip() + "\n"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *rows)] + [""]


def _values(runs: list[dict[str, Any]], metric: str) -> list[str]:
    leader = words.best(runs, metric) if len(runs) > 1 else None
    cells = [words.percent(run["metrics"].get(metric)) for run in runs]
    return [f"**{cell}**" if i == leader else cell for i, cell in enumerate(cells)]


def _sets(runs: list[dict[str, Any]], heads: list[str]) -> list[str]:
    sets = [(run["sets"] or {}).get("predicted") or {} for run in runs]
    names = dict.fromkeys(name for one in sets for name in one)
    rows = [[words.title(m), *(f"{100 * one[m]:.1f}\u00a0%" if m in one else "-" for one in sets)] for m in names]
    return _table(["metric", *heads], rows)


def _comparison(summary: dict[str, Any], heads: list[str]) -> list[str]:
    lines = ["## Differences", ""]
    if summary["why"]:
        return [*lines, text(summary["why"]), ""]
    rows = []
    for metric in summary["metrics"]:
        cells = []
        for other in range(1, len(heads)):
            one = summary["pairs"][other][0][metric]
            ends = f"{100 * one['low']:+.1f} to {100 * one['high']:+.1f}"
            cells.append(f"{100 * one['difference']:+.1f} ({ends}; {p_value(one['p'], summary['least'])})")
        rows.append([words.title(metric), *cells])
    lines += [f"Percentage points, each run minus {heads[0]}. {summary['test']}", ""]
    return lines + _table(["metric", *heads[1:]], rows)


def _errors(summary: dict[str, Any]) -> list[str]:
    total = max(summary["n_false_alarms"] + summary["n_misses"], 1)
    rows = [
        [
            text(kind["name"]),
            str(kind["false_alarms"]),
            str(kind["misses"]),
            f"{(kind['false_alarms'] + kind['misses']) / total:.0%}",
            f"{kind['gain']:+.4f}",
        ]
        for kind in sorted(summary["kinds"], key=lambda kind: -kind["gain"])
    ]
    return _table(["error", "false alarms", "misses", "share", f"gain of {text(summary['metric'])}"], rows)


def _labels(summary: dict[str, Any], most: int) -> list[str]:
    support = summary["support"] or [0] * len(summary["name"])
    order = sorted(range(len(support)), key=lambda c: (-(support[c] or 0), c))[:most]
    columns = [name for name in ("support", "predicted", "precision", "recall", "f1", "threshold") if summary.get(name)]

    def cell(value: float | int | None) -> str:
        return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.3f}"

    rows = [[text(summary["name"][c]), *(cell(summary[name][c]) for name in columns)] for c in order]
    return _table(["label", *columns], rows)
