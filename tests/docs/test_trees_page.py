"""The tables of the page about label trees are those of the results."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "_ext"))
import tree_table


def test_the_tables_are_those_of_the_results():
    page = tree_table.PAGE.read_text("utf-8")
    assert tree_table.filled(page) == page, "run python docs/_ext/tree_table.py"
    sets = json.loads((tree_table.RESULTS / "xmc.json").read_text("utf-8"))["sets"]
    assert page.count("| `LinearTree` |") == len(sets) > 0
