"""The reference: the LML projection balanced in logarithms, and its relatives by sorting or by brute force.

In float64 for float32, and for float64 in numpy's longest float (64 bits of mantissa on x86); from other formulas than
the library's: with m = floor(k) and the scores in descending order, sum y = k says that the sum of y over the classes
after the m-th is k - m plus the sum of 1 - y over the first m. Both sides are sums of positive terms and their
logarithms are compared, so that nothing cancels and nothing underflows, however far apart the scores are.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Solution(NamedTuple):
    """One row each; `points` are x + nu, and base - t is the logit at which a label is as likely as not."""

    points: np.ndarray  # (rows, n); infinite where y is 0 or 1, nan in a row without a solution
    base: np.ndarray  # (rows,)
    t: np.ndarray  # nu = t - base
    inside: np.ndarray  # whether there is a finite nu


def log_sigmoid(z: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.minimum(z, 0) - np.log1p(np.exp(-np.abs(z)))


def log_sum(x: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Return the logarithm of the sum of exp(x) over the entries found, -inf where there is none."""
    with np.errstate(all="ignore"):
        x = np.where(found, x, -np.inf)
        peak = np.max(x, -1, keepdims=True, initial=-np.inf)
        safe = np.where(np.isfinite(peak), peak, 0)
        return (np.log(np.exp(x - safe).sum(-1, keepdims=True)) + safe)[..., 0]


def lml(x: np.ndarray, k: np.ndarray) -> Solution:
    """Solve each row."""
    rows = len(x)
    finite = np.isfinite(x)
    left = k - (x == np.inf).sum(-1)
    live = finite.sum(-1)
    with np.errstate(invalid="ignore"):
        bad = np.isnan(x).any(-1) | ~((left >= 0) & (left <= live))
        inside = ~bad & (left > 0) & (left < live)
    base, t = np.zeros(rows, x.dtype), np.where(left > 0, np.inf, -np.inf).astype(x.dtype)
    if inside.any():
        base[inside], t[inside] = _balance(np.where(finite, x, -np.inf)[inside], left[inside], live[inside])
    with np.errstate(invalid="ignore"):
        z = np.where(np.isinf(x), x, (x - base[:, None]) + t[:, None])
    z[bad], t[bad] = np.nan, np.nan
    return Solution(z, base, t, inside)


