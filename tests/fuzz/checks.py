"""What a function is to the fuzzer, how its results are compared, and how exactly they must agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fuzz import reference
from fuzz.rows import Case
from lastlayer import _native, _triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
SLACK = 24  # roundings allowed in a point x + nu, of 1 + |x + nu| each

Found = dict[str, Tensor]
Expected = dict[str, tuple[np.ndarray, np.ndarray]]  # a value, and how far from it one may be


class Op(NamedTuple):
    """A function of the package.

    `run(case, impl)` calls it; `expect(case, impl)` returns what it should have found, from the reference. `largest` is
    the magnitude of the logits it is held to, and `adapt` leaves the rows of a case that it is held to.
    """

    name: str
    run: Callable[[Case, str], Found]
    expect: Callable[[Case, str], Expected]
    impls: tuple[str, ...] = ("torch",)
    fits: Callable[[Case], bool] = lambda case: True
    largest: float = 1e30
    adapt: Callable[[Case], Case] = lambda case: case


def implementations() -> tuple[str, ...]:
    """The implementations that this machine has."""
    found = ["torch"]
    if not _native.unavailable(CPU):
        found.append("native")
    if not _triton.unavailable(DEVICE):
        found.append("triton")
    return tuple(found)


def device_of(impl: str) -> torch.device:
    """The device on which an implementation is tried."""
    return CPU if impl == "native" else DEVICE


def takes(op: Op, case: Case, impl: str) -> bool:
    """Whether an implementation of a function takes a case."""
    dtype = case.logits.dtype
    if impl not in op.impls or not op.fits(case):
        return False
    return impl != "triton" or dtype != torch.float64


def failures(op: Op, case: Case, impl: str) -> Iterator[tuple[int, str]]:
    """Yield each row that is wrong, with what is wrong in words."""
    found, expected = op.run(case, impl), op.expect(case, impl)
    rows = len(case.logits)
    for name, (value, tolerance) in expected.items():
        got = found[name].detach().double().cpu().numpy().reshape(value.shape)
        with np.errstate(all="ignore"):
            limit = torch.finfo(case.logits.dtype).max
            same = (np.isnan(got) & np.isnan(value)) | (got == value) | (np.abs(got - value) <= tolerance)
            same |= (np.abs(value) >= limit / 4) & (np.sign(got) == np.sign(value)) & (np.abs(got) >= limit / 8)
            same |= tolerance == np.inf
        for row in np.flatnonzero(~same.reshape(rows, -1).all(-1)) if rows else ():
            place = np.flatnonzero(~same.reshape(rows, -1)[row])[0]
            numbers = [float(a.reshape(rows, -1)[row][place]) for a in (got, value, tolerance)]
            yield int(row), f"{name}[{place}] is {numbers[0]!r}, not {numbers[1]!r} within {numbers[2]:.1e}"


class Accuracy(NamedTuple):
    """Rounding of the arithmetic and of the output, and what is too small to be seen."""

    eps: float
    out: float
    tiny: float

    @classmethod
    def of(cls, case: Case) -> Accuracy:
        work, dtype = case.work, case.logits.dtype
        half = dtype in (torch.float16, torch.bfloat16)
        tiny = float(torch.finfo(dtype).tiny) if dtype == torch.float16 else 1e-305 if work == torch.float64 else 1e-37
        return cls(torch.finfo(work).eps, torch.finfo(dtype).eps if half else 0.0, tiny)

    def flushed(self, k: np.ndarray) -> np.ndarray:
        """What may be taken for 0 next to a sum of k."""
        return self.tiny + np.minimum(1e-12 * np.abs(np.nan_to_num(k)), 1e-255 if self.eps < 1e-12 else 1e-32)[:, None]


def sums(case: Case, a: Accuracy, y: np.ndarray, k: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The sum of a row is k: to 1e-6, or 1e-13, of the larger of k and 1, and to 1e-5 of a k below 1."""
    if a.out or y.shape[-1] == 0:
        return {}
    good = 8.4 * a.eps if a.eps > 1e-12 else 460 * a.eps
    tolerance = np.where(k < 1, 12 * good * np.abs(k), good * np.maximum(np.abs(k), 1)) + y.shape[-1] * a.tiny
    return {"sum": (np.where(np.isnan(y).any(-1), np.nan, k), tolerance)}


def upstream(case: Case) -> Tensor:
    """Return a gradient of the shape of the logits: smooth, so that a shrunk case has a part of it."""
    rows, n = case.logits.shape
    return torch.cos(torch.arange(n, dtype=torch.float64) * 1.7).expand(rows, n)


def graded(
    case: Case, solution: reference.Solution, value: np.ndarray, wrong: np.ndarray, off: np.ndarray, p: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """A gradient of the logits: nan in a row without a solution; not held to where rounding decides the weights."""
    a = Accuracy.of(case)
    bad = np.isnan(solution.points).all(-1, keepdims=True) & (case.logits.shape[-1] > 0)
    value = np.where(bad, np.nan, value / case.temperature)
    unclear = ((off > 0.05) & (p > 1e-12)).any(-1, keepdims=True)
    room = np.where(unclear & ~bad, np.inf, 1.0)
    # Of a weight h / sum h that much may underflow, where the sum is small.
    lost = 1e-9 * a.eps * np.abs(np.where(p > 0, value, 0)).sum(-1, keepdims=True) * case.temperature
    flushed = 1e-255 if a.eps < 1e-12 else 1e-32
    return value, np.where(room == np.inf, np.inf, (wrong + np.nan_to_num(lost) + flushed) / case.temperature + a.tiny)
