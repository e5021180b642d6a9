"""Recall of relations, as the scene-graph evaluator of Neural Motifs (Zellers et al., 2018) counts it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lastlayer import _check
from lastlayer.metrics import _ranking, _sums
from lastlayer.metrics._sums import Empty, RowSums

_NEVER = 1 << 40  # the rank of what is not found


def graph_recall_at_k(
    index: Tensor,
    target: Tensor,
    k: int | Sequence[int],
    *,
    boxes: Tensor | None = None,
    labels: Tensor | None = None,
    target_boxes: Tensor | None = None,
    target_labels: Tensor | None = None,
    iou: float = 0.5,
    empty: Empty = "skip",
) -> Tensor:
    r"""Compute the share of an image's relations found among the first `k` predicted, averaged over images.

    A prediction finds a true relation if the classes of subject and object and the predicate are the same, and both
    boxes overlap the true ones with an IoU of at least 0.5, in pixels counted inclusively:
    ``(x2 - x1 + 1) * (y2 - y1 + 1)`` is the area. It need not be the very same boxes. One prediction may find several
    relations, a true relation listed twice counts twice, and the mean is over images, not over relations.

    Without boxes and classes, relations are compared by the numbers of their subject and object.

    Args:
        index: Predicted relations (subject, object, predicate), best first, padded with -1: shape ``(..., m, 3)``,
            such as those of `decode_graph`. Subjects and objects are rows of `boxes` and `labels`.
        target: True relations, likewise, in any order: shape ``(..., g, 3)``. They are rows of `target_boxes`.
        k: One cut, or a list of them for several results.
        boxes: Boxes x1, y1, x2, y2 of all images, shape ``(n_boxes, 4)``.
        labels: Their classes, shape ``(n_boxes,)``.
        target_boxes: True boxes, if they are not `boxes` (as they are where boxes are given to the model).
        target_labels: Their classes, likewise.
        iou: The least overlap.
        empty: What an image without a relation counts as: ``"skip"`` (not at all), ``"zero"`` or ``"one"``.

    Returns:
        The recall, float64: shape ``()``, or ``(len(k),)`` for a list. Without an image that counts it is 0.

    Example:
        >>> boxes = torch.tensor([[0, 0, 9, 9], [20, 0, 29, 9]])
        >>> labels = torch.tensor([3, 5])
        >>> target = torch.tensor([[0, 1, 7], [0, 1, 7], [1, 0, 2]])
        >>> graph_recall_at_k(torch.tensor([[0, 1, 7]]), target, 20, boxes=boxes, labels=labels)
        tensor(0.6667, dtype=torch.float64)
    """
    op = "graph_recall_at_k"
    _check.choice(op, "empty", empty, ("skip", "zero", "one"))
    matches = find(op, index, target, k, boxes, labels, target_boxes, target_labels, iou)
    value = _sums.settle_rows(over_images(matches, matches.real), empty)
    return value if matches.several else value.squeeze(0)


def graph_mean_recall_at_k(
    index: Tensor,
    target: Tensor,
    k: int | Sequence[int],
    *,
    n_predicates: int,
    boxes: Tensor | None = None,
    labels: Tensor | None = None,
    target_boxes: Tensor | None = None,
    target_labels: Tensor | None = None,
    iou: float = 0.5,
    average: Literal["macro", "none"] = "macro",
    empty: Empty = "skip",
) -> Tensor:
    """Compute the recall of each predicate (over the images that have it), and average over predicates.

    Frequent predicates weigh no more than rare ones (Chen et al., 2019; Tang et al., 2019).

    Args:
        index: As in :func:`graph_recall_at_k`.
        target: As in :func:`graph_recall_at_k`.
        k: As in :func:`graph_recall_at_k`.
        n_predicates: The number of predicates, numbered from 0 (a background column counts, and has no relation).
        boxes: As in :func:`graph_recall_at_k`.
        labels: As in :func:`graph_recall_at_k`.
        target_boxes: As in :func:`graph_recall_at_k`.
        target_labels: As in :func:`graph_recall_at_k`.
        iou: As in :func:`graph_recall_at_k`.
        average: ``"macro"``, the mean over predicates, or ``"none"``, one value per predicate.
        empty: What a predicate without a true relation counts as: ``"skip"``, ``"zero"`` or ``"one"``. With
            ``average="none"`` a predicate that does not count is nan.

    Returns:
        The recall, float64: shape ``()`` or ``(len(k),)``, with a last dimension of predicates for ``"none"``.

    Example:
        >>> target = torch.tensor([[0, 1, 0], [1, 2, 0], [2, 0, 1]])
        >>> graph_mean_recall_at_k(torch.tensor([[0, 1, 0]]), target, 1, n_predicates=2)
        tensor(0.2500, dtype=torch.float64)
    """
    op = "graph_mean_recall_at_k"
    _check.choice(op, "average", average, ("macro", "none"))
    n_predicates = _check.plain(n_predicates)
    if isinstance(n_predicates, bool) or not isinstance(n_predicates, int) or n_predicates < 1:
        raise ValueError(f"{op}: `n_predicates` must be a positive integer, got {n_predicates!r}.")
    _check.choice(op, "empty", empty, ("skip", "zero", "one"))
    matches = find(op, index, target, k, boxes, labels, target_boxes, target_labels, iou)
    recall, images = over_predicates(matches, n_predicates)
    value = _sums.settle_groups(recall / images.clamp(min=1), images, average, empty)
    return value if matches.several else value.squeeze(0)


def graph_zero_shot_recall_at_k(
    index: Tensor,
    target: Tensor,
    k: int | Sequence[int],
    *,
    seen: Tensor,
    labels: Tensor,
    boxes: Tensor | None = None,
    target_boxes: Tensor | None = None,
    target_labels: Tensor | None = None,
    iou: float = 0.5,
    empty: Empty = "skip",
) -> Tensor:
    """Compute the recall of true relations whose combination of classes and predicate was never trained on.

    Args:
        index: As in :func:`graph_recall_at_k`.
        target: As in :func:`graph_recall_at_k`.
        k: As in :func:`graph_recall_at_k`.
        seen: Training combinations (class of the subject, class of the object, predicate), shape ``(n, 3)``.
        labels: The classes of the boxes, shape ``(n_boxes,)``.
        boxes: As in :func:`graph_recall_at_k`; without them subjects and objects are compared by number.
        target_boxes: As in :func:`graph_recall_at_k`.
        target_labels: As in :func:`graph_recall_at_k`.
        iou: As in :func:`graph_recall_at_k`.
        empty: What an image without such a relation counts as: ``"skip"``, ``"zero"`` or ``"one"``.

    Returns:
        The recall, float64, as in :func:`graph_recall_at_k`.

    Example:
        >>> labels, seen = torch.tensor([3, 5]), torch.tensor([[3, 5, 0]])
        >>> target = torch.tensor([[0, 1, 0], [1, 0, 0]])
        >>> graph_zero_shot_recall_at_k(torch.tensor([[1, 0, 0]]), target, 1, seen=seen, labels=labels)
        tensor(1., dtype=torch.float64)
    """
    op = "graph_zero_shot_recall_at_k"
    _check.choice(op, "empty", empty, ("skip", "zero", "one"))
    seen = triplets(op, "seen", seen)
    matches, new = find_new(op, index, target, k, seen, boxes, labels, target_boxes, target_labels, iou)
    value = _sums.settle_rows(over_images(matches, new), empty)
    return value if matches.several else value.squeeze(0)


def triplets(op: str, name: str, value: Any) -> Tensor:
    """Check combinations of classes and predicate, ``(n, 3)``."""
    value = _integers(op, name, value)
    if value.ndim != 2 or value.shape[-1] != 3:
        raise ValueError(f"{op}: `{name}` must have shape (n, 3), got {tuple(value.shape)}.")
    held: Tensor = value.long()
    return held


def find_new(
    op: str,
    index: Any,
    target: Tensor,
    k: int | Sequence[int],
    seen: Tensor,
    boxes: Tensor | None,
    labels: Tensor | None,
    target_boxes: Tensor | None,
    target_labels: Tensor | None,
    iou: float,
) -> tuple[Matches, Tensor]:
    """Match predictions with true relations, and mark the true ones whose combination is not among `seen`."""
    labels = _integers(op, "labels", labels)
    by_box = boxes is not None
    matched, true_labels = (labels, target_labels) if by_box else (None, None)
    matches = find(op, index, target, k, boxes, matched, target_boxes, true_labels, iou)
    classes = labels if target_labels is None else target_labels
    _in_boxes(op, "target", matches.target, classes)
    triplet = _named(matches.target, classes).reshape(-1, 3)
    known, place = torch.unique(torch.cat([seen.to(triplet.device), triplet]), dim=0, return_inverse=True)
    trained = torch.zeros(len(known), dtype=torch.bool, device=place.device)
    trained[place[: len(seen)]] = True
    new = ~trained[place[len(seen) :]].view(matches.real.shape)
    return matches, matches.real & new


class Matches(NamedTuple):
    """For each true relation of ``(images, g)``: whether it is one, and the first prediction that finds it."""

    target: Tensor
    real: Tensor
    rank: Tensor
    cuts: list[int]
    several: bool


def find(
    op: str,
    index: Any,
    target: Tensor,
    k: int | Sequence[int],
    boxes: Tensor | None,
    labels: Tensor | None,
    target_boxes: Tensor | None,
    target_labels: Tensor | None,
    iou: float,
) -> Matches:
    """Match predictions with true relations."""
    iou = _check.number(op, "iou", iou, 0, 1)
    predicted = _relations(op, "index", index[0] if isinstance(index, tuple) else index)
    target = _relations(op, "target", target)
    if predicted.shape[:-2] != target.shape[:-2]:
        raise ValueError(
            f"{op}: `index` and `target` must have the same images, got shapes {tuple(predicted.shape)} and "
            f"{tuple(target.shape)}."
        )
    cuts = _ranking.cuts(op, k, torch.Size([]), predicted.device)
    places = _places(op, boxes, labels, target_boxes, target_labels)
    if places is not None:
        _in_boxes(op, "index", predicted, places.boxes)
        _in_boxes(op, "target", target, places.true_boxes)
    n_images = predicted.shape[:-2].numel()
    predicted = predicted.reshape(n_images, -1, 3)[:, : cuts.most] if n_images else predicted.reshape(0, 0, 3)
    target = target.reshape(n_images, -1, 3) if n_images else target.reshape(0, 0, 3)
    ranks = [_first(predicted[c], target[c], places, iou) for c in _chunks(n_images, predicted, target)]
    rank = torch.cat([*ranks, target.new_empty(0, target.shape[1])])
    return Matches(target, (target >= 0).all(-1), rank, cuts.at[0].tolist(), cuts.several)


def _in_boxes(op: str, name: str, relations: Tensor, boxes: Tensor) -> None:
    _check.below(op, name, relations[..., :2], len(boxes), "boxes below n_boxes", "Boxes count over all images.")


def _chunks(n_images: int, predicted: Tensor, target: Tensor) -> list[slice]:
    return list(_ranking.chunks(n_images, 12 * predicted.shape[1] * target.shape[1]))


def _relations(op: str, name: str, value: Any) -> Tensor:
    value = _integers(op, name, value)
    if value.ndim < 2 or value.shape[-1] != 3:
        raise ValueError(
            f"{op}: `{name}` must hold relations (subject, object, predicate), shape (..., m, 3), "
            f"got shape {tuple(value.shape)}."
        )
    held: Tensor = value.long()
    return held


def _integers(op: str, name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{op}: `{name}` must be a tensor of an integer dtype, got {got}.")
    return value


class _Places(NamedTuple):
    """Boxes in float64 and classes of the predicted and of the true objects."""

    boxes: Tensor
    labels: Tensor
    true_boxes: Tensor
    true_labels: Tensor


def _places(
    op: str, boxes: Tensor | None, labels: Tensor | None, target_boxes: Tensor | None, target_labels: Tensor | None
) -> _Places | None:
    if boxes is None and labels is None and target_boxes is None and target_labels is None:
        return None
    if boxes is None or labels is None or (target_boxes is None) != (target_labels is None):
        raise ValueError(f"{op}: `boxes` and `labels` must be given together, and so the true ones; got one without.")
    pairs = [(boxes, labels), (boxes if target_boxes is None else target_boxes, labels)]
    if target_labels is not None:
        pairs[1] = (pairs[1][0], target_labels)
    for box, label in pairs:
        _integers(op, "labels", label)
        if not isinstance(box, Tensor) or box.ndim != 2 or box.shape[-1] != 4 or label.shape != box.shape[:1]:
            got = tuple(box.shape) if isinstance(box, Tensor) else type(box).__name__
            raise ValueError(
                f"{op}: `boxes` must have shape (n_boxes, 4) and `labels` (n_boxes,), got {got} and "
                f"{tuple(label.shape)}."
            )
    return _Places(pairs[0][0].double(), pairs[0][1].long(), pairs[1][0].double(), pairs[1][1].long())


def _named(relation: Tensor, labels: Tensor) -> Tensor:
    """Relations with the classes of subject and object in place of their numbers."""
    if not len(labels):
        return torch.full_like(relation, -1)
    ends = labels.long()[relation[..., :2].clamp(min=0)]
    return torch.cat([ends, relation[..., 2:]], -1)


def _first(predicted: Tensor, target: Tensor, places: _Places | None, iou: float) -> Tensor:
    """The first prediction that finds each true relation, ``(images, g)``; `_NEVER` where none does."""
    real = (target >= 0).all(-1)[:, :, None] & (predicted >= 0).all(-1)[:, None, :]
    if places is None:
        hit = real & (target[:, :, None] == predicted[:, None]).all(-1)
    else:
        true, guess = _named(target, places.true_labels), _named(predicted, places.labels)
        hit = real & (true[:, :, None] == guess[:, None]).all(-1)
        for end in (0, 1):
            a = _taken(places.true_boxes, target[..., end])[:, :, None]
            b = _taken(places.boxes, predicted[..., end])[:, None]
            hit &= _overlap(a, b) >= iou
    rank = torch.arange(predicted.shape[1], device=predicted.device)
    return torch.nn.functional.pad(torch.where(hit, rank, _NEVER), (0, 1), value=_NEVER).amin(-1)


def _taken(boxes: Tensor, rows: Tensor) -> Tensor:
    return boxes[rows.clamp(min=0)] if len(boxes) else boxes.new_zeros(*rows.shape, 4)


def _overlap(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union; a box from 0 to 9 is 10 pixels wide."""
    size = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2]) + 1).clamp(min=0)
    shared = size.prod(-1)
    return shared / ((a[..., 2:] - a[..., :2] + 1).prod(-1) + (b[..., 2:] - b[..., :2] + 1).prod(-1) - shared)


