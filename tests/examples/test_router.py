"""The router of the example: k experts per token, loads evened out in training and by the bias alone."""

import importlib.util
from pathlib import Path

import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "router.py"


def test_router():
    spec = importlib.util.spec_from_file_location("router", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    found = example.main()
    assert found["balanced, training"] < found["top-k of the scores"]
    assert found["bias alone, inference"] < found["top-k of the scores"]
    router = example.BalancedRouter(4, 8, k=3)
    chosen, weight = router(torch.randn(20, 4))
    assert chosen.shape == weight.shape == (20, 3)
    torch.testing.assert_close(weight.sum(-1), torch.ones(20))
    weight[:, 0].sum().backward()
    assert router.gate.weight.grad.isfinite().all()
    x = torch.randn(30, 4)
    alone = [router.eval()(token[None])[0] for token in x]  # a token needs no batch at inference
    assert torch.equal(torch.cat(alone), router(x)[0])
