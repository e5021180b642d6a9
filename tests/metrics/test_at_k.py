"""Precision, recall, R-precision, nDCG, PSP, F1 and accuracy at k."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, ndcg_score, precision_score, recall_score, top_k_accuracy_score
from tools import DEVICE
from torch import Tensor

import lastlayer as ll
from lastlayer import _ranked
from lastlayer.metrics import _ranking
from lastlayer.metrics.at_k import fall_out_at_k

AT_K = [
    ll.precision_at_k,
    ll.recall_at_k,
    ll.r_precision_at_k,
    ll.ndcg_at_k,
    ll.psp_at_k,
    ll.top_k_accuracy,
    ll.f1_at_k,
    fall_out_at_k,
]
KS = [1, 2, 3, 5, 8]


def data(rows: int = 40, n: int = 12, rate: float = 0.25, ties: bool = False) -> tuple[Tensor, Tensor]:
    scores = torch.randn(rows, n, dtype=torch.float64)
    if ties:
        scores = (2 * scores).round() / 2
    target = (torch.rand(rows, n) < rate).to(torch.int8)
    return scores.to(DEVICE), target.to(DEVICE)


def lists(target: Tensor, extra: int = 2) -> Tensor:
    """The index lists of a multi-hot target, longer than need be."""
    m = int((target > 0).sum(-1).max()) + extra
    return torch.stack(
        [torch.cat([(row > 0).nonzero()[:, 0], row.new_full((m - int((row > 0).sum()),), -1)]) for row in target]
    )


def brute(name: str, scores: Tensor, target: Tensor, k: int, inverse: np.ndarray | None = None) -> float:
    """Row by row in plain Python; rows without labels are skipped."""
    values, best = [], []
    for s, t in zip(scores.tolist(), target.tolist(), strict=True):
        order = [c for c in sorted(range(len(s)), key=lambda c: (-s[c], c)) if t[c] >= 0 and s[c] > -math.inf][:k]
        labels = {c for c, y in enumerate(t) if y > 0}
        hits = [c in labels for c in order]
        if name == "fall_out_at_k":
            if 0 in t:
                values.append(hits.count(False) / t.count(0))
                best.append(1.0)
            continue
        if not labels:
            continue
        if name == "psp_at_k":
            weight = inverse if inverse is not None else np.ones(len(s))
            values.append(sum(weight[c] for c in order if c in labels))
            best.append(sum(sorted((weight[c] for c in labels), reverse=True)[:k]))
            continue
        gain = sum(h / math.log2(j + 2) for j, h in enumerate(hits))
        ideal = sum(1 / math.log2(j + 2) for j in range(min(k, len(labels))))
        values.append(
            {
                "precision_at_k": sum(hits) / k,
                "recall_at_k": sum(hits) / len(labels),
                "r_precision_at_k": sum(hits) / min(k, len(labels)),
                "ndcg_at_k": gain / ideal,
                "top_k_accuracy": float(any(hits)),
                "f1_at_k": 2 * sum(hits) / (k + len(labels)),
            }[name]
        )
        best.append(1.0)
    return sum(values) / sum(best) if best else 0.0


# 1 worked by hand


def test_hand_worked():
    scores = torch.tensor([[0.9, 0.8, 0.7, 0.1, 0.2]])  # ranks 0 1 2 4 3
    target = torch.tensor([[1, 0, 1, 1, 0]], dtype=torch.int8)
    assert ll.precision_at_k(scores, target, [1, 2, 3]).tolist() == pytest.approx([1, 1 / 2, 2 / 3])
    assert ll.recall_at_k(scores, target, [1, 2, 3]).tolist() == pytest.approx([1 / 3, 1 / 3, 2 / 3])
    assert ll.r_precision_at_k(scores, target, [1, 3, 5]).tolist() == pytest.approx([1, 2 / 3, 1])
    ideal = 1 + 1 / math.log2(3) + 1 / 2
    assert ll.ndcg_at_k(scores, target, [1, 3, 5]).tolist() == pytest.approx(
        [1, 1.5 / ideal, (1.5 + 1 / math.log2(6)) / ideal]
    )
    assert ll.f1_at_k(scores, target, 2).item() == pytest.approx(2 / 5)


def test_psp_hand_worked():
    propensities = torch.tensor([1.0, 0.5, 0.25, 0.1])  # weights 1, 2, 4, 10
    scores = torch.tensor([[4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]])
    target = torch.tensor([[1, 0, 1, 0], [0, 1, 0, 1]], dtype=torch.int8)
    # k=1: (1 + 10) / (4 + 10); k=2: (1 + 10) / (5 + 12); k=3: (1 + 4 + 10 + 2) / (5 + 12)
    expected = [11 / 14, 11 / 17, 1.0]
    assert ll.psp_at_k(scores, target, [1, 2, 3], propensities).tolist() == pytest.approx(expected)
    assert ll.psp_at_k(scores, target, 1).item() == 1.0  # propensity 1: both first places are right


def test_propensity_formula():
    counts, n = np.array([0, 3, 50]), 200
    c = (np.log(n) - 1) * (2.6 + 1) ** 0.6
    expected = 1 / (1 + c * (counts + 2.6) ** -0.6)
    assert np.allclose(ll.propensity(torch.tensor(counts).double(), n, A=0.6, B=2.6).numpy(), expected, rtol=1e-12)
    assert ll.propensity(torch.tensor([1]), 2).item() == 1.0  # too few rows to say: the formula would exceed 1


# 2 laws


@pytest.mark.parametrize("metric", AT_K)
def test_perfect_scores_are_one(metric):
    _, target = data()
    k = 3
    target[:, :] = 0
    target[:, 2:5] = 1  # as many labels as k, so that precision can be 1 too
    assert metric(target.double(), target, k).item() == (0 if metric is fall_out_at_k else 1)


@pytest.mark.parametrize("metric", AT_K)
def test_invariant_under_permutations(metric):
    scores, target = data()
    rows, classes = torch.randperm(40, device=DEVICE), torch.randperm(12, device=DEVICE)
    whole = metric(scores, target, KS)
    torch.testing.assert_close(metric(scores[rows], target[rows], KS), whole)
    torch.testing.assert_close(metric(scores[:, classes], target[:, classes], KS), whole)
    torch.testing.assert_close(metric(scores.exp() * 3, target, KS), whole)


def test_recall_never_falls_with_k():
    scores, target = data()
    recall = ll.recall_at_k(scores, target, range(1, 13))
    assert (recall.diff() >= 0).all()
    assert recall[-1] == 1


@pytest.mark.parametrize("metric", AT_K)
def test_rows_average_to_the_metric(metric):
    scores, target = data(ties=True)
    target[:3], target[4] = 0, 1
    scores, target = scores.view(4, 10, 12), target.view(4, 10, 12)
    for empty in ("skip", "zero", "one"):
        rows = metric(scores, target, KS, empty=empty, reduction="none")
        assert rows.shape == (4, 10, len(KS))
        torch.testing.assert_close(
            rows[..., 1], metric(scores, target, 2, empty=empty, reduction="none"), equal_nan=True
        )
        if metric is not ll.psp_at_k:  # one quotient of sums
            torch.testing.assert_close(rows.flatten(0, 1).nanmean(0), metric(scores, target, KS, empty=empty))
        for row in ((0, 3), (3, 9)):
            torch.testing.assert_close(rows[row], metric(scores[row], target[row], KS, empty=empty))
        none = rows[0, 4] if metric is fall_out_at_k else rows[0, :3]
        assert none.isnan().all() if empty == "skip" else (none == (empty == "one")).all()


# 3 oracles


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("metric", AT_K)
def test_against_brute_force(metric, ties):
    scores, target = data(ties=ties)
    target[:3] = 0
    target[5, ::2] = -1
    target[6] = -1
    scores[7, :4] = -math.inf
    scores[8] = -math.inf
    extra, inverse = (), None
    if metric is ll.psp_at_k:
        propensities = torch.rand(12, dtype=torch.float64) + 0.05
        extra, inverse = (propensities,), 1 / propensities.numpy()
    result = metric(scores, target, [*KS, 20], *extra)
    expected = [brute(metric.__name__, scores, target, k, inverse) for k in [*KS, 20]]
    assert result.tolist() == pytest.approx(expected, abs=1e-12)
    for k, value in zip(KS, result, strict=False):
        torch.testing.assert_close(metric(scores, target, k, *extra), value)  # one pass for all k, or one each


def test_ndcg_agrees_with_scikit_learn():
    scores, target = data()
    target[:, 0] = 1
    for k in KS:
        assert ll.ndcg_at_k(scores, target, k).item() == pytest.approx(ndcg_score(target.cpu(), scores.cpu(), k=k))


@pytest.mark.parametrize("gain", ["linear", "exponential"])
def test_graded_ndcg_agrees_with_scikit_learn(gain):
    scores, target = data()
    grades = target * torch.randint(1, 5, target.shape, device=DEVICE) * 0.75
    grades[:, 0] = 0.5
    gains = grades if gain == "linear" else 2**grades - 1
    for k in [*KS, 20]:
        expected = ndcg_score(gains.cpu(), scores.cpu(), k=k)
        assert ll.ndcg_at_k(scores, grades, k, gain=gain).item() == pytest.approx(expected)
    grades[3, 4:], grades[5], scores[7] = -1, 0, -math.inf
    rows = [r for r in range(40) if r != 5]
    for r in rows:
        known = grades[r] >= 0
        expected = ndcg_score(gains[r, known][None].cpu(), scores[r, known][None].cpu(), k=3) if r != 7 else 0.0
        found = ll.ndcg_at_k(scores, grades, 3, gain=gain, reduction="none")[r]
        assert found.item() == pytest.approx(expected)
    assert ll.ndcg_at_k(scores, lists(target), 3, gain=gain) == ll.ndcg_at_k(scores, lists(target), 3)


def test_fall_out_agrees_with_torchmetrics():
    functional = pytest.importorskip("torchmetrics.functional.retrieval")
    scores, target = data()
    for k in KS:
        each = [functional.retrieval_fall_out(s, t.bool(), top_k=k) for s, t in zip(scores, target, strict=True)]
        torch.testing.assert_close(fall_out_at_k(scores, target, k, reduction="none"), torch.stack(each).double())


def test_accuracy_agrees_with_scikit_learn():
    scores, _ = data()
    target = torch.randint(12, (40,), device=DEVICE)
    for k in KS:
        expected = top_k_accuracy_score(target.cpu(), scores.cpu(), k=k, labels=range(12))
        assert ll.top_k_accuracy(scores, target, k).item() == pytest.approx(expected)
        assert ll.recall_at_k(scores, target, k).item() == pytest.approx(expected)


@pytest.mark.parametrize("average", ["macro", "micro", "weighted", "none", "samples"])
def test_averages_agree_with_scikit_learn(average):
    scores, target = data(ties=True)
    target[:, 3] = 0  # scikit-learn: 0 for a class without labels
    ranks = scores.cpu().argsort(dim=-1, descending=True, stable=True)
    pairs = [(ll.precision_at_k, precision_score), (ll.recall_at_k, recall_score), (ll.f1_at_k, f1_score)]
    for metric, oracle in pairs:
        result = metric(scores, target, [5, 1, 3], average=average, empty="zero")  # k in any order
        for k, value in zip([5, 1, 3], result, strict=True):
            predicted = torch.zeros(40, 12).scatter(1, ranks[:, :k], 1)
            name = None if average == "none" else average
            expected = oracle(target.cpu().numpy(), predicted.numpy(), average=name, zero_division=0)
            assert value.tolist() == pytest.approx(np.asarray(expected).tolist())


def test_torchmetrics_accuracy():
    functional = pytest.importorskip("torchmetrics.functional.classification")
    scores, _ = data()
    target = torch.randint(12, (40,), device=DEVICE)
    for k in KS:
        expected = functional.multiclass_accuracy(scores.softmax(-1), target, 12, average="micro", top_k=k)
        assert ll.top_k_accuracy(scores, target, k).item() == pytest.approx(expected.item())


@pytest.mark.parametrize("metric", AT_K)
def test_index_lists_equal_multi_hot(metric):
    scores, target = data(ties=True)
    target[:3] = 0
    for empty in ("skip", "zero", "one"):
        dense = metric(scores, target, KS, empty=empty)
        torch.testing.assert_close(metric(scores, lists(target), KS, empty=empty), dense, rtol=0, atol=0)
        # dtypes of the target do not matter
        torch.testing.assert_close(metric(scores, target.double(), KS, empty=empty), dense, rtol=0, atol=0)
    if metric in AT_K[:2]:
        macro = metric(scores, target, KS, average="macro")
        torch.testing.assert_close(metric(scores, lists(target), KS, average="macro"), macro)


@pytest.mark.parametrize("metric", AT_K)
def test_decoded_lists_equal_scores(metric):
    scores, target = data(ties=True)
    target = lists(target)
    values, indices = _ranked.top_k(scores, 8)
    shuffle = torch.randperm(8, device=DEVICE)  # the lists need not be in order
    more = {"n_classes": 12} if metric is fall_out_at_k else {}
    result = metric(values[:, shuffle], target, KS, indices=indices[:, shuffle], **more)
    torch.testing.assert_close(result, metric(scores, target, KS), rtol=0, atol=0)


def test_decoded_lists_as_long_as_the_target():
    values, indices = torch.tensor([[3.0, 2.0], [2.0, 1.0]]), torch.tensor([[5, 7], [9, -1]])
    target = torch.tensor([[7, -1], [8, 9]])
    assert ll.recall_at_k(values, target, [1, 2], indices=indices).tolist() == [0.25, 0.75]
    assert ll.recall_at_k(values, torch.tensor([7, 9]), 2, indices=indices).item() == 1.0


def test_one_k_a_row():
    scores, target = data()
    k = torch.randint(1, 13, (40,), device=DEVICE)
    for metric in AT_K[:4]:
        rows = [metric(scores[i : i + 1], target[i : i + 1], int(k[i])) for i in range(40)]
        kept = torch.stack([r for r, t in zip(rows, target, strict=True) if t.sum() > 0])
        torch.testing.assert_close(metric(scores, target, k), kept.mean())
    torch.testing.assert_close(ll.recall_at_k(scores, target, torch.tensor(3)), ll.recall_at_k(scores, target, 3))
    several = torch.tensor([[2], [3], [1], [9]], device=DEVICE)  # broadcasts to the batch shape
    spread = several.expand(4, 10).reshape(40)
    result = ll.recall_at_k(scores.view(4, 10, 12), target.view(4, 10, 12), several)
    torch.testing.assert_close(result, ll.recall_at_k(scores, target, spread))
    hits = ll.recall_at_k(scores, target, k, average="micro")
    ranks = scores.argsort(dim=-1, descending=True).argsort(dim=-1)
    torch.testing.assert_close(hits, (target * (ranks < k[:, None])).sum() / target.sum().double())


# 7 edges


@pytest.mark.parametrize("metric", AT_K[:-1])
def test_empty_policies(metric):
    scores = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    target = torch.tensor(
        [[1, 0, 0], [0, 0, 0], [-1, -1, -1], [0, 0, 1]], dtype=torch.int8
    )  # two rows of four without a known label
    assert metric(scores, target, 1).item() == 1.0
    assert metric(scores, target, 1, empty="zero").item() == 0.5
    assert metric(scores, target, 1, empty="one").item() == 1.0
    none = target[1:3]
    assert [metric(scores[1:3], none, 1, empty=e).item() for e in ("skip", "zero", "one")] == [0.0, 0.0, 1.0]
    assert metric(scores[:0], target[:0], [1, 2]).tolist() == [0.0, 0.0]


def test_fall_out_of_rows_without_wrong_classes():
    scores, target = torch.tensor([[3.0, 2.0, 1.0]] * 3), torch.tensor([[1.0, 1, 1], [0, 0, 0], [-1, -1, -1]])
    found = [fall_out_at_k(scores, target, 2, empty=e).item() for e in ("skip", "zero", "one")]
    assert found == pytest.approx([2 / 3, 2 / 9, 8 / 9])
    with pytest.raises(ValueError, match="fall_out_at_k: `n_classes` must be given with `indices`, got None"):
        fall_out_at_k(scores, torch.tensor([0, 1, 2]), 1, indices=torch.zeros(3, 3, dtype=torch.int64))


def test_empty_classes():
    scores, target = torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[1, 0, -1]], dtype=torch.int8)
    assert ll.recall_at_k(scores, target, 2, average="macro").item() == 1.0
    assert ll.recall_at_k(scores, target, 2, average="macro", empty="zero").item() == pytest.approx(1 / 3)
    assert ll.recall_at_k(scores, target, 2, average="macro", empty="one").item() == 1.0
    each = ll.precision_at_k(scores, target, 2, average="none")
    assert each[0] == 1
    assert each[1:].isnan().all()


def test_unknown_labels_take_no_place():
    scores = torch.tensor([[4.0, 3.0, 2.0, 1.0]])
    target = torch.tensor([[-1, -1, 1, 0]], dtype=torch.int8)
    assert ll.precision_at_k(scores, target, 1).item() == 1.0
    assert ll.ndcg_at_k(scores, target, 2).item() == 1.0


def test_ruled_out_and_nan_scores_are_never_predicted():
    target = torch.tensor([[1, 1, 0]], dtype=torch.int8)
    for bad in (-math.inf, math.nan):
        scores = torch.tensor([[bad, 1.0, 0.5]])
        assert ll.recall_at_k(scores, target, 3).item() == 0.5
        assert ll.precision_at_k(scores, target, 3, average="micro").item() == 0.5  # two predictions, one right
        assert ll.recall_at_k(torch.full((1, 3), bad), target, 2).item() == 0.0
    assert ll.precision_at_k(torch.tensor([[0.0, math.inf, 1e30]]), target, 1).item() == 1.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_ties_go_to_the_lowest_class(dtype):
    torch.manual_seed(1)
    scores = torch.randint(0, 3, (50, 300), device=DEVICE).to(dtype)
    for k in (1, 7, 150, 300, 310):
        _, index = _ranked.top_k(scores, k)
        expected = scores.argsort(dim=-1, descending=True, stable=True)[:, :k]
        assert (index[:, : min(k, 300)] == expected).all()
        assert (index[:, 300:] == -1).all()


def test_one_row_without_batch_and_more_batch_dimensions():
    scores, target = data(rows=12)
    whole = ll.recall_at_k(scores, target, 3)
    torch.testing.assert_close(ll.recall_at_k(scores.view(3, 4, 12), target.view(3, 4, 12), 3), whole)
    one = ll.recall_at_k(scores[0], target[0], 3)
    assert one.shape == ()
    torch.testing.assert_close(one, ll.recall_at_k(scores[:1], target[:1], 3))
    assert ll.recall_at_k(torch.ones(2, 1), torch.tensor([0, 0]), 1).item() == 1.0
    assert ll.recall_at_k(torch.ones(2, 0), torch.ones(2, 0), 1).item() == 0.0


def test_dtype_of_the_result():
    scores, target = data()
    assert ll.recall_at_k(scores.bfloat16(), target, 3).dtype == torch.float32
    assert ll.recall_at_k(scores, target, 3).dtype == torch.float64
    scores.requires_grad_()
    assert not ll.recall_at_k(scores, target, 3).requires_grad


def test_chunks_make_no_difference(monkeypatch):
    scores, target = data(ties=True)
    whole = [metric(scores, t, KS) for metric in AT_K for t in (target, lists(target))]
    monkeypatch.setattr(_ranking, "BUDGET", 25)
    parts = [metric(scores, t, KS) for metric in AT_K for t in (target, lists(target))]
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_million_classes_are_never_made_dense(monkeypatch):
    """The largest tensor made is of the size of a chunk of scores, whatever the number of rows."""
    n, rows = 1_000_000, 2
    scores = torch.zeros(rows, n)
    scores[0, 999_999], scores[1, 5] = 2.0, 1.0
    target = torch.tensor([[999_999, 7, -1], [5, 0, -1]])

    def refuse(self):
        raise AssertionError("made dense")

    monkeypatch.setattr("lastlayer._check.Labels.positive", refuse)
    assert ll.recall_at_k(scores, target, [1, 2]).tolist() == [0.5, 0.75]  # class 0 is the first of the tied
    propensities = torch.full((n,), 0.5)
    assert ll.psp_at_k(scores, target, 1, propensities).item() == 1.0
    assert ll.ndcg_at_k(scores, target, 1).item() == 1.0


# 8 messages


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"scores": [1.0]}, TypeError, "recall_at_k: `scores` must be a tensor, got list"),
        ({"scores": torch.ones(2, 3).long()}, TypeError, "`scores` must be of a floating-point dtype"),
        ({"target": torch.ones(3, 3)}, ValueError, "`target` must have shape"),
        ({"k": 0}, ValueError, "recall_at_k: `k` must be a whole number of at least 1, got 0."),
        ({"k": 1.5}, ValueError, "`k` must be a whole number of at least 1, got 1.5."),
        ({"k": []}, ValueError, "`k` must hold at least one number"),
        ({"k": "3"}, TypeError, "`k` must be a number or a list of numbers, got str"),
        ({"k": True}, TypeError, "`k` must be a number or a list of numbers, got bool"),
        ({"k": torch.tensor([1.0, 2.0])}, TypeError, "`k` must be of an integer dtype, got a tensor of torch.float32"),
        ({"k": torch.tensor([1, 2, 3])}, ValueError, r"one number per row, shape \(2,\), got shape \(3,\)"),
        ({"empty": "none"}, ValueError, "`empty` must be one of 'skip', 'zero', 'one', got 'none'."),
        ({"average": "rows"}, ValueError, "`average` must be one of 'samples'"),
        ({"indices": torch.ones(2, 3)}, TypeError, "`indices` must be a tensor of an integer dtype"),
        ({"indices": torch.ones(2, 2).long()}, ValueError, "`indices` must have the shape of `scores`"),
        ({"indices": torch.ones(2, 3).long(), "target": torch.ones(2, 3)}, TypeError, "must hold class indices when"),
        ({"indices": torch.ones(2, 3).long(), "average": "macro"}, ValueError, "`average` must be 'samples' with"),
    ],
)
def test_messages(change, error, text):
    arguments = {"scores": torch.ones(2, 3), "target": torch.ones(2, 3), "k": 1} | change
    with pytest.raises(error, match=text):
        ll.recall_at_k(**arguments)


def test_propensity_messages():
    scores, target = torch.ones(2, 3), torch.ones(2, 3)
    with pytest.raises(TypeError, match="`propensities` must be a floating-point tensor, got list"):
        ll.psp_at_k(scores, target, 1, [1.0])
    with pytest.raises(
        ValueError, match=r"`propensities` must hold one number per class, got shape \(2,\) for 3 classes"
    ):
        ll.psp_at_k(scores, target, 1, torch.ones(2))
    with pytest.raises(TypeError, match="propensity: `label_counts` must be a tensor, got list"):
        ll.propensity([1], 5)
    with pytest.raises(ValueError, match="propensity: `n_rows` must be between 1"):
        ll.propensity(torch.ones(1), 0)


@pytest.mark.parametrize("metric", AT_K)
def test_without_values(metric):
    scores = torch.zeros(4, 6, device="meta")
    for target in (scores, torch.zeros(4, 2, dtype=torch.int64, device="meta")):
        result = metric(scores, target, [1, 9])
        assert result.is_meta
        assert result.shape == (2,)
    with pytest.raises(TypeError, match=f"{metric.__name__}: `k` must be a number where its values cannot be read"):
        metric(scores, scores, torch.zeros(4, dtype=torch.int64, device="meta"))


@pytest.mark.slow
def test_one_graph_holds_all_of_them():
    def all_of_them(scores, target):
        return torch.stack([function(scores, target, 3) for function in AT_K])

    scores, target = torch.randn(8, 12), (torch.rand(8, 12) < 0.3).float()
    graph = torch.compile(all_of_them, backend="eager", fullgraph=True)
    torch.testing.assert_close(graph(scores, target), all_of_them(scores, target))


@pytest.mark.parametrize("metric", AT_K)
@pytest.mark.parametrize("k", [3, [1, 3]])
def test_values_of_no_rows(metric, k):
    for batch in ((0,), (0, 2), (2, 0)):
        scores = torch.rand(*batch, 5)
        each = metric(scores, scores > 0.5, k, reduction="none")
        assert each.shape == (batch if k == 3 else (*batch, 2))
        assert metric(scores, scores > 0.5, k).shape == (() if k == 3 else (2,))
