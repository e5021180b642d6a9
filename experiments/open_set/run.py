"""Open-set recognition on CIFAR-100 features: which evidence tells classes that were never seen from the known ones?

    python -m experiments.open_set.run --data FEATURES [--workers 3]

Some classes are known, and training has their rows alone; the test rows of all 100 classes are classified or rejected
(the protocol of Chen et al., 2020, and of Zhang et al., 2020). FEATURES is the file of `experiments/noisy_cifar100`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import lastlayer as ll
from experiments import cifar, common, tabular
from experiments.open_set.flow import Gaussians, fit_flow
from experiments.zero_and_many_labels import heads

HERE = Path(__file__).parent
KNOWN = (20, 50, 80)  # of 100 classes
GRID = [(rate, decay) for rate in (0.025, 0.1, 0.4, 1.6) for decay in (1.25e-4, 5e-4, 2e-3, 8e-3)]
LOST = 0.05  # the share of known validation rows that the threshold may reject
METHODS = (
    "largest probability", "largest logit", "quasibinary", "reciprocal points", "Gaussian, features",
    "Gaussian, hidden layer", "flow, features", "flow, hidden layer",
)  # fmt: skip
VALUES = {
    "accuracy": "accuracy of known",
    "AUROC": "AUROC",
    "F": "open-set F",
    "kept": "known kept",
    "out": "unknown rejected",
}


def openness(known: int, classes: int = 100) -> float:
    """Return 1 - sqrt(known / classes), the openness of Zhang et al. (2020)."""
    return 1 - math.sqrt(known / classes)


def open_f(decided: Tensor, truth: Tensor, known: int) -> float:
    """Return F1, averaged over the known classes and "unknown" (-1 in both)."""
    found = []
    for c in [*range(known), -1]:
        right = ((decided == c) & (truth == c)).sum().item()
        found.append(2 * right / max((decided == c).sum().item() + (truth == c).sum().item(), 1))
    return float(np.mean(found))


def network(maker: heads.Head, data: list[Tensor], known: int, seed: int, arguments: Any) -> tuple[Any, Any, Any]:
    """Train a hidden layer and a head on the rows of the known classes; return both and the setting.

    Rate and decay are those with the best accuracy on the validation rows of the known classes.
    """
    train_x, train_y, valid_x, valid_y = data
    found = []
    for rate, decay in GRID[:1] if arguments.smoke else GRID:
        torch.manual_seed(seed)
        body, features = cifar.network("features", arguments.width)
        head = maker(features, known)
        body, head = body.to(arguments.device).train(), head.to(arguments.device)
        cifar.fit(
            lambda x, y, body=body, head=head: head.loss(body(x), y),  # type: ignore[misc]
            [*body.parameters(), *head.parameters()],
            train_x,
            train_y,
            peak=rate,
            decay=decay,
            epochs=arguments.epochs,
            batch=arguments.batch,
            seed=seed,
        )
        body, head = body.eval().requires_grad_(False), head.eval().requires_grad_(False)
        right = (head.predict(body(valid_x)).argmax(-1) == valid_y).float().mean().item()
        found.append((right, body, head, [rate, decay]))
    return max(found, key=lambda one: one[0])[1:]


def evidence(
    bodies: dict[str, tuple[nn.Module, Any, Any]],
    train: tuple[Tensor, Tensor],
    valid: Tensor,
    known: int,
    arguments: Any,
) -> dict[str, Any]:
    """Return, by method, a function from feature rows to class scores and to how known a row looks."""
    body, softmax, _ = bodies["softmax"]

    def score(x: Tensor) -> Tensor:
        return softmax(body(x))

    found: dict[str, Any] = {
        "largest probability": (score, lambda x: score(x).softmax(-1).amax(-1)),
        "largest logit": (score, lambda x: score(x).amax(-1)),
    }
    for name in ("quasibinary", "reciprocal points"):
        inner, head, _ = bodies[name]
        found[name] = (
            lambda x, inner=inner, head=head: head.predict(inner(x)),
            lambda x, inner=inner, head=head: head.confidence(inner(x)),
        )
    x, y = train
    for name, seen in {"features": lambda x: x, "hidden layer": body}.items():
        mixture = Gaussians(seen(x), y, known)
        found[f"Gaussian, {name}"] = (score, lambda x, m=mixture, s=seen: m.log_density(s(x)))
        jitter = 1 / 24 if name == "features" else 0.0  # features are stored in steps of this size
        flow = fit_flow(seen(x), seen(valid), epochs=arguments.flow_epochs, jitter=jitter)
        found[f"flow, {name}"] = (score, lambda x, f=flow, s=seen: f.log_density(s(x)))
    return found


def work(setting: dict[str, Any], arguments: Any) -> list[common.Row]:
    """Draw known classes, train, and measure every method."""
    start = time.time()
    data, known, seed = data_for(arguments), setting["known"], setting["seed"]
    order = np.random.default_rng(1000 + seed).permutation(100)[:known]
    place = torch.full((100,), -1, device=arguments.device)
    place[torch.as_tensor(order, device=arguments.device)] = torch.arange(known, device=arguments.device)
    target = {part: place[data[f"{part}_fine"]] for part in ("train", "valid", "test")}
    rows = target["train"] >= 0
    train = data["train_x"][rows], target["train"][rows]
    held_out = target["valid"] >= 0
    valid = data["valid_x"][held_out]
    makers: dict[str, heads.Head] = {
        "softmax": heads.Softmax,
        "quasibinary": heads.Quasibinary,
        "reciprocal points": heads.ZERO_LABELS["reciprocal points"],
    }
    bodies = {
        name: network(maker, [*train, valid, target["valid"][held_out]], known, seed, arguments)
        for name, maker in makers.items()
    }
    torch.manual_seed(seed)
    test, truth = data["test_x"], target["test"]
    inside = truth >= 0
    found = []
    for method, (score, value) in evidence(bodies, train, valid, known, arguments).items():
        with torch.no_grad():
            scores, values, held = score(test), value(test).float(), value(valid).float()
            threshold = ll.tune_reject(score(valid), LOST, by="log_density", values=held)
            decided = ll.decode_reject(scores, threshold, by="log_density", values=values).index[:, 0]
        numbers = {
            "accuracy": (scores.argmax(-1) == truth)[inside].float().mean().item(),
            "AUROC": ll.auroc(values, inside).item(),
            "F": open_f(decided, truth, known),
            "kept": (decided >= 0)[inside].float().mean().item(),
            "out": (decided < 0)[~inside].float().mean().item(),
        }
        setting_of = bodies[method if method in bodies else "softmax"][2]
        found.append({"method": method, "setting": setting_of} | {name: round(v, 5) for name, v in numbers.items()})
    return [row | {"seconds": round(time.time() - start, 1)} for row in found]


_data: dict[str, cifar.Tensors] = {}


def data_for(arguments: Any) -> cifar.Tensors:
    if "data" not in _data:
        raw = tiny() if arguments.smoke else cifar.load_features(arguments.data)
        _data["data"] = cifar.prepared(raw, arguments.held_out, arguments.device)
    return _data["data"]


def tiny() -> cifar.Arrays:
    rng = np.random.default_rng(0)
    fine = np.tile(np.arange(100), 12)
    x = (rng.normal(size=(100, 256))[fine] + rng.normal(size=(1200, 256))).astype(np.float32)
    parts = {"x": x, "fine": fine, "coarse": fine // 5}
    return {f"{split}_{name}": value for split in ("train", "test") for name, value in parts.items()}


def ahead(rows: Sequence[common.Row]) -> str:
    """The points that each method is ahead of the largest probability: mean and spread of the pairs of a draw."""
    lines = ["| method | " + " | ".join(f"AUROC, {n} known | F, {n} known" for n in KNOWN) + " |"]
    lines.append("| --- " * (2 * len(KNOWN) + 1) + "|")
    of = {(row["known"], row["method"], row["seed"]): row for row in rows}
    for method in METHODS[1:]:
        cells = []
        for n in KNOWN:
            pairs = [(row, of[n, METHODS[0], key[2]]) for key, row in of.items() if key[:2] == (n, method)]
            for name in ("AUROC", "F"):
                gains = [100 * (ours[name] - base[name]) for ours, base in pairs]
                spread = f" ± {np.std(gains, ddof=1):.1f}" if len(gains) > 1 else ""
                cells.append(f"{np.mean(gains):+.1f}{spread}" if gains else "")
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tables(rows: Sequence[common.Row]) -> dict[str, str]:
    made = {"ahead": ahead(rows)}
    for known in KNOWN:
        some = [{VALUES.get(k, k): v for k, v in row.items()} for row in rows if row["known"] == known]
        made[f"known {known}"] = common.columns(some, "method", list(VALUES.values()), order=METHODS, digits=1)
    return made


def draw(rows: Sequence[common.Row], path: Path) -> None:
    """AUROC and F against the openness, mean and spread over the splits."""
    import matplotlib.pyplot as plt

    drawn, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, name in zip(axes, ("AUROC", "F"), strict=True):
        for number, method in enumerate(METHODS):
            of = [[100 * r[name] for r in rows if (r["known"], r["method"]) == (n, method)] for n in KNOWN]
            if all(of):
                at = [100 * openness(n) + 0.5 * (number - 3.5) for n in KNOWN]
                dashed = "--" if method.startswith(("Gaussian", "flow")) else "-"
                spread = [np.std(v, ddof=1) for v in of]
                axis.errorbar(at, [*map(np.mean, of)], spread, marker="o", markersize=4, linestyle=dashed, label=method)
        axis.set(xlabel="openness (%)", ylabel=f"{VALUES[name]} (%)")
        axis.grid(alpha=0.3)
    axes[1].legend(fontsize=8, loc="lower left")
    common.save(drawn, path)


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__, HERE / "results" / "results.json")
    parser.set_defaults(seeds=5)
    parser.add_argument("--flow-epochs", type=int, default=15)
    parser.add_argument("--figure", type=Path, help="only draw the figure from the results, to this file")
    cifar.add_arguments(parser, networks=("features",))
    arguments = parser.parse_args(argv)
    if common.finish(arguments, tables, draw):
        return
    results = common.Results(arguments.out)
    known = KNOWN
    if arguments.smoke:
        cifar.shrink(arguments)
        arguments.epochs, arguments.flow_epochs, known = 4, 1, KNOWN[:1]
    elif arguments.data is None:
        parser.error("--data is needed: a file of features (or --smoke)")
    settings = [{"known": n, "seed": seed} for seed in range(arguments.seeds) for n in known]
    tabular.run(work, [s for s in settings if results.missing(**s)], arguments, results)


if __name__ == "__main__":
    main()
