"""The projection at work: a table in the terminal, and the papers' figures 1, 2 and 7 as PNG and SVG.

``python examples/projection.py [--out FOLDER]``
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from mpl_toolkits.mplot3d.art3d import Poly3DCollection
from torch import Tensor

import lastlayer as ll

LOGITS = torch.tensor([3.0, 2.0, 1.5, 0.0, -2.0], dtype=torch.float64)
BLUE, ORANGE, GREY = "#2563eb", "#ea580c", "#64748b"


def table(logits: Tensor = LOGITS) -> str:
    """Logits, sigmoid, softmax and LML side by side, with the dual and a gradient."""
    columns = {"logit": logits, "sigmoid": logits.sigmoid(), "softmax": logits.softmax(-1)}
    columns |= {f"LML k={k}": ll.lml(logits, k) for k in (1, 2, 3)}
    lines = ["class  " + "".join(f"{name:>10}" for name in columns)]
    for i in range(len(logits)):
        lines.append(f"{i:>5}  " + "".join(f"{column[i]:10.4f}" for column in columns.values()))
    sums = ["" if name == "logit" else f"{column.sum():.4f}" for name, column in columns.items()]
    lines.append("  sum  " + "".join(f"{s:>10}" for s in sums))
    dual = [f"{ll.lml_threshold(logits, k):.4f}" for k in (1, 2, 3)]
    lines.append("   nu  " + "".join(f"{s:>10}" for s in ["", "", "", *dual]))
    leaf = logits.clone().requires_grad_()
    ll.lml_loss(leaf[None], torch.tensor([[3]]), 2).backward()
    gradient = "  ".join(f"{g:+.4f}" for g in leaf.grad.tolist())
    lines.append(f"\ngradient of -log y for label 3, k = 2:  {gradient}")
    lines.append("(the label is pushed up; whoever is in doubt makes room: the sum is 0)")
    return "\n".join(lines)


def corners(n: int, k: int) -> np.ndarray:
    return np.array([[float(i in chosen) for i in range(n)] for chosen in itertools.combinations(range(n), k)])


def faces(points: np.ndarray) -> list[np.ndarray]:
    """The faces of the convex hull of points in space, each with its corners in order."""
    found: dict[frozenset[int], np.ndarray] = {}
    for triple in itertools.combinations(range(len(points)), 3):
        a, b, c = points[list(triple)]
        normal = np.cross(b - a, c - a)
        side = (points - a) @ normal
        if np.linalg.norm(normal) > 1e-9 and ((side < 1e-9).all() or (side > -1e-9).all()):
            on = np.flatnonzero(abs(side) < 1e-9)
            flat = points[on] - points[on].mean(0)
            u = flat[0] / np.linalg.norm(flat[0])
            v = np.cross(normal / np.linalg.norm(normal), u)
            found[frozenset(on.tolist())] = points[on[np.argsort(np.arctan2(flat @ v, flat @ u))]]
    return list(found.values())


def figure_polytopes(narrow: bool = False) -> Figure:
    """Figure 1: the sets {0 <= y <= 1, sum y = k}; for n = 4 seen in the three dimensions of their plane."""
    figure, ink = plt.figure(figsize=(4.4, 6) if narrow else (11, 2.9)), plt.rcParams["text.color"]
    for place, (n, k) in enumerate([(3, 1), (3, 2), (4, 1), (4, 2), (4, 3)], start=1):
        axes = figure.add_subplot(*((3, 2) if narrow else (1, 5)), place, projection="3d")
        points = corners(n, k)
        if n == 4:  # an orthonormal basis of the plane sum y = k
            basis = np.linalg.svd(np.ones((1, 4)))[2][1:]
            drawn, sides = points @ basis.T, faces(points @ basis.T)
        else:
            drawn, sides = points, [points[[0, 1, 2]]]
        axes.add_collection3d(Poly3DCollection(sides, facecolor=BLUE, edgecolor=ink, alpha=0.25))
        axes.scatter(*drawn.T, color=ink, s=12)
        logits = torch.randn(200, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
        cloud = ll.lml(logits, k).numpy()
        axes.scatter(*(cloud @ basis.T if n == 4 else cloud).T, color=ORANGE, s=3)
        low, high = drawn.min(0) - 0.1, drawn.max(0) + 0.1
        axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), zlim=(low[2], high[2]))
        axes.set_title(f"n = {n}, k = {k}", fontsize=10)
        axes.set_box_aspect((1, 1, 1), zoom=1.15)
        axes.view_init(elev=22, azim=28 if n == 3 else -60)
        axes.set(xticks=[], yticks=[], zticks=[])
        for axis in (axes.xaxis, axes.yaxis, axes.zaxis):
            axis.set_pane_color((0.5, 0.5, 0.5, 0.08))
    gap = "\n" if narrow else " "
    figure.suptitle(f"The polytopes of k labels among n,{gap}and projected normal logits")
    figure.tight_layout()
    return figure


def figure_root(narrow: bool = False) -> Figure:
    """Figure 2: the one equation per row: g(nu) = sum sigmoid(x + nu) - k."""
    figure, axes = plt.subplots(figsize=(4.4, 3.8) if narrow else (6.4, 4))
    x, k = LOGITS, 2
    nu = torch.linspace(-8, 6, 400, dtype=torch.float64)
    axes.plot(nu, (x + nu[:, None]).sigmoid().sum(-1) - k, color=BLUE, label=r"$g(\nu)$")
    for value in x:
        axes.plot(nu, (value + nu).sigmoid() - k, color=GREY, linewidth=0.7, alpha=0.6)
    root = ll.lml_threshold(x, k).item()
    n, ranked = len(x), x.sort(descending=True).values
    low, high = -ranked[k - 1].item() - np.log(n - k), -ranked[k].item() + np.log(k)
    axes.axvspan(low, high, color=ORANGE, alpha=0.15, label="exact bracket")
    axes.axhline(0, color=plt.rcParams["text.color"], linewidth=0.8)
    axes.plot(root, 0, "o", color=ORANGE, label=rf"$\nu^* = {root:.3f}$")
    axes.set(xlabel=r"$\nu$", ylabel=r"$g(\nu)$", title="One increasing function per row\n(grey: its terms, less k)")
    axes.legend()
    figure.tight_layout()
    return figure


def figure_entropies(narrow: bool = False) -> Figure:
    """Figure 7: the entropies over the polytope n = 3, k = 2: what pulls the answer off the corners."""
    figure, panels = plt.subplots(3, 1, figsize=(4.2, 9)) if narrow else plt.subplots(1, 3, figsize=(10.5, 3.6))
    points = corners(3, 2)
    torch.manual_seed(0)
    weights = torch.distributions.Dirichlet(torch.ones(3, dtype=torch.float64)).sample((6000,)).numpy()
    y = torch.as_tensor(weights @ points).clamp(1e-12, 1 - 1e-12)
    u = np.array([1.0, -1.0, 0.0]) / np.sqrt(2)
    v = np.array([1.0, 1.0, -2.0]) / np.sqrt(6)
    surfaces = {
        "binary entropy (LML)": -(y * y.log() + (1 - y) * (1 - y).log()).sum(-1),
        "entropy (capped softmax)": -(y * y.log()).sum(-1),
        "half squared norm (capped sparsemax)": -0.5 * (y * y).sum(-1),
    }
    for axes, (name, value) in zip(panels, surfaces.items(), strict=True):
        drawn = axes.tricontourf(y.numpy() @ u, y.numpy() @ v, value.numpy(), levels=16, cmap="viridis")
        axes.set_title(name, fontsize=9)
        axes.set(xticks=[], yticks=[], aspect="equal")
        figure.colorbar(drawn, ax=axes, shrink=0.8)
    figure.suptitle("Regularisers over the polytope n = 3, k = 2")
    figure.tight_layout()
    return figure


FIGURES = {"polytopes": figure_polytopes, "root": figure_root, "entropies": figure_entropies}


def save(folder: Path) -> list[Path]:
    """Draw the figures and write each as PNG and SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, draw in FIGURES.items():
        figure = draw()
        for ending in ("png", "svg"):
            written.append(folder / f"{name}.{ending}")
            figure.savefig(written[-1], dpi=150)
        plt.close(figure)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("figures"))
    arguments = parser.parse_args()
    print(table())
    print("\nwritten:", *save(arguments.out))


if __name__ == "__main__":
    main()
