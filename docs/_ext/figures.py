"""Draw the figures of the guides from the guides' own code: what is shown is what the page computes.

``python docs/_ext/figures.py [--readme]``: with ``--readme``, also the pictures of README.md, which are committed.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import speed_table
import torch
from matplotlib.figure import Figure

import lastlayer as ll

DOCS = Path(__file__).parents[1]
OUT = DOCS / "_static" / "figures"
BLUE, ORANGE, GREY, GREEN = "#2563eb", "#ea580c", "#64748b", "#059669"
doctest.register_optionflag("NUMBER")  # pytest's


def run(page: Path) -> dict[str, Any]:
    """Run the examples of a page and return its names."""
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for example in doctest.DocTestParser().get_examples(page.read_text("utf-8")):
            exec(compile(example.source, str(page), "single"), names)
    return names


def tags(page: dict[str, Any]) -> Figure:
    figure = reliability(page, (8, 3.7))
    figure.suptitle("Tags of unseen texts, all labels known", fontsize=11)
    return figure


def reliability(page: dict[str, Any], size: tuple[float, float]) -> Figure:
    figure, panels = plt.subplots(1, 2, figsize=size, sharey=True)
    for axes, (name, probability), colour in zip(panels, page["p"].items(), (GREY, BLUE), strict=True):
        bins = ll.metrics.reliability_bins(probability, page["truth"])
        kept = bins.pairs >= 30
        axes.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle="--")
        axes.plot(bins.confidence[kept], bins.accuracy[kept], "o-", color=colour)
        axes.set(title=name, xlabel="probability", xlim=(0, 1), ylim=(0, 1))
    panels[0].set_ylabel("share that applies")
    return figure


def calibration(page: dict[str, Any]) -> Figure:
    """The two diagrams of the guide, with the names that users know and the errors that the guide prints."""
    figure = reliability(page, (6.4, 3.3))
    for axes, probability, name in zip(figure.axes, page["p"].values(), ("BCE", "lml_loss"), strict=True):
        error = ll.metrics.label_calibration_error(probability, page["truth"], k=6)
        recall = ll.recall_at_k(probability, page["truth"], 6)
        axes.set_title(f"{name}\ncalibration error {error:.2f}, recall at 6 {recall:.2f}", fontsize=10)
    return figure


def images(page: dict[str, Any]) -> Figure:
    figure = plt.figure(figsize=(9, 3.9))
    left, right = figure.subfigures(1, 2, width_ratios=(1.05, 1))
    axes = left.subplots()
    epochs = 1 + 3 * torch.arange(len(page["lml"]))
    for name, curve, colour in (("cross-entropy", page["entropy"], GREY), ("LML, k = 5", page["lml"], BLUE)):
        axes.plot(epochs, curve[:, 1], color=colour, label=f"{name}: {curve[-3:, 1].mean():.2f} at the end")
    axes.set(xlabel="epoch", ylabel="top-5 accuracy", title="clean labels, unseen images", ylim=(0.5, 0.85))
    axes.legend()
    for i, axes in enumerate(right.subplots(3, 2).flat):
        best = ll.decode_top_k(page["net_lml"](page["x_test"][i : i + 1]), 5).index[0].tolist()
        axes.imshow(page["x_test"][i, 0], cmap="gray_r")
        truth = int(page["truth"][i])
        answers = "  ".join(f"{label:02d}" for label in best)
        axes.set_title(f"{truth:02d}?  {answers}", fontsize=8, color=BLUE if truth in best else ORANGE)
        axes.set(xticks=[], yticks=[])
    return figure


def relations(page: dict[str, Any]) -> Figure:
    figure, panels = plt.subplots(1, 2, figsize=(9, 4.4))
    image, pairs, colours = 0, page["pairs"], plt.get_cmap("tab10").colors
    truth = {tuple(t) for t in page["target"][image].tolist() if t[0] >= 0}
    things = page["things"][image]
    for axes, (name, scores) in zip(panels, page["scores"].items(), strict=True):
        found = ll.decode_graph(scores[image], pairs, len(truth), constrained=False).index.tolist()
        right = [tuple(t) for t in found if tuple(t) in truth]
        for j, relation in enumerate(sorted(truth)):
            a, b = things[relation[0], :2], things[relation[1], :2]
            arrow = {
                "arrowstyle": "-|>",
                "connectionstyle": f"arc3,rad={0.12 + 0.05 * (j % 3)}",
                "shrinkA": 9,
                "shrinkB": 9,
            }
            style = {"color": BLUE, "alpha": 0.7} if relation in right else {"color": ORANGE, "linestyle": "--"}
            axes.annotate("", b.tolist(), a.tolist(), arrowprops=arrow | style)
        for number, thing in enumerate(things):
            kind = int(thing[3:].argmax())
            axes.scatter(*thing[:2], s=2600 * float(thing[2]), color=colours[kind], zorder=3, edgecolor="white")
            axes.text(*thing[:2], str(number), ha="center", va="center", color="white", zorder=4, fontsize=9)
        axes.set(
            title=f"{name}: {len(right)} of {len(truth)}", xticks=[], yticks=[], xlim=(-0.1, 1.1), ylim=(1.1, -0.1)
        )
    figure.suptitle("True relations of a scene: found (blue), not among the best (orange, dashed)", fontsize=11)
    return figure


def gate(page: dict[str, Any]) -> Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
    k, temperature, gates = zip(*page["history"], strict=True)
    left.plot(k, color=BLUE, label="k, learned")
    left.plot(temperature, color=ORANGE, label="temperature, annealed")
    left.axhline(3, color="black", linewidth=0.8, linestyle="--")
    left.set(xlabel="step", ylim=(0, 6.2))
    left.legend()
    needed = set(page["x_test"][0, :, 0].topk(3).indices.tolist())
    for token, line in enumerate(torch.stack(gates).T):
        right.plot(line, color=BLUE if token in needed else GREY, linewidth=1.6 if token in needed else 0.8)
    right.set(xlabel="step", ylabel="gate", title="the twelve gates of one input (blue: the three needed)")
    right.title.set_size(10)
    return figure


def million(page: dict[str, Any]) -> Figure:
    from lastlayer.capacity import Problem, plan

    figure, axes = plt.subplots(figsize=(6.4, 3.8))
    labels = [10**e * m for e in (4, 5, 6) for m in (1, 2, 5)] + [10**7]
    for devices, colour in ((1, BLUE), (8, GREEN)):
        found = [plan(Problem(n, 512, 1024, devices, dtype="float32")) for n in labels]
        held = [f.memory_bytes - f.activation_bytes + f.materialised_bytes for f in found]
        name = f"{devices} device{'s' if devices > 1 else ''}"
        axes.loglog(labels, [f.memory_bytes / 1e9 for f in found], color=colour, label=f"{name}, in blocks")
        axes.loglog(labels, [h / 1e9 for h in held], color=colour, linestyle="--", label=f"{name}, logits held")
    axes.set(xlabel="labels", ylabel="GB a device", title="512 features, 1,024 rows, float32, Adam (calculated)")
    axes.title.set_size(10)
    axes.legend()
    return figure


GUIDES: dict[str, Callable[[dict[str, Any]], Figure]] = {
    "tags": tags,
    "images": images,
    "relations": relations,
    "gate": gate,
    "million": million,
}


def speed(results: Path = speed_table.RESULTS) -> Figure:
    """Time divided by that of torch's operation against the number of classes: a panel per machine, from its file."""
    machines = {}
    for path in sorted(results.glob("*.json")):
        data = json.loads(path.read_text("utf-8"))
        rows = speed_table.rows_of(data)
        if kept := [row for row in rows if speed_table.CORE.match(row["name"])]:
            machines[f"{data['machine']['device']} ({path.name})"] = kept
    figure, panels = plt.subplots(1, len(machines), figsize=(9, 3.9), squeeze=False, sharey=True)
    for axes, (name, rows) in zip(panels[0], machines.items(), strict=True):
        lines: dict[tuple[str, str, str], list[tuple[int, float]]] = {}
        for row in rows:
            lines.setdefault((row["name"].split("/")[0], row["dtype"], row["against"]), []).append(
                (row["n"], row["ratio"])
            )
        for (function, dtype, against), points in lines.items():
            colour = {"lml": BLUE, "lml_backward": GREEN, "lml_loss": ORANGE}[function]
            half = dtype != "float32"
            text = f"{function.replace('_backward', ', backward')} / {against.replace('_', '-')}"
            style = {"linestyle": "--" if half else "-", "marker": "s" if half else "o", "markersize": 4}
            axes.plot(*zip(*sorted(points), strict=True), color=colour, label=f"{text}, {dtype}", **style)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set(xscale="log", yscale="log", xlabel="number of classes n", title=name)
        axes.set_yticks([0.1, 0.2, 0.5, 1, 2, 4], ["0.1", "0.2", "0.5", "1", "2", "4"])
        axes.title.set_size(10)
        axes.grid(axis="y", color="#e2e8f0")
        axes.minorticks_off()
    panels[0][0].set_ylabel("time / torch's time")
    keys = {text: line for axes in panels[0] for line, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(keys.values(), keys.keys(), ncols=2, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 0.0))
    return figure


