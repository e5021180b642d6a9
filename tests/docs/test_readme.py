"""README: its files are there, and its speed table is that of the results."""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "_ext"))
import speed_table  # noqa: E402


def test_links_lead_to_files():
    text = (ROOT / "README.md").read_text("utf-8")
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert target.startswith("http") or (ROOT / target).exists(), target


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("BCEWithLogitsLoss", "from/bce"),
        ("BCEWithLogitsLoss", "loss"),
        ("class imbalance", "from/bce"),
        ("class imbalance", "loss"),
        ("missing labels", "loss"),
        ("labels are missing", "from/bce"),
        ("threshold", "decode"),
        ("calibration", "metrics"),
        ("calibration", "guides/tags"),
    ],
)
def test_pages_have_the_words_that_people_search(words, page):
    assert words.lower() in (ROOT / "docs" / f"{page}.md").read_text("utf-8").lower()


def test_speed_tables_are_those_of_the_results():
    for path in speed_table.PAGES:
        if path.exists():
            text = path.read_text("utf-8")
            assert speed_table.MARKS.search(text), f"{path.name} has no place for the table"
            assert speed_table.page_of(path) == text, f"run python docs/_ext/speed_table.py: {path.name} is old"


def test_the_goals_of_the_gpu_kernels_have_the_numbers_of_the_results():
    rows = json.loads((ROOT / "benchmarks" / "results" / "h200.json").read_text("utf-8"))["rows"]
    page = (ROOT / "docs" / "kernels.md").read_text("utf-8")

    def span(kind: str, types: tuple[str, ...], low: int, high: int) -> str:
        found = [r for r in rows if r["name"].startswith(kind + "/") and r["dtype"] in types]
        ratios = [r["ratio"] for r in found if low <= r["n"] <= high]
        return f"{min(ratios):.2f} to {max(ratios):.2f}"

    for low, high in ((0, 32_000), (50_257, 1_000_000)):
        single = span("lml", ("float32",), low, high), span("lml", ("bfloat16",), low, high)
        assert f"| {single[0]} in float32, {single[1]} in bfloat16 |" in page
        assert f"| {span('lml_loss', ('float32', 'bfloat16'), low, high)} |" in page
    assert f"| {span('lml_backward', ('float32', 'bfloat16'), 0, 1_000_000)} |" in page
    for dtype in ("float32", "bfloat16"):
        sizes = (512, 1000, 4096, 10_000, 16_384, 32_000)
        share = {r["n"]: r["share_of_copy"] for r in rows if r["name"].startswith("lml/") and r["dtype"] == dtype}
        assert ", ".join(f"{100 * share[n]:.0f}" for n in sizes) + " %" in page


def test_the_ranges_of_speed_are_those_of_the_results():
    page = (ROOT / "README.md").read_text("utf-8")
    rows = {name: json.loads((speed_table.RESULTS / f"{name}.json").read_text())["rows"] for name in ("cpu", "h200")}

    def span(machine: str, kind: str, digits: int = 2) -> str:
        ratios = [row["ratio"] for row in rows[machine] if row["name"].startswith(kind + "/")]
        return f"{min(ratios):.{digits}f} to {max(ratios):.{digits}f}"

    for kind in ("lml", "lml_backward", "lml_loss"):
        assert f" | {span('cpu', kind)} | {span('h200', kind)} |" in page
    drawing = (ROOT / "docs" / "kernels.md").read_text("utf-8").split("{drawing} speed")[1].split("```")[0]
    assert f"On two CPU threads lml takes {span('cpu', 'lml', 1)} times a softmax" in drawing
    assert f"and lml_loss {span('cpu', 'lml_loss', 1)} times cross-entropy" in drawing
    assert f"lml_loss takes {span('h200', 'lml_loss')} times cross-entropy" in drawing


def test_a_table_from_results(tmp_path):
    common = {"dtype": "float32", "k": 5, "against": "softmax"}
    rows = [
        {"name": "lml/1000/float32", "n": 1000, "ratio": 0.951, **common},
        {"name": "lml/512/float32", "n": 512, "ratio": 1.1, **common},
        {"name": "lml_backward/1000/float32", "n": 1000, "ratio": 0.5, **common},
        {"name": "k/1000/50", "n": 1000, "ratio": 0.9, **common, "k": 50},
        {"name": "peer/entmax.sparsemax/1000", "n": 1000, "ratio": 20.0, **common},
        {"name": "original/1000", "n": 1000, "ratio": 0.00213, **common, "against": "the paper's code"},
        {"name": "original_backward/1000/full", "n": 1000, "ratio": 0.043, **common},
    ]
    machine = {"device": "Card", "torch": "2.13", "threads": 2}
    (tmp_path / "card.json").write_text(json.dumps({"machine": machine, "rows": rows}))
    (tmp_path / "other.json").write_text(json.dumps({"device": "Card", "cases": [{"way": "x", "ms": 3.0}]}))
    (tmp_path / "rows.json").write_text(json.dumps({"machine": machine, "rows": [{"data": "x", "seconds": 3.0}]}))
    empty = "a\n<!-- speed -->\n<!-- end speed -->\nb\n"
    short, other = speed_table.PAGES.values()
    every = (re.compile(f"{speed_table.CORE.pattern}|{speed_table.OTHER.pattern}"), None)
    assert not speed_table.CORE.match("k/1000/50"), "the chart has the core, the table the rest"
    assert "| `lml` | float32 | softmax | 1.10" not in speed_table.filled(empty, *other, tmp_path)
    text = speed_table.filled(empty.replace("<!-- end", "old\n<!-- end"), *short, tmp_path)
    assert "Card, torch 2.13, 2 CPU threads (`benchmarks/results/card.json`):" in text
    assert "| `lml` | float32 | softmax | 0.95 |" in text
    assert "| `lml`, backward | float32 | softmax | 0.50 |" in text
    assert not any(word in text for word in ("old", "512", "k = 50", "entmax"))
    assert speed_table.filled(text, *short, tmp_path) == text
    text = speed_table.filled(empty, *every, tmp_path)
    assert "| `lml` | float32 | softmax | 1.10 | 0.95 |" in text
    assert "| `lml`, k = 50 | float32 | softmax | 0.90 |" in text
    assert "| `entmax.sparsemax` | float32 | softmax | 20.00 |" in text
    assert "| `lml`, a batch of 256 | float32 | the paper's code | 0.0021 |" in text
    assert "| `lml`, backward, a full batch | float32 | softmax | 0.043 |" in text
    assert "|  |" not in text.replace("|  | type", ""), "no blanks"
    assert speed_table.filled(text, *short, tmp_path / "none") == empty
    short_run = {"complete": False, "machine": {"device": "Card", "torch": "2.13"}, "rows": rows}
    (tmp_path / "card.json").write_text(json.dumps(short_run))
    assert "Card, torch 2.13 (`benchmarks/results/card.json`; the run was cut short" in speed_table.filled(
        empty, *short, tmp_path
    )
