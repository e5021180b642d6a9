"""Predicate classification in scene graphs (tables 1 and 2 of the LML paper), from boxes and classes without pixels.

    python -m experiments.scene_graphs.run --data VRD [--workers 4]

A relation network is trained with each loss; learning rate and length of training are chosen on held-out training
images, for each loss from the same grid, and the network is trained again on all training images with every seed.
VRD is a folder with vrd.npz, or with VG-SGG.h5 for Visual Genome and other data in its format.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lastlayer as ll
from experiments import common
from experiments.scene_graphs import data
from experiments.scene_graphs.data import Batch, Graphs
from experiments.scene_graphs.network import RelationNetwork

HERE = Path(__file__).parent
CUTS = [20, 50, 100]
FREQUENCY, SOFTMAX = "frequency", "softmax per pair"
METRICS = {"R": "recall", "mR": "mean recall", "zR": "zero-shot recall"}
MODES = {"": "constrained", "u": "unconstrained"}


def by_image(scores: Tensor, batch: Batch) -> Tensor:
    """Lay all scores of an image in one row, without "no relation", padded with -inf."""
    n_pairs = int(batch.ptr.diff().max())
    shape = (len(batch.ptr) - 1, 1 << (n_pairs - 1).bit_length(), scores.shape[-1] - 1)
    rows = scores.new_full(shape, -torch.inf).index_put((batch.image, batch.place), scores[:, :-1])
    return rows.flatten(1)


def places(batch: Batch, n_predicates: int, k: int) -> Tensor:
    """Return k, or the number of an image's scores where it has fewer."""
    return (batch.ptr.diff() * n_predicates).clamp(max=k).to(batch.present.device)


def lml(scores: Tensor, batch: Batch, k: int, thinned: bool = False) -> Tensor:
    rows, size = by_image(scores, batch), places(batch, scores.shape[-1] - 1, k)
    seen = min(1.0, int((batch.labels >= 0).sum()) / int(size.sum())) if thinned else 0.0
    return ll.lml_loss(rows, ll.label_lists(batch.labels), size, observed=seen, reduction="sum")


def truncated(scores: Tensor, batch: Batch, k: int) -> Tensor:
    return ll.truncated_entropy_loss(by_image(scores, batch), ll.label_lists(batch.labels), k, reduction="sum")


def binary(scores: Tensor, batch: Batch) -> Tensor:
    return ll.binary_loss(by_image(scores, batch), ll.label_lists(batch.labels), reduction="sum")


def image_softmax(scores: Tensor, batch: Batch) -> Tensor:
    count = (batch.labels >= 0).sum(-1)
    return (
        count * ll.multihot_softmax_loss(by_image(scores, batch), ll.label_lists(batch.labels), reduction="none")
    ).sum()


def pair_softmax(scores: Tensor, batch: Batch) -> Tensor:
    """One predicate a pair or none, as in Neural Motifs; of several, one is drawn each time."""
    return F.cross_entropy(scores, batch.one_each, reduction="sum")


LOSSES: dict[str, Callable[[Tensor, Batch], Tensor]] = {
    SOFTMAX: pair_softmax,
    "binary": binary,
    "softmax per image": image_softmax,
    **{f"truncated entropy {k}": functools.partial(truncated, k=k) for k in CUTS},
    **{f"LML {k}": functools.partial(lml, k=k) for k in CUTS},
    **{f"LML {k} thinned": functools.partial(lml, k=k, thinned=True) for k in CUTS},
}


def relation_scores(scores: Tensor) -> Tensor:
    """Rank all predicates of all pairs by their scores: what the losses over an image train."""
    return scores[:, :-1]


def pair_probabilities(scores: Tensor) -> Tensor:
    """Rank by the softmax of each pair with "no relation"."""
    return scores.softmax(-1)[:, :-1]


def on(device: str, batch: Batch) -> Batch:
    """Move a batch; the offsets stay, as they size what comes next."""
    return Batch(*(t if name == "ptr" else t.to(device) for name, t in batch._asdict().items()))


def prior(relations: np.ndarray, pairs: np.ndarray) -> Tensor:
    """Return log-frequencies of the predicates and of "no relation", as Neural Motifs starts from."""
    counts = np.concatenate([relations, pairs[..., None] + 1], -1)
    return torch.from_numpy(np.log(counts / counts.sum(-1, keepdims=True) + 1e-3))


