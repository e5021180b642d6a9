"""The distribution over subsets of exactly k classes: sampling, exact marginals, log-probabilities."""

from __future__ import annotations

import numbers
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lastlayer import _check
from lastlayer._module import FunctionModule
from lastlayer._ranked import exporting
from lastlayer._threshold.compiled import by_kernels, compiled, fused, on_gpu, projected
from lastlayer._threshold.dispatch import transformed
from lastlayer._threshold.operators import fake, operator
from lastlayer._threshold.whole import whole_projection
from lastlayer.project._symmetric import Tree, balance, log_counts, split, tilt

_FEW = 16  # classes of a subset for which the compiled operation divides polynomials


def sample_subset(logits: Tensor, k: int, *, generator: torch.Generator | None = None) -> Tensor:
    r"""Draw subsets of exactly `k` classes with probability proportional to the exponential of their summed logits.

    .. math:: P(S) = \frac{\exp \sum_{i \in S} x_i}{\sum_{|A| = k} \exp \sum_{i \in A} x_i}, \qquad |S| = k

    Each row gets one exact draw: the count is split from the whole row down to the single classes. (The k largest of
    Gumbel-perturbed logits follow another distribution.) For several draws expand the logits:
    ``logits.expand(100, -1)``.

    Args:
        logits: The scores :math:`x`, shape ``(..., n_classes)``; ``-inf`` is never drawn, ``+inf`` always.
        k: The size of the subset, a Python integer, ``0 <= k <= n_classes``.
        generator: The source of randomness, on the device of `logits`.

    Returns:
        The drawn classes in ascending order, int64, shape ``(..., k)``. A row without a subset of size `k` (too few
        classes above ``-inf``, more than `k` at ``+inf``, or a nan) is filled with -1.

    Example:
        >>> sample_subset(torch.tensor([9.0, -torch.inf, 9.0, -99.0]), k=2)
        tensor([0, 2])
    """
    x, k = _enter("sample_subset", logits, k)
    if torch.compiler.is_compiling() and not exporting() and generator is None and not transformed():
        index: Tensor = torch.ops.lastlayer.sample_subset(x.detach(), k)
        return index
    return _sample(x.detach(), k, generator)


@torch.no_grad()
def _sample(x: Tensor, k: int, generator: torch.Generator | None = None) -> Tensor:
    nu = balance(x, k)
    chosen = _draw(Tree(tilt(x, nu), k, k), k, generator)
    n = x.shape[-1]
    rank = torch.where(chosen, n - torch.arange(n, device=x.device), 0)
    index = n - rank.topk(k, dim=-1).values
    return torch.where(nu.isnan(), -1, index)


# One operator for the compiler, which would make a graph for each depth of the tree. A draw is not to be repeated.
@operator("sample_subset", torch.Tag.nondeterministic_seeded)
def _sample_op(x: Tensor, k: int) -> Tensor:
    return _sample(x, k)


@fake("sample_subset")
def _(x: Tensor, k: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], k), dtype=torch.int64)


@whole_projection()
def subset_marginals(logits: Tensor, k: int) -> Tensor:
    r"""Compute the probability that each class is in a random subset of exactly `k` classes.

    .. math:: \pi_i = P(i \in S) = \frac{\partial}{\partial x_i} \log \sum_{|A| = k} \exp \sum_{j \in A} x_j

    with :math:`P` as in :func:`sample_subset`. They sum to `k`, as do the probabilities of :func:`~lastlayer.lml`,
    which are the best approximation by independent draws at a fraction of the cost. Differentiable to any order.

    Args:
        logits: The scores :math:`x`, shape ``(..., n_classes)``; ``-inf`` rules a class out, ``+inf`` in.
        k: The size of the subset, a Python integer, ``0 <= k <= n_classes``.

    Returns:
        Probabilities, of the shape and dtype of `logits`. A row without a subset of size `k` becomes NaN.

    Example:
        >>> subset_marginals(torch.tensor([2.0, 1.0, 0.0, -1.0]), k=2)
        tensor([0.8808, 0.6944, 0.3056, 0.1192])
    """
    x, k = _enter("subset_marginals", logits, k)
    pi = _marginals_by_kernel(x, k)
    return (_marginals(x, k) if pi is None else pi).to(logits.dtype)


