"""The command line: lastlayer demo | train | evaluate | predict | report | export | tune | plan | bench."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lastlayer import cli_reading as reading


class UsageError(ValueError):
    """A command that cannot be carried out as asked."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status: 0, or 2 with one line on the error stream."""
    try:
        arguments = parser().parse_args(argv)
        with _processes(arguments):
            return int(arguments.run(arguments) or 0)
    except KeyboardInterrupt:
        return _fail("interrupted; the same command resumes the run.", 130)
    except BrokenPipeError:  # the reader of our output has gone, e.g. `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ModuleNotFoundError as error:
        name = (error.name or str(error)).partition(".")[0]
        return _fail(f"needs the package {name}. Install it with: pip install 'lastlayer[train,report]'")
    except MemoryError:
        return _fail("not enough memory. Use fewer features (--n-features), or a smaller batch (--batch-size).")
    except (ValueError, OSError, TypeError, RuntimeError) as error:
        if os.environ.get("LASTLAYER_TRACEBACK"):
            raise
        return _fail(" ".join(str(error).split()) or type(error).__name__)
    except Exception as error:
        if os.environ.get("LASTLAYER_TRACEBACK"):
            raise
        return _fail(f"internal error: {type(error).__name__}: {error}. LASTLAYER_TRACEBACK=1 shows where.", 1)


def _fail(message: str, status: int = 2) -> int:
    print(f"lastlayer: error: {' '.join(message.split())[:500]}", file=sys.stderr)
    return status


