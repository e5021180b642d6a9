"""Elementary symmetric polynomials of exponentials, by products of polynomials in plain arithmetic.

``e_k(exp x)``, the sum over all subsets of k classes of the exponentials of their scores, is the coefficient of ``t^k``
in ``prod_i (1 + exp(x_i) t)``. With the LML dual nu, and ``p = sigmoid(x + nu)``, it is a constant times the
coefficient in ``prod_i (1 - p_i + p_i t)``: the probability that independent draws with probabilities p choose k
classes. Their mean is k, so k is also the most likely count (Darroch, 1964), and nothing can underflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lastlayer import _check
from lastlayer._threshold.autograd import mapped, nestable
from lastlayer.project.lml import lml_threshold

_DIRECT = 16  # coefficients up to which products are sums of positive terms; longer ones go through the FFT


class Tilted(NamedTuple):
    """The factors ``absent + present t`` of each class, scaled by the dual, and the points ``x + nu`` (constants)."""

    absent: Tensor
    present: Tensor  # carries the gradient
    points: Tensor


def balance(x: Tensor, k: float | Tensor) -> Tensor:
    """Return the dual nu, shape ``(..., 1)``, for which `k` is the mean count; a constant."""
    return lml_threshold(x.detach(), k).unsqueeze(-1)


def tilt(x: Tensor, nu: Tensor) -> Tilted:
    """Return the factors for scores of shape ``(..., n)`` and a dual of shape ``(..., 1)``."""
    fixed = x.detach()
    z = torch.where(fixed.isinf() & nu.isinf(), fixed, fixed + nu)
    # The result does not depend on nu, which is a constant here. The exponent is 0; its derivatives are those of x.
    shift = torch.where(x.isfinite(), x, 0)
    present = z.sigmoid() * (shift - shift.detach()).exp()
    return Tilted((-z).sigmoid(), present, z)


def log_elementary(x: Tensor, k: int) -> Tensor:
    r"""Return :math:`\log e_k(\exp x)` over the last dimension, differentiable to any order."""
    nu = balance(x, k)
    z = tilt(x.detach(), nu).points
    finite = x.isfinite()
    soft = torch.where(finite, -F.logsigmoid(-z), 0).sum(-1) - k * nu.squeeze(-1)
    whole = torch.where(finite, x.detach(), 0).sum(-1)  # where every class is taken
    constant = torch.where((nu == torch.inf).squeeze(-1), whole, soft)
    constant = torch.where((nu == -torch.inf).squeeze(-1), 0, constant)
    constant = torch.where((x == torch.inf).any(-1), torch.inf, constant)
    return log_counts(x, nu, (k,), (1.0,)) + constant


def log_counts(x: Tensor, nu: Tensor, wanted: tuple[int, ...], signs: tuple[float, ...]) -> Tensor:
    """Return ``sum(sign * log P(count))`` for the counts in `wanted`, shape ``(...)``."""
    # The compiler takes no Function that defines forward mode.
    function = _LogCounts if torch.compiler.is_compiling() else _LogCountsForwardMode
    result: Tensor = function.apply(x, nu, wanted, signs)
    return result


def slopes(x: Tensor, nu: Tensor, wanted: tuple[int, ...], signs: tuple[float, ...]) -> Tensor:
    """Return the gradient of :func:`log_counts` with respect to `x`, in differentiable operations."""
    tilted = tilt(x, nu)
    tree = Tree(tilted, max(wanted), min(wanted))
    weights = [
        sign / coefficient for sign, coefficient in zip(signs, tree.coefficients(wanted).unbind(-1), strict=True)
    ]
    return tilted.present * tree.gradient(wanted, torch.stack(weights, -1)).to(x.dtype)


class _LogCounts(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, nu: Tensor, wanted: tuple[int, ...], signs: tuple[float, ...]) -> Tensor:
        coefficients = Tree(tilt(x, nu), max(wanted), min(wanted)).coefficients(wanted).log().unbind(-1)
        return sum(sign * log for sign, log in zip(signs, coefficients, strict=True)).to(x.dtype)  # type: ignore[union-attr]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, nu, ctx.wanted, ctx.signs = inputs
        ctx.save_for_backward(x, nu)
        ctx.save_for_forward(x, nu)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, nu = ctx.saved_tensors
        return grads[0].unsqueeze(-1) * slopes(x, nu, ctx.wanted, ctx.signs), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        return log_counts(*mapped(info.batch_size, in_dims, *inputs)), 0


class _LogCountsForwardMode(_LogCounts):
    @staticmethod
    @nestable
    def jvp(ctx: Any, x_t: Tensor, *_: Any) -> Tensor:
        x, nu = ctx.saved_tensors
        return (slopes(x, nu, ctx.wanted, ctx.signs) * x_t).sum(-1)


class Tree:
    """Products of the factors in pairs, level by level, cut off at the degree that matters.

    Where that is shorter, the polynomials count the classes left out instead of those taken. Level 0 holds the
    factors; node i of a level is the product of the nodes i and i + half of the level below. While the coefficients are
    few, a level is a list of planes ``(..., nodes)``, one per coefficient; above that it is a tensor ``(..., nodes,
    coefficients)``.
    """

    def __init__(self, tilted: Tilted, highest: int, lowest: int) -> None:
        self.n = tilted.points.shape[-1]
        self.flipped = self.n - lowest < highest
        self.degree = self.n - lowest if self.flipped else highest
        first, second = tilted.absent, tilted.present
        if self.flipped:
            first, second = second, first
        if self.n == 0:  # the empty product
            first, second = F.pad(first, (0, 1), value=1.0), F.pad(second, (0, 1))
        planes = [first, second][: self.degree + 1]
        self.planes = [planes]
        while planes[0].shape[-1] > 1 and len(planes) <= 3:
            planes = _multiply_planes(*_halves(planes), self.degree + 1)
            self.planes.append(planes)
        level = torch.stack(planes, -1)
        self.levels, self.spectra = [level], [torch.empty(0)]
        while level.shape[-2] > 1:
            spectrum = _spectrum(level)  # needed again on the way down
            level = _multiply(level, spectrum, self.degree + 1)
            self.spectra[-1:] = [spectrum, torch.empty(0)]
            self.levels.append(level)

    def places(self, wanted: Sequence[int]) -> list[int]:
        """Return the places of the coefficients of the counts."""
        return [self.n - c if self.flipped else c for c in wanted]

    def coefficients(self, wanted: Sequence[int]) -> Tensor:
        """Return the coefficients of the whole product for the counts in `wanted`."""
        root = self.levels[-1].squeeze(-2)
        root = F.pad(root, (0, self.degree + 1 - root.shape[-1]))
        return torch.stack([root[..., place] for place in self.places(wanted)], -1)

    def gradient(self, wanted: Sequence[int], weights: Tensor) -> Tensor:
        """Return the derivative of ``sum(weights * coefficients)`` with respect to `present`, shape ``(..., n)``.

        This goes down the tree: each factor is multiplied by the product of all others.
        """
        root = self.levels[-1]
        places = self.places(wanted)
        none = torch.zeros_like(weights[..., 0])
        onset = [
            sum((weights[..., i] for i, p in enumerate(places) if p == c), start=none) for c in range(root.shape[-1])
        ]
        outer = torch.stack(onset, -1).unsqueeze(-2).to(root.dtype)
        for level, spectrum in zip(reversed(self.levels[:-1]), reversed(self.spectra[:-1]), strict=True):
            outer = _correlate(outer, level, spectrum)[..., : level.shape[-2], :]
        below = list(outer.unbind(-1))
        for planes in reversed(self.planes[:-1]):
            first, second = _halves(planes)
            pairs = zip(_correlate_planes(below, second), _correlate_planes(below, first), strict=True)
            below = [torch.cat(pair, -1)[..., : planes[0].shape[-1]] for pair in pairs]
        place = 0 if self.flipped else 1
        return (below[place] if place < len(below) else torch.zeros_like(below[0]))[..., : self.n]


def _halves(planes: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Split the nodes into two halves, the second one padded with the polynomial 1."""
    n = planes[0].shape[-1]
    half = (n + 1) // 2
    first = [p[..., :half] for p in planes]
    second = [F.pad(p[..., half:], (0, 2 * half - n), value=float(i == 0)) for i, p in enumerate(planes)]
    return first, second


