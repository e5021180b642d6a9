"""Capacity of class-sharded training: memory, bytes sent and time of one step, computed before anything runs.

The collectives are those of the sharded search and losses, message by message; a test compares them with what four
processes send. Times are estimates from the given rates, or from rates measured with ``--measure``. The command is
``lastlayer plan``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Any, Literal, NamedTuple

BYTES = {"float32": 4, "bfloat16": 2}
STATES = {"sgd": 0, "momentum": 1, "adam": 2}  # float32 numbers that the optimizer keeps per weight
LIST_COPIES = 4  # of the lists of the largest logits, in float32: sorted, with their positions
TILE = 1 << 27  # bytes of one block of logits on a GPU, as in the fused linear loss
PRODUCTS = 3  # the logits, the gradients of features and weight; and logits that are computed again
TOUCHES = 6  # numbers read and written per logit, counted in the code; one more if it is computed again
WORK = 4  # bytes of the numbers that a row is reduced in


class Collective(NamedTuple):
    """One message: the number of bytes that each rank contributes."""

    kind: Literal["all_reduce", "all_gather"]
    bytes: int

    def sent(self, ranks: int) -> float:
        """Return the bytes that leave one rank of a ring."""
        if self.kind == "all_gather":
            return self.bytes * (ranks - 1)
        return 2 * self.bytes * (ranks - 1) / ranks


def start_traffic(rows: int, k: float, ranks: int, bytes_each: int = 4, known: bool = True) -> list[Collective]:
    """Return the messages that find two order statistics: one gather or digit counts; `known`: k is a Python number."""
    from lastlayer.shard import digit_bits, gathers

    limit = math.floor(k) + 1
    if known and gathers(limit, ranks, bytes_each):
        return [Collective("all_gather", rows * limit * bytes_each)]
    bits = digit_bits(rows, 2)
    counts = Collective("all_reduce", rows * 2 * ((1 << bits) - 1) * 4)
    return [counts] * (8 * bytes_each // bits)


def lml_traffic(
    rows: int,
    k: float,
    ranks: int,
    *,
    passes: int,
    bytes_each: int = 4,
    known: bool = True,
    backward: bool = True,
    warm: bool = False,
) -> list[Collective]:
    """Return the collectives of ``lml(logits, k, shard=...)`` both passes; `warm` starts from known thresholds."""
    one = rows * bytes_each
    if warm:  # the first pass comes with the counts
        traffic = [Collective("all_reduce", 8 * one), *[Collective("all_reduce", 5 * one)] * (passes - 1)]
    else:
        traffic = [Collective("all_reduce", 3 * one), *start_traffic(rows, k, ranks, bytes_each, known)]
        traffic += [Collective("all_reduce", 5 * one)] * passes
    if backward:
        traffic += [Collective("all_reduce", one), Collective("all_reduce", 3 * one)]
    return traffic


def lml_loss_traffic(
    rows: int, k: float, ranks: int, *, passes: int, bytes_each: int = 4, warm: bool = False
) -> list[Collective]:
    """Return the collectives of ``lml_loss(logits, target, k, shard=...)`` and its backward pass."""
    one = rows * bytes_each
    traffic = lml_traffic(rows, k, ranks, passes=passes, bytes_each=bytes_each, backward=False, warm=warm)
    traffic += [Collective("all_reduce", one)] * 2  # the loss, and the number of labels
    return [*traffic, Collective("all_reduce", one), Collective("all_reduce", 2 * one)]


def linear_traffic(
    rows: int,
    in_features: int,
    k: float,
    ranks: int,
    *,
    passes: int,
    bytes_each: int = 4,
    feature_bytes: int = 4,
    warm: bool = False,
) -> list[Collective]:
    """Return the collectives of ``linear_lml_loss(..., shard=...)``, both passes; k <= 1 % of a rank's classes."""
    one = rows * bytes_each
    return [
        Collective("all_gather", 6 * one),
        *([] if warm else start_traffic(rows, k, ranks, bytes_each)),
        *[Collective("all_reduce", 7 * one)] * passes,
        Collective("all_reduce", 3 * one),
        Collective("all_reduce", rows * in_features * feature_bytes),
    ]


@dataclass(frozen=True)
class Problem:
    """The training problem and the machine."""

    labels: int
    features: int
    rows: int
    devices: int
    k: float = 5
    labels_per_row: int = 16
    dtype: str = "bfloat16"
    optimizer: str = "adam"
    passes: int = 3
    memory: float = 80e9  # bytes per device
    flops: float = 4e14  # operations per second, in matrix products
    bandwidth: float = 3e12  # bytes per second, of device memory
    link: float = 5e10  # bytes per second that leave a device
    latency: float = 3e-5  # seconds per collective


