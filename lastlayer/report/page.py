"""One HTML file: the template, its style and script, and the numbers, with nothing to fetch."""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from importlib.resources import files
from pathlib import PurePath
from typing import Any

from lastlayer.report import digest as words
from lastlayer.report import thresholds
from lastlayer.report.numbers import KINDS, Analysis
from lastlayer.runs.contents import Run

LABELS = 20_000  # in the table; the rest is in the JSON
EXAMPLES = 2_000
NEXT = 4  # labels shown after the predicted ones
COLUMNS = ("train", "support", "predicted", "precision", "recall", "f1", "average_precision", "threshold")
HALF = ("half_precision", "half_recall", "half_f1")


def page(runs: list[Run]) -> str:
    """Return the page about runs."""
    summary, analyses = words.summarise(runs)
    return render(
        "page.html",
        ("plots.js", "labels.js", "suggest.js", "page.js"),
        "",
        embedded(_data(runs, summary, analyses)),
        summary=summary,
        table=_table(summary),
        notes=_notes(summary["runs"]),
        sets=_sets(summary["runs"]),
        leader=words.leader(summary["runs"]) or 0,
        settings=_settings(summary["runs"]),
        commands=[_command(run) for run in summary["runs"]],
        has={
            **{
                key: any(run[key] for run in summary["runs"])
                for key in ("curve", "reliability", "errors", "together", "history", "sets")
            },
            "suggestions": any(run.suggestions for run in runs),
        },
    )


def render(template: str, scripts: tuple[str, ...], end: str, data: str, **values: Any) -> str:
    """Return a page that fetches nothing: a template with its style, its scripts and its data inside."""
    import jinja2

    folder = files("lastlayer.report")

    def text(name: str) -> str:
        return (folder / name).read_text("utf-8")

    style, early = text("page.css"), text("theme.js")
    script = f'"use strict";\n(() => {{\n{"".join(map(text, scripts))}{end}}})();\n'
    # Everything of the user's goes through autoescape, or through JSON that the script turns into text nodes.
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FunctionLoader(text),
    )
    environment.filters |= {"percent": words.percent, "title": words.title, "meaning": words.meaning}
    return environment.get_template(template).render(
        style=_safe(style),
        early=_safe(early),
        script=_safe(script),
        data=_safe(data),
        policy=f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(early)} {_hash(script)}; "
        "base-uri 'none'; form-action 'none'",
        **values,
    )


def _safe(text: str) -> Any:
    import markupsafe

    return markupsafe.Markup(text)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def embedded(value: Any) -> str:
    """Return JSON that no text in it can end: it stands inside a script element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _notes(runs: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The notes that all runs share, and by name those of single runs, which a comparison shows below its table."""
    shared = [note for note in dict.fromkeys(runs[0]["notes"]) if all(note in run["notes"] for run in runs)]
    single = [(run["name"], [note for note in dict.fromkeys(run["notes"]) if note not in shared]) for run in runs]
    return {"shared": shared, "single": [(name, notes) for name, notes in single if notes]}


