"""How close `loss="auto"` comes to the best single loss: R@5 and more on test rows, complete labels and some hidden.

    python -m benchmarks.auto_loss --data FOLDER [--sets bibtex medical ...] [--json benchmarks/results/auto-loss.json]

`benchmarks.label_sets` says what the folder holds. Every candidate is fitted to the same rows, with its own C chosen
out of fold where it has one, and measured on the test rows of the set, which no choice sees. The gap is the best
candidate's R@5 minus that of "auto", in points, and ``gap_se`` its standard error over the test rows, over whole groups
where there are groups. With hidden labels each training label is dropped with some probability, the estimator is told
`labels="incomplete"`, and the test rows keep all of their labels; with ``--draws N`` this is done N times, and the
numbers are means. Where there are groups, "auto" is fitted with them too. With ``--inner SEED`` a fifth of the training
rows (of the groups, where there are groups) stands in for the test, so that rules can be settled without it.
scikit-learn's one-versus-rest `LinearSVC` with its defaults stands beside them; it is no candidate.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

import lastlayer as ll
from benchmarks.label_sets import SETS, Rows, rows_of
from benchmarks.peers import linearsvc
from lastlayer import metrics

SINGLE: dict[str, dict[str, Any]] = {
    "squared_hinge": {"loss": "squared_hinge"},
    "binary": {"loss": "binary"},
    "lml": {"loss": "lml"},
    "two_way": {"loss": "two_way"},
}
GROUPED = ", groups given"


def hide(y: sp.csr_matrix, share: float, seed: int = 1) -> sp.csr_matrix:
    """Drop each label with a probability."""
    y = y.tocoo()
    kept = np.random.default_rng(seed).random(len(y.data)) >= share
    return sp.csr_matrix((y.data[kept], (y.row[kept], y.col[kept])), shape=y.shape)


def cases_of(hidden: float) -> dict[str, dict[str, Any]]:
    """The options of each case without groups; "auto" is the last."""
    labels = {"labels": "incomplete"} if hidden else {}
    thinned = {"lml, thinned": {"loss": "lml", **labels}} if hidden else {}
    return {"LinearSVC": {}, **SINGLE, **thinned, "auto": labels}


def names_of(name: str, hidden: float) -> list[str]:
    """The cases of a set; those with groups are the last."""
    return [*cases_of(hidden), *(["auto" + GROUPED] if name.startswith("debian") else [])]


def within(rows: Rows, seed: int) -> Rows:
    """Training rows alone, a fifth of which, or of their groups, stands in for the test."""
    unit = np.arange(rows.x.shape[0]) if rows.groups is None else rows.groups
    test = (np.random.default_rng(seed).random(unit.max() + 1) < 0.2)[unit]
    groups = [] if rows.groups is None else [rows.groups[~test], rows.groups[test]]
    return rows_of(rows.x[~test], rows.y[~test], rows.x[test], rows.y[test], *groups)


@cache
def read(name: str, folder: Path, hidden: float, inner: int | None = None, draw: int = 1) -> Rows:
    """Training rows with some labels hidden, and test rows."""
    rows = SETS[name](folder)
    rows = rows if inner is None else within(rows, inner)
    return rows._replace(y=hide(rows.y, hidden, draw)) if hidden else rows


def measure(
    name: str, folder: Path, hidden: float, case: str, inner: int | None = None, draw: int = 1
) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """Fit one estimator and measure it on the test rows; also return their recalls at 5, and their groups."""
    torch.set_num_threads(1)
    rows = read(name, folder, hidden, inner, draw)
    x, y, test_x, test_y = rows[:4]
    hot, begun, p = torch.from_numpy(test_y.toarray() > 0), time.process_time(), None
    if case == "LinearSVC":
        found = linearsvc(x, y, test_x, folder)
        seconds, chosen, scores = found["train"], "", torch.from_numpy(found["scores"])
        said = scores > 0
    else:
        plain, grouped = case.removesuffix(GROUPED), case.endswith(GROUPED)
        model = ll.LabelSetClassifier(random_state=0, **cases_of(hidden)[plain])
        model.fit(x, y.astype(int), groups=rows.groups if grouped else None)
        seconds, chosen = time.process_time() - begun, model.choice_
        scores = torch.from_numpy(model.decision_function(test_x))
        said = torch.from_numpy(np.asarray(model.predict(test_x)) > 0)
        p = torch.from_numpy(model.predict_proba(test_x))
    recall = 100 * ll.recall_at_k(scores, hot, 5, reduction="none").numpy()
    out = {
        "P@1": 100 * float(ll.precision_at_k(scores, hot, 1)),
        "R@5": float(recall.mean()),
        "micro_f1": 100 * float(metrics.label_set_f1(said, hot, average="micro")),
        "macro_f1": 100 * float(metrics.label_set_f1(said, hot, average="macro")),
    }
    if p is not None:
        out["ece@5"] = 100 * float(ll.label_calibration_error(p, hot, min(5, hot.shape[1])))
    rounded = {key: round(value, 2) for key, value in out.items()}
    row = {"set": name, "hidden": hidden, "case": case, **rounded, "seconds": round(seconds, 1), "chosen": chosen}
    return row, recall, np.arange(len(recall)) if rows.test_groups is None else rows.test_groups


def mean_row(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The mean of the numbers of some draws; what was chosen is that of the first."""
    numbers = [key for key, value in rows[0].items() if isinstance(value, float) and key != "hidden"]
    means = {key: round(float(np.mean([row[key] for row in rows])), 2) for key in numbers}
    return {**rows[0], **means, **({"draws": len(rows)} if len(rows) > 1 else {})}


