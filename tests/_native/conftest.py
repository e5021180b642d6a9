"""What the tests of the compiled kernels share."""

import pytest

from lastlayer import _native as native

SETS = ("baseline", "AVX2", "AVX-512")


@pytest.fixture(params=SETS)
def isa(request):
    library = native.library()
    library.lastlayer_limit_isa(SETS.index(request.param))
    used = native.instruction_set()
    if used != request.param:
        library.lastlayer_limit_isa(2)
        pytest.skip(f"this processor has no {request.param}")
    yield
    library.lastlayer_limit_isa(2)
