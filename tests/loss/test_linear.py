import contextlib
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tools import DEVICE, assert_as_accurate, slow

from lastlayer import ShardedLinear, linear_lml_loss, lml_loss
from lastlayer.loss import _sampled, _scan, linear
from lastlayer.shard import ClassShard

ROWS, SIZE = 7, 12


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Blocks of 256 classes, so that there are several."""
    monkeypatch.setattr(_scan, "TILE", {"cpu": 1, "cuda": 1})


def problem(n, scale=1.0, gap=0, dtype=torch.float64):
    features = torch.randn(ROWS, SIZE, dtype=dtype, device=DEVICE)
    weight = torch.randn(n, SIZE, dtype=dtype, device=DEVICE) * (scale / SIZE**0.5)
    bias = torch.randn(n, dtype=dtype, device=DEVICE)
    bias[:5] += gap
    target = torch.randint(-1, n, (ROWS, 4), device=DEVICE)
    target[2] = -1
    return features, weight, bias, target


def whole(features, weight, target, k, *, bias=None, **options):
    return lml_loss(F.linear(features, weight, bias), target, k, impl="torch", **options)


def results(loss, features, weight, bias, target, k):
    leaves = [t.clone().requires_grad_() for t in (features, weight, bias)]
    if isinstance(k, torch.Tensor):
        k = k.clone().requires_grad_()
        leaves.append(k)
    value = loss(leaves[0], leaves[1], target, k, bias=leaves[2])
    return [value.detach(), *torch.autograd.grad(value, leaves)]


def assert_same(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-11, atol=1e-13, equal_nan=True)


@pytest.mark.parametrize("n", [1, 50, 3000])
@pytest.mark.parametrize("k", [0, 1, 2.5, 40, 1500, "n", "rows"])
@pytest.mark.parametrize(("scale", "gap"), [(0.01, 0), (1.0, 0), (60.0, 0), (1.0, 300)])
def test_is_the_loss_of_the_logits(n, k, scale, gap):
    k = {"n": n, "rows": torch.linspace(0.5, min(n, 20) - 0.4, ROWS, dtype=torch.float64, device=DEVICE)}.get(k, k)
    if not isinstance(k, torch.Tensor) and k > n:
        pytest.skip("more labels than classes")
    arguments = (*problem(n, scale, gap), k)
    assert_same(results(linear_lml_loss, *arguments), results(whole, *arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [pytest.param(5, marks=pytest.mark.kernels), 1500])
def test_is_as_accurate_as_the_loss_of_the_logits(dtype, k):
    arguments = problem(3000, dtype=dtype)
    exact = results(whole, *(t.double() if t.is_floating_point() else t for t in arguments), k)
    for actual, plain, right in zip(
        results(linear_lml_loss, *arguments, k), results(whole, *arguments, k), exact, strict=True
    ):
        assert actual.dtype == dtype
        assert_as_accurate(actual, plain, right)


def test_target_forms_and_reductions():
    features, weight, bias, target = problem(600)
    dense = torch.zeros(ROWS, 601, dtype=torch.float64, device=DEVICE).scatter(-1, target.where(target >= 0, 600), 1)
    dense = dense[:, :600].contiguous()
    for form in (target, target[:, 0].clamp(min=0), dense, torch.zeros_like(dense)):
        for reduction in ("none", "mean", "sum"):
            assert_same(
                [linear_lml_loss(features, weight, form, 3, bias=bias, reduction=reduction)],
                [whole(features, weight, form, 3, bias=bias, reduction=reduction)],
            )


def test_batch_shapes():
    features, weight, _, target = problem(600)
    for shape in ((), (6,), (2, 3), (0,), (3, 0)):
        rows = torch.Size(shape).numel()
        x = features[:1].expand(rows, SIZE).reshape(*shape, SIZE)
        labels = target[:1].expand(rows, 4).reshape(*shape, 4)
        assert_same(
            [linear_lml_loss(x, weight, labels, 3, reduction="none")],
            [whole(x, weight, labels, 3, reduction="none")],
        )


def test_infinite_bias_and_broken_rows():
    features, weight, bias, target = problem(600)
    bias[::2] = -torch.inf
    bias[1] = torch.inf
    target[0] = torch.tensor([3, 5, -1, -1])
    target[1] = torch.tensor([1, 9, -1, -1])
    arguments = (features, weight, bias, target // 2 * 2 + 1, 3)
    expected = results(whole, *arguments)
    actual = results(linear_lml_loss, *arguments)
    assert_same(actual[:1] + actual[3:], expected[:1] + expected[3:])
    features[4, 0] = torch.nan
    loss = linear_lml_loss(features, weight, target, 3, bias=bias.nan_to_num(0, 0, 0), reduction="none")
    assert loss[4].isnan()
    assert loss[[0, 1, 2, 3, 5, 6]].isfinite().all()


def test_gradcheck():
    features, weight, bias, target = problem(300)
    k = torch.full((ROWS,), 3.5, dtype=torch.float64, device=DEVICE, requires_grad=True)
    leaves = [t.requires_grad_() for t in (features[:, :3].contiguous(), weight[:, :3].contiguous(), bias)]

    def loss(f, w, b, k):
        return linear_lml_loss(f, w, target, k, bias=b, reduction="none")

    assert torch.autograd.gradcheck(loss, (*leaves, k), fast_mode=True)


def test_autocast_computes_as_linear_does():
    features, weight, bias, target = problem(600, dtype=torch.float32)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        actual = linear_lml_loss(features, weight, target, 3, bias=bias)
        expected = whole(features, weight, target, 3, bias=bias)
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected)


@pytest.mark.kernels
@pytest.mark.parametrize("shape", [(1, 1), (3, 3000), (6, 1030)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rho", [slow(0.0), 0.3, slow(1.0)])
def test_kernels_are_plain(shape, dtype, rho):
    """On a GPU, or with TRITON_INTERPRET=1."""
    rows, n = shape
    weight = (3 * torch.randn(n, rows, device=DEVICE)).to(dtype)
    weight[::7, 0], weight[::11, 0], weight[::13, -1] = -torch.inf, torch.inf, torch.nan
    layer = _scan.Layer(torch.eye(rows, device=DEVICE, dtype=dtype), weight, None, dtype)
    layer.logits = lambda classes, out=None: weight[classes].T.contiguous().clone()  # 0 * inf would be nan
    if layer.kernels is None:
        pytest.skip("no kernels here")
    index = torch.stack([torch.randperm(n, device=DEVICE)[:3] for _ in range(rows)])
    index[0, 0] = -1
    center, delta, mass, pull = torch.randn(4, rows, 1, device=DEVICE) * 0.1
    delta[rows // 2] = torch.nan if rows > 3 else 0.2
    delta[rows // 3] = torch.inf if rows > 3 else 0.1
    delta[-1] = torch.nan  # as in every row with such a logit
    kernels, found = layer.kernels, []
    toward = torch.where(index < 0, 0, torch.randn(index.shape, device=DEVICE))
    for layer.kernels in (kernels, None):
        scan = _scan.Scan(layer, 4, named=True)
        scan.run(index)
        lines = _scan.Rows(center, delta, mass, index, scan.labels, rho)
        dx = [layer.grad(x, c.start, lines, pull, toward, mass, x) for c, x in layer.blocks()]
        scan.add_up(4)
        named = torch.zeros(rows, n, device=DEVICE)  # ties may come in any order
        named.scatter_(1, torch.where(scan.top > -torch.inf, scan.classes.long(), 0), 1)
        powers = torch.where(scan.n_nan > 0, 0, scan.powers)  # of such a row they do not matter
        found.append([powers, scan.n, scan.n_top, scan.n_nan, scan.top, scan.labels, scan.held, named[:, 1:], *dx])
    for actual, expected in zip(*found, strict=True):
        limit = 2e-5 if actual.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(actual, expected, rtol=limit, atol=1e-5, equal_nan=True)


def scanned(limit, room):
    """What a scan keeps of rows that end a search in every way: gaps, ties, infinities, nan."""
    n, rows = 2000, 11
    x = torch.randn(rows, n, device=DEVICE)
    x[0], x[1] = 0.01 * x[0], 20 * x[1]
    x[2, :5] += 300
    x[3, 10:] = 0
    x[4, ::3] = -torch.inf
    x[5, 7] = torch.inf
    x[6, 9] = torch.nan
    x[7, 3:] = -torch.inf
    x[8] = 0
    layer = _scan.Layer(x, torch.empty(n, n, device=DEVICE), None, torch.float32)
    layer.logits = lambda classes, out=None: x[:, classes].clone()
    layer.of_rows = lambda rows: SimpleNamespace(logits=lambda classes, out: x[rows, classes].clone())
    index = torch.stack([torch.randperm(20, device=DEVICE)[:5] for _ in range(rows)])
    index[1, 1:] = index[3] = -1
    index[5] = torch.arange(7, 12)
    kernels, layer.kernels = layer.kernels, None
    scan = _scan.Scan(layer, limit)
    scan.run(index)
    scan.sums = scan.sums.float()
    scan.top = scan.top[:, :room].contiguous()
    layer.kernels = kernels
    return layer, scan


@pytest.mark.kernels
@pytest.mark.parametrize(("limit", "room"), [(4, 2000), (4, 15), (1000, 2000)])
@pytest.mark.parametrize("rho", [slow(0.0), 0.3, slow(1.0)])
@pytest.mark.parametrize("k", [0, 3, 2000, "rows"])
def test_search_by_kernels_is_plain(k, rho, limit, room, monkeypatch):
    """On a GPU, or with TRITON_INTERPRET=1."""
    layer, scan = scanned(limit, room)
    if layer.kernels is None:
        pytest.skip("no kernels here")
    k = torch.linspace(0.5, 3.9, 11, device=DEVICE).unsqueeze(-1) if k == "rows" else torch.tensor(float(k))
    k = k.to(DEVICE).expand(11, 1)
    found, lost = [], []
    monkeypatch.setattr(linear, "_solve_lost", lambda layer, which, *_: lost[-1].copy_(which))
    for settle in (linear._settle_by_kernels, linear._settle):
        lost.append(torch.zeros(11, 1, dtype=torch.bool, device=DEVICE))
        rows, pull, toward, sums = settle(layer, scan, k, limit, 3, rho, None, lambda *sums: sums)
        numbers = [rows.delta - rows.center, rows.log_mass, rows.silent, rows.leak, pull, toward, *sums]
        found.append([torch.where(lost[-1], 0, value) for value in numbers])
    assert torch.equal(*lost)
    assert lost[0].any() == (0 < k.max() < 2000 and (limit, room) != (4, 2000))
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5, equal_nan=True)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 37, 2048])
def test_floors_by_kernels_are_order_statistics(n, dtype):
    """On a GPU, or with TRITON_INTERPRET=1."""
    kernels = _scan.kernels_for(torch.zeros(1, device=DEVICE))
    if kernels is None:
        pytest.skip("no kernels here")
    x = torch.randn(5, n, device=DEVICE).to(dtype)
    x[1, ::3], x[2, ::4], x[3, ::5], x[4] = -torch.inf, torch.inf, torch.nan, 0
    for rank in {1, min(n, 9), n}:
        expected = _scan.finite(x).float().sort(-1, descending=True).values[:, rank - 1 : rank]
        assert torch.equal(kernels.floors(x, rank), expected)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [slow(torch.float32), torch.bfloat16])
def test_options_by_kernels_are_as_accurate(dtype):
    """On a GPU, or with TRITON_INTERPRET=1."""
    features, weight, bias, target = problem(1500, dtype=dtype)
    if _scan.kernels_for(features) is None:
        pytest.skip("no kernels here")
    heat = torch.linspace(0.5, 2, ROWS, dtype=dtype, device=DEVICE)
    options = {"mask": torch.rand(1500, device=DEVICE) < 0.9, "observed": 0.3, "reduction": "none"}
    options["mask"][target.clamp(min=0)] = True
    found = []
    for function, kind in ((linear_lml_loss, dtype), (whole, dtype), (whole, torch.float64)):
        leaves = [t.to(kind).requires_grad_() for t in (features, weight, bias, heat)]
        loss = function(*leaves[:2], target, 3, bias=leaves[2], temperature=leaves[3], **options)
        found.append([loss.detach(), *torch.autograd.grad(loss.sum(), leaves)])
    for actual, plain, exact in zip(*found, strict=True):
        assert_as_accurate(actual, plain, exact)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_classes_are_counted_by_kernels(dtype):
    """On a GPU, or with TRITON_INTERPRET=1: what fills up a tile is none."""
    features, weight, _, target = problem(300, dtype=dtype)
    layer = _scan.Layer(features[:2], weight, None, dtype)
    if layer.kernels is None:
        pytest.skip("no kernels here")
    scan = _scan.Scan(layer, 4)
    scan.run(target[:2])
    assert scan.sums[:, :, scan.terms].sum(1).tolist() == [300, 300]


@pytest.mark.kernels
@pytest.mark.parametrize("width", [1, 5, 70])
def test_repeated_labels_are_dropped_by_a_kernel(width):
    """On a GPU, or with TRITON_INTERPRET=1."""
    kernels = _scan.kernels_for(torch.zeros(1, device=DEVICE))
    if kernels is None:
        pytest.skip("no kernels here")
    index = torch.randint(-1, 50, (2, 3, width), device=DEVICE)
    found = kernels.distinct(index)
    kept = found == index
    assert (kept | (found == -1)).all()
    for row, left in zip(index.view(6, width).tolist(), found.view(6, width).tolist(), strict=True):
        assert sorted(i for i in left if i >= 0) == sorted({i for i in row if i >= 0})


@pytest.mark.kernels
@pytest.mark.parametrize("rows", [1, 1030])
@pytest.mark.parametrize("mean", [False, True])
def test_losses_are_reduced_by_a_kernel(rows, mean):
    """On a GPU, or with TRITON_INTERPRET=1."""
    loss, count = torch.randn(rows, 1, device=DEVICE), torch.randint(3, (rows, 1), device=DEVICE).float()
    kernels = _scan.kernels_for(loss)
    if kernels is None:
        pytest.skip("no kernels here")
    has = count > 0
    expected = torch.where(has, loss, 0).double().sum() / (has.sum().clamp(min=1) if mean else 1)
    total, contributes, share = kernels.reduce_rows(loss, count, torch.float32, mean)
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(contributes, has.squeeze(-1))
    torch.testing.assert_close(share, has / (has.sum().clamp(min=1) if mean else 1))


@pytest.mark.kernels
@pytest.mark.parametrize(("lost", "some"), [(False, False), slow(True, False), slow(False, True)])
def test_gradients_that_are_begun_in_the_forward_pass(lost, some, monkeypatch):
    """On a GPU, or with TRITON_INTERPRET=1. They are scaled later, and begun anew if rows were not solved."""
    features, weight, bias, target = problem(1040, dtype=torch.float32)
    if _scan.kernels_for(features) is None:
        pytest.skip("no kernels here")
    resumed, real = [], linear._Gradients.resume
    monkeypatch.setattr(linear._Gradients, "resume", lambda *args: resumed.append(real(*args)))
    monkeypatch.setattr(linear, "PASSES", 1 if lost else linear.PASSES)
    leaves = [t.requires_grad_() for t in (features, weight, bias)]
    leaves = leaves[:1] if some else leaves  # not all are asked for
    loss = linear_lml_loss(features, weight, target, 3, bias=bias, temperature=2.0)
    found = [torch.autograd.grad(3 * loss, leaves, retain_graph=True) for _ in range(2)]
    assert len(resumed) == (0 if lost else 1)
    expected = torch.autograd.grad(3 * whole(features, weight, target, 3, bias=bias, temperature=2.0), leaves)
    for gradients in found:
        for actual, exact in zip(gradients, expected, strict=True):
            torch.testing.assert_close(actual, exact, rtol=1e-4, atol=1e-6)


@pytest.mark.kernels
@pytest.mark.parametrize("turns", [False, True])
def test_gradients_ahead_of_time_of_a_loss_that_is_not_used(turns, monkeypatch):
    """On a GPU, or with TRITON_INTERPRET=1. A row without a solution had made them nan."""
    rows, n = (SIZE + 5, 272) if turns else (ROWS, 1040)
    features, weight = torch.randn(rows, SIZE, device=DEVICE), torch.randn(n, SIZE, device=DEVICE)
    if _scan.kernels_for(features) is None:
        pytest.skip("no kernels here")
    k = torch.full((rows,), 3.0, device=DEVICE)
    k[2] = -1
    resumed, real = [], linear._Gradients.resume
    monkeypatch.setattr(linear._Gradients, "resume", lambda *args: resumed.append(real(*args)))
    if turns:
        for name, value in {"_TURN": 4 * 2 * n, "_FEWEST": 4, "_EVEN": 1}.items():
            monkeypatch.setattr(linear, name, value)
    leaves = [features, weight, torch.randn(n, device=DEVICE)]
    leaves = [leaf.to(torch.bfloat16 if turns else torch.float32).requires_grad_() for leaf in leaves]
    loss = linear_lml_loss(*leaves[:2], torch.randint(n, (rows, 2), device=DEVICE), k, bias=leaves[2])
    assert loss.isnan()
    assert ("InTurns" in type(loss.grad_fn).__name__) == turns
    for _ in range(2):
        for grad in torch.autograd.grad(torch.nan_to_num(loss), leaves, retain_graph=True):
            assert grad.eq(0).all()
    assert len(resumed) == (not turns)


@pytest.mark.kernels
def test_every_class_asked_for_and_every_label_seen_by_kernels():
    features, weight, bias, _ = problem(600, dtype=torch.float32)
    bias[9] = -torch.inf
    target = torch.ones(ROWS, 600, device=DEVICE)
    target[:, 9] = target[1, 3] = target[2] = target[4, ::2] = 0
    target[3, 9], target[5] = 1, -1
    found = [
        f(features, weight, target, 599, bias=bias, observed=1.0, reduction="none") for f in (linear_lml_loss, whole)
    ]
    assert torch.equal(*found)
    assert found[0].tolist() == [0, torch.inf, torch.inf, torch.inf, torch.inf, 0, 0]


@pytest.mark.kernels
@pytest.mark.parametrize("observed", [0.0, 0.3])
def test_broken_rows_by_kernels(observed):
    """A row that is nan says so, with a label or not, and has no gradient where nobody asks for it."""
    features, weight, bias, target = problem(600, dtype=torch.float32)
    features[2:4] = torch.nan
    found = []
    for function in (linear_lml_loss, whole):
        k = torch.full((ROWS,), 3.0, device=DEVICE, requires_grad=True)
        loss = function(features, weight, target, k, bias=bias, observed=observed, reduction="none")
        found.append([loss.detach(), *torch.autograd.grad(torch.where(loss.isnan(), 0, loss).sum(), k)])
        assert loss.isnan().tolist() == [False, False, observed > 0, True, False, False, False]
    torch.testing.assert_close(*found, equal_nan=True)


@pytest.mark.kernels
@pytest.mark.parametrize("negatives", [slow(None), 300])
def test_the_default_dtype_does_not_show_by_kernels(negatives):
    features, weight, bias, target = problem(1500, dtype=torch.float32)
    options = {"bias": bias, "observed": 0.3, "negatives": negatives}
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        options["generator"] = torch.Generator().manual_seed(0)
        torch.set_default_dtype(dtype)
        try:
            found.append(linear_lml_loss(features, weight, target, 3, **options))
        finally:
            torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("terms", [5, 8, 16])
def test_series_are_the_functions(terms):
    w = torch.linspace(0, _scan.REACH[terms], 1001, dtype=torch.float64)[1:]
    y = w / (1 + w)
    expected = {"y": y, "y(1-y)2": y * (1 - y) ** 2, "silent": -(-0.3 * y).log1p()}
    expected["leak"] = 0.3 * y * (1 - y) / (1 - 0.3 * y)
    for name, values in expected.items():
        c = _scan.series(name, terms, 0.3)
        found = (c * w.unsqueeze(-1) ** torch.arange(1, terms + 1)).sum(-1)
        assert ((found - values) / values).abs().max() < (2e-14 if terms == 16 else 2e-7)


@pytest.mark.parametrize("n", [50, 3000])
@pytest.mark.parametrize("rho", [0.3, 1.0])
@pytest.mark.parametrize("k", [0, 2.5, 40, 1500, "n"])
@pytest.mark.parametrize("dense", [False, True])
def test_observed(n, rho, k, dense):
    k = n if k == "n" else k
    if k > n:
        pytest.skip("more labels than classes")
    features, weight, bias, target = problem(n)
    bias[7], target[0, 0] = torch.inf if 0 < k < n else 0.0, 7
    if dense:
        hot = torch.zeros(ROWS, n + 1, dtype=torch.float64, device=DEVICE).scatter(-1, target.where(target >= 0, n), 1)
        target = torch.where(torch.rand(ROWS, n, device=DEVICE) < 0.1, -1, hot[:, :n])
        target[3] = -1

    def loss(function):
        return lambda *a, **o: function(*a, **o, observed=rho, reduction="sum")

    arguments = (features, weight, bias, target, k)
    if rho == 1 and k > 0 and not dense:  # other rows have the infinite class as no label
        assert linear_lml_loss(features, weight, target, k, bias=bias, observed=1.0).isinf()
        bias[7] = 0
    actual, expected = results(loss(linear_lml_loss), *arguments), results(loss(whole), *arguments)
    assert_same(actual, expected)


def test_mask_and_temperature():
    features, weight, bias, target = problem(3000)
    masks = [torch.rand(3000, device=DEVICE) < 0.7, torch.rand(ROWS, 3000, device=DEVICE) < 0.7]
    heat = torch.linspace(0.5, 2, ROWS, dtype=torch.float64, device=DEVICE, requires_grad=True)
    leaves = [t.requires_grad_() for t in (features, weight, bias)]
    for mask in masks:
        for temperature in (2.0, heat):
            wanted = [*leaves, heat] if temperature is heat else leaves
            found = []
            for function in (linear_lml_loss, whole):
                options = {"mask": mask, "temperature": temperature, "reduction": "none"}
                loss = function(*leaves[:2], target, 3, bias=bias, **options)
                known = torch.where(loss.isfinite(), loss, 0)
                found.append([loss.detach(), *torch.autograd.grad(known.sum(), wanted)])
            assert_same(*found)


def test_temperatures_of_rows_are_not_rounded_to_half_precision():
    """The temperature of each row is halfway between two numbers of bfloat16, and its logits are such numbers."""
    heat = torch.full((ROWS,), 1 + 2**-8, device=DEVICE)
    features = torch.eye(ROWS, SIZE, device=DEVICE).bfloat16()
    weight = torch.randint(-16, 17, (600, SIZE), device=DEVICE).bfloat16()
    target = torch.randint(600, (ROWS, 2), device=DEVICE)
    found = []
    for kind in (torch.bfloat16, torch.float64):
        leaf = heat.to(torch.promote_types(kind, torch.float32)).requires_grad_()
        options = {"temperature": leaf, "negatives": 600, "reduction": "none"}
        loss = linear_lml_loss(features.to(kind), weight.to(kind), target, 3, **options)
        found.append(torch.autograd.grad(loss.sum(), leaf)[0])
    torch.testing.assert_close(found[0].double(), found[1], rtol=1e-5, atol=0)


def test_a_bad_temperature_inside_a_tensor():
    features, weight, _, target = problem(3000)
    heat = torch.ones(ROWS, dtype=torch.float64, device=DEVICE)
    heat[0], heat[1] = -1, 0
    for options in ({}, {"negatives": 50}):
        loss = linear_lml_loss(features, weight, target, 3, temperature=heat, reduction="none", **options)
        assert loss[:2].isnan().all()
        assert loss[3:].isfinite().all()
    with pytest.raises(ValueError, match="`temperature` must broadcast to the batch shape"):
        linear_lml_loss(features, weight, target, 3, temperature=heat[:2])


def test_tied_rows():
    """A layer that starts at zero, and rows of two levels."""
    features, weight, _, target = problem(5000)
    weight[:] = 0
    bias = torch.zeros(5000, dtype=torch.float64, device=DEVICE)
    for step in (5001, 10, 2):
        bias[::step] = 2
        assert_same(results(linear_lml_loss, features, weight, bias, target, 3),
                    results(whole, features, weight, bias, target, 3))  # fmt: skip


def test_a_row_nobody_asks_for_has_no_gradient():
    features, weight, bias, target = problem(600)
    features[2, 0] = torch.nan  # the row without a label
    leaves = [t.requires_grad_() for t in (features, weight, bias)]
    loss = linear_lml_loss(features, weight, target, 3, bias=bias)
    assert loss.isfinite()
    grads = torch.autograd.grad(loss, leaves)
    assert grads[2].isfinite().all()


@pytest.mark.parametrize("rho", [0.0, 0.4])
def test_all_classes_as_negatives_is_the_loss(rho):
    features, weight, bias, target = problem(400)
    mask = torch.rand(400, device=DEVICE) < 0.9
    mask[target[target >= 0]] = True

    def sampled(*arguments, **options):
        return linear_lml_loss(*arguments, negatives=400, mask=mask, observed=rho, temperature=1.5, **options)

    def exact(*arguments, **options):
        return whole(*arguments, mask=mask, observed=rho, temperature=1.5, **options)

    k = torch.linspace(1, 5, ROWS, dtype=torch.float64, device=DEVICE)
    assert_same(results(sampled, features, weight, bias, target, k), results(exact, features, weight, bias, target, k))


def test_sums_over_sampled_negatives_are_right_in_the_mean():
    """At a fixed threshold, over all draws; the loss has a bias that falls with the number drawn."""
    features, weight, bias, target = problem(400)
    exact = linear_lml_loss(features, weight, target, 5, bias=bias)
    generator = torch.Generator(DEVICE).manual_seed(5)
    errors = []
    for drawn in (20, 80, 320):
        losses = [
            linear_lml_loss(features, weight, target, 5, bias=bias, negatives=drawn, generator=generator)
            for _ in range(40)
        ]
        errors.append((torch.stack(losses) - exact).square().mean().sqrt().item())
        spread = torch.stack(losses).std() / 40**0.5
        assert (torch.stack(losses).mean() - exact).abs() < 4 * spread + 2 / drawn
    assert errors[0] > 1.5 * errors[1] > 2.25 * errors[2]
    _, counts_for = _sampled.draw("", 80, 400, DEVICE, generator)
    sums = []
    y = (features @ weight.T + bias).sigmoid().sum(0)
    for _ in range(200):
        ids, counts_for = _sampled.draw("", 80, 400, DEVICE, generator)
        sums.append((y[ids] * counts_for).sum())
    sums = torch.stack(sums)
    assert (sums.mean() - y.sum()).abs() < 4 * sums.std() / 200**0.5


def test_a_sample_of_ones_own():
    """Probabilities that differ: the heavy classes always, the rest now and then."""
    features, weight, bias, target = problem(400)
    bias[:40] += 4
    exact = linear_lml_loss(features, weight, target, 5, bias=bias)
    probability = torch.where(torch.arange(400, device=DEVICE) < 40, 1.0, 0.25)
    losses = []
    for _ in range(100):
        ids = (torch.rand(400, device=DEVICE) < probability).nonzero().squeeze(-1)
        losses.append(linear_lml_loss(features, weight, target, 5, bias=bias, negatives=(ids, probability[ids])))
    losses = torch.stack(losses)
    assert (losses.mean() - exact).abs() < 4 * losses.std() / 10 + 0.01
    assert losses.std() < 0.2


@pytest.mark.parametrize("rho", [0.0, 0.4, 1.0])
def test_filter_drops_small_derivatives_only(rho):
    """One sure row, then one that is undecided: the gradient of the bias is the derivative by the logit."""
    n, least = 20_000, 2.0**-12
    weight = torch.randn(n, SIZE, dtype=torch.float64, device=DEVICE)
    target = torch.tensor([[3, 7_000, -1, 19_999]], device=DEVICE)
    sure = weight[target[0, [0, 1, 3]]].sum(0, keepdim=True)
    bias = torch.zeros(n, dtype=torch.float64, device=DEVICE)
    for size, drops in ((4.0, True), (0.1, False)):
        exact, filtered = (
            results(partial(linear_lml_loss, observed=rho, filter=f), size * sure, weight, bias, target, 3)
            for f in (0.0, least)
        )
        assert_same(filtered[:1], exact[:1])
        dropped = (filtered[3] == 0) & (exact[3] != 0)
        assert bool(dropped.any()) == drops
        assert bool((exact[3][dropped].abs() < least).all())
        assert_same([filtered[3][~dropped], filtered[2][~dropped]], [exact[3][~dropped], exact[2][~dropped]])


@pytest.mark.kernels
@pytest.mark.parametrize("rho", [0.0, 0.4])
def test_filter_by_kernels_is_plain(rho, monkeypatch):
    """Rows that are sure, undecided, or without a label; a list that has overflowed."""
    n, found = 2500, []
    weight = torch.randn(n, SIZE, device=DEVICE)
    target = torch.tensor([[3, 700], [5, 9], [-1, -1], [2000, 2001]], device=DEVICE)
    features = torch.tensor([[6.0], [0.1], [3.0], [5.0]], device=DEVICE) * weight[target].sum(1)
    if _scan.kernels_for(features) is None:
        pytest.skip("no kernels here")
    layer = _scan.Layer(features, weight, None, torch.float32)
    scan = _scan.Scan(layer, 3, named=True)
    scan.run(target)
    scan.fill[3] = scan.top.shape[1] + 1
    k = torch.full((4, 1), 2.0, device=DEVICE)
    rows, pull, *_ = linear._settle_by_kernels(layer, scan, k, 3, 2, rho, None, lambda *_: None)
    kernels = layer.kernels
    for layer.kernels in (kernels, None):
        found.append(linear._few_classes(layer, scan, rows, pull.contiguous(), 1e-4))
    assert found[0][0].tolist() == found[1][0].tolist() == [False, True, False, True]
    assert torch.equal(found[0][1][1:], found[1][1][1:])  # class 0 stands for none
    assert 6 < found[0][1].sum() < n


def test_filter_computes_undecided_rows_in_full():
    """A batch of both kinds, with a label list that is empty and a temperature per row."""
    n = 20_000
    weight = torch.randn(n, SIZE, dtype=torch.float64, device=DEVICE)
    target = torch.randint(n, (5, 3), device=DEVICE)
    features = 4 * weight[target].sum(1)
    features[1] *= 0.02
    target[3] = -1
    divisor = torch.linspace(0.8, 1.2, 5, dtype=torch.float64, device=DEVICE)
    found = []
    for least in (0.0, 1e-5):
        leaves = [t.clone().requires_grad_() for t in (features, weight, divisor)]
        loss = linear_lml_loss(*leaves[:2], target, 3, temperature=leaves[2], filter=least, reduction="none")
        loss.sum().backward()
        found.append([loss.detach(), *(leaf.grad for leaf in leaves)])
    exact, filtered = found
    assert_same([filtered[0], filtered[1][1], filtered[3][1]], [exact[0], exact[1][1], exact[3][1]])
    assert not torch.equal(filtered[1][0], exact[1][0])
    for a, e in zip(filtered[1:], exact[1:], strict=True):
        torch.testing.assert_close(a, e, rtol=1e-3, atol=5e-3)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_filter_computes_undecided_rows_in_full_in_half_precision(dtype, monkeypatch):
    """The gradients of the features of a few rows, whose logits are one block, are in half precision."""
    n, undecided, real = 3000, [], linear._gradients_of_some

    def watched(layer, rows, upstream, wanted, held, some, marked):
        undecided.append(int(some.sum()))
        return real(layer, rows, upstream, wanted, held, some, marked)

    monkeypatch.setattr(linear, "_gradients_of_some", watched)
    weight = torch.randn(n, SIZE, device=DEVICE).to(dtype)
    target = torch.randint(n, (5, 2), device=DEVICE)
    features = 4 * weight[target].sum(1)
    features[[1, 3]] *= 0.02
    found = []
    for function, kind in ((partial(linear_lml_loss, filter=2**-12), dtype), (whole, dtype), (whole, torch.float64)):
        leaves = [t.to(kind).requires_grad_() for t in (features, weight)]
        found.append(torch.autograd.grad(function(*leaves, target, 3), leaves))
    assert len(undecided) == 1
    assert 2 <= undecided[0] < 5
    for actual, plain, exact in zip(*found, strict=True):
        assert actual.dtype == dtype
        assert_as_accurate(actual, plain, exact)


def test_filter_of_saturated_rows_has_no_gradient():
    """The classes that are left are rounded up by some of logit 0, whose derivative would not be finite here."""
    bias = torch.full((1200,), -1000.0, device=DEVICE).index_fill(0, torch.arange(14, device=DEVICE), 1000.0)
    target = torch.arange(14, device=DEVICE).view(ROWS, 2)
    features, weight = torch.ones(ROWS, SIZE, device=DEVICE), torch.zeros(1200, SIZE, device=DEVICE)
    found = results(partial(linear_lml_loss, filter=2**-12), features, weight, bias, target, 14)
    assert all(bool((value == 0).all()) for value in found)


@pytest.mark.parametrize("rho", [0.0, 0.4])
def test_a_sample_for_a_batch_without_labels(rho):
    features, weight, bias, _ = problem(400)
    for target in (torch.zeros(ROWS, 400, device=DEVICE), torch.empty(ROWS, 0, dtype=torch.int64, device=DEVICE)):
        options = {"bias": bias, "observed": rho, "reduction": "none"}
        expected = linear_lml_loss(features, weight, target, 3, **options)
        assert_same([linear_lml_loss(features, weight, target, 3, negatives=400, **options)], [expected])


@pytest.mark.parametrize("rho", [0.0, 0.3])
@pytest.mark.parametrize("negatives", [None, 100])
def test_a_broken_row_nobody_asks_for_has_no_gradient(negatives, rho):
    """Another row than the first: with its loss left out nothing is nan, and with it the gradient of its `k` is."""
    features, weight, bias, target = problem(400)
    target[2] = torch.tensor([7, 5, -1, -1])
    k = torch.full((ROWS,), 3.0, dtype=torch.float64, device=DEVICE)
    k[1], k[2] = -1, torch.nan
    leaves = [t.requires_grad_() for t in (features, weight, bias, k)]
    options = {
        "negatives": negatives,
        "observed": rho,
        "reduction": "none",
        "generator": torch.Generator(DEVICE).manual_seed(0),
    }
    loss = linear_lml_loss(features, weight, target, k, bias=bias, **options)
    assert loss.isnan().nonzero().flatten().tolist() == [1, 2]
    gradients = torch.autograd.grad(loss[~loss.isnan()].sum(), leaves, retain_graph=True)
    assert all(gradient.isfinite().all() for gradient in gradients)
    gradients = torch.autograd.grad(loss[:2].sum(), leaves)
    assert gradients[3].isnan().nonzero().flatten().tolist() == [1]
    assert gradients[0].isnan().any(-1).nonzero().flatten().tolist() == [1]


def test_second_derivatives_are_an_error():
    features, weight, _, target = problem(300)
    features.requires_grad_()
    for negatives in (None, 30):
        loss = linear_lml_loss(features, weight, target, 3, negatives=negatives)
        (grad,) = torch.autograd.grad(loss, features, create_graph=True)
        with pytest.raises(RuntimeError, match=r"linear_lml_loss: has first derivatives only\. Use lml_loss"):
            grad.sum().backward()


def test_gradient_is_handed_over_not_copied(monkeypatch):
    features, weight, _, target = problem(300)
    weight.requires_grad_()
    made = []
    real = linear._first_derivatives

    def watched(*arguments):
        found = real(*arguments)
        made.append(found[1].data_ptr())
        return found

    monkeypatch.setattr(linear, "_first_derivatives", watched)
    linear_lml_loss(features, weight, target, 3).backward()
    assert made == [weight.grad.data_ptr()]


def test_never_holds_the_logits(monkeypatch):
    """No tensor of a tenth of the logits is made, forward or backward, but in the memory of the weight's gradient."""
    from torch.utils._python_dispatch import TorchDispatchMode

    monkeypatch.setattr(_scan, "TILE", {"cpu": 32 * 256 * 4, "cuda": 32 * 256 * 4})
    largest, made = 0, set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for t in out if isinstance(out, tuple | list) else [out]:
                if isinstance(t, torch.Tensor) and t.untyped_storage().nbytes() == weight.nbytes:
                    made.add(t.untyped_storage().data_ptr())
                elif isinstance(t, torch.Tensor) and t.ndim == 2 and t.shape[0] == 32:
                    largest = max(largest, t.untyped_storage().nbytes() // t.element_size())
            return out

    n = 40_000
    features = torch.randn(32, SIZE, requires_grad=True)
    weight = torch.randn(n, SIZE, requires_grad=True)
    with Watch():
        linear_lml_loss(features, weight, torch.randint(n, (32,)), 5).backward()
    assert 32 * 256 <= largest <= 32 * n // 10
    assert made == {weight.data_ptr(), weight.grad.data_ptr()}


@pytest.mark.parametrize("rows", [5, 40])
@pytest.mark.parametrize("autocast", [False, True])
def test_logits_wait_in_the_memory_of_the_gradient(rows, autocast, monkeypatch):
    """As many as fit there, and a block; the second backward pass through a graph computes all logits again."""
    n, computed, real = 1500, [], _scan.Layer.logits

    def watched(layer, classes, out=None):
        if classes.step is None:  # not the sample
            computed.append(classes.stop - classes.start)
        return real(layer, classes, out)

    monkeypatch.setattr(_scan.Layer, "logits", watched)
    weight = torch.randn(n, SIZE, device=DEVICE)
    features, target = torch.randn(rows, SIZE, device=DEVICE), torch.randint(n, (rows, 2), device=DEVICE)
    found = []
    for transposed in (False, True):  # whose gradient is not in the order of the classes
        leaves = [features.clone().requires_grad_(), weight.clone().requires_grad_()]
        if transposed:
            leaves[1] = weight.T.contiguous().T.requires_grad_()
        computed.clear()
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
            loss = linear_lml_loss(*leaves, target, 3)
        assert sum(computed) == n
        for again in (False, True):
            computed.clear()
            found.append(torch.autograd.grad(loss, leaves, retain_graph=True))
            fit = min(1, SIZE * (2 if autocast else 1) / rows)
            held = 0 if transposed or again else 256 + fit * (n - 256)
            assert n - held <= sum(computed) < n - held + 16
    for later in found[1:]:
        for one, other in zip(found[0], later, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-2 if autocast else 1e-6)
    assert all(torch.equal(one, other) for one, other in zip(found[0], found[1], strict=True))


@pytest.mark.kernels
@pytest.mark.parametrize(("rows", "n"), [(8, 1500), (30, 3001)])
def test_wide_blocks_in_the_memory_of_the_gradient(rows, n, monkeypatch):
    """On a GPU, or with TRITON_INTERPRET=1. Blocks grow where there is memory for them; the results are the same."""
    features, target = torch.randn(rows, SIZE, device=DEVICE), torch.randint(-1, n, (rows, 3), device=DEVICE)
    if _scan.kernels_for(features) is None:
        pytest.skip("no kernels here")
    weight, bias = torch.randn(n, SIZE, device=DEVICE), torch.randn(n, device=DEVICE)
    found, real = [], _scan.split
    for wide in ((0, n), (400, n), (0, 500), None):
        monkeypatch.setattr(_scan, "split", lambda *shape, wide=wide: real(*shape[:-1], wide))
        found.append(results(linear_lml_loss, features, weight, bias, target, 3))
    *others, narrow = found
    exact = results(whole, *(t.double() for t in (features, weight, bias)), target, 3)
    for other in others:
        for actual, plain, right in zip(other, narrow, exact, strict=True):
            assert_as_accurate(actual, plain, right)


@pytest.mark.kernels
@pytest.mark.parametrize("lost", [False, slow(True)])
@pytest.mark.parametrize("turn", [4, 100])
@pytest.mark.parametrize("options", [{"bias": True, "observed": 0.3}, slow({"reduction": "sum", "temperature": 2.0})])
def test_rows_take_turns(lost, turn, options, monkeypatch):
    """On a GPU, or with TRITON_INTERPRET=1. Each logit is computed once, and a second backward pass starts anew."""
    rows, n, computed, real = 22, 1040, [], _scan.Layer.logits
    features, weight = torch.randn(rows, SIZE, device=DEVICE), torch.randn(n, SIZE, device=DEVICE)
    bias, target = torch.randn(n, device=DEVICE), torch.randint(-1, n, (rows, 3), device=DEVICE)
    target[::7] = -1
    if _scan.kernels_for(features) is None:
        pytest.skip("no kernels here")

    def watched(layer, classes, out=None):
        if classes.step is None and classes.stop is not None:  # neither the sample nor lost rows
            computed.append(layer.rows * (classes.stop - classes.start))
        return real(layer, classes, out)

    options = dict(options)
    leaves = [features, weight, *([bias] if options.pop("bias", False) else [])]

    def run(function, dtype, times=1):
        given = [t.bfloat16().to(dtype).requires_grad_() for t in leaves]
        loss = function(*given[:2], target, 3, bias=given[2] if len(given) > 2 else None, **options)
        return [[loss.detach(), *torch.autograd.grad(4 * loss, given, retain_graph=True)] for _ in range(times)]

    plain, exact = run(whole, torch.bfloat16)[0], run(whole, torch.float64)[0]
    monkeypatch.setattr(_scan.Layer, "logits", watched)
    monkeypatch.setattr(linear, "PASSES", 1 if lost else linear.PASSES)
    for name, value in {"_TURN": turn * 2 * n, "_FEWEST": 4, "_EVEN": 1}.items():
        monkeypatch.setattr(linear, name, value)
    found = run(linear_lml_loss, torch.bfloat16, times=2)
    turn = min(turn, rows - SIZE)
    first = SIZE + (rows - SIZE) % turn  # of which SIZE rows fit in the memory of the gradient
    assert lost or 2 * rows * n <= sum(computed) <= 2 * (rows + first - SIZE) * n
    for gradients in found:
        for actual, one, right in zip(gradients, plain, exact, strict=True):
            assert actual.dtype == torch.bfloat16
            assert_as_accurate(actual, one, right)


@pytest.mark.kernels
def test_a_mode_that_watches_the_backward_pass_of_rows_that_take_turns(monkeypatch):
    """On a GPU, or with TRITON_INTERPRET=1. Under a mode there are no kernels."""
    from torch.utils.flop_counter import FlopCounterMode

    rows, n = SIZE + 5, 272
    features, weight = torch.randn(rows, SIZE, device=DEVICE), torch.randn(n, SIZE, device=DEVICE)
    if _scan.kernels_for(features) is None:
        pytest.skip("no kernels here")
    for name, value in {"_TURN": 4 * 2 * n, "_FEWEST": 4, "_EVEN": 1}.items():
        monkeypatch.setattr(linear, name, value)
    leaves = [t.bfloat16().requires_grad_() for t in (features, weight, torch.randn(n, device=DEVICE))]
    target, found = torch.randint(n, (rows, 2), device=DEVICE), []
    for mode in (contextlib.nullcontext(), FlopCounterMode(display=False)):
        loss = linear_lml_loss(*leaves[:2], target, 3, bias=leaves[2])
        assert "InTurns" in type(loss.grad_fn).__name__
        for _ in range(2):  # the second pass computes the gradients again
            with mode:
                found.append(torch.autograd.grad(3 * loss, leaves, retain_graph=True))
    for gradients in found[1:]:
        for one, other in zip(found[0], gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-3)


@pytest.mark.kernels
def test_rows_without_features_do_not_take_turns(monkeypatch):
    """On a GPU, or with TRITON_INTERPRET=1. There would be no row before the turns."""
    rows, n = 8, 272
    features, weight = (torch.empty(size, 0, dtype=torch.bfloat16, device=DEVICE) for size in (rows, n))
    for name, value in {"_TURN": 4 * 2 * n, "_FEWEST": 4, "_EVEN": 1}.items():
        monkeypatch.setattr(linear, name, value)
    target = torch.randint(n, (rows, 2), device=DEVICE)
    loss = linear_lml_loss(features, weight.requires_grad_(), target, 3)
    torch.testing.assert_close(loss, whole(features, weight, target, 3))


@pytest.mark.kernels
def test_few_rows_of_many_take_turns(monkeypatch):
    """On a GPU, or with TRITON_INTERPRET=1. Each turn rounds the gradient of the weight once more."""
    rows, n = 160, 272
    features, weight = torch.randn(rows, SIZE, device=DEVICE), torch.randn(n, SIZE, device=DEVICE)
    target = torch.randint(n // 8, (rows, 3), device=DEVICE)
    if _scan.kernels_for(features) is None:
        pytest.skip("no kernels here")
    for name, value in {"_TURN": 4 * 2 * n, "_FEWEST": 4, "_EVEN": 1}.items():
        monkeypatch.setattr(linear, name, value)
    leaves = [t.bfloat16() for t in (features, weight)]
    error = []
    for function, dtype in ((linear_lml_loss, torch.bfloat16), (whole, torch.bfloat16), (whole, torch.float64)):
        given = [t.to(dtype).requires_grad_() for t in leaves]
        error.append(torch.autograd.grad(function(*given, target, 3), given[1])[0].double())
    found, plain, exact = error
    assert (found - exact).norm() <= 2 * (plain - exact).norm()


@pytest.mark.parametrize("wide", [None, (0, 1 << 30), (600, 1 << 30), (0, 400)])
@pytest.mark.parametrize(("rows", "per"), [(1, 4), (40, 12), (24, 12), (12, 12), (11, 12), (100, 12), (13, 12), (5, 0)])
@pytest.mark.parametrize("n", [0, 1, 255, 1040, 3001, 20_000])
def test_no_logits_are_overwritten_before_they_are_read(n, rows, per, wide, monkeypatch):
    """A class's number stands for its logits and, less 1 and negative, for its gradient, in the memory of both."""
    monkeypatch.setattr(_scan, "_WIDE", {4: wide})
    shape = {"n": n, "rows": rows, "step": 256, "wide": True, "kernels": None}
    layer = SimpleNamespace(**shape, features=torch.empty(rows, 1), dtype=torch.float32)
    held = _scan.Held(layer, torch.zeros(n, per) if per else None)
    lists = [held.lists(3, torch.float32).fill_(-7), held.lists(9, torch.int32).fill_(-8)]
    blocks, number = held.blocks, torch.arange(n, dtype=torch.float32)
    for classes in held.order:
        held.place(classes).copy_(number[classes].expand(rows, -1))
    assert [(one + i).any().item() for i, one in enumerate(lists, 7)] == [False, False]  # no gradient is written yet
    seen = []
    for classes in (*blocks.last, *blocks.waiting, *blocks.again):
        if classes in blocks.again:
            held.place(classes).copy_(number[classes].expand(rows, -1))
        out = held.out(classes)
        out.copy_(held.place(classes).clone())
        if per:
            held.gradient[classes] = -1 - number[classes].unsqueeze(-1)
        assert torch.equal(out, number[classes].expand(rows, -1))
        seen = [*range(classes.start, classes.stop), *seen]
    assert seen == list(range(n))
    assert sorted(i for c in held.order for i in range(c.start, c.stop)) == seen
    if per:
        assert torch.equal(held.gradient, -1 - number.unsqueeze(-1).expand(n, per))


def test_an_infeasible_k_has_a_nan_gradient():
    features, weight, bias, target = problem(600)
    k = torch.full(target.shape[:1], 3.0, dtype=torch.float64, device=DEVICE)
    k[1], k[3] = -1, 601
    k.requires_grad_()
    blocks = linear_lml_loss(features, weight, target, k, bias=bias, reduction="sum")
    whole = lml_loss(F.linear(features, weight, bias), target, k, reduction="sum")
    found = [torch.autograd.grad(loss, k)[0] for loss in (blocks, whole)]
    torch.testing.assert_close(*found, equal_nan=True)
    assert found[0].isnan().nonzero().flatten().tolist() == [1, 3]


@pytest.mark.kernels
@pytest.mark.parametrize("k", [[-50.0, -50.0, -1.0], [3.0, 1e30, 2.0], [1e30, 1e30, torch.inf], [2.0, -1e30, 1501.0]])
def test_an_infeasible_k_of_any_size_is_nan_in_its_row(k):
    features, weight, bias, target = problem(1500, dtype=torch.float32)
    sizes = torch.tensor(k, device=DEVICE)
    loss = linear_lml_loss(features[:3], weight, target[:3].abs(), sizes, bias=bias, reduction="none")
    assert loss.isnan().tolist() == [not 0 <= size <= 1500 for size in k]
    assert linear._largest_rank(sizes, 1500) <= 4  # a k beyond the classes does not cost the other rows their lists


@pytest.mark.parametrize("tile", [1, 1 << 20])
def test_a_bias_of_another_dtype(tile, monkeypatch):
    monkeypatch.setattr(_scan, "TILE", {"cpu": tile, "cuda": tile})
    features, weight, bias, target = problem(600, dtype=torch.bfloat16)
    found = [linear_lml_loss(features, weight, target, 3, bias=b) for b in (bias, bias.float())]
    assert torch.equal(*found)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_logits_of_one_block_are_held(reduction, monkeypatch):
    features, weight, bias, target = problem(600)
    options = {"bias": bias, "observed": 0.3, "temperature": 2.0, "mask": torch.rand(600, device=DEVICE) < 0.9}
    found = []
    for tile in (8 * ROWS * 600 - 1, 8 * ROWS * 600):
        monkeypatch.setattr(_scan, "TILE", {"cpu": tile, "cuda": tile})
        leaves = [t.clone().requires_grad_() for t in (features, weight)]
        loss = linear_lml_loss(*leaves, target, 3, reduction=reduction, **options)
        known = torch.where(loss.isfinite(), loss, 0)
        found.append([loss.detach(), *torch.autograd.grad(known.sum(), leaves, create_graph=True)])
    assert_same(*found)
    found[1][1].sum().backward()  # has second derivatives: it is the loss of the logits


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weight": torch.zeros(5, 3)}, ValueError, r"`weight` must have shape \(n_classes, 2\), got \(5, 3\)"),
        ({"weight": torch.zeros(5, 2).double()}, TypeError, "`weight` must be of the dtype of `features`"),
        ({"weight": torch.zeros(5, 2).long()}, TypeError, "`weight` must be of a floating-point dtype"),
        ({"features": 3}, TypeError, "`features` must be a tensor"),
        ({"bias": torch.zeros(4)}, ValueError, r"`bias` must have shape \(5,\), got \(4,\)"),
        ({"k": 6}, ValueError, "`k` must be between 0 and n_classes=5, got 6"),
        ({"reduction": "max"}, ValueError, "`reduction` must be one of"),
        ({"target": torch.zeros(4, dtype=torch.long)}, ValueError, "`target` must have shape"),
        ({"negatives": 0}, ValueError, "`negatives` must be at least 1, got 0"),
        ({"negatives": "all"}, TypeError, "`negatives` must be a number or a pair of tensors"),
        ({"negatives": (torch.zeros(2), torch.ones(2))}, ValueError, "`negatives` must be class ids .* and probab"),
        ({"negatives": (torch.ones(2, dtype=torch.bool), torch.ones(2))}, ValueError, "of torch.bool and"),
        ({"negatives": (torch.tensor([10**6]), torch.ones(1))}, ValueError, "`negatives` must hold classes below"),
        ({"negatives": (torch.tensor([0, -1]), torch.ones(2))}, ValueError, "must hold classes from 0 on, got -1"),
        ({"filter": -1}, ValueError, "`filter` must be between 0 and 1, got -1"),
        ({"filter": 0.1, "negatives": 3}, ValueError, "`filter` must be 0 with `negatives`, got 0.1"),
        ({"observed": 2}, ValueError, "`observed` must be between 0 and 1, got 2"),
        ({"temperature": 0}, ValueError, "`temperature` must be positive and finite, got 0"),
        ({"mask": torch.ones(4)}, TypeError, "`mask` must be a boolean tensor"),
        ({"shard": ClassShard(0, 4)}, ValueError, "`weight` must hold the 4 classes of `shard`, got 5 rows"),
    ],
)
def test_messages(change, error, message):
    arguments = {"features": torch.zeros(3, 2), "weight": torch.zeros(5, 2), "target": torch.zeros(3).long(), "k": 1}
    with pytest.raises(error, match=message):
        linear_lml_loss(**{**arguments, **change})


