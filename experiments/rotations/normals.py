"""Surface normals, points of the sphere S2, and how the gradient varies during the training (thesis, figure 3.4).

    python -m experiments.rotations.normals [--seeds 3] [--device cuda]

A picture is centred on one of its visible pixels, and the network regresses the normal of the surface there. Things,
pictures, network and protocol are those of `experiments.rotations.run`: the learning rate of each method is chosen on
things held out, then each seed is measured once on pictures of other things.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lastlayer as ll
from experiments import common
from experiments.rotations import run, shapes
from experiments.rotations.render import matrix, normals, render
from experiments.rotations.run import Pictures

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "normals.json"
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
LIMITS = (11.25, 22.5, 30.0)
METHODS: dict[str, run.Head] = {
    "direct": lambda features: run.Direct(features, 3),
    "flat": lambda features: run.Flat(features, 3),
    "flat with signs": lambda features: run.FlatSigns(features, 3),
    "spherical exponential": lambda features: ll.head.SphericalHead(features, 2),
    "spherical exponential, not turned": lambda features: ll.head.SphericalHead(features, 2, rotate=False),
}
FOLLOWED = ("direct", "flat", "spherical exponential")  # the gradients of these are followed on rotations too


def centred(x: Tensor, up: Tensor, left: Tensor) -> Tensor:
    """Shift each picture so that its pixel (up, left) comes to the middle; black comes in from outside."""
    size = x.shape[-1]
    padded = F.pad(x, (size // 2,) * 4)
    base = torch.arange(size, device=x.device)
    rows, columns = up[:, None] + base, left[:, None] + base
    return padded[torch.arange(len(x), device=x.device)[:, None, None], rows[:, :, None], columns[:, None, :]]


def pictures(things: int, views: int, pixels: int, seed: int, device: str) -> Pictures:
    """Make things of every kind, turn them at random, and centre each picture on a random visible pixel."""
    generator = torch.Generator().manual_seed(seed)
    triangles, kind = shapes.meshes(things, generator)
    n = len(kind) * views
    turns = matrix(F.normalize(torch.randn(n, 4, generator=generator), dim=-1))
    draw = torch.rand(n, pixels * pixels, generator=generator)
    of = torch.arange(len(kind)).repeat_interleave(views)
    found = []
    for some, turn, chance in zip(of.split(2048), turns.split(2048), draw.split(2048), strict=True):
        mesh, turn, chance = triangles[some].to(device), turn.to(device), chance.to(device)
        chunk = 512 if torch.device(device).type == "cuda" else 32
        x, normal = render(mesh, turn, pixels, chunk), normals(mesh, turn, pixels, chunk).flatten(1, 2)
        at = torch.where(normal.square().sum(-1) > 0, chance, -1).argmax(-1)
        target = normal[torch.arange(len(at), device=device), at] * normal.new_tensor([1.0, 1.0, -1.0])
        found.append((centred(x, at // pixels, at % pixels), target))
    x, target = (torch.cat(parts) for parts in zip(*found, strict=True))
    return Pictures(x, kind.to(device)[of.to(device)], target.unsqueeze(1), target)


@torch.no_grad()
def measured(net: run.Network, some: Pictures) -> common.Row:
    """The median and mean angle in degrees, and the shares within three angles."""
    net.eval()
    parts = zip(some.x.split(2000), some.kind.split(2000), strict=True)
    point = torch.cat([net.heads[0].predict(net(x, kind)) for x, kind in parts])  # type: ignore[operator]
    angle = torch.rad2deg(ll.angular_error(point, some.rotation, reduction="none"))
    shares = {f"{limit:g}": round((angle < limit).float().mean().item(), 5) for limit in LIMITS}
    return {"median": round(angle.median().item(), 3), "mean": round(angle.mean().item(), 3), **shares}


def train(
    task: str, method: str, rate: float, seed: int, parts: dict[str, Pictures], part: str, scale: run.Scale
) -> common.Row:
    """Train one network, follow its gradient, and measure it."""
    start, some = time.monotonic(), parts["train"]
    torch.manual_seed(seed)
    head = METHODS[method] if task == "normals" else run.TASKS[task][method]
    net = run.Network(head, some.points.shape[1], scale.pixels, scale.width).to(some.x.device)
    net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    curve = run.fit(net, some, rate, scale.epochs, torch.Generator(some.x.device).manual_seed(seed), follow=True)
    found = measured(net, parts[part]) if task == "normals" else run.measured(net, parts[part])
    setting = {"task": task, "method": method, "rate": rate, "seed": seed, "part": part} | scale._asdict()
    rounded = [[float(f"{v:.4g}") for v in pair] for pair in curve]
    return setting | found | {"gradient": rounded, "seconds": round(time.monotonic() - start, 2)}


def best_rate(rows: Sequence[common.Row], method: str) -> float:
    """Return the rate with the least median error on the things held out."""
    tried = [row for row in rows if (row["task"], row["part"], row["method"]) == ("normals", "valid", method)]
    return float(min(tried, key=lambda row: row["median"])["rate"])


def chosen(rows: Sequence[common.Row], task: str, method: str) -> list[common.Row]:
    """The rows of the test, all with one rate."""
    return run.runs_of([row for row in rows if row["part"] == "test"], task, method)


def scales(rows: Sequence[common.Row]) -> list[list[common.Row]]:
    """The rows of each scale, that with the fewest epochs first."""
    found: dict[tuple[int, ...], list[common.Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in ("epochs", *run.Scale._fields)), []).append(row)
    return [found[scale] for scale in sorted(found)]


def tables(rows: Sequence[common.Row]) -> dict[str, str]:
    """Errors for the shortest and the longest training, and the gradients of the shortest."""
    short, *longer = scales(rows)
    made = {"normals": errors(short), "gradients": gradients(short)}
    made["normals scale"] = "".join(run.described(row) for row in short[:1])
    return made | ({"normals longer": errors(longer[-1])} if longer else {})


def errors(rows: Sequence[common.Row]) -> str:
    """Median and mean angle, and the shares within three angles, of each method."""
    limits = [f"{limit:g}" for limit in LIMITS]
    lines = ["| method | median, degrees | mean | " + " | ".join(f"within {v}" for v in limits) + " | rate |"]
    lines.append("| --- " * (len(limits) + 4) + "|")
    for method in METHODS:
        runs = chosen(rows, "normals", method)
        if runs:
            angles = " | ".join(run.cell([row[name] for row in runs], 2) for name in ("median", "mean"))
            shares = " | ".join(run.cell([100 * row[name] for row in runs], 1) for name in limits)
            lines.append(f"| {method} | {angles} | {shares} | {runs[0]['rate']:g} |")
    return "\n".join(lines)


def gradients(rows: Sequence[common.Row]) -> str:
    """Length of the gradient in the last epoch, and how it varies over the batches."""
    lines = ["| task | method | mean length | variance over batches | variance / mean² |", "| --- " * 5 + "|"]
    for task, methods in (("normals", METHODS), ("rotations", FOLLOWED)):
        for method in methods:
            runs = [row["gradient"][-1] for row in chosen(rows, task, method)]
            if runs:
                mean, variance = (statistics.fmean(pair[i] for pair in runs) for i in (0, 1))
                numbers = f"{mean:.3g} | {variance:.2e} | {variance / mean**2:.2e}"
                lines.append(f"| {task} | {method} | {numbers} |")
    return "\n".join(lines)


def draw(rows: Sequence[common.Row], path: Path) -> None:
    """The variance of the length of the gradient, divided by the square of its mean, against the epoch."""
    import matplotlib.pyplot as plt

    rows = scales(rows)[0]
    drawn, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axis, (task, title) in zip(axes, (("normals", "surface normals"), ("rotations", "any rotation")), strict=True):
        for place, method in enumerate(METHODS):
            runs = [row["gradient"] for row in chosen(rows, task, method)]
            for number, curve in enumerate(runs):
                axis.plot(
                    range(1, len(curve) + 1), [v / m**2 for m, v in curve], color=plt.get_cmap("tab10")(place),
                    linewidth=1.2, label=method if number == 0 else None,
                )  # fmt: skip
        axis.set_yscale("log")
        axis.set(title=title, xlabel="epoch", ylabel="variance / mean² of the gradient's length")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    common.save(drawn, path)


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__, RESULTS)
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES), help="learning rates to choose from")
    parser.add_argument("--things", type=int, default=40, help="things of each of the twelve kinds, for training")
    parser.add_argument("--views", type=int, default=50, help="pictures of each of them")
    parser.add_argument("--pixels", type=int, default=48)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--minutes", type=float, default=1e6, help="start no network after this time")
    parser.add_argument("--figure", type=Path, help="only draw the figure from the results, to this file")
    arguments = parser.parse_args(argv)
    results = common.Results(arguments.out)
    if arguments.figure:
        draw(results.rows, arguments.figure)
        return
    scale = run.Scale(arguments.things, arguments.views, arguments.pixels, arguments.epochs, arguments.width)
    if arguments.smoke:
        scale, arguments.seeds, arguments.rates = run.Scale(1, 8, 16, 1, 2), 1, [1e-3]
    torch.backends.cudnn.benchmark = True
    end = time.monotonic() + 60 * arguments.minutes
    few, views = max(1, scale.things // 4), max(1, scale.views // 4)
    sizes = {"train": (scale.things, scale.views), "valid": (few, views), "test": (2 * few, views)}
    parts = {name: pictures(*size, scale.pixels, s, arguments.device) for s, (name, size) in enumerate(sizes.items())}

    def add(task: str, method: str, rate: float, seed: int, part: str, from_: dict[str, Pictures]) -> None:
        setting = {"task": task, "method": method, "rate": rate, "seed": seed, "part": part} | scale._asdict()
        missing = results.missing(**setting)
        if missing and time.monotonic() < end:
            results.add(**train(task, method, rate, seed, from_, part, scale))
            print(*list(results.rows[-1].values())[:14], flush=True)

    for method in METHODS:
        for rate in arguments.rates:
            add("normals", method, rate, 1000, "valid", parts)
    if time.monotonic() > end:  # some rates are missing: nothing can be chosen
        return
    for seed in range(arguments.seeds):
        for method in METHODS:
            rows = [row for row in results.rows if scale._asdict().items() <= row.items()]
            add("normals", method, best_rate(rows, method), seed, "test", parts)
    sizes = {part: size for part, size in sizes.items() if part != "valid"}
    parts = {
        name: run.pictures("rotations", *size, scale.pixels, s, arguments.device)
        for s, (name, size) in enumerate(sizes.items())
    }
    done: list[Any] = common.Results(run.HERE / "results" / "results.json").rows
    for seed in range(arguments.seeds):
        for method in FOLLOWED:
            large = [r for r in done if (r["task"], r["method"], r["stage"]) == ("rotations", method, "final")]
            rate = max(large, key=lambda r: r["things"] * r["views"])["rate"] if large else arguments.rates[0]
            add("rotations", method, rate, seed, "test", parts)


if __name__ == "__main__":
    main()
