"""Which rows should a person label next? Rules that look at the model beside a draw at random.

    python -m experiments.label_next.run --data FOLDER [--sets bibtex goemotions medical yeast] [--jobs 6]

A tenth of the training rows has labels, drawn at random per seed. In each of five rounds a rule chooses another
twentieth of the training rows, these get all their labels, and the model (logistic regressions, one per label) is
fitted again and measured on the test rows. Every rule starts from the same rows. The rules see the features of all rows
and the labels of the labelled ones alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
import torch

import lastlayer as ll
from experiments import common
from lastlayer.data import LabelData, read_parts, split_rows
from lastlayer.train.config import Config
from lastlayer.train.features import FeatureMap
from lastlayer.train.linear import fit_linear

HERE = Path(__file__).parent
SETS = ("bibtex", "goemotions", "debian", "medical", "yeast")
START, BATCH, ROUNDS = 0.1, 0.05, 5
COST = 3.0
MOST_ROWS = 10_000  # training rows of a set; of larger ones a draw
DEBIAN = {"text_column": "name,short,long", "label_column": "tags", "group_column": "source"}


class Rows(NamedTuple):
    x: sp.csr_matrix
    y: sp.csr_matrix


class State(NamedTuple):
    """What a rule may look at: unlabelled rows, their probabilities, labelled rows with labels, and a generator."""

    x: sp.csr_matrix  # the unlabelled rows, of length 1
    p: np.ndarray
    labelled_x: sp.csr_matrix
    labelled_y: sp.csr_matrix
    rng: np.random.Generator


Rule = Callable[[State, int], np.ndarray]  # the places of the chosen rows among the unlabelled ones


def entropy(state: State) -> np.ndarray:
    """The entropy of the label set, were its labels independent."""
    p = state.p.clip(1e-6, 1 - 1e-6)
    return -(p * np.log(p) + (1 - p) * np.log(1 - p)).sum(1)


def margin(state: State) -> np.ndarray:
    """How near the score of the first label that is left out is to that of the last that is taken, at k labels."""
    k = np.clip(np.rint(state.p.sum(1)).astype(int), 1, state.p.shape[1] - 1)
    best = -np.sort(-state.p, axis=1)
    at = np.arange(len(best))
    return best[at, k] - best[at, k - 1]


def count(state: State) -> np.ndarray:
    """The number of labels that is expected."""
    return state.p.sum(1)


def rare(state: State) -> np.ndarray:
    """The expected labels, each weighted by one over the number of its rows so far."""
    seen = np.asarray(state.labelled_y.sum(0)).ravel()
    return state.p @ (1 / (seen + 1))


def change(state: State) -> np.ndarray:
    """How far labels could be from their probabilities: the expected length of the gradient, rows being of length 1."""
    return np.sqrt((state.p * (1 - state.p)).sum(1))


def by(score: Callable[[State], np.ndarray]) -> Rule:
    """Choose the rows of the highest scores."""
    return lambda state, n: np.argsort(-score(state), kind="stable")[:n]


def at_random(state: State, n: int) -> np.ndarray:
    return state.rng.permutation(len(state.p))[:n]


def spread(state: State, n: int) -> np.ndarray:
    """Draw rows one by one, each with a chance that grows with its distance to the rows chosen so far."""
    return _far_apart(state.x, np.ones(len(state.p)), n, state.rng, state.labelled_x)


def entropy_and_spread(state: State, n: int) -> np.ndarray:
    """The same, with chances in proportion to the entropy too."""
    return _far_apart(state.x, entropy(state), n, state.rng, state.labelled_x)


def rare_and_spread(state: State, n: int) -> np.ndarray:
    """The same with the weighted number of expected labels."""
    return _far_apart(state.x, rare(state), n, state.rng, state.labelled_x)


def half_random(score: Callable[[State], np.ndarray]) -> Rule:
    """Choose one half by the highest scores, the other at random."""

    def rule(state: State, n: int) -> np.ndarray:
        first = by(score)(state, n // 2)
        rest = np.setdiff1d(np.arange(len(state.p)), first)
        return np.concatenate([first, state.rng.permutation(rest)[: n - len(first)]])

    return rule


def _far_apart(x: Any, weight: np.ndarray, n: int, rng: np.random.Generator, known: Any) -> np.ndarray:
    nearest = np.full(x.shape[0], 2.0)  # the squared distance of unit vectors is 2 - 2 cos
    for at in range(0, known.shape[0], 500):
        nearest = np.minimum(nearest, 2 - 2 * (x @ known[at : at + 500].T).toarray().max(1))
    chosen: list[int] = []
    for _ in range(n):
        chance = weight * nearest.clip(0)
        chance[chosen] = 0
        if chance.sum() <= 0:
            chance = np.ones(len(weight))
            chance[chosen] = 0
        one = int(rng.choice(len(weight), p=chance / chance.sum()))
        chosen.append(one)
        nearest = np.minimum(nearest, 2 - 2 * (x @ x[one].T).toarray().ravel())
    return np.array(chosen)


RULES: dict[str, Rule] = {
    "random": at_random,
    "entropy": by(entropy),
    "margin": by(margin),
    "expected count": by(count),
    "expected change": by(change),
    "rare labels": by(rare),
    "spread": spread,
    "entropy and spread": entropy_and_spread,
    "rare labels and spread": rare_and_spread,
    "rare labels, half random": half_random(rare),
}


def load(folder: Path | None, name: str) -> tuple[Rows, Rows]:
    """Return training and test rows; the features are fitted to the training rows without their labels."""
    parts = tiny() if folder is None else _read(folder, name)
    train, test = parts["train"], parts["test"].with_labels(parts["train"].label_names)[0]
    if len(train) > MOST_ROWS:
        train = train.take(np.sort(np.random.default_rng(0).permutation(len(train))[:MOST_ROWS]))
    features = FeatureMap.fit(train, Config())
    return tuple(Rows(sp.csr_matrix(features(d)), _matrix(d)) for d in (train, test))  # type: ignore[return-value]


def _read(folder: Path, name: str) -> dict[str, LabelData]:
    if name == "goemotions":
        return {part: read_parts(folder / name / f"{part}.tsv.xz")["all"] for part in ("train", "test")}
    if name == "debian":
        parts = read_parts(folder / "debian_tags/debian_bookworm.jsonl.xz", **DEBIAN)
    else:
        parts = read_parts(folder / "mulan" / f"{name}.npz")
    if name == "medical":  # 333 training rows are few: both parts together, split anew
        both = [parts["train"], parts["test"]]
        lists = [d.names(i) for d in both for i in range(len(d))]
        x = sp.vstack([sp.csr_matrix(d.features) for d in both]).tocsr()
        parts = {"all": LabelData.from_lists(lists, features=x)}
    if "all" in parts:
        kept = parts["all"].take(np.flatnonzero(parts["all"].row_counts()))
        parts = dict(zip(("train", "test"), split_rows(kept, [0.7, 0.3]), strict=True))
    return parts


def tiny() -> dict[str, LabelData]:
    rng = np.random.default_rng(0)
    x = sp.random(300, 40, 0.2, format="csr", dtype=np.float32, random_state=0)
    lists = [[str(j % 8) for j in rng.choice(row.indices, 2)] if row.nnz > 1 else ["0"] for row in x]
    data = LabelData.from_lists(lists, features=x)
    return {"train": data.take(np.arange(200)), "test": data.take(np.arange(200, 300))}


def _matrix(data: LabelData) -> sp.csr_matrix:
    shape = (len(data), data.n_labels)
    return sp.csr_matrix((np.ones(len(data.indices), np.float32), data.indices, data.indptr), shape)


def _fit(x: Any, y: Any) -> Callable[[Any], np.ndarray]:
    model = fit_linear(x, y, loss="logistic", C=COST, n_labels=y.shape[1], tolerance=0.1, threads=1)
    weight = model.matrix().T.tocsr()
    return lambda rows: 1 / (1 + np.exp(-((rows @ weight).toarray() + model.intercept).clip(-30, 30)))


def threshold(x: Any, y: Any, rng: np.random.Generator) -> float:
    """The threshold of the best micro-F1 on labelled rows, each scored by the model of two thirds of the others."""
    fold = rng.permutation(np.arange(x.shape[0]) % 3)
    p = np.empty(y.shape)
    for i in range(3):
        p[fold == i] = _fit(x[fold != i], y[fold != i])(x[fold == i])
    true = y.toarray().ravel() > 0
    order = np.argsort(-p.ravel(), kind="stable")
    right = np.cumsum(true[order])
    best = int(np.argmax(2 * right / (np.arange(1, len(right) + 1) + true.sum())))
    return float(p.ravel()[order[best]])


def measure(p: np.ndarray, y: sp.csr_matrix, least: float) -> dict[str, float]:
    scores, target = torch.from_numpy(p).float(), torch.from_numpy(y.toarray())
    chosen, true = p >= least, y.toarray() > 0
    f1 = 2 * (chosen & true).sum() / max(chosen.sum() + true.sum(), 1)
    return {"R@5": float(ll.recall_at_k(scores, target, min(5, p.shape[1]))), "micro-F1": float(f1)}


def curve(folder: Path | None, name: str, rule: str, seed: int) -> list[dict[str, Any]]:
    """Run the rounds of one rule; return a row per round."""
    torch.set_num_threads(1)
    train, test = load(folder, name)
    n = train.x.shape[0]
    length = np.sqrt(np.asarray(train.x.multiply(train.x).sum(1)).ravel())
    unit = sp.csr_matrix(sp.diags(1 / np.maximum(length, 1e-6)) @ train.x)
    start = np.random.default_rng(seed).permutation(n)[: round(START * n)]
    labelled = np.zeros(n, bool)
    labelled[start] = True
    rng, out = np.random.default_rng(1000 + seed), []
    for step in range(ROUNDS + 1):
        x, y = train.x[labelled], train.y[labelled]
        score = _fit(x, y)
        found = measure(score(test.x), test.y, threshold(x, y, np.random.default_rng(seed)))
        out.append({"set": name, "rule": rule, "seed": seed, "rows": int(labelled.sum()), "round": step, **found})
        rest = np.flatnonzero(~labelled)
        state = State(unit[rest], score(train.x[rest]), unit[labelled], y, rng)
        labelled[rest[RULES[rule](state, round(BATCH * n))]] = True
    return out


def tables(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The mean over the five rounds of each rule less that of random rows with the same seed, and how often above."""
    out = {}
    for metric in ("R@5", "micro-F1"):
        mean: dict[tuple[str, str, int], float] = {}
        ordered = sorted(rows, key=lambda r: (r["set"], r["rule"], r["seed"]))
        for (name, rule, seed), group in itertools.groupby(ordered, lambda r: (r["set"], r["rule"], r["seed"])):
            mean[name, rule, seed] = float(np.mean([row[metric] for row in group if row["round"]]))
        sets = [name for name in SETS if any(key[0] == name for key in mean)]
        lines = ["| rule | " + " | ".join(sets) + " |", "| --- " * (len(sets) + 1) + "|"]
        for rule in RULES:
            cells = []
            for name in sets:
                seeds = sorted(s for n, r, s in mean if (n, r) == (name, rule) and (name, "random", s) in mean)
                own = np.array([100 * mean[name, rule, s] for s in seeds])
                base = np.array([100 * mean[name, "random", s] for s in seeds])
                if not len(seeds):
                    cells.append("")
                elif rule == "random":
                    cells.append(f"{own.mean():.2f} ± {own.std(ddof=1) if len(own) > 1 else 0:.2f}")
                else:
                    more = own - base
                    spread_of = more.std(ddof=1) if len(more) > 1 else 0.0
                    cells.append(f"{more.mean():+.2f} ± {spread_of:.2f} ({(more > 0).sum()} of {len(more)})")
            lines.append(f"| {rule} | " + " | ".join(cells) + " |")
        out[metric] = "\n".join(lines)
    return out