def split(level: Tensor) -> tuple[Tensor, Tensor]:
    """As `_halves`, for nodes in the dimension before the last."""
    n = level.shape[-2]
    half = (n + 1) // 2
    second = level[..., half:, :]
    if n % 2:
        one = F.pad(torch.ones_like(level[..., :1, :1]), (0, level.shape[-1] - 1))
        second = torch.cat([second, one], -2)
    return level[..., :half, :], second


def _multiply_planes(a: list[Tensor], b: list[Tensor], longest: int) -> list[Tensor]:
    product: list[Tensor] = []
    for place in range(min(len(a) + len(b) - 1, longest)):
        terms = [a[i] * b[place - i] for i in range(len(a)) if 0 <= place - i < len(b)]
        product.append(sum(terms[1:], start=terms[0]))
    return product


def _correlate_planes(outer: list[Tensor], other: list[Tensor]) -> list[Tensor]:
    return [
        sum((outer[i + j] * other[j] for j in range(1, len(other)) if i + j < len(outer)), start=outer[i] * other[0])
        for i in range(len(other))
    ]


def _is_direct(level: Tensor) -> bool:
    """Whether the polynomials of a level are multiplied directly: short ones, and none, as the FFT refuses no rows."""
    return level.shape[-1] <= _DIRECT or level.numel() == 0


