"""Sphinx settings; `make docs` builds with warnings as errors."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

import figures  # noqa: E402

import lastlayer  # noqa: E402

project = "lastlayer"
author = "The lastlayer developers"
copyright = "2026, The lastlayer developers"
release = version = lastlayer.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "mathml",
    "playground",
    "reference",
]
exclude_patterns = ["_build", "_ext", "_generated"]
html_theme = "furo"
html_title = "lastlayer"
html_static_path = ["_static"]
html_css_files = ["lastlayer.css"]
html_math_renderer = "mathml"

myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

figures.draw_all()
