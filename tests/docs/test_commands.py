"""The commands that README.md and the docs print: each runs as printed, in the order of its page."""

import glob
import re
import shlex
from itertools import chain
from pathlib import Path

import pytest
from report_tools import make_run
from tools import slow

from lastlayer.cli import main, parser

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LONG = ("demo", "tune", "export", "bench")  # left to the slow test, or to tests of their own
QUICK = {"demo": ["--epochs", "1"], "tune": ["--trials", "2"]}  # test_terminal.py runs a demo to its end
RECORDED = ("demo", "--losses", "lml,binary")  # which test_terminal.py runs
SHORT = ("CONTRIBUTING.md",)  # the others are slow; test_cli.py runs the commands of README.md in its own way
BLOCK = re.compile(r"^```console\n(.*?)^```", re.S | re.M)


def commands(page: Path) -> list[str]:
    lines = chain.from_iterable(block.splitlines() for block in BLOCK.findall(page.read_text("utf-8")))
    return [line[2:].partition("  #")[0].strip() for line in lines if line.startswith("$ ")]


def of_ours(page: Path) -> list[list[str]]:
    return [shlex.split(command)[1:] for command in commands(page) if command.startswith("lastlayer ")]


OURS = [page for page in PAGES if of_ours(page)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the files and runs that the pages speak of."""
    monkeypatch.chdir(tmp_path)
    words = {"red": "apple", "green": "leaf", "blue": "sky", "fruit": "apple", "plant": "leaf"}
    rows = [
        (f"{a} {words[a]} {words[b]} {n}", f"{a},{b}")
        for n, (a, b) in enumerate(zip(words, [*words][1:], strict=False))
    ]
    for name, times in (("tags.tsv", 15), ("new.tsv", 1), ("other.tsv", 3), ("more.tsv", 5)):
        lines = ["text\tlabels", *(f"{text} {i}\t{labels}" for i in range(times) for text, labels in rows)]
        Path(name).write_text("\n".join(lines) + "\n", "utf-8")
    lines = ["id,comment_text,toxic,insult", *(f"{i},a comment {i % 3},{i % 2},{int(i % 3 == 0)}" for i in range(60))]
    Path("comments.csv").write_text("\n".join(lines) + "\n", "utf-8")
    make_run(Path("runs/lml"))
    make_run(Path("runs/binary"), noise=0.6)
    return tmp_path


def run(words: list[str]) -> int:
    return main(list(chain.from_iterable(sorted(glob.glob(word)) if "*" in word else [word] for word in words)))


@pytest.mark.parametrize(
    "page",
    [page if page.name in SHORT else slow(page) for page in OURS],
    ids=lambda page: page.name,
)
def test_commands_run_as_printed(page, folder, capsys):
    for words in of_ours(page):
        if words[0] not in LONG:
            assert run(words) == 0, f"lastlayer {shlex.join(words)}: {capsys.readouterr().err}"


@pytest.mark.slow
@pytest.mark.long
def test_long_commands_run_as_printed(folder, capsys):
    found = [words for page in OURS for words in of_ours(page)]
    for command in LONG[:3]:
        for words in {tuple(words) for words in found if words[0] == command} - {RECORDED}:
            for part in words:  # what an earlier line of the page has made
                if part == "run":
                    assert run(["train", "tags.tsv", "--out", "run", "--overwrite"]) == 0
            assert run([*words, *QUICK.get(command, [])]) == 0, (
                f"lastlayer {shlex.join(words)}: {capsys.readouterr().err}"
            )


def test_commands_in_sentences_are_understood():
    for page in PAGES:
        for found in re.findall(r"`lastlayer (\w+ [^`\n]+)`", page.read_text("utf-8")):
            if "..." not in found:
                parser().parse_args(shlex.split(found))


def test_every_tool_that_is_named_is_there():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M)
    for page in PAGES:
        text = page.read_text("utf-8")
        for name in re.findall(r"(?:^\$ |`)make ([\w-]+)", text, re.M):
            assert name in targets, f"{page.name}: make {name}"
        for module in re.findall(r"python -m ((?:benchmarks|experiments)[\w.]*)", text):
            place = ROOT / module.replace(".", "/")
            assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), f"{page.name}: {module}"
        for script in re.findall(r"python ((?:tests|examples|docs|benchmarks)/[\w/]+\.py)", text):
            assert (ROOT / script).exists(), f"{page.name}: {script}"


def test_installing_is_written_one_way():
    """The core, what the commands need, or encoders; from a checkout, as long as no index has the package."""
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    assert re.search(r"^train = \[", project, re.M)
    assert re.search(r"^report = \[", project, re.M)
    for page in PAGES:
        for what in re.findall(r"pip install ((?:\S*lastlayer|\"?'?\.)[^\s`]*)", page.read_text("utf-8")):
            assert what in (".", '".[train,report]"', '".[text]"', '".[images]"', '".[mlflow]"'), (
                f"{page.name}: pip install {what}"
            )


def test_the_plan_is_as_printed(capsys):
    page = (ROOT / "docs" / "shard.md").read_text("utf-8")
    command = re.search(r"^\$ lastlayer (plan .*)$", page, re.M)[1]
    assert run(shlex.split(command)) == 0
    assert capsys.readouterr().out in page, "line by line: a reflowed table cannot be read"
