"""Mend what the theme leaves undone for keyboards and screen readers: axe-core counts both as serious.

The tab key reaches code, tables and formulas that scroll sideways, and headings of the sidebar have a level.
"""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx


def mend(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    body = context.get("body", "").replace("<pre>", '<pre tabindex="0">')
    context["body"] = re.sub(r'<div class="((?:table|math)-wrapper[^"]*)"', r'<div tabindex="0" class="\1"', body)
    if "furo_navigation_tree" in context:
        context["furo_navigation_tree"] = context["furo_navigation_tree"].replace(
            'role="heading"', 'role="heading" aria-level="2"'
        )


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("html-page-context", mend, priority=900)  # after the theme
    return {"parallel_read_safe": True, "parallel_write_safe": True}
