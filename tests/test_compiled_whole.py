"""Calls that the compiler sees as one operator on the CPU, and what it must not change: see `_threshold/whole.py`."""

import pytest
import torch
from tools import DEVICE, slow

import lastlayer as ll
from lastlayer import _native, loss

pytestmark = pytest.mark.skipif(bool(_native.missing), reason="the compiled kernels are missing")
X = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
HOT = (X.flip(0) > 0.8).float()
CLASS = torch.tensor([0, 3, 1, 11, 3])
LISTS = torch.tensor([[0, 3], [1, -1], [4, 5], [-1, -1], [2, 7]])
COST = torch.linspace(0.5, 1.5, 12)
K = torch.linspace(1, 3, 5)

# Name, function of the scores, and the operators of its graph.
CALLS = {
    "lml_loss": lambda x, **o: ll.lml_loss(x, CLASS, 2, **o),
    "lml_loss, observed": lambda x, **o: ll.lml_loss(x, HOT, 2.5, observed=0.25, **o),
    "lml_loss, lists": lambda x, **o: ll.lml_loss(x, LISTS, 2, observed=0.5, temperature=0.75, **o),
    "lml_loss, marked lists": lambda x, **o: ll.lml_loss(x, ll.label_lists(LISTS), k=2, **o),
    "lml_loss, weights": lambda x, **o: ll.lml_loss(x, HOT > 0, 2, weight=COST, pos_weight=2.0, **o),
    "lml_loss, rows": lambda x, **o: ll.lml_loss(x, CLASS, K, mask=X < 2, sample_weight=K, **o),
    "lml_fenchel_young_loss": lambda x, **o: ll.lml_fenchel_young_loss(x, HOT, **o),
    "truncated_entropy_loss": lambda x, **o: loss.truncated_entropy_loss(x, HOT, 2, **o),
    "smooth_topk_svm_loss": lambda x, **o: loss.smooth_topk_svm_loss(x, CLASS, 2, tau=0.5, **o),
    "two_way_loss": lambda x, **o: ll.two_way_loss(x, HOT, **o),
    "two_way_loss, columns": lambda x, **o: ll.two_way_loss(x, HOT, per="sample", sample_weight=K, **o),
    "asymmetric_loss": lambda x, **o: ll.asymmetric_loss(x, HOT, detach_weight=True, **o),
    "binary_loss": lambda x, **o: ll.binary_loss(x, LISTS, weight=COST, **o),
    "warp_loss": lambda x, **o: loss.warp_loss(x, HOT, **o),
    "quasibinary_loss": lambda x, **o: loss.quasibinary_loss(x, HOT, **o),
    "quasibinary_loss, normalizer": lambda x, **o: loss.quasibinary_loss(x, HOT, log_normalizer=1.5, **o),
}
PROJECTIONS = {
    "lml, weights": lambda x: ll.lml(x, 2, weight=COST),
    "lml, bounds": lambda x: ll.lml(x, K, lower=0.01, upper=COST / 2, temperature=0.5),
    "lml, groups": lambda x: ll.lml(x, 2.0, groups=torch.arange(12) // 3, group_limit=0.75),
    "lml_at_most, weights": lambda x: ll.lml_at_most(x, 2, weight=COST, mask=X < 2),
    "capped_softmax": lambda x: ll.capped_softmax(x, 2.5, temperature=2.0),
    "capped_sparsemax": lambda x: ll.capped_sparsemax(x, K),
    "capped_softmax, columns": lambda x: ll.capped_softmax(x, 1.5, dim=0),
    "subset_marginals": lambda x: ll.subset_marginals(x, 3),
}
QUICK = ("lml_loss, observed", "asymmetric_loss", "lml, weights")


def every(calls):
    return [name if name in QUICK else slow(name) for name in calls]


def compiled(function, graphs=None, **options):
    from torch._dynamo.backends.debugging import aot_eager

    def backend(graph, inputs):
        if graphs is not None:
            graphs.append(graph)
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend, **options)


