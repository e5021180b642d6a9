"""A router for a mixture of experts: exactly k experts per token, and nearly even loads of the experts.

    python examples/router.py

In training `lml_balanced_duals` finds a bias per expert that spreads the probabilities of a batch evenly over the
experts. A moving average of these biases is used for inference, when there is no batch to balance against. Each token
takes its `k` best experts, so loads are only nearly even: the program prints the largest one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import lastlayer as ll


class BalancedRouter(nn.Module):
    """Choose `k` of `experts` for each token; returns their indices and weights, ``(tokens, k)`` each."""

    bias: Tensor

    def __init__(self, features: int, experts: int, k: int, *, momentum: float = 0.9) -> None:
        super().__init__()
        self.k, self.momentum = k, momentum
        self.gate = nn.Linear(features, experts, bias=False)
        self.register_buffer("bias", torch.zeros(experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(x)
        if self.training:
            nu, mu = ll.lml_balanced_duals(scores, self.k)
            y = (scores + nu.unsqueeze(-1) + mu).sigmoid()
            with torch.no_grad():
                self.bias.lerp_(mu, 1 - self.momentum)
        else:
            mu = self.bias
            y = ll.lml(scores + mu, self.k)
        chosen = (scores + mu).topk(self.k, -1).indices
        weight = y.gather(-1, chosen)
        return chosen, weight / weight.sum(-1, keepdim=True)


def load(chosen: Tensor, experts: int) -> float:
    """The largest load of an expert divided by the mean load."""
    counts = chosen.flatten().bincount(minlength=experts).double()
    return (counts.max() / counts.mean()).item()


def main() -> dict[str, float]:
    torch.manual_seed(0)
    centres = 2 * torch.randn(6, 32)  # tokens come in six kinds: some experts are everyone's favourites

    def tokens(n: int) -> Tensor:
        return centres[torch.randint(6, (n,))] + torch.randn(n, 32)

    router = BalancedRouter(32, 16, k=2)
    for _ in range(40):
        router(tokens(1024))
    x = tokens(4096)
    found = {
        "top-k of the scores": load(router.gate(x).topk(2, -1).indices, 16),
        "balanced, training": load(router(x)[0], 16),
        "bias alone, inference": load(router.eval()(x)[0], 16),
    }
    for name, value in found.items():
        print(f"{name:>22}: largest load {value:.2f} times the mean")
    return found


if __name__ == "__main__":
    main()
