"""The compiled kernel against plain torch, on every instruction set this machine has."""

import math
import multiprocessing
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from tools import HUNG, assert_as_accurate, long, slow

import lastlayer._native as native
from lastlayer import lml, lml_at_most, lml_fenchel_young_loss, lml_loss

plain = sys.modules["lastlayer.project.lml"]

ROOT = Path(__file__).parents[2]
REASON = native.unavailable(torch.device("cpu"))
built = pytest.mark.skipif(bool(REASON), reason=f"the compiled kernel cannot run: {REASON}")
DTYPES = (torch.float32, torch.float64)
INF, NAN = math.inf, math.nan


SETS = ("baseline", "AVX2", "AVX-512")
USED = "" if native.unavailable(torch.device("cpu")) else native.instruction_set()


@pytest.fixture(params=[name if name == USED else slow(name) if name == "baseline" else long(name) for name in SETS])
def isa(request):
    library = native.library()
    library.lastlayer_limit_isa(SETS.index(request.param))
    if native.instruction_set() != request.param:
        library.lastlayer_limit_isa(2)
        pytest.skip(f"this processor has no {request.param}")
    yield
    library.lastlayer_limit_isa(2)


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def outputs(logits, k, impl, **options):
    """Return y, log y, nu, and the gradients of each in the logits and k."""
    found = []
    for function in (plain.lml, plain.log_lml, plain.lml_threshold):
        x, size = logits.detach().requires_grad_(), k.detach().requires_grad_()
        value = function(x, size, impl=impl, **options)
        weight = torch.linspace(-1, 1, value.numel(), dtype=torch.float64).reshape(value.shape).to(value.dtype)
        found += [value.detach(), *torch.autograd.grad(value, (x, size), weight)]
    return found


def assert_agrees(kernel, torch_, exact, tolerance=1e-13):
    """The rule for float32; in float64, where plain torch is the reference itself, a tolerance."""
    sound = exact.isfinite() & torch_.isfinite()  # a derivative may be too large for the type
    kernel, torch_, exact = (torch.where(sound, t, 0) for t in (kernel, torch_, exact))
    if kernel.dtype == torch.float32:
        assert_as_accurate(kernel, torch_, exact)
    elif kernel.numel():
        error, scale = (kernel - exact).abs().max(), exact.abs().max().clamp(min=1)
        assert error <= tolerance * scale, f"error {error:.2e} at scale {scale:.2e}"


def compare(logits, k, **options):
    results = (outputs(logits, k, impl, **options) for impl in ("native", "torch"))
    exact = outputs(logits.double(), k.double(), "torch", **options)
    tolerance = max(1e-13, 4 * torch.finfo(torch.float64).eps * logits.abs().max().item())  # of x + nu
    for kernel, torch_, reference in zip(*results, exact, strict=True):
        assert_agrees(kernel, torch_, reference, tolerance)


def exact_threshold(x, k):
    """Bisection in float64, with the residual from small parts, in logarithms where the count is k."""
    lo, hi = -x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True)
    lo, hi = lo + torch.logit(k / x.shape[-1]), hi + torch.logit(k / x.shape[-1])
    for _ in range(120):
        middle = (lo + hi) / 2
        z = x + middle
        log_w = torch.nn.functional.logsigmoid(-z.abs())
        surplus = (z > 0).sum(-1, keepdim=True) - k
        up = torch.where(z > 0, log_w, -INF).logsumexp(-1, keepdim=True)
        down = torch.where(z > 0, -INF, log_w).logsumexp(-1, keepdim=True)
        high = torch.where(surplus == 0, down - up, surplus + down.exp() - up.exp()) > 0
        lo, hi = torch.where(high, lo, middle), torch.where(high, middle, hi)
    return (lo + hi) / 2


@built
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(99, 2), (90, 7), (30, 9, 16), (60, 100), (20, 2500)])
@pytest.mark.parametrize("scale", [slow(1e-3), 1.0, 30.0])
def test_is_as_accurate_as_torch(isa, shape, dtype, scale):
    n = shape[-1]
    x = (scale * torch.randn(shape, dtype=torch.float64)).to(dtype)
    for k in (0.5, 0.3 * n, n - 0.25):
        compare(x, torch.full(shape[:-1], k, dtype=dtype))


