"""Regression of viewpoints from pictures of made-up things: direct, on the sphere, by the spherical exponential.

    python -m experiments.rotations.run [--seeds 3] [--workers 1] [--tasks rotations axes anywhere]

After chapter 3 of Liao's thesis (Liao, Gavves and Snoek, 2019). Nothing is downloaded: meshes, views and pictures are
made from a seed. For each task and method the learning rate is chosen on held-out things (one run per rate), then the
network is trained with each seed and measured once, on pictures of other things.
"""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lastlayer as ll
from experiments import common, tabular
from experiments.rotations import shapes
from experiments.rotations.render import matrix, render, view
from lastlayer.head.sphere import canonical_quaternion
from lastlayer.loss.sphere import sign_class, signs_of

HERE = Path(__file__).parent
LIMITS = {"pi/6": math.pi / 6, "pi/12": math.pi / 12, "pi/24": math.pi / 24}
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
BATCH, HIDDEN = 256, 256


class Scale(NamedTuple):
    """How large a run is: things of a kind for training, views of each, pixels, epochs, channels."""

    things: int
    views: int
    pixels: int
    epochs: int
    width: int


class Pictures(NamedTuple):
    """Pictures ``(n, size, size)`` as bytes, the kinds of things, points to regress and true rotations."""

    x: Tensor
    kind: Tensor
    points: Tensor  # (n, m, d): m points of a sphere in d dimensions
    rotation: Tensor


class Direct(nn.Module):
    """Regression of the coordinates themselves; the prediction is brought to the sphere afterwards."""

    def __init__(self, features: int, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, size)

    def loss(self, features: Tensor, target: Tensor) -> Tensor:
        return F.smooth_l1_loss(self.linear(features), target, reduction="none").sum(-1).mean()

    def predict(self, features: Tensor) -> Tensor:
        return F.normalize(self.linear(features), dim=-1)


class Flat(Direct):
    """The output divided by its length, and the cosine."""

    def loss(self, features: Tensor, target: Tensor) -> Tensor:
        return -(self.predict(features) * target).sum(-1).mean()


class FlatEither(Flat):
    """The same, where a point and its opposite are the same rotation."""

    def loss(self, features: Tensor, target: Tensor) -> Tensor:
        return -(self.predict(features) * target).sum(-1).abs().mean()


class FlatSigns(nn.Module):
    """Magnitudes of a flat output and a class of signs: the spherical exponential without the exponential."""

    def __init__(self, features: int, size: int) -> None:
        super().__init__()
        self.signed = range(1 if size == 4 else 0, size)  # the real part of a quaternion is positive
        self.size = size
        self.linear = nn.Linear(features, size + 2 ** len(self.signed))

    def loss(self, features: Tensor, target: Tensor) -> Tensor:
        out = self.linear(features)
        magnitude = F.normalize(out[..., : self.size].abs(), dim=-1)
        return -(magnitude * target.abs()).sum(-1).mean() + F.cross_entropy(
            out[..., self.size :], sign_class(target, self.signed)
        )

    def predict(self, features: Tensor) -> Tensor:
        out = self.linear(features)
        magnitude = F.normalize(out[..., : self.size].abs(), dim=-1)
        return magnitude * signs_of(out[..., self.size :].argmax(-1), self.signed, magnitude)


