"""Find run folders: all below a folder, the latest, and a free name for the next."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lastlayer.runs.files import RunError
from lastlayer.runs.folder import RunFolder

DEPTH = 3  # folders below the given one that are looked into
HOME = "runs"  # where new runs go


def find(folder: str | Path, depth: int = DEPTH) -> Iterator[RunFolder]:
    """Yield the runs in a folder and below it, in the order of their names; a run inside a run is left out."""
    path = Path(folder)
    if (run := RunFolder(path)).exists():
        yield run
    elif depth and path.is_dir():
        for inside in sorted(path.iterdir()):
            if inside.is_dir() and not inside.name.startswith("."):
                yield from find(inside, depth - 1)


def latest(folder: str | Path = HOME) -> RunFolder:
    """Return the run that was finished last."""
    done = [run for run in find(folder) if run.is_done()]
    if not done:
        raise RunError(f"{folder}: holds no finished run. Name the run folder, or run `lastlayer train` first.")
    return max(done, key=lambda run: (run / "done.json").stat().st_mtime_ns)


def numbered(name: str, home: str | Path = HOME) -> list[Path]:
    """Return the folders ``home/name-1``, ``home/name-2`` and so on that are there, in the order of their numbers."""
    home = Path(home)
    if not home.is_dir():
        return []
    matches = [(re.fullmatch(rf"{re.escape(name)}-(\d+)", path.name), path) for path in home.iterdir()]
    return [path for _, path in sorted((int(match[1]), path) for match, path in matches if match)]


def next_folder(name: str, home: str | Path = HOME) -> Path:
    """Return the next free folder, ``home/name-N``."""
    taken = numbered(name, home)
    number = int(taken[-1].name.rpartition("-")[2]) + 1 if taken else 1
    return Path(home) / f"{name}-{number}"


def name_of(data: str | Path) -> str:
    """Return a name for the runs on a data file: that of the file, without endings and odd characters.

    Example:
        >>> name_of("some/tags (new).tsv.gz"), name_of("-")
        ('tags_new', 'run')
    """
    name = Path(data).name
    while (stem := Path(name).stem) != name:
        name = stem
    return re.sub(r"\W+", "_", name).strip("_") or "run"


def row(run: RunFolder) -> dict[str, Any]:
    """Return one line about a run: name, state, settings, rows and scores; nothing of it must be there."""
    out: dict[str, Any] = {"run": str(run.path), "state": "finished" if run.is_done() else "unfinished"}
    try:
        config, data = run.config(), run.read_optional("data.json")
        resolved, parts = data.get("resolved") or {}, data.get("parts") or {}
        out |= {"model": config.get("model", "network"), "loss": resolved.get("loss", config.get("loss"))}
        out |= {"k": resolved.get("k"), "train_rows": (parts.get("train") or {}).get("rows")}
        out["started"] = run.read_optional("environment.json").get("started")
        if run.is_done():
            result = run.metrics()
            out |= {"part": result.get("part"), "rows": result.get("rows")}
            out["metrics"] = {name: metric.get("value") for name, metric in result["metrics"].items()}
    except (RunError, AttributeError) as error:
        out |= {"state": "damaged", "error": str(error)}
    return out
