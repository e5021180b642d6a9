"""Loggers of a run beside history.csv: Lightning's own, with the settings, the curves, the metrics and the report.

Where MLflow and Weights & Biases store what they get is their own affair: the environment decides
(``MLFLOW_TRACKING_URI``, ``WANDB_MODE=offline``, ...).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

from lastlayer.runs import RunFolder
from lastlayer.train.config import Config, ConfigError

PROJECT = "lastlayer"


def check(config: Config) -> None:
    """Refuse loggers whose package is not installed, before anything is written."""
    for name in config.loggers:
        package = {"csv": "pytorch_lightning"}.get(name, name)
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"`loggers` must name installed packages, got {name}. Install it with: pip install {package}"
            )


def open_loggers(config: Config, run: RunFolder) -> list[Any]:
    """Return the loggers that the settings name. Nothing is written or sent yet."""
    made = []
    for name in config.loggers:
        try:
            made.append(_MAKE[name](run))
        except Exception as error:  # of other packages, which have errors of their own
            why = " ".join(str(error).split())[:200]
            raise ConfigError(f"`loggers`: {name} does not start: {type(error).__name__}: {why}") from None
    return made


def log_line(logger: Any, line: dict[str, Any], step: int) -> None:
    """Log the numbers of an epoch."""
    numbers = {k: v for k, v in line.items() if isinstance(v, int | float) and k != "epoch"}
    logger.log_metrics(_named(logger, numbers), step=step)


def _csv(run: RunFolder) -> Any:
    from pytorch_lightning.loggers import CSVLogger

    return CSVLogger(run.path, name="csv", version="")


def _tensorboard(run: RunFolder) -> Any:
    from pytorch_lightning.loggers import TensorBoardLogger

    return TensorBoardLogger(run.path, name="tensorboard", version="")


def _mlflow(run: RunFolder) -> Any:
    from pytorch_lightning.loggers import MLFlowLogger

    where = os.environ.get("MLFLOW_TRACKING_URI")
    if not where:
        where = importlib.import_module("mlflow").get_tracking_uri()  # its own default
    return MLFlowLogger(PROJECT, run_name=run.path.name, tracking_uri=where)


def _wandb(run: RunFolder) -> Any:
    from pytorch_lightning.loggers import WandbLogger

    project = os.environ.get("WANDB_PROJECT") or PROJECT
    return WandbLogger(run.path.name, save_dir=run.path, project=project)


_MAKE = {"csv": _csv, "tensorboard": _tensorboard, "mlflow": _mlflow, "wandb": _wandb}


def log_whole(loggers: list[Any], config: Config, run: RunFolder, *, curves: bool) -> None:
    """Log a run that is finished: its settings, its metrics, its report, and its curves if they were not logged yet."""
    if not loggers:
        return
    settings = {name: value for name, value in config.to_dict().items() if value not in ("", [], {})}
    measured, history, report = run.metrics(), run.history(), _report(run)
    values = {f"{measured['part']}/{name}": one["value"] for name, one in measured["metrics"].items()}
    known = {name: value for name, value in values.items() if value is not None}
    for logger in loggers:
        logger.log_hyperparams(settings)
        for i, line in enumerate(history if curves else []):
            log_line(logger, line, i)
        last = int(history[-1].get("step") or len(history)) if history else 0
        logger.log_metrics(_named(logger, known), step=last)
        for path in (report, run / "model_card.md"):
            if path is not None and path.exists():
                _artifact(logger, path)
        logger.finalize("success")


def _named(logger: Any, numbers: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers by names that the logger takes: MLflow refuses the sign in recall@5."""
    if type(logger).__name__ != "MLFlowLogger":
        return numbers
    return {name.replace("@", "_at_"): value for name, value in numbers.items()}


def _report(run: RunFolder) -> Path | None:
    """Write the report, unless the packages for it are missing."""
    try:
        from lastlayer.report import write

        return write(run.path, run / "report.html")
    except ModuleNotFoundError:
        return None


def _artifact(logger: Any, path: Path) -> None:
    kind = type(logger).__name__
    if kind == "MLFlowLogger":
        logger.experiment.log_artifact(logger.run_id, str(path))
    elif kind == "WandbLogger":
        logger.experiment.save(str(path), base_path=str(path.parent), policy="now")
