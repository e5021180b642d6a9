"""An encoder with a model of the labels on top, as one network for the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lastlayer.train.config import Config
from lastlayer.train.encode.encoder import Encoder, by_depth
from lastlayer.train.network import LabelSetNetwork


class EncodedNetwork(LabelSetNetwork):
    """Map the rows of an encoder to logits.

    Args:
        encoder: The encoder.
        n_labels: The number of labels.
        hidden: The widths of the hidden layers between the features and the labels.
        dropout: The dropout of the features and after each hidden layer.
    """

    encoder: Encoder  # type: ignore[assignment]

    def __init__(self, encoder: Encoder, n_labels: int, *, hidden: Sequence[int] = (), dropout: float = 0.0) -> None:
        super().__init__(encoder.width, n_labels, hidden=hidden, dropout=dropout)
        self.encoder = encoder

    def before_output(self, rows: Any) -> Tensor:
        """Return the input of the output layer; without hidden layers, the logits."""
        return super().before_output(self.dropout(self.encoder(rows)))

    def from_features(self, features: Tensor) -> Tensor:
        """Return the logits of rows that the encoder has turned into features."""
        x = super().before_output(features)
        return self.rest[-1](x) if len(self.rest) else x

    def head_weights(self) -> dict[str, Tensor]:
        """Return the weights on top of the encoder."""
        return {name: value for name, value in self.state_dict().items() if not name.startswith("encoder.")}

    def parameter_groups(self, config: Config) -> list[dict[str, Any]]:
        """Return the groups of the optimiser.

        The last block of the encoder has the rate of the run, each block below it `layer_decay` times the rate of the
        block above, and what is on top of the encoder `head_rate` times the rate of the run. Biases and norms have no
        weight decay.
        """
        rate, groups = float(config.lr), []
        for height, block in enumerate(reversed(by_depth(self.encoder))):
            groups += _groups([p for _, p in block], rate * config.layer_decay**height)
        head = [p for name, p in self.named_parameters() if not name.startswith("encoder.")]
        return [*groups, *_groups(head, rate * config.head_rate)]


def _groups(parameters: list[Any], rate: float) -> list[dict[str, Any]]:
    matrices, vectors = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim <= 1]
    found = [{"params": matrices, "lr": rate}, {"params": vectors, "lr": rate, "weight_decay": 0.0}]
    return [group for group in found if group["params"]]
