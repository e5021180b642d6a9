"""A sparse autoencoder, and four ways to choose which latents are active."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import lastlayer as ll

KINDS = ("TopK", "BatchTopK", "LML, k per row", "LML, k per batch")
SPREAD = 4.0  # a predicted k lies between the budget divided by this and times it, before the mean is set


def by_rank(pre: Tensor, k: Tensor | int) -> Tensor:
    """Return a mask of the `k` largest entries of each row; `k` is a number or one whole number per row."""
    most = int(k.max()) if isinstance(k, Tensor) else k
    found = pre.topk(most, -1).indices
    if not isinstance(k, Tensor):
        return torch.zeros_like(pre, dtype=torch.bool).scatter_(-1, found, True)
    taken = torch.arange(most, device=pre.device) < k.unsqueeze(-1)
    return torch.zeros_like(pre, dtype=torch.bool).scatter_(-1, found, taken)


def of_batch(pre: Tensor, k: int) -> Tensor:
    """Return a mask of the entries above the (rows times k)-th largest of all."""
    least = pre.flatten().topk(k * len(pre), sorted=False).values.min()
    return pre >= least


def select(
    kind: str, pre: Tensor, k: int, sizes: Tensor | None, temperature: float, soft: bool, impl: str = "auto"
) -> Tensor:
    """Return the activations in training; those of LML are soft, or exactly k with the slopes of the soft ones.

    `sizes` is the predicted number of latents per row, of mean `k`.
    """
    positive = pre.relu()
    if kind == "TopK":
        return positive * by_rank(pre, k)
    if kind == "BatchTopK":
        return positive * of_batch(pre, k)
    if kind == "LML, k per row":
        assert sizes is not None
        y = ll.lml(pre, sizes, temperature=temperature)
        hard = None if soft else by_rank(pre, whole(sizes.detach()))
    else:
        y = ll.lml(pre, float(k * len(pre)), dim=(0, 1), temperature=temperature, impl=impl)  # type: ignore[arg-type]
        hard = None if soft else of_batch(pre, k)
    return positive * (y if hard is None else hard + (y - y.detach()))


def whole(sizes: Tensor) -> Tensor:
    return sizes.round().long().clamp_min(1)


class Autoencoder(nn.Module):
    """Encode to `latents`, of which about `k` are active, and decode."""

    def __init__(self, kind: str, features: int, latents: int, k: int) -> None:
        super().__init__()
        self.kind, self.k = kind, k
        directions = torch.randn(latents, features)
        directions /= directions.norm(dim=-1, keepdim=True)
        self.decoder = nn.Parameter(directions)
        self.encoder = nn.Parameter(directions.clone())
        self.shift, self.bias = nn.Parameter(torch.zeros(latents)), nn.Parameter(torch.zeros(features))
        self.size = nn.Linear(features, 1)
        nn.init.zeros_(self.size.weight)
        self.level = 0.0  # threshold, or mean of the predicted sizes: set by `settle`

    def scores(self, x: Tensor) -> Tensor:
        return (x - self.bias) @ self.encoder.T + self.shift

    def sizes(self, x: Tensor) -> Tensor:
        """Return the predicted sizes up to a factor, between 1 / SPREAD and SPREAD."""
        found: Tensor = (math.log(SPREAD) * self.size(x).squeeze(-1).tanh()).exp()
        return found

    def decode(self, z: Tensor) -> Tensor:
        return z @ (self.decoder / self.decoder.norm(dim=-1, keepdim=True)) + self.bias

    def forward(self, x: Tensor, temperature: float, soft: bool) -> Tensor:
        """Return the reconstruction in training."""
        raw = self.sizes(x)
        sizes = self.k * raw / raw.mean() if "row" in self.kind else None
        return self.decode(select(self.kind, self.scores(x), self.k, sizes, temperature, soft))

    @torch.no_grad()
    def settle(self, batches: list[Tensor]) -> None:
        """Choose the threshold (or the factor of the sizes) with which `k` latents are active on average."""
        if "row" in self.kind:
            raw = torch.cat([self.sizes(x) for x in batches])
            low, high = 0.1 * float(raw.min()), 10 * float(raw.max())
            for _ in range(40):  # whole sizes: their mean is not that of what is rounded
                self.level = math.sqrt(low * high)
                many = float(whole(self.k * raw / self.level).float().mean()) > self.k
                low, high = (self.level, high) if many else (low, self.level)
            self.level = high
        elif "atch" in self.kind:
            least = [self.scores(x).flatten().topk(self.k * len(x), sorted=False).values.min() for x in batches]
            self.level = float(torch.stack(least).mean())

    @torch.no_grad()
    def active(self, x: Tensor) -> Tensor:
        """Return the activations of new rows, each without a look at the others."""
        pre = self.scores(x)
        if self.kind == "TopK":
            return pre.relu() * by_rank(pre, self.k)
        if "row" in self.kind:
            return pre.relu() * by_rank(pre, whole(self.k * self.sizes(x) / self.level))
        return pre.relu() * (pre >= self.level)
