"""Losses as one operator for the compiler: see `_threshold/whole.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec

import torch
from torch import Tensor

from lastlayer._threshold.dispatch import whole
from lastlayer._threshold.whole import Call, Shape, compiling, packed, run
from lastlayer.loss import _rows

P = ParamSpec("P")


def whole_loss(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Let the compiler see a loss of logits on the CPU as one operator, unless it draws random numbers."""
    return whole(function, _of_logits)


def _of_logits(name: str, given: dict[str, Any]) -> Tensor | None:
    if given.get("impl", "auto") != "auto" or not given.get("exact", True) or not compiling():
        return None
    call = packed(given)
    if call is None or call.tensors[0].dtype == torch.float64:
        return None
    # In float32, so that the upstream gradient meets the whole one, and not what half precision has left of it.
    logits, *others = call.tensors
    call = Call(call.form, [logits.float(), *others], call.numbers)
    reduced = given.get("reduction", "mean") != "none"
    each: Shape = "classes" if given.get("per") == "class" else "rows"
    loss = run(name, call, "number" if reduced else each, ahead=reduced)
    return _rows.leave(name, loss, "none", None, logits.dtype)


def whole_linear_loss(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Let the compiler see a loss of features as one operator, on any device: it looks at values on its way."""
    return whole(function, _of_features)


def _of_features(name: str, given: dict[str, Any]) -> Tensor | None:
    if "negatives" in given or not compiling(anywhere=True):
        return None
    call = packed(given, anywhere=True)
    if call is None:
        return None
    reduced = given.get("reduction", "mean") != "none"
    # In float16 the upstream gradient keeps that of the weight from underflow, and has to be known.
    ahead = reduced and call.tensors[0].dtype != torch.float16
    return run(name, call, "number" if reduced else "rows", ahead=ahead)
