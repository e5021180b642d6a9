"""CIFAR-100 for several experiments: the images, three networks, one way to train, several at once on a device.

The third network is a layer on features of the images that another network, trained elsewhere, has left: it trains on
a CPU.
"""

from __future__ import annotations

import multiprocessing
import queue as queues
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments import common
from experiments.tabular import Recorded

MEAN, STD = (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)
PEAK = {"resnet": 0.4, "densenet": 0.2, "features": 0.4}  # largest learning rate

Arrays = dict[str, np.ndarray]
Tensors = dict[str, Tensor]
Setting = dict[str, Any]
Train = Callable[[Setting, Tensors, Any], common.Row]  # setting, data, arguments -> what was measured
Wanted = Callable[[Sequence[common.Row]], list[Setting]]  # the rows so far -> settings to train, in order


def load(folder: Path) -> Arrays:
    """Read the official files: ``train``/``test`` of cifar-100-python converted to npz, or WebP sheets of 50 x 50."""
    npz = folder / "cifar100.npz"
    if npz.exists():
        with np.load(npz) as data:
            return dict(data)
    from PIL import Image

    labels = np.load(folder / "labels.npz")
    found: Arrays = {}
    for split in ("train", "test"):
        fine = labels[f"{split}_fine"]
        by_class = [np.flatnonzero(fine == c) for c in range(100)]
        images, order = [], []
        for path in sorted(folder.glob(f"{split}_*.webp")):
            sheet = int(path.stem.split("_")[1])
            tiles = np.asarray(Image.open(path).convert("RGB")).reshape(50, 32, 50, 32, 3)
            images.append(tiles.transpose(0, 2, 1, 3, 4).reshape(2500, 32, 32, 3))
            order.append(np.concatenate([rows[25 * sheet : 25 * sheet + 25] for rows in by_class]))
        if not images:
            raise SystemExit(f"{folder} holds neither cifar100.npz nor {split}_*.webp; see the README.")
        place = np.concatenate(order)
        back = np.argsort(place)
        found[f"{split}_x"] = np.concatenate(images)[back]
        found[f"{split}_fine"] = fine[place[back]]
        found[f"{split}_coarse"] = labels[f"{split}_coarse"][place[back]]
    return found


def load_features(path: Path) -> Arrays:
    """Read features as ``round(24 * v) + 128`` (``train``, ``test``), with ``labels.npz`` beside them."""
    with np.load(path, allow_pickle=False) as data, np.load(path.parent / "labels.npz", allow_pickle=False) as labels:
        found = {f"{split}_x": (data[split].astype(np.float32) - 128) / 24 for split in ("train", "test")}
        return found | {name: labels[name] for name in labels.files}


def tiny() -> Arrays:
    """Random images whose colour tells the class: enough to run every line."""
    rng = np.random.default_rng(0)
    fine = np.repeat(np.arange(100), 6)
    x = rng.integers(0, 60, (600, 32, 32, 3)) + (fine[:, None, None, None] % 7) * 25
    coarse = fine // 5
    data: Arrays = {"x": x.astype(np.uint8), "fine": fine, "coarse": coarse}
    return {f"{split}_{name}": value for split in ("train", "test") for name, value in data.items()}


def prepared(raw: Arrays, held_out: int, device: str) -> Tensors:
    """Normalise the images, if they are images, and split off the validation rows, the same for all seeds.

    The keys are ``x``, ``fine`` and ``coarse`` after ``train_``, ``valid_`` and ``test_``.
    """
    order = np.random.default_rng(1234).permutation(len(raw["train_x"]))
    valid, train = order[:held_out], order[held_out:]
    mean, std = (torch.tensor(v, device=device).view(3, 1, 1) for v in (MEAN, STD))
    found: Tensors = {}
    for split, source, rows in (("train", "train", train), ("valid", "train", valid), ("test", "test", slice(None))):
        x = torch.as_tensor(raw[f"{source}_x"][rows], device=device)
        if x.ndim == 4:
            x = (x.permute(0, 3, 1, 2).float() - mean) / std
            x = x.to(torch.bfloat16) if split == "train" else x
        found[f"{split}_x"] = x
        for name in ("fine", "coarse"):
            found[f"{split}_{name}"] = torch.as_tensor(raw[f"{source}_{name}"][rows].astype(int), device=device)
    return found


