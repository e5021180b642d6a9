"""Prune a network to half and to 30 % of its multiply-adds, and learn which layers give up their units.

    python examples/pruning.py

The mask of a layer is an `lml` of its units' importances with a real k, made sharper in every step. The ks are an `lml`
with weights: a unit of a layer costs the connections that go with it (Ning et al., 2020: differentiable allocation).
"""

from __future__ import annotations

import itertools

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import lastlayer as ll

UNITS = torch.tensor([128.0, 128.0, 64.0])
X, Y = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
X = X.float() / 16
TRAIN, TEST = slice(None, None, 2), slice(1, None, 2)


def multiply_adds(k: Tensor) -> Tensor:
    return 64 * k[0] + k[0] * k[1] + k[1] * k[2] + 10 * k[2]


def units(shift: Tensor, budget: float) -> Tensor:
    """Real numbers of units that cost the budget: its linear form about the last solution, a few times over."""
    share = torch.full((3,), budget**0.5)
    for _ in range(5):
        here = share.detach().requires_grad_()
        cost = multiply_adds(here * UNITS)
        (price,) = torch.autograd.grad(cost, here)
        left = budget * multiply_adds(UNITS) - cost.detach() + price @ here.detach()
        share = ll.lml(shift, left / price.max(), weight=price / price.max(), lower=1 / 16)
    return share * UNITS


def masks(layers: nn.ModuleList, k: Tensor, temperature: float) -> list[Tensor]:
    importances = [layer.weight.norm(dim=1).log() for layer in layers[:-1]]
    return [ll.lml(b, ki, temperature=temperature) for b, ki in zip(importances, k, strict=True)]


def logits_of(layers: nn.ModuleList, x: Tensor, mask: list[Tensor]) -> Tensor:
    for layer, m in zip(layers[:-1], mask, strict=True):
        x = layer(x).relu() * m
    return layers[-1](x)


def pruned(budget: float, learn: bool, steps: int = 200) -> tuple[float, float, list[int]]:
    """Train and prune: the accuracy, the share of the multiply-adds, and the units of each layer that are left."""
    torch.manual_seed(0)
    sizes = [64, *UNITS.int().tolist(), 10]
    layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
    shift = torch.zeros(3, requires_grad=learn)
    optimizer = torch.optim.Adam([{"params": layers.parameters()}, {"params": [shift], "lr": 0.03}], 3e-3)
    for step in range(steps):
        part = step / steps
        k = units(shift, budget**part * 0.99)
        loss = nn.functional.cross_entropy(logits_of(layers, X[TRAIN], masks(layers, k, 0.01**part)), Y[TRAIN])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    kept = units(shift, budget).floor()
    with torch.no_grad():
        hard = [(m >= m.topk(int(c)).values[-1]).float() for m, c in zip(masks(layers, kept, 0.01), kept, strict=True)]
        right = logits_of(layers, X[TEST], hard).argmax(-1) == Y[TEST]
    return right.float().mean().item(), (multiply_adds(kept) / multiply_adds(UNITS)).item(), kept.int().tolist()


def main() -> dict[tuple[float, bool], tuple[float, float, list[int]]]:
    found = {(budget, learn): pruned(budget, learn) for budget in (0.5, 0.3) for learn in (False, True)}
    for (budget, learn), (accuracy, share, kept) in found.items():
        name = "learned" if learn else "not learned"
        print(
            f"budget {budget:.0%}, {name:>11}: accuracy {accuracy:.1%}, {share:.1%} of the multiply-adds, {kept} units"
        )
    return found


if __name__ == "__main__":
    main()
