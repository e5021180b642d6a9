"""What the tables of the experiments rest on: pairs of seeds, and settings chosen on validation rows alone."""

import argparse
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]


def test_gains_are_of_the_same_seed_and_less_error_is_a_gain(module):
    run = module("does_it_help.run")
    numbers = {("binary", 0): (0.5, 0.1), ("binary", 1): (0.6, 0.2), ("LML", 1): (0.7, 0.05), ("LML", 0): (0.5, 0.3)}
    rows = [
        {"set": "yeast", "head": "mlp", "keep": "0.5", "method": m, "seed": s, "recall5": r, "ece5": e}
        for (m, s), (r, e) in numbers.items()
    ]
    np.testing.assert_allclose(run.gains(rows, "recall5", "mlp", "0.5", "LML")["yeast"], [0, 10])
    np.testing.assert_allclose(run.gains(rows, "ece5", "mlp", "0.5", "LML")["yeast"], [-20, 15])
    assert "| LML | (not run) | | | +5.00 | 1 of 1 | +5.0, +5.0 | (not run) | | |" in run.summary(
        rows, "recall5", "mlp"
    )


def test_settings_come_from_the_validation_rows_of_the_other_experiment(module):
    run = module("does_it_help.run")
    found = run.choices(smoke=False)
    assert len(found) == 11 * 2 * 5 * len(run.METHODS)
    rows = [r for r in module("common").Results(run.CHOICES).rows if r["method"] == "two-way"]
    row = next(r for r in rows if (r["set"], r["head"], r["keep"]) == ("bibtex", "mlp", "0.2"))
    assert found["bibtex", "mlp", "two-way", "0.2"] == (row["option"], row["lr"], row["decay"])


def test_students_of_other_seeds_have_the_weight_that_the_validation_rows_chose(module):
    run = module("distillation.run")
    arguments = argparse.Namespace(
        teacher=ROOT, teacher_width=8, teacher_epochs=2, width=4, epochs=1, kinds=["k = 5"], weights=[0.3, 1.0], seeds=3
    )
    (teacher,) = run.wanted([], arguments)
    rows = [teacher | {"valid_top1": 0.7, "test_top1": 0.7}]
    first = run.wanted(rows, arguments)
    assert [(s["weight"], s["seed"]) for s in first] == [(0.3, 0), (1.0, 0)]
    rows += [s | {"valid_top1": s["weight"], "test_top1": 1 - s["weight"]} for s in first]
    assert [(s["weight"], s["seed"]) for s in run.wanted(rows, arguments)] == [(1.0, 1), (1.0, 2)]


def test_curves_are_of_the_rate_that_ends_best_on_held_out_images(module):
    curves = module("scene_graphs.curves")
    ends = {("train", 0.001): 0.2, ("valid", 0.001): 0.5, ("train", 0.003): 0.9, ("valid", 0.003): 0.4}
    rows = [
        {"loss": "LML, image", "lr": lr, "seed": 0, "part": part, "recall": [[0.9] * 6, [end] * 6]}
        for (part, lr), end in ends.items()
    ]
    assert {row["lr"] for row in curves.chosen(rows)} == {0.001}
    assert "| LML, image (lr 0.001) | 20.0 |" in curves.tables(rows)["curves training"]


@pytest.mark.parametrize("per", ["sample", "class"])
def test_the_terms_of_the_two_way_loss_add_up(module, per):
    run, tabular = module("two_way.run"), module("tabular")
    batch = tabular.Batch(torch.randn(6, 4), torch.rand(6, 4) < 0.5, None, 0.0)
    both, other = (run.two_way(p)(batch) for p in ("both", "class" if per == "sample" else "sample"))
    some = batch.target.any(-1)
    torch.testing.assert_close((both - other)[some], run.two_way(per)(batch).expand(6)[some])
