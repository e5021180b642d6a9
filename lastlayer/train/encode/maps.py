"""Encoders in the place of the feature map of a run: trained with the labels, or frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lastlayer.data import DataError, LabelData
from lastlayer.runs import RunError, RunFolder
from lastlayer.train.config import Config, make
from lastlayer.train.encode import source
from lastlayer.train.encode.encoder import Encoder, best_device, weights_digest
from lastlayer.train.encode.frozen import Cache, home
from lastlayer.train.features import FeatureMap

FOLDER = "encoder"


class EncoderRows(FeatureMap):
    """Maps rows to the input of an encoder that is trained with the labels.

    Args:
        encoder: The encoder.
    """

    def __init__(self, encoder: Encoder) -> None:
        self.encoder, self.kind, self.n_features = encoder, "encoder", encoder.width
        self.state = {"kind": self.kind, "n_features": encoder.width, "encoder": encoder.describe()}

    @property
    def is_sparse(self) -> bool:
        """Whether the features are a CSR matrix: they never are."""
        return False

    @property
    def is_text(self) -> bool:
        """Whether the rows are texts."""
        return bool(self.encoder.is_text)

    def __call__(self, data: LabelData) -> Any:
        """Return the rows as the encoder takes them."""
        return self.encoder.rows(data)

    def unknown_rows(self, x: Any) -> int:
        """Return 0: an encoder knows every text."""
        return 0


class FrozenFeatures(FeatureMap):
    """Maps rows to the features of an encoder that is not trained, and scales them.

    Args:
        state: As ``features.json`` holds it: the width, what identifies the encoder, and the scales.
        config: The settings of the run.
        encoder: The encoder; None opens it when it is needed.
        cache: Where the features are kept.
    """

    def __init__(
        self, state: dict[str, Any], config: Config, encoder: Encoder | None = None, cache: Cache | None = None
    ) -> None:
        self.state, self.config, self._encoder, self.cache = state, config, encoder, cache
        try:
            self.kind, self.n_features = "frozen", int(state["n_features"])
            self.about, self._is_text = dict(state["encoder"]), bool(state["is_text"])
            self.scaled = FeatureMap(state["scaled"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"features.json: damaged: {error}.") from None
        self.device = best_device(config.accelerator)

    @property
    def is_sparse(self) -> bool:
        """Whether the features are a CSR matrix: they never are."""
        return False

    @property
    def is_text(self) -> bool:
        """Whether the rows are texts."""
        return self._is_text

    def __call__(self, data: LabelData) -> Any:
        """Return the scaled features."""
        return self.scaled.transform(features_of(self.opened(), data, self.config, self.cache))

    def described(self) -> dict[str, Any]:
        """Return the state: what identifies the encoder, and the scales of its features."""
        return self.state

    def transform(self, x: Any) -> Any:
        """Scale features of the encoder."""
        return self.scaled.transform(x)

    def unknown_rows(self, x: Any) -> int:
        """Return 0: an encoder knows every text."""
        return 0

    def to(self, device: Any) -> None:
        """Move the encoder to a device."""
        self.device = device
        if self._encoder is not None:
            self._encoder.to(device)

    def opened(self) -> Encoder:
        """Return the encoder, which is opened on first use; it must be the one that the run was trained with."""
        if self._encoder is None:
            folder = self.about.get("folder")
            if folder is None and not str(self.about.get("name", "")).startswith(source.BARE):
                raise RunError(
                    f"the run needs the encoder {self.about.get('name')}, which was given in Python. "
                    "Pass it: load(run, encoder=...)."
                )
            if folder is not None and not Path(folder).is_dir():
                raise RunError(
                    f"the run needs its encoder, the folder {folder}, which is not there. Put it back, or name "
                    "where it is now: load(run, encoder=FOLDER), --encoder FOLDER."
                )
            found = (
                source.open_encoder(self.config) if folder is None else source.open_folder(Path(folder), self.config)
            )
            same_encoder(self.about, _frozen_about(found), "the run")
            self._encoder = found.to(self.device)
        return self._encoder


def fit(data: LabelData, config: Config, run: RunFolder, encoder: Encoder) -> FeatureMap:
    """Put an encoder in the place of the feature map; compute the features of the training rows if it is frozen."""
    about = _frozen_about(encoder) if config.freeze else encoder.describe()
    before = run.read_optional("features.json").get("encoder")
    if before:
        same_encoder(before, about, f"{run.path}: the unfinished run")
    if not config.freeze:
        return EncoderRows(encoder)
    cache = Cache.of(Path(config.cache) if config.cache else home(run.path), about)
    encoder.to(best_device(config.accelerator))
    found = features_of(encoder, data, config, cache)
    scaled = FeatureMap.fit(LabelData(None, found, data.indptr, data.indices, data.label_names), config)
    state = {
        "kind": "frozen",
        "n_features": encoder.width,
        "is_text": encoder.is_text,
        "encoder": about,
        "scaled": scaled.state,
    }
    return FrozenFeatures(state, config, encoder, cache)


def _frozen_about(encoder: Encoder) -> dict[str, Any]:
    """Return what identifies a frozen encoder: its weights too, which do not change."""
    return {**encoder.describe(), "weights": weights_digest(encoder)}


def load(run: RunFolder, state: dict[str, Any], encoder: Any = None) -> FeatureMap:
    """Return the map of a finished run.

    Args:
        run: The run folder.
        state: Its features.json.
        encoder: The encoder if it was given in Python, or the folder of a frozen one that has moved.
    """
    config = make(run.config(), str(run / "config.yaml"))
    given = encoder if isinstance(encoder, Encoder) else None
    about = state.get("encoder") or {}
    if state["kind"] == "frozen":
        if encoder is not None and given is None:
            state = {**state, "encoder": {**about, "folder": str(encoder)}}
        return FrozenFeatures(state, config, given)
    if given is None and not (run / FOLDER / "config.json").exists():
        raise RunError(
            f"{run.path}: was trained with the encoder {about.get('name')}, which was given in Python. "
            "Pass it: load(run, encoder=...)."
        )
    opened = source.open_folder(run / FOLDER, config) if given is None else given
    if opened.width != int(state["n_features"]):
        place = run / FOLDER if given is None else "the given one"
        raise RunError(
            f"{run.path}: was trained with an encoder of width {state['n_features']}, that of {place} is "
            f"{opened.width}. Put the first one back."
        )
    if given is not None:
        given.restore(run / FOLDER)
    return EncoderRows(opened)


def features_of(encoder: Encoder, data: LabelData, config: Config, cache: Cache | None) -> np.ndarray:
    """Return the features of rows, from the cache as far as it has them."""
    from lastlayer.train.encode.frozen import computed

    if cache is None:
        return computed(encoder, data, config)
    return cache.features(encoder, data, config)


def same_encoder(before: dict[str, Any], now: dict[str, Any], who: str) -> None:
    """Refuse an encoder that is not the one that a run was started with."""
    from lastlayer.train.engine import OtherRunError

    if before.get("width") != now.get("width"):
        raise OtherRunError(
            f"{who} has an encoder of width {before.get('width')}, that of {now.get('folder', now.get('name'))} "
            f"is {now.get('width')}. Put the first one back, or choose another run folder."
        )
    differing = [name for name in before if name != "folder" and before[name] != now.get(name)]
    if differing:
        raise OtherRunError(
            f"{who} has another encoder: its `{differing[0]}` is not that of {now.get('folder', now.get('name'))}. "
            "Put the first one back, or choose another run folder."
        )
