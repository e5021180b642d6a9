"""The made-up data of the rotation experiment: closed meshes, and a rasteriser checked pixel by pixel."""

import argparse
import math

import pytest
import torch


@pytest.fixture
def parts(module):
    return [module(f"rotations.{name}") for name in ("shapes", "render", "run")]


def test_meshes_are_closed_and_inside_the_unit_ball(parts):
    shapes, _, _ = parts
    triangles, kind = shapes.meshes(3, torch.Generator().manual_seed(0))
    assert kind.tolist() == sorted(kind.tolist())
    assert triangles.norm(dim=-1).amax((1, 2)).allclose(torch.tensor(0.95))
    a, b, c = triangles.unbind(2)
    normal = torch.linalg.cross(b - a, c - a)
    assert normal.sum(1).abs().max() < 1e-5  # the areas of closed surfaces cancel
    assert ((normal * (a + b + c)).sum((1, 2)) > 0).all()  # and they enclose a volume from outside


def test_pictures_are_those_of_a_ray_a_pixel(parts):
    shapes, render, _ = parts
    generator = torch.Generator().manual_seed(1)
    triangles, _ = shapes.meshes(1, generator)
    q = torch.nn.functional.normalize(torch.randn(len(triangles), 4, generator=generator), dim=-1)
    turn, size = render.matrix(q), 9
    drawn = render.render(triangles, turn, size, chunk=5)
    light = torch.nn.functional.normalize(torch.tensor(render.LIGHT), dim=0)
    for picture, some, rotation in zip(drawn, triangles, turn, strict=True):
        a, b, c = (some @ rotation.T).double().unbind(1)
        edges = torch.stack([b - a, c - a], 2)
        seen = edges[:, :2].det().abs() > 1e-9
        a, edges = a[seen], edges[seen]
        normal = torch.nn.functional.normalize(torch.linalg.cross(edges[..., 0], edges[..., 1]), dim=1)
        shade = 0.25 + 0.75 * (normal @ light.double()).clamp(min=0)
        for row in range(size):
            for column in range(size):
                point = torch.tensor([(column + 0.5) * 2 / size - 1, 1 - (row + 0.5) * 2 / size]).double()
                s, t = torch.linalg.solve(edges[:, :2], point - a[:, :2]).unbind(1)
                hit = (s >= 0) & (t >= 0) & (s + t <= 1)
                depth = torch.where(hit, a[:, 2] + s * edges[:, 2, 0] + t * edges[:, 2, 1], -torch.inf)
                expected = 255 * shade[depth.argmax()] if hit.any() else 0
                assert abs(picture[row, column] - expected) <= 1


def test_a_view_is_what_its_angles_say(parts):
    _, render, _ = parts
    up, front = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([1.0, 0.0, 0.0])

    def seen(azimuth, elevation, tilt):
        return render.view(*(torch.tensor(math.radians(a)) for a in (azimuth, elevation, tilt)))

    assert (seen(0, 0, 0) @ up).allclose(torch.tensor([0.0, 1.0, 0.0]), atol=1e-6)
    assert (seen(0, 0, 0) @ front).allclose(torch.tensor([1.0, 0.0, 0.0]), atol=1e-6)
    assert (seen(-90, 0, 0) @ front).allclose(torch.tensor([0.0, 0.0, 1.0]), atol=1e-6)  # towards the camera
    assert (seen(30, 90, 0) @ up).allclose(torch.tensor([0.0, 0.0, 1.0]), atol=1e-6)  # from above
    assert (seen(0, 0, 90) @ up).allclose(torch.tensor([-1.0, 0.0, 0.0]), atol=1e-6)


@pytest.mark.parametrize("task", ["rotations", "axes", "anywhere"])
def test_targets_lead_back_to_the_rotation(parts, task):
    _, _, run = parts
    some = run.pictures(task, 1, 4, 16, 0, "cpu")
    assert run.to_matrix(some.points.unbind(1)).allclose(some.rotation, atol=1e-5)


def test_heads_say_what_their_outputs_mean_and_lose_least_there(parts):
    _, _, run = parts
    for size, names in ((4, ["direct", "flat", "flat, either sign", "flat with signs"]), (2, ["direct", "flat"])):
        point = run.canonical_quaternion(torch.nn.functional.normalize(torch.randn(50, size), dim=-1))
        other = point.roll(1, 0)
        for name in names:
            head = (run.QUATERNIONS if size == 4 else run.ANGLES)[name](12 if "signs" in name else size)
            head.linear.weight.data, head.linear.bias.data = torch.eye(len(head.linear.bias)), head.linear.bias.data * 0
            signs = (
                torch.nn.functional.one_hot(run.sign_class(point, (1, 2, 3)), 8) if "signs" in name else point[:, :0]
            )
            features = torch.cat([point.abs() if "signs" in name else point, 9.0 * signs], 1)
            torch.testing.assert_close(head.predict(features), point)
            assert head.loss(features, point) < head.loss(features, other)


def test_two_columns_are_a_rotation(parts):
    _, render, run = parts
    q = torch.nn.functional.normalize(torch.randn(50, 4), dim=-1)
    head = run.TwoColumns(6)
    head.linear.weight.data, head.linear.bias.data = torch.eye(6), torch.zeros(6)
    turn = render.matrix(q)
    torch.testing.assert_close(head.predict(3 * turn[..., :2].mT.flatten(1)), turn)
    assert head.predict(torch.randn(50, 6)).det().allclose(torch.tensor(1.0))
    assert head.loss(turn[..., :2].mT.flatten(1), q) < 1e-6


