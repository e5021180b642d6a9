"""Time of LML and its relatives against k (figure 3 of Amos, Koltun and Kolter, 2019).

    python -m experiments.timing.run [--device cpu] [--original CHECKOUT]

Forward and backward pass for a batch of 256 rows; all functions of a setting are measured in turn, in one run, by the
clocks of the benchmark. Rows carry the name of the device, so one file holds several machines. A seed is a repetition.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lastlayer as ll
from benchmarks import run as bench
from experiments import common

HERE = Path(__file__).parent
BATCH = 256
SIZES = (100, 1000, 10000)
KS = (1, 2, 5, 10, 20, 50, 100)
PASSES = ("forward", "backward")
CLOCKS = {"call": "a call, the host's work included", "device": "the device alone, a call replayed as a CUDA graph"}
ORIGINAL = "original LML layer"
Function = Callable[[Tensor, Tensor, int], Tensor]
FUNCTIONS: dict[str, Function] = {
    "cross-entropy": lambda x, target, k: F.cross_entropy(x, target),
    "torch.topk": lambda x, target, k: x.topk(k).values,
    "LML layer": lambda x, target, k: ll.lml(x, k),
    "LML loss": lambda x, target, k: ll.lml_loss(x, target, k),
    "truncated entropy": lambda x, target, k: ll.truncated_entropy_loss(x, target, k),
    "smooth SVM": lambda x, target, k: ll.smooth_topk_svm_loss(x, target, k),
}


def original(checkout: Path) -> Function:
    """The layer of the paper's code, from a checkout of github.com/locuslab/lml."""
    sys.path.insert(0, str(checkout))
    layer = importlib.import_module("lml").LML
    return lambda x, target, k: layer(N=k)(x)


def thunks(functions: dict[str, Function], data: bench.Data) -> dict[tuple[str, str], bench.Thunk]:
    """The two passes of each function, ready to be called."""
    data = data._replace(x=data.x.detach().requires_grad_())
    found: dict[tuple[str, str], bench.Thunk] = {}
    for name, function in functions.items():

        def apply(x: Tensor, k: float, function: Function = function) -> Tensor:
            return function(x, data.target, int(k))

        upstream = torch.randn_like(apply(data.x, data.k))
        found["forward", name] = bench.forward(apply)(data)
        found["backward", name] = bench.backward(apply)(data._replace(upstream=upstream))
    return found


def measure(functions: dict[str, Function], setting: common.Row, device: torch.device, effort: int) -> common.Row:
    """Milliseconds of both passes of all functions, measured in turn."""
    if device.type == "cuda" and torch.cuda.current_stream() == torch.cuda.default_stream():
        with torch.cuda.stream(torch.cuda.Stream()):  # the default stream cannot be captured
            return measure(functions, setting, device, effort)
    if setting["clock"] == "device":  # what waits for the device cannot be captured
        functions = {name: function for name, function in functions.items() if name != ORIGINAL}
    case = bench.Case(bench.LML, BATCH, setting["n"], torch.float32, setting["k"])
    ready = thunks(functions, bench.make(case, device))
    calls = list(ready.values())
    if setting["clock"] == "device":
        calls = [bench.captured(call) for call in calls]
    times = bench.time_cuda(calls, effort) if device.type == "cuda" else bench.time_cpu(calls, 0.004 * effort)
    found: dict[str, dict[str, float]] = {name: {} for name in PASSES}
    for (which, name), ms in zip(ready, times, strict=True):
        found[which][name] = float(f"{ms:.4g}")
    return setting | found


def machine(device: torch.device) -> dict[str, Any]:
    about = bench.machine(device)
    return {name: about[name] for name in ("device", "threads", "torch")}


def grid(device: torch.device, seeds: int, sizes: Sequence[int], ks: Sequence[int]) -> Iterator[common.Row]:
    for clock in CLOCKS if device.type == "cuda" else ["call"]:
        for seed in range(seeds):
            for n in sizes:
                for k in ks:
                    if k < n:
                        yield {**machine(device), "clock": clock, "n": n, "k": k, "seed": seed}


def both(row: common.Row, name: str) -> float:
    return float(row["forward"][name] + row["backward"][name])


def least(rows: Sequence[common.Row], which: str, name: str, **setting: int) -> float:
    """The least of the repetitions: what else a shared machine does can only add to a time."""
    return float(min(row[which][name] for row in rows if setting.items() <= row.items()))


def short(values: Sequence[float]) -> str:
    """A number, or the smallest and the largest, in three digits."""
    texts = [f"{value:.0f}" if value >= 100 else f"{value:.3g}" for value in (min(values), max(values))]
    return texts[0] if texts[0] == texts[1] else " to ".join(texts)


def markdown(head: list[str], lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *lines])


def groups(rows: Sequence[common.Row]) -> dict[tuple[str, str], list[common.Row]]:
    """The rows of each device and clock, CPUs first."""
    found: dict[tuple[str, str], list[common.Row]] = {}
    for row in sorted(rows, key=lambda row: ("NVIDIA" in row["device"], row["clock"])):
        found.setdefault((row["device"], row["clock"]), []).append(row)
    return found


def names_in(rows: Sequence[common.Row]) -> list[str]:
    return [name for name in [*FUNCTIONS, ORIGINAL] if any(name in row["forward"] for row in rows)]


