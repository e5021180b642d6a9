"""Metrics of single rows from ragged lists."""

import numpy as np
import pytest
import torch

import lastlayer as ll
from lastlayer.runs import rows


@pytest.mark.parametrize("cells", [1, 20, 10**6])
def test_rows_have_the_metrics_of_the_package(monkeypatch, cells):
    monkeypatch.setattr(rows, "CELLS", cells)
    generator = torch.Generator().manual_seed(0)
    scores, hot = torch.rand(30, 9, generator=generator), torch.rand(30, 9, generator=generator) < 0.25
    hot[4] = True  # one list as wide as there are labels
    indptr = np.concatenate([[0], hot.sum(1).cumsum(0).numpy()])
    index = hot.nonzero()[:, 1].numpy()
    top = scores.sort(descending=True).indices.numpy()
    found = rows.row_metrics(top[:, :7], indptr, index, (1, 3, 7))
    for name, function in (("precision", ll.precision_at_k), ("recall", ll.recall_at_k), ("ndcg", ll.ndcg_at_k)):
        for k in (1, 3, 7):
            expected = function(scores.double(), hot, k, reduction="none")
            np.testing.assert_allclose(found[f"{name}@{k}"], expected, atol=1e-12)
    np.testing.assert_array_equal(rows.hits(top, indptr, index), hot.gather(1, torch.from_numpy(top)))


def test_padding_is_no_hit():
    found = rows.hits(np.array([[2, -1], [-1, -1]]), np.array([0, 2, 3]), np.array([1, 2, 0]))
    assert found.tolist() == [[True, False], [False, False]]
