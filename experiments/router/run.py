"""Mixtures of experts in a byte-level language model: four ways to choose the experts.

    python -m experiments.router.run --data FOLDER [--workers 2]
    python -m experiments.router.run --alone      # step times, with nothing else on the GPU

Learning rate and strength (of the auxiliary loss, of the bias step; the temperature of LML) are chosen per method by
short runs on validation text, the strength with 16 experts only.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments import common
from experiments.router import texts
from experiments.router.model import ByteModel, Experts, Router

HERE = Path(__file__).parent
STRENGTHS = {  # the first is that of the grid of rates
    "softmax": (0.01, 0.003, 0.03),
    "sigmoid": (0.01, 0.003, 0.03),
    "lml": (0.5, 0.25, 1.0),
    "balanced lml": (0.25, 1.0),
}
NAMES = {
    "softmax": "softmax, auxiliary loss",
    "sigmoid": "sigmoid, bias updates",
    "lml": "LML",
    "balanced lml": "balanced LML",
}
RATES = (7e-4, 1.5e-3, 3e-3)
SIZES = {16: {"k": 2, "inner": 512}, 64: {"k": 4, "inner": 256}}  # the same work per token
WARM_UP = 0.05  # of the steps
TIMED = {"warm": 5, "steps": 20}
Setting = dict[str, Any]

_parts: dict[tuple[Any, ...], texts.Parts] = {}


def parts_of(arguments: Any) -> texts.Parts:
    """Return the texts on the device, read once per process."""
    key = (arguments.data, arguments.smoke, arguments.device)
    if key not in _parts:
        torch.set_num_threads(1)
        if arguments.data is None and not arguments.smoke:
            raise SystemExit("--data is needed: the folder with debian_tags/debian_bookworm.jsonl.xz (or --smoke)")
        found = texts.tiny() if arguments.smoke else texts.read(arguments.data)
        _parts[key] = {part: text.to(arguments.device) for part, text in found.items()}
    return _parts[key]


def model_of(setting: Setting, arguments: Any) -> ByteModel:
    size = SIZES[setting["experts"]]
    inner = size["inner"] * arguments.features // 256
    feeds: list[Any] = [
        Experts(setting["method"], arguments.features, inner, setting["experts"], size["k"], setting["strength"])
        for _ in range(arguments.layers)
    ]
    return ByteModel(feeds, arguments.features, arguments.heads, arguments.length).to(arguments.device)


def half(device: str) -> Any:
    return torch.autocast(device, torch.bfloat16) if device != "cpu" else nullcontext()


def loss_of(net: ByteModel, text: Tensor, following: Tensor) -> Tensor:
    with half(text.device.type):
        logits = net(text)
    return F.cross_entropy(logits.float().flatten(0, 1), following.flatten())


class Training:
    """A network and its optimiser; `step` takes one step."""

    def __init__(self, net: ByteModel, rate: float, steps: int) -> None:
        self.net, self.steps, self.taken = net, steps, 0
        decayed = [p for p in net.parameters() if p.ndim > 1]
        others = [p for p in net.parameters() if p.ndim == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        fused = decayed[0].is_cuda
        self.optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=fused)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate)

    def _rate(self, step: int) -> float:
        warm = max(1, round(WARM_UP * self.steps))
        if step < warm:
            return (step + 1) / warm
        return 0.5 + 0.5 * math.cos(math.pi * (step - warm) / max(1, self.steps - warm))

    def step(self, text: Tensor, following: Tensor) -> Tensor:
        loss = loss_of(self.net, text, following)
        mixtures = self.net.mixtures
        total = loss + sum(m.extra for m in mixtures) / len(mixtures) if mixtures else loss
        self.optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        return loss.detach()


def train(setting: Setting, arguments: Any) -> common.Row:
    """Train one network; return its setting and what it reached."""
    start = time.time()
    parts = parts_of(arguments)
    torch.manual_seed(setting["seed"])
    net = model_of(setting, arguments)
    training = Training(net, setting["rate"], setting["steps"])
    generator = torch.Generator(arguments.device).manual_seed(1000 + setting["seed"])
    load, dropped = [], []
    for _ in range(setting["steps"]):
        training.step(*texts.crops(parts["train"], arguments.batch, arguments.length, generator))
        load.append(torch.stack([m.load for m in net.mixtures]).mean())
        dropped.append(torch.stack([m.dropped for m in net.mixtures]).mean())
    late = max(1, setting["steps"] // 10)
    found = {
        "train_load": rounded(torch.stack(load[-late:]).mean()),
        "train_dropped": rounded(torch.stack(dropped).mean()),
        "valid": evaluated(net, parts["valid"], arguments, 1.25)["bits"],
    }
    if setting["part"] == "final":
        found |= {f"test_{name}": value for name, value in evaluated(net, parts["test"], arguments, 1.25).items()}
        found["test_bits_whole"] = evaluated(net, parts["test"], arguments, None)["bits"]
    if arguments.device == "cuda":
        del net, training
        torch.cuda.empty_cache()
    return setting | {"seconds": round(time.time() - start, 1)} | found


def rounded(x: Tensor | float, digits: int = 5) -> float:
    return round(float(x), digits)


@torch.no_grad()
def evaluated(net: ByteModel, text: Tensor, arguments: Any, capacity: float | None) -> dict[str, Any]:
    """Return bits per byte, loads and the share of dropped choices, batch by batch without a look at the rest."""
    net.eval()
    for mixture in net.mixtures:
        mixture.capacity = capacity
    bits, load, dropped, shares = [], [], [], []
    for piece in texts.pieces(text, arguments.batch // 2, arguments.length, arguments.tested):
        bits.append(loss_of(net, *piece) / math.log(2))
        load.append(torch.stack([m.load for m in net.mixtures]))
        dropped.append(torch.stack([m.dropped for m in net.mixtures]))
        shares.append(torch.stack([m.counts / m.counts.mean() for m in net.mixtures]))
    net.train()
    for mixture in net.mixtures:
        mixture.capacity = 1.25
    sorted_ = torch.stack(shares).mean(0).sort(-1, descending=True).values.mean(0)
    return {
        "bits": rounded(torch.stack(bits).mean()),
        "load": rounded(torch.stack(load).mean()),
        "dropped": rounded(torch.stack(dropped).mean()),
        "loads": [rounded(share, 3) for share in sorted_],
    }


def grid(rows: Sequence[common.Row], experts: int, method: str) -> list[common.Row]:
    return [r for r in rows if r["part"] == "grid" and r["experts"] == experts and r["method"] == method]


def best(rows: Sequence[common.Row], experts: int, method: str) -> dict[str, float]:
    """Return rate and strength of the short run with the best validation loss."""
    found = min(grid(rows, experts, method), key=lambda row: row["valid"])
    return {"rate": found["rate"], "strength": found["strength"]}


def stages(results: common.Results, arguments: Any) -> Iterator[list[tuple[Setting, Any]]]:
    """Yield rates, strengths at the best rate, then all seeds with the best of both; each where it is missing.

    More experts take over the strength of the first number of them.
    """

    def open_(settings: list[Setting]) -> list[tuple[Setting, Any]]:
        return [(setting, arguments) for setting in settings if results.missing(**setting)]

    def short(experts: int, method: str, rate: float, strength: float) -> Setting:
        found = {"part": "grid", "experts": experts, "method": method, "rate": rate, "strength": strength}
        return found | {"seed": 0, "steps": arguments.short}

    few, *more = arguments.experts

    def rates(experts: int) -> list[Setting]:
        found = []
        for m in arguments.methods:
            strength = STRENGTHS[m][0] if experts == few else best(results.rows, few, m)["strength"]
            found += [short(experts, m, rate, strength) for rate in arguments.rates]
        return found

    def strengths(experts: int) -> list[Setting]:
        found = []
        for m in arguments.methods:
            rate = best([r for r in results.rows if r.get("strength") == STRENGTHS[m][0]], experts, m)["rate"]
            found += [short(experts, m, rate, strength) for strength in STRENGTHS[m][1:]]
        return found

    def final(experts: int) -> list[Setting]:
        return [
            {"part": "final", "experts": experts, "method": m}
            | best(results.rows, experts, m)
            | {"seed": seed, "steps": arguments.steps}
            for seed in range(arguments.seeds)
            for m in arguments.methods
        ]

    yield open_(rates(few))
    yield open_(strengths(few))
    yield open_(final(few) + [setting for n in more for setting in rates(n)])
    yield open_([setting for n in more for setting in final(n)])


def step_times(results: common.Results, arguments: Any) -> None:
    """Measure a step of training, and the router's part of it, one method after another and alone."""
    text = texts.tiny()["train"].to(arguments.device)
    for experts in arguments.experts:
        for method in arguments.methods:
            setting = {"part": "time", "experts": experts, "method": method}
            if not results.missing(**setting):
                continue
            net = model_of(setting | {"strength": STRENGTHS[method][0]}, arguments)
            training = Training(net, 1e-3, 100)
            generator = torch.Generator(arguments.device).manual_seed(0)

            def whole(training: Training = training, generator: torch.Generator = generator) -> None:
                training.step(*texts.crops(text, arguments.batch, arguments.length, generator))

            router = net.mixtures[0].router
            x = torch.randn(arguments.batch * arguments.length, arguments.features, device=arguments.device)

            def routing(router: Router = router, x: Tensor = x) -> None:
                _, weight, extra = router(x)
                (weight[:, 0].sum() + extra).backward()

            step, route = seconds(whole, arguments.device), seconds(routing, arguments.device)
            results.add(**setting, step_ms=round(1e3 * step, 3), route_ms=round(1e3 * route, 3))
            print(results.rows[-1], flush=True)