def over_images(matches: Matches, counted: Tensor) -> RowSums:
    """Add up over images the share of their counted relations that is found at each cut."""
    cuts = torch.tensor(matches.cuts, device=counted.device)
    hit = (matches.rank[..., None] < cuts) & counted[..., None]
    total = counted.sum(-1)
    full = total > 0
    share = (hit.sum(1).double() / total.clamp(min=1)[:, None]).sum(0)
    return RowSums(share, full.sum().double().expand_as(share), full.sum(), (~full).sum())


def over_predicates(matches: Matches, n_predicates: int) -> tuple[Tensor, Tensor]:
    """Add up over images the recall of each predicate, ``(cuts, n_predicates)``, and the images that have it."""
    predicate = matches.target[..., 2]
    if bool((matches.real & (predicate >= n_predicates)).any()):
        raise ValueError(
            f"graph_mean_recall_at_k: `target` must hold predicates below n_predicates={n_predicates}, "
            f"got {int(predicate.max())}. Predicates count from 0."
        )
    place = torch.where(matches.real, predicate, n_predicates)  # padding goes to a column that is cut off
    none = torch.zeros(len(place), n_predicates + 1, dtype=torch.float64, device=place.device)
    total = none.scatter_add(1, place, torch.ones_like(place, dtype=torch.float64))[:, :-1]
    recall = [
        (none.scatter_add(1, place, (matches.rank < cut).double())[:, :-1] / total.clamp(min=1)).sum(0)
        for cut in matches.cuts
    ]
    return torch.stack(recall), (total > 0).sum(0).double()