ROWS = {
    "normal": lambda n: torch.randn(n),
    "wide": lambda n: 30 * torch.randn(n),
    "constant": lambda n: torch.full((n,), 0.3),
    "ties": lambda n: torch.randn(n).round(),
    "cauchy": lambda n: torch.tan(math.pi * (torch.rand(n) - 0.5)),
    "scales": lambda n: torch.exp(torch.empty(n).uniform_(-9.2, 9.2)),
    "modes": lambda n: torch.randn(n) + 30 * torch.randn(n).sign(),
    "offset": lambda n: 1e4 + torch.randn(n),
    "outlier": lambda n: torch.cat([torch.tensor([1e4]), torch.randn(n - 1)]),
    "pit": lambda n: torch.cat([torch.randn(n - 1), torch.tensor([-1e4])]),
}


@built
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("n", [10, 1001, slow(20000)])
def test_meets_the_sum_and_the_solution(name, n, dtype):
    x = torch.stack([ROWS[name](n).to(dtype) for _ in range(6)])
    k = torch.tensor([[0.5], [1], [2.5], [n / 2], [n - 1], [n - 0.5]], dtype=torch.float64)
    y = plain.lml(x, k.squeeze(-1).to(dtype), impl="native").double()
    log_y = plain.log_lml(x, k.squeeze(-1).to(dtype), impl="native").double()
    wide = x.double() - x.double().median(-1, keepdim=True).values
    z = wide + exact_threshold(wide, k)
    tolerance = (
        1e-6 if dtype == torch.float32 else max(1e-13, 4 * torch.finfo(torch.float64).eps * wide.abs().max().item())
    )
    assert ((y.sum(-1, keepdim=True) - k).abs() <= tolerance * k.clamp(min=1)).all()
    assert (y - z.sigmoid()).abs().max() <= tolerance
    exact = torch.nn.functional.logsigmoid(z)
    assert ((log_y - exact).abs() <= 10 * tolerance * (1 + exact.abs())).all()


@built
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gap", [2, 10, 40, 60, 100, 200, 1e4])
def test_saturated_rows(isa, gap, dtype):
    x = torch.randn(60, 50, dtype=dtype) / 4 + torch.where(torch.arange(50) < 5, gap / 2, -gap / 2)
    compare(x, torch.full((60,), 5.0, dtype=dtype))


def two_levels(gap, top, k, n, dtype):
    """Rows of 0 with the first `top` at `gap`, and y across a gap so wide that the other side is at 0 or 1."""
    high = (torch.arange(n) < top).double()
    return (gap * high).to(dtype), high * min(k / top, 1.0) + (1 - high) * max(k - top, 0.0) / (n - top)


# At a k that is not whole the solution lies beside the gap, not inside it: the last centre of the search, from which
# the gap could be crossed without limits to the exponential, is not the one at which the row is written.
BESIDE = [(10, 1, 0.5), (10, 2, 2.5), (10, 8, 7.75), (1500, 1, 0.5), (1500, 3, 3.0625), (1500, 1498, 1497.5)]


@built
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "top", "k"), BESIDE)
def test_gaps_beside_the_solution(isa, n, top, k, dtype):
    gaps = torch.arange(60, 200, 10) if dtype == torch.float32 else torch.arange(450, 1500, 70)
    for gap in gaps.tolist():
        x, y = two_levels(gap, top, k, n, dtype)
        assert_close = partial(torch.testing.assert_close, rtol=2e-6, atol=1e-20)
        assert_close(plain.lml(x, k, impl="native"), y.to(dtype))
        assert_close(plain.lml(-x, n - k, impl="native"), (1 - y).to(dtype))


@built
@pytest.mark.parametrize("dtype", DTYPES)
def test_gaps_beside_the_solution_by_every_way_in(dtype):
    gap = 120.0 if dtype == torch.float32 else 1100.0
    cases = [two_levels(gap, top, k, 10, dtype) for _, top, k in BESIDE[:3]]
    x, y = (torch.stack(part).to(dtype) for part in zip(*cases, strict=True))
    k = torch.tensor([k for _, _, k in BESIDE[:3]], dtype=dtype)
    wide = torch.cat([x, torch.full_like(x, 500.0)], -1)
    mask = torch.arange(20) < 10
    assert_close = partial(torch.testing.assert_close, rtol=2e-6, atol=1e-20)
    assert_close(plain.lml(x, k, impl="native"), y)
    assert_close(plain.lml(wide, k, mask=mask, impl="native")[:, :10], y)
    assert_close(plain.lml(x / 4, k, temperature=0.25, impl="native"), y)
    assert_close(plain.lml_at_most(x + 300, k, impl="native"), y)
    assert_close(torch.func.vmap(partial(plain.lml, impl="native"))(x, k), y)
    assert_close(plain.log_lml(x, k, impl="native").exp(), y)


