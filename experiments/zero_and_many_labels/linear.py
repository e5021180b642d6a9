"""Linear models on multi-label sets: how well are the labels that are put out calibrated?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import lastlayer as ll
from experiments import common
from lastlayer.data import LabelData, read_parts

SETS = ("bibtex", "corel5k", "delicious", "yeast", "emotions", "scene", "medical", "birds")
PLACES = 4  # labels put out for each row, as in the thesis
METHODS = ("binary", "softmax", "softmax with temperature", "quasibinary", "LML")
STEPS, BATCH, RATE, DECAYS = 600, 256, 0.01, (0.0, 0.1, 1.0)


class Rows(NamedTuple):
    x: Tensor
    y: Tensor  # multi-hot


def load(folder: Path | None, name: str) -> dict[str, Rows]:
    """Read the official split; bags of words get rows of length 1, other features mean 0 and deviation 1."""
    if name == "tiny":
        return tiny()
    if folder is None:
        raise SystemExit("--mulan is needed: the folder of the multi-label sets (or --tasks zero one)")
    parts = read_parts(folder / f"{name}.npz")
    train, test = (dense(parts[part]) for part in ("train", "test"))
    if ((train.x == 0) | (train.x == 1)).all():
        return {"train": Rows(unit(train.x), train.y), "test": Rows(unit(test.x), test.y)}
    mean, spread = train.x.mean(0), train.x.std(0) + 1e-6
    return {
        "train": Rows((train.x - mean) / spread, train.y),
        "test": Rows(((test.x - mean) / spread).clamp(-10, 10), test.y),
    }


def dense(data: LabelData) -> Rows:
    x = data.features.toarray() if hasattr(data.features, "toarray") else data.features
    y = torch.zeros(len(data), data.n_labels, dtype=torch.uint8)
    y[
        torch.from_numpy(np.repeat(np.arange(len(data)), np.diff(data.indptr))), torch.from_numpy(data.indices).long()
    ] = 1
    return Rows(torch.from_numpy(np.array(x, dtype=np.float32)), y)


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=1, keepdim=True).clamp(min=1)


def tiny() -> dict[str, Rows]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 12, generator=generator)
    y = (x @ torch.randn(12, 9, generator=generator) > 2).to(torch.uint8)
    return {"train": Rows(x[:200], y[:200]), "test": Rows(x[200:], y[200:])}


def losses(k: float) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    return {
        "binary": ll.binary_loss,
        "softmax": ll.multihot_softmax_loss,
        "quasibinary": ll.quasibinary_loss,
        "LML": lambda x, y: ll.lml_loss(x, y, k),
    }


def fitted(loss: Callable[[Tensor, Tensor], Tensor], train: Rows, valid: Rows, decay: float, steps: int) -> Any:
    """Train a linear model and return the lowest loss of the held-out rows, and the model at that step."""
    net = nn.Linear(train.x.shape[1], train.y.shape[1])
    nn.init.zeros_(net.weight)
    net.bias.data = torch.logit((train.y.sum(0) + 1) / (len(train.y) + 2))  # how often each label occurs
    optimiser = torch.optim.AdamW(net.parameters(), RATE, weight_decay=decay)
    best: tuple[float, dict[str, Tensor]] = (float("inf"), {})
    for step in range(steps):
        at = torch.randint(len(train.x), (BATCH,))
        value = loss(net(train.x[at]), train.y[at])
        optimiser.zero_grad(set_to_none=True)
        value.backward()
        optimiser.step()
        if step % 20 == 19:
            with torch.no_grad():
                held = loss(net(valid.x), valid.y).item()
            if held < best[0]:
                best = held, {name: tensor.clone() for name, tensor in net.state_dict().items()}
    net.load_state_dict(best[1])
    return best[0], net


def probabilities(name: str, train: Tensor, logits: Tensor, k: float, labels: float, temperature: float) -> Tensor:
    """Turn logits into label probabilities, as the method says; `train` are the logits of the training rows."""
    if name == "binary":
        return logits.sigmoid()
    if name == "LML":
        return ll.lml(logits, k)
    if name == "quasibinary":  # the normaliser of the training rows, where probabilities add up to labels
        return (logits - (train.logsumexp((0, 1)) - np.log(labels))).clamp(max=0).exp()
    return (logits / temperature).softmax(-1)


def measure(loss_name: str, parts: dict[str, Rows], seed: int, steps: int) -> dict[str, common.Row]:
    """Choose the weight decay on held-out rows and measure the methods that share this loss on the test rows."""
    torch.manual_seed(seed)
    whole, test = parts["train"], parts["test"]
    order = torch.randperm(len(whole.x))
    cut = len(order) // 5
    valid, train = (Rows(whole.x[rows], whole.y[rows]) for rows in (order[:cut], order[cut:]))
    k = train.y.sum(1).float().mean().item()
    loss = losses(k)[loss_name]
    found = [fitted(loss, train, valid, decay, steps) for decay in DECAYS]
    held, net = min(found, key=lambda pair: pair[0])
    places = min(PLACES, whole.y.shape[1])
    names = [name for name in METHODS if name.split()[0] == loss_name]
    rows = {}
    with torch.no_grad():
        seen, logits = net(train.x), net(test.x)
        for name in names:
            temperature = 1.0
            if "temperature" in name:
                temperature = ll.fit_temperature(net(valid.x), valid.y, link="softmax").item()
            p = probabilities(name, seen, logits, k, train.y.sum().item(), temperature)
            rows[name] = {
                "F1": ll.f1_at_k(p, test.y, places, average="macro").item(),
                "ECE": ll.label_calibration_error(p, test.y, k=places).item(),
                "ECE of all": ll.label_calibration_error(p, test.y).item(),
                "decay": DECAYS[found.index((held, net))],
            }
    return rows


def run(arguments: Any, results: common.Results) -> None:
    steps = 40 if arguments.smoke else STEPS
    for name in arguments.sets:
        parts: dict[str, Rows] = {}
        for seed in range(arguments.seeds):
            for loss in losses(1.0):
                if not results.missing(task="many", set=name, method=loss, seed=seed):
                    continue
                parts = parts or load(arguments.mulan, name)
                for method, row in measure(loss, parts, seed, steps).items():
                    results.add(task="many", set=name, method=method, seed=seed, **row)
                    print(name, method, seed, row, flush=True)


def tables(rows: list[common.Row]) -> dict[str, str]:
    rows = sorted(rows, key=lambda row: METHODS.index(row["method"]))
    if not rows:
        return {"many ECE": "(not run)", "many F1": "(not run)"}
    return {f"many {value}": common.table(rows, "method", "set", value, digits=1) for value in ("ECE", "F1")}
