"""Why label sets are wrong, in the manner of TIDE (Bolya et al., 2020): each error has one kind, each kind a price."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from lastlayer import _check, _ranked
from lastlayer._check import Target
from lastlayer._cuts import best_cuts
from lastlayer.metrics import _ranking, _set_scores
from lastlayer.metrics._cooccurrence import CoOccurrence, label_cooccurrence_of

if TYPE_CHECKING:
    from lastlayer.hierarchy import LabelTree

Metric = Literal["f1", "micro_f1", "macro_f1", "jaccard", "exact"]

_MEANING = {
    "confusion": "a wrong label in place of a true one",
    "sibling confusion": "a wrong label in place of a true one with the same parent",
    "other confusion": "a wrong label in place of a true one from elsewhere in the tree",
    "count": "ranked right, but too many or too few labels were taken",
    "threshold": "the best threshold of the class would have decided it correctly",
    "hallucination": "a wrong label, and no true one was left out for it",
    "miss": "a true label that nothing was taken for",
}


@dataclass(frozen=True)
class ErrorKind:
    """One kind of error: how many, and the gain of the metric if only these were corrected."""

    name: str
    false_alarms: int
    misses: int
    gain: float
    meaning: str


@dataclass(frozen=True)
class Confusion:
    """How often one class was predicted in place of another; `sibling` is None without a tree."""

    truth: int
    predicted: int
    count: int
    sibling: bool | None
    truth_name: str
    predicted_name: str


@dataclass(frozen=True)
class LabelSetErrors:
    """What :func:`label_set_errors` finds; plain numbers and names throughout."""

    metric: str
    value: float
    n_rows: int
    n_labels: int
    n_right: int
    n_false_alarms: int
    n_misses: int
    kinds: tuple[ErrorKind, ...]
    oracles: dict[str, float]
    confusions: tuple[Confusion, ...]
    cooccurrence: tuple[CoOccurrence, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the same as dictionaries, lists and numbers, ready for JSON."""
        fields = asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}

    def to_markdown(self) -> str:
        """Return the kinds of errors as a Markdown table, the costliest first."""
        total = max(self.n_false_alarms + self.n_misses, 1)
        lines = [
            f"| error | false alarms | misses | share of errors | gain of {self.metric} |",
            "| --- | ---: | ---: | ---: | ---: |",
        ]
        for kind in sorted(self.kinds, key=lambda kind: -kind.gain):
            share = (kind.false_alarms + kind.misses) / total
            lines.append(f"| {kind.name} | {kind.false_alarms} | {kind.misses} | {share:.0%} | {kind.gain:+.4f} |")
        return "\n".join(lines) + "\n"