SHOWN = {
    "random": "0.4",
    "margin": "tab:orange",
    "entropy and spread": "tab:blue",
    "rare labels, half random": "tab:green",
}


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Micro-F1 against the number of labelled rows, a panel per set: means over the seeds that all rules have."""
    import matplotlib.pyplot as plt

    sets = [name for name in SETS if any(row["set"] == name for row in rows)]
    figure, axes = plt.subplots(1, len(sets), figsize=(2.6 * len(sets), 2.8), squeeze=False)
    for panel, name in zip(axes[0], sets, strict=True):
        for rule, colour in SHOWN.items():
            points: dict[int, list[float]] = {}
            for row in rows:
                if row["set"] == name and row["rule"] == rule:
                    points.setdefault(row["rows"], []).append(100 * row["micro-F1"])
            panel.plot(
                list(points), [np.mean(v) for v in points.values()], "o-", color=colour, label=rule, markersize=3
            )
        panel.set(title=name, xlabel="labelled rows")
    axes[0, 0].set_ylabel("micro-F1, percent")
    axes[0, 0].legend(fontsize=8)
    common.save(figure, path)


def main(argv: list[str] | None = None) -> None:
    made = common.parser(__doc__, HERE / "results/results.json")
    made.add_argument("--figure", type=Path, help="only draw the figure from the results, to this file")
    made.add_argument("--sets", nargs="+", default=list(SETS))
    made.add_argument("--rules", nargs="+", default=list(RULES), choices=list(RULES))
    made.add_argument("--jobs", type=int, default=1, help="processes of one thread each")
    made.set_defaults(seeds=10)
    arguments = made.parse_args(argv)
    if common.finish(arguments, tables, draw):
        return
    if arguments.smoke:
        arguments.sets, arguments.seeds, arguments.rules = ["tiny"], 1, ["random", "margin", "entropy and spread"]
    elif arguments.data is None:
        made.error("--data must name the folder of the data sets; see the README")
    results = common.Results(arguments.out)
    wanted = itertools.product(range(arguments.seeds), arguments.sets, arguments.rules)
    jobs = [(n, r, s) for s, n, r in wanted if results.missing(set=n, rule=r, seed=s)]
    if arguments.jobs == 1:
        for name, rule, seed in jobs:
            results.extend(curve(arguments.data, name, rule, seed))
        return
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for done in as_completed([pool.submit(curve, arguments.data, *job) for job in jobs]):
            results.extend(done.result())
            print(len(results.rows), done.result()[-1], flush=True)


if __name__ == "__main__":
    main()