def test_the_learning_rate_rises_once_and_falls_to_nothing(parts):
    _, _, run = parts
    rates = run.one_cycle(2.0, 101)
    assert rates[[0, 30, 100]].tolist() == pytest.approx([0.08, 2.0, 0.0], abs=1e-6)
    assert (rates[:31].diff() > 0).all()
    assert (rates[30:].diff() < 0).all()


def test_training_lowers_the_loss_of_the_pictures_that_were_written(parts, tmp_path):
    _, _, run = parts
    run.draw_all("axes", run.Scale(1, 16, 16, 1, 4), "cpu", tmp_path / "axes")
    some = run.load(tmp_path / "axes", "cpu")["train"]
    assert torch.equal(some.x, run.pictures("axes", 1, 16, 16, 0, "cpu").x)
    torch.manual_seed(0)
    net = run.Network(run.ANGLES["direct"], 3, 16, 4)
    before = net.loss(some.x, some.kind, some.points).item()
    run.fit(net, some, 3e-3, 20, torch.Generator().manual_seed(0))
    assert net.loss(some.x, some.kind, some.points).item() < 0.5 * before


def test_held_out_table_takes_the_best_rate_of_the_largest_scale(parts):
    _, _, run = parts
    scale = {"stage": "choice", "things": 2, "views": 2, "pixels": 16, "epochs": 1, "width": 4}
    rows = [
        scale | {"task": task, "method": "direct", "rate": rate, "median": median, "pi/6": 0.5}
        for task, rate, median in (("rotations", 1e-3, 9.0), ("rotations", 3e-3, 7.0), ("axes", 1e-3, 1.0))
    ]
    smaller = [row | {"things": 1, "median": 0.0} for row in rows]
    assert "| direct | 7.0, 50 %, 0.003 | 1.0, 50 %, 0.001 |  |" in run.held_out(rows + smaller)
    assert run.held_out([]) == "(not run)"


def test_the_best_of_the_rates_asked_for_is_measured(parts):
    _, _, run = parts
    scale = run.Scale(2, 2, 16, 1, 4)
    row = {"task": "axes", "method": "direct"} | scale._asdict()
    results = argparse.Namespace(rows=[row | {"stage": "choice", "seed": 1000, "rate": 1e-3, "median": 9.0}])
    results.missing = lambda **setting: not any(setting.items() <= r.items() for r in results.rows)
    arguments = argparse.Namespace(seeds=2, tasks=["axes"], rates=[1e-3])
    assert [rate for _, rate, _ in run.finals(results, arguments, scale)] == [1e-3, 1e-3]
    finals = [
        row | {"stage": "final", "seed": seed, "rate": rate, "median": 8.0} | dict.fromkeys(run.LIMITS, 0.5)
        for seed, rate in ((0, 1e-3), (1, 1e-3), (0, 1e-2), (1, 1e-2))
    ]
    results.rows += finals[:2]
    results.rows.append(row | {"stage": "choice", "seed": 1000, "rate": 1e-2, "median": 5.0})
    assert not list(run.finals(results, arguments, scale))
    arguments.rates = [1e-3, 1e-2]
    assert [rate for _, rate, _ in run.finals(results, arguments, scale)] == [1e-2, 1e-2]
    assert run.runs_of(finals[:3], "axes", "direct") == finals[:2]  # an interrupted run leaves few
    assert run.runs_of(finals, "axes", "direct") == finals[2:]  # the wider grid chose another rate
    assert "| direct | 8.00 ± 0.00 | 50.0 ± 0.0 | 50.0 ± 0.0 | 50.0 ± 0.0 | 0.001 |" in run.measured_table(
        finals[:3], "axes"
    )


def test_the_middle_pixel_has_the_shade_of_its_normal(parts, module):
    _, render, _ = parts
    normals = module("rotations.normals")
    some = normals.pictures(1, 3, 32, seed=4, device="cpu")
    assert (some.rotation[:, 2] < 0).all()  # away from the camera, as the head wants it
    torch.testing.assert_close(some.rotation.norm(dim=-1), torch.ones(36))
    light = torch.nn.functional.normalize(torch.tensor(render.LIGHT), dim=0)
    towards = some.rotation * torch.tensor([1.0, 1.0, -1.0])
    shade = 255 * (0.25 + 0.75 * (towards @ light).clamp(min=0))
    torch.testing.assert_close(some.x[:, 16, 16].float(), shade, atol=0.51, rtol=0)


def test_the_gradient_is_that_of_the_outputs_of_each_picture(parts):
    _, _, run = parts
    net = run.Network(lambda features: run.Direct(features, 2), 1, 16, 2)
    some = run.Pictures(torch.zeros(8, 16, 16, dtype=torch.uint8), torch.zeros(8, dtype=torch.int64), None, None)
    some = some._replace(points=torch.full((8, 1, 2), 9.0))
    [[mean, variance]] = run.fit(net, some, 1e-6, 1, torch.Generator().manual_seed(0), follow=True)
    assert mean == pytest.approx(math.sqrt(2), rel=1e-4)  # far off, the smooth L1 loss has a slope of 1 per coordinate
    assert variance == 0
