"""Prune a network to half and to 30 % of its multiply-adds, and learn how many units each layer keeps.

    python examples/pruning.py

The mask of a layer is an `lml` of its units' importances with a real k. Its temperature falls in every step. The ks are
an `lml` with weights: a unit of a layer costs the connections that go with it (Ning et al., 2020: differentiable
allocation).
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import lastlayer as ll

UNITS = torch.tensor([128.0, 128.0, 64.0])
X, Y = (torch.as_tensor(part) for part in load_digits(return_X_y=True))


def multiply_adds(k: Tensor) -> Tensor:
    return 64 * k[0] + k[0] * k[1] + k[1] * k[2] + 10 * k[2]


def units(shift: Tensor, budget: float) -> Tensor:
    """Return real numbers of units that cost the budget, by a few solutions of its linear form about the last one."""
    share = torch.full((3,), budget**0.5)
    for _ in range(5):
        cost, price = torch.func.grad_and_value(lambda s: multiply_adds(s * UNITS))(share.detach())[::-1]
        left = budget * multiply_adds(UNITS) - cost + price @ share.detach()
        share = ll.lml(shift, left / price.max(), weight=price / price.max(), lower=1 / 16)
    return share * UNITS


def logits(layers: nn.ModuleList, x: Tensor, k: Tensor, temperature: float) -> Tensor:
    for layer, ki in zip(layers, k):  # noqa: B905  (the last layer keeps its units)
        x = layer(x).relu() * ll.lml(layer.weight.norm(dim=1).log(), ki, temperature=temperature)
    return layers[-1](x)


def pruned(budget: float, learn: bool, steps: int = 200) -> tuple[float, float, list[int]]:
    """Train and prune: the accuracy, the share of the multiply-adds, and the units of each layer that are left."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(a, b) for a, b in ((64, 128), (128, 128), (128, 64), (64, 10)))
    shift = torch.zeros(3, requires_grad=learn)
    optimizer = torch.optim.Adam([{"params": layers.parameters()}, {"params": [shift], "lr": 0.03}], 3e-3)
    for part in torch.linspace(0, 1, steps).tolist():
        guess = logits(layers, X[::2].float() / 16, units(shift, budget**part * 0.99), 0.01**part)
        optimizer.zero_grad()
        nn.functional.cross_entropy(guess, Y[::2]).backward()
        optimizer.step()
    kept = units(shift.detach(), budget).floor()
    right = logits(layers, X[1::2].float() / 16, kept, 1e-5).argmax(-1) == Y[1::2]  # so sharp that it is all or nothing
    return right.float().mean().item(), (multiply_adds(kept) / multiply_adds(UNITS)).item(), kept.int().tolist()


if __name__ == "__main__":
    for budget in (0.5, 0.3):
        for learn in (False, True):
            accuracy, share, kept = pruned(budget, learn)
            print(f"{budget:.0%}, {learn = }: accuracy {accuracy:.1%}, {share:.1%} of the multiply-adds, units {kept}")