def label_set_errors(
    scores: Tensor,
    target: Target,
    k: int | Tensor | None = None,
    *,
    threshold: float | Tensor = 0.5,
    predicted: Tensor | None = None,
    tree: LabelTree | None = None,
    metric: Metric | Callable[[Tensor, Tensor, Tensor], float] = "f1",
    names: Sequence[str] | None = None,
    top: int = 20,
) -> LabelSetErrors:
    """Explain each false alarm and each miss, and price each kind of error.

    The kinds; each error gets the first one that fits:

    1. *confusion*: a false alarm paired with a miss of the same row, one to one; pairs of siblings in the tree come
       first, then the highest scores. With a tree, siblings and others are counted apart.
    2. *count*: in a row with labels, a false alarm outside of the row's best ``|T|`` classes, or a miss among them,
       ``|T|`` being its number of labels: the right number of labels would have prevented it.
    3. *threshold*: the threshold that gives the class its best F1 on this data would decide it correctly.
    4. *hallucination* for a false alarm, *miss* for a miss.

    The gain of a kind is the metric with only the errors of that kind mended, minus the metric of the original
    predictions; it is never measured on top of another repair. With all kinds mended, the sets are right.

    Labels that are unknown (-1) take no part, nor do predictions of them. Several Boolean tensors of the shape of
    `scores` are held: with very many classes, pass a sample of the rows.

    Args:
        scores: Shape ``(..., n_classes)``.
        target: In any of the three forms.
        k: The predictions are the `k` best classes, one number or one per row.
        threshold: The predictions are the classes above it, if there is no `k`; one number or one per class.
        predicted: The predictions as index lists padded with -1, such as those of a decoder, in place of both.
        tree: Tells siblings from others; classes are its leaves.
        metric: ``"f1"``, ``"jaccard"`` and ``"exact"`` (means over rows; 1 for a row rightly left empty),
            ``"micro_f1"``, ``"macro_f1"``; or a function of predicted, true and known, Boolean ``(rows, n_classes)``.
        names: Names of the classes; by default those of the tree, or their numbers.
        top: How many confusions and pairs of labels to list.

    Returns:
        A :class:`LabelSetErrors`: the kinds; the oracles "no false alarms", "no misses", "true count" (the best ``|T|``
        classes of each row) and "best thresholds", as gains, of which the last two may be negative; the most
        frequent confusions; and the pairs of labels whose number of common rows differs most between predictions
        and data.

    Example:
        >>> scores = torch.tensor([[0.9, 0.8, 0.1], [0.2, 0.7, 0.1]])
        >>> errors = label_set_errors(scores, torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]))
        >>> round(errors.value, 4), [(kind.name, kind.false_alarms, kind.misses) for kind in errors.kinds[:2]]
        (0.3333, [('confusion', 1, 1), ('count', 1, 0)])
    """
    op = "label_set_errors"
    return analysed(op, label_sets(op, scores, target, k, threshold, predicted), tree, metric, names, top)


class LabelSets(NamedTuple):
    """Scores without nan and, Boolean, what is true, known and predicted; each ``(rows, n_classes)``."""

    scores: Tensor
    true: Tensor
    known: Tensor
    said: Tensor


def label_sets(
    op: str, scores: Tensor, target: Target, k: int | Tensor | None, threshold: float | Tensor, predicted: Any
) -> LabelSets:
    """Check the inputs of :func:`label_set_errors` and decode the predictions."""
    x, true, known = _rows(op, scores, target)
    return LabelSets(x, true, known, _said(op, x, scores, k, threshold, predicted) & known)


def check_metric(op: str, metric: Any) -> None:
    """Check the name of a metric, or that it is a function."""
    _set_scores.measure(op, metric)


def analysed(
    op: str, sets: LabelSets, tree: LabelTree | None, metric: Any, names: Sequence[str] | None, top: int
) -> LabelSetErrors:
    """Explain and price the errors of checked label sets."""
    x, true, known, said = sets
    names = _names(op, names, tree, x.shape[-1])
    measure = _set_scores.measure(op, metric)
    mended = _mended(x, true, known, said, tree)
    base = measure(said, true, known)
    kinds = tuple(
        ErrorKind(
            name,
            int((said & fixed).sum()),
            int((~said & fixed).sum()),
            measure(said ^ fixed, true, known) - base,
            _MEANING[name],
        )
        for name, fixed in mended.kinds.items()
    )
    oracles = {
        "no false alarms": measure(said & true, true, known) - base,
        "no misses": measure(said | true, true, known) - base,
        "true count": measure(mended.counted & known, true, known) - base,
        "best thresholds": measure(mended.above & known, true, known) - base,
    }
    confusions = tuple(
        Confusion(t, p, count, None if tree is None else _siblings(tree, t, p), names[t], names[p])
        for (t, p), count in sorted(mended.pairs.items(), key=lambda item: (-item[1], item[0]))[:top]
    )
    return LabelSetErrors(
        metric=metric if isinstance(metric, str) else getattr(metric, "__name__", "metric"),
        value=base,
        n_rows=len(x),
        n_labels=int(true.sum()),
        n_right=int((said & true).sum()),
        n_false_alarms=int((said & ~true).sum()),
        n_misses=int((~said & true).sum()),
        kinds=kinds,
        oracles=oracles,
        confusions=confusions,
        cooccurrence=label_cooccurrence_of(said, true, names, top),
    )


