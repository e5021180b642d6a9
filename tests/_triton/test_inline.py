"""What `torch.compile` makes of the kernels, on any machine: they are traced for a GPU, and not run."""

import pytest
import torch

pytest.importorskip("triton", minversion="3.6")

import triton
from torch._dynamo.backends.common import aot_autograd
from triton.backends.compiler import GPUTarget

from lastlayer._triton import INTERPRETED
from lastlayer.loss.lml import _LMLCompiledLoss

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter cannot be compiled")


class Hopper:
    """As much of a driver as it takes to read a kernel."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def driver():
    kept = triton.runtime.driver.active if torch.cuda.is_available() else None
    triton.runtime.driver.set_active(Hopper())
    yield
    triton.runtime.driver.set_active(kept)


class Traced(Exception):
    pass


@pytest.mark.parametrize("form", ["one class", "observed"])
def test_the_loss_is_one_kernel_that_leaves_the_logits_alone(driver, form):
    nodes = []

    def stop(graph, _):
        nodes.extend(graph.graph.nodes)
        raise Traced

    x, k = torch.randn(32, 100, requires_grad=True), torch.ones(32, 1)
    index = torch.zeros(32, 1 if form == "one class" else 3, dtype=torch.int64)
    labels = (index, None) if form in ("one class", "lists") else (None, torch.zeros(32, 100))
    rho = torch.tensor(0.5) if form == "observed" else None
    compiled = torch.compile(_LMLCompiledLoss.apply, backend=aot_autograd(fw_compiler=stop), fullgraph=True)
    torch.compiler.reset()
    with pytest.raises(Exception, match="Traced"):
        compiled(x, k, None, 1.0, rho, *labels, None, True)
    kernels = [node for node in nodes if "triton_kernel" in node.name]
    assert len(kernels) == 1
    assert not any("lastlayer" in str(node.target) for node in nodes)
    assert "x_ptr" not in kernels[0].kwargs["tensors_to_clone"]
    assert "d_ptr" in kernels[0].kwargs["tensors_to_clone"]
