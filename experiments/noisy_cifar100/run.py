"""Top-5 classification of CIFAR-100 with noisy labels (figure 4 of the LML paper; Berrada et al. 2018's protocol).

    python -m experiments.noisy_cifar100.run --data CIFAR [--noise blocks coarse] [--network resnet]

Training labels are replaced, each with probability p, by a random one of five: the block of the published code
(label - label % 5 + 0..4) or the fine classes of the same coarse class, as the papers' texts say. Validation and test
labels are clean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lastlayer as ll
from experiments import cifar, common

HERE = Path(__file__).parent
K = 5
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": F.cross_entropy,
    "smooth SVM": lambda x, y: ll.smooth_topk_svm_loss(x, y, K),
    "truncated entropy": lambda x, y: ll.truncated_entropy_loss(x, y, K),
    "LML": lambda x, y: ll.lml_loss(x, y, K),
    "two-way": lambda x, y: ll.two_way_loss(x, y),
}
NETWORKS = ("resnet", "features")
RATES, DECAYS, FACTOR = (0.1, 0.4, 1.6), (1.25e-4, 5e-4, 2e-3), 4  # the grid, and the step by which it grows
TUNED_AT = 0.6  # the share of noise at which rate and decay are chosen
PROBABILITIES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


def noisy(fine: np.ndarray, coarse: np.ndarray, kind: str, p: float, seed: int) -> np.ndarray:
    """Replace labels with probability p by one of five; the draw may return the same label."""
    rng = np.random.default_rng(seed)
    hit = rng.random(len(fine)) < p
    slot = rng.integers(0, 5, len(fine))
    if kind == "blocks":
        drawn = fine - fine % 5 + slot
    else:
        members = np.stack([np.unique(fine[coarse == c]) for c in range(20)])
        drawn = members[coarse, slot]
    return np.where(hit, drawn, fine)


def train(setting: dict[str, Any], data: cifar.Tensors, arguments: Any) -> common.Row:
    """Train one network; return its clean accuracy at the last epoch, on the test rows only with the chosen setting."""
    body, features = cifar.network(setting["network"], setting["width"])
    net = nn.Sequential(body, nn.Linear(features, 100)).to(arguments.device, memory_format=torch.channels_last)
    fine, coarse = (data[f"train_{name}"].cpu().numpy() for name in ("fine", "coarse"))
    labels = noisy(fine, coarse, setting["noise"], setting["p"], setting["seed"])
    loss_of = LOSSES[setting["loss"]]

    def objective(x: Tensor, y: Tensor) -> Tensor:
        with cifar.half(x):
            logits = net(x)
        return loss_of(logits.float(), y)

    cifar.fit(
        objective,
        net.parameters(),
        data["train_x"],
        torch.as_tensor(labels, device=arguments.device),
        peak=setting["rate"],
        decay=setting["decay"],
        epochs=arguments.epochs,
        batch=arguments.batch,
        seed=setting["seed"],
    )
    found = {}
    for split in ("valid",) if setting["part"] == "grid" else ("valid", "test"):
        hits = cifar.outputs(net, data[f"{split}_x"]).topk(K, -1).indices == data[f"{split}_fine"][:, None]
        found[f"{split}_top1"] = round(hits[:, 0].float().mean().item(), 6)
        found[f"{split}_top5"] = round(hits.any(-1).float().mean().item(), 6)
    return found


def wanted(rows: Sequence[common.Row], arguments: Any) -> list[cifar.Setting]:
    """Return what to train: the grid of each loss and kind of noise, then every share of noise with what it chose."""
    found, final = [], []
    base = {"network": arguments.network, "width": arguments.width}
    for noise in ["none", *arguments.noise]:
        shares = [p for p in arguments.p if (p == 0) == (noise == "none")]
        for loss in arguments.losses if shares else ():
            cell = base | {"noise": noise, "p": 0.0 if noise == "none" else TUNED_AT, "loss": loss}
            grid = [row for row in rows if row["part"] == "grid" and row.items() >= cell.items()]
            more = grid_of(grid, arguments.rates, arguments.decays, arguments.grow)
            found += [cell | {"part": "grid", "rate": rate, "decay": decay, "seed": 0} for rate, decay in more]
            if not more:
                rate, decay = best(grid)
                pair = {"part": "test", "rate": rate, "decay": decay}
                final += [cell | pair | {"p": p, "seed": seed} for seed in range(arguments.seeds) for p in shares]
    return found + sorted(final, key=lambda setting: setting["seed"])


def best(grid: Sequence[common.Row]) -> tuple[float, float]:
    """Return the rate and the decay with the best top-5 accuracy on the validation rows."""
    row = max(grid, key=lambda row: row["valid_top5"])
    return row["rate"], row["decay"]


def grid_of(
    grid: Sequence[common.Row], rates: Sequence[float], decays: Sequence[float], steps: int = 2
) -> list[tuple[float, float]]:
    """Return the pairs still to train: the given ones, then neighbours of the best, until it lies inside.

    The grid grows by at most `steps` factors of 4 on each side.
    """
    seen = {(row["rate"], row["decay"]) for row in grid}
    missing = [(rate, decay) for rate in rates for decay in decays if (rate, decay) not in seen]
    if missing:
        return missing
    rate, decay = best(grid)
    around = [(rate * FACTOR, decay), (rate / FACTOR, decay), (rate, decay * FACTOR), (rate, decay / FACTOR)]
    most = 1.01 * FACTOR**steps
    return [
        pair
        for pair in (tuple(float(f"{v:.6g}") for v in pair) for pair in around)
        if pair not in seen
        and rates[0] / most < pair[0] < rates[-1] * most
        and decays[0] / most < pair[1] < decays[-1] * most
    ]


def tables(rows: Sequence[common.Row]) -> dict[str, str]:
    found = {"runs": runs(rows)}
    for network in NETWORKS:
        of_network = [row for row in rows if row["network"] == network]
        found[f"chosen {network}"] = chosen([row for row in of_network if row["part"] == "grid"])
        test = [row for row in of_network if row["part"] == "test"]
        for noise in ("blocks", "coarse") if network == "resnet" else ("blocks",):
            part = [row for row in test if row["noise"] in (noise, "none")]
            part.sort(key=lambda row: (list(LOSSES).index(row["loss"]), row["p"]))
            for value in ("test_top5", "test_top1"):
                made = common.table(part, "loss", "p", value) if part else "(not run)"
                found[f"{network} {noise} {value}"] = made
            found[f"ahead {network} {noise}"] = ahead(part)
    return found


def chosen(grid: Sequence[common.Row]) -> str:
    """Rate and decay that the validation rows chose, their top-5 accuracy, and that at the one setting of before."""
    heads = [f"{noise}: rate, decay | chosen | at 0.4, 5e-4" for noise in ("none", "blocks", "coarse")]
    lines = ["| loss | " + " | ".join(heads) + " |", "| --- " * 10 + "|"]
    for loss in LOSSES:
        cells = []
        for noise in ("none", "blocks", "coarse"):
            some = [row for row in grid if (row["loss"], row["noise"]) == (loss, noise)]
            if not some:
                cells.append(" | | ")
                continue
            rate, decay = best(some)
            of = {(row["rate"], row["decay"]): 100 * row["valid_top5"] for row in some}
            before = f"{of[0.4, 5e-4]:.1f}" if (0.4, 5e-4) in of else ""
            cells.append(f"{rate:g}, {decay:g} | {of[rate, decay]:.1f} | {before}")
        lines.append(f"| {loss} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ahead(rows: Sequence[common.Row]) -> str:
    """The points of top-5 accuracy that each loss is ahead of cross-entropy: mean and spread of the pairs of a seed."""
    from scipy import stats

    found: dict[tuple[str, float], dict[int, float]] = {}
    for row in rows:
        found.setdefault((row["loss"], row["p"]), {})[row["seed"]] = 100 * row["test_top5"]
    shares = sorted({row["p"] for row in rows})
    lines = ["| loss | " + " | ".join(map(str, shares)) + " |", "| --- " * (len(shares) + 1) + "|"]
    for loss in list(LOSSES)[1:]:
        cells = []
        for p in shares:
            ours, base = found.get((loss, p), {}), found.get(("cross-entropy", p), {})
            pairs = [ours[seed] - base[seed] for seed in sorted(ours.keys() & base.keys())]
            if len(pairs) < 2:
                cells.append("")
                continue
            sure = stats.ttest_1samp(pairs, 0).pvalue < 0.05
            cells.append(f"{np.mean(pairs):+.2f} ± {np.std(pairs, ddof=1):.2f}{' *' if sure else ''}")
        lines.append(f"| {loss} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def runs(rows: Sequence[common.Row]) -> str:
    """Say what was run."""
    lines = []
    for network in dict.fromkeys(row["network"] for row in rows):
        part = [row for row in rows if row["network"] == network]
        grid = sum(row["part"] == "grid" for row in part)
        seeds, epochs = (sorted({row[name] for row in part}) for name in ("seed", "epochs"))
        lines.append(
            f"{network}: {grid} networks to choose and {len(part) - grid} to measure, seeds {seeds}, "
            f"{' or '.join(map(str, epochs))} epochs"
        )
    return "; ".join(lines) + "."


def figure(rows: Sequence[common.Row], path: Path) -> None:
    """Draw top-5 accuracy against the noise, mean and range over seeds: one panel per kind of noise."""
    import matplotlib.pyplot as plt

    drawn, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for axis, noise, title in zip(
        axes, ("blocks", "coarse"), ("noise within blocks", "noise within coarse classes"), strict=True
    ):
        for loss in LOSSES:
            points: dict[float, list[float]] = {}
            for row in rows:
                if (
                    row["part"] == "test"
                    and row["network"] == "resnet"
                    and row["loss"] == loss
                    and row["noise"] in (noise, "none")
                ):
                    points.setdefault(row["p"], []).append(100 * row["test_top5"])
            at = sorted(points)
            axis.plot(at, [np.mean(points[p]) for p in at], marker=".", label=loss)
            axis.fill_between(at, [min(points[p]) for p in at], [max(points[p]) for p in at], alpha=0.2)
        axis.set(xlabel="share of labels drawn anew", title=title)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("top-5 accuracy (%)")
    axes[0].legend()
    common.save(drawn, path)


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__, HERE / "results" / "results.json")
    parser.add_argument("--noise", nargs="+", default=["blocks", "coarse"], choices=["blocks", "coarse"])
    parser.add_argument("--losses", nargs="+", default=list(LOSSES), choices=list(LOSSES))
    parser.add_argument("--p", nargs="+", type=float, default=list(PROBABILITIES))
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES), help="the grid's, a factor of 4 apart")
    parser.add_argument("--decays", nargs="+", type=float, default=list(DECAYS), help="the grid's, a factor of 4 apart")
    parser.add_argument("--grow", type=int, default=2, help="by how many factors of 4 the grid may grow on each side")
    cifar.add_arguments(parser, networks=NETWORKS)
    arguments = parser.parse_args(argv)
    if common.finish(arguments, tables):
        if arguments.readme is not None:
            figure(common.Results(arguments.out).rows, arguments.readme.parent / "results" / "top5.svg")
        return
    if arguments.smoke:
        cifar.shrink(arguments)
        arguments.p, arguments.noise, arguments.losses = [0.0, 0.4], ["coarse"], ["cross-entropy", "LML"]
        arguments.rates, arguments.decays, arguments.grow = [0.1, 0.4], [5e-4], 0
    results = common.Results(arguments.out)
    cifar.run(lambda rows: wanted(rows, arguments), train, arguments, results)


if __name__ == "__main__":
    main()
