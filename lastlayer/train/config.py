"""All settings of a training run in one flat record, from a YAML file or from flags."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from lastlayer.runs.files import RunError, read_yaml
from lastlayer.train.decision_rule import parse as parse_decision
from lastlayer.train.losses import LOSSES, problem_with

_LISTS = {"hidden": int, "at": int, "loggers": str}
_CHOICES = {
    "model": ("network",),
    "labels": ("complete", "incomplete"),
    "vectorizer": ("tfidf", "hashing"),
    "analyzer": ("auto", "word", "char", "char_wb"),
    "scale": ("auto", "none", "l2", "standard"),
    "optimizer": ("auto", "adamw", "sgd"),
    "schedule": ("cosine", "constant"),
    "precision": ("32", "bf16", "16"),
    "accelerator": ("auto", "cpu", "gpu", "mps"),
    "probability": ("auto", "sigmoid", "lml"),
    "solver": ("auto", "dual", "sgd"),
    "label_weight": ("none", "balanced"),
    "refit": ("auto", "true", "false"),
    "pooling": ("mean", "first", "last"),
}
_RULES = {
    "k": ("a positive number", 1e-9, math.inf, ("auto", "predicted")),
    "observed": ("a number from 0 to below 1", 0.0, 1.0, ("auto",)),
    "C": ("a positive number", 1e-300, math.inf, ("auto",)),
    "tree": ("a whole number of trees", 1, 1000, ("auto", "off")),
    "lr": ("a positive number", 1e-300, math.inf, ("auto",)),
    "weight_decay": ("a number of at least 0", 0.0, math.inf, ("auto",)),
}
_BOUNDS = {
    "n_features": (1, 100_000_000), "min_rows": (1, math.inf), "dropout": (0, 0.99),
    "momentum": (0, 1), "epochs": (1, 1_000_000),
    "batch_size": (1, 1 << 24), "warmup": (0, 1), "clip_norm": (0, math.inf), "devices": (1, 4096),
    "seed": (0, 2**31 - 1), "patience": (0, math.inf), "valid_fraction": (0, 0.9), "test_fraction": (0, 0.9),
    "keep": (0, 1), "bootstrap": (0, 100_000), "max_parameters": (1, math.inf),
    "max_length": (4, 1 << 20), "layer_decay": (0.001, 1), "head_rate": (0.001, 100_000), "accumulate": (1, 1 << 20),
}  # fmt: skip


RETIRED = ("count_weight",)  # fields of version 0.1 that no longer mean anything; their values are ignored


class ConfigError(ValueError):
    """A field with a value that it cannot have. The message is one line and names the field."""


@dataclass(frozen=True)
class Config:
    """The settings of a run. Each field is a flag of ``lastlayer train`` and a key of its YAML file.

    Example:
        >>> from lastlayer.train import Config
        >>> Config(loss="binary", hidden=(256,)).epochs
        20
    """

    model: str = field(default="network", metadata={"help": "kind of model"})
    loss: str = field(
        default="auto", metadata={"help": "name of the loss; auto: the best of a few on validation rows, or lml"}
    )
    loss_options: dict[str, Any] = field(default_factory=dict, metadata={"help": "options of the loss"})
    labels: str = field(default="complete", metadata={"help": "incomplete: a label that is not given may still apply"})
    k: str = field(
        default="auto",
        metadata={"help": "expected labels per row; auto: the mean; predicted: by a regression for each row"},
    )
    observed: str = field(
        default="auto",
        metadata={"help": "share of true labels that were recorded; auto: mean labels / k if incomplete"},
    )
    probability: str = field(default="auto", metadata={"help": "how scores become probabilities"})
    hidden: tuple[int, ...] = field(default=(), metadata={"help": "widths of the hidden layers; none: a linear model"})
    dropout: float = field(default=0.0, metadata={"help": "dropout after each hidden layer"})
    vectorizer: str = field(default="tfidf", metadata={"help": "how texts become features"})
    n_features: int = field(
        default=20000, metadata={"help": "largest number of words (tfidf), or number of buckets (hashing)"}
    )
    analyzer: str = field(
        default="auto", metadata={"help": "what a text is made of; auto: char without spaces, else word"}
    )
    ngrams: str = field(
        default="auto", metadata={"help": "lengths of sequences, e.g. 2 or 2-4; auto: 1, or 1-3 of char"}
    )
    min_rows: int = field(default=2, metadata={"help": "smallest number of rows in which a word must occur (tfidf)"})
    scale: str = field(
        default="auto", metadata={"help": "scaling of given features; auto: l2 if sparse, standard if dense"}
    )
    solver: str = field(
        default="auto",
        metadata={
            "help": "dual: exact, for squared_hinge and binary on linear models, which auto takes; sgd: minibatches"
        },
    )
    C: str = field(
        default="auto",
        metadata={"help": "cost of errors for the exact solver; auto: the best of a path on validation rows"},
    )
    label_weight: str = field(
        default="none", metadata={"help": "balanced: rows with and without a label weigh the same (exact solver)"}
    )
    refit: str = field(
        default="auto",
        metadata={"help": "fit again to training and validation rows after choosing; auto: with the exact solver"},
    )
    tree: str = field(
        default="auto",
        metadata={"help": "label trees: how many, or off; auto: 3 from 4,000 labels on, for linear models"},
    )
    hierarchy: str = field(default="", metadata={"help": "file of a tree of the labels, which is used as it is"})
    encoder: str = field(
        default="", metadata={"help": "folder of a pretrained text or image model, or its name with `download`"}
    )
    images: str = field(default="", metadata={"help": "column of image files, for an image model as `encoder`"})
    freeze: bool = field(
        default=False, metadata={"help": "compute the features of the encoder once, and train a model on top of them"}
    )
    download: bool = field(default=False, metadata={"help": "allow the network to be asked for `encoder` by name"})
    scratch: bool = field(default=False, metadata={"help": "start the encoder from random weights"})
    pooling: str = field(default="mean", metadata={"help": "tokens that stand for a text: mean of all, first or last"})
    max_length: int = field(default=256, metadata={"help": "largest number of tokens per text; the rest is cut off"})
    augment: bool = field(default=True, metadata={"help": "shift, scale and mirror images at random in training"})
    layer_decay: float = field(
        default=1.0, metadata={"help": "rate of each layer of the encoder, as a share of that of the layer above it"}
    )
    head_rate: float = field(
        default=10.0, metadata={"help": "rate of the layers on top of the encoder, as a multiple of `lr`"}
    )
    cache: str = field(
        default="", metadata={"help": "folder of the features of frozen encoders, which runs may share; none: the run"}
    )
    calibrate: bool = field(default=True, metadata={"help": "calibrate the probability of each label on held-out rows"})
    decide: str = field(
        default="auto",
        metadata={"help": "how probabilities become label sets; auto: micro_f1, or top_k if labels are incomplete"},
    )
    optimizer: str = field(
        default="auto", metadata={"help": "optimiser; auto: sgd for linear models on sparse rows, else adamw"}
    )
    lr: str = field(default="auto", metadata={"help": "peak learning rate; auto depends on the optimiser"})
    weight_decay: str = field(
        default="auto", metadata={"help": "weight decay, which biases do not have; auto depends on the optimiser"}
    )
    momentum: float = field(default=0.9, metadata={"help": "momentum of sgd"})
    epochs: int = field(default=20, metadata={"help": "passes over the training rows"})
    batch_size: int = field(default=128, metadata={"help": "rows per step and device"})
    accumulate: int = field(default=1, metadata={"help": "batches whose gradients make one step"})
    schedule: str = field(default="cosine", metadata={"help": "schedule of the learning rate after warm-up"})
    warmup: float = field(default=0.05, metadata={"help": "share of the steps during which the learning rate rises"})
    clip_norm: float = field(default=0.0, metadata={"help": "largest norm of the gradient; 0: no limit"})
    precision: str = field(default="32", metadata={"help": "precision of the arithmetic"})
    accelerator: str = field(default="auto", metadata={"help": "kind of device"})
    devices: int = field(default=1, metadata={"help": "number of devices, which share the rows of a step (DDP)"})
    seed: int = field(default=0, metadata={"help": "seed of splits, order of rows, dropout and initial weights"})
    monitor: str = field(default="auto", metadata={"help": "validation metric that chooses the best epoch"})
    patience: int = field(default=0, metadata={"help": "stop after this many epochs without improvement; 0: never"})
    at: tuple[int, ...] = field(default=(1, 3, 5), metadata={"help": "the k of precision, recall and nDCG"})
    valid_fraction: float = field(
        default=0.1, metadata={"help": "share of the training rows for validation, if no validation part is given"}
    )
    test_fraction: float = field(
        default=0.2, metadata={"help": "share of the rows for testing, if no test part is given"}
    )
    keep: float = field(default=1.0, metadata={"help": "keep each training label with this probability (experiments)"})
    single_positive: bool = field(default=False, metadata={"help": "keep one training label per row (experiments)"})
    loggers: tuple[str, ...] = field(default=(), metadata={"help": "additional loggers; history.csv is always written"})
    bootstrap: int = field(
        default=200, metadata={"help": "number of bootstrap resamples for the intervals; 0: no intervals"}
    )
    max_parameters: int = field(default=500_000_000, metadata={"help": "refuse a network with more parameters"})

    def __post_init__(self) -> None:
        kinds = get_type_hints(Config)
        for item in dataclasses.fields(self):
            object.__setattr__(self, item.name, _checked(item.name, getattr(self, item.name), kinds[item.name]))
        if self.valid_fraction + self.test_fraction >= 1:
            raise ConfigError("`valid_fraction` and `test_fraction` must sum to less than 1.")
        if problem := problem_with(self.loss, self.loss_options):
            raise ConfigError(problem)
        if self.decide != "auto":
            try:
                parse_decision(self.decide)
            except ValueError as error:
                raise ConfigError(str(error)) from None
        self._check_encoder()
        self._check_solver()

    def _check_encoder(self) -> None:
        """Refuse settings of an encoder without one, and what cannot be done with one."""
        if not self.encoder:
            for name in ("images", "freeze", "download", "scratch"):
                if getattr(self, name):
                    raise ConfigError(f"`{name}` needs an encoder. Name its folder with `encoder`.")
        elif not self.freeze and self.k == "predicted":
            raise ConfigError("`k` must be auto or a number with an encoder that is trained; `freeze` can predict it.")

    def trains_encoder(self) -> bool:
        """Whether the run trains an encoder together with the labels."""
        return bool(self.encoder) and not self.freeze

    def _check_solver(self) -> None:
        """Refuse settings that the exact solver cannot have."""
        only = self.loss != "auto" and LOSSES[self.loss].exact == "only"
        why = self.minibatches()
        if only and why:
            raise ConfigError(
                f"`loss` must be binary, or another one that minibatches can train, {why}; got {self.loss!r}."
            )
        if why and (self.hierarchy or self.tree not in ("auto", "off")):
            raise ConfigError(f"`tree` must be auto or off, and `hierarchy` left out, {why}.")
        if self.solver == "dual" and why:
            raise ConfigError(f"`solver` must be auto or sgd {why}, got 'dual'.")

    def minibatches(self) -> str | None:
        """Return why the model is trained by minibatches, in a few words; None if the exact solver takes part.

        That solver fits ``squared_hinge`` and ``binary``, and the candidates of ``auto``, for linear models. Settings
        of an optimiser are settings of minibatches.
        """
        if self.trains_encoder():
            return "with an encoder"
        if self.hidden:
            return "with hidden layers"
        if self.loss != "auto" and not LOSSES[self.loss].exact:
            return f"for the loss {self.loss}"
        if self.solver == "sgd":
            return "with `solver` sgd"
        if self.loss_options:
            return "with `loss_options`"
        if self.devices > 1 or self.accelerator not in ("auto", "cpu"):
            return "on other devices than one CPU"
        plain = Config.__dataclass_fields__
        for name in ("optimizer", "lr", "weight_decay", "precision", "clip_norm", "patience", "accumulate"):
            if getattr(self, name) != plain[name].default:
                return f"with a given `{name}`"
        return None

    def takes_tree(self, n_labels: int) -> bool:
        """Whether the model is made of label trees: one is given, or asked for, or the labels are very many."""
        if self.minibatches():
            return False
        if self.hierarchy or self.tree != "auto":
            return bool(self.hierarchy) or self.tree != "off"
        from lastlayer.train.linear import choose_tree

        return choose_tree(n_labels)

    def settled(self, sparse: bool) -> Config:
        """Return the config of minibatches with optimiser, learning rate and weight decay chosen.

        A linear model on sparse rows is trained by plain SGD. Adam moves the weights of rare features as far as those
        of common ones, so they fit noise (bibtex: recall@5 of held-out rows is 58 with AdamW, 66 with SGD).
        """
        if self.loss != "auto" and LOSSES[self.loss].exact == "only":
            return self
        linear = (
            sparse
            and not self.hidden
            and not self.encoder
            and not (self.loss != "auto" and LOSSES[self.loss].scale_falls)
        )
        optimizer = self.optimizer if self.optimizer != "auto" else "sgd" if linear else "adamw"
        rate, decay = ("10.0", "1e-05") if optimizer == "sgd" else ("0.005" if self.hidden else "0.05", "0.01")
        if self.trains_encoder():
            rate, decay = ("0.05", "1e-05") if optimizer == "sgd" else ("0.0005" if self.scratch else "5e-05", "0.01")
        return dataclasses.replace(
            self,
            solver="sgd",
            tree="off",
            hierarchy="",
            optimizer=optimizer,
            lr=rate if self.lr == "auto" else self.lr,
            weight_decay=decay if self.weight_decay == "auto" else self.weight_decay,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}

    def to_yaml(self) -> bytes:
        """Return the fields as a YAML file."""
        import yaml

        return str(yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)).encode()


def load(path: str | Path) -> dict[str, Any]:
    """Read a YAML file of fields; tags that construct objects, and aliases, are refused."""
    try:
        return read_yaml(Path(path))
    except RunError as error:
        raise ConfigError(str(error)) from None


def make(values: dict[str, Any], where: str = "config") -> Config:
    """Make a Config from plain values; the error for an unknown field names the nearest known one."""
    import difflib

    known = [item.name for item in dataclasses.fields(Config)]
    values = {name: value for name, value in values.items() if name not in RETIRED}
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise ConfigError(f"{where}: unknown field {name!r}." + (f" Did you mean {near[0]!r}?" if near else ""))
    try:
        return Config(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def accepts(name: str) -> str:
    """Return what a field accepts, in a few words, for the help of its flag."""
    if name == "loss":
        return ", ".join(["auto", *LOSSES])
    if name in _CHOICES:
        return ", ".join(_CHOICES[name])
    if name in _RULES:
        rule, _, _, words = _RULES[name]
        return ", ".join([rule, *words])
    if name in _BOUNDS:
        low, high = _BOUNDS[name]
        return f"at least {low}" if high == math.inf else f"{low} to {high}"
    kind = get_type_hints(Config)[name]
    return {
        "hidden": "whole numbers, e.g. 256,128", "at": "whole numbers, e.g. 1,3,5",
        "loggers": "csv, tensorboard, mlflow, wandb",
        "loss_options": "name=value,name=value", "ngrams": "a length, a range, auto",
        "monitor": "auto, valid_loss, precision@K, recall@K, ndcg@K, micro_f1, macro_f1, sample_f1, hamming_loss, "
        "exact_match",
        "hierarchy": "JSON, or lines of name and name above",
        "encoder": "a folder or a name", "images": "name of a column", "cache": "a folder",
        "decide": "auto, micro_f1, macro_f1, recall=P, precision=P, top_k",
    }.get(name, "true, false" if kind is bool else "a word")  # fmt: skip


def _plain(value: Any) -> Any:
    """Return numbers and arrays of NumPy, which a search over settings draws, as those of Python."""
    return value.tolist() if hasattr(value, "tolist") else value


def _checked(name: str, value: Any, kind: Any) -> Any:
    value = _plain(value)
    if name in _RULES:
        return _number_or_word(name, value)
    if name in _LISTS:
        return _list(name, value)
    if name == "loss_options":
        return _options(value)
    if name == "refit" and isinstance(value, bool):
        value = str(value).lower()
    if name == "ngrams":
        return _ngrams(value)
    if kind is bool:
        return _switch(name, value)
    if kind in (int, float):
        return _number(name, value, kind)
    if not isinstance(value, str) and not (name == "precision" and isinstance(value, int)):
        raise ConfigError(f"`{name}` must be a word, got {value!r}.")
    value = str(value)
    if name in _CHOICES and value not in _CHOICES[name]:
        raise ConfigError(f"`{name}` must be one of {', '.join(_CHOICES[name])}, got {value!r}.")
    return value


def _number(name: str, value: Any, kind: type) -> Any:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise ConfigError(f"`{name}` must be a number, got {value!r}.") from None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"`{name}` must be a number, got {value!r}.")
    low, high = _BOUNDS[name]
    if not low <= value <= high or (kind is int and value != int(value)):
        raise ConfigError(
            f"`{name}` must be a {'whole ' if kind is int else ''}number from {low} to {high}, got {value}."
        )
    return kind(value)


def _ngrams(value: Any) -> str:
    """Check a range of lengths: ``auto``, ``3`` for 1 to 3, or ``2-4``."""
    text = str(value).replace(" ", "")
    low, _, high = text.rpartition("-")
    bounds = [int(v) for v in (low or "1", high) if v.isascii() and v.isdigit() and len(v) < 3]
    if text != "auto" and (len(bounds) != 2 or not 1 <= bounds[0] <= bounds[1] <= 10):
        raise ConfigError(f"`ngrams` must be auto, a length from 1 to 10 or a range such as 2-4, got {value!r}.")
    return text


def _switch(name: str, value: Any) -> bool:
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    switch = value if isinstance(value, bool) else words.get(str(value).lower())
    if switch is None:
        raise ConfigError(f"`{name}` must be true or false, got {value!r}.")
    return switch


def _list(name: str, value: Any) -> tuple[Any, ...]:
    kind = _LISTS[name]
    items = value.replace(",", " ").split() if isinstance(value, str) else value
    if isinstance(items, int) and not isinstance(items, bool):
        items = [items]
    if not isinstance(items, list | tuple):
        raise ConfigError(f"`{name}` must be a list, got {value!r}.")
    if kind is str:
        if not set(items) <= {"csv", "tensorboard", "mlflow", "wandb"}:
            raise ConfigError(f"`{name}` must hold csv, tensorboard, mlflow or wandb, got {value!r}.")
        return tuple(items)
    try:
        out = tuple(int(str(v)) for v in items)
    except ValueError:
        raise ConfigError(f"`{name}` must be a list of whole numbers, got {value!r}.") from None
    if any(v < 1 for v in out) or (name == "at" and not out):
        raise ConfigError(f"`{name}` must be a list of positive numbers, got {value!r}.")
    return tuple(sorted(set(out))) if name == "at" else out


def _number_or_word(name: str, value: Any) -> str:
    rule, low, high, words = _RULES[name]
    if isinstance(value, str) and value in words:
        return value
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (low <= number < high) or (name == "tree" and number % 1):
        raise ConfigError(f"`{name}` must be {rule} or {' or '.join(words)}, got {value!r}.")
    return repr(number)


def _options(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        pairs = [part.partition("=") for part in value.split(",") if part.strip()]
        if not all(equals and name.strip() for name, equals, _ in pairs):
            raise ConfigError(f"`loss_options` must be name=value,name=value, got {value!r}.")
        value = {name.strip(): _literal(text.strip()) for name, _, text in pairs}
    if not isinstance(value, dict):
        raise ConfigError(f"`loss_options` must hold names and values, got {value!r}.")
    options = {name: _plain(item) for name, item in value.items()}
    for name, item in options.items():
        if not isinstance(name, str) or not isinstance(item, str | int | float | bool):
            raise ConfigError(f"`loss_options` must hold names and plain values, got {name!r}: {item!r}.")
    return options


def _literal(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
