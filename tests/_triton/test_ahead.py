"""Kernels that are compiled ahead in threads, with stand-ins for kernels: no GPU is needed."""

import threading

import pytest
import torch

pytest.importorskip("triton")

from lastlayer._triton import ahead


class Kernel:
    """A kernel that is compiled when it is told to."""

    def __init__(self, error=None):
        self.go, self.compiled, self.error = threading.Event(), False, error

    def compile(self, *args):
        assert self.go.wait(20)
        if self.error is not None:
            raise self.error
        self.compiled = True


@pytest.fixture
def launched(monkeypatch):
    """The kernels launched, and whether they were compiled by then."""
    found = []
    monkeypatch.setattr(ahead, "launch_one", lambda kernel, grid, *args, **options: found.append(kernel.compiled))
    monkeypatch.setattr(ahead, "_compiling", {})
    monkeypatch.setattr(ahead, "compile_early", lambda kernel, *given: kernel.compile(*given))
    return found


def test_a_launch_waits_for_its_own_kernel_only(launched):
    slow, other, x = Kernel(), Kernel(), torch.zeros(1)
    ahead.compile_ahead(ahead.Launch(slow, (1,), (x,), {"BLOCK": 8}))
    ahead.launch(other, (1,), x, BLOCK=8)
    ahead.launch(slow, (1,), x, BLOCK=16)  # another variant
    assert launched == [False, False]
    slow.go.set()
    ahead.launch(slow, (1,), x, BLOCK=8)
    assert launched == [False, False, True]
    assert not ahead._compiling


def test_an_error_is_left_to_the_launch(launched):
    broken = Kernel(RuntimeError("no compiler"))
    broken.go.set()
    ahead.compile_ahead(ahead.Launch(broken, (1,), (torch.zeros(1),), {}))
    ahead.launch(broken, (1,), torch.zeros(1))
    assert launched == [False]


def test_a_kind_of_call_is_new_once(monkeypatch):
    monkeypatch.setattr(ahead, "_met", set())
    monkeypatch.setattr(ahead, "INTERPRETED", False)
    assert [ahead.is_new(("loss", 1024)), ahead.is_new(("loss", 1024)), ahead.is_new(("loss", 256))] == [
        True,
        False,
        True,
    ]