def test_layer_is_linear():
    layer = ShardedLinear(SIZE, 30, dtype=torch.float64)
    features = torch.randn(4, SIZE, dtype=torch.float64)
    torch.testing.assert_close(layer(features), F.linear(features, layer.weight, layer.bias))
    target = torch.tensor([1, 2, 3, 4])
    torch.testing.assert_close(layer.loss(features, target, 3), lml_loss(layer(features), target, 3))
    assert ShardedLinear(SIZE, 30, bias=False).bias is None
    assert "n_classes=30" in repr(layer)


def test_layer_starts_alike_for_every_split(monkeypatch):
    monkeypatch.setattr(ShardedLinear, "_init_block", 8)
    torch.manual_seed(3)
    layer = ShardedLinear(SIZE, 30)
    assert layer.weight.abs().max() <= SIZE**-0.5
    assert layer.weight.unique().numel() == layer.weight.numel()
    for start, stop in ((0, 7), (7, 30), (5, 5), (16, 24)):
        torch.manual_seed(3)
        part = ShardedLinear(SIZE, 30, shard=ClassShard(start, stop))
        assert torch.equal(part.weight, layer.weight[start:stop])
        assert torch.equal(part.bias, layer.bias[start:stop])


def test_layer_message():
    with pytest.raises(ValueError, match="`shard` must end at n_classes=30 or before, got 31"):
        ShardedLinear(SIZE, 30, shard=ClassShard(0, 31))


def test_a_soft_label_counts_as_a_whole_one_in_one_block_and_in_many(monkeypatch):
    features, weight = torch.randn(3, 4), torch.randn(5, 4)
    soft = torch.tensor([[0.5, 0.5, 0, 0, 0]]).expand(3, 5)
    whole = linear_lml_loss(features, weight, soft.ceil(), 2)
    assert linear_lml_loss(features, weight, soft, 2) == whole
    monkeypatch.setattr(_scan, "TILE", {"cpu": 1, "cuda": 1})
    torch.testing.assert_close(linear_lml_loss(features, weight, soft, 2), whole)
