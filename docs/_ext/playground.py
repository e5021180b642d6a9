"""Put the playground into its page as one piece: a page opened from a disk may not load modules from other files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

FOLDER = Path(__file__).parents[1] / "_static" / "playground"


def bundle() -> str:
    """The app's HTML with its style and its two modules, joined."""
    html, style, maths, app = (
        (FOLDER / name).read_text("utf-8") for name in ("playground.html", "style.css", "maths.js", "app.js")
    )
    app, removed = re.subn(r'^import .* from "\./maths\.js";\n', "", app, flags=re.M)
    assert removed == 1, "app.js imports maths.js in one line"
    return f'<style>\n{style}</style>\n{html}<script type="module">\n{maths}\n{app}</script>\n'


class Playground(SphinxDirective):
    """``{playground}``: the app, in the page."""

    def run(self) -> list[nodes.Node]:
        for path in FOLDER.iterdir():
            self.env.note_dependency(str(path))
        return [nodes.raw("", bundle(), format="html")]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("playground", Playground)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
