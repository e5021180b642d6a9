import torch

import lastlayer as ll
import lastlayer._native as native


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
