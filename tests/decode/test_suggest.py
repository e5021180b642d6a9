"""Missing and wrong labels: against plain sorting, a second algorithm for the context, and planted errors."""

import math
import warnings

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from tools import slow
from torch import Tensor

from lastlayer import label_lists, suggest_labels
from lastlayer.data import hide_labels, load_sample
from lastlayer.decode import _context, _listed
from lastlayer.decode.suggest import STEEPEST, TREND, _keys, _lacking, _parts, _read
from lastlayer.train.suggest import out_of_fold

ROWS, N = 600, 6


def planted(rows: int = ROWS, rate: float = 0.8, wrong: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities of a fair model, true labels, and those that were written down."""
    generator = torch.Generator().manual_seed(1)
    logits = 4 * torch.randn(rows, N, generator=generator) - 2
    true = torch.rand(rows, N, generator=generator) < logits.sigmoid()
    written = true & (torch.rand(rows, N, generator=generator) < rate)
    return logits.sigmoid(), true, written | (torch.rand(rows, N, generator=generator) < wrong)


def lists(target: Tensor) -> Tensor:
    return torch.where(target, torch.arange(N), -1)


@pytest.mark.parametrize("n", [slow(0), 1, 37, slow(ROWS * N)])
@pytest.mark.parametrize("ties", [False, True])
def test_is_the_sorted_list_of_all_posteriors(monkeypatch, n, ties):
    monkeypatch.setattr(_context, "BUDGET", 50 * N)  # twelve chunks
    p, _, written = planted(wrong=0.01)
    p = p.round(decimals=1) if ties else p
    target = written.to(torch.int8)
    target[:20, 2] = -1
    data = _read("x", p, target, None, None)
    context, _, common = _context.fit(data)
    share = (target > 0).sum(0) / ROWS
    plain = []
    for chunk in data.chunks():
        q = context.logits(chunk).sigmoid()
        keys = _keys(context.logits(chunk), chunk.label, chunk.known, common.expand(N), share, 0.02, "both")
        for i, c in torch.cartesian_prod(torch.arange(len(q)), torch.arange(N)).tolist():
            row, rho = chunk.start + i, float(common)
            if target[row, c] < 0:
                assert keys[i, c] == -1
                continue
            y = float(q[i, c]) / rho  # the probability that the label is true
            if target[row, c] > 0:
                expected = 0.02 / (0.02 + 0.98 * float(q[i, c]) / float(share[c]))
            else:
                expected = min(y * (1 - rho) / (1 - rho * y), 1)
            assert math.isclose(min(float(keys[i, c]), 1), expected, rel_tol=1e-3, abs_tol=1e-6)
            plain.append((-float(keys[i, c]), row, c))
    plain.sort()
    found = suggest_labels(p, target, n=n)
    assert [(s.row, s.label) for s in found] == [(row, c) for _, row, c in plain[:n]]
    assert all((s.kind == "missing") == (target[s.row, s.label] == 0) for s in found)
    probable = suggest_labels(p, target)
    assert len(probable) == sum(-key > 0.5 for key, _, _ in plain)


@pytest.mark.parametrize("n", [0, 7, slow(1500)])
@pytest.mark.parametrize("listed", [False, True])
def test_balanced_suggestions_are_the_first_of_each_label(monkeypatch, n, listed):
    monkeypatch.setattr(_context, "BUDGET", 50 * N)
    p, _, written = planted(rows=2000)
    rates, counts = torch.linspace(0.5, 0.9, N), written.sum(0)
    if listed:
        p, index = p.sort(descending=True)
        monkeypatch.setattr(_listed, "BUDGET", 50 * (2 * N) ** 2)
        options = {"indices": index, "n_classes": N}
        target = label_lists(lists(written))
    else:
        options, target = {}, written
    options |= {"observed": rates, "kind": "missing"}
    lacking = counts * (1 - rates) / rates
    most = (n * lacking.double() / lacking.double().sum()).ceil().tolist()
    expected, taken = [], [0] * N
    for s in suggest_labels(p, target, n=2000 * N, **options):
        if taken[s.label] < most[s.label] and len(expected) < n:
            expected.append((s.row, s.label))
            taken[s.label] += 1
    assert [(s.row, s.label) for s in suggest_labels(p, target, n=n, balanced=True, **options)] == expected
    assert len(expected) == n
    some = suggest_labels(p, target, n=n, balanced=True, **{**options, "observed": 1.0})
    assert len(some) == n  # nothing is missing: in proportion to the rows


def test_rare_labels_get_a_larger_part_where_their_rates_are_lower():
    counts = torch.tensor([0, 3, 12, 40, 90, 250, 800])
    rates = torch.tensor([0.6, 0.6, 0.65, 0.6, 0.7, 0.75, 0.75])
    x, weight = counts.clamp(min=1).log().numpy(), counts.clamp(max=100).numpy()
    slope, _ = np.polyfit(x, rates.logit().numpy(), 1, w=np.sqrt(weight))
    slope *= TREND
    assert 0 < slope < STEEPEST
    found = _lacking(counts, rates)
    expected = counts.double() * torch.from_numpy(np.exp(-slope * x))
    torch.testing.assert_close(found / found.sum(), expected / expected.sum(), rtol=1e-4, atol=1e-8)
    for other, power in ((1 - rates, 1.0), (rates**9, 0.5)):  # rates that fall with the rows; that rise too steeply
        found, expected = _lacking(counts, other), counts.double() ** power
        torch.testing.assert_close(found / found.sum(), expected / expected.sum())
    p, _, written = planted(rows=2000)
    parts = _parts(500, _lacking(written.sum(0), suggest_labels(p, written, n=0).rates), written.sum(0))
    some = suggest_labels(p, written, n=500, kind="missing", balanced=True)
    assert bool((torch.bincount(some.label, minlength=N) <= parts).all())


def test_the_context_is_the_ridge_regression_of_each_residual_on_the_others():
    p, _, written = planted()
    data = _read("x", p, written, None, None)
    context, _, _ = _context.fit(data)
    (chunk,) = data.chunks()
    residual = (chunk.label.float() - context.calibrated(chunk).sigmoid()).double()
    product = residual.T @ residual
    ridge = _context.RIDGE * product.diagonal().mean()
    place = context.frequent.argsort()
    for c in range(N):
        others = [j for j in range(N) if j != c]
        solved = torch.linalg.solve(product[others][:, others] + ridge * torch.eye(N - 1), product[others, c])
        torch.testing.assert_close(context.pull[place, c][others].double(), solved, rtol=1e-3, atol=1e-5)
        assert context.pull[place, c][c] == 0


def test_the_curve_is_the_least_squares_fit_that_never_falls():
    written, seen = [1.0, 4, 1, 3, 3, 9, 2], [10.0, 10, 5, 10, 5, 10, 4]
    found = _context.rising(written, seen)
    shares = [a / b for a, b in zip(written, seen, strict=True)]
    spans = [[(i, j) for i in range(t + 1) for j in range(t, 7)] for t in range(7)]
    mean = {s: sum(written[s[0] : s[1] + 1]) / sum(seen[s[0] : s[1] + 1]) for group in spans for s in group}
    minmax = [max(min(mean[i, j] for j in range(t, 7)) for i in range(t + 1)) for t in range(7)]
    assert found == pytest.approx(minmax)
    assert found != shares
    context, _, _ = _context.fit(data := _read("x", *planted()[::2], None, None))
    (chunk,) = data.chunks()
    order = context.regression(chunk).flatten().argsort()
    assert bool((context.logits(chunk).flatten()[order].diff() >= 0).all())


def test_every_form_of_scores_and_target_gives_the_same():
    p, _, written = planted()
    expected = list(suggest_labels(p, written, n=50))
    plain = [row.nonzero().squeeze(-1).tolist() for row in written]
    for target in (
        label_lists(lists(written)), torch.nn.functional.pad(lists(written), (0, 2), value=-1), plain, written.float(),
        written.numpy(), sp.csr_matrix(written.numpy()), written.float().to_sparse(),
    ):  # fmt: skip
        assert list(suggest_labels(p, target, n=50)) == expected
    assert list(suggest_labels(p.tolist(), written, n=50)) == expected
    score, index = p.sort(descending=True)
    listed = suggest_labels(score, written, n=50, indices=index, n_classes=N)
    assert list(listed) == expected


def test_listed_scores_cost_less_and_say_the_same():
    """The pass over listed and written labels has the log-odds of the pass over all labels."""
    from lastlayer.decode._listed import entries

    p, _, written = planted()
    score, index = p.topk(3)
    index[::7, 2], score[::7, 2] = -1, 0
    data = _read("x", score, label_lists(lists(written)), index, N)
    context, _, _ = _context.fit(data)
    dense = torch.cat([context.logits(chunk) for chunk in data.chunks()])
    listed = torch.zeros(len(p), N + 1, dtype=torch.bool).scatter(1, index % (N + 1), True)[:, :N]
    seen = torch.zeros_like(written)
    for some in entries(data, context):
        torch.testing.assert_close(some.logit, dense[some.row, some.label], rtol=1e-4, atol=1e-4)
        assert torch.equal(some.written, written[some.row, some.label])
        seen[some.row, some.label] = True
    assert torch.equal(seen, listed | written)
    found = suggest_labels(score, label_lists(lists(written)), indices=index, n_classes=N, n=200)
    assert bool((listed | written)[found.row, found.label].all())


def test_finds_what_was_hidden_and_what_was_planted():
    p, true, written = planted(20_000, 0.7, 0.02)
    hidden, planted_wrong = true & ~written, written & ~true
    found = suggest_labels(p, written, n=3000, kind="missing")
    base = hidden.sum() / (~written).sum()
    assert hidden[found.row, found.label].float().mean() > 3 * base
    assert abs(found.rate - 0.7) < 0.05
    assert bool(((found.rates - 0.7).abs() < 0.1).all())
    wrong = suggest_labels(p, written, n=500, kind="wrong")
    assert planted_wrong[wrong.row, wrong.label].float().mean() > 3 * planted_wrong.sum() / written.sum()


@pytest.mark.slow
def test_finds_more_than_cleanlab_in_the_same_out_of_fold_probabilities():
    pytest.importorskip("cleanlab")
    peers = pytest.importorskip("benchmarks.suggest", reason="not a checkout")
    true = load_sample()["train"].take(np.arange(1200))
    written = hide_labels(true, keep=0.8, seed=0)
    p, left = out_of_fold(written, folds=3).probability.numpy(), peers.matrix(written)
    hidden = (peers.matrix(true) - left).toarray() > 0

    def right(finder: str) -> float:
        return float(hidden[peers.FINDERS[finder](p, left, int(hidden.sum()))].mean())

    ways = ("cleanlab, prune_by_noise_rate", "cleanlab, adjusted self_confidence")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "May not flag all label issues")
        best = max(right(way) for way in ways)
    assert right("suggest_labels") > best + 0.05  # 0.46 and 0.37


def test_the_probability_of_a_missing_label_is_the_share_of_true_ones():
    p, true, written = planted(60_000, 0.7)
    found = suggest_labels(p, written, observed=0.7, n=60_000 * N, kind="missing")
    right = true[found.row, found.label].float()
    for low in (0.02, 0.1, 0.3, 0.5):
        inside = (found.probability > low) & (found.probability <= 2 * low)
        assert abs(right[inside].mean() - found.probability[inside].mean()) < 0.05


def test_accepts_suggestions_in_each_form():
    p, _, written = planted(wrong=0.02)
    found = suggest_labels(p, written, n=40)
    hot = found.corrected(written)
    assert (hot != written).sum() == 40
    assert bool((hot != written)[found.row, found.label].all())
    index = found.corrected(torch.nn.functional.pad(lists(written), (0, 1), value=-1))
    back = torch.zeros(ROWS, N + 1, dtype=torch.bool).scatter(1, torch.where(index < 0, N, index), True)[:, :N]
    assert torch.equal(back, hot)


def test_edges_and_messages():
    p, _, written = planted(20)
    assert not len(suggest_labels(p, written, observed=1.0, kind="missing"))
    assert len(suggest_labels(p[:, :1], written[:, :1], n=np.int64(3))) == 3
    assert not len(suggest_labels(p, torch.full((20, N), -1, dtype=torch.int8), n=9))
    assert len(suggest_labels(torch.full((4, 2), 0.5), torch.zeros(4, 2), n=2)) == 2
    for options, words in (
        ({"observed": 0.0}, "`observed` must be above 0 and at most 1"),
        ({"observed": torch.tensor([1, 1, 0.5, 2, 1, 1])}, "`observed` must be above 0 and at most 1, got 2"),
        ({"observed": torch.ones(2)}, r"`observed` must be one number or one per class \(6\)"),
        ({"wrong": 1.0}, "`wrong` must be above 0 and below 1"),
        ({"n": -1}, "`n` must be None or a whole number"),
        ({"n": torch.tensor(2.5)}, "`n` must be None or a whole number"),
        ({"kind": "all"}, "`kind` must be one of"),
        ({"balanced": True, "n": 3}, '`balanced` must be False without `n` and `kind="missing"`'),
        ({"balanced": True, "kind": "missing"}, "`balanced` must be False without `n`"),
        ({"n_classes": 3}, "`n_classes` must be left out without `indices`"),
    ):
        with pytest.raises(ValueError, match=words):
            suggest_labels(p, written, **options)
    with pytest.raises(ValueError, match=r"probabilities between 0 and 1, got -.*torch.sigmoid"):
        suggest_labels(p.logit(), written)
    with pytest.raises(ValueError, match="must be 0 or positive where it is sparse"):
        suggest_labels(p, sp.csr_matrix(-written.float().numpy()))
    with pytest.raises(ValueError, match="at least one row"):
        suggest_labels(p[:0], written[:0])
