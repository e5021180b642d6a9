"""Sphinx settings; `make docs` builds with warnings as errors."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

import demo_report  # noqa: E402
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
    "accessible",
    "looks",
    "mathml",
    "playground",
    "reference",
]
exclude_patterns = ["_build", "_ext", "_generated"]
html_extra_path = ["_generated/site"]  # the report of the demo
html_theme = "furo"
html_title = f"lastlayer {version}"
html_favicon = "_static/favicon.svg"
html_static_path = ["_static"]
html_css_files = ["lastlayer.css"]
html_math_renderer = "mathml"

myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
myst_html_meta = {
    "description lang=en": "Multi-label classification in PyTorch: losses beyond BCE, top-k and thresholds, missing "
    "labels, calibrated probabilities, metrics and reports.",
    "keywords": "multi-label classification, BCEWithLogitsLoss, class imbalance, missing labels, thresholds, tagging",
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

figures.draw_all()
demo_report.write()
