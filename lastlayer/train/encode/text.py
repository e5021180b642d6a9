"""Text models of transformers as encoders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lastlayer.data import DataError, LabelData
from lastlayer.train.config import Config, ConfigError
from lastlayer.train.encode import source
from lastlayer.train.encode.encoder import Encoder

AT_ONCE = 4096  # texts that the tokenizer is given at a time
SHIFTED = ("roberta", "xlm-roberta", "camembert", "longformer", "mpnet")  # positions start behind that of the padding


@dataclass(frozen=True)
class Tokens:
    """Texts as numbers of tokens, each as long as it is.

    Args:
        values: What the model takes per token (``input_ids``, perhaps ``token_type_ids``), all texts one after another.
        indptr: Where each text starts in `values`; one entry more than there are texts.
        padding: What fills up short texts, for each of `values`.
        left: Whether short texts are filled up on the left.
    """

    values: dict[str, np.ndarray]
    indptr: np.ndarray
    padding: dict[str, int]
    left: bool = False

    @property
    def shape(self) -> tuple[int]:
        """The number of texts."""
        return (len(self.indptr) - 1,)

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each text."""
        return np.diff(self.indptr)

    def __getitem__(self, rows: Any) -> Tokens:
        rows = np.arange(self.shape[0])[rows]
        counts, place = self._place(rows)
        indptr = np.concatenate([[0], np.cumsum(counts)])
        return Tokens({n: v[place] for n, v in self.values.items()}, indptr, self.padding, self.left)

    def _place(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the lengths of texts, and where their tokens are."""
        counts = self.lengths[rows]
        start = np.repeat(self.indptr[rows] - (np.cumsum(counts) - counts), counts)
        return counts, start + np.arange(counts.sum())

    def inputs(self, rows: np.ndarray) -> dict[str, Tensor]:
        """Return the input of the model, as wide as the longest of the texts."""
        counts, place = self._place(rows)
        width = max(int(counts.max(initial=0)), 1)
        inside = np.arange(width) < counts[:, None]
        if self.left:
            inside = inside[:, ::-1]
        out = {}
        for name, values in self.values.items():
            filled = np.full((len(rows), width), self.padding[name], np.int64)
            filled[inside] = values[place]
            out[name] = torch.from_numpy(filled)
        mask = inside.copy()
        mask[counts == 0, -1 if self.left else 0] = True  # a text without tokens is one token of padding
        out["attention_mask"] = torch.from_numpy(mask.astype(np.int64))
        return out


class TextEncoder(Encoder):
    """A model of transformers, whose hidden states are pooled to one vector per text.

    Args:
        model: A model that returns ``last_hidden_state``.
        tokenizer: Its tokenizer.
        pooling: ``"mean"`` over the tokens, ``"first"`` or ``"last"`` token.
        max_length: The largest number of tokens; longer texts are cut off.
        about: What identifies the model.
    """

    is_text = True

    def __init__(
        self, model: Any, tokenizer: Any, *, pooling: str, max_length: int, about: dict[str, Any] | None = None
    ) -> None:
        width = next((w for n in ("hidden_size", "d_model", "dim") if (w := getattr(model.config, n, None))), 0)
        super().__init__(int(width))
        self.model, self.tokenizer, self.pooling, self.about = model, tokenizer, pooling, about or {}
        self.max_length = max_length
        if model.config.is_encoder_decoder:  # the decoder stays as it is, since nothing passes through it
            model.requires_grad_(False)
            model.get_encoder().requires_grad_(True)

    @classmethod
    def open(cls, folder: Path, config: Config, *, scratch: bool = False) -> TextEncoder:
        """Open the model and the tokenizer of a folder."""
        model = open_model(folder, scratch)
        if model.main_input_name == "pixel_values":
            raise ConfigError(f"{folder}: holds an image model. Name the column of image files (--images COLUMN).")
        tokenizer = _tokenizer(folder)
        held = model.get_input_embeddings()
        if held is not None and len(tokenizer) > len(held.weight):
            raise ConfigError(
                f"{folder}: its tokenizer has {len(tokenizer)} tokens, the model knows {len(held.weight)}. "
                "Are they from the same model?"
            )
        about = {"library": "transformers", "folder": str(folder.resolve()), "fingerprint": source.fingerprint(folder)}
        longest = _longest(model.config, tokenizer, config.max_length)
        made = cls(model, tokenizer, pooling=config.pooling, max_length=longest, about=about)
        if made.width < 1:
            raise ConfigError(f"{folder}: its config does not tell the width of the hidden states (`hidden_size`).")
        return made

    def describe(self) -> dict[str, Any]:
        """Return what identifies the encoder."""
        own = {"pooling": self.pooling, "max_length": self.max_length}
        return {**super().describe(), "name": type(self.model).__name__, **self.about, **own}

    def rows(self, data: LabelData) -> Tokens:
        """Return the texts as tokens."""
        if data.texts is None:
            raise DataError("the encoder takes texts, the rows have none. Name their column (--text-column).")
        names = [name for name in self.tokenizer.model_input_names if name in ("input_ids", "token_type_ids")]
        found: dict[str, list[np.ndarray]] = {name: [] for name in names}
        counts: list[int] = []
        with quiet():
            for at in range(0, len(data.texts), AT_ONCE):
                # half of a surrogate pair has no UTF-8, which tokenizers need
                part = [text.encode("utf-8", "replace").decode() for text in data.texts[at : at + AT_ONCE]]
                made = self.tokenizer(part, truncation=True, max_length=self.max_length, padding=False)
                counts += [len(ids) for ids in made["input_ids"]]
                for name in names:
                    joined = [token for ids in made[name] for token in ids]
                    found[name].append(np.array(joined, np.int32))
        padding = {"input_ids": _padding(self.tokenizer), "token_type_ids": self.tokenizer.pad_token_type_id}
        return Tokens(
            {name: np.concatenate([*parts, np.zeros(0, np.int32)]) for name, parts in found.items()},
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            {name: int(padding[name] or 0) for name in names},
            left=self.tokenizer.padding_side == "left",
        )

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the pooled hidden states."""
        model = self.model.get_encoder() if self.model.config.is_encoder_decoder else self.model
        states, mask = model(**inputs).last_hidden_state, inputs["attention_mask"]
        if self.pooling == "mean":
            weight = mask.to(states.dtype).unsqueeze(-1)
            mean: Tensor = (states * weight).sum(1) / weight.sum(1).clamp(min=1)
            return mean
        places = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
        if self.pooling == "first":
            at = places.masked_fill(mask == 0, mask.shape[1]).amin(1)
        else:
            at = places.masked_fill(mask == 0, -1).amax(1)
        picked: Tensor = states[torch.arange(len(at), device=at.device), at]
        return picked

    def save(self, folder: Path) -> None:
        """Write model and tokenizer as transformers does."""
        with quiet():
            self.model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)


