"""The command ``lastlayer suggest``: labels that are probably missing or wrong, and a corrected file."""

from __future__ import annotations

import argparse
import csv
import io
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lastlayer import cli_reading as reading

COLUMNS = ("rank", "row", "id", "label", "kind", "probability", "accept", "text")
YES, NO = ("1", "x", "y", "yes", "true"), ("", "0", "n", "no", "false")


def fill(made: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    made.add_argument("data", metavar="RUN|FILE", help="file of rows with labels, or a run trained with --folds")
    made.add_argument("--out", metavar="DIR", help="folder to write (default: NAME-suggestions)")
    made.add_argument("-n", type=int, help="number of suggestions (default: those more probable than not)")
    kinds = ("both", "missing", "wrong")
    made.add_argument("--kind", choices=kinds, default="both", help="which to look for (default: both)")
    text = (
        "no label gets more than its part of the N missing ones: better to train on unseen (with -n and --kind missing)"
    )
    made.add_argument("--balanced", action="store_true", help=text)
    text = "share of true labels that are recorded (default: estimated)"
    made.add_argument("--observed", type=float, metavar="R", help=text)
    made.add_argument("--folds", type=int, default=5, metavar="K", help="folds of the rows of a file (default: 5)")
    made.add_argument("--seed", type=int, default=0, help="seed of the folds (default: 0)")
    text = (
        "write a corrected file: with the suggestions of at least this probability, or with those ticked in this file"
    )
    made.add_argument("--accept", metavar="P|FILE", help=text)
    reading.add_flags(made)
    made.epilog = "\n".join(
        (
            "examples:",
            "  lastlayer suggest tags.tsv",
            "  lastlayer suggest tags.tsv --accept 0.9",
            "  lastlayer suggest tags.tsv --accept tags-suggestions/suggestions.csv   after ticking its column accept",
            "  lastlayer suggest runs/tags-1 -n 500 --kind missing",
            "  lastlayer suggest tags.tsv -n 500 --kind missing --balanced --accept 0   accepts them unseen",
        )
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    _check_options(arguments)
    name = "" if arguments.data == "-" else Path(arguments.data).name.split(".")[0]
    out = Path(arguments.out or f"{name or 'data'}-suggestions")
    least, ticked = _accept(arguments.accept)
    if ticked is None:
        _keep_ticks(out / "suggestions.csv")
    path, data, scores = _rows(arguments)
    if ticked is not None:
        accepted = _ticked(ticked, data)
    else:
        from lastlayer.train import suggest as work
        from lastlayer.train.suggest_sheet import sheet

        if scores is None:
            reading.check_folds(arguments.folds, data)
            tell = lambda line: print(line, file=sys.stderr)  # noqa: E731
            scores = work.out_of_fold(data, folds=arguments.folds, seed=arguments.seed, say=tell)
        options = {"observed": arguments.observed, "kind": arguments.kind, "n": arguments.n}
        options["balanced"] = arguments.balanced
        suggested = work.suggest(data, scores, **options)
        lines = _lines(suggested, data)
        _write(out, lines, suggested, data)
        page = _page(arguments, out, sheet(path, data, suggested))
        accepted = [line for line in lines if least is not None and line["probability"] >= least]
        _tell(suggested, data, out)
        if arguments.accept is None:
            if page is not None:
                print(f"next: open {page}, tick, and save the corrected file")
            if path != "-":
                table = str(out / "suggestions.csv")
                print(f"or: tick the column accept of {table}, then: {_again(arguments, table)}")
            return 0
    from lastlayer.data.rewrite import rewrite

    made = rewrite(path, out / "corrected", data, _changes(accepted))
    print(f"corrected: {made} ({len(accepted)} labels changed)")
    return 0


def _check_options(arguments: argparse.Namespace) -> None:
    """Refuse what cannot be used before models are trained."""
    from lastlayer.cli import UsageError

    if arguments.n is not None and arguments.n < 0:
        raise UsageError(f"-n must be at least 0, got {arguments.n}.")
    if arguments.observed is not None and not 0 < arguments.observed <= 1:
        raise UsageError(f"--observed must be above 0 and at most 1, got {arguments.observed}.")
    if arguments.balanced and (arguments.n is None or arguments.kind != "missing"):
        raise UsageError("--balanced must be given with -n and --kind missing.")
    if arguments.data == "-" and arguments.accept is not None:
        raise UsageError("--accept needs a file: standard input cannot be read a second time. Save it to one.")


def _again(arguments: argparse.Namespace, table: str) -> str:
    """Return the command that corrects the file, which has to read its rows the same way."""
    out = ["--out", arguments.out] if arguments.out else []
    return shlex.join(["lastlayer", "suggest", arguments.data, *reading.flags(arguments), *out, "--accept", table])


def _rows(arguments: argparse.Namespace) -> tuple[str, Any, Any]:
    """Return the file, its rows, and the out-of-fold scores where a run has them."""
    from lastlayer.data import DataError, read_parts
    from lastlayer.runs import RunFolder

    folder = RunFolder(arguments.data)
    if folder.exists():
        from lastlayer.runs.folder import finished
        from lastlayer.train import folds, suggest

        finished(arguments.data)
        about = folder.read_optional(folds.FILE).get("data") or {}
        n_rows = folder.read_optional(folds.FILE).get("rows", 0)
        scores = suggest.OutOfFold.load(folder, n_rows, len(folder.labels()))
        path = str(about.get("path") or "-")
        if not Path(path).exists():
            raise DataError(
                f"{path}: the rows of the run {folder.path} are not there any more. Give their file instead."
            )
        parts = read_parts(path, like=about.get("source"), **reading.asked(arguments))
        return path, folds.rows_of(folder, parts), scores
    parts = read_parts(arguments.data, **reading.asked(arguments))
    data = parts.get("all", parts.get("train"))
    if data is None:
        raise DataError(f"{arguments.data}: has no rows to learn from, only the parts {', '.join(parts)}.")
    reading.tell_about("rows", data)
    if not len(data.indices):
        raise DataError(f"{arguments.data}: no row has a label. Name the column of labels (--label-column).")
    return arguments.data, data, None


def _accept(given: str | None) -> tuple[float | None, Path | None]:
    from lastlayer.cli import UsageError

    if given is None:
        return None, None
    try:
        least = float(given)
    except ValueError:
        if not Path(given).is_file():
            raise UsageError(f"--accept must be a probability or a file of suggestions, got {given!r}.") from None
        return None, Path(given)
    if not 0 <= least <= 1:
        raise UsageError(f"--accept must be a probability from 0 to 1, got {given}.")
    return least, None


def _keep_ticks(path: Path) -> None:
    """Refuse to write over suggestions that someone has ticked."""
    from lastlayer.data import DataError

    if not path.is_file():
        return
    try:
        n = sum((line["accept"] or "").strip().lower() not in NO for _, line in _lines_to_tick(path))
    except DataError as error:
        raise DataError(f"{error} It may hold ticks: move it away, or name another folder (--out).") from None
    if n:
        raise DataError(
            f"{path}: {n} of its rows are ticked. Use them (--accept {path}), or name another folder (--out)."
        )


def _lines_to_tick(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line numbers and lines of a table of suggestions, with the separator and encoding of any spreadsheet.

    What cannot be decoded is replaced: only labels matter, and these are compared with those of the rows.
    """
    from lastlayer.data import DataError
    from lastlayer.data.lines import encoding_of
    from lastlayer.data.source import Limits, Source, read_bytes

    source, limits, wanted = Source(path), Limits(), {"row", "label", "kind", "accept"}
    raw = read_bytes(source, limits, 1 << 30)
    text = raw.decode(encoding_of(source, None, limits), "replace").removeprefix("\ufeff")
    if text[:4].lower() == "sep=":
        text = text.partition("\n")[2]
    absent: list[set[str]] = []
    before = csv.field_size_limit(len(text) + 1)
    try:
        for delimiter in (",", ";", "\t"):
            table = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
            absent.append(wanted - set(table.fieldnames or ()))
            if not absent[-1]:
                yield from ((table.line_num, line) for line in table)
                return
    except csv.Error as error:
        raise DataError(f"{path}: must be CSV ({error}).") from None
    finally:
        csv.field_size_limit(before)
    missing = min(absent, key=len)
    raise DataError(f"{path}: must have the columns row, label, kind and accept; {sorted(missing)[0]} is missing.")


def _lines(suggested: Any, data: Any) -> list[dict[str, Any]]:
    numbers = data.row_numbers()
    return [
        {
            "rank": rank + 1,
            "row": int(numbers[one.row]),
            "id": None if data.ids is None else data.ids[one.row],
            "label": data.label_names[one.label],
            "kind": one.kind,
            "probability": round(one.probability, 6),
            "text": None if data.texts is None else data.texts[one.row],
        }
        for rank, one in enumerate(suggested)
    ]


def _write(out: Path, lines: list[dict[str, Any]], suggested: Any, data: Any) -> None:
    """Write suggestions.csv, suggestions.jsonl and rates.csv."""
    from lastlayer.runs.files import write_atomically

    out.mkdir(parents=True, exist_ok=True)

    def safe(value: Any) -> str:
        return reading.harmless(str(value or ""))

    def write(name: str, rows: list[list[Any]]) -> None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        write_atomically(out / name, text.getvalue().encode())

    cells = [
        [line["rank"], line["row"], safe(line["id"]), safe(line["label"]), line["kind"], line["probability"], ""]
        for line in lines
    ]
    texts = [" ".join(safe(line["text"])[:500].split()) for line in lines]
    write("suggestions.csv", [list(COLUMNS), *([*row, text] for row, text in zip(cells, texts, strict=True))])
    objects = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    write_atomically(out / "suggestions.jsonl", objects.encode())
    each = zip(data.label_names, data.label_counts().tolist(), suggested.rates.tolist(), strict=True)
    write("rates.csv", [["label", "rows", "rate"], *([safe(name), count, f"{rate:.3f}"] for name, count, rate in each)])


def _page(arguments: argparse.Namespace, out: Path, found: dict[str, Any]) -> Path | None:
    """Write the page, and store the suggestions of a run for its report; without Jinja there is no page."""
    from lastlayer.runs import RunFolder
    from lastlayer.runs.files import write_atomically
    from lastlayer.train.suggest_sheet import FILE

    run = RunFolder(arguments.data)
    if run.exists():
        run.write_json(FILE, found)
    try:
        from lastlayer.report.suggestions import suggestions_page

        text = suggestions_page(found)
    except ModuleNotFoundError:
        return None
    write_atomically(out / "suggestions.html", text.encode("utf-8", "replace"))
    return out / "suggestions.html"


def _tell(suggested: Any, data: Any, out: Path) -> None:
    n_missing = int(suggested.missing.sum())
    print(f"{n_missing} labels are probably missing, {len(suggested) - n_missing} probably wrong, in {len(data)} rows")
    print(f"labels are recorded in about {suggested.rate:.0%} of the rows that have them")
    counts = data.label_counts()
    rates = [(float(suggested.rates[i]), i) for i in range(data.n_labels) if counts[i] >= 20]
    for rate, i in sorted(rates)[:3]:
        print(f"  {data.label_names[i]}: about {rate:.0%}")
    print(f"suggestions: {out / 'suggestions.csv'}, {out / 'suggestions.jsonl'}; rates: {out / 'rates.csv'}")


def _ticked(path: Path, data: Any) -> list[dict[str, Any]]:
    """Read the suggestions that are ticked, and check that they belong to the rows."""
    from lastlayer.data import DataError

    numbers = {int(n): i for i, n in enumerate(data.row_numbers())}
    names = {reading.harmless(name): name for name in data.label_names} | {name: name for name in data.label_names}
    out = []
    for number, line in _lines_to_tick(path):
        mark = (line["accept"] or "").strip().lower()
        if mark not in (*YES, *NO):
            raise DataError(f"{path}, line {number}: accept must be yes, no or empty, got {mark!r}.")
        if mark in NO:
            continue
        row, label = (line["row"] or "").strip(), names.get(line["label"])
        place = numbers.get(int(row)) if row.isascii() and row.isdigit() else None
        if place is None or label is None or line["kind"] not in ("missing", "wrong"):
            raise DataError(f"{path}, line {number}: must be a suggestion for these rows and labels.")
        if (label in data.names(place)) == (line["kind"] == "missing"):
            raise DataError(f"{path}, line {number}: row {row} has changed since. Suggest again.")
        out.append({"row": int(row), "label": label, "kind": line["kind"]})
    return out


def _changes(accepted: list[dict[str, Any]]) -> dict[int, Any]:
    from lastlayer.data.rewrite import Change

    sets: dict[int, dict[str, set[str]]] = {}
    for line in accepted:
        sets.setdefault(line["row"], {"missing": set(), "wrong": set()})[line["kind"]].add(line["label"])
    return {row: Change(frozenset(s["missing"]), frozenset(s["wrong"])) for row, s in sets.items()}
