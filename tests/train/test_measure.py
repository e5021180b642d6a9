"""Metrics and their intervals: rows that count by weights give the numbers of rows that are really repeated."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from train_tools import make_rows

from lastlayer import report
from lastlayer.data import LabelData
from lastlayer.metrics import label_calibration_error, mean_average_precision, precision_at_k
from lastlayer.train import Config, evaluate, measure, train


def test_resampled_map_is_that_of_repeated_rows():
    generator = torch.Generator().manual_seed(0)
    y = torch.rand(30, 5, generator=generator)
    hot = torch.rand(30, 5, generator=generator) < 0.2
    hot[:, 4] = False
    found = measure._weighted_map(y, hot, 25, seed=3)
    weights = torch.cat(list(measure._weights(30, 25, seed=3))).long()
    for value, times in zip(found.tolist(), weights, strict=True):
        rows = torch.arange(30).repeat_interleave(times)
        each = mean_average_precision(y[rows].double(), hot[rows], average="none")  # equal rows share a threshold
        assert value == pytest.approx(float(each.nanmean()), abs=1e-6)


def test_best_threshold_takes_all_rows_of_a_score():
    y = torch.tensor([[0.3] * 10 + [0.2]]).T.repeat(1, 2)
    hot = torch.zeros(11, 2, dtype=torch.bool)
    hot[[0, 1, 10], 0] = True  # the first two of the tied rows alone would have an F1 of 0.8
    hot[[8, 9, 10], 1] = True
    found = measure._per_label(y, hot, mean_average_precision(y, hot, average="none"))["threshold"]
    assert found == pytest.approx([0.2, 0.2])  # F1 6 / 14, against 4 / 13 at 0.3


def _weighted_and_repeated():
    """The rows with weights of 0 to 3, some without labels or without a known word, and the same rows repeated."""
    data = make_rows(150, seed=5)
    keep = np.random.default_rng(1).random(len(data)) > 0.1
    lists = [data.names(i) if keep[i] else [] for i in range(len(data))]
    texts = ["unheard" if i % 7 == 0 else text for i, text in enumerate(data.texts)]
    data = LabelData.from_lists(lists, label_names=data.label_names, texts=texts)
    weights = np.random.default_rng(2).integers(0, 4, len(data))
    return replace(data, weights=weights * 0.01), data.take(np.repeat(np.arange(len(data)), weights)), weights


def test_rows_of_an_evaluation_count_by_their_weights(tmp_path):
    weighted, repeated, weights = _weighted_and_repeated()
    run = train({"all": make_rows()}, Config(loss="binary", C="1", bootstrap=0), tmp_path / "run")
    found, expected = (evaluate(run.path, data, resamples=40) for data in (weighted, repeated))
    assert {n: v["value"] for n, v in found["metrics"].items()} == pytest.approx(
        {n: v["value"] for n, v in expected["metrics"].items()}, abs=1e-6
    )
    for name in ("recall@5", "ndcg@5", "micro_f1", "hamming_loss", "map", "map_sample"):
        value = found["metrics"][name]
        assert value["low"] <= value["value"] <= value["high"]
    assert any("count the rows by their weights" in note for note in found["notes"])
    assert not any("weights" in note for note in expected["notes"])
    silent = evaluate(run.path, replace(weighted, weights=np.zeros(len(weights))), resamples=0)
    plain = evaluate(run.path, replace(weighted, weights=None), resamples=0)
    assert "weights" not in str(silent["notes"])
    assert silent["metrics"]["map"]["value"] == plain["metrics"]["map"]["value"]


def test_a_report_counts_rows_by_their_weights(tmp_path):
    weighted, repeated, _ = _weighted_and_repeated()
    parts = {"train": make_rows(), "valid": make_rows(80, seed=9)}
    runs = []
    for number, test in enumerate((weighted, repeated)):
        for C in ("1", "0.01"):
            config = Config(loss="binary", C=C, bootstrap=0)
            runs.append(train({**parts, "test": test}, config, tmp_path / f"{number}-{C}").path)
    pages = [report.summary(runs[:2]), report.summary(runs[2:])]
    for one, other in zip(pages[0]["runs"], pages[1]["runs"], strict=True):
        for key in ("precision", "recall", "precision_limit", "recall_limit"):
            assert one["curve"][key] == pytest.approx(other["curve"][key], abs=2e-6)
        for kind in ("best", "all"):
            for key in ("confidence", "accuracy"):
                assert one["reliability"][kind][key] == pytest.approx(other["reliability"][kind][key], abs=2e-6)
        for rule in ("predicted", "half"):
            assert one["sets"][rule] == pytest.approx(other["sets"][rule], abs=2e-6)
    found, expected = (page["comparison"]["pairs"][0][1] for page in pages)
    for name, gap in found.items():
        assert gap["difference"] == pytest.approx(expected[name]["difference"], abs=1e-9)
        assert gap["low"] <= gap["difference"] <= gap["high"]


def test_the_note_on_incomplete_labels_says_which_metrics_are_bounds():
    """Hidden labels lower precision; the calibration error of right probabilities grows, that of low ones falls."""
    (note,) = measure.notes(Config(labels="incomplete"), "test")
    assert "precision is a lower bound" in note
    assert "calibration errors among them, may be off in either direction" in note
    generator = torch.Generator().manual_seed(0)
    right = (2 * torch.randn(5000, 10, generator=generator) - 1).sigmoid()
    true = torch.rand(right.shape, generator=generator) < right
    seen = true & (torch.rand(right.shape, generator=generator) < 0.7)
    assert precision_at_k(right, seen, 3) < precision_at_k(right, true, 3)
    assert label_calibration_error(right, true, k=3) < label_calibration_error(right, seen, k=3)
    assert label_calibration_error(0.5 * right, true, k=3) > label_calibration_error(0.5 * right, seen, k=3)