class Residual(nn.Module):
    """Two convolutions and a short cut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(convolution(width, width), convolution(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def convolution(inner: int, outer: int, pool: bool = False) -> nn.Sequential:
    layers = [nn.Conv2d(inner, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer), nn.GELU()]
    return nn.Sequential(*layers[:1], *([nn.MaxPool2d(2)] if pool else []), *layers[1:])


class Largest(nn.Module):
    """The largest value of each channel: ``AdaptiveMaxPool2d(1)``, whose kernel is slow for small images."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).max(-1).values


class Mean(nn.Module):
    """The mean of each channel."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).mean(-1)


def resnet(width: int = 64, pool: str = "max") -> nn.Sequential:
    """A small residual network that trains in a few epochs: ``6 * width`` features.

    It has 4.2 million parameters with a width of 64, and 1.1 million with 32.
    """
    w = width
    return nn.Sequential(
        convolution(3, w),
        convolution(w, 2 * w, pool=True),
        Residual(2 * w),
        convolution(2 * w, 4 * w, pool=True),
        convolution(4 * w, 6 * w, pool=True),
        Residual(6 * w),
        Largest() if pool == "max" else Mean(),
    )


class Dense(nn.Module):
    """A bottleneck layer of DenseNet: its output joins its input."""

    def __init__(self, inner: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.Conv2d(inner, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth),
            nn.ReLU(),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], 1)


def densenet(growth: int = 40, depth: int = 40) -> nn.Sequential:
    """DenseNet-BC: with growth and depth 40, as published, 440 features and 1.94 million parameters."""
    layers: list[nn.Module] = [nn.Conv2d(3, 2 * growth, 3, padding=1, bias=False)]
    width = 2 * growth
    for block in range(3):
        for _ in range((depth - 4) // 6):
            layers.append(Dense(width, growth))
            width += growth
        if block < 2:
            layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width // 2, 1, bias=False), nn.AvgPool2d(2)]
            width //= 2
    return nn.Sequential(*layers, nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def on_features(width: int, inner: int = 256) -> nn.Sequential:
    """One layer on features that are there already: ``8 * width`` numbers."""
    return nn.Sequential(nn.Linear(inner, 8 * width, bias=False), nn.BatchNorm1d(8 * width), nn.GELU())


def network(name: str, width: int, pool: str = "max") -> tuple[nn.Sequential, int]:
    """Return a network without its last layer, and the number of its features."""
    if name == "features":
        return on_features(width), 8 * width
    return (resnet(width, pool), 6 * width) if name == "resnet" else (densenet(), 440)


def half(x: Tensor) -> torch.autocast:
    """Compute on images in bfloat16, on features in float32."""
    return torch.autocast(x.device.type, torch.bfloat16, enabled=x.ndim == 4)


def randomly_augmented(x: Tensor, generator: torch.Generator) -> Tensor:
    """A random crop of the image padded by 4, and a mirror image half of the time."""
    shift = torch.randint(0, 9, (2, len(x)), device=x.device, generator=generator)
    return augmented(x, shift, torch.rand(len(x), device=x.device, generator=generator) < 0.5)


def augmented(x: Tensor, shift: Tensor, flip: Tensor) -> Tensor:
    """Crop images padded by 4 at `shift` (2 x rows, 0 to 8) and mirror those of `flip`; features stay as they are."""
    if x.ndim == 2:
        return x
    rows = x.shape[0]
    base = torch.arange(32, device=x.device)
    up, left = shift[0][:, None] + base, shift[1][:, None] + base
    left = torch.where(flip[:, None], left.flip(-1), left)
    padded = F.pad(x, (4, 4, 4, 4))
    channel = torch.arange(3, device=x.device)
    picked = padded[
        torch.arange(rows, device=x.device)[:, None, None, None],
        channel[:, None, None],
        up[:, None, :, None],
        left[:, None, None, :],
    ]
    return picked.contiguous(memory_format=torch.channels_last)


def one_cycle(peak: float, steps: int) -> Tensor:
    """Return the learning rate and the momentum of each step of one cycle."""
    sgd = torch.optim.SGD([torch.zeros(1)], lr=peak, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(sgd, peak, total_steps=steps + 1, pct_start=0.25)
    found = []
    for _ in range(steps):
        found.append([sgd.param_groups[0]["lr"], sgd.param_groups[0]["momentum"]])
        sgd.step()
        schedule.step()
    return torch.tensor(found)


def fit(
    objective: Callable[[Tensor, Tensor], Tensor],
    parameters: Iterable[Any],
    x: Tensor,
    y: Tensor,
    *,
    peak: float,
    epochs: int,
    batch: int,
    seed: int,
    decay: float = 5e-4,
    after: Callable[[int], None] | None = None,
) -> None:
    """Lower ``objective(images, target)`` by SGD with one cycle of the learning rate, over augmented images.

    On a GPU the step is recorded once and replayed. `after` is called with the number of each step.
    """
    groups = [g if isinstance(g, dict) else {"params": [g]} for g in parameters]
    values = [p for group in groups for p in group["params"]]
    decays = [float(group.get("weight_decay", decay)) for group in groups for _ in group["params"]]
    momenta = [torch.zeros_like(p) for p in values]
    batch = min(batch, len(x))
    per_epoch = len(x) // batch
    control = one_cycle(peak, epochs * per_epoch).to(x.device)
    now = control[0].clone()
    rows = torch.zeros(batch, dtype=torch.long, device=x.device)
    shift, flip = torch.zeros(2, batch, dtype=torch.long, device=x.device), torch.zeros_like(rows, dtype=torch.bool)

    def update(_: float) -> None:
        loss = objective(augmented(x[rows], shift, flip), y[rows])
        grads = torch.autograd.grad(loss, values, allow_unused=True)
        with torch.no_grad():
            move(values, list(grads), momenta, decays, now)

    recorded = Recorded(update, x.device)
    generator = torch.Generator(x.device).manual_seed(seed)
    draw: dict[str, Any] = {"device": x.device, "generator": generator}
    for step in range(epochs * per_epoch):
        place = step % per_epoch
        if place == 0:
            order = torch.randperm(len(x), **draw)[: per_epoch * batch].view(per_epoch, batch)
            shifts = torch.randint(0, 9, (per_epoch, 2, batch), **draw)
            flips = torch.rand(per_epoch, batch, **draw) < 0.5
        for held, drawn in ((rows, order), (shift, shifts), (flip, flips)):
            held.copy_(drawn[place])
        now.copy_(control[step])
        recorded(0.0)
        if after is not None:
            after(step)


def move(
    values: Sequence[Tensor], grads: Sequence[Tensor | None], momenta: Sequence[Tensor], decays: Sequence[float],
    now: Tensor,
) -> None:  # fmt: skip
    """Take a step of SGD with Nesterov's momentum; the gradient is clipped to a norm of 5, before weight decay."""
    some = [i for i, grad in enumerate(grads) if grad is not None]
    found = [grads[i] for i in some]
    norm = torch.stack(torch._foreach_norm(found)).norm()
    torch._foreach_mul_(found, (5.0 / (norm + 1e-6)).clamp(max=1.0))
    places, moving = [values[i] for i in some], [momenta[i] for i in some]
    torch._foreach_add_(found, torch._foreach_mul(places, [decays[i] for i in some]))
    torch._foreach_mul_(moving, now[1])
    torch._foreach_add_(moving, found)
    step = torch._foreach_mul(moving, now[1])
    torch._foreach_add_(step, found)
    torch._foreach_mul_(step, -now[0])
    torch._foreach_add_(places, step)


