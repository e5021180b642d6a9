"""What four processes check: every operation on a slice of the classes against the same on all of them."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import lastlayer as ll
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
            compare(ll.lml, split, x[:5], 3, temperature=torch.tensor([1.0, 0.5, 2.0, 3.0, 1.0], dtype=dtype))


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


def run(rank: int, names: list[str], store: str, results: Any) -> None:
    """Run checks one after the other in a process of its own and report what failed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    found: dict[str, str] = {}
    for name in names:
        try:
            globals()[name]()
        except Exception:
            found[name] = traceback.format_exc()
        flag = torch.tensor(float(name in found))
        dist.all_reduce(flag)  # ranks that failed at different places do not meet again
        if flag > 0 and name not in found:
            found[name] = "failed on another rank"
    results.put((rank, found))
    dist.barrier()
    dist.destroy_process_group()
