"""Thresholds: against sets made row by row, and against a search over all cuts."""

import pytest
import torch

from lastlayer import ClassShard, DecodeThreshold, DecodeTopK, decode_threshold, tune_thresholds

INF = float("inf")


def sets(decoded):
    return [[i for i in row if i >= 0] for row in decoded.index.tolist()]


def test_by_hand():
    scores = torch.tensor([[0.6, 0.5, 0.9], [0.1, 0.2, 0.3]])
    index, score = decode_threshold(scores)
    assert index.tolist() == [[2, 0], [-1, -1]]
    assert score.tolist()[1] == [-INF, -INF]
    assert sets(decode_threshold(scores, torch.tensor([0.0, 0.15, 1.0]))) == [[0, 1], [1, 0]]


def plain(row, level, most, least):
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    order = [i for i in order if row[i] > -INF]
    above = [i for i in order if row[i] > level[i]]
    rest = [i for i in order if i not in above]
    chosen = above[:most] if most is not None else above
    chosen = chosen + rest[: max(least - len(chosen), 0)]
    return sorted(chosen, key=lambda i: (-row[i], i))


@pytest.mark.parametrize(("most", "least"), [(None, 0), (2, 0), (None, 3), (4, 3), (2, 2), (0, 0)])
def test_agrees_with_sets_made_row_by_row(most, least):
    scores = torch.randint(0, 10, (60, 6)) / 10
    scores[torch.rand(60, 6) < 0.2] = -INF
    level = torch.tensor([0.1, 0.9, 0.5, 0.3, 0.7, 0.5])
    found = decode_threshold(scores, level, at_most=most, at_least=least or None)
    assert sets(found) == [plain(row, level.tolist(), most, least) for row in scores.tolist()]
    if most is not None:
        assert found.index.shape == (60, most)


def test_mask_and_batch_shapes():
    scores = torch.rand(2, 3, 4)
    assert decode_threshold(scores, 2.0).index.shape == (2, 3, 0)
    masked = decode_threshold(scores, 0.0, mask=torch.tensor([True, False, True, False]))
    assert set(masked.index.flatten().tolist()) == {0, 2}
    assert decode_threshold(torch.rand(0, 4)).index.shape == (0, 0)
    assert decode_threshold(torch.rand(4)).index.ndim == 1
    assert torch.equal(DecodeThreshold(0.3, at_most=2)(scores).index, decode_threshold(scores, 0.3, at_most=2).index)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch.compiler, "is_exporting"), reason="torch before 2.7")
@pytest.mark.parametrize("module", [DecodeTopK(5), DecodeThreshold(0.5, at_most=7, at_least=2)])
def test_onnx(tmp_path, module):
    """Ties by the lowest index, as here; nan and -inf are never chosen."""
    runtime, path = pytest.importorskip("onnxruntime"), str(tmp_path / "model.onnx")
    scores = torch.rand(9, 50)
    scores[0], scores[1, 5:20], scores[2, 3], scores[3], scores[4, 1:] = 0.7, 0.8, torch.nan, -torch.inf, -torch.inf
    rows = torch.export.Dim("rows")
    torch.onnx.export(module.eval(), (scores[:4],), path, dynamo=True, verbose=False, dynamic_shapes=({0: rows},))
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    found = session.run(None, {session.get_inputs()[0].name: scores.numpy()})
    for ours, theirs in zip(module(scores), found, strict=True):
        assert torch.equal(ours, torch.as_tensor(theirs))


@pytest.mark.slow
def test_compiles_with_a_fixed_width():
    def chosen(s):
        return decode_threshold(s, 0.5, at_most=3, at_least=1)

    scores = torch.rand(4, 6).round(decimals=1)
    assert torch.equal(torch.compile(chosen, fullgraph=True, backend="aot_eager")(scores).index, chosen(scores).index)


def f1(chosen, positive):
    right = (chosen & positive).sum().item()
    return 2 * right / max(chosen.sum().item() + positive.sum().item(), 1)


