"""Mean average precision, per class and per row."""

import math

import pytest
import torch
from sklearn.metrics import average_precision_score, label_ranking_average_precision_score
from tools import DEVICE
from torch import Tensor

import lastlayer as ll
from lastlayer.metrics import _ranking


def data(rows: int = 30, n: int = 9, ties: bool = True) -> tuple[Tensor, Tensor]:
    scores = torch.randn(rows, n, dtype=torch.float64, device=DEVICE)
    target = (torch.rand(rows, n, device=DEVICE) < 0.3).to(torch.int8)
    return ((2 * scores).round() if ties else scores), target


def test_hand_worked():
    scores = torch.tensor([[4.0, 3.0, 2.0, 1.0]])
    target = torch.tensor([[0, 1, 0, 1]], dtype=torch.int8)
    assert ll.mean_average_precision(scores, target, per="sample").item() == pytest.approx((1 / 2 + 2 / 4) / 2)
    tied = torch.tensor([[1.0, 1.0, 0.0, 0.0]])  # the tie is one threshold: precision 1/2, then 2/4
    assert ll.mean_average_precision(tied, target, per="sample").item() == 0.5
    assert ll.mean_average_precision(scores.T, target.T).item() == 0.5  # one class over four rows


@pytest.mark.parametrize("average", ["macro", "micro", "weighted", "none"])
def test_per_class_agrees_with_scikit_learn(average):
    scores, target = data()
    name = None if average == "none" else average
    expected = torch.as_tensor(average_precision_score(target.cpu(), scores.cpu(), average=name), dtype=torch.float64)
    result = ll.mean_average_precision(scores, target, average=average)
    torch.testing.assert_close(result.cpu(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:No positive class:UserWarning")
def test_per_sample_agrees_with_scikit_learn():
    scores, target = data()
    expected = average_precision_score(target.cpu(), scores.cpu(), average="samples")
    assert ll.mean_average_precision(scores, target, per="sample", empty="zero").item() == pytest.approx(expected)
    # scikit-learn's ranking metric has the same definition, with 1 for a row without labels
    target[0] = 0
    expected = label_ranking_average_precision_score(target.cpu(), scores.cpu())
    assert ll.mean_average_precision(scores, target, per="sample", empty="one").item() == pytest.approx(expected)


@pytest.mark.filterwarnings("ignore:.*no positive samples.*")
def test_agrees_with_torchmetrics():
    functional = pytest.importorskip("torchmetrics.functional.classification")
    scores, target = data(ties=False)
    target[:, 4] = 0  # torchmetrics: 0 for a class without positives
    expected = functional.multilabel_average_precision(scores.sigmoid(), target, 9, average=None)
    result = ll.mean_average_precision(scores, target, average="none", empty="zero")
    torch.testing.assert_close(result.float(), expected.nan_to_num(0).float())


@pytest.mark.parametrize("per", ["class", "sample"])
@pytest.mark.parametrize("average", ["macro", "weighted", "none"])
def test_unknown_entries_are_no_items(per, average):
    scores, target = data()
    target[torch.rand(30, 9, device=DEVICE) < 0.3] = -1
    target[:, 0] = -1
    target[0] = -1
    scores[target < 0] = 1e9  # must not matter
    values, counts = [], []
    for s, t in zip(scores.T, target.T, strict=True) if per == "class" else zip(scores, target, strict=True):
        known = t >= 0
        count = int((t > 0).sum())
        counts.append(count)
        values.append(average_precision_score(t[known].cpu(), s[known].cpu()) if count else math.nan)
    values, counts = torch.tensor(values, dtype=torch.float64), torch.tensor(counts)
    expected = {
        "none": values,
        "macro": values.nanmean(),
        "weighted": (values.nan_to_num(0) * counts).sum() / counts.sum(),
    }[average]
    result = ll.mean_average_precision(scores, target, per=per, average=average)
    torch.testing.assert_close(result.cpu(), expected, equal_nan=True)


@pytest.mark.parametrize("per", ["class", "sample"])
@pytest.mark.parametrize("average", ["macro", "micro", "weighted"])
def test_index_lists_equal_multi_hot(per, average, monkeypatch):
    scores, target = data()
    index = torch.where(target > 0, torch.arange(9, device=DEVICE), -1)[:, torch.randperm(9)]
    index = torch.cat([index, index[:, :2]], 1)  # repeats do not matter, and it is not of the shape of the scores
    dense = ll.mean_average_precision(scores, target, per=per, average=average)
    assert ll.mean_average_precision(scores, index, per=per, average=average) == dense
    monkeypatch.setattr(_ranking, "BUDGET", 100)  # a few classes or rows at a time
    torch.testing.assert_close(ll.mean_average_precision(scores, index, per=per, average=average), dense)
    torch.testing.assert_close(ll.mean_average_precision(scores, target, per=per, average=average), dense)


def test_one_class_a_row():
    scores, _ = data(ties=False)
    target = torch.randint(9, (30,), device=DEVICE)
    rank = (scores >= scores.gather(1, target[:, None])).sum(1)
    torch.testing.assert_close(ll.mean_average_precision(scores, target, per="sample"), (1 / rank.double()).mean())


@pytest.mark.parametrize("per", ["class", "sample"])
def test_laws(per):
    scores, target = data()
    target[0, :] = 1
    target[:, 0] = 1
    assert ll.mean_average_precision(target.double(), target, per=per).item() == 1.0
    rows, classes = torch.randperm(30, device=DEVICE), torch.randperm(9, device=DEVICE)
    whole = ll.mean_average_precision(scores, target, per=per)
    torch.testing.assert_close(ll.mean_average_precision(scores[rows], target[rows], per=per), whole)
    torch.testing.assert_close(ll.mean_average_precision(scores[:, classes], target[:, classes], per=per), whole)


def test_empty_policies():
    scores = torch.tensor([[2.0, 1.0, 0.5], [1.0, 2.0, 0.5]])
    target = torch.tensor(
        [[1, 0, -1], [0, 0, -1]], dtype=torch.int8
    )  # two of three classes and one of two rows without positives
    for per, share in (("class", 2 / 3), ("sample", 1 / 2)):
        assert ll.mean_average_precision(scores, target, per=per).item() == 1.0
        assert ll.mean_average_precision(scores, target, per=per, empty="zero").item() == pytest.approx(1 - share)
        assert ll.mean_average_precision(scores, target, per=per, empty="one").item() == 1.0
        assert ll.mean_average_precision(scores, 0 * target, per=per).item() == 0.0
        assert ll.mean_average_precision(scores[:0], target[:0], per=per).item() == 0.0
        assert ll.mean_average_precision(scores[:, :0], target[:, :0], per=per).item() == 0.0


def test_ruled_out_and_nan_items_are_never_retrieved():
    target = torch.tensor([[1, 1, 0]], dtype=torch.int8)
    for bad in (-math.inf, math.nan):
        scores = torch.tensor([[1.0, bad, bad]])
        assert ll.mean_average_precision(scores, target, per="sample").item() == 0.5


def test_dtypes():
    scores, target = data()
    assert ll.mean_average_precision(scores.half(), target.bool()).dtype == torch.float32
    assert ll.mean_average_precision(scores, target.float()).dtype == torch.float64


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"per": "row"}, ValueError, "mean_average_precision: `per` must be one of 'class', 'sample', got 'row'."),
        ({"average": "samples"}, ValueError, "`average` must be one of 'macro', 'micro', 'weighted', 'none'"),
        ({"empty": None}, ValueError, "`empty` must be one of 'skip', 'zero', 'one', got None."),
        ({"scores": 1.0}, TypeError, "`scores` must be a tensor, got float"),
        ({"target": torch.ones(3)}, ValueError, "`target` must have shape"),
    ],
)
def test_messages(change, error, text):
    arguments = {"scores": torch.ones(2, 3), "target": torch.ones(2, 3)} | change
    with pytest.raises(error, match=text):
        ll.mean_average_precision(**arguments)