@built
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e7, 1e10, 1e16, 1e30])
def test_huge_scores(isa, size, dtype):
    """Scores whose neighbours are further apart than y is wide, where ties alone share."""
    x = size * torch.tensor([[3.0, 2.0, 1.0, -1.0, -2.0]], dtype=dtype)
    ties = size * torch.tensor([[1.0, 1.0, 1.0, -1.0, 0.5]], dtype=dtype)
    for rows in (1, 40):  # alone, and in a tile
        for k, y in ((2, [1, 1, 0, 0, 0]), (2.5, [1, 1, 0.5, 0, 0]), (0.25, [0.25, 0, 0, 0, 0]), (4, [1, 1, 1, 1, 0])):
            found = plain.lml(x.expand(rows, -1), k, impl="native")
            torch.testing.assert_close(found, torch.tensor([y], dtype=dtype).expand(rows, -1), rtol=2e-6, atol=0)
        found = plain.lml(ties.expand(rows, -1), 2, impl="native")
        torch.testing.assert_close(found[:, :3], torch.full_like(found[:, :3], 2 / 3), rtol=2e-6, atol=0)
        assert (found[:, 3:] == 0).all()
    cold = plain.lml(torch.randn(200, 5, dtype=dtype), 2, temperature=1 / size, impl="native")
    torch.testing.assert_close(cold.sum(-1), torch.full_like(cold[:, 0], 2))


@built
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiny_k(isa, dtype):
    x = torch.randn(3, 50, 30, dtype=dtype) * torch.tensor([1, 30, 300.0]).view(3, 1, 1)
    for k in (1e-6, 1e-8, 1e-30):
        y = plain.lml(x, k, impl="native")
        torch.testing.assert_close(y, k * x.softmax(-1), rtol=1e-5, atol=max(1e-20 * k, 1e-37))
    y = 1 - plain.lml(x, torch.tensor(30, dtype=dtype) - 2.0**-18, impl="native").double()
    torch.testing.assert_close(y.sum(-1), torch.full_like(y[..., 0], 2.0**-18), rtol=0, atol=3e-6)


