"""Kernels that are compiled ahead in threads, with stand-ins for kernels: no GPU is needed."""

import threading

import pytest
import torch

pytest.importorskip("triton", minversion="3.6")

from lastlayer._triton import ahead, loaded


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


class Wanted:
    """Stands for a kernel of `launch.at_hand`."""

    arg_names = ("x", "n", "R")


@pytest.fixture
def asked(monkeypatch):
    """The kernels that are at hand, and those that are compiled meanwhile."""
    there, made = set(), []

    def compile_meanwhile(key, kernel, *given):
        made.append(kernel)
        return threading.Thread()  # which has ended

    monkeypatch.setattr(ahead, "_provided", lambda x: True)
    monkeypatch.setattr(ahead, "_absent", {})
    monkeypatch.setattr(ahead, "at_hand", lambda kernel, *given: kernel in there)
    monkeypatch.setattr(ahead, "compile_meanwhile", compile_meanwhile)
    monkeypatch.setattr(ahead, "launch_compiled", lambda *given: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return there, made


def test_no_kernel_is_loaded_while_a_graph_is_captured(asked, monkeypatch):
    launches = [ahead.Launch(Wanted(), (1,), (torch.zeros(8), 8), {"num_warps": 4})]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert all(ahead.absent(launches) for _ in range(ahead.PATIENCE + 1))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert not ahead.absent(launches)


def test_a_call_waits_for_no_kernel(asked):
    there, made = asked
    x, one, other = torch.zeros(8), Wanted(), Wanted()
    launches = [ahead.Launch(kernel, (1,), (x, 8), {"num_warps": 4}) for kernel in (one, other)]
    there.add(one)
    for _ in range(ahead.PATIENCE - 1):
        with pytest.raises(ahead.Absent):
            ahead.launch_all(launches, shared=True)
    assert not made
    assert not ahead.absent(launches)  # the third call: its kernels are compiled, in no time
    assert made == [one, other]
    assert not ahead.absent(launches)
    assert made == [one, other]


def test_kernels_for_rows_in_registers_are_not_compiled_meanwhile(asked):
    there, made = asked
    launches = [ahead.Launch(Wanted(), (1,), (torch.zeros(8), 8), {"num_warps": 4, "R": 2})]
    assert all(ahead.absent(launches) for _ in range(2 * ahead.PATIENCE))
    assert not made
    ahead._absent.clear()
    there.add(launches[0].kernel)
    assert not ahead.absent(launches)


def test_what_does_not_come_with_the_package_is_compiled():
    launches = [ahead.Launch(Wanted(), (1,), (torch.zeros(8), 8), {"num_warps": 4})]
    assert not ahead.absent(launches)  # on a CPU, whether or not there is a GPU
    assert not loaded.serves(launches[0].args[0].get_device())


def test_kernels_that_are_compiled_are_launched_at_once(asked, monkeypatch):
    x, one, other, found = torch.zeros(8), Wanted(), Wanted(), []
    launches = [ahead.Launch(kernel, (1,), (x, 8), {"num_warps": 4}) for kernel in (one, other)]
    compiled = {one: "first"}
    monkeypatch.setattr(ahead, "launch_compiled", lambda kernel, *given: found.append(kernel) or compiled.get(kernel))
    with pytest.raises(ahead.Absent):
        ahead.launch_all(launches, shared=True)
    compiled[other] = "last"
    assert ahead.launch_all(launches, shared=True) == "last"
    assert found == [one, other, one, other]


def test_kernels_of_the_package_are_loaded_side_by_side_and_nothing_is_compiled_for_them(launched, asked, monkeypatch):
    there, _ = asked
    first, stored, backward, capturing, found = Kernel(), Kernel(), Kernel(), [False], []
    there.update((first, stored))
    monkeypatch.setattr(ahead, "_met", set())
    monkeypatch.setattr(ahead, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(ahead, "key_of", lambda *given: given[:1])
    monkeypatch.setattr(ahead, "load_early", lambda kernel, *given: found.append(kernel) or kernel in there)
    x = torch.zeros(8)
    one, other, later = (ahead.Launch(kernel, (1,), (x, 8), {}) for kernel in (first, stored, backward))
    ahead.launch_all([one, other], lambda: [later], shared=True)
    for thread in ahead._compiling.values():
        thread.join()
    assert set(found) == {stored, backward}
    assert launched == [False, False]  # none had to be compiled
    assert not backward.compiled
    capturing[0] = True
    ahead.launch_all([one, other], shared=True)
    assert len(found) == 2  # loading could disturb the capture


@pytest.fixture
def memory(monkeypatch):
    """Bytes that are free on the device, and of those in the pool of torch that are not in use; whether it captures."""
    found = {"free": 0, "pool": 0, "captures": False}
    monkeypatch.setattr(ahead, "MOST", 4)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found["captures"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (found["free"], 1 << 40))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1000 + found["pool"])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1000)
    return found


def test_a_large_call_has_its_general_form_where_there_is_room(memory, monkeypatch):
    x = torch.zeros(8)
    needed = 2 * ahead.BYTES * x.numel()
    assert not ahead._has_room(x)
    assert ahead._has_room(x[:4])  # whatever there is
    memory["free"] = needed - 10
    assert not ahead._has_room(x)
    memory["pool"] = 10
    assert ahead._has_room(x)
    memory["captures"] = True
    assert not ahead._has_room(x)
    memory["captures"] = False

    def unknown(device):
        raise RuntimeError("the allocator does not tell")

    monkeypatch.setattr(torch.cuda, "memory_reserved", unknown)
    assert not ahead._has_room(x)


def test_without_room_own_kernels_are_compiled_side_by_side(launched, asked, memory, monkeypatch):
    first, other, later, x = Kernel(), Kernel(), Kernel(), torch.zeros(8)
    for kernel in (first, other, later):
        kernel.go.set()
    monkeypatch.setattr(ahead, "_met", set())
    monkeypatch.setattr(ahead, "INTERPRETED", False)
    monkeypatch.setattr(ahead, "key_of", lambda *given: given[:1])
    launches = [ahead.Launch(kernel, (1,), (x, 8), {}) for kernel in (first, other)]
    ahead.launch_all(launches, lambda: [launches[0]._replace(kernel=later)], shared=True)
    assert launched == [False, True]  # the first is compiled by its launch, the other by a thread
    ahead.launch(later, (1,), x, 8)
    assert launched[2:] == [True]
    memory["free"] = 1 << 30
    with pytest.raises(ahead.Absent):
        ahead.launch_all(launches, shared=True)
