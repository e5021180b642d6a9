"""How a figure looks: light or dark page, wide screen or phone. ``{drawing}`` puts all four into a page.

The browser shows the one that fits: the theme decides between light and dark, ``<picture>`` between wide and phone.
"""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from docutils import nodes
from docutils.parsers.rst import directives
from matplotlib.figure import Figure
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

OUT = Path(__file__).parents[1] / "_static" / "figures"
PHONE = "46em"  # the width at which the theme folds its sidebars away


@dataclass(frozen=True)
class Look:
    """Colours that can be read on the page, and whether there is room for panels side by side."""

    name: str
    phone: bool
    ink: str
    paper: str
    grid: str
    blue: str
    orange: str
    grey: str
    green: str

    def panels(
        self, count: int, wide: tuple[float, float], phone: tuple[float, float], columns: int | None = None
    ) -> tuple[Figure, list[Any]]:
        """One row of panels on a wide screen, or rows of so many columns; one below the other on a phone."""
        columns = columns or count
        shape, size = ((count, 1), phone) if self.phone else ((count // columns, columns), wide)
        figure, axes = plt.subplots(*shape, figsize=size, squeeze=False)
        return figure, list(axes.flat)


LIGHT = ("#1f2937", "#ffffff", "#e2e8f0", "#2563eb", "#c2410c", "#64748b", "#047857")
DARK = ("#d6dae1", "#131416", "#3a3f47", "#7cb0ff", "#fb923c", "#94a3b8", "#34d399")
LOOKS = [
    Look(f"{theme}{'-phone' if phone else ''}", phone, *colours)
    for theme, colours in (("light", LIGHT), ("dark", DARK))
    for phone in (False, True)
]


@contextmanager
def looking(look: Look) -> Iterator[None]:
    """Draw in the colours of a look, on a transparent ground."""
    ink = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    settings = {**dict.fromkeys(ink, look.ink), "axes.facecolor": "none", "figure.facecolor": "none"}
    legend = {"legend.facecolor": look.paper, "legend.edgecolor": look.grid, "grid.color": look.grid}
    fixed = {"savefig.facecolor": "none", "svg.hashsalt": "lastlayer", "axes.titlesize": 10, "legend.fontsize": 9}
    with plt.rc_context(settings | legend | fixed):
        yield


def save(figure: Figure, path: Path) -> None:
    """Write a file that another build may be reading."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not figure.subfigs and figure.get_layout_engine() is None:
        figure.tight_layout()
    part = path.with_stem(f"{path.stem}.{os.getpid()}")
    figure.savefig(part, dpi=160, bbox_inches="tight", metadata={"Date": None})
    part.replace(path)
    plt.close(figure)


def paths(name: str) -> list[Path]:
    return [OUT / f"{name}-{look.name}.svg" for look in LOOKS]


def save_all(name: str, draw: Callable[[Look], Figure]) -> None:
    for look, path in zip(LOOKS, paths(name), strict=True):
        with looking(look):
            save(draw(look), path)


class Drawing(SphinxDirective):
    """``{drawing} NAME``: a figure of ``figures.py``, in the form that fits the reader's screen and theme."""

    required_arguments = 1
    option_spec = {"alt": directives.unchanged_required}  # noqa: RUF012

    def run(self) -> list[nodes.Node]:
        name, alt = self.arguments[0], html.escape(self.options["alt"])
        for path in paths(name):
            if not path.exists():
                raise self.error(f"no figure {path.name}")
        root = "../" * self.env.docname.count("/") + "_static/figures"
        pictures = [
            f'<picture class="drawing only-{theme}">'
            f'<source media="(max-width: {PHONE})" srcset="{root}/{name}-{theme}-phone.svg">'
            f'<img src="{root}/{name}-{theme}.svg" alt="{alt}"></picture>'
            for theme in ("light", "dark")
        ]
        return [nodes.raw("", "\n".join(pictures), format="html")]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("drawing", Drawing)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
