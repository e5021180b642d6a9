"""AUROC and mean maximum confidence."""

import math

import pytest
import torch
from sklearn.metrics import roc_auc_score
from tools import DEVICE

import lastlayer as ll
from lastlayer.metrics import _ranking


def data(rows: int = 30, n: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    scores = (2 * torch.randn(rows, n, dtype=torch.float64, device=DEVICE)).round()
    return scores, (torch.rand(rows, n, device=DEVICE) < 0.4).to(torch.int8)


def test_auroc_by_counting_pairs():
    scores, target = data(25, 1)
    s, t = scores[:, 0], target[:, 0]
    s[3], s[4] = -math.inf, math.inf
    pairs = s[t > 0][:, None] - s[t == 0][None]
    pairs = torch.where(s[t > 0][:, None] == s[t == 0][None], 0, pairs)
    expected = ((pairs > 0).double() + 0.5 * (pairs == 0)).mean()
    torch.testing.assert_close(ll.auroc(s, t), expected)
    assert ll.auroc(t.double(), t).item() == 1.0
    assert ll.auroc(-t.double(), t).item() == 0.0
    assert ll.auroc(torch.zeros(25), t.cpu()).item() == 0.5


@pytest.mark.parametrize("average", ["macro", "micro", "weighted", "none"])
def test_auroc_agrees_with_scikit_learn(average, monkeypatch):
    scores, target = data()
    name = None if average == "none" else average
    expected = torch.as_tensor(roc_auc_score(target.cpu(), scores.cpu(), average=name), dtype=torch.float64)
    torch.testing.assert_close(ll.auroc(scores, target, average=average).cpu(), expected)
    lists = torch.where(target > 0, torch.arange(6, device=DEVICE), -1)
    lists = torch.cat([lists, lists[:, :1]], 1)
    torch.testing.assert_close(ll.auroc(scores, lists, average=average).cpu(), expected)
    monkeypatch.setattr(_ranking, "BUDGET", 100)
    torch.testing.assert_close(ll.auroc(scores, lists, average=average).cpu(), expected)


def test_auroc_per_sample_and_unknown():
    scores, target = data()
    target[torch.rand(30, 6, device=DEVICE) < 0.2] = -1
    scores[target < 0] = 99.0  # must not matter
    values = []
    for s, t in zip(scores, target, strict=True):
        s, t = s[t >= 0].cpu(), t[t >= 0].cpu()
        values.append(roc_auc_score(t, s) if 0 < t.sum() < len(t) else math.nan)
    result = ll.auroc(scores, target, per="sample", average="none")
    torch.testing.assert_close(result.cpu(), torch.tensor(values, dtype=torch.float64), equal_nan=True)


def test_auroc_empty_policies():
    scores = torch.tensor([[1.0, 2.0, 3.0], [2.0, 1.0, 0.0]])
    target = torch.tensor(
        [[0, 1, 0], [1, 1, 0]], dtype=torch.int8
    )  # the second class has no negative, the third no positive
    assert [ll.auroc(scores, target, empty=e).item() for e in ("skip", "zero", "one")] == pytest.approx([1, 1 / 3, 1])
    assert [ll.auroc(torch.ones(3), torch.ones(3), empty=e).item() for e in ("skip", "zero", "one")] == [0, 0, 1]
    assert ll.auroc(torch.ones(0), torch.ones(0)).item() == 0.0
    assert ll.auroc(torch.tensor([math.nan, 1.0]), torch.tensor([0, 1])).item() == 1.0


def test_mean_max_confidence():
    probabilities = torch.rand(7, 5, device=DEVICE)
    torch.testing.assert_close(ll.mean_max_confidence(probabilities), probabilities.max(-1).values.mean())
    torch.testing.assert_close(ll.mean_max_confidence(probabilities[0]), probabilities[0].max())
    assert ll.mean_max_confidence(torch.rand(0, 5)).item() == 0.0
    assert ll.mean_max_confidence(torch.rand(5, 0)).item() == 0.0
    assert ll.mean_max_confidence(probabilities.half()).dtype == torch.float32
    assert ll.mean_max_confidence(torch.full((4, 8), 1 / 8)).item() == 1 / 8


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: ll.auroc([1.0], torch.ones(1)), TypeError, "auroc: `scores` must be a tensor"),
        (
            lambda: ll.auroc(torch.ones(2), torch.ones(3).long()),
            ValueError,
            r"auroc: `target` must have shape \(2,\), got \(3,",
        ),
        (lambda: ll.auroc(torch.ones(2), torch.ones(2), per="rows"), ValueError, "auroc: `per` must be one of"),
        (lambda: ll.auroc(torch.ones(2), torch.ones(2), empty="x"), ValueError, "auroc: `empty` must be one of"),
        (lambda: ll.auroc(torch.ones(2), torch.ones(2), average="x"), ValueError, "auroc: `average` must be one of"),
        (lambda: ll.mean_max_confidence(torch.ones(2).long()), TypeError, "mean_max_confidence: `scores` must be of"),
    ],
)
def test_messages(call, error, text):
    with pytest.raises(error, match=text):
        call()