@dataclass(frozen=True)
class Plan:
    """The result, for one device and one step."""

    classes_per_device: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    memory_bytes: int
    materialised_bytes: int
    fits: bool
    largest_labels: int
    collectives: int
    wire_bytes: int
    product_seconds: float
    block_seconds: float
    wire_seconds: float
    step_seconds: float


def plan(problem: Problem) -> Plan:
    """Compute the memory, traffic and time of one training step with ``ShardedLinear.loss``.

    Example:
        >>> planned = plan(Problem(labels=100_000_000, features=768, rows=4096, devices=64))
        >>> planned.classes_per_device, planned.fits
        (1562500, True)
    """
    p = problem
    size = BYTES[p.dtype]
    classes = -(-p.labels // p.devices)
    weights = classes * (p.features + 1) * size
    activations = _activations(p, classes)
    memory = _memory(p, classes)
    messages = linear_traffic(p.rows, p.features, p.k, p.devices, passes=p.passes, feature_bytes=size)
    messages = messages if p.devices > 1 else []
    wire = sum(m.sent(p.devices) for m in messages)
    logits = p.rows * classes
    again = _computed_again(p, classes)
    products = 2 * logits * p.features * (PRODUCTS + again) / p.flops
    blocks = logits * (TOUCHES + again) * size / p.bandwidth
    sending = wire / p.link + len(messages) * p.latency
    return Plan(
        classes_per_device=classes,
        weight_bytes=weights,
        gradient_bytes=weights,
        optimizer_bytes=classes * (p.features + 1) * 4 * STATES[p.optimizer],
        activation_bytes=activations,
        memory_bytes=memory,
        materialised_bytes=2 * logits * size,
        fits=memory <= p.memory,
        largest_labels=_largest(p) * p.devices,
        collectives=len(messages),
        wire_bytes=round(wire),
        product_seconds=products,
        block_seconds=blocks,
        wire_seconds=sending,
        step_seconds=products + blocks + sending,
    )


def _activations(p: Problem, classes: int) -> int:
    """Bytes of the rows, their lists of the largest logits, and one block; or of logits and gradient if they fit.

    The latter are there before the gradient of the weight, which has its own bytes in the plan.
    """
    from lastlayer.loss._scan import list_sizes

    size = BYTES[p.dtype]
    logits = p.rows * classes * size
    labels = p.labels_per_row * (8 + 4 * WORK) + 32 * WORK
    row = p.features * (3 * size + WORK) + labels
    if p.devices == 1 and logits <= TILE:
        return logits + max(logits - classes * p.features * size + p.rows * labels, p.rows * row)
    lists = LIST_COPIES * min(classes, list_sizes(classes, math.floor(p.k) + 1)[2])
    return p.rows * (row + lists * WORK) + min(max(TILE, 256 * p.rows * size), logits)


def _computed_again(p: Problem, classes: int) -> float:
    """The share of the logits that fit neither in a block nor in the memory of the weight's gradient."""
    others = max(0, classes - TILE // (p.rows * BYTES[p.dtype]))
    return others / classes * max(0.0, 1 - p.features / p.rows)


def _memory(p: Problem, classes: int) -> int:
    """Bytes on one device: weight, gradient and optimizer state per class, with the bias, and the activations."""
    return classes * (p.features + 1) * (2 * BYTES[p.dtype] + 4 * STATES[p.optimizer]) + _activations(p, classes)


def _largest(p: Problem) -> int:
    """The largest number of classes that one device can hold."""
    low, high = 0, 1 + int(p.memory)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _memory(p, middle) <= p.memory else (low, middle)
    return low


def measured(problem: Problem) -> Problem:
    """Replace the rates of matrix products and copies by those of this machine; the link stays as given."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    side = 4096 if device.type == "cuda" else 512
    dtype = getattr(torch, problem.dtype) if device.type == "cuda" else torch.float32
    a = torch.randn(side, side, device=device).to(dtype)
    source = torch.empty(side * side * 4, device=device)
    target = torch.empty_like(source)
    return replace(
        problem,
        flops=2 * side**3 / _seconds(lambda: a @ a, device),
        bandwidth=2 * source.nbytes / _seconds(lambda: target.copy_(source), device),
    )


def _seconds(function: Callable[[], Any], device: Any, repeats: int = 10) -> float:
    import torch

    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = perf_counter()
    for _ in range(repeats):
        function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (perf_counter() - began) / repeats


def text(problem: Problem, planned: Plan) -> str:
    """Return the plan as a table."""
    p = problem
    lines = [
        f"{p.labels:,} labels x {p.features} features, {p.rows:,} rows per step, {p.devices} device(s), "
        f"{p.dtype}, {p.optimizer}, k = {p.k:g}",
        "",
        f"classes per device       {planned.classes_per_device:>16,}",
        f"memory per device        {_bytes(planned.memory_bytes):>16}   of {_bytes(p.memory)}: "
        + ("fits" if planned.fits else "DOES NOT FIT"),
        f"  weight                 {_bytes(planned.weight_bytes):>16}",
        f"  gradient               {_bytes(planned.gradient_bytes):>16}",
        f"  optimizer              {_bytes(planned.optimizer_bytes):>16}",
        f"  rows and one block     {_bytes(planned.activation_bytes):>16}   logits and gradient would be "
        f"{_bytes(planned.materialised_bytes)}",
        f"collectives per step     {planned.collectives:>16,}",
        f"sent per device and step {_bytes(planned.wire_bytes):>16}",
        f"time per step            {_time(planned.step_seconds):>16}   products {_time(planned.product_seconds)}, "
        f"blocks {_time(planned.block_seconds)}, wire {_time(planned.wire_seconds)}",
        f"largest that fits        {planned.largest_labels:>16,}   labels on these devices",
    ]
    return "\n".join(lines)


def _bytes(value: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.3g} TB" if abs(value) < 1000 else f"{value:,.0f} TB"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def parser(add_to: argparse.ArgumentParser | None = None) -> argparse.ArgumentParser:
    """Return a parser for the options of ``lastlayer plan``, or add them to a given one."""
    options = add_to or argparse.ArgumentParser("lastlayer plan", description=(__doc__ or "").splitlines()[0])
    options.add_argument(
        "--labels", type=_count, required=True, help="number of classes on all devices together, e.g. 1e8"
    )
    options.add_argument("--features", type=_count, required=True, help="length of a feature vector")
    options.add_argument("--rows", type=_count, required=True, help="rows per step (of one data-parallel replica)")
    options.add_argument("--devices", type=_count, required=True, help="devices that share the classes")
    options.add_argument(
        "--k", type=_positive, default=5.0, help="expected labels per row, the k of the loss (default: 5)"
    )
    options.add_argument("--labels-per-row", type=_count, default=16, help="width of the index lists (default: 16)")
    options.add_argument(
        "--labels-a-row", dest="labels_per_row", type=_count, help=argparse.SUPPRESS
    )  # its name in 0.1
    options.add_argument(
        "--dtype", choices=sorted(BYTES), default="bfloat16", help="type of weights and features (default: bfloat16)"
    )
    options.add_argument("--optimizer", choices=sorted(STATES), default="adam", help="default: adam")
    options.add_argument("--passes", type=_count, default=3, help="passes of the threshold search (default: 3)")
    options.add_argument("--memory", type=_positive, default=80.0, help="GB per device (default: 80)")
    options.add_argument(
        "--tflops", type=_positive, default=400.0, help="10^12 operations per second in matrix products (default: 400)"
    )
    options.add_argument("--bandwidth", type=_positive, default=3000.0, help="GB/s of device memory (default: 3000)")
    options.add_argument("--link", type=_positive, default=50.0, help="GB/s that leave a device (default: 50)")
    options.add_argument("--latency", type=_positive, default=30.0, help="microseconds per collective (default: 30)")
    options.add_argument(
        "--measure", action="store_true", help="measure matrix products and memory bandwidth on this machine"
    )
    options.add_argument("--json", action="store_true", help="print the numbers as JSON")
    return options


def _count(word: str) -> int:
    value = float(word)
    if not (1 <= value < math.inf) or value != int(value):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {word}")
    return int(value)


def _positive(word: str) -> float:
    value = float(word)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be positive, got {word}")
    return value


def report(options: argparse.Namespace) -> str:
    """Return the output of ``lastlayer plan`` for parsed options."""
    problem = Problem(
        labels=options.labels,
        features=options.features,
        rows=options.rows,
        devices=options.devices,
        k=options.k,
        labels_per_row=options.labels_per_row,
        dtype=options.dtype,
        optimizer=options.optimizer,
        passes=options.passes,
        memory=1e9 * options.memory,
        flops=1e12 * options.tflops,
        bandwidth=1e9 * options.bandwidth,
        link=1e9 * options.link,
        latency=1e-6 * options.latency,
    )
    if options.measure:
        problem = measured(problem)
    planned = plan(problem)
    if options.json:
        return json.dumps({"problem": asdict(problem), "plan": asdict(planned)}, indent=2)
    return text(problem, planned)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``lastlayer plan``; return the exit status."""
    sys.stdout.write(report(parser().parse_args(argv)) + "\n")
    return 0
