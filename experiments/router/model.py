"""A byte-level transformer whose feed-forward layers are mixtures of experts, with four ways to choose them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lastlayer as ll

MOMENTUM = 0.98  # of the bias for inference


class Router(nn.Module):
    """Choose `k` of `experts` for each token: indices and weights ``(tokens, k)``, and a loss to add.

    `strength` is the weight of the auxiliary loss, the step of the bias, or the temperature of LML.
    """

    bias: Tensor

    def __init__(self, method: str, features: int, experts: int, k: int, strength: float) -> None:
        super().__init__()
        self.method, self.k, self.strength, self.calls = method, k, strength, 0
        self.gate = nn.Linear(features, experts, bias=False)
        nn.init.normal_(self.gate.weight, std=features**-0.5)
        self.register_buffer("bias", torch.zeros(experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(x.device.type, enabled=False):
            scores = self.gate(x.float())
            y, chosen, extra = getattr(self, "_" + self.method.replace(" ", "_"))(scores)
            weight = y.gather(-1, chosen)
            return chosen, weight / weight.sum(-1, keepdim=True).clamp_min(1e-20), extra

    def _softmax(self, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Top-k of the softmax; the auxiliary loss is that of Fedus et al. (2022)."""
        p = scores.softmax(-1)
        chosen = p.topk(self.k, -1).indices
        experts = scores.shape[-1]
        share = counts_of(chosen, experts) / chosen.numel()
        return p, chosen, self.strength * experts * (share * p.mean(0)).sum()

    def _sigmoid(self, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Top-k of the sigmoid plus a bias that a fixed step corrects after each batch (Wang et al., 2024)."""
        p = scores.sigmoid()
        chosen = (p + self.bias).topk(self.k, -1).indices
        if self.training:
            with torch.no_grad():
                counts = counts_of(chosen, scores.shape[-1])
                self.bias += self.strength * (counts.mean() - counts).sign()
        return p, chosen, scores.new_zeros(())

    def _lml(self, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities that sum to k, and nothing that balances the experts."""
        y = ll.lml(scores, self.k, temperature=self.strength)
        return y, scores.topk(self.k, -1).indices, scores.new_zeros(())

    def _balanced_lml(self, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows sum to k and columns are equal; at inference a bias stands for the batch."""
        if self.training:
            y = ll.lml_balanced(scores, self.k, temperature=self.strength)
            with torch.no_grad():  # mu of `lml_balanced_duals`, from the assignment that is there
                mu = (y.clamp(1e-30, 1 - 1e-7).logit() - scores / self.strength).mean(0)
                self.bias.lerp_(mu - mu.mean(), 1 - MOMENTUM if self.calls else 1.0)
            self.calls += 1
            return y, y.topk(self.k, -1).indices, scores.new_zeros(())
        moved = scores / self.strength + self.bias
        return ll.lml(moved, self.k), moved.topk(self.k, -1).indices, scores.new_zeros(())


def counts_of(chosen: Tensor, experts: int) -> Tensor:
    """Return how many tokens chose each expert; unlike bincount, without waiting for the device."""
    ones = torch.ones(chosen.numel(), device=chosen.device)
    return ones.new_zeros(experts).index_add_(0, chosen.flatten(), ones)


class _Moved(torch.autograd.Function):
    """Take the rows `there`; the way back is given too, `each` times per row, so that gradients need no atomic sums."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Tensor, back: Tensor, used: Tensor, each: int) -> Tensor:
        ctx.save_for_backward(back, used)
        ctx.each = each
        return x.index_select(0, there)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back, used = ctx.saved_tensors
        grad = grads[0].index_select(0, back) * used.unsqueeze(-1)
        return grad.unflatten(0, (-1, ctx.each)).sum(1), None, None, None, None


class Experts(nn.Module):
    """Two-layer networks side by side; what exceeds the capacity of an expert is dropped, later tokens first."""

    def __init__(self, method: str, features: int, inner: int, experts: int, k: int, strength: float) -> None:
        super().__init__()
        self.experts, self.k = experts, k
        self.capacity: float | None = 1.25  # times the mean load; None drops nothing
        self.router = Router(method, features, experts, k, strength)
        self.into = nn.Parameter(torch.randn(experts, features, inner) * features**-0.5)
        self.out = nn.Parameter(torch.randn(experts, inner, features) * (2 * inner) ** -0.5)
        self.counts = torch.zeros(0)  # of the last call
        self.slots = 0
        self.extra = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        shape, x = x.shape, x.flatten(0, -2)
        chosen, weight, self.extra = self.router(x)
        tokens, width = x.shape
        self.counts = counts_of(chosen, self.experts)
        if self.capacity is None:
            slots = int(self.counts.max())
        else:
            slots = math.ceil(self.capacity * tokens * self.k / self.experts)
        self.slots = slots
        flat = chosen.flatten()
        sorted_, order = flat.sort(stable=True)
        first = self.counts.long().cumsum(0) - self.counts.long()
        place = torch.arange(len(flat), device=x.device) - first[sorted_]
        kept = place < slots
        slot = torch.where(kept, sorted_ * slots + place, self.experts * slots)  # the last is for what is dropped
        choice = torch.zeros(self.experts * slots + 1, dtype=torch.long, device=x.device)  # of a slot
        filled = torch.zeros_like(choice, dtype=torch.bool)
        choice[slot], filled[slot] = order, True
        choice, filled = choice[:-1], filled[:-1]
        half = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        read, counted = torch.zeros_like(slot), torch.empty_like(kept)
        read[order] = torch.where(kept, slot, 0)
        counted[order] = kept
        sent = _Moved.apply(x.to(half), choice // self.k, read, counted, self.k).view(self.experts, slots, width)
        made = torch.bmm(F.gelu(torch.bmm(sent, self.into.to(half))), self.out.to(half)).flatten(0, 1)
        returned = _Moved.apply(made, read, choice, filled, 1).view(tokens, self.k, width)
        weight = (weight * counted.view_as(weight)).unsqueeze(-1).to(half)
        return (returned * weight).sum(1).view(shape)

    @property
    def dropped(self) -> Tensor:
        """The share of choices of the last call that found their expert full."""
        return (self.counts - self.slots).clamp_min(0).sum() / self.counts.sum()

    @property
    def load(self) -> Tensor:
        """The largest load of the last call divided by the mean."""
        return self.counts.max() / self.counts.mean()


class Dense(nn.Sequential):
    """The feed-forward layer of a model without experts."""

    def __init__(self, features: int, inner: int) -> None:
        super().__init__(nn.Linear(features, inner), nn.GELU(), nn.Linear(inner, features))


def shifted(x: Tensor) -> Tensor:
    """Take half of the features from the byte before: pairs of bytes are then learnt at once."""
    half = x.shape[-1] // 2
    return torch.cat([x[..., :half], F.pad(x[..., half:], (0, 0, 1, -1))], -1)


class Layer(nn.Module):
    """Causal attention with rotated positions (Su et al., 2021), then a feed-forward layer."""

    turns: Tensor

    def __init__(self, features: int, heads: int, length: int, feed: nn.Module) -> None:
        super().__init__()
        half = features // heads // 2
        angle = torch.arange(length)[:, None] * 1e4 ** (-torch.arange(half) / half)
        self.register_buffer("turns", torch.stack([angle.cos(), angle.sin()]), persistent=False)
        self.heads, self.feed = heads, feed
        self.before, self.between = nn.LayerNorm(features), nn.LayerNorm(features)
        self.mix, self.merge = nn.Linear(features, 3 * features), nn.Linear(features, features)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.mix(shifted(self.before(x))).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)
        x = x + self.merge(seen.transpose(1, 2).reshape(rows, length, width))
        fed: Tensor = self.feed(self.between(x))
        return x + fed

    def turned(self, x: Tensor) -> Tensor:
        cos, sin = self.turns[:, : x.shape[-2]].to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class ByteModel(nn.Module):
    """Predict the next byte: logits ``(rows, length, 256)``."""

    def __init__(self, feeds: list[nn.Module], features: int, heads: int, length: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, features)
        self.layers = nn.ModuleList(Layer(features, heads, length, feed) for feed in feeds)
        self.last = nn.LayerNorm(features)
        self.head = nn.Linear(features, 256, bias=False)
        nn.init.normal_(self.bytes.weight, std=0.3)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        found: Tensor = self.head(self.last(self.stream(text, len(self.layers))))
        return found

    def stream(self, text: Tensor, layers: int) -> Tensor:
        """Return the residual stream after so many layers."""
        x: Tensor = self.bytes(text)
        for layer in self.layers[:layers]:
            x = layer(x)
        return x

    @property
    def mixtures(self) -> list[Experts]:
        return [layer.feed for layer in self.layers if isinstance(layer.feed, Experts)]
