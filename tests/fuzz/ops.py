"""The table of functions that are fuzzed."""

from __future__ import annotations

from fuzz.losses import ops as losses
from fuzz.projections import PROJECTIONS
from fuzz.wider import WIDER

OPS = (*PROJECTIONS, *WIDER, *losses())
BY_NAME = {op.name: op for op in OPS}
