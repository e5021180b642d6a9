"""What the experiments share: results that survive an interruption, tables made from them, README pages kept true."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]


def parser(description: str | None, out: Path) -> argparse.ArgumentParser:
    """The arguments every experiment takes."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--data", type=Path, help="folder of the data set; the README says how to get it")
    made.add_argument("--out", type=Path, default=out, help="results file; finished settings in it are not run again")
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--smoke", action="store_true", help="seconds, on tiny data made on the fly")
    made.add_argument("--readme", type=Path, help="only rewrite the tables of this README from the results")
    made.add_argument("--merge", type=Path, nargs="+", default=[], help="only take these results files into --out")
    return made


class Results:
    """Rows of settings and numbers in a JSON file, written whole after each row, with the seconds of each device.

    Where all rows have the same names the file has them once, as its columns, and one list of values per row.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        found = json.loads(path.read_text()) if path.exists() else {}
        self.machine: dict[str, str] = found.get("machine", {})
        self.rows: list[Row] = [_named(row, found.get("columns", [])) for row in found.get("rows", [])]
        self.seconds: dict[str, float] = found.get("seconds", {})
        self._counted_to = time.monotonic()

    def missing(self, **settings: Any) -> bool:
        """Whether no row has these settings yet."""
        return not any(all(row.get(name) == value for name, value in settings.items()) for row in self.rows)

    def add(self, **row: Any) -> None:
        """Append a row and write the file."""
        self.extend([row])

    def extend(self, rows: list[Row]) -> None:
        """Append rows and write the file."""
        self.rows += rows
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
        self.machine = {"device": device, "torch": torch.__version__, "python": platform.python_version()}
        now = time.monotonic()
        self.seconds[device] = round(self.seconds.get(device, 0.0) + now - self._counted_to, 1)
        self._counted_to = now
        self._write()

    def merge(self, other: Results) -> None:
        """Append the rows of another run, and count its seconds."""
        self.rows += [row for row in other.rows if row not in self.rows]
        for device, seconds in other.seconds.items():
            self.seconds[device] = round(self.seconds.get(device, 0.0) + seconds, 1)
        self.machine = self.machine or other.machine
        self._write()

    def _write(self) -> None:
        """Write the file; the old one stays until the new one is whole."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        head: dict[str, Any] = {"machine": self.machine, "seconds": self.seconds}
        rows: list[Any] = self.rows
        if rows and all(row.keys() == rows[0].keys() for row in rows):
            head["columns"] = list(rows[0])
            rows = [[row[name] for name in head["columns"]] for row in rows]
        lines = ",\n".join(map(json.dumps, rows))
        partial.write_text(f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n')
        os.replace(partial, self.path)


def _named(row: Row | list[Any], names: Sequence[str]) -> Row:
    if isinstance(row, dict):
        return row
    return dict(zip(names, row, strict=True))


def table(
    rows: Iterable[Row],
    index: str,
    columns: str,
    value: str,
    *,
    heads: Iterable[Any] = (),
    scale: float = 100.0,
    digits: int = 2,
) -> str:
    """A Markdown table of mean and standard deviation over what the other settings leave open (the seeds).

    Columns come in the order of `heads`, or as the rows name them.
    """
    rows = list(rows)
    names = list(dict.fromkeys(row[index] for row in rows))
    heads = list(heads) or list(dict.fromkeys(row[columns] for row in rows))

    def cell(name: Any, head: Any) -> str:
        found = [scale * row[value] for row in rows if row[index] == name and row[columns] == head]
        if not found:
            return ""
        spread = f" ± {statistics.stdev(found):.{digits}f}" if len(found) > 1 else ""
        return f"{statistics.fmean(found):.{digits}f}{spread}"

    lines = [f"| {index} | " + " | ".join(map(str, heads)) + " |", "| --- " * (len(heads) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(cell(name, head) for head in heads) + " |" for name in names]
    return "\n".join(lines)


def columns(
    rows: Iterable[Row], index: str, values: Sequence[str], *, order: Iterable[Any] = (), digits: int = 2
) -> str:
    """A Markdown table of several values in percent, with the names of `order` first; "(not run)" without rows."""
    rows = list(rows)
    if not rows:
        return "(not run)"
    places = list(order)
    rows.sort(key=lambda row: places.index(row[index]) if row[index] in places else len(places))
    long = [{index: row[index], "value": v, "number": row[v]} for v in values for row in rows if v in row]
    return table(long, index, "value", "number", digits=digits)


def fill(readme: Path, tables: dict[str, str]) -> str:
    """Return the text of a README with the tables between its ``<!-- name -->`` marks replaced."""
    text = readme.read_text()
    for name, body in tables.items():
        mark, end = f"<!-- {name} -->", f"<!-- end {name} -->"
        if mark not in text or end not in text:
            raise ValueError(f"{readme} has no marks {mark} and {end}.")
        before, rest = text.split(mark, 1)
        text = f"{before}{mark}\n{body}\n{end}{rest.split(end, 1)[1]}"
    return text


def finish(
    arguments: argparse.Namespace,
    tables: Callable[[Sequence[Row]], dict[str, str]],
    draw: Callable[[Sequence[Row], Path], None] | None = None,
) -> bool:
    """Do what ``--merge``, ``--readme`` and ``--figure`` ask for, and return whether that was all.

    ``--merge`` takes rows from other files, ``--readme`` rewrites its tables, ``--figure`` draws to this file.
    """
    figure = getattr(arguments, "figure", None)
    if figure is not None and draw is None:
        raise SystemExit("--figure: this experiment has none.")
    for path in arguments.merge:
        Results(arguments.out).merge(Results(path))
    if arguments.readme is not None:
        arguments.readme.write_text(fill(arguments.readme, tables(Results(arguments.out).rows)))
    if figure is not None and draw is not None:
        draw(Results(arguments.out).rows, figure)
    return bool(arguments.merge) or arguments.readme is not None or figure is not None


def save(figure: Figure, path: Path) -> None:
    """Write a figure as SVG, the same bytes for the same numbers."""
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    if figure.get_layout_engine() is None:
        figure.tight_layout()
    with plt.rc_context({"svg.hashsalt": "lastlayer", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def run_all(
    train: Callable[..., Row],
    jobs: list[Any],
    results: Results,
    pool: ProcessPoolExecutor | None,
    end: float,
    patience: float | None = None,
) -> None:
    """Train, several networks at a time if there is a pool, and write down each; start none after `end`.

    After `patience` seconds a pool's unfinished networks are no longer waited for.
    """

    def done(row: Row) -> None:
        results.add(**row)
        print(f"{len(results.rows)} rows, {len(jobs)} in this stage: {row}", flush=True)

    if pool is None:
        for job in jobs:
            if time.monotonic() < end:
                done(train(*job))
        return
    waiting = [pool.submit(train, *job) for job in jobs]
    try:
        for running in as_completed(waiting, patience):
            if not running.cancelled():
                done(running.result())
            if time.monotonic() > end:
                for other in waiting:
                    other.cancel()
    except TimeoutError:
        print(f"{sum(not other.done() for other in waiting)} networks are no longer waited for", flush=True)
        for other in waiting:
            other.cancel()
