"""The commands. Each takes its parsed arguments and returns an exit status; heavy imports are inside."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import importlib
import io
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from lastlayer import cli_output as output
from lastlayer import cli_reading as reading
from lastlayer.cli import UsageError, parser

FEW = 100  # rows below which the numbers of an evaluation are coarse
INHERITED = "LASTLAYER_RUN"  # tells the copies of this command on other devices the run folder


def run(arguments: argparse.Namespace) -> int:
    """Run the command that was named."""
    with _processes(arguments):
        return int(RUN[arguments.command](arguments) or 0)


@contextmanager
def _processes(arguments: argparse.Namespace) -> Iterator[None]:
    """With --shard-classes, join the processes that torchrun started. Only the first writes and prints."""
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


def _config(arguments: argparse.Namespace) -> Any:
    from lastlayer.train.config import Config, load, make

    values = load(arguments.config) if arguments.config else {}
    reading.take_from_config(arguments, values)
    if getattr(arguments, "start", None):
        from lastlayer.train.start import settings

        values = {**settings(arguments.start), **values}
    for item in dataclasses.fields(Config):
        if (flag := getattr(arguments, f"field_{item.name}")) is not None:
            values[item.name] = flag
    return make(values, arguments.config or "flags")


def _demo(arguments: argparse.Namespace) -> int:
    from lastlayer.train.demo import LOSSES, demo, opening, verdict

    if not 0 < arguments.keep <= 1 or arguments.epochs < 1:
        raise UsageError("--keep must be above 0 and at most 1, --epochs at least 1.")
    losses = [name for name in arguments.losses.split(",") if name] or list(LOSSES)
    for line in opening(losses, arguments.keep, arguments.epochs):
        output.say(line)
    import torch

    torch.set_num_threads(1)  # the steps are small: more threads only wait for one another
    with output.progress() as step:
        runs = demo(
            arguments.out, losses=losses, keep=arguments.keep, epochs=arguments.epochs, seed=arguments.seed, step=step
        )
    output.print_table({run.path.name: run.metrics() for run in runs}, output.headline(runs[0].metrics()["metrics"]))
    output.say(verdict(runs))
    page = Path(arguments.out) / "report.html"
    if _try_report([run.path for run in runs], page):
        address = page.resolve().as_uri()
        print(f"opening {address}" if arguments.open else f"open it: {_again(arguments)} --open")
        if arguments.open:
            import webbrowser

            webbrowser.open(address)
    return 0


def _again(arguments: argparse.Namespace) -> str:
    """Return the command of a demo as it was given; finished runs are kept, so that it only opens the page."""
    default = vars(parser().parse_args(["demo"]))
    given = {name: value for name, value in vars(arguments).items() if value != default.get(name)}
    flags = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    program = ["lastlayer"] if shutil.which("lastlayer") else [os.path.relpath(sys.executable), "-m", "lastlayer"]
    return shlex.join([*program, "demo", *flags])


def _train(arguments: argparse.Namespace) -> int:
    from lastlayer.train import train

    config = _config(arguments)
    if arguments.out is None and arguments.shard_classes:
        raise UsageError("--out must be given with --shard-classes, so that all processes use the same folder.")
    parts = reading.training_parts(arguments, config.images)
    bar = not arguments.quiet and sys.stderr.isatty()
    options: dict[str, Any] = {"progress": bar, "overwrite": arguments.overwrite}
    options |= {"shard_classes": arguments.shard_classes, "data_parallel": arguments.data_parallel}
    if not bar and not arguments.quiet:
        options["say"] = output.epoch_line(config.epochs)
    if arguments.start and (arguments.folds or arguments.shard_classes):
        raise UsageError("--from must be left out with --folds and --shard-classes.")
    if arguments.start:
        options["start"] = arguments.start
    if arguments.folds:
        from lastlayer.train.folds import train_with_folds

        if rows := parts.get("all", parts.get("train")):
            reading.check_folds(arguments.folds, rows)
        train = partial(
            train_with_folds, folds=arguments.folds, path=arguments.data, tell=partial(print, file=sys.stderr)
        )
    run = _in_folder(arguments, arguments.out, lambda out: train(parts, config, out, **options))
    if config.devices > 1 and os.environ.get("LOCAL_RANK", "0") != "0":
        return 0  # a copy of this command on another device; the first one writes and prints
    output.metrics(run.metrics(), str(run.path))
    output.summary(run)
    if arguments.folds:
        output.folds(run)
    print(f"run: {run.path}")
    print(f"next: {shlex.join(['lastlayer', 'report', str(run.path)])}")
    return 0


def _in_folder(arguments: argparse.Namespace, out: str | None, work: Callable[[Path], Any], suffix: str = "") -> Any:
    """Work in the given folder. Without one, resume the last of ``runs/NAME-N`` if it fits, else take the next."""
    from lastlayer.runs.listing import name_of, next_folder, numbered
    from lastlayer.train.engine import OtherRunError

    if out is None and INHERITED in os.environ and "LOCAL_RANK" in os.environ:
        out = os.environ[INHERITED]
    if out is not None:
        return work(Path(out))
    name = name_of(arguments.data) + suffix
    taken = numbered(name)
    for path in [*taken[-1:], next_folder(name)]:
        os.environ[INHERITED] = str(path)
        try:
            return work(path)
        except OtherRunError:  # the last run is finished, or has other settings or data
            continue
        finally:
            os.environ.pop(INHERITED, None)
    raise AssertionError("a new folder cannot hold another run")


def _evaluate(arguments: argparse.Namespace) -> int:
    from lastlayer.runs import RunFolder
    from lastlayer.train import evaluate

    _keep_inputs("--json", arguments.json, arguments.run_folder, arguments.data)
    model = _loaded(arguments)
    part, data = reading.part_to_measure(arguments, model)
    seen = RunFolder(arguments.run_folder).read_optional("data.json").get("read") or {}
    if data.fingerprint() in {seen.get("train"), seen.get("all")}:
        _warn("the run was trained on these rows, so the numbers do not tell how it does on others.")
    if len(data) < FEW:
        _warn(f"there are only {len(data)} rows: look at the intervals.")
    result = evaluate(model, data)
    output.metrics({"part": part, **result}, arguments.run_folder)
    if arguments.json:
        target = Path(arguments.json)
        RunFolder(target.parent).write_json(target.name, {"part": part, **result})
    return 0


def _warn(message: str) -> None:
    print(f"lastlayer: warning: {message}", file=sys.stderr)


def _predict(arguments: argparse.Namespace) -> int:
    if arguments.k is not None and arguments.k < 1:
        raise UsageError("-k must be at least 1.")
    if arguments.threshold is not None and not 0 <= arguments.threshold <= 1:
        raise UsageError(f"--threshold must be a probability from 0 to 1, got {arguments.threshold}.")
    if arguments.explain < 0:
        raise UsageError("--explain must be at least 1.")
    _keep_inputs("--out", arguments.out, arguments.run_folder, arguments.data)
    model = _loaded(arguments)
    unknown = rows = 0
    with _output(arguments.out) as out:
        writer = csv.writer(out, lineterminator="\n")
        if arguments.output_format == "csv":
            reasons = ["for", "against"] if arguments.explain else []
            writer.writerow(["row", "id", "rank", "label", "probability", *reasons])
        for data in reading.rows_to_predict(arguments, model):
            x = model.features(data)
            unknown, rows = unknown + model.features.unknown_rows(x), rows + len(data)
            pairs = model.pairs(x, k=arguments.k, threshold=arguments.threshold)
            if arguments.explain:
                from lastlayer.cli_explain import write

                write(out, arguments, model, data, x, pairs)
                continue
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


def _suggest(arguments: argparse.Namespace) -> int:
    from lastlayer.cli_suggest import run as suggest

    return suggest(arguments)


def _loaded(arguments: argparse.Namespace) -> Any:
    from lastlayer.train.placement import placement_of
    from lastlayer.train.serve import load

    placement = placement_of(arguments.shard_classes)
    model = load(arguments.run_folder, placement=placement, encoder=getattr(arguments, "encoder", None))
    if not model.config.encoder:
        return model
    from lastlayer.train.encode.encoder import best_device

    return model.to(best_device(model.config.accelerator))


def _keep_inputs(flag: str, out: str | None, run: str | Path, data: str = "-") -> None:
    """Refuse to write over a file that is read: the rows, or a file of the run."""
    from lastlayer.runs import RunFolder

    if out is None or not Path(out).is_file():
        return
    if Path(data).is_file() and os.path.samefile(out, data):
        raise UsageError(f"{flag} must not be the file of the rows, got {out}. Name another one.")
    if RunFolder(run).is_own(Path(out)):
        raise UsageError(f"{flag} must not be a file of the run, got {out}. Name another one.")


@contextmanager
def _output(path: str | None) -> Iterator[Any]:
    """Open a file that is written whole or not at all, so that an error in a late row leaves what was there."""
    from lastlayer.runs.files import naming

    if path is None:
        if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.isatty():
            sys.stdout.reconfigure(encoding="utf-8")  # as in a file, whatever the encoding of the terminal
        yield sys.stdout
        return
    place = Path(path).resolve()
    if not place.parent.is_dir():
        raise UsageError(f"--out: the folder {place.parent} is not there.")
    usual = place.is_file() or not place.exists()  # not a device or a pipe
    part = place.with_name(f".{place.name}.{os.getpid()}.tmp") if usual else place
    try:
        with naming(place), open(part, "w", encoding="utf-8", newline="") as file:
            yield file
        if usual:
            part.replace(place)
    finally:
        if usual:
            part.unlink(missing_ok=True)


def _report(arguments: argparse.Namespace) -> int:
    from lastlayer.runs import RunError, RunFolder
    from lastlayer.runs.listing import latest

    runs = [Path(p) for p in arguments.run_folders] or [latest().path]
    for path in runs:
        if not RunFolder(path).is_done():
            raise RunError(f"{path}: not a finished run.")
    out = Path(arguments.out) if arguments.out else runs[0] / "report.html"
    for path in runs:
        _keep_inputs("--out", arguments.out, path)
    from lastlayer import report

    report.write(runs, out)
    print(f"report: {out}")
    return 0


def _try_report(runs: list[Path], out: Path) -> bool:
    try:
        from lastlayer import report
    except ImportError as error:
        print(f"no report: {error}", file=sys.stderr)
        return False
    report.write(runs, out)
    print(f"report: {out}")
    return True


def _runs(arguments: argparse.Namespace) -> int:
    from lastlayer.runs import RunError
    from lastlayer.runs.listing import find, row

    rows = [row(run) for run in find(arguments.folder)]
    if not rows:
        raise RunError(f"{arguments.folder}: holds no run. `lastlayer train` writes them to the folder runs.")
    if arguments.sort:
        output.order(rows, arguments.sort)
    if arguments.json:
        for line in rows:
            print(json.dumps(line, ensure_ascii=False))
    else:
        output.list_runs(rows, arguments.sort)
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from lastlayer.train.export import export

    run = Path(arguments.run_folder)
    kind = arguments.format or ("tree" if (run / "tree.json").exists() else "onnx")
    name = {"onnx": "model.onnx", "torch": "model.pt2", "tree": "model_tree"}[kind]
    out = export(run, arguments.out or run / name, kind)
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
    parts = reading.training_parts(arguments, config.images)
    options: dict[str, Any] = {"trials": arguments.trials, "losses": losses, "say": say}
    run = _in_folder(arguments, arguments.out, lambda out: tune(parts, config, out, **options), "-tune")
    output.metrics(run.metrics(), str(run.path))
    output.summary(run)
    print(f"best run: {run.path}")
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    from lastlayer.capacity import report

    print(report(arguments))
    if not arguments.json:
        print(output.tree_line(arguments.labels, arguments.features))
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module("benchmarks.run")
    except ImportError:
        raise UsageError(
            "the benchmarks are not installed: run `lastlayer bench` in a checkout of the repository."
        ) from None
    return int(module.main(arguments.arguments) or 0)


RUN: dict[str, Callable[[argparse.Namespace], int]] = {
    "demo": _demo,
    "train": _train,
    "evaluate": _evaluate,
    "predict": _predict,
    "suggest": _suggest,
    "report": _report,
    "runs": _runs,
    "export": _export,
    "tune": _tune,
    "plan": _plan,
    "bench": _bench,
}
