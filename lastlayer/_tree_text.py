"""Label trees as text: Newick, Graphviz, SVG. Plain functions of parents and names; deep trees do not recurse."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.sax.saxutils import escape


def newick(children: Sequence[Sequence[int]], root: int, names: Sequence[str]) -> str:
    """Write a tree in the Newick format, names quoted where they need it."""
    out: list[str] = []
    stack: list[int | str] = [root]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            out.append(item)
        elif not children[item]:
            out.append(_newick_name(names[item]))
        else:
            out.append("(")
            stack.append(")" + _newick_name(names[item]))
            for position, child in enumerate(reversed(children[item])):
                stack.extend([child] if position == 0 else [",", child])
    return "".join(out) + ";"


def _newick_name(name: str) -> str:
    if re.fullmatch(r"[^\s()\[\]':;,_]+", name):
        return name
    return "'" + name.replace("'", "''") + "'"


def graphviz(children: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    """Write a tree in Graphviz's dot language, from left to right."""
    lines = ["digraph tree {", "  rankdir=LR;", "  node [shape=plaintext];"]
    for node, name in enumerate(names):
        text = name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        lines.append(f'  n{node} [label="{text}"];')
    lines += [f"  n{node} -> n{child};" for node in range(len(names)) for child in children[node]]
    return "\n".join([*lines, "}"]) + "\n"


def svg(
    children: Sequence[Sequence[int]], order: Sequence[int], depth: Sequence[int], names: Sequence[str], named: bool
) -> str:
    """Draw a tree: leaves in a column on the right, each node at the height of the middle of its children.

    `order` lists parents before children. Inner nodes carry their name if `named`.
    """
    row, column = 18, max(26, min(90, 600 // (max(depth) + 1)))
    right = 12 + column * max(depth)
    x = [right if not children[v] else 12 + column * depth[v] for v in range(len(names))]
    y = [0.0] * len(names)
    leaves = [v for v in order if not children[v]]
    for place, leaf in enumerate(leaves):
        y[leaf] = row * (place + 0.75)
    for v in reversed(order):
        if children[v]:
            y[v] = (y[children[v][0]] + y[children[v][-1]]) / 2
    width = right + 20 + 8 * max(len(names[v]) for v in leaves)
    height = row * len(leaves) + 6
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        '<g fill="none" stroke="currentColor" stroke-opacity="0.5">',
    ]
    for v in order:
        parts += [f'<path d="M{x[v]} {y[v]:.1f}V{y[c]:.1f}H{x[c]}"/>' for c in children[v]]
    parts.append('</g><g fill="currentColor">')
    for v in order:
        if not children[v]:
            parts.append(f'<text x="{x[v] + 5}" y="{y[v] + 4:.1f}">{escape(names[v])}</text>')
        elif named:
            parts.append(f'<text x="{x[v] + 3}" y="{y[v] - 3:.1f}" font-size="9">{escape(names[v])}</text>')
    return "\n".join([*parts, "</g></svg>"]) + "\n"
