"""Rows with no label, with one and with several (chapter 4 of Liao's thesis, 2021).

    python -m experiments.zero_and_many_labels.run --data CIFAR --mulan MULAN [--tasks zero one many]

zero: CIFAR60+40, where in each coarse class of CIFAR-100 the last two of the five fine classes lose their label.
one: CIFAR-100 as it is, by one-versus-rest classifiers. many: how well the four best labels of a row are calibrated, by
linear models on multi-label sets (on the CPU).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import lastlayer as ll
from experiments import cifar, common
from experiments.zero_and_many_labels import heads, linear

HERE = Path(__file__).parent
KEPT = 3  # fine classes with a label in each coarse class


def known_classes(fine: Tensor, coarse: Tensor) -> Tensor:
    """Map the 100 fine classes to the 60 that keep their label, -1 for the others."""
    members = [fine[coarse == c].unique() for c in coarse.unique()]
    kept = torch.cat([m[:KEPT] for m in members]).sort().values
    found = torch.full((100,), -1, device=fine.device)
    found[kept] = torch.arange(len(kept), device=fine.device)
    return found


def train(setting: dict[str, Any], data: cifar.Tensors, arguments: Any) -> common.Row:
    """Train one network; measure it on the validation images to choose a rate, on the test images with the chosen."""
    zero = setting["task"] == "zero"
    classes = known_classes(data["train_fine"], data["train_coarse"]) if zero else torch.arange(100)
    classes = classes.to(arguments.device)
    makers = heads.ZERO_LABELS if zero else heads.ONE_VERSUS_REST
    body, features = cifar.network(setting["network"], setting["width"], setting["pool"])
    head = makers[setting["method"]](features, int(classes.max()) + 1)
    body, head = body.to(arguments.device, memory_format=torch.channels_last), head.to(arguments.device)
    follow = Normaliser(head, arguments.device)

    def objective(x: Tensor, y: Tensor) -> Tensor:
        with cifar.half(x):
            found = body(x)
        follow.see(found.detach())
        return head.loss(found.float(), y)

    cifar.fit(
        objective,
        [*body.parameters(), *head.parameters()],
        data["train_x"],
        classes[data["train_fine"]],
        peak=setting["rate"],
        epochs=setting["epochs"],
        batch=arguments.batch,
        seed=setting["seed"],
        after=follow.after,
    )
    head.eval()
    split = "valid" if setting["part"] == "grid" else "test"
    with torch.no_grad():
        found = cifar.outputs(body, data[f"{split}_x"])
        row = measured(head.predict(found), head.confidence(found), classes[data[f"{split}_fine"]])
    row = {name: round(value, 6) for name, value in row.items()}
    curve = setting["part"] == "test" and setting["task"] == "one" and setting["method"] in ("softmax", "quasibinary")
    return row | ({"normaliser": follow.curve()} if curve else {})


class Normaliser:
    """Follows the log of what a head divides by: mean and spread over the rows of a batch, or its one number."""

    def __init__(self, head: Any, device: str) -> None:
        self.head, self.now, self.seen = head, torch.zeros(2, device=device), []

    @torch.no_grad()
    def see(self, features: Tensor) -> None:
        if isinstance(self.head, heads.Softmax):
            each = self.head(features.float()).logsumexp(-1)
            self.now.copy_(torch.stack([each.mean(), each.std()]))
        elif isinstance(self.head, heads.Quasibinary):
            self.now[0].copy_(self.head.log_normalizer)

    def after(self, step: int) -> None:
        if step % 20 == 0:
            self.seen.append(self.now.clone())

    def curve(self) -> list[list[float]]:
        return [[round(v, 3) for v in pair.tolist()] for pair in self.seen]


def wanted(rows: Sequence[common.Row], arguments: Any) -> list[cifar.Setting]:
    """Return what to train: each head with every rate for a few epochs, then longer with the best of them."""
    found, final = [], []
    makers = {"zero": heads.ZERO_LABELS, "one": heads.ONE_VERSUS_REST}
    for task in arguments.tasks:
        for method in makers.get(task, ()):
            if arguments.methods and method not in arguments.methods:
                continue
            names = {"task": task, "network": arguments.network, "width": arguments.width, "pool": arguments.pool}
            cell = names | {"method": method}
            grid = [r for r in rows if r.get("part") == "grid" and r.items() >= cell.items()]
            more = rates_of(grid, arguments.rates, arguments.grow)
            short = {"part": "grid", "epochs": arguments.grid_epochs, "seed": 0}
            found += [cell | short | {"rate": rate} for rate in more]
            if not more:
                rate = max(grid, key=quality)["rate"]
                long = {"part": "test", "epochs": arguments.epochs, "rate": rate}
                final += [cell | long | {"seed": seed} for seed in range(arguments.seeds)]
    return found + sorted(final, key=lambda setting: setting["seed"])


def quality(row: common.Row) -> float:
    """What a rate is chosen by: accuracy, and AUROC where there are rows without a label."""
    return float(row["accuracy"] + row.get("AUROC", 0.0))


def rates_of(grid: Sequence[common.Row], rates: Sequence[float], steps: int = 2) -> list[float]:
    """Return the rates still to try: the given ones, then neighbours of a best one at an end, `steps` times at most."""
    seen = {row["rate"] for row in grid}
    missing = [rate for rate in rates if rate not in seen]
    if missing or not grid:
        return missing
    best = max(grid, key=quality)["rate"]
    around = [float(f"{best * factor:.6g}") for factor in (4, 0.25)]
    most = 1.01 * 4**steps
    return [rate for rate in around if rate not in seen and rates[0] / most < rate < rates[-1] * most]


def measured(probabilities: Tensor, confidence: Tensor, target: Tensor) -> common.Row:
    """Accuracy and calibration on the rows with a label, and how the others are told from them."""
    inside = target >= 0
    found = {
        "accuracy": (probabilities.argmax(-1) == target)[inside].float().mean().item(),
        "confidence in": ll.mean_max_confidence(probabilities[inside]).item(),
        "ECE": ll.label_calibration_error(probabilities, target.unsqueeze(-1), k=1).item(),
    }
    if inside.all():
        return found
    return found | {
        "confidence out": ll.mean_max_confidence(probabilities[~inside]).item(),
        "AUROC": ll.auroc(confidence, inside).item(),
    }


def tables(rows: Sequence[common.Row]) -> dict[str, str]:
    found = {}
    for network in ("resnet", "features"):
        some = [row for row in rows if row.get("network") == network and row["pool"] == "mean"]
        part = [row | {"top-1 error": 1 - row["accuracy"]} for row in some if row["part"] == "test"]
        zero, one = ([row for row in part if row["task"] == task] for task in ("zero", "one"))
        values = ("accuracy", "confidence in", "confidence out", "AUROC", "ECE")
        found[f"zero {network}"] = common.columns(zero, "method", values, order=heads.ZERO_LABELS)
        values = ("top-1 error", "confidence in", "ECE")
        found[f"one {network}"] = common.columns(one, "method", values, order=heads.ONE_VERSUS_REST)
        found[f"rates {network}"] = chosen_rates([row for row in some if row["part"] == "grid"])
    return found | linear.tables([row for row in rows if row["task"] == "many"])


def chosen_rates(grid: Sequence[common.Row]) -> str:
    """The rate that the validation images chose for each head."""
    lines = ["| head | one label | no label |", "| --- | --- | --- |"]
    for method in dict.fromkeys([*heads.ONE_VERSUS_REST, *heads.ZERO_LABELS]):
        cells = []
        for task in ("one", "zero"):
            some = [row for row in grid if (row["task"], row["method"]) == (task, method)]
            tried = ", ".join(f"{rate:g}" for rate in sorted({row["rate"] for row in some}))
            cells.append(f"{max(some, key=quality)['rate']:g} (of {tried})" if some else "")
        lines.append(f"| {method} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def follow_figure(rows: Sequence[common.Row], path: Path) -> None:
    """The log of what a head divides by during the training: one number, or mean and spread over the rows."""
    import matplotlib.pyplot as plt

    test = [r for r in rows if r.get("normaliser") and r["pool"] == "mean" and r["network"] == "resnet"]
    drawn, (axis, spread) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for method, colour in (("quasibinary", "#1b6ca8"), ("softmax", "#e08e0b")):
        curves = [np.array(r["normaliser"]) for r in test if r["method"] == method]
        for number, curve in enumerate(curves):
            at = 20 * np.arange(len(curve))
            axis.plot(at, curve[:, 0], color=colour, linewidth=1, label=method if number == 0 else None)
            if method == "softmax":
                spread.plot(at, curve[:, 1], color=colour, linewidth=1, label="softmax" if number == 0 else None)
                low, high = curve[:, 0] - 2 * curve[:, 1], curve[:, 0] + 2 * curve[:, 1]
                if number == 0:
                    axis.fill_between(at, low, high, color=colour, alpha=0.2, linewidth=0, label="two spreads of rows")
    spread.axhline(0, color="#1b6ca8", linewidth=1.5, label="quasibinary (one number for all rows)")
    axis.set(xlabel="step", ylabel="log of the normaliser")
    spread.set(xlabel="step", ylabel="its spread over the rows of a batch")
    for panel in (axis, spread):
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    common.save(drawn, path)


def figure(rows: Sequence[common.Row], path: Path) -> None:
    """On the left, accuracy against how well rows without label are told; on the right, calibration of four labels."""
    import matplotlib.pyplot as plt

    drawn, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    named: set[str] = set()
    for place, method in enumerate(heads.ZERO_LABELS):
        for network, mark in (("features", "o"), ("resnet", "s")):
            test = [r for r in rows if r.get("part") == "test" and r["task"] == "zero" and r["pool"] == "mean"]
            some = [r for r in test if (r["network"], r["method"]) == (network, method)]
            if some:
                x, y = (np.array([100 * r[name] for r in some]) for name in ("accuracy", "AUROC"))
                spread = [v.std(ddof=1) if len(v) > 1 else 0.0 for v in (y, x)]
                label = method if method not in named else None
                named.add(method)
                colour = plt.get_cmap("tab10")(place)
                left.errorbar(x.mean(), y.mean(), *spread, mark, color=colour, label=label)
    left.set(xlabel="accuracy on rows with a label (%)", ylabel="AUROC (%)", title="circle: features; square: network")
    left.set(xlim=(68, 78), ylim=(68, 92))  # a head that does not learn is outside
    many = [row for row in rows if row["task"] == "many"]
    sets = [name for name in linear.SETS if any(row["set"] == name for row in many)]
    for method in linear.METHODS:
        of_set = [[100 * r["ECE"] for r in many if (r["set"], r["method"]) == (name, method)] for name in sets]
        if all(of_set):
            right.errorbar(
                range(len(sets)), [*map(np.mean, of_set)], [np.std(v, ddof=1) for v in of_set], marker="o", label=method
            )
    right.set_xticks(range(len(sets)), sets, rotation=30)
    right.set(ylabel="calibration error of four labels (%)", title="linear models")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes.has_data():
            axes.legend(fontsize=7)
    common.save(drawn, path)


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__, HERE / "results" / "results.json")
    parser.add_argument("--tasks", nargs="+", default=["zero", "one", "many"], choices=["zero", "one", "many"])
    parser.add_argument("--mulan", type=Path, help="folder of the multi-label sets as npz")
    parser.add_argument("--methods", nargs="+", help="heads of the tasks zero and one, by name; all unless given")
    parser.add_argument("--sets", nargs="+", default=list(linear.SETS))
    parser.add_argument("--pool", default="mean", choices=["mean", "max"], help="over the last map of the network")
    parser.add_argument("--rates", nargs="+", type=float, default=[0.1, 0.4], help="a factor of 4 apart")
    parser.add_argument("--grid-epochs", type=int, default=10, help="of the networks that choose the rate")
    parser.add_argument("--grow", type=int, default=2, help="by how many factors of 4 the rates may grow on each side")
    cifar.add_arguments(parser)
    arguments = parser.parse_args(argv)
    if common.finish(arguments, tables):
        if arguments.readme is not None:
            figure(common.Results(arguments.out).rows, arguments.readme.parent / "results" / "heads.svg")
            follow_figure(common.Results(arguments.out).rows, arguments.readme.parent / "results" / "normaliser.svg")
        return
    if arguments.smoke:
        cifar.shrink(arguments)
        arguments.methods = ["softmax", "reciprocal points", "quasibinary"]
        arguments.sets, arguments.grid_epochs, arguments.rates, arguments.grow = ["tiny"], 1, [0.4], 0
    results = common.Results(arguments.out)
    cifar.run(lambda rows: wanted(rows, arguments), train, arguments, results)
    if "many" in arguments.tasks:
        linear.run(arguments, results)


if __name__ == "__main__":
    main()