def all_cuts(x):
    """Every set of rows that some threshold chooses, the shortest first."""
    return [x > level for level in [*sorted(set(x.tolist()), reverse=True), -INF]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_f1_is_the_best_of_all_cuts(dtype):
    scores = torch.rand(30, 8).round(decimals=1).to(dtype)
    target = (torch.rand(30, 8) < 0.3).to(torch.int8)
    level = tune_thresholds(scores, target)
    for c in range(8):
        best = max(f1(cut, target[:, c] == 1) for cut in all_cuts(scores[:, c]))
        assert f1(scores[:, c].double() > level[c].double(), target[:, c] == 1) == pytest.approx(best)
    one = tune_thresholds(scores, target, per="all")
    best = max(f1(cut, target.flatten() == 1) for cut in all_cuts(scores.flatten()))
    assert f1(scores.flatten().double() > one.double(), target.flatten() == 1) == pytest.approx(best)
    assert one.shape == ()
    assert torch.equal(tune_thresholds(scores, target, per="label"), level)  # the word of 0.1


@pytest.mark.parametrize("value", [0.0, 0.3, 0.55, 0.9, 1.0])
def test_precision_and_recall_are_met_and_not_overpaid(value):
    scores, target = torch.rand(40, 6).round(decimals=1), (torch.rand(40, 6) < 0.4).to(torch.int8)
    for objective in ("precision", "recall"):
        level = tune_thresholds(scores, target, objective=objective, value=value)
        for c in range(6):
            x, positive = scores[:, c], target[:, c] == 1
            cuts = all_cuts(x)
            right = [(cut & positive).sum().item() for cut in cuts]
            size = [cut.sum().item() for cut in cuts]
            if objective == "precision":
                good = [s for r, s in zip(right, size, strict=True) if s and r >= value * s - 1e-6]
                wanted = max(good, default=0)
            else:
                wanted = min(s for r, s in zip(right, size, strict=True) if r >= value * positive.sum() - 1e-6)
            assert (x > level[c]).sum().item() == wanted


def test_unknown_labels_are_left_out_and_empty_columns_defined():
    scores = torch.tensor([[0.9, 0.3, 0.5], [0.8, 0.2, 0.6], [0.7, 0.1, torch.nan]])
    target = torch.tensor([[-1, 0, -1], [1, 0, -1], [0, 0, 1]], dtype=torch.int8)
    level = tune_thresholds(scores, target)
    assert level[0] == pytest.approx(0.75)  # 0.9 is unknown
    assert level[1] == pytest.approx(0.3)  # no label: nothing in the data is above
    assert level[2] == INF  # nothing known
    assert tune_thresholds(torch.empty(0, 3), torch.empty(0, 3)).tolist() == [INF] * 3
    assert tune_thresholds(torch.empty(4, 0), torch.empty(4, 0)).shape == (0,)
    assert tune_thresholds(torch.empty(4, 0), torch.empty(4, 0), per="all") == INF


def test_a_class_whose_scores_are_all_infinite_is_taken_where_that_is_best():
    scores, target = torch.full((3, 2), torch.inf), torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    thresholds = tune_thresholds(scores, target)
    assert (scores > thresholds).all(0).tolist() == [True, False]  # the second has no label


def test_nothing_is_taken_beside_an_infinite_score_of_no_label():
    """No threshold separates the two rows; the last resort is one that takes neither."""
    scores, target = torch.tensor([[torch.inf], [0.25]]), torch.tensor([[0.0], [1.0]])
    assert tune_thresholds(scores, target, objective="precision", value=0.9) == INF
    assert tune_thresholds(scores, target, objective="recall", value=0.0) == INF
    assert 0.25 > tune_thresholds(scores, target)  # noqa: SIM300  # both, for an F1 of 2/3


def test_target_forms_agree():
    scores = torch.rand(12, 5)
    lists = torch.randint(-1, 5, (12, 2))
    hot = torch.zeros(12, 6).scatter(1, torch.where(lists < 0, 5, lists), 1)[:, :5]
    assert torch.equal(tune_thresholds(scores, lists), tune_thresholds(scores, hot))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda s: decode_threshold(s, "high"), TypeError, "decode_threshold: `threshold` must be a number, got str"),
        (
            lambda s: decode_threshold(s, torch.zeros(4)),
            ValueError,
            r"`threshold` must broadcast to the shape of `scores`, \(2, 3\), got shape \(4,\)",
        ),
        (lambda s: decode_threshold(s, at_most=1, at_least=2), ValueError, "`at_least` must not be above `at_most`"),
        (lambda s: decode_threshold(s, at_most=-2), ValueError, "`at_most` must be a whole number of at least 0"),
        (
            lambda s: tune_thresholds(s, s, objective="recall"),
            ValueError,
            'tune_thresholds: `value` must be given for objective="recall", got None',
        ),
        (lambda s: tune_thresholds(s, s, value=0.5), ValueError, '`value` must be left out for objective="f1"'),
        (lambda s: tune_thresholds(s, s, objective="x"), ValueError, "`objective` must be one of 'f1', 'precision'"),
        (lambda s: tune_thresholds(s, s, per="row"), ValueError, "`per` must be one of 'class', 'all', got 'row'"),
        (
            lambda s: tune_thresholds(s, s, per="all", shard=ClassShard(0, 3)),
            ValueError,
            '`per` must be "class" with `shard`, got "all"',
        ),
        (
            lambda s: tune_thresholds(s, s, objective="recall", value=2),
            ValueError,
            "`value` must be between 0 and 1, got 2",
        ),
    ],
)
def test_messages(call, error, text):
    with pytest.raises(error, match=text):
        call(torch.zeros(2, 3))
