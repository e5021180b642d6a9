"""Train label trees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from lastlayer.data import LabelData
from lastlayer.train.choose import Pool
from lastlayer.train.config import Config
from lastlayer.train.engine import Fitted, Job
from lastlayer.train.exact import SOLVED
from lastlayer.train.linear import LinearTree, TreeSettings
from lastlayer.train.resolved import Resolved
from lastlayer.train.tree_scorer import TreeScorer, read_hierarchy


def settings_of(config: Config, resolved: Resolved) -> TreeSettings:
    """Return how the trees of a run are fitted."""
    settings = TreeSettings(seed=config.seed, threads=torch.get_num_threads())
    if config.tree not in ("auto", "off"):
        settings = replace(settings, trees=int(float(config.tree)))
    if config.C != "auto":
        settings = replace(settings, C=float(config.C))
    if config.loss in SOLVED:
        settings = replace(settings, loss=SOLVED[config.loss])  # type: ignore[arg-type]
    if config.labels == "incomplete" and resolved.observed:
        settings = replace(settings, observed=resolved.observed)
    return settings


def groups_of(labels: LabelData) -> list[Any] | None:
    """Return the group of each row for `LinearTree.fit`, where a row with an empty name is a group of its own."""
    return None if labels.groups is None else [name or row for row, name in enumerate(labels.groups)]


def fit(job: Job) -> Fitted:
    """Fit label trees to the training rows, and to the validation rows unless they tune thresholds."""
    config = job.config
    pool, tunes = Pool.of(job.inputs, job.parts), config.decide not in ("auto", "top_k")
    again = config.refit == "true" or (config.refit == "auto" and not tunes)
    x, labels = (pool.x, pool.labels) if again else pool.train()
    hierarchy = read_hierarchy(config.hierarchy, list(labels.label_names)) if config.hierarchy else None
    tree = LinearTree.fit(
        x,
        labels,
        settings_of(config, job.resolved),
        hierarchy=hierarchy,
        row_weight=labels.weights,
        groups=groups_of(labels),
    )
    loss = next(ours for ours, theirs in SOLVED.items() if theirs == tree.settings.loss)
    resolved = replace(job.resolved, loss=loss, probability="sigmoid", temperature=1.0)
    size = f"{labels.n_labels} labels, {len(tree.trees)} tree{'s' * (len(tree.trees) > 1)}, {tree.n_weights} weights"
    why = (
        "as given"
        if hierarchy is not None
        else "a flat linear model would have " + str(job.features.n_features * labels.n_labels)
    )
    note = f"Label trees ({loss}, C {tree.settings.C:.3g}): {size}; {why}."
    return Fitted(TreeScorer(tree), None, None, resolved, None, (note,), calibrated=True, seen_valid=again)
