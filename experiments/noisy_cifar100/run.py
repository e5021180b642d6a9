"""Top-5 classification of CIFAR-100 with noisy labels (figure 4 of the LML paper; Berrada et al. 2018's protocol).

    python -m experiments.noisy_cifar100.run --data CIFAR [--noise blocks coarse] [--network resnet densenet]

Training labels are replaced, each with probability p, by a random one of five: the block of the published code
(label - label % 5 + 0..4) or the fine classes of the same coarse class, as the papers' texts say. Validation and test
labels are clean.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lastlayer as ll
from experiments import common

HERE = Path(__file__).parent
K = 5
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": F.cross_entropy,
    "smooth SVM": lambda x, y: ll.smooth_topk_svm_loss(x, y, K),
    "truncated entropy": lambda x, y: ll.truncated_entropy_loss(x, y, K),
    "LML": lambda x, y: ll.lml_loss(x, y, K),
    "two-way": lambda x, y: ll.two_way_loss(x, y),
}
PROBABILITIES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
MEAN, STD = (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)


def load(folder: Path) -> dict[str, np.ndarray]:
    """Read the official files: ``train``/``test`` of cifar-100-python converted to npz, or WebP sheets of 50 x 50."""
    npz = folder / "cifar100.npz"
    if npz.exists():
        with np.load(npz) as data:
            return dict(data)
    from PIL import Image

    labels = np.load(folder / "labels.npz")
    found: dict[str, np.ndarray] = {}
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


def tiny() -> dict[str, np.ndarray]:
    """Random images whose colour tells the class: enough to run every line."""
    rng = np.random.default_rng(0)
    fine = np.repeat(np.arange(100), 6)
    x = rng.integers(0, 60, (600, 32, 32, 3)) + (fine[:, None, None, None] % 7) * 25
    coarse = fine // 5
    data = {"x": x.astype(np.uint8), "fine": fine, "coarse": coarse}
    return {f"{split}_{name}": value for split in ("train", "test") for name, value in data.items()}


def noisy(fine: np.ndarray, coarse: np.ndarray, kind: str, p: float, seed: int) -> np.ndarray:
    """Replace labels with probability p by one of five; the draw may return the same label."""
    rng = np.random.default_rng(seed)
    hit = rng.random(len(fine)) < p
    slot = rng.integers(0, 5, len(fine))
    if kind == "blocks":
        drawn = fine - fine % 5 + slot
    else:
        members = np.stack([np.unique(fine[coarse == c]) for c in range(20)])
        drawn = members[coarse, slot]
    return np.where(hit, drawn, fine)


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


def resnet(width: int = 64) -> nn.Module:
    """A small residual network that trains in a few epochs."""
    w = width
    return nn.Sequential(
        convolution(3, w),
        convolution(w, 2 * w, pool=True),
        Residual(2 * w),
        convolution(2 * w, 4 * w, pool=True),
        convolution(4 * w, 6 * w, pool=True),
        Residual(6 * w),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(6 * w, 100),
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


def densenet(growth: int = 40, depth: int = 40) -> nn.Module:
    """DenseNet-BC 40-40, the published network: 1.94 million parameters."""
    layers: list[nn.Module] = [nn.Conv2d(3, 2 * growth, 3, padding=1, bias=False)]
    width = 2 * growth
    for block in range(3):
        for _ in range((depth - 4) // 6):
            layers.append(Dense(width, growth))
            width += growth
        if block < 2:
            layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width // 2, 1, bias=False), nn.AvgPool2d(2)]
            width //= 2
    return nn.Sequential(
        *layers, nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 100)
    )


def augmented(x: Tensor, generator: torch.Generator) -> Tensor:
    """A random crop of the image padded by 4, and a mirror image half of the time, on the device."""
    rows = x.shape[0]
    shift = torch.randint(0, 9, (2, rows), device=x.device, generator=generator)
    base = torch.arange(32, device=x.device)
    up, left = shift[0][:, None] + base, shift[1][:, None] + base
    flip = torch.rand(rows, device=x.device, generator=generator) < 0.5
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


def train(
    data: dict[str, Tensor], setting: dict[str, Any], epochs: int, batch: int, width: int, device: str
) -> dict[str, float]:
    """Train one network and return its clean validation and test accuracy at the last epoch."""
    torch.manual_seed(setting["seed"])
    generator = torch.Generator(device).manual_seed(setting["seed"])
    net = resnet(width) if setting["network"] == "resnet" else densenet()
    net = net.to(device, memory_format=torch.channels_last)
    x, y = data["train_x"], data["train_y"]
    steps = max(1, epochs * (len(x) // batch))
    peak = 0.4 if setting["network"] == "resnet" else 0.2
    optimiser = torch.optim.SGD(net.parameters(), lr=peak, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, peak, total_steps=steps + 1, pct_start=0.25)
    loss_of = LOSSES[setting["loss"]]
    half = torch.autocast(torch.device(device).type, torch.bfloat16)
    for step in range(steps):
        if step % (len(x) // batch) == 0:
            order = torch.randperm(len(x), device=device, generator=generator)
        at = order[(step * batch) % (len(x) // batch * batch) :][:batch]
        with half:
            logits = net(augmented(x[at], generator))
        loss = loss_of(logits.float(), y[at])
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        optimiser.step()
        schedule.step()
    found: dict[str, float] = {}
    net.eval()
    for split in ("valid", "test"):
        with torch.no_grad(), half:
            scores = torch.cat(
                [net(part.contiguous(memory_format=torch.channels_last)) for part in data[f"{split}_x"].split(2000)]
            ).float()
        hits = scores.topk(K, -1).indices == data[f"{split}_y"][:, None]
        found |= {
            f"{split}_top1": hits[:, 0].float().mean().item(),
            f"{split}_top5": hits.any(-1).float().mean().item(),
        }
    return found


def prepared(raw: dict[str, np.ndarray], setting: dict[str, Any], held_out: int, device: str) -> dict[str, Tensor]:
    """Normalise, split off the clean validation rows (the same for all seeds), and add the noise."""
    order = np.random.default_rng(1234).permutation(len(raw["train_x"]))
    valid, train_rows = order[:held_out], order[held_out:]
    mean, std = (torch.tensor(v, device=device).view(3, 1, 1) for v in (MEAN, STD))

    def images(x: np.ndarray) -> Tensor:
        return (torch.as_tensor(x, device=device).permute(0, 3, 1, 2).float() - mean) / std

    labels = noisy(
        raw["train_fine"][train_rows].astype(int),
        raw["train_coarse"][train_rows].astype(int),
        setting["noise"],
        setting["p"],
        setting["seed"],
    )
    return {
        "train_x": images(raw["train_x"][train_rows]).to(torch.bfloat16),
        "train_y": torch.as_tensor(labels, device=device),
        "valid_x": images(raw["train_x"][valid]),
        "valid_y": torch.as_tensor(raw["train_fine"][valid].astype(int), device=device),
        "test_x": images(raw["test_x"]),
        "test_y": torch.as_tensor(raw["test_fine"].astype(int), device=device),
    }


def tables(rows: list[common.Row]) -> dict[str, str]:
    found = {}
    for network in dict.fromkeys(row["network"] for row in rows):
        for noise in ("blocks", "coarse"):
            part = [row for row in rows if row["network"] == network and row["noise"] in (noise, "none")]
            for value in ("test_top5", "test_top1"):
                found[f"{network} {noise} {value}"] = common.table(part, "loss", "p", value)
    return found


def grid(arguments: Any) -> list[dict[str, Any]]:
    settings = []
    for seed in range(arguments.seeds):
        for network in arguments.network:
            for p in arguments.p:
                for noise in ["none"] if p == 0 else arguments.noise:
                    settings += [
                        {"network": network, "noise": noise, "p": p, "loss": loss, "seed": seed}
                        for loss in arguments.losses
                    ]
    return settings


def work(queue: Any, answers: Any, raw: dict[str, np.ndarray], arguments: Any) -> None:
    """Take settings from the queue until it is empty; an error goes back as text."""
    ready: dict[tuple[Any, ...], dict[str, Tensor]] = {}
    while (setting := queue.get()) is not None:
        try:
            key = (setting["noise"], setting["p"], setting["seed"])
            if key not in ready:
                ready = {key: prepared(raw, setting, arguments.held_out, arguments.device)}
            start = time.time()
            found = train(ready[key], setting, arguments.epochs, arguments.batch, arguments.width, arguments.device)
            answers.put(setting | {"epochs": arguments.epochs, "seconds": round(time.time() - start, 2)} | found)
        except Exception:
            answers.put(f"{setting}: {traceback.format_exc()}")
            return


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__, HERE / "results" / "results.json")
    parser.add_argument("--network", nargs="+", default=["resnet"], choices=["resnet", "densenet"])
    parser.add_argument("--noise", nargs="+", default=["blocks", "coarse"], choices=["blocks", "coarse"])
    parser.add_argument("--losses", nargs="+", default=list(LOSSES), choices=list(LOSSES))
    parser.add_argument("--p", nargs="+", type=float, default=list(PROBABILITIES))
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--workers", type=int, default=1, help="networks trained at the same time")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no network after this time")
    parser.add_argument("--held-out", type=int, default=5000)
    arguments = parser.parse_args(argv)
    if common.finish(arguments, tables):
        return
    if arguments.smoke:
        arguments.epochs, arguments.batch, arguments.width, arguments.held_out, arguments.seeds = 1, 64, 4, 100, 1
        arguments.p, arguments.noise = [0.0, 0.4], ["blocks", "coarse"]
    elif arguments.data is None:
        parser.error("--data is needed: the folder of CIFAR-100 (or --smoke)")
    raw = tiny() if arguments.smoke else load(arguments.data)
    results = common.Results(arguments.out)
    settings = [s for s in grid(arguments) if results.missing(**s)]
    if torch.device(arguments.device).type == "cuda":
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.matmul.allow_tf32 = True
    run(settings, raw, arguments, results)


def run(settings: list[dict[str, Any]], raw: dict[str, np.ndarray], arguments: Any, results: common.Results) -> None:
    """Run the settings, in this process or over several that share the device."""
    end = time.time() + 60 * arguments.minutes
    if arguments.workers == 1:
        from queue import Queue

        for number, setting in enumerate(settings, start=1):
            if time.time() > end:
                return
            queue: Any = Queue()
            answers: Any = Queue()
            queue.put(setting)
            queue.put(None)
            work(queue, answers, raw, arguments)
            report(number, len(settings), results, answers.get())
        return
    context = multiprocessing.get_context("spawn")
    queue, answers = context.Queue(), context.Queue()
    workers = [
        context.Process(target=work, args=(queue, answers, raw, arguments), daemon=True)
        for _ in range(arguments.workers)
    ]
    for worker in workers:
        worker.start()
    waiting, started = list(reversed(settings)), 0
    for _ in range(min(arguments.workers, len(waiting))):
        queue.put(waiting.pop())
        started += 1
    finished = 0
    while finished < started:
        report(finished + 1, len(settings), results, answers.get())
        finished += 1
        if waiting and time.time() < end:
            queue.put(waiting.pop())
            started += 1
    for _ in workers:
        queue.put(None)
    for worker in workers:
        worker.join()


def report(number: int, total: int, results: common.Results, row: dict[str, Any] | str) -> None:
    if isinstance(row, str):
        raise SystemExit(row)
    results.add(**row)
    settings = [row[name] for name in ("network", "noise", "p", "loss", "seed", "seconds")]
    print(f"{number}/{total}", *settings, f"top-5 {row['test_top5']:.4f}", flush=True)


if __name__ == "__main__":
    main()