@built
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, slow(2), 17, slow(300)])
def test_edges_are_those_of_torch(isa, n, dtype):
    x = torch.randn(9, n, dtype=dtype)
    x[1, 0], x[2, -1], x[3, 0] = INF, -INF, NAN
    x[4], x[5], x[6], x[7, n // 2 :] = -INF, INF, 0, -INF
    x[8, 0], x[8, -1] = INF, -INF
    masks = (None, torch.rand(n) < 0.7, torch.zeros(n, dtype=torch.bool), torch.rand(9, n) < 0.5)
    for i, size in enumerate((0, 0.5, 1, n / 2, n - 1, n, n + 1, -1, NAN)):
        k = torch.full((9,), size, dtype=dtype)
        for j, mask in enumerate(masks):
            options = {"mask": mask, "temperature": (1.0, 0.3)[(i + j) % 2]}
            results = (outputs(x, k, impl, **options) for impl in ("native", "torch"))
            for kernel, torch_ in zip(*results, strict=True):
                torch.testing.assert_close(kernel, torch_, equal_nan=True)


def at_most(x, k, upstream, impl="auto", **options):
    """Return y and its gradient, from the budget of at most k."""
    leaf = x.clone().requires_grad_()
    y = lml_at_most(leaf, k, impl=impl, **options)
    return y.detach(), torch.autograd.grad(y, leaf, upstream.to(x.dtype))[0]


def composed(x, k, upstream, impl="native", **options):
    """Return the same from lml and the sigmoid."""
    leaf = x.clone().requires_grad_()
    problem, _ = plain.enter("lml_at_most", leaf, k, -1, 1.0, None, None, impl, at_most_n=False)
    y = plain._at_most(problem._replace(**options))
    return y.detach(), torch.autograd.grad(y, leaf, upstream.to(x.dtype))[0]


def wider(k):
    return k.double() if isinstance(k, torch.Tensor) else k


@built
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 3), (40, 100), (3, 2, 100), (10, 2500)])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_at_most_is_the_sigmoid_or_lml(isa, monkeypatch, shape, dtype, scale):
    n, rows = shape[-1], shape[:-1]
    mask, per_row = torch.rand(shape) < 0.8, (0.6 * n * torch.rand(rows, dtype=torch.float64)).to(dtype)
    mask[..., : n // 2 + 1] = True
    upstream, scores = torch.randn(2, *shape, dtype=torch.float64).to(dtype)
    off = torch.linspace(-3, 3, math.prod(rows), dtype=dtype).reshape(rows)  # how far the row is above the budget
    for k, options in ((0.3, {}), (0.2 * n, {"temperature": 0.5}), (0.3 * n, {"mask": mask}), (per_row, {})):
        nu = plain.lml_threshold(scale * scores, k, **options)
        x = scale * scores + options.get("temperature", 1) * (nu + off).unsqueeze(-1)
        exact = at_most(x.double(), wider(k), upstream, "torch", **options)
        reference = at_most(x, k, upstream, "torch", **options)
        with monkeypatch.context() as patch:
            patch.setattr(plain, "_at_most", None)  # the kernel does it both ways
            found = at_most(x, k, upstream, **options)
            assert torch.equal(lml_at_most(x, k, **options), found[0])
        for values in zip(found, reference, exact, strict=True):
            assert_agrees(*values)
        assert torch.equal(found[0][off > 0], lml(x, k, **options)[off > 0])


@built
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 17, 300])
def test_edges_of_at_most(isa, n, dtype):
    x, upstream = torch.randn(2, 12, n, dtype=torch.float64).to(dtype)
    x[0, 0], x[1, 0], x[2, -1], x[3], x[4] = INF, -INF, NAN, INF, -INF
    x[5], x[6], x[7] = 0, 1e4, -1e4  # at k = n / 2 the row of zeros meets the budget exactly
    x[8, : n // 2], x[9] = 200, 1e30
    for k in (0.0, 0.5, 1.0, n / 2, n - 0.25, float(n), n + 1.0, INF, torch.linspace(-1, n + 1, 12).to(dtype)):
        exact, reference = composed(x.double(), wider(k), upstream), composed(x, k, upstream)
        parts = [at_most(x[i], k if isinstance(k, float) else k[i], upstream[i]) for i in range(12)]
        for found in (at_most(x, k, upstream), [torch.stack(rows) for rows in zip(*parts, strict=True)]):
            for ours, plainly, right in zip(found, reference, exact, strict=True):
                assert torch.equal(ours.isnan(), right.isnan())
                assert_agrees(ours, plainly, right)


@built
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_of_memory(dtype):
    x = torch.randn(6, 40, 5, dtype=dtype)
    k = torch.tensor(3.5, dtype=dtype)
    for view in (x.transpose(1, 2), x[:, ::3], x.flip(-1), x.expand(2, 6, 40, 5)):
        mask = (torch.rand(view.shape[-1]) < 0.8).index_fill_(0, torch.arange(4), True)
        for m in (None, mask, mask.expand(view.shape), mask.expand(view.shape).contiguous()):
            assert torch.equal(
                plain.lml(view, k, mask=m, impl="native"), plain.lml(view.clone(), k, mask=m, impl="native")
            )
    for shape in ((0, 5), (3, 0, 5), (0, 0)):
        assert plain.lml(x.new_empty(shape), 0, impl="native").shape == shape
    assert plain.lml(x.new_empty(3, 0), 0, impl="native").shape == (3, 0)


@pytest.fixture(params=["torch's threads", "own threads"])
def _team(request):
    """Run a test on the threads of torch's OpenMP runtime, and on those of the kernels' own pool."""
    team = native._team()
    if request.param == "torch's threads" and team is None:
        pytest.skip("torch has no OpenMP runtime here")
    native.library().lastlayer_use_team(team if request.param == "torch's threads" else None)
    yield
    native.library().lastlayer_use_team(team)


@built
@pytest.mark.usefixtures("_team")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(700, 100), (3, 70001)])  # the rows are shared; each row is split
def test_threads_do_not_change_the_result(shape, dtype):
    x, k = torch.randn(shape, dtype=dtype), torch.full(shape[:-1], 7.5, dtype=dtype)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(outputs(x, k, "native"))
    for one, two, three in zip(*results, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


@built
@pytest.mark.usefixtures("_team")
def test_calls_from_several_python_threads():
    torch.set_num_threads(2)
    batches = [torch.randn(300, 200 + i) for i in range(8)]
    expected = [plain.lml(x, 5, impl="native") for x in batches]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda x: plain.lml(x, 5, impl="native"), batches * 10))
    assert all(torch.equal(y, z) for y, z in zip(found, expected * 10, strict=True))


