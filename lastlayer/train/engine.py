"""Train a run: from rows to a run folder, from the start or from where it was stopped."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lastlayer.data import DataError, LabelData, hide_labels, single_positive, split_rows
from lastlayer.runs import RunError, RunFolder, write_atomically
from lastlayer.runs.lock import NAME as LOCK
from lastlayer.runs.lock import locked
from lastlayer.train import card, checkpoint
from lastlayer.train import measure as evaluation
from lastlayer.train import start as beginning
from lastlayer.train.calibrate import Calibration
from lastlayer.train.config import Config, ConfigError, make
from lastlayer.train.count import CountModel
from lastlayer.train.decide import Decision
from lastlayer.train.explain import FILE as REASONS
from lastlayer.train.explain import reasons
from lastlayer.train.features import FeatureMap
from lastlayer.train.held_out import FEWEST, HeldOut, decided, not_enough
from lastlayer.train.loggers import check as check_loggers
from lastlayer.train.loggers import log_whole, open_loggers
from lastlayer.train.placement import Placement, placement_of
from lastlayer.train.resolved import Resolved
from lastlayer.train.serve import Scorer, TrainedModel

if TYPE_CHECKING:
    from lastlayer.train.encode.encoder import Encoder

TRAINERS = {"network": "lastlayer.train.fit_network", "exact": "lastlayer.train.fit_linear",
            "tree": "lastlayer.train.fit_tree"}  # fmt: skip
EXAMPLES, LONGEST = 2000, 2000


@dataclass(frozen=True)
class Job:
    """What the training of a model is given.

    Args:
        run: The run folder.
        config: The settings of the run.
        resolved: What "auto" became.
        features: The feature map, fitted to the training rows.
        parts: The rows with their labels: train, and valid and test if there are any.
        inputs: The features of the rows of each part, a float32 array or CSR matrix.
        placement: Where the labels are.
        last: The checkpoint to resume from.
        progress: Whether to show a progress bar.
        say: Called with the line of history.csv after each epoch.
        loggers: Lightning's loggers, which get the lines too.
        before: The model to start from.
    """

    run: RunFolder
    config: Config
    resolved: Resolved
    features: FeatureMap
    parts: dict[str, LabelData]
    inputs: dict[str, Any]
    placement: Placement
    last: Path | None
    progress: bool
    say: Callable[[dict[str, Any]], None]
    loggers: list[Any] = field(default_factory=list)
    before: TrainedModel | None = None


class OtherRunError(RunError):
    """The folder holds a run that is finished, or that has other settings or other data."""


class Fitted(NamedTuple):
    """What the training of a model returns."""

    scorer: Scorer
    best_epoch: int | None
    epochs: int | None
    resolved: Resolved | None = None  # where training chose more of it
    held: HeldOut | None = None  # scores of rows that the model had not seen; None: those of the validation part
    notes: tuple[str, ...] = ()
    calibrated: bool = False  # whether the scores are calibrated log-odds already
    seen_valid: bool = False  # whether the model was fitted to the validation rows


def prepare(parts: dict[str, LabelData], config: Config) -> dict[str, LabelData]:
    """Return train, valid and test rows: the parts of the file, or splits of it, with training labels hidden."""
    parts = {name: data for name, data in parts.items() if len(data)}
    if "all" in parts:
        data = parts.pop("all")
        want_test = 0.0 if "test" in parts else config.test_fraction
        train, test = split_rows(data, [1 - want_test, want_test], seed=config.seed, stratify="auto")
        parts = {"train": train, **({"test": test} if len(test) else {}), **parts}
    if "train" not in parts:
        raise DataError(f"no rows to train on: the data hold the parts {', '.join(parts) or 'none'}.")
    if "valid" not in parts and config.valid_fraction:
        fractions = [1 - config.valid_fraction, config.valid_fraction]
        train, valid = split_rows(parts["train"], fractions, seed=config.seed + 1, stratify="auto")
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


def train(
    parts: dict[str, LabelData],
    config: Config,
    out: str | Path,
    *,
    resume: bool = True,
    overwrite: bool = False,
    progress: bool = False,
    say: Callable[[dict[str, Any]], None] = lambda line: None,
    command: Sequence[str] | None = None,
    shard_classes: bool = False,
    data_parallel: int = 1,
    encoder: Encoder | None = None,
    start: str | Path | None = None,
) -> RunFolder:
    """Train, evaluate on the held-out part, and write the run folder.

    Args:
        parts: Rows by part, as :func:`lastlayer.data.read_parts` returns them; what is missing is split off.
        config: The choices of the run.
        out: The run folder. If it holds an unfinished run of the same config and data, that run is resumed from its
            last whole checkpoint. Anything else there is an error, and is left as it is.
        resume: Whether an unfinished run may be resumed.
        overwrite: Whether to replace the run that is in the folder, finished or not.
        progress: Whether to show a progress bar.
        say: Called with the line of history.csv after each epoch.
        command: The command to note in environment.json.
        shard_classes: Whether to split the labels over the processes of the default process group, each of which
            calls this with the same arguments. See :mod:`lastlayer.train.sharded`.
        data_parallel: With `shard_classes`, the number of groups of processes. Each group holds all labels and takes
            a share of the rows of a batch.
        encoder: A network of your own that turns rows into features, trained with the labels, or frozen with
            ``config.freeze``. ``config.encoder`` then only names it.
        start: A finished run to start from: its features and weights are taken over, and labels that it does not have
            are added behind its own. :func:`lastlayer.train.start.settings` returns settings that fit it.

    Returns:
        The run folder.
    """
    begun = time.perf_counter()
    if encoder is not None:
        config = replace(config, encoder=config.encoder or f"python:{type(encoder).__name__}")
    elif config.encoder:
        from lastlayer.train.encode import open_encoder

        encoder = open_encoder(config)  # before the folder is claimed: it may not be there
    placement = placement_of(shard_classes, data_parallel)
    _check_devices(config)
    check_loggers(config)
    placement.check(config)
    read = {name: data.fingerprint() for name, data in parts.items()}
    run, parts = placement.run_folder(out), prepare(parts, config)
    before = None
    if start is not None:
        if shard_classes:
            raise ConfigError("a run cannot be continued with --shard-classes.")
        before = beginning.opened(start, config)
        parts = beginning.with_labels(parts, before)
    resolved = Resolved.of(config, parts["train"])
    if "valid" not in parts:
        resolved = replace(resolved, monitor="")
    _check_weights(parts["train"], shard_classes)
    kind = config.model
    if not shard_classes and config.minibatches() is None:
        kind = "tree" if config.takes_tree(parts["train"].n_labels) else "exact"
    _check_choices(kind, parts, config)
    about = {**_about(parts, config, resolved), "read": read}
    about |= {} if start is None else {"start": str(start)}
    placement.compare(about)
    loggers = open_loggers(config, run) if config.loggers and placement.writes else []
    with ExitStack() as stack:
        last = placement.once(lambda: _enter(run, config, about, resume, overwrite, command, placement, stack))
        features = _features(parts["train"], config, run, encoder) if before is None else before.features
        placement.place(parts["train"].n_labels)
        _describe(run, config, features, parts["train"], about)
        inputs = {name: features(data) for name, data in parts.items()}
        job = Job(run, config, resolved, features, parts, inputs, placement, last, progress, say, loggers, before)
        fitted = importlib.import_module(TRAINERS[kind]).fit(job)
        if fitted is not None:
            if fitted.resolved is not None:
                job = replace(job, resolved=fitted.resolved)
                about["resolved"].update(asdict(fitted.resolved), **dict.fromkeys(("optimizer", "lr", "weight_decay")))
                run.write_json("data.json", about)
            count = placement.once(lambda: _count_model(job))
            model = TrainedModel(
                fitted.scorer, features, parts["train"].label_names, config, job.resolved, {}, count,
                shard=placement.shard,
            )  # fmt: skip
            _to_device(model)
            model.calibration, model.decision = _decided(job, model, fitted)
            _finish(job, model, fitted)
            run.write_json("done.json", {"seconds": round(time.perf_counter() - begun, 2)})
            log_whole(loggers, config, run, curves=kind != "network")  # the run is safe if a server is away
        placement.once(lambda: None)  # the folder is whole on return, in every process
    return run


def _features(data: LabelData, config: Config, run: RunFolder, encoder: Encoder | None) -> FeatureMap:
    """Return the feature map, fitted to the training rows."""
    if encoder is None:
        return FeatureMap.fit(data, config)
    from lastlayer.train.encode import maps

    return maps.fit(data, config, run, encoder)


def _to_device(model: TrainedModel) -> None:
    """Move an encoder back to the device on which it was trained, to score the held-out rows there."""
    if model.config.trains_encoder():
        from lastlayer.train.encode.encoder import best_device

        model.to(best_device(model.config.accelerator))


def _holds_something(path: Path) -> bool:
    """Whether a folder holds more than the lock and a first file that a killed process was writing."""

    def ours(name: str) -> bool:
        return name == LOCK or (name.startswith(".config.yaml.") and name.endswith(".tmp"))

    return path.exists() and (not path.is_dir() or not all(ours(inside.name) for inside in path.iterdir()))


def _describe(run: RunFolder, config: Config, features: FeatureMap, labels: LabelData, about: dict[str, Any]) -> None:
    """Write what is known before training: features, labels, and what "auto" became."""
    run.write_json("features.json", features.state)
    run.write_json("labels.json", {"names": list(labels.label_names), "train_counts": labels.label_counts()})
    about["resolved"]["n_features"] = features.n_features
    settled = config.settled(features.is_sparse)
    about["resolved"].update({name: getattr(settled, name) for name in ("optimizer", "lr", "weight_decay")})
    run.write_json("data.json", about)


def _count_model(job: Job) -> CountModel | None:
    if not job.resolved.k_per_row:
        return None
    labels = job.parts["train"]
    counts = labels.row_counts() / (job.resolved.observed or 1.0)
    return CountModel.fit(job.inputs["train"], counts, labels.n_labels, weight=labels.weights, seed=job.config.seed)


def _decided(job: Job, model: TrainedModel, fitted: Fitted) -> tuple[Calibration | None, Decision]:
    """Calibrate the probabilities and tune the thresholds on held-out rows."""
    held = fitted.held
    if held is None and "valid" in job.parts and job.placement.shard is None and not fitted.seen_valid:
        held = HeldOut.of(model, job.inputs["valid"], job.parts["valid"])
    return decided(held, replace(job.config, calibrate=False) if fitted.calibrated else job.config, job.resolved)


def _check_weights(labels: LabelData, shard_classes: bool) -> None:
    """Refuse row weights where they would have no effect."""
    if labels.weights is not None and shard_classes:
        raise ConfigError("the rows have weights, which sharded classes do not use. Leave the column of weights out.")
    if labels.weights is not None and not labels.weights.any():
        raise ConfigError("the training rows must have a weight above 0 somewhere, got only zeros.")


def _check_choices(kind: str, parts: dict[str, LabelData], config: Config) -> None:
    """Refuse what cannot be chosen or tuned, before anything is trained."""
    if kind == "tree" and config.monitor != "auto":
        raise ConfigError(
            f"`monitor` must be auto for label trees, which have nothing to choose by it, got {config.monitor!r}. "
            "Use --tree off for a flat model."
        )
    out_of_fold = kind == "exact" and not config.decide.startswith("recall=")  # a promise needs rows that nothing saw
    if config.decide in ("auto", "top_k") or out_of_fold:
        return
    if kind == "tree" and config.refit == "true":
        raise ConfigError(
            f"`refit` must be auto or false for label trees with `decide` {config.decide}: thresholds are tuned on "
            "validation rows that the trees have not seen."
        )
    if "valid" not in parts or len(parts["valid"].indices) < FEWEST:
        raise ConfigError(not_enough(config.decide))


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
    overwrite: bool,
    command: Sequence[str] | None,
    placement: Placement,
    stack: ExitStack,
) -> Path | None:
    """Lock and claim the folder; return the checkpoint to resume from, if there is one. Nothing is overwritten."""
    if not run.exists() and _holds_something(run.path):
        raise RunError(f"{run.path}: is not empty and not a run. Choose another folder.")
    if placement.locks:
        stack.enter_context(locked(run.path))
        if overwrite:
            run.clear()
    if not run.exists():
        try:
            write_atomically(run / "config.yaml", config.to_yaml())
        except OSError as error:
            raise RunError(f"{run.path}: cannot be written: {error.strerror}.") from None
        run.write_environment(command)
        return None
    if run.is_done():
        raise OtherRunError(f"{run.path}: holds a finished run. Choose another folder, or use --overwrite.")
    if not resume:
        raise RunError(f"{run.path}: holds an unfinished run. Resume it, or choose another folder.")
    before = make(run.config(), str(run / "config.yaml"))
    differing = [f.name for f in fields(Config) if getattr(before, f.name) != getattr(config, f.name)]
    if differing:
        raise OtherRunError(
            f"{run.path}: holds an unfinished run with another `{differing[0]}`. Choose another folder, or use "
            "--overwrite."
        )
    if (run / "data.json").exists():
        stored = run.read_json("data.json")
        seen = stored.get("parts") or {}
        if stored.get("start") != about.get("start"):
            raise OtherRunError(
                f"{run.path}: holds an unfinished run with another start. Choose another folder, or use --overwrite."
            )
        if {k: (v or {}).get("fingerprint") for k, v in seen.items()} != {
            k: v["fingerprint"] for k, v in about["parts"].items()
        }:
            raise OtherRunError(
                f"{run.path}: holds an unfinished run on other data. Choose another folder, or use --overwrite."
            )
    last = run / "checkpoints/last.ckpt"
    if not last.exists():
        return None
    placement.check_checkpoints(run)
    checkpoint.read(last)  # a damaged one is an error now, before anything is written
    return last


def _finish(job: Job, model: TrainedModel, fitted: Fitted) -> None:
    """Write the model, measure the held-out rows, and write the rest of the folder."""
    run, config, parts, inputs = job.run, job.config, job.parts, job.inputs
    model.scorer.save(run)
    if model.count is not None:
        model.count.save(run)
    if model.calibration is not None:
        model.calibration.save(run)
    if model.decision is not None:
        model.decision.save(run)
    part = next((p for p in ("test", "valid") if p in parts), "train")
    predictions = evaluation.predict(model, inputs[part], parts[part])
    measured = evaluation.measure(predictions, job.resolved.at, resamples=config.bootstrap, seed=config.seed)
    unknown = {name: model.features.unknown_rows(x) for name, x in inputs.items()}
    said = [model.features.note(n, len(parts[name]), f"rows of the {name} part") for name, n in unknown.items()]
    said += [evaluation.calibration_note(model, inputs[part], {**measured, "labels": parts[part]}, job.resolved.at)]
    said += [None if model.decision is None or model.decision.threshold is None else f"{model.decision.words()}."]
    said += [evaluation.weight_note(parts[part])]
    notes = [*evaluation.notes(config, part), *fitted.notes, *(note for note in said if note)]
    ends = {"best_epoch": fitted.best_epoch, "epochs": fitted.epochs, "notes": notes}
    run.write_json("metrics.json", {"part": part, **measured, **ends})
    stored = predictions.tensors()
    run.write_tensors("predictions.safetensors", stored)
    run.write_json("examples.json", {"rows": examples(parts[part])})
    if job.placement.shard is None:
        why = reasons(model, inputs[part], stored, parts["train"].label_counts().tolist())
        if why:
            run.write_json(REASONS, why)
    job.placement.once(lambda: card.write(run, model))


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
