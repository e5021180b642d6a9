"""The kernels that come with the package."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", minversion="3.6")
from lastlayer._triton import INTERPRETED, store

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter has other kernels")


def test_each_file_holds_variants_of_one_kernel():
    files = sorted(store.FOLDER.glob("*.xz"))
    assert files
    for path in files:
        module, name, _ = path.name.split(".")
        for kernel in store.read(path).values():
            assert kernel.name == name
            assert kernel.ptx.startswith(b".version 8.0\n.target sm_80\n")
            head = kernel.ptx.split(b".entry ", 1)[1].split(b")", 1)[0]  # a function beside it has parameters, too
            assert head.count(b".param .") == sum(kind != "constexpr" for kind in kernel.types), module


def test_large_kernels_come_translated_too():
    files = {path.name: store.read(path) for path in store.FOLDER.glob("*.xz")}
    large = {name: {key for key, one in some.items() if len(one.ptx) > store.LARGE} for name, some in files.items()}
    natives = {path.name: store.read(path) for path in store.FOLDER.glob("*/*.xz")}
    assert {name: set(some) for name, some in natives.items()} == {name: keys for name, keys in large.items() if keys}
    for name, some in natives.items():
        for key, one in some.items():
            assert one.ptx.startswith(b"\x7fELF")
            assert one._replace(ptx=b"") == files[name][key]._replace(ptx=b"")


def test_a_file_is_read_as_it_was_written(tmp_path):
    text = b".reg .b32 %%r<9>;\nadd.s32 %%r%d, %%r2, %%r10;\nld.global [%%rd3+16], %%p1, %%clock64, %%tid.x;\n\0"
    kernels = {
        f"{i:024}D-1": store.Kernel("name", i, 2, ("*fp32", "i32"), text % i) for i in range(2 * store.GROUP + 1)
    }
    store.write(tmp_path / "some.xz", kernels)
    assert store.read(tmp_path / "some.xz") == kernels
    assert len(store._index(tmp_path / "some.xz")[1]) == 3
    code = {
        "a" * 24: store.Kernel("name", 4, 2, ("*fp32", "i32"), b"\x7fELF%r+5 %r5 \0 %rd7")
    }  # which is left as it is
    store.write(store.native_of(tmp_path / "some.xz"), code)
    assert store.read(store.native_of(tmp_path / "some.xz")) == code


def test_the_variant_that_assumes_most_of_what_is_so(monkeypatch):
    head, other = "a" * 24, "b" * 24
    index = dict.fromkeys([head + "---", head + "D--", head + "D-1", head + "DD-", other + "---"])
    monkeypatch.setattr(store, "file_of", lambda kernel: kernel)
    monkeypatch.setattr(store, "_index", lambda path: (index, []))
    best = {"D-1": "D-1", "DD1": "D-1", "DDD": "DD-", "D--": "D--", "-D1": "---"}
    assert {asked: store.find(None, head + asked) for asked in best} == {a: head + found for a, found in best.items()}
    assert store.find(None, "c" * 24 + "---") is None


COVER = """
import importlib, json, torch
import lastlayer as ll
from benchmarks.felt import OTHERS, RARE
from lastlayer._triton import build
from lastlayer.loss import _scan
recorded = build.record()

def call(text, rows, n, dtype):
    def make():
        few = 32 if "linear" in text else rows if rows * n <= 1 << 22 else 8
        _scan.TILE["cpu"] = 1 << (14 if "linear" in text else 20)  # bytes of logits beyond which they are not held
        x, layer = (torch.zeros(size, dtype=getattr(torch, dtype), requires_grad=True) for size in ((few, n), (n, 64)))
        t, y, w, k = torch.zeros(few, dtype=torch.int64), torch.ones(few, n), torch.ones(n), torch.full((few,), 5.0)
        lists = torch.arange(3).repeat(few, 1)
        return eval(text, {**globals(), **locals()})
    return make

others = {name: (f"OTHERS[{name!r}](x, y, t)", 256, 1000, "float32") for name in OTHERS}
names = [*others, *RARE]
print(json.dumps((recorded, names, build.launched_by([call(*(others | RARE)[name]) for name in names], recorded))))
"""


def test_the_documented_calls_are_covered():
    """A first call of each kind in the benchmark, and of the other losses and projections, compiles nothing."""
    from lastlayer._triton import build, loaded

    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", COVER]
    out = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True).stdout
    recorded, names, found = json.loads(out)
    made = {}
    for one in recorded:
        kernel, args, options = build._bound(one)
        key = loaded.key_of(build.TARGET, kernel, args, options, general=one["general"])
        made.setdefault(store.file_of(kernel), {})[key] = None
    for name, launches in zip(names, found, strict=True):
        assert launches or name in ("log_lml, weights", "lml_threshold, weights"), name  # which are plain torch
        for one in launches:
            kernel, args, options = build._bound(one)
            key = loaded.key_of(build.TARGET, kernel, args, options)
            assert store.best(made.get(store.file_of(kernel), {}), key), (name, one)


@pytest.mark.slow
def test_they_are_made_from_the_present_source():
    from lastlayer._triton import build

    wanted = build.launched()
    assert {path.name for path in wanted} == {path.name for path in store.FOLDER.glob("*.xz")}, "run `make kernels`"
    for path, kernels in wanted.items():
        assert set(kernels) == set(store.read(path)), f"{path.name} is out of date: run `make kernels`"