def standard_error(values: np.ndarray, groups: np.ndarray) -> float:
    """The standard error of the mean of values, those of a group being one draw."""
    sums = np.bincount(np.unique(groups, return_inverse=True)[1], values - values.mean())
    return float(np.sqrt((sums**2).sum()) / len(values))


def with_gap(rows: list[dict[str, Any]], recalls: dict[str, np.ndarray], groups: np.ndarray) -> list[dict[str, Any]]:
    """The rows of one set in the order of the cases; those of "auto" have the gap to the best, once all are there."""
    cases = names_of(rows[0]["set"], rows[0]["hidden"])
    rows = sorted(rows, key=lambda row: cases.index(row["case"]))
    if len(rows) == len(cases):
        single = [row for row in rows if row["case"] in recalls and not row["case"].startswith(("Linear", "auto"))]
        best = max((row["R@5"], row["case"]) for row in single)[1]
        for row in rows:
            if row["case"].startswith("auto"):
                gap = recalls[best] - recalls[row["case"]]
                row |= {"best": best, "gap": round(float(gap.mean()), 2)}
                row["gap_se"] = round(standard_error(gap, groups), 2)
                print({key: row[key] for key in ("set", "hidden", "case", "best", "gap", "gap_se")}, flush=True)
    return rows


def main(argv: list[str] | None = None) -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the sets")
    names = ["bibtex", "delicious", "medical", "slashdot", "goemotions", "debian tags"]
    parser.add_argument("--sets", nargs="*", default=names, choices=SETS)
    parser.add_argument("--hidden", nargs="*", type=float, default=[0.0, 0.5, 0.8], help="shares of hidden labels")
    parser.add_argument("--draws", type=int, default=1, help="how often labels are hidden, each time other ones")
    parser.add_argument("--inner", type=int, metavar="SEED", help="a fifth of the training rows stands in for the test")
    parser.add_argument("--jobs", type=int, default=1, help="processes of one thread each")
    parser.add_argument("--json", type=Path, help="results are merged into this file")
    arguments = parser.parse_args(argv)
    kept: list[dict[str, Any]] = []
    if arguments.json is not None and arguments.json.exists():
        kept = json.loads(arguments.json.read_text())["rows"]
    pairs = [(name, hidden) for name in arguments.sets for hidden in arguments.hidden]
    found: dict[tuple[str, float, str], list[Any]] = {}
    new: dict[tuple[str, float], list[dict[str, Any]]] = {}
    with ProcessPoolExecutor(arguments.jobs, multiprocessing.get_context("spawn")) as pool:
        every = [(*pair, case) for pair in pairs for case in names_of(*pair)]
        every.sort(key=lambda job: not job[2].startswith("auto"))  # the longest first
        jobs = {}
        for job in every:
            for draw in range(1, 1 + (arguments.draws if job[1] else 1)):
                call = pool.submit(measure, job[0], arguments.data, *job[1:], arguments.inner, draw)
                jobs[call] = (*job, draw)
        for call in as_completed(jobs):
            *key, draw = jobs[call]
            row, recall, groups = call.result()
            print(draw, *row.values(), sep="  ", flush=True)
            done = found.setdefault((key[0], key[1], key[2]), [])
            done.append((draw, row, recall))
            if len(done) < (arguments.draws if key[1] else 1):
                continue
            done.sort(key=lambda one: one[0])
            pair = key[0], key[1]
            rows = [*new.get(pair, []), mean_row([one[1] for one in done])]
            recalls = {k[2]: np.mean([one[2] for one in v], 0) for k, v in found.items() if k[:2] == pair}
            new[pair] = with_gap(rows, recalls, groups)
            if arguments.json is not None:
                rows = [row for row in kept if (row["set"], row["hidden"]) not in new]
                rows += [row for pair in pairs for row in new.get(pair, [])]
                machine = {"cpu": platform.processor() or platform.machine(), "torch": torch.__version__}
                arguments.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
