"""The launcher past Triton's binder, with a kernel that only writes down how it is called."""

import ctypes
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", minversion="3.6")

from lastlayer._triton import INTERPRETED, loaded
from lastlayer._triton import launch as launcher


class Kernel:
    """Stands for a kernel of Triton and for what it compiles to."""

    arg_names = ("x", "y", "n", "scale", "BLOCK", "MASKED")

    def __init__(self):
        self.compiled, self.launched = [], []

    def warmup(self, *args, grid, **options):
        self.compiled.append((grid, args, options))
        return Compiled(self)


class Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self, kernel):
        self.kernel = kernel

    def launch_metadata(self, grid, stream, *args):
        return None

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *args):
        assert (stream, function, metadata) == ("stream", self.function, self.packed_metadata)
        self.kernel.launched.append(((x, y, z), args))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launcher, "_DIRECT", True)
    monkeypatch.setattr(loaded, "AVAILABLE", False)
    monkeypatch.setattr(launcher, "_compiled", {})
    monkeypatch.setattr(launcher, "_ready", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # that of a tensor on the CPU
    monkeypatch.setattr(launcher, "_current", lambda: -1)
    monkeypatch.setattr(launcher, "_stream", lambda device: "stream")
    return Kernel()


def call(kernel, x, n=5, scale=0.5, warps=4, **constants):
    return launcher.launch(
        kernel, (3,), x, None, n, scale, num_warps=warps, **{"MASKED": False, "BLOCK": 64, **constants}
    )


def test_compiled_once_and_called_in_the_order_of_the_signature(kernel):
    x, other = torch.zeros(8), torch.ones(8)
    call(kernel, x)
    call(kernel, other, n=7, scale=2.0)
    assert kernel.compiled == [((3,), (x, None, 5, 0.5), {"num_warps": 4, "MASKED": False, "BLOCK": 64})]
    assert kernel.launched == [
        ((3, 1, 1), (x.data_ptr(), None, 5, 0.5, 64, False)),
        ((3, 1, 1), (other.data_ptr(), None, 7, 2.0, 64, False)),
    ]


def test_what_triton_compiles_anew_for(kernel):
    values = torch.zeros(64)
    cases = [
        {"x": values},
        {"x": values[1:]},  # starts at no multiple of 16 bytes
        {"x": values.double()},
        {"x": values, "n": 1},
        {"x": values, "n": 32},
        {"x": values, "n": 2**31 + 1},
        {"x": values, "n": 2**32},
        {"x": values, "scale": None},
        {"x": values, "warps": 8},
        {"x": values, "BLOCK": 128},
        {"x": values, "MASKED": True},
    ]
    for _ in range(2):
        for case in cases:
            call(kernel, **case)
    assert (len(kernel.compiled), len(kernel.launched)) == (len(cases), 2 * len(cases))


def test_kernels_do_not_share_what_is_compiled(kernel):
    another = Kernel()
    for one in (kernel, another, kernel, another):
        call(one, torch.zeros(8))
    assert [len(one.compiled) for one in (kernel, another)] == [1, 1]
    assert [len(one.launched) for one in (kernel, another)] == [2, 2]


def test_launched_again_by_a_short_key(kernel):
    x = torch.zeros(8)
    assert not launcher.relaunch(("key",), -1, 7, x.data_ptr(), None, 5, 0.5)
    launcher.prepare(("key",), call(kernel, x), 3)
    assert launcher.relaunch(("key",), -1, 7, x.data_ptr(), None, 9, 0.25)
    assert kernel.launched[1:] == [((3, 1, 1), (x.data_ptr(), None, 9, 0.25, 64, False))]
    assert not launcher.relaunch(("key",), 1, 7, x.data_ptr(), None, 9, 0.25)  # another device is the current one
    assert not launcher.relaunch(("other",), -1, 7, x.data_ptr(), None, 9, 0.25)


def test_profilers_are_told(kernel, monkeypatch):
    said = []
    monkeypatch.setattr(Compiled, "launch_metadata", lambda self, *given: "metadata of the launch")
    monkeypatch.setattr(Compiled, "run", lambda self, *given: said.append(given[6:9]))
    hooks = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=[]), launch_exit_hook=None)
    monkeypatch.setattr(launcher, "_runtime", hooks)
    call(kernel, torch.zeros(8))
    hooks.launch_enter_hook = SimpleNamespace(calls=[print])
    call(kernel, torch.zeros(8))
    assert said == [(None, None, None), ("metadata of the launch", hooks.launch_enter_hook, None)]


