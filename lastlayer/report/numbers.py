"""The numbers of a report, all from what a run folder holds: lists and numbers, ready for JSON."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from lastlayer.metrics.calibration import BinSums, bin_sums, diagram, reliability_bins
from lastlayer.metrics.errors import error_kinds, label_set_errors
from lastlayer.runs.contents import Held, Run
from lastlayer.runs.rows import set_metrics

CELLS = 8_000_000  # entries of a matrix of rows by labels that the error analysis may hold
CURVE = 20  # the largest k of the curves
HEAT = 16  # labels of the co-occurrence map
KINDS = ("confusion", "count", "threshold", "hallucination", "miss")


def hot(held: Held, n_labels: int) -> np.ndarray:
    """The true labels, Boolean ``(n, n_labels)``."""
    out = np.zeros((len(held), n_labels), dtype=bool)
    out[np.repeat(np.arange(len(held)), np.diff(held.indptr)), held.index] = True
    return out


def cuts(run: Run) -> list[int]:
    """The k of the run's metrics at k."""
    cuts_named = {
        name.partition("@")[2] for name in run.metrics["metrics"] if name.startswith(("recall@", "precision@"))
    }
    return sorted(int(k) for k in cuts_named if k.isdecimal() and int(k) > 0)


def headline(run: Run) -> list[str]:
    """The metrics to read first: those of the largest k, mean average precision and calibration."""
    metrics, at = run.metrics["metrics"], cuts(run)
    last = at[-1] if at else 1
    names = ["precision@1", f"precision@{last}", f"recall@{last}", f"ndcg@{last}", "map", f"ece@{last}"]
    return [name for name in dict.fromkeys(names) if name in metrics] or list(metrics)[:6]


def curve(held: Held) -> dict[str, list[Any]]:
    """Precision and recall against k with 95 % bands (1.96 standard errors), and the best that label counts allow."""
    count = np.diff(held.indptr)
    weight = np.ones(len(held)) if held.weight is None else held.weight
    seen = (count > 0) & (weight > 0)  # rows without labels have no recall, and precision is not counted for them
    weight = weight[seen] / (weight[seen].sum() or 1)
    most = min(CURVE, held.top_index.shape[1])
    right = held.hits[seen, :most].cumsum(1)
    k, count = np.arange(1, most + 1), count[seen, None]
    out: dict[str, list[Any]] = {"k": k.tolist()}
    for name, values, limit in (
        ("precision", right / k, np.minimum(count, k) / k),
        ("recall", right / np.maximum(count, 1), np.minimum(count, k) / np.maximum(count, 1)),
    ):
        n, mean = len(values), weight @ values
        half = 1.96 * np.sqrt(weight**2 @ (values - mean) ** 2 * (n / max(n - 1, 1)))
        out |= {name: _list(mean), f"{name}_low": _list(mean - half), f"{name}_high": _list(mean + half)}
        out[f"{name}_limit"] = _list(weight @ limit)
    return out


def reliability(held: Held, k: int, n_labels: int) -> dict[str, Any]:
    """The reliability diagram of each row's k best labels, and of all pairs where all probabilities are stored."""
    k = min(k, held.top_index.shape[1])
    out: dict[str, Any] = {"k": k, "best": _bins(held.top_probability[:, :k], held.hits[:, :k], held.weight)}
    if held.probability is not None:
        out["all"] = _bins(held.probability, hot(held, n_labels), held.weight)
    return out


def _bins(probability: np.ndarray, right: np.ndarray, weight: np.ndarray | None) -> dict[str, list[Any]]:
    """The pairs of each bin are counted; their confidence and accuracy are means by the weights of the rows."""
    pairs = torch.from_numpy(probability).double(), torch.from_numpy(right)
    counted = bins = reliability_bins(*pairs)
    if weight is not None:
        sums = bin_sums("report", *pairs, None, 10, "all", torch.from_numpy(weight))
        bins = diagram(BinSums(*(one[0] for one in sums)), torch.float64)
    return {
        "pairs": [int(v) for v in counted.pairs.tolist()],
        "confidence": _list(bins.confidence.numpy()),
        "accuracy": _list(bins.accuracy.numpy()),
    }