@contextmanager
def _processes(arguments: argparse.Namespace) -> Iterator[None]:
    """With --shard-classes, join the processes that torchrun started. The first of them writes and prints."""
    if not getattr(arguments, "shard_classes", False):
        yield
        return
    from lastlayer.train import sharded

    with sharded.world(getattr(arguments, "field_accelerator", None) or "auto"):
        if not sharded.is_first():
            arguments.json = None
            if arguments.command == "predict":
                arguments.out = None
        yield


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        """One line, without the usage."""
        raise UsageError(f"{message} (see {self.prog} --help)")


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    from lastlayer.capacity import parser as add_plan_options

    top = _Parser(prog="lastlayer", description="Train, evaluate and look at models that put out label sets.")
    commands = top.add_subparsers(dest="command", required=True, parser_class=_Parser, metavar="COMMAND")

    def add(name: str, function: Any, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(run=function)
        return made

    made = add("demo", _demo, "compare losses on the sample that ships with the package, half of the labels hidden")
    made.add_argument("--out", default="lastlayer_demo", help="folder of the runs and the report")
    made.add_argument("--keep", type=float, default=0.5, help="share of training labels that are kept")
    made.add_argument("--epochs", type=int, default=8)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--losses", default="", help="comma-separated; all six by default")

    made = add("train", _train, "train on a file of rows with label lists")
    made.add_argument("data", help="file or folder; formats: docs/train.md")
    made.add_argument("--valid", help="validation rows; else a part of the training rows")
    made.add_argument("--test", help="test rows; else a part of the rows")
    made.add_argument("--out", required=True, help="run folder; an unfinished run in it is resumed")
    made.add_argument("--quiet", action="store_true", help="no progress bar")
    _shard_flag(made)
    text = "with --shard-classes: groups of processes that each take a share of the rows of a batch"
    made.add_argument("--data-parallel", type=int, default=1, metavar="D", help=text)
    _config_flags(made)
    reading.add_flags(made)

    made = add("evaluate", _evaluate, "measure a run on other rows")
    made.add_argument("run_folder", metavar="RUN")
    made.add_argument("data")
    made.add_argument("--part", help="train, valid or test, where the data name parts (default: test)")
    made.add_argument("--json", metavar="FILE", help="write the numbers there too")
    _shard_flag(made)
    reading.add_flags(made)

    made = add("predict", _predict, "write the labels of rows, best first, as they are read")
    made.add_argument("run_folder", metavar="RUN")
    made.add_argument("data")
    made.add_argument("-k", type=int, default=None, help="labels a row (default: as many as the run expects)")
    made.add_argument("--threshold", type=float, default=None, help="all labels at least so probable")
    made.add_argument("--out", metavar="FILE", help="default: standard output")
    _shard_flag(made)
    reading.add_flags(made, formats=True)

    made = add("report", _report, "write one HTML page about one run or several")
    made.add_argument("run_folders", metavar="RUN", nargs="+")
    made.add_argument(
        "--out", default=None, help="file (default: report.html in the first run); .md and .json choose these forms"
    )

    made = add("export", _export, "write the network for other runtimes")
    made.add_argument("run_folder", metavar="RUN")
    made.add_argument("--format", choices=("onnx", "torch"), default="onnx")
    made.add_argument("--out", default=None, help="file (default: model.onnx or model.pt2 in the run)")

    made = add("tune", _tune, "search learning rate, weight decay, k and loss; the same command resumes")
    made.add_argument("data")
    made.add_argument("--valid")
    made.add_argument("--test")
    made.add_argument("--out", required=True, help="folder of the study")
    made.add_argument("--trials", type=int, default=12)
    made.add_argument("--losses", default="", help="comma-separated; default: that of --loss")
    _config_flags(made)
    reading.add_flags(made)

    made = add("plan", _plan, "memory, traffic and time of training with split labels, before it is run")
    add_plan_options(made)

    made = add("bench", _bench, "run the benchmark table (from a checkout of the repository)")
    made.add_argument("arguments", nargs=argparse.REMAINDER)
    return top


def _shard_flag(made: argparse.ArgumentParser) -> None:
    text = "split the labels over the processes that torchrun started: torchrun --nproc-per-node N -m lastlayer ..."
    made.add_argument("--shard-classes", action="store_true", help=text)


def _config_flags(made: argparse.ArgumentParser) -> None:
    from lastlayer.train.config import Config

    group = made.add_argument_group("fields", "each is also a key of the YAML file")
    group.add_argument("--config", help="YAML file of fields; flags win")
    for item in dataclasses.fields(Config):
        default = item.default if item.default is not dataclasses.MISSING else "none"
        shown = "none" if default in ((), "") else default
        text = f"{item.metadata['help']} (default: {shown})".replace("%", "%%")
        group.add_argument(f"--{item.name.replace('_', '-')}", dest=f"field_{item.name}", metavar="VALUE", help=text)


def _config(arguments: argparse.Namespace) -> Any:
    from lastlayer.train.config import Config, load, make

    values = load(arguments.config) if arguments.config else {}
    reading.take_from_config(arguments, values)
    for item in dataclasses.fields(Config):
        if (flag := getattr(arguments, f"field_{item.name}")) is not None:
            values[item.name] = flag
    return make(values, arguments.config or "flags")


def _demo(arguments: argparse.Namespace) -> int:
    from lastlayer.train.demo import LOSSES, demo

    if not 0 < arguments.keep <= 1 or arguments.epochs < 1:
        raise UsageError("--keep must be above 0 and at most 1, --epochs at least 1.")
    losses = [name for name in arguments.losses.split(",") if name] or list(LOSSES)
    import torch

    torch.set_num_threads(1)  # the steps are small: more threads only wait for one another
    with _progress() as step:
        runs = demo(
            arguments.out, losses=losses, keep=arguments.keep, epochs=arguments.epochs, seed=arguments.seed, step=step
        )
    print_table({run.path.name: run.metrics() for run in runs}, _headline(runs[0].metrics()["metrics"]))
    _try_report([run.path for run in runs], Path(arguments.out) / "report.html")
    return 0


def _train(arguments: argparse.Namespace) -> int:
    from lastlayer.train import train

    config = _config(arguments)
    parts = reading.training_parts(arguments)
    progress = not arguments.quiet and sys.stderr.isatty()
    split = {"shard_classes": arguments.shard_classes, "data_parallel": arguments.data_parallel}
    run = train(parts, config, arguments.out, progress=progress, **split)
    if config.devices > 1 and os.environ.get("LOCAL_RANK", "0") != "0":
        return 0  # a copy of this command on another device; the first one writes and prints
    _say_metrics(run.metrics(), str(run.path))
    print(f"run: {run.path}")
    return 0


def _evaluate(arguments: argparse.Namespace) -> int:
    from lastlayer.train import evaluate

    model = _loaded(arguments)
    part, data = reading.part_to_measure(arguments, model)
    found = evaluate(model, data)
    _say_metrics({"part": part, **found}, arguments.run_folder)
    if arguments.json:
        from lastlayer.runs import RunFolder

        target = Path(arguments.json)
        RunFolder(target.parent).write_json(target.name, {"part": part, **found})
    return 0


def _predict(arguments: argparse.Namespace) -> int:
    if arguments.k is not None and arguments.k < 1:
        raise UsageError("-k must be at least 1.")
    model = _loaded(arguments)
    unknown = rows = 0
    with _output(arguments.out) as out:
        writer = csv.writer(out, lineterminator="\n")
        if arguments.output_format == "csv":
            writer.writerow(["row", "id", "rank", "label", "probability"])
        for data in reading.rows_to_predict(arguments, model):
            x = model.features(data)
            unknown, rows = unknown + model.features.unknown_rows(x), rows + len(data)
            pairs = model.pairs(x, k=arguments.k, threshold=arguments.threshold)
            for i, (number, kept) in enumerate(zip(data.row_numbers().tolist(), pairs, strict=True)):
                name = None if data.ids is None else data.ids[i]
                if arguments.output_format == "csv":
                    start, safe = [number, reading.harmless(name or "")], reading.harmless
                    writer.writerows([*start, r + 1, safe(label), f"{p:.6g}"] for r, (label, p) in enumerate(kept))
                else:
                    line = {"row": number, "id": name, "labels": [{"label": n, "probability": p} for n, p in kept]}
                    out.write(json.dumps(line, ensure_ascii=False) + "\n")
    if note := model.features.note(unknown, rows):
        print(note, file=sys.stderr)
    return 0


def _loaded(arguments: argparse.Namespace) -> Any:
    from lastlayer.train.placement import placement_of
    from lastlayer.train.serve import load

    return load(arguments.run_folder, placement=placement_of(arguments.shard_classes))


@contextmanager
def _output(path: str | None) -> Iterator[Any]:
    if path is None:
        yield sys.stdout
        return
    with open(path, "w", encoding="utf-8", newline="") as file:
        yield file


def _report(arguments: argparse.Namespace) -> int:
    from lastlayer.runs import RunError, RunFolder

    runs = [Path(p) for p in arguments.run_folders]
    for path in runs:
        if not RunFolder(path).is_done():
            raise RunError(f"{path}: not a finished run.")
    out = Path(arguments.out) if arguments.out else runs[0] / "report.html"
    from lastlayer import report

    report.write(runs, out)
    print(f"report: {out}")
    return 0


def _try_report(runs: Sequence[Path], out: Path) -> None:
    try:
        from lastlayer import report
    except ImportError as error:
        print(f"no report: {error}", file=sys.stderr)
        return
    report.write(list(runs), out)
    print(f"report: {out}")


def _export(arguments: argparse.Namespace) -> int:
    from lastlayer.train.export import export

    name = "model.onnx" if arguments.format == "onnx" else "model.pt2"
    out = export(arguments.run_folder, arguments.out or Path(arguments.run_folder) / name, arguments.format)
    print(f"exported: {out}")
    return 0


def _tune(arguments: argparse.Namespace) -> int:
    from lastlayer.train.tune import tune

    if arguments.trials < 1:
        raise UsageError("--trials must be at least 1.")

    def say(line: dict[str, Any]) -> None:
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in line.items()), flush=True)

    losses = [name for name in arguments.losses.split(",") if name]
    config = _config(arguments)
    if config.devices > 1:
        raise UsageError("tune runs on one device; leave out --devices.")
    run = tune(
        reading.training_parts(arguments), config, arguments.out, trials=arguments.trials, losses=losses, say=say
    )
    _say_metrics(run.metrics(), str(run.path))
    print(f"best run: {run.path}")
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    from lastlayer.capacity import report

    print(report(arguments))
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    sys.path.insert(0, os.getcwd())
    try:
        run = importlib.import_module("benchmarks.run")
    except ImportError:
        raise UsageError(
            "the benchmarks are not installed: run `lastlayer bench` in a checkout of the repository."
        ) from None
    return int(run.main(arguments.arguments) or 0)


