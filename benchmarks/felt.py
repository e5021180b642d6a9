"""Speed as it is felt: wall time per call, the first call, and shapes that vary, beside torch's own in the same run.

``python -m benchmarks.felt [--device cpu|cuda] [--parts PATTERN] [--json FILE]``

The parts: `eager`, `half`, `others`, `compiled`; on a GPU `first` and `many` (first calls and 500 lengths of rows), and
`beginning` and `lengths`, the same for the other projections and losses, with `kernels`, the time of the device.

`benchmarks.run` measures the device, and then these parts as rows ``felt/PART``. Here the clock on the wall counts,
with everything that Python does around it. On the CPU both functions are called in turn, each after another operation
on torch's threads, as in training, where these threads spin. A round counts with its median; `worst` is the largest
ratio of five rounds.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lastlayer as ll
from benchmarks.run import machine

Thunk = Callable[[], Any]
OTHERS = {  # every other projection and loss, as a function of logits, multi-hot target, one class per row
    "lml_at_most": lambda x, y, t: ll.lml_at_most(x, 5).sum(),
    "capped_softmax": lambda x, y, t: ll.capped_softmax(x, 5).square().sum(),
    "capped_sparsemax": lambda x, y, t: ll.capped_sparsemax(x, 5).square().sum(),
    "subset_marginals": lambda x, y, t: ll.subset_marginals(x, 5).square().sum(),
    "lml_fenchel_young_loss": lambda x, y, t: ll.lml_fenchel_young_loss(x, y, 5),
    "truncated_entropy_loss": lambda x, y, t: ll.loss.truncated_entropy_loss(x, t, 5),
    "smooth_topk_svm_loss": lambda x, y, t: ll.loss.smooth_topk_svm_loss(x, t, 5),
    "two_way_loss": lambda x, y, t: ll.two_way_loss(x, y),
    "asymmetric_loss": lambda x, y, t: ll.asymmetric_loss(x, y),
    "binary_loss": lambda x, y, t: ll.binary_loss(x, y),
    "warp_loss": lambda x, y, t: ll.loss.warp_loss(x, y),
    "quasibinary_loss": lambda x, y, t: ll.loss.quasibinary_loss(x, y),
}
PROJECTIONS = {  # those of them that are no losses, as they are
    "lml_at_most": lambda x, y, t: ll.lml_at_most(x, 5),
    "capped_softmax": lambda x, y, t: ll.capped_softmax(x, 5),
    "capped_sparsemax": lambda x, y, t: ll.capped_sparsemax(x, 5),
    "subset_marginals": lambda x, y, t: ll.subset_marginals(x, 5),
}
FIRST = """
import time, torch, lastlayer as ll
device = torch.device("cuda"); torch.zeros(1, device=device).sum().item(); import triton
x = torch.randn({rows}, {n}, device=device, dtype=torch.{dtype}, requires_grad={grad})
t = torch.randint({n}, ({rows},), device=device); y = (torch.rand({rows}, {n}, device=device) < 0.01).float()
w = torch.rand({n}, device=device) + 0.5
k, lists = torch.full(({rows},), 5.0, device=device), torch.randint({n}, ({rows}, 3), device=device)
layer = torch.randn({n}, 64, device=device, dtype=torch.{dtype}, requires_grad={grad})
z = x.detach().float().requires_grad_(); torch.softmax(z, -1).backward(torch.ones_like(z)); torch.cuda.synchronize()
start = time.perf_counter()  # torch has done what it does before a first backward pass
out = {call}
if {grad}: out.backward(torch.ones_like(out))
torch.cuda.synchronize(); print(time.perf_counter() - start)
"""
SHAPES = [(256, 1000, "float32"), (256, 1000, "bfloat16"), (64, 20000, "float32"), (64, 100000, "float32")]
COMMON = {  # as a function of what is in `FIRST`, and whether both ways
    "lml": ("ll.lml(x, 5)", False),
    "lml, both ways": ("ll.lml(x, 5)", True),
    "lml_loss, both ways": ("ll.lml_loss(x, t, 5)", True),
    "lml_loss multi-hot, both ways": ("ll.lml_loss(x, y, 5, observed=0.5)", True),
    "lml with weights, both ways": ("ll.lml(x, 5, weight=w)", True),
    "lml with weights and bounds, both ways": ("ll.lml(x, 5, weight=w, upper=w)", True),
}
RARE: dict[str, tuple[str, int, int, str]] = {  # all of them both ways
    "lml, temperature": ("ll.lml(x, 5, temperature=2.0)", 256, 1000, "float32"),
    "lml, temperature, bfloat16": ("ll.lml(x, 5, temperature=2.0)", 256, 1000, "bfloat16"),
    "lml, temperature, long rows": ("ll.lml(x, 5, temperature=2.0)", 64, 100_001, "float32"),
    "lml, k per row": ("ll.lml(x, k)", 256, 1000, "float32"),
    "lml, k of no dimension": ("ll.lml(x, k[0])", 256, 1000, "float16"),
    "lml, mask": ("ll.lml(x, 5, mask=y == 0)", 64, 20_000, "float32"),
    "log_lml, temperature": ("ll.log_lml(x, 5, temperature=0.5)", 256, 1000, "float32"),
    "log_lml": ("ll.log_lml(x, 5)", 64, 20_000, "bfloat16"),
    "lml_threshold": ("ll.lml_threshold(x, 5)", 256, 1000, "float32"),
    "lml_threshold, mask": ("ll.lml_threshold(x, k, mask=y == 0)", 256, 1000, "bfloat16"),
    "lml, weights per row": ("ll.lml(x, 5, weight=y + 0.5)", 256, 1000, "float32"),
    "lml, both bounds": ("ll.lml(x, 5, lower=0.001 * w, upper=0.6 * w)", 256, 1000, "float32"),
    "lml, lower bounds": ("ll.lml(x, 5, lower=0.001 * w)", 256, 1000, "bfloat16"),
    "lml, upper bounds, long rows": ("ll.lml(x, 5, upper=0.6 * w)", 64, 100_000, "float32"),
    "lml, gradients of weights": ("ll.lml(x, 5, weight=w.clone().requires_grad_())", 256, 1000, "float32"),
    "log_lml, weights": ("ll.log_lml(x, 5, weight=w)", 256, 1000, "float32"),
    "lml_threshold, weights": ("ll.lml_threshold(x, 5, weight=w)", 256, 1000, "float32"),
    "lml_at_most, weights": ("ll.lml_at_most(x, 5, weight=w)", 256, 1000, "float32"),
    "lml_at_most, k per row": ("ll.lml_at_most(x, k)", 256, 1000, "float32"),
    "lml_loss, lists": ("ll.lml_loss(x, lists, 5)", 256, 1000, "float32"),
    "lml_loss, lists, bfloat16": ("ll.lml_loss(x, lists, 5)", 256, 1000, "bfloat16"),
    "lml_loss, lists and observed": ("ll.lml_loss(x, lists, 5, observed=0.5)", 256, 1000, "float32"),
    "lml_loss, lists, temperature, long rows": ("ll.lml_loss(x, lists, 5, temperature=2.0)", 64, 100_000, "float32"),
    "lml_loss, boolean": ("ll.lml_loss(x, y > 0, 5)", 256, 1000, "float32"),
    "lml_loss, int8": ("ll.lml_loss(x, y.to(torch.int8), 5, observed=0.5)", 64, 20_000, "float32"),
    "lml_loss, bfloat16": ("ll.lml_loss(x, y.bfloat16(), 5)", 256, 100, "bfloat16"),
    "lml_loss, mask": ("ll.lml_loss(x, t, 5, mask=y == 0)", 256, 1000, "float32"),
    "lml_loss, k per row": ("ll.lml_loss(x, t, k)", 256, 1000, "float32"),
    "lml_loss, sample_weight": ("ll.lml_loss(x, t, 5, sample_weight=k)", 256, 1000, "float32"),
    "lml_loss, per row": ('ll.lml_loss(x, y, 5, reduction="none")', 256, 1000, "float32"),
    "lml_loss, sum, long rows": ('ll.lml_loss(x, t, 5, reduction="sum")', 64, 20_000, "bfloat16"),
    "linear_lml_loss": ("ll.linear_lml_loss(x[:, :64], layer, t, 5)", 4096, 20_000, "bfloat16"),
    "linear_lml_loss, lists": ("ll.linear_lml_loss(x[:, :64], layer, lists, 5)", 2048, 40_000, "float32"),
    "lml_balanced": ("ll.lml_balanced(x, 2)", 1024, 64, "float32"),
    "lml_balanced, k per row": ("ll.lml_balanced(x, k)", 300, 100, "bfloat16"),
    "two_way_loss, lists": ("ll.two_way_loss(x, lists)", 256, 1000, "float32"),
    "two_way_loss, per row": ('ll.two_way_loss(x, y, reduction="none")', 256, 1000, "float32"),
    "asymmetric_loss, boolean": ("ll.asymmetric_loss(x, y > 0)", 256, 1000, "float32"),
    "asymmetric_loss, many rows": ("ll.asymmetric_loss(x, y)", 4096, 1000, "float32"),
    "binary_loss, weights": ("ll.binary_loss(x, y, weight=w)", 256, 1000, "bfloat16"),
    "truncated_entropy_loss, float16": ("ll.loss.truncated_entropy_loss(x, y.half(), 5)", 256, 1000, "float32"),
    "lml_fenchel_young_loss, lists": ("ll.lml_fenchel_young_loss(x, lists, 5)", 256, 1000, "float32"),
    "warp_loss, one class": ("ll.loss.warp_loss(x, t)", 256, 1000, "float32"),
    "capped_softmax, k per row": ("ll.capped_softmax(x, k)", 256, 1000, "float32"),
    "subset_marginals, long rows": ("ll.subset_marginals(x, 5)", 256, 10_000, "float32"),
    "smooth_topk_svm_loss, many rows": ("ll.loss.smooth_topk_svm_loss(x, t, 5)", 4096, 1000, "float32"),
}


def both(function: Callable[[Tensor], Tensor], x: Tensor) -> Thunk:
    """Forward and backward, as a training step calls them."""

    def run() -> None:
        x.grad = None
        out = function(x)
        out.backward(torch.ones_like(out) if out.ndim else None)

    return run


def wall(thunks: dict[str, Thunk], device: torch.device, seconds: float) -> dict[str, list[float]]:
    """Microseconds per call of each function in five rounds."""
    if device.type == "cpu":
        return wall_between(thunks, seconds)
    for thunk in thunks.values():
        for _ in range(60):  # past the calls after which a kernel is made for a shape
            thunk()
    times: dict[str, list[float]] = {name: [] for name in thunks}
    for _ in range(5):
        for name, thunk in thunks.items():
            torch.cuda.synchronize()
            start, calls = time.perf_counter(), 0
            while time.perf_counter() - start < seconds / 5:
                for _ in range(10 if calls else 1):
                    thunk()
                calls += 10 if calls else 1
            torch.cuda.synchronize()
            times[name].append(1e6 * (time.perf_counter() - start) / calls)
    return times


def wall_between(thunks: dict[str, Thunk], seconds: float) -> dict[str, list[float]]:
    """Microseconds per call on the CPU in five rounds: call by call in turn, with another operation before each."""
    other = torch.randn(256, 1000)
    times: dict[str, list[float]] = {name: [] for name in thunks}
    for _ in range(6):  # the first round is thrown away
        calls: dict[str, list[float]] = {name: [] for name in thunks}
        end = time.perf_counter() + seconds / 5 * len(thunks)
        while time.perf_counter() < end or len(calls["base"]) < 5:
            for name, thunk in thunks.items():
                other.relu()
                start = time.perf_counter()
                thunk()
                calls[name].append(1e6 * (time.perf_counter() - start))
        for name, found in calls.items():
            times[name].append(sorted(found)[len(found) // 2])
    return {name: found[1:] for name, found in times.items()}


def data(rows: int, n: int, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, n, generator=generator).mul(2).to(device, dtype)
    y = torch.zeros(rows, n).scatter_(1, torch.randint(n, (rows, 5), generator=generator), 1.0).to(device)
    return x, y, torch.randint(n, (rows,), generator=generator).to(device)


def row(name: str, rows: int, n: int, times: dict[str, list[float]], against: str) -> dict[str, Any]:
    """Return a row of the table: the medians of both, their ratio, and the worst ratio of a round."""
    ours, base = (sorted(times[who])[2] for who in ("ours", "base"))
    return {
        "name": name,
        "rows": rows,
        "n": n,
        "us": round(ours, 1),
        "against_us": round(base, 1),
        "ratio": round(ours / base, 2),
        "worst": round(max(a / b for a, b in zip(times["ours"], times["base"], strict=True)), 2),
        "against": against,
    }


def eager(device: torch.device, seconds: float, compiled: bool) -> Iterator[dict[str, Any]]:
    """`lml` and `lml_loss` beside softmax, cross-entropy and BCE."""
    shapes = [(32, 100), (256, 1000)] if device.type == "cuda" else [(1, 100), (32, 1000), (256, 100), (256, 1000)]
    for shape in shapes:
        yield from eager_at(*shape, device, seconds, compiled)


def eager_at(rows: int, n: int, device: torch.device, seconds: float, compiled: bool) -> Iterator[dict[str, Any]]:
    make: Callable[..., Any] = torch.compile if compiled else lambda function: function
    torch.compiler.reset()  # or the second shape would be compiled for all shapes
    word = "compiled " if compiled else ""
    x, y, t = data(rows, n, device)
    z = x.clone().requires_grad_()
    lml, softmax = make(lambda x: ll.lml(x, 5)), make(lambda x: torch.softmax(x, -1))
    pairs: list[tuple[str, Thunk, Thunk, str]] = [
        ("lml", lambda: lml(x), lambda: softmax(x), "softmax"),
        ("lml, both ways", both(lml, z), both(softmax, z), "softmax, both ways"),
        (
            "lml_loss, both ways",
            both(make(lambda x: ll.lml_loss(x, t, 5)), z),
            both(make(lambda x: F.cross_entropy(x, t)), z),
            "cross_entropy, both ways",
        ),
        (
            "lml_loss multi-hot, both ways",
            both(make(lambda x: ll.lml_loss(x, y, 5, observed=0.5)), z),
            both(make(lambda x: F.binary_cross_entropy_with_logits(x, y)), z),
            "BCE, both ways",
        ),
    ]
    for name, ours, base, against in pairs:
        times = wall({"ours": ours, "base": base}, device, seconds)
        yield row(f"{word}{name}", rows, n, times, f"{word}{against}")


def events(device: torch.device) -> Iterator[dict[str, Any]]:
    """`lml_loss` beside cross-entropy on 64 million logits, both ways, by events around eager calls."""
    for n in (100, 1000, 4096, 32768, 131072, 1_000_000):
        rows = (1 << 26) // n
        z = torch.randn(rows, n, device=device, requires_grad=True)
        t = torch.randint(n, (rows,), device=device)
        thunks = {
            "ours": both(lambda x, t=t: ll.lml_loss(x, t, 5), z),
            "base": both(lambda x, t=t: F.cross_entropy(x, t), z),
        }
        times: dict[str, list[float]] = {name: [] for name in thunks}
        for thunk in thunks.values():
            for _ in range(5):
                thunk()
        for _ in range(5):
            for name, thunk in thunks.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda.synchronize()
                start.record()
                for _ in range(10):
                    thunk()
                end.record()
                torch.cuda.synchronize()
                times[name].append(100 * start.elapsed_time(end))
        yield row("lml_loss, both ways, by events", rows, n, times, "cross_entropy, both ways")
        del z, t, thunks


def half(device: torch.device, seconds: float) -> Iterator[dict[str, Any]]:
    """Half precision beside float32."""
    for dtype in (torch.bfloat16, torch.float16):
        x, y, t = data(256, 1000, device, dtype)
        calls: dict[str, Callable[[Tensor], Thunk]] = {
            "lml": lambda x: lambda: ll.lml(x, 5),
            "lml, both ways": lambda x: both(lambda x: ll.lml(x, 5), x),
            "lml_loss, both ways": lambda x: both(lambda x: ll.lml_loss(x, t, 5), x),  # noqa: B023
            "lml_loss multi-hot, both ways": lambda x: both(lambda x: ll.lml_loss(x, y, 5, observed=0.5), x),  # noqa: B023
        }
        for name, call in calls.items():
            leaves = (scores.clone().requires_grad_("both" in name) for scores in (x, x.float()))
            times = wall(dict(zip(("ours", "base"), map(call, leaves), strict=True)), device, seconds)
            yield row(f"{name}, {str(dtype)[6:]}", 256, 1000, times, f"{name}, float32")


def every_k(device: torch.device, seconds: float) -> Iterator[dict[str, Any]]:
    """`lml` beside softmax for small and large k, and for rows as trained networks and masks make them."""
    for rows, n in ((256, 100), (256, 1000), (64, 10_000)):
        x, _, _ = data(rows, n, device)
        for k in (1, n // 20, n // 2):
            times = wall({"ours": lambda: ll.lml(x, k), "base": lambda: torch.softmax(x, -1)}, device, seconds)  # noqa: B023
            yield row(f"lml, k = {k}", rows, n, times, "softmax")
        few, half = torch.arange(n, device=device) < 2, torch.rand_like(x) < 0.5
        kinds = {
            "two classes 20 above the others": x / 2 + 20 * few,
            "two classes 60 above the others": x / 2 + 60 * few,
            "half of the classes at -1e4": torch.where(half, -1e4, x),
            "half of the classes at -inf": torch.where(half, -torch.inf, x),
        }
        for name, scores in kinds.items():
            thunks = {
                "ours": functools.partial(ll.lml, scores, 2),
                "base": functools.partial(torch.softmax, scores, -1),
            }
            times = wall(thunks, device, seconds)
            yield row(f"lml, {name}", rows, n, times, "softmax")


def training_step(device: torch.device, seconds: float) -> Iterator[dict[str, Any]]:
    """A step of training of a network with two hidden layers, with `lml_loss` and with cross-entropy."""
    for n in (100, 1000, 10_000):
        x, t = torch.randn(256, 512, device=device), torch.randint(n, (256,), device=device)
        steps = [step(n, x, lambda z: ll.lml_loss(z, t, 5)), step(n, x, lambda z: F.cross_entropy(z, t))]  # noqa: B023
        times = wall(dict(zip(("ours", "base"), steps, strict=True)), device, 4 * seconds)
        yield row("training step, lml_loss", 256, n, times, "training step, cross_entropy")


def step(n: int, x: Tensor, loss: Callable[[Tensor], Tensor]) -> Thunk:
    torch.manual_seed(0)
    sizes = (512, 1024, 1024)
    layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(sizes[-1], n)).to(x.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def run() -> None:
        optimizer.zero_grad()
        loss(model(x)).backward()
        optimizer.step()

    return run


def in_onnxruntime(seconds: float) -> Iterator[dict[str, Any]]:
    """`lml` and softmax as ONNX files in onnxruntime, on as many threads as torch uses."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    for rows, n in ((1, 1000), (64, 1000)):
        x, _, _ = data(rows, n, torch.device("cpu"))
        thunks: dict[str, Thunk] = {}
        for name, module in {"ours": ll.LML(5), "base": nn.Softmax(-1)}.items():
            with tempfile.TemporaryDirectory() as folder:
                file = f"{folder}/model.onnx"
                torch.onnx.export(module, (x,), file, dynamo=True, verbose=False)
                session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
            given = {session.get_inputs()[0].name: x.numpy()}
            thunks[name] = lambda run=session.run, given=given: run(None, given)
        times = wall(thunks, torch.device("cpu"), seconds)
        yield row("lml in onnxruntime", rows, n, times, "softmax in onnxruntime")


