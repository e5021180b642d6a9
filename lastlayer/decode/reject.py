"""Rows without labels: reject a row by its confidence, its distance or its log-density."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from lastlayer import _check
from lastlayer._module import FunctionModule
from lastlayer.decode.top_k import Decoded, decode_top_k, usable
from lastlayer.shard import ClassShard, reduce

Evidence = Literal["confidence", "distance", "log_density"]


def decode_reject(
    scores: Tensor,
    threshold: float | Tensor,
    *,
    k: float | Tensor | Literal["auto"] = 1,
    by: Evidence = "confidence",
    values: Tensor | None = None,
    at_most: int | None = None,
    mask: Tensor | None = None,
    shard: ClassShard | None = None,
) -> Decoded:
    r"""Choose the `k` best classes of a row, or none where the row resembles no known class.

    A row is rejected if its evidence is below the threshold: the largest score (``"confidence"``) or a log-density
    (``"log_density"``). For ``"distance"`` it is rejected if its distance is above the threshold. Log-densities and
    distances are given as `values`. Without them, the distance is minus the largest score, which suits scores that are
    negative distances to prototypes, and the log-density is :math:`\log\sum_i e^{s_i}`, that of the logits up to a
    constant. A row at the threshold is kept; a row whose evidence is nan is rejected.

    Args:
        scores: Shape ``(..., n_classes)``.
        threshold: A number, or a tensor that broadcasts to the batch shape; see :func:`tune_reject`.
        k: The number of classes of a row that is kept, as in :func:`decode_top_k`.
        by: ``"confidence"``, ``"distance"`` or ``"log_density"``.
        values: The evidence of each row, of the batch shape, if it is not to be computed from the scores.
        at_most: As in :func:`decode_top_k`.
        mask: Boolean, True where a class may be chosen, and counts as evidence.
        shard: This rank's slice, when the classes are split over processes, as in :func:`decode_top_k`; the evidence
            is that of the classes of all ranks.

    Returns:
        Lists as from :func:`decode_top_k`; those of rejected rows hold only -1.

    Example:
        >>> decode_reject(torch.tensor([[0.9, 0.1], [0.5, 0.5]]), 0.6).index
        tensor([[ 0],
                [-1]])
    """
    op = "decode_reject"
    scores = _check.logits(op, scores, "scores")
    decoded = decode_top_k(scores, k, at_most=at_most, mask=mask, shard=shard)
    evidence = _evidence(op, scores, by, values, mask, shard)
    level = _level(op, threshold, evidence)
    kept = (evidence >= (-level if by == "distance" else level)).unsqueeze(-1)
    return Decoded(torch.where(kept, decoded.index, -1), torch.where(kept, decoded.score, -torch.inf))


def tune_reject(
    scores: Tensor,
    rate: float,
    *,
    by: Evidence = "confidence",
    values: Tensor | None = None,
    mask: Tensor | None = None,
    shard: ClassShard | None = None,
) -> Tensor:
    """Choose the threshold at which :func:`decode_reject` rejects a wanted share of held-out rows.

    Give rows that should be kept, and the share of them that may be lost, such as 0.05. The share is never exceeded:
    equal values at the border are all kept.

    Args:
        scores: Held-out scores, shape ``(..., n_classes)``, at least one row.
        rate: The share of rows to reject, 0 to 1.
        by: As in :func:`decode_reject`.
        values: As in :func:`decode_reject`.
        mask: As in :func:`decode_reject`.
        shard: As in :func:`decode_reject`.

    Returns:
        The threshold, a tensor of shape ``()``.

    Example:
        >>> scores = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.3, 0.7]])
        >>> tune_reject(scores, 0.25)
        tensor(0.7000)
    """
    op = "tune_reject"
    scores = _check.logits(op, scores, "scores")
    rate = _check.number(op, "rate", rate, 0, 1)
    evidence = _evidence(op, scores, by, values, mask, shard).flatten()
    if evidence.numel() == 0:
        raise ValueError(f"{op}: `scores` must hold at least one row, got shape {tuple(scores.shape)}.")
    rows = torch.where(evidence.isnan(), -torch.inf, evidence).sort().values
    n_rejected = math.floor(rate * len(rows) + 1e-9)
    level = rows[n_rejected] if n_rejected < len(rows) else rows.new_full((), torch.inf)
    return -level if by == "distance" else level


def _evidence(
    op: str, scores: Tensor, by: Evidence, values: Tensor | None, mask: Tensor | None, shard: ClassShard | None
) -> Tensor:
    """Return the evidence of each row: the higher, the more the row resembles a known class."""
    _check.choice(op, "by", by, ("confidence", "distance", "log_density"))
    if values is not None:
        values = values if isinstance(values, Tensor) and values.ndim == 0 else _check.logits(op, values, "values")
        if values.shape != scores.shape[:-1]:
            raise ValueError(
                f"{op}: `values` must hold one number per row, shape {tuple(scores.shape[:-1])}, "
                f"got shape {tuple(values.shape)}."
            )
        values = values.detach()
        return -values if by == "distance" else values
    x = usable(scores, _check.mask(op, mask, scores)).to(_check.work_dtype(scores))
    x = torch.where(x.isnan(), -torch.inf, x)
    peak = reduce(x, "max", shard)
    if by == "log_density":
        peak = torch.where(peak.isfinite(), peak, 0)
        return (peak + reduce((x - peak).exp(), "sum", shard).log()).squeeze(-1)
    return peak.squeeze(-1)


def _level(op: str, threshold: float | Tensor, evidence: Tensor) -> Tensor:
    if not isinstance(threshold, Tensor):
        level = _check.number(op, "threshold", threshold)
        return _check.constant(level, evidence.dtype, evidence.device).expand_as(evidence)
    try:
        return threshold.detach().to(evidence.device).expand(evidence.shape)
    except RuntimeError:
        raise ValueError(
            f"{op}: `threshold` must broadcast to the batch shape {tuple(evidence.shape)}, "
            f"got shape {tuple(threshold.shape)}."
        ) from None


class DecodeReject(FunctionModule):
    """Module form of :func:`decode_reject`, which documents the arguments."""

    function = staticmethod(decode_reject)

    def __init__(
        self,
        threshold: float | Tensor,
        *,
        k: int | Literal["auto"] = 1,
        by: Evidence = "confidence",
        at_most: int | None = None,
    ) -> None:
        super().__init__(threshold=threshold, k=k, by=by, at_most=at_most)

    def forward(
        self,
        scores: Tensor,
        *,
        values: Tensor | None = None,
        mask: Tensor | None = None,
        shard: ClassShard | None = None,
    ) -> Decoded:
        """Return the lists of each row."""
        decoded: Decoded = self._call(scores, values=values, mask=mask, shard=shard)
        return decoded
