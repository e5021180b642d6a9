"""What ``predict --explain`` writes: predicted labels with the features that speak for and against each."""

from __future__ import annotations

import argparse
import csv
import json
from typing import Any

from lastlayer import cli_reading as reading


def write(out: Any, arguments: argparse.Namespace, model: Any, data: Any, x: Any, pairs: Any) -> None:
    """Write rows with their labels and reasons, as JSON lines or CSV."""
    from lastlayer.train.explain import explained

    numbers, table = data.row_numbers().tolist(), csv.writer(out, lineterminator="\n")
    for i, (kept, reasons) in enumerate(explained(model, x, pairs, arguments.explain)):
        name = None if data.ids is None else data.ids[i]
        if arguments.output_format == "csv":
            safe = reading.harmless
            for rank, ((label, p), reason) in enumerate(zip(kept, reasons, strict=True)):
                said = [safe(_cell(reason.speaks_for)), safe(_cell(reason.against))]
                table.writerow([numbers[i], safe(name or ""), rank + 1, safe(label), f"{p:.6g}", *said])
            continue
        labels = [
            {"label": label, "probability": p, "for": _objects(reason.speaks_for), "against": _objects(reason.against)}
            for (label, p), reason in zip(kept, reasons, strict=True)
        ]
        out.write(json.dumps({"row": numbers[i], "id": name, "labels": labels}, ensure_ascii=False) + "\n")


def _cell(features: list[tuple[str, float]]) -> str:
    return "; ".join(f"{name} {value:+.3g}" for name, value in features)


def _objects(features: list[tuple[str, float]]) -> list[dict[str, Any]]:
    return [{"feature": name, "adds": round(value, 6)} for name, value in features]