@torch.no_grad()
def outputs(net: nn.Module, x: Tensor) -> Tensor:
    """What a network in evaluation mode says of images, in float32."""
    net.eval()
    with half(x):
        parts = [net(part.to(memory_format=torch.channels_last) if x.ndim == 4 else part) for part in x.split(2000)]
    return torch.cat(parts).float()


def add_arguments(parser: Any, networks: tuple[str, ...] = ("resnet", "features")) -> None:
    """The arguments of a run that trains on CIFAR-100."""
    parser.add_argument("--network", default="resnet", choices=networks, help="features: --data is a file of features")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--width", type=int, default=64, help="channels of the first layer, an eighth of a hidden one")
    parser.add_argument("--workers", type=int, default=1, help="networks trained at the same time")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no network after this time")
    parser.add_argument("--held-out", type=int, default=5000)


def shrink(arguments: Any) -> None:
    """Make a run one of seconds."""
    arguments.epochs, arguments.batch, arguments.width, arguments.held_out, arguments.seeds = 1, 64, 4, 100, 1


def run(wanted: Wanted | list[Setting], train: Train, arguments: Any, results: common.Results) -> None:
    """Train a network for each setting, in this process or in several that share the device, and keep the results.

    `wanted` may depend on the rows so far: settings that are there, running or failed are passed over.
    """
    settings = wanted if callable(wanted) else lambda rows: wanted
    if next_of(settings, results, []) is None:
        return
    if not arguments.smoke and arguments.data is None:
        raise SystemExit("--data is needed: the folder of CIFAR-100, or a file of features (or --smoke)")
    end = time.time() + 60 * arguments.minutes
    raw = tiny() if arguments.smoke else (load if arguments.data.is_dir() else load_features)(arguments.data)
    if arguments.workers > 1:
        _run_workers(settings, train, arguments, results, raw, end)
        return
    ready = _ready(raw, arguments)
    while time.time() < end and (setting := next_of(settings, results, [])) is not None:
        _report(results, _row(setting, train, ready, arguments))


