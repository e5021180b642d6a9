"""README: its files are there, and its speed table is that of the results."""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "_ext"))
import speed_table  # noqa: E402


def test_links_lead_to_files():
    text = (ROOT / "README.md").read_text("utf-8")
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert target.startswith("http") or (ROOT / target).exists(), target


def test_speed_tables_are_those_of_the_results():
    for path in speed_table.PAGES:
        if path.exists():
            text = path.read_text("utf-8")
            assert speed_table.filled(text) == text, f"run python docs/_ext/speed_table.py: {path.name} is old"


def test_readme_has_the_marks():
    assert speed_table.MARKS.search((ROOT / "README.md").read_text("utf-8"))


def test_a_table_from_results(tmp_path):
    rows = [
        {"case": "lml/1k", "ms": 1.2345, "baseline": "torch.softmax", "ratio": 0.951, "quote": True},
        {"case": "lml/2k", "ms": 2.0, "baseline": "torch.softmax", "ratio": 1.1},
        {"way": "no ratio", "ms": 3.0},
    ]
    (tmp_path / "card.json").write_text(json.dumps({"device": "Card", "torch": "2.13", "cases": rows}))
    text = speed_table.filled("a\n<!-- speed -->\nold\n<!-- end speed -->\nb\n", tmp_path)
    assert "| Card, torch 2.13 | `lml/1k` | 1.23 ms | torch.softmax | 0.95 |" in text
    assert "old" not in text
    assert "2k" not in text
    assert speed_table.filled(text, tmp_path) == text
    assert speed_table.filled(text, tmp_path / "none") == "a\n<!-- speed -->\n<!-- end speed -->\nb\n"
