"""A residual network whose channels can be masked and removed, and the multiply-adds of what is left.

Channels that a short cut joins live and die together: ResNet-18 has 4 such groups (the streams of its stages, groups 0
to 3), and 8 more inside its blocks (groups 4 to 11).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMAGE = -1  # the group of the three colours, which stay
STAGES, BLOCKS, CLASSES = 4, 8, 100


class Layer(NamedTuple):
    source: int  # group of the channels that come in
    target: int  # group of the channels that go out
    kernel: int
    side: int  # of the images that go out
    stride: int


def layers() -> list[Layer]:
    """The convolutions of ResNet-18 for images of 32 x 32, in order: two per block, then its short cut, if any."""
    found = [Layer(IMAGE, 0, 3, 32, 1)]
    for block in range(BLOCKS):
        stage, inner = block // 2, STAGES + block
        source = stage - 1 if block % 2 == 0 and stage else stage
        side, stride = 32 >> stage, 2 if source != stage else 1
        found += [Layer(source, inner, 3, side, stride), Layer(inner, stage, 3, side, 1)]
        if source != stage:
            found.append(Layer(source, stage, 1, side, stride))
    return found


LAYERS = layers()


def full(width: int) -> list[int]:
    """Channels of each group of the whole network."""
    return [width << stage for stage in range(STAGES)] + [width << block // 2 for block in range(BLOCKS)]


def multiply_adds(counts: Sequence[int]) -> int:
    """Multiply-adds per image with so many channels in each group."""
    found = counts[STAGES - 1] * CLASSES
    for layer in LAYERS:
        inner = 3 if layer.source == IMAGE else counts[layer.source]
        found = found + inner * counts[layer.target] * (layer.kernel * layer.side) ** 2
    return found


def quadratic(counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The multiply-adds as a function of the keep ratios a: the matrix A and the vector b of a'Aa + b'a."""
    square = torch.zeros(len(counts), len(counts), dtype=torch.float64)
    line = torch.zeros(len(counts), dtype=torch.float64)
    line[STAGES - 1] = counts[STAGES - 1] * CLASSES
    for layer in LAYERS:
        cost = counts[layer.target] * (layer.kernel * layer.side) ** 2
        if layer.source == IMAGE:
            line[layer.target] += 3 * cost
        else:
            square[layer.source, layer.target] += counts[layer.source] * cost
    return square, line


class Network(nn.Module):
    """ResNet-18 with `counts` channels per group; a mask (groups x most channels) multiplies the output of each."""

    def __init__(self, counts: Sequence[int]) -> None:
        super().__init__()
        self.counts = list(counts)
        self.convolutions, self.norms = nn.ModuleList(), nn.ModuleList()
        for layer in LAYERS:
            inner, outer = 3 if layer.source == IMAGE else counts[layer.source], counts[layer.target]
            self.convolutions.append(
                nn.Conv2d(inner, outer, layer.kernel, layer.stride, padding=layer.kernel // 2, bias=False)
            )
            self.norms.append(nn.BatchNorm2d(outer))
        self.last = nn.Linear(counts[STAGES - 1], CLASSES)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        def apply(place: int, x: Tensor) -> Tensor:
            found: Tensor = self.norms[place](self.convolutions[place](x))
            return found

        def masked(group: int, x: Tensor) -> Tensor:
            return x if mask is None else x * mask[group, : x.shape[1]].view(1, -1, 1, 1).to(x.dtype)

        x = masked(0, F.relu(apply(0, x)))
        place = 1
        for block in range(BLOCKS):
            joins = LAYERS[place].source == block // 2
            inner = masked(STAGES + block, F.relu(apply(place, x)))
            beside = x if joins else apply(place + 2, x)
            x = masked(block // 2, F.relu(apply(place + 1, inner) + beside))
            place += 2 if joins else 3
        found: Tensor = self.last(x.mean((2, 3)))
        return found

    def importance(self) -> Tensor:
        """The mean size of the scales that normalise each channel, groups x most channels; 0 where there is none."""
        found = self.norms[0].weight.new_zeros(len(self.counts), max(self.counts))
        for group, count in enumerate(self.counts):
            norms = [n for n, layer in zip(self.norms, LAYERS, strict=True) if layer.target == group]
            found[group, :count] = torch.stack([n.weight.detach().abs() for n in norms]).mean(0)
        return found


@torch.no_grad()
def smaller(net: Network, mask: Tensor) -> Network:
    """Return the network without the channels whose mask is 0: the same function, in fewer multiply-adds."""
    kept = [mask[group, :count].nonzero().squeeze(1) for group, count in enumerate(net.counts)]
    found = Network([len(places) for places in kept]).to(mask.device, memory_format=torch.channels_last)
    for place, layer in enumerate(LAYERS):
        weight = net.convolutions[place].weight[kept[layer.target]]
        found.convolutions[place].weight.copy_(weight if layer.source == IMAGE else weight[:, kept[layer.source]])
        for name, value in net.norms[place].state_dict().items():
            found.norms[place].state_dict()[name].copy_(value[kept[layer.target]] if value.ndim else value)
    found.last.weight.copy_(net.last.weight[:, kept[STAGES - 1]])
    found.last.bias.copy_(net.last.bias)
    return found.train(net.training)


@torch.no_grad()
def counted(net: nn.Module, x: Tensor) -> int:
    """Multiply-adds of one image, counted while the network runs."""
    total = 0

    def count(module: nn.Module, given: tuple[Tensor, ...], found: Tensor) -> None:
        nonlocal total
        total += found[0].numel() * module.weight[0].numel()

    hooks = [m.register_forward_hook(count) for m in net.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    net.eval()(x[:1])
    for hook in hooks:
        hook.remove()
    return total