def open_model(folder: Path, scratch: bool) -> Any:
    """Open a model of transformers in float32: from its config alone, or with weights from safetensors."""
    transformers = source.needs("transformers")
    safe: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    try:
        with quiet():
            config = transformers.AutoConfig.from_pretrained(folder, **safe)
            if scratch:
                model, missing = transformers.AutoModel.from_config(config, trust_remote_code=False), []
            else:
                model, found = transformers.AutoModel.from_pretrained(
                    folder, config=config, use_safetensors=True, output_loading_info=True, **safe
                )
                missing = [name for name in found["missing_keys"] if "pooler" not in name]
    except Exception as error:  # of the config, the weights or the architecture: many kinds
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{folder}: cannot be opened as a model: {type(error).__name__}: {reason}") from None
    if missing:
        raise ConfigError(
            f"{folder}: its weights lack {len(missing)} tensors of the model, the first is {sorted(missing)[0]}."
        )
    if getattr(model, "pooler", None) is not None:
        model.pooler = None  # a layer for the task that the model was trained on before
    return model.float()


def _tokenizer(folder: Path) -> Any:
    transformers = source.needs("transformers")
    reason = "there is none of " + ", ".join(source.TOKENIZERS)
    if any((folder / name).exists() for name in source.TOKENIZERS):
        try:
            with quiet():
                return transformers.AutoTokenizer.from_pretrained(
                    folder, trust_remote_code=False, local_files_only=True, use_fast=True
                )
        except Exception as error:  # of many kinds, by tokenizer
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    raise ConfigError(f"{folder}: holds no tokenizer that can be read: {reason}. Save it there too.")


def _padding(tokenizer: Any) -> int:
    """Return the number of the token that fills up short texts; any will do, since the mask hides it."""
    found = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return int(found or 0)


def _longest(about: Any, tokenizer: Any, wanted: int) -> int:
    """Return the number of tokens that settings, tokenizer and model allow."""
    bounds = [wanted, int(min(tokenizer.model_max_length, 1 << 30))]
    positions = getattr(about, "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:
        shift = (getattr(about, "pad_token_id", None) or 0) + 1 if about.model_type in SHIFTED else 0
        bounds.append(positions - shift)
    return max(min(bounds), 1)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers, whose warnings are about other uses, and restore its settings afterwards."""
    import warnings

    from transformers import utils

    logging: Any = utils.logging  # its functions have no types
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
