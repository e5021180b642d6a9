"""The functions of the CUDA driver, with a library that only writes down how it is called."""

import ctypes
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", minversion="3.6")

from lastlayer._triton import driver


class Library:
    """Stands for the library of the driver; a new thread has no context, and `errors` are its answers by name."""

    def __init__(self, missing=()):
        self.calls, self.errors, self.context, self.mode = [], {}, None, 0
        for name in driver._SIGNATURES:
            if name not in missing:
                setattr(self, name, self.function(name))

    def function(self, name):
        def called(*given):
            self.calls.append(name)
            if self.errors.get(name):
                return self.errors[name]
            getattr(self, f"_{name}", lambda *given: None)(*given)
            return 0

        return called

    def _cuCtxGetCurrent(self, context):
        context._obj.value = self.context

    def _cuDevicePrimaryCtxRetain(self, context, device):
        context._obj.value = 1000 + device

    def _cuCtxSetCurrent(self, context):
        self.context = context.value

    def _cuThreadExchangeStreamCaptureMode(self, mode):
        self.mode, mode._obj.value = mode._obj.value, self.mode

    def _cuModuleLoadData(self, module, image):
        assert (self.mode, image) == (2, b"text\0")
        module._obj.value = 5

    def _cuModuleGetFunction(self, function, module, name):
        assert (module.value, name) == (5, b"name")
        function._obj.value = 77


@pytest.fixture
def library(monkeypatch):
    found = Library()
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: found)
    driver._functions.cache_clear()
    yield found
    driver._functions.cache_clear()


def test_a_kernel_is_loaded(library):
    assert driver.load(b"text\0", "name", 3) == 77
    assert library.context == 1003
    assert library.mode == 0
    assert driver.load(b"text\0", "name", 4) == 77
    assert library.context == 1003  # the thread has one
    assert library.calls.count("cuFuncGetAttribute") == 2


@pytest.mark.parametrize("name", ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncGetAttribute"])
def test_an_error_is_told_and_the_mode_is_put_back(library, name):
    library.errors[name] = 218
    with pytest.raises(RuntimeError, match=f"{name} of the CUDA driver: error 218"):
        driver.load(b"text\0", "name", 0)
    assert library.mode == 0


def test_without_a_library_or_a_function(monkeypatch):
    def none(name):
        raise OSError(name)

    some = Library(missing=("cuLaunchCooperativeKernel", "cuModuleLoadData"))
    for load in (none, lambda name: some, lambda name: SimpleNamespace()):
        monkeypatch.setattr(driver.ctypes, "CDLL", load)
        driver._functions.cache_clear()
        assert driver.launcher() is None
        with pytest.raises(RuntimeError, match="the CUDA driver has no cu"):
            driver.load(b"text\0", "name", 0)
    driver._functions.cache_clear()


def test_each_function_has_its_types(library):
    assert driver.launcher() is library.cuLaunchCooperativeKernel
    for name, types in driver._SIGNATURES.items():
        assert driver._functions()[name].argtypes == types
        assert driver._functions()[name].restype is ctypes.c_int
