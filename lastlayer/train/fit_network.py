"""Train a network with Lightning."""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, EarlyStopping, ModelCheckpoint

from lastlayer.data import LabelData
from lastlayer.runs import RunError, RunFolder
from lastlayer.train.batches import EpochBatches
from lastlayer.train.checkpoint_io import SafeCheckpointIO
from lastlayer.train.config import Config, ConfigError
from lastlayer.train.engine import Fitted, Job
from lastlayer.train.explain import network_of
from lastlayer.train.features import FeatureMap
from lastlayer.train.loggers import log_line
from lastlayer.train.module import LabelSetData, LabelSetModule, TrainingError, not_finite
from lastlayer.train.network_scorer import build, scorer_of
from lastlayer.train.placement import Placement
from lastlayer.train.resolved import Resolved, lower_is_better
from lastlayer.train.start import take_over


def fit(job: Job) -> Fitted | None:
    """Train the network of a run, or resume it; the result is None in processes that only take part."""
    run, config, resolved, parts, inputs = job.run, job.config, job.resolved, job.parts, job.inputs
    module = _module(config, resolved, job.features, parts["train"], job.placement)
    if job.before is not None:
        take_over(module.network, network_of(job.before))
    files, options = job.placement.trainer_options(module)
    data = LabelSetData(
        inputs["train"], parts["train"], inputs.get("valid"), parts.get("valid"),
        batch_size=config.batch_size, seed=config.seed, share=job.placement.share,
    )  # fmt: skip
    history, module.to_loggers = History(run, job.say), False  # the history logs whole lines
    with quiet():
        fitter = trainer(
            config,
            progress=job.progress,
            callbacks=[*_callbacks(config, resolved, run, history, job.progress), *options.pop("callbacks", [])],
            logger=job.loggers or False,
            default_root_dir=str(run.path),
            **options,
        )
        _run(fitter, module, data, job)
    if not fitter.is_global_zero:
        return None
    epoch = _take_best(run, module, files, resolved, history)
    return Fitted(scorer_of(module.network, config, job.placement), epoch, len(history.rows))


def _run(fitter: pl.Trainer, module: LabelSetModule, data: LabelSetData, job: Job) -> None:
    """Run the Trainer, and turn its errors into ours."""
    run, last = job.run, job.last
    try:
        fitter.fit(module, datamodule=data, ckpt_path=None if last is None else str(last))
    except SystemExit:  # how Lightning answers Ctrl-C
        raise KeyboardInterrupt from None
    except TrainingError as error:
        good = run / "checkpoints/last.ckpt"
        kept = f"The state before it is kept in {good}." if good.exists() else "No epoch was finished."
        raise TrainingError(f"{run.path}: {error} {kept}") from None
    except (KeyError, RuntimeError) as error:
        if last is None or str(error).startswith("shard:"):
            raise
        raise RunError(f"{last}: does not fit this run: {' '.join(str(error).split())[:120]}.") from None
    if fitter.interrupted:
        raise KeyboardInterrupt


def _module(
    config: Config, resolved: Resolved, features: FeatureMap, labels: LabelData, placement: Placement
) -> LabelSetModule:
    """Make the network, which starts at the frequencies of the labels, with its loss and schedule."""
    network = build(config, features, labels.n_labels, placement)
    batches = len(EpochBatches(len(labels), config.batch_size, seed=0, world=config.devices))
    steps = math.ceil(batches / config.accumulate) * config.epochs
    module = LabelSetModule(network, config, resolved, total_steps=steps, placement=placement)
    module.start_at_frequencies(labels)
    return module


