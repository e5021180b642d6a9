"""The recording of the demo in docs/terminal.md: as wide as it says, and what the command prints today.

``RECORD=1 pytest tests/docs/test_terminal.py -m slow`` writes it again.
"""

import os
import re
from pathlib import Path

import pytest

from lastlayer.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "terminal.md"
BLOCK = re.compile(r"(## At (\d+) columns\n\n```text\n)(.*?)(```)", re.S)


def shape(text: str) -> str:
    """What does not depend on the machine: words and order, without numbers and the widths that follow from them."""
    text = re.sub(r"[-+]?\d[\d,.]*", "0", text).replace("more than chance", "may be chance")
    return " ".join(re.sub(r"[━─┏┓┗┛┳┻╇┡┩┴└┘┬┼]+", "-", text).split())


def test_the_recording_fits_its_columns():
    found = {int(columns): text for _, columns, text, _ in BLOCK.findall(PAGE.read_text("utf-8"))}
    assert set(found) == {80, 120}
    for columns, text in found.items():
        assert max(map(len, text.splitlines())) <= columns
        assert "…" not in text
        for words in ("$ lastlayer demo", "data: ", "task: ", "work: ", " finds most: ", "report: ", "--open"):
            assert words in text


@pytest.mark.slow
@pytest.mark.long
def test_the_demo_prints_what_the_page_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shutil.which", lambda name: f"bin/{name}")
    page = PAGE.read_text("utf-8")
    for start, columns, text, _ in BLOCK.findall(page)[: 2 if os.environ.get("RECORD") else 1]:
        monkeypatch.setenv("COLUMNS", columns)
        assert main(["demo", "--losses", "lml,binary"]) == 0
        printed = "$ lastlayer demo --losses lml,binary\n" + capsys.readouterr().out
        printed = "\n".join(line.rstrip() for line in printed.splitlines()) + "\n"
        if os.environ.get("RECORD"):
            page = page.replace(f"{start}{text}", f"{start}{printed}")
        else:
            assert shape(text) == shape(printed)
    if os.environ.get("RECORD"):
        PAGE.write_text(page, "utf-8")
