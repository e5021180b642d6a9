"""Fill pages that collect from elsewhere: the API reference and the time of the experiments.

A public name that a page describes is linked; the others (Modules, mostly) are described in the reference itself.
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from sphinx.application import Sphinx

import lastlayer
import lastlayer.data

DOCS = Path(__file__).parents[1]
STAGES = {
    "project": "Project",
    "loss": "Losses",
    "head": "Heads",
    "decode": "Decoders",
    "hierarchy": "Trees",
    "metrics": "Metrics",
    "train": "Training",
    "report": "Reports",
    "shard": "Shards",
    "data": "Data",
    "other": "The rest",
}
DESCRIBED = re.compile(r"^\.\. auto(?:function|class|data|exception):: (lastlayer(?:\.\w+)*)", re.M)


def public_names(package: ModuleType = lastlayer) -> dict[str, Any]:
    """The public names of a package and what they are, lazy ones too."""
    found = {name: getattr(package, name) for name in dir(package) if not name.startswith("_")}
    return {
        name: value
        for name, value in found.items()
        if not isinstance(value, ModuleType) and str(getattr(value, "__module__", "lastlayer")).startswith("lastlayer")
    }


def described() -> dict[str, str]:
    """Names that a page describes: the last part of each, and its full name."""
    pages = [path.read_text("utf-8") for path in sorted(DOCS.rglob("*.md")) if "_build" not in path.parts]
    return {target.split(".")[-1]: target for page in pages for target in DESCRIBED.findall(page)}


def by_stage() -> dict[str, dict[str, tuple[str, Any]]]:
    """For each stage its names, each with its path and value."""
    stages: dict[str, dict[str, tuple[str, Any]]] = {stage: {} for stage in STAGES}
    for package in (lastlayer, lastlayer.data):
        for name, value in public_names(package).items():
            module = getattr(value, "__module__", package.__name__)
            stage = module.split(".")[1] if package is lastlayer else "data"
            stages[stage if stage in STAGES else "other"][name] = (f"{package.__name__}.{name}", value)
    return {stage: names for stage, names in stages.items() if names}


def first_line(value: Any) -> str:
    line = (inspect.getdoc(value) or "").split("\n", 1)[0] if callable(value) else ""
    line = re.sub(r":(?:func|class|meth|mod):`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", line)
    line = re.sub(r":math:`([^`]*)`", r"$\1$", line)
    return re.sub(r"``?([^`]+)``?", r"`\1`", line).replace("|", r"\|")


def api() -> str:
    """The reference as Markdown."""
    links, lines = described(), []
    for stage, names in by_stage().items():
        lines += [f"\n## {STAGES[stage]}\n", "| Name | |", "| --- | --- |"]
        order = sorted(names, key=lambda name: (name[0].isupper(), name.lower()))
        lines += [f"| {{py:obj}}`{n} <{links.get(n, names[n][0])}>` | {first_line(names[n][1])} |" for n in order]
        rest = [n for n in order if n not in links]
        if rest:
            lines += ["", "```{eval-rst}"]
            for name in rest:
                path, value = names[name]
                kind = "class" if inspect.isclass(value) else "function" if callable(value) else "data"
                lines.append(f".. auto{kind}:: {path}")
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
