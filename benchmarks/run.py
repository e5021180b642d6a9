"""The benchmark: a table of cases, each with its time and its ratio to the time of the matching torch operation.

``python -m benchmarks.run [--rows PATTERN] [--json FILE] [--device cpu|cuda] [--original PATH]``

The cases are times of the device. The rows ``felt/...`` after them are those of `benchmarks.felt`: what calls take on
the wall, first calls, and lengths of rows that vary.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import math
import platform
import re
import statistics
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.benchmark import Timer

import lastlayer as ll

Thunk = Callable[[], Any]
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class Data(NamedTuple):
    """What the functions of a case are called with."""

    x: Tensor  # logits, normal with standard deviation 2
    k: float
    target: Tensor  # one class per row
    upstream: Tensor  # a gradient of the shape of the logits


class Op(NamedTuple):
    """A function and torch's like of it; each takes the data and returns what is timed."""

    ours: Callable[[Data], Thunk]
    base: Callable[[Data], Thunk]
    traffic: int  # reads plus writes of the logits that the mathematics cannot avoid
    against: str
    waits: bool = False  # for the device, so that it cannot be captured in a CUDA graph


class Case(NamedTuple):
    op: Op
    rows: int
    n: int
    dtype: torch.dtype
    k: float


def forward(function: Callable[[Tensor, float], Tensor]) -> Callable[[Data], Thunk]:
    return lambda data: lambda: function(data.x, data.k)


def backward(function: Callable[[Tensor, float], Tensor]) -> Callable[[Data], Thunk]:
    def prepare(data: Data) -> Thunk:
        x = data.x.detach().requires_grad_()
        out = function(x, data.k)
        return lambda: torch.autograd.grad(out, x, data.upstream, retain_graph=True)

    return prepare


def both(loss: Callable[[Tensor, Tensor, float], Tensor]) -> Callable[[Data], Thunk]:
    def prepare(data: Data) -> Thunk:
        x = data.x.detach().requires_grad_()
        return lambda: torch.autograd.grad(loss(x, data.target, data.k), x)

    return prepare


def softmax(x: Tensor, k: float) -> Tensor:
    return torch.softmax(x, -1)


def cross_entropy(x: Tensor, target: Tensor, k: float) -> Tensor:
    return F.cross_entropy(x, target)


def named(name: str) -> Callable[..., Tensor] | None:
    return getattr(ll, name, None)


@functools.cache
def costs(n: int, device: torch.device, rows: int | None = None) -> Tensor:
    """Weights from 0.5 to 1.5, one per class, or per class of each row."""
    shape = (n,) if rows is None else (rows, n)
    return 0.5 + torch.rand(shape, generator=torch.Generator().manual_seed(1)).to(device)


def weighted(x: Tensor, k: float, impl: str = "auto") -> Tensor:
    return ll.lml(x, k, weight=costs(x.shape[-1], x.device), impl=impl)


def bounded(x: Tensor, k: float, impl: str = "auto") -> Tensor:
    return ll.lml(x, k, weight=costs(x.shape[-1], x.device), upper=costs(x.shape[-1], x.device), impl=impl)


def between(x: Tensor, k: float, impl: str = "auto") -> Tensor:
    weight = costs(x.shape[-1], x.device)
    return ll.lml(x, k, weight=weight, lower=weight / x.shape[-1], upper=weight, impl=impl)


def weighted_apart(x: Tensor, k: float, impl: str = "auto") -> Tensor:
    return ll.lml(x, k, weight=costs(x.shape[-1], x.device, len(x)), impl=impl)


LML = Op(forward(ll.lml), forward(softmax), 2, "softmax")
LML_BACKWARD = Op(backward(ll.lml), backward(softmax), 3, "softmax backward")
LOSS = Op(both(ll.lml_loss), both(cross_entropy), 2, "cross_entropy, both ways")
WEIGHTED = Op(forward(weighted), forward(ll.lml), 2, "lml")
BOUNDED = Op(forward(bounded), forward(ll.lml), 2, "lml")
BETWEEN = Op(forward(between), forward(ll.lml), 2, "lml")
WEIGHTED_APART = Op(forward(weighted_apart), forward(ll.lml), 3, "lml")
BUDGETS = {WEIGHTED: weighted, BOUNDED: bounded, BETWEEN: between, WEIGHTED_APART: weighted_apart}
WEIGHTED_BACKWARD = Op(backward(weighted), backward(ll.lml), 3, "lml backward")
BALANCED = Op(forward(ll.lml_balanced), forward(softmax), 2, "softmax", waits=True)
SIZES = [100, 512, 1000, 4096, 10000, 16384, 32000, 50257, 131072, 1000000]


