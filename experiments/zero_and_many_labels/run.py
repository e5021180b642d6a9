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
        "AUROC": ll.auroc(confidence, inside.long()).item(),
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


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__, HERE / "results" / "results.json")
    parser.add_argument("--tasks", nargs="+", default=["zero", "one", "many"], choices=["zero", "one", "many"])
    parser.add_argument("--mulan", type=Path, help="folder of the multi-label sets as npz")
    parser.add_argument("--sets", nargs="+", default=list(linear.SETS))
    cifar.add_arguments(parser)
    arguments = parser.parse_args(argv)
    if common.finish(arguments, tables):
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
