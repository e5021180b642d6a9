"""The main job on the sample that comes with the package: half of the training labels hidden, six losses compared.

torch is imported where training begins, so that the opening words come at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from lastlayer.data import LabelData, load_sample
from lastlayer.runs import RunFolder
from lastlayer.train.config import Config

LOSSES = ("lml", "binary", "truncated_entropy", "two_way", "asymmetric", "expected_positive")
FACTORS = (0.5, 1.0, 2.0, 4.0)  # of the learning rate that is a loss's default


SECONDS = 4.0  # of one training of 8 epochs on one core (3.7 measured)


def opening(losses: Sequence[str], keep: float, epochs: int) -> list[str]:
    """Return what a reader should know before the work begins: the data, the task, and how long it takes."""
    parts = load_sample()
    train_rows, test_rows = len(parts["train"]), len(parts["test"])
    trainings = len(losses) * (1 + len(FACTORS))
    minutes = max(1, round(trainings * SECONDS * epochs / 8 / 60))
    return [
        f"data: {train_rows:,} descriptions of Debian packages with {parts['train'].n_labels} tags; "
        f"{1 - keep:.0%} of the tags are hidden",
        f"task: the tags of {test_rows:,} other packages, all of which are known",
        f"work: {len(losses)} losses, {len(FACTORS)} learning rates each; about {minutes} "
        f"minute{'s' if minutes > 1 else ''} on one core",
    ]


def verdict(runs: Sequence[RunFolder]) -> str:
    """Return which run finds most of the true labels, by how much, and whether that may be chance."""
    if len(runs) < 2:
        return ""
    from lastlayer.runs.contents import Held
    from lastlayer.runs.rows import row_metrics

    measured = {run: run.metrics()["metrics"] for run in runs}
    metric = max((name for name in measured[runs[0]] if name.startswith("recall@")), key=lambda name: int(name[7:]))
    first, second = sorted(runs, key=lambda run: -measured[run][metric]["value"])[:2]
    k = int(metric[7:])
    value = [100 * measured[run][metric]["value"] for run in (first, second)]
    rows = [Held.of(run.predictions()) for run in (first, second)]
    recalls = [row_metrics(held.top_index, held.indptr, held.index, [k])[metric] for held in rows]
    gap = 100 * (recalls[0] - recalls[1])
    gap = gap[np.isfinite(gap)]
    half = 1.96 * float(gap.std(ddof=1)) / len(gap) ** 0.5
    sure = "more than chance" if gap.mean() > half else "may be chance"
    return (
        f"{first.path.name} finds most: {value[0]:.1f} % of the true tags are among the {k} best of their text, "
        f"{value[0] - value[1]:.1f} points ahead of {second.path.name} "
        f"(95 % interval {gap.mean() - half:.1f} to {gap.mean() + half:.1f}: {sure})"
    )


def demo(
    out: str | Path,
    *,
    losses: Sequence[str] = LOSSES,
    keep: float = 0.5,
    epochs: int = 8,
    seed: int = 0,
    factors: Sequence[float] = FACTORS,
    step: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> list[RunFolder]:
    """Train one linear model per loss on the sample, its learning rate chosen on the validation rows.

    Args:
        out: The folder of the runs, one per loss, and of the trials of learning rates; finished ones are kept.
        losses: Which.
        keep: The share of training (and validation) labels that are kept.
        epochs: Of each.
        seed: Of the hidden labels and of training.
        factors: The learning rates to try, the same for each loss: times its default. One is taken without a trial.
        step: Called before each run, and at the end.

    Returns:
        The runs, measured on the sample's test rows, whose labels are all there.
    """
    from lastlayer.train.engine import train

    parts, runs = load_sample(), []
    a_loss = 1 + (len(factors) if len(factors) > 1 else 0)
    configs = [Config(loss=loss, labels="incomplete", keep=keep, epochs=epochs, seed=seed) for loss in losses]
    for i, (loss, config) in enumerate(zip(losses, configs, strict=True)):
        default = float(config.settled(sparse=True).lr)
        options = [dataclasses.replace(config, lr=f"{factor * default:g}") for factor in factors]

        def tell(done: int, loss: str = loss, before: int = i * a_loss) -> None:
            step(loss, before + done, len(losses) * a_loss)

        run = RunFolder(Path(out) / loss)
        if not run.is_done():
            best = best_on_validation(parts, options, Path(out) / "trials", tell)
            tell(a_loss - 1)
            run = train(parts, best, run.path)
        runs.append(run)
    step("", len(losses) * a_loss, len(losses) * a_loss)
    return runs


def best_on_validation(
    parts: dict[str, LabelData], options: Sequence[Config], folder: Path, tell: Callable[[int], None]
) -> Config:
    """Return the option whose run has the best epoch on the validation rows; the test rows are not shown to any."""
    from lastlayer.train.engine import train
    from lastlayer.train.tune import score

    if len(options) == 1:
        return options[0]
    shown = {name: data for name, data in parts.items() if name != "test"}
    tried = []
    for i, config in enumerate(options):
        tell(i)
        run = RunFolder(folder / f"{config.loss}_{config.lr}")
        if not run.is_done():
            run = train(shown, dataclasses.replace(config, bootstrap=0), run.path)
        tried.append(score(run, run.read_json("data.json")["resolved"]["monitor"])[0])
    return options[max(range(len(tried)), key=tried.__getitem__)]
