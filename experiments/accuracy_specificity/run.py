"""Accuracy against specificity on label trees (chapter 5 of Liao's thesis, 2021).

    python -m experiments.accuracy_specificity.run --data CIFAR --train          # writes a file of scores a network
    python -m experiments.accuracy_specificity.run --labels FOLDER               # curves, ablations, multi-label sets

Networks with a layer of prototypes and with a linear layer are trained on CIFAR-100 (a GPU helps); trees are made of
their last layers, and decoders choose nodes of a tree for each test image. The multi-label sets have natural trees:
the groups of GoEmotions' emotions, the facets of Debian's tags, and VOC's object classes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import lastlayer as ll
from experiments import cifar, common

HERE = Path(__file__).parent
NETWORKS = ("prototypes", "linear")


def artefact(arguments: Any, network: str, seed: int) -> Path:
    return arguments.out.parent / f"scores_{network}_{seed}.npz"


def train(setting: dict[str, Any], data: cifar.Tensors, arguments: Any) -> common.Row:
    """Train one network and write its scores of the validation and test images, and its last layer, to a file."""
    body, features = cifar.network("resnet", arguments.width)
    prototypes = setting["network"] == "prototypes"
    head: nn.Module = ll.PrototypeHead(features, 100) if prototypes else nn.Linear(features, 100)
    body, head = body.to(arguments.device, memory_format=torch.channels_last), head.to(arguments.device)

    def objective(x: Tensor, y: Tensor) -> Tensor:
        with cifar.half(arguments.device):
            found = body(x)
        return nn.functional.cross_entropy(head(found.float()), y)

    cifar.fit(
        objective,
        [
            {"params": list(body.parameters())},
            {"params": list(head.parameters()), "weight_decay": 0.0 if prototypes else 5e-4},
        ],
        data["train_x"],
        data["train_fine"],
        peak=cifar.PEAK["resnet"],
        epochs=arguments.epochs,
        batch=arguments.batch,
        seed=setting["seed"],
    )
    found: dict[str, np.ndarray] = {"weight": head.weight.detach().cpu().numpy()}
    row: common.Row = {}
    for split in ("valid", "test"):
        target = data[f"{split}_fine"]
        hidden = cifar.outputs(body, data[f"{split}_x"])
        with torch.no_grad():
            scores = head(hidden).log_softmax(-1)
        hits = scores.topk(5).indices == target[:, None]
        row |= {f"{split}_top1": hits[:, 0].float().mean().item(), f"{split}_top5": hits.any(-1).float().mean().item()}
        found |= {
            f"{split}_scores": scores.half().cpu().numpy(),
            f"{split}_fine": target.cpu().numpy().astype(np.uint8),
        }
        if split == "valid":
            means = [hidden[target == c].mean(0) for c in range(100)]
            found["means"] = torch.stack(means).nan_to_num().cpu().numpy()
    found["coarse"] = torch.stack([data["train_coarse"][data["train_fine"] == c][0] for c in range(100)]).cpu().numpy()
    path = artefact(arguments, setting["network"], setting["seed"])
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **found)
    return row


def tables(rows: list[common.Row]) -> dict[str, str]:
    networks = [row for row in rows if row["part"] == "network"]
    return {"networks": common.columns(networks, "network", ("test_top1", "test_top5"), order=NETWORKS)}


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__, HERE / "results" / "results.json")
    parser.add_argument("--train", action="store_true", help="train the networks, and stop")
    cifar.add_arguments(parser)
    arguments = parser.parse_args(argv)
    if common.finish(arguments, tables):
        return
    if arguments.smoke:
        cifar.shrink(arguments)
    results = common.Results(arguments.out)
    settings = [
        {"part": "network", "network": network, "seed": seed} for seed in range(arguments.seeds) for network in NETWORKS
    ]
    if arguments.train or arguments.smoke:
        cifar.run([s for s in settings if results.missing(**s)], train, arguments, results)


if __name__ == "__main__":
    main()