def _spectrum(level: Tensor) -> Tensor:
    """Return the Fourier transform of polynomials too long for direct products, for the products of two."""
    size = level.shape[-1]
    if _is_direct(level):
        return level.new_empty(0)
    # In double precision the rounding of the transform, relative to the largest coefficient, does not show.
    spectrum: Tensor = torch.fft.rfft(level.double(), _fast_size(2 * size - 1))
    return spectrum


def _multiply(level: Tensor, spectrum: Tensor, longest: int) -> Tensor:
    """Multiply the two halves of a level, and cut the products off."""
    size = level.shape[-1]
    length = min(2 * size - 1, longest)
    if _is_direct(level):
        a, b = split(level)
        windows = F.pad(b, (size - 1, length - size)).unfold(-1, size, 1)
        with _check.without_autocast(level.device):
            return (windows @ a.flip(-1).unsqueeze(-1)).squeeze(-1)
    a, b = _split_spectrum(spectrum)
    product: Tensor = torch.fft.irfft(a * b, _fast_size(2 * size - 1))[..., :length]
    return product


def _correlate(outer: Tensor, level: Tensor, spectrum: Tensor) -> Tensor:
    """Return ``sum_j outer[i + j] other[j]`` for each node of a level, `other` being the node it is multiplied by."""
    size = level.shape[-1]
    if _is_direct(level):
        a, b = split(level)
        windows = F.pad(outer, (0, 2 * size - 1 - outer.shape[-1])).unfold(-1, size, 1)
        with _check.without_autocast(level.device):
            both = windows @ torch.stack([b, a], -1).to(outer.dtype)
        return torch.cat(both.unbind(-1), -2)
    points = _fast_size(2 * size - 1)
    a, b = _split_spectrum(spectrum)
    above = torch.fft.rfft(outer.double(), points)
    halves = [torch.fft.irfft(above * other.conj(), points)[..., :size] for other in (b, a)]
    return torch.cat(halves, -2)


def _split_spectrum(spectrum: Tensor) -> tuple[Tensor, Tensor]:
    n = spectrum.shape[-2]
    half = (n + 1) // 2
    second = spectrum[..., half:, :]
    if n % 2:  # the transform of the polynomial 1
        second = torch.cat([second, torch.ones_like(spectrum[..., :1, :])], -2)
    return spectrum[..., :half, :], second


def _fast_size(size: int) -> int:
    """Return the least number that is large enough among 2^a, 3 * 2^a, 5 * 2^a and 9 * 2^a."""
    power = 1 << (size - 1).bit_length()
    return min(n for n in (power, power * 3 // 4, power * 5 // 8, power * 9 // 16) if n >= size)
