"""Train a run from rows to a run folder, resume it, and load it again."""

from __future__ import annotations

import logging
import math
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch import Tensor

from lastlayer.data import DataError, LabelData, hide_labels, single_positive, split_rows
from lastlayer.runs import RunError, RunFolder, write_atomically
from lastlayer.shard import ClassShard
from lastlayer.train import checkpoint, sharded
from lastlayer.train import measure as evaluation
from lastlayer.train.config import Config, ConfigError, make
from lastlayer.train.config import load as load_config
from lastlayer.train.features import FeatureMap
from lastlayer.train.module import EpochBatches, LabelSetData, LabelSetModule, Resolved
from lastlayer.train.network import LabelSetNetwork

EXAMPLES, LONGEST = 2000, 2000


@dataclass(frozen=True)
class Model:
    """A finished run, loaded: what it takes to predict."""

    module: LabelSetModule
    features: FeatureMap
    labels: Sequence[str]
    config: Config
    reader: dict[str, Any]


class History(Callback):
    """Keeps one line an epoch, in the checkpoint too, and writes it as history.csv."""

    def __init__(self, run: RunFolder | None) -> None:
        self.run, self.rows, self.started = run, [], 0.0  # type: ignore[var-annotated]

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock of the epoch."""
        self.started = time.perf_counter()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add the line of the epoch."""
        assert isinstance(pl_module, LabelSetModule)
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
    """Return train, valid and test rows: the parts of the file, or splits of it; training labels hidden if asked."""
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


