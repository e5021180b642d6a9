"""Why this label: how much each word or feature of a row speaks for or against a label.

What a feature adds to a label's logit is its value times the gradient of the logit. A linear model is the sum of these
numbers and its bias, exactly. For a network they are its first-order share (gradient x input).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lastlayer.train.batches import rows_to_input
from lastlayer.train.features import FeatureMap
from lastlayer.train.network import LabelSetNetwork
from lastlayer.train.serve import TrainedModel


class Reason(NamedTuple):
    """What speaks for a label and against it: features with what each adds to the logit, the strongest first."""

    label: str
    speaks_for: list[tuple[str, float]]
    against: list[tuple[str, float]]


def explain(model: TrainedModel, x: Any, labels: Sequence[Sequence[str]], *, most: int = 5) -> list[list[Reason]]:
    """Return the features that speak most for and against labels of rows.

    Args:
        model: A model that was loaded from a run.
        x: Features of the rows, as ``model.matrix(rows)`` returns them.
        labels: The labels of each row to explain.
        most: The largest number of features for a label, and against it.

    Returns:
        For each row, a :class:`Reason` per label.
    """
    return list(_each(model, x, labels, most))


def contributions(network: LabelSetNetwork, x: Any, index: Tensor) -> Tensor:
    """Return what each feature adds to the logits of labels.

    Args:
        network: The network.
        x: Rows of features, an array or CSR matrix.
        index: The labels of each row, ``(rows, m)``.

    Returns:
        Shape ``(rows, m, n_features)``.

    Example:
        >>> import torch
        >>> from lastlayer.train.explain import contributions
        >>> from lastlayer.train import LabelSetNetwork
        >>> network = LabelSetNetwork(2, 2)
        >>> _ = torch.nn.init.eye_(network.first.weight)
        >>> contributions(network, torch.tensor([[3.0, -1.0]]).numpy(), torch.tensor([[1]]))
        tensor([[[ 0., -1.]]])
    """
    out = torch.zeros(*index.shape, network.n_features)
    for i in range(x.shape[0]):
        contribution, held = _row(network, x[i : i + 1], index[i])
        out[i][:, torch.from_numpy(held)] = contribution
    return out


def strongest(model: TrainedModel, label: int, most: int = 10) -> Reason | None:
    """Return the features with the largest weights of a label, positive and negative; None unless it is linear."""
    network = network_of(model)
    if len(network.rest):
        return None
    weight = network.first.weight
    assert isinstance(weight, Tensor)
    values = (weight[:, label] if network.sparse else weight[label]).detach().float().cpu()
    kept = values.abs().topk(min(4 * most, len(values))).indices.sort().values
    return _reason(model.labels[label], kept.numpy(), values[kept], FeatureNames(model.features), most)


def network_of(model: TrainedModel) -> LabelSetNetwork:
    """Return the network of a model, or raise an error that says which models can be explained."""
    network = getattr(model.scorer, "network", None)
    if not isinstance(network, LabelSetNetwork) or network.shard is not None or network.encoder is not None:
        raise ValueError("explain: `model` must be linear or a network, on one device. Leave out --explain.")
    return network


class FeatureNames:
    """The names of features: words of a vocabulary, else their numbers from 0."""

    def __init__(self, features: FeatureMap) -> None:
        self.words = features.state.get("vocabulary")
        self.kind = "bucket" if features.kind == "hashing" else "feature"

    def __getitem__(self, place: int) -> str:
        return str(self.words[place]) if self.words else f"{self.kind} {place}"


def _row(network: LabelSetNetwork, x: Any, index: Tensor) -> tuple[Tensor, np.ndarray]:
    """Return what the features of one row that are not 0 add to the logits of labels, ``(m, features)``; and which."""
    dense = isinstance(x, np.ndarray)
    held = np.flatnonzero(x[0]) if dense else x.indices
    value = torch.from_numpy(np.asarray(x[0][held] if dense else x.data, dtype=np.float32))
    weight = network.first.weight
    assert isinstance(weight, Tensor)
    device, at = weight.device, torch.from_numpy(held.astype(np.int64)).to(weight.device)
    own = weight[at] if network.sparse else weight[:, at].T  # (features, width of the first layer)
    if not len(network.rest):
        contribution = own[:, index.to(device)].T.detach()
    else:
        contribution = _gradient(network, x, index.to(device)) @ own.detach().T
    return (contribution * value.to(device)).float().cpu(), held


def _gradient(network: LabelSetNetwork, x: Any, index: Tensor) -> Tensor:
    """Return the gradient of the logits of labels by the sums of the first layer, ``(m, width)``, for one row."""
    rows: Any = rows_to_input(x, np.arange(1))
    device = network.bias.device
    rows = tuple(part.to(device) for part in rows) if isinstance(rows, tuple) else rows.to(device)
    network.eval()
    with torch.no_grad():
        first = network.first(rows[0], rows[1], per_sample_weights=rows[2]) if isinstance(rows, tuple) else None
        first = network.first(rows) if first is None else first
    with torch.enable_grad():
        start = first.expand(len(index), -1).clone().requires_grad_()
        hidden = start + network.bias
        for layer in network.rest:
            hidden = layer(hidden.relu())
        picked = hidden.gather(1, index[:, None]).sum()
    gradient: Tensor = torch.autograd.grad(picked, start)[0]
    return gradient


def _reason(label: str, held: np.ndarray, values: Tensor, names: FeatureNames, most: int) -> Reason:
    order = values.argsort(descending=True, stable=True).tolist()
    speaks_for = [(names[int(held[i])], float(values[i])) for i in order[:most] if values[i] > 0]
    against = [(names[int(held[i])], float(values[i])) for i in order[::-1][:most] if values[i] < 0]
    return Reason(label, speaks_for, against)


def explained(
    model: TrainedModel, x: Any, pairs: Iterable[list[tuple[str, float]]], most: int
) -> Iterator[tuple[list[tuple[str, float]], list[Reason]]]:
    """Yield the predicted labels of each row with their reasons."""
    rows = list(pairs)
    yield from zip(rows, _each(model, x, ([name for name, _ in row] for row in rows), most), strict=True)


def _each(model: TrainedModel, x: Any, labels: Iterable[Sequence[str]], most: int) -> Iterator[list[Reason]]:
    """Yield the reasons for the labels of each row."""
    network, names, place = network_of(model), FeatureNames(model.features), {n: i for i, n in enumerate(model.labels)}
    for i, row in enumerate(labels):
        if unknown := [name for name in row if name not in place]:
            raise ValueError(f"explain: `labels` must be labels of the model, got {unknown[0]!r}.")
        values, held = _row(network, x[i : i + 1], torch.tensor([place[name] for name in row], dtype=torch.int64))
        yield [_reason(label, held, one, names, most) for label, one in zip(row, values, strict=True)]


FILE = "reasons.json"
ROWS, PER_ROW, WORDS, LABELS = 200, 8, 4, 500  # what is stored: rows, labels of each, features of each, labels


def reasons(model: TrainedModel, x: Any, predictions: dict[str, Tensor], counts: Sequence[int]) -> dict[str, Any]:
    """Return why the first held-out rows get their labels, and what speaks for and against the most frequent labels.

    Args:
        model: A linear model or a network.
        x: The features of the held-out rows.
        predictions: The tensors of ``predictions.safetensors``.
        counts: In how many training rows each label occurs.

    Returns:
        ``{"exact", "rows": {row: {label: [for, against]}}, "labels": {label: [for, against]}}`` with labels by number
        and pairs of a feature and what it adds to the logit; empty for kinds of models that cannot be explained. For a
        linear model the features of a label are those with the largest weights; for a network, those that add most in
        the mean over the stored rows.
    """
    try:
        network = network_of(model)
    except ValueError:
        return {}
    names, rows, found = FeatureNames(model.features), {}, {}
    sums: dict[int, dict[int, float]] = {}
    for row in range(min(x.shape[0], ROWS)):
        both = [_own(predictions, name, row) for name in ("set", "target")]
        chosen = list(dict.fromkeys([*both[0][:PER_ROW], *both[1][:PER_ROW]]))
        if not chosen:
            continue
        values, held = _row(network, x[row : row + 1], torch.tensor(chosen))
        rows[row] = {c: _pairs(held, v, names) for c, v in zip(chosen, values, strict=True)}
        for c, v in zip(chosen, values.tolist() if len(network.rest) else (), strict=False):
            own = sums.setdefault(c, {})
            for place, value in zip(held.tolist(), v, strict=True):
                own[place] = own.get(place, 0.0) + value
    for c in sorted(range(len(counts)), key=lambda c: (-counts[c], c))[:LABELS]:
        if not len(network.rest):
            reason = strongest(model, c, 2 * WORDS)
            assert reason is not None
            found[c] = [_rounded(reason.speaks_for), _rounded(reason.against)]
        elif c in sums:
            places = np.array(list(sums[c]))
            found[c] = _pairs(places, torch.tensor(list(sums[c].values())) / len(rows), names, 2 * WORDS)
    return {"exact": not len(network.rest), "rows": rows, "labels": found}


def _own(predictions: dict[str, Tensor], name: str, row: int) -> list[int]:
    if f"{name}_indptr" not in predictions:
        return []
    start, end = predictions[f"{name}_indptr"][row : row + 2].tolist()
    return [int(c) for c in predictions[f"{name}_index"][start:end].tolist()]


def _pairs(held: np.ndarray, values: Tensor, names: FeatureNames, most: int = WORDS) -> list[list[list[Any]]]:
    reason = _reason("", held, values, names, most)
    return [_rounded(reason.speaks_for), _rounded(reason.against)]


def _rounded(features: list[tuple[str, float]]) -> list[list[Any]]:
    return [[name, float(f"{value:.3g}")] for name, value in features]
