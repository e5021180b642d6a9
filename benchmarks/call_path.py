"""The path of one call through the package: the Python functions it enters, their files, the switches between files.

``python -m benchmarks.call_path`` prints one line per operation; with ``--show`` also every function in order.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

import lastlayer as ll

ROOT = Path(ll.__file__).parent


class Visit(NamedTuple):
    file: str
    function: str


def visits(call: Callable[[], Any]) -> list[Visit]:
    """Return the functions of the package that a call enters, in order; a first call, not counted, fills caches."""
    call()
    found: list[Visit] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(ROOT):
            found.append(Visit(str(file.relative_to(ROOT)), frame.f_code.co_name))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


def counts(path: list[Visit]) -> dict[str, int]:
    """Count the calls, the files, and how often a function is in another file than the one entered before it."""
    switches = sum(a.file != b.file for a, b in itertools.pairwise(path))
    return {"calls": len(path), "files": len({visit.file for visit in path}), "switches": switches}


def operations() -> dict[str, Callable[[], Any]]:
    """Return the calls to follow: small inputs, everything else at its default."""
    x, target = torch.randn(4, 20), torch.randint(20, (4,))
    learnt = x.clone().requires_grad_()
    return {
        "lml": lambda: ll.lml(x, 5),
        "lml, recorded": lambda: ll.lml(learnt, 5),
        "lml_loss": lambda: ll.lml_loss(x, target, 5),
        "lml_loss, recorded": lambda: ll.lml_loss(learnt, target, 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--show", action="store_true", help="print every function in order")
    show = parser.parse_args().show
    for name, call in operations().items():
        path = visits(call)
        print(f"{name:20}", "  ".join(f"{count:3} {what}" for what, count in counts(path).items()))
        for visit in path if show else ():
            print(f"    {visit.file:28} {visit.function}")


if __name__ == "__main__":
    main()
