"""Make the kernels that come with the package: ``python -m lastlayer._triton.build``. No GPU is needed.

In Triton's interpreter the calls below write down which kernels they launch, instead of running them. Those that are
not there yet are then compiled for the oldest GPU that the package serves.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import argparse
import concurrent.futures
import importlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget

import lastlayer as ll
from lastlayer._triton import loaded, plan, store

TYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = (64, 1040)  # few, and so many that the rows with a label are counted by a kernel of their own
LENGTHS = 5  # of those in `plan.CLASSES`, for the calls that are rarer
TARGET = GPUTarget("cuda", 10 * store.LEAST[0] + store.LEAST[1], 32)
PTX = 80  # of CUDA 12.0: the oldest driver that takes the kernels

Call = Callable[[Tensor, Tensor, Tensor], Any]  # of logits, a multi-hot target, and one class per row
CALLS: dict[str, Call] = {
    "lml": lambda x, y, t: ll.lml(x, 1.5),
    "lml_loss": lambda x, y, t: ll.lml_loss(x, t, 1.5),
    "lml_loss, multi-hot and observed": lambda x, y, t: ll.lml_loss(x, y, 1.5, observed=0.5),
}
RARER: dict[str, Call] = {  # for few rows
    "lml_loss, multi-hot": lambda x, y, t: ll.lml_loss(x, y, 1.5),
    "log_lml": lambda x, y, t: ll.log_lml(x, 1.5),
    "lml_threshold": lambda x, y, t: ll.lml_threshold(x, 1.5),
    "lml, mask": lambda x, y, t: ll.lml(x, 1.5, mask=y > 0),
    "lml, weight": lambda x, y, t: ll.lml(x, 1.5, weight=y[0].contiguous()),
    "lml, weight and upper": lambda x, y, t: ll.lml(x, 1.5, weight=y[0].contiguous(), upper=y[0].contiguous()),
    "lml_at_most": lambda x, y, t: ll.lml_at_most(x, 1.5),
    "capped_softmax": lambda x, y, t: ll.capped_softmax(x, 5),
    "capped_sparsemax": lambda x, y, t: ll.capped_sparsemax(x, 5),
    "subset_marginals": lambda x, y, t: ll.subset_marginals(x, 5),
    "lml_fenchel_young_loss": lambda x, y, t: ll.lml_fenchel_young_loss(x, y, 5),
    "truncated_entropy_loss": lambda x, y, t: ll.loss.truncated_entropy_loss(x, t, 5),
    "smooth_topk_svm_loss": lambda x, y, t: ll.loss.smooth_topk_svm_loss(x, t, 5),
    "two_way_loss": lambda x, y, t: ll.two_way_loss(x, y),
    "asymmetric_loss": lambda x, y, t: ll.asymmetric_loss(x, y),
    "binary_loss": lambda x, y, t: ll.binary_loss(x, y),
    "warp_loss": lambda x, y, t: ll.loss.warp_loss(x, y),
    "quasibinary_loss": lambda x, y, t: ll.loss.quasibinary_loss(x, y),
}


def record() -> list[dict[str, Any]]:
    """Return which kernels the calls launch, with what arguments and constants."""
    from lastlayer._triton import launch

    found: dict[str, dict[str, Any]] = {}

    def note(key: Any, kernel: Any, device: int, args: tuple[Any, ...], options: dict[str, Any]) -> object:
        one = {"module": kernel.fn.__module__, "name": kernel.fn.__name__, "options": options}
        one["args"] = [_told(value) for value in args]
        found[json.dumps(one)] = one
        return object()

    launch._DIRECT = True
    launch._load, launch._run = note, lambda *given: None
    launch._current = torch.cuda.current_device = lambda: -1  # that of a tensor on the CPU
    plan.PATIENCE = 3
    cases = [*itertools.product(CALLS.values(), TYPES, (*plan.CLASSES, 2 * plan.LONGEST), ROWS)]
    cases += itertools.product(RARER.values(), TYPES, plan.CLASSES[:LENGTHS], ROWS[:1])
    for call, dtype, longest, rows in cases:
        for n in (longest, longest - 1):  # a multiple of 16 and none
            plan._seen.clear()
            launch._compiled.clear()
            launch._ready.clear()
            x = torch.empty(rows, n, dtype=dtype, requires_grad=True)
            out = call(x, torch.ones(rows, n), torch.zeros(rows, dtype=torch.int64))
            out.backward(torch.ones_like(out))
    return list(found.values())


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
    compiled = loaded.compile_for(TARGET, kernel, args, {**options, "ptx_version": PTX})
    lines = (line for line in compiled.asm["ptx"].split("\n") if line and not line.lstrip().startswith("//"))
    return loaded.described(compiled)._replace(ptx="\n".join(lines).encode() + b"\n\0")


def launched() -> dict[Path, dict[str, dict[str, Any]]]:
    """Return the kernels that the calls launch, by file and key."""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "lastlayer._triton.build", "--record"]
    found: dict[Path, dict[str, dict[str, Any]]] = {}
    for one in json.loads(subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True).stdout):
        kernel, args, options = _bound(one)
        found.setdefault(store.file_of(kernel), {})[loaded.key_of(TARGET, kernel, args, options)] = one
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2, help="processes that compile")
    parser.add_argument("--record", action="store_true", help="print which kernels there are, from the interpreter")
    options = parser.parse_args(argv)
    if options.record:
        print(json.dumps(record()))
        return 0
    files = launched()
    made = {path: {key: kernel for key, kernel in store.read(path).items() if key in files[path]} for path in files}
    missing = [(path, key) for path, kernels in files.items() for key in kernels if key not in made[path]]
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    with concurrent.futures.ProcessPoolExecutor(options.jobs) as pool:
        compiled = pool.map(make, [files[path][key] for path, key in missing])
        for (path, key), kernel in zip(missing, compiled, strict=True):
            made[path][key] = kernel
    for old in store.FOLDER.glob("*.xz"):
        old.unlink()
    for path, kernels in made.items():
        store.write(path, kernels)
        print(f"{path.name}: {len(kernels)} kernels, {path.stat().st_size // 1024} kB")
    print(f"{len(missing)} kernels made, {sum(map(len, made.values())) - len(missing)} kept")
    return 0


if __name__ == "__main__":
    sys.exit(main())
