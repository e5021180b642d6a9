"""Cases that once failed: shrunk, written to a file, and replayed by the tests."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from fuzz.checks import Op, failures, takes
from fuzz.ops import BY_NAME
from fuzz.rows import Case

PATH = Path(__file__).with_name("corpus.json")


def shrink(op: Op, case: Case, impl: str, row: int) -> Case:
    """Return a smaller case that still fails: one row if that does, and as few classes as do."""
    alone = case.row(row)
    if not fails(op, alone, impl):
        return case
    case, size = alone, alone.logits.shape[-1] // 2
    while size >= 1:
        for first in range(0, case.logits.shape[-1], size):
            place = torch.arange(case.logits.shape[-1])
            smaller = case.columns((place < first) | (place >= first + size))
            if smaller.logits.shape[-1] and fails(op, smaller, impl):
                case = smaller
                break
        else:
            size //= 2
    return case


def fails(op: Op, case: Case, impl: str) -> bool:
    """Whether a case fails; one that the function no longer takes does not."""
    try:
        return takes(op, case, impl) and any(True for _ in failures(op, case, impl))
    except ValueError:
        return False


def encode(op: Op, case: Case, impl: str, note: str) -> dict[str, Any]:
    """Return a case as JSON can hold it."""
    return {
        "op": op.name,
        "impl": impl,
        "note": note,
        "dtype": str(case.logits.dtype).removeprefix("torch."),
        "logits": [[_text(v) for v in row] for row in case.logits.double().tolist()],
        "k": [_text(v) for v in case.k.double().tolist()],
        "mask": None if case.mask is None else case.mask.int().tolist(),
        "temperature": case.temperature,
        "target": None if case.target is None else case.target.double().tolist(),
        "layout": case.layout,
        "one_k": case.one_k,
        "observed": case.observed,
    }


def _text(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def decode(entry: dict[str, Any]) -> tuple[Op, Case, str]:
    """Return the function, the case and the implementation of an entry."""
    dtype = getattr(torch, entry["dtype"])
    work = torch.promote_types(dtype, torch.float32)

    def rows(values: Any) -> torch.Tensor:
        return torch.tensor([[float(v) for v in row] for row in values], dtype=torch.float64)

    case = Case(
        rows(entry["logits"]).to(dtype),
        rows([entry["k"]])[0].to(work),
        None if entry["mask"] is None else torch.tensor(entry["mask"], dtype=torch.bool),
        entry["temperature"],
        None if entry["target"] is None else torch.tensor(entry["target"], dtype=torch.float64).to(work),
        entry["layout"],
        entry["one_k"],
        entry["observed"],
    )
    return BY_NAME[entry["op"]], case, entry["impl"]


def load() -> list[dict[str, Any]]:
    """Return all entries."""
    return json.loads(PATH.read_text()) if PATH.exists() else []


def add(entry: dict[str, Any]) -> None:
    """Write an entry to the file."""
    entries = [*load(), entry]
    PATH.write_text("[\n" + ",\n".join(json.dumps(e) for e in entries) + "\n]\n")
