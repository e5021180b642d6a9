"""Intervals of the metrics: resamples counted by weights are those of rows that are really repeated."""

import pytest
import torch

from lastlayer.metrics import mean_average_precision
from lastlayer.train import measure


def test_resampled_map_is_that_of_repeated_rows():
    generator = torch.Generator().manual_seed(0)
    y = torch.rand(30, 5, generator=generator)
    hot = torch.rand(30, 5, generator=generator) < 0.2
    hot[:, 4] = False
    found = measure._weighted_map(y, hot, 25, seed=3)
    weights = torch.cat(list(measure._weights(30, 25, seed=3))).long()
    for value, times in zip(found.tolist(), weights, strict=True):
        rows = torch.arange(30).repeat_interleave(times)
        each = mean_average_precision(y[rows].double(), hot[rows], average="none")  # equal rows share a threshold
        assert value == pytest.approx(float(each.nanmean()), abs=1e-6)
