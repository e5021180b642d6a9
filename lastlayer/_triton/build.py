"""Make the kernels that come with the package: ``python -m lastlayer._triton.build``. No GPU is needed.

In Triton's interpreter the calls below write down which kernels they launch, instead of running them. Those that are
not there yet are then compiled for the oldest GPU that the package serves; the largest are translated for one kind.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import argparse
import collections
import concurrent.futures
import functools
import importlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

import lastlayer as ll
from lastlayer._triton import loaded, plan, store

TYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOAT = TYPES[:1]
ROWS = (64, 1040)  # few, and so many that the rows with a label are counted by a kernel of their own
LONG_ROWS = (8, 192)  # few, which are split over programs, and many
SHORT, LONG = plan.CLASSES[:5], (*plan.CLASSES[5:], 2 * plan.LONGEST)
TARGET = GPUTarget("cuda", 10 * store.LEAST[0] + store.LEAST[1], 32)
PTX = 80  # of CUDA 12.0: the oldest driver that takes the kernels


class Batch:
    """What a call is made of: logits, a multi-hot target, and one class per row."""

    def __init__(self, rows: int, n: int, dtype: torch.dtype) -> None:
        self.x = torch.empty(rows, n, dtype=dtype, requires_grad=True)
        self.y, self.t = torch.ones(rows, n), torch.zeros(rows, dtype=torch.int64)
        self.w, self.each = torch.ones(n), torch.ones(rows)

    @property
    def lists(self) -> Tensor:
        """Several labels per row."""
        return torch.stack([self.t, self.t - 1], -1)


Call = Callable[[Batch], Any]
CALLS: dict[str, Call] = {  # their own kernels, for every type and any number of rows
    "lml": lambda b: ll.lml(b.x, 1.5),
    "lml_loss": lambda b: ll.lml_loss(b.x, b.t, 1.5),
    "lml_loss, multi-hot and observed": lambda b: ll.lml_loss(b.x, b.y, 1.5, observed=0.5),
}
RARER: dict[str, Call] = {  # their own kernels, for few rows
    "lml_loss, multi-hot": lambda b: ll.lml_loss(b.x, b.y, 1.5),
    "log_lml": lambda b: ll.log_lml(b.x, 1.5),
    "lml, mask": lambda b: ll.lml(b.x, 1.5, mask=b.y > 0),
    "lml, weight": lambda b: ll.lml(b.x, 1.5, weight=b.w),
    "lml, weight and upper": lambda b: ll.lml(b.x, 1.5, weight=b.w, upper=b.w),
    "lml_at_most": lambda b: ll.lml_at_most(b.x, 1.5),
}
# Every other call is brought to one of these forms, if its own kernels are not there. These are for float32.
GENERAL: dict[str, Call] = {
    "lml": lambda b: ll.lml(b.x, 1.5),
    "log_lml": lambda b: ll.log_lml(b.x, 1.5),
    "lml_threshold": lambda b: ll.lml_threshold(b.x, 1.5),
    "lml, weight": lambda b: ll.lml(b.x, 1.5, weight=b.w),
    "lml, weights with gradients": lambda b: ll.lml(b.x, 1.5, weight=b.w.clone().requires_grad_()),
    "lml, weight of rows": lambda b: ll.lml(b.x, 1.5, weight=b.y),
    "lml, weights of rows with gradients": lambda b: ll.lml(b.x, 1.5, weight=b.y.clone().requires_grad_()),
    "lml_at_most, weight": lambda b: ll.lml_at_most(b.x, 1.5, weight=b.w),
    "lml_at_most, weights with gradients": lambda b: ll.lml_at_most(b.x, 1.5, weight=b.w.clone().requires_grad_()),
    "lml_at_most, weight of rows": lambda b: ll.lml_at_most(b.x, 1.5, weight=b.y),
}
for _name, _target in {
    "one class": lambda b: b.t, "lists": lambda b: b.lists, "multi-hot": lambda b: b.y,
}.items():  # fmt: skip
    for _observed in (0.0, 0.5):
        for _reduction in ("mean", "none"):
            GENERAL[f"lml_loss, {_name}, {_observed}, {_reduction}"] = functools.partial(
                lambda b, target, observed, reduction: ll.lml_loss(
                    b.x, target(b), 1.5, observed=observed, reduction=reduction
                ),
                target=_target, observed=_observed, reduction=_reduction,
            )  # fmt: skip
MULTI_HOT: dict[str, Call] = {  # of other types, whose rows are counted as they are
    f"lml_loss, {str(_dtype)[6:]}, {_observed}": functools.partial(
        lambda b, dtype, observed: ll.lml_loss(b.x, b.y.to(dtype), 1.5, observed=observed),
        dtype=_dtype,
        observed=_observed,
    )
    for _dtype in (torch.bool, torch.int8, torch.bfloat16, torch.float16, torch.float64)
    for _observed in (0.0, 0.5)
}
# Losses and projections of `fused`, whose kernels are compiled for few lengths and serve any number of rows.
SIZES = (64, 256, 1024, 4096, 16384)
FUSED: dict[str, Call] = {
    "lml_at_most, k per row": lambda b: ll.lml_at_most(b.x, b.each),
    "lml_at_most, mask": lambda b: ll.lml_at_most(b.x, 1.5, mask=b.y > 0),
    "subset_marginals": lambda b: ll.subset_marginals(b.x, 5),
    "subset_marginals, many": lambda b: ll.subset_marginals(b.x, 12),
    "topk_distillation_loss": lambda b: ll.loss.topk_distillation_loss(b.x, b.x.detach() + 1, 5),
}
for _name in ("capped_softmax", "capped_sparsemax"):
    _function = getattr(ll, _name)
    FUSED |= {
        _name: functools.partial(lambda b, f: f(b.x, 5), f=_function),
        f"{_name}, k per row": functools.partial(lambda b, f: f(b.x, b.each), f=_function),
        f"{_name}, mask": functools.partial(lambda b, f: f(b.x, 1.5, mask=b.y > 0), f=_function),
    }
LOSSES: dict[str, Callable[..., Any]] = {
    "lml_fenchel_young_loss": lambda x, y, **more: ll.lml_fenchel_young_loss(x, y, 5, **more),
    "truncated_entropy_loss": lambda x, y, **more: ll.loss.truncated_entropy_loss(x, y, 5, **more),
    "smooth_topk_svm_loss": lambda x, y, **more: ll.loss.smooth_topk_svm_loss(x, y, 5, **more),
    "two_way_loss": ll.two_way_loss,
    "asymmetric_loss": ll.asymmetric_loss,
    "binary_loss": ll.binary_loss,
    "warp_loss": ll.loss.warp_loss,
    "quasibinary_loss": ll.loss.quasibinary_loss,
    "multihot_softmax_loss": ll.loss.multihot_softmax_loss,
}
TARGETS: dict[str, Call] = {
    "multi-hot": lambda b: b.y,
    "boolean": lambda b: b.y > 0,
    "lists": lambda b: b.lists,
}
FORMS: dict[str, Callable[[Batch], dict[str, Any]]] = {
    "": lambda b: {},
    "per row": lambda b: {"reduction": "none"},
    "sum": lambda b: {"reduction": "sum"},
    "sample_weight": lambda b: {"sample_weight": b.each},
}
WEIGHTED: dict[str, Callable[[Batch], dict[str, Any]]] = {
    "weight": lambda b: {"weight": b.w},
    "pos_weight": lambda b: {"pos_weight": b.w},
}
_NO_WEIGHT = ("lml_fenchel_young_loss", "two_way_loss", "quasibinary_loss")
for _name, _loss in LOSSES.items():
    for (_kind, _target), (_form, _more) in itertools.product(TARGETS.items(), (FORMS | WEIGHTED).items()):
        if (_form != "weight" or _name not in _NO_WEIGHT) and (
            _form != "pos_weight" or _name in ("asymmetric_loss", "binary_loss")
        ):
            FUSED[", ".join(filter(None, (_name, _kind, _form)))] = functools.partial(
                lambda b, loss, target, more: loss(b.x, target(b), **more(b)), loss=_loss, target=_target, more=_more
            )


class Recorder:
    """Writes down which kernels calls launch. In a process of its own: what it replaces is not put back."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, Any]] = {}
        self.general = False  # to be made without assumptions, whatever the form of a call
        launch, self.ahead, fused = (
            cast(Any, importlib.import_module(f"lastlayer._triton.{name}")) for name in ("launch", "ahead", "fused")
        )
        self.known = (plan._seen, launch._compiled, launch._ready, self.ahead._absent, fused._own)
        launch._DIRECT = True
        launch._load, launch._run = self._note, lambda *given: None
        launch._current = torch.cuda.current_device = lambda: -1  # that of a tensor on the CPU
        plan.PATIENCE = 3

    def _note(self, key: Any, kernel: Any, device: int, args: tuple[Any, ...], options: dict[str, Any]) -> object:
        one = {"module": kernel.fn.__module__, "name": kernel.fn.__name__, "options": options}
        one["args"], one["general"] = [_told(value) for value in args], plan.in_general_form() or self.general
        self.found[json.dumps(one)] = one
        return object()

    def at_hand(self, are: Callable[..., bool]) -> None:
        """Have calls find their own kernels at hand, or not and take their general form."""
        self.ahead._provided = lambda x: not plan.in_general_form()
        self.ahead._has_room = lambda x: True
        self.ahead.at_hand = are

    def first(self) -> None:
        """Have the next call be a first one."""
        for known in self.known:
            known.clear()

    def take(self, calls: dict[str, Call], types: Any, lengths: Any, rows: Any, less: tuple[int, ...] = (0, 1)) -> None:
        """Make calls, for lengths that are multiples of 16 and for lengths that are not."""
        for call, dtype, longest, count, fewer in itertools.product(calls.values(), types, lengths, rows, less):
            self.first()
            out = call(Batch(count, longest - fewer, dtype))
            out.backward(torch.ones_like(out))