def _marginals_by_kernel(x: Tensor, k: int) -> Tensor | None:
    """Return the marginals by the compiled operation, None where plain torch must."""
    if not 0 < k <= min(_FEW, x.shape[-1] - 1) or not compiled(x):
        return None
    kernels = fused(x)
    if on_gpu(x):
        if not kernels.takes("marginals", x.shape[:-1].numel(), x.shape[-1], (k,)):
            return None

        def forward(x: Tensor, gradient: bool) -> tuple[Tensor, Tensor]:
            found = kernels.run("marginals", x, None, (k,))
            return found.out, found.extra  # the thresholds of the rows

        def backward(upstream: Tensor, x: Tensor, rows: Tensor) -> Tensor:
            grad: Tensor = kernels.run("marginals_backward", x, None, (k,), each=upstream, first=rows).out
            return grad

        return by_kernels(x, forward, backward, lambda x, _: _marginals(x, k))
    found = kernels.run("marginals", x.detach(), None, (k,))
    if found is None:
        return None

    def pull(x: Tensor, pi: Tensor, upstream: Tensor) -> Tensor | None:
        back = kernels.run("marginals_backward", x, None, (k,), each=upstream, positive=pi)
        return None if back is None else back.out

    return projected(x, found.out, pull, lambda x: _marginals(x, k))


def _marginals(x: Tensor, k: int) -> Tensor:
    """Return the marginals by differentiable operations."""
    nu = balance(x, k)
    tilted = tilt(x, nu)
    tree = Tree(tilted, k, k)
    weight = 1 / tree.coefficients([k])
    # Rounding, mostly that of the Fourier transform, may leave -1e-17 for 0, or the next number after 1.
    pi = (tilted.present * tree.gradient([k], weight)).to(x.dtype).clamp(0, 1)
    pi = torch.where(x == torch.inf, 1, pi)
    return torch.where(nu.isnan(), torch.nan, pi)


def subset_log_prob(logits: Tensor, k: int, subset: Tensor) -> Tensor:
    r"""Compute the log-probability of a subset of exactly `k` classes, differentiable in `logits`.

    .. math:: \log P(S) = \sum_{i \in S} x_i - \log \sum_{|A| = k} \exp \sum_{i \in A} x_i

    Args:
        logits: The scores :math:`x`, shape ``(..., n_classes)``.
        k: The size of the subset, a Python integer, ``0 <= k <= n_classes``.
        subset: The classes, as index lists of shape ``(..., k)``, int64 or int32, or multi-hot of another dtype and of
            shape ``(..., n_classes)``; the leading dimensions broadcast against those of `logits`.

    Returns:
        Log-probabilities, of the broadcast batch shape and the dtype of `logits`. What is not a set of `k` different
        classes, or holds a class at ``-inf``, has ``-inf``. A row without any subset of size `k` becomes NaN.

    Example:
        >>> subset_log_prob(torch.zeros(4), 2, torch.tensor([0, 3])).exp()
        tensor(0.1667)
    """
    x, k = _enter("subset_log_prob", logits, k)
    chosen = _chosen(subset, k, x)
    nu = balance(x, k)
    z = tilt(x.detach(), nu).points
    value = F.logsigmoid(torch.where(chosen, z, -z)).sum(-1) - log_counts(x, nu, (k,), (1.0,))
    shift = torch.where(chosen & x.isfinite(), x, 0)
    value = value + (shift - shift.detach()).sum(-1)
    value = torch.where(chosen.sum(-1) == k, value, -torch.inf)
    return torch.where(nu.squeeze(-1).isnan(), torch.nan, value).to(logits.dtype)


