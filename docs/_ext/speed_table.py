"""Write the speed tables of README.md and docs/kernels.md from benchmarks/results/*.json.

``python docs/_ext/speed_table.py`` fills what stands between the marks ``<!-- speed -->`` and ``<!-- end speed -->``.
A results file is an object with ``device``, ``torch`` and ``cases``; a case counts here if it has a ``case`` (its name
in the benchmark table), ``ms``, ``baseline`` (what it is compared with) and ``ratio``. A page quotes the cases with a
true ``quote``, or all if there is none.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "kernels.md")
MARKS = re.compile(r"(<!-- speed -->\n).*?(<!-- end speed -->)", re.S)
NEEDED = {"case", "ms", "baseline", "ratio"}


def cases(results: Path = RESULTS) -> list[dict[str, Any]]:
    """The cases to quote, each with its device and the version of torch."""
    found = []
    for path in sorted(results.glob("*.json")):
        data = json.loads(path.read_text("utf-8"))
        if not isinstance(data, dict):
            continue
        rows = [row for row in data.get("cases", []) if isinstance(row, dict) and row.keys() >= NEEDED]
        quoted = [row for row in rows if row.get("quote")] or rows
        found += [{"device": data.get("device", path.stem), "torch": data.get("torch", ""), **row} for row in quoted]
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """The cases as a Markdown table; empty without any."""
    if not rows:
        return ""
    lines = ["| Device | Case | Time | Compared with | Ratio |", "| --- | --- | ---: | --- | ---: |"]
    for row in rows:
        device = f"{row['device']}, torch {row['torch']}" if row["torch"] else row["device"]
        lines.append(f"| {device} | `{row['case']}` | {row['ms']:.3g} ms | {row['baseline']} | {row['ratio']:.2f} |")
    return "\n" + "\n".join(lines) + "\n\n"


def filled(page: str, results: Path = RESULTS) -> str:
    """A page with its table written between the marks."""
    return MARKS.sub(lambda found: found[1] + table(cases(results)) + found[2], page)


def main() -> None:
    for path in PAGES:
        if path.exists():
            text = path.read_text("utf-8")
            if filled(text) != text:
                path.write_text(filled(text), "utf-8")


if __name__ == "__main__":
    main()
