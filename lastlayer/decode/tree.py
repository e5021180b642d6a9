"""Nodes of a label tree: as specific as the probabilities allow."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from lastlayer import _check
from lastlayer._check import Target
from lastlayer._module import FunctionModule
from lastlayer.decode.top_k import Decoded, whole
from lastlayer.hierarchy import LabelTree, Rule

Method = Literal["max_rew", "maxk_rew", "darts"]


def decode_tree(
    probabilities: Tensor,
    tree: LabelTree,
    *,
    method: Method = "max_rew",
    theta: float = 0.5,
    k: int = 1,
    lamb: float = 0.0,
    rule: Rule = "sum",
) -> Decoded:
    r"""Choose nodes of a label tree that are both likely and specific.

    With r the specificity of a node (:attr:`LabelTree.specificity`) and P its probability:

    - ``"max_rew"``: the most specific node with :math:`P \ge \theta`; of equally specific nodes the most likely. At
      ``theta = 0`` this is the most likely class, at ``theta = 1`` as a rule the root.
    - ``"maxk_rew"``: the `k` most specific nodes with :math:`P \ge \theta`, none inside another: of two nested nodes
      the more specific one is taken. There may be fewer than `k`.
    - ``"darts"`` (Deng et al., 2012): the node with the largest :math:`(r + \lambda) P`; see :func:`tune_darts`.

    Remaining ties go to the deeper node, then to the lowest number.

    Args:
        probabilities: Probabilities of the classes, shape ``(..., n_classes)``, from which those of the nodes are
            computed by `rule`, with re-calibration; or probabilities of the nodes, shape ``(..., n_nodes)``, from
            :meth:`LabelTree.probabilities`.
        tree: The tree.
        method: ``"max_rew"``, ``"maxk_rew"`` or ``"darts"``.
        theta: The lowest probability of a node, 0 to 1.
        k: The largest number of nodes per row for ``"maxk_rew"``.
        lamb: The multiplier of ``"darts"``, at least 0; the larger, the safer. Infinity is allowed.
        rule: ``"sum"`` for one label per row, ``"negation"`` for several.

    Returns:
        Numbers of nodes, shape ``(..., k)``, the most specific first, -1 where there is none; and their
        probabilities, ``-inf`` there.

    Example:
        >>> tree = LabelTree.from_parents([4, 4, 5, 5, 6, 6, -1])
        >>> decode_tree(torch.tensor([[0.4, 0.35, 0.15, 0.1]]), tree, theta=0.7)
        Decoded(index=tensor([[4]]), score=tensor([[0.7500]]))
    """
    op = "decode_tree"
    _check.choice(op, "method", method, ("max_rew", "maxk_rew", "darts"))
    theta = _check.number(op, "theta", theta, 0, 1)
    lamb = _check.number(op, "lamb", lamb, 0)
    width = whole(op, "k", k)
    if method != "maxk_rew" and width != 1:
        raise ValueError(f'{op}: `k` must be 1 for method="{method}", got {k}. Use method="maxk_rew".')
    p = _node_probabilities(op, probabilities, tree, rule)
    fixed = p.detach()
    node = _darts(fixed, tree, lamb) if method == "darts" else _most_specific(fixed, tree, theta, width)
    score = torch.where(node >= 0, p.gather(-1, node.clamp(min=0)), -torch.inf)
    return Decoded(node, score.to(probabilities.dtype))


def tune_darts(
    probabilities: Tensor,
    target: Target,
    tree: LabelTree,
    *,
    accuracy: float,
    rule: Rule = "sum",
) -> float:
    """Find the multiplier at which ``decode_tree(method="darts")`` is right often enough on held-out data.

    A row is right if one of its labels is under the chosen node. In expectation, accuracy rises with the multiplier;
    bisection finds where it passes `accuracy`, to about a millionth. The result reaches `accuracy`; on a small sample a
    smaller one may reach it too. If none does, because wrong probabilities are exactly 1, the result is infinity.

    Args:
        probabilities: Held-out, as for :func:`decode_tree`.
        target: The classes, in any of the three forms. Rows without a label are left out.
        tree: The tree.
        accuracy: The wanted share of right rows, 0 to 1.
        rule: As for :func:`decode_tree`.

    Returns:
        The multiplier, a number for `lamb`.

    Example:
        >>> tree = LabelTree.from_parents([4, 4, 5, 5, 6, 6, -1])
        >>> p = torch.tensor([[0.5, 0.3, 0.1, 0.1], [0.6, 0.2, 0.1, 0.1]])
        >>> round(tune_darts(p, torch.tensor([1, 0]), tree, accuracy=1.0), 3)
        0.333
    """
    op = "tune_darts"
    wanted = _check.number(op, "accuracy", accuracy, 0, 1) - 1e-9
    p = _node_probabilities(op, probabilities, tree, rule).detach()
    labels = _check.target(op, target, p.new_empty(()).expand(*p.shape[:-1], tree.n_leaves))
    hits = labels.positive().double() @ tree.membership().to(p.device).double().T > 0
    p, hits = p.reshape(-1, tree.n_nodes), hits.reshape(-1, tree.n_nodes)
    rows = hits.any(-1)
    p, hits = p[rows], hits[rows]
    if not len(p):
        raise ValueError(f"{op}: `target` must hold at least one label, got none. Use rows that have one.")

    def reached(lamb: float) -> bool:
        return float(hits.gather(-1, _darts(p, tree, lamb)).double().mean()) >= wanted

    if reached(0.0):
        return 0.0
    high = 1.0
    while not reached(high):
        high *= 2
        if high > 2.0**60:
            return math.inf
    low = 0.0 if high == 1.0 else high / 2
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def _node_probabilities(op: str, probabilities: Tensor, tree: LabelTree, rule: Rule) -> Tensor:
    if not isinstance(tree, LabelTree):
        raise TypeError(f"{op}: `tree` must be a LabelTree, got {type(tree).__name__}. Use LabelTree.from_parents.")
    _check.choice(op, "rule", rule, ("sum", "negation"))
    p = _check.logits(op, probabilities, "probabilities")
    p = p.to(_check.work_dtype(p))
    if p.shape[-1] == tree.n_leaves:
        return tree.probabilities(p, rule)
    if p.shape[-1] != tree.n_nodes:
        raise ValueError(
            f"{op}: `probabilities` must have {tree.n_leaves} classes or {tree.n_nodes} nodes in the last dimension, "
            f"got shape {tuple(p.shape)}."
        )
    return p


def _order(tree: LabelTree, device: torch.device) -> Tensor:
    """Return the nodes, the most specific first and deeper ones first among those of one size: ties go to the first."""
    order = sorted(range(tree.n_nodes), key=lambda v: (tree.sizes[v], -tree.depth[v], v))
    return torch.tensor(order, device=device)


def _darts(p: Tensor, tree: LabelTree, lamb: float) -> Tensor:
    order = _order(tree, p.device)
    reward = tree.specificity.to(p.device)
    # For a large multiplier divide by it, so that infinity is the limit: the largest P.
    weight = reward + lamb if lamb <= 1 else reward / lamb + 1
    value = (p.double() * weight).index_select(-1, order)
    value = torch.where(value.isnan(), -torch.inf, value)
    best = order[value.argmax(-1, keepdim=True)]
    return torch.where(value.amax(-1, keepdim=True) > -torch.inf, best, -1)


def _most_specific(p: Tensor, tree: LabelTree, theta: float, width: int) -> Tensor:
    order = _order(tree, p.device)
    size = torch.tensor(tree.sizes, device=p.device)[order]
    begin, end = (torch.tensor(t, device=p.device)[order] for t in tree.spans)
    p = p.index_select(-1, order)
    free = p >= theta
    chosen = []
    for _ in range(width):
        smallest = torch.where(free, size, tree.n_leaves + 1).amin(-1, keepdim=True)
        among = free & (size == smallest)
        place = torch.where(among, p, -torch.inf).argmax(-1, keepdim=True)
        any_free = free.any(-1, keepdim=True)
        chosen.append(torch.where(any_free, order[place], -1))
        free = free & ~(
            any_free & (begin <= begin[place]) & (end >= end[place])
        )  # the node and all nodes that contain it
    if not chosen:
        return torch.empty((*p.shape[:-1], 0), dtype=torch.long, device=p.device)
    return torch.cat(chosen, -1)


class DecodeTree(FunctionModule):
    """Module form of :func:`decode_tree`, which documents the arguments."""

    function = staticmethod(decode_tree)

    def __init__(
        self,
        tree: LabelTree,
        *,
        method: Method = "max_rew",
        theta: float = 0.5,
        k: int = 1,
        lamb: float = 0.0,
        rule: Rule = "sum",
    ) -> None:
        super().__init__(tree=tree, method=method, theta=theta, k=k, lamb=lamb, rule=rule)

    def forward(self, probabilities: Tensor) -> Decoded:
        """Return the lists of each row."""
        decoded: Decoded = self._call(probabilities)
        return decoded
