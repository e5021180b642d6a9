"""The command line: the parser of all commands, and what an error looks like.

Nothing here imports torch, so that help is quick; the commands are in :mod:`lastlayer.cli_commands`.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

from lastlayer import cli_reading as reading


class UsageError(ValueError):
    """A command that cannot be carried out as given."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status: 0, or 2 with one line on the error stream."""
    given = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a label that the terminal cannot show is no error
    try:
        top = parser()
        # argparse does not leave options to a subcommand that takes all the rest.
        passed = given[1:] if given[:1] == ["bench"] and not {"-h", "--help"} & set(given) else []
        arguments = top.parse_args(given[: len(given) - len(passed)])
        if passed:
            arguments.arguments = passed
        if arguments.command is None:
            top.print_help()
            return 0
        from lastlayer import cli_commands

        return cli_commands.run(arguments)
    except KeyboardInterrupt:
        resumes = given[:1] in (["train"], ["tune"], ["demo"])
        return _fail(f"interrupted{'; the same command resumes the run' if resumes else ''}.", 130)
    except BrokenPipeError:  # the reader of our output has gone, e.g. `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ModuleNotFoundError as error:
        name = (error.name or str(error)).partition(".")[0]
        return _fail(f'needs the package {name}. Install it with: pip install "lastlayer[train,report]"')
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


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, **options})

    def error(self, message: str) -> Any:
        """Raise an error of one line, without the usage."""
        raise UsageError(f"{message} (see {self.prog} --help)")


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    import lastlayer

    top = _Parser(
        prog="lastlayer",
        description="Train, evaluate and inspect models that predict label sets.",
        epilog=_examples(
            "lastlayer demo                         the whole job on a sample that comes with the package",
            "lastlayer train tags.tsv               train on a file of texts and labels; writes runs/tags-1",
            "lastlayer report                       a page about the latest run",
            "lastlayer predict runs/tags-1 new.tsv  labels for new texts",
        ),
    )
    top.add_argument("--version", action="version", version=f"lastlayer {lastlayer.__version__}")
    commands = top.add_subparsers(dest="command", parser_class=_Parser, metavar="COMMAND")
    for name, (text, fill) in COMMANDS.items():
        fill(commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}."))
    return top


def _examples(*lines: str) -> str:
    return "\n".join(["examples:", *(f"  {line}" for line in lines)])


def _demo(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--out", default="lastlayer_demo", help="folder of the runs and the report (default: lastlayer_demo)"
    )
    made.add_argument("--keep", type=float, default=0.5, help="share of training labels that are kept (default: 0.5)")
    made.add_argument("--epochs", type=int, default=8, help="passes over the training rows (default: 8)")
    made.add_argument("--seed", type=int, default=0, help="default: 0")
    made.add_argument("--losses", default="", metavar="A,B", help="names of losses (default: six of them)")
    made.add_argument("--open", action="store_true", help="open the report in a browser at the end")
    made.epilog = _examples("lastlayer demo", "lastlayer demo --open", "lastlayer demo --losses lml,binary --keep 0.3")


def _train(made: argparse.ArgumentParser) -> None:
    made.add_argument("data", help="file or folder of rows with labels, or - for standard input")
    made.add_argument("--valid", metavar="FILE", help="validation rows (default: a part of the training rows)")
    made.add_argument("--test", metavar="FILE", help="test rows (default: a part of the rows)")
    made.add_argument("--out", help="run folder; an unfinished run in it is resumed (default: runs/NAME-N)")
    made.add_argument("--overwrite", action="store_true", help="replace the run that is in the folder")
    text = "go on from a finished run: its settings, words and weights; new labels are added"
    made.add_argument("--from", dest="start", metavar="RUN", help=text)
    made.add_argument("--quiet", action="store_true", help="show no progress")
    text = "also train a run for each of K folds: means and spreads of the metrics, and scores for `suggest`"
    made.add_argument("--folds", type=int, default=0, metavar="K", help=text)
    _shard_flag(made)
    text = "with --shard-classes: the number of groups of processes, each with a share of the rows of a batch"
    made.add_argument("--data-parallel", type=int, default=1, metavar="D", help=f"{text} (default: 1)")
    _config_flags(made)
    reading.add_flags(made)
    made.epilog = _examples(
        "lastlayer train tags.tsv",
        "lastlayer train tags.csv --label-column toxic,obscene,insult --loss binary",
        "lastlayer train tags.tsv --labels incomplete --out runs/incomplete",
        "lastlayer train more.tsv --from runs/tags-1",
        "lastlayer train rows.svm --hidden 256 --dropout 0.2 --epochs 40 --patience 5",
    )


def _evaluate(made: argparse.ArgumentParser) -> None:
    made.add_argument("run_folder", metavar="RUN", help="folder of a finished run")
    made.add_argument("data", help="file or folder of rows with labels, or - for standard input")
    text = "which part to measure if the data name parts, or all rows (default: test)"
    made.add_argument("--part", choices=("train", "valid", "test", "all"), help=text)
    made.add_argument("--json", metavar="FILE", help="write the numbers to this file as well")
    _encoder_flag(made)
    _shard_flag(made)
    reading.add_flags(made)
    made.epilog = _examples("lastlayer evaluate runs/tags-1 other.tsv --json numbers.json")


