"""Reliability bins, label calibration error and temperature."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tools import DEVICE

import lastlayer as ll
from lastlayer.metrics import _ranking


def data(rows: int = 200, n: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.rand(rows, n, dtype=torch.float64, device=DEVICE)
    return scores, (torch.rand(rows, n, device=DEVICE) < 0.5).to(torch.int8)


def lists(target: torch.Tensor) -> torch.Tensor:
    index = torch.where(target > 0, torch.arange(target.shape[-1], device=target.device), -1)
    return torch.cat([index, index[:, :1]], 1)


def ece(confidence: np.ndarray, right: np.ndarray, n_bins: int) -> float:
    place = np.minimum((confidence * n_bins).astype(int), n_bins - 1)
    gaps = [abs((right - confidence)[place == b].sum()) for b in range(n_bins)]
    return sum(gaps) / max(len(confidence), 1)


def test_hand_worked():
    scores = torch.tensor([[0.95, 0.85, 0.05], [0.95, 0.15, 0.05]])
    target = torch.tensor([[1, 0, 0], [0, 0, 0]], dtype=torch.int8)
    bins = ll.reliability_bins(scores, target, 2)
    assert bins.pairs.tolist() == [0, 1, 0, 0, 0, 0, 0, 0, 1, 2]
    assert bins.confidence[[1, 8, 9]].tolist() == pytest.approx([0.15, 0.85, 0.95])
    assert bins.accuracy[[1, 8, 9]].tolist() == [0, 0, 0.5]
    assert bins.edges.tolist() == pytest.approx([i / 10 for i in range(11)])
    # (1 * 0.15 + 1 * 0.85 + 2 * 0.45) / 4
    assert ll.label_calibration_error(scores, target, 2).item() == pytest.approx(1.9 / 4)
    assert ll.label_calibration_error(scores, target, 2, norm="max").item() == pytest.approx(0.85)


@pytest.mark.parametrize("n_bins", [1, 7, 15])
@pytest.mark.parametrize("norm", ["l1", "l2", "max"])
def test_all_pairs_agree_with_torchmetrics(n_bins, norm):
    functional = pytest.importorskip("torchmetrics.functional.classification")
    scores, target = data()
    expected = functional.binary_calibration_error(scores.flatten(), target.flatten(), n_bins=n_bins, norm=norm)
    result = ll.label_calibration_error(scores, target, n_bins=n_bins, norm=norm)
    torch.testing.assert_close(result.float(), expected.float())


def test_top_k_and_classwise_agree_with_numpy(monkeypatch):
    scores, target = data()
    s, t = scores.cpu().numpy(), target.cpu().numpy()
    order = np.argsort(-s, axis=1)[:, :4]
    rows = np.arange(len(s))[:, None]
    top = ece(s[rows, order].ravel(), t[rows, order].ravel(), 10)
    each = np.mean([ece(s[:, c], t[:, c], 10) for c in range(6)])
    both = []
    for c in range(6):
        chosen = (order == c).any(1)
        both.append(ece(s[chosen, c], t[chosen, c], 10))
    for budget in (_ranking.BUDGET, 40):
        monkeypatch.setattr(_ranking, "BUDGET", budget)
        for form in (target, lists(target), target.double()):
            assert ll.label_calibration_error(scores, form, 4).item() == pytest.approx(top)
            assert ll.label_calibration_error(scores, form, per="class").item() == pytest.approx(each)
            assert ll.label_calibration_error(scores, form, 4, per="class").item() == pytest.approx(np.mean(both))
            assert ll.label_calibration_error(scores, form).item() == pytest.approx(ece(s.ravel(), t.ravel(), 10))
            torch.testing.assert_close(
                ll.label_calibration_error(scores, form, per="pair"), ll.label_calibration_error(scores, form)
            )


def test_laws():
    scores, target = data()
    assert ll.label_calibration_error(target.double(), target).item() == 0.0
    assert ll.label_calibration_error(1 - target.double(), target).item() == 1.0
    rows = torch.randperm(200, device=DEVICE)
    torch.testing.assert_close(
        ll.label_calibration_error(scores[rows], target[rows], 3), ll.label_calibration_error(scores, target, 3)
    )
    honest = (torch.rand(20000, 6, device=DEVICE) < torch.full((20000, 6), 0.3, device=DEVICE)).to(torch.int8)
    assert ll.label_calibration_error(torch.full((20000, 6), 0.3, device=DEVICE), honest).item() < 0.01


def test_bins_of_each_class():
    scores, target = data()
    bins = ll.reliability_bins(scores, target, n_bins=5, per="class")
    assert bins.pairs.shape == bins.confidence.shape == bins.accuracy.shape == (6, 5)
    torch.testing.assert_close(bins.pairs.sum(0), ll.reliability_bins(scores, target, n_bins=5).pairs)
    torch.testing.assert_close((bins.pairs * bins.accuracy).sum(1), target.sum(0).double())


def test_edges():
    scores = torch.tensor([[0.0, 1.0, 0.5, -math.inf, math.nan, 2.0, -1.0]])
    target = torch.tensor([[0, 1, -1, 1, 1, 1, 0]], dtype=torch.int8)
    bins = ll.reliability_bins(scores, target, n_bins=2)
    assert bins.pairs.tolist() == [2, 2]  # unknown, ruled out and nan make no pair; outside falls in the end bins
    assert bins.accuracy.tolist() == [0, 1]
    assert ll.reliability_bins(scores, torch.tensor([[1, 3, 4, 5]]), n_bins=2).accuracy.tolist() == pytest.approx(
        [0, 2 / 3]
    )
    for k in (None, 3):
        assert ll.label_calibration_error(torch.rand(0, 4), torch.ones(0, 4), k).item() == 0.0
        assert ll.label_calibration_error(torch.rand(3, 4), -torch.ones(3, 4), k).item() == 0.0
        assert ll.label_calibration_error(torch.rand(3, 4), -torch.ones(3, 4), k, per="class").item() == 0.0
    assert ll.label_calibration_error(torch.full((2, 3), 0.5), torch.zeros(2, 3), 1).item() == 0.5  # no labels at all
    assert ll.label_calibration_error(torch.rand(3, 4).half(), torch.ones(3, 4)).dtype == torch.float32


def loss(logits: torch.Tensor, target: torch.Tensor, link: str) -> float:
    if link == "sigmoid":
        return F.binary_cross_entropy_with_logits(logits, target.double(), weight=(target >= 0).double()).item()
    return -(logits.log_softmax(-1) * (target > 0)).sum().item()


@pytest.mark.parametrize("link", ["sigmoid", "softmax"])
def test_temperature_is_the_best(link):
    logits = 4 * torch.randn(300, 5, dtype=torch.float64, device=DEVICE)
    target = (torch.rand(300, 5, device=DEVICE) < torch.sigmoid(logits / 3)).to(torch.int8)
    if link == "sigmoid":
        target[::7, 2] = -1
    best = ll.fit_temperature(logits, target, link=link)
    if link == "sigmoid":
        assert 2 < best.item() < 4.5
    at = loss(logits / best, target, link)
    for factor in (0.5, 0.99, 1.01, 2):
        assert loss(logits / (best * factor), target, link) > at
    again = ll.fit_temperature(logits / best, target, link=link)
    assert again.item() == pytest.approx(1, abs=1e-7)
    torch.testing.assert_close(ll.fit_temperature(logits, target.double(), link=link), best)
    if link == "softmax":
        torch.testing.assert_close(ll.fit_temperature(logits, lists(target), link=link), best)


def test_temperature_of_one_label_and_its_effect():
    logits = 6 * torch.randn(2000, 4, dtype=torch.float64)
    target = torch.distributions.Categorical(logits=logits / 3).sample()
    best = ll.fit_temperature(logits, target, link="softmax")
    assert 2.5 < best.item() < 3.5
    before = ll.label_calibration_error(logits.softmax(-1), target, 1)
    after = ll.label_calibration_error((logits / best).softmax(-1), target, 1)
    assert after < before / 3


def test_temperature_edges():
    x = torch.randn(20, 3)
    assert ll.fit_temperature(x, (x > 0).to(torch.int8)).item() == pytest.approx(0.01)  # no error: as sharp as allowed
    assert ll.fit_temperature(x, (x < 0).to(torch.int8)).item() == pytest.approx(
        100
    )  # worse than nothing: as flat as allowed
    assert ll.fit_temperature(x[:0], x[:0]).item() == 1.0
    assert ll.fit_temperature(x, -torch.ones(20, 3)).item() == 1.0
    assert ll.fit_temperature(x, torch.zeros(20, 3), link="softmax").item() == 1.0
    x[:, 0] = -math.inf
    target = torch.randint(1, 3, (20,))
    for link in ("sigmoid", "softmax"):
        assert ll.fit_temperature(x, target, link=link).isfinite()
        torch.testing.assert_close(
            ll.fit_temperature(x, target, link=link), ll.fit_temperature(x[:, 1:], target - 1, link=link)
        )


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        ({"n_bins": 0}, ValueError, "label_calibration_error: `n_bins` must be at least 1, got 0."),
        ({"n_bins": 1.5}, TypeError, "`n_bins` must be an integer, got float."),
        ({"per": "row"}, ValueError, "`per` must be one of 'all', 'class', got 'row'."),
        ({"norm": "l3"}, ValueError, "`norm` must be one of 'l1', 'l2', 'max', got 'l3'."),
        ({"k": [1, 2]}, TypeError, "`k` must be one number, got list."),
        ({"k": 0}, ValueError, "`k` must be a whole number of at least 1, got 0."),
    ],
)
def test_messages(call, error, text):
    with pytest.raises(error, match=text):
        ll.label_calibration_error(torch.ones(2, 3), torch.ones(2, 3), **call)


def test_temperature_messages():
    with pytest.raises(ValueError, match="fit_temperature: `link` must be one of 'sigmoid', 'softmax', got 'lml'"):
        ll.fit_temperature(torch.ones(2, 3), torch.ones(2, 3), link="lml")


def test_data_told_apart_without_an_error_give_the_lower_bound_in_float32():
    for size in (0.5, 3.0, 30.0):
        temperature = ll.fit_temperature(torch.tensor([[size], [-size]]), torch.tensor([[1.0], [0.0]]))
        assert temperature.item() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n_bins", [7, 10, 15])
def test_a_score_on_an_edge_is_in_the_bin_above_it(n_bins, dtype):
    scores = torch.tensor([i / n_bins for i in range(n_bins + 1)], dtype=dtype)
    bins = ll.reliability_bins(scores[:, None], torch.ones(n_bins + 1, 1), n_bins=n_bins)
    assert bins.pairs.tolist() == [1.0] * (n_bins - 1) + [2.0]  # 1 itself belongs to the last bin
    torch.testing.assert_close(bins.edges, scores, rtol=0, atol=0)
