"""Float32 products of tensor cores: as exact as float32, and the same for infinite numbers."""

import pytest
import torch
from torch import Tensor

import lastlayer as ll
from lastlayer import _triton
from lastlayer.loss import _scan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(bool(_triton.unavailable(torch.device(DEVICE))), reason="no kernels here"),
]


def layer(rows: int, size: int, n: int, biased: bool = False) -> _scan.Layer:
    generator = torch.Generator().manual_seed(rows + size + n)
    features, weight = (torch.randn(m, size, generator=generator).to(DEVICE) for m in (rows, n))
    bias = torch.randn(n, generator=generator).to(DEVICE) if biased else None
    found = _scan.Layer(features, weight, bias, torch.float32)
    if found.products is None:
        pytest.skip("no such products here")
    return found


def computed(one: _scan.Layer, classes: slice = slice(None), out: Tensor | None = None) -> Tensor:
    """The logits by the kernel, which a GPU compiles first."""
    assert one.products is not None
    for _ in range(1000):
        weight, bias = one.weight[classes], None if one.bias is None else one.bias[classes]
        x = one._by_parts(one.products, weight, bias, out)
        if x is not None:
            return x
        torch.cuda._sleep(100_000_000)
        torch.cuda.synchronize()
    raise AssertionError("the kernel was not compiled")


def exact(one: _scan.Layer) -> Tensor:
    x = one.features.double() @ one.weight.double().T
    return x if one.bias is None else x + one.bias.double()


@pytest.mark.parametrize(("rows", "size", "n", "biased"), [(128, 32, 200, False), (130, 96, 129, True)])
def test_products_are_as_exact_as_float32(rows: int, size: int, n: int, biased: bool) -> None:
    one = layer(rows, size, n, biased)
    plain = torch.mm(one.features, one.weight.T) + (0 if one.bias is None else one.bias)
    error, allowed = ((x.double() - exact(one)).abs().max() for x in (computed(one), plain))
    assert error <= 2 * allowed + 2 * torch.finfo(torch.float32).eps


def test_every_digit_of_a_number_counts() -> None:
    one = layer(128, 32, 128)
    one.features.zero_()
    one.weight.zero_()
    one.features[:, 5], one.weight[:, 5] = 1 + 2.0**-23, 2.0
    assert computed(one).double().unique().tolist() == [2 + 2.0**-22]


def test_classes_rows_and_places_may_have_strides() -> None:
    one = layer(128, 64, 300)
    wide = torch.full((128, 400), 7.0, device=DEVICE)
    computed(one, slice(0, 300, 3), wide[:, 50:150])
    assert (wide[:, :50] == 7).all()
    assert (wide[:, 150:] == 7).all()
    torch.testing.assert_close(wide[:, 50:150].double(), exact(one)[:, ::3], rtol=1e-5, atol=1e-5)


def test_rows_are_taken_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    one = layer(300, 32, 128)
    assert one.products is not None
    whole = computed(one)
    assert one._parts is not None
    one._parts = None
    monkeypatch.setattr(one.products, "PARTS", 8 * 32 * 128)
    assert torch.equal(computed(one), whole)
    assert one._parts is None  # they are not kept


def test_infinite_numbers_are_what_they_are_in_float32() -> None:
    one = layer(128, 32, 128)
    one.weight[3], one.features[7] = 0.5, 0.25  # of one part each
    one.weight[3, 0], one.weight[4, 1], one.weight[5, 2] = torch.inf, -torch.inf, torch.nan
    one.weight[6, 0] = torch.tensor(0x7F800001, dtype=torch.int32).view(torch.float32)  # nan in its last bit alone
    one.features[7, 4], one.features[8, 4] = torch.inf, 3.4e38
    one.weight[9] = 0
    found, expected = computed(one), torch.mm(one.features, one.weight.T)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isposinf(), expected.isposinf())
    assert torch.equal(found.isneginf(), expected.isneginf())


def test_the_loss_is_that_of_plain_products(monkeypatch: pytest.MonkeyPatch) -> None:
    from lastlayer._triton import products

    monkeypatch.setitem(_scan.TILE, DEVICE, 1 << 12)
    monkeypatch.setattr(products, "FEWEST", 4)
    one = layer(4, 32, 700)
    target = torch.arange(4, device=DEVICE).unsqueeze(-1)
    found = []
    for products_for in (_scan.products_for, lambda *given: None):
        monkeypatch.setattr(_scan, "products_for", products_for)
        leaves = [t.detach().clone().requires_grad_() for t in (one.features, one.weight)]
        loss = ll.linear_lml_loss(leaves[0], leaves[1], target, 3)
        found.append([loss, *torch.autograd.grad(loss, leaves)])
    leaves = [t.detach().double().requires_grad_() for t in (one.features, one.weight)]
    loss = ll.lml_loss(leaves[0] @ leaves[1].T, target, 3)
    for by_parts, plain, right in zip(*found, [loss, *torch.autograd.grad(loss, leaves)], strict=True):
        error, allowed = ((x.double() - right).abs().max() for x in (by_parts, plain))
        assert error <= 2 * allowed + 2 * torch.finfo(torch.float32).eps * max(1, float(right.detach().abs().max()))


def test_few_rows_odd_sizes_and_other_types_have_torchs_products() -> None:
    features, weight = torch.zeros(128, 32, device=DEVICE), torch.zeros(64, 32, device=DEVICE)
    assert _scan.products_for(features[:127], weight) is None
    assert _scan.products_for(features[:, :31].contiguous(), weight[:, :31].contiguous()) is None
    assert _scan.products_for(features.bfloat16(), weight.bfloat16()) is None
    assert _scan.products_for(features, weight.T.contiguous().T) is None