def labels(run: Run) -> dict[str, Any]:
    """Each label's numbers, for the predicted sets and (``half_``) for probabilities of at least 0.5."""
    n = len(run.labels)
    stored = run.metrics.get("labels") or {}
    out: dict[str, Any] = {"train": run.train_counts or None, "support": stored.get("support")}
    if run.held is not None:
        held = run.held
        said = np.bincount(held.top_index[held.inside], minlength=n)
        right = np.bincount(held.top_index[held.inside & held.hits], minlength=n)
        support = np.bincount(held.index, minlength=n)
        out |= {"support": support.tolist(), "predicted": said.tolist()}
        out |= {"precision": _ratio(right, said), "recall": _ratio(right, support)}
        out["f1"] = _ratio(2 * right, said + support)
    for name in ("precision", "recall"):
        out[f"half_{name}"] = stored.get(name)
    if stored.get("precision") and stored.get("recall"):
        out["half_f1"] = [_f1(p, r) for p, r in zip(stored["precision"], stored["recall"], strict=True)]
    return out | {"threshold": stored.get("threshold"), "average_precision": stored.get("average_precision")}


def _ratio(over: np.ndarray, under: np.ndarray) -> list[float | None]:
    return [round(a / b, 5) if b else None for a, b in zip(over.tolist(), under.tolist(), strict=True)]


def _f1(precision: float | None, recall: float | None) -> float | None:
    if recall is None:  # no true label to find
        return None if precision is None else 0.0
    if precision is None or precision <= 0 or recall <= 0:
        return 0.0
    return 2 * precision * recall / (precision + recall)


def sets(run: Run) -> dict[str, dict[str, float]]:
    """The metrics of label sets: of those predicted and, where stored, of the labels with probability 0.5 or more."""
    assert run.held is not None
    held, n = run.held, len(run.labels)
    taken = held.taken()
    out = {"predicted": _sets(held, taken >= 0, taken[taken >= 0], n)}
    if held.probability is not None:
        half = np.nan_to_num(held.probability) >= 0.5
        out["half"] = _sets(held, half, np.nonzero(half)[1], n)
    return out


def _sets(held: Held, there: np.ndarray, index: np.ndarray, n_labels: int) -> dict[str, float]:
    starts = np.concatenate([[0], there.sum(1).cumsum()])
    scores = set_metrics(starts, index, held.indptr, held.index, n_labels, weight=held.weight)
    names = {"sample_f1": "set_f1", "hamming_loss": "hamming"}
    shown = ("sample_f1", "micro_f1", "macro_f1", "hamming_loss", "exact_match")
    return {names.get(name, name): round(scores[name], 6) for name in shown}