class TwoColumns(nn.Module):
    """Two columns of the matrix, made orthogonal (Zhou et al., 2019), and the squared distance of matrices."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, 6)

    def loss(self, features: Tensor, target: Tensor) -> Tensor:
        return (self.predict(features) - matrix(target)).square().sum((-1, -2)).mean()

    def predict(self, features: Tensor) -> Tensor:
        a, b = self.linear(features).chunk(2, -1)
        a = F.normalize(a, dim=-1)
        b = F.normalize(b - (a * b).sum(-1, keepdim=True) * a, dim=-1)
        return torch.stack([a, b, torch.linalg.cross(a, b)], -1)


Head = Callable[[int], nn.Module]  # features -> a module with `loss` and `predict`

QUATERNIONS: dict[str, Head] = {
    "direct": lambda features: Direct(features, 4),
    "flat": lambda features: Flat(features, 4),
    "flat, either sign": lambda features: FlatEither(features, 4),
    "flat with signs": lambda features: FlatSigns(features, 4),
    "spherical exponential": lambda features: ll.SphericalHead(features, 3),
    "two columns (6D)": TwoColumns,
}
ANGLES: dict[str, Head] = {
    "direct": lambda features: Direct(features, 2),
    "flat": lambda features: Flat(features, 2),
    "flat with signs": lambda features: FlatSigns(features, 2),
    "spherical exponential": lambda features: ll.SphericalHead(features, 1),
    "spherical exponential, not turned": lambda features: ll.SphericalHead(features, 1, rotate=False),
}
TASKS = {"rotations": QUATERNIONS, "axes": ANGLES, "anywhere": ANGLES}
NAMES = {"rotations": "any rotation", "axes": "angles near the axes", "anywhere": "angles anywhere"}


def angles(task: str, n: int, generator: torch.Generator) -> Tensor:
    """Azimuth, elevation and tilt ``(n, 3)``: as people take photographs, near the axes; or anywhere."""
    uniform, normal = torch.rand(n, 3, generator=generator), torch.randn(n, 3, generator=generator)
    around = 2 * math.pi * uniform[:, 0]
    if task == "anywhere":
        return torch.stack([around, (2 * uniform[:, 1] - 1) * math.pi / 3, (2 * uniform[:, 2] - 1) * math.pi / 3], 1)
    quarter = (around / (math.pi / 2)).floor() * (math.pi / 2)
    return torch.stack([quarter, torch.zeros(n), torch.zeros(n)], 1) + normal * math.radians(8)


def to_matrix(points: Sequence[Tensor]) -> Tensor:
    """The rotations of predictions: a quaternion, a matrix, or the three angles as points of the circle."""
    if len(points) == 3:
        return view(*(torch.atan2(p[..., 1], p[..., 0]) for p in points))
    return points[0] if points[0].shape[-2:] == (3, 3) else matrix(points[0])


def pictures(task: str, things: int, views: int, pixels: int, seed: int, device: str) -> Pictures:
    """Make things of every kind, draw views at random, and take the pictures."""
    generator = torch.Generator().manual_seed(seed)
    triangles, kind = shapes.meshes(things, generator)
    n = len(kind) * views
    if task == "rotations":
        q = F.normalize(torch.randn(n, 4, generator=generator), dim=-1)
        points, rotation = canonical_quaternion(q).unsqueeze(1), matrix(q)
    else:
        angle = angles(task, n, generator)
        points, rotation = torch.stack([angle.cos(), angle.sin()], -1), view(*angle.T)
    of = torch.arange(len(kind)).repeat_interleave(views).to(device)
    rotation, triangles = rotation.to(device), triangles.to(device)
    chunk = 512 if torch.device(device).type == "cuda" else 32
    parts = zip(of.split(4096), rotation.split(4096), strict=True)
    x = torch.cat([render(triangles[some], turn, pixels, chunk) for some, turn in parts])
    return Pictures(x, kind.to(device)[of], points.to(device), rotation)


def draw_all(task: str, scale: Scale, device: str, file: Path) -> None:
    """Write pictures for training, of other things held out, and of others still for the test, for all processes."""
    few, views = max(1, scale.things // 4), max(1, scale.views // 4)
    sizes = {"train": (scale.things, scale.views), "valid": (few, views), "test": (2 * few, views)}
    drawn = {part: pictures(task, *size, scale.pixels, seed, device) for seed, (part, size) in enumerate(sizes.items())}
    torch.save({part: some._asdict() for part, some in drawn.items()}, file)


@functools.lru_cache(maxsize=3)
def load(file: Path, device: str) -> dict[str, Pictures]:
    """What `draw_all` wrote, read once by each process."""
    found = torch.load(file, map_location=device, weights_only=True)
    return {part: Pictures(**some) for part, some in found.items()}


class Network(nn.Module):
    """Four convolutions and a hidden layer that is told the kind of the thing; a head for each point.

    The first convolution sees squares of 2 x 2 pixels as four channels; the maximum of 2 x 2 follows the other three.
    """

    def __init__(self, head: Head, heads: int, pixels: int, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.PixelUnshuffle(2)]
        inner = 4
        for outer in (width, 2 * width, 4 * width, 8 * width):
            layers += [nn.Conv2d(inner, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer)]
            layers += [nn.ReLU()] if outer == width else [nn.MaxPool2d(2), nn.ReLU()]
            inner = outer
        self.body = nn.Sequential(*layers, nn.Flatten())
        self.hidden = nn.Linear(inner * (pixels // 16) ** 2 + len(shapes.KINDS), HIDDEN)
        self.heads = nn.ModuleList(head(HIDDEN) for _ in range(heads))
        self.kinds: Tensor
        self.register_buffer("kinds", torch.arange(len(shapes.KINDS)))

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        x = x.unsqueeze(1).float() / 255 - 0.2
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            seen = self.body(x)
            told = torch.eq(kind.unsqueeze(-1), self.kinds).to(seen.dtype)
            hidden = F.relu(self.hidden(torch.cat([seen, told], -1)))
        return hidden.float()

    def loss(self, x: Tensor, kind: Tensor, points: Tensor) -> Tensor:
        hidden = self(x, kind)
        parts = [head.loss(hidden, points[:, i]) for i, head in enumerate(self.heads)]  # type: ignore[operator]
        return torch.stack(parts).sum()

    @torch.no_grad()
    def rotations(self, x: Tensor, kind: Tensor) -> Tensor:
        self.eval()
        found = []
        for some, told in zip(x.split(2000), kind.split(2000), strict=True):
            hidden = self(some, told)
            found.append(to_matrix([head.predict(hidden) for head in self.heads]))  # type: ignore[operator]
        return torch.cat(found)


def measured(net: Network, some: Pictures) -> common.Row:
    """The median angle in degrees and the shares within three angles."""
    found = net.rotations(some.x, some.kind)
    angle, median = (ll.rotation_error(found, some.rotation, reduction=r) for r in ("none", "median"))
    shares = {name: round((angle < limit).float().mean().item(), 5) for name, limit in LIMITS.items()}
    return {"median": round(math.degrees(median.item()), 3), **shares}


def one_cycle(rate: float, steps: int) -> Tensor:
    """Learning rates that rise from 4 % to `rate` over three tenths of the steps and fall to 0, as cosines."""
    at = torch.arange(steps) / max(steps - 1, 1)
    rise = 0.5 - 0.5 * (math.pi * (at / 0.3).clamp(max=1)).cos()
    fall = 0.5 + 0.5 * (math.pi * ((at - 0.3) / 0.7).clamp(min=0)).cos()
    return rate * (0.04 + 0.96 * rise) * fall


def fit(
    net: Network, some: Pictures, rate: float, epochs: int, generator: torch.Generator, follow: bool = False
) -> list[list[float]]:
    """Train with AdamW and one cycle of the learning rate; on a GPU the step is recorded once and replayed.

    With `follow`, return for each epoch mean and variance, over its batches, of the mean length of the gradient with
    respect to what the last layer puts out for a picture.
    """
    device, batch = some.x.device, min(BATCH, len(some.x))
    steps = len(some.x) // batch
    rates = one_cycle(rate, epochs * steps).to(device)
    rows, now = torch.zeros(batch, dtype=torch.int64, device=device), rates[0].clone()
    values = list(net.parameters())
    optimiser = torch.optim.AdamW(values, lr=now, weight_decay=0.01, fused=True, capturable=device.type == "cuda")

    outs: list[Tensor] = []
    length, lengths, curve = torch.zeros((), device=device), [], []
    hooks = [head.linear.register_forward_hook(lambda _, __, out: outs.append(out)) for head in net.heads if follow]

    def update(_: float) -> None:
        outs.clear()
        loss = net.loss(some.x[rows], some.kind[rows], some.points[rows])
        grads = torch.autograd.grad(loss, [*values, *outs])
        for value, grad in zip(values, grads, strict=False):
            value.grad = grad
        if follow:
            length.copy_(batch * torch.cat(grads[len(values) :], -1).norm(dim=-1).mean())
        optimiser.step()

    step = tabular.Recorded(update, device)
    for epoch in range(epochs):
        order = torch.randperm(len(some.x), device=device, generator=generator)
        for i in range(steps):
            rows.copy_(order[i * batch : (i + 1) * batch])
            now.copy_(rates[epoch * steps + i])
            step(0.0)
            if follow:
                lengths.append(length.clone())
        if follow:
            of_epoch = torch.stack(lengths[-steps:])
            curve.append([of_epoch.mean().item(), of_epoch.var(unbiased=False).item()])
    for hook in hooks:
        hook.remove()
    return curve


def train(setting: common.Row, rate: float, scale: Scale, folder: Path, device: str) -> common.Row:
    """Train one network and measure it at the last epoch."""
    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = True
    start, parts = time.monotonic(), load(folder / setting["task"], device)
    torch.manual_seed(setting["seed"])
    head = TASKS[setting["task"]][setting["method"]]
    net = Network(head, parts["train"].points.shape[1], scale.pixels, scale.width).to(device)
    net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    fit(net, parts["train"], rate, scale.epochs, torch.Generator(device).manual_seed(setting["seed"]))
    found = measured(net, parts["valid" if setting["stage"] == "choice" else "test"])
    return setting | {"rate": rate} | found | {"seconds": round(time.monotonic() - start, 2)}


Job = tuple[common.Row, float, Scale]


def choices(results: common.Results, arguments: Any, scale: Scale) -> Iterator[Job]:
    """The runs, still missing, that choose the learning rate of each task and method."""
    for task in arguments.tasks:
        for method in TASKS[task]:
            setting = {"task": task, "method": method, "seed": 1000, "stage": "choice"} | scale._asdict()
            for rate in arguments.rates:
                if results.missing(**setting, rate=rate):
                    yield setting, rate, scale


def finals(results: common.Results, arguments: Any, scale: Scale) -> Iterator[Job]:
    """The runs, still missing, that are measured on the test pictures, one seed after the other."""
    for seed in range(arguments.seeds):
        for task in arguments.tasks:
            for method in TASKS[task]:
                cell = {"task": task, "method": method} | scale._asdict()
                setting = cell | {"seed": seed, "stage": "final"}
                best = chosen([row for row in results.rows if row["rate"] in arguments.rates], cell)
                if best is not None and results.missing(**setting, rate=best["rate"]):
                    yield setting, best["rate"], scale


def chosen(rows: Sequence[common.Row], cell: common.Row) -> common.Row | None:
    """The run with the learning rate that did best on the things held out, of a task, method and scale."""
    tried = [row for row in rows if (cell | {"stage": "choice"}).items() <= row.items()]
    return min(tried, key=lambda row: row["median"], default=None)


def finished(rows: Sequence[common.Row]) -> list[list[common.Row]]:
    """The measured runs of each scale, the largest first."""
    rows = [row for row in rows if row["stage"] == "final"]
    scales = sorted({tuple(row[name] for name in Scale._fields) for row in rows}, reverse=True)
    return [[row for row in rows if tuple(row[name] for name in Scale._fields) == scale] for scale in scales]


def cell(values: Sequence[float], digits: int) -> str:
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"


def described(row: common.Row) -> str:
    things, side = len(shapes.KINDS) * row["things"], row["pixels"]
    return (
        f"{things:,} things for training, {row['views']} views of each, {side} x {side} pixels, "
        f"{row['epochs']} epochs, {row['width']} to {8 * row['width']} channels."
    )


def held_out(rows: Sequence[common.Row]) -> str:
    """The best rate of each method on the things held out, of the largest scale that chose rates."""
    rows = [row for row in rows if row["stage"] == "choice"]
    if not rows:
        return "(not run)"
    scale = Scale(*max(tuple(row[name] for name in Scale._fields) for row in rows))._asdict()
    lines = [f"| method | {' | '.join(NAMES[task] for task in TASKS)} |", "| --- " * (1 + len(TASKS)) + "|"]
    for method in QUATERNIONS | ANGLES:
        found = [chosen(rows, scale | {"task": task, "method": method}) for task in TASKS]
        cells = [f"{b['median']:.1f}, {100 * b['pi/6']:.0f} %, {b['rate']:g}" if b else "" for b in found]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def runs_of(rows: Sequence[common.Row], task: str, method: str) -> list[common.Row]:
    """The measured runs of a task and method, with the learning rate that most of them have; of two, the later one.

    A wider grid may choose another rate; its runs count once there are as many as before.
    """
    runs = [row for row in rows if row["task"] == task and row["method"] == method]
    rate = statistics.mode(row["rate"] for row in reversed(runs)) if runs else None
    return [row for row in runs if row["rate"] == rate]


def measured_table(rows: Sequence[common.Row], task: str) -> str:
    """Mean and spread of each method over the seeds."""
    lines = ["| method | median, degrees | " + " | ".join(LIMITS) + " | rate |", "| --- " * 6 + "|"]
    for method in TASKS[task]:
        runs = runs_of(rows, task, method)
        if runs:
            shares = " | ".join(cell([100 * row[name] for row in runs], 1) for name in LIMITS)
            median = cell([row["median"] for row in runs], 2)
            lines.append(f"| {method} | {median} | {shares} | {runs[0]['rate']:g} |")
    return "\n".join(lines) if len(lines) > 2 else "(not run)"


def tables(rows: Sequence[common.Row]) -> dict[str, str]:
    from experiments.rotations import normals  # which imports this file

    found = {"held out": held_out(rows)}
    if normals.RESULTS.exists():
        found |= normals.tables(common.Results(normals.RESULTS).rows)
    large, small, *_ = *finished(rows), [], []
    for name, some in (("", large), ("small ", small)):
        found |= {f"{name}{task}": measured_table(some, task) for task in TASKS if task != "rotations" or not name}
        found[f"{name}scale"] = "".join(described(row) for row in some[:1]) or "(not run)"
    shown = "![Shares within an angle, for each method and task](figures/rotations.svg)"
    found["figure"] = shown if large else "(not run)"
    return found


def draw(rows: Sequence[common.Row], folder: Path) -> None:
    """The share of pictures within an angle for each method, one panel per task; and what the pictures look like."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = next(iter(finished(rows)), [])
    figure, panels = plt.subplots(1, len(TASKS), figsize=(10, 3.4), sharey=True)
    for axes, (task, methods) in zip(panels, TASKS.items(), strict=True):
        for place, method in enumerate(QUATERNIONS | ANGLES):
            runs = runs_of(rows, task, method)
            if method not in methods or not runs:
                continue
            x = [math.degrees(limit) for limit in LIMITS.values()]
            y = [[100 * row[name] for row in runs] for name in LIMITS]
            spread = [statistics.stdev(v) if len(v) > 1 else 0.0 for v in y]
            colour = plt.get_cmap("tab10")(place)
            axes.errorbar(
                x, [statistics.fmean(v) for v in y], spread, marker="o", capsize=3, color=colour, label=method
            )
        axes.set(title=NAMES[task], xlabel="within, degrees", xticks=[7.5, 15, 30])
        axes.spines[["top", "right"]].set_visible(False)
        if axes.lines:
            axes.legend(fontsize=7)
    panels[0].set_ylabel("% of test pictures")
    common.save(figure, folder / "rotations.svg")
    sample = pictures("rotations", 1, 2, 64, 5, "cpu").x.view(12, 2, 64, 64)
    sheet = sample.permute(1, 2, 0, 3).reshape(128, 12 * 64)
    folder.mkdir(parents=True, exist_ok=True)
    plt.imsave(folder / "pictures.png", sheet.numpy(), cmap="gray")


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__, HERE / "results" / "results.json")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES), help="learning rates to choose from")
    parser.add_argument("--things", type=int, default=40, help="things of each of the twelve kinds, for training")
    parser.add_argument("--views", type=int, default=150, help="pictures of each of them")
    parser.add_argument("--pixels", type=int, default=48)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--width", type=int, default=32, help="channels of the first convolution")
    parser.add_argument("--workers", type=int, default=1, help="networks trained at the same time")
    parser.add_argument("--minutes", type=float, default=1e6, help="start no network after this time")
    arguments = parser.parse_args(argv)
    if common.finish(arguments, tables):
        if arguments.readme:
            draw(common.Results(arguments.out).rows, arguments.readme.parent / "figures")
        return
    scale = Scale(arguments.things, arguments.views, arguments.pixels, arguments.epochs, arguments.width)
    if arguments.smoke:
        scale = Scale(1, 8, 16, 1, 2)
        arguments.seeds, arguments.rates, arguments.workers = 1, [1e-3], 1
    results = common.Results(arguments.out)
    end = time.monotonic() + 60 * arguments.minutes
    pool = ProcessPoolExecutor(arguments.workers, multiprocessing.get_context("spawn"))
    with tempfile.TemporaryDirectory() as name, pool if arguments.workers > 1 else contextlib.nullcontext() as several:
        folder = Path(name)
        for stage in (choices, finals):
            jobs = list(stage(results, arguments, scale))
            for task in {job[0]["task"] for job in jobs}:
                if not (folder / task).exists():
                    draw_all(task, scale, arguments.device, folder / task)
            if time.monotonic() < end:
                run = [(*job, folder, arguments.device) for job in jobs]
                common.run_all(train, run, results, several, end)


if __name__ == "__main__":
    main()