def figure_3() -> Iterator[tuple[str, Op, int]]:
    """The losses of figure 3 of Amos, Koltun and Kolter (2019), forward and backward."""
    yield "lml_loss", LOSS, 100
    yield "lml", Op(both(lambda x, t, k: ll.lml(x, k).sum()), both(cross_entropy), 2, "cross_entropy, both ways"), 100
    for name in ("truncated_entropy_loss", "smooth_topk_svm_loss"):
        function = named(name)
        if function is not None:
            # Both take k as an integer.
            run = both(lambda x, t, k, f=function: f(x, t, int(k)))
            yield name, Op(run, both(cross_entropy), 2, "cross_entropy, both ways"), 100


def cases(device: torch.device) -> dict[str, Case]:
    """The table. A new op adds its lines here, and no file."""
    gpu = device.type == "cuda"
    table: dict[str, Case] = {}
    for dtype in (torch.float32, torch.bfloat16) if gpu else (torch.float32,):
        volume = (1 << 27) // dtype.itemsize if gpu else 1 << 22  # on a GPU well beyond its cache
        for n in SIZES if gpu else [size for size in SIZES if size <= 131072]:
            rows = -(-volume // n)
            for name, op in (("lml", LML), ("lml_backward", LML_BACKWARD), ("lml_loss", LOSS)):
                table[f"{name}/{n}/{NAMES[dtype]}"] = Case(op, rows, n, dtype, 5)
        for n in (100, 1000, 4096, 10000, 65536) if gpu else (100, 1000, 4096, 10000):
            for name, op in (
                ("weighted", WEIGHTED),
                ("bounded", BOUNDED),
                ("between", BETWEEN),
                ("weighted_apart", WEIGHTED_APART),
                ("weighted_backward", WEIGHTED_BACKWARD),
            ):
                table[f"{name}/{n}/{NAMES[dtype]}"] = Case(op, -(-volume // n), n, dtype, 5)
    for rows, n in ((8192, 256), (4096, 64)) if gpu else ((1024, 64),):
        table[f"balanced/{rows}x{n}"] = Case(BALANCED, rows, n, torch.float32, 8)
    n = 10000
    for k in (1, 10, 100, 1000, 5000):
        table[f"k/{n}/{k}"] = Case(LML, (1 << (25 if gpu else 22)) // n, n, torch.float32, k)
    for name, op, _ in figure_3():
        for n in (100, 1000, 10000):
            for k in (1, 5, 10, 50, 100):
                if k < n:
                    table[f"figure3/{name}/{n}/{k}"] = Case(op, 256, n, torch.float32, k)
    return table | dict(peers(device))


def peers(device: torch.device) -> Iterator[tuple[str, Case]]:
    """Other packages' functions, where they are installed."""
    wanted: list[tuple[str, str, Callable[[Any], Callable[[Data], Thunk]]]] = [
        ("entmax", "sparsemax", lambda f: forward(lambda x, k: f(x, dim=-1))),
        ("entmax", "entmax15", lambda f: forward(lambda x, k: f(x, dim=-1))),
        ("entmax", "budget_bisect", lambda f: forward(lambda x, k: f(x, budget=k, dim=-1))),
        ("torchsort", "soft_rank", lambda f: forward(lambda x, k: f(x))),
    ]
    if device.type == "cpu":
        wanted.append(("jaxopt.projection", "projection_box_section", box_section))
    for package, name, adapt in wanted:
        try:
            function = getattr(importlib.import_module(package), name, None)
        except ImportError:
            continue
        if function is not None:
            op = Op(adapt(function), forward(softmax), 2, "softmax")
            for n in (100, 1000, 10000):
                yield f"peer/{package}.{name}/{n}", Case(op, 256, n, torch.float32, 5)


def box_section(project: Callable[..., Any]) -> Callable[[Data], Thunk]:
    """Euclidean projection onto the polytope of `lml`, by jaxopt: compiled, all rows at once."""

    def prepare(data: Data) -> Thunk:
        jax = importlib.import_module("jax")
        ones, rows = jax.numpy.ones(data.x.shape[-1]), jax.numpy.asarray(data.x.numpy())
        run = jax.jit(jax.vmap(lambda row: project(row, (0 * ones, ones, ones, data.k))))
        return lambda: run(rows).block_until_ready()

    return prepare


def original(path: str, device: torch.device) -> Iterator[tuple[str, Case]]:
    """Ours beside the public implementation of the paper, from a checkout of github.com/locuslab/lml."""
    sys.path.insert(0, path)
    layer = importlib.import_module("lml").LML

    def theirs(x: Tensor, k: float) -> Tensor:
        return layer(N=int(k))(x)

    against = "the paper's code"
    pairs = [
        ("original", Op(forward(ll.lml), forward(theirs), 2, against, waits=True)),
        ("original_backward", Op(backward(ll.lml), backward(theirs), 3, f"{against}, backward", waits=True)),
    ]
    for name, op in pairs:
        for n in (100, 1000, 10000):
            yield f"{name}/{n}", Case(op, 256, n, torch.float32, 5)
            if device.type == "cuda":  # a batch that fills it
                yield f"{name}/{n}/full", Case(op, (1 << 25) // n, n, torch.float32, 5)


def make(case: Case, device: torch.device) -> Data:
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(case.rows, case.n, generator=generator, device=device).mul_(2).to(case.dtype)
    target = torch.randint(case.n, (case.rows,), generator=generator, device=device)
    upstream = torch.randn(case.rows, case.n, generator=generator, device=device).to(case.dtype)
    return Data(x, case.k, target, upstream)


def gate(name: str, case: Case, data: Data) -> float:
    """Compare the first rows with float64 in plain torch; a wrong kernel has no speed."""
    some = min(case.rows, max(1, (1 << 18) // case.n))
    x, target, upstream = data.x[:some], data.target[:some], data.upstream[:some]
    if case.op is LML or name.startswith("original/"):
        found, exact = ll.lml(x, case.k), ll.lml(x.double(), case.k, impl="torch")
    elif case.op in BUDGETS:
        function = BUDGETS[case.op]
        found, exact = function(x, case.k), function(x.double(), case.k, "torch")
    elif case.op is BALANCED:
        found, exact = ll.lml_balanced(data.x, case.k), ll.lml_balanced(data.x.double(), case.k)
    elif case.op in (LML_BACKWARD, WEIGHTED_BACKWARD, LOSS) or name.startswith("original_backward/"):
        results = []
        for part, impl in ((x, "auto"), (x.double(), "torch")):
            part = part.detach().requires_grad_()
            if case.op is LOSS:
                out = ll.lml_loss(part, target, case.k, reduction="sum", impl=impl)
                results.append(torch.autograd.grad(out, part)[0])
            else:
                out = (weighted if case.op is WEIGHTED_BACKWARD else ll.lml)(part, case.k, impl=impl)
                results.append(torch.autograd.grad(out, part, upstream.to(part.dtype))[0])
        found, exact = results
    else:
        return math.nan  # others' functions, and losses that have their own tests
    error = (found.double() - exact).abs().max().item()
    if not error < (1e-5 if case.dtype == torch.float32 else 2e-2):
        raise AssertionError(f"{name}: off by {error:.1e} from float64; a wrong kernel has no speed.")
    return error


def warm_up(thunk: Thunk) -> None:
    """Call a function until it has kernels of its own: after three calls they are compiled, in threads."""
    for _ in range(4):
        thunk()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    thunk()
    torch.cuda.synchronize()


def captured(thunk: Thunk) -> Thunk:
    """The replay of a CUDA graph of a call: the time of the device alone."""
    warm_up(thunk)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):  # that of the forward pass, for autograd
        thunk()
    return graph.replay


def time_cuda(thunks: list[Thunk], repeats: int) -> list[float]:
    """Milliseconds for each function, called in turn; medians."""
    times: list[list[float]] = [[] for _ in thunks]
    for _ in range(repeats):
        for thunk, found in zip(thunks, times, strict=True):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            thunk()  # what the other left in the cache is gone
            begin.record()
            for _ in range(4):
                thunk()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 4)
    return [statistics.median(found) for found in times]


def time_cpu(thunks: list[Thunk], seconds: float) -> list[float]:
    """Milliseconds for each function, measured in turn; medians."""
    times: list[list[float]] = [[] for _ in thunks]
    for _ in range(3):
        for thunk, found in zip(thunks, times, strict=True):
            timer = Timer("thunk()", globals={"thunk": thunk}, num_threads=torch.get_num_threads())
            found.append(1e3 * timer.blocked_autorange(min_run_time=seconds).median)
    return [statistics.median(found) for found in times]


def scratch(thunk: Thunk, device: torch.device) -> int | None:
    """Bytes of device memory at the peak of a call, beyond what it returns."""
    if device.type != "cuda":
        return None
    warm_up(thunk)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = thunk()
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_allocated() - before
    del out
    return peak - kept


def measure(name: str, case: Case, device: torch.device, repeats: int) -> dict[str, Any]:
    if device.type == "cuda" and torch.cuda.current_stream() == torch.cuda.default_stream():
        with torch.cuda.stream(torch.cuda.Stream()):  # the default stream cannot be captured
            return measure(name, case, device, repeats)
    data = make(case, device)
    error = gate(name, case, data)
    ours, base = case.op.ours(data), case.op.base(data)
    extra = scratch(ours, device)
    # A copy of whole megabytes: an odd size may take a slower way.
    source = torch.empty(-(-data.x.nbytes // (1 << 20)) << 18, device=device)
    thunks = [ours, base, lambda: torch.neg(source, out=target)]
    target = torch.empty_like(source)
    if device.type == "cuda":
        if not case.op.waits:
            thunks = [captured(thunk) for thunk in thunks]
        ms, base_ms, copy_ms = time_cuda(thunks, repeats)
    else:
        ms, base_ms, copy_ms = time_cpu(thunks, 0.02 * repeats)
    traffic = case.op.traffic * data.x.nbytes
    copy = 2 * source.nbytes / copy_ms
    row = {
        "name": name,
        "rows": case.rows,
        "n": case.n,
        "k": case.k,
        "dtype": NAMES[case.dtype],
        "ms": ms,
        "against": case.op.against,
        "against_ms": base_ms,
        "ratio": ms / base_ms,
        "GB/s": traffic / ms / 1e6,
        "share_of_copy": traffic / ms / copy,
        "scratch_bytes": extra,
        "error": None if math.isnan(error) else error,
    }
    if case.op.waits and case.op is not BALANCED:
        row["times_faster"] = base_ms / ms
        if device.type == "cuda":
            row["captured_ms"] = time_cuda([captured(ours)], repeats)[0]  # `ms` is mostly the host's
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()}


def machine(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lastlayer": ll.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        import triton

        found |= {"device": torch.cuda.get_device_name(device), "triton": triton.__version__}
    else:
        found["device"] = cpu_name()
    return found


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="lastlayer bench", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="", metavar="PATTERN", help="only the cases whose name matches")
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: a GPU if there is one")
    parser.add_argument("--original", metavar="PATH", help="a checkout of github.com/locuslab/lml to time as well")
    parser.add_argument("--repeats", type=int, default=10, help="measurements per case (default: 10)")
    return parser.parse_args(argv)


def felt(device: torch.device, pattern: str) -> Iterator[dict[str, Any]]:
    """Measure the parts of `benchmarks.felt` whose name, ``felt/PART``, matches, and print their rows."""
    from benchmarks.felt import parts

    for part, rows in parts(device, seconds=0.5).items():
        for row in rows() if re.search(pattern, f"felt/{part}") else ():
            size = f", {row['rows']} x {row['n']}" if "rows" in row else ""
            size += f", {row['dtype']}" if "dtype" in row else ""
            ratio = f"{row['ratio']:.2f} times {row['against']}" if "ratio" in row else f"{row['s']:.2f} s"
            print(f"felt/{part}: {row['name']}{size}: {ratio}", flush=True)
            yield row


def write(
    path: Path,
    device: torch.device,
    rows: list[dict[str, Any]],
    complete: bool,
    calls: list[dict[str, Any]] | None = None,
) -> None:
    """Write what has been measured, the rows that are felt apart; the file is whole at any time."""
    part = path.with_name(path.name + ".part")
    told = {"complete": complete, "machine": machine(device), "rows": rows, **({"felt": calls} if calls else {})}
    part.write_text(json.dumps(told, indent=1) + "\n")
    part.replace(path)


def main(argv: list[str] | None = None) -> int:
    """Print the table and write the JSON file, row by row: a run that is cut short keeps what it measured."""
    options = arguments(argv)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    table = cases(device)
    if options.original:
        table |= dict(original(options.original, device))
    chosen = {name: case for name, case in table.items() if re.search(options.rows, name)}
    width = max((len(name) for name in chosen), default=4)
    print(f"{'case':{width}}  {'ms':>9}  {'ratio':>6}  {'GB/s':>6}  {'of copy':>7}  {'scratch MB':>10}  against")
    found: list[dict[str, Any]] = []
    for name, case in chosen.items():
        row = measure(name, case, device, options.repeats)
        found.append(row)
        memory = "-" if row["scratch_bytes"] is None else f"{row['scratch_bytes'] / 1e6:.2f}"
        faster = f", {row['times_faster']:.0f} times faster" if "times_faster" in row else ""
        print(
            f"{name:{width}}  {row['ms']:9.4f}  {row['ratio']:6.2f}  {row['GB/s']:6.0f}  {row['share_of_copy']:7.2f}  "
            f"{memory:>10}  {row['against']}{faster}",
            flush=True,
        )
        if options.json:
            write(Path(options.json), device, found, complete=len(found) == len(chosen))
    calls: list[dict[str, Any]] = []
    for row in felt(device, options.rows):
        calls.append(row)
        if options.json:
            write(Path(options.json), device, found, complete=True, calls=calls)
    return 0


if __name__ == "__main__":
    sys.exit(main())