def record() -> list[dict[str, Any]]:
    """Return which kernels come with the package, with what arguments and constants."""
    recorder = Recorder()
    take = recorder.take
    take(CALLS, TYPES, SHORT, ROWS)
    take(CALLS, TYPES, LONG, LONG_ROWS)
    take(RARER, TYPES, SHORT, ROWS[:1])
    take(FUSED, FLOAT, SIZES, ROWS[:1])
    take({name: call for name, call in FUSED.items() if name.startswith("lml_at_most")}, TYPES[1:], SIZES, ROWS[:1])
    several = {name: call for name, call in FUSED.items() if name.endswith(("multi-hot", "multi-hot, sum"))}
    take(several, FLOAT, SIZES[:1], (512, 1040))
    summed = {f"quasibinary_loss, {name}": FUSED[f"quasibinary_loss, {name}"] for name in TARGETS}
    take(summed, FLOAT, (64, 1024, 4096), (512, 1040))
    recorder.at_hand(lambda *given: False)
    take(GENERAL, FLOAT, (*SHORT, *LONG[-1:]), LONG_ROWS[:1], (0,))
    take(GENERAL, FLOAT, LONG[-1:], LONG_ROWS[1:], (0,))
    take(MULTI_HOT, FLOAT, SHORT[:3], ROWS, (0,))
    take(FUSED, FLOAT, LONG[-2:-1], LONG_ROWS[:1])  # rows that are too long for some of the kernels
    recorder.general = True
    _of_layers()
    _of_matrices(recorder)
    return list(recorder.found.values())