def assert_same(function, other, x, *more):
    """Values, types and gradients by all that can have one, for an upstream gradient that is not 1."""
    results = []
    for run in (function, other):
        inputs = [value.clone().requires_grad_() for value in (x, *more)]
        out = run(*inputs)
        upstream = torch.linspace(0.5, 2, out.numel()).reshape(out.shape).to(out.dtype)
        results.append([out.detach(), *torch.autograd.grad(out, inputs, upstream)])
    for one, two in zip(*results, strict=True):
        assert one.dtype == two.dtype
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("name", every(CALLS | PROJECTIONS))
def test_values_and_gradients_by_one_operator(name):
    function, graphs = (CALLS | PROJECTIONS)[name], []
    assert_same(compiled(function, graphs), function, X)
    assert_same(compiled(function), function, X.bfloat16())
    (graph,) = graphs
    inner = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    inner += [node.target for part in graph.modules() for node in getattr(getattr(part, "graph", None), "nodes", ())]
    assert any(f"lastlayer.{part}" in str(target) for target in inner for part in ("whole", "whole_ahead"))


@pytest.mark.parametrize("name", every(CALLS))
def test_one_loss_per_row(name):
    function = CALLS[name]
    assert_same(compiled(lambda x: function(x, reduction="none")), lambda x: function(x, reduction="none"), X)
    assert_same(compiled(lambda x: function(x, reduction="sum")), lambda x: function(x, reduction="sum"), X.half())


@pytest.mark.slow
def test_gradients_by_other_arguments():
    more = {
        lambda x, k: ll.lml_loss(x, HOT, k, observed=0.5): K,
        lambda x, k: ll.lml_loss(x, HOT, k, reduction="none"): K,
        lambda x, t: ll.lml_loss(x, CLASS, 2, temperature=t): K,
        lambda x, w: ll.binary_loss(x, HOT, weight=w): COST,
        lambda x, c: loss.quasibinary_loss(x, HOT, log_normalizer=c): torch.tensor(1.5),
        lambda x, w: ll.lml(x, 2, weight=w): COST,
        lambda x, u: ll.lml(x, 2, upper=u): COST,
        lambda x, k: ll.capped_softmax(x, k): K,
    }
    for function, value in more.items():
        assert_same(compiled(function), function, X, value)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lml_loss, observed", "lml, weights"])
def test_rows_and_classes_that_vary_are_one_graph(name):
    def run(x, y, w):
        return ll.lml_loss(x, y, 2, observed=0.5) if "loss" in name else ll.lml(x, 2, weight=w)

    function = compiled(run, dynamic=True)
    for i, (rows, n) in enumerate(((4, 6), (5, 9), (7, 33))):
        x = torch.randn(rows, n)
        y, w = (x > 1).float(), torch.rand(n) + 0.5
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            assert_same(lambda x, y=y, w=w: function(x, y, w), lambda x, y=y, w=w: run(x, y, w), x)


@pytest.mark.slow
def test_autocast():
    """The same types with autocast around the compiled call, and within it."""
    weight = torch.randn(12, 12)
    for name in ("asymmetric_loss", "capped_softmax", "lml_loss, observed"):
        call = (CALLS | PROJECTIONS)[name]

        def run(x, call=call):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return call(x @ weight)

        assert_same(compiled(run), run, X)
        function = compiled(lambda x, call=call: call(x @ weight))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert_same(function, lambda x, call=call: call(x @ weight), X)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    for name in ("asymmetric_loss", "capped_softmax", "lml_loss, lists", "lml, weights"):
        call = (CALLS | PROJECTIONS)[name]
        function = compiled(call)
        with mode():
            torch.testing.assert_close(function(X), call(X))


def test_bad_input_has_the_same_error():
    for function, error in (
        (lambda x: ll.asymmetric_loss(x, HOT, clip=1.5), "asymmetric_loss: `clip` must be below 1, got 1.5"),
        (lambda x: ll.lml_loss(x, LISTS + 9, 2), "lml_loss: `target` must hold classes below n_classes=12, got 16"),
        (lambda x: ll.lml(x, 2, weight=COST[:4]), "lml: `weight` must broadcast to the shape"),
        (lambda x: ll.lml_loss(x, HOT[:2], 2), "lml_loss: `target` must have shape"),
    ):
        with pytest.raises(ValueError, match=error):
            function(X)
        with pytest.raises(ValueError, match=error):
            compiled(function)(X)


def test_a_call_that_the_function_refuses_is_not_taken():
    """The operator has all arguments by name, and leaves out those that are None."""
    for function in (
        lambda x: ll.asymmetric_loss(x, HOT, 2.0),
        lambda x: ll.lml(x, 2, k=3, weight=COST),
        lambda x: ll.asymmetric_loss(x, HOT, clip=None),
        lambda x: ll.asymmetric_loss(x, HOT, reduction=None),
        lambda x: ll.lml(x, 2, weight=COST, dim=None),
        lambda x: ll.asymmetric_loss(x, HOT, reduction="the mean"),
        lambda x: ll.asymmetric_loss(x.to(torch.float8_e5m2), HOT),
    ):
        errors = []
        for call in (function, torch.compile(function, backend="eager")):
            torch._dynamo.reset()
            with pytest.raises((TypeError, ValueError)) as raised:
                call(X)
            errors.append(str(raised.value))
        assert errors[0] == errors[1]


