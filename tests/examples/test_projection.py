import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "projection.py"


@pytest.mark.slow
def test_the_table_and_the_figures(tmp_path):
    example = runpy.run_path(str(EXAMPLE))
    text = example["table"]()
    assert "LML k=3" in text
    assert "3.0000" in text.splitlines()[6]  # the sum for k = 3
    written = example["save"](tmp_path)
    assert {p.name for p in written} == {f"{n}.{e}" for n in ("polytopes", "root", "entropies") for e in ("png", "svg")}
    assert all(p.stat().st_size > 5000 for p in written)