def build(
    config: Config,
    resolved: Resolved,
    features: FeatureMap,
    n_labels: int,
    steps: int,
    shard: ClassShard | None = None,
) -> LabelSetModule:
    """Make the module of a run, unless it is too large."""
    held = n_labels if shard is None else shard.size
    size = LabelSetNetwork.count_parameters(features.n_features, held, config.hidden)
    if size > config.max_parameters:
        raise ConfigError(
            f"the network would have {size} parameters, `max_parameters` is {config.max_parameters}. Use fewer "
            "`n_features`, a hidden layer (`hidden: [256]`), or raise the bound."
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        network = LabelSetNetwork(
            features.n_features,
            n_labels,
            hidden=config.hidden,
            dropout=config.dropout,
            sparse=features.is_sparse,
            count_head=config.k == "predicted",
            shard=shard,
        )
    return LabelSetModule(network, config, resolved, total_steps=steps)


@contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Keep notes of Lightning and of the named loggers off the screen, and global random state as it was."""
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
        out: The run folder. One that holds an unfinished run of the same config and data is resumed from its last
            whole checkpoint; anything else there is an error, and stays as it is.
        resume: Whether an unfinished run may be resumed.
        progress: Whether to show a progress bar.
        command: What to note in environment.json.
        shard_classes: Whether to split the labels over the processes of the default process group, each of which
            calls this with the same arguments. See :mod:`lastlayer.train.sharded`.
        data_parallel: With `shard_classes`, into how many groups the processes fall, each with all labels and a share
            of the rows of a batch.

    Returns:
        The run folder.
    """
    begun = time.perf_counter()
    _check_devices(config)
    if shard_classes:
        sharded.check(config)
    elif data_parallel != 1:
        raise ConfigError("`data_parallel` needs split classes (--shard-classes). Use `devices` to split rows alone.")
    run, parts = sharded.run_folder(out) if shard_classes else RunFolder(out), prepare(parts, config)
    resolved = Resolved.of(config, parts["train"])
    if "valid" not in parts and resolved.monitor:
        resolved = Resolved(**{**asdict(resolved), "monitor": ""})
    about = _about(parts, config, resolved)
    last = sharded.once(lambda: _enter(run, config, about, resume, command, shard_classes), shard_classes)
    features = FeatureMap.fit(parts["train"], config)
    steps = len(EpochBatches(len(parts["train"]), config.batch_size, seed=0, world=config.devices)) * config.epochs
    n_labels = parts["train"].n_labels
    group, others = sharded.groups(data_parallel) if shard_classes else (None, None)
    shard = sharded.split(n_labels, group) if shard_classes else None
    module = build(config, resolved, features, n_labels, steps, shard)
    module.data = others
    files, options = sharded.setup(module) if shard_classes else (checkpoint.SafeCheckpointIO(), {})
    module.start_at_frequencies(parts["train"])
    run.write_json("features.json", features.state)
    run.write_json(
        "labels.json",
        {"names": list(parts["train"].label_names), "train_counts": parts["train"].label_counts()},
    )
    about["resolved"]["n_features"] = features.n_features
    about["resolved"].update({name: getattr(module.config, name) for name in ("optimizer", "lr", "weight_decay")})
    run.write_json("data.json", about)
    inputs = {name: features(data) for name, data in parts.items()}
    data = LabelSetData(
        inputs["train"], parts["train"], inputs.get("valid"), parts.get("valid"),
        batch_size=config.batch_size, seed=config.seed,
        share=(0, 1) if others is None else (others.rank, others.ranks),
    )  # fmt: skip
    history = History(run)
    with quiet():
        fitter = trainer(
            config,
            progress=progress,
            callbacks=[*_callbacks(config, resolved, run, history, progress), *options.pop("callbacks", [])],
            logger=_loggers(config, run),
            default_root_dir=str(run.path),
            **options,
        )
        try:
            fitter.fit(module, datamodule=data, ckpt_path=None if last is None else str(last))
        except SystemExit:  # how Lightning answers Ctrl-C
            raise KeyboardInterrupt from None
        except (KeyError, RuntimeError) as error:
            if last is None or str(error).startswith("shard:"):
                raise
            raise RunError(f"{last}: does not fit this run: {' '.join(str(error).split())[:120]}.") from None
        if fitter.interrupted:
            raise KeyboardInterrupt
    if fitter.is_global_zero:
        unknown = {name: features.unknown_rows(x) for name, x in inputs.items()}
        notes = [features.note(n, len(parts[name]), f"rows of the {name} part") for name, n in unknown.items()]
        said = [note for note in notes if note]
        _finish(run, module, files, config, resolved, parts, inputs, history, time.perf_counter() - begun, said)
    sharded.once(lambda: None, shard_classes)  # the folder is whole on return, on every process
    return run


def _check_devices(config: Config) -> None:
    """Refuse a device that is not there, and more processes than cores, before anything is written."""
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
    shard_classes: bool = False,
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
    before = make(load_config(run / "config.yaml"), str(run / "config.yaml"))
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
    if sharded.is_split(run) != shard_classes:
        how = "without --shard-classes" if shard_classes else "with --shard-classes"
        raise RunError(f"{run.path}: holds an unfinished run {how}. Resume it so, or choose another folder.")
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
    if isinstance(run, sharded.ReadOnlyRun):
        return False
    if "csv" in config.loggers:
        from pytorch_lightning.loggers import CSVLogger

        out.append(CSVLogger(run.path, name="csv", version=""))
    if "tensorboard" in config.loggers:
        from pytorch_lightning.loggers import TensorBoardLogger

        out.append(TensorBoardLogger(run.path, name="tensorboard", version=""))
    return out or False


def _finish(
    run: RunFolder,
    module: LabelSetModule,
    files: checkpoint.SafeCheckpointIO,
    config: Config,
    resolved: Resolved,
    parts: dict[str, LabelData],
    inputs: dict[str, Any],
    history: History,
    seconds: float,
    said: Sequence[str] = (),
) -> None:
    """Load the best weights, measure the held-out rows, write the rest of the folder."""
    best = run / "checkpoints/best.ckpt"
    epoch = len(history.rows) - 1
    if resolved.monitor and best.exists():
        state = files.load_checkpoint(best)
        epoch = int(state["epoch"])
        module.load_state_dict(state["state_dict"])
    module.to("cpu")
    run.write_tensors("weights.safetensors", sharded.whole_weights(module.network))
    part = next((p for p in ("test", "valid") if p in parts), "train")
    found = evaluation.predict(module, inputs[part], parts[part])
    measured = evaluation.measure(found, resolved.at, resamples=config.bootstrap, seed=config.seed)
    notes = [*evaluation.notes(config, part), *said]
    run.write_json(
        "metrics.json",
        {"part": part, **measured, "best_epoch": epoch, "epochs": len(history.rows), "notes": notes},
    )
    run.write_tensors("predictions.safetensors", found.tensors())
    run.write_json("examples.json", {"rows": examples(parts[part])})
    run.write_json("done.json", {"seconds": round(seconds, 2)})


def examples(data: LabelData) -> list[dict[str, Any]]:
    """Return the first held-out rows with their texts."""
    return [
        {
            "row": i,
            "id": None if data.ids is None else data.ids[i],
            "text": None if data.texts is None else data.texts[i][:LONGEST],
        }
        for i in range(min(len(data), EXAMPLES))
    ]


def load(path: str | Path | RunFolder, *, shard_classes: bool = False) -> Model:
    """Load a finished run for prediction.

    Args:
        path: The run folder.
        shard_classes: Whether to split the labels over the processes of the default process group.

    Returns:
        The module with its weights, the feature map, the label names and the config.
    """
    run = path if isinstance(path, RunFolder) else RunFolder(path)
    if not run.exists():
        raise RunError(f"{run.path}: not a run folder: there is no config.yaml in it.")
    if not run.is_done():
        raise RunError(f"{run.path}: the run is not finished. Resume it with `lastlayer train`.")
    config = make(load_config(run / "config.yaml"), str(run / "config.yaml"))
    about, labels = run.read_json("data.json"), run.labels()
    try:
        features = FeatureMap(run.read_json("features.json"))
        known = {f.name for f in fields(Resolved)}
        values = {k: v for k, v in about["resolved"].items() if k in known}
        resolved = Resolved(**{**values, "at": tuple(values["at"])})
        reader = about["parts"]["train"]["source"]
    except DataError as error:
        raise RunError(f"{run.path}/{error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{run / 'data.json'}: damaged: {str(error)[:80]}.") from None
    if shard_classes:
        sharded.check(config)
    shard = sharded.split(len(labels)) if shard_classes else None
    module = build(config, resolved, features, len(labels), 1, shard)
    weights: dict[str, Tensor] = sharded.read_weights(run, module.network)
    try:
        module.network.load_state_dict(weights)
    except RuntimeError:
        raise RunError(f"{run / 'weights.safetensors'}: damaged: its shapes do not fit the config.") from None
    if not all(math.isfinite(float(w.sum())) for w in weights.values()):
        raise RunError(f"{run / 'weights.safetensors'}: holds numbers that are not finite.")
    module.eval()
    return Model(module, features, labels, config, reader)
