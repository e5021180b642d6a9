"""Write the speed tables of README.md and docs/kernels.md from benchmarks/results/*.json.

``python docs/_ext/speed_table.py`` fills what stands between the marks ``<!-- speed -->`` and ``<!-- end speed -->``.
Results are those of ``python -m benchmarks.run --json FILE``; files of another form are left alone.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MARKS = re.compile(r"(<!-- speed -->\n).*?(<!-- end speed -->)", re.S)
FELT = re.compile(r"(<!-- felt -->\n).*?(<!-- end felt -->)", re.S)
SHORT = re.compile(r"(<!-- felt in short -->\n).*?(<!-- end felt in short -->)", re.S)
CORE = re.compile(r"(lml|lml_backward|lml_loss)/")
OTHER = re.compile(r"(k|peer|original|original_backward)/")  # the chart of docs/kernels.md has the core
PAGES = {  # which cases a page shows, and for which numbers of classes
    ROOT / "README.md": (CORE, {100, 1000, 4096, 10000, 32000, 131072, 1000000}),
    ROOT / "docs" / "kernels.md": (OTHER, None),
}
Line = tuple[str, str, str]  # what, its type, what it is compared with


def label(row: dict[str, Any]) -> str:
    """The name of a case without the numbers that have columns of their own."""
    name = row["name"].split("/")
    if name[0] == "k":
        return f"`lml`, k = {row['k']:g}"
    if name[0] == "peer":
        return f"`{name[1]}`"
    batch = ("", ", a batch of 256", ", a full batch")[name[0].startswith("original") + (name[-1] == "full")]
    function = name[0].removesuffix("_backward").replace("original", "lml")
    return f"`{function}`" + (", backward" if name[0].endswith("_backward") else "") + batch


def ratio(value: float) -> str:
    """Two digits after the point, or two that say something."""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def lines(rows: list[dict[str, Any]], pattern: re.Pattern[str], sizes: set[int] | None) -> list[str]:
    """Tables of ratios without blanks: a line per function and type, lines with the same sizes together."""
    kept = [row for row in rows if pattern.match(row["name"]) and (sizes is None or row["n"] in sizes)]
    found: dict[Line, dict[int, float]] = {}
    for row in kept:
        found.setdefault((label(row), row["dtype"], row["against"]), {})[row["n"]] = row["ratio"]
    out: list[str] = []
    for columns in dict.fromkeys(tuple(sorted(ratios)) for ratios in found.values()):
        head = ["", "type", "compared with", *(f"n = {n:,}" for n in columns)]
        out += [""] if out else []
        out += ["| " + " | ".join(head) + " |", "| --- | --- | --- |" + " ---: |" * len(columns)]
        for names, ratios in found.items():
            if tuple(sorted(ratios)) == columns:
                out.append("| " + " | ".join([*names, *(ratio(ratios[n]) for n in columns)]) + " |")
    return out


def tables(pattern: re.Pattern[str], sizes: set[int] | None, results: Path = RESULTS) -> str:
    """One table per machine; empty without results."""
    text = ""
    for path in sorted(results.glob("*.json")):
        data = json.loads(path.read_text("utf-8"))
        if table := lines(rows_of(data), pattern, sizes):
            text += "\n".join(["", about(path.name, data), "", *table, ""])
    return text + "\n" if text else ""


def rows_of(data: Any) -> list[dict[str, Any]]:
    """The ratios of a file of results; none where it has another form."""
    known = isinstance(data, dict) and {"machine", "rows"} <= data.keys()
    return [row for row in data["rows"] if {"name", "n", "ratio"} <= row.keys()] if known else []


def about(name: str, data: dict[str, Any]) -> str:
    """Where the numbers come from, and whether all of them are there."""
    machine = data["machine"]
    count = machine.get("threads")
    threads = "" if count is None else f", {count} CPU thread{'' if count == 1 else 's'}"
    part = "" if data.get("complete", True) else "; the run was cut short, these are the rows it reached"
    return f"{machine['device']}, torch {machine['torch']}{threads} (`benchmarks/results/{name}`{part}):"


def filled(page: str, pattern: re.Pattern[str], sizes: set[int] | None, results: Path = RESULTS) -> str:
    """A page with its tables written between the marks."""
    return MARKS.sub(lambda found: found[1] + tables(pattern, sizes, results) + found[2], page)


def felt(results: Path = RESULTS) -> str:
    """Tables of ``python -m benchmarks.felt``: wall time per call, lengths of rows that vary, and first calls."""
    out: list[str] = []
    for path in sorted(results.glob("felt_*.json")):
        data = json.loads(path.read_text("utf-8"))
        calls = [row for row in data["rows"] if "ratio" in row]
        out += ["", about(path.name, data), "", "| call | rows x n | us | compared with | us | ratio |"]
        out += ["| --- | --- | ---: | --- | ---: | ---: |"]
        for row in calls:
            cells = (
                row["name"],
                f"{row['rows']} x {row['n']}",
                row["us"],
                row["against"],
                row["against_us"],
                row["ratio"],
            )
            out.append("| " + " | ".join(map(str, cells)) + " |")
        varied = [row for row in data["rows"] if "kernels" in row]
        if varied:
            out += [
                "",
                "| rows of varying length, both ways | type | seconds | kernels compiled or loaded |",
                "| --- | --- | ---: | ---: |",
            ]
            out += [f"| {row['name']} | {row['dtype']} | {row['s']} | {row['kernels']} |" for row in varied]
        first = [row for row in data["rows"] if row["name"].startswith("first call")]
        if first:
            out += ["", "| with nothing cached | rows x n | type | seconds |", "| --- | --- | --- | ---: |"]
            out += [f"| {row['name']} | {row['rows']} x {row['n']} | {row['dtype']} | {row['s']} |" for row in first]
    return "\n".join([*out, "", ""])


def between(values: list[float]) -> str:
    """The least and the largest of some numbers."""
    return f"{min(values)} to {max(values)}" if len(values) > 1 else str(values[0])


def felt_in_short(results: Path = RESULTS) -> str:
    """A table of the wall times of common calls, with first calls and lengths of rows that vary."""
    columns = [
        ("felt_cpu.json", "CPU", 256, 1000),
        ("felt_h200.json", "H200", 32, 100),
        ("felt_h200.json", "H200", 256, 1000),
    ]
    data = {name: json.loads((results / name).read_text("utf-8"))["rows"] for name, *_ in columns}
    calls = ["lml", "lml, both ways", "lml_loss, both ways", "lml_loss multi-hot, both ways"]
    heads = [f"{place}, {rows} x {n}" for _, place, rows, n in columns]
    out = [
        "",
        "| wall time | compared with | " + " | ".join(heads) + " |",
        "| --- | --- |" + " ---: |" * len(columns),
    ]
    for call in calls:
        found = [
            next(r for r in data[f] if (r["name"], r.get("rows"), r.get("n")) == (call, m, n)) for f, _, m, n in columns
        ]
        out.append(f"| {call} | {found[0]['against']} | " + " | ".join(str(row["ratio"]) for row in found) + " |")
    out += ["", "| on the H200, with nothing cached | seconds |", "| --- | ---: |"]
    rows = data["felt_h200.json"]
    for name in calls[1:]:
        seconds = [row["s"] for row in rows if row["name"] == f"first call, {name}"]
        out.append(f"| first call, {name} | {between(seconds)} |")
    for name in ("lml", "lml_loss"):
        seconds = [row["s"] for row in rows if row["name"] == f"500 sizes, {name}"]
        out.append(f"| 500 lengths of rows, {name}, both ways | {between(seconds)} |")
    return "\n".join([*out, "", ""])


def page_of(path: Path) -> str:
    """A page with all its tables, from the results."""
    text = filled(path.read_text("utf-8"), *PAGES[path])
    text = FELT.sub(lambda found: found[1] + felt() + found[2], text)
    return SHORT.sub(lambda found: found[1] + felt_in_short() + found[2], text)


def main() -> None:
    for path in PAGES:
        if path.exists() and page_of(path) != path.read_text("utf-8"):
            path.write_text(page_of(path), "utf-8")


if __name__ == "__main__":
    main()
