"""Numbers as arguments under `torch.compile`: a new one is compiled once, and then no more."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tools import slow
from torch.utils._pytree import tree_leaves

import lastlayer as ll
from lastlayer import decode, loss, metrics

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(4, 6, generator=GENERATOR)
Y = (X.flip(0) > 0.3).float()
CLASS = torch.tensor([0, 1, 2, 3])
FEW, SHARE, NEAR = (1.5, 2.25, 2.75), (0.1, 0.2, 0.3), (1.1, 1.2, 1.3)

# function, arguments after the scores, the argument that varies, its values
ALL = [
    (ll.lml, (), "k", FEW),
    (ll.lml, (2,), "temperature", NEAR),
    (ll.lml, (2,), "weight", NEAR),
    (ll.lml, (2,), "lower", SHARE),
    (ll.lml, (2,), "upper", (0.7, 0.8, 0.9)),
    (ll.log_lml, (2,), "temperature", NEAR),
    (ll.lml_threshold, (2,), "temperature", NEAR),
    (ll.lml_at_most, (), "k", FEW),
    (ll.lml_at_most, (2,), "weight", NEAR),
    (ll.lml_balanced, (), "k", FEW),
    (ll.lml_balanced, (2,), "temperature", NEAR),
    (functools.partial(ll.lml_balanced, at_most=True), (2,), "capacity", FEW),
    (ll.capped_softmax, (), "k", FEW),
    (loss.lml_fenchel_young_loss, (Y,), "k", FEW),
    (loss.linear_lml_loss, (X, Y[:, :4]), "k", FEW),
    (loss.binary_loss, (Y,), "label_smoothing", SHARE),
    (loss.binary_loss, (Y,), "pos_weight", NEAR),
    (loss.assume_negative_loss, (Y,), "label_smoothing", SHARE),
    (loss.assume_negative_loss, (Y,), "negative_weight", SHARE),
    (loss.asymmetric_loss, (Y,), "gamma_positive", NEAR),
    (loss.asymmetric_loss, (Y,), "gamma_negative", (3.1, 3.3, 3.5)),
    (loss.asymmetric_loss, (Y,), "clip", SHARE),
    (loss.entropy_max_loss, (Y,), "alpha", SHARE),
    (loss.entropy_max_loss, (Y,), "beta", SHARE),
    (loss.expected_positive_loss, (Y,), "k", FEW),
    (loss.hill_loss, (Y,), "lamb", NEAR),
    (loss.hill_loss, (Y,), "margin", NEAR),
    (loss.hill_loss, (Y,), "gamma", FEW),
    (loss.splc_loss, (Y,), "threshold", SHARE),
    (loss.splc_loss, (Y,), "margin", NEAR),
    (loss.splc_loss, (Y,), "gamma", FEW),
    (loss.role_loss, (Y, X.flip(1)), "k", FEW),
    (loss.multihot_softmax_loss, (Y,), "label_smoothing", SHARE),
    (loss.quasibinary_loss, (Y,), "log_normalizer", SHARE),
    (loss.reciprocal_point_loss, (X[:, None], X[:, 0].abs(), CLASS), "scale", NEAR),
    (loss.reciprocal_point_loss, (X[:, None], X[:, 0].abs(), CLASS), "open_weight", SHARE),
    (loss.rml_loss, (Y,), "ramp_start", (-0.8, -0.7, -0.6)),
    (loss.smooth_topk_svm_loss, (CLASS, 2), "tau", NEAR),
    (loss.spherical_loss, (torch.ones(4, 64), torch.nn.functional.normalize(X)), "sign_weight", NEAR),
    (loss.topk_distillation_loss, (X.flip(0), 2), "temperature", NEAR),
    (loss.two_way_loss, (Y,), "positive_temperature", NEAR),
    (loss.two_way_loss, (Y,), "margin", SHARE),
    (functools.partial(decode.decode_threshold, at_most=3), (), "threshold", SHARE),
    (decode.decode_reject, (), "threshold", SHARE),
    (metrics.label_set_f1, (Y,), "threshold", SHARE),
    (metrics.hamming_loss, (Y,), "threshold", SHARE),
]


@pytest.mark.parametrize(
    ("function", "given", "name", "values"), [case if case[2] == "gamma_negative" else slow(*case) for case in ALL]
)
def test_new_numbers_are_not_compiled_anew(function, given, name, values):
    """The second number makes one graph for all others; the count of `large_loss`, a size, has one for each."""
    torch._dynamo.reset()

    def call(x, value):
        return function(x, *given, **{name: value})

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for i, value in enumerate(values):
        x = X.sigmoid() if "threshold" in name else X.clone().requires_grad_()
        with torch._dynamo.config.patch(error_on_recompile=i > 1):
            found = compiled(x, value)
        expected = call(x, value)
        for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
            torch.testing.assert_close(one, other)
        if isinstance(expected, torch.Tensor) and expected.requires_grad:
            torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in (found, expected)))


FIRST_CALLS = """
import sys
from test_compiled_numbers import ALL, X
for function, given, name, values in ALL:
    x = X.sigmoid() if "threshold" in name else X.clone().requires_grad_()
    y = function(x, *given, **{name: values[0]})
    if getattr(y, "requires_grad", False):
        y.sum().backward()
    assert "torch._dynamo" not in sys.modules, function
"""


def test_no_call_imports_the_compiler():
    """Which takes more than a second, for which a first call would have to wait."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run([sys.executable, "-c", FIRST_CALLS], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("function", "options"), [(ll.lml, {}), slow(ll.log_lml, {}), slow(ll.lml_at_most, {"weight": torch.ones(6)})]
)
@pytest.mark.skipif(
    not hasattr(torch.compiler, "is_exporting"), reason="torch 2.6 cannot say what it knows of a number"
)
def test_temperatures_from_1_on_are_one_graph(function, options):
    """A look whether a variable number is 1 would fix it, and the compiler fixes all that follow."""
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for i, value in enumerate((1.0, 0.5, 0.25)):
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            found = compiled(X, 2, temperature=value, **options)
        torch.testing.assert_close(found, function(X, 2, temperature=value, **options))


@pytest.mark.slow
def test_rows_and_classes_of_metrics_and_draws_are_one_graph():
    torch._dynamo.reset()

    def measure(x, y, k):
        return metrics.ndcg_at_k(x, y, k), ll.recall_at_k(x, y, k), ll.sample_subset(x, k).shape[-1]

    compiled = torch.compile(measure, fullgraph=True, dynamic=True, backend="aot_eager")
    for i, (rows, n, k) in enumerate(((4, 6, 2), (5, 9, 3), (7, 33, 5), (3, 64, 4))):
        x = torch.randn(rows, n, generator=GENERATOR)
        y = (x.flip(0) > 0.3).float()
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            found = compiled(x, y, k)
        torch.testing.assert_close(found[:2], measure(x, y, k)[:2])
        assert found[2] == k
