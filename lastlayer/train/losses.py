"""The losses that can train a model: one table with what the trainer must know about each."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Loss:
    """What the trainer must know about a loss.

    Args:
        module: The module below ``lastlayer.loss`` that defines ``<name>_loss``; empty if only the exact solver has it.
        k: Whether the loss takes the expected number of labels: not at all, as a real or as a whole number.
        probability: How logits become probabilities after training. ``"sigmoid"`` if the sigmoid of a logit estimates
            the probability of its label; ``"lml"`` if the loss only orders the labels of a row.
        options: The options that a user may set, with their defaults.
        observed: Whether the loss takes ``observed``, the share of true labels that were recorded.
        scale_falls: Whether the gradient shrinks as the number of labels grows, so that one learning rate of SGD
            cannot serve all problems.
        exact: Whether the exact solver of linear models minimises it: not, also, or only that solver.
    """

    module: str
    k: Literal["none", "real", "whole"] = "none"
    probability: Literal["sigmoid", "lml"] = "lml"
    options: dict[str, float | bool | str] = field(default_factory=dict)
    observed: bool = False
    scale_falls: bool = False
    exact: Literal["", "also", "only"] = ""


_RENAMED = {("rml", "class_weight"): "unary_weight"}  # options of 0.1; the loss takes both
_SMOOTHING: dict[str, float | bool | str] = {"label_smoothing": 0.0}

LOSSES = {
    "assume_negative": Loss(
        "incomplete", probability="sigmoid", options={"label_smoothing": 0.0, "negative_weight": 1.0}
    ),
    "asymmetric": Loss(
        "multilabel",
        probability="sigmoid",
        options={"gamma_positive": 1.0, "gamma_negative": 4.0, "clip": 0.05, "detach_weight": False},
    ),
    "binary": Loss("multilabel", probability="sigmoid", options=_SMOOTHING, exact="also"),
    "entropy_max": Loss("incomplete", probability="sigmoid", options={"alpha": 0.1, "beta": 0.02}),
    "expected_positive": Loss("incomplete", k="real", probability="sigmoid", scale_falls=True),
    "hill": Loss("incomplete", probability="sigmoid", options={"lamb": 1.5, "margin": 1.0, "gamma": 2.0}),
    "large": Loss("relabel", probability="sigmoid", options={"mode": "reject", "rate": 0.002, "epoch": 1}),
    "lml": Loss("lml", k="real", options={"temperature": 1.0, "impl": "auto"}, observed=True),
    "lml_fenchel_young": Loss("lml"),
    "multihot_softmax": Loss("multilabel", options=_SMOOTHING),
    "quasibinary": Loss("quasibinary", scale_falls=True),
    "rml": Loss("ranking", options={"exact": True, "unary_weight": 5.0, "ramp_start": -0.8, "beta": 0.9}),
    "smooth_topk_svm": Loss("topk", k="whole", options={"tau": 1.0, "alpha": 1.0}, scale_falls=True),
    "splc": Loss(
        "relabel",
        probability="sigmoid",
        options={"threshold": 0.6, "margin": 1.0, "gamma": 2.0, "epoch": 1, "change_epoch": 1},
    ),
    "squared_hinge": Loss("", probability="sigmoid", exact="only"),
    "truncated_entropy": Loss("topk", k="whole"),
    "two_way": Loss(
        "multilabel",
        options={"positive_temperature": 4.0, "negative_temperature": 1.0, "margin": 0.0, "per": "both"},
    ),
    "warp": Loss("ranking", options={"exact": True}),
}


def takes_shard(name: str) -> bool:
    """Whether the classes can be split over processes."""
    facts = _facts(name)
    return name == "auto" or (facts is not None and facts.shard)


def compares_rows(name: str) -> bool:
    """Whether the loss of a row depends on the other rows of its batch."""
    facts = _facts(name)
    return facts is not None and not facts.by_row


def over_every_row(name: str) -> bool:
    """Whether the mean is over all rows, and not only over those with a label. Lists leave no class unknown."""
    facts = _facts(name)
    return facts is None or facts.mean in ("known", "all")


def _facts(name: str) -> Any:
    """Return the loss's line of the table of losses, None if only the exact solver has it."""
    from lastlayer.loss._table import LOSSES as FACTS  # here: the options of a command need no torch

    return FACTS.get(f"{name}_loss")


def loss_function(name: str) -> Any:
    """Return the function of a loss."""
    return getattr(importlib.import_module(f"lastlayer.loss.{LOSSES[name].module}"), f"{name}_loss")


def problem_with(name: str, options: dict[str, Any]) -> str | None:
    """Return what is wrong with a loss and its options, as one line, or None."""
    if name == "auto":
        return "`loss_options` must be left out with the loss auto. Name the loss they are for." if options else None
    if name not in LOSSES:
        return f"`loss` must be one of auto, {', '.join(LOSSES)}, got {name!r}."
    allowed = LOSSES[name].options
    for option, value in options.items():
        option = _RENAMED.get((name, option), option)
        if option not in allowed:
            return f"`loss_options` of {name} must be among {', '.join(allowed) or 'none'}, got {option!r}."
        kind: Any = type(allowed[option])
        kind = kind if kind in (bool, str) else (int, float)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            word = {bool: "true or false", str: "a word"}.get(kind, "a number")
            return f"`loss_options`: {option} must be {word}, got {value!r}."
        if option == "temperature" and not 0 < value < float("inf"):
            return f"`loss_options`: temperature must be positive, got {value!r}."
    return None