def title(device: str, clock: str, rows: Sequence[common.Row]) -> str:
    threads = (
        "" if "NVIDIA" in device else ", 1 thread" if rows[0]["threads"] == 1 else f", {rows[0]['threads']} threads"
    )
    return f"**{device}{threads}**, torch {rows[0]['torch']}; time of {CLOCKS[clock]}"


def times(rows: Sequence[common.Row]) -> str:
    """Milliseconds of both passes together at k = 5, and the ratio to cross-entropy in each repetition."""
    lines = []
    sizes = sorted({row["n"] for row in rows})
    for name in names_in(rows):
        cells = [name]
        for n in sizes:
            some = [row for row in rows if row["n"] == n and row["k"] == 5]
            ms = sum(least(some, which, name) for which in PASSES)
            cells.append(f"{short([ms])} ms, {short([both(row, name) / both(row, 'cross-entropy') for row in some])}")
        lines.append(cells)
    return markdown(["k = 5, both passes", *(f"n = {n}" for n in sizes)], lines)


def growth(rows: Sequence[common.Row]) -> str:
    """The least time at the largest k over that at k = 1, forward and backward."""
    lines = []
    last = {n: max(row["k"] for row in rows if row["n"] == n) for n in sorted({row["n"] for row in rows})}
    for name in names_in(rows):
        ratios = [
            least(rows, which, name, n=n, k=k) / least(rows, which, name, n=n, k=1)
            for n, k in last.items()
            for which in PASSES
        ]
        lines.append([name, *(short([ratio]) for ratio in ratios)])
    heads = [f"n = {n}, k = {k}, {which}" for n, k in last.items() for which in PASSES]
    return markdown(["time over that of k = 1", *heads], lines)


def against_original(rows: Sequence[common.Row]) -> str:
    """Times of the original layer over times of ours."""
    with_it = [row for row in rows if ORIGINAL in row["forward"]]
    lines = []
    for (device, clock), some in groups(with_it).items():
        for which in PASSES:
            cells = [f"{device}, {clock}, {which}"]
            for n in sorted({row["n"] for row in with_it}):
                ratios = [row[which][ORIGINAL] / row[which]["LML layer"] for row in some if row["n"] == n]
                cells.append(short(ratios))
            lines.append(cells)
    if not lines:
        return "(not run)"
    return markdown(
        ["original / ours, over all k", *(f"n = {n}" for n in sorted({row["n"] for row in with_it}))], lines
    )


def tables(rows: Sequence[common.Row]) -> dict[str, str]:
    found = groups(rows)
    blocks = [f"{title(*key, some)}:\n\n{times(some)}\n\n{growth(some)}" for key, some in found.items()]
    return {"times": "\n\n".join(blocks) or "(not run)", "original": against_original(rows)}


def draw(rows: Sequence[common.Row], folder: Path) -> None:
    """Time against k on logarithmic axes: a figure for each device and clock; columns are sizes, rows are passes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = {name: plt.get_cmap("tab10")(place) for place, name in enumerate([*FUNCTIONS, ORIGINAL])}
    for (device, clock), some in groups(rows).items():
        sizes = sorted({row["n"] for row in some})
        figure, panels = plt.subplots(
            2, len(sizes), figsize=(9.5, 5.6), sharex=True, sharey="row", squeeze=False, layout="constrained"
        )
        for which, line in zip(PASSES, panels, strict=True):
            for n, axes in zip(sizes, line, strict=True):
                for name in names_in(some):
                    ks = sorted({row["k"] for row in some if row["n"] == n})
                    ms = [least(some, which, name, n=n, k=k) for k in ks]
                    style = "--" if name == ORIGINAL else "-"
                    axes.loglog(ks, ms, style, marker=".", color=colours[name], label=name)
                axes.set_title(f"{which}, n = {n}", fontsize=10)
                axes.spines[["top", "right"]].set_visible(False)
            line[0].set_ylabel("ms per batch of 256")
        for axes in panels[-1]:
            axes.set_xlabel("k")
        figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize=9)
        common.save(figure, folder / f"{'gpu' if 'NVIDIA' in device else 'cpu'}-{clock}.svg")


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__, HERE / "results" / "results.json")
    parser.add_argument(
        "--original", type=Path, help="a checkout of github.com/locuslab/lml, to time its layer as well"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of the CPU (default: 1, as the paper's script)")
    parser.add_argument(
        "--effort", type=int, default=10, help="measurements per function; on a CPU each takes 4 ms, or one call"
    )
    parser.add_argument("--k", nargs="+", type=int, default=list(KS))
    arguments = parser.parse_args(argv)
    if common.finish(arguments, tables):
        if arguments.readme:
            draw(common.Results(arguments.out).rows, arguments.readme.parent / "figures")
        return
    if arguments.smoke:
        arguments.seeds, arguments.effort = 1, 1
    sizes, ks = ([20], [1, 5]) if arguments.smoke else (SIZES, arguments.k)
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    functions = FUNCTIONS | ({ORIGINAL: original(arguments.original)} if arguments.original else {})
    results = common.Results(arguments.out)
    settings = [setting for setting in grid(device, arguments.seeds, sizes, ks) if results.missing(**setting)]
    for number, setting in enumerate(settings, start=1):
        row = measure(functions, setting, device, arguments.effort)
        results.add(**row)
        slowest = max(names_in([row]), key=partial(both, row))
        print(
            f"{number}/{len(settings)} {setting['clock']} n={setting['n']} k={setting['k']}: LML loss "
            f"{both(row, 'LML loss'):.3g} ms, slowest {slowest} {both(row, slowest):.3g} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()
