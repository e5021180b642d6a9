"""Descriptions of Debian packages as one stream of bytes, split by source package."""

from __future__ import annotations

import hashlib
import json
import lzma
import random
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

Parts = dict[str, Tensor]


def read(folder: Path) -> Parts:
    """Read `debian_tags/debian_bookworm.jsonl.xz`: one tenth by source package for validation, one for the test."""
    texts: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    with lzma.open(folder / "debian_tags" / "debian_bookworm.jsonl.xz", "rt", encoding="utf8") as file:
        for package in map(json.loads, file):
            tenth = int(hashlib.md5(package["source"].encode()).hexdigest(), 16) % 10
            part = {0: "test", 1: "valid"}.get(tenth, "train")
            texts[part].append(f"{package['name']}. {package['short']}. {package['long']}\n\n")
    for part in texts:  # neighbours in the file are alike: a part of a stream should not be a part of the alphabet
        random.Random(0).shuffle(texts[part])
    return {part: stream("".join(found)) for part, found in texts.items()}


def stream(text: str) -> Tensor:
    return torch.from_numpy(np.frombuffer(text.encode(), np.uint8).copy())


def tiny() -> Parts:
    """Words in random order, for a run of seconds."""
    words = ["apt", "files", "games", "library", "python", "tools", "with", "for", "the", "a", "of", "and"]
    draw = random.Random(0)
    return {part: stream(" ".join(draw.choices(words, k=1000))) for part in ("train", "valid", "test")}


def crops(text: Tensor, n: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return `n` random pieces of the stream and, for each byte, the next one."""
    first = torch.randint(len(text) - length, (n, 1), generator=generator, device=text.device)
    found = text[first + torch.arange(length + 1, device=text.device)].long()
    return found[:, :-1], found[:, 1:]


def pieces(text: Tensor, batch: int, length: int, most: int) -> list[tuple[Tensor, Tensor]]:
    """Return the stream from its beginning in whole batches, at most so many."""
    n = min(most, (len(text) - 1) // (batch * length))
    size = batch * length
    return [
        (
            text[i * size : (i + 1) * size].view(batch, length).long(),
            text[i * size + 1 : (i + 1) * size + 1].view(batch, length).long(),
        )
        for i in range(n)
    ]