def launched_by(calls: list[Callable[[], Any]], recorded: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return which kernels each of some first calls launches where those that were recorded are at hand."""

    def case(module: str, name: str, args: list[Any], options: dict[str, Any], general: bool) -> str:
        types = [told[0] if isinstance(told, list) else type(told).__name__ for told in args]
        # Of an argument that is 1 a kernel is compiled for itself.
        ones = [not general and type(told) is int and told == 1 for told in args]
        return json.dumps((module, name, types, ones, sorted(options.items())))

    known = {case(one["module"], one["name"], one["args"], one["options"], one["general"]) for one in recorded}

    def at_hand(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
        given = (kernel.fn.__module__, kernel.fn.__name__, [_told(value) for value in args], options)
        return case(*given, True) in known or case(*given, False) in known

    recorder = Recorder()
    recorder.at_hand(at_hand)
    found = []
    for call in calls:
        recorder.first()
        recorder.found.clear()
        out = call()
        if out.requires_grad:
            out.backward(torch.ones_like(out))
        found.append(list(recorder.found.values()))
    return found


def _of_layers() -> None:
    """Call the loss of a linear layer: blocks of any size, lists of few and many labels, several depths of lists."""
    from lastlayer.loss import _scan

    _scan.TILE["cpu"] = 1 << 14
    cases = itertools.product(TYPES, (2_000, 40_000, 100_000, 200_000, 600_000), (1.5, 50.0), (1, 2, 9), (0.0, 0.5))
    for dtype, n, k, labels, observed in cases:
        if n > 40_000 and (k, labels, observed) != (1.5, 1, 0.0):
            continue
        for rows in (8, 2304) if n == 2_000 else (8,):
            features = torch.zeros(rows, 4, dtype=dtype, requires_grad=True)
            weight = torch.zeros(n, 4, dtype=dtype, requires_grad=True)
            target = torch.arange(labels).expand(rows, labels)
            ll.linear_lml_loss(features, weight, target, k, observed=observed).backward()
            ll.linear_lml_loss(features, weight, target, k, observed=observed, reduction="sum").backward()
    with torch.no_grad():  # so many features that they are split into parts
        ll.linear_lml_loss(torch.zeros(128, 32), torch.zeros(2_000, 32), torch.zeros(128, dtype=torch.int64), 1.5)


def _of_matrices(recorder: Recorder) -> None:
    """Call the balanced assignment in its general form, for every width."""
    balanced: Any = importlib.import_module("lastlayer._triton.balanced")
    balanced._TOGETHER = {"launch_cooperative_grid": True}
    balanced._Answer.wait = lambda self, device: 0
    recorder.at_hand(lambda *given: False)
    width = balanced.WIDEST
    while width >= 32:
        recorder.first()
        ll.lml_balanced(torch.zeros(64, width), 1.5)
        width //= 2


def _told(value: Any) -> Any:
    if isinstance(value, Tensor):
        return [str(value.dtype).removeprefix("torch."), value.data_ptr() % 16 == 0]
    return value


def _like(told: Any) -> Any:
    """An argument like the one that was written down."""
    if isinstance(told, list):
        dtype, aligned = told
        return torch.zeros(32, dtype=getattr(torch, dtype))[0 if aligned else 1 :]
    return told


def _bound(one: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return a kernel that was written down, with arguments and constants for it."""
    kernel = getattr(importlib.import_module(one["module"]), one["name"])
    return kernel, tuple(_like(told) for told in one["args"]), one["options"]


def make(one: dict[str, Any]) -> store.Kernel:
    """Compile a kernel that was written down."""
    kernel, args, options = _bound(one)
    compiled = loaded.compile_for(TARGET, kernel, args, {**options, "ptx_version": PTX}, general=one["general"])
    lines = (line for line in compiled.asm["ptx"].split("\n") if line and not line.lstrip().startswith("//"))
    return loaded.described(compiled)._replace(ptx="\n".join(lines).encode() + b"\n\0")


def translated(one: store.Kernel) -> store.Kernel:
    """Translate a kernel for the GPUs of `store.NATIVE`, as their driver would."""
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_bytes(one.ptx.removesuffix(b"\0"))
        major, minor = store.NATIVE
        subprocess.run([ptxas, f"-arch=sm_{major}{minor}", "-o", target, source], check=True)
        return one._replace(ptx=target.read_bytes())


def translate(path: Path, kernels: dict[str, store.Kernel]) -> None:
    """Write the large ones of some kernels in translated form, and keep those that are there."""
    native = store.native_of(path)
    known = store.read(native)
    found = {
        key: known[key] if key in known else translated(one)
        for key, one in kernels.items()
        if len(one.ptx) > store.LARGE
    }
    if found:
        store.write(native, found)
    else:
        native.unlink(missing_ok=True)


def launched() -> dict[Path, dict[str, dict[str, Any]]]:
    """Return the kernels that the calls launch, by file and key."""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "lastlayer._triton.build", "--record"]
    found: dict[Path, dict[str, dict[str, Any]]] = {}
    for one in json.loads(subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True).stdout):
        kernel, args, options = _bound(one)
        key = loaded.key_of(TARGET, kernel, args, options, general=one["general"])
        found.setdefault(store.file_of(kernel), {})[key] = one
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2, help="processes that compile")
    parser.add_argument("--record", action="store_true", help="print which kernels there are, from the interpreter")
    options = parser.parse_args(argv)
    if options.record:
        print(json.dumps(record()))
        return 0
    files, start = launched(), time.monotonic()
    made = {path: {key: kernel for key, kernel in store.read(path).items() if key in files[path]} for path in files}
    missing = [(path, key) for path, kernels in files.items() for key in kernels if key not in made[path]]
    for old in set(store.FOLDER.glob("*.xz")) - set(files):
        old.unlink()
        store.native_of(old).unlink(missing_ok=True)
    left = collections.Counter(path for path, _ in missing)
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    with concurrent.futures.ProcessPoolExecutor(options.jobs) as pool:
        compiled = pool.map(make, [files[path][key] for path, key in missing])
        for path in files:  # each is written when it is complete, so that nothing is made twice
            for _ in range(left[path]):
                _, key = missing.pop(0)
                made[path][key] = next(compiled)
            store.write(path, made[path])
            translate(path, made[path])
            size, seconds = path.stat().st_size // 1024, time.monotonic() - start
            print(f"{path.name}: {len(made[path])} kernels, {size} kB, after {seconds:.0f} s", flush=True)
    total = sum(map(len, made.values()))
    print(f"{sum(left.values())} kernels made, {total - sum(left.values())} kept")
    return 0


if __name__ == "__main__":
    sys.exit(main())
