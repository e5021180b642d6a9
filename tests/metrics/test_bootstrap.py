"""Confidence intervals by drawing rows again."""

import math

import pytest
import torch
from tools import DEVICE

import lastlayer as ll
from lastlayer.metrics.bootstrap import _quantile


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_repeatable_and_no_global_state():
    x = torch.randn(30, device=DEVICE)
    before = torch.get_rng_state()
    first = ll.bootstrap(torch.mean, x, generator=seeded())
    assert (torch.get_rng_state() == before).all()
    second = ll.bootstrap(torch.mean, x, generator=seeded())
    assert first == second
    assert first != ll.bootstrap(torch.mean, x, generator=seeded(1))
    assert first.value == x.mean()
    assert first.low < first.value < first.high


def test_the_mean_has_the_interval_of_the_textbook():
    x = torch.randn(400, dtype=torch.float64)
    value, low, high = ll.bootstrap(torch.mean, x, n_resamples=2000, level=0.9, generator=seeded())
    half = 1.6449 * x.std(correction=0) / math.sqrt(400)
    assert ((high - low) / (2 * half)).item() == pytest.approx(1, abs=0.08)
    assert ((high + low) / 2 - value).abs() < 0.1 * half


def test_coverage():
    """Of 100 samples about 90 have the truth in their interval: between 78 and 98 but for one chance in 1e4."""
    inside = 0
    for seed in range(100):
        x = torch.randn(60, generator=seeded(seed))
        _, low, high = ll.bootstrap(torch.mean, x, n_resamples=200, level=0.9, generator=seeded(1000 + seed))
        inside += bool(low <= 0 <= high)
    assert 78 <= inside <= 98


def test_rows_stay_together_and_vectors_work():
    scores = torch.randn(50, 8)
    target = (torch.rand(50, 8) < 0.3).to(torch.int8)

    def both(s, t):
        assert s.shape == (50, 8)
        return ll.recall_at_k(s, t, [1, 3, 8])

    value, low, high = ll.bootstrap(both, scores, target, n_resamples=50, generator=seeded())
    assert value.shape == low.shape == high.shape == (3,)
    assert low[2] == value[2] == high[2] == 1  # all classes: right whichever rows are drawn
    assert (low <= value).all()
    assert (value <= high).all()
    same = torch.arange(40)
    assert ll.bootstrap(lambda a, b: (a == b).float().mean(), same, same, n_resamples=20).low == 1


def test_constant_data_and_paired_difference():
    x = torch.full((10,), 3.0)
    assert ll.bootstrap(torch.mean, x, n_resamples=10) == (3.0, 3.0, 3.0)
    a = torch.randn(200)
    b = a + 0.1 + 0.01 * torch.randn(200)
    _, low, high = ll.bootstrap(lambda a, b: (b - a).mean(), a, b, n_resamples=200, generator=seeded())
    assert 0.09 < low < high < 0.11


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ((3, torch.ones(2)), {}, TypeError, "bootstrap: `metric` must be a function of tensors, got int."),
        ((torch.mean,), {}, TypeError, "`tensors` must hold at least one tensor, got none."),
        ((torch.mean, [1.0]), {}, TypeError, "`tensors` must be tensors, got list."),
        (
            (torch.mean, torch.ones(2), torch.ones(3)),
            {},
            ValueError,
            r"same number of rows, at least one, got shapes \(2,\), \(3,\)",
        ),
        ((torch.mean, torch.ones(0)), {}, ValueError, "same number of rows, at least one"),
        ((torch.mean, torch.ones(2)), {"n_resamples": 0}, ValueError, "`n_resamples` must be at least 1, got 0."),
        ((torch.mean, torch.ones(2)), {"n_resamples": 1.5}, TypeError, "`n_resamples` must be an integer, got float."),
        ((torch.mean, torch.ones(2)), {"level": 1}, ValueError, "`level` must be between 0 and 1, got 1."),
    ],
)
def test_messages(arguments, options, error, text):
    with pytest.raises(error, match=text):
        ll.bootstrap(*arguments, **options)


@pytest.mark.parametrize("share", [0.0, 0.025, 0.5, 0.975, 1.0])
def test_ends_are_quantiles(share):
    drawn = torch.randn(37, 3, dtype=torch.float64).sort(0).values
    drawn[-1, 2] = torch.nan
    torch.testing.assert_close(_quantile(drawn, share), torch.quantile(drawn, share, dim=0), equal_nan=True)


def test_marked_lists_are_drawn_with_their_rows():
    scores = torch.rand(12, 3)
    target = torch.rand(12, 3) < 0.5
    target[:, 0] = True
    lists = torch.where(target, torch.arange(3), -1)

    def interval(given):
        generator = torch.Generator().manual_seed(0)
        return ll.bootstrap(lambda s, t: ll.precision_at_k(s, t, 1), scores, given, n_resamples=20, generator=generator)

    assert interval(ll.label_lists(lists)) == interval(target)
