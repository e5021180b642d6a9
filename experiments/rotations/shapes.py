"""A dozen kinds of things, put together from convex parts with random proportions: meshes without a file.

Things stand upright (z), look forward (x), and none looks the same after a turn, so that every view has one answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Draw = Callable[[float, float], float]  # a number between two others
Triple = tuple[float, float, float]


def _outward(triangles: Tensor) -> Tensor:
    """Turn the triangles of a convex part around its origin so that they run against the clock seen from outside."""
    a, b, c = triangles.unbind(1)
    inward = (torch.linalg.cross(b - a, c - a) * (a + b + c)).sum(-1) < 0
    return torch.where(inward[:, None, None], triangles.flip(1), triangles)


def _prism(outline: Tensor, top: float = 1.0) -> Tensor:
    """A part over a convex outline in x and y, from z = -1/2 to 1/2, its upper end scaled by `top`."""
    n = len(outline)
    low = torch.cat([outline, torch.full((n, 1), -0.5)], 1)
    high = torch.cat([top * outline, torch.full((n, 1), 0.5)], 1)
    ends = [torch.stack([side[0], side[i], side[i + 1]]) for side in (low, high) for i in range(1, n - 1)]
    walls = []
    for i in range(n):
        j = (i + 1) % n
        walls += [torch.stack([low[i], low[j], high[j]]), torch.stack([low[i], high[j], high[i]])]
    return _outward(torch.stack(ends + walls))


def _ball() -> Tensor:
    """An octahedron whose faces are cut in four, on the sphere of diameter 1."""
    axes = torch.eye(3)
    faces = [torch.stack([x * axes[0], y * axes[1], z * axes[2]]) for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)]
    found = []
    for a, b, c in faces:
        ab, bc, ca = ((p + q) / math.sqrt(2) for p, q in ((a, b), (b, c), (c, a)))
        found += [torch.stack(t) for t in ((a, ab, ca), (ab, b, bc), (ca, bc, c), (ab, bc, ca))]
    return _outward(torch.stack(found) / 2)


_SQUARE = torch.tensor([[-0.5, -0.5], [0.5, -0.5], [0.5, 0.5], [-0.5, 0.5]])
_TURN = torch.arange(8) * (math.pi / 4)
_ROUND = torch.stack([_TURN.cos(), _TURN.sin()], 1) / 2
_BOX, _ROD, _SHADE, _BALL = _prism(_SQUARE), _prism(_ROUND), _prism(_ROUND, 0.55), _ball()
_ROOF = _prism(torch.tensor([[-0.5, -0.5], [0.5, -0.5], [0.0, 0.5]]))  # a triangle, drawn out along z
_PROW = _prism(torch.tensor([[-0.5, -0.5], [0.5, 0.0], [-0.5, 0.5]]))  # points forward


def _put(part: Tensor, centre: Triple, size: Triple) -> Tensor:
    return part * torch.tensor(size) + torch.tensor(centre)


def box(centre: Triple, size: Triple) -> Tensor:
    return _put(_BOX, centre, size)


def rod(centre: Triple, width: float, length: float, axis: int = 2) -> Tensor:
    """A rod of eight sides along an axis."""
    part = _ROD.roll(axis + 1, -1)  # a cyclic change of axes keeps the sense of the triangles
    size = [width, width, width]
    size[axis] = length
    return _put(part, centre, (size[0], size[1], size[2]))


def legs(x: float, y: float, top: float, height: float, width: float) -> list[Tensor]:
    corners = [(a * (x - width) / 2, b * (y - width) / 2) for a in (-1, 1) for b in (-1, 1)]
    return [box((a, b, top - height / 2), (width, width, height)) for a, b in corners]


def chair(u: Draw) -> list[Tensor]:
    deep, wide, back = u(0.7, 1.0), u(0.7, 1.0), u(0.6, 1.1)
    seat = box((0, 0, 0), (deep, wide, 0.12))
    return [seat, box((-deep / 2, 0, back / 2), (0.12, wide, back)), *legs(deep, wide, 0, u(0.5, 0.9), 0.12)]


def table(u: Draw) -> list[Tensor]:
    deep, wide, high = u(0.8, 1.1), u(1.2, 1.8), u(0.6, 0.9)
    drawer = box((0.05, wide / 2 - 0.3, -0.2), (deep * 0.8, 0.4, 0.35))
    return [box((0, 0, 0), (deep, wide, 0.1)), drawer, *legs(deep, wide, 0, high, 0.12)]


def bed(u: Draw) -> list[Tensor]:
    long, wide, head = u(1.7, 2.1), u(0.9, 1.5), u(0.6, 1.0)
    pillow = box((-long / 2 + 0.3, 0, 0.22), (0.35, wide * 0.7, 0.16))
    back = box((-long / 2, 0, head / 2 - 0.3), (0.12, wide, head))
    return [box((0, 0, 0), (long, wide, 0.3)), pillow, back, *legs(long, wide, -0.1, u(0.3, 0.5), 0.14)]


def sofa(u: Draw) -> list[Tensor]:
    deep, wide, arm = u(0.7, 0.9), u(1.3, 1.9), u(0.5, 0.7)
    back = box((-deep / 2, 0, 0.3), (0.22, wide, u(0.9, 1.1)))
    arms = [box((0, side * wide / 2, 0.1), (deep, 0.2, arm)) for side in (-1, 1)]
    return [box((0, 0, 0), (deep, wide, 0.4)), back, *arms]


def car(u: Draw) -> list[Tensor]:
    long, wide, wheel = u(1.8, 2.2), u(0.8, 1.0), u(0.35, 0.5)
    cabin = _put(_prism(_SQUARE, 0.75), (-0.12 * long, 0, 0.4), (long * u(0.4, 0.55), wide * 0.95, 0.45))
    wheels = [rod((a * long * 0.32, b * wide / 2, -0.2), wheel, 0.15, 1) for a in (-1, 1) for b in (-1, 1)]
    return [box((0, 0, 0), (long, wide, 0.4)), cabin, *wheels]


def aeroplane(u: Draw) -> list[Tensor]:
    long, span, body = u(1.8, 2.2), u(1.8, 2.4), u(0.22, 0.32)
    wings = box((u(0.0, 0.2), 0, 0), (u(0.35, 0.5), span, 0.07))
    fin = box((-long / 2 + 0.15, 0, 0.28), (0.3, 0.07, u(0.4, 0.55)))
    nose = _put(_PROW, (long / 2 + 0.12, 0, 0), (0.3, body, body))
    return [rod((0, 0, 0), body, long, 0), wings, fin, nose, box((-long / 2 + 0.12, 0, 0.1), (0.25, span * 0.35, 0.07))]


def boat(u: Draw) -> list[Tensor]:
    long, wide, mast = u(1.1, 1.4), u(0.5, 0.8), u(0.9, 1.3)
    prow = _put(_PROW, (long / 2 + 0.25, 0, 0), (0.5, wide, 0.35))
    cabin = box((-long * 0.22, 0, 0.3), (long * 0.35, wide * 0.7, 0.3))
    return [box((0, 0, 0), (long, wide, 0.35)), prow, cabin, rod((long * 0.2, 0, 0.15 + mast / 2), 0.1, mast)]


def house(u: Draw) -> list[Tensor]:
    long, wide, high, roof = u(1.2, 1.7), u(0.8, 1.1), u(0.6, 0.9), u(0.4, 0.6)
    gable = _put(_ROOF.roll(1, -1), (0, 0, high / 2 + roof / 2), (long * 1.1, wide * 1.15, roof))  # the ridge along x
    chimney = box((long * 0.3, wide * 0.25, high / 2 + roof * 0.7), (0.2, 0.2, roof))
    porch = box((long / 2 + 0.15, 0, -high / 4), (0.35, wide * 0.5, high / 2))
    return [box((0, 0, 0), (long, wide, high)), gable, chimney, porch]


def mug(u: Draw) -> list[Tensor]:
    wide, high, out = u(0.8, 1.0), u(0.9, 1.3), u(0.3, 0.45)
    x = wide * 0.42 + out / 2
    ends = [box((x, 0, z * high * 0.3), (out, 0.16, 0.14)) for z in (-0.6, 1)]
    body = _put(_prism(_ROUND, 1.35), (0, 0, 0), (wide * 0.8, wide * 0.8, high))
    return [body, *ends, box((x + out / 2, 0, high * 0.06), (0.14, 0.16, high * 0.55))]


def lamp(u: Draw) -> list[Tensor]:
    pole, arm, shade = u(1.2, 1.6), u(0.6, 0.9), u(0.45, 0.65)
    top = pole / 2
    return [
        rod((0, 0, -top), u(0.6, 0.8), 0.12),
        rod((0, 0, 0), 0.12, pole),
        rod((arm / 2, 0, top), 0.1, arm, 0),
        _put(_SHADE, (arm, 0, top - 0.2), (shade, shade, 0.45)),
    ]


def dog(u: Draw) -> list[Tensor]:
    long, wide, head, leg = u(1.0, 1.4), u(0.4, 0.55), u(0.4, 0.5), u(0.4, 0.7)
    tail = box((-long / 2 - 0.15, 0, 0.3), (0.1, 0.1, u(0.4, 0.6)))
    snout = box((long / 2 + head * 0.65, 0, 0.38), (0.28, 0.2, 0.18))
    body = rod((0, 0, 0), wide, long, 0)
    return [body, _put(_BALL, (long / 2, 0, 0.42), (head,) * 3), snout, tail, *legs(long * 0.8, wide, 0, leg, 0.13)]


def hammer(u: Draw) -> list[Tensor]:
    long, head, wide = u(1.4, 1.9), u(0.5, 0.8), u(0.25, 0.35)
    claw = _put(_PROW, (head / 2 + 0.25, 0, long / 2), (0.5, wide * 0.8, wide * 0.8))
    return [rod((0, 0, 0), 0.16, long), box((0, 0, long / 2), (head, wide, wide)), claw]


KINDS: tuple[Callable[[Draw], list[Tensor]], ...] = (
    chair,
    table,
    bed,
    sofa,
    car,
    aeroplane,
    boat,
    house,
    mug,
    lamp,
    dog,
    hammer,
)


def mesh(kind: Callable[[Draw], list[Tensor]], generator: torch.Generator) -> Tensor:
    """One thing of a kind: triangles ``(t, 3, 3)``, around the origin, within the unit ball."""

    def draw(low: float, high: float) -> float:
        return low + (high - low) * torch.rand((), generator=generator).item()

    triangles = torch.cat(kind(draw))
    corners = triangles.flatten(0, 1)
    triangles = triangles - (corners.amax(0) + corners.amin(0)) / 2
    return 0.95 * triangles / triangles.norm(dim=-1).max()


def meshes(each: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """`each` things of every kind, padded with empty triangles to one size: ``(things, t, 3, 3)``, and their kinds."""
    found = [mesh(kind, generator) for kind in KINDS for _ in range(each)]
    most = max(len(triangles) for triangles in found)
    padded = [torch.cat([t, t.new_zeros(most - len(t), 3, 3)]) for t in found]
    return torch.stack(padded), torch.arange(len(KINDS)).repeat_interleave(each)
