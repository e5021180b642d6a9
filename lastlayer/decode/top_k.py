"""The k best classes of each row: exact, with ties by the lowest index."""

from __future__ import annotations

import numbers
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lastlayer import _check, _ranked, shard
from lastlayer._module import FunctionModule
from lastlayer.shard import ClassShard, local_part, unwrap


class Decoded(NamedTuple):
    """Label sets as lists: the chosen classes, -1 after the end of a list, and their scores, ``-inf`` there."""

    index: Tensor  # type: ignore[assignment]  # hides tuple.index, which has no use here
    score: Tensor


def decode_top_k(
    scores: Tensor,
    k: float | Tensor | Literal["auto"] = "auto",
    *,
    at_most: int | None = None,
    mask: Tensor | None = None,
    shard: ClassShard | None = None,
) -> Decoded:
    r"""Choose the `k` best classes of each row.

    The best come first. Of equal scores the lowest index comes first, and is kept where `k` cuts a tie. With
    ``"auto"`` the number of classes is the sum of the probabilities of the row, rounded (a half to the even number, as
    in Python). This suits probabilities whose sum is a count, such as those of `lml` or of independent labels; it does
    not suit logits. A tensor holds one `k` per row, such as predicted counts, and is rounded in the same way; numbers
    below 0 and nan count as 0.

    Args:
        scores: Shape ``(..., n_classes)``. ``-inf`` and nan are never chosen.
        k: A whole number; a tensor that broadcasts to the batch shape; or ``"auto"``.
        at_most: Limits a `k` that varies by row, and is then the width of the lists. Without it the width is that of
            the longest list, and the call waits for the GPU to find it.
        mask: Boolean, True where a class may be chosen; broadcasts to the shape of `scores`.
        shard: This rank's slice, when the classes are split over processes. Every rank gets the same lists, of
            classes of all ranks; their scores then have no gradient.

    Returns:
        Indices of shape ``(..., width)``, int64, -1 where a row has no more; scores of the same shape, ``-inf``
        there. The width is `k` if that is a number, even above ``n_classes``.

    Example:
        >>> decode_top_k(torch.tensor([[0.1, 0.9, 0.9], [0.2, 0.7, 0.1]]), 2).index
        tensor([[1, 2],
                [1, 0]])
        >>> decode_top_k(torch.tensor([[0.1, 0.9, 0.9], [0.2, 0.7, 0.1]])).index
        tensor([[ 1,  2],
                [ 1, -1]])
    """
    op = "decode_top_k"
    scores, shard, _ = unwrap(op, scores, shard)
    scores = _check.logits(op, scores, "scores")
    x = usable(scores, _check.mask(op, local_part(mask), scores))
    most = None if at_most is None else whole(op, "at_most", at_most)
    counts = _counts(op, k, x, shard)
    if isinstance(counts, int):
        width = counts if most is None else min(counts, most)
        return choose(x, scores, width, shard)
    return cut(choose(x, scores, longest(op, counts, most), shard), counts)


def longest(op: str, counts: Tensor, at_most: int | None) -> int:
    """Return the width of lists of the given lengths."""
    if at_most is not None:
        return at_most
    if not _ranked.readable(counts):
        raise ValueError(
            f"{op}: `at_most` must be given where the lengths of lists cannot be read (meta tensors, traces, vmap), "
            "got None. Pass the largest number of classes per row."
        )
    return int(counts.max()) if counts.numel() else 0


def _counts(op: str, k: float | Tensor | str, x: Tensor, part: ClassShard | None) -> int | Tensor:
    """Return the size of each list: a number for all, or a tensor of the batch shape."""
    if isinstance(k, str):
        _check.choice(op, "k", k, ("auto",))
        values = torch.where(x > -torch.inf, x, 0).to(_check.work_dtype(x))
        k = shard.reduce(values, "sum", part).squeeze(-1)
    if not isinstance(k, Tensor):
        return whole(op, "k", k)
    n = _all_classes(x, part)
    k = _check.cardinality(op, k.detach(), x, part).squeeze(-1)
    return k.nan_to_num(0).round().clamp(0, n).long()


def _all_classes(x: Tensor, part: ClassShard | None) -> int:
    if part is None:
        return x.shape[-1]
    local = torch.tensor([x.shape[-1]], dtype=torch.float64, device=x.device)
    return int(shard.reduce(local, "sum", part))


def whole(op: str, name: str, value: float) -> int:
    """Check a whole number that is not negative."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{op}: `{name}` must be a whole number, got {type(value).__name__}.")
    if not 0 <= value < float("inf") or value != int(value):
        raise ValueError(f"{op}: `{name}` must be a whole number of at least 0, got {value}. Round or raise it.")
    return int(value)


def usable(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Return the scores without gradient, ``-inf`` where the mask rules a class out."""
    x = scores.detach()
    return x if mask is None else torch.where(mask, x, -torch.inf)


def choose(x: Tensor, scores: Tensor, width: int, part: ClassShard | None = None) -> Decoded:
    """Take the `width` best entries of `x`, with the scores at their places."""
    value, index = _ranked.top_k(x, width)
    if part is None:
        return Decoded(index, _at(scores, index))
    value = shard.gather(value, part)
    index = shard.gather(torch.where(index < 0, -1, index + part.start), part)
    value, index = _ranked.ordered(value, index, width)
    return Decoded(index, value)


def _at(scores: Tensor, index: Tensor) -> Tensor:
    """Return the scores at the given places, ``-inf`` where there is none."""
    if scores.shape[-1] == 0:
        return torch.full(index.shape, -torch.inf, dtype=scores.dtype, device=scores.device)
    return torch.where(index >= 0, scores.gather(-1, index.clamp(min=0)), -torch.inf)


def cut(decoded: Decoded, counts: Tensor) -> Decoded:
    """End each list after its own number of entries."""
    inside = torch.arange(decoded.index.shape[-1], device=counts.device) < counts.unsqueeze(-1)
    return Decoded(torch.where(inside, decoded.index, -1), torch.where(inside, decoded.score, -torch.inf))


class DecodeTopK(FunctionModule):
    """Module form of :func:`decode_top_k`, which documents the arguments."""

    function = staticmethod(decode_top_k)

    def __init__(self, k: int | Tensor | Literal["auto"] = "auto", *, at_most: int | None = None) -> None:
        super().__init__(k=k, at_most=at_most)

    def forward(self, scores: Tensor, *, mask: Tensor | None = None, shard: ClassShard | None = None) -> Decoded:
        """Return the lists of each row."""
        decoded: Decoded = self._call(scores, mask=mask, shard=shard)
        return decoded
