"""Time and peak memory of `linear_lml_loss` against the number of classes, beside the ways that hold the logits.

    python -m benchmarks.linear [--rows 1024] [--features 512] [--dtype float32] [--classes 10000 1000000] [--trained]

Memory is what a step, forward and backward, needs at its peak beyond features, weight and their gradients: on a GPU by
the allocator, once the kernels of this case are compiled, on a CPU by the resident set of a process that runs nothing
else (some 20 MB of it is the first call of a library). Time is that of the clock on a GPU, and that of the processor on
a CPU (of all threads together: set OMP_NUM_THREADS=1). A way that does not fit is reported as such.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time

import torch
import torch.nn.functional as F
from torch import Tensor

import lastlayer as ll
from benchmarks.run import warm_up

WAYS: dict[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {
    "linear_lml_loss": lambda x, w, t, k: ll.linear_lml_loss(x, w, t, k),
    "linear_lml_loss, filter": lambda x, w, t, k: ll.linear_lml_loss(x, w, t, k, filter=2**-12),
    "F.linear + lml_loss": lambda x, w, t, k: ll.lml_loss(F.linear(x, w), t, k),
    "F.linear + F.cross_entropy": lambda x, w, t, k: F.cross_entropy(F.linear(x, w), t[:, 0]),
}


def measure(
    way: str, n: int, rows: int, size: int, dtype: str, k: float, repeats: int, trained: bool
) -> dict[str, float]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    features = torch.randn(rows, size, device=device).to(getattr(torch, dtype)).requires_grad_()
    weight = (torch.randn(n, size, device=device) / size**0.5).to(features.dtype).requires_grad_()
    target = torch.randint(n, (rows, 5), device=device)
    if trained:  # the labels score about 20, other classes up to 10
        features = (20 * weight.detach()[target].float().sum(1)).to(features.dtype).requires_grad_()

    def step() -> Tensor:
        features.grad = weight.grad = None
        loss = WAYS[way](features, weight, target, k)
        loss.backward()
        return loss.detach()

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    if device.type == "cuda":
        F.linear(features, weight[:8]).sum().backward()  # the products' own memory, in both threads
        warm_up(step)
        features.grad = weight.grad = None
    clock = perf_counter if device.type == "cuda" else process_time
    before = _memory(device, start=True)
    first = clock()
    loss = step()
    wait()
    first = clock() - first
    peak = _memory(device) - before - features.nbytes - weight.nbytes
    seconds = [] if repeats else [first]
    for _ in range(repeats):
        began = clock()
        step()
        wait()
        seconds.append(clock() - began)
    materialised = 2 * rows * n * features.element_size()
    norms = {"features": float(features.grad.double().norm()), "weight": float(weight.grad.double().norm())}
    return {
        "loss": float(loss),
        **{f"gradient_{name}": value for name, value in norms.items()},
        "ms": 1e3 * sorted(seconds)[len(seconds) // 2],
        "peak_bytes": peak,
        "of_materialised": peak / materialised,
    }


def _memory(device: torch.device, start: bool = False) -> int:
    if device.type == "cuda":
        if start:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        return torch.cuda.max_memory_allocated()
    if start and Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts from here
    status = Path("/proc/self/status")
    if status.exists():
        word = "VmRSS:" if start else "VmHWM:"
        line = next(line for line in status.read_text().splitlines() if line.startswith(word))
        return 1024 * int(line.split()[1])
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def table(cases: list[dict[str, float]]) -> str:
    """The cases as a table in Markdown: memory with its share of logits + gradient, and the times."""
    ways = [way for way in WAYS if any(case["way"] == way for case in cases)]
    names = [f"`{way}`".replace(" + ", "` + `").replace(", filter`", "`, `filter=2**-12`") for way in ways]
    lines = [f"| classes | {' | '.join(names)} | time, in that order |"]
    lines.append("| --- " * (len(ways) + 2) + "|")
    for n in sorted({int(case["classes"]) for case in cases}):
        found = [next((c for c in cases if c["classes"] == n and c["way"] == way), {"error": 1}) for way in ways]
        cells = [
            "-" if "error" in c else f"{c['peak_bytes'] / 1e6:,.0f} MB ({c['of_materialised']:.3g})" for c in found
        ]
        times = ["-" if "error" in c else f"{c['ms']:,.3g}" if c["ms"] < 1000 else f"{c['ms']:,.0f}" for c in found]
        lines.append(f"| {n:,} | {' | '.join(cells)} | {', '.join(times)} ms |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, nargs="+", default=[10_000, 30_000, 100_000, 300_000, 1_000_000])
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--features", type=int, default=512)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--k", type=float, default=5)
    parser.add_argument("--repeats", type=int, default=3, help="timed steps after the first; 0 times the first")
    parser.add_argument("--trained", action="store_true", help="features that fit their labels, as after training")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path, help="print the table of such a file instead")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text())["cases"]))
        return
    if options.case:
        print(json.dumps(_measured(options.case, options.classes[0], options)))
        return
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{device}, {options.rows} rows x {options.features} features, {options.dtype}, k = {options.k:g}")
    found = []
    for n in options.classes:
        for way in options.ways:
            row = _on_the_gpu(way, n, options) if torch.cuda.is_available() else _in_a_process(way, n, options)
            found.append({"way": way, "classes": n, **row})
            words = row.get("error") or (
                f"{row['ms']:10.1f} ms  {row['peak_bytes'] / 1e6:10.1f} MB  {row['of_materialised']:6.3f} of logits + "
                f"gradient  loss {row['loss']:.6g}  |dw| {row['gradient_weight']:.6g}"
            )
            print(f"{n:>9} {way:<28} {words}", flush=True)
    if options.json:
        threads = {} if torch.cuda.is_available() else {"threads": torch.get_num_threads()}
        shape = {**threads, "rows": options.rows, "features": options.features, "dtype": options.dtype, "k": options.k}
        shape["trained"] = options.trained
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(
            json.dumps({"device": device, "torch": torch.__version__, **shape, "cases": found}, indent=1)
        )


def _measured(way: str, n: int, options: argparse.Namespace) -> dict[str, float]:
    return measure(way, n, options.rows, options.features, options.dtype, options.k, options.repeats, options.trained)


def _on_the_gpu(way: str, n: int, options: argparse.Namespace) -> dict[str, float]:
    try:
        return _measured(way, n, options)
    except torch.cuda.OutOfMemoryError as error:
        return {"error": f"failed: {error}"[:100]}  # type: ignore[dict-item]
    finally:
        torch.cuda.empty_cache()


def _in_a_process(way: str, n: int, options: argparse.Namespace) -> dict[str, float]:
    given = {"rows": options.rows, "features": options.features, "dtype": options.dtype, "k": options.k}
    words = [w for name, value in {**given, "repeats": options.repeats}.items() for w in (f"--{name}", str(value))]
    words += ["--trained"] * options.trained
    command = [sys.executable, "-m", "benchmarks.linear", "--case", way, "--classes", str(n), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["killed"])[-1]
        return {"error": f"failed: {last[:100]}"}  # type: ignore[dict-item]
    return json.loads(done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    main()
