"""Angles between rotations and between directions."""

import math

import pytest
import torch
from tools import DEVICE, assert_as_accurate
from torch import Tensor

import lastlayer as ll


def quaternions(n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    q = torch.randn(n, 4, dtype=dtype, device=DEVICE)
    return q / q.norm(dim=-1, keepdim=True)


def matrices(q: Tensor) -> Tensor:
    """The rotation matrices of unit quaternions."""
    w, x, y, z = q.unbind(-1)
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    return torch.stack([torch.stack(r, -1) for r in rows], -2)


def turn(axis: list[float], angle: float, dtype: torch.dtype = torch.float64) -> Tensor:
    v = torch.tensor(axis, dtype=torch.float64)
    v = v / v.norm()
    return torch.cat([torch.tensor([math.cos(angle / 2)], dtype=torch.float64), math.sin(angle / 2) * v]).to(dtype)


@pytest.mark.parametrize("angle", [0, 1e-12, 1e-7, 0.3, math.pi / 2, 3, math.pi - 1e-7, math.pi])
def test_known_angles(angle):
    start = turn([1.0, 2.0, -1.0], 0)
    end = turn([1.0, 2.0, -1.0], angle)
    assert ll.rotation_error(end, start).item() == pytest.approx(angle, abs=1e-15, rel=1e-9)
    assert ll.rotation_error(-2 * end, start).item() == pytest.approx(angle, abs=1e-15, rel=1e-9)
    assert ll.rotation_error(matrices(end), matrices(start)).item() == pytest.approx(angle, abs=1e-15, rel=1e-7)


def test_the_two_forms_and_the_logarithm_agree():
    a, b = quaternions(50), quaternions(50)
    angle = ll.rotation_error(a, b)
    torch.testing.assert_close(ll.rotation_error(matrices(a), matrices(b)), angle)
    torch.testing.assert_close(angle, 2 * (a * b).sum(-1).abs().acos())
    values = torch.linalg.eigvals((matrices(a).mT @ matrices(b)).cpu()).log()  # the logarithm's eigenvalues
    torch.testing.assert_close((values.abs().square().sum(-1).sqrt() / math.sqrt(2)), angle.cpu())


def test_laws():
    a, b, c = quaternions(40), quaternions(40), quaternions(40)
    ab, ac, cb = ll.rotation_error(a, b), ll.rotation_error(a, c), ll.rotation_error(c, b)
    torch.testing.assert_close(ab, ll.rotation_error(b, a))
    assert (ab <= ac + cb + 1e-12).all()
    assert ll.rotation_error(a, a).max() == 0
    assert ll.rotation_error(matrices(a), matrices(a)).max() < 1e-15
    left = matrices(c)
    torch.testing.assert_close(ll.rotation_error(left @ matrices(a), left @ matrices(b)), ab)
    assert ((ab >= 0) & (ab <= math.pi)).all()


def test_half_precision_is_computed_in_float32():
    a, b = quaternions(20).half(), quaternions(20).half()
    result = ll.rotation_error(a, b)
    assert result.dtype == torch.float32
    assert_as_accurate(result, ll.rotation_error(a.float(), b.float()), ll.rotation_error(a.double(), b.double()))


def test_reductions_and_degrees():
    a, b = quaternions(10).view(2, 5, 4), quaternions(10).view(2, 5, 4)
    each = ll.rotation_error(a, b)
    assert each.shape == (2, 5)
    torch.testing.assert_close(ll.rotation_error(a, b, degrees=True), each * 180 / math.pi)
    torch.testing.assert_close(ll.rotation_error(a, b, reduction="mean"), each.mean())
    torch.testing.assert_close(ll.rotation_error(a, b, reduction="median"), each.flatten().quantile(0.5))
    assert ll.rotation_error(a[:0], b[:0], reduction="median").item() == 0.0
    assert ll.rotation_error(torch.zeros(4), torch.tensor([1.0, 0, 0, 0])).item() == pytest.approx(math.pi)


def test_what_is_not_a_number_has_no_angle():
    nan, one = torch.full((4,), math.nan), torch.tensor([1.0, 0, 0, 0])
    for a, b in ((nan, one), (one, nan), (torch.tensor([math.nan, 1.0, 0, 0]), one)):
        assert ll.rotation_error(a, b).isnan()
        assert ll.angular_error(a, b).isnan()
    assert ll.rotation_error(torch.full((3, 3), math.nan), torch.eye(3)).isnan()


def test_directions():
    u = torch.tensor([[1.0, 0, 0], [1, 0, 0], [1, 0, 0], [0, 0, 0]])
    v = torch.tensor([[2.0, 0, 0], [0, 3, 0], [-1, 0, 0], [1, 0, 0]])
    expected = torch.tensor([0, math.pi / 2, math.pi, math.pi / 2])
    torch.testing.assert_close(ll.angular_error(u, v), expected)
    a, b = torch.randn(30, 5).double(), torch.randn(30, 5).double()
    torch.testing.assert_close(ll.angular_error(a, b), torch.cosine_similarity(a, b, dim=-1).acos())


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        (((4,), (3, 3)), r"rotation_error: `target` must have the shape of `prediction`, \(4,\), got \(3, 3\)."),
        (
            ((5, 3), (5, 3)),
            r"`prediction` must hold matrices \(\*batch, 3, 3\) or quaternions \(\*batch, 4\), got shape",
        ),
    ],
)
def test_messages(shapes, text):
    with pytest.raises(ValueError, match=text):
        ll.rotation_error(*(torch.ones(s) for s in shapes))


def test_message_of_the_reduction():
    with pytest.raises(
        ValueError, match="rotation_error: `reduction` must be one of 'none', 'mean', 'median', got 'sum'"
    ):
        ll.rotation_error(torch.ones(4), torch.ones(4), reduction="sum")
    with pytest.raises(TypeError, match="angular_error: `prediction` must be of a floating-point dtype"):
        ll.angular_error(torch.ones(4).long(), torch.ones(4))