class Analysis:
    """The error analysis of a run, and the kind of each error of the rows that it looks at.

    Args:
        run: A run with predictions. If not all probabilities are stored, or there are very many labels, the analysis
            takes a sample of the rows and gives labels outside of the stored best ones of a row a score of minus
            infinity: nothing predicts them. `note` says so.
    """

    def __init__(self, run: Run) -> None:
        assert run.held is not None
        self.note = ""
        self.rows, self.classes, scores = self._scores(run.held, len(run.labels))
        place = {int(c): i for i, c in enumerate(self.classes)}
        true = hot(run.held, len(run.labels))[self.rows] if run.held.probability is not None else None
        if true is None:
            true = np.zeros(scores.shape, dtype=bool)
            for i, row in enumerate(self.rows):
                for c in run.held.index[run.held.indptr[row] : run.held.indptr[row + 1]]:
                    true[i, place[int(c)]] = True
        taken = run.held.taken()[self.rows]
        index = np.searchsorted(self.classes, np.maximum(taken, 0))
        predicted = torch.from_numpy(np.where(taken < 0, -1, index))
        names = [run.labels[int(c)] for c in self.classes]
        x, target = torch.from_numpy(scores), torch.from_numpy(true).to(torch.int8)
        self.found: dict[str, Any] = label_set_errors(x, target, predicted=predicted, names=names).to_dict()
        self._code = np.zeros(scores.shape, dtype=np.int8)
        for code, mask in enumerate(error_kinds(x, target, predicted).values(), 1):
            self._code[mask.numpy()] = code
        self._row = {int(row): i for i, row in enumerate(self.rows)}
        self._place = place

    def kind(self, row: int, label: int) -> int:
        """The position in KINDS of an error, or -1 where it was not looked at."""
        at = self._row.get(row)
        return -1 if at is None else int(self._code[at, self._place[label]]) - 1

    def _scores(self, held: Held, n_labels: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        n = len(held)
        if held.probability is not None and held.probability.size <= CELLS:
            return np.arange(n), np.arange(n_labels), np.nan_to_num(held.probability)
        order, size = np.random.default_rng(0).permutation(n), n
        while True:
            rows = np.sort(order[:size])
            true = np.concatenate([held.index[held.indptr[r] : held.indptr[r + 1]] for r in rows] or [held.index[:0]])
            classes = np.unique(np.concatenate([true, held.top_index[rows].ravel()]))
            if len(classes) * size <= CELLS or size <= 1:
                break
            size //= 2
        scores = np.full((size, len(classes)), -np.inf, dtype=np.float32)
        np.put_along_axis(
            scores, np.searchsorted(classes, held.top_index[rows]), held.top_probability[rows].astype(np.float32), 1
        )
        self.note = (
            f"From the {held.top_index.shape[1]} most probable labels of {size:,} of the {n:,} rows. Other labels have "
            "no stored probability; they count as labels that no threshold and no number of labels reaches."
        )
        return rows, classes, scores


def together(run: Run) -> dict[str, Any]:
    """How strongly the most frequent labels come together (rows with both over rows with either), truth and sets."""
    assert run.held is not None
    held, n = run.held, len(run.labels)
    support = np.bincount(held.index, minlength=n)
    chosen = np.argsort(-support, kind="stable")[: min(HEAT, int((support > 0).sum()))]
    taken, most = held.taken(), int(held.size.max(initial=0))
    row = np.repeat(np.arange(len(held)), np.diff(held.indptr))
    parts = {"true": (row, held.index), "predicted": (np.repeat(np.arange(len(held)), most), taken.ravel())}
    out: dict[str, Any] = {"labels": chosen.tolist()}
    for name, (rows, index) in parts.items():
        member = np.zeros((len(held), len(chosen)))
        place = np.full(n + 1, -1)
        place[chosen] = np.arange(len(chosen))
        column = place[index]  # -1, which pads, finds the last entry
        member[rows[column >= 0], column[column >= 0]] = 1
        both = member.T @ member
        either = np.diag(both)[:, None] + np.diag(both) - both
        out[name] = (both / np.maximum(either, 1)).round(4).tolist()
        out[f"{name}_rows"] = both.astype(int).tolist()
    return out


def facts(run: Run) -> dict[str, Any]:
    """What was trained, on what, by what."""
    part = run.metrics.get("part")
    resolved = run.data.get("resolved") or {}
    parts = run.parts()
    return {
        "part": part,
        "rows": run.metrics.get("rows"),
        "n_labels": len(run.labels),
        "parts": {
            name: {
                "rows": p.get("rows"),
                "labels_per_row": p.get("labels_per_row", p.get("labels_a_row")),
                "skipped": p.get("skipped"),
            }
            for name, p in parts.items()
            if isinstance(p, dict)
        },
        "hidden": run.data.get("hidden"),
        "resolved": resolved,
        "best_epoch": run.metrics.get("best_epoch"),
        "epochs": run.metrics.get("epochs"),
        "environment": {k: v for k, v in run.environment.items() if k != "format"},
        "config": run.config,
    }


def _list(values: np.ndarray) -> list[float | None]:
    return [round(v, 6) if math.isfinite(v) else None for v in values.tolist()]
