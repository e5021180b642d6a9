"""Labels that are probably missing, and labels that are probably wrong, in data that people labelled."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lastlayer import _check
from lastlayer._check import LabelLists, Target, label_lists
from lastlayer.decode import _context
from lastlayer.decode._context import Data
from lastlayer.decode._listed import entries

Kind = Literal["missing", "wrong"]
ENOUGH = 100  # rows from which on a label counts in full for the trend of the rates
TREND = 1.5  # the rates are drawn to the common one, which flattens their trend with the number of rows
STEEPEST = 0.5  # trend: with four times the rows, twice the odds of being written down


@dataclass(frozen=True)
class Suggestion:
    """A label to look at: probably missing from its row, or probably wrong there."""

    row: int
    label: int
    kind: Kind
    probability: float


@dataclass(frozen=True, eq=False)
class LabelSuggestions(Sequence[Suggestion]):
    """What :func:`suggest_labels` finds: a sequence of :class:`Suggestion`, the most probable first.

    The same as tensors: ``row``, ``label``, ``missing`` (Boolean; the others are wrong) and ``probability``. ``rates``
    estimates for each label the share of its rows in which it is recorded: of the rows with its highest scores, the
    share that has it. ``rate`` is one estimate for all labels, and ``n_rows`` is the number of rows.
    """

    row: Tensor
    label: Tensor
    missing: Tensor
    probability: Tensor
    rates: Tensor
    rate: float
    n_rows: int

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        kind: Kind = "missing" if bool(self.missing[place]) else "wrong"
        return Suggestion(int(self.row[place]), int(self.label[place]), kind, float(self.probability[place]))

    def __iter__(self) -> Iterator[Suggestion]:
        columns = (self.row.tolist(), self.label.tolist(), self.missing.tolist(), self.probability.tolist())
        for row, label, missing, probability in zip(*columns, strict=True):
            yield Suggestion(row, label, "missing" if missing else "wrong", probability)

    def __repr__(self) -> str:
        n_missing = int(self.missing.sum())
        return f"LabelSuggestions({n_missing} missing, {len(self) - n_missing} wrong, in {self.n_rows} rows)"

    def corrected(self, target: Target) -> Tensor:
        """Return the target with all suggestions accepted.

        Args:
            target: The target of :func:`suggest_labels`, a tensor: multi-hot, one class per row or index lists.

        Returns:
            A Boolean multi-hot target (unknown labels become False), or index lists padded with -1.
        """
        given = target.index if isinstance(target, LabelLists) else target
        marked = isinstance(target, LabelLists) or given.dtype in (torch.int64, torch.int32)
        if not marked:
            recorded = given > 0
            recorded[self.row, self.label] = self.missing
            return recorded
        index = given[:, None] if given.ndim == 1 else given
        row, at = (index >= 0).nonzero(as_tuple=True)
        label = index[row, at].long()
        width = int(torch.cat([label, self.label, label.new_zeros(1)]).max()) + 1
        key, changed = row * width + label, self.row * width + self.label
        kept = key[~torch.isin(key, changed[~self.missing])]
        key = torch.cat([kept, changed[self.missing]]).unique()
        pairs = torch.stack([key // width, key % width])
        return _lists("corrected", pairs, torch.ones_like(key), len(index)).index


def suggest_labels(
    scores: Tensor,
    target: Target,
    *,
    observed: float | Tensor | None = None,
    wrong: float = 0.02,
    kind: Literal["both", "missing", "wrong"] = "both",
    n: int | None = None,
    balanced: bool = False,
    indices: Tensor | None = None,
    n_classes: int | None = None,
) -> LabelSuggestions:
    r"""Find labels that are probably missing from their row, and labels that are probably wrong there.

    The scores must come from models that have not seen the row: with k folds, each row is scored by the model of the
    other folds. A model trained on a row repeats what is missing there.

    First, the probability :math:`q` that a label is recorded is estimated from its score and from the other labels
    of the row: which they are, and how many (a regression on the residuals of the other labels, see
    ``lastlayer/decode/_context.py``). Labels that occur together suggest each other, and a row without any label
    probably lacks one. Then, if a true label is recorded with probability :math:`\rho`, so that :math:`q = \rho y`,

    .. math:: P(\text{true} \mid \text{not recorded}) = \frac{y (1 - \rho)}{1 - \rho y}
              = \frac{1 - \rho}{\rho} \cdot \frac{q}{1 - q}

    and, if a share :math:`w` of the recorded labels was put into rows drawn at random,

    .. math:: P(\text{wrong} \mid \text{recorded}) = \frac{w}{w + (1 - w) \, q / \pi}

    with :math:`\pi` the share of rows that have the label.

    With one rate for all labels, the missing labels are ordered by :math:`q`; rates per label change that order.

    The rate of a single rare label is uncertain; the trend of the rates with the number of rows :math:`n_c` is less so.
    Balanced suggestions use :math:`\log (\rho_c / (1 - \rho_c)) = a + b \log n_c`. The estimated rates are shrunk
    towards the common one, which flattens their trend, so :math:`b` is 1.5 times its slope, limited to 0 to 0.5.

    Memory beyond the scores does not depend on the number of rows. Rows are looked at in chunks; the estimates come
    from a sample of rows where there are more than 130 million scores.

    Args:
        scores: Out-of-fold probabilities, shape ``(rows, n_classes)``, a tensor, an array or a list of rows. They are
            brought to the scale of the labels, so that those of any loss will do.
        target: The recorded labels: multi-hot of the shape of `scores` (-1 is unknown, and neither
            looked at nor suggested), one class per row, or index lists padded with -1; also one Python list of classes
            per row, or a sparse matrix of torch or SciPy. Lists and sparse matrices are never made dense as a whole.
        observed: The rate :math:`\rho` at which true labels are recorded, above 0 and at most 1: one number, or
            one per label, shape ``(n_classes,)``. None estimates one for all labels; ``rates`` of the result, which
            are estimated per label, may be passed in a second call.
        wrong: The share :math:`w` of the recorded labels that is thought to be wrong, above 0 and below 1.
        kind: ``"missing"``, ``"wrong"`` or ``"both"``.
        n: The number of suggestions; None is all that are more probable than not.
        balanced: Whether no label gets more than its part of the `n` missing labels, in proportion to
            :math:`n_c (1 - \rho_c) / \rho_c` with :math:`n_c` rows that have it. Frequent labels, which are easy to
            guess, would otherwise take most of them. :math:`\rho_c` is `observed`; where that is None, it is the rate
            of labels that are as frequent (above). The share that is right is about the same, and a model that is
            trained on them is better (the guide "Repair labels" has figures). Needs `n` and ``kind="missing"``.
        indices: Where there are too many labels for a score each: the classes of the listed scores, such as the best
            50, shape ``(rows, m)``, padded with -1; `scores` then has this shape, and labels that are not listed count
            as improbable: they are never suggested as missing.
        n_classes: The number of classes, where `indices` is given.

    Returns:
        A :class:`LabelSuggestions`.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> logits = 3 * torch.randn(2000, 4, generator=generator)
        >>> true = torch.rand(2000, 4, generator=generator) < logits.sigmoid()
        >>> written = true & (torch.rand(2000, 4, generator=generator) < 0.8)
        >>> suggested = suggest_labels(logits.sigmoid(), written, n=500, kind="missing")
        >>> suggested
        LabelSuggestions(500 missing, 0 wrong, in 2000 rows)
        >>> share = true[suggested.row, suggested.label].float().mean()
        >>> print(f"{share:.2f} of them are true, rate {suggested.rate:.2f}")
        0.80 of them are true, rate 0.77
    """
    op = "suggest_labels"
    _check.choice(op, "kind", kind, ("both", "missing", "wrong"))
    data = _read(op, scores, target, indices, n_classes)
    rate = _rate(op, observed, data)
    if not 0 < _check.number(op, "wrong", wrong) < 1:
        raise ValueError(f"{op}: `wrong` must be above 0 and below 1, got {wrong}. 0.02 is usual.")
    n = None if n is None else _count(op, n)
    if balanced and (n is None or kind != "missing"):
        raise ValueError(f'{op}: `balanced` must be False without `n` and `kind="missing"`, got {balanced}.')
    if not len(data) or not data.n_classes:
        raise ValueError(f"{op}: `scores` must hold at least one row and one class, got shape {tuple(scores.shape)}.")
    context, rates, common = _context.fit(data)
    counts = _context.counts_of(data)
    lacking = _lacking(counts, rates) if rate is None else counts.double() * (1 - rate.double()) / rate.double()
    rate = common.expand(data.n_classes) if rate is None else rate
    share = (counts.clamp(min=1) / len(data)).float()
    best = _Best(n, data.scores.device, _parts(n, lacking, counts) if balanced and n is not None else None)
    if data.indices is not None and data.labels.index is not None:
        for some in entries(data, context):
            odds, own = some.logit, some.label
            keys = _keys(odds, some.written, None, rate[own], share[own], wrong, kind)
            best.add(some.row, own, some.written, keys)
    else:
        for chunk in data.chunks():
            keys = _keys(context.logits(chunk), chunk.label, chunk.known, rate, share, wrong, kind)
            row = torch.arange(len(keys), device=keys.device) + chunk.start
            place = torch.arange(data.n_classes, device=keys.device)
            best.add(
                row[:, None].expand_as(keys).reshape(-1),
                place.expand_as(keys).reshape(-1),
                chunk.label.flatten(),
                keys.flatten(),
            )
    row, label, missing, key = best.found()
    return LabelSuggestions(row, label, missing, key.clamp(max=1), rates, float(common), len(data))


def _keys(
    q: Tensor, written: Tensor, known: Tensor | None, rate: Tensor, share: Tensor, wrong: float, kind: str
) -> Tensor:
    """The probability of each suggestion, -1 where there is none; above 1 it only orders."""
    ratio = (q + (1 - rate).log() - rate.log()).exp()
    missing = torch.where(ratio <= 1, ratio, 2 - 1 / ratio)  # a ratio above 1 contradicts the rate
    not_right = wrong / (wrong + (1 - wrong) * q.sigmoid() / share)
    key = torch.where(written, not_right, missing)
    asked = {"both": None, "missing": ~written, "wrong": written}[kind]
    key = key if asked is None else torch.where(asked, key, -1)
    return key if known is None else torch.where(known, key, -1)


class _Found(NamedTuple):
    row: Tensor
    label: Tensor
    missing: Tensor
    key: Tensor


def _lacking(counts: Tensor, rates: Tensor) -> Tensor:
    """How often each label is missing, up to a common factor, by the trend of the rates with the number of rows."""
    x, y, weight = counts.clamp(min=1).double().log(), rates.double().logit(), counts.clamp(max=ENOUGH).double()
    x = x - (weight * x).sum() / weight.sum().clamp(min=1e-12)
    slope = (weight * x * y).sum() / (weight * x * x).sum().clamp(min=1e-12)
    return counts.double() * (-(TREND * slope).clamp(0, STEEPEST) * x).exp()


def _parts(n: int, lacking: Tensor, counts: Tensor) -> Tensor:
    """How many of n missing labels each label may have: in proportion to what it lacks, rounded up."""
    lacking = lacking if bool(lacking.any()) else counts.double()
    return (n * lacking / lacking.sum().clamp(min=1e-12)).ceil().long()


class _Best:
    """The best suggestions so far: as many as asked for, or all above one half. Ties go to the lowest row and label.

    Args:
        n: The number of suggestions; None is all above one half.
        device: Where they are.
        parts: The largest number of suggestions of each label, if they are bounded.
    """

    def __init__(self, n: int | None, device: torch.device, parts: Tensor | None = None) -> None:
        self.n, self.parts = n, parts
        self.least = 0.0 if n is not None else 0.5
        self.least_of = None if parts is None else torch.zeros(len(parts), device=device)
        none = torch.zeros(0, dtype=torch.int64, device=device)
        self.kept = _Found(none, none, none > 0, none.float())

    def add(self, row: Tensor, label: Tensor, written: Tensor, flat: Tensor) -> None:
        """Take in some labels of some rows; what n others surpass is left out."""
        n = self.n
        if n == 0:
            return
        if n is None:
            place = (flat > self.least).nonzero().squeeze(-1)
        elif self.least_of is not None:
            place = (flat >= self.least_of[label].clamp(min=self.least)).nonzero().squeeze(-1)
        else:
            if len(flat) > n:
                self.least = max(self.least, float(flat.topk(n).values[-1]))
            place = (flat >= self.least).nonzero().squeeze(-1)
        more = _Found(row[place], label[place], ~written[place], flat[place])
        self.kept = _Found(*(torch.cat(pair) for pair in zip(self.kept, more, strict=True)))
        if n is not None and len(self.kept.key) > max(2 * n, 1000):
            self.kept = self.found()
            if len(self.kept.key) == n:
                self.least = max(self.least, float(self.kept.key[-1]))

    def found(self) -> _Found:
        """The suggestions in order. Chunks come in the order of rows, so that a stable sort settles ties."""
        row, label = self.kept.row, self.kept.label
        place = (row * (int(label.max()) + 1 if len(label) else 1) + label).argsort()
        place = place[self.kept.key[place].argsort(descending=True, stable=True)]
        if self.parts is not None and self.least_of is not None:
            place = place[_rank_within(label[place]) < self.parts[label[place]]]
            many, key = torch.bincount(label[place], minlength=len(self.parts)), self.kept.key[place]
            lowest = torch.full_like(self.least_of, 2).scatter_reduce(0, label[place], key, "amin")
            self.least_of = torch.where(many >= self.parts, lowest, self.least_of)
        return _Found(*(x[place[: self.n]] for x in self.kept))


def _rank_within(label: Tensor) -> Tensor:
    """For each entry, how many earlier ones have the same label."""
    order = label.argsort(stable=True)
    count = torch.bincount(label)
    start = (count.cumsum(0) - count)[label[order]]
    return torch.empty_like(label).scatter(0, order, torch.arange(len(label), device=label.device) - start)


def _read(op: str, scores: Any, target: Any, indices: Any, n_classes: Any) -> Data:
    scores = torch.as_tensor(scores) if _is_array(scores) else scores
    scores = _check.logits(op, scores, "scores").detach()
    target = _plain(op, target, scores)
    if scores.ndim != 2:
        raise ValueError(f"{op}: `scores` must have shape (rows, n_classes), got {tuple(scores.shape)}.")
    low, high = (float(scores.nan_to_num(0).amin()), float(scores.nan_to_num(0).amax())) if scores.numel() else (0, 0)
    if (indices is None and low < 0) or high > 1:
        raise ValueError(
            f"{op}: `scores` must be probabilities between 0 and 1, got {low if low < 0 else high:.4g}. "
            "Use torch.sigmoid on logits."
        )
    if (indices is None) != (n_classes is None):
        rule = "must be given with" if n_classes is None else "must be left out without"
        raise ValueError(f"{op}: `n_classes` {rule} `indices`, got {n_classes}.")
    if indices is None:
        return Data(scores, None, _check.target(op, target, scores))
    if not isinstance(indices, Tensor) or indices.dtype not in (torch.int64, torch.int32):
        got = indices.dtype if isinstance(indices, Tensor) else type(indices).__name__
        raise TypeError(f"{op}: `indices` must be a tensor of int64 or int32, got {got}.")
    if indices.shape != scores.shape:
        raise ValueError(
            f"{op}: `indices` must have the shape of `scores`, {tuple(scores.shape)}, got {tuple(indices.shape)}."
        )
    _check.below(op, "indices", indices, n_classes, "classes below n_classes", "Classes count from 0, and -1 pads.")
    probe = scores.new_empty(()).expand(len(scores), n_classes)
    return Data(scores.clamp(min=0), indices, _check.target(op, target, probe))


def _is_array(value: Any) -> bool:
    """Whether it is a NumPy array or a list of rows of numbers."""
    return not isinstance(value, Tensor) and (
        hasattr(value, "__array_interface__")
        or (isinstance(value, list) and bool(value) and isinstance(value[0], list | tuple))
    )


def _plain(op: str, target: Any, scores: Tensor) -> Any:
    """Return a target that is a list of lists, a NumPy array or a sparse matrix as a tensor, sparse ones as lists."""
    if isinstance(target, Tensor) and target.layout != torch.strided:
        sparse = target.to_sparse_coo().coalesce()
        return _lists(op, sparse.indices(), sparse.values(), len(scores))
    if hasattr(target, "tocoo"):  # a SciPy matrix
        sparse = target.tocoo()
        place = torch.stack([torch.as_tensor(sparse.row).long(), torch.as_tensor(sparse.col).long()])
        return _lists(op, place.to(scores.device), torch.as_tensor(sparse.data).to(scores.device), len(scores))
    if isinstance(target, list) and all(isinstance(row, list | tuple | set) for row in target):
        rows = [i for i, row in enumerate(target) for _ in row]
        labels = [int(label) for row in target for label in row]
        place = torch.tensor([rows, labels], dtype=torch.int64, device=scores.device).view(2, -1)
        return _lists(op, place, torch.ones(len(rows), device=scores.device), len(target))
    return torch.as_tensor(target) if _is_array(target) else target


def _lists(op: str, place: Tensor, value: Tensor, n_rows: int) -> LabelLists:
    """Return index lists, padded with -1, of (row, label) pairs; what is stored as 0 is no label."""
    if bool((value < 0).any()):
        raise ValueError(
            f"{op}: `target` must be 0 or positive where it is sparse, got a negative number. Use a dense one."
        )
    row, label = place[:, value > 0]
    order = row.argsort(stable=True)
    row, label = row[order], label[order]
    count = torch.bincount(row, minlength=n_rows)
    rank = torch.arange(len(row), device=row.device) - (count.cumsum(0) - count)[row]
    width = int(count.max()) if len(count) else 0
    out = torch.full((len(count), max(width, 1)), -1, dtype=torch.int64, device=row.device)
    out[row, rank] = label
    return label_lists(out)


def _count(op: str, n: Any) -> int:
    try:
        found = -1 if isinstance(n, bool) else operator.index(n)
    except TypeError:
        found = -1
    if found < 0:
        raise ValueError(f"{op}: `n` must be None or a whole number of at least 0, got {n!r}.")
    return found


def _rate(op: str, observed: Any, data: Data) -> Tensor | None:
    if observed is None:
        return None
    if not isinstance(observed, Tensor):
        observed = torch.tensor(_check.number(op, "observed", observed), device=data.scores.device)
    if observed.shape not in (torch.Size([]), torch.Size([data.n_classes])):
        raise ValueError(
            f"{op}: `observed` must be one number or one per class ({data.n_classes}), got "
            f"shape {tuple(observed.shape)}."
        )
    if len(wrong := observed[(observed <= 0) | (observed > 1) | observed.isnan()]):
        raise ValueError(f"{op}: `observed` must be above 0 and at most 1, got {float(wrong[0]):.4g}.")
    rates: Tensor = observed.detach().float().to(data.scores.device).expand(data.n_classes)
    return rates
