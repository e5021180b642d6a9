"""The launcher past Triton's binder, with a kernel that only writes down how it is called."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from lastlayer._triton import launch as launcher


class Kernel:
    """Stands for a kernel of Triton and for what it compiles to."""

    arg_names = ("x", "y", "n", "scale", "BLOCK", "MASKED")

    def __init__(self):
        self.compiled, self.launched = [], []

    def __getitem__(self, grid):
        def first_time(*args, **options):
            self.compiled.append((grid, args, options))
            return Compiled(self)

        return first_time


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
    ((grid, args),) = kernel.launched
    assert grid == (3, 1, 1)
    assert args[0] == other.data_ptr()
    assert args[1:] == (None, 7, 2.0, 64, False)


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
    assert len(kernel.compiled) == len(kernel.launched) == len(cases)


def test_kernels_do_not_share_what_is_compiled(kernel):
    another = Kernel()
    for one in (kernel, another, kernel, another):
        call(one, torch.zeros(8))
    assert [len(one.compiled) for one in (kernel, another)] == [1, 1]
    assert [len(one.launched) for one in (kernel, another)] == [1, 1]


def test_launched_again_by_a_short_key(kernel):
    x = torch.zeros(8)
    assert not launcher.relaunch(("key",), -1, 7, x.data_ptr(), None, 5, 0.5)
    launcher.prepare(("key",), call(kernel, x), 3)
    assert launcher.relaunch(("key",), -1, 7, x.data_ptr(), None, 9, 0.25)
    assert kernel.launched == [((3, 1, 1), (x.data_ptr(), None, 9, 0.25, 64, False))]
    assert not launcher.relaunch(("key",), 1, 7, x.data_ptr(), None, 9, 0.25)  # another device is the current one
    assert not launcher.relaunch(("other",), -1, 7, x.data_ptr(), None, 9, 0.25)


def test_profilers_are_told(kernel, monkeypatch):
    said = []
    monkeypatch.setattr(Compiled, "launch_metadata", lambda self, *given: "metadata of the launch")
    monkeypatch.setattr(Compiled, "run", lambda self, *given: said.append(given[6:9]))
    hooks = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=[]), launch_exit_hook=None)
    monkeypatch.setattr(launcher, "_runtime", hooks)
    for _ in range(2):
        call(kernel, torch.zeros(8))
    hooks.launch_enter_hook = SimpleNamespace(calls=[print])
    call(kernel, torch.zeros(8))
    assert said == [(None, None, None), ("metadata of the launch", hooks.launch_enter_hook, None)]
