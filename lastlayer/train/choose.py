"""Fit the candidates of a linear model and choose one on rows that they were not fitted to.

The candidates are the exact solver's losses, each for a few C, and coupled losses by minibatches. With many rows and
complete labels the latter start from the exact solution of the binary loss: a few passes then do what takes twenty from
0. Where labels are missing that solution is a bad start, since it takes silence for an answer. Where validation rows
are few, all rows are scored out of fold instead. A candidate that is clearly worse than the best (by two standard
errors) after some folds is not fitted to the others, unless a blend with it is better than the best alone.

The best candidate is blended with those of other losses as long as the metric rises: losses that err on different rows
gain together, and a choice between two that are almost alike is no longer a matter of chance. With few rows a blend
with LML is taken unless it is clearly worse: its order of the labels of new rows was the best on most sets of that
size, which says more than a difference that the rows cannot tell from chance. So is one with thinned LML where labels
are incomplete: it is the nearest to the best over the sets of `experiments/incomplete_labels`, and the labels that are
left tell differences of a point at best, even with thousands of rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
import torch

from lastlayer.data import LabelData, fold_rows
from lastlayer.runs.rows import row_mean, row_metrics, set_metrics
from lastlayer.train.batches import EpochBatches
from lastlayer.train.blend import Blend, Candidate, added, outputs
from lastlayer.train.calibrate import Calibration
from lastlayer.train.config import Config
from lastlayer.train.decide import Decision
from lastlayer.train.exact import SOLVED, as_network, solve, usual_cost
from lastlayer.train.held_out import hot_matrix
from lastlayer.train.network import LabelSetNetwork
from lastlayer.train.resolved import Resolved, lower_is_better
from lastlayer.train.serve import odds

ENOUGH = 2000  # validation rows that choose well enough alone
GROUPED = 10_000  # and where rows have groups: a few large groups may say much, most of all for the calibration
FOLDS = (5, 10)  # of many rows, and of few: coupled losses gain more from the rows that folds leave out
FEWEST = 10  # rows below which there is no choice
TRIED = 20_000  # rows that the candidates are fitted to for the choice; drawn, if there are more
PATHS = {"squared_hinge": (0.1, 0.3, 1.0), "binary": (1.0, 3.0, 10.0)}  # the C that are tried, for rows of length 1
FURTHER = 3  # steps by which a path may grow where its end is best
PASSES = (5, 25)  # over the rows by minibatches, from the exact solution: of many rows, and at most
FEW = 1000  # rows below which there are ten folds, and LML is taken if it may be the best
MANY = 10_000  # rows from which on minibatches start from the exact solution
LONG = (8, 50)  # passes by minibatches from 0: of many rows, and at most
WORSE = 2.0  # standard errors by which a candidate must be worse to be left out


@dataclass(frozen=True)
class Pool:
    """The rows that may be used: those of training first, then those of validation.

    Args:
        x: Features, a float32 array or CSR matrix.
        labels: The labels of the rows, with weights and groups.
        n_train: The number of training rows.
    """

    x: Any
    labels: LabelData
    n_train: int

    @classmethod
    def of(cls, inputs: dict[str, Any], parts: dict[str, LabelData]) -> Pool:
        """Join the training and the validation rows."""
        names = [name for name in ("train", "valid") if name in parts]
        x = [inputs[name] for name in names]
        joined = x[0] if len(x) == 1 else sp.vstack(x, format="csr") if sp.issparse(x[0]) else np.concatenate(x)
        return cls(joined, _joined([parts[name] for name in names]), len(parts["train"]))

    def counted(self) -> Pool:
        """Return the rows that count: those of a weight above 0, without weights if all are 1 then."""
        weights = self.labels.weights
        if weights is None:
            return self
        rows = np.flatnonzero(weights)
        x, labels = (self.x, self.labels) if len(rows) == len(weights) else self.take(rows)
        if (weights[rows] == 1).all():
            labels = replace(labels, weights=None)
        return Pool(x, labels, int(np.count_nonzero(weights[: self.n_train])))

    def take(self, rows: np.ndarray) -> tuple[Any, LabelData]:
        """Return the features and labels of some rows."""
        return self.x[rows], self.labels.take(rows)

    def train(self) -> tuple[Any, LabelData]:
        """Return the features and labels of the training rows."""
        return self.take(np.arange(self.n_train)) if self.n_train < len(self.labels) else (self.x, self.labels)


class Chosen(NamedTuple):
    """What was chosen, and the scores of held-out rows by the models that had not seen them."""

    blend: Blend  # of one candidate or more
    resolved: Resolved
    scores: np.ndarray | None  # (rows, n_labels), the log-odds or margins of what was chosen
    labels: LabelData | None  # of these rows
    line: str  # what was chosen and by how much
    table: list[dict[str, Any]]  # one line per candidate
    network: LabelSetNetwork | None  # fitted to the training rows, where there was one split


def choose(
    pool: Pool,
    config: Config,
    resolved: Resolved,
    *,
    folds: bool,
    say: Callable[[dict[str, Any]], None] = lambda line: None,
) -> Chosen:
    """Choose the loss and C by the monitored metric on held-out rows.

    Args:
        pool: The rows.
        config: The settings of the run; its loss is ``"auto"`` or one of the exact solver.
        resolved: What "auto" became so far.
        folds: Whether rows may be scored out of fold, so that training rows help to choose.
        say: Called with a line about each candidate.
    """
    race = _Race(pool, config, resolved, say)
    splits = list(_splits(pool, config, folds))
    if not splits:
        loss = "binary" if config.loss == "auto" else config.loss
        only = Candidate(loss, race.costs(loss)[0] if config.C != "auto" else race.usual)
        line = f"loss: {only.words()}; too few rows or groups to choose"
        return Chosen(Blend((only,)), race.resolved(only), None, None, line, [], None)
    for number, (fitted, held) in enumerate(splits):
        race.run(fitted, held, first=number == 0)
    return race.finish(splits)


class _Race:
    """The candidates that are left, with their scores so far."""

    def __init__(self, pool: Pool, config: Config, resolved: Resolved, say: Callable[[dict[str, Any]], None]) -> None:
        self.pool, self.config, self.base, self.say = pool, config, resolved, say
        self.monitor = resolved.monitor or "ndcg@" + str(resolved.at[-1])
        self.usual = usual_cost(pool.x)
        self.losses = tuple(SOLVED) if config.loss == "auto" else (config.loss,)
        self.scores: dict[Candidate, list[np.ndarray]] = {}  # the outputs for held-out rows, for each split
        self.measured: dict[Candidate | Blend, list[np.ndarray]] = {}  # the metric of each row, for each split
        self.known: dict[tuple[Candidate | Blend, int], float] = {}  # the metric of all rows of some splits
        self.held: list[LabelData] = []
        self.seconds: dict[Candidate, float] = {}
        self.networks: dict[Candidate, LabelSetNetwork] = {}  # of the last split
        self.out: dict[Candidate, float] = {}  # how much worse those that were left out were than the best of then

    def costs(self, loss: str) -> list[float]:
        """Return the C to start with."""
        if self.config.C != "auto":
            return [float(self.config.C)]
        return [c * self.usual for c in PATHS[loss]]

    def resolved(self, option: Candidate | Blend) -> Resolved:
        """Return the settings that a candidate is trained with, or a blend is used with."""
        first = option if isinstance(option, Candidate) else option.parts[0]
        resolved = Resolved.of(replace(self.config, loss=first.loss), self.pool.labels)
        resolved = replace(resolved, monitor=self.base.monitor, at=self.base.at)
        if isinstance(option, Candidate) or len(option.parts) == 1:
            return resolved
        probability = resolved.probability
        if self.config.probability == "auto":
            incomplete = self.config.labels == "incomplete"  # where only thinned LML's are those of the true labels
            of_k = any(part.thinned if incomplete else not part.exact for part in option.parts)
            probability = "lml" if of_k else "sigmoid"
        return replace(resolved, probability=probability, blend=option.names())

    def run(self, fitted: np.ndarray, held: np.ndarray, first: bool) -> None:
        """Fit the candidates to some rows and score others."""
        x, labels = self.pool.take(fitted)
        held_x, held_labels = self.pool.take(held)
        self.held.append(held_labels)
        self.networks = {}
        for loss in self.losses:
            costs = self.costs(loss) if first else [c.C for c in self.scores if c.loss == loss]
            if not first and loss == "binary" and not costs:
                costs = [c.C for c in self.scores if not c.exact and c.C][:1]  # minibatches start from it
            self._exact(x, labels, held_x, loss, costs)
            for _ in range(FURTHER if first and self.config.C == "auto" else 0):
                beyond = self._beyond(loss)
                if beyond is None:
                    break
                self._exact(x, labels, held_x, loss, [beyond])
        if self.config.loss == "auto" and self.config.solver != "dual":
            self._coupled(x, labels, held_x, first)
        self._drop()

    def _exact(self, x: Any, labels: LabelData, held_x: Any, loss: str, costs: list[float]) -> None:
        if not costs:
            return
        begun = time.process_time()
        for weights in solve(x, labels, loss, sorted(costs), self.config):
            candidate = Candidate(loss, float(weights.C))
            self.networks[candidate] = as_network(weights, sp.issparse(x))
            self._add(candidate, held_x, (time.process_time() - begun) / len(costs))

    def _beyond(self, loss: str) -> float | None:
        """Return the next C of a path whose best value is at its end."""
        tried = sorted(c.C for c in self.scores if c.loss == loss)
        values = [self.value(Candidate(loss, C)) for C in tried]
        if values[-1] > max(values[:-1]):
            return tried[-1] * 3
        return tried[0] / 3 if values[0] > max(values[1:]) else None

    def _coupled(self, x: Any, labels: LabelData, held_x: Any, first: bool) -> None:
        """Fit the coupled losses, from the exact solution of the binary loss."""
        if first:
            best = max((c for c in self.scores if c.loss == "binary"), key=self.value)
            start = 0.0 if len(self.pool.labels) < MANY or self.config.labels == "incomplete" else best.C
            names = [("lml", False)] + ([("lml", True)] if self.config.labels == "incomplete" else [])
            names += [("two_way", False)] if labels.weights is None else []
            wanted = [Candidate(name, start, thinned) for name, thinned in names]
        else:
            wanted = [c for c in self.scores if not c.exact]
        for candidate in wanted:
            begun = time.process_time()
            before = self.networks[Candidate("binary", candidate.C)] if candidate.C else None
            self.networks[candidate] = fit_coupled(x, labels, candidate, self.config, self.resolved(candidate), before)
            self._add(candidate, held_x, time.process_time() - begun)

    def _add(self, candidate: Candidate, held_x: Any, seconds: float) -> None:
        scores = outputs(self.networks[candidate], held_x)
        if len(self.held) > 1 and candidate not in self.scores:  # only the start of others
            return
        self.scores.setdefault(candidate, []).append(scores)
        self.seconds[candidate] = self.seconds.get(candidate, 0.0) + seconds
        if len(self.held) == 1:
            self.say({"candidate": candidate.words(), self.monitor: abs(self.value(candidate)), "seconds": seconds})

    def outputs(self, option: Candidate | Blend) -> list[np.ndarray]:
        """Return the outputs for the held-out rows of each split."""
        if isinstance(option, Candidate):
            return self.scores[option]
        pairs = list(zip(*option, strict=True))
        lists = [[np.asarray(scale * one, np.float32) for one in self.scores[c]] for c, scale in pairs]
        return [np.sum(parts, axis=0) for parts in zip(*lists, strict=True)]

    def each(self, option: Candidate | Blend) -> np.ndarray | None:
        """Return the metric of each held-out row, if it has one per row."""
        if "@" not in self.monitor:
            return None
        done = self.measured.setdefault(option, [])
        if len(done) < len(self.held):
            for scores, labels in list(zip(self.outputs(option), self.held, strict=False))[len(done) :]:
                k = int(self.monitor.partition("@")[2])
                top = torch.from_numpy(scores).topk(min(k, scores.shape[1])).indices.numpy()
                done.append(row_metrics(top, labels.indptr, labels.indices, [k])[self.monitor])
        return np.concatenate(done)

    def value(self, option: Candidate | Blend) -> float:
        """Return the metric, the larger the better; hamming loss is negative."""
        key = option, len(self.held)
        if key not in self.known:
            self.known[key] = self._measure(option)
        return self.known[key]

    def _measure(self, option: Candidate | Blend) -> float:
        each = self.each(option)
        if each is not None:
            return row_mean(each, self._weight(len(each)))
        scores = log_odds(np.concatenate(self.outputs(option)), self.resolved(option))
        hot = hot_matrix(_joined(self.held[: len(self.outputs(option))]))
        weight = self._weight(len(scores))
        y = Calibration.fit(scores, hot, weight=weight, penalties=(np.inf,)).probability(scores)
        rule = "macro_f1" if self.monitor == "macro_f1" else "micro_f1"
        level = Decision.tune(rule, y, hot, weight=weight).threshold
        said = sp.csr_matrix(y > level)
        sets = said.indptr, said.indices, hot.indptr, hot.indices
        measured = set_metrics(*sets, hot.shape[1], weight=weight)[self.monitor]
        return -measured if lower_is_better(self.monitor) else measured

    def _weight(self, rows: int) -> np.ndarray | None:
        """Return the weights of the first held-out rows, with a mean of 1; None if rows have none."""
        weights = _joined(self.held).weights
        return None if weights is None else weights[:rows] / (weights[:rows].mean() or 1.0)

    def slope(self, option: Candidate | Blend) -> float:
        """Return the factor that makes log-odds of outputs, but for a constant."""
        scores = np.concatenate(self.outputs(option))
        hot = hot_matrix(_joined(self.held[: len(self.outputs(option))]))
        weight = self._weight(len(scores))
        return float(Calibration.fit(scores, hot, weight=weight, penalties=(np.inf,)).slope[0])

    def _leaders(self) -> list[Candidate]:
        """Return the best candidate of each loss, the best first."""
        best: dict[str, Candidate] = {}
        for candidate in sorted(self.scores, key=self.value, reverse=True):
            best.setdefault(candidate.name, candidate)
        return list(best.values())

    def _grown(self, first: Candidate) -> Blend:
        """Add the best candidates of other losses to one, as long as the metric rises."""
        slopes = {c: self.slope(c) for c in self._leaders()}
        blend, value = Blend((first,), (slopes.get(first) or self.slope(first),)), self.value(first)
        while wider := [blend.add(c, slopes[c]) for c in slopes if c.name not in {part.name for part in blend.parts}]:
            best = max(wider, key=self.value)
            if self.value(best) <= value:
                break
            blend, value = best, self.value(best)
        if len(blend.parts) == 1:
            return Blend((first,))
        return blend.times(self.slope(blend) / self._unit(blend, slopes))

    def _unit(self, blend: Blend, slopes: dict[Candidate, float]) -> float:
        """Return the slope that a blend gets: 1, or that of thinned LML, whose probabilities are not calibrated."""
        thinned = [slopes[part] for part in blend.parts if part.thinned]
        return thinned[0] if thinned else 1.0

    def _drop(self) -> None:
        """Leave out the candidates that are clearly worse than the best, unless a blend with it is better."""
        best, *others = self._leaders()
        kept = {best} if self.each(best) is not None else set(self.scores)
        if others and len(kept) == 1:
            alone = Blend((best,), (self.slope(best),))
            kept |= {c for c in others if self.value(alone.add(c, self.slope(c))) > self.value(best)}
        for candidate in [c for c in self.scores if c not in kept]:
            if (gap := self._behind(candidate, best)) is not None:
                self.out[candidate] = gap
                del self.scores[candidate]

    def _behind(self, option: Candidate | Blend, best: Candidate | Blend) -> float | None:
        """Return by how much an option is worse, or None if that may be chance."""
        ours, theirs = self.each(option), self.each(best)
        if ours is None or theirs is None:
            return None
        weight = self._weight(len(ours))
        weight = np.ones(len(ours)) if weight is None else weight
        seen = np.isfinite(theirs - ours) & (weight > 0)
        gap, weight = (theirs - ours)[seen], weight[seen]
        if len(gap) < 2:
            return float(gap.mean()) if len(gap) else 0.0
        mean = np.average(gap, weights=weight)
        spread = np.sqrt(np.average((gap - mean) ** 2, weights=weight))
        alike = weight.sum() ** 2 / np.square(weight).sum()  # as many rows of equal weight tell as much (Kish 1965)
        return float(mean) if mean > WORSE * spread / np.sqrt(alike) else None

    def _usual(self) -> list[Candidate]:
        """Return the candidates that are taken because nothing is clearly better; none where the rows can tell."""
        if "@" not in self.monitor:
            return []
        if self.config.labels == "incomplete" and (thinned := [c for c in self.scores if c.thinned]):
            return thinned
        return [c for c in self.scores if c.loss == "lml"] if len(self.pool.labels) < FEW else []

    def _best(self) -> tuple[Blend, bool]:
        """Return the best blend, or one with LML if it is not clearly better, and whether it is the latter."""
        best = self._grown(max(self.scores, key=self.value))
        usual = [self._grown(c) for c in self._usual()]
        usual = [blend for blend in usual if self._behind(blend, best) is None]
        taken = max(usual, key=self.value) if usual else best
        return taken, self.value(taken) < self.value(best)

    def finish(self, splits: list[tuple[np.ndarray, np.ndarray]]) -> Chosen:
        """Take the best, or LML if nothing is clearly better, and describe the others."""
        values = {c: self.value(c) for c in self.scores}
        top = max(values.values())
        values |= {c: top - gap for c, gap in self.out.items()}
        best, chance = self._best()
        resolved = self.resolved(best)
        rest: dict[str, str] = {}
        for candidate in sorted((c for c in values if c.name != best.names()), key=lambda c: -values[c]):
            rest.setdefault(candidate.name, f"{100 * abs(values[candidate]):.1f} ({candidate.name})")
        n = sum(len(labels) for labels in self.held)
        rows = f"{n} validation rows" if len(splits) == 1 else f"{n} out-of-fold rows"
        line = f"loss: {best.words()}, chosen by {self.monitor} of {rows}: {100 * abs(self.value(best)):.1f}"
        line += f", against {', '.join(rest.values())}" if rest else ""
        line += "; the difference may be chance, and LML is taken then" if chance else ""
        table = [
            {"candidate": c.words(), "loss": c.loss, "thinned": c.thinned, "C": c.C, "value": abs(v),
             "seconds": round(self.seconds.get(c, 0.0), 3), "left_out": c in self.out, "chosen": c in best.parts,
             "scale": dict(zip(*best, strict=True)).get(c, 0.0)}
            for c, v in sorted(values.items(), key=lambda pair: -pair[1])
        ]  # fmt: skip
        network, scores = None, np.concatenate(self.outputs(best))
        if len(splits) == 1:
            fitted, held = splits[0]
            rest_of = np.setdiff1d(np.arange(self.pool.n_train), held)
            if len(fitted) < len(rest_of):  # it was chosen on a part of the rows
                network = fit(best, *self.pool.take(rest_of), self.config, resolved)
                scores = outputs(network, self.pool.x[held])
            else:
                network = added([self.networks[part] for part in best.parts], best.scales)
        return Chosen(best, resolved, log_odds(scores, resolved), _joined(self.held), line, table, network)


def log_odds(scores: np.ndarray, resolved: Resolved) -> np.ndarray:
    """Return the scores before calibration of outputs: log-odds for the LML rule, else the outputs."""
    with torch.inference_mode():
        return odds(torch.from_numpy(scores), resolved)[0].numpy()


def fit(option: Candidate | Blend, x: Any, labels: LabelData, config: Config, resolved: Resolved) -> LabelSetNetwork:
    """Fit a candidate, or each part of a blend, to rows."""
    if isinstance(option, Blend):
        settled = [replace(resolved, loss=part.loss) for part in option.parts]
        parts = [fit(part, x, labels, config, own) for part, own in zip(option.parts, settled, strict=True)]
        return added(parts, option.scales)
    if option.C == 0:
        return fit_coupled(x, labels, option, config, resolved, None)
    loss = option.loss if option.exact else "binary"
    network = as_network(solve(x, labels, loss, [option.C], config)[0], sp.issparse(x))
    return network if option.exact else fit_coupled(x, labels, option, config, resolved, network)


def passes_over(rows: int) -> int:
    """Return the number of passes by minibatches from the exact solution: 25 up to 256 rows, 5 from 6,400 on."""
    return int(np.clip(round(400 / np.sqrt(max(rows, 1))), *PASSES))


def fit_coupled(
    x: Any, labels: LabelData, candidate: Candidate, config: Config, resolved: Resolved, start: LabelSetNetwork | None
) -> LabelSetNetwork:
    """Minimise a loss that couples the labels by minibatches, from the weights of another network or from 0."""
    from lastlayer.train.fit_network import quiet
    from lastlayer.train.module import LabelSetData, LabelSetModule, fit_in_process

    network = LabelSetNetwork(x.shape[1], labels.n_labels, sparse=sp.issparse(x))
    settled = replace(config, loss=candidate.loss).settled(network.sparse)
    if not candidate.thinned:
        resolved = replace(resolved, observed=0.0)
    if start is None:
        passes = int(np.clip(round(1600 / np.sqrt(max(len(labels), 1))), *LONG))
    else:
        network.load_state_dict(start.state_dict())
        passes = passes_over(len(labels))
        if settled.optimizer == "adamw":  # its steps have the size of the rate, whatever the gradient is
            settled = replace(settled, lr=str(0.1 * float(settled.lr)))
    steps = len(EpochBatches(len(labels), config.batch_size, seed=0)) * passes
    module = LabelSetModule(network, settled, resolved, total_steps=steps)
    if start is None:
        module.start_at_frequencies(labels)
    with quiet():
        fit_in_process(module, LabelSetData(x, labels, batch_size=config.batch_size, seed=config.seed), passes)
    return network.eval()


def _splits(pool: Pool, config: Config, folds: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the rows to fit and the rows to score."""
    n, n_valid = len(pool.labels), len(pool.labels) - pool.n_train
    order = np.random.default_rng(config.seed).permutation(pool.n_train)
    enough = GROUPED if pool.labels.groups is not None and config.labels == "complete" else ENOUGH
    if n_valid >= enough or (n_valid and not folds):
        yield _some(order, config), np.arange(pool.n_train, n)
    elif not folds or _n_apart(pool.labels) < 2:
        return
    elif not n_valid and n >= 10 * enough:  # enough rows to set some of them aside, or whole groups
        aside = np.argsort(order) < n // 10
        if pool.labels.groups is not None:
            aside = fold_rows(pool.labels, min(10, _n_apart(pool.labels)), seed=config.seed) == 0
        yield _some(order[~aside[order]], config), np.flatnonzero(aside)
    elif n >= FEWEST:
        number = min(FOLDS[n < FEW], _n_apart(pool.labels))
        fold = fold_rows(pool.labels, number, seed=config.seed)
        for i in range(number):
            fitted, held = np.flatnonzero(fold != i), np.flatnonzero(fold == i)
            if len(fitted) and len(held) and pool.labels.take(fitted).indices.size:
                yield fitted, held


def _n_apart(labels: LabelData) -> int:
    """Return into how many folds rows can go: one for each group, and for each row without one."""
    groups = labels.groups
    return len(labels) if groups is None else len({group for group in groups if group}) + groups.count("")


def _some(rows: np.ndarray, config: Config) -> np.ndarray:
    """Return the rows that the candidates are fitted to, in order: all, or some of very many."""
    return np.sort(rows[:TRIED] if config.loss == "auto" else rows)


def _joined(parts: list[LabelData]) -> LabelData:
    """Join the labels, weights and groups of rows, and leave their texts and features out."""
    counts = np.concatenate([part.row_counts() for part in parts])
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    weights = groups = None
    if any(part.weights is not None for part in parts):
        weights = np.concatenate([np.ones(len(p)) if p.weights is None else p.weights for p in parts])
    if any(part.groups is not None for part in parts):
        groups = [name for p in parts for name in (p.groups if p.groups is not None else [""] * len(p))]
    indices = np.concatenate([part.indices for part in parts])
    return LabelData(None, None, indptr, indices, parts[0].label_names, groups=groups, weights=weights)
