import pytest
import torch
import torch.nn.functional as F
from tools import DEVICE, assert_as_accurate

from lastlayer import ShardedLinear, linear_lml_loss, lml_loss
from lastlayer.head import linear
from lastlayer.shard import ClassShard

ROWS, SIZE = 7, 12


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Blocks of 256 classes, so that there are several."""
    monkeypatch.setattr(linear, "_TILE", {"cpu": 1, "cuda": 1})


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
@pytest.mark.parametrize("k", [5, 1500])
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


@pytest.mark.parametrize("shape", [(1, 1), (3, 5000), (40, 1030)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_are_plain(shape, dtype):
    """On a GPU, or with TRITON_INTERPRET=1."""
    layer = linear._Layer(torch.zeros(1, 1, device=DEVICE, dtype=dtype), torch.zeros(1, 1), None, dtype)
    if layer.kernels is None:
        pytest.skip("no kernels here")
    x = (3 * torch.randn(shape, device=DEVICE)).to(dtype)
    x[0, ::7], x[0, ::11], x[-1, ::13] = -torch.inf, torch.inf, torch.nan
    center, delta, peak = torch.randn(3, shape[0], 1, device=DEVICE) * 0.1
    delta[shape[0] // 2] = torch.nan if shape[0] > 3 else 0.2
    delta[shape[0] // 3] = torch.inf if shape[0] > 3 else 0.1
    layer.features, layer.rows, layer.n, layer.step = x[:, :1], *shape, shape[1]
    kernels, found = layer.kernels, []
    usual = torch.where(delta.isfinite(), delta, 0)
    for layer.kernels in (kernels, None):
        counts, sums = layer.zeros(3), layer.zeros(6)
        for _ in range(2):  # sums add up
            layer.add_counts(counts, x)
            layer.add_sums(sums, x, center, usual, peak)
        found.append([counts.sum(1), sums.sum(1), layer.grad(x, center, delta, peak, peak)])
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-5, atol=1e-5, equal_nan=True)


def test_never_holds_the_logits(monkeypatch):
    """No tensor of a quarter of the logits is made, forward or backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    monkeypatch.setattr(linear, "_TILE", {"cpu": 32 * 256, "cuda": 32 * 256})
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for t in out if isinstance(out, tuple | list) else [out]:
                if isinstance(t, torch.Tensor) and t.ndim == 2 and t.shape[0] == 32:
                    largest = max(largest, t.untyped_storage().nbytes() // 4)
            return out

    features = torch.randn(32, SIZE, requires_grad=True)
    weight = torch.randn(5000, SIZE, requires_grad=True)
    with Watch():
        linear_lml_loss(features, weight, torch.randint(5000, (32,)), 5).backward()
    assert largest == 32 * 256


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