def next_of(wanted: Wanted, results: common.Results, started: list[Setting]) -> Setting | None:
    """Return the first setting that has no row and was not started."""
    for setting in wanted(results.rows):
        if setting not in started and results.missing(**setting):
            return setting
    return None


def _run_workers(
    wanted: Wanted, train: Train, arguments: Any, results: common.Results, raw: Arrays, end: float
) -> None:
    context = multiprocessing.get_context("spawn")
    queue, answers = context.Queue(), context.Queue()
    workers = [
        context.Process(target=_work, args=(queue, answers, train, raw, arguments), daemon=True)
        for _ in range(arguments.workers)
    ]
    for worker in workers:
        worker.start()
    started: list[Setting] = []
    running, failed = 0, 0
    while True:
        alive = sum(worker.is_alive() for worker in workers)
        while running < alive and time.time() < end and (setting := next_of(wanted, results, started)) is not None:
            started.append(setting)
            queue.put(setting)
            running += 1
        if not running or not alive:
            break
        try:
            answer = answers.get(timeout=5)
        except queues.Empty:
            if sum(worker.is_alive() for worker in workers) < alive:
                running -= 1  # a process died without a word
            continue
        running -= 1
        if isinstance(answer, str):
            print(answer, flush=True)
            failed += 1
            continue
        _report(results, answer)
    for _ in workers:
        queue.put(None)
    for worker in workers:
        worker.join(timeout=10)
    if failed:
        raise SystemExit(f"{failed} settings failed.")


def _work(queue: Any, answers: Any, train: Train, raw: Arrays, arguments: Any) -> None:
    """Take settings until there are no more; an error goes back as text."""
    torch.set_num_threads(1)
    ready = _ready(raw, arguments)
    while (setting := queue.get()) is not None:
        try:
            answers.put(_row(setting, train, ready, arguments))
        except Exception:
            answers.put(f"{setting}: {traceback.format_exc()}")


def _ready(raw: Arrays, arguments: Any) -> Tensors:
    if torch.device(arguments.device).type == "cuda":
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.matmul.allow_tf32 = True
    return prepared(raw, arguments.held_out, arguments.device)


def _row(setting: dict[str, Any], train: Train, ready: Tensors, arguments: Any) -> common.Row:
    torch.manual_seed(setting["seed"])
    start = time.time()
    found = train(setting, ready, arguments)
    if torch.device(arguments.device).type == "cuda":
        torch.cuda.empty_cache()  # what a recorded step held, for the processes beside this one
    return {"epochs": arguments.epochs} | setting | {"seconds": round(time.time() - start, 2)} | found


def _report(results: common.Results, row: common.Row) -> None:
    results.add(**row)
    print(f"{len(results.rows)} rows:", *row.values(), flush=True)