def error_kinds(scores: Tensor, target: Target, predicted: Tensor) -> dict[str, Tensor]:
    """Mark the errors of each kind, for pages that show them row by row.

    Args:
        scores: Shape ``(rows, n_classes)``.
        target: In any of the three forms.
        predicted: The predictions as index lists padded with -1.

    Returns:
        A Boolean tensor of the shape of `scores` for each kind of :func:`label_set_errors`; no two overlap.
    """
    return _mended(*label_sets("error_kinds", scores, target, None, 0.5, predicted), None).kinds


@dataclass(frozen=True)
class _Mended:
    """The errors of each kind (Boolean, as the scores), the confused pairs, and two other ways to decode."""

    kinds: dict[str, Tensor]
    pairs: Counter[tuple[int, int]]
    counted: Tensor
    above: Tensor


def _rows(op: str, scores: Tensor, target: Target) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, labels and what is known, each ``(rows, n_classes)``; nan is as low as a score can be."""
    scores = _check.logits(op, scores, "scores").detach()
    labels = _ranking.flat(_check.target(op, target, scores))
    x = scores.reshape(scores.shape[:-1].numel(), scores.shape[-1])
    known = labels.known()
    known = torch.ones_like(x, dtype=torch.bool) if known is None else known
    return torch.where(x.isnan(), -torch.inf, x), labels.positive() & known, known


def _said(
    op: str,
    x: Tensor,
    scores: Tensor,
    k: int | Tensor | None,
    threshold: float | Tensor,
    predicted: Any,
) -> Tensor:
    """The predicted sets, Boolean."""
    batch, n = scores.shape[:-1], scores.shape[-1]
    if predicted is not None:
        index = predicted[0] if isinstance(predicted, tuple) else predicted
        if k is not None:
            raise ValueError(f"{op}: `k` must be left out where `predicted` is given, got {k}.")
        if not isinstance(index, Tensor) or index.is_floating_point() or index.dtype == torch.bool:
            got = index.dtype if isinstance(index, Tensor) else type(index).__name__
            raise TypeError(
                f"{op}: `predicted` must be a tensor of an integer dtype, got {got}. Use a decoder's lists."
            )
        if index.shape[:-1] != batch or index.ndim == 0:
            raise ValueError(
                f"{op}: `predicted` must have shape {(*batch, 'm')}, index lists padded with -1, "
                f"got {tuple(index.shape)}."
            )
        _check.below(op, "predicted", index, n, "classes below n_classes", "Classes count from 0, and -1 pads.")
        return _hot(index.long().reshape(len(x), -1) if len(x) else index.reshape(0, 0).long(), n)
    if k is not None:
        cuts = _ranking.cuts(op, k, batch, x.device)
        if cuts.several:
            raise TypeError(f"{op}: `k` must be one number, or a tensor with one per row, got {k!r}.")
        return _best(x, cuts.at.expand(len(x), 1).squeeze(-1))
    if isinstance(threshold, Tensor):
        if threshold.shape not in (torch.Size([]), torch.Size([n])):
            raise ValueError(
                f"{op}: `threshold` must be one number or one per class ({n}), got shape {tuple(threshold.shape)}."
            )
        return x.to(_check.work_dtype(x)) > threshold.to(x.device)
    return x > _check.number(op, "threshold", threshold)


def _hot(index: Tensor, n: int) -> Tensor:
    place = torch.where((index < 0) | (index >= n), n, index)
    return torch.zeros(len(index), n + 1, dtype=torch.bool, device=index.device).scatter(1, place, True)[:, :n]


def _best(x: Tensor, counts: Tensor) -> Tensor:
    """Return the best classes of each row, as many as its count."""
    most = int(counts.max()) if counts.numel() else 0
    _, index = _ranked.top_k(x, most)
    inside = torch.arange(most, device=x.device) < counts[:, None]
    return _hot(torch.where(inside, index, -1), x.shape[-1])


def _names(op: str, names: Sequence[str] | None, tree: LabelTree | None, n: int) -> list[str]:
    if tree is not None and tree.n_leaves != n:
        raise ValueError(f"{op}: `tree` must have the {n} classes of `scores` as leaves, got {tree.n_leaves}.")
    if names is None:
        return list(tree.class_names) if tree is not None else [str(c) for c in range(n)]
    if len(names) != n:
        raise ValueError(f"{op}: `names` must hold one name per class ({n}), got {len(names)}.")
    return [str(name) for name in names]


def _siblings(tree: LabelTree, a: int, b: int) -> bool:
    leaves = tree.leaves
    return tree.parents[int(leaves[a])] == tree.parents[int(leaves[b])]


def _mended(x: Tensor, true: Tensor, known: Tensor, said: Tensor, tree: LabelTree | None) -> _Mended:
    level = best_cuts(
        torch.where(known, x, -torch.inf).to(_check.work_dtype(x)).T, true.T, known.T & (x > -torch.inf).T, "f1"
    )
    above = x.to(level.dtype) > level
    counted = _best(torch.where(known, x, -torch.inf), true.sum(-1))
    wrong = (said ^ true) & known
    siblings, others, pairs = _paired(x, true, said, tree)
    rest = wrong & ~siblings & ~others
    count = rest & (counted == true) & true.any(-1, keepdim=True)
    rest = rest & ~count
    threshold = rest & (above == true)
    rest = rest & ~threshold
    confusion = {"confusion": others}
    if tree is not None:
        confusion = {"sibling confusion": siblings, "other confusion": others}
    kinds = {
        **confusion,
        "count": count,
        "threshold": threshold,
        "hallucination": rest & said,
        "miss": rest & ~said,
    }
    return _Mended(kinds, pairs, counted, above)


def _paired(
    x: Tensor, true: Tensor, said: Tensor, tree: LabelTree | None
) -> tuple[Tensor, Tensor, Counter[tuple[int, int]]]:
    """Pair the false alarms of each row with its misses; returns those of siblings, of others, and the pairs."""
    alarms, misses = _by_row(said & ~true, x), _by_row(~said & true, x)
    parent = None if tree is None else [tree.parents[leaf] for leaf in tree.leaves.tolist()]
    near: list[tuple[int, int]] = []
    far: list[tuple[int, int]] = []
    pairs: Counter[tuple[int, int]] = Counter()
    for row in alarms.keys() & misses.keys():
        wrong, left = alarms[row], misses[row]
        keys = []
        if parent is not None:
            for p in list(wrong):
                t = next((t for t in left if parent[t] == parent[p]), None)
                if t is not None:
                    keys.append((t, p))
                    wrong.remove(p)
                    left.remove(t)
        near += [(row, c) for pair in keys for c in pair]
        rest = list(zip(left, wrong, strict=False))
        far += [(row, c) for pair in rest for c in pair]
        pairs.update(keys + rest)
    return _marked(near, x), _marked(far, x), pairs


def _by_row(mask: Tensor, x: Tensor) -> dict[int, list[int]]:
    """The classes of each row, the highest score first, ties by the lowest class."""
    row, column = mask.nonzero(as_tuple=True)
    order = x[row, column].argsort(descending=True, stable=True)
    out: dict[int, list[int]] = {}
    for r, c in zip(row[order].tolist(), column[order].tolist(), strict=True):
        out.setdefault(r, []).append(c)
    return out


def _marked(places: list[tuple[int, int]], x: Tensor) -> Tensor:
    mask = torch.zeros_like(x, dtype=torch.bool)
    if places:
        row, column = torch.tensor(places, device=x.device).T
        mask[row, column] = True
    return mask
