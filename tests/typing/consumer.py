"""What a user writes, for type checkers: `test_typing.py` runs mypy and pyright on this file."""

# mypy: warn-unused-ignores

from pathlib import Path

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import lastlayer as ll
from lastlayer import loss, metrics
from lastlayer.decode import Decoded
from lastlayer.loss import HillLoss, hill_loss


class Model(nn.Module):
    """A network whose last layer predicts label sets."""

    def __init__(self, in_features: int, n_classes: int, k: float) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, n_classes)
        self.project = ll.LML(k)
        self.loss = ll.LMLLoss(k, observed=0.5, pos_weight=2.0)

    def forward(self, features: Tensor) -> Tensor:
        """Return probabilities."""
        return self.project.forward(self.linear(features))

    def step(self, features: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        """Return the loss of a batch."""
        return self.loss.forward(self.linear(features), target, sample_weight=weight)


def projections(logits: Tensor) -> None:
    """Projections return tensors."""
    assert_type(ll.lml(logits, 3), Tensor)
    assert_type(ll.lml(logits, torch.tensor([1.0, 2.5]), temperature=0.5), Tensor)
    assert_type(ll.lml_threshold(logits, k=2), Tensor)
    assert_type(ll.capped_sparsemax(logits, 2), Tensor)


def losses(logits: Tensor, target: Tensor) -> None:
    """Losses take targets in three forms, and return tensors."""
    assert_type(ll.lml_loss(logits, target, 2, reduction="none"), Tensor)
    assert_type(ll.lml_loss(logits, ll.label_lists(target), 2), Tensor)
    assert_type(hill_loss(logits, target, weight=torch.ones(5)), Tensor)
    assert_type(HillLoss(gamma=1.0).forward(logits, target), Tensor)
    assert_type(loss.rml_loss(logits, target, unary_weight=1.0), Tensor)


def decoders(scores: Tensor, target: Tensor) -> None:
    """Decoders return index lists and scores."""
    assert_type(ll.decode_top_k(scores, 3), Decoded)
    assert_type(ll.decode_top_k(scores).index, Tensor)
    threshold = ll.tune_thresholds(scores, target, per="all")
    assert_type(ll.decode_threshold(scores, threshold, at_most=5).score, Tensor)


def measures(scores: Tensor, target: Tensor) -> None:
    """Metrics return tensors; their streaming forms are objects with a state."""
    assert_type(ll.precision_at_k(scores, target, 5), Tensor)
    assert_type(metrics.mean_average_precision(scores, target, per="sample"), Tensor)


def served(run: Path) -> None:
    """A run is loaded with its labels."""
    model = ll.load(run)
    model.predict(["a text"])


def mistakes(logits: Tensor, target: Tensor) -> None:
    """A checker must find these: an ignore that is not needed is an error."""
    ll.lml_loss(logits, target, 2, reduction="average")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ll.lml(logits)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    ll.BinaryLoss(weights=torch.ones(5))  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
