r"""The solver in numpy: slow, and the specification of the compiled one.

For each label, with :math:`y_i = \pm 1` and one cost :math:`C_i` per row,

.. math:: \min_w \tfrac12 \|w\|^2 + \sum_i C_i \, \ell(y_i w \cdot x_i)

where :math:`x_i` ends in the bias, a constant whose weight is regularised as the others are (as in liblinear). The dual
variables :math:`\alpha_i` give :math:`w = \sum_i \alpha_i y_i x_i`, and one of them after the other is set to its best
value. With :math:`q_i = \|x_i\|^2` and the margin :math:`m_i = y_i w \cdot x_i`:

- squared hinge, :math:`\ell(m) = \max(0, 1 - m)^2` (Hsieh et al. 2008):
  :math:`\alpha_i \leftarrow \max(0, \alpha_i - g_i / (q_i + d_i))` with the slope
  :math:`g_i = m_i - 1 + d_i \alpha_i` and :math:`d_i = 1 / (2 C_i)`;
- logistic, :math:`\ell(m) = \log(1 + e^{-m})` (Yu, Huang and Lin 2011): :math:`\alpha_i = C_i \sigma(-z_i)`, the slope
  is :math:`m_i - z_i`, and the best :math:`z` solves
  :math:`z - m_i + q_i (\alpha_i - C_i \sigma(-z)) = 0`, which increases and has its root between :math:`z_i` and
  :math:`m_i`.

A label ends when the largest slope minus the smallest is at most the tolerance (logistic: the largest in size); a slope
that pushes :math:`\alpha_i = 0` further down does not count. Labels that have begun together are columns of one array.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse as sp
from scipy.special import expit

BLOCK = 64


def solve(
    arrays: dict[str, np.ndarray | None],
    *,
    shape: tuple[int, int],
    loss: str,
    bias: float,
    threshold: float,
    tolerance: float,
    max_passes: int,
    seed: int,
    offset: int,
    threads: int,
    progress: Callable[[int], Any] | None = None,
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Solve and return what `_native.linear.solve` does, for the same arguments; all in float64 and in one thread."""
    del threads, offset
    a: Any = arrays
    values, costs = a["values"].astype(np.float64), a["costs"]
    n_labels = len(a["positive_start"]) - 1
    dense = a["indptr"] is None
    x = values.reshape(shape) if dense else sp.csr_matrix((values, a["indices"], a["indptr"]), shape=shape)
    weight = np.ones(shape[0]) if a["row_weight"] is None else a["row_weight"]
    solutions: list[list[Any]] = [[None] * n_labels for _ in costs]
    intercepts, passes = np.zeros((len(costs), n_labels)), np.zeros((len(costs), n_labels), np.int32)
    done = 0
    for problem in range(len(a["label_start"]) - 1):
        rows = np.arange(shape[0])
        if a["row_start"] is not None:
            rows = a["row_list"][a["row_start"][problem] : a["row_start"][problem + 1]]
        labels = a["order"][a["label_start"][problem] : a["label_start"][problem + 1]]
        for first in range(0, len(labels), BLOCK):
            block = labels[first : first + BLOCK]
            positive = np.zeros((shape[0], len(block)), bool)
            for lane, label in enumerate(block):
                positive[a["positives"][a["positive_start"][label] : a["positive_start"][label + 1]], lane] = True
            weights = a["positive_weight"][block], a["negative_weight"][block]
            solver = Block(x[rows], positive[rows], weight[rows], weights, loss, bias, np.random.default_rng(seed))
            for step, cost in enumerate(costs):
                w, b, count = solver.run(cost, tolerance, max_passes)
                for lane, label in enumerate(block):
                    kept = np.flatnonzero((np.abs(w[:, lane]) >= threshold) & (w[:, lane] != 0))
                    solutions[step][label] = kept.astype(np.int32), w[kept, lane].astype(a["values"].dtype)
                intercepts[step, block], passes[step, block] = b, count
                done += len(block)
                if progress is not None:
                    progress(done)
    out = []
    for step, lists in enumerate(solutions):
        indptr = np.concatenate([[0], np.cumsum([len(pair[0]) for pair in lists])]).astype(np.int64)
        empty = np.empty(0, np.int32), np.empty(0, a["values"].dtype)
        both = [np.concatenate([empty[i], *(pair[i] for pair in lists)]) for i in (0, 1)]
        out.append((indptr, *both, intercepts[step], passes[step]))
    return out