class History(Callback):
    """Keeps one line per epoch, also in the checkpoint, and writes history.csv."""

    def __init__(self, run: RunFolder | None, say: Callable[[dict[str, Any]], None]) -> None:
        self.run, self.say, self.rows, self.started = run, say, [], 0.0  # type: ignore[var-annotated]

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock of the epoch."""
        self.started = time.perf_counter()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add the line of the epoch. An error here comes before the checkpoint, so the last good one stays."""
        assert isinstance(pl_module, LabelSetModule)
        pl_module.check_finite()
        for name, parameter in pl_module.network.named_parameters():
            if not bool(parameter.detach().sum().isfinite()):
                raise TrainingError(not_finite(math.nan, f"epoch {trainer.current_epoch}, in {name}", pl_module.config))
        line: dict[str, Any] = {
            "epoch": trainer.current_epoch,
            "step": trainer.global_step,
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
            "train_loss": pl_module.train_loss(),
        }
        if trainer.val_dataloaders:
            line.update(pl_module.validation_metrics())
        line["seconds"] = round(time.perf_counter() - self.started, 4)
        self.rows.append(line)
        for logger in trainer.loggers:
            log_line(logger, line, trainer.global_step)
        if self.run is not None and trainer.is_global_zero:
            self.run.write_history(self.rows)
            self.say(line)

    def state_dict(self) -> dict[str, Any]:
        """Return the lines, for the checkpoint."""
        return {"rows": [dict(row) for row in self.rows]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the lines back from a checkpoint."""
        self.rows = list(state_dict["rows"])


@contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Silence Lightning and the named loggers, and restore the global random state afterwards."""
    loggers = [logging.getLogger(n) for n in ("pytorch_lightning", "lightning.pytorch", "lightning_utilities", *names)]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.filterwarnings("ignore", module=r"pytorch_lightning|lightning|torch\.jit|torch\.utils\.data")
            warnings.filterwarnings("ignore", message=r".*lr_scheduler\.step.*|.*isinstance\(treespec.*")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def trainer(config: Config, *, epochs: int | None = None, progress: bool = False, **options: Any) -> pl.Trainer:
    """Return the Lightning Trainer of a config."""
    precision: Any = {"32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed"}[config.precision]
    extra: dict[str, Any] = {"plugins": [SafeCheckpointIO()], "devices": config.devices}
    if config.devices > 1:
        extra["strategy"] = "ddp"
    try:
        return pl.Trainer(
            accelerator=config.accelerator,
            precision=precision,
            max_epochs=config.epochs if epochs is None else epochs,
            gradient_clip_val=config.clip_norm or None,
            accumulate_grad_batches=config.accumulate,
            enable_progress_bar=progress,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            log_every_n_steps=10**9,
            **{**extra, **options},
        )
    except (pl.utilities.exceptions.MisconfigurationException, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"accelerator {config.accelerator} with {config.devices} device(s): {str(error)[:160]}"
        ) from None


def _callbacks(config: Config, resolved: Resolved, run: RunFolder, history: History, progress: bool) -> list[Callback]:
    folder = run / "checkpoints"
    common: dict[str, Any] = {"dirpath": folder, "save_on_train_epoch_end": True, "enable_version_counter": False}
    out: list[Callback] = [history]
    if progress:
        from pytorch_lightning.callbacks import RichProgressBar

        out.append(RichProgressBar(leave=False))
    mode = "min" if lower_is_better(resolved.monitor) else "max"
    if resolved.monitor and config.patience:
        out.append(
            EarlyStopping(
                resolved.monitor, mode=mode, patience=config.patience, check_finite=False, check_on_train_epoch_end=True
            )
        )
    if resolved.monitor:  # before `last`, whose state must know the best so far
        out.append(
            ModelCheckpoint(**common, filename="best", monitor=resolved.monitor, mode=mode, save_weights_only=True)
        )
    out.append(ModelCheckpoint(**common, filename="last", monitor=None, save_top_k=1))
    return out


def _take_best(
    run: RunFolder,
    module: LabelSetModule,
    files: SafeCheckpointIO,
    resolved: Resolved,
    history: History,
) -> int:
    """Load the weights of the best epoch; return its number."""
    best, epoch = run / "checkpoints/best.ckpt", len(history.rows) - 1
    if resolved.monitor and best.exists():
        state = files.load_checkpoint(best)
        epoch = int(state["epoch"])
        module.load_state_dict(state["state_dict"])
    module.to("cpu")
    return epoch