class Launcher:
    """Stands for the launcher of torch."""

    def __init__(self):
        self.loaded, self.launched = [], []

    def _load_kernel(self, *given):
        self.loaded.append(given)
        return 77, 32, 0  # the function, registers, spilled ones

    def _launch_kernel(self, *given):
        self.launched.append(given)


def compiled_kernel(said):
    """What Triton says of a kernel of `Kernel`, as compiled for a pointer, None and two numbers."""
    metadata = SimpleNamespace(name="name", shared=80, num_warps=4, num_ctas=1, global_scratch_size=0)
    types = {"x": "*fp32", "y": "constexpr", "n": "i32", "scale": "fp32", "BLOCK": "constexpr", "MASKED": "constexpr"}
    return SimpleNamespace(
        metadata=metadata,
        src=SimpleNamespace(signature=types),
        metadata_group={"name.json": "name.json", "name.cubin": "name.cubin"},
        function="function",
        packed_metadata="metadata",
        launch_metadata=lambda *given: "metadata of the launch",
        run=lambda *given: said.append(given[9:]),
    )


@pytest.fixture
def torch_loads(kernel, monkeypatch):
    """The launcher of torch, the kernels compiled for it, and what is launched by Triton."""
    found, compiled, said = Launcher(), [], []

    def compile_for(target, kernel, args, options):
        compiled.append((target, args, options))
        return compiled_kernel(said)

    monkeypatch.setattr(loaded, "AVAILABLE", True)
    monkeypatch.setattr(loaded, "_launcher", found)
    monkeypatch.setattr(loaded, "compile_for", compile_for)
    monkeypatch.setattr(loaded, "target_of", lambda device: "target")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(loaded, "stored_key", lambda *given: (None, False))
    monkeypatch.setattr(launcher, "_early", {})
    monkeypatch.setattr(launcher, "_slower", {})
    return found, compiled, said


def test_torch_loads_and_launches(kernel, torch_loads):
    found, compiled, _ = torch_loads
    x = torch.zeros(8)
    for n in (5, 7):
        call(kernel, x, n=n)
    assert compiled == [("target", (x, None, 5, 0.5), {"num_warps": 4, "MASKED": False, "BLOCK": 64})]
    assert found.loaded == [("name.cubin", "name", 80, -1)]
    one, other = ((77, 3, 1, 1, 4, 80, "OifO", (x.data_ptr(), n, 0.5, None), "stream") for n in (5, 7))
    assert found.launched == [one, other]
    assert not kernel.compiled


def test_what_a_thread_has_compiled_is_loaded_when_it_is_launched(kernel, torch_loads):
    found, compiled, _ = torch_loads
    x = torch.zeros(8)
    launcher.compile_early(kernel, (x, None, 5, 0.5), {"num_warps": 4, "MASKED": False, "BLOCK": 64})
    assert (len(compiled), found.loaded) == (1, [])
    call(kernel, x)
    assert (len(compiled), len(found.launched)) == (1, 1)


def test_profilers_are_told_of_what_torch_loads(kernel, torch_loads, monkeypatch):
    found, _, said = torch_loads
    call(kernel, torch.zeros(8))
    hooks = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=[print]), launch_exit_hook=None)
    monkeypatch.setattr(launcher, "_runtime", hooks)
    x = torch.zeros(8)
    call(kernel, x)
    assert len(found.launched) == 1
    assert said == [(x.data_ptr(), None, 5, 0.5, 64, False)]


def test_triton_launches_what_torch_cannot(kernel, torch_loads, monkeypatch):
    found, _, said = torch_loads
    cluster = compiled_kernel(said)
    cluster.metadata.num_ctas = 2
    monkeypatch.setattr(loaded, "compile_for", lambda *given: cluster)
    call(kernel, torch.zeros(8))
    assert len(kernel.compiled) == len(kernel.launched) == 1
    assert not found.launched


