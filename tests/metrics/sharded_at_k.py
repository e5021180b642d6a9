"""What three processes check: metrics at k on a slice of the classes against the same on all of them."""

from __future__ import annotations

import datetime
import traceback
import warnings
from typing import Any

import torch
import torch.distributed as dist

import lastlayer as ll
from lastlayer.metrics.at_k import fall_out_at_k
from lastlayer.shard import ClassShard

N = 11
SPLITS = [(4, 5, 2), (0, 11, 0), (1, 2, 8)]
METRICS = [
    ll.precision_at_k,
    ll.recall_at_k,
    ll.f1_at_k,
    ll.r_precision_at_k,
    ll.ndcg_at_k,
    ll.psp_at_k,
    ll.top_k_accuracy,
    fall_out_at_k,
]


def check(rank: int) -> None:
    torch.manual_seed(3)
    scores = torch.randn(20, N, dtype=torch.float64)
    scores[::2] = scores[::2].round()  # ties across the ranks
    scores[3, ::2] = -torch.inf
    scores[4, 7] = torch.nan
    dense = (torch.rand(20, N) < 0.3).to(torch.int8)
    dense[5], dense[6, ::3] = 0, -1
    lists = torch.where(dense > 0, torch.arange(N), -1)
    lists = torch.cat([lists, lists], 1)  # longer than any slice
    propensities = torch.rand(N, dtype=torch.float64) + 0.1
    for sizes in SPLITS:
        start = sum(sizes[:rank])
        shard = ClassShard(start, start + sizes[rank])
        local = scores[:, shard.start : shard.stop]
        for metric in METRICS:
            extra = (propensities,) if metric is ll.psp_at_k else ()
            short = lists[:, :N].sort(-1, descending=True).values[:, :8]  # as wide as the last slice
            forms = [(dense, dense[:, shard.start : shard.stop])] + [(ll.label_lists(t),) * 2 for t in (lists, short)]
            for target, mine in forms:
                for empty in ("skip", "one"):
                    whole = metric(scores, target, [1, 3, 6, 20], *extra, empty=empty)
                    found = metric(local, mine, [1, 3, 6, 20], *extra, empty=empty, shard=shard)
                    torch.testing.assert_close(found, whole, rtol=1e-12, atol=0, msg=f"{metric.__name__} {sizes}")
        grades = torch.where(dense > 0, torch.arange(20.0)[:, None] / 7 + 0.5, dense.double())
        whole = ll.ndcg_at_k(scores, grades, [1, 6], gain="exponential", reduction="none")
        mine = grades[:, shard.start : shard.stop]
        found = ll.ndcg_at_k(local, mine, [1, 6], gain="exponential", reduction="none", shard=shard)
        torch.testing.assert_close(found, whole, equal_nan=True)
        known = scores.nan_to_num(0)
        peak = ll.mean_max_confidence(known[:, shard.start : shard.stop], shard=shard)
        torch.testing.assert_close(peak, ll.mean_max_confidence(known))


def check_processes_merge(rank: int) -> None:
    """Each process has rows of its own; what they compute is the metric of all rows."""
    torch.manual_seed(4)
    scores, target = torch.rand(20, N), (torch.rand(20, N) < 0.3).to(torch.int8)
    mine = [slice(0, 3), slice(3, 3), slice(3, 20)][rank]
    for metric, whole in (
        (ll.RecallAtK([1, 4]), ll.recall_at_k(scores, target, [1, 4])),
        (ll.PrecisionAtK(2, average="macro", n_classes=N), ll.precision_at_k(scores, target, 2, average="macro")),
        (ll.PSPAtK(3), ll.psp_at_k(scores, target, 3)),
        (ll.MeanAveragePrecision(per="sample"), ll.mean_average_precision(scores, target, per="sample")),
        (ll.MeanAveragePrecision(), ll.mean_average_precision(scores, target)),
        (ll.LabelCalibrationError(4), ll.label_calibration_error(scores, target, 4)),
    ):
        metric.update(scores[mine], target[mine])
        torch.testing.assert_close(metric.compute(), whole)


def check_a_process_may_have_no_rows(rank: int) -> None:
    """Such as the last one of many, where rows are few: it computes what the others do."""
    torch.manual_seed(6)
    scores, target = torch.rand(20, N, dtype=torch.float64), (torch.rand(20, N) < 0.3).to(torch.int8)
    errors, angles = ll.LabelSetErrorsMetric(), ll.RotationError()
    found = ll.label_set_errors(scores, target)
    for metric, whole in (
        (ll.MeanAveragePrecision(average="none"), ll.mean_average_precision(scores, target, average="none").float()),
        (ll.AUROC(), ll.auroc(scores, target).float()),
        (errors, torch.tensor(found.value)),
        (angles, ll.rotation_error(scores[:, :4], scores[:, 4:8], reduction="median").float()),
        (ll.RecallAtK(2), ll.recall_at_k(scores, target, 2).float()),
    ):
        empty = metric.compute()
        assert not empty if metric is errors else empty == 0
        metric._computed = None  # what torchmetrics remembers until the next update
        mine = [slice(0, 3), None, slice(3, 20)][rank]
        if mine is not None:
            pair = (scores[:, :4], scores[:, 4:8]) if metric is angles else (scores, target)
            metric.update(*(x[mine] for x in pair))
        value = metric.compute()
        value = value["value"] if metric is errors else value
        torch.testing.assert_close(value.float(), whole)
    assert errors.analysis() == found


def check_structures_merge(rank: int) -> None:
    """The same for medians and error analyses, which need the rows of all processes."""
    torch.manual_seed(5)
    a, b = torch.randn(20, 4), torch.randn(20, 4)
    scores, target = torch.rand(20, N), (torch.rand(20, N) < 0.3).to(torch.int8)
    mine = [slice(0, 3), slice(3, 4), slice(4, 20)][rank]
    whole = ll.rotation_error(a, b, reduction="median")
    for metric, slack in ((ll.RotationError(), 1e-6), (ll.RotationError(bins=1000), 2e-3)):
        metric.update(a[mine], b[mine])
        torch.testing.assert_close(metric.compute(), whole, rtol=0, atol=slack)
    errors = ll.LabelSetErrorsMetric()
    errors.update(scores[mine], target[mine])
    found = ll.label_set_errors(scores, target)
    torch.testing.assert_close(errors.compute()["value"], torch.tensor(found.value))
    assert errors.analysis() == found
    assert len(errors._state("scores")) == 1  # its own rows again


def run(rank: int, store: str, results: Any) -> None:
    """Check in a process of its own and report what failed."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=1800)  # a busy machine is slow
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3, timeout=timeout)
    failure = ""
    try:
        check(rank)
        check_processes_merge(rank)
        check_structures_merge(rank)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torchmetrics warns of a metric that was not updated
            check_a_process_may_have_no_rows(rank)
    except Exception:
        failure = traceback.format_exc()
    results.put((rank, failure))
    if not failure:
        dist.destroy_process_group()