@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.bfloat16)])
def test_one_loss_per_class(dtype):
    def run(x):
        return ll.two_way_loss(x, HOT, per="class", reduction="none")

    assert_same(compiled(run), run, X.to(dtype))


def test_only_the_target_asks_for_a_gradient():
    """Which `lml_loss` does not have: nothing within the operator can be differentiated."""
    target = HOT.clone().requires_grad_()
    for reduction in ("mean", "none"):
        loss = compiled(lambda x, y, r=reduction: ll.lml_loss(x, y, 2, reduction=r))(X, target)
        torch.testing.assert_close(loss, ll.lml_loss(X, HOT, 2, reduction=reduction))
        (grad,) = torch.autograd.grad(loss.sum(), target)
        assert not grad.any()


@pytest.mark.slow
def test_transforms_and_random_numbers_stay_outside():
    def per_row(x):
        return torch.func.vmap(torch.func.grad(lambda row, hot: ll.binary_loss(row, hot)))(x, HOT)

    torch.testing.assert_close(compiled(per_row)(X), per_row(X))
    graphs = []
    compiled(lambda x: loss.warp_loss(x, HOT, exact=False), graphs)(X)
    assert "whole" not in graphs[0].print_readable(print_output=False)


@pytest.mark.parametrize("name", ["lml_loss", slow("lml_fenchel_young_loss"), slow("linear_lml_loss")])
def test_a_row_without_a_solution_has_no_gradient_where_the_loss_is_not_used(name):
    """Its gradient is nan, computed ahead of time, and the upstream gradient is 0."""
    k = torch.where(K == 2, -1, K)

    def run(x):
        if name == "linear_lml_loss":
            return loss.linear_lml_loss(x, X.flip(0), CLASS.clamp(max=4), k)
        return getattr(loss, name)(x, CLASS, k)

    x = X.clone().requires_grad_()
    found = compiled(run)(x)
    assert found.isnan()
    assert torch.autograd.grad(torch.nan_to_num(found), x)[0].eq(0).all()


@pytest.mark.parametrize("reduction", ["mean", slow("none")])
def test_linear_lml_loss_of_many_classes(monkeypatch, reduction):
    """Blocks of classes, whose sizes and places depend on values and addresses."""
    from lastlayer.loss import linear

    monkeypatch.setattr(linear, "tile", lambda x: 16)
    features, weight, bias = torch.randn(6, 4), torch.randn(50, 4), torch.randn(50)
    target = torch.tensor([3, 1, 49, 0, 7, 7])

    def run(features, weight, bias):
        return loss.linear_lml_loss(features, weight, target, 2, bias=bias, reduction=reduction)

    function = compiled(run)
    assert_same(function, run, features, weight, bias)
    half = features.half(), weight.half(), bias.half()
    assert_same(function, run, *half)

    def cast(*given):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return run(*given)

    assert_same(compiled(cast), cast, features, weight, bias)


@pytest.mark.skipif(not hasattr(torch.Tag, "cudagraph_unsafe"), reason="torch 2.9 is the first to have the tag")
@pytest.mark.parametrize("name", ["whole", "whole_ahead", "whole_backward", "balanced_duals", "weighted_threshold"])
def test_operators_that_wait_for_a_gpu_are_marked(name):
    """Or a CUDA graph of the compiler would capture them, which fails."""
    from lastlayer.project import balanced, weighted  # noqa: F401 - where two of them are registered

    assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.lastlayer, name).default.tags


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_linear_lml_loss_beside_cuda_graphs(monkeypatch):
    from lastlayer.loss import linear

    monkeypatch.setattr(linear, "tile", lambda x: 16)
    x, features, weight = (torch.randn(*shape, device=DEVICE) for shape in ((6, 9), (9, 4), (2000, 4)))
    target = torch.tensor([3, 1, 49, 0, 7, 7], device=DEVICE)

    def run(x, features, weight):
        return 2 * loss.linear_lml_loss((x @ features).tanh(), weight, target, 2)

    function = torch.compile(run, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        assert_same(lambda *given: function(*given).clone(), run, x, features, weight)