FORKED = """
import multiprocessing, torch
torch.set_num_threads(2)
x = torch.randn(400, 1000)
x.relu()  # starts the threads of torch
def child(queue):
    import lastlayer  # here for the first time
    queue.put(float(lastlayer.lml(x, 5)[-1].sum()))
context = multiprocessing.get_context("fork")
queue = context.Queue()
process = context.Process(target=child, args=(queue,), daemon=True)
process.start()
try:
    print(queue.get(timeout=30))
finally:
    process.kill()
"""


@built
@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_loaded_after_a_fork():
    found = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=True)
    assert float(found.stdout) == pytest.approx(5)


def _in_child(queue, x):
    y = plain.lml(x, 5, impl="native")  # torch's own threads do not outlive a fork: nothing here may be large
    queue.put(float(y[-1].sum()))


@built
@pytest.mark.parametrize("shape", [(40, 37), (2, 3, 2000), (37,)])
def test_one_k_for_all_rows(shape):
    logits, each = torch.randn(shape), torch.full(shape[:-1], 3.0)
    target = torch.randint(37, shape[:-1])
    assert torch.equal(plain.lml(logits, 3, impl="native"), plain.lml(logits, each, impl="native"))
    assert torch.equal(lml_loss(logits, target, 3, impl="native"), lml_loss(logits, target, each, impl="native"))


@built
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_works_after_a_fork():
    torch.set_num_threads(2)
    x = torch.randn(400, 1000)
    plain.lml(x, 5, impl="native")  # starts the threads of this process
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(queue, x))
    child.start()
    try:
        assert queue.get(timeout=HUNG) == pytest.approx(5)
        child.join(timeout=HUNG)
        assert child.exitcode == 0
    finally:
        child.kill()


@built
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("observed", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("n", [6, 45, long(600)])
def test_loss_is_as_accurate_as_torch(isa, n, observed, dtype):
    x = torch.randn(40, 7, n, dtype=torch.float64) * torch.tensor([[0.01], [1], [1], [3], [10], [1], [1]])
    x[:, 5, 0], x[:, 6, -1] = -INF, INF
    x = x.to(dtype)
    index = torch.rand(40, 7, n - 2).argsort(-1)[..., :2] + 1
    index[:, 2, 1], index[:, 3] = -1, -1
    dense = torch.randint(-1, 2, (40, 7, n), dtype=torch.int8)
    dense[:, 5, 0] = dense[:, 6, -1] = -1
    for target in (index[..., 0].clamp(min=0), index, dense, dense.to(torch.bfloat16)):
        for options in ({}, {"temperature": 0.5, "mask": torch.arange(n) != n - 1}):
            if options and target.shape == x.shape:
                target = torch.where(torch.arange(n) == n - 1, -1, target)

            def run(x, impl, target=target, options=options):
                x, k = x.detach().requires_grad_(), torch.full((40, 7), 2.5, dtype=x.dtype, requires_grad=True)
                loss = lml_loss(x, target, k, observed=observed, reduction="none", impl=impl, **options)
                return loss.detach(), *torch.autograd.grad(loss.sum(), (x, k))

            for kernel, torch_, exact in zip(run(x, "native"), run(x, "torch"), run(x.double(), "torch"), strict=True):
                for row in range(7):
                    assert_agrees(kernel[:, row], torch_[:, row], exact[:, row])


@built
def test_loss_of_rows_without_a_finite_threshold():
    x = torch.randn(4, 5)
    x[3, 0] = NAN
    k = torch.tensor([0.0, 5.0, 6.0, 2.0], requires_grad=True)
    x.requires_grad_()
    loss = lml_loss(x, torch.full((4,), 1), k, reduction="none", impl="native")
    grads = torch.autograd.grad(loss.sum(), (x, k))
    assert loss[0] == INF
    assert loss[1] == 0
    assert loss[2:].isnan().all()
    for grad in grads:
        assert (grad[:2] == 0).all()
        assert grad[2:].isnan().all()


@built
def test_rows_nobody_asks_for_have_no_gradient():
    x = torch.tensor([[NAN, 1.0], [2.0, 1.0]], requires_grad=True)
    for value in (
        plain.lml(x, 1, impl="native"),
        plain.lml_threshold(x, 1, impl="native"),
        lml_loss(x, torch.tensor([1, 1]), 1, reduction="none", impl="native"),
    ):
        grad = torch.autograd.grad(value[1].sum(), x)[0]
        assert (grad[0] == 0).all()
        assert grad[1].isfinite().all()


def test_reason_on_other_devices():
    assert native.unavailable(torch.device("meta")) == "the compiled kernel is for the CPU, and the tensor is on meta"


def test_missing_library_is_told(monkeypatch):
    monkeypatch.setattr(native, "_library", None)
    monkeypatch.setattr(native, "missing", "it was not built")
    with pytest.raises(RuntimeError, match="the compiled kernel cannot run here: it was not built"):
        native.library()
    with pytest.raises(
        RuntimeError, match=r'lml: `impl="native"` cannot run here: it was not built\. Use `impl="auto"`'
    ):
        plain.lml(torch.zeros(3), 1, impl="native")
    torch.testing.assert_close(plain.lml(torch.zeros(4), 1), torch.full((4,), 0.25))


@pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="not a source tree")
def test_a_missing_compiler_does_not_stop_the_build(tmp_path):
    command = [
        sys.executable,
        "setup.py",
        "build_ext",
        "--build-lib",
        tmp_path / "lib",
        "--build-temp",
        tmp_path / "temp",
    ]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"CC": "false"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")
