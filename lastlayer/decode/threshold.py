"""Classes above a threshold, and thresholds chosen on held-out data."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lastlayer import _check, _ranked, shard
from lastlayer._check import Target
from lastlayer._cuts import best_cuts
from lastlayer._module import FunctionModule
from lastlayer.decode.top_k import Decoded, choose, longest, usable, whole
from lastlayer.shard import ClassShard, local_part, unwrap


def decode_threshold(
    scores: Tensor,
    threshold: float | Tensor = 0.5,
    *,
    at_most: int | None = None,
    at_least: int | None = None,
    mask: Tensor | None = None,
    shard: ClassShard | None = None,
) -> Decoded:
    r"""Choose the classes whose score is above a threshold: :math:`\{i : s_i > t_i\}`.

    The best come first, ties by the lowest index. `at_most` keeps the best of those above; `at_least` fills a row
    that has fewer with the best of the others.

    Args:
        scores: Shape ``(..., n_classes)``. ``-inf`` and nan are never chosen.
        threshold: One number, or a tensor that broadcasts to `scores`, such as one per class from
            :func:`tune_thresholds`. A score equal to it is not above it.
        at_most: The largest number of classes per row, which is then the width of the lists. Without it the width is
            that of the longest list, and the call waits for the GPU to find it.
        at_least: The smallest number of classes per row, as far as the row has that many to choose from.
        mask: Boolean, True where a class may be chosen; broadcasts to the shape of `scores`.
        shard: This rank's slice, when the classes are split over processes; thresholds per class are its own.

    Returns:
        Indices of shape ``(..., width)``, int64, -1 where a row has no more; scores of the same shape, ``-inf``
        there.

    Example:
        >>> decode_threshold(torch.tensor([[0.6, 0.1, 0.9], [0.4, 0.3, 0.2]]), at_least=1)
        Decoded(index=tensor([[ 2,  0],
                [ 0, -1]]), score=tensor([[0.9000, 0.6000],
                [0.4000,   -inf]]))
    """
    op = "decode_threshold"
    scores, shard, _ = unwrap(op, scores, shard)
    scores = _check.logits(op, scores, "scores")
    x = usable(scores, _check.mask(op, local_part(mask), scores))
    most = None if at_most is None else whole(op, "at_most", at_most)
    least = 0 if at_least is None else whole(op, "at_least", at_least)
    if most is not None and least > most:
        raise ValueError(f"{op}: `at_least` must not be above `at_most`, got {least} and {most}.")
    above = x.to(_check.work_dtype(x)) > _levels(op, threshold, x)
    counts = _count(above, shard)
    width = max(longest(op, counts, most), least)
    decoded = choose(torch.where(above, x, -torch.inf), scores, width, shard)
    if least == 0:
        return decoded
    rest = choose(torch.where(above, -torch.inf, x), scores, least, shard)
    spare = torch.arange(least, device=x.device) < (least - counts).unsqueeze(-1)
    index = torch.cat([decoded.index, torch.where(spare, rest.index, -1)], -1)
    score = torch.cat([decoded.score, torch.where(spare, rest.score, -torch.inf)], -1)
    score, index = _ranked.ordered(score, index, width)
    return Decoded(index, score)


def _count(above: Tensor, part: ClassShard | None) -> Tensor:
    return shard.reduce(above.long(), "sum", part).squeeze(-1)


def _levels(op: str, threshold: float | Tensor, x: Tensor) -> float | Tensor:
    if not isinstance(threshold, Tensor):
        return _check.number(op, "threshold", threshold)
    try:
        fits = torch.broadcast_shapes(threshold.shape, x.shape) == x.shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(
            f"{op}: `threshold` must broadcast to the shape of `scores`, {tuple(x.shape)}, "
            f"got shape {tuple(threshold.shape)}. Give one number, or one per class."
        )
    return threshold.detach().to(x.device)


def tune_thresholds(
    scores: Tensor,
    target: Target,
    *,
    objective: Literal["f1", "precision", "recall"] = "f1",
    value: float | None = None,
    per: Literal["class", "all"] = "class",
    shard: ClassShard | None = None,
) -> Tensor:
    """Choose thresholds for :func:`decode_threshold` on held-out data.

    ``"f1"`` takes the threshold with the highest F1, and the highest one if there are several. ``"precision"`` takes
    the lowest threshold whose precision is at least `value`, which gives the highest recall. ``"recall"`` takes the
    highest threshold whose recall is at least `value`, which gives the highest precision. A threshold is midway between
    two scores of the data.

    Where no threshold reaches the precision, and for a class without a label in the data, the threshold is the highest
    score of the data, so that no row of the data exceeds it. A class without any known entry gets infinity.

    Args:
        scores: Held-out scores, shape ``(..., n_classes)``, such as :func:`decode_threshold` will get. A nan counts
            as unknown.
        target: In any of the three forms; unknown labels (-1) are left out.
        objective: ``"f1"``, ``"precision"`` or ``"recall"``.
        value: The precision or recall wanted, 0 to 1.
        per: ``"class"`` for one threshold per class, ``"all"`` for one threshold for all.
        shard: This rank's slice, when the classes are split over processes; the thresholds are those of its classes.

    Returns:
        Thresholds of shape ``(n_classes,)``, or ``()`` for ``per="all"``; of the dtype of `scores`, at least float32.

    Example:
        >>> scores = torch.tensor([[0.9, 0.2], [0.6, 0.3], [0.4, 0.1]])
        >>> tune_thresholds(scores, torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]))
        tensor([0.5000, 0.2500])
    """
    op = "tune_thresholds"
    scores = _check.logits(op, scores, "scores").detach()
    _check.choice(op, "objective", objective, ("f1", "precision", "recall"))
    per = _check.choice(op, "per", per, ("class", "all"), {"label": "class"})  # "label" in 0.1
    if (value is None) != (objective == "f1"):
        rule = "must be given" if value is None else "must be left out"
        raise ValueError(f'{op}: `value` {rule} for objective="{objective}", got {value}.')
    if shard is not None and per == "all":
        raise ValueError(f'{op}: `per` must be "class" with `shard`, got "all": one threshold needs all classes.')
    wanted = 0.0 if value is None else _check.number(op, "value", value, 0, 1)
    labels = _check.target(op, target, scores, shard)
    known, hit = labels.known(), labels.positive()
    known = ~scores.isnan() if known is None else known & ~scores.isnan()
    rows, n = (scores.numel(), 1) if per == "all" else (scores.shape[:-1].numel(), scores.shape[-1])
    x, hit, known = (t.reshape(rows, n).T for t in (scores, hit & known, known))
    x = torch.where(known, x, -torch.inf).to(_check.work_dtype(x))
    cuts = best_cuts(x, hit, known, objective, wanted - 1e-9)  # 0.55 of 20 is 11, which 0.55 * 20 exceeds
    return cuts.squeeze(0) if per == "all" else cuts


class DecodeThreshold(FunctionModule):
    """Module form of :func:`decode_threshold`, which documents the arguments."""

    function = staticmethod(decode_threshold)

    def __init__(
        self, threshold: float | Tensor = 0.5, *, at_most: int | None = None, at_least: int | None = None
    ) -> None:
        super().__init__(threshold=threshold, at_most=at_most, at_least=at_least)

    def forward(self, scores: Tensor, *, mask: Tensor | None = None, shard: ClassShard | None = None) -> Decoded:
        """Return the lists of each row."""
        decoded: Decoded = self._call(scores, mask=mask, shard=shard)
        return decoded
