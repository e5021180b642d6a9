"""Views of meshes: rotations, angles, and a rasteriser that is a matrix product."""

from __future__ import annotations

import torch
from torch import Tensor

LIGHT = (0.4, 0.5, 0.77)  # from the upper right, behind the camera


def matrix(q: Tensor) -> Tensor:
    """The rotation matrices of unit quaternions, real part first."""
    w, x, y, z = q.unbind(-1)
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def view(azimuth: Tensor, elevation: Tensor, tilt: Tensor) -> Tensor:
    """The rotation from a thing that stands upright (z) to the camera, which looks along -z with y up."""
    half = elevation / 2 - torch.pi / 4
    turns = [_about(2, tilt / 2), _about(0, half), _about(2, azimuth / 2)]
    return matrix(turns[0]) @ matrix(turns[1]) @ matrix(turns[2])


def _about(axis: int, half: Tensor) -> Tensor:
    q = [half.cos(), *(torch.zeros_like(half) for _ in range(3))]
    q[1 + axis] = half.sin()
    return torch.stack(q, -1)


def render(triangles: Tensor, rotation: Tensor, size: int, chunk: int = 32) -> Tensor:
    """Draw each mesh of ``(images, t, 3, 3)`` turned by its rotation: brightness as bytes, ``(images, size, size)``.

    Parallel projection, flat shading by one light, black background. Triangles run against the clock seen from
    outside of closed parts, so that those that face away are left out.
    """
    parts = zip(triangles.split(chunk), rotation.split(chunk), strict=True)
    drawn = [_drawn(some @ turn.mT[:, None], size) for some, turn in parts]
    return (255 * torch.cat(drawn)).round().to(torch.uint8)


def normals(triangles: Tensor, rotation: Tensor, size: int, chunk: int = 32) -> Tensor:
    """Return the unit normal of the surface at each pixel, towards the camera, 0 where nothing is."""
    parts = zip(triangles.split(chunk), rotation.split(chunk), strict=True)
    found = []
    for some, turn in parts:
        depth, nearest, normal = _visible(some @ turn.mT[:, None], size)
        at = normal.gather(1, nearest[..., None].expand(-1, -1, 3))
        found.append(torch.where((depth > -torch.inf)[..., None], at, 0).view(-1, size, size, 3))
    return torch.cat(found)


def _drawn(corners: Tensor, size: int) -> Tensor:
    depth, nearest, normal = _visible(corners, size)
    light = torch.nn.functional.normalize(normal.new_tensor(LIGHT), dim=0)
    shade = 0.25 + 0.75 * (normal @ light).clamp(min=0)
    picture = torch.where(depth > -torch.inf, shade.gather(1, nearest), 0)
    return picture.view(-1, size, size)


def _visible(corners: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the depth at each pixel, which triangle is nearest there, and the unit normals of the triangles."""
    a, b, c = corners.unbind(2)
    normal = torch.linalg.cross(b - a, c - a)
    front = normal[..., 2] > 1e-9
    kept = front.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, : int(front.sum(1).max())]
    a, b, c, normal = (v.gather(1, kept[..., None].expand(-1, -1, 3)) for v in (a, b, c, normal))
    centres = (torch.arange(size, device=a.device) + 0.5) * (2 / size) - 1
    y, x = torch.meshgrid(-centres, centres, indexing="ij")
    pixels = torch.stack([x.flatten(), y.flatten(), torch.ones_like(x).flatten()])
    heights = _planes(a, b, c, normal[..., 2]) @ pixels  # weights of the three corners, and the depth
    inside = (heights[:, :, :3].amin(2) >= 0) & front.gather(1, kept)[..., None]
    depth, nearest = torch.where(inside, heights[:, :, 3], -torch.inf).max(1)
    return depth, nearest, torch.nn.functional.normalize(normal, dim=-1)


def _planes(a: Tensor, b: Tensor, c: Tensor, area: Tensor) -> Tensor:
    """The three barycentric weights and the depth as linear functions of x, y and 1: ``(images, t, 4, 3)``."""
    area = torch.where(area > 1e-9, area, 1.0)
    weights = []
    for p, q in ((b, c), (c, a), (a, b)):
        offset = p[..., 0] * q[..., 1] - q[..., 0] * p[..., 1]
        weights.append(torch.stack([p[..., 1] - q[..., 1], q[..., 0] - p[..., 0], offset], -1) / area[..., None])
    depth = sum(w * corner[..., 2:] for w, corner in zip(weights, (a, b, c), strict=True))
    return torch.stack([*weights, depth], -2)
