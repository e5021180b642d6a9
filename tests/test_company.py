"""Every public function in the company of other code: fakes, traces, subclasses, transforms, autocast, meta tensors.

The functions and Modules are found in the package: one that has no entry in the tables below fails a test, so that none
is forgotten.
"""

import contextlib
import copy
import importlib
import inspect
import io
import pickle
import pkgutil
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from tools import slow
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.func import jacfwd, jacrev, linearize, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_leaves, tree_map_only

import lastlayer as ll

ROOMS = ("project", "loss", "head", "decode", "metrics")


def members(wanted: Callable[[Any], bool]) -> dict[str, Any]:
    """Return the functions or classes that the rooms export, by name; streaming metrics are tested in tests/metrics."""
    found = {}
    for room in ROOMS:
        package = importlib.import_module(f"lastlayer.{room}")
        for module in pkgutil.iter_modules(package.__path__):
            if not module.name.lstrip("_").startswith("stream"):
                values = vars(importlib.import_module(f"lastlayer.{room}.{module.name}"))
                found |= {name: values[name] for name in package.__all__ if name in values and wanted(values[name])}
    return found


FUNCTIONS = members(inspect.isfunction)
MODULES = members(lambda value: inspect.isclass(value) and issubclass(value, nn.Module))


class Case(NamedTuple):
    """The arguments of a function; the first is the one to differentiate."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    smooth: bool  # twice differentiable in the first argument
    reads: bool  # reads values, so that it may refuse to be faked or traced
    draws: bool  # random


def case(*arguments: Any, smooth: bool = True, reads: bool = False, draws: bool = False, **options: Any) -> Case:
    return Case(arguments, options, smooth, reads, draws)


counts = partial(case, smooth=False)  # counts and decisions
reader = partial(case, smooth=False, reads=True)

torch.manual_seed(0)
X = torch.randn(3, 4, dtype=torch.float64)
P = X.softmax(-1)
HOT = torch.tensor([[1.0, 0, 0, 1], [0, 1, 0, 0], [0, 1, 1, 0]], dtype=torch.float64)
LISTS = torch.tensor([[0, 3], [1, -1], [1, 2]])
ONE = torch.tensor([0, 1, 2])
PAIRS = torch.tensor([[0, 1], [1, 0], [1, 2]])
TRIPLES = torch.tensor([[0, 1, 0], [1, 2, 1]])
GRAPH = torch.tensor([[0, 1, 0], [1, 2, 0], [2, 0, 1]])
TREE = ll.LabelTree.from_parents([4, 4, 5, 5, 6, 6, -1])
POINTS = torch.randn(4, 1, 4, dtype=torch.float64)

CASES = {
    "lml": case(X, 2),
    "log_lml": case(X, 2),
    "lml_threshold": case(X, 1.5),
    "lml_at_most": case(X, 1.5),
    "lml_balanced": case(X, 2),
    "lml_balanced_duals": case(X, 2),
    "capped_softmax": case(X, 2),
    "capped_sparsemax": case(X, 2),
    "spherical_exp": case(X),
    "sample_subset": counts(X, 2, draws=True),
    "subset_marginals": case(X, 2),
    "subset_log_prob": case(X, 2, torch.tensor([[0, 1], [1, 2], [0, 3]])),
    "attentive_pool": case(X, X.flip(0)),
    "assume_negative_loss": case(X, LISTS),
    "expected_positive_loss": case(X, LISTS, 1.5),
    "role_loss": case(X, LISTS, X.flip(0).sigmoid(), 1.5),
    "entropy_max_loss": case(X, LISTS),
    "hill_loss": case(X, LISTS),
    "lml_loss": case(X, LISTS, 2),
    "lml_fenchel_young_loss": case(X, HOT),
    "linear_lml_loss": case(X, X.new_ones(5, 4).cumsum(0) / 5, LISTS, 2),
    "two_way_loss": case(X, HOT),
    "asymmetric_loss": case(X, LISTS),
    "multihot_softmax_loss": case(X, LISTS),
    "binary_loss": case(X, LISTS),
    "outlier_uniform_loss": case(X),
    "outlier_max_confidence_loss": case(X),
    "quasibinary_loss": case(X, HOT),
    "warp_loss": case(X, LISTS),
    "rml_loss": case(X, LISTS),
    "reciprocal_point_loss": case(X, POINTS, X.new_ones(4), ONE),
    "splc_loss": case(X, LISTS),
    "large_loss": case(X, LISTS),
    "large_loss_corrections": counts(X, LISTS),
    "spherical_loss": case(
        X, torch.randn(3, 16, dtype=torch.float64), X.flip(0) / X.flip(0).norm(dim=-1, keepdim=True)
    ),
    "metric_surrogate_loss": case(X, HOT, "accuracy", draws=True),
    "truncated_entropy_loss": case(X, ONE, 2),
    "smooth_topk_svm_loss": case(X, ONE, 2),
    "topk_distillation_loss": case(X, X.flip(0), 2),
    "decode_graph": counts(P, PAIRS, 2),
    "decode_reject": counts(P, 0.5),
    "tune_reject": counts(P, 0.5),
    "decode_threshold": counts(P, at_most=2),
    "tune_thresholds": counts(P, HOT),
    "decode_top_k": counts(P, 2),
    "suggest_labels": reader(P, HOT),
    "tune_recall": reader(P, HOT, 0.2),
    "decode_tree": counts(P, TREE),
    "tune_darts": reader(P, ONE, TREE, accuracy=0.9),
    "rotation_error": counts(torch.linalg.qr(torch.randn(2, 3, 3)).Q, torch.eye(3).expand(2, 3, 3)),
    "angular_error": counts(X, X.flip(0)),
    "precision_at_k": counts(X, LISTS, 2),
    "recall_at_k": counts(X, LISTS, 2),
    "f1_at_k": counts(X, LISTS, 2),
    "r_precision_at_k": counts(X, LISTS, 2),
    "ndcg_at_k": counts(X, LISTS, 2),
    "psp_at_k": counts(X, LISTS, 2, torch.rand(4)),
    "top_k_accuracy": counts(X, ONE, 2),
    "propensity": counts(torch.tensor([1.0, 2, 3]), 9),
    "fall_out_at_k": counts(X, LISTS, 2),
    "label_set_precision": counts(P, HOT, threshold=0.25),
    "label_set_recall": counts(P, HOT, threshold=0.25),
    "label_set_f1": counts(P, HOT, threshold=0.25),
    "label_set_jaccard": counts(P, HOT, threshold=0.25),
    "hamming_loss": counts(P, HOT, threshold=0.25),
    "exact_match": counts(P, HOT, threshold=0.25),
    "mean_reciprocal_rank": counts(X, LISTS),
    "coverage_error": counts(X, LISTS),
    "label_ranking_loss": counts(X, LISTS),
    "precision_recall_curve": counts(X, HOT),
    "mean_average_precision": counts(X, HOT),
    "bootstrap": counts(lambda s: s.mean(0).amax(), X, n_resamples=5, draws=True),
    "reliability_bins": counts(P, HOT),
    "label_calibration_error": counts(P, HOT),
    "fit_temperature": reader(X, HOT),
    "label_set_errors": reader(P, HOT),
    "graph_recall_at_k": reader(TRIPLES, GRAPH, 2),
    "graph_mean_recall_at_k": reader(TRIPLES, GRAPH, 2, n_predicates=2),
    "graph_zero_shot_recall_at_k": reader(TRIPLES, GRAPH, 2, seen=TRIPLES, labels=torch.arange(3)),
    "mean_max_confidence": counts(P),
    "auroc": counts(X, HOT),
    "tree_accuracy": counts(torch.tensor([[4], [2], [2]]), ONE, TREE),
    "tree_specificity": counts(torch.tensor([[4], [2], [2]]), ONE, TREE),
}
LOSSES = sorted(name for name in CASES if name.endswith("_loss") and ".metrics." not in FUNCTIONS[name].__module__)
SMOOTH = sorted(name for name, given in CASES.items() if given.smooth)
REFUSAL = r"local_scalar_dense|nonzero|unique|meta tensor|tracing tensor|vmap|Batching rule"  # torch's own words

MADE = {  # one of each Module, with numbers as tensors where it takes them
    "LML": lambda: ll.LML(torch.tensor(2.5)),
    "LogLML": lambda: ll.LogLML(torch.tensor(2.5)),
    "LMLThreshold": lambda: ll.LMLThreshold(torch.tensor(2.5)),
    "LMLAtMost": lambda: ll.LMLAtMost(torch.tensor(2.5)),
    "LMLBalanced": lambda: ll.LMLBalanced(torch.tensor(2.0)),
    "CappedSoftmax": lambda: ll.CappedSoftmax(torch.tensor(2.5)),
    "CappedSparsemax": lambda: ll.CappedSparsemax(torch.tensor(2.5)),
    "SphericalExp": lambda: ll.SphericalExp(),
    "SampleSubset": lambda: ll.SampleSubset(2),
    "SubsetMarginals": lambda: ll.SubsetMarginals(2),
    "AssumeNegativeLoss": lambda: ll.AssumeNegativeLoss(),
    "ExpectedPositiveLoss": lambda: ll.ExpectedPositiveLoss(torch.tensor(1.5)),
    "ROLELoss": lambda: ll.ROLELoss(torch.tensor(1.5)),
    "EntropyMaxLoss": lambda: ll.EntropyMaxLoss(),
    "HillLoss": lambda: ll.HillLoss(),
    "LMLLoss": lambda: ll.LMLLoss(torch.tensor(2.5)),
    "LMLFenchelYoungLoss": lambda: ll.LMLFenchelYoungLoss(torch.tensor(2.5)),
    "TwoWayLoss": lambda: ll.TwoWayLoss(),
    "AsymmetricLoss": lambda: ll.AsymmetricLoss(),
    "MultihotSoftmaxLoss": lambda: ll.MultihotSoftmaxLoss(),
    "BinaryLoss": lambda: ll.BinaryLoss(),
    "OutlierUniformLoss": lambda: ll.OutlierUniformLoss(),
    "OutlierMaxConfidenceLoss": lambda: ll.OutlierMaxConfidenceLoss(),
    "QuasibinaryLoss": lambda: ll.QuasibinaryLoss(),
    "WARPLoss": lambda: ll.WARPLoss(),
    "RMLLoss": lambda: ll.RMLLoss(),
    "SPLCLoss": lambda: ll.SPLCLoss(),
    "LargeLoss": lambda: ll.LargeLoss(),
    "SphericalLoss": lambda: ll.SphericalLoss(),
    "MetricSurrogateLoss": lambda: ll.MetricSurrogateLoss("accuracy"),
    "TruncatedEntropyLoss": lambda: ll.TruncatedEntropyLoss(2),
    "SmoothTopKSVMLoss": lambda: ll.SmoothTopKSVMLoss(2),
    "TopKDistillationLoss": lambda: ll.TopKDistillationLoss(2),
    "DecodeGraph": lambda: ll.DecodeGraph(2),
    "DecodeReject": lambda: ll.DecodeReject(torch.tensor(0.5)),
    "DecodeThreshold": lambda: ll.DecodeThreshold(torch.tensor([0.2, 0.3, 0.4, 0.5])),
    "DecodeTopK": lambda: ll.DecodeTopK(2),
    "DecodeTree": lambda: ll.DecodeTree(TREE),
    "LabelEstimates": lambda: ll.LabelEstimates(3, 4),
    "AttentivePoolHead": lambda: ll.head.AttentivePoolHead(4, 5),
    "PrototypeHead": lambda: ll.PrototypeHead(4, 5),
    "ReciprocalPointHead": lambda: ll.ReciprocalPointHead(4, 5),
    "QuasibinaryHead": lambda: ll.QuasibinaryHead(4, 5),
    "SphericalHead": lambda: ll.SphericalHead(4, 3),
    "ShardedLinear": lambda: ll.ShardedLinear(4, 5),
}


def call(name: str, change: Callable[[Tensor], Any] = lambda t: t) -> Any:
    """Call a function on its arguments, each tensor changed."""
    given = CASES[name]
    arguments, options = tree_map_only(Tensor, change, (given.arguments, given.options))
    torch.manual_seed(0)
    return FUNCTIONS[name](*arguments, **options)


def of_first(name: str) -> Callable[[Tensor], Any]:
    """Return the function of its first tensor."""
    given = CASES[name]
    place = next(i for i, value in enumerate(given.arguments) if isinstance(value, Tensor))

    def function(x: Tensor) -> Any:
        torch.manual_seed(0)
        return FUNCTIONS[name](*given.arguments[:place], x, *given.arguments[place + 1 :], **given.options)

    return function


def first(name: str) -> Tensor:
    return next(value for value in CASES[name].arguments if isinstance(value, Tensor))


def another(x: Tensor) -> Tensor:
    """Return other values of the same kind: rows in another order, and logits a little larger."""
    return 1.25 * x.flip(0) if x is X else x.flip(0) if x is P else x.clone()


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


@contextlib.contextmanager
def may_refuse(name: str) -> Iterator[None]:
    """Let a function that reads values end in an error that says so."""
    try:
        yield
    except RuntimeError as error:  # NotImplementedError is one, too
        if not (CASES[name].reads and re.search(REFUSAL, str(error))):
            raise


def assert_same(actual: Any, expected: Any) -> None:
    actual, expected = tensors(actual), tensors(expected)
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, equal_nan=True)


def test_every_function_and_module_has_a_case():
    assert sorted(CASES) == sorted(FUNCTIONS), f"no line in CASES for {set(FUNCTIONS) - set(CASES)}"
    assert sorted(MADE) == sorted(MODULES), f"no line in MADE for {set(MODULES) - set(MADE)}"


@pytest.mark.parametrize("name", [slow(name) if i % 2 else name for i, name in enumerate(sorted(CASES))])
def test_fake_and_meta_tensors_have_the_shapes_of_real_ones(name):
    mode = FakeTensorMode()

    def shapes(change: Callable[[Tensor], Tensor]) -> Any:
        return [(t.shape, t.dtype) for t in tensors(call(name, change))]

    for change, context in ((mode.from_tensor, mode), (lambda t: t.to("meta"), contextlib.nullcontext())):
        with may_refuse(name), context:
            found = shapes(change)
            with unset_fake_temporarily():
                assert found == shapes(lambda t: t)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # make_fx warns of lifted constants
@pytest.mark.parametrize("name", sorted(CASES))
def test_a_graph_holds_for_other_values(name):
    x, function = first(name), of_first(name)
    with may_refuse(name):
        graph = make_fx(function)(x)
        torch.manual_seed(0)
        assert_same(graph(another(x)), function(another(x)))


@pytest.mark.parametrize("name", sorted(name for name in CASES if not CASES[name].reads and not CASES[name].draws))
def test_a_wrapper_subclass_is_unwrapped(name):
    found = tensors(call(name, lambda t: TwoTensor(t.clone(), another(t))))
    for pair, one, other in zip(found, tensors(call(name)), tensors(call(name, another)), strict=True):
        torch.testing.assert_close(getattr(pair, "a", pair), one, equal_nan=True)  # a constant is no pair
        torch.testing.assert_close(getattr(pair, "b", pair), other, equal_nan=True)


@pytest.mark.parametrize("name", sorted(name for name in CASES if not CASES[name].draws))
def test_vmap_is_a_loop(name):
    x, function = first(name), of_first(name)
    with may_refuse(name):
        found = vmap(function)(torch.stack([x, another(x)]))
        for i, one in enumerate((x, another(x))):
            assert_same([t[i] for t in tensors(found)], function(one))


@pytest.mark.parametrize("name", SMOOTH)
def test_second_derivatives_agree_in_both_modes(name):
    x, function = first(name)[:2], of_first(name)
    if x.shape[0] != first(name).shape[0]:
        x, rest = first(name)[:1], first(name)[1:]
        whole = function
        function = lambda row: whole(torch.cat([row, rest]))  # noqa: E731

    def weighted(x: Tensor) -> Tensor:
        return sum(
            (out * torch.linspace(0.5, 1.5, out.numel()).reshape(out.shape)).sum() for out in tensors(function(x))
        )

    backward = jacrev(jacrev(weighted))(x)
    forward = partial(jacfwd, randomness="same")
    for transformed in (forward(forward(weighted)), forward(jacrev(weighted))):
        torch.testing.assert_close(transformed(x), backward)


@pytest.mark.parametrize("name", ["lml", "log_lml", "lml_threshold"])
def test_linearize(name):
    x, function = first(name), of_first(name)
    value, push = linearize(function, x)
    torch.testing.assert_close(value, function(x))
    torch.testing.assert_close(push(another(x)), torch.func.jvp(function, (x,), (another(x),))[1])


@pytest.mark.parametrize("name", LOSSES)
def test_losses_under_autocast_are_float32_as_those_of_torch(name):
    def half(t: Tensor) -> Tensor:
        return t.bfloat16() if t.is_floating_point() else t

    with torch.autocast("cpu", torch.bfloat16):
        assert torch.nn.functional.cross_entropy(half(X), ONE).dtype == torch.float32
        loss = call(name, half)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), call(name), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"linear_lml_loss"}))  # that one is a layer, too
def test_float32_stays_float32_under_autocast(name):
    def single(t: Tensor) -> Tensor:
        return t.float() if t.is_floating_point() else t

    alone = call(name, single)
    with torch.autocast("cpu", torch.bfloat16):
        inside = call(name, single)
    for a, e in zip(tensors(inside), tensors(alone), strict=True):
        torch.testing.assert_close(a, e, equal_nan=True, rtol=1e-6, atol=1e-7)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('ddp')}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", LOSSES)
def test_losses_behind_ddp(one_process, name):
    model = nn.Linear(4, 4, dtype=torch.float64)
    parallel = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    for network in (model, parallel):
        of_first(name)(network(first(name))).backward()
    for a, b in zip(parallel.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("name", sorted(MADE))
def test_modules_travel(name):
    module = MADE[name]()
    for other in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        assert repr(other) == repr(module)
        assert_same(list(other.state_dict().values()), list(module.state_dict().values()))
    numbers = {n: b.clone() for n, b in module.named_buffers() if n in getattr(module, "_options", ())}
    module.bfloat16()
    for n, before in numbers.items():
        assert torch.equal(getattr(module, n), before), "an argument is no activation"
        assert getattr(module, n).dtype == before.dtype
    assert all(getattr(module.to("meta"), n).is_meta for n in numbers)


def test_a_cast_leaves_k_as_it_is():
    model = nn.Sequential(nn.Linear(3, 400), ll.LML(torch.tensor(257.0))).bfloat16()
    assert model[1].k == 257
    y = model[1](torch.zeros(1, 400))
    torch.testing.assert_close(y.sum(), torch.tensor(257.0))


ODD = {
    "a nested tensor": lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(4)]),
    "torch.sparse_coo": lambda: torch.ones(3, 4).to_sparse(),
    "torch.sparse_csr": lambda: torch.ones(3, 4).to_sparse_csr(),
    "torch._mkldnn": lambda: torch.ones(3, 4).to_mkldnn(),
    "torch.float8_e4m3fn": lambda: torch.ones(3, 4).to(torch.float8_e4m3fn),
}


@pytest.mark.filterwarnings("ignore")  # nested and CSR tensors are prototypes
@pytest.mark.parametrize("kind", sorted(ODD))
def test_tensors_of_other_kinds_are_refused_in_one_line(kind):
    odd = ODD[kind]()
    for name, given in CASES.items():
        if given.arguments[0] is X or given.arguments[0] is P:
            with pytest.raises(TypeError, match=rf"^{name}: `\w+` must be [^\n]*, got {re.escape(kind)}\. Use [^\n]*$"):
                FUNCTIONS[name](odd, *given.arguments[1:], **given.options)


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
def test_jit_traces_hold_for_other_values():
    for module in (ll.LML(2), ll.LMLAtMost(2), ll.CappedSoftmax(2), ll.CappedSparsemax(2), ll.SubsetMarginals(2)):
        traced = torch.jit.trace(module, X, check_trace=False)
        torch.testing.assert_close(traced(10 * X.flip(0)), module(10 * X.flip(0)))
        torch.jit.save(traced, io.BytesIO())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(name for name in CASES if not CASES[name].reads and not CASES[name].draws))
def test_compiled_twice_with_other_shapes(name):
    torch._dynamo.reset()
    function = torch.compile(FUNCTIONS[name], backend="aot_eager")
    given = CASES[name]
    for times in (1, 2):

        def larger(t: Tensor, times: int = times) -> Tensor:
            by_row = t.ndim > 0 and t.shape[0] == 3 and t is not TRIPLES
            return torch.cat([t] * times) if by_row else t

        arguments, options = tree_map_only(Tensor, larger, (given.arguments, given.options))
        assert_same(function(*arguments, **options), FUNCTIONS[name](*arguments, **options))
