"""The main job on the sample that ships with the package: half of the training labels hidden, six losses compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from lastlayer.data import LabelData, load_sample
from lastlayer.runs import RunFolder
from lastlayer.train.config import Config
from lastlayer.train.engine import train
from lastlayer.train.tune import score

LOSSES = ("lml", "binary", "truncated_entropy", "two_way", "asymmetric", "expected_positive")
FACTORS = (0.5, 1.0, 2.0, 4.0)  # of the learning rate that is a loss's default


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
    """Train one linear model a loss on the sample, its learning rate chosen on the validation rows.

    Args:
        out: The folder of the runs, one a loss, and of the trials of learning rates; finished ones are kept.
        losses: Which.
        keep: The share of training (and validation) labels that are kept.
        epochs: Of each.
        seed: Of the hidden labels and of training.
        factors: The learning rates to try, the same for each loss: times its default. One is taken without a trial.
        step: Called before each run, and at the end.

    Returns:
        The runs, measured on the sample's test rows, whose labels are all there.
    """
    parts, runs = load_sample(), []
    a_loss = 1 + (len(factors) if len(factors) > 1 else 0)
    for i, loss in enumerate(losses):
        config = Config(loss=loss, labels="incomplete", keep=keep, epochs=epochs, seed=seed)
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
    if len(options) == 1:
        return options[0]
    shown = {name: data for name, data in parts.items() if name != "test"}
    found = []
    for i, config in enumerate(options):
        tell(i)
        run = RunFolder(folder / f"{config.loss}_{config.lr}")
        if not run.is_done():
            run = train(shown, dataclasses.replace(config, bootstrap=0), run.path)
        found.append(score(run, run.read_json("data.json")["resolved"]["monitor"])[0])
    return options[max(range(len(found)), key=found.__getitem__)]
