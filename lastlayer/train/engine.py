"""Train a run: from rows to a run folder, from the start or from where it was stopped."""

from __future__ import annotations

import logging
import math
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, EarlyStopping, ModelCheckpoint

from lastlayer.data import DataError, LabelData, hide_labels, single_positive, split_rows
from lastlayer.runs import RunError, RunFolder, write_atomically
from lastlayer.train import checkpoint
from lastlayer.train import measure as evaluation
from lastlayer.train.batches import EpochBatches
from lastlayer.train.config import Config, ConfigError, make
from lastlayer.train.count import CountModel
from lastlayer.train.features import FeatureMap
from lastlayer.train.module import LabelSetData, LabelSetModule, TrainingError, not_finite
from lastlayer.train.network_scorer import NetworkScorer, build
from lastlayer.train.placement import Placement, placement_of
from lastlayer.train.resolved import Resolved
from lastlayer.train.serve import TrainedModel
from lastlayer.train.serve import load as load

EXAMPLES, LONGEST = 2000, 2000


class History(Callback):
    """Keeps one line per epoch, also in the checkpoint, and writes history.csv."""

    def __init__(self, run: RunFolder | None) -> None:
        self.run, self.rows, self.started = run, [], 0.0  # type: ignore[var-annotated]

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
            logger.log_metrics({k: v for k, v in line.items() if k != "epoch"}, step=trainer.global_step)
        if self.run is not None and trainer.is_global_zero:
            self.run.write_history(self.rows)

    def state_dict(self) -> dict[str, Any]:
        """Return the lines, for the checkpoint."""
        return {"rows": [dict(row) for row in self.rows]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the lines back from a checkpoint."""
        self.rows = list(state_dict["rows"])


def prepare(parts: dict[str, LabelData], config: Config) -> dict[str, LabelData]:
    """Return train, valid and test rows: the parts of the file, or splits of it, with training labels hidden."""
    parts = {name: data for name, data in parts.items() if len(data)}
    if "all" in parts:
        data = parts.pop("all")
        want_test = 0.0 if "test" in parts else config.test_fraction
        train, test = split_rows(data, [1 - want_test, want_test], seed=config.seed)
        parts = {"train": train, **({"test": test} if len(test) else {}), **parts}
    if "train" not in parts:
        raise DataError(f"no rows to train on: the data hold the parts {', '.join(parts) or 'none'}.")
    if "valid" not in parts and config.valid_fraction:
        train, valid = split_rows(
            parts["train"], [1 - config.valid_fraction, config.valid_fraction], seed=config.seed + 1
        )
        parts.update({"train": train, "valid": valid} if len(valid) and len(train) else {})
    train = parts["train"]
    if train.n_labels == 0 or len(train.indices) == 0:
        raise DataError("no training row has a label.")
    names = train.label_names
    parts = {name: data.with_labels(names)[0] for name, data in parts.items()}
    for name in ("train", "valid"):  # hyper-parameters see what training sees
        if name in parts and config.keep < 1:
            parts[name] = hide_labels(parts[name], config.keep, seed=config.seed + (name == "valid"))
        if name in parts and config.single_positive:
            parts[name] = single_positive(parts[name], seed=config.seed + (name == "valid"))
    if len(parts["train"].indices) == 0:
        raise DataError("no training label is left after hiding.")
    return parts


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
    extra: dict[str, Any] = {"plugins": [checkpoint.SafeCheckpointIO()], "devices": config.devices}
    if config.devices > 1:
        extra["strategy"] = "ddp"
    try:
        return pl.Trainer(
            accelerator=config.accelerator,
            precision=precision,
            max_epochs=config.epochs if epochs is None else epochs,
            gradient_clip_val=config.clip_norm or None,
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


def train(
    parts: dict[str, LabelData],
    config: Config,
    out: str | Path,
    *,
    resume: bool = True,
    progress: bool = False,
    command: Sequence[str] | None = None,
    shard_classes: bool = False,
    data_parallel: int = 1,
) -> RunFolder:
    """Train, evaluate on the held-out part, and write the run folder.

    Args:
        parts: Rows by part, as :func:`lastlayer.data.read_parts` returns them; what is missing is split off.
        config: The choices of the run.
        out: The run folder. If it holds an unfinished run of the same config and data, that run is resumed from its
            last whole checkpoint. Anything else there is an error, and is left as it is.
        resume: Whether an unfinished run may be resumed.
        progress: Whether to show a progress bar.
        command: The command to note in environment.json.
        shard_classes: Whether to split the labels over the processes of the default process group, each of which
            calls this with the same arguments. See :mod:`lastlayer.train.sharded`.
        data_parallel: With `shard_classes`, the number of groups of processes. Each group holds all labels and takes
            a share of the rows of a batch.

    Returns:
        The run folder.
    """
    begun = time.perf_counter()
    placement = placement_of(shard_classes, data_parallel)
    _check_devices(config)
    placement.check(config)
    run, parts = placement.run_folder(out), prepare(parts, config)
    resolved = Resolved.of(config, parts["train"])
    if "valid" not in parts:
        resolved = replace(resolved, monitor="")
    about = _about(parts, config, resolved)
    placement.compare(about)
    last = placement.once(lambda: _enter(run, config, about, resume, command, placement))
    features = FeatureMap.fit(parts["train"], config)
    placement.place(parts["train"].n_labels)
    module = _module(config, resolved, features, parts["train"], placement)
    files, options = placement.trainer_options(module)
    _describe(run, module, features, parts["train"], about)
    inputs = {name: features(data) for name, data in parts.items()}
    data = LabelSetData(
        inputs["train"], parts["train"], inputs.get("valid"), parts.get("valid"),
        batch_size=config.batch_size, seed=config.seed, share=placement.share,
    )  # fmt: skip
    history = History(run)
    with quiet():
        fitter = trainer(
            config,
            progress=progress,
            callbacks=[*_callbacks(config, resolved, run, history, progress), *options.pop("callbacks", [])],
            logger=_loggers(config, run) if placement.writes else False,
            default_root_dir=str(run.path),
            **options,
        )
        try:
            fitter.fit(module, datamodule=data, ckpt_path=None if last is None else str(last))
        except SystemExit:  # how Lightning answers Ctrl-C
            raise KeyboardInterrupt from None
        except TrainingError as error:
            last = run / "checkpoints/last.ckpt"
            kept = f"The state before it is kept in {last}." if last.exists() else "No epoch was finished."
            raise TrainingError(f"{run.path}: {error} {kept}") from None
        except (KeyError, RuntimeError) as error:
            if last is None or str(error).startswith("shard:"):
                raise
            raise RunError(f"{last}: does not fit this run: {' '.join(str(error).split())[:120]}.") from None
        if fitter.interrupted:
            raise KeyboardInterrupt
    if fitter.is_global_zero:
        epoch = _take_best(run, module, files, resolved, history)
        count = placement.once(lambda: _count_model(resolved, inputs["train"], parts["train"], config.seed))
        names = parts["train"].label_names
        model = TrainedModel(
            NetworkScorer(module.network, placement), features, names, config, resolved, {}, count,
            shard=placement.shard,
        )  # fmt: skip
        _finish(run, model, parts, inputs, history, epoch)
        run.write_json("done.json", {"seconds": round(time.perf_counter() - begun, 2)})
    placement.once(lambda: None)  # the folder is whole on return, in every process
    return run


def _module(
    config: Config, resolved: Resolved, features: FeatureMap, labels: LabelData, placement: Placement
) -> LabelSetModule:
    """Make the network, which starts at the frequencies of the labels, with its loss and schedule."""
    network = build(config, features, labels.n_labels, placement)
    steps = len(EpochBatches(len(labels), config.batch_size, seed=0, world=config.devices)) * config.epochs
    module = LabelSetModule(network, config, resolved, total_steps=steps, placement=placement)
    module.start_at_frequencies(labels)
    return module


def _describe(
    run: RunFolder, module: LabelSetModule, features: FeatureMap, labels: LabelData, about: dict[str, Any]
) -> None:
    """Write what is known before training: features, labels, and what "auto" became."""
    run.write_json("features.json", features.state)
    run.write_json("labels.json", {"names": list(labels.label_names), "train_counts": labels.label_counts()})
    about["resolved"]["n_features"] = features.n_features
    about["resolved"].update({name: getattr(module.config, name) for name in ("optimizer", "lr", "weight_decay")})
    run.write_json("data.json", about)


def _count_model(resolved: Resolved, x: Any, labels: LabelData, seed: int) -> CountModel | None:
    if not resolved.k_per_row:
        return None
    return CountModel.fit(x, labels.row_counts() / (resolved.observed or 1.0), labels.n_labels, seed=seed)


def _check_devices(config: Config) -> None:
    """Refuse a device that is not there, or more processes than cores, before anything is written."""
    has_gpu = torch.cuda.is_available() or torch.backends.mps.is_available()
    if config.accelerator in ("gpu", "mps") and not has_gpu:
        raise ConfigError(f"`accelerator` must be auto or cpu where there is no GPU, got {config.accelerator!r}.")
    on_cpu = config.accelerator == "cpu" or not has_gpu
    if on_cpu and config.devices > max(os.cpu_count() or 1, 2):
        raise ConfigError(f"`devices` must be at most the number of cores, {os.cpu_count()}, got {config.devices}.")


def _about(parts: dict[str, LabelData], config: Config, resolved: Resolved) -> dict[str, Any]:
    described = {
        name: {
            "source": data.source,
            "rows": len(data),
            "labels_per_row": float(data.row_counts().mean()),
            "fingerprint": data.fingerprint(),
            "skipped": data.problems.count,
            "listed": data.problems.listed[:20],
        }
        for name, data in parts.items()
    }
    hidden = {"keep": config.keep, "single_positive": config.single_positive}
    return {"parts": described, "hidden": hidden, "resolved": {**asdict(resolved), "n_labels": parts["train"].n_labels}}


def _enter(
    run: RunFolder,
    config: Config,
    about: dict[str, Any],
    resume: bool,
    command: Sequence[str] | None,
    placement: Placement,
) -> Path | None:
    """Claim the folder; return the checkpoint to resume from, if there is one. Nothing is overwritten."""
    if not run.exists():
        if run.path.exists() and (not run.path.is_dir() or any(run.path.iterdir())):
            raise RunError(f"{run.path}: is not empty and not a run. Choose another folder.")
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            write_atomically(run / "config.yaml", config.to_yaml())
        except OSError as error:
            raise RunError(f"{run.path}: cannot be written: {error.strerror}.") from None
        run.write_environment(command)
        return None
    if run.is_done():
        raise RunError(f"{run.path}: holds a finished run. Choose another folder.")
    if not resume:
        raise RunError(f"{run.path}: holds an unfinished run. Resume it, or choose another folder.")
    before = make(run.config(), str(run / "config.yaml"))
    differing = [f.name for f in fields(Config) if getattr(before, f.name) != getattr(config, f.name)]
    if differing:
        raise RunError(f"{run.path}: holds an unfinished run with another `{differing[0]}`. Choose another folder.")
    if (run / "data.json").exists():
        seen = run.read_json("data.json").get("parts", {})
        if {k: v.get("fingerprint") for k, v in seen.items()} != {
            k: v["fingerprint"] for k, v in about["parts"].items()
        }:
            raise RunError(f"{run.path}: holds an unfinished run on other data. Choose another folder.")
    last = run / "checkpoints/last.ckpt"
    if not last.exists():
        return None
    placement.check_checkpoints(run)
    checkpoint.read(last)  # a damaged one is an error now, before anything is written
    return last


def _callbacks(config: Config, resolved: Resolved, run: RunFolder, history: History, progress: bool) -> list[Callback]:
    folder = run / "checkpoints"
    common: dict[str, Any] = {"dirpath": folder, "save_on_train_epoch_end": True, "enable_version_counter": False}
    out: list[Callback] = [history]
    if progress:
        from pytorch_lightning.callbacks import RichProgressBar

        out.append(RichProgressBar(leave=False))
    mode = "min" if resolved.monitor == "valid_loss" else "max"
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


def _loggers(config: Config, run: RunFolder) -> Any:
    out: list[Any] = []
    if "csv" in config.loggers:
        from pytorch_lightning.loggers import CSVLogger

        out.append(CSVLogger(run.path, name="csv", version=""))
    if "tensorboard" in config.loggers:
        from pytorch_lightning.loggers import TensorBoardLogger

        out.append(TensorBoardLogger(run.path, name="tensorboard", version=""))
    return out or False


def _take_best(
    run: RunFolder,
    module: LabelSetModule,
    files: checkpoint.SafeCheckpointIO,
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


def _finish(
    run: RunFolder,
    model: TrainedModel,
    parts: dict[str, LabelData],
    inputs: dict[str, Any],
    history: History,
    epoch: int,
) -> None:
    """Write the model, measure the held-out rows, and write the rest of the folder."""
    config, resolved = model.config, model.resolved
    model.scorer.save(run)
    if model.count is not None:
        model.count.save(run)
    part = next((p for p in ("test", "valid") if p in parts), "train")
    found = evaluation.predict(model, inputs[part], parts[part])
    measured = evaluation.measure(found, resolved.at, resamples=config.bootstrap, seed=config.seed)
    unknown = {name: model.features.unknown_rows(x) for name, x in inputs.items()}
    said = [model.features.note(n, len(parts[name]), f"rows of the {name} part") for name, n in unknown.items()]
    notes = [*evaluation.notes(config, part), *(note for note in said if note)]
    run.write_json(
        "metrics.json",
        {"part": part, **measured, "best_epoch": epoch, "epochs": len(history.rows), "notes": notes},
    )
    run.write_tensors("predictions.safetensors", found.tensors())
    run.write_json("examples.json", {"rows": examples(parts[part])})


def examples(data: LabelData) -> list[dict[str, Any]]:
    """Return the first rows with their texts."""
    return [
        {
            "row": i,
            "id": None if data.ids is None else data.ids[i],
            "text": None if data.texts is None else data.texts[i][:LONGEST],
        }
        for i in range(min(len(data), EXAMPLES))
    ]
