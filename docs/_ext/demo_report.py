"""Write the report that the docs publish: the demo with three of its losses, each at its default learning rate.

``make demo`` compares six losses and searches the learning rate of each, which takes minutes. Finished runs are kept:
where only the sources of the page have changed, only the page is written again.
"""

from __future__ import annotations

from pathlib import Path

from figures import stale

ROOT = Path(__file__).parents[2]
OUT = ROOT / "docs" / "_generated" / "site" / "demo.html"
LOSSES = ("lml", "binary", "asymmetric")


def write() -> None:
    """Train what is missing, and write the page where it is older than the code that makes it."""
    sources = [*(ROOT / "lastlayer" / "report").iterdir(), ROOT / "lastlayer" / "train" / "demo.py", Path(__file__)]
    if not stale(OUT, *(path for path in sources if path.is_file())):
        return
    from lastlayer import report
    from lastlayer.train.demo import demo

    OUT.parent.mkdir(parents=True, exist_ok=True)
    runs = demo(OUT.parents[1] / "demo_runs", losses=LOSSES, factors=(1.0,))
    report.write([run.path for run in runs], OUT)


if __name__ == "__main__":
    write()
