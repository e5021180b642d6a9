"""Facts about the losses, written once: the tests check them, and the documentation shows them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True)
class Facts:
    """What a caller must know about a loss.

    Args:
        module: The module below ``lastlayer.loss`` that defines it.
        inputs: The tensors of a call, in order.
        k: Whether it takes the size of the label set: not at all, as a real number per row, or as one whole number.
        soft: Whether a target between 0 and 1 weighs the terms; if not, a number above 0 is a whole label.
        shard: Whether it takes classes that are split over processes.
        weight: Whether it takes weights of classes.
        pos_weight: Whether it takes weights of classes for the terms of labels.
        sample_weight: Whether it takes weights of rows.
        mean: The rows that the mean is over: those with a label, those with a label or, if `observed` is given, a known
            class, those with a label and a class that is none, those with a known class, those with a class that is not
            ruled out, or all.
        by_row: Whether the loss of a row does not depend on the other rows.
        apart: In what it differs from ``loss(logits, target, [k], *, reduction)``, and why; empty if it does not.
    """

    module: str
    inputs: tuple[str, ...] = ("logits", "target")
    k: Literal["none", "real", "whole"] = "none"
    soft: bool = True
    shard: bool = True
    weight: bool = False
    pos_weight: bool = False
    sample_weight: bool = True
    mean: Literal["label", "observed", "pair", "known", "open", "all"] = "known"
    by_row: bool = True
    apart: str = ""

    @property
    def lists(self) -> bool:
        """Whether it takes labels, and so index lists."""
        return "target" in self.inputs and self.module != "sphere"


LOSSES = {
    "lml_loss": Facts("lml", k="real", weight=True, pos_weight=True, mean="observed"),
    "lml_fenchel_young_loss": Facts("lml", k="real", mean="all"),
    "linear_lml_loss": Facts(
        "linear",
        inputs=("features", "weight", "target"),
        k="real",
        soft=False,
        mean="observed",
        apart="takes the features and the weight of the last layer, since it never holds the logits",
    ),
    "truncated_entropy_loss": Facts("topk", k="whole", weight=True, mean="label"),
    "smooth_topk_svm_loss": Facts("topk", k="whole", soft=False, shard=False, weight=True, mean="label"),
    "topk_distillation_loss": Facts(
        "topk",
        inputs=("logits", "teacher_logits"),
        k="whole",
        mean="all",
        apart="takes the teacher's logits in place of a target",
    ),
    "two_way_loss": Facts("multilabel", mean="label", by_row=False),
    "asymmetric_loss": Facts("multilabel", weight=True, pos_weight=True),
    "multihot_softmax_loss": Facts("multilabel", weight=True, mean="label"),
    "binary_loss": Facts("multilabel", weight=True, pos_weight=True),
    "warp_loss": Facts("ranking", shard=False, weight=True, mean="pair"),
    "rml_loss": Facts("ranking", shard=False),
    "quasibinary_loss": Facts("quasibinary", mean="all", by_row=False),
    "metric_surrogate_loss": Facts(
        "surrogate",
        soft=False,
        shard=False,
        sample_weight=False,
        mean="label",
        by_row=False,
        apart="takes the metric, and has no `reduction`: the metric of a batch is one number",
    ),
    "assume_negative_loss": Facts("incomplete", weight=True, pos_weight=True),
    "expected_positive_loss": Facts("incomplete", k="real", weight=True, by_row=False),
    "role_loss": Facts(
        "incomplete",
        inputs=("logits", "target", "estimates"),
        k="real",
        by_row=False,
        apart="takes label estimates between the target and `k`: they are trained along with the model",
    ),
    "entropy_max_loss": Facts("incomplete", weight=True, pos_weight=True),
    "hill_loss": Facts("incomplete", weight=True, pos_weight=True),
    "splc_loss": Facts("relabel", weight=True, pos_weight=True),
    "large_loss": Facts("relabel", weight=True, pos_weight=True, by_row=False),
    "outlier_uniform_loss": Facts(
        "openset", inputs=("logits",), mean="open", apart="takes no target: its rows are known to have no label"
    ),
    "outlier_max_confidence_loss": Facts(
        "openset", inputs=("logits",), mean="open", apart="takes no target: its rows are known to have no label"
    ),
    "reciprocal_point_loss": Facts(
        "reciprocal",
        inputs=("features", "points", "radius", "target"),
        soft=False,
        shard=False,
        mean="label",
        apart="takes features and the parameters of its head; `ReciprocalPointHead.loss` has the usual form",
    ),
    "spherical_loss": Facts(
        "sphere",
        inputs=("magnitude_logits", "sign_logits", "target"),
        soft=False,
        shard=False,
        mean="label",
        apart="takes two kinds of logits, and points for a target; `SphericalHead.loss` has the usual form",
    ),
}


def loss_function(name: str) -> Callable[..., Tensor]:
    """Return the function of a loss."""
    function: Callable[..., Tensor] = getattr(importlib.import_module(f"lastlayer.loss.{LOSSES[name].module}"), name)
    return function


def markdown() -> str:
    """Return the table as Markdown, for the documentation."""
    heads = ("Loss", "`k`", "soft labels", "`weight`", "`pos_weight`", "`sample_weight`", "`shard`", "mean over")
    lines = ["| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
    over = {
        "label": "rows with a label",
        "observed": "rows with a label; with `observed` rows with a known class",
        "pair": "rows with a label and a class that is none",
        "known": "rows with a known class",
        "open": "rows with a class that is not ruled out",
        "all": "all rows",
    }
    for name, facts in LOSSES.items():
        flags = (facts.soft and facts.lists, facts.weight, facts.pos_weight, facts.sample_weight, facts.shard)
        size = {"none": "", "real": "a number, or one per row", "whole": "a whole number"}[facts.k]
        cells = (f"`{name}`", size, *("yes" if flag else "" for flag in flags), over[facts.mean])
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def exceptions() -> str:
    """Return the losses that differ from the common signature as a Markdown list."""
    return "".join(f"- `{name}` {facts.apart}.\n" for name, facts in LOSSES.items() if facts.apart)
