"""Fill pages that collect from elsewhere: the API reference and the time of the experiments.

A public name that a page describes is linked; the others (Modules, mostly) are described in the reference itself.
"""

from __future__ import annotations

import inspect
import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

import lastlayer

DOCS = Path(__file__).parents[1]
ROOMS = {
    "project": "Project",
    "loss": "Losses",
    "head": "Heads",
    "decode": "Decoders",
    "hierarchy": "Trees",
    "metrics": "Metrics",
    "data": "Data",
}
DESCRIBED = re.compile(r"^\.\. auto(?:function|class|data|exception):: (lastlayer(?:\.\w+)*)", re.M)


def public_names() -> dict[str, dict[str, str]]:
    """The public names by room, each with the path that the documentation teaches."""
    door = {name: f"lastlayer.{name}" for name in lastlayer.__all__ if name not in lastlayer._ROOMS}
    rooms = {}
    for room in ROOMS:
        names = import_module(f"lastlayer.{room}").__all__
        rooms[room] = {name: door.pop(name, f"lastlayer.{room}.{name}") for name in names}
    return {**rooms, "rest": door}


def described() -> dict[str, str]:
    """Names that a page describes: the last part of each, and its full name."""
    pages = [path.read_text("utf-8") for path in sorted(DOCS.rglob("*.md")) if "_build" not in path.parts]
    return {target.split(".")[-1]: target for page in pages for target in DESCRIBED.findall(page)}


def value_of(path: str) -> Any:
    """What a path names."""
    module, name = path.rsplit(".", 1)
    return getattr(import_module(module), name)


def first_line(value: Any) -> str:
    line = (inspect.getdoc(value) or "").split("\n", 1)[0] if callable(value) else ""
    line = re.sub(r":(?:func|class|meth|mod):`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", line)
    line = re.sub(r":math:`([^`]*)`", r"$\1$", line)
    return re.sub(r"``?([^`]+)``?", r"`\1`", line).replace("|", r"\|")


def api() -> str:
    """The reference as Markdown."""
    links, lines = described(), []
    for room, names in public_names().items():
        lines += [f"\n## {ROOMS.get(room, 'The rest')}\n", "| Name | |", "| --- | --- |"]
        order = sorted(names, key=lambda name: (name[0].isupper(), name.lower()))
        values = {name: value_of(names[name]) for name in order}
        for name in order:
            short = names[name].removeprefix("lastlayer.")
            lines.append(f"| {{py:obj}}`{short} <{links.get(name, names[name])}>` | {first_line(values[name])} |")
        rest = [name for name in order if name not in links]
        if rest:
            lines += ["", "```{eval-rst}"]
            for name in rest:
                value = values[name]
                kind = "class" if inspect.isclass(value) else "function" if callable(value) else "data"
                lines.append(f".. auto{kind}:: {names[name]}")
            lines += ["```"]
    return "\n".join(lines) + "\n"


def device_time(results: list[dict[str, Any]]) -> str:
    """A sentence on the time each device spent on the results, as counted by the runs."""
    total: dict[str, float] = {}
    for found in results:
        for device, seconds in found.get("seconds", {}).items():
            name = device if "NVIDIA" in device else "CPU"
            total[name] = total.get(name, 0.0) + seconds
    spent = [f"{seconds / 60:.1f} minutes of {device}" for device, seconds in sorted(total.items())]
    counted = "as the runs counted it; runs side by side count each"
    return f"The committed results took {', '.join(spent)} ({counted}).\n\n" if spent else ""


def experiments() -> str:
    """The time that all experiments took."""
    results = [json.loads(path.read_text("utf-8")) for path in DOCS.parent.glob("experiments/*/results/results.json")]
    return device_time(results)


def fill(app: Sphinx, page: str, source: list[str]) -> None:
    makers = {"api": api, "experiments": experiments}
    if page in makers:
        source[0] = source[0].replace(f"<!-- {page} -->", makers[page]())
    # A doctest ends with an empty line, which the pages need not show.
    source[0] = re.sub(r"\n\n```\n", "\n```\n", source[0])


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", fill)
    # What they collect may have changed although the pages have not.
    app.connect("env-get-outdated", lambda app, env, *_: [p for p in ("api", "experiments") if p in env.found_docs])
    return {"parallel_read_safe": True, "parallel_write_safe": True}
