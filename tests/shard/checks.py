"""What four processes check: every operation on a slice of the classes against the same on all of them."""

from __future__ import annotations

import datetime
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lastlayer as ll
from lastlayer import capacity
from lastlayer import shard as sharding
from lastlayer.shard import ClassShard

SIZES = {4: [(5, 0, 9, 3), (1, 2, 3, 11), (0, 0, 17, 0), (5, 5, 5, 2)], 2: [(11, 6), (17, 0)]}
N = 17
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}


@dataclass
class Split:
    """One way to split the classes over a group."""

    shard: ClassShard

    def cut(self, value: Tensor) -> Tensor:
        return value[..., self.shard.start : self.shard.stop]

    def mine(self, value: Any) -> Any:
        """This rank's part of what has an entry per class, and anything else as it is."""
        return self.cut(value) if isinstance(value, Tensor) and value.ndim and value.shape[-1] == N else value


def splits(n: int = N) -> list[Split]:
    """The splits of this rank: over all four, and over the first two where it is one of them."""
    found = []
    pair = dist.new_group([0, 1])
    for world, group in ((4, None), (2, pair)):
        rank = dist.get_rank(group)
        if rank < 0:
            continue
        for sizes in SIZES[world]:
            scaled = [s * n // N for s in sizes]
            scaled[sizes.index(max(sizes))] += n - sum(scaled)
            start = sum(scaled[:rank])
            found.append(Split(ClassShard(start, start + scaled[rank], group)))
    return found


def close(actual: Tensor, expected: Tensor, what: str = "") -> None:
    limit = TOLERANCE.get(expected.dtype, 0)
    torch.testing.assert_close(actual, expected, rtol=limit, atol=limit, equal_nan=True, msg=lambda m: f"{what}: {m}")


def rows(dtype: torch.dtype = torch.float64, n: int = N) -> Tensor:
    """Rows of all kinds: soft, hard, ties across shards, a wide gap, masked, infinite, nan on one shard only."""
    torch.manual_seed(1)
    x = torch.randn(12, n, dtype=dtype)
    x[1] *= 30
    x[2] = x[2].round()
    x[3] = 0.5
    x[4] += torch.where(torch.arange(n) % 5 == 0, 200.0, 0.0).to(dtype)
    x[5, ::2] = -torch.inf
    x[6, 3] = torch.inf
    x[7, n - 1] = torch.nan
    x[8] += 1e4
    x[9, n // 2 :] = -torch.inf
    x[10, 0] = 1e4
    return x


def compare(function: Callable[..., Tensor], split: Split, x: Tensor, k: Any, **options: Any) -> None:
    """Values and gradients of logits, k and temperature; the result is this rank's classes, or the same on all."""
    torch.manual_seed(2)
    weight = torch.randn(x.shape, dtype=x.dtype)
    results = []
    for shard in (None, split.shard):
        local = x if shard is None else split.cut(x)
        leaves = [local.clone().requires_grad_()]
        given = dict(options)
        cardinality = k
        if isinstance(k, Tensor):
            cardinality = k.clone().requires_grad_()
            leaves.append(cardinality)
        if isinstance(given.get("temperature"), Tensor):
            given["temperature"] = given["temperature"].clone().requires_grad_()
            leaves.append(given["temperature"])
        if isinstance(given.get("mask"), Tensor) and shard is not None:
            given["mask"] = split.cut(given["mask"])
        out = function(leaves[0], cardinality, shard=shard, impl="torch", **given)
        mine = weight if shard is None else split.cut(weight)
        loss = (out * mine).sum() if out.shape == mine.shape else (out * weight[:, 0]).sum()
        loss.backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    whole, part = results
    cut = split.cut if whole[0].shape == x.shape else (lambda v: v)
    close(part[0], cut(whole[0]), "value")
    close(part[1], split.cut(whole[1]), "gradient of logits")
    for i in range(2, len(whole)):
        close(part[i], whole[i], "gradient of k or temperature")


def check_kth_largest() -> None:
    for dtype in (torch.float32, torch.float64):
        for n, count in ((N, 6), (300, 700)):  # few rows, and so many that digits are short
            x = rows(dtype, n).nan_to_num(posinf=3.0)
            x = x.repeat(-(-count // len(x)), 1)[:count]
            rank = torch.stack([torch.arange(count) % n + 1, (7 * torch.arange(count)) % n + 1], -1).to(dtype)
            expected = sharding.kth_largest(x, rank, None)
            for split in splits(n):
                close(sharding.kth_largest(split.cut(x), rank, split.shard), expected)
                few = sharding.limited(split.shard, 4)
                close(
                    sharding.kth_largest(split.cut(x), rank.clamp(max=5), few),
                    x.sort(-1, True)[0].gather(-1, rank.clamp(max=5).long() - 1),
                )


def check_projections() -> None:
    per_row = torch.tensor([1, 2.5, 3, 4, 4, 3, 2, 2, 16, 5, 0, 17], dtype=torch.float64)
    for dtype in (torch.float64, torch.float32):
        x = rows(dtype)
        mask = torch.arange(N) % 7 != 2
        for split in splits() if dtype == torch.float64 else splits()[:1]:
            for function in (ll.lml, ll.log_lml, ll.lml_threshold, ll.lml_at_most):
                for k in (3.5, 6, per_row.to(dtype)):
                    if function is ll.lml_threshold:
                        options = {"temperature": 0.5}
                        finite = x[[0, 1, 2, 3, 4, 5, 8, 10]]
                        compare(function, split, finite, k if not isinstance(k, Tensor) else k[:8] + 0.5, **options)
                    else:
                        options = {"mask": mask, "temperature": 2.0} if isinstance(k, int) else {}
                        compare(function, split, x, k, **options)
            if dtype == torch.float64:  # the derivative in the temperature sums large terms
                compare(ll.lml, split, x[:5], 3, temperature=torch.tensor([1.0, 0.5, 2.0, 3.0, 1.0], dtype=dtype))


def check_capped() -> None:
    per_row = torch.tensor([1, 2.5, 3, 4, 4, 3, 2, 2, 16, 5, 0, 17], dtype=torch.float64)
    for split in splits():
        for function in (ll.capped_softmax, ll.capped_sparsemax):
            compare(function, split, rows(), per_row)
            compare(function, split, rows(), 3, mask=torch.arange(N) % 7 != 2, temperature=2.0)


def check_balanced() -> None:
    torch.manual_seed(4)
    x, weight = torch.randn(2, 9, N, dtype=torch.float64).mul(3), torch.randn(2, 9, N, dtype=torch.float64)
    k = torch.rand(9, dtype=torch.float64) + 1
    capacity = torch.rand(N, dtype=torch.float64) + 0.2
    for at_most, one in zip((False, True), splits(), strict=False):  # a search is hundreds of messages
        limits = capacity * k.sum() / capacity.sum() * (1.3 if at_most else 1)
        results = []
        for split in (None, one):
            cut = (lambda v: v) if split is None else split.cut
            leaves = [cut(x).clone().requires_grad_(), k.clone().requires_grad_(), cut(limits).clone().requires_grad_()]
            y = ll.lml_balanced(*leaves, at_most=at_most, shard=None if split is None else split.shard)
            (y * cut(weight)).sum().backward()
            results.append((split, [y.detach(), leaves[0].grad, leaves[2].grad], leaves[1].grad))
        (_, whole, grad_k), *parts = results
        for split, part, part_k in parts:
            for here, all_classes in zip(part, whole, strict=True):
                torch.testing.assert_close(here, split.cut(all_classes), rtol=1e-7, atol=1e-8)
            torch.testing.assert_close(part_k, grad_k, rtol=1e-7, atol=1e-8)


def check_truncated_entropy() -> None:
    x, ties = rows()[[0, 1, 4, 8]], rows()[[2, 3]]  # which of equal rivals is dropped shows in the gradient alone
    for split in splits():
        for k in (1, 4, 12):
            compare_loss(ll.truncated_entropy_loss, split, x, k)
            y = torch.tensor([3, 9])
            value = ll.truncated_entropy_loss(split.cut(ties), y, k, shard=split.shard)
            close(value, ll.truncated_entropy_loss(ties, y, k))


def check_quasibinary_head() -> None:
    """Rows, not classes, over the ranks: the normaliser is that of the whole batch."""
    torch.manual_seed(9)
    head = ll.QuasibinaryHead(6, 5).double()
    features, target = torch.randn(12, 6, dtype=torch.float64), torch.randint(-2, 5, (12,)).clamp(min=-1)
    z = head(features)
    expected = torch.autograd.grad(ll.quasibinary_loss(z, target), head.linear.weight)[0]
    mine = slice(3 * dist.get_rank(), 3 * dist.get_rank() + 3)
    grad = torch.autograd.grad(head.loss(features[mine], target[mine]), head.linear.weight)[0]
    dist.all_reduce(grad)
    close(grad / 4, expected, "what DDP makes of the gradients")
    close(head.log_normalizer, (z.logsumexp((0, 1)) - (target >= 0).sum().double().log()).detach(), "normaliser")


def check_one_class_each() -> None:
    if dist.get_rank() >= 0:
        x = torch.tensor([[1.0, -2.0, 0.5, 3.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
        rank = dist.get_rank()
        compare(ll.lml, Split(ClassShard(rank, rank + 1)), x, 2)


def check_second_derivative() -> None:
    x = rows()[:3]
    for split in splits()[:1]:
        grads = []
        for shard in (None, split.shard):
            leaf = (x if shard is None else split.cut(x)).clone().requires_grad_()
            out = ll.lml(leaf, 3, shard=shard, impl="torch")
            (first,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
            (second,) = torch.autograd.grad(first.pow(3).sum(), leaf)
            grads.append(second)
        close(grads[1], split.cut(grads[0]))


def targets(rows: int, n: int) -> tuple[Any, Tensor, Tensor]:
    """The three forms; the second row has no label, the third a label on the first shard alone."""
    torch.manual_seed(3)
    dense = (torch.rand(rows, n) < 0.2).double()
    dense[1] = 0
    dense[2] = torch.arange(n) == 0
    index = torch.where(dense > 0, torch.arange(n), -1).sort(-1, descending=True).values[:, : int(dense.sum(-1).max())]
    unknown = torch.where(torch.rand(rows, n) < 0.1, -1.0, dense)
    return ll.label_lists(index), unknown, torch.randint(n, (rows,))


def compare_loss(
    function: Callable[..., Tensor],
    split: Split,
    x: Tensor,
    *arguments: Any,
    reductions: tuple[str, ...] = ("mean", "none"),
    **options: Any,
) -> None:
    """Values and gradients of a loss that every rank returns."""
    for target in targets(*x.shape):
        for reduction in reductions:
            found = []
            for shard in (None, split.shard):
                leaf = (x if shard is None else split.cut(x)).clone().requires_grad_()
                dense = target.shape == x.shape
                labels = split.cut(target) if dense and shard is not None else target
                given, more = arguments, options
                if shard is not None:  # what has an entry per class is cut as the logits are
                    given = tuple(split.mine(value) for value in arguments)
                    more = {name: split.mine(value) for name, value in options.items()}
                loss = function(leaf, labels, *given, shard=shard, reduction=reduction, **more)
                (loss * torch.linspace(1, 2, loss.numel(), dtype=x.dtype).view(loss.shape)).sum().backward()
                found.append((loss.detach(), leaf.grad))
            close(found[1][0], found[0][0], f"loss, {reduction}, target {tuple(target.shape)}")
            close(found[1][1], split.cut(found[0][1]), f"gradient, {reduction}, target {tuple(target.shape)}")


def check_losses() -> None:
    x = rows()[[0, 1, 2, 3, 4, 8]]
    for split in splits():
        compare_loss(ll.lml_loss, split, x, 3)
        compare_loss(ll.lml_loss, split, x, 2.5, observed=0.3, temperature=2.0)
        compare_loss(ll.binary_loss, split, x, label_smoothing=0.1)
        compare_loss(ll.multihot_softmax_loss, split, x, label_smoothing=0.1)
        compare_loss(ll.asymmetric_loss, split, x)
        compare_loss(ll.two_way_loss, split, x, per="sample")
        for per in ("class", "both"):  # a loss per class has no entry per row
            compare_loss(ll.two_way_loss, split, x, reductions=("mean",), per=per)


def check_losses_of_incomplete_labels() -> None:
    torch.manual_seed(11)
    x = rows()[[0, 1, 2, 3, 4, 8]]
    weight, estimates, sample = torch.rand(N).double(), torch.randn(6, N).double(), torch.rand(6).double()
    weights = {"weight": weight, "pos_weight": 1 + weight, "sample_weight": sample}
    for split in splits()[:2]:
        compare_loss(ll.assume_negative_loss, split, x, label_smoothing=0.1, negative_weight=0.3, **weights)
        compare_loss(ll.entropy_max_loss, split, x, pseudo_target=estimates.sigmoid(), **weights)
        compare_loss(ll.hill_loss, split, x, **weights)
        compare_loss(ll.splc_loss, split, x, **weights)
        for mode in ("reject", "temporary"):
            compare_loss(ll.large_loss, split, x, mode=mode, rate=0.1, **weights)
        compare_loss(ll.expected_positive_loss, split, x, 2.5, sample_weight=sample)
        compare_loss(ll.role_loss, split, x, estimates, 2.5, sample_weight=sample)


def check_weights_and_other_losses() -> None:
    torch.manual_seed(12)
    x = rows()[[0, 1, 2, 3, 4, 8]]
    weight, teacher, sample = torch.rand(N).double(), torch.randn(6, N).double(), torch.rand(6).double()
    both = {"weight": weight, "sample_weight": sample}
    for split in splits()[:2]:
        compare_loss(ll.lml_loss, split, x, 3, observed=0.3, pos_weight=1 + weight, **both)
        compare_loss(ll.binary_loss, split, x, label_smoothing=0.1, pos_weight=1 + weight, **both)
        compare_loss(ll.multihot_softmax_loss, split, x, label_smoothing=0.1, **both)
        untied = [0, 1, 4, 5]  # which of equal rivals is dropped shows in the gradient alone
        compare_loss(ll.truncated_entropy_loss, split, x[untied], 3, weight=weight, sample_weight=sample[untied])
        compare_loss(ll.two_way_loss, split, x, reductions=("mean",), sample_weight=sample)
        compare_loss(ll.quasibinary_loss, split, x, sample_weight=sample)
        compare_loss(ll.quasibinary_loss, split, x, log_normalizer=0.5)
        compare_loss(ll.lml_fenchel_young_loss, split, x, sample_weight=sample)
        compare_loss(ll.lml_fenchel_young_loss, split, x, 2.5)
        for function in (ll.outlier_uniform_loss, ll.outlier_max_confidence_loss):
            compare_loss(lambda x, target, f=function, **options: f(x, **options), split, x, sample_weight=sample)
        compare_loss(
            lambda x, target, teacher, **options: ll.topk_distillation_loss(x, teacher, 4, temperature=2.0, **options),
            *(split, x, teacher),
        )


def check_linear() -> None:
    for dtype in (torch.float64, torch.float32):
        for n, cases in ((N, (1, 3.5, 16, "rows")), (2500, (1500, 2499, 3))):
            torch.manual_seed(4)
            features, weight = torch.randn(6, 5, dtype=dtype), torch.randn(n, 5, dtype=dtype)
            bias = torch.where(torch.arange(n) % 6 == 0, 100.0, 0.0).to(dtype)
            index = targets(6, n)[0]
            for split in splits(n)[::2] if n > N else splits(n):
                for k in cases:
                    cardinality = torch.tensor([1, 2, 3, 4, 2.5, 0.5], dtype=dtype) if k == "rows" else k
                    compare_linear(split, features, weight, bias, index, cardinality)
                mask = torch.arange(n) % 5 != 1
                options = {"observed": 0.3, "temperature": 2.0, "mask": mask}
                compare_linear(split, features, weight, bias, index, 3.5, **options)
                compare_linear(split, features, weight, bias, index, 3.5, negatives=n, **options)


def compare_linear(
    split: Split, features: Tensor, weight: Tensor, bias: Tensor, index: Tensor, k: Any, **options: Any
) -> None:
    found = []
    part = slice(split.shard.start, split.shard.stop)
    for shard in (None, split.shard):
        mine = slice(None) if shard is None else part
        leaves = [t.clone().requires_grad_() for t in (features, weight[mine], bias[mine])]
        if isinstance(k, Tensor):
            leaves.append(k.clone().requires_grad_())
        size = leaves[3] if isinstance(k, Tensor) else k
        given = {name: value[mine] if name == "mask" else value for name, value in options.items()}
        loss = ll.linear_lml_loss(leaves[0], leaves[1], index, size, bias=leaves[2], shard=shard, **given)
        loss.backward()
        found.append([loss.detach(), *(leaf.grad for leaf in leaves)])
    for i, (actual, expected) in enumerate(zip(found[1], found[0], strict=True)):
        scale = float(expected.abs().max().clamp(min=1))  # a sum is as accurate as its largest term
        mine = expected[part] if i in (1 + 1, 1 + 2) else expected
        close(actual / scale, mine / scale, f"number {i}, k={k}, n={len(weight)}, {list(options)}")


def check_linear_with_nan_on_one_shard() -> None:
    """A class that is nan makes every row nan, on every rank; a row that is nan makes itself nan alone."""
    torch.manual_seed(12)
    features, weight, index = torch.randn(3, 5), torch.randn(N, 5), torch.tensor([0, 5, 16])
    features[1, 0] = torch.nan
    for split in splits():
        part = slice(split.shard.start, split.shard.stop)
        whole = ll.linear_lml_loss(features, weight, index, 3, reduction="none")
        close(ll.linear_lml_loss(features, weight[part], index, 3, shard=split.shard, reduction="none"), whole)
        assert whole.isnan().tolist() == [False, True, False]
        bias = torch.where(torch.arange(N) == N - 1, torch.nan, 0.0)
        for options in ({}, {"negatives": N}):
            loss = ll.linear_lml_loss(
                features, weight[part], index, 3, bias=bias[part], shard=split.shard, reduction="none", **options
            )
            assert loss.isnan().all()
        for k in (-1.0, 1e30):
            sizes = torch.full((3,), k)
            assert ll.linear_lml_loss(features, weight[part], index, sizes, shard=split.shard, reduction="sum").isnan()
        hot = torch.zeros(3, N).index_fill(-1, torch.tensor([0]), 1)  # no label on most ranks
        loss = ll.linear_lml_loss(
            features, weight[part], hot[:, part], 3, shard=split.shard, reduction="none", negatives=N
        )
        close(loss, ll.linear_lml_loss(features, weight, hot, 3, reduction="none"))


def check_decode_and_metrics() -> None:
    x = rows()[[0, 1, 2, 3, 8, 10]]
    for split in splits():
        for k in (3, torch.tensor([1, 2, 3, 4, 5, 6])):
            expected, actual = ll.decode_top_k(x, k), ll.decode_top_k(split.cut(x), k, shard=split.shard)
            for a, e in zip(actual, expected, strict=True):
                close(a, e, "decode_top_k")
        for metric in ("precision_at_k", "recall_at_k", "ndcg_at_k", "r_precision_at_k", "f1_at_k"):
            function = getattr(ll, metric)
            for target in targets(*x.shape)[:2]:
                labels = split.cut(target) if target.shape == x.shape else target
                close(function(split.cut(x), labels, 3, shard=split.shard), function(x, target, 3), metric)


def check_decoders() -> None:
    torch.manual_seed(3)
    scores = torch.randint(0, 6, (40, N)) / 5  # many ties, some across shards
    scores[torch.rand(40, N) < 0.2] = -torch.inf
    scores[3] = -torch.inf
    mask, level, counts = torch.rand(N) < 0.8, torch.rand(N), torch.randint(0, N + 2, (40,))
    for split in splits():
        part = split.shard
        x, few, own = split.cut(scores), split.cut(mask), split.cut(level)
        pairs = [
            (ll.decode_top_k(scores, 4, mask=mask), ll.decode_top_k(x, 4, mask=few, shard=part)),
            (ll.decode_top_k(scores, 30), ll.decode_top_k(x, 30, shard=part)),
            (ll.decode_top_k(scores, counts), ll.decode_top_k(x, counts, shard=part)),
            (ll.decode_top_k(scores, "auto"), ll.decode_top_k(x, "auto", shard=part)),
            (ll.decode_threshold(scores, level, at_least=2), ll.decode_threshold(x, own, at_least=2, shard=part)),
            (
                ll.decode_threshold(scores, 0.5, at_most=3, mask=mask),
                ll.decode_threshold(x, 0.5, at_most=3, mask=few, shard=part),
            ),
        ]
        for expected, found in pairs:
            assert torch.equal(found.index, expected.index)
            assert torch.equal(found.score, expected.score)


def check_reject_and_tuning() -> None:
    torch.manual_seed(4)
    scores = torch.randint(-4, 5, (40, N)) / 2.0
    scores[torch.rand(40, N) < 0.2] = -torch.inf
    scores[3], scores[4, 7], scores[5, 2] = -torch.inf, torch.inf, torch.nan
    mask, counts, distance = torch.rand(N) < 0.8, torch.randint(0, 4, (40,)), torch.rand(40)
    index, dense, single = targets(40, N)
    for split in splits():
        part, x = split.shard, split.cut(scores)
        for by in ("confidence", "distance", "log_density"):
            for whole, own in ((None, None), (mask, split.cut(mask))):
                level = ll.tune_reject(scores, 0.5, by=by, mask=whole)
                close(ll.tune_reject(x, 0.5, by=by, mask=own, shard=part), level, f"tune_reject {by}")
                level = level - 1e-3 if by == "log_density" else level  # sums of other orders round differently
                for k in (2, counts):
                    expected = ll.decode_reject(scores, level, k=k, by=by, mask=whole)
                    found = ll.decode_reject(x, level, k=k, by=by, mask=own, shard=part)
                    assert torch.equal(found.index, expected.index)
                    assert torch.equal(found.score, expected.score)
                    assert 0 < int((found.index >= 0).any(-1).sum()) < 40
        expected = ll.decode_reject(scores, 0.5, by="distance", values=distance)
        found = ll.decode_reject(x, 0.5, by="distance", values=distance, shard=part)
        assert torch.equal(found.index, expected.index)
        for target in (index, dense, single):
            mine = split.cut(target) if target.shape == scores.shape else target
            for options in ({}, {"objective": "recall", "value": 0.7}):
                levels = ll.tune_thresholds(x, mine, shard=part, **options)
                assert torch.equal(levels, split.cut(ll.tune_thresholds(scores, target, **options)))


def check_reject_traffic() -> None:
    """The lists of each rank, and one number per row for the evidence: two for a log-density."""
    shard = ClassShard.split(400)
    scores = torch.randn(6, shard.size)
    lists = [capacity.Collective("all_gather", 6 * 3 * 4), capacity.Collective("all_gather", 6 * 3 * 8)]
    one = capacity.Collective("all_reduce", 6 * 4)
    for by, evidence in (("confidence", [one]), ("distance", [one]), ("log_density", [one, one])):
        with counted() as sent:
            ll.decode_reject(scores, 0.5, k=3, by=by, shard=shard)
        assert sent == [*lists, *evidence]


def check_layer_trains_alike() -> None:
    """Ten steps on two ranks and on four are the ten steps of one."""
    torch.manual_seed(5)
    data, index = torch.randn(40, 6), ll.label_lists(torch.randint(N, (40, 2)))
    for split in splits():
        found = []
        for shard in (None, split.shard):
            torch.manual_seed(6)
            body = torch.nn.Linear(6, 8).double()
            layer = ll.ShardedLinear(8, N, shard=shard).double()
            optimizer = torch.optim.SGD([*body.parameters(), *layer.parameters()], lr=0.5, momentum=0.9)
            losses = []
            for step in range(10):
                batch = slice(4 * step, 4 * step + 4)
                hidden = body(data[batch].double()).tanh()
                if step % 2:
                    loss = layer.loss(hidden, index[batch], 3)
                else:
                    loss = ll.lml_loss(layer(hidden), index[batch], 3, shard=shard, impl="torch")
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            found.append((torch.stack(losses), body.weight.detach(), layer.weight.detach()))
        close(found[1][0], found[0][0], "losses")
        close(found[1][1], found[0][1], "weights below")
        close(found[1][2], found[0][2][split.shard.start : split.shard.stop], "weights of the layer")


def check_dtensor() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    x = rows()[[0, 1, 2, 3, 4, 5, 8, 10]]
    torch.manual_seed(7)
    weight = torch.randn(x.shape, dtype=x.dtype)
    whole = x.clone().requires_grad_()
    expected = ll.lml(whole, 3, impl="torch")
    (expected * weight).sum().backward()
    flat, mesh = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "class"))
    for device_mesh, places in ((flat, [Shard(1)]), (mesh, [Shard(0), Shard(1)]), (mesh, [Replicate(), Shard(1)])):
        leaf = distribute_tensor(x, device_mesh, places).requires_grad_()
        y = ll.lml(leaf, 3)
        assert isinstance(y, DTensor)
        assert y.shape == x.shape
        close(y.full_tensor(), expected.detach(), str(places))
        mine = distribute_tensor(weight, device_mesh, places)
        y.backward(mine)
        close(leaf.grad.full_tensor(), whole.grad, f"gradient, {places}")
        close(ll.lml_at_most(leaf, 3).full_tensor(), ll.lml_at_most(x, 3, impl="torch"))
        assert ll.log_lml(leaf, 3).placements == leaf.placements
    nu = ll.lml_threshold(distribute_tensor(x, flat, [Shard(1)]), 3)
    close(nu, ll.lml_threshold(x, 3, impl="torch"))

    index, dense, _ = targets(len(x), N)
    torch.manual_seed(8)
    head = torch.nn.Linear(6, N).double()
    features = torch.randn(len(x), 6, dtype=torch.float64)
    expected_loss = ll.lml_loss(head(features), index, 3, impl="torch")
    gradient = torch.autograd.grad(expected_loss, head.weight)[0]
    head = parallelize_module(head, flat, ColwiseParallel(use_local_output=False))
    logits = head(features)
    loss = ll.lml_loss(logits, index, 3)
    loss.backward()
    close(loss.detach(), expected_loss.detach(), "ColwiseParallel")
    close(head.weight.grad.full_tensor(), gradient, "ColwiseParallel")
    close(
        ll.lml_loss(logits, distribute_tensor(dense, flat, [Shard(1)]), 3), ll.lml_loss(logits.full_tensor(), dense, 3)
    )
    loss = ll.linear_lml_loss(features, head.weight, index, 3, bias=head.bias)
    close(loss.detach(), expected_loss.detach(), "linear")
    for function, options in (
        (ll.binary_loss, {}),
        (ll.asymmetric_loss, {}),
        (ll.multihot_softmax_loss, {}),
        (ll.two_way_loss, {}),
        (ll.truncated_entropy_loss, {"k": 3}),
    ):
        for target in (index, distribute_tensor(dense, flat, [Shard(1)])):
            plain = torch.nn.Linear(6, N).double()
            plain.load_state_dict({k: v.full_tensor() for k, v in head.state_dict().items()})
            given = dense if target is not index else index
            expected_loss = function(plain(features), given, **options)
            gradient = torch.autograd.grad(expected_loss, plain.weight)[0]
            loss = function(head(features), target, **options)
            found = torch.autograd.grad(loss, head.weight)[0]
            close(loss.detach(), expected_loss.detach(), function.__name__)
            close(found.full_tensor(), gradient, f"gradient of {function.__name__}")
    logits, whole_logits = head(features).detach(), head(features).full_tensor().detach()
    assert torch.equal(ll.decode_top_k(logits, 3).index, ll.decode_top_k(whole_logits, 3).index)
    assert torch.equal(ll.decode_threshold(logits, 0.1).index, ll.decode_threshold(whole_logits, 0.1).index)
    close(ll.precision_at_k(logits, index, 3), ll.precision_at_k(whole_logits, index, 3))
    close(ll.capped_softmax(logits, 3).full_tensor(), ll.capped_softmax(whole_logits, 3))
    partial = [Shard(0), Shard(1)]
    for bad, shard, text in (
        (distribute_tensor(x, mesh, [Shard(1), Shard(1)]), None, "over one mesh dimension"),
        (distribute_tensor(x, mesh, partial), ClassShard(0, 3), "`shard` must be None for a DTensor"),
    ):
        with pytest.raises(ValueError, match=text):
            ll.lml(bad, 3, shard=shard)


def check_data_by_class() -> None:
    """Two data ranks of two class ranks each: the group of the shard is that of the classes."""
    x = rows()[:4]
    index = targets(*x.shape)[0]
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    split = Split(ClassShard(*((0, 10) if rank % 2 == 0 else (10, N)), groups[rank // 2]))
    mine = slice(2 * (rank // 2), 2 * (rank // 2) + 2)
    leaf = split.cut(x[mine]).clone().requires_grad_()
    ll.lml_loss(leaf, index[mine], 3, shard=split.shard, reduction="sum").backward()
    whole = x.clone().requires_grad_()
    ll.lml_loss(whole, index, 3, reduction="sum", impl="torch").backward()
    close(leaf.grad, split.cut(whole.grad[mine]))


def check_two_way_over_data_and_classes() -> None:
    """The class term is over the rows of all data ranks, the sample term over the classes of all class ranks."""
    x = rows()[[0, 1, 2, 3]]
    index = ll.label_lists(torch.tensor([[0, 9, 16], [3, -1, -1], [14, 15, 16], [9, 0, 6]]))
    with pytest.raises(ValueError, match="4 processes cannot be split into groups of 3"):
        sharding.mesh(3)
    by_class, data = sharding.mesh(2)
    rank = dist.get_rank()
    assert (data.rank, data.ranks, dist.get_rank(by_class)) == (rank // 2, 2, rank % 2)
    split = Split(ClassShard(*((0, 10) if rank % 2 == 0 else (10, N)), by_class))
    mine = slice(2 * (rank // 2), 2 * (rank // 2) + 2)
    for per in ("sample", "class", "both"):
        leaf = split.cut(x[mine]).clone().requires_grad_()
        options = {"shard": split.shard, "data_group": data.group}
        loss = ll.two_way_loss(leaf, index[mine], per=per, **options)
        loss.backward()
        whole = x.clone().requires_grad_()
        expected = ll.two_way_loss(whole, index, per=per)
        expected.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=data.group)
        close(mean / 2, expected.detach(), per)
        close(leaf.grad / 2, split.cut(whole.grad[mine]), f"{per}: what DDP makes of the gradients")


def check_lists_as_wide_as_a_slice() -> None:
    """Index lists of three classes on a rank that holds three."""
    x = rows()[:4]
    index = torch.tensor([[0, 9, 16], [3, -1, -1], [14, 15, 16], [2, 4, 6]])
    expected = ll.lml_loss(x, index, 3, impl="torch")
    for split in splits():
        close(ll.lml_loss(split.cut(x), ll.label_lists(index), 3, shard=split.shard), expected)


def check_resharding() -> None:
    """A checkpoint of four ranks loads on two and on one."""
    import torch.distributed.checkpoint as dcp

    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(name)
    torch.manual_seed(9)
    layer = ll.ShardedLinear(3, N, shard=ClassShard.split(N))
    torch.manual_seed(9)
    whole = ll.ShardedLinear(3, N)
    dcp.save({"head": layer.sharded_state()}, checkpoint_id=name[0])
    pair, one = dist.new_group([0, 1]), dist.new_group([0])
    if dist.get_rank() < 2:
        half = ll.ShardedLinear(3, N, shard=ClassShard.split(N, pair))
        dcp.load({"head": half.sharded_state()}, checkpoint_id=name[0], process_group=pair)
        mine = slice(half.shard.start, half.shard.stop)
        assert torch.equal(half.weight, whole.weight[mine])
        assert torch.equal(half.bias, whole.bias[mine])
    if dist.get_rank() == 0:
        alone = ll.ShardedLinear(3, N)
        dcp.load({"head": alone.sharded_state()}, checkpoint_id=name[0], process_group=one)
        assert torch.equal(alone.weight, whole.weight)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(name[0])
    uneven = ClassShard(*((0, 1) if dist.get_rank() == 0 else (1, 1)))
    with pytest.raises(ValueError, match=r"Build the layer with ClassShard\.split"):
        ll.ShardedLinear(3, N, shard=uneven).sharded_state()


@contextmanager
def counted() -> Iterator[list[capacity.Collective]]:
    """Every collective of the process, by the functions of torch.distributed themselves."""
    found: list[capacity.Collective] = []
    all_reduce, all_gather = dist.all_reduce, dist.all_gather

    def count_reduce(value: Tensor, *args: Any, **options: Any) -> Any:
        found.append(capacity.Collective("all_reduce", value.nbytes))
        return all_reduce(value, *args, **options)

    def count_gather(parts: Any, value: Tensor, *args: Any, **options: Any) -> Any:
        found.append(capacity.Collective("all_gather", value.nbytes))
        return all_gather(parts, value, *args, **options)

    dist.all_reduce, dist.all_gather = count_reduce, count_gather
    try:
        yield found
    finally:
        dist.all_reduce, dist.all_gather = all_reduce, all_gather


def check_traffic() -> None:
    """What is sent is what the planner's formulas say, message by message."""
    torch.manual_seed(10)
    n, size = 400, 8
    shard = ClassShard.split(n)
    for dtype, count in ((torch.float32, 6), (torch.float64, 6), (torch.float32, 600)):
        each = dtype.itemsize
        features, weight = torch.randn(count, size, dtype=dtype), torch.randn(shard.size, size, dtype=dtype)
        index = ll.label_lists(torch.randint(n, (count, 3)))
        logits = torch.randn(count, shard.size, dtype=dtype)
        for k in (5, torch.full((count,), 5.0, dtype=dtype), 120.5):
            leaf = logits.clone().requires_grad_()
            known = not isinstance(k, Tensor)
            value = float(k) if known else 5.0
            with counted() as sent:
                ll.lml(leaf, k, shard=shard).sum().backward()
            passes = sent.count(capacity.Collective("all_reduce", 5 * count * each))
            assert 1 <= passes <= 5
            assert sent == capacity.lml_traffic(count, value, 4, passes=passes, bytes_each=each, known=known)
        leaf = logits.clone().requires_grad_()
        with counted() as sent:
            ll.lml_loss(leaf, index, 5, shard=shard).backward()
        passes = sent.count(capacity.Collective("all_reduce", 5 * count * each))
        assert sent == capacity.lml_loss_traffic(count, 5, 4, passes=passes, bytes_each=each)
        leaves = [t.clone().requires_grad_() for t in (features, weight)]
        with counted() as sent:
            ll.linear_lml_loss(leaves[0], leaves[1], index, 5, shard=shard).backward()
        passes = sent.count(capacity.Collective("all_reduce", 7 * count * each))
        assert 1 <= passes <= 5
        formula = capacity.linear_traffic(count, size, 5, 4, passes=passes, bytes_each=each, feature_bytes=each)
        assert sent == formula, (sent, formula)
        assert [m.sent(4) for m in (*sent[:2], sent[-2])] == [3 * 6 * count * each] * 2 + [1.5 * 3 * count * each]


def check_warm_start() -> None:
    """Known thresholds save messages, as many as the formulas say, and change nothing else; bad ones cost a few."""
    torch.manual_seed(11)
    n, size, count = 400, 8, 6
    shard = ClassShard.split(n)
    each = torch.float64.itemsize
    features, weight = torch.randn(count, size).double(), torch.randn(n, size).double()
    index = torch.randint(n, (count, 3))
    target = ll.label_lists(index)

    def lml_loss(features: Tensor, shard: ClassShard | None) -> Tensor:
        part = weight if shard is None else weight[shard.start : shard.stop]
        return ll.lml_loss(features @ part.T, target, 5, shard=shard, impl="torch")

    def linear(features: Tensor, shard: ClassShard | None) -> Tensor:
        part = weight if shard is None else weight[shard.start : shard.stop]
        return ll.linear_lml_loss(features, part, target, 5, shard=shard)

    moved = features + 0.01 * torch.randn(count, size).double()
    traffic = {lml_loss: capacity.lml_loss_traffic, linear: capacity.linear_traffic}
    for function, formula in traffic.items():
        thresholds = sharding.Thresholds()
        warm, sent = shard.starting_at(thresholds), {}
        for name, x in (("cold", features), ("same", features), ("moved", moved)):
            leaf = x.clone().requires_grad_()
            with counted() as messages:
                loss = function(leaf, warm)
            sent[name] = len(messages)
            close(loss.detach(), function(x, None).detach(), name)
            close(thresholds.nu, ll.lml_threshold(x @ weight.T, 5, impl="torch"), name)
            if name == "same" and function is lml_loss:
                assert messages == formula(count, 5, 4, passes=1, bytes_each=each, warm=True)[: len(messages)]
            if name == "same" and function is linear:
                assert messages == formula(count, size, 5, 4, passes=1, bytes_each=each, warm=True)[:-1]
        assert sent["same"] < sent["moved"] < sent["cold"], sent
        for bad in (torch.full((count,), 300.0), torch.full((count,), torch.nan), torch.zeros(count + 1)):
            thresholds.nu = bad.double()
            close(function(features, warm).detach(), function(features, None).detach(), "bad start")
    assert sharding.limited(warm, 3).thresholds is thresholds


def run(rank: int, names: list[str], store: str, which: str, results: Any) -> None:
    """Run checks one after the other in a process of its own; report those that passed and the first failure."""
    if which != "all splits":  # one over four processes, in which one has no class, and one over two
        SIZES.update({4: SIZES[4][:1], 2: SIZES[2][:1]})
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=1800)  # a busy machine is slow
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4, timeout=timeout)
    passed: list[str] = []
    failure = ""
    for name in names:
        try:
            globals()[name]()
            dist.barrier()
        except Exception:  # the ranks are out of step from here on
            failure = traceback.format_exc()
            break
        passed.append(name)
    results.put((rank, passed, failure))
    if not failure:
        dist.destroy_process_group()
