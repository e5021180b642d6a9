"""Draw the figures of the guides from the guides' own code: what is shown is what the page computes.

Each is drawn four times, for light and dark pages and for wide screens and phones (``looks.py``).
``python docs/_ext/figures.py [--readme]``: with ``--readme``, also the pictures of README.md, which are committed.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.colors
import matplotlib.pyplot as plt
import numpy as np
import speed_table
import torch
from looks import LOOKS, Look, looking, paths, save, save_all
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import lastlayer as ll

DOCS = Path(__file__).parents[1]
doctest.register_optionflag("NUMBER")  # pytest's


def run(page: Path) -> dict[str, Any]:
    """Run the examples of a page and return its names."""
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for example in doctest.DocTestParser().get_examples(page.read_text("utf-8")):
            exec(compile(example.source, str(page), "single"), names)
    return names


def tags(page: dict[str, Any], look: Look) -> Figure:
    figure = reliability(page, look, (8, 3.7))
    figure.suptitle("Tags of unseen texts, all labels known", fontsize=11)
    return figure


def reliability(page: dict[str, Any], look: Look, size: tuple[float, float]) -> Figure:
    figure, panels = look.panels(2, size, (4.2, 6.6))
    for axes, (name, probability), colour in zip(panels, page["p"].items(), (look.grey, look.blue), strict=True):
        bins = ll.metrics.reliability_bins(probability, page["truth"])
        kept = bins.pairs >= 30
        axes.plot([0, 1], [0, 1], color=look.ink, linewidth=0.8, linestyle="--")
        axes.plot(bins.confidence[kept], bins.accuracy[kept], "o-", color=colour)
        axes.set(title=name, xlabel="probability", xlim=(0, 1), ylim=(0, 1))
        if look.phone or axes is panels[0]:
            axes.set_ylabel("share that applies")
    return figure


def calibration(page: dict[str, Any], look: Look) -> Figure:
    """The two diagrams of the guide, with the names that users know and the errors that the guide prints."""
    figure = reliability(page, look, (6.4, 3.3))
    for axes, probability, name in zip(figure.axes, page["p"].values(), ("BCE", "lml_loss"), strict=True):
        error = ll.metrics.label_calibration_error(probability, page["truth"], k=6)
        recall = ll.recall_at_k(probability, page["truth"], 6)
        axes.set_title(f"{name}\ncalibration error {error:.2f}, recall at 6 {recall:.2f}", fontsize=10)
    return figure


def images(page: dict[str, Any], look: Look) -> Figure:
    figure = plt.figure(figsize=(4.2, 7.6) if look.phone else (9, 4.2))
    shape, ratios = ((2, 1), {"height_ratios": (1, 1.2)}) if look.phone else ((1, 2), {"width_ratios": (1.05, 1)})
    curves, answers = figure.subfigures(*shape, **ratios)
    curves.set_facecolor("none")
    answers.set_facecolor("none")
    axes = curves.subplots()
    curves.subplots_adjust(left=0.15, bottom=0.16)
    epochs = 1 + 3 * torch.arange(len(page["lml"]))
    for name, curve, colour in (("cross-entropy", page["entropy"], look.grey), ("LML, k = 5", page["lml"], look.blue)):
        axes.plot(epochs, curve[:, 1], color=colour, label=f"{name}: {curve[-3:, 1].mean():.2f} at the end")
    axes.set(xlabel="epoch", ylabel="top-5 accuracy", title="Clean labels, unseen images", ylim=(0.5, 0.85))
    axes.legend()
    panels = answers.subplots(3, 2)
    answers.subplots_adjust(left=0.04, right=0.96, bottom=0.03, top=0.8, hspace=0.55, wspace=0.15)
    answers.suptitle("The five answers of LML to an image, best first;\nblue: the number is among them", fontsize=10)
    for i, axes in enumerate(panels.flat):
        best = ll.decode_top_k(page["net_lml"](page["x_test"][i : i + 1]), 5).index[0].tolist()
        axes.imshow(page["x_test"][i, 0], cmap="gray_r")
        text = " ".join(f"{label:02d}" for label in best)
        axes.set_title(text, fontsize=9, color=look.blue if int(page["truth"][i]) in best else look.orange)
        axes.set(xticks=[], yticks=[])
    return figure


def relations(page: dict[str, Any], look: Look) -> Figure:
    """A test scene whose relations can be read: few, with room for their names."""
    figure, panels = look.panels(2, (10, 5.4), (4.4, 9.4))
    few = page["true_test"].sum((1, 2)).argsort(stable=True)[:40].tolist()
    image = max(few, key=lambda image: room(page, image))
    truth = {tuple(t) for t in page["target"][image].tolist() if t[0] >= 0}
    things, colours = page["things"][image].numpy(), (look.blue, look.orange, look.green, look.grey)
    for axes, (name, scores) in zip(panels, page["scores"].items(), strict=True):
        best = ll.decode_graph(scores[image], page["pairs"], len(truth), constrained=False).index.tolist()
        right = truth & {tuple(t) for t in best}
        for pair in sorted({relation[:2] for relation in truth}):
            names = [(page["predicates"][r[2]], r in right) for r in sorted(truth) if r[:2] == pair]
            edge(axes, look, things[pair[0], :2], things[pair[1], :2], names)
        for thing in things:
            kind = int(thing[3:].argmax())
            style = {"color": colours[kind], "edgecolor": look.ink, "linewidth": 0.8}
            axes.scatter(*thing[:2], s=2200 * float(thing[2]), zorder=3, marker="osD^"[kind], **style)
        axes.set(title=f"{name}: {len(right)} of {len(truth)} relations", xticks=[], yticks=[])
        low, high = things[:, :2].min(0) - 0.14, things[:, :2].max(0) + 0.14
        axes.set(xlim=(low[0], high[0]), ylim=(high[1], low[1]))
    keys = [
        Line2D([], [], color=look.ink, label=f"among the best {len(truth)}"),
        Line2D([], [], color=look.orange, linestyle="--", label="not among them"),
        *(
            Line2D([], [], color=colour, marker=mark, linestyle="", label=f"thing of kind {n}")
            for n, (mark, colour) in enumerate(zip("osD^", colours, strict=True), start=1)
        ),
    ]
    figure.legend(handles=keys, ncols=2 if look.phone else 6, loc="upper center", bbox_to_anchor=(0.5, 0.01))
    return figure


BEND = 0.16  # of an arrow, so that those of both directions lie apart


def room(page: dict[str, Any], image: int) -> float:
    """How far names and things are from what is next to them, on average; a name is wider than high."""
    places = page["things"][image, :, :2].numpy()
    a, b = (places[page["pairs"][page["true_test"][image].any(-1)][:, end].numpy()] for end in (0, 1))
    points = np.concatenate([places, (a + b) / 2 + BEND / 2 * (b - a)[:, ::-1] * (-1, 1)]) * (0.4, 1)
    gaps = np.linalg.norm(points[:, None] - points, axis=-1) + 9 * np.eye(len(points))
    return float(gaps.min(1).clip(max=0.1).mean())


def edge(axes: Any, look: Look, a: np.ndarray, b: np.ndarray, names: list[tuple[str, bool]]) -> None:
    """An arrow from one thing to another, with its predicates written beside its middle."""
    missed = not all(hit for _, hit in names)
    style = {"color": look.orange, "linestyle": "--"} if missed else {"color": look.ink, "alpha": 0.55}
    arrow = {"arrowstyle": "-|>", "connectionstyle": f"arc3,rad={BEND}", "shrinkA": 10, "shrinkB": 10, **style}
    axes.annotate("", b, a, arrowprops=arrow)
    middle = (a + b) / 2 + BEND / 2 * (b - a)[::-1] * (-1, 1)
    for line, (name, hit) in enumerate(names):
        offset = (0, 10 * ((len(names) - 1) / 2 - line))
        box = {"boxstyle": "round,pad=0.1", "facecolor": look.paper, "edgecolor": "none", "alpha": 0.85}
        place = {
            "xytext": offset,
            "textcoords": "offset points",
            "ha": "center",
            "va": "center",
            "zorder": 5 if hit else 6,
        }
        axes.annotate(
            name, middle, fontsize=8.5 if look.phone else 8, color=look.ink if hit else look.orange, bbox=box, **place
        )


def gate(page: dict[str, Any], look: Look) -> Figure:
    figure, (left, right) = look.panels(2, (9, 3.6), (4.2, 6.4))
    k, temperature, gates = zip(*page["history"], strict=True)
    left.plot(k, color=look.blue, label="k, learned")
    left.plot(temperature, color=look.orange, label="temperature, annealed")
    left.axhline(3, color=look.ink, linewidth=0.8, linestyle="--")
    left.set(xlabel="step", ylim=(0, 6.2), title="k and the temperature")
    left.legend()
    needed = set(page["x_test"][0, :, 0].topk(3).indices.tolist())
    for token, line in enumerate(torch.stack(gates).T):
        style = {"color": look.blue, "linewidth": 1.6} if token in needed else {"color": look.grey, "linewidth": 0.8}
        first = token in (min(needed), min({*range(12)} - needed))
        right.plot(line, label=("the three needed" if token in needed else "others") if first else None, **style)
    right.set(xlabel="step", ylabel="gate", title="The twelve gates of one input")
    right.legend(loc="center right")
    return figure


def encoders(page: dict[str, Any], look: Look) -> Figure:
    figure, (axes,) = look.panels(1, (7, 2.2), (4.2, 2.4))
    found = page["found"]
    bars = axes.barh(list(found), list(found.values()), color=[look.grey, look.orange, look.blue], height=0.6)
    axes.bar_label(bars, [f"{value:.2f}" for value in found.values()], padding=4)
    axes.set(xlim=(0, 1.12), xlabel="recall at 3 of unseen texts")
    axes.invert_yaxis()
    return figure


def decisions(page: dict[str, Any], look: Look) -> Figure:
    figure, (folds, promise, why, curve) = look.panels(4, (9, 6.2), (4.2, 11.5), columns=2)
    order = np.argsort(-page["deviation"]["at random"])
    for (name, values), colour in zip(page["deviation"].items(), (look.grey, look.blue), strict=True):
        folds.plot(100 * values[order], "o", color=colour, markersize=3, label=name)
    folds.set(title="Labels in five folds", xlabel="30 labels", ylabel="largest deviation, points", xticks=[])
    folds.legend()
    wanted, kept, size = zip(*page["promised"], strict=True)
    promise.plot([0.45, 1], [0.45, 1], color=look.ink, linewidth=0.8, linestyle="--")
    promise.plot(wanted, kept, "o", color=look.blue)
    for x, y, many in zip(wanted, kept, size, strict=True):
        promise.annotate(f"{many:.1f}", (x, y), (-4, 5), textcoords="offset points", ha="right", fontsize=9)
    promise.set(title="Recall, and labels per row", xlabel="promised", ylabel="of the test rows")
    reason = page["reasons"][0]
    said = [*reason.speaks_for, *reason.against]
    why.barh(
        [word for word, _ in said], [v for _, v in said], color=[look.blue if v > 0 else look.grey for _, v in said]
    )
    why.invert_yaxis()
    why.set(title=f"Why {reason.label}", xlabel="adds to the logit")
    held = page["curve"]
    curve.plot(held.recall, held.precision, color=look.blue)
    curve.set(title="All labels", xlabel="recall", ylabel="precision", xlim=(0, 1.02), ylim=(0, 1.02))
    return figure


def million(page: dict[str, Any], look: Look) -> Figure:
    from lastlayer.capacity import Problem, plan

    figure, (axes,) = look.panels(1, (6.4, 3.8), (4.2, 3.8))
    labels = [10**e * m for e in (4, 5, 6) for m in (1, 2, 5)] + [10**7]
    for devices, colour in ((1, look.blue), (8, look.green)):
        plans = [plan(Problem(n, 512, 1024, devices, dtype="float32")) for n in labels]
        held = [p.memory_bytes - p.activation_bytes + p.materialised_bytes for p in plans]
        name = f"{devices} device{'s' if devices > 1 else ''}"
        axes.loglog(labels, [p.memory_bytes / 1e9 for p in plans], color=colour, label=f"{name}, in blocks")
        axes.loglog(labels, [h / 1e9 for h in held], color=colour, linestyle="--", label=f"{name}, logits held")
    title = "512 features, 1,024 rows,\nfloat32, Adam (calculated)"
    axes.set(xlabel="labels", ylabel="GB per device", title=title if look.phone else title.replace("\n", " "))
    axes.legend()
    return figure


GUIDES: dict[str, Callable[[dict[str, Any], Look], Figure]] = {
    "tags": tags,
    "images": images,
    "relations": relations,
    "gate": gate,
    "encoders": encoders,
    "decisions": decisions,
    "million": million,
}


def speed(look: Look, results: Path = speed_table.RESULTS) -> Figure:
    """Time divided by that of torch's operation against the number of classes: a panel per machine, from its file."""
    machines = {}
    for path in sorted(results.glob("*.json")):
        data = json.loads(path.read_text("utf-8"))
        rows = speed_table.rows_of(data)
        if kept := [row for row in rows if speed_table.CORE.match(row["name"])]:
            machines[f"{data['machine']['device']} ({path.name})"] = kept
    figure, panels = look.panels(len(machines), (9, 3.9), (4.2, 3.4 * len(machines)))
    for axes, (name, rows) in zip(panels, machines.items(), strict=True):
        lines: dict[tuple[str, str, str], list[tuple[int, float]]] = {}
        for row in rows:
            lines.setdefault((row["name"].split("/")[0], row["dtype"], row["against"]), []).append(
                (row["n"], row["ratio"])
            )
        for (function, dtype, against), points in lines.items():
            colour = {"lml": look.blue, "lml_backward": look.green, "lml_loss": look.orange}[function]
            half = dtype != "float32"
            text = f"{function.replace('_backward', ', backward')} / {against.replace('_', '-')}"
            style = {"linestyle": "--" if half else "-", "marker": "s" if half else "o", "markersize": 4}
            axes.plot(*zip(*sorted(points), strict=True), color=colour, label=f"{text}, {dtype}", **style)
        axes.axhline(1, color=look.ink, linewidth=0.8)
        axes.set(xscale="log", yscale="log", xlabel="number of classes n", title=name, ylim=(0.1, 4))
        axes.set_yticks([0.1, 0.2, 0.5, 1, 2, 4], ["0.1", "0.2", "0.5", "1", "2", "4"])
        axes.grid(axis="y")
        axes.minorticks_off()
        axes.set_ylabel("time / torch's time")
    keys = {text: line for axes in panels for line, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    columns = 1 if look.phone else 2
    figure.legend(keys.values(), keys.keys(), ncols=columns, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 0.0))
    return figure


