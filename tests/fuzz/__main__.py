"""``make fuzz MINUTES=10``: run until the time is over, and write what fails to the corpus."""

from __future__ import annotations

import argparse
import collections
import sys
import time
from collections.abc import Iterator

from fuzz import corpus
from fuzz.checks import Op, failures, implementations, takes
from fuzz.ops import BY_NAME, OPS
from fuzz.rows import Case, generate


def cases(first: int, ops: tuple[Op, ...], impls: tuple[str, ...]) -> Iterator[tuple[int, Op, Case, str]]:
    """Yield case after case: each seed for one function, on all of its implementations."""
    seed = first
    while True:
        op = ops[seed % len(ops)]
        case = op.adapt(generate(seed, op.largest, long_rows=seed % 97 == 0))
        for impl in impls:
            if takes(op, case, impl):
                yield seed, op, case, impl
        seed += 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, help="the first seed; by default one from the clock")
    parser.add_argument("--ops", help="names, with commas between; all by default")
    parser.add_argument("--impls", help="names, with commas between; all that the machine has by default")
    parser.add_argument("--keep", action="store_true", help="write what fails to the corpus")
    parser.add_argument("--most", type=int, default=20, help="stop after so many failures")
    arguments = parser.parse_args()
    ops = OPS if arguments.ops is None else tuple(BY_NAME[name] for name in arguments.ops.split(","))
    impls = implementations() if arguments.impls is None else tuple(arguments.impls.split(","))
    first = int(time.time()) * 1000 if arguments.seed is None else arguments.seed
    print(f"implementations: {', '.join(impls)}; functions: {len(ops)}; first seed: {first}")
    counts, rows, bad, seen, start = collections.Counter[str](), 0, 0, set[tuple[str, str]](), time.time()
    said = start
    for seed, op, case, impl in cases(first, ops, impls):
        now = time.time()
        if now - start > 60 * arguments.minutes or bad >= arguments.most:
            break
        if now - said > 30:
            said = now
            print(f"{sum(counts.values())} cases, {rows} rows, {bad} bad, seed {seed}", flush=True)
        counts[f"{op.name} {impl}"] += 1
        rows += len(case.logits)
        try:
            row, text = next(failures(op, case, impl), (-1, ""))
        except Exception as error:
            row, text = 0, f"{type(error).__name__}: {error}"
        if row < 0:
            continue
        bad += 1
        kind = (op.name, impl)
        print(f"seed {seed}: {op.name}, {impl}, {case.logits.dtype}, row {row} of {tuple(case.logits.shape)}: {text}")
        if kind not in seen:
            seen.add(kind)
            small = corpus.shrink(op, case, impl, row)
            entry = corpus.encode(op, small, impl, f"seed {seed}: {text}")
            print("  ", entry if small.logits.numel() <= 40 else f"not shrunk below {tuple(small.logits.shape)}")
            if arguments.keep:
                corpus.add(entry)
    minutes, done = (time.time() - start) / 60, sum(counts.values())
    print(f"{done} cases, {rows} rows in {minutes:.1f} minutes: {done / minutes:.0f} cases per minute")
    print(f"{bad} failed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
