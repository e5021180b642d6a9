"""Train a linear model with the exact solver, or the best of a few losses, and fit it again to all rows."""

from __future__ import annotations

from dataclasses import replace

from lastlayer.train import choose
from lastlayer.train.config import Config
from lastlayer.train.engine import Fitted, Job
from lastlayer.train.held_out import HeldOut, with_share
from lastlayer.train.network_scorer import NetworkScorer, check_size


def fits_again(config: Config) -> bool:
    """Whether the model is fitted to the validation rows too after choosing.

    A promised recall (``--decide recall=P``) holds for a model that has not seen the rows that it was tuned on.
    """
    return config.refit == "true" or (config.refit == "auto" and not config.decide.startswith("recall"))


def fit(job: Job) -> Fitted:
    """Choose, fit and describe the model of a run."""
    config, run = job.config, job.run
    check_size(config, job.features, job.parts["train"].n_labels)
    pool, again = choose.Pool.of(job.inputs, job.parts).counted(), fits_again(config)
    lines: list[dict[str, float]] = []

    def say(line: dict[str, object]) -> None:
        numbers = {k: v for k, v in line.items() if isinstance(v, float)}
        lines.append({"epoch": len(lines), **numbers})
        job.say({"epoch": len(lines) - 1, **line})

    choice = choose.choose(pool, config, job.resolved, folds=again, say=say)
    run.write_json("choice.json", {"line": choice.line, "monitor": job.resolved.monitor, "candidates": choice.table})
    run.write_history(lines)
    network = choice.network
    if network is None or again:
        rows = (pool.x, pool.labels) if again else pool.train()
        network = choose.fit(choice.blend, *rows, config, choice.resolved)
    held = None if choice.scores is None or choice.labels is None else HeldOut(choice.scores, choice.labels)
    resolved = with_share(replace(choice.resolved, monitor=job.resolved.monitor), held, config)
    note = f"{choice.line[0].upper()}{choice.line[1:]}."
    return Fitted(NetworkScorer(network, job.placement), None, None, resolved, held, (note,))