def projections(look: Look) -> Figure:
    """Sigmoid, softmax and LML of one row, for three k."""
    x = torch.tensor([3.0, 2.0, 1.5, 0.0, -2.0])
    answers = {"sigmoid": x.sigmoid(), "softmax": x.softmax(-1)} | {f"lml, k = {k}": ll.lml(x, k) for k in (1, 2, 3)}
    if look.phone:
        figure, grid = plt.subplots(2, 3, figsize=(4.2, 3.4), sharey=True)
        grid[0, 2].remove()
        panels = [grid[0, 0], grid[0, 1], *grid[1]]
    else:
        figure, panels = look.panels(5, (8.4, 2.0), (0, 0))
    for axes, (name, y) in zip(panels, answers.items(), strict=True):
        axes.bar(range(5), y, color=look.blue if name.startswith("lml") else look.grey, width=0.7)
        axes.set(ylim=(0, 1), xticks=[], yticks=[0, 1])
        axes.set_title(name, fontsize=10)
        axes.set_xlabel(f"sum {y.sum():.2f}", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def budgets(look: Look) -> Figure:
    """Weights, bounds, and a matrix row by row and in balance."""
    figure, panels = look.panels(4, (9.0, 2.6), (4.2, 9.0))
    x, place = torch.tensor([2.5, 1.5, 0.5, -0.5]), np.arange(4)
    cost = torch.tensor([4.0, 1.0, 2.0, 1.0])
    lower, upper = torch.tensor([0.0, 0.0, 0.0, 0.4]), torch.tensor([0.5, 1.0, 1.0, 1.0])
    answers = ll.lml(x, 3.0, weight=cost), ll.lml(x, 2.0, lower=lower, upper=upper)
    for axes, y in zip(panels, answers, strict=False):
        axes.bar(place - 0.2, ll.lml(x, 2.0), width=0.36, color=look.grey, label="lml, k = 2")
        axes.bar(place + 0.2, y, width=0.36, color=look.blue, label="weights" if axes is panels[0] else "bounds")
        axes.set(ylim=(0, 1.3), yticks=[0, 1])
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper right", fontsize=7, frameon=False)
    panels[0].set_xticks(place, [f"cost {c:g}" for c in cost], fontsize=7)
    panels[0].set_title(f"cost · y adds up to {(cost * answers[0]).sum():.0f}")
    panels[1].set_xticks(place, ["≤ 0.5", "", "", "≥ 0.4"], fontsize=8)
    panels[1].set_title("bounds per label")
    scores = torch.tensor([[3.0, 1.0, 0.0, -1.0], [2.5, 0.5, 0.0, 1.0], [2.0, 0.0, 1.0, -1.0], [3.0, 2.0, -1.0, 0.0]])
    tables = {"lml, row by row": ll.lml(scores, 1.0), "lml_balanced": ll.lml_balanced(scores, 1.0)}
    for axes, (name, y) in zip(panels[2:], tables.items(), strict=True):
        colours = matplotlib.colors.LinearSegmentedColormap.from_list("paper to blue", [look.paper, look.blue])
        axes.imshow(y, cmap=colours, vmin=0, vmax=1.2)
        for i, j in np.ndindex(4, 4):
            axes.text(j, i, f"{y[i, j]:.2f}", ha="center", va="center", fontsize=8, color=look.ink)
        axes.set_xticks(place, [f"Σ {total:.2f}" for total in y.sum(0)], fontsize=8)
        axes.set_yticks(place, ["Σ 1"] * 4, fontsize=8)
        axes.set_title(name)
    return figure


def stale(path: Path, *sources: Path) -> bool:
    return not path.exists() or path.stat().st_mtime < max(source.stat().st_mtime for source in sources)


def draw_all() -> None:
    """Draw what is missing or older than its source."""
    here, paper = Path(__file__), DOCS.parent / "examples" / "projection.py"
    if any(stale(path, paper, here) for path in paths("entropies")):
        for name, draw in runpy.run_path(str(paper))["FIGURES"].items():
            save_all(name, lambda look, draw=draw: draw(narrow=look.phone))
    if any(stale(path, *speed_table.RESULTS.glob("*.json"), here) for path in paths("speed")):
        save_all("speed", speed)
        save_all("projections", projections)
    if any(stale(path, here) for path in paths("budgets")):
        save_all("budgets", budgets)
    for name, draw in GUIDES.items():
        source = DOCS / "guides" / f"{name}.md"
        if any(stale(path, source, here) for path in paths(f"guide_{name}")):
            page = run(source)
            save_all(f"guide_{name}", lambda look, draw=draw, page=page: draw(page, look))
            if name == "tags":
                save_all("calibration", lambda look, page=page: calibration(page, look))


if __name__ == "__main__":
    draw_all()
    if "--readme" in sys.argv:
        folder, look = DOCS / "_static" / "readme", LOOKS[0]
        with looking(look), plt.rc_context({"savefig.facecolor": look.paper, "svg.fonttype": "none"}):
            save(projections(look), folder / "projections.svg")
            save(calibration(run(DOCS / "guides" / "tags.md"), look), folder / "calibration.svg")