def network_for(graphs: Graphs, images: np.ndarray, arguments: Any) -> RelationNetwork:
    """Return a network that starts from the frequencies of the images."""
    network = RelationNetwork(
        torch.from_numpy(graphs.boxes).to(arguments.device),
        torch.from_numpy(graphs.labels).to(arguments.device),
        prior(*data.frequencies(graphs, images)),
        graphs.vectors,
        hidden=arguments.hidden,
        width=arguments.hidden // 2,
        dropout=arguments.dropout,
    )
    return network.to(arguments.device)


def train(graphs: Graphs, images: np.ndarray, setting: dict[str, Any], arguments: Any) -> RelationNetwork:
    """Train one network on the images of a list."""
    torch.manual_seed(setting["seed"])
    rng = np.random.default_rng(setting["seed"])
    device = arguments.device
    network = network_for(graphs, images, arguments)
    parameters = list(network.parameters())
    optimiser = torch.optim.AdamW(parameters, setting["lr"], weight_decay=arguments.weight_decay)
    per_epoch = -(-len(images) // arguments.batch)
    steps = setting["epochs"] * per_epoch
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, setting["lr"], total_steps=steps + 1, pct_start=0.1)
    loss_of = LOSSES[setting["loss"]]
    network.train()
    for _ in range(setting["epochs"]):
        for part in np.array_split(rng.permutation(images), per_epoch):
            batch = on(device, data.batch_of(graphs, part, rng, arguments.most_pairs))
            loss = loss_of(network(batch), batch) / max(1, batch.labels.shape[0])
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 5.0)
            optimiser.step()
            schedule.step()
    return network.eval()


@torch.no_grad()
def measure(
    graphs: Graphs,
    images: np.ndarray,
    seen: np.ndarray,
    score: Callable[[Batch], Tensor],
    rankings: dict[str, Callable[[Tensor], Tensor]],
    device: str,
) -> dict[str, float]:
    """Return recall, mean recall and zero-shot recall with one relation per pair (R) or any number (uR)."""
    found: dict[tuple[str, str], list[Tensor]] = {way: [] for way in itertools.product(rankings, MODES)}
    for part in data.chunks(graphs, images, 100_000):
        batch = on(device, data.batch_of(graphs, part, np.random.default_rng(0)))
        scores = score(batch)
        for (ranking, mode), parts in found.items():
            ranked = rankings[ranking](scores)
            parts.append(ll.decode_graph(ranked, batch.pairs, max(CUTS), constrained=mode == "", ptr=batch.ptr).index)
    boxes, labels = torch.from_numpy(graphs.boxes).to(device), torch.from_numpy(graphs.labels).to(device)
    target = torch.from_numpy(graphs.padded_relations(images)).to(device)
    known = torch.from_numpy(np.unique(seen, axis=0)).to(device)
    numbers: dict[str, float] = {}
    for (ranking, mode), parts in found.items():
        index = torch.cat(parts)
        values = {
            "R": ll.graph_recall_at_k(index, target, CUTS, boxes=boxes, labels=labels),
            "mR": ll.graph_mean_recall_at_k(
                index, target, CUTS, boxes=boxes, labels=labels, n_predicates=graphs.n_predicates
            ),
            "zR": ll.graph_zero_shot_recall_at_k(index, target, CUTS, boxes=boxes, labels=labels, seen=known),
        }
        for name, value in values.items():
            for cut, v in zip(CUTS, value.tolist(), strict=True):
                numbers[f"{ranking}{mode}{name}@{cut}"] = round(v, 6)
    return numbers


def frequency(graphs: Graphs, images: np.ndarray, device: str) -> Callable[[Batch], Tensor]:
    """Return the frequency baseline of Neural Motifs: the share of a predicate among the pairs of two classes."""
    relations, pairs = data.frequencies(graphs, images)
    share = torch.from_numpy(relations / (relations.sum(-1) + pairs + 1)[..., None]).to(device)
    labels = torch.from_numpy(graphs.labels).to(device)

    def score(batch: Batch) -> Tensor:
        found = share[tuple(labels[batch.pairs].unbind(-1))]
        return torch.where(found.amax(-1, keepdim=True) > 0, found, -torch.inf)

    return score