def test_what_comes_with_the_package_is_not_compiled(kernel, torch_loads, monkeypatch):
    found, compiled, _ = torch_loads
    types = ("*fp32", "constexpr", "i32", "fp32", "constexpr", "constexpr", "scratch")
    one = loaded.store.Kernel("name", 4, 80, types, b"text")
    monkeypatch.setattr(loaded, "stored_key", lambda *given: ("key", True))
    monkeypatch.setattr(loaded.store, "load", lambda kernel, key: one)
    monkeypatch.setattr(loaded, "_stored", {})
    x = torch.zeros(8)
    launcher.compile_early(kernel, (x, None, 5, 0.5), {"num_warps": 4, "MASKED": False, "BLOCK": 64})
    call(kernel, x)
    call(kernel, x, n=16)  # another pattern, by the same kernel
    assert not compiled
    assert not launcher._early
    assert len(found.loaded) == 1
    hooks = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=[print]), launch_exit_hook=None)
    monkeypatch.setattr(launcher, "_runtime", hooks)  # a profiler, which such a kernel has nothing to tell
    call(kernel, x)
    told = [(77, 3, 1, 1, 4, 80, "OifO", (x.data_ptr(), n, 0.5, None), "stream") for n in (5, 16, 5)]
    assert found.launched == told


def test_a_kernel_that_assumes_less_is_replaced(kernel, torch_loads, monkeypatch):
    found, compiled, _ = torch_loads
    types = ("*fp32", "constexpr", "i32", "fp32", "constexpr", "constexpr")
    one = loaded.store.Kernel("name", 4, 80, types, b"text")
    monkeypatch.setattr(loaded, "stored_key", lambda *given: ("key", False))
    monkeypatch.setattr(loaded.store, "load", lambda kernel, key: one)
    monkeypatch.setattr(launcher, "in_thread", lambda target, *args: target(*args))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(loaded, "_stored", {})
    x = torch.zeros(1000)
    for _ in range(launcher.PATIENCE):
        assert not compiled
        held = call(kernel, x, n=16)
    assert len(compiled) == 1
    assert compiled[0][1][0].numel() < 100  # the compiler is not given the logits
    launcher.prepare(("short",), held, 3)
    assert not launcher.relaunch(("short",), -1, 7, x.data_ptr(), None, 16, 0.5)  # it would not be replaced
    assert len(found.loaded) == 1
    held = call(kernel, x, n=16)
    assert len(found.loaded) == 2
    call(kernel, x, n=16)
    launcher.prepare(("short",), held, 3)
    assert launcher.relaunch(("short",), -1, 7, x.data_ptr(), None, 16, 0.5)
    assert (len(compiled), len(found.loaded), launcher._slower) == (1, 2, {})


@pytest.mark.usefixtures("torch_loads")
def test_what_is_at_hand(kernel, monkeypatch):
    x, options = torch.zeros(8), {"num_warps": 4, "MASKED": False, "BLOCK": 64}
    monkeypatch.setattr(loaded, "serves", lambda device: True)
    assert not launcher.at_hand(kernel, (x, None, 5, 0.5), options)
    launcher.compile_early(kernel, (x, None, 5, 0.5), options)
    assert launcher.at_hand(kernel, (x, None, 5, 0.5), options)
    assert not launcher.at_hand(kernel, (x, None, 16, 0.5), options)
    call(kernel, x)
    assert launcher.at_hand(kernel, (x, None, 5, 0.5), options)
    monkeypatch.setattr(loaded, "stored_key", lambda *given: ("key", False))
    assert launcher.at_hand(kernel, (x, None, 16, 0.5), options)
    monkeypatch.setattr(loaded, "stored_key", lambda *given: (None, False))
    monkeypatch.setattr(loaded, "serves", lambda device: False)  # then there is nothing to choose
    assert launcher.at_hand(kernel, (x, None, 16, 0.5), options)


TOGETHER = {"launch_cooperative_grid": True}