class Block:
    """Labels that are solved together; the dual variables of one cost are the start of the next."""

    def __init__(
        self,
        x: Any,
        positive: np.ndarray,
        weight: np.ndarray,
        label_weights: tuple[np.ndarray, np.ndarray],
        loss: str,
        bias: float,
        generator: np.random.Generator,
    ) -> None:
        self.x, self.positive, self.loss, self.bias, self.generator = x, positive, loss, bias, generator
        self.sign = np.where(positive, 1.0, -1.0)
        self.share = np.where(positive, *label_weights) * weight[:, None]  # C_i is this times C
        squares = x.multiply(x).sum(1) if sp.issparse(x) else (x * x).sum(1)
        self.norm = np.asarray(squares).ravel() + bias * bias
        self.alpha = np.zeros(positive.shape)
        self.w, self.b = np.zeros((x.shape[1], positive.shape[1])), np.zeros(positive.shape[1])

    def run(self, cost: float, tolerance: float, max_passes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Solve for one cost; return weights, intercepts and passes (negative: not converged)."""
        share = cost * self.share
        counts = self.positive.sum(0)
        alike = (counts == 0) | (counts == len(self.positive))
        live = ~alike
        passes = np.zeros(len(live), np.int32)
        while live.any():
            top, bottom = self._pass(share, live)
            passes += live
            close = (top if self.loss == "logistic" else top - bottom) <= tolerance
            out = live & ~close & (passes >= max_passes)
            passes[out] *= -1
            live &= ~close & ~out
        w, b = self.w.copy(), self.bias * self.b
        for lane in np.flatnonzero(alike):
            score = constant_score(self.loss, self.bias, float(share[:, lane].sum()))
            w[:, lane], b[lane] = 0, score if counts[lane] else -score
        return w, b, passes

    def _pass(self, share: np.ndarray, live: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        top, bottom = np.full(len(live), -np.inf), np.full(len(live), np.inf)
        for i in self.generator.permutation(len(self.sign)):
            if sp.issparse(self.x):
                index = self.x.indices[self.x.indptr[i] : self.x.indptr[i + 1]]
                x = self.x.data[self.x.indptr[i] : self.x.indptr[i + 1]]
            else:
                index, x = slice(None), self.x[i]
            sign, old, q = self.sign[i], self.alpha[i], self.norm[i]
            margin = sign * (x @ self.w[index] + self.bias * self.b)
            if self.loss == "squared_hinge":
                diagonal = 0.5 / share[i]
                slope = margin - 1 + diagonal * old
                new = np.maximum(0, old - slope / (q + diagonal))
                counted = np.where((old == 0) & (slope > 0), 0, slope)
            else:
                slope = margin - logit(old, share[i])
                new = logistic_step(old, share[i], margin, q)
                counted = np.abs(slope)
            top, bottom = np.maximum(top, counted), np.minimum(bottom, counted)
            step = np.where(live, (new - old) * sign, 0)
            self.alpha[i] = np.where(live, new, old)
            self.w[index] += x[:, None] * step
            self.b += self.bias * step
        return top, bottom


def logit(alpha: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """Return z of ``alpha = cost * sigmoid(-z)``, at most 40 in size."""
    share = np.clip(alpha / cost, 1e-18, 1 - 1e-16)
    return np.asarray(np.log1p(-share) - np.log(share))


def logistic_step(alpha: np.ndarray, cost: np.ndarray, margin: np.ndarray, q: float) -> np.ndarray:
    """Return the best dual variable: Newton's steps within a bracket that shrinks."""
    z = logit(alpha, cost)
    low, high = np.minimum(z, margin), np.maximum(z, margin)
    for _ in range(50):
        p = expit(-z)
        h = z - margin + q * (alpha - cost * p)
        low, high = np.where(h < 0, z, low), np.where(h > 0, z, high)
        z = z - h / (1 + q * cost * p * (1 - p))
        z = np.where((z < low) | (z > high), (low + high) / 2, z)
        if (np.abs(h) <= 1e-12 * (1 + np.abs(margin))).all():
            break
    return np.asarray(cost * expit(-z))


def constant_score(loss: str, bias: float, mass: float) -> float:
    """The score of a label whose rows are all positive: the best with an intercept alone; `mass` is the sum of C."""
    scale = (bias * bias or 1.0) * mass
    if loss == "squared_hinge":
        return 2 * scale / (1 + 2 * scale)
    low, high = 0.0, scale / 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if middle < scale * expit(-middle) else (low, middle)
    return (low + high) / 2
