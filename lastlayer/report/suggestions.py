"""The page of suggestions by itself, for a file of rows without a run."""

from __future__ import annotations

from typing import Any

import lastlayer
from lastlayer.report.page import embedded, render

END = 'theme();\nsuggestions()();\ndocument.documentElement.dataset.ready = "true";\n'


def suggestions_page(sheet: dict[str, Any]) -> str:
    """Return one HTML page that holds all it needs, from what ``lastlayer suggest`` found."""
    data = {"runs": [{"name": sheet["name"], "suggestions": sheet}], "names": [], "titles": {}}
    about = {"name": sheet["name"], "version": lastlayer.__version__}
    return render("suggestions.html", ("plots.js", "labels.js", "suggest.js"), END, embedded(data), **about)
