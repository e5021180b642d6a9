"""Sparse autoencoders on the residual stream of a byte-level language model, at equal numbers of active latents.

    python -m experiments.autoencoders.run --data FOLDER
    python -m experiments.autoencoders.run --alone      # times at 4,096 x 65,536, with nothing else on the GPU

The language model is trained first, one per seed (its code is in `experiments/router`). The learning rate, and for LML
the temperature and the share of soft steps, are chosen per method and size by short runs on validation rows.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lastlayer as ll
from experiments import common
from experiments.autoencoders import model
from experiments.router import run as router
from experiments.router import texts
from experiments.router.model import ByteModel, Dense

HERE = Path(__file__).parent
RATES = (1e-3, 2.5e-3, 6e-3, 1.5e-2, 3e-2)
WAYS = ((0.1, 0.5), (0.1, 0.0), (0.3, 0.0), (1.0, 0.0))  # of LML: last temperature, share of soft steps
FIRST = {"rate": 6e-3, "cold": 0.3, "soft": 0.0}  # where the search begins
SIZES = (8, 24, 64)
MIDDLE = 24  # whose best setting is the first to be tried at the other sizes
SLOWER = 0.1  # the rate of the predicted sizes, times that of the rest
Setting = dict[str, Any]

_rows: dict[int, dict[str, Tensor]] = {}


def rows_of(seed: int, arguments: Any) -> dict[str, Tensor]:
    """Return activations after half of the layers, trained once per seed and process; mean 0, mean square 1."""
    if seed in _rows:
        return _rows[seed]
    _rows.clear()
    parts = router.parts_of(arguments)
    net = language_model(seed, parts, arguments)
    net.eval()
    found = {}
    generator = torch.Generator(arguments.device).manual_seed(seed)
    for part, n in {"train": arguments.rows, "valid": arguments.rows // 10, "test": arguments.rows // 5}.items():
        batches = []
        with torch.no_grad(), router.half(arguments.device):
            while sum(map(len, batches)) < n:
                text, _ = texts.crops(parts[part], arguments.text_batch, arguments.length, generator)
                batches.append(net.stream(text, arguments.layers // 2).flatten(0, 1).float())
        found[part] = torch.cat(batches)[:n]
    mean = found["train"].mean(0)
    scale = (found["train"] - mean).square().mean().sqrt()
    _rows[seed] = {part: (x - mean) / scale for part, x in found.items()}
    return _rows[seed]


def language_model(seed: int, parts: texts.Parts, arguments: Any) -> ByteModel:
    file = arguments.models / f"{seed}.pt"
    torch.manual_seed(seed)
    feeds: list[Any] = [Dense(arguments.features, 4 * arguments.features) for _ in range(arguments.layers)]
    net = ByteModel(feeds, arguments.features, arguments.heads, arguments.length).to(arguments.device)
    if file.exists():
        net.load_state_dict(torch.load(file, map_location=arguments.device, weights_only=True))
        return net
    training = router.Training(net, 2e-3, arguments.text_steps)
    generator = torch.Generator(arguments.device).manual_seed(1000 + seed)
    for _ in range(arguments.text_steps):
        training.step(*texts.crops(parts["train"], arguments.text_batch, arguments.length, generator))
    bits = [
        router.loss_of(net.eval(), *piece).detach() / math.log(2)
        for piece in texts.pieces(parts["test"], arguments.text_batch, arguments.length, 10)
    ]
    print(f"language model {seed}: {float(torch.stack(bits).mean()):.3f} bits per byte", flush=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(net.state_dict(), file)
    return net


def train(setting: Setting, arguments: Any) -> common.Row:
    """Train one autoencoder; return its setting and what it reached on the test rows."""
    rows = rows_of(setting["seed"], arguments)
    start = time.time()
    torch.manual_seed(setting["seed"])
    net = model.Autoencoder(setting["kind"], arguments.features, arguments.latents, setting["k"])
    net = net.to(arguments.device)
    steps = setting["steps"]
    sizes = {"params": net.size.parameters(), "lr": SLOWER * setting["rate"]}
    others = {"params": [p for name, p in net.named_parameters() if not name.startswith("size.")]}
    optimizer = torch.optim.Adam([others, sizes], lr=setting["rate"], fused=arguments.device == "cuda")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 50, 5 * (steps - i) / steps))
    generator = torch.Generator(arguments.device).manual_seed(setting["seed"])
    soft = round(setting["soft"] * steps)  # then exactly k latents
    for i in range(steps):
        x = rows["train"][
            torch.randint(len(rows["train"]), (arguments.batch,), generator=generator, device=arguments.device)
        ]
        temperature = setting["cold"] ** (i / soft if i < soft else 1)
        loss = (net(x, temperature, i < soft) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    valid = rows["valid"].split(arguments.batch)
    net.settle(list(valid))
    found = {"valid_error": reached(net, list(valid))["error"]}
    if setting["part"] == "final":
        found |= reached(net, list(rows["test"].split(arguments.batch)))
    return setting | {"seconds": round(time.time() - start, 1)} | found


@torch.no_grad()
def reached(net: model.Autoencoder, batches: list[Tensor]) -> dict[str, float]:
    """Return the normalised squared error, active latents per row and the share of latents that are never active."""
    used, error, active = 0, 0.0, 0.0
    n = sum(map(len, batches))
    for x in batches:
        z = net.active(x)
        used = used + (z > 0).sum(0)
        error += float((net.decode(z) - x).square().sum())
        active += float((z > 0).sum())
    whole = sum(float(x.square().sum()) for x in batches)  # the mean of all rows is 0
    return {
        "error": round(error / whole, 6),
        "active": round(active / n, 3),
        "dead": round(float((torch.as_tensor(used) == 0).float().mean()), 5),
    }


def ways(kind: str) -> Sequence[tuple[float, float]]:
    return WAYS if "LML" in kind else ((1.0, 0.0),)


def ranked(rows: Sequence[common.Row], kind: str, k: int) -> list[dict[str, float]]:
    """Return rates and ways, that with the least error on the validation rows first."""
    some = [r for r in rows if r["part"] == "grid" and r["kind"] == kind]  # the middle size stands for one not begun
    here = [r for r in some if r["k"] == k] or [r for r in some if r["k"] == MIDDLE]
    begin = [FIRST if "LML" in kind else FIRST | {"cold": 1.0}]
    found = sorted(here, key=lambda row: row["valid_error"]) or begin
    return [{name: row[name] for name in FIRST} for row in found]


def stages(results: common.Results, arguments: Any) -> Iterator[list[tuple[Setting, Any]]]:
    """Yield short runs about the best so far until all its neighbours are tried, then all sizes, seed by seed."""

    def open_(settings: list[Setting]) -> list[tuple[Setting, Any]]:
        return [(setting, arguments) for setting in settings if results.missing(**setting)]

    def about(kind: str, k: int) -> list[Setting]:
        centre = ranked(results.rows, kind, k)[0]
        way = centre["cold"], centre["soft"]
        pairs = [(rate, way) for rate in router.near(centre["rate"], arguments.rates)]
        pairs += [(centre["rate"], other) for other in router.near(way, ways(kind))]
        shared = {"part": "grid", "kind": kind, "k": k, "seed": 0, "steps": arguments.short}
        return [shared | {"rate": r, "cold": w[0], "soft": w[1]} for r, w in dict.fromkeys(pairs)]

    for sizes in ([k for k in arguments.sizes if k == MIDDLE], arguments.sizes):
        while jobs := open_([s for k in sizes for kind in arguments.kinds for s in about(kind, k)]):
            yield jobs
    yield open_(
        [
            {"part": "final", "kind": kind, "k": k} | way | {"seed": seed, "steps": arguments.steps}
            for seed in range(arguments.seeds)
            for k in arguments.sizes
            for kind in arguments.kinds
            for way in ranked(results.rows, kind, k)[: arguments.best]
        ]
    )


def times(results: common.Results, arguments: Any) -> None:
    """Measure the choice of latents, forward and both ways, beside a softmax."""
    rows, latents, k = arguments.timed
    torch.manual_seed(0)
    pre = torch.randn(rows, latents, device=arguments.device)
    sizes = (0.5 + torch.rand(rows, device=arguments.device)) * k
    sizes.requires_grad_()
    calls: dict[str, Callable[[Tensor], Tensor]] = {"softmax": lambda x: x.softmax(-1)}
    calls["relu"] = lambda x: x.relu()
    for kind in model.KINDS:
        calls[kind] = lambda x, kind=kind: model.select(kind, x, k, sizes, 0.1, True)  # type: ignore[misc]
    calls["lml alone, k per row"] = lambda x: ll.lml(x, sizes, temperature=0.1)
    calls["LML, k per batch, plain torch"] = lambda x: model.select("LML, k per batch", x, k, sizes, 0.1, True, "torch")
    for name, call in calls.items():
        setting = {"part": "time", "kind": name, "rows": rows, "latents": latents, "k": k}
        if not results.missing(**setting):
            continue

        def forward(call: Callable[[Tensor], Tensor] = call) -> None:
            with torch.no_grad():
                call(pre)

        def both(call: Callable[[Tensor], Tensor] = call) -> None:
            x = pre.detach().requires_grad_()
            sizes.grad = None
            call(x).backward(pre)

        found = {}
        for way, run in {"forward": forward, "both": both}.items():
            found[f"{way}_ms"] = round(1e3 * measured(run, arguments.device), 3)
        results.add(**setting, **found)
        print(results.rows[-1], flush=True)


def measured(call: Callable[[], None], device: str, repeats: int = 9) -> float:
    """Return the median time of some calls, after two that are not counted."""

    def once() -> float:
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    for _ in range(2):
        once()
    return sorted(once() for _ in range(repeats))[repeats // 2]


def finals(rows: Sequence[common.Row]) -> list[common.Row]:
    """Return the final runs; of several settings, that with the least mean error on validation rows."""
    groups: dict[tuple[Any, ...], dict[tuple[Any, ...], list[common.Row]]] = {}
    for row in rows:
        if row["part"] == "final":
            settings = groups.setdefault((model.KINDS.index(row["kind"]), row["k"]), {})
            settings.setdefault(tuple(row[name] for name in FIRST), []).append(row)

    def error(some: list[common.Row]) -> float:
        return float(sum(row["valid_error"] for row in some) / len(some))

    return [row for _, settings in sorted(groups.items()) for row in min(settings.values(), key=error)]


def differences(final: Sequence[common.Row], others: Sequence[str] = ("TopK", "BatchTopK")) -> str:
    """Return a table of the points of variance that LML explains more than the others, and of Student's paired test."""
    explained = {(row["kind"], row["k"], row["seed"]): 100 * (1 - row["error"]) for row in final}
    lines = []
    for k in sorted({row["k"] for row in final}):
        for kind in model.KINDS:
            for other in others:
                seeds = [s for (m, n, s) in sorted(explained) if (m, n) == (kind, k) and (other, k, s) in explained]
                more = [explained[kind, k, s] - explained[other, k, s] for s in seeds]
                if kind not in others and len(more) > 1:
                    lines.append(f"| {k} | {kind} | {other} | {router.paired(more, 3)} |")
    heads = ["k", "method", "less", "points", "standard error", "seed by seed", "p"]
    head = ["| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
    return "\n".join(head + lines) if lines else "(not run)"


def tables(rows: Sequence[common.Row]) -> dict[str, str]:
    named = [r | {"method": r["kind"], "explained": 1 - r["error"], "k": f"k = {r['k']}"} for r in finals(rows)]
    found = {"test": differences(finals(rows))}
    for name, scale, digits in (("explained", 100, 2), ("dead", 100, 2), ("active", 1, 2)):
        found[name] = common.table(named, "method", "k", name, scale=scale, digits=digits) if named else "(not run)"
    for k in SIZES:
        short = [dict(r) for r in rows if r["part"] == "grid" and r["k"] == k]
        for row in short:
            way = f", T = {row['cold']:g}, {100 * row['soft']:g} % soft" if "LML" in row["kind"] else ""
            row |= {"method": row["kind"] + way, "explained": 1 - row["valid_error"]}
        short.sort(key=lambda r: (model.KINDS.index(r["kind"]), ways(r["kind"]).index((r["cold"], r["soft"]))))
        heads = sorted({row["rate"] for row in short})
        found[f"grid {k}"] = common.table(short, "method", "rate", "explained", heads=heads) if short else "(not run)"
    order = [*model.KINDS, "LML, k per batch, plain torch", "lml alone, k per row", "softmax", "relu"]
    timed = [r | {"method": r["kind"]} for r in rows if r["part"] == "time"]
    timed.sort(key=lambda r: order.index(r["kind"]))
    long = [
        {"method": r["method"], "ms": name, "number": r[of]}
        for name, of in {"forward": "forward_ms", "forward and backward": "both_ms"}.items()
        for r in timed
    ]
    found["time"] = common.table(long, "method", "ms", "number", scale=1, digits=2) if long else "(not run)"
    return found


def draw(rows: Sequence[common.Row], path: Path) -> None:
    """Draw the error and the share of dead latents against the number of active ones."""
    import matplotlib.pyplot as plt

    final = finals(rows)
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2))
    for axis, value in zip(axes, ("error", "dead"), strict=True):
        for kind in model.KINDS:
            sizes = sorted({r["k"] for r in final if r["kind"] == kind})
            found = [[r[value] for r in final if r["kind"] == kind and r["k"] == k] for k in sizes]
            mean = [100 * sum(f) / len(f) for f in found]
            axis.plot(sizes, mean, marker=".", label=kind)
            for k, some in zip(sizes, found, strict=True):
                axis.plot([k] * len(some), [100 * s for s in some], ".", color=axis.lines[-1].get_color(), alpha=0.3)
        axis.set_xscale("log", base=2)
        axis.set_xticks(SIZES, [str(k) for k in SIZES])
        axis.set_xlabel("active latents per row")
    axes[0].set_ylabel("squared error, % of the variance")
    axes[1].set_ylabel("latents never active, %")
    axes[0].legend(frameon=False, fontsize=8)
    common.save(figure, path)


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__, HERE / "results" / "results.json")
    parser.add_argument("--kinds", nargs="+", default=list(model.KINDS), choices=list(model.KINDS))
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), help="active latents per row")
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    parser.add_argument("--latents", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=1_000_000, help="activations to train on")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--short", type=int, default=200, help="steps of the runs that choose the rate")
    parser.add_argument("--best", type=int, default=1, help="settings of the short runs to train to the end")
    parser.add_argument("--models", type=Path, help="folder that keeps the language models")
    parser.add_argument("--text-steps", type=int, default=400)
    parser.add_argument("--text-batch", type=int, default=128)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--features", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--timed", type=int, nargs=3, default=[4096, 65536, 64], help="rows, latents and k of --alone")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no autoencoder after this time")
    parser.add_argument("--alone", action="store_true", help="only measure times")
    parser.add_argument("--figure", type=Path, help="only draw the results into this file")
    arguments = parser.parse_args(argv)
    if common.finish(arguments, tables, draw):
        return
    results = common.Results(arguments.out)
    torch.backends.cuda.matmul.allow_tf32 = True
    end = time.monotonic() + 60 * arguments.minutes
    if arguments.smoke:
        arguments.sizes, arguments.rates, arguments.seeds, arguments.timed = [MIDDLE], [FIRST["rate"]], 1, [8, 64, 4]
        arguments.latents, arguments.rows, arguments.batch, arguments.steps, arguments.short = 64, 400, 40, 5, 5
        arguments.text_steps, arguments.text_batch, arguments.length = 2, 4, 32
        arguments.features, arguments.layers, arguments.heads = 16, 2, 2
    if arguments.smoke or arguments.alone:
        times(results, arguments)
    if arguments.alone:
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments.models = arguments.models or Path(folder)
        for jobs in stages(results, arguments):
            common.run_all(train, jobs, results, None, end)


if __name__ == "__main__":
    main()
