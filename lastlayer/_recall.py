"""The highest threshold whose calibrated recall keeps a promise: exactly from all scores, or from a histogram of them.

The loss of a row at a threshold is the share of its labels that score no higher. The sum of the losses of all rows is
therefore a sum over labels: a label weighs one over the number of labels of its row, and is lost from its score on.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lastlayer import _check, shard
from lastlayer._check import Target

BITS = 20  # of a float32 in the histogram: sign, exponent and 11 bits of the mantissa


class LabelScores(NamedTuple):
    """The scores of all labels, -inf where a label can never be chosen; their weights; how many rows have labels."""

    score: Tensor
    weight: Tensor
    rows: Tensor


def label_scores(op: str, scores: Tensor, target: Target) -> LabelScores:
    """Check the inputs and collect the scores of the labels; index lists are never made dense."""
    scores = _check.logits(op, scores, "scores").detach()
    labels = _check.target(op, target, scores)
    n = scores.shape[-1]
    if labels.index is None:
        there, held = labels.positive(), scores
    else:
        there = labels.index >= 0
        held = scores.gather(-1, labels.index.clamp(min=0)) if n else there.to(scores.dtype)
    count = there.sum(-1, keepdim=True)
    weight = (1 / count.double()).expand(there.shape)[there]
    score = held[there].to(_check.work_dtype(scores))
    return LabelScores(torch.where(score.isnan(), -torch.inf, score), weight, (count > 0).sum())


def allowed(op: str, recall: float, rows: int) -> float:
    """How much weight of labels may be lost: the largest sum of losses R with (R + 1) / (rows + 1) <= 1 - recall."""
    spare = (1 - recall) * (rows + 1) - 1
    if spare < -1e-9:
        least = math.ceil(recall / (1 - recall) - 1e-9)
        raise ValueError(
            f"{op}: `target` must have at least {least} rows with labels to promise a recall of {recall}, got {rows}. "
            "Use more held-out rows, or promise less."
        )
    return spare + 1e-9 * (rows + 1)


def never(op: str, recall: float, share: float) -> ValueError:
    """The error where labels that can never be chosen break the promise already."""
    return ValueError(
        f"{op}: `scores` must let a recall of {recall} be reached, got labels with a score of -inf or nan that are "
        f"{share:.1%} of each row's labels on average. Promise less, or score these classes."
    )


def highest(op: str, labels: LabelScores, recall: float) -> Tensor:
    """The highest threshold that keeps the promise, from the scores of all labels."""
    rows = int(labels.rows)
    spare = allowed(op, recall, rows)
    score, order = labels.score.sort()
    lost = labels.weight[order].cumsum(0)
    first = int((lost > spare).to(torch.uint8).argmax())  # the label that may not be lost; all of them weigh `rows`
    if score[first] == -torch.inf:
        raise never(op, recall, float(labels.weight[labels.score == -torch.inf].sum()) / rows)
    return torch.nextafter(score[first], score.new_full((), -torch.inf))


def histogram(labels: LabelScores) -> Tensor:
    """The weight of the labels in each of ``2 ** BITS`` bins; the bins are ranges of float32, lowest first."""
    weight = labels.weight
    bins = torch.zeros(1 << BITS, dtype=weight.dtype, device=weight.device)
    return bins.index_add_(0, _bin(labels.score.float()), weight)


def highest_binned(op: str, weight: Tensor, rows: int, recall: float) -> Tensor:
    """The highest threshold between two bins that keeps the promise."""
    spare = allowed(op, recall, rows)
    first = int((weight.cumsum(0) > spare).to(torch.uint8).argmax())
    if first == int(_bin(torch.tensor([-torch.inf]))):
        raise never(op, recall, float(weight[first]) / rows)
    last = ((first - (1 << (BITS - 1))) << (32 - BITS)) - 1  # the last number of the bin before
    value = shard._values(torch.tensor(last, dtype=torch.int32, device=weight.device), torch.float32)
    return torch.where(value == 0, -torch.finfo(torch.float32).tiny, value)  # -0.0 is not below 0.0


def _bin(x: Tensor) -> Tensor:
    return (shard._keys(x).long() >> (32 - BITS)) + (1 << (BITS - 1))


def check(op: str, recall: Any) -> float:
    """Check a recall that can be promised."""
    recall = _check.number(op, "recall", recall)
    if not 0 < recall < 1:
        raise ValueError(f"{op}: `recall` must be above 0 and below 1, got {recall}. Only all classes promise 1.")
    return float(recall)
