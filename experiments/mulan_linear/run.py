"""Linear models on Mulan's bibtex and delicious, complete labels and hidden ones, against published linear models.

python -m experiments.mulan_linear.run --data FOLDER [--sets bibtex delicious] [--keep 1.0 0.5 0.2] [--jobs 2]

For each set, share of kept labels and loss: hyper-parameters are chosen on a fifth of the training rows (with labels
hidden as in training), then the model is trained on all training rows with each seed and measured once on the test
rows, whose labels are complete. The model is `LabelSetClassifier` without hidden layers; "defaults" is the estimator as
it comes, told only whether labels are incomplete, which chooses its loss by itself.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

import lastlayer as ll
from experiments import common
from lastlayer.data import LabelData, hide_labels, read_parts, split_rows

HERE = Path(__file__).parent
LOSSES = ("binary", "multihot_softmax", "two_way", "lml", "lml thinned", "defaults")
CARDINALITY = {"bibtex": (2.0, 3.0), "delicious": (5.0, 15.0)}
RATES = {"delicious": [(0.3, 1e-5), (1.0, 1e-5), (3.0, 1e-5)]}  # 19 labels per row: larger gradients


def grid(name: str, loss: str) -> list[dict[str, Any]]:
    """The settings to choose from: rates, and for losses with k two of these."""
    pairs = RATES.get(name, itertools.product((5.0, 15.0), (3e-6, 1e-5, 3e-5)))
    rates = [{"lr": lr, "weight_decay": wd} for lr, wd in pairs]
    if not loss.startswith("lml"):
        return rates
    extra = {"labels": "incomplete"} if loss == "lml thinned" else {}
    return [{**rate, "k": k, **extra} for rate in rates for k in CARDINALITY.get(name, (2.0,))]


def indicator(data: LabelData) -> sp.csr_matrix:
    return sp.csr_matrix((np.ones(len(data.indices), np.int64), data.indices, data.indptr), (len(data), data.n_labels))


def fit_and_measure(
    train: LabelData, test: LabelData, loss: str, settings: dict[str, Any], epochs: int, seed: int
) -> dict[str, float]:
    torch.set_num_threads(1)
    fixed: dict[str, Any] = {"loss": loss.split()[0], "solver": "sgd", "epochs": epochs} if loss != "defaults" else {}
    model = ll.LabelSetClassifier(random_state=seed, **fixed, **settings).fit(train.features, indicator(train))
    scores = torch.from_numpy(model.decision_function(test.features))
    target = ll.label_lists(torch.from_numpy(test.padded(np.arange(len(test)))))
    precision = ll.precision_at_k(scores, target, [1, 3, 5]).tolist()
    recall = ll.recall_at_k(scores, target, [5]).tolist()
    ndcg = ll.ndcg_at_k(scores, target, [5]).tolist()
    return dict(zip(["P@1", "P@3", "P@5", "R@5", "nDCG@5"], [*precision, *recall, *ndcg], strict=True))


def hidden(data: LabelData, keep: float, seed: int) -> LabelData:
    return data if keep == 1 else hide_labels(data, keep, seed=seed)


def choose(pool: Any, train: LabelData, name: str, keep: float, loss: str, epochs: int) -> dict[str, Any]:
    """Return the best settings on held-out training rows: mean precision if labels are complete, else recall at 5."""
    if loss == "defaults":
        return {"labels": "incomplete"} if keep < 1 else {}
    rows, valid = split_rows(hidden(train, keep, 1000), [0.8, 0.2])
    settings = grid(name, loss)
    jobs = [pool.submit(fit_and_measure, rows, valid, loss, s, epochs, 0) for s in settings]
    found = [job.result() for job in jobs]
    score = [(m["P@1"] + m["P@3"] + m["P@5"]) / 3 if keep == 1 else m["R@5"] for m in found]
    return settings[int(np.argmax(score))]


def tables(rows: Any) -> dict[str, str]:
    rows = [{**row, "loss": row["loss"]} for row in rows]
    out = {}
    for name in ("bibtex", "delicious"):
        whole = [
            {**row, "metric": metric, "value": row[metric]}
            for metric in ("P@1", "P@3", "P@5", "R@5")
            for row in rows
            if row["set"] == name and row["keep"] == 1.0
        ]
        some = [{**row, "kept": f"{row['keep']:.0%}"} for row in rows if row["set"] == name and row["keep"] < 1.0]
        out[f"{name} complete"] = common.table(whole, "loss", "metric", "value") if whole else "(not run)"
        out[f"{name} hidden"] = common.table(some, "loss", "kept", "R@5") if some else "(not run)"
    return out


def tiny() -> dict[str, LabelData]:
    rng = np.random.default_rng(0)
    x = sp.random(300, 40, 0.2, format="csr", dtype=np.float32, random_state=0)
    lists = [[str(j % 8) for j in rng.choice(row.indices, 2)] if row.nnz > 1 else [] for row in x]
    data = LabelData.from_lists(lists, features=x)
    return {"train": data.take(np.arange(200)), "test": data.take(np.arange(200, 300))}


def main(argv: list[str] | None = None) -> None:
    made = common.parser(__doc__, HERE / "results/results.json")
    made.add_argument("--sets", nargs="+", default=["bibtex", "delicious"])
    made.add_argument("--keep", nargs="+", type=float, default=[1.0, 0.5, 0.2])
    made.add_argument("--losses", nargs="+", default=list(LOSSES))
    made.add_argument("--epochs", type=int, default=15)
    made.add_argument("--jobs", type=int, default=1, help="processes of one thread each")
    made.set_defaults(seeds=5)
    arguments = made.parse_args(argv)
    if common.finish(arguments, tables):
        return
    if arguments.smoke:
        arguments.sets, arguments.seeds, arguments.epochs, arguments.losses = (
            ["tiny"],
            1,
            2,
            ["binary", "lml thinned", "defaults"],
        )
    elif arguments.data is None:
        made.error("--data must name the folder of bibtex.npz and delicious.npz; see the README")
    results = common.Results(arguments.out)
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for name, keep, loss in itertools.product(arguments.sets, arguments.keep, arguments.losses):
            seeds = [s for s in range(arguments.seeds) if results.missing(set=name, keep=keep, loss=loss, seed=s)]
            if not seeds:
                continue
            parts = tiny() if arguments.smoke else read_parts(arguments.data / f"{name}.npz")
            settings = choose(pool, parts["train"], name, keep, loss, arguments.epochs)
            train = [hidden(parts["train"], keep, s) for s in seeds]
            jobs = [
                pool.submit(fit_and_measure, t, parts["test"], loss, settings, arguments.epochs, s)
                for t, s in zip(train, seeds, strict=True)
            ]
            for s, job in zip(seeds, jobs, strict=True):
                row = {"set": name, "keep": keep, "loss": loss, "seed": s, **job.result(), "settings": settings}
                results.add(**row)
                print(row, flush=True)


if __name__ == "__main__":
    main()