def _table(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """The headline table: for each metric one cell a run, with its interval on the metric's own scale."""
    runs, comparison = summary["runs"], summary["comparison"]
    out = []
    for metric in dict.fromkeys(name for run in runs for name in run["headline"]):
        cells = [run["metrics"].get(metric) or {"value": None} for run in runs]
        ends = [v for c in cells for v in (c.get("low"), c["value"], c.get("high")) if v is not None]
        low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
        low, high = (low, high) if high > low else (low - 0.01, high + 0.01)
        leader = words.best(runs, metric) if len(runs) > 1 else None
        tested = comparison and metric in comparison["metrics"]
        out.append(
            {
                "metric": metric,
                "lower": words.lower_is_better(metric),
                "cells": [
                    {
                        **cell,
                        "best": i == leader,
                        "tied": bool(
                            tested and leader not in (None, i) and comparison["pairs"][i][leader][metric]["p"] >= 0.05
                        ),
                        "at": {
                            key: round(100 * (cell[key] - low) / (high - low), 2)
                            for key in ("low", "value", "high")
                            if cell.get(key) is not None
                        },
                    }
                    for i, cell in enumerate(cells)
                ],
            }
        )
    return out


def _sets(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The table of label sets: for each metric one cell per run, for the predicted sets and for a threshold of 0.5."""
    out = []
    for metric in dict.fromkeys(name for run in runs for one in (run["sets"] or {}).values() for name in one):
        cells = [{rule: one[metric] for rule, one in (run["sets"] or {}).items()} for run in runs]
        known = [cell["predicted"] for cell in cells if "predicted" in cell]
        best = (min if words.lower_is_better(metric) else max)(known) if len(runs) > 1 and known else None
        out.append({"metric": metric, "lower": words.lower_is_better(metric), "cells": cells, "best": best})
    return out


def _settings(runs: list[dict[str, Any]]) -> list[tuple[str, list[str], bool]]:
    """Every field of the runs' settings: name, value for each run, whether they differ; those that differ first."""
    rows = []
    for name in dict.fromkeys(key for run in runs for key in run["config"]):
        values = [str(run["config"].get(name, "-")) for run in runs]
        rows.append((name, values, len(set(values)) > 1))
    return sorted(rows, key=lambda row: not row[2])


def _command(run: dict[str, Any]) -> str:
    command = run["environment"].get("command")
    if not isinstance(command, list) or not command:
        return ""
    first = PurePath(str(command[0])).name
    first = "lastlayer" if first in ("__main__.py", "lastlayer") else first
    return shlex.join([first, *map(str, command[1:])])


class _Names:
    """One list of the label names that the page shows, whatever the runs' own numbering."""

    def __init__(self) -> None:
        self.place: dict[str, int] = {}

    def __call__(self, name: str) -> int:
        return self.place.setdefault(name, len(self.place))


def _data(runs: list[Run], summary: dict[str, Any], analyses: list[Analysis | None]) -> dict[str, Any]:
    names = _Names()
    texts: dict[tuple[int, str | None, str | None], int] = {}
    out = []
    for run, numbers, analysis in zip(runs, summary["runs"], analyses, strict=True):
        together = numbers["together"]
        out.append(
            {
                "name": run.name,
                "labels": _labels(run, numbers["labels"], names),
                "thresholds": thresholds.curves(run, _order(run, numbers["labels"])),
                "rows": len(run.held) if run.held is not None else 0,
                "curve": numbers["curve"],
                "reliability": numbers["reliability"],
                "errors": numbers["errors"],
                "note": numbers["errors_note"],
                "together": together and {**together, "labels": [names(run.labels[c]) for c in together["labels"]]},
                "history": numbers["history"],
                "monitor": numbers["resolved"].get("monitor") if isinstance(numbers["resolved"], dict) else None,
                "best": numbers["best_epoch"],
                "examples": _examples(run, analysis, names, texts),
                "suggestions": run.suggestions or None,
            }
        )
    return {
        "runs": out,
        "comparison": summary["comparison"],
        "titles": {m: words.title(m) for run in summary["runs"] for m in run["metrics"]},
        "kinds": list(KINDS),
        "texts": [{"row": row, "id": name, "text": text} for row, name, text in texts],
        "names": list(names.place),
    }


def _order(run: Run, summary: dict[str, Any]) -> list[int]:
    """The labels of the page, the most frequent first."""
    support = summary["support"] or [0] * len(run.labels)
    said = summary.get("predicted") or [0] * len(run.labels)
    return sorted(range(len(run.labels)), key=lambda c: (-(support[c] or 0), -said[c], c))[:LABELS]


def _labels(run: Run, summary: dict[str, Any], names: _Names) -> dict[str, Any]:
    order = _order(run, summary)
    out: dict[str, Any] = {"all": len(run.labels), "name": [names(run.labels[c]) for c in order]}
    for column in COLUMNS + HALF:
        if summary.get(column):
            out[column] = [
                summary[column][c] if summary[column][c] is None else round(summary[column][c], 4) for c in order
            ]
    if run.reasons:
        own = run.reasons["labels"]
        out["words"] = {str(i): own[str(c)] for i, c in enumerate(order) if str(c) in own}
        out["exact"] = bool(run.reasons.get("exact"))
    return out


def _examples(
    run: Run, analysis: Analysis | None, names: _Names, texts: dict[tuple[int, str | None, str | None], int]
) -> list[dict[str, Any]]:
    """For each row: x text; t true; p, q labels and thousandths; n how many predicted; a kinds; m misses; w why."""
    if run.held is None or analysis is None:
        return []
    held, out = run.held, []
    listed = run.examples or [{"row": i, "id": None, "text": None} for i in range(len(held))]
    for one in listed[:EXAMPLES]:
        row = one["row"]
        if not 0 <= row < len(held):
            continue
        key = (row, _text(one.get("id")), _text(one.get("text")))
        true = held.index[held.indptr[row] : held.indptr[row + 1]].tolist()
        n = int(held.size[row])
        index, sure = held.listed(row)
        best = index[: n + NEXT].tolist()
        missed = [c for c in true if c not in best[:n]]
        shown = dict(zip(held.top_index[row].tolist(), held.top_probability[row].tolist(), strict=True))
        if held.probability is not None:
            shown |= {c: float(held.probability[row, c]) for c in missed}
        out.append(
            {
                "x": texts.setdefault(key, len(texts)),
                "t": [names(run.labels[c]) for c in true],
                "p": [names(run.labels[c]) for c in best],
                "q": [round(1000 * v) for v in sure[: n + NEXT].tolist()],
                "n": n,
                "a": [-1 if c in true else analysis.kind(row, c) for c in best[:n]],
                "m": [
                    [names(run.labels[c]), round(1000 * shown[c]) if c in shown else None, analysis.kind(row, c)]
                    for c in missed
                ],
            }
        )
        if why := (run.reasons.get("rows") or {}).get(str(row)):
            some = [c for c in dict.fromkeys([*best[:n], *true]) if str(c) in why]
            out[-1]["w"] = [[names(run.labels[c]), *why[str(c)]] for c in some]
    return out


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
