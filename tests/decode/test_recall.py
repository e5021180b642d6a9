"""The threshold that promises a recall: against a search over all thresholds, and against fresh rows."""

import math

import pytest
import torch
from tools import DEVICE, slow
from torch import Tensor

from lastlayer import decode_threshold, label_lists, tune_recall
from lastlayer.metrics import TuneRecall, label_set_recall

N = 12


def data(rows: int = 200, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Scores of a fair model, and true labels, Boolean."""
    logits = 2 * torch.randn(rows, N, generator=generator, dtype=torch.float64) - 2
    target = torch.rand(rows, N, generator=generator) < logits.sigmoid()
    return logits.sigmoid().to(DEVICE), target.to(DEVICE)


def lists(target: Tensor) -> Tensor:
    index = torch.where(target, torch.arange(N, device=target.device), -1)
    return torch.cat([index, index[:, :2]], 1)


def risk(scores: Tensor, target: Tensor, threshold: float) -> float:
    """The adjusted risk of the formula, row by row."""
    rows = [(s, t) for s, t in zip(scores.tolist(), target.tolist(), strict=True) if any(t)]
    lost = [sum(not s[c] > threshold for c in range(N) if t[c]) / sum(t) for s, t in rows]
    return (sum(lost) + 1) / (len(rows) + 1)


@pytest.mark.parametrize("recall", [slow(0.5), 0.8, slow(0.9), 0.97])
@pytest.mark.parametrize("ties", [False, True])
def test_is_the_highest_threshold_that_keeps_the_promise(recall, ties):
    scores, target = data(120)
    scores = scores.round(decimals=1) if ties else scores
    target[:5] = False
    scores[6, target[6]] = math.nan
    threshold = tune_recall(scores, target, recall)
    assert threshold.dtype == scores.dtype
    above = torch.nextafter(threshold, torch.tensor(math.inf, dtype=threshold.dtype, device=DEVICE))
    assert risk(scores, target, threshold.item()) <= 1 - recall + 1e-9
    assert risk(scores, target, above.item()) > 1 - recall
    candidates = [risk(scores, target, s) <= 1 - recall + 1e-9 for s in sorted({*scores[~scores.isnan()].tolist()})]
    kept = (scores[~scores.isnan()].unique() <= threshold).tolist()
    assert candidates == kept


def test_forms_of_a_target_and_streams():
    scores, target = data()
    target[:3] = False
    threshold = tune_recall(scores, target)
    assert tune_recall(scores, lists(target)) == threshold
    assert tune_recall(scores, label_lists(lists(target)[:, :N])) == threshold
    assert tune_recall(scores.view(2, 100, N), lists(target).view(2, 100, -1)) == threshold
    unknown = torch.where(~target & (torch.rand_like(scores) < 0.5), -1, target.to(torch.int8))
    assert tune_recall(scores, unknown) == threshold
    one = target.to(torch.uint8).argmax(-1)
    single = torch.nn.functional.one_hot(one, N).bool()
    assert tune_recall(scores, one) == tune_recall(scores, single)
    for x, scale in ((scores, 1.0), (scores.float().logit(), 1.0), (-scores.bfloat16(), 1e30), (scores, -1e-30)):
        x = x * scale
        exact, stream, halves = tune_recall(x, target), TuneRecall().to(DEVICE), TuneRecall().to(DEVICE)
        stream.update(x[:70], lists(target)[:70])
        halves.update(x[70:], target[70:])
        stream.merge_state(halves)
        binned = stream.compute()
        assert risk(x, target, binned.item()) <= 0.1 + 1e-9
        assert 0 <= (exact - binned).item() <= max(exact.abs().item() / 2000, 1e-37)


def test_zero_is_kept():
    """The number below 0.0 is not -0.0."""
    scores, target = torch.zeros(50, 2, device=DEVICE), torch.ones(50, 2, device=DEVICE)
    stream = TuneRecall().to(DEVICE)
    stream.update(scores, target)
    for threshold in (tune_recall(scores, target), stream.compute()):
        assert threshold < 0
        assert label_set_recall(scores, target, threshold=threshold) == 1


def test_the_promise_holds_on_new_rows():
    """Mean recall over many calibration and test samples, within three standard errors, and not far above."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(300):
        scores, target = data(60, generator)
        threshold = tune_recall(scores[:40], target[:40], 0.8)
        found.append(label_set_recall(scores[40:], target[40:], threshold=threshold))
    recall = torch.stack(found)
    error = recall.std().item() / math.sqrt(len(recall))
    assert recall.mean().item() > 0.8 - 3 * error
    assert recall.mean().item() < 0.8 + 1 / 41 + 3 * error  # the bound's other side: 2 / (n + 1) below it at most


def test_incomplete_calibration_labels():
    """Written labels keep the promise. True ones do where labels go missing at random, and need not elsewhere."""
    generator = torch.Generator().manual_seed(2)
    ease = torch.linspace(0, 1, N, dtype=torch.float64)
    for rates, kept in ((torch.full((N,), 0.5, dtype=torch.float64), True), (0.1 + 0.8 * ease, False)):
        written_recall, true_recall = [], []
        for _ in range(200):
            logits = 2 * torch.randn(400, N, generator=generator, dtype=torch.float64) - 3 + 3 * ease
            target = torch.rand(400, N, generator=generator) < logits.sigmoid()
            written = target & (torch.rand(400, N, generator=generator) < rates)
            scores = logits.sigmoid()
            threshold = tune_recall(scores[:200], written[:200], 0.8)
            test = written[200:].any(-1)  # rows with a written label: those that the promise is about
            written_recall.append(label_set_recall(scores[200:][test], written[200:][test], threshold=threshold))
            true_recall.append(label_set_recall(scores[200:][test], target[200:][test], threshold=threshold))
        means = [torch.stack(r).mean().item() for r in (written_recall, true_recall)]
        assert means[0] == pytest.approx(0.8, abs=0.01)
        assert (means[1] > 0.79) == kept, means


def test_used_by_the_decoder():
    scores, target = data()
    threshold = tune_recall(scores, target, 0.9)
    found = decode_threshold(scores, threshold)
    assert label_set_recall(found, target).item() >= 0.9


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda s, t: tune_recall(s, t, 1.0), r"tune_recall: `recall` must be above 0 and below 1, got 1.0. Only all"),
        (lambda s, t: tune_recall(s, t, 0), r"tune_recall: `recall` must be above 0 and below 1, got 0"),
        (lambda s, t: TuneRecall(1.5), r"TuneRecall: `recall` must be above 0 and below 1, got 1.5"),
        (
            lambda s, t: tune_recall(s[:8], t[:8] | True),
            r"tune_recall: `target` must have at least 9 rows with labels to promise a recall of 0.9, got 8. Use more",
        ),
        (lambda s, t: tune_recall(s, t & False), r"must have at least 9 rows with labels .* got 0"),
        (
            lambda s, t: TuneRecall(0.99).compute(),
            r"TuneRecall: `target` must have at least 99 rows with labels .* got 0",
        ),
        (
            lambda s, t: tune_recall(torch.where(t & (torch.arange(N) < 6).to(DEVICE), -math.inf, s), t, 0.8),
            r"tune_recall: `scores` must let a recall of 0.8 be reached, got labels with a score of -inf or nan that",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_messages(call, text):
    with pytest.raises(ValueError, match=text):
        call(*data())
    scores, target = data()
    assert tune_recall(scores[:9], target[:9] | True).isfinite()  # nine rows are just enough
