"""How accurate the projection is: a grid of rows against an independent float64 solver.

Run it for the whole table: ``python tests/accuracy.py [--impl torch] [--largest 1000000]``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator

import torch
from torch import Tensor

import lastlayer as ll

SIZES = (2, 3, 10, 100, 1000, 19000, 100000, 1000000)
LIMITS = {torch.float32: (1e-6, 1e-6, 1e-5), torch.float64: (1e-13, 1e-13, 1e-13)}  # sum, y, log y


def cardinalities(n: int) -> list[float]:
    return sorted({k for k in (1, 2.5, 5, 20, 100, n / 2, n - 1) if 0 < k < n})


def rows(n: int) -> Iterator[tuple[str, Tensor]]:
    """The kinds of logits, as float64 rows."""
    generator = torch.Generator().manual_seed(n)

    def normal() -> Tensor:
        return torch.randn(1, n, generator=generator, dtype=torch.float64)

    few = torch.arange(n) < max(1, n // 1000)
    yield "normal", normal()
    yield "0.01 x", 0.01 * normal()
    yield "30 x", 30 * normal()
    yield "constant", torch.full((1, n), 0.1, dtype=torch.float64)
    yield "ties", (2 * normal()).round()
    yield "heavy tail", normal() / normal()
    yield "bimodal", normal() + torch.where(normal() > 0, 15.0, -15.0)
    yield "outliers", normal() + torch.where(few, 1e4, 0.0)
    yield "offset 1e4", normal() + 1e4
    if n >= 4:
        yield "half masked", torch.where(torch.arange(n) % 2 == 0, normal(), -torch.inf)


def gaps(n: int, k: int) -> Iterator[tuple[str, Tensor]]:
    """Rows whose k-th and next logit are far apart."""
    noise = torch.randn(1, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    for gap in (40, 60, 100, 200, 1e4):
        yield f"gap {gap:g}", noise.clamp(-2, 2) + torch.where(torch.arange(n) < k, gap, 0.0)


def exact(x: Tensor, k: float) -> Tensor:
    """Return log y - and with it y - of one row by bisection for the dual in float64, summed without cancellation."""
    x = x.double()
    finite = x[x.isfinite()]
    n = len(finite)
    ranked = finite.sort(descending=True).values
    middle = (ranked[math.ceil(k) - 1] + ranked[math.floor(k)]) / 2
    d = finite - middle
    width = (d.abs().max() + 2 * math.log(n + 1) + abs(math.log(k / (n - k))) + 1).item()
    lo, hi = -width, width
    while True:
        mid = (lo + hi) / 2
        if mid in (lo, hi):
            break
        z = d + mid
        above = z > 0
        depth = -z.abs()
        peak = depth.max()
        part = (depth - peak).exp() / (1 + depth.exp())
        surplus = above.sum().double() - k
        left = torch.where(above, -part, part).sum()
        f = left if surplus == 0 else surplus + left * peak.exp()
        lo, hi = (mid, hi) if f < 0 else (lo, mid)
    return torch.nn.functional.logsigmoid((x - middle) + (lo + hi) / 2)


def errors(x: Tensor, k: float, dtype: torch.dtype, impl: str) -> tuple[float, float, float]:
    """Return the errors of the sum (relative to k), of y, and of log y (relative, absolute near 0)."""
    x = x.to(dtype)
    y, log_y = ll.lml(x, k, impl=impl).double(), ll.log_lml(x, k, impl=impl).double()
    reference = exact(x[0], k)[None]
    live = reference.isfinite()
    off = (log_y - reference)[live].abs() / reference[live].abs().clamp(min=1)
    return (
        abs(y.sum().item() - k) / max(k, 1),
        (y - reference.exp()).abs().max().item(),
        off.max().item(),
    )


def cases(largest: int) -> Iterator[tuple[int, str, Tensor, float]]:
    for n in (n for n in SIZES if n <= largest):
        for name, x in rows(n):
            free = int(x.isfinite().sum())
            for k in cardinalities(n):
                if k < free:
                    yield n, name, x, k
        for k in {1, n // 3, n - 1} - {0, n}:
            for name, x in gaps(n, k):
                yield n, name, x, k


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--impl", default="torch")
    parser.add_argument("--largest", type=int, default=SIZES[-1])
    arguments = parser.parse_args()
    for dtype in (torch.float32, torch.float64):
        worst: dict[str, list[float]] = {}
        for _, name, x, k in cases(arguments.largest):
            found = errors(x, k, dtype, arguments.impl)
            worst[name] = [max(pair) for pair in zip(worst.get(name, (0.0,) * 3), found, strict=True)]
        print(f"{dtype}, impl={arguments.impl}: largest error of sum(y) over k, y, log y")
        for name, values in worst.items():
            print(f"  {name:12}", *(f"{value:9.1e}" for value in values))


if __name__ == "__main__":
    main()
