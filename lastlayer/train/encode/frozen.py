"""Features of frozen encoders: computed once, kept in blocks, found again row by row.

The cache of an encoder is a folder of safetensors files, each with the features of some rows and a digest per row of
what the encoder was given (the text, or the bytes of the image). So a process that was stopped goes on where it was,
and other splits, folds and losses find the features of the rows that they share. A file is named by the digest of its
content; a damaged one counts as missing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lastlayer.data import LabelData
from lastlayer.runs import write_atomically
from lastlayer.train.config import Config
from lastlayer.train.encode.encoder import Encoder, digest, encode

BLOCK = 2048  # rows whose features are written at a time
FOLDER = "encoded"


def home(run: Path) -> Path:
    """Return the folder of the cache: in the run, or for a fold or trial in the run or study that it belongs to."""
    for above in list(run.resolve().parents)[:2]:
        if (above / "study.json").exists() or (above / "config.yaml").exists():
            return above / FOLDER
    return run / FOLDER


class Cache:
    """The features of rows by one encoder.

    Args:
        folder: Where the blocks are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of(cls, folder: Path, about: dict[str, Any]) -> Cache:
        """Return the cache of an encoder: encoders that differ in anything have folders of their own."""
        kept = {name: value for name, value in about.items() if name != "folder"}
        return cls(folder / digest(json.dumps(kept, sort_keys=True).encode()).hex())

    def features(self, encoder: Encoder, data: LabelData, config: Config) -> np.ndarray:
        """Return the features of rows, and compute and keep those that are missing."""
        keys = encoder.keys(data)
        out = np.zeros((len(keys), encoder.width), np.float32)
        first = {key: i for i, key in reversed(list(enumerate(keys)))}
        known = self._fill(out, first)
        missing = [i for key, i in first.items() if key not in known]
        for at in range(0, len(missing), BLOCK):
            rows = np.array(sorted(missing)[at : at + BLOCK], np.int64)
            out[rows] = computed(encoder, data.take(rows), config)
            self._write([keys[i] for i in rows], out[rows])
        return out[[first[key] for key in keys]]

    def _fill(self, out: np.ndarray, first: dict[bytes, int]) -> set[bytes]:
        """Copy what the blocks hold to the rows of their digests; return the digests."""
        from safetensors.numpy import load

        known: set[bytes] = set()
        for path in sorted(self.folder.glob("*.safetensors")):
            content = path.read_bytes()
            if digest(content).hex() != path.stem:
                continue
            block = load(content)
            keys = [row.tobytes() for row in block["key"]]
            held = [i for i, key in enumerate(keys) if key in first]
            out[[first[keys[i]] for i in held]] = block["features"][held]
            known.update(keys[i] for i in held)
        return known

    def _write(self, keys: list[bytes], features: np.ndarray) -> None:
        from safetensors.numpy import save

        table = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), 16)
        content = save({"key": np.ascontiguousarray(table), "features": np.ascontiguousarray(features)})
        write_atomically(self.folder / f"{digest(content).hex()}.safetensors", content)


def computed(encoder: Encoder, data: LabelData, config: Config) -> np.ndarray:
    """Return the features of rows by the encoder, on its device."""
    size = max(config.batch_size, 1)
    with torch.inference_mode():
        return encode(encoder, encoder.rows(data), size=size, precision=config.precision).cpu().numpy()
