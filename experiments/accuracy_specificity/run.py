"""Accuracy against specificity on label trees (chapter 5 of Liao's thesis, 2021).

    python -m experiments.accuracy_specificity.run --data CIFAR --parts train    # writes one file of scores per network
    python -m experiments.accuracy_specificity.run --labels FOLDER --parts curves sets

Networks with a layer of prototypes, with a linear layer, and with a linear layer and a quadratic loss are trained on
CIFAR-100 (a GPU helps); trees are made of their last layers, and decoders choose nodes of a tree for each test image.
The multi-label sets have natural trees: the groups of GoEmotions' emotions, the facets of Debian's tags, and VOC's
object classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import lastlayer as ll
from experiments import cifar, common
from experiments.accuracy_specificity import curves, many

HERE = Path(__file__).parent
NETWORKS = ("resnet", "features")
HEADS = ("prototypes", "linear", "quadratic")
READ_AT = (0.8, 0.9, 0.95)
MATCHES = ("coarse to tree", "tree to coarse")


def artefact(arguments: Any, network: str, head: str, seed: int) -> Path:
    return arguments.out.parent / f"scores_{network}_{head}_{seed}.npz"


def train(setting: dict[str, Any], data: cifar.Tensors, arguments: Any) -> common.Row:
    """Train one network and write its scores of the validation and test images, and its last layer, to a file."""
    body, features = cifar.network(setting["network"], arguments.width)
    prototypes, quadratic = (setting["head"] == name for name in ("prototypes", "quadratic"))
    head: nn.Module = ll.PrototypeHead(features, 100) if prototypes else nn.Linear(features, 100, bias=not quadratic)
    body, head = body.to(arguments.device, memory_format=torch.channels_last), head.to(arguments.device)

    def objective(x: Tensor, y: Tensor) -> Tensor:
        with cifar.half(x):
            found = body(x).float()
        if quadratic:  # label vectors and features in one space (Habibian et al., 2014)
            made = head(found / features**0.5)
            return (made - nn.functional.one_hot(y, 100)).square().sum(-1).mean()
        return nn.functional.cross_entropy(head(found), y)

    cifar.fit(
        objective,
        [
            {"params": list(body.parameters())},
            {"params": list(head.parameters()), "weight_decay": 0.0 if prototypes else 5e-4},
        ],
        data["train_x"],
        data["train_fine"],
        peak=cifar.PEAK[setting["network"]],
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
    path = artefact(arguments, setting["network"], setting["head"], setting["seed"])
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **found)
    return row


def curve(rows: list[common.Row], seed: int) -> list[tuple[float, float]]:
    return [(row["accuracy"], row["specificity"]) for row in rows if row["seed"] == seed]


def summary(rows: list[common.Row], start: dict[int, float]) -> list[common.Row]:
    """For each seed, the specificity of a curve at some accuracies, and its mean from `start` to 1."""
    found = []
    for seed in sorted({row["seed"] for row in rows}):
        points = [*curve(rows, seed), (1.0, 0.0)]
        at = {f"at {accuracy:.0%}": curves.specificity_at(points, accuracy) for accuracy in READ_AT}
        found.append({"mean": curves.area(points, start[seed])} | at)
    return found


def cifar_tables(rows: list[common.Row]) -> dict[str, str]:
    part = [row for row in rows if row["part"] == "curve"]
    sets = [row for row in part if row["decoder"] == "top-k"]
    start = {row["seed"]: row["accuracy"] for row in sets if row["at"] == 1}
    decoders = [{"decoder": "top-k sets"} | row for row in summary(sets, start)]
    trees: list[common.Row] = []
    linkages: list[common.Row] = []
    for decoder in ("MAX-REW", "DARTS"):
        for tree in dict.fromkeys(row["tree"] for row in part if row["decoder"] == decoder):
            here = summary([row for row in part if (row["decoder"], row["tree"]) == (decoder, tree)], start)
            if tree == "prototypes":
                decoders += [{"decoder": decoder} | row for row in here]
            if tree in curves.TREES:
                trees += [{"tree": curves.TREES[tree], decoder: row["mean"]} for row in here]
            if tree in curves.LINKAGES or tree == "prototypes":
                name = "ward" if tree == "prototypes" else tree
                linkages += [{"linkage": name, decoder: row["mean"]} for row in here]
    for row in rows:
        if row["part"] == "tree":
            match = {name: row[name] for name in MATCHES}
            if row["tree"] in curves.TREES:
                trees.append({"tree": curves.TREES[row["tree"]]} | match)
            if row["tree"] in curves.LINKAGES or row["tree"] == "prototypes":
                linkages.append({"linkage": "ward" if row["tree"] == "prototypes" else row["tree"]} | match)
    wanted = [row | {"wanted": f"{row['at']:.0%}"} for row in part if row["decoder"] == "DARTS" and row["at"] > 0]
    wanted = [row for row in wanted if row["tree"] == "prototypes"]
    values = ("mean", *(f"at {accuracy:.0%}" for accuracy in READ_AT))
    return {
        "decoders": common.columns(decoders, "decoder", values),
        "trees": common.columns(trees, "tree", ("MAX-REW", "DARTS", *MATCHES), order=curves.TREES.values()),
        "linkages": common.columns(linkages, "linkage", ("MAX-REW", "DARTS", *MATCHES), order=curves.LINKAGES),
        "wanted": common.columns(wanted, "wanted", ("accuracy", "specificity")),
    }


def set_tables(rows: list[common.Row]) -> dict[str, str]:
    found = {}
    for name in many.SETS:
        part = [row for row in rows if row.get("set") == name]
        areas: list[common.Row] = []
        for row in part:
            if row["part"] == "set tree":
                numbers = {"natural to tree": row["natural to tree"], "says": row["says"], "true": row["true"]}
                areas.append({"tree": many.TREES[row["tree"]]} | numbers)
        for tree, label in many.TREES.items():
            for k in many.NODES:
                here = [row for row in part if row["part"] == "set curve" and (row["tree"], row["k"]) == (tree, k)]
                start = {row["seed"]: row["accuracy"] for row in here if row["at"] == 0}
                areas += [{"tree": label, f"Max{k}-REW": row["mean"]} for row in summary(here, start)]
        values = (*(f"Max{k}-REW" for k in many.NODES), "natural to tree", "says", "true")
        found[name] = common.columns(areas, "tree", values, order=many.TREES.values())
    return found


def tables(rows: Sequence[common.Row]) -> dict[str, str]:
    found = {}
    for network in NETWORKS:
        part = [row for row in rows if row.get("network") == network]
        trained = [row for row in part if row["part"] == "network"]
        made = {
            "networks": common.columns(trained, "head", ("test_top1", "test_top5"), order=HEADS),
            **cifar_tables(part),
            "figure": shown(network) if any(row["part"] == "curve" for row in part) else "(not run)",
        }
        found |= {f"{name} {network}": table for name, table in made.items()}
    return found | set_tables(list(rows))


def shown(network: str) -> str:
    return f"""![Accuracy against specificity on CIFAR-100: three ways to choose an answer on one tree,
and one way on several trees](results/curves_{network}.svg)"""


def figure(rows: list[common.Row], path: Path) -> None:
    """Draw the curves on CIFAR-100, means over seeds: decoders on the left, trees on the right."""
    import matplotlib.pyplot as plt

    part = [row for row in rows if row["part"] == "curve"]
    if not part:
        return
    drawn, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    lines = [(axes[0], "none", "top-k", "top-k sets")]
    lines += [(axes[0], "prototypes", decoder, decoder) for decoder in ("MAX-REW", "DARTS")]
    lines += [(axes[1], tree, "DARTS", label) for tree, label in curves.TREES.items()]
    for axis, tree, decoder, label in lines:
        here = [row for row in part if (row["tree"], row["decoder"]) == (tree, decoder)]
        if not here:
            continue
        at = sorted({row["at"] for row in here})
        points = [
            [np.mean([row[value] for row in here if row["at"] == a]) for a in at]
            for value in ("accuracy", "specificity")
        ]
        axis.plot(*points, marker=".", linewidth=1, label=label)
    for axis, title in zip(axes, ("decoders, Ward tree of prototypes", "trees, DARTS"), strict=True):
        axis.set(xlabel="accuracy", title=title)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    axes[0].set_ylabel("specificity")
    common.save(drawn, path)


def measure_curves(arguments: Any, results: common.Results) -> None:
    for network in NETWORKS:
        for seed in range(arguments.seeds):
            path, *others = (artefact(arguments, network, head, seed) for head in HEADS)
            here = {head: other for head, other in zip(HEADS[1:], others, strict=True) if other.exists()}
            curve = {"part": "curve", "network": network, "seed": seed}
            done = {row["tree"] for row in results.rows if curve.items() <= row.items()}
            if not path.exists() or {HEADS[0], *here} <= done:
                continue
            weights = {head: curves.read(other).weight for head, other in here.items()}
            found = [rounded(row) | {"network": network} for row in curves.measure(curves.read(path), weights, seed)]
            results.extend([row for row in found if row["tree"] not in done])
            print(f"curves of {network}, seed {seed}", flush=True)


def measure_sets(arguments: Any, results: common.Results) -> None:
    for name in arguments.sets:
        missing = [s for s in range(arguments.seeds) if results.missing(part="set", set=name, seed=s)]
        data = many.load(arguments.labels, name) if missing else None
        for seed in missing:
            assert data is not None
            epochs = 1 if arguments.smoke else many.EPOCHS
            results.extend([rounded(row) for row in many.measure(name, data, seed, epochs)])
            print(f"{name}, seed {seed}", flush=True)


def rounded(row: common.Row) -> common.Row:
    return {name: round(value, 5) if isinstance(value, float) else value for name, value in row.items()}


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__, HERE / "results" / "results.json")
    parser.add_argument("--parts", nargs="+", default=["train", "curves", "sets"], choices=["train", "curves", "sets"])
    parser.add_argument("--labels", type=Path, help="folder of the folders of the multi-label sets")
    parser.add_argument("--sets", nargs="+", default=list(many.SETS), choices=list(many.SETS))
    cifar.add_arguments(parser)
    arguments = parser.parse_args(argv)
    if common.finish(arguments, tables):
        if arguments.readme is not None:
            for network in NETWORKS:
                rows = [row for row in common.Results(arguments.out).rows if row.get("network") == network]
                figure(rows, arguments.readme.parent / "results" / f"curves_{network}.svg")
        return
    if arguments.smoke:
        cifar.shrink(arguments)
        arguments.sets = ["tiny"]
    results = common.Results(arguments.out)
    if "train" in arguments.parts:
        settings = [
            {"part": "network", "network": arguments.network, "head": head, "seed": seed}
            for seed in range(arguments.seeds)
            for head in HEADS
        ]
        cifar.run([s for s in settings if results.missing(**s)], train, arguments, results)
    if "curves" in arguments.parts:
        measure_curves(arguments, results)
    if "sets" in arguments.parts:
        measure_sets(arguments, results)


if __name__ == "__main__":
    main()