class Driver:
    """Stands for the CUDA driver, which launches programs that all run at once, or answers with an error."""

    types = ("*fp32", "constexpr", "i32", "fp32", "constexpr", "constexpr", "scratch", "scratch")
    kinds = (ctypes.c_uint64, ctypes.c_int32, ctypes.c_float, ctypes.c_uint64, ctypes.c_uint64)

    def __init__(self):
        self.launched, self.error = [], 0
        signature = [ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.c_void_p]
        self.function = ctypes.CFUNCTYPE(ctypes.c_int, *signature)(self.start)

    def start(self, function, x, y, z, threads, rows, layers, shared, stream, arguments):
        if not self.error:
            places = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p * len(self.kinds))).contents
            values = [kind.from_address(place).value for kind, place in zip(self.kinds, places, strict=True)]
            self.launched.append((function, (x, y, z), (threads, rows, layers), shared, stream, values))
        return self.error


@pytest.fixture
def driver(torch_loads, monkeypatch):
    """A driver, and a kernel for it that comes with the package."""
    found = Driver()
    one = loaded.store.Kernel("name", 4, 80, Driver.types, b"text")
    monkeypatch.setattr(loaded.driver, "launcher", lambda: found.function)
    monkeypatch.setattr(loaded, "_refusals", [])
    monkeypatch.setattr(loaded, "stored_key", lambda *given: ("key", True))
    monkeypatch.setattr(loaded.store, "load", lambda kernel, key: one)
    monkeypatch.setattr(launcher, "_stream", lambda device: 99)
    monkeypatch.setattr(Compiled, "run", lambda self, *given: self.kernel.launched.append((given[:3], given[9:])))
    monkeypatch.setattr(loaded, "_stored", {})
    return found


def test_the_driver_launches_programs_that_wait_for_each_other(kernel, torch_loads, driver):
    found, compiled, _ = torch_loads
    x = torch.zeros(8)
    assert loaded.takes(TOGETHER)
    call(kernel, x, n=-7, **TOGETHER)
    held = call(kernel, x, n=-9, scale=1e39, **TOGETHER)  # infinite in float32, as for the other launchers
    launcher.prepare(("key",), held, 3)
    assert launcher.relaunch(("key",), -1, 7, x.data_ptr(), None, 5, 0.25)
    numbers = ((-7, 0.5), (-9, math.inf), (5, 0.25))
    told = [(77, (3, 1, 1), (128, 1, 1), 80, 99, [x.data_ptr(), *some, 0, 0]) for some in numbers]
    assert driver.launched == told
    assert len(found.loaded) == 1
    assert not compiled
    assert not found.launched
    assert not kernel.compiled


def test_triton_launches_what_the_driver_refuses(kernel, torch_loads, driver):
    x = torch.zeros(8)
    launcher.prepare(("key",), call(kernel, x, **TOGETHER), 3)
    driver.error = 720  # more programs than can run at once, or whatever it may be
    assert not launcher.relaunch(("key",), -1, 7, x.data_ptr(), None, 5, 0.5)
    assert not launcher.relaunch(("key",), -1, 7, x.data_ptr(), None, 5, 0.5)  # as it is forgotten
    options = {"num_warps": 4, "MASKED": False, "BLOCK": 64, **TOGETHER}
    assert launcher.launch_compiled(kernel, (3,), (x, None, 5, 0.5), options) is None
    assert loaded._refusals == [720, 720]
    assert not kernel.launched
    for n in (5, 7):
        call(kernel, x, n=n, **TOGETHER)
    assert kernel.launched == [((3, 1, 1), (x.data_ptr(), None, n, 0.5, 64, False)) for n in (5, 7)]
    assert len(kernel.compiled) == 1
    assert not loaded.takes(TOGETHER)
    assert loaded.takes({})
    call(kernel, torch.zeros(8).double(), **TOGETHER)  # another variant, for which the driver is not asked
    assert len(kernel.compiled) == 2
    assert len(driver.launched) == 1


def test_triton_launches_such_programs_where_there_is_no_driver(kernel, torch_loads, driver, monkeypatch):
    found, compiled, _ = torch_loads
    monkeypatch.setattr(loaded.driver, "launcher", lambda: None)
    call(kernel, torch.zeros(8), **TOGETHER)
    assert not compiled
    assert not found.loaded
    assert len(kernel.launched) == 1