def _enter(op: str, logits: Any, k: Any) -> tuple[Tensor, int]:
    logits = _check.logits(op, logits)
    n = logits.shape[-1]
    if isinstance(k, bool) or not isinstance(k, numbers.Integral):
        raise TypeError(
            f"{op}: `k` must be a Python integer, the size of the subset, got {type(k).__name__}. "
            "For a real or per-row `k` use lml."
        )
    if not 0 <= int(k) <= n:
        raise ValueError(f"{op}: `k` must be between 0 and n_classes={n}, got {k}. Lower `k`.")
    return logits.to(_check.work_dtype(logits)), int(k)


def _chosen(subset: Any, k: int, x: Tensor) -> Tensor:
    """Return the subset as a boolean tensor that broadcasts against `x`; its sum is k only if it is a set of k."""
    n = x.shape[-1]
    if not isinstance(subset, Tensor):
        raise TypeError(
            f"subset_log_prob: `subset` must be a tensor, got {type(subset).__name__}. Use torch.as_tensor."
        )
    lists = subset.dtype in (torch.int64, torch.int32)
    width = k if lists else n
    if subset.ndim == 0 or subset.shape[-1] != width or not _broadcast(subset.shape[:-1], x.shape[:-1]):
        raise ValueError(
            f"subset_log_prob: `subset` must have shape (..., {k}) (index lists of int64 or int32) or (..., {n}) "
            f"(multi-hot of another dtype), the rest broadcasting to the batch shape {tuple(x.shape[:-1])}, "
            f"got {tuple(subset.shape)} of {subset.dtype}."
        )
    if not lists:
        return subset > 0
    index = torch.where((subset >= 0) & (subset < n), subset, n).long()
    hot = torch.zeros((*index.shape[:-1], n + 1), dtype=torch.bool, device=index.device).scatter(-1, index, 1)
    return hot[..., :n]


def _broadcast(first: torch.Size, second: torch.Size) -> bool:
    return all(a == b or 1 in (a, b) for a, b in zip(reversed(first), reversed(second), strict=False))


def _draw(tree: Tree, k: int, generator: torch.Generator | None) -> Tensor:
    """Return the classes drawn, boolean, shape ``(..., n)``: a count of a node is split among its two children."""
    levels = [torch.stack(planes, -1) for planes in tree.planes[:-1]] + tree.levels
    root = levels[-1]
    count = torch.full(root.shape[:-1], tree.places([k])[0], dtype=torch.int64, device=root.device)
    for level in reversed(levels[:-1]):
        left, right = (part.double().clamp(min=0) for part in split(level))
        size = left.shape[-1]
        rest = count.unsqueeze(-1) - torch.arange(size, device=root.device)
        other = right.gather(-1, rest.clamp(0, size - 1))
        total = torch.where((rest >= 0) & (rest < size), left * other, 0).cumsum(-1)
        given: Any = {} if generator is None else {"generator": generator}  # with one, no shape may be dynamic
        uniform = torch.rand(count.shape, dtype=torch.float64, device=root.device, **given)
        first = (total <= uniform.unsqueeze(-1) * total[..., -1:]).sum(-1).clamp(max=size - 1)
        count = torch.cat([first, count - first], -1)[..., : level.shape[-2]]
    return ((count > 0) != tree.flipped)[..., : tree.n]


class SampleSubset(FunctionModule):
    """Module form of :func:`sample_subset`, which documents the arguments."""

    function = staticmethod(sample_subset)

    def __init__(self, k: int, *, generator: torch.Generator | None = None) -> None:
        super().__init__(k=k, generator=generator)

    def forward(self, logits: Tensor) -> Tensor:
        """Return the classes drawn."""
        out: Tensor = self._call(logits)
        return out


class SubsetMarginals(FunctionModule):
    """Module form of :func:`subset_marginals`, which documents the arguments."""

    function = staticmethod(subset_marginals)

    def __init__(self, k: int) -> None:
        super().__init__(k=k)

    def forward(self, logits: Tensor) -> Tensor:
        """Return the probability of each class."""
        out: Tensor = self._call(logits)
        return out