def seconds(call: Any, device: str) -> float:
    """Return the mean time of a call, after some that are not counted."""

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    for _ in range(TIMED["warm"]):
        call()
    wait()
    start = time.perf_counter()
    for _ in range(TIMED["steps"]):
        call()
    wait()
    return (time.perf_counter() - start) / TIMED["steps"]


COLUMNS = {
    "bits per byte": "test_bits",
    "nothing dropped": "test_bits_whole",
    "load": "test_load",
    "dropped, %": "test_dropped",
    "load in training": "train_load",
    "dropped in training, %": "train_dropped",
}


SHORT = {
    "bits per byte, validation": "valid",
    "load in training": "train_load",
    "dropped in training, %": "train_dropped",
    "rate": "rate",
    "strength": "strength",
}


def tables(rows: Sequence[common.Row]) -> dict[str, str]:
    found = {}
    for experts in SIZES:
        final = [r for r in rows if r["part"] == "final" and r["experts"] == experts]
        final.sort(key=lambda row: list(NAMES).index(row["method"]))
        long = [
            {"router": NAMES[r["method"]], "value": name, "number": r[of] * (100 if "%" in name else 1)}
            for name, of in COLUMNS.items()
            for r in final
        ]
        found[f"final {experts}"] = (
            common.table(long, "router", "value", "number", scale=1, digits=3) if long else "(not run)"
        )
        short = [r for r in rows if r["part"] == "grid" and r["experts"] == experts]
        short.sort(
            key=lambda r: (list(NAMES).index(r["method"]), STRENGTHS[r["method"]].index(r["strength"]), r["rate"])
        )
        short = [r | {"router": f"{NAMES[r['method']]}, {r['strength']:g}"} for r in short]
        found[f"grid {experts}"] = (
            common.table(short, "router", "rate", "valid", scale=1, digits=3) if short else "(not run)"
        )
        chosen = [min(grid(rows, experts, m), key=lambda r: r["valid"]) for m in NAMES if grid(rows, experts, m)]
        long = [
            {"router": NAMES[r["method"]], "value": name, "number": r[of] * (100 if "%" in name else 1)}
            for name, of in SHORT.items()
            for r in chosen
        ]
        found[f"short {experts}"] = (
            common.table(long, "router", "value", "number", scale=1, digits=3) if long else "(not run)"
        )
    timed = [r | {"router": NAMES[r["method"]]} for r in rows if r["part"] == "time"]
    long = [
        {"router": r["router"], "value": f"{name}, {r['experts']} experts", "number": r[of]}
        for experts in SIZES
        for name, of in {"step": "step_ms", "one router": "route_ms"}.items()
        for r in timed
        if r["experts"] == experts
    ]
    found["time"] = common.table(long, "router", "value", "number", scale=1, digits=2) if long else "(not run)"
    return found


