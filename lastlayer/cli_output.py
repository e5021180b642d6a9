"""What the commands print: tables, progress, and what to know at the end of training."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WIDE = 60  # characters of an example's text


@contextmanager
def progress() -> Iterator[Any]:
    """Show a progress bar on the error stream, or plain lines if that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda name, done, total: print(f"[{done}/{total}] {name}", file=sys.stderr) if name else None
        return
    columns = [TextColumn("{task.description:20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("reading")
        yield lambda name, done, total: bar.update(task, description=name or "done", completed=done, total=total)


def epoch_line(epochs: int) -> Callable[[dict[str, Any]], None]:
    """Return a function that writes one line per epoch, or per candidate, to the error stream."""

    def say(line: dict[str, Any]) -> None:
        if "candidate" in line:
            ((name, value),) = [(k, v) for k, v in line.items() if k not in ("candidate", "epoch", "seconds")]
            text = f"{line['candidate']}  {name} {value:.4f}  {line['seconds']:.1f} s"
            print(text, file=sys.stderr, flush=True)
            return
        shown = {k: v for k, v in line.items() if k not in ("epoch", "step", "lr", "seconds") and v is not None}
        values = "  ".join(f"{name} {value:.4f}" for name, value in shown.items())
        print(f"epoch {line['epoch'] + 1}/{epochs}  {values}  {line['seconds']:.1f} s", file=sys.stderr, flush=True)

    return say


def headline(metrics: dict[str, Any]) -> list[str]:
    """Return the columns of the table: those of the largest k, mAP and calibration."""
    last = max(int(n.partition("@")[2]) for n in metrics if n.startswith("recall@"))
    names = ["precision@1", f"precision@{last}", f"recall@{last}", f"ndcg@{last}", "map", f"ece@{last}"]
    names += ["micro_f1", "macro_f1"]
    return [name for name in dict.fromkeys(names) if name in metrics]


def print_table(rows: dict[str, dict[str, Any]], names: Sequence[str]) -> None:
    """Print metrics in percent, with half the width of their 95 % intervals."""
    lines = [[name, *(_cell(result["metrics"].get(metric)) for metric in names)] for name, result in rows.items()]
    drawn = any("±" in cell for line in lines for cell in line[1:])
    title = "percent, with 95 % bootstrap intervals over the rows" if drawn else "percent"
    head = ["", *names]
    if _width(head, lines) > _console().width:
        head = ["", *map(_short, names)]
    if _width(head, lines) > _console().width:
        title, lines = "percent", [[line[0], *(cell.partition(" ")[0] for cell in line[1:])] for line in lines]
    while _width(head, lines) > _console().width and len(head) > 2:
        title, head, lines = "percent; the report has more", head[:-1], [line[:-1] for line in lines]
    _print(title, head, lines)


def say(text: str) -> None:
    """Print a sentence at once, in lines that fit the terminal; in a pipe it stays one line."""
    import textwrap

    width = _width_of_terminal()
    for line in textwrap.wrap(text, min(width, 120)) if width else [text]:
        print(line, flush=True)


def fitting(names: Sequence[str], start: str) -> str:
    """Return a list in one line, with as many names as the terminal has room for and the number of those left out."""
    width, listed = _width_of_terminal() or 160, ", ".join(names)
    for shown in range(len(names) - 1, 0, -1):
        if len(start) + len(listed) <= width:
            break
        listed = f"{', '.join(names[:shown])} and {len(names) - shown} more"
    return start + (listed or "-")


def _short(metric: str) -> str:
    """Return the abbreviation of a metric for a narrow terminal: P@1, R@5, nDCG@5."""
    name, at, k = metric.partition("@")
    return {"precision": "P", "recall": "R", "ndcg": "nDCG", "map": "mAP", "ece": "ECE"}.get(name, name) + at + k


def _width(head: list[str], lines: list[list[str]]) -> int:
    """The width of a table: two spaces and a line around each column, and a line at the end."""
    return 1 + sum(3 + max(map(len, column)) for column in zip(head, *lines, strict=True))


def _console() -> Any:
    """The terminal, or a wide page; COLUMNS in the environment sets the width of either."""
    from rich.console import Console

    return Console() if _width_of_terminal() else Console(width=160)


def _width_of_terminal() -> int | None:
    from rich.console import Console

    console = Console()
    return console.width if console.is_terminal or "COLUMNS" in os.environ else None


def _print(title: str | None, head: list[str], lines: list[list[str]], left: int = 1) -> None:
    """Print a table whose first `left` columns are text, the others numbers."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title)
    for i, name in enumerate(head):
        table.add_column(name, justify="left" if i < left else "right", overflow="fold")
    for line in lines:
        table.add_row(*(Text(cell) for cell in line))
    _console().print(table)


def _cell(value: dict[str, Any] | None) -> str:
    if not value or value["value"] is None:
        return "-"
    text = f"{100 * value['value']:.1f}"
    if value.get("low") is None or value["low"] != value["low"]:
        return text
    return f"{text} ±{50 * (value['high'] - value['low']):.1f}"


def metrics(result: dict[str, Any], title: str) -> None:
    """Print the metrics of a run or an evaluation."""
    names = [name for name in result["metrics"] if name.startswith(("precision@", "recall@", "ndcg@"))]
    print(f"{title}: {result['part']} part, {result['rows']} rows")
    print_table({Path(title).name[:30]: result}, list(dict.fromkeys(names[:6:3] + headline(result["metrics"]))))
    for note in result.get("notes", []):
        say(note)


def summary(run: Any) -> None:
    """Print what was chosen, and three examples."""
    result, resolved = run.metrics(), run.read_json("data.json")["resolved"]
    k = "a number per row, predicted" if resolved.get("k_per_row") else f"{resolved['k']:.3g} labels per row"
    settings = [f"k: {k}", f"loss: {resolved.get('blend') or resolved['loss']}"]
    if resolved.get("optimizer") and result.get("best_epoch") is not None:
        rate, decay = float(resolved["lr"]), float(resolved["weight_decay"])
        settings.append(f"{resolved['optimizer']}, learning rate {rate:g}, weight decay {decay:g}")
    say("; ".join(settings))
    if result.get("best_epoch") is not None:
        by = f", by {resolved['monitor']} of the validation rows" if resolved.get("monitor") else ""
        print(f"best epoch: {result['best_epoch'] + 1} of {result['epochs']}{by}")
    levels = sorted(t for t in (result.get("labels") or {}).get("threshold", []) if t is not None and math.isfinite(t))
    if levels:
        middle = levels[len(levels) // 2]
        print(f"best thresholds per label: {levels[0]:.2f} to {levels[-1]:.2f}, median {middle:.2f} (metrics.json)")
    for line in examples(run):
        print(line)


def folds(run: Any) -> None:
    """Print the means of the metrics over the folds, and their spread."""
    measured = run.read_json("folds.json")
    names = headline(measured["metrics"])
    cells = []
    for name in names:
        mean, deviation = measured["metrics"][name]["mean"], measured["metrics"][name]["deviation"]
        cells.append("-" if mean is None else f"{100 * mean:.1f} ± {100 * (deviation or 0):.1f}")
    _print(f"percent: mean and standard deviation over {measured['folds']} folds", ["", *names], [["folds", *cells]])


def tree_line(labels: int, features: int) -> str:
    """Return whether a linear model on a CPU is flat or made of label trees, and why."""
    from lastlayer.train.config import Config

    flat = f"a flat one stores {labels * features:,} weights and scores every label of every row"
    if Config().takes_tree(labels):
        return f"linear model on a CPU    label trees (--tree auto): {flat}; trees score the labels of a few nodes"
    return "linear model on a CPU    flat (--tree auto): label trees begin to save time at 4,000 labels"


def examples(run: Any, most: int = 3) -> list[str]:
    """Return lines about the first held-out rows: text or name, predicted labels, true labels."""
    from lastlayer.runs.contents import Held

    held, names = Held.of(run.predictions()), run.labels()
    out = []
    for one in run.examples()[:most]:
        row = one["row"]
        text = " ".join(str(one.get("text") or one.get("id") or f"row {row}").split())
        text = text if len(text) <= WIDE else f"{text[: WIDE - 1]}…"
        size = held.size[row]
        index, sure = held.listed(row)
        pairs = zip(index[:size], sure[:size], strict=True)
        out.append(f"  {text}")
        out.append(fitting([f"{names[label]} {p:.2f}" for label, p in pairs], "    predicted: "))
        true = held.index[held.indptr[row] : held.indptr[row + 1]]
        out.append(fitting([names[label] for label in true], "    true:      "))
    return [f"the first {len(out) // 3} of the {run.metrics()['part']} rows:", *out] if out else []


def order(rows: list[dict[str, Any]], metric: str) -> None:
    """Sort runs by a metric, best first; runs without it come last."""
    known = {name for row in rows for name in row.get("metrics", {})}
    if metric not in known:
        raise ValueError(f"--sort must be one of {', '.join(sorted(known)) or 'none'}, got {metric!r}.")
    sign = 1 if metric.startswith("ece") else -1

    def key(row: dict[str, Any]) -> float:
        value = row.get("metrics", {}).get(metric)
        return math.inf if value is None else sign * value

    rows.sort(key=key)


def list_runs(rows: list[dict[str, Any]], metric: str | None = None) -> None:
    """Print one line per run with its scores, in percent."""
    every = [row.get("metrics", {}) for row in rows]
    last = max((int(n.partition("@")[2]) for m in every for n in m if n.startswith("recall@")), default=5)
    wanted = [metric, "precision@1", f"recall@{last}", f"ndcg@{last}", "map", f"ece@{last}"]
    names = [name for name in dict.fromkeys(wanted) if name and any(name in m for m in every)]
    lines = []
    for row, cells in zip(rows, every, strict=True):
        scores = ["-" if cells.get(name) is None else f"{100 * cells[name]:.1f}" for name in names]
        k = "-" if row.get("k") is None else f"{row['k']:.3g}"
        about = [
            row["run"],
            row["state"],
            str(row.get("loss", "-")),
            (row.get("started") or "-").replace("T", " ")[:16],
        ]
        lines.append([*about, k, str(row.get("train_rows") or "-"), *scores])
    head, left = ["run", "state", "loss", "started (UTC)", "k", "rows", *names], 4
    if _width(head, lines) > _console().width:
        head[6:] = map(_short, names)
    for name in ("started (UTC)", "rows", "k", "state", "loss"):  # what a narrow terminal can do without
        if _width(head, lines) > _console().width:
            at = head.index(name)
            left -= at < left
            head, lines = head[:at] + head[at + 1 :], [line[:at] + line[at + 1 :] for line in lines]
    while _width(head, lines) > _console().width and len(head) > left + 1:
        head, lines = head[:-1], [line[:-1] for line in lines]
    _print(None, head, lines, left=left)
