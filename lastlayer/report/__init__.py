"""From run folders to one page: self-contained HTML, Markdown, or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lastlayer.runs.contents import Run, read
from lastlayer.runs.files import RunError, write_atomically

ReportError = RunError  # the name of version 0.1


def write(run_dirs: Sequence[str | Path] | str | Path, out: str | Path) -> Path:
    """Write the report of one run or several, side by side.

    Args:
        run_dirs: Folders of finished runs.
        out: The file. Its ending chooses the form: ``.md`` is Markdown, ``.json`` is JSON, anything else is one HTML
            page that holds all it needs: it opens without a network and sends nothing.

    Returns:
        `out`.

    Raises:
        RunError: A folder is missing or damaged; the message is one line and names the file.

    Example:
        >>> from lastlayer import report
        >>> report.write("no/such/run", "report.html")
        Traceback (most recent call last):
        lastlayer.runs.files.RunError: no/such/run: must be the folder of a finished run, and is not there. ...
    """
    path = Path(out)
    runs = read([run_dirs] if isinstance(run_dirs, str | Path) else list(run_dirs))
    if path.suffix == ".json":
        text = json.dumps(_summary(runs), ensure_ascii=False, indent=1, allow_nan=False) + "\n"
    elif path.suffix in (".md", ".markdown"):
        from lastlayer.report.markdown import markdown

        text = markdown(_summary(runs))
    else:
        from lastlayer.report.page import page

        text = page(runs)
    write_atomically(path, text.encode("utf-8", "replace"))  # a lone surrogate, which JSON can carry, becomes "?"
    return path


def summary(run_dirs: Sequence[str | Path] | str | Path) -> dict[str, Any]:
    """Return the numbers of the report as dictionaries, lists and numbers.

    Args:
        run_dirs: Folders of finished runs.

    Returns:
        ``{"format", "lastlayer", "runs", "comparison"}``; docs/report.md lists what a run holds.
    """
    return _summary(read([run_dirs] if isinstance(run_dirs, str | Path) else list(run_dirs)))


def _summary(runs: list[Run]) -> dict[str, Any]:
    from lastlayer.report.digest import summarise

    return summarise(runs)[0]