def draw(rows: Sequence[common.Row], path: Path) -> None:
    """Draw how evenly the experts are used: their loads in order, mean of layers and seeds."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(SIZES), figsize=(8, 3.2), sharey=True)
    for axis, experts in zip(axes, SIZES, strict=True):
        for method, name in NAMES.items():
            loads = [
                r["test_loads"]
                for r in rows
                if r["part"] == "final" and r["experts"] == experts and r["method"] == method
            ]
            if loads:
                mean = torch.tensor(loads).mean(0).clamp_min(1e-2)
                axis.plot(range(1, experts + 1), mean, label=name, marker=".", markersize=4)
        axis.axhline(1.25, color="grey", linewidth=0.8, linestyle=":")
        axis.set_yscale("log")
        axis.set_xlabel(f"experts by load, {experts} in all")
    axes[0].set_ylabel("load / mean load")
    axes[0].legend(frameon=False, fontsize=8)
    common.save(figure, path)


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__, HERE / "results" / "results.json")
    parser.add_argument("--methods", nargs="+", default=list(NAMES), choices=list(NAMES))
    parser.add_argument("--experts", nargs="+", type=int, default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--short", type=int, default=150, help="steps of the runs that choose rate and strength")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--features", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--tested", type=int, default=60, help="batches of validation and test text, at most")
    parser.add_argument("--workers", type=int, default=1, help="networks trained at the same time")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no network after this time")
    parser.add_argument("--alone", action="store_true", help="only measure the time of a step")
    parser.add_argument("--figure", type=Path, help="only draw the loads of the results into this file")
    arguments = parser.parse_args(argv)
    if common.finish(arguments, tables, draw):
        return
    results = common.Results(arguments.out)
    end = time.monotonic() + 60 * arguments.minutes
    if arguments.smoke:
        arguments.steps, arguments.short, arguments.batch, arguments.length = 3, 2, 4, 32
        arguments.features, arguments.layers, arguments.heads, arguments.tested = 16, 1, 2, 2
        arguments.rates, arguments.seeds, arguments.experts = [1e-3], 1, [16]
        TIMED.update(warm=1, steps=1)
        step_times(results, arguments)
    if arguments.alone:
        step_times(results, arguments)
        return
    context = multiprocessing.get_context("spawn")
    several = ProcessPoolExecutor(arguments.workers, mp_context=context) if arguments.workers > 1 else nullcontext()
    with several as pool:
        for jobs in stages(results, arguments):
            common.run_all(train, jobs, results, pool, end)
            if time.monotonic() > end:
                break


if __name__ == "__main__":
    main()
