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
    """Train one network and measure it on the test images."""
    zero = setting["task"] == "zero"
    classes = known_classes(data["train_fine"], data["train_coarse"]) if zero else torch.arange(100)
    classes = classes.to(arguments.device)
    makers = heads.ZERO_LABELS if zero else heads.ONE_VERSUS_REST
    body, features = cifar.network(setting["network"], arguments.width)
    head = makers[setting["method"]](features, int(classes.max()) + 1)
    body, head = body.to(arguments.device, memory_format=torch.channels_last), head.to(arguments.device)

    def objective(x: Tensor, y: Tensor) -> Tensor:
        with cifar.half(x):
            found = body(x)
        return head.loss(found.float(), y)

    cifar.fit(
        objective,
        [*body.parameters(), *head.parameters()],
        data["train_x"],
        classes[data["train_fine"]],
        peak=cifar.PEAK[setting["network"]],
        epochs=arguments.epochs,
        batch=arguments.batch,
        seed=setting["seed"],
    )
    head.eval()
    with torch.no_grad():
        found = cifar.outputs(body, data["test_x"])
        return measured(head.predict(found), head.confidence(found), classes[data["test_fine"]])


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
        part = [row | {"top-1 error": 1 - row["accuracy"]} for row in rows if row.get("network") == network]
        zero, one = ([row for row in part if row["task"] == task] for task in ("zero", "one"))
        values = ("accuracy", "confidence in", "confidence out", "AUROC", "ECE")
        found[f"zero {network}"] = common.columns(zero, "method", values, order=heads.ZERO_LABELS)
        values = ("top-1 error", "confidence in", "ECE")
        found[f"one {network}"] = common.columns(one, "method", values, order=heads.ONE_VERSUS_REST)
    return found | linear.tables([row for row in rows if row["task"] == "many"])


def figure(rows: Sequence[common.Row], path: Path) -> None:
    """On the left, accuracy against how well rows without label are told; on the right, calibration of four labels."""
    import matplotlib.pyplot as plt

    drawn, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for place, method in enumerate(heads.ZERO_LABELS):
        for network, mark in (("features", "o"), ("resnet", "s")):
            some = [r for r in rows if (r["task"], r.get("network"), r["method"]) == ("zero", network, method)]
            if some:
                x, y = (np.array([100 * r[name] for r in some]) for name in ("accuracy", "AUROC"))
                left.errorbar(
                    x.mean(), y.mean(), y.std(ddof=1), x.std(ddof=1), mark, color=plt.get_cmap("tab10")(place),
                    label=method if mark == "o" else None,
                )  # fmt: skip
    left.set(xlabel="accuracy on rows with a label (%)", ylabel="AUROC (%)", title="circle: features; square: network")
    left.set(xlim=(55, 80), ylim=(68, 92))  # a head that does not learn is outside
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
    parser.add_argument("--sets", nargs="+", default=list(linear.SETS))
    cifar.add_arguments(parser)
    arguments = parser.parse_args(argv)
    if common.finish(arguments, tables):
        if arguments.readme is not None:
            figure(common.Results(arguments.out).rows, arguments.readme.parent / "results" / "heads.svg")
        return
    if arguments.smoke:
        cifar.shrink(arguments)
        arguments.sets = ["tiny"]
    results = common.Results(arguments.out)
    makers = {"zero": heads.ZERO_LABELS, "one": heads.ONE_VERSUS_REST}
    settings = [
        {"task": task, "network": arguments.network, "method": method, "seed": seed}
        for seed in range(arguments.seeds)
        for task in arguments.tasks
        for method in makers.get(task, ())
    ]
    cifar.run([s for s in settings if results.missing(**s)], train, arguments, results)
    if "many" in arguments.tasks:
        linear.run(arguments, results)


if __name__ == "__main__":
    main()
