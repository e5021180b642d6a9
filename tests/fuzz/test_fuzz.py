"""A fixed slice of the fuzzing, the cases that once failed, and the tool itself."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import lastlayer as ll
from fuzz import corpus, reference
from fuzz.__main__ import cases
from fuzz.checks import Op, failures, implementations, takes
from fuzz.ops import BY_NAME, OPS
from fuzz.projections import expect_lml, projection
from fuzz.rows import Case, generate
from lastlayer import loss, project

INTERPRETED = "triton" in implementations() and not torch.cuda.is_available()
KERNELS = tuple(op for op in OPS if "triton" in op.impls)


def check(op, case, impl, seed):
    """A case is right."""
    for row, text in itertools.islice(failures(op, case, impl), 1):
        raise AssertionError(f"seed {seed}, {impl}, row {row} of {tuple(case.logits.shape)}: {text}")


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_slice(op):
    if not set(op.impls) & set(implementations()):
        pytest.skip("this machine has no implementation of it")
    done = 0
    for seed in range(1000, 1008):
        case = op.adapt(generate(seed, op.largest).rows(slice(50)))
        for impl in implementations():
            if takes(op, case, impl) and not (impl == "triton" and INTERPRETED):
                check(op, case, impl, seed)
                done += len(case.logits)
    assert done >= 20  # rows


@pytest.mark.kernels
@pytest.mark.skipif("triton" not in implementations(), reason="neither a GPU nor Triton's interpreter")
@pytest.mark.parametrize("op", KERNELS, ids=lambda op: op.name)
def test_slice_of_the_kernels(op):
    for seed in range(3):  # a call of the interpreter takes a second
        case = op.adapt(generate(seed, op.largest)).rows(slice(4 if INTERPRETED else 2000))
        case = replace(case, layout="plain")
        if takes(op, case, "triton"):
            check(op, case, "triton", seed)


@pytest.mark.kernels
@pytest.mark.skipif(not INTERPRETED, reason="for Triton's interpreter: on a GPU `test_slice` runs these kernels")
@pytest.mark.parametrize("op", [op for op in OPS if "triton" not in op.impls], ids=lambda op: op.name)
def test_slice_of_the_fused_kernels(op):
    for seed in (1000, 1001):
        case = op.adapt(generate(seed, op.largest).rows(slice(40)))
        if takes(op, case, "torch"):
            check(op, case, "torch", seed)


@pytest.mark.parametrize("entry", corpus.load(), ids=lambda entry: f"{entry['op']}-{entry['impl']}")
def test_corpus(entry):
    """A case that one implementation failed is right in all of them."""
    op, case, _ = corpus.decode(entry)
    for impl in implementations():
        if takes(op, case, impl):
            check(op, case, impl, entry["note"])


def test_reference_on_rows_solved_by_hand():
    x = np.array([[3.0, 1.0], [0.0, 0.0], [1e30, -1e30], [5e9, 5e9]])
    z = reference.lml(x, np.array([1.0, 0.5, 1.0, 1.5])).points
    np.testing.assert_allclose(z[:2], [[1.0, -1.0], [np.log(1 / 3)] * 2], rtol=1e-14)
    np.testing.assert_allclose(z[2:], [[1e30, -1e30], [np.log(3.0)] * 2], rtol=1e-14)
    far = reference.lml(np.array([[900.0, 900.0, -900.0]]), np.array([2.0])).points
    np.testing.assert_allclose(far, [[900 + np.log(2) / 2] * 2 + [-900 + np.log(2) / 2]], rtol=1e-15)
    assert reference.at_most(np.array([[0.0, 0.0], [174.0, -174.0]]), np.array([1.0, 1.0])).all()
    assert not reference.at_most(np.array([[174.0, -174.0, -174.0]]), np.array([1.0])).any()
    marginals = np.exp(reference.subset_log_marginals(np.log([[1.0, 2.0, 3.0]]), 2))
    np.testing.assert_allclose(marginals, [[5 / 11, 8 / 11, 9 / 11]], rtol=1e-14)
    capped = np.exp(reference.capped_softmax(np.array([[2.0, 1.0, 0.0, -1.0]]), np.array([2.0])))
    np.testing.assert_allclose(capped, [[1, 0.6652410, 0.2447285, 0.0900306]], rtol=1e-6)
    sparse = reference.capped_sparsemax(np.array([[1.0, 0.75, 0.5, -1.0]]), np.array([2.0]))
    np.testing.assert_allclose(sparse, [[11 / 12, 2 / 3, 5 / 12, 0]], rtol=1e-14)
    weight = np.array([[2.0, 1.0]])
    z = reference.weighted(np.zeros((1, 2)), np.array([1.5]), weight, np.zeros((1, 2)), np.ones((1, 2)))
    np.testing.assert_allclose(z, 0, atol=1e-14)
    grouped = reference.grouped(np.zeros((1, 3)), np.array([1.0]), np.array([0, 0, 1]), np.array([0.5]))
    np.testing.assert_allclose(grouped, [[0.25, 0.25, 0.5]], rtol=1e-14)


def test_a_wrong_result_is_found_shrunk_and_kept(tmp_path, monkeypatch):
    """The tool sees an error of one part in 10^4 in one class of one row, and the file gives the case back."""

    def wrong(x, k, **options):
        y = ll.lml(x, k, **options)
        return torch.where((x > 7) & (y > 0.1), y * 1.0001, y)

    op = Op("lml", projection(wrong), expect_lml)
    logits = torch.zeros(5, 20)
    logits[3, 11] = 8.0
    case = Case(logits, torch.full((5,), 2.0))
    ((row, _),) = dict(failures(op, case, "torch")).items()
    assert row == 3
    small = corpus.shrink(op, case, "torch", row)
    assert small.logits.shape[-1] <= 3
    monkeypatch.setattr(corpus, "PATH", tmp_path / "corpus.json")
    corpus.add(corpus.encode(op, small, "torch", "found"))
    (entry,) = corpus.load()
    found, again, impl = corpus.decode(json.loads(json.dumps(entry)))
    assert found is BY_NAME["lml"]
    assert impl == "torch"
    assert torch.equal(again.logits, small.logits)
    assert not corpus.fails(found, again, impl)  # the real one is right


def test_cases_repeat_and_cover():
    first = [generate(seed) for seed in range(50)]
    for seed, case in enumerate(first[:5]):
        assert torch.equal(case.logits.nan_to_num(), generate(seed).logits.nan_to_num())
    assert {0, 1, 2} <= {case.logits.shape[-1] for case in first}
    assert {case.logits.dtype for case in first} >= {torch.float32, torch.float64, torch.bfloat16}
    assert any(case.mask is not None for case in first)
    assert any((case.k < 1e-8).any() and len(case.k) for case in first)
    drawn = list(itertools.islice(cases(0, KERNELS, ("torch", "native")), 40))
    assert {(op.name, impl) for _, op, _, impl in drawn} >= {(op.name, "native") for op in KERNELS}


def test_every_projection_and_loss_is_in_the_table():
    other = {"linear_lml_loss", "spherical_loss", "reciprocal_point_loss"}  # of features, or of two kinds of logits
    other |= {"large_loss_corrections", "lml_balanced_duals", "sample_subset", "subset_log_prob"}  # not probabilities
    names = {name for name in (*loss.__all__, *project.__all__) if name[0].islower()} - other
    there = {name.split()[0] for name in BY_NAME}
    assert names == there, f"no line in tests/fuzz/losses.py or tests/fuzz/projections.py for {names - there}"