@contextmanager
def _progress() -> Iterator[Any]:
    """A progress bar on the error stream; plain lines where that is no terminal."""
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


def _headline(metrics: dict[str, Any]) -> list[str]:
    """The columns of the table: those of the largest k, mAP and calibration."""
    last = max(int(n.partition("@")[2]) for n in metrics if n.startswith("recall@"))
    names = ["precision@1", f"precision@{last}", f"recall@{last}", f"ndcg@{last}", "map", f"ece@{last}"]
    return [name for name in dict.fromkeys(names) if name in metrics]


def print_table(rows: dict[str, dict[str, Any]], names: Sequence[str]) -> None:
    """Print metrics in percent, with half the width of their 95 % intervals."""
    from rich.console import Console
    from rich.table import Table

    drawn = any("±" in _cell(found["metrics"].get(name)) for found in rows.values() for name in names)
    table = Table(title="percent, with 95 % bootstrap intervals over the rows" if drawn else "percent")
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for title, found in rows.items():
        table.add_row(title, *(_cell(found["metrics"].get(name)) for name in names))
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    console.print(table)


def _cell(found: dict[str, Any] | None) -> str:
    if not found or found["value"] is None:
        return "-"
    text = f"{100 * found['value']:.1f}"
    if found.get("low") is None or found["low"] != found["low"]:
        return text
    return f"{text} ±{50 * (found['high'] - found['low']):.1f}"


def _say_metrics(found: dict[str, Any], title: str) -> None:
    names = [name for name in found["metrics"] if name.startswith(("precision@", "recall@", "ndcg@"))]
    print(f"{title}: {found['part']} part, {found['rows']} rows")
    print_table({Path(title).name[:30]: found}, list(dict.fromkeys(names[:6:3] + _headline(found["metrics"]))))
    for note in found.get("notes", []):
        print(note)
