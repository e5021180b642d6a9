"""The kernels that come with the package."""

import pytest

pytest.importorskip("triton")
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
            assert kernel.ptx.count(b".param .") == sum(kind != "constexpr" for kind in kernel.types), module


@pytest.mark.slow
def test_they_are_made_from_the_present_source():
    from lastlayer._triton import build

    wanted = build.launched()
    assert {path.name for path in wanted} == {path.name for path in store.FOLDER.glob("*.xz")}, "run `make kernels`"
    for path, kernels in wanted.items():
        assert set(kernels) == set(store.read(path)), f"{path.name} is out of date: run `make kernels`"
