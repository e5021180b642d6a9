"""Rows without labels."""

import pytest
import torch

from lastlayer import DecodeReject, decode_reject, decode_top_k, tune_reject

INF = float("inf")


def test_by_hand():
    scores = torch.tensor([[0.9, 0.1], [0.5, 0.4], [0.6, 0.3]])
    assert decode_reject(scores, 0.6).index.tolist() == [[0], [-1], [0]]  # a row at the threshold is kept
    assert decode_reject(scores, 0.6, k=2).index.tolist() == [[0, 1], [-1, -1], [0, 1]]
    assert decode_reject(scores, 0.6).score[1].item() == -INF


def test_evidence_from_scores_and_given():
    scores = torch.tensor([[-1.0, -4.0], [-9.0, -3.0]])  # negative distances
    assert decode_reject(scores, 2.0, by="distance").index.tolist() == [[0], [-1]]
    values = torch.tensor([5.0, 1.0])
    assert decode_reject(scores, 2.0, by="distance", values=values).index.tolist() == [[-1], [1]]
    assert decode_reject(scores, 2.0, by="log_density", values=values).index.tolist() == [[0], [-1]]
    level = scores.logsumexp(-1).mean()
    assert decode_reject(scores, level, by="log_density").index.tolist() == [[0], [-1]]


def test_mask_nan_and_shapes():
    scores = torch.tensor([[0.9, 0.1], [torch.nan, torch.nan]])
    assert decode_reject(scores, -5.0).index.tolist() == [[0], [-1]]
    assert decode_reject(scores, 0.5, mask=torch.tensor([False, True])).index.tolist() == [[-1], [-1]]
    assert decode_reject(torch.rand(2, 3, 4), 0.5).index.shape == (2, 3, 1)
    assert decode_reject(torch.rand(4), 0.0).index.shape == (1,)
    assert decode_reject(torch.rand(4), 0.0, values=torch.tensor(-1.0)).index.tolist() == [-1]
    assert decode_reject(torch.rand(3, 0), 0.0).index.tolist() == [[-1]] * 3
    kept = decode_reject(torch.rand(3, 4), -INF, k=2)
    assert (kept.index >= 0).all()
    scores = torch.rand(3, 4)
    assert torch.equal(DecodeReject(0.5)(scores).index, decode_reject(scores, 0.5).index)
    assert DecodeReject(0.5, k="auto", at_most=3)(scores).index.shape == (3, 3)
    assert torch.equal(decode_reject(scores, -1.0, k="auto").index, decode_top_k(scores, "auto").index)


@pytest.mark.parametrize("by", ["confidence", "distance", "log_density"])
@pytest.mark.parametrize("rate", [0.0, 0.05, 0.3, 0.5, 1.0])
def test_tuned_threshold_rejects_the_wanted_share(by, rate):
    scores = torch.randn(200, 5)
    level = tune_reject(scores, rate, by=by)
    rejected = (decode_reject(scores, level, by=by).index < 0).sum().item()
    assert rejected == round(rate * 200)


def test_ties_at_the_border_are_kept():
    scores = torch.tensor([[0.1], [0.5], [0.5], [0.5]])
    level = tune_reject(scores, 0.5)
    assert (decode_reject(scores, level).index < 0).sum() == 1


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda s: decode_reject(s, 0.5, by="x"), ValueError, "decode_reject: `by` must be one of 'confidence'"),
        (lambda s: decode_reject(s, "x"), TypeError, "`threshold` must be a number, got str"),
        (
            lambda s: decode_reject(s, 0.5, values=torch.zeros(3)),
            ValueError,
            r"`values` must hold one number per row, shape \(2,\), got shape \(3,\)",
        ),
        (
            lambda s: decode_reject(s, torch.zeros(3)),
            ValueError,
            r"`threshold` must broadcast to the batch shape \(2,\)",
        ),
        (lambda s: tune_reject(s, 1.5), ValueError, "tune_reject: `rate` must be between 0 and 1, got 1.5"),
        (lambda s: tune_reject(s[:0], 0.5), ValueError, r"`scores` must hold at least one row, got shape \(0, 3\)"),
    ],
)
def test_messages(call, error, text):
    with pytest.raises(error, match=text):
        call(torch.zeros(2, 3))