def readme() -> Figure:
    """Sigmoid, softmax and LML of one row, for three k."""
    x = torch.tensor([3.0, 2.0, 1.5, 0.0, -2.0])
    answers = {"sigmoid": x.sigmoid(), "softmax": x.softmax(-1)} | {f"lml, k = {k}": ll.lml(x, k) for k in (1, 2, 3)}
    figure, panels = plt.subplots(1, 5, figsize=(8.4, 2.0), sharey=True)
    for axes, (name, y) in zip(panels, answers.items(), strict=True):
        axes.bar(range(5), y, color=BLUE if name.startswith("lml") else GREY, width=0.7)
        axes.set(ylim=(0, 1), xticks=[], yticks=[0, 1])
        axes.set_title(name, fontsize=10)
        axes.set_xlabel(f"sum {y.sum():.2f}", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not figure.subfigs:
        figure.tight_layout()
    part = path.with_stem(f"{path.stem}.{os.getpid()}")  # another build may be reading
    figure.savefig(part, dpi=130, bbox_inches="tight", metadata={"Date": None} if path.suffix == ".svg" else None)
    part.replace(path)
    plt.close(figure)


def stale(path: Path, *sources: Path) -> bool:
    return not path.exists() or path.stat().st_mtime < max(source.stat().st_mtime for source in sources)


def draw_all() -> None:
    """Draw what is missing or older than its source."""
    paper = DOCS.parent / "examples" / "projection.py"
    if stale(OUT / "entropies.png", paper):
        runpy.run_path(str(paper))["save"](OUT)
    if stale(OUT / "speed.png", *speed_table.RESULTS.glob("*.json"), Path(__file__)):
        save(speed(), OUT / "speed.png")
    for name, draw in GUIDES.items():
        page, path = DOCS / "guides" / f"{name}.md", OUT / f"guide_{name}.png"
        if stale(path, page, Path(__file__)):
            save(draw(run(page)), path)


if __name__ == "__main__":
    draw_all()
    if "--readme" in sys.argv:
        with plt.rc_context({"svg.hashsalt": "lastlayer", "svg.fonttype": "none", "font.family": "sans-serif"}):
            save(readme(), DOCS / "_static" / "readme" / "projections.svg")
            save(calibration(run(DOCS / "guides" / "tags.md")), DOCS / "_static" / "readme" / "calibration.svg")