def test_arguments_are_not_mixed_between_threads(torch_loads, driver):
    """The driver reads arguments while other threads run."""
    import threading

    together = loaded.Together(loaded.store.Kernel("name", 4, 80, Driver.types, b""), 77)

    def launch(i):
        for _ in range(50):
            together.launch(1, 1, 1, i, (i, None, i, float(i), 64, False))

    threads = [threading.Thread(target=launch, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(driver.launched) == 200
    assert all(values == [stream or 0] * 3 + [0, 0] for *_, stream, values in driver.launched)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_a_kernel_is_made_stored_and_found(monkeypatch, tmp_path):
    """A real kernel, for a GPU that is not there: Triton's driver is not asked for."""
    from lastlayer._triton import build, lml_loss, store

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(store, "FOLDER", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    loaded.target_of.cache_clear()
    options, kernel = {"BLOCK": 1024, "num_warps": 8}, lml_loss._over_sum
    one = {"module": kernel.fn.__module__, "name": "_over_sum", "args": [["float32", True], 64], "options": options}
    one |= {"general": False}
    made = build.make(one)
    assert made.types[:3] == ("*fp32", "i32", "constexpr")
    assert made.ptx.startswith(b".version 8.0\n.target sm_80")
    weight = torch.zeros(96)
    assert loaded.stored_key(0, kernel, (weight, 96), options)[0] is None
    key = loaded.key_of(build.TARGET, kernel, (weight, 64), options)
    store.write(store.file_of(kernel), {key: made})
    assert store.load(kernel, key) == made
    assert loaded.stored_key(0, kernel, (weight, 96), options) == (key, True)
    shifted = weight[1:]  # starts at no multiple of 16 bytes
    assert loaded.stored_key(0, kernel, (shifted, 96), options)[0] is None
    assert loaded.stored_key(0, kernel, (weight, 96), {**options, "num_warps": 4})[0] is None
    plain = loaded.key_of(build.TARGET, kernel, (weight, 64), options, general=True)
    store.write(store.file_of(kernel), {key: made, plain: build.make({**one, "general": True})})
    assert loaded.stored_key(0, kernel, (shifted, 96), options) == (plain, True)
    assert loaded.stored_key(0, kernel, (weight, 96), options) == (key, True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    loaded.serves.cache_clear()
    assert loaded.stored_key(0, kernel, (weight, 96), options)[0] is None
    for known in (loaded.serves, loaded.target_of):
        known.cache_clear()
    store.forget()


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_a_kernel_without_assumptions_takes_every_number():
    """Numbers that are 1 or multiples of 16 are parameters like others."""
    from lastlayer._triton import build, lml_loss

    options = {"STEPS": 2, "BLOCK": 64, "SPAN": 1, "num_warps": 1}
    one = {"module": lml_loss.__name__, "name": "_scale", "args": [["float32", True], ["float32", True], 64, 16, 1]}
    one |= {"options": options}
    exact, general = (build.make({**one, "general": general}) for general in (False, True))
    assert exact.types[:5] == ("*fp32", "*fp32", "i32", "i32", "constexpr")
    assert general.types[:5] == ("*fp32", "*fp32", "i32", "i32", "i32")
    assert general.ptx.count(b".param .") == exact.ptx.count(b".param .") + 1


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has other kernels")
def test_all_that_a_kernel_uses_is_in_its_fingerprint(monkeypatch):
    from lastlayer._triton import device, lml, lml_loss, store

    def told(kernel):
        store._fingerprints.clear()
        return store.fingerprint(kernel)

    kernels = [lml_loss._over_sum, lml._resident]
    before = [told(kernel) for kernel in kernels]
    assert before == [told(kernel) for kernel in kernels]
    monkeypatch.setattr(lml_loss, "_share_of", lml_loss._share)
    assert [told(kernel) == old for kernel, old in zip(kernels, before, strict=True)] == [False, True]
    monkeypatch.setattr(device, "LN2", type(device.LN2)(0.7))  # which a function uses that the kernel calls
    assert told(lml._resident) != before[1]
    monkeypatch.undo()
    monkeypatch.setattr(device, "ROWS_FIRST", type(device.LN2)(not device.ROWS_FIRST.value))
    assert told(lml._resident) == before[1]  # as Triton of another version
    store._fingerprints.clear()


def test_python_waits_for_a_compiling_thread_whoever_has_started_it():
    """A thread of autograd counts as a daemon, and so would those that it starts: ended in the compiler, they abort."""
    import _thread
    import threading

    found, done = [], threading.Event()

    def backward():
        thread = launcher.in_thread(lambda: None)
        found.append((threading.current_thread().daemon, thread.daemon))
        thread.join()
        done.set()

    _thread.start_new_thread(backward, ())  # as one that Python has not made
    assert done.wait(20)
    assert found == [(True, False)]


def test_a_kernel_is_loaded_by_one_thread(kernel, torch_loads, monkeypatch):
    import threading

    found, _, _ = torch_loads
    one = loaded.store.Kernel("name", 4, 80, Driver.types, b"text")
    begun, go, results = threading.Event(), threading.Event(), []

    def load(kernel, key):
        begun.set()
        assert go.wait(20)
        return one

    monkeypatch.setattr(loaded, "_stored", {})
    monkeypatch.setattr(loaded, "stored_key", lambda *given: ("key", True))
    monkeypatch.setattr(loaded.store, "load", load)
    given = kernel, (torch.zeros(8), None, 5, 0.5), {"num_warps": 4, "MASKED": False, "BLOCK": 64}
    threads = [threading.Thread(target=lambda: results.append(launcher.load_early(*given))) for _ in range(3)]
    for thread in threads:
        thread.start()
        assert begun.wait(20)
    go.set()
    for thread in threads:
        thread.join()
    call(kernel, torch.zeros(8))
    assert results == [True] * 3
    assert len(found.loaded) == len(found.launched) == 1


def test_a_kernel_in_the_code_of_the_gpu_comes_first(kernel, torch_loads, monkeypatch):
    found, _, _ = torch_loads
    one, given, refused = loaded.store.Kernel("name", 4, 80, Driver.types, b"text"), [], []
    capability = [(9, 0)]

    def load(image, name, device):
        given.append(image)
        if image in refused:
            raise RuntimeError("cuModuleLoadData of the CUDA driver: error 200")
        return 77

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    monkeypatch.setattr(loaded.driver, "load", load)
    monkeypatch.setattr(loaded.store, "load", lambda kernel, key: one)
    monkeypatch.setattr(loaded.store, "load_native", lambda kernel, key: b"code")
    assert loaded._load_stored(kernel, "key", 0, False).function == 77
    refused.append(b"code")
    loaded._load_stored(kernel, "key", 0, False)
    assert given == [b"code", b"code", b"text"]
    capability[0] = (8, 0)
    loaded._load_stored(kernel, "key", 0, False)
    assert given[3:] == [b"text"]
    assert not found.loaded
    refused.append(b"text")
    loaded._load_stored(kernel, "key", 0, False)
    assert [given[1:] for given in found.loaded] == [("name", 80, 0)]  # by torch, from a file


def test_what_cannot_be_loaded_is_compiled(kernel, torch_loads, monkeypatch):
    _, compiled, _ = torch_loads
    monkeypatch.setattr(loaded, "_stored", {})
    monkeypatch.setattr(loaded, "stored_key", lambda *given: ("key", True))

    def load(kernel, key):
        raise OSError("no such file")

    monkeypatch.setattr(loaded.store, "load", load)
    for n in (5, 16):
        call(kernel, torch.zeros(8), n=n)
    assert len(compiled) == 2


def test_triton_is_not_read_before_it_compiles():
    """It hashes itself, which takes as long as the rest of a first call where kernels come with the package."""
    code = """
import torch
torch.cuda.is_available = lambda: True
torch._C._StaticCudaLauncher = object()
from lastlayer._triton import launch
from lastlayer._triton.launch import triton
assert not launch._starting
hashed = []
triton.runtime.cache.triton_key = lambda: hashed.append(1)
launch.wait_for_start()
print(hashed)
"""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[1]"


def test_a_thread_that_comes_late_goes_on_with_the_slower_kernel(kernel, monkeypatch):
    """Another thread may have the faster one by then: it has been compiled, and is being loaded."""
    x = torch.zeros(8)
    held = call(kernel, x)
    key = next(iter(launcher._compiled))
    launcher._compiled[key] = (*held[:3], True)
    monkeypatch.setattr(launcher, "_slower", {})
    assert call(kernel, x)[0] is held[0]
    assert launcher._compiled[key][3]
    assert len(kernel.launched) == 2
