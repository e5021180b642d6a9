"""Densities of feature vectors: Gaussians around the class means, and a small normalising flow."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn


class Gaussians:
    """A mixture of one Gaussian per class, with one covariance for all and the classes' shares as weights."""

    def __init__(self, x: Tensor, y: Tensor, n_classes: int, ridge: float = 1e-3) -> None:
        x = x.double()
        count = torch.bincount(y, minlength=n_classes).double()
        self.mean = torch.zeros(n_classes, x.shape[1], dtype=x.dtype, device=x.device).index_add(0, y, x)
        self.mean = self.mean / count.clamp(min=1)[:, None]
        rest = x - self.mean[y]
        covariance = rest.T @ rest / len(x)
        covariance = covariance + ridge * covariance.diagonal().mean() * torch.eye(len(covariance)).to(covariance)
        self.root = torch.linalg.cholesky(covariance)
        self.log_share = (count / count.sum()).log()

    def log_density(self, x: Tensor) -> Tensor:
        gap = (x.double()[:, None] - self.mean).flatten(0, 1)
        white = torch.linalg.solve_triangular(self.root, gap.T, upper=False).T.unflatten(0, (len(x), -1))
        width = self.mean.shape[1]
        constant = self.root.diagonal().log().sum() + width / 2 * math.log(2 * math.pi)
        return (self.log_share - white.square().sum(-1) / 2 - constant).logsumexp(-1)


class Coupling(nn.Module):
    """Scale and shift half of the numbers by what a network makes of the other half (Dinh et al., 2017)."""

    def __init__(self, width: int, hidden: int, even: bool) -> None:
        super().__init__()
        self.register_buffer("given", torch.arange(width) % 2 == (0 if even else 1))
        layers = [nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.Linear(hidden, 2 * width))
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scale, shift = self.net(x * self.given).chunk(2, -1)
        scale = torch.where(self.given, 0, 2 * torch.tanh(scale / 2))
        return x * scale.exp() + torch.where(self.given, 0, shift), scale.sum(-1)


class RealNVP(nn.Module):
    """Couplings with random permutations between them; a standard normal at the end."""

    def __init__(self, width: int, hidden: int = 256, layers: int = 8) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(Coupling(width, hidden, even=i % 2 == 0) for i in range(layers))
        orders = torch.stack([torch.randperm(width) for _ in range(layers)])
        self.register_buffer("orders", orders)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("spread", torch.ones(width))

    def log_density(self, x: Tensor) -> Tensor:
        z = (x - self.mean) / self.spread
        total = -self.spread.log().sum()
        for coupling, order in zip(self.couplings, self.orders, strict=True):
            z, change = coupling(z[:, order])
            total = total + change
        return total - z.square().sum(-1) / 2 - z.shape[-1] / 2 * math.log(2 * math.pi)


def fit_flow(x: Tensor, held_out: Tensor, *, epochs: int, batch: int = 512, jitter: float = 0.0) -> RealNVP:
    """Train a flow by maximum likelihood, and keep the epoch with the best density of the held-out rows."""
    flow = RealNVP(x.shape[1]).to(x.device)
    flow.mean.copy_(x.mean(0))
    flow.spread.copy_(x.std(0) + 1e-3)
    optimiser = torch.optim.Adam(flow.parameters(), 1e-3, weight_decay=1e-5)
    best, state = -math.inf, copy.deepcopy(flow.state_dict())
    for _ in range(epochs):
        for rows in torch.randperm(len(x), device=x.device).split(batch):
            some = x[rows]
            some = some + jitter * (torch.rand_like(some) - 0.5)
            loss = -flow.log_density(some).mean() / x.shape[1]
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(flow.parameters(), 1.0)
            optimiser.step()
        with torch.no_grad():
            now = flow.log_density(held_out).mean().item()
        if now > best:
            best, state = now, copy.deepcopy(flow.state_dict())
    flow.load_state_dict(state)
    return flow.requires_grad_(False)
