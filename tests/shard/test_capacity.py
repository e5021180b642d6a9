import json
from pathlib import Path

import pytest

from lastlayer.capacity import Collective, Problem, lml_traffic, main, measured, plan, start_traffic

SMALL = ["--labels", "1e6", "--features", "512", "--rows", "1024", "--devices", "8"]


def test_by_hand():
    found = plan(Problem(labels=1000, features=9, rows=2, devices=4, k=5, optimizer="adam", dtype="float32", passes=2))
    assert found.classes_per_device == 250
    assert found.weight_bytes == found.gradient_bytes == 250 * 10 * 4
    assert found.optimizer_bytes == 250 * 10 * 8
    # counts and the start 48 B gathered each, two passes of 56 B, the result 24 B, the features' gradient 72 B
    assert found.collectives == 6
    assert found.wire_bytes == 1.5 * (2 * 56 + 24 + 72) + 3 * (48 + 48)
    assert found.product_seconds == pytest.approx(2 * 2 * 250 * 9 * 3 / 4e14)


def test_logits_that_cannot_wait_are_computed_again():
    """Three quarters of a million classes with a quarter as many features as rows, except one block of 32,768."""
    for dtype, rows in (("float32", 1024), ("bfloat16", 2048)):
        found = plan(Problem(labels=10**6, features=rows // 4, rows=rows, devices=1, dtype=dtype))
        one = 2 * 10**6 * rows * (rows // 4) / 4e14
        assert found.product_seconds == pytest.approx(one * (3 + 0.75 * (1 - 0.032768)))


def test_one_device_sends_nothing():
    found = plan(Problem(labels=1000, features=9, rows=2, devices=1))
    assert (found.collectives, found.wire_bytes, found.wire_seconds) == (0, 0, 0)


def test_largest_fits_and_no_more():
    problem = Problem(labels=10**8, features=768, rows=4096, devices=64)
    largest = plan(problem).largest_labels
    for labels, fits in ((largest, True), (largest + 64, False)):
        assert plan(Problem(labels=labels, features=768, rows=4096, devices=64)).fits is fits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_is_that_measured_on_a_gpu(dtype):
    found = json.loads(Path(__file__, f"../../../benchmarks/results/linear-h200-{dtype}.json").resolve().read_text())
    for case in found["cases"]:
        if case["way"] == "linear_lml_loss":
            problem = Problem(case["classes"], found["features"], found["rows"], devices=1, k=found["k"], dtype=dtype)
            assert 1 <= plan(problem).activation_bytes / case["peak_bytes"] <= 1.2, case["classes"]


def test_start_takes_the_shorter_way():
    assert start_traffic(10, 5, 4) == [Collective("all_gather", 10 * 6 * 4)]
    assert start_traffic(10, 600, 4) == [Collective("all_reduce", 10 * 2 * 255 * 4)] * 4
    assert start_traffic(10_000, 600, 4) == [Collective("all_reduce", 10_000 * 2 * 15 * 4)] * 8
    assert len(lml_traffic(10, 5, 4, passes=3)) == 1 + 1 + 3 + 2


def test_command(capsys):
    assert main(SMALL) == 0
    assert "classes per device                125,000" in capsys.readouterr().out
    assert main([*SMALL, "--json", "--memory", "0.5", "--labels-a-row", "7"]) == 0  # the flag of version 0.1
    found = json.loads(capsys.readouterr().out)
    assert found["plan"]["fits"] is False
    assert found["problem"]["labels"] == 10**6
    assert found["problem"]["labels_per_row"] == 7


def test_measured_rates_are_of_this_machine():
    problem = measured(Problem(labels=10, features=2, rows=2, devices=1))
    assert problem.flops != Problem.flops
    assert problem.bandwidth != Problem.bandwidth


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--labels", "0.5"], "must be a whole number of at least 1, got 0.5"),
        (["--memory", "-1"], "must be positive, got -1"),
        (["--dtype", "int8"], "invalid choice"),
    ],
)
def test_messages(options, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*SMALL, *options])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
