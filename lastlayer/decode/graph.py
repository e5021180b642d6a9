"""Scene graphs: the best relations of an image from the scores of its pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from lastlayer import _check
from lastlayer._module import FunctionModule
from lastlayer.decode.top_k import Decoded, whole


def decode_graph(
    scores: Tensor,
    pairs: Tensor,
    k: int = 100,
    *,
    constrained: bool = True,
    ptr: Tensor | None = None,
    object_scores: Tensor | None = None,
    background: int | None = None,
    mask: Tensor | None = None,
) -> Decoded:
    r"""Choose the `k` best relations (subject, object, predicate) of each image.

    If constrained, a pair has one relation, its best predicate, and pairs are ranked by it. If unconstrained, all
    predicates of all pairs are ranked together. The score of a relation is that of its predicate times the scores of
    its two objects. Ties go to the first pair, then to the lowest predicate. The two ways give very different recall
    and must not be mixed in one table.

    Args:
        scores: Scores of the predicates of each pair, probabilities if `object_scores` are given. Shape
            ``(..., n_pairs, n_predicates)``, or ``(all pairs, n_predicates)`` with `ptr`. ``-inf`` and nan are never
            chosen.
        pairs: Subject and object of each pair, integers, shape ``(..., n_pairs, 2)`` (it may lack batch dimensions).
            They are returned as they are, so box numbers may count within the image or over all images. A pair with
            -1 is padding, and never chosen.
        k: The number of relations per image.
        constrained: Whether a pair has one predicate, or any number.
        ptr: For images of different sizes: image i has the pairs from ``ptr[i]`` up to ``ptr[i + 1]``, so shape
            ``(n_images + 1,)``, from 0 to the number of pairs.
        object_scores: One score per object, shape ``(n_objects,)``, looked up by the numbers in `pairs`.
        background: The column that means "no relation", never chosen; predicates keep their column's number.
        mask: Boolean, True where a relation may be chosen; broadcasts to `scores` (use ``mask[:, None]`` for pairs).

    Returns:
        Relations of shape ``(..., k, 3)``, or ``(n_images, k, 3)`` with `ptr`; best first, -1 where an image has no
        more. Scores of shape ``(..., k)``, ``-inf`` there.

    Example:
        >>> scores = torch.tensor([[0.5, 0.4], [0.1, 0.3]])
        >>> pairs = torch.tensor([[0, 1], [1, 0]])
        >>> decode_graph(scores, pairs, 2).index
        tensor([[0, 1, 0],
                [1, 0, 1]])
        >>> decode_graph(scores, pairs, 2, constrained=False).index
        tensor([[0, 1, 0],
                [0, 1, 1]])
    """
    op = "decode_graph"
    scores, pairs = _entered(op, scores, pairs, ptr)
    width = whole(op, "k", k)
    n_pairs, n = scores.shape[-2:]
    batch = scores.shape[:-2]
    x = scores if object_scores is None else scores * _weights(op, object_scores, pairs)
    out = ~_allowed(op, x, _check.mask(op, mask, scores), background) | (pairs < 0).any(-1, keepdim=True)
    rows = batch.numel() * n_pairs
    x, pairs = x.masked_fill(out, -torch.inf).reshape(rows, n), pairs.reshape(rows, 2)
    if ptr is None:
        n_images = batch.numel()
        image = torch.arange(n_images, device=x.device).repeat_interleave(n_pairs)
    else:
        n_images, batch = ptr.shape[0] - 1, torch.Size([ptr.shape[0] - 1])
        _covers(op, ptr, n_pairs)
        place = torch.arange(n_pairs, device=x.device)
        image = torch.searchsorted(ptr.to(x.device)[1:].contiguous(), place, right=True)
    if constrained and n:
        x, predicate = x.max(-1, keepdim=True)
    else:
        predicate = torch.arange(n, device=x.device).expand(len(x), n)
    pair = torch.arange(len(x), device=x.device).unsqueeze(-1).expand_as(predicate)
    triplets = torch.cat([pairs[pair.flatten()], predicate.reshape(-1, 1)], -1)
    index, score = _ranked(x.flatten(), triplets, image[pair.flatten()], n_images, width)
    return Decoded(index.view(*batch, width, 3), score.view(*batch, width))


def _ranked(x: Tensor, triplets: Tensor, image: Tensor, n_images: int, width: int) -> tuple[Tensor, Tensor]:
    """Rank the candidates of each image, which are in the order of the images, and keep the first `width`."""
    order = x.detach().argsort(descending=True, stable=True)
    order = order[image[order].argsort(stable=True)]
    x, triplets, image = x[order], triplets[order], image[order]
    first = torch.searchsorted(image, torch.arange(n_images, device=x.device))
    rank = torch.arange(len(x), device=x.device) - first[image] if n_images else image
    kept = (rank < width) & (x > -torch.inf)
    # What is not kept goes to a last row, which is cut off.
    place = torch.where(kept, image * width + rank, n_images * width)
    index = torch.full((n_images * width + 1, 3), -1, dtype=torch.int64, device=x.device)
    score = torch.full((n_images * width + 1,), -torch.inf, dtype=x.dtype, device=x.device)
    index = index.index_copy(0, place, triplets)
    return index[:-1], score.index_copy(0, place, x)[:-1]


def _entered(op: str, scores: Tensor, pairs: Tensor, ptr: Tensor | None) -> tuple[Tensor, Tensor]:
    scores = _check.logits(op, scores, "scores")
    if scores.ndim < 2 or (ptr is not None and scores.ndim != 2):
        shape = "(all pairs, n_predicates) with `ptr`" if ptr is not None else "(..., n_pairs, n_predicates)"
        raise ValueError(f"{op}: `scores` must have shape {shape}, got {tuple(scores.shape)}.")
    for name, value in (("pairs", pairs), ("ptr", ptr)):
        if value is not None:
            integers(op, name, value)
    try:
        wide = pairs.expand(*scores.shape[:-1], 2)
    except RuntimeError:
        raise ValueError(
            f"{op}: `pairs` must hold a subject and an object for each pair, shape {(*scores.shape[:-1], 2)}, "
            f"got shape {tuple(pairs.shape)}."
        ) from None
    if ptr is not None and (ptr.ndim != 1 or len(ptr) < 1):
        raise ValueError(f"{op}: `ptr` must have shape (n_images + 1,), got {tuple(ptr.shape)}.")
    return scores, wide.long()


def _covers(op: str, ptr: Tensor, n_pairs: int) -> None:
    """Check the ends of `ptr` where reading them costs nothing: on the CPU, outside of traces."""
    if ptr.device.type == "cpu" and not torch.compiler.is_compiling():
        ends = [int(ptr[0]), int(ptr[-1])]
        if ends != [0, n_pairs]:
            raise ValueError(f"{op}: `ptr` must go from 0 to the {n_pairs} pairs, got {ends[0]} to {ends[1]}.")


def integers(op: str, name: str, value: Tensor) -> Tensor:
    """Check a tensor of an integer dtype."""
    if not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{op}: `{name}` must be a tensor of an integer dtype, got {got}.")
    return value


def _weights(op: str, object_scores: Tensor, pairs: Tensor) -> Tensor:
    object_scores = _check.logits(op, object_scores, "object_scores")
    if object_scores.ndim != 1:
        raise ValueError(f"{op}: `object_scores` must have shape (n_objects,), got {tuple(object_scores.shape)}.")
    n = len(object_scores)
    _check.below(op, "pairs", pairs, n, "objects below n_objects", "Objects are rows of `object_scores`.")
    if n == 0:
        return object_scores.new_ones((*pairs.shape[:-1], 1))
    return object_scores[pairs.clamp(min=0)].prod(-1, keepdim=True)


def _allowed(op: str, x: Tensor, mask: Tensor | None, background: int | None) -> Tensor:
    allowed = ~x.isnan() if mask is None else mask & ~x.isnan()
    if background is None:
        return allowed
    n, background = x.shape[-1], _check.plain(background)
    if isinstance(background, bool) or not isinstance(background, int) or not -n <= background < n:
        raise ValueError(f"{op}: `background` must be a column of `scores`, {-n} to {n - 1}, got {background!r}.")
    return allowed & (torch.arange(n, device=x.device) != background % n)


class DecodeGraph(FunctionModule):
    """Module form of :func:`decode_graph`, which documents the arguments; it takes scores and pairs."""

    function = staticmethod(decode_graph)

    def __init__(self, k: int = 100, *, constrained: bool = True, background: int | None = None) -> None:
        super().__init__(k=k, constrained=constrained, background=background)

    def forward(
        self,
        scores: Tensor,
        pairs: Tensor,
        *,
        ptr: Tensor | None = None,
        object_scores: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Decoded:
        """Return the lists of each image."""
        decoded: Decoded = self._call(scores, pairs, ptr=ptr, object_scores=object_scores, mask=mask)
        return decoded