def _predict(made: argparse.ArgumentParser) -> None:
    made.add_argument("run_folder", metavar="RUN", help="folder of a finished run")
    made.add_argument("data", help="file or folder of rows, or - for standard input")
    text = "labels per row (default: as the run decides, see --decide of train; with --threshold no limit)"
    made.add_argument("-k", type=int, default=None, help=text)
    made.add_argument(
        "--threshold", type=float, default=None, metavar="P", help="all labels with at least this probability"
    )
    text = "also write the N words or features that speak most for each label, and against it (default N: 5)"
    made.add_argument("--explain", type=int, nargs="?", const=5, default=0, metavar="N", help=text)
    made.add_argument("--out", metavar="FILE", help="file to write (default: standard output)")
    _encoder_flag(made)
    _shard_flag(made)
    reading.add_flags(made, formats=True)
    made.epilog = _examples(
        "lastlayer predict runs/tags-1 new.tsv -k 5 --format csv --out labels.csv",
        "lastlayer predict runs/tags-1 new.tsv --threshold 0.5",
        "echo 'a new text' | lastlayer predict runs/tags-1 - --input-format txt",
    )


def _suggest(made: argparse.ArgumentParser) -> None:
    from lastlayer.cli_suggest import fill

    fill(made)


def _report(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "run_folders", metavar="RUN", nargs="*", help="folders of finished runs (default: the latest in runs)"
    )
    text = "file to write; .md and .json choose these forms (default: report.html in the first run)"
    made.add_argument("--out", metavar="FILE", help=text)
    made.epilog = _examples("lastlayer report", "lastlayer report runs/tags-1 runs/tags-2 --out compare.html")


def _export(made: argparse.ArgumentParser) -> None:
    made.add_argument("run_folder", metavar="RUN", help="folder of a finished run")
    text = "default: onnx, and tree for label trees: a folder with their files and a program that reads them"
    made.add_argument("--format", choices=("onnx", "torch", "tree"), help=text)
    text = "file or folder to write (default: model.onnx, model.pt2 or model_tree in the run)"
    made.add_argument("--out", metavar="FILE", help=text)
    made.epilog = _examples("lastlayer export runs/tags-1 --format onnx")


def _tune(made: argparse.ArgumentParser) -> None:
    made.add_argument("data", help="file or folder of rows with labels, or - for standard input")
    made.add_argument("--valid", metavar="FILE", help="validation rows (default: a part of the training rows)")
    made.add_argument("--test", metavar="FILE", help="test rows (default: a part of the rows)")
    made.add_argument("--out", help="folder of the study, which is resumed (default: runs/NAME-tune-N)")
    made.add_argument("--trials", type=int, default=12, metavar="N", help="settings to try (default: 12)")
    made.add_argument("--losses", default="", metavar="A,B", help="names of losses to try (default: that of --loss)")
    _config_flags(made)
    reading.add_flags(made)
    made.epilog = _examples("lastlayer tune tags.tsv --trials 20 --losses lml,binary")


def _runs(made: argparse.ArgumentParser) -> None:
    made.add_argument("folder", nargs="?", default="runs", metavar="DIR", help="folder to look into (default: runs)")
    made.add_argument("--sort", metavar="METRIC", help="order by this metric, best first, e.g. recall@5")
    made.add_argument("--json", action="store_true", help="print one JSON object per run")
    made.epilog = _examples("lastlayer runs", "lastlayer runs experiments --sort ndcg@5")


def _plan(made: argparse.ArgumentParser) -> None:
    from lastlayer.capacity import parser as add_options

    add_options(made)
    made.epilog = _examples("lastlayer plan --labels 1e8 --features 768 --rows 4096 --devices 64")


def _bench(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="--rows PATTERN, --json FILE, --device cpu|cuda, --original PATH"
    )


COMMANDS = {
    "demo": ("compare losses on the sample that comes with the package, with half of the labels hidden", _demo),
    "train": ("train a model on a file of rows with labels", _train),
    "evaluate": ("measure a run on other rows", _evaluate),
    "predict": ("write the labels of rows, best first", _predict),
    "suggest": ("find labels that are probably missing or wrong", _suggest),
    "report": ("write one HTML page about one run or several", _report),
    "runs": ("list the runs in a folder with their scores", _runs),
    "export": ("write the model of a run for other runtimes", _export),
    "tune": ("search for the best learning rate, weight decay, k and loss", _tune),
    "plan": ("compute memory, traffic and time of training with sharded labels before it runs", _plan),
    "bench": ("run the benchmark table (in a checkout of the repository)", _bench),
}


def _encoder_flag(made: argparse.ArgumentParser) -> None:
    text = "where the frozen encoder of the run is now (default: where it was)"
    made.add_argument("--encoder", metavar="FOLDER", help=text)


def _shard_flag(made: argparse.ArgumentParser) -> None:
    text = "split the labels over the processes that torchrun started: torchrun --nproc-per-node N -m lastlayer ..."
    made.add_argument("--shard-classes", action="store_true", help=text)


def _config_flags(made: argparse.ArgumentParser) -> None:
    from lastlayer.train.config import Config, accepts

    group = made.add_argument_group("settings", "each is also a key of the YAML file")
    group.add_argument("--config", metavar="FILE", help="YAML file of settings; flags override it")
    for item in dataclasses.fields(Config):
        default = item.default if item.default is not dataclasses.MISSING else ""
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
        shown = shown.lower() if isinstance(default, bool) else shown or "none"
        text = f"{item.metadata['help']} [{accepts(item.name)}] (default: {shown})".replace("%", "%%")
        switch: dict[str, Any] = {"nargs": "?", "const": "true"} if item.type == "bool" else {}
        flag = f"--{item.name.replace('_', '-')}"
        group.add_argument(flag, dest=f"field_{item.name}", metavar="VALUE", help=text, **switch)