@pytest.mark.skipif(not (ROOT / "Makefile").exists(), reason="not a source tree")
def test_memory_and_arithmetic_are_clean(tmp_path):
    command = ["make", "sanitize", "CC=gcc", f"SANITIZED={tmp_path / 'sanitized'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@built
def test_batches_of_gradients():
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    k = torch.full((3,), 2.5, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([1, 2, 3])
    for function in (
        lambda x, k: plain.lml(x, k, impl="native"),
        lambda x, k: plain.log_lml(x, k, impl="native"),
        lambda x, k: lml_loss(x, target, k, observed=0.3, reduction="none", impl="native"),
    ):
        assert torch.autograd.gradcheck(function, (x, k), check_batched_grad=True)


@built
@pytest.mark.parametrize("masked", [slow(False), True])
def test_registered_operators(masked):
    x, k, target = torch.randn(3, 9), torch.full((3, 1), 2.0), torch.tensor([[1], [2], [-1]])
    mask = torch.arange(9).expand(3, 9) > 0 if masked else None
    ops, check = torch.ops.lastlayer, torch.library.opcheck
    for kind in ("y", "log", "nu"):
        arguments = (x, k, mask, 1.0, kind, "native")
        check(ops.lml_forward, arguments)
        _, center, delta = ops.lml_forward(*arguments)
        grads = (None, torch.ones(3, 1)) if kind == "nu" else (torch.randn(3, 9), None)
        check(ops.lml_backward, (x, mask, 1.0, center, delta, *grads, kind, "native"))
    arguments = (x, k, mask, 1.0, 0.3, target, None, "native")
    check(ops.lml_loss_forward, arguments)
    _, *rows = ops.lml_loss_forward(*arguments)
    check(ops.lml_loss_backward, (x, mask, 1.0, 0.3, target, None, *rows, torch.ones(3), "native"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_goes_through_float32(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 33, generator=generator).to(dtype)
    target = (torch.rand(7, 33, generator=generator) < 0.1).float()
    upstream = torch.randn(7, 33, generator=generator).to(dtype)
    found, exact = [], []
    for part, results in ((x, found), (x.float(), exact)):
        z = part.clone().requires_grad_()
        y = plain.lml(z, 3.5, impl="native")
        loss = lml_loss(z, target, 3.5, observed=0.3, reduction="sum", impl="native")
        results += [y, *torch.autograd.grad(y, z, upstream.to(z.dtype)), *torch.autograd.grad(loss, z)]
    for ours, wanted in zip(found, exact, strict=True):
        assert ours.dtype == dtype
        assert torch.equal(ours, wanted.to(dtype))  # the same arithmetic, rounded once


@built
@pytest.mark.parametrize("observed", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["lists", "dense"])
def test_the_gradient_that_comes_with_the_loss_is_that_of_plain_torch(observed, kind):
    x = torch.randn(37, 50, dtype=torch.float64)
    x[3, 4], x[5] = -torch.inf, 1e4 * x[5]  # a row that leaves the tile, and a hard one
    target = torch.randint(-1, 50, (37, 3))
    target[7] = -1  # does not contribute
    if kind == "dense":
        target = torch.where(torch.rand(37, 50) < 0.1, torch.rand(37, 50), 0.0)
    for reduction in ("mean", "sum"):
        found = []
        for impl in ("native", "torch"):
            leaf = x.clone().requires_grad_()
            options = {"observed": observed, "temperature": 0.7, "reduction": reduction, "impl": impl}
            loss = 3 * lml_loss(leaf, target, 2.5, **options)
            loss.backward(retain_graph=True)
            first, leaf.grad = leaf.grad, None
            loss.backward()  # the gradient was handed over, and is computed again
            found.append((loss.detach(), first, leaf.grad))
        torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11)


@built
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(40, 70), (3, 2000)])
def test_half_precision_is_the_rounded_float32_result(isa, shape, dtype):
    x = (6 * torch.randn(shape)).to(dtype)  # so that many probabilities are subnormal in float16
    x[1, 2], x[2, 3], x[0] = -torch.inf, torch.inf, 1e4
    x[0, 0] = torch.nan
    mask, upstream = torch.rand(shape) < 0.9, torch.randn(shape).to(dtype)
    lists, hot = torch.randint(-1, shape[1], (shape[0], 2)), (torch.rand(shape) < 0.1).to(torch.int8)
    for options in ({}, {"mask": mask}, {"temperature": 0.5}):
        found = []
        for scores in (x, x.float()):
            leaf = scores.clone().requires_grad_()
            y = lml(leaf, 4, **options)
            found.append([y.detach(), *torch.autograd.grad(y, leaf, upstream.to(leaf.dtype))])
            for target in (lists[:, 0], lists, hot, hot.float()):
                rows = slice(1, None)  # without the one that is nan
                part = {name: value[rows] if name == "mask" else value for name, value in options.items()}
                loss = lml_loss(leaf[rows], target[rows], 4, observed=0.5 * (target is hot), **part)
                found[-1] += [loss.detach(), *torch.autograd.grad(3 * loss, leaf)]
            y = lml_at_most(leaf, 4, **options)
            found[-1] += [y.detach(), *torch.autograd.grad(y, leaf, upstream.to(leaf.dtype))]
        for ours, wanted in zip(*found, strict=True):
            assert ours.dtype == dtype
            assert torch.equal(ours.nan_to_num(9), wanted.to(dtype).nan_to_num(9))


@built
def test_a_large_loss_of_float16_stays_finite():
    x = torch.tensor([[6e4, -6e4, -1e3]], dtype=torch.float16, requires_grad=True)
    loss = lml_loss(x, torch.tensor([1]), 1)  # 89,500
    loss.backward()
    assert loss.item() == torch.finfo(torch.float16).max
    assert torch.equal(x.grad, torch.tensor([[0.5, -1, 0.5]], dtype=torch.float16))
    ruled_out = torch.tensor([[0.0, -torch.inf]], dtype=torch.float16, requires_grad=True)
    assert lml_loss(ruled_out, torch.tensor([1]), 1).item() == torch.inf


def far_apart(rows, n, dtype):
    """Rows as trained networks and masks by large numbers make them: groups of scores with wide gaps between them."""
    noise = torch.randn(rows, n, dtype=dtype)
    few, half = torch.arange(n) < 2, torch.rand(rows, n) < 0.5
    low = torch.finfo(dtype).min
    return {
        **{f"gap of {gap}": noise + gap * few for gap in (6, 15, 20, 40, 80, 95, 120, 300, 1300, 1e6)},
        **{f"half at {far}": torch.where(half, far, noise) for far in (-30.0, -1e4, -1e9, low, -INF)},
        "one up": noise.index_fill(1, torch.tensor([n // 2]), 1e4),
        "one down": noise.index_fill(1, torch.tensor([n // 2]), -1e9),
        "three groups": noise + torch.tensor([0.0, 200.0, 1e5]).repeat(n)[:n],
        "wide": 100 * noise,
        "of mixed kinds": torch.where(torch.arange(rows).unsqueeze(1) % 2 == 0, noise, noise + 40 * few),
    }


@built
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [7, 100, slow(1500)])
def test_scores_far_apart(isa, n, dtype):
    torch.manual_seed(0)
    for x in far_apart(20, n, dtype).values():
        live = int((x > -INF).sum(-1).min())
        for k in (0.5, 1, 2, 2.5, live / 3, live - 2, live - 1.25, live - 1):
            if 0 < k < live:
                compare(x, torch.full((20,), k, dtype=dtype))


@built
@pytest.mark.parametrize("dtype", DTYPES)
def test_losses_of_scores_far_apart(isa, dtype):
    torch.manual_seed(0)
    lists, dense = torch.tensor([[0, 1, -1], [5, 0, 2]]).repeat(10, 1), (torch.rand(20, 50) < 0.1).to(dtype)
    for x in far_apart(20, 50, dtype).values():
        for k, observed, target in ((2, 0.0, lists), (2, 0.5, dense), (0.5, 0.0, dense), (3.5, 1.0, lists)):

            def results(x, impl, target=target, k=k, observed=observed):
                x = x.detach().requires_grad_()
                loss = lml_loss(x, target, k, observed=observed, impl=impl, reduction="none")
                return loss.detach(), *torch.autograd.grad(loss[loss.isfinite()].sum(), x)

            exact = results(x.double(), "torch", target.double() if target is dense else target)
            tolerance = max(
                1e-13, 4 * torch.finfo(torch.float64).eps * x[x.isfinite()].abs().max().clamp(max=1e10).item()
            )
            for kernel, torch_, reference in zip(results(x, "native"), results(x, "torch"), exact, strict=True):
                assert_agrees(kernel, torch_, reference, tolerance)


@built
@pytest.mark.parametrize("n", [7, 100])
def test_neighbours_leave_a_row_as_it_is(isa, n):
    """Bit for bit, though rows of a tile share passes."""
    torch.manual_seed(0)
    kinds = far_apart(16, n, torch.float32)
    rows, ordinary = torch.cat(list(kinds.values())), torch.randn(16, n)
    for k in (0.5, 2, n / 3):
        together = plain.lml(rows[torch.randperm(len(rows))], k, impl="native").sort(0).values
        alike = torch.cat([plain.lml(x, k, impl="native") for x in kinds.values()])
        torch.testing.assert_close(together, alike.sort(0).values, rtol=0, atol=0, equal_nan=True)
        with_others = plain.lml(torch.cat([ordinary[:8], kinds["half at -inf"][:8]]), k, impl="native")[:8]
        assert torch.equal(with_others, plain.lml(ordinary, k, impl="native")[:8])


@built
def test_masks_in_a_tile(isa):
    torch.manual_seed(0)
    x, mask = torch.randn(40, 30), torch.rand(40, 30) < 0.6
    mask[3], mask[4], mask[5, 1:] = False, True, False
    ruled_out = torch.where(mask, x, -INF)
    for k in (0, 0.5, 2, torch.linspace(0, 6, 40)):
        for function in (plain.lml, plain.log_lml):
            found = function(x, k, mask=mask, impl="native")
            torch.testing.assert_close(found, function(ruled_out, k, impl="native"), rtol=0, atol=0, equal_nan=True)


@built
@pytest.mark.parametrize("dtype", DTYPES)
def test_budgets_of_scores_far_apart(isa, dtype):
    """`lml_at_most` and the Fenchel-Young loss, which search in the same tiles."""
    torch.manual_seed(0)
    target = (torch.rand(20, 50) < 0.1).to(dtype)
    for x in far_apart(20, 50, dtype).values():
        for k in (0.5, 2, 3.5, 60.0):

            def at_most(x, impl, k=k):
                x = x.detach().requires_grad_()
                y = plain.lml_at_most(x, k, impl=impl)
                weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
                return y.detach(), *torch.autograd.grad(y, x, weight)

            for kernel, torch_, reference in zip(
                *(at_most(x, impl) for impl in ("native", "torch")), at_most(x.double(), "torch"), strict=True
            ):
                assert_agrees(kernel, torch_, reference, 1e-12)
        finite = x[x.isfinite().all(-1)].requires_grad_()
        for labels in target[: len(finite)].split(1) if len(finite) else ():
            size, rows = labels.sum(), labels.expand_as(finite)
            (grad,) = torch.autograd.grad(lml_fenchel_young_loss(finite, rows, reduction="sum"), finite)
            torch_, reference = (
                plain.lml(scores, size.item(), impl="torch") - rows for scores in (finite, finite.double())
            )
            assert_agrees(grad, torch_.detach(), reference.detach(), 1e-12)


@built
def test_scores_at_the_edge_of_a_group():
    """Groups of scores are told apart where rounding decides: 80 below the largest, and next to that."""
    torch.manual_seed(0)
    high = 90 * torch.rand(200)
    for towards in (-INF, INF):
        edge = high - 80
        for _ in range(4):
            x = torch.stack([high, edge, edge - 500, edge - 501, edge - 700], -1)
            for k in (1, 2, 3, 1.5):
                for function in (plain.lml, plain.log_lml, plain.lml_threshold):
                    kernel, torch_ = (function(x, k, impl=impl) for impl in ("native", "torch"))
                    assert_agrees(kernel, torch_, function(x.double(), k, impl="torch"))
            edge = torch.nextafter(edge, torch.tensor(towards))
