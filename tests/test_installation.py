import importlib.util
import sys
import types

import pytest
import torch

import lastlayer as ll
import lastlayer._native as native
import lastlayer._triton as triton


def test_tells_versions_and_threads():
    found = ll.show_config()
    assert (found.lastlayer, found.torch, found.threads) == (ll.__version__, torch.__version__, torch.get_num_threads())


def test_is_a_table_that_can_be_read():
    lines = str(ll.show_config()).splitlines()
    assert [line.split()[0] for line in lines] == ["lastlayer", "torch", "threads", "native", "triton"]


def test_tells_why_the_compiled_kernel_is_not_in_use(monkeypatch):
    monkeypatch.setattr(native, "_library", None)
    monkeypatch.setattr(native, "missing", "it was not built")
    assert ll.show_config().native == "not in use: it was not built; plain torch instead"


def test_tells_the_instruction_set(monkeypatch):
    monkeypatch.setattr(native, "missing", "")
    monkeypatch.setattr(native, "instruction_set", lambda: "AVX2")
    assert ll.show_config().native == "compiled, AVX2"


def test_tells_why_the_gpu_kernels_are_not_in_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ll.show_config().triton.startswith("not in use: ")


def test_an_old_triton_is_as_good_as_none(monkeypatch):
    """Its compiler refuses some of the kernels, or crashes."""
    monkeypatch.setattr(triton, "VERSION", (3, 4))
    monkeypatch.setattr(triton, "FOUND", False)
    assert ll.show_config().triton == "not in use: triton 3.4 is installed, and the kernels need 3.6 or newer"
    with pytest.raises(RuntimeError, match=r"triton 3\.4 is installed"):
        ll.lml(torch.zeros(4), 2, impl="triton")


def test_reads_the_version_of_triton_without_importing_it(monkeypatch, tmp_path):
    (tmp_path / "__init__.py").write_text('"""isort:skip_file"""\n__version__ = \'3.10.1\'\n')
    spec = types.SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    for given, found in ((None, None), (spec, (3, 10)), (types.SimpleNamespace(origin=None), triton.OLDEST)):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, given=given: given)
        assert triton._version() == found


def test_tells_the_gpu_and_what_was_compiled_for_it(monkeypatch, tmp_path):
    kernel, ready = object(), types.SimpleNamespace(compiled=None)  # compiled by nobody: it comes with the package
    held = {"a": (kernel, None), "b": (kernel, None), "c": (object(), None), "d": (ready, None)}
    launch = types.SimpleNamespace(_compiled=held)
    monkeypatch.setitem(sys.modules, "lastlayer._triton.launch", launch)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton, "unavailable", lambda device: "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    told = f"on a GPU, kernels so far: 1 of the package, 2 compiled and kept in {tmp_path}"
    assert ll.show_config().triton == told
