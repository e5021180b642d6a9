"""How exact `lml_balanced` is: rows and columns of 600 matrices, from 4 x 4 to 16,384 x 512.

``python -m benchmarks.balanced [--device cpu|cuda] [--largest N] [--json FILE]``: every size meets every spread of the
logits, every bias of the columns, and five kinds of sums: one, a real number, a quarter and half of the columns, and
sums that differ from row to row with capacities that differ from column to column.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lastlayer as ll
from benchmarks.run import machine

SIZES = (
    *((4, 4), (16, 8), (64, 16), (256, 64), (1024, 64)),
    *((4096, 64), (1024, 256), (8192, 256), (4096, 512), (16384, 512)),
)
SPREADS = (0.5, 1.0, 3.0, 12.0)
BIASES = (0.0, 2.0, 6.0)
KINDS = ("one", "real", "quarter", "half", "uneven")


def cases(largest: int) -> Iterator[tuple[int, int, float, float, str]]:
    for rows, columns in SIZES:
        if rows * columns > largest:
            continue
        for spread in SPREADS:
            for bias in BIASES:
                for kind in KINDS:
                    yield rows, columns, spread, bias, kind


def problem(
    rows: int, columns: int, spread: float, bias: float, kind: str, device: torch.device
) -> tuple[Tensor, Any, Tensor]:
    """Return logits, k and the column sums; uneven ones are those of another assignment, and so can be met."""
    generator = torch.Generator(device).manual_seed(rows + columns)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    x = spread * draw(rows, columns) + bias * draw(columns)
    if kind == "uneven":
        k = 0.5 + (columns / 2 - 1) * torch.rand(rows, generator=generator, device=device, dtype=torch.float64)
        other = ll.lml(draw(rows, columns).double() + draw(columns), k)
        return x, k, other.sum(0)
    k = {"one": 1.0, "real": min(2.5, columns / 2), "quarter": columns / 4, "half": columns / 2}[kind]
    return x, k, torch.full((columns,), rows * k / columns, dtype=torch.float64, device=device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--largest", type=int, default=16384 * 512, help="entries of a matrix")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    found: list[dict[str, Any]] = []
    for rows, columns, spread, bias, kind in cases(options.largest):
        x, k, capacity = problem(rows, columns, spread, bias, kind, device)
        begin = time.perf_counter()
        y = ll.lml_balanced(x, k, capacity).double()
        by_row = float(((y.sum(1) - k).abs() / torch.as_tensor(k, device=device)).max())
        by_column = float(((y.sum(0) - capacity).abs() / capacity).max())
        seconds = time.perf_counter() - begin
        case = {"rows": rows, "columns": columns, "spread": spread, "bias": bias, "kind": kind}
        found.append({**case, "row_error": by_row, "column_error": by_column, "seconds": round(seconds, 4)})
        print(*found[-1].values(), flush=True)
        if options.json:
            worst = max(max(f["row_error"], f["column_error"]) for f in found)
            exact = sum(max(f["row_error"], f["column_error"]) <= 1e-6 for f in found)
            summary = {"cases": len(found), "within_1e-6": exact, "worst": worst, "largest": options.largest}
            options.json.write_text(json.dumps({"machine": machine(device), **summary, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
