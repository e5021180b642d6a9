"""A linear layer and the LML loss in one: rows x classes never exists as a whole, on one device or on many."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lastlayer import _check
from lastlayer._check import Labels, Reduction, Target
from lastlayer._threshold import dispatch, search
from lastlayer._threshold.autograd import FirstOnly
from lastlayer.loss import _rows
from lastlayer.loss._sampled import draw, sampled
from lastlayer.loss._scan import (
    FIRST_ONLY,
    PASSES,
    REACH,
    STEP,
    UNSEEN,
    Held,
    Layer,
    Rows,
    Scan,
    absence,
    absence_slope,
    add_unseen,
    find,
    list_room,
    log1p,
    log_mass_of,
    table,
    tile,
    times,
)
from lastlayer.loss._whole import whole_linear_loss
from lastlayer.loss.lml import lml_loss
from lastlayer.project.lml import apply
from lastlayer.shard import ClassShard, Thresholds, local_part, reduce, spread, unwrap

_WIDE_SUMS = hasattr(torch.ops.aten.addmm, "dtype_out")  # torch adds a product of 16 bits to a sum of 32
_CLASSES = 1 << 31  # of all ranks, at most; this rank does not know how many
_AHEAD = 6  # blocks whose gradient a GPU begins with, at most, while the host ends the forward pass
# Of a turn of rows: bytes of its logits, at most, its rows, at least, what divides their number, and the most turns.
# A turn reads and writes the gradient of the weight, which takes as long as the logits of some 300 rows, and rounds it
# once more, so that few turns are as exact as one.
_TURN, _FEWEST, _EVEN, _TURNS = 1 << 28, 512, 128, 4


@whole_linear_loss
def linear_lml_loss(
    features: Tensor,
    weight: Tensor,
    target: Target,
    k: float | Tensor,
    *,
    bias: Tensor | None = None,
    observed: float = 0.0,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    negatives: int | tuple[Tensor, Tensor] | None = None,
    generator: torch.Generator | None = None,
    filter: float = 0.0,
    sample_weight: Tensor | None = None,
    shard: ClassShard | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Compute ``lml_loss(F.linear(features, weight, bias), target, k)`` without ever holding the logits.

    .. math:: -\sum_{j \in Y} \log \sigma(w_j^\top f + b_j + \nu), \qquad \sum_j \sigma(w_j^\top f + b_j + \nu) = k

    Blocks of classes are computed, used and dropped, and computed once more in the backward pass. For each row one scan
    keeps the largest logits and power sums of the rest; the threshold and the loss follow from these to rounding. A row
    for which they do not suffice (as a rule, `k` above about 1 % of the classes) is solved from all its logits, a few
    rows at a time.

    Memory beyond the arguments and their gradients is one block and a few thousand numbers per row. If the weight needs
    a gradient, the memory for it is taken in the forward pass already: until the gradient is written there, it holds as
    many logits as fit (all of them if there are fewer rows than features), which are then not computed again.
    With many more rows than features, in bfloat16 on a GPU, the other rows are processed in turns with up to 256 MB of
    logits each. The gradients of a reduced loss are then computed in the forward pass.

    In float32, tensor cores of an H100 or H200 compute the logits from three bfloat16 parts of each number, faster and
    with a smaller error than torch's own products; if TF32 is allowed, torch computes them.

    On a GPU a flag is read back, so the call cannot be captured in a CUDA graph. Logits that fit in one block (128 MB
    on a GPU, 1 MB on a CPU) are passed to :func:`~lastlayer.lml_loss`.

    Args:
        features: The inputs of the layer, shape ``(*batch, in_features)``.
        weight: Shape ``(n_classes, in_features)``; with `shard`, the rows of this rank's classes.
        target: One class per row (``batch``), index lists padded with -1 (``(*batch, m)``), or multi-hot
            ``(*batch, n_classes)``, which is turned into index lists: a soft label counts as a whole one
            (:func:`~lastlayer.lml_loss` weighs it).
        k: The number of labels of a row, observed or not; a number, or a tensor that broadcasts to ``batch``.
        bias: Shape ``(n_classes,)``; ``-inf`` rules a class out.
        observed: The probability that a label is observed, as in :func:`~lastlayer.lml_loss`.
        temperature: Divides the logits; a number, or a tensor that broadcasts to ``batch``.
        mask: Boolean, True where a class takes part; broadcasts to ``(*batch, n_classes)``.
        negatives: ``None`` sums over all classes. A number draws that many classes (of this rank) uniformly and without
            replacement, the same for all rows. A pair is a sample of your own: class ids (of this rank, from 0) and the
            probability of each to be drawn. The labels of a row count in full; any other sampled class counts as
            ``1 / probability`` classes, so that the sums over classes are right in expectation. Threshold and loss are
            not linear in these sums and have a bias of the order of one over the number drawn. The sampled logits are
            held in memory; classes that were not drawn have gradient 0.
        generator: The source of randomness; with `shard`, each rank draws from its own classes.
        filter: Leave classes out of the backward pass where, in every row, the derivative of that row's loss by the
            logit is smaller than this. Each such derivative is then taken as 0; the loss and all others are exact. For
            trained weights 2**-12, which bfloat16 rounds away next to the derivative of a label, saves most of the
            work. Rows that are still undecided have many classes above it, and are computed in full. The default
            computes all.
        sample_weight: One weight per row, shape ``batch``; the mean is weighted by it.
        shard: This rank's slice, when the classes are split over processes; index targets hold global classes.
        reduction: ``"none"`` is one loss per row; ``"mean"`` is over the rows that contribute, 0 if there is none.

    Returns:
        The loss, of the dtype that the logits would have, as in :func:`~lastlayer.lml_loss`. If the logits do not fit
        in one block, only first derivatives are available.

    Example:
        >>> features, weight = torch.eye(2), torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.0, 3.0], [-1.0, 0.0]])
        >>> linear_lml_loss(features, weight, torch.tensor([[0, 1], [2, -1]]), k=2)
        tensor(0.3801)
    """
    op = "linear_lml_loss"
    weight, shard, _ = unwrap(op, weight, shard, 0, k)
    bias = local_part(bias)
    _check_layer(op, features, weight, bias, shard)
    _check.choice(op, "reduction", reduction, ("none", "mean", "sum"))
    rho = _check.number(op, "observed", observed, 0, 1)
    least = _check.number(op, "filter", filter, 0, 1)
    if least > 0 and negatives is not None:
        raise ValueError(f"{op}: `filter` must be 0 with `negatives`, got {filter}. A sample has few classes as it is.")
    batch, n = features.shape[:-1], weight.shape[0]
    rows = batch.numel()
    if sample_weight is not None:  # nan in the features of a row that is left out would reach the gradient of `weight`
        like = features.new_empty((), dtype=_check.work_dtype(features)).expand(features.shape)
        kept = _rows.row_weight(op, sample_weight, like)
        features = features if kept is None else _rows.in_rows(features, kept.expand(batch) != 0)
    dtype = _dot_dtype(features)
    shape = torch.empty((), dtype=dtype, device=features.device).expand(*batch, n)
    cardinality = _check.cardinality(op, k, shape, shard) if isinstance(k, Tensor) else None
    if cardinality is None:  # it becomes a tensor once a GPU has work
        _check.cardinality_of_all(op, k, n, n if shard is None else math.inf)
    mask = _check.mask(op, local_part(mask), shape)
    divisor = _check.temperature(op, temperature)
    if rows * n <= tile(shape) and shard is None and negatives is None:
        labels = _check.target(op, local_part(target), shape, shard)
        x = F.linear(features.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        options: dict[str, Any] = {"observed": rho, "temperature": temperature, "mask": mask, "reduction": reduction}
        if labels.dense is not None and labels.dense.is_floating_point():
            target = labels.dense.sign()
        return lml_loss(x, target, k, sample_weight=sample_weight, **options)
    if isinstance(divisor, Tensor):
        work = torch.promote_types(dtype, torch.float32)
        divisor = _check.temperatures(op, spread(divisor, shard), batch, work).reshape(rows, 1)
    features = spread(features, shard).reshape(rows, features.shape[-1])
    mask = None if mask is None else mask.reshape(rows, n)
    limit, scan, turn = _largest_rank(k, n if shard is None else _CLASSES), None, 0
    if negatives is None:  # a GPU computes the first logits while the host looks at the labels
        holds = torch.is_grad_enabled() and weight.requires_grad
        with torch.no_grad(), _check.without_autocast(features.device):
            layer = Layer(features, weight, bias, dtype, divisor, mask)
            if holds and least == 0 and shard is None and sample_weight is None and reduction != "none":
                turn = _rows_of_a_turn(layer, limit, k)
            scan = Scan(_first_rows(layer, turn), limit, least > 0, _held(_first_rows(layer, turn), holds))
    if cardinality is None:
        cardinality = _check.cardinality(op, k, shape, shard)
    kernels = None if scan is None else scan.layer.kernels
    labels = _check.target(op, local_part(target), shape, shard, distinct=kernels is None)
    index = _index_lists(labels, lambda dense: dense > 0)
    if kernels is not None and labels.dense is None:
        index = kernels.distinct(index)
    width = index.shape[-1]
    if rho > 0 and labels.dense is not None:
        index = torch.cat([index, _index_lists(labels, lambda dense: dense < 0)], -1)
    index = index.reshape(rows, index.shape[-1]).contiguous()
    known = _has_known(labels, shard).view(rows) if rho > 0 else None
    arguments = (features, weight, bias, cardinality.reshape(rows, 1), divisor)
    if scan is not None:
        result_dtype = dtype if sample_weight is None and not _check.autocast(features.device) else cardinality.dtype
        inner = reduction if sample_weight is None else "none"
        options = {"labels": width, "rho": rho, "limit": limit, "known": known}
        options |= {"turn": turn} if turn else {"shard": shard, "least": least}
        function: Any = _InTurns if turn else _LinearLML
        result: tuple[Tensor, Tensor] = function.apply(*arguments, scan, index, options, inner, result_dtype)
        loss, contributes = result
        if sample_weight is None:
            return loss if inner != "none" else loss.view(batch)
    else:
        drawn, counts_for = draw(op, negatives, n, features.device, generator, 0 if shard is None else shard.start)
        loss, count = sampled(*arguments, mask, index, width, rho, dtype, drawn, counts_for, shard)
        contributes = count > 0 if known is None else known | (count > 0)
        loss = torch.where(contributes, loss, 0)
    return _rows.leave(op, loss.view(batch), reduction, contributes.view(batch), dtype, sample_weight)


def _has_known(labels: Labels, shard: ClassShard | None) -> Tensor:
    """Return which rows have a known class."""
    if labels.dense is None:
        assert labels.index is not None
        return torch.ones(labels.index.shape[:-1], dtype=torch.bool, device=labels.index.device)
    known = (labels.dense >= 0).any(-1, keepdim=True)
    return reduce(known.float(), "sum", shard).squeeze(-1) > 0


def _check_layer(op: str, features: Any, weight: Any, bias: Any, shard: ClassShard | None) -> None:
    _check.logits(op, features, "features")
    _check.logits(op, weight, "weight")
    if weight.ndim != 2 or weight.shape[1] != features.shape[-1]:
        raise ValueError(
            f"{op}: `weight` must have shape (n_classes, {features.shape[-1]}), got {tuple(weight.shape)}. "
            "Its rows are classes, as in torch.nn.Linear."
        )
    if shard is not None and weight.shape[0] != shard.size:
        raise ValueError(
            f"{op}: `weight` must hold the {shard.size} classes of `shard`, got {weight.shape[0]} rows. "
            "Pass this rank's rows."
        )
    if bias is not None and (not isinstance(bias, Tensor) or bias.shape != weight.shape[:1]):
        got = tuple(bias.shape) if isinstance(bias, Tensor) else type(bias).__name__
        raise ValueError(f"{op}: `bias` must have shape ({weight.shape[0]},), got {got}.")
    if weight.dtype != features.dtype and not _check.autocast(features.device):
        raise TypeError(
            f"{op}: `weight` must be of the dtype of `features`, {features.dtype}, got {weight.dtype}. "
            "Convert one, or use torch.autocast."
        )


def _dot_dtype(features: Tensor) -> torch.dtype:
    """The dtype in which the logits are computed, as F.linear would."""
    if _check.autocast(features.device) and features.dtype != torch.float64:
        return torch.get_autocast_dtype(features.device.type)
    return features.dtype


def _index_lists(labels: Labels, wanted: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the labels as index lists; a dense target is large itself, so reading its largest count costs little."""
    if labels.index is not None:
        return labels.index
    assert labels.dense is not None
    marks = wanted(labels.dense).to(torch.uint8)
    most = int(marks.sum(-1).max()) if marks.numel() else 0
    values, index = marks.topk(most, -1)
    return torch.where(values > 0, index, -1)


def _largest_rank(k: float | Tensor, n: int) -> int:
    """Return the largest rank of a logit that the start needs; a `k` beyond `n` needs none. A tensor's values are read.

    An infeasible `k` must not count: the lists would have no room for the others, or less than none.
    """
    if isinstance(k, Tensor):
        k = k.detach().double()
        k = float(torch.where((k >= 0) & (k <= n), k, 0).max()) if k.numel() else 0.0
    return math.floor(float(k) if k <= n else 0) + 1


def _solve_lost(layer: Layer, lost: Tensor, k: Tensor, rows: Rows, shard: ClassShard | None) -> None:
    """Solve the rows that the search did not solve, from all their logits, a few rows at a time."""
    if not bool(lost.any()):
        return
    which = lost.squeeze(-1).nonzero().squeeze(-1)
    shard = None if shard is None else shard.starting_at(Thresholds())
    most = int(reduce(k.new_full((1, 1), layer.n), "max", shard))  # the same pieces on every rank
    for part in which.split(max(1, tile(k) // 4 // max(most, 1))):  # there are a dozen temporaries
        x = layer.of_rows(part).logits(slice(None))
        impl = dispatch.choose("linear_lml_loss", "auto", x, shard)
        _, center, delta = apply(dispatch.Problem(x, k[part], None, 1.0, shard, impl), "nu")
        z = search.points(x.to(layer.work), center, delta)
        live = x.isfinite() & delta.isfinite()
        rows.center[part], rows.delta[part] = center, delta
        rows.log_mass[part] = log_mass_of(z, 1.0, shard)
        if rows.rho > 0:
            rows.silent[part] = torch.where(x.isfinite(), absence(z, rows.rho), 0).sum(-1, keepdim=True)
            rows.leak[part] = torch.where(live, absence_slope(z, rows.rho), 0).sum(-1, keepdim=True)


def _said_by_all(rows: Rows, n: Tensor) -> Tensor:
    """Return the sum of :func:`absence` over `n` classes that k takes, except those listed; infinite terms stay."""
    others = n - ((rows.index >= 0) & (rows.labels > -torch.inf)).sum(-1, keepdim=True)
    return times(others, -log1p(-rows.rho))


Leave = Callable[[Tensor, Tensor], Any]  # loss and number of labels per row -> the result
Settled = tuple[Rows, Tensor, Tensor, Any]  # the pull of each row, the slopes at its labels, and the result


def _settle(
    layer: Layer,
    scan: Scan,
    k: Tensor,
    limit: int,
    labels: int,
    rho: float,
    shard: ClassShard | None,
    leave: Leave,
) -> Settled:
    """Find the thresholds and the loss from a scan; the first `labels` entries of an index list are positive."""
    scan.add_up(limit)
    known = None if shard is None else shard.known(k.shape[:-1], layer.work)
    center, delta, log_mass, lost = find(scan, k, limit, shard, known)
    if known is not None and bool(lost.any()):
        center, delta, log_mass, lost = find(scan, k, limit, shard)
    rows = Rows(center.contiguous(), delta.contiguous(), log_mass.contiguous(), scan.index, scan.labels, rho)
    if rho > 0:
        add_unseen(scan, rows)
    _solve_lost(layer, lost, k, rows, shard)
    if shard is not None:
        shard.note(rows.delta - rows.center)
    z = search.points(rows.labels, rows.center, rows.delta)
    held = rows.index >= 0
    live = held & rows.labels.isfinite() & rows.delta.isfinite()
    positive = held & (torch.arange(held.shape[-1], device=held.device) < labels)
    loss = torch.where(positive, -F.logsigmoid(z), 0).sum(-1, keepdim=True)
    toward = torch.where(positive & live, -(-z).sigmoid(), 0)
    pull = -toward.sum(-1, keepdim=True)
    if rho > 0:
        said = torch.where(held & rows.labels.isfinite(), absence(z, rho), 0).sum(-1, keepdim=True)
        n_top = scan.n_top - (held & (rows.labels == torch.inf)).sum(-1, keepdim=True)
        said = (rows.silent - said) + times(n_top, -log1p(-rho))
        loss = loss + torch.where(rows.delta == torch.inf, _said_by_all(rows, scan.n + scan.n_top), said)
        loss = torch.where(rows.delta.isnan(), torch.nan, loss)  # even if no class is left to show it
        leak = torch.where(live, absence_slope(z, rho), 0)
        toward, pull = toward - leak, pull - torch.where(rows.delta.isinf(), 0, rows.leak) + leak.sum(-1, True)
    loss, pull, count = reduce([loss, pull, positive.to(z.dtype)], "sum", shard)
    return rows, pull, toward, leave(loss, count)


def _settle_by_kernels(
    layer: Layer,
    scan: Scan,
    k: Tensor,
    limit: int,
    labels: int,
    rho: float,
    shard: ClassShard | None,
    leave: Leave,
    meanwhile: Callable[..., Callable[[], None]] | None = None,
) -> Settled:
    """Do the same as :func:`_settle` in a few launches, for classes that are not sharded.

    While the host waits, `meanwhile` is called with the result, and what it returns; and once more if that was not the
    last word.
    """
    assert layer.kernels is not None
    assert shard is None
    names = STEP + UNSEEN if rho > 0 else STEP
    series = table(names, scan.terms, rho, layer.work, k.device)
    reach, every = (math.log(REACH[scan.terms]), math.log(0.9 * REACH[scan.terms])), -log1p(-rho)
    kept = (scan.top, scan.fill, scan.floor, scan.sums)
    solution, some_lost = layer.kernels.search(*kept, k, series, limit, reach, PASSES, rho, every)
    center, delta, log_mass, lost, _, silent, leak = solution.unsqueeze(-1)
    rows = Rows(center, delta, log_mass, scan.index, scan.labels, rho)
    rows.silent, rows.leak = silent, leak

    def end() -> tuple[Tensor, Tensor, Any]:
        loss, pull, count, toward = _losses_by_kernels(layer, scan, rows, solution, labels, every)
        return pull, toward, leave(loss, count)

    found = end()
    more = None if meanwhile is None else meanwhile(rows, *found)
    is_set = _soon(some_lost)
    if more is not None:
        more()
    if is_set():
        _solve_lost(layer, lost > 0, k, rows, None)
        found = end()
        if meanwhile is not None:
            meanwhile(rows, *found)
    return rows, *found


def _soon(flag: Tensor) -> Callable[[], bool]:
    """Ask for a flag; what is returned waits for it, but not for what the device has been given to do since."""
    if not flag.is_cuda:
        return lambda: bool(flag)
    copy = torch.empty(flag.shape, dtype=flag.dtype, pin_memory=True).copy_(flag, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(flag.device))

    def wait() -> bool:
        event.synchronize()
        return bool(copy)

    return wait


def _losses_by_kernels(
    layer: Layer, scan: Scan, rows: Rows, solution: Tensor, labels: int, every: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return loss, pull and number of labels of each row, and the slopes at the labels."""
    assert layer.kernels is not None
    rho = rows.rho
    sums, toward = layer.kernels.losses(solution, rows.index, rows.labels, labels, rho, every)
    loss, pull, count = sums.unsqueeze(-1)
    if rho > 0:
        loss = torch.where(rows.delta.isnan(), torch.nan, loss)  # even if no class is left to show it
    if rho == 1:  # where k takes every class, infinite terms cancel in the kernel
        n = scan.sums[..., scan.terms : scan.terms + 2].sum((1, 2)).unsqueeze(-1)
        ruled_out = (rows.index[:, :labels] >= 0) & (rows.labels[:, :labels] == -torch.inf)
        said = torch.where(ruled_out.any(-1, keepdim=True), torch.inf, _said_by_all(rows, n))
        loss = torch.where(rows.delta == torch.inf, said, loss)
    return loss, pull, count, toward


def _left(
    layer: Layer | None, loss: Tensor, count: Tensor, known: Tensor | None, reduction: Reduction, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, reduced, which rows contribute to it, and the share of each; by the kernels of a layer."""
    if layer is not None and known is None and reduction != "none" and dtype != torch.float16:
        assert layer.kernels is not None
        reduced: tuple[Tensor, Tensor, Tensor] = layer.kernels.reduce_rows(loss, count, dtype, reduction == "mean")
        return reduced
    contributes, share = _shares(count, known, reduction, loss.dtype)
    if known is not None:
        loss = torch.where(contributes, loss, 0)
    loss = loss.squeeze(-1) if reduction == "none" else (loss * share).sum()
    return _rows.leave("linear_lml_loss", loss, "none", None, dtype), contributes.squeeze(-1), share


def _shares(count: Tensor, known: Tensor | None, reduction: Reduction, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return which rows contribute to the result, and the share of each."""
    contributes = count > 0  # without a label the loss is 0
    if known is not None:
        contributes = contributes | known.unsqueeze(-1)
    share = contributes.to(dtype)
    if reduction == "mean":
        share = share / share.sum().clamp(min=1)
    return contributes, share


class _LinearLML(torch.autograd.Function):
    """``(features, weight, bias, k, temperature) -> loss``, per row or reduced, and which rows contribute."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        k: Tensor,
        temperature: float | Tensor,
        scan: Scan,
        index: Tensor,
        options: dict[str, Any],
        reduction: Reduction,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        layer, known, least = scan.layer, options.pop("known"), options.pop("least")

        def leave(loss: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return _left(layer if by_kernels else None, loss, count, known, reduction, dtype)

        begun: list[_Gradients] = []
        few: tuple[Tensor | None, ...] = (None, None)

        def meanwhile(
            rows: Rows, pull: Tensor, toward: Tensor, left: tuple[Tensor, Tensor, Tensor]
        ) -> Callable[[], None]:
            nonlocal few
            if scan.classes is not None:
                few = _few_classes(layer, scan, rows, pull, least)
                ctx.some_undecided = _soon(few[0].any())
                return lambda: None
            if begun:  # for another result
                begun.clear()
                scan.kept.filled = False
                return lambda: None
            wants_features, wants_weight, wants_bias, _, wants_temperature = ctx.needs_input_grad[:5]
            blocks = min(len(scan.kept.blocks.waiting), _AHEAD)
            fits = blocks > 1 and layer.dtype != torch.float16  # which might underflow
            if not (fits and wants_weight and reduction != "none") or wants_temperature:
                return lambda: None
            wanted = _Wanted(wants_features, wants_weight, wants_bias, wants_temperature)
            begun.append(_Gradients(layer, rows, wanted, scan.kept))
            upstream = _upstream(left[2], pull, toward, temperature)
            begun[0].add(upstream, 1)
            return lambda: begun[0].add(upstream, blocks - 1)

        by_kernels = layer.kernels is not None and options["shard"] is None
        with _check.without_autocast(features.device):
            scan.run(index)
            settle = functools.partial(_settle_by_kernels, meanwhile=meanwhile) if by_kernels else _settle
            found = settle(layer, scan, k, leave=leave, **options)
        rows, pull, toward, (loss, contributes, share) = found
        ctx.begun = begun
        ctx.held = None if scan.kept.gradient is None else scan.kept
        scale = temperature if isinstance(temperature, Tensor) else None
        if scan.classes is not None and not by_kernels:
            meanwhile(rows, pull, toward, found[3])
        saved = (rows.center, rows.delta, rows.log_mass, rows.labels, pull, toward, share, *few)
        ctx.save_for_backward(features, weight, bias, layer.mask, scale, index, *saved)
        ctx.dtype, ctx.rho, ctx.temperature = layer.dtype, rows.rho, None if scale is not None else temperature
        ctx.mark_non_differentiable(contributes)
        ctx.set_materialize_grads(False)
        return loss, contributes

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> Any:
        if grad is None:
            return (None,) * 10
        gradients = _first_derivatives(ctx, grad.detach())
        if torch.is_grad_enabled():
            gradients = FirstOnly.apply(FIRST_ONLY, 3, grad, *ctx.saved_tensors[:2], *gradients)
        return (*gradients, *(None,) * 5)


class _InTurns(torch.autograd.Function):
    """As :class:`_LinearLML`, of a reduced loss whose gradients are computed with it, as rows take turns."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        k: Tensor,
        temperature: float,
        scan: Scan,
        index: Tensor,
        options: dict[str, Any],
        reduction: Reduction,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        wants_features, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        wanted = _Wanted(wants_features, wants_weight, wants_bias, False)
        known, layer = options.pop("known"), Layer(features, weight, bias, scan.layer.dtype, temperature)
        ctx.save_for_backward(features, weight, bias, k, index, known)
        ctx.again = (layer.dtype, temperature, wanted, options, reduction)
        with _check.without_autocast(features.device):
            loss, count, ctx.found = _in_turns(layer, scan, k, index, known, wanted, reduction, **options)
            result, contributes, _ = _left(layer, loss, count, known, reduction, dtype)
        ctx.mark_non_differentiable(contributes)
        ctx.set_materialize_grads(False)
        return result, contributes

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> Any:
        if grad is None:
            return (None,) * 10
        features, weight, bias, k, index, known = ctx.saved_tensors
        dtype, temperature, wanted, options, reduction = ctx.again
        found, ctx.found = ctx.found, None
        with torch.no_grad(), _check.without_autocast(features.device):
            layer = Layer(features, weight, bias, dtype, temperature)
            if found is None:  # a second backward pass
                first = _first_rows(layer, options["turn"])
                scan = Scan(first, options["limit"], held=_held(first, True))
                *_, found = _in_turns(layer, scan, k, index, known, wanted, reduction, **options)
            gradients: list[Tensor | None] = []
            for value, given in zip(found[:3], (features, weight, bias), strict=True):
                if value is not None:
                    scale = dispatch.scaled if layer.kernels is None else layer.kernels.scale_rows_
                    value = scale(value, grad)
                gradients.append(None if value is None else value.to(given.dtype))
        if torch.is_grad_enabled():
            gradients = FirstOnly.apply(FIRST_ONLY, 3, grad, features, weight, *gradients)
        return (*gradients, *(None,) * 7)


def _rows_of_a_turn(layer: Layer, limit: int, k: float | Tensor) -> int:
    """Return how many rows take a turn, after the first ones; 0 if none should.

    The memory of the gradient of the weight holds the logits of as many rows as there are features. If there are many
    more rows, the last ones take turns: a few at a time have all their logits computed, and add their part to the
    gradients, so that none of these logits is computed again.
    """
    left = layer.rows - layer.features.shape[1]
    turn = min(_TURN // (max(layer.n, 1) * layer.dtype.itemsize), left) // _EVEN * _EVEN
    ordinary = layer.wide and layer.dtype == torch.bfloat16 and layer.weight.is_contiguous()
    if not ordinary or (isinstance(k, Tensor) and k.requires_grad) or list_room(layer.n, limit) == 0:
        return 0
    return turn if turn >= _FEWEST and layer.features.shape[1] > 0 else 0


def _first_rows(layer: Layer, turn: int) -> Layer:
    """Return the layer for the rows that come before those that take turns."""
    if turn == 0:
        return layer
    turns = min((layer.rows - layer.features.shape[1]) // turn, _TURNS)
    return layer.of_rows(slice(0, layer.rows - turns * turn))


def _in_turns(
    layer: Layer,
    scan: Scan,
    k: Tensor,
    index: Tensor,
    known: Tensor | None,
    wanted: _Wanted,
    reduction: Reduction,
    turn: int,
    labels: int,
    rho: float,
    limit: int,
) -> tuple[Tensor, Tensor, _Wanted]:
    """Return loss and number of labels of each row, and the gradients of the reduced loss.

    The scan is that of the first rows.
    """
    _, share = _shares((index[:, :labels] >= 0).sum(-1, keepdim=True), known, reduction, layer.work)
    features = torch.empty_like(layer.features) if wanted.features else None
    found, sums, stop = _Wanted(None, None, None, None), [], 0
    while stop < layer.rows:
        start, stop = stop, stop + (turn if stop else scan.layer.rows)
        part = slice(start, stop)
        if start > 0:
            rest = layer.of_rows(part)
            rest.step = -(-layer.n // 16) * 16  # one block
            scan = Scan(rest, limit, held=Held(rest))
        scan.run(index[part])
        options = {"limit": limit, "labels": labels, "rho": rho, "shard": None}
        left, found = _with_gradients(scan, k[part], share[part], wanted, found, options)
        sums.append(left)
        if features is not None:
            features[part] = found.features
            found = found._replace(features=None)
        scan.kept.drop()
    loss, count = (torch.cat(parts) for parts in zip(*sums, strict=True))
    return loss, count, found._replace(features=features)


def _with_gradients(
    scan: Scan, k: Tensor, share: Tensor, wanted: _Wanted, sums: _Wanted, options: dict[str, Any]
) -> tuple[tuple[Tensor, Tensor], _Wanted]:
    """Return loss and number of labels of each row, and their gradients; those of the classes are added to `sums`."""
    layer = scan.layer
    begun: list[_Gradients] = []

    def meanwhile(rows: Rows, pull: Tensor, toward: Tensor, _: Any) -> Callable[[], None]:
        if begun:  # for another result
            begun.clear()
            scan.kept.filled = False
            return lambda: None
        begun.append(_Gradients(layer, rows, wanted, scan.kept, sums))
        return lambda: begun[0].add(_upstream(share, pull, toward, layer.temperature), _AHEAD)

    leave = lambda loss, count: (loss, count)  # noqa: E731
    by_kernels = layer.kernels is not None  # a second backward pass may be watched by a mode
    settle: Any = functools.partial(_settle_by_kernels, meanwhile=meanwhile) if by_kernels else _settle
    rows, pull, toward, left = settle(layer, scan, k, **options, leave=leave)
    gradients = begun[0] if begun else _Gradients(layer, rows, wanted, scan.kept, sums)
    gradients.add(_upstream(share, pull, toward, layer.temperature))
    return left, gradients.found()


def _held(layer: Layer, holds: bool) -> Held:
    """Return room for logits in the memory of the gradient of the weight, if that lies in the order of the classes."""
    gradient = torch.empty_like(layer.weight) if holds else None
    return Held(layer, gradient if gradient is not None and gradient.is_contiguous() else None)


class _Wanted(NamedTuple):
    """Which gradients are asked for, or the gradients themselves."""

    features: Any
    weight: Any
    bias: Any
    temperature: Any


class _Upstream(NamedTuple):
    """What the gradient of a block is made of: one number per row, per label, and the factor of a row."""

    pull: Tensor
    toward: Tensor
    scale: Tensor

    def of_rows(self, which: Tensor) -> _Upstream:
        return _Upstream(*(value[which] for value in self))


def _upstream(scale: Tensor, pull: Tensor, toward: Tensor, temperature: float | Tensor) -> _Upstream:
    if isinstance(temperature, Tensor) or temperature != 1.0:
        scale = scale / temperature
    return _Upstream(pull.contiguous(), toward, scale.contiguous())


def _first_derivatives(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of features, weight, bias, k and temperature, block by block."""
    features, weight, bias, mask, scale, index, *saved = ctx.saved_tensors
    center, delta, log_mass, labels, pull, toward, share, undecided, marked = saved
    temperature = ctx.temperature if scale is None else scale
    with torch.no_grad(), _check.without_autocast(features.device):
        layer = Layer(features, weight, bias, ctx.dtype, temperature, mask)
        wants_features, wants_weight, wants_bias, wants_k, wants_temperature = ctx.needs_input_grad[:5]
        wanted = _Wanted(wants_features, wants_weight, wants_bias, wants_temperature)
        factor = grad
        grad = grad * share if grad.ndim == 0 else torch.where(share > 0, grad.unsqueeze(-1).to(share.dtype), 0)
        grad_k = None
        if wants_k:  # a row without an upstream gradient has none
            none = delta.isinf() | ((grad == 0) & delta.isnan())
            slope = torch.where(delta.isnan(), delta, -grad * pull * (-log_mass).exp())
            grad_k = torch.where(none, 0, slope)
        rows = Rows(center, delta, log_mass, index, labels, ctx.rho)
        upstream = _upstream(grad, pull, toward, temperature)
        held, ctx.held = ctx.held, None
        if held is None:  # a second backward pass computes the logits again, in the same order
            held = _held(layer, wants_weight)
        if ctx.begun:  # with an upstream gradient of 1
            begun = ctx.begun.pop()
            begun.resume(wanted, factor)
            begun.add(upstream)
            found = begun.found()
        elif marked is None:
            found = _gradients(layer, rows, upstream, wanted, held)
        else:
            some = undecided if ctx.some_undecided() else None
            found = _gradients_of_some(layer, rows, upstream, wanted, held, some, marked)
        held.drop()  # there may be another gradient of the features now
        if found.features is not None:
            found = found._replace(features=found.features.to(features.dtype))
        if found.temperature is not None:
            found = found._replace(temperature=found.temperature.to(scale.dtype))
    return found.features, found.weight, found.bias, grad_k, found.temperature


class _Gradients:
    """The gradients that are wanted, block by block; those of the classes may be added to earlier ones, in the end."""

    def __init__(self, layer: Layer, rows: Rows, wanted: _Wanted, held: Held, sums: _Wanted | None = None) -> None:
        self.layer, self.rows = layer, rows
        several = len(held.blocks.waiting) + len(held.blocks.again) > 0
        dtype = layer.work if several else layer.dtype
        self.features = torch.zeros_like(layer.features, dtype=dtype) if wanted.features else None
        self.weight = None
        if wanted.weight and (sums is None or sums.weight is None):
            self.weight = torch.empty_like(layer.weight) if held.gradient is None else held.gradient
        self.bias = None if layer.bias is None or not wanted.bias else torch.empty_like(layer.bias)
        if self.bias is not None and sums is not None:
            self.bias = self.bias.to(layer.work)
        self.temperature = torch.zeros_like(rows.center) if wanted.temperature else None
        self._blocks, self._first = layer.blocks_again(held), layer.n
        self._adds, self._waiting = False, list[tuple[slice, Tensor]]()
        if sums is not None and (sums.weight is not None or sums.bias is not None):
            self.weight, self.bias, self._adds = sums.weight, sums.bias, True

    def add(self, upstream: _Upstream, blocks: int | None = None) -> None:
        """Add the next blocks, or all that are left."""
        layer = self.layer
        for classes, x, place in itertools.islice(self._blocks, blocks):
            self._first = classes.start
            out = place if self.temperature is None else torch.empty_like(x)
            dx = layer.grad(x, classes.start, self.rows, *upstream, out)
            if self.temperature is not None:
                self.temperature -= (dx * torch.where(x.isfinite(), x, 0)).sum(-1, keepdim=True, dtype=layer.work)
            if self.features is not None:
                _add_product(self.features, dx, layer.weight[classes].to(layer.dtype))
            if self._adds:
                self._waiting.append((classes, dx))
                continue
            if self.bias is not None:
                self.bias[classes] = dx.sum(0, dtype=self.bias.dtype)
            if self.weight is not None and self.weight.dtype == layer.dtype:
                torch.mm(dx.T, layer.features, out=self.weight[classes])
            elif self.weight is not None:
                self.weight[classes] = dx.T @ layer.features

    def resume(self, wanted: _Wanted, factor: Tensor) -> None:
        """Go on with what is wanted, and multiply the gradients of the blocks so far: some classes up to the last."""
        assert self.layer.kernels is not None
        for name, still in wanted._asdict().items():
            if not still:
                setattr(self, name, None)
        for value, first in ((self.features, 0), (self.weight, self._first), (self.bias, self._first)):
            if value is not None:
                self.layer.kernels.scale_rows_(value[first:], factor)

    def found(self) -> _Wanted:
        for classes, dx in self._waiting:
            if self.bias is not None:
                self.bias[classes] += dx.sum(0, dtype=self.bias.dtype)
            if self.weight is not None:
                self.weight[classes].addmm_(dx.T, self.layer.features)
        self._waiting.clear()
        return _Wanted(self.features, self.weight, self.bias, self.temperature)


def _gradients(layer: Layer, rows: Rows, upstream: _Upstream, wanted: _Wanted, held: Held | None = None) -> _Wanted:
    """Return the gradients that are wanted, from all classes."""
    gradients = _Gradients(layer, rows, wanted, held or _held(layer, wanted.weight))
    gradients.add(upstream)
    return gradients.found()


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a product to a sum of the same or a wider dtype."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and _WIDE_SUMS:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def _few_classes(layer: Layer, scan: Scan, rows: Rows, pull: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Return which rows are undecided, and which classes have a derivative of that size in any other row, or a label.

    Below the floor the derivative grows with the logit: it is smaller than there.
    """
    assert scan.classes is not None
    if layer.kernels is not None:
        lists, numbers = (scan.top, scan.fill, scan.floor, scan.classes), (rows.center, rows.delta, rows.log_mass, pull)
        found: tuple[Tensor, Tensor] = layer.kernels.marks(*lists, *numbers, rows.index, layer.n, rows.rho, least)
        return found
    place = torch.arange(scan.top.shape[-1], device=scan.top.device)
    undecided = ~(_slope(scan.floor, rows, pull) < least).squeeze(-1) | (scan.fill > len(place))
    active = (place < scan.fill.unsqueeze(-1)) & ~(_slope(scan.top, rows, pull) < least)
    inside = (rows.index >= 0) & (rows.index < layer.n)
    listed = [torch.where(active, scan.classes.long(), 0), torch.where(inside, rows.index, 0)]  # class 0 does no harm
    marked = torch.zeros(layer.n, dtype=torch.bool, device=scan.top.device)
    return undecided, marked.index_fill(0, torch.cat(listed, -1).flatten(), True)


def _slope(x: Tensor, rows: Rows, pull: Tensor) -> Tensor:
    """Return a bound of the derivative of the loss by a logit; infinite above the threshold."""
    z = (x - rows.center) + rows.delta
    depth = -z.abs()
    bound = (depth - 2 * depth.exp().log1p() - rows.log_mass).exp() * pull.abs()
    if rows.rho > 0:
        bound = bound + absence_slope(z, rows.rho)
    return torch.where(z < 0, bound, torch.inf)


def _gradients_of_some(
    layer: Layer, rows: Rows, upstream: _Upstream, wanted: _Wanted, held: Held, undecided: Tensor | None, marked: Tensor
) -> _Wanted:
    """As `_gradients`, where only the marked classes have a gradient in all rows but the undecided ones, if any."""
    classes = marked.nonzero().squeeze(-1)
    if len(classes) > layer.n // 2:
        return _gradients(layer, rows, upstream, wanted, held)
    held.drop()
    if undecided is None:  # a GPU has work from here on
        grad_weight = torch.zeros_like(layer.weight) if held.gradient is None else held.gradient.zero_()
        grad_bias = None if layer.bias is None else torch.zeros_like(layer.bias)
    inside = (rows.index >= 0) & (rows.index < layer.n)
    place = torch.where(inside, (marked.cumsum(0) - 1)[torch.where(inside, rows.index, 0)], -1)
    if undecided is None:
        found = _gradients(layer.of_classes(classes), replace(rows, index=place), upstream, wanted)
        for whole, piece in ((grad_weight, found.weight), (grad_bias, found.bias)):
            if whole is not None and piece is not None:
                whole[classes] = piece[: len(classes)]
        return found._replace(weight=grad_weight if wanted.weight else None, bias=grad_bias if wanted.bias else None)
    full, rest = undecided.nonzero().squeeze(-1), (~undecided).nonzero().squeeze(-1)
    found = _Wanted(
        torch.zeros_like(layer.features, dtype=layer.work) if wanted.features else None,
        None,
        None,
        torch.zeros_like(rows.center) if wanted.temperature else None,
    )
    part = _gradients(layer.of_rows(full), rows.of_rows(full), upstream.of_rows(full), wanted)
    found = found._replace(weight=part.weight, bias=part.bias)
    _add_rows(found, part, full)
    some = replace(rows, index=place).of_rows(rest)
    part = _gradients(layer.of_rows(rest).of_classes(classes), some, upstream.of_rows(rest), wanted)
    _add_rows(found, part, rest)
    for whole, piece in ((found.weight, part.weight), (found.bias, part.bias)):
        if whole is not None:
            whole[classes] += piece[: len(classes)]
    return found


def _add_rows(found: _Wanted, part: _Wanted, which: Tensor) -> None:
    """Put the gradients that some rows have for themselves in their place."""
    for whole, piece in ((found.features, part.features), (found.temperature, part.temperature)):
        if whole is not None:
            whole[which] = piece.to(whole.dtype)