def parts(graphs: Graphs, part: str, held_out: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the images to train and to measure on; the first of the training images are held out for choices."""
    images = graphs.images(test=False)
    return (images[held_out:], images[:held_out]) if part == "valid" else (images, graphs.images(test=True))


@functools.lru_cache(maxsize=1)
def loaded(folder: Path | None) -> Graphs:
    return data.tiny() if folder is None else data.load(folder)


def work(job: tuple[dict[str, Any], Any]) -> dict[str, Any]:
    """Train and measure one setting."""
    setting, arguments = job
    if arguments.workers > 1:
        torch.set_num_threads(1)
    start = time.time()
    graphs = loaded(None if arguments.smoke else arguments.data)
    images, held = parts(graphs, setting["part"], arguments.held_out)
    if setting["loss"] == FREQUENCY:
        score, rankings = frequency(graphs, images, arguments.device), {"": lambda scores: scores}
    else:
        score = train(graphs, images, setting, arguments)
        rankings = {"": pair_probabilities if setting["loss"] == SOFTMAX else relation_scores}
        if setting["part"] == "test":
            rankings["pair softmax "] = pair_probabilities
    found = measure(graphs, held, graphs.triplets(images), score, rankings, arguments.device)
    return setting | found | {"seconds": round(time.time() - start, 2)}


def run(settings: Sequence[dict[str, Any]], arguments: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of settings as they are done, here or from processes that share the device."""
    jobs = [(setting, arguments) for setting in settings]
    if arguments.workers == 1 or not jobs:
        yield from map(work, jobs)
        return
    with multiprocessing.get_context("spawn").Pool(arguments.workers) as pool:
        yield from pool.imap_unordered(work, jobs)


def quality(row: common.Row) -> float:
    """What settings are chosen by: the mean of the six recalls."""
    return float(np.mean([row[f"{mode}R@{cut}"] for mode in MODES for cut in CUTS]))


def chosen(rows: Iterable[common.Row], data: str, loss: str) -> dict[str, Any]:
    """Return the settings that did best on the held-out images."""
    rows = [r for r in rows if (r["data"], r["part"], r["loss"]) == (data, "valid", loss)]
    best = max(rows, key=quality)
    return {"lr": best["lr"], "epochs": best["epochs"]}


def final(rows: Sequence[common.Row], data: str) -> list[common.Row]:
    """Return the rows of the test images with the settings that are chosen now, should the grid have grown."""
    test = [row for row in rows if row["data"] == data and row["part"] == "test"]
    return [row for row in test if row["loss"] == FREQUENCY or row.items() >= chosen(rows, data, row["loss"]).items()]


def add_missing(results: common.Results, settings: list[dict[str, Any]], arguments: Any) -> None:
    missing = [s for s in settings if results.missing(**s)]
    for number, row in enumerate(run(missing, arguments), start=1):
        results.add(**row)
        named = [f"{name} {row[name]}" for name in ("part", "loss", "lr", "epochs", "seed", "seconds") if name in row]
        print(f"{number}/{len(missing)}", *named, f"R@50 {row['R@50']:.4f} uR@50 {row['uR@50']:.4f}", flush=True)


def columns(rows: Iterable[common.Row], names: Sequence[str], heads: Sequence[str]) -> list[common.Row]:
    """Turn the named numbers of each row into rows of one number."""
    return [
        {"loss": row["loss"], "column": head, "value": row[name]}
        for head, name in zip(heads, names, strict=True)
        for row in rows
        if name in row
    ]


def in_order(rows: Iterable[common.Row]) -> list[common.Row]:
    order = {loss: place for place, loss in enumerate([FREQUENCY, *LOSSES])}
    return sorted(rows, key=lambda row: order[row["loss"]])


def tables(rows: Sequence[common.Row]) -> dict[str, str]:
    from experiments.scene_graphs import curves  # which imports this file

    made = {"figure": "![Recall above the softmax per pair](results/recall.png)"}
    if curves.RESULTS.exists():
        made |= curves.tables(common.Results(curves.RESULTS).rows)
    rows = in_order(rows)
    for name in dict.fromkeys(row["data"] for row in rows):
        test = final(rows, name)
        tuned = [row for row in rows if row["data"] == name and row["part"] == "valid"]
        heads = [f"{mode} {cut}" for mode in MODES.values() for cut in CUTS]
        for metric, title in METRICS.items():
            names = [f"{mode}{metric}@{cut}" for mode in MODES for cut in CUTS]
            made[f"{name} {title}"] = common.table(columns(test, names, heads), "loss", "column", "value", digits=1)
        names = [f"pair softmax {mode}R@{cut}" for mode in MODES for cut in CUTS]
        made[f"{name} pair softmax"] = common.table(columns(test, names, heads), "loss", "column", "value", digits=1)
        best = [
            max((r for r in tuned if r["loss"] == loss), key=quality)
            for loss in dict.fromkeys(r["loss"] for r in tuned)
        ]
        names = [f"{mode}R@{cut}" for mode in MODES for cut in CUTS]
        held = columns(
            [{**r, "loss": f"{r['loss']} (lr {r['lr']:g}, {r['epochs']} epochs)"} for r in best], names, heads
        )
        made[f"{name} held out"] = common.table(held, "loss", "column", "value", digits=1)
    return made


def figure(rows: Sequence[common.Row], path: Path) -> None:
    """Draw the gain over the softmax of a pair, of each loss and each cut, for the first data set."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = final(in_order(rows), rows[0]["data"])
    losses = [loss for loss in dict.fromkeys(r["loss"] for r in rows) if loss not in (FREQUENCY, SOFTMAX)]
    drawn, axes = plt.subplots(1, 2, figsize=(10, 0.9 + 0.35 * len(losses)), sharey=True, layout="constrained")
    for axis, (mode, title) in zip(axes, MODES.items(), strict=True):
        for number, cut in enumerate(CUTS):
            name = f"{mode}R@{cut}"
            of = {loss: np.array([100 * r[name] for r in rows if r["loss"] == loss]) for loss in [SOFTMAX, *losses]}
            gain = [of[loss].mean() - of[SOFTMAX].mean() for loss in losses]
            spread = [of[loss].std(ddof=1) if len(of[loss]) > 1 else 0.0 for loss in losses]
            height = np.arange(len(losses)) + 0.2 * (number - 1)
            axis.errorbar(gain, height, xerr=spread, fmt="o", markersize=4, capsize=2, label=f"R@{cut}")
        axis.axvline(0, color="0.5", linewidth=1)
        axis.set(title=title, xlabel="recall, points above the softmax per pair")
    axes[0].set_yticks(range(len(losses)), losses)
    axes[0].invert_yaxis()
    drawn.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper")
    drawn.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> None:
    made = common.parser(__doc__, HERE / "results" / "results.json")
    made.add_argument("--name", default="vrd", help="what the results call the data")
    made.add_argument("--losses", nargs="+", default=list(LOSSES), choices=list(LOSSES))
    made.add_argument("--lr", nargs="+", type=float, default=[1e-3, 3e-3])
    made.add_argument("--epochs", nargs="+", type=int, default=[5, 10, 20])
    made.add_argument("--batch", type=int, default=64)
    made.add_argument("--hidden", type=int, default=256)
    made.add_argument("--dropout", type=float, default=0.1)
    made.add_argument("--weight-decay", type=float, default=0.01)
    made.add_argument("--held-out", type=int, default=500, help="training images to choose settings on")
    made.add_argument("--most-pairs", type=int, default=1024, help="pairs of one image in training")
    made.add_argument("--workers", type=int, default=1, help="networks trained at the same time")
    arguments = made.parse_args(argv)
    if common.finish(arguments, tables):
        figure(common.Results(arguments.out).rows, arguments.out.parent / "recall.png")
        return
    if arguments.smoke:
        arguments.name, arguments.seeds, arguments.held_out, arguments.hidden = "tiny", 1, 10, 16
        arguments.lr, arguments.epochs, arguments.most_pairs = [1e-3], [1], 12
    elif arguments.data is None:
        made.error("--data is needed: the folder of vrd.npz or VG-SGG.h5 (or --smoke)")
    results = common.Results(arguments.out)
    grid = list(itertools.product(arguments.losses, arguments.lr, arguments.epochs))
    valid = {"data": arguments.name, "part": "valid", "seed": 0}
    add_missing(results, [valid | {"loss": loss, "lr": lr, "epochs": epochs} for loss, lr, epochs in grid], arguments)
    test = {"data": arguments.name, "part": "test"}
    finals = [test | {"loss": FREQUENCY, "seed": 0}]
    for seed, loss in itertools.product(range(arguments.seeds), arguments.losses):
        finals.append(test | {"loss": loss, "seed": seed} | chosen(results.rows, arguments.name, loss))
    add_missing(results, finals, arguments)


if __name__ == "__main__":
    main()
