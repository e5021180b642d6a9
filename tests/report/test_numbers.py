"""The numbers: against the library's own metrics, against brute force, and by hand."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from report_tools import make_run

import lastlayer as ll
from lastlayer import report
from lastlayer.report import compare, numbers, thresholds
from lastlayer.runs.contents import read


def held_of(path):
    run = read([path])[0]
    return (
        run,
        run.held,
        torch.from_numpy(run.held.probability),
        torch.from_numpy(numbers.hot(run.held, len(run.labels))),
    )


def test_curves_are_the_metrics_at_each_k(tmp_path):
    _, held, y, hot = held_of(make_run(tmp_path / "a"))
    found = numbers.curve(held)
    k = found["k"]
    assert k == list(range(1, 9))
    for name, function in (("precision", ll.precision_at_k), ("recall", ll.recall_at_k)):
        expected = function(y.double(), hot, k)
        torch.testing.assert_close(torch.tensor(found[name], dtype=torch.float64), expected.double(), atol=1e-6, rtol=0)
        each = compare.row_values(held, k, 8)
        for j, one in enumerate(k):
            values = each[f"{name}@{one}"][np.isfinite(each[f"{name}@{one}"])]
            half = 1.96 * values.std(ddof=1) / len(values) ** 0.5
            assert found[f"{name}_high"][j] - found[name][j] == pytest.approx(half, abs=2e-6)
            assert found[name][j] - found[f"{name}_low"][j] == pytest.approx(half, abs=2e-6)
    perfect = numbers.curve(make_perfect(held, hot))
    assert perfect["recall"] == found["recall_limit"]
    assert perfect["precision"] == found["precision_limit"]


def make_perfect(held, hot):
    order = np.argsort(-hot.numpy().astype(float), axis=1, kind="stable")
    return type(held)(held.indptr, held.index, order, np.ones(order.shape, np.float32), held.size, None)


def test_rows_have_the_metrics_whose_means_are_reported(tmp_path):
    _, held, y, hot = held_of(make_run(tmp_path / "a"))
    rows = compare.row_values(held, [1, 3, 8], 8)
    for name, values in rows.items():
        assert np.isnan(values[:3]).all(), "rows without labels have no metric"
        stem, _, k = name.partition("@")
        function = {"precision": ll.precision_at_k, "recall": ll.recall_at_k, "ndcg": ll.ndcg_at_k}.get(stem)
        expected = function(y.double(), hot, int(k)) if function else ll.mean_average_precision(y, hot, per="sample")
        assert np.nanmean(values) == pytest.approx(float(expected), abs=1e-6)


def test_labels_by_brute_force(tmp_path):
    run, held, _, hot = held_of(make_run(tmp_path / "a"))
    found = numbers.labels(run)
    taken = [set(row[row >= 0].tolist()) for row in held.taken()]
    assert {len(t) for t in taken} == {3}  # k is 2.6
    for c in range(8):
        said = [c in t for t in taken]
        right = sum(s and bool(h) for s, h in zip(said, hot[:, c], strict=True))
        assert found["predicted"][c] == sum(said)
        assert found["support"][c] == int(hot[:, c].sum())
        assert found["precision"][c] == pytest.approx(right / sum(said), abs=1e-5)
        assert found["recall"][c] == pytest.approx(right / int(hot[:, c].sum()), abs=1e-5)
        p, r = found["precision"][c], found["recall"][c]
        assert found["f1"][c] == pytest.approx(2 * p * r / (p + r), abs=1e-4)
    assert found["half_f1"][0] == pytest.approx(1 / 3)
    assert found["half_precision"][7] is None
    assert found["half_f1"][7] == 0


def test_reliability_is_that_of_the_metrics(tmp_path):
    _, held, y, hot = held_of(make_run(tmp_path / "a"))
    found = numbers.reliability(held, 3, 8)
    for key, k in (("best", 3), ("all", None)):
        expected = ll.reliability_bins(y, hot, k)
        assert found[key]["pairs"] == expected.pairs.int().tolist()
        np.testing.assert_allclose(found[key]["accuracy"], expected.accuracy, atol=1e-6)
        np.testing.assert_allclose(found[key]["confidence"], expected.confidence, atol=1e-6)


@pytest.mark.parametrize("dense", [True, False])
def test_error_kinds_add_up_to_the_analysis(tmp_path, dense):
    run = read([make_run(tmp_path / "a", dense=dense)])[0]
    analysis = numbers.Analysis(run)
    count = dict.fromkeys(range(-1, 5), 0)
    for row, taken in enumerate(run.held.taken()):
        true = set(run.held.index[run.held.indptr[row] : run.held.indptr[row + 1]].tolist())
        for c in {int(t) for t in taken if t >= 0} ^ true:
            count[analysis.kind(row, c)] += 1
    assert count.pop(-1) == 0
    kinds = analysis.found["kinds"]
    assert [kind["name"] for kind in kinds] == list(numbers.KINDS)
    assert list(count.values()) == [kind["false_alarms"] + kind["misses"] for kind in kinds]
    assert bool(analysis.note) is not dense


def test_lists_of_all_labels_say_as_much_as_the_matrix(tmp_path):
    whole = numbers.Analysis(read([make_run(tmp_path / "a")])[0]).found
    listed = numbers.Analysis(read([make_run(tmp_path / "b", dense=False)])[0]).found
    assert whole == listed


def test_labels_without_a_stored_score_are_out_of_reach_of_thresholds(tmp_path):
    run, _, y, hot = held_of(make_run(tmp_path / "a", rows=200, labels=40))
    listed = read([make_run(tmp_path / "b", rows=200, labels=40, dense=False, top=4)])[0]
    stored = torch.full_like(y, -torch.inf)
    index = torch.from_numpy(listed.held.top_index)
    stored.scatter_(1, index, torch.from_numpy(listed.held.top_probability))
    expected = ll.label_set_errors(
        stored, hot.to(torch.int8), predicted=torch.from_numpy(listed.held.taken()), names=run.labels
    ).to_dict()
    analysis = numbers.Analysis(listed)
    assert analysis.found["oracles"] == pytest.approx(expected["oracles"])
    assert analysis.found["kinds"] == expected["kinds"]
    out = [kind["misses"] for kind in expected["kinds"] if kind["name"] == "threshold"]
    assert out == [0], "a threshold cannot find a label that has no score"
    assert "no stored probability" in analysis.note


def test_a_sample_of_the_rows_stands_for_very_many(tmp_path, monkeypatch):
    monkeypatch.setattr(numbers, "CELLS", 100)
    run = read([make_run(tmp_path / "a", dense=False)])[0]
    analysis = numbers.Analysis(run)
    assert analysis.found["n_rows"] == 7  # 60, 30, 15, 7 rows of 8 labels
    assert "7 of the 60 rows" in analysis.note
    outside = next(row for row in range(60) if row not in analysis.rows)
    assert analysis.kind(outside, 0) == -1


def test_together_by_brute_force(tmp_path):
    run, held, _, hot = held_of(make_run(tmp_path / "a"))
    found = numbers.together(run)
    said = np.zeros((60, 8), dtype=bool)
    for row, taken in enumerate(held.taken()):
        said[row, taken[taken >= 0]] = True
    for part, sets in (("true", hot.numpy()), ("predicted", said)):
        for (i, a), (j, b) in itertools.product(enumerate(found["labels"]), repeat=2):
            both, either = (sets[:, a] & sets[:, b]).sum(), (sets[:, a] | sets[:, b]).sum()
            assert found[f"{part}_rows"][i][j] == both
            assert found[part][i][j] == pytest.approx(both / max(either, 1), abs=1e-4)


def test_label_sets_by_brute_force(tmp_path):
    _, held, y, hot = held_of(make_run(tmp_path / "a"))
    run = read([tmp_path / "a"])[0]
    found = numbers.sets(run)
    said = np.zeros((60, 8), dtype=bool)
    for row, taken in enumerate(held.taken()):
        said[row, taken[taken >= 0]] = True
    for rule, sets in (("predicted", said), ("half", y.numpy() >= 0.5)):
        right, size, true = (x.astype(float) for x in (sets & hot.numpy(), sets, hot.numpy()))
        defined = (size + true).sum(1) > 0
        rows = (2 * right.sum(1) / np.maximum((size + true).sum(1), 1))[defined]
        expected = {
            "set_f1": rows.mean(),
            "micro_f1": 2 * right.sum() / (size + true).sum(),
            "macro_f1": (2 * right.sum(0) / (size + true).sum(0)).mean(),
            "hamming": (size != true).mean(),
            "exact_match": (size == true).all(1).mean(),
        }
        assert found[rule] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("dense", [True, False])
def test_thresholds_by_brute_force(tmp_path, dense, monkeypatch):
    run, held, _, hot = held_of(make_run(tmp_path / "whole", rows=200))
    y = np.round(held.probability, 1)  # ties
    stored = np.ones_like(y, dtype=bool)
    if not dense:
        order = np.argsort(-y, axis=1, kind="stable")[:, :4]
        stored = np.zeros_like(stored)
        np.put_along_axis(stored, order, True, 1)
        top = {"top_index": order, "top_probability": np.take_along_axis(y, order, 1), "probability": None}
    held = dataclasses.replace(held, **({"probability": y} if dense else top))
    found = thresholds.curves(dataclasses.replace(run, held=held), [7, 0])
    assert found["stored"] == (8 if dense else 4)
    for label, flat in zip([7, 0], found["points"], strict=True):
        true = hot[:, label].numpy()
        points = []
        for level in sorted(set(y[stored[:, label] & true, label]), reverse=True):
            said = stored[:, label] & (y[:, label] >= level)
            points += [level, said.sum(), (said & true).sum()]
        assert flat == pytest.approx(points, rel=1e-3)
    whole = [tuple(point) for point in np.reshape(found["points"][1], (-1, 3))]
    monkeypatch.setattr(thresholds, "POINTS", 3)
    few = thresholds.curves(dataclasses.replace(run, held=held), [0])["points"][0]
    few = [tuple(point) for point in np.reshape(few, (-1, 3))]
    support = int(hot[:, 0].sum())
    assert {whole[0], whole[-1], max(whole, key=lambda p: p[2] / (p[1] + support))} <= set(few) <= set(whole)
    assert len(few) <= 4


def test_holm_by_hand():
    found = [{"p": p} for p in (0.04, 0.01, 0.03)]
    compare._holm(found)
    assert [round(one["p"], 10) for one in found] == [0.06, 0.03, 0.06]


def test_a_run_does_not_differ_from_itself_and_differs_from_a_worse_one(tmp_path):
    good, same = make_run(tmp_path / "good", noise=0.05), make_run(tmp_path / "same", noise=0.05)
    bad = make_run(tmp_path / "bad", noise=0.9)
    found = report.summary([good, same, bad])["comparison"]
    for one in found["pairs"][0][1].values():
        assert one == {"difference": 0, "low": 0, "high": 0, "p": 1}
    for name, one in found["pairs"][0][2].items():
        assert one["low"] > 0, name
        assert one["p"] == pytest.approx(found["least"])
        other = found["pairs"][2][0][name]
        assert other["difference"] == -one["difference"]
        assert other["low"] == pytest.approx(-one["high"], abs=1e-12)


def test_the_interval_is_that_of_the_paired_bootstrap(tmp_path):
    runs = read([make_run(tmp_path / "a", rows=300, noise=0.3), make_run(tmp_path / "b", rows=300, noise=0.5)])
    one = compare.compare(runs)["pairs"][0][1]["recall@3"]
    values = [torch.from_numpy(compare.row_values(run.held, [3], 8)["recall@3"]) for run in runs]
    a, b = (v[v.isfinite()] for v in values)
    expected = ll.bootstrap(
        lambda x, y: (x - y).mean(), a, b, n_resamples=4000, generator=torch.Generator().manual_seed(1)
    )
    assert one["difference"] == pytest.approx(float(expected.value))
    width = float(expected.high - expected.low)
    assert one["low"] == pytest.approx(float(expected.low), abs=0.06 * width)
    assert one["high"] == pytest.approx(float(expected.high), abs=0.06 * width)


def test_the_test_holds_its_level(tmp_path):
    """Under the null, p below 0.1 in about one of ten draws of the data."""
    rng = np.random.default_rng(0)
    low = 0
    for seed in range(200):
        values = rng.normal(size=(2, 1, 80))
        drawn = compare._drawn(values, 500, seed)
        low += compare._difference(float((values[0] - values[1]).mean()), (drawn[0] - drawn[1])[:, 0])["p"] < 0.1
    assert 8 <= low <= 36  # within 4 standard deviations of 20


@pytest.mark.parametrize("change", ["rows", "names", "predictions"])
def test_runs_on_other_rows_have_no_paired_test(tmp_path, change):
    a = make_run(tmp_path / "a")
    b = make_run(
        tmp_path / "b", seed=change == "rows", names=[f"l{c}" for c in range(8)] if change == "names" else None
    )
    if change == "predictions":
        (b / "predictions.safetensors").unlink()
    found = report.summary([a, b])
    assert found["comparison"]["pairs"] == []
    assert ("no stored predictions" if change == "predictions" else "not measured on the same rows") in found[
        "comparison"
    ]["why"]
    assert found["comparison"]["why"] in found["sentences"]