def _balance(x: np.ndarray, k: np.ndarray, n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return base and t of rows that have a solution; classes at -inf weigh nothing."""
    x = -np.sort(-x, -1)
    first = np.floor(k)
    part = k - first  # exact
    at = first.astype(int)[:, None]
    lower = np.take_along_axis(x, np.minimum(at, x.shape[-1] - 1), -1)[:, 0]
    upper = np.where(part > 0, lower, np.take_along_axis(x, np.maximum(at - 1, 0), -1)[:, 0])
    base = upper / 2 + lower / 2
    d = x - base[:, None]
    head = np.arange(x.shape[-1]) < first[:, None]
    with np.errstate(divide="ignore"):
        log_part = np.log(part)
        lo = np.log(np.where(part > 0, part, 1)) - np.log(n - k) - (upper - base)
        hi = np.log(k) - np.log(first + 1 - k) + (base - lower)
    t, eps = (lo + hi) / 2, np.finfo(x.dtype).eps
    for _ in range(300):
        z = d + t[:, None]
        rest, missing = log_sigmoid(z), log_sigmoid(-z)
        out, short = log_sum(rest, ~head), log_sum(missing, head)
        need = np.logaddexp(log_part, short)
        with np.errstate(all="ignore"):
            rise = np.where(~head, np.exp(rest - out[:, None] + missing), 0).sum(-1)
            fall = np.where(head, np.exp(missing - need[:, None] + rest), 0).sum(-1)
            over = out - need
            newton = t - over / (rise + fall)
        lo, hi = np.where(over < 0, np.maximum(lo, t), lo), np.where(over > 0, np.minimum(hi, t), hi)
        good = (newton > lo) & (newton < hi)
        new = np.where(over == 0, t, np.where(good, newton, (lo + hi) / 2))
        done = np.abs(new - t) <= 4 * eps * (1 + np.abs(t))
        t = new
        if done.all():
            break
    return base, t


def at_most(x: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Return whether the sigmoids of a row add up to at most k, by the balance of `lml` at nu = 0."""
    x = -np.sort(-x, -1)
    first = np.floor(k)
    head = np.arange(x.shape[-1]) < first[:, None]
    with np.errstate(all="ignore"):
        need = np.logaddexp(np.log(k - first), log_sum(log_sigmoid(-x), head))
        return log_sum(log_sigmoid(x), ~head) <= need


def weights(solution: Solution) -> tuple[np.ndarray, np.ndarray]:
    """Return h / sum h and the logarithm of sum h, h = y (1 - y); 0 and -inf where no class can move."""
    z = solution.points
    log_h = log_sigmoid(z) + log_sigmoid(-z)
    live = np.isfinite(z) & solution.inside[:, None]
    total = log_sum(log_h, live)
    with np.errstate(invalid="ignore"):
        return np.where(live, np.exp(log_h - total[:, None]), 0), total


def capped_softmax(x: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Return log y = min(0, x - tau) of each row: tau for each number of classes at 1, and the one that fits."""
    found = np.full(x.shape, np.nan, x.dtype)
    for i, (row, size) in enumerate(zip(x, k, strict=True)):
        live = np.isfinite(row)
        left = size - (row == np.inf).sum()
        if np.isnan(row).any() or not 0 <= left <= live.sum():
            continue
        found[i] = np.where(row == np.inf, 0, -np.inf)
        if left == live.sum():
            found[i][live] = 0
        elif left > 0:
            ranked = -np.sort(-row[live])
            for count in range(int(np.ceil(left))):
                rest = ranked[count:]
                over = np.log(np.exp(rest - rest[0]).sum()) - np.log(left - count)  # tau less the first of the rest
                if over >= 0 or count + 1 == int(np.ceil(left)):  # rounding may leave none that fits: then the last
                    found[i][live] = np.minimum((row[live] - rest[0]) - over, 0)
                    break
    return found


def capped_sparsemax(x: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Return y = clip(x - tau, 0, 1) of each row, tau from the breakpoints between which the sum passes k."""
    found = np.full(x.shape, np.nan, x.dtype)
    for i, (row, size) in enumerate(zip(x, k, strict=True)):
        live = np.isfinite(row)
        left = size - (row == np.inf).sum()
        if np.isnan(row).any() or not 0 <= left <= live.sum():
            continue
        found[i] = np.where(row == np.inf, 1, 0)
        if left == live.sum():
            found[i][live] = 1
        elif left > 0:
            ranked = -np.sort(-row[live])
            d = row[live] - ranked[int(np.ceil(left)) - 1]  # 0 is a score, between the smallest and the largest
            points = np.sort(np.concatenate([d, d - 1]))
            sums = np.array([np.clip(d - p, 0, 1).sum() for p in points])
            at = int(np.flatnonzero(sums >= left)[-1])
            active = (d > points[at]) & (d < points[at] + 1)
            between = (d >= points[at + 1]) & (d - 1 <= points[at]) if at + 1 < len(points) else active
            slope = between.sum()
            tau = points[at] + (sums[at] - left) / max(slope, 1) if sums[at] > left else points[at]
            found[i][live] = np.clip(d - tau, 0, 1)
    return found


def subset_log_marginals(x: np.ndarray, k: int) -> np.ndarray:
    """Return the log of the probability that a class is in a subset of k, by recursions of positive terms."""
    rows, n = x.shape
    none = np.full((rows, 1), -np.inf, x.dtype)

    def steps(order: range) -> dict[int, np.ndarray]:
        e = np.concatenate([np.zeros((rows, 1), x.dtype), np.repeat(none, k, 1)], 1)  # log e_0 .. log e_k
        found = {}
        for j in order:
            found[j] = e
            with np.errstate(invalid="ignore"):
                e = np.logaddexp(e, np.concatenate([none, e[:, :-1]], 1) + x[:, j : j + 1])
        found[-1] = e
        return found

    before, after = steps(range(n)), steps(range(n - 1, -1, -1))
    out = np.full(x.shape, -np.inf, x.dtype)
    for j in range(n):
        for taken in range(k):
            out[:, j] = np.logaddexp(out[:, j], before[j][:, taken] + after[j][:, k - 1 - taken])
    with np.errstate(invalid="ignore"):
        return out + x - before[-1][:, k : k + 1]


def binary(x: np.ndarray, share: np.ndarray, smoothing: float) -> np.ndarray:
    """Return the cross-entropy of one sigmoid per class, in the sum over the known classes that are not ruled out."""
    live = (share >= 0) & (x > -np.inf)
    q = (1 - smoothing) * share + smoothing / 2
    z = np.where(live, x, 0)
    return np.where(live, -q * log_sigmoid(z) - (1 - q) * log_sigmoid(-z), 0).sum(-1)


def multihot_softmax(x: np.ndarray, share: np.ndarray, smoothing: float = 0.125) -> np.ndarray:
    """Return the cross-entropy of the softmax over the known classes; 0 in a row without a label."""
    live = (share >= 0) & (x > -np.inf)
    part = np.where(live, share, 0)
    mass, n = part.sum(-1, keepdims=True), live.sum(-1, keepdims=True)
    gap = np.where(live, log_sum(x, live)[:, None] - np.where(live, x, 0), 0)
    q = (1 - smoothing) * part / np.where(mass > 0, mass, 1) + smoothing / np.maximum(n, 1)
    return np.where(mass[:, 0] > 0, (q * gap).sum(-1), 0)


def two_way(x: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Return softplus(log sum over negatives of (1 - t) e^x + 4 log sum over positives of t e^(-x / 4))."""
    live = (share >= 0) & (x > -np.inf)
    with np.errstate(all="ignore"):
        z, yes, no = np.where(live, x, 0), np.log(np.where(live, share, 0)), np.log(np.where(live, 1 - share, 0))
        above = log_sum(z + no, live & (share < 1)) + 4 * log_sum(yes - z / 4, live & (share > 0))
    has = (live & (share > 0)).any(-1) & (live & (share < 1)).any(-1)
    return np.where(has, -log_sigmoid(-np.where(has, above, 0)), 0)


def quasibinary(x: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Return the sum over the batch of -(t log q - max(log q, 0)), q = e^x / C, C so that q adds up to the labels."""
    live = (share >= 0) & (x > -np.inf)
    labels = np.where(live, share, 0).sum()
    if not labels > 0:
        return np.full(1, np.nan)
    log_c = log_sum(x.reshape(1, -1), live.reshape(1, -1)) - np.log(labels)
    log_q = np.where(live, np.where(live, x, 0) - log_c, 0)
    return np.where(live, np.maximum(log_q, 0) - share * log_q, 0).sum().reshape(1)


def outlier_uniform(x: np.ndarray) -> np.ndarray:
    """Return the divergence of the softmax from the uniform distribution; 0 without a class."""
    live = x > -np.inf
    n = np.maximum(live.sum(-1), 1)
    gap = np.where(live, log_sum(x, live)[:, None] - np.where(live, x, 0), 0)
    return np.where(live.any(-1), gap.sum(-1) / n - np.log(n), 0)


def max_confidence(x: np.ndarray) -> np.ndarray:
    """Return the log of the largest softmax probability; 0 without a class."""
    live = x > -np.inf
    with np.errstate(invalid="ignore"):
        return np.where(live.any(-1), x.max(-1) - log_sum(x, live), 0)


def weighted(x: np.ndarray, k: np.ndarray, w: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """Return the points x + w nu at which the sum of w (lower + (upper - lower) sigmoid) is k, by bisection."""
    rows = len(x)
    far = (np.abs(x).max(-1) + 1e4) / np.abs(w).min(-1)
    lo, hi = -far, far
    least = (np.where(w > 0, lower, upper) * w).sum(-1)
    for _ in range(400):
        nu = lo + (hi - lo) / 2
        z = x + w * nu[:, None]
        # From the least sum up, so that a sum near it keeps its digits.
        rise = (np.abs(w) * (upper - lower) * np.exp(log_sigmoid(np.where(w > 0, z, -z)))).sum(-1)
        over = rise > k - least
        lo, hi = np.where(over, lo, nu), np.where(over, nu, hi)
    assert z.shape == (rows, x.shape[1])
    return z


def grouped(x: np.ndarray, k: np.ndarray, groups: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """Return probabilities whose sum is k and whose sum per group is at most the limit, one limit per row."""
    kinds = [groups == g for g in np.unique(groups)]
    lo, hi = -np.abs(x).max(-1) - 1e4, np.abs(x).max(-1) + 1e4
    for _ in range(200):
        nu = lo + (hi - lo) / 2
        y = np.exp(log_sigmoid(x + nu[:, None]))
        over = sum(np.minimum(y[:, kind].sum(-1), limit) for kind in kinds) > k
        lo, hi = np.where(over, lo, nu), np.where(over, nu, hi)
    for kind in kinds:
        full = y[:, kind].sum(-1) > limit
        if full.any():
            rows = np.flatnonzero(full)
            y[np.ix_(rows, kind)] = np.exp(log_sigmoid(lml(x[np.ix_(rows, kind)], limit[rows]).points))
    return y
