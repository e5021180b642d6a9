"""Write the tables of docs/trees.md from benchmarks/results/xmc.json, training-cpu.json and auto-loss.json.

``python docs/_ext/tree_table.py`` fills what stands between ``<!-- trees -->`` and ``<!-- end trees -->``, and so for
``flat``, ``auto`` and ``hidden``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "trees.md"
NAMES = {
    "lastlayer": "`LinearTree`",
    "lastlayer_grouped": "`LinearTree`, groups given",
    "lastlayer_one_tree": "`LinearTree`, one tree",
    "omikuji": "omikuji 0.5.2",
    "pecos": "PECOS 1.2.8",
    "napkinxc": "napkinXC 0.7.2",
    "lastlayer_flat": "`fit_linear` (flat)",
    "linearsvc": "`LinearSVC`",
    "pecos_flat": "PECOS 1.2.8, flat",
    "libmultilabel": "LibMultiLabel 0.10.0",
}
TREE_COLUMNS = ("P@1", "P@3", "P@5", "R@5", "PSP@5", "ECE@5", "train s", "predict ms per row", "model MB")
FLAT_COLUMNS = ("P@1", "R@5", "micro-F1", "macro-F1", "train s", "peak MB of training")


def table(first: str, columns: tuple[str, ...], rows: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """A Markdown table; a cell that was not measured is empty."""
    out = ["| " + " | ".join([first, *columns]) + " |", "| --- |" + " ---: |" * len(columns)]
    for name, row in rows:
        cells = [_cell(row, column) for column in columns]
        out.append("| " + " | ".join([name, *cells]) + " |")
    return out


def _cell(row: dict[str, Any], column: str) -> str:
    """A number, with its standard error where there is one."""
    if row.get(column) is None:
        return ""
    error = row.get(f"{column} se")
    return f"{row[column]:g}" if error is None else f"{row[column]:g} ± {error:g}"


def trees(data: dict[str, Any]) -> str:
    """One table per set."""
    text = ""
    for title, one in data["sets"].items():
        found = [(NAMES[name], row) for name, row in one["programs"].items() if "failed" not in row]
        about = f"**{title}**: {one['rows']:,} rows, {one['features']:,} features, {one['labels']:,} labels."
        text += "\n".join(["", about, "", *table("", TREE_COLUMNS, found), ""])
    return text + "\n"


def flat(data: dict[str, Any]) -> str:
    """One table of all sets."""
    rows = [
        (f"{row['case']} ({row['rows']:,} rows, {row['labels']} labels), {NAMES[row['program']]}", row)
        for row in data.get("flat", [])
        if "failed" not in row
    ]
    return "\n".join(["", *table("", FLAT_COLUMNS, rows), "", ""])


def auto(data: dict[str, Any]) -> str:
    """One line per set and share of hidden labels: the best single loss, and what "auto" gives."""
    columns = ("R@5", "R@5 of `auto`", "gap")
    recall = {(row["set"], row["hidden"], row["case"]): row["R@5"] for row in data["rows"]}
    rows = []
    for row in data["rows"]:
        if "gap" in row:
            numbers = (recall[row["set"], row["hidden"], row["best"]], row["R@5"], row["gap"])
            found = {**dict(zip(columns, numbers, strict=True)), "gap se": row["gap_se"]}
            told = ", groups given" if row["case"].endswith("groups given") else ""
            rows.append((f"{row['set']}, {_hidden(row)}{told}: `{row['best']}` is best", found))
    return "\n".join(["", *table("", columns, rows), "", ""])


def _hidden(row: dict[str, Any]) -> str:
    return f"{row['hidden']:.0%} hidden" if row["hidden"] else "complete"


def hidden(data: dict[str, Any]) -> str:
    """Two lines per set and share of hidden labels: the defaults and `LinearSVC`."""
    columns = ("P@1", "R@5", "micro-F1", "macro-F1", "ECE@5")
    keys = ("P@1", "R@5", "micro_f1", "macro_f1", "ece@5")
    rows = []
    for row in data["rows"]:
        ours = '`LabelSetClassifier(labels="incomplete")`' if row["hidden"] else "`LabelSetClassifier()`"
        names = {"LinearSVC": "`LinearSVC`", "auto": ours}
        if row["case"] in names:
            name = f"{row['set']}, {_hidden(row)}, {names[row['case']]}"
            rows.append((name, {c: row.get(k) for c, k in zip(columns, keys, strict=True)}))
    return "\n".join(["", *table("", columns, rows), "", ""])


def filled(page: str, results: Path = RESULTS) -> str:
    """The page with its tables written between the marks."""
    parts = {"trees": (trees, "xmc.json"), "flat": (flat, "training-cpu.json")}
    parts |= {"auto": (auto, "auto-loss.json"), "hidden": (hidden, "auto-loss.json")}
    for mark, (write, file) in parts.items():
        text = write(json.loads((results / file).read_text("utf-8")))
        marks = re.compile(rf"(<!-- {mark} -->\n).*?(<!-- end {mark} -->)", re.S)
        page = marks.sub(lambda found, text=text: found[1] + text + found[2], page)  # type: ignore[misc]
    return page


def main() -> None:
    text = PAGE.read_text("utf-8")
    if filled(text) != text:
        PAGE.write_text(filled(text), "utf-8")


if __name__ == "__main__":
    main()
