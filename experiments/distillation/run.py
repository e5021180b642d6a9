"""Distillation on the teacher's k best classes (Wei et al., 2020): a residual network teaches a small one, CIFAR-100.

    python -m experiments.distillation.run --data CIFAR [--workers 4]

The loss is cross-entropy plus a weight times `topk_distillation_loss`; the weight is chosen on the validation rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lastlayer as ll
from experiments import cifar, common

HERE = Path(__file__).parent
TEMPERATURE = 2.0  # as published for CIFAR
KINDS = {"no teacher": 0, "k = 5": 5, "k = 10": 10, "k = 20": 20, "all classes": 100}
WEIGHTS = (0.3, 1.0, 3.0)


def net_of(width: int, device: str) -> nn.Sequential:
    body, features = cifar.network("resnet", width)
    return nn.Sequential(body, nn.Linear(features, 100)).to(device, memory_format=torch.channels_last)


def logits_of(net: nn.Module, x: Tensor) -> Tensor:
    with cifar.half(x):
        found: Tensor = net(x)
    return found.float()


def accuracies(net: nn.Module, data: cifar.Tensors, split: str) -> dict[str, float]:
    hits = cifar.outputs(net, data[f"{split}_x"]).topk(5, -1).indices == data[f"{split}_fine"][:, None]
    found = {"top1": hits[:, 0], "top5": hits.any(-1)}
    return {f"{split}_{name}": round(hit.float().mean().item(), 6) for name, hit in found.items()}


def train(setting: dict[str, Any], data: cifar.Tensors, arguments: Any) -> common.Row:
    """Train the teacher and keep it, or a student beside it."""
    device, seed = arguments.device, setting["seed"]
    file = arguments.teacher
    net = net_of(setting["width"], device)
    teacher = None
    if setting["kind"] not in ("teacher", "no teacher"):
        teacher = net_of(arguments.teacher_width, device)
        teacher.load_state_dict(torch.load(file, map_location=device, weights_only=True))
        teacher.eval().requires_grad_(False)

    def objective(x: Tensor, y: Tensor) -> Tensor:
        logits = logits_of(net, x)
        loss = F.cross_entropy(logits, y)
        if teacher is None:
            return loss
        with torch.no_grad():
            taught = logits_of(teacher, x)
        k = KINDS[setting["kind"]]
        return loss + setting["weight"] * ll.topk_distillation_loss(logits, taught, k, temperature=TEMPERATURE)

    cifar.fit(
        objective,
        net.parameters(),
        data["train_x"],
        data["train_fine"],
        peak=0.4,
        epochs=setting["epochs"],
        batch=arguments.batch,
        seed=seed,
    )
    if setting["kind"] == "teacher":
        torch.save(net.state_dict(), file)
    return accuracies(net, data, "valid") | accuracies(net, data, "test")


def wanted(rows: Sequence[common.Row], arguments: Any) -> list[cifar.Setting]:
    """Return the teacher; then each k with every weight and the first seed; then the other seeds with the best."""
    teacher = {"kind": "teacher", "width": arguments.teacher_width, "epochs": arguments.teacher_epochs}
    if not any(row["kind"] == "teacher" for row in rows) or not arguments.teacher.exists():
        return [teacher | {"weight": 0.0, "seed": 0}]
    found, final = [], []
    for kind in arguments.kinds:
        student = {"kind": kind, "width": arguments.width, "epochs": arguments.epochs}
        weights = (0.0,) if kind == "no teacher" else arguments.weights
        first = [row for row in rows if row["seed"] == 0 and row.items() >= student.items()]
        missing = [w for w in weights if w not in {row["weight"] for row in first}]
        found += [student | {"weight": w, "seed": 0} for w in missing]
        if not missing:
            weight = best_weight(first)
            final += [student | {"weight": weight, "seed": s} for s in range(1, arguments.seeds)]
    return found + sorted(final, key=lambda setting: setting["seed"])


def best_weight(rows: Sequence[common.Row]) -> float:
    """Return the weight with the best top-1 accuracy on the validation rows, first seed."""
    return float(max((row for row in rows if row["seed"] == 0), key=lambda row: row["valid_top1"])["weight"])


def tables(rows: Sequence[common.Row]) -> dict[str, str]:
    named = [row | {"top-1": row["test_top1"], "top-5": row["test_top5"]} for row in rows]
    students = []
    for kind in KINDS:
        some = [row for row in named if row["kind"] == kind]
        if some:
            weight = best_weight(some)
            students += [row for row in some if row["weight"] == weight]
    grid = [row for row in rows if row["seed"] == 0 and row["kind"] != "teacher"]
    grid.sort(key=lambda row: (list(KINDS).index(row["kind"]), row["weight"]))
    return {
        "teacher": common.columns([r for r in named if r["kind"] == "teacher"], "kind", ["top-1", "top-5"]),
        "students": common.columns(students, "kind", ["top-1", "top-5"], order=KINDS),
        "weights": common.table(grid, "kind", "weight", "valid_top1"),
    }


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__, HERE / "results" / "results.json")
    cifar.add_arguments(parser, networks=("resnet",))
    parser.add_argument("--teacher", type=Path, default=Path("teacher.pt"), help="file that the teacher is kept in")
    parser.add_argument("--teacher-width", type=int, default=64)
    parser.add_argument("--teacher-epochs", type=int, default=20)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--weights", nargs="+", type=float, default=list(WEIGHTS), help="of the distillation term")
    parser.set_defaults(width=16, epochs=10)
    arguments = parser.parse_args(argv)
    if common.finish(arguments, tables):
        return
    if arguments.smoke:
        cifar.shrink(arguments)
        arguments.teacher_width, arguments.teacher_epochs = 4, 1
        arguments.kinds, arguments.weights = ["no teacher", "k = 5"], [1.0]
        arguments.teacher = arguments.out.with_suffix(".pt")
    results = common.Results(arguments.out)
    cifar.run(lambda rows: wanted(rows, arguments), train, arguments, results)


if __name__ == "__main__":
    main()