def others(device: torch.device, seconds: float) -> Iterator[dict[str, Any]]:
    """Every other projection and loss, both ways, beside BCE."""
    x, y, t = data(256, 1000, device)
    z = x.requires_grad_()
    base = both(lambda x: F.binary_cross_entropy_with_logits(x, y), z)
    for name, function in OTHERS.items():
        ours = both(lambda x, f=function: f(x, y, t), z)
        times = wall({"ours": ours, "base": base}, device, seconds)
        yield row(f"{name}, both ways", 256, 1000, times, "BCE, both ways")


def on_device(rows: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """Every other projection and loss, both ways: the time of the device beside one copy of the logits for each way."""
    x, y, t = data(rows, 1000, device)
    z, upstream, copy = x.requires_grad_(), torch.randn_like(x), torch.empty_like(x)
    base = device_us(lambda: (copy.copy_(z.detach()), copy.copy_(upstream)))

    def ours(function: Callable[..., Tensor]) -> None:
        out = function(z, y, t)
        torch.autograd.grad(out, z, upstream if out.ndim else None)

    for name, function in (OTHERS | PROJECTIONS).items():
        times = {"ours": device_us(functools.partial(ours, function)), "base": base}
        yield row(f"{name}, both ways, on the device", rows, 1000, times, "two copies of the logits")


def device_us(thunk: Thunk) -> list[float]:
    """Microseconds of the device per call, in five rounds."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
        thunk()
    found = []
    for _ in range(5):
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as run:
            for _ in range(4):
                thunk()
            torch.cuda.synchronize()
        found.append(sum(event.self_device_time_total for event in run.key_averages()) / 4)
    return found


def first_calls(others: bool = False, at_once: int = 4) -> Iterator[dict[str, Any]]:
    """Seconds of a first call in a new process with an empty cache, both ways where there is a gradient.

    So many processes run at once.
    """
    if others:
        head = "from benchmarks.felt import OTHERS"
        cases = [(f"{name}, both ways", f"OTHERS[{name!r}](x, y, t)", True, *SHAPES[0]) for name in OTHERS]
    else:
        head = ""
        cases = [(name, *call, *shape) for name, call in COMMON.items() for shape in SHAPES]
        cases += [(f"{name}, both ways", call, True, *shape) for name, (call, *shape) in RARE.items()]  # type: ignore[arg-type]

    def seconds(case: tuple[str, str, bool, int, int, str]) -> float:
        _, call, grad, rows, n, dtype = case
        with tempfile.TemporaryDirectory() as cache:
            code = head + FIRST.format(rows=rows, n=n, dtype=dtype, call=call, grad=grad)
            env = {**os.environ, "TRITON_CACHE_DIR": cache, "CUDA_CACHE_PATH": cache}
            out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        return float(out.stdout)

    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        for (name, _, _, rows, n, dtype), found in zip(cases, pool.map(seconds, cases), strict=True):
            yield {"name": f"first call, {name}", "rows": rows, "n": n, "dtype": dtype, "s": round(found, 2)}


def many_sizes(device: torch.device, others: bool = False) -> Iterator[dict[str, Any]]:
    """Seconds for 500 different n between 2 and 5,000, forward and backward, with an empty cache."""
    sizes = random.Random(0).sample(range(2, 5001), 500)
    from lastlayer._triton import launch

    calls: dict[str, Callable[..., Tensor]] = {
        "lml": lambda x, y, t: ll.lml(x, 1.5).square().sum(),
        "lml_loss": lambda x, y, t: ll.lml_loss(x, t, 1.5),
    }
    dtypes = [torch.float32, torch.bfloat16]
    if others:  # k = 1, which the shortest rows have too
        calls = {
            "lml_at_most": lambda x, y, t: ll.lml_at_most(x, 1).square().sum(),
            "capped_sparsemax": lambda x, y, t: ll.capped_sparsemax(x, 1).square().sum(),
            "subset_marginals": lambda x, y, t: ll.subset_marginals(x, 1).square().sum(),
            "lml_fenchel_young_loss": lambda x, y, t: ll.lml_fenchel_young_loss(x, y),
            "smooth_topk_svm_loss": lambda x, y, t: ll.loss.smooth_topk_svm_loss(x, t, 1),
            "two_way_loss": lambda x, y, t: ll.two_way_loss(x, y),
            "asymmetric_loss": lambda x, y, t: ll.asymmetric_loss(x, y),
            "quasibinary_loss": lambda x, y, t: ll.loss.quasibinary_loss(x, y),
        }
        dtypes = [torch.float32]
    for name, call in calls.items():
        for dtype in dtypes:
            before, start = kernels(launch), time.perf_counter()
            for n in sizes:
                x = torch.randn(64, n, device=device, dtype=dtype, requires_grad=True)
                y = (x.detach() > 1).float() if others else x
                call(x, y, torch.zeros(64, dtype=torch.int64, device=device)).backward()
            torch.cuda.synchronize()
            seconds, made = time.perf_counter() - start, kernels(launch) - before
            yield {"name": f"500 sizes, {name}", "dtype": str(dtype)[6:], "s": round(seconds, 1), "kernels": made}


def kernels(launch: Any) -> int:
    """The number of kernels compiled so far, or loaded from the package."""
    return len({id(found[0]) for found in launch._compiled.values()})


def parts(device: torch.device, seconds: float) -> dict[str, Callable[[], Iterator[dict[str, Any]]]]:
    """Return what is measured on a device, by the name of the part."""
    found: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "eager": lambda: eager(device, seconds, False),
        "half": lambda: half(device, seconds),
        "others": lambda: others(device, seconds),
        "compiled": lambda: eager(device, seconds, True),
    }
    if device.type == "cuda":
        found |= {
            "events": lambda: events(device),
            "kernels": lambda: itertools.chain(on_device(256, device), on_device(8192, device)),
            "first": first_calls,
            "beginning": lambda: first_calls(True),
            "many": lambda: many_sizes(device),
            "lengths": lambda: many_sizes(device, True),
        }
    else:
        found |= {
            "every_k": lambda: every_k(device, seconds),
            "step": lambda: training_step(device, seconds),
            "onnx": lambda: in_onnxruntime(seconds),
        }
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parts", default="", metavar="PATTERN", help="only the parts whose name matches")
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds per measurement")
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    found: list[dict[str, Any]] = []
    for name, part in parts(device, options.seconds).items():
        if re.search(options.parts, name):
            for line in part():
                found.append(line)
                print(json.dumps(line), flush=True)
                if options.json:
                    record = {"machine": machine(device), "rows": found}
                    Path(options.json).write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
