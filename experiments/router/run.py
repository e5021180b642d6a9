"""Mixtures of experts in a byte-level language model: four ways to choose the experts.

    python -m experiments.router.run --data FOLDER [--workers 2]
    python -m experiments.router.run --data FOLDER --steps 1000 --neighbours --experts 64 --methods softmax
    python -m experiments.router.run --alone      # step times, with nothing else on the GPU

Learning rate and strength (of the auxiliary loss, of the bias step; the temperature of LML) are chosen per method by
short runs on validation text: from the best so far to its neighbours, until none is better. With ``--neighbours`` the
strengths next to the chosen one are trained to the end too.
"""

from __future__ import annotations

import math
import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor

from experiments import common
from experiments.router import texts
from experiments.router.model import ByteModel, Experts, Router

HERE = Path(__file__).parent
STRENGTHS = {
    "softmax": (0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
    "sigmoid": (0.001, 0.003, 0.01, 0.03),
    "lml": (0.25, 0.5, 1.0),
    "balanced lml": (0.25, 0.5, 1.0),
}
FIRST = {"softmax": 0.01, "sigmoid": 0.01, "lml": 0.5, "balanced lml": 0.25}  # the strength at which the search begins
NAMES = {
    "softmax": "softmax, auxiliary loss",
    "sigmoid": "sigmoid, bias updates",
    "lml": "LML",
    "balanced lml": "balanced LML",
}
RATES = (7e-4, 1.5e-3, 3e-3, 6e-3, 1e-2)
SIZES = {16: {"k": 2, "inner": 512}, 64: {"k": 4, "inner": 256}}  # the same work per token
WARM_UP = 0.05  # of the steps
CHECKED = 25  # steps between two looks at the time and at the loss
TWENTY = 20  # parts of a run whose mean training loss is kept
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
    limit = arguments.limit if setting["part"] == "grid" else math.inf
    load, dropped, losses = [], [], []
    for taken in range(1, setting["steps"] + 1):
        loss = training.step(*texts.crops(parts["train"], arguments.batch, arguments.length, generator))
        load.append(torch.stack([m.load for m in net.mixtures]).mean())
        dropped.append(torch.stack([m.dropped for m in net.mixtures]).mean())
        losses.append(loss / math.log(2))
        if taken % CHECKED == 0 and (not loss.isfinite() or time.time() - start > limit):
            break
    late = max(1, taken // 10)
    found = {
        "taken": taken,
        "train_load": rounded(torch.stack(load[-late:]).mean()),
        "train_dropped": rounded(torch.stack(dropped).mean()),
        "valid": evaluated(net, parts["valid"], arguments, 1.25)["bits"],
    }
    if setting["part"] == "final":
        found |= {f"test_{name}": value for name, value in evaluated(net, parts["test"], arguments, 1.25).items()}
        found["test_bits_whole"] = evaluated(net, parts["test"], arguments, None)["bits"]
        pieces = torch.stack(losses).split(max(1, taken // TWENTY))
        found["train_bits"] = [rounded(piece.mean(), 4) for piece in pieces]
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


def validation(row: common.Row) -> float:
    """Return the validation loss of a run, infinite where training diverged or was too slow to end."""
    ended = row.get("taken", row["steps"]) == row["steps"] and math.isfinite(row["valid"])
    return row["valid"] if ended else math.inf


def best(rows: Sequence[common.Row], experts: int, method: str) -> dict[str, float]:
    """Return rate and strength of the short run with the best validation loss."""
    found = min(grid(rows, experts, method), key=validation)
    return {"rate": found["rate"], "strength": found["strength"]}


def near(value: Any, values: Sequence[Any]) -> list[Any]:
    """Return a value of a sorted list and its neighbours there."""
    i = list(values).index(value)
    return list(values[max(0, i - 1) : i + 2])


def stages(results: common.Results, arguments: Any) -> Iterator[list[tuple[Setting, Any]]]:
    """Yield short runs about the best so far until all its neighbours are tried, then all seeds; only what is missing.

    More experts begin with the rate and the strength that are best with the fewest.
    """
    asked: list[Setting] = []

    def open_(settings: list[Setting]) -> list[tuple[Setting, Any]]:
        found = [setting for setting in settings if results.missing(**setting) and setting not in asked]
        asked.extend(found)
        return [(setting, arguments) for setting in found]

    def about(experts: int, method: str) -> list[Setting]:
        known = grid(results.rows, experts, method) or grid(results.rows, arguments.experts[0], method)
        middle = list(arguments.rates)[len(arguments.rates) // 2]
        centre = best(known, known[0]["experts"], method) if known else {"rate": middle, "strength": FIRST[method]}
        rates, strengths = near(centre["rate"], arguments.rates), near(centre["strength"], STRENGTHS[method])
        pairs = [(rate, centre["strength"]) for rate in rates] + [(centre["rate"], strength) for strength in strengths]
        shared = {"part": "grid", "experts": experts, "method": method, "seed": 0, "steps": arguments.short}
        return [shared | {"rate": rate, "strength": strength} for rate, strength in dict.fromkeys(pairs)]

    def ends(experts: int, method: str) -> list[dict[str, float]]:
        chosen = best(results.rows, experts, method)
        strengths = near(chosen["strength"], STRENGTHS[method]) if arguments.neighbours else [chosen["strength"]]
        return [chosen | {"strength": strength} for strength in strengths]

    def final() -> list[Setting]:
        return [
            {"part": "final", "experts": experts, "method": m} | end | {"seed": seed, "steps": arguments.steps}
            for seed in range(arguments.seeds)
            for experts in arguments.experts
            for m in arguments.methods
            if grid(results.rows, experts, m)
            for end in ends(experts, m)
        ]

    few, *more = arguments.experts
    begun = [n for n in more if any(grid(results.rows, n, m) for m in arguments.methods)]
    for several in ([few, *begun], more):
        while jobs := open_([s for n in several for m in arguments.methods for s in about(n, m)]):
            yield jobs
    if arguments.fit:
        steps = [row["steps"] for row in results.rows if row["part"] == "final"]
        arguments.steps = steps[0] if steps else fitting(results.rows, arguments)
    yield open_(final())


def fitting(rows: Sequence[common.Row], arguments: Any) -> int:
    """Return the steps, in hundreds, with which all final runs would just end in time, judged by the short runs here.

    A short run counts with its evaluation, so that the estimate is a cautious one.
    """
    networks = len(arguments.methods) * len(arguments.experts) * arguments.seeds
    short = [row for row in rows if row["part"] == "grid" and "taken" in row]
    each = sum(row["seconds"] for row in short) / sum(row["taken"] for row in short) / arguments.workers
    left = arguments.end - time.monotonic()
    steps = int(left / networks / each) // 100 * 100
    print(f"{1e3 * each:.1f} ms per step, {left:.0f} s left: {steps} steps", flush=True)
    return min(max(steps, 200), 4000)


def step_times(results: common.Results, arguments: Any) -> None:
    """Measure a step of training, and the router's part of it, one method after another and alone."""
    text = texts.tiny()["train"].to(arguments.device)
    for experts in arguments.experts:
        for method in arguments.methods:
            setting = {"part": "time", "experts": experts, "method": method}
            if not results.missing(**setting):
                continue
            searched = grid(results.rows, experts, method)
            strength = best(searched, experts, method)["strength"] if searched else FIRST[method]
            net = model_of(setting | {"strength": strength}, arguments)
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


def columns(rows: Sequence[common.Row], names: dict[str, str], *, digits: int = 3) -> str:
    """Return a table with one line per router; `names` are the heads of the columns and what they show."""
    long = [
        {"router": NAMES[row["method"]], "value": name, "number": row[of] * (100 if "%" in name else 1)}
        for name, of in names.items()
        for row in sorted(rows, key=lambda row: list(NAMES).index(row["method"]))
        if of in row
    ]
    return common.table(long, "router", "value", "number", scale=1, digits=digits) if long else "(not run)"


def finals(rows: Sequence[common.Row], experts: int) -> list[common.Row]:
    """Return the final runs with the chosen settings, those with the fewest steps first."""
    final = [row for row in rows if row["part"] == "final" and row["experts"] == experts]
    found = [row for row in final if best(rows, experts, row["method"]).items() <= row.items()]
    return sorted(found, key=lambda row: row["steps"])


def longest(rows: Sequence[common.Row]) -> list[common.Row]:
    """Return the runs with the most steps."""
    most = max((row["steps"] for row in rows), default=0)
    return [row for row in rows if row["steps"] == most]


def differences(final: Sequence[common.Row], value: str) -> str:
    """Return a table of how much more each router has than balanced LML, seed by seed, and of Student's paired test."""
    bits = {(row["steps"], row["method"], row["seed"]): row[value] for row in final}
    lines = []
    for steps in sorted({row["steps"] for row in final}):
        for method, name in NAMES.items():
            pairs = [
                (x, bits[steps, "balanced lml", s])
                for (n, m, s), x in sorted(bits.items())
                if (steps, "balanced lml", s) in bits and (n, m) == (steps, method)
            ]
            if method == "balanced lml" or len(pairs) < 2:
                continue
            lines.append(f"| {steps:,} | {name} | {paired([a - b for a, b in pairs], 4)} |")
    heads = ["steps", "router", "bits per byte more than balanced LML", "standard error", "seed by seed", "p"]
    head = ["| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
    return "\n".join(head + lines) if lines else "(not run)"


def paired(more: Sequence[float], digits: int) -> str:
    """Return mean, standard error, single values and p of Student's test, as the cells of a table."""
    error = statistics.stdev(more) / len(more) ** 0.5
    each = ", ".join(f"{x:+.{digits - 1}f}" for x in more)
    p = stats.ttest_1samp(more, 0.0).pvalue
    return f"{statistics.fmean(more):+.{digits}f} | {error:.{digits}f} | {each} | {p:.2g}"


def strengths(rows: Sequence[common.Row], experts: int) -> dict[str, str]:
    """Return a table of the longest final runs with each strength, for routers that have several; none if none has."""
    final = longest([row for row in rows if row["part"] == "final" and row["experts"] == experts])
    several = {m for m in NAMES if len({row["strength"] for row in final if row["method"] == m}) > 1}
    shown = sorted((row for row in final if row["method"] in several), key=lambda row: row["strength"])
    values = {"bits per byte, validation": "valid", **{name: COLUMNS[name] for name in ("bits per byte", "load")}}
    long = [
        {"router": f"{NAMES[method]}, {row['strength']:g}", "value": name, "number": row[of]}
        for name, of in values.items()
        for method in NAMES
        for row in shown
        if row["method"] == method
    ]
    return {f"strengths {experts}": common.table(long, "router", "value", "number", scale=1, digits=3)} if long else {}


def tables(rows: Sequence[common.Row]) -> dict[str, str]:
    found = {}
    for experts in SIZES:
        final = finals(rows, experts)
        by_name = sorted(final, key=lambda row: list(NAMES).index(row["method"]))
        named = [row | {"router": NAMES[row["method"]], "after": f"{row['steps']:,} steps"} for row in by_name]
        heads = list(dict.fromkeys(f"{row['steps']:,} steps" for row in final))
        found[f"steps {experts}"] = (
            common.table(named, "router", "after", "test_bits", heads=heads, scale=1, digits=3)
            if named
            else "(not run)"
        )
        found[f"final {experts}"] = columns(longest(final), COLUMNS)
        found[f"test {experts}"] = differences(final, "test_bits")
        found |= strengths(rows, experts)
        tried = [r for m in NAMES for r in grid(rows, experts, m)]
        chosen = [min(grid(tried, experts, m), key=validation) for m in NAMES if grid(tried, experts, m)]
        found[f"short {experts}"] = columns(chosen, SHORT)
        tried.sort(key=lambda r: (list(NAMES).index(r["method"]), r["strength"]))
        shown = [r | {"router": f"{NAMES[r['method']]}, {r['strength']:g}"} for r in tried if validation(r) < math.inf]
        heads = sorted({r["rate"] for r in shown})
        found[f"grid {experts}"] = (
            common.table(shown, "router", "rate", "valid", heads=heads, scale=1, digits=3) if shown else "(not run)"
        )
    timed = [r for r in rows if r["part"] == "time"]
    renamed = [{f"{name} {r['experts']}": value for name, value in r.items()} | r for r in timed]
    names = {
        f"{name}, {experts} experts": f"{of} {experts}"
        for experts in SIZES
        for name, of in {"step": "step_ms", "one router": "route_ms"}.items()
    }
    found["time"] = columns(renamed, names, digits=2)
    return found


def draw(rows: Sequence[common.Row], path: Path) -> None:
    """Draw how evenly the experts are used: their loads in order, mean of layers and seeds."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(SIZES), figsize=(8, 3.2), sharey=True)
    for axis, experts in zip(axes, SIZES, strict=True):
        for method, name in NAMES.items():
            loads = [r["test_loads"] for r in longest(finals(rows, experts)) if r["method"] == method]
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
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which a short run is given up")
    parser.add_argument("--fit", action="store_true", help="take as many --steps as --minutes allow")
    parser.add_argument("--neighbours", action="store_true", help="final runs with the neighbouring strengths too")
    parser.add_argument("--alone", action="store_true", help="only measure the time of a step")
    parser.add_argument("--figure", type=Path, help="only draw the loads of the results into this file")
    arguments = parser.parse_args(argv)
    if common.finish(arguments, tables, draw):
        return
    results = common.Results(arguments.out)
    arguments.end = time.monotonic() + 60 * arguments.minutes
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
            patience = 2 * arguments.limit if jobs and jobs[0][0]["part"] == "grid" else None
            common.run_all(train, jobs, results, pool, arguments.end, patience)
            if time.monotonic() > arguments.end:
                break


if __name__ == "__main__":
    main()
